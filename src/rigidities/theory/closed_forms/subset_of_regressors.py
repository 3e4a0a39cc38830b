r"""Gaussian process regression in the subset-of-regressors form.

With inducing points $Z$, $K_{nm} = k(X, Z)$ and $K_{mm} = k(Z, Z)$ the model $k(x, Z) w$ has the
loss $\frac12 |y - K_{nm} w|^2 + \frac12 \sigma^2 w^\top K_{mm} w$ and the variance

$$ \sigma^2(x) = \sigma^2\, k^\top (K_{nm}^\top K_{nm} + \sigma^2 K_{mm})^{-1} k,
   \qquad k = k(Z, x). $$

References:
    Quiñonero-Candela and Rasmussen, "A unifying view of sparse approximate Gaussian process
        regression", JMLR 2005.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fits.arrays import Values, float64
from ...fits.fit_rigidity import FitRigidity, LinearModel
from .linear_regression import linear_regression

__all__ = ["GaussianKernel", "SubsetOfRegressors"]

Kernel = Callable[[Any, Any], Any]
"""k(X, Z): (n, d), (m, d) -> (n, m)."""


@dataclass(frozen=True)
class GaussianKernel:
    r"""$v \exp(-|x - z|^2 / 2 \ell^2)$.

    Args:
        length: The length scale $\ell$.
        variance: The prior variance $v$.

    Examples:
        >>> GaussianKernel(length=2.0)(torch.zeros(1, 1), torch.tensor([[0.0], [2.0]]))
        tensor([[1.0000, 0.6065]])
    """

    length: float = 1.0
    variance: float = 1.0

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        """(n, d), (m, d) -> (n, m)."""
        distances = torch.cdist(X, Z, compute_mode="donot_use_mm_for_euclid_dist")
        return self.variance * torch.exp(-0.5 * (distances / self.length).square())


class _Eigenbasis(NamedTuple):
    """Eigenvalues (r,) and eigenvectors (m, r) of K_mm above the floor, and the largest below."""

    values: Tensor
    vectors: Tensor
    dropped: float


@dataclass(frozen=True, eq=False)
class SubsetOfRegressors:
    r"""Gaussian process regression on inducing points.

    In the eigenbasis $K_{mm} = U \,\mathrm{diag}(\mu)\, U^\top$ the model is linear with features
    $\phi(x) = \mu^{-1/2} U^\top k(Z, x)$ and ridge $\sigma^2$, which is as well conditioned as the
    problem allows. Eigenvalues below `floor` times the largest are rounding: their directions are
    dropped, and `rank` directions remain. `dropped`, the largest of these eigenvalues, bounds the
    prior variance that a prediction at an inducing point loses.

    *Far from the inducing points its variance tends to zero*, while that of the full Gaussian
    process tends to the prior's: all features vanish there. With the training inputs as inducing
    points, the full variance is this one plus `unexplained(x)` everywhere (the means agree too),
    and `unexplained` vanishes at the inducing points.

    Args:
        kernel: A function k(X, Z) -> (n, m) of float64 tensors, or a scikit-learn kernel.
        inducing: The inducing points Z, (m, d), or (m,) for one input.
        noise: $\sigma^2$, the variance of an observation.
        floor: Smallest eigenvalue of $K_{mm}$ that is kept, relative to the largest.

    Raises:
        ValueError: The noise is not positive, or the kernel is not positive semi-definite.

    Examples:
        >>> x = torch.tensor([0.0, 1.0, 2.0])
        >>> model = SubsetOfRegressors(GaussianKernel(), inducing=x, noise=0.01)
        >>> p = model.fit(x, torch.sin(x)).predict([1.0, 50.0])
        >>> [round(s, 3) for s in p.std.tolist()]
        [0.099, 0.0]
    """

    kernel: Kernel
    inducing: Values
    noise: float
    floor: float = 1e-13

    def __post_init__(self) -> None:
        if not 0 < self.noise < math.inf:
            raise ValueError(f"Expected noise (a variance) above zero, got {self.noise}.")

    def fit(self, X: Values, y: Values) -> FitRigidity:
        r"""Condition on targets y (N,) at inputs X (N, d).

        Returns:
            A fit with `predict(x)`. Its parameters are the weights of `features`, and
            `predict(x, noise=True)` adds $\sigma^2$.
        """
        scale = math.sqrt(self.noise)
        fit = linear_regression(self.features(X), y, ridge=self.noise, scale=scale)
        assert fit.parameters is not None
        return replace(fit, model=LinearModel(self.features, fit.parameters))

    def features(self, x: Values) -> Tensor:
        r"""$\mu^{-1/2} U^\top k(Z, x)$, (N, rank)."""
        basis = self._basis
        cross = self._kernel_matrix(_points(x, "x"), self._inducing_points)  # (N, m)
        return cross @ basis.vectors / basis.values.sqrt()

    def unexplained(self, x: Values) -> Tensor:
        r"""$k(x, x) - k^\top K_{mm}^{-1} k \ge 0$, (N,): prior variance that no feature carries.

        The rounding error of this difference is at worst $k(x, x)$ times machine epsilon over the
        root of `floor`, 7e-10 of it. Values that rounding makes negative are set to zero.

        Raises:
            ValueError: It is negative beyond 1e-6 of $k(x, x)$: the kernel is not positive
                semi-definite.
        """
        # Small blocks, since a block's whole matrix is computed for its diagonal.
        blocks = torch.split(_points(x, "x"), 64)
        prior = torch.cat([self._kernel_matrix(block, block).diagonal() for block in blocks])
        difference: Tensor = prior - self.features(x).square().sum(1)
        if bool((difference < -1e-6 * prior.abs()).any()):
            raise ValueError(
                "Expected a positive semi-definite kernel, got one whose features carry more than "
                f"its own variance: k(x, x) less theirs is {float(difference.min()):.3g}."
            )
        return difference.clamp(min=0)

    @property
    def rank(self) -> int:
        """Number of features."""
        return len(self._basis.values)

    @property
    def dropped(self) -> float:
        """The largest eigenvalue of K_mm that was dropped; zero where none was."""
        return self._basis.dropped

    @cached_property
    def _inducing_points(self) -> Tensor:
        """Z, (m, d)."""
        return _points(self.inducing, "inducing")

    @cached_property
    def _basis(self) -> _Eigenbasis:
        """The eigenbasis of K_mm, without the eigenvalues that are rounding."""
        points = self._inducing_points
        values, vectors = torch.linalg.eigh(self._kernel_matrix(points, points))
        if not bool(values[-1] > 0) or bool(values[0] < -1e-8 * values[-1]):
            raise ValueError(
                "Expected a positive semi-definite kernel, got one with eigenvalues from "
                f"{float(values[0]):.3g} to {float(values[-1]):.3g} on the inducing points."
            )
        above_floor = values > self.floor * values[-1]
        dropped = 0.0
        if not bool(above_floor.all()):
            dropped = max(0.0, float(values[~above_floor].max()))
        return _Eigenbasis(values[above_floor], vectors[:, above_floor], dropped)

    def _kernel_matrix(self, X: Tensor, Z: Tensor) -> Tensor:
        """k(X, Z), (n, m) in float64, its shape checked."""
        if hasattr(self.kernel, "hyperparameters"):  # scikit-learn's kernels take arrays
            values = self.kernel(X.numpy(), Z.numpy())
        else:
            values = self.kernel(X, Z)
        matrix = float64(values, "the kernel's values", 2)
        if tuple(matrix.shape) != (len(X), len(Z)):
            raise ValueError(
                f"Expected the kernel to return ({len(X)}, {len(Z)}) for {len(X)} and {len(Z)} "
                f"points, got {tuple(matrix.shape)}."
            )
        return matrix


def _points(x: Values, name: str) -> Tensor:
    """Inputs (N, d); (N,) counts as (N, 1)."""
    points = float64(x, name)
    if points.ndim == 1:
        points = points[:, None]
    if points.ndim != 2:
        raise ValueError(f"Expected {name} (N, d) or (N,), got {tuple(points.shape)}.")
    return points
