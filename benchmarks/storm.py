"""Fits whose processes are killed at random moments: what is left, and what others notice.

A fit with a checkpoint is killed and resumed until it is done, again and again; and one rank of a
job is killed while all of them fit.
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
from benchmarks.scale import BATCH, net, stream
from rigidities.data.storage import Snapshot, read

WAYS: list[dict[str, Any]] = [{}, {"precision": "mixed"}, {"method": "qr"}]
WIDTH, PAUSE, LONG = 32, 0.01, 120.0
"""Of the net; seconds between batches; seconds after which a process counts as hung."""
NOTICED = 5.0
"""Seconds within which the others must have raised an error, which is when their data end."""
CHECKPOINT = "fit.safetensors"


def run(*, quick: bool = False) -> list[Row]:
    """50 kills of a fit, 20 of a rank; the moments are drawn from one seed."""
    moments = random.Random(0)
    if quick:
        return resumed(2, moments, batches=12) + bereaved(1, moments, batches=40)
    return resumed(50, moments, batches=60) + bereaved(20, moments, batches=200)


def resumed(kills: int, moments: random.Random, *, batches: int) -> list[Row]:
    """Fits that are killed and resumed, until so many were killed."""
    seen: Counter[str] = Counter()
    while seen["kills"] < kills:
        way = WAYS[seen["fits"] % len(WAYS)]
        with tempfile.TemporaryDirectory() as name:
            seen += one_fit(Path(name), way, moments, batches)
    of = f"{seen['kills']} kills, {seen['fits']} fits"
    return [
        for_information(
            f"processes killed in the middle of a fit, {seen['fits']} fits", seen["kills"]
        ),
        at_most(
            f"resumed fits that differ in a bit from one in one go, {of}", seen["differing"], 0
        ),
        at_most(f"files that cannot be read after a kill, {of}", seen["unreadable"], 0),
        at_most(f"files left beside a fit that has ended, {of}", seen["left"], 0),
        for_information(f"kills that left a checkpoint to resume from, {of}", seen["checkpoints"]),
    ]


def one_fit(
    folder: Path, way: dict[str, Any], moments: random.Random, batches: int
) -> Counter[str]:
    """One fit, killed until it is done: what was seen on the way."""
    seen = Counter({"fits": 1})
    process = _begun(folder, "plain", way, batches, False)
    most = 2 * clocked(lambda: _finished(process))  # so that about half of them live
    while True:
        process = _begun(folder, "done", way, batches, True)
        process.join(moments.uniform(0, most))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        seen += _left_by_a_kill(folder)
    _finished(process)
    names = {path.name for path in folder.iterdir()} - {"began", "plain", "done"}
    seen["left"], seen["differing"] = len(names), _differ(folder / "plain", folder / "done")
    return seen


def _begun(folder: Path, *args: Any) -> BaseProcess:
    (folder / "began").unlink(missing_ok=True)
    process = started(fit_alone, folder, *args)
    _wait_for(folder / "began", process)
    return process


def fit_alone(folder: Path, name: str, way: dict[str, Any], batches: int, kept: bool) -> None:
    """A slow fit, with a checkpoint or without, whose end is a file."""
    options = {"checkpoint": folder / CHECKPOINT, "checkpoint_seconds": 0} if kept else {}
    model = net(WIDTH)
    (folder / "began").touch()
    uq = rg.LastLayerRigidity(model).fit(slowly(batches * BATCH), **way, **options)
    uq.save(folder / name, rows=True)


def slowly(rows: int, **shares: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The stream with pauses, so that there is a middle of it."""
    for batch in stream(rows, **shares):
        time.sleep(PAUSE)
        yield batch


def _left_by_a_kill(folder: Path) -> Counter[str]:
    seen = Counter({"kills": 1})
    for path in (folder / CHECKPOINT, folder / "done"):
        if path.exists():
            try:
                read(path)
            except ValueError:
                seen["unreadable"] += 1
                path.unlink()  # the storm goes on
    seen["checkpoints"] = int((folder / CHECKPOINT).exists())
    return seen


def _differ(one: Path, other: Path) -> int:
    (mine, header), (theirs, same) = read(one), read(other)
    equal = mine.keys() == theirs.keys() and header == same
    return int(not (equal and all(torch.equal(mine[name], theirs[name]) for name in mine)))


def bereaved(jobs: int, moments: random.Random, *, batches: int) -> list[Row]:
    """Jobs of two to four ranks that lose one of them at a random moment."""
    seen: Counter[str] = Counter()
    longest = 0.0
    while seen["jobs"] < jobs:
        with tempfile.TemporaryDirectory() as name:
            found, seconds = one_job(Path(name), 2 + seen["jobs"] % 3, moments, batches)
            seen, longest = seen + found, max(longest, seconds)
    of = f"{seen['jobs']} jobs of 2 to 4 ranks"
    return [
        at_most(f"ranks that hang when another was killed, {of}", seen["hung"], 0),
        at_most(
            f"longest time from a kill to the error on all others, {of}", longest, NOTICED, "s"
        ),
        at_most(f"files of killed jobs that pass for whole, {of}", seen["whole"], 0),
        at_most(
            f"ranks that ended without an error and without the fit, {of}",
            seen["others"] - seen["errors"] - seen["fitted"] - seen["hung"],
            0,
        ),
        for_information(f"ranks that raised an error, {of}", seen["errors"]),
        for_information(
            f"ranks that had the fit already when another was killed, {of}",
            seen["fitted"],
            note=f"In {seen['split']} jobs some had it and others did not.",
        ),
    ]


def one_job(
    folder: Path, size: int, moments: random.Random, batches: int
) -> tuple[Counter[str], float]:
    """One job, one of whose ranks is killed while it fits; a job that was faster does not count."""
    ranks = job(fit_share, size, folder, batches)
    for number, rank in enumerate(ranks):
        _wait_for(folder / f"{number}.began", rank)
    victim = moments.randrange(size)
    time.sleep(moments.uniform(0, batches * PAUSE / size))
    ranks[victim].kill()
    at, seen = time.monotonic(), Counter({"jobs": 1, "others": size - 1})
    if (folder / f"{victim}.json").exists():
        seen.clear()
    for rank in ranks:
        rank.join(LONG)
        seen["hung"] += rank.exitcode is None
        rank.kill()
    ended = [json.loads(path.read_text()) for path in folder.glob("*.json")] if seen["jobs"] else []
    seen["errors"] = sum("error" in one for one in ended)
    seen["fitted"] = len(ended) - seen["errors"]
    seen["split"] = int(0 < seen["errors"] < len(ended))
    seen["whole"] = sum(map(_whole, folder.glob("fit*")))
    return seen, max((one["at"] - at for one in ended if "error" in one), default=0.0)


def fit_share(rank: int, size: int, folder: Path, batches: int) -> None:
    """What each rank does; its end, good or bad, is a file."""
    uq = rg.LastLayerRigidity(net(WIDTH))
    dist.barrier()
    (folder / f"{rank}.began").touch()
    shares = slowly(batches * BATCH, first=rank, step=size)
    try:
        uq.fit(shares, checkpoint=folder / CHECKPOINT, checkpoint_seconds=0)
        found = {"rows": uq.gram.count}
    except RuntimeError as error:
        found = {"error": str(error), "at": time.monotonic()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _whole(path: Path) -> bool:
    """Whether a file passes for that of a fit."""
    try:
        Snapshot.read(path, holds="fit")
    except ValueError:
        return False
    return True


def _wait_for(path: Path, process: BaseProcess) -> None:
    while not path.exists():
        if process.exitcode is not None:
            raise RuntimeError(f"A process ended with {process.exitcode} before its fit began.")
        time.sleep(0.001)


def _finished(process: BaseProcess) -> None:
    process.join()
    if process.exitcode:
        raise RuntimeError(f"A fit ended with {process.exitcode}.")
