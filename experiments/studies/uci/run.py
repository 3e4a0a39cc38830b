"""The benchmark of probabilistic backpropagation: the paper's table, with rivals run beside.

`run` cuts the work into jobs: those of `own_jobs` judge error bars of the rigidities' networks
(`work`), those of `rival_jobs` train MC dropout and deep ensembles (`rivals`). Their results become
one entry a set (`summaries`), and the entries become the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.baselines import deep_ensemble, mc_dropout
from experiments.data import uci
from experiments.data.benchmark import (
    OFFICIAL,
    RANDOM,
    STEPS,
    copies,
    divisions,
    split_count,
    training_lists,
    width,
)
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome
from experiments.studies.uci import page, rivals, work
from experiments.studies.uci.summaries import entry
from experiments.training import kept
from experiments.training.protocol import Protocol

SETS = ("concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
LARGEST = "year"
"""A ninth set, which joins the others where its file is there."""

FIVE = "five"
"""The kind of jobs on the mean of five networks."""

RELATIVE_TIME = {
    "deep_ensemble_400": 10,
    "mc_dropout": 8,
    OFFICIAL: 6,
    FIVE: 6,
    RANDOM: 1,
    "deep_ensemble": 1,
    **dict.fromkeys(work.OTHER_METHODS, 0.5),
}
"""Rough time of a job for each row and split, by its kind.

The longest jobs begin first, so that all workers end together.
"""

MOST = 50_000
"""The largest number of rows times splits in one job of the rivals."""

FEWER_DIGITS = {
    "per_split": 4,
    "paired": 4,
    "ratio": 4,
    "new_rows": 3,
    "paired_new": 3,
    "chosen": 3,
}
"""Digits of the blocks of an entry that have fewer than the others."""


@dataclass(frozen=True)
class Sizes:
    """The size of a run.

    Attributes:
        sets: names of the sets.
        splits: the largest number of splits of a set.
        epochs: of the rigidities' networks, of MC dropout and of the long ensembles.
        own_epochs: of the ensembles by their authors' protocol.
        selecting: passes while MC dropout chooses.
        passes: passes of MC dropout in the end.
    """

    sets: tuple[str, ...] = SETS
    splits: int = 20
    epochs: int = 400
    own_epochs: int = 40
    selecting: int = 100
    passes: int = 10_000


FULL = Sizes()
QUICK = Sizes(sets=("energy", "yacht"), splits=3, epochs=15, own_epochs=5, selecting=10, passes=50)


def run(*, quick: bool, seed: int) -> Outcome:
    """Train what does not come with the project, judge everything; then tables and figures."""
    sizes = QUICK if quick else FULL
    if not quick and uci.missing(LARGEST) is None:
        sizes = replace(FULL, sets=(*SETS, LARGEST))
    sets = {name: uci.read(name) for name in sizes.sets}
    splits = {name: min(sizes.splits, split_count(name)) for name in sets}

    jobs = []
    for name, rows in sets.items():
        jobs += own_jobs(name, splits[name], sizes, seed)
        jobs += rival_jobs(name, len(rows.x), splits[name], sizes, seed)
    jobs.sort(key=lambda job: -effort(job, len(sets[job.arguments["name"]].x)))
    job_results = results("uci", jobs, keep=not quick, workers=1 if quick else None)

    entries = {}
    for name, rows in sets.items():
        about = {
            "splits": splits[name],
            "rows": len(rows.x),
            "inputs": rows.x.shape[1],
            "step": STEPS.get(name),
            "listed": list_sizes(rows),
            "copies": copies(rows, divisions(rows, splits[name], OFFICIAL, seed)),
            "settings": settings(rows, sizes),
        }
        by_kind = results_by_kind(name, job_results)
        entries[name] = entry(by_kind, name=name, seed=seed, about=about)
    numbers = rounded(entries)
    title = "The benchmark of probabilistic backpropagation"
    return Outcome(title, numbers, page.entries(numbers))


# --- jobs ----------------------------------------------------------------------------------------


def own_jobs(name: str, splits: int, sizes: Sizes, seed: int) -> list[Job]:
    """The jobs of a set that judge error bars of the rigidities' networks.

    Methods whose package is not installed have none.
    """
    common: dict[str, Any] = {
        "name": name,
        "splits": splits,
        "seed": seed,
        "epochs": sizes.epochs,
        "nets": kept.digest("uci"),
    }
    data = uci.names(name)
    jobs = [
        Job(f"{name}, {OFFICIAL}", work.last_layers, {**common, "drawing": OFFICIAL}, data),
        Job(f"{name}, {RANDOM}", work.last_layers, {**common, "drawing": RANDOM}, data),
        Job(f"{name}, {FIVE}", work.mean_of_five, common, data),
    ]
    for method in work.OTHER_METHODS:
        if method not in work.INSTALLED or work.INSTALLED[method]():
            arguments = {**common, "method": method}
            jobs.append(Job(f"{name}, {method}", work.other_bars, arguments, data))
    return jobs


def rival_jobs(name: str, rows: int, splits: int, sizes: Sizes, seed: int) -> list[Job]:
    """The jobs of a set that train networks of their own, for some splits each.

    Args:
        name: the name of the set.
        rows: the number of its rows.
        splits: the number of its splits.
        sizes: the size of the run.
        seed: the seed of the networks.
    """
    dropout = {"epochs": sizes.epochs, "selecting": sizes.selecting, "passes": sizes.passes}
    short = {"method": "deep_ensemble", "epochs": sizes.own_epochs}
    long = {"method": "deep_ensemble_400", "epochs": sizes.epochs}
    methods: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "mc_dropout": (rivals.dropout, dropout),
        "deep_ensemble": (rivals.ensembles, short),
        "deep_ensemble_400": (rivals.ensembles, long),
    }
    splits_of_a_job = max(1, MOST // rows)
    jobs = []
    for method, (function, options) in methods.items():
        for first in range(0, splits, splits_of_a_job):
            arguments = {
                "name": name,
                "first": first,
                "splits": min(splits_of_a_job, splits - first),
                "seed": seed,
                **options,
            }
            jobs.append(Job(f"{name}, {method}, {first}", function, arguments, uci.names(name)))
    return jobs


def effort(job: Job, rows: int) -> float:
    """The rough time of a job on a set of so many rows, in arbitrary units."""
    kind = job.name.split(", ")[1]
    # The networks of `protein` and `year` are twice as wide.
    return RELATIVE_TIME[kind] * rows * job.arguments["splits"] * width(job.arguments["name"])


def results_by_kind(name: str, job_results: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The results of a set's jobs by kind, each in the order of the splits."""
    by_kind: dict[str, list[Any]] = {kind: [] for kind in RELATIVE_TIME}
    for job_name, result in job_results.items():
        # "<set>, <kind>" or "<set>, <kind>, <first split>"
        set_name, kind, *_ = job_name.split(", ")
        if set_name == name:
            by_kind[kind].append(result)
    return by_kind


# --- what the page tells of a set ----------------------------------------------------------------


def list_sizes(rows: uci.Rows) -> dict[str, int]:
    """The numbers of rows of a training list and of a test list."""
    (first,) = divisions(rows, 1, OFFICIAL, 0)
    return {"train": training_lists([first]).shape[1], "test": len(first.test)}


def settings(rows: uci.Rows, sizes: Sizes) -> dict[str, Any]:
    """What the page tells of the protocol."""
    of_run = asdict(sizes)
    del of_run["sets"], of_run["splits"]
    batches = math.ceil(list_sizes(rows)["train"] / rivals.BATCH)
    return {
        **of_run,
        "published_lists": bool(rows.splits),
        "hidden": width(rows.name),
        "batch": Protocol().batch,
        "rate": Protocol().rate,
        "members": deep_ensemble.MEMBERS,
        "deep_ensemble": {
            "batch": deep_ensemble.OWN.batch,
            "rate": deep_ensemble.OWN.rate,
            "named_rate": deep_ensemble.NAMED_RATE,
        },
        "deep_ensemble_400": {
            "label": page.LABELS["deep_ensemble_400"],
            "batch": deep_ensemble.LONG.batch,
            "rate": deep_ensemble.LONG.rate,
        },
        "mc_dropout": {
            "batch": rivals.BATCH,
            "steps": batches * sizes.epochs,
            "probabilities": mc_dropout.PROBABILITIES,
            "precisions": rivals.PRECISIONS[rows.name],
        },
    }


def rounded(numbers: Any, digits: int = 5) -> Any:
    """Round all numbers to few significant digits, so that the file stays small.

    Args:
        numbers: nested mappings, sequences and numbers.
        digits: the significant digits, except in the blocks of `FEWER_DIGITS`.
    """
    if isinstance(numbers, dict):
        return {
            key: rounded(value, FEWER_DIGITS.get(key, digits)) for key, value in numbers.items()
        }
    if isinstance(numbers, list | tuple):
        return [rounded(value, digits) for value in numbers]
    if isinstance(numbers, float):
        return float(f"{numbers:.{digits}g}")
    return numbers
