"""What a benchmark hands back: rows that set a measured figure beside the one to reach.

A benchmark measures something, makes a `Row` of it by `at_most`, `at_least`, `within`,
`for_information` or `not_run`, and returns a list of such rows. The command joins them with the
circumstances of the run to a `Result`, which is stored as JSON. `benchmarks.frame.table` shows
both; nothing else writes tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.frame.timing import Ratio, figure

__all__ = ["Result", "Row", "at_least", "at_most", "for_information", "not_run", "within"]

NOTHING_ASKED = "-"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        work: What was done.
        must: The figure to reach, or a dash where the row only informs.
        measured: The figure, with its spread where it was timed.
        reached: Whether it was reached; None where nothing was asked or nothing could be run.
        figures: The same as numbers, and whatever else helps to judge them.
        note: One sentence that the reader needs beside the figure.
        least: What no code could go below, in the figure's unit, by ``flops`` and by ``bytes``.
    """

    work: str
    must: str
    measured: str
    reached: bool | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    least: Mapping[str, float] = field(default_factory=dict)

    def with_least(self, *, flops: float, bytes: float) -> Row:
        """The same row with what no code could go below."""
        return replace(self, least={"flops": flops, "bytes": bytes})


def at_most(
    work: str,
    value: float | Ratio,
    limit: float | None,
    unit: str = "",
    *,
    note: str = "",
    **figures: Any,
) -> Row:
    """A row whose figure must not exceed ``limit``.

    Args:
        work: What was done.
        value: The measured figure; of a ratio the median decides.
        limit: The figure to reach. With None the row only informs.
        unit: What both figures count.
        note: One sentence that the reader needs beside the figure.
        figures: Further numbers to store with the row.
    """
    if limit is None:
        return for_information(work, value, unit, note=note, **figures)
    return Row(
        work=work,
        must=_with_unit(f"at most {limit:g}", unit),
        measured=_measured(value, limit),
        reached=_middle(value) <= limit,
        figures={**_numbers(value), "limit": limit, **figures},
        note=note,
    )


def at_least(
    work: str,
    value: float | Ratio,
    limit: float | None,
    unit: str = "",
    *,
    note: str = "",
    **figures: Any,
) -> Row:
    """A row whose figure must not fall below ``limit``; the arguments are those of `at_most`."""
    if limit is None:
        return for_information(work, value, unit, note=note, **figures)
    return Row(
        work=work,
        must=_with_unit(f"at least {limit:g}", unit),
        measured=_measured(value, limit),
        reached=_middle(value) >= limit,
        figures={**_numbers(value), "limit": limit, **figures},
        note=note,
    )


def within(
    work: str, value: float, bounds: tuple[float, float], *, note: str = "", **figures: Any
) -> Row:
    """A row whose figure must lie between two bounds, the lower one first."""
    low, high = bounds
    nearest = min(bounds, key=lambda bound: abs(value - bound))
    return Row(
        work=work,
        must=f"{low:g} to {high:g}",
        measured=_measured(value, nearest),
        reached=low <= value <= high,
        figures={"value": value, "low": low, "high": high, **figures},
        note=note,
    )


def for_information(
    work: str, value: float | Ratio, unit: str = "", *, note: str = "", **figures: Any
) -> Row:
    """A row that nothing was asked of."""
    return Row(
        work=work,
        must=NOTHING_ASKED,
        measured=_with_unit(_measured(value), unit),
        figures={**_numbers(value), **figures},
        note=note,
    )


def not_run(work: str, reason: str) -> Row:
    """A row that could not be measured here, and why."""
    return Row(work=work, must=NOTHING_ASKED, measured="not run", note=reason)


@dataclass(frozen=True)
class Result:
    """The rows of one benchmark and where, when and how they came about."""

    name: str
    rows: list[Row]
    provenance: Mapping[str, Any]

    @property
    def missed(self) -> list[Row]:
        """The rows whose figure was not reached."""
        return [row for row in self.rows if row.reached is False]

    def save(self, folder: Path) -> None:
        """Write ``<name>.json`` into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / f"{self.name}.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what ``save`` wrote."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in stored["rows"]]
        return cls(stored["name"], rows, stored["provenance"])


def _middle(value: float | Ratio) -> float:
    """The number that a limit is compared with."""
    if isinstance(value, Ratio):
        return value.median
    return value


def _measured(value: float | Ratio, limit: float | None = None) -> str:
    """The figure as text, with as many digits as tell it from the limit."""
    if isinstance(value, Ratio):
        return str(value)
    text = figure(value)
    decimals = 2
    while limit is not None and float(text) == limit != value and decimals < 12:
        decimals += 1
        text = f"{value:.{decimals}f}"
    return text


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}".rstrip()


def _numbers(value: float | Ratio) -> dict[str, Any]:
    """The figure as numbers, by name."""
    if isinstance(value, Ratio):
        return asdict(value)
    return {"value": value}
