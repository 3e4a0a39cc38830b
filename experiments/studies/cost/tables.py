"""The table of costs beside the paper's, and the seconds behind it."""

from __future__ import annotations

from typing import Any

from benchmarks.frame.timing import figure as shown

from experiments.frame.outcome import Table
from experiments.studies.cost.measured import MEMBERS, PASSES

Found = dict[str, Any]

LABELS = {
    "none": "no error bars",
    **{f"dropout_{n}": f"MC dropout, M = {n}" for n in PASSES},
    **{f"ensemble_{n}": f"deep ensemble, N = {n}" for n in MEMBERS},
    **{f"adversarial_{n}": f"deep ensemble, adversarial rows, N = {n}" for n in MEMBERS},
    "ours": "rigidities",
}
THEORY: dict[str, dict[str, int]] = {
    "none": {"training": 1, "inference": 1},
    **{f"dropout_{n}": {"training": 1, "inference": n} for n in PASSES},
    **{f"ensemble_{n}": {"training": n, "inference": n} for n in MEMBERS},
    **{f"adversarial_{n}": {"training": n, "inference": n} for n in MEMBERS},
    "ours": {"training": 1, "inference": 1},
}
"""The paper's table; it says "about" for the training of MC dropout and for both of the last row,
and does not speak of adversarial rows."""


def cost_table(found: Found, name: str, caption: str) -> Table:
    """One net: training and inference by every method."""
    one = found[name]
    rows: list[list[str | float | None]] = []
    for method, label in LABELS.items():
        row: list[str | float | None] = [label]
        for phase in ("training", "inference"):
            row += [THEORY[method][phase], _ratio(one[phase][method])]
        rows.append(row)
    columns = ["method", "training: paper", "measured", "inference: paper", "measured"]
    return Table(columns, rows, f"**{name}.** {caption}")


def second_table(found: Found, caption: str) -> Table:
    """Median seconds of what was timed."""
    tasks = next(iter(found.values()))["seconds"]
    rows = [[task, *(one["seconds"][task] for one in found.values())] for task in tasks]
    return Table(["seconds of", *found], rows, caption)


def _ratio(ratio: dict[str, float]) -> str:
    """Median and quartiles; the unit itself has no spread."""
    if ratio["lower"] == ratio["upper"]:
        return digits(ratio["median"])
    return f"{digits(ratio['median'])} ({digits(ratio['lower'])} to {digits(ratio['upper'])})"


def digits(value: float) -> str:
    """Three decimals about one, where a small addition is all there is to see.

    >>> digits(1.00213), digits(5.123), digits(103.4)
    ('1.002', '5.12', '103')
    """
    return f"{value:.3f}" if 0.9 < value < 1.1 else shown(value)
