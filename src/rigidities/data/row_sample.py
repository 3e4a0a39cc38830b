"""A bounded sample of a data set's rows, to learn from without a second pass over it.

Kept are the rows of lowest hash (bottom-k sampling): all of them while they are few, a uniform
sample beyond. Like the Gram it depends neither on order nor on batching, two samples merge to that
of both data sets, and rows can be taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..notices import require
from .sketch import NO_LIMIT, row_hashes

SIZE = 8192
"""Rows to keep by default, and"""
LARGEST = 1 << 25
"""numbers of features at most: wider rows are fewer."""

_LOW = (1 << 24) - 1


class SampledRows(NamedTuple):
    """Output rows, n of them.

    Attributes:
        hashes: (n,) int64, rising in a sample; see `output_hashes`.
        copies: (n,) int64, how many rows have that hash.
        features: (n, D) or (n, K, D), in the model's precision.
        mean: the predictions, (n, K).
        residual: target minus prediction, (n, K) in float64; NaN where a target is masked.
        weight: in the Gram, (n, K).
        importance: the user's sample weight, (n, K); None without.
        counts: that stand beside the features, (n, H) or (n, K, H); None without.
    """

    hashes: Tensor
    copies: Tensor
    features: Tensor
    mean: Tensor
    residual: Tensor
    weight: Tensor
    importance: Tensor | None = None
    counts: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> SampledRows:
        """The same with every column changed."""
        return SampledRows(**{name: change(column) for name, column in self.columns().items()})

    def columns(self) -> dict[str, Tensor]:
        """By name, without those that are None."""
        return {name: column for name, column in self._asdict().items() if column is not None}

    def below(self, limit: int) -> SampledRows:
        """A copy of those whose hash is below a limit."""
        index = (self.hashes < limit).nonzero()[:, 0]
        return self.each(lambda column: column.index_select(0, index))


class RowSample:
    """The rows of lowest hash of a data set.

    Args:
        size: how many rows to keep at most.
        limit: every row whose hash is below it is held, and no other.
    """

    def __init__(self, size: int = SIZE, limit: int = NO_LIMIT) -> None:
        if type(size) is not int or size < 0:
            raise ValueError(f"sample must be a whole number of rows, 0 for none, got {size!r}.")
        self.size, self.limit = size, limit
        self._parts: list[SampledRows] = []
        self._waiting, self._settled = 0, True

    @property
    def rows(self) -> SampledRows:
        """Those held, whose tensors are never written to; ask after the first `add`."""
        self.settle()
        return self._parts[0]

    def add(self, rows: SampledRows) -> None:
        """Take rows in; those above the limit cost no more than a look."""
        width = rows.features.shape[1:].numel()
        most = min(self.size, LARGEST // width)
        if len(rows.hashes) > most:
            self._lower(torch.unique(rows.hashes), most)
        if rows.hashes.device.type == "cpu" or len(rows.hashes) > most:
            rows = rows.below(self.limit)
        else:  # to look would be to wait; copies, since the caller may write to its own
            rows = rows.each(torch.clone)
        if len(rows.hashes) or not self._parts:
            self._parts.append(rows)
            self._waiting, self._settled = self._waiting + len(rows.hashes), False
        if self._waiting >= most:
            hashes, self._waiting = torch.cat([part.hashes for part in self._parts]), 0
            self._lower(torch.unique(hashes[hashes < self.limit]), most)
            if len(hashes) > min(4 * self.size, 2 * LARGEST // width):  # seldom: a copy of all
                self.settle()

    def merge(self, other: RowSample, *, sign: int = 1) -> RowSample:
        """Take another data set's rows in, or out with sign -1, and return this sample."""
        rows, self.limit = other.rows, min(self.limit, other.limit)
        self._parts.append(rows._replace(copies=sign * rows.copies))
        self._settled = False
        self.settle()
        return self

    def without(self, other: RowSample) -> RowSample:
        """A sample of what is left without another's rows; those never held are passed over."""
        return self.clone().merge(other, sign=-1)

    def clone(self) -> RowSample:
        """An independent copy; the tensors are shared."""
        return self.to(self.rows.hashes.device)

    def to(self, device: torch.device) -> RowSample:
        """A copy on another device."""
        copy = RowSample(self.size, self.limit)
        copy._parts = [self.rows.each(lambda column: column.to(device))]
        return copy

    def after(self, change: Tensor) -> RowSample:
        """A copy when the readout's weights have changed by (D, K or 1): r becomes r - F change."""
        copy, rows = self.clone(), self.rows
        features, change = rows.features.to(rows.residual), change.to(rows.residual)
        joint = features.ndim == 3  # a row of features for each target
        moved = (features * change.mT).sum(-1) if joint else features @ change
        mean = (rows.mean + moved).to(rows.mean.dtype)
        copy._parts = [rows._replace(mean=mean, residual=rows.residual - moved)]
        return copy

    def state(self) -> dict[str, Tensor]:
        """As tensors, for files."""
        return {"bounds": torch.tensor([self.size, self.limit]), **self.rows.columns()}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> RowSample:
        """The sample that `state` came from; refused where it came from none."""
        bounds, rows = state["bounds"], {k: state[k] for k in state if k != "bounds"}
        require(bounds.dtype == torch.int64 and bool((bounds >= 0).all()), "the sample's bounds")
        sample = cls(*bounds.tolist())
        sample._parts = [SampledRows(**rows)]
        require(_sound(sample), "the sample of rows")
        return sample

    def settle(self) -> None:
        """Make one part of all by rising hash; equal rows are one, unless no copy is left."""
        if self._settled:
            return
        rows = _joined([part.below(self.limit) for part in self._parts])
        hashes, order = rows.hashes.sort(stable=True)
        distinct, index = torch.unique_consecutive(hashes, return_inverse=True)
        copies = torch.zeros_like(distinct).index_add_(0, index, rows.copies[order])
        first = order[torch.cat([torch.ones_like(index[:1]), index.diff()]) > 0]
        most = min(self.size, LARGEST // rows.features.shape[1:].numel())
        self._lower(distinct[copies > 0], most)
        held = (copies > 0) & (distinct < self.limit)
        rows = rows.each(lambda column: column.index_select(0, first[held]))
        self._parts = [rows._replace(copies=copies[held])]
        self._waiting, self._settled = 0, True

    def _lower(self, distinct: Tensor, most: int) -> None:
        """Lower the limit to where it leaves so many of these hashes, which rise."""
        if len(distinct) > most:
            self.limit = min(self.limit, int(distinct[most]))


def output_hashes(hashes: Tensor, rows: int, importance: Tensor | None) -> Tensor:
    """Hashes (rows,) of output rows from those of inputs, which have equally many rows in turn.

    The place among the input's rows is hashed, and the importance into the low bits alone: where
    rows are looked up in a sketch, those of the sample must all be in it.
    """
    several = rows // len(hashes)
    if several > 1:
        place = torch.arange(rows, device=hashes.device) % several
        hashes = _hashed(hashes.repeat_interleave(several), place)
    if importance is None:
        return hashes
    return (hashes & ~_LOW) | (_hashed(hashes, importance.to(torch.float32)) & _LOW)


def _hashed(*values: Tensor) -> Tensor:
    hashes = row_hashes(values, len(values[0]))
    assert hashes is not None
    return hashes


def _joined(parts: Sequence[SampledRows]) -> SampledRows:
    """One after the other, on the device of the first."""
    kinds, device = [part.columns() for part in parts], parts[0].hashes.device
    if any(kind.keys() != kinds[0].keys() for kind in kinds):
        raise ValueError(
            "Rows with and without a sample weight (or counts) do not make one sample. They must "
            "come from the same readout and loss."
        )
    joined = {name: torch.cat([kind[name].to(device) for kind in kinds]) for name in kinds[0]}
    return SampledRows(**joined)


def _sound(sample: RowSample) -> bool:
    """Whether rows from a file have the shapes, precision and range of a sample's."""
    rows = sample.rows
    (n, targets), columns, hashes = rows.mean.shape, rows.columns(), rows.hashes
    shapes = dict.fromkeys(("residual", "weight", "importance"), (n, targets))
    shapes |= {
        name: (n, *column.shape[1:]) for name, column in columns.items() if name not in shapes
    }
    shaped = all(column.shape == shapes[name] for name, column in columns.items())
    whole = hashes.dtype == torch.int64 and rows.residual.dtype == torch.float64
    if not (shaped and whole and hashes.ndim == rows.copies.ndim == 1 and rows.features.ndim > 1):
        return False
    ends = torch.cat([hashes.new_tensor([-1]), hashes, hashes.new_tensor([sample.limit])])
    sound = [ends.diff() > 0, rows.copies > 0, rows.weight >= 0, ~rows.residual.isinf()]
    sound += [column.isfinite() for name, column in columns.items() if name != "residual"]
    return n <= sample.size and all(bool(each.all()) for each in sound)
