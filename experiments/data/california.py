"""California housing (Pace and Barry 1997): ``california_housing.npz``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

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

Pair = tuple[Tensor, Tensor]
"""x (..., 8) and y (..., 1)."""

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


@dataclass(frozen=True)
class Samples:
    """Rows of all nets, inputs standardised with the whole set's mean and spread, targets raw.

    Attributes:
        train: (nets, n, 8) and (nets, n, 1).
        valid: the same for validation.
        test: of each net, (m, 8) and (m, 1); m may differ.
        inside: of each net's test rows, whether they are in the domain, (m,).
    """

    train: Pair
    valid: Pair
    test: list[Pair]
    inside: list[Tensor]

    @property
    def counts(self) -> dict[str, int]:
        """Rows of the first net."""
        train, valid, test = self.of(0)
        return {"train": len(train[0]), "valid": len(valid[0]), "test": len(test[0])}

    def copied(self, times: int) -> Samples:
        """The same with every training row so many times."""
        x, y = (part.repeat(1, times, 1) for part in self.train)
        return replace(self, train=(x, y))

    def of(self, net: int) -> tuple[Pair, Pair, Pair]:
        """One net's training, validation and test rows."""
        train, valid = ((x[net], y[net]) for x, y in (self.train, self.valid))
        return train, valid, self.test[net]


def drawn(
    nets: int,
    seed: int,
    fractions: Fractions,
    *,
    restricted: bool = False,
    most: int | None = None,
) -> Samples:
    """One random split a net.

    Args:
        nets: number of splits.
        seed: of the splits.
        fractions: of the rows for training, validation and test.
        restricted: keep only rows of the domain for training and validation. Their number then
            differs between splits; all are cut to the smallest, since stacked nets take the same.
        most: rows of each part, for a quick look; all by default.
    """
    rows = read()
    splits = [rows.random(k, seed, fractions) for k in range(nets)]
    if restricted:
        splits = [split.within(rows.in_domain) for split in splits]
    x = torch.from_numpy((rows.x - rows.x.mean(0)) / rows.x.std(0)).float()
    y = torch.from_numpy(rows.y)[:, None].float()
    inside = torch.from_numpy(rows.in_domain)
    train = _stacked([split.train[:most] for split in splits])
    valid = _stacked([split.valid[:most] for split in splits])
    test = [torch.from_numpy(split.test[:most]) for split in splits]
    return Samples(
        (x[train], y[train]),
        (x[valid], y[valid]),
        [(x[one], y[one]) for one in test],
        [inside[one] for one in test],
    )


def longitudes(edges: Sequence[float]) -> dict[str, list[float] | float | int]:
    """The histogram of the standardised longitude, and how many rows each side has."""
    rows = read()
    column = rows.x[:, rows.feature_names.index(LONGITUDE)]
    counts, _ = np.histogram((column - column.mean()) / column.std(), edges)
    return {
        "edges": [float(edge) for edge in edges],
        "counts": counts.tolist(),
        "threshold": THRESHOLD,
        "degrees": float(column.mean() + THRESHOLD * column.std()),
        "inside": int(rows.in_domain.sum()),
        "outside": int((~rows.in_domain).sum()),
    }


def _stacked(indices: Sequence[np.ndarray]) -> Tensor:
    """(nets, n), each cut to the shortest."""
    shortest = min(map(len, indices))
    return torch.from_numpy(np.stack([one[:shortest] for one in indices]))
