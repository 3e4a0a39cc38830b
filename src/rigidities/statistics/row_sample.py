"""A bounded sample of a fit's rows, to learn from without a second pass over the data.

It is a sketch (see `data.sketch`) that keeps rows besides their hashes: all rows while they are
few, and a uniform sample, those of lowest hash, beyond.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..data.sketch import NO_LIMIT, RowSketch, RowTable
from ..data.storage import prefixed, unprefixed
from .block import Block
from .plan import SAMPLE, Plan

LARGEST = 1 << 25
"""The most numbers in the features of settled rows. If rows are wider, fewer are kept."""


class RowSample(RowSketch):
    """The rows of lowest hash of a data set: a sketch with columns.

    The columns are the features, in the model's precision, (n, D) or (n, K, D); the predictions
    "mean", (n, K); the errors "residual" in float64, (n, K), NaN where a target is masked; the
    "weight" in the Gram, (n, K); and, if there are any, the user's sample weights "importance",
    (n, 1) or (n, K), and the "counts" beside the features, (n, H) or (n, K, H).

    `Statistics` drops the sample, for good, once rows come that it cannot take: their residuals are
    not known, or they have another number of targets.

    Args:
        size: How many rows to keep at most.
        limit: The sample has every row whose hash is below this limit, and no other.
    """

    # New rows wait until there are this many times `size` of them; see `RowSketch`.
    room: ClassVar[int] = 2

    def __init__(self, size: int = SAMPLE, limit: int = NO_LIMIT) -> None:
        super().__init__(size, limit)
        self._ones = False  # whether the latest rows lack their last feature, which is one

    @classmethod
    def begin(cls, block: Block, plan: Plan) -> RowSample | None:
        """An empty sample; None where none is wanted, or rows are too wide for even one."""
        width = block.reading.rows.shape[1:].numel() + block.reading.ones
        size = min(plan.sample, LARGEST // width)
        if size == 0:
            return None
        return cls(size, plan.sample_limit)

    @property
    def rows(self) -> dict[str, Tensor]:
        """The columns with each row as often as it came; there must be rows."""
        self.settle()
        repeats = bool((self.counts > 1).any())
        columns = {}
        for name, column in self.columns.items():
            if repeats:
                columns[name] = column.repeat_interleave(self.counts, 0)
            else:
                columns[name] = column.clone()
        return columns

    def takes(self, block: Block) -> bool:
        """Whether a block's rows can join: residuals are known, and of as many targets."""
        if block.row_hashes is None or block.residual is None:
            return False
        mean = self.columns.get("mean")
        if mean is None and self._recent is not None:
            mean = self._recent.table().columns["mean"]
        return mean is None or mean.shape[1] == block.residual.shape[1]

    def update(self, block: Block) -> None:
        """Take the block's rows of lowest hash in; only blocks that `takes` allows."""
        hashes = block.row_hashes
        residual = block.residual
        assert hashes is not None and residual is not None
        if block.importance is not None or block.weights is not None:
            # Rows without any target get the highest hash, which is never below the limit.
            has_target = residual.isfinite()
            if block.importance is not None:
                has_target &= block.importance > 0
            hashes = torch.where(has_target.any(1), hashes, NO_LIMIT)
            residual = torch.where(has_target, residual, torch.nan)
        elif block.expected is not None:  # with weights, nobody knows how many rows count
            self.expect(block.expected * (block.rows // block.samples), hashes)
        if block.reading.ones != self._ones:
            # The rows before lack the column of ones and these do not, or the reverse.
            self.settle()
            self._ones = block.reading.ones
        self._append(self._lowest(hashes), hashes, self._columns_of(block, residual))

    def _lowest(self, hashes: Tensor) -> Tensor | None:
        """Places of the rows that may belong to the sample; None for all.

        These are the rows whose hash is below the limit. An accelerator should not be asked how
        many they are, because the answer has to be waited for. Where it is known how many rows to
        expect, the lowest rows are taken instead, some more than are likely to be below the limit,
        and the lowest hash that had to be left out bounds the limit.
        """
        if hashes.device.type == "cpu" or not self._expects:
            below = (hashes < self.limit).nonzero()[:, 0]
            if len(below) > self.size:  # rows that will not stay need not be copied
                distinct = torch.unique(hashes[below])
                if len(distinct) > self.size:
                    self.limit = min(self.limit, int(distinct[self.size]))
                    below = (hashes < self.limit).nonzero()[:, 0]
            return below
        # The number below the limit is binomial: its mean and eight standard deviations.
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
        """The columns of a block's rows, except those that are all ones."""
        reading = block.reading
        columns = {
            "features": reading.rows,
            "mean": reading.output_layout.rows(reading.output),
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
        """The latest rows with the columns of ones that blocks leave out."""
        columns = recent.columns
        if self._ones:
            columns["features"] = torch.nn.functional.pad(columns["features"], (0, 1), value=1.0)
        if "weight" not in columns:
            columns["weight"] = torch.ones_like(columns["residual"])
        return recent

    def merge(self, other: RowSample) -> None:  # type: ignore[override]
        """Take another data set's rows in; the smaller of the two sizes remains."""
        self.size = min(self.size, other.size)
        super().merge(other)

    def after(self, change: Tensor) -> RowSample:
        """A copy after a change (D, K or 1) of the weights: residuals r become r - F change."""
        copy = self.clone()
        if not copy.columns:  # the sample is empty
            return copy
        mean = self.columns["mean"]
        residual = self.columns["residual"]
        features = self.columns["features"].to(residual)
        change = change.to(residual)
        if features.ndim == 3:  # (n, K, D): each target has features of its own
            shift = (features * change.mT).sum(-1)
        else:
            shift = features @ change
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
    def from_state(cls, state: dict[str, Tensor]) -> RowSample:
        """The sample that `state` came from."""
        sample = cls(int(state["size"]), int(state["limit"]))
        sample.hashes = state["hashes"]
        sample.counts = state["counts"]
        sample.columns = unprefixed("columns", state)
        return sample
