"""Learning from a stream: coverage under drift, the memory of long updates, what rounding leaves.

Run as a module (``python -m benchmarks.stream seconds width threads``) it adds, forgets and
calibrates for so many seconds and prints how its resident memory went.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.apart import measured_apart
from benchmarks.frame.results import Row, at_least, at_most

EXAMPLE = Path(__file__).parents[1] / "examples" / "stream.py"
INSIDE, WIDTH, FIXED_INSIDE = 1, 2, 3
"""Columns of the example's rows: in the interval, its width, in the interval of fixed bars."""
ROWS = 32
"""Rows that come or go in one update."""
WINDOW, CIRCLE, POOL = 4096, 6144, 8192
"""Rows of the fit, rows that come and go in turn, and all rows; the last ones calibrate."""


def run(*, quick: bool = False) -> list[Row]:
    """Five streams of an hour, ten minutes of updates, a hundred thousand pairs of them."""
    seeds, minutes, seconds, pairs = (1, 5, 2, 50) if quick else (5, 60, 600, 100_000)
    width = 32 if quick else 256
    table = []
    # The updates have a process of their own, in which they go on for ten minutes.
    with ThreadPoolExecutor() as threads:
        updates = threads.submit(measured_apart, "benchmarks.stream", seconds, width)
        for seed in range(seeds):
            table += coverage_rows(seed, minutes)
        rounding = rounding_row(pairs, width)
        return [*table, memory_row(seconds, width, updates.result()), rounding]


def coverage_rows(seed: int, minutes: int) -> list[Row]:
    """The example's stream, all of it and tenth by tenth."""
    example = runpy.run_path(str(EXAMPLE))
    start = time.process_time()
    rows = example["run"](seed, minutes, say=lambda _: None)
    cpu_seconds = time.process_time() - start
    inside, fixed = float(rows[:, INSIDE].mean()), float(rows[:, FIXED_INSIDE].mean())
    tenths = torch.stack([tenth.mean(0) for tenth in rows.tensor_split(10)])
    inside_tenths = tenths[:, INSIDE].tolist()
    worst = max(abs(share - 0.885) for share in inside_tenths)  # 80 to 97 %
    name = f"stream of {minutes} minutes, seed {seed}"
    return [
        at_most(
            f"{name}: 90 % intervals, off 90 %",
            abs(inside - 0.9),
            0.03,
            seed=seed,
            inside=inside,
            tenths=inside_tenths,
            widths=tenths[:, WIDTH].tolist(),
            fixed=fixed,
            fixed_tenths=tenths[:, FIXED_INSIDE].tolist(),
            rows=len(rows),
            cpu_seconds=cpu_seconds,
        ),
        at_most(f"{name}: worst tenth, off 88.5 %", worst, 0.085),
        at_least(f"{name}: fixed error bars, off 90 %", abs(fixed - 0.9), 0.1),
        at_most(f"{name}: CPU time", cpu_seconds, 60, "s"),
    ]


def memory_row(seconds: int, width: int, figures: dict[str, Any]) -> Row:
    """Growth of the resident memory after the first fifth."""
    work = f"growth of resident memory, {seconds} s of updates, width {width}"
    return at_most(work, figures["slope"], 0.5, "MiB a minute", **figures)


def rounding_row(pairs: int, width: int) -> Row:
    """The Gram after many rows came and went, against a fresh one of the rows that stay."""
    torch.manual_seed(0)
    staying = torch.randn(4 * width, width)
    passing = torch.randn(64, ROWS, width)
    gram = rg.Gram(width)
    gram.update(staying)
    fresh = gram.matrix
    for pair in range(pairs):
        rows = passing[pair % len(passing)] * (1 + pair % 7)
        gram.update(rows)
        gram.downdate(rows)
    error = torch.linalg.matrix_norm(gram.matrix - fresh, 2)
    variance = ridge_variance(gram.matrix, staying[:64])
    exact = ridge_variance(fresh, staying[:64])
    return at_most(
        f"Gram after {pairs:,} pairs of additions and removals of {ROWS} rows, relative error",
        float(error / torch.linalg.matrix_norm(fresh, 2)),
        1e-9,
        variance=float((variance / exact - 1).abs().max()),
    )


def ridge_variance(gram: Tensor, rows: Tensor) -> Tensor:
    """f^T (G + I)^-1 f for rows (N, D), in float64."""
    inverse = torch.linalg.inv(gram + torch.eye(len(gram)))
    return (rows.double() @ inverse * rows).sum(1)


def main(seconds: int, width: int, threads: int) -> None:
    """Rows come and go; the resident memory is taken down after each calibration."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, 1))
    x = torch.randn(POOL, 8)
    y = torch.sin(x[:, :1]) + 0.1 * torch.randn(POOL, 1)

    def update_rows(place: int) -> tuple[Tensor, Tensor]:
        rows = slice(place * ROWS, (place + 1) * ROWS)
        return x[rows], y[rows]

    uq = rg.LastLayerRigidity(model).fit((x[:WINDOW], y[:WINDOW]))
    places = CIRCLE // ROWS
    memory: list[tuple[float, float]] = []  # minutes, and MiB at that time
    start = time.monotonic()
    elapsed = 0.0
    step = 0
    while elapsed < seconds or len(memory) < 5:
        uq.partial_fit(update_rows((step + WINDOW // ROWS) % places))
        uq.forget(update_rows(step % places))
        step += 1
        if step % 20 == 0:
            uq.calibrate((x[CIRCLE:], y[CIRCLE:]), method="paper")
            uq.predict(x[:ROWS]).interval(0.9)
            memory.append((elapsed / 60, resident_mib()))
        elapsed = time.monotonic() - start
    some = memory[:: len(memory) // 5]
    print(json.dumps({"slope": slope(memory), "pairs": step, "seen": some}))


def slope(memory: list[tuple[float, float]]) -> float:
    """By least squares, in MiB a minute, without the first fifth."""
    minutes, mib = torch.tensor(memory[len(memory) // 5 :], dtype=torch.float64).T
    minutes = minutes - minutes.mean()
    return float((minutes * mib).sum() / minutes.square().sum())


def resident_mib() -> float:
    """Resident memory of this process in MiB."""
    import psutil

    return float(psutil.Process().memory_info().rss / 2**20)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
