r"""The power spectrum: what of an expanded density does not change when the structure is turned.

$$ p^{l}_{kk'} = \frac{s_{kk'}}{\sqrt{2l+1}} \sum_m c_{klm}\, c_{k'lm}, \qquad k \le k', $$

for channels k (species and radial function), with $s = \sqrt 2$ for two different channels, so that
products of spectra are those of the full, symmetric table.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def power_spectrum(expansion: Tensor) -> Tensor:
    """Spectra of atoms.

    Args:
        expansion: (A, C, M) with M = (largest l + 1)^2.

    Returns:
        (A, D): l after l, of each the pairs of channels (k, k') with k <= k'.
    """
    channels, degrees = expansion.shape[-2], math.isqrt(expansion.shape[-1])
    first, second = torch.triu_indices(channels, channels, device=expansion.device)
    root = expansion.new_tensor(math.sqrt(2))
    factor = torch.where(first == second, torch.ones_like(root), root)
    parts = []
    for degree in range(degrees):
        part = expansion[..., degree**2 : (degree + 1) ** 2]
        products = Products.apply(part, part).flatten(-2)[..., first * channels + second]
        parts.append(products * (factor / math.sqrt(2 * degree + 1)))
    return torch.cat(parts, dim=-1)


def width(channels: int, angular: int) -> int:
    """Numbers of a spectrum.

    >>> width(30, 4)
    2325
    """
    return (angular + 1) * channels * (channels + 1) // 2


class Products(torch.autograd.Function):
    """a (A, K, m), b (A, L, m) -> a b^T (A, K, L), atom by atom.

    Under `vmap`, as for derivatives along many directions at once, torch would copy the factor that
    is the same for all directions and multiply tiny matrices one by one; here the directions become
    rows of the other factor.
    """

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        """The products."""
        return a @ b.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Both factors are needed for the derivatives."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        """By a and by b."""
        a, b = ctx.saved_tensors
        return Products.apply(slope, b.mT), Products.apply(slope.mT, a.mT)

    @staticmethod
    def jvp(ctx: Any, along_a: Tensor, along_b: Tensor) -> Tensor:
        """Along directions of a and b."""
        a, b = ctx.saved_tensors
        return Products.apply(along_a, b) + Products.apply(a, along_b)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, int | None], a: Tensor, b: Tensor) -> Any:
        """Many a, many b, or many of both."""
        if dims[1] is None:
            many = a.movedim(dims[0], 1)  # (A, B, K, m)
            found = Products.apply(many.flatten(1, 2), b)
            return found.unflatten(1, many.shape[1:3]), 1
        if dims[0] is None:
            many = b.movedim(dims[1], 1)
            found = Products.apply(a, many.flatten(1, 2))
            return found.unflatten(2, many.shape[1:3]), 2
        both = a.movedim(dims[0], 0), b.movedim(dims[1], 0)
        found = Products.apply(*(one.flatten(0, 1) for one in both))
        return found.unflatten(0, both[0].shape[:2]), 0
