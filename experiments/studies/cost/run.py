"""What error bars cost: training and predictions by several methods, timed (paper, table 1)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from experiments.frame.outcome import Outcome
from experiments.frame.progress import steps
from experiments.studies.cost import page
from experiments.studies.cost.work import Workload, costs
from experiments.training.protocol import FORECASTS, Protocol

WORKLOADS = {
    "larger net": Workload(
        inputs=22, train=50_000, valid=10_000, test=10_000, block=1024, protocol=FORECASTS
    ),
    "small net": Workload(
        inputs=8, train=8_000, valid=1_000, test=8_000, block=1024, protocol=Protocol()
    ),
}
"""One like that of `weather`, one like those of the benchmark of small sets."""

FULL = {"rounds": 7, "rows": None}
QUICK = {"rounds": 2, "rows": 200}
"""How often everything is timed, and at most so many rows of each kind."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Time all methods on both workloads, always on the CPU and one after the other."""
    sizes = QUICK if quick else FULL
    rounds, rows = sizes["rounds"], sizes["rows"]
    works = {k: one if rows is None else one.smaller(rows) for k, one in WORKLOADS.items()}
    found = {
        name: costs(works[name], rounds=rounds, seed=seed) for name in steps(list(works), "nets")
    }
    numbers = {"settings": _settings(works, rounds), "nets": found, "paper": page.THEORY}
    return Outcome("What error bars cost", numbers, page.entries(numbers, works))


def _settings(works: dict[str, Workload], rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "workloads": {name: asdict(work) for name, work in works.items()},
    }
