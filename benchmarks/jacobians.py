"""Per-sample derivatives in batches against a Python loop of backward passes.

A network of linear layers gives its Jacobian as factors, from which the rows can be written out; a
plain function goes through ``torch.func.vmap``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.frame.results import Row, at_least, for_information
from benchmarks.frame.timing import Timings, interleaved
from benchmarks.frame.workload import workload
from rigidities.any_regressor.derivatives.differentiation import (
    FEW_PARAMETERS,
    Differentiation,
    directed_rows,
    mapped_rows,
)
from rigidities.any_regressor.derivatives.regressor import Regressor

LOOP = "loop"


def run(*, quick: bool = False) -> list[Row]:
    """A small network, written out; a larger one as factors and written out."""
    rows, small_width, large_width, rounds = (200, 8, 8, 1) if quick else (10_000, 32, 256, 3)
    small = timed(rows, small_width, rounds=rounds)
    large = timed(rows, large_width, rounds=rounds)
    small_name = f"{rows:,} rows, 90-{small_width}-{small_width}-1"
    large_name = f"{rows:,} rows, 90-{large_width}-{large_width}-1"
    unit = "times faster than the loop"
    return [
        at_least(f"Jacobian of {small_name}", small.ratio(LOOP, "written"), 20, unit),
        at_least(
            f"Jacobian of {large_name} as factors",
            large.ratio(LOOP, "factors"),
            20,
            unit,
            note="the dual and the matrix-free form use the factors; no row is written out",
        ),
        for_information(
            f"Jacobian of {large_name}, written out", large.ratio(LOOP, "written"), unit
        ),
        for_information(
            f"a plain f(params, x), by torch.func.vmap, {small_name}",
            small.ratio(LOOP, "mapped"),
            unit,
        ),
        *(directed_row(parameters, rows, rounds=rounds) for parameters in (4, FEW_PARAMETERS)),
    ]


def directed_row(parameters: int, rows: int, *, rounds: int) -> Row:
    """A polynomial with so many parameters, in forward mode and mapped over the samples."""

    def polynomial(w: Tensor, x: Tensor) -> Tensor:
        return torch.stack([w[i] * x**i for i in range(parameters)]).sum(0)

    regressor = Regressor.of(polynomial, torch.ones(parameters))
    x = torch.rand(rows)
    timings = interleaved(
        {
            "directed": lambda: directed_rows(regressor, x),
            "mapped": lambda: mapped_rows(frozenset({0}), regressor, x),
        },
        rounds=5 * rounds,
    )
    return for_information(
        f"a formula with {parameters} parameters, {rows:,} rows, in forward mode",
        timings.ratio("directed", "mapped"),
        "times as long as mapped over the samples",
        note="forward mode is for formulas that cannot be mapped",
    )


def timed(rows: int, width: int, *, rounds: int) -> Timings:
    """Seconds of the loop, the factors, the whole Jacobian and the mapped function."""
    work = workload(rows, width=width)
    model, x = work.model, work.x
    layered = Differentiation.of(Regressor.of(model), x)
    params = dict(model.named_parameters())
    function = Regressor.of(lambda p, x: functional_call(model, p, (x,)), params)
    mapped = Differentiation.of(function, x)
    piece = max(16, (1 << 25) // (4 * len(function)))  # blocks of 32 MiB
    return interleaved(
        {
            LOOP: lambda: looped(model, x),
            "factors": lambda: streamed(layered, x, 1024, written=False),
            "written": lambda: streamed(layered, x, piece, written=True),
            "mapped": lambda: streamed(mapped, x, piece, written=True),
        },
        rounds=rounds,
        warmups=0,
    )


def looped(model: nn.Module, x: Tensor) -> None:
    """One backward pass per row, its gradients gathered as one vector."""
    parameters = list(model.parameters())
    for row in x.split(1):
        slopes = torch.autograd.grad(model(row).sum(), parameters)
        torch.cat([slope.reshape(-1) for slope in slopes])


def streamed(differentiation: Differentiation, x: Tensor, rows: int, *, written: bool) -> None:
    """The derivatives of all rows, so many rows at a time, as factors or written out."""
    for piece in x.split(rows):
        _, tangents = differentiation(piece)
        if written:
            tangents.matrix()
