"""California's rows for a stack of nets: one random split a net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.data import california
from experiments.data.splits import Fractions

Pair = tuple[Tensor, Tensor]
"""x (..., 8) and y (..., 1)."""


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
    rows = california.read()
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
    rows = california.read()
    column = rows.x[:, rows.feature_names.index(california.LONGITUDE)]
    counts, _ = np.histogram((column - column.mean()) / column.std(), edges)
    return {
        "edges": [float(edge) for edge in edges],
        "counts": counts.tolist(),
        "threshold": california.THRESHOLD,
        "degrees": float(column.mean() + california.THRESHOLD * column.std()),
        "inside": int(rows.in_domain.sum()),
        "outside": int((~rows.in_domain).sum()),
    }


def _stacked(indices: Sequence[np.ndarray]) -> Tensor:
    """(nets, n), each cut to the shortest."""
    shortest = min(map(len, indices))
    return torch.from_numpy(np.stack([one[:shortest] for one in indices]))
