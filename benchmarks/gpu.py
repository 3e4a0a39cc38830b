"""Fits and predictions on a CUDA device, from small nets to a transformer of a billion parameters.

Rows lie on the device. As in ``python -m benchmarks speed`` fits come from each kind of source that
is used there, and times are ratios to the bare pass over the same source, beside what no code could
go below, measured in the same run. ``--quick`` takes tiny sizes, and the CPU where there is no such
device.
"""

from __future__ import annotations

import copy
import gc
from collections import deque
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
    ratio_row,
    source,
)
from benchmarks.frame.limits import least_predict, read, reading, whole_product
from benchmarks.frame.results import Row, at_most, not_run
from benchmarks.frame.timing import Task, interleaved
from benchmarks.frame.workload import Workload, target
from benchmarks.speed import bare_row, calibrated, called

SINGLE, HALF = torch.float32, torch.bfloat16
KINDS = (LIST, TENSORS, SHUFFLED)
"""A loader that collates rows of the device one by one is left out: nobody waits for it twice."""


@dataclass(frozen=True)
class Case:
    """A ReLU net of default weights, how its rows come, and the figures to reach.

    ``fits`` are bare passes by precision, None where nothing is asked; ``predictions`` by task.
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
        return f"90-{self.width}x{self.layers}-1 {kind}, batches of {self.batch:,}"

    def tiny(self) -> Case:
        """The same in no time."""
        return replace(self, width=16, batch=self.batch // 128, rows=512, rounds=2)


def in_double(must: float) -> dict[str, float | None]:
    """A figure for fits in double precision; those in mixed precision stand beside them."""
    return {"double": must, "mixed": None}


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
    """Of a transformer encoder over tokens, and how its rows come."""

    layers: int = 24
    width: int = 1_856
    heads: int = 29
    tokens: int = 256
    rows: int = 512
    batch: int = 32
    rounds: int = 3


BILLION, TINY = Shape(), Shape(2, 32, 4, 8, rows=64, batch=16, rounds=2)
BILLIONS_MUST = 1.1
MEMORY = 1.1


def run(*, quick: bool = False, device: str | None = None) -> list[Row]:
    """All cases on the device, by default CUDA."""
    there = torch.cuda.is_available()
    if device is None and not (there or quick):
        raise SystemExit(
            "The benchmark gpu needs a CUDA device, and torch.cuda.is_available() says there is "
            "none. Run it where there is one, or see that it runs with --quick."
        )
    place = torch.device(device or ("cuda" if there else "cpu"))
    cases = [case.tiny() for case in CASES[::4]] if quick else CASES
    rows = []
    for case in cases:
        rows += case_rows(case, place)
        release(place)
    return rows + transformer_rows(TINY if quick else BILLION, place)


def case_rows(case: Case, device: torch.device) -> list[Row]:
    """A net's fits and predictions, and the error of half precision."""
    work = built(case, device)
    rows = timed_rows(str(case), work, KINDS, case.fits, case.predictions, rounds=case.rounds)
    if case.dtype == HALF:
        rows += error_rows(case, work)
    return rows


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
    uq = calibrated(work, batch_size=work.batch_size, precision=next(iter(fits)))
    predicting = prediction_tasks(work, uq)
    tasks = fit_tasks(work, kinds, fits) | predicting | whole_product(work) | reading(work)
    timings = interleaved(on_device(tasks, work.x.device), rounds=rounds)
    found = [bare_row(name, timings, kind) for kind in kinds] + fit_rows(name, timings, kinds, fits)
    bare = f"bare, {LIST}"
    for task in predicting:
        row = ratio_row(task, name, timings, bare, predictions.get(task))
        found.append(row.beside(flops=least_predict(timings, bare), bytes=read(timings, bare)))
    return found


def prediction_tasks(work: Workload, uq: rg.LastLayerRigidity) -> dict[str, Task]:
    """Two ways to predict all rows."""
    frozen = uq.freeze()
    return {
        "uq(x)": lambda: deque(map(uq, (x for x, _ in work.batches())), maxlen=0),
        "freeze()": lambda: called(frozen, work),
    }


def built(case: Case, device: torch.device) -> Workload:
    """The net and its rows on the device."""
    torch.manual_seed(0)
    widths = [90, *[case.width] * case.layers]
    hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(case.width, 1)).to(device, case.dtype).eval()
    x = torch.randn(case.rows, 90)
    y = target(x, targets=1, seed=0) + 0.1 * torch.randn(len(x), 1)
    return Workload(model, x.to(device, case.dtype), y.to(device, case.dtype), case.batch)


def error_rows(case: Case, work: Workload) -> list[Row]:
    """The mixed path's error beside the one that rounding the features has brought before it."""
    uq = calibrated(work, batch_size=work.batch_size, precision="auto")
    valid = len(work.x) // 10
    known = replace(work, x=work.x[:-valid], y=work.y[:-valid])
    exact = replace(known, model=copy.deepcopy(work.model).float(), x=known.x.float())
    rows = work.x[-valid:][: work.batch_size]
    found = uq.predict(rows, batch_size=work.batch_size).epistemic.double().flatten()
    same, single = (
        uq.scale.to(rows.device).double() ** 2 * dense_quadratic(one, rows.to(one.x), uq.ridge)
        for one in (known, exact)
    )
    errors, brought = (found / same - 1).abs(), (same / single - 1).abs()
    return [
        at_most(
            f"variance of the mixed path less float64's on the same features, {case}: median error",
            float(errors.median()),
            float(f"{float(brought.median()):.2g}"),
            "relative, which rounding the features to half precision brings",
            largest=float(errors.max()),
            largest_brought=float(brought.max()),
        )
    ]


def dense_quadratic(work: Workload, rows: Tensor, ridge: float) -> Tensor:
    """q = f^T (G + ridge I)^-1 f in float64 for rows, (N,), from the Gram of the workload."""
    data = Source((work.x, work.y), work.batch_size)
    values, vectors = torch.linalg.eigh(naive_loop(work.model, data, torch.float64))
    features = dense.features(work, rows)  # (N, D + 1)
    return (features @ vectors).square() @ (1 / (values.clamp(min=0) + ridge))


class Mean(nn.Module):
    """Over the tokens."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(1)


def transformer(shape: Shape, device: torch.device) -> Workload:
    """An encoder with a regression head in half precision, and random tokens."""
    torch.manual_seed(0)
    there = {"device": device, "dtype": HALF}
    layer = nn.TransformerEncoderLayer(
        shape.width, shape.heads, 4 * shape.width, 0.0, batch_first=True, norm_first=True, **there
    )
    encoder = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
    embedding, head = nn.Embedding(1_024, shape.width, **there), nn.Linear(shape.width, 1, **there)
    model = nn.Sequential(embedding, encoder, Mean(), head).eval()
    tokens = torch.randint(1_024, (shape.rows, shape.tokens), device=device)
    return Workload(model, tokens, torch.randn(shape.rows, 1, **there), shape.batch)


def transformer_rows(shape: Shape, device: torch.device) -> list[Row]:
    """Memory first, before anything else holds some, then the times."""
    work = transformer(shape, device)
    count = sum(parameter.numel() for parameter in work.model.parameters())
    name = f"transformer of {count / 1e9:.2f} billion parameters bfloat16, "
    name += f"batches of {shape.batch} x {shape.tokens} tokens"
    memory = memory_row(name, work, device)
    fits = {"mixed": BILLIONS_MUST}
    return [*timed_rows(name, work, [LIST], fits, {}, rounds=shape.rounds), memory]


def memory_row(name: str, work: Workload, device: torch.device) -> Row:
    """The peak of a fit over that of a bare pass, both with the model and the rows in it."""
    text = f"peak memory of a fit, {name}"
    if device.type != "cuda":
        return not_run(text, "only CUDA counts its memory")
    data = source(LIST, work.x, work.y, work.batch_size)
    bare = peak(work.bare_pass, device)
    fit = peak(lambda: fitted(work.model, data), device)
    return at_most(text, fit / bare, MEMORY, "of a bare pass", bytes=fit, bare_bytes=bare)


def peak(task: Task, device: torch.device) -> int:
    """Bytes allocated at most while it runs."""
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    task()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def release(device: torch.device) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
