"""Error bars and times against metatrain's LLPR, on a SOAP-BPNN model of metatrain's own.

Both read the same torch module, so both run in the environment that holds metatrain: this one, the
one whose interpreter `METATRAIN_PYTHON` names, or ``.venv-metatrain``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.frame.results import Row, not_run

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-metatrain"
VARIABLE = "METATRAIN_PYTHON"
MISSING = (
    "metatrain is not installed. It fits the pins of constraints.txt, but brings some thirty "
    f"packages, so it gets an environment of its own: `python -m venv {ENVIRONMENT.name}`, then "
    f"`{ENVIRONMENT.name}/bin/pip install -c constraints.txt torch` and "
    f"`{ENVIRONMENT.name}/bin/pip install -c constraints.txt -r "
    f"benchmarks/rivals/metatrain-requirements.txt`; or name a Python that has it in {VARIABLE}"
)


def interpreter() -> Path | None:
    """A Python that has metatrain and its SOAP-BPNN architecture, if there is one."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    if find_spec("metatrain") and find_spec("spex"):
        return Path(sys.executable)
    own = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    return own if own.exists() else None


def run(*, quick: bool = False) -> list[Row]:
    """Agreement, conventions, times."""
    python = interpreter()
    if python is None:
        return [not_run("error bars and times against metatrain's LLPR", MISSING)]
    words = [str(int(quick)), str(torch.get_num_threads())]
    done = subprocess.run(
        [str(python), "-m", "benchmarks.rivals.metatrain_worker", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"benchmarks.rivals.metatrain_worker failed:\n{done.stderr}")
    return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]
