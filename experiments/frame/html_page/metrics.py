"""The metrics that experiments write: those of the library's reports, and some more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from rigidities.report.scores import METRICS as REPORT_METRICS
from rigidities.report.scores import Metric

Scores: TypeAlias = Mapping[str, tuple[float, float | None]]
"""Values by metric, with standard errors where there are any."""

METRICS = {
    **REPORT_METRICS,
    "gain": Metric(
        label="Gain over the constant bar",
        ideal="above 0",
        sentence="NLL of the constant bar minus the NLL. At 0 or below, bars that differ from row "
        "to row have no advantage.",
    ),
    "offset": Metric(
        label="Offset of the bins",
        ideal="0",
        sentence="In the plot of bins: decades by which the mean squared error lies above the "
        "variance, on average. Above 0, the bars are too narrow; below 0, too wide.",
    ),
    "floor": Metric(
        label="Floor of the distance",
        ideal="a yardstick",
        sentence="Distance from y = x that these bars would have if nothing were wrong with them: "
        "chance in bins of this size, with errors / bars shuffled among the rows.",
    ),
    "wide_log_ratio": Metric(
        label="Distance in wide bins",
        ideal="0",
        sentence="The distance from y = x in bins of ten times as many rows, where single large "
        "errors count less.",
    ),
    "kurtosis": Metric(
        label="Kurtosis",
        ideal="3",
        sentence="Fourth moment of errors over bars. It is 3 for a Gaussian. Single errors that "
        "are many bars long raise it.",
    ),
    "rmse_per_atom": Metric(
        label="RMSE per atom",
        ideal="0",
        sentence="Typical size of the errors over the number of atoms, in meV.",
    ),
    "bar": Metric(
        label="Bar",
        ideal="the RMSE",
        sentence="Root mean square of the bars, whatever the errors.",
    ),
}
for _level in (68, 90, 95):
    METRICS[f"coverage_{_level}"] = Metric(
        label=f"Coverage of {_level} % intervals",
        ideal=f"{_level} %",
        sentence="Share of true values inside. If it is smaller than intended, the bars are too "
        "narrow; if larger, too wide.",
        percent=True,
    )


def glossary(keys: Iterable[str]) -> list[Metric]:
    """The metrics that are explained, of those that are used, each once and in their order."""
    used = set(keys)
    return [metric for key, metric in METRICS.items() if key in used]


def words(key: str) -> str:
    """A key as words.

    Examples:
        >>> words("lowest_coverage")
        'lowest coverage'
    """
    return key.replace("_", " ")
