"""What someone would forecast who knows the targets, but nothing about the inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..prediction.head import column_spread
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
        constant: The part that is the same for all rows, ().
        by_feature: Weights of the features, (P,); None where forecasts of rows do not differ.
        extent_weight: Weights of the features that give a row's extent, (P,); None where the
            extent is one.
        variance: The mean square of what the forecasts miss, ().
    """

    constant: Tensor
    by_feature: Tensor | None
    extent_weight: Tensor | None
    variance: Tensor

    @classmethod
    def of(cls, target: Tensor, features: Tensor, biases: Tensor | None) -> IgnorantForecast:
        """The forecast by least squares on all rows of one target.

        Args:
            target: Targets, (n,); NaN in rows that do not count.
            features: Features, (n, P).
            biases: The columns of the features that belong to biases, if that is known.
        """
        finite = target.isfinite()
        target = target[finite]
        features = features[finite]
        if biases is None:
            return cls._same_for_all(target)
        columns = features[:, biases]  # (n, B)
        if not columns.shape[1]:
            return cls._same_for_all(target)
        constant_columns = column_spread(columns).isinf()
        if bool(constant_columns.all()):  # a readout that does not sum
            return cls._same_for_all(target)

        extent_weight = target.new_zeros(features.shape[1])
        # Bias columns count atoms up to a factor, which is negative where outputs are scaled so.
        extent_weight[biases] = columns.sum(0).sign()
        extent = features @ extent_weight
        usual_extent = extent[extent != 0].square().mean().sqrt()  # where there is something to sum

        rank = int(torch.linalg.matrix_rank(columns))
        if len(target) < ROWS_PER_BIAS * rank:  # too few to tell the columns apart
            columns = columns.sum(1, keepdim=True).expand_as(columns) / columns.shape[1]
            constant_columns = torch.zeros_like(constant_columns)
            rank = 1
        inverse = torch.linalg.pinv(columns.mT @ columns, rtol=1e-12, hermitian=True)
        weights = inverse @ (columns.mT @ target)
        by_feature = target.new_zeros(features.shape[1])
        by_feature[biases] = torch.where(constant_columns, 0.0, weights)
        return cls(
            constant=torch.where(constant_columns, weights * columns[0], 0.0).sum(),
            by_feature=by_feature,
            extent_weight=extent_weight / usual_extent,
            variance=_bounded_mean_square(target - columns @ weights, rank),
        )

    @classmethod
    def _same_for_all(cls, target: Tensor) -> IgnorantForecast:
        """The mean of the targets, whatever the row."""
        constant = target.mean()
        return cls(
            constant=constant,
            by_feature=None,
            extent_weight=None,
            variance=_bounded_mean_square(target - constant, 1),
        )

    def __call__(self, features: Tensor) -> Tensor:
        """The forecasts of rows with features (n, P), (n,)."""
        if self.by_feature is None:
            return self.constant.expand(len(features))
        return self.constant + features @ self.by_feature

    def extent(self, features: Tensor) -> Tensor:
        """How much the readout sums in rows (n, P) relative to a usual row, (n,)."""
        if self.extent_weight is None:
            return features.new_ones(len(features))
        return features @ self.extent_weight


def _bounded_mean_square(missed: Tensor, rank: int) -> Tensor:
    """The mean square of what a forecast with `rank` numbers misses, single far rows bounded."""
    limit = reach(missed, 5.0)
    return missed.clamp(-limit, limit).square().sum() / max(1, len(missed) - rank)
