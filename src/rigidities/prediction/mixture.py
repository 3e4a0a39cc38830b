r"""Mixtures of Student-t distributions with four degrees of freedom.

The density of z is $\sum_j \pi_j\, t_4((z - m_j) / w_j) / w_j$, with shares $\pi_j$, offsets $m_j$
and widths $w_j$ of J components.

With four degrees of freedom everything about a component is algebraic. Let $s = \sqrt{4 + z^2}$
and $k = z / s$.

- The density is $f = 12 / s^5$ and the distribution function $F = 1/2 + 3k/4 - k^3/4$.
- Below zero, $u = 1 + k = 4 / (s (s + |z|))$ has all its digits, and $F = u^2 (3 - u) / 4$.
- The integral of F up to z is $\max(z, 0) + u / (s + |z|)$, with the same u of $-|z|$.

Scores need integrals of $F^2$ for the mixture's F. As $\sum_j \pi_j F_j^2 - F^2 =
\sum_{i<j} \pi_i \pi_j (F_i - F_j)^2$, the score of a mixture is the mean score of its components
less integrals of $(F_i - F_j)^2$. These alone need quadrature (`_difference_below`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .distribution import Distribution, StudentT, _result_dtype, _uniform, register_distribution
from .quadrature import gauss

__all__ = ["Components", "Mixture"]


def __dir__() -> list[str]:
    return sorted(__all__)


F64 = torch.float64
GRAPH_STEPS = 24
"""Steps of a graph's search for a quantile; see `Components.quantile_in_graph`."""


# --- one component of width one -----------------------------------------------------------------


def _tail_share(z: Tensor) -> tuple[Tensor, Tensor]:
    """s and the u of -|z|, see the module."""
    s = (4 + z.square()).sqrt()
    return s, 4 / (s * (s + z.abs()))


def _cdf(z: Tensor) -> Tensor:
    """The distribution function F, with all digits of small probabilities."""
    _, u = _tail_share(z)
    return _from_tail_share(z, u)


def _from_tail_share(z: Tensor, u: Tensor) -> Tensor:
    """The distribution function F at z, from the u of -|z|."""
    tail = u.square() * (3 - u) / 4
    # This is the tail below zero and one minus the tail above it. `torch.where` takes longer.
    sign = z.sign()
    return (0.5 + 0.5 * sign) - sign * tail


def _log_density(z: Tensor) -> Tensor:
    """Logarithm of the density f."""
    return math.log(3 / 8) - 2.5 * torch.log1p(z.square() / 4)


def _quantile(tail: Tensor) -> Tensor:
    r"""The inverse of F for probabilities above zero and up to 1/2.

    Newton's steps for $u^2 (3 - u) = 4F$ use plain operations alone. They start above the root of
    this convex function, by 23 % at most, so that five give all digits. (The root also is
    $2 \sin^2(e/2) + \sqrt 3 \sin e$ with $e = 2/3 \arcsin \sqrt F$, but ONNX's runtime has no
    inverse sine in double precision.)
    """
    u = (2 * tail).sqrt()
    for _ in range(5):
        u = u - (u.square() * (3 - u) - 4 * tail) / (3 * u * (2 - u))
    return -2 * (1 - u) / (u * (2 - u)).sqrt()


def _shortfall(z: Tensor) -> Tensor:
    """The integral of F up to z, with all its digits."""
    s, u = _tail_share(z)
    return z.clamp(min=0) + u / (s + z.abs())


WHOLE_SPREAD = 15 * math.pi / 64
"""The integral of F (1 - F) over the line."""


def _square_shortfall(z: Tensor) -> Tensor:
    r"""The integral of $F^2$ up to z, $z F^2 + 8 F / s^3 - 96 \int_{-\infty}^z s^{-8}$.

    By parts: the integral of z f is $-4 / s^3$. The last integral becomes one of $\cos^6$ of the
    angle whose tangent is z / 2.
    """
    s, _ = _tail_share(z)
    below = _cdf(z)
    # The angle from -pi/2 on; its sine and cosine are k and 2 / s.
    angle = (z / 2).atan()
    cosine = 2 / s
    sine = z / s
    # 16 int cos^6 from -pi/2: 5 angle + sin cos (8 cos^4 + 10 cos^2 + 15) / 3, from its start.
    square = cosine.square()
    of_cosine = sine * cosine * (15 + square * (10 + 8 * square)) / 3
    sixth_power = (5 * (angle + math.pi / 2) + of_cosine) / 16
    return (z * below.square() + below * cosine.pow(3) - 0.75 * sixth_power).clamp(min=0)


# --- pairs of components ------------------------------------------------------------------------


@lru_cache(maxsize=1)
@torch.inference_mode(False)
def _midpoint_rule() -> tuple[Tensor, Tensor]:
    """Nodes and weights of the midpoint rule on [0, 1], (64,) each.

    It is the best of rules for an analytic integrand that vanishes at both ends.
    """
    return (torch.arange(64, dtype=F64) + 0.5) / 64, torch.full((64,), 1 / 64, dtype=F64)


def _difference_below(
    offset: tuple[Tensor, Tensor], width: tuple[Tensor, Tensor], z: Tensor | None
) -> Tensor:
    r"""The integrals of $(F_1 - F_2)^2$ of pairs of components, over all or up to z; n pairs.

    In the unit $2 \sqrt{w_1 w_2}$, with $r = \sqrt{w_2 / w_1}$, let p and q be the distances of x
    from the two offsets. The variable
    $v = \operatorname{asinh}(r p) + \operatorname{asinh}(q / r)$ follows both components
    closely, whatever their widths: in it, the integrand is analytic as far as $\pi/2$ from the
    real line. Its inverse is algebraic: squaring $\cosh v$ gives a quadratic equation for p.

    Args:
        offset: Offsets of the two components, (n,) each.
        width: Widths of the two components, (n,) each.
        z: Where the integrals end, (n,); None for the whole line.

    Returns:
        The integrals, (n,).
    """
    # Beyond forty widths of all components, less than 1e-9 of the integral is left.
    low = torch.minimum(offset[0] - 40 * width[0], offset[1] - 40 * width[1])
    high = torch.maximum(offset[0] + 40 * width[0], offset[1] + 40 * width[1])
    if z is None:
        nodes, weights = _midpoint_rule()
    else:
        nodes, weights = gauss(112)
        high = torch.minimum(torch.maximum(z, low), high)
    nodes = nodes.to(low.device)[:, None]
    weights = weights.to(low.device)
    r = (width[1] / width[0]).sqrt()
    unit = 2 * (width[0] * width[1]).sqrt()
    distance = (offset[1] - offset[0]) / unit

    def v_at(x: Tensor) -> Tensor:
        return (r * (x - offset[0]) / unit).asinh() + ((x - offset[1]) / (r * unit)).asinh()

    start = v_at(low)
    length = v_at(high) - start
    growth = (start + length * nodes).exp()  # (nodes, n)
    cosh = (growth + 1 / growth) / 2
    sinh = growth - cosh
    r2 = r.square()
    leading = r2 + 1 / r2 + 2 * cosh
    root = sinh * (leading + distance.square()).sqrt()
    p = (root + distance * (cosh + 1 / r2)) / leading
    q = (root - distance * (cosh + r2)) / leading
    s1 = (p.square() + 1 / r2).sqrt()
    s2 = (q.square() + r2).sqrt()
    k1 = p / s1
    k2 = q / s2
    # F1 - F2, from k1 - k2.
    difference = (k1 - k2) * (3 - k1.square() - k1 * k2 - k2.square()) / 4
    # dx / dv = 1 / (1/s1 + 1/s2)
    integrand = difference.square() * (s1 * s2 / (s1 + s2))
    return unit * length * (weights @ integrand)


# --- all components -----------------------------------------------------------------------------


class Components(NamedTuple):
    """The J components of mixtures; float64, the components in the first dimension.

    Attributes:
        share: Probabilities of the components, (J, ...).
        offset: Their centres, (J, ...).
        width: Their widths, (J, ...).
    """

    share: Tensor
    offset: Tensor
    width: Tensor

    @classmethod
    def of(cls, logit: Tensor, offset: Tensor, log_width: Tensor) -> Components:
        """The components that have these logits, offsets and logarithms of widths, (..., J)."""
        return cls(
            share=logit.to(F64).softmax(-1).movedim(-1, 0),
            offset=offset.to(F64).movedim(-1, 0),
            width=log_width.to(F64).exp().movedim(-1, 0),
        )

    @property
    def mean(self) -> Tensor:
        """E z, (...)."""
        return (self.share * self.offset).sum(0)

    @property
    def second(self) -> Tensor:
        """E z^2, (...). A component has the variance $2 w^2$."""
        return (self.share * (2 * self.width.square() + self.offset.square())).sum(0)

    def against(self, z: Tensor) -> Components:
        """With dimensions of length one behind the first, to broadcast against z: (J, 1, ...)."""
        missing = max(0, z.ndim + 1 - self.share.ndim)
        index = (slice(None), *[None] * missing)
        return Components(self.share[index], self.offset[index], self.width[index])

    def flat(self, z: Tensor) -> Components:
        """The components of each of the n entries of z, (J, n), where z has the full shape."""
        count = len(self.share)
        return Components(
            *[tensor.expand(count, *z.shape).reshape(count, -1) for tensor in self.against(z)]
        )

    def of_entries(self, entries: slice | Tensor) -> Components:
        """Those of some entries."""
        return Components(*[tensor[:, entries] for tensor in self])

    def average(self, value: Callable[[Tensor], Tensor], z: Tensor, power: int = 0) -> Tensor:
        """The mean over components of a value at standardised z, times their widths' power."""
        share, offset, width = self.against(z)
        values = value((z - offset) / width)
        if power:
            values = values * width
        return (share * values).sum(0)

    def quantile_in_graph(self, level: Tensor) -> Tensor:
        """Quantiles by a fixed number of plain operations, for graphs.

        Args:
            level: Probabilities that broadcast against the components' last dimensions, such as
                (L, 1, 1) for components (J, M, K).
        """
        return self.quantile_search(level, GRAPH_STEPS)[0]

    def quantile_search(self, level: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        r"""Quantiles by that many steps, and whether each has converged to about ten digits.

        The search is for $b(F(x)) = b(p)$ with $b(p) = (1 - p)^{-1/4} - p^{-1/4}$. As tails fall
        with the fourth power of the distance, $b \circ F$ tends to straight lines far out.

        Args:
            level: Probabilities p that broadcast against the components' last dimensions.
            steps: Number of steps: those of Newton, or halvings of the bracket where Newton's would
                leave it or hardly be shorter than the last.
        """
        # Levels above 1/2 are those of -z below it, where probabilities keep their digits.
        sign = 1 - 2 * (level > 0.5).to(F64)
        distance = torch.minimum(level, 1 - level)
        # Densities at levels below 1e-200 would underflow.
        tail = distance.clamp(min=1e-200)
        share, offset, width = self.against(level)
        offset = sign * offset
        # A mixture's quantile lies between its components' quantiles.
        quantiles = offset + width * _quantile(tail)  # (J, ...)
        low = quantiles.amin(0)
        high = quantiles.amax(0)
        x = (share * quantiles).sum(0)
        previous_step = torch.full_like(x, math.inf)
        height = (1 - tail).rsqrt().sqrt() - tail.rsqrt().sqrt()
        near = 1e-8 * height.abs().clamp(min=1)
        value = torch.zeros_like(x)
        for _ in range(steps):
            z = (x - offset) / width
            s, u = _tail_share(z)
            below = (share * _from_tail_share(z, u)).sum(0)
            s2 = s.square()
            density = (share * 12 / (width * s2.square() * s)).sum(0)
            above = 1 - below
            left = below.rsqrt().sqrt()
            right = above.rsqrt().sqrt()
            value = right - left - height
            slope = density * (right / above + left / below) / 4
            low = torch.where(value < 0, x, low)
            high = torch.where(value < 0, high, x)
            newton = x - value / slope
            step = (newton - x).abs()
            is_good = (newton >= low) & (newton <= high) & (step <= previous_step / 2)
            # After a small value, the error of Newton's step is of the order of its square.
            is_close = value.abs() <= near
            following = torch.where(is_good | is_close, newton, (low + high) / 2)
            previous_step = (following - x).abs()
            x = following
        has_converged = ~(value.abs() > near)  # or is NaN
        x = torch.where(distance > 0, x, -math.inf)
        x = torch.where(distance >= 0, sign * x, math.nan)
        return x, has_converged


def _double_or_tensor(values: Any) -> Tensor:
    """A tensor as it is, and plain numbers, such as files hold, in double precision."""
    if isinstance(values, Tensor):
        return values
    return torch.tensor(values, dtype=F64)


@register_distribution
@dataclass(frozen=True, eq=False)
class Mixture(Distribution):
    r"""A mixture of J Student-t distributions with four degrees of freedom.

    Each prediction has its own J components: heavy tails and a finite variance whatever their
    parameters, and up to J modes.

    Attributes:
        logit: Logits of the shares, $\pi = \operatorname{softmax}$ of them, (..., J).
        offset: Centres $m_j$ of the components, (..., J).
        log_width: Logarithms of the widths $w_j$, (..., J).

    Examples:
        >>> zeros = torch.zeros(2)
        >>> distribution = Mixture(logit=zeros, offset=torch.tensor([0.0, 1.0]), log_width=zeros)
        >>> distribution.mean.item(), distribution.second.item()
        (0.5, 2.5)
    """

    name = "mixture"
    wide = ("logit", "offset", "log_width")

    logit: Tensor = field(default_factory=lambda: torch.zeros(1))
    offset: Tensor = field(default_factory=lambda: torch.zeros(1))
    log_width: Tensor = field(default_factory=lambda: torch.zeros(1))

    def __post_init__(self) -> None:
        for name in self.wide:
            object.__setattr__(self, name, _double_or_tensor(getattr(self, name)))
        shapes = [tuple(getattr(self, name).shape) for name in self.wide]
        if len(set(shapes)) != 1 or shapes[0][-1:] in ((), (0,)):
            raise ValueError(
                "A mixture has a logit, an offset and a logarithm of the width for each of its "
                f"components, (..., J) each, got the shapes {shapes[0]}, {shapes[1]} and "
                f"{shapes[2]}."
            )

    __eq__ = StudentT.__eq__
    __hash__ = StudentT.__hash__

    @classmethod
    def of_shape(cls, shape: Tensor) -> Mixture:
        """The mixture of logits, offsets and log-widths that follow one another, (..., 3 J)."""
        return cls(*shape.chunk(3, -1))

    @property
    def mirrored(self) -> Mixture:
        """The distribution of -z: offsets change sign."""
        return Mixture(self.logit, -self.offset, self.log_width)

    def each(self, change: Callable[[Tensor], Tensor]) -> Mixture:
        """The distribution with `change` applied to all three fields."""
        return Mixture(change(self.logit), change(self.offset), change(self.log_width))

    @cached_property
    def _components(self) -> Components:
        """The components in double precision, as all methods need them."""
        return Components.of(self.logit, self.offset, self.log_width)

    @property
    def second(self) -> Tensor:
        """E z^2, about zero."""
        return self._components.second.to(_result_dtype(self.logit))

    @property
    def mean(self) -> Tensor:
        """E z."""
        return self._components.mean.to(_result_dtype(self.logit))

    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the density at z."""
        components = self._components.against(z)
        log_densities = _log_density((z.to(F64) - components.offset) / components.width)
        log_terms = (components.share / components.width).log() + log_densities
        return log_terms.logsumexp(0).to(_result_dtype(z))

    def cdf(self, z: Tensor) -> Tensor:
        """The distribution function, with all digits of small probabilities."""
        return self._components.average(_cdf, z.to(F64)).to(_result_dtype(z))

    def quantile(self, level: Tensor) -> Tensor:
        """The inverse of `cdf`. Levels below 1e-200 are read as 1e-200, except for zero.

        `Components.quantile_in_graph` is the form of it for graphs.
        """
        p = level.to(F64)
        p = p.expand((p + self.logit[..., 0]).shape)
        flat_level = p.reshape(-1)
        components = self._components.flat(p)
        # Few entries at once, so that on a CPU their intermediate values stay in its cache.
        entries_at_once = 1 << (12 if p.device.type == "cpu" else 20)
        quantiles = torch.empty_like(flat_level)
        remaining = torch.arange(len(flat_level), device=p.device)
        # Most entries need five steps. Only those that need more take more.
        for steps in (5, 10, 40, 160):
            unfinished = []
            for entries in torch.split(remaining, entries_at_once):
                search = components.of_entries(entries).quantile_search(flat_level[entries], steps)
                quantiles[entries], has_converged = search
                unfinished.append(entries[~has_converged])
            remaining = torch.cat(unfinished)
            if len(remaining) == 0:
                break
        return quantiles.reshape(p.shape).to(_result_dtype(level))

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """A component for each draw, then one of its own draws, exactly."""
        components = self._components
        u = _uniform(like, n, generator)
        z = StudentT(4.0).sample(like.to(F64), n, generator)
        offset = components.offset[0]
        width = components.width[0]
        below = components.share[0]
        for share, next_offset, next_width in list(zip(*components, strict=True))[1:]:
            is_beyond = u > below
            offset = torch.where(is_beyond, next_offset, offset)
            width = torch.where(is_beyond, next_width, width)
            below = below + share
        return (offset + width * z).to(_result_dtype(like))

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""The mean of the components' shortfalls; of two draws, less that of their differences."""
        x = z.to(F64)
        if draws == 1:
            integral = self._components.average(_shortfall, x, power=1)
        else:
            mean_integral = self._components.average(_square_shortfall, x, power=1)
            integral = mean_integral - self._mean_difference(x)
        return integral.to(_result_dtype(z))

    def crps(self, z: Tensor) -> Tensor:
        """The mean score of the components, less the mean of their squared differences."""

        def score(standard: Tensor) -> Tensor:
            return _shortfall(standard) + _shortfall(-standard) - WHOLE_SPREAD

        mean_score = self._components.average(score, z.to(F64), power=1)
        return (mean_score - self._whole_difference).to(_result_dtype(z))

    @cached_property
    def _whole_difference(self) -> Tensor:
        """`_mean_difference` over the whole line, (...)."""
        return self._mean_difference(None)

    def _mean_difference(self, z: Tensor | None) -> Tensor:
        r"""$\sum_{i<j} \pi_i \pi_j \int (F_i - F_j)^2$, over all or up to z."""
        if z is None:
            components = self._components.flat(self.logit[..., 0])
            shape = self.logit.shape[:-1]
        else:
            z = z.expand((z + self.logit[..., 0]).shape)
            components = self._components.flat(z)
            shape = z.shape
            z = z.reshape(-1)
        first, second = torch.triu_indices(len(components.share), len(components.share), 1)
        rows = components.share.shape[1]
        # A pair needs about a thousand numbers: those of few at once stay in the processor's cache.
        rows_at_once = max(1, (1 << 8) // max(1, len(first)))
        totals = [components.share.new_zeros(0)]
        for start in range(0, rows, rows_at_once):
            chunk = slice(start, start + rows_at_once)
            share, offset, width = components.of_entries(chunk)
            z_of_pairs = None
            if z is not None:
                z_of_pairs = z[chunk].expand(len(first), -1).reshape(-1)
            integrals = _difference_below(
                (offset[first].reshape(-1), offset[second].reshape(-1)),
                (width[first].reshape(-1), width[second].reshape(-1)),
                z_of_pairs,
            )
            weights = share[first] * share[second]  # (pairs, rows)
            totals.append((weights * integrals.reshape(weights.shape)).sum(0))
        return torch.cat(totals).reshape(shape)
