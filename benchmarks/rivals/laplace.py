"""Fit and predict against laplace-torch, round by round in the same minutes.

The rival runs as a worker in an environment of its own (``.venv-rivals``) with the same seed, net,
rows and batches. It times itself; its requests are interleaved with our own tasks, so that seconds
can be compared directly, and its own bare pass is timed too.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import rigidities as rg
from benchmarks.frame.limits import least_fit, products
from benchmarks.frame.results import Row, at_least, at_most, for_information, not_run
from benchmarks.frame.timing import Task, Timings, interleaved
from benchmarks.frame.workload import workload
from benchmarks.speed import calibrated

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-rivals"
MISSING = f"{ENVIRONMENT.name} is missing: make it with `make bench`"


class RivalFailed(RuntimeError):
    """The rival raised; its own words are in the message."""


class Rival:
    """The worker process, as a context manager."""

    def __init__(self, rows: int, width: int) -> None:
        sizes = ["--rows", str(rows), "--width", str(width)]
        threads = ["--threads", str(torch.get_num_threads())]
        self.command = [
            str(interpreter()),
            "-m",
            "benchmarks.rivals.laplace_worker",
            *sizes,
            *threads,
        ]

    def __enter__(self) -> Rival:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self.versions = self._answer()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.communicate()

    def seconds(self, request: str) -> float:
        """Seconds that the worker took for ``bare``, ``fit <backend>`` or ``predict <backend>``."""
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RivalFailed(f"laplace-torch, {request}: {answer['error']}")
        return float(answer["seconds"])

    def task(self, request: str) -> Task:
        """The request as a task that times itself."""
        return lambda: self.seconds(request)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RivalFailed(f"The rival ended early; try {' '.join(self.command[1:])}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def interpreter() -> Path:
    """The rivals' Python."""
    windows = os.name == "nt"
    return ENVIRONMENT / ("Scripts/python.exe" if windows else "bin/python")


def run(*, quick: bool = False) -> list[Row]:
    """Both backends at width 256; the fast one at width 1024, asked of the mixed fit alone."""
    if not interpreter().exists():
        return [not_run("fit and predict against laplace-torch", MISSING)]
    if quick:
        return rows_at(2_000, width=32, rounds={"backpack": 2, "default": 1})
    narrow = rows_at(50_000, width=256, rounds={"backpack": 11, "default": 5})
    return narrow + rows_at(20_000, width=1024, rounds={"backpack": 5}, asked=False)


def rows_at(rows: int, *, width: int, rounds: Mapping[str, int], asked: bool = True) -> list[Row]:
    """Rows for one size, backend by backend; one that fails gives a row that says so."""
    ours = our_tasks(rows, width)
    net = f"{rows:,} rows, width {width}"
    found: list[Row] = []
    with Rival(rows, width) as rival:
        for backend, count in rounds.items():
            theirs = {
                "their bare": rival.task("bare"),
                "their fit": rival.task(f"fit {backend}"),
                "their predict": rival.task(f"predict {backend}"),
            }
            try:
                timings = interleaved(ours | theirs, rounds=count)
            except RivalFailed as error:
                found.append(not_run(f"laplace-torch {backend}, {net}", str(error)))
                continue
            found += compared(timings, backend, net, rival.versions, asked=asked)
    return found


def our_tasks(rows: int, width: int) -> dict[str, Task]:
    """The same work in this process, and the products that bound it."""
    work = workload(rows, width=width)
    uq = calibrated(work)
    tasks: dict[str, Task] = {
        "bare": work.bare_pass,
        "fit": lambda: rg.LastLayerRigidity(work.model).fit((work.x, work.y), precision="double"),
        "mixed fit": lambda: rg.LastLayerRigidity(work.model).fit(
            (work.x, work.y), precision="mixed"
        ),
        "predict": lambda: uq.predict(work.x),
    }
    return tasks | products(work)


def compared(
    timings: Timings, backend: str, net: str, versions: Mapping[str, Any], *, asked: bool
) -> list[Row]:
    """Ours in units of theirs (fast backend), or how many times faster (default backend)."""
    against = f"against laplace-torch's {backend} backend, {net}"
    passes = in_bare_passes(timings)
    figures = {"passes": passes, "versions": versions}
    figures["seconds"] = {name: timings.median(name) for name in timings.seconds}
    predict = for_information(
        f"predict {against}", timings.ratio("predict", "their predict"), "of its time"
    )
    work, its, least = f"fit {against}", passes["their fit"], passes["least fit"]
    here = f"here its fit takes {its:.2f} bare passes and ours at least {least:.2f} (the pass and "
    here += "half of a float64 product)"
    if backend == "default":
        ratio = timings.ratio("their fit", "fit")
        note = f"{here}: no more than {its / least:.1f} times faster"
        return [at_least(work, ratio, 20, "times faster", note=note, **figures), predict]
    ratio = timings.ratio("fit", "their fit")
    note = f"{here}: no less than {least / its:.2f} of its time"
    mixed = at_most(f"mixed {work}", timings.ratio("mixed fit", "their fit"), 1, "of its time")
    if asked:
        return [at_most(work, ratio, 0.8, "of its time", note=note, **figures), mixed, predict]
    double = for_information(work, ratio, "of its time", note=note, **figures)
    return [double, mixed, predict]


def in_bare_passes(timings: Timings) -> dict[str, float]:
    """Everything in bare passes of the process that did it."""
    ours = {name: timings.ratio(name, "bare").median for name in ("fit", "mixed fit", "predict")}
    theirs = {
        name: timings.ratio(name, "their bare").median for name in ("their fit", "their predict")
    }
    return ours | theirs | {"least fit": least_fit(timings).median}
