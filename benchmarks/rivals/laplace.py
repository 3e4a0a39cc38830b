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

from benchmarks.frame.fits import LIST, PASSES, TENSORS, fit_rows, fit_tasks
from benchmarks.frame.limits import least, reading
from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import Task, Timings, interleaved
from benchmarks.frame.workload import workload
from benchmarks.speed import calibrated

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-rivals"
KINDS = (LIST, TENSORS)
MUSTS: dict[int, dict[str, float | None]] = {
    256: {"double": 0.95, "mixed": 1.0},
    1024: {"double": None, "mixed": 1.0},
}
"""Of the time of BackPack, which sums in float32, by width and precision."""
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
        return rows_at(2_000, width=32, rounds={"backpack": 2, "default": 1}, musts=MUSTS[256])
    narrow = rows_at(50_000, width=256, rounds={"backpack": 11, "default": 5}, musts=MUSTS[256])
    return narrow + rows_at(20_000, width=1024, rounds={"backpack": 7}, musts=MUSTS[1024])


def rows_at(
    rows: int, *, width: int, rounds: Mapping[str, int], musts: Mapping[str, float | None]
) -> list[Row]:
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
            if backend == "default":
                found += compared_with_default(timings, net)
            else:
                found += compared_with_backpack(timings, net, rival.versions, musts)
    return found


def our_tasks(rows: int, width: int) -> dict[str, Task]:
    """The same work in this process, the loops written by hand, and the product that bounds it."""
    work = workload(rows, width=width)
    uq = calibrated(work)
    tasks = fit_tasks(work, KINDS, MUSTS[256]) | reading(work)
    tasks["predict"] = lambda: uq.predict(work.x)
    return tasks


def compared_with_backpack(
    timings: Timings, net: str, versions: Mapping[str, Any], musts: Mapping[str, float | None]
) -> list[Row]:
    """All fits in bare passes of the process that did them, then ours in units of its time."""
    theirs = timings.ratio("their fit", "their bare")
    found = [
        for_information(
            f"fit by laplace-torch's backpack backend, {net}",
            theirs,
            PASSES,
            seconds=timings.median("their fit"),
            bare_seconds=timings.median("their bare"),
            versions=versions,
        )
    ]
    found += fit_rows(net, timings, KINDS, dict.fromkeys(musts))  # what is asked of them: `speed`
    against = f"against laplace-torch's backpack backend, {net}"
    for precision, must in musts.items():
        bound = least(timings, f"upper blocks, {precision}", f"bare, {LIST}") / theirs.median
        note = f"the pass and the product alone would take {bound:.2f} of its time"
        ratio = timings.ratio(f"fit, {precision}, {LIST}", "their fit")
        work = f"fit, {precision}, {LIST}, {against}"
        if must is None:
            found.append(for_information(work, ratio, "of its time", note=note))
        else:
            found.append(at_most(work, ratio, must, "of its time", note=note))
    ratio = timings.ratio("predict", "their predict")
    return [*found, for_information(f"predict {against}", ratio, "of its time")]


def compared_with_default(timings: Timings, net: str) -> list[Row]:
    """How many times faster a fit is, and a prediction in units of its time."""
    against = f"against laplace-torch's default backend, {net}"
    faster = timings.ratio("their fit", f"fit, double, {LIST}")
    predict = timings.ratio("predict", "their predict")
    return [
        for_information(f"fit, double, {LIST}, {against}", faster, "times faster"),
        for_information(f"predict {against}", predict, "of its time"),
    ]
