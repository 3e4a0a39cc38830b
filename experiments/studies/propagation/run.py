"""The error bar of a mean of many predictions against its error over many retrained networks.

For every set, many networks are trained on random splits with few training rows, and fewer networks
on splits with more rows. `work.one_set` trains, calibrates and judges all networks of one set and
one number of training rows; the page compares predicted with actual errors.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from experiments.data import uci
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Found, Outcome
from experiments.studies.propagation import page, work
from experiments.studies.propagation.work import Sizes

FULL: dict[str, Any] = {
    "sets": ("kin8nm", "power", "protein"),
    "groups": (1, 2, 5, 10, 20, 50, 100, 200, 500),
    "epochs": 200,
    "rows": (Sizes(), Sizes(train=5000, nets=60)),
}
QUICK: dict[str, Any] = {
    "sets": ("kin8nm",),
    "groups": (1, 5, 20),
    "epochs": 20,
    "rows": (
        Sizes(train=120, valid=80, test=20, nets=6, judged=2),
        Sizes(train=240, valid=80, test=20, nets=4, judged=2),
    ),
}
"""Names of the sets, sizes of the groups whose means are taken, epochs of the training, and the
sizes of the splits: first with few training rows, then with more."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, calibrate and judge all networks of each set and number of training rows."""
    settings = QUICK if quick else FULL
    few, many = settings["rows"]
    jobs = [
        *_jobs(many, settings, seed),  # the longest first
        *_jobs(few, settings, seed),
    ]
    parts = results("propagation", jobs, keep=not quick, workers=1 if quick else None)

    sets = {name: parts[_job_name(name, few)] for name in settings["sets"]}
    larger = {name: parts[_job_name(name, many)] for name in settings["sets"]}
    for numbers_of_set in larger.values():
        numbers_of_set["least"] = _least_ratios(numbers_of_set)
    numbers = {
        "sets": sets,
        "larger": larger,
        "groups": settings["groups"],
        "targets": {name: list(bounds) for name, bounds in page.TARGETS.items()},
    }
    entries = page.entries(numbers, settings["rows"], settings["epochs"])
    return Outcome("Means of many predictions", numbers, entries)


def _jobs(sizes: Sizes, settings: dict[str, Any], seed: int) -> list[Job]:
    """One job for each set, with splits of these sizes."""
    jobs = []
    for name in settings["sets"]:
        arguments = {
            "name": name,
            **asdict(sizes),
            "groups": settings["groups"],
            "epochs": settings["epochs"],
            "seed": seed,
        }
        jobs.append(Job(_job_name(name, sizes), work.one_set, arguments, uci.names(name)))
    return jobs


def _job_name(name: str, sizes: Sizes) -> str:
    return f"{name}, {sizes.train}"


def _least_ratios(numbers: Found) -> Found:
    """Predicted over actual spread, had the training rows alone caused the actual one.

    Training sets that share rows make the actual spread too small by the factor "independence".
    """
    default = numbers[work.DEFAULT]
    share = numbers["independence"]
    return {kind: share * default[f"ratio_of_{kind}"] for kind in page.KINDS}
