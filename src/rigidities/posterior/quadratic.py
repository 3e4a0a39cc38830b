r"""The fast quadratic form $q = |R f|^2$ in the model's own precision, with a rounding bound.

R is the posterior's upper triangular factor. Its blocks below the diagonal are zero and are
never multiplied, which makes the extra cost of an error bar about half of a D x D layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .gram import with_ones
from .posterior import LARGEST_ROUNDING, Posterior

Block = tuple[int, Tensor, Tensor | None]


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
    """

    factor: Tensor
    dtype: torch.dtype
    rounding: float

    @classmethod
    def of(cls, posterior: Posterior, dtype: torch.dtype) -> QuadraticForm:
        """The form in `dtype` where its rounding bound allows it, else in float64."""
        bound, result = rounding_bound(posterior, dtype), 2 * torch.finfo(dtype).eps
        if bound > LARGEST_ROUNDING:
            dtype, bound = torch.float64, rounding_bound(posterior, torch.float64)
        bound += result + posterior.float64_error + posterior.doubt
        return cls(posterior.factor.to(dtype), dtype, bound)

    def __call__(self, features: Tensor, *, ones: bool = False) -> Tensor:
        """(N, D) -> (N,); with one block of features or one Gram per target (N, T).

        With `ones` the features come without their last column, which is one.
        """
        features = features.to(self.dtype)
        if ones and self.factor.ndim == 2:
            blocks, total = self._affine
        else:
            features = with_ones(features) if ones else features
            blocks, total = self._blocks, None
        for start, block, offset in blocks:
            rows = features[..., start:] if start else features
            if block.ndim == 3:
                pattern = "nd,tdk->ntk" if rows.ndim == 2 else "ntd,tdk->ntk"
                z = torch.einsum(pattern, rows, block)
            else:
                z = rows @ block if offset is None else torch.addmm(offset, rows, block)
            norm = torch.linalg.vector_norm(z, dim=-1).square()
            total = norm if total is None else total + norm
        assert total is not None
        return total

    @cached_property
    def _blocks(self) -> list[Block]:
        """Start and R[start:stop, start:]^T of each block row of R."""
        factor, step = self.factor, _step(self.factor.shape[-1], self.factor.device.type)
        starts = range(0, factor.shape[-1], step)
        return [(i, factor[..., i : i + step, i:].mT.contiguous(), None) for i in starts]

    @cached_property
    def _affine(self) -> tuple[list[Block], Tensor]:
        """The same without the last column, which is an offset, and what the last row adds."""
        factor, width = self.factor, self.factor.shape[-1] - 1
        step, offset = _step(width, factor.device.type), factor[:, -1].contiguous()
        cuts = [(i, min(i + step, width)) for i in range(0, width, step)]
        blocks: list[Block] = []
        for i, j in cuts:
            blocks.append((i, factor[i:j, i:width].mT.contiguous(), offset[i:j]))
        return blocks, offset[-1].square()


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


def features_doubt(posterior: Posterior, dtype: torch.dtype) -> float:
    """Relative error of variances by the few digits of half-precision features; else 0."""
    half = torch.finfo(dtype).bits < 32
    return rounding_bound(posterior, dtype) if half else 0.0


def _step(width: int, device: str) -> int:
    """Block height: small saves work, large saves calls."""
    if device == "cpu":
        return max(64, math.ceil(width / 8))
    return width if width < 1024 else math.ceil(width / 4)
