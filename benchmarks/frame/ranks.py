"""Processes beside this one: started quickly, alone or as the ranks of a gloo job, or in a pool."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["CONTEXT", "job", "pooled", "started"]

Answer = TypeVar("Answer")

# A server that has imported torch already forks processes that begin at once.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "rigidities"])


def started(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process of one thread that calls ``work(*arguments)``."""
    return _started(_alone, work, arguments)


def job(work: Callable[..., None], size: int, folder: Path, *arguments: Any) -> list[BaseProcess]:
    """So many ranks of one thread, each calling ``work(rank, size, folder, *arguments)``.

    They find each other by a file in the folder.
    """
    return [_started(_rank, work, rank, size, folder, arguments) for rank in range(size)]


def _started(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = CONTEXT.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _alone(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work(*arguments)


def _rank(
    work: Callable[..., None], rank: int, size: int, folder: Path, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    work(rank, size, folder, *arguments)


def pooled(
    function: Callable[..., Answer],
    calls: Iterable[tuple[Any, ...]],
    *,
    threads: int,
    quick: bool = False,
) -> list[Answer]:
    """The answers of ``function(*call)`` for all calls, in as many processes as the cores allow.

    Args:
        function: A function of a module, which other processes can import.
        calls: The arguments of each call.
        threads: How many threads torch has in each process.
        quick: Make the few calls of a quick run one after the other in this process.
    """
    if quick:
        return [function(*call) for call in calls]
    workers = max(1, len(os.sched_getaffinity(0)) // threads)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (threads,)) as pool:
        futures = [pool.submit(function, *call) for call in calls]
        return [future.result() for future in futures]
