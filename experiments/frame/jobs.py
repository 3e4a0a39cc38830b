"""Parts of a long experiment: computed side by side, kept on disk, so that a run can go on."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.data.files import cache_folder, digest
from experiments.frame import keys, progress, sources
from experiments.frame.files import replace
from experiments.frame.machine import machine
from experiments.frame.outcome import plain
from experiments.training.protocol import device


@dataclass(frozen=True)
class Job:
    """One part.

    Attributes:
        name: unique within the experiment, such as "concrete, llpr".
        work: a function of a module; its result is what JSON can hold.
        arguments: of the function, by name; what JSON can hold.
        data: names of the files it reads, any of which may do: other data are another part.
    """

    name: str
    work: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    data: Sequence[str] = ()

    def __call__(self) -> Part:
        """The result as JSON gives it back, whether or not it was ever on disk."""
        start = time.monotonic()
        value = json.loads(json.dumps(self.work(**self.arguments), default=_listed))
        return Part(value, time.monotonic() - start, machine())


class Part(NamedTuple):
    """A finished job: its result, the seconds it took, and on what."""

    value: Any
    seconds: float
    machine: str


def results(
    experiment: str, jobs: Sequence[Job], *, keep: bool = True, workers: int | None = None
) -> dict[str, Any]:
    """The results of all jobs by name.

    Args:
        experiment: whose jobs they are.
        jobs: independent of each other.
        keep: results on disk, and take those that are there already: an interrupted experiment
            goes on where it was. They are found by the job's arguments, its data and what the
            code does, wherever they were computed: `earlier` tells where.
        workers: processes; one a core by default, none besides this one on a GPU.
    """
    records = {job.name: _record(job) for job in jobs} if keep else {}
    files = {name: _file(experiment, record) for name, record in records.items()}
    for file in files.values():
        _require_writable(file.parent)
    taken = [name for name, file in files.items() if keys.rekeyed(file)]
    found = {name: _read(file) for name, file in files.items() if file.exists()}
    origins = Counter(keys.origin(files[name], found[name].machine) for name in taken)
    for origin, count in origins.items():
        print(f"  {count} of {len(jobs)} parts re-keyed, computed {origin}")
    finished.extend(files[name] for name in found)
    if found:
        earlier.extend(found.values())
        print(f"  {len(found)} of {len(jobs)} parts are there from an earlier run")
    for name, part in _computed([job for job in jobs if job.name not in found], workers):
        if keep:
            replace(files[name], json.dumps({**records[name], **part._asdict()}).encode())
            finished.append(files[name])
        found[name] = part
    return {job.name: found[job.name].value for job in jobs}


earlier: list[Part] = []
"""The parts that this process did not compute, but found."""

finished: list[Path] = []
"""Files of the parts that the same command would find."""


class CacheError(OSError):
    """Results cannot be kept."""


class WorkerError(RuntimeError):
    """A worker process is gone."""


def forget(experiment: str) -> None:
    """Remove what is kept of an experiment."""
    shutil.rmtree(_folder(experiment), ignore_errors=True)


def kept(experiment: str) -> list[Path]:
    """The files of all parts that were ever finished and not forgotten."""
    return sorted(_folder(experiment).glob("*.json"))


def _require_writable(folder: Path) -> None:
    """Known before hours of work, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise CacheError(
            f"Finished parts cannot be kept in {folder} ({error.strerror}). Set XDG_CACHE_HOME to "
            "a folder that can be written."
        ) from error


def _computed(jobs: Sequence[Job], workers: int | None) -> Iterator[tuple[str, Part]]:
    """Names and results, as they come."""
    if workers is None:
        workers = 1 if device().type != "cpu" else _cores()
    workers = min(workers, len(jobs))
    if workers <= 1:
        for job in jobs:
            yield job.name, job()
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_alone
    )
    try:
        names = {pool.submit(job): job.name for job in jobs}
        for done in progress.steps(as_completed(names), "parts", total=len(jobs)):
            yield names[done], done.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            "A worker process ended abruptly: stopped from outside, or out of memory. Finished "
            "parts are kept: the same command goes on from there."
        ) from error
    except BaseException:  # an interruption, or a part that failed: wait for no other
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    pool.shutdown()


def _cores() -> int:
    """That this process may use, as far as the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _alone() -> None:
    """One thread a process, or they fight over the cores; and no bars over each other."""
    torch.set_num_threads(1)
    progress.quieten()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, which ends us


def _folder(experiment: str) -> Path:
    return cache_folder() / "experiments" / experiment


def _record(job: Job) -> dict[str, Any]:
    """What a job's result depends on: another argument, number or piece of code is another file."""
    work = f"{job.work.__module__}:{job.work.__qualname__.split('.')[0]}"
    asked = {"name": job.name, "arguments": plain(job.arguments), "data": digest(job.data)}
    return {**asked, "work": work, "code": sources.digest(work)}


def _file(experiment: str, record: Mapping[str, Any]) -> Path:
    question = [record["arguments"], record["data"]]
    return keys.path(_folder(experiment), record["name"], question, record["code"], ".json")


def _listed(value: Any) -> Any:
    """Tensors and arrays as lists; all digits are kept."""
    return value.tolist()


def _read(file: Path) -> Part:
    """A part that was kept: with its record, or as a mere list."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(stored, list):
        stored = dict(zip(Part._fields, stored, strict=True))
    machine = stored["machine"] + keys.mark(file, stored.get("code"))
    return Part(stored["value"], stored["seconds"], machine)
