"""Fits and predictions on a CUDA device: small networks, and a transformer of a billion parameters.

Rows lie on the device. As in ``python -m benchmarks speed`` fits come from each kind of source that
is used there, and times are ratios to the bare pass over the same source, beside what no code could
go below, measured in the same run. ``--quick`` takes tiny sizes, and the CPU where there is no such
device.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame import dense
from benchmarks.frame.fits import (
    LIST,
    SHUFFLED,
    TENSORS,
    Source,
    fit_rows,
    fit_tasks,
    fitted,
    naive_loop,
    on_device,
    source,
)
from benchmarks.frame.limits import reading, whole_product
from benchmarks.frame.results import Row, at_most, not_run
from benchmarks.frame.timing import Task, interleaved
from benchmarks.frame.workload import Workload, target
from benchmarks.speed import bare_row, calibrated, called, prediction_row

SINGLE = torch.float32
HALF = torch.bfloat16
INPUTS = 90
VOCABULARY = 1_024
KINDS = (LIST, TENSORS, SHUFFLED)
"""A loader that collates rows of the device one by one is left out: it takes far too long."""


@dataclass(frozen=True)
class Case:
    """A ReLU network with untrained weights, its rows, and the figures to reach.

    Attributes:
        width: The units of each hidden layer.
        layers: The number of hidden layers.
        dtype: Of the weights and the rows.
        batch: The rows of a batch.
        fits: Bare passes of a fit by precision, None where nothing is asked.
        predictions: Bare passes of a prediction by task.
        rows: The number of rows.
        rounds: How often each task is timed.
    """

    width: int
    layers: int
    dtype: torch.dtype
    batch: int
    fits: Mapping[str, float | None]
    predictions: Mapping[str, float] = field(default_factory=dict)
    rows: int = 2**18
    rounds: int = 9

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{INPUTS}-{self.width}x{self.layers}-1 {kind}, batches of {self.batch:,}"

    def tiny(self) -> Case:
        """The same with a small network and few rows."""
        return replace(self, width=16, batch=self.batch // 128, rows=512, rounds=2)


def in_double(limit: float) -> dict[str, float | None]:
    """A figure for fits in double precision; those in mixed precision stand beside them."""
    return {"double": limit, "mixed": None}


CASES = [
    Case(256, 2, SINGLE, 16_384, in_double(3.5), {"freeze()": 2.0}),
    Case(256, 2, SINGLE, 1_024, in_double(2.0), {"freeze()": 2.0}),
    Case(1024, 3, SINGLE, 16_384, in_double(1.55), {"freeze()": 1.35}),
    Case(1024, 3, SINGLE, 1_024, in_double(1.7), {"freeze()": 1.8, "uq(x)": 2.5}),
    Case(1024, 3, HALF, 16_384, {"mixed": 3.0}, {"freeze()": 1.9}),
    Case(4096, 4, SINGLE, 8_192, in_double(1.25), {"freeze()": 1.22}, rounds=5),
    Case(4096, 4, HALF, 8_192, {"mixed": 2.2}, {"freeze()": 1.6}, rounds=7),
]


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer encoder over tokens, and of its rows."""

    layers: int = 24
    width: int = 1_856
    heads: int = 29
    tokens: int = 256
    rows: int = 512
    batch: int = 32
    rounds: int = 3


BILLION = Shape()
TINY = Shape(layers=2, width=32, heads=4, tokens=8, rows=64, batch=16, rounds=2)
TRANSFORMER_LIMITS = {"mixed": 1.1}
"""Bare passes of a fit."""
MEMORY_LIMIT = 1.1
"""Peak memory of a fit over that of a bare pass."""


def run(*, quick: bool = False, device: str | None = None) -> list[Row]:
    """All cases on the device, by default CUDA."""
    has_cuda = torch.cuda.is_available()
    if device is None and not has_cuda and not quick:
        raise SystemExit(
            "The benchmark gpu needs a CUDA device, and torch.cuda.is_available() says there is "
            "none. Run it where there is one, or see that it runs with --quick."
        )
    if device is None:
        device = "cuda" if has_cuda else "cpu"
    place = torch.device(device)
    cases = [case.tiny() for case in CASES[::4]] if quick else CASES
    table = []
    for case in cases:
        table += case_rows(case, place)
        release(place)
    return table + transformer_rows(TINY if quick else BILLION, place)


def case_rows(case: Case, device: torch.device) -> list[Row]:
    """A network's fits and predictions, and the error of half precision."""
    work = case_workload(case, device)
    table = timed_rows(str(case), work, KINDS, case.fits, case.predictions, rounds=case.rounds)
    if case.dtype == HALF:
        table.append(error_row(case, work))
    return table


def timed_rows(
    name: str,
    work: Workload,
    kinds: Sequence[str],
    fits: Mapping[str, float | None],
    predictions: Mapping[str, float],
    *,
    rounds: int,
) -> list[Row]:
    """Fits and predictions in bare passes, beside what they take at least."""
    first_precision = next(iter(fits))
    uq = calibrated(work, batch_size=work.batch_size, precision=first_precision)
    predicting = prediction_tasks(work, uq)
    tasks = fit_tasks(work, kinds, fits) | predicting | whole_product(work) | reading(work)
    timings = interleaved(on_device(tasks, work.x.device), rounds=rounds)
    table = [bare_row(name, timings, kind) for kind in kinds]
    table += fit_rows(name, timings, kinds, fits)
    for task in predicting:
        limit = predictions.get(task)
        table.append(prediction_row(task, name, timings, f"bare, {LIST}", limit))
    return table


def prediction_tasks(work: Workload, uq: rg.LastLayerRigidity) -> dict[str, Task]:
    """Two ways to predict all rows."""
    frozen = uq.freeze()
    return {
        "uq(x)": lambda: consumed(uq, work),
        "freeze()": lambda: called(frozen, work),
    }


def consumed(uq: rg.LastLayerRigidity, work: Workload) -> None:
    """``uq(x)`` for all batches; no answer is kept, so that memory does not grow."""
    for x, _ in work.batches():
        uq(x)


def case_workload(case: Case, device: torch.device) -> Workload:
    """The network and its rows on the device."""
    torch.manual_seed(0)
    widths = [INPUTS] + [case.width] * case.layers
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(case.width, 1)).to(device, case.dtype).eval()
    x = torch.randn(case.rows, INPUTS)
    y = target(x, targets=1, seed=0) + 0.1 * torch.randn(len(x), 1)
    return Workload(model, x.to(device, case.dtype), y.to(device, case.dtype), case.batch)


def error_row(case: Case, work: Workload) -> Row:
    """The mixed path's error beside the one that rounding the features has brought before it."""
    uq = calibrated(work, batch_size=work.batch_size, precision="auto")
    valid = len(work.x) // 10
    train = replace(work, x=work.x[:-valid], y=work.y[:-valid])
    single_train = replace(train, model=copy.deepcopy(work.model).float(), x=train.x.float())
    rows = work.x[-valid:][: work.batch_size]
    variance = uq.predict(rows).epistemic.double().flatten()
    scale_squared = uq.scale.to(rows.device).double() ** 2
    # The same half-precision features in float64, and features of a model in single precision.
    same_features = scale_squared * dense_quadratic(train, rows, uq.ridge)
    single_features = scale_squared * dense_quadratic(single_train, rows.float(), uq.ridge)
    errors = (variance / same_features - 1).abs()
    rounding = (same_features / single_features - 1).abs()
    return at_most(
        f"variance of the mixed path less float64's on the same features, {case}: median error",
        float(errors.median()),
        float(f"{float(rounding.median()):.2g}"),
        "relative, which rounding the features to half precision brings",
        largest=float(errors.max()),
        largest_brought=float(rounding.max()),
    )


def dense_quadratic(work: Workload, rows: Tensor, ridge: float) -> Tensor:
    """q = f^T (G + ridge I)^-1 f in float64 for rows, (N,), from the Gram of the workload."""
    data = Source((work.x, work.y), work.batch_size)
    values, vectors = torch.linalg.eigh(naive_loop(work.model, data, torch.float64))
    features = dense.features(work, rows)  # (N, D + 1)
    return (features @ vectors).square() @ (1 / (values.clamp(min=0) + ridge))


class TokenMean(nn.Module):
    """The mean over the tokens, (N, T, D) -> (N, D)."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(1)


def transformer(shape: Shape, device: torch.device) -> Workload:
    """An encoder with a regression head in half precision, and random tokens."""
    torch.manual_seed(0)
    width = shape.width
    layer = nn.TransformerEncoderLayer(
        d_model=width,
        nhead=shape.heads,
        dim_feedforward=4 * width,
        dropout=0.0,
        batch_first=True,
        norm_first=True,
        device=device,
        dtype=HALF,
    )
    encoder = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
    embedding = nn.Embedding(VOCABULARY, width, device=device, dtype=HALF)
    head = nn.Linear(width, 1, device=device, dtype=HALF)
    model = nn.Sequential(embedding, encoder, TokenMean(), head).eval()
    tokens = torch.randint(VOCABULARY, (shape.rows, shape.tokens), device=device)
    y = torch.randn(shape.rows, 1, device=device, dtype=HALF)
    return Workload(model, tokens, y, shape.batch)


def transformer_rows(shape: Shape, device: torch.device) -> list[Row]:
    """Times of a transformer, and the peak of memory."""
    work = transformer(shape, device)
    count = sum(parameter.numel() for parameter in work.model.parameters())
    name = f"transformer of {count / 1e9:.2f} billion parameters bfloat16, "
    name += f"batches of {shape.batch} x {shape.tokens} tokens"
    memory = memory_row(name, work, device)  # before anything else lies in memory
    times = timed_rows(name, work, [LIST], TRANSFORMER_LIMITS, {}, rounds=shape.rounds)
    return [*times, memory]


def memory_row(name: str, work: Workload, device: torch.device) -> Row:
    """The peak of a fit over that of a bare pass, both with the model and the rows in it."""
    title = f"peak memory of a fit, {name}"
    if device.type != "cuda":
        return not_run(title, "only CUDA counts its memory")
    data = source(LIST, work.x, work.y, work.batch_size)
    bare = peak(work.bare_pass, device)
    fit = peak(lambda: fitted(work.model, data), device)
    return at_most(title, fit / bare, MEMORY_LIMIT, "of a bare pass", bytes=fit, bare_bytes=bare)


def peak(task: Task, device: torch.device) -> int:
    """Bytes allocated at most while it runs."""
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    task()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def release(device: torch.device) -> None:
    """Give memory that is no longer used back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
