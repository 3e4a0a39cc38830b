"""Sets from public archives, through the libraries that know them, in the form of our files.

A downloaded table is brought into our columns and order and compared with what is known of the
set (rows, means of every column) before it is kept. The order of its rows is the archive's, so it
comes without the published splits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.data import files
from experiments.data.sources import Source

if TYPE_CHECKING:
    from pandas import DataFrame

EXTRA = 'pip install "rigidities[experiments]"'
TOLERANCE = 1e-3  # of a column's spread, for the means

Fetch = Callable[..., Any]
"""`sklearn.datasets.fetch_openml`, `fetch_california_housing` or `ucimlrepo.fetch_ucirepo`."""


def path_of(
    source: Source,
    folder: str | Path | None = None,
    *,
    names: Sequence[str] = (),
    fetch: Fetch | None = None,
) -> Path:
    """The file of a set: found, or downloaded into the cache.

    Nothing is downloaded where a folder is given or the variable `files.OFFLINE` is set.

    Args:
        source: of the set.
        folder: the only place to look in; default `files.places`.
        names: of the file; default the source's own.
        fetch: instead of the library's function.

    Raises:
        FileNotFoundError: nowhere, or the download failed; the message has the remedy.
    """
    if found := files.find(names or (source.file,), folder):
        return found
    if folder is not None:
        raise files.MissingDataError(absence(source, folder, names))
    if os.environ.get(files.OFFLINE):
        reason = f"{files.OFFLINE} is set, so no download was tried."
        raise files.MissingDataError(absence(source, None, names, reason))
    return files.store(source.file, lambda: arrays(source, fetch))


def absence(
    source: Source,
    folder: str | Path | None = None,
    names: Sequence[str] = (),
    reason: str | None = None,
) -> str:
    """`files.absence` of a set that can be downloaded."""
    needs = "ucimlrepo" if source.archive == "UCI" else "scikit-learn"
    again = "run this again" if folder is None else "give none"
    remedy = (
        f"{again} where there is a network: it is then downloaded ({source.where}, with the "
        f"package {needs})."
    )
    return files.absence(names or (source.file,), folder, remedy, reason)


def arrays(source: Source, fetch: Fetch | None = None) -> dict[str, np.ndarray]:
    """The fields of our file, downloaded and checked."""
    try:
        inputs, target = frames(source, fetch)
    except Exception as error:  # each library has its own for "no network" and "not found"
        reason = f"The download failed: {type(error).__name__}: {error}."
        raise files.MissingDataError(absence(source, reason=reason)) from error
    return table(inputs, target, source)


def frames(source: Source, fetch: Fetch | None = None) -> tuple[DataFrame, DataFrame]:
    """Inputs and targets as the archive has them."""
    fetch = fetch or library(source)
    if source.archive == "OpenML":
        bunch = fetch(data_id=source.number, as_frame=True)
        return bunch.data, bunch.target.to_frame()
    if source.archive == "UCI":
        data = fetch(id=source.number).data
        return data.features, data.targets
    bunch = fetch(as_frame=True)
    return bunch.data, bunch.target.to_frame()


def library(source: Source) -> Fetch:
    """The function that fetches from an archive."""
    if source.archive == "UCI":
        try:
            from ucimlrepo import fetch_ucirepo
        except ImportError as error:
            raise files.MissingPackageError(
                "the package ucimlrepo is needed: pip install ucimlrepo"
            ) from error
        return fetch_ucirepo
    try:
        import pandas  # noqa: F401  # scikit-learn imports it later, without naming our extra
        from sklearn import datasets
    except ImportError as error:
        raise files.MissingPackageError(f"scikit-learn and pandas are needed: {EXTRA}") from error
    return datasets.fetch_openml if source.number else datasets.fetch_california_housing


def table(inputs: DataFrame, target: DataFrame, source: Source) -> dict[str, np.ndarray]:
    """The fields of our file; refused if the size, a mean or the first row is another.

    Raises:
        ValueError: the table is not the set.
    """
    x = np.column_stack([numbers(one) for one in ordered(inputs, source)])
    y = numbers(chosen(target, source))
    checked(x, y, source)
    return {
        "X": x,
        "y": y,
        "feature_names": np.array(list(source.columns)),
        "target_name": np.array(source.target),
    }


def ordered(inputs: DataFrame, source: Source) -> list[Any]:
    """Our columns by name; else those that vary by order, with the known constants put back."""
    outside = {plain(name) for name in (source.target, *source.spellings, *source.others)}
    offered = {plain(name): inputs[name] for name in inputs if plain(name) not in outside}
    ours = list(source.columns)
    if all(plain(name) in offered for name in ours):
        return [offered[plain(name)] for name in ours]
    varying = [name for name in ours if name not in source.constants]
    changing = [column for column in offered.values() if column.nunique() > 1]
    if len(changing) != len(varying):
        raise files.FormatError(
            f"Expected the columns {', '.join(ours)} of {source.where}, got "
            f"{', '.join(map(str, inputs))}. {OTHERWISE}"
        )
    found = dict(zip(varying, changing, strict=True))
    flat = np.ones(len(inputs))
    return [found[name] if name in found else flat * source.constants[name] for name in ours]


def chosen(target: DataFrame, source: Source) -> Any:
    """Our target among those of the archive."""
    wanted = {plain(name) for name in (source.target, *source.spellings)}
    named = [name for name in target if plain(name) in wanted]
    if len(named) == 1:
        return target[named[0]]
    if target.shape[1] == 1:  # under yet another name: its mean decides
        return target.iloc[:, 0]
    raise files.FormatError(
        f"Expected the target {source.target} of {source.where}, got "
        f"{', '.join(map(str, target))}. {OTHERWISE}"
    )


def checked(x: np.ndarray, y: np.ndarray, source: Source) -> None:
    """Refuse a table that is not the set."""
    if len(x) != source.rows or len(y) != source.rows:
        raise files.FormatError(
            f"Expected {source.rows} rows of {source.where}, got {len(x)} and {len(y)} targets. "
            f"{OTHERWISE}"
        )
    first = [y[0], *x[0]][: len(source.first)]
    if not np.allclose(first, source.first, rtol=1e-5):
        raise files.FormatError(
            f"Expected a first row that begins with {source.first} (target, inputs) in "
            f"{source.where}, got {tuple(map(float, first))}. {OTHERWISE}"
        )
    known = {**source.columns, source.target: source.mean}
    for (name, mean), values in zip(known.items(), [*x.T, y], strict=True):
        if not np.isfinite(values).all():
            raise files.FormatError(f"Expected finite {name} of {source.where}. {OTHERWISE}")
        got, slack = values.mean(), TOLERANCE * values.std() + 1e-5 * abs(mean)
        if abs(got - mean) > slack:  # never for an unknown mean, which is nan
            raise files.FormatError(
                f"Expected a mean of {mean:g} in {name} of {source.where}, got {got:g}. {OTHERWISE}"
            )


OTHERWISE = "The archive's copy has changed: take the set from elsewhere."


def numbers(column: Any) -> np.ndarray:
    """Float64, from categories and text of numbers as well."""
    return np.asarray(column).astype(np.float64)


def plain(name: object) -> str:
    """A column's name without case, spaces, signs and units.

    >>> plain("Relative_compactness "), plain("Water (kg/m3)")
    ('relativecompactness', 'water')
    """
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*?\)", "", str(name)).lower())
