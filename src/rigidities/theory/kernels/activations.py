r"""Activations with their duals: what one hidden layer does to a kernel.

$$ \check\phi = E[\phi(u)\, \phi(v)], \qquad \check\phi' = E[\phi'(u)\, \phi'(v)], \qquad
   (u, v) \sim N\left(0, \binom{p\ r}{r\ q}\right) $$

(the paper's dual activation, appendix "Power series expansion of the NTK", for any variances p and
q). The dual of $\phi$ maps the covariance of two pre-activations to that of the activations; the
dual of $\phi'$ carries the tangent kernel. For tanh, SiLU and any callable they are computed by
`quadrature`, with the derivative by automatic differentiation; the others have closed forms:

| $\phi$ | $E[\phi(u)\phi(v)]$ | $E[\phi'(u)\phi'(v)]$ |
| --- | --- | --- |
| x | r | 1 |
| erf x | (2/π) asin(2r / √((1+2p)(1+2q))) | (4/π) / √((1+2p)(1+2q) - 4r²) |
| max(x, 0) | √(pq) (sin θ + (π-θ) cos θ) / 2π | (π-θ) / 2π, cos θ = r/√(pq) |
| x Φ(x) | (r ψ + (pqD + r²) / (AB√D)) / 2π | (ψ + (r/√D) (1/A + 1/B + 1/D)) / 2π |
| sin x | exp(-(p+q)/2) sinh r | exp(-(p+q)/2) cosh r |

with A = 1+p, B = 1+q, D = AB - r² and cos ψ = -r/√(AB). (The paper's integral has the covariance
where its inverse is meant, and a normaliser that depends on it; these are plain expectations.)

GELU: with $g = \Phi(u)\Phi(v)$, applying Stein's lemma twice gives
$E[uvg] = r E[g] + pr E[g_{uu}] + (pq + r^2) E[g_{uv}] + qr E[g_{vv}]$, where
$E[g] = \psi/2\pi$, $E[g_{uv}] = 1/(2\pi\sqrt D)$ and, as $E[g]$ obeys the heat equation in p,
$E[g_{uu}] = 2\, \partial_p E[g] = -r / (2\pi A \sqrt D)$; the derivative's dual is $\partial_r$ of
the result (Price's theorem).

Angles come from `atan2` of two sides of a triangle, which keeps their digits near correlation
$\pm 1$, where an arc sine or cosine loses half of them. The closed forms take float64 tensors that
broadcast, with $p, q \ge 0$ and $r^2 \le pq$ (an excess by rounding is clamped).

References: C. Williams, "Computing with infinite networks" (1997), for erf; Y. Cho and L. Saul,
"Kernel methods for deep learning" (2009), for ReLU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ...models.derivatives import slopes
from .quadrature import Function, mehler_dual

__all__ = ["Activation", "ActivationLike", "activation", "by_quadrature"]

Dual = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of variances p and q and covariances r, which broadcast, to expectations."""

ActivationLike: TypeAlias = "str | Activation | nn.Module | Function"

_SLACK = 1e-9
"""The relative amount by which |r| may exceed sqrt(pq) because of rounding."""

_NO_DERIVATIVE = (
    "Torch cannot differentiate the activation (does it use NumPy, detach or no_grad?). Write it "
    "in torch operations."
)


@dataclass(frozen=True)
class Activation:
    r"""An activation $\phi$ and its duals, multiplied by `factor` where it is normalised.

    Attributes:
        name: Its name in messages and tables.
        function: $\phi$, elementwise.
        raw_dual: $E[\phi(u)\phi(v)]$ of (p, q, r).
        raw_slope_dual: $E[\phi'(u)\phi'(v)]$ of (p, q, r).
        factor: A number that multiplies both; $1 / E[\phi(z)^2]$ in the paper's normalisation.

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
            p: Variances of u, not negative.
            q: Variances of v, not negative.
            r: Covariances, $r^2 \le pq$. All three broadcast.

        Returns:
            float64, of the broadcast shape.

        Raises:
            ValueError: The numbers are not variances and covariances.
        """
        p, q, r = checked_covariances(p, q, r)
        return self.factor * self.raw_dual(p, q, r)

    def slope_dual(self, p: Tensor, q: Tensor, r: Tensor) -> Tensor:
        r"""$E[\phi'(u)\phi'(v)]$, elementwise; arguments as in `dual`."""
        p, q, r = checked_covariances(p, q, r)
        return self.factor * self.raw_slope_dual(p, q, r)

    def moment(self, variance: Tensor) -> Tensor:
        r"""$E[\phi(u)^2]$ for $u \sim N(0, p)$."""
        return self.dual(variance, variance, variance)

    def normalised(self) -> Activation:
        r"""The same with $E[\phi(z)^2] = 1$ at unit variance: the paper's $\check\phi(1) = 1$."""
        moment = float(self.moment(torch.ones((), dtype=torch.float64)))
        if not moment > 0:
            raise ValueError(f"The activation {self.name!r} is zero, so it cannot be normalised.")
        return replace(self, factor=self.factor / moment)


def activation(kind: ActivationLike) -> Activation:
    """The `Activation` for a name, a torch module or any callable.

    Args:
        kind: "erf", "gelu", "identity", "relu", "silu", "sin" or "tanh"; an `nn.Module` such as
            `nn.SiLU()` or a torch function such as `torch.tanh`; or an elementwise, smooth
            callable written in torch.

    Raises:
        ValueError: The name is unknown.
        TypeError: It is neither a name nor callable.

    Examples:
        >>> activation(nn.GELU()).name, activation(torch.nn.functional.silu).name
        ('gelu', 'silu')
    """
    if isinstance(kind, Activation):
        return kind
    if isinstance(kind, str):
        if kind not in _NAMED:
            raise ValueError(
                f"Unknown activation {kind!r}. Known: {', '.join(sorted(_NAMED))}; or pass a "
                "smooth elementwise callable."
            )
        return _NAMED[kind]
    if not callable(kind):
        raise TypeError(f"An activation must be a name or a callable, got {type(kind).__name__}.")
    name = _name_of(kind)
    if name is None:
        return by_quadrature(kind)
    return _NAMED[name]


def by_quadrature(function: Function, name: str | None = None) -> Activation:
    """An activation whose duals are computed by quadrature.

    Args:
        function: A smooth elementwise function in torch.
        name: Its name in messages; by default the function's own.
    """
    if not name:
        name = str(getattr(function, "__name__", type(function).__name__))
    dual = _QuadratureDual(_Values(function), name)
    slope_dual = _QuadratureDual(_Derivative(function), f"derivative of {name}")
    return Activation(name, function, dual, slope_dual)


def checked_covariances(p: Tensor, q: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Variances and covariances in float64; raises ValueError for impossible ones."""
    p = _finite_float64(p, "p")
    q = _finite_float64(q, "q")
    r = _finite_float64(r, "r")
    if p.numel() and q.numel():
        smallest = min(float(p.min()), float(q.min()))
        if smallest < 0:
            raise ValueError(f"Variances must not be negative, got {smallest:.3g}.")
    largest_covariance = p.sqrt() * q.sqrt()
    tiny = torch.finfo(torch.float64).tiny
    if bool((r.abs() > largest_covariance * (1 + _SLACK) + tiny).any()):
        raise ValueError(
            "These are not covariances: |r| exceeds sqrt(p q) somewhere. Pass p = k(x, x), q = "
            "k(z, z) and r = k(x, z) of the same kernel."
        )
    return p, q, r


def _finite_float64(values: Tensor, name: str) -> Tensor:
    """The values in float64; NaN and infinity are refused."""
    tensor = torch.as_tensor(values).detach().to(torch.float64)
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"The covariances contain NaN or infinity (in {name}). Clean the inputs.")
    return tensor


# Classes, not closures, so that activations can be pickled and copied.


@dataclass(frozen=True)
class _Values:
    """A user's activation, with a check of the shape that it returns."""

    function: Function

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            values = self.function(x)
        got = tuple(torch.as_tensor(values).shape)
        if got != tuple(x.shape):
            raise ValueError(
                "An activation must act on each number separately: for an input of shape "
                f"{tuple(x.shape)} expected the same shape, got {got}."
            )
        return values


@dataclass(frozen=True)
class _Derivative:
    """The derivative of a user's activation, by automatic differentiation."""

    function: Function

    def __call__(self, x: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return slopes(self.function, x.clone(), unconnected=_NO_DERIVATIVE)


@dataclass(frozen=True)
class _QuadratureDual:
    """The dual of a function by quadrature; the name is for messages."""

    function: Function
    name: str

    def __call__(self, p: Tensor, q: Tensor, r: Tensor) -> Tensor:
        return mehler_dual(self.function, p, q, r, self.name)


def _identity_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """The covariance itself."""
    return r + 0 * (p + q)  # of the broadcast shape


def _identity_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """One everywhere."""
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
    """P(u > 0, v > 0); 1/4 where a variance is zero (the slope at zero is taken as 1/2)."""
    side = _determinant(p, q, r).sqrt()
    share = torch.atan2(side, -r) / (2 * math.pi)
    return torch.where((p > 0) & (q > 0), share, 0.25)


def _gelu_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """For x Φ(x), the exact GELU."""
    a = 1 + p
    b = 1 + q
    d = 1 + p + q + _determinant(p, q, r)
    angle = torch.atan2(d.sqrt(), -r)
    return (r * angle + (p * q * d + r * r) / (a * b * d.sqrt())) / (2 * math.pi)


def _gelu_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    r"""For $\phi' = \Phi(x) + x \varphi(x)$."""
    a = 1 + p
    b = 1 + q
    d = 1 + p + q + _determinant(p, q, r)
    angle = torch.atan2(d.sqrt(), -r)
    return (angle + r * d.rsqrt() * (1 / a + 1 / b + 1 / d)) / (2 * math.pi)


def _sin_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """By the characteristic function; written so that no exponent is positive."""
    size = r.abs()
    return -0.5 * r.sign() * torch.exp(size - (p + q) / 2) * torch.expm1(-2 * size)


def _sin_slope_dual(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """For cos x, in the same way."""
    size = r.abs()
    return 0.5 * torch.exp(size - (p + q) / 2) * (1 + torch.exp(-2 * size))


def _determinant(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """$pq - r^2$, at least zero, as a product, which rounds less than a difference of squares."""
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


def _torch_names() -> dict[object, str]:
    """The names of torch's own functions and modules among the named activations."""
    names: dict[object, str] = {
        nn.Identity: "identity",
        nn.ReLU: "relu",
        nn.Tanh: "tanh",
        nn.SiLU: "silu",
    }
    for namespace in (torch, torch.special, nn.functional):
        for name in _NAMED:
            if hasattr(namespace, name):
                names[getattr(namespace, name)] = name
    return names


_TORCH_NAMES = _torch_names()


def _name_of(kind: object) -> str | None:
    """The name of a torch module or function among the named activations, if it has one."""
    if isinstance(kind, nn.GELU):
        return "gelu" if kind.approximate == "none" else None
    key = type(kind) if isinstance(kind, nn.Module) else kind
    try:
        return _TORCH_NAMES.get(key)
    except TypeError:  # not hashable
        return None
