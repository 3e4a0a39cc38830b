"""The library's error bars of trained nets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch import nn

import rigidities as rg
from experiments.data.benchmark import OFFICIAL, RANDOM
from experiments.judging import error_bars
from experiments.judging.predictive import row_scores
from experiments.studies.uci.judged import Divided, Judged, Methods, collect, divided
from experiments.training import kept


def last_layers(
    name: str, *, splits: int, drawing: str, seed: int, epochs: int, nets: str
) -> dict[str, Any]:
    """Error bars of one net a split, judged on the test rows.

    Args:
        name: of the set.
        splits: how many.
        drawing: of the splits, "official" or "random". The random ones have the paper's error bars
            alone.
        seed: of the nets and of random splits.
        epochs: of the training.
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
        collect(methods, split, judged(net, split) if drawing == OFFICIAL else paper(net, split))
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
        collect(methods, split, [calibrated("best_of_five", uq, split, error_bars.AUTO)])
    about = {"committed": all(one.committed for one in found), "nets": nets}
    return {"methods": methods, **about, "seconds": time.monotonic() - start}


def judged(net: nn.Module, split: Divided) -> Iterator[Judged]:
    """The paper's, a noise floor with a Student-t, the default, and that of a refitted readout."""
    uq = error_bars.fitted(net, split.train)
    yield calibrated("llpr", uq, split, error_bars.PAPER)
    yield calibrated("floor_t", uq, split, error_bars.FLOOR_T)
    yield calibrated("best", uq, split, error_bars.AUTO)
    yield calibrated("best_refitted", uq.refit(), split, error_bars.AUTO)


def paper(net: nn.Module, split: Divided) -> Iterator[Judged]:
    """The paper's error bars alone, of random splits."""
    yield calibrated("llpr_random", error_bars.fitted(net, split.train), split, error_bars.PAPER)


def calibrated(
    method: str, uq: rg.LastLayerRigidity, split: Divided, how: error_bars.Calibration
) -> Judged:
    """On the validation rows."""
    error_bars.calibrated(uq, split.valid, how)
    chosen = {"ridge": uq.ridge, "scale": float(uq.scale)}
    return Judged(method, row_scores(uq.predict(split.test[0]), split.test[1], split.step), chosen)
