"""Rigidities by all parameters of a network: time, peak memory, agreement, and iterations.

``python -m benchmarks.whole_net rows width depth points form memory threads``, with the form as its
number in ``FORMS``, fits one network, predicts, and prints seconds and the peak of memory.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.workload import Workload, target, train, workload
from rigidities.any_regressor.curvature.forms import FORMS
from rigidities.any_regressor.curvature.matrix_free import MAX_ITERATIONS, MatrixFreeForm

INPUTS = 90
LITTLE = 1 << 26
"""Bytes of memory in which the tangents of the full size do not fit."""


def run(*, quick: bool = False) -> list[Row]:
    """Full sizes in the dual and the matrix-free form; each form against the dense one."""
    rows, width, million_width, points = (300, 16, 24, 20) if quick else (10_000, 256, 690, 200)
    large = measured(rows, width, depth=2, points=points)
    million = measured(rows, million_width, depth=3, points=points)
    matrix_free = measured(rows, width, depth=2, points=4, form="matrix-free")
    recomputed = measured(rows, width, depth=2, points=4, form="matrix-free", memory=LITTLE)
    return [
        at_most(
            f"{size(large)}: time",
            large["seconds"],
            300,
            "s",
            note=f"all parameters, {large['form']} form: {large['fit']:.1f} s of it for the fit; "
            f"stated tolerance {large['tolerance']:.1g}",
            **large,
        ),
        at_most("the same: peak memory of the process", gib(large), 4, "GiB"),
        for_information(
            f"{size(million)}: time",
            million["seconds"],
            "s",
            note=f"the {million['form']} form, peak {gib(million):.1f} GiB",
            **million,
        ),
        for_information(
            f"{size(matrix_free)}, matrix-free: time",
            matrix_free["seconds"],
            "s",
            note=f"where rows squared do not fit into memory: {matrix_free['fit']:.1f} s of it for "
            f"the fit, the rest for conjugate gradients to {matrix_free['tolerance']:g}; peak "
            f"{gib(matrix_free):.1f} GiB",
            **matrix_free,
        ),
        for_information(
            "the same, its tangents recomputed by every iteration: time",
            recomputed["seconds"],
            "s",
            note=f"where the tangents do not fit into memory either: memory={LITTLE:,} bytes; peak "
            f"{gib(recomputed):.1f} GiB",
            **recomputed,
        ),
        *agreement_rows(quick=quick),
        *preconditioner_rows(quick=quick),
    ]


def size(figures: dict[str, Any]) -> str:
    """What the row of a table is called by."""
    parameters, rows, points = figures["parameters"], figures["rows"], figures["points"]
    return f"{parameters:,} parameters, {rows:,} rows, {points} points"


def gib(figures: dict[str, Any]) -> float:
    """The peak of memory in GiB."""
    return float(figures["bytes"] / 2**30)


def agreement_rows(*, quick: bool) -> list[Row]:
    """Largest relative difference of each form's variances from the dense form's, in float64."""
    work = workload(200 if quick else 4000, width=8, inputs=20)
    model = work.model.double()
    x = work.x.double()
    y = work.y.double()
    test_x = torch.randn(50, 20, generator=torch.Generator().manual_seed(3)).double()
    dense = rg.PredictionRigidity(model, ridge=1e-2, form="dense").fit(x, y).set_scale(1.0)
    reference = dense.variance(test_x)
    table = []
    for form in ("dual", "matrix-free"):
        pr = rg.PredictionRigidity(model, ridge=1e-2, form=form).fit(x, y).set_scale(1.0)
        error = float((pr.variance(test_x) / reference - 1).abs().max())
        stated = max(pr.tolerance, 1e-12)
        table.append(at_most(f"{form} against dense variances", error, stated, "relative (stated)"))
    return table


class CountedForm(MatrixFreeForm):
    """A matrix-free form that counts its passes over the training rows."""

    passes = 0

    def product(self, vectors: Tensor) -> Tensor:
        """A v for several v."""
        type(self).passes += 1
        return super().product(vectors)


def preconditioner_rows(*, quick: bool) -> list[Row]:
    """Passes over the training rows that four variances take, with and without preconditioner."""
    work = deep_workload(200 if quick else 4000, 16 if quick else 64, depth=2)
    x = torch.randn(4, INPUTS, generator=torch.Generator().manual_seed(3))
    table = []
    for ridge in (1.0,) if quick else (100.0, 1.0, 0.01):
        pr = rg.PredictionRigidity(work.model, ridge=ridge, form="matrix-free")
        fit = pr.fit(work.x, work.y)._fitted()
        _, tangents = fit.differentiate(x)
        passes = []
        for preconditioned in (True, False):
            options = {field.name: getattr(fit.form, field.name) for field in fields(fit.form)}
            if not preconditioned:
                options["preconditioner"] = None
            CountedForm.passes = 0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of iterations that did not converge
                CountedForm(**options).quadratic(tangents)
            passes.append(CountedForm.passes)
        table.append(
            for_information(
                f"four variances, matrix-free, ridge {ridge:g}: passes over the training rows",
                passes[0],
                note=f"{passes[1]} without the preconditioner, where the iteration stops at "
                f"{MAX_ITERATIONS} at the latest",
                without=passes[1],
            )
        )
    return table


def measured(
    rows: int, width: int, *, depth: int, points: int, form: str = "auto", memory: int = 0
) -> dict[str, Any]:
    """The figures of one fit and prediction in a process of its own; memory 0 is the default."""
    return measured_apart(
        "benchmarks.whole_net", rows, width, depth, points, FORMS.index(form), memory
    )


def deep_workload(rows: int, width: int, depth: int) -> Workload:
    """A briefly trained network with so many hidden layers, and its rows."""
    torch.manual_seed(0)
    x = torch.randn(rows, INPUTS)
    layers: list[nn.Module] = [nn.Linear(INPUTS, width), nn.SiLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.SiLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    y = target(x, targets=1, seed=0) + 0.1 * torch.randn(rows, 1)
    work = Workload(model, x, y, 1024)
    train(work, epochs=2)
    return work


def main(
    rows: int, width: int, depth: int, points: int, form: int, memory: int, threads: int
) -> None:
    """Fit, predict, and print the figures."""
    torch.set_num_threads(threads)
    work = deep_workload(rows, width, depth)
    test_x = torch.randn(points, INPUTS)
    start = time.perf_counter()
    pr = rg.PredictionRigidity(work.model, ridge=1.0, form=FORMS[form], memory=memory or None).fit(
        work.x, work.y
    )
    fit_seconds = time.perf_counter() - start
    variance = pr.set_scale(1.0).variance(test_x)
    figures = {
        "parameters": sum(p.numel() for p in work.model.parameters()),
        "rows": rows,
        "points": len(variance),
        "form": pr.form,
        "tolerance": pr.tolerance,
        "fit": fit_seconds,
        "seconds": time.perf_counter() - start,
        "bytes": peak_bytes(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
