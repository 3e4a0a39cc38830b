r"""The fast quadratic form $q = |R f|^2$ in the model's own precision, with a rounding bound.

R is the posterior's upper triangular factor. Its blocks below the diagonal are zero and are
never multiplied, which makes the extra cost of an error bar about half of a D x D layer.

`QuadraticForm.of` chooses the precision by the rounding bound and casts R. At the first call R is
cut into block rows (`BlockRow`). A call multiplies the features with each block, and joins the
norms of the products (`norms`).
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
"""A context that changes nothing, made once."""


class Split(NamedTuple):
    """A matrix written as unit * (high + low), both in half precision, for tensor cores.

    Attributes:
        high: matrix / unit, rounded.
        low: matrix / unit - high, rounded.
        unit: A power of two, so that the largest entry fits float16.
    """

    high: Tensor
    low: Tensor
    unit: Tensor

    @classmethod
    def of(cls, matrix: Tensor, dtype: torch.dtype) -> Split:
        """Split a matrix into two of a half precision.

        Together they have twice its digits, relative to the largest entry.
        """
        _, exponent = torch.frexp(matrix.abs().amax())
        unit = torch.ldexp(matrix.new_ones(()), exponent)
        high = (matrix / unit).to(dtype)
        low = (matrix / unit - high.to(matrix)).to(dtype)
        return cls(high, low, unit.float())

    def product(self, rows: Tensor) -> Tensor:
        """rows @ matrix / unit in float32, for rows (..., D) in the same half precision."""
        flat = rows.reshape(-1, rows.shape[-1])
        z = half_product(flat, self.low, half_product(flat, self.high))
        return z.reshape(*rows.shape[:-1], -1)


class BlockRow(NamedTuple):
    """A block row of R.

    Attributes:
        start: Its first column: features from there on are multiplied with it.
        matrix: The block row, transposed, (D - start, k), or (T, D - start, k).
        offset: Added to the product, (k,); None for nothing.
        halves: The matrix for rows in half precision, where tensor cores multiply them.
    """

    start: int
    matrix: Tensor
    offset: Tensor | None = None
    halves: Split | None = None

    def norm(self, features: Tensor) -> Tensor:
        """The norm of these entries of $R f$: (N, D) -> (N, 1), or (N, T)."""
        rows = features[..., self.start :] if self.start else features
        unit: Tensor | None = None
        if self.halves is not None and rows.dtype == self.halves.high.dtype:
            unit = self.halves.unit
            z = self.halves.product(rows)  # R f in units
            if self.offset is not None:
                z = z + self.offset / unit
        elif self.matrix.ndim == 3:  # one Gram per target
            equation = "nd,tdk->ntk" if rows.ndim == 2 else "ntd,tdk->ntk"
            z = torch.einsum(equation, rows, self.matrix)
        else:
            with full_products(rows) if rows.is_cuda else _AS_IT_IS:
                if self.offset is None:
                    z = rows @ self.matrix
                elif rows.ndim > 2:
                    z = rows @ self.matrix + self.offset
                else:
                    z = torch.addmm(self.offset, rows, self.matrix)
        norm: Tensor = torch.linalg.vector_norm(z, dim=-1, keepdim=z.ndim == 2)
        if unit is not None:
            norm = torch.mul(norm, unit)
        return norm


def norms(blocks: Sequence[BlockRow], features: Tensor) -> Tensor:
    r"""$|R f|$, the root of q, by the blocks of R: (N, D) -> (N, 1), or (N, T)."""
    block_norms = [block.norm(features) for block in blocks]
    if len(block_norms) == 1:
        return block_norms[0]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(block_norms), dim=0)
    return norm


@dataclass(frozen=True)
class QuadraticForm:
    """q for rows of features, in one precision.

    Attributes:
        factor: R, (D, D); (T, D, D) with one Gram per target.
        dtype: Precision of the product.
        rounding: Bound on the relative rounding error of the variances that come out: of the
            product itself (`rounding_bound`), of the result in the model's precision, and of the
            float64 Gram and its factorisation (`Posterior.float64_error`, and in mixed precision
            what was measured).
        half: The features' precision where R is split into two of that precision; see `Split`.
    """

    factor: Tensor
    dtype: torch.dtype
    rounding: float
    half: torch.dtype | None = None

    @classmethod
    def of(
        cls, posterior: Posterior, dtype: torch.dtype, largest: float = LARGEST_ROUNDING
    ) -> QuadraticForm:
        """The form in the model's precision where its rounding bound allows, else in float64.

        Args:
            posterior: The posterior of the readout's weights.
            dtype: The model's precision. Features in half precision are exact in float32.
            largest: Largest rounding bound to accept. Features in half precision are rounded
                themselves; for them a bound of a tenth of that rounding is accepted too.
        """
        wide = torch.promote_types(dtype, torch.float32)
        half: torch.dtype | None = None
        bound = rounding_bound(posterior, wide)
        result_rounding = 2 * torch.finfo(dtype).eps
        if dtype in HALVES:
            largest = max(largest, rounding_bound(posterior, dtype) / 10)
            if posterior.factor.is_cuda and posterior.factor.ndim == 2:
                half = dtype
                # Two halves miss the matrix by the square of their unit roundoff.
                bound *= 1 + (result_rounding / 4) ** 2 / (torch.finfo(wide).eps / 2)
        if bound > largest:
            wide = torch.float64
            half = None
            bound = rounding_bound(posterior, torch.float64)
        bound += result_rounding + posterior.float64_error + posterior.doubt
        return cls(factor=posterior.factor.to(wide), dtype=wide, rounding=bound, half=half)

    def __call__(self, features: Tensor) -> Tensor:
        """q: (N, D) -> (N,); with one block of features or one Gram per target (N, T)."""
        q = self.root(features).square()
        return q.squeeze(-1) if features.ndim == 2 and self.factor.ndim == 2 else q

    def root(self, features: Tensor, *, ones: bool = False) -> Tensor:
        r"""$\sqrt q$: (N, D) -> (N, 1); with one block of features or one Gram per target (N, T).

        Args:
            features: The rows.
            ones: Whether the features come without their last column, which is one.
        """
        if ones and self.factor.ndim == 3:  # one Gram per target has no offsets
            features = with_ones(features)
            ones = False
        if features.dtype != self.half:
            features = features.to(self.dtype)
        blocks = self.affine if ones else self.blocks
        if len(blocks) == 1:
            return blocks[0].norm(features)
        return norms(blocks, features)

    @cached_property
    def blocks(self) -> list[BlockRow]:
        """R[start:stop, start:]^T of each block row of R."""
        return self.make_blocks(ones=False)

    @cached_property
    def affine(self) -> list[BlockRow]:
        """`blocks` for features without their last column, which is one.

        The last column of R becomes the blocks' offsets.
        """
        return self.make_blocks(ones=True)

    def make_blocks(self, *, ones: bool, constant: float = 0.0) -> list[BlockRow]:
        """Cut R into block rows.

        Args:
            ones: Whether features lack their last column, which is one. The last column of R is
                then an offset.
            constant: Number that is added to q.
        """
        factor = self.factor
        width = factor.shape[-1] - 1 if ones else factor.shape[-1]  # of the features
        if self.half is None:
            step = block_height(width, factor.device.type, few=1024)
        else:
            step = block_height(width, factor.device.type, few=4096, most=4)
        blocks = []
        for start in range(0, width, step):
            rows = factor[..., start : min(start + step, width), :]
            matrix = rows[..., start:width].mT.contiguous()
            offset = rows[:, -1].contiguous() if ones else None
            blocks.append(BlockRow(start, matrix, offset))
        if ones:
            # The last row of R has one entry, which meets the one: it adds a constant to q.
            constant += float(factor[-1, -1]) ** 2
        if constant > 0:
            blocks[-1] = self._with_constant(blocks[-1], constant)
        if self.half is not None:
            blocks = [block._replace(halves=Split.of(block.matrix, self.half)) for block in blocks]
        return blocks

    def _with_constant(self, block: BlockRow, constant: float) -> BlockRow:
        """The block with one more entry in its product, the root of what is added to q."""
        matrix = block.matrix
        offset = matrix.new_zeros(matrix.shape[1]) if block.offset is None else block.offset
        # Tensor cores multiply eight columns at a time; further new entries are zero.
        columns = 1 if self.half is None else 8 - matrix.shape[1] % 8
        offset = torch.nn.functional.pad(offset, (0, columns))
        offset[-columns] = math.sqrt(constant)
        return BlockRow(block.start, torch.nn.functional.pad(matrix, (0, columns)), offset)


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
