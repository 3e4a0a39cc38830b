"""Where and when figures were measured: command, processor, cores, versions, date, load.

`provenance` is called before a run; the command adds the load after it.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

__all__ = ["load", "processor", "provenance"]


def provenance(command: str) -> dict[str, Any]:
    """The circumstances of a run that is about to start."""
    circumstances: dict[str, Any] = {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before": load(),
    }
    if torch.cuda.is_available():
        circumstances["gpu"] = torch.cuda.get_device_name()
    return circumstances


def load() -> float | None:
    """Runnable processes over the last minute: above the cores in use the figures are noisy."""
    if not hasattr(os, "getloadavg"):
        return None
    return round(os.getloadavg()[0], 2)


def processor() -> str:
    """The processor's model name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    text = ""
    if cpuinfo.exists():
        text = cpuinfo.read_text(encoding="utf-8")
    model_name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    if model_name:
        return model_name.group(1)
    name = platform.processor()
    arm_part = re.search(r"^CPU part\s*:\s*(\w+)$", text, re.MULTILINE)
    if arm_part:
        number = arm_part.group(1)
        name = _ARM_PARTS.get(number.lower(), f"part {number}")
    return f"{platform.machine()} {name}".strip()


# Linux on ARM gives part numbers of the architecture's vendor in place of a name.
_ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}
