"""Pages from files, for the command `rigidities report`.

A table of predictions (.csv) is judged as it is. A saved fit (.safetensors) needs its model, which
a function of the user's returns, and labelled test data (.npz or .csv); its predictions on these
data are judged.
"""

from __future__ import annotations

import csv
import io
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..last_layer.rigidity import LastLayerRigidity
from . import judge, judge_predictor, page_of, save
from .document import checked_place, require_extra
from .judgement import Judgements, Verdict

TARGET_NAMES = ("target", "y", "labels")
"""Names under which test data may hold the true values."""

LoadFit = Callable[[Path, nn.Module], LastLayerRigidity]

_ADVICE_FOR_TABLES = {
    "uneven": "`rigidities tabular` learns a noise that follows the inputs. In Python, use "
    "calibrate(x, y) with its default method.",
    "skew": "`rigidities tabular` learns a distribution that can be skewed. In Python, use "
    "calibrate(x, y) with its default method.",
    "tails": "`rigidities tabular` learns a distribution with heavy tails. In Python, use "
    "calibrate(x, y) with its default method.",
    "bias": "More rows or another model may help. In Python, use refit().",
    "centre": "In Python, use p.centre as the prediction.",
}
"""What helps against each fault of bars in a table, about which nothing else is known."""


def from_file(
    path: Path,
    out: Path,
    *,
    load: LoadFit,
    title: str | None = None,
    mean: Sequence[str] | None = None,
    std: Sequence[str] | None = None,
    target: Sequence[str] | None = None,
    model: str | None = None,
    data: Path | None = None,
) -> tuple[Path, Verdict]:
    """Write the page on a file; the arguments are those of the command line.

    Args:
        path: Predictions (.csv) or a saved fit (.safetensors).
        out: The page.
        load: A function (file, model) -> the object with error bars.
        title: The heading; by default the name of the file.
        mean: Columns of the predictions, one per target.
        std: Columns of the error bars, one per target.
        target: Columns of the true values, one per target.
        model: `module:function` that returns the model of a saved fit.
        data: Labelled test data for a saved fit.

    Returns:
        The path of the page, and the verdict.

    Raises:
        OSError: A file or folder cannot be used.
        ValueError: What is in a file cannot be used, or options do not go together.
    """
    checked_place(out, sources=[path, data])
    require_extra()
    kind = path.suffix.lower()
    if kind == ".csv":
        if model is not None or data is not None:
            raise ValueError(f"--model and --data are for a .safetensors file, got {path}.")
        judgements = _judge_table(path, mean or ["mean"], std or ["std"], target or ["target"])
    elif kind == ".safetensors":
        for option, columns in (("mean", mean), ("std", std)):
            if columns is not None:
                raise ValueError(f"--{option} is for predictions in a .csv file, got {path}.")
        if model is None or data is None:
            raise ValueError(
                "A saved fit contains neither the model nor test data. Pass --model "
                "module:function and --data test.npz or test.csv."
            )
        judgements = _judge_fit(path, load, model, data, target)
    elif kind == ".json":
        raise ValueError(
            f"Expected predictions (.csv) or a saved fit (.safetensors), got {path}. The page of "
            f"an experiment's numbers is made in a checkout: python -m experiments.frame.html_page "
            f"{path}"
        )
    elif not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path}.")
    else:
        raise ValueError(f"Expected predictions (.csv) or a saved fit (.safetensors), got {path}.")
    return save(out, page_of(judgements, title or path.name)), judgements.verdict


def _judge_table(
    path: Path, mean: Sequence[str], std: Sequence[str], target: Sequence[str]
) -> Judgements:
    """Judge a table of predictions; its other columns are shown as inputs of the rows."""
    if not len(mean) == len(std) == len(target):
        raise ValueError(
            f"Expected as many columns of each kind, got {len(mean)} for --mean, {len(std)} for "
            f"--std, {len(target)} for --target."
        )
    whole_table = read_table(path)
    table = whole_table.held_out()
    selection = []
    if len(table) < len(whole_table):
        selection.append(
            f"The report judges {len(table):,} of the {len(whole_table):,} rows: those with "
            "split = test."
        )
    return judge(
        table.numbers(mean),
        table.numbers(target),
        std=table.numbers(std),
        names=target,
        inputs=table.columns_except([*mean, *std, *target]),
        cautions=selection,
        first_row=1,
        row_numbers=table.row_numbers,
        advice=_advice_for_tables,
    )


def _judge_fit(
    path: Path, load: LoadFit, model: str, data: Path, target: Sequence[str] | None
) -> Judgements:
    """Judge a saved fit, with its model, on labelled data."""
    labelled_data, inputs = read_data(data, target)
    with _any_error_as_value_error("load the fit"):
        predictor = load(path, build_model(model))
    with _any_error_as_value_error("predict"):
        return judge_predictor(
            predictor,
            labelled_data,
            inputs=inputs,
            first_row=0 if inputs is None else 1,  # rows of a table are counted from 1
            advice=_advice_for_fits,
        )


def _advice_for_tables(fault: str, remedy: str) -> str:
    """What helps against a fault of bars in a table; the library's remedy needs the model."""
    return _ADVICE_FOR_TABLES[fault]


def _advice_for_fits(fault: str, remedy: str) -> str:
    """What helps against a fault of a saved fit, which was made in Python."""
    return f"In Python: {remedy}"


@contextmanager
def _any_error_as_value_error(action: str) -> Iterator[None]:
    """Turn any error of a model or its file into a ValueError that names the action.

    A model's forward may raise anything, and the command has to report it in one line.
    """
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        raise ValueError(f"Cannot {action}: {type(error).__name__}: {message}") from error


# --- tables ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextTable:
    """A table of text from a file.

    Attributes:
        path: The file.
        columns: Its columns by name.
        lines: The line of the file where each row ends, for error messages.
        row_numbers: The number of each row in the file, counted from 1; empty for all of its rows.
    """

    path: Path
    columns: Mapping[str, list[str]]
    lines: Sequence[int]
    row_numbers: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.lines)

    def numbers(self, names: Sequence[str]) -> Tensor:
        """The named columns as numbers, (N, K); anything but finite numbers is refused."""
        for name in names:
            if name not in self.columns:
                raise ValueError(
                    f"Expected the column {name!r} in {self.path}, which has "
                    f"{', '.join(map(repr, self.columns))}. Choose columns with --mean, --std "
                    "and --target."
                )
        columns = [self._numbers_of_column(name) for name in names]
        return torch.tensor(columns, dtype=torch.float64).T

    def columns_except(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The columns that are not named."""
        return {name: values for name, values in self.columns.items() if name not in names}

    def held_out(self) -> TextTable:
        """The test rows of a table with a column `split`, as `rigidities tabular` writes it.

        They keep their numbers. A table without that column, without test rows in it, or with
        test rows only, is returned as it is.
        """
        split = self.columns.get("split", [])
        test_rows = [row for row, part in enumerate(split) if part == "test"]
        if len(test_rows) in (0, len(self)):
            return self
        columns = {name: [cells[row] for row in test_rows] for name, cells in self.columns.items()}
        return TextTable(
            self.path,
            columns,
            lines=[self.lines[row] for row in test_rows],
            row_numbers=[row + 1 for row in test_rows],
        )

    def _numbers_of_column(self, name: str) -> list[float]:
        """One column as finite numbers; the error for any other entry names its row and line."""
        values = []
        for row, text in enumerate(self.columns[name]):
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                number = self.row_numbers[row] if self.row_numbers else row + 1
                raise ValueError(
                    f"Expected finite numbers in the column {name!r} of {self.path}, got {text!r} "
                    f"in row {number} (line {self.lines[row]}). Correct or drop that row."
                )
            values.append(value)
        return values


def read_table(path: Path) -> TextTable:
    """Read a CSV file with a header; its columns are separated by commas, semicolons or tabs.

    Raises:
        OSError: There is no such file.
        ValueError: It is not a CSV file, has no rows, or its rows do not match its header.
    """
    _require_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        first_line = text.partition("\n")[0]
        separator = max(",;\t", key=first_line.count)
        reader = csv.reader(io.StringIO(text), delimiter=separator)
        entries = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8 ({error}).") from error
    if not entries:
        raise ValueError(f"{path} is empty. Expected a header and at least one row.")
    header = _checked_header(entries[0][1], path)
    entries = entries[1:]
    if not entries:
        raise ValueError(f"{path} has a header but no rows. Expected at least one row.")
    for row_number, (line, row) in enumerate(entries, start=1):
        if len(row) != len(header):
            raise ValueError(
                f"Expected {len(header)} entries in row {row_number} (line {line}) of {path}, "
                f"got {len(row)}."
            )
    columns = {name: [row[k].strip() for _, row in entries] for k, name in enumerate(header)}
    return TextTable(path, columns, lines=[line for line, _ in entries])


def _checked_header(names: Sequence[str], path: Path) -> list[str]:
    """Names of the columns, checked to be unique; an unnamed one, such as an index, gets a name."""
    header = [name.strip() or f"column {k}" for k, name in enumerate(names, start=1)]
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise ValueError(f"{path} has the column {repeated[0]!r} twice. Rename one.")
    return header


# --- test data and model of a saved fit --------------------------------------------------------


def read_data(
    path: Path, target: Sequence[str] | None = None
) -> tuple[tuple[Any, ...], Mapping[str, Any] | None]:
    """Read labelled data.

    An NPZ file holds the inputs in the order of the model's arguments, and the target under one of
    `TARGET_NAMES`. In a CSV file one or more columns are the target, and all others together are
    one input.

    Args:
        path: The file.
        target: Names of the target; by default the first of `TARGET_NAMES` in the file.

    Returns:
        The data as (inputs, ..., target), and the columns to show beside each row, which only a
        CSV file has.

    Raises:
        OSError: There is no such file.
        ValueError: It cannot be read, or has no target or no inputs.
    """
    _require_file(path)
    kind = path.suffix.lower()
    if kind == ".npz":
        return _read_arrays(path, target), None
    if kind != ".csv":
        raise ValueError(f"Expected data in an .npz or .csv file, got {path}.")
    table = read_table(path)
    target_names = list(target) if target else [_target_name(table.columns, path)]
    targets = table.numbers(target_names)
    input_columns = table.columns_except(target_names)
    inputs = table.numbers(list(input_columns))
    return (inputs.numpy(), targets.numpy()), input_columns


def _read_arrays(path: Path, target: Sequence[str] | None) -> tuple[Any, ...]:
    """The inputs of an NPZ file, and its target last."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:
        raise ValueError(f"{path} is damaged, or not an NPZ file ({error}).") from error
    names = list(target) if target else [_target_name(arrays, path)]
    target_name = names[0]
    if len(names) != 1 or target_name not in arrays:
        raise ValueError(
            f"Expected one array {target_name!r} in {path}, which has "
            f"{', '.join(map(repr, arrays))}. Name the target with --target."
        )
    inputs = [array for name, array in arrays.items() if name != target_name]
    if not inputs:
        raise ValueError(f"{path} contains only the target. Expected inputs as well.")
    return (*inputs, arrays[target_name])


def _target_name(names: Mapping[str, Any], path: Path) -> str:
    """The first of `TARGET_NAMES` that is among the names."""
    for name in TARGET_NAMES:
        if name in names:
            return name
    raise ValueError(
        f"Expected the target under {', '.join(map(repr, TARGET_NAMES))} in {path}, which has "
        f"{', '.join(map(repr, names))}. Name it with --target."
    )


def build_model(spec: str) -> nn.Module:
    """The model that a function of the user's returns.

    Args:
        spec: `module:function`. Modules in the current folder are found too.

    Raises:
        ValueError: There is no such function, it fails, or it returns something else.
    """
    module_name, colon, function_name = spec.partition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f"Expected --model module:function, got {spec!r}.")
    current_folder = os.getcwd()
    sys.path.insert(0, current_folder)
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"Cannot import {module_name} for --model: {type(error).__name__}: {error}. It must "
            "lie in the current folder or be installed."
        ) from error
    finally:
        sys.path.remove(current_folder)
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


def _require_file(path: Path) -> None:
    """Refuse a path that is not a file."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
