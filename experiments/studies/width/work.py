"""Nets of one width, and the quality of their error bars."""

from __future__ import annotations

from typing import Any

import torch

from experiments.data.california import WIDTH
from experiments.judging import error_bars, scores
from experiments.studies.california.rows import drawn
from experiments.training.descent import trained
from experiments.training.protocol import Protocol

CALIBRATIONS = {"paper": error_bars.BINS, "nll": error_bars.PAPER, "floor": error_bars.SAFE}
"""The paper's form by its bins and by the likelihood, and a floor that keeps bars from zero."""


def nets(
    *, width: int, count: int, seed: int, epochs: int, decay: float, bin_size: int, most: int | None
) -> dict[str, Any]:
    """Train a stack of one width and judge each of its nets.

    Args:
        width: of both hidden layers.
        count: of nets, each with a split of its own, the same for all widths.
        seed: of splits, first weights and batches.
        epochs: of the training.
        decay: of the weights.
        bin_size: rows of a bin.
        most: rows of each part, or None for all.

    Returns:
        By calibration: "each", one entry a net with its smallest bar relative to its median
        one, and the first net's "bins".
    """
    samples = drawn(count, seed, WIDTH, most=most)
    protocol = Protocol((width, width), "silu", last_bias=False, epochs=epochs, decay=decay)
    seeds = [1000 * seed + k for k in range(count)]
    stack = trained(samples.train, samples.valid, protocol, seeds, f"nets of width {width}").best
    found: dict[str, Any] = {name: {"each": []} for name in CALIBRATIONS}
    for k in range(count):
        train, valid, (x, y) = samples.of(k)
        net = stack.module(k)
        uq = error_bars.fitted(net, train)
        with torch.no_grad():
            constant = error_bars.constant(net(valid[0]), valid[1])
        for name, how in CALIBRATIONS.items():
            bars = error_bars.bars(uq, valid, x, how)
            rows = bars.mean, bars.std, y.flatten().double()
            judged = scores.beside_constant(*rows, constant, bin_size)
            smallest = float(bars.std.min() / bars.std.median())
            judged |= {"smallest_bar": smallest, "chosen": bars.chosen}
            found[name]["each"].append(judged)
            if k == 0:
                found[name]["bins"] = scores.bins(*rows, bin_size)
    return {
        **found,
        "rows": {"train": samples.train[0].shape[1], "valid": len(valid[0]), "test": len(x)},
    }
