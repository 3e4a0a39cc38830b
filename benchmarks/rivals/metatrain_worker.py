"""metatrain's LLPR beside the façade, on one model and the same systems; prints rows as JSON.

It runs in the environment that holds metatrain; ``benchmarks.rivals.metatrain`` starts it as
``python -m benchmarks.rivals.metatrain_worker <quick> <threads>``. Numbers come first, then times.

For the comparison the façade follows metatrain's conventions. Rows are divided by the number of
atoms (weights 1/n^2). The `regularizer` stands on the diagonal as it is, where metatrain's
documentation has it squared. The multiplier is sqrt(pi/2) times the mean of |residual| / std.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rigidities as rg
from benchmarks.frame.dense import rank_correlation
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import Task, Timings, figure, interleaved
from benchmarks.rivals.llpr import Jitters, Rival
from benchmarks.rivals.molecules import molecules
from benchmarks.rivals.soap_bpnn import (
    Network,
    Structures,
    by_features,
    by_layers,
    features,
    seeded_network,
    solve_readout,
    structures,
)

RIDGE = 1e-5  # of the Gram's mean diagonal
TOLERANCE = 1e-6
PACKAGES = ("metatrain", "metatensor-torch", "metatomic-torch", "torch-spex", "torch")
Way = Callable[[Network], rg.LastLayerRigidity]
Fitted = dict[str, rg.LastLayerRigidity]
WAYS: dict[str, Way] = {"layers named": by_layers, "features given": by_features}

REL = "relative"
IMPOSED = (
    "imposed on LastLayerRigidity: sample_weight 1/n^2 (it divides features by the number of atoms "
    "n), ridge={:.3g} (its regularizer, added to the diagonal as it is). Its multiplier is that of "
    "squared residuals, the likelihood's. The features are sums over the atoms of each element, "
    "side by side"
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        molecules: To train on, to calibrate on and to test on.
        batch: The molecules of a batch.
        width: The units of a hidden layer.
        timed: Batches of the training data that are timed.
        rounds: How often each task is timed.
    """

    molecules: tuple[int, int, int]
    batch: int
    width: int
    timed: int
    rounds: int


QUICK = Sizes(molecules=(64, 32, 32), batch=16, width=8, timed=2, rounds=1)
WHOLE = Sizes(molecules=(1024, 256, 256), batch=64, width=64, timed=8, rounds=5)


@dataclass(frozen=True)
class Comparison:
    """The model, its data in batches, the rival, and the ridge that both get."""

    network: Network
    train: list[Structures]
    valid: list[Structures]
    test: list[Structures]
    rival: Rival
    ridge: float
    name: str

    @classmethod
    def of(cls, sizes: Sizes) -> Comparison:
        """Everything that is not timed: geometries, neighbour lists, the readout's weights."""
        name, rows = molecules(sum(sizes.molecules))
        network = seeded_network(sizes.width)
        train_end, valid_end, _ = np.cumsum(sizes.molecules)
        train = structures(network, rows[:train_end], sizes.batch)
        valid = structures(network, rows[train_end:valid_end], sizes.batch)
        test = structures(network, rows[valid_end:], sizes.batch)
        solve_readout(network, train)
        ridge = RIDGE * float((features(network, train) / atoms(train)).square().sum(0).mean())
        return cls(
            network=network,
            train=train,
            valid=valid,
            test=test,
            rival=Rival(network, train),
            ridge=ridge,
            name=name,
        )


def atoms(batches: Sequence[Structures]) -> Tensor:
    """Atoms per molecule, (N, 1)."""
    return torch.cat([batch.sizes for batch in batches])[:, None]


def calibrated(case: Comparison, way: Way, power: int) -> rg.LastLayerRigidity:
    """The façade with weights n^-power, the relative ridge and the scale of the likelihood."""
    uq = way(case.network).fit(case.train, sample_weight=lambda batch: batch.sizes**-power)
    ridge = case.ridge if power == 2 else RIDGE * float(uq.gram.diagonal.mean())
    return uq.calibrate(case.valid, method=rg.Paper(ridge=ridge))


def dense_variance(train: Any, rows: Any, ridge: float) -> Any:
    """f^T (F^T F + ridge)^-1 f by a singular value decomposition of F, in NumPy."""
    _, singular, vectors = np.linalg.svd(train, full_matrices=train.shape[0] < train.shape[1])
    padded = np.zeros(len(vectors))
    padded[: len(singular)] = singular
    return ((rows @ vectors.T) ** 2 / (padded**2 + ridge)).sum(1)


def difference(values: Any, expected: Any) -> float:
    """Largest relative difference."""
    return float(np.abs(np.asarray(values) / np.asarray(expected) - 1).max())


# --- numbers -------------------------------------------------------------------------------------


def agreement(case: Comparison, ours: Fitted) -> list[Row]:
    """Variances of every test molecule: ours, theirs, and a dense reference."""
    # The data set and its collated batches give the same covariance; the second replaces the first.
    for data in (case.rival.datasets, case.rival.collated):
        case.rival.fit(data, case.ridge)
    multiplier = case.rival.calibrate(case.valid)
    their_variance = case.rival.std(case.test).square()
    train = (features(case.network, case.train) / atoms(case.train)).numpy()
    quadratic = dense_variance(train, features(case.network, case.test).numpy(), case.ridge)
    table = []
    for name, uq in ours.items():
        variance = uq.predict(case.test).epistemic
        scale = float(uq.scale)
        size = f"{name}, {len(their_variance)} test molecules"
        differences = {
            f"variances less metatrain's, {size}": difference(variance, their_variance),
            f"variances less NumPy's, {size}": difference(variance, quadratic[:, None] * scale**2),
            f"scale less its multiplier, {name}": abs(scale / multiplier - 1),
        }
        for work, value in differences.items():
            table.append(at_most(work, value, TOLERANCE, REL))
    unscaled = their_variance[:, 0] / multiplier**2
    work = "metatrain's variances less NumPy's"
    table.append(at_most(work, difference(unscaled, quadratic), TOLERANCE, REL))
    table[0] = replace(table[0], note=IMPOSED.format(case.ridge))
    return table


def automatic_ridge(case: Comparison, uq: rg.LastLayerRigidity) -> Row:
    """What metatrain's default, the least jitter that lets the matrix factor, does to the bars."""
    common = case.rival.std(case.test)
    with Jitters() as jitters:
        case.rival.fit(case.rival.collated, None)
    case.rival.calibrate(case.valid)
    ratio = case.rival.std(case.test) / common
    (ridge,) = jitters.ridges
    middle = float(ratio.median())
    largest = float(ratio.max())
    if refused(uq, ridge):
        answer = "refuses it, the Gram being singular"
    else:
        answer = "takes it too"
    return for_information(
        "metatrain's automatic ridge: test molecules whose bar is at least ten times as long",
        100 * float((ratio >= 10).double().mean()),
        "per cent",
        note=f"it takes a ridge of {ridge:.0e}; against its bars with the common ridge, both "
        f"calibrated: median ratio {figure(middle)}, largest {largest:.2g}. The hidden layers are "
        f"not trained, only the readout is. LastLayerRigidity {answer}",
        ridge=ridge,
        median=middle,
        largest=largest,
    )


def refused(uq: rg.LastLayerRigidity, ridge: float) -> bool:
    """Whether this library calls the Gram singular at that ridge."""
    try:
        uq.posterior.with_ridge(ridge)
    except ValueError:
        return True
    return False


def other_weights(case: Comparison, uq: rg.LastLayerRigidity) -> list[Row]:
    """How the bars change with the weights of the training loss, all else alike."""
    common = uq.predict(case.test).std[:, 0]
    table = []
    for power, loss in ((1, "1/n (loss: squared error / n)"), (0, "1 (loss: squared error)")):
        other = calibrated(case, by_features, power=power).predict(case.test).std[:, 0]
        ratio = other / common
        low, middle, high = torch.quantile(ratio, ratio.new_tensor([0.05, 0.5, 0.95])).tolist()
        correlation = rank_correlation(other, common)
        row = for_information(
            f"bars with weights {loss} against 1/n^2: 95th over 5th percentile of the ratio",
            high / low,
            note=f"ratio {figure(low)} to {figure(high)}, median {figure(middle)}, rank "
            f"correlation {correlation:.4f}; each with a ridge of {RIDGE:g} of the Gram's mean "
            "diagonal and a scale of its own. 1/n^2 is right for the error per atom, squared, "
            "which metatrain trains with unless told otherwise; its LLPR takes it for every loss",
            quantiles=[low, middle, high],
            spearman=correlation,
        )
        table.append(row)
    return table


# --- times ---------------------------------------------------------------------------------------


def times(case: Comparison, ours: Fitted, sizes: Sizes) -> list[Row]:
    """Fit with factorisation, and prediction, over the first batches of the training data."""
    batches = case.train[: sizes.timed]
    datasets = case.rival.dataset(batches)
    collated = case.rival.collate(datasets)
    tasks: dict[str, Task] = {
        "bare": lambda: bare(case.network, batches),
        "its fit": lambda: case.rival.fit(collated, case.ridge),
        "its fit, data set": lambda: case.rival.fit(datasets, case.ridge),
        "its predict": lambda: case.rival.std(batches),
        "bare again": lambda: bare(case.network, batches),
    }
    for name, uq in ours.items():
        tasks |= our_tasks(case.network, batches, name, uq)
    timings = interleaved(tasks, rounds=sizes.rounds)
    count = sum(len(batch.systems) for batch in batches)
    width = case.network.model.last_layer_feature_size
    work = f"{count:,} molecules of {case.name}, {width} features"
    control = for_information(
        f"the bare pass against itself, {work}",
        timings.ratio("bare again", "bare"),
        "bare passes",
        note="the same work timed twice a round: what differs from 1 is the machine's noise, and "
        "no time below is better known",
        seconds=timings.medians(),
        versions={name: version(name) for name in PACKAGES},
    )
    table = [control]
    for name in WAYS:
        table += compared(timings, name, work)
    return table


def our_tasks(
    network: Network, batches: list[Structures], name: str, uq: rg.LastLayerRigidity
) -> dict[str, Task]:
    """The same through the façade; a fit is factorised too, since theirs is."""

    def fit() -> object:
        fitted = WAYS[name](network).fit(batches, sample_weight=lambda batch: batch.sizes**-2)
        return fitted.posterior

    return {f"fit, {name}": fit, f"predict, {name}": lambda: uq.predict(batches)}


def bare(network: Network, batches: Sequence[Structures]) -> None:
    """The energies alone."""
    with torch.no_grad():
        for batch in batches:
            network(batch)


def compared(timings: Timings, name: str, work: str) -> list[Row]:
    """Ours in units of theirs, with both in bare passes."""
    table = []
    for verb in ("fit", "predict"):
        ours = f"{verb}, {name}"
        theirs = f"its {verb}"
        our_passes = figure(timings.ratio(ours, "bare").median)
        their_passes = figure(timings.ratio(theirs, "bare").median)
        note = f"{our_passes} bare passes, {theirs} {their_passes}"
        if verb == "fit":
            dataset_passes = figure(timings.ratio("its fit, data set", "bare").median)
            note += f" from batches collated before and {dataset_passes} from its own data set"
        ratio = timings.ratio(ours, theirs)
        table.append(for_information(f"{ours}, {work}", ratio, "of its time", note=note))
    return table


def main() -> None:
    """Print the rows as the last line."""
    quick, threads = (int(word) for word in sys.argv[1:])
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    sizes = QUICK if quick else WHOLE
    case = Comparison.of(sizes)
    ours = {name: calibrated(case, way, power=2) for name, way in WAYS.items()}
    uq = ours["features given"]
    table = agreement(case, ours)
    table.append(automatic_ridge(case, uq))
    table += other_weights(case, uq)
    table += times(case, ours, sizes)
    print(json.dumps([asdict(row) for row in table]))


if __name__ == "__main__":
    main()
