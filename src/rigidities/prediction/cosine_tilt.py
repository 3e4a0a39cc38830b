r"""Densities on the unit interval that are exponentials of cosines.

$p(u) = \exp(\theta \cdot b(u) - A(\theta))$ with $b_j(u) = \sqrt 2 \cos(j \pi u)$, j = 1 ... 8.
Integrals run over panels that shrink towards both ends, where quantiles of heavy tails are
singular; in each a polynomial goes through its Gauss nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .quadrature import gauss, increasing_root

TERMS, MIDPOINTS = 8, 64
"""Cosines; and nodes of the moments."""

_NODES, F64 = 8, torch.float64


def basis(u: Tensor) -> Tensor:
    r"""$\sqrt 2 \cos(j \pi u)$, (..., 8)."""
    j = torch.arange(1, TERMS + 1, dtype=u.dtype, device=u.device)
    return math.sqrt(2) * (math.pi * u[..., None] * j).cos()


def midpoints(n: int, device: torch.device | None = None) -> Tensor:
    """Of n equal parts, whose rule is exact for 2n - 1 cosines."""
    return (torch.arange(n, dtype=F64, device=device) + 0.5) / n


class Panels(NamedTuple):
    """Edges, lengths, nodes and weights (panels, 8), the basis there, and what integrates.

    `primitive` takes values at a panel's nodes to the coefficients of x, x^2 ... of their integral
    from its start, with the panel as the unit of length.
    """

    edges: Tensor
    length: Tensor
    nodes: Tensor
    weights: Tensor
    basis: Tensor
    primitive: Tensor


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def panels(device: torch.device) -> Panels:
    """Even ones, then ever smaller ones towards both ends."""
    small = torch.tensor([*range(-44, -20, 4), *range(-20, -5, 2)], dtype=F64)
    half = torch.cat([torch.zeros(1), 2.0**small, torch.arange(1, 16, dtype=F64) / 32])
    edges = torch.cat([half, torch.full((1,), 0.5), 1 - half.flip(0)])
    (x, w), power, length = gauss(_NODES), torch.arange(_NODES), edges.diff()
    nodes = edges[:-1, None] + length[:, None] * x
    primitive = (torch.linalg.inv(x[:, None] ** power) / (power[:, None] + 1)).mT
    parts = (edges, length, nodes, length[:, None] * w, basis(nodes), primitive)
    return Panels(*(part.to(device) for part in parts))


@dataclass(frozen=True)
class CosineTilt:
    """The densities of R tilts (R, 8), float64."""

    tilt: Tensor

    @cached_property
    def normaliser(self) -> Tensor:
        """A, (R, 1)."""
        at = basis(midpoints(256, self.tilt.device))
        return (self.tilt @ at.mT).logsumexp(-1, keepdim=True) - math.log(256)

    def log_density(self, u: Tensor) -> Tensor:
        """At u (R, E)."""
        return (basis(u) @ self.tilt[..., None])[..., 0] - self.normaliser

    @cached_property
    def density(self) -> Tensor:
        """At the nodes, (R, panels, 8)."""
        raised = torch.einsum("rj,pnj->rpn", self.tilt, panels(self.tilt.device).basis)
        return (raised - self.normaliser[..., None]).exp()

    def totals(self, values: Tensor) -> Tensor:
        """Integrals of values at the nodes (R, panels, 8) from 0 to each edge."""
        mass = (values * panels(values.device).weights).sum(-1)
        return torch.nn.functional.pad(mass.cumsum(-1), (1, 0))

    def integral(self, values: Tensor, u: Tensor, totals: Tensor | None = None) -> Tensor:
        """Of values at the nodes (R, panels, 8) from 0 to u (R, E); their totals may be known."""
        at, u = panels(values.device), u.contiguous()
        panel = (torch.searchsorted(at.edges, u, right=True) - 1).clamp(0, len(at.length) - 1)
        x = (u - at.edges[panel]) / at.length[panel]
        inside = torch.zeros_like(x)
        for term in (values.take_along_dim(panel[..., None], 1) @ at.primitive).unbind(-1)[::-1]:
            inside = (inside + term) * x
        totals = self.totals(values) if totals is None else totals
        return totals.gather(1, panel) + at.length[panel] * inside

    @cached_property
    def cdf_at_edges(self) -> Tensor:
        """Probability below each edge, (R, panels + 1)."""
        return self.totals(self.density)

    def cdf(self, u: Tensor) -> Tensor:
        """Probability below u (R, E)."""
        return self.integral(self.density, u, self.cdf_at_edges).clamp(0, 1)

    @cached_property
    def cdf_at_nodes(self) -> Tensor:
        """The same at the nodes, (R, panels, 8)."""
        at, x = panels(self.tilt.device), gauss(_NODES)[0].to(self.tilt)
        to_node = at.primitive @ x ** torch.arange(1, _NODES + 1).to(x)[:, None]
        return self.cdf_at_edges[:, :-1, None] + self.density @ to_node * at.length[:, None]

    def quantile(self, level: Tensor) -> Tensor:
        """The u (R, E) with these probabilities below them, found in the panel that holds it."""
        edges, totals = panels(level.device).edges, self.cdf_at_edges
        panel = torch.searchsorted(totals, level.contiguous(), right=True) - 1
        panel = panel.clamp(0, len(edges) - 2)
        low, high = edges[panel], edges[panel + 1]
        below, above = totals.gather(1, panel), totals.gather(1, panel + 1)
        start = low + (high - low) * ((level - below) / (above - below)).clamp(0, 1)
        u = increasing_root(
            lambda u: (self.cdf(u) - level, self.log_density(u).exp()), start, low, high
        )
        return torch.where((level > 0) & (level < 1), u, level)


def moment_values(quantile: Tensor, second: Tensor) -> Tensor:
    r"""What stands for z and $z^2$ at 64 midpoints, (D, 64, 2).

    Their means under a density are exact if it lies in the span of 64 cosines: they come from
    the integrals with each cosine, $E z^2 - \int z^2 (1 - \cos m \pi u)\, du$ for $z^2$, which is
    hardly integrable.

    Args:
        quantile: z at the nodes, odd about 1/2, (D, panels, 8).
        second: $E z^2$, (D,).
    """
    _, _, nodes, weights, *_ = panels(quantile.device)
    m = torch.arange(MIDPOINTS, dtype=F64)
    angle = math.pi * nodes[..., None] * m
    first = torch.einsum("dpn,pnm->dm", quantile * weights, angle.cos())
    bent = torch.einsum("dpn,pnm->dm", quantile.square() * weights, 1 - angle.cos())
    even = torch.where(m % 2 == 0, second[:, None] - bent, 0)
    waves = (math.pi * midpoints(MIDPOINTS)[:, None] * m).cos() * torch.where(m > 0, 2, 1)
    return waves @ torch.stack([first, even], -1)
