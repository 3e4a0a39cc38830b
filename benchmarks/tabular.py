"""`rigidities tabular` on tables as people write them: coverage, RMSE beside tuned trees, NLL.

Every set becomes a file with an identifier, a constant, a comment, a category and numbers with gaps
that are of no use, and the target in other units; every second one has decimal commas. The rival is
a `HistGradientBoostingRegressor` that a random search tunes on the same training rows and inputs.
Scores are those of the command's own test rows.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from benchmarks.frame.results import Row, at_least, at_most, for_information, not_run
from rigidities import cli
from rigidities.cli import learners

ROOT = Path(__file__).resolve().parents[1]
SETS = {"yacht": 3, "energy": 3, "concrete": 3, "wine": 3}
SETS |= {"power": 1, "kin8nm": 1, "naval": 1, "protein": 1, "california": 1, "weather": 1}
"""Seeds of each."""
LABS = ["Köln", "Oslo", "Rome"]
TRIALS, FOLDS, MOST = 12, 3, 4_000
"""Settings of the rival's search, parts it leaves out in turn, rows it searches on at most."""


def run(*, quick: bool = False) -> list[Row]:
    """One row a set, then what is asked of all of them."""
    if quick:
        with mock.patch.object(learners, "TREES", 20):
            found = [measured("synthetic", 0, trials=1)]
        return [row_of("synthetic", found), *verdicts({"synthetic": found})]
    if absent := [name for name in SETS if not source(name).is_file()]:
        return [not_run("tables", f"There is no {source(absent[0])}: set RIGIDITIES_DATA.")]
    work = [(name, seed) for name, seeds in SETS.items() for seed in range(seeds)]
    work.sort(key=lambda one: -source(one[0]).stat().st_size)  # the longest first
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    workers = max(1, len(os.sched_getaffinity(0)) // threads)
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (threads,)) as pool:
        found = dict(zip(work, pool.map(measured, *zip(*work, strict=True)), strict=True))
    scores = {name: [found[name, seed] for seed in range(n)] for name, n in SETS.items()}
    return [*(row_of(name, own) for name, own in scores.items()), *verdicts(scores)]


def source(name: str) -> Path:
    """The file of a set."""
    folder = Path(os.environ.get("RIGIDITIES_DATA", ROOT.parent / "shared" / "data"))
    kinds = {"california": "california_housing.npz", "weather": "weatherAUS.csv.gz"}
    return folder / kinds.get(name, f"uci_{name}.npz")


def rows_of(name: str) -> tuple[Any, Any]:
    """Inputs and targets; of the weather the numbers, for the rival."""
    if name == "synthetic":
        return synthetic()
    if name == "weather":
        import pandas

        frame = pandas.read_csv(source(name))
        codes = {c: frame[c].astype("category").cat.codes for c in frame if frame[c].dtype != float}
        numbers = frame.assign(**codes)
        return numbers.drop(columns="MaxTemp").to_numpy(float), frame["MaxTemp"].to_numpy(float)
    with np.load(source(name)) as stored:
        return stored["X"], stored["y"]


def measured(name: str, seed: int, trials: int = TRIALS) -> dict[str, Any]:
    """The command's summary, with its time and the rival's RMSE."""
    with threadpool_limits(torch.get_num_threads()):
        return judged(name, seed, trials)


def judged(name: str, seed: int, trials: int) -> dict[str, Any]:
    (x, y), rng = rows_of(name), np.random.default_rng(seed)
    if name == "weather":  # as it is published: gaps, categories, dates
        found, split = command(source(name), "MaxTemp", seed)
        return found | {"rival": rival(x, y, split == "train", split == "test", seed, trials, [0])}
    drift = np.where(rng.random(len(y)) < 0.8, rng.normal(size=len(y)), np.nan)
    x = np.column_stack([x, drift, rng.integers(len(LABS), size=len(y))])
    with tempfile.TemporaryDirectory() as made:
        write(Path(made, "data.csv"), x, y, seed, comma=seed % 2 == 1)
        found, split = command(Path(made, "data.csv"), "y", seed)
    assert {"y2", "unit", "comment", "sample id"}.isdisjoint(c["name"] for c in found["columns"])
    found["rival"] = rival(x, y, split == "train", split == "test", seed, trials, [len(LABS)])
    return found


def command(path: Path, target: str, seed: int) -> tuple[dict[str, Any], Any]:
    """Its summary and time, and the part of each row."""
    with tempfile.TemporaryDirectory() as made:
        words = ["tabular", str(path), "--target", target, "--out", f"{made}/out"]
        printed, begun = io.StringIO(), time.perf_counter()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as said:
            code = cli.main([*words, "--seed", str(seed), "--json"])
        assert code == 0, said.getvalue()
        found: dict[str, Any] = json.loads(printed.getvalue())
        found["seconds"] = time.perf_counter() - begun
        with Path(made, "out", "predictions.csv").open(encoding="utf-8") as file:
            return found, np.array([line["split"] for line in csv.DictReader(file)])


def write(path: Path, x: Any, y: Any, seed: int, *, comma: bool) -> None:
    """The table with its dirt."""
    rng = np.random.default_rng(seed)

    def text(value: float) -> str:
        if np.isnan(value):
            return str(rng.choice(["", "NA", "?"]))
        return f"{value:.10g}".replace(".", ",") if comma else f"{value:.10g}"

    inputs = (f"x{k}" for k in range(x.shape[1] - 1))
    heads = ["sample id", *inputs, "lab", "unit", "comment", "y2", "y"]
    with path.open("w", encoding="cp1252" if comma else "utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=";" if comma else ",")
        writer.writerow(heads)
        for k, (row, target) in enumerate(zip(x, y, strict=True)):
            dirt = [LABS[int(row[-1])], "MPa", f"seen {k}, fine"]
            writer.writerow(
                [k + 1, *map(text, row[:-1]), *dirt, text(3 - 2 * target), text(target)]
            )


def rival(x: Any, y: Any, train: Any, test: Any, seed: int, trials: int, last: list[int]) -> float:
    """RMSE on the test rows of trees that a random search has tuned on training rows."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(np.flatnonzero(train))
    few = rows[:MOST]
    found = []
    for settings in searched(rng, trials):
        losses, counts = [], []
        for held in np.array_split(few, FOLDS):
            used = np.setdiff1d(few, held)
            own = learners.unfitted(
                [0] * (x.shape[1] - 1) + last, seed, early_stopping=True, **settings
            )
            own.set_params(max_iter=learners.TREES, n_iter_no_change=20, tol=0.0)
            own.fit(x[used], y[used], X_val=x[held], y_val=y[held])
            losses.append(-own.validation_score_.max())
            counts.append(int(own.validation_score_.argmax()))
        found.append((np.mean(losses), int(np.mean(counts)), settings))
    _, count, settings = min(found, key=lambda one: one[0])
    own = learners.unfitted([0] * (x.shape[1] - 1) + last, seed, max_iter=max(1, count), **settings)
    error = own.fit(x[rows], y[rows]).predict(x[test]) - y[test]
    return float(np.sqrt(np.mean(error**2)))


def searched(rng: Any, trials: int) -> Iterator[dict[str, Any]]:
    for _ in range(trials):
        yield {
            "learning_rate": float(np.exp(rng.uniform(np.log(0.03), np.log(0.2)))),
            "max_leaf_nodes": int(np.exp(rng.uniform(np.log(4), np.log(64)))),
            "min_samples_leaf": int(np.exp(rng.uniform(np.log(2), np.log(40)))),
            "l2_regularization": float(np.exp(rng.uniform(np.log(0.01), np.log(30)))),
        }


def synthetic() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (150, 2))
    return x, np.sin(3 * x[:, 0]) + x[:, 1] + 0.1 * rng.normal(size=150)


def average(found: list[dict[str, Any]], key: str) -> float:
    return float(np.mean([one["scores"]["rigidities"][key] for one in found]))


def row_of(name: str, found: list[dict[str, Any]]) -> Row:
    """What was measured on one set."""
    rmse, rival, nll = average(found, "rmse"), np.mean([one["rival"] for one in found]), llpr(name)
    figures = {key: average(found, key) for key in ("rmse", "nll", "crps", "coverage", "width")}
    others = {way: found[0]["scores"][way] for way in ("constant", "quantile")}
    note = f"RMSE {rmse:.4g} (tuned trees {rival:.4g}), NLL {figures['nll']:.3f}"
    note += f" (LLPR of a net {nll:.3f})" if nll is not None else ""
    note += f"; 90 % intervals hold {figures['coverage']:.1%}"
    ratio = float(rmse / rival)
    seconds = float(np.mean([one["seconds"] for one in found]))
    more = {"rival": float(rival), "llpr_nll": nll, "seconds": seconds, "first": others}
    work = f"{name}, {len(found)} splits"
    return at_most(work, ratio, 1.05, "RMSEs of tuned trees", note=note, **figures, **more)


def verdicts(scores: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """What is asked of all sets together."""
    coverage = float(np.mean([average(found, "coverage") for found in scores.values()]))
    better = [n for n, own in scores.items() if (llpr(n) or -np.inf) > average(own, "nll")]
    seconds = [one["seconds"] for found in scores.values() for one in found]
    return [
        at_least("coverage of 90 % intervals, mean of the sets", coverage, 0.87),
        at_most("coverage of 90 % intervals, mean of the sets, again", coverage, 0.93),
        at_least("sets with an NLL below that of LLPR", len(better), 5, note=", ".join(better)),
        for_information("time of one command, the longest", max(seconds), "s"),
    ]


def llpr(name: str) -> float | None:
    """NLL of the paper's method with a net, from the experiment's results."""
    results = json.loads((ROOT / "experiments/results/uci/uci.json").read_text(encoding="utf-8"))
    return float(results[name]["llpr"]["nll"][0]) if name in results else None
