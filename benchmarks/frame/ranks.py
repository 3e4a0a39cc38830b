"""Processes of one thread each, started quickly, alone or as the ranks of a gloo job."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "rigidities"])


def started(work: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that does the work by itself."""
    return _begun(_alone, work, args)


def job(work: Callable[..., None], size: int, folder: Path, *args: Any) -> list[BaseProcess]:
    """So many ranks, each doing ``work(rank, size, folder, *args)``; they meet by a file there."""
    return [_begun(_rank, work, rank, size, folder, args) for rank in range(size)]


def _begun(*args: Any) -> BaseProcess:
    process = CONTEXT.Process(target=args[0], args=args[1:], daemon=True)
    process.start()
    return process


def _alone(work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work(*args)


def _rank(
    work: Callable[..., None], rank: int, size: int, folder: Path, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
    work(rank, size, folder, *args)
