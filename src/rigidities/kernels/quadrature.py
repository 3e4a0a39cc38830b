r"""Dual activations by Gauss-Hermite quadrature, for activations without a closed form.

With $h_n$ the Hermite polynomials orthonormal under $z \sim N(0, 1)$ and the coefficients
$a_n(p) = E[\phi(\sqrt p\, z)\, h_n(z)]$, Mehler's formula turns the two-dimensional expectation
over $N(0, \binom{p\ r}{r\ q})$ into a power series of the correlation $\rho = r / \sqrt{pq}$

$$ E[\phi(u)\, \phi(v)] = \sum_n a_n(p)\, a_n(q)\, \rho^n . $$

For an N x M kernel a two-dimensional rule of m nodes a side costs $N M m^2$ evaluations of $\phi$;
here $(N + M)\, m$ evaluations give the coefficients and $N M m$ multiplications, by Horner's scheme
in place, the kernel. $|\rho| = 1$ needs no care: the series becomes Parseval's sum for $E[\phi^2]$.

The one-dimensional integrals use the trapezoidal rule on $|z| \le 13$, which converges
geometrically for a function analytic about the real line. (Gauss-Hermite nodes would spread to
$2\sqrt m$, mostly where the density is nil.) Each order has a grid of its own, so that two orders
agree on what the activation is and not on what one grid makes of it. What enters is the product
$h_n(z)\, e^{-z^2/2}$, built by the three-term recursion of $h_n(z)\, e^{-z^2/4}$, which neither
overflows nor cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Sides = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]

ORDERS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # terms, until two in succession agree
TOLERANCE = 1e-8
"""Largest difference between two orders, relative to the largest $E[\\phi^2]$ present.

The finer order, which is kept, is better by far: the error falls to about its 1.4th power.
"""

_REACH = 13.0  # exp(-13^2 / 4) is 4e-19
_TINY = torch.finfo(torch.float64).tiny
_BLOCK = 1 << 14  # entries of a kernel that are summed together
_MOST = 1 << 12  # variances at once: at the highest order their coefficients take 128 MiB


@lru_cache(maxsize=16)
def hermite_rule(order: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""Nodes z (k,), weights w (k,) of $E[\cdot]$ and $w\, h_n(z)$ for n below `order`, (order, k).

    Examples:
        >>> z, weights, basis = hermite_rule(4)
        >>> [round(float((weights * z**n).sum()), 12) for n in (0, 2, 4)]  # moments of N(0, 1)
        [1.0, 1.0, 3.0]
    """
    # Four nodes or more to the shortest wave of the last term, and over 256 in all. The steps of
    # two orders have an irrational ratio: they cannot agree on a wave that is too fast for both.
    step = 2 * _REACH / max(256 * math.sqrt(math.sqrt(order / 32)), 32 * math.sqrt(order))
    side = math.ceil(_REACH / step)
    z = step * torch.arange(-side, side + 1, dtype=torch.float64)
    root = torch.exp(-z.square() / 4)
    weight = step / math.sqrt(2 * math.pi)
    rows, below, current = [], torch.zeros_like(z), root
    for n in range(order):
        rows.append(weight * root * current)
        below, current = current, (z * current - n**0.5 * below) / (n + 1) ** 0.5
    return z, weight * root.square(), torch.stack(rows)


def hermite_coefficients(function: Function, variance: Tensor, order: int) -> tuple[Tensor, Tensor]:
    r"""$a_n(p) = E[\phi(\sqrt p\, z)\, h_n(z)]$ for n below `order`, and $E[\phi(\sqrt p\, z)^2]$.

    For variances p (...): (..., order) and (...) in float64; by Parseval the squares of all $a_n$
    sum to the second. Refused where $\phi$ is not finite somewhere.

    Examples:
        >>> a, moment = hermite_coefficients(lambda x: x * x, torch.ones(()), 4)
        >>> [round(float(c), 6) for c in (*a[::2], moment)]
        [1.0, 1.414214, 3.0]
    """
    z, weights, basis = (part.to(variance.device) for part in hermite_rule(order))
    values = function(variance.to(torch.float64).sqrt()[..., None] * z).to(torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise ValueError(
            "The activation gives NaN or infinity for pre-activations up to "
            f"{_REACH * float(variance.max().sqrt()):.3g}. Use one that is finite on the whole "
            "line, or scale the inputs down."
        )
    return values @ basis.mT, values.square() @ weights


def mehler_dual(function: Function, p: Tensor, q: Tensor, r: Tensor, name: str = "") -> Tensor:
    r"""$E[\phi(u)\phi(v)]$ for $(u, v) \sim N(0, \binom{p\ r}{r\ q})$, elementwise.

    The order doubles until two in succession agree within `TOLERANCE` for the variances at hand
    and *every* correlation between them, which the coefficients alone decide. Where no two do (a
    jump or a kink, fast oscillation, large variances) the activation is refused by its name. All
    three broadcast: p of (N, 1) beside q of (1, M) keeps the work at N + M quadratures.
    """
    if p.numel() + q.numel() > _MOST and max(p.shape + q.shape) > 1:
        return _in_halves(function, p, q, r, name)
    left, where_left = torch.unique(p, return_inverse=True)
    right, where_right = torch.unique(q, return_inverse=True)
    a, b = _converged(function, left, right, name)
    return _summed(a.mT[:, where_left], b.mT[:, where_right], correlation(p, q, r))


def _summed(left: Tensor, right: Tensor, rho: Tensor) -> Tensor:
    """Horner's scheme for terms (m, ...) that broadcast to rho, in blocks that fit a cache."""
    whole = rho.reshape(rho.shape or (1,))
    left, right = (
        t.reshape(len(t), *(1,) * (1 + whole.ndim - t.ndim), *t.shape[1:]) for t in (left, right)
    )
    total = torch.zeros_like(whole)
    rows = max(1, _BLOCK * len(whole) // max(1, whole.numel()))
    for start in range(0, len(whole), rows):
        block = slice(start, start + rows)
        ones, others = (t[:, block] if t.shape[1] > 1 else t for t in (left, right))
        for n in reversed(range(len(ones))):
            total[block].mul_(whole[block]).addcmul_(ones[n], others[n])
    return total.reshape(rho.shape)


def correlation(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    r"""$\rho = r / \sqrt{pq}$ clamped to [-1, 1]; 0 where a variance is zero."""
    root = p.sqrt() * q.sqrt()
    safe = torch.where(root > 0, root, 1.0)
    return torch.where(root > 0, r / safe, 0.0).clamp(-1, 1)


def _in_halves(function: Function, p: Tensor, q: Tensor, r: Tensor, name: str) -> Tensor:
    """Split the longest axis of the variances, so that no table of coefficients grows large."""
    shape = (p + q + r).shape
    p, q, r = (t.reshape((1,) * (len(shape) - t.ndim) + t.shape) for t in (p, q, r))
    axis = max(range(len(shape)), key=lambda i: max(p.shape[i], q.shape[i]))
    half, pieces = shape[axis] // 2, []
    for start, length in ((0, half), (half, shape[axis] - half)):
        u, v, w = (t.narrow(axis, start, length) if t.shape[axis] > 1 else t for t in (p, q, r))
        pieces.append(mehler_dual(function, u, v, w, name))
    return torch.cat(pieces, axis)


def _converged(function: Function, p: Tensor, q: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Coefficients (P, m) and (Q, m) at the first order that agrees with the one before."""
    coarse, change = _sides(function, p, q, ORDERS[0]), math.inf
    for order in ORDERS[1:]:
        fine = _sides(function, p, q, order)
        change = _change(coarse, fine)
        if change <= TOLERANCE:
            return _trimmed(fine[0][0], fine[1][0])
        coarse = fine
    raise ValueError(
        f"The quadrature of the activation {name!r} does not converge: orders {ORDERS[-2]} and "
        f"{ORDERS[-1]} differ by {change:.1e} of its second moment (tolerance {TOLERANCE:g}). Use "
        "an activation without jumps, kinks and fast oscillation ('relu' has a closed form), or "
        f"smaller variances than {float(torch.maximum(p.max(), q.max())):.3g}."
    )


def _sides(function: Function, p: Tensor, q: Tensor, order: int) -> Sides:
    """Coefficients (P, m) and second moments of the one side, and (Q, m) of the other."""
    left = hermite_coefficients(function, p, order)
    return left, left if torch.equal(p, q) else hermite_coefficients(function, q, order)


def _change(coarse: Sides, fine: Sides) -> float:
    r"""Bound on the relative change of $\sum_n a_n b_n \rho^n$ for all pairs, $|\rho| \le 1$.

    A part of the function that no term reaches shows in Parseval's sum.
    """
    moved, largest, missing = [], [], 0.0
    for (old, _), (new, moment) in zip(coarse, fine, strict=True):
        (change, most), size = (new.clone(), new.abs().amax(0)), old.shape[-1]
        change[:, :size] -= old
        most[:size] = torch.maximum(most[:size], old.abs().amax(0))
        moved.append(change.abs().amax(0))
        largest.append(most)
        lost = (moment - new.square().sum(-1)).abs().max() / moment.max().clamp_min(_TINY)
        missing = max(missing, float(lost))
    bound = moved[0] @ largest[1] + largest[0] @ moved[1]
    scale = (fine[0][1].max() * fine[1][1].max()).sqrt().clamp_min(_TINY)
    return max(missing, float(bound / scale))


def _trimmed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Without the trailing terms that together stay below rounding."""
    terms = a.abs().amax(0) * b.abs().amax(0)
    rest = terms.flip(0).cumsum(0).flip(0)
    keep = max(1, int((rest > 1e-17 * rest[0]).sum()))
    return a[:, :keep].contiguous(), b[:, :keep].contiguous()
