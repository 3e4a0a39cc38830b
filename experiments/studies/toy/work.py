r"""The fits and their error bars, inside and outside the range of the seven points.

A cubic, two Gaussians, a small net in two forms. Every error bar is
$\sigma(x) = \alpha \sqrt{g^\top H^{-1} g}$ with the scale $\alpha$ that makes
the calibration points likeliest. H is the curvature of the loss that was minimised, its regulariser
included. Nothing regularised the net, so that its H gets a
ridge, chosen on the same points.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import jacrev

from experiments.data.cosine import TEST_REACH, Points, Sample, truth
from experiments.frame.outcome import Found, mean_and_error
from experiments.training.curves import PRIOR_PRECISION, START, cubic, gaussians, minimised, prior
from rigidities import LastLayerRigidity, PredictionRigidity, metrics
from rigidities.cli.demo import mlp, train_net

WIDTH, EPOCHS = 32, 800


@dataclass(frozen=True)
class Model:
    r"""A fit with error bars.

    Attributes:
        name: in tables and titles.
        predict: inputs (N, 1) -> mean and standard deviation, (N,) each.
        scale: $\alpha$.
        ridge: on the curvature's diagonal, from the fit's regulariser or from the calibration.
        residual_scale: root of the residual sum of squares over the degrees of freedom, which
            textbooks take for the scale; None for the net, which passes through its points.
        softness: smallest over largest eigenvalue of the data's part of the curvature, or None.
    """

    name: str
    predict: Callable[[Tensor], tuple[Tensor, Tensor]]
    scale: float
    ridge: float = 0.0
    residual_scale: float | None = None
    softness: float | None = None


def fitted_models(sample: Sample, seed: int) -> list[Model]:
    """All of them, fitted to the same points."""
    net = trained_net(sample.train, seed)
    return [
        fitted_cubic(sample),
        fitted_gaussians(sample),
        net_last_layer(net, sample),
        net_all_weights(net, sample),
    ]


def fitted_cubic(sample: Sample) -> Model:
    """Least squares."""
    x, y = sample.train.x, sample.train.y
    coefficients = torch.linalg.lstsq(x.pow(torch.arange(4)), y).solution[:, 0]
    pr = PredictionRigidity(cubic, coefficients).fit(x, y[:, 0])
    return calibrated("cubic", pr, sample.calibration)


def fitted_gaussians(sample: Sample) -> Model:
    """L-BFGS on half the squared error plus the regulariser."""
    x, y = sample.train.x, sample.train.y[:, 0]
    found = minimised(
        lambda w: (y - gaussians(w, x)).square().sum() / 2 + prior(w),
        START,
        max_iter=2000,
        history_size=20,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
    )
    pr = PredictionRigidity(gaussians, found, regulariser=prior).fit(x, y)
    stretches = torch.linalg.svdvals(jacrev(gaussians)(found, x))
    return replace(
        calibrated("two Gaussians", pr, sample.calibration),
        ridge=PRIOR_PRECISION,
        softness=float((stretches[-1] / stretches[0]).square()),
    )


def trained_net(train: Points, seed: int) -> torch.nn.Module:
    """A 1-32-32-1 net with SiLU, AdamW without weight decay."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = mlp(1, WIDTH, WIDTH, 1).double()
        train_net(
            net, (train.x, train.y), epochs=EPOCHS, batch_size=len(train.x), lr=1e-2, weight_decay=0
        )
    return net


def net_last_layer(net: torch.nn.Module, sample: Sample) -> Model:
    """The paper's form: the weights of the last layer alone."""
    uq = LastLayerRigidity(net).fit((sample.train.x, sample.train.y))
    uq.calibrate((sample.calibration.x, sample.calibration.y), criterion="nll")

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = uq(x)
        return mean[:, 0].detach(), std[:, 0].detach()

    return Model("net, last layer", predict, float(uq.scale), uq.ridge)


def net_all_weights(net: torch.nn.Module, sample: Sample) -> Model:
    """The same net with all its 1153 weights free."""
    # The dense form can search for a ridge; before that, any will do.
    pr = PredictionRigidity(net, ridge=1.0, form="dense").fit(sample.train.x, sample.train.y)
    return calibrated("net, all weights", pr, sample.calibration, ridge="search")


def calibrated(
    name: str, pr: PredictionRigidity, points: Points, ridge: Literal["search"] | None = None
) -> Model:
    """The scale, and the ridge if asked, of the greatest likelihood."""
    textbook = None if ridge == "search" else pr.residual_scale
    y = points.y.reshape(pr.predict(points.x).mean.shape)
    pr.calibrate(points.x, y, ridge=ridge or pr.ridge)

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        prediction = pr.predict(x)
        return prediction.mean.reshape(-1), prediction.std.reshape(-1)

    return Model(name, predict, pr.scale, pr.ridge, textbook)


REGIONS = ("inside", "outside")
BARS = {
    "rigidity": "rigidity",
    "textbook": "rigidity, scale from residuals",
    "constant": "constant",
}
LEVEL = 0.9


def scored(model: Model, sample: Sample) -> Found:
    """One model on one draw: what was chosen, and each kind of error bar in each region."""
    seen = sample.calibration
    constant = metrics.rmse(model.predict(seen.x)[0], seen.y)
    found: Found = {
        "ridge": model.ridge,
        "scale": model.scale,
        "residual_scale": model.residual_scale,
        "softness": model.softness,
        "constant_bar": constant,
    }
    for region in REGIONS:
        rows = sample.test.inside if region == "inside" else ~sample.test.inside
        test = sample.test.part(rows)
        mean, std = model.predict(test.x)
        bars = {"rigidity": std, "constant": torch.full_like(std, constant)}
        if model.residual_scale is not None:
            bars["textbook"] = model.residual_scale * (1 + (std / model.scale).square()).sqrt()
        found[region] = {"rmse": metrics.rmse(mean, test.y)}
        found[region] |= {name: judged(mean, bar, test.y) for name, bar in bars.items()}
    return found


def judged(mean: Tensor, std: Tensor, target: Tensor) -> dict[str, float]:
    """Coverage of 90 % intervals, NLL and mean bar."""
    return {
        "coverage": metrics.coverage(mean, std, target, LEVEL),
        "nll": metrics.nll(mean, std, target),
        "std": float(std.mean()),
    }


def summary(draws: Sequence[Found]) -> Found:
    """Means over the draws with their standard errors, medians, and what each draw chose."""
    chosen = {
        key: [draw[key] for draw in draws]
        for key in ("ridge", "scale", "residual_scale", "softness", "constant_bar")
        if draws[0][key] is not None
    }
    regions = {
        region: {
            "rmse": mean_and_error([draw[region]["rmse"] for draw in draws]),
            **{
                bar: _judgements([draw[region][bar] for draw in draws])
                for bar in BARS
                if bar in draws[0][region]
            },
        }
        for region in REGIONS
    }
    medians = {key: statistics.median(values) for key, values in chosen.items()}
    return {"draws": len(draws), **regions, "each_draw": chosen, "medians": medians}


def _judgements(draws: Sequence[dict[str, float]]) -> Found:
    values = {key: [draw[key] for draw in draws] for key in draws[0]}
    means = {key: mean_and_error(column) for key, column in values.items()}
    return {**means, "nll_median": statistics.median(values["nll"])}


def curves(sample: Sample, models: list[Model]) -> dict[str, Any]:
    """What the figure shows, in numbers."""
    x = torch.linspace(-TEST_REACH, TEST_REACH, 151, dtype=torch.float64)[:, None]
    drawn = {}
    for model in models:
        mean, std = model.predict(x)
        drawn[model.name] = {"mean": mean, "std": std}
    return {
        "x": x[:, 0],
        "truth": truth(x)[:, 0],
        "train": {"x": sample.train.x[:, 0], "y": sample.train.y[:, 0]},
        "models": drawn,
    }
