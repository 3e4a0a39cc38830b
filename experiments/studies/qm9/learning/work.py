"""Which molecules to label next: learning curves of three ways to choose them.

`curve` computes one curve: it trains, fits and scores a network, chooses molecules of the pool,
labels them and begins anew. `together` averages the curves of all seeds and takes differences to
random choice seed by seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

FULL = {
    "start": 500,
    "batch": 700,
    "rounds": 5,
    "pool": 10_000,
    "valid": 500,
    "test": 5000,
    "steps": 8000,
    "checks": 80,
}
QUICK = {
    "start": 30,
    "batch": 15,
    "rounds": 1,
    "pool": 80,
    "valid": 30,
    "test": 40,
    "steps": 12,
    "checks": 3,
    "molecules": 160,
}
"""Arguments of `curve`."""

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
        pool: Molecules to choose from; the first ones are labelled at the start.
        valid: Molecules that are labelled too, for the rate of the training, its best weights and
            the calibration.
        test: Molecules to score on.
        structures: Elements and positions of "pool", "valid" and "test".
        rare: Of the same three, whether each molecule is of a rare kind.
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
    round, networks of the same first weights.

    Args:
        seed: The seed of the molecules, of the start and of the networks.
        strategy: One of `STRATEGIES`.
        start: Molecules labelled at random at first.
        batch: Molecules labelled in a round.
        rounds: How often molecules are chosen.
        pool: Molecules to choose from, the labelled ones included.
        valid: Molecules that follow the training and calibrate.
        test: Molecules to score on.
        steps: Steps of gradient descent of every network, however many molecules it has.
        checks: How often the validation loss is computed in a training.
        molecules: How many molecules are drawn of the set; None for all.

    Returns:
        Of each round: "labels"; of the test "rmse", "mae", "worst" (mean of the largest
        errors), "rmse_rare" (of molecules of rare kinds), "bar" (root mean square), "ratio" of
        rmse and bar; of the labelled molecules "atoms" (mean number) and "rare" (their share).
    """
    task = drawn(seed, pool=pool, valid=valid, test=test, molecules=molecules)
    labelled = torch.arange(start)
    scores_of_rounds = []
    for number in range(rounds + 1):
        round_seed = 1000 * seed + number
        round_task = with_baseline(task, labelled)
        network = trained(round_task, labelled, round_seed, steps=steps, checks=checks)
        uq = fitted(network, round_task, labelled)
        scores_of_rounds.append(scored(uq, round_task, labelled))
        if number == rounds:
            break  # nothing is trained after the last round
        is_unlabelled = torch.ones(len(task.pool), dtype=torch.bool)
        is_unlabelled[labelled] = False
        (unlabelled,) = is_unlabelled.nonzero(as_tuple=True)
        generator = torch.Generator().manual_seed(round_seed)
        places = places_to_label(strategy, uq, round_task, unlabelled, batch, generator)
        labelled = torch.cat([labelled, unlabelled[places]])
    return {name: [scores[name] for scores in scores_of_rounds] for name in scores_of_rounds[0]}


# --- choosing ------------------------------------------------------------------------------------

STRATEGIES = ("random", "greedy", "top")
"""Ways to choose molecules: see `places_to_label`."""


def places_to_label(
    strategy: str,
    uq: rg.LastLayerRigidity,
    task: Task,
    unlabelled: Tensor,
    count: int,
    generator: torch.Generator,
) -> Tensor:
    """Which of the unlabelled molecules are labelled next, as places among them, (count,).

    "random" takes any molecules, "top" the largest bars, and "greedy" a batch after which the bars
    of the whole pool are smallest.

    Args:
        strategy: One of `STRATEGIES`.
        uq: Error bars from the labelled molecules.
        task: The molecules of the seed.
        unlabelled: Molecules of the pool without labels.
        count: How many are chosen.
        generator: Draws molecules for "random".
    """
    if strategy == "random":
        return torch.randperm(len(unlabelled), generator=generator)[:count]
    candidates = batches_of(task.pool, unlabelled)
    if strategy == "top":
        return uq.select(candidates, count, objective="top").indices.cpu()
    if strategy == "greedy":
        selection = uq.select(
            candidates,
            count,
            objective="variance",
            # A new molecule of k atoms enters the fit with the weight 1 / k, as it does the loss.
            weights=1 / task.pool.counts[unlabelled].double(),
            of=task.pool.batches(BATCH),
        )
        return selection.indices.cpu()
    raise ValueError(f"Expected one of {', '.join(STRATEGIES)}, got {strategy!r}.")


def batches_of(molecules: Environments, rows: Tensor) -> Iterator[Batch]:
    """Batches of some molecules, without a copy of all their descriptors."""
    return map(molecules.batch, rows.split(BATCH))


# --- one round -----------------------------------------------------------------------------------


def drawn(seed: int, *, pool: int, valid: int, test: int, molecules: int | None = None) -> Task:
    """The molecules of a seed."""
    with samples.drawn(0, seed, train=pool, valid=valid, molecules=molecules) as data:
        rows = {"pool": data.train, "valid": data.valid, "test": data.test[:test]}
        environments = {}
        structures = {}
        for name, rows_of_name in rows.items():
            molecules_of_name = data.environments(rows_of_name)
            # Whole energies: the baseline is that of the labelled molecules, not of the pool.
            energy = data.molecules.energy[rows_of_name].to(molecules_of_name.y)
            environments[name] = replace(molecules_of_name, y=energy)
            structures[name] = data.molecules.structures.picked(rows_of_name)
    kinds = {name: novelty.kinds(molecules) for name, molecules in structures.items()}
    shares = novelty.rarity(kinds["pool"])
    rare_kinds = [kind for kind, share in shares.items() if share < RARE]
    rare = {}
    for name, kinds_of_name in kinds.items():
        rare[name] = torch.zeros(len(environments[name]), dtype=torch.bool)
        for kind in rare_kinds:
            rare[name] |= kinds_of_name[kind]
    return Task(
        pool=environments["pool"],
        valid=environments["valid"],
        test=environments["test"],
        structures=structures,
        rare=rare,
    )


def with_baseline(task: Task, labelled: Tensor) -> Task:
    """The energies less a linear baseline, which the labelled molecules give."""
    energies = task.pool.y[labelled.to(task.pool.y.device)].cpu()
    baseline = composition.fitted(task.structures["pool"].picked(labelled), energies, SPECIES)

    def above_baseline(molecules: Environments, name: str) -> Environments:
        return replace(molecules, y=molecules.y - baseline(task.structures[name]).to(molecules.y))

    return replace(
        task,
        pool=above_baseline(task.pool, "pool"),
        valid=above_baseline(task.valid, "valid"),
        test=above_baseline(task.test, "test"),
    )


def trained(task: Task, labelled: Tensor, seed: int, *, steps: int, checks: int) -> torch.nn.Module:
    """A network from scratch, with the weights of the smallest validation loss.

    Descriptors are standardised on the pool, which takes no labels.

    Args:
        task: The molecules.
        labelled: Molecules of the pool to train on.
        seed: The seed of first weights and batches.
        steps: Steps of gradient descent.
        checks: How often the validation loss is computed.
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
    uq = rg.LastLayerRigidity(net.to(device()), progress=False)
    uq.fit(batches_of(task.pool, labelled), sample_weight=loss_weight)
    uq.calibrate(task.valid.batches(BATCH), method="paper")
    return uq


def scored(uq: rg.LastLayerRigidity, task: Task, labelled: Tensor) -> dict[str, float]:
    """The scores of one round, as in `curve`."""
    p = uq.predict(task.test.batches(BATCH))
    mean = p.mean.cpu()
    target = task.test.y.cpu()
    errors = (mean - target).abs()
    rmse = metrics.rmse(mean, target)
    bar = float(p.std.cpu().square().mean().sqrt())
    rare = task.rare["test"]
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
        curves: What `curve` gave, by strategy, seed after seed in the same order.
        sizes: The arguments of `curve` besides seed and strategy.

    Returns:
        "labels"; "settings"; "strategies", of each the scores as [mean, standard error], round by
        round, and in "less_random" those of its differences from random choice, seed by seed: in
        "rounds", in the "last", and in "all_rounds", averaged over those after the start.
    """
    random_curves = curves["random"]
    first = random_curves[0]
    names = [name for name in first if name != "labels"]
    strategies: dict[str, Any] = {}
    for strategy, curves_of_seeds in curves.items():
        averages: dict[str, Any] = {}
        for name in names:
            averages[name] = _mean_of_rounds([curve[name] for curve in curves_of_seeds])
        if strategy != "random":
            averages["less_random"] = {
                name: _less(
                    [curve[name] for curve in curves_of_seeds],
                    [curve[name] for curve in random_curves],
                )
                for name in ERRORS
            }
        strategies[strategy] = averages
    return {
        "labels": first["labels"],
        "settings": {
            **sizes,
            "seeds": len(random_curves),
            "rare": RARE,
            "worst": WORST,
            "step": fitting.PROTOCOL.batch,
        },
        "strategies": strategies,
    }


def _mean_of_rounds(curves: Sequence[Sequence[float]]) -> list[list[float]]:
    """[mean, standard error] over seeds, round by round."""
    return [list(mean_and_error(list(values))) for values in zip(*curves, strict=True)]


def _less(
    curves: Sequence[Sequence[float]], random_curves: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Differences of curves from those of random choice, seed by seed."""
    differences = []
    for curve, random_curve in zip(curves, random_curves, strict=True):
        differences.append([a - b for a, b in zip(curve, random_curve, strict=True)])
    after_the_start = [difference[1:] for difference in differences]
    averages = [sum(difference) / len(difference) for difference in after_the_start]
    return {
        "rounds": _mean_of_rounds(differences),
        "last": list(mean_and_error([difference[-1] for difference in differences])),
        "all_rounds": list(mean_and_error(averages)),
    }
