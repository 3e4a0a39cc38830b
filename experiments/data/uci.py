"""The UCI regression sets with their published splits: ``uci_<name>.npz``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VARIABLE = "RIGIDITIES_DATA"
BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"

SOURCES = {
    "concrete": "OpenML 44959",
    "energy": "OpenML 44960",
    "kin8nm": "OpenML 44980",
    "naval": "OpenML 44969",
    "power": "UCI 294",
    "protein": "OpenML 44963",
    "wine": "OpenML 44972",
    "yacht": "UCI 243",
}
"""The sets, and where each can be had."""

FIELDS = ("X", "y", "feature_names", "target_name", "train_index", "test_index")


@dataclass(frozen=True)
class Rows:
    """A set as published, nothing scaled.

    Attributes:
        x: (n, d) float64.
        y: (n,) float64.
        feature_names: of the d columns.
        target_name: of y.
        train_index: (splits, n_train), in the published order.
        test_index: (splits, n_test).
    """

    x: np.ndarray
    y: np.ndarray
    feature_names: tuple[str, ...]
    target_name: str
    train_index: np.ndarray
    test_index: np.ndarray


def data_folder(given: str | Path | None = None) -> Path:
    """The argument, else the environment variable, else ``../shared/data`` beside the project."""
    return Path(given or os.environ.get(VARIABLE) or BESIDE)


def missing(name: str, folder: str | Path | None = None) -> str | None:
    """What is missing and how to get it, or None where the set can be read."""
    if name not in SOURCES:
        return f"Unknown set {name!r}. There are {', '.join(SOURCES)}."
    path = _path(name, folder)
    if path.is_file():
        return None
    return (
        f"The set {name!r} is not at {path}. Set {VARIABLE} to the folder that holds "
        f"{path.name}, or make the file: the rows are {SOURCES[name]} "
        f"(OpenML: sklearn.datasets.fetch_openml(data_id=...)); numpy.savez with "
        f"{', '.join(FIELDS)}, X (n, d) and y (n,) in float64, the index fields (splits, rows)."
    )


def read(name: str, folder: str | Path | None = None) -> Rows:
    """One set.

    Args:
        name: one of `SOURCES`.
        folder: that holds the files; see `data_folder`.

    Raises:
        FileNotFoundError: with the remedy.
        ValueError: unknown name, or a file of another format.
    """
    if problem := missing(name, folder):
        raise (FileNotFoundError if name in SOURCES else ValueError)(problem)
    path = _path(name, folder)
    with np.load(path) as stored:
        absent = [field for field in FIELDS if field not in stored]
        if absent:
            raise ValueError(f"Expected {', '.join(FIELDS)} in {path}; missing {absent}.")
        x, y, names, target, train, test = (stored[field] for field in FIELDS)
    if x.ndim != 2 or y.shape != (len(x),):
        raise ValueError(f"Expected X (n, d) and y (n,) in {path}, got {x.shape} and {y.shape}.")
    return Rows(
        x.astype(np.float64),
        y.astype(np.float64),
        tuple(map(str, names)),
        str(target),
        train,
        test,
    )


def _path(name: str, folder: str | Path | None) -> Path:
    return data_folder(folder) / f"uci_{name}.npz"
