"""The error bars of trained nets: the library's, and others on the same nets."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.baselines import boosted, variance_head
from experiments.baselines import laplace as last_layer_laplace
from experiments.data import uci
from experiments.data.benchmark import (
    OFFICIAL,
    RANDOM,
    STEPS,
    copied,
    divisions,
    standardised,
)
from experiments.judging import error_bars
from experiments.judging.predictive import (
    LEVEL,
    Normal,
    Predictive,
    RowScores,
    row_scores,
    with_and_without,
)
from experiments.training import kept

Rows = tuple[Tensor, Tensor]
"""x (n, d) and y (n, 1) of one split."""

REPEATED = r"\d+ of \d+ calibration rows stand in the training data"
"""What the library says of calibration rows that were trained on."""

Methods = dict[str, list[dict[str, Any]]]
"""Of each method and split: the summaries "all" and "new", and what was "chosen"."""


class Judged(NamedTuple):
    """What a method says of one split's test rows, in the unit of standardised targets."""

    method: str
    rows: RowScores
    chosen: dict[str, Any]


def last_layers(
    name: str,
    *,
    splits: int,
    drawing: str,
    seed: int,
    epochs: int,
    packages: Sequence[str],
    nets: str,
) -> dict[str, Any]:
    """Error bars of one net a split, judged on the test rows.

    Args:
        name: of the set.
        splits: how many.
        drawing: of the splits, "official" or "random". The random ones have the paper's error bars
            alone.
        seed: of the nets and of random splits.
        epochs: of the training.
        packages: of others that are there: "laplace", "boosted".
        nets: digest of the nets that come with the project.

    Returns:
        ``methods`` (see `Methods`), the ``epoch`` of the best validation loss, whether the nets
        were ``committed`` and in which file, ``seconds``.
    """
    start = time.monotonic()
    member = 0 if drawing == OFFICIAL else RANDOM
    found = kept.nets("uci", name, member, count=splits, seed=seed, epochs=epochs)
    methods: Methods = {}
    for k, split in enumerate(divided(name, splits, drawing, seed)):
        net = found.stack.module(k)
        ways = judged(net, split, packages) if drawing == OFFICIAL else paper(net, split)
        collect(methods, split, ways)
    about = {"epoch": found.epoch, "committed": found.committed, "nets": nets}
    return {"methods": methods, **about, "seconds": time.monotonic() - start}


def five(name: str, *, splits: int, seed: int, epochs: int, nets: str) -> dict[str, Any]:
    """The same of the mean of five nets a split, as one model."""
    start = time.monotonic()
    asked = {"count": splits, "seed": seed, "epochs": epochs}
    found = [kept.nets("uci", name, member, **asked) for member in range(kept.MEMBERS)]
    methods: Methods = {}
    for k, split in enumerate(divided(name, splits, OFFICIAL, seed)):
        uq = error_bars.fitted(rg.MeanOf([one.stack.module(k) for one in found]), split.train)
        collect(methods, split, [automatic("best_of_five", uq, split)])
    about = {"committed": all(one.committed for one in found), "nets": nets}
    return {"methods": methods, **about, "seconds": time.monotonic() - start}


class Divided(NamedTuple):
    """One split: rows, the unit of the target, the step of a grid in it, and copies."""

    train: Rows
    valid: Rows
    test: Rows
    unit: float
    step: float | None
    copied: Tensor


def divided(name: str, splits: int, drawing: str, seed: int) -> Iterator[Divided]:
    """The splits of a set, one after the other."""
    rows = uci.read(name)
    found = divisions(rows, splits, drawing, seed)
    lists = (np.stack([getattr(one, part) for one in found]) for part in ("train", "valid", "test"))
    samples = standardised(rows, *lists)
    for k, (unit, split) in enumerate(zip(samples.unit.tolist(), found, strict=True)):
        parts = [(x[k], y[k]) for x, y in samples.parts]
        step = STEPS[name] / unit if name in STEPS else None
        yield Divided(*parts, unit, step, torch.from_numpy(copied(rows, split)))


def collect(methods: Methods, split: Divided, ways: Sequence[Judged] | Iterator[Judged]) -> None:
    """Add the scores of a split, in the target's unit."""
    with warnings.catch_warnings():
        # The published sets hold some rows several times; the page says so.
        warnings.filterwarnings("ignore", message=REPEATED)
        for method, rows, chosen in ways:
            scores = with_and_without(rows.in_unit(split.unit), split.copied)
            methods.setdefault(method, []).append({**scores, "chosen": chosen})


def paper(net: nn.Module, split: Divided) -> Iterator[Judged]:
    """The paper's error bars alone, of random splits."""
    yield calibrated("llpr_random", error_bars.fitted(net, split.train), split, error_bars.PAPER)


def judged(net: nn.Module, split: Divided, packages: Sequence[str]) -> Iterator[Judged]:
    """All error bars of one net."""
    uq = error_bars.fitted(net, split.train)
    yield calibrated("llpr", uq, split, error_bars.PAPER)
    yield calibrated("floor_t", uq, split, error_bars.FLOOR_T)
    yield automatic("best", uq, split)
    yield automatic("best_refitted", uq.refit(), split)
    yield from simple(uq, split)
    if "laplace" in packages:
        posterior = last_layer_laplace.fitted(net, split.train)
        bars = Normal(*last_layer_laplace.bars(posterior, split.test[0]))
        yield others("laplace", bars, split, last_layer_laplace.chosen(posterior))
    if "boosted" in packages:
        yield boosting(net, split)


def calibrated(
    method: str, uq: rg.LastLayerRigidity, split: Divided, how: error_bars.Calibration
) -> Judged:
    """By the library, on the validation rows."""
    error_bars.calibrated(uq, split.valid, how)
    chosen = {"ridge": uq.ridge, "scale": float(uq.scale)}
    return Judged(method, row_scores(uq.predict(split.test[0]), split.test[1], split.step), chosen)


def automatic(method: str, uq: rg.LastLayerRigidity, split: Divided) -> Judged:
    """The library's default."""
    return calibrated(method, uq, split, error_bars.AUTO)


def simple(uq: rg.LastLayerRigidity, split: Divided) -> Iterator[Judged]:
    """One bar for all rows, and a variance head on the last features."""
    (inside, target), (x, _) = split.valid, split.test
    with torch.no_grad():
        residual = (target - uq.predict(inside).mean).flatten()
        mean = uq.predict(x).mean.double().flatten()
    flat = float(residual.double().square().mean().sqrt())
    yield others("constant", Normal(mean, torch.full_like(mean, flat)), split, {"std": flat})
    head = variance_head.fitted(uq.features(inside), residual)
    bars = Normal(mean, head.std(uq.features(x)))
    yield others("variance_head", bars, split, {"steps": head.steps, "penalty": head.penalty})


def boosting(net: nn.Module, split: Divided) -> Judged:
    """Boosted quantiles of the residual, which also correct the mean: intervals alone."""
    with torch.no_grad():
        means = [net(x).flatten().double() for x, _ in split[:3]]
    residuals = [y.flatten() - mean for (_, y), mean in zip(split[:2], means, strict=False)]
    learnt = zip((split.train[0], split.valid[0]), residuals, strict=True)
    shift, low, high = boosted.intervals(*learnt, split.test[0], LEVEL)
    centre, target = means[2], split.test[1].double().flatten()
    rows = RowScores(centre + shift, (high - low) / 2, target, centre + low, centre + high)
    return Judged("boosted", rows, {})


def others(method: str, law: Predictive, split: Divided, chosen: Mapping[str, Any]) -> Judged:
    """A law of another's."""
    target = split.test[1].double().flatten()
    return Judged(method, row_scores(law, target, split.step), dict(chosen))
