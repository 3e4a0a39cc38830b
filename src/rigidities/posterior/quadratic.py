r"""The fast quadratic form $q = |R f|^2$ in the model's own precision, with a rounding bound.

R is the posterior's upper triangular factor. Its blocks below the diagonal are zero and are
never multiplied, which makes the extra cost of an error bar about half of a D x D layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .gram import HALVES, block_height, full_products, half_product, with_ones
from .posterior import LARGEST_ROUNDING, Posterior

_AS_IT_IS = nullcontext()


class Split(NamedTuple):
    """A matrix as unit (high + low), the two in half precision, for tensor cores.

    Attributes:
        high: the matrix in its unit, rounded.
        low: what that leaves, rounded.
        unit: a power of two, so that the largest entry fits float16.
    """

    high: Tensor
    low: Tensor
    unit: Tensor

    @classmethod
    def of(cls, matrix: Tensor, dtype: torch.dtype) -> Split:
        """In that precision, whose digits it has twice, relative to the largest entry."""
        _, exponent = torch.frexp(matrix.abs().amax())
        unit = torch.ldexp(matrix.new_ones(()), exponent)
        high = (matrix / unit).to(dtype)
        return cls(high, (matrix / unit - high.to(matrix)).to(dtype), unit.float())

    def product(self, rows: Tensor) -> Tensor:
        """Rows (..., D) of the same precision times the matrix, float32, in its unit."""
        flat = rows.reshape(-1, rows.shape[-1])
        z = half_product(flat, self.low, half_product(flat, self.high))
        return z.reshape(*rows.shape[:-1], -1)


class Block(NamedTuple):
    """What a block row of R is multiplied with: features from `start` on; then the offset."""

    start: int
    matrix: Tensor
    offset: Tensor | None = None
    halves: Split | None = None

    def norm(self, features: Tensor) -> Tensor:
        """Of this part of $R f$: (N, D) -> (N, 1), or (N, T); by halves for rows of their kind."""
        rows = features[..., self.start :] if self.start else features
        matrix, offset, halves = self.matrix, self.offset, self.halves
        if halves is not None and rows.dtype == halves.high.dtype:
            z = halves.product(rows)
            z = z if offset is None else z + offset / halves.unit
            return torch.mul(_row_norms(z), halves.unit)
        if matrix.ndim == 3:
            z = torch.einsum("nd,tdk->ntk" if rows.ndim == 2 else "ntd,tdk->ntk", rows, matrix)
        else:
            with full_products(rows) if rows.is_cuda else _AS_IT_IS:
                if offset is None or rows.ndim > 2:
                    z = rows @ matrix if offset is None else rows @ matrix + offset
                else:
                    z = torch.addmm(offset, rows, matrix)
        return _row_norms(z)


def norms(blocks: Sequence[Block], features: Tensor) -> Tensor:
    r"""$|R f|$, the root of q, by the blocks of R: (N, D) -> (N, 1), or (N, T)."""
    each = [block.norm(features) for block in blocks]
    if len(each) == 1:
        return each[0]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return whole


def _row_norms(rows: Tensor) -> Tensor:
    """(N, k) -> (N, 1), (N, T, k) -> (N, T)."""
    norm: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=rows.ndim == 2)
    return norm


@dataclass(frozen=True)
class QuadraticForm:
    """q for rows of features, in one precision.

    Attributes:
        factor: R; for one posterior per target it has a leading dimension T.
        dtype: the precision of the product.
        rounding: bound on the relative rounding error of the variances that come out: of the
            product itself (`rounding_bound`), of the result in the model's precision, and of the
            float64 Gram and its factorisation (`Posterior.float64_error`, and in mixed precision
            what was measured).
        half: the features' precision where R is split into two of that; see `Split`.
    """

    factor: Tensor
    dtype: torch.dtype
    rounding: float
    half: torch.dtype | None = None

    @classmethod
    def of(
        cls, posterior: Posterior, dtype: torch.dtype, largest: float = LARGEST_ROUNDING
    ) -> QuadraticForm:
        """The form in `dtype` where its rounding bound is no larger than that, else in float64.

        Features in half precision are exact in float32, and bring a rounding of their own, of
        which the product may add a tenth.
        """
        wide, result = torch.promote_types(dtype, torch.float32), 2 * torch.finfo(dtype).eps
        bound, allowed, half = rounding_bound(posterior, wide), largest, None
        if dtype in HALVES:
            allowed = max(allowed, rounding_bound(posterior, dtype) / 10)
            if posterior.factor.is_cuda and posterior.factor.ndim == 2:
                half = dtype
                bound *= 1 + (result / 4) ** 2 / (torch.finfo(wide).eps / 2)
        if bound > allowed:
            wide, half, bound = torch.float64, None, rounding_bound(posterior, torch.float64)
        bound += result + posterior.float64_error + posterior.doubt
        return cls(posterior.factor.to(wide), wide, bound, half)

    def __call__(self, features: Tensor) -> Tensor:
        """q: (N, D) -> (N,); with one block of features or one Gram per target (N, T)."""
        q = self.root(features).square()
        return q.squeeze(-1) if features.ndim == 2 and self.factor.ndim == 2 else q

    def root(self, features: Tensor, *, ones: bool = False) -> Tensor:
        r"""$\sqrt q$: (N, D) -> (N, 1); with one block of features or one Gram per target (N, T).

        With `ones` the features come without their last column, which is one.
        """
        apart = ones and self.factor.ndim == 3  # one Gram per target has no offsets
        features = with_ones(features) if apart else features
        features = features if features.dtype == self.half else features.to(self.dtype)
        return norms(self.affine if ones and not apart else self.blocks, features)

    @cached_property
    def blocks(self) -> list[Block]:
        """R[start:stop, start:]^T of each block row of R."""
        return self.made(ones=False)

    @cached_property
    def affine(self) -> list[Block]:
        """The same for features without their last column, which is one: R's is an offset."""
        return self.made(ones=True)

    def made(self, *, ones: bool, constant: float = 0.0) -> list[Block]:
        """The blocks; with `ones` the last column is an offset. `constant` is added to q.

        What does not depend on the features, the last row's entry and the constant, is one more
        entry of the last block's product.
        """
        factor, width, blocks = self.factor, self.factor.shape[-1] - ones, []
        step = block_height(width, factor.device.type, *((4096, 4) if self.half else (1024,)))
        for i in range(0, width, step):
            rows = factor[..., i : min(i + step, width), :]
            matrix = rows[..., i:width].mT.contiguous()
            blocks.append(Block(i, matrix, rows[:, -1].contiguous() if ones else None))
        if ones:
            constant += float(factor[-1, -1]) ** 2
        if constant > 0:
            start, matrix, offset, _ = blocks[-1]
            entries = matrix.new_zeros(matrix.shape[1]) if offset is None else offset
            more = 1 if self.half is None else 8 - matrix.shape[1] % 8  # tensor cores take eights
            entries = torch.nn.functional.pad(entries, (0, more))
            entries[-more] = math.sqrt(constant)
            blocks[-1] = Block(start, torch.nn.functional.pad(matrix, (0, more)), entries)
        if self.half is not None:
            blocks = [block._replace(halves=Split.of(block.matrix, self.half)) for block in blocks]
        return blocks


def rounding_bound(posterior: Posterior, dtype: torch.dtype) -> float:
    r"""Bound on the relative rounding error of $q = |R f|^2$, whatever the features.

    With unit roundoff u the error of $z = R f$ is below
    $\sqrt{D}\, u \max_j |R e_j|\, |f|$ (rounding errors of a sum taken as independent:
    Higham and Mary, 2019), and $|f| \le |z| \sqrt{\lambda_{\max} + s}$; q has twice the
    relative error of z:

    $$ 2 u \sqrt{D\, (\lambda_{\max} + s)\, \max_j M_{jj}}, \qquad M = (G + s I)^{-1}. $$
    """
    unit = torch.finfo(dtype).eps / 2
    diagonal = posterior.factor.square().sum(-2).amax(-1)
    largest = posterior.precisions[..., -1]
    return float((2 * unit * (posterior.width * largest * diagonal).sqrt()).max())
