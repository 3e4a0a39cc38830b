"""Seconds of training and of predictions, and their ratios to a network without error bars.

A `Workload` makes data and networks. `costs` times two lists of tasks in turns: epochs of training
beside our fit and calibration, and predictions by every method. `training` and `inference` turn the
seconds into ratios to the plain network's, taken within rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
"""Passes of MC dropout."""

MEMBERS = (5, 10)
"""Members of deep ensembles."""

WARMUP_EPOCHS = 2
"""Epochs before the network's error bars are fitted: its features then look trained."""

DROPOUT = 0.05
"""Probability of dropout; the cost does not depend on it."""

SMALLEST_VARIANCE = 1e-6
"""Of an ensemble's member."""

STEP = 0.01
"""Adversarial step, in standard deviations of an input: about a hundredth of the range."""

Moments = tuple[Tensor, Tensor]
"""Mean and variance, (N, 1) each."""


@dataclass(frozen=True)
class Workload:
    """A network, its training and its data.

    Attributes:
        inputs: Columns of the inputs.
        train: Training rows.
        valid: Validation rows, which calibrate.
        test: Rows to predict.
        block: Rows of a batch of predictions.
        protocol: The training.
    """

    inputs: int
    train: int
    valid: int
    test: int
    block: int
    protocol: Protocol

    def smaller(self, rows: int) -> Workload:
        """The same with at most so many rows of each kind."""
        return replace(
            self,
            train=min(rows, self.train),
            valid=min(rows, self.valid),
            test=min(rows, self.test),
        )

    def data(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Standard normal inputs (rows, inputs) and a smooth function of them with noise."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, self.inputs, generator=generator)
        noise = torch.randn(rows, 1, generator=generator)
        return x, torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.1 * noise

    def net(self, seed: int, *, outputs: int = 1, dropout: bool = False) -> nn.Sequential:
        """An untrained network; dropout comes before every layer of weights, the first too."""
        sizes = (self.inputs, *self.protocol.hidden, outputs)
        activation = ACTIVATIONS[self.protocol.activation].module
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for before, after in pairwise(sizes):
                if dropout:
                    layers.append(nn.Dropout(DROPOUT))
                layers.append(nn.Linear(before, after))
                layers.append(activation())
        return nn.Sequential(*layers[:-1])  # no activation after the last layer


def costs(work: Workload, *, rounds: int, seed: int) -> dict[str, Any]:
    """All methods on one workload.

    Args:
        work: The workload.
        rounds: How often everything is timed, in turns.
        seed: The seed of data and weights.

    Returns:
        "seconds", the median of each task; "training" and "inference", ratios to the plain network
        by method; "member", an ensemble's epoch in plain ones; "added_to_training", our two steps
        in plain epochs. All ratios are taken within rounds.
    """
    train = work.data(work.train, seed)
    valid = work.data(work.valid, seed + 1)
    test_inputs, _ = work.data(work.test, seed + 2)
    network = work.net(seed)
    _warm_up(network, train, work)

    training_tasks = {**_epochs(work, train, seed), **_our_steps(network, train, valid)}
    training_times = interleaved(training_tasks, rounds=rounds)
    prediction_tasks = _predictions(work, network, train, valid, test_inputs, seed)
    prediction_times = interleaved(prediction_tasks, rounds=rounds)

    seconds = {}
    for timings in (training_times, prediction_times):
        for name in timings.seconds:
            seconds[name] = timings.median(name)
    added_epochs = [ours / epoch for ours, epoch in _our_seconds_and_epochs(training_times)]
    return {
        "seconds": seconds,
        "training": _by_name(training(training_times, work)),
        "inference": _by_name(inference(prediction_times)),
        "member": _by_name(
            {
                "variance": training_times.ratio("epoch, variance", "epoch"),
                "adversarial": training_times.ratio("epoch, adversarial", "epoch"),
            }
        ),
        "added_to_training": _quartiles(Ratio.of(added_epochs)),
    }


def training(timed: Timings, work: Workload) -> dict[str, Ratio]:
    """Cost of a whole training by each method, in trainings of the plain network."""
    epochs = work.protocol.epochs
    ours = [1 + ours / (epochs * epoch) for ours, epoch in _our_seconds_and_epochs(timed)]
    ratios = {"none": Ratio(1.0, 1.0, 1.0, len(ours)), "ours": Ratio.of(ours)}
    for passes in PASSES:
        ratios[f"dropout_{passes}"] = timed.ratio("epoch, dropout", "epoch")
    for members in MEMBERS:
        ratios[f"ensemble_{members}"] = timed.ratio("epoch, variance", "epoch", factor=members)
        ratios[f"adversarial_{members}"] = timed.ratio(
            "epoch, adversarial", "epoch", factor=members
        )
    return ratios


def inference(timed: Timings) -> dict[str, Ratio]:
    """Cost of predictions by each method, in predictions of the plain network.

    Adversarial training does not change what predictions cost.
    """
    rounds = len(timed.seconds["predictions"])
    ratios = {"none": Ratio(1.0, 1.0, 1.0, rounds), "ours": timed.ratio("ours", "predictions")}
    for passes in PASSES:
        ratios[f"dropout_{passes}"] = timed.ratio(f"dropout, {passes}", "predictions")
    for members in MEMBERS:
        ratios[f"ensemble_{members}"] = timed.ratio(f"ensemble, {members}", "predictions")
        ratios[f"adversarial_{members}"] = ratios[f"ensemble_{members}"]
    return ratios


def _our_seconds_and_epochs(timed: Timings) -> list[tuple[float, float]]:
    """Seconds of fit and calibration together, and of one epoch, round by round."""
    rounds = zip(
        timed.seconds["fit"], timed.seconds["calibrate"], timed.seconds["epoch"], strict=True
    )
    return [(fit + calibrate, epoch) for fit, calibrate, epoch in rounds]


def _by_name(ratios: dict[str, Ratio]) -> dict[str, dict[str, float]]:
    return {name: _quartiles(ratio) for name, ratio in ratios.items()}


def _quartiles(ratio: Ratio) -> dict[str, float]:
    """Median and quartiles of a ratio over the rounds, as JSON keeps them."""
    return {"median": ratio.median, "lower": ratio.lower, "upper": ratio.upper}


def _epochs(work: Workload, train: loop.Rows, seed: int) -> dict[str, Task]:
    """One epoch of each kind of network; every call goes on from the last."""
    return {
        "epoch": _epoch(work, work.net(seed), train, loop.squared_error),
        "epoch, dropout": _epoch(work, work.net(seed, dropout=True), train, loop.squared_error),
        "epoch, variance": _epoch(work, work.net(seed, outputs=2), train, gaussian),
        "epoch, adversarial": _epoch(work, work.net(seed, outputs=2), train, adversarial),
    }


def _epoch(work: Workload, network: nn.Module, train: loop.Rows, loss: loop.Loss) -> Task:
    """A task that trains a network for one more epoch."""
    optimiser = loop.adamw(network, work.protocol)
    order = torch.Generator().manual_seed(0)

    def train_one_epoch() -> object:
        return loop.one_pass(network, train, optimiser, work.protocol.batch, order, loss)

    return train_one_epoch


def _our_steps(network: nn.Module, train: loop.Rows, valid: loop.Rows) -> dict[str, Task]:
    """What the rigidities add to a training; the wrapper of a fit is made anew each time."""
    fitted = rg.LastLayerRigidity(network, progress=False).fit(train)
    return {
        "fit": lambda: rg.LastLayerRigidity(network, progress=False).fit(train),
        "calibrate": lambda: fitted.calibrate(valid, method="paper"),
    }


def _predictions(
    work: Workload,
    network: nn.Module,
    train: loop.Rows,
    valid: loop.Rows,
    x: Tensor,
    seed: int,
) -> dict[str, Task]:
    """Predictions for inputs x by every method, each of them a task."""
    uq = rg.LastLayerRigidity(network, progress=False).fit(train)
    uq.calibrate(valid, method="paper")
    uq.batch_size = work.block
    with_dropout = work.net(seed, dropout=True)
    members = [work.net(seed + k, outputs=2).eval() for k in range(max(MEMBERS))]

    def dropout_task(passes: int) -> Task:
        return lambda: dropout(with_dropout, x, work.block, passes=passes)

    def ensemble_task(count: int) -> Task:
        return lambda: ensemble(members[:count], x, work.block)

    tasks: dict[str, Callable[[], object]] = {
        "predictions": lambda: plain(network, x, work.block),
        "ours": lambda: uq.predict(x),
    }
    for passes in PASSES:
        tasks[f"dropout, {passes}"] = dropout_task(passes)
    for count in MEMBERS:
        tasks[f"ensemble, {count}"] = ensemble_task(count)
    return tasks


def _warm_up(network: nn.Module, train: loop.Rows, work: Workload) -> None:
    """Train a network for a few epochs, and leave it in evaluation mode without gradients."""
    train_one_epoch = _epoch(work, network, train, loop.squared_error)
    for _ in range(WARMUP_EPOCHS):
        train_one_epoch()
    network.zero_grad()
    network.eval()


def gaussian(network: nn.Module, inputs: Sequence[Tensor], target: Tensor) -> Tensor:
    """The mean negative log-likelihood of a network with a mean and a variance."""
    mean, variance = moments(network(*inputs))
    return 0.5 * (variance.log() + (target - mean).square() / variance).mean()


def adversarial(network: nn.Module, inputs: Sequence[Tensor], target: Tensor) -> Tensor:
    """The same, averaged over the rows and over rows moved a little to where they fit worse."""
    (x,) = inputs
    x = x.detach().requires_grad_()
    loss = gaussian(network, (x,), target)
    # The graph is kept: the weights' gradient of the first term goes through it again.
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    moved = x.detach() + STEP * slope.sign()
    return (loss + gaussian(network, (moved,), target)) / 2


def moments(output: Tensor) -> Moments:
    """Mean and variance from two outputs (N, 2), each (N, 1)."""
    return output[:, :1], nn.functional.softplus(output[:, 1:]) + SMALLEST_VARIANCE


@torch.inference_mode()
def plain(network: nn.Module, x: Tensor, block: int) -> Tensor:
    """Predictions without error bars."""
    return torch.cat([network(rows) for rows in x.split(block)])


@torch.inference_mode()
def dropout(network: nn.Module, x: Tensor, block: int, passes: int) -> Moments:
    """Moments over passes with different units left out; the observation's noise comes on top."""
    network.train()
    blocks = []
    for rows in x.split(block):
        blocks.append(_moments_of([network(rows) for _ in range(passes)]))
    return _joined(blocks)


@torch.inference_mode()
def ensemble(members: Sequence[nn.Module], x: Tensor, block: int) -> Moments:
    """Moments of the mixture of the members' Gaussians."""
    blocks = []
    for rows in x.split(block):
        means, variances = zip(*(moments(member(rows)) for member in members), strict=True)
        mean, spread = _moments_of(means)
        blocks.append((mean, spread + torch.stack(variances).mean(0)))
    return _joined(blocks)


def _moments_of(values: Sequence[Tensor]) -> Moments:
    """Mean and variance over several predictions of the same rows."""
    stacked = torch.stack(tuple(values))
    return stacked.mean(0), stacked.var(0, correction=0)


def _joined(blocks: Sequence[Moments]) -> Moments:
    """Moments of all blocks of rows, one after the other."""
    means, variances = zip(*blocks, strict=True)
    return torch.cat(means), torch.cat(variances)
