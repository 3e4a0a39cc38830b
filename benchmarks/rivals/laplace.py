"""Fit and predict against laplace-torch, round by round in the same minutes.

The rival runs as a worker in an environment of its own (``.venv-rivals``) with the same seed,
network, rows and batches. It times itself. Its requests take turns with the tasks of this process,
so that seconds can be compared directly, and its bare pass is timed too.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from benchmarks.frame.apart import ROOT, environment_python
from benchmarks.frame.fits import LIST, PASSES, TENSORS, fit_rows, fit_tasks
from benchmarks.frame.limits import least_passes, reading
from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import Task, Timings, interleaved
from benchmarks.frame.workload import workload
from benchmarks.speed import calibrated

ENVIRONMENT = ROOT / ".venv-rivals"
KINDS = (LIST, TENSORS)
LIMITS: dict[int, dict[str, float | None]] = {
    256: {"double": 0.95, "mixed": 1.0},
    1024: {"double": None, "mixed": 1.0},
}
"""Shares of the time of BackPack, which sums in float32, by width and precision."""
MISSING = f"{ENVIRONMENT.name} is missing: make it with `make bench`"


class RivalFailed(RuntimeError):
    """The rival raised an error; its message is in this one."""


class Rival:
    """The worker process, as a context manager."""

    def __init__(self, rows: int, width: int) -> None:
        self.command = [str(interpreter()), "-m", "benchmarks.rivals.laplace_worker"]
        self.command += ["--rows", str(rows), "--width", str(width)]
        self.command += ["--threads", str(torch.get_num_threads())]

    def __enter__(self) -> Rival:
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
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
        """The next line that the worker prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RivalFailed(f"The rival ended early; try {' '.join(self.command[1:])}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def interpreter() -> Path:
    """The rivals' Python."""
    return environment_python(ENVIRONMENT)


def run(*, quick: bool = False) -> list[Row]:
    """Both backends at width 256; the fast one at width 1024, with a limit of the mixed fit."""
    if not interpreter().exists():
        return [not_run("fit and predict against laplace-torch", MISSING)]
    if quick:
        return rows_at(2_000, width=32, rounds={"backpack": 2, "default": 1}, limits=LIMITS[256])
    narrow = rows_at(50_000, width=256, rounds={"backpack": 11, "default": 5}, limits=LIMITS[256])
    return narrow + rows_at(20_000, width=1024, rounds={"backpack": 7}, limits=LIMITS[1024])


def rows_at(
    rows: int, *, width: int, rounds: Mapping[str, int], limits: Mapping[str, float | None]
) -> list[Row]:
    """Rows for one size, backend by backend; one that fails gives a row that says so."""
    tasks = our_tasks(rows, width)
    size = f"{rows:,} rows, width {width}"
    table: list[Row] = []
    with Rival(rows, width) as rival:
        for backend, count in rounds.items():
            their_tasks = {
                "their bare": rival.task("bare"),
                "their fit": rival.task(f"fit {backend}"),
                "their predict": rival.task(f"predict {backend}"),
            }
            try:
                timings = interleaved(tasks | their_tasks, rounds=count)
            except RivalFailed as error:
                table.append(not_run(f"laplace-torch {backend}, {size}", str(error)))
                continue
            if backend == "default":
                table += compared_with_default(timings, size)
            else:
                table += compared_with_backpack(timings, size, rival.versions, limits)
    return table


def our_tasks(rows: int, width: int) -> dict[str, Task]:
    """The same work in this process, loops written by hand, and the least that a fit takes."""
    work = workload(rows, width=width)
    uq = calibrated(work)
    tasks = fit_tasks(work, KINDS, LIMITS[256]) | reading(work)
    tasks["predict"] = lambda: uq.predict(work.x)
    return tasks


def compared_with_backpack(
    timings: Timings, size: str, versions: Mapping[str, Any], limits: Mapping[str, float | None]
) -> list[Row]:
    """All fits in bare passes of the process that did them, then ours in units of its time."""
    their_passes = timings.ratio("their fit", "their bare")
    table = [
        for_information(
            f"fit by laplace-torch's backpack backend, {size}",
            their_passes,
            PASSES,
            seconds=timings.median("their fit"),
            bare_seconds=timings.median("their bare"),
            versions=versions,
        )
    ]
    # These rows only inform: the benchmark `speed` asks figures of them.
    table += fit_rows(size, timings, KINDS, dict.fromkeys(limits))
    against = f"against laplace-torch's backpack backend, {size}"
    for precision, limit in limits.items():
        least = least_passes(timings, f"upper blocks, {precision}", f"bare, {LIST}")
        share = least / their_passes.median
        task = f"fit, {precision}, {LIST}"
        row = at_most(
            f"{task}, {against}",
            timings.ratio(task, "their fit"),
            limit,
            "of its time",
            note=f"the pass and the product alone would take {share:.2f} of its time",
        )
        table.append(row)
    predict = timings.ratio("predict", "their predict")
    table.append(for_information(f"predict {against}", predict, "of its time"))
    return table


def compared_with_default(timings: Timings, size: str) -> list[Row]:
    """How many times faster a fit is, and a prediction in units of its time."""
    against = f"against laplace-torch's default backend, {size}"
    faster = timings.ratio("their fit", f"fit, double, {LIST}")
    predict = timings.ratio("predict", "their predict")
    return [
        for_information(f"fit, double, {LIST}, {against}", faster, "times faster"),
        for_information(f"predict {against}", predict, "of its time"),
    ]
