"""Which rows stand in both of two data sets, in constant memory.

Every row is hashed to 63 bits; a `RowSketch` keeps the smallest hashes (bottom-k sampling). Two
data sets share a row only if they share its hash, so the hashes below both thresholds decide it:
exactly while the first set has at most `SIZE` rows, by sampling beyond. What a sketch keeps below
its threshold does not depend on order or batching, and two sketches merge.

The hashes themselves are made below the class: `row_hashes` of exact values, `near_hashes` of
values known up to rounding, `tensor_hashes` and `fingerprint` of whole tensors.
"""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..models.shadow import plain_parts

SIZE = 1 << 15
"""Hashes that a sketch keeps by default."""

NO_LIMIT = (1 << 63) - 1
"""The largest hash: every hash is below it, or equal."""

_CHUNK = 4096
"""Words of a row that are multiplied at once."""

_PIECE = 1 << 22
"""Numbers of tensors that are hashed at once, about."""

_PIECE_WIDTH = 64
"""Words of a row into which tensors are cut to be hashed."""

# Factors of a mixing function whose products spread the bits of a word (splitmix64).
_ODD = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_MIX = -4658895280553007687


S = TypeVar("S", bound="RowSketch")


class RowSketch:
    """The rows of smallest hash of a data set: their hashes, and columns of numbers with them.

    Rows that came since the last `settle` stand in arrays, in the order in which they came; these
    grow to `room` times `size` rows, then `settle` sorts them in.

    Args:
        size: How many hashes to keep at most; by default `SIZE`.
        limit: Only hashes below it are kept.

    Attributes:
        hashes: Sorted distinct int64, of the settled rows.
        counts: How many rows have each hash.
        limit: Every hash of the data set below it is in `hashes`. A limit of 0 says that some rows
            had no hash, so that no row can be judged.
        columns: What goes with each hash, by name, (n, ...); of equal rows the first one's.
        size: How many hashes to keep at most.
    """

    room: ClassVar[int] = 8
    """How many rows may be unsettled, in units of `size`."""

    def __init__(self, size: int | None = None, limit: int = NO_LIMIT) -> None:
        self.size = SIZE if size is None else size
        self.limit = limit
        self.hashes = torch.empty(0, dtype=torch.int64)
        self.counts = torch.empty(0, dtype=torch.int64)
        self.columns: dict[str, Tensor] = {}
        self._recent: _Recent | None = None
        # A limit that is still on an accelerator; read when rows are settled.
        self._bound: Tensor | None = None
        # Whether the number of rows is known and they differ; None before the first rows.
        self._expects: bool | None = None

    @property
    def share(self) -> float:
        """The share of the data set's rows that the sketch keeps."""
        return self.limit / (1 << 63)

    def expect(self, rows: int | None, first: Tensor) -> None:
        """Lower the limit for data of a known size, so that few more than `size` rows are stored.

        Where the first rows repeat one another, nobody knows how many distinct ones will come, and
        the limit stays.

        Args:
            rows: How many rows the data set has; None where that is not known.
            first: The hashes of its first rows.
        """
        if self._expects is None:
            more_than_kept = rows is not None and rows > self.size
            self._expects = more_than_kept and len(torch.unique(first)) == len(first)
        if self._expects and rows is not None:
            # Hashes are uniform: `size` and eight standard deviations are expected below the limit.
            share = (self.size + 8 * self.size**0.5) / rows
            if share < 1:
                self.limit = min(self.limit, int(share * NO_LIMIT))

    def add(self, hashes: Tensor, **columns: Tensor) -> None:
        """Add rows, which are copied.

        Args:
            hashes: Their hashes, (n,).
            columns: What goes with them, (n, ...), under the same names in every call.
        """
        # Where most rows are below the limit, looking for them costs more than taking all.
        if hashes.device.type == "cpu" and self.limit < NO_LIMIT // 2:
            below = (hashes < self.limit).nonzero()[:, 0]
            self._append(below, hashes, columns)
        else:
            self._append(None, hashes, columns)

    def _append(self, index: Tensor | None, hashes: Tensor, columns: dict[str, Tensor]) -> None:
        """Put rows into the arrays of unsettled ones; full arrays are settled first.

        Args:
            index: Which rows to take; None for all.
            hashes: Hashes of all rows, (n,).
            columns: Columns of all rows, (n, ...).
        """
        rows = hashes.shape[0] if index is None else index.shape[0]
        if rows == 0:
            return
        most = self.room * self.size
        if self._recent is not None and not self._recent.takes(rows, hashes, columns, most):
            self.settle()
        if self._recent is None:
            # As much room as will be needed where that is known; else little, which grows.
            room = max(rows, most if self._expects else min(256, most))
            self._recent = _Recent(room, hashes, columns)
        self._recent.append(index, rows, hashes, columns)

    def void(self) -> None:
        """Forget all rows, and judge none from now on: some had no hash."""
        self.limit = 0
        self.settle()

    def merge(self, other: RowSketch) -> None:
        """Add another data set's rows."""
        self.settle()
        other.settle()
        self.limit = min(self.limit, other.limit)
        self._join([RowTable.of(self), RowTable.of(other)])

    def without(self: S, other: RowSketch) -> S:
        """A sketch without another's rows; those of them that are not here are ignored."""
        left, _ = self._difference(other)
        return left

    def lacking(self, other: RowSketch) -> tuple[int, int]:
        """How many of another's rows are not here, and how many of them could be judged."""
        left, lacking = self._difference(other)
        judged = int(other.counts[other.hashes < left.limit].sum())
        return lacking, judged

    def _difference(self: S, other: RowSketch) -> tuple[S, int]:
        """A sketch without another's rows, and how many of those were not here."""
        left = self.clone()
        removed = RowTable.of(other.clone())
        removed.counts = -removed.counts
        left.limit = min(self.limit, other.limit)
        lacking = left._join([RowTable.of(left), removed])
        return left, lacking

    def overlap(self, other: RowSketch) -> tuple[int, int, int]:
        """How many of another's rows stand here too.

        Returns:
            The number of such rows, how many of them come once in the other, and how many of the
            other's rows could be judged.
        """
        self.settle()
        other.settle()
        hashes = other.hashes.cpu()
        counts = other.counts.cpu()
        judged = hashes < min(self.limit, other.limit)
        shared = judged & torch.isin(hashes, self.hashes.cpu())
        once = int((counts[shared] == 1).sum())
        return int(counts[shared].sum()), once, int(counts[judged].sum())

    def shared(self, hashes: Tensor) -> float:
        """How many rows with these hashes the data set has (an estimate beyond `size` rows)."""
        self.settle()
        hashes = hashes.to(self.hashes.device)
        judged = hashes[hashes < self.limit]
        if not len(judged):
            return 0.0
        return float(torch.isin(judged, self.hashes).sum()) * len(hashes) / len(judged)

    def trimmed(self: S, limit: int) -> S:
        """A copy with the hashes below a limit only."""
        other = self.clone()
        other.limit = min(self.limit, limit)
        other._join([RowTable.of(other)])
        return other

    def clone(self: S) -> S:
        """An independent copy; it shares the settled tensors, which nobody writes to."""
        self.settle()
        return copy.copy(self)

    def to(self: S, device: torch.device) -> S:
        """A copy on another device."""
        other = self.clone()
        other.hashes = self.hashes.to(device)
        other.counts = self.counts.to(device)
        other.columns = {name: column.to(device) for name, column in self.columns.items()}
        return other

    def state(self) -> dict[str, Tensor]:
        """The sketch as tensors, for files."""
        self.settle()
        return {"hashes": self.hashes, "counts": self.counts, "limit": torch.tensor([self.limit])}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> RowSketch:
        """The sketch that `state` came from."""
        sketch = cls(limit=int(state["limit"]))
        sketch.hashes = state["hashes"]
        sketch.counts = state["counts"]
        return sketch

    def settle(self) -> None:
        """Sort in the latest rows; to be called before threads share the sketch."""
        if self._bound is not None:
            self.limit = min(self.limit, int(self._bound))
            self._bound = None
        if self._recent is not None:
            recent = self._completed(self._recent.table())
            self._recent = None
            self._join([RowTable.of(self), recent])
        elif self.limit == 0:
            self._join([RowTable.of(self)])

    def _completed(self, recent: RowTable) -> RowTable:
        """The latest rows with all their columns; a subclass may add some that were left out."""
        return recent

    def _join(self, tables: list[RowTable]) -> int:
        """Keep the `size` smallest hashes of some tables, in place of those that are here.

        Args:
            tables: The rows; those to remove have negative counts.

        Returns:
            How many rows to remove were not there.
        """
        tables = [table for table in tables if len(table.hashes)]
        if not tables:
            return 0
        device = tables[-1].hashes.device
        hashes = torch.cat([table.hashes.to(device) for table in tables])
        counts = torch.cat([table.counts.to(device) for table in tables])
        # A stable sort, so that of equal rows the first stays the first.
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
        # Rows that were removed as often as they came have no count left.
        if lacking or bool((counts == 0).any()):
            positive = (counts > 0).nonzero()[:, 0]
            hashes, order, counts = hashes[positive], order[positive], counts[positive]
        if len(hashes) > self.size:
            self.limit = int(hashes[self.size])
        self.hashes = hashes[: self.size]
        self.counts = counts[: self.size]
        self.columns = _columns_at([table.columns for table in tables], order[: self.size])
        return lacking


@dataclass
class RowTable:
    """Rows of a data set.

    Attributes:
        hashes: Their hashes, (n,).
        counts: How often each came, (n,).
        columns: What goes with them, by name, (n, ...).
    """

    hashes: Tensor
    counts: Tensor
    columns: dict[str, Tensor]

    @classmethod
    def of(cls, sketch: RowSketch) -> RowTable:
        """The settled rows of a sketch."""
        return cls(sketch.hashes, sketch.counts, sketch.columns)


class _Recent:
    """Arrays of hashes and columns that are filled from the front.

    Args:
        rows: For how many rows there is room at first.
        hashes: Hashes like those to come, for dtype and device.
        columns: Columns like those to come.
    """

    def __init__(self, rows: int, hashes: Tensor, columns: dict[str, Tensor]) -> None:
        self._hashes = hashes.new_empty(rows)
        self._columns = {
            name: column.new_empty(rows, *column.shape[1:]) for name, column in columns.items()
        }
        self._filled = 0

    def takes(self, rows: int, hashes: Tensor, columns: dict[str, Tensor], most: int) -> bool:
        """Whether there is room for more rows of the same kind; grows if that is needed.

        Args:
            rows: How many rows are to come.
            hashes: Their hashes.
            columns: Their columns.
            most: Rows in all up to which the arrays may grow.
        """
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
        """Copy rows behind those that are here.

        Args:
            index: Which rows to copy; None for all.
            rows: How many those are.
            hashes: Hashes of all rows.
            columns: Columns of all rows.
        """
        start = self._filled
        self._filled += rows
        copies = [(self._hashes, hashes)]
        copies += [(array, columns[name]) for name, array in self._columns.items()]
        for array, column in copies:
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


def _columns_at(tables: list[dict[str, Tensor]], index: Tensor) -> dict[str, Tensor]:
    """The columns of some rows of several tables.

    Args:
        tables: The columns of each table, by name.
        index: Numbers of rows, counted through all tables, one after the other.
    """
    names = tables[0].keys()
    if any(columns.keys() != names for columns in tables):
        raise ValueError("Rows with and without a sample weight do not mix: weigh all or none.")
    chosen = {}
    for name in names:
        pieces = [columns[name].to(index.device) for columns in tables]
        column = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        chosen[name] = column.index_select(0, index)
    return chosen


# --- hashes of rows -----------------------------------------------------------------------------


def row_hashes(values: Iterable[Any], rows: int) -> Tensor | None:
    """One hash per row over all tensors, (rows,); None if a value does not have so many rows."""
    total: Tensor | None = None
    for position, value in enumerate(values):
        plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
        if not plain or value.shape[:1] != (rows,):
            return None
        products = _products(value.detach(), position)
        total = products if total is None else total + products
    return None if total is None else _mixed(total) & NO_LIMIT


def output_hashes(hashes: Tensor, rows: int, importance: Tensor | None) -> Tensor:
    """Hashes of output rows, from those of inputs that have equally many output rows each.

    Args:
        hashes: Of the inputs, (n,).
        rows: Number of output rows, a multiple of n.
        importance: The user's sample weight of each output row. It goes into the low bits only:
            where rows are looked up in a sketch, those of the sample must all be in it.

    Returns:
        One hash per output row, (rows,), of the input's hash and the place among its rows.
    """
    rows_per_input = rows // len(hashes)
    if rows_per_input > 1:
        places = torch.arange(rows_per_input, device=hashes.device).repeat(len(hashes))
        repeated = hashes.repeat_interleave(rows_per_input)
        hashes = cast("Tensor", row_hashes([repeated, places], rows))
    if importance is None:
        return hashes
    importance_hashes = cast("Tensor", row_hashes([importance.to(torch.float32)], rows))
    return hashes ^ (importance_hashes >> 39)


def hashed_normals(hashes: Tensor, keys: Tensor) -> Tensor:
    """A number from N(0, 1) for each pair of a row's hash and a key, always the same.

    Args:
        hashes: int64.
        keys: int64, which broadcast with the hashes.
    """
    levels = (_mixed(_mixed(hashes) + keys) & NO_LIMIT) >> 10  # 53 bits
    numbers: Tensor = torch.special.ndtri((levels.to(torch.float64) + 0.5) / 2**53)
    return numbers


def near_hashes(features: Tensor, width: float) -> Tensor:
    """One hash per row of features that are known up to rounding, (N,).

    It is a hash of the features' size and of four projections on fixed directions, in cells that
    are wider than the rounding. Another pass may find a row near a boundary in the next cell.

    Args:
        features: (N, ...).
        width: The width of a cell.
    """
    flat = features.detach().flatten(1).to(torch.float64)
    size = torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=1e-300)
    index = torch.arange(1, 4 * flat.shape[1] + 1, device=flat.device).reshape(-1, 4)
    directions = _mixed(index).double() / 2**63  # (D, 4), between -1 and 1
    places = torch.cat([size.log2(), flat @ directions / size], 1)  # (N, 5)
    cells = (places / width).floor().to(torch.int64)
    return _mixed(_products(cells, 0)) & NO_LIMIT


# --- hashes of tensors --------------------------------------------------------------------------


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of tensors by name, 16 hexadecimal digits; see `tensor_hashes`."""
    names = []
    tensors = []
    for name, tensor in named:
        names.append(name)
        tensors.append(tensor)
    total = 0
    for name, tensor_hash in zip(names, tensor_hashes(tensors), strict=True):
        total += tensor_hash * (2 * zlib.crc32(name.encode()) + 1)
    return f"{total % (1 << 64):016x}"


class _Piece(NamedTuple):
    """A piece of a tensor that is being hashed.

    Attributes:
        owner: The number of the tensor.
        factor: An odd number for the part of the tensor, where it consists of several.
        values: The numbers, flat.
    """

    owner: int
    factor: int
    values: Tensor


def tensor_hashes(tensors: Sequence[Tensor]) -> list[int]:
    """One hash of all of each tensor's values; the same on every device and for lossless casts."""
    # Pieces of the same number, on one device, are hashed together, about `_PIECE` numbers at once.
    groups: dict[tuple[torch.device, int, int], list[_Piece]] = defaultdict(list)
    sizes = [0] * len(tensors)
    numbers_before = 0
    for owner, tensor in enumerate(tensors):
        for part_number, part in enumerate(plain_parts(tensor)):
            factor = 2 * part_number + 1
            flat = part.detach().resolve_conj()
            if flat.is_complex():
                flat = torch.view_as_real(flat)
            flat = flat.reshape(-1)
            sizes[owner] += factor * flat.numel()
            for piece_number, values in enumerate(torch.split(flat, _PIECE)):
                key = flat.device, piece_number, numbers_before // _PIECE
                groups[key].append(_Piece(owner, factor, values))
                numbers_before += values.numel()
    totals = {device: torch.tensor(sizes).to(device) * 0 for device, _, _ in groups}
    for (device, piece_number, _), pieces in groups.items():
        owners, hashes = _piece_hashes(pieces, piece_number)
        totals[device].index_add_(0, owners, hashes)
    totals_by_device = [total.tolist() for total in totals.values()]
    return [sum(terms) % (1 << 63) for terms in zip(sizes, *totals_by_device, strict=True)]


def _piece_hashes(pieces: list[_Piece], piece_number: int) -> tuple[Tensor, Tensor]:
    """Hashes of pieces of tensors, cut into rows of 64 words.

    Args:
        pieces: Pieces on one device.
        piece_number: Their number within their tensors, the same for all.

    Returns:
        The owner and the hash of each row, which add up to the hashes of the owners.
    """
    device = pieces[0].values.device
    rows = [-(-piece.values.numel() // _PIECE_WIDTH) for piece in pieces]  # rounded up
    words = torch.zeros(sum(rows), _PIECE_WIDTH, dtype=torch.int64, device=device)
    for space, piece in zip(torch.split(words, rows), pieces, strict=True):
        dtype = torch.float64 if piece.values.is_floating_point() else torch.int64
        space.view(dtype).view(-1)[: piece.values.numel()].copy_(piece.values)
    owners = [piece.owner for piece in pieces]
    factors = [piece.factor for piece in pieces]
    # One transfer to the device for all three.
    table = torch.tensor([owners, factors, rows]).to(device)
    row_owners, row_factors, _ = table.repeat_interleave(table[2], dim=1, output_size=len(words))
    positions = torch.cat([torch.arange(1, count + 1, device=device) for count in rows])
    hashes = _mixed(_products(words, piece_number)) * _mixed(positions * _ODD) * row_factors
    return row_owners, hashes


# --- arithmetic of hashes -----------------------------------------------------------------------


def _products(tensor: Tensor, position: int) -> Tensor:
    """Dot product of each row's words with random odd 64-bit integers, modulo 2^64.

    Integer sums depend neither on the order nor on the batch or device.

    Args:
        tensor: (n, ...).
        position: Which random integers to take.
    """
    if not tensor.numel():  # rows of no numbers
        return torch.zeros(tensor.shape[0], dtype=torch.int64, device=tensor.device)
    words = _words(tensor.reshape(tensor.shape[0], -1))
    compiling = torch.compiler.is_compiling()
    # A graph cannot look into the cache.
    multipliers_of = _multipliers.__wrapped__ if compiling else _multipliers
    sums = []
    for start in range(0, words.shape[1], _CHUNK):
        chunk = words[:, start : start + _CHUNK]
        multipliers = multipliers_of(position, start, chunk.shape[1], words.device)
        if words.device.type == "cpu" and not compiling:
            sums.append(torch.mv(chunk, multipliers))
        else:  # accelerators have no such product of integers
            sums.append((chunk * multipliers).sum(1))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


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
    if not values.is_floating_point():
        values = values.to(torch.int64)
    elif values.dtype != torch.float64:
        values = values.to(torch.float32)
    values = values.contiguous()
    if values.element_size() * values.shape[1] % 8:
        return values.view(torch.int32).to(torch.int64)
    # A view of wider words must begin at a multiple of their size; in a compiled graph it does.
    compiling = torch.compiler.is_compiling()
    if not compiling and values.storage_offset() * values.element_size() % 8:
        values = values.clone()
    pairs = values.view(torch.int64)
    return torch.add(pairs, pairs >> 32, alpha=_ODD)


def _mixed(words: Tensor) -> Tensor:
    """A bijection of int64 that spreads every bit."""
    words = (words ^ (words >> 30)) * _MIX
    words = (words ^ (words >> 27)) * _ODD
    return words ^ (words >> 31)
