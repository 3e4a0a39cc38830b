"""Reports from files: predictions, an experiment's numbers, or a saved fit with test data."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import experiment, judged, judged_on, page_of, save
from .document import checked_place, require_plotly
from .judgement import Judgements, Verdict
from .rows import Bars

TARGETS = ("target", "y", "labels")
"""Names under which the true values are looked for."""

T = TypeVar("T")
Load = Callable[[Path, nn.Module], Bars]


def from_file(
    path: Path,
    out: Path,
    *,
    load: Load,
    title: str | None = None,
    mean: Sequence[str] | None = None,
    std: Sequence[str] | None = None,
    target: Sequence[str] | None = None,
    model: str | None = None,
    data: Path | None = None,
) -> tuple[Path, Verdict | None]:
    """Write the report of a file; arguments as on the command line.

    Returns the page and its verdict, which the numbers of an experiment do not have. `load` gives
    the object with error bars from its file and model. An OSError is about a file or folder that
    cannot be used, a ValueError about what is in one.
    """
    checked_place(out)
    for read in (path, data):
        if read is not None and out.exists() and read.exists() and out.samefile(read):
            raise ValueError(
                f"--out {out} is the file that the report is made from. Choose another place for "
                "the page."
            )
    require_plotly()
    title, kind = title or path.name, path.suffix.lower()
    columns = {"mean": mean, "std": std, "target": target}
    useless = {".safetensors": ("mean", "std"), ".json": ("mean", "std", "target")}
    for option in useless.get(kind, ()):
        if columns[option] is not None:
            raise ValueError(f"--{option} goes with predictions in a .csv file, got {path}.")
    if kind == ".safetensors":
        if model is None or data is None:
            raise ValueError(
                "A saved fit holds neither the model nor test data. Pass --model module:function "
                "and --data test.npz or test.csv."
            )
        rows, inputs = read_data(data, target)
        uq = _passing_on("load the fit", load, path, build_model(model))
        options: dict[str, Any] = {"inputs": inputs, "first_row": 0 if inputs is None else 1}
        found = _passing_on("predict", judged_on, uq, rows, helps=_in_python, **options)
        return save(out, page_of(found, title)), found.verdict
    if model is not None or data is not None:
        raise ValueError(f"--model and --data go with a .safetensors file, got {path}.")
    if kind == ".csv":
        found = _of_predictions(path, columns)
        return save(out, page_of(found, title)), found.verdict
    if kind == ".json":
        return save(out, experiment(read_numbers(path), title=title)), None
    raise ValueError(
        f"Expected predictions (.csv), an experiment's numbers (.json) or a saved fit "
        f"(.safetensors), got {path}."
    )


def _in_python(fault: str, remedy: str) -> str:
    """What helps against a fault of a saved fit, which was made in Python."""
    return f"In Python: {remedy}"


def _of_a_table(fault: str, remedy: str) -> str:
    """What helps against a fault of bars in a table, of which nothing else is known."""
    return _AGAINST[fault]


_AGAINST = {
    "uneven": "`rigidities tabular` learns a noise that follows the inputs; so does, in Python, "
    "calibrate(valid, noise='features').",
    "skew": "`rigidities tabular` learns a distribution that can lean; so does, in Python, "
    "calibrate(valid, distribution='tilted').",
    "tails": "`rigidities tabular` learns a distribution with such tails; so does, in Python, "
    "calibrate(valid, distribution='student-t').",
    "bias": "More rows, another model or, in Python, refit() can mend it.",
    "centre": "In Python: take p.centre as the prediction.",
}


def _of_predictions(path: Path, columns: Mapping[str, Sequence[str] | None]) -> Judgements:
    names = {kind: chosen or [kind] for kind, chosen in columns.items()}
    if len({len(chosen) for chosen in names.values()}) > 1:
        counts = ", ".join(f"{len(chosen)} for --{kind}" for kind, chosen in names.items())
        raise ValueError(f"Expected as many columns of each kind, got {counts}.")
    table = read_table(path)
    mean, std, target = map(table.numbers, names.values())
    others = table.others([name for chosen in names.values() for name in chosen])
    options: dict[str, Any] = {"names": names["target"], "inputs": others, "first_row": 1}
    return judged(mean, target, std=std, helps=_of_a_table, **options)


def _passing_on(what: str, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """What a model or its file complains of, as a ValueError: the message is the user's."""
    try:
        return function(*args, **keywords)
    except (ValueError, OSError):
        raise
    except Exception as error:  # a model's forward may raise anything
        said = " ".join(str(error).split())
        raise ValueError(f"Cannot {what}: {type(error).__name__}: {said}") from error


@dataclass(frozen=True)
class Table:
    """A table of text from a file: columns by name, and the line where each of its rows ends."""

    path: Path
    columns: Mapping[str, list[str]]
    lines: Sequence[int]

    def numbers(self, names: Sequence[str]) -> Tensor:
        """Columns of finite numbers, (N, K); anything else is refused."""
        if missing := [name for name in names if name not in self.columns]:
            raise ValueError(
                f"Expected the column {missing[0]!r} in {self.path}, which has "
                f"{', '.join(map(repr, self.columns))}. Name it by --mean, --std or --target."
            )
        found = [self._column(name) for name in names]
        return torch.tensor(found, dtype=torch.float64).T

    def others(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The columns that are not named."""
        return {key: values for key, values in self.columns.items() if key not in names}

    def _column(self, name: str) -> list[float]:
        values = []
        for row, text in enumerate(self.columns[name]):
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                raise ValueError(
                    f"Expected finite numbers in the column {name!r} of {self.path}, got {text!r} "
                    f"in row {row + 1} (line {self.lines[row]}). Mend or drop that row."
                )
            values.append(value)
        return values


def read_table(path: Path) -> Table:
    """A CSV file with a header; commas, semicolons or tabs between its columns."""
    _require(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        separator = max(",;\t", key=text.partition("\n")[0].count)
        reader = csv.reader(io.StringIO(text), delimiter=separator)
        entries = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV file in UTF-8 ({error}).") from error
    if not entries:
        raise ValueError(f"{path} is empty. Expected a header and one row or more.")
    lines, (names, *rows) = zip(*entries, strict=True)
    header = [name.strip() or f"column {k}" for k, name in enumerate(names, start=1)]
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise ValueError(f"{path} has the column {repeated[0]!r} twice. Rename one.")
    if not rows:
        raise ValueError(f"{path} has a header and no rows. Expected one row or more.")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(
                f"Expected {len(header)} entries in row {number} (line {lines[number]}) of {path}, "
                f"got {len(row)}."
            )
    columns = {name: [row[k].strip() for row in rows] for k, name in enumerate(header)}
    return Table(path, columns, lines[1:])


def read_numbers(path: Path) -> Mapping[str, Any]:
    """An experiment's JSON, a mapping."""
    _require(path)
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or no JSON file ({error}). Make it again.") from error
    if not isinstance(numbers, Mapping):
        raise ValueError(
            f"{path} holds a {type(numbers).__name__}. Expected an experiment's numbers: a mapping "
            "from names to numbers or further mappings."
        )
    return numbers


def read_data(
    path: Path, target: Sequence[str] | None = None
) -> tuple[tuple[Any, ...], Mapping[str, Any] | None]:
    """Labelled data as (inputs, ..., target), and columns to show beside each row.

    An NPZ file holds the inputs in the order of the model's arguments, and the target under
    "y", "target" or "labels". Of a CSV file all columns but the target, which may have several
    names, are one input.
    """
    _require(path)
    kind = path.suffix.lower()
    if kind == ".csv":
        table = read_table(path)
        names = list(target) if target else _first_known(table.columns, path)
        y, others = table.numbers(names), table.others(names)
        return (table.numbers(list(others)).numpy(), y.numpy()), others
    if kind == ".npz":
        return _arrays(path, target), None
    raise ValueError(f"Expected data in an .npz or .csv file, got {path}.")


def build_model(spec: str) -> nn.Module:
    """The model that module:function returns; modules in the current folder are found too."""
    module_name, colon, function_name = spec.partition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f"Expected --model module:function, got {spec!r}.")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"Cannot import {module_name} for --model: {type(error).__name__}: {error}. It must "
            "lie in the current folder or be installed."
        ) from error
    finally:
        sys.path.remove(here)
    function = getattr(module, function_name, None)
    if not callable(function):
        state = "has no" if function is None else "has a value, not a function,"
        raise ValueError(
            f"{module_name} {state} {function_name}. Expected a function without arguments that "
            "returns the trained model."
        )
    try:
        model = function()
    except Exception as error:
        raise ValueError(f"{spec}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise ValueError(f"Expected {spec}() to return a torch.nn.Module, got {got}.")
    return model


def _arrays(path: Path, target: Sequence[str] | None) -> tuple[Any, ...]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:
        raise ValueError(f"{path} is damaged or no NPZ file ({error}).") from error
    names = list(target) if target else _first_known(arrays, path)
    if len(names) != 1 or names[0] not in arrays:
        raise ValueError(
            f"Expected one array {names[0]!r} in {path}, which has "
            f"{', '.join(map(repr, arrays))}. Name the target by --target."
        )
    inputs = [array for name, array in arrays.items() if name != names[0]]
    if not inputs:
        raise ValueError(f"{path} holds the target alone. Expected inputs beside it.")
    return (*inputs, arrays[names[0]])


def _first_known(names: Mapping[str, Any], path: Path) -> list[str]:
    for name in TARGETS:
        if name in names:
            return [name]
    raise ValueError(
        f"Expected the target under {', '.join(map(repr, TARGETS))} in {path}, which has "
        f"{', '.join(map(repr, names))}. Name it by --target."
    )


def _require(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
