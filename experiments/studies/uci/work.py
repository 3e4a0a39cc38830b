"""Error bars of the rigidities' networks, judged on the test rows of every split.

The way of the data: `split_rows` reads a set and yields its splits with standardised rows. Each of
the three jobs, `last_layers`, `mean_of_five` and `other_bars`, takes the trained networks of all
splits, gives each split's test rows error bars by one or several methods, and scores the rows.
`add_scores` turns these scores into the target's unit and averages them, over all test rows and
over those that are no copies of training rows.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.baselines import boosted, laplace, variance_head
from experiments.data import uci
from experiments.data.benchmark import OFFICIAL, RANDOM, STEPS, copied, divisions, standardised
from experiments.judging import error_bars
from experiments.judging.error_bars import REPEATED
from experiments.judging.predictive import (
    LEVEL,
    Normal,
    RowScores,
    row_scores,
    with_and_without,
)
from experiments.training import kept
from experiments.training.stack import Stack

Rows = tuple[Tensor, Tensor]
"""Inputs x (n, d) and targets y (n, 1) of one split."""


SplitScores = dict[str, Any]
"""Scores of one method on one split: the summaries "all" and "new", and what was "chosen"."""

Methods = dict[str, list[SplitScores]]
"""Scores by method, one entry a split."""


class SplitRows(NamedTuple):
    """The standardised rows of one split.

    Attributes:
        train: training rows.
        valid: validation rows.
        test: test rows.
        unit: what a standardised target of one means in the target's unit.
        step: the distance of neighbouring standardised targets that lie on a grid, or None.
        copied: whether a test row equals a training or validation row, (n,).
    """

    train: Rows
    valid: Rows
    test: Rows
    unit: float
    step: float | None
    copied: Tensor

    @property
    def target(self) -> Tensor:
        """The targets of the test rows, (n,) in float64."""
        return self.test[1].double().flatten()


class MethodScores(NamedTuple):
    """The scores of one method on the test rows of one split, for standardised targets.

    Attributes:
        method: the name of the method.
        rows: scores row by row.
        chosen: hyperparameters that the method chose, by name.
    """

    method: str
    rows: RowScores
    chosen: dict[str, Any]


# --- splits --------------------------------------------------------------------------------------


def split_rows(name: str, splits: int, drawing: str, seed: int) -> Iterator[SplitRows]:
    """Yield the splits of a set, each standardised by its own training rows.

    Args:
        name: the name of the set.
        splits: the number of splits.
        drawing: "official" for the published lists, "random" for random ones.
        seed: the seed of random splits.
    """
    rows = uci.read(name)
    places = divisions(rows, splits, drawing, seed)
    samples = standardised(
        rows,
        np.stack([split.train for split in places]),
        np.stack([split.valid for split in places]),
        np.stack([split.test for split in places]),
    )
    train, valid, test = samples.parts
    for k, split in enumerate(places):
        unit = samples.unit[k].item()
        step = None
        if name in STEPS:
            step = STEPS[name] / unit
        yield SplitRows(
            train=(train[0][k], train[1][k]),
            valid=(valid[0][k], valid[1][k]),
            test=(test[0][k], test[1][k]),
            unit=unit,
            step=step,
            copied=torch.from_numpy(copied(rows, split)),
        )


def add_scores(methods: Methods, split: SplitRows, method_scores: Iterable[MethodScores]) -> None:
    """Append the scores of one split to those of its methods, in the target's unit.

    Args:
        methods: the scores of earlier splits, which are extended.
        split: the split that was judged.
        method_scores: the scores of each method; they may be computed while they are read.
    """
    with warnings.catch_warnings():
        # The published sets contain some rows several times; the page says so.
        warnings.filterwarnings("ignore", message=REPEATED)
        for method, rows, chosen in method_scores:
            scores = with_and_without(rows.in_unit(split.unit), split.copied)
            methods.setdefault(method, []).append({**scores, "chosen": chosen})


# --- the library's error bars --------------------------------------------------------------------


def last_layers(
    name: str, *, splits: int, drawing: str, seed: int, epochs: int, nets: str
) -> dict[str, Any]:
    """Judge the library's error bars of one network a split.

    Args:
        name: the name of the set.
        splits: the number of splits.
        drawing: "official" or "random" splits. Random splits have the paper's error bars alone.
        seed: the seed of the networks and of random splits.
        epochs: the epochs of the training.
        nets: the digest of the networks that come with the project.

    Returns:
        ``methods`` (see `Methods`), the ``epoch`` of the best validation loss, whether the networks
        were ``committed`` and in which file, and ``seconds``.
    """
    start = time.monotonic()
    member: int | str = 0
    score = calibrations
    if drawing != OFFICIAL:
        member = RANDOM
        score = paper_calibration
    networks = kept.nets("uci", name, member, count=splits, seed=seed, epochs=epochs)
    methods: Methods = {}
    for k, split in enumerate(split_rows(name, splits, drawing, seed)):
        add_scores(methods, split, score(networks.stack.module(k), split))
    return {
        "methods": methods,
        "epoch": networks.epoch,
        "committed": networks.committed,
        "nets": nets,
        "seconds": time.monotonic() - start,
    }


def mean_of_five(name: str, *, splits: int, seed: int, epochs: int, nets: str) -> dict[str, Any]:
    """Judge the default error bars of the mean of five networks a split, taken as one model.

    Args:
        name: the name of the set.
        splits: the number of official splits.
        seed: the seed of the networks.
        epochs: the epochs of the training.
        nets: the digest of the networks that come with the project.

    Returns:
        What `last_layers` returns, without ``epoch``.
    """
    start = time.monotonic()
    members = [
        kept.nets("uci", name, member, count=splits, seed=seed, epochs=epochs)
        for member in range(kept.MEMBERS)
    ]
    methods: Methods = {}
    for k, split in enumerate(split_rows(name, splits, OFFICIAL, seed)):
        model = rg.MeanOf([networks.stack.module(k) for networks in members])
        uq = error_bars.fitted(model, split.train)
        scores = calibrated_scores("best_of_five", uq, split, error_bars.FULL)
        add_scores(methods, split, [scores])
    return {
        "methods": methods,
        "committed": all(networks.committed for networks in members),
        "nets": nets,
        "seconds": time.monotonic() - start,
    }


def calibrations(network: nn.Module, split: SplitRows) -> Iterator[MethodScores]:
    """Score the library's four error bars of one network.

    These are the paper's, a noise floor with a Student-t distribution, the default, and the default
    of a refitted last layer.
    """
    uq = error_bars.fitted(network, split.train)
    yield calibrated_scores("llpr", uq, split, error_bars.PAPER)
    yield calibrated_scores("floor_t", uq, split, error_bars.FLOOR_T)
    yield calibrated_scores("best", uq, split, error_bars.FULL)
    yield calibrated_scores("best_refitted", uq.refit(), split, error_bars.FULL)


def paper_calibration(network: nn.Module, split: SplitRows) -> Iterator[MethodScores]:
    """Score the paper's error bars alone, for random splits."""
    uq = error_bars.fitted(network, split.train)
    yield calibrated_scores("llpr_random", uq, split, error_bars.PAPER)


def calibrated_scores(
    method: str, uq: rg.LastLayerRigidity, split: SplitRows, calibration: error_bars.Method
) -> MethodScores:
    """Calibrate on the validation rows of a split and score its test rows."""
    uq.calibrate(split.valid, method=calibration)
    x, y = split.test
    rows = row_scores(uq.predict(x), y, split.step)
    return MethodScores(method, rows, {"ridge": uq.ridge, "scale": float(uq.scale)})


# --- other error bars of the same networks -------------------------------------------------------


def other_bars(
    name: str, *, method: str, splits: int, seed: int, epochs: int, nets: str
) -> dict[str, Any]:
    """Judge error bars that are not the library's, on the first network of every official split.

    Args:
        name: the name of the set.
        method: one of `OTHER_METHODS`.
        splits: the number of splits.
        seed: the seed of the networks.
        epochs: the epochs of the training.
        nets: the digest of the networks that come with the project.

    Returns:
        What `last_layers` returns, without ``epoch``.
    """
    start = time.monotonic()
    networks = kept.nets("uci", name, count=splits, seed=seed, epochs=epochs)
    score = OTHER_METHODS[method]
    methods: Methods = {}
    for k, split in enumerate(split_rows(name, splits, OFFICIAL, seed)):
        network = networks.stack.picked([k])
        add_scores(methods, split, [score(network, split)])
    return {
        "methods": methods,
        "committed": networks.committed,
        "nets": nets,
        "seconds": time.monotonic() - start,
    }


def constant(network: Stack, split: SplitRows) -> MethodScores:
    """Score one bar for all rows: the root mean square of the validation residuals."""
    std = float(_residuals(network, split.valid).square().mean().sqrt())
    mean = _means(network, split.test[0])
    distribution = Normal(mean, torch.full_like(mean, std))
    rows = row_scores(distribution, split.target, split.step)
    return MethodScores("constant", rows, {"std": std})


def log_variance_head(network: Stack, split: SplitRows) -> MethodScores:
    """Score a log variance that is linear in the last features, fitted to the validation rows."""
    valid_features = network.features(split.valid[0][None])[0]
    test_features = network.features(split.test[0][None])[0]
    head = variance_head.fitted(valid_features, _residuals(network, split.valid))
    distribution = Normal(_means(network, split.test[0]), head.std(test_features))
    rows = row_scores(distribution, split.target, split.step)
    return MethodScores("variance_head", rows, {"steps": head.steps, "penalty": head.penalty})


def laplace_approximation(network: Stack, split: SplitRows) -> MethodScores:
    """Score the last-layer Laplace approximation."""
    posterior = laplace.fitted(network.module(0), split.train)
    mean, std = laplace.bars(posterior, split.test[0])
    rows = row_scores(Normal(mean, std), split.target, split.step)
    return MethodScores("laplace", rows, laplace.chosen(posterior))


def boosted_quantiles(network: Stack, split: SplitRows) -> MethodScores:
    """Score boosted quantiles of the residuals, which also correct the mean.

    They have intervals alone: no density and no CRPS.
    """
    train = (split.train[0], _residuals(network, split.train))
    valid = (split.valid[0], _residuals(network, split.valid))
    shift, low, high = boosted.intervals(train, valid, split.test[0], LEVEL)
    mean = _means(network, split.test[0])
    rows = RowScores(
        mean=mean + shift,
        bar=(high - low) / 2,
        target=split.target,
        low=mean + low,
        high=mean + high,
    )
    return MethodScores("boosted", rows, {})


OTHER_METHODS: dict[str, Callable[[Stack, SplitRows], MethodScores]] = {
    "constant": constant,
    "variance_head": log_variance_head,
    "laplace": laplace_approximation,
    "boosted": boosted_quantiles,
}
INSTALLED = {"laplace": laplace.installed, "boosted": boosted.installed}
"""Functions that tell whether the package of a method is installed; the others need none."""


def _means(network: Stack, x: Tensor) -> Tensor:
    """The predictions of a stack of one network, (n,) in float64."""
    return network(x[None])[0, :, 0].double()


def _residuals(network: Stack, rows: Rows) -> Tensor:
    """Targets minus predictions of a stack of one network, (n,) in float64."""
    x, y = rows
    return y[:, 0].double() - _means(network, x)
