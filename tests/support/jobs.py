"""Real processes that talk by torch.distributed (gloo)."""

import io
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "rigidities", "tests.support.nets"])
LIMIT = 120.0
"""Seconds after which a job counts as hung; it should take one or two."""


def share(data: Any, rank: int, size: int) -> Any:
    """A process's rows of tensors, contiguous, so that gathered rows come in their order."""
    if isinstance(data, torch.Tensor):
        return data.tensor_split(size)[rank]
    return tuple(share(tensor, rank, size) for tensor in data)


class Ended:
    """In place of a result, where a process ended without one."""


def run(work: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """What `work(rank, size, *args)` returns or raises on each rank, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
        jobs = []
        for rank, (_, sending) in enumerate(pipes):
            given = (work, rank, size, Path(folder, "store"), sending, args)
            jobs.append(CONTEXT.Process(target=_main, args=given))
            jobs[-1].start()
            sending.close()
        found = [_result(receiving) for receiving, _ in pipes]
        for job in jobs:
            job.join(10)
            job.kill()
        return found


def errors(work: Callable[..., Any], size: int, *args: Any) -> list[Exception]:
    """The errors of all ranks; anything else is one of the test's."""
    found = run(work, size, *args)
    for one in found:
        if not isinstance(one, Exception):
            raise AssertionError(f"A rank returned {one!r}.")
    return found


def values(work: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """The results of all ranks; their errors are raised."""
    found = run(work, size, *args)
    wrong = [one for one in found if isinstance(one, Exception)]
    for one in sorted(wrong, key=lambda one: not isinstance(one, AssertionError)):
        raise one  # one rank's assertion before what follows from it on others
    return found


def _result(receiving: Any) -> Any:
    try:
        if not receiving.poll(LIMIT):
            raise AssertionError(f"A rank has not answered within {LIMIT:.0f} s.")
        return torch.load(io.BytesIO(receiving.recv_bytes()), weights_only=False)
    except EOFError:
        return Ended()


def _main(work: Any, rank: int, size: int, store: Path, sending: Any, args: Any) -> None:
    torch.set_num_threads(1)
    options = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **options)
    try:
        found = work(rank, size, *args)
    except Exception as error:
        kinds = (ValueError, RuntimeError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), AssertionError)
        found = kind(str(error) if kind in kinds else traceback.format_exc())
    packed = io.BytesIO()  # by itself, a pipe would share the memory of tensors that end with us
    torch.save(found, packed)
    sending.send_bytes(packed.getvalue())
    sending.close()
