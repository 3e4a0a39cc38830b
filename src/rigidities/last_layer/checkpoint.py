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
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..data.storage import UNFINISHED, Snapshot, remove
from ..notices import notify, require_kinds

SECONDS = 60.0
_ANEW = "To begin the fit anew, remove the file or name another."
T = TypeVar("T")


class Checkpoint:
    """The file of one fit, if it has a path: `resume`, `passing` all batches, `tick`, then `done`.

    It is written after so many seconds or batches. `part` is the rank and size of a job whose
    processes have a file each; `counted` are the batches in a file that is resumed; `snapshot`,
    what to write of statistics, is set before the first `tick`.
    """

    snapshot: Callable[[Any], Snapshot]

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        seconds: float = SECONDS,
        batches: int | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        if not seconds > 0 or (batches is not None and batches < 1):
            got = f"{seconds} and {batches}"
            raise ValueError(f"checkpoint_seconds and _batches must be positive, got {got}.")
        if path is None and (seconds != SECONDS or batches is not None):
            raise ValueError("checkpoint_seconds and checkpoint_batches need checkpoint=, a path.")
        self.path = own = None if path is None else Path(path)
        if own is not None and (own.is_dir() or not own.parent.is_dir()):
            raise ValueError(f"checkpoint must be a file in a folder that exists, got {own}.")
        if own is not None and part is not None:
            self.path = own.with_name(f"{own.stem}.{part[0]}-of-{part[1]}{own.suffix}")
        self.counted = self._seen = self._written = 0
        self._seconds, self._batches, self._last = seconds, batches, time.monotonic()
        self._digests, self._expected = ("", ""), ""  # before the last batch and after it
        self._fit, self._said = dict[str, str](), False

    def resume(self, fit: Mapping[str, Any], made: Callable[[Snapshot], T]) -> T | None:
        """What is made of the file, if there is one; refused unless it is of this `fit`."""
        self._fit = {what: _text(value) for what, value in fit.items()}
        if self.path is None or not self.path.exists():
            return None
        try:
            given = Snapshot.read(self.path, holds=UNFINISHED)
            with given.opened():
                own = given.header[UNFINISHED]
                require_kinds(own, {"batches": int, "digest": str, "fit": dict}, "the checkpoint")
                for what, mine in self._fit.items():
                    if (theirs := own["fit"].get(what)) != mine:
                        both = f"{theirs!s:.200}, now {mine:.200}"
                        raise ValueError(f"it was begun with another {what}: {both}.")
                found = made(given)
        except ValueError as error:
            raise ValueError(f"{error} To resume a fit, give all as it was. {_ANEW}") from error
        self.counted, self._expected, self._written = own["batches"], own["digest"], own["batches"]
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
                break
        else:
            if self._seen >= self.counted:
                return
        raise ValueError(
            f"{self.path} counts {self.counted} batches that are not those given here: the data, "
            "or their order or batch size, are not those of the checkpoint. Use shuffle=False or "
            f"a seeded generator. {_ANEW}"
        )

    def tick(self, counted: int, statistics: Any, look: Callable[[], None]) -> None:
        """Write if it is time, after a last `look`, so many batches being in the statistics.

        Those are all that were seen, or all but the last.
        """
        late = time.monotonic() - self._last >= self._seconds
        many = self._batches is not None and counted - self._written >= self._batches
        if self.path is None or not (late or many):
            return
        look()
        given, digest = self.snapshot(statistics), self._digests[counted - self._seen + 1]
        own = {"batches": counted, "digest": digest, "fit": self._fit}
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


def _text(value: Any) -> str:
    """A setting or a batch: tensors by digest, functions by name, objects by what they hold."""
    return json.dumps(value, default=_held, skipkeys=True)


def _held(value: Any) -> Any:
    if hasattr(value, "__array__"):
        try:
            tensor = torch.as_tensor(value).detach().cpu()
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            return [str(tensor.dtype), tensor.shape, hashlib.sha256(content).hexdigest()]
        except (TypeError, RuntimeError):  # sparse, or an array of objects
            return None
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    own = getattr(value, "__dict__", {}).items()  # flags may change with use
    kept = {k: v for k, v in own if not (k.startswith("_") and isinstance(v, bool))}
    return [type(value), kept]
