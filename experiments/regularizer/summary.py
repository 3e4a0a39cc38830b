"""Medians, quartiles and paired effects over the nets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.outcome import mean_and_error
from experiments.quartiles import quartiles
from experiments.regularizer.work import CALIBRATIONS, JUDGED, STOPPING

Each = Sequence[dict[str, Any]]
"""One entry a net."""

SCORES = ("log_ridge", "log_relative_ridge", "noise", "nll", "binned_log_ratio")
"""Those whose effects are followed."""

RUINED = 0.1
"""A rise of the NLL without the bias beyond this comes from single rows with a bar near zero."""


def name_of(decay: float, copies: int, stopping: str) -> str:
    """Of a condition.

    >>> name_of(0.01, 2, "best")
    'decay 0.01, 2 copies, best'
    """
    return f"decay {decay:g}, {copies} {'copy' if copies == 1 else 'copies'}, {stopping}"


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


def difference(there: Each, here: Each) -> dict[str, list[float]]:
    """[mean, standard error] of paired differences."""
    return {
        name: _pair([a[name] - b[name] for a, b in zip(there, here, strict=True)])
        for name in SCORES
    }


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
