r"""Models whose rigidities are known in closed form, and the two forms of the inverse.

- `linear_regression(X, y, penalty=...)`: $\sigma^2 x^\top (X^\top X + \Sigma)^{-1} x$.
- `SubsetOfRegressors(kernel, inducing, noise)`: a sparse Gaussian process,
  $\sigma^2 k^\top (K_{nm}^\top K_{nm} + \sigma^2 K_{mm})^{-1} k$.
- `primal_quadratic`, `dual_quadratic`, `kernel_quadratic`: Woodbury's two forms of
  $q = f^\top (F^\top F + s I)^{-1} f$; `unexplained(F, f)`: the limit of $s q$ for $s \to 0$.

The paper's appendix on linear models and Gaussian processes writes losses without the factor 1/2,
whose Hessians are twice these; the calibrated scale absorbs the factor.
"""

from .linear_regression import (
    dual_quadratic,
    kernel_quadratic,
    linear_regression,
    primal_quadratic,
    unexplained,
)
from .subset_of_regressors import GaussianKernel, SubsetOfRegressors

__all__ = [
    "GaussianKernel",
    "SubsetOfRegressors",
    "dual_quadratic",
    "kernel_quadratic",
    "linear_regression",
    "primal_quadratic",
    "unexplained",
]


def __dir__() -> list[str]:
    return sorted(__all__)
