"""Pool-based active learning: train, choose a batch, label it, train anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

import rigidities as rg
from experiments.data.uci import Rows
from experiments.frame.outcome import Found, mean_and_error
from experiments.frame.progress import steps
from experiments.training.adam import Adam
from experiments.training.objectives import squared_error
from experiments.training.stack import Stack
from rigidities import selection


@dataclass(frozen=True)
class Training:
    """How every net is trained, from scratch.

    Attributes:
        hidden: widths of the hidden layers.
        steps: of Adam, on random batches, with a cosine schedule to zero.
        batch: rows a step.
        rate: the first learning rate.
        decay: decoupled weight decay.
    """

    hidden: tuple[int, ...] = (64, 64)
    steps: int = 1000
    batch: int = 64
    rate: float = 1e-2
    decay: float = 0.1


def trained(
    x: Tensor, y: Tensor, how: Training, generator: torch.Generator, *, copies: int = 1
) -> Stack:
    """One net for each of B training sets.

    Args:
        x: (B, n, d), standardised.
        y: (B, n).
        how: the training.
        generator: of the first weights and of the batches.
        copies: the first B / copies sets have first weights and batches of their own, which the
            others repeat in order: what differs between copies is their rows.
    """
    sets, rows, inputs = x.shape
    seeds = torch.randint(2**31, (sets // copies,), generator=generator).tolist() * copies
    stack = Stack.drawn(seeds, (inputs, *how.hidden, 1), "silu")
    optimiser = Adam(stack.flat, how.rate, how.decay)
    which = torch.arange(sets)[:, None]
    for step in range(how.steps):
        optimiser.rate.fill_(how.rate * (1 + math.cos(math.pi * step / how.steps)) / 2)
        pick = torch.randint(rows, (sets // copies, how.batch), generator=generator)
        pick = pick.repeat(copies, 1)
        squared_error(stack, x[which, pick], y[which, pick, None])
        optimiser.step(stack.gradient)
    return stack


@dataclass(frozen=True)
class Protocol:
    """One setting.

    Attributes:
        name: of the set.
        start: rows labelled at random before the first round.
        batch: rows labelled a round.
        rounds: of choosing.
        seeds: repetitions, each with test rows, pool, start and first weights of its own.
        pool: rows to choose from, the labelled ones included; fewer where the set is smaller.
        test: rows to score on.
        ridge: relative to the Gram's mean diagonal.
        training: of every net, from scratch in each round.
    """

    name: str = "kin8nm"
    start: int = 100
    batch: int = 100
    rounds: int = 6
    seeds: int = 20
    pool: int = 6000
    test: int = 2000
    ridge: float = 1e-3
    training: Training = field(default_factory=Training)

    @property
    def labels(self) -> list[int]:
        """Labelled rows at each training."""
        return [self.start + number * self.batch for number in range(self.rounds + 1)]


@dataclass(frozen=True)
class Task:
    """What one repetition works on, standardised.

    Inputs by the pool's mean and spread (no label is needed), the target by the first labels'.
    """

    x: Tensor  # (pool, d)
    y: Tensor  # (pool,)
    x_test: Tensor
    y_test: Tensor
    unit: float  # of the target

    @classmethod
    def drawn(cls, rows: Rows, protocol: Protocol, seed: int) -> Task:
        """The rows of a seed; the first ``start`` of the pool are labelled."""
        order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(seed))
        test, pool = order[: protocol.test], order[protocol.test :][: protocol.pool]
        x, y = torch.as_tensor(rows.x), torch.as_tensor(rows.y)
        centre, spread = x[pool].mean(0), x[pool].std(0)
        x = (x - centre) / spread.where(spread > 0, torch.ones_like(spread))
        first = y[pool[: protocol.start]]
        y = (y - first.mean()) / first.std()
        parts = (part.float() for part in (x[pool], y[pool], x[test], y[test]))
        return cls(*parts, unit=float(first.std()))


Choice = Callable[[rg.Posterior, Tensor, Tensor, int, torch.Generator], Tensor]
"""(posterior, features of the pool, unlabelled rows, batch, generator) -> places among those."""


def at_random(
    posterior: rg.Posterior, features: Tensor, free: Tensor, n: int, generator: torch.Generator
) -> Tensor:
    """Any n."""
    return torch.randperm(len(free), generator=generator)[:n]


def largest(
    posterior: rg.Posterior, features: Tensor, free: Tensor, n: int, generator: torch.Generator
) -> Tensor:
    """The n largest variances."""
    return selection.top(posterior.variance(features[free]), n).indices


def informative(
    posterior: rg.Posterior, features: Tensor, free: Tensor, n: int, generator: torch.Generator
) -> Tensor:
    """A batch that says most about the last layer's weights."""
    return selection.greedy(posterior, features[free], n, objective="logdet").indices


def calming(
    posterior: rg.Posterior, features: Tensor, free: Tensor, n: int, generator: torch.Generator
) -> Tensor:
    """A batch after which the variances of the whole pool are smallest."""
    return selection.greedy(posterior, features[free], n, objective="variance", of=features).indices


METHODS: dict[str, Choice] = {
    "random": at_random,
    "top": largest,
    "logdet": informative,
    "variance": calming,
}


def learning_curves(rows: Rows, protocol: Protocol, seed: int) -> dict[str, Tensor]:
    """Test RMSE of every method, in the target's unit: (rounds + 1, seeds).

    All methods of one repetition start from the same rows, and each round's nets from the same
    weights, so differences between methods are paired.
    """
    seeds = [seed + number for number in range(protocol.seeds)]
    tasks = [Task.drawn(rows, protocol, one) for one in seeds]
    runs = [(method, place) for method in METHODS for place in range(len(tasks))]
    labelled = [torch.arange(protocol.start) for _ in runs]
    errors = []
    for number in steps(range(protocol.rounds + 1), f"{protocol.name}, rounds"):
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        x = torch.stack(
            [tasks[place].x[own] for (_, place), own in zip(runs, labelled, strict=True)]
        )
        y = torch.stack(
            [tasks[place].y[own] for (_, place), own in zip(runs, labelled, strict=True)]
        )
        nets = trained(x, y, protocol.training, generator, copies=len(METHODS))
        errors.append(
            torch.tensor([rmse(nets.picked([k]), tasks[p]) for k, (_, p) in enumerate(runs)])
        )
        if number < protocol.rounds:
            for k, (method, place) in enumerate(runs):
                chooser = torch.Generator().manual_seed(seeds[place] * 1000 + number)
                more = chosen(
                    nets.picked([k]), tasks[place], labelled[k], protocol, method, chooser
                )
                labelled[k] = torch.cat([labelled[k], more])
    curves = torch.stack(errors).reshape(protocol.rounds + 1, len(METHODS), len(tasks))
    return {method: curves[:, k] for k, method in enumerate(METHODS)}


def chosen(
    nets: Stack,
    task: Task,
    labelled: Tensor,
    protocol: Protocol,
    method: str,
    generator: torch.Generator,
) -> Tensor:
    """Rows of the pool to label next."""
    features = nets.features(task.x[None])[0]
    gram = rg.Gram(features.shape[1])
    gram.update(features[labelled])
    ridge = protocol.ridge * float(gram.diagonal.mean())
    posterior = rg.Posterior.from_gram(gram, ridge=ridge)
    unlabelled = torch.ones(len(features), dtype=torch.bool)
    unlabelled[labelled] = False
    (free,) = unlabelled.nonzero(as_tuple=True)
    return free[METHODS[method](posterior, features, free, protocol.batch, generator)]


def rmse(net: Stack, task: Task) -> float:
    """On the test rows, in the target's unit."""
    with torch.no_grad():
        errors = net(task.x_test[None])[0, :, 0] - task.y_test
    return task.unit * float(errors.double().square().mean().sqrt())


BASES = ("random", "top")


def summary(curves: Mapping[str, Tensor], protocol: Protocol) -> Found:
    """Everything that the tables and the figure show.

    Differences are taken within each repetition: at the last round, and of the mean over all
    rounds after the first choice.
    """
    methods: Found = {}
    for method, curve in curves.items():
        rmse = [mean_and_error(row) for row in curve.tolist()]
        found: Found = {
            "rmse": rmse,
            "rmse_thousandths": [_thousandths(pair) for pair in rmse],
            "each": curve,
            "labels_to_randoms_last": labels_needed(
                protocol.labels, curve.mean(1).tolist(), float(curves["random"][-1].mean())
            ),
        }
        for base in BASES:
            found[f"less_{base}"] = _paired(curve - curves[base])
        methods[method] = found
    return {
        "labels": protocol.labels,
        "repetitions": protocol.seeds,
        "ridge": protocol.ridge,
        "methods": methods,
    }


def _paired(difference: Tensor) -> Found:
    averaged = difference[1:].mean(0)
    pairs = {
        "last": mean_and_error(difference[-1].tolist()),
        "all_rounds": mean_and_error(averaged.tolist()),
    }
    return {
        **pairs,
        "thousandths": {when: _thousandths(pair) for when, pair in pairs.items()},
        "better": int((averaged < 0).sum()),
    }


def _thousandths(pair: tuple[float, float]) -> tuple[float, float]:
    mean, error = pair
    return 1000 * mean, 1000 * error


def labels_needed(labels: list[int], curve: list[float], goal: float) -> float | None:
    """Where a curve first comes down to a goal, by linear interpolation; None where it does not.

    >>> labels_needed([100, 200, 300], [3.0, 1.0, 0.5], 2.0)
    150.0
    """
    if curve[0] <= goal:
        return float(labels[0])
    for place in range(1, len(labels)):
        if curve[place] <= goal:
            share = (curve[place - 1] - goal) / (curve[place - 1] - curve[place])
            return labels[place - 1] + share * (labels[place] - labels[place - 1])
    return None
