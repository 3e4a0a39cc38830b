r"""The rigidity as a likelihood: the constrained loss against its Laplace approximation (Sec. 3.3).

With Gaussian noise of variance $\sigma^2$ the constrained loss of a prediction is a profile
log-posterior, $p(\epsilon) \propto \exp(-\mathcal{L}_c(\epsilon) / \sigma^2)$; the rigidity is its
curvature at the top and $N(\tilde y, \sigma^2 / R)$ the Laplace approximation to it.

`measured` fits some small models to the seven points of the `toy` experiment. For each, `compared`
follows the profile of one prediction and `differences` tells how far it is from a Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from experiments.data.cosine import NOISE, Points, Sample
from experiments.frame.progress import steps
from experiments.training.curves import START, cubic, gaussians, minimised, prior
from rigidities import PredictionRigidity
from rigidities.theory.constrained import constrained_profile, constrained_rigidity

INPUTS = {"inside": 0.4, "outside": 1.0}
"""Between the points, and beyond them (0.73 is the last) as far as profiles can be followed."""

FULL = {"draws": 3, "reach": 6, "per_deviation": 2, "models": 3, "places": tuple(INPUTS)}
QUICK = {"draws": 1, "reach": 3, "per_deviation": 1, "models": 2, "places": ("outside",)}
LEVELS = (0.68, 0.90, 0.95)
"""Of the intervals whose ends and masses are computed."""

HIDDEN = 2
"""Hidden units of the network."""

WEIGHT_VARIANCE = 4.0
"""Prior variance of a weight of the network."""


@dataclass(frozen=True)
class Toy:
    """A model with its loss.

    Attributes:
        name: What tables and titles call it.
        function: f(w, x), with inputs (N, 1) and predictions (N,).
        start: Where the fit begins.
        penalty: Minus the log-prior, times the noise's variance; None for no prior.
    """

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    start: Tensor
    penalty: Callable[[Tensor], Tensor] | None = None

    def loss(self, w: Tensor, train: Points) -> Tensor:
        """Minus the log-posterior, times the noise's variance."""
        value = (train.y[:, 0] - self.function(w, train.x)).square().sum() / 2
        return value if self.penalty is None else value + self.penalty(w)


def network(w: Tensor, x: Tensor) -> Tensor:
    """A 1-2-1 network with tanh: weights (7,) and inputs (N, 1) -> (N,)."""
    slope, shift, out = w[:-1].reshape(3, HIDDEN)
    return torch.tanh(x * slope + shift) @ out + w[-1]


def decay(w: Tensor) -> Tensor:
    """Weight decay: a normal prior on each weight."""
    return NOISE**2 / (2 * WEIGHT_VARIANCE) * w.square().sum()


def toys(seed: int) -> list[Toy]:
    """The three models; the seed draws the network's first weights."""
    source = torch.Generator().manual_seed(seed)
    weights = torch.randn(3 * HIDDEN + 1, generator=source, dtype=torch.float64)
    return [
        Toy("cubic", cubic, torch.zeros(4, dtype=torch.float64)),
        Toy("two Gaussians", gaussians, START, prior),
        Toy("net 1-2-1", network, weights, decay),
    ]


def measured(
    *, draws: int, reach: int, per_deviation: int, models: int, places: Sequence[str], seed: int
) -> dict[str, Any]:
    """Some models at some inputs, for each draw of the noise.

    Args:
        draws: Draws of the noise.
        reach: How far a profile is followed, in Laplace standard deviations.
        per_deviation: Solutions for each standard deviation.
        models: How many of `toys` are fitted.
        places: Which of `INPUTS` are predicted.
        seed: The seed of the first draw.
    """
    fitted_toys = toys(seed)[:models]
    inputs = {place: INPUTS[place] for place in places}
    # Of each model and input a list with one entry for each draw.
    profiles: dict[str, dict[str, list[dict[str, Any]]]] = {
        toy.name: {place: [] for place in inputs} for toy in fitted_toys
    }
    for draw in steps(range(draws), "draws of the noise"):
        train = Sample.draw(seed + draw).train
        for toy in fitted_toys:
            parameters = fitted(toy, train)
            for place, x in inputs.items():
                profile = compared(toy, parameters, train, x, reach, per_deviation)
                profiles[toy.name][place].append(profile)
    return {
        "setting": {
            "noise": NOISE,
            "draws": draws,
            "inputs": inputs,
            "levels": LEVELS,
            "reach": reach,
        },
        "models": profiles,
        "means": {
            name: {place: averaged(entries) for place, entries in by_place.items()}
            for name, by_place in profiles.items()
        },
    }


def fitted(toy: Toy, train: Points) -> Tensor:
    """The parameters of a model at the minimum of its loss."""
    return minimised(
        lambda w: toy.loss(w, train),
        toy.start,
        max_iter=1000,
        history_size=50,
        tolerance_grad=1e-9,
        tolerance_change=1e-18,
    )


def compared(
    toy: Toy, w: Tensor, train: Points, x: float, reach: int, per_deviation: int
) -> dict[str, Any]:
    """The profile of one prediction beside its Laplace approximations.

    Args:
        toy: The model.
        w: Its fitted parameters.
        train: The training points.
        x: The input.
        reach: How far the profile is followed, in Laplace standard deviations.
        per_deviation: Solutions for each standard deviation.

    Returns:
        "prediction", "std" of the exact Hessian's Laplace approximation and "gauss_newton", the
        other's standard deviation in units of it; "offsets" in such units, "heights" of minus the
        log-profile there and its "slopes"; what `differences` gives.
    """
    y = train.y[:, 0]
    at = torch.tensor([[x]], dtype=torch.float64)
    top = constrained_rigidity(toy.function, w, train.x, y, at, regulariser=toy.penalty)
    gauss_newton = PredictionRigidity(toy.function, top.parameters, regulariser=toy.penalty)
    gauss_newton_rigidity = float(gauss_newton.fit(train.x, y).rigidity(at))
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
    # Where the solver could not follow the profile, losses are not finite.
    solved = profile.losses.isfinite()
    offsets = offsets[solved]
    heights = (profile.losses[solved] - profile.minimum) / NOISE**2
    slopes = profile.multipliers[solved] * std / NOISE**2
    grid, heights_between = interpolated(offsets, heights, slopes)
    return {
        "prediction": top.prediction,
        "std": std,
        "gauss_newton": math.sqrt(top.rigidity / gauss_newton_rigidity),
        "offsets": offsets,
        "heights": heights,
        "slopes": slopes,
        **differences(grid, heights_between),
    }


def interpolated(at: Tensor, heights: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Cubic pieces through heights and slopes at some places: a fine grid, and heights on it."""
    t = torch.linspace(0, 1, 201, dtype=torch.float64)[:-1]
    step = at.diff()[:, None]
    left = heights[:-1, None]
    right = heights[1:, None]
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
    """How the profile departs from a standard normal distribution.

    Args:
        grid: Offsets from the prediction, in Laplace standard deviations.
        heights: Minus the log of the profile there, zero at the top.
    """
    density = torch.exp(-heights)
    density = density / torch.trapezoid(density, grid)
    normal = torch.exp(-grid.square() / 2) / math.sqrt(2 * math.pi)
    mean = float(torch.trapezoid(density * grid, grid))
    spread = math.sqrt(float(torch.trapezoid(density * (grid - mean) ** 2, grid)))
    skewness = float(torch.trapezoid(density * ((grid - mean) / spread) ** 3, grid))
    levels = {}
    for level in LEVELS:
        z = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
        profile_interval = grid[heights <= z**2 / 2]
        density_within_z = torch.where(grid.abs() <= z, density, 0.0)
        levels[f"{level:g}"] = {
            "gaussian": z,
            "low": float(profile_interval.min()),
            "high": float(profile_interval.max()),
            "held": float(torch.trapezoid(density_within_z, grid)),
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
    means = {}
    for key in ("std", "gauss_newton", "total_variation", "skewness"):
        means[key] = fmean([entry[key] for entry in entries])
    for key in ("low", "high", "held"):
        means[f"{key}_90"] = fmean([entry["levels"]["0.9"][key] for entry in entries])
    return means
