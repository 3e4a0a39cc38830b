"""How good the error bars are inside and outside the range of the seven points."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.frame.outcome import Table, mean_and_error, with_error
from experiments.studies.toy.models import Model
from experiments.studies.toy.points import Sample
from rigidities import metrics

REGIONS = ("inside", "outside")
BARS = {
    "rigidity": "rigidity",
    "textbook": "rigidity, scale from residuals",
    "constant": "constant",
}
LEVEL = 0.9
CHOICES = (
    "What was chosen (medians; the noise is 0.01), and how large the errors and the mean error "
    "bars are (means ± standard errors)."
)

Score = dict[str, Any]


def scored(model: Model, sample: Sample) -> Score:
    """One model on one draw: what was chosen, and each kind of error bar in each region."""
    seen = sample.calibration
    constant = metrics.rmse(model.predict(seen.x)[0], seen.y)
    found: Score = {
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


def summary(draws: Sequence[Score]) -> Score:
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


def _judgements(draws: Sequence[dict[str, float]]) -> Score:
    values = {key: [draw[key] for draw in draws] for key in draws[0]}
    means = {key: mean_and_error(column) for key, column in values.items()}
    return {**means, "nll_median": statistics.median(values["nll"])}


def score_table(found: dict[str, Score]) -> Table:
    """Coverage and NLL, rigidities beside constant bars."""
    rows = [
        [name, label]
        + [with_error(*model[region][bar]["coverage"]) for region in REGIONS]
        + [_nll(model[region][bar]) for region in REGIONS]
        for name, model in found.items()
        for bar, label in BARS.items()
        if bar in model["inside"]
    ]
    columns = ["model", "error bar", "coverage inside", "outside", "NLL inside", "outside"]
    draws = next(iter(found.values()))["draws"]
    caption = (
        f"Coverage of 90 % intervals and negative log-likelihood (less is better) of new noisy "
        f"points, mean ± standard error over {draws} draws of all points, medians in brackets. "
        "*Scale from residuals* is the textbook's bar of a new observation, s √(1 + 1/R) with s "
        "the residual standard deviation of the seven points. *Constant* is one bar for all "
        "inputs, the RMS error on the calibration points."
    )
    return Table(columns, rows, caption)


def _nll(judgement: Score) -> str:
    return f"{with_error(*judgement['nll'])} ({judgement['nll_median']:.2f})"


def choice_table(found: dict[str, Score]) -> Table:
    """What the calibration chose, and how large the errors are."""
    rows = []
    for name, model in found.items():
        chosen = model["medians"]
        rows.append(
            [
                name,
                f"{chosen['ridge']:.1g}",
                chosen["scale"],
                chosen.get("residual_scale"),
                *(with_error(*model[region]["rmse"], digits=3) for region in REGIONS),
                *(with_error(*model[region]["rigidity"]["std"], digits=3) for region in REGIONS),
            ]
        )
    columns = ["model", "ridge", "scale", "scale from residuals"]
    columns += [f"{what} {region}" for what in ("RMSE", "mean bar") for region in REGIONS]
    return Table(columns, rows, CHOICES)
