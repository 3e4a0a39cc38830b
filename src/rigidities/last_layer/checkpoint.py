"""An unfinished fit in a file, so that it survives its process.

A resumed fit begins where the file ends and equals one in one go to the last bit: batches that are
counted are passed over, and a digest tells whether they are the same, in the same order.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

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
        if self.path is not None and (self.path.is_dir() or not self.path.parent.is_dir()):
            raise ValueError(f"checkpoint must be a file in a folder that exists, got {path}.")
        self.counted = self._seen = self._written = 0
        self._seconds, self._batches, self._last = seconds, batches, time.monotonic()
        self._digests, self._expected = ("", ""), ""  # before the last batch and after it
        self._asked, self._said = dict[str, Any](), False

    def resume(
        self, asked: dict[str, Any], part: tuple[int, int], made: Callable[[Snapshot], T]
    ) -> T | None:
        """What is made of the file, if any, of the fit `asked` for; `part` is (rank, size)."""
        self._asked = json.loads(json.dumps(asked))
        if self.path is not None and part[1] > 1:
            self.path = self.path.with_suffix(f".{part[0]}-of-{part[1]}{self.path.suffix}")
        if self.path is None or not self.path.exists():
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
                chain = self._digests[1] + _text(batch)
                self._digests = self._digests[1], hashlib.sha256(chain.encode()).hexdigest()
            if self._seen > self.counted:
                yield batch
            elif self._seen == self.counted and self._digests[1] != self._expected:
                self._seen = -1
                break
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


def _text(batch: Any) -> str:
    """A batch as text: tensors by digest, objects by what they hold, each once."""
    met: set[int] = set()

    def held(value: Any) -> Any:
        if not hasattr(value, "__array__"):
            known = id(value) in met  # an object may lead back to itself
            met.add(id(value))
            return None if known else getattr(value, "__dict__", None)
        try:
            tensor = torch.as_tensor(value).detach().cpu()
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        except (TypeError, RuntimeError):  # sparse, or an array of objects
            return None
        return [str(tensor.dtype), tensor.shape, hashlib.sha256(content).hexdigest()]

    return json.dumps(batch, default=held, skipkeys=True, check_circular=False)
