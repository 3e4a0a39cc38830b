"""The benchmark of probabilistic backpropagation: the paper's table, with rivals run beside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from experiments.baselines import deep_ensemble, mc_dropout
from experiments.data import uci
from experiments.data.benchmark import (
    OFFICIAL,
    STEPS,
    copies,
    divisions,
    split_count,
    training_lists,
    width,
)
from experiments.frame.jobs import results
from experiments.frame.outcome import Outcome
from experiments.studies.uci import page, rivals, texts
from experiments.studies.uci.entries import entry
from experiments.studies.uci.parts import (
    FULL,
    QUICK,
    SETS,
    WHOLE,
    WORK,
    Sizes,
    effort,
    own_parts,
    rival_parts,
)
from experiments.training.protocol import Protocol


def run(*, quick: bool, seed: int) -> Outcome:
    """Train what does not come with the project, judge everything; then tables and figures."""
    sizes = (
        QUICK if quick else replace(FULL, sets=(*SETS, *([WHOLE] * (uci.missing(WHOLE) is None))))
    )
    rows = {name: uci.read(name) for name in sizes.sets}
    splits = {name: min(sizes.splits, split_count(name)) for name in rows}
    jobs = [
        job
        for name, one in rows.items()
        for job in (
            *own_parts(name, splits[name], sizes, seed),
            *rival_parts(name, len(one.x), splits[name], sizes, seed),
        )
    ]
    jobs.sort(key=lambda job: -effort(job, len(rows[job.arguments["name"]].x)))
    done = results("uci", jobs, keep=not quick, workers=1 if quick else None)
    found = {
        name: entry(
            parts_of(name, done),
            name=name,
            splits=splits[name],
            rows=len(one.x),
            inputs=one.x.shape[1],
            step=STEPS.get(name),
            listed=list_sizes(one),
            copies=copies(one, divisions(one, splits[name], OFFICIAL, seed)),
            settings=settings(one, sizes),
            seed=seed,
        )
        for name, one in rows.items()
    }
    found = shorter(found)
    return Outcome("The benchmark of probabilistic backpropagation", found, page.entries(found))


def shorter(found: Any, digits: int = 5) -> Any:
    """The same with few digits, fewer of single splits, so that the file stays small."""
    if isinstance(found, dict):
        few = {"per_split": 4, "paired": 4, "ratio": 4, "new_rows": 3, "paired_new": 3, "chosen": 3}
        return {key: shorter(one, few.get(key, digits)) for key, one in found.items()}
    if isinstance(found, list | tuple):
        return [shorter(value, digits) for value in found]
    return float(f"{found:.{digits}g}") if isinstance(found, float) else found


def parts_of(name: str, done: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The results of a set's jobs by part, each in the order of the splits."""
    of_set = {job: result for job, result in done.items() if job.split(", ")[0] == name}
    return {part: [of_set[job] for job in of_set if job.split(", ")[1] == part] for part in WORK}


def list_sizes(rows: uci.Rows) -> dict[str, int]:
    """Rows of a training list and of a test list."""
    (first,) = divisions(rows, 1, OFFICIAL, 0)
    return {"train": training_lists([first]).shape[1], "test": len(first.test)}


def settings(rows: uci.Rows, sizes: Sizes) -> dict[str, Any]:
    """What the page tells of the protocol."""
    own, long, name = deep_ensemble.OWN, deep_ensemble.LONG, rows.name
    listed = list_sizes(rows)["train"]
    return {
        **{key: value for key, value in asdict(sizes).items() if key not in ("sets", "splits")},
        "published_lists": bool(rows.splits),
        "hidden": width(name),
        "batch": Protocol().batch,
        "rate": Protocol().rate,
        "members": deep_ensemble.MEMBERS,
        "deep_ensemble": {
            "batch": own.batch,
            "rate": own.rate,
            "named_rate": deep_ensemble.NAMED_RATE,
        },
        "deep_ensemble_400": {
            "label": texts.LABELS["deep_ensemble_400"],
            "batch": long.batch,
            "rate": long.rate,
        },
        "mc_dropout": {
            "batch": rivals.BATCH,
            "steps": math.ceil(listed / rivals.BATCH) * sizes.epochs,
            "probabilities": mc_dropout.PROBABILITIES,
            "precisions": rivals.PRECISIONS[name],
        },
    }
