"""Pool-based active learning: train, choose a batch, label it, train anew.

A `Task` holds the standardised rows of one repetition. `learning_curves` runs all methods on all
repetitions: in each round the networks of all runs train at once (`trained`), are scored on the
test rows (`rmse`), and choose the rows to label next (`chosen`). `summary` turns the test errors
into the numbers of the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    """How every network is trained, from scratch.

    Attributes:
        hidden: Widths of the hidden layers.
        steps: Steps of Adam, on random batches, with a cosine schedule to zero.
        batch: Rows of a step.
        rate: The first learning rate.
        decay: Decoupled weight decay.
    """

    hidden: tuple[int, ...] = (64, 64)
    steps: int = 1000
    batch: int = 64
    rate: float = 1e-2
    decay: float = 0.1


def trained(
    x: Tensor, y: Tensor, how: Training, generator: torch.Generator, *, copies: int = 1
) -> Stack:
    """One network for each of B training sets, all trained at once.

    Args:
        x: Inputs (B, n, d), standardised.
        y: Targets (B, n).
        how: The training.
        generator: Draws the first weights and the batches.
        copies: The first B / copies sets have first weights and batches of their own, which the
            others repeat in order: what differs between copies is their rows.
    """
    sets, rows, inputs = x.shape
    different = sets // copies
    seeds = torch.randint(2**31, (different,), generator=generator).tolist() * copies
    stack = Stack.drawn(seeds, (inputs, *how.hidden, 1), "silu")
    optimiser = Adam(stack.flat, how.rate, how.decay)
    set_index = torch.arange(sets)[:, None]
    for step in range(how.steps):
        optimiser.rate.fill_(how.rate * (1 + math.cos(math.pi * step / how.steps)) / 2)
        batch = torch.randint(rows, (different, how.batch), generator=generator)
        batch = batch.repeat(copies, 1)  # (B, how.batch)
        squared_error(stack, x[set_index, batch], y[set_index, batch, None])
        optimiser.step(stack.gradient)
    return stack


@dataclass(frozen=True)
class Protocol:
    """One setting.

    Attributes:
        name: The set.
        start: Rows labelled at random before the first round.
        batch: Rows labelled in a round.
        rounds: How often a batch is chosen.
        seeds: Repetitions, each with test rows, pool, start and first weights of its own.
        pool: Rows to choose from, the labelled ones included; fewer where the set is smaller.
        test: Rows to score on.
        ridge: The ridge relative to the Gram matrix's mean diagonal.
        training: How every network is trained, from scratch in each round.
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
    """The rows of one repetition, standardised.

    Inputs are standardised by the pool's mean and spread, which needs no label; the target by the
    mean and spread of the first labels.

    Attributes:
        x: Inputs of the pool, (pool, d).
        y: Targets of the pool, (pool,).
        x_test: Inputs of the test rows, (test, d).
        y_test: Their targets, (test,).
        unit: The spread by which targets were divided.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    unit: float

    @classmethod
    def drawn(cls, rows: Rows, protocol: Protocol, seed: int) -> Task:
        """The rows of a seed; the first ``start`` rows of the pool are labelled."""
        order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(seed))
        test = order[: protocol.test]
        pool = order[protocol.test :][: protocol.pool]

        x = torch.as_tensor(rows.x)
        spread = x[pool].std(0)
        # A constant column is centred and not divided.
        x = (x - x[pool].mean(0)) / spread.where(spread > 0, torch.ones_like(spread))

        y = torch.as_tensor(rows.y)
        first_labels = y[pool[: protocol.start]]
        y = (y - first_labels.mean()) / first_labels.std()
        return cls(
            x=x[pool].float(),
            y=y[pool].float(),
            x_test=x[test].float(),
            y_test=y[test].float(),
            unit=float(first_labels.std()),
        )


METHODS = ("random", "top", "logdet", "variance")
"""Ways to choose rows: see `places_to_label`."""


def learning_curves(rows: Rows, protocol: Protocol, seed: int) -> dict[str, Tensor]:
    """Test RMSE of every method, in the target's unit: (rounds + 1, seeds).

    All methods of one repetition start from the same rows, and each round's networks from the same
    weights, so differences between methods are paired.
    """
    seeds = [seed + repetition for repetition in range(protocol.seeds)]
    tasks = [Task.drawn(rows, protocol, task_seed) for task_seed in seeds]
    # A run is a method in a repetition; runs of one method stand together, as `trained` asks for.
    runs = [(method, repetition) for method in METHODS for repetition in range(len(tasks))]
    labelled = [torch.arange(protocol.start) for _ in runs]  # rows of the pool, for each run

    errors_of_rounds = []
    for number in steps(range(protocol.rounds + 1), f"{protocol.name}, rounds"):
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        x = torch.stack(
            [tasks[repetition].x[labelled[k]] for k, (_, repetition) in enumerate(runs)]
        )
        y = torch.stack(
            [tasks[repetition].y[labelled[k]] for k, (_, repetition) in enumerate(runs)]
        )
        networks = trained(x, y, protocol.training, generator, copies=len(METHODS))

        errors = [
            rmse(networks.picked([k]), tasks[repetition]) for k, (_, repetition) in enumerate(runs)
        ]
        errors_of_rounds.append(torch.tensor(errors))
        if number == protocol.rounds:
            break  # nothing is trained after the last round
        for k, (method, repetition) in enumerate(runs):
            chooser = torch.Generator().manual_seed(seeds[repetition] * 1000 + number)
            new_rows = chosen(
                networks.picked([k]), tasks[repetition], labelled[k], protocol, method, chooser
            )
            labelled[k] = torch.cat([labelled[k], new_rows])

    curves = torch.stack(errors_of_rounds)
    curves = curves.reshape(protocol.rounds + 1, len(METHODS), len(tasks))
    return {method: curves[:, k] for k, method in enumerate(METHODS)}


def chosen(
    network: Stack,
    task: Task,
    labelled: Tensor,
    protocol: Protocol,
    method: str,
    generator: torch.Generator,
) -> Tensor:
    """Rows of the pool to label next.

    Args:
        network: A stack of one network, trained on the labelled rows.
        task: The rows of the repetition.
        labelled: Rows of the pool that have labels.
        protocol: Gives the ridge and the number of rows to choose.
        method: One of `METHODS`.
        generator: Draws rows for "random".
    """
    features = network.features(task.x[None])[0]  # (pool, D)
    gram = rg.Gram(features.shape[1])
    gram.update(features[labelled])
    ridge = protocol.ridge * float(gram.diagonal.mean())
    posterior = rg.Posterior.from_gram(gram, ridge=ridge)

    is_unlabelled = torch.ones(len(features), dtype=torch.bool)
    is_unlabelled[labelled] = False
    (unlabelled,) = is_unlabelled.nonzero(as_tuple=True)
    places = places_to_label(method, posterior, features, unlabelled, protocol.batch, generator)
    return unlabelled[places]


def places_to_label(
    method: str,
    posterior: rg.Posterior,
    features: Tensor,
    unlabelled: Tensor,
    count: int,
    generator: torch.Generator,
) -> Tensor:
    """Which of the unlabelled rows a method chooses, as places among them, (count,).

    "random" takes any rows, "top" the largest variances, "logdet" a batch that says most about the
    last layer's weights, "variance" a batch after which the variances of the whole pool are
    smallest.
    """
    if method == "random":
        return torch.randperm(len(unlabelled), generator=generator)[:count]
    candidates = features[unlabelled]
    if method == "top":
        return selection.top(posterior.variance(candidates), count).indices
    if method == "logdet":
        return selection.greedy(posterior, candidates, count, objective="logdet").indices
    if method == "variance":
        return selection.greedy(
            posterior, candidates, count, objective="variance", of=features
        ).indices
    raise ValueError(f"Expected one of {', '.join(METHODS)}, got {method!r}.")


def rmse(network: Stack, task: Task) -> float:
    """The error on the test rows, in the target's unit."""
    with torch.no_grad():
        errors = network(task.x_test[None])[0, :, 0] - task.y_test
    return task.unit * float(errors.double().square().mean().sqrt())


BASES = ("random", "top")
"""Methods with which the others are compared."""


def summary(curves: Mapping[str, Tensor], protocol: Protocol) -> Found:
    """Everything that the tables and the figure show.

    Differences are taken within each repetition: at the last round, and of the mean over all
    rounds after the first choice.

    Args:
        curves: What `learning_curves` gives.
        protocol: The setting.
    """
    last_of_random = float(curves["random"][-1].mean())
    methods: Found = {}
    for method, curve in curves.items():
        rmse = [mean_and_error(row) for row in curve.tolist()]
        numbers: Found = {
            "rmse": rmse,
            "rmse_thousandths": [_thousandths(pair) for pair in rmse],
            "each": curve,
            "labels_to_randoms_last": labels_needed(
                protocol.labels, curve.mean(1).tolist(), last_of_random
            ),
        }
        for base in BASES:
            numbers[f"less_{base}"] = _paired(curve - curves[base])
        methods[method] = numbers
    return {
        "labels": protocol.labels,
        "repetitions": protocol.seeds,
        "ridge": protocol.ridge,
        "methods": methods,
    }


def _paired(difference: Tensor) -> Found:
    """Means with standard errors of paired differences (rounds + 1, repetitions)."""
    averaged = difference[1:].mean(0)  # before the first choice all methods are alike
    last = mean_and_error(difference[-1].tolist())
    all_rounds = mean_and_error(averaged.tolist())
    return {
        "last": last,
        "all_rounds": all_rounds,
        "thousandths": {"last": _thousandths(last), "all_rounds": _thousandths(all_rounds)},
        "better": int((averaged < 0).sum()),
    }


def _thousandths(pair: tuple[float, float]) -> tuple[float, float]:
    """The same mean and standard error in thousandths."""
    mean, error = pair
    return 1000 * mean, 1000 * error


def labels_needed(labels: list[int], curve: list[float], goal: float) -> float | None:
    """Where a curve first comes down to a goal, by linear interpolation; None where it does not.

    >>> labels_needed([100, 200, 300], [3.0, 1.0, 0.5], 2.0)
    150.0
    """
    if curve[0] <= goal:
        return float(labels[0])
    for k in range(1, len(labels)):
        if curve[k] <= goal:
            share = (curve[k - 1] - goal) / (curve[k - 1] - curve[k])
            return labels[k - 1] + share * (labels[k] - labels[k - 1])
    return None
