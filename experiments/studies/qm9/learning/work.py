"""Which molecules to label next: learning curves of three ways to choose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from experiments.atoms import bpnn, composition, fitting, samples
from experiments.atoms.batches import Batch, Environments, loss_weight
from experiments.atoms.samples import SPECIES
from experiments.atoms.structures import Structures
from experiments.frame.outcome import mean_and_error
from experiments.studies.qm9.novelty import work as novelty
from experiments.training import loop
from experiments.training.protocol import device
from rigidities import metrics

FULL = {"start": 500, "batch": 700, "rounds": 5, "pool": 10_000, "valid": 500, "test": 5000}
FULL |= {"steps": 8000, "checks": 80}
QUICK = {"start": 30, "batch": 15, "rounds": 1, "pool": 80, "valid": 30, "test": 40}
QUICK |= {"steps": 12, "checks": 3, "molecules": 160}

PATIENCE = 10
"""Checks without a better validation loss after which the rate is cut."""

BATCH = 512
RARE = 0.02
"""A kind of molecule is rare where it makes up less of the pool."""

WORST = 0.01
"""The share of the test molecules whose errors are the largest."""


@dataclass(frozen=True)
class Task:
    """What the three ways of one seed have in common; energies in kcal/mol.

    Attributes:
        pool: molecules to choose from; the first ones are labelled at the start.
        valid: labelled too, for the rate of the training, its best weights and the calibration.
        test: to score on.
        structures: of the three, by name.
        rare: the same: whether a molecule is of a rare kind.
    """

    pool: Environments
    valid: Environments
    test: Environments
    structures: Mapping[str, Structures]
    rare: Mapping[str, Tensor]


def curve(
    *,
    seed: int,
    strategy: str,
    start: int,
    batch: int,
    rounds: int,
    pool: int,
    valid: int,
    test: int,
    steps: int,
    checks: int,
    molecules: int | None = None,
) -> dict[str, list[float]]:
    """The scores after each round, the start included.

    With the same seed all ways of choosing have the same molecules, the same start and, in each
    round, nets of the same first weights.

    Args:
        seed: of the molecules, of the start and of the nets.
        strategy: a name in `STRATEGIES`.
        start: molecules labelled at random at first.
        batch: molecules labelled in a round.
        rounds: of choosing.
        pool: molecules to choose from, the labelled ones included.
        valid: molecules that follow the training and calibrate.
        test: molecules to score on.
        steps: of gradient descent of every net, however many molecules it has.
        checks: of the validation loss in a training.
        molecules: draw so few of the set; None for all.

    Returns:
        Of each round: "labels"; of the test "rmse", "mae", "worst" (mean of the largest
        errors), "rmse_rare" (of molecules of rare kinds), "bar" (root mean square), "ratio" of
        rmse and bar; of the labelled molecules "atoms" (mean number) and "rare" (their share).
    """
    task = drawn(seed, pool=pool, valid=valid, test=test, molecules=molecules)
    labelled = torch.arange(start)
    found = []
    for number in range(rounds + 1):
        own = 1000 * seed + number
        known = with_baseline(task, labelled)
        net = trained(known, labelled, own, steps=steps, checks=checks)
        uq = fitted(net, known, labelled)
        found.append(scored(uq, known, labelled))
        if number < rounds:
            free = torch.ones(len(task.pool), dtype=torch.bool)
            free[labelled] = False
            (places,) = free.nonzero(as_tuple=True)
            order = torch.Generator().manual_seed(own)
            more = STRATEGIES[strategy](uq, known, places, batch, order)
            labelled = torch.cat([labelled, places[more]])
    return {name: [one[name] for one in found] for name in found[0]}


# --- choosing ------------------------------------------------------------------------------------


def at_random(
    uq: rg.LastLayerRigidity, task: Task, free: Tensor, n: int, order: torch.Generator
) -> Tensor:
    """Any n of the molecules that are free."""
    return torch.randperm(len(free), generator=order)[:n]


def greedy(
    uq: rg.LastLayerRigidity, task: Task, free: Tensor, n: int, order: torch.Generator
) -> Tensor:
    """A batch after which the bars of the whole pool are smallest.

    A new molecule of k atoms enters the fit with the weight 1 / k, as it does the loss.
    """
    found = uq.select(
        some(task.pool, free),
        n,
        objective="variance",
        weights=1 / task.pool.counts[free].double(),
        of=task.pool.batches(BATCH),
        progress=False,
    )
    return found.indices.cpu()


def largest(
    uq: rg.LastLayerRigidity, task: Task, free: Tensor, n: int, order: torch.Generator
) -> Tensor:
    """The n largest bars."""
    return uq.select(some(task.pool, free), n, objective="top", progress=False).indices.cpu()


def some(molecules: Environments, rows: Tensor) -> Iterator[Batch]:
    """Batches of some molecules, without a copy of all their descriptors."""
    return map(molecules.batch, rows.split(BATCH))


Choice = Callable[[rg.LastLayerRigidity, Task, Tensor, int, torch.Generator], Tensor]

STRATEGIES: dict[str, Choice] = {"random": at_random, "greedy": greedy, "top": largest}


# --- one round -----------------------------------------------------------------------------------


def drawn(seed: int, *, pool: int, valid: int, test: int, molecules: int | None = None) -> Task:
    """The molecules of a seed."""
    with samples.drawn(0, seed, train=pool, valid=valid, molecules=molecules) as data:
        rows = {"pool": data.train, "valid": data.valid, "test": data.test[:test]}
        parts = {name: data.environments(of) for name, of in rows.items()}
        structures = {name: data.molecules.structures.picked(of) for name, of in rows.items()}
        energy = {name: data.molecules.energy[of] for name, of in rows.items()}
    kinds = {name: novelty.kinds(of) for name, of in structures.items()}
    rare = [name for name, share in novelty.rarity(kinds["pool"]).items() if share < RARE]
    masks = {
        name: torch.stack([torch.zeros(len(parts[name])).bool(), *(of[kind] for kind in rare)])
        for name, of in kinds.items()
    }
    # All energies: the baseline is that of the molecules that are labelled, not of the pool.
    whole = {name: replace(part, y=energy[name].to(part.y)) for name, part in parts.items()}
    return Task(**whole, structures=structures, rare={n: mask.any(0) for n, mask in masks.items()})


def with_baseline(task: Task, labelled: Tensor) -> Task:
    """The energies less a linear baseline, which the labelled molecules give."""
    first = task.structures["pool"].picked(labelled)
    baseline = composition.fitted(
        first, task.pool.y[labelled.to(task.pool.y.device)].cpu(), SPECIES
    )
    parts = {
        name: replace(part, y=part.y - baseline(task.structures[name]).to(part.y))
        for name, part in (("pool", task.pool), ("valid", task.valid), ("test", task.test))
    }
    return replace(task, **parts)


def trained(task: Task, labelled: Tensor, seed: int, *, steps: int, checks: int) -> torch.nn.Module:
    """A net from scratch: so many steps, the weights of the smallest validation loss.

    Descriptors are standardised on the pool, which takes no labels.
    """
    net = bpnn.drawn(len(SPECIES), task.pool.x.shape[1], seed)
    net.standardise(task.pool.x.cpu())
    net.to(device())
    protocol = replace(fitting.PROTOCOL, epochs=checks, patience=PATIENCE)

    def some_steps(optimiser: torch.optim.Optimizer, order: torch.Generator) -> None:
        net.train()
        for _ in range(steps // checks):
            places = torch.randint(len(labelled), (protocol.batch,), generator=order)
            optimiser.zero_grad()
            fitting.squared_error(net, task.pool.batch(labelled[places])).backward()
            optimiser.step()

    def valid_loss() -> float:
        return fitting.mean_loss(net, task.valid)

    return loop.descended(net, protocol, seed, some_steps, valid_loss, what="a net").net


def fitted(net: torch.nn.Module, task: Task, labelled: Tensor) -> rg.LastLayerRigidity:
    """Error bars from the labelled molecules, calibrated on the validation molecules."""
    uq = rg.LastLayerRigidity(net.to(device()))
    uq.fit(some(task.pool, labelled), sample_weight=loss_weight, progress=False)
    uq.calibrate(task.valid.batches(BATCH), criterion="nll", progress=False)
    return uq


def scored(uq: rg.LastLayerRigidity, task: Task, labelled: Tensor) -> dict[str, float]:
    """The scores of one round, as in `curve`."""
    found = uq.predict(task.test.batches(BATCH), progress=False)
    mean, std, target = found.mean.cpu(), found.std.cpu(), task.test.y.cpu()
    errors = (mean - target).abs()
    rare = task.rare["test"]
    rmse, bar = metrics.rmse(mean, target), float(std.square().mean().sqrt())
    return {
        "labels": len(labelled),
        "rmse": rmse,
        "mae": float(errors.mean()),
        "worst": float(errors.topk(max(1, int(WORST * len(errors)))).values.mean()),
        "rmse_rare": float(errors[rare].square().mean().sqrt()),
        "bar": bar,
        "ratio": rmse / bar,
        "atoms": float(task.pool.counts[labelled].double().mean()),
        "rare": float(task.rare["pool"][labelled].double().mean()),
    }


# --- all seeds -----------------------------------------------------------------------------------

ERRORS = ("rmse", "mae", "worst", "rmse_rare")
"""Of which differences to random choice are taken."""


def together(
    curves: Mapping[str, Sequence[Mapping[str, list[float]]]], sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """All seeds of all ways of choosing.

    Args:
        curves: of each way, what `curve` gave, seed after seed (in the same order).
        sizes: the arguments of `curve` besides seed and strategy.

    Returns:
        "labels"; "settings"; "strategies", of each the scores as [mean, standard error], round by
        round, and in "less_random" those of its differences from random choice, seed by seed: in
        "rounds", in the "last", and in "all_rounds", averaged over those after the start.
    """
    first = curves["random"][0]
    names = [name for name in first if name != "labels"]
    strategies: dict[str, Any] = {}
    for way, seeds in curves.items():
        own: dict[str, Any] = {name: _rounds([one[name] for one in seeds]) for name in names}
        if way != "random":
            own["less_random"] = {
                name: _less([one[name] for one in seeds], [one[name] for one in curves["random"]])
                for name in ERRORS
            }
        strategies[way] = own
    return {
        "labels": first["labels"],
        "settings": {
            **sizes,
            "seeds": len(curves["random"]),
            "rare": RARE,
            "worst": WORST,
            "step": fitting.PROTOCOL.batch,
        },
        "strategies": strategies,
    }


def _rounds(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """[mean, standard error] over seeds, round by round."""
    return [list(mean_and_error(list(row))) for row in zip(*values, strict=True)]


def _less(own: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Differences, seed by seed."""
    differences = [
        [a - b for a, b in zip(one, two, strict=True)] for one, two in zip(own, other, strict=True)
    ]
    later = [row[1:] for row in differences]
    return {
        "rounds": _rounds(differences),
        "last": list(mean_and_error([row[-1] for row in differences])),
        "all_rounds": list(mean_and_error([sum(row) / len(row) for row in later])),
    }
