"""Which rows stand in both of two data sets, in constant memory.

Every row is hashed to 63 bits; a sketch keeps the smallest hashes (bottom-k sampling). Two data
sets share a row only if they share its hash, so the hashes below both thresholds decide it:
exactly while the first set has at most `SIZE` rows, by sampling beyond. What is held below the
threshold does not depend on order or batching, and two sketches merge.
"""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from ..models.shadow import plain_parts

SIZE = 1 << 15
NO_LIMIT = (1 << 63) - 1
"""Every hash is below it, or equal."""
_CHUNK = 4096
_PIECE = 1 << 22
_ODD = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_MIX = -4658895280553007687


S = TypeVar("S", bound="RowSketch")


class RowSketch:
    """The rows of smallest hash of a data set: their hashes, and what else is kept of them.

    Rows that came since the last `settle` stand in arrays, in the order in which they came; these
    grow to `room` times `size` rows, then `settle` sorts them in. A `limit` of 0 says that some
    rows had no hash, so that no row can be judged.

    Attributes:
        hashes: sorted distinct int64, of the settled rows.
        counts: how many rows have each hash.
        limit: every hash of the data set below it is in `hashes`.
        columns: what goes with each hash, by name, (n, ...): its first row's.
        size: how many hashes to keep at most.
    """

    room: ClassVar[int] = 8
    """Rows that may be unsettled, in units of `size`."""

    def __init__(self, size: int | None = None, limit: int = NO_LIMIT) -> None:
        self.size = SIZE if size is None else size
        self.limit = limit
        self.hashes = torch.empty(0, dtype=torch.int64)
        self.counts = torch.empty(0, dtype=torch.int64)
        self.columns: dict[str, Tensor] = {}
        self._recent: _Recent | None = None
        # On an accelerator: every hash below this one is kept; read when rows are settled.
        self._bound: Tensor | None = None
        self._expects: bool | None = None  # whether the number of rows is known, and they differ

    @property
    def share(self) -> float:
        """The share of the data set's rows that it knows."""
        return self.limit / (1 << 63)

    def expect(self, rows: int | None, first: Tensor) -> None:
        """Lower the limit for data of so many rows, so that few more than `size` are looked at.

        Not where the first rows, of which the hashes are given, repeat one another: then nobody
        knows how many distinct ones will come.
        """
        if self._expects is None:
            distinct = rows is not None and rows > self.size
            self._expects = distinct and len(torch.unique(first)) == len(first)
        if self._expects and rows is not None:
            share = (self.size + 8 * self.size**0.5) / rows
            if share < 1:
                self.limit = min(self.limit, int(share * NO_LIMIT))

    def add(self, hashes: Tensor, **columns: Tensor) -> None:
        """Take rows in, which are copied.

        Args:
            hashes: (n,).
            columns: (n, ...), the same ones in every call.
        """
        # Where most rows are below the limit, looking for them costs more than taking all.
        if hashes.device.type == "cpu" and self.limit < NO_LIMIT // 2:
            below = (hashes < self.limit).nonzero()[:, 0]
            self._append(below, hashes, columns)
        else:
            self._append(None, hashes, columns)

    def _append(self, index: Tensor | None, hashes: Tensor, columns: dict[str, Tensor]) -> None:
        """Put rows, all or those of an index, into the arrays of unsettled ones.

        Full arrays are settled first.
        """
        rows = hashes.shape[0] if index is None else index.shape[0]
        if rows == 0:
            return
        most = self.room * self.size
        if self._recent is not None and not self._recent.takes(rows, hashes, columns, most):
            self.settle()
        if self._recent is None:
            # As many as will be needed, where that is known; else as few as do, and more later.
            room = max(rows, most if self._expects else min(256, most))
            self._recent = _Recent(room, hashes, columns)
        self._recent.append(index, rows, hashes, columns)

    def void(self) -> None:
        """Forget all rows, and judge none from now on: some had no hash."""
        self.limit = 0
        self.settle()

    def merge(self, other: RowSketch) -> None:
        """Take another data set's rows in."""
        self.settle()
        other.settle()
        self.limit = min(self.limit, other.limit)
        self._join([RowTable.of(self), RowTable.of(other)])

    def without(self: S, other: RowSketch) -> S:
        """What is left without another's rows; those that are not here are passed over."""
        return self._less(other)[0]

    def lacking(self, other: RowSketch) -> tuple[int, int]:
        """How many of another's rows are not here, and how many of them could be judged."""
        left, lacking = self._less(other)
        judged = int(other.counts[other.hashes < left.limit].sum())
        return lacking, judged

    def _less(self: S, other: RowSketch) -> tuple[S, int]:
        """What is left without another's rows, and how many of those were not here."""
        left = self.clone()
        removed = RowTable.of(other.clone())
        removed.counts = -removed.counts
        left.limit = min(self.limit, other.limit)
        lacking = left._join([RowTable.of(left), removed])
        return left, lacking

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

    def trimmed(self: S, limit: int) -> S:
        """A copy that holds the hashes below a limit alone."""
        other = self.clone()
        other.limit = min(self.limit, limit)
        other._join([RowTable.of(other)])
        return other

    def clone(self: S) -> S:
        """A copy that goes its own way; the settled tensors, never written to, are shared."""
        self.settle()
        return copy.copy(self)

    def to(self: S, device: torch.device) -> S:
        """A copy on another device."""
        other = self.clone()
        other.hashes, other.counts = self.hashes.to(device), self.counts.to(device)
        other.columns = {name: column.to(device) for name, column in self.columns.items()}
        return other

    def state(self) -> dict[str, Tensor]:
        """As tensors, for files."""
        self.settle()
        return {"hashes": self.hashes, "counts": self.counts, "limit": torch.tensor([self.limit])}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> RowSketch:
        """The sketch that `state` came from."""
        sketch = cls(limit=int(state["limit"]))
        sketch.hashes, sketch.counts = state["hashes"], state["counts"]
        return sketch

    def settle(self) -> None:
        """Sort the latest rows in; to be called before threads share the sketch."""
        if self._bound is not None:
            self.limit = min(self.limit, int(self._bound))
            self._bound = None
        if self._recent is not None:
            recent, self._recent = self._completed(self._recent.table()), None
            self._join([RowTable.of(self), recent])
        elif self.limit == 0:
            self._join([RowTable.of(self)])

    def _completed(self, recent: RowTable) -> RowTable:
        """The latest rows with all their columns."""
        return recent

    def _join(self, tables: list[RowTable]) -> int:
        """Hold the `size` smallest hashes of tables; how many rows to remove were lacking.

        Rows to remove have negative counts.
        """
        tables = [table for table in tables if len(table.hashes)]
        if not tables:
            return 0
        device = tables[-1].hashes.device
        hashes = torch.cat([table.hashes.to(device) for table in tables])
        counts = torch.cat([table.counts.to(device) for table in tables])
        # Stable, so that of equal rows the first stays the first.
        hashes, order = torch.sort(hashes, stable=True)
        counts = counts[order]
        below = int(torch.searchsorted(hashes, self.limit))
        hashes, order, counts = hashes[:below], order[:below], counts[:below]
        # Runs of equal hashes become one entry, with the sum of their counts.
        begins = torch.ones_like(hashes, dtype=torch.bool)
        begins[1:] = hashes[1:] != hashes[:-1]
        starts = begins.nonzero()[:, 0]
        if len(starts) < len(hashes) or bool((counts < 0).any()):
            runs = begins.cumsum(0) - 1
            counts = torch.zeros_like(starts).index_add_(0, runs, counts)
            hashes, order = hashes[starts], order[starts]
        lacking = -int(counts.clamp(max=0).sum())
        if lacking or bool((counts == 0).any()):
            left = (counts > 0).nonzero()[:, 0]
            hashes, order, counts = hashes[left], order[left], counts[left]
        if len(hashes) > self.size:
            self.limit = int(hashes[self.size])
        self.hashes, self.counts = hashes[: self.size], counts[: self.size]
        self.columns = _picked([table.columns for table in tables], order[: self.size])
        return lacking


@dataclass
class RowTable:
    """Rows with their hashes (n,), how often each came (n,), and their columns (n, ...)."""

    hashes: Tensor
    counts: Tensor
    columns: dict[str, Tensor]

    @classmethod
    def of(cls, sketch: RowSketch) -> RowTable:
        """The settled rows of a sketch."""
        return cls(sketch.hashes, sketch.counts, sketch.columns)


class _Recent:
    """Arrays of hashes and columns that are filled from the front, at first for so many rows."""

    def __init__(self, rows: int, hashes: Tensor, columns: dict[str, Tensor]) -> None:
        self._hashes = hashes.new_empty(rows)
        self._columns = {
            name: column.new_empty(rows, *column.shape[1:]) for name, column in columns.items()
        }
        self._filled = 0

    def takes(self, rows: int, hashes: Tensor, columns: dict[str, Tensor], most: int) -> bool:
        """Whether so many rows find room, of the same kind as those before; it grows to `most`."""
        needed = self._filled + rows
        if needed > max(most, self._hashes.shape[0]) or hashes.device != self._hashes.device:
            return False
        if columns.keys() != self._columns.keys():
            return False
        for name, array in self._columns.items():
            column = columns[name]
            if array.dtype != column.dtype or array.shape[1:] != column.shape[1:]:
                return False
        if needed > self._hashes.shape[0]:
            self._grow(min(most, max(needed, 2 * self._hashes.shape[0])))
        return True

    def _grow(self, rows: int) -> None:
        """Make room for so many rows in all."""
        hashes = self._hashes.new_empty(rows)
        hashes[: self._filled] = self._hashes[: self._filled]
        self._hashes = hashes
        for name, array in self._columns.items():
            larger = array.new_empty(rows, *array.shape[1:])
            larger[: self._filled] = array[: self._filled]
            self._columns[name] = larger

    def append(
        self, index: Tensor | None, rows: int, hashes: Tensor, columns: dict[str, Tensor]
    ) -> None:
        """Copy rows, all or those of an index, behind those that are here."""
        start, self._filled = self._filled, self._filled + rows
        pairs = [(self._hashes, hashes)]
        pairs += [(array, columns[name]) for name, array in self._columns.items()]
        for array, column in pairs:
            space = array[start : self._filled]
            if index is None:
                space.copy_(column)
            else:
                torch.index_select(column, 0, index, out=space)

    def table(self) -> RowTable:
        """The rows, each counted once."""
        hashes = self._hashes[: self._filled]
        columns = {name: array[: self._filled] for name, array in self._columns.items()}
        return RowTable(hashes, torch.ones_like(hashes), columns)


def _picked(parts: list[dict[str, Tensor]], index: Tensor) -> dict[str, Tensor]:
    """Rows of columns that come in parts, one after the other."""
    names = parts[0].keys()
    if any(part.keys() != names for part in parts):
        raise ValueError("Rows with and without a sample weight do not mix: weigh all or none.")
    picked = {}
    for name in names:
        columns = [part[name].to(index.device) for part in parts]
        column = columns[0] if len(columns) == 1 else torch.cat(columns)
        picked[name] = column.index_select(0, index)
    return picked


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


def output_hashes(hashes: Tensor, rows: int, importance: Tensor | None) -> Tensor:
    """Hashes (rows,) of output rows from those of inputs, which have equally many rows in turn.

    The place among the input's rows is hashed, and the importance into the low bits alone: where
    rows are looked up in a sketch, those of the sample must all be in it.
    """
    several = rows // len(hashes)
    if several > 1:
        places = torch.arange(several, device=hashes.device).repeat(len(hashes))
        hashes = cast("Tensor", row_hashes([hashes.repeat_interleave(several), places], rows))
    if importance is None:
        return hashes
    return hashes ^ (cast("Tensor", row_hashes([importance.to(torch.float32)], rows)) >> 39)


def hashed_normals(hashes: Tensor, keys: Tensor) -> Tensor:
    """From N(0, 1), a number for each pair of a row's hash and a key, int64 that broadcast."""
    levels = (_mixed(_mixed(hashes) + keys) & NO_LIMIT) >> 10  # 53 bits
    numbers: Tensor = torch.special.ndtri((levels.to(torch.float64) + 0.5) / 2**53)
    return numbers


def near_hashes(features: Tensor, width: float) -> Tensor:
    """One hash per row (N,) of features that are known up to rounding.

    Of the features' size and four directions, in cells of a width well above the rounding. Another
    pass may find a row that is near a boundary in the next cell.
    """
    flat = features.detach().flatten(1).to(torch.float64)
    size = torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=1e-300)
    index = torch.arange(1, 4 * flat.shape[1] + 1, device=flat.device).reshape(-1, 4)
    places = torch.cat([size.log2(), flat @ (_mixed(index).double() / 2**63) / size], 1)
    cells = (places / width).floor().to(torch.int64)
    return _mixed(_products(cells, 0)) & NO_LIMIT


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
        totals[device].index_add_(0, *_piece_hashes(group, number))
    read = [total.tolist() for total in totals.values()]
    return [sum(several) % (1 << 63) for several in zip(sizes, *read, strict=True)]


def _piece_hashes(group: list[tuple[int, int, Tensor]], number: int) -> tuple[Tensor, Tensor]:
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
        values = torch.view_as_real(values.resolve_conj()).flatten(1)
    if values.is_floating_point():
        values = values if values.dtype == torch.float64 else values.to(torch.float32)
    else:
        values = values.to(torch.int64)
    values = values.contiguous()
    if values.element_size() * values.shape[1] % 8:
        return values.view(torch.int32).to(torch.int64)
    # A view of wider words must begin at one; what a compiled graph holds does.
    compiled = torch.compiler.is_compiling()
    if not compiled and values.storage_offset() * values.element_size() % 8:
        values = values.clone()
    pairs = values.view(torch.int64)
    return torch.add(pairs, pairs >> 32, alpha=_ODD)


def _mixed(words: Tensor) -> Tensor:
    """A bijection of int64 that spreads every bit."""
    words = (words ^ (words >> 30)) * _MIX
    words = (words ^ (words >> 27)) * _ODD
    return words ^ (words >> 31)
