"""A measurement in a process of its own, whose last printed line is JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def measured_apart(module: str, *arguments: int) -> dict[str, Any]:
    """Run ``python -m module arguments threads`` and read what it found."""
    words = [str(value) for value in (*arguments, torch.get_num_threads())]
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
