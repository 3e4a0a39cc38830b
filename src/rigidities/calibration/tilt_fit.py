r"""The shape of one target's distribution: a tilt that follows the head's inputs.

With $u = T_\nu(r/s)$, uniform if the Student-t distribution were true, the density is multiplied by
$e^{\theta \cdot b(u) - A(\theta)}$, $b_j(u) = \sqrt 2 \cos(j \pi u)$, $\theta = c + W \phi$. The
negative log of the penalised likelihood is convex, except for rows at a bound of the support, which
contribute the mass beyond it. Newton steps use an approximate curvature, in which all rows share
the mean of their covariances of b: in the eigenbasis of $\phi^\top \phi$ that is one small matrix
for each direction.

Data flow: `TiltProblem` holds what the rows show and gives the loss of a tilt;
`fitted_tilt` takes the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..prediction.cosine_tilt import MIDPOINTS, basis, midpoints

LEAST_PENALTY = 30.0
"""The least penalty of a column of W."""
CONSTANT_PENALTY = 4.0
"""The penalty of c."""
_STEPS = 60
_HALVINGS = 12
_DONE = 1e-6
"""Nats per row that a step must gain for another one to follow."""
_CHUNK = 2048
"""Rows whose densities at the nodes are held at once: they fit into the cache of a CPU."""


@dataclass(frozen=True)
class TiltFit:
    r"""A tilt with its penalties.

    Attributes:
        constant: c, (J,).
        weight: W, (P, J).
        penalty: The penalty of each column of W, (J,).
        values: Eigenvalues of $\phi^\top \phi$, (P,), of these rows or of nearly the same.
        vectors: Its eigenvectors, (P, P).
    """

    constant: Tensor
    weight: Tensor
    penalty: Tensor
    values: Tensor = field(repr=False)
    vectors: Tensor = field(repr=False)

    def __call__(self, inputs: Tensor) -> Tensor:
        """theta of rows with these inputs (n, P), (n, J)."""
        return self.constant + inputs @ self.weight


@dataclass(frozen=True)
class TiltLoss:
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


@dataclass(frozen=True)
class TiltProblem:
    """What the rows show of a tilt.

    Attributes:
        inputs: The head's inputs, (n, P).
        shown: b(u) of each row, (n, J); for a row at a bound, the mean of b over the mass beyond.
        nodes: b at the midpoints of the unit interval, (64, J).
        bound: The places of rows at a bound of the support, (B,).
        log_share: For each of those, the logarithm of the share of each node's cell that lies
            beyond the bound, (B, 64).
    """

    inputs: Tensor
    shown: Tensor
    nodes: Tensor
    bound: Tensor
    log_share: Tensor

    @classmethod
    def of(cls, u: Tensor, inputs: Tensor, side: Tensor | None) -> TiltProblem:
        """The problem of rows with these u (n,), inputs (n, P) and sides (n,)."""
        shown = basis(u)
        nodes = basis(midpoints(MIDPOINTS, u.device))
        if side is None:
            bound = u.new_zeros(0, dtype=torch.long)
        else:
            bound = side.nonzero()[:, 0]
        log_share = u.new_zeros(0, MIDPOINTS)
        if side is not None and len(bound):
            below = (u[bound, None] * MIDPOINTS - torch.arange(MIDPOINTS).to(u)).clamp(0, 1)
            share = torch.where(side[bound, None] < 0, below, 1 - below)
            log_share = share.clamp(min=1e-300).log()
            shown = shown.index_copy(0, bound, torch.softmax(log_share, 1) @ nodes)
        return cls(inputs, shown, nodes, bound, log_share)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.inputs)

    def start(self, penalty: Tensor | None) -> TiltFit:
        """No tilt, with these penalties (J,) or those of the greatest evidence."""
        values, vectors = torch.linalg.eigh(self.inputs.mT @ self.inputs)
        values = values.clamp(min=0)
        if penalty is None:
            penalty = _evident_penalties(self.inputs, self.shown, values, vectors)
        weight = self.inputs.new_zeros(len(values), len(penalty))
        constant = weight.new_zeros(len(penalty))
        return TiltFit(constant, weight, penalty, values, vectors)

    def loss(self, fit: TiltFit) -> TiltLoss:
        """The penalised likelihood and its derivatives at a tilt."""
        theta = fit(self.inputs)
        log_normalisers, mean, mass = self._moments(theta)
        log_tilt = (theta * self.shown).sum(1)
        shown = self.shown
        if len(self.bound):
            # the mass beyond the bound, and the mean of b over it
            log_cells = theta[self.bound] @ self.nodes.mT + self.log_share
            log_tilt = log_tilt.index_copy(0, self.bound, torch.logsumexp(log_cells, 1))
            shown = shown.index_copy(0, self.bound, torch.softmax(log_cells, 1) @ self.nodes)
        slope = mean - shown  # of the rows' losses by theta, (n, J)
        prior = CONSTANT_PENALTY * fit.constant.square().sum()
        prior = prior + (fit.penalty * fit.weight.square()).sum()
        # The normalisers are sums over the midpoints, not means.
        value = float(log_normalisers - log_tilt.sum() + 0.5 * prior)
        value -= self.rows * math.log(MIDPOINTS)
        second_moment = (self.nodes.mT * mass) @ self.nodes
        return TiltLoss(
            value=value,
            constant=slope.sum(0) + CONSTANT_PENALTY * fit.constant,
            weight=self.inputs.mT @ slope + fit.penalty * fit.weight,
            covariance=(second_moment - mean.mT @ mean) / self.rows,
        )

    def _moments(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the densities of tilts theta (n, J) integrate to, by the midpoint rule.

        Returns:
            The sum of the logarithms of the rows' normalisers; the mean of b under each row's
            density, (n, J); the sum of the rows' probabilities at each node, (64,).
        """
        chunk = _CHUNK if theta.device.type == "cpu" else max(1, len(theta))
        means = []
        log_normalisers = self.nodes.new_zeros(())
        mass = self.nodes.new_zeros(MIDPOINTS)
        for some_theta in torch.split(theta, chunk):
            exponents = some_theta @ self.nodes.mT  # (rows, 64)
            highest = exponents.amax(1, keepdim=True)
            density = (exponents - highest).exp_()
            total = density.sum(1, keepdim=True)
            density /= total
            means.append(density @ self.nodes)
            log_normalisers += (highest + total.log()).sum()
            mass += density.sum(0)
        return log_normalisers, torch.cat(means), mass


def fitted_tilt(
    u: Tensor,
    inputs: Tensor,
    penalty: Tensor | None = None,
    side: Tensor | None = None,
    *,
    start: TiltFit | None = None,
) -> TiltFit:
    """The likeliest tilt.

    Args:
        u: The rows' probabilities under the untilted distribution, (n,).
        inputs: The head's inputs, (n, P).
        penalty: The penalties, (J,); None takes those of the greatest evidence of ridge regressions
            of b_j(u). With a `start`, its penalties are taken instead.
        side: -1 or 1 for rows that show the mass below or above u; 0 for others, (n,).
        start: A fit to nearly the same rows, at which the search begins.
    """
    problem = TiltProblem.of(u, inputs, side)
    fit = problem.start(penalty) if start is None else start
    loss = problem.loss(fit)
    for _ in range(_STEPS):
        constant_step, weight_step = _newton_step(loss, fit, problem.rows)
        value_before = loss.value
        for halving in range(_HALVINGS):
            length = 0.5**halving
            trial = replace(
                fit,
                constant=fit.constant - length * constant_step,
                weight=fit.weight - length * weight_step,
            )
            trial_loss = problem.loss(trial)
            if trial_loss.value < loss.value:
                fit = trial
                loss = trial_loss
                break
        if not value_before - loss.value > _DONE * problem.rows:
            break
    return fit


def _newton_step(loss: TiltLoss, fit: TiltFit, rows: int) -> tuple[Tensor, Tensor]:
    """Newton's step of constant (J,) and weights (P, J) for the shared covariance of the b."""
    # In the eigenbasis of the inputs, the constant first: one J x J system for each direction.
    gradient = torch.cat([loss.constant[None], fit.vectors.mT @ loss.weight])  # (1 + P, J)
    values = torch.cat([fit.values.new_full((1,), float(rows)), fit.values])
    constant_prior = torch.full_like(fit.penalty, CONSTANT_PENALTY)
    prior = torch.cat([constant_prior[None], fit.penalty.expand(len(fit.values), -1)])
    curvature = values[:, None, None] * loss.covariance + torch.diag_embed(prior)
    step = torch.linalg.solve(curvature, gradient)
    return step[0], fit.vectors @ step[1:]


def _evident_penalties(inputs: Tensor, b: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Penalties (J,) of the greatest evidence of ridge regressions of b (n, J) on the inputs.

    Eigenvalues and eigenvectors are those of the inputs' Gram.
    """
    y = b - b.mean(0)
    c = vectors.mT @ (inputs.mT @ y)
    penalties = 10 ** torch.linspace(0, 5, 26).to(values)  # (S,)
    explained = (c.square() / (values[:, None] + penalties[:, None, None])).sum(1)  # (S, J)
    unexplained = y.square().sum(0) - explained
    log_volume = (values + penalties[:, None]).log().sum(1) - len(values) * penalties.log()
    minus_log = 0.5 * len(y) * (unexplained / len(y)).log() + 0.5 * log_volume[:, None]
    return penalties[minus_log.argmin(0)].clamp(min=LEAST_PENALTY)
