"""Monte-Carlo dropout on a set: probability and precision chosen, trained anew, judged.

The authors' 400 epochs in batches of 128 are few steps where rows are few: on yacht, with three
batches an epoch, the nets are still underfitted at the end. The weight penalty takes tau in the
unit of standardised targets; in any unit it is too small to matter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.baselines.mc_dropout import PROBABILITIES, predicted, trained
from experiments.data import uci
from experiments.studies.uci.samples import (
    OFFICIAL,
    Samples,
    divisions,
    standardised,
    test_lists,
    training_lists,
    width,
)
from experiments.training.protocol import Protocol

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


def measured(
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
        ``methods`` as `experiments.studies.uci.nets.measured` has them, and ``seconds``.
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
    stack = trained(outer.parts[0], probability, own[:, 0], protocol, seeds, f"{name}, dropout")
    result = predicted(stack, outer.parts[1], probability, own, passes, seed)
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
    splits, choices = len(samples.unit), len(PROBABILITIES)
    train, valid = ((_repeated(x, choices), _repeated(y, choices)) for x, y in samples.parts)
    unit = _repeated(samples.unit, choices)
    probability = torch.tensor(PROBABILITIES, dtype=torch.float64).repeat(splits)
    grid = precisions * unit.square()[:, None]
    seeds: Sequence[int] = range(seed, seed + len(unit))
    middle = grid[:, len(precisions) // 2]
    stack = trained(train, probability, middle, protocol, seeds, "dropout, to choose")
    # The unit shifts all precisions of a split alike: the best is the same without it.
    likelihood = predicted(stack, valid, probability, grid, passes, seed).log_likelihood
    place = likelihood.reshape(splits, -1).argmax(1)
    return probability[place // len(precisions)], precisions[place % len(precisions)]


def _repeated(values: Tensor, times: int) -> Tensor:
    """Each entry so many times, beside each other."""
    return values.repeat_interleave(times, 0)
