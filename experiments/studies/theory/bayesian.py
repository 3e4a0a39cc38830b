r"""The rigidity as a likelihood: the constrained loss against its Laplace approximation (Sec. 3.3).

With Gaussian noise of variance $\sigma^2$ the constrained loss of a prediction is a profile
log-posterior, $p(\epsilon) \propto \exp(-\mathcal{L}_c(\epsilon) / \sigma^2)$; the rigidity is its
curvature at the top and $N(\tilde y, \sigma^2 / R)$ the Laplace approximation to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.frame.figures import BLACK, BLUE, GREY, VERMILION, panels
from experiments.frame.outcome import Picture, Table
from experiments.frame.progress import steps
from experiments.studies.theory.section import Section
from experiments.studies.toy.models import START, cubic, gaussians, prior
from experiments.studies.toy.points import NOISE, Points, Sample
from rigidities import PredictionRigidity
from rigidities.constrained import constrained_profile, constrained_rigidity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INPUTS = {"inside": 0.4, "outside": 1.0}
"""Between the points, and beyond them (0.73 is the last) as far as profiles can be followed."""

LEVELS = (0.68, 0.90, 0.95)
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


def section(*, quick: bool, seed: int) -> Section:
    """Profiles for some draws of the noise; the figure shows the first."""
    if quick:
        numbers = measured(1, 3, 1, seed=seed, models=toys(seed)[:2], places=["outside"])
    else:
        numbers = measured(3, 6, 2, seed=seed, models=toys(seed), places=list(INPUTS))
    page = [HEAD, Picture("bayesian", drawn(numbers), CAPTION), table(numbers), says(numbers)]
    return Section("bayesian", numbers, page)


def measured(
    draws: int, reach: int, per_deviation: int, *, seed: int, models: list[Toy], places: list[str]
) -> dict[str, Any]:
    """Some models at some inputs, for each draw of the noise.

    Args:
        draws: of the noise.
        reach: how far a profile is followed, in Laplace standard deviations.
        per_deviation: solutions for each of them.
        seed: of the first draw.
        models: of `toys`, the cubic among them.
        places: of `INPUTS`.
    """
    inputs = {place: INPUTS[place] for place in places}
    numbers: dict[str, Any] = {
        "setting": {
            "noise": NOISE,
            "draws": draws,
            "inputs": inputs,
            "levels": LEVELS,
            "reach": reach,
        },
        "models": {toy.name: {place: [] for place in inputs} for toy in models},
    }
    for draw in steps(range(draws), "draws of the noise"):
        train = Sample.draw(seed + draw).train
        for toy in models:
            fitted = minimised(toy, train)
            for place, x in inputs.items():
                entry = compared(toy, fitted, train, x, reach, per_deviation)
                numbers["models"][toy.name][place].append(entry)
    numbers["means"] = {
        name: {place: averaged(entries) for place, entries in found.items()}
        for name, found in numbers["models"].items()
    }
    return numbers


def minimised(toy: Toy, train: Points) -> Tensor:
    """The most likely parameters, by L-BFGS."""
    w = toy.start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [w],
        max_iter=1000,
        history_size=50,
        tolerance_grad=1e-9,
        tolerance_change=1e-18,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = (train.y[:, 0] - toy.function(w, train.x)).square().sum() / 2
        value = value if toy.penalty is None else value + toy.penalty(w)
        value.backward()
        return value

    optimiser.step(loss)
    return w.detach()


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
    """How the profile departs from a standard normal law, in Laplace standard deviations."""
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
        **{key: mean([entry[key] for entry in entries]) for key in keys},
        **{f"{key}_90": mean([one[key] for one in nine]) for key in ("low", "high", "held")},
    }


def drawn(numbers: dict[str, Any]) -> Figure:
    """Profile and Laplace densities of the first draw."""
    models, inputs = numbers["models"], numbers["setting"]["inputs"]
    figure, axes = panels(columns=len(models), rows=len(inputs), height=2.6)
    for row, place in enumerate(inputs):
        for column, (name, places) in enumerate(models.items()):
            ax, entry = axes[row * len(models) + column], places[place][0]
            y, std = entry["prediction"], entry["std"]
            z = torch.linspace(-4, 4, 400, dtype=torch.float64)
            for factor, colour, style, label in (
                (1.0, BLUE, "-", "Laplace, exact Hessian"),
                (entry["gauss_newton"], VERMILION, "--", "Laplace, Gauss-Newton"),
            ):
                curve = torch.exp(-(z / factor).square() / 2)
                ax.plot(y + std * z, curve, color=colour, ls=style, label=label)
            offsets, heights, slopes = (entry[k] for k in ("offsets", "heights", "slopes"))
            grid, between = interpolated(offsets, heights, slopes)
            ax.plot(y + std * grid, torch.exp(-between), color=BLACK, lw=1, label="profile")
            ax.plot(y + std * offsets, torch.exp(-heights), "o", color=BLACK, ms=2.5)
            ax.set_xlim(y - 4 * std, y + 4 * std)
            ax.set_title(f"{name}, x = {INPUTS[place]:g}")
            ax.set_yticks([0, 1])
            ax.axvline(math.cos(INPUTS[place]) ** 2, color=GREY, lw=1, ls=":")
    for ax in axes[-len(models) :]:
        ax.set_xlabel("prediction held at ε")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def table(numbers: dict[str, Any]) -> Table:
    """Means over the draws."""
    rows = [
        [
            name,
            f"{INPUTS[place]:g} ({place})",
            one["std"],
            one["gauss_newton"],
            f"{one['low_90']:.2f} to {one['high_90']:.2f}",
            one["held_90"],
            one["total_variation"],
            one["skewness"],
        ]
        for name, places in numbers["means"].items()
        for place, one in places.items()
    ]
    return Table(COLUMNS, rows, TABLE.format(**numbers["setting"]))


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""
    names = [name for name in numbers["models"] if name != "cubic"]
    bent = [
        entry for name in names for entries in numbers["models"][name].values() for entry in entries
    ]
    exact = max(
        entry["total_variation"]
        for entries in numbers["models"]["cubic"].values()
        for entry in entries
    )
    held = [entry["levels"]["0.9"]["held"] for entry in bent]
    ratio = [entry["gauss_newton"] for entry in bent]
    apart = [entry["total_variation"] for entry in bent]
    tail = max(math.exp(-float(entry["heights"][end])) for entry in bent for end in (0, -1))
    return (
        "For the cubic the profile is Gaussian and the reading is exact (total variation "
        f"{exact:.1g}, the tails that were cut off). For the rest ({', '.join(names)}) the "
        "curvature at the top is the same by definition and the shape is not: on at least one side "
        "the constrained loss grows more slowly than its parabola, and the Gaussian 90 % interval "
        f"holds {min(held):.0%} to {max(held):.0%} of the profile (total variation "
        f"{min(apart):.2f} to {max(apart):.2f}). For the two Gaussians other parameters take over "
        "on the way, and the profile can stay flat: it is up to "
        f"{tail:.2f} of its maximum where it was cut, so that masses and distances depend on the "
        "cut; the interval's ends inside it do not. The Gauss-Newton standard deviation is "
        f"{min(ratio):.2f} to {max(ratio):.2f} times the exact one: it leaves out the residuals "
        "times the model's second derivatives. A profile is not a marginal: it follows the best "
        "parameters for each value and says nothing of how many others there are."
    )


def mean(values: list[float]) -> float:
    """Of some draws."""
    return math.fsum(values) / len(values)


COLUMNS = [
    "model",
    "x",
    "Laplace std",
    "Gauss-Newton / exact std",
    "90 % profile interval, in std",
    "profile mass in ± 1.64 std",
    "total variation",
    "skewness",
]

TABLE = (
    "Means over {draws} draw(s) of the noise. The Gaussian 90 % interval is -1.64 to 1.64 standard "
    "deviations of the Laplace approximation with the exact Hessian; the profile interval holds "
    "the values where L_c - min L is at most 1.64² σ² / 2, as far as the profile could be "
    "followed (at most {reach} standard deviations to either side)."
)

HEAD = f"""\
## The rigidity as a likelihood

With Gaussian noise of variance σ² the constrained loss of a prediction is a profile log-posterior,
p(ε) ∝ exp(-L_c(ε)/σ²), and N(ỹ, σ²/R) its Laplace approximation (paper, Sec. 3.3, with σ² = 1).
L_c is solved numerically (`rigidities.constrained`), followed from the minimum outwards, for the
seven points of the `toy` experiment and σ = {NOISE:g}: a cubic, for which both are the same, two
Gaussians with the prior of that experiment, and a 1-2-1 tanh net whose weights have a normal prior
of variance {WEIGHT_VARIANCE:g} (a quick run leaves the net out).

Two choices were made for the solver's sake. The net is that small because larger ones are slow to
follow and their fits stop short of a minimum: with eight hidden units near saddles, where the exact
Hessian is indefinite and no rigidity exists. And the input outside the data is
x = {INPUTS["outside"]:g}, not far beyond the last point (0.73): at 1.2 the two Gaussians' profiles
could be followed to one side only in each of three draws, no more than 1 to 4 standard deviations
to the other."""

CAPTION = (
    "Profile likelihood of a prediction between the points (above) and beyond them (below), "
    "relative to its maximum, with the Laplace approximations of the exact and of the Gauss-Newton "
    "Hessian. Dotted: the truth."
)
