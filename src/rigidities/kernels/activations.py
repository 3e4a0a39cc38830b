r"""Activations with their duals: what one hidden layer does to a kernel.

The dual of $\phi$ maps the covariance of two pre-activations to that of the activations,
$E[\phi(u)\phi(v)]$ for $(u, v) \sim N(0, \binom{p\ r}{r\ q})$; the dual of $\phi'$ carries the
tangent kernel. tanh, SiLU and any callable use quadrature (`quadrature`), with the derivative by
automatic differentiation; others have closed forms:

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
$\pm 1$ where an arc sine or cosine loses half of them. The closed forms take float64 tensors that
broadcast, $p, q \ge 0$ and $r^2 \le pq$ (a rounding's worth beyond is clamped).

References: C. Williams, "Computing with infinite networks" (1997), for erf; Y. Cho and L. Saul,
"Kernel methods for deep learning" (2009), for ReLU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .quadrature import Function, mehler_dual

Dual = Callable[[Tensor, Tensor, Tensor], Tensor]
ActivationLike: TypeAlias = "str | Activation | nn.Module | Function"

_SLACK = 1e-9  # by how much |r| may exceed sqrt(pq), relative to it, as rounding and no error


@dataclass(frozen=True)
class Activation:
    r"""An activation $\phi$ and its duals, multiplied by `factor` where it is normalised.

    Attributes:
        name: for messages and tables.
        function: $\phi$, elementwise.
        raw_dual: $E[\phi(u)\phi(v)]$ of (p, q, r).
        raw_slope_dual: $E[\phi'(u)\phi'(v)]$.
        factor: multiplies both; $1 / E[\phi(z)^2]$ in the paper's normalisation.

    Examples:
        >>> one = torch.ones((), dtype=torch.float64)
        >>> activation("relu").dual(one, one, one).item()  # E max(z, 0)^2
        0.5
        >>> activation("relu").normalised().dual(one, one, one).item()
        1.0
    """

    name: str
    function: Function
    raw_dual: Dual
    raw_slope_dual: Dual
    factor: float = 1.0

    def dual(self, p: Tensor, q: Tensor, r: Tensor) -> Tensor:
        r"""$E[\phi(u)\phi(v)]$, elementwise.

        Args:
            p: variances of u, not negative.
            q: variances of v.
            r: covariances, $r^2 \le pq$; all three broadcast.

        Returns:
            float64, of the broadcast shape.
        """
        return self.factor * self.raw_dual(*checked_covariances(p, q, r))

    def slope_dual(self, p: Tensor, q: Tensor, r: Tensor) -> Tensor:
        r"""$E[\phi'(u)\phi'(v)]$, elementwise; arguments as in `dual`."""
        return self.factor * self.raw_slope_dual(*checked_covariances(p, q, r))

    def moment(self, variance: Tensor) -> Tensor:
        r"""$E[\phi(u)^2]$ for $u \sim N(0, p)$."""
        return self.dual(variance, variance, variance)

    def normalised(self) -> Activation:
        r"""The same with $E[\phi(z)^2] = 1$ at unit variance: the paper's $\check\phi(1) = 1$."""
        moment = float(self.moment(torch.ones((), dtype=torch.float64)))
        if not moment > 0:
            raise ValueError(f"The activation {self.name!r} is zero: it cannot be normalised.")
        return replace(self, factor=self.factor / moment)


def activation(kind: ActivationLike) -> Activation:
    """The `Activation` that a name, a torch module or any callable stands for.

    Args:
        kind: "erf", "gelu", "identity", "relu", "silu", "sin" or "tanh"; an `nn.Module` such as
            `nn.SiLU()` or a torch function such as `torch.tanh`; or an elementwise, smooth
            callable written in torch.

    Raises:
        ValueError: an unknown name.
        TypeError: neither a name nor callable.

    Examples:
        >>> activation(nn.GELU()).name, activation(torch.nn.functional.silu).name
        ('gelu', 'silu')
    """
    if isinstance(kind, Activation):
        return kind
    if isinstance(kind, str):
        if kind not in _NAMED:
            what = f"Unknown activation {kind!r}. Known: {', '.join(sorted(_NAMED))}"
            raise ValueError(f"{what}; or pass a smooth elementwise callable.")
        return _NAMED[kind]
    if not callable(kind):
        raise TypeError(f"An activation is a name or a callable, got {type(kind).__name__}.")
    known = _known_name(kind)
    return _NAMED[known] if known else by_quadrature(kind)


def by_quadrature(function: Function, name: str | None = None) -> Activation:
    """An activation whose duals are computed by quadrature.

    Args:
        function: elementwise, smooth, in torch.
        name: by default the function's own.
    """
    label = name or str(getattr(function, "__name__", type(function).__name__))
    dual = partial(mehler_dual, partial(_values, function), name=label)
    slope = partial(mehler_dual, partial(_derivative, function), name=f"derivative of {label}")
    return Activation(label, function, dual, slope)


def checked_covariances(p: Tensor, q: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float64, with clear errors for what no pair of Gaussians has."""
    p, q, r = (torch.as_tensor(t).detach().to(torch.float64) for t in (p, q, r))
    for name, t in (("p", p), ("q", q), ("r", r)):
        if not bool(torch.isfinite(t).all()):
            raise ValueError(f"The covariances hold NaN or infinity (in {name}). Clean the inputs.")
    smallest = min(float(t.min()) for t in (p, q) if t.numel()) if p.numel() and q.numel() else 0.0
    if smallest < 0:
        raise ValueError(f"Variances must not be negative, got {smallest:.3g}.")
    root = p.sqrt() * q.sqrt()
    if bool((r.abs() > root * (1 + _SLACK) + torch.finfo(torch.float64).tiny).any()):
        raise ValueError(
            "Not covariances: somewhere |r| exceeds sqrt(p q). Pass p = k(x, x), q = k(z, z) and "
            "r = k(x, z) of the same kernel."
        )
    return p, q, r


def _values(function: Function, x: Tensor) -> Tensor:
    with torch.no_grad():
        values = function(x)
    got = tuple(torch.as_tensor(values).shape)
    if got != tuple(x.shape):
        raise ValueError(
            f"An activation acts on each number alone: for an input of {tuple(x.shape)} expected "
            f"the same shape, got {got}."
        )
    return values


def _derivative(function: Function, x: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        values = function(x)
        if not values.requires_grad:
            raise ValueError(
                "The activation has no derivative that torch can follow (NumPy, detach or "
                "no_grad inside?). Write it in torch operations."
            )
        (slope,) = torch.autograd.grad(values.sum(), x)
    return slope


def _identity_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    return r + 0 * (p + q)


def _identity_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    return torch.ones_like(p + q + r)


def _erf_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """Williams' arc-sine kernel."""
    side = (1 + 2 * (p + q) + 4 * _determinant(p, q, r)).sqrt()
    return 2 / math.pi * torch.atan2(2 * r, side)


def _erf_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    r"""For $\phi' = 2 e^{-x^2} / \sqrt\pi$."""
    return 4 / math.pi * (1 + 2 * (p + q) + 4 * _determinant(p, q, r)).rsqrt()


def _relu_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """Half the arc-cosine kernel of order one."""
    side = _determinant(p, q, r).sqrt()
    return (side + r * torch.atan2(side, -r)) / (2 * math.pi)  # atan2(side, -r) is pi - theta


def _relu_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """The share of (u > 0, v > 0); 1/4 where a variance is zero (a slope of 1/2 at zero)."""
    side = _determinant(p, q, r).sqrt()
    share = torch.atan2(side, -r) / (2 * math.pi)
    return torch.where((p > 0) & (q > 0), share, 0.25)


def _gelu_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """For x Φ(x), the exact GELU."""
    a, b, d = 1 + p, 1 + q, 1 + p + q + _determinant(p, q, r)
    angle = torch.atan2(d.sqrt(), -r)
    return (r * angle + (p * q * d + r * r) / (a * b * d.sqrt())) / (2 * math.pi)


def _gelu_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    r"""For $\phi' = \Phi(x) + x \varphi(x)$."""
    a, b, d = 1 + p, 1 + q, 1 + p + q + _determinant(p, q, r)
    angle = torch.atan2(d.sqrt(), -r)
    return (angle + r * d.rsqrt() * (1 / a + 1 / b + 1 / d)) / (2 * math.pi)


def _sin_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """By the characteristic function; the exponents are never positive together."""
    size = r.abs()
    return -0.5 * r.sign() * torch.exp(size - (p + q) / 2) * torch.expm1(-2 * size)


def _sin_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    size = r.abs()
    return 0.5 * torch.exp(size - (p + q) / 2) * (1 + torch.exp(-2 * size))


def _determinant(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """$pq - r^2$, at least zero, as a product of two differences to spare the squares' rounding."""
    root = p.sqrt() * q.sqrt()
    return ((root - r) * (root + r)).clamp_min(0)


_NAMED = {
    "identity": Activation("identity", torch.clone, _identity_dual, _identity_slope_dual),
    "erf": Activation("erf", torch.erf, _erf_dual, _erf_slope_dual),
    "relu": Activation("relu", torch.relu, _relu_dual, _relu_slope_dual),
    "gelu": Activation("gelu", nn.functional.gelu, _gelu_dual, _gelu_slope_dual),
    "sin": Activation("sin", torch.sin, _sin_dual, _sin_slope_dual),
    "tanh": by_quadrature(torch.tanh, "tanh"),
    "silu": by_quadrature(nn.functional.silu, "silu"),
}

_MODULES = {kind: kind.__name__.lower() for kind in (nn.Identity, nn.ReLU, nn.Tanh, nn.SiLU)}
_PLACES = (torch, torch.special, nn.functional)
_KNOWN: dict[object, str] = {
    getattr(place, name): name for place in _PLACES for name in _NAMED if hasattr(place, name)
} | _MODULES


def _known_name(kind: object) -> str | None:
    """The closed form that a torch module or function has, if it has one."""
    if isinstance(kind, nn.GELU):
        return "gelu" if kind.approximate == "none" else None
    try:
        return _KNOWN.get(type(kind) if isinstance(kind, nn.Module) else kind)
    except TypeError:  # not hashable
        return None
