"""Calibration against the published grid: 1600 points, each with a pass over the validation data.

The grid holds 40 x 40 values of (log10 alpha^2, log10 varsigma) in [-5, 5) in steps of 0.25. Its
time is extrapolated from single points timed in the same rounds; its best criterion is computed
for all 1600 points, from one dense eigendecomposition.
"""

from __future__ import annotations

import torch
from torch import Tensor

import rigidities as rg
from benchmarks.frame import dense
from benchmarks.frame.results import Row, at_least, at_most
from benchmarks.frame.timing import Task, clocked, interleaved
from benchmarks.frame.workload import Workload, workload

EXPONENTS = [-5 + 0.25 * step for step in range(40)]
POINTS = len(EXPONENTS) ** 2
EXTRAPOLATED = f"the grid's time is {POINTS} times one point, timed in the same rounds"


def run(*, quick: bool = False) -> list[Row]:
    """Time and criterion."""
    train, valid, width, rounds = (1_000, 500, 32, 2) if quick else (20_000, 10_000, 256, 11)
    work = workload(train + valid, width=width)
    fitted = Workload(work.model, work.x[:train], work.y[:train], work.batch_size)
    held = Workload(work.model, work.x[train:], work.y[train:], work.batch_size)
    return [*time_rows(fitted, held, rounds=rounds), criterion_row(fitted, held)]


def fit(work: Workload) -> rg.LastLayerRigidity:
    """A fresh fit, with nothing factorised or kept from an earlier calibration."""
    return rg.LastLayerRigidity(work.model).fit((work.x, work.y))


def time_rows(fitted: Workload, held: Workload, *, rounds: int) -> list[Row]:
    """Calibration from a fresh fit, against 1600 bare passes and 1600 points of the grid."""
    point = GridPoint(fitted, held)

    def calibrate() -> float:
        uq = fit(fitted)
        return clocked(lambda: uq.calibrate((held.x, held.y), criterion="nll"))

    tasks: dict[str, Task] = {"calibrate": calibrate, "bare": held.bare_pass, "point": point}
    timings = interleaved(tasks, rounds=rounds)
    size = f"{len(held.x):,} rows, width {held.model[-1].in_features}"
    kinds = {
        "bare": f"calibration, {size}, against {POINTS} bare validation passes",
        "point": f"calibration, {size}, against the grid's {POINTS} passes with error bars",
    }
    return [
        at_least(
            work,
            timings.ratio(task, "calibrate", factor=POINTS),
            300,
            "times faster",
            note=EXTRAPOLATED,
            seconds=timings.median("calibrate"),
            pass_seconds=timings.median(task),
        )
        for task, work in kinds.items()
    ]


class GridPoint:
    """One point of the grid as published: a new ridge, then one validation pass with error bars."""

    def __init__(self, fitted: Workload, held: Workload) -> None:
        train = dense.features(fitted, fitted.x)
        self.gram = train.mT @ train
        self.held = held

    def __call__(self) -> None:
        self.nll(scale=1.0, varsigma=1.0)

    def nll(self, *, scale: float, varsigma: float) -> float:
        """The criterion at one point, from a pass of its own."""
        damping = varsigma**2 * torch.eye(len(self.gram), dtype=self.gram.dtype)
        inverse = torch.linalg.inv(self.gram + damping).float()
        head = self.held.model[-1]
        total = 0.0
        with torch.inference_mode():
            for x, y in self.held.batches():
                hidden = self.held.model[:-1](x)
                rows = torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1)
                variance = scale**2 * ((rows @ inverse) * rows).sum(1)
                residuals = (y - head(hidden))[:, 0]
                total += len(x) * dense.gaussian_nll(residuals, variance)
        return total / len(self.held.x)


def criterion_row(fitted: Workload, held: Workload) -> Row:
    """The criterion at the calibrated ridge and scale less the best of the grid."""
    report = fit(fitted).calibrate((held.x, held.y), criterion="nll")
    train, rows = dense.features(fitted, fitted.x), dense.features(held, held.x)
    with torch.inference_mode():
        residuals = (held.y - held.model(held.x))[:, 0].double()
    variance = float(report.scale) ** 2 * dense.quadratic(train, rows, ridge=float(report.ridge))
    ours = dense.gaussian_nll(residuals, variance)
    best = best_of_grid(train, rows, residuals)
    # The library's residuals are the model's float32 ones: equal to about 1e-7.
    return at_most(
        "calibration, criterion less the best of the grid",
        ours - best,
        1e-6,
        "nats",
        ours=ours,
        reported=float(report.value),
        grid=best,
        ridge=float(report.ridge),
        scale=float(report.scale),
    )


def best_of_grid(train: Tensor, rows: Tensor, residuals: Tensor) -> float:
    """The smallest mean NLL among the 1600 points."""
    lam, basis = torch.linalg.eigh(train.mT @ train)
    squares = (rows @ basis).square()
    best = float("inf")
    for varsigma in EXPONENTS:
        q = squares @ (1 / (lam.clamp(min=0) + 10 ** (2 * varsigma)))
        for square_of_scale in EXPONENTS:
            best = min(best, dense.gaussian_nll(residuals, 10**square_of_scale * q))
    return best
