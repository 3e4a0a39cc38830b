"""Rigidities by all parameters of a net: time, peak memory, agreement with the dense form.

Run as a module of its own it fits one net, predicts and prints seconds and peak memory (`main`).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.workload import Workload, target, train, workload


def run(*, quick: bool = False) -> list[Row]:
    """The dual form at full size, each form against the dense one on a small net."""
    rows, width, million = (300, 16, 24) if quick else (10_000, 256, 690)
    large = measured(rows, width, depth=2, points=20 if quick else 200)
    huge = measured(rows, million, depth=3, points=20 if quick else 200)
    free = measured(rows, width, depth=2, points=4, matrix_free=True)
    return [
        at_most(
            f"{large['parameters']:,} parameters, {rows:,} rows, {large['points']} points: time",
            large["seconds"],
            300,
            "s",
            note=f"all parameters, {large['form']} form: {large['fit']:.1f} s of it for the fit; "
            f"stated tolerance {large['tolerance']:.1g}",
            **large,
        ),
        at_most("the same: peak memory of the process", large["bytes"] / 2**30, 4, "GiB"),
        for_information(
            f"{huge['parameters']:,} parameters, {rows:,} rows, {huge['points']} points: time",
            huge["seconds"],
            "s",
            note=f"the {huge['form']} form, peak {huge['bytes'] / 2**30:.1f} GiB",
            **huge,
        ),
        for_information(
            f"{free['parameters']:,} parameters, {rows:,} rows, {free['points']} points, "
            "matrix-free: time",
            free["seconds"],
            "s",
            note=f"where rows squared do not fit into memory: {free['fit']:.1f} s of it for the "
            f"fit, the rest for conjugate gradients to {free['tolerance']:g}; peak "
            f"{free['bytes'] / 2**30:.1f} GiB",
            **free,
        ),
        *agreement(quick=quick),
    ]


def agreement(*, quick: bool) -> list[Row]:
    """Largest relative difference of each form's variances from the dense form's."""
    work = workload(200 if quick else 4000, width=8, inputs=20)
    asked = torch.randn(50, 20, generator=torch.Generator().manual_seed(3))
    model = work.model.double()
    x, y, asked = work.x.double(), work.y.double(), asked.double()
    forms = {
        form: rg.PredictionRigidity(model, ridge=1e-2, form=form).fit(x, y)
        for form in ("dense", "dual", "matrix-free")
    }
    reference = forms.pop("dense").variance(asked)
    rows = []
    for name, pr in forms.items():
        error = float((pr.variance(asked) / reference - 1).abs().max())
        stated = max(pr.tolerance, 1e-12)
        rows.append(at_most(f"{name} against dense variances", error, stated, "relative (stated)"))
    return rows


def measured(
    rows: int, width: int, *, depth: int, points: int, matrix_free: bool = False
) -> dict[str, Any]:
    """One fit and prediction in a process of its own."""
    sizes = rows, width, depth, points, int(matrix_free)
    return measured_apart("benchmarks.whole_net", *sizes)


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
    pr = rg.PredictionRigidity(work.model, ridge=1.0, form=form).fit(work.x, work.y)
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
