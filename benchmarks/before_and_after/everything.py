"""All results of the library that is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

import rigidities as rg
from benchmarks.before_and_after.cases import CASES
from benchmarks.before_and_after.other_cases import DOOR_CASES, MODEL_CASES
from benchmarks.before_and_after.problems import problems
from benchmarks.before_and_after.results import Record, Results
from benchmarks.before_and_after.verbs import verbs

PRECISIONS = {"float64": torch.float64, "float32": torch.float32}
TARGETS = (1, 3)


def all_results(only: str = "") -> Results:
    """Run all cases, or those whose name contains a text."""
    spelling = verbs()
    results = Results(
        about={
            "state": spelling.name,
            "library": str(Path(rg.__file__).parent),
            "torch": torch.__version__,
        }
    )
    for precision, dtype in PRECISIONS.items():
        record = Record(results, precision)
        for targets in TARGETS:
            made = problems(dtype, targets)
            for name, case in CASES.items():
                for problem in case.problems:
                    title = f"{problem}, {targets} target{'s' * (targets > 1)}/{name}"
                    if only in title:
                        torch.manual_seed(0)
                        record.run(title, case.run, spelling, made[problem])
        for name, run in MODEL_CASES.items():
            if only in name:
                torch.manual_seed(0)
                record.run(name, run, spelling, dtype)
    if importlib.util.find_spec("sklearn") is not None:
        for name, run in DOOR_CASES.items():
            if only in name:
                torch.manual_seed(0)
                Record(results, "float64").run(name, run, spelling)
    return results
