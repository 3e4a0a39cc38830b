"""Predicted and actual errors of means of many predictions, and of differences of two."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import uci
from experiments.frame.progress import steps
from experiments.training import descent
from experiments.training.protocol import Protocol
from rigidities import LastLayerRigidity


@dataclass(frozen=True)
class Sizes:
    """Rows of a split, and how many splits there are.

    Attributes:
        train: few beside the whole set, so that the training sets are nearly independent.
        valid: for the calibration.
        test: rows of the largest group.
        nets: number of splits.
    """

    train: int = 1000
    valid: int = 500
    test: int = 500
    nets: int = 120


@dataclass(frozen=True)
class Samples:
    """All nets' rows, inputs and targets standardised with the whole set's mean and spread.

    Attributes:
        train, valid, test: (nets, rows, inputs) and (nets, rows, 1).
        common: inputs (rows, inputs) that no net is trained or calibrated on.
        spread: of the targets, in their own unit.
    """

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    common: Tensor
    spread: float


def drawn(name: str, sizes: Sizes, seed: int) -> Samples:
    """Splits of a set: a common group is put aside, the rest is shuffled anew for each net."""
    rows = uci.read(name)
    x, y = torch.from_numpy(rows.x), torch.from_numpy(rows.y)[:, None]
    needed = sizes.train + sizes.valid + 2 * sizes.test
    if len(x) < needed:
        raise ValueError(f"Expected at least {needed} rows in {name!r}, got {len(x)}.")
    spread = float(y.std())
    x, y = ((t - t.mean(0)) / t.std(0).clamp(min=1e-12) for t in (x, y))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    common, rest = order[: sizes.test], order[sizes.test :]
    each = torch.stack(
        [rest[torch.randperm(len(rest), generator=generator)] for _ in range(sizes.nets)]
    )
    parts = each[:, : needed - sizes.test].split([sizes.train, sizes.valid, sizes.test], dim=1)
    train, valid, test = ((x[part].float(), y[part].float()) for part in parts)
    return Samples(train, valid, test, x[common].float(), spread)


PROTOCOL = Protocol(epochs=200, batch=100, rate=3e-3, decay=1e-4, cosine=True)


def trained(x: Tensor, y: Tensor, *, epochs: int, seed: int) -> list[nn.Sequential]:
    """One net per leading entry of x (nets, rows, inputs) and y (nets, rows, 1).

    Every net sees its own rows in its own order from its own start.
    """
    seeds = [seed * 1000 + net for net in range(len(x))]
    stack = descent.trained((x, y), None, replace(PROTOCOL, epochs=epochs), seeds).last
    return [stack.module(net) for net in range(len(x))]


CALIBRATIONS: dict[str, dict[str, str]] = {
    "none": {"noise": "none"},
    "constant": {"noise": "constant"},
    "evidence": {"noise": "constant", "criterion": "evidence"},
    "bayes": {"noise": "bayes", "criterion": "evidence"},
}
"""Options of `calibrate`."""

RULES = ("joint", "independent", "epistemic")
DIFFERENCE = "difference"
LEVEL = 0.9
QUANTILE = math.sqrt(2) * float(torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64)))


@dataclass(frozen=True)
class Groups:
    """Which linear combinations of the test rows are looked at.

    Attributes:
        sizes: of groups whose mean is taken.
        matrix: (quantities, rows): the means of all groups of each size, then the differences.
        counts: how many quantities belong to each size, then to the differences.
    """

    sizes: tuple[int, ...]
    matrix: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, sizes: tuple[int, ...], pairs: Tensor, rows: int) -> Groups:
        """Consecutive rows in groups (the rows are in random order), and pairs (P, 2)."""
        eye = torch.eye(rows, dtype=torch.float64)
        means = [eye[: rows // n * n].reshape(-1, n, rows).mean(1) for n in sizes]
        blocks = [*means, eye[pairs[:, 0]] - eye[pairs[:, 1]]]
        return cls(sizes, torch.cat(blocks), tuple(len(block) for block in blocks))

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """(quantities,) by group size, and the differences."""
        names = [*map(str, self.sizes), DIFFERENCE]
        return dict(zip(names, values.split(self.counts), strict=True))


def nearest(x: Tensor) -> Tensor:
    """Each row and its nearest neighbour, a pair only once: (P, 2)."""
    distance = torch.cdist(x.double(), x.double()).fill_diagonal_(math.inf)
    pairs = torch.stack([torch.arange(len(x)), distance.argmin(1)], 1).sort(1).values
    return pairs.unique(dim=0)


def judged(net: nn.Module, samples: Samples, index: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """One net: errors, and the variances that each calibration and rule predicts."""
    train, valid, test = (
        (x[index], y[index]) for x, y in (samples.train, samples.valid, samples.test)
    )
    x, y = test[0], test[1][:, 0].double()
    groups = Groups.of(sizes, nearest(x), len(x))
    uq = LastLayerRigidity(net).fit(train)
    with torch.no_grad():
        mean = net(x)[:, 0].double()
        common = float(net(samples.common).mean())
    found: dict[str, Any] = {"error": groups.split(groups.matrix @ (mean - y)), "common": common}
    for name, options in CALIBRATIONS.items():
        uq.calibrate(valid, **options)
        found[name] = predicted(uq, x, groups) | {
            "scale": float(uq.scale),
            "ridge": uq.ridge,
            "noise": float(uq.noise.level),
            "common": float(uq.propagate(torch.mean, samples.common).variance),
        }
    return found


def predicted(uq: LastLayerRigidity, x: Tensor, groups: Groups) -> dict[str, dict[str, Tensor]]:
    """Variances of all quantities: with correlations, without them, and without the noise."""
    matrix = groups.matrix
    joint = uq.propagate(lambda y: matrix @ y[:, 0].double(), x).variance
    alone = matrix.square() @ uq.predict(x).epistemic[:, 0].double()
    noise = float(uq.noise.level) * matrix.square().sum(1)
    return {
        "joint": groups.split(joint + noise),
        "independent": groups.split(alone + noise),
        "epistemic": groups.split(joint),
    }


def summary(nets: list[nn.Sequential], samples: Samples, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Over all nets, in the target's unit: root mean squares, ratios and coverages."""
    each = [judged(net, samples, i, sizes) for i, net in enumerate(steps(nets, "nets judged"))]
    names, unit = [*map(str, sizes), DIFFERENCE], samples.spread
    errors = {name: torch.cat([one["error"][name] for one in each]) for name in names}
    found: dict[str, Any] = {
        "nets": len(nets),
        "spread": unit,
        "actual": {name: unit * _rms(errors[name]) for name in names},
        "common": unit * float(torch.tensor([one["common"] for one in each]).std()),
    }
    for name in CALIBRATIONS:
        mine = [one[name] for one in each]
        common = unit * statistics.fmean(one["common"] for one in mine) ** 0.5
        found[name] = {
            "scale": statistics.median(one["scale"] for one in mine),
            "ridge": statistics.median(one["ridge"] for one in mine),
            "noise": unit * statistics.median(one["noise"] for one in mine) ** 0.5,
            "common": common,
            "ratio_of_common": common / found["common"],
        }
        for rule in RULES:
            variance = {n: torch.cat([one[rule][n] for one in mine]) for n in names}
            found[name][rule] = compared(errors, variance, unit)
    return found


def compared(
    errors: dict[str, Tensor], variance: dict[str, Tensor], unit: float
) -> dict[str, dict[str, float]]:
    """Predicted standard deviation, its ratio to the actual error, and coverage of 90 %."""
    std = {name: float(values.mean()) ** 0.5 for name, values in variance.items()}
    return {
        "std": {name: unit * value for name, value in std.items()},
        "ratio": {name: value / _rms(errors[name]) for name, value in std.items()},
        "coverage": {
            name: float((errors[name].abs() <= QUANTILE * values.sqrt()).double().mean())
            for name, values in variance.items()
        },
    }


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
