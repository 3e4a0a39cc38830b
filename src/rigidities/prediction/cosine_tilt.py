r"""Densities on the unit interval that are exponentials of cosines.

$p(u) = \exp(\theta \cdot b(u) - A(\theta))$ with $b_j(u) = \sqrt 2 \cos(j \pi u)$, j = 1 ... 8.
Integrals of p run over panels that shrink towards both ends, so that what a law with heavy tails
multiplies it by is resolved, and small probabilities keep their digits. A place u is named by its
signed distance from the nearer end: -u in the lower half, 1 - u in the upper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .quadrature import gauss

TERMS, MIDPOINTS = 8, 62
"""Cosines; and nodes of the moments, beside the two ends."""

_NODES, F64 = 8, torch.float64


def basis(u: Tensor) -> Tensor:
    r"""$\sqrt 2 \cos(j \pi u)$, (..., 8)."""
    j = torch.arange(1, TERMS + 1, dtype=u.dtype, device=u.device)
    return math.sqrt(2) * (math.pi * u[..., None] * j).cos()


def mirrored(tilt: Tensor) -> Tensor:
    """The tilt of 1 - u."""
    return tilt * tilt.new_tensor([-1.0, 1.0]).repeat(TERMS // 2)


@lru_cache(maxsize=1)
def half() -> tuple[Tensor, Tensor, Tensor]:
    """The lower half's edges, nodes and weights: even panels, then ever smaller ones to 0."""
    small = [*range(-62, -30, 4), *range(-30, -14, 2), *range(-14, -6)]
    even = torch.arange(1, 33, dtype=F64) / 64
    edges = torch.cat([torch.zeros(1), 2.0 ** torch.tensor(small, dtype=F64), even])
    length, (x, w) = edges.diff()[:, None], gauss(_NODES)
    return edges, edges[:-1, None] + length * x, length * w


@lru_cache(maxsize=8)
def _grid(device: torch.device) -> tuple[Tensor, ...]:
    """Edges of the lower half; of all panels, lengths, weights and basis; and what integrates.

    The last takes values at a panel's nodes to the powers of y in [-1, 1] of their integral from
    its start, with the panel as the unit of length.
    """
    (edges, nodes, weights), y = half(), 2 * gauss(_NODES)[0] - 1
    lower, power = basis(nodes), torch.arange(_NODES)
    terms = torch.linalg.inv(y[:, None] ** power) / (2 * power[:, None] + 2)
    start = ((-1.0) ** power[:, None] * terms).sum(0, keepdim=True)
    both = (
        torch.cat([edges.diff(), edges.diff().flip(0)]),
        torch.cat([weights, weights.flip((0, 1))]),
    )
    tilted = torch.cat([lower, mirrored(lower).flip((0, 1))])
    return tuple(p.to(device) for p in (edges, *both, tilted, torch.cat([start, terms]).mT))


def _horner(coefficients: Tensor, y: Tensor) -> Tensor:
    """The polynomial with these coefficients (..., n), lowest first, at y (...)."""
    value = coefficients[..., -1]
    for k in range(coefficients.shape[-1] - 2, -1, -1):
        value = value * y + coefficients[..., k]
    return value


@dataclass(frozen=True)
class CosineTilt:
    """The densities of R tilts.

    Attributes:
        tilt: (R, 8), float64.
    """

    tilt: Tensor

    def log_density(self, u: Tensor) -> Tensor:
        """At u (R, E); normalised by a midpoint rule, exact for 511 cosines."""
        middle = (torch.arange(256, device=u.device) + 0.5).to(u) / 256
        normaliser = (self.tilt @ basis(middle).mT).logsumexp(-1) - math.log(256)
        return (basis(u) @ self.tilt[..., None])[..., 0] - normaliser[:, None]

    @cached_property
    def density(self) -> Tensor:
        """At the nodes, (R, panels, 8)."""
        _, _, weights, at, _ = _grid(self.tilt.device)
        raised = torch.einsum("rj,pnj->rpn", self.tilt, at)
        raised = (raised - raised.amax((1, 2), keepdim=True)).exp()
        return raised / (raised * weights).sum((1, 2), keepdim=True)

    def totals(self, values: Tensor) -> Tensor:
        """Integrals of values at the nodes (R, panels, 8) from 0 to each edge."""
        mass = (values * _grid(values.device)[2]).sum(-1)
        return torch.nn.functional.pad(mass.cumsum(-1), (1, 0))

    @cached_property
    def cdf_at_nodes(self) -> Tensor:
        """The distribution function at the nodes, (R, panels, 8)."""
        _, length, _, _, powers = _grid(self.tilt.device)
        y = 2 * gauss(_NODES)[0].to(self.tilt) - 1
        to_node = powers @ (y ** torch.arange(_NODES + 1).to(y)[:, None])
        return self.totals(self.density)[:, :-1, None] + self.density @ to_node * length[:, None]

    def integral(self, values: Tensor, place: Tensor) -> Tensor:
        """Of values at the nodes (R, panels, 8) from 0 to places (R, E)."""
        edges, length, _, _, powers = _grid(values.device)
        panel = torch.searchsorted(edges, place.abs(), right=True) - 1
        panel = panel.clamp(0, len(edges) - 2)
        y = 2 * (place.abs() - edges[panel]) / length[panel] - 1
        upper = ~torch.signbit(place)
        panel, y = torch.where(upper, len(length) - 1 - panel, panel), torch.where(upper, -y, y)
        inside = _horner(values.take_along_dim(panel[..., None], 1) @ powers, y)
        return self.totals(values).gather(1, panel) + length[panel] * inside

    def cdf(self, place: Tensor) -> Tensor:
        """Probability below places (R, E)."""
        return self.integral(self.density, place).clamp(0, 1)

    def quantile(self, level: Tensor) -> Tensor:
        """The places (R, E) with these probabilities below them.

        Newton's steps in the panel that holds it, and bisection where they leave the bracket.
        """
        edges, length, _, _, powers = _grid(level.device)
        cumulative = self.totals(self.density)
        panel = torch.searchsorted(cumulative, level.contiguous(), right=True) - 1
        panel = panel.clamp(0, len(length) - 1)
        left = (level - cumulative.gather(1, panel)) / length[panel]
        terms = self.density.take_along_dim(panel[..., None], 1) @ powers
        slopes = terms[..., 1:] * torch.arange(1, _NODES + 1).to(terms)
        low, high = torch.full_like(left, -1), torch.ones_like(left)
        y = (left / terms[..., 1::2].sum(-1) - 1).clamp(-1, 1)
        for _ in range(60):
            value = _horner(terms, y) - left
            low, high = torch.where(value < 0, y, low), torch.where(value < 0, high, y)
            last, step = y, y - value / _horner(slopes, y)
            y = torch.where((step >= low) & (step <= high), step, (low + high) / 2)
            if not bool(((y - last).abs() > 1e-10).any()):
                break
        upper = panel >= len(length) // 2
        start = edges[torch.where(upper, len(length) - 1 - panel, panel)]
        place = (
            torch.where(upper, 1, -1) * start + length[panel] * (torch.where(upper, 1, -1) - y) / 2
        )
        return torch.where((level > 0) & (level < 1), place, (level - 0.5) * 0)


@lru_cache(maxsize=1)
def moment_nodes() -> Tensor:
    """Where the moments take the density: 62 midpoints, then the ends 0 and 1."""
    u = (torch.arange(MIDPOINTS, dtype=F64) + 0.5) / MIDPOINTS
    return torch.cat([u, torch.arange(2)])


def moment_weights(values: Tensor, total: Tensor, parity: int) -> Tensor:
    r"""Weights of $\int_0^1 g(u)\, p(u)\, du$ at `moment_nodes`, (..., 64).

    g may be singular at the ends: p is split into $(p_0 + p_1)/2 + (p_0 - p_1)/2 \cos \pi u$,
    through its ends, and $\sin^2(\pi u)\, r(u)$. Exact for every p in the span of 64 cosines.

    Args:
        values: of g at the nodes of the lower half, (..., panels, 8).
        total: the integral of g over the lower half, (...).
        parity: 1 for a g that is even about 1/2, -1 for an odd one.
    """
    _, nodes, weights = half()
    u, m, pi = moment_nodes()[:MIDPOINTS], torch.arange(MIDPOINTS, dtype=F64), math.pi
    damped = values * weights * (pi * nodes).sin().square()
    series = torch.einsum("...pn,pnm->...m", damped, (pi * nodes[..., None] * m).cos())
    series = series * (1 + parity * (-1.0) ** m) * torch.where(m > 0, 2, 1)
    inner = series @ (pi * m[:, None] * u).cos() / MIDPOINTS / (pi * u).sin().square()
    bent = (values * weights * 2 * (pi * nodes / 2).sin().square()).sum((-2, -1))  # of 1 - cosine
    even, odd = (1 + parity) * total, (1 - parity) * (total - bent)
    shares = [(1 + s * (pi * u).cos()) / 2 for s in (1, -1)]
    ends = [(even + s * odd) / 2 - inner @ part for s, part in zip((1, -1), shares, strict=True)]
    return torch.cat([inner, torch.stack(ends, -1)], -1)
