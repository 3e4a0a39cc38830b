"""What each part of the default error bars brings, and what the guard costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.data import uci
from experiments.data.california import NAMES
from experiments.data.outside import SETS as OUTSIDE
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome, mean_and_error
from experiments.judging.predictive import differences
from experiments.studies.ablation import page, work
from experiments.training import kept

SETS = ("concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
SINGLE = ("rmse", "nll", "cell", "crps", "coverage_90", "interval_score")

STEPS = (
    ("floor", "paper"),
    ("floor_t", "floor"),
    ("head_t", "floor_t"),
    ("all", "head_t"),
    ("all", "paper"),
    ("all", "unguarded"),
)
"""What is compared: each part with what was there before it, the whole, the guard."""


@dataclass(frozen=True)
class Sizes:
    """Of a run.

    Attributes:
        uci: sets, ...
        outside: ... sets with a domain, ...
        california: ... and nets of California.
        splits: of each UCI set.
        nets: of each of the others.
        epochs: of the nets.
    """

    uci: tuple[str, ...] = SETS
    outside: tuple[str, ...] = OUTSIDE
    california: tuple[str, ...] = ("relu", "silu")
    splits: int = 5
    nets: int = 10
    epochs: int = kept.EPOCHS


FULL = Sizes()
QUICK = Sizes(("yacht",), ("energy",), (), splits=2, nets=2, epochs=15)


def run(*, quick: bool, seed: int) -> Outcome:
    """Judge the nets that come with the project."""
    sizes = QUICK if quick else FULL
    asked = jobs(sizes, seed)
    done = results("ablation", asked, keep=not quick, workers=1 if quick else None)
    found = {job.name: entry(done[job.name]) for job in asked}
    return Outcome("What each part of the error bars brings", found, page.entries(found))


def jobs(sizes: Sizes, seed: int) -> list[Job]:
    """One a set."""
    found = []
    for study, names, count in (
        ("uci", sizes.uci, sizes.splits),
        ("outside", sizes.outside, sizes.nets),
        ("california", sizes.california, sizes.nets),
    ):
        for name in names:
            asked = {"study": study, "name": name, "count": count, "seed": seed}
            asked |= {"epochs": sizes.epochs, "nets": kept.digest(study)}
            data = NAMES if study == "california" else uci.names(name)
            found.append(Job(f"{study}, {name}", work.parts, asked, data))
    return found


def entry(part: Mapping[str, Any]) -> dict[str, Any]:
    """Means over the nets, and paired differences."""
    forms, rows = part["forms"], part["rows"]
    sides = [side for side in ("inside", "outside") if side in forms["paper"][0]]
    listed = {"test": rows["test"], "train": rows["train"] + rows["valid"]}
    return {
        "nets": len(forms["paper"]),
        "rows": rows,
        "committed": part["committed"],
        "forms": {form: averaged(each, sides) for form, each in forms.items()},
        "differences": {
            f"{one} - {other}": {
                side: differences(
                    [net[side] for net in forms[one]], [net[side] for net in forms[other]], **listed
                )
                for side in sides
            }
            for one, other in STEPS
        },
        "auroc": list(mean_and_error(part["auroc"])) if part["auroc"] else None,
        "seconds": part["seconds"],
    }


def averaged(each: Sequence[Mapping[str, Any]], sides: Sequence[str]) -> dict[str, Any]:
    """[mean, standard error] of every number on each side, and of the bar's AUROC."""
    found: dict[str, Any] = {
        side: {
            name: list(mean_and_error([one[side][name] for one in each]))
            for name in SINGLE
            if name in each[0][side]
        }
        | {"lowest_coverage": min(one[side]["coverage_90"] for one in each)}
        for side in sides
    }
    for side in sides:
        fifths = zip(*(one[side]["fifths_of_bar"] for one in each), strict=True)
        found[side]["fifths_of_bar"] = [math.fsum(part) / len(part) for part in fifths]
    if "outside" in sides:
        found["auroc"] = list(mean_and_error([one["auroc"] for one in each]))
    return found
