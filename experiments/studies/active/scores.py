"""Learning curves in numbers: means, standard errors, paired differences, labels saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from experiments.frame.outcome import Table, mean_and_error
from experiments.studies.active.rounds import Protocol

NAMES = {
    "random": "random",
    "top": "largest variances",
    "logdet": "greedy, logdet",
    "variance": "greedy, variance",
}
BASES = ("random", "top")
Summary = dict[str, Any]


def summary(curves: Mapping[str, Tensor], protocol: Protocol) -> Summary:
    """Everything that the tables and the figure show.

    Differences are taken within each repetition: at the last round, and of the mean over all
    rounds after the first choice.
    """
    methods: Summary = {}
    for method, curve in curves.items():
        rmse = [mean_and_error(row) for row in curve.tolist()]
        found: Summary = {
            "rmse": rmse,
            "rmse_thousandths": [_thousandths(pair) for pair in rmse],
            "each": curve,
            "labels_to_randoms_last": labels_needed(
                protocol.labels, curve.mean(1).tolist(), float(curves["random"][-1].mean())
            ),
        }
        for base in BASES:
            found[f"less_{base}"] = _paired(curve - curves[base])
        methods[method] = found
    return {
        "labels": protocol.labels,
        "repetitions": protocol.seeds,
        "ridge": protocol.ridge,
        "methods": methods,
    }


def _paired(difference: Tensor) -> Summary:
    averaged = difference[1:].mean(0)
    pairs = {
        "last": mean_and_error(difference[-1].tolist()),
        "all_rounds": mean_and_error(averaged.tolist()),
    }
    return {
        **pairs,
        "thousandths": {when: _thousandths(pair) for when, pair in pairs.items()},
        "better": int((averaged < 0).sum()),
    }


def _thousandths(pair: tuple[float, float]) -> tuple[float, float]:
    mean, error = pair
    return 1000 * mean, 1000 * error


def labels_needed(labels: list[int], curve: list[float], goal: float) -> float | None:
    """Where a curve first comes down to a goal, by linear interpolation; None where it does not.

    >>> labels_needed([100, 200, 300], [3.0, 1.0, 0.5], 2.0)
    150.0
    """
    if curve[0] <= goal:
        return float(labels[0])
    for place in range(1, len(labels)):
        if curve[place] <= goal:
            share = (curve[place - 1] - goal) / (curve[place - 1] - curve[place])
            return labels[place - 1] + share * (labels[place] - labels[place - 1])
    return None


def curve_table(found: Summary, caption: str) -> Table:
    """RMSE at every size."""
    columns = ["labels", *(NAMES[method] for method in found["methods"])]
    rows = [
        [
            str(labels),
            *(_shown(one["rmse_thousandths"][place]) for one in found["methods"].values()),
        ]
        for place, labels in enumerate(found["labels"])
    ]
    return Table(columns, rows, caption)


def difference_table(found: Summary, caption: str) -> Table:
    """Paired differences to random choice and to the largest variances."""
    columns = ["choice", "less random, last", "all rounds", "less largest variances, last"]
    columns += ["all rounds", "better than random in", "labels to random's last RMSE"]
    rows = []
    for method, one in found["methods"].items():
        if method == "random":
            continue
        random, top = (one[f"less_{base}"]["thousandths"] for base in BASES)
        pairs = [random["last"], random["all_rounds"]]
        pairs += [top["last"], top["all_rounds"]] if method != "top" else [None, None]
        needed = one["labels_to_randoms_last"]
        rows.append(
            [
                NAMES[method],
                *(None if pair is None else _shown(pair, sign="+") for pair in pairs),
                f"{one['less_random']['better']} of {found['repetitions']}",
                _needed(needed, found["labels"]),
            ]
        )
    return Table(columns, rows, caption)


def _needed(labels: float | None, all_labels: list[int]) -> str:
    if labels is None:
        return "not reached"
    return "all begin below it" if labels <= all_labels[0] else f"{labels:.0f} of {all_labels[-1]}"


def _shown(pair: tuple[float, float], sign: str = "") -> str:
    mean, error = pair
    return f"{mean:{sign}.2f} ± {error:.2f}"
