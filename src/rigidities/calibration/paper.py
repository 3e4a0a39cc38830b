r"""The paper's form: ridge, scale and noise by one criterion.

With $G = V \mathrm{diag}(\lambda) V^\top$ and $P = (F_{val} V)^2$ elementwise, the variances for
a whole grid of ridges s are one matrix product, $q(s) = P\,(\lambda + s)^{-1}$; the best scale at
each ridge has a closed form. A noise floor $\rho$ joins as $u = q + \rho\,\bar c / c$, with c the
row's loss weight and $\bar c$ the typical one. Rows with q = 0 at every ridge, where the gradient
of the output vanishes, say nothing of the scale: without a noise they are left out.

Without validation data, the criterion "loo" takes the training rows: a row left out of a ridge
regression has residual $e/(1-cq)$ and variance $q/(1-cq)$. That is exact for a readout refitted
without the row and optimistic for a network trained end to end.

A criterion takes residuals r (n, J) and unscaled variances u = q + floor (n, J) for J candidates at
once, finds the best $\alpha^2$ of each candidate, and returns ($\alpha^2$, value), both (J,);
smaller values are better. The criterion of the likelihood is the distribution's own
(`Distribution.profile`); `bins` is the paper's.

Data flow: `Objective` is the criterion as a function of the ridge, `search` finds its minimum, or
`most_evident_ridge` that of the evidence, and `fit_paper` makes a report of the choice, with its
cross-validated gain over one constant bar.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..prediction.distribution import Distribution, Gaussian, StudentT, distribution_named
from ..prediction.noise import GivenNoise, Noise
from . import words
from .calibration import Calibration
from .gain import FEWEST_ROWS, Gain, constant_nll, folds
from .methods import Method, Paper
from .report import CalibrationReport
from .rows import Curvature, Rows, golden_positions

__all__ = ["Choice", "Objective", "bins", "fit_paper", "most_evident_ridge", "search"]

DECADES = (-10.0, 4.0)
"""Range of the ridge in powers of ten of the Gram's largest eigenvalue."""
PER_DECADE = 4
"""Points per decade of the coarse grid."""
EFFORT = 1 << 29
"""Largest effort of one grid: rows times candidates times the price of one (some 2 s).

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
_PRICE_OF_BINS = 48
"""Cost of a row and candidate for `bins`, which sorts, relative to the Gaussian likelihood."""
_PRICE_OF_ITERATING = 128
"""The same for a distribution whose best scale is found by iteration."""
BIN_SIZE = 100
"""Rows of a bin, where there are enough of them."""

Criterion = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Residuals and unscaled variances, both (n, J), to the best squared scales and values, (J,)."""

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


def fit_paper(
    method: Paper,
    rows: Rows,
    posterior: Curvature,
    *,
    evidence: Evidence | None = None,
    least_ridge: float = -math.inf,
) -> CalibrationReport:
    """Choose ridge, scale and noise by a criterion, and report on the choice.

    Args:
        method: What is asked of the calibration.
        rows: The rows to calibrate on.
        posterior: The eigenvalues of the basis of the rows' powers, and numbers at a ridge.
        evidence: The negative log evidence of ridges, which then chooses the ridge.
        least_ridge: Ridges up to here are not searched.

    Raises:
        ValueError: No ridge gives a finite criterion.
    """
    if method.ridge is not None:
        posterior.with_ridge(method.ridge)  # refuses a ridge that leaves a singular matrix
    objective = Objective(
        rows=rows,
        eigenvalues=posterior.eigenvalues,
        noise=method.noise_class,
        distribution=distribution_named(method.distribution),
        by_bins=method.criterion == "bins",
        least_ridge=least_ridge,
    )
    if evidence is not None and method.ridge is None:
        ridge, value, edge = most_evident_ridge(evidence, float(posterior.eigenvalues.max()))
        choice = replace(search(objective, ridge)[0], value=value)
    else:
        choice, edge = search(objective, method.ridge)
    if method.open_tails:
        # The tails are chosen at the ridge that was found without them.
        tails = objective.likeliest_tails(choice)
        if tails != objective.distribution:
            objective = replace(objective, distribution=tails)
            choice = search(objective, choice.ridge)[0]

    errors, _ = objective.errors_and_variances(choice)
    target_errors = [column[column.isfinite()] for column in errors.unbind(1)]
    remarks = []
    barless_rows = int(objective.barless.any(1).sum())
    if barless_rows > 0:
        remarks.append(words.zero_features(barless_rows, len(rows)))
    searched = method.ridge is None and evidence is None
    rechoose_ridge = searched and len(rows) <= RECHOSEN
    calibration = objective.calibration(choice, method)
    return CalibrationReport.of(
        method,
        calibration,
        posterior.with_ridge(choice.ridge),
        rows,
        target_errors,
        gain=_gain(objective, choice, target_errors, rechoose_ridge=rechoose_ridge),
        value=choice.value,
        nll=float(objective.nll(choice).nanmean()),
        at_edge=edge,
        remarks=remarks,
        notices=remarks,
    )


@dataclass(frozen=True)
class Objective:
    """The criterion as a function of the ridge, everything else at its best.

    Attributes:
        rows: The rows.
        eigenvalues: Those of the Gram, (D,) or (K, D).
        noise: The class of the noise. Its floor, in units of the squared scale, is tied to it or
            searched.
        distribution: The distribution around the mean.
        by_bins: Whether the criterion is `bins`; else it is the distribution's likelihood.
        least_ridge: Ridges up to here leave the curvature singular or indefinite.
    """

    rows: Rows
    eigenvalues: Tensor
    noise: type[Noise]
    distribution: Distribution
    by_bins: bool = False
    least_ridge: float = -math.inf

    @property
    def criterion(self) -> Criterion:
        """The criterion as a function of residuals and spreads."""
        return bins if self.by_bins else self.distribution.profile

    @property
    def price(self) -> int:
        """The cost of the criterion for a row and candidate."""
        if self.by_bins:
            return _PRICE_OF_BINS
        return 1 if isinstance(self.distribution, Gaussian) else _PRICE_OF_ITERATING

    @cached_property
    def barless(self) -> Tensor:
        """Which rows (n, 1 or K) have no variance at any ridge: zero features, and no noise."""
        has_features = torch.cat([(piece != 0).any(-1) for piece in self.rows.power])
        if self.noise.tied == 0:
            return ~has_features
        return torch.zeros_like(has_features)

    def choices(self, ridges: Tensor, grid: FloorGrid = _ALL_FLOORS) -> list[Choice]:
        """The best scale and floor at each ridge (J,), among the floors of the grid.

        Where that takes more than `EFFORT`, only an evenly spread share of the rows is used.
        """
        rows, targets = self.rows.error.shape
        floors = grid.count if self.noise.tied is None else 1
        effort = rows * targets * len(ridges) * floors * self.price
        positions = golden_positions(0, rows, self.rows.error.device)
        judging = positions < EFFORT / effort  # (n,)
        choices = []
        for some_ridges in torch.split(ridges, max(1, _TABLE // (rows * targets))):
            choices += self._choices(some_ridges, judging, grid)
        return choices

    def _choices(self, ridges: Tensor, judging: Tensor, grid: FloorGrid) -> list[Choice]:
        """`choices` for few ridges; the mask `judging`, (n,), says which rows are used."""
        q = self.rows.quadratic(self.eigenvalues, ridges)
        target_values = []
        target_scales = []
        target_floors = []
        for target in range(self.rows.error.shape[1]):
            value, scale2, floor = self._target_choices(q, target, judging, grid)
            target_values.append(value)
            target_scales.append(scale2)
            target_floors.append(floor)
        scales = torch.stack(target_scales, dim=-1)  # (J, K)
        floors = torch.stack(target_floors, dim=-1)
        values = torch.stack(target_values, dim=-1).mean(-1)
        values = values.nan_to_num(nan=math.inf)
        values = torch.where(ridges > self.least_ridge, values, math.inf)
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
        tied = self.noise.tied
        if tied is not None:  # to the squared scale, at weight one
            floor = tied / _column(self.rows.typical_weight_in_gram, target)[0]
            if tied:
                spread = spread + floor * noise_factor
            scale2, value = self._profile(error, spread)
            return value, scale2, floor.expand_as(value)
        values = []
        scales = []
        best_floors = []
        for j in range(spread.shape[1]):
            column = spread[:, j, None]  # (n, 1)
            mean_variance = column.nanmean() / self.rows.mean_shape
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
        rows = self.rows
        barless = _column(self.barless, target)[:, 0]
        usable = torch.isfinite(rows.error[:, target]) & judging & ~barless
        error = rows.error[usable, target, None]
        weight = _column(rows.weight, target)[usable]
        noise_factor = _column(rows.noise_factor, target)[usable]
        spread = _column(q, target)[usable][:, 0]
        if not rows.trained:
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
            scale2, value = self.criterion(column_errors, spread[:, columns].contiguous())
            scales.append(scale2)
            values.append(value)
        return torch.cat(scales), torch.cat(values)

    def errors_and_variances(self, choice: Choice) -> tuple[Tensor, Tensor]:
        """Errors and variances of the rows at a choice, both (n, K).

        Errors are NaN where a target is masked, and in rows that have no variance.
        """
        q = self.rows.quadratic_at(self.eigenvalues, choice.ridge)
        error = self.rows.error.masked_fill(self.barless, math.nan)
        if self.rows.trained:
            remaining = 1 - self.rows.weight * q
            error = error / remaining
            q = q / remaining
        return error, choice.scale2 * (q + choice.floor * self.rows.noise_factor)

    def nll(self, choice: Choice) -> Tensor:
        """The NLL of each row and target at the choice, (n, K); NaN where masked."""
        distribution = self.distribution
        error, variance = self.errors_and_variances(choice)
        scale = (variance / torch.as_tensor(distribution.second, dtype=variance.dtype)).sqrt()
        return scale.log() - distribution.log_density(error / scale)

    def left_out_nll(self, choice: Choice, *, rechoose_ridge: bool) -> Tensor:
        """The NLL of rows left out of their fold's choice of scale and noise, (n, K).

        Args:
            choice: The choice by all rows, whose ridge every fold takes.
            rechoose_ridge: Whether each fold chooses the ridge again instead.
        """
        fold = folds(len(self.rows), self.rows.error.device, self.rows.sample)
        nll = torch.full_like(self.rows.error, math.nan)
        for k in range(int(fold.max()) + 1):
            in_fold = fold == k
            others = replace(self, rows=self.rows.subset(~in_fold))
            left_out = replace(self, rows=self.rows.subset(in_fold))
            fold_choice, _ = search(others, None if rechoose_ridge else choice.ridge)
            nll[in_fold] = left_out.nll(fold_choice)
        return nll

    def likeliest_tails(self, choice: Choice) -> StudentT:
        """The likeliest Student-t; all targets get the same degrees of freedom."""
        error, variance = self.errors_and_variances(choice)
        z = (error / variance.sqrt()).reshape(-1, 1)
        z = z[z.isfinite()[:, 0]][:: 1 + len(z) // _TAIL_ROWS]
        tails = torch.linspace(math.log(0.1), math.log(1000), 47).exp().tolist()
        distributions = [StudentT(2 + tail) for tail in tails]
        ones = torch.ones_like(z)

        def value(distribution: StudentT) -> float:
            return float(distribution.profile(z, ones)[1])

        return min(distributions, key=value)

    def calibration(self, choice: Choice, method: Method) -> Calibration:
        """The choice as a `Calibration`, with the support and the noise function of a method."""
        level = choice.scale2 * choice.floor
        noise = self.noise(level)
        if self.noise is GivenNoise:
            noise = GivenNoise(level, method.noise_function)
        return Calibration(
            ridge=choice.ridge,
            scale=choice.scale2.sqrt(),
            noise=noise,
            distribution=self.distribution,
            weight=self.rows.typical_weight[0].expand_as(choice.floor),
            support=method.support,
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
    if ridge is None or objective.noise.tied is None:  # there is something to refine
        for width in (1.0, 0.25, 0.0625):
            if ridge is None:
                centre = math.log10(best.ridge / largest)
                finer = finer_exponents(centre, width / PER_DECADE, 9)
                ridges = largest * 10 ** finer.to(device)
            best = _best([best, *objective.choices(ridges, FloorGrid(best, width))])
    if best.rows < len(objective.rows.error):
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
            "(then their variance is zero). Use Paper(noise='constant'), or a readout with a bias."
        )
    return best


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
        sample = objective.rows.sample
        if sample is not None:
            sample = sample[target_nll.isfinite()]
        differences.append(constant_nll(target_error, sample=sample) - finite)
    return Gain.of(differences)


def bins(residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    r"""The paper's: $\sum_b \log^2 (\mathrm{MSE}_b / \alpha^2 \bar u_b)$ over bins by variance.

    Rows are sorted by u and cut into bins of 100 (a quarter of the rows when there are fewer than
    400); an incomplete last bin is left out. The best $\log \alpha^2$ is the mean log-ratio.
    """
    size = bin_size(len(spread))
    count = len(spread) // size
    order = spread.argsort(dim=0)[: count * size]
    square = residual.expand_as(spread).gather(0, order).square()
    # (bins, rows of a bin, J) -> (bins, J)
    mse = square.reshape(count, size, -1).mean(1)
    variance = spread.gather(0, order).reshape(count, size, -1).mean(1)
    log_ratio = (mse / variance).log()
    log_scale2 = log_ratio.mean(0)
    value = (log_ratio - log_scale2).square().sum(0)
    return log_scale2.exp(), value.nan_to_num(nan=math.inf)


def bin_size(rows: int) -> int:
    """100, or a quarter of the rows where there are fewer than 400."""
    return max(1, min(BIN_SIZE, rows // 4))
