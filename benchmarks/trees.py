"""Error bars of tree ensembles: their price, against rivals, and what a rank leaves out.

Run as a module of its own (``python -m benchmarks.trees rows trees leaves rank threads``) it trains
boosted trees on synthetic rows and prints what their error bars take.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
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
from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import clocked
from rigidities.sklearn import RigidityRegressor
from rigidities.trees import Forest

DATA = ROOT.parent / "shared" / "data"
MUST = {"california_housing": -0.25, "uci_concrete": -0.10, "uci_protein": -0.10, "uci_power": 0.0}
LEVEL = 0.9
PRICE = (1.0, 5.0)
"""Seconds, and times its own training, that a booster with error bars may take."""
Scores = dict[str, Any]


class Split(NamedTuple):
    """Inputs and targets to train on, to calibrate on and to test on."""

    train: tuple[np.ndarray, np.ndarray]
    valid: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def run(*, quick: bool = False) -> list[Row]:
    """What wrapping costs, four real sets by five splits, two sizes, and what a rank leaves out."""
    sizes = [(1_000, 5, 8, 16)] if quick else [(40_000, 100, 31, 0), (500_000, 300, 64, 0)]
    rows = [row for count in ([300] if quick else [1_500, 40_000]) for row in price_rows(count)]
    rows += set_rows({"uci_concrete": -0.1} if quick else MUST, quick=quick)
    rows += [row for size in sizes for row in size_rows(*size)]
    return rows + rank_rows(quick=quick)


def price_rows(count: int) -> list[Row]:
    """Seconds to train boosters of default settings and calibrate them, the best of three runs."""
    made: dict[str, Callable[[], Any]] = {"HistGradientBoosting": Boosted}
    found = []
    try:
        from lightgbm import LGBMRegressor

        made["LightGBM"] = lambda: LGBMRegressor(verbose=-1)
    except ModuleNotFoundError:
        found.append(not_run(f"LightGBM, {count:,} rows", "lightgbm is not installed"))
    x, y = make_friedman1(count, n_features=10, noise=1.0, random_state=0)
    for name, make in made.items():
        training = min(clocked(lambda make=make: make().fit(x, y)) for _ in range(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few rows one constant bar may be all there is
            whole = min(
                clocked(lambda make=make: RigidityRegressor(make()).fit(x, y)) for _ in range(3)
            )
        work = f"RigidityRegressor({name}()).fit, {count:,} rows"
        note = f"training takes {training:.2f} s; the limit is 1 s and 5 times as long"
        limit = round(PRICE[0] + PRICE[1] * training, 2)
        found.append(at_most(work, whole, limit, "s", note=note, training=training))
    return found


def set_rows(sets: dict[str, float], *, quick: bool) -> list[Row]:
    """Of every set; splits and methods beside each other where there are cores for it."""
    splits, trees, threads = *((1, 10) if quick else (5, 150)), torch.get_num_threads()
    here = [name for name in sets if (DATA / f"{name}.npz").exists()]
    work = [(name, method, k) for name in here for k in range(splits) for method in METHODS]
    if quick:
        found = [scored(*one, trees, threads) for one in work]
    else:
        context = multiprocessing.get_context("spawn")
        workers = max(1, len(os.sched_getaffinity(0)) // threads)
        with ProcessPoolExecutor(workers, context) as pool:
            found = list(pool.map(scored, *zip(*work, strict=True), repeat(trees), repeat(threads)))
    kept = dict(zip(work, found, strict=True))
    rows = []
    for name, must in sets.items():
        each = {method: [kept.get((name, method, k)) for k in range(splits)] for method in METHODS}
        missing = not_run(f"{name}: gain over a constant bar", f"{name}.npz is not there")
        rows += judged_rows(name, must, each) if name in here else [missing]
    return rows


def scored(name: str, method: str, number: int, trees: int, threads: int) -> Scores:
    """One method on one split, in two threads whatever else runs."""
    torch.set_num_threads(threads)
    split, start = parted(DATA / f"{name}.npz", number), time.perf_counter()
    try:
        with threadpool_limits(threads):
            found = METHODS[method](split, trees)
    except ModuleNotFoundError as missing:
        return {"missing": missing.name}
    return found | {"seconds": time.perf_counter() - start}


def judged_rows(name: str, must: float, found: dict[str, list[Scores]]) -> list[Row]:
    """Gain in NLL over a constant bar, and the scores of everything, over splits."""
    pairs = zip(found["rigidity"], found["constant bar"], strict=True)
    gains = [ours["nll"] - bar["nll"] for ours, bar in pairs]
    spread = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    work = f"{name}: NLL minus that of a constant bar, {len(gains)} splits"
    first = at_most(work, fmean(gains), must, "nats", gains=gains, standard_error=spread)
    return [first, *(score_row(name, method, scores) for method, scores in found.items())]


def score_row(name: str, method: str, scores: list[Scores]) -> Row:
    """Mean scores of a method; the interval score leads, since all have one."""
    if "missing" in scores[0]:
        return not_run(f"{name}, {method}", f"{scores[0]['missing']} is not installed")
    means = {key: fmean(one[key] for one in scores) for key in scores[0]}
    said = ", ".join(
        f"{key} {value:.3g}" for key, value in means.items() if key != "interval score"
    )
    return for_information(
        f"{name}, {method}: interval score", means["interval score"], note=said, **means
    )


def parted(path: Path, seed: int) -> Split:
    """70 % to train on, 15 % to calibrate on, 15 % to test on."""
    with np.load(path) as data:
        x, y = data["X"].astype(float), data["y"].astype(float)
    order = np.random.default_rng(seed).permutation(len(y))
    parts = np.split(order, [int(0.7 * len(y)), int(0.85 * len(y))])
    return Split(*((x[part], y[part]) for part in parts))


def boosted(split: Split, trees: int) -> Boosted:
    """The model that has the error bars."""
    return Boosted(max_iter=trees, early_stopping=False, random_state=0).fit(*split.train)


def rigidity(split: Split, trees: int, rank: int | None = None) -> Scores:
    """The default calibration on leaf indicators."""
    forest = Forest(boosted(split, trees), split.train[0], rank=rank)
    train, valid, test = ((forest.rows(x), torch.from_numpy(y)[:, None]) for x, y in split)
    uq = rg.LastLayerRigidity(forest.module).fit(train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the concrete set has rows more than once
        uq.calibrate(valid)
    p = uq.predict(test[0])
    low, high = (bound[:, 0].numpy() for bound in p.interval(LEVEL))
    own = {"nll": float(-p.log_prob(test[1]).mean()), "crps": float(p.crps(test[1]).mean())}
    return (
        own | interval_scores(low, high, split.test[1]) | {"rank correlation": ranked(p, test[1])}
    )


def ranked(p: rg.Prediction, y: torch.Tensor) -> float:
    """Spearman's correlation of bar and error."""
    columns = torch.stack([p.std[:, 0], (y - p.mean)[:, 0].abs()]).argsort(1).argsort(1)
    return float(torch.corrcoef(columns.double())[0, 1])


def constant(split: Split, trees: int) -> Scores:
    """One bar for all, from the calibration rows."""
    model = boosted(split, trees)
    errors = split.valid[1] - model.predict(split.valid[0])
    mean, scale = model.predict(split.test[0]), math.sqrt(float((errors**2).mean()))
    one = torch.ones(len(mean), dtype=torch.float64)
    p = rg.Prediction(torch.from_numpy(mean), 0 * one, scale**2 * one, one)
    y = torch.from_numpy(split.test[1])
    low, high = (bound.numpy() for bound in p.interval(LEVEL))
    own = {"nll": float(-p.log_prob(y).mean()), "crps": float(p.crps(y).mean())}
    return own | interval_scores(low, high, split.test[1])


def bounds(trees: int) -> list[Boosted]:
    """Models of the interval's ends and of the median, not fitted."""
    levels = [(1 - LEVEL) / 2, (1 + LEVEL) / 2, 0.5]
    return [
        Boosted(loss="quantile", quantile=q, max_iter=trees, early_stopping=False) for q in levels
    ]


def quantiles(split: Split, trees: int) -> Scores:
    """Boosted quantiles as they come; calibration rows are trained on too."""
    x, y = (np.concatenate(parts) for parts in zip(split.train, split.valid, strict=True))
    low, high = (model.fit(x, y).predict(split.test[0]) for model in bounds(trees)[:2])
    return interval_scores(low, high, split.test[1])


def conformal(split: Split, trees: int) -> Scores:
    """Quantiles made to cover by the calibration rows."""
    from mapie.regression import ConformalizedQuantileRegressor

    fitted = [model.fit(*split.train) for model in bounds(trees)]
    logging.getLogger().setLevel(logging.WARNING)  # quantiles that cross are said at every call
    wrapped = ConformalizedQuantileRegressor(fitted, confidence_level=LEVEL, prefit=True)
    _, found = wrapped.conformalize(*split.valid).predict_interval(split.test[0])
    return interval_scores(found[:, 0, 0], found[:, 1, 0], split.test[1])


def ngboost(split: Split, trees: int) -> Scores:
    """A normal distribution whose mean and scale are boosted; the calibration rows stop it."""
    from ngboost import NGBRegressor

    model = NGBRegressor(n_estimators=3 * trees, verbose=False, random_state=0)  # of depth three
    model.fit(*split.train, X_val=split.valid[0], Y_val=split.valid[1], early_stopping_rounds=20)
    distribution = model.pred_dist(split.test[0])
    mean, scale = (
        torch.from_numpy(distribution.params["loc"]),
        torch.from_numpy(distribution.params["scale"]),
    )
    p = rg.Prediction(mean, 0 * scale, scale**2, 1 / scale**2)
    y = torch.from_numpy(split.test[1])
    low, high = (bound.numpy() for bound in p.interval(LEVEL))
    own = {"nll": float(-p.log_prob(y).mean()), "crps": float(p.crps(y).mean())}
    return own | interval_scores(low, high, split.test[1])


def interval_scores(low: np.ndarray, high: np.ndarray, y: np.ndarray) -> Scores:
    """Coverage of the interval, and its width with what lies outside, times 2 / (1 - level)."""
    beyond = np.clip(low - y, 0, None) + np.clip(y - high, 0, None)
    score = float((high - low + 2 / (1 - LEVEL) * beyond).mean())
    return {"coverage": float(((y >= low) & (y <= high)).mean()), "interval score": score}


METHODS = {
    "rigidity": rigidity,
    "constant bar": constant,
    "quantile regression": quantiles,
    "conformal quantiles (MAPIE)": conformal,
    "NGBoost": ngboost,
}
LIMITS = {40_000: (30.0, 12.0), 500_000: (900.0, 12.0)}


def size_rows(rows: int, trees: int, leaves: int, rank: int) -> list[Row]:
    """Seconds and memory of the error bars of a large ensemble."""
    found = measured_apart("benchmarks.trees", rows, trees, leaves, rank)
    work = f"{trees} trees of {leaves} leaves, {rows:,} rows"
    seconds, memory = LIMITS.get(rows, (60.0, 12.0))
    held = f"{found['directions']} directions hold {found['share']:.0%} of the features"
    note = f"{held}; training took {found['training']:.0f} s"
    return [
        at_most(f"{work}: fit and calibration", found["seconds"], seconds, "s", note=note, **found),
        at_most(f"{work}: peak memory", found["peak"], memory, "GiB"),
    ]


def rank_rows(*, quick: bool) -> list[Row]:
    """NLL and the order of unscaled variances by rank, beside all leaves."""
    path = DATA / "california_housing.npz"
    if not path.exists():
        return [not_run("what a rank leaves out", f"{path.name} is not there")]
    split, ranks = parted(path, 0), (8, 32) if quick else (64, 256, 1024, 4650)
    split = Split(*((x[:300], y[:300]) for x, y in split)) if quick else split
    model = boosted(split, 4 if quick else 150)
    exact, found = exact_q(model, split), []
    for rank in ranks:
        forest = Forest(model, split.train[0], rank=rank)
        train, valid, test = ((forest.rows(x), torch.from_numpy(y)[:, None]) for x, y in split)
        uq = rg.LastLayerRigidity(forest.module).fit(train)
        start = time.perf_counter()
        uq.calibrate(valid)
        seconds = time.perf_counter() - start
        p = uq.predict(test[0])
        q, nll = 1 / p.rigidity[:, 0], float(-p.log_prob(test[1]).mean())
        pair = torch.stack([q, exact(uq.ridge)]).argsort(1).argsort(1).double()
        order, share = float(torch.corrcoef(pair)[0, 1]), float((q / exact(uq.ridge)).mean())
        work = f"California, {rank} directions: rank correlation of q with that of all leaves"
        said = f"NLL {nll:.3f}; q is {share:.0%} of it; calibration took {seconds:.0f} s; "
        said += f"the directions hold {forest.share:.0%} of the features"
        found.append(for_information(work, order, note=said, nll=nll, share=share, seconds=seconds))
    return found


def exact_q(model: Boosted, split: Split) -> Callable[[float], torch.Tensor]:
    """Of the test rows by ridge, densely from the leaf counts that rows share."""
    forest = Forest(model, split.train[0], rank=1)
    leaves = len(forest.module.group)

    def indicators(x: np.ndarray) -> torch.Tensor:
        rows = forest.rows(x)[:, :-1]
        return torch.zeros(len(rows), leaves, dtype=torch.float64).scatter_(1, rows, 1.0)

    train, test = indicators(split.train[0]), indicators(split.test[0])
    gram = train.mT @ train

    def q(ridge: float) -> torch.Tensor:
        factor = torch.linalg.cholesky(gram + ridge * torch.eye(leaves, dtype=torch.float64))
        return torch.linalg.solve_triangular(factor, test.mT, upper=False).square().sum(0)

    return q


def main(rows: int, trees: int, leaves: int, rank: int, threads: int) -> None:
    """Train on synthetic rows, then fit and calibrate; `rank` 0 is the default's."""
    torch.set_num_threads(threads)
    random = np.random.default_rng(0)
    x = random.random((rows + rows // 5, 8))
    noise = (0.1 + 0.2 * x[:, 2]) * random.standard_normal(len(x))
    y = (
        np.sin(6 * x[:, 0]) * x[:, 1]
        + 10 * (x[:, 3] - 0.5) ** 3
        + np.abs(x[:, 4] - x[:, 5])
        + noise
    )
    start = time.perf_counter()
    model = Boosted(max_iter=trees, max_leaf_nodes=leaves, early_stopping=False)
    model.fit(x[:rows], y[:rows])
    trained = time.perf_counter()
    forest = Forest(model, x[:rows], rank=rank or None)
    uq = rg.LastLayerRigidity(forest.module)
    uq.fit((forest.rows(x[:rows]), torch.from_numpy(y[:rows, None])))
    uq.calibrate((forest.rows(x[rows:]), torch.from_numpy(y[rows:, None])))
    seconds = time.perf_counter() - trained
    found: dict[str, Any] = {"seconds": seconds, "training": trained - start}
    found |= {"peak": peak_bytes() / 2**30, "share": forest.share}
    print(json.dumps(found | {"directions": forest.module.basis.shape[1]}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
