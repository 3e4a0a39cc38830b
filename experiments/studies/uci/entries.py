"""All numbers of the table: means, standard errors, paired differences, and the paper's beside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.baselines import published
from experiments.frame.outcome import mean_and_error
from experiments.judging.predictive import Scores, differences
from experiments.studies.uci import rivals

METRICS = ("rmse", "nll")
"""That the paper's table has."""

SINGLE = ("rmse", "nll", "cell", "crps", "coverage_90", "interval_score")
FIFTHS = ("fifths_of_prediction", "fifths_of_bar")

OURS = ("best", "best_refitted", "best_of_five")
ON_THE_NET = ("constant", "floor_t", "variance_head", "laplace", "boosted")
"""Others on LLPR's nets."""

BASELINES = ("mc_dropout", "deep_ensemble", "deep_ensemble_400")
"""With nets of their own."""

METHODS = ("llpr", *OURS, *ON_THE_NET, *BASELINES, "llpr_random")

AGAINST_LLPR = tuple((method, "llpr") for method in (*OURS, *ON_THE_NET, *BASELINES))
BEST_AGAINST = tuple(("best", method) for method in (*ON_THE_NET, *BASELINES))
FIVE_AGAINST = tuple(("best_of_five", method) for method in BASELINES)
PAIRS = (*AGAINST_LLPR, *BEST_AGAINST, *FIVE_AGAINST)
"""Compared split by split: all of them have the same test rows."""

Values = Sequence[float]
Splits = Sequence[Mapping[str, Scores]]
"""Of one method: the summaries "all" and "new" of every split."""


def likelihood(one: Mapping[str, Any]) -> str:
    """The NLL by which a set's methods are compared: of cells where targets lie on a grid."""
    return "cell" if "cell" in one["llpr"] else "nll"


def entry(parts: Mapping[str, Sequence[Mapping[str, Any]]], **about: Any) -> dict[str, Any]:
    """The entry of one set.

    Args:
        parts: results of its jobs, by part and in the order of the splits.
        about: ``name``, ``splits``, ``listed``, ``seed``, and what else is told with it.
    """
    name, seed = about.pop("name"), about.pop("seed")
    measured = {}
    for part in ("official", "five", "random"):
        for one in parts.get(part, ()):
            measured |= one["methods"]
    for method in BASELINES:
        if parts.get(method):
            measured[method] = rivals.judged(name, parts[method], seed)
    ordered = {method: measured[method] for method in METHODS if method in measured}
    means = {method: averaged(splits, "all") for method, splits in ordered.items()}
    return {
        **about,
        **means,
        "new_rows": {method: averaged(splits, "new") for method, splits in ordered.items()},
        "published": published.TABLE[name],
        "paired": paired(ordered, "all", **about["listed"]),
        "paired_new": paired(ordered, "new", **about["listed"]),
        "ratio": ratios(ordered),
        "reproduction": reproduction(means, name),
        "per_split": {method: listed(splits) for method, splits in ordered.items()},
        "chosen": chosen(ordered, parts),
        "committed": {
            part: all(one["committed"] for one in parts[part])
            for part in ("official", "five", "random")
            if parts.get(part)
        },
        "seconds": {part: sum(one["seconds"] for one in some) for part, some in parts.items()},
    }


def averaged(splits: Splits, rows: str) -> dict[str, Any]:
    """[mean, standard error] of every number, and the means of the fifths."""
    found = [one[rows] for one in splits]
    single = {m: list(mean_and_error([one[m] for one in found])) for m in SINGLE if m in found[0]}
    return single | {
        name: [
            math.fsum(part) / len(part) for part in zip(*(one[name] for one in found), strict=True)
        ]
        for name in FIFTHS
    }


def listed(splits: Splits) -> dict[str, list[float]]:
    """Every number, split by split."""
    return {m: [one["all"][m] for one in splits] for m in SINGLE if m in splits[0]["all"]}


def paired(
    methods: Mapping[str, Splits], rows: str, *, test: int, train: int
) -> dict[str, dict[str, list[float]]]:
    """[mean, corrected standard error] of the differences, split by split."""
    taken = {method: [one[rows] for one in splits] for method, splits in methods.items()}
    return {
        f"{one} - {other}": differences(taken[one], taken[other], test, train)
        for one, other in PAIRS
        if one in taken and other in taken
    }


def ratios(methods: Mapping[str, Splits]) -> dict[str, dict[str, list[float]]]:
    """[mean, standard error] of every method's lengths over those of `llpr`, split by split."""
    base = methods["llpr"]
    return {
        f"{method} / llpr": {
            m: list(
                mean_and_error(
                    [a["all"][m] / b["all"][m] for a, b in zip(splits, base, strict=True)]
                )
            )
            for m in ("rmse", "crps", "interval_score")
            if m in splits[0]["all"]
        }
        for method, splits in methods.items()
        if method not in ("llpr", "llpr_random")
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


def chosen(
    methods: Mapping[str, Sequence[Mapping[str, Any]]],
    parts: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """What every method chose, split by split."""
    found: dict[str, Any] = {}
    for method, splits in methods.items():
        if splits[0].get("chosen"):
            found[method] = {k: [one["chosen"][k] for one in splits] for k in splits[0]["chosen"]}
    for part in parts.get("mc_dropout", ()):
        for key, values in part["chosen"].items():
            found.setdefault("mc_dropout", {}).setdefault(key, []).extend(values)
    return found | {"epoch": parts["official"][0]["epoch"]}
