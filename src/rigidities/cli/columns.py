"""What the columns of a table hold, and the table as a matrix of numbers.

`inputs` looks at each column of a training table: `Column.of` finds out whether it holds numbers
(perhaps with a unit), dates or categories, and columns that say nothing of the target, or give it
away, are left out with a word. `matrix` then makes numbers of a frame by these columns: of the
training table, and later of new ones, which may be written in another way.

Forms of dates are listed here: `guess_datetime_format` of pandas knows no years of two digits, no
bare times and no "6:05 PM", and takes 01.03.2021 for January.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .tables import SCALES, number

if TYPE_CHECKING:
    import numpy
    import pandas

    Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

CURRENCIES = "$€£¥"
"""Units that stand before the number."""

KINDS = ("number", "date", "category", "days")

PLURALS = {"number": "numbers", "date": "dates", "category": "categories"}
"""What columns of each kind in a file contain."""

MOST_CATEGORIES = 255
"""Codes of a column at most, that of rare ones included; HistGradientBoosting takes no more."""

RARE = 5
"""Rows below which a category is pooled with others that are rare."""

LEAK = 0.999
"""Rank correlation with the target beyond which a column counts as the target itself."""

_MOSTLY = 0.9
"""Share of the cells that must be numbers, or dates, for a column to hold these."""

_LARGEST = 1e100
"""Numbers beyond it are missing: their squares would overflow."""

_LEAST_FOR_LEAK = 10
"""Rows, and distinct numbers, below which no column is said to give the target away."""

_MOST_CELLS_SAMPLED = 500

_MOST_DATES_PAIRED = 4
"""Columns of dates between which days are counted, at most."""

_DAY_FORMS = (
    "%d.%m.%Y",
    "%d.%m.%y",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%Y/%m/%d",
    "%d-%m-%Y",
    "%d %b %Y",
    "%b %d, %Y",
    "%d %B %Y",
    "%B %d, %Y",
)
_TIME_FORMS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
_DATE_FORMS = ["ISO8601", "%H:%M", "%H:%M:%S"]
_DATE_FORMS += [day + time for day in _DAY_FORMS for time in _TIME_FORMS]
"""Forms of `pandas.to_datetime`; of those that read as many cells the first is taken."""

_DATE_PARTS = ("year", "month", "day_of_year", "day_of_week", "hour")
"""Numbers that are made of a date, beside the seconds since the first one."""

_ROW_NAME = re.compile(
    r"(?i:.*(\b|_)(id|idx|index(_level_\d+__)?|uuid|key|nr|no|row|unnamed.*))|.*[a-z]I[dD]"
)
"""Names of columns that number the rows."""


@dataclass(frozen=True)
class Column:
    """An input, of one of the `KINDS`.

    Attributes:
        name: Of the column.
        kind: What it holds.
        unit: That numbers may carry.
        scales: What some numbers carry that says how large they are (k), where that is no unit.
        form: Of dates, for `pandas.to_datetime`; empty where they are stored as dates.
        first: The first date, in ISO 8601.
        parts: Numbers made of a date that vary in the training table.
        codes: Of each category. Those that are rare share the last one.
        between: Of days between two dates, the names of the two columns of dates.
        complete: Whether no cell was missing in the training table.
    """

    name: str
    kind: str
    unit: str = ""
    scales: Sequence[str] = ()
    form: str = ""
    first: str = ""
    parts: Sequence[str] = ()
    codes: Mapping[str, int] = field(default_factory=dict)
    between: Sequence[str] = ()
    complete: bool = False

    @classmethod
    def of(cls, name: str, series: pandas.Series, decimal: str) -> Column:
        """What a column holds for the most part."""
        present = series.dropna()
        if series.dtype.kind in "iuf" or present.empty:
            return cls(name, "number")
        if series.dtype.kind == "M":
            return cls._of_dates(name, series, form="")

        sample = present.iloc[:: 1 + len(present) // _MOST_CELLS_SAMPLED]
        units = _units(sample, decimal)
        unit = _most_common(units)
        if _present_share(numbers(present, decimal, unit)) >= _MOSTLY:
            scales = sorted(SCALES.keys() & units.keys() - {unit})
            return cls(name, "number", unit=unit, scales=scales)
        form = _date_form(sample)
        if form:
            return cls._of_dates(name, series, form)
        return cls._of_categories(name, present)

    @classmethod
    def _of_dates(cls, name: str, series: pandas.Series, form: str) -> Column:
        """A column of dates, with the parts of them that vary."""
        dates = _dates(series, form)
        first = dates.min().isoformat()
        parts = _date_parts(dates, first)
        varying_parts = [part for part in parts if parts[part].nunique() > 1]
        return cls(name, "date", form=form, first=first, parts=varying_parts)

    @classmethod
    def _of_categories(cls, name: str, present: pandas.Series) -> Column:
        """A column of categories, with codes in the order of how common they are."""
        counts = present.value_counts()  # the most common first
        common = min(int((counts >= RARE).sum()), MOST_CATEGORIES - 1)
        codes = {text: min(rank, common) for rank, text in enumerate(counts.index)}
        return cls(name, "category", codes=codes)

    @property
    def widths(self) -> list[int]:
        """Number of categories of each of its columns of the matrix; 0 for numbers."""
        categories = max(self.codes.values(), default=-1) + 1
        return [categories] * (len(self.parts) or 1)

    def values(self, series: pandas.Series, decimal: str) -> tuple[Array, pandas.Series]:
        """The column as numbers, and the cells that could not be read.

        Args:
            series: The column in a table.
            decimal: The decimal mark of that table.

        Returns:
            (N, 1), or (N, parts) of dates, NaN where missing; and the cells of which nothing is
            made.
        """
        if self.kind == "number":
            values = numbers(series, decimal, self.unit)[:, None]
        elif self.kind == "category":
            texts = series.map(str, na_action="ignore").astype(object)
            values = texts.map(dict(self.codes)).to_numpy(float)[:, None]
        else:
            dates = _dates_in_any_form(series, self.form)
            values = _date_parts(dates, self.first)[list(self.parts)].to_numpy(float)
        nothing_read = (values != values).all(1)
        return values, series[nothing_read & series.notna().to_numpy()]

    def remarks(self, unread: pandas.Series) -> list[str]:
        """How the column was read, in words; `unread` are the cells of which nothing was made."""
        remarks = []
        how = self._how_it_was_read()
        if how:
            remarks.append(f"{self.name}: {how}")
        if len(unread):
            remarks.append(
                f"{self.name}: {len(unread):,} cells contain no usable {self.kind} and count as "
                f"missing, for example {str(unread.iloc[0])[:40]!r}"
            )
        return remarks

    def _how_it_was_read(self) -> str:
        """In words; empty for plain numbers."""
        if self.kind == "number":
            how = f"numbers in {self.unit}" if self.unit else ""
            for scale in self.scales:
                how += f"{', ' if how else ''}{scale} counts as {SCALES[scale]:,.0f}"
            return how
        if self.kind == "date":
            return f"dates ({self.form or 'stored'}), read as {', '.join(self.parts)}"
        categories = f"{self.widths[0]} categories"
        sharing_a_code = max(Counter(self.codes.values()).values(), default=0)
        if sharing_a_code > 1:
            return f"{categories}, one of which pools {sharing_a_code} rare ones"
        return categories


def inputs(
    frame: pandas.DataFrame, y: Array, decimal: str, keep: Collection[str] = ()
) -> tuple[list[Column], list[str]]:
    """The columns that may say something of a target, and in words what became of others.

    Args:
        frame: The table without its target.
        y: The target, (N,), NaN where missing.
        decimal: The decimal mark of the table.
        keep: Names of columns that are inputs even if they number rows or give the target away.
    """
    chosen: list[Column] = []
    notes: list[str] = []
    names_by_reason: dict[str, list[str]] = {}
    name_by_values: dict[bytes, str] = {}
    for name in map(str, frame):
        series = frame[name]
        column = Column.of(name, series, decimal)
        values, unread = column.values(series, decimal)

        reason = ""
        if column.kind == "date" and not column.parts:
            reason = "constant"
        elif not _present_share(values):
            reason = "empty"
        elif name not in keep:
            twin = name_by_values.get(values.tobytes())
            reason = f"the same as {twin}" if twin else _reason_against(column, series, values, y)
        if not reason and (values == values[0]).all():
            reason = "constant"

        if reason:
            names_by_reason.setdefault(reason, []).append(name)
        else:
            name_by_values[values.tobytes()] = name
            is_complete = bool((values == values).all())
            chosen.append(replace(column, complete=is_complete))
            notes += column.remarks(unread)
    for column in _days_between(chosen):
        values = _days(column, chosen, frame)
        reason = _leak(values[:, 0], y)
        if not _varies(values):
            continue  # one column follows from the other
        if reason and column.name not in keep:
            names_by_reason.setdefault(reason, []).append(column.name)
        else:
            chosen.append(column)
    left_out = [
        f"Left out: {', '.join(names)} ({reason})" for reason, names in names_by_reason.items()
    ]
    return chosen, left_out + notes


def matrix(
    columns: Sequence[Column], frame: pandas.DataFrame, decimal: str
) -> tuple[torch.Tensor, Counter[str]]:
    """A table as numbers, and how many cells of each column could not be read.

    Args:
        columns: The inputs, as they were in training.
        frame: The table.
        decimal: Its decimal mark.

    Returns:
        (N, P) in float64, NaN where missing; and the number of cells by column, where there are
        any.

    Raises:
        ValueError: A column holds another kind of values than in training.
    """
    blocks = []
    unread_cells = Counter[str]()
    for column in columns:
        if column.kind == "days":
            blocks.append(torch.tensor(_days(column, columns, frame), dtype=torch.float64))
            continue
        series = frame[column.name]
        values, unread = column.values(series, decimal)
        # Any text may be a new category, and any stored number is a number, if too large a one.
        stored_kind = "number" if series.dtype.kind in "iuf" else "category"
        if lacks_unit(series, column.unit, decimal):
            example = str(series.dropna().iloc[0])
            raise ValueError(
                f"Expected numbers in {column.unit} in the column {column.name!r}, as in the "
                f"training table, got {example!r}, which may be in another unit. Write "
                f"{column.unit} behind the numbers, as in that table."
            )
        if column.kind != stored_kind and 2 * len(unread) > series.notna().sum():
            raise ValueError(
                f"Expected {PLURALS[column.kind]} in the column {column.name!r}, as in the "
                f"training table, got {unread.iloc[0]!r}. Write the column as in that table."
            )
        unread_cells[column.name] += len(unread)
        blocks.append(torch.tensor(values, dtype=torch.float64))
    return torch.cat(blocks, 1), +unread_cells  # without those of zero


def new_gaps(columns: Sequence[Column], frame: pandas.DataFrame) -> Counter[str]:
    """How many cells are empty in each column that had no such cell in training."""
    empty = Counter({c.name: int(frame[c.name].isna().sum()) for c in columns if c.complete})
    return +empty  # without those of zero


def lacks_unit(series: pandas.Series, unit: str, decimal: str) -> bool:
    """Whether numbers lack a unit that says how large they are.

    12 % may come as 0.12 or as 12, and 1.3k as 1.3 or as 1300. Other units, such as kg, may be left
    out of a table.
    """
    if unit not in ("%", *SCALES):
        return False
    present = series.dropna()
    return bool(len(present)) and not _units(present, decimal).keys() - {""}


def names_in_file(columns: Sequence[Column]) -> list[str]:
    """Names of the columns that a file must have; days between dates are made of others."""
    return [column.name for column in columns if column.kind != "days"]


def times(name: str, series: pandas.Series, decimal: str) -> Array:
    """Dates or numbers of a column as numbers in the order of time, (N,), NaN where missing.

    Raises:
        ValueError: The column holds neither.
    """
    import pandas

    column = Column.of(name, series, decimal)
    if column.kind == "number":
        return numbers(series, decimal, column.unit)
    if column.kind == "date":
        since_first = _dates(series, column.form) - pandas.Timestamp(column.first)
        seconds: Array = since_first.dt.total_seconds().to_numpy(float)
        return seconds
    example = series.dropna().iloc[0]
    raise ValueError(
        f"Expected dates or numbers in the column {name!r} for --time-split, got {example!r}. "
        "Name a column that says when a row was recorded."
    )


def _days_between(columns: Sequence[Column]) -> list[Column]:
    """A column of days for each pair of the first columns of dates."""
    dates = [column for column in columns if column.kind == "date"][:_MOST_DATES_PAIRED]
    return [
        Column(f"days from {start.name} to {end.name}", "days", between=(start.name, end.name))
        for start, end in itertools.combinations(dates, 2)
    ]


def _days(column: Column, columns: Sequence[Column], frame: pandas.DataFrame) -> Array:
    """Days between two dates, (N, 1), NaN where one of them is missing."""
    forms = {other.name: other.form for other in columns}
    start, end = (_dates_in_any_form(frame[name], forms[name]) for name in column.between)
    days: Array = (end - start).dt.total_seconds().to_numpy(float) / 86_400
    return days[:, None]


def _varies(values: Array) -> bool:
    """Whether the values that are present differ."""
    present = values[values == values]
    return bool(present.size) and bool(present.min() < present.max())


def numbers(series: pandas.Series, decimal: str, unit: str = "") -> Array:
    """Numbers in a column, (N,), NaN where there is none or one whose square would overflow.

    pandas reads plain numbers, and `tables.number` those with thousands marks or the unit.

    Args:
        series: Numbers, or text.
        decimal: The decimal mark of text.
        unit: What cells may carry.
    """
    import numpy
    import pandas

    values = numpy.full(len(series), numpy.nan)
    if series.dtype.kind in "iuf" or (decimal == "." and series.dtype.kind == "O"):
        values = numpy.array(pandas.to_numeric(series, errors="coerce"), float)
        values *= _factor("", unit)
    is_unread = numpy.isnan(values) & series.notna().to_numpy()
    if is_unread.any():
        value_of_text = {}
        for text in series[is_unread].unique():
            value_and_unit = number(str(text), decimal)
            if value_and_unit is None:
                continue
            value, cell_unit = value_and_unit
            factor = _factor(cell_unit, unit)
            if factor:
                value_of_text[text] = value * factor
        values[is_unread] = series[is_unread].map(value_of_text).to_numpy(float)
    values[~(abs(values) < _LARGEST)] = numpy.nan
    return values


def _factor(cell_unit: str, unit: str) -> float:
    """What a number in a cell is multiplied by to be in the column's unit; 0 if it is in another.

    A number without a unit is in that of the column. If the column's unit only says how large its
    numbers are (k), it is in ones.
    """
    if cell_unit == unit:
        return 1
    in_ones = unit in SCALES or not unit or unit in CURRENCIES
    if in_ones and (cell_unit in SCALES or not cell_unit):
        return SCALES.get(cell_unit, 1) / SCALES.get(unit, 1)
    return 0 if cell_unit else 1


def _most_common(units: Counter[str]) -> str:
    """The unit that most numbers carry; empty for none.

    Scales (k) are a unit only where all numbers have the same one: 935 and 1.3k are in ones.
    """
    if len(units) > 1:
        units = Counter({unit: count for unit, count in units.items() if unit not in SCALES})
    with_unit = {unit: count for unit, count in units.items() if unit}
    return max(with_unit, key=with_unit.__getitem__, default="")


def _units(cells: pandas.Series, decimal: str) -> Counter[str]:
    """How many of these numbers carry each unit, empty for none."""
    units = Counter[str]()
    for cell in cells:
        value_and_unit = number(str(cell), decimal)
        if value_and_unit is not None:
            units[value_and_unit[1]] += 1
    return units


def _dates(series: pandas.Series, form: str) -> pandas.Series:
    """Dates in a column, without a time zone, NaT where there is none."""
    import pandas

    if series.dtype.kind == "M":
        dates = pandas.to_datetime(series, errors="coerce", utc=True)
    else:
        if series.dtype.kind in "iuf":
            series = series.astype(str).where(series.notna())
        dates = pandas.to_datetime(series, errors="coerce", utc=True, format=form or "ISO8601")
    return dates.dt.tz_localize(None)


def _dates_in_any_form(series: pandas.Series, form: str) -> pandas.Series:
    """Dates in the form of the training table, or in another one where that does not fit."""
    dates = _dates(series, form)
    if _present_share(dates) < _MOSTLY * _present_share(series):
        dates = _dates(series, _date_form(series.dropna()[:_MOST_CELLS_SAMPLED]) or form)
    return dates


def _date_form(sample: pandas.Series) -> str:
    """The form in which most of these texts are dates; empty where there is none."""
    share_read = {form: _present_share(_dates(sample, form)) for form in _DATE_FORMS}
    best = max(_DATE_FORMS, key=share_read.__getitem__)
    return best if share_read[best] >= _MOSTLY else ""


def _date_parts(dates: pandas.Series, first: str) -> pandas.DataFrame:
    """Numbers made of dates, a column each."""
    import pandas

    parts = {name: getattr(dates.dt, name) for name in _DATE_PARTS}
    parts["seconds"] = (dates - pandas.Timestamp(first)).dt.total_seconds()
    return pandas.DataFrame(parts)


def _present_share(values: Any) -> float:
    """Share of values that are not missing, which no value equals."""
    return float((values == values).mean()) if values.size else 0.0


def _reason_against(column: Column, series: pandas.Series, values: Array, y: Array) -> str:
    """Why a column is no input, in words; empty where it is one."""
    if column.kind == "category":
        distinct = series.nunique()
        all_are_rare = distinct > 1 and column.widths == [1]
        if all_are_rare or 2 * distinct > series.notna().sum():
            return "text that hardly repeats"
        return ""
    if column.kind == "number":
        if _numbers_the_rows(column.name, series, values[:, 0]):
            return "row numbers"
        return _leak(values[:, 0], y)
    return ""


def _numbers_the_rows(name: str, series: pandas.Series, x: Array) -> bool:
    """Whether distinct whole numbers count up from 0 or 1, or their column is named so."""
    if series.nunique() != len(x) or not (x == x.round()).all():
        return False
    counts_up = x.min() in (0, 1) and bool((x[1:] - x[:-1] == 1).all())
    return counts_up or _ROW_NAME.fullmatch(name) is not None


def _leak(x: Array, y: Array) -> str:
    """How a column of numbers gives the target away, in words; empty where it does not."""
    import numpy
    import pandas

    both_present = (x == x) & (y == y)
    x = x[both_present]
    y = y[both_present]
    if len(x) < _LEAST_FOR_LEAK or numpy.ptp(x) < 1 / _LARGEST:
        return ""
    rank_correlation = numpy.corrcoef(pandas.Series(x).rank(), pandas.Series(y).rank())[0, 1]
    if abs(rank_correlation) > LEAK:
        return "gives the target away: it sorts the rows in the same order"

    # The target rounded: no row is further from a straight line than half a step between levels.
    levels = numpy.unique(x)
    if len(levels) < _LEAST_FOR_LEAK:
        return ""
    slope, constant = numpy.polyfit(x, y, 1)
    largest_rounding = 0.6 * abs(slope) * numpy.diff(levels).min()
    if abs(y - slope * x - constant).max() <= largest_rounding:
        return "gives the target away: it is the target, rounded"
    return ""
