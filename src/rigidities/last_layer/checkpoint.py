"""An unfinished fit in a file, so that it survives its process.

A resumed fit begins where the file ends and equals one in one go to the last bit: batches that are
counted are passed over, and a digest tells whether they are the same, in the same order.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..data.sketch import tensor_hashes
from ..data.storage import UNFINISHED, Snapshot, remove
from ..notices import notify, require_kinds
from .accumulation import Statistics
from .merging import require_alike

SECONDS = 60.0
_ANEW = "To begin the fit anew, remove the file or name another."
T = TypeVar("T")


class Checkpoint:
    """The file of one fit, if it has a path: `resume`, `passing` all batches, `tick`, then `done`.

    It is written after so many seconds or batches. `counted` are the batches in a file that is
    resumed; `snapshot`, what to write of statistics, is set before the first `tick`.
    """

    snapshot: Callable[[Statistics], Snapshot]

    def __init__(
        self, path: str | os.PathLike[str] | None, seconds: float, batches: int | None
    ) -> None:
        if not seconds > 0 or (batches is not None and batches < 1):
            got = f"{seconds} and {batches}"
            raise ValueError(f"checkpoint_seconds and _batches must be positive, got {got}.")
        if path is None and (seconds != SECONDS or batches is not None):
            raise ValueError("checkpoint_seconds and checkpoint_batches need checkpoint=, a path.")
        self.path = None if path is None else Path(path)
        self.counted = self._seen = self._written = 0
        self._seconds, self._batches, self._last = seconds, batches, time.monotonic()
        self._digests, self._expected = ("", ""), ""  # before the last batch and after it
        self._asked, self._said, self._blind = dict[str, Any](), False, set[str]()

    def resume(
        self, asked: dict[str, Any], part: tuple[int, int], made: Callable[[Snapshot], T]
    ) -> T | None:
        """What is made of the file, if any, of the fit `asked` for; `part` is (rank, size)."""
        self._asked = json.loads(json.dumps(asked))
        if self.path is not None and part[1] > 1:
            self.path = self.path.with_suffix(f".{part[0]}-of-{part[1]}{self.path.suffix}")
        if self.path is None or self.path.is_dir() or not self.path.parent.is_dir():
            raise ValueError(f"checkpoint must be a file in a folder that exists, got {self.path}.")
        if not self.path.exists():
            return None
        try:
            given = Snapshot.read(self.path, holds=UNFINISHED)
            with given.opened():
                had = given.header[UNFINISHED]
                require_kinds(had, {"batches": int, "digest": str, "asked": dict}, "the checkpoint")
                require_alike([had["asked"], self._asked], ["The checkpoint", "this call"])
                found = made(given)
        except ValueError as error:
            raise ValueError(f"{error} {_ANEW}") from error
        self.counted, self._expected, self._written = had["batches"], had["digest"], had["batches"]
        return found

    def passing(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches that are not counted yet; those that are must be what they were."""
        for self._seen, batch in enumerate(batches, 1):
            if self.path is not None:
                chain = hashlib.sha256(self._digests[1].encode())
                self._blind |= _digest(batch, chain, {})
                self._digests = self._digests[1], chain.hexdigest()
            if self._seen > self.counted:
                yield batch
            elif self._seen == self.counted and self._digests[1] != self._expected:
                self._seen = -1
                break
        if self._blind:
            notify(
                f"The order of the data was checked without what their batches hold as "
                f"{', '.join(sorted(self._blind))}, which cannot be compared."
            )
        if self._seen < self.counted:
            raise ValueError(
                f"The data, or their order or batch size, are not those of the {self.counted} "
                f"batches in {self.path}. Use shuffle=False or a seeded generator. {_ANEW}"
            )

    def tick(self, counted: int, statistics: Statistics | None, look: Callable[[], None]) -> None:
        """Write if it is time, after a last `look`: of all batches seen, or all but the last."""
        late = time.monotonic() - self._last >= self._seconds
        many = self._batches is not None and counted - self._written >= self._batches
        if self.path is None or statistics is None or not (late or many):
            return
        look()
        given, digest = self.snapshot(statistics), self._digests[counted - self._seen + 1]
        own = {"batches": counted, "digest": digest, "asked": self._asked}
        self._try(replace(given, header=given.header | {UNFINISHED: own}).write)
        self._last, self._written = time.monotonic(), counted

    def done(self) -> None:
        """Remove the file, where there is one: the fit is complete."""
        self._try(remove)

    def _try(self, change: Callable[[Path], None]) -> None:
        try:
            if self.path is not None:
                change(self.path)
        except OSError as error:
            if not self._said:
                notify(f"The checkpoint {self.path} stays as it was ({error}). The fit goes on.")
            self._said = True


def _digest(value: Any, total: Any, met: dict[int, Any]) -> set[str]:
    """Add what a batch holds to a hash, each object once; the types of what could not be read."""
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        total.update(repr(value).encode())
        return set()
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        whole = value if value.layout is torch.strided and not value.is_nested else None
        value = tensor_hashes([value]) if whole is None else whole.resolve_conj().resolve_neg()
    if isinstance(value, Tensor):
        total.update(f"{value.dtype} {tuple(value.shape)}".encode())
        total.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return set()
    if hasattr(value, "__array__"):
        array = value.__array__()
        total.update(f"{array.dtype} {array.shape}".encode())
        total.update(b"" if array.dtype.hasobject else array.tobytes())
        return _digest(array.tolist(), total, met) if array.dtype.hasobject else set()
    if id(value) in met:  # an object may lead back to itself
        return set()
    met[id(value)] = value  # kept, so that nothing else gets its number
    parts = _parts(value)
    total.update(f"{type(value).__name__} {None if parts is None else len(parts)}".encode())
    if parts is None:
        return {type(value).__name__}
    return set().union(*(_digest(part, total, met) for part in parts))


def _parts(value: Any) -> list[Any] | None:
    """What a container or an object holds; None where that cannot be told."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return list(value)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    held |= getattr(value, "__dict__", {})
    return [*held, *held.values()] or None
