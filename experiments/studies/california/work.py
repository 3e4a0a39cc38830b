"""Nets trained on one side of a threshold, and their error bars on both sides of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from experiments.data.california import OUT_OF_DOMAIN, Pair, drawn, longitudes
from experiments.judging import error_bars, scores, stacks
from experiments.judging.floors import floors, hindsight, kurtosis
from experiments.judging.stacks import Judged
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
    stack = stacks.trained(samples, protocol, seed, "California's nets")
    nets = enumerate(zip(stacks.judged(stack.best, samples), samples.inside, strict=True))
    judged = [_judged(one, inside, k, bin_size) for k, (one, inside) in nets]
    return {
        "each": [{name: one[name] for name in CALIBRATIONS} for one in judged],
        "limits": [one["limits"] for one in judged],
        "shown": judged[0]["shown"],
        "epoch": stack.epoch,
        "train": samples.counts["train"],
        "valid": samples.counts["valid"],
        "inside": [int(mask.sum()) for mask in samples.inside],
        "outside": [int((~mask).sum()) for mask in samples.inside],
    }


def histogram(*, bins: int) -> dict[str, Any]:
    """Of the standardised longitude, between -3 and 3."""
    return longitudes([-3 + 6 * k / bins for k in range(bins + 1)])


def _judged(one: Judged, inside: Tensor, k: int, bin_size: int) -> dict[str, Any]:
    """One net's error bars by all calibrations, which see validation rows inside the domain."""
    best = error_bars.best(one.uq, one.valid)
    ways = (error_bars.BINS, error_bars.PAPER, best, BAYES)
    sides = {"inside": inside, "outside": ~inside}
    found: dict[str, Any] = {}
    stds = {}
    for name, how in zip(CALIBRATIONS, ways, strict=True):
        beyond = farthest(one.uq, one.valid, how)
        bars = one.bars(how)
        mean, stds[name], target = one.rows(bars, inside)
        found[name] = {
            **{d: one.scored(bars, bin_size, side) for d, side in sides.items()},
            "auroc": metrics.auroc(*(bars.std[side] for side in sides.values())),
            "farthest": beyond,
            "chosen": bars.chosen,
        }
        if name in SHOWN:
            plots = {d: _plots(one.rows(bars, side), bin_size) for d, side in sides.items()}
            found.setdefault("shown", {})[name] = plots
    stds["constant"] = torch.full_like(stds["paper"], one.constant)
    error = target - mean
    found["limits"] = {
        "kurtosis": kurtosis(error),
        "floors": {name: floors(error, std, bin_size, seed=k) for name, std in stds.items()},
        "hindsight": hindsight(one.uq, one.test[0][inside], error, bin_size),
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


def _plots(rows: scores.Rows, bin_size: int) -> dict[str, Any]:
    return {"points": scores.points(*rows), "bins": scores.bins(*rows, bin_size)}
