"""Where and when figures were measured: command, processor, cores, versions, date, load."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch


def provenance(command: str) -> dict[str, Any]:
    """The circumstances of a run that is about to start."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before": load(),
    } | gpu


def load() -> float | None:
    """Runnable processes over the last minute: above the cores in use the figures are noisy."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def processor() -> str:
    """The processor's model name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    if named:
        return named.group(1)
    part = re.search(r"^CPU part\s*:\s*(\w+)$", text, re.MULTILINE)
    name = _ARM_PARTS.get(part.group(1).lower(), f"part {part.group(1)}") if part else ""
    return f"{platform.machine()} {name or platform.processor()}".strip()


# Linux on ARM gives part numbers of the architecture's vendor in place of a name.
_ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}
