"""The benchmark of probabilistic backpropagation: the paper's table, with rivals run beside."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.baselines import deep_ensemble, laplace, mc_dropout
from experiments.data import uci
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome
from experiments.judging import error_bars
from experiments.studies.uci import page, work
from experiments.studies.uci.entries import BASELINES, entry
from experiments.studies.uci.samples import (
    OFFICIAL,
    RANDOM,
    copies,
    divisions,
    training_lists,
    width,
)
from experiments.training.protocol import Protocol

SETS = ("concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
WHOLE = "year"
"""Joins them where its file is there."""

SPLITS = {"protein": 5, "year": 1}

WORK = {"deep_ensemble_400": 10, "mc_dropout": 8, RANDOM: 4, OFFICIAL: 5, "deep_ensemble": 1}
"""Rough time of a part a row and split: the longest begin first, so that all end together."""


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


def run(*, quick: bool, seed: int) -> Outcome:
    """Train everything, or take what an earlier run has left; then tables and figures."""
    sizes = (
        QUICK if quick else replace(FULL, sets=(*SETS, *([WHOLE] * (uci.missing(WHOLE) is None))))
    )
    rows = {name: uci.read(name) for name in sizes.sets}
    splits = {name: min(sizes.splits, SPLITS.get(name, 20)) for name in rows}
    jobs = [
        job
        for name in rows
        for job in parts(name, splits[name], sizes, seed, with_laplace=laplace.installed())
    ]
    jobs.sort(key=lambda job: -_work(job, len(rows[job.arguments["name"]].x)))
    done = results("uci", jobs, keep=not quick, workers=1 if quick else None)
    found = {
        name: entry(
            {part: done[f"{name}, {part}"] for part in WORK},
            name=name,
            splits=splits[name],
            rows=len(one.x),
            inputs=one.x.shape[1],
            copies=copies(one, divisions(one, splits[name], OFFICIAL, seed)),
            settings=settings(one, sizes),
        )
        for name, one in rows.items()
    }
    return Outcome("The benchmark of probabilistic backpropagation", found, page.entries(found))


def parts(name: str, splits: int, sizes: Sizes, seed: int, *, with_laplace: bool) -> list[Job]:
    """The jobs of a set."""
    common: dict[str, Any] = {"name": name, "splits": splits, "seed": seed}
    own = {**common, "epochs": sizes.epochs, "laplace": with_laplace}
    passes = {"selecting": sizes.selecting, "passes": sizes.passes}
    arguments = {
        OFFICIAL: (work.last_layers, {**own, "drawing": OFFICIAL}),
        RANDOM: (work.last_layers, {**own, "drawing": RANDOM, "laplace": False}),
        "mc_dropout": (work.dropout, {**common, "epochs": sizes.epochs, **passes}),
    }
    for method, epochs in zip(BASELINES[1:], (sizes.own_epochs, sizes.epochs), strict=True):
        arguments[method] = (work.ensembles, {**common, "method": method, "epochs": epochs})
    return [Job(f"{name}, {part}", *of, uci.names(name)) for part, of in arguments.items()]


def settings(rows: uci.Rows, sizes: Sizes) -> dict[str, Any]:
    """What the page tells of the protocol."""
    own, long, name = deep_ensemble.OWN, deep_ensemble.LONG, rows.name
    listed = training_lists(divisions(rows, 1, OFFICIAL, 0)).shape[1]
    return {
        **{key: value for key, value in asdict(sizes).items() if key not in ("sets", "splits")},
        "published_lists": bool(rows.splits),
        "hidden": width(name),
        "batch": Protocol().batch,
        "rate": Protocol().rate,
        "best": {"folds": error_bars.FOLDS, "clearly": error_bars.CLEARLY},
        "members": deep_ensemble.MEMBERS,
        "deep_ensemble": {
            "batch": own.batch,
            "rate": own.rate,
            "named_rate": deep_ensemble.NAMED_RATE,
        },
        "deep_ensemble_400": {"batch": long.batch, "rate": long.rate},
        "mc_dropout": {
            "batch": work.BATCH,
            "steps": math.ceil(listed / work.BATCH) * sizes.epochs,
            "probabilities": mc_dropout.PROBABILITIES,
            "precisions": work.PRECISIONS[name],
        },
    }


def _work(job: Job, rows: int) -> int:
    part = job.name.split(", ")[1]
    # The nets of `protein` and `year` are twice as wide.
    return WORK[part] * rows * job.arguments["splits"] * width(job.arguments["name"])
