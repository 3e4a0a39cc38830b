"""Quality of the error bars against the width of the network (paper, appendix on the width).

One job a width trains and judges a stack of networks (`work.networks`). `numbers` summarises the
networks of each width, and follows every score over the widths (`trends`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.data.california import NAMES
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome
from experiments.judging import scores
from experiments.judging.scores import quartiles, quartiles_of_each
from experiments.studies.width import page, work
from experiments.studies.width.trends import BETTER, trend, with_distances

LEVEL = 0.9
"""The share of the targets that intervals are meant to cover."""

RUINED = -1.0
"""A gain over the constant bar below this comes from single rows whose bar is close to zero."""

MEANINGLESS = ("nll", "gain")
"""Scores of which one such row decides the mean over networks: only medians are stored."""

WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512)
SHOWN = (4, 16, 64, 512)
"""Widths whose bins are drawn."""

FULL = {"count": 8, "epochs": 400, "decay": 1e-3, "bin_size": 100, "most": None}
QUICK_WIDTHS = (4, 16, 32)
QUICK = {"count": 2, "epochs": 4, "decay": 1e-3, "bin_size": 50, "most": 1000}
"""Arguments of `work.networks`."""

Stacks = Mapping[int, Mapping[str, Any]]
"""The results of `work.networks` by width."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Train and judge one stack of networks a width."""
    if quick:
        page_numbers = numbers(QUICK, QUICK_WIDTHS, seed, quick=True)
    else:
        page_numbers = numbers(FULL, WIDTHS, seed, quick=False)
    return Outcome(
        "Error bars and the width of the network", page_numbers, page.entries(page_numbers)
    )


def numbers(
    sizes: dict[str, Any], widths: tuple[int, ...], seed: int, *, quick: bool
) -> dict[str, Any]:
    """Everything that the page shows.

    Args:
        sizes: `FULL` or `QUICK`.
        widths: the widths, in rising order.
        seed: the seed of splits and networks.
        quick: whether this is a quick look, which stores nothing on disk and draws all widths.
    """
    jobs = [
        Job(f"width {width}", work.networks, {**sizes, "width": width, "seed": seed}, NAMES)
        for width in sorted(widths, reverse=True)  # the longest first
    ]
    job_results = results("width", jobs, keep=not quick, workers=1 if quick else None)
    stacks = {width: job_results[f"width {width}"] for width in widths}
    drawn_widths = widths if quick else SHOWN
    return {
        "settings": {
            **sizes,
            "level": LEVEL,
            "ruined_below": RUINED,
            "nets": sizes["count"] * len(widths),
            "rows": stacks[widths[0]]["rows"],
        },
        "narrow": {name: _narrow_bars(stacks, name) for name in work.CALIBRATIONS},
        "widths": {
            width: {name: _summary(stack[name]["each"]) for name in work.CALIBRATIONS}
            for width, stack in stacks.items()
        },
        "trends": {name: _trends(stacks, name) for name in work.CALIBRATIONS},
        "shown": {
            width: stack["paper"]["bins"]
            for width, stack in stacks.items()
            if width in drawn_widths
        },
    }


def _summary(networks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means with standard errors, and medians with quartiles, over the networks of one width."""
    of_bars = [network["scores"] for network in networks]
    of_constant = [network["constant"]["scores"] for network in networks]
    means = scores.over_seeds(of_bars)
    return {
        "scores": {name: pair for name, pair in means.items() if name not in MEANINGLESS},
        "median": quartiles_of_each(of_bars),
        "constant": {
            "scores": scores.over_seeds(of_constant),
            "median": quartiles_of_each(of_constant),
        },
        "smallest_bar": quartiles([network["smallest_bar"] for network in networks]),
        "least_bar": min(network["smallest_bar"] for network in networks),
        "ruined": sum(network["scores"]["gain"] < RUINED for network in networks),
    }


def _narrow_bars(stacks: Stacks, calibration: str) -> dict[str, Any]:
    """How many networks of all widths a bar close to zero ruins, and how close the closest is."""
    networks = [network for stack in stacks.values() for network in stack[calibration]["each"]]
    return {
        "ruined": sum(network["scores"]["gain"] < RUINED for network in networks),
        "least_bar": min(network["smallest_bar"] for network in networks),
    }


def _trends(stacks: Stacks, calibration: str) -> dict[str, Any]:
    """The trend of every score of a calibration with the width."""
    by_width = {}
    for width, stack in stacks.items():
        networks = stack[calibration]["each"]
        by_width[width] = [with_distances(network["scores"], LEVEL) for network in networks]
    return {name: trend(by_width, name) for name in BETTER}
