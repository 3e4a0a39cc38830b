"""The error bar of a mean of many predictions against its error over many retrained nets."""

from __future__ import annotations

from dataclasses import asdict

from experiments.data import uci
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome
from experiments.studies.propagation import page, work
from experiments.studies.propagation.work import Sizes

FULL = {
    "sets": ("kin8nm", "power", "protein"),
    "groups": (1, 2, 5, 10, 20, 50, 100, 200, 500),
    "epochs": 200,
    "rows": (Sizes(), Sizes(train=5000, nets=60)),
}
QUICK = {
    "sets": ("kin8nm",),
    "groups": (1, 5, 20),
    "epochs": 20,
    "rows": (
        Sizes(train=120, valid=80, test=20, nets=6, judged=2),
        Sizes(train=240, valid=80, test=20, nets=4, judged=2),
    ),
}


def run(*, quick: bool, seed: int) -> Outcome:
    """Train, calibrate and judge all nets of each set and number of training rows."""
    sizes = QUICK if quick else FULL
    shared = {"groups": sizes["groups"], "epochs": sizes["epochs"], "seed": seed}
    jobs = [
        Job(
            f"{name}, {rows.train}",
            work.one_set,
            {"name": name, **asdict(rows), **shared},
            uci.names(name),
        )
        for rows in sizes["rows"][::-1]  # the longest first
        for name in sizes["sets"]
    ]
    done = results("propagation", jobs, keep=not quick, workers=1 if quick else None)
    few, many = (
        {name: done[f"{name}, {rows.train}"] for name in sizes["sets"]} for rows in sizes["rows"]
    )
    for one in many.values():
        own, share = one[work.DEFAULT], one["independence"]
        one["least"] = {kind: share * own[f"ratio_of_{kind}"] for kind in page.KINDS}
    numbers = {
        "sets": few,
        "larger": many,
        "groups": sizes["groups"],
        "targets": {name: list(bounds) for name, bounds in page.TARGETS.items()},
    }
    entries = page.entries(numbers, sizes["rows"], sizes["epochs"])
    return Outcome("Means of many predictions", numbers, entries)
