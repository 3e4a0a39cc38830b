"""All numbers of the table: means, standard errors, paired differences, and the paper's beside.

`entry` takes the results of a set's jobs and returns what the JSON file says of the set: every
method's scores averaged over the splits, differences and ratios between methods split by split, and
how far the paper's numbers come out again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.baselines import published
from experiments.frame.outcome import mean_and_error
from experiments.judging.predictive import Scores, differences
from experiments.studies.uci import rivals

METRICS = ("rmse", "nll")
"""The scores in the paper's table."""

SINGLE = ("rmse", "nll", "cell", "crps", "coverage_90", "interval_score")
"""Scores that are one number a split."""

FIFTHS = ("fifths_of_prediction", "fifths_of_bar")
"""Scores that are five numbers a split."""

LENGTHS = ("rmse", "crps", "interval_score")
"""Scores that have the target's unit, so that their ratios mean something."""

OURS = ("best", "best_refitted", "best_of_five")
"""The library's calibrations beyond the paper's."""

ON_THE_NET = ("constant", "floor_t", "variance_head", "laplace", "boosted")
"""Other methods on LLPR's networks."""

BASELINES = ("mc_dropout", "deep_ensemble", "deep_ensemble_400")
"""Methods with networks of their own."""

JUDGED = ("official", "five", "random", "constant", "variance_head", "laplace", "boosted")
"""Kinds of jobs that judge the networks that come with the project."""

METHODS = ("llpr", *OURS, *ON_THE_NET, *BASELINES, "llpr_random")

AGAINST_LLPR = tuple((method, "llpr") for method in (*OURS, *ON_THE_NET, *BASELINES))
BEST_AGAINST = tuple(("best", method) for method in (*ON_THE_NET, *BASELINES))
FIVE_AGAINST = tuple(("best_of_five", method) for method in BASELINES)
PAIRS = (*AGAINST_LLPR, *BEST_AGAINST, *FIVE_AGAINST)
"""Methods that are compared split by split: all of them have the same test rows."""

Values = Sequence[float]
"""A mean and its standard error."""

Splits = Sequence[Mapping[str, Scores]]
"""Scores of one method: the summaries "all" and "new" of every split."""

Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Results of a set's jobs by kind, each in the order of the splits."""


def likelihood(entry: Mapping[str, Any]) -> str:
    """The NLL by which a set's methods are compared: that of cells where targets lie on a grid."""
    if "cell" in entry["llpr"]:
        return "cell"
    return "nll"


def entry(results: Results, *, name: str, seed: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of one set in the JSON file.

    Args:
        results: the results of its jobs.
        name: the name of the set.
        seed: the seed of splits that are random because none are published.
        about: what else the entry tells of the set. "listed" has the numbers of rows of a "train"
            and of a "test" list.
    """
    test = about["listed"]["test"]
    train = about["listed"]["train"]
    methods = method_scores(results, name, seed)
    means = {method: averaged(splits, "all") for method, splits in methods.items()}
    return {
        **about,
        **means,
        "new_rows": {method: averaged(splits, "new") for method, splits in methods.items()},
        "published": published.TABLE[name],
        "paired": paired(methods, "all", test=test, train=train),
        "paired_new": paired(methods, "new", test=test, train=train),
        "ratio": ratios(methods),
        "reproduction": reproduction(means, name),
        "per_split": {method: split_by_split(splits) for method, splits in methods.items()},
        "chosen": chosen(methods, results),
        "committed": {
            kind: all(result["committed"] for result in results[kind])
            for kind in JUDGED
            if results.get(kind)
        },
        "seconds": {
            kind: sum(result["seconds"] for result in of_kind)
            for kind, of_kind in results.items()
            if of_kind
        },
    }


def method_scores(results: Results, name: str, seed: int) -> dict[str, Splits]:
    """The scores of all methods that were run, in the order of `METHODS`."""
    scores: dict[str, Splits] = {}
    for kind in JUDGED:
        for result in results.get(kind, ()):
            scores.update(result["methods"])
    for method in BASELINES:
        if results.get(method):
            scores[method] = rivals.split_scores(name, results[method], seed)
    return {method: scores[method] for method in METHODS if method in scores}


def averaged(splits: Splits, rows: str) -> dict[str, Any]:
    """Average every score of a method over the splits.

    Args:
        splits: the scores of the method.
        rows: "all" test rows, or those that are "new".

    Returns:
        [mean, standard error] of every single number, and the means of the fifths.
    """
    summaries = [split[rows] for split in splits]
    averages: dict[str, Any] = {}
    for metric in SINGLE:
        if metric in summaries[0]:
            averages[metric] = list(mean_and_error([summary[metric] for summary in summaries]))
    for fifths in FIFTHS:
        # One tuple a fifth, of its values in all splits.
        columns = zip(*(summary[fifths] for summary in summaries), strict=True)
        averages[fifths] = [math.fsum(column) / len(column) for column in columns]
    return averages


def split_by_split(splits: Splits) -> dict[str, list[float]]:
    """Every single number of a method, as a list over the splits."""
    return {
        metric: [split["all"][metric] for split in splits]
        for metric in SINGLE
        if metric in splits[0]["all"]
    }


def paired(
    methods: Mapping[str, Splits], rows: str, *, test: int, train: int
) -> dict[str, dict[str, list[float]]]:
    """[mean, corrected standard error] of the differences between methods, split by split.

    Args:
        methods: the scores of all methods.
        rows: "all" test rows, or those that are "new".
        test: the number of rows of a test list.
        train: the number of rows of a training list.
    """
    summaries = {method: [split[rows] for split in splits] for method, splits in methods.items()}
    return {
        f"{first} - {second}": differences(summaries[first], summaries[second], test, train)
        for first, second in PAIRS
        if first in summaries and second in summaries
    }


def ratios(methods: Mapping[str, Splits]) -> dict[str, dict[str, list[float]]]:
    """[mean, standard error] of every method's lengths over those of `llpr`, split by split."""
    ratios_by_method: dict[str, dict[str, list[float]]] = {}
    for method, splits in methods.items():
        if method in ("llpr", "llpr_random"):
            continue
        by_metric = {}
        for metric in LENGTHS:
            if metric in splits[0]["all"]:
                quotients = [
                    split["all"][metric] / llpr_split["all"][metric]
                    for split, llpr_split in zip(splits, methods["llpr"], strict=True)
                ]
                by_metric[metric] = list(mean_and_error(quotients))
        ratios_by_method[f"{method} / llpr"] = by_metric
    return ratios_by_method


def reproduction(
    means: Mapping[str, Mapping[str, Values]], name: str
) -> dict[str, dict[str, dict[str, float]]]:
    """Compare our means with the paper's.

    Args:
        means: [mean, standard error] of our scores, by method and score.
        name: the name of the set.

    Returns:
        What `compared` gives, by method and score.
    """
    paper = published.TABLE[name]["llpr"]
    splits = published.SPLITS.get(name, 20)
    return {
        method: {
            metric: compared(means[method][metric], paper[metric], splits) for metric in METRICS
        }
        for method in ("llpr", "llpr_random")
        if method in means
    }


def compared(ours: Values, paper: published.Value, splits: int) -> dict[str, float]:
    """Our mean less the paper's, alone and in combined standard errors.

    Args:
        ours: our mean and its standard error.
        paper: the printed mean and its printed error, or None where none is printed.
        splits: the number of splits that the paper's table states.

    Returns:
        ``difference``; ``sigmas``, with the paper's errors as printed; and ``strict``, with the
        paper's squared error times the five splits that its script assumed over those that the
        table states.

    >>> round(compared([3.0, 0.3], (2.0, 0.4), 20)["sigmas"], 2)
    2.0
    """
    our_mean, our_error = ours
    paper_mean, printed_error = paper
    difference = our_mean - paper_mean
    if printed_error is None or math.isnan(our_error):
        return {"difference": difference, "sigmas": math.nan, "strict": math.nan}
    # A printed decimal is uniform within its rounding: variance width^2 / 12.
    rounding = published.ROUNDING**2 / 12
    corrected = printed_error**2 * published.ERROR_DIVISOR / splits
    return {
        "difference": difference,
        "sigmas": difference / math.sqrt(our_error**2 + printed_error**2 + rounding),
        "strict": difference / math.sqrt(our_error**2 + corrected + rounding),
    }


def chosen(methods: Mapping[str, Splits], results: Results) -> dict[str, Any]:
    """The hyperparameters that every method chose, split by split, and the best epochs."""
    choices: dict[str, Any] = {}
    for method, splits in methods.items():
        first = splits[0].get("chosen")
        if first:
            choices[method] = {key: [split["chosen"][key] for split in splits] for key in first}
    # MC dropout tells its choices by job, not by split.
    for result in results.get("mc_dropout", ()):
        of_dropout = choices.setdefault("mc_dropout", {})
        for key, values in result["chosen"].items():
            of_dropout.setdefault(key, []).extend(values)
    choices["epoch"] = results["official"][0]["epoch"]
    return choices
