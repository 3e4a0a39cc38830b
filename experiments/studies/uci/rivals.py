"""The rivals with nets of their own: deep ensembles and MC dropout, on the published splits.

What they predict is kept row by row, in the unit of standardised targets, and judged afterwards.

The 400 epochs of dropout's authors in batches of 128 are few steps where rows are few: on yacht,
with three batches an epoch, the nets are still underfitted at the end. The weight penalty takes tau
in the unit of standardised targets; in any unit it is too small to matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from experiments.baselines import deep_ensemble, mc_dropout
from experiments.data import uci
from experiments.data.benchmark import (
    OFFICIAL,
    STEPS,
    Samples,
    copied,
    divisions,
    standardised,
    test_lists,
    training_lists,
    width,
)
from experiments.judging.predictive import (
    Normal,
    RowScores,
    Scores,
    row_scores,
    with_and_without,
)
from experiments.training.protocol import Protocol

PROTOCOLS = {"deep_ensemble": deep_ensemble.OWN, "deep_ensemble_400": deep_ensemble.LONG}


def ensembles(
    name: str, *, method: str, first: int, splits: int, seed: int, epochs: int | None = None
) -> dict[str, Any]:
    """Ensembles of five on the published splits.

    Args:
        name: of the set.
        method: "deep_ensemble" or "deep_ensemble_400": whose protocol.
        first: split.
        splits: how many from there on.
        seed: of the nets; those of a split do not depend on the other splits.
        epochs: instead of the protocol's.

    Returns:
        ``mean`` and ``std`` of every split's test rows, (splits, n), and ``seconds``.
    """
    start = time.monotonic()
    rows = uci.read(name)
    found = divisions(rows, first + splits, OFFICIAL, seed)[first:]
    samples = standardised(rows, training_lists(found), test_lists(found))
    members = deep_ensemble.MEMBERS
    x, y = (part.repeat_interleave(members, 0) for part in samples.parts[0])
    seeds = range(seed + first * members, seed + (first + splits) * members)
    protocol = replace(PROTOCOLS[method], hidden=(width(name),))
    protocol = replace(protocol, epochs=epochs or protocol.epochs)
    stack = deep_ensemble.trained((x, y), protocol, seeds, f"{name}, {method}")
    mean, variance = deep_ensemble.predicted(stack, samples.parts[1][0])
    return {"mean": mean, "std": variance.sqrt(), "seconds": time.monotonic() - start}


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
    name: str, *, first: int, splits: int, seed: int, epochs: int, selecting: int, passes: int
) -> dict[str, Any]:
    """MC dropout on the published splits.

    Args:
        name: of the set.
        first: split.
        splits: how many from there on.
        seed: of the nets; the dropped units of one part are drawn together.
        epochs: of the training.
        selecting: passes while probability and precision are chosen.
        passes: in the end.

    Returns:
        ``rows``: the fields of `mc_dropout.Mixture` of every split; the ``chosen`` probability and
        precision of each; ``seconds``.
    """
    start = time.monotonic()
    rows = uci.read(name)
    found = divisions(rows, first + splits, OFFICIAL, seed)[first:]
    lists, test = training_lists(found), test_lists(found)
    protocol = Protocol(hidden=(width(name),), epochs=epochs, batch=BATCH)
    cut = int(0.8 * lists.shape[1])
    inner = standardised(rows, lists[:, :cut], lists[:, cut:])
    precisions = torch.tensor(PRECISIONS[name], dtype=torch.float64)
    probability, precision = chosen(inner, precisions, protocol, seed + first, selecting)
    outer = standardised(rows, lists, test)
    own = precision * outer.unit.square()
    seeds = range(seed + first, seed + first + splits)
    stack = mc_dropout.trained(
        outer.parts[0], probability, own, protocol, seeds, f"{name}, dropout"
    )
    step = STEPS[name] / outer.unit if name in STEPS else None
    distributions = mc_dropout.mixtures(
        stack, outer.parts[1], probability, own, passes, seeds[0], step
    )
    return {
        "rows": [vars(distribution) for distribution in distributions],
        "chosen": {"probability": probability, "precision": precision},
        "seconds": time.monotonic() - start,
    }


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


def judged(name: str, parts: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Scores]]:
    """The summaries of every split, in the target's unit.

    Args:
        name: of the set.
        parts: results of one method's jobs, in the order of the splits.
        seed: of splits that are random for want of published ones.
    """
    distributions = [distribution for part in parts for distribution in _distributions(part)]
    rows = uci.read(name)
    found = divisions(rows, len(distributions), OFFICIAL, seed)
    samples = standardised(rows, training_lists(found), test_lists(found))
    targets, units = samples.parts[1][1][..., 0].double(), samples.unit.tolist()
    return [
        with_and_without(
            _scored(distribution, target, STEPS.get(name, 0.0) / unit).in_unit(unit),
            torch.from_numpy(copied(rows, split)),
        )
        for distribution, target, unit, split in zip(
            distributions, targets, units, found, strict=True
        )
    ]


def _distributions(part: Mapping[str, Any]) -> Iterator[dict[str, Tensor | None]]:
    """What a part says of each of its splits."""
    ensembles = zip(part.get("mean", ()), part.get("std", ()), strict=True)
    for one in part.get("rows") or [{"mean": mean, "std": std} for mean, std in ensembles]:
        yield {
            name: None if values is None else torch.as_tensor(values, dtype=torch.float64)
            for name, values in one.items()
        }


def _scored(distribution: Mapping[str, Any], target: Tensor, step: float) -> RowScores:
    """Of a Gaussian, or of a mixture whose scores are kept already."""
    if "log_prob" not in distribution:
        return row_scores(Normal(distribution["mean"], distribution["std"]), target, step or None)
    cell = None if distribution["log_mass"] is None else -distribution["log_mass"]
    ends = distribution["low"], distribution["high"]
    return RowScores(
        distribution["mean"],
        distribution["std"],
        target,
        *ends,
        -distribution["log_prob"],
        distribution["crps"],
        cell,
    )
