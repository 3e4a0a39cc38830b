r"""The shape of one target's distribution: a tilt that follows the head's inputs.

With $u = T_\nu(r/s)$, uniform if the Student-t distribution were true, the density is multiplied by
$e^{\theta \cdot b(u) - A(\theta)}$, $b_j(u) = \sqrt 2 \cos(j \pi u)$, $\theta = c + W \phi$. The
penalised likelihood is convex, but for rows at a bound of the support, whose part is the mass
beyond it. Steps are Newton's for a curvature in which all rows share one covariance of the b, their
mean one: in the eigenbasis of $\phi^\top \phi$ that is one small matrix for each direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...prediction.cosine_tilt import MIDPOINTS, basis, midpoints

LEAST_PENALTY = 30.0
CONSTANT_PENALTY = 4.0
_STEPS, _HALVINGS, _DONE = 60, 12, 1e-6
_CHUNK = 2048
"""Rows whose densities at the nodes are held at once: they fit into the cache of a CPU."""


@dataclass(frozen=True)
class TiltFit:
    r"""The maximum.

    Attributes:
        constant: c, (J,).
        weight: W, (P, J).
        penalty: of each column of W, (J,).
        values: eigenvalues of $\phi^\top \phi$, (P,), of these rows or of nearly the same.
        vectors: its eigenvectors, (P, P).
    """

    constant: Tensor
    weight: Tensor
    penalty: Tensor
    values: Tensor = field(repr=False)
    vectors: Tensor = field(repr=False)

    def __call__(self, inputs: Tensor) -> Tensor:
        """theta, (n, J)."""
        return self.constant + inputs @ self.weight


@dataclass(frozen=True)
class _Loss:
    """The penalised likelihood at one tilt.

    Attributes:
        value: The negative logarithm of it, summed over all rows.
        constant: The gradient of the value by c, (J,).
        weight: The gradient of the value by W, (P, J).
        covariance: The covariance of the b under a row's density, the mean over rows, (J, J).
    """

    value: float
    constant: Tensor
    weight: Tensor
    covariance: Tensor


def fitted(
    u: Tensor,
    inputs: Tensor,
    penalty: Tensor | None = None,
    side: Tensor | None = None,
    *,
    start: TiltFit | None = None,
) -> TiltFit:
    """The tilt of rows with these u (n,), of the untilted distribution, and the head's inputs (n,
    P).

    The penalties (J,) are those of a `start`, the fit to nearly the same rows, from which the
    search then begins; or those given; or those of the greatest evidence of ridge regressions of
    b_j(u). Where a `side` (n,) is -1 or 1 the row shows the mass below or above u.
    """
    b, nodes = basis(u), basis(midpoints(MIDPOINTS, u.device))
    bound = u.new_zeros(0, dtype=torch.long) if side is None else side.nonzero()[:, 0]
    inside = u.new_zeros(0, MIDPOINTS)
    if side is not None and len(bound):
        below = (u[bound, None] * MIDPOINTS - torch.arange(MIDPOINTS).to(u)).clamp(0, 1)
        share = torch.where(side[bound, None] < 0, below, 1 - below)  # of each node's cell
        inside = share.clamp(min=1e-300).log()
        b = b.index_copy(0, bound, torch.softmax(inside, 1) @ nodes)

    fit = start
    if fit is None:
        values, vectors = torch.linalg.eigh(inputs.mT @ inputs)
        values = values.clamp(min=0)
        if penalty is None:
            penalty = _evident(inputs, b, values, vectors)
        weight = u.new_zeros(len(values), len(penalty))
        fit = TiltFit(weight.new_zeros(len(penalty)), weight, penalty, values, vectors)

    chunk = _CHUNK if u.device.type == "cpu" else max(1, len(u))

    def loss(fit: TiltFit) -> _Loss:
        theta = fit(inputs)
        means, likelihood, mass = [], nodes.new_zeros(()), nodes.new_zeros(MIDPOINTS)
        for some in torch.split(theta, chunk):
            raised = some @ nodes.mT  # (rows, 64)
            highest = raised.amax(1, keepdim=True)
            density = (raised - highest).exp_()
            total = density.sum(1, keepdim=True)
            density /= total
            means.append(density @ nodes)
            likelihood += (highest + total.log()).sum()
            mass += density.sum(0)
        mean = torch.cat(means)  # of b, (n, J)
        shown, expected = (theta * b).sum(1), b
        if len(bound):
            part = theta[bound] @ nodes.mT + inside
            shown = shown.index_copy(0, bound, torch.logsumexp(part, 1))
            expected = b.index_copy(0, bound, torch.softmax(part, 1) @ nodes)
        slope = mean - expected
        square = CONSTANT_PENALTY * fit.constant.square().sum()
        square = square + (fit.penalty * fit.weight.square()).sum()
        return _Loss(
            float(likelihood - shown.sum() + 0.5 * square) - len(u) * math.log(MIDPOINTS),
            slope.sum(0) + CONSTANT_PENALTY * fit.constant,
            inputs.mT @ slope + fit.penalty * fit.weight,
            ((nodes.mT * mass) @ nodes - mean.mT @ mean) / len(u),
        )

    here = loss(fit)
    for _ in range(_STEPS):
        constant, weight = _step(here, fit, len(u))
        before = here.value
        for halving in range(_HALVINGS):
            length = 0.5**halving
            moved = fit.constant - length * constant, fit.weight - length * weight
            trial = replace(fit, constant=moved[0], weight=moved[1])
            there = loss(trial)
            if there.value < here.value:
                fit, here = trial, there
                break
        if not before - here.value > _DONE * len(u):
            break
    return fit


def _step(at: _Loss, fit: TiltFit, rows: int) -> tuple[Tensor, Tensor]:
    """Newton's step of constant (J,) and weights (P, J) for the shared covariance of the b."""
    gradient = torch.cat([at.constant[None], fit.vectors.mT @ at.weight])  # (1 + P, J)
    values = torch.cat([fit.values.new_full((1,), float(rows)), fit.values])
    first = torch.full_like(fit.penalty, CONSTANT_PENALTY)
    prior = torch.cat([first[None], fit.penalty.expand(len(fit.values), -1)])
    curvature = values[:, None, None] * at.covariance + torch.diag_embed(prior)
    step = torch.linalg.solve(curvature, gradient)
    return step[0], fit.vectors @ step[1:]


def _evident(inputs: Tensor, b: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Penalties (J,) of the greatest evidence of ridge regressions of b on the inputs."""
    y = b - b.mean(0)
    c = vectors.mT @ (inputs.mT @ y)
    s = 10 ** torch.linspace(0, 5, 26).to(values)
    left = y.square().sum(0) - (c.square() / (values[:, None] + s[:, None, None])).sum(1)
    volume = (values + s[:, None]).log().sum(1) - len(values) * s.log()
    minus_log = 0.5 * len(y) * (left / len(y)).log() + 0.5 * volume[:, None]
    return s[minus_log.argmin(0)].clamp(min=LEAST_PENALTY)
