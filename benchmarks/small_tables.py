"""Error bars of small tables: coverage, CRPS beside one constant bar, and the reported gain.

Every draw makes a table of 100, 300 or 1,000 rows, trains a model on most of them and calibrates
it on the others, as `RigidityRegressor` and `rigidities tabular` do, and judges it on 1,000 fresh
rows. The constant bar is that of the calibration: the root mean square error of its rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import product
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rigidities as rg
from benchmarks.frame.ranks import pooled
from benchmarks.frame.results import Row, at_most, for_information, not_run, within
from rigidities.calibration.report import CalibrationReport

LEVEL = 0.9
FRESH = 1_000
"""Rows that a model is judged on."""
DRAWS = 20
SIZES = (100, 300, 1_000)
COVERAGE_BOUNDS = (0.86, 0.94)
"""Coverage of 90 % intervals, averaged over draws."""
CRPS_LIMIT = 1.03
"""CRPS over that of a constant bar, averaged over draws."""
Table = tuple[np.ndarray, np.ndarray]
"""Inputs (N, 5) and targets (N,)."""
Bars = tuple[rg.Prediction, CalibrationReport]
"""Predictions of fresh rows, and the report of the calibration."""


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

    rows = tensors(table)
    count = len(table[1])
    valid_rows = max(2, round(0.15 * count))
    valid = part_of(rows, 0, valid_rows)
    train = part_of(rows, 2 * valid_rows, count)  # the rows between are the command's test rows
    with mock.patch.object(learners, "CANDIDATES", learners.CANDIDATES[:2]):
        _, module = learners.boosted(train, [0] * 5, seed)
    return last_layer_bars(module, train, valid, x)


def network(table: Table, x: np.ndarray, seed: int) -> Bars:
    """A network of 50 units in torch, whose last fifth of the rows calibrates."""
    rows = tensors(table)
    count = len(table[1])
    cut = round(0.8 * count)
    train = part_of(rows, 0, cut)
    valid = part_of(rows, cut, count)
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
    return last_layer_bars(model, train, valid, x)


def tensors(table: Table) -> tuple[Tensor, Tensor]:
    """Inputs (N, 5) and targets (N, 1)."""
    x, y = table
    return torch.from_numpy(x), torch.from_numpy(y.reshape(-1, 1))


def part_of(rows: tuple[Tensor, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Some of the rows, inputs and targets."""
    x, y = rows
    return x[start:stop], y[start:stop]


def last_layer_bars(
    model: torch.nn.Module,
    train: tuple[Tensor, Tensor],
    valid: tuple[Tensor, Tensor],
    x: np.ndarray,
) -> Bars:
    """A module fitted and calibrated by `LastLayerRigidity`."""
    uq = rg.LastLayerRigidity(model, progress=False).fit(train)
    report = uq.calibrate(valid).calibration_report
    assert report is not None
    return uq.predict(torch.from_numpy(x)), report


LEARNERS: dict[str, Callable[[Table, np.ndarray, int], Bars]] = {
    "boosted trees": boosted,
    "random forest": forest,
    "tabular": tabular,
    "net": network,
}


def scored(learner: str, target: str, size: int, seed: int) -> dict[str, Any]:
    """The scores of one draw of one cell of the table, in one thread."""
    torch.set_num_threads(1)
    table, (x, y) = drawn(target, size, seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of small tables
            prediction, report = LEARNERS[learner](table, x, seed)
    except ModuleNotFoundError as missing:
        return {"missing": missing.name}
    return scores(prediction, torch.from_numpy(y)[:, None], report)


def scores(p: rg.Prediction, y: Tensor, report: CalibrationReport) -> dict[str, Any]:
    """Of the bars and of the calibration's constant bar, on fresh rows."""
    variance = report.constant.square().expand_as(p.mean).to(p.mean)
    constant = rg.Prediction(p.mean, 0 * variance, variance, variance)
    low, high = p.interval(LEVEL)
    return {
        "coverage": float(((y >= low) & (y <= high)).double().mean()),
        "ratio": float(p.crps(y).mean() / constant.crps(y).mean()),
        "said": report.gain,
        "true": float((p.log_prob(y) - constant.log_prob(y)).mean()),
        "warned": bool(report.useless),
        "steps": report.steps,
    }


def run(*, quick: bool = False) -> list[Row]:
    """Every learner, target and size; draws beside each other where there are cores for it."""
    draws, sizes, targets = (1, (60,), ["linear"]) if quick else (DRAWS, SIZES, list(TARGETS))
    cells = list(product(LEARNERS, targets, sizes))
    calls = [(*cell, seed) for cell in cells for seed in range(draws)]
    answers = pooled(scored, calls, threads=1, quick=quick)
    table = []
    for i, (learner, target, size) in enumerate(cells):
        of_cell = answers[i * draws : (i + 1) * draws]
        table += cell_rows(f"{learner}, {target}, {size:,} rows", of_cell)
    return table


def cell_rows(name: str, draws: list[dict[str, Any]]) -> list[Row]:
    """Means over the draws of one learner, target and size."""
    if "missing" in draws[0]:
        return [not_run(name, f"{draws[0]['missing']} is not installed")]
    coverages = [draw["coverage"] for draw in draws]
    ratios = [draw["ratio"] for draw in draws]
    reported_gains = [draw["said"] for draw in draws]
    true_gains = [draw["true"] for draw in draws]
    error = 0.0
    if len(draws) > 1:
        error = stdev(coverages) / math.sqrt(len(draws))
    return [
        within(
            f"{name}: 90 % intervals cover",
            fmean(coverages),
            COVERAGE_BOUNDS,
            each=coverages,
            error=error,
        ),
        at_most(
            f"{name}: CRPS over that of one constant bar",
            fmean(ratios),
            CRPS_LIMIT,
            note=cell_note(draws),
            each=ratios,
            said=reported_gains,
            true=true_gains,
            steps=[draw["steps"] for draw in draws],
        ),
        for_information(
            f"{name}: gain said minus gain on fresh rows",
            fmean(reported_gains) - fmean(true_gains),
        ),
    ]


def cell_note(draws: list[dict[str, Any]]) -> str:
    """The mean gains, how often the bars were called useless, and how often they follow inputs."""
    reported = fmean(draw["said"] for draw in draws)
    true = fmean(draw["true"] for draw in draws)
    warned = fmean(draw["warned"] for draw in draws)
    following = fmean(any(draw["steps"]) for draw in draws)
    return (
        f"gain said {reported:+.3f}, on fresh rows {true:+.3f}; said not to be shown better in "
        f"{warned:.0%} of draws; follows the inputs in {following:.0%} of them"
    )
