"""Error bars inside and outside the training domain, on California housing (paper, Sec. 4.5)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.data.california import NAMES
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome, mean_and_error
from experiments.judging import scores
from experiments.judging.floors import DRAWS
from experiments.studies.california import page, work
from experiments.studies.california.work import CALIBRATIONS, DOMAINS
from experiments.training import kept

FULL = {"count": kept.NETS, "epochs": kept.EPOCHS, "bin_size": 100}
QUICK = {"count": 2, "epochs": 4, "bin_size": 25}
Each = Sequence[dict[str, Any]]
"""One entry a net: by calibration, the two domains' scores, "auroc"s and "chosen"."""

HISTOGRAM = 60
"""Bins between -3 and 3; the threshold is an edge."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Train on one side of the threshold, judge on both."""
    found = numbers(QUICK if quick else FULL, seed, keep=not quick)
    return Outcome("In and out of the domain: California housing", found, page.entries(found))


def numbers(sizes: dict[str, Any], seed: int, *, keep: bool) -> dict[str, Any]:
    """Everything that the page shows."""
    jobs = [
        Job(
            "nets",
            work.nets,
            {**sizes, "seed": seed, "digest": kept.digest("california")},
            NAMES,
        ),
        Job("longitude", work.histogram, {"bins": HISTOGRAM}, NAMES),
    ]
    found = results("california", jobs, keep=keep, workers=1)
    nets, protocol = found["nets"], kept.PROTOCOLS[work.NETS]
    rows = {name: nets[name] for name in ("train", "valid", "inside", "outside")}
    return {
        "settings": {
            **sizes,
            "hidden": protocol.hidden[0],
            "decay": protocol.decay,
            "committed": nets["committed"],
            "shown": 0,
            "level": page.LEVEL,
            "farthest": work.FARTHEST,
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
    auroc = {name: [one[name] for one in repeated] for name in ("auroc", "auroc_of_rigidity")}
    chosen = [one["chosen"] for one in repeated]
    return {
        **sides,
        **{name: list(mean_and_error(values)) for name, values in auroc.items()},
        "auroc_of_each": auroc["auroc"],
        "farthest": scores.over_seeds([one["farthest"] for one in repeated]),
        "chosen": {
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
