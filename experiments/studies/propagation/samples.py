"""Random splits of one set of rows: what each net is trained, calibrated and judged on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.data import uci


@dataclass(frozen=True)
class Sizes:
    """Rows of a split, and how many splits there are.

    Attributes:
        train: few beside the whole set, so that the training sets are nearly independent.
        valid: for the calibration.
        test: rows of the largest group.
        nets: number of splits.
    """

    train: int = 1000
    valid: int = 500
    test: int = 500
    nets: int = 120


@dataclass(frozen=True)
class Samples:
    """All nets' rows, inputs and targets standardised with the whole set's mean and spread.

    Attributes:
        train, valid, test: (nets, rows, inputs) and (nets, rows, 1).
        common: inputs (rows, inputs) that no net is trained or calibrated on.
        spread: of the targets, in their own unit.
    """

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    common: Tensor
    spread: float


def drawn(name: str, sizes: Sizes, seed: int) -> Samples:
    """Splits of a set: a common group is put aside, the rest is shuffled anew for each net."""
    rows = uci.read(name)
    x, y = torch.from_numpy(rows.x), torch.from_numpy(rows.y)[:, None]
    needed = sizes.train + sizes.valid + 2 * sizes.test
    if len(x) < needed:
        raise ValueError(f"Expected at least {needed} rows in {name!r}, got {len(x)}.")
    spread = float(y.std())
    x, y = ((t - t.mean(0)) / t.std(0).clamp(min=1e-12) for t in (x, y))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    common, rest = order[: sizes.test], order[sizes.test :]
    each = torch.stack(
        [rest[torch.randperm(len(rest), generator=generator)] for _ in range(sizes.nets)]
    )
    parts = each[:, : needed - sizes.test].split([sizes.train, sizes.valid, sizes.test], dim=1)
    train, valid, test = ((x[part].float(), y[part].float()) for part in parts)
    return Samples(train, valid, test, x[common].float(), spread)
