"""What the error bars of molecules cost beside bare predictions: seconds, in one run.

The weights do not matter for it: the net is not trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

import rigidities as rg
from experiments.atoms import bpnn, samples
from experiments.atoms.batches import Batch, Environments, loss_weight
from experiments.atoms.fitting import energies
from experiments.atoms.samples import SPECIES
from experiments.frame.machine import machine
from experiments.training.protocol import device

FIT_BATCH = 128
PREDICT_BATCH = 512
LIST = 2048
"""Molecules whose batches are made before the clock starts."""

ROUNDS = 5


def measured(*, seed: int, train: int, valid: int, molecules: int | None) -> dict[str, Any]:
    """Seconds of the fit and of predictions of all test molecules, beside bare passes.

    Args:
        seed: of the split and of the weights.
        train: molecules of the fit.
        valid: molecules of the calibration.
        molecules: draw so few of the set; None for all.
    """
    with samples.drawn(0, seed, train=train, valid=valid, molecules=molecules) as data:
        known = data.environments(data.train)
        net = bpnn.drawn(len(SPECIES), known.x.shape[1], seed)
        net.standardise(known.x.cpu())
        batches = list(known.batches(FIT_BATCH))
        del known
        uq = rg.LastLayerRigidity(net.to(device()))
        fit = fit_cost(uq, batches)
        del batches
        uq.calibrate(
            data.environments(data.valid[:LIST]).batches(PREDICT_BATCH),
            criterion="nll",
            progress=False,
        )
        spent = {"bare": 0.0, "bars": 0.0}
        for _, part in data.test_parts():
            for name, more in prediction_cost(uq, part).items():
                spent[name] += more
        predict = {**spent, "ratio": spent["bars"] / spent["bare"], "molecules": len(data.test)}
        where = {"threads": torch.get_num_threads(), "machine": machine()}
        return {"fit": fit, "predict": predict, **where}


def fit_cost(uq: rg.LastLayerRigidity, batches: Sequence[Batch]) -> dict[str, float]:
    """A bare pass and a whole fit, finding the readouts included: medians of rounds in turn."""
    bare(uq, batches)
    rounds = [
        {
            "bare": seconds(lambda: bare(uq, batches)),
            "fit": seconds(lambda: uq.fit(batches, sample_weight=loss_weight, progress=False)),
        }
        for _ in range(ROUNDS)
    ]
    middle = {name: median(one[name] for one in rounds) for name in ("bare", "fit")}
    count = sum(len(batch["counts"]) for batch in batches)
    return {**middle, "ratio": median(o["fit"] / o["bare"] for o in rounds), "molecules": count}


def prediction_cost(uq: rg.LastLayerRigidity, data: Environments) -> dict[str, float]:
    """Bare predictions of all molecules, and predictions with error bars, in turn."""
    spent = {"bare": 0.0, "bars": 0.0}
    for rows in torch.arange(len(data)).split(LIST):
        batches = list(data.picked(rows).batches(PREDICT_BATCH))
        if not int(rows[0]):
            bare(uq, batches)
            uq.predict(batches, progress=False)
        for name, work in (("bare", bare), ("bars", with_bars)):
            spent[name] += seconds(lambda work=work, batches=batches: work(uq, batches))
    return spent


@torch.no_grad()
def bare(uq: rg.LastLayerRigidity, batches: Sequence[Batch]) -> None:
    """Predictions alone, by the model as it is."""
    torch.cat([energies(uq.model, batch) for batch in batches])


def with_bars(uq: rg.LastLayerRigidity, batches: Sequence[Batch]) -> None:
    """Predictions with error bars."""
    _ = uq.predict(batches, progress=False).std


def seconds(work: Callable[[], Any]) -> float:
    """Of one call, on a GPU until all its kernels are done."""
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()
