"""What the columns of a table hold, and the table as a matrix of numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..notices import require, require_kinds
from .tables import number

if TYPE_CHECKING:
    import numpy
    import pandas

    Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

MOST_CATEGORIES = 255
"""Codes of a column at most, that of rare ones included; HistGradientBoosting takes no more."""
RARE = 5
"""Rows below which a category is pooled with the others that are rare."""
LEAK = 0.999
"""Rank correlation with the target beyond which a column counts as the target itself."""
_MOSTLY = 0.9
_DAYS = ["%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d", "%d-%m-%Y", "%d %b %Y", "%b %d, %Y"]
_TIMES = ["", " %H:%M", " %H:%M:%S"]
_FORMS = ["ISO8601", "%H:%M", "%H:%M:%S", *(day + time for day in _DAYS for time in _TIMES)]
_IDENTIFIER = re.compile(r"(?i:.*(\b|_)(id|idx|index|uuid|guid|key|nr|no|row|unnamed.*))|.*[a-z]I[dD]")


@dataclass(frozen=True)
class Column:
    """One column that is an input.

    Attributes:
        name: in the file.
        kind: "number", "date" or "category".
        unit: that its numbers may carry.
        form: of its dates, as `pandas.to_datetime` takes it; empty for Parquet's own.
        first: of its dates, in ISO form.
        parts: of its dates that vary.
        categories: by code.
        rare: categories that share the code after those.
    """

    name: str
    kind: str
    unit: str = ""
    form: str = ""
    first: str = ""
    parts: Sequence[str] = ()
    categories: Sequence[str] = ()
    rare: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, series: pandas.Series, decimal: str) -> Column:
        """What a column holds for the most part."""
        present = series.dropna()
        if series.dtype.kind in "iuf" or present.empty:
            return cls(name, "number")
        if series.dtype.kind == "M":
            return cls._of_dates(name, series, "")
        some = present.iloc[:: 1 + len(present) // 2000]
        units = Counter(found[1] for text in some if (found := number(text, decimal)))
        unit = max(filter(None, units), key=units.__getitem__, default="")
        if _read(numbers(present, decimal, unit)) >= _MOSTLY:
            return cls(name, "number", unit=unit)
        form = _form(some)
        return cls._of_dates(name, series, form) if form else cls._of_categories(name, present)

    @classmethod
    def _of_dates(cls, name: str, series: pandas.Series, form: str) -> Column:
        dates = _dates(series, form)
        first = dates.min().isoformat()
        parts = _parts(dates, first)
        varied = [part for part in parts if parts[part].nunique() > 1]
        return cls(name, "date", form=form, first=first, parts=varied)

    @classmethod
    def _of_categories(cls, name: str, present: pandas.Series) -> Column:
        counts = sorted(Counter(present).items(), key=lambda one: (-one[1], one[0]))
        common = sum(count >= RARE for _, count in counts)
        if len(counts) > MOST_CATEGORIES:
            common = min(common, MOST_CATEGORIES - 1)
        names = [text for text, _ in counts]
        return cls(name, "category", categories=names[:common], rare=names[common:])

    @property
    def codes(self) -> int:
        """How many categories the model sees; 0 for numbers and dates."""
        return len(self.categories) + bool(self.rare)

    def values(self, series: pandas.Series, decimal: str) -> Array:
        """(N, 1), or (N, parts) of dates; NaN where a value is missing or cannot be read."""
        if self.kind == "number":
            return numbers(series, decimal, self.unit)[:, None]
        if self.kind == "date":
            dates = _dates(series, self.form)
            if _read(dates) < _MOSTLY and series.dtype.kind != "M":  # written in another way
                dates = _dates(series, _form(series.dropna()) or self.form)
            found: Array = _parts(dates, self.first)[list(self.parts)].to_numpy(float)
            return found
        code = {text: k for k, text in enumerate(self.categories)}
        code |= dict.fromkeys(self.rare, len(self.categories))
        found = series.astype(object).map(lambda text: code.get(str(text))).to_numpy(float)[:, None]
        return found


@dataclass(frozen=True)
class Columns:
    """The inputs of a model, in its order."""

    columns: Sequence[Column]

    @classmethod
    def of(
        cls, frame: pandas.DataFrame, y: Array, decimal: str, keep: Collection[str] = ()
    ) -> tuple[Columns, list[str]]:
        """The columns that may say something of a target, and in words what became of others."""
        chosen: list[Column] = []
        notes, dropped, met = [], dict[str, list[str]](), dict[bytes, str]()
        for name in map(str, frame):
            column = Column.of(name, frame[name], decimal)
            values = column.values(frame[name], decimal)
            why = _constant(values)
            if not why and name not in keep:
                twin = met.get(values.tobytes())
                why = f"the same as {twin}" if twin else _useless(column, frame[name], values, y)
            if why:
                dropped.setdefault(why, []).append(name)
                continue
            met[values.tobytes()] = name
            chosen.append(column)
            notes += _remarks(column, frame[name], values)
        listed = [f"Left out: {', '.join(names)} ({why})" for why, names in dropped.items()]
        return cls(chosen), listed + notes

    @property
    def codes(self) -> list[int]:
        """Of each column of the matrix the number of categories; 0 for numbers."""
        return [c.codes for c in self.columns for _ in range(len(c.parts) or 1)]

    def matrix(self, frame: pandas.DataFrame, decimal: str) -> tuple[torch.Tensor, Counter[str]]:
        """(N, P) in float64, NaN where missing, and the cells by column that could not be read.

        Raises:
            ValueError: a column is missing, or holds another kind of values.
        """
        if lacking := [c.name for c in self.columns if c.name not in frame]:
            raise ValueError(
                f"Expected the columns {', '.join(map(repr, lacking))} that the model was trained "
                f"with, got {', '.join(map(repr, frame))}. Name them as they were."
            )
        blocks, unread = [], Counter[str]()
        for column in self.columns:
            series = frame[column.name]
            values = column.values(series, decimal)
            lost = _lost(series, values)
            if column.kind != "category" and 2 * len(lost) > series.notna().sum():
                raise ValueError(
                    f"Expected {column.kind}s in the column {column.name!r} as the model was "
                    f"trained with, got {lost.iloc[0]!r}. Write it as it was."
                )
            unread[column.name] += len(lost)
            blocks.append(torch.tensor(values, dtype=torch.float64))
        return torch.cat(blocks, 1), +unread

    def header(self) -> list[dict[str, Any]]:
        """As JSON can hold it."""
        return [asdict(column) for column in self.columns]

    @classmethod
    def from_header(cls, header: Any) -> Columns:
        """What `header` came from."""
        require(isinstance(header, list) and len(header) > 0, "the columns")
        for one in header:
            require_kinds(one, {"name": str, "kind": str, "parts": list}, "a column")
        return cls([Column(**one) for one in header])

    def __str__(self) -> str:
        kinds = Counter(column.kind for column in self.columns)
        plural = {"number": "numbers", "date": "dates", "category": "categories"}
        return ", ".join(f"{n} {kind if n == 1 else plural[kind]}" for kind, n in kinds.items())


def numbers(series: pandas.Series, decimal: str, unit: str = "") -> Array:
    """The finite numbers in a column, (N,), NaN elsewhere; cells may carry the unit."""
    import numpy
    import pandas

    plain = decimal == "." or series.dtype.kind in "iuf"
    found = numpy.full(len(series), numpy.nan)
    if plain and series.dtype.kind != "M":
        found = pandas.to_numeric(series, errors="coerce").to_numpy(float, na_value=numpy.nan).copy()
    rest = numpy.isnan(found) & series.notna().to_numpy()
    if rest.any():
        read = {text: number(str(text), decimal) for text in series[rest].unique()}
        value = {text: one[0] for text, one in read.items() if one and one[1] in ("", unit)}
        found[rest] = series[rest].map(value).to_numpy(float)
    found[~numpy.isfinite(found)] = numpy.nan
    return found


def _dates(series: pandas.Series, form: str) -> pandas.Series:
    import pandas

    options = {"format": form} if form and series.dtype.kind != "M" else {}
    if series.dtype.kind in "iuf":  # seconds of what?
        return pandas.Series(pandas.NaT, index=series.index)
    found = pandas.to_datetime(series, errors="coerce", utc=True, **options)
    return found.dt.tz_localize(None)


def _form(some: pandas.Series) -> str:
    """The way in which most of these texts are dates; empty where none is."""
    tried = some.iloc[:: 1 + len(some) // 500]
    shares = {form: _read(_dates(tried, form)) for form in _FORMS}
    best = max(_FORMS, key=shares.__getitem__)
    return best if shares[best] >= _MOSTLY else ""


def _parts(dates: pandas.Series, first: str) -> pandas.DataFrame:
    import pandas

    names = {"year": "year", "month": "month", "day of year": "dayofyear", "weekday": "weekday"}
    parts = {name: getattr(dates.dt, own) for name, own in (names | {"hour": "hour"}).items()}
    parts["seconds"] = (dates - pandas.Timestamp(first)).dt.total_seconds()
    return pandas.DataFrame(parts)


def _read(values: Any) -> float:
    """Share of values that are there."""
    return float((values == values).mean()) if len(values) else 0.0


def _lost(series: pandas.Series, values: Array) -> pandas.Series:
    """Cells that hold something of which nothing was read."""
    return series[(values != values)[:, 0] & series.notna().to_numpy()]


def _constant(values: Array) -> str:
    present = values[values == values]
    if not len(present):
        return "empty"
    return "constant" if not values.shape[1] or (values == values[0]).all() else ""


def _useless(column: Column, series: pandas.Series, values: Array, y: Array) -> str:
    """Why a column is no input, in words; empty where it is one."""
    distinct, count = series.nunique(), int(series.notna().sum())
    if column.kind == "category" and 2 * distinct > count:
        return "text that hardly repeats"
    if column.kind != "number":
        return ""
    x = values[:, 0]
    if distinct == len(x) and (x == x.round()).all():
        counts_up = x.min() in (0, 1) and bool((x[1:] - x[:-1] == 1).all())
        if counts_up or _IDENTIFIER.fullmatch(column.name):
            return "a number of the row"
    known = (x == x) & (y == y)
    return _leak(x[known], y[known])


def _leak(x: Array, y: Array) -> str:
    """How a column gives the target away, in words."""
    import numpy
    import pandas

    if len(x) < 10 or not numpy.ptp(x) or not numpy.ptp(y):
        return ""
    ranks = [pandas.Series(one).rank() for one in (x, y)]
    if abs(numpy.corrcoef(*ranks)[0, 1]) > LEAK:
        return "gives the target away: its order is the target's"
    levels = numpy.unique(x)
    slope, constant = numpy.polyfit(x, y, 1)
    rounding = 0.505 * abs(slope) * numpy.diff(levels).min()
    rounded = len(levels) >= 10 and abs(y - slope * x - constant).max() <= rounding
    return "gives the target away: it is the target, rounded" if rounded else ""


def _remarks(column: Column, series: pandas.Series, values: Array) -> list[str]:
    """What a reader should know of how a column was read."""
    lost, said = _lost(series, values), []
    if len(lost):
        said.append(f"{column.name}: {len(lost)} cells are no {column.kind}s, as {lost.iloc[0]!r}: missing")
    if column.unit:
        said.append(f"{column.name}: numbers in {column.unit}")
    if column.kind == "date":
        form = f" written {column.form}" if column.form else ""
        said.append(f"{column.name}: dates{form}, as {', '.join(column.parts)}")
    if column.kind == "category":
        pooled = f", {len(column.rare)} rare ones as one" if column.rare else ""
        said.append(f"{column.name}: {len(column.categories)} categories{pooled}")
    return said
