"""The tables: means, the part that retraining shows, differences, and what was chosen."""

from __future__ import annotations

from typing import Any

from experiments.frame.outcome import Table
from experiments.studies.propagation.errors import CALIBRATIONS, DIFFERENCE

LABELS = {
    "none": 'noise="none"',
    "constant": 'noise="constant"',
    "evidence": 'noise="constant", criterion="evidence"',
    "bayes": 'noise="bayes", criterion="evidence"',
}
Found = dict[str, dict[str, Any]]


def mean_table(found: Found, size: str) -> Table:
    """Error bars of means of the largest groups."""
    caption = (
        f"Means of {size} predictions against means of the observed values: root mean square over "
        "all nets, ratio of predicted to actual error, coverage of 90 % intervals. The variance "
        f"is the propagated epistemic one plus noise / {size}; *independent* ignores the "
        f"correlations (the sum of the variances / {size}²)."
    )
    return _compared(found, size, caption)


def difference_table(found: Found) -> Table:
    """Error bars of differences of neighbours."""
    caption = (
        "Differences of two similar predictions (each test row and its nearest neighbour) against "
        "the differences of the observed values; the variance is the propagated one plus twice "
        "the noise. *Independent* adds the two variances."
    )
    return _compared(found, DIFFERENCE, caption)


def spread_table(found: Found, size: str) -> Table:
    """The epistemic part alone against the spread of retrained nets on common rows."""
    rows = [
        [name, LABELS[way], one["common"], one[way]["common"], one[way]["ratio_of_common"]]
        for name, one in found.items()
        for way in CALIBRATIONS
    ]
    caption = (
        f"The epistemic part alone: the mean of the predictions for {size} rows that no net has "
        "seen, the same for all nets. *Spread* is its standard deviation over the nets (their "
        "training rows, their starts, all their weights); *predicted* the propagated standard "
        "deviation."
    )
    return Table(["set", "calibration", "spread", "predicted", "ratio"], rows, caption)


def choice_table(found: Found) -> Table:
    """What each calibration chose."""
    rows = [
        [name, LABELS[way], f"{one[way]['ridge']:.1g}", one[way]["scale"], one[way]["noise"]]
        for name, one in found.items()
        for way in CALIBRATIONS
    ]
    caption = (
        "What was chosen (medians over the nets): ridge and scale for standardised targets, "
        "standard deviation of the noise in the target's unit."
    )
    return Table(["set", "calibration", "ridge", "scale", "noise"], rows, caption)


def _compared(found: Found, quantity: str, caption: str) -> Table:
    rows: list[list[str | float | None]] = []
    for name, one in found.items():
        for way in CALIBRATIONS:
            joint, alone = one[way]["joint"], one[way]["independent"]
            rows.append(
                [
                    name,
                    LABELS[way],
                    one["actual"][quantity],
                    joint["std"][quantity],
                    joint["ratio"][quantity],
                    f"{joint['coverage'][quantity]:.2f}",
                    alone["ratio"][quantity],
                    f"{alone['coverage'][quantity]:.2f}",
                ]
            )
    columns = ["set", "calibration", "actual", "predicted", "ratio", "coverage"]
    columns += ["independent: ratio", "coverage"]
    return Table(columns, rows, caption)
