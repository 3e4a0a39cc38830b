"""Measurements in a process of their own, whose last printed line is JSON; peak memory.

A fresh process is needed where a peak of memory is measured, because it never falls again, and
where the other library lives in an environment that cannot hold this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.frame.results import Row

__all__ = [
    "ROOT",
    "environment_python",
    "measured_apart",
    "peak_bytes",
    "resident_bytes",
    "rows_apart",
]

ROOT = Path(__file__).resolve().parents[2]
STATUS = Path("/proc/self/status")


def measured_apart(module: str, *arguments: int, unfragmented: bool = False) -> dict[str, Any]:
    """Run ``python -m module arguments threads`` and return the figures that it prints.

    Args:
        module: The name of the module to run.
        arguments: Its arguments; the number of torch's threads is added as the last one.
        unfragmented: Give every large block pages of its own. Otherwise glibc's heap keeps what
            was freed, and the peak counts it.
    """
    environment = dict(os.environ)
    if unfragmented:
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    words = [str(value) for value in (*arguments, torch.get_num_threads())]
    figures: dict[str, Any] = _last_line(Path(sys.executable), module, words, environment)
    return figures


def rows_apart(python: Path, module: str, *, quick: bool) -> list[Row]:
    """Run ``python -m module quick threads`` in another environment; it prints its rows."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    words = [str(int(quick)), str(torch.get_num_threads())]
    return [Row(**row) for row in _last_line(python, module, words, environment)]


def _last_line(
    python: Path, module: str, words: Sequence[str], environment: Mapping[str, str]
) -> Any:
    """Run a module and read the last line that it prints as JSON."""
    completed = subprocess.run(
        [str(python), "-m", module, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if completed.returncode:
        raise RuntimeError(f"{module} failed:\n{completed.stderr}")
    return json.loads(completed.stdout.splitlines()[-1])


def environment_python(folder: Path) -> Path:
    """Where the interpreter of a virtual environment lies."""
    if os.name == "nt":
        return folder / "Scripts" / "python.exe"
    return folder / "bin" / "python"


def peak_bytes() -> int:
    """The process's largest resident set so far.

    ``ru_maxrss`` starts at the parent's resident set, which may exceed anything that happens here;
    Linux's ``VmHWM`` counts from the start of the program.
    """
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # which counts bytes, where others count kibibytes
        return maximum
    return 1024 * maximum


def resident_bytes() -> int:
    """The process's resident set now; the peak is counted from here on, where the system can."""
    resident = _status_bytes("VmRSS")
    if resident is None:
        return peak_bytes()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return resident


def _status_bytes(name: str) -> int | None:
    """A size that Linux tells of this process, or None on other systems."""
    if not STATUS.exists():
        return None
    match = re.search(rf"{name}:\s*(\d+) kB", STATUS.read_text(encoding="utf-8"))
    if match is None:
        return None
    return 1024 * int(match.group(1))
