"""Networks trained on one side of a threshold, and their error bars on both sides of it.

`networks` takes a stack of trained networks, each with a split of its own. Every network is
calibrated in all ways of `CALIBRATIONS` on validation rows inside the domain, and its bars are
judged on the test rows inside and outside.
"""

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
    "auto": error_bars.FULL,
    "bayes": error_bars.BAYES,
}
"""The paper's bins; the likelihood; the library's default; and the ridge of the greatest evidence
with Bayesian linear regression's noise, as a warning."""

SHOWN = ("paper", "auto")
"""Calibrations whose single rows and bins are stored, of the first network."""

NETS = "silu"
"""Which of California's networks that come with the project."""

FARTHEST = 0.2
"""The share of validation rows, those of the largest bars, on which a calibration by the others is
tried: all that can be known of far rows without any."""

DOMAINS = ("inside", "outside")


def networks(*, count: int, seed: int, epochs: int, bin_size: int, digest: str) -> dict[str, Any]:
    """Judge each network of a stack.

    Args:
        count: the number of networks, each with a split of its own.
        seed: the seed of splits, first weights and batches.
        epochs: the epochs of the training.
        bin_size: the rows of a bin.
        digest: the digest of the networks that come with the project.

    Returns:
        "each", one entry a network; "limits", how close to the line its bars can come; "shown", the
        first network's rows and bins; counts of rows; and whether the networks were "committed".
    """
    samples = drawn(count, seed, OUT_OF_DOMAIN, restricted=True)
    kept_networks = kept.nets("california", NETS, count=count, seed=seed, epochs=epochs)
    calibrations = []
    limits = []
    plots: dict[str, Any] = {}
    for k, network in enumerate(stacks.judged(kept_networks.stack, samples)):
        inside = samples.inside[k]
        bars = {}
        by_calibration = {}
        for name, calibration in CALIBRATIONS.items():
            # The try on the farthest rows comes first: it leaves another calibration behind.
            farthest_scores = farthest(network.uq, network.valid, calibration)
            bars[name] = network.bars(calibration)
            by_calibration[name] = {
                **_scores(network, bars[name], inside, bin_size),
                "farthest": farthest_scores,
                "chosen": bars[name].chosen,
            }
        calibrations.append(by_calibration)
        limits.append(_limits(network, bars, inside, bin_size, seed=k))
        if k == 0:
            plots = {name: _plots(network, bars[name], inside, bin_size) for name in SHOWN}
    return {
        "each": calibrations,
        "limits": limits,
        "shown": plots,
        "epoch": kept_networks.epoch,
        "committed": kept_networks.committed,
        "nets": digest,
        "train": samples.counts["train"],
        "valid": samples.counts["valid"],
        "inside": [int(inside.sum()) for inside in samples.inside],
        "outside": [int((~inside).sum()) for inside in samples.inside],
    }


def histogram(*, bins: int) -> dict[str, Any]:
    """Count the rows in bins of the standardised longitude, between -3 and 3."""
    return longitudes([-3 + 6 * k / bins for k in range(bins + 1)])


def farthest(uq: rg.LastLayerRigidity, valid: Pair, method: error_bars.Method) -> dict[str, float]:
    """Calibrate on the validation rows of small bars and judge those of the largest.

    Args:
        uq: a fitted rigidity, whose calibration is replaced.
        valid: the validation rows.
        method: how to calibrate, first on all rows to order them by their bars.

    Returns:
        The coverage of 90 % intervals and the NLL of the share `FARTHEST` of the rows.
    """
    uq.calibrate(valid, method=method)
    x, y = valid
    order = uq.predict(x).std.flatten().argsort(stable=True)
    far_count = int(FARTHEST * len(x))
    near, far = order.split([len(x) - far_count, far_count])
    uq.calibrate(x[near], y[near], method=method)
    far_scores = summary(row_scores(uq.predict(x[far]), y[far]))
    return {"coverage": far_scores["coverage_90"], "nll": far_scores["nll"]}


def _scores(
    network: Judged, bars: error_bars.Bars, inside: Tensor, bin_size: int
) -> dict[str, Any]:
    """The scores on both sides, and how well bars and q tell far rows from near ones."""
    softness = 1 / bars.prediction.rigidity.double().flatten()  # q, (N,)
    return {
        "inside": network.scored(bars, bin_size, inside),
        "outside": network.scored(bars, bin_size, ~inside),
        "auroc": metrics.auroc(bars.std[inside], bars.std[~inside]),
        "auroc_of_rigidity": metrics.auroc(softness[inside], softness[~inside]),
    }


def _limits(
    network: Judged, bars: dict[str, error_bars.Bars], inside: Tensor, bin_size: int, seed: int
) -> dict[str, Any]:
    """How close to the line the bars of one network can come on the rows inside.

    Args:
        network: the network.
        bars: its bars by calibration. All have the same means.
        inside: which test rows lie in the domain, (N,).
        bin_size: the rows of a bin.
        seed: the seed of the drawn errors.
    """
    rows = {name: network.rows(of_calibration, inside) for name, of_calibration in bars.items()}
    error = -rows["paper"].error
    stds = {name: of_calibration.std for name, of_calibration in rows.items()}
    stds["constant"] = torch.full_like(stds["paper"], network.constant)
    return {
        "kurtosis": kurtosis(error),
        "floors": {name: floors(error, std, bin_size, seed=seed) for name, std in stds.items()},
        "hindsight": hindsight(network.uq, network.test[0][inside], error, bin_size),
    }


def _plots(network: Judged, bars: error_bars.Bars, inside: Tensor, bin_size: int) -> dict[str, Any]:
    """Single rows and bins of one calibration on both sides."""
    plots = {}
    for domain, side in (("inside", inside), ("outside", ~inside)):
        mean, std, target = network.rows(bars, side)
        plots[domain] = {
            "points": scores.points(mean, std, target),
            "bins": scores.bins(mean, std, target, bin_size),
        }
    return plots
