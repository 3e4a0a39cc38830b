"""Nested mappings of numbers as tables that open and close.

| the mapping holds | becomes |
| --- | --- |
| single values | a table of two columns |
| mappings of single values with keys in common | one table, a line for each |
| lists of one length | one table, a column for each |
| anything else | an entry of its own that opens |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..markup import Markup, around, joined, number, table, tag, words
from ..scores import METRICS

_LONGEST = 200
"""Lines of a table of lists."""
_LINE = 120
"""Characters of values that are written into one line."""
_SHORT = 4
"""Numbers of a list that are written into one cell."""
_DEEPEST, _MOST_OPEN = 3, 150
"""How deep, and with how many lines, entries are open at first."""
_PAIRED = {*METRICS, "std", "mse", "accuracy"}
"""Keys whose pairs are a mean and its standard error, unless they lie in lists of repetitions."""


def value_of(entry: Any) -> float | None:
    """A number, also one that JSON cannot hold and that stands there as text; else None.

    Examples:
        >>> value_of(2), value_of("inf"), value_of("two"), value_of(True)
        (2.0, inf, None, None)
    """
    plain = isinstance(entry, (int, float)) and not isinstance(entry, bool)
    return float(entry) if plain or entry in ("nan", "inf", "-inf") else None


def mean_and_error(entry: Any) -> tuple[float, float | None] | None:
    """A number, or a pair of mean and standard error; None for anything else."""
    single = value_of(entry)
    if single is not None:
        return single, None
    if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2:
        mean, error = map(value_of, entry)
        if mean is not None and error is not None and not error < 0:
            return mean, None if math.isnan(error) else error
    return None


def repeated(key: str) -> bool:
    """Whether values below a key are those of single repetitions: two are no mean and error.

    Examples:
        >>> repeated("per_split"), repeated("auroc_of_each"), repeated("nll")
        (True, True, False)
    """
    return key == "per_split" or key.endswith("_of_each")


def tables(values: Mapping[str, Any], depth: int = 0, *, pairs: bool = True) -> Markup:
    """Everything in a mapping; entries that are small and not deep are open at first.

    Args:
        values: nested mappings, lists, numbers and text.
        depth: how deep the mapping lies.
        pairs: whether two numbers may be a mean and its standard error.
    """
    single = {k: v for k, v in values.items() if _is_cell(v)}
    alike = _alike({k: v for k, v in values.items() if isinstance(v, Mapping)})
    lists = _of_one_length({k: v for k, v in values.items() if _is_list(v) and not _is_cell(v)})
    parts = [_list_of_values(single, pairs)] if single else []
    parts += [_matrix(alike, pairs)] if alike else []
    parts += [_columns(group, pairs) for group in lists]
    done = {*single, *alike, *(key for group in lists for key in group)}
    rest = [key for key in values if key not in done]
    parts += [_entry(key, values[key], depth, pairs and not repeated(key)) for key in rest]
    return joined(parts)


def _list_of_values(values: Mapping[str, Any], pairs: bool) -> Markup:
    """A line for a few values, a table for more."""
    cells = [(words(key), _cell(key, value, pairs)) for key, value in values.items()]
    if sum(len(key) + len(cell) for key, cell in cells) < _LINE:
        return tag("p", joined(tag("span", f"{key}: {cell}") for key, cell in cells))
    return table(["", "Value"], cells, label="Values")


def _entry(key: str, value: Any, depth: int, pairs: bool) -> Markup:
    if _is_list(value):
        value = {str(k): entry for k, entry in enumerate(value)}
    if not isinstance(value, Mapping):
        return tag("p", f"{words(key)}: {value}")
    inner = tables(value, depth + 1, pairs=pairs) if value else tag("p", "empty")
    opened = depth < _DEEPEST and _lines(value) <= _MOST_OPEN
    return tag("details", tag("summary", words(key)), inner, open=opened)


def _lines(value: Any) -> int:
    """About how many lines a value takes when it is open."""
    return sum(map(_lines, value.values())) if isinstance(value, Mapping) else 1


def _matrix(rows: Mapping[str, Mapping[str, Any]], pairs: bool) -> Markup:
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    body = []
    for name, row in rows.items():
        paired = pairs and not repeated(name)
        cells = (_cell(key, row[key], paired) if key in row else "" for key in keys)
        body.append([words(name), *cells])
    return table(["", *map(words, keys)], body, label=words(", ".join(rows)))


def _columns(lists: Mapping[str, Sequence[Any]], pairs: bool) -> Markup:
    count = len(next(iter(lists.values())))
    body = [
        [str(i), *(_cell(key, values[i], pairs) for key, values in lists.items())]
        for i in range(min(count, _LONGEST))
    ]
    names = words(", ".join(lists))
    short = table(["", *map(words, lists)], body, label=names)
    if count > _LONGEST:
        short = joined([short, tag("p", f"The first {_LONGEST} of {count}.", class_="about")])
    return tag("details", tag("summary", f"{names} ({count} values each)"), short)


def _alike(mappings: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Two or more mappings of single values that share most of their keys."""
    flat = {k: m for k, m in mappings.items() if m and all(map(_is_cell, m.values()))}
    if len(flat) < 2:
        return {}
    every = {key for row in flat.values() for key in row}
    shared = set.intersection(*(set(row) for row in flat.values()))
    return flat if 2 * len(shared) >= len(every) else {}


def _of_one_length(lists: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
    """Lists of single values, grouped by their length."""
    groups: dict[int, dict[str, Sequence[Any]]] = {}
    for key, values in lists.items():
        if all(_is_cell(entry) for entry in values):
            groups.setdefault(len(values), {})[key] = values
    return list(groups.values())


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_cell(value: Any) -> bool:
    inside = value if _is_list(value) else [value]
    nested = any(isinstance(entry, Mapping) or _is_list(entry) for entry in inside)
    return not nested and (inside is not value or len(inside) <= _SHORT)


def _cell(key: str, value: Any, pairs: bool = True) -> str:
    pair = mean_and_error(value) if pairs and key in _PAIRED else None
    if pair is not None and pair[1] is not None:
        return around(*pair)
    if _is_list(value):
        return ", ".join(_cell("", entry) for entry in value)
    found = value_of(value)
    if found is None or isinstance(value, int):
        return "-" if value is None else str(value)
    return number(found, 4)
