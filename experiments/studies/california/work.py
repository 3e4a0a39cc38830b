"""Nets trained on one side of a threshold, and their error bars on both sides of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.data.california import OUT_OF_DOMAIN
from experiments.judging import error_bars, scores
from experiments.judging.floors import floors, hindsight, kurtosis
from experiments.studies.california.rows import Pair, Samples, drawn, longitudes
from experiments.training.descent import trained
from experiments.training.protocol import Protocol
from rigidities import metrics

CALIBRATIONS = ("paper", "nll", "best", "bayes")
"""The paper's bins; the likelihood; the library's best, which is the ridge of the greatest evidence
with a noise floor unless another is clearly better; and that ridge with Bayesian linear
regression's noise, as a warning."""

SHOWN = ("paper", "best")
"""Those whose single rows and bins are kept, of the first net."""

BAYES = error_bars.Calibration("evidence", "bayes")
FARTHEST = 0.2
"""The share of validation rows, those of the largest bars, on which a calibration by the others is
tried: all that can be known of far rows without any."""

DOMAINS = ("inside", "outside")


def nets(
    *,
    count: int,
    seed: int,
    epochs: int,
    hidden: int,
    decay: float,
    bin_size: int,
    most: int | None,
) -> dict[str, Any]:
    """Train a stack and judge each of its nets.

    Args:
        count: of nets, each with a split of its own.
        seed: of splits, first weights and batches.
        epochs: of the training.
        hidden: width of both hidden layers.
        decay: of the weights.
        bin_size: rows of a bin.
        most: rows of each part, or None for all.

    Returns:
        "each", one entry a net; "limits", how close to the line its bars can come; "shown", the
        first net's rows and bins; and counts of rows.
    """
    samples = drawn(count, seed, OUT_OF_DOMAIN, restricted=True, most=most)
    protocol = Protocol((hidden, hidden), "silu", epochs=epochs, decay=decay)
    seeds = [1000 * seed + k for k in range(count)]
    stack = trained(samples.train, samples.valid, protocol, seeds, "California's nets")
    judged = [_judged(stack.best.module(k), samples, k, bin_size) for k in range(count)]
    return {
        "each": [{name: _without_plots(one[name]) for name in CALIBRATIONS} for one in judged],
        "limits": [one["limits"] for one in judged],
        "shown": {name: {d: _plots(judged[0][name][d]) for d in DOMAINS} for name in SHOWN},
        "epoch": stack.epoch,
        "train": samples.train[0].shape[1],
        "valid": samples.valid[0].shape[1],
        "inside": [int(mask.sum()) for mask in samples.inside],
        "outside": [int((~mask).sum()) for mask in samples.inside],
    }


def histogram(*, bins: int) -> dict[str, Any]:
    """Of the standardised longitude, between -3 and 3."""
    return longitudes([-3 + 6 * k / bins for k in range(bins + 1)])


def _judged(net: nn.Module, samples: Samples, k: int, bin_size: int) -> dict[str, Any]:
    """One net's error bars by all calibrations, which see validation rows inside the domain."""
    train, valid, (x, y) = samples.of(k)
    uq = error_bars.fitted(net, train)
    with torch.no_grad():
        constant = error_bars.constant(net(valid[0]), valid[1])
    ways = (error_bars.BINS, error_bars.PAPER, error_bars.best(uq, valid), BAYES)
    sides = {"inside": samples.inside[k], "outside": ~samples.inside[k]}
    found: dict[str, Any] = {}
    stds = {}
    for name, how in zip(CALIBRATIONS, ways, strict=True):
        beyond = farthest(uq, valid, how)
        bars = error_bars.bars(uq, valid, x, how)
        stds[name] = bars.std[sides["inside"]]
        found[name] = {
            **{d: _side(bars, y, side, constant, bin_size) for d, side in sides.items()},
            "auroc": metrics.auroc(*(bars.std[side] for side in sides.values())),
            "farthest": beyond,
            "chosen": bars.chosen,
        }
    stds["constant"] = torch.full_like(stds["paper"], constant)
    inside = sides["inside"]
    error = (y.flatten().double() - bars.mean)[inside]
    found["limits"] = {
        "kurtosis": kurtosis(error),
        "floors": {name: floors(error, std, bin_size, seed=k) for name, std in stds.items()},
        "hindsight": hindsight(uq, x[inside], error, bin_size),
    }
    return found


def farthest(
    uq: rg.LastLayerRigidity, valid: Pair, how: error_bars.Calibration
) -> dict[str, float]:
    """Calibrate on the validation rows of small bars, judge on those of the largest."""
    error_bars.calibrated(uq, valid, how)
    x, y = valid
    order = uq.predict(x).std.flatten().argsort(stable=True)
    near, far = order.split([(n := len(x)) - int(FARTHEST * n), int(FARTHEST * n)])
    error_bars.calibrated(uq, (x[near], y[near]), how)
    p = uq.predict(x[far])
    return {
        judge.__name__: judge(p.mean, p.std, y[far]) for judge in (metrics.coverage, metrics.nll)
    }


def _side(
    bars: error_bars.Bars, y: Tensor, side: Tensor, constant: float, bin_size: int
) -> dict[str, Any]:
    rows = bars.mean[side], bars.std[side], y[side].flatten().double()
    return {
        **scores.beside_constant(*rows, constant, bin_size),
        "points": scores.points(*rows),
        "bins": scores.bins(*rows, bin_size),
    }


def _plots(side: dict[str, Any]) -> dict[str, Any]:
    return {name: side[name] for name in ("points", "bins")}


def _without_plots(found: dict[str, Any]) -> dict[str, Any]:
    """A calibration's numbers without single rows and bins, which one net is enough to show."""
    sides = {d: {k: found[d][k] for k in ("scores", "constant")} for d in DOMAINS}
    return {**found, **sides}
