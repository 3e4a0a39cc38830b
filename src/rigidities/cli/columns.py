"""What the columns of a table hold, and the table as a matrix of numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .tables import number

if TYPE_CHECKING:
    import numpy
    import pandas

    Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

KINDS = ("number", "date", "category")
MOST_CATEGORIES = 255
"""Codes of a column at most, that of rare ones included; HistGradientBoosting takes no more."""
RARE = 5  # rows below which a category is pooled with the others that are rare
LEAK = 0.999  # rank correlation with the target beyond which a column counts as the target itself
_MOSTLY, _LARGEST = 0.9, 1e100
_DAYS = (
    "%d.%m.%Y|%d.%m.%y|%m/%d/%Y|%d/%m/%Y|%Y/%m/%d|%d-%m-%Y|%d %b %Y|%b %d, %Y|%d %B %Y|%B %d, %Y"
)
_TIMES = "| %H:%M| %H:%M:%S| %I:%M %p| %I:%M:%S %p"
_FORMS = [day + time for day in _DAYS.split("|") for time in _TIMES.split("|")]
_FORMS = ["ISO8601", "%H:%M", "%H:%M:%S", *_FORMS]
_ROW = re.compile(
    r"(?i:.*(\b|_)(id|idx|index(_level_\d+__)?|uuid|key|nr|no|row|unnamed.*))|.*[a-z]I[dD]"
)


@dataclass(frozen=True)
class Column:
    """An input, of one of the `KINDS`.

    Numbers may carry a unit; dates have a form for `pandas.to_datetime`, a first one and parts that
    vary; categories have codes, and those that are rare share the last one.
    """

    name: str
    kind: str
    unit: str = ""
    form: str = ""
    first: str = ""
    parts: Sequence[str] = ()
    codes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, series: pandas.Series, decimal: str) -> Column:
        """What a column holds for the most part."""
        present, form = series.dropna(), ""
        if series.dtype.kind in "iuf" or present.empty:
            return cls(name, "number")
        if series.dtype.kind != "M":
            some = present.iloc[:: 1 + len(present) // 500]
            units = Counter(found[1] for text in some if (found := number(text, decimal)))
            unit = max(filter(None, units), key=units.__getitem__, default="")
            if _present(numbers(present, decimal, unit)) >= _MOSTLY:
                return cls(name, "number", unit=unit)
            if not (form := _form(some)):
                counts = present.value_counts()
                common = min(int((counts >= RARE).sum()), MOST_CATEGORIES - 1)
                codes = {text: min(k, common) for k, text in enumerate(counts.index)}
                return cls(name, "category", codes=codes)
        dates = _dates(series, form)
        parts = _parts(dates, first := dates.min().isoformat())
        varied = [part for part in parts if parts[part].nunique() > 1]
        return cls(name, "date", form=form, first=first, parts=varied)

    @property
    def widths(self) -> list[int]:
        """Of its columns of the matrix the number of categories; 0 for numbers."""
        return [max(self.codes.values(), default=-1) + 1] * (len(self.parts) or 1)

    def values(self, series: pandas.Series, decimal: str) -> tuple[Array, pandas.Series]:
        """(N, 1), or (N, parts) of dates, NaN where missing; and cells of which nothing is made."""
        if self.kind == "number":
            found = numbers(series, decimal, self.unit)[:, None]
        elif self.kind == "category":
            texts = series.map(str, na_action="ignore").astype(object)
            found = texts.map(dict(self.codes)).to_numpy(float)[:, None]
        else:
            dates = _dates(series, self.form)
            if _present(dates) < _MOSTLY * _present(series):  # written in another way now?
                dates = _dates(series, _form(series.dropna()[:500]) or self.form)
            found = _parts(dates, self.first)[list(self.parts)].to_numpy(float)
        return found, series[(found != found).all(1) & series.notna().to_numpy()]

    def remarks(self, lost: pandas.Series) -> list[str]:
        """How it was read, in words."""
        (codes, *_), rare = self.widths, max(Counter(self.codes.values()).values(), default=0)
        said = {
            "number": f"numbers in {self.unit}" if self.unit else "",
            "date": f"dates ({self.form or 'stored'}), as {', '.join(self.parts)}",
            "category": f"{codes} categories" + f", one of them {rare} rare ones" * (rare > 1),
        }
        few = f"{len(lost):,} cells hold no {self.kind}: missing" if len(lost) else ""
        return [f"{self.name}: {one}" for one in (said[self.kind], few) if one]


def inputs(
    frame: pandas.DataFrame, y: Array, decimal: str, keep: Collection[str] = ()
) -> tuple[list[Column], list[str]]:
    """The columns that may say something of a target, and in words what became of others."""
    chosen: list[Column] = []
    notes, dropped, met = list[str](), dict[str, list[str]](), dict[bytes, str]()
    for name in map(str, frame):
        column = Column.of(name, frame[name], decimal)
        values, lost = column.values(frame[name], decimal)
        why = "" if _present(values) else "empty"
        if not why and name not in keep:
            twin = met.get(values.tobytes())
            why = f"the same as {twin}" if twin else _useless(column, frame[name], values, y)
        if why := why or "constant" * bool((values == values[0]).all()):
            dropped.setdefault(why, []).append(name)
        else:
            met[values.tobytes()] = name
            chosen.append(column)
            notes += column.remarks(lost)
    return chosen, [f"Left out: {', '.join(n)} ({why})" for why, n in dropped.items()] + notes


def matrix(
    columns: Sequence[Column], frame: pandas.DataFrame, decimal: str
) -> tuple[torch.Tensor, Counter[str]]:
    """(N, P) in float64, NaN where missing, and the cells by column that could not be read.

    Raises:
        ValueError: a column holds another kind of values.
    """
    blocks, unread = list[torch.Tensor](), Counter[str]()
    for name, column in ((column.name, column) for column in columns):
        values, lost = column.values(frame[name], decimal)
        fits = column.kind == ("number" if frame[name].dtype.kind in "iuf" else "category")
        if not fits and 2 * len(lost) > frame[name].notna().sum():
            what = f"Expected {column.kind}s in the column {name!r} as the model was trained with"
            raise ValueError(f"{what}, got {lost.iloc[0]!r}. Write it as it was.")
        unread[name] += len(lost)
        blocks.append(torch.tensor(values, dtype=torch.float64))
    return torch.cat(blocks, 1), +unread


def numbers(series: pandas.Series, decimal: str, unit: str = "") -> Array:
    """Numbers in a column, (N,), NaN where none is or no square; cells may carry the unit."""
    import numpy
    import pandas

    found = numpy.full(len(series), numpy.nan)
    if series.dtype.kind in "iuf" or (decimal == "." and series.dtype.kind == "O"):
        found = numpy.array(pandas.to_numeric(series, errors="coerce"), float)
    rest = numpy.isnan(found) & series.notna().to_numpy()
    if rest.any():
        read = {text: number(str(text), decimal) for text in series[rest].unique()}
        value = {text: one[0] for text, one in read.items() if one and one[1] in ("", unit)}
        found[rest] = series[rest].map(value).to_numpy(float)
    found[~(abs(found) < _LARGEST)] = numpy.nan
    return found


def _dates(series: pandas.Series, form: str) -> pandas.Series:
    import pandas

    written = {} if series.dtype.kind == "M" else {"format": form or "ISO8601"}
    texts = series.astype(str).where(series.notna()) if series.dtype.kind in "iuf" else series
    return pandas.to_datetime(texts, errors="coerce", utc=True, **written).dt.tz_localize(None)


def _form(some: pandas.Series) -> str:
    """The way in which most of these texts are dates; empty where none is."""
    shares = {form: _present(_dates(some, form)) for form in _FORMS}
    best = max(_FORMS, key=shares.__getitem__)
    return best if shares[best] >= _MOSTLY else ""


def _parts(dates: pandas.Series, first: str) -> pandas.DataFrame:
    import pandas

    names = ("year", "month", "day_of_year", "day_of_week", "hour")
    parts = {name: getattr(dates.dt, name) for name in names}
    parts["seconds"] = (dates - pandas.Timestamp(first)).dt.total_seconds()
    return pandas.DataFrame(parts)


def _present(values: Any) -> float:
    """Share of values that are there."""
    return float((values == values).mean()) if values.size else 0.0


def _useless(column: Column, series: pandas.Series, values: Array, y: Array) -> str:
    """Why a column is no input, in words; empty where it is one."""
    import numpy
    import pandas

    x, distinct = values[:, 0], series.nunique()
    rare = distinct > 1 and column.widths == [1]  # all of them
    if column.kind == "category" and (rare or 2 * distinct > series.notna().sum()):
        return "text that hardly repeats"
    if column.kind != "number":
        return ""
    if distinct == len(x) and (x == x.round()).all():
        counts_up = x.min() in (0, 1) and bool((x[1:] - x[:-1] == 1).all())
        if counts_up or _ROW.fullmatch(column.name):
            return "numbers of the rows"
    x, y = x[known := (x == x) & (y == y)], y[known]
    if len(x) < 10 or numpy.ptp(x) < 1 / _LARGEST:
        return ""
    if abs(numpy.corrcoef(*(pandas.Series(one).rank() for one in (x, y)))[0, 1]) > LEAK:
        return "gives the target away: its rows have the same order"
    levels, (slope, constant) = numpy.unique(x), numpy.polyfit(x, y, 1)
    rounding = 0.6 * abs(slope) * numpy.diff(levels).min()
    rounded = len(levels) >= 10 and abs(y - slope * x - constant).max() <= rounding
    return "gives the target away: it is the target, rounded" if rounded else ""
