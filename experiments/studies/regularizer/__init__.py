"""What the chosen ridge stands for: decay, early stopping, copies, noise, and the bias.

The paper's appendix on the role of the regularizer, with controls.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from experiments.data.california import NAMES
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome, Picture, Table
from experiments.studies.regularizer import drawing, texts, work
from experiments.studies.regularizer.signs import LEVEL
from experiments.studies.regularizer.summary import (
    RUINED,
    condition,
    edge_counts,
    effects,
    floor_counts,
    floor_effects,
    name_of,
)
from experiments.studies.regularizer.tables import (
    bias_table,
    effect_table,
    nll_table,
    ratio_table,
    ridge_table,
)

DECAYS = (0.0, 1e-2, 1e-1)
COPIES = (1, 2)
FULL = {"count": 8, "epochs": 400, "hidden": 64, "bin_size": 100, "most": None}
QUICK_DECAYS = (0.0, 1e-1)
QUICK = {**FULL, "count": 2, "epochs": 4, "hidden": 16, "bin_size": 50, "most": 300}


def run(*, quick: bool, seed: int) -> Outcome:
    """One stack of nets a decay and a number of copies."""
    sizes, decays = (QUICK, QUICK_DECAYS) if quick else (FULL, DECAYS)
    found = numbers(sizes, decays, seed, quick=quick)
    page: list[str | Table | Picture] = [
        *texts.opening(found),
        Picture("ridges", drawing.ridges(found), texts.RIDGES),
        ridge_table(found, texts.RIDGE_TABLE),
        effect_table(found, texts.effect_caption(found)),
        nll_table(found, texts.nll_caption(found)),
        ratio_table(found, texts.ratio_caption(found)),
        bias_table(found, texts.bias_caption(found)),
        *texts.closing(found),
    ]
    return Outcome("What the ridge stands for", found, page)


def numbers(
    sizes: dict[str, Any], decays: tuple[float, ...], seed: int, *, quick: bool
) -> dict[str, Any]:
    """Everything that the page shows."""
    jobs = {
        (decay, copies): Job(
            f"decay {decay:g}, copies {copies}",
            work.nets,
            {**sizes, "decay": decay, "copies": copies, "seed": seed},
            NAMES,
        )
        for decay in decays
        for copies in COPIES
    }
    done = results("regularizer", list(jobs.values()), keep=not quick, workers=1 if quick else None)
    stacks = {key: done[job.name] for key, job in jobs.items()}
    each = {
        name_of(decay, copies, stopping): stack[stopping]
        for (decay, copies), stack in stacks.items()
        for stopping in work.STOPPING
    }
    floor = floor_effects(each)
    return {
        "settings": {
            **sizes,
            "decays": decays,
            "rows": stacks[decays[0], 1]["rows"],
            "log_two": math.log10(2),
            "ruined_beyond": RUINED,
            "rank_test": LEVEL,
        },
        "epoch": {jobs[key].name: stack["epoch"] for key, stack in stacks.items()},
        "epochs": _spread([epoch for stack in stacks.values() for epoch in stack["epoch"]]),
        "conditions": {name: condition(one) for name, one in each.items()},
        "at_upper_edge": {
            name: int(sum(net[name]["at_upper_edge"] for nets in each.values() for net in nets))
            for name in work.CALIBRATIONS
        },
        "at_upper_edge_by_decay": edge_counts(each, decays, COPIES),
        "ruined_without_bias": {
            "nets": sum(net["bias"]["nll"] > RUINED for nets in each.values() for net in nets),
            "of": sum(map(len, each.values())),
            "largest": max(net["bias"]["nll"] for nets in each.values() for net in nets),
        },
        "effects": effects(each, decays),
        "floor": floor,
        "floor_counts": {
            criterion: floor_counts(floor, criterion) for criterion in ("nll", "bins")
        },
    }


def _spread(epochs: list[int]) -> dict[str, float]:
    """Of the best weights."""
    return {"median": statistics.median(epochs), "smallest": min(epochs), "largest": max(epochs)}
