r"""The power spectrum: a descriptor that does not change when the structure is turned.

$$ p^{l}_{kk'} = \frac{s_{kk'}}{\sqrt{2l+1}} \sum_m c_{klm}\, c_{k'lm}, \qquad k \le k', $$

of an expanded density c with channels k (species and radial function), where $s = \sqrt 2$ for two
different channels, so that products of spectra are those of the full, symmetric table.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def power_spectrum(expansion: Tensor) -> Tensor:
    """Spectra of atoms.

    Args:
        expansion: Expanded densities, (A, C, M) with M = (largest l + 1)^2.

    Returns:
        (A, D): l after l, and for each l the pairs of channels (k, k') with k <= k'.
    """
    channels = expansion.shape[-2]
    degrees = math.isqrt(expansion.shape[-1])
    first, second = torch.triu_indices(channels, channels, device=expansion.device)
    root = expansion.new_tensor(math.sqrt(2))
    factor = torch.where(first == second, torch.ones_like(root), root)
    spectra = []
    for degree in range(degrees):
        coefficients = expansion[..., degree**2 : (degree + 1) ** 2]  # (A, C, 2 l + 1)
        products = Products.apply(coefficients, coefficients)  # (A, C, C)
        upper_triangle = products.flatten(-2)[..., first * channels + second]
        spectra.append(upper_triangle * (factor / math.sqrt(2 * degree + 1)))
    return torch.cat(spectra, dim=-1)


def width(channels: int, angular: int) -> int:
    """The number of entries of a spectrum.

    >>> width(30, 4)
    2325
    """
    return (angular + 1) * channels * (channels + 1) // 2


class Products(torch.autograd.Function):
    """The product a b^T of every atom: (A, K, m), (A, L, m) -> (A, K, L).

    Under `vmap`, as for derivatives along many directions at once, torch would copy the factor that
    is the same for all directions and multiply tiny matrices one by one. Here the directions become
    rows of the other factor.
    """

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        """The products."""
        return a @ b.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save both factors for the derivatives."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients by a and by b, given that by the product."""
        a, b = ctx.saved_tensors
        return Products.apply(gradient, b.mT), Products.apply(gradient.mT, a.mT)

    @staticmethod
    def jvp(ctx: Any, along_a: Tensor, along_b: Tensor) -> Tensor:
        """The derivative along directions of a and b."""
        a, b = ctx.saved_tensors
        return Products.apply(along_a, b) + Products.apply(a, along_b)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, int | None], a: Tensor, b: Tensor) -> Any:
        """Products of many a, of many b, or of many of both; returns the place of their dimension.

        Args:
            info: Not used.
            dims: The dimensions of a and b that count them; None for a single one.
            a: The first factor or factors.
            b: The second factor or factors.
        """
        a_dim, b_dim = dims
        if b_dim is None:
            many = a.movedim(a_dim, 1)  # (A, B, K, m)
            products = Products.apply(many.flatten(1, 2), b)
            return products.unflatten(1, many.shape[1:3]), 1
        if a_dim is None:
            many = b.movedim(b_dim, 1)  # (A, B, L, m)
            products = Products.apply(a, many.flatten(1, 2))
            return products.unflatten(2, many.shape[1:3]), 2
        many_a = a.movedim(a_dim, 0)  # (B, A, K, m)
        many_b = b.movedim(b_dim, 0)
        products = Products.apply(many_a.flatten(0, 1), many_b.flatten(0, 1))
        return products.unflatten(0, many_a.shape[:2]), 0
