"""One fit over generated batches in a process of its own; prints its peak memory in bytes."""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import rigidities as rg
from benchmarks.frame.workload import target, workload


def batches(rows: int, *, batch_size: int = 1024) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows that never exist together."""
    generator = torch.Generator().manual_seed(1)
    for start in range(0, rows, batch_size):
        x = torch.randn(min(batch_size, rows - start), 90, generator=generator)
        yield x, target(x, targets=1, seed=0)


def peak_bytes() -> int:
    """The process's largest resident set so far.

    ``ru_maxrss`` starts at the parent's resident set, which may exceed anything that happens here;
    Linux's ``VmHWM`` counts from the start of the program.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"))
        if found:
            return 1024 * int(found.group(1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def main(rows: int, width: int, threads: int) -> None:
    """Warm up on one batch, then fit ``rows`` rows and report both peaks."""
    torch.set_num_threads(threads)
    model = workload(2_000, width=width).model
    rg.LastLayerRigidity(model).fit(batches(4 * 1024))
    before = peak_bytes()
    rg.LastLayerRigidity(model).fit(batches(rows))
    print(json.dumps({"before": before, "after": peak_bytes()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
