r"""The matrix-free form of a rigidity: conjugate gradients on Gauss-Newton products.

Each prediction's $v = A^{-1} g$, $A = J^\top J + R + s I$, is found by preconditioned conjugate
gradients, and A is never formed. For any v with residual $r = g - A v$ and error $e = A^{-1} g - v$

$$ g^\top A^{-1} g = v^\top (g + r) + e^\top A e, \qquad
   0 \le e^\top A e = r^\top A^{-1} r \le |r|^2 / s \quad \text{where } A \succeq s I, $$

so that $v^\top (g + r)$ is a lower bound on q with a known gap, however rounding has affected the
iteration. The relative gap is below the stated tolerance.

The preconditioner is the inverse of the same matrix (without R) for m evenly spaced rows of the N,
weighted by N/m, by Woodbury's identity. It removes the large eigenvalues that slow the iteration
down.

Products with J come from stored tangents, or from batches that are differentiated again for every
product (`RecomputedRows`, `AutodiffRows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.samples import SampleBatch
from ...models.directional import pulls, pushes
from ...notices import notify
from ...posterior.draws import standard_normal
from ..derivatives.differentiation import Differentiation
from ..derivatives.tangents import Tangents
from .dual_form import assembled_kernel
from .forms import Form

MAX_ITERATIONS = 500
"""Iterations of conjugate gradients, at most."""

SMALLEST_TOLERANCE = 1e-12
"""The smallest relative gap that can be reached in spite of rounding."""

Product = Callable[[Tensor], Tensor]
"""A matrix, given by its products with several vectors, (m, P) -> (m, P)."""


@dataclass(frozen=True)
class RecomputedRows:
    """The weighted rows of a batch, not stored: every product computes their tangents again.

    Attributes:
        differentiation: How to differentiate the regressor.
        batch: The samples.
        root: Root of their weights, (N, K) or (N, K, K); None for ones.
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
        """The weighted tangents of the batch."""
        _, tangents = self.differentiation(*self.batch.args, **self.batch.kwargs)
        return tangents if self.root is None else tangents.mixed(self.root)


@dataclass(frozen=True)
class AutodiffRows(RecomputedRows):
    """The same products by automatic differentiation, without tangents.

    For models that are not made of linear layers, whose tangents would be full matrices. Products
    have the precision of the parameters.
    """

    def forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, P) -> (m, N, K)."""
        return pushes(self._outputs, self.differentiation.regressor.flat, vectors)

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u: (m, N, K) -> (m, P)."""
        return pulls(self._outputs, self.differentiation.regressor.flat, rows)

    def _outputs(self, flat: Tensor) -> Tensor:
        """Weighted predictions L^T y at some parameters, (N, K)."""
        regressor = self.differentiation.regressor
        outputs = regressor.outputs(flat, *self.batch.args, **self.batch.kwargs)
        if self.root is None:
            return outputs
        if self.root.ndim == 2:
            return outputs * self.root
        return torch.einsum("nkj,nk->nj", self.root, outputs.to(self.root))


RowProducts = Tangents | RecomputedRows
"""The weighted rows of a batch; conjugate gradients need only `forward` and `backward`."""


@dataclass(frozen=True)
class Preconditioner:
    r"""$\bigl(\frac{N}{m} J_m^\top J_m + s I\bigr)^{-1}$ for m of the N rows, by its products.

    Attributes:
        rows: Weighted tangents $J_m$.
        factor: Cholesky factor of $J_m J_m^\top + s \frac{m}{N} I$.
        ridge: The ridge s.
    """

    rows: Tangents
    factor: Tensor
    ridge: float

    @classmethod
    def of(cls, rows: Tangents, share: float, ridge: float) -> Preconditioner:
        """Factorise for some rows, which are the share m/N of all."""
        kernel = assembled_kernel(rows)
        # The shift must exceed the kernel's rounding; a larger one is still a preconditioner.
        shift = max(ridge * share, 1e-13 * float(kernel.diagonal().sum()))
        kernel.diagonal().add_(shift)
        return cls(rows, torch.linalg.cholesky(kernel), ridge)

    def __call__(self, vectors: Tensor) -> Tensor:
        """The product with several vectors, (m, P) -> (m, P)."""
        data = self.rows.forward(vectors)
        weights = torch.cholesky_solve(data.flatten(1).mT, self.factor).mT
        return (vectors - self.rows.backward(weights.reshape(data.shape))) / self.ridge


@dataclass(frozen=True)
class MatrixFreeForm(Form):
    """The training rows by their products, and the linear systems A v = g with them.

    Attributes:
        rows: The weighted training rows, one entry per batch.
        ridge: The ridge s.
        tolerance: Relative error allowed in q.
        width: Number of parameters P.
        device: Device of the vectors.
        penalty: Product with the regulariser's Hessian, or None.
        preconditioner: Approximate inverse of A, or None.
        together: Number of systems that are solved at once.
    """

    rows: Sequence[RowProducts]
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
        solutions = []
        for right_sides in torch.split(vectors, self.together):
            solution = conjugate_gradients(
                self.product,
                right_sides,
                floor=self.ridge,
                tolerance=tolerance,
                preconditioner=self.preconditioner,
            )
            solutions.append(solution)
        return torch.cat(solutions)

    def quadratic(self, tangents: Tangents) -> Tensor:
        """q of each prediction, (N, K), too small by a share of at most `tolerance`."""
        quadratics = [self._quadratic(g) for g in self._vectors(tangents)]
        return torch.cat(quadratics).reshape(tangents.shape[:2])

    def _vectors(self, tangents: Tangents) -> Iterator[Tensor]:
        """The rows of the tangents as vectors (m, P), as many at once as are solved together."""
        samples, outputs, _ = tangents.shape
        step = max(1, self.together // outputs)
        for start in range(0, samples, step):
            piece = tangents.take(slice(start, start + step))
            yield piece.matrix().to(torch.float64).flatten(0, 1)

    def _quadratic(self, g: Tensor) -> Tensor:
        """q of each row of g, from the true residual, with one refinement where it is too large."""
        v = self.solve(g, self.tolerance)
        r = g - self.product(v)
        if self._largest_gap(v, g, r) > self.tolerance:
            # Iterative refinement: solve for the residual.
            v = v + self.solve(r, self.tolerance)
            r = g - self.product(v)
            gap = self._largest_gap(v, g, r)
            if gap > self.tolerance:
                notify(
                    f"Variances may be too small by up to {gap:.1g} (relative), more than the "
                    f"tolerance {self.tolerance:g}, because of rounding. Pass a larger ridge or "
                    "tolerance, or a model in float64."
                )
        return lower_bounds(v, g, r)

    def _largest_gap(self, v: Tensor, g: Tensor, r: Tensor) -> float:
        """Largest relative gap between the lower and the upper bound on q."""
        gaps = r.square().sum(-1) / self.ridge
        q = lower_bounds(v, g, r)
        return float(torch.where(gaps > 0, gaps / q, 0.0).max())

    def covariance(self, left: Tangents, right: Tangents) -> Tensor:
        r"""Unscaled covariances between two sets of predictions, (N K, M K).

        Their error is at most `tolerance` times $\sqrt{q q'}$.
        """
        # The systems of the smaller side are solved, and multiplied with the rows of the other.
        right_is_solved = right.shape[0] <= left.shape[0]
        if right_is_solved:
            solved_side = right
            other_side = left
        else:
            solved_side = left
            other_side = right
        # With only one side solved, the error is of the order of the root of the gap: hence the
        # square of the tolerance.
        tolerance = max(self.tolerance**2, SMALLEST_TOLERANCE)
        pieces = []
        for g in self._vectors(solved_side):
            v = self.solve(g, tolerance)
            pieces.append(other_side.forward(v).flatten(1))
        covariance = torch.cat(pieces)
        return covariance.mT if right_is_solved else covariance

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        r"""Deviations w with covariance $A^{-1}$, (n, P): $A w = J^\top \epsilon + \sqrt s\, u$.

        $\epsilon$ and u are standard normal.
        """
        if self.penalty is not None:
            raise ValueError(
                "Samples under a regulariser need the dense form: pass form='dense', or express "
                "the regulariser as a ridge."
            )
        u = standard_normal((n, self.width), self.device, generator)
        right_sides = u * math.sqrt(self.ridge)
        for batch in self.rows:
            shape = batch.forward(right_sides[:1]).shape[1:]  # (N, K) of this batch
            noise = standard_normal((n, *shape), self.device, generator)
            right_sides += batch.backward(noise)
        return self.solve(right_sides, self.tolerance)


def lower_bounds(solutions: Tensor, vectors: Tensor, residuals: Tensor) -> Tensor:
    """v^T (g + r) of each system, from v, g and r, each (m, P), to (m,)."""
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

    Systems that have converged are taken out of the iteration. A warning is given where some have
    not after `MAX_ITERATIONS`.

    Args:
        product: v -> A v for several v, (m, P) -> (m, P).
        vectors: The right-hand sides g.
        floor: A number s no larger than the smallest eigenvalue of A.
        tolerance: A system has converged where the gap |r|^2 / s falls below this share of
            g^T A^-1 g.
        preconditioner: Approximate inverse of A; None for the identity.

    Raises:
        ValueError: A is not positive definite.

    Examples:
        >>> v = conjugate_gradients(lambda v: 2 * v, torch.ones(1, 3), floor=2.0, tolerance=1e-8)
        >>> v.tolist()
        [[0.5, 0.5, 0.5]]
    """
    if preconditioner is None:
        preconditioner = _identity
    solutions = torch.zeros_like(vectors)
    active = torch.arange(len(vectors), device=vectors.device)  # systems that have not converged
    g = vectors
    v = torch.zeros_like(vectors)
    r = vectors.clone()  # r = g - A v
    z = preconditioner(r)
    p = z  # the search directions
    rz = (r * z).sum(-1)
    for _ in range(MAX_ITERATIONS):
        unconverged = r.square().sum(-1) > tolerance * floor * lower_bounds(v, g, r)
        solutions[active[~unconverged]] = v[~unconverged]
        if not bool(unconverged.any()):
            return solutions
        active = active[unconverged]
        g = g[unconverged]
        v = v[unconverged]
        r = r[unconverged]
        p = p[unconverged]
        rz = rz[unconverged]

        image = product(p)  # A p
        curvatures = (p * image).sum(-1)
        if not bool((curvatures > 0).all()):
            lowest = float((curvatures / p.square().sum(-1)).min())
            raise ValueError(
                f"The Hessian is not positive definite: one direction has curvature {lowest:.3g}. "
                "Pass a larger ridge, or a convex regulariser."
            )
        step = (rz / curvatures)[:, None]
        v = v + step * p
        r = r - step * image
        z = preconditioner(r)
        previous_rz = rz
        rz = (r * z).sum(-1)
        p = z + (rz / previous_rz)[:, None] * p
    solutions[active] = v
    gap = float((r.square().sum(-1) / floor / lower_bounds(v, g, r)).max())
    notify(
        f"Conjugate gradients stopped after {MAX_ITERATIONS} iterations: {len(active)} of "
        f"{len(vectors)} variances may be too small by up to {gap:.1g} (relative), more than the "
        f"tolerance {tolerance:g}. Pass a larger ridge or tolerance, or a model in float64."
    )
    return solutions


def _identity(vectors: Tensor) -> Tensor:
    """The preconditioner that does nothing."""
    return vectors
