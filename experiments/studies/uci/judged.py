"""Splits of a set one by one, and what methods say of their test rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.data import uci
from experiments.data.benchmark import STEPS, copied, divisions, standardised
from experiments.judging.predictive import RowScores, with_and_without

Rows = tuple[Tensor, Tensor]
"""x (n, d) and y (n, 1) of one split."""

REPEATED = r"\d+ of \d+ calibration rows stand in the training data"
"""What the library says of calibration rows that were trained on."""

Methods = dict[str, list[dict[str, Any]]]
"""Of each method and split: the summaries "all" and "new", and what was "chosen"."""


class Divided(NamedTuple):
    """One split: rows, the unit of the target, the step of a grid in it, and copies."""

    train: Rows
    valid: Rows
    test: Rows
    unit: float
    step: float | None
    copied: Tensor

    @property
    def target(self) -> Tensor:
        """Of the test rows, (n,)."""
        return self.test[1].double().flatten()


class Judged(NamedTuple):
    """What a method says of one split's test rows, in the unit of standardised targets."""

    method: str
    rows: RowScores
    chosen: dict[str, Any]


def divided(name: str, splits: int, drawing: str, seed: int) -> Iterator[Divided]:
    """The splits of a set, one after the other."""
    rows = uci.read(name)
    found = divisions(rows, splits, drawing, seed)
    lists = (np.stack([getattr(one, part) for one in found]) for part in ("train", "valid", "test"))
    samples = standardised(rows, *lists)
    for k, (unit, split) in enumerate(zip(samples.unit.tolist(), found, strict=True)):
        parts = [(x[k], y[k]) for x, y in samples.parts]
        step = STEPS[name] / unit if name in STEPS else None
        yield Divided(*parts, unit, step, torch.from_numpy(copied(rows, split)))


def collect(methods: Methods, split: Divided, ways: Iterable[Judged]) -> None:
    """Add the scores of a split, in the target's unit."""
    with warnings.catch_warnings():
        # The published sets hold some rows several times; the page says so.
        warnings.filterwarnings("ignore", message=REPEATED)
        for method, rows, chosen in ways:
            scores = with_and_without(rows.in_unit(split.unit), split.copied)
            methods.setdefault(method, []).append({**scores, "chosen": chosen})
