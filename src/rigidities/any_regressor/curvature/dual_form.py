r"""The dual form of a rigidity: as many unknowns as rows, whatever the number of parameters.

With $K = J J^\top$ over the (weighted) training rows and $k = J g$ (Woodbury)

$$ q = g^\top (J^\top J + s I)^{-1} g
     = \frac{1}{s} \bigl[ g^\top g - k^\top (K + s I)^{-1} k \bigr], $$

which needs only inner products of tangents. One Cholesky factorisation of $K + s I$ serves all
predictions. Relative rounding errors are about machine epsilon times $\mathrm{tr} K / s$.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...posterior.draws import standard_normal
from ..derivatives.tangents import Tangents
from .forms import Form
from .pseudo_hessian import PIECE

BLOCK = 1024
"""Rows and columns of the kernel that are computed at once."""


@dataclass(frozen=True)
class DualForm(Form):
    """The training rows and the Cholesky factor of their kernel plus ridge.

    Attributes:
        rows: Weighted tangents of the training data, n = N K rows.
        factor: Lower triangular Cholesky factor L, (n, n).
        ridge: The ridge s.
        tolerance: Bound on the relative rounding error of q.
    """

    rows: Tangents
    factor: Tensor
    ridge: float
    tolerance: float
    name = "dual"

    @classmethod
    def of(cls, rows: Tangents, ridge: float) -> DualForm:
        """Assemble and factorise the kernel.

        Raises:
            ValueError: The ridge is lost in the rounding of the kernel.
        """
        kernel = assembled_kernel(rows)
        trace = float(kernel.diagonal().sum())
        kernel.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(kernel)
        tolerance = torch.finfo(torch.float64).eps * (1 + trace / ridge)
        if int(failed) or tolerance > 0.01:
            raise ValueError(
                f"The ridge {ridge:g} is negligible compared with the kernel's trace {trace:.3g}. "
                f"Pass a ridge of at least {1e-12 * trace:.1g}, or form='dense'."
            )
        return cls(rows, factor, ridge, tolerance)

    @property
    def width(self) -> int:
        """Number of parameters P."""
        return self.rows.shape[2]

    def quadratic(self, tangents: Tangents) -> Tensor:
        """q of each prediction, (N, K)."""
        squares = tangents.squares()  # g^T g
        explained = self._whitened(tangents).square().sum(0).reshape(squares.shape)
        return (squares - explained) / self.ridge

    def covariance(self, left: Tangents, right: Tangents) -> Tensor:
        """Unscaled covariances between two sets of predictions, (N K, M K)."""
        left_whitened = self._whitened(left)
        right_whitened = left_whitened if right is left else self._whitened(right)
        return (left.kernel(right) - left_whitened.mT @ right_whitened) / self.ridge

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        r"""Deviations with covariance $(J^\top J + s I)^{-1}$, (n, P), by Matheron's rule.

        $w = u - J^\top (K + sI)^{-1} (J u + \epsilon)$ with $u \sim N(0, I/s)$ and
        $\epsilon \sim N(0, I)$.
        """
        samples, outputs, width = self.rows.shape
        device = self.factor.device
        u = standard_normal((n, width), device, generator) / math.sqrt(self.ridge)
        noise = standard_normal((n, samples * outputs), device, generator)
        data = self.rows.forward(u).flatten(1) + noise
        weights = torch.cholesky_solve(data.mT, self.factor).mT
        return u - self.rows.backward(weights.reshape(n, samples, outputs))

    @cached_property
    def effective_rank(self) -> float:
        r"""$\mathrm{tr}\, K (K + s I)^{-1} = n - s\, |L^{-1}|^2$."""
        n = len(self.factor)
        identity = torch.eye(n, dtype=self.factor.dtype, device=self.factor.device)
        inverse = torch.linalg.solve_triangular(self.factor, identity, upper=False)
        return n - self.ridge * float(inverse.square().sum())

    def _whitened(self, tangents: Tangents) -> Tensor:
        """$L^{-1} k$ for each prediction, (n, N K)."""
        cross_kernel = torch.cat([piece.kernel(tangents) for _, piece in _pieces(self.rows)])
        whitened: Tensor = torch.linalg.solve_triangular(self.factor, cross_kernel, upper=False)
        return whitened


def assembled_kernel(rows: Tangents) -> Tensor:
    """The kernel J J^T in float64, (N K, N K), block by block.

    Only the blocks on and below the diagonal are computed.
    """
    samples, outputs, _ = rows.shape
    n = samples * outputs
    kernel = torch.empty(n, n, dtype=torch.float64, device=rows.device)
    pieces = _pieces(rows)
    for number, (right_start, right) in enumerate(pieces):
        columns = slice(right_start * outputs, (right_start + right.shape[0]) * outputs)
        for left_start, left in pieces[number:]:
            below = slice(left_start * outputs, (left_start + left.shape[0]) * outputs)
            block = left.kernel(right)
            kernel[below, columns] = block
            if left_start > right_start:
                kernel[columns, below] = block.mT
    return kernel


def _pieces(rows: Tangents) -> list[tuple[int, Tangents]]:
    """The samples in pieces small enough to be cast to float64, each with its first sample."""
    samples, outputs, _ = rows.shape
    numbers_per_sample = max(1, rows.numbers // max(1, samples))
    samples_in_memory = PIECE // (8 * numbers_per_sample)
    step = max(1, min(BLOCK // outputs, samples_in_memory))
    return [(start, rows.take(slice(start, start + step))) for start in range(0, samples, step)]
