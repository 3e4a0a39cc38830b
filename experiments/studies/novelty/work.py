"""How well the rigidity and the novelty tell unfamiliar rows from familiar ones."""

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
from experiments.studies.novelty.nets import CASES, Case, Data, in_batches, rows_of, smooth, trained
from experiments.training import descent
from experiments.training.protocol import Protocol
from rigidities import metrics

NETS = {
    "2 x 64 ReLU": Protocol((64, 64), "relu", batch=64),
    "64 and 2 ReLU": Protocol((64, 2), "relu", batch=64),
}
FIRST_SEED = 60_000


def on_set(name: str, *, count: int, seed: int, steps: int) -> dict[str, Any]:
    """Nets on domains of a set, asked inside and outside.

    Args:
        name: of the set.
        count: domains of each kind.
        seed: of rows, domains and nets.
        steps: of a net's training.
    """
    start = time.monotonic()
    divided = domains.drawn(name, count, seed)
    train, valid, _ = divided.samples.parts
    found = []
    for architecture, protocol in NETS.items():
        protocol = protocol.of_length(train[0].shape[1], steps)
        seeds = range(FIRST_SEED + 100 * seed, FIRST_SEED + 100 * seed + len(divided.domains))
        stack = descent.trained(train, valid, protocol, seeds, f"{name}, {architecture}").best
        for k in range(len(divided.domains)):
            learnt, judged, (x, y) = ((a[k], b[k]) for a, b in divided.samples.parts)
            uq = _watching(stack.module(k), [learnt], [judged])
            inside = _answers(uq, [(x[: divided.inside], y[: divided.inside])])
            outside = _answers(uq, [(x[divided.inside :], y[divided.inside :])])
            found.append({"net": architecture, **_compared(uq, inside, outside)})
    return {"nets": found, "seconds": time.monotonic() - start}


def of_kind(name: str, *, seeds: int, seed: int, steps: int) -> dict[str, Any]:
    """A net of one kind, asked familiar and unfamiliar data, for some seeds.

    Args:
        name: of the kind, in `nets.CASES`.
        seeds: how many nets.
        seed: of the first.
        steps: of a net's training.
    """
    start = time.monotonic()
    found: dict[str, list[dict[str, Any]]] = {}
    layers: list[str] = []
    for one in range(seed, seed + seeds):
        case = CASES[name](one)
        uq = _watching(trained(case, steps), case.train, case.valid)
        inside = _answers(uq, case.inside)
        layers = list(inside["layers"])
        for unlike, data in case.unlike.items():
            found.setdefault(unlike, []).append(_compared(uq, inside, _answers(uq, data)))
    return {"unlike": found, "layers": layers, "seconds": time.monotonic() - start}


def unseen(*, seeds: int, seed: int, steps: int) -> dict[str, Any]:
    """Failures that no answer without labels can tell.

    The inputs are those of the training, and the truth is another: it has moved, or follows an
    input that never mattered.
    """
    start = time.monotonic()
    found: dict[str, list[dict[str, Any]]] = {}
    for one in range(seed, seed + seeds):
        torch.manual_seed(one)
        net = nn.Sequential(
            nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )
        case: Case = rows_of(net, {})
        uq = _watching(trained(case, steps), case.train, case.valid)
        inside = _answers(uq, case.inside)
        x = torch.randn(800, 6)
        noise = 0.1 * torch.randn(len(x), 1)
        truths = {
            "the truth has moved": smooth(x) + 1.0 + noise,
            "an input matters that never did": smooth(x) + x[:, 4:5] + noise,
        }
        for unlike, y in truths.items():
            outside = _answers(uq, in_batches(x, y))
            found.setdefault(unlike, []).append(_compared(uq, inside, outside))
    return {"unlike": found, "seconds": time.monotonic() - start}


def _watching(net: nn.Module, train: Any, valid: Any) -> rg.LastLayerRigidity:
    """A fit that watches every layer, calibrated by default."""
    uq = rg.LastLayerRigidity(net, forward=_called)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=REPEATED)
        warnings.filterwarnings("ignore", message="Whether")  # rows of atoms have no hashes
        uq.fit(train, novelty=True, progress=False)
        uq.calibrate(valid, progress=False)
    return uq


def _called(model: nn.Module, batch: Any) -> Tensor:
    """The output for a batch, whose inputs are one tensor or several."""
    inputs = batch[0]
    output: Tensor = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return output


def _answers(uq: rg.LastLayerRigidity, data: Data | Any) -> dict[str, Any]:
    """What is said of rows, and whether their 90 % intervals hold."""
    p, novelty = uq.predict(data, progress=False), uq.novelty(data, progress=False)
    y = torch.cat([target for _, target in data])
    low, high = p.interval(0.9)
    return {
        "softness": 1 / p.rigidity.double().flatten(),
        "novelty": novelty.largest.double(),
        "input": novelty.by_layer[:, 0].double(),
        "layer": novelty.layer,
        "layers": novelty.layers,
        "held": ((low <= y) & (y <= high)).flatten(),
    }


def _compared(
    uq: rg.LastLayerRigidity, inside: dict[str, Any], outside: dict[str, Any]
) -> dict[str, Any]:
    """How well each tells rows outside from rows inside, and what novelty flags."""
    assert uq.calibration_report is not None
    flagged = {
        side: float((one["novelty"] > uq.calibration_report.novelty_usual).double().mean())
        for side, one in (("inside", inside), ("outside", outside))
    }
    held = {
        "inside": float(inside["held"].double().mean()),
        "outside": float(outside["held"].double().mean()),
    }
    return {
        "auroc": {
            name: metrics.auroc(inside[name], outside[name])
            for name in ("softness", "novelty", "input")
        },
        "flagged": flagged,
        "held": held,
        "layer": Counter(outside["layer"]).most_common(1)[0][0],
    }
