"""Pool-based active learning: train, choose a batch, label it, train anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import rigidities as rg
from experiments.data.uci import Rows
from experiments.frame.progress import steps
from experiments.studies.active.nets import Training, trained
from experiments.training.stack import Stack
from rigidities import selection


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
