"""UCI sets with a domain: networks see no rows far along the first principal direction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.data import uci
from experiments.data.benchmark import Samples, standardised
from experiments.data.splits import stacked

SEED = 77
"""Seed of the splits."""

SHARE = 0.8
"""Share of the rows that lie in the domain."""

SETS = ("concrete", "energy", "kin8nm", "power", "protein", "wine")


@dataclass(frozen=True)
class Divided:
    """Training and validation rows of the domain, and test rows of all.

    Attributes:
        samples: Training, validation and test rows of every network.
        inside: Which test rows are in the domain, (B, n).
    """

    samples: Samples
    inside: Tensor


def domain(rows: uci.Rows) -> np.ndarray:
    """The rows below the 80 % quantile along the first principal direction of the inputs, (n,).

    Inputs are standardised; the direction points where its largest entry is positive.
    """
    centre = rows.x.mean(0)
    spread = rows.x.std(0)
    spread = np.where(spread > 1e-9 * np.abs(centre), spread, 1.0)  # constant columns
    z = (rows.x - centre) / spread
    _, _, directions = np.linalg.svd(z, full_matrices=False)
    direction = directions[0]
    sign = np.sign(direction[np.abs(direction).argmax()])
    along = z @ (direction * sign)
    inside: np.ndarray = along <= np.quantile(along, SHARE)
    return inside


def drawn(name: str, nets: int, seed: int = 0) -> Divided:
    """One random split for each network, cut to the sizes of the smallest.

    Args:
        name: The name of the set.
        nets: The number of splits.
        seed: Another seed gives other splits.
    """
    rows = uci.read(name)
    inside = domain(rows)
    splits = [rows.random(k, SEED + seed).within(inside) for k in range(nets)]
    train = stacked([split.train for split in splits])
    valid = stacked([split.valid for split in splits])
    test = stacked([split.test for split in splits])
    samples = standardised(rows, train, valid, test)
    return Divided(samples, torch.from_numpy(inside[test]))
