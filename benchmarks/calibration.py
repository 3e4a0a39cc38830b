"""Calibration against the published grid: 1600 points, each with a pass over the validation data.

The grid holds 40 x 40 values of (log10 alpha^2, log10 varsigma) in [-5, 5) in steps of 0.25. Its
time is extrapolated from single points timed in the same rounds; its best criterion is computed
for all 1600 points, from one dense eigendecomposition.
"""

from __future__ import annotations

from dataclasses import replace

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
    rows, valid_rows, width, rounds = (1_000, 500, 32, 2) if quick else (20_000, 10_000, 256, 11)
    work = workload(rows + valid_rows, width=width)
    train = replace(work, x=work.x[:rows], y=work.y[:rows])
    valid = replace(work, x=work.x[rows:], y=work.y[rows:])
    return [*time_rows(train, valid, rounds=rounds), criterion_row(train, valid)]


def fit(work: Workload) -> rg.LastLayerRigidity:
    """A fresh fit, with nothing factorised or kept from an earlier calibration."""
    return rg.LastLayerRigidity(work.model).fit((work.x, work.y))


def time_rows(train: Workload, valid: Workload, *, rounds: int) -> list[Row]:
    """Calibration from a fresh fit, against 1600 bare passes and 1600 points of the grid."""
    point = GridPoint(train, valid)

    def calibrate() -> float:
        uq = fit(train)
        return clocked(lambda: uq.calibrate((valid.x, valid.y), method="paper"))

    tasks: dict[str, Task] = {"calibrate": calibrate, "bare": valid.bare_pass, "point": point}
    timings = interleaved(tasks, rounds=rounds)
    rivals = {
        "bare": f"{POINTS} bare validation passes",
        "point": f"the grid's {POINTS} passes with error bars",
    }
    table = []
    for task, rival in rivals.items():
        row = at_least(
            f"calibration, {valid.size}, against {rival}",
            timings.ratio(task, "calibrate", factor=POINTS),
            300,
            "times faster",
            note=EXTRAPOLATED,
            seconds=timings.median("calibrate"),
            pass_seconds=timings.median(task),
        )
        table.append(row)
    return table


class GridPoint:
    """One point of the grid as published: a new ridge, then one validation pass with error bars."""

    def __init__(self, train: Workload, valid: Workload) -> None:
        features = dense.features(train, train.x)
        self.gram = features.mT @ features
        self.valid = valid

    def __call__(self) -> None:
        self.nll(scale=1.0, varsigma=1.0)

    def nll(self, *, scale: float, varsigma: float) -> float:
        """The criterion at one point, from a pass of its own."""
        damping = varsigma**2 * torch.eye(len(self.gram), dtype=self.gram.dtype)
        inverse = torch.linalg.inv(self.gram + damping).float()
        trunk = self.valid.model[:-1]
        head = self.valid.model[-1]
        total = 0.0
        with torch.inference_mode():
            for x, y in self.valid.batches():
                hidden = trunk(x)
                features = torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1)
                variance = scale**2 * ((features @ inverse) * features).sum(1)
                residuals = (y - head(hidden))[:, 0]
                total += len(x) * dense.gaussian_nll(residuals, variance)
        return total / len(self.valid.x)


def criterion_row(train: Workload, valid: Workload) -> Row:
    """The criterion at the calibrated ridge and scale less the best of the grid."""
    report = fit(train).calibrate((valid.x, valid.y), method="paper").calibration_report
    assert report is not None
    ridge = float(report.ridge)
    scale = float(report.scale)
    train_features = dense.features(train, train.x)
    valid_features = dense.features(valid, valid.x)
    with torch.inference_mode():
        residuals = (valid.y - valid.model(valid.x))[:, 0].double()
    variance = scale**2 * dense.quadratic(train_features, valid_features, ridge=ridge)
    ours = dense.gaussian_nll(residuals, variance)
    best = best_of_grid(train_features, valid_features, residuals)
    # The library's residuals are the model's float32 ones: equal to about 1e-7.
    return at_most(
        "calibration, criterion less the best of the grid",
        ours - best,
        1e-6,
        "nats",
        ours=ours,
        reported=float(report.value),
        grid=best,
        ridge=ridge,
        scale=scale,
    )


def best_of_grid(train: Tensor, valid: Tensor, residuals: Tensor) -> float:
    """The smallest mean NLL among the 1600 points, from features (N, D) and (M, D)."""
    eigenvalues, basis = torch.linalg.eigh(train.mT @ train)
    squares = (valid @ basis).square()
    best = float("inf")
    for log_varsigma in EXPONENTS:
        damped = eigenvalues.clamp(min=0) + 10 ** (2 * log_varsigma)
        quadratic = squares @ (1 / damped)
        for log_square_of_scale in EXPONENTS:
            nll = dense.gaussian_nll(residuals, 10**log_square_of_scale * quadratic)
            best = min(best, nll)
    return best
