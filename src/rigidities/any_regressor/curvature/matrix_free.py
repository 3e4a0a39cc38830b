r"""The matrix-free form of a rigidity: conjugate gradients on Gauss-Newton products.

Each prediction's $v = A^{-1} g$, $A = J^\top J + R + s I$, is found by preconditioned conjugate
gradients, and A is never formed. For any v with residual $r = g - A v$ and error $e = A^{-1} g - v$

$$ g^\top A^{-1} g = v^\top (g + r) + e^\top A e, \qquad
   0 \le e^\top A e = r^\top A^{-1} r \le |r|^2 / s \quad \text{where } A \succeq s I, $$

so that $v^\top (g + r)$ is a lower bound on q with a known gap, however rounding has affected the
iteration. The relative gap is below the stated tolerance.

The preconditioner is the dual form of m evenly spaced samples of the N, with the ridge s m/N: up to
a factor the inverse of the same matrix without R. It removes the large eigenvalues that slow the
iteration down, and saves half to five sixths of the passes over the data (`benchmarks whole-net`).

Products with J come from stored tangents, or from tangents that every pass over the data computes
again (`RecomputedTangents`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.samples import SampleBatch
from ...notices import notify
from ...posterior.draws import standard_normal
from ..derivatives.differentiation import Differentiation
from ..derivatives.tangents import Tangents
from .forms import Form

MAX_ITERATIONS = 500
"""Iterations of conjugate gradients, at most."""

SMALLEST_TOLERANCE = 1e-12
"""The smallest relative gap that can be reached in spite of rounding."""

Product = Callable[[Tensor], Tensor]
"""A matrix, given by its products with several vectors, (m, P) -> (m, P)."""


@dataclass(frozen=True)
class RecomputedTangents:
    """The weighted tangents of the training data, which every iteration computes again.

    Attributes:
        differentiation: How to differentiate the regressor.
        batches: The samples, each batch with the root of its weights, (N, K) or (N, K, K); None
            for ones.
    """

    differentiation: Differentiation
    batches: list[tuple[SampleBatch, Tensor | None]]

    def __iter__(self) -> Iterator[Tangents]:
        for batch, root in self.batches:
            _, tangents = self.differentiation(*batch.args, **batch.kwargs)
            yield tangents if root is None else tangents.mixed(root)


@dataclass(frozen=True)
class MatrixFreeForm(Form):
    """The training rows by their products, and the linear systems A v = g with them.

    Attributes:
        rows: The weighted tangents of the training data, batch by batch.
        ridge: The ridge s.
        tolerance: Relative error allowed in q.
        width: Number of parameters P.
        device: Device of the vectors.
        penalty: Product with the regulariser's Hessian, or None.
        preconditioner: Product with an approximate inverse of A, or None.
        together: Number of systems that are solved at once.
    """

    rows: Iterable[Tangents]
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
        for tangents in self.rows:
            result += tangents.backward(tangents.forward(vectors))
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
        for tangents in self.rows:
            samples, outputs, _ = tangents.shape
            # Sample by sample, so that draws do not depend on the batches.
            noise = standard_normal((samples, n, outputs), self.device, generator)
            right_sides += tangents.backward(noise.transpose(0, 1))
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
