"""Trained networks, judged one after the other by the default error bars and by parts of them.

`judged_forms` takes the networks of one set. `cases` pairs each network with its rows, `judged`
calibrates it in every form of `FORMS` and scores the test rows inside and outside the domain of the
training.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.data import california, outside, uci
from experiments.data.benchmark import OFFICIAL, STEPS, Samples, divisions, standardised
from experiments.judging import error_bars
from experiments.judging.error_bars import REPEATED
from experiments.judging.predictive import row_scores, summary
from experiments.training import kept
from experiments.training.stack import Stack
from rigidities import metrics

FORMS = {
    "paper": error_bars.PAPER,
    "mixture": rg.Full(noise="constant"),
    "all": error_bars.FULL,
    "unguarded": rg.Full(guard=False),
}
"""The paper's form, one mixture for all rows, the default, and the default without its guard."""

Rows = tuple[Tensor, Tensor]
"""Inputs x (n, d) and targets y (n, 1)."""


@dataclass(frozen=True)
class Case:
    """A network and its rows.

    Attributes:
        network: the trained network.
        train: training rows.
        valid: validation rows.
        test: test rows.
        inside: which test rows lie in the domain of the training, (n,).
        unit: what a target of one means.
        step: the distance of neighbouring targets that lie on a grid, or None.
    """

    network: nn.Module
    train: Rows
    valid: Rows
    test: Rows
    inside: Tensor
    unit: float = 1.0
    step: float | None = None


def judged_forms(
    study: str, name: str, *, count: int, seed: int, epochs: int, nets: str
) -> dict[str, Any]:
    """Judge every form of the error bars of every network of a set.

    Args:
        study: "uci", "outside" or "california", which tells the networks.
        name: the name of the set, or of California's networks.
        count: the number of networks.
        seed: the seed of the networks.
        epochs: the epochs of their training.
        nets: the digest of the networks that come with the project.

    Returns:
        ``forms``: for each form and network, the summaries "inside" and, where there are such rows,
        "outside", and the ``auroc`` of the whole bar; ``auroc`` of the rigidity, one a network; the
        numbers of ``rows`` of the first network; whether the networks were ``committed``;
        ``seconds``.
    """
    start = time.monotonic()
    kept_networks = kept.nets(study, name, count=count, seed=seed, epochs=epochs)
    networks = [judged(case) for case in cases(study, name, kept_networks.stack, seed)]
    return {
        "forms": {form: [network["forms"][form] for network in networks] for form in FORMS},
        "auroc": [network["auroc"] for network in networks if network["auroc"] is not None],
        "committed": kept_networks.committed,
        "nets": nets,
        "rows": networks[0]["rows"],
        "seconds": time.monotonic() - start,
    }


def judged(case: Case) -> dict[str, Any]:
    """Judge one network by all forms.

    Returns:
        What `judged_forms` returns of one network: ``forms``, ``auroc`` and ``rows``.
    """
    uq = error_bars.fitted(case.network, case.train)
    x, y = case.test
    outside_domain = ~case.inside
    forms: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=REPEATED)
        for form, method in FORMS.items():
            uq.calibrate(case.valid, method=method)
            prediction = uq.predict(x)
            rows = row_scores(prediction, y, case.step).in_unit(case.unit)
            scores: dict[str, Any] = {}
            if case.inside.any():
                scores["inside"] = summary(rows.picked(case.inside))
            if outside_domain.any():
                scores["outside"] = summary(rows.picked(outside_domain))
            scores["auroc"] = _auroc(rows.bar, case.inside)
            forms[form] = scores
    # The rigidity is that of the last form: the default's ridge.
    softness = 1 / prediction.rigidity.double().flatten()
    counts = {
        "train": len(case.train[0]),
        "valid": len(case.valid[0]),
        "test": len(x),
        "inside": int(case.inside.sum()),
        "outside": int(outside_domain.sum()),
    }
    return {"forms": forms, "auroc": _auroc(softness, case.inside), "rows": counts}


def _auroc(values: Tensor, inside: Tensor) -> float | None:
    """The probability that a row outside has the larger value; None where no row is outside."""
    if bool(inside.all()):
        return None
    return metrics.auroc(values[inside], values[~inside])


# --- networks and their rows ---------------------------------------------------------------------


def cases(study: str, name: str, stack: Stack, seed: int) -> Iterator[Case]:
    """Yield the networks of a stack with their rows.

    Args:
        study: "uci", "outside" or "california".
        name: the name of the set, or of California's networks.
        stack: the trained networks.
        seed: the seed of the splits.
    """
    if study == "uci":
        return _uci_cases(name, stack, seed)
    if study == "outside":
        return _outside_cases(name, stack, seed)
    return _california_cases(stack, seed)


def _uci_cases(name: str, stack: Stack, seed: int) -> Iterator[Case]:
    """The official splits of a set, all of whose test rows are inside."""
    rows = uci.read(name)
    splits = divisions(rows, len(stack), OFFICIAL, seed)
    samples = standardised(
        rows,
        np.stack([split.train for split in splits]),
        np.stack([split.valid for split in splits]),
        np.stack([split.test for split in splits]),
    )
    for k in range(len(stack)):
        test_count = len(splits[k].test)
        yield _case(name, stack, samples, k, torch.ones(test_count, dtype=torch.bool))


def _outside_cases(name: str, stack: Stack, seed: int) -> Iterator[Case]:
    """Splits of a set whose training rows lie in a domain."""
    divided = outside.drawn(name, len(stack), seed)
    for k in range(len(stack)):
        yield _case(name, stack, divided.samples, k, divided.inside[k])


def _case(name: str, stack: Stack, samples: Samples, k: int, inside: Tensor) -> Case:
    """The k-th network of a stack, and the k-th of stacked training, validation and test rows."""
    train, valid, test = ((x[k], y[k]) for x, y in samples.parts)
    unit = float(samples.unit[k])
    step = None
    if name in STEPS:
        step = STEPS[name] / unit
    return Case(stack.module(k), train, valid, test, inside, unit, step)


def _california_cases(stack: Stack, seed: int) -> Iterator[Case]:
    """Splits of California, divided by the longitude."""
    samples = california.drawn(len(stack), seed, california.OUT_OF_DOMAIN, restricted=True)
    for k, inside in enumerate(samples.inside):
        train, valid, test = samples.of(k)
        yield Case(stack.module(k), train, valid, test, inside)
