"""`rigidities tabular` on tables as people write them: coverage, RMSE beside tuned trees, NLL.

Every set becomes a file with columns that are of no use (an identifier, a constant, a comment, a
category, numbers with gaps) and with the target in other units; every second file has decimal
commas. The rival is a `HistGradientBoostingRegressor` that a random search tunes on the same
training rows and inputs. Scores are those of the command's own test rows.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from benchmarks.frame.apart import ROOT
from benchmarks.frame.ranks import pooled
from benchmarks.frame.results import Row, at_least, at_most, for_information, not_run, within
from rigidities import cli
from rigidities.cli import learners

SEEDS = {
    "yacht": 3,
    "energy": 3,
    "concrete": 3,
    "wine": 3,
    "power": 1,
    "kin8nm": 1,
    "naval": 1,
    "protein": 1,
    "california": 1,
    "weather": 1,
}
"""How many splits of each set are measured."""
FILES = {"california": "california_housing.npz", "weather": "weatherAUS.csv.gz"}
"""Of the sets whose file is not called after them."""
LABS = ["Köln", "Oslo", "Rome"]
TRIALS = 12
"""Settings that the rival's search tries."""
FOLDS = 3
"""Parts of the rows that the search leaves out in turn."""
SEARCHED_ROWS = 4_000
"""Rows that the search uses at most."""
Summary = dict[str, Any]
"""What the command prints of one table, with its time and the rival's RMSE."""


@dataclass(frozen=True)
class Table:
    """A set as the rival reads it.

    Attributes:
        x: Inputs, (N, D).
        y: Targets, (N,).
        categories: By column, the number of categories, or 0 of a number.
    """

    x: Any
    y: Any
    categories: Sequence[int]


def run(*, quick: bool = False) -> list[Row]:
    """A row for each set, then what is asked of all of them."""
    if quick:
        with mock.patch.object(learners, "TREES", 20):
            summaries = {"synthetic": [measured("synthetic", 0, trials=1)]}
    else:
        absent = [name for name in SEEDS if not source(name).is_file()]
        if absent:
            return [not_run("tables", f"There is no {source(absent[0])}: set RIGIDITIES_DATA.")]
        summaries = all_summaries()
    table = [set_row(name, summaries[name]) for name in summaries]
    return table + overall_rows(summaries)


def all_summaries() -> dict[str, list[Summary]]:
    """Of every split of every set, in several processes, the longest first."""
    calls = [(name, seed) for name, seeds in SEEDS.items() for seed in range(seeds)]
    calls.sort(key=lambda call: -source(call[0]).stat().st_size)
    answers = pooled(measured, calls, threads=torch.get_num_threads())
    by_call = dict(zip(calls, answers, strict=True))
    return {name: [by_call[name, seed] for seed in range(seeds)] for name, seeds in SEEDS.items()}


def source(name: str) -> Path:
    """The file of a set."""
    folder = Path(os.environ.get("RIGIDITIES_DATA", ROOT.parent / "shared" / "data"))
    return folder / FILES.get(name, f"uci_{name}.npz")


def inputs_and_targets(name: str) -> tuple[Any, Any]:
    """The rows of a set as numbers, (N, D) and (N,); words of the weather become codes."""
    if name == "synthetic":
        return synthetic()
    if name == "weather":
        import pandas

        frame = pandas.read_csv(source(name))
        words = [column for column in frame if frame[column].dtype != float]
        codes = {column: frame[column].astype("category").cat.codes for column in words}
        numbers = frame.assign(**codes)
        return numbers.drop(columns="MaxTemp").to_numpy(float), frame["MaxTemp"].to_numpy(float)
    with np.load(source(name)) as stored:
        return stored["X"], stored["y"]


def measured(name: str, seed: int, trials: int = TRIALS) -> Summary:
    """The command's summary of one split, with its time and the rival's RMSE."""
    with threadpool_limits(torch.get_num_threads()):
        x, y = inputs_and_targets(name)
        if name == "weather":  # as it is published: gaps, categories, dates
            table = Table(x, y, categories=[0] * x.shape[1])
            summary, split = command_summary(source(name), "MaxTemp", seed)
        else:
            table = with_useless_columns(x, y, seed)
            summary, split = written_summary(table, seed)
        summary["rival"] = rival_rmse(table, split, seed, trials)
    return summary


def with_useless_columns(x: Any, y: Any, seed: int) -> Table:
    """Two more inputs that say nothing of the target: numbers with gaps, and a category."""
    rng = np.random.default_rng(seed)
    drift = np.where(rng.random(len(y)) < 0.8, rng.normal(size=len(y)), np.nan)
    lab = rng.integers(len(LABS), size=len(y))
    categories = [0] * (x.shape[1] + 1) + [len(LABS)]
    return Table(np.column_stack([x, drift, lab]), y, categories)


def written_summary(table: Table, seed: int) -> tuple[Summary, Any]:
    """The command's summary of the table as a file, and the part of each row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.csv")
        write(path, table.x, table.y, seed, comma=seed % 2 == 1)
        summary, split = command_summary(path, "y", seed)
    used = {column["name"] for column in summary["columns"]}
    assert used.isdisjoint({"y2", "unit", "comment", "sample id"})
    return summary, split


def command_summary(path: Path, target: str, seed: int) -> tuple[Summary, Any]:
    """The command's summary of a file with its time, and the part of each row."""
    printed = io.StringIO()
    errors = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        words = ["tabular", str(path), "--target", target, "--out", f"{folder}/out"]
        words += ["--seed", str(seed), "--json"]
        start = time.perf_counter()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            code = cli.main(words)
        assert code == 0, errors.getvalue()
        summary: Summary = json.loads(printed.getvalue())
        summary["seconds"] = time.perf_counter() - start
        with Path(folder, "out", "predictions.csv").open(encoding="utf-8") as file:
            split = np.array([line["split"] for line in csv.DictReader(file)])
    return summary, split


def write(path: Path, x: Any, y: Any, seed: int, *, comma: bool) -> None:
    """The table as a file, with an identifier, a constant, a comment and a second target.

    Args:
        path: Of the file.
        x: Inputs, (N, D), the last of which is the number of a lab.
        y: Targets, (N,).
        seed: Of the words that stand for gaps.
        comma: Write decimal commas, semicolons and cp1252, as some spreadsheets do.
    """
    rng = np.random.default_rng(seed)

    def text(value: float) -> str:
        if np.isnan(value):
            return str(rng.choice(["", "NA", "?"]))
        number = f"{value:.10g}"
        if comma:
            return number.replace(".", ",")
        return number

    encoding, delimiter = ("cp1252", ";") if comma else ("utf-8-sig", ",")
    inputs = [f"x{k}" for k in range(x.shape[1] - 1)]
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["sample id", *inputs, "lab", "unit", "comment", "y2", "y"])
        for k, (row, target) in enumerate(zip(x, y, strict=True)):
            numbers = [text(value) for value in row[:-1]]
            lab = LABS[int(row[-1])]
            targets = [text(3 - 2 * target), text(target)]
            writer.writerow([k + 1, *numbers, lab, "MPa", f"seen {k}, fine", *targets])


def rival_rmse(table: Table, split: Any, seed: int, trials: int) -> float:
    """RMSE on the test rows of trees that a random search has tuned on training rows."""
    x, y = table.x, table.y
    rng = np.random.default_rng(seed)
    train = rng.permutation(np.flatnonzero(split == "train"))
    best_loss = np.inf
    for settings in random_settings(rng, trials):
        loss, trees = validation_loss(table, train[:SEARCHED_ROWS], seed, settings)
        if loss < best_loss:
            best_loss, best_trees, best_settings = loss, trees, settings
    categories = list(table.categories)
    best = learners.unfitted(categories, seed, max_iter=max(1, best_trees), **best_settings)
    test = split == "test"
    error = best.fit(x[train], y[train]).predict(x[test]) - y[test]
    return float(np.sqrt(np.mean(error**2)))


def validation_loss(
    table: Table, rows: Any, seed: int, settings: dict[str, Any]
) -> tuple[float, int]:
    """Mean over the folds of the least validation loss, and of the trees that reach it."""
    x, y = table.x, table.y
    losses = []
    tree_counts = []
    for valid in np.array_split(rows, FOLDS):
        train = np.setdiff1d(rows, valid)
        trees = learners.unfitted(list(table.categories), seed, early_stopping=True, **settings)
        trees.set_params(max_iter=learners.TREES, n_iter_no_change=20, tol=0.0)
        trees.fit(x[train], y[train], X_val=x[valid], y_val=y[valid])
        losses.append(-trees.validation_score_.max())
        tree_counts.append(int(trees.validation_score_.argmax()))
    return float(np.mean(losses)), int(np.mean(tree_counts))


def random_settings(rng: Any, trials: int) -> Iterator[dict[str, Any]]:
    """Settings of trees, drawn on a logarithmic scale."""
    for _ in range(trials):
        yield {
            "learning_rate": float(np.exp(rng.uniform(np.log(0.03), np.log(0.2)))),
            "max_leaf_nodes": int(np.exp(rng.uniform(np.log(4), np.log(64)))),
            "min_samples_leaf": int(np.exp(rng.uniform(np.log(2), np.log(40)))),
            "l2_regularization": float(np.exp(rng.uniform(np.log(0.01), np.log(30)))),
        }


def synthetic() -> tuple[Any, Any]:
    """150 rows of a smooth function of two inputs."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (150, 2))
    return x, np.sin(3 * x[:, 0]) + x[:, 1] + 0.1 * rng.normal(size=150)


def average(summaries: list[Summary], key: str) -> float:
    """Mean over the splits of one score of the command."""
    return float(np.mean([summary["scores"]["rigidities"][key] for summary in summaries]))


def set_row(name: str, summaries: list[Summary]) -> Row:
    """What was measured on one set."""
    rmse = average(summaries, "rmse")
    rival = float(np.mean([summary["rival"] for summary in summaries]))
    nll = average(summaries, "nll")
    coverage = average(summaries, "coverage")
    network_nll = llpr_nll(name)
    note = f"RMSE {rmse:.4g} (tuned trees {rival:.4g}), NLL {nll:.3f}"
    if network_nll is not None:
        note += f" (LLPR of a network {network_nll:.3f})"
    note += f"; 90 % intervals cover {coverage:.1%}"
    first_scores = summaries[0]["scores"]
    return at_most(
        f"{name}, {len(summaries)} splits",
        rmse / rival,
        1.05,
        "RMSEs of tuned trees",
        note=note,
        rmse=rmse,
        nll=nll,
        crps=average(summaries, "crps"),
        coverage=coverage,
        width=average(summaries, "width"),
        rival=rival,
        llpr_nll=network_nll,
        seconds=float(np.mean([summary["seconds"] for summary in summaries])),
        first={way: first_scores[way] for way in ("constant", "quantile")},
    )


def overall_rows(summaries: dict[str, list[Summary]]) -> list[Row]:
    """What is asked of all sets together."""
    coverages = [average(summaries[name], "coverage") for name in summaries]
    better = []
    for name in summaries:
        network_nll = llpr_nll(name)
        if network_nll is not None and average(summaries[name], "nll") < network_nll:
            better.append(name)
    seconds = [summary["seconds"] for name in summaries for summary in summaries[name]]
    work = "coverage of 90 % intervals, mean of the sets"
    return [
        within(work, float(np.mean(coverages)), (0.87, 0.93)),
        at_least("sets with an NLL below that of LLPR", len(better), 5, note=", ".join(better)),
        for_information("time of one command, the longest", max(seconds), "s"),
    ]


def llpr_nll(name: str) -> float | None:
    """NLL of the paper's method with a network, from the experiment's results."""
    path = ROOT / "experiments/results/uci/uci.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    if name not in results:
        return None
    return float(results[name]["llpr"]["nll"][0])
