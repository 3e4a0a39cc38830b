"""metatrain's LLPR beside the façade, on one model and the same systems; prints rows as JSON.

Runs in the environment that holds metatrain, started by ``benchmarks.metatrain`` as
``python -m benchmarks.rivals.metatrain_worker <quick> <threads>``: numbers first, then times.

metatrain's conventions, imposed on the façade for the comparison: rows are divided by the number of
atoms (weights 1/n^2); its `regularizer` stands on the diagonal as it is, where its documentation
has it squared; the multiplier is sqrt(pi/2) times the mean of |residual| / std.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rigidities as rg
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import Task, Timings, figure, interleaved
from benchmarks.rivals.llpr import Jitters, Theirs
from benchmarks.rivals.molecules import molecules
from benchmarks.rivals.soap_bpnn import (
    Network,
    Structures,
    by_features,
    by_layers,
    features,
    network,
    solve_readout,
    structures,
)

RIDGE = 1e-5  # of the Gram's mean diagonal
PACKAGES = ("metatrain", "metatensor-torch", "metatomic-torch", "torch-spex", "torch")
Way = Callable[[Network], rg.LastLayerRigidity]
Fitted = dict[str, rg.LastLayerRigidity]
WAYS: dict[str, Way] = {"layers named": by_layers, "features given": by_features}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    molecules: tuple[int, int, int]  # training, validation, test
    batch: int
    width: int
    timed: int  # batches of the training data
    rounds: int


QUICK = Sizes((64, 32, 32), 16, 8, 2, 1)
WHOLE = Sizes((1024, 256, 256), 64, 64, 8, 5)


@dataclass(frozen=True)
class Comparison:
    """The model, its data in batches, the rival, and the ridge that both get."""

    net: Network
    train: list[Structures]
    valid: list[Structures]
    test: list[Structures]
    theirs: Theirs
    ridge: float
    name: str

    @classmethod
    def of(cls, sizes: Sizes) -> Comparison:
        """Everything that no time holds: geometries, neighbour lists, the readout's weights."""
        name, rows = molecules(sum(sizes.molecules))
        net = network(sizes.width)
        ends = np.cumsum(sizes.molecules)
        parts = [rows[: ends[0]], rows[ends[0] : ends[1]], rows[ends[1] :]]
        train, valid, test = (structures(net, part, sizes.batch) for part in parts)
        solve_readout(net, train)
        ridge = RIDGE * float((features(net, train) / atoms(train)).square().sum(0).mean())
        return cls(net, train, valid, test, Theirs(net, train), ridge, name)


def atoms(batches: Sequence[Structures]) -> Tensor:
    """Atoms per molecule, (N, 1)."""
    return torch.cat([batch.sizes for batch in batches])[:, None]


def calibrated(case: Comparison, way: Way, power: int) -> rg.LastLayerRigidity:
    """The façade with weights n^-power, the relative ridge and metatrain's calibration."""
    uq = way(case.net).fit(case.train, sample_weight=lambda batch: batch.sizes**-power)
    ridge = case.ridge if power == 2 else RIDGE * float(uq.gram.diagonal.mean())
    uq.calibrate(case.valid, criterion="absolute", ridge=ridge)
    return uq


def dense_variance(train: Any, rows: Any, ridge: float) -> Any:
    """f^T (F^T F + ridge)^-1 f by a singular value decomposition of F, in NumPy."""
    _, singular, vectors = np.linalg.svd(train, full_matrices=train.shape[0] < train.shape[1])
    padded = np.zeros(len(vectors))
    padded[: len(singular)] = singular
    return ((rows @ vectors.T) ** 2 / (padded**2 + ridge)).sum(1)


def difference(found: Any, expected: Any) -> float:
    """Largest relative difference."""
    return float(np.abs(np.asarray(found) / np.asarray(expected) - 1).max())


# --- numbers -------------------------------------------------------------------------------------


def agreement(case: Comparison, ours: Fitted) -> list[Row]:
    """Variances of every test molecule: ours, theirs, and a dense reference."""
    for data in (case.theirs.datasets, case.theirs.collated):  # the second adds nothing
        case.theirs.fit(data, case.ridge)
    multiplier = case.theirs.calibrate(case.valid)
    theirs = case.theirs.std(case.test).square()
    train = (features(case.net, case.train) / atoms(case.train)).numpy()
    dense = dense_variance(train, features(case.net, case.test).numpy(), case.ridge)
    rows = []
    for name, uq in ours.items():
        found = uq.predict(case.test).epistemic
        where = f"{name}, {len(theirs)} test molecules"
        scale, reference = float(uq.scale), dense[:, None] * float(uq.scale) ** 2
        rows += [
            at_most(f"variances less metatrain's, {where}", difference(found, theirs), 1e-6, REL),
            at_most(f"variances less NumPy's, {where}", difference(found, reference), 1e-6, REL),
            at_most(f"scale less its multiplier, {name}", abs(scale / multiplier - 1), 1e-6, REL),
        ]
    own = difference(theirs[:, 0] / multiplier**2, dense)
    rows.append(at_most("metatrain's variances less NumPy's", own, 1e-6, REL))
    return [Row(**{**asdict(rows[0]), "note": IMPOSED.format(case.ridge)}), *rows[1:]]


REL = "relative"
IMPOSED = (
    "imposed on LastLayerRigidity: sample_weight 1/n^2 (it divides features by the number of atoms "
    "n), ridge={:.3g} (its regularizer, added to the diagonal as it is), criterion='absolute' (its "
    "default multiplier). The features are sums over the atoms of each element, side by side"
)


def automatic_ridge(case: Comparison, uq: rg.LastLayerRigidity) -> Row:
    """What its default, the least jitter that lets the matrix factor, makes of the bars."""
    common = case.theirs.std(case.test)
    with Jitters() as jitters:
        case.theirs.fit(case.theirs.collated, None)
    case.theirs.calibrate(case.valid)
    ratio = case.theirs.std(case.test) / common
    (ridge,) = jitters.found
    middle, largest = float(ratio.median()), float(ratio.max())
    answer = "refuses it, the Gram being singular" if refused(uq, ridge) else "takes it too"
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
    theirs = uq.predict(case.test).std[:, 0]
    rows = []
    for power, loss in ((1, "1/n (loss: squared error / n)"), (0, "1 (loss: squared error)")):
        other = calibrated(case, by_features, power=power).predict(case.test).std[:, 0]
        ratio = other / theirs
        low, middle, high = torch.quantile(ratio, ratio.new_tensor([0.05, 0.5, 0.95])).tolist()
        rows.append(
            for_information(
                f"bars with weights {loss} against 1/n^2: 95th over 5th percentile of the ratio",
                high / low,
                note=f"ratio {figure(low)} to {figure(high)}, median {figure(middle)}, rank "
                f"correlation {rank_correlation(other, theirs):.4f}; each with a ridge of {RIDGE:g}"
                " of the Gram's mean diagonal and a scale of its own. 1/n^2 is right for the error "
                "per atom, squared, which metatrain trains with unless told otherwise; its LLPR "
                "takes it for every loss",
                quantiles=[low, middle, high],
                spearman=rank_correlation(other, theirs),
            )
        )
    return rows


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's, of values without ties."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


# --- times ---------------------------------------------------------------------------------------


def times(case: Comparison, ours: Fitted, sizes: Sizes) -> list[Row]:
    """Fit with factorisation, and prediction, over the first batches of the training data."""
    theirs, ridge, part = case.theirs, case.ridge, case.train[: sizes.timed]
    datasets = theirs.dataset(part)
    collated = theirs.collate(datasets)
    tasks: dict[str, Task] = {
        "bare": lambda: bare(case.net, part),
        "its fit": lambda: theirs.fit(collated, ridge),
        "its fit, data set": lambda: theirs.fit(datasets, ridge),
        "its predict": lambda: theirs.std(part),
        "bare again": lambda: bare(case.net, part),
    }
    for name, uq in ours.items():
        tasks |= our_tasks(case.net, part, name, uq)
    timings = interleaved(tasks, rounds=sizes.rounds)
    count, width = sum(len(batch.systems) for batch in part), case.net.model.last_layer_feature_size
    work = f"{count:,} molecules of {case.name}, {width} features"
    control = for_information(
        f"the bare pass against itself, {work}",
        timings.ratio("bare again", "bare"),
        "bare passes",
        note="the same work timed twice a round: what differs from 1 is the machine's noise, and "
        "no time below is better known",
        seconds={task: timings.median(task) for task in timings.seconds},
        versions={name: version(name) for name in PACKAGES},
    )
    return [control, *(row for name in WAYS for row in compared(timings, name, work))]


def our_tasks(
    net: Network, part: list[Structures], name: str, uq: rg.LastLayerRigidity
) -> dict[str, Task]:
    """The same through the façade; a fit is factorised too, since theirs is."""

    def fit() -> object:
        fitted = WAYS[name](net).fit(part, sample_weight=lambda batch: batch.sizes**-2)
        return fitted.posterior

    return {f"fit, {name}": fit, f"predict, {name}": lambda: uq.predict(part)}


def bare(net: Network, batches: Sequence[Structures]) -> None:
    """The energies alone."""
    with torch.no_grad():
        for batch in batches:
            net(batch)


def compared(timings: Timings, name: str, work: str) -> list[Row]:
    """Ours in units of theirs, with both in bare passes."""
    rows = []
    for verb in ("fit", "predict"):
        mine = f"{verb}, {name}"
        passes = [figure(timings.ratio(task, "bare").median) for task in (mine, f"its {verb}")]
        note = f"{passes[0]} bare passes, its {verb} {passes[1]}"
        if verb == "fit":
            whole = figure(timings.ratio("its fit, data set", "bare").median)
            note += f" from batches collated before and {whole} from its own data set"
        ratio = timings.ratio(mine, f"its {verb}")
        rows.append(for_information(f"{mine}, {work}", ratio, "of its time", note=note))
    return rows


def main() -> None:
    """Print the rows as the last line."""
    quick, threads = (int(word) for word in sys.argv[1:])
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    sizes = QUICK if quick else WHOLE
    case = Comparison.of(sizes)
    ours = {name: calibrated(case, way, power=2) for name, way in WAYS.items()}
    uq = ours["features given"]
    rows = [*agreement(case, ours), automatic_ridge(case, uq), *other_weights(case, uq)]
    rows += times(case, ours, sizes)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
