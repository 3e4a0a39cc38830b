"""Divisions of rows into training, validation and test, as index arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Fractions = tuple[float, float, float]

BENCHMARK: Fractions = (0.8, 0.1, 0.1)


@dataclass(frozen=True)
class Split:
    """Which rows are for what: three index arrays without a row in common."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray

    def within(self, domain: np.ndarray) -> Split:
        """Training and validation keep the rows of a mask alone; the test rows stay all.

        Args:
            domain: (n,) booleans over all rows of the set.
        """
        return Split(self.train[domain[self.train]], self.valid[domain[self.valid]], self.test)


def sizes(rows: int, fractions: Fractions = BENCHMARK) -> tuple[int, int, int]:
    """Rows of each part: validation and test to the nearest row, training the rest.

    >>> sizes(768)
    (614, 77, 77)
    """
    if len(fractions) != 3 or min(fractions) <= 0 or not math.isclose(sum(fractions), 1.0):
        raise ValueError(
            f"Expected three positive fractions (train, valid, test) of sum 1, got {fractions}."
        )
    valid, test = (math.floor(fraction * rows + 0.5) for fraction in fractions[1:])
    if min(rows - valid - test, valid, test) < 1:
        raise ValueError(f"Expected rows in every part of {fractions}, got {rows} rows in all.")
    return rows - valid - test, valid, test


def random(rows: int, k: int, seed: int, fractions: Fractions = BENCHMARK) -> Split:
    """The k-th random division of a seed; all divisions have the same sizes."""
    train, valid, test = sizes(rows, fractions)
    order = np.random.default_rng([seed, k]).permutation(rows)
    return Split(order[:train], order[train : train + valid], order[-test:])


def official(train: np.ndarray, test: np.ndarray) -> Split:
    """A published pair of lists; the last ninth of the training list becomes validation.

    With lists of 90 % and 10 % that is 80/10/10, of the sizes that `random` gives.
    """
    valid = math.floor(len(train) / 9 + 0.5)
    return Split(train[: len(train) - valid], train[len(train) - valid :], test)
