r"""The unit in which each target counts, where one weight vector serves several targets.

With $G_k$ the Gram of target k's rows and $s_k$ the spread of its training targets

$$ G = \sum_k u_k G_k, \qquad u_k = (s / s_k)^2, $$

where s is the geometric mean of the spreads. No spread counts as less than `LEAST_SPREAD` of their
median. This is the Gram of a network that was trained on standardised targets, in the unit s. The
products with residuals have the same factors. All spreads are known only after the last row, so a
Gram is kept for each target until then.

Spreads come from the weight, the mean and the sum of squares about the mean of each target, which
merge and separate without sums of squares of large offsets (Chan, Golub, LeVeque 1983).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .block import Block

_ROUNDING = 1e-13
"""Share of what it was computed from below which a spread or a sum of squares is rounding.

Factors that differ from one by no more than this are one.
"""


LEAST_SPREAD = 1e-3
"""The smallest spread that counts, relative to the median of the targets' spreads."""


@dataclass(frozen=True)
class TargetUnits:
    """Moments of the training targets and of the model's outputs.

    In each tensor, (2, K), the first row belongs to the targets and the second to the outputs.
    Outputs stand in where no row has a target.

    Attributes:
        rows: The number of rows of positive weight.
        weight: The sum of their weights, which are the user's sample weights.
        mean: Their weighted mean.
        squares: The weighted sum of their squared differences from the mean.
    """

    rows: Tensor
    weight: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def none(cls, targets: int, device: torch.device) -> TargetUnits:
        """The moments of no rows."""
        zeros = torch.zeros(2, targets, dtype=torch.float64, device=device)
        return cls(rows=zeros.to(torch.int64), weight=zeros, mean=zeros, squares=zeros)

    @classmethod
    def of(cls, block: Block) -> TargetUnits:
        """The moments of the rows of a block."""
        outputs = block.reading.output_layout.rows(block.reading.output).to(torch.float64)
        weights = torch.ones_like(outputs)
        if block.sample_weight is not None:
            weights = block.sample_weight.to(outputs).expand_as(outputs)
        if block.target is None:
            values = torch.stack([outputs, outputs])  # (2, M, K)
            weights = torch.stack([torch.zeros_like(weights), weights])
        else:
            targets = block.reading.output_layout.rows(block.target).to(outputs)
            values = torch.stack([targets, outputs])
            weights = torch.stack([weights, weights])
        # Rows without weight may lack a target.
        values = torch.where(weights > 0, values, 0.0)
        weight = weights.sum(1)
        divisor = torch.where(weight > 0, weight, 1.0)
        mean = (weights * values).sum(1) / divisor
        # A second pass removes the rounding of a mean that is large beside the spread.
        mean = mean + (weights * (values - mean[:, None])).sum(1) / divisor
        return cls(
            rows=(weights > 0).sum(1),
            weight=weight,
            mean=mean,
            squares=(weights * (values - mean[:, None]).square()).sum(1),
        )

    def plus(self, other: TargetUnits) -> TargetUnits:
        """The moments of the rows of both."""
        weight = self.weight + other.weight
        share = other.weight / torch.where(weight > 0, weight, 1.0)
        distance = other.mean - self.mean
        return TargetUnits(
            rows=self.rows + other.rows,
            weight=weight,
            mean=self.mean + share * distance,
            squares=self.squares + other.squares + self.weight * share * distance.square(),
        )

    def minus(self, removed: TargetUnits) -> TargetUnits:
        """The moments of the remaining rows; rounding that is left of their squares becomes 0."""
        rows = self.rows - removed.rows
        remain = rows > 0
        weight = torch.where(remain, self.weight - removed.weight, 0.0)
        share = removed.weight / torch.where(weight > 0, weight, torch.inf)
        mean = torch.where(remain, self.mean + share * (self.mean - removed.mean), 0.0)
        whole_share = weight / torch.where(self.weight > 0, self.weight, 1.0)
        between = removed.weight * whole_share * (removed.mean - mean).square()
        squares = self.squares - removed.squares - between
        # The means are rounded relative to their size, and their difference is squared.
        size = self.squares + (self.squares * self.weight).sqrt() * self.mean.abs()
        is_known = remain & (squares > _ROUNDING * size)
        return TargetUnits(rows, weight, mean, torch.where(is_known, squares, 0.0))

    def to(self, device: torch.device) -> TargetUnits:
        """The same moments on a device."""
        return self.from_state({name: tensor.to(device) for name, tensor in self.state().items()})

    def state(self) -> dict[str, Tensor]:
        """The moments as tensors, for files."""
        return {
            "rows": self.rows,
            "weight": self.weight,
            "mean": self.mean,
            "squares": self.squares,
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> TargetUnits:
        """The moments that `state` came from."""
        return cls(
            rows=state["rows"],
            weight=state["weight"],
            mean=state["mean"],
            squares=state["squares"],
        )

    @cached_property
    def factors(self) -> Tensor:
        """The factors u of the targets' rows, (K,), on the CPU.

        A target that does not vary has the factor one.
        """
        # Of the targets where any row has one, else of the outputs.
        source = 0 if bool(self.rows[0].any()) else 1
        weight, mean, squares = (
            tensor[source].cpu() for tensor in (self.weight, self.mean, self.squares)
        )
        variance = squares / torch.where(weight > 0, weight, 1.0)
        varies = variance > (_ROUNDING * mean).square()
        if not bool(varies.any()):
            return torch.ones_like(variance)
        # A target that hardly varies must not outweigh all others.
        least = LEAST_SPREAD**2 * variance[varies].median()
        logarithm = torch.maximum(variance, least).log()
        factors = (logarithm[varies].mean() - logarithm).exp()
        is_one = ~varies | ((factors - 1).abs() <= _ROUNDING)
        return torch.where(is_one, 1.0, factors)
