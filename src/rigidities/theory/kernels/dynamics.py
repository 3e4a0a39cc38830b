r"""The Gaussian process that describes a wide network after training for a time t.

Gradient flow with rate $\eta$ on half the squared error of a network linear in its parameters,
started from the NNGP prior $f_0 \sim N(0, K_\mathrm{NNGP})$, keeps it Gaussian. With
$A_t = k_\mathrm{NTK}(\star, D)\, K_\mathrm{NTK}^{-1} (I - e^{-\eta K_\mathrm{NTK} t})$

$$ f_t(\star) = f_0(\star) + A_t\, (y - f_0(D)), \qquad \mu = A_t\, y, $$
$$ \sigma^2 = k_\mathrm{NNGP}(\star, \star) + A_t K_\mathrm{NNGP} A_t^\top
   - A_t\, k_\mathrm{NNGP}(D, \star) - k_\mathrm{NNGP}(\star, D)\, A_t^\top $$

(the paper's Sec. 3.5, all four terms). With $K_\mathrm{NTK} = U \,\mathrm{diag}(\lambda)\, U^\top$
each time costs one filter $g_t(\lambda) = (1 - e^{-\eta\lambda t}) / \lambda$, and nothing is
inverted: $g_t(0) = \eta t$, $g_\infty(\lambda) = 1/\lambda$.

Where both kernels are multiples of the last layer's, $K_\mathrm{NTK} = c\, F F^\top$ and
$K_\mathrm{NNGP} = \sigma_w^2\, F F^\top$ (the paper's two approximations), with the right singular
vectors $v_j$ of F and $\lambda_j = s_j^2$ the four terms of the variance collapse to

$$ \sigma^2 = \sigma_w^2 \Big[ |f_\perp|^2
   + \sum_j (v_j^\top f)^2 e^{-2 \eta c \lambda_j t} \Big], $$

where $f_\perp$ is the component of f outside the span of the rows of F. At $t = \infty$ only this
component is left: with as many independent rows as features it is exactly zero, whatever the noise
in the data. The ridge of the paper's final formula is a modelling choice made after this limit, and
no ridge has the shape of the filter at finite t.

Reference: J. Lee et al., "Wide neural networks of any depth evolve as linear models under gradient
descent" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...posterior.row_span import RowSpan

__all__ = ["TrainedProcess", "gaussian_process_at", "last_layer_process_at"]

Times = float | Sequence[float] | Tensor
Pair = tuple[Tensor, Tensor]
"""A kernel of the training data, (N, N), and that between test and training data, (M, N)."""


@dataclass(frozen=True)
class TrainedProcess:
    r"""Mean and variance at one time, or at T times (a leading axis).

    Attributes:
        time: The times, as given, () or (T,).
        mean: (M,) or (M, K) for targets (N, K).
        variance: (M,); never below zero by rounding alone.
        covariance: (M, M), or None where it was not asked for.
        threshold: Eigenvalues of the NTK up to this count as zero: at $t = \infty$ nothing is
            learnt along them.
        rank: Number of eigenvalues above the threshold.
        rounding_error: Rounding error of the variance, of the same shape. Smaller variances cannot
            be told from zero. Negative ones of at most this size were set to zero. More negative
            ones are kept: they show that the NNGP kernels do not belong to one positive
            semi-definite function.
    """

    time: Tensor
    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    threshold: float
    rank: int
    rounding_error: Tensor


def gaussian_process_at(
    time: Times,
    *,
    ntk: Pair,
    nngp: tuple[Tensor, Tensor, Tensor],
    targets: Tensor,
    learning_rate: float = 1.0,
    covariance: bool = False,
    tolerance: float | None = None,
) -> TrainedProcess:
    r"""Mean and variance at training time t.

    Args:
        time: $t \ge 0$, `math.inf` allowed; a sequence shares one eigendecomposition.
        ntk: K(D, D) of (N, N) and k(⋆, D) of (M, N).
        nngp: The same two and k(⋆, ⋆), (M,) or, for a covariance, (M, M).
        targets: y, (N,) or (N, K).
        learning_rate: $\eta$ of $\dot w = -\eta \nabla \sum_i \frac12 (f(x_i) - y_i)^2$.
        covariance: Whether to compute the full covariance between the test points too.
        tolerance: Eigenvalues up to `tolerance` times the largest count as zero; by default N
            times the rounding of float64. Components of k(⋆, D) along them that are only rounding
            are set to zero, so that a large finite time does not amplify them.

    Returns:
        The process, with the threshold that was used and the rounding of the variance. The
        covariance is not corrected for rounding: its diagonal may be negative by that amount.

    Raises:
        ValueError: Shapes do not fit, values are not finite, or the NTK is not positive
            semi-definite.

    Examples:
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> gp = gaussian_process_at(
        ...     math.log(2), ntk=(one, one), nngp=(one, one, one[0]), targets=one[0]
        ... )
        >>> round(gp.mean.item(), 6), round(gp.variance.item(), 6)  # 1 - 1/2, (1/2)^2
        (0.5, 0.25)
    """
    ntk_train, ntk_cross = _kernel_pair(ntk[0], ntk[1], "ntk")
    nngp_train, nngp_cross = _kernel_pair(nngp[0], nngp[1], "nngp")
    nngp_test = _finite(nngp[2], "nngp test kernel")
    y = _finite(targets, "targets")
    _check_same_data((ntk_train, ntk_cross), (nngp_train, nngp_cross))
    _check_test_kernel(nngp_test, len(ntk_cross), covariance=covariance)
    if y.ndim not in {1, 2} or len(y) != len(ntk_train):
        rows = len(ntk_train)
        raise ValueError(f"targets: expected ({rows},) or ({rows}, K), got {tuple(y.shape)}.")
    times = _checked_times(time, learning_rate).to(ntk_train.device)

    # Everything in the eigenbasis U of the NTK, in which each time is one filter.
    eigenvalues, vectors, threshold = _spectrum(ntk_train, tolerance)
    learnt = eigenvalues > threshold
    components = _cross_components(ntk_cross @ vectors, learnt)
    prior = vectors.mT @ nngp_train @ vectors
    prior_cross = nngp_cross @ vectors
    target_components = vectors.mT @ y
    test_variance = nngp_test.diagonal() if nngp_test.ndim == 2 else nngp_test
    prior_size = prior.diagonal().sum().clamp_min(0).sqrt()

    means = []
    variances = []
    covariances = []
    roundings = []
    for t in times.reshape(-1).tolist():
        a = components * _filter(eigenvalues, learnt, learning_rate * t)  # A_t U, (M, N)
        a_prior = a @ prior
        means.append(a @ target_components)
        variance = test_variance + ((a_prior - 2 * prior_cross) * a).sum(-1)
        rounding = _rounding(test_variance, a, prior_size)
        variances.append(torch.where(variance < -rounding, variance, variance.clamp_min(0)))
        roundings.append(rounding)
        if covariance:
            mixed = a @ prior_cross.mT
            covariances.append(nngp_test + a_prior @ a.mT - mixed - mixed.mT)
    return TrainedProcess(
        time=times,
        mean=_stacked(means, times),
        variance=_stacked(variances, times),
        covariance=_stacked(covariances, times) if covariance else None,
        threshold=threshold,
        rank=int(learnt.sum()),
        rounding_error=_stacked(roundings, times),
    )


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
    r"""Mean and variance at time t from the features, without differences of large terms.

    Args:
        time: As in `gaussian_process_at`.
        features: F, (N, D).
        test_features: (M, D).
        targets: (N,) or (N, K).
        constant: c, the ratio of the NTK to $F F^\top$.
        weight_variance: $\sigma_w^2$, the ratio of the NNGP to $F F^\top$.
        learning_rate: $\eta$.
        tolerance: Singular values up to `tolerance` times the largest count as zero; by default
            max(N, D) times the rounding of float64. The threshold returned is in units of the NTK.

    Raises:
        ValueError: Shapes do not fit, or values are out of their range.

    Examples:
        >>> F = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> last_layer_process_at(torch.inf, F, torch.eye(2), torch.ones(2)).variance.tolist()
        [0.0, 1.0]
    """
    f = _finite(features, "features")
    test = _finite(test_features, "test features")
    y = _finite(targets, "targets")
    if f.ndim != 2 or test.ndim != 2 or f.shape[1] != test.shape[1] or len(y) != len(f):
        raise ValueError(
            "Expected features (N, D), test features (M, D) and targets (N,) or (N, K), got "
            f"{tuple(f.shape)}, {tuple(test.shape)} and {tuple(y.shape)}."
        )
    if not (constant > 0 and weight_variance >= 0):
        raise ValueError(
            f"Expected constant > 0 and weight_variance >= 0, got {constant} and {weight_variance}."
        )
    times = _checked_times(time, learning_rate).to(f.device)
    span = RowSpan.of(f, tolerance)
    singular = span.singular
    inside = test @ span.right.mT  # (M, rank)
    outside, outside_rounding = span.outside(test)  # (M,), squared lengths
    target_components = span.left.mT @ y
    means = []
    variances = []
    roundings = []
    for t in times.reshape(-1).tolist():
        exponent = -learning_rate * constant * t * singular.square()
        means.append((inside * (-torch.expm1(exponent) / singular)) @ target_components)
        unlearnt = (inside.square() * torch.exp(2 * exponent)).sum(-1)
        variances.append(weight_variance * (outside + unlearnt))
        roundings.append(weight_variance * outside_rounding)
    return TrainedProcess(
        time=times,
        mean=_stacked(means, times),
        variance=_stacked(variances, times),
        covariance=None,
        threshold=constant * span.threshold**2,
        rank=len(singular),
        rounding_error=_stacked(roundings, times),
    )


def _cross_components(components: Tensor, learnt: Tensor) -> Tensor:
    """Components (M, N) of k(⋆, D), with rounding along the NTK's null space set to zero.

    A positive semi-definite kernel has no components there.
    """
    epsilon = torch.finfo(torch.float64).eps
    rounding = len(learnt) * epsilon * components.norm(dim=1, keepdim=True)
    return torch.where(learnt | (components.abs() > rounding), components, 0.0)


def _rounding(test_variance: Tensor, a: Tensor, prior_size: Tensor) -> Tensor:
    r"""$4 (N + 1)\, \epsilon\, (\sqrt{k(\star, \star)} + |A|\, \sqrt{\mathrm{tr}\, K})^2$, (M,).

    By Cauchy-Schwarz the square bounds the sum of the absolute values of the variance's four terms.
    Each term is a sum of up to N products of numbers that were transformed to the eigenbasis.
    """
    lengths: Tensor = torch.linalg.vector_norm(a, dim=-1)
    size = test_variance.clamp_min(0).sqrt() + lengths * prior_size
    return 4 * (a.shape[-1] + 1) * torch.finfo(torch.float64).eps * size.square()


def _stacked(values: list[Tensor], times: Tensor) -> Tensor:
    """One value per time, stacked along a leading axis; without that axis for a single time."""
    return torch.stack(values).reshape(times.shape + values[0].shape)


def _spectrum(kernel: Tensor, tolerance: float | None) -> tuple[Tensor, Tensor, float]:
    """Eigenvalues (those in the numerical null space set to zero), eigenvectors, threshold."""
    if tolerance is None:
        tolerance = len(kernel) * torch.finfo(torch.float64).eps
    eigenvalues, vectors = torch.linalg.eigh(kernel)
    largest = float(eigenvalues[-1])
    threshold = tolerance * max(largest, 0.0)
    if float(eigenvalues[0]) < -max(1e-8 * abs(largest), threshold):
        raise ValueError(
            "The NTK of the training data is not positive semi-definite: its eigenvalues run from "
            f"{float(eigenvalues[0]):.3g} to {largest:.3g}. Compute it in float64."
        )
    return torch.where(eigenvalues > threshold, eigenvalues, 0.0), vectors, threshold


def _filter(eigenvalues: Tensor, learnt: Tensor, steps: float) -> Tensor:
    r"""$(1 - e^{-\lambda\tau}) / \lambda$ at $\tau = \eta t$, with its limits.

    At $\lambda = 0$ it is $\tau$; at $\tau = \infty$ it is zero there.

    Args:
        eigenvalues: $\lambda$, (N,).
        learnt: Which eigenvalues are above the threshold, (N,).
        steps: $\tau$, learning rate times time.
    """
    safe = torch.where(learnt, eigenvalues, 1.0)
    at_zero = 0.0 if math.isinf(steps) else steps
    return torch.where(learnt, -torch.expm1(-safe * steps) / safe, at_zero)


def _kernel_pair(train: Tensor, cross: Tensor, name: str) -> Pair:
    """The two kernels in float64, their shapes checked."""
    train = _finite(train, f"{name} train kernel")
    cross = _finite(cross, f"{name} cross kernel")
    if train.ndim != 2 or train.shape[0] != train.shape[1] or cross.shape[1:] != train.shape[1:]:
        raise ValueError(
            f"{name}: expected the train kernel (N, N) and the cross kernel (M, N), test rows by "
            f"train columns, got {tuple(train.shape)} and {tuple(cross.shape)}."
        )
    return train, cross


def _check_same_data(ntk: Pair, nngp: Pair) -> None:
    """Refuse kernels of different data."""
    ntk_train, ntk_cross = ntk
    nngp_train, nngp_cross = nngp
    if ntk_train.shape != nngp_train.shape or ntk_cross.shape != nngp_cross.shape:
        raise ValueError(
            "The two kernels are for different data: NTK train and cross "
            f"{tuple(ntk_train.shape)}, {tuple(ntk_cross.shape)}, NNGP {tuple(nngp_train.shape)}, "
            f"{tuple(nngp_cross.shape)}."
        )


def _check_test_kernel(test: Tensor, points: int, *, covariance: bool) -> None:
    """Refuse a test kernel that is not (M,) or (M, M); a covariance needs (M, M)."""
    shape = tuple(test.shape)
    if shape == (points, points) or (shape == (points,) and not covariance):
        return
    if covariance:
        expected = f"({points}, {points}) for a covariance"
    else:
        expected = f"({points},) or ({points}, {points})"
    raise ValueError(f"nngp test kernel: expected {expected}, got {shape}.")


def _checked_times(time: Times, rate: float) -> Tensor:
    """The times as a tensor () or (T,); raises ValueError for impossible times and rates."""
    times = torch.as_tensor(time, dtype=torch.float64)
    if times.ndim > 1 or times.numel() == 0 or not bool((times >= 0).all()):
        raise ValueError(f"time must be a number or a sequence, not negative, got {time}.")
    if not 0 < rate < math.inf:
        raise ValueError(f"learning_rate must be positive and finite, got {rate}.")
    return times


def _finite(tensor: Tensor, name: str) -> Tensor:
    """A tensor in float64; refuses NaN, infinity and empty tensors, with the name."""
    tensor = tensor.detach().to(torch.float64)
    if tensor.numel() == 0 or not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}: expected finite numbers, got none, NaN or infinity.")
    return tensor
