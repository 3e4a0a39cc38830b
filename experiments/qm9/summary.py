"""The nets' scores put together: means and standard errors over splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from experiments import scores

Found = dict[str, Any]


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


def _together(found: Sequence[Found]) -> Found:
    """One calibration of all nets."""
    chosen = [one["chosen"] for one in found]
    numbers = ("ridge", "scale", "noise_variance", "effective_rank")
    return {
        "scores": scores.over_seeds([one["scores"] for one in found]),
        "constant": {"scores": scores.over_seeds([one["constant"]["scores"] for one in found])},
        "chosen": {name: median(one[name] for one in chosen) for name in numbers},
        "bins": found[0]["bins"],
        "points": found[0]["points"],
    }
