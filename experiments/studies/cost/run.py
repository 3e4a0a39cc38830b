"""What error bars cost: training and predictions by several methods, timed (paper, table 1).

Two workloads, a larger and a small network, are timed by `work.costs` one after the other. The page
shows the ratios beside those of the paper's table.
"""

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
"""How often everything is timed, and how many rows of each kind there are at most (None: all)."""


def run(*, quick: bool, seed: int) -> Outcome:
    """Time all methods on both workloads, always on the CPU and one after the other."""
    settings = QUICK if quick else FULL
    rounds = settings["rounds"]
    most_rows = settings["rows"]
    if most_rows is None:
        workloads = WORKLOADS
    else:
        workloads = {name: work.smaller(most_rows) for name, work in WORKLOADS.items()}

    costs_by_name = {}
    for name in steps(list(workloads), "nets"):
        costs_by_name[name] = costs(workloads[name], rounds=rounds, seed=seed)
    numbers: dict[str, Any] = {
        "settings": {
            "rounds": rounds,
            "threads": torch.get_num_threads(),
            "workloads": {name: asdict(work) for name, work in workloads.items()},
        },
        "nets": costs_by_name,
        "paper": page.THEORY,
    }
    return Outcome("What error bars cost", numbers, page.entries(numbers, workloads))
