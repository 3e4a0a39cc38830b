"""Which rows stand in both of two data sets, in constant memory.

Every row is hashed to 63 bits; a sketch keeps the smallest hashes (bottom-k sampling). Two data
sets share a row only if they share its hash, so the hashes below both thresholds decide it:
exactly while the first set has at most `SIZE` distinct rows, by sampling beyond. Like the Gram
the sketch does not depend on order or batching, and two sketches merge.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

SIZE = 1 << 16
_CHUNK = 4096
_ODD = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_MIX = -4658895280553007687


class RowSketch:
    """The smallest `SIZE` row hashes of a data set.

    Attributes:
        hashes: sorted distinct int64.
        limit: every hash of the data set below it is in `hashes`.
    """

    def __init__(self, hashes: Tensor | None = None, limit: int | None = None) -> None:
        self.hashes = torch.empty(0, dtype=torch.int64) if hashes is None else hashes
        self.limit = torch.iinfo(torch.int64).max if limit is None else limit
        self._pending: list[Tensor] = []

    def add(self, hashes: Tensor) -> None:
        """Take rows in."""
        hashes = hashes.cpu()
        self._pending.append(hashes[hashes < self.limit])
        if sum(map(len, self._pending)) >= SIZE:
            self._settle()

    def remove(self, hashes: Tensor) -> None:
        """Take rows out."""
        self._settle()
        self.hashes = self.hashes[~torch.isin(self.hashes, hashes.cpu())]

    def merge(self, other: RowSketch) -> None:
        """Take another data set's rows in."""
        other._settle()
        self.limit = min(self.limit, other.limit)
        self._pending.append(other.hashes)
        self._settle()

    def shared(self, hashes: Tensor) -> float:
        """How many of these rows the sketched data set holds (an estimate beyond `SIZE`)."""
        self._settle()
        hashes = hashes.cpu()
        seen = hashes[hashes < self.limit]
        if not len(seen):
            return 0.0
        return float(torch.isin(seen, self.hashes).sum()) * len(hashes) / len(seen)

    def clone(self) -> RowSketch:
        """An independent copy."""
        self._settle()
        return RowSketch(self.hashes.clone(), self.limit)

    def state(self) -> dict[str, Tensor]:
        """As tensors, for files."""
        self._settle()
        return {"hashes": self.hashes, "limit": torch.tensor([self.limit])}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> RowSketch:
        """The sketch that `state` came from."""
        return cls(state["hashes"].cpu(), int(state["limit"]))

    def _settle(self) -> None:
        if not self._pending:
            return
        distinct = torch.unique(torch.cat([self.hashes, *self._pending]))
        distinct = distinct[distinct < self.limit]
        self._pending = []
        if len(distinct) > SIZE:
            self.limit = int(distinct[SIZE])
            distinct = distinct[:SIZE].clone()
        self.hashes = distinct


def row_hashes(values: Iterable[Any], rows: int) -> Tensor | None:
    """One hash per row over all tensors given, (rows,); None if a value has no such rows."""
    total: Tensor | None = None
    for position, value in enumerate(values):
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != rows:
            return None
        part = _hash(value.detach(), 2 * position + 1)
        total = part if total is None else total + part
    return None if total is None else _mixed(total) & torch.iinfo(torch.int64).max


def tensor_hash(tensor: Tensor, salt: int = 1) -> int:
    """One hash of all of a tensor's values; the same on every device and for lossless casts."""
    flat = tensor.detach().reshape(-1)
    flat = flat.to(torch.float64) if flat.is_floating_point() else flat
    total = 0
    for start in range(0, len(flat), 1 << 22):
        chunk = flat[start : start + (1 << 22)]
        position = torch.arange(start, start + len(chunk), device=flat.device)
        total += int((_mixed(_words(chunk[:, None])[:, 0] + position * _ODD) * salt).sum())
    return (total + len(flat)) % (1 << 63)


def _hash(tensor: Tensor, salt: int) -> Tensor:
    """Sum over a row's words of multiplier times word, with wrap-around, chunk by chunk."""
    words = tensor.reshape(len(tensor), -1)
    total = torch.zeros(len(words), dtype=torch.int64, device=words.device)
    for start in range(0, words.shape[1], _CHUNK):
        chunk = _words(words[:, start : start + _CHUNK])
        index = torch.arange(start, start + chunk.shape[1], device=words.device)
        multipliers = _mixed((index + 1) * _ODD + salt) | 1
        total += (chunk * multipliers).sum(1)
    return total


def _words(values: Tensor) -> Tensor:
    """The bits of the values as int64, with -0.0 equal to 0.0."""
    if values.is_complex():
        values = torch.view_as_real(values).flatten(1)
    if not values.is_floating_point():
        return values.to(torch.int64)
    values = values + 0.0
    if values.dtype == torch.float64:
        return values.contiguous().view(torch.int64)
    return values.to(torch.float32).contiguous().view(torch.int32).to(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    """A bijection of int64 that spreads every bit."""
    words = (words ^ (words >> 30)) * _MIX
    words = (words ^ (words >> 27)) * _ODD
    return words ^ (words >> 31)
