r"""Conjugate gradients for several systems $A v = g$ at once, with a bound on $g^\top A^{-1} g$.

For any v with residual $r = g - A v$ and error $e = A^{-1} g - v$

$$ g^\top A^{-1} g = v^\top (g + r) + e^\top A e, \qquad
   0 \le e^\top A e = r^\top A^{-1} r \le |r|^2 / s \quad \text{where } A \succeq s I, $$

so that $v^\top (g + r)$ is a lower bound whose gap is known, whatever rounding did to the
iteration.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

MAX_ITERATIONS = 500

Product = Callable[[Tensor], Tensor]


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
