"""One net: trained on a split, calibrated in several ways, judged on the test rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.data import weather
from experiments.judging import error_bars, scores
from experiments.judging.error_bars import BINS, PAPER, Calibration, held_out
from experiments.judging.floors import floors
from experiments.training import loop
from experiments.training.loop import Rows
from experiments.training.protocol import FORECASTS, Protocol
from experiments.training.stack import ACTIVATIONS
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
    samples = drawn(split, seed, standardised=standardised, rows=rows)
    own = 1000 * seed + split
    net = forecaster(samples.train[0].shape[1], len(samples.stations), own)
    protocol = replace(FORECASTS, epochs=epochs)
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
    target = samples.degrees(samples.test[-1])
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
    rows = scores.Rows(bars.mean, bars.std, target)

    def more(std: Tensor) -> dict[str, float]:
        return {"floor": floors(-rows.error, std, bin_size, seed=0)["shuffled"]}

    found = scores.beside_constant(*rows, constant, bin_size, more) | {"chosen": bars.chosen}
    return found | scores.pictured(*rows, bin_size) if name in SHOWN else found


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


@dataclass(frozen=True)
class Samples:
    """One split; every part is (records (n, d), station (n,), target (n, 1)).

    The records have mean 0 and standard deviation 1 over the training rows. A target t of the net
    is a temperature `level` + `spread` t.

    Attributes:
        train: training rows.
        valid: validation rows.
        test: test rows.
        stations: their names.
        level: degrees Celsius; zero for raw targets.
        spread: degrees Celsius; one for raw targets.
    """

    train: Rows
    valid: Rows
    test: Rows
    stations: tuple[str, ...]
    level: float
    spread: float

    def degrees(self, target: Tensor) -> Tensor:
        """The temperatures that targets of the net mean, (n,) in float64."""
        return self.level + self.spread * target.double().flatten()


def drawn(split: int, seed: int, *, standardised: bool, rows: int | None = None) -> Samples:
    """A random 40/30/30 split.

    Args:
        split: which of the seed's splits.
        seed: of the splits.
        standardised: whether the net sees targets of mean 0 and standard deviation 1, or degrees.
        rows: at most so many of each part; all by default.
    """
    records = weather.read()
    places = records.random(split, seed)
    train, valid, test = (
        torch.as_tensor(p[:rows]) for p in (places.train, places.valid, places.test)
    )
    x, y = torch.as_tensor(records.continuous), torch.as_tensor(records.y)[:, None]
    station = torch.as_tensor(records.station)
    spread_x, mean_x = torch.std_mean(x[train], dim=0)
    spread, level = map(float, torch.std_mean(y[train])) if standardised else (1.0, 0.0)
    x, y = ((x - mean_x) / spread_x).float(), ((y - level) / spread).float()
    parts = ((x[part], station[part], y[part]) for part in (train, valid, test))
    return Samples(*parts, records.station_names, level, spread)


EMBEDDING = 256
"""Numbers that describe a station."""


class Forecaster(nn.Module):
    """Two inputs: the continuous records (N, d) and the station's place in the list (N,)."""

    def __init__(self, inputs: int, stations: int, protocol: Protocol = FORECASTS) -> None:
        super().__init__()
        self.stations = nn.Embedding(stations, EMBEDDING)
        width, layers = inputs + EMBEDDING, []
        for hidden in protocol.hidden:
            layers += [nn.Linear(width, hidden), ACTIVATIONS[protocol.activation].module()]
            width = hidden
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1, bias=protocol.last_bias)

    def forward(self, continuous: Tensor, station: Tensor) -> Tensor:
        """(N, 1)."""
        inputs = torch.cat([continuous, self.stations(station)], dim=-1)
        output: Tensor = self.head(self.hidden(inputs))
        return output


def forecaster(inputs: int, stations: int, seed: int, protocol: Protocol = FORECASTS) -> Forecaster:
    """Torch's default first weights, from a seed of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Forecaster(inputs, stations, protocol)


CANDIDATES = (BINS, Calibration("bins", "constant"), PAPER)
"""The paper's two, and its bins with a constant noise."""

KEPT = 0.5
"""Share of the gain in likelihood over a constant bar, as the paper's form has it, that the choice
must keep: a constant bar scores well in bins and tells nothing."""


def best_bins(
    uq: rg.LastLayerRigidity,
    valid: Rows,
    bin_size: int,
    candidates: Sequence[Calibration] = CANDIDATES,
) -> Calibration:
    """The best by the mean distance of log MSE from log variance in bins.

    Every validation row gets a bar by the numbers that the other folds of the rows choose; the
    bars of a candidate are then judged together.

    Args:
        uq: fitted.
        valid: inputs and target.
        bin_size: of the judge.
        candidates: to choose from, the paper's bins among them.
    """
    target = valid[-1].double().flatten()
    bars = {how: held_out(uq, valid, how) for how in candidates}
    likelihood = {how: metrics.nll(*bar, target) for how, bar in bars.items()}
    mean, std = bars[BINS]
    constant = metrics.nll(mean, torch.full_like(std, metrics.rmse(mean, target)), target)
    least = constant - KEPT * (constant - likelihood[BINS])
    telling = [how for how in bars if how == BINS or likelihood[how] <= least]
    return min(telling, key=lambda how: metrics.binned_log_ratio(*bars[how], target, bin_size))
