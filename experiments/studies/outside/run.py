"""What error bars cover outside the domain of the training, on many sets, domains and networks.

One job a set trains networks on domains of the set and judges their error bars on both sides
(`work.judged`). One job for each other kind of networks does so on tasks of their own, with and
without novelty (`work.of_kind`). `numbers` averages over all networks, and over groups of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.data import uci
from experiments.data.california import NAMES
from experiments.data.domains import KINDS, SETS
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome
from experiments.studies.outside import page, tasks, work

NEITHER = (0.85, 0.995)
"""Coverages of 90 % intervals between which a network's bars are neither narrow nor idle."""

BESIDE = "unguarded"
"""The form with which the others are compared, network by network."""

Networks = Sequence[Mapping[str, Any]]
"""One entry a network, as `work.judged` gives it, with its set."""


@dataclass(frozen=True)
class Sizes:
    """The size of a run.

    Attributes:
        sets: names of the sets.
        count: domains of each kind, for each set.
        steps: the steps of a network's training.
        kinds: other kinds of networks.
        kind_seeds: networks of every task of a kind.
        kind_steps: the steps of their training.
        kind_tasks: the most tasks of a kind; None for all.
    """

    sets: tuple[str, ...] = SETS
    count: int = 2
    steps: int = work.STEPS
    kinds: tuple[str, ...] = tuple(tasks.KINDS)
    kind_seeds: int = 3
    kind_steps: int = 1000
    kind_tasks: int | None = None


FULL = Sizes()
QUICK = Sizes(
    sets=("yacht",),
    count=1,
    steps=60,
    kinds=("recurrent",),
    kind_seeds=1,
    kind_steps=20,
    kind_tasks=1,
)


def run(*, quick: bool, seed: int) -> Outcome:
    """Train on the domains, judge on both sides."""
    sizes = QUICK if quick else FULL
    jobs = []
    for name in sizes.sets:
        arguments = {"name": name, "count": sizes.count, "seed": seed, "steps": sizes.steps}
        data = NAMES if name == "california" else uci.names(name)
        jobs.append(Job(name, work.judged, arguments, data))
    for kind in sizes.kinds:
        arguments = {
            "kind": kind,
            "seeds": sizes.kind_seeds,
            "seed": 100 * seed,
            "steps": sizes.kind_steps,
            "most": sizes.kind_tasks,
        }
        jobs.append(Job(kind, work.of_kind, arguments, _data(kind)))
    job_results = results("outside", jobs, keep=not quick, workers=1 if quick else None)
    by_set = {name: job_results[name] for name in sizes.sets}
    by_kind = {kind: job_results[kind] for kind in sizes.kinds}
    page_numbers = numbers(by_set, by_kind, seed)
    return Outcome("Outside the domain of the training", page_numbers, page.entries(page_numbers))


def _data(kind: str) -> list[str]:
    """The data files that the tasks of a kind read."""
    if kind != "layer-normed":
        return []
    return [file for name in tasks.SETS for file in uci.names(name)]


def numbers(by_set: Mapping[str, Any], by_kind: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Everything that the page shows.

    Args:
        by_set: the results of the jobs by the name of the set.
        by_kind: those of the other networks by their kind.
        seed: the seed of the run.
    """
    networks = []
    for name, result in by_set.items():
        networks += [{"set": name, **network} for network in result["nets"]]
    with_ensembles = [network for network in networks if "ensemble" in network["forms"]]
    forms = [*work.FORMS, "constant"]
    return {
        "settings": {
            "seed": seed,
            "nets": len(networks),
            "hidden": {name: list(protocol.hidden) for name, protocol in work.NETS.items()},
            "within": list(NEITHER),
            "beside": BESIDE,
        },
        "rows": {name: result["rows"] for name, result in by_set.items()},
        "seconds": {name: result["seconds"] for name, result in by_set.items()},
        "all": {form: summary(networks, form) for form in forms},
        "with_ensembles": {form: summary(with_ensembles, form) for form in [*forms, "ensemble"]},
        "sets": grouped(networks, "set", list(by_set), forms),
        "kinds": grouped(networks, "kind", KINDS, forms),
        "nets": grouped(networks, "net", list(work.NETS), forms),
        "auroc": statistics.fmean(network["auroc"] for network in networks),
        "each": [_coverage_outside(network) for network in networks],
        "kinds_of_networks": {
            kind: kind_summary(result["nets"]) for kind, result in by_kind.items()
        },
        "tasks": {kind: _by_task(result["nets"]) for kind, result in by_kind.items()},
        "seconds_of_kinds": {kind: result["seconds"] for kind, result in by_kind.items()},
    }


def kind_summary(networks: Networks) -> dict[str, Any]:
    """Means over the networks of a kind, as `work.of_kind` gives them, and their worst.

    Returns:
        The number of "nets"; for the default "with" and "without" novelty the coverage inside and
        outside, the lowest coverage outside of a network and shift, and mean and median NLL
        outside; what novelty changes in the NLL inside, as "nll_inside_change" of the mean and
        "nll_inside_worst" of a network.
    """
    changes = [
        network["inside"]["with"]["nll"] - network["inside"]["without"]["nll"]
        for network in networks
    ]
    kind_numbers: dict[str, Any] = {
        "nets": len(networks),
        "nll_inside_change": statistics.fmean(changes),
        "nll_inside_worst": max(changes),
    }
    for form in ("without", "with"):
        inside = [network["inside"][form] for network in networks]
        outside = [scores[form] for network in networks for scores in network["outside"].values()]
        coverage = [scores["coverage_90"] for scores in outside]
        nll = [scores["nll"] for scores in outside]
        kind_numbers[form] = {
            "coverage_inside": statistics.fmean(scores["coverage_90"] for scores in inside),
            "coverage_outside": statistics.fmean(coverage),
            "lowest_coverage_outside": min(coverage),
            "nll_outside": statistics.fmean(nll),
            "median_nll_outside": statistics.median(nll),
        }
    return kind_numbers


def _by_task(networks: Networks) -> list[dict[str, Any]]:
    """Means over the networks of each task of a kind, shift by shift."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for network in networks:
        for shift, scores in network["outside"].items():
            groups.setdefault((network["net"], shift), []).append(scores)
    rows = []
    for (name, shift), scores_of_networks in groups.items():
        row: dict[str, Any] = {"net": name, "shift": shift}
        row["rmse"] = statistics.fmean(scores["with"]["rmse"] for scores in scores_of_networks)
        for form in ("without", "with"):
            row[form] = statistics.fmean(
                scores[form]["coverage_90"] for scores in scores_of_networks
            )
        rows.append(row)
    return rows


def _coverage_outside(network: Mapping[str, Any]) -> dict[str, Any]:
    """What the intervals of one network cover outside, by form."""
    return {
        "set": network["set"],
        "domain": network["domain"],
        "net": network["net"],
        "coverage": {
            form: scores["outside"]["coverage_90"] for form, scores in network["forms"].items()
        },
    }


def grouped(
    networks: Networks, field: str, names: Sequence[str], forms: Sequence[str]
) -> dict[str, Any]:
    """The summaries of every form, group by group.

    Args:
        networks: all networks.
        field: the field of a network that names its group: "set", "kind" or "net".
        names: the names of the groups.
        forms: the forms to summarise.
    """
    groups = {}
    for name in names:
        members = [network for network in networks if network[field] == name]
        groups[name] = {form: summary(members, form) for form in forms}
    return groups


def summary(networks: Networks, form: str) -> dict[str, float]:
    """Scores of one form over the networks, some of them relative to the form `BESIDE`."""
    inside = [network["forms"][form]["inside"] for network in networks]
    outside = [network["forms"][form]["outside"] for network in networks]
    nll_changes = []
    log_ratios = []
    for network in networks:
        scores = network["forms"][form]
        base = network["forms"][BESIDE]
        nll_changes.append(scores["inside"]["nll"] - base["inside"]["nll"])
        ratio = scores["outside"]["interval_score"] / base["outside"]["interval_score"]
        log_ratios.append(math.log(ratio))
    nll_outside = [scores["nll"] for scores in outside]
    coverage = [scores["coverage_90"] for scores in outside]
    low, high = NEITHER
    return {
        "nll_inside": statistics.fmean(scores["nll"] for scores in inside),
        "nll_inside_change": statistics.fmean(nll_changes),
        "coverage_inside": statistics.fmean(scores["coverage_90"] for scores in inside),
        "coverage_outside": statistics.fmean(coverage),
        "lowest_coverage_outside": min(coverage),
        "within": statistics.fmean(low <= share <= high for share in coverage),
        "nll_outside": statistics.fmean(nll_outside),
        "median_nll_outside": statistics.median(nll_outside),
        "interval_score": math.exp(statistics.fmean(log_ratios)),
    }
