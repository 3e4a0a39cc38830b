r"""Ridge, scale and noise from residuals, at the price of one pass and one eigendecomposition.

With $G = V \mathrm{diag}(\lambda) V^\top$ and $P = (F_{val} V)^2$ elementwise, the variances for
a whole grid of ridges s are one matrix product, $q(s) = P\,(\lambda + s)^{-1}$; the best scale at
each ridge has a closed form (`criteria`). A noise floor $\rho$ joins as $u = q + \rho / c$, with c
the row's loss weight.

Without validation data, `loo` takes the training rows: a row left out of a ridge regression has
residual $e/(1-cq)$ and variance $q/(1-cq)$. That is exact for a readout refitted without the
row and optimistic for a net trained end to end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .criteria import CRITERIA, LOG_TWO_PI, Criterion, pooled

DECADES = (-10.0, 4.0)
"""Range of the ridge in powers of ten of the Gram's largest eigenvalue."""

PER_DECADE = 4
_FLOOR_DECADES = torch.linspace(-4, 4, 33, dtype=torch.float64)


NOISES = ("none", "constant", "bayes")
"""No noise (the paper's); a constant floor of its own; and Bayesian linear regression's, where the
noise is the scale squared, so that the variance is scale squared times (1 + q)."""


@dataclass(frozen=True)
class Residuals:
    """What one pass over data leaves for calibration.

    Attributes:
        error: target minus prediction, (n, K); NaN where a target is masked.
        power: squared components in the Gram's eigenbasis, (n, D), or (n, K, D) per target.
        weight: weight of each row in the Gram, (n, 1) or (n, K).
        importance: the user's sample weight c, which divides the noise, (n, 1) or (n, K).
        rows: how many rows were seen; n may be fewer, evenly thinned to bound the memory.
        samples: how many samples were compared with the training data.
        duplicates: how many of those stand in the training data too.
    """

    error: Tensor
    power: Tensor
    weight: Tensor
    importance: Tensor
    rows: int
    samples: int = 0
    duplicates: float = 0.0

    def quadratic(self, eigenvalues: Tensor, ridges: Tensor) -> Tensor:
        """q for each ridge: (n, 1 or K, J)."""
        inverse = 1 / (eigenvalues[..., None] + ridges)
        if self.power.ndim == 2:
            return (self.power @ inverse)[:, None]
        if inverse.ndim == 2:
            return self.power @ inverse
        return torch.einsum("nkd,kdj->nkj", self.power, inverse)


@dataclass(frozen=True)
class Choice:
    """One candidate's best scale and noise floor for every target."""

    ridge: float
    value: float
    scale2: Tensor
    floor: Tensor


@dataclass(frozen=True)
class Objective:
    """The criterion as a function of the ridge, everything else at its best.

    Attributes:
        residuals: the data.
        eigenvalues: of the Gram, (D,) or (K, D).
        criterion: a profile criterion.
        noise: one of `NOISES`: no floor, a constant one, or one equal to the scale squared.
        left_out: treat every row as left out of the fit (`loo`).
    """

    residuals: Residuals
    eigenvalues: Tensor
    criterion: Criterion
    noise: str = "none"
    left_out: bool = False

    def choices(
        self, ridges: Tensor, around: Choice | None = None, width: float = 1
    ) -> list[Choice]:
        """The best scale and floor at each ridge.

        Args:
            ridges: (J,).
            around: search floors near this choice's rather than over the whole range.
            width: of that search, in steps of the coarse grid of floors.
        """
        q = self.residuals.quadratic(self.eigenvalues, ridges)
        targets = self.residuals.error.shape[1]
        columns = [self._target(q, k, around, width) for k in range(targets)]
        values, scales, floors = (
            torch.stack(parts, dim=-1) for parts in zip(*columns, strict=True)
        )
        value = pooled(self.criterion, values).nan_to_num(nan=math.inf)
        return [
            Choice(float(ridge), float(value[j]), scales[j], floors[j])
            for j, ridge in enumerate(ridges)
        ]

    def variance(self, choice: Choice) -> Tensor:
        """The chosen variances of all rows, (n, K)."""
        ridges = self.eigenvalues.new_tensor([choice.ridge])
        q = self.residuals.quadratic(self.eigenvalues, ridges)[..., 0]
        if self.left_out:
            q = q / (1 - self.residuals.weight * q)
        return choice.scale2 * (q + choice.floor / self.residuals.importance)

    def as_left_out(self, ridge: float) -> Residuals:
        """The residuals that rows would have if each were left out of the fit."""
        q = self.residuals.quadratic(self.eigenvalues, self.eigenvalues.new_tensor([ridge]))[..., 0]
        return replace(self.residuals, error=self.residuals.error / (1 - self.residuals.weight * q))

    def _target(
        self, q: Tensor, k: int, around: Choice | None, width: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(value, scale^2, floor) of target k, each (J,)."""
        error, spread, share = self._rows(q, k)
        if self.noise != "constant":
            tied = float(self.noise == "bayes")
            scale2, value = self.criterion(error, spread + tied * share)
            return value, scale2, torch.full_like(value, tied)
        best = []
        for j in range(spread.shape[1]):
            column = spread[:, j, None]
            floors = _floors(column, None if around is None else around.floor[k], width)
            one = error if error.shape[1] == 1 else error[:, j, None]
            scale2, value = self.criterion(one, column + floors * share)
            at = value.nan_to_num(nan=math.inf).argmin()
            best.append((value[at], scale2[at], floors[at]))
        value, scale2, floor = (torch.stack(part) for part in zip(*best, strict=True))
        return value, scale2, floor

    def _rows(self, q: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Errors and spreads of target k where it is not masked, and the noise's share 1/c."""
        data = self.residuals
        known = torch.isfinite(data.error[:, k])
        error = data.error[known, k, None]
        weight = _column(data.weight, k)[known]
        share = 1 / _column(data.importance, k)[known]
        spread = _column(q, k)[known][:, 0]
        if not self.left_out:
            return error, spread, share
        kept = 1 - weight * spread
        kept = torch.where(kept > 1e-12, kept, math.nan)
        return error / kept, spread / kept, share


def check_noise(noise: str) -> None:
    """Refuse what is none of `NOISES`."""
    if noise not in NOISES:
        raise ValueError(f"Unknown noise {noise!r}. Known: {', '.join(NOISES)}.")


def search(objective: Objective, ridge: float | None) -> tuple[Choice, str | None]:
    """The best choice, and the edge ("lower", "upper") of the ridge's range it lies at, if any.

    A grid over the whole range, then finer ones about its best point.
    """
    largest = float(objective.eigenvalues.max())
    if ridge is not None:
        at = torch.tensor([ridge], dtype=torch.float64, device=objective.eigenvalues.device)
        best = _best(objective.choices(at))
        for width in (1.0, 0.25, 0.0625) if objective.noise == "constant" else ():
            best = _best([best, *objective.choices(at, best, width)])
        return best, None
    exponents = ridge_exponents().to(objective.eigenvalues.device)
    candidates = objective.choices(largest * 10**exponents)
    best = _best(candidates)
    edge = {0: "lower", len(candidates) - 1: "upper"}.get(candidates.index(best))
    for width in (1.0, 0.25, 0.0625):
        finer = about(math.log10(best.ridge / largest), width / PER_DECADE, 9).to(exponents)
        best = _best([best, *objective.choices(largest * 10**finer, best, width)])
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
    best = min(choices, key=lambda choice: choice.value)
    if not math.isfinite(best.value):
        raise ValueError(
            "No ridge gives a finite criterion. Are there rows whose features are all zero (their "
            "variance is zero)? Use noise='constant', or a readout with a bias."
        )
    return best


def _floors(spread: Tensor, around: Tensor | None, width: float) -> Tensor:
    """Candidate floors: none, and multiples of the mean variance or of a floor found before."""
    zero = spread.new_zeros(1)
    if around is None or not bool(around > 0):
        return torch.cat([zero, spread.nanmean() * 10 ** _FLOOR_DECADES.to(spread.device)])
    step = float(_FLOOR_DECADES[1] - _FLOOR_DECADES[0]) * width
    offsets = torch.linspace(-step, step, 9, dtype=torch.float64, device=spread.device)
    return torch.cat([zero, around * 10**offsets])


def mean_nll(residuals: Residuals, variance: Tensor) -> float:
    """Gaussian NLL per row and target of given variances (n, K)."""
    z2 = residuals.error.square() / variance
    return float(0.5 * (LOG_TWO_PI + variance.log() + z2).nanmean())


def constant_nll(residuals: Residuals) -> float:
    """The same for the best constant error bar of each target."""
    mse = residuals.error.square().nanmean(0)
    return float(0.5 * (1 + LOG_TWO_PI + mse.log()).mean())


def criterion_for(name: str) -> Criterion:
    """The profile criterion of that name; `evidence` and `loo` set the scale by the NLL."""
    if name in {"evidence", "loo"}:
        return CRITERIA["nll"]
    if name not in CRITERIA:
        known = ", ".join([*CRITERIA, "evidence", "loo"])
        raise ValueError(f"Unknown criterion {name!r}. Known: {known}.")
    return CRITERIA[name]
