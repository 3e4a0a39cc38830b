r"""Ridge, scale and noise by a criterion, at the price of one pass and one eigendecomposition.

With $G = V \mathrm{diag}(\lambda) V^\top$ and $P = (F_{val} V)^2$ elementwise, the variances for
a whole grid of ridges s are one matrix product, $q(s) = P\,(\lambda + s)^{-1}$; the best scale at
each ridge has a closed form (`criteria`). A noise floor $\rho$ joins as $u = q + \rho\,\bar c / c$,
with c the row's loss weight and $\bar c$ the typical one. Rows with q = 0 at every ridge, where the
gradient of the output vanishes, say nothing of the scale: without a noise they are left out.

Without validation data, `loo` takes the training rows: a row left out of a ridge regression has
residual $e/(1-cq)$ and variance $q/(1-cq)$. That is exact for a readout refitted without the
row and optimistic for a network trained end to end.

Data flow: `Objective` is the criterion as a function of the ridge, `search` finds its
minimum, or `most_evident_ridge` that of the evidence, and `search_report` makes a report of the
choice, with its cross-validated gain over one constant bar.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..notices import notify
from ..prediction.distribution import Distribution, StudentT
from ..prediction.noise import GivenNoise
from .calibration import Calibration, CalibrationOptions
from .criteria import pooled, price
from .gain import FEWEST_ROWS, Gain, constant_nll, folds
from .report import CalibrationReport
from .residuals import Residuals, golden_positions

__all__ = ["Choice", "Objective", "most_evident_ridge", "search", "search_report"]

DECADES = (-10.0, 4.0)
"""Range of the ridge in powers of ten of the Gram's largest eigenvalue."""
PER_DECADE = 4
"""Points per decade of the coarse grid."""
EFFORT = 1 << 29
"""Largest effort of one grid: rows times candidates times the criterion's price (some 2 s).

Beyond it the grid is searched with fewer rows, and the best choice is judged again with more."""
RECHOSEN = 1000
"""Number of rows up to which cross-validation chooses the ridge again in every fold.

With more rows, a ridge chosen by all of them overstates the gain by less than a thousandth of a
nat."""

_CELLS = 1 << 17
"""Entries of a criterion's table that are worked on at once: they fit into a cache."""
_TABLE = 1 << 22
"""Largest number of variances q in memory at once."""
_TAIL_ROWS = 1 << 14
"""Number of residuals, roughly, by which the degrees of freedom are chosen."""
_FLOOR_DECADES = torch.linspace(-4, 4, 33, dtype=torch.float64)  # relative to the mean variance
_FINE_FLOORS = 9  # number of floors in a refined grid
_FEW_DISTINCT = 30
"""Distinct rows below which copies of them get a warning, not only a remark."""

Evidence = Callable[[Tensor], Tensor]
"""Ridges (J,) to their negative log evidence, (J,)."""


@dataclass(frozen=True)
class Choice:
    """One ridge with the best scale and noise floor at it.

    Attributes:
        ridge: The ridge.
        value: The criterion's value.
        scale2: The squared scale, (K,).
        floor: The noise floor in units of the squared scale, (K,).
        rows: How many rows judged it.
    """

    ridge: float
    value: float
    scale2: Tensor
    floor: Tensor
    rows: int


@dataclass(frozen=True)
class FloorGrid:
    """Which noise floors are tried.

    Attributes:
        near: A choice whose floors are refined; None tries the whole range.
        width: The width of the refined grid, in steps of the coarse one; 0 takes the floors of
            `near` as they are.
    """

    near: Choice | None = None
    width: float = 1.0

    @property
    def count(self) -> int:
        """How many floors are tried for each ridge and target."""
        if self.near is None:
            return 1 + len(_FLOOR_DECADES)
        return 1 + _FINE_FLOORS if self.width else 1

    def floors(self, mean_variance: Tensor, target: int) -> Tensor:
        """The floors to try for one target, in units of the squared scale; the first may be zero.

        Args:
            mean_variance: The mean unscaled variance of the rows, (): the whole range is relative
                to it.
            target: The target's number, for the floors of `near`.
        """
        zero = mean_variance.new_zeros(1)
        floor = None if self.near is None else self.near.floor[target]
        if floor is not None and not self.width:
            return floor[None]
        if floor is None or not bool(floor > 0):
            return torch.cat([zero, mean_variance * 10 ** _FLOOR_DECADES.to(mean_variance.device)])
        step = float(_FLOOR_DECADES[1] - _FLOOR_DECADES[0]) * self.width
        offsets = torch.linspace(-step, step, _FINE_FLOORS, dtype=torch.float64, device=zero.device)
        return torch.cat([zero, floor * 10**offsets])


_ALL_FLOORS = FloorGrid()


@dataclass(frozen=True)
class Objective:
    """The criterion as a function of the ridge, everything else at its best.

    Attributes:
        residuals: The rows.
        eigenvalues: Those of the Gram, (D,) or (K, D).
        options: Criterion, distribution and noise. The noise's floor, in units of the squared
            scale, is tied to it or searched.
        least: Ridges up to here leave the curvature singular or indefinite.
    """

    residuals: Residuals
    eigenvalues: Tensor
    options: CalibrationOptions
    least: float = -math.inf

    @cached_property
    def barless(self) -> Tensor:
        """Which rows (n, 1 or K) have no variance at any ridge: zero features, and no noise."""
        has_features = torch.cat([(piece != 0).any(-1) for piece in self.residuals.power])
        if has_features.ndim == 1:
            has_features = has_features[:, None]
        if self.options.noise.tied == 0:
            return ~has_features
        return torch.zeros_like(has_features)

    def choices(self, ridges: Tensor, grid: FloorGrid = _ALL_FLOORS) -> list[Choice]:
        """The best scale and floor at each ridge (J,), among the floors of the grid.

        Where that takes more than `EFFORT`, only an evenly spread share of the rows is used.
        """
        rows, targets = self.residuals.error.shape
        floors = grid.count if self.options.noise.tied is None else 1
        effort = rows * targets * len(ridges) * floors * price(self.options.profile)
        positions = golden_positions(0, rows, self.residuals.error.device)
        judging = positions < EFFORT / effort  # (n,)
        choices = []
        for some_ridges in torch.split(ridges, max(1, _TABLE // (rows * targets))):
            choices += self._choices(some_ridges, judging, grid)
        return choices

    def _choices(self, ridges: Tensor, judging: Tensor, grid: FloorGrid) -> list[Choice]:
        """`choices` for few ridges; the mask `judging`, (n,), says which rows are used."""
        q = self.residuals.quadratic(self.eigenvalues, ridges)
        target_values = []
        target_scales = []
        target_floors = []
        for target in range(self.residuals.error.shape[1]):
            value, scale2, floor = self._target_choices(q, target, judging, grid)
            target_values.append(value)
            target_scales.append(scale2)
            target_floors.append(floor)
        scales = torch.stack(target_scales, dim=-1)  # (J, K)
        floors = torch.stack(target_floors, dim=-1)
        values = pooled(self.options.profile, torch.stack(target_values, dim=-1))
        values = values.nan_to_num(nan=math.inf)
        values = torch.where(ridges > self.least, values, math.inf)
        rows = int(judging.sum())
        return [
            Choice(ridge, value, scale2, floor, rows)
            for ridge, value, scale2, floor in zip(
                ridges.tolist(), values.tolist(), scales, floors, strict=True
            )
        ]

    def _target_choices(
        self, q: Tensor, target: int, judging: Tensor, grid: FloorGrid
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Value, squared scale and floor of one target at each ridge, each (J,)."""
        error, spread, noise_factor = self._target_columns(q, target, judging)
        tied = self.options.noise.tied
        if tied is not None:  # to the squared scale, at weight one
            floor = tied / _column(self.residuals.typical_weight_in_gram, target)[0]
            if tied:
                spread = spread + floor * noise_factor
            scale2, value = self._profile(error, spread)
            return value, scale2, floor.expand_as(value)
        values = []
        scales = []
        best_floors = []
        for j in range(spread.shape[1]):
            column = spread[:, j, None]  # (n, 1)
            mean_variance = column.nanmean() / self.residuals.mean_shape
            floors = grid.floors(mean_variance, target)
            # Errors depend on the ridge where rows are left out.
            column_error = error if error.shape[1] == 1 else error[:, j, None]
            scale2, value = self._profile(column_error, column + floors * noise_factor)
            best = value.nan_to_num(nan=math.inf).argmin()
            values.append(value[best])
            scales.append(scale2[best])
            best_floors.append(floors[best])
        return torch.stack(values), torch.stack(scales), torch.stack(best_floors)

    def _target_columns(
        self, q: Tensor, target: int, judging: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Errors (n, 1 or J), spreads (n, J) and noise factors (n, 1) of the usable rows.

        Usable rows are those that judge, are not masked and are not `barless`.
        """
        rows = self.residuals
        barless = _column(self.barless, target)[:, 0]
        usable = torch.isfinite(rows.error[:, target]) & judging & ~barless
        error = rows.error[usable, target, None]
        weight = _column(rows.weight, target)[usable]
        noise_factor = _column(rows.noise_factor, target)[usable]
        spread = _column(q, target)[usable][:, 0]
        if not self.options.left_out:
            return error, spread, noise_factor
        remaining = 1 - weight * spread
        remaining = torch.where(remaining > 1e-12, remaining, math.nan)
        return error / remaining, spread / remaining, noise_factor

    def _profile(self, error: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """The best squared scale and the criterion's value of each column, (J,) each.

        Few columns are worked on at a time: what does not fit into a cache is slow.
        """
        step = max(1, _CELLS // len(spread))
        scales = []
        values = []
        for start in range(0, spread.shape[1], step):
            columns = slice(start, start + step)
            column_errors = error[:, columns] if error.shape[1] > 1 else error
            scale2, value = self.options.profile(column_errors, spread[:, columns].contiguous())
            scales.append(scale2)
            values.append(value)
        return torch.cat(scales), torch.cat(values)

    def errors_and_variances(self, choice: Choice) -> tuple[Tensor, Tensor]:
        """Errors and variances of the rows at a choice, both (n, K).

        Errors are NaN where a target is masked, and in rows that have no variance.
        """
        q = self.residuals.quadratic_at(self.eigenvalues, choice.ridge)
        error = self.residuals.error.masked_fill(self.barless, math.nan)
        if self.options.left_out:
            remaining = 1 - self.residuals.weight * q
            error = error / remaining
            q = q / remaining
        return error, choice.scale2 * (q + choice.floor * self.residuals.noise_factor)

    def nll(self, choice: Choice) -> Tensor:
        """The NLL of each row and target at the choice, (n, K); NaN where masked."""
        distribution = self.options.distribution
        error, variance = self.errors_and_variances(choice)
        scale = (variance / torch.as_tensor(distribution.second, dtype=variance.dtype)).sqrt()
        return scale.log() - distribution.log_density(error / scale)

    def left_out_nll(self, choice: Choice, *, rechoose_ridge: bool) -> Tensor:
        """The NLL of rows left out of their fold's choice of scale and noise, (n, K).

        Args:
            choice: The choice by all rows, whose ridge every fold takes.
            rechoose_ridge: Whether each fold chooses the ridge again instead.
        """
        fold = folds(len(self.residuals.error), self.residuals.error.device)
        nll = torch.full_like(self.residuals.error, math.nan)
        for k in range(int(fold.max()) + 1):
            in_fold = fold == k
            others = replace(self, residuals=self.residuals.subset(~in_fold))
            left_out = replace(self, residuals=self.residuals.subset(in_fold))
            fold_choice, _ = search(others, None if rechoose_ridge else choice.ridge)
            nll[in_fold] = left_out.nll(fold_choice)
        return nll

    def likeliest_distribution(self, choice: Choice) -> Distribution:
        """The distribution of the options; with open tails, the likeliest Student-t.

        All targets get the same degrees of freedom.
        """
        if not self.options.open_tails:
            return self.options.distribution
        error, variance = self.errors_and_variances(choice)
        z = (error / variance.sqrt()).reshape(-1, 1)
        z = z[z.isfinite()[:, 0]][:: 1 + len(z) // _TAIL_ROWS]
        tails = torch.linspace(math.log(0.1), math.log(1000), 47).exp().tolist()
        distributions = [StudentT(2 + tail) for tail in tails]
        ones = torch.ones_like(z)

        def value(distribution: StudentT) -> float:
            return float(distribution.profile(z, ones)[1])

        return min(distributions, key=value)

    def calibration(self, choice: Choice) -> Calibration:
        """The choice as a `Calibration`."""
        level = choice.scale2 * choice.floor
        if self.options.noise_function is None:
            noise = self.options.noise(level)
        else:
            noise = GivenNoise(level, self.options.noise_function)
        return Calibration(
            ridge=choice.ridge,
            scale=choice.scale2.sqrt(),
            noise=noise,
            distribution=self.options.distribution,
            weight=self.residuals.typical_weight[0].expand_as(choice.floor),
            support=self.options.support,
        )


def search(objective: Objective, ridge: float | None) -> tuple[Choice, str | None]:
    """The best choice, and the edge of the ridge's range it lies at.

    A grid over the whole range is followed by finer ones about its best point. Where there were too
    many rows to search with all of them, all rows set the scale at the end.

    Args:
        objective: The criterion.
        ridge: A ridge that is fixed, or None.

    Returns:
        The choice, and "lower" or "upper", or None where it lies inside of the range.

    Raises:
        ValueError: No ridge gives a finite criterion.
    """
    largest = float(objective.eigenvalues.max())
    device = objective.eigenvalues.device
    exponents = ridge_exponents().to(device)
    if ridge is None:
        ridges = largest * 10**exponents
    else:
        ridges = exponents.new_tensor([ridge])
    candidates = objective.choices(ridges)
    best = _best(candidates)
    edge = None
    if ridge is None:
        place = candidates.index(best)
        if place == 0:
            edge = "lower"
        elif place == len(candidates) - 1:
            edge = "upper"
    if ridge is None or objective.options.noise.tied is None:  # there is something to refine
        for width in (1.0, 0.25, 0.0625):
            if ridge is None:
                centre = math.log10(best.ridge / largest)
                finer = finer_exponents(centre, width / PER_DECADE, 9)
                ridges = largest * 10 ** finer.to(device)
            best = _best([best, *objective.choices(ridges, FloorGrid(best, width))])
    if best.rows < len(objective.residuals.error):
        final = objective.eigenvalues.new_tensor([best.ridge])
        best = _best(objective.choices(final, FloorGrid(best, width=0)))
    return best, edge


def ridge_exponents() -> Tensor:
    """The coarse grid of ridges, in powers of ten of the largest eigenvalue."""
    steps = round((DECADES[1] - DECADES[0]) * PER_DECADE) + 1
    return torch.linspace(*DECADES, steps, dtype=torch.float64)


def finer_exponents(centre: float, width: float, points: int) -> Tensor:
    """A fine grid around an exponent, inside the range."""
    fine = torch.linspace(centre - width, centre + width, points, dtype=torch.float64)
    return fine.clamp(*DECADES)


def most_evident_ridge(evidence: Evidence, largest: float) -> tuple[float, float, str | None]:
    """The ridge that minimises the negative log evidence.

    Args:
        evidence: The negative log evidence of ridges.
        largest: The Gram's largest eigenvalue.

    Returns:
        The ridge, its value, and the edge of the range it lies at ("lower", "upper" or None).

    Raises:
        ValueError: The evidence is lost to rounding.
    """
    exponents = ridge_exponents()
    width = 1 / PER_DECADE
    for _ in range(3):
        values = evidence(largest * 10**exponents).nan_to_num(nan=math.inf)
        place = int(values.argmin())
        best = float(values.min())
        # Next to ridges whose evidence is not a number, the least value is rounding too.
        if not math.isfinite(best) or math.isinf(values[max(place - 1, 0)]):
            raise ValueError(
                "The evidence finds no ridge: compared with a large offset, or with one large "
                "residual, the other residuals are lost to rounding. Fit other targets, or use "
                "another criterion."
            )
        centre = float(exponents[place])
        exponents = finer_exponents(centre, width, 17)
        width = width / 8
    edge = {DECADES[0]: "lower", DECADES[1]: "upper"}.get(centre)
    return largest * 10**centre, best, edge


def _column(tensor: Tensor, target: int) -> Tensor:
    """One target's column, (n, 1, ...), of a tensor with one column per target or one for all."""
    column = min(target, tensor.shape[1] - 1)
    return tensor[:, column : column + 1]


def _best(choices: list[Choice]) -> Choice:
    """The choice of least value among those that the most rows have judged.

    A finer grid may be judged by more rows than the best choice so far, which is among the choices
    too.
    """
    best = min(choices, key=lambda choice: (-choice.rows, choice.value))
    if not math.isfinite(best.value):
        raise ValueError(
            "No ridge gives a finite criterion. Check whether the features of all rows are zero "
            "(then their variance is zero). Use noise='constant', or a readout with a bias."
        )
    return best


def search_report(
    residuals: Residuals,
    eigenvalues: Tensor,
    curvature_at: Callable[[float], Any],
    options: CalibrationOptions,
    *,
    least: float = -math.inf,
    evidence: Evidence | None = None,
    zero_curvature: int = 0,
) -> CalibrationReport:
    """Choose ridge, scale and noise by a criterion, and report on the choice.

    Args:
        residuals: The rows to calibrate on.
        eigenvalues: The eigenvalues of the basis of the residuals' powers, (D,) or (K, D).
        curvature_at: The curvature at a ridge, such as a `Posterior`. The report takes condition,
            effective_rank and width from it.
        options: What is asked of the calibration.
        least: Ridges up to here are not searched.
        evidence: The negative log evidence of ridges, which then chooses the ridge.
        zero_curvature: How many training rows have no weight, for the report.
    """
    objective = Objective(residuals, eigenvalues, options, least)
    if evidence is not None and options.ridge is None:
        ridge, value, edge = most_evident_ridge(evidence, float(eigenvalues.max()))
        choice = replace(search(objective, ridge)[0], value=value)
    else:
        choice, edge = search(objective, options.ridge)
    distribution = objective.likeliest_distribution(choice)
    if distribution != options.distribution:
        # Open tails are chosen at the ridge that was found without them.
        objective = replace(objective, options=replace(options, distribution=distribution))
        choice = search(objective, choice.ridge)[0]

    errors, _ = objective.errors_and_variances(choice)
    target_errors = [column[column.isfinite()] for column in errors.unbind(1)]
    remarks = []
    barless_rows = int(objective.barless.any(1).sum())
    if barless_rows > 0:
        remarks.append(
            f"The features of {barless_rows} of {len(objective.barless)} rows are zero: the "
            "readout's weights do not affect their outputs (a final ReLU or clamp, an empty sum). "
            "Without noise such rows have error bars of zero, so they were left out of the "
            "calibration. With criterion='auto' or noise='constant' their bar is the noise."
        )
        notify(remarks[0])
    searched = options.ridge is None and evidence is None
    rechoose_ridge = searched and len(residuals.error) <= RECHOSEN
    return completed_report(
        options,
        residuals,
        target_errors,
        calibration=objective.calibration(choice),
        curvature=curvature_at(choice.ridge),
        gain=_gain(objective, choice, target_errors, rechoose_ridge=rechoose_ridge),
        value=choice.value,
        nll=float(objective.nll(choice).nanmean()),
        at_edge=edge,
        zero_curvature=zero_curvature,
        remarks=remarks,
    )


def _gain(
    objective: Objective, choice: Choice, errors: list[Tensor], *, rechoose_ridge: bool
) -> Gain:
    """The gain over one constant bar on left-out rows; unknown where there are too few.

    `errors` has the errors of each target's usable rows.
    """
    if min(map(len, errors)) < FEWEST_ROWS:
        return Gain()
    try:
        nll = objective.left_out_nll(choice, rechoose_ridge=rechoose_ridge)
    except ValueError:  # the other rows have no error, or no variance
        return Gain()
    differences = []
    for target_nll, target_error in zip(nll.unbind(1), errors, strict=True):
        finite = target_nll[target_nll.isfinite()]
        if len(finite) != len(target_error):
            return Gain()
        differences.append(constant_nll(target_error) - finite)
    return Gain.of(differences)


def completed_report(
    options: CalibrationOptions,
    residuals: Residuals | None,
    errors: list[Tensor],
    *,
    calibration: Calibration,
    curvature: Any,
    gain: Gain,
    value: float,
    nll: float,
    at_edge: str | None,
    zero_curvature: int,
    remarks: list[str],
    seen: int = 0,
    ladder: dict[str, float] | None = None,
    rung: str = "",
) -> CalibrationReport:
    """The report on a choice, completed with what depends only on the rows.

    It warns where a noticeable share of the validation rows is in the training data too, where they
    are copies of a few rows, and where there are very few of them.

    Args:
        options: What was asked.
        residuals: The validation rows, if any.
        errors: The errors of each target's rows, which make the constant bar.
        calibration: What was chosen.
        curvature: The curvature at the chosen ridge, with condition, effective_rank and width.
        gain: The gain over the constant bar.
        value: The criterion's value.
        nll: The NLL per row on the rows that were fitted to.
        at_edge: The edge of the ridge's range, as in `search`.
        zero_curvature: How many training rows have no weight.
        remarks: Sentences on the choice.
        seen: How many training rows were used.
        ladder: For `auto`, the cross-validated NLL of each rung.
        rung: For `auto`, the rung that was taken.
    """
    if residuals is not None:
        remarks = [*residuals.repeated, *remarks]
        if residuals.distinct < _FEW_DISTINCT:
            for sentence in residuals.repeated:
                notify(sentence)
    squares = torch.stack([error.square().mean() for error in errors])
    report = CalibrationReport(
        calibration=calibration,
        criterion=options.criterion,
        value=value,
        at_edge=at_edge,
        condition=curvature.condition,
        effective_rank=curvature.effective_rank,
        width=curvature.width,
        nll=nll,
        nll_constant=float(0.5 * (2 * math.pi * math.e * squares).log().mean()),
        constant=squares.sqrt(),
        gain=gain.mean,
        gain_error=gain.error,
        gain_without=gain.without,
        rows=0 if residuals is None else residuals.rows,
        used=0 if residuals is None else len(residuals.error),
        samples=0 if residuals is None else residuals.samples,
        duplicates=0 if residuals is None else round(residuals.duplicates),
        fixed=options.ridge is not None,
        zero_curvature=zero_curvature,
        seen=seen,
        ladder={} if ladder is None else ladder,
        rung=rung,
        remarks=remarks,
    )
    for sentence in (*report.repeated, *report.few):
        notify(sentence)
    return report
