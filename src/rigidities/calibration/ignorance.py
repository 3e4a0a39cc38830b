"""What someone would forecast who knows the targets, but nothing about the inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..prediction.head import Forecast, column_spread, extent_of
from .robust import reach

ROWS_PER_BIAS = 5
"""Least number of rows per bias column for the ignorant forecast to tell the columns apart."""


@dataclass(frozen=True)
class IgnorantForecast:
    """The forecast of someone who knows the targets, but nothing about the inputs.

    That is the mean of the targets. For a readout that sums over atoms the forecaster also knows
    how many atoms there are. The forecast is then what the bias columns explain of the targets,
    so that a constant added per atom changes nothing.

    Attributes:
        centre: The part that is the same for all rows, ().
        by_feature: Weights of the features, (P,); None where forecasts of rows do not differ.
        extent_weight: Weights of the features that give a row's extent, (P,); None where the
            extent is one.
        variance: The mean square of what the forecasts miss, of rows over their extent, ().
    """

    centre: Tensor
    by_feature: Tensor | None
    extent_weight: Tensor | None
    variance: Tensor

    @classmethod
    def of(cls, target: Tensor, features: Tensor, extent_weight: Tensor | None) -> IgnorantForecast:
        """The forecast by least squares on all rows of one target.

        Args:
            target: Targets, (n,); NaN in rows that do not count.
            features: Features, (n, P).
            extent_weight: Weights of the features that give the extent, (P,), as in
                `extent_weights`; None, or zeros, where the extent is one.
        """
        finite = target.isfinite()
        target = target[finite]
        features = features[finite]
        if extent_weight is None or not bool(extent_weight.any()):
            centre = target.mean()
            return cls(
                centre=centre,
                by_feature=extent_weight,
                extent_weight=extent_weight,
                variance=_bounded_mean_square(target - centre, 1),
            )
        counts = extent_weight != 0
        columns = features[:, counts]  # (n, B)
        constant_columns = column_spread(columns).isinf()
        rank = int(torch.linalg.matrix_rank(columns))
        if len(target) < ROWS_PER_BIAS * rank:  # too few to tell the columns apart
            columns = columns.sum(1, keepdim=True).expand_as(columns) / columns.shape[1]
            constant_columns = torch.zeros_like(constant_columns)
            rank = 1
        inverse = torch.linalg.pinv(columns.mT @ columns, rtol=1e-12, hermitian=True)
        weights = inverse @ (columns.mT @ target)
        by_feature = target.new_zeros(features.shape[1])
        by_feature[counts] = torch.where(constant_columns, 0.0, weights)
        extent = extent_of(features, extent_weight[None])[:, 0]
        return cls(
            centre=torch.where(constant_columns, weights * columns[0], 0.0).sum(),
            by_feature=by_feature,
            extent_weight=extent_weight,
            variance=_bounded_mean_square((target - columns @ weights) / extent, rank),
        )

    @property
    def mirrored(self) -> IgnorantForecast:
        """The forecast of negated targets."""
        by_feature = None if self.by_feature is None else -self.by_feature
        return replace(self, centre=-self.centre, by_feature=by_feature)

    @property
    def as_of_head(self) -> Forecast:
        """The same as a head has it, with an axis of one target."""
        by_feature = self.by_feature
        extent_weight = self.extent_weight
        return Forecast(
            centre=self.centre[None],
            by_feature=None if by_feature is None else by_feature[None],
            extent_weight=None if extent_weight is None else extent_weight[None],
        )

    def __call__(self, features: Tensor) -> Tensor:
        """The forecasts of rows with features (n, P), (n,)."""
        if self.by_feature is None:
            return self.centre.expand(len(features))
        return self.centre + features @ self.by_feature


def extent_weights(counts: Tensor) -> Tensor | None:
    """Weights (B,) that make counts (n, B) how much a readout sums relative to a usual row.

    Args:
        counts: The columns of the rows' features that belong to biases: they count atoms, up to a
            factor.

    Returns:
        The weights; None for a readout that does not sum.
    """
    if not counts.numel() or bool(column_spread(counts).isinf().all()):
        return None
    sign = counts.sum(0).sign()  # the factor is negative where outputs are scaled so
    extent = counts @ sign
    usual_extent = extent[extent != 0].square().mean().sqrt()  # where there is something to sum
    return sign / usual_extent


def _bounded_mean_square(missed: Tensor, rank: int) -> Tensor:
    """The mean square of what a forecast with `rank` numbers misses, single far rows bounded."""
    limit = reach(missed, 5.0)
    return missed.clamp(-limit, limit).square().sum() / max(1, len(missed) - rank)
