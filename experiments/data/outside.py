"""UCI sets with a domain: rows far along the first principal direction are kept from the nets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.data import uci
from experiments.data.benchmark import Samples, standardised

SEED = 77
"""Of the splits."""

SHARE = 0.8
"""Of the rows that lie in the domain."""

SETS = ("concrete", "energy", "kin8nm", "power", "protein", "wine")


@dataclass(frozen=True)
class Divided:
    """Training and validation rows of the domain, and test rows of all.

    Attributes:
        samples: training, validation and test rows of every net.
        inside: which test rows are in the domain, (B, n).
    """

    samples: Samples
    inside: Tensor


def domain(rows: uci.Rows) -> np.ndarray:
    """The rows below the 80 % quantile along the first principal direction of the inputs, (n,).

    Inputs are standardised; the direction points where its largest entry is positive.
    """
    centre, spread = rows.x.mean(0), rows.x.std(0)
    z = (rows.x - centre) / np.where(spread > 1e-9 * np.abs(centre), spread, 1.0)
    direction = np.linalg.svd(z, full_matrices=False)[2][0]
    along = z @ (direction * np.sign(direction[np.abs(direction).argmax()]))
    return along <= np.quantile(along, SHARE)


def drawn(name: str, nets: int, seed: int = 0) -> Divided:
    """One random split a net, cut to the sizes of the smallest.

    Args:
        name: of the set.
        nets: how many splits.
        seed: other splits.
    """
    rows = uci.read(name)
    inside = domain(rows)
    splits = [rows.random(k, SEED + seed).within(inside) for k in range(nets)]
    parts = [[getattr(split, part) for split in splits] for part in ("train", "valid", "test")]
    lists = [np.stack([one[: min(map(len, part))] for one in part]) for part in parts]
    return Divided(standardised(rows, *lists), torch.from_numpy(inside[lists[2]]))
