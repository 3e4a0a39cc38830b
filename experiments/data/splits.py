"""Divisions of rows into training, validation and test, as index arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Fractions = tuple[float, float, float]
"""Shares of the rows for training, validation and test."""

BENCHMARK: Fractions = (0.8, 0.1, 0.1)
"""The shares of the PBP benchmark."""


@dataclass(frozen=True)
class Split:
    """Three index arrays without a row in common.

    Attributes:
        train: Training rows.
        valid: Validation rows.
        test: Test rows.
    """

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray

    def within(self, domain: np.ndarray) -> Split:
        """The same split with training and validation rows of a domain alone.

        Args:
            domain: Which rows of the set lie in the domain, (n,). All test rows stay.
        """
        train = self.train[domain[self.train]]
        valid = self.valid[domain[self.valid]]
        return Split(train, valid, self.test)


def sizes(rows: int, fractions: Fractions = BENCHMARK) -> tuple[int, int, int]:
    """Numbers of rows: validation and test to the nearest row, training all others.

    >>> sizes(768)
    (614, 77, 77)
    """
    if len(fractions) != 3 or min(fractions) <= 0 or not math.isclose(sum(fractions), 1.0):
        raise ValueError(
            f"Expected three positive fractions (train, valid, test) of sum 1, got {fractions}."
        )
    valid = math.floor(fractions[1] * rows + 0.5)
    test = math.floor(fractions[2] * rows + 0.5)
    train = rows - valid - test
    if min(train, valid, test) < 1:
        raise ValueError(f"Expected rows in every part of {fractions}, got {rows} rows in all.")
    return train, valid, test


def random(rows: int, k: int, seed: int, fractions: Fractions = BENCHMARK) -> Split:
    """The k-th random division of a seed; all divisions have the same sizes."""
    train, valid, test = sizes(rows, fractions)
    order = np.random.default_rng([seed, k]).permutation(rows)
    return Split(order[:train], order[train : train + valid], order[-test:])


def official(train: np.ndarray, test: np.ndarray) -> Split:
    """A published pair of lists; the last ninth of the training list becomes validation.

    With lists of 90 % and 10 % that is 80/10/10, of the sizes that `random` gives.
    """
    first_valid = len(train) - math.floor(len(train) / 9 + 0.5)
    return Split(train[:first_valid], train[first_valid:], test)


def stacked(indices: Sequence[np.ndarray]) -> np.ndarray:
    """Index arrays of several splits as one, (B, n), each cut to the shortest."""
    shortest = min(len(index) for index in indices)
    return np.stack([index[:shortest] for index in indices])
