"""What a benchmark hands back: rows that set a measured figure beside the one to reach."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.frame.timing import Ratio, figure


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

    def beside(self, *, flops: float, bytes: float) -> Row:
        """The same row with what no code could go below."""
        return replace(self, least={"flops": flops, "bytes": bytes})


def at_most(
    work: str, value: float | Ratio, limit: float, unit: str = "", *, note: str = "", **figures: Any
) -> Row:
    """A row whose figure must not exceed ``limit``."""
    middle = value.median if isinstance(value, Ratio) else value
    return Row(
        work,
        _joined(f"at most {limit:g}", unit),
        _text(value),
        middle <= limit,
        _figures(value, limit, figures),
        note,
    )


def at_least(
    work: str, value: float | Ratio, limit: float, unit: str = "", *, note: str = "", **figures: Any
) -> Row:
    """A row whose figure must not fall below ``limit``."""
    middle = value.median if isinstance(value, Ratio) else value
    return Row(
        work,
        _joined(f"at least {limit:g}", unit),
        _text(value),
        middle >= limit,
        _figures(value, limit, figures),
        note,
    )


def for_information(
    work: str, value: float | Ratio, unit: str = "", *, note: str = "", **figures: Any
) -> Row:
    """A row that nothing was asked of."""
    measured = _joined(_text(value), unit)
    return Row(work, "-", measured, None, _figures(value, None, figures), note)


def not_run(work: str, reason: str) -> Row:
    """A row that could not be measured here, and why."""
    return Row(work, "-", "not run", None, {}, reason)


@dataclass(frozen=True)
class Result:
    """The rows of one benchmark and where, when and how they came about."""

    name: str
    rows: list[Row]
    provenance: Mapping[str, Any]

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


def _text(value: float | Ratio) -> str:
    return str(value) if isinstance(value, Ratio) else figure(value)


def _joined(text: str, unit: str) -> str:
    return f"{text} {unit}".rstrip()


def _figures(value: float | Ratio, limit: float | None, more: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = asdict(value) if isinstance(value, Ratio) else {"value": value}
    if limit is not None:
        figures["limit"] = limit
    return figures | more
