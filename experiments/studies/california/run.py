"""Error bars inside and outside the training domain, on California housing (paper, Sec. 4.5)."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.data.california import NAMES
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome, mean_and_error
from experiments.judging import scores
from experiments.judging.error_bars import CLEARLY, FOLDS
from experiments.judging.floors import DRAWS
from experiments.studies.california import page, work
from experiments.studies.california.work import CALIBRATIONS, DOMAINS

FULL = {"count": 10, "epochs": 400, "hidden": 128, "decay": 1e-3, "bin_size": 100, "most": None}
QUICK = {**FULL, "count": 2, "epochs": 4, "hidden": 32, "bin_size": 25, "most": 2000}
Each = Sequence[dict[str, Any]]
"""One entry a net: by calibration, the two domains' scores, "auroc" and "chosen"."""

HISTOGRAM = 60
"""Bins between -3 and 3; the threshold is an edge."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Train on one side of the threshold, judge on both."""
    found = numbers(QUICK if quick else FULL, seed, keep=not quick)
    return Outcome("In and out of the domain: California housing", found, page.entries(found))


def numbers(sizes: dict[str, Any], seed: int, *, keep: bool) -> dict[str, Any]:
    """Everything that the page shows."""
    jobs = [
        Job("nets", work.nets, {**sizes, "seed": seed}, NAMES),
        Job("longitude", work.histogram, {"bins": HISTOGRAM}, NAMES),
    ]
    found = results("california", jobs, keep=keep, workers=1)
    nets = found["nets"]
    rows = {name: nets[name] for name in ("train", "valid", "inside", "outside")}
    return {
        "settings": {
            **sizes,
            "shown": 0,
            "level": page.LEVEL,
            "farthest": work.FARTHEST,
            "folds": FOLDS,
            "clearly": CLEARLY,
            "draws": DRAWS,
            "gaussian_kurtosis": 3,
        },
        "rows": {**rows, "smallest_test": min(rows["inside"]), "largest_test": max(rows["inside"])},
        "epoch": nets["epoch"],
        "longitude": found["longitude"],
        **summary(nets["each"]),
        "limits": limits(nets["limits"]),
        "shown": nets["shown"],
    }


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
        "kurtosis": scores.quartiles(kurtoses),
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
            **scores.beside_constant_over_seeds([one[domain] for one in repeated]),
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
