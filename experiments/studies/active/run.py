"""Which rows to label next: learning curves of random and of greedy batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.data import uci
from experiments.frame.outcome import Outcome
from experiments.studies.active import page
from experiments.studies.active.work import Protocol, Training, learning_curves, summary

SMALL = {"start": 40, "batch": 20, "rounds": 2, "seeds": 2, "pool": 300, "test": 200}
FULL = (Protocol("kin8nm", seeds=16), Protocol("naval", rounds=4, seeds=8))
QUICK = tuple(
    replace(one, **SMALL, training=Training(hidden=(16,), steps=60, batch=32)) for one in FULL
)
"""The main setting, and one for contrast."""


def run(*, quick: bool, seed: int, folder: str | Path | None = None) -> Outcome:
    """Both settings; `folder` holds the data (default: see `experiments.data.uci`)."""
    protocols = QUICK if quick else FULL
    sets = {one.name: uci.read(one.name, folder) for one in protocols}
    found = {
        one.name: summary(learning_curves(sets[one.name], one, seed), one) for one in protocols
    }
    return Outcome("Labels where they count", found, page.entries(found, protocols, quick=quick))
