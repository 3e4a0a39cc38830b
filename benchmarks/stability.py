"""How far chance and rounding move the bars of a default calibration.

The networks are the first ones of the study `uci`, in single precision. Each is calibrated once as
it is, and ten times with its rows in another order, in batches of another size and with noise in
the last bits of the inputs. The bars of the same test rows are compared.
"""

from __future__ import annotations

from statistics import median

import torch
from experiments.studies.uci.work import SplitRows, split_rows
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.results import Row, at_most, not_run
from experiments.data import uci
from experiments.training import kept

SETS = ("concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
REFITS = 10
BATCH_SIZES = (70, 300, 512, 2048)
"""Sizes of the batches of the refits, in turn."""
MEDIAN_LIMIT = 1.0
"""Percent by which the median bar may move in a refit."""
LARGEST_LIMIT = 5.0
"""Percent by which any bar may move."""
NLL_LIMIT = 0.005
"""Nats per row by which the NLL of the test rows may move."""
Data = tuple[Tensor, Tensor]
"""Inputs (n, P) and targets (n, 1)."""


def run(*, quick: bool = False) -> list[Row]:
    """Each of the sets: the median bar, the bar that moves most, and the NLL."""
    table = []
    for name in SETS[-1:] if quick else SETS:
        absence = uci.missing(name)
        if absence:
            table.append(not_run(name, absence))
        else:
            table += set_rows(name, refits=1 if quick else REFITS)
    return table


def set_rows(name: str, *, refits: int) -> list[Row]:
    """The refits of the first network of a set."""
    [split] = split_rows(name, 1, "official", 0)
    network = kept.nets("uci", name, count=1).stack.module(0)
    std, nll = bars(network, split, split.train, split.valid)
    medians, largest, scores = [], [], []
    for refit in range(refits):
        generator = torch.Generator().manual_seed(refit)
        train = shaken(split.train, generator)
        valid = shaken(split.valid, generator)
        batch_size = BATCH_SIZES[refit % len(BATCH_SIZES)]
        other_std, other_nll = bars(network, split, train, valid, batch_size=batch_size)
        move = 100 * (other_std / std - 1).abs()
        medians.append(float(move.median()))
        largest.append(float(move.max()))
        scores.append(abs(other_nll - nll))
    return [
        at_most(
            f"{name}: the median bar, in the refit that moves it most",
            max(medians),
            MEDIAN_LIMIT,
            "%",
            each=medians,
        ),
        at_most(
            f"{name}: any bar, in any refit",
            max(largest),
            LARGEST_LIMIT,
            "%",
            note=f"in the median refit {median(largest):.2g} %",
            each=largest,
        ),
        at_most(f"{name}: NLL, in any refit", max(scores), NLL_LIMIT, "nats", each=scores),
    ]


def shaken(rows: Data, generator: torch.Generator) -> Data:
    """The rows in another order, with noise in the last bits of their inputs."""
    x, y = rows
    order = torch.randperm(len(x), generator=generator)
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return (x * (1 + torch.finfo(x.dtype).eps * noise))[order], y[order]


def bars(
    network: nn.Module, split: SplitRows, train: Data, valid: Data, *, batch_size: int = 1024
) -> tuple[Tensor, float]:
    """The bars of the test rows, and their mean negative log-likelihood."""
    uq = rg.LastLayerRigidity(network, batch_size=batch_size).fit(train)
    uq.calibrate(valid, early_stopped=True)
    x, y = split.test
    p = uq.predict(x)
    return p.std, -float(p.log_prob(y).mean())
