"""What matrices of a width need of a device's memory, held against what is free there."""

from __future__ import annotations

from pathlib import Path

import torch

_SMALL = 1 << 26
"""Bytes below which nobody is asked: the answer takes longer than the allocation."""


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where nobody tells."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + idle
    table = Path("/proc/meminfo")
    if device.type != "cpu" or not table.exists():
        return None
    lines = dict(line.split(":", 1) for line in table.read_text().splitlines() if ":" in line)
    available = lines.get("MemAvailable")
    return None if available is None else int(available.split()[0]) * 1024


def require_memory(copies: int, width: int, targets: int | None, device: torch.device) -> None:
    """Refuse where so many D x D float64 matrices, for each of the targets, are too many."""
    needed = 8 * copies * width**2 * (targets or 1)
    free = free_memory(device) if needed > _SMALL else None
    if free is None or needed <= free:
        return
    each = "" if targets is None else f", one for each of {targets} targets"
    raise MemoryError(
        f"Features {width:,} wide need {needed / 2**30:,.1f} GiB on {device} ({copies} float64 "
        f"matrices {width:,} x {width:,}{each}), and {free / 2**30:,.1f} GiB are free. Name a "
        "narrower readout with layer=, give features= that project to fewer columns, or move the "
        "model to a device with more memory."
    )
