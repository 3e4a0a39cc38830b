r"""The matrix-free form of a rigidity: conjugate gradients on Gauss-Newton products.

Each prediction's $v = A^{-1} g$, $A = J^\top J + R + s I$, is found by preconditioned conjugate
gradients, and A is never formed. For any v with residual $r = g - A v$ and error $e = A^{-1} g - v$

$$ g^\top A^{-1} g = v^\top (g + r) + e^\top A e, \qquad
   0 \le e^\top A e = r^\top A^{-1} r \le |r|^2 / s \quad \text{where } A \succeq s I, $$

so that $v^\top (g + r)$ is a lower bound on q whose gap is known, whatever rounding did to the
iteration; its relative gap is below the stated tolerance.

The preconditioner is the same matrix for an evenly spaced sample of m of the N rows, weighted by
N/m and inverted by Woodbury's identity: it removes the large eigenvalues that hold up the
iteration.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...data.samples import SampleBatch
from ...models.directional import pulls, pushes
from ...posterior.draws import standard_normal
from ..derivatives.differentiation import Differentiation
from ..derivatives.tangents import Tangents
from .dual_form import assembled
from .forms import Form

MAX_ITERATIONS = 500
"""Of conjugate gradients."""

SMALLEST_TOLERANCE = 1e-12
"""What rounding allows."""

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Recomputed:
    """The rows of a batch that are not stored: their factors are made again for every product.

    They are weighted by a root (N, K) or (N, K, K); None for ones.
    """

    differentiation: Differentiation
    batch: SampleBatch
    root: Tensor | None

    def forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, P) -> (m, N, K)."""
        return self._tangents().forward(vectors)

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u: (m, N, K) -> (m, P)."""
        return self._tangents().backward(rows)

    def _tangents(self) -> Tangents:
        _, tangents = self.differentiation(*self.batch.args, **self.batch.kwargs)
        return tangents if self.root is None else tangents.mixed(self.root)


@dataclass(frozen=True)
class Transformed(Recomputed):
    """Products by automatic differentiation, for models that are not made of linear layers.

    In the precision of the parameters.
    """

    def forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, P) -> (m, N, K)."""
        return pushes(self._outputs, self.differentiation.regressor.flat, vectors)

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u: (m, N, K) -> (m, P)."""
        return pulls(self._outputs, self.differentiation.regressor.flat, rows)

    def _outputs(self, flat: Tensor) -> Tensor:
        """Predictions (N, K), weighted."""
        regressor, root = self.differentiation.regressor, self.root
        outputs = regressor.outputs(flat, *self.batch.args, **self.batch.kwargs)
        if root is None or root.ndim == 2:
            return outputs if root is None else outputs * root
        return torch.einsum("nkj,nk->nj", root, outputs.to(root))


Rows = Tangents | Recomputed
"""The weighted rows of a batch, of which conjugate gradients need the products alone."""


def preconditioner(rows: Tangents, share: float, ridge: float) -> Product:
    r"""$\bigl(\frac{N}{m} J_m^\top J_m + s I\bigr)^{-1}$ for m of the N rows.

    From the weighted tangents of this share m/N and the Cholesky factor of
    $J_m J_m^\top + s \frac{m}{N} I$.
    """
    kernel = assembled(rows)
    # Its own rounding must not spoil it; any positive shift gives a valid preconditioner.
    shift = max(ridge * share, 1e-13 * float(kernel.diagonal().sum()))
    kernel.diagonal().add_(shift)
    return partial(_preconditioned, rows, torch.linalg.cholesky(kernel), ridge)


def _preconditioned(rows: Tangents, factor: Tensor, ridge: float, vectors: Tensor) -> Tensor:
    """(m, P) -> (m, P)."""
    data = rows.forward(vectors)
    inner = torch.cholesky_solve(data.flatten(1).mT, factor).mT
    return (vectors - rows.backward(inner.reshape(data.shape))) / ridge


@dataclass(frozen=True)
class MatrixFreeForm(Form):
    """Products with the training rows, and the systems they define.

    Attributes:
        rows: one entry per batch.
        ridge: s.
        tolerance: relative error allowed in q.
        width: number of parameters P.
        device: of the vectors.
        penalty: product with the regulariser's Hessian, or None.
        preconditioner: approximate inverse, or None.
        together: systems solved at once.
    """

    rows: Sequence[Rows]
    ridge: float
    tolerance: float
    width: int
    device: torch.device
    penalty: Product | None = None
    preconditioner: Product | None = None
    together: int = 16
    name = "matrix-free"
    effective_rank = math.nan

    def product(self, vectors: Tensor) -> Tensor:
        """A v: (m, P) -> (m, P)."""
        result = self.ridge * vectors
        for batch in self.rows:
            result += batch.backward(batch.forward(vectors))
        return result if self.penalty is None else result + self.penalty(vectors)

    def solve(self, vectors: Tensor, tolerance: float) -> Tensor:
        """A^-1 g for each row, (m, P) -> (m, P)."""
        near, parts = self.preconditioner, torch.split(vectors, self.together)
        solved = partial(conjugate_gradients, self.product, floor=self.ridge, tolerance=tolerance)
        return torch.cat([solved(part, preconditioner=near) for part in parts])

    def quadratic(self, tangents: Tangents) -> Tensor:
        """q of each prediction, (N, K), at most `tolerance` too small."""
        parts = [self._quadratic(g) for g in self._vectors(tangents)]
        return torch.cat(parts).reshape(tangents.shape[:2])

    def _vectors(self, tangents: Tangents) -> Iterator[Tensor]:
        """The rows as vectors (m, P), as many as are solved at once."""
        samples, outputs, _ = tangents.shape
        step = max(1, self.together // outputs)
        for start in range(0, samples, step):
            part = tangents.take(slice(start, start + step))
            yield part.matrix().to(torch.float64).flatten(0, 1)

    def _quadratic(self, g: Tensor) -> Tensor:
        """q of each row from the true residual; what rounding left open is solved once more."""
        v = self.solve(g, self.tolerance)
        r = g - self.product(v)
        if self._gap(v, g, r) > self.tolerance:
            v = v + self.solve(r, self.tolerance)
            r = g - self.product(v)
            reached = self._gap(v, g, r)
            if reached > self.tolerance:
                warnings.warn(
                    f"Variances may be too small by up to {reached:.1g} (relative), not "
                    f"{self.tolerance:g}: rounding leaves no more. Pass a larger ridge or "
                    "tolerance, or a model in float64.",
                    stacklevel=2,
                )
        return lower_bounds(v, g, r)

    def _gap(self, v: Tensor, g: Tensor, r: Tensor) -> float:
        """Largest relative gap between the lower and the upper bound on q."""
        gap, q = r.square().sum(-1) / self.ridge, lower_bounds(v, g, r)
        return float(torch.where(gap > 0, gap / q, 0.0).max())

    def covariance(self, left: Tangents, right: Tangents) -> Tensor:
        r"""Unscaled covariances between two sets of predictions, (N K, M K).

        Their error is at most `tolerance` times $\sqrt{q q'}$.
        """
        few, many = (right, left) if right.shape[0] <= left.shape[0] else (left, right)
        # One side is solved, and e^T A v' is bounded by the root of the gap alone.
        tolerance = max(self.tolerance**2, SMALLEST_TOLERANCE)
        solved = (self.solve(g, tolerance) for g in self._vectors(few))
        covariance = torch.cat([many.forward(v).flatten(1) for v in solved])
        return covariance.mT if few is right else covariance

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        r"""Deviations with covariance $A^{-1}$, (n, P): $A w = J^\top \epsilon + \sqrt s\, u$."""
        if self.penalty is not None:
            raise ValueError(
                "Samples under a regulariser need the dense form: pass form='dense', or express "
                "the regulariser as a ridge."
            )
        data = standard_normal((n, self.width), self.device, generator) * math.sqrt(self.ridge)
        for batch in self.rows:
            shape = batch.forward(data[:1]).shape[1:]
            data += batch.backward(standard_normal((n, *shape), self.device, generator))
        return self.solve(data, self.tolerance)


def lower_bounds(solutions: Tensor, vectors: Tensor, residuals: Tensor) -> Tensor:
    """v^T (g + r) of each system, (m, P) three times -> (m,)."""
    return (solutions * (vectors + residuals)).sum(-1)


def conjugate_gradients(
    product: Product,
    vectors: Tensor,
    *,
    floor: float,
    tolerance: float,
    preconditioner: Product | None = None,
) -> Tensor:
    """Solve A v = g for each row of g, (m, P) -> (m, P).

    Args:
        product: v -> A v for several v, (m, P) -> (m, P).
        vectors: g.
        floor: s, no larger than the smallest eigenvalue of A.
        tolerance: stop where the gap |r|^2 / s falls below this share of g^T A^-1 g.
        preconditioner: approximate inverse of A.

    Raises:
        ValueError: A is not positive definite.

    Examples:
        >>> v = conjugate_gradients(lambda v: 2 * v, torch.ones(1, 3), floor=2.0, tolerance=1e-8)
        >>> v.tolist()
        [[0.5, 0.5, 0.5]]
    """
    inverse = preconditioner or (lambda v: v)
    solution, active = torch.zeros_like(vectors), torch.arange(len(vectors), device=vectors.device)
    g, v, r = vectors, torch.zeros_like(vectors), vectors.clone()
    z = inverse(r)
    p, rz = z, (r * z).sum(-1)
    for _ in range(MAX_ITERATIONS):
        open_ = r.square().sum(-1) > tolerance * floor * lower_bounds(v, g, r)
        solution[active[~open_]] = v[~open_]
        if not bool(open_.any()):
            return solution  # systems that are done have dropped out
        active, g, v, r, p, rz = (t[open_] for t in (active, g, v, r, p, rz))
        image = product(p)
        curvatures = (p * image).sum(-1)
        if not bool((curvatures > 0).all()):
            lowest = float((curvatures / p.square().sum(-1)).min())
            raise ValueError(
                f"The Hessian is not positive definite: a direction of curvature {lowest:.3g} was "
                "met. Pass a larger ridge, or a convex regulariser."
            )
        step = rz / curvatures
        v, r = v + step[:, None] * p, r - step[:, None] * image
        z = inverse(r)
        before, rz = rz, (r * z).sum(-1)
        p = z + (rz / before)[:, None] * p
    solution[active] = v
    reached = float((r.square().sum(-1) / floor / lower_bounds(v, g, r)).max())
    warnings.warn(
        f"Conjugate gradients stopped after {MAX_ITERATIONS} iterations: {len(active)} of "
        f"{len(vectors)} variances may be too small by up to {reached:.1g} (relative), not "
        f"{tolerance:g}. Pass a larger ridge or tolerance, or a model in float64.",
        stacklevel=2,
    )
    return solution
