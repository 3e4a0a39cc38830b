"""Error bars and times against metatrain's LLPR, on a SOAP-BPNN model of metatrain's own.

Both read the same torch module, so both run in the environment that holds metatrain: this one, the
one whose interpreter `METATRAIN_PYTHON` names, or ``.venv-metatrain``.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.frame.apart import ROOT, environment_python, rows_apart
from benchmarks.frame.results import Row, not_run

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
    python = environment_python(ENVIRONMENT)
    if python.exists():
        return python
    return None


def run(*, quick: bool = False) -> list[Row]:
    """Agreement of the error bars, what its conventions change, and times."""
    python = interpreter()
    if python is None:
        return [not_run("error bars and times against metatrain's LLPR", MISSING)]
    return rows_apart(python, "benchmarks.rivals.metatrain_worker", quick=quick)
