"""Nets trained on one side of a threshold, and their error bars on both sides of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from experiments.data.california import OUT_OF_DOMAIN, Pair, drawn, longitudes
from experiments.judging import error_bars, scores, stacks
from experiments.judging.floors import floors, hindsight, kurtosis
from experiments.judging.predictive import row_scores, summary
from experiments.judging.stacks import Judged
from experiments.training import kept
from rigidities import metrics

CALIBRATIONS = {
    "paper": error_bars.BINS,
    "nll": error_bars.PAPER,
    "auto": error_bars.AUTO,
    "bayes": error_bars.Calibration("evidence", "bayes"),
}
"""The paper's bins; the likelihood; the library's default; and the ridge of the greatest evidence
with Bayesian linear regression's noise, as a warning."""

SHOWN = ("paper", "auto")
"""Those whose single rows and bins are kept, of the first net."""

NETS = "silu"
"""Of California's nets that come with the project."""

FARTHEST = 0.2
"""The share of validation rows, those of the largest bars, on which a calibration by the others is
tried: all that can be known of far rows without any."""

DOMAINS = ("inside", "outside")


def nets(*, count: int, seed: int, epochs: int, bin_size: int, digest: str) -> dict[str, Any]:
    """Judge each net of a stack.

    Args:
        count: of nets, each with a split of its own.
        seed: of splits, first weights and batches.
        epochs: of the training.
        bin_size: rows of a bin.
        digest: of the nets that come with the project.

    Returns:
        "each", one entry a net; "limits", how close to the line its bars can come; "shown", the
        first net's rows and bins; counts of rows; and whether the nets were "committed".
    """
    samples = drawn(count, seed, OUT_OF_DOMAIN, restricted=True)
    found = kept.nets("california", NETS, count=count, seed=seed, epochs=epochs)
    nets = enumerate(zip(stacks.judged(found.stack, samples), samples.inside, strict=True))
    judged = [_judged(one, inside, k, bin_size) for k, (one, inside) in nets]
    return {
        "each": [{name: one[name] for name in CALIBRATIONS} for one in judged],
        "limits": [one["limits"] for one in judged],
        "shown": judged[0]["shown"],
        "epoch": found.epoch,
        "committed": found.committed,
        "nets": digest,
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
    sides = {"inside": inside, "outside": ~inside}
    found: dict[str, Any] = {}
    stds = {}
    for name, how in CALIBRATIONS.items():
        beyond = farthest(one.uq, one.valid, how)
        bars = one.bars(how)
        mean, stds[name], target = one.rows(bars, inside)
        found[name] = {
            **{d: one.scored(bars, bin_size, side) for d, side in sides.items()},
            "auroc": metrics.auroc(*(bars.std[side] for side in sides.values())),
            "auroc_of_rigidity": metrics.auroc(*(softness(bars)[side] for side in sides.values())),
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
    found = summary(row_scores(p, y[far]))
    return {"coverage": found["coverage_90"], "nll": found["nll"]}


def softness(bars: error_bars.Bars) -> Tensor:
    """What the data leave open, q = 1 / rigidity, (N,)."""
    return 1 / bars.prediction.rigidity.double().flatten()


def _plots(rows: scores.Rows, bin_size: int) -> dict[str, Any]:
    return {"points": scores.points(*rows), "bins": scores.bins(*rows, bin_size)}
