"""Splits of the weather records, ready for a net."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.data import weather
from experiments.training.loop import Rows


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
    spread, level = _spread_and_level(y[train]) if standardised else (1.0, 0.0)
    x, y = ((x - mean_x) / spread_x).float(), ((y - level) / spread).float()
    parts = ((x[part], station[part], y[part]) for part in (train, valid, test))
    return Samples(*parts, records.station_names, level, spread)


def _spread_and_level(y: Tensor) -> tuple[float, float]:
    spread, level = torch.std_mean(y)
    return float(spread), float(level)
