"""The parts of the benchmark: what is computed of every set, and how it is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.data import uci
from experiments.data.benchmark import OFFICIAL, RANDOM, width
from experiments.frame.jobs import Job
from experiments.studies.uci import others, rivals, work
from experiments.training import kept

SETS = ("concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
WHOLE = "year"
"""Joins them where its file is there."""

FIVE = "five"
WORK = {
    "deep_ensemble_400": 10,
    "mc_dropout": 8,
    OFFICIAL: 6,
    FIVE: 6,
    RANDOM: 1,
    "deep_ensemble": 1,
    **dict.fromkeys(others.METHODS, 0.5),
}
"""Rough time of a part a row and split: the longest begin first, so that all end together."""

MOST = 50_000
"""Rows times splits of one part of the rivals."""


@dataclass(frozen=True)
class Sizes:
    """Of a run.

    Attributes:
        sets: names.
        splits: at most, of each.
        epochs: of the rigidities' nets, of MC dropout and of the long ensembles.
        own_epochs: of the ensembles by their authors' protocol.
        selecting: passes while MC dropout chooses.
        passes: of MC dropout in the end.
    """

    sets: tuple[str, ...] = SETS
    splits: int = 20
    epochs: int = 400
    own_epochs: int = 40
    selecting: int = 100
    passes: int = 10_000


FULL = Sizes()
QUICK = Sizes(("energy", "yacht"), 3, epochs=15, own_epochs=5, selecting=10, passes=50)


def own_parts(name: str, splits: int, sizes: Sizes, seed: int) -> list[Job]:
    """The jobs of a set that judge error bars of the rigidities' nets."""
    common = {"name": name, "splits": splits, "seed": seed, "epochs": sizes.epochs}
    common["nets"] = kept.digest("uci")
    arguments: dict[str, tuple[Any, dict[str, Any]]] = {
        OFFICIAL: (work.last_layers, {**common, "drawing": OFFICIAL}),
        RANDOM: (work.last_layers, {**common, "drawing": RANDOM}),
        FIVE: (work.five, common),
    }
    for method in others.METHODS:
        if method not in others.NEEDS or others.NEEDS[method]():
            arguments[method] = (others.bars, {**common, "method": method})
    return [Job(f"{name}, {part}", *of, uci.names(name)) for part, of in arguments.items()]


def rival_parts(name: str, rows: int, splits: int, sizes: Sizes, seed: int) -> list[Job]:
    """The jobs of a set that train nets of their own, some splits each."""
    passes = {"selecting": sizes.selecting, "passes": sizes.passes}
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "mc_dropout": (rivals.dropout, {"epochs": sizes.epochs, **passes})
    }
    for method, epochs in zip(rivals.PROTOCOLS, (sizes.own_epochs, sizes.epochs), strict=True):
        ways[method] = (rivals.ensembles, {"method": method, "epochs": epochs})
    each = max(1, MOST // rows)
    jobs = []
    for part, (function, own) in ways.items():
        for first in range(0, splits, each):
            some = min(each, splits - first)
            asked = {"name": name, "first": first, "splits": some, "seed": seed, **own}
            title = f"{name}, {part}, {first}"
            jobs.append(Job(title, function, asked, uci.names(name)))
    return jobs


def effort(job: Job, rows: int) -> float:
    """Rough time of a part, to begin with the longest."""
    part = job.name.split(", ")[1]
    # The nets of `protein` and `year` are twice as wide.
    return WORK[part] * rows * job.arguments["splits"] * width(job.arguments["name"])
