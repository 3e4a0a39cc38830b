"""Seconds of training and of predictions, and their ratios to a net without error bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from benchmarks.frame.timing import Ratio, Task, Timings, interleaved
from torch import Tensor, nn

import rigidities as rg
from experiments.training import loop
from experiments.training.protocol import Protocol
from experiments.training.stack import ACTIVATIONS

PASSES = (10, 100)
"""Of MC dropout."""

MEMBERS = (5, 10)
"""Of deep ensembles."""

WARMING = 2
"""Epochs before the net's error bars are fitted: its features then look trained."""


def costs(work: Workload, *, rounds: int, seed: int) -> dict[str, Any]:
    """All methods on one workload.

    Args:
        work: the workload.
        rounds: how often everything is timed, in turns.
        seed: of data and weights.

    Returns:
        "seconds", the median of each task; "training" and "inference", ratios to the plain net by
        method; "member", an ensemble's epoch in plain ones; "added_to_training", our two steps in
        plain epochs. All ratios are taken within rounds.
    """
    train, valid, test = (
        work.data(rows, seed + k) for k, rows in enumerate((work.train, work.valid, work.test))
    )
    net = work.net(seed)
    _warmed(net, train, work)
    timed = interleaved({**_epochs(work, train, seed), **_own(net, train, valid)}, rounds=rounds)
    predicted = interleaved(_predictions(work, net, train, valid, test[0], seed), rounds=rounds)
    return {
        "seconds": {
            name: timings.median(name) for timings in (timed, predicted) for name in timings.seconds
        },
        "training": {name: _told(one) for name, one in training(timed, work).items()},
        "inference": {name: _told(one) for name, one in inference(predicted).items()},
        "member": {
            kind: _told(timed.ratio(f"epoch, {kind}", "epoch"))
            for kind in ("variance", "adversarial")
        },
        "added_to_training": _told(Ratio.of([own / epoch for own, epoch in _paired(timed)])),
    }


def training(timed: Timings, work: Workload) -> dict[str, Ratio]:
    """Cost of a whole training of so many epochs, in trainings of the plain net."""
    added = [1 + own / (work.protocol.epochs * epoch) for own, epoch in _paired(timed)]
    found = {"none": Ratio(1.0, 1.0, 1.0, len(added)), "ours": Ratio.of(added)}
    for passes in PASSES:
        found[f"dropout_{passes}"] = timed.ratio("epoch, dropout", "epoch")
    for members in MEMBERS:
        for key, task in (("ensemble", "epoch, variance"), ("adversarial", "epoch, adversarial")):
            found[f"{key}_{members}"] = timed.ratio(task, "epoch", factor=members)
    return found


def inference(timed: Timings) -> dict[str, Ratio]:
    """Cost of predictions, in predictions of the plain net; adversarial training changes none."""
    rounds = len(timed.seconds["predictions"])
    found = {"none": Ratio(1.0, 1.0, 1.0, rounds), "ours": timed.ratio("ours", "predictions")}
    for passes in PASSES:
        found[f"dropout_{passes}"] = timed.ratio(f"dropout, {passes}", "predictions")
    for members in MEMBERS:
        found[f"ensemble_{members}"] = timed.ratio(f"ensemble, {members}", "predictions")
        found[f"adversarial_{members}"] = found[f"ensemble_{members}"]
    return found


def _paired(timed: Timings) -> list[tuple[float, float]]:
    """Seconds of fit and calibration, and of one epoch, round by round."""
    own = map(sum, zip(timed.seconds["fit"], timed.seconds["calibrate"], strict=True))
    return list(zip(own, timed.seconds["epoch"], strict=True))


def _epochs(work: Workload, train: loop.Rows, seed: int) -> dict[str, Task]:
    """One epoch of each kind of net; every call goes on from the last."""
    return {
        "epoch": _epoch(work, work.net(seed), train, loop.squared_error),
        "epoch, dropout": _epoch(work, work.net(seed, dropout=True), train, loop.squared_error),
        "epoch, variance": _epoch(work, work.net(seed, outputs=2), train, gaussian),
        "epoch, adversarial": _epoch(work, work.net(seed, outputs=2), train, adversarial),
    }


def _epoch(work: Workload, net: nn.Module, train: loop.Rows, loss: loop.Loss) -> Task:
    optimiser = loop.adamw(net, work.protocol)
    order = torch.Generator().manual_seed(0)
    return partial(loop.one_pass, net, train, optimiser, work.protocol.batch, order, loss)


def _own(net: nn.Module, train: loop.Rows, valid: loop.Rows) -> dict[str, Task]:
    """What the rigidities add to a training; the wrapper is made anew each time."""
    ready = rg.LastLayerRigidity(net).fit(train, progress=False)
    return {
        "fit": lambda: rg.LastLayerRigidity(net).fit(train, progress=False),
        "calibrate": lambda: ready.calibrate(valid, criterion="nll", progress=False),
    }


def _predictions(
    work: Workload, net: nn.Module, train: loop.Rows, valid: loop.Rows, x: Tensor, seed: int
) -> dict[str, Task]:
    uq = rg.LastLayerRigidity(net).fit(train, progress=False)
    uq.calibrate(valid, criterion="nll", progress=False)
    dropped = work.net(seed, dropout=True)
    members = [work.net(seed + k, outputs=2).eval() for k in range(max(MEMBERS))]
    tasks: dict[str, Callable[[], object]] = {
        "predictions": lambda: plain(net, x, work.block),
        "ours": lambda: uq.predict(x, batch_size=work.block, progress=False),
    }
    for count in PASSES:
        tasks[f"dropout, {count}"] = partial(dropout, dropped, x, work.block, passes=count)
    for count in MEMBERS:
        tasks[f"ensemble, {count}"] = partial(ensemble, members[:count], x, work.block)
    return tasks


def _warmed(net: nn.Module, train: loop.Rows, work: Workload) -> None:
    epoch = _epoch(work, net, train, loop.squared_error)
    for _ in range(WARMING):
        epoch()
    net.zero_grad()
    net.eval()


def _told(ratio: Ratio) -> dict[str, float]:
    return {"median": ratio.median, "lower": ratio.lower, "upper": ratio.upper}


DROPPED = 0.05
"""Probability of dropout; the cost does not depend on it."""

SMALLEST = 1e-6
"""Variance of an ensemble's member."""

STEP = 0.01
"""Adversarial step, in standard deviations of an input: about a hundredth of the range."""


@dataclass(frozen=True)
class Workload:
    """A net, its training and its data.

    Attributes:
        inputs: columns.
        train: training rows.
        valid: validation rows, which calibrate.
        test: rows to predict.
        block: rows of a batch of predictions.
        protocol: of the training.
    """

    inputs: int
    train: int
    valid: int
    test: int
    block: int
    protocol: Protocol

    def smaller(self, rows: int) -> Workload:
        """The same with at most so many rows of each kind."""
        train, valid, test = (min(rows, count) for count in (self.train, self.valid, self.test))
        return replace(self, train=train, valid=valid, test=test)

    def data(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Standard normal inputs and a smooth function of them with noise."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, self.inputs, generator=generator)
        noise = torch.randn(rows, 1, generator=generator)
        return x, torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.1 * noise

    def net(self, seed: int, *, outputs: int = 1, dropout: bool = False) -> nn.Sequential:
        """With dropout, it comes before every layer of weights, the first too."""
        sizes = (self.inputs, *self.protocol.hidden, outputs)
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for before, after in pairwise(sizes):
                layers += [nn.Dropout(DROPPED)] * dropout
                layers += [nn.Linear(before, after), ACTIVATIONS[self.protocol.activation].module()]
        return nn.Sequential(*layers[:-1])


def gaussian(net: nn.Module, inputs: Sequence[Tensor], target: Tensor) -> Tensor:
    """The mean negative log-likelihood of a net with a mean and a variance."""
    mean, variance = moments(net(*inputs))
    return 0.5 * (variance.log() + (target - mean).square() / variance).mean()


def adversarial(net: nn.Module, inputs: Sequence[Tensor], target: Tensor) -> Tensor:
    """The same for the rows and for rows moved a little to where they fit worse."""
    (x,) = (part.detach().requires_grad_() for part in inputs)
    loss = gaussian(net, (x,), target)
    # The graph is kept: the weights' gradient of the first term goes through it again.
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    return (loss + gaussian(net, (x.detach() + STEP * slope.sign(),), target)) / 2


def moments(output: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance from two outputs, each (N, 1)."""
    return output[:, :1], nn.functional.softplus(output[:, 1:]) + SMALLEST


Predicted = tuple[Tensor, Tensor]
"""Mean and variance, (N, 1)."""


@torch.inference_mode()
def plain(net: nn.Module, x: Tensor, block: int) -> Tensor:
    """No error bars."""
    return torch.cat([net(part) for part in x.split(block)])


@torch.inference_mode()
def dropout(net: nn.Module, x: Tensor, block: int, passes: int) -> Predicted:
    """Moments over passes with different units left out; the observation's noise comes on top."""
    net.train()
    return _joined([_moments_of([net(part) for _ in range(passes)]) for part in x.split(block)])


@torch.inference_mode()
def ensemble(nets: Sequence[nn.Module], x: Tensor, block: int) -> Predicted:
    """Moments of the mixture of the members' Gaussians."""
    blocks = []
    for part in x.split(block):
        means, variances = zip(*(moments(net(part)) for net in nets), strict=True)
        mean, spread = _moments_of(means)
        blocks.append((mean, spread + torch.stack(variances).mean(0)))
    return _joined(blocks)


def _moments_of(values: Sequence[Tensor]) -> Predicted:
    stacked = torch.stack(tuple(values))
    return stacked.mean(0), stacked.var(0, correction=0)


def _joined(blocks: Sequence[Predicted]) -> Predicted:
    mean, variance = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return mean, variance
