r"""The rigidity as a likelihood: the constrained loss against its Laplace approximation (Sec. 3.3).

With Gaussian noise of variance $\sigma^2$ the constrained loss of a prediction is a profile
log-posterior, $p(\epsilon) \propto \exp(-\mathcal{L}_c(\epsilon) / \sigma^2)$; the rigidity is its
curvature at the top and $N(\tilde y, \sigma^2 / R)$ the Laplace approximation to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from experiments.data.cosine import NOISE, Points, Sample
from experiments.frame.progress import steps
from experiments.training.curves import START, cubic, gaussians, minimised, prior
from rigidities import PredictionRigidity
from rigidities.constrained import constrained_profile, constrained_rigidity

INPUTS = {"inside": 0.4, "outside": 1.0}
"""Between the points, and beyond them (0.73 is the last) as far as profiles can be followed."""

FULL = {"draws": 3, "reach": 6, "per_deviation": 2, "models": 3, "places": tuple(INPUTS)}
QUICK = {"draws": 1, "reach": 3, "per_deviation": 1, "models": 2, "places": ("outside",)}
LEVELS = (0.68, 0.90, 0.95)
LBFGS = {"max_iter": 1000, "history_size": 50, "tolerance_grad": 1e-9, "tolerance_change": 1e-18}
HIDDEN, WEIGHT_VARIANCE = 2, 4.0


@dataclass(frozen=True)
class Toy:
    """A model with its loss.

    Attributes:
        name: in tables and titles.
        function: f(w, x), (N, 1) -> (N,).
        start: where the fit begins.
        penalty: minus the log-prior times the noise's variance.
    """

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    start: Tensor
    penalty: Callable[[Tensor], Tensor] | None = None

    def loss(self, w: Tensor, train: Points) -> Tensor:
        """Minus the log-posterior, times the noise's variance."""
        value = (train.y[:, 0] - self.function(w, train.x)).square().sum() / 2
        return value if self.penalty is None else value + self.penalty(w)


def net(w: Tensor, x: Tensor) -> Tensor:
    """A 1-2-1 net with tanh: (7,), (N, 1) -> (N,)."""
    slope, shift, out = w[:-1].reshape(3, HIDDEN)
    return torch.tanh(x * slope + shift) @ out + w[-1]


def decay(w: Tensor) -> Tensor:
    """Weight decay: a normal prior on each weight."""
    return NOISE**2 / (2 * WEIGHT_VARIANCE) * w.square().sum()


def toys(seed: int) -> list[Toy]:
    """The three models."""
    source = torch.Generator().manual_seed(seed)
    weights = torch.randn(3 * HIDDEN + 1, generator=source, dtype=torch.float64)
    return [
        Toy("cubic", cubic, torch.zeros(4, dtype=torch.float64)),
        Toy("two Gaussians", gaussians, START, prior),
        Toy("net 1-2-1", net, weights, decay),
    ]


def measured(
    *, draws: int, reach: int, per_deviation: int, models: int, places: Sequence[str], seed: int
) -> dict[str, Any]:
    """Some models at some inputs, for each draw of the noise.

    Args:
        draws: of the noise.
        reach: how far a profile is followed, in Laplace standard deviations.
        per_deviation: solutions for each of them.
        models: how many of `toys`.
        places: of `INPUTS`.
        seed: of the first draw.
    """
    chosen = toys(seed)[:models]
    inputs = {place: INPUTS[place] for place in places}
    numbers: dict[str, Any] = {
        "setting": {
            "noise": NOISE,
            "draws": draws,
            "inputs": inputs,
            "levels": LEVELS,
            "reach": reach,
        },
        "models": {toy.name: {place: [] for place in inputs} for toy in chosen},
    }
    for draw in steps(range(draws), "draws of the noise"):
        train = Sample.draw(seed + draw).train
        for toy in chosen:
            fitted = minimised(partial(toy.loss, train=train), toy.start, **LBFGS)
            for place, x in inputs.items():
                entry = compared(toy, fitted, train, x, reach, per_deviation)
                numbers["models"][toy.name][place].append(entry)
    numbers["means"] = {
        name: {place: averaged(entries) for place, entries in found.items()}
        for name, found in numbers["models"].items()
    }
    return numbers


def compared(
    toy: Toy, w: Tensor, train: Points, x: float, reach: int, per_deviation: int
) -> dict[str, Any]:
    """The profile of one prediction beside its Laplace approximations."""
    y, at = train.y[:, 0], torch.tensor([[x]], dtype=torch.float64)
    top = constrained_rigidity(toy.function, w, train.x, y, at, regulariser=toy.penalty)
    newton = PredictionRigidity(toy.function, top.parameters, regulariser=toy.penalty)
    rough = float(newton.fit(train.x, y).rigidity(at))
    std = NOISE / math.sqrt(top.rigidity)
    offsets = torch.linspace(-reach, reach, 2 * reach * per_deviation + 1, dtype=torch.float64)
    profile = constrained_profile(
        toy.function,
        top.parameters,
        train.x,
        y,
        at,
        top.prediction + std * offsets,
        regulariser=toy.penalty,
        partial=True,
    )
    known = profile.losses.isfinite()
    offsets = offsets[known]
    heights = (profile.losses[known] - profile.minimum) / NOISE**2
    slopes = profile.multipliers[known] * std / NOISE**2
    return {
        "prediction": top.prediction,
        "std": std,
        "gauss_newton": math.sqrt(top.rigidity / rough),
        "offsets": offsets,
        "heights": heights,
        "slopes": slopes,
        **differences(*interpolated(offsets, heights, slopes)),
    }


def interpolated(at: Tensor, heights: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Cubic pieces through heights and slopes, on a fine grid."""
    t = torch.linspace(0, 1, 201, dtype=torch.float64)[:-1]
    step, left, right = at.diff()[:, None], heights[:-1, None], heights[1:, None]
    pieces = (
        (1 + 2 * t) * (1 - t) ** 2 * left
        + t**2 * (3 - 2 * t) * right
        + step * t * (1 - t) ** 2 * slopes[:-1, None]
        - step * t**2 * (1 - t) * slopes[1:, None]
    )
    pieces = torch.maximum(pieces, torch.minimum(left, right))  # steep pieces would overshoot
    grid = at[:-1, None] + step * t
    return torch.cat([grid.flatten(), at[-1:]]), torch.cat([pieces.flatten(), heights[-1:]])


def differences(grid: Tensor, heights: Tensor) -> dict[str, Any]:
    """How the profile departs from a standard normal distribution, in Laplace standard
    deviations."""
    density = torch.exp(-heights)
    density = density / torch.trapezoid(density, grid)
    normal = torch.exp(-grid.square() / 2) / math.sqrt(2 * math.pi)
    mean = float(torch.trapezoid(density * grid, grid))
    spread = math.sqrt(float(torch.trapezoid(density * (grid - mean) ** 2, grid)))
    skewness = float(torch.trapezoid(density * ((grid - mean) / spread) ** 3, grid))
    levels = {}
    for level in LEVELS:
        z = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
        inside = grid[heights <= z**2 / 2]
        held = torch.where(grid.abs() <= z, density, 0.0)
        levels[f"{level:g}"] = {
            "gaussian": z,
            "low": float(inside.min()),
            "high": float(inside.max()),
            "held": float(torch.trapezoid(held, grid)),
        }
    return {
        "total_variation": float(torch.trapezoid((density - normal).abs(), grid)) / 2,
        "mean": mean,
        "spread": spread,
        "skewness": skewness,
        "levels": levels,
    }


def averaged(entries: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the draws; interval and mass are those of the 90 % level."""
    nine = [entry["levels"]["0.9"] for entry in entries]
    keys = ("std", "gauss_newton", "total_variation", "skewness")
    return {
        **{key: fmean([entry[key] for entry in entries]) for key in keys},
        **{f"{key}_90": fmean([one[key] for one in nine]) for key in ("low", "high", "held")},
    }
