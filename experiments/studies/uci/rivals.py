"""The rivals with networks of their own: deep ensembles and MC dropout, on the published splits.

The jobs `ensembles` and `dropout` train the networks of some splits and return the predictions row
by row, for standardised targets. `split_scores` judges them afterwards, so that a change of the
scores does not train anything again.

The 400 epochs of dropout's authors in batches of 128 are few steps where rows are few: on yacht,
with three batches an epoch, the networks are still underfitted at the end. The weight penalty takes
tau in the unit of standardised targets; in any unit it is too small to matter.
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
"""How the networks of an ensemble are trained, by method."""

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
"""The grids of tau by the authors of MC dropout, in the target's unit; that of ``year`` is ours."""

BATCH = 128
"""The batch size of MC dropout."""

SELECTION_SHARE = 0.8
"""The share of a training list that MC dropout learns from while it chooses."""


# --- training ------------------------------------------------------------------------------------


def ensembles(
    name: str, *, method: str, first: int, splits: int, seed: int, epochs: int | None = None
) -> dict[str, Any]:
    """Train ensembles of five on some published splits and predict the test rows.

    Args:
        name: the name of the set.
        method: "deep_ensemble" or "deep_ensemble_400", which selects the protocol.
        first: the first split.
        splits: the number of splits from there on.
        seed: the seed of the networks. Those of a split do not depend on the other splits.
        epochs: replaces the protocol's number of epochs.

    Returns:
        ``mean`` and ``std`` of every split's test rows, (splits, n), and ``seconds``.
    """
    start = time.monotonic()
    rows = uci.read(name)
    places = divisions(rows, first + splits, OFFICIAL, seed)[first:]
    samples = standardised(rows, training_lists(places), test_lists(places))
    (train_x, train_y), (test_x, _) = samples.parts
    # The members of a split lie beside each other in one stack of (splits * members) networks.
    members = deep_ensemble.MEMBERS
    repeated = (_repeated(train_x, members), _repeated(train_y, members))
    seeds = range(seed + first * members, seed + (first + splits) * members)
    protocol = replace(PROTOCOLS[method], hidden=(width(name),))
    if epochs:
        protocol = replace(protocol, epochs=epochs)
    stack = deep_ensemble.trained(repeated, protocol, seeds, f"{name}, {method}")
    mean, variance = deep_ensemble.predicted(stack, test_x)
    return {"mean": mean, "std": variance.sqrt(), "seconds": time.monotonic() - start}


def dropout(
    name: str, *, first: int, splits: int, seed: int, epochs: int, selecting: int, passes: int
) -> dict[str, Any]:
    """Train networks with MC dropout on some published splits and predict the test rows.

    Args:
        name: the name of the set.
        first: the first split.
        splits: the number of splits from there on.
        seed: the seed of the networks. The dropped units of all splits are drawn together.
        epochs: the epochs of the training.
        selecting: the passes while probability and precision are chosen.
        passes: the passes of the final prediction.

    Returns:
        ``rows``: the fields of `mc_dropout.Mixture` of every split; the ``chosen`` probability and
        precision of each; ``seconds``.
    """
    start = time.monotonic()
    rows = uci.read(name)
    places = divisions(rows, first + splits, OFFICIAL, seed)[first:]
    train_places = training_lists(places)
    protocol = Protocol(hidden=(width(name),), epochs=epochs, batch=BATCH)

    # Choose on the last fifth of each training list.
    cut = int(SELECTION_SHARE * train_places.shape[1])
    inner = standardised(rows, train_places[:, :cut], train_places[:, cut:])
    precisions = torch.tensor(PRECISIONS[name], dtype=torch.float64)
    probability, precision = likeliest(inner, precisions, protocol, seed + first, selecting)

    # Train on the whole list. The precision of standardised targets is that of the target times
    # the unit squared.
    outer = standardised(rows, train_places, test_lists(places))
    train, test = outer.parts
    standardised_precision = precision * outer.unit.square()
    seeds = range(seed + first, seed + first + splits)
    stack = mc_dropout.trained(
        train, probability, standardised_precision, protocol, seeds, f"{name}, dropout"
    )
    step = None
    if name in STEPS:
        step = STEPS[name] / outer.unit
    mixtures = mc_dropout.mixtures(
        stack, test, probability, standardised_precision, passes, seeds[0], step
    )
    return {
        "rows": [vars(mixture) for mixture in mixtures],
        "chosen": {"probability": probability, "precision": precision},
        "seconds": time.monotonic() - start,
    }


def likeliest(
    samples: Samples, precisions: Tensor, protocol: Protocol, seed: int, passes: int
) -> tuple[Tensor, Tensor]:
    """Choose the dropout probability and precision of every split by its validation rows.

    The criterion is the log-likelihood. The networks of all probabilities and splits are trained as
    one stack.

    Args:
        samples: training and validation rows of all splits.
        precisions: the grid of precisions, in the target's unit.
        protocol: how the networks are trained.
        seed: the seed of the first network.
        passes: the passes of each network.

    Returns:
        Probability and precision of each split, (splits,) each.
    """
    splits = len(samples.unit)
    choices = len(mc_dropout.PROBABILITIES)
    (train_x, train_y), (valid_x, valid_y) = samples.parts
    train = (_repeated(train_x, choices), _repeated(train_y, choices))
    valid = (_repeated(valid_x, choices), _repeated(valid_y, choices))
    unit = _repeated(samples.unit, choices)
    probability = torch.tensor(mc_dropout.PROBABILITIES, dtype=torch.float64).repeat(splits)
    grid = precisions * unit.square()[:, None]  # (splits * choices, precisions)
    seeds: Sequence[int] = range(seed, seed + len(unit))
    # The precision enters the training through a tiny weight penalty alone: the middle one will do.
    middle = grid[:, len(precisions) // 2]
    stack = mc_dropout.trained(train, probability, middle, protocol, seeds, "dropout, to choose")
    # The unit shifts all precisions of a split alike: the best is the same without it.
    likelihood = mc_dropout.predicted(stack, valid, probability, grid, passes, seed).log_likelihood
    # One row a split, over all pairs of a probability and a precision.
    pair = likelihood.reshape(splits, -1).argmax(1)
    return probability[pair // len(precisions)], precisions[pair % len(precisions)]


def _repeated(values: Tensor, times: int) -> Tensor:
    """Repeat each entry of the first dimension so many times, copies beside each other."""
    return values.repeat_interleave(times, 0)


# --- scores --------------------------------------------------------------------------------------


def split_scores(
    name: str, job_results: Sequence[Mapping[str, Any]], seed: int
) -> list[dict[str, Scores]]:
    """Judge the predictions of one method on every split, in the target's unit.

    Args:
        name: the name of the set.
        job_results: the results of the method's jobs, in the order of the splits.
        seed: the seed of splits that are random because none are published.

    Returns:
        The summaries "all" and "new" of each split.
    """
    predictions = [
        prediction for result in job_results for prediction in _predictions_of_splits(result)
    ]
    rows = uci.read(name)
    places = divisions(rows, len(predictions), OFFICIAL, seed)
    samples = standardised(rows, training_lists(places), test_lists(places))
    targets = samples.parts[1][1][..., 0].double()  # (splits, n)
    scores = []
    for k, (prediction, split) in enumerate(zip(predictions, places, strict=True)):
        unit = samples.unit[k].item()
        step = None
        if name in STEPS:
            step = STEPS[name] / unit
        scored_rows = _scored_rows(prediction, targets[k], step).in_unit(unit)
        scores.append(with_and_without(scored_rows, torch.from_numpy(copied(rows, split))))
    return scores


def _predictions_of_splits(result: Mapping[str, Any]) -> Iterator[dict[str, Tensor | None]]:
    """Yield the predictions of a job's splits as tensors: of `dropout`, or of `ensembles`."""
    if "rows" in result:
        splits = result["rows"]
    else:
        pairs = zip(result["mean"], result["std"], strict=True)
        splits = [{"mean": mean, "std": std} for mean, std in pairs]
    for fields in splits:
        tensors: dict[str, Tensor | None] = {}
        for field, values in fields.items():
            tensors[field] = None
            if values is not None:
                tensors[field] = torch.as_tensor(values, dtype=torch.float64)
        yield tensors


def _scored_rows(prediction: Mapping[str, Any], target: Tensor, step: float | None) -> RowScores:
    """Score a Gaussian, or a mixture whose scores were computed with its passes."""
    if "log_prob" not in prediction:
        return row_scores(Normal(prediction["mean"], prediction["std"]), target, step)
    cell = None
    if prediction["log_mass"] is not None:
        cell = -prediction["log_mass"]
    return RowScores(
        mean=prediction["mean"],
        bar=prediction["std"],
        target=target,
        low=prediction["low"],
        high=prediction["high"],
        nll=-prediction["log_prob"],
        crps=prediction["crps"],
        cell=cell,
    )
