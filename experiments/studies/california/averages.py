"""Means and standard errors over the nets."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.frame.outcome import mean_and_error
from experiments.frame.quartiles import quartiles
from experiments.judging import scores
from experiments.studies.california.work import CALIBRATIONS, DOMAINS

Each = Sequence[dict[str, Any]]
"""One entry a net: by calibration, the two domains' scores, "auroc" and "chosen"."""


def summary(each: Each) -> dict[str, Any]:
    """By calibration, and the paired differences from the paper's."""
    return {
        "calibrations": {name: _calibration([one[name] for one in each]) for name in CALIBRATIONS},
        "differences": {
            name: _difference([one[name] for one in each], [one["paper"] for one in each])
            for name in CALIBRATIONS
            if name != "paper"
        },
    }


def limits(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How close to the line the bars can come, over the nets."""
    kurtoses = [one["kurtosis"] for one in each]
    return {
        "kurtosis": quartiles(kurtoses),
        "kurtosis_of_each": kurtoses,
        "floors": {
            name: scores.over_seeds([one["floors"][name] for one in each])
            for name in each[0]["floors"]
        },
        "hindsight": scores.over_seeds([one["hindsight"] for one in each]),
    }


def _calibration(repeated: Each) -> dict[str, Any]:
    sides = {
        domain: {
            "scores": scores.over_seeds([one[domain]["scores"] for one in repeated]),
            "constant": {
                "scores": scores.over_seeds([one[domain]["constant"]["scores"] for one in repeated])
            },
            "coverage_of_each": (each := [one[domain]["scores"]["coverage"] for one in repeated]),
            "lowest_coverage": min(each),
        }
        for domain in DOMAINS
    }
    auroc = [one["auroc"] for one in repeated]
    chosen = [one["chosen"] for one in repeated]
    ways = Counter(f"{one['criterion']}, {one['noise']}" for one in chosen)
    return {
        **sides,
        "auroc": list(mean_and_error(auroc)),
        "auroc_of_each": auroc,
        "farthest": scores.over_seeds([one["farthest"] for one in repeated]),
        "chosen": {
            "by": {way: ways[way] for way in sorted(ways)},
            "ridge": statistics.median(one["ridge"] for one in chosen),
            "scale": statistics.median(one["scale"] for one in chosen),
            "noise": statistics.median(one["noise_variance"] for one in chosen) ** 0.5,
        },
    }


def _difference(repeated: Each, other: Each) -> dict[str, Any]:
    sides = {
        domain: scores.paired(
            [one[domain]["scores"] for one in repeated], [one[domain]["scores"] for one in other]
        )
        for domain in DOMAINS
    }
    auroc = [a["auroc"] - b["auroc"] for a, b in zip(repeated, other, strict=True)]
    return {**sides, "auroc": list(mean_and_error(auroc))}
