"""The splits of a UCI set as stacked, standardised tensors: one net an entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.data import uci
from experiments.data.splits import Split

WIDTHS = {"protein": 100, "year": 100}
"""Of the hidden layer, where it is not 50."""

SPLITS = {"protein": 5, "year": 1}
"""Published for a set, where they are not 20."""

STEPS = {"wine": 1.0, "naval": 0.001}
"""Between neighbouring targets, where they lie on a grid."""

OFFICIAL, RANDOM = "official", "random"

Stacked = tuple[Tensor, Tensor]
"""x (B, n, d) and y (B, n, 1)."""


@dataclass(frozen=True)
class Samples:
    """Rows of every split, in the units of its own training rows.

    Attributes:
        parts: those that were asked for, the training rows first.
        unit: what a standardised target of one means, (B,), float64.
    """

    parts: tuple[Stacked, ...]
    unit: Tensor


def width(name: str) -> int:
    """Of the hidden layer."""
    return WIDTHS.get(name, 50)


def split_count(name: str) -> int:
    """Published splits of a set."""
    return SPLITS.get(name, 20)


def copies(rows: uci.Rows, splits: Sequence[Split]) -> dict[str, float]:
    """The shares of validation and test rows that equal a training row, inputs and target."""
    kind = _kinds(rows)
    return {
        part: float(
            np.mean([np.isin(kind[getattr(one, part)], kind[one.train]).mean() for one in splits])
        )
        for part in ("valid", "test")
    }


def copied(rows: uci.Rows, split: Split) -> np.ndarray:
    """Which test rows equal a training or a validation row, (n,)."""
    kind = _kinds(rows)
    return np.isin(kind[split.test], kind[np.concatenate([split.train, split.valid])])


def _kinds(rows: uci.Rows) -> np.ndarray:
    """A number for each row, the same for equal ones."""
    table = np.concatenate([rows.x, rows.y[:, None]], axis=1)
    return np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)


def divisions(rows: uci.Rows, count: int, drawing: str, seed: int) -> list[Split]:
    """The first splits, 80/10/10.

    Args:
        rows: of the set.
        count: how many.
        drawing: "official" for the published lists, the last ninth of each training list as
            validation; "random" for random ones. A set without published lists has only those.
        seed: of the random ones.
    """
    if drawing == OFFICIAL and rows.splits:
        return [rows.official(k) for k in range(count)]
    # Without published lists both drawings are random, but not the same.
    return [rows.random(k, seed + (drawing == OFFICIAL)) for k in range(count)]


def training_lists(splits: Sequence[Split]) -> np.ndarray:
    """Training and validation rows together, in the published order, (B, n)."""
    return np.stack([np.concatenate([split.train, split.valid]) for split in splits])


def test_lists(splits: Sequence[Split]) -> np.ndarray:
    """(B, n)."""
    return np.stack([split.test for split in splits])


def standardised(rows: uci.Rows, *parts: np.ndarray) -> Samples:
    """Shift and scale all parts by mean and standard deviation of the first.

    Args:
        rows: of the set.
        parts: (B, n) places of rows; the first is for training.
    """
    x, y = rows.x[parts[0]], rows.y[parts[0]]
    centre, spread = x.mean(1, keepdims=True), x.std(1, keepdims=True)
    # A constant column (naval has two) tells nothing; rounding must not blow it up.
    spread = np.where(spread > 1e-9 * np.abs(centre), spread, 1.0)
    mean, unit = y.mean(1, keepdims=True), y.std(1, keepdims=True)
    stacked = []
    for part in parts:
        inputs = torch.from_numpy((rows.x[part] - centre) / spread).float()
        targets = torch.from_numpy((rows.y[part] - mean) / unit).float()
        stacked.append((inputs, targets[..., None]))
    return Samples(tuple(stacked), torch.from_numpy(unit[:, 0]))
