"""One all-parameter rigidity in a process of its own; prints seconds and peak memory."""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

import rigidities as rg
from benchmarks.frame.workload import Workload, target, train
from benchmarks.streamed_fit import peak_bytes

RIDGE = 1.0


def net(rows: int, width: int, depth: int) -> Workload:
    """A briefly trained 90-width-...-1 net and its rows."""
    torch.manual_seed(0)
    x = torch.randn(rows, 90)
    layers: list[nn.Module] = [nn.Linear(90, width), nn.SiLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.SiLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    y = target(x, targets=1, seed=0) + 0.1 * torch.randn(rows, 1)
    work = Workload(model, x, y, 1024)
    train(work, epochs=2)
    return work


def main(rows: int, width: int, depth: int, points: int, matrix_free: int, threads: int) -> None:
    """Fit, predict, report."""
    torch.set_num_threads(threads)
    work = net(rows, width, depth)
    asked = torch.randn(points, 90)
    start = time.perf_counter()
    form = "matrix-free" if matrix_free else "auto"
    pr = rg.PredictionRigidity(work.model, ridge=RIDGE, form=form).fit(work.x, work.y)
    fit = time.perf_counter() - start
    variance = pr.variance(asked)
    result = {
        "parameters": sum(p.numel() for p in work.model.parameters()),
        "rows": rows,
        "points": len(variance),
        "form": pr.form,
        "tolerance": pr.tolerance,
        "fit": fit,
        "seconds": time.perf_counter() - start,
        "bytes": peak_bytes(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
