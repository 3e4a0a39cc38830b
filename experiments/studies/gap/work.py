"""The network, and four kinds of error bars around it, judged inside, in the gap and beyond.

Every kind is made from the same trained network, the same training rows and the same validation
rows. `error_bars` makes them, `scored` judges them on one draw, `summary` averages over draws, and
`curves` gives the numbers of the figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.baselines import laplace, mapie
from experiments.data.gap import BEYOND, LEFT, RIGHT, Rows, Sample
from experiments.frame.outcome import Found, mean_and_error
from rigidities import metrics

WIDTH = 64
"""Units of each of the network's two hidden layers."""

STEPS = 1500
RATE = 3e-3
"""Steps of Adam on all training rows at once, and its learning rate."""

LEVEL = 0.9
"""The probability that intervals should cover."""

REGIONS = ("inside", "gap", "beyond")
"""Where there are training rows, between them, and past both ends."""

METHODS = ("constant", "mapie", "laplace", "rigidities")
"""The kinds of error bars, in the order of tables and panels."""


@dataclass(frozen=True)
class Bars:
    """Error bars of some rows.

    Attributes:
        low: Lower ends of the intervals, (N,).
        high: Upper ends, (N,).
        nll: The mean negative log-likelihood of the targets; None where a method gives intervals
            without a distribution.
    """

    low: Tensor
    high: Tensor
    nll: float | None


Method = Callable[[Tensor, Tensor], Bars]
"""Inputs (N, 1) and targets (N, 1) -> error bars."""


def trained_network(train: Rows, seed: int, steps: int = STEPS) -> nn.Module:
    """A 1-64-64-1 network with tanh, trained by Adam on the squared error."""
    x, y = train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(1, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, 1),
        ).double()
    optimiser = torch.optim.Adam(network.parameters(), lr=RATE)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimiser.step()
    return network


def error_bars(network: nn.Module, sample: Sample) -> dict[str, Method]:
    """All kinds of error bars whose packages are installed, in the order of `METHODS`."""
    methods = {"constant": constant_bar(network, sample.valid)}
    if mapie.installed():
        methods["mapie"] = conformal_interval(network, sample.valid)
    if laplace.installed():
        methods["laplace"] = laplace_bar(network, sample.train)
    methods["rigidities"] = rigidity_bar(network, sample)
    return methods


def constant_bar(network: nn.Module, valid: Rows) -> Method:
    """One Gaussian bar for all rows: the RMS error on the validation rows."""
    x, y = valid
    rms_error = metrics.rmse(network(x).detach(), y)

    def bars(x: Tensor, y: Tensor) -> Bars:
        mean = network(x).detach()
        return gaussian_bars(mean, torch.full_like(mean, rms_error), y)

    return bars


def conformal_interval(network: nn.Module, valid: Rows) -> Method:
    """MAPIE's split conformal intervals."""
    regressor = mapie.fitted(lambda x: network(x).detach(), valid, LEVEL)

    def bars(x: Tensor, y: Tensor) -> Bars:
        low, high = mapie.intervals(regressor, x)
        return Bars(low, high, nll=None)

    return bars


def laplace_bar(network: nn.Module, train: Rows) -> Method:
    """laplace-torch's last layer, with prior precision and noise by the marginal likelihood."""
    posterior = laplace.fitted(network, train)

    def bars(x: Tensor, y: Tensor) -> Bars:
        mean, std = laplace.bars(posterior, x)
        return gaussian_bars(mean[:, None], std[:, None], y)

    return bars


def rigidity_bar(network: nn.Module, sample: Sample) -> Method:
    """This library's, by its defaults."""
    uq = rg.LastLayerRigidity(network).fit(*sample.train)
    uq.calibrate(*sample.valid)

    def bars(x: Tensor, y: Tensor) -> Bars:
        prediction = uq.predict(x)
        low, high = prediction.interval(LEVEL)
        return Bars(low[:, 0], high[:, 0], nll=-float(prediction.log_prob(y).mean()))

    return bars


def gaussian_bars(mean: Tensor, std: Tensor, y: Tensor) -> Bars:
    """Intervals and NLL of a Gaussian; all of shape (N, 1)."""
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64)))
    return Bars(
        low=(mean - z * std)[:, 0],
        high=(mean + z * std)[:, 0],
        nll=metrics.nll(mean, std, y),
    )


def scored(network: nn.Module, methods: dict[str, Method], sample: Sample) -> Found:
    """Coverage, mean width, interval score and NLL of every method in every region."""
    scores: Found = {}
    for region, (x, y) in sample.test.items():
        scores[region] = {"rmse": metrics.rmse(network(x).detach(), y)}
        for name, method in methods.items():
            bars = method(x, y)
            target = y[:, 0]
            below = (bars.low - target).clamp(min=0)
            above = (target - bars.high).clamp(min=0)
            width = bars.high - bars.low
            # Gneiting and Raftery (2007): the width, and a fine for what lies outside.
            interval_score = width + 2 / (1 - LEVEL) * (below + above)
            scores[region][name] = {
                "coverage": float(((below == 0) & (above == 0)).double().mean()),
                "width": float(width.mean()),
                "interval_score": float(interval_score.mean()),
                "nll": bars.nll,
            }
    return scores


def summary(draws: Sequence[Found]) -> Found:
    """Means over draws with their standard errors, and medians of the NLL.

    Args:
        draws: What `scored` gives for each draw.
    """
    averaged: Found = {}
    for region in REGIONS:
        scores = [draw[region] for draw in draws]
        averaged[region] = {"rmse": mean_and_error([score["rmse"] for score in scores])}
        for method in METHODS:
            if method in scores[0]:
                averaged[region][method] = _method_summary([score[method] for score in scores])
    return averaged


def _method_summary(scores: Sequence[Found]) -> Found:
    """The scores of one method in one region, averaged over draws."""
    averaged: Found = {
        name: mean_and_error([score[name] for score in scores])
        for name in ("coverage", "width", "interval_score")
    }
    averaged["least_coverage"] = min(score["coverage"] for score in scores)
    if scores[0]["nll"] is not None:
        losses = [score["nll"] for score in scores]
        averaged["nll"] = mean_and_error(losses)
        averaged["nll_median"] = statistics.median(losses)
    return averaged


def middle_draw(draws: Sequence[Found]) -> int:
    """The draw for the figure: that in the middle by the constant bar's NLL in the gap.

    It is chosen by how hard the gap is, and not by how any method fares beside another.
    """
    order = sorted(range(len(draws)), key=lambda draw: draws[draw]["gap"]["constant"]["nll"])
    return order[len(order) // 2]


def curves(network: nn.Module, methods: dict[str, Method], sample: Sample) -> Found:
    """The numbers of the figure: the network, intervals on a grid, truth and training rows."""
    x = torch.linspace(LEFT[0] - BEYOND, RIGHT[1] + BEYOND, 321, dtype=torch.float64)[:, None]
    truth = sample.function(x)
    intervals = {}
    for name, method in methods.items():
        bars = method(x, truth)
        intervals[name] = {"low": bars.low, "high": bars.high}
    train_x, train_y = sample.train
    return {
        "x": x[:, 0],
        "truth": truth[:, 0],
        "mean": network(x).detach()[:, 0],
        "intervals": intervals,
        "train": {"x": train_x[::2, 0], "y": train_y[::2, 0]},
    }
