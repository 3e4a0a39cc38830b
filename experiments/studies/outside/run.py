"""What error bars hold outside the domain of the training, on many sets, domains and nets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.data import uci
from experiments.data.california import NAMES
from experiments.data.domains import KINDS, SETS
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome
from experiments.studies.outside import page, work

NEITHER = (0.85, 0.995)
"""Coverages of 90 % intervals between which a net's bars are neither narrow nor idle."""

BESIDE = "q"
"""The form that others are compared with, net by net."""

Nets = Sequence[Mapping[str, Any]]
"""One entry a net, as `work.judged` gives it, with its set."""


@dataclass(frozen=True)
class Sizes:
    """Of a run: the sets, domains of each kind, and steps of a net's training."""

    sets: tuple[str, ...] = SETS
    count: int = 2
    steps: int = work.STEPS


FULL = Sizes()
QUICK = Sizes(("yacht",), count=1, steps=60)


def run(*, quick: bool, seed: int) -> Outcome:
    """Train on the domains, judge on both sides."""
    sizes = QUICK if quick else FULL
    jobs = [
        Job(
            name,
            work.judged,
            {"name": name, "count": sizes.count, "seed": seed, "steps": sizes.steps},
            NAMES if name == "california" else uci.names(name),
        )
        for name in sizes.sets
    ]
    done = results("outside", jobs, keep=not quick, workers=1 if quick else None)
    found = numbers(done, seed)
    return Outcome("Outside the domain of the training", found, page.entries(found))


def numbers(done: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Everything that the page shows."""
    nets = [{"set": name, **net} for name, part in done.items() for net in part["nets"]]
    forms = [*work.FORMS, "constant"]
    beside_ensembles = [net for net in nets if "ensemble" in net["forms"]]
    return {
        "settings": {
            "seed": seed,
            "nets": len(nets),
            "hidden": {name: list(one.hidden) for name, one in work.NETS.items()},
            "within": list(NEITHER),
            "beside": BESIDE,
        },
        "rows": {name: part["rows"] for name, part in done.items()},
        "seconds": {name: part["seconds"] for name, part in done.items()},
        "all": {form: summary(nets, form) for form in forms},
        "with_ensembles": {form: summary(beside_ensembles, form) for form in [*forms, "ensemble"]},
        "sets": grouped(nets, lambda net: net["set"], list(done), forms),
        "kinds": grouped(nets, lambda net: net["kind"], KINDS, forms),
        "nets": grouped(nets, lambda net: net["net"], list(work.NETS), forms),
        "auroc": statistics.fmean(net["auroc"] for net in nets),
        "each": [
            {
                "set": net["set"],
                "domain": net["domain"],
                "net": net["net"],
                "coverage": {
                    form: one["outside"]["coverage_90"] for form, one in net["forms"].items()
                },
            }
            for net in nets
        ],
    }


def grouped(
    nets: Nets, key: Callable[[Mapping[str, Any]], str], names: Sequence[str], forms: Sequence[str]
) -> dict[str, Any]:
    """The summaries of every form, by what the key says of a net."""
    found = {}
    for name in names:
        some = [net for net in nets if key(net) == name]
        found[name] = {form: summary(some, form) for form in forms}
    return found


def summary(nets: Nets, form: str) -> dict[str, float]:
    """Of one form over the nets, beside the form `BESIDE` where nets are compared."""
    own = [net["forms"][form] for net in nets]
    other = [net["forms"][BESIDE] for net in nets]
    inside = [one["inside"]["nll"] for one in own]
    outside = [one["outside"]["nll"] for one in own]
    coverage = [one["outside"]["coverage_90"] for one in own]
    ratios = [
        math.log(a["outside"]["interval_score"] / b["outside"]["interval_score"])
        for a, b in zip(own, other, strict=True)
    ]
    low, high = NEITHER
    return {
        "nll_inside": statistics.fmean(inside),
        "nll_inside_change": statistics.fmean(
            a - b["inside"]["nll"] for a, b in zip(inside, other, strict=True)
        ),
        "coverage_inside": statistics.fmean(one["inside"]["coverage_90"] for one in own),
        "coverage_outside": statistics.fmean(coverage),
        "lowest_coverage_outside": min(coverage),
        "within": statistics.fmean(low <= one <= high for one in coverage),
        "nll_outside": statistics.fmean(outside),
        "median_nll_outside": statistics.median(outside),
        "interval_score": math.exp(statistics.fmean(ratios)),
    }
