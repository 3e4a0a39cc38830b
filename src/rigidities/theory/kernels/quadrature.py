r"""Dual activations by quadrature of Hermite coefficients, where there is no closed form.

$$ E[\phi(u)\, \phi(v)] = \sum_n a_n(p)\, a_n(q)\, \rho^n, \qquad
   a_n(p) = E[\phi(\sqrt p\, z)\, h_n(z)], \qquad \rho = r / \sqrt{pq} $$

This is Mehler's formula. It turns the two-dimensional expectation over $N(0, \binom{p\ r}{r\ q})$
(the dual activation of the paper's appendix "Power series expansion of the NTK") into a power
series of the correlation. $h_n$ are the Hermite polynomials orthonormal under $z \sim N(0, 1)$.

For an N x M kernel, a two-dimensional rule with m nodes per side costs $N M m^2$ evaluations of
$\phi$. Here $(N + M)\, m$ evaluations give the coefficients, and $N M m$ multiplications, by
Horner's scheme in place, give the kernel. $|\rho| = 1$ is no special case: the series becomes
Parseval's sum for $E[\phi^2]$.

The one-dimensional integrals use the trapezoidal rule on $|z| \le 13$, which converges
geometrically for a function that is analytic near the real line. (Gauss-Hermite nodes would spread
to $2\sqrt m$, mostly where the density vanishes.) Each order has its own grid, so that two orders
cannot agree by sharing the errors of one grid. The integrand contains the product
$h_n(z)\, e^{-z^2/2}$, computed by the three-term recursion of $h_n(z)\, e^{-z^2/4}$, which neither
overflows nor cancels.

`mehler_dual` takes variances and covariances that broadcast, finds the order at which the
coefficients of both sides have converged, and sums the series.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

ORDERS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of terms that are tried in turn, until two consecutive ones agree."""

TOLERANCE = 1e-8
"""Largest difference between two orders, relative to the largest $E[\\phi^2]$ present.

The finer order, which is used, is far more accurate: its error is about this to the power 1.4.
"""

_REACH = 13.0
"""The integrals' range; exp(-13^2 / 4) is 4e-19."""

_TINY = torch.finfo(torch.float64).tiny

_BLOCK = 1 << 14
"""Entries of a kernel that are summed together, within a processor's cache."""

_MOST = 1 << 12
"""Most variances at once: at the highest order their coefficients take 128 MiB."""


class _HermiteExpansion(NamedTuple):
    """Hermite coefficients (P, order) of a function at P variances, and E[phi^2] (P,)."""

    coefficients: Tensor
    moments: Tensor


@lru_cache(maxsize=16)
def hermite_rule(order: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""Nodes z (k,), weights w (k,) of $E[\cdot]$ and $w\, h_n(z)$ for n below `order`, (order, k).

    Examples:
        >>> z, weights, basis = hermite_rule(4)
        >>> [round(float((weights * z**n).sum()), 12) for n in (0, 2, 4)]  # moments of N(0, 1)
        [1.0, 1.0, 3.0]
    """
    # At least four nodes per shortest wave of the last term, and more than 256 in total. The steps
    # of consecutive orders have an irrational ratio, so that the two cannot agree on a wave that is
    # too fast for both.
    step = 2 * _REACH / max(256 * math.sqrt(math.sqrt(order / 32)), 32 * math.sqrt(order))
    side = math.ceil(_REACH / step)
    z = step * torch.arange(-side, side + 1, dtype=torch.float64)
    root = torch.exp(-z.square() / 4)
    weight = step / math.sqrt(2 * math.pi)
    rows = []
    # h_n(z) exp(-z^2 / 4) by sqrt(n + 1) h_{n+1} = z h_n - sqrt(n) h_{n-1}
    previous = torch.zeros_like(z)
    current = root
    for n in range(order):
        rows.append(weight * root * current)
        following = (z * current - n**0.5 * previous) / (n + 1) ** 0.5
        previous = current
        current = following
    return z, weight * root.square(), torch.stack(rows)


def hermite_coefficients(function: Function, variance: Tensor, order: int) -> tuple[Tensor, Tensor]:
    r"""$a_n(p) = E[\phi(\sqrt p\, z)\, h_n(z)]$ for n below `order`, and $E[\phi(\sqrt p\, z)^2]$.

    By Parseval's theorem the squares of all $a_n$ add up to $E[\phi(\sqrt p\, z)^2]$.

    Args:
        function: $\phi$, elementwise.
        variance: Variances p, of any shape (...).
        order: Number of coefficients.

    Returns:
        (..., order) and (...), in float64.

    Raises:
        ValueError: $\phi$ is not finite somewhere.

    Examples:
        >>> a, moment = hermite_coefficients(lambda x: x * x, torch.ones(()), 4)
        >>> [round(float(c), 6) for c in (*a[::2], moment)]
        [1.0, 1.414214, 3.0]
    """
    z, weights, basis = hermite_rule(order)
    device = variance.device
    standard_deviation = variance.to(torch.float64).sqrt()
    values = function(standard_deviation[..., None] * z.to(device)).to(torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise ValueError(
            "The activation gives NaN or infinity for pre-activations up to "
            f"{_REACH * float(variance.max().sqrt()):.3g}. Use one that is finite on the whole "
            "line, or scale the inputs down."
        )
    return values @ basis.to(device).mT, values.square() @ weights.to(device)


def mehler_dual(function: Function, p: Tensor, q: Tensor, r: Tensor, name: str = "") -> Tensor:
    r"""$E[\phi(u)\phi(v)]$ for $(u, v) \sim N(0, \binom{p\ r}{r\ q})$, elementwise.

    The order doubles until two consecutive ones agree within `TOLERANCE` for these variances and
    *every* correlation between them; the coefficients alone show this. Where no two agree (a jump
    or a kink, fast oscillation, large variances) a ValueError is raised.

    Args:
        function: $\phi$, elementwise.
        p: Variances of u. With p of (N, 1) and q of (1, M) there are only N + M quadratures.
        q: Variances of v.
        r: Covariances. All three broadcast.
        name: What messages call the function.
    """
    if p.numel() + q.numel() > _MOST and max(p.shape + q.shape) > 1:
        return _dual_in_halves(function, p, q, r, name)
    # Each variance is integrated once, however often it occurs.
    left_variances, left_index = torch.unique(p, return_inverse=True)
    right_variances, right_index = torch.unique(q, return_inverse=True)
    left, right = _converged_coefficients(function, left_variances, right_variances, name)
    return _series_sum(left.mT[:, left_index], right.mT[:, right_index], correlation(p, q, r))


def _series_sum(left: Tensor, right: Tensor, rho: Tensor) -> Tensor:
    """The sum of left_n right_n rho^n by Horner's scheme, in blocks that fit a cache.

    Args:
        left: Coefficients (m, ...), which broadcast with rho after the first axis.
        right: The same for the other side.
        rho: Correlations.
    """
    correlations = rho.reshape(rho.shape or (1,))
    left = _with_axes(left, 1 + correlations.ndim)
    right = _with_axes(right, 1 + correlations.ndim)
    total = torch.zeros_like(correlations)
    rows = max(1, _BLOCK * len(correlations) // max(1, correlations.numel()))
    for start in range(0, len(correlations), rows):
        block = slice(start, start + rows)
        left_block = left[:, block] if left.shape[1] > 1 else left
        right_block = right[:, block] if right.shape[1] > 1 else right
        for n in reversed(range(len(left_block))):
            total[block].mul_(correlations[block]).addcmul_(left_block[n], right_block[n])
    return total.reshape(rho.shape)


def _with_axes(coefficients: Tensor, axes: int) -> Tensor:
    """(m, ...) -> (m, 1, ..., 1, ...) with `axes` axes in total."""
    new_axes = (1,) * (axes - coefficients.ndim)
    return coefficients.reshape(len(coefficients), *new_axes, *coefficients.shape[1:])


def correlation(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    r"""$\rho = r / \sqrt{pq}$ clamped to [-1, 1]; 0 where a variance is zero."""
    root = p.sqrt() * q.sqrt()
    safe = torch.where(root > 0, root, 1.0)
    return torch.where(root > 0, r / safe, 0.0).clamp(-1, 1)


def _dual_in_halves(function: Function, p: Tensor, q: Tensor, r: Tensor, name: str) -> Tensor:
    """`mehler_dual` for two halves of the longest axis, so that coefficient tables stay small."""
    shape = (p + q + r).shape
    p = p.reshape((1,) * (len(shape) - p.ndim) + p.shape)
    q = q.reshape((1,) * (len(shape) - q.ndim) + q.shape)
    r = r.reshape((1,) * (len(shape) - r.ndim) + r.shape)
    axis = max(range(len(shape)), key=lambda i: max(p.shape[i], q.shape[i]))
    half = shape[axis] // 2
    duals = []
    for start, length in ((0, half), (half, shape[axis] - half)):
        dual = mehler_dual(
            function,
            _narrowed(p, axis, start, length),
            _narrowed(q, axis, start, length),
            _narrowed(r, axis, start, length),
            name,
        )
        duals.append(dual)
    return torch.cat(duals, axis)


def _narrowed(tensor: Tensor, axis: int, start: int, length: int) -> Tensor:
    """Some entries along an axis; all of an axis that broadcasts."""
    return tensor.narrow(axis, start, length) if tensor.shape[axis] > 1 else tensor


def _converged_coefficients(
    function: Function, p: Tensor, q: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    """Coefficients (P, m) and (Q, m) at the first order that agrees with the previous one."""
    coarse = _both_sides(function, p, q, ORDERS[0])
    change = math.inf
    for order in ORDERS[1:]:
        fine = _both_sides(function, p, q, order)
        change = _relative_change(coarse, fine)
        if change <= TOLERANCE:
            left, right = fine
            return _trimmed(left.coefficients, right.coefficients)
        coarse = fine
    raise ValueError(
        f"The quadrature of the activation {name!r} does not converge: orders {ORDERS[-2]} and "
        f"{ORDERS[-1]} differ by {change:.1e} of its second moment (tolerance {TOLERANCE:g}). Use "
        "an activation without jumps, kinks and fast oscillation ('relu' has a closed form), or "
        f"smaller variances than {float(torch.maximum(p.max(), q.max())):.3g}."
    )


def _both_sides(
    function: Function, p: Tensor, q: Tensor, order: int
) -> tuple[_HermiteExpansion, _HermiteExpansion]:
    """The expansions of the function at both sides' variances."""
    left = _HermiteExpansion(*hermite_coefficients(function, p, order))
    if torch.equal(p, q):
        return left, left
    return left, _HermiteExpansion(*hermite_coefficients(function, q, order))


def _relative_change(
    coarse: tuple[_HermiteExpansion, _HermiteExpansion],
    fine: tuple[_HermiteExpansion, _HermiteExpansion],
) -> float:
    r"""Bound on the relative change of $\sum_n a_n b_n \rho^n$ for all pairs, $|\rho| \le 1$.

    Anything in the function that no term represents is missing from Parseval's sum.
    """
    changes = []  # of each side, (order,): the largest |change| of a coefficient
    sizes = []  # of each side, (order,): the largest |coefficient|
    missing = 0.0  # share of E[phi^2] that the coefficients do not reach
    for old, new in zip(coarse, fine, strict=True):
        old_order = old.coefficients.shape[-1]
        change = new.coefficients.clone()
        change[:, :old_order] -= old.coefficients
        size = new.coefficients.abs().amax(0)
        size[:old_order] = torch.maximum(size[:old_order], old.coefficients.abs().amax(0))
        changes.append(change.abs().amax(0))
        sizes.append(size)
        lost = (new.moments - new.coefficients.square().sum(-1)).abs().max()
        missing = max(missing, float(lost / new.moments.max().clamp_min(_TINY)))
    bound = changes[0] @ sizes[1] + sizes[0] @ changes[1]
    left, right = fine
    scale = (left.moments.max() * right.moments.max()).sqrt().clamp_min(_TINY)
    return max(missing, float(bound / scale))


def _trimmed(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients without the trailing terms that together stay below rounding."""
    terms = left.abs().amax(0) * right.abs().amax(0)
    tails = terms.flip(0).cumsum(0).flip(0)  # the sum of each term and all later ones
    count = max(1, int((tails > 1e-17 * tails[0]).sum()))
    return left[:, :count].contiguous(), right[:, :count].contiguous()
