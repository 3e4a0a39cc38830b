"""Learning from a stream: coverage under drift, the memory of long updates, what rounding leaves.

Run as a module of its own (``python -m benchmarks.stream seconds width threads``) it adds, forgets
and calibrates for so many seconds and prints how its resident memory went.
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
from torch import nn

import rigidities as rg
from benchmarks.frame.apart import measured_apart
from benchmarks.frame.results import Row, at_least, at_most

EXAMPLE = Path(__file__).parents[1] / "examples" / "stream.py"
ROWS = 32


def run(*, quick: bool = False) -> list[Row]:
    """Five streams of an hour, ten minutes of updates, a hundred thousand pairs of them."""
    seeds, minutes, seconds, pairs = (1, 5, 2, 50) if quick else (5, 60, 600, 100_000)
    width = 32 if quick else 256
    with ThreadPoolExecutor() as beside:  # ten minutes in a process of its own
        memory = beside.submit(measured_apart, "benchmarks.stream", seconds, width)
        streams = [row for seed in range(seeds) for row in coverage_rows(seed, minutes)]
        rounding = rounding_row(pairs, width)
        return [*streams, memory_row(seconds, width, memory.result()), rounding]


def coverage_rows(seed: int, minutes: int) -> list[Row]:
    """The example's stream, all of it and tenth by tenth."""
    example = runpy.run_path(str(EXAMPLE))
    start = time.process_time()
    rows = example["run"](seed, minutes, say=lambda _: None)
    cpu = time.process_time() - start
    tenths = [part.mean(0).tolist() for part in rows.tensor_split(10)]
    inside, fixed = float(rows[:, 1].mean()), float(rows[:, 3].mean())
    known = {
        "seed": seed,
        "inside": inside,
        "tenths": [tenth[1] for tenth in tenths],
        "widths": [tenth[2] for tenth in tenths],
        "fixed": fixed,
        "fixed_tenths": [tenth[3] for tenth in tenths],
        "rows": len(rows),
        "cpu_seconds": cpu,
    }
    name = f"stream of {minutes} minutes, seed {seed}"
    off = max(abs(tenth[1] - 0.885) for tenth in tenths)  # 80 to 97 %
    return [
        at_most(f"{name}: 90 % intervals, off 90 %", abs(inside - 0.9), 0.03, **known),
        at_most(f"{name}: worst tenth, off 88.5 %", off, 0.085),
        at_least(f"{name}: fixed error bars, off 90 %", abs(fixed - 0.9), 0.1),
        at_most(f"{name}: CPU time", cpu, 60, "s"),
    ]


def memory_row(seconds: int, width: int, found: dict[str, Any]) -> Row:
    """Growth of the resident memory after the first fifth."""
    work = f"growth of resident memory, {seconds} s of updates, width {width}"
    return at_most(work, found["slope"], 0.5, "MiB a minute", **found)


def rounding_row(pairs: int, width: int) -> Row:
    """The Gram after many rows came and went, against a fresh one of the rows held."""
    torch.manual_seed(0)
    kept, pool = torch.randn(4 * width, width), torch.randn(64, ROWS, width)
    gram = rg.Gram(width)
    gram.update(kept)
    fresh = gram.matrix
    for pair in range(pairs):
        rows = pool[pair % len(pool)] * (1 + pair % 7)
        gram.update(rows)
        gram.downdate(rows)
    off = torch.linalg.matrix_norm(gram.matrix - fresh, 2)
    posts = [torch.linalg.inv(one + torch.eye(width)) for one in (gram.matrix, fresh)]
    variance, exact = ((kept[:64].double() @ one * kept[:64]).sum(1) for one in posts)
    return at_most(
        f"Gram after {pairs:,} pairs of additions and removals of {ROWS} rows, relative error",
        float(off / torch.linalg.matrix_norm(fresh, 2)),
        1e-9,
        variance=float((variance / exact - 1).abs().max()),
    )


def main(seconds: int, width: int, threads: int) -> None:
    """Rows come and go; the resident memory is taken down after each calibration."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, 1))
    pool = torch.randn(8192, 8)
    pool = pool, torch.sin(pool[:, :1]) + 0.1 * torch.randn(8192, 1)
    uq = rg.LastLayerRigidity(net).fit(tuple(part[:4096] for part in pool))
    start, step, places = time.monotonic(), 0, 6144 // ROWS
    seen: list[tuple[float, float]] = []
    while (now := time.monotonic() - start) < seconds or len(seen) < 5:
        first, last = step % places, (step + 4096 // ROWS) % places
        for change, place in ((uq.partial_fit, last), (uq.forget, first)):
            change(tuple(part[place * ROWS : (place + 1) * ROWS] for part in pool))
        step += 1
        if step % 20 == 0:
            uq.calibrate(tuple(part[6144:] for part in pool), criterion="nll")
            uq.predict(pool[0][:ROWS]).interval(0.9)
            seen.append((now / 60, resident()))
    print(json.dumps({"slope": slope(seen), "pairs": step, "seen": seen[:: len(seen) // 5]}))


def slope(seen: list[tuple[float, float]]) -> float:
    """By least squares, in MiB a minute, without the first fifth."""
    minutes, memory = torch.tensor(seen[len(seen) // 5 :], dtype=torch.float64).T
    minutes = minutes - minutes.mean()
    return float((minutes * memory).sum() / minutes.square().sum())


def resident() -> float:
    """Resident memory in MiB."""
    import psutil

    return float(psutil.Process().memory_info().rss / 2**20)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
