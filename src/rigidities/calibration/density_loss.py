r"""The likelihood of errors under mixtures whose parameters follow the row, with its derivatives.

A row's error is $r = s z$ with the squared scale $s^2 = c\, e^h + \alpha^2 q$, where c is the
factor of its noise, and z follows a mixture of Student-t distributions with four degrees of
freedom. The outputs $o = (h, l, m, b)$ of a row give the noise, and the logits, offsets and
log-widths of the J components, $t_j = (r / s - m_j) e^{-b_j}$. A row inside of its support has the
density

$$ \frac1s \sum_j \pi_j e^{-b_j} f(t_j), \qquad f(t) = \tfrac38 (1 + t^2/4)^{-5/2} , $$

and a row at a bound shows the mass beyond it, $\sum_j \pi_j F(\pm t_j)$ (a censored likelihood).

The derivatives are written out. They are those of a mixture: with the responsibilities $w_j$ of
the components, the logarithm of each component's term counts $w_j$ times.

Shapes: n rows, J components, O = 1 + 3 J outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..prediction.head import NARROWEST, WIDEST

LEAST_MASS = 1e-30
"""Masses beyond a bound below this count as this: their logarithms stay finite in float32."""
LARGEST_H = 30.0
"""h is clipped to plus and minus this, so that its exponential stays finite."""


@dataclass(frozen=True)
class Errors:
    """Errors of n rows, and what their scale depends on beside the head's outputs.

    Attributes:
        residual: Target minus prediction, (n,).
        q: Unscaled variances, (n,).
        noise_factor: What a unit of noise adds to the row's variance, (n,).
        log_factor: Logarithm of a factor of the squared scale, (n,); the optimism of rows that were
            trained on.
        side: -1 or 1 where the target lies at the lower or the upper bound of its support, so that
            the mass beyond is what the row shows; 0 elsewhere, (n,). None where no row does.
    """

    residual: Tensor
    q: Tensor
    noise_factor: Tensor
    log_factor: Tensor
    side: Tensor | None = None

    def __len__(self) -> int:
        return len(self.residual)

    def __getitem__(self, which: Tensor) -> Errors:
        """Some of the rows, by booleans (n,) or by numbers."""
        return Errors(
            residual=self.residual[which],
            q=self.q[which],
            noise_factor=self.noise_factor[which],
            log_factor=self.log_factor[which],
            side=None if self.side is None else self.side[which],
        )

    def to(self, dtype: torch.dtype) -> Errors:
        """The same in another precision."""
        return Errors(
            residual=self.residual.to(dtype),
            q=self.q.to(dtype),
            noise_factor=self.noise_factor.to(dtype),
            log_factor=self.log_factor.to(dtype),
            side=None if self.side is None else self.side.to(dtype),
        )

    def with_log_factor(self, log_factor: Tensor | float) -> Errors:
        """The same rows with another factor of their squared scales."""
        factors = torch.as_tensor(log_factor).to(self.residual).expand_as(self.residual)
        return Errors(self.residual, self.q, self.noise_factor, factors, self.side)

    def raised(self, level: float) -> Errors:
        """The same rows with squared scales that are larger by the factor e^level."""
        return self.with_log_factor(self.log_factor + level)


@dataclass(frozen=True)
class Loss:
    r"""The negative log-likelihoods of rows, and their derivatives.

    Attributes:
        value: The negative log-likelihoods, (n,).
        by_output: Derivatives by the outputs, (n, O).
        by_log_variance: Derivatives by the logarithm of the squared scale, (n,).
        by_log_scale2: Derivatives by the logarithm of $\alpha^2$, (n,).
    """

    value: Tensor
    by_output: Tensor
    by_log_variance: Tensor
    by_log_scale2: Tensor


def mixture_loss(outputs: Tensor, log_scale2: Tensor, errors: Errors) -> Loss:
    r"""The negative log-likelihoods of rows, with their derivatives.

    Args:
        outputs: Outputs of the head, (n, O): h, then logits, offsets and log-widths.
        log_scale2: $\log \alpha^2$, (), (1,) or (n,).
        errors: The rows.
    """
    # Rows last: operations over a few components are then operations on long vectors.
    transposed = outputs.mT.contiguous()
    h, shape = transposed[0], transposed[1:]
    logit, offset, free_log_width = shape.chunk(3)  # (J, n) each
    log_width = free_log_width.clamp(NARROWEST, WIDEST)

    noise = h.clamp(-LARGEST_H, LARGEST_H).exp() * errors.noise_factor
    epistemic = log_scale2.exp() * errors.q
    variance = noise + epistemic
    log_variance = variance.log() + errors.log_factor
    z = errors.residual * (-0.5 * log_variance).exp()
    narrowness = (-log_width).exp()
    t = (z - offset) * narrowness  # (J, n)

    log_term, slope = _log_density(t)  # logarithm of f, or of F at a bound, and its derivative by t
    inside: Tensor | float = 1.0
    if errors.side is not None:
        at_bound = errors.side.nonzero()[:, 0]
        log_mass, mass_slope = _log_mass(t[:, at_bound], errors.side[at_bound])
        log_term = log_term.index_copy(1, at_bound, log_mass)
        slope = slope.index_copy(1, at_bound, mass_slope)
        inside = (errors.side == 0).to(t)  # rows at a bound have no factor 1 / width

    log_share = logit.log_softmax(0)
    joint = log_share + log_term - log_width * inside
    largest = joint.amax(0)
    relative = (joint - largest).exp()
    relative_sum = relative.sum(0)
    total = largest + relative_sum.log()
    responsibility = relative / relative_sum

    by_t = -responsibility * slope
    by_logit = log_share.exp() - responsibility
    by_offset = -by_t * narrowness
    by_log_width = responsibility * inside - by_t * t
    by_log_width = by_log_width * (log_width == free_log_width)  # none where it is clipped
    by_log_variance = 0.5 * (inside + by_offset.sum(0) * z)
    by_h = by_log_variance * noise / variance
    return Loss(
        value=0.5 * inside * log_variance - total,
        by_output=torch.cat([by_h[None], by_logit, by_offset, by_log_width]).mT,
        by_log_variance=by_log_variance,
        by_log_scale2=by_log_variance * epistemic / variance,
    )


def _log_density(t: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of f, and its derivative."""
    square = t.square()
    return math.log(3 / 8) - 2.5 * torch.log1p(square / 4), -5 * t / (4 + square)


def _log_mass(t: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the mass below t (side -1) or above it (side 1), and its derivative."""
    inward = -side * t
    root = (4 + inward.square()).sqrt()
    # 1 + k for k = t / root; below zero by a quotient that keeps its digits.
    share = torch.where(inward < 0, 4 / (root * (root - inward)), 1 + inward / root)
    mass = (share.square() * (3 - share) / 4).clamp(min=LEAST_MASS)
    density = 12 / root.pow(5)
    return mass.log(), -side * density / mass
