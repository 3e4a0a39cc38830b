"""Predicted and actual errors of means of many predictions, and of differences of two.

`drawn` splits a set many times, `trained` trains one network on each split, `judged` compares one
network's errors on groups of test rows with what each calibration predicts for them, and `summary`
averages over the networks. `one_set` does all of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import uci
from experiments.frame.progress import steps
from experiments.judging.error_bars import BAYES, FLOOR, FULL, PAPER, SAFE, fitted
from experiments.training import descent
from experiments.training.protocol import Protocol
from rigidities import LastLayerRigidity

PROTOCOL = Protocol(epochs=200, batch=100, rate=3e-3, decay=1e-4, cosine=True)

DEFAULT = "auto"
CALIBRATIONS = {
    "none": PAPER,
    "constant": FLOOR,
    "evidence": SAFE,
    "bayes": BAYES,
    DEFAULT: FULL,
}
"""The calibrations that are compared, by name."""

RULES = ("joint", "independent", "epistemic")
"""How the variance of a quantity is predicted: with the correlations between predictions, without
them, and with them but without the noise."""

DIFFERENCE = "difference"
"""The name of the differences of neighbours, among the sizes of groups."""

LEVEL = 0.9
QUANTILE = math.sqrt(2) * float(torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64)))
"""Half the width of a Gaussian's 90 % interval, in standard deviations."""


@dataclass(frozen=True)
class Sizes:
    """Rows of a split, and how many splits there are.

    Attributes:
        train: Training rows: few beside the whole set, so that the training sets are nearly
            independent.
        valid: Rows for the calibration.
        test: Test rows, which are the rows of the largest group too.
        nets: Number of splits, with one network each.
        judged: How many of the networks, the first ones, are judged by the default. It takes
            seconds where the other calibrations take a fraction of one.
    """

    train: int = 1000
    valid: int = 500
    test: int = 500
    nets: int = 120
    judged: int = 20


@dataclass(frozen=True)
class Samples:
    """The rows of all networks, standardised with the whole set's mean and spread.

    Attributes:
        train: Inputs (nets, rows, inputs) and targets (nets, rows, 1) of the training.
        valid: The same of the calibration.
        test: The same of the test rows.
        common: Inputs (rows, inputs) that no network is trained or calibrated on.
        spread: Standard deviation of the targets, in their own unit.
        pool: How many rows each network's rows are drawn from.
    """

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    common: Tensor
    spread: float
    pool: int


def drawn(name: str, sizes: Sizes, seed: int) -> Samples:
    """Splits of a set: a common group is put aside, the rest is shuffled anew for each network."""
    rows = uci.read(name)
    x = torch.from_numpy(rows.x)
    y = torch.from_numpy(rows.y)[:, None]
    needed = sizes.train + sizes.valid + 2 * sizes.test
    if len(x) < needed:
        raise ValueError(f"Expected at least {needed} rows in {name!r}, got {len(x)}.")
    spread = float(y.std())
    x = _standardised(x)
    y = _standardised(y)

    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    common = order[: sizes.test]
    pool = order[sizes.test :]
    shuffled = torch.stack(
        [pool[torch.randperm(len(pool), generator=generator)] for _ in range(sizes.nets)]
    )  # (nets, rows)
    used = shuffled[:, : needed - sizes.test]
    train, valid, test = used.split([sizes.train, sizes.valid, sizes.test], dim=1)
    return Samples(
        train=(x[train].float(), y[train].float()),
        valid=(x[valid].float(), y[valid].float()),
        test=(x[test].float(), y[test].float()),
        common=x[common].float(),
        spread=spread,
        pool=len(pool),
    )


def _standardised(columns: Tensor) -> Tensor:
    """Columns of mean zero and standard deviation one; a constant column becomes zero."""
    return (columns - columns.mean(0)) / columns.std(0).clamp(min=1e-12)


def trained(x: Tensor, y: Tensor, *, epochs: int, seed: int) -> list[nn.Sequential]:
    """One network for each leading entry of x (nets, rows, inputs) and y (nets, rows, 1).

    Every network sees its own rows in its own order from its own start.
    """
    seeds = [seed * 1000 + network for network in range(len(x))]
    protocol = replace(PROTOCOL, epochs=epochs)
    stack = descent.trained((x, y), None, protocol, seeds).last
    return [stack.module(network) for network in range(len(x))]


@dataclass(frozen=True)
class Groups:
    """Which linear combinations of the test rows are looked at.

    Attributes:
        sizes: Sizes of the groups whose means are taken.
        matrix: (quantities, rows): the means of all groups of each size, then the differences.
        counts: How many quantities belong to each size, then to the differences.
    """

    sizes: tuple[int, ...]
    matrix: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, sizes: tuple[int, ...], pairs: Tensor, rows: int) -> Groups:
        """Groups of consecutive rows, which are in random order, and pairs of rows (P, 2)."""
        eye = torch.eye(rows, dtype=torch.float64)
        blocks = []
        for size in sizes:
            whole_groups = eye[: rows // size * size]  # rows that are left over are in no group
            blocks.append(whole_groups.reshape(-1, size, rows).mean(1))
        blocks.append(eye[pairs[:, 0]] - eye[pairs[:, 1]])
        return cls(sizes, torch.cat(blocks), tuple(len(block) for block in blocks))

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """Values of all quantities, (quantities,), by size of the group or `DIFFERENCE`."""
        return dict(zip(quantity_names(self.sizes), values.split(self.counts), strict=True))


def quantity_names(sizes: Sequence[int]) -> list[str]:
    """What the kinds of quantities are called: the sizes of the groups, then the differences."""
    return [*map(str, sizes), DIFFERENCE]


def nearest(x: Tensor) -> Tensor:
    """Each row and its nearest neighbour, a pair only once: (P, 2)."""
    distance = torch.cdist(x.double(), x.double()).fill_diagonal_(math.inf)
    pairs = torch.stack([torch.arange(len(x)), distance.argmin(1)], 1)
    return pairs.sort(1).values.unique(dim=0)


def judged(
    network: nn.Module,
    samples: Samples,
    index: int,
    sizes: tuple[int, ...],
    calibrations: Sequence[str],
) -> dict[str, Any]:
    """One network: its errors, and the variances that each calibration predicts for them.

    Args:
        network: The network.
        samples: The rows of all networks.
        index: Which of the rows are this network's.
        sizes: Sizes of the groups.
        calibrations: Names of some of `CALIBRATIONS`.

    Returns:
        "error" of every quantity by name, "common", predictions for the common rows, and what
        `_calibration_numbers` gives for each calibration.
    """
    train, valid, test = (
        (x[index], y[index]) for x, y in (samples.train, samples.valid, samples.test)
    )
    x, y = test
    groups = Groups.of(sizes, nearest(x), len(x))
    uq = fitted(network, train)
    with torch.no_grad():
        mean = network(x)[:, 0].double()
        common = network(samples.common)[:, 0].double()
    errors = groups.matrix @ (mean - y[:, 0].double())
    judgement: dict[str, Any] = {"error": groups.split(errors), "common": common}
    for name in calibrations:
        uq.calibrate(valid, method=CALIBRATIONS[name])
        judgement[name] = _calibration_numbers(uq, x, samples.common, groups)
    return judgement


def _calibration_numbers(
    uq: LastLayerRigidity, x: Tensor, common: Tensor, groups: Groups
) -> dict[str, Any]:
    """What one calibration predicts for the test rows and for the common rows, and its choices."""
    # What predictions share may have a scale of its own; only the default chooses one.
    shared_scale = uq.scale if uq.calibration.joint is None else uq.calibration.joint
    return {
        **predicted(uq, x, groups),
        "scale": float(uq.scale),
        "shared_scale": float(shared_scale),
        "ridge": uq.ridge,
        "noise": float(uq.predict(x).noise.mean()),
        "common": float(uq.propagate(torch.mean, common).variance),
        "single": float(uq.predict(common).epistemic.mean()),
    }


def predicted(uq: LastLayerRigidity, x: Tensor, groups: Groups) -> dict[str, dict[str, Tensor]]:
    """Variances of all quantities by each of `RULES`."""
    matrix = groups.matrix
    p = uq.predict(x)
    joint = uq.propagate(lambda y: matrix @ y[:, 0].double(), x).variance
    # Independent errors add up in squares; the noise of different rows is independent.
    independent = matrix.square() @ p.epistemic[:, 0].double()
    noise = matrix.square() @ p.noise[:, 0].double()
    return {
        "joint": groups.split(joint + noise),
        "independent": groups.split(independent + noise),
        "epistemic": groups.split(joint),
    }


def summary(
    networks: list[nn.Sequential], samples: Samples, sizes: tuple[int, ...], first: int
) -> dict[str, Any]:
    """Over all networks, in the target's unit: root mean squares, ratios and coverages.

    Args:
        networks: Trained networks.
        samples: Their rows.
        sizes: Sizes of the groups.
        first: How many networks are judged by the default too.
    """
    all_calibrations = list(CALIBRATIONS)
    without_default = [name for name in CALIBRATIONS if name != DEFAULT]
    judgements = []
    for index, network in enumerate(steps(networks, "nets judged")):
        calibrations = all_calibrations if index < first else without_default
        judgements.append(judged(network, samples, index, sizes, calibrations))

    unit = samples.spread
    train_rows = samples.train[0].shape[1]
    all_errors = _joined([judgement["error"] for judgement in judgements])
    actual = {name: _rms(errors) for name, errors in all_errors.items()}
    spreads = retrained(torch.stack([judgement["common"] for judgement in judgements]), unit)
    numbers: dict[str, Any] = {
        "nets": len(networks),
        "rows": train_rows,
        "independence": math.sqrt(1 - train_rows / samples.pool),
        "spread": unit,
        "actual": {name: unit * value for name, value in actual.items()},
        **spreads,
    }
    for calibration in CALIBRATIONS:
        with_it = [judgement for judgement in judgements if calibration in judgement]
        blocks = [judgement[calibration] for judgement in with_it]
        errors = _joined([judgement["error"] for judgement in with_it])
        numbers[calibration] = chosen(blocks, spreads, unit)
        for rule in RULES:
            variances = _joined([block[rule] for block in blocks])
            numbers[calibration][rule] = compared(errors, variances, actual, unit)
    return numbers


def _joined(blocks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Values of several networks, one after the other, by the name of the quantity."""
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def retrained(predictions: Tensor, unit: float) -> dict[str, float]:
    """Spread over the networks of their predictions (nets, rows) for the same rows.

    Returns:
        "common", the standard deviation of the mean over rows, and "single", the root mean square
        over rows of the standard deviation of a row.
    """
    return {
        "common": unit * float(predictions.mean(1).std()),
        "single": unit * float(predictions.var(0).mean()) ** 0.5,
    }


def chosen(
    blocks: Sequence[dict[str, Any]], spreads: dict[str, float], unit: float
) -> dict[str, Any]:
    """What a calibration chose, medians over its networks; its epistemic part beside the spread.

    Args:
        blocks: What `_calibration_numbers` gives, for each network.
        spreads: What `retrained` gives.
        unit: Standard deviation of the targets.
    """
    numbers: dict[str, Any] = {
        name: statistics.median(block[name] for block in blocks)
        for name in ("scale", "shared_scale", "ridge")
    }
    numbers["nets"] = len(blocks)
    numbers["noise"] = unit * statistics.median(block["noise"] for block in blocks) ** 0.5
    for kind in ("common", "single"):
        numbers[kind] = unit * statistics.fmean(block[kind] for block in blocks) ** 0.5
        numbers[f"ratio_of_{kind}"] = numbers[kind] / spreads[kind]
    return numbers


def compared(
    errors: dict[str, Tensor], variances: dict[str, Tensor], actual: dict[str, float], unit: float
) -> dict[str, dict[str, float]]:
    """Predicted standard deviation, its ratio to the actual error, and coverage of 90 %.

    Args:
        errors: Errors of the quantities, by name.
        variances: What was predicted for them.
        actual: Root mean square errors over all networks.
        unit: Standard deviation of the targets.
    """
    std = {name: float(values.mean()) ** 0.5 for name, values in variances.items()}
    coverage = {}
    for name, values in variances.items():
        is_inside = errors[name].abs() <= QUANTILE * values.sqrt()
        coverage[name] = float(is_inside.double().mean())
    return {
        "std": {name: unit * value for name, value in std.items()},
        "ratio": {name: value / actual[name] for name, value in std.items()},
        "coverage": coverage,
    }


def one_set(
    *,
    name: str,
    train: int,
    valid: int,
    test: int,
    nets: int,
    judged: int,
    groups: Sequence[int],
    epochs: int,
    seed: int,
) -> dict[str, Any]:
    """Train, calibrate and judge all networks of a set.

    Args:
        name: The set.
        train: See `Sizes`.
        valid: See `Sizes`.
        test: See `Sizes`.
        nets: See `Sizes`.
        judged: See `Sizes`.
        groups: Sizes of the groups.
        epochs: Epochs of the training.
        seed: The seed of rows and networks.
    """
    sizes = Sizes(train=train, valid=valid, test=test, nets=nets, judged=judged)
    samples = drawn(name, sizes, seed)
    x, y = samples.train
    networks = trained(x, y, epochs=epochs, seed=seed + 1)
    return summary(networks, samples, tuple(groups), judged)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
