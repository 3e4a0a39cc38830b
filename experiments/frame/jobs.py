"""Parts of a long experiment: computed side by side and kept on disk, so that a run can go on.

A study lists its `Job`s and calls `results`. A part that is on disk with the same settings and data
is read; the others are computed, in worker processes where there are several cores, and each is
written to ``~/.cache/rigidities/experiments/<experiment>/`` as soon as it is finished. A file
records the machine and the digests of the code that computed it. A part of other code is used all
the same; the run and the page say so, and ``--fresh`` computes everything again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.data.files import digest
from experiments.frame import progress, sources
from experiments.frame.files import kept_file, kept_folder, replace
from experiments.frame.machine import machine
from experiments.frame.outcome import plain
from experiments.training.protocol import device


class Part(NamedTuple):
    """A finished job.

    Attributes:
        value: What the job's function returned, as JSON gives it back.
        seconds: How long it took.
        machine: On what it was computed.
        other_code: Whether it was read from disk and computed by other code than today's.
    """

    value: Any
    seconds: float
    machine: str
    other_code: bool = False


@dataclass(frozen=True)
class Job:
    """One part of an experiment that is to be computed.

    Attributes:
        name: Unique within the experiment, such as "concrete, llpr".
        work: A function of a module. It returns what JSON can hold, tensors or arrays.
        arguments: The function's keyword arguments, which JSON can hold.
        data: Alternative names of the data file that it reads. Other data are another part.
    """

    name: str
    work: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    data: Sequence[str] = ()

    def __call__(self) -> Part:
        """Compute the part; its value is the same whether or not it was ever on disk."""
        start = time.monotonic()
        result = self.work(**self.arguments)
        value = json.loads(json.dumps(result, default=_as_list))
        return Part(value, time.monotonic() - start, machine())


earlier: list[Part] = []
"""The parts that this process read from disk instead of computing them."""

finished: list[Path] = []
"""The files of the parts that the same command would find again."""


class CacheError(OSError):
    """The folder for finished parts cannot be written to."""


class WorkerError(RuntimeError):
    """A worker process ended before its part was finished."""


def results(
    experiment: str, jobs: Sequence[Job], *, keep: bool = True, workers: int | None = None
) -> dict[str, Any]:
    """The results of all jobs by name, in the order of the jobs.

    Args:
        experiment: The experiment whose jobs they are.
        jobs: Jobs that do not depend on each other.
        keep: Whether parts that are on disk are used, and new ones are written there. An
            interrupted experiment then goes on where it was.
        workers: Number of processes. By default one a core; on a GPU this process alone.

    Raises:
        CacheError: The folder for finished parts cannot be written to.
        WorkerError: A worker process ended abruptly.
    """
    if not keep:
        computed = dict(_computed(jobs, workers))
        return {job.name: computed[job.name].value for job in jobs}

    _require_writable(kept_folder(experiment))
    code = sources.digests(experiment)
    settings = {job.name: _settings(job) for job in jobs}
    files = {
        name: kept_file(experiment, name, [entry["arguments"], entry["data"]], ".json")
        for name, entry in settings.items()
    }

    parts = {name: _read(file, code) for name, file in files.items() if file.exists()}
    if parts:
        print(f"  {len(parts)} of {len(jobs)} parts come from an earlier run")
    outdated = sum(part.other_code for part in parts.values())
    if outdated:
        print(f"  {outdated} of them were computed by {sources.OTHER_CODE}: --fresh recomputes")
    earlier.extend(parts.values())
    finished.extend(files[name] for name in parts)

    missing_jobs = [job for job in jobs if job.name not in parts]
    for name, part in _computed(missing_jobs, workers):
        record = {
            **settings[name],
            "code": code,
            "value": part.value,
            "seconds": part.seconds,
            "machine": part.machine,
        }
        replace(files[name], json.dumps(record).encode())
        finished.append(files[name])
        parts[name] = part
    return {job.name: parts[job.name].value for job in jobs}


def forget(experiment: str) -> None:
    """Remove everything that is kept of an experiment."""
    shutil.rmtree(kept_folder(experiment), ignore_errors=True)


def kept(experiment: str) -> list[Path]:
    """The files of all parts of an experiment that are on disk."""
    return sorted(kept_folder(experiment).glob("*.json"))


def _require_writable(folder: Path) -> None:
    """Raise before hours of work rather than after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise CacheError(
            f"Finished parts cannot be kept in {folder} ({error.strerror}). Set XDG_CACHE_HOME to "
            "a folder that can be written."
        ) from error


def _settings(job: Job) -> dict[str, Any]:
    """What a job's result depends on besides the code, with the name of its function."""
    return {
        "name": job.name,
        "work": f"{job.work.__module__}:{job.work.__qualname__}",
        "arguments": plain(job.arguments),
        "data": digest(job.data),
    }


def _read(file: Path, code: Mapping[str, str]) -> Part:
    """A part from disk, compared with the digests of today's code."""
    record = json.loads(file.read_text(encoding="utf-8"))
    return Part(
        value=record["value"],
        seconds=record["seconds"],
        machine=record["machine"],
        other_code=record.get("code") != code,
    )


def _computed(jobs: Sequence[Job], workers: int | None) -> Iterator[tuple[str, Part]]:
    """Names and parts, in the order in which they are finished."""
    if workers is None:
        workers = _cores() if device().type == "cpu" else 1
    workers = min(workers, len(jobs))
    if workers <= 1:
        for job in jobs:
            yield job.name, job()
        return

    spawning = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawning, initializer=_prepare_worker)
    try:
        names = {pool.submit(job): job.name for job in jobs}
        for future in progress.steps(as_completed(names), "parts", total=len(jobs)):
            yield names[future], future.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            "A worker process ended abruptly. It was stopped from outside or ran out of memory. "
            "Finished parts are kept, and the same command continues from there."
        ) from error
    except BaseException:  # an interruption, or a part that failed: do not wait for the others
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    pool.shutdown()


def _cores() -> int:
    """The number of cores that this process may use, as far as the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _prepare_worker() -> None:
    """Make a process one of several that work side by side."""
    torch.set_num_threads(1)  # more threads would fight over the cores
    progress.quieten()  # several bars would overwrite each other
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, which ends us


def _as_list(value: Any) -> Any:
    """A tensor or an array as nested lists, with all digits."""
    return value.tolist()
