r"""The fast quadratic form $q = |R f|^2$ in the model's own precision, with a rounding bound.

R is the posterior's upper triangular factor. Its blocks below the diagonal are zero and are
never multiplied, which makes the extra cost of an error bar about half of a D x D layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .posterior import Posterior

LARGEST_ROUNDING = 1e-3
"""Relative rounding error of q beyond which the quadratic form is computed in float64."""


@dataclass(frozen=True)
class QuadraticForm:
    """q for rows of features, in one precision.

    Attributes:
        blocks: (start, R[start:stop, start:]^T) for each block row of R; for one posterior per
            target R has a leading dimension T.
        dtype: the precision of the product.
        rounding: bound on the relative rounding error of the variances that come out: of the
            product itself (`rounding_bound`), of the result in the model's precision, and of the
            float64 Gram and its factorisation (machine epsilon times the condition number).
    """

    blocks: tuple[tuple[int, Tensor], ...]
    dtype: torch.dtype
    rounding: float

    @classmethod
    def of(cls, posterior: Posterior, dtype: torch.dtype) -> QuadraticForm:
        """The form in `dtype` where its rounding bound allows it, else in float64."""
        bound, result = rounding_bound(posterior, dtype), 2 * torch.finfo(dtype).eps
        if bound > LARGEST_ROUNDING:
            dtype, bound = torch.float64, rounding_bound(posterior, torch.float64)
        bound += result + torch.finfo(torch.float64).eps * posterior.condition
        factor = posterior.factor.to(dtype)
        width = factor.shape[-1]
        step = _step(width, factor.device.type)
        starts = range(0, width, step)
        blocks = tuple((i, factor[..., i : i + step, i:].mT.contiguous()) for i in starts)
        return cls(blocks, dtype, bound)

    def __call__(self, features: Tensor) -> Tensor:
        """(N, D) -> (N,); with one block of features or one Gram per target (N, T)."""
        features = features.to(self.dtype)
        return sum(self._squared_norms(features), start=features.new_zeros(()))

    def _squared_norms(self, features: Tensor) -> list[Tensor]:
        norms = []
        for start, block in self.blocks:
            rows = features[..., start:]
            if block.ndim == 3:
                pattern = "nd,tdk->ntk" if rows.ndim == 2 else "ntd,tdk->ntk"
                z = torch.einsum(pattern, rows, block)
            else:
                z = rows @ block
            norms.append(torch.linalg.vector_norm(z, dim=-1).square())
        return norms


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


def _step(width: int, device: str) -> int:
    """Block height: small saves work, large saves calls."""
    if device == "cpu":
        return max(64, math.ceil(width / 8))
    return width if width < 1024 else math.ceil(width / 4)
