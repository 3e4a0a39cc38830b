"""Quality of the error bars against the width of the net (paper, appendix on the width)."""

from __future__ import annotations

from typing import Any

from experiments.data.california import NAMES
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome
from experiments.judging import scores
from experiments.judging.scores import quartiles, quartiles_of_each
from experiments.studies.width import page, work
from experiments.studies.width.trends import BETTER, completed, trend

LEVEL = 0.9
RUINED = -1.0
"""A gain over the constant bar below this comes from single rows whose bar is close to zero."""

MEANINGLESS = ("nll", "gain")
"""Scores of which one such row decides the mean over nets: medians alone are kept."""

WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512)
SHOWN = (4, 16, 64, 512)
FULL = {"count": 8, "epochs": 400, "decay": 1e-3, "bin_size": 100, "most": None}
QUICK_WIDTHS = (4, 16, 32)
QUICK = {**FULL, "count": 2, "epochs": 4, "bin_size": 50, "most": 1000}


def run(*, quick: bool, seed: int) -> Outcome:
    """One stack of nets a width."""
    sizes, widths = (QUICK, QUICK_WIDTHS) if quick else (FULL, WIDTHS)
    found = numbers(sizes, widths, seed, quick=quick)
    return Outcome("Error bars and the width of the net", found, page.entries(found))


def numbers(
    sizes: dict[str, Any], widths: tuple[int, ...], seed: int, *, quick: bool
) -> dict[str, Any]:
    """Everything that the page shows."""
    jobs = [
        Job(f"width {width}", work.nets, {**sizes, "width": width, "seed": seed}, NAMES)
        for width in sorted(widths, reverse=True)  # the longest first
    ]
    done = results("width", jobs, keep=not quick, workers=1 if quick else None)
    stacks = {width: done[f"width {width}"] for width in widths}
    return {
        "settings": {
            **sizes,
            "level": LEVEL,
            "ruined_below": RUINED,
            "nets": sizes["count"] * len(widths),
            "rows": stacks[widths[0]]["rows"],
        },
        "narrow": {name: _narrow(stacks, name) for name in work.CALIBRATIONS},
        "widths": {
            width: {name: _calibration(stack[name]["each"]) for name in work.CALIBRATIONS}
            for width, stack in stacks.items()
        },
        "trends": {name: _trends(stacks, name) for name in work.CALIBRATIONS},
        "shown": {w: one["paper"]["bins"] for w, one in stacks.items() if quick or w in SHOWN},
    }


def _calibration(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Means with standard errors, and medians with quartiles, over the nets of one width."""
    own = [one["scores"] for one in each]
    means = scores.over_seeds(own)
    constant = [one["constant"]["scores"] for one in each]
    return {
        "scores": {name: pair for name, pair in means.items() if name not in MEANINGLESS},
        "median": quartiles_of_each(own),
        "constant": {"scores": scores.over_seeds(constant), "median": quartiles_of_each(constant)},
        "smallest_bar": quartiles([one["smallest_bar"] for one in each]),
        "least_bar": min(one["smallest_bar"] for one in each),
        "ruined": sum(one["scores"]["gain"] < RUINED for one in each),
    }


def _narrow(stacks: dict[int, dict[str, Any]], calibration: str) -> dict[str, Any]:
    """How many nets a bar close to zero ruins, and how close the closest is."""
    each = [one for stack in stacks.values() for one in stack[calibration]["each"]]
    return {
        "ruined": sum(one["scores"]["gain"] < RUINED for one in each),
        "least_bar": min(one["smallest_bar"] for one in each),
    }


def _trends(stacks: dict[int, dict[str, Any]], calibration: str) -> dict[str, Any]:
    each = {
        width: [completed(one["scores"], LEVEL) for one in stack[calibration]["each"]]
        for width, stack in stacks.items()
    }
    return {name: trend(each, name) for name in BETTER}
