"""What each part of the default error bars brings, and what the guard costs.

One job a set judges trained networks by every form of the error bars (`work.judged_forms`); `entry`
averages over the networks and pairs the forms network by network.
"""

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
"""Scores that are one number a network."""

STEPS = (
    ("mixture", "paper"),
    ("all", "mixture"),
    ("all", "paper"),
    ("all", "unguarded"),
)
"""Forms that are compared: each part with what was there before it, the whole, the guard."""

OfNetworks = Sequence[Mapping[str, Any]]
"""One entry a network: the scores of one form on each side."""


@dataclass(frozen=True)
class Sizes:
    """The size of a run.

    Attributes:
        uci: UCI sets on their official splits.
        outside: UCI sets with a domain.
        california: kinds of California's networks.
        splits: the splits of each UCI set.
        nets: the networks of each of the other sets.
        epochs: the epochs of the networks.
    """

    uci: tuple[str, ...] = SETS
    outside: tuple[str, ...] = OUTSIDE
    california: tuple[str, ...] = ("relu", "silu")
    splits: int = 5
    nets: int = 10
    epochs: int = kept.EPOCHS


FULL = Sizes()
QUICK = Sizes(uci=("yacht",), outside=("energy",), california=(), splits=2, nets=2, epochs=15)


def run(*, quick: bool, seed: int) -> Outcome:
    """Judge the networks that come with the project."""
    set_jobs = jobs(QUICK if quick else FULL, seed)
    job_results = results("ablation", set_jobs, keep=not quick, workers=1 if quick else None)
    numbers = {job.name: entry(job_results[job.name]) for job in set_jobs}
    return Outcome("What each part of the error bars brings", numbers, page.entries(numbers))


def jobs(sizes: Sizes, seed: int) -> list[Job]:
    """One job a set."""
    set_jobs = [_job("uci", name, sizes.splits, sizes.epochs, seed) for name in sizes.uci]
    for name in sizes.outside:
        set_jobs.append(_job("outside", name, sizes.nets, sizes.epochs, seed))
    for name in sizes.california:
        set_jobs.append(_job("california", name, sizes.nets, sizes.epochs, seed))
    return set_jobs


def _job(study: str, name: str, count: int, epochs: int, seed: int) -> Job:
    """The job of one set, with so many networks."""
    arguments = {
        "study": study,
        "name": name,
        "count": count,
        "seed": seed,
        "epochs": epochs,
        "nets": kept.digest(study),
    }
    data = NAMES if study == "california" else uci.names(name)
    return Job(f"{study}, {name}", work.judged_forms, arguments, data)


def entry(result: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one set: means over the networks, and paired differences.

    Args:
        result: what `work.judged_forms` returned.
    """
    forms = result["forms"]
    rows = result["rows"]
    sides = [side for side in ("inside", "outside") if side in forms["paper"][0]]
    paired: dict[str, Any] = {}
    for form, earlier in STEPS:
        paired[f"{form} - {earlier}"] = {
            side: differences(
                [network[side] for network in forms[form]],
                [network[side] for network in forms[earlier]],
                test=rows["test"],
                train=rows["train"] + rows["valid"],
            )
            for side in sides
        }
    auroc = None
    if result["auroc"]:
        auroc = list(mean_and_error(result["auroc"]))
    return {
        "nets": len(forms["paper"]),
        "rows": rows,
        "committed": result["committed"],
        "forms": {form: averaged(networks, sides) for form, networks in forms.items()},
        "differences": paired,
        "auroc": auroc,
        "seconds": result["seconds"],
    }


def averaged(networks: OfNetworks, sides: Sequence[str]) -> dict[str, Any]:
    """[mean, standard error] of every score of a form on each side, and of the bar's AUROC."""
    averages: dict[str, Any] = {}
    for side in sides:
        scores = [network[side] for network in networks]
        of_side: dict[str, Any] = {
            name: list(mean_and_error([score[name] for score in scores]))
            for name in SINGLE
            if name in scores[0]
        }
        of_side["lowest_coverage"] = min(score["coverage_90"] for score in scores)
        # One tuple a fifth, of its coverages in all networks.
        columns = zip(*(score["fifths_of_bar"] for score in scores), strict=True)
        of_side["fifths_of_bar"] = [math.fsum(column) / len(column) for column in columns]
        averages[side] = of_side
    if "outside" in sides:
        averages["auroc"] = list(mean_and_error([network["auroc"] for network in networks]))
    return averages
