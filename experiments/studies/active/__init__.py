"""Which rows to label next: learning curves of random and of greedy batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.data import uci
from experiments.frame.outcome import Outcome, Picture, Table
from experiments.studies.active import texts
from experiments.studies.active.drawing import drawn
from experiments.studies.active.nets import Training
from experiments.studies.active.rounds import Protocol, learning_curves
from experiments.studies.active.scores import curve_table, difference_table, summary

MAIN = Protocol("kin8nm", seeds=16)
CONTRAST = Protocol("naval", rounds=4, seeds=8)
QUICK = Training(hidden=(16,), steps=60, batch=32)


def run(*, quick: bool, seed: int, folder: str | Path | None = None) -> Outcome:
    """Both settings; `folder` holds the data (default: see `experiments.data.uci`)."""
    protocols = [quickened(one) if quick else one for one in (MAIN, CONTRAST)]
    sets = {one.name: uci.read(one.name, folder) for one in protocols}
    found = {
        one.name: summary(learning_curves(sets[one.name], one, seed), one) for one in protocols
    }
    tables: list[Table] = []
    for one in protocols:
        words = {"name": one.name, "seeds": one.seeds}
        tables.append(difference_table(found[one.name], texts.DIFFERENCES.format(**words)))
        tables.append(curve_table(found[one.name], texts.CURVES.format(**words)))
    opening = texts.opening(protocols[0])
    closing = (texts.QUICK, texts.QUICK) if quick else texts.CLOSING
    picture = Picture("curves", drawn(found), texts.CAPTION)
    page = [*opening, picture, *tables[:2], closing[0], *tables[2:], closing[1]]
    return Outcome("Labels where they count", found, page)


def quickened(protocol: Protocol) -> Protocol:
    """Small sizes: shows that it runs."""
    return replace(
        protocol, start=40, batch=20, rounds=2, seeds=2, pool=300, test=200, training=QUICK
    )
