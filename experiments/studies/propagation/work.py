"""Predicted and actual errors of means of many predictions, and of differences of two."""

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
from experiments.judging.error_bars import AUTO, PAPER, SAFE, Calibration, calibrated, fitted
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
        judged: nets, the first ones, that the default judges; it takes seconds where the others
            take a fraction of one.
    """

    train: int = 1000
    valid: int = 500
    test: int = 500
    nets: int = 120
    judged: int = 20


@dataclass(frozen=True)
class Samples:
    """All nets' rows, inputs and targets standardised with the whole set's mean and spread.

    Attributes:
        train, valid, test: (nets, rows, inputs) and (nets, rows, 1).
        common: inputs (rows, inputs) that no net is trained or calibrated on.
        spread: of the targets, in their own unit.
        pool: rows from which each net's are drawn.
    """

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    common: Tensor
    spread: float
    pool: int


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
    return Samples(train, valid, test, x[common].float(), spread, len(rest))


PROTOCOL = Protocol(epochs=200, batch=100, rate=3e-3, decay=1e-4, cosine=True)


def trained(x: Tensor, y: Tensor, *, epochs: int, seed: int) -> list[nn.Sequential]:
    """One net per leading entry of x (nets, rows, inputs) and y (nets, rows, 1).

    Every net sees its own rows in its own order from its own start.
    """
    seeds = [seed * 1000 + net for net in range(len(x))]
    stack = descent.trained((x, y), None, replace(PROTOCOL, epochs=epochs), seeds).last
    return [stack.module(net) for net in range(len(x))]


DEFAULT = "auto"
CALIBRATIONS = {
    "none": PAPER,
    "constant": Calibration(noise="constant"),
    "evidence": SAFE,
    "bayes": Calibration("evidence", "bayes"),
    DEFAULT: AUTO,
}
"""Arguments of `calibrate`."""

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


def judged(
    net: nn.Module, samples: Samples, index: int, sizes: tuple[int, ...], ways: Sequence[str]
) -> dict[str, Any]:
    """One net: errors, and the variances that each of these calibrations and rules predicts."""
    train, valid, test = (
        (x[index], y[index]) for x, y in (samples.train, samples.valid, samples.test)
    )
    x, y = test[0], test[1][:, 0].double()
    groups = Groups.of(sizes, nearest(x), len(x))
    uq = fitted(net, train)
    with torch.no_grad():
        mean = net(x)[:, 0].double()
        common = net(samples.common)[:, 0].double()
    found: dict[str, Any] = {"error": groups.split(groups.matrix @ (mean - y)), "common": common}
    for name in ways:
        calibrated(uq, valid, CALIBRATIONS[name])
        found[name] = predicted(uq, x, groups) | {
            "scale": float(uq.scale),
            "shared_scale": float(
                uq.scale if uq.calibration.joint is None else uq.calibration.joint
            ),
            "ridge": uq.ridge,
            "noise": float(uq.predict(x).noise.mean()),
            "common": float(uq.propagate(torch.mean, samples.common).variance),
            "single": float(uq.predict(samples.common).epistemic.mean()),
        }
    return found


def predicted(uq: LastLayerRigidity, x: Tensor, groups: Groups) -> dict[str, dict[str, Tensor]]:
    """Variances of all quantities: with correlations, without them, and without the noise."""
    matrix, p = groups.matrix, uq.predict(x)
    joint = uq.propagate(lambda y: matrix @ y[:, 0].double(), x).variance
    alone, noise = (matrix.square() @ part[:, 0].double() for part in (p.epistemic, p.noise))
    return {
        "joint": groups.split(joint + noise),
        "independent": groups.split(alone + noise),
        "epistemic": groups.split(joint),
    }


def summary(
    nets: list[nn.Sequential], samples: Samples, sizes: tuple[int, ...], first: int
) -> dict[str, Any]:
    """Over all nets, in the target's unit: root mean squares, ratios and coverages.

    Args:
        nets: trained.
        samples: their rows.
        sizes: of the groups.
        first: so many nets are judged by the default too.
    """
    early, late = list(CALIBRATIONS), [name for name in CALIBRATIONS if name != DEFAULT]
    each = [
        judged(net, samples, i, sizes, early if i < first else late)
        for i, net in enumerate(steps(nets, "nets judged"))
    ]
    names, unit = [*map(str, sizes), DIFFERENCE], samples.spread
    actual = {name: _rms(torch.cat([one["error"][name] for one in each])) for name in names}
    found: dict[str, Any] = {
        "nets": len(nets),
        "rows": samples.train[0].shape[1],
        "independence": math.sqrt(1 - samples.train[0].shape[1] / samples.pool),
        "spread": unit,
        "actual": {name: unit * value for name, value in actual.items()},
        **retrained(torch.stack([one["common"] for one in each]), unit),
    }
    for name in CALIBRATIONS:
        having = [one for one in each if name in one]
        mine = [one[name] for one in having]
        errors = {n: torch.cat([one["error"][n] for one in having]) for n in names}
        rules = {
            rule: {n: torch.cat([one[rule][n] for one in mine]) for n in names} for rule in RULES
        }
        found[name] = chosen(mine, found, unit) | {
            rule: compared(errors, variance, actual, unit) for rule, variance in rules.items()
        }
    return found


def retrained(predictions: Tensor, unit: float) -> dict[str, float]:
    """Spread over the nets of predictions (nets, rows) for common rows: "common" and "single".

    The standard deviation of their mean, and the root mean square over rows of that of a row.
    """
    return {
        "common": unit * float(predictions.mean(1).std()),
        "single": unit * float(predictions.var(0).mean()) ** 0.5,
    }


def chosen(mine: Sequence[dict[str, Any]], spread: dict[str, Any], unit: float) -> dict[str, float]:
    """What a calibration chose, medians over its nets; its epistemic part beside the spread."""
    found = {
        name: statistics.median(one[name] for one in mine)
        for name in ("scale", "shared_scale", "ridge")
    }
    found |= {
        "nets": len(mine),
        "noise": unit * statistics.median(one["noise"] for one in mine) ** 0.5,
    }
    for name in ("common", "single"):
        found[name] = unit * statistics.fmean(one[name] for one in mine) ** 0.5
        found[f"ratio_of_{name}"] = found[name] / spread[name]
    return found


def compared(
    errors: dict[str, Tensor], variance: dict[str, Tensor], actual: dict[str, float], unit: float
) -> dict[str, dict[str, float]]:
    """Predicted standard deviation, its ratio to the actual error, and coverage of 90 %."""
    std = {name: float(values.mean()) ** 0.5 for name, values in variance.items()}
    return {
        "std": {name: unit * value for name, value in std.items()},
        "ratio": {name: value / actual[name] for name, value in std.items()},
        "coverage": {
            name: float((errors[name].abs() <= QUANTILE * values.sqrt()).double().mean())
            for name, values in variance.items()
        },
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
    """Train, calibrate and judge all nets of a set.

    Args:
        name: of the set.
        train, valid, test, nets, judged: the `Sizes`.
        groups: sizes of the groups.
        epochs: of the training.
        seed: of rows and nets.
    """
    samples = drawn(name, Sizes(train, valid, test, nets, judged), seed)
    made = trained(*samples.train, epochs=epochs, seed=seed + 1)
    return summary(made, samples, tuple(groups), judged)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
