"""The rows of lowest hash of a data set, in constant memory.

Every row has a hash (see `data.hashes`). A `RowSketch` keeps the smallest hashes (bottom-k
sampling), to tell which rows two data sets have in common. Two data sets share a row only if they
share its hash, so it is enough to compare the hashes below both sketches' limits. The answer is
exact while the first set has at most `HASHES` rows, and an estimate from a sample beyond that. What
a sketch keeps below its limit does not depend on order or batching, and two sketches can be merged.

`KeptRows` are a sketch that keeps rows besides their hashes, to learn from them without a second
pass over the data: all rows while they are few, and a uniform sample, those of lowest hash, beyond.
The sketch of a fit counts samples, as users know them. Its kept rows are rows of outputs, of which
a sample may have several.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..data.hashes import NO_LIMIT
from ..data.storage import prefixed, unprefixed
from ..readout.reading import responses
from .block import Block

if TYPE_CHECKING:
    from typing_extensions import Self

HASHES = 1 << 15
"""Hashes that a sketch keeps by default."""

MOST_BYTES = 1 << 28
"""The most bytes of the rows that a fit keeps. If rows are wider, fewer are kept."""

_SPARE = 1 / 8
"""Rows beyond the number to keep that may stay in memory after a pass, as a share of it."""

_MOST_PIECES = 1024
"""The most pieces that may wait: rows that come one by one take far more memory than they need."""

_SETTLING = threading.RLock()
"""Held while kept rows are sorted: several threads may be the first to read those of a fit."""

Table = dict[str, Tensor]
"""What goes with the hashes of rows, by name, each (n, ...)."""


class RowSketch:
    """The rows of a data set with the smallest hashes: the hashes, and columns that go with them.

    Rows added since the last `settle` wait, in the order in which they came. When more than `room`
    times `size` would wait, `settle` sorts them in.

    Args:
        size: How many hashes to keep at most; by default `HASHES`.
        limit: Only hashes below it are kept.

    Attributes:
        hashes: Sorted distinct int64, of the settled rows.
        counts: How many rows have each hash.
        limit: Every hash of the data set below it is in `hashes`, so only rows below it can be
            judged (said to be in the data set or not). It is 0 where some rows had no hash, and
            no row can be judged.
        columns: What goes with each hash; for equal rows, that of the first.
        size: How many hashes to keep at most.
    """

    room: ClassVar[float] = 8
    """How many rows may wait, in units of `size`."""

    def __init__(self, size: int | None = None, limit: int = NO_LIMIT) -> None:
        self.size = HASHES if size is None else size
        self.limit = limit
        self.hashes = torch.empty(0, dtype=torch.int64)
        self.counts = torch.empty(0, dtype=torch.int64)
        self.columns: Table = {}
        # The rows that wait, as they came, and their number.
        self._waiting: list[tuple[Tensor, Table]] = []
        self._waiting_rows = 0
        # A limit that is still on an accelerator; read when rows are settled.
        self._bound: Tensor | None = None
        # Whether more than `size` distinct rows are expected; None before the first rows.
        self._expects: bool | None = None

    @property
    def share(self) -> float:
        """The share of the data set's rows that the sketch keeps."""
        return self.limit / (1 << 63)

    @property
    def judges(self) -> bool:
        """Whether rows can be recognised."""
        return self.limit > 0

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
            self.limit = min(self.limit, self._limit_for(rows))

    def _limit_for(self, rows: int) -> int:
        """A limit below which there are few more than `size` of so many distinct rows."""
        # Hashes are uniform. Below this limit, `size` plus eight standard deviations of their
        # number are expected, so that fewer than `size` are practically impossible.
        share = (self.size + 8 * self.size**0.5) / rows
        return int(share * NO_LIMIT) if share < 1 else NO_LIMIT

    def add(self, hashes: Tensor) -> None:
        """Add rows by their hashes (n,), which are copied."""
        # Where most rows are below the limit, selecting them costs more than taking all.
        if hashes.device.type == "cpu" and self.limit < NO_LIMIT // 2:
            self._append(hashes[hashes < self.limit], {})
        else:
            self._append(hashes.clone(), {})

    def _append(self, hashes: Tensor, columns: Table) -> None:
        """Let rows wait that are in memory of their own; if too many wait, settle those before."""
        rows = len(hashes)
        if rows == 0:
            return
        is_full = self._waiting_rows + rows > self.room * self.size
        if self._waiting and (is_full or len(self._waiting) == _MOST_PIECES):
            self.settle()
        self._waiting.append((hashes, columns))
        self._waiting_rows += rows

    def void(self) -> None:
        """Forget all rows and judge none from now on, because some rows had no hash."""
        if self.judges:
            self.settle()
            self._trim(0)

    def merge(self, other: RowSketch) -> Self:
        """Add another data set's rows, in place, and return this sketch.

        The smaller of the two sizes remains.
        """
        self.settle()
        other.settle()
        self.size = min(self.size, other.size)
        self.limit = min(self.limit, other.limit)
        self._join(other.hashes, other.counts, [other.columns])
        return self

    def without(self, other: RowSketch) -> Self:
        """A copy without the rows of another sketch; rows that are not here are ignored."""
        other.settle()
        remaining = self.trimmed(other.limit)
        removed_counts, _ = other.counts_of(remaining.hashes)
        counts = remaining.counts - removed_counts
        stays = (counts > 0).nonzero()[:, 0]
        remaining.hashes = remaining.hashes[stays]
        remaining.counts = counts[stays]
        remaining.columns = {name: column[stays] for name, column in remaining.columns.items()}
        return remaining

    def counts_of(self, hashes: Tensor) -> tuple[Tensor, Tensor]:
        """How often rows are in the data set, and which of them can be judged.

        Args:
            hashes: The hashes of the rows, (n,).

        Returns:
            The counts, 0 for rows that are not here or cannot be judged, and a mask; both (n,), on
            the device of the hashes.
        """
        self.settle()
        held_hashes = self.hashes.to(hashes.device)
        is_judged = hashes < self.limit
        is_here = is_judged & torch.isin(hashes, held_hashes)
        counts = torch.zeros_like(hashes)
        places = torch.searchsorted(held_hashes, hashes[is_here])
        counts[is_here] = self.counts.to(hashes.device)[places]
        return counts, is_judged

    def lacking(self, other: RowSketch) -> tuple[int, int]:
        """How many of another sketch's rows are not here, and how many could be judged.

        Of equal rows, as many are here as were added.
        """
        other.settle()
        counts, is_judged = self.counts_of(other.hashes)
        lacking = (other.counts - counts).clamp(min=0)
        return int(lacking[is_judged].sum()), int(other.counts[is_judged].sum())

    def require_held(self, removed: RowSketch) -> None:
        """Refuse to remove rows that are not in the fit, as far as hashes tell.

        Raises:
            ValueError: Some rows are not in the fit, or rows cannot be recognised at all.
        """
        if not self.judges:
            raise ValueError(
                "The rows of this fit cannot be recognised: its outputs have no input row of "
                "their own (atoms of structures), or its batches were objects. Pass check=False "
                "to remove rows without this check, exactly as they were added. The sample of "
                "rows is then dropped."
            )
        lacking, judged = self.lacking(removed)
        if not lacking:
            return
        limited = ""
        if self.limit < NO_LIMIT:
            limited = f" that could be checked ({self.share:.1%} of all)"
        raise ValueError(
            f"{lacking} of {judged} rows{limited} were never in the fit (or were already removed, "
            "or had another target). Pass rows as they were added, in the same dtypes, or pass "
            "check=False if they cannot be recognised."
        )

    def overlap(self, other: RowSketch) -> tuple[int, int, int]:
        """How many of another sketch's rows are here too.

        Returns:
            The number of such rows, how many of them occur only once in the other sketch, and how
            many of the other sketch's rows could be judged.
        """
        other.settle()
        counts, is_judged = self.counts_of(other.hashes)
        shared_counts = other.counts[counts > 0]
        once = int((shared_counts == 1).sum())
        return int(shared_counts.sum()), once, int(other.counts[is_judged].sum())

    def shared(self, hashes: Tensor) -> float:
        """How many of these hashes belong to rows of the data set.

        Hashes at or above the limit cannot be looked up: the share of those below it that are here
        is taken to hold for all.
        """
        counts, is_judged = self.counts_of(hashes)
        judged = int(is_judged.sum())
        if judged == 0:
            return 0.0
        return int((counts > 0).sum()) * len(hashes) / judged

    def trimmed(self, limit: int) -> Self:
        """A copy with only the hashes below a limit."""
        other = self.clone()
        other._trim(limit)
        return other

    def _trim(self, limit: int) -> None:
        """Drop the settled rows whose hash is not below a limit, and keep none such from now on."""
        self.limit = min(self.limit, limit)
        below = int(torch.searchsorted(self.hashes, self.limit))
        # Copies: a view would keep all rows in memory, and in what other processes are sent.
        self.hashes = self.hashes[:below].clone()
        self.counts = self.counts[:below].clone()
        self.columns = {name: column[:below].clone() for name, column in self.columns.items()}

    def clone(self) -> Self:
        """An independent copy; it shares the settled tensors, which are never written to."""
        self.settle()
        other = copy.copy(self)
        other._waiting = []
        return other

    def to(self, device: torch.device) -> Self:
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
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """The sketch from what `state` returned."""
        sketch = cls(limit=int(state["limit"]))
        sketch.hashes = state["hashes"]
        sketch.counts = state["counts"]
        return sketch

    def settle(self) -> None:
        """Sort in the rows that wait; must be called before threads share the sketch."""
        if self._bound is not None:
            self.limit = min(self.limit, int(self._bound))
            self._bound = None
        if not self._waiting:
            return
        hashes = torch.cat([hashes for hashes, _ in self._waiting])
        columns = [columns for _, columns in self._waiting]
        self._waiting = []
        self._waiting_rows = 0
        self._join(hashes, torch.ones_like(hashes), columns)

    def _join(self, hashes: Tensor, counts: Tensor, columns: Sequence[Table]) -> None:
        """Join other rows to those here, and keep the `size` smallest hashes of all.

        Args:
            hashes: The hashes of the other rows, (n,).
            counts: How often each came, (n,).
            columns: What goes with them, in tables that follow one another.
        """
        tables: list[Table] = []
        if len(self.hashes):
            tables.append(self.columns)
        if len(hashes):
            tables.extend(columns)
        if not tables:
            return
        device = hashes.device if len(hashes) else self.hashes.device
        hashes = torch.cat([self.hashes.to(device), hashes.to(device)])
        counts = torch.cat([self.counts.to(device), counts.to(device)])
        # A stable sort, so that the first of equal rows stays the first.
        hashes, order = torch.sort(hashes, stable=True)
        below = int(torch.searchsorted(hashes, self.limit))
        hashes, order = hashes[:below], order[:below]
        counts = counts[order]
        # Runs of equal hashes become one entry, with the sum of their counts.
        begins = torch.ones_like(hashes, dtype=torch.bool)
        begins[1:] = hashes[1:] != hashes[:-1]
        starts = begins.nonzero()[:, 0]
        if len(starts) < len(hashes):
            runs = begins.cumsum(0) - 1
            counts = torch.zeros_like(starts).index_add_(0, runs, counts)
            hashes, order = hashes[starts], order[starts]
        if len(hashes) > self.size:
            self.limit = int(hashes[self.size])
        self.hashes = hashes[: self.size]
        self.counts = counts[: self.size]
        self.columns = _columns_at(tables, order[: self.size])


def _columns_at(tables: list[Table], index: Tensor) -> Table:
    """The columns of selected rows of several tables.

    Args:
        tables: The columns of each table, by name.
        index: Numbers of the rows to select, as if all tables were one, in their order.
    """
    names = tables[0].keys()
    for columns in tables:
        _require_same_columns(names, columns.keys())
    if not names:
        return {}
    lengths = [len(next(iter(columns.values()))) for columns in tables]
    # Where each row of the tables goes to; -1 for rows that are not selected.
    places = torch.full((sum(lengths),), -1, dtype=torch.int64, device=index.device)
    places[index] = torch.arange(len(index), device=index.device)
    chosen = {}
    for name in names:
        # The tables are not joined first: that would take their memory once more.
        first = tables[0][name]
        dtype = first.dtype
        for columns in tables[1:]:
            dtype = torch.promote_types(dtype, columns[name].dtype)
        column = first.new_empty(len(index), *first.shape[1:], dtype=dtype, device=index.device)
        for columns, table_places in zip(tables, torch.split(places, lengths), strict=True):
            selected = table_places >= 0
            rows = columns[name].to(index.device)[selected]
            column[table_places[selected]] = rows.to(column)
        chosen[name] = column
    return chosen


def _require_same_columns(names: Collection[str], others: Collection[str]) -> None:
    """Refuse rows that lack a column of others."""
    if set(names) != set(others):
        raise ValueError(
            "Rows with and without a sample weight cannot be mixed. Weight all rows or none."
        )


class KeptRows(RowSketch):
    """The rows of lowest hash of a data set: a sketch with columns.

    The columns are the features, in the model's precision, (n, D) or (n, K, D); the predictions
    "mean", (n, K); the errors "residual" in float64, (n, K), NaN where a target is masked; the
    "weight" in the Gram, (n, K); and, if there are any, the user's "sample_weight",
    (n, 1) or (n, K), and the "bias_counts" beside the features, (n, H) or (n, K, H).

    The rows are sorted by their hashes when they are first read (`settle`), which most fits never
    need: a pass copies each row that it keeps, and sorts only where too many rows wait.

    `Statistics` drops the sample, for good, once rows come that it cannot take: their residuals are
    not known, or they have another number of targets.

    Args:
        size: How many rows to keep at most.
        limit: The sample has every row whose hash is below this limit, and no other.
    """

    room: ClassVar[float] = 1.25

    def __init__(self, size: int | None = None, limit: int = NO_LIMIT) -> None:
        super().__init__(size, limit)
        # Distinct hashes below the limit that is expected to be enough, until they are many.
        self._low_hashes = torch.empty(0, dtype=torch.int64)

    @classmethod
    def begin(cls, block: Block, size: int, limit: int) -> KeptRows | None:
        """An empty sample; None where none is wanted or possible.

        Nothing can be kept without residuals, or where rows are too wide for even one.

        Args:
            block: The first rows.
            size: How many rows to keep at most, 0 for none. Of wide rows, fewer are kept.
            limit: As in the class.
        """
        if block.residual is None:  # which `takes` would refuse
            return None
        bytes_per_row = 16  # the hash and the count
        for name, column in _columns_of(block).items():
            width = column.shape[1:].numel()
            if name == "features" and block.reading.ones:
                width += column.shape[1:-1].numel()
            bytes_per_row += width * column.element_size()
        size = min(size, int(MOST_BYTES / (1 + _SPARE)) // bytes_per_row)
        if size == 0:
            return None
        return cls(size, limit)

    @property
    def rows(self) -> Table:
        """The columns with each row as often as it came, by hash; there must be rows."""
        self.settle()
        return self.repeated(self.counts)

    def repeated(self, counts: Tensor) -> Table:
        """The columns of settled rows with each as often as `counts` (n,) say, by hash."""
        columns = {}
        repeats = bool((counts != 1).any())
        for name, column in self.columns.items():
            columns[name] = column.repeat_interleave(counts, 0) if repeats else column.clone()
        return columns

    def settle(self) -> None:
        """Sort in the rows that wait; any number of threads may call it."""
        with _SETTLING:
            super().settle()

    def compact(self) -> None:
        """Sort in the rows that wait where they take more memory than they will need."""
        rows = len(self.hashes) + self._waiting_rows
        if rows > (1 + _SPARE) * self.size:
            self.settle()

    def expect(self, rows: int | None, first: Tensor) -> None:
        """Lower the limit for data of a known size, so that few more than `size` rows are stored.

        Copies of rows have one hash, and where most rows are copies, too few rows would be below
        the limit. It is therefore lowered once a 64th of `size` distinct rows are known to be below
        it. Whether that happens during a pass does not depend on the order of the rows.

        Args:
            rows: How many rows the data set has; None where that is not known.
            first: The hashes of the next rows.
        """
        if first.device.type != "cpu":  # which should not be asked for numbers, see `_lowest`
            super().expect(rows, first)
            return
        limit = self.limit if rows is None else self._limit_for(rows)
        if limit < self.limit:
            low_hashes = torch.cat([self._low_hashes, first[first < limit]])
            self._low_hashes = torch.unique(low_hashes)
            if 64 * len(self._low_hashes) >= self.size:
                self.limit = limit
                self._low_hashes = self._low_hashes[:0]

    def takes(self, block: Block) -> bool:
        """Whether a block's rows can join: residuals are known, and of as many targets."""
        if block.output_row_hashes is None or block.residual is None:
            return False
        columns = self.columns
        if self._waiting:
            _, columns = self._waiting[-1]
        mean = columns.get("mean")
        return mean is None or mean.shape[1] == block.residual.shape[1]

    def update(self, block: Block) -> None:
        """Take the block's rows of lowest hash in; only blocks that `takes` allows."""
        hashes = block.output_row_hashes
        residual = block.residual
        assert hashes is not None and residual is not None
        if block.sample_weight is not None or block.weights is not None:
            # Rows without any target get the highest hash, which is never below the limit.
            has_target = residual.isfinite()
            if block.sample_weight is not None:
                has_target &= block.sample_weight > 0
            hashes = torch.where(has_target.any(1), hashes, NO_LIMIT)
            residual = torch.where(has_target, residual, torch.nan)
        elif block.expected is not None:  # with weights, nobody knows how many rows count
            self.expect(block.expected * (block.rows // block.samples), hashes)
        columns = {**_columns_of(block), "residual": residual}
        known_columns = self._waiting[-1][1] if self._waiting else self.columns
        if known_columns:
            _require_same_columns(known_columns, columns)
        # The block's memory is written to again: what is kept are copies.
        index = self._lowest(hashes)
        if index is None:
            hashes = hashes.clone()
        else:
            hashes = hashes.index_select(0, index)
        kept_columns = {}
        for name, column in columns.items():
            ones = name == "features" and block.reading.ones
            kept_columns[name] = _copied(column, index, ones)
        self._append(hashes, kept_columns)

    def _lowest(self, hashes: Tensor) -> Tensor | None:
        """Places of the rows that may belong to the sample; None for all.

        These are the rows whose hash is below the limit. An accelerator should not be asked how
        many they are, because the answer has to be waited for. Where it is known how many rows to
        expect, the lowest rows are taken instead, some more than are likely to be below the limit,
        and the lowest hash that had to be left out bounds the limit.
        """
        if hashes.device.type == "cpu" or not self._expects:
            is_below = hashes < self.limit
            if len(hashes) <= self.size and bool(is_below.all()):
                return None
            below = is_below.nonzero()[:, 0]
            if len(below) > self.size:  # rows that will not stay need not be copied
                distinct = torch.unique(hashes[below])
                if len(distinct) > self.size:
                    self.limit = min(self.limit, int(distinct[self.size]))
                    below = (hashes < self.limit).nonzero()[:, 0]
            return None if len(below) == len(hashes) else below
        # The number below the limit is binomial: its mean and eight standard deviations.
        likely = self.share * len(hashes)
        count = min(len(hashes), self.size, int(likely + 8 * likely**0.5 + 8))
        if count == len(hashes):
            return None
        lowest, index = torch.topk(hashes, count + 1, largest=False, sorted=True)
        bound = lowest[-1]
        self._bound = bound if self._bound is None else torch.minimum(self._bound, bound)
        return index[:-1]

    def after(self, change: Tensor) -> KeptRows:
        """A copy after a change (D, K or 1) of the weights: residuals r become r - F change."""
        copy = self.clone()
        if not copy.columns:  # the sample is empty
            return copy
        mean = self.columns["mean"]
        residual = self.columns["residual"]
        shift = responses(self.columns["features"].to(residual), change.to(residual))
        copy.columns = {
            **self.columns,
            "mean": (mean + shift).to(mean),
            "residual": residual - shift,
        }
        return copy

    def state(self) -> dict[str, Tensor]:
        """The sample as tensors, for files."""
        return {
            **super().state(),
            "size": torch.tensor(self.size),
            **prefixed("columns", self.columns),
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> KeptRows:
        """The sample that `state` came from."""
        sample = cls(int(state["size"]), int(state["limit"]))
        sample.hashes = state["hashes"]
        sample.counts = state["counts"]
        sample.columns = unprefixed("columns", state)
        return sample


def _columns_of(block: Block) -> Table:
    """The columns of a block's rows, with features as the block has them, without any ones."""
    residual = block.residual
    assert residual is not None
    reading = block.reading
    if block.weights is None:
        weight = residual.new_ones(1, 1)
    else:
        weight = block.weights
    columns = {
        "features": reading.bare_features,
        "mean": reading.output_layout.rows(reading.output),
        "residual": residual,
        "weight": weight.expand_as(residual),
    }
    if block.sample_weight is not None:
        columns["sample_weight"] = block.sample_weight
    if reading.bias_counts is not None:
        columns["bias_counts"] = reading.bias_counts
    return columns


def _copied(column: Tensor, index: Tensor | None, ones: bool) -> Tensor:
    """A copy of some rows of a column, or of all, with a column of ones if wanted."""
    if index is not None:
        column = column.index_select(0, index)
    if not ones:
        return column if index is not None else column.clone(memory_format=torch.contiguous_format)
    # Written once: joining ones to a copy would be a second copy.
    copy = column.new_empty(*column.shape[:-1], column.shape[-1] + 1)
    copy[..., :-1] = column
    copy[..., -1] = 1
    return copy
