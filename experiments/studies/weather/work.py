"""One network: trained on a split, calibrated in several ways, judged on the test rows.

The way of the data: `drawn` reads the records and makes a `WeatherSplit`; a `Forecaster` is trained
on it; every calibration gives the test rows error bars, which `_bars` turns into degrees Celsius;
`_scored` and `_per_station` judge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.data import weather
from experiments.judging import error_bars, scores
from experiments.judging.error_bars import BINS, PAPER, held_out
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
    """Train one network and judge its error bars; all in degrees Celsius.

    Args:
        split: which of the seed's splits. First weights and batches follow it too.
        seed: the seed of the whole.
        standardised: whether the network sees standardised targets.
        epochs: the epochs of the training.
        bin_size: the rows of a bin of the scores.
        rows: the largest number of rows of each part; None for all.

    Returns:
        "calibrations", each with its scores, what it chose, and the numbers of the figures;
        "stations"; the epoch of the best weights; the numbers of inputs and rows.
    """
    samples = drawn(split, seed, standardised=standardised, rows=rows)
    inputs = samples.train[0].shape[1]
    network_seed = 1000 * seed + split
    network = forecaster(inputs, len(samples.stations), network_seed)
    protocol = replace(FORECASTS, epochs=epochs)
    training = loop.fitted(
        network, samples.train, samples.valid, protocol, network_seed, what=f"net {split}"
    )
    uq = rg.LastLayerRigidity(training.net, progress=False).fit(samples.train)
    calibrations = {
        "paper": error_bars.BINS,
        "nll": error_bars.PAPER,
        "best": error_bars.best(uq, samples.valid),
        "best_bins": best_bins(uq, samples.valid, bin_size),
    }
    constant = _constant(uq, samples)
    bars = {name: _bars(uq, samples, method) for name, method in calibrations.items()}
    target = samples.degrees(samples.test[-1])
    return {
        "calibrations": {
            name: _scored(of_calibration, target, constant, bin_size, name)
            for name, of_calibration in bars.items()
        },
        "stations": {name: _per_station(bars[name], target, samples) for name in SHOWN},
        "epoch": training.epoch,
        "inputs": inputs,
        "rows": {
            "train": len(samples.train[-1]),
            "valid": len(samples.valid[-1]),
            "test": len(samples.test[-1]),
        },
    }


# --- error bars in degrees -----------------------------------------------------------------------


def _bars(uq: rg.LastLayerRigidity, samples: WeatherSplit, method: rg.Paper) -> error_bars.Bars:
    """The bars of the test rows in degrees; ridge and scale stay in the network's unit."""
    bars = error_bars.bars(uq, samples.valid, samples.test[:-1], method)
    noise_variance = samples.spread**2 * float(bars.chosen["noise_variance"])
    return error_bars.Bars(
        mean=samples.level + samples.spread * bars.mean,
        std=samples.spread * bars.std,
        chosen={**bars.chosen, "noise_variance": noise_variance},
    )


def _constant(uq: rg.LastLayerRigidity, samples: WeatherSplit) -> float:
    """The constant bar in degrees, from the validation rows."""
    *inputs, target = samples.valid
    with torch.no_grad():
        mean = uq.model(*inputs)
    return samples.spread * error_bars.constant(mean, target)


def _scored(
    bars: error_bars.Bars, target: Tensor, constant: float, bin_size: int, name: str
) -> dict[str, Any]:
    """The scores of a calibration beside a constant bar, and the numbers of its figure.

    Args:
        bars: the bars of the test rows.
        target: their temperatures, (N,).
        constant: the constant bar.
        bin_size: the rows of a bin.
        name: the name of the calibration; those of `SHOWN` have a figure.
    """

    def floor_score(std: Tensor) -> dict[str, float]:
        """What bars would score if nothing were wrong with them."""
        return {"floor": floors(target - bars.mean, std, bin_size, seed=0)["shuffled"]}

    block = scores.beside_constant(
        bars.mean, bars.std, target, constant, bin_size, more=floor_score
    )
    block["chosen"] = bars.chosen
    if name in SHOWN:
        block.update(scores.pictured(bars.mean, bars.std, target, bin_size))
    return block


def _per_station(bars: error_bars.Bars, target: Tensor, samples: WeatherSplit) -> dict[str, Any]:
    """Rows, root mean square bar and root mean square error of each station with test rows."""
    station = samples.test[1]
    by_station = {}
    for place, name in enumerate(samples.stations):
        here = station == place
        count = int(here.sum())
        if count:
            by_station[name] = {
                "rows": count,
                "bar": float(bars.std[here].square().mean().sqrt()),
                "rmse": metrics.rmse(bars.mean[here], target[here]),
            }
    return by_station


# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeatherSplit:
    """One split; every part is (records (n, d), station (n,), target (n, 1)).

    The records have mean 0 and standard deviation 1 over the training rows. A target t of the
    network is a temperature `level` + `spread` t.

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
        """The temperatures that targets of the network mean, (n,) in float64."""
        return self.level + self.spread * target.double().flatten()


def drawn(split: int, seed: int, *, standardised: bool, rows: int | None = None) -> WeatherSplit:
    """Draw a random 40/30/30 split.

    Args:
        split: which of the seed's splits.
        seed: the seed of the splits.
        standardised: whether the network sees targets of mean 0 and standard deviation 1, or
            degrees.
        rows: the largest number of rows of each part; all by default.
    """
    records = weather.read()
    places = records.random(split, seed)
    train = torch.as_tensor(places.train[:rows])
    valid = torch.as_tensor(places.valid[:rows])
    test = torch.as_tensor(places.test[:rows])
    x = torch.as_tensor(records.continuous)
    y = torch.as_tensor(records.y)[:, None]
    station = torch.as_tensor(records.station)

    # All parts are shifted and scaled by the training rows.
    x_spread, x_mean = torch.std_mean(x[train], dim=0)
    x = ((x - x_mean) / x_spread).float()
    level = 0.0
    spread = 1.0
    if standardised:
        y_spread, y_mean = torch.std_mean(y[train])
        level = float(y_mean)
        spread = float(y_spread)
    y = ((y - level) / spread).float()
    return WeatherSplit(
        train=(x[train], station[train], y[train]),
        valid=(x[valid], station[valid], y[valid]),
        test=(x[test], station[test], y[test]),
        stations=records.station_names,
        level=level,
        spread=spread,
    )


# --- the network ---------------------------------------------------------------------------------

EMBEDDING = 256
"""Numbers that describe a station."""


class Forecaster(nn.Module):
    """A network of two inputs: the continuous records (N, d) and the station's place (N,)."""

    def __init__(self, inputs: int, stations: int, protocol: Protocol = FORECASTS) -> None:
        super().__init__()
        self.stations = nn.Embedding(stations, EMBEDDING)
        width = inputs + EMBEDDING
        layers: list[nn.Module] = []
        for hidden in protocol.hidden:
            layers += [nn.Linear(width, hidden), ACTIVATIONS[protocol.activation].module()]
            width = hidden
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1, bias=protocol.last_bias)

    def forward(self, continuous: Tensor, station: Tensor) -> Tensor:
        """Predict (N, 1)."""
        inputs = torch.cat([continuous, self.stations(station)], dim=-1)
        output: Tensor = self.head(self.hidden(inputs))
        return output


def forecaster(inputs: int, stations: int, seed: int, protocol: Protocol = FORECASTS) -> Forecaster:
    """A network with torch's default first weights, from a seed of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Forecaster(inputs, stations, protocol)


# --- the best calibration by bins ----------------------------------------------------------------

CANDIDATES = (BINS, rg.Paper(criterion="bins", noise="constant"), PAPER)
"""The paper's two, and its bins with a constant noise."""

KEPT_GAIN = 0.5
"""Share of the gain in likelihood over a constant bar, as the paper's form has it, that the choice
must keep: a constant bar scores well in bins and tells nothing."""


def best_bins(
    uq: rg.LastLayerRigidity,
    valid: Rows,
    bin_size: int,
    candidates: Sequence[rg.Paper] = CANDIDATES,
) -> rg.Paper:
    """Choose a calibration by the mean distance of log MSE from log variance in bins.

    Every validation row gets a bar by the numbers that the other folds of the rows choose; the
    bars of a candidate are then judged together.

    Args:
        uq: a fitted rigidity.
        valid: inputs and target.
        bin_size: the rows of a bin by which to judge.
        candidates: to choose from, the paper's bins among them.
    """
    target = valid[-1].double().flatten()
    bars = {candidate: held_out(uq, valid, candidate) for candidate in candidates}
    nll = {candidate: metrics.nll(mean, std, target) for candidate, (mean, std) in bars.items()}
    mean, std = bars[BINS]
    constant_bar = torch.full_like(std, metrics.rmse(mean, target))
    constant_nll = metrics.nll(mean, constant_bar, target)
    # A candidate must keep a share of what the paper's bins gain over a constant bar.
    largest_nll = constant_nll - KEPT_GAIN * (constant_nll - nll[BINS])
    log_ratios = {}
    for candidate, (mean, std) in bars.items():
        if candidate == BINS or nll[candidate] <= largest_nll:
            log_ratios[candidate] = metrics.binned_log_ratio(mean, std, target, bin_size)
    return min(log_ratios, key=log_ratios.__getitem__)
