"""An unfinished fit in a file, so that it survives its process.

The file holds the statistics after a whole block, the number of batches in them, and digests of the
first and the last of these batches. A resumed fit passes over as many batches, compares the two
digests, and begins where the file ends. The blocks that follow are those of a fit in one go, so the
resumed fit ends with the same bits.
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
"""Seconds between two writes, by default."""
_ANEW = "To start the fit again, remove the file or name another one."
T = TypeVar("T")


class Checkpoint:
    """The file of one unfinished fit.

    A fit calls `resume` first, takes its batches from `remaining`, calls `tick` after every block
    and `done` at the end. Every batch that is not in the file is hashed, since any of them may be
    the last of a block. Without a path nothing is done.

    Args:
        path: The path of the file; None for no checkpoint.
        seconds: How often to write it.

    Attributes:
        path: The path of this process's file.
        counted: The number of batches in a file that is resumed.
        pack: Makes a snapshot of statistics, for the file; to be set before the first `tick`.

    Raises:
        ValueError: `seconds` is negative, or is given without a path.
    """

    pack: Callable[[Statistics], Snapshot]

    def __init__(self, path: str | os.PathLike[str] | None, seconds: float) -> None:
        if not seconds >= 0:  # also refuses NaN
            raise ValueError(f"checkpoint_seconds must be zero or more, got {seconds}.")
        if path is None and seconds != SECONDS:
            raise ValueError("checkpoint_seconds needs checkpoint=, the path of a file.")
        self.path = None if path is None else Path(path)
        self.counted = 0
        self._seconds = seconds
        self._written_at = time.monotonic()
        # Digests of the first batch and of the latest two, by number from 1: a block may end
        # before the latest one.
        self._digests: dict[int, str] = {}
        # Digests in the file of the "first" and "last" of its batches.
        self._file_digests: dict[str, str] = {}
        self._request: dict[str, Any] = {}
        self._has_warned = False
        self._unreadable_types: set[str] = set()

    def resume(
        self,
        request: dict[str, Any],
        rank: int,
        size: int,
        restore: Callable[[Snapshot], T],
    ) -> T | None:
        """Read the file, if there is one.

        Args:
            request: Everything in which this fit and that of the file must agree.
            rank: The number of this process among all of the job.
            size: The number of processes of the job. Each has a file of its own.
            restore: Makes an object of the file's snapshot.

        Returns:
            What `restore` made of the file; None without one.

        Raises:
            ValueError: The path cannot be written to, or the file is of another fit.
        """
        self._request = json.loads(json.dumps(request))
        if self.path is not None and size > 1:
            self.path = self.path.with_suffix(f".{rank}-of-{size}{self.path.suffix}")
        if self.path is None or self.path.is_dir() or not self.path.parent.is_dir():
            raise ValueError(f"checkpoint must be a file in a folder that exists, got {self.path}.")
        if not self.path.exists():
            return None
        try:
            snapshot = Snapshot.read(self.path, holds=UNFINISHED)
            with snapshot.opened():
                unfinished = snapshot.header[UNFINISHED]
                file_request = unfinished["asked"]
                require_alike([file_request, self._request], ["The checkpoint", "this call"])
                restored = restore(snapshot)
        except ValueError as error:
            raise ValueError(f"{error} {_ANEW}") from error
        self.counted = unfinished["batches"]
        self._file_digests = {"first": unfinished["first"], "last": unfinished["last"]}
        return restored

    def remaining(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches that are not in the file yet.

        Raises:
            ValueError: The first or last batch in the file differs from the batch of the same
                number here, or there are fewer batches than in the file.
        """
        if self.path is None:
            return batches
        return self._compared(batches)

    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The remaining batches, after a comparison of the others with the file's digests."""
        number = 0
        is_same = True
        for number, batch in enumerate(batches, 1):
            if number == 1 or number >= self.counted:
                self._note(number, batch)
            if number == 1 and self.counted:
                is_same = self._digests[1] == self._file_digests["first"]
            if number == self.counted:
                is_same = is_same and self._digests[number] == self._file_digests["last"]
            if not is_same:
                break
            if number > self.counted:
                yield batch
        if self._unreadable_types:
            notify(
                "The order of the data was checked without the entries of type "
                f"{', '.join(sorted(self._unreadable_types))}, which cannot be compared."
            )
        if not is_same or number < self.counted:
            raise ValueError(
                f"The data, or their order or batch size, differ from those of the {self.counted} "
                f"batches in {self.path}. Use shuffle=False or a seeded generator. {_ANEW}"
            )

    def _note(self, number: int, batch: Any) -> None:
        """Keep the digest of a batch, and drop the one that is no longer needed."""
        digest = hashlib.sha256()
        self._unreadable_types |= _digest(batch, digest, {})
        # The first, the latest and the one before it stay; 0 is no batch's number.
        outdated = number - 2 if number > 3 else 0
        self._digests.pop(outdated, None)
        self._digests[number] = digest.hexdigest()

    def tick(self, batches: int, statistics: Statistics, look: Callable[[], None]) -> None:
        """Write the file, if it is time.

        Args:
            batches: The number of batches in the statistics.
            statistics: The statistics so far.
            look: Raises if the statistics hold NaN; called before they are written.
        """
        if self.path is None or time.monotonic() - self._written_at < self._seconds:
            return
        look()
        snapshot = self.pack(statistics)
        unfinished = {
            "batches": batches,
            "first": self._digests[1],
            "last": self._digests[batches],
            "asked": self._request,
        }
        snapshot = replace(snapshot, header={**snapshot.header, UNFINISHED: unfinished})
        self._try(snapshot.write)
        self._written_at = time.monotonic()

    def done(self) -> None:
        """Remove the file, where there is one: the fit is complete."""
        self._try(remove)

    def _try(self, change: Callable[[Path], None]) -> None:
        """Change the file. A full disk must not end the fit: it warns, once."""
        if self.path is None:
            return
        try:
            change(self.path)
        except OSError as error:
            if not self._has_warned:
                notify(
                    f"The checkpoint {self.path} could not be updated ({error}). The fit continues."
                )
            self._has_warned = True


def _digest(value: Any, digest: Any, visited: dict[int, Any]) -> set[str]:
    """Add the contents of a batch to a hash, each object once.

    Args:
        value: The batch, or something in it.
        digest: The hash, of `hashlib`.
        visited: Objects that were added before, by their ids.

    Returns:
        The names of the types whose contents could not be read.
    """
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        digest.update(repr(value).encode())
        return set()
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        if tensor.layout is not torch.strided or tensor.is_nested:
            # Sparse and nested tensors are known by one hash of all their values.
            return _digest(tensor_hashes([tensor]), digest, visited)
        tensor = tensor.resolve_conj().resolve_neg()
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return set()
    if hasattr(value, "__array__"):
        array = value.__array__()
        digest.update(f"{array.dtype} {array.shape}".encode())
        if array.dtype.hasobject:
            return _digest(array.tolist(), digest, visited)
        digest.update(array.tobytes())
        return set()
    if id(value) in visited:  # an object may lead back to itself
        return set()
    visited[id(value)] = value  # the reference keeps its id from being used again
    contents = _contents(value)
    if contents is None:
        digest.update(f"{type(value).__name__} None".encode())
        return {type(value).__name__}
    digest.update(f"{type(value).__name__} {len(contents)}".encode())
    unreadable: set[str] = set()
    for entry in contents:
        unreadable |= _digest(entry, digest, visited)
    return unreadable


def _contents(value: Any) -> list[Any] | None:
    """What a container or an object holds; None where that cannot be told."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return list(value)
    attributes: dict[str, Any] = {}
    for base in type(value).__mro__:
        for name in getattr(base, "__slots__", ()):
            if hasattr(value, name):
                attributes[name] = getattr(value, name)
    attributes.update(getattr(value, "__dict__", {}))
    if not attributes:
        return None
    return [*attributes, *attributes.values()]
