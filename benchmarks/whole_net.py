"""Rigidities by all parameters of a net: time, peak memory, agreement with the dense form."""

from __future__ import annotations

from typing import Any

import torch

import rigidities as rg
from benchmarks.frame.apart import measured_apart
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.workload import workload


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
    return measured_apart("benchmarks.whole_net_fit", *sizes)
