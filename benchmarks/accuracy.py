"""Variances of badly conditioned features against a dense float64 reference.

Features are mixed by a matrix whose singular values span the given condition number. The posterior
is asked at ridge 0; a float32 model is asked through ``uq(x)``, with a small ridge.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame import dense
from benchmarks.frame.results import Row, at_most

LARGEST_ERROR = 1e-3
"""Of uq(x): beyond it the quadratic form must be computed in float64."""


def run(*, quick: bool = False) -> list[Row]:
    """The posterior at cond(F) = 1e4; ``uq(x)`` of a float32 model at 1e2, 1e4 and 1e6."""
    rows, width = (2_000, 8) if quick else (200_000, 64)
    conditions = (1e2, 1e4) if quick else (1e2, 1e4, 1e6)
    table = [posterior_row(rows, width, 1e4)]
    for condition in conditions:
        table.append(model_row(rows, width, condition))
    return table


def mixing(width: int, condition: float) -> Tensor:
    """(D, D) with logarithmically spaced singular values from 1 down to 1/condition, float64."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(2, width, width, generator=generator, dtype=torch.float64)
    left, right = torch.linalg.qr(noise).Q
    values = torch.logspace(0, -math.log10(condition), width, dtype=torch.float64)
    return left @ torch.diag(values) @ right.mT


def inputs(rows: int, width: int, seed: int) -> Tensor:
    """Standard normal rows."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def posterior_row(rows: int, width: int, condition: float) -> Row:
    """``Posterior.variance`` at ridge 0, for rows like the training ones and any directions."""
    mix = mixing(width, condition)
    train = inputs(rows, width, 3).double() @ mix
    like_training = inputs(500, width, 4).double() @ mix
    any_direction = inputs(500, width, 5).double()
    features = torch.cat([like_training, any_direction])
    gram = rg.Gram(width)
    for batch in train.split(1024):
        gram.update(batch)
    variance = rg.Posterior.from_gram(gram, ridge=0.0).variance(features)
    error = largest_error(variance, dense.quadratic(train, features))
    singular = torch.linalg.svdvals(torch.linalg.qr(train, mode="r").R)
    return at_most(
        f"Posterior.variance, cond(F) = {condition:.0e}, ridge 0",
        error,
        1e-6,
        "relative",
        condition=float(singular[0] / singular[-1]),
    )


def model_row(rows: int, width: int, condition: float) -> Row:
    """``uq(x)`` of a float32 model: features as they are, the quadratic form put to the test."""
    trunk = nn.Linear(width, width, bias=False)
    model = nn.Sequential(trunk, nn.Linear(width, 1, bias=False))
    with torch.no_grad():
        trunk.weight.copy_(mixing(width, condition).mT)
    x = inputs(rows, width, 3)
    test_x = torch.cat([inputs(500, width, 4), strongest(trunk.weight)])
    noise = inputs(rows, 1, 6)
    with torch.no_grad():
        train = trunk(x)
        features = trunk(test_x)
        y = model(x) + noise
        test_y = model(test_x) + noise[: len(test_x)]
    uq = rg.LastLayerRigidity(model).fit((x, y))
    # Small enough beside the least eigenvalue, of order trace / condition^2, to change little.
    ridge = float(uq.gram.matrix.trace()) / width / condition**2 * 1e-3
    uq.calibrate((test_x, test_y), method=rg.Paper(ridge=ridge))
    _, std = uq(test_x)
    variance = (std[:, 0].double() / float(uq.scale)).square()
    error = largest_error(variance, dense.quadratic(train, features, ridge=ridge))
    stated_rounding = uq.freeze().rounding
    return at_most(
        f"uq(x) of a float32 model, cond(F) = {condition:.0e}",
        error,
        LARGEST_ERROR,
        "relative",
        note=f"the form's rounding is stated to be at most {stated_rounding:.1e}",
        stated_rounding=stated_rounding,
    )


def strongest(weight: Tensor) -> Tensor:
    """500 inputs whose features lie along the three largest singular directions of the trunk.

    Their variances are the smallest, so a rounding error shows the most.
    """
    _, _, rows = torch.linalg.svd(weight.detach())
    return inputs(500, 3, 5) @ rows[:3]


def largest_error(value: Tensor, reference: Tensor) -> float:
    """The largest relative error."""
    return float(((value - reference) / reference).abs().max())
