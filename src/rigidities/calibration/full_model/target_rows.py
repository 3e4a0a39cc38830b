r"""What the full model of `auto` learns from: rows of one target, training rows as if left out.

A row that was in the fit has the residual $r / (1 - c q)$ and the variance $q / (1 - c q)$ of a
readout refitted without it; c is its weight in the Gram. That is optimistic for a net trained end
to end, so such rows stay marked as seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...prediction.guards import unfamiliarity
from ...prediction.head import column_spread

LEAST_HELD = 0.05
"""Of 1 - c q, below which a left-out residual is not enlarged further."""
TELLING = 1e-3
"""Of a usual q, below which a row's error is noise alone and says nothing about q."""
REFERENCE = 0.9
"""Quantile of the left-out training rows' q, beyond which the guard sets in."""
FAR = 1e3
"""Robust units beyond which a residual counts as one of that size."""
FEW = 0.02
"""Share of the rows that may be outliers: more of them are data."""
ROWS_PER_BIAS = 5
"""Rows for each bias column at least, where an ignorant forecast may tell these apart."""
TINY = 1e-6
"""Of the mean squared residual, added to each square."""
_NAMED = 5  # of the rows that lie far out
_OF_ALL_ROWS = (
    "columns",
    "distance",
    "extent",
    "forecast",
)  # known once all rows of a target are there


@dataclass(frozen=True)
class Rows:
    """Of one target, float64.

    Attributes:
        residual: target minus prediction, (n,).
        q: unscaled variances, (n,).
        mean: predictions, (n,).
        features: (n, P).
        share: what a unit of noise adds to the row's variance, (n,).
        seen: whether the row was trained on, (n,).
        target: as it was given, (n,); NaN in single rows whose residual was bounded. Empty:
            prediction plus residual.
        side: -1 or 1 where the target lies at the lower or the upper bound of its support, so that
            the distribution's mass beyond is what the row shows; 0 elsewhere, (n,). Empty: 0 for
            all.
        columns: the inputs of a head, (n, P), once they are known (`target_fit.Design`); the
            features are then no longer needed, and left out.
        distance: prediction minus ignorant forecast, (n,), once that forecast is known.
        extent: how much the readout summed in each row beside a usual one, (n,), likewise; one
            where it does not sum.
        forecast: the ignorant forecast, fitted to all rows of the target.
    """

    residual: Tensor
    q: Tensor
    mean: Tensor
    features: Tensor
    share: Tensor
    seen: Tensor
    target: Tensor = field(default_factory=lambda: torch.zeros(0))
    side: Tensor = field(default_factory=lambda: torch.zeros(0))
    columns: Tensor | None = None
    distance: Tensor | None = None
    extent: Tensor | None = None
    forecast: IgnorantForecast | None = None

    def __post_init__(self) -> None:
        if not len(self.side):
            object.__setattr__(self, "side", torch.zeros_like(self.q))
        if not len(self.target):
            object.__setattr__(self, "target", self.mean + self.residual)

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, which: Tensor) -> Rows:
        parts: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        for name, part in parts.items():
            if isinstance(part, Tensor):
                parts[name] = part[which]
        return Rows(**parts)

    @classmethod
    def join(cls, parts: list[Rows]) -> Rows:
        """All of them."""
        names = [one.name for one in fields(cls) if one.name not in _OF_ALL_ROWS]
        later = [getattr(part, name) for part in parts for name in _OF_ALL_ROWS]
        assert all(part is None for part in later), "these belong to all rows of a target"
        joined: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in names
        }
        return cls(**joined)

    def with_forecast(self, biases: Tensor | None) -> Rows:
        """The same rows with their ignorant forecast; `biases` are the readout's bias columns."""
        forecast = IgnorantForecast.of(self, biases)
        return replace(
            self,
            distance=self.mean - forecast(self.features),
            extent=forecast.extent(self.features),
            forecast=forecast,
        )

    @cached_property
    def held(self) -> Rows:
        """Those that were not trained on; all where there are none."""
        new = ~self.seen
        return self[new] if bool(new.any()) else self

    @cached_property
    def reference(self) -> Rows:
        """Those trained on, which fix units and ranges; all where they are few."""
        return self[self.seen] if int(self.seen.sum()) >= 20 else self

    @cached_property
    def telling(self) -> Tensor:
        """Which rows say something about q, (n,): those whose q is not practically zero.

        Features may all be zero (a final ReLU, sums over empty sets), and q with them. A usual q
        is a high quantile of the others.
        """
        some = self.q[self.q > 1e-12 * self.q.max()]
        if not len(some):
            return torch.zeros_like(self.seen)
        return self.q > TELLING * torch.quantile(some, 0.9)

    @cached_property
    def telling_held(self) -> Rows:
        """Those of `held` that say something about q; where none does, all that do."""
        both = self.telling & ~self.seen
        return self[both] if bool(both.any()) else self[self.telling]

    @cached_property
    def telling_reference(self) -> Rows:
        """Those of `reference` that say something about q; where none does, all that do."""
        both = self.telling & self.seen
        return self[both] if int(self.seen.sum()) >= 20 and bool(both.any()) else self[self.telling]

    @cached_property
    def usual_q(self) -> Tensor:
        """Mean q of the held rows that say something about it; one where no row does."""
        return mean_q(self.telling_held.q)

    @cached_property
    def high_q(self) -> Tensor:
        """The q that nine tenths of the reference rows stay below that say something about it."""
        return torch.quantile(self.telling_reference.q, REFERENCE)

    @cached_property
    def high_unfamiliarity(self) -> Tensor:
        """The same of q over the squared extent."""
        rows = self.telling_reference
        assert rows.extent is not None, "these rows have no ignorant forecast yet"
        return torch.quantile(unfamiliarity(rows.q, rows.extent), REFERENCE)

    @cached_property
    def error_per_q(self) -> Tensor:
        """The clipped mean of r^2 / q of the held rows that say something about q."""
        held = self.telling_held
        return clipped_mean(held.residual.square() / held.q)

    @cached_property
    def size(self) -> Tensor:
        """The mean squared residual of rows held out, single far ones clipped."""
        return clipped_mean(self.held.residual.square())

    @cached_property
    def square(self) -> Tensor:
        """Squared residuals, plus a little: one of zero is no certainty, (n,)."""
        return self.residual.square() + TINY * self.size

    @cached_property
    def level(self) -> Tensor:
        """That size in the noise's units: the factor of all shares that would explain it alone."""
        return self.size / self.held.share.mean()

    @cached_property
    def step(self) -> float:
        """The targets' grid, where they lie on one; else 0.

        Targets that repeat (half of them at least) and whose distinct values are wide apart beside
        the residuals, by a fifth of their root mean square.
        """
        values = (self.mean + self.residual)[~self.seen]  # left-out residuals are not on the grid
        if len(values) < 4:
            return 0.0
        rounding = 1e-7 * float(values.abs().max())  # of a model in float32
        values = values - values.median()
        unit = float(values.abs().max()) * 1e-6 + rounding + 1e-300
        distinct = torch.unique((values / unit).round()) * unit
        if len(distinct) < 2 or len(distinct) > len(values) / 2:
            return 0.0
        step = float(distinct.diff().median())
        return step if step > 0.2 * float(self.size.sqrt()) else 0.0


@dataclass(frozen=True)
class IgnorantForecast:
    """What a forecaster says who knows the targets, and nothing of the inputs.

    That is the mean of the targets. For a readout that sums over atoms the forecaster knows how
    many there are: what the bias columns explain, so that a constant per atom changes nothing.

    Attributes:
        constant: of all rows, ().
        by_feature: weights of the features, (P,); (0,) where rows do not differ.
        extent_weight: weights of the features that give a row's extent, (P,); (0,) likewise.
        variance: the mean square of what the forecasts miss, ().
    """

    constant: Tensor
    by_feature: Tensor
    extent_weight: Tensor
    variance: Tensor

    @classmethod
    def of(cls, rows: Rows, biases: Tensor | None) -> IgnorantForecast:
        """By least squares on the rows; `biases` are the columns that belong to biases."""
        known = rows.target.isfinite()
        target = rows.target[known]
        columns = rows.features[known, :0]
        if biases is not None:
            columns = rows.features[known][:, biases]  # (n, B)
        alike = columns.new_zeros(0, dtype=torch.bool)
        if columns.shape[1]:
            alike = column_spread(columns).isinf()
        if bool(alike.all()):  # a readout that does not sum
            constant = target.mean()
            nothing = target.new_zeros(0)
            return cls(constant, nothing, nothing, _spread(target - constant, 1))
        extent_weight = target.new_zeros(rows.features.shape[1])
        extent_weight[biases] = columns.sum(0).sign()  # outputs may be scaled by a negative number
        extent = rows.features[known] @ extent_weight
        usual = extent[extent != 0].square().mean().sqrt()  # where there is something to sum
        rank = int(torch.linalg.matrix_rank(columns))
        if len(target) < ROWS_PER_BIAS * rank:  # too few to tell the columns apart
            columns = columns.sum(1, keepdim=True).expand_as(columns) / columns.shape[1]
            alike = torch.zeros_like(alike)
            rank = 1
        inverse = torch.linalg.pinv(columns.mT @ columns, rtol=1e-12, hermitian=True)
        weights = inverse @ (columns.mT @ target)
        variance = _spread(target - columns @ weights, rank)
        by_feature = target.new_zeros(rows.features.shape[1])
        by_feature[biases] = torch.where(alike, 0.0, weights)
        constant = torch.where(alike, weights * columns[0], 0.0).sum()
        return cls(constant, by_feature, extent_weight / usual, variance)

    def __call__(self, features: Tensor) -> Tensor:
        """Of rows (n, P), (n,)."""
        if not len(self.by_feature):
            return self.constant.expand(len(features))
        return self.constant + features @ self.by_feature

    def extent(self, features: Tensor) -> Tensor:
        """How much the readout sums in rows (n, P) beside a usual one, (n,)."""
        if not len(self.extent_weight):
            return features.new_ones(len(features))
        return features @ self.extent_weight


def _spread(missed: Tensor, rank: int) -> Tensor:
    """The mean square of what a forecast with `rank` numbers misses, single far rows bounded."""
    limit = reach(missed, 5.0)
    return missed.clamp(-limit, limit).square().sum() / max(1, len(missed) - rank)


def target_rows(
    columns: Sequence[Tensor],
    *,
    seen: bool,
    support: tuple[float | None, float | None] | None = None,
) -> Rows:
    """Rows of one target, without masked ones; seen ones as if left out of the fit.

    Single far residuals are bounded (`reach`).

    Args:
        columns: error, q, weight in the Gram, prediction, share and features.
        seen: whether they were trained on.
        support: the targets' bounds.
    """
    error, q, weight = columns[:3]
    known = error.isfinite() & ((weight * q < 1 - 1e-9) | (not seen))
    error, q, weight, mean, share, features = (column[known] for column in columns)
    side = torch.zeros_like(q)
    for sign, bound in zip((-1.0, 1.0), support or (None, None), strict=True):
        if bound is not None:
            rounding = 1e-6 * (mean.abs() + error.abs())  # of a model in float32
            side = torch.where((mean + error - bound).abs() <= rounding, sign, side)
    target = mean + error
    if seen:
        held = 1 - weight * q
        error, q = error / held.clamp(min=LEAST_HELD), q / held.clamp(min=1e-3)
    limit = reach(error)
    target = torch.where(error.abs() > limit, math.nan, target)
    trained_on = torch.full_like(q, seen, dtype=torch.bool)
    return Rows(
        residual=error.clamp(-limit, limit),
        q=q,
        mean=mean,
        features=features,
        share=share,
        seen=trained_on,
        target=target,
        side=side,
    )


def mean_q(q: Tensor) -> Tensor:
    """Their mean, single ones clipped at a thousand times the median; one where there are none."""
    if not len(q):
        return q.new_ones(())
    return q.clamp(max=float(FAR * q.median())).mean()


def robust_unit(squares: Tensor) -> Tensor:
    """The square of a Gaussian's standard deviation with this median; few outliers do not move it.

    That is the median over 0.455, the median of a squared standard normal number. Where most
    squares are practically zero, it is taken of the others.
    """
    if not len(squares):
        return squares.new_zeros(())
    # what is practically zero is judged beside a mean that the largest rows do not decide
    outliers = max(1, int(FEW * len(squares)))
    largest = squares.kthvalue(max(1, len(squares) - outliers)).values
    negligible = 1e-6 * squares.clamp(max=float(largest)).mean()
    median = squares.median()
    others = squares[squares > negligible]
    if bool(median <= 0.455 * negligible) and len(others):
        median = others.median()
    return median / 0.455


def reach(residual: Tensor, far: float = FAR) -> float:
    """How large a residual may count, that of one row or few: so many robust units.

    Infinite where more than `FEW` of the rows lie beyond: then they are no outliers.
    """
    size = residual.abs()
    if not bool(size.any()):
        return math.inf
    unit = size[size > 0].median()  # in its units only the squares of outliers may overflow
    limit = far * float(unit * robust_unit((size / unit).square()).sqrt())
    beyond = int((size > limit).sum())
    return limit if 0 < beyond <= max(1, FEW * len(size)) else math.inf


def outlying(error: Tensor, number: Tensor, far: float = FAR, target: str = "") -> list[str]:
    """Which rows of one target lie beyond its reach, in a sentence; none without.

    Args:
        error: of validation rows, (n,); NaN where the target is masked.
        number: their places in the data, (n,).
        far: beyond so many robust units.
        target: what to call the target, where there are several.
    """
    known = error.isfinite()
    error, number = error[known], number[known]
    limit = reach(error, far)
    beyond = (error.abs() > limit).nonzero()[:, 0]
    if not len(beyond):
        return []
    farthest = beyond[error[beyond].abs().argsort(descending=True)][:_NAMED]
    named = []
    for i in farthest:
        units = far * float(error[i].abs()) / limit
        named.append(f"{int(number[i])} (residual {float(error[i]):.3g}, {units:.2g} units)")
    more = len(beyond) - len(farthest)
    listed = ", ".join(named) + (f" and {more} more" if more else "")
    return [
        f"{target}Validation rows, counted from 0, that lie beyond {far:g} robust units of the "
        f"residuals: {listed}. Each counts as one at {far:g} units. Are their targets right?"
    ]


def clipped_mean(squares: Tensor) -> Tensor:
    """The mean of squares, those beyond 25 robust units clipped: an outlier counts once."""
    unit = robust_unit(squares)
    return squares.clamp(max=float(25 * unit)).mean().clamp(min=1e-300)
