"""What the error bars of molecules cost beside bare predictions: seconds, in one run.

The weights do not matter for it: the network is not trained. Batches are made before the clock
starts; bare passes and work with error bars take turns.
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
"""Molecules of a batch of the fit."""

PREDICT_BATCH = 512
"""Molecules of a batch of predictions."""

LIST = 2048
"""Molecules whose batches are made before the clock starts."""

ROUNDS = 5
"""How often a bare pass and a fit are timed."""


def measured(*, seed: int, train: int, valid: int, molecules: int | None) -> dict[str, Any]:
    """Seconds of the fit and of predictions of all test molecules, beside bare passes.

    Args:
        seed: The seed of the split and of the weights.
        train: Molecules of the fit.
        valid: Molecules of the calibration.
        molecules: How many molecules are drawn of the set; None for all.
    """
    with samples.drawn(0, seed, train=train, valid=valid, molecules=molecules) as data:
        train_molecules = data.environments(data.train)
        network = bpnn.drawn(len(SPECIES), train_molecules.x.shape[1], seed)
        network.standardise(train_molecules.x.cpu())
        batches = list(train_molecules.batches(FIT_BATCH))
        del train_molecules  # the batches hold copies
        uq = rg.LastLayerRigidity(network.to(device()), progress=False)
        fit = fit_cost(uq, batches)
        del batches

        valid_molecules = data.environments(data.valid[:LIST])
        uq.calibrate(valid_molecules.batches(PREDICT_BATCH), method="paper")
        bare_seconds = 0.0
        bars_seconds = 0.0
        for _, molecules_of_part in data.test_parts():
            cost = prediction_cost(uq, molecules_of_part)
            bare_seconds += cost["bare"]
            bars_seconds += cost["bars"]
        return {
            "fit": fit,
            "predict": {
                "bare": bare_seconds,
                "bars": bars_seconds,
                "ratio": bars_seconds / bare_seconds,
                "molecules": len(data.test),
            },
            "threads": torch.get_num_threads(),
            "machine": machine(),
        }


def fit_cost(uq: rg.LastLayerRigidity, batches: Sequence[Batch]) -> dict[str, float]:
    """A bare pass and a whole fit, finding the readouts included: medians of rounds in turn."""
    bare(uq, batches)  # the first pass takes longer
    bare_seconds = []
    fit_seconds = []
    for _ in range(ROUNDS):
        bare_seconds.append(seconds(lambda: bare(uq, batches)))
        fit_seconds.append(seconds(lambda: uq.fit(batches, sample_weight=loss_weight)))
    ratios = [ours / plain for ours, plain in zip(fit_seconds, bare_seconds, strict=True)]
    return {
        "bare": median(bare_seconds),
        "fit": median(fit_seconds),
        "ratio": median(ratios),
        "molecules": sum(len(batch["counts"]) for batch in batches),
    }


def prediction_cost(uq: rg.LastLayerRigidity, data: Environments) -> dict[str, float]:
    """Seconds of "bare" predictions of all molecules, and of those with error "bars", in turn."""
    bare_seconds = 0.0
    bars_seconds = 0.0
    for rows in torch.arange(len(data)).split(LIST):
        batches = list(data.picked(rows).batches(PREDICT_BATCH))
        is_first = int(rows[0]) == 0
        if is_first:  # first calls take longer
            bare(uq, batches)
            uq.predict(batches)
        bare_seconds += seconds(lambda batches=batches: bare(uq, batches))
        bars_seconds += seconds(lambda batches=batches: with_bars(uq, batches))
    return {"bare": bare_seconds, "bars": bars_seconds}


@torch.no_grad()
def bare(uq: rg.LastLayerRigidity, batches: Sequence[Batch]) -> None:
    """Predictions alone, by the model as it is."""
    torch.cat([energies(uq.model, batch) for batch in batches])


def with_bars(uq: rg.LastLayerRigidity, batches: Sequence[Batch]) -> None:
    """Predictions with error bars."""
    _ = uq.predict(batches).std


def seconds(work: Callable[[], Any]) -> float:
    """Seconds of one call, on a GPU until all its kernels are done."""
    _wait_for_gpu()
    start = time.perf_counter()
    work()
    _wait_for_gpu()
    return time.perf_counter() - start


def _wait_for_gpu() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()
