"""All numbers of the table: means, standard errors, paired differences, and the paper's beside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.baselines import published
from experiments.frame.outcome import mean_and_error

METRICS = ("rmse", "nll")
RIGIDITIES = ("llpr", "best", "constant", "laplace")
"""On the same nets."""

BASELINES = ("mc_dropout", "deep_ensemble", "deep_ensemble_400")
METHODS = (*RIGIDITIES, *BASELINES, "llpr_random")

AGAINST_LLPR = tuple((method, "llpr") for method in ("best", "constant", "laplace", *BASELINES))
BEST_AGAINST = tuple(("best", method) for method in ("constant", "laplace", *BASELINES))
PAIRS = (*AGAINST_LLPR, *BEST_AGAINST)
"""Compared split by split: all of them have the same test rows."""

Values = Sequence[float]


def entry(parts: Mapping[str, Mapping[str, Any]], **about: Any) -> dict[str, Any]:
    """The entry of one set.

    Args:
        parts: results of its jobs, by name.
        about: ``name``, ``splits``, and what else is told with it.
    """
    name = about.pop("name")
    measured = {}
    for part in parts.values():
        measured |= part["methods"]
    ordered = {method: measured[method] for method in METHODS if method in measured}
    scores = {method: {m: one[m] for m in METRICS} for method, one in ordered.items()}
    means = {method: {m: _mean(one[m]) for m in METRICS} for method, one in scores.items()}
    return {
        **about,
        **means,
        "published": published.TABLE[name],
        "paired": paired(scores),
        "ratio": ratios(scores),
        "reproduction": reproduction(means, name),
        "per_split": scores,
        "chosen": chosen(ordered) | {"epoch": parts["official"]["epoch"]},
        "seconds": {part: one["seconds"] for part, one in parts.items()},
    }


def paired(scores: Mapping[str, Mapping[str, Values]]) -> dict[str, dict[str, list[float]]]:
    """[mean, standard error] of the differences, split by split."""
    return {
        f"{one} - {other}": {
            m: _mean([a - b for a, b in zip(scores[one][m], scores[other][m], strict=True)])
            for m in METRICS
        }
        for one, other in PAIRS
        if one in scores and other in scores
    }


def ratios(scores: Mapping[str, Mapping[str, Values]]) -> dict[str, list[float]]:
    """[mean, standard error] of each method's RMSE over that of `llpr`, split by split."""
    base = scores["llpr"]["rmse"]
    return {
        f"{method} / llpr": _mean(
            [a / b for a, b in zip(scores[method]["rmse"], base, strict=True)]
        )
        for method in BASELINES
        if method in scores
    }


def reproduction(
    means: Mapping[str, Mapping[str, Values]], name: str
) -> dict[str, dict[str, dict[str, float]]]:
    """Our means less the paper's, alone and in combined standard errors.

    ``sigmas`` takes the paper's errors as printed. ``strict`` divides their square by the number
    of splits that the table states over the five that its script assumed.
    """
    paper, splits = published.TABLE[name]["llpr"], published.SPLITS.get(name, 20)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for method in ("llpr", "llpr_random"):
        if method in means:
            found[method] = {m: compared(means[method][m], paper[m], splits) for m in METRICS}
    return found


def compared(ours: Values, paper: published.Value, splits: int) -> dict[str, float]:
    """One difference, and in how many of its standard errors.

    >>> round(compared([3.0, 0.3], (2.0, 0.4), 20)["sigmas"], 2)
    2.0
    """
    (mean, error), (theirs, printed) = ours, paper
    rounding = published.ROUNDING**2 / 12
    difference = mean - theirs
    if printed is None or math.isnan(error):
        return {"difference": difference, "sigmas": math.nan, "strict": math.nan}
    corrected = printed**2 * published.ERROR_DIVISOR / splits
    return {
        "difference": difference,
        "sigmas": difference / math.sqrt(error**2 + printed**2 + rounding),
        "strict": difference / math.sqrt(error**2 + corrected + rounding),
    }


def chosen(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What every method chose, split by split; what is the same in all splits once."""
    found = {
        method: {key: _once(values) for key, values in one.items() if key not in METRICS}
        for method, one in measured.items()
    }
    return {method: one for method, one in found.items() if one}


def _once(values: Sequence[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else values


def _mean(values: Values) -> list[float]:
    return list(mean_and_error(values))
