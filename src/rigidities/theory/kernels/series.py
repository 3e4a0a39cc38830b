r"""Power series of the dual activation, and how far the NTK is from L + 1 times the NNGP.

For the activation normalised to $E[\phi(z)^2] = 1$ and inputs of unit length every variance stays
one, and the dual is a power series of the correlation $\xi$ with the Hermite coefficients $a_n$,

$$ \check\phi(\xi) = \frac{\sum_n a_n^2 \xi^n}{\sum_n a_n^2}, \qquad
   \check\phi^{(n)}(0) = \frac{n!\, a_n^2}{\sum_m a_m^2}
   = \frac{(E\,\phi^{(n)}(z))^2}{E\,\phi(z)^2} . $$

(The paper's constant C is $1 / (2\pi\, E\,\phi^2)$ here: it contains the density's normaliser at
$\xi = 0$. At other $\xi$ that normaliser is $1 / (2\pi \sqrt{1 - \xi^2})$, which is not constant.)

For an odd activation with $a = \check\phi'(0)$ and $b = \check\phi'''(0)$, l layers give

$$ \Xi^{(l)} = K_\mathrm{NTK} - (l+1)\, a^l \xi
   = \frac{b\,\xi^3}{6}\, a^{l-1} \sum_{m=1}^l a^{2(m-1)} (2m + l + 1) + O(\xi^5), $$
$$ \Delta^{(l)} = K_\mathrm{NTK} - (l+1)\, K_\mathrm{NNGP}
   = \frac{b\,\xi^3}{3}\, a^{l-1} \sum_{m=1}^l m\, a^{2(m-1)} + O(\xi^5), $$

and $|\Xi| - |\Delta| = \frac16 |b\,\xi^3|\, a^{l-1} (l+1) \sum_{m=1}^l a^{2(m-1)} \ge 0$: the
NNGP is the better multiple. These are the paper's formulas (appendix "Power series expansion of the
NTK"); composing the recursion as truncated polynomials confirms them (`recursion_series`). Written
as sums, they have no 0/0 at a = 1, where the difference is $l (l+1) |b\,\xi^3| / 6$. An even part
of the activation ($a_0, a_2, \dots \ne 0$: ReLU, SiLU, GELU) makes $K^{(l)}(\xi = 0)$ positive, and
no expansion about zero describes deeper layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...prediction.quadrature import gauss
from .activations import Activation, ActivationLike, activation
from .quadrature import TOLERANCE

__all__ = [
    "CubicCorrections",
    "cubic_corrections",
    "dual_series",
    "odd_coefficients",
    "recursion_series",
]

_REACH = 16.0
"""The integrals run from -16 to 16; exp(-16^2 / 2) is 1e-56."""

_PANELS = (64, 128)
"""The two numbers of panels whose results must agree; all multiples of 1/2 are edges of panels."""

_NODES = 24
"""Gauss-Legendre nodes in a panel."""


class CubicCorrections(NamedTuple):
    r"""Coefficients of $\xi^3$.

    Attributes:
        linear: The coefficient in $\Xi$, the error of a multiple of the inputs' products.
        nngp: The coefficient in $\Delta$, the error of a multiple of the NNGP.
        difference: The coefficient in $|\Xi| - |\Delta|$.
    """

    linear: float
    nngp: float
    difference: float


def dual_series(kind: ActivationLike, terms: int = 8, *, normalised: bool = True) -> Tensor:
    r"""Taylor coefficients $c_n = a_n^2\, [/ \sum_m a_m^2]$ of the dual at zero correlation.

    The integrals are composite Gauss-Legendre with panel edges at the multiples of 1/2, so that
    kinks there (ReLU) cost no accuracy. They are computed with two numbers of panels, whose results
    must agree; the finer one is returned.

    Args:
        kind: Anything that `activation` takes.
        terms: How many coefficients, n = 0 ... terms - 1.
        normalised: Whether to divide by $E[\phi(z)^2]$.

    Returns:
        (terms,) in float64, all non-negative.

    Raises:
        ValueError: The activation is not finite, or the two rules differ by more than
            `TOLERANCE` of $E[\phi^2]$ (a jump or a kink elsewhere, fast oscillation).

    Examples:
        >>> [round(c, 6) for c in dual_series("sin", 4, normalised=False).tolist()]  # sinh(ξ)/e
        [0.0, 0.367879, 0.0, 0.061313]
    """
    if terms < 1:
        raise ValueError(f"terms must be at least 1, got {terms}.")
    phi = activation(kind)
    coarse, coarse_moment = _coefficients(phi, terms, _PANELS[0])
    fine, moment = _coefficients(phi, terms, _PANELS[1])
    scale = moment.clamp_min(torch.finfo(torch.float64).tiny)
    differences = (coarse - fine).abs() * (coarse.abs() + fine.abs())  # |a^2 - b^2| or more
    moment_difference = (coarse_moment - moment).abs()
    change = float(torch.maximum(differences.max(), moment_difference) / scale)
    if change > TOLERANCE:
        raise ValueError(
            f"The series of the activation {phi.name!r} does not converge: {_PANELS[0]} and "
            f"{_PANELS[1]} panels differ by {change:.1e} of its second moment (tolerance "
            f"{TOLERANCE:g}). Use an activation without fast oscillation, whose jumps and kinks "
            "lie at multiples of 1/2 only."
        )
    if normalised:
        return fine.square() / moment
    return fine.square()


def _coefficients(phi: Activation, terms: int, panels: int) -> tuple[Tensor, Tensor]:
    r"""$a_n$ for n below `terms`, and $E[\phi(z)^2]$, by composite Gauss-Legendre."""
    nodes, shares = gauss(_NODES)  # on [0, 1]
    width = 2 * _REACH / panels
    starts = -_REACH + width * torch.arange(panels, dtype=torch.float64)
    z = (starts[:, None] + width * nodes).reshape(-1)
    weights = (width * shares).repeat(panels) * torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    values = phi.function(z).to(torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"The activation {phi.name!r} is not finite on [-{_REACH}, {_REACH}].")
    coefficients = []
    # h_n(z) by sqrt(n + 1) h_{n+1} = z h_n - sqrt(n) h_{n-1}
    previous = torch.zeros_like(z)
    current = torch.ones_like(z)
    for n in range(terms):
        coefficients.append((weights * values * current).sum())
        following = (z * current - n**0.5 * previous) / (n + 1) ** 0.5
        previous = current
        current = following
    return torch.stack(coefficients), (weights * values.square()).sum()


def odd_coefficients(kind: ActivationLike) -> tuple[float, float]:
    r"""$a = \check\phi'(0)$ and $b = \check\phi'''(0)$ of the normalised dual of an odd activation.

    Raises:
        ValueError: The activation has an even part.

    Examples:
        >>> odd_coefficients("identity")
        (1.0, 0.0)
    """
    phi = activation(kind)
    series = dual_series(phi, 12)
    even = float(series[0::2].sum())
    if even > 1e-10:
        raise ValueError(
            f"The activation {phi.name!r} is not odd: even terms carry {even:.2g} of its dual. Use "
            "dual_series for its coefficients."
        )
    a = float(series[1])
    b = 6 * float(series[3])
    if b <= 1e-20:  # the identity, but for rounding
        return round(a, 14), 0.0
    return a, b


def cubic_corrections(a: float, b: float, depth: int) -> CubicCorrections:
    r"""Leading coefficients of $\Xi^{(l)}$, $\Delta^{(l)}$ and $|\Xi^{(l)}| - |\Delta^{(l)}|$.

    Args:
        a: $\check\phi'(0)$, in (0, 1].
        b: $\check\phi'''(0)$.
        depth: The number l of hidden layers, at least 1.

    Examples:
        >>> cubic_corrections(1.0, 6.0, 1)
        CubicCorrections(linear=4.0, nngp=2.0, difference=2.0)
    """
    if not 0 < a <= 1 + 1e-12 or depth < 1:
        raise ValueError(f"Expected 0 < a <= 1 and depth >= 1, got a={a:g} and depth={depth}.")
    powers = [a ** (2 * (m - 1)) for m in range(1, depth + 1)]
    front = b * a ** (depth - 1)
    linear = front / 6 * sum((2 * m + depth + 1) * p for m, p in enumerate(powers, 1))
    nngp = front / 3 * sum(m * p for m, p in enumerate(powers, 1))
    difference = abs(front) / 6 * (depth + 1) * sum(powers)
    return CubicCorrections(linear, nngp, difference)


def recursion_series(series: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    r"""NNGP and NTK after `depth` layers as polynomials of $\xi$, by composition.

    Args:
        series: Taylor coefficients of the dual, (n,). Higher powers are cut off everywhere.
        depth: Number of hidden layers.

    Returns:
        Coefficients of the NNGP and the NTK, (n,) each. They are exact if the dual is zero at
        zero.

    Examples:
        >>> nngp, ntk = recursion_series(torch.tensor([0.0, 0.5, 0.0, 0.5]), 1)
        >>> nngp.tolist(), ntk.tolist()  # ξ/2 + ξ^3/2 and itself plus ξ (1/2 + 3/2 ξ^2)
        ([0.0, 0.5, 0.0, 0.5], [0.0, 1.0, 0.0, 2.0])
    """
    series = series.to(torch.float64)
    derivative = torch.zeros_like(series)  # of the dual
    derivative[:-1] = series[1:] * torch.arange(1, len(series), dtype=torch.float64)
    nngp = torch.zeros_like(series)
    nngp[1] = 1.0  # ξ itself, before the first layer
    ntk = nngp
    for _ in range(depth):
        slope = _composed(derivative, nngp)
        nngp = _composed(series, nngp)
        ntk = nngp + _product(ntk, slope)
    return nngp, ntk


def _composed(outer: Tensor, inner: Tensor) -> Tensor:
    """The polynomial outer(inner(ξ)) by Horner's scheme, cut off at the same degree."""
    total = torch.zeros_like(inner)
    for coefficient in outer.flip(0):
        total = _product(total, inner)
        total[0] += coefficient
    return total


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two polynomials, cut off at the same degree."""
    total = torch.zeros_like(left)
    for n, coefficient in enumerate(left.tolist()):
        total[n:] += coefficient * right[: len(right) - n]
    return total
