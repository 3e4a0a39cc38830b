"""California housing (Pace and Barry 1997): ``california_housing.npz``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.data import download, files, splits
from experiments.data.download import Fetch
from experiments.data.sources import CALIFORNIA
from experiments.data.splits import Fractions, Split

LONGITUDE = "Longitude"
THRESHOLD = -0.3  # standardised, i.e. about 120.2 degrees west

OUT_OF_DOMAIN: Fractions = (0.6, 0.2, 0.2)
WIDTH: Fractions = (0.2, 0.2, 0.6)

NAMES = (CALIFORNIA.file,)
"""Of the files that may hold the set."""

FIELDS = ("X", "y", "feature_names", "target_name")


@dataclass(frozen=True)
class Rows:
    """The set as scikit-learn has it, nothing scaled.

    Attributes:
        x: (20640, 8) float64.
        y: (20640,) median house value, in 100,000 US dollars, capped at 5.00001.
        feature_names: of the 8 columns.
        target_name: of y.
    """

    x: np.ndarray
    y: np.ndarray
    feature_names: tuple[str, ...]
    target_name: str

    @property
    def in_domain(self) -> np.ndarray:
        """Rows east of the threshold, 12,569 of them: booleans (20640,).

        The paper calls its eighth column the distance from the ocean; it is the longitude, whose
        two peaks are the regions of Los Angeles and of San Francisco.
        """
        longitude = self.x[:, self.feature_names.index(LONGITUDE)]
        return (longitude - longitude.mean()) / longitude.std() > THRESHOLD

    def random(self, k: int, seed: int, fractions: Fractions = OUT_OF_DOMAIN) -> Split:
        """The k-th random split of a seed; `WIDTH` are the fractions of the study of widths.

        For the out-of-domain study, ``rows.random(k, seed).within(rows.in_domain)``.
        """
        return splits.random(len(self.x), k, seed, fractions)


def missing(folder: str | Path | None = None) -> str | None:
    """What is missing and how to get it, or None where the set can be read without a network."""
    if files.find(NAMES, folder):
        return None
    return download.absence(CALIFORNIA, folder)


def read(
    folder: str | Path | None = None, *, check: bool = True, fetch: Fetch | None = None
) -> Rows:
    """The set, downloaded where it is not here.

    Args:
        folder: that holds the file, the only place to look in; default `files.places`.
        check: that the file is the published one.
        fetch: instead of scikit-learn's `fetch_california_housing`.

    Raises:
        FileNotFoundError: with the remedy.
        ValueError: a file that is damaged or of another format.
    """
    path = download.path_of(CALIFORNIA, folder, fetch=fetch)
    stored = files.fields(path, FIELDS, check=check)
    x, y, names, target = (stored[field] for field in FIELDS)
    if x.ndim != 2 or y.shape != (len(x),) or tuple(names) != tuple(CALIFORNIA.columns):
        raise files.FormatError(
            f"Expected X (n, 8), y (n,) and the columns {', '.join(CALIFORNIA.columns)} in {path}, "
            f"got {x.shape}, {y.shape} and {', '.join(names)}."
        )
    return Rows(x, y, tuple(map(str, names)), str(target))
