r"""NNGP and NTK of an infinitely wide fully connected network.

$$ K^{(0)} = \Theta^{(0)} = \sigma_w^2\, s\, x^\top x' + \sigma_b^2, \qquad
   K^{(l)} = \sigma_w^2\, \check\phi(K^{(l-1)}) + \sigma_b^2, \qquad
   \Theta^{(l)} = K^{(l)} + \sigma_w^2\, \Theta^{(l-1)}\, \check\phi'(K^{(l-1)}) $$

for $l = 1 \dots L$ hidden layers (the paper's recursion, appendix "Power series expansion of the
NTK", with the variances of weights and biases kept). $\check\phi$ is the dual activation and
$\check\phi'$ that of the derivative.

$\check\phi$ at a pair of inputs depends on both variances besides the covariance, so the diagonals
are computed along with the matrix: they are N + M numbers per layer, and each layer then costs one
elementwise map of the N x M matrix.

References: J. Lee et al., "Deep neural networks as Gaussian processes" (2018); A. Jacot, F. Gabriel
and C. Hongler, "Neural tangent kernel" (2018).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .activations import Activation, ActivationLike, activation

__all__ = ["FullyConnected", "Kernels"]


class Kernels(NamedTuple):
    """Both kernels of one network between the same inputs.

    Attributes:
        nngp: Covariance of the outputs at initialisation.
        ntk: The tangent kernel.
    """

    nngp: Tensor
    ntk: Tensor


@dataclass(frozen=True)
class FullyConnected:
    r"""The infinitely wide network in NTK parametrisation.

    Each layer is $z = \sigma_w W a / \sqrt n + \sigma_b b$, with entries of W and b from N(0, 1).

    Args:
        depth: The number L of hidden layers; 0 is a linear model.
        activation: Anything that `rigidities.theory.kernels.activation` takes.
        weight_variance: $\sigma_w^2$.
        bias_variance: $\sigma_b^2$.
        input_scale: The factor s of the inputs' products; "dim" for 1 / (number of inputs), 1.0 in
            the paper.
        normalised: Whether to scale the activation so that $E[\phi(z)^2] = 1$ at unit variance, as
            the paper does: inputs of unit length then have unit variance in all layers.

    Raises:
        ValueError: A number is out of its range.

    Examples:
        >>> x = torch.eye(2, dtype=torch.float64)
        >>> network = FullyConnected(depth=1, activation="identity", input_scale=1.0)
        >>> network.ntk(x).tolist()  # L + 1 times the inner products
        [[2.0, 0.0], [0.0, 2.0]]
    """

    depth: int
    activation: ActivationLike
    weight_variance: float = 1.0
    bias_variance: float = 0.0
    input_scale: Literal["dim"] | float = "dim"
    normalised: bool = False
    _phi: Activation = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise ValueError(f"depth is the number of hidden layers, at least 0; got {self.depth}.")
        for name in ("weight_variance", "bias_variance"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {value}.")
        if self.input_scale != "dim" and not 0 < float(self.input_scale) < float("inf"):
            raise ValueError(f"input_scale must be 'dim' or positive, got {self.input_scale!r}.")
        phi = activation(self.activation)
        if self.normalised:
            phi = phi.normalised()
        object.__setattr__(self, "_phi", phi)

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Covariance of the outputs at initialisation, (N, M)."""
        return self._kernels(x, z, tangent=False).nngp

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The tangent kernel, (N, M)."""
        return self._kernels(x, z, tangent=True).ntk

    def kernels(self, x: Tensor, z: Tensor | None = None) -> Kernels:
        """Both kernels, at the cost of the NTK alone.

        Args:
            x: Inputs (N, d).
            z: Inputs (M, d); by default x itself.

        Returns:
            (N, M) each, float64.
        """
        return self._kernels(x, z, tangent=True)

    def diagonal(self, x: Tensor) -> Kernels:
        """k(x, x) of both kernels, (N,) each, without the matrix."""
        x = _inputs(x, "x")
        variance = self._first_layer(x.square().sum(1), x.shape[1])
        return self._recursion(variance, variance, variance, tangent=True)

    def _kernels(self, x: Tensor, z: Tensor | None, *, tangent: bool) -> Kernels:
        """Both kernels; the NTK is meaningless unless `tangent`."""
        x = _inputs(x, "x")
        other = x if z is None else _inputs(z, "z")
        if other.shape[1] != x.shape[1]:
            raise ValueError(
                "x and z must have the same number of columns, got "
                f"{tuple(x.shape)} and {tuple(other.shape)}."
            )
        width = x.shape[1]
        p = self._first_layer(x.square().sum(1), width)  # (N,)
        q = p if z is None else self._first_layer(other.square().sum(1), width)  # (M,)
        r = self._first_layer(x @ other.mT, width)  # (N, M)
        bound = p.sqrt()[:, None] * q.sqrt()
        r = torch.clamp(r, -bound, bound)
        if z is not None:
            return self._recursion(p[:, None], q[None], r, tangent=tangent)
        r.diagonal().copy_(p)  # else rounding would look like a correlation below 1
        nngp, ntk = self._recursion(p[:, None], q[None], r, tangent=tangent)
        return Kernels(nngp=(nngp + nngp.mT) / 2, ntk=(ntk + ntk.mT) / 2)

    def _first_layer(self, products: Tensor, width: int) -> Tensor:
        """$K^{(0)}$ from the inputs' products."""
        scale = 1 / width if self.input_scale == "dim" else self.input_scale
        return self.weight_variance * scale * products + self.bias_variance

    def _recursion(self, p: Tensor, q: Tensor, r: Tensor, *, tangent: bool) -> Kernels:
        """L layers of variances p and q, covariances r and, if `tangent`, the tangent kernel."""
        phi = self._phi
        w = self.weight_variance
        b = self.bias_variance
        ntk = r
        for _ in range(self.depth):
            nngp = w * phi.dual(p, q, r) + b
            if tangent:
                ntk = nngp + w * phi.slope_dual(p, q, r) * ntk
            p = w * phi.moment(p) + b
            q = w * phi.moment(q) + b
            r = nngp
        return Kernels(nngp=r, ntk=ntk)


def _inputs(x: Tensor, name: str) -> Tensor:
    """Inputs (N, d) in float64, checked."""
    x = torch.as_tensor(x).detach().to(torch.float64)
    if x.ndim != 2:
        raise ValueError(f"{name} must be (N, d), one row per input, got {tuple(x.shape)}.")
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name} contains NaN or infinity. Clean the inputs.")
    return x
