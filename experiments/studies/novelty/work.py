"""How well the rigidity and the novelty tell unfamiliar rows from familiar ones.

Each job trains networks, fits them so that every layer is watched (`_watching`), asks for the
rigidity and the novelty of rows inside and outside (`_answers`), and compares both (`_compared`):
`on_set` on domains of tabular sets, `of_kind` on networks of other kinds, and `unseen` where the
inputs are as in training and only the truth is another.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.data import domains
from experiments.judging.error_bars import REPEATED
from experiments.studies.novelty.tasks import TASKS, in_batches, smooth, smooth_task, trained
from experiments.training import descent
from experiments.training.protocol import Protocol
from rigidities import metrics

NETS = {
    "2 x 64 ReLU": Protocol((64, 64), "relu", batch=64),
    "64 and 2 ReLU": Protocol((64, 2), "relu", batch=64),
}
"""Architectures on the sets, by name."""

FIRST_SEED = 60_000
"""The first seed of the networks on the sets."""


# --- jobs ----------------------------------------------------------------------------------------


def on_set(name: str, *, count: int, seed: int, steps: int) -> dict[str, Any]:
    """Train networks on domains of a set and ask them inside and outside.

    Args:
        name: the name of the set.
        count: domains of each kind.
        seed: the seed of rows, domains and networks.
        steps: the steps of a network's training.

    Returns:
        ``nets``, what `_compared` gives of each with its architecture; ``seconds``.
    """
    start = time.monotonic()
    divided = domains.drawn(name, count, seed)
    train, valid, _ = divided.samples.parts
    first_seed = FIRST_SEED + 100 * seed
    seeds = range(first_seed, first_seed + len(divided.domains))
    comparisons = []
    for architecture, base_protocol in NETS.items():
        protocol = base_protocol.of_length(train[0].shape[1], steps)
        stack = descent.trained(train, valid, protocol, seeds, f"{name}, {architecture}").best
        for k in range(len(divided.domains)):
            train_rows, valid_rows, (x, y) = (
                (inputs[k], targets[k]) for inputs, targets in divided.samples.parts
            )
            uq = _watching(stack.module(k), [train_rows], [valid_rows])
            # The test rows inside come first.
            inside = _answers(uq, [(x[: divided.inside], y[: divided.inside])])
            outside = _answers(uq, [(x[divided.inside :], y[divided.inside :])])
            comparisons.append({"net": architecture, **_compared(uq, inside, outside)})
    return {"nets": comparisons, "seconds": time.monotonic() - start}


def of_kind(name: str, *, seeds: int, seed: int, steps: int) -> dict[str, Any]:
    """Train networks of one kind and ask them familiar and unfamiliar data.

    Args:
        name: the kind, one of `TASKS`.
        seeds: the number of networks.
        seed: the seed of the first.
        steps: the steps of a network's training.

    Returns:
        ``unlike``, what `_compared` gives, by what is unlike in the data and network by network;
        the names of the watched ``layers``; ``seconds``.
    """
    start = time.monotonic()
    comparisons: dict[str, list[dict[str, Any]]] = {}
    layers: list[str] = []
    for network_seed in range(seed, seed + seeds):
        task = TASKS[name](network_seed)
        uq = _watching(trained(task, steps), task.train, task.valid)
        inside = _answers(uq, task.inside)
        layers = list(inside["layers"])
        for unlike, data in task.unlike.items():
            comparison = _compared(uq, inside, _answers(uq, data))
            comparisons.setdefault(unlike, []).append(comparison)
    return {"unlike": comparisons, "layers": layers, "seconds": time.monotonic() - start}


def unseen(*, seeds: int, seed: int, steps: int) -> dict[str, Any]:
    """Ask networks about failures that no answer without labels can tell.

    The inputs are those of the training, and the truth is another: it has moved, or follows an
    input that never mattered.

    Args:
        seeds: the number of networks.
        seed: the seed of the first.
        steps: the steps of a network's training.

    Returns:
        ``unlike`` and ``seconds``, as `of_kind` has them.
    """
    start = time.monotonic()
    comparisons: dict[str, list[dict[str, Any]]] = {}
    for network_seed in range(seed, seed + seeds):
        torch.manual_seed(network_seed)
        network = nn.Sequential(
            nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )
        task = smooth_task(network, {})
        uq = _watching(trained(task, steps), task.train, task.valid)
        inside = _answers(uq, task.inside)
        x = torch.randn(800, 6)
        noise = 0.1 * torch.randn(len(x), 1)
        truths = {
            "the truth has moved": smooth(x) + 1.0 + noise,
            "an input matters that never did": smooth(x) + x[:, 4:5] + noise,
        }
        for unlike, y in truths.items():
            comparison = _compared(uq, inside, _answers(uq, in_batches(x, y)))
            comparisons.setdefault(unlike, []).append(comparison)
    return {"unlike": comparisons, "seconds": time.monotonic() - start}


# --- one network ---------------------------------------------------------------------------------


def _watching(network: nn.Module, train: Any, valid: Any) -> rg.LastLayerRigidity:
    """A fit that watches every layer, calibrated by default.

    Args:
        network: the trained network.
        train: training batches.
        valid: validation batches.
    """
    uq = rg.LastLayerRigidity(network, forward=_output, progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=REPEATED)
        warnings.filterwarnings("ignore", message="Whether")  # rows of atoms have no hashes
        uq.fit(train, novelty=True)
        uq.calibrate(valid)
    return uq


def _output(model: nn.Module, batch: Any) -> Tensor:
    """The output for a batch, whose inputs are one tensor or several."""
    inputs = batch[0]
    if isinstance(inputs, tuple):
        output: Tensor = model(*inputs)
    else:
        output = model(inputs)
    return output


def _answers(uq: rg.LastLayerRigidity, data: Any) -> dict[str, Any]:
    """The answers for the rows of some batches, and whether their 90 % intervals cover the targets.

    Returns:
        "softness" (the inverse of the rigidity), "novelty" (the largest of all layers), "input"
        (that of the first layer) and "held", (N,) each; the most telling "layer" of each row; the
        names of all "layers".
    """
    prediction = uq.predict(data)
    novelty = uq.novelty(data)
    y = torch.cat([target for _, target in data])
    low, high = prediction.interval(0.9)
    return {
        "softness": 1 / prediction.rigidity.double().flatten(),
        "novelty": novelty.largest.double(),
        "input": novelty.by_layer[:, 0].double(),
        "layer": novelty.layer,
        "layers": novelty.layers,
        "held": ((low <= y) & (y <= high)).flatten(),
    }


def _compared(
    uq: rg.LastLayerRigidity, inside: dict[str, Any], outside: dict[str, Any]
) -> dict[str, Any]:
    """How well each answer tells rows outside from rows inside, and what novelty flags.

    Args:
        uq: the calibrated fit.
        inside: the answers for rows inside.
        outside: the answers for rows outside.

    Returns:
        "auroc" by answer; the shares of rows "flagged" by novelty, and of rows whose intervals
        cover the target, "held", on each side; the "layer" that is most often the most telling one
        outside.
    """
    assert uq.calibration_report is not None
    usual = uq.calibration_report.novelty_usual
    return {
        "auroc": {
            answer: metrics.auroc(inside[answer], outside[answer])
            for answer in ("softness", "novelty", "input")
        },
        "flagged": {
            "inside": float((inside["novelty"] > usual).double().mean()),
            "outside": float((outside["novelty"] > usual).double().mean()),
        },
        "held": {
            "inside": float(inside["held"].double().mean()),
            "outside": float(outside["held"].double().mean()),
        },
        "layer": Counter(outside["layer"]).most_common(1)[0][0],
    }
