"""Other error bars of the same nets: a constant, a variance head, Laplace, boosted quantiles."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.baselines import boosted, laplace, variance_head
from experiments.data.benchmark import OFFICIAL
from experiments.judging.predictive import LEVEL, Normal, RowScores, row_scores
from experiments.studies.uci.judged import Divided, Judged, Methods, collect, divided
from experiments.training import kept
from experiments.training.stack import Stack


def bars(
    name: str, *, method: str, splits: int, seed: int, epochs: int, nets: str
) -> dict[str, Any]:
    """One method on the first net of every split.

    Args:
        name: of the set.
        method: one of `METHODS`.
        splits: how many.
        seed: of the nets.
        epochs: of the training.
        nets: digest of the nets that come with the project.

    Returns:
        ``methods``, ``committed``, ``nets`` and ``seconds`` as `work.last_layers` has them.
    """
    start = time.monotonic()
    found = kept.nets("uci", name, count=splits, seed=seed, epochs=epochs)
    methods: Methods = {}
    for k, split in enumerate(divided(name, splits, OFFICIAL, seed)):
        collect(methods, split, [METHODS[method](found.stack.picked([k]), split)])
    about = {"committed": found.committed, "nets": nets}
    return {"methods": methods, **about, "seconds": time.monotonic() - start}


def constant(net: Stack, split: Divided) -> Judged:
    """One bar for all rows: the root mean square of the validation residuals."""
    std = float(_residual(net, split.valid).square().mean().sqrt())
    mean = _mean(net, split.test[0])
    rows = row_scores(Normal(mean, torch.full_like(mean, std)), split.target, split.step)
    return Judged("constant", rows, {"std": std})


def head(net: Stack, split: Divided) -> Judged:
    """A log variance linear in the last features, fitted to the validation rows."""
    inside, x = split.valid[0], split.test[0]
    found = variance_head.fitted(net.features(inside[None])[0], _residual(net, split.valid))
    distribution = Normal(_mean(net, x), found.std(net.features(x[None])[0]))
    chosen = {"steps": found.steps, "penalty": found.penalty}
    return Judged("variance_head", row_scores(distribution, split.target, split.step), chosen)


def approximated(net: Stack, split: Divided) -> Judged:
    """The last-layer Laplace approximation."""
    posterior = laplace.fitted(net.module(0), split.train)
    distribution = Normal(*laplace.bars(posterior, split.test[0]))
    rows = row_scores(distribution, split.target, split.step)
    return Judged("laplace", rows, laplace.chosen(posterior))


def boosting(net: Stack, split: Divided) -> Judged:
    """Boosted quantiles of the residual, which also correct the mean: intervals alone."""
    learnt = [(rows[0], _residual(net, rows)) for rows in (split.train, split.valid)]
    shift, low, high = boosted.intervals(*learnt, split.test[0], LEVEL)
    mean = _mean(net, split.test[0])
    rows = RowScores(mean + shift, (high - low) / 2, split.target, mean + low, mean + high)
    return Judged("boosted", rows, {})


METHODS: dict[str, Callable[[Stack, Divided], Judged]] = {
    "constant": constant,
    "variance_head": head,
    "laplace": approximated,
    "boosted": boosting,
}
NEEDS = {"laplace": laplace.installed, "boosted": boosted.installed}
"""Whether the package of a method is there."""


def _mean(net: Stack, x: Tensor) -> Tensor:
    return net(x[None])[0, :, 0].double()


def _residual(net: Stack, rows: tuple[Tensor, Tensor]) -> Tensor:
    return rows[1][:, 0].double() - _mean(net, rows[0])
