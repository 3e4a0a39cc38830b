"""Which calibration lies nearest to y = x in the binned plot, without being a constant bar."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import rigidities as rg
from experiments.judging.error_bars import BINS, PAPER, Calibration, held_out
from experiments.training.loop import Rows
from rigidities import metrics

CANDIDATES = (BINS, Calibration("bins", "constant"), PAPER)
"""The paper's two, and its bins with a constant noise."""

KEPT = 0.5
"""Share of the gain in likelihood over a constant bar, as the paper's form has it, that the choice
must keep: a constant bar scores well in bins and tells nothing."""


def best_bins(
    uq: rg.LastLayerRigidity,
    valid: Rows,
    bin_size: int,
    candidates: Sequence[Calibration] = CANDIDATES,
) -> Calibration:
    """The best by the mean distance of log MSE from log variance in bins.

    Every validation row gets a bar by the numbers that the other folds of the rows choose; the
    bars of a candidate are then judged together.

    Args:
        uq: fitted.
        valid: inputs and target.
        bin_size: of the judge.
        candidates: to choose from, the paper's bins among them.
    """
    target = valid[-1].double().flatten()
    bars = {how: held_out(uq, valid, how) for how in candidates}
    likelihood = {how: metrics.nll(*bar, target) for how, bar in bars.items()}
    mean, std = bars[BINS]
    constant = metrics.nll(mean, torch.full_like(std, metrics.rmse(mean, target)), target)
    least = constant - KEPT * (constant - likelihood[BINS])
    telling = [how for how in bars if how == BINS or likelihood[how] <= least]
    return min(telling, key=lambda how: metrics.binned_log_ratio(*bars[how], target, bin_size))
