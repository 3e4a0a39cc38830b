"""Sets from public archives, through the libraries that know them, in the form of our files.

A downloaded table is brought into our columns and their order, and compared with what is known of
the set (rows, means of every column) before it is kept. The order of its rows is the archive's, so
it comes without the published splits.
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

TOLERANCE = 1e-3
"""Difference of a column's mean that is allowed, in units of the column's spread."""

OTHERWISE = "The archive's copy has changed: take the set from elsewhere."

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
        source: What is known of the set.
        folder: The only folder to look in; `files.places` by default.
        names: Names that the file may have; the source's name by default.
        fetch: Replaces the archive's download function.

    Raises:
        FileNotFoundError: The file is nowhere, or the download failed; the message has the remedy.
    """
    path = files.find(names or (source.file,), folder)
    if path is not None:
        return path
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
    """The message of `files.absence` for a set that can be downloaded."""
    package = "ucimlrepo" if source.archive == "UCI" else "scikit-learn"
    advice = "run this again" if folder is None else "give none"
    remedy = (
        f"{advice} where there is a network: it is then downloaded ({source.where}, with the "
        f"package {package})."
    )
    return files.absence(names or (source.file,), folder, remedy, reason)


def arrays(source: Source, fetch: Fetch | None = None) -> dict[str, np.ndarray]:
    """The arrays of our file, downloaded and checked."""
    try:
        inputs, target = frames(source, fetch)
    except Exception as error:  # each library has its own errors for a failed download
        reason = f"The download failed: {type(error).__name__}: {error}."
        raise files.MissingDataError(absence(source, reason=reason)) from error
    return table(inputs, target, source)


def frames(source: Source, fetch: Fetch | None = None) -> tuple[DataFrame, DataFrame]:
    """Inputs and targets as the archive has them."""
    fetch = fetch or library(source)
    if source.archive == "UCI":
        data = fetch(id=source.number).data
        return data.features, data.targets
    if source.archive == "OpenML":
        bunch = fetch(data_id=source.number, as_frame=True)
    else:
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
    if source.archive == "OpenML":
        return datasets.fetch_openml
    return datasets.fetch_california_housing


def table(inputs: DataFrame, target: DataFrame, source: Source) -> dict[str, np.ndarray]:
    """The arrays of our file.

    Args:
        inputs: Inputs as the archive has them.
        target: Targets as the archive has them.
        source: What is known of the set.

    Raises:
        ValueError: The size, a mean or the first row is not that of the set.
    """
    x = np.column_stack([numbers(column) for column in ordered(inputs, source)])
    y = numbers(chosen(target, source))
    checked(x, y, source)
    return {
        "X": x,
        "y": y,
        "feature_names": np.array(list(source.columns)),
        "target_name": np.array(source.target),
    }


def ordered(inputs: DataFrame, source: Source) -> list[Any]:
    """The inputs in the order of our columns.

    They are found by name. Where the archive has other names, the columns that vary are taken in
    their order, and the known constants are put back.

    Raises:
        FormatError: The numbers of columns differ.
    """
    target_names = {plain(name) for name in (source.target, *source.spellings, *source.others)}
    archive_columns = {
        plain(name): inputs[name] for name in inputs if plain(name) not in target_names
    }
    our_names = list(source.columns)
    if all(plain(name) in archive_columns for name in our_names):
        return [archive_columns[plain(name)] for name in our_names]

    varying_names = [name for name in our_names if name not in source.constants]
    varying_columns = [column for column in archive_columns.values() if column.nunique() > 1]
    if len(varying_columns) != len(varying_names):
        raise files.FormatError(
            f"Expected the columns {', '.join(our_names)} of {source.where}, got "
            f"{', '.join(map(str, inputs))}. {OTHERWISE}"
        )
    columns: dict[str, Any] = dict(zip(varying_names, varying_columns, strict=True))
    for name, value in source.constants.items():
        columns[name] = np.full(len(inputs), value)
    return [columns[name] for name in our_names]


def chosen(target: DataFrame, source: Source) -> Any:
    """Our target among those of the archive."""
    spellings = {plain(name) for name in (source.target, *source.spellings)}
    matching = [name for name in target if plain(name) in spellings]
    if len(matching) == 1:
        return target[matching[0]]
    if target.shape[1] == 1:  # under yet another name: its mean decides
        return target.iloc[:, 0]
    raise files.FormatError(
        f"Expected the target {source.target} of {source.where}, got "
        f"{', '.join(map(str, target))}. {OTHERWISE}"
    )


def checked(x: np.ndarray, y: np.ndarray, source: Source) -> None:
    """Refuse a table that is not the set.

    Raises:
        FormatError: The number of rows, the first row or a mean is another.
    """
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
    expected_means = {**source.columns, source.target: source.mean}
    for (name, mean), values in zip(expected_means.items(), [*x.T, y], strict=True):
        if not np.isfinite(values).all():
            raise files.FormatError(f"Expected finite {name} of {source.where}. {OTHERWISE}")
        actual_mean = values.mean()
        tolerance = TOLERANCE * values.std() + 1e-5 * abs(mean)
        if abs(actual_mean - mean) > tolerance:  # never for an unknown mean, which is nan
            raise files.FormatError(
                f"Expected a mean of {mean:g} in {name} of {source.where}, got {actual_mean:g}. "
                f"{OTHERWISE}"
            )


def numbers(column: Any) -> np.ndarray:
    """A column in float64; it may hold categories or text of numbers."""
    return np.asarray(column).astype(np.float64)


def plain(name: object) -> str:
    """A column's name without case, spaces, signs and units.

    >>> plain("Relative_compactness "), plain("Water (kg/m3)")
    ('relativecompactness', 'water')
    """
    without_units = re.sub(r"\(.*?\)", "", str(name))
    return re.sub(r"[^a-z0-9]", "", without_units.lower())
