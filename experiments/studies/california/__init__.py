"""Error bars inside and outside the training domain, on California housing (paper, Sec. 4.5)."""

from __future__ import annotations

from typing import Any

from experiments.data.california import NAMES
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome, Picture, Table
from experiments.judging.error_bars import CLEARLY, FOLDS
from experiments.judging.floors import DRAWS
from experiments.studies.california import drawing, texts, work
from experiments.studies.california.averages import limits, summary
from experiments.studies.california.tables import (
    detection_table,
    difference_table,
    domain_table,
    limit_table,
)

FULL = {"count": 10, "epochs": 400, "hidden": 128, "decay": 1e-3, "bin_size": 100, "most": None}
QUICK = {**FULL, "count": 2, "epochs": 4, "hidden": 32, "bin_size": 25, "most": 2000}
HISTOGRAM = 60
"""Bins between -3 and 3; the threshold is an edge."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Train on one side of the threshold, judge on both."""
    found = numbers(QUICK if quick else FULL, seed, keep=not quick)
    page: list[str | Table | Picture] = [
        *texts.opening(found),
        Picture("longitude", drawing.longitudes(found), texts.longitude_caption(found)),
        domain_table(found, "inside", texts.inside_caption(found)),
        limit_table(found, texts.limit_caption(found)),
        domain_table(found, "outside", texts.OUTSIDE, "offset"),
        detection_table(found, texts.DETECTION),
        difference_table(found, texts.DIFFERENCES),
        Picture("paper", drawing.both_sides(found, "paper"), texts.parity_caption(found, "paper")),
        Picture("best", drawing.both_sides(found, "best"), texts.parity_caption(found, "best")),
        Picture("nets", drawing.of_each_net(found), texts.NETS),
        *texts.closing(found),
    ]
    return Outcome("In and out of the domain: California housing", found, page)


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
            "level": texts.LEVEL,
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
