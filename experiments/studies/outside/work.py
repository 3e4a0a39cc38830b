"""Nets trained on one domain of a set, judged by several error bars inside and outside it."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from experiments.baselines import deep_ensemble
from experiments.data import domains
from experiments.data.domains import Divided
from experiments.judging import error_bars
from experiments.judging.error_bars import Calibration
from experiments.judging.predictive import Normal, Predictive, row_scores, summary
from experiments.training.descent import trained
from experiments.training.protocol import Protocol
from rigidities import metrics

FORMS = {
    "paper": error_bars.PAPER,
    "unguarded": Calibration("auto", None, None, guard=False),
    "q": Calibration("auto", None, None, guard="q"),
    "default": error_bars.AUTO,
}
"""The paper's form, and the default without a guard, with one by q alone, and with its own."""

NETS = {
    "50 ReLU": Protocol((50,), "relu", batch=64),
    "2 x 64 ReLU": Protocol((64, 64), "relu", batch=64),
    "2 x 64 SiLU": Protocol((64, 64), "silu", batch=64),
}
ENSEMBLES = "50 ReLU"
"""The nets beside which deep ensembles are trained."""

FIRST_SEED = 50_000
"""Of the nets, none of which the guard was chosen with."""

STEPS = 8000
"""Of the training, about, in 40 to 300 epochs."""

KEPT = ("nll", "coverage_90", "interval_score", "rmse")


def judged(name: str, *, count: int, seed: int, steps: int) -> dict[str, Any]:
    """All nets of a set by all error bars.

    Args:
        name: of the set.
        count: domains of each kind.
        seed: of rows, domains and nets.
        steps: of a net's training.

    Returns:
        ``nets``, one entry a net: its domain, its architecture, the scores of every form inside
        and outside, the AUROC of q; ``rows``; ``seconds``.
    """
    start = time.monotonic()
    divided = domains.drawn(name, count, seed)
    train, valid, test = divided.samples.parts
    found = []
    for architecture, protocol in NETS.items():
        protocol = protocol.of_length(train[0].shape[1], steps)
        seeds = range(FIRST_SEED + 100 * seed, FIRST_SEED + 100 * seed + len(divided.domains))
        stack = trained(train, valid, protocol, seeds, f"{name}, {architecture}").best
        ensembles = None
        if architecture == ENSEMBLES:
            ensembles = _ensembles(divided, seed, name)
        for k, domain in enumerate(divided.domains):
            entry = _one(stack.module(k), divided, k)
            if ensembles is not None:
                mean, variance = (part[k][:, None] for part in ensembles)
                entry["forms"]["ensemble"] = _sides(
                    Normal(mean, variance.sqrt()), test[1][k].double(), divided.inside
                )
            found.append({"domain": domain.name, "kind": domain.kind, "net": architecture, **entry})
    rows = {
        "train": train[0].shape[1],
        "valid": valid[0].shape[1],
        "inside": divided.inside,
        "outside": test[0].shape[1] - divided.inside,
    }
    return {"nets": found, "rows": rows, "seconds": time.monotonic() - start}


def _one(net: torch.nn.Module, divided: Divided, k: int) -> dict[str, Any]:
    """One net by all forms and by a constant bar, in units of the targets' spread."""
    train, valid, (x, y) = ((a[k], b[k]) for a, b in divided.samples.parts)
    uq = error_bars.fitted(net, train)
    forms: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=error_bars.REPEATED)
        for form, how in FORMS.items():
            report = error_bars.calibrated(uq, valid, how)
            p = uq.predict(x)
            forms[form] = _sides(p, y, divided.inside) | {"rung": report.rung}
    with torch.no_grad():
        constant = error_bars.constant(net(valid[0]), valid[1])
    bar = torch.full_like(p.mean.double(), constant)
    forms["constant"] = _sides(Normal(p.mean.double(), bar), y.double(), divided.inside)
    softness = 1 / p.rigidity.double().flatten()
    auroc = metrics.auroc(softness[: divided.inside], softness[divided.inside :])
    return {"forms": forms, "auroc": auroc}


def _sides(p: Predictive, y: Tensor, inside: int) -> dict[str, Any]:
    """Scores of the rows inside, which come first, and outside."""
    rows = row_scores(p, y)
    near = torch.arange(len(y)) < inside
    sides = {"inside": summary(rows.picked(near)), "outside": summary(rows.picked(~near))}
    return {side: {name: one[name] for name in KEPT} for side, one in sides.items()}


def _ensembles(divided: Divided, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """Mean and variance (nets, n) of the test rows by deep ensembles, one a domain."""
    train, _, test = divided.samples.parts
    members = deep_ensemble.MEMBERS
    repeated = (train[0].repeat_interleave(members, 0), train[1].repeat_interleave(members, 0))
    first = 10_000 + 1000 * seed
    seeds = range(first, first + len(repeated[0]))
    protocol = replace(deep_ensemble.OWN, hidden=NETS[ENSEMBLES].hidden)
    stack = deep_ensemble.trained(repeated, protocol, seeds, f"{name}, ensembles")
    return deep_ensemble.predicted(stack, test[0])
