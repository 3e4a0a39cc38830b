"""One net: trained on a split, calibrated in several ways, judged on the test rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from experiments.judging import error_bars, scores
from experiments.judging.floors import floors
from experiments.studies.weather.choice import best_bins
from experiments.studies.weather.nets import PROTOCOL, drawn
from experiments.studies.weather.samples import Samples
from experiments.studies.weather.samples import drawn as samples_drawn
from experiments.training import loop
from rigidities import metrics

SHOWN = ("paper", "best", "best_bins")
"""Calibrations whose rows and bins the figures show."""


def judged(
    *, split: int, seed: int, standardised: bool, epochs: int, bin_size: int, rows: int | None
) -> dict[str, Any]:
    """Train one net and judge its error bars; all in degrees Celsius.

    Args:
        split: which of the seed's splits; its first weights and batches follow it too.
        seed: of the whole.
        standardised: whether the net sees standardised targets.
        epochs: of the training.
        bin_size: rows of a bin of the scores.
        rows: at most so many of each part; None for all.

    Returns:
        "calibrations", each with its scores, what it chose, and the numbers of the figures;
        "stations"; the epoch of the best weights; the numbers of inputs and rows.
    """
    samples = samples_drawn(split, seed, standardised=standardised, rows=rows)
    own = 1000 * seed + split
    net = drawn(samples.train[0].shape[1], len(samples.stations), own)
    protocol = replace(PROTOCOL, epochs=epochs)
    trained = loop.fitted(net, samples.train, samples.valid, protocol, own, what=f"net {split}")
    uq = rg.LastLayerRigidity(trained.net).fit(samples.train, progress=False)
    ways = {
        "paper": error_bars.BINS,
        "nll": error_bars.PAPER,
        "best": error_bars.best(uq, samples.valid),
        "best_bins": best_bins(uq, samples.valid, bin_size),
    }
    constant = _constant(uq, samples)
    bars = {name: _bars(uq, samples, how) for name, how in ways.items()}
    target = _degrees(samples, samples.test[-1])
    return {
        "calibrations": {
            name: _scored(one, target, constant, bin_size, name) for name, one in bars.items()
        },
        "stations": {name: _per_station(bars[name], target, samples) for name in SHOWN},
        "epoch": trained.epoch,
        "inputs": samples.train[0].shape[1],
        "rows": {name: len(getattr(samples, name)[-1]) for name in ("train", "valid", "test")},
    }


def _bars(
    uq: rg.LastLayerRigidity, samples: Samples, how: error_bars.Calibration
) -> error_bars.Bars:
    """Of the test rows; ridge and scale stay in the net's unit."""
    bars = error_bars.bars(uq, samples.valid, samples.test[:-1], how)
    mean, std = samples.level + samples.spread * bars.mean, samples.spread * bars.std
    noise = samples.spread**2 * float(bars.chosen["noise_variance"])
    return error_bars.Bars(mean, std, {**bars.chosen, "noise_variance": noise})


def _constant(uq: rg.LastLayerRigidity, samples: Samples) -> float:
    """The constant bar, from the validation rows."""
    *inputs, target = samples.valid
    with torch.no_grad():
        mean = uq.model(*inputs)
    return samples.spread * error_bars.constant(mean, target)


def _scored(
    bars: error_bars.Bars, target: Tensor, constant: float, bin_size: int, name: str
) -> dict[str, Any]:
    found = scores.beside_constant(bars.mean, bars.std, target, constant, bin_size)
    found["chosen"] = bars.chosen
    flat = torch.full_like(bars.std, constant)
    for one, std in ((found, bars.std), (found["constant"], flat)):
        one["scores"]["floor"] = floors(target - bars.mean, std, bin_size, seed=0)["shuffled"]
    if name in SHOWN:
        found["bins"] = scores.bins(bars.mean, bars.std, target, bin_size)
        found["points"] = scores.points(bars.mean, bars.std, target)
    return found


def _per_station(bars: error_bars.Bars, target: Tensor, samples: Samples) -> dict[str, Any]:
    """Rows, root mean square bar and root mean square error of each station."""
    station = samples.test[1]
    found = {}
    for place, name in enumerate(samples.stations):
        here = station == place
        if int(here.sum()):
            found[name] = {
                "rows": int(here.sum()),
                "bar": float(bars.std[here].square().mean().sqrt()),
                "rmse": metrics.rmse(bars.mean[here], target[here]),
            }
    return found


def _degrees(samples: Samples, target: Tensor) -> Tensor:
    return samples.level + samples.spread * target.double().flatten()
