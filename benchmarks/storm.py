"""Fits whose processes are killed at random moments: what is left, and what others notice.

A fit that is saved after every shard is killed and run again until it is done, again and again.
Then one rank of a job is killed while all of them fit. What was counted on the way becomes the rows
of the table.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rigidities as rg
from benchmarks.frame.ranks import job, started
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import clocked
from benchmarks.scale import BATCH, network, stream
from rigidities.data.storage import read

FIT_OPTIONS: list[dict[str, Any]] = [{}, {"precision": "mixed"}]
"""The fits that are killed, in turn."""
WIDTH = 32
PAUSE = 0.01
"""Seconds between batches."""
HUNG = 120.0
"""Seconds after which a process counts as hung."""
NOTICED = 5.0
"""Seconds within which the others must have raised an error, which is when their data end."""
CHECKPOINT = "fit.safetensors"
BEGAN, PLAIN, RESUMED = "began", "plain", "done"
"""Files: that a fit has begun, the fit in one go, and the fit that was resumed."""


def run(*, quick: bool = False) -> list[Row]:
    """50 kills of a fit, 20 of a rank; the moments are drawn from one seed."""
    moments = random.Random(0)
    if quick:
        return resumed_rows(2, moments, batches=12) + bereaved_rows(1, moments, batches=40)
    return resumed_rows(50, moments, batches=60) + bereaved_rows(20, moments, batches=200)


# --- fits that are killed and resumed -------------------------------------------------------------


def resumed_rows(kills: int, moments: random.Random, *, batches: int) -> list[Row]:
    """Fits that are killed and resumed, until so many were killed."""
    counts: Counter[str] = Counter()
    while counts["kills"] < kills:
        options = FIT_OPTIONS[counts["fits"] % len(FIT_OPTIONS)]
        with tempfile.TemporaryDirectory() as name:
            counts += resumed_counts(Path(name), options, moments, batches)
    of = f"{counts['kills']} kills, {counts['fits']} fits"
    return [
        for_information(
            f"processes killed in the middle of a fit, {counts['fits']} fits", counts["kills"]
        ),
        at_most(
            f"resumed fits that differ in a bit from one without a kill, {of}",
            counts["differing"],
            0,
        ),
        at_most(f"files that cannot be read after a kill, {of}", counts["unreadable"], 0),
        at_most(f"files left beside a fit that has ended, {of}", counts["left"], 0),
        for_information(
            f"kills that left a checkpoint to resume from, {of}", counts["checkpoints"]
        ),
    ]


def resumed_counts(
    folder: Path, options: dict[str, Any], moments: random.Random, batches: int
) -> Counter[str]:
    """One fit, killed and resumed until it is done: counts of what happened on the way."""
    counts = Counter({"fits": 1})
    process = _fit_process(folder, PLAIN, options, batches, None)
    longest = 2 * clocked(lambda: _finish(process))  # so that about half of them live
    while True:
        process = _fit_process(folder, RESUMED, options, batches, folder / CHECKPOINT)
        process.join(moments.uniform(0, longest))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        counts += _counts_after_a_kill(folder)
    _finish(process)
    names = {path.name for path in folder.iterdir()}
    counts["left"] = len(names - {BEGAN, PLAIN, RESUMED, CHECKPOINT})
    counts["differing"] = int(_differ(folder / PLAIN, folder / RESUMED))
    return counts


def _fit_process(folder: Path, *arguments: Any) -> BaseProcess:
    """A process that has begun `fit_alone` with these arguments."""
    (folder / BEGAN).unlink(missing_ok=True)
    process = started(fit_alone, folder, *arguments)
    _wait_for(folder / BEGAN, process)
    return process


def fit_alone(
    folder: Path, name: str, options: dict[str, Any], batches: int, checkpoint: Path | None
) -> None:
    """A slow fit, batch by batch, saved after each if there is a path, and when it is done."""
    model = network(WIDTH)
    (folder / BEGAN).touch()
    uq = rg.LastLayerRigidity(model)
    done = 0
    if checkpoint is not None and checkpoint.exists():
        uq = rg.LastLayerRigidity.load(checkpoint, model)
        done = uq.gram.count
    for number, batch in enumerate(slow_stream(batches * BATCH)):
        if number * BATCH < done:
            continue
        if number == 0:
            uq.fit([batch], **options)
        else:
            uq.partial_fit([batch])
        if checkpoint is not None:
            uq.save(checkpoint, rows=True)
    uq.save(folder / name, rows=True)


def slow_stream(rows: int, *, first: int = 0, step: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """The stream with pauses, so that there is a middle of it."""
    for batch in stream(rows, first=first, step=step):
        time.sleep(PAUSE)
        yield batch


def _counts_after_a_kill(folder: Path) -> Counter[str]:
    """Whether there is a checkpoint, and how many files cannot be read."""
    counts = Counter({"kills": 1})
    for path in (folder / CHECKPOINT, folder / RESUMED):
        if not path.exists():
            continue
        try:
            read(path)
        except ValueError:
            counts["unreadable"] += 1
            path.unlink()  # so that the fit can begin anew
    counts["checkpoints"] = int((folder / CHECKPOINT).exists())
    return counts


def _differ(first: Path, second: Path) -> bool:
    """Whether two files of fits differ in a header or in a bit of a tensor."""
    first_tensors, first_header = read(first)
    second_tensors, second_header = read(second)
    if first_header != second_header or first_tensors.keys() != second_tensors.keys():
        return True
    return any(not torch.equal(first_tensors[name], second_tensors[name]) for name in first_tensors)


# --- jobs that lose a rank ------------------------------------------------------------------------


def bereaved_rows(jobs: int, moments: random.Random, *, batches: int) -> list[Row]:
    """Jobs of two to four ranks that lose one of them at a random moment."""
    counts: Counter[str] = Counter()
    longest = 0.0
    while counts["jobs"] < jobs:
        size = 2 + counts["jobs"] % 3
        with tempfile.TemporaryDirectory() as name:
            job_counts, seconds = bereaved_counts(Path(name), size, moments, batches)
        counts += job_counts
        longest = max(longest, seconds)
    of = f"{counts['jobs']} jobs of 2 to 4 ranks"
    silent = counts["others"] - counts["errors"] - counts["fitted"] - counts["hung"]
    return [
        at_most(f"ranks that hang when another was killed, {of}", counts["hung"], 0),
        at_most(
            f"longest time from a kill to the error on all others, {of}", longest, NOTICED, "s"
        ),
        at_most(f"ranks that ended without an error and without the fit, {of}", silent, 0),
        for_information(f"ranks that raised an error, {of}", counts["errors"]),
        for_information(
            f"ranks that had the fit already when another was killed, {of}",
            counts["fitted"],
            note=f"In {counts['split']} jobs some had it and others did not.",
        ),
    ]


def bereaved_counts(
    folder: Path, size: int, moments: random.Random, batches: int
) -> tuple[Counter[str], float]:
    """One job, one of whose ranks is killed while it fits.

    Returns:
        Counts of what happened to the others, and the seconds until the last of them raised an
        error. Where the rank had ended before it was killed, the job does not count.
    """
    ranks = job(fit_share, size, folder, batches)
    for number, rank in enumerate(ranks):
        _wait_for(folder / f"{number}.began", rank)
    victim = moments.randrange(size)
    time.sleep(moments.uniform(0, batches * PAUSE / size))
    ranks[victim].kill()
    killed_at = time.monotonic()
    counts = Counter({"jobs": 1, "others": size - 1})
    too_late = (folder / f"{victim}.json").exists()
    if too_late:
        counts.clear()
    for rank in ranks:
        rank.join(HUNG)
        counts["hung"] += rank.exitcode is None
        rank.kill()
    endings = []
    if not too_late:
        endings = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    error_seconds = [ending["at"] - killed_at for ending in endings if "error" in ending]
    counts["errors"] = len(error_seconds)
    counts["fitted"] = len(endings) - len(error_seconds)
    counts["split"] = int(0 < len(error_seconds) < len(endings))
    return counts, max(error_seconds, default=0.0)


def fit_share(rank: int, size: int, folder: Path, batches: int) -> None:
    """The work of one rank, which leaves a file when it ends, well or badly."""
    uq = rg.LastLayerRigidity(network(WIDTH))
    dist.barrier()
    (folder / f"{rank}.began").touch()
    rows = slow_stream(batches * BATCH, first=rank, step=size)
    ending: dict[str, Any]
    try:
        uq.fit(rows)
        ending = {"rows": uq.gram.count}
    except RuntimeError as error:
        ending = {"error": str(error), "at": time.monotonic()}
    (folder / f"{rank}.json").write_text(json.dumps(ending))


def _wait_for(path: Path, process: BaseProcess) -> None:
    """Wait until the process has made the file."""
    while not path.exists():
        if process.exitcode is not None:
            raise RuntimeError(f"A process ended with {process.exitcode} before its fit began.")
        time.sleep(0.001)


def _finish(process: BaseProcess) -> None:
    """Wait until the process has ended well."""
    process.join()
    if process.exitcode:
        raise RuntimeError(f"A fit ended with {process.exitcode}.")
