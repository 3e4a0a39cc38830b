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
from experiments.data.splits import Fractions, Split, stacked

LONGITUDE = "Longitude"
THRESHOLD = -0.3
"""The standardised longitude that divides the set: about 120.2 degrees west."""

OUT_OF_DOMAIN: Fractions = (0.6, 0.2, 0.2)
"""Training, validation and test rows in the out-of-domain study."""

WIDTH: Fractions = (0.2, 0.2, 0.6)
"""Training, validation and test rows in the study of widths."""

NAMES = (CALIFORNIA.file,)
"""Names of the files that may hold the set."""

Pair = tuple[Tensor, Tensor]
"""x (..., 8) and y (..., 1)."""

FIELDS = ("X", "y", "feature_names", "target_name")


@dataclass(frozen=True)
class Rows:
    """The set as scikit-learn has it, nothing scaled.

    Attributes:
        x: (20640, 8) float64.
        y: (20640,), the median house value in 100,000 US dollars, capped at 5.00001.
        feature_names: Names of the 8 columns.
        target_name: The name of y.
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
        """The k-th random split of a seed.

        The out-of-domain study uses ``rows.random(k, seed).within(rows.in_domain)``, the study of
        widths the fractions `WIDTH`.
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
        folder: The only folder to look in; `files.places` by default.
        check: Whether the file must be the published one.
        fetch: Replaces scikit-learn's `fetch_california_housing`.

    Raises:
        FileNotFoundError: There is no file; the message has the remedy.
        ValueError: The file is damaged or of another format.
    """
    path = download.path_of(CALIFORNIA, folder, fetch=fetch)
    stored = files.fields(path, FIELDS, check=check)
    x = stored["X"]
    y = stored["y"]
    names = stored["feature_names"]
    if x.ndim != 2 or y.shape != (len(x),) or tuple(names) != tuple(CALIFORNIA.columns):
        raise files.FormatError(
            f"Expected X (n, 8), y (n,) and the columns {', '.join(CALIFORNIA.columns)} in {path}, "
            f"got {x.shape}, {y.shape} and {', '.join(names)}."
        )
    return Rows(
        x=x,
        y=y,
        feature_names=tuple(str(name) for name in names),
        target_name=str(stored["target_name"]),
    )


@dataclass(frozen=True)
class Samples:
    """Rows of B networks, inputs standardised with the whole set's mean and spread, targets raw.

    Attributes:
        train: Training rows, (B, n, 8) and (B, n, 1).
        valid: Validation rows, of the same form.
        test: Test rows of each network, (m, 8) and (m, 1); m may differ.
        inside: Which test rows of each network are in the domain, (m,).
    """

    train: Pair
    valid: Pair
    test: list[Pair]
    inside: list[Tensor]

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of rows of the first network."""
        train, valid, test = self.of(0)
        return {"train": len(train[0]), "valid": len(valid[0]), "test": len(test[0])}

    def copied(self, times: int) -> Samples:
        """The same rows, with every training row so many times."""
        x, y = self.train
        return replace(self, train=(x.repeat(1, times, 1), y.repeat(1, times, 1)))

    def of(self, net: int) -> tuple[Pair, Pair, Pair]:
        """One network's training, validation and test rows."""
        train_x, train_y = self.train
        valid_x, valid_y = self.valid
        return (train_x[net], train_y[net]), (valid_x[net], valid_y[net]), self.test[net]


def drawn(
    nets: int,
    seed: int,
    fractions: Fractions,
    *,
    restricted: bool = False,
    most: int | None = None,
) -> Samples:
    """One random split for each network.

    Args:
        nets: The number of splits.
        seed: Seed of the splits.
        fractions: Shares of the rows for training, validation and test.
        restricted: Whether only rows of the domain are used for training and validation. Their
            number then differs between splits; all are cut to the smallest, since stacked networks
            have equally many rows.
        most: The largest number of rows of each kind, for a quick look; all by default.
    """
    rows = read()
    splits = [rows.random(k, seed, fractions) for k in range(nets)]
    if restricted:
        splits = [split.within(rows.in_domain) for split in splits]
    x = torch.from_numpy((rows.x - rows.x.mean(0)) / rows.x.std(0)).float()
    y = torch.from_numpy(rows.y)[:, None].float()
    inside = torch.from_numpy(rows.in_domain)
    train = torch.from_numpy(stacked([split.train[:most] for split in splits]))
    valid = torch.from_numpy(stacked([split.valid[:most] for split in splits]))
    test = [torch.from_numpy(split.test[:most]) for split in splits]
    return Samples(
        train=(x[train], y[train]),
        valid=(x[valid], y[valid]),
        test=[(x[index], y[index]) for index in test],
        inside=[inside[index] for index in test],
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
