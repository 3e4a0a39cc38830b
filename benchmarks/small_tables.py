"""Error bars of small tables: what they hold, their CRPS beside one constant bar, the gain said.

Every draw makes a table of 100, 300 or 1,000 rows, trains a model on most of them and calibrates it
on the rest, as `RigidityRegressor` and `rigidities tabular` do, and judges it on 1,000 fresh rows.
The constant bar is that of the calibration: the root mean square error of the rows that calibrated.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rigidities as rg
from benchmarks.frame.results import Row, at_least, at_most, for_information, not_run
from rigidities.calibration.report import CalibrationReport

LEVEL, FRESH, DRAWS, SIZES = 0.9, 1_000, 20, (100, 300, 1_000)
HELD = (0.86, 0.94)
"""What 90 % intervals must hold, averaged over draws."""
WORSE = 1.03
"""CRPS over that of a constant bar, at most, averaged over draws."""
Table = tuple[np.ndarray, np.ndarray]
Bars = tuple[rg.Prediction, CalibrationReport]


def linear(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A plane and noise of one size."""
    return x @ np.array([3.0, -2.0, 1.0, 0.0, 0.0]) + random.standard_normal(len(x))


def friedman(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Friedman's first function, with noise of one size."""
    smooth = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    return smooth + 10 * x[:, 3] + 5 * x[:, 4] + random.standard_normal(len(x))


def noise_only(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Nothing to learn."""
    return random.standard_normal(len(x))


def heteroscedastic(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Noise that grows tenfold with one input."""
    return np.sin(3 * x[:, 0]) + 0.1 * 10 ** x[:, 1] * random.standard_normal(len(x))


TARGETS = {
    "linear": linear,
    "Friedman": friedman,
    "noise only": noise_only,
    "heteroscedastic": heteroscedastic,
}


def drawn(target: str, size: int, seed: int) -> tuple[Table, Table]:
    """A table of that size and fresh rows, with five uniform inputs."""
    random = np.random.default_rng([seed, size, list(TARGETS).index(target)])
    x = random.random((size + FRESH, 5))
    y = TARGETS[target](x, random)
    return (x[:size], y[:size]), (x[size:], y[size:])


def boosted(table: Table, x: np.ndarray, seed: int) -> Bars:
    """scikit-learn's histogram booster as it comes."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    return wrapped(HistGradientBoostingRegressor(random_state=seed), table, x, seed)


def forest(table: Table, x: np.ndarray, seed: int) -> Bars:
    """A random forest of full trees."""
    from sklearn.ensemble import RandomForestRegressor

    return wrapped(RandomForestRegressor(20, random_state=seed), table, x, seed)


def wrapped(estimator: Any, table: Table, x: np.ndarray, seed: int) -> Bars:
    """By `RigidityRegressor`, a fifth of whose rows calibrate."""
    from rigidities.sklearn import RigidityRegressor

    reg = RigidityRegressor(estimator, random_state=seed).fit(*table)
    return reg.prediction(x), reg.report_


def tabular(table: Table, x: np.ndarray, seed: int) -> Bars:
    """The default learner of `rigidities tabular`, tuned by two of its settings."""
    from unittest import mock

    from rigidities.cli import learners

    rows = tuple(torch.from_numpy(column.reshape(len(column), -1)) for column in table)
    held = max(2, round(0.15 * len(table[1])))  # as many are the command's test rows
    valid, train = (tuple(t[part] for t in rows) for part in (slice(held), slice(2 * held, None)))
    with mock.patch.object(learners, "CANDIDATES", learners.CANDIDATES[:2]):
        _, module = learners.boosted(train, [0] * 5, seed)
    uq = rg.LastLayerRigidity(module).fit(train, progress=False)
    report = uq.calibrate(valid, progress=False)
    return uq.predict(torch.from_numpy(x), progress=False), report


def net(table: Table, x: np.ndarray, seed: int) -> Bars:
    """A net of 50 units in torch, whose last fifth of the rows calibrates."""
    rows = tuple(torch.from_numpy(column.reshape(len(column), -1)) for column in table)
    cut = round(0.8 * len(table[1]))
    train, valid = (tuple(t[part] for t in rows) for part in (slice(cut), slice(cut, None)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1)
        ).double()
    optimiser = torch.optim.Adam(model.parameters(), 0.01, weight_decay=1e-3)
    for _ in range(500):
        optimiser.zero_grad()
        (model(train[0]) - train[1]).square().mean().backward()
        optimiser.step()
    uq = rg.LastLayerRigidity(model).fit(train, progress=False)
    report = uq.calibrate(valid, progress=False)
    return uq.predict(torch.from_numpy(x), progress=False), report


LEARNERS: dict[str, Callable[[Table, np.ndarray, int], Bars]] = {
    "boosted trees": boosted,
    "random forest": forest,
    "tabular": tabular,
    "net": net,
}


def scored(learner: str, target: str, size: int, seed: int) -> dict[str, Any]:
    """One draw of one cell, in one thread."""
    torch.set_num_threads(1)
    table, (x, y) = drawn(target, size, seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what small tables are told is not the point here
            p, report = LEARNERS[learner](table, x, seed)
    except ModuleNotFoundError as missing:
        return {"missing": missing.name}
    truth = torch.from_numpy(y)[:, None]
    return scores(p, truth, report)


def scores(p: rg.Prediction, y: Tensor, report: CalibrationReport) -> dict[str, Any]:
    """Of the bars and of the calibration's constant bar, on fresh rows."""
    variance = report.constant.square().expand_as(p.mean).to(p.mean)
    plain = rg.Prediction(p.mean, 0 * variance, variance, variance)
    low, high = p.interval(LEVEL)
    return {
        "coverage": float(((y >= low) & (y <= high)).double().mean()),
        "ratio": float(p.crps(y).mean() / plain.crps(y).mean()),
        "said": report.gain,
        "true": float((p.log_prob(y) - plain.log_prob(y)).mean()),
        "warned": bool(report.useless),
        "rung": report.rung,
    }


def run(*, quick: bool = False) -> list[Row]:
    """Every learner, target and size; draws beside each other where there are cores for it."""
    draws, sizes, targets = (1, (60,), ["linear"]) if quick else (DRAWS, SIZES, list(TARGETS))
    cells = list(product(LEARNERS, targets, sizes))
    work = [(*cell, seed) for cell in cells for seed in range(draws)]
    if quick:
        found = [scored(*one) for one in work]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context) as pool:
            found = list(pool.map(scored, *zip(*work, strict=True), chunksize=1))
    kept = {cell: found[i * draws : (i + 1) * draws] for i, cell in enumerate(cells)}
    return [row for cell, each in kept.items() for row in cell_rows(*cell, each)]


def cell_rows(learner: str, target: str, size: int, found: list[dict[str, Any]]) -> list[Row]:
    """Means over the draws of one cell."""
    name = f"{learner}, {target}, {size:,} rows"
    if "missing" in found[0]:
        return [not_run(name, f"{found[0]['missing']} is not installed")]
    rungs = [one["rung"] for one in found]
    counts = ", ".join(f"{rung} {rungs.count(rung)}" for rung in dict.fromkeys(rungs))
    held = [one["coverage"] for one in found]
    ratios = [one["ratio"] for one in found]
    said, true = ([one[key] for one in found] for key in ("said", "true"))
    warned = fmean(one["warned"] for one in found)
    gains = f"gain said {fmean(said):+.3f}, on fresh rows {fmean(true):+.3f}; "
    note = f"{gains}said not to be shown better in {warned:.0%} of draws; taken: {counts}"
    error = stdev(held) / math.sqrt(len(held)) if len(held) > 1 else 0.0
    return [
        at_least(f"{name}: 90 % intervals hold", fmean(held), HELD[0], each=held, error=error),
        at_most(f"{name}: 90 % intervals hold", fmean(held), HELD[1]),
        at_most(
            f"{name}: CRPS over that of one constant bar",
            fmean(ratios),
            WORSE,
            note=note,
            each=ratios,
            said=said,
            true=true,
            rungs=rungs,
        ),
        for_information(f"{name}: gain said minus gain on fresh rows", fmean(said) - fmean(true)),
    ]
