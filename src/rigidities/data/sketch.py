"""Which rows two data sets have in common, in constant memory.

Every row is hashed to 63 bits; a `RowSketch` keeps the smallest hashes (bottom-k sampling). Two
data sets share a row only if they share its hash, so it is enough to compare the hashes below both
sketches' limits. The answer is exact while the first set has at most `SIZE` rows, and an estimate
from a sample beyond that. What a sketch keeps below its limit does not depend on order or batching,
and two sketches can be merged.

The functions below the class compute the hashes: `row_hashes` of exact values, `near_hashes` of
values known up to rounding, `tensor_hashes` and `fingerprint` of whole tensors.
"""

from __future__ import annotations

import copy
import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..models.shadow import plain_parts

SIZE = 1 << 15
"""Hashes that a sketch keeps by default."""

NO_LIMIT = (1 << 63) - 1
"""The largest hash: every hash is below it, or equal."""

_CHUNK = 4096
"""At most this many words of a row are multiplied at once."""

_PIECE = 1 << 22
"""About this many numbers of tensors are hashed at once."""

_PIECE_WIDTH = 64
"""Tensors are cut into rows of this many words to be hashed."""

# Factors of a mixing function whose products spread the bits of a word (splitmix64).
_ODD = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_MIX = -4658895280553007687


S = TypeVar("S", bound="RowSketch")


class RowSketch:
    """The rows of a data set with the smallest hashes: the hashes, and columns that go with them.

    Rows added since the last `settle` wait in arrays, in the order in which they came. These arrays
    grow to `room` times `size` rows; then `settle` sorts them in.

    Args:
        size: How many hashes to keep at most; by default `SIZE`.
        limit: Only hashes below it are kept.

    Attributes:
        hashes: Sorted distinct int64, of the settled rows.
        counts: How many rows have each hash.
        limit: Every hash of the data set below it is in `hashes`, so only rows below it can be
            judged (said to be in the data set or not). It is 0 where some rows had no hash, and
            no row can be judged.
        columns: What goes with each hash, by name, (n, ...); for equal rows, that of the first.
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
        # Whether more than `size` distinct rows are expected; None before the first rows.
        self._expects: bool | None = None

    @property
    def share(self) -> float:
        """The share of the data set's rows that the sketch keeps."""
        return self.limit / (1 << 63)

    def expect(self, rows: int | None, first: Tensor) -> None:
        """Lower the limit for data of a known size, so that few more than `size` rows are stored.

        Where the first rows contain repeats, the number of distinct rows cannot be foreseen, and
        the limit stays as it is.

        Args:
            rows: How many rows the data set has; None where that is not known.
            first: The hashes of its first rows.
        """
        if self._expects is None:
            more_than_kept = rows is not None and rows > self.size
            self._expects = more_than_kept and len(torch.unique(first)) == len(first)
        if self._expects and rows is not None:
            # Hashes are uniform. Below this limit, `size` plus eight standard deviations of their
            # number are expected, so that fewer than `size` are practically impossible.
            share = (self.size + 8 * self.size**0.5) / rows
            if share < 1:
                self.limit = min(self.limit, int(share * NO_LIMIT))

    def add(self, hashes: Tensor, **columns: Tensor) -> None:
        """Add rows, which are copied.

        Args:
            hashes: Their hashes, (n,).
            columns: What goes with them, (n, ...), under the same names in every call.
        """
        # Where most rows are below the limit, selecting them costs more than taking all.
        if hashes.device.type == "cpu" and self.limit < NO_LIMIT // 2:
            below = (hashes < self.limit).nonzero()[:, 0]
            self._append(below, hashes, columns)
        else:
            self._append(None, hashes, columns)

    def _append(self, index: Tensor | None, hashes: Tensor, columns: dict[str, Tensor]) -> None:
        """Put rows into the arrays of unsettled rows; full arrays are settled first.

        Args:
            index: Which rows to take; None for all.
            hashes: Hashes of all rows, (n,).
            columns: Columns of all rows, (n, ...).
        """
        rows = hashes.shape[0] if index is None else index.shape[0]
        if rows == 0:
            return
        most = self.room * self.size
        if self._recent is not None and not self._recent.make_room(rows, hashes, columns, most):
            self.settle()
        if self._recent is None:
            # All the room that will be needed where that is known; else a little, which grows.
            room = max(rows, most if self._expects else min(256, most))
            self._recent = _Recent(room, hashes, columns)
        self._recent.append(index, rows, hashes, columns)

    def void(self) -> None:
        """Forget all rows and judge none from now on, because some rows had no hash."""
        self.limit = 0
        self.settle()

    def merge(self, other: RowSketch) -> None:
        """Add another data set's rows."""
        self.settle()
        other.settle()
        self.limit = min(self.limit, other.limit)
        self._join([RowTable.of(self), RowTable.of(other)])

    def without(self: S, other: RowSketch) -> S:
        """A copy without the rows of another sketch; rows that are not here are ignored."""
        remaining, _ = self._difference(other)
        return remaining

    def lacking(self, other: RowSketch) -> tuple[int, int]:
        """How many of another sketch's rows are not here, and how many could be judged."""
        remaining, lacking = self._difference(other)
        judged = int(other.counts[other.hashes < remaining.limit].sum())
        return lacking, judged

    def _difference(self: S, other: RowSketch) -> tuple[S, int]:
        """A copy without another sketch's rows, and how many of those rows were not here."""
        remaining = self.clone()
        removed = RowTable.of(other.clone())
        removed.counts = -removed.counts
        remaining.limit = min(self.limit, other.limit)
        lacking = remaining._join([RowTable.of(remaining), removed])
        return remaining, lacking

    def overlap(self, other: RowSketch) -> tuple[int, int, int]:
        """How many of another sketch's rows are here too.

        Returns:
            The number of such rows, how many of them occur only once in the other sketch, and how
            many of the other sketch's rows could be judged.
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
        """How many of these hashes belong to rows of the data set.

        Hashes at or above the limit cannot be looked up: the share of those below it that are here
        is taken to hold for all.
        """
        self.settle()
        hashes = hashes.to(self.hashes.device)
        judged = hashes[hashes < self.limit]
        if not len(judged):
            return 0.0
        return float(torch.isin(judged, self.hashes).sum()) * len(hashes) / len(judged)

    def trimmed(self: S, limit: int) -> S:
        """A copy with only the hashes below a limit."""
        other = self.clone()
        other.limit = min(self.limit, limit)
        other._join([RowTable.of(other)])
        return other

    def clone(self: S) -> S:
        """An independent copy; it shares the settled tensors, which are never written to."""
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
        """Hashes, counts and limit as tensors, for files; without the columns."""
        self.settle()
        return {"hashes": self.hashes, "counts": self.counts, "limit": torch.tensor([self.limit])}

    @classmethod
    def from_state(cls: type[S], state: dict[str, Tensor]) -> S:
        """The sketch from what `state` returned."""
        sketch = cls(limit=int(state["limit"]))
        sketch.hashes = state["hashes"]
        sketch.counts = state["counts"]
        return sketch

    def settle(self) -> None:
        """Sort in the latest rows; must be called before threads share the sketch."""
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
        """The latest rows with all their columns; a subclass may add columns left out so far."""
        return recent

    def _join(self, tables: list[RowTable]) -> int:
        """Replace this sketch's rows by those of some tables with the `size` smallest hashes.

        Args:
            tables: The rows. Those to remove have negative counts.

        Returns:
            How many of the rows to remove were not there.
        """
        tables = [table for table in tables if len(table.hashes)]
        if not tables:
            return 0
        device = tables[-1].hashes.device
        hashes = torch.cat([table.hashes.to(device) for table in tables])
        counts = torch.cat([table.counts.to(device) for table in tables])
        # A stable sort, so that the first of equal rows stays the first.
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
        rows: Number of rows for which there is room at first.
        hashes: Hashes with the dtype and device of those to come.
        columns: Columns with the names, dtypes and shapes of those to come.
    """

    def __init__(self, rows: int, hashes: Tensor, columns: dict[str, Tensor]) -> None:
        self._hashes = hashes.new_empty(rows)
        self._columns = {
            name: column.new_empty(rows, *column.shape[1:]) for name, column in columns.items()
        }
        self._filled = 0

    def make_room(self, rows: int, hashes: Tensor, columns: dict[str, Tensor], most: int) -> bool:
        """Make room for more rows.

        Args:
            rows: How many rows are to come.
            hashes: Their hashes.
            columns: Their columns.
            most: The total number of rows up to which the arrays may grow.

        Returns:
            Whether there is room now; False where the rows do not fit, or are of another kind.
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
        """Enlarge the arrays to this total number of rows."""
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
        """Copy rows to the end of those that are here.

        Args:
            index: Which rows to copy; None for all.
            rows: How many rows that is.
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
    """The columns of selected rows of several tables.

    Args:
        tables: The columns of each table, by name.
        index: Numbers of the rows to select, as if all tables were one, in their order.
    """
    names = tables[0].keys()
    if any(columns.keys() != names for columns in tables):
        raise ValueError(
            "Rows with and without a sample weight cannot be mixed. Weight all rows or none."
        )
    chosen = {}
    for name in names:
        pieces = [columns[name].to(index.device) for columns in tables]
        column = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        chosen[name] = column.index_select(0, index)
    return chosen


# --- hashes of rows -----------------------------------------------------------------------------


def row_hashes(values: Iterable[Any], rows: int) -> Tensor | None:
    """One hash per row over all tensors, (rows,); None if a value is no tensor of that length."""
    total: Tensor | None = None
    for position, value in enumerate(values):
        plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
        if not plain or value.shape[:1] != (rows,):
            return None
        products = _products(value.detach(), position)
        total = products if total is None else total + products
    return None if total is None else _mixed(total) & NO_LIMIT


def row_tensors(inputs: Sequence[Any], rows: int, device: torch.device) -> list[Tensor]:
    """The tensors in a batch's inputs that tell its rows apart, each with one row per sample.

    Entries of a mapping come in the order of their keys. A list of mappings, one for each sample,
    is collated first. Texts, one for each sample, become numbers. What belongs to the batch as a
    whole is left out: single numbers and texts, and None.

    Args:
        inputs: The inputs of the model, each of tensors, texts and numbers in any nesting of
            mappings, tuples and lists.
        rows: The number of samples.
        device: The device of the model, for the numbers of texts.

    Returns:
        The tensors. None at all where rows cannot be told apart: there are tensors of another
        length (atoms of structures) or objects, or nothing but one tensor, which may be the
        target, is left.
    """
    found: list[Tensor] = []
    left_out = 0
    remaining = list(reversed(inputs))
    while remaining:
        entry = remaining.pop()
        if isinstance(entry, Tensor) and entry.ndim > 0:
            plain = entry.layout is torch.strided and not entry.is_nested
            if not plain or entry.shape[0] != rows:
                return []
            found.append(entry)
        elif entry is None or isinstance(entry, (str, bytes, int, float, complex, Tensor)):
            left_out += 1
        elif isinstance(entry, Mapping):
            remaining.extend(entry[key] for key in sorted(entry, key=str, reverse=True))
        elif not isinstance(entry, (tuple, list)):
            return []
        elif len(entry) == rows and all(isinstance(text, str) for text in entry):
            found.append(_numbers_of_texts(entry).to(device))
        elif len(entry) == rows and all(isinstance(sample, Mapping) for sample in entry):
            try:
                remaining.append(default_collate(list(entry)))
            except (TypeError, RuntimeError, KeyError):  # samples of different shapes or keys
                return []
        else:
            remaining.extend(reversed(entry))
    if left_out and len(found) < 2:
        return []
    return found


def _numbers_of_texts(texts: Sequence[str]) -> Tensor:
    """A number for each text, (n,), the same for equal texts in every process."""
    numbers = []
    for text in texts:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        numbers.append(int.from_bytes(digest, "little", signed=True))
    return torch.tensor(numbers, dtype=torch.int64)


def output_hashes(hashes: Tensor, rows: int, importance: Tensor | None) -> Tensor:
    """Hashes of output rows, where every input has the same number of output rows.

    Args:
        hashes: Hashes of the inputs, (n,).
        rows: Number of output rows, a multiple of n.
        importance: The user's sample weight of each output row. It changes the low bits only, so
            that it hardly moves a row across a sketch's limit: rows of the row sample must all be
            in the sketch they are looked up in.

    Returns:
        One hash per output row, (rows,), made of the input's hash and the row's place within the
        input.
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
    """A number from N(0, 1) for each pair of a row's hash and a key; a pair's never changes.

    Args:
        hashes: int64.
        keys: int64, which broadcast with the hashes.
    """
    levels = (_mixed(_mixed(hashes) + keys) & NO_LIMIT) >> 10  # 53 bits
    numbers: Tensor = torch.special.ndtri((levels.to(torch.float64) + 0.5) / 2**53)
    return numbers


def near_hashes(features: Tensor, width: float) -> Tensor:
    """One hash per row of features that are known up to rounding, (N,).

    It is a hash of the features' length and of four projections on fixed directions, rounded to
    cells that are wider than the rounding of the features. A row near the boundary of a cell may
    fall into the next one in another pass.

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
        factor: An odd number for each plain tensor that the tensor consists of.
        values: The numbers, flat.
    """

    owner: int
    factor: int
    values: Tensor


def tensor_hashes(tensors: Sequence[Tensor]) -> list[int]:
    """One hash per tensor, of all its values; the same on every device and for lossless casts."""
    # Pieces with the same number within their tensors, on one device, are hashed together, about
    # `_PIECE` numbers at once.
    groups: dict[tuple[torch.device, int, int], list[_Piece]] = defaultdict(list)
    sizes = [0] * len(tensors)  # they enter the hash: zeros alone would not show their number
    numbers_before = 0
    for owner, tensor in enumerate(tensors):
        for plain_number, plain in enumerate(plain_parts(tensor)):
            factor = 2 * plain_number + 1
            flat = plain.detach().resolve_conj()
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

    Sums of integers do not depend on the order, the batch or the device.

    Args:
        tensor: (n, ...).
        position: Which random integers to take, so that tensors of one row are told apart.
    """
    if not tensor.numel():  # rows of no numbers
        return torch.zeros(tensor.shape[0], dtype=torch.int64, device=tensor.device)
    words = _words(tensor.reshape(tensor.shape[0], -1))
    compiling = torch.compiler.is_compiling()
    # A compiled graph cannot look into the cache.
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
    """The bits of each row as int64 words, two 32-bit numbers in one where their count is even.

    A product modulo 2^64 keeps little of a word that ends in many zeros, as the floats of small
    whole numbers do, so the high half is mixed into the low one.
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
    # A view as wider words must begin at a multiple of their size; in a compiled graph it does.
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
