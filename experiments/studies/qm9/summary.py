"""The nets' scores put together: means and standard errors over splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from experiments.judging import scores

Found = dict[str, Any]

MERGED = 10
"""Bins that make one wide bin, in which single large errors count less."""


def over_splits(nets: Sequence[Found]) -> Found:
    """Of all splits; figures, kinds and shown molecules are those of the first.

    Args:
        nets: the results of `work.judged`.

    Returns:
        "calibrations" with [mean, standard error] of every score and the medians of what they
        chose; "differences" from the paper's calibration, split by split.
    """
    names = list(nets[0]["calibrations"])
    each = {name: [net["calibrations"][name] for net in nets] for name in names}
    own = {name: [one["scores"] for one in found] for name, found in each.items()}
    return {
        "calibrations": {name: _together(found) for name, found in each.items()},
        "differences": {
            name: scores.paired(own[name], own["paper"]) for name in names if name != "paper"
        },
        "epochs": [net["epoch"] for net in nets],
        "trained_on": Counter(net["trained_on"] for net in nets),
        "novelty": nets[0]["novelty"],
        "shown": nets[0]["shown"],
    }


def log_ratio(bins: Found, merged: int) -> float:
    """The mean |log10(MSE / variance)| over bins, so many neighbours of which are put together.

    Args:
        bins: with "variance" and "mse" of bins of equal size, in the order of the variances.
        merged: how many make one bin; an incomplete last one is left out.
    """
    variance, mse = (torch.tensor(bins[name], dtype=torch.float64) for name in ("variance", "mse"))
    merged = min(merged, len(variance))
    whole = len(variance) // merged * merged
    means = (part[:whole].reshape(-1, merged).mean(1) for part in (mse, variance))
    return float(torch.div(*means).log10().abs().mean())


def _together(found: Sequence[Found]) -> Found:
    """One calibration of all nets."""
    chosen = [one["chosen"] for one in found]
    wide = [{"wide_log_ratio": log_ratio(one["bins"], MERGED)} for one in found]
    numbers = ("ridge", "scale", "noise_variance", "effective_rank")
    return {
        "scores": scores.over_seeds(
            [one["scores"] | more for one, more in zip(found, wide, strict=True)]
        ),
        "constant": {"scores": scores.over_seeds([one["constant"]["scores"] for one in found])},
        "chosen": {name: median(one[name] for one in chosen) for name in numbers}
        | {"noiseless": sum(one["noise_variance"] == 0 for one in chosen)},
        "bins": found[0]["bins"],
        "points": found[0]["points"],
    }
