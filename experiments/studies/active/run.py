"""Which rows to label next: learning curves of random and of greedy batches.

Two sets are tried: one where choosing helps, and one for contrast. `work` trains, chooses, labels
and trains anew; the page shows the test errors against the number of labels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.data import uci
from experiments.frame.outcome import Outcome
from experiments.studies.active import page
from experiments.studies.active.work import Protocol, Training, learning_curves, summary

FULL = (Protocol("kin8nm", seeds=16), Protocol("naval", rounds=4, seeds=8))
"""The main setting, and one for contrast."""

QUICK = tuple(
    replace(
        protocol,
        start=40,
        batch=20,
        rounds=2,
        seeds=2,
        pool=300,
        test=200,
        training=Training(hidden=(16,), steps=60, batch=32),
    )
    for protocol in FULL
)


def run(*, quick: bool, seed: int, folder: str | Path | None = None) -> Outcome:
    """Both settings; `folder` holds the data (default: see `experiments.data.uci`)."""
    protocols = QUICK if quick else FULL
    # All sets are read first: a missing one is known before any work.
    sets = {protocol.name: uci.read(protocol.name, folder) for protocol in protocols}
    numbers = {}
    for protocol in protocols:
        curves = learning_curves(sets[protocol.name], protocol, seed)
        numbers[protocol.name] = summary(curves, protocol)
    entries = page.entries(numbers, protocols, quick=quick)
    return Outcome("Labels where they count", numbers, entries)
