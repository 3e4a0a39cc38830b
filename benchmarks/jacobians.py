"""Per-sample derivatives in batches against a Python loop of backward passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.frame.results import Row, at_least, for_information
from benchmarks.frame.timing import Ratio, Timings, interleaved
from benchmarks.frame.workload import workload
from rigidities.any_regressor.derivatives.differentiation import Differentiation
from rigidities.any_regressor.derivatives.regressor import Regressor

BASE = "loop"


def run(*, quick: bool = False) -> list[Row]:
    """A small net, written out; the larger one as factors and written out."""
    rows, sizes = (200, (8, 8)) if quick else (10_000, (32, 256))
    rounds = 1 if quick else 3
    small, large = (timed(rows, width, rounds=rounds) for width in sizes)
    name = f"{rows:,} rows, 90-{{0}}-{{0}}-1".format
    loop = "times faster than the loop"
    return [
        at_least(f"Jacobian of {name(sizes[0])}", _gain(small, "written"), 20, loop),
        at_least(
            f"Jacobian of {name(sizes[1])} as factors",
            _gain(large, "factors"),
            20,
            loop,
            note="what the dual and the matrix-free form take; no row is written out",
        ),
        for_information(
            f"Jacobian of {name(sizes[1])}, written out", _gain(large, "written"), loop
        ),
        for_information(
            f"a plain f(params, x), by torch.func.vmap, {name(sizes[0])}",
            _gain(small, "mapped"),
            loop,
        ),
    ]


def _gain(timings: Timings, task: str) -> Ratio:
    return timings.ratio(BASE, task)


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
            BASE: lambda: looped(model, x),
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
    """The rows in pieces."""
    for piece in x.split(rows):
        _, tangents = differentiation(piece)
        if written:
            tangents.matrix()
