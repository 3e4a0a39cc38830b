"""Nets of one width, and the quality of their error bars."""

from __future__ import annotations

from typing import Any

from experiments.data.california import WIDTH, drawn
from experiments.judging import error_bars, scores, stacks
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
    stack = stacks.trained(samples, protocol, seed, f"nets of width {width}").best
    found: dict[str, Any] = {name: {"each": []} for name in CALIBRATIONS}
    for one in stacks.judged(stack, samples):
        for name, how in CALIBRATIONS.items():
            bars = one.bars(how)
            smallest = float(bars.std.min() / bars.std.median())
            found[name].setdefault("bins", scores.bins(*one.rows(bars), bin_size))
            found[name]["each"].append(
                one.scored(bars, bin_size) | {"smallest_bar": smallest, "chosen": bars.chosen}
            )
    return {**found, "rows": samples.counts}
