"""A measurement in a process of its own, whose last printed line is JSON; its peak memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def measured_apart(module: str, *arguments: int, unfragmented: bool = False) -> dict[str, Any]:
    """Run ``python -m module arguments threads`` and read what it found.

    `unfragmented` gives every large block pages of its own: glibc's heap else keeps what was freed.
    """
    words = [str(value) for value in (*arguments, torch.get_num_threads())]
    command = [sys.executable, "-m", module, *words]
    own = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if unfragmented else {})
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=own)
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


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


def resident_bytes() -> int:
    """The process's resident set now; the peak is counted from here on, where the system can."""
    status = Path("/proc/self/status")
    found = None
    if status.exists():
        found = re.search(r"VmRSS:\s*(\d+) kB", status.read_text(encoding="utf-8"))
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return 1024 * int(found.group(1)) if found else peak_bytes()
