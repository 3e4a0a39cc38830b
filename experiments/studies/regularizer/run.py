"""What the chosen ridge stands for: decay, early stopping, copies, noise, and the bias.

The paper's appendix on the role of the regularizer, with controls. One job a weight decay and
number of copies trains a stack of networks (`work.networks`); with the best and the last weights
of each these are the conditions. `numbers` summarises every condition and compares conditions
network by network; changes of ridges are followed by signs (`signs`).
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
QUICK = {"count": 2, "epochs": 4, "hidden": 16, "bin_size": 50, "most": 300}
"""Arguments of `work.networks`."""

RIDGES = ("log_ridge", "log_relative_ridge")
"""Numbers whose effects are followed by signs: the search may have cut them off."""

SCORES = ("noise", "nll", "binned_log_ratio")
"""Numbers whose effects are followed by means."""

RUINED = 0.1
"""A rise of the NLL without the bias beyond this comes from single rows with a bar near zero."""

OfNetworks = Sequence[Mapping[str, Any]]
"""One entry a network."""

Conditions = Mapping[str, OfNetworks]
"""The networks by the name of the condition, `name_of`."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Train and judge one stack of networks a decay and a number of copies."""
    if quick:
        page_numbers = numbers(QUICK, QUICK_DECAYS, seed, quick=True)
    else:
        page_numbers = numbers(FULL, DECAYS, seed, quick=False)
    return Outcome("What the ridge stands for", page_numbers, page.entries(page_numbers))


def numbers(
    sizes: dict[str, Any], decays: tuple[float, ...], seed: int, *, quick: bool
) -> dict[str, Any]:
    """Everything that the page shows.

    Args:
        sizes: `FULL` or `QUICK`.
        decays: the weight decays; the first is none.
        seed: the seed of splits and networks.
        quick: whether this is a quick look, which stores nothing on disk.
    """
    jobs = []
    for decay in decays:
        for copies in COPIES:
            arguments = {**sizes, "decay": decay, "copies": copies, "seed": seed}
            jobs.append(Job(_job_name(decay, copies), work.networks, arguments, NAMES))
    stacks = results("regularizer", jobs, keep=not quick, workers=1 if quick else None)
    conditions = {}
    for decay in decays:
        for copies in COPIES:
            for stopping in STOPPING:
                stack = stacks[_job_name(decay, copies)]
                conditions[name_of(decay, copies, stopping)] = stack[stopping]
    floor = floor_effects(conditions)
    epochs = [epoch for stack in stacks.values() for epoch in stack["epoch"]]
    networks = [network for of_condition in conditions.values() for network in of_condition]
    return {
        "settings": {
            **sizes,
            "decays": decays,
            "rows": stacks[_job_name(decays[0], 1)]["rows"],
            "log_two": math.log10(2),
            "ruined_beyond": RUINED,
            "rank_test": LEVEL,
        },
        "epoch": {name: stack["epoch"] for name, stack in stacks.items()},
        "epochs": {
            "median": statistics.median(epochs),
            "smallest": min(epochs),
            "largest": max(epochs),
        },
        "conditions": {name: condition(of_condition) for name, of_condition in conditions.items()},
        "at_upper_edge": _at_upper_edge(networks),
        "at_upper_edge_by_decay": edge_counts(conditions, decays, COPIES),
        "ruined_without_bias": {
            "nets": sum(network["bias"]["nll"] > RUINED for network in networks),
            "of": len(networks),
            "largest": max(network["bias"]["nll"] for network in networks),
        },
        "effects": effects(conditions, decays),
        "floor": floor,
        "floor_counts": {
            "nll": floor_counts(floor, "nll"),
            "bins": floor_counts(floor, "bins"),
        },
    }


def _job_name(decay: float, copies: int) -> str:
    """The name of the job of a decay and a number of copies."""
    return f"decay {decay:g}, copies {copies}"


# --- one condition -------------------------------------------------------------------------------


def condition(networks: OfNetworks) -> dict[str, Any]:
    """All calibrations of one condition, over its networks."""
    calibrations = {
        name: _calibration([network[name] for network in networks]) for name in CALIBRATIONS
    }
    return {
        **calibrations,
        "weights": _mean_and_error([network["weights"] for network in networks]),
        "valid_rmse": _mean_and_error([network["valid_rmse"] for network in networks]),
        "test_rmse": _mean_and_error([network["test_rmse"] for network in networks]),
        "bias": _bias([network["bias"] for network in networks]),
    }


def _calibration(networks: OfNetworks) -> dict[str, Any]:
    """The ridges and scores of one calibration: quartiles, bounds, edges, means."""
    relative_ridges = [network["log_relative_ridge"] for network in networks]
    return {
        "log_ridge": quartiles([network["log_ridge"] for network in networks]),
        "log_relative_ridge": quartiles(relative_ridges),
        "log_largest": quartiles([network["log_largest"] for network in networks]),
        "bounds": {
            name: bounded_quartiles([range_of(network, name) for network in networks])
            for name in RIDGES
        },
        "relative_ridge_of_each": relative_ridges,
        "at_lower_edge": int(sum(network["at_lower_edge"] for network in networks)),
        "at_upper_edge": int(sum(network["at_upper_edge"] for network in networks)),
        "effective_rank": quartiles([network["effective_rank"] for network in networks]),
        "noise": quartiles([network["noise"] for network in networks]),
        "scores": {
            name: _mean_and_error([network[name] for network in networks]) for name in JUDGED
        },
    }


def _bias(networks: OfNetworks) -> dict[str, Any]:
    """The effect of the bias: means, but for the NLL, which one bar close to zero can ruin."""
    nlls = [network["nll"] for network in networks]
    means = {
        name: _mean_and_error([network[name] for network in networks])
        for name in networks[0]
        if name != "nll"
    }
    return {
        **means,
        "median": {"nll": quartiles(nlls)},
        "largest_nll": max(nlls),
        "ruined": sum(nll > RUINED for nll in nlls),
    }


def _mean_and_error(values: Sequence[float]) -> list[float]:
    """[mean, standard error]; nan where a value is."""
    if any(math.isnan(value) for value in values):
        return [math.nan, math.nan]
    return list(mean_and_error(values))


# --- between conditions --------------------------------------------------------------------------


def effects(conditions: Conditions, decays: Sequence[float]) -> dict[str, Any]:
    """Differences network by network when one factor changes.

    Args:
        conditions: the networks of all conditions.
        decays: the weight decays; the first is none.

    Returns:
        By the changed factor and by calibration, what `difference` gives.
    """
    best, last = STOPPING
    # The condition with the change, and the one without it.
    pairs = {}
    for decay in decays[1:]:
        for stopping in STOPPING:
            pairs[f"decay {decay:g}, {stopping}"] = (
                name_of(decay, 1, stopping),
                name_of(decays[0], 1, stopping),
            )
    for decay in decays:
        pairs[f"last epoch, decay {decay:g}"] = (name_of(decay, 1, last), name_of(decay, 1, best))
    for decay in decays:
        pairs[f"two copies, decay {decay:g}"] = (name_of(decay, 2, best), name_of(decay, 1, best))

    differences = {}
    for label, (with_change, without_change) in pairs.items():
        differences[label] = {
            calibration: difference(
                [network[calibration] for network in conditions[with_change]],
                [network[calibration] for network in conditions[without_change]],
            )
            for calibration in CALIBRATIONS
        }
    return differences


def floor_effects(conditions: Conditions) -> dict[str, Any]:
    """With a noise floor minus without, network by network, in every condition."""
    floor = {}
    for name, networks in conditions.items():
        floor[name] = {
            criterion: difference(
                [network[f"{criterion}, floor"] for network in networks],
                [network[criterion] for network in networks],
            )
            for criterion in ("nll", "bins")
        }
    return floor


def difference(there: OfNetworks, here: OfNetworks) -> dict[str, Any]:
    """Signs of paired changes of ridges, [mean, standard error] of those of scores.

    Args:
        there: one calibration of the networks with a change.
        here: the same without it.
    """
    pairs = list(zip(there, here, strict=True))
    changes: dict[str, Any] = {}
    for name in RIDGES:
        ranges = [
            range_of_change(with_change, without_change, name)
            for with_change, without_change in pairs
        ]
        changes[name] = signs(ranges)
    for name in SCORES:
        changes[name] = _mean_and_error(
            [with_change[name] - without_change[name] for with_change, without_change in pairs]
        )
    return changes


def floor_counts(floor: Mapping[str, Any], criterion: str) -> dict[str, int]:
    """In how many trainings a noise floor clearly changes the ridge and the test NLL.

    Args:
        floor: what `floor_effects` gives.
        criterion: "nll" or "bins".

    Returns:
        All trainings, "of"; those in which the ridge clearly "falls" or "rises", by its ranks; in
        which at least half of the networks leave its change "open", since both ridges are at the
        edge; and in which the NLL clearly falls or rises, by its standard error.
    """
    differences = [of_condition[criterion] for of_condition in floor.values()]
    ridges = [change["log_relative_ridge"] for change in differences]
    nll_signs = [direction(change["nll"]) for change in differences]
    mostly_open = 0
    for ridge in ridges:
        networks = ridge["up"] + ridge["down"] + ridge["same"] + ridge["open"]
        if 2 * ridge["open"] >= networks:
            mostly_open += 1
    return {
        "of": len(differences),
        "falls": sum(ridge["says"] == "falls" for ridge in ridges),
        "rises": sum(ridge["says"] == "rises" for ridge in ridges),
        "open": mostly_open,
        "nll_falls": nll_signs.count(-1),
        "nll_rises": nll_signs.count(1),
    }


def edge_counts(
    conditions: Conditions, decays: Sequence[float], copies: Sequence[int]
) -> dict[str, dict[str, int]]:
    """By decay: all networks, and by calibration those whose ridge is the largest of the search."""
    counts = {}
    for decay in decays:
        networks: list[Mapping[str, Any]] = []
        for count in copies:
            for stopping in STOPPING:
                networks += conditions[name_of(decay, count, stopping)]
        counts[f"{decay:g}"] = {"nets": len(networks), **_at_upper_edge(networks)}
    return counts


def _at_upper_edge(networks: OfNetworks) -> dict[str, int]:
    """By calibration, the number of networks whose ridge is the largest of the search."""
    return {
        name: int(sum(network[name]["at_upper_edge"] for network in networks))
        for name in CALIBRATIONS
    }
