r"""Densities on the unit interval that are exponentials of cosines.

$p(u) = \exp(\theta \cdot b(u) - A(\theta))$ with $b_j(u) = \sqrt 2 \cos(j \pi u)$, j = 1 ... 8. The
eight coefficients $\theta$ are a *tilt*, and $A$ normalises the density. `prediction.distribution`
multiplies Student's density by such a p(u), where u is Student's distribution function.

Integrals run over *panels*, pieces of the unit interval. They shrink towards both ends, where
quantiles of heavy tails are singular. In each panel the integrand is replaced by the polynomial
through its values at eight Gauss nodes. The coefficients of that polynomial's integral follow by
one matrix product (`Panels.primitive`), so that distribution functions are polynomials in each
panel, and quantiles are roots of polynomials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .quadrature import gauss, increasing_root

TERMS = 8
"""Number of cosines."""
MIDPOINTS = 64
"""Number of nodes by which moments are computed."""

_NODES = 8  # Gauss nodes of a panel
_NORMALISER_MIDPOINTS = 256

F64 = torch.float64


def basis(u: Tensor) -> Tensor:
    r"""$\sqrt 2 \cos(j \pi u)$ for j = 1 ... 8, (..., 8)."""
    j = torch.arange(1, TERMS + 1, dtype=u.dtype, device=u.device)
    return math.sqrt(2) * (math.pi * u[..., None] * j).cos()


def midpoints(n: int, device: torch.device | None = None) -> Tensor:
    """Midpoints of n equal pieces of the unit interval, (n,).

    Their mean is the integral of a sum of cosines up to the (2n - 1)-th.
    """
    return (torch.arange(n, dtype=F64, device=device) + 0.5) / n


class Panels(NamedTuple):
    """P pieces of the unit interval, with eight Gauss nodes in each; float64.

    Attributes:
        edges: Where panels begin and end, (P + 1,).
        length: Length of each panel, (P,).
        nodes: Gauss nodes, (P, 8).
        weights: Weights of the nodes in an integral over u, (P, 8).
        basis: The cosines at the nodes, (P, 8, 8).
        primitive: Takes values at a panel's nodes to the coefficients of x, x^2, ..., x^8 of their
            integral from the panel's start, (8, 8). There x runs from 0 to 1 within the panel.
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
    """Panels of length 1/32 in the middle, and of lengths down to 2^-44 towards both ends."""
    exponents = torch.tensor([*range(-44, -20, 4), *range(-20, -5, 2)], dtype=F64)
    lower_half = torch.cat([torch.zeros(1), 2.0**exponents, torch.arange(1, 16, dtype=F64) / 32])
    edges = torch.cat([lower_half, torch.full((1,), 0.5), 1 - lower_half.flip(0)])
    length = edges.diff()
    x, x_weights = gauss(_NODES)
    nodes = edges[:-1, None] + length[:, None] * x
    # The inverse Vandermonde matrix takes values at x to coefficients of x^0 ... x^7, and division
    # by 1 ... 8 integrates those.
    powers = torch.arange(_NODES)
    primitive = (torch.linalg.inv(x[:, None] ** powers) / (powers[:, None] + 1)).mT
    return Panels(
        edges=edges.to(device),
        length=length.to(device),
        nodes=nodes.to(device),
        weights=(length[:, None] * x_weights).to(device),
        basis=basis(nodes).to(device),
        primitive=primitive.to(device),
    )


def quantile_place(
    tilt: Tensor,
    level: Tensor,
    below_edges: Tensor,
    panel_basis: Tensor,
    primitive: Tensor,
    *,
    steps: int = 100,
) -> tuple[Tensor, Tensor]:
    """The panel that contains a quantile, and the quantile's place within that panel.

    All operations are plain ones that exporters know. Shapes broadcast: S is that of the answer.

    Args:
        tilt: Coefficients of the density, (*S, 8) up to broadcasting.
        level: Probabilities, S up to broadcasting.
        below_edges: Probability below each edge, (*S, P + 1) in full.
        panel_basis: `Panels.basis`.
        primitive: `Panels.primitive`.
        steps: Most steps of Newton's method.

    Returns:
        The panel's index, and the place between 0, its start, and 1, its end; both of shape S.
    """
    panel = (below_edges <= level[..., None]).sum(-1, keepdim=True) - 1
    panel = panel.clamp(0, len(panel_basis) - 1)
    start = below_edges.gather(-1, panel)[..., 0]
    end = below_edges.gather(-1, panel + 1)[..., 0]
    panel = panel[..., 0]
    # Probability between the panel's start and the quantile, as a share of the panel's.
    share = ((level - start) / (end - start)).clamp(0, 1)
    # The density is needed up to a factor alone, which softmax chooses without overflow.
    density = (panel_basis[panel] @ tilt[..., None])[..., 0].softmax(-1)  # (*S, 8)
    coefficients = density @ primitive
    coefficients = coefficients / coefficients.sum(-1, keepdim=True)
    powers = torch.arange(_NODES, dtype=F64, device=level.device)

    def value_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
        terms = coefficients * x[..., None] ** powers
        value = terms.sum(-1) * x - share
        slope = (terms * (powers + 1)).sum(-1)
        return value, slope

    place = increasing_root(value_and_slope, share, 0.0, 1.0, steps=steps)
    return panel, place


@dataclass(frozen=True)
class CosineTilt:
    """The densities of R tilts, with P panels and E arguments for each tilt.

    Attributes:
        tilt: Coefficients of the cosines, (R, 8), float64.
    """

    tilt: Tensor

    @cached_property
    def normaliser(self) -> Tensor:
        r"""$A = \log \int \exp(\theta \cdot b(u))\, du$, (R, 1)."""
        basis_at_midpoints = basis(midpoints(_NORMALISER_MIDPOINTS, self.tilt.device))
        exponents = self.tilt @ basis_at_midpoints.mT
        return exponents.logsumexp(-1, keepdim=True) - math.log(_NORMALISER_MIDPOINTS)

    def log_density(self, u: Tensor) -> Tensor:
        """Logarithm of the densities at u, (R, E)."""
        return (basis(u) @ self.tilt[..., None])[..., 0] - self.normaliser

    @cached_property
    def density(self) -> Tensor:
        """The densities at the nodes, (R, P, 8)."""
        exponents = torch.einsum("rj,pnj->rpn", self.tilt, panels(self.tilt.device).basis)
        return (exponents - self.normaliser[..., None]).exp()

    def totals(self, values: Tensor) -> Tensor:
        """Integrals from 0 to each edge, (R, P + 1), of values at the nodes, (R, P, 8)."""
        over_panels = (values * panels(values.device).weights).sum(-1)
        return torch.nn.functional.pad(over_panels.cumsum(-1), (1, 0))

    def integral(self, values: Tensor, u: Tensor, totals: Tensor | None = None) -> Tensor:
        """Integrals from 0 to u of a function of which values at the nodes are known.

        Args:
            values: Values at the nodes, (R, P, 8).
            u: Upper ends of the integrals, (R, E).
            totals: What `totals(values)` gives, where the caller has it.

        Returns:
            The integrals, (R, E).
        """
        grid = panels(values.device)
        if totals is None:
            totals = self.totals(values)
        panel = torch.searchsorted(grid.edges, u.contiguous(), right=True) - 1
        panel = panel.clamp(0, len(grid.length) - 1)
        place = (u - grid.edges[panel]) / grid.length[panel]
        coefficients = values.take_along_dim(panel[..., None], 1) @ grid.primitive  # (R, E, 8)
        # Horner's rule, from x^8 down to x.
        within_panel = torch.zeros_like(place)
        for coefficient in coefficients.unbind(-1)[::-1]:
            within_panel = (within_panel + coefficient) * place
        return totals.gather(1, panel) + grid.length[panel] * within_panel

    @cached_property
    def cdf_at_edges(self) -> Tensor:
        """Probability below each edge, (R, P + 1)."""
        return self.totals(self.density)

    def cdf(self, u: Tensor) -> Tensor:
        """Probability below u, (R, E)."""
        return self.integral(self.density, u, self.cdf_at_edges).clamp(0, 1)

    @cached_property
    def cdf_at_nodes(self) -> Tensor:
        """Probability below each node, (R, P, 8)."""
        grid = panels(self.tilt.device)
        x = gauss(_NODES)[0].to(self.tilt)
        powers = torch.arange(1, _NODES + 1).to(x)
        to_nodes = grid.primitive @ x ** powers[:, None]  # values at nodes -> integrals up to them
        within_panel = self.density @ to_nodes * grid.length[:, None]
        return self.cdf_at_edges[:, :-1, None] + within_panel

    def quantile(self, level: Tensor) -> Tensor:
        """The u with probability `level` below them, (R, E)."""
        grid = panels(level.device)
        below_edges = self.cdf_at_edges[:, None].expand(-1, level.shape[1], -1)
        panel, place = quantile_place(
            self.tilt[:, None], level, below_edges, grid.basis, grid.primitive
        )
        u = grid.edges[panel] + grid.length[panel] * place
        # 0 and 1 are their own quantiles. What is not a level, such as NaN, is returned unchanged.
        return torch.where((level > 0) & (level < 1), u, level)


def moment_values(quantile: Tensor, second: Tensor) -> Tensor:
    r"""Numbers at 64 midpoints that stand for z and $z^2$ in moments, (D, 64, 2).

    Their means under a density on the unit interval are the moments of z, exactly if the density
    is a sum of the first 64 cosines (the constant included). They come from the integrals of z and
    $z^2$ with each of those cosines. As $z^2$ is barely integrable, its integrals are computed as
    $E z^2 - \int z^2 (1 - \cos m \pi u)\, du$.

    Args:
        quantile: z at the panels' nodes, odd about u = 1/2, (D, P, 8).
        second: $E z^2$ without a tilt, (D,).
    """
    grid = panels(quantile.device)
    m = torch.arange(MIDPOINTS, dtype=F64)
    cosines = (math.pi * grid.nodes[..., None] * m).cos()  # (P, 8, 64)
    first_by_cosine = torch.einsum("dpn,pnm->dm", quantile * grid.weights, cosines)
    missing = torch.einsum("dpn,pnm->dm", quantile.square() * grid.weights, 1 - cosines)
    # z^2 is even about 1/2, so that its integrals with odd cosines vanish.
    second_by_cosine = torch.where(m % 2 == 0, second[:, None] - missing, 0)
    # Back from the cosines to values at the midpoints.
    waves = (math.pi * midpoints(MIDPOINTS)[:, None] * m).cos() * torch.where(m > 0, 2, 1)
    return waves @ torch.stack([first_by_cosine, second_by_cosine], -1)
