"""An unfinished fit in a file, so that it survives its process.

The file holds the statistics after a whole block, the number of batches in them, and digests of the
first and the last of these. A resumed fit passes over as many batches, compares the two, and begins
where the file ends: the blocks that follow are those of a fit in one go, so that it ends with the
same bits.
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
from ..notices import notify
from .merging import require_alike
from .statistics.statistics import Statistics

SECONDS = 60.0
_ANEW = "To begin the fit anew, remove the file or name another."
T = TypeVar("T")


class Checkpoint:
    """The file of one fit, if it has a path: `resume`, `passing` all batches, `tick`, then `done`.

    It is written when so many seconds have passed since it last was. Every batch that is not in the file is hashed,
    since any of them may be the last of a block. Without a path nothing is done.

    Attributes:
        counted: the number of batches in a file that is resumed.
        snapshot: gives what to write of statistics; to be set before the first `tick`.
    """

    snapshot: Callable[[Statistics], Snapshot]

    def __init__(self, path: str | os.PathLike[str] | None, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"checkpoint_seconds must be zero or more, got {seconds}.")
        if path is None and seconds != SECONDS:
            raise ValueError("checkpoint_seconds needs checkpoint=, the path of a file.")
        self.path = None if path is None else Path(path)
        self.counted = 0
        self._seconds = seconds
        self._written_at = time.monotonic()
        # Digests of the first batch and of the latest two: a block may end before the latest one.
        self._digests: dict[int, str] = {}
        self._expected: dict[str, str] = {}
        self._asked: dict[str, Any] = {}
        self._said = False
        self._unreadable: set[str] = set()

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
                unfinished = given.header[UNFINISHED]
                asked_before = unfinished["asked"]
                require_alike([asked_before, self._asked], ["The checkpoint", "this call"])
                begun = made(given)
        except ValueError as error:
            raise ValueError(f"{error} {_ANEW}") from error
        self.counted = unfinished["batches"]
        self._expected = {"first": unfinished["first"], "last": unfinished["last"]}
        return begun

    def passing(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches that are not counted yet; the first and last that are must be what they were.

        Raises:
            ValueError: they are not, or there are fewer.
        """
        return batches if self.path is None else self._compared(batches)

    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        number = 0
        same = True
        for number, batch in enumerate(batches, 1):
            if number == 1 or number >= self.counted:
                self._note(number, batch)
            if number == 1 and self.counted:
                same = self._digests[1] == self._expected["first"]
            if number == self.counted:
                same = same and self._digests[number] == self._expected["last"]
            if not same:
                break
            if number > self.counted:
                yield batch
        if self._unreadable:
            notify(
                "The order of the data was checked without what their batches hold as "
                f"{', '.join(sorted(self._unreadable))}, which cannot be compared."
            )
        if not same or number < self.counted:
            raise ValueError(
                f"The data, or their order or batch size, are not those of the {self.counted} "
                f"batches in {self.path}. Use shuffle=False or a seeded generator. {_ANEW}"
            )

    def _note(self, number: int, batch: Any) -> None:
        """Keep the digest of a batch, in place of those that are no longer needed."""
        total = hashlib.sha256()
        self._unreadable |= _digest(batch, total, {})
        self._digests.pop(number - 2 if number > 3 else 0, None)
        self._digests[number] = total.hexdigest()

    def tick(self, batches: int, statistics: Statistics, look: Callable[[], None]) -> None:
        """Write the statistics of so many batches if it is time, after a last `look` at them."""
        if self.path is None or time.monotonic() - self._written_at < self._seconds:
            return
        look()
        snapshot = self.snapshot(statistics)
        unfinished = {
            "batches": batches,
            "first": self._digests[1],
            "last": self._digests[batches],
            "asked": self._asked,
        }
        self._try(replace(snapshot, header={**snapshot.header, UNFINISHED: unfinished}).write)
        self._written_at = time.monotonic()

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
