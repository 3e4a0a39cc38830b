"""The parts: nets whose last layer gives the error bars, deep ensembles, MC dropout.

The 400 epochs of dropout's authors in batches of 128 are few steps where rows are few: on yacht,
with three batches an epoch, the nets are still underfitted at the end. The weight penalty takes tau
in the unit of standardised targets; in any unit it is too small to matter.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.baselines import deep_ensemble, mc_dropout
from experiments.baselines import laplace as last_layer_laplace
from experiments.data import uci
from experiments.judging import error_bars
from experiments.studies.uci.samples import (
    OFFICIAL,
    Samples,
    divisions,
    standardised,
    test_lists,
    training_lists,
    width,
)
from experiments.training.descent import trained
from experiments.training.protocol import Protocol
from rigidities import metrics

Rows = tuple[Tensor, Tensor]
"""x (n, d) and y (n, 1) of one split."""

REPEATED = r"\d+ of \d+ calibration rows stand in the training data"
"""What the library says of calibration rows that were trained on."""

Measured = dict[str, dict[str, list[Any]]]
"""Of each method: "rmse", "nll" and what was chosen, one entry a split."""


def last_layers(
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
    yield "constant", in_unit(paper.mean, torch.full_like(paper.std, flat), y, unit, {"std": flat})
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


PROTOCOLS = {"deep_ensemble": deep_ensemble.OWN, "deep_ensemble_400": deep_ensemble.LONG}


def ensembles(
    name: str, *, method: str, splits: int, seed: int, epochs: int | None = None
) -> dict[str, Any]:
    """Ensembles of five on the published splits.

    Args:
        name: of the set.
        method: "deep_ensemble" or "deep_ensemble_400": whose protocol.
        splits: how many.
        seed: of the nets.
        epochs: instead of the protocol's.

    Returns:
        ``methods`` as `last_layers` has them, and ``seconds``.
    """
    start = time.monotonic()
    rows = uci.read(name)
    found = divisions(rows, splits, OFFICIAL, seed)
    samples = standardised(rows, training_lists(found), test_lists(found))
    members = deep_ensemble.MEMBERS
    x, y = (part.repeat_interleave(members, 0) for part in samples.parts[0])
    seeds = range(seed, seed + splits * members)
    protocol = replace(PROTOCOLS[method], hidden=(width(name),))
    protocol = replace(protocol, epochs=epochs or protocol.epochs)
    stack = deep_ensemble.trained((x, y), protocol, seeds, f"{name}, {method}")
    mean, variance = deep_ensemble.predicted(stack, samples.parts[1][0])
    target = samples.parts[1][1][..., 0].double()
    pairs = list(zip(mean, variance.sqrt(), target, strict=True))
    nll = [metrics.nll(m, std, y) for m, std, y in pairs]
    rmse = [metrics.rmse(m, y) for m, _, y in pairs]
    scores = {
        "rmse": [value * unit for value, unit in zip(rmse, samples.unit.tolist(), strict=True)],
        "nll": [value + unit for value, unit in zip(nll, samples.unit.log().tolist(), strict=True)],
    }
    return {"methods": {method: scores}, "seconds": time.monotonic() - start}


PRECISIONS = {
    "concrete": (0.025, 0.05, 0.075),
    "energy": (0.25, 0.5, 0.75),
    "kin8nm": (150.0, 200.0, 250.0),
    "naval": (3e4, 4e4, 5e4),
    "power": (0.05, 0.1, 0.15),
    "protein": (0.025, 0.05, 0.075),
    "wine": (2.5, 3.0, 3.5),
    "yacht": (0.25, 0.5, 0.75),
    "year": (0.01, 0.0125, 0.015),
}
"""The authors' grids of tau, in the target's unit; that of ``year`` is ours."""

BATCH = 128


def dropout(
    name: str, *, splits: int, seed: int, epochs: int, selecting: int, passes: int
) -> dict[str, Any]:
    """MC dropout on the published splits.

    Args:
        name: of the set.
        splits: how many.
        seed: of the nets.
        epochs: of the training.
        selecting: passes while probability and precision are chosen.
        passes: in the end.

    Returns:
        ``methods`` as `last_layers` has them, and ``seconds``.
    """
    start = time.monotonic()
    rows = uci.read(name)
    found = divisions(rows, splits, OFFICIAL, seed)
    lists, test = training_lists(found), test_lists(found)
    protocol = Protocol(hidden=(width(name),), epochs=epochs, batch=BATCH)
    cut = int(0.8 * lists.shape[1])
    inner = standardised(rows, lists[:, :cut], lists[:, cut:])
    precisions = torch.tensor(PRECISIONS[name], dtype=torch.float64)
    probability, precision = chosen(inner, precisions, protocol, seed, selecting)
    outer = standardised(rows, lists, test)
    own = (precision * outer.unit.square())[:, None]
    seeds = range(seed, seed + splits)
    stack = mc_dropout.trained(
        outer.parts[0], probability, own[:, 0], protocol, seeds, f"{name}, dropout"
    )
    result = mc_dropout.predicted(stack, outer.parts[1], probability, own, passes, seed)
    error = (result.mean - outer.parts[1][1][..., 0]).square().mean(1).sqrt()
    method = {
        "rmse": (error * outer.unit).tolist(),
        "nll": (outer.unit.log() - result.log_likelihood[:, 0]).tolist(),
        "probability": probability.tolist(),
        "precision": precision.tolist(),
    }
    return {"methods": {"mc_dropout": method}, "seconds": time.monotonic() - start}


def chosen(
    samples: Samples, precisions: Tensor, protocol: Protocol, seed: int, passes: int
) -> tuple[Tensor, Tensor]:
    """Probability and precision of every split, by the log-likelihood of its validation rows.

    All probabilities of all splits are one stack.

    Args:
        samples: training and validation rows.
        precisions: the grid, in the target's unit.
        protocol: of the training.
        seed: of the first net.
        passes: of each net.
    """
    splits, choices = len(samples.unit), len(mc_dropout.PROBABILITIES)
    train, valid = ((_repeated(x, choices), _repeated(y, choices)) for x, y in samples.parts)
    unit = _repeated(samples.unit, choices)
    probability = torch.tensor(mc_dropout.PROBABILITIES, dtype=torch.float64).repeat(splits)
    grid = precisions * unit.square()[:, None]
    seeds: Sequence[int] = range(seed, seed + len(unit))
    middle = grid[:, len(precisions) // 2]
    stack = mc_dropout.trained(train, probability, middle, protocol, seeds, "dropout, to choose")
    # The unit shifts all precisions of a split alike: the best is the same without it.
    likelihood = mc_dropout.predicted(stack, valid, probability, grid, passes, seed).log_likelihood
    place = likelihood.reshape(splits, -1).argmax(1)
    return probability[place // len(precisions)], precisions[place % len(precisions)]


def _repeated(values: Tensor, times: int) -> Tensor:
    """Each entry so many times, beside each other."""
    return values.repeat_interleave(times, 0)
