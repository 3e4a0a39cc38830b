"""A bounded sample of a data set's rows, to learn from without a second pass over it.

A sketch that keeps the rows and not their hashes alone: all of them while they are few, a uniform
sample beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..notices import require
from .sketch import NO_LIMIT, RowSketch, row_hashes
from .storage import prefixed, unprefixed

SIZE = 8192
"""Rows to keep by default, and"""
LARGEST = 1 << 25
"""numbers of features at most: wider rows are fewer."""


class SampledRows(NamedTuple):
    """Output rows, n of them.

    Attributes:
        features: (n, D) or (n, K, D), in the model's precision.
        mean: the predictions, (n, K).
        residual: target minus prediction, (n, K) in float64; NaN where a target is masked.
        weight: in the Gram, (n, K).
        importance: the user's sample weight, (n, K); None without.
        counts: that stand beside the features, (n, H) or (n, K, H); None without.
    """

    features: Tensor
    mean: Tensor
    residual: Tensor
    weight: Tensor
    importance: Tensor | None = None
    counts: Tensor | None = None


class RowSample(RowSketch):
    """The rows of lowest hash of a data set: a sketch whose columns are those of `SampledRows`.

    Args:
        size: how many rows to keep at most.
        limit: every row whose hash is below it is held, and no other.
    """

    def __init__(self, size: int = SIZE, limit: int = NO_LIMIT) -> None:
        if type(size) is not int or size < 0:
            raise ValueError(f"sample must be a whole number of rows, 0 for none, got {size!r}.")
        super().__init__(limit=limit)
        self.size = size

    @property
    def rows(self) -> SampledRows:
        """Those held, each as often as it came; ask after the first `add`."""
        self.settle()
        copies = {k: self.columns[k].repeat_interleave(self.counts, 0) for k in self.columns}
        return SampledRows(**copies)

    def add(  # type: ignore[override]
        self,
        hashes: Tensor,
        *,
        expected: int | None = None,
        ones: bool = False,
        features: Tensor | Sequence[Tensor],
        **given: Tensor | None,
    ) -> None:
        """Take rows in; those above the limit cost no more than a look.

        Args:
            hashes: (n,).
            expected: how many rows will come in all, where that is known: few more than are kept
                need then be looked at.
            ones: whether the features lack their last column, which is one.
            features: of all rows, perhaps in parts.
            given: the other columns by name.
        """
        parts = [features] if isinstance(features, Tensor) else features
        self.size = min(self.size, LARGEST // (parts[0].shape[1:].numel() + ones))
        share = 1.0 if expected is None else (self.size + 8 * self.size**0.5) / max(1, expected)
        if share < 1:
            self.limit = min(self.limit, int(share * NO_LIMIT))
        if hashes.device.type == "cpu" or (share == 1 and len(hashes) > self.size):
            index = self._below(hashes)
            hashes = hashes[index]
        else:
            hashes, index = self._first_below(hashes, share)
        columns = {k: column[index] for k, column in given.items() if column is not None}
        own = _picked(parts, index)  # copies, as those are: the caller may write to its own
        own = torch.nn.functional.pad(own, (0, 1), value=1.0) if ones else own
        super().add(hashes, features=own, **columns)

    @property
    def _patience(self) -> int:
        return 2 * self.size

    def _below(self, hashes: Tensor) -> Tensor:
        if len(hashes) > self.size and len(distinct := torch.unique(hashes)) > self.size:
            self.limit = min(self.limit, int(distinct[self.size]))
        return (hashes < self.limit).nonzero()[:, 0]

    def _first_below(self, hashes: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Some more rows than are likely below the limit, without waiting for the device.

        What a row too many would be is above every limit. Rows that find no place (copies of one
        row, say) lower the limit.
        """
        mean = share * len(hashes)
        most = min(len(hashes), int(mean + 8 * mean**0.5 + 8))
        below, places = hashes < self.limit, torch.arange(len(hashes), device=hashes.device)
        rank = below.cumsum(0)
        kept = below & (rank <= most)
        slots = torch.where(kept, rank - 1, most)
        index = places.new_zeros(most + 1).scatter_(0, slots, places)[:most]
        lost = torch.where(below & ~kept, hashes, NO_LIMIT).amin()
        self._lost = lost if self._lost is None else torch.minimum(self._lost, lost)
        return torch.where(places[:most] < rank[-1], hashes[index], NO_LIMIT), index

    def to(self, device: torch.device) -> RowSample:
        """A copy on another device."""
        other = self.clone()
        other.hashes, other.counts = self.hashes.to(device), self.counts.to(device)
        other.columns = {k: column.to(device) for k, column in self.columns.items()}
        return other

    def trimmed(self, limit: int) -> RowSample:
        """A copy without the rows whose hash is `limit` or above."""
        other = self.clone()
        below = self.hashes < limit
        other.limit = min(self.limit, limit)
        other.hashes, other.counts = self.hashes[below], self.counts[below]
        other.columns = {k: column[below] for k, column in self.columns.items()}
        return other

    def after(self, change: Tensor) -> RowSample:
        """A copy when the readout's weights have changed by (D, K or 1): r becomes r - F change."""
        other = self.clone()
        features, mean, residual = (self.columns[k] for k in ("features", "mean", "residual"))
        features, change = features.to(residual), change.to(residual)
        joint = features.ndim == 3  # a row of features for each target
        moved = (features * change.mT).sum(-1) if joint else features @ change
        changed = {"mean": (mean + moved).to(mean), "residual": residual - moved}
        other.columns = self.columns | changed
        return other

    def state(self) -> dict[str, Tensor]:
        """As tensors, for files."""
        hashed = super().state() | {"size": torch.tensor(self.size)}
        return prefixed("hashed", hashed) | prefixed("columns", self.columns)

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> RowSample:
        """The sample that `state` came from; refused where it came from none."""
        hashed, columns = (unprefixed(name, state) for name in ("hashed", "columns"))
        known, sample = RowSketch.from_state(hashed), cls()
        vars(sample).update(vars(known), size=int(hashed["size"]), columns=columns)
        require(len(sample.hashes) <= sample.size and _sound(sample), "the sample of rows")
        return sample


def _picked(parts: Sequence[Tensor], index: Tensor) -> Tensor:
    """Rows of tensors that follow one another; an accelerator does not join them."""
    if len(parts) == 1 or index.device.type == "cpu":  # where few are joined, and seldom
        return (parts[0] if len(parts) == 1 else torch.cat(list(parts)))[index]
    ends = list(accumulate(map(len, parts)))
    starts = [0, *ends[:-1]]
    picked = parts[0][index.clamp(max=ends[0] - 1)]
    for part, start in zip(parts[1:], starts[1:], strict=True):
        rows = part[(index - start).clamp(0, len(part) - 1)]
        later = (index >= start).reshape(-1, *[1] * (rows.ndim - 1))
        picked = torch.where(later, rows, picked)
    return picked


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


def _sound(sample: RowSample) -> bool:
    """Whether the columns of a file have the shapes, precision and range of a sample's."""
    columns, shape = sample.columns, sample.columns["mean"].shape
    rows = SampledRows(**columns)
    alike = {columns[k].shape for k in ("mean", "residual", "weight", "importance") if k in columns}
    long = all(len(column) == len(sample.hashes) for column in columns.values())
    if not (long and alike == {shape} and len(shape) == 2 and rows.features.ndim > 1):
        return False
    finite = all(bool(columns[k].isfinite().all()) for k in columns if k != "residual")
    known = rows.residual.dtype == torch.float64 and not bool(rows.residual.isinf().any())
    return finite and known and bool((rows.weight >= 0).all())
