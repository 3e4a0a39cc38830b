"""Reports from files: predictions, an experiment's numbers, or a saved fit with test data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from . import experiment, html, save, write
from .document import check_plotly, checked_place
from .files import build_model, read_data, read_numbers, read_table
from .labelled_data import Bars

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
) -> Path:
    """Write the report of a file.

    Args:
        path: predictions (.csv), an experiment's numbers (.json) or a saved fit (.safetensors).
        out: the page.
        load: gives the object with error bars from its file and model.
        title: the heading; by default the file's name.
        mean: columns of the predictions, one per target.
        std: columns of their error bars.
        target: columns of the true values; of a saved fit, those of the data.
        model: module:function, which returns the model of a saved fit.
        data: labelled test data for it, .npz or .csv.

    Returns:
        The page.

    Raises:
        OSError: a file or folder that cannot be used.
        ValueError: what is in a file cannot be used.
        ModuleNotFoundError: plotly is missing.
    """
    checked_place(out)
    _check_kept(out, path, data)
    check_plotly()
    title = title or path.name
    kind = path.suffix.lower()
    _check_columns(kind, path, mean=mean, std=std, target=target)
    if kind == ".safetensors":
        return _of_fit(path, out, load, title, target, model, data)
    if model is not None or data is not None:
        raise ValueError(f"--model and --data go with a .safetensors file, got {path}.")
    if kind == ".csv":
        return save(out, _of_predictions(path, title, mean, std, target))
    if kind == ".json":
        return save(out, experiment(read_numbers(path), title=title))
    raise ValueError(
        f"Expected predictions (.csv), an experiment's numbers (.json) or a saved fit "
        f"(.safetensors), got {path}."
    )


def _check_kept(out: Path, *read: Path | None) -> None:
    """The page must not replace what it is made from."""
    for path in read:
        if path is not None and out.exists() and path.exists() and out.samefile(path):
            raise ValueError(
                f"--out {out} is the file that the report is made from. Choose another place for "
                "the page."
            )


def _check_columns(kind: str, path: Path, **named: Sequence[str] | None) -> None:
    """Columns are named of tables; of a saved fit the target of its data may be."""
    useless = {".safetensors": ("mean", "std"), ".json": ("mean", "std", "target")}
    for option in useless.get(kind, ()):
        if named[option] is not None:
            raise ValueError(f"--{option} goes with predictions in a .csv file, got {path}.")


def _of_predictions(
    path: Path,
    title: str,
    mean: Sequence[str] | None,
    std: Sequence[str] | None,
    target: Sequence[str] | None,
) -> str:
    names = {"mean": mean or ["mean"], "std": std or ["std"], "target": target or ["target"]}
    if len({len(columns) for columns in names.values()}) > 1:
        counts = ", ".join(f"{len(columns)} for --{kind}" for kind, columns in names.items())
        raise ValueError(f"Expected as many columns of each kind, got {counts}.")
    table = read_table(path)
    used = [name for columns in names.values() for name in columns]
    return html(
        *(table.numbers(columns) for columns in names.values()),
        title=title,
        names=names["target"],
        inputs=table.others(used),
        first_row=1,
    )


def _of_fit(
    path: Path,
    out: Path,
    load: Load,
    title: str,
    target: Sequence[str] | None,
    model: str | None,
    data: Path | None,
) -> Path:
    if model is None or data is None:
        raise ValueError(
            "A saved fit holds neither the model nor test data. Pass --model module:function and "
            "--data test.npz or test.csv."
        )
    rows, columns = read_data(data, target)
    uq = _passing_on("load the fit", load, path, build_model(model))
    first = 0 if columns is None else 1
    return _passing_on(
        "predict", write, out, uq, rows, title=title, inputs=columns, first_row=first
    )


def _passing_on(what: str, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """What a model or its file complains of, as a ValueError: the message is the user's."""
    try:
        return function(*args, **keywords)
    except (ValueError, OSError):
        raise
    except Exception as error:  # a model's forward may raise anything
        said = " ".join(str(error).split())
        raise ValueError(f"Cannot {what}: {type(error).__name__}: {said}") from error
