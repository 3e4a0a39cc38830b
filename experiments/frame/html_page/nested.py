"""Nested mappings of numbers as tables that open and close.

| the mapping holds | becomes |
| --- | --- |
| single values | a line, or a table of two columns |
| mappings of single values with keys in common | one table, a line for each |
| lists of one length | one table, a column for each |
| anything else | an entry of its own that opens |

`blocks` gives these as objects, which the template `experiment.html` shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from experiments.frame.html_page.metrics import METRICS, words
from rigidities.report.formatting import around, number

_LONGEST_TABLE = 200
"""Lines of a table of lists."""
_LONGEST_LINE = 120
"""Characters of values that are written into one line."""
_LONGEST_CELL = 4
"""Numbers of a list that are written into one cell."""
_DEEPEST_OPEN = 3
"""Entries less deep than this are open at first, if they are short."""
_MOST_OPEN_LINES = 150
_MEAN_AND_ERROR = {*METRICS, "std", "mse", "accuracy"}
"""Keys whose pairs are a mean and its standard error, unless they lie in lists of repetitions."""


@dataclass(frozen=True)
class Line:
    """Single values, side by side."""

    texts: Sequence[str]
    kind: str = "line"


@dataclass(frozen=True)
class TableBlock:
    """A table of text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    label: str
    kind: str = "table"


@dataclass(frozen=True)
class Note:
    """A remark on what is left out."""

    text: str
    kind: str = "note"


@dataclass(frozen=True)
class Entry:
    """Blocks under a heading that opens and closes."""

    heading: str
    blocks: Sequence[Block]
    is_open: bool
    kind: str = "entry"


Block: TypeAlias = "Line | TableBlock | Note | Entry"


# --- values ------------------------------------------------------------------------------------


def value_of(entry: Any) -> float | None:
    """A number, also one that JSON cannot hold and that stands there as text; else None.

    Examples:
        >>> value_of(2), value_of("inf"), value_of("two"), value_of(True)
        (2.0, inf, None, None)
    """
    is_number = isinstance(entry, (int, float)) and not isinstance(entry, bool)
    if is_number or entry in ("nan", "inf", "-inf"):
        return float(entry)
    return None


def mean_and_error(entry: Any) -> tuple[float, float | None] | None:
    """A number, or a pair of mean and standard error; None for anything else."""
    single = value_of(entry)
    if single is not None:
        return single, None
    if not is_list(entry) or len(entry) != 2:
        return None
    mean, error = value_of(entry[0]), value_of(entry[1])
    if mean is None or error is None or error < 0:
        return None
    return mean, None if math.isnan(error) else error


def of_repetitions(key: str) -> bool:
    """Whether values below a key are those of single repetitions: two are no mean and error.

    Examples:
        >>> of_repetitions("per_split"), of_repetitions("auroc_of_each"), of_repetitions("nll")
        (True, True, False)
    """
    return key == "per_split" or key.endswith("_of_each")


def is_list(value: Any) -> bool:
    """Whether a value is a list, and not text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _fits_a_cell(value: Any) -> bool:
    """Whether a value is single, or a short list of single values."""
    if not is_list(value):
        return not isinstance(value, Mapping)
    nested = any(isinstance(entry, Mapping) or is_list(entry) for entry in value)
    return not nested and len(value) <= _LONGEST_CELL


def _cell(key: str, value: Any, pairs: bool = True) -> str:
    """A value as text; a pair as mean and error, where the key and `pairs` allow it."""
    pair = mean_and_error(value) if pairs and key in _MEAN_AND_ERROR else None
    if pair is not None and pair[1] is not None:
        return around(pair[0], pair[1])
    if is_list(value):
        return ", ".join(_cell("", entry) for entry in value)
    if value is None:
        return "-"
    as_number = value_of(value)
    if as_number is None or isinstance(value, int):
        return str(value)
    return number(as_number, 4)


# --- mappings ----------------------------------------------------------------------------------


def blocks(values: Mapping[str, Any], depth: int = 0, *, pairs: bool = True) -> list[Block]:
    """Everything in a mapping; entries that are short and not deep are open at first.

    Args:
        values: Nested mappings, lists, numbers and text.
        depth: How deep the mapping lies.
        pairs: Whether two numbers may be a mean and its standard error.
    """
    single = {key: value for key, value in values.items() if _fits_a_cell(value)}
    mappings = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lists = {key: value for key, value in values.items() if is_list(value) and key not in single}
    alike = _alike(mappings)
    lists_by_length = _by_length(lists)
    shown: list[Block] = []
    shown_keys = {*single, *alike}
    if single:
        shown.append(_single_values(single, pairs))
    if alike:
        shown.append(_table_of_mappings(alike, pairs))
    for lists_of_one_length in lists_by_length:
        shown.append(_table_of_lists(lists_of_one_length, pairs))
        shown_keys.update(lists_of_one_length)
    for key, value in values.items():
        if key not in shown_keys:
            shown.append(_entry(key, value, depth, pairs and not of_repetitions(key)))
    return shown


def _single_values(values: Mapping[str, Any], pairs: bool) -> Line | TableBlock:
    """A line for a few values, a table for more."""
    cells = [(words(key), _cell(key, value, pairs)) for key, value in values.items()]
    if sum(len(name) + len(text) for name, text in cells) < _LONGEST_LINE:
        return Line([f"{name}: {text}" for name, text in cells])
    return TableBlock(["", "Value"], cells, label="Values")


def _entry(key: str, value: Any, depth: int, pairs: bool) -> Entry:
    """A mapping, or a list as a mapping from positions, under its key."""
    if is_list(value):
        value = {str(position): entry for position, entry in enumerate(value)}
    inner = blocks(value, depth + 1, pairs=pairs) if value else [Line(["empty"])]
    is_open = depth < _DEEPEST_OPEN and _line_count(value) <= _MOST_OPEN_LINES
    return Entry(words(key), inner, is_open)


def _line_count(value: Any) -> int:
    """About how many lines a value takes when it is open."""
    if not isinstance(value, Mapping):
        return 1
    return sum(_line_count(entry) for entry in value.values())


def _table_of_mappings(mappings: Mapping[str, Mapping[str, Any]], pairs: bool) -> TableBlock:
    """One table, with a line for each mapping and a column for each key."""
    keys = list(dict.fromkeys(key for mapping in mappings.values() for key in mapping))
    rows = []
    for name, mapping in mappings.items():
        row_pairs = pairs and not of_repetitions(name)
        row = [words(name)]
        for key in keys:
            row.append(_cell(key, mapping[key], row_pairs) if key in mapping else "")
        rows.append(row)
    header = ["", *(words(key) for key in keys)]
    return TableBlock(header, rows, label=words(", ".join(mappings)))


def _table_of_lists(lists: Mapping[str, Sequence[Any]], pairs: bool) -> Entry:
    """One table that is closed at first, with a column for each list."""
    count = len(next(iter(lists.values())))
    rows = []
    for position in range(min(count, _LONGEST_TABLE)):
        cells = [_cell(key, values[position], pairs) for key, values in lists.items()]
        rows.append([str(position), *cells])
    names = words(", ".join(lists))
    header = ["", *(words(key) for key in lists)]
    inner: list[Block] = [TableBlock(header, rows, label=names)]
    if count > _LONGEST_TABLE:
        inner.append(Note(f"The first {_LONGEST_TABLE} of {count}."))
    return Entry(f"{names} ({count} values each)", inner, is_open=False)


def _alike(mappings: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Two or more mappings of single values that share most of their keys; else none."""
    flat = {}
    for name, mapping in mappings.items():
        if mapping and all(_fits_a_cell(value) for value in mapping.values()):
            flat[name] = mapping
    if len(flat) < 2:
        return {}
    key_sets = [set(mapping) for mapping in flat.values()]
    shared = set.intersection(*key_sets)
    return flat if 2 * len(shared) >= len(set.union(*key_sets)) else {}


def _by_length(lists: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
    """Lists of single values, grouped by their length."""
    groups: dict[int, dict[str, Sequence[Any]]] = {}
    for key, values in lists.items():
        if all(_fits_a_cell(entry) for entry in values):
            groups.setdefault(len(values), {})[key] = values
    return list(groups.values())
