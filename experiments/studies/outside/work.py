"""Networks trained on one domain of a set, judged by several error bars inside and outside it.

`judged` draws domains of a set, trains one network a domain and architecture on rows of the domain,
and scores each form of `FORMS`, a constant bar and, for one architecture, a deep ensemble on test
rows inside and outside. `of_kind` trains networks of another kind (`tasks.KINDS`) and scores the
default with and without novelty.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.baselines import deep_ensemble
from experiments.data import domains
from experiments.data.domains import Divided
from experiments.judging import error_bars
from experiments.judging.predictive import Normal, Predictive, row_scores, summary
from experiments.studies.outside import tasks
from experiments.studies.outside.tasks import Rows, Task
from experiments.training.descent import trained
from experiments.training.protocol import Protocol
from rigidities import metrics

FORMS = {
    "paper": error_bars.PAPER,
    "unguarded": rg.Full(guard=False),
    "default": error_bars.FULL,
}
"""The paper's form, and the default without its guard and with it."""

NETS = {
    "50 ReLU": Protocol((50,), "relu", batch=64),
    "2 x 64 ReLU": Protocol((64, 64), "relu", batch=64),
    "2 x 64 SiLU": Protocol((64, 64), "silu", batch=64),
}
"""Architectures by name."""

ENSEMBLES = "50 ReLU"
"""The architecture beside which deep ensembles are trained."""

FIRST_SEED = 50_000
"""The first seed of the networks."""

FIRST_ENSEMBLE_SEED = 10_000

STEPS = 8000
"""The steps of the training, about, in 40 to 300 epochs."""

KEPT = ("nll", "coverage_90", "interval_score", "rmse")
"""Scores that are stored of each side."""


def judged(name: str, *, count: int, seed: int, steps: int) -> dict[str, Any]:
    """Judge all networks of a set by all error bars.

    Args:
        name: the name of the set.
        count: domains of each kind.
        seed: the seed of rows, domains and networks.
        steps: the steps of a network's training.

    Returns:
        ``nets``, one entry a network: its domain, its architecture, the scores of every form inside
        and outside, the AUROC of q; ``rows``; ``seconds``.
    """
    start = time.monotonic()
    divided = domains.drawn(name, count, seed)
    train, valid, (test_x, test_y) = divided.samples.parts
    first_seed = FIRST_SEED + 100 * seed
    seeds = range(first_seed, first_seed + len(divided.domains))
    networks = []
    for architecture, base_protocol in NETS.items():
        protocol = base_protocol.of_length(train[0].shape[1], steps)
        stack = trained(train, valid, protocol, seeds, f"{name}, {architecture}").best
        ensembles = None
        if architecture == ENSEMBLES:
            ensembles = _ensembles(divided, seed, name)
        for k, domain in enumerate(divided.domains):
            forms, auroc = _scores(stack.module(k), divided, k)
            if ensembles is not None:
                mean, variance = ensembles
                ensemble = Normal(mean[k][:, None], variance[k][:, None].sqrt())
                forms["ensemble"] = _sides(ensemble, test_y[k].double(), divided.inside)
            networks.append(
                {
                    "domain": domain.name,
                    "kind": domain.kind,
                    "net": architecture,
                    "forms": forms,
                    "auroc": auroc,
                }
            )
    rows = {
        "train": train[0].shape[1],
        "valid": valid[0].shape[1],
        "inside": divided.inside,
        "outside": test_x.shape[1] - divided.inside,
    }
    return {"nets": networks, "rows": rows, "seconds": time.monotonic() - start}


def of_kind(
    kind: str, *, seeds: int, seed: int, steps: int, most: int | None = None
) -> dict[str, Any]:
    """Judge networks of a kind with and without novelty.

    Args:
        kind: one of `tasks.KINDS`.
        seeds: networks of every task.
        seed: the first of their seeds.
        steps: the steps of a network's training.
        most: the most tasks, the first ones; None for all.

    Returns:
        ``nets``, what `_with_and_without_novelty` gives of each with its "net"; ``seconds``.
    """
    start = time.monotonic()
    networks = []
    for name, task_of in list(tasks.KINDS[kind].items())[:most]:
        for network_seed in range(seed, seed + seeds):
            task = task_of(network_seed)
            network = tasks.trained(task, steps)
            networks.append({"net": name, **_with_and_without_novelty(network, task)})
    return {"nets": networks, "seconds": time.monotonic() - start}


def _with_and_without_novelty(network: nn.Module, task: Task) -> dict[str, Any]:
    """Judge one network by the default, which listens to novelty or does not.

    Args:
        network: the trained network.
        task: its rows.

    Returns:
        The scores "inside", and those "outside" by what is other there: of the default "with" and
        "without" novelty.
    """
    fits = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=error_bars.REPEATED)
        for form in ("without", "with"):
            uq = rg.LastLayerRigidity(network, progress=False)
            uq.fit(task.train, novelty=form == "with")
            error_bars.calibrated(uq, task.valid, error_bars.FULL)
            fits[form] = uq

    def scores(rows: Rows) -> dict[str, Any]:
        x, y = rows
        summaries = {form: summary(row_scores(uq.predict(x), y)) for form, uq in fits.items()}
        return {form: {name: whole[name] for name in KEPT} for form, whole in summaries.items()}

    return {
        "inside": scores(task.inside),
        "outside": {shift: scores(rows) for shift, rows in task.outside.items()},
    }


def _scores(network: nn.Module, divided: Divided, k: int) -> tuple[dict[str, Any], float]:
    """Judge one network by all forms and by a constant bar, in units of the targets' spread.

    Args:
        network: the trained network of the k-th domain.
        divided: the rows of all domains.
        k: the domain.

    Returns:
        The scores of each form on both sides, and the AUROC of q.
    """
    train, valid, (x, y) = ((inputs[k], targets[k]) for inputs, targets in divided.samples.parts)
    uq = error_bars.fitted(network, train)
    forms: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=error_bars.REPEATED)
        for form, method in FORMS.items():
            error_bars.calibrated(uq, valid, method)
            prediction = uq.predict(x)
            forms[form] = _sides(prediction, y, divided.inside)
    # Mean and rigidity are those of the last form, the default.
    mean = prediction.mean.double()
    with torch.no_grad():
        constant = error_bars.constant(network(valid[0]), valid[1])
    constant_bar = Normal(mean, torch.full_like(mean, constant))
    forms["constant"] = _sides(constant_bar, y.double(), divided.inside)
    softness = 1 / prediction.rigidity.double().flatten()  # q, (N,)
    auroc = metrics.auroc(softness[: divided.inside], softness[divided.inside :])
    return forms, auroc


def _sides(prediction: Predictive, y: Tensor, inside_count: int) -> dict[str, Any]:
    """Score the rows inside, which come first, and those outside."""
    rows = row_scores(prediction, y)
    is_inside = torch.arange(len(y)) < inside_count
    inside = summary(rows.picked(is_inside))
    outside = summary(rows.picked(~is_inside))
    return {
        "inside": {name: inside[name] for name in KEPT},
        "outside": {name: outside[name] for name in KEPT},
    }


def _ensembles(divided: Divided, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """Train one deep ensemble a domain; mean and variance of the test rows, (domains, n) each."""
    (train_x, train_y), _, (test_x, _) = divided.samples.parts
    # The members of a domain lie beside each other in one stack of (domains * members) networks.
    members = deep_ensemble.MEMBERS
    repeated = (train_x.repeat_interleave(members, 0), train_y.repeat_interleave(members, 0))
    first_seed = FIRST_ENSEMBLE_SEED + 1000 * seed
    seeds = range(first_seed, first_seed + len(repeated[0]))
    protocol = replace(deep_ensemble.OWN, hidden=NETS[ENSEMBLES].hidden)
    stack = deep_ensemble.trained(repeated, protocol, seeds, f"{name}, ensembles")
    return deep_ensemble.predicted(stack, test_x)
