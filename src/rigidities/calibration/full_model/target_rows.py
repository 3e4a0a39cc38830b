r"""What the full model learns from: the rows of one target at one ridge.

`rows_of_targets` cuts the tables of all targets (`Residuals`) into one `TargetRows` for each
target: training rows as if left out of the fit, then validation rows, masked ones dropped and
single far residuals bounded. A row that was in the fit has the residual $r / (1 - c q)$ and the
variance $q / (1 - c q)$ of a readout refitted without it; c is its weight in the Gram. That is
optimistic for a network trained end to end, so such rows stay marked as seen.

`TargetRows` also knows what is usual among its rows: the size of a residual, of q, of the noise.
These statistics are robust (`clipped_mean`, `reach`), so that a few outliers do not move them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...prediction.guards import unfamiliarity
from ...prediction.head import column_spread
from ..calibration import Support
from ..residuals import Residuals

LEAST_REMAINING = 0.05
"""Value of 1 - c q below which a left-out residual is not enlarged further."""
INFORMATIVE = 1e-3
"""Share of a usual q below which a row's error is only noise and says nothing about q."""
REFERENCE = 0.9
"""Quantile of the left-out training rows' q, beyond which the guard sets in."""
REFERENCE_ROWS = 20
"""Least number of training rows that fix units and ranges by themselves."""
FAR = 1e3
"""Robust units at which single far residuals are cut off."""
OUTLIERS = 0.02
"""Share of the rows that may be outliers: more of them are data."""
ROWS_PER_BIAS = 5
"""Least number of rows per bias column for the ignorant forecast to tell the columns apart."""
TINY = 1e-6
"""Share of the mean squared residual that is added to each square."""
_NAMED_ROWS = 5
"""Largest number of far rows that a remark names."""
_COLUMNS_OF_ALL_ROWS = ("columns", "distance", "extent", "forecast")
"""Fields that are computed only once all rows of a target are joined."""


@dataclass(frozen=True)
class TargetRows:
    """Rows of one target, in float64.

    Attributes:
        residual: Target minus prediction, (n,).
        q: Unscaled variances, (n,).
        mean: Predictions, (n,).
        features: Features, (n, P).
        noise_factor: What a unit of noise adds to the row's variance, (n,).
        seen: Whether the row was trained on, (n,).
        target: The target as it was given, (n,); NaN in single rows whose residual was bounded.
            Empty stands for prediction plus residual.
        side: -1 or 1 where the target lies at the lower or the upper bound of its support, so that
            the distribution's mass beyond is what the row shows; 0 elsewhere, (n,). Empty stands
            for 0 in all rows.
        columns: The inputs of a head, (n, P), once they are known (`target_fit.Design`). The
            features are then no longer needed, and left out.
        distance: Prediction minus ignorant forecast, (n,), once that forecast is known.
        extent: How much the readout summed in each row relative to a usual row, (n,), once the
            forecast is known; one where it does not sum.
        forecast: The ignorant forecast, fitted to all rows of the target.
    """

    residual: Tensor
    q: Tensor
    mean: Tensor
    features: Tensor
    noise_factor: Tensor
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

    @classmethod
    def of(
        cls,
        error: Tensor,
        q: Tensor,
        weight: Tensor,
        mean: Tensor,
        noise_factor: Tensor,
        features: Tensor,
        *,
        seen: bool,
        support: Support | None = None,
    ) -> TargetRows:
        """Rows of one target without masked ones; seen ones as if left out of the fit.

        Single far residuals are bounded (`reach`).

        Args:
            error: Target minus prediction, (n,); NaN where the target is masked.
            q: Unscaled variances, (n,).
            weight: Weights in the Gram, (n,).
            mean: Predictions, (n,).
            noise_factor: What a unit of noise adds to the variance, (n,).
            features: Features, (n, P).
            seen: Whether the rows were trained on.
            support: The targets' bounds.
        """
        # A seen row with c q = 1 is fitted exactly and cannot be left out.
        usable = error.isfinite() & ((weight * q < 1 - 1e-9) | (not seen))
        error = error[usable]
        q = q[usable]
        mean = mean[usable]
        target = mean + error
        side = _sides(mean, error, support)
        if seen:
            remaining = 1 - weight[usable] * q
            error = error / remaining.clamp(min=LEAST_REMAINING)
            q = q / remaining.clamp(min=1e-3)
        limit = reach(error)
        return cls(
            residual=error.clamp(-limit, limit),
            q=q,
            mean=mean,
            features=features[usable],
            noise_factor=noise_factor[usable],
            seen=torch.full_like(q, seen, dtype=torch.bool),
            target=torch.where(error.abs() > limit, math.nan, target),
            side=side,
        )

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, which: Tensor) -> TargetRows:
        """Some of the rows, by booleans (n,) or by numbers."""
        values: dict[str, Any] = {
            column.name: getattr(self, column.name) for column in fields(self)
        }
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value[which]
        return TargetRows(**values)

    @classmethod
    def join(cls, tables: list[TargetRows]) -> TargetRows:
        """The rows of several tables, one after the other."""
        columns: dict[str, Any] = {}
        for column in fields(cls):
            values = [getattr(table, column.name) for table in tables]
            if column.name in _COLUMNS_OF_ALL_ROWS:
                assert all(value is None for value in values), "these belong to all rows"
            else:
                columns[column.name] = torch.cat(values)
        return cls(**columns)

    def with_forecast(self, biases: Tensor | None) -> TargetRows:
        """The same rows with their ignorant forecast; `biases` are the readout's bias columns."""
        forecast = IgnorantForecast.of(self, biases)
        return replace(
            self,
            distance=self.mean - forecast(self.features),
            extent=forecast.extent(self.features),
            forecast=forecast,
        )

    @cached_property
    def held_out(self) -> TargetRows:
        """The rows that were not trained on; all rows where there are none."""
        new = ~self.seen
        return self[new] if bool(new.any()) else self

    @cached_property
    def reference(self) -> TargetRows:
        """The rows trained on, which fix units and ranges; all rows where they are few."""
        if int(self.seen.sum()) >= REFERENCE_ROWS:
            return self[self.seen]
        return self

    @cached_property
    def informative(self) -> Tensor:
        """Which rows say something about q, (n,): those whose q is not practically zero.

        Features may all be zero (a final ReLU, sums over empty sets), and q with them. A usual q
        is a high quantile of the others.
        """
        positive = self.q[self.q > 1e-12 * self.q.max()]
        if not len(positive):
            return torch.zeros_like(self.seen)
        return self.q > INFORMATIVE * torch.quantile(positive, 0.9)

    @cached_property
    def informative_held_out(self) -> TargetRows:
        """The held-out rows that say something about q; all informative rows if none does."""
        held_out = self.informative & ~self.seen
        return self[held_out] if bool(held_out.any()) else self[self.informative]

    @cached_property
    def informative_reference(self) -> TargetRows:
        """The reference rows that say something about q; all informative rows if none does."""
        reference = self.informative & self.seen
        if int(self.seen.sum()) >= REFERENCE_ROWS and bool(reference.any()):
            return self[reference]
        return self[self.informative]

    @cached_property
    def usual_q(self) -> Tensor:
        """The mean q of the informative held-out rows; one where there are none."""
        return mean_q(self.informative_held_out.q)

    @cached_property
    def high_unfamiliarity(self) -> Tensor:
        """What q over the squared extent of nine tenths of the reference rows stays below."""
        rows = self.informative_reference
        assert rows.extent is not None, "these rows have no ignorant forecast yet"
        return torch.quantile(unfamiliarity(rows.q, rows.extent), REFERENCE)

    @cached_property
    def mean_square(self) -> Tensor:
        """The mean squared residual of held-out rows, single far ones clipped."""
        return clipped_mean(self.held_out.residual.square())

    @cached_property
    def squares(self) -> Tensor:
        """Squared residuals, (n,), plus a little: a residual of zero does not mean certainty."""
        return self.residual.square() + TINY * self.mean_square

    @cached_property
    def noise_level(self) -> Tensor:
        """The constant noise that would explain the mean squared residual alone."""
        return self.mean_square / self.held_out.noise_factor.mean()

    @cached_property
    def grid_step(self) -> float:
        """The step of the grid that the targets lie on; 0 where they lie on none.

        On a grid, half of the targets at least are repeated, and the distinct values are apart by a
        fifth of the residuals' root mean square.
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
        return step if step > 0.2 * float(self.mean_square.sqrt()) else 0.0


def rows_of_targets(
    validation: Residuals | None,
    training: Residuals | None,
    eigenvalues: Tensor,
    ridge: float,
    support: Support | None,
) -> list[TargetRows]:
    """The rows of each target: training rows as if left out, then validation rows.

    Args:
        validation: The validation rows, if any.
        training: Training rows that the fit has seen, if any.
        eigenvalues: Those of the Gram, (D,) or (K, D).
        ridge: The ridge, at which q is taken.
        support: The targets' bounds.

    Raises:
        ValueError: There are no rows, or no training row can be left out.
    """
    tables = []
    for residuals, seen in ((training, True), (validation, False)):
        if residuals is None:
            continue
        noise_factor = residuals.noise_factor
        if validation is not None:  # noise is that of a typical validation row
            noise_factor = noise_factor * validation.typical_weight / residuals.typical_weight
        q = residuals.quadratic_at(eigenvalues, ridge)
        tables.append(_target_tables(residuals, q, noise_factor, support, seen=seen))
    if not tables:
        raise ValueError(
            "There is nothing to calibrate on: no data were given, and the fit kept no rows. Call "
            "calibrate(x, y)."
        )
    rows = [TargetRows.join(list(of_target)) for of_target in zip(*tables, strict=True)]
    if not all(map(len, rows)):
        raise ValueError(
            "The model fits every row exactly, so leave-one-out errors do not exist. Calibrate on "
            "held-out rows."
        )
    return rows


def _target_tables(
    residuals: Residuals,
    q: Tensor,
    noise_factor: Tensor,
    support: Support | None,
    *,
    seen: bool,
) -> list[TargetRows]:
    """One table for each target, of training rows or of validation rows.

    q and the noise factors are (n, 1 or K).
    """
    mean = residuals.extra["mean"].to(torch.float64)
    inputs = residuals.extra["inputs"].to(torch.float64)  # (n, P), or (n, K, P) per target
    tables = []
    for target, error in enumerate(residuals.error.unbind(1)):
        rows = TargetRows.of(
            error=error,
            q=_column(q, target),
            weight=_column(residuals.weight, target),
            mean=_column(mean, target),
            noise_factor=_column(noise_factor, target),
            features=inputs if inputs.ndim == 2 else inputs[:, target],
            seen=seen,
            support=support,
        )
        tables.append(rows)
    return tables


def _column(table: Tensor, target: int) -> Tensor:
    """One target's column (n,) of a table with one column per target or one for all."""
    return table[:, min(target, table.shape[1] - 1)]


def _sides(mean: Tensor, error: Tensor, support: Support | None) -> Tensor:
    """-1 or 1 where a target lies at the lower or the upper bound, else 0, (n,)."""
    side = torch.zeros_like(mean)
    if support is None:
        return side
    for sign, bound in zip((-1.0, 1.0), support, strict=True):
        if bound is not None:
            rounding = 1e-6 * (mean.abs() + error.abs())  # of a model in float32
            side = torch.where((mean + error - bound).abs() <= rounding, sign, side)
    return side


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
    def of(cls, rows: TargetRows, biases: Tensor | None) -> IgnorantForecast:
        """The forecast by least squares on the rows.

        Args:
            rows: All rows of one target.
            biases: The columns of the features that belong to biases, if that is known.
        """
        finite = rows.target.isfinite()
        target = rows.target[finite]
        if biases is None:
            return cls._same_for_all(target)
        columns = rows.features[finite][:, biases]  # (n, B)
        if not columns.shape[1]:
            return cls._same_for_all(target)
        constant_columns = column_spread(columns).isinf()
        if bool(constant_columns.all()):  # a readout that does not sum
            return cls._same_for_all(target)

        extent_weight = target.new_zeros(rows.features.shape[1])
        # Bias columns count atoms up to a factor, which is negative where outputs are scaled so.
        extent_weight[biases] = columns.sum(0).sign()
        extent = rows.features[finite] @ extent_weight
        usual_extent = extent[extent != 0].square().mean().sqrt()  # where there is something to sum

        rank = int(torch.linalg.matrix_rank(columns))
        if len(target) < ROWS_PER_BIAS * rank:  # too few to tell the columns apart
            columns = columns.sum(1, keepdim=True).expand_as(columns) / columns.shape[1]
            constant_columns = torch.zeros_like(constant_columns)
            rank = 1
        inverse = torch.linalg.pinv(columns.mT @ columns, rtol=1e-12, hermitian=True)
        weights = inverse @ (columns.mT @ target)
        by_feature = target.new_zeros(rows.features.shape[1])
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


def mean_q(q: Tensor) -> Tensor:
    """The mean q, single ones clipped at a thousand times the median; one where there are none."""
    if not len(q):
        return q.new_ones(())
    return q.clamp(max=float(FAR * q.median())).mean()


def robust_unit(squares: Tensor) -> Tensor:
    """The variance of a Gaussian whose squares have this median; few outliers do not move it.

    That is the median over 0.455, the median of a squared standard normal number. Where most
    squares are practically zero, the median is that of the others.
    """
    if not len(squares):
        return squares.new_zeros(())
    # "Practically zero" is relative to a mean that the largest squares do not dominate.
    outliers = max(1, int(OUTLIERS * len(squares)))
    largest = squares.kthvalue(max(1, len(squares) - outliers)).values
    negligible = 1e-6 * squares.clamp(max=float(largest)).mean()
    median = squares.median()
    others = squares[squares > negligible]
    if bool(median <= 0.455 * negligible) and len(others):
        median = others.median()
    return median / 0.455


def reach(residual: Tensor, far: float = FAR) -> float:
    """The size up to which residuals count in full: `far` robust units.

    It is infinite where no row lies beyond, or more than the share `OUTLIERS` of them: these are
    data then, not outliers.
    """
    size = residual.abs()
    if not bool(size.any()):
        return math.inf
    unit = size[size > 0].median()  # in its units only the squares of outliers may overflow
    limit = far * float(unit * robust_unit((size / unit).square()).sqrt())
    beyond = int((size > limit).sum())
    return limit if 0 < beyond <= max(1, OUTLIERS * len(size)) else math.inf


def outlier_remarks(error: Tensor, number: Tensor, far: float = FAR, target: str = "") -> list[str]:
    """A sentence that names the rows of one target beyond its reach; none where there are none.

    Args:
        error: Errors of validation rows, (n,); NaN where the target is masked.
        number: Their places in the data, (n,).
        far: Number of robust units beyond which rows are named.
        target: What to call the target, where there are several.
    """
    finite = error.isfinite()
    error = error[finite]
    number = number[finite]
    limit = reach(error, far)
    beyond = (error.abs() > limit).nonzero()[:, 0]
    if not len(beyond):
        return []
    farthest = beyond[error[beyond].abs().argsort(descending=True)][:_NAMED_ROWS]
    names = []
    for i in farthest:
        units = far * float(error[i].abs()) / limit
        names.append(f"{int(number[i])} (residual {float(error[i]):.3g}, {units:.2g} units)")
    listed = ", ".join(names)
    if len(beyond) > len(farthest):
        listed += f" and {len(beyond) - len(farthest)} more"
    return [
        f"{target}Some validation rows (counted from 0) have residuals beyond {far:g} robust "
        f"units: {listed}. Each is treated as if it were at {far:g} units. Check their targets."
    ]


def clipped_mean(squares: Tensor) -> Tensor:
    """The mean of squares, those beyond 25 robust units clipped, so that no outlier dominates."""
    unit = robust_unit(squares)
    return squares.clamp(max=float(25 * unit)).mean().clamp(min=1e-300)
