"""Memory that is free, and a refusal before an allocation that would not fit."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available(device: torch.device) -> int:
    """Bytes that can still be allocated: of the GPU, or of the machine or its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_machine(), *_containers()])


def readable(size: float) -> str:
    """Bytes for people.

    Examples:
        >>> readable(3 * 2**30), readable(5e5)
        ('3.0 GiB', '488 KiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _machine() -> int:
    with suppress(OSError):  # Linux tells what is free
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # not a POSIX system: a cautious guess
        return 4 * 2**30


def _containers() -> list[int]:
    left = [_number(limit) - _number(used) for limit, used in _CGROUPS]
    return [int(size) for size in left if 0 < size < float("inf")]


def _number(path: str) -> float:
    try:
        return float(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")
