"""What the chosen ridge stands for: decay, early stopping, copies, noise, and the bias.

The paper's appendix on the role of the regularizer, with controls.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.data.california import NAMES
from experiments.frame.jobs import Job, results
from experiments.frame.outcome import Outcome, mean_and_error
from experiments.frame.wording import direction
from experiments.judging.scores import quartiles
from experiments.studies.regularizer import page, work
from experiments.studies.regularizer.signs import (
    LEVEL,
    bounded_quartiles,
    range_of,
    range_of_change,
    signs,
)
from experiments.studies.regularizer.work import CALIBRATIONS, JUDGED, STOPPING, name_of

DECAYS = (0.0, 1e-2, 1e-1)
COPIES = (1, 2)
FULL = {"count": 8, "epochs": 400, "hidden": 64, "bin_size": 100, "most": None}
QUICK_DECAYS = (0.0, 1e-1)
QUICK = {**FULL, "count": 2, "epochs": 4, "hidden": 16, "bin_size": 50, "most": 300}


def run(*, quick: bool, seed: int) -> Outcome:
    """One stack of nets a decay and a number of copies."""
    sizes, decays = (QUICK, QUICK_DECAYS) if quick else (FULL, DECAYS)
    found = numbers(sizes, decays, seed, quick=quick)
    return Outcome("What the ridge stands for", found, page.entries(found))


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


Each = Sequence[dict[str, Any]]
"""One entry a net."""

RIDGES = ("log_ridge", "log_relative_ridge")
"""Their effects are followed by signs: the search may have cut them off."""

SCORES = ("noise", "nll", "binned_log_ratio")
"""Their effects are followed by means."""

RUINED = 0.1
"""A rise of the NLL without the bias beyond this comes from single rows with a bar near zero."""


def condition(each: Each) -> dict[str, Any]:
    """All calibrations of one condition."""
    return {
        **{name: _calibration([one[name] for one in each]) for name in CALIBRATIONS},
        "weights": _pair([one["weights"] for one in each]),
        "valid_rmse": _pair([one["valid_rmse"] for one in each]),
        "test_rmse": _pair([one["test_rmse"] for one in each]),
        "bias": _bias([one["bias"] for one in each]),
    }


def effects(conditions: Mapping[str, Each], decays: Sequence[float]) -> dict[str, Any]:
    """Differences net by net when one factor changes.

    Args:
        conditions: by `name_of`.
        decays: the first is none.
    """
    best, last = STOPPING
    pairs = {
        f"decay {d:g}, {stopping}": (name_of(d, 1, stopping), name_of(decays[0], 1, stopping))
        for d in decays[1:]
        for stopping in STOPPING
    }
    for d in decays:
        pairs[f"last epoch, decay {d:g}"] = name_of(d, 1, last), name_of(d, 1, best)
    for d in decays:
        pairs[f"two copies, decay {d:g}"] = name_of(d, 2, best), name_of(d, 1, best)
    return {
        label: {
            calibration: difference(
                [one[calibration] for one in conditions[there]],
                [one[calibration] for one in conditions[here]],
            )
            for calibration in CALIBRATIONS
        }
        for label, (there, here) in pairs.items()
    }


def floor_effects(conditions: Mapping[str, Each]) -> dict[str, Any]:
    """With a noise floor minus without, net by net, in every condition."""
    return {
        name: {
            criterion: difference(
                [one[f"{criterion}, floor"] for one in each], [one[criterion] for one in each]
            )
            for criterion in ("nll", "bins")
        }
        for name, each in conditions.items()
    }


def difference(there: Each, here: Each) -> dict[str, Any]:
    """Signs of paired changes of ridges, [mean, standard error] of those of scores."""
    pairs = list(zip(there, here, strict=True))
    return {
        **{name: signs([range_of_change(a, b, name) for a, b in pairs]) for name in RIDGES},
        **{name: _pair([a[name] - b[name] for a, b in pairs]) for name in SCORES},
    }


def floor_counts(floor: Mapping[str, Any], criterion: str) -> dict[str, int]:
    """In how many trainings a noise floor clearly changes the ridge and the test NLL.

    Args:
        floor: of `floor_effects`.
        criterion: "nll" or "bins".

    Returns:
        All trainings, "of"; those in which the ridge clearly "falls" or "rises", by its ranks; in
        which at least half of the nets leave its change "open", since both ridges are at the edge;
        and in which the NLL clearly falls or rises, by its standard error.
    """
    each = [one[criterion] for one in floor.values()]
    ridges = [one["log_relative_ridge"] for one in each]
    nlls = [direction(one["nll"]) for one in each]
    return {
        "of": len(each),
        "falls": sum(one["says"] == "falls" for one in ridges),
        "rises": sum(one["says"] == "rises" for one in ridges),
        "open": sum(
            2 * one["open"] >= sum(one[k] for k in ("up", "down", "same", "open")) for one in ridges
        ),
        "nll_falls": nlls.count(-1),
        "nll_rises": nlls.count(1),
    }


def edge_counts(
    conditions: Mapping[str, Each], decays: Sequence[float], copies: Sequence[int]
) -> dict[str, dict[str, int]]:
    """By decay: nets in all, and by calibration those whose ridge is the largest of the search."""
    found = {}
    for decay in decays:
        nets = [
            net
            for many in copies
            for stopping in STOPPING
            for net in conditions[name_of(decay, many, stopping)]
        ]
        edges = {way: int(sum(net[way]["at_upper_edge"] for net in nets)) for way in CALIBRATIONS}
        found[f"{decay:g}"] = {"nets": len(nets), **edges}
    return found


def _bias(each: Each) -> dict[str, Any]:
    """Means, but for the NLL, which one net with a bar close to zero can ruin."""
    nlls = [one["nll"] for one in each]
    return {
        **{name: _pair([one[name] for one in each]) for name in each[0] if name != "nll"},
        "median": {"nll": quartiles(nlls)},
        "largest_nll": max(nlls),
        "ruined": sum(nll > RUINED for nll in nlls),
    }


def _calibration(each: Each) -> dict[str, Any]:
    ridges = {
        name: quartiles([one[name] for one in each])
        for name in ("log_ridge", "log_relative_ridge", "log_largest")
    }
    return {
        **ridges,
        "bounds": {
            name: bounded_quartiles([range_of(one, name) for one in each]) for name in RIDGES
        },
        "relative_ridge_of_each": [one["log_relative_ridge"] for one in each],
        **{
            edge: int(sum(one[edge] for one in each)) for edge in ("at_lower_edge", "at_upper_edge")
        },
        "effective_rank": quartiles([one["effective_rank"] for one in each]),
        "noise": quartiles([one["noise"] for one in each]),
        "scores": {name: _pair([one[name] for one in each]) for name in JUDGED},
    }


def _pair(values: Sequence[float]) -> list[float]:
    """[mean, standard error]; nan where a value is."""
    return [math.nan, math.nan] if any(map(math.isnan, values)) else list(mean_and_error(values))
