"""Which rows stand in both of two data sets, in constant memory.

Every row is hashed to 63 bits; a sketch keeps the smallest hashes (bottom-k sampling). Two data
sets share a row only if they share its hash, so the hashes below both thresholds decide it:
exactly while the first set has at most `SIZE` distinct rows, by sampling beyond. Like the Gram
the sketch does not depend on order or batching, and two sketches merge.
"""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from operator import mul
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..models.shadow import plain_parts
from ..notices import require

SIZE = 1 << 15
NO_LIMIT = (1 << 63) - 1
"""Every hash is below it, or equal."""
_CHUNK = 4096
_PARTS = 1024  # that may wait: tensors of a row or two take more memory than their numbers
_PIECE = 1 << 22
_ODD = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_MIX = -4658895280553007687


S = TypeVar("S", bound="RowSketch")


class RowSketch:
    """The smallest `SIZE` row hashes of a data set, and what else is kept of those rows.

    Attributes:
        hashes: sorted distinct int64.
        counts: how many rows have each hash.
        limit: every hash of the data set below it is in `hashes`.
        columns: what goes with each hash, by name, (n, ...); its first row's.
        size: how many hashes to keep at most.
    """

    def __init__(
        self, hashes: Tensor | None = None, counts: Tensor | None = None, limit: int = NO_LIMIT
    ) -> None:
        self.hashes = torch.empty(0, dtype=torch.int64) if hashes is None else hashes
        self.counts = torch.ones_like(self.hashes) if counts is None else counts
        self.limit, self.size = limit, SIZE
        self.columns: dict[str, Tensor] = {}
        self._pending: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
        self._waiting = 0
        self._lost: Tensor | None = None  # the lowest hash that could not be taken in

    def add(self, hashes: Tensor, **columns: Any) -> None:
        """Take rows in."""
        self._queue(hashes, torch.ones_like(hashes), columns)

    def merge(self, other: RowSketch) -> None:
        """Take another data set's rows in."""
        other.settle()
        self.limit = min(self.limit, other.limit)
        self._queue(other.hashes, other.counts, other.columns)

    def without(self: S, other: RowSketch) -> tuple[S, int, int]:
        """What is left without another's rows; how many were lacking, and how many were judged."""
        left, other = self.clone(), other.clone()
        left.limit = min(left.limit, other.limit)
        left._pending = [(other.hashes, -other.counts, other.columns)]
        judged = int(other.counts[other.hashes < left.limit].sum())
        return left, left.settle(), judged

    def overlap(self, other: RowSketch) -> tuple[int, int, int]:
        """How many of another's rows stand here too, once there, and how many could be judged."""
        self.settle()
        other.settle()
        mine, theirs = self.hashes.cpu(), other.hashes.cpu()
        judged = theirs < min(self.limit, other.limit)
        both, counts = judged & torch.isin(theirs, mine), other.counts.cpu()
        once = int((counts[both] == 1).sum())
        return int(counts[both].sum()), once, int(counts[judged].sum())

    def shared(self, hashes: Tensor) -> float:
        """How many of these rows the sketched data set holds (an estimate beyond `SIZE`)."""
        self.settle()
        hashes = hashes.to(self.hashes.device)
        seen = hashes[hashes < self.limit]
        if not len(seen):
            return 0.0
        return float(torch.isin(seen, self.hashes).sum()) * len(hashes) / len(seen)

    def recognised(self, hashes: Tensor) -> Tensor:
        """Of the hashes (C, N) that rows may have, those held here; of others the largest."""
        self.settle()
        held = torch.isin(hashes, self.hashes.to(hashes.device))
        first = hashes.gather(0, held.to(torch.int8).argmax(0, keepdim=True))[0]
        return torch.where(held.any(0), first, hashes.amax(0))  # judged only if all of them are

    def clone(self: S) -> S:
        """A copy that goes its own way; the tensors, which are never written to, are shared."""
        self.settle()
        other = copy.copy(self)
        other._pending = []
        return other

    def state(self) -> dict[str, Tensor]:
        """As tensors, for files."""
        self.settle()
        return {"hashes": self.hashes, "counts": self.counts, "limit": torch.tensor([self.limit])}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> RowSketch:
        """The sketch that `state` came from; refused where it came from none."""
        hashes, counts, limit = parts = [state[name] for name in ("hashes", "counts", "limit")]
        whole = all(part.dtype == torch.int64 and part.ndim == 1 for part in parts)
        require(whole and hashes.shape == counts.shape and len(limit) == 1, "the rows' hashes")
        bounded = torch.cat([hashes.new_tensor([-1]), hashes, limit])
        rising = bool((bounded[1:] > bounded[:-1]).all())
        require(rising and bool((counts > 0).all()), "the rows' hashes")
        return cls(hashes, counts, int(limit))

    @property
    def _patience(self) -> int:
        """How many rows may wait: a sort for few costs as much, and one for many takes memory."""
        return (32 if self._pending[-1][0].is_cuda else 8) * self.size

    def _queue(self, hashes: Tensor, counts: Tensor, columns: dict[str, Tensor]) -> None:
        self._pending.append((hashes, counts, columns))
        self._waiting += hashes.numel()
        if self._waiting >= self._patience or len(self._pending) >= _PARTS:
            self.settle()

    def settle(self) -> int:
        """Merge the waiting hashes in, where they were made; how many to remove were lacking."""
        if not self._pending:
            return 0
        device = self._pending[-1][0].device
        parts = zip((self.hashes, self.counts, self.columns), *self._pending, strict=True)
        hashes, counts = (torch.cat([t.to(device) for t in next(parts)]) for _ in range(2))
        if self._lost is not None:
            self.limit, self._lost = min(self.limit, int(self._lost)), None
        below = (hashes < self.limit).nonzero()[:, 0]
        distinct, index = torch.unique(hashes[below], return_inverse=True)
        total = torch.zeros_like(distinct).index_add_(0, index, counts[below])
        first = torch.zeros_like(distinct)
        first.scatter_reduce_(0, index, below, "amin", include_self=False)
        held = (total > 0).nonzero()[:, 0]
        if len(held) > self.size:
            self.limit = int(distinct[held[self.size]])
        held = held[: self.size]
        self.columns = _joined(next(parts), first[held])
        self.hashes, self.counts = distinct[held], total[held]
        self._pending, self._waiting = [], 0
        return -int(total.clamp(max=0).sum())


def _joined(parts: Sequence[dict[str, Tensor]], index: Tensor) -> dict[str, Tensor]:
    """Rows of columns that come in parts, one after the other; the first may have none yet."""
    parts = [part for part in parts if part]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("Rows with and without a sample weight do not mix: weigh all or none.")
    whole = {k: torch.cat([p[k].to(index.device) for p in parts]) for k in (parts or [{}])[0]}
    return {k: column.index_select(0, index) for k, column in whole.items()}  # faster than [index]


def row_hashes(values: Iterable[Any], rows: int) -> Tensor | None:
    """One hash per row over all tensors given, (rows,); None if a value has no such rows."""
    total: Tensor | None = None
    for position, value in enumerate(values):
        plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
        if not plain or value.shape[:1] != (rows,):
            return None
        part = _products(value.detach(), position)
        total = part if total is None else total + part
    return None if total is None else _mixed(total) & NO_LIMIT


def hashed_normals(hashes: Tensor, keys: Tensor) -> Tensor:
    """From N(0, 1), a number for each pair of a row's hash and a key, int64 that broadcast."""
    levels = (_mixed(_mixed(hashes) + keys) & NO_LIMIT) >> 10  # 53 bits
    numbers: Tensor = torch.special.ndtri((levels.to(torch.float64) + 0.5) / 2**53)
    return numbers


def near_hashes(
    features: Tensor, target: Tensor | None, width: float, held: RowSketch | None
) -> Tensor:
    """One hash per row (N,) of a target and of features that are known up to rounding.

    Of the features' size and four directions, in cells of a width well above the rounding. Another
    pass may find a row beyond a near boundary: of the hashes it may have, the one `held` is taken.
    """
    flat = features.detach().flatten(1).to(torch.float64)
    size = torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=1e-300)
    index = torch.arange(1, 4 * flat.shape[1] + 1, device=flat.device).reshape(-1, 4)
    places = torch.cat([size.log2(), flat @ (_mixed(index).double() / 2**63) / size], 1)
    places /= width
    rest = 0 if target is None else _products(target.detach(), 1)
    shifts = [(0.0,) * 5] if held is None else list(product((-0.25, 0.25), repeat=5))
    cells = [(places + places.new_tensor(shift)).floor().to(torch.int64) for shift in shifts]
    hashes = torch.stack([_mixed(_products(cell, 0) + rest) & NO_LIMIT for cell in cells])
    return hashes[0] if held is None else held.recognised(hashes)


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of tensors by name, 16 hexadecimal digits; see `tensor_hashes`."""
    named = list(named)
    hashes = tensor_hashes([tensor for _, tensor in named])
    factors = (2 * zlib.crc32(name.encode()) + 1 for name, _ in named)
    return f"{sum(map(mul, hashes, factors)) % (1 << 64):016x}"


def tensor_hashes(tensors: Sequence[Tensor]) -> list[int]:
    """One hash of all of each tensor's values; the same on every device and for lossless casts."""
    groups: dict[tuple[torch.device, int, int], list[tuple[int, int, Tensor]]] = defaultdict(list)
    sizes, done = [0] * len(tensors), 0
    for i, tensor in enumerate(tensors):
        for j, part in enumerate(plain_parts(tensor)):
            flat = part.detach().resolve_conj()
            flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
            sizes[i] += (2 * j + 1) * flat.numel()
            for number, piece in enumerate(torch.split(flat, _PIECE)):
                groups[flat.device, number, done // _PIECE].append((i, 2 * j + 1, piece))
                done += piece.numel()
    totals = {device: torch.tensor(sizes).to(device) * 0 for device, _, _ in groups}
    for (device, number, _), group in groups.items():
        totals[device].index_add_(0, *_row_hashes(group, number))
    read = [total.tolist() for total in totals.values()]
    return [sum(several) % (1 << 63) for several in zip(sizes, *read, strict=True)]


def _row_hashes(group: list[tuple[int, int, Tensor]], number: int) -> tuple[Tensor, Tensor]:
    """Owners and hashes of the rows of (owner, factor, piece), pieces of this number."""
    owners, factors, pieces = zip(*group, strict=True)
    rows, device = [-(-piece.numel() // 64) for piece in pieces], pieces[0].device
    words = torch.zeros(sum(rows), 64, dtype=torch.int64, device=device)
    for space, piece in zip(torch.split(words, rows), pieces, strict=True):
        kind = torch.float64 if piece.is_floating_point() else torch.int64
        space.view(kind).view(-1)[: piece.numel()].copy_(piece)
    given = torch.tensor([owners, factors, rows]).to(device)
    owner, factor, _ = given.repeat_interleave(given[2], dim=1, output_size=len(words))
    position = torch.cat([torch.arange(1, n + 1, device=device) for n in rows])
    return owner, _mixed(_products(words, number)) * _mixed(position * _ODD) * factor


def _products(tensor: Tensor, position: int) -> Tensor:
    """Dot product of each row's words with random odd 64-bit integers, modulo 2^64.

    Integer sums depend neither on the order nor on the batch or device.
    """
    if not tensor.numel():  # rows of no numbers
        return torch.zeros(tensor.shape[0], dtype=torch.int64, device=tensor.device)
    words = _words(tensor.reshape(tensor.shape[0], -1))
    parts = []
    for start in range(0, words.shape[1], _CHUNK):
        chunk = words[:, start : start + _CHUNK]
        made = _multipliers.__wrapped__ if torch.compiler.is_compiling() else _multipliers
        multipliers = made(position, start, chunk.shape[1], words.device)
        fused = words.device.type == "cpu" and not torch.compiler.is_compiling()
        parts.append(torch.mv(chunk, multipliers) if fused else (chunk * multipliers).sum(1))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


@lru_cache(maxsize=64)
def _multipliers(position: int, start: int, count: int, device: torch.device) -> Tensor:
    """Fixed pseudo-random odd integers, (count,)."""
    index = torch.arange(start + 1, start + count + 1)
    return (_mixed(_mixed(index) + torch.tensor(position) * _ODD) | 1).to(device)


def _words(values: Tensor) -> Tensor:
    """The bits of each row as int64, two 32-bit words in one where they come in pairs.

    A product modulo 2^64 keeps little of a word that ends in many zeros, as those of small whole
    numbers do, so the high half is mixed into the low one.
    """
    if values.is_complex():
        values = torch.view_as_real(values).flatten(1)
    if values.is_floating_point():
        values = values if values.dtype == torch.float64 else values.to(torch.float32)
    else:
        values = values.to(torch.int64)
    values = values.contiguous()
    if values.element_size() * values.shape[1] % 8:
        return values.view(torch.int32).to(torch.int64)
    pairs = values.view(torch.int64)
    return (pairs >> 32).mul_(_ODD).add_(pairs)


def _mixed(words: Tensor) -> Tensor:
    """A bijection of int64 that spreads every bit."""
    words = (words ^ (words >> 30)) * _MIX
    words = (words ^ (words >> 27)) * _ODD
    return words ^ (words >> 31)
