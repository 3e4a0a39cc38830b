"""Fits and predictions on a CUDA device, from small nets to a transformer of a billion parameters.

Rows lie on the device, as in ``python -m benchmarks speed`` times are ratios to the bare pass. The
rates of the card's products and its bandwidth are measured in the same run; from them follows what
no code could go below. ``--quick`` takes tiny sizes, and the CPU where there is no such device.
"""

from __future__ import annotations

import copy
import gc
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import Ratio, Task, Timings, clocked, interleaved
from benchmarks.frame.workload import Workload, target
from benchmarks.speed import PASSES, calibrated, called

DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A ReLU net of default weights, how its rows come, and the figures to reach by task.

    Where ``factor`` is above one, so many times the rows are fitted too: the difference is the cost
    of a row without that of a call.
    """

    width: int
    layers: int
    dtype: torch.dtype
    batch: int
    musts: Mapping[str, float] = field(default_factory=dict)
    rows: int = 2**18
    rounds: int = 15
    factor: int = 1

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"90-{self.width}x{self.layers}-1 {kind}, batches of {self.batch:,}"

    def tiny(self) -> Case:
        """The same in no time."""
        return replace(self, width=16, batch=self.batch // 128, rows=512, rounds=2)


CASES = [
    Case(256, 2, SINGLE, 16_384, {"fit": 2.5, "freeze()": 2.0}, factor=4),
    Case(256, 2, SINGLE, 1_024, {"fit": 1.8, "freeze()": 2.0}, factor=4),
    Case(1024, 3, SINGLE, 16_384, {"fit": 1.4, "freeze()": 1.35}, factor=4),
    Case(1024, 3, SINGLE, 1_024, {"fit": 1.8, "freeze()": 1.8, "uq(x)": 2.5}),
    Case(1024, 3, HALF, 16_384, {"fit": 2.0, "freeze()": 1.9}, factor=4),
    Case(1024, 3, HALF, 1_024),
    Case(4096, 4, SINGLE, 8_192, {"fit": 1.25, "freeze()": 1.22}, rounds=7),
    Case(4096, 4, HALF, 8_192, {"fit": 1.8, "freeze()": 1.6}, rounds=7),
]


@dataclass(frozen=True)
class Shape:
    """Of a transformer encoder over tokens, and how its rows come."""

    layers: int = 24
    width: int = 1_856
    heads: int = 29
    tokens: int = 128
    rows: int = 4_096
    batch: int = 32
    rounds: int = 3


BILLION, TINY = Shape(), Shape(2, 32, 4, 8, rows=64, batch=16, rounds=2)
BILLIONS_MUSTS = {"fit": 1.05}
MEMORY = 1.1


@dataclass(frozen=True)
class Rates:
    """Of a device: operations a second in a large product, by precision, and bytes a second."""

    flops: Mapping[torch.dtype, float]
    bandwidth: float


def run(*, quick: bool = False, device: str | None = None) -> list[Row]:
    """All cases on the device, by default CUDA."""
    there = torch.cuda.is_available()
    if device is None and not (there or quick):
        raise SystemExit(
            "The benchmark gpu needs a CUDA device, and torch.cuda.is_available() says there is "
            "none. Run it where there is one, or see that it runs with --quick."
        )
    place = torch.device(device or ("cuda" if there else "cpu"))
    speeds = rates(place, size=64 if quick else 8_192)
    rows = rate_rows(speeds)
    for case in [one.tiny() for one in CASES[::4]] if quick else CASES:
        rows += case_rows(case, place, speeds)
        release(place)
    return rows + transformer_rows(TINY if quick else BILLION, place, speeds)


def rates(device: torch.device, *, size: int, repeats: int = 9) -> Rates:
    """Square products of each precision, and a copy of more bytes than caches hold."""

    def seconds(task: Task) -> float:
        timed = finished(task, device)
        timed()
        return statistics.median(clocked(timed) for _ in range(repeats))

    flops = {}
    for dtype in (DOUBLE, SINGLE, HALF):
        a = torch.randn(size, size, device=device).to(dtype)
        flops[dtype] = 2 * size**3 / seconds(lambda a=a: a @ a)
    source = torch.zeros(4 * size**2, device=device)
    copied = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / seconds(lambda: copied.copy_(source))
    return Rates(flops, bandwidth)


def rate_rows(speeds: Rates) -> list[Row]:
    """What the limits are made of."""
    products = [
        for_information(f"product, {str(dtype).removeprefix('torch.')}", value / 1e12, "TFLOP/s")
        for dtype, value in speeds.flops.items()
    ]
    return [*products, for_information("copy", speeds.bandwidth / 1e9, "GB/s")]


def case_rows(case: Case, device: torch.device, speeds: Rates) -> list[Row]:
    """A net's fit and predictions; the marginal cost of small nets; the error of half precision."""
    larger = built(case, device)
    work = replace(larger, x=larger.x[: case.rows], y=larger.y[: case.rows])
    precision = "double" if case.dtype == SINGLE else "auto"
    tasks = tasks_of(work, precision)
    if case.factor > 1:
        tasks["more bare"] = larger.bare_pass
        tasks["more fit"] = lambda: fitted(larger, precision)
    timings = interleaved({k: finished(tasks[k], device) for k in tasks}, rounds=case.rounds)
    product = speeds.flops[DOUBLE if precision == "double" else case.dtype]
    rows = timed_rows(str(case), work, timings, case.musts, (product, case.dtype), speeds)
    if "more fit" in tasks:
        rows.append(for_information(f"fit, {case}: a further row", marginal(timings), PASSES))
    return rows + (error_rows(case, work) if case.dtype == HALF else [])


def timed_rows(
    name: str,
    work: Workload,
    timings: Timings,
    musts: Mapping[str, float],
    product: tuple[float, torch.dtype],
    speeds: Rates,
) -> list[Row]:
    """Tasks in bare passes beside what they take at least; ``product``: the fit's rate, a dtype."""
    count, width = len(work.x), work.model[-1].in_features
    bare, half = timings.median("bare"), count * width**2
    read = 1 + count * width * product[1].itemsize / speeds.bandwidth / bare
    found = []
    for task in ("fit", "uq(x)", "freeze()", "naive fit"):
        rate = product[0] if task == "fit" else speeds.flops[product[1]]
        rate = speeds.flops[DOUBLE] / 2 if task == "naive fit" else rate
        figures = {"seconds": timings.median(task), "bare_seconds": bare}
        ratio, text = timings.ratio(task, "bare"), f"{task}, {name}"
        row = for_information(text, ratio, PASSES, **figures)
        if task in musts:
            row = at_most(text, ratio, musts[task], PASSES, **figures)
        found.append(row.beside(flops=1 + half / rate / bare, bytes=read))
    return found


def built(case: Case, device: torch.device) -> Workload:
    """The net and its rows on the device, ``case.factor`` times as many."""
    torch.manual_seed(0)
    widths = [90, *[case.width] * case.layers]
    hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(case.width, 1)).to(device, case.dtype).eval()
    x = torch.randn(case.factor * case.rows, 90)
    y = target(x, targets=1, seed=0) + 0.1 * torch.randn(len(x), 1)
    return Workload(model, x.to(device, case.dtype), y.to(device, case.dtype), case.batch)


def tasks_of(work: Workload, precision: str) -> dict[str, Task]:
    """The bare pass, a fresh fit, two ways to predict, and a fit as one would write it by hand."""
    uq = calibrated(work, batch_size=work.batch_size, precision=precision)
    frozen = uq.freeze()
    return {
        "bare": work.bare_pass,
        "fit": lambda: fitted(work, precision),
        "uq(x)": lambda: deque(map(uq, (x for x, _ in work.batches())), maxlen=0),
        "freeze()": lambda: called(frozen, work),
        "naive fit": lambda: float64_gram(work),
    }


def fitted(work: Workload, precision: str) -> rg.LastLayerRigidity:
    """A fresh fit with everything on."""
    uq = rg.LastLayerRigidity(work.model)
    return uq.fit((work.x, work.y), batch_size=work.batch_size, precision=precision)


def float64_gram(work: Workload, *, ones: bool = False) -> Tensor:
    """The Gram by one float64 product a batch, and the model's outputs on the way."""
    *trunk, head = work.model
    width = head.in_features + ones
    gram = torch.zeros(width, width, dtype=DOUBLE, device=work.x.device)
    with torch.inference_mode():
        for x, _ in work.batches():
            features = nn.Sequential(*trunk)(x)
            head(features)
            wide = with_ones(features) if ones else features.double()
            gram.addmm_(wide.mT, wide)
    return gram


def with_ones(features: Tensor) -> Tensor:
    """Features in float64 with the bias's column, (N, D + 1)."""
    wide = features.double()
    return torch.cat([wide, torch.ones_like(wide[:, :1])], dim=1)


def marginal(timings: Timings) -> Ratio:
    """The fit of more rows less that of few over the same difference of bare passes."""
    names = ("more fit", "fit", "more bare", "bare")
    rounds = zip(*(timings.seconds[name] for name in names), strict=True)
    return Ratio.of([(a - b) / (c - d) for a, b, c, d in rounds])


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
    values, vectors = torch.linalg.eigh(float64_gram(work, ones=True))
    with torch.inference_mode():
        features = with_ones(work.model[:-1](rows))
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


def transformer_rows(shape: Shape, device: torch.device, speeds: Rates) -> list[Row]:
    """Memory first, before anything else holds some, then the times."""
    work = transformer(shape, device)
    count = sum(parameter.numel() for parameter in work.model.parameters())
    name = f"transformer of {count / 1e9:.2f} billion parameters bfloat16, batches of {shape.batch}"
    memory = memory_row(name, work, device)
    tasks = tasks_of(work, "auto")
    timings = interleaved({k: finished(tasks[k], device) for k in tasks}, rounds=shape.rounds)
    product = (speeds.flops[HALF], HALF)
    return [*timed_rows(name, work, timings, BILLIONS_MUSTS, product, speeds), memory]


def memory_row(name: str, work: Workload, device: torch.device) -> Row:
    """The peak of a fit over that of a bare pass, both with the model and the rows in it."""
    text = f"peak memory of a fit, {name}"
    if device.type != "cuda":
        return not_run(text, "only CUDA counts its memory")
    bare, fit = peak(work.bare_pass, device), peak(lambda: fitted(work, "auto"), device)
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


def finished(task: Task, device: torch.device) -> Task:
    """The task until its last kernel has ended."""

    def whole() -> None:
        task()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return whole
