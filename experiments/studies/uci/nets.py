"""The nets whose last layer gives the error bars: trained once a set, judged in several ways."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, full_like, nn

from experiments.baselines import laplace as last_layer_laplace
from experiments.data import uci
from experiments.judging import error_bars
from experiments.studies.uci.samples import OFFICIAL, divisions, standardised, test_lists, width
from experiments.training.descent import trained
from experiments.training.protocol import Protocol
from rigidities import metrics

Rows = tuple[Tensor, Tensor]
"""x (n, d) and y (n, 1) of one split."""

REPEATED = r"\d+ of \d+ calibration rows stand in the training data"
"""What the library says of calibration rows that were trained on."""

Measured = dict[str, dict[str, list[Any]]]
"""Of each method: "rmse", "nll" and what was chosen, one entry a split."""


def measured(
    name: str, *, splits: int, drawing: str, seed: int, epochs: int, laplace: bool
) -> dict[str, Any]:
    """Train a net on each split and judge its error bars on the test rows.

    Args:
        name: of the set.
        splits: how many.
        drawing: of the splits, "official" or "random". The random ones have the paper's error bars
            alone.
        seed: of the nets and of random splits.
        epochs: of the training.
        laplace: whether laplace-torch is there.

    Returns:
        ``methods`` (see `Measured`), the ``epoch`` of the best validation loss, ``seconds``.
    """
    start = time.monotonic()
    rows = uci.read(name)
    found = divisions(rows, splits, drawing, seed)
    lists = (np.stack([getattr(split, part) for split in found]) for part in ("train", "valid"))
    samples = standardised(rows, *lists, test_lists(found))
    seeds = range(seed, seed + splits)
    protocol = Protocol(hidden=(width(name),), epochs=epochs)
    result = trained(*samples.parts[:2], protocol, seeds, f"{name}, {drawing}")
    methods: Measured = {}
    for k, unit in enumerate(samples.unit.tolist()):
        parts = [(x[k], y[k]) for x, y in samples.parts]
        net = result.best.module(k)
        with warnings.catch_warnings():
            # The published sets hold some rows several times; the page says so.
            warnings.filterwarnings("ignore", message=REPEATED)
            for method, scores in judged(net, parts, unit, drawing == OFFICIAL, laplace):
                for key, value in scores.items():
                    methods.setdefault(method, {}).setdefault(key, []).append(value)
    seconds = time.monotonic() - start
    return {"methods": methods, "epoch": result.epoch.tolist(), "seconds": seconds}


def judged(
    net: nn.Module, parts: list[Rows], unit: float, every: bool, laplace: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Scores of one net's error bars by method.

    Args:
        net: trained.
        parts: training, validation and test rows.
        unit: of the target.
        every: method, or the paper's alone.
        laplace: whether laplace-torch is there.
    """
    train, valid, (x, y) = parts
    uq = error_bars.fitted(net, train)
    paper = error_bars.bars(uq, valid, x, error_bars.PAPER)
    if not every:
        yield "llpr_random", in_unit(paper.mean, paper.std, y, unit, paper.chosen)
        return
    yield "llpr", in_unit(paper.mean, paper.std, y, unit, paper.chosen)
    best = error_bars.bars(uq, valid, x, error_bars.best(uq, valid))
    yield "best", in_unit(best.mean, best.std, y, unit, best.chosen)
    flat = error_bars.constant(uq.predict(valid[0]).mean, valid[1])
    yield "constant", in_unit(paper.mean, full_like(paper.std, flat), y, unit, {"std": flat})
    if laplace:
        posterior = last_layer_laplace.fitted(net, train)
        chosen = last_layer_laplace.chosen(posterior)
        yield "laplace", in_unit(*last_layer_laplace.bars(posterior, x), y, unit, chosen)


def in_unit(
    mean: Tensor, std: Tensor, y: Tensor, unit: float, chosen: dict[str, Any]
) -> dict[str, Any]:
    """RMSE and NLL in the target's unit, from standardised values; and what was chosen."""
    y = y.flatten().to(mean)
    rmse, nll = metrics.rmse(mean, y) * unit, metrics.nll(mean, std, y) + math.log(unit)
    return {"rmse": rmse, "nll": nll, **chosen}
