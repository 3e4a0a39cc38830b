r"""The process at training time t where both kernels are multiples of the last layer's.

With $K_\mathrm{NTK} = c\, F F^\top$ and $K_\mathrm{NNGP} = \sigma_w^2\, F F^\top$ (the paper's two
approximations), the right singular vectors $v_j$ of F and $\lambda_j = s_j^2$, the four terms of
the variance collapse to

$$ \sigma^2 = \sigma_w^2 \Big[ |f_\perp|^2
   + \sum_j (v_j^\top f)^2 e^{-2 \eta c \lambda_j t} \Big], $$

$f_\perp$ the part of f outside the span of the rows of F. At $t = \infty$ that part alone is left:
for as many independent rows as features it is exactly zero, whatever the noise in the data. The
ridge of the paper's final formula is a modelling choice made after this limit, and no ridge has
the shape of the filter at finite t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..posterior.row_span import RowSpan
from .dynamics import Times, TrainedProcess, checked_times, finite, stacked


def last_layer_process_at(
    time: Times,
    features: Tensor,
    test_features: Tensor,
    targets: Tensor,
    *,
    constant: float = 1.0,
    weight_variance: float = 1.0,
    learning_rate: float = 1.0,
    tolerance: float | None = None,
) -> TrainedProcess:
    r"""Mean and variance at time t from the features; no difference of large terms is taken.

    Args:
        time: as in `gaussian_process_at`.
        features: F, (N, D).
        test_features: (M, D).
        targets: (N,) or (N, K).
        constant: c.
        weight_variance: $\sigma_w^2$.
        learning_rate: $\eta$.
        tolerance: singular values up to `tolerance` times the largest count as zero; by default
            max(N, D) times the rounding of float64. The threshold returned is in units of the NTK.

    Examples:
        >>> F = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> last_layer_process_at(torch.inf, F, torch.eye(2), torch.ones(2)).variance.tolist()
        [0.0, 1.0]
    """
    f, test = finite(features, "features"), finite(test_features, "test features")
    y = finite(targets, "targets")
    _check(f, test, y, constant, weight_variance)
    times = checked_times(time, learning_rate).to(f.device)
    span = RowSpan.of(f, tolerance)
    singular = span.singular
    inside = test @ span.right.mT  # (M, rank)
    outside, rounding = span.outside(test)
    seen = span.left.mT @ y
    means, variances = [], []
    for t in times.reshape(-1).tolist():
        exponent = -learning_rate * constant * t * singular.square()
        means.append((inside * (-torch.expm1(exponent) / singular)) @ seen)
        left_over = (inside.square() * torch.exp(2 * exponent)).sum(-1)
        variances.append(weight_variance * (outside + left_over))
    return TrainedProcess(
        times,
        stacked(means, times),
        stacked(variances, times),
        None,
        constant * span.threshold**2,
        len(singular),
        stacked([weight_variance * rounding] * times.numel(), times),
    )


def _check(f: Tensor, test: Tensor, y: Tensor, constant: float, weight_variance: float) -> None:
    if f.ndim != 2 or test.ndim != 2 or f.shape[1] != test.shape[1] or len(y) != len(f):
        raise ValueError(
            "Expected features (N, D), test features (M, D) and targets (N,) or (N, K), got "
            f"{tuple(f.shape)}, {tuple(test.shape)} and {tuple(y.shape)}."
        )
    if not (constant > 0 and weight_variance >= 0):
        raise ValueError(
            f"Expected constant > 0 and weight_variance >= 0, got {constant} and {weight_variance}."
        )
