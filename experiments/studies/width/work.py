"""Networks of one width, and the quality of their error bars.

`networks` trains a stack of one width, calibrates each network in all ways of `CALIBRATIONS`, and
scores the bars of its test rows.
"""

from __future__ import annotations

from typing import Any

from experiments.data.california import WIDTH, drawn
from experiments.judging import error_bars, scores, stacks
from experiments.training.protocol import Protocol

CALIBRATIONS = {"paper": error_bars.BINS, "nll": error_bars.PAPER, "floor": error_bars.SAFE}
"""The paper's form by its bins and by the likelihood, and a floor that keeps bars from zero."""


def networks(
    *, width: int, count: int, seed: int, epochs: int, decay: float, bin_size: int, most: int | None
) -> dict[str, Any]:
    """Train a stack of one width and judge each of its networks.

    Args:
        width: the width of both hidden layers.
        count: the number of networks, each with a split of its own, the same for all widths.
        seed: the seed of splits, first weights and batches.
        epochs: the epochs of the training.
        decay: the weight decay.
        bin_size: the rows of a bin.
        most: the largest number of rows of each part, or None for all.

    Returns:
        By calibration: "each", one entry a network with its smallest bar relative to its median
        one, and the first network's "bins"; and the numbers of "rows".
    """
    samples = drawn(count, seed, WIDTH, most=most)
    protocol = Protocol((width, width), "silu", last_bias=False, epochs=epochs, decay=decay)
    stack = stacks.trained(samples, protocol, seed, f"nets of width {width}").best
    calibrations: dict[str, Any] = {name: {"each": []} for name in CALIBRATIONS}
    for k, network in enumerate(stacks.judged(stack, samples)):
        for name, calibration in CALIBRATIONS.items():
            bars = network.bars(calibration)
            if k == 0:
                mean, std, target = network.rows(bars)
                calibrations[name]["bins"] = scores.bins(mean, std, target, bin_size)
            calibrations[name]["each"].append(
                {
                    **network.scored(bars, bin_size),
                    "smallest_bar": float(bars.std.min() / bars.std.median()),
                    "chosen": bars.chosen,
                }
            )
    return {**calibrations, "rows": samples.counts}
