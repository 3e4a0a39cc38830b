"""A bounded sample of a fit's rows, to learn from without a second pass over the data.

A sketch that keeps the rows and not their hashes alone: all of them while they are few, a uniform
sample beyond.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...data.sketch import NO_LIMIT, RowSketch, RowTable
from ...data.storage import prefixed, unprefixed
from .block import Block
from .parts import SAMPLE, Part, Plan

LARGEST = 1 << 25
"""Numbers in the features of settled rows at most: wider rows are fewer."""


class SampledRows(NamedTuple):
    """Output rows, n of them.

    Attributes:
        features: (n, D) or (n, K, D), in the model's precision.
        mean: the predictions, (n, K).
        residual: target minus prediction, (n, K) in float64; NaN where a target is masked.
        weight: in the Gram, (n, K).
        importance: the user's sample weight, (n, 1) or (n, K); None without.
        counts: that stand beside the features, (n, H) or (n, K, H); None without.
    """

    features: Tensor
    mean: Tensor
    residual: Tensor
    weight: Tensor
    importance: Tensor | None = None
    counts: Tensor | None = None


class RowSample(RowSketch, Part):
    """The rows of lowest hash of a data set: a sketch whose columns are those of `SampledRows`.

    It is lost, for good, once rows come whose residuals are not known or whose number of targets
    is another.

    Args:
        size: how many rows to keep at most.
        limit: every row whose hash is below it is held, and no other.
    """

    room: ClassVar[int] = 2

    def __init__(self, size: int = SAMPLE, limit: int = NO_LIMIT) -> None:
        super().__init__(size, limit)
        self.lost = False
        self._ones = False  # whether the latest rows lack their last feature, which is one

    @classmethod
    def begin(cls, block: Block, plan: Plan) -> RowSample | None:
        """Of no rows yet; None where none are wanted, or wide rows leave no room for one."""
        width = block.features.shape[1:].numel() + block.reading.ones
        size = min(plan.sample, LARGEST // width)
        if size == 0:
            return None
        return cls(size, plan.sample_limit)

    @property
    def rows(self) -> SampledRows:
        """Those held, each as often as it came; there must be some."""
        self.settle()
        columns = self.columns
        if bool((self.counts > 1).any()):
            columns = {k: column.repeat_interleave(self.counts, 0) for k, column in columns.items()}
        else:
            columns = {k: column.clone() for k, column in columns.items()}
        return SampledRows(**columns)

    def update(self, block: Block) -> None:
        """Take the block's rows of lowest hash in."""
        if self.lost:
            return
        hashes, residual = block.row_hashes, block.residual
        if hashes is None or residual is None or self._other_targets(residual):
            self._lose()
            return
        if block.importance is not None or block.weights is not None:
            # Rows without any target are put at the highest limit, below which they never are.
            known = residual.isfinite()
            if block.importance is not None:
                known &= block.importance > 0
            hashes = torch.where(known.any(1), hashes, NO_LIMIT)
            residual = torch.where(known, residual, torch.nan)
        elif block.expected is not None:  # with weights, nobody knows how many rows count
            self.expect(block.expected * (block.rows // block.samples), hashes)
        if block.reading.ones != self._ones:
            self.settle()  # with the column of ones that the rows before lack, or not
            self._ones = block.reading.ones
        self._append(self._lowest(hashes), hashes, self._columns_of(block, residual))

    def _other_targets(self, residual: Tensor) -> bool:
        """Whether rows have another number of targets than those held."""
        mean = self.columns.get("mean")
        if mean is None and self._recent is not None:
            mean = self._recent.table().columns["mean"]
        return mean is not None and mean.shape[1] != residual.shape[1]

    def _lowest(self, hashes: Tensor) -> Tensor | None:
        """Places of the rows that may belong to the sample; None for all.

        Those below the limit. An accelerator should not be asked how many they are: where it is
        known how many rows to expect, it gives some more than are likely to be, the lowest ones,
        and the lowest that had to be left out bounds the limit.
        """
        if hashes.device.type == "cpu" or not self._expects:
            below = (hashes < self.limit).nonzero()[:, 0]
            if len(below) > self.size:  # no more than fit: others would be copied for nothing
                distinct = torch.unique(hashes[below])
                if len(distinct) > self.size:
                    self.limit = min(self.limit, int(distinct[self.size]))
                    below = (hashes < self.limit).nonzero()[:, 0]
            return below
        likely = self.share * len(hashes)
        count = min(len(hashes), self.size, int(likely + 8 * likely**0.5 + 8))
        if count == len(hashes):
            return None
        lowest, index = torch.topk(hashes, count + 1, largest=False, sorted=True)
        bound = lowest[-1]
        self._bound = bound if self._bound is None else torch.minimum(self._bound, bound)
        return index[:-1]

    @staticmethod
    def _columns_of(block: Block, residual: Tensor) -> dict[str, Tensor]:
        """The columns of a block's rows, as far as they are not all ones."""
        reading = block.reading
        columns = {
            "features": reading.inputs,
            "mean": reading.rows(reading.output),
            "residual": residual,
        }
        if block.weights is not None:
            columns["weight"] = block.weights.expand_as(residual)
        if block.importance is not None:
            columns["importance"] = block.importance
        if reading.counts is not None:
            columns["counts"] = reading.counts
        return columns

    def _completed(self, recent: RowTable) -> RowTable:
        """With the columns of ones that blocks leave out."""
        columns = recent.columns
        if self._ones:
            columns["features"] = torch.nn.functional.pad(columns["features"], (0, 1), value=1.0)
        if "weight" not in columns:
            columns["weight"] = torch.ones_like(columns["residual"])
        return recent

    def _lose(self) -> None:
        self.lost = True
        self.void()

    def merge(self, other: RowSample) -> None:  # type: ignore[override]
        """Take another data set's rows in; the smaller of the two sizes holds."""
        if self.lost or other.lost:
            self._lose()
            return
        self.size = min(self.size, other.size)
        super().merge(other)

    def without(self, removed: RowSample) -> RowSample | None:  # type: ignore[override]
        """The sample of the rows that are left."""
        if self.lost or removed.lost:
            return None
        return super().without(removed)

    def after(self, change: Tensor) -> RowSample:
        """A copy when the readout's weights have changed by (D, K or 1): r becomes r - F change."""
        other = self.clone()
        if not other.columns:  # no row is held
            return other
        residual = self.columns["residual"]
        features, change = self.columns["features"].to(residual), change.to(residual)
        if features.ndim == 3:  # a row of features for each target
            moved = (features * change.mT).sum(-1)
        else:
            moved = features @ change
        mean = self.columns["mean"]
        changed = {"mean": (mean + moved).to(mean), "residual": residual - moved}
        other.columns = self.columns | changed
        return other

    def state(self) -> dict[str, Tensor]:
        """As tensors, for files."""
        if self.lost:
            return {}
        hashed = super().state() | {"size": torch.tensor(self.size)}
        return hashed | prefixed("columns", self.columns)

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> RowSample:
        """The sample that `state` came from."""
        sample = cls(int(state["size"]), int(state["limit"]))
        sample.hashes, sample.counts = state["hashes"], state["counts"]
        sample.columns = unprefixed("columns", state)
        return sample
