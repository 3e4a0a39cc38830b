"""What error bars cost: training and predictions by several methods, timed (paper, table 1)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from experiments.frame.outcome import Outcome, Picture
from experiments.frame.progress import steps
from experiments.studies.cost import tables, texts
from experiments.studies.cost.drawing import drawn
from experiments.studies.cost.measured import costs
from experiments.studies.cost.nets import Workload
from experiments.studies.weather.nets import PROTOCOL
from experiments.training.protocol import Protocol

WORKLOADS = {
    "larger net": Workload(
        inputs=22, train=50_000, valid=10_000, test=10_000, block=1024, protocol=PROTOCOL
    ),
    "small net": Workload(
        inputs=8, train=8_000, valid=1_000, test=8_000, block=1024, protocol=Protocol()
    ),
}
"""One like that of `weather`, one like those of the benchmark of small sets."""

ROUNDS = 7
QUICK_ROUNDS = 2
QUICK_ROWS = 200


def run(*, quick: bool, seed: int) -> Outcome:
    """Time all methods on both workloads, always on the CPU and one after the other."""
    works = {k: one.smaller(QUICK_ROWS) if quick else one for k, one in WORKLOADS.items()}
    rounds = QUICK_ROUNDS if quick else ROUNDS
    found = {
        name: costs(works[name], rounds=rounds, seed=seed) for name in steps(list(works), "nets")
    }
    settings = _settings(works, rounds)
    return Outcome(
        "What error bars cost",
        {"settings": settings, "nets": found, "paper": tables.THEORY},
        [
            *texts.opening(works, settings),
            Picture("ratios", drawn(found), texts.CAPTION),
            *(tables.cost_table(found, name, texts.COSTS) for name in found),
            *texts.closing(found, works),
            tables.second_table(found, texts.SECONDS),
        ],
    )


def _settings(works: dict[str, Workload], rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "workloads": {name: asdict(work) for name, work in works.items()},
    }
