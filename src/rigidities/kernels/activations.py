r"""Activations with their duals: what one hidden layer does to a kernel.

The dual of $\phi$ maps the covariance of two pre-activations to that of the activations,
$E[\phi(u)\phi(v)]$ for $(u, v) \sim N(0, \binom{p\ r}{r\ q})$; the dual of $\phi'$ carries the
tangent kernel. erf, ReLU, GELU, sin and the identity have closed forms (`duals`); tanh, SiLU and
any callable use quadrature (`quadrature`), with the derivative by automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from . import duals
from .quadrature import Function, mehler_dual

Dual = Callable[[Tensor, Tensor, Tensor], Tensor]
ActivationLike: TypeAlias = "str | Activation | nn.Module | Function"

_SLACK = 1e-9
"""How far |r| may exceed sqrt(pq), relative to it, before it is an error and not rounding."""


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
            raise ValueError(
                f"Unknown activation {kind!r}. Known: {', '.join(sorted(_NAMED))}; or pass a "
                "smooth elementwise callable."
            )
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
    dual = partial(_quadrature_dual, partial(_values, function), label)
    slope = partial(_quadrature_dual, partial(_derivative, function), f"derivative of {label}")
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


def _quadrature_dual(function: Function, name: str, p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    return mehler_dual(function, p, q, r, name)


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


_NAMED = {
    "identity": Activation("identity", torch.clone, duals.identity_dual, duals.identity_slope_dual),
    "erf": Activation("erf", torch.erf, duals.erf_dual, duals.erf_slope_dual),
    "relu": Activation("relu", torch.relu, duals.relu_dual, duals.relu_slope_dual),
    "gelu": Activation("gelu", nn.functional.gelu, duals.gelu_dual, duals.gelu_slope_dual),
    "sin": Activation("sin", torch.sin, duals.sin_dual, duals.sin_slope_dual),
    "tanh": by_quadrature(torch.tanh, "tanh"),
    "silu": by_quadrature(nn.functional.silu, "silu"),
}

_FUNCTIONS: dict[object, str] = {
    torch.erf: "erf",
    torch.special.erf: "erf",
    torch.relu: "relu",
    nn.functional.relu: "relu",
    nn.functional.gelu: "gelu",
    torch.sin: "sin",
    torch.tanh: "tanh",
    nn.functional.tanh: "tanh",
    nn.functional.silu: "silu",
}

_MODULES: dict[type[nn.Module], str] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.SiLU: "silu",
}


def _known_name(kind: object) -> str | None:
    """The closed form that a torch module or function has, if it has one."""
    if isinstance(kind, nn.GELU):
        return "gelu" if kind.approximate == "none" else None
    if isinstance(kind, nn.Module):
        return _MODULES.get(type(kind))
    try:
        return _FUNCTIONS.get(kind)
    except TypeError:  # not hashable
        return None
