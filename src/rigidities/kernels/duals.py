r"""Closed forms of the dual activation and of the dual of the derivative.

For $(u, v) \sim N(0, \binom{p\ r}{r\ q})$

| $\phi$ | $E[\phi(u)\phi(v)]$ | $E[\phi'(u)\phi'(v)]$ |
| --- | --- | --- |
| x | r | 1 |
| erf x | (2/π) asin(2r / √((1+2p)(1+2q))) | (4/π) / √((1+2p)(1+2q) - 4r²) |
| max(x, 0) | √(pq) (sin θ + (π-θ) cos θ) / 2π | (π-θ) / 2π, cos θ = r/√(pq) |
| x Φ(x) | (r ψ + (pqD + r²) / (AB√D)) / 2π | (ψ + (r/√D) (1/A + 1/B + 1/D)) / 2π |
| sin x | exp(-(p+q)/2) sinh r | exp(-(p+q)/2) cosh r |

with A = 1+p, B = 1+q, D = AB - r² and cos ψ = -r/√(AB). (The paper's integral has the covariance
where its inverse is meant, and a normaliser that depends on it; these are plain expectations.)

GELU: with $g = \Phi(u)\Phi(v)$ Stein's lemma used twice gives
$E[uvg] = r E[g] + pr E[g_{uu}] + (pq + r^2) E[g_{uv}] + qr E[g_{vv}]$, where
$E[g] = \psi/2\pi$, $E[g_{uv}] = 1/(2\pi\sqrt D)$ and, as $E[g]$ obeys the heat equation in p,
$E[g_{uu}] = 2\, \partial_p E[g] = -r / (2\pi A \sqrt D)$; the derivative's dual is $\partial_r$ of
the result (Price's theorem).

Angles come from `atan2` of two sides of a triangle, which keeps their digits near correlation
$\pm 1$ where an arc sine or cosine loses half of them. All functions take float64 tensors that
broadcast, $p, q \ge 0$ and $r^2 \le pq$ (a rounding's worth beyond is clamped).

References: C. Williams, "Computing with infinite networks" (1997), for erf; Y. Cho and L. Saul,
"Kernel methods for deep learning" (2009), for ReLU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def identity_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """The covariance itself."""
    return r + 0 * (p + q)


def identity_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """One."""
    return torch.ones_like(p + q + r)


def erf_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """Williams' arc-sine kernel."""
    side = (1 + 2 * (p + q) + 4 * determinant(p, q, r)).sqrt()
    return 2 / math.pi * torch.atan2(2 * r, side)


def erf_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    r"""For $\phi' = 2 e^{-x^2} / \sqrt\pi$."""
    return 4 / math.pi * (1 + 2 * (p + q) + 4 * determinant(p, q, r)).rsqrt()


def relu_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """Half the arc-cosine kernel of order one."""
    side = determinant(p, q, r).sqrt()
    return (side + r * torch.atan2(side, -r)) / (2 * math.pi)  # atan2(side, -r) is pi - theta


def relu_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """The share of (u > 0, v > 0); 1/4 where a variance is zero (a slope of 1/2 at zero)."""
    side = determinant(p, q, r).sqrt()
    share = torch.atan2(side, -r) / (2 * math.pi)
    return torch.where((p > 0) & (q > 0), share, 0.25)


def gelu_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """For x Φ(x), the exact GELU."""
    a, b, d = 1 + p, 1 + q, 1 + p + q + determinant(p, q, r)
    angle = torch.atan2(d.sqrt(), -r)
    return (r * angle + (p * q * d + r * r) / (a * b * d.sqrt())) / (2 * math.pi)


def gelu_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    r"""For $\phi' = \Phi(x) + x \varphi(x)$."""
    a, b, d = 1 + p, 1 + q, 1 + p + q + determinant(p, q, r)
    angle = torch.atan2(d.sqrt(), -r)
    return (angle + r * d.rsqrt() * (1 / a + 1 / b + 1 / d)) / (2 * math.pi)


def sin_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """By the characteristic function; the exponents are never positive together."""
    size = r.abs()
    return -0.5 * r.sign() * torch.exp(size - (p + q) / 2) * torch.expm1(-2 * size)


def sin_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """For the cosine."""
    size = r.abs()
    return 0.5 * torch.exp(size - (p + q) / 2) * (1 + torch.exp(-2 * size))


def determinant(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """$pq - r^2$, at least zero, as a product of two differences to spare the squares' rounding."""
    root = p.sqrt() * q.sqrt()
    return ((root - r) * (root + r)).clamp_min(0)
