r"""The fits and their error bars, inside and outside the range of the seven points.

A cubic, two Gaussians and a small network in two forms are fitted to one draw of the noise. Every
error bar is $\sigma(x) = \alpha \sqrt{g^\top H^{-1} g}$ with the scale $\alpha$ that makes the
calibration points likeliest. H is the curvature of the loss that was minimised, its regulariser
included. Nothing regularised the network, so that its H gets a ridge, chosen on the same points.

`fitted_models` fits, `scored` judges one model on one draw, `summary` averages over draws, and
`curves` gives the numbers of the figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev

from experiments.data.cosine import TEST_REACH, Points, Sample, truth
from experiments.frame.outcome import Found, mean_and_error
from experiments.training.curves import PRIOR_PRECISION, START, cubic, gaussians, minimised, prior
from rigidities import LastLayerRigidity, Paper, PredictionRigidity, metrics
from rigidities.cli.demo import mlp, train_net

WIDTH = 32
"""Units of each of the network's two hidden layers."""

EPOCHS = 800
LEVEL = 0.9
"""Of the intervals whose coverage is counted."""

REGIONS = ("inside", "outside")
"""Of the range of the seven points."""

BARS = {
    "rigidity": "rigidity",
    "textbook": "rigidity, scale from residuals",
    "constant": "constant",
}
"""The kinds of error bars, with what tables call them."""


@dataclass(frozen=True)
class Model:
    r"""A fit with error bars.

    Attributes:
        name: What tables and titles call it.
        predict: Inputs (N, 1) -> mean and standard deviation, (N,) each.
        scale: $\alpha$.
        ridge: What is added to the curvature's diagonal, by the fit's regulariser or by the
            calibration.
        residual_scale: Root of the residual sum of squares over the degrees of freedom, which
            textbooks take for the scale; None for the network, which passes through its points.
        softness: Smallest over largest eigenvalue of the data's share of the curvature, or None.
    """

    name: str
    predict: Callable[[Tensor], tuple[Tensor, Tensor]]
    scale: float
    ridge: float = 0.0
    residual_scale: float | None = None
    softness: float | None = None


def fitted_models(sample: Sample, seed: int) -> list[Model]:
    """The cubic, the two Gaussians and both forms of the network, fitted to the same points."""
    network = trained_network(sample.train, seed)
    return [
        fitted_cubic(sample),
        fitted_gaussians(sample),
        network_last_layer(network, sample),
        network_all_weights(network, sample),
    ]


def fitted_cubic(sample: Sample) -> Model:
    """A polynomial of third degree, by least squares."""
    x = sample.train.x
    y = sample.train.y
    coefficients = torch.linalg.lstsq(x.pow(torch.arange(4)), y).solution[:, 0]
    pr = PredictionRigidity(cubic, coefficients).fit(x, y[:, 0])
    return calibrated("cubic", pr, sample.calibration)


def fitted_gaussians(sample: Sample) -> Model:
    """Two Gaussians, by L-BFGS on half the squared error plus the regulariser."""
    x = sample.train.x
    y = sample.train.y[:, 0]

    def loss(w: Tensor) -> Tensor:
        return (y - gaussians(w, x)).square().sum() / 2 + prior(w)

    parameters = minimised(
        loss,
        START,
        max_iter=2000,
        history_size=20,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
    )
    pr = PredictionRigidity(gaussians, parameters, regulariser=prior).fit(x, y)

    # The data's share of the curvature is J^T J, whose eigenvalues are squared singular values.
    singular_values = torch.linalg.svdvals(jacrev(gaussians)(parameters, x))
    return replace(
        calibrated("two Gaussians", pr, sample.calibration),
        ridge=PRIOR_PRECISION,
        softness=float((singular_values[-1] / singular_values[0]).square()),
    )


def trained_network(train: Points, seed: int) -> torch.nn.Module:
    """A 1-32-32-1 network with SiLU, trained by AdamW without weight decay."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = mlp(1, WIDTH, WIDTH, 1).double()
        train_net(
            network,
            (train.x, train.y),
            epochs=EPOCHS,
            batch_size=len(train.x),
            lr=1e-2,
            weight_decay=0,
        )
    return network


def network_last_layer(network: torch.nn.Module, sample: Sample) -> Model:
    """The paper's form: only the weights of the last layer are free."""
    uq = LastLayerRigidity(network).fit((sample.train.x, sample.train.y))
    uq.calibrate((sample.calibration.x, sample.calibration.y), method="paper")

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = uq(x)
        return mean[:, 0].detach(), std[:, 0].detach()

    return Model("net, last layer", predict, float(uq.scale), uq.ridge)


def network_all_weights(network: torch.nn.Module, sample: Sample) -> Model:
    """The same network with all its 1153 weights free."""
    # The dense form can search for a ridge; before that, any will do.
    pr = PredictionRigidity(network, ridge=1.0, form="dense").fit(sample.train.x, sample.train.y)
    return calibrated("net, all weights", pr, sample.calibration, search=True)


def calibrated(name: str, pr: PredictionRigidity, points: Points, *, search: bool = False) -> Model:
    """A model with the scale of the greatest likelihood.

    Args:
        name: What tables call the model.
        pr: The fit; it is calibrated in place.
        points: Calibration points.
        search: Whether the likelihood chooses the ridge too; otherwise that of the fit stays.
    """
    residual_scale = None if search else pr.residual_scale
    y = points.y.reshape(pr.rigidity(points.x).shape)
    method = Paper() if search else Paper(ridge=pr.ridge)
    pr.calibrate(points.x, y, method=method)

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        prediction = pr.predict(x)
        return prediction.mean.reshape(-1), prediction.std.reshape(-1)

    return Model(name, predict, pr.scale, pr.ridge, residual_scale)


def scored(model: Model, sample: Sample) -> Found:
    """One model on one draw: what was chosen, and each kind of error bar in each region."""
    calibration_mean, _ = model.predict(sample.calibration.x)
    constant_bar = metrics.rmse(calibration_mean, sample.calibration.y)
    inside = sample.test.inside
    return {
        "ridge": model.ridge,
        "scale": model.scale,
        "residual_scale": model.residual_scale,
        "softness": model.softness,
        "constant_bar": constant_bar,
        "inside": _scores_of_bars(model, sample.test.part(inside), constant_bar),
        "outside": _scores_of_bars(model, sample.test.part(~inside), constant_bar),
    }


def _scores_of_bars(model: Model, test: Points, constant_bar: float) -> Found:
    """The RMSE on some test points, and the scores of each kind of error bar."""
    mean, std = model.predict(test.x)
    scores: Found = {
        "rmse": metrics.rmse(mean, test.y),
        "rigidity": judged(mean, std, test.y),
        "constant": judged(mean, torch.full_like(std, constant_bar), test.y),
    }
    if model.residual_scale is not None:
        # A new observation: s sqrt(1 + 1/R), where 1/R = (std / alpha)^2.
        textbook = model.residual_scale * (1 + (std / model.scale).square()).sqrt()
        scores["textbook"] = judged(mean, textbook, test.y)
    return scores


def judged(mean: Tensor, std: Tensor, target: Tensor) -> dict[str, float]:
    """Coverage of 90 % intervals, negative log-likelihood and mean length of some error bars."""
    return {
        "coverage": metrics.coverage(mean, std, target, LEVEL),
        "nll": metrics.nll(mean, std, target),
        "std": float(std.mean()),
    }


def summary(draws: Sequence[Found]) -> Found:
    """Means over the draws with their standard errors, medians, and what each draw chose.

    Args:
        draws: What `scored` gives for one model, for each draw of the noise.
    """
    chosen = {
        key: [draw[key] for draw in draws]
        for key in ("ridge", "scale", "residual_scale", "softness", "constant_bar")
        if draws[0][key] is not None
    }
    return {
        "draws": len(draws),
        "inside": _region_summary([draw["inside"] for draw in draws]),
        "outside": _region_summary([draw["outside"] for draw in draws]),
        "each_draw": chosen,
        "medians": {key: statistics.median(values) for key, values in chosen.items()},
    }


def _region_summary(draws: Sequence[Found]) -> Found:
    """Scores of one region, averaged over the draws."""
    averaged: Found = {"rmse": mean_and_error([draw["rmse"] for draw in draws])}
    for bar in BARS:
        if bar in draws[0]:
            averaged[bar] = _bar_summary([draw[bar] for draw in draws])
    return averaged


def _bar_summary(draws: Sequence[dict[str, float]]) -> Found:
    """Scores of one kind of error bar: means with standard errors, and the median NLL."""
    averaged: Found = {key: mean_and_error([draw[key] for draw in draws]) for key in draws[0]}
    averaged["nll_median"] = statistics.median(draw["nll"] for draw in draws)
    return averaged


def curves(sample: Sample, models: list[Model]) -> dict[str, Any]:
    """The numbers of the figure: fits and error bars on a grid, truth and training points."""
    x = torch.linspace(-TEST_REACH, TEST_REACH, 151, dtype=torch.float64)[:, None]
    curves_of_models = {}
    for model in models:
        mean, std = model.predict(x)
        curves_of_models[model.name] = {"mean": mean, "std": std}
    return {
        "x": x[:, 0],
        "truth": truth(x)[:, 0],
        "train": {"x": sample.train.x[:, 0], "y": sample.train.y[:, 0]},
        "models": curves_of_models,
    }
