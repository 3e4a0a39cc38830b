"""What an experiment returns: its numbers, and a page of text, tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = dict[str, Any]
"""Numbers by name, nested, as an experiment computes them and JSON stores them."""

Cell = str | float | None
"""A cell of a table."""

DIGITS = 8
"""Significant digits of the numbers that are stored: more would only differ between machines."""


@dataclass(frozen=True)
class Table:
    """A Markdown table.

    Attributes:
        columns: The header.
        rows: Rows with one cell a column: text, or a number, which is shown with three digits.
        caption: A sentence above the table.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"Expected {len(self.columns)} cells, one for each of "
                    f"{', '.join(self.columns)}; got {len(row)}: {row}."
                )

    def __str__(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns)]
        lines += [[cell(value) for value in row] for row in self.rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        if not self.caption:
            return table
        return f"{self.caption}\n\n{table}"


@dataclass(frozen=True)
class Picture:
    """A figure; it is written to ``<experiment>-<name>.png``.

    Attributes:
        name: A short name in lower case, without blanks.
        figure: A figure made by `experiments.frame.figures.panels`.
        caption: What one sees; also the alternative text.
    """

    name: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        title: The heading of the page.
        numbers: Every number of the tables and figures: nested mappings with string keys,
            sequences, strings, numbers, tensors and arrays.
        page: Markdown paragraphs, tables and pictures, in reading order. They say what was done
            and what to expect.
    """

    title: str
    numbers: Mapping[str, Any]
    page: Sequence[Entry] = field(default_factory=tuple)

    @property
    def pictures(self) -> list[Picture]:
        """The pictures on the page."""
        return [block for block in self.page if isinstance(block, Picture)]


Entry = str | Table | Picture
"""An entry of a page."""


def cell(value: Cell) -> str:
    """The text of a table's cell.

    >>> cell(0.12345), cell(12345.0), cell(7), cell(None), cell("a | b")
    ('0.123', '12345', '7', '-', 'a \\\\| b')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if isinstance(value, int):
        return str(value)
    if value == 0:
        return "0"
    if 1000 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".")


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of repetitions and its standard error (nan for one repetition).

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.nan
    square = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(square / (n - 1) / n)


def with_error(mean: float, error: float, digits: int = 2) -> str:
    """A mean and its standard error for a cell.

    >>> with_error(0.905, 0.0123), with_error(-1.5, float("nan"))
    ('0.91 ± 0.01', '-1.50')
    """
    text = f"{mean:.{digits}f}"
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"


def plain(value: Any) -> Any:
    """A value as JSON can hold it.

    Tensors and arrays become lists, numbers have eight digits, nan and infinity become text.

    Raises:
        TypeError: There is something else in it.

    >>> plain({"a": (1 / 3, float("inf")), "b": True})
    {'a': [0.33333333, 'inf'], 'b': True}
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {_key(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return float(f"{value:.{DIGITS}g}")
    if value is None or isinstance(value, (str, bool, int)):
        return value
    raise TypeError(
        f"Expected numbers, text, tensors, mappings or sequences, got {type(value).__name__}. "
        "Convert it before it goes into an Outcome."
    )


def _key(key: Any) -> str:
    """A key of a mapping as text."""
    if not isinstance(key, (str, int, float)) or isinstance(key, bool):
        raise TypeError(f"Expected keys that are text or numbers, got {key!r}.")
    return key if isinstance(key, str) else f"{key:g}"
