r"""The shape of one target's law: a tilt that follows the head's inputs.

With $u = T_\nu(r/s)$, uniform if the Student-t law were true, the density is multiplied by
$e^{\theta \cdot b(u) - A(\theta)}$, $b_j(u) = \sqrt 2 \cos(j \pi u)$, $\theta = c + W \phi$. The
penalised likelihood is convex, but for rows at a bound of the support, whose part is the mass
beyond it. The b are orthonormal under the uniform law, so its curvature is
about $\phi^\top \phi$ plus the penalty for each j: steps by that are nearly Newton's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..prediction.cosine_tilt import MIDPOINTS, basis, midpoints

LEAST_PENALTY = 30.0
CONSTANT_PENALTY = 4.0
_STEPS, _HALVINGS, _DONE = 60, 12, 1e-7


@dataclass(frozen=True)
class TiltFit:
    """The maximum: c (J,), W (P, J), and the penalty of each column of W, (J,)."""

    constant: Tensor
    weight: Tensor
    penalty: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        """theta, (n, J)."""
        return self.constant + inputs @ self.weight


def fitted(
    u: Tensor, inputs: Tensor, penalty: Tensor | None = None, side: Tensor | None = None
) -> TiltFit:
    """The tilt of rows with these u (n,), of the untilted law, and the head's inputs (n, P).

    The penalties (J,) are by default those of the greatest evidence of ridge regressions of b_j(u).
    Where a `side` (n,) is -1 or 1 the row shows the mass below or above u.
    """
    b, nodes = basis(u), basis(midpoints(MIDPOINTS, u.device))
    bound = u.new_zeros(0, dtype=torch.long) if side is None else side.nonzero()[:, 0]
    inside = u.new_zeros(0, MIDPOINTS)
    if side is not None and len(bound):
        below = (u[bound, None] * MIDPOINTS - torch.arange(MIDPOINTS).to(u)).clamp(0, 1)
        share = torch.where(side[bound, None] < 0, below, 1 - below)  # of each node's cell
        inside = share.clamp(min=1e-300).log()
        b = b.index_copy(0, bound, torch.softmax(inside, 1) @ nodes)
    values, vectors = torch.linalg.eigh(inputs.mT @ inputs)
    values = values.clamp(min=0)
    penalty = _evident(inputs, b, values, vectors) if penalty is None else penalty
    x = torch.cat([torch.ones_like(u)[:, None], inputs @ vectors], 1)  # uncorrelated columns
    first = torch.full_like(penalty, CONSTANT_PENALTY)
    prior = torch.cat([first[None], penalty.expand(len(values), -1)])
    curvature = torch.cat([values.new_full((1,), float(len(u))), values])[:, None] + prior
    weight = torch.zeros_like(prior)

    def objective(weight: Tensor) -> tuple[float, Tensor]:
        theta = x @ weight
        density = theta @ nodes.mT
        shown, expected = (theta * b).sum(1), b
        if len(bound):
            part = density[bound] + inside
            shown = shown.index_copy(0, bound, torch.logsumexp(part, 1))
            expected = b.index_copy(0, bound, torch.softmax(part, 1) @ nodes)
        likelihood = torch.logsumexp(density, 1) - math.log(MIDPOINTS) - shown
        slope = torch.softmax(density, 1) @ nodes - expected
        loss = float(likelihood.sum() + 0.5 * (prior * weight.square()).sum())
        return loss, x.mT @ slope + prior * weight

    value, gradient = objective(weight)
    for _ in range(_STEPS):
        step, before = gradient / curvature, value
        for halving in range(_HALVINGS):
            trial = weight - step * 0.5**halving
            new, slope = objective(trial)
            if new < value:
                weight, value, gradient = trial, new, slope
                break
        if not before - value > _DONE * len(u):
            break
    return TiltFit(weight[0], vectors @ weight[1:], penalty)


def _evident(inputs: Tensor, b: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Penalties (J,) of the greatest evidence of ridge regressions of b on the inputs."""
    y = b - b.mean(0)
    c = vectors.mT @ (inputs.mT @ y)
    s = 10 ** torch.linspace(0, 5, 26).to(values)
    left = y.square().sum(0) - (c.square() / (values[:, None] + s[:, None, None])).sum(1)
    volume = (values + s[:, None]).log().sum(1) - len(values) * s.log()
    minus_log = 0.5 * len(y) * (left / len(y)).log() + 0.5 * volume[:, None]
    return s[minus_log.argmin(0)].clamp(min=LEAST_PENALTY)
