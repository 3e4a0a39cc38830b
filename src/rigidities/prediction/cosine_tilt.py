r"""Densities on the unit interval that are exponentials of cosines.

$p(u) = \exp(\theta \cdot b(u) - A(\theta))$ with $b_j(u) = \sqrt 2 \cos(j \pi u)$, j = 1 ... 8.
Integrals of p run over panels that shrink by halves towards both ends, so that what a law with
heavy tails multiplies it by is resolved, and small probabilities keep their digits. A place u is
named by its signed distance from the nearer end: -u in the lower half, 1 - u in the upper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .quadrature import gauss

TERMS = 8
MIDPOINTS = 62
"""Nodes of the moments, beside the two ends."""

_NODES = 8
_SIGNS = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(TERMS // 2)


def basis(u: Tensor) -> Tensor:
    r"""$\sqrt 2 \cos(j \pi u)$, (..., 8)."""
    j = torch.arange(1, TERMS + 1, dtype=u.dtype, device=u.device)
    return math.sqrt(2) * (math.pi * u[..., None] * j).cos()


def mirrored(tilt: Tensor) -> Tensor:
    """The tilt of 1 - u."""
    return tilt * _SIGNS.to(tilt)


@lru_cache(maxsize=4)
def half_edges() -> Tensor:
    """Edges of the panels of the lower half: even, then ever smaller ones towards the end."""
    exponents = [*range(-62, -30, 4), *range(-30, -14, 2), *range(-14, -6)]
    small = 2.0 ** torch.tensor(exponents, dtype=torch.float64)
    even = torch.arange(1, 33, dtype=torch.float64) / 64
    return torch.cat([torch.zeros(1, dtype=torch.float64), small, even])


@lru_cache(maxsize=4)
def half_nodes() -> tuple[Tensor, Tensor]:
    """Nodes and weights of the lower half, (panels, 8) each."""
    edges, (x, w) = half_edges(), gauss(_NODES)
    length = edges.diff()[:, None]
    return edges[:-1, None] + length * x, length * w


@lru_cache(maxsize=8)
def _grid(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Edges of the lower half, panels' lengths, basis at all nodes, and what integrates."""
    edges, nodes = half_edges(), half_nodes()[0]
    lower = basis(nodes)
    upper = mirrored(lower).flip((0, 1))
    length = edges.diff()
    y = 2 * gauss(_NODES)[0] - 1
    powers = torch.arange(_NODES, dtype=torch.float64)
    inverse = torch.linalg.inv(y[:, None] ** powers)  # node values -> powers of y
    integral = torch.zeros(_NODES + 1, _NODES, dtype=torch.float64)
    integral[1:] = inverse / (2 * (powers + 1))[:, None]  # over the panel as the unit of length
    integral[0] = -(((-1.0) ** torch.arange(1, _NODES + 1))[:, None] * integral[1:]).sum(0)
    both = (edges, torch.cat([length, length.flip(0)]), torch.cat([lower, upper]), integral)
    return tuple(part.to(device) for part in both)  # type: ignore[return-value]


def _horner(coefficients: Tensor, y: Tensor) -> Tensor:
    """The polynomial with these coefficients (..., n), lowest first, at y (...)."""
    value = coefficients[..., -1]
    for k in range(coefficients.shape[-1] - 2, -1, -1):
        value = value * y + coefficients[..., k]
    return value


def log_normaliser(tilt: Tensor) -> Tensor:
    r"""$A(\theta) = \log \int_0^1 e^{\theta \cdot b}$: a midpoint rule, exact for 511 cosines."""
    u = (torch.arange(256, dtype=tilt.dtype, device=tilt.device) + 0.5) / 256
    return (tilt @ basis(u).mT).logsumexp(-1) - math.log(256)


@dataclass(frozen=True)
class CosineTilt:
    """The densities of R tilts.

    Attributes:
        tilt: (R, 8), float64.
    """

    tilt: Tensor

    @cached_property
    def density(self) -> Tensor:
        """At the nodes, (R, panels, 8)."""
        _, length, at, _ = _grid(self.tilt.device)
        raised = torch.einsum("rj,pnj->rpn", self.tilt, at)
        raised = (raised - raised.amax((1, 2), keepdim=True)).exp()
        mass = raised @ gauss(_NODES)[1].to(raised) @ length
        return raised / mass[:, None, None]

    def totals(self, values: Tensor) -> Tensor:
        """Integrals of values at the nodes from 0 to each edge, (R, panels + 1)."""
        mass = values @ gauss(_NODES)[1].to(values) * _grid(values.device)[1]
        return torch.nn.functional.pad(mass.cumsum(-1), (1, 0))

    @cached_property
    def cumulative(self) -> Tensor:
        """The distribution function at the edges."""
        return self.totals(self.density)

    @cached_property
    def cdf_at_nodes(self) -> Tensor:
        """The distribution function at the nodes, (R, panels, 8)."""
        _, length, _, integral = _grid(self.tilt.device)
        y = 2 * gauss(_NODES)[0].to(self.tilt) - 1
        powers = torch.stack([y**k for k in range(_NODES + 1)])
        inside = self.density @ (integral.mT @ powers) * length[:, None]
        return self.cumulative[:, :-1, None] + inside

    def integral(self, values: Tensor, place: Tensor) -> Tensor:
        """Of values at the nodes (R, panels, 8) from 0 to places (R, E)."""
        edges, length, _, integral = _grid(values.device)
        distance = place.abs()
        panel = (torch.searchsorted(edges, distance, right=True) - 1).clamp(0, len(edges) - 2)
        within = (distance - edges[panel]) / length[panel]
        upper = ~torch.signbit(place)
        panel = torch.where(upper, len(length) - 1 - panel, panel)
        y = torch.where(upper, 1 - 2 * within, 2 * within - 1)
        inside = _horner(values.take_along_dim(panel[..., None], 1) @ integral.mT, y)
        return self.totals(values).gather(1, panel) + length[panel] * inside

    def cdf(self, place: Tensor) -> Tensor:
        """Probability below places (R, E)."""
        return self.integral(self.density, place).clamp(0, 1)

    def quantile(self, level: Tensor) -> Tensor:
        """The places (R, E) with these probabilities below them.

        Newton's steps in the panel that holds it, and bisection where they leave the bracket.
        """
        edges, length, _, integral = _grid(level.device)
        found = torch.searchsorted(self.cumulative, level.contiguous(), right=True) - 1
        panel = found.clamp(0, len(length) - 1)
        left = (level - self.cumulative.gather(1, panel)) / length[panel]
        terms = self.density.take_along_dim(panel[..., None], 1) @ integral.mT
        slopes = terms[..., 1:] * torch.arange(1, _NODES + 1).to(terms)
        low, high = torch.full_like(left, -1), torch.ones_like(left)
        y = (left / terms[..., 1::2].sum(-1) - 1).clamp(-1, 1)
        for _ in range(40):
            value = _horner(terms, y) - left
            low, high = torch.where(value < 0, y, low), torch.where(value < 0, high, y)
            last, step = y, y - value / _horner(slopes, y)
            y = torch.where((step >= low) & (step <= high), step, (low + high) / 2)
            if not bool(((y - last).abs() > 1e-15).any()):
                break
        upper = panel >= len(length) // 2
        start = edges[torch.where(upper, len(length) - 1 - panel, panel)]
        distance = start + length[panel] * torch.where(upper, 1 - y, 1 + y) / 2
        place = torch.where(upper, distance, -distance)
        place = torch.where((level <= 0) | (level >= 1), (level - 0.5) * 0, place)
        return torch.where(level.isnan(), level, place)


@lru_cache(maxsize=4)
def moment_nodes() -> Tensor:
    """Where the moments take the density: 62 midpoints, then the ends 0 and 1."""
    u = (torch.arange(MIDPOINTS, dtype=torch.float64) + 0.5) / MIDPOINTS
    return torch.cat([u, torch.tensor([0.0, 1.0], dtype=torch.float64)])


def moment_weights(values: Tensor, total: Tensor, parity: int) -> Tensor:
    r"""Weights of $\int_0^1 g(u)\, p(u)\, du$ at `moment_nodes`, (..., 64).

    g is even or odd about 1/2 and may be singular at the ends: p is split into the cosine
    $(p_0 + p_1)/2 + (p_0 - p_1)/2 \cos \pi u$ through its ends and $\sin^2(\pi u)\, r(u)$.
    Exact for every p in the span of 64 cosines.

    Args:
        values: of g at `half_nodes`, (..., panels, 8).
        total: the integral of g over the lower half, (...).
        parity: 1 for even, -1 for odd.
    """
    nodes, weights = half_nodes()
    u, m = moment_nodes()[:MIDPOINTS], torch.arange(MIDPOINTS, dtype=torch.float64)
    damped = values * weights * (math.pi * nodes).sin().square()
    series = torch.einsum("...pn,pnm->...m", damped, (math.pi * nodes[..., None] * m).cos())
    series = series * (1 + parity * (-1.0) ** m) * torch.where(m > 0, 2.0, 1.0)
    inner = series @ (math.pi * m[:, None] * u).cos() / MIDPOINTS / (math.pi * u).sin().square()
    bent = (values * weights * 2 * (math.pi * nodes / 2).sin().square()).sum((-2, -1))
    # The lower half's integral of g cos(pi u) is total - bent.
    even, odd = (1 + parity) * total, (1 - parity) * (total - bent)
    cosine = (math.pi * u).cos()
    ends = [(even + s * odd) / 2 - (inner * (1 + s * cosine) / 2).sum(-1) for s in (1, -1)]
    return torch.cat([inner, torch.stack(ends, -1)], -1)
