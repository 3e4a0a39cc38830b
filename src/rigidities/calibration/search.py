r"""Ridge, scale and noise from residuals, at the price of one pass and one eigendecomposition.

With $G = V \mathrm{diag}(\lambda) V^\top$ and $P = (F_{val} V)^2$ elementwise, the variances for
a whole grid of ridges s are one matrix product, $q(s) = P\,(\lambda + s)^{-1}$; the best scale at
each ridge has a closed form (`criteria`). A noise floor $\rho$ joins as $u = q + \rho\,\bar c / c$,
with c the row's loss weight and $\bar c$ the typical one. Rows with q = 0 at every ridge, where the
gradient of the output vanishes, say nothing of the scale: without a noise they are left out.

Without validation data, `loo` takes the training rows: a row left out of a ridge regression has
residual $e/(1-cq)$ and variance $q/(1-cq)$. That is exact for a readout refitted without the
row and optimistic for a net trained end to end.
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
from .calibration import Calibration, Wanted
from .criteria import pooled, price
from .gain import FEWEST_ROWS, Gain, constant_nll, folds
from .report import CalibrationReport
from .residuals import Residuals, places

DECADES = (-10.0, 4.0)
"""Range of the ridge in powers of ten of the Gram's largest eigenvalue."""

PER_DECADE = 4
EFFORT = 1 << 29
"""Rows times candidates, in units of the cheapest criterion, that one grid may take (some 2 s).
Beyond it the grid is searched with fewer rows, and what it leaves judged with more."""

_CELLS, _TABLE, _TAILED = 1 << 17, 1 << 22, 1 << 14
_FLOOR_DECADES = torch.linspace(-4, 4, 33, dtype=torch.float64)
_FINE = 9


@dataclass(frozen=True)
class Choice:
    """One candidate's best scale and noise floor for every target, judged by so many rows."""

    ridge: float
    value: float
    scale2: Tensor
    floor: Tensor
    rows: int


@dataclass(frozen=True)
class Objective:
    """The criterion as a function of the ridge, everything else at its best.

    Attributes:
        residuals: the data.
        eigenvalues: of the Gram, (D,) or (K, D).
        wanted: criterion, distribution, and the noise, whose floor, in units of the squared scale,
            is tied to it or searched.
        least: ridges up to here leave the curvature singular or indefinite.
    """

    residuals: Residuals
    eigenvalues: Tensor
    wanted: Wanted
    least: float = -math.inf

    @cached_property
    def barless(self) -> Tensor:
        """Which rows (n, 1 or K) have no variance at any ridge: zero features, and no noise."""
        whole = torch.cat([(piece != 0).any(-1) for piece in self.residuals.power])
        whole = whole[:, None] if whole.ndim == 1 else whole
        return ~whole if self.wanted.noise.tied == 0 else torch.zeros_like(whole)

    def choices(self, ridges: Tensor, near: Choice | None = None, width: float = 1) -> list[Choice]:
        """The best scale and floor at each ridge.

        Args:
            ridges: (J,).
            near: search floors near this choice's rather than over the whole range.
            width: of that search, in steps of the coarse grid of floors; 0 takes it as it is.
        """
        rows, targets = self.residuals.error.shape
        floors = 1 + (len(_FLOOR_DECADES) if near is None else _FINE)
        each = floors if self.wanted.noise.tied is None and width else 1
        effort = rows * targets * len(ridges) * each * price(self.wanted.profile)
        kept = places(0, rows, self.residuals.error) < EFFORT / effort
        parts = torch.split(ridges, max(1, _TABLE // (rows * targets)))
        return [one for part in parts for one in self._judged(part, kept, near, width)]

    def _judged(
        self, ridges: Tensor, kept: Tensor, near: Choice | None, width: float
    ) -> list[Choice]:
        q = self.residuals.quadratic(self.eigenvalues, ridges)
        targets, rows = self.residuals.error.shape[1], int(kept.sum())
        columns = [self._target(q, k, kept, near, width) for k in range(targets)]
        values, scales, floors = (torch.stack(p, dim=-1) for p in zip(*columns, strict=True))
        value = pooled(self.wanted.profile, values).nan_to_num(nan=math.inf)
        value = torch.where(ridges > self.least, value, math.inf)
        found = zip(ridges.tolist(), value.tolist(), scales, floors, strict=True)
        return [Choice(*one, rows) for one in found]

    def calibration(self, choice: Choice) -> Calibration:
        """The choice as everything after calibration uses it."""
        level, given = choice.scale2 * choice.floor, self.wanted.given
        noise = self.wanted.noise(level) if given is None else GivenNoise(level, given)
        weight = self.residuals.typical[0].expand_as(choice.floor)
        parts = (choice.ridge, choice.scale2.sqrt(), noise, self.wanted.distribution, weight)
        return Calibration(*parts, support=self.wanted.support)

    def nll(self, choice: Choice) -> Tensor:
        """NLL of each row and target at the choice, (n, K); NaN where masked."""
        (error, variance), distribution = self.standing(choice), self.wanted.distribution
        scale = (variance / torch.as_tensor(distribution.second, dtype=variance.dtype)).sqrt()
        return scale.log() - distribution.log_density(error / scale)

    def left_out_nll(self, choice: Choice, *, again: bool) -> Tensor:
        """The same for rows left out of their fold's choice of scale and noise, (n, K).

        `again` chooses the ridge again in each fold too.
        """
        fold = folds(len(self.residuals.error), self.residuals.error.device)
        found = torch.full_like(self.residuals.error, math.nan)
        for k in range(int(fold.max()) + 1):
            out = fold == k
            rest = replace(self, residuals=self.residuals.picked(~out))
            left = replace(self, residuals=self.residuals.picked(out))
            own, _ = search(rest, None if again else choice.ridge)
            found[out] = left.nll(own)
        return found

    def likeliest_distribution(self, choice: Choice) -> Distribution:
        """The distribution wanted; a Student-t by name has the likeliest tails, the same for all
        targets.
        """
        if not self.wanted.open_tails:
            return self.wanted.distribution
        error, variance = self.standing(choice)
        z = (error / variance.sqrt()).reshape(-1, 1)
        z = z[z.isfinite()[:, 0]][:: 1 + len(z) // _TAILED]
        tails = torch.linspace(math.log(0.1), math.log(1000), 47).exp().tolist()
        distributions = [StudentT(2 + tail) for tail in tails]
        return min(
            distributions,
            key=lambda distribution: float(distribution.profile(z, torch.ones_like(z))[1]),
        )

    def standing(self, choice: Choice) -> tuple[Tensor, Tensor]:
        """Errors (n, K), NaN of rows that do not count, and variances at a choice."""
        ridges = self.eigenvalues.new_tensor([choice.ridge])
        q = self.residuals.quadratic(self.eigenvalues, ridges)[..., 0]
        error = self.residuals.error.masked_fill(self.barless, math.nan)
        if self.wanted.left_out:
            kept = 1 - self.residuals.weight * q
            error, q = error / kept, q / kept
        return error, choice.scale2 * (q + choice.floor * self.residuals.share)

    def _target(
        self, q: Tensor, k: int, kept: Tensor, near: Choice | None, width: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(value, scale^2, floor) of target k, each (J,)."""
        error, spread, share = self._rows(q, k, kept)
        if (tied := self.wanted.noise.tied) is not None:  # at weight one
            floor = tied / _column(self.residuals.typical, k)[0]
            scale2, value = self._profile(error, spread + floor * share if tied else spread)
            return value, scale2, floor.expand_as(value)
        best = []
        for j in range(spread.shape[1]):
            column = spread[:, j, None]
            mean = column.nanmean() / self.residuals.unit
            floors = _floors(mean, None if near is None else near.floor[k], width)
            one = error if error.shape[1] == 1 else error[:, j, None]
            scale2, value = self._profile(one, column + floors * share)
            at = value.nan_to_num(nan=math.inf).argmin()
            best.append((value[at], scale2[at], floors[at]))
        value, scale2, floor = (torch.stack(part) for part in zip(*best, strict=True))
        return value, scale2, floor

    def _profile(self, error: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """The criterion of each column, few at a time: what does not fit a cache is slow."""
        step = max(1, _CELLS // len(spread))
        columns = torch.split(spread, step, 1)
        errors = torch.split(error, step, 1) if error.shape[1] > 1 else [error] * len(columns)
        pairs = zip(errors, columns, strict=True)
        found = [self.wanted.profile(r, u.contiguous()) for r, u in pairs]
        scale2, value = (torch.cat(part) for part in zip(*found, strict=True))
        return scale2, value

    def _rows(self, q: Tensor, k: int, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Errors and spreads of target k in the rows that count, and the noise's share."""
        data = self.residuals
        known = torch.isfinite(data.error[:, k]) & kept & ~_column(self.barless, k)[:, 0]
        error = data.error[known, k, None]
        weight = _column(data.weight, k)[known]
        share = _column(data.share, k)[known]
        spread = _column(q, k)[known][:, 0]
        if not self.wanted.left_out:
            return error, spread, share
        held = 1 - weight * spread
        held = torch.where(held > 1e-12, held, math.nan)
        return error / held, spread / held, share


def search(objective: Objective, ridge: float | None) -> tuple[Choice, str | None]:
    """The best choice, and the edge ("lower", "upper") of the ridge's range it lies at, if any.

    A grid over the whole range, then finer ones about its best point. Where there were too many
    rows to search with, the scale at the end is that of them all.
    """
    largest, device = float(objective.eigenvalues.max()), objective.eigenvalues.device
    exponents = ridge_exponents().to(device)
    at = largest * 10**exponents if ridge is None else exponents.new_tensor([ridge])
    candidates = objective.choices(at)
    best = _best(candidates)
    ends = {0: "lower", len(candidates) - 1: "upper"} if ridge is None else {}
    edge = ends.get(candidates.index(best))
    for width in (1.0, 0.25, 0.0625) if ends or objective.wanted.noise.tied is None else ():
        if ridge is None:
            finer = about(math.log10(best.ridge / largest), width / PER_DECADE, 9)
            at = largest * 10 ** finer.to(device)
        best = _best([best, *objective.choices(at, best, width)])
    if best.rows < len(objective.residuals.error):
        best = _best(objective.choices(objective.eigenvalues.new_tensor([best.ridge]), best, 0))
    return best, edge


def ridge_exponents() -> Tensor:
    """The coarse grid, in powers of ten of the largest eigenvalue."""
    steps = round((DECADES[1] - DECADES[0]) * PER_DECADE) + 1
    return torch.linspace(*DECADES, steps, dtype=torch.float64)


def about(centre: float, width: float, points: int) -> Tensor:
    """A fine grid around an exponent, inside the range."""
    fine = torch.linspace(centre - width, centre + width, points, dtype=torch.float64)
    return fine.clamp(*DECADES)


def _column(tensor: Tensor, k: int) -> Tensor:
    """Column k, (n, 1, ...), of a tensor with one column per target or one for all."""
    k = min(k, tensor.shape[1] - 1)
    return tensor[:, k : k + 1]


def _best(choices: list[Choice]) -> Choice:
    """The least value, of those judged by the most rows: a finer grid holds the old best too."""
    best = min(choices, key=lambda choice: (-choice.rows, choice.value))
    if not math.isfinite(best.value):
        raise ValueError(
            "No ridge gives a finite criterion. Are the features of all rows zero (their variance "
            "is zero)? Use noise='constant', or a readout with a bias."
        )
    return best


def _floors(mean: Tensor, near: Tensor | None, width: float) -> Tensor:
    """Candidate floors: none, and multiples of the mean variance or of a floor found before."""
    zero = mean.new_zeros(1)
    if near is not None and not width:
        return near[None]
    if near is None or not bool(near > 0):
        return torch.cat([zero, mean * 10 ** _FLOOR_DECADES.to(mean.device)])
    step = float(_FLOOR_DECADES[1] - _FLOOR_DECADES[0]) * width
    offsets = torch.linspace(-step, step, _FINE, dtype=torch.float64, device=mean.device)
    return torch.cat([zero, near * 10**offsets])


def most_evident_ridge(
    value: Callable[[Tensor], Tensor], largest: float
) -> tuple[float, float, str | None]:
    """The ridge that minimises the negative log evidence, its value, and the edge it lies at."""
    exponents, width = ridge_exponents(), 1 / PER_DECADE
    for _ in range(3):
        values = value(largest * 10**exponents).nan_to_num(nan=math.inf)
        at, best = int(values.argmin()), float(values.min())
        if not math.isfinite(best) or math.isinf(values[max(at - 1, 0)]):
            raise ValueError(
                "The evidence finds no ridge: beside a far offset, or one far residual, "
                "the others are lost to rounding. Fit to other targets, or take another criterion."
            )
        centre = float(exponents[at])
        exponents, width = about(centre, width, 17), width / 8
    edge = {DECADES[0]: "lower", DECADES[1]: "upper"}.get(centre)
    return largest * 10**centre, best, edge


Evidence = Callable[[Tensor], Tensor]
BARLESS = (
    "The features of {} of {} rows are zero: the readout's weights do not move their outputs (a "
    "final ReLU or clamp, an empty sum). Without noise such rows have error bars of zero, and they "
    "were left out of the calibration. criterion='auto' or noise='constant' gives them the noise."
)
_FEW = 30
"""Distinct rows below which copies of them get a warning, not only a remark."""
RECHOSEN = 1000
"""Rows up to which cross-validation chooses the ridge again in every fold: of more, one number that
all rows have chosen flatters by less than a thousandth of a nat."""


def chosen(
    residuals: Residuals,
    eigenvalues: Tensor,
    solved: Callable[[float], Any],
    wanted: Wanted,
    *,
    least: float = -math.inf,
    evidence: Evidence | None = None,
    zero_curvature: int = 0,
) -> CalibrationReport:
    """Choose, and judge the choice on the same rows.

    Args:
        residuals: of data.
        eigenvalues: (D,) or (K, D), of the basis that the residuals' powers stand in.
        solved: the curvature at a ridge, of which the report tells condition, effective_rank and
            width: a `Posterior`, say.
        wanted: by which criterion, and what.
        least: ridges up to here are not searched.
        evidence: negative log evidence of ridges, which then choose it.
        zero_curvature: training rows without weight, for the report.
    """
    objective = Objective(residuals, eigenvalues, wanted, least)
    if evidence is not None and wanted.ridge is None:
        ridge, value, edge = most_evident_ridge(evidence, float(eigenvalues.max()))
        choice = replace(search(objective, ridge)[0], value=value)
    else:
        choice, edge = search(objective, wanted.ridge)
    if (
        distribution := objective.likeliest_distribution(choice)
    ) != wanted.distribution:  # its tails are found afterwards
        wanted = replace(wanted, distribution=distribution)
        objective = replace(objective, wanted=wanted)
        choice = search(objective, choice.ridge)[0]
    searched = wanted.ridge is None and evidence is None
    errors = [column[column.isfinite()] for column in objective.standing(choice)[0].unbind(1)]
    found: dict[str, Any] = {"value": choice.value, "zero_curvature": zero_curvature}
    found |= {"calibration": objective.calibration(choice), "at_edge": edge}
    found |= {"nll": float(objective.nll(choice).nanmean())}
    if (count := int(objective.barless.any(1).sum())) > 0:
        said = BARLESS.format(count, len(objective.barless))
        notify(said)
        found |= {"remarks": [said]}
    gain = _gain(objective, choice, errors, again=searched and len(residuals.error) <= RECHOSEN)
    return reported(solved(choice.ridge), wanted, residuals, errors, gain, **found)


def _gain(objective: Objective, choice: Choice, errors: list[Tensor], *, again: bool) -> Gain:
    """Over one constant bar, on rows left out; not known where that leaves too few."""
    if min(map(len, errors)) < FEWEST_ROWS:
        return Gain()
    try:
        columns = objective.left_out_nll(choice, again=again).unbind(1)
    except ValueError:  # the other rows have no error, or no variance
        return Gain()
    known = [column[column.isfinite()] for column in columns]
    if any(len(nll) != len(error) for nll, error in zip(known, errors, strict=True)):
        return Gain()
    return Gain.of([constant_nll(e) - nll for e, nll in zip(errors, known, strict=True)])


def reported(
    final: Any,
    wanted: Wanted,
    residuals: Residuals | None,
    errors: list[Tensor],
    gain: Gain,
    **found: Any,
) -> CalibrationReport:
    """What was found, beside what was wanted, the final curvature and the validation rows, if any.

    `errors` of each target's rows make the constant bar, over which the `gain` is. It warns where
    enough of the validation rows stand in the training data too, where they are copies of few, and
    where they are very few.
    """
    own = {name: getattr(final, name) for name in ("condition", "effective_rank", "width")}
    rows: dict[str, Any] = {"rows": 0}
    if residuals is not None:
        counts = {"samples": residuals.samples, "duplicates": round(residuals.duplicates)}
        rows = {"rows": residuals.rows, "used": len(residuals.error), **counts}
        found["remarks"] = [*residuals.repeated, *found.get("remarks", [])]
        if residuals.distinct < _FEW:
            for sentence in residuals.repeated:
                notify(sentence)
    fixed = wanted.ridge is not None
    squares = torch.stack([error.square().mean() for error in errors])
    report = CalibrationReport(
        criterion=wanted.criterion,
        fixed=fixed,
        constant=squares.sqrt(),
        nll_constant=float(0.5 * (2 * math.pi * math.e * squares).log().mean()),
        gain=gain.mean,
        gain_error=gain.error,
        gain_without=gain.without,
        **own,
        **rows,
        **found,
    )
    for sentence in (*report.repeated, *report.few):
        notify(sentence)
    return report
