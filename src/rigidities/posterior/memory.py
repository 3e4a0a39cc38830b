"""The memory that large matrices need, compared with what is free on their device.

`require_memory` is called before large allocations, so that a user gets an error with a remedy in
place of a process that the system kills.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)
"""Files with the limit, the use and the statistics of a container's memory, for cgroups 2 and 1."""

_SMALL = 1 << 26
"""Bytes below which nothing is compared: it takes longer than the allocation."""


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device or in its container; None where not known."""
    if device.type == "cuda":
        # Torch's allocator holds memory that no tensor uses at present.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    free = None
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = int(value.split()[0]) * 1024
    if free is None:
        return None
    for limit_path, used_path, statistics_path in _CGROUPS:
        left = _number_in(limit_path) - _number_in(used_path)
        if -float("inf") < left < float("inf"):  # it is inf or NaN where there is no limit
            free = min(free, int(left) + _file_cache(statistics_path))
    return max(0, free)


def free_memory_or_guess(device: torch.device) -> int:
    """Bytes that can still be allocated; half of the machine's where unknown, or 4 GiB."""
    free = free_memory(device)
    if free is not None:
        return free
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return 4 * 2**30


def require_memory(copies: int, width: int, targets: int | None, device: torch.device) -> None:
    """Refuse matrices that a device has too little memory for.

    Args:
        copies: Number of float64 matrices (D, D) that are needed at once, per target.
        width: Number of features D.
        targets: Number of targets that have matrices of their own; None for shared ones.
        device: Where the matrices are needed.

    Raises:
        MemoryError: They take more than is free.
    """
    needed = 8 * copies * width**2 * (targets or 1)
    if needed <= _SMALL:
        return
    free = free_memory(device)
    if free is None or needed <= free:
        return
    per_target = "" if targets is None else f", one for each of {targets} targets"
    raise MemoryError(
        f"Features {width:,} wide need {needed / 2**30:,.1f} GiB on {device} ({copies} float64 "
        f"matrices {width:,} x {width:,}{per_target}), and {free / 2**30:,.1f} GiB are free. "
        "Name a narrower readout with layer=, pass features= that project to fewer columns, or "
        "move the model to a device with more memory."
    )


def _number_in(path: str) -> float:
    """The number in a file; infinity where there is none."""
    try:
        return float(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")


def _file_cache(path: str) -> int:
    """Bytes of files in memory that a container gives up when it needs more, by its statistics."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    statistics = dict(line.split() for line in lines)
    # In cgroups 1 the total is that of the container with all groups below it.
    for name in ("total_inactive_file", "inactive_file"):
        if name in statistics:
            return int(statistics[name])
    return 0
