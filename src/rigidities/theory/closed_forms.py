r"""Models whose rigidities are known in closed form, and the two forms of the inverse.

Linear regression with any penalty (the paper's appendix A), `linear_regression`:

$$ \mathcal{L}(w) = \tfrac12 |y - X w|^2 + \tfrac12 w^\top \Sigma w, \qquad
   \sigma_\star^2 = \sigma^2\, x_\star^\top (X^\top X + \Sigma)^{-1} x_\star . $$

Gaussian process regression in the subset-of-regressors form (the same appendix),
`SubsetOfRegressors`: with inducing points $Z$, $K_{nm} = k(X, Z)$, $K_{mm} = k(Z, Z)$ and
$k_\star = k(Z, x_\star)$ the model is $k_\star^\top w$, and

$$ \mathcal{L}(w) = \tfrac12 |y - K_{nm} w|^2 + \tfrac12 \sigma^2 w^\top K_{mm} w, \qquad
   \sigma_\star^2 = \sigma^2\, k_\star^\top (K_{nm}^\top K_{nm} + \sigma^2 K_{mm})^{-1} k_\star . $$

Woodbury's identity (Sec. 3.5), `primal_quadratic` and `dual_quadratic`, from kernels alone
`kernel_quadratic`; and the limit of $s q$ for $s \to 0$, `unexplained`:

$$ q = f^\top (F^\top F + s I)^{-1} f
     = \frac1s \left( f^\top f - f^\top F^\top (F F^\top + s I)^{-1} F f \right), \qquad
   \lim_{s \to 0} s q = f^\top f - f^\top F^\top (F F^\top)^{-1} F f . $$

The appendix writes losses without the factor 1/2, whose Hessians are twice these; the calibrated
scale absorbs the factor.

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

from ..fits.arrays import Values, column, float64
from ..fits.fit_rigidity import FitRigidity, LinearModel
from ..fits.sources import from_jacobian, penalty_rows, weight_roots
from ..posterior.row_span import RowSpan

__all__ = [
    "GaussianKernel",
    "SubsetOfRegressors",
    "dual_quadratic",
    "kernel_quadratic",
    "linear_regression",
    "primal_quadratic",
    "unexplained",
]

Kernel = Callable[[Any, Any], Any]
"""k(X, Z): (n, d), (m, d) -> (n, m)."""


# --- linear regression --------------------------------------------------------------------------


def linear_regression(
    X: Values,
    y: Values,
    *,
    penalty: Values | None = None,
    ridge: float = 0.0,
    weights: Values | None = None,
    scale: float | None = None,
) -> FitRigidity:
    r"""Penalised linear least squares, its coefficients and its error bars.

    $w = (X^\top W X + \Sigma)^{-1} X^\top W y$, and the variance of a prediction is
    $\sigma^2 x^\top (X^\top W X + \Sigma)^{-1} x$. With $\Sigma$ this is the Bayesian variance
    (prior $N(0, \sigma^2 \Sigma^{-1})$); without it, the textbook one.

    Args:
        X: Design matrix (N, P); add a column of ones for an intercept.
        y: Targets (N,).
        penalty: $\Sigma$, any symmetric positive semi-definite (P, P).
        ridge: A number that is added to the diagonal of the penalty.
        weights: Loss weights (N,).
        scale: $\sigma$, where known; otherwise it is estimated from the residuals.

    Raises:
        ValueError: The design matrix is singular and there is no penalty, shapes do not match, or
            values are not finite.

    Examples:
        >>> fit = linear_regression([[1.0], [2.0]], [1.0, 2.0], penalty=[[5.0]], scale=1.0)
        >>> round(fit.predict([[2.0]]).mean.item(), 12), round(fit.variance([[10.0]]).item(), 12)
        (1.0, 10.0)
    """
    design = float64(X, "X", 2)
    target = column(y, "y", len(design))
    # A penalised fit is a plain one with additional rows, whose targets are zero.
    root_weights = weight_roots(weights, len(design))
    penalties = penalty_rows(ridge, penalty, design.shape[1])
    rows = torch.cat([root_weights[:, None] * design, *penalties])
    zeros = rows.new_zeros(len(rows) - len(design))
    right_side = torch.cat([root_weights * target, zeros])[:, None]
    w = torch.linalg.lstsq(rows, right_side, driver="gelsd").solution[:, 0]
    fit = from_jacobian(
        design,
        residuals=target - design @ w,
        weights=weights,
        ridge=ridge,
        penalty=penalty,
        scale=scale,
        parameters=w,
    )
    return replace(fit, model=LinearModel(_design_rows, w))


def _design_rows(x: Any) -> Tensor:
    """New rows of the design matrix, (M, P)."""
    return float64(x, "x", 2)


# --- the subset of regressors -------------------------------------------------------------------


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


# --- Woodbury's two forms, and their limit --------------------------------------------------------


def primal_quadratic(F: Values, f: Values, ridge: float) -> Tensor:
    r"""$f^\top (F^\top F + s I)^{-1} f$ with as many unknowns as features.

    Args:
        F: Training features (N, D).
        f: Features of the predictions (M, D).
        ridge: s > 0, or zero for N >= D of full rank.

    Examples:
        >>> round(primal_quadratic([[1.0], [2.0]], [[10.0]], 5.0).item(), 12)
        10.0
        >>> round(dual_quadratic([[1.0], [2.0]], [[10.0]], 5.0).item(), 12)
        10.0
    """
    return from_jacobian(F, ridge=ridge).variance(f)


def dual_quadratic(F: Values, f: Values, ridge: float) -> Tensor:
    r"""The same with as many unknowns as rows: $[f^\top f - k^\top (F F^\top + s I)^{-1} k] / s$.

    Here $k = F f$. Its relative rounding error is about machine epsilon times $f^\top f / s q$.
    """
    rows, features = _training_and_test(F, f)
    return kernel_quadratic(rows @ rows.mT, rows @ features.mT, features.square().sum(1), ridge)


def kernel_quadratic(kernel: Values, cross: Values, own: Values, ridge: float) -> Tensor:
    r"""The dual form from kernels alone: $[k_{**} - k^\top (K + s I)^{-1} k] / s$.

    Args:
        kernel: K, (N, N) of the training rows.
        cross: k, (N, M) between training rows and predictions.
        own: $k_{**}$, (M,): the kernel of each prediction with itself.
        ridge: s > 0.

    Raises:
        ValueError: The ridge is not positive, or shapes do not match.
    """
    if not 0 < ridge < math.inf:
        raise ValueError(
            f"The dual form divides by the ridge: expected ridge > 0, got {ridge}. Its limit times "
            "the ridge is unexplained(F, f)."
        )
    matrix = float64(kernel, "kernel", 2)
    columns = float64(cross, "cross", 2)
    if tuple(matrix.shape) != (len(columns), len(columns)):
        raise ValueError(
            "Expected kernel (N, N) and cross (N, M), got "
            f"{tuple(matrix.shape)} and {tuple(columns.shape)}."
        )
    factor = torch.linalg.cholesky(matrix + ridge * torch.eye(len(matrix), dtype=torch.float64))
    whitened = torch.linalg.solve_triangular(factor, columns, upper=False)
    explained: Tensor = whitened.square().sum(0)
    return (column(own, "own", columns.shape[1]) - explained) / ridge


def unexplained(F: Values, f: Values) -> Tensor:
    r"""$\lim_{s \to 0} s\, q(s) = f^\top f - f^\top F^\top (F F^\top)^{-1} F f$.

    This is the squared distance of f from the span of the training rows. Times $\sigma_w^2$ it is
    the variance of a Gaussian process with kernels $\sigma_w^2 F F^\top$ and $c F F^\top$ after
    infinitely long training: exactly zero for any f, once the rows span all features. A ridge that
    is added after this limit is a modelling choice. Distances within rounding,
    $(D \epsilon |f|)^2$, are set to zero.

    Examples:
        >>> unexplained([[1.0, 0.0]], [[3.0, 2.0]])
        tensor([4.], dtype=torch.float64)
    """
    rows, features = _training_and_test(F, f)
    squared_distances, _ = RowSpan.of(rows).outside(features)
    return squared_distances


def _training_and_test(F: Values, f: Values) -> tuple[Tensor, Tensor]:
    """Features (N, D) and (M, D), their shapes checked."""
    rows = float64(F, "F", 2)
    features = float64(f, "f", 2)
    if rows.shape[1] != features.shape[1]:
        raise ValueError(
            f"Expected F (N, D) and f (M, D), got {tuple(rows.shape)} and {tuple(features.shape)}."
        )
    return rows, features


def __dir__() -> list[str]:
    return sorted(__all__)
