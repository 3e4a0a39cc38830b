"""Time and memory of a fit as rows, features, targets and processes grow.

Rows come from a generator and never exist together. Run as a module of its own (``python -m
benchmarks.scale rows width targets repeats threads``) it fits and prints seconds and peak memory.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes, resident_bytes
from benchmarks.frame.ranks import job
from benchmarks.frame.results import Row, at_least, at_most, for_information
from benchmarks.frame.timing import clocked, interleaved

INPUTS, BATCH, MIB = 32, 1024, 2**20
FEW = 4 * BATCH
"""Rows of the fit that warms a process up."""


def run(*, quick: bool = False) -> list[Row]:
    """All four; sizes that take about a quarter of an hour on two cores."""
    if quick:
        found = by_rows({2_000: 1, 4_000: 1}, width=16)
        return found + by_processes(6_000, width=16, rounds=1)
    found = by_rows({10**4: 9, 10**5: 9, 10**6: 3, 10**7: 1}, width=256)
    widths = (64, 128, 256, 512, 1024, 2048)
    found += by_width({width: 10**6 if width < 512 else 10**5 for width in widths})
    found += by_targets([4, 16, 64], rows=10**5, width=256)
    return found + by_processes(1_200_000, width=256, rounds=5)


def by_rows(repeats: dict[int, int], *, width: int) -> list[Row]:
    """The same net for more and more rows: seconds per row, what every fit costs, memory."""
    found = {rows: fitted_apart(rows, width, 1, times) for rows, times in repeats.items()}
    seconds = {rows: one["seconds"] for rows, one in found.items()}
    pairs = list(pairwise(seconds))
    pairs = pairs[1:] or pairs  # of few rows the clock is too coarse
    each = {more: (seconds[more] - seconds[less]) / (more - less) for less, more in pairs}
    few, most = min(seconds), max(seconds)
    fixed = seconds[few] - few * statistics.median(each.values())
    table = [_informing(one, rows, width, 1) for rows, one in found.items()]
    spread = at_most(
        f"what each further row costs, {pairs[0][0]:,} to {most:,} rows, width {width}",
        max(each.values()) / min(each.values()),
        1.1,
        "of the least",
        further_row=each,
        seconds=seconds,
    )
    memory = at_most(
        f"peak memory of a fit above the model's, {most:,} rows, width {width}",
        found[most]["growth"] / MIB,
        250,
        "MiB",
        bytes={rows: one["growth"] for rows, one in found.items()},
    )
    cost = for_information(
        f"what every fit costs beside its rows, width {width}",
        1e3 * fixed,
        "ms",
        note=f"The first fit of a process, to {FEW:,} rows, took {found[few]['first']:.2f} s.",
    )
    return [spread, memory, cost, *table]


def by_width(rows: dict[int, int]) -> list[Row]:
    """More and more features."""
    each = [(n, width, fitted_apart(n, width, 1, 1)) for width, n in rows.items()]
    return [_informing(one, n, width, 1) for n, width, one in each]


def by_targets(targets: list[int], *, rows: int, width: int) -> list[Row]:
    """More and more targets, which share one Gram."""
    each = [(k, fitted_apart(rows, width, k, 1)) for k in targets]
    return [_informing(one, rows, width, k) for k, one in each]


def _informing(found: dict[str, Any], rows: int, width: int, targets: int) -> Row:
    bare = f"{1e6 * found['bare']:.2f} of the model alone"
    return for_information(
        f"fit, {rows:,} rows, width {width}, {targets} target{'s' * (targets > 1)}",
        1e6 * found["seconds"] / rows,
        f"microseconds a row ({bare}), {found['growth'] / MIB:.0f} MiB above the model",
        **found,
    )


def by_processes(rows: int, *, width: int, rounds: int) -> list[Row]:
    """One process of one thread against two, with half of the rows each."""
    with tempfile.TemporaryDirectory() as name:
        folders = {size: Path(name, str(size)) for size in (1, 2)}
        tasks = {str(n): lambda n=n: together(n, folders[n], rows, width) for n in folders}
        timings = interleaved(tasks, rounds=rounds, warmups=0)
        one, two = (torch.load(folder / "gram.pt") for folder in folders.values())
        fixed = together(2, folders[2], 2 * BATCH, width)
    size = f"{rows:,} rows, width {width}"
    ratio = timings.ratio("1", "2")
    seconds = {f"seconds_{n}": timings.median(str(n)) for n in folders}
    apart = float((one - two).norm() / one.norm())
    return [
        at_least(
            f"fit by 2 processes of one thread, {size}", ratio, 1.6, "times one's speed", **seconds
        ),
        at_most(f"Gram of 2 processes against that of one, {size}", apart, 1e-12, "of its norm"),
        for_information(
            f"fit by 2 processes to {BATCH:,} rows each, width {width}", 1e3 * fixed, "ms"
        ),
    ]


def together(size: int, folder: Path, rows: int, width: int) -> float:
    """Seconds of a fit by so many processes, the slowest of them; the Gram is left in a file."""
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    ranks = job(fit_share, size, folder, rows, width)
    for rank in ranks:
        rank.join()
        if rank.exitcode:
            raise RuntimeError(f"A process of {size} ended with {rank.exitcode}.")
    return max(float((folder / f"{rank}.seconds").read_text()) for rank in range(size))


def fit_share(rank: int, size: int, folder: Path, rows: int, width: int) -> None:
    """What each process does: every so-manieth batch is its own."""
    model = net(width)
    rg.LastLayerRigidity(model).fit(stream(FEW), process_group=False)
    uq = rg.LastLayerRigidity(model)
    dist.barrier()
    seconds = clocked(lambda: uq.fit(stream(rows, first=rank, step=size)))
    (folder / f"{rank}.seconds").write_text(str(seconds))
    if rank == 0:
        torch.save(uq.gram.matrix, folder / "gram.pt")
    dist.destroy_process_group()


def net(width: int, targets: int = 1) -> nn.Sequential:
    """Seeded and untrained: what it predicts does not matter here."""
    torch.manual_seed(0)
    sizes = (INPUTS, width, width, targets)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2])


def stream(
    rows: int, targets: int = 1, *, first: int = 0, step: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches number first, first + step, ...: the same, whoever asks for them."""
    for number in range(first, -(-rows // BATCH), step):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(min(BATCH, rows - number * BATCH), INPUTS, generator=generator)
        yield x, x[:, :1].sin().expand(-1, targets)


def fitted_apart(rows: int, width: int, targets: int, repeats: int) -> dict[str, Any]:
    """What a fresh process measures."""
    return measured_apart("benchmarks.scale", rows, width, targets, repeats)


def main(rows: int, width: int, targets: int, repeats: int, threads: int) -> None:
    """The model alone, then fits."""
    torch.set_num_threads(threads)
    model = net(width, targets)

    def bare(rows: int) -> None:
        with torch.inference_mode():
            for x, _ in stream(rows, targets):
                model(x)

    bare(BATCH)
    before = resident_bytes()
    first = clocked(lambda: rg.LastLayerRigidity(model).fit(stream(FEW, targets)))
    fit = lambda: rg.LastLayerRigidity(model).fit(stream(rows, targets))  # noqa: E731
    seconds = [clocked(fit) for _ in range(repeats)]
    growth, few = peak_bytes() - before, min(rows, 10**5)
    found = {"first": first, "seconds": statistics.median(seconds), "growth": growth}
    print(json.dumps(found | {"bare": clocked(lambda: bare(few)) / few, "all": seconds}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
