"""The splits of a UCI set as stacked, standardised tensors: one network an entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.data import uci
from experiments.data.splits import Split

WIDTHS = {"protein": 100, "year": 100}
"""Widths of the hidden layer, where it is not 50."""

SPLITS = {"protein": 5, "year": 1}
"""Numbers of published splits, where they are not 20."""

STEPS = {"wine": 1.0, "naval": 0.001}
"""Distances of neighbouring targets, where they lie on a grid."""

OFFICIAL = "official"
"""The published splits."""

RANDOM = "random"
"""Random splits."""

Stacked = tuple[Tensor, Tensor]
"""x (B, n, d) and y (B, n, 1)."""


@dataclass(frozen=True)
class Samples:
    """Rows of every split, in the units of its own training rows.

    Attributes:
        parts: Inputs and targets of each kind of rows, the training rows first.
        unit: What a standardised target of one means, (B,), float64.
    """

    parts: tuple[Stacked, ...]
    unit: Tensor


def width(name: str) -> int:
    """The width of the hidden layer for a set."""
    return WIDTHS.get(name, 50)


def split_count(name: str) -> int:
    """The number of published splits of a set."""
    return SPLITS.get(name, 20)


def copies(rows: uci.Rows, splits: Sequence[Split]) -> dict[str, float]:
    """The shares of validation and test rows that equal a training row, inputs and target."""
    kind = _kinds(rows)
    valid_shares = [np.isin(kind[split.valid], kind[split.train]).mean() for split in splits]
    test_shares = [np.isin(kind[split.test], kind[split.train]).mean() for split in splits]
    return {"valid": float(np.mean(valid_shares)), "test": float(np.mean(test_shares))}


def copied(rows: uci.Rows, split: Split) -> np.ndarray:
    """Which test rows equal a training or a validation row, (n,)."""
    kind = _kinds(rows)
    earlier_rows = np.concatenate([split.train, split.valid])
    return np.isin(kind[split.test], kind[earlier_rows])


def _kinds(rows: uci.Rows) -> np.ndarray:
    """A number for each row, the same for equal ones."""
    table = np.concatenate([rows.x, rows.y[:, None]], axis=1)
    _, kinds = np.unique(table, axis=0, return_inverse=True)
    return kinds.reshape(-1)  # some versions of numpy return (n, 1)


def divisions(rows: uci.Rows, count: int, drawing: str, seed: int) -> list[Split]:
    """The first splits, 80/10/10.

    Args:
        rows: The set.
        count: The number of splits.
        drawing: "official" for the published lists, the last ninth of each training list as
            validation; "random" for random ones. A set without published lists has only those.
        seed: Seed of the random splits.
    """
    if drawing == OFFICIAL and rows.splits:
        return [rows.official(k) for k in range(count)]
    # Without published lists both drawings are random, but not the same.
    drawing_seed = seed + 1 if drawing == OFFICIAL else seed
    return [rows.random(k, drawing_seed) for k in range(count)]


def training_lists(splits: Sequence[Split]) -> np.ndarray:
    """Training and validation rows together, in the published order, (B, n)."""
    return np.stack([np.concatenate([split.train, split.valid]) for split in splits])


def test_lists(splits: Sequence[Split]) -> np.ndarray:
    """The test rows of every split, (B, n)."""
    return np.stack([split.test for split in splits])


def standardised(rows: uci.Rows, *parts: np.ndarray) -> Samples:
    """Shift and scale all rows by mean and standard deviation of the training rows.

    Args:
        rows: The set.
        parts: Indices of rows, (B, n) each; the first are the training rows.
    """
    train_x = rows.x[parts[0]]
    train_y = rows.y[parts[0]]
    centre = train_x.mean(1, keepdims=True)  # (B, 1, d)
    spread = train_x.std(1, keepdims=True)
    # A constant column (naval has two) tells nothing; rounding must not blow it up.
    spread = np.where(spread > 1e-9 * np.abs(centre), spread, 1.0)
    mean = train_y.mean(1, keepdims=True)  # (B, 1)
    unit = train_y.std(1, keepdims=True)
    samples = []
    for index in parts:
        inputs = torch.from_numpy((rows.x[index] - centre) / spread).float()
        targets = torch.from_numpy((rows.y[index] - mean) / unit).float()
        samples.append((inputs, targets[..., None]))
    return Samples(tuple(samples), torch.from_numpy(unit[:, 0]))
