"""Error bars of tree ensembles: their price, against rivals, and what a rank leaves out.

Run as a module (``python -m benchmarks.trees rows trees leaves rank threads``) it trains boosted
trees on synthetic rows and prints the time and memory of their error bars.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import make_friedman1
from sklearn.ensemble import HistGradientBoostingRegressor as Boosted
from threadpoolctl import threadpool_limits

import rigidities as rg
from benchmarks.frame.apart import ROOT, measured_apart, peak_bytes
from benchmarks.frame.dense import rank_correlation
from benchmarks.frame.ranks import pooled
from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import clocked
from rigidities.sklearn import RigidityRegressor
from rigidities.trees import Forest

DATA = ROOT.parent / "shared" / "data"
NLL_LIMITS = {
    "california_housing": -0.25,
    "uci_concrete": -0.10,
    "uci_protein": -0.10,
    "uci_power": 0.0,
}
"""NLL minus that of a constant bar, by set."""
LEVEL = 0.9
PRICE_SECONDS, PRICE_TRAININGS = 1.0, 5.0
"""Seconds, and times its own training, that a booster with error bars may take."""
SIZE_LIMITS = {40_000: (30.0, 12.0), 500_000: (900.0, 12.0)}
"""Seconds and GiB of the error bars of a large ensemble, by rows."""
Scores = dict[str, Any]


class Split(NamedTuple):
    """Inputs and targets to train on, to calibrate on and to test on."""

    train: tuple[np.ndarray, np.ndarray]
    valid: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def run(*, quick: bool = False) -> list[Row]:
    """What wrapping costs, four real sets by five splits, two sizes, and what a rank leaves out."""
    table = []
    for count in [300] if quick else [1_500, 40_000]:
        table += price_rows(count)
    if quick:
        limits = {"uci_concrete": NLL_LIMITS["uci_concrete"]}
        table += set_rows(limits, splits=1, trees=10, quick=True)
        table += size_rows(1_000, trees=5, leaves=8, rank=16)
    else:
        table += set_rows(NLL_LIMITS, splits=5, trees=150, quick=False)
        table += size_rows(40_000, trees=100, leaves=31)
        table += size_rows(500_000, trees=300, leaves=64)
    return table + rank_rows(quick=quick)


def price_rows(count: int) -> list[Row]:
    """Seconds to train boosters of default settings and calibrate them, the best of three runs."""
    boosters: dict[str, Callable[[], Any]] = {"HistGradientBoosting": Boosted}
    table = []
    try:
        from lightgbm import LGBMRegressor

        boosters["LightGBM"] = lambda: LGBMRegressor(verbose=-1)
    except ModuleNotFoundError:
        table.append(not_run(f"LightGBM, {count:,} rows", "lightgbm is not installed"))
    x, y = make_friedman1(count, n_features=10, noise=1.0, random_state=0)

    def fastest(make: Callable[[], Any]) -> float:
        return min(clocked(lambda: make().fit(x, y)) for _ in range(3))

    for name, booster in boosters.items():
        training = fastest(booster)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few rows one constant bar may be all there is
            seconds = fastest(lambda booster=booster: RigidityRegressor(booster()))
        row = at_most(
            f"RigidityRegressor({name}()).fit, {count:,} rows",
            seconds,
            round(PRICE_SECONDS + PRICE_TRAININGS * training, 2),
            "s",
            note=f"training takes {training:.2f} s; the limit is 1 s and 5 times as long",
            training=training,
        )
        table.append(row)
    return table


def set_rows(limits: dict[str, float], *, splits: int, trees: int, quick: bool) -> list[Row]:
    """All methods on several splits of each set, in several processes."""
    present = [name for name in limits if (DATA / f"{name}.npz").exists()]
    calls = [
        (name, method, number, trees)
        for name in present
        for number in range(splits)
        for method in METHODS
    ]
    answers = pooled(scored, calls, threads=torch.get_num_threads(), quick=quick)
    by_call = dict(zip(calls, answers, strict=True))
    table = []
    for name, limit in limits.items():
        if name not in present:
            table.append(not_run(f"{name}: gain over a constant bar", f"{name}.npz is not there"))
            continue
        scores = {
            method: [by_call[name, method, number, trees] for number in range(splits)]
            for method in METHODS
        }
        table += judged_rows(name, limit, scores)
    return table


def scored(name: str, method: str, number: int, trees: int) -> Scores:
    """One method on one split."""
    split = split_of(DATA / f"{name}.npz", number)
    start = time.perf_counter()
    try:
        with threadpool_limits(torch.get_num_threads()):
            scores = METHODS[method](split, trees)
    except ModuleNotFoundError as missing:
        return {"missing": missing.name}
    return {**scores, "seconds": time.perf_counter() - start}


def judged_rows(name: str, limit: float, scores: dict[str, list[Scores]]) -> list[Row]:
    """Gain in NLL over a constant bar, and the scores of everything, over splits."""
    pairs = zip(scores["rigidity"], scores["constant bar"], strict=True)
    gains = [ours["nll"] - bar["nll"] for ours, bar in pairs]
    error = 0.0
    if len(gains) > 1:
        error = stdev(gains) / math.sqrt(len(gains))
    work = f"{name}: NLL minus that of a constant bar, {len(gains)} splits"
    table = [at_most(work, fmean(gains), limit, "nats", gains=gains, standard_error=error)]
    for method in scores:
        table.append(score_row(name, method, scores[method]))
    return table


def score_row(name: str, method: str, scores: list[Scores]) -> Row:
    """Mean scores of a method; the interval score leads, since all have one."""
    if "missing" in scores[0]:
        return not_run(f"{name}, {method}", f"{scores[0]['missing']} is not installed")
    means = {key: fmean(split_scores[key] for split_scores in scores) for key in scores[0]}
    others = [f"{key} {means[key]:.3g}" for key in means if key != "interval score"]
    return for_information(
        f"{name}, {method}: interval score",
        means["interval score"],
        note=", ".join(others),
        **means,
    )


def split_of(path: Path, seed: int) -> Split:
    """70 % to train on, 15 % to calibrate on, 15 % to test on."""
    with np.load(path) as data:
        x = data["X"].astype(float)
        y = data["y"].astype(float)
    order = np.random.default_rng(seed).permutation(len(y))
    train, valid, test = np.split(order, [int(0.7 * len(y)), int(0.85 * len(y))])
    return Split(train=(x[train], y[train]), valid=(x[valid], y[valid]), test=(x[test], y[test]))


def boosted(split: Split, trees: int) -> Boosted:
    """The model that has the error bars."""
    return Boosted(max_iter=trees, early_stopping=False, random_state=0).fit(*split.train)


# --- methods: a split and a number of trees -> scores on the test rows ----------------------------


def rigidity(split: Split, trees: int) -> Scores:
    """The default calibration on leaf indicators."""
    forest = Forest(boosted(split, trees), split.train[0])
    uq = rg.LastLayerRigidity(forest.module).fit(forest_rows(forest, split.train))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the concrete set has rows more than once
        uq.calibrate(forest_rows(forest, split.valid))
    x, y = forest_rows(forest, split.test)
    p = uq.predict(x)
    scores = prediction_scores(p, y)
    scores["rank correlation"] = rank_correlation(p.std[:, 0], (y - p.mean)[:, 0].abs())
    return scores


def forest_rows(
    forest: Forest, rows: tuple[np.ndarray, np.ndarray]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (N, 1) as the module of the forest takes them."""
    x, y = rows
    return forest.rows(x), torch.from_numpy(y)[:, None]


def constant(split: Split, trees: int) -> Scores:
    """One bar for all, from the calibration rows."""
    model = boosted(split, trees)
    errors = split.valid[1] - model.predict(split.valid[0])
    scale = math.sqrt(float((errors**2).mean()))
    mean = torch.from_numpy(model.predict(split.test[0]))
    ones = torch.ones(len(mean), dtype=torch.float64)
    p = rg.Prediction(mean, 0 * ones, scale**2 * ones, ones)
    return prediction_scores(p, torch.from_numpy(split.test[1]))


def bounds(trees: int) -> list[Boosted]:
    """Models of the interval's ends and of the median, not fitted."""
    levels = [(1 - LEVEL) / 2, (1 + LEVEL) / 2, 0.5]
    return [
        Boosted(loss="quantile", quantile=q, max_iter=trees, early_stopping=False) for q in levels
    ]


def quantiles(split: Split, trees: int) -> Scores:
    """Boosted quantiles as they come; calibration rows are trained on too."""
    x = np.concatenate([split.train[0], split.valid[0]])
    y = np.concatenate([split.train[1], split.valid[1]])
    lower, upper, _ = bounds(trees)
    low = lower.fit(x, y).predict(split.test[0])
    high = upper.fit(x, y).predict(split.test[0])
    return interval_scores(low, high, split.test[1])


def conformal(split: Split, trees: int) -> Scores:
    """Quantiles made to cover by the calibration rows."""
    from mapie.regression import ConformalizedQuantileRegressor

    fitted = [model.fit(*split.train) for model in bounds(trees)]
    logging.getLogger().setLevel(logging.WARNING)  # else every call warns of quantiles that cross
    wrapped = ConformalizedQuantileRegressor(fitted, confidence_level=LEVEL, prefit=True)
    _, intervals = wrapped.conformalize(*split.valid).predict_interval(split.test[0])
    return interval_scores(intervals[:, 0, 0], intervals[:, 1, 0], split.test[1])


def ngboost(split: Split, trees: int) -> Scores:
    """A normal distribution whose mean and scale are boosted; the calibration rows stop it."""
    from ngboost import NGBRegressor

    model = NGBRegressor(n_estimators=3 * trees, verbose=False, random_state=0)  # of depth three
    model.fit(*split.train, X_val=split.valid[0], Y_val=split.valid[1], early_stopping_rounds=20)
    distribution = model.pred_dist(split.test[0])
    mean = torch.from_numpy(distribution.params["loc"])
    scale = torch.from_numpy(distribution.params["scale"])
    p = rg.Prediction(mean, 0 * scale, scale**2, 1 / scale**2)
    return prediction_scores(p, torch.from_numpy(split.test[1]))


def prediction_scores(p: rg.Prediction, y: torch.Tensor) -> Scores:
    """NLL and CRPS of predictions of one target, and the scores of their intervals."""
    low, high = p.interval(LEVEL)
    intervals = interval_scores(low.flatten().numpy(), high.flatten().numpy(), y.flatten().numpy())
    return {
        "nll": float(-p.log_prob(y).mean()),
        "crps": float(p.crps(y).mean()),
        **intervals,
    }


def interval_scores(low: np.ndarray, high: np.ndarray, y: np.ndarray) -> Scores:
    """Coverage, and the interval score: width + 2 / (1 - level) times the distance outside."""
    beyond = np.clip(low - y, 0, None) + np.clip(y - high, 0, None)
    score = float((high - low + 2 / (1 - LEVEL) * beyond).mean())
    return {"coverage": float(((y >= low) & (y <= high)).mean()), "interval score": score}


METHODS: dict[str, Callable[[Split, int], Scores]] = {
    "rigidity": rigidity,
    "constant bar": constant,
    "quantile regression": quantiles,
    "conformal quantiles (MAPIE)": conformal,
    "NGBoost": ngboost,
}


# --- size and rank --------------------------------------------------------------------------------


def size_rows(rows: int, *, trees: int, leaves: int, rank: int = 0) -> list[Row]:
    """Seconds and memory of the error bars of a large ensemble; rank 0 is the default's."""
    figures = measured_apart("benchmarks.trees", rows, trees, leaves, rank)
    work = f"{trees} trees of {leaves} leaves, {rows:,} rows"
    seconds_limit, memory_limit = SIZE_LIMITS.get(rows, (60.0, 12.0))
    note = (
        f"{figures['directions']} directions hold {figures['share']:.0%} of the features; "
        f"training took {figures['training']:.0f} s"
    )
    return [
        at_most(
            f"{work}: fit and calibration",
            figures["seconds"],
            seconds_limit,
            "s",
            note=note,
            **figures,
        ),
        at_most(f"{work}: peak memory", figures["peak"], memory_limit, "GiB"),
    ]


def rank_rows(*, quick: bool) -> list[Row]:
    """NLL and the order of unscaled variances by rank, beside all leaves."""
    path = DATA / "california_housing.npz"
    if not path.exists():
        return [not_run("what a rank leaves out", f"{path.name} is not there")]
    split = split_of(path, 0)
    trees, ranks = 150, (64, 256, 1024, 4650)
    if quick:
        split = Split(*((x[:300], y[:300]) for x, y in split))
        trees, ranks = 4, (8, 32)
    model = boosted(split, trees)
    exact = exact_quadratic(model, split)
    return [rank_row(model, split, rank, exact) for rank in ranks]


def rank_row(
    model: Boosted, split: Split, rank: int, exact: Callable[[float], torch.Tensor]
) -> Row:
    """One rank: the order of q beside that of all leaves, the NLL, and the time."""
    forest = Forest(model, split.train[0], rank=rank)
    uq = rg.LastLayerRigidity(forest.module).fit(forest_rows(forest, split.train))
    valid = forest_rows(forest, split.valid)
    seconds = clocked(lambda: uq.calibrate(valid))
    x, y = forest_rows(forest, split.test)
    p = uq.predict(x)
    quadratic = 1 / p.rigidity[:, 0]
    expected = exact(uq.ridge)
    share = float((quadratic / expected).mean())
    nll = float(-p.log_prob(y).mean())
    return for_information(
        f"California, {rank} directions: rank correlation of q with that of all leaves",
        rank_correlation(quadratic, expected),
        note=f"NLL {nll:.3f}; q is {share:.0%} of it; calibration took {seconds:.0f} s; "
        f"the directions hold {forest.share:.0%} of the features",
        nll=nll,
        share=share,
        seconds=seconds,
    )


def exact_quadratic(model: Boosted, split: Split) -> Callable[[float], torch.Tensor]:
    """q of the test rows as a function of the ridge, densely from indicators of all leaves."""
    forest = Forest(model, split.train[0], rank=1)
    leaves = len(forest.module.group)

    def indicators(x: np.ndarray) -> torch.Tensor:
        leaf_numbers = forest.rows(x)[:, :-1]  # (N, trees)
        zeros = torch.zeros(len(leaf_numbers), leaves, dtype=torch.float64)
        return zeros.scatter_(1, leaf_numbers, 1.0)

    train = indicators(split.train[0])
    test = indicators(split.test[0])
    gram = train.mT @ train

    def quadratic(ridge: float) -> torch.Tensor:
        factor = torch.linalg.cholesky(gram + ridge * torch.eye(leaves, dtype=torch.float64))
        return torch.linalg.solve_triangular(factor, test.mT, upper=False).square().sum(0)

    return quadratic


def synthetic(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Eight uniform inputs and a function of them, with noise that grows with the third."""
    random = np.random.default_rng(0)
    x = random.random((rows, 8))
    noise = (0.1 + 0.2 * x[:, 2]) * random.standard_normal(len(x))
    waves = np.sin(6 * x[:, 0]) * x[:, 1]
    cubic = 10 * (x[:, 3] - 0.5) ** 3
    return x, waves + cubic + np.abs(x[:, 4] - x[:, 5]) + noise


def main(rows: int, trees: int, leaves: int, rank: int, threads: int) -> None:
    """Train on synthetic rows, then fit and calibrate; `rank` 0 is the default's."""
    torch.set_num_threads(threads)
    x, y = synthetic(rows + rows // 5)
    model = Boosted(max_iter=trees, max_leaf_nodes=leaves, early_stopping=False)
    start = time.perf_counter()
    model.fit(x[:rows], y[:rows])
    trained = time.perf_counter()
    forest = Forest(model, x[:rows], rank=rank or None)
    uq = rg.LastLayerRigidity(forest.module)
    uq.fit(forest_rows(forest, (x[:rows], y[:rows])))
    uq.calibrate(forest_rows(forest, (x[rows:], y[rows:])))
    seconds = time.perf_counter() - trained
    figures = {
        "seconds": seconds,
        "training": trained - start,
        "peak": peak_bytes() / 2**30,
        "share": forest.share,
        "directions": forest.module.basis.shape[1],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
