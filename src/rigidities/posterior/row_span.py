r"""The span of the rows of F, and how much of a feature vector lies outside it.

With the right singular vectors $v_j$ of F whose singular values count,
$f_\perp = f - \sum_j v_j v_j^\top f$. $|f_\perp|^2$ is the limit of
$s\, f^\top (F^\top F + s I)^{-1} f$ for $s \to 0$, and what is left of the variance of a wide
network after infinitely long training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSpan:
    r"""Singular vectors and values of F (N, D) above a threshold.

    Attributes:
        left: Left singular vectors, (N, rank).
        singular: Singular values, (rank,).
        right: Right singular vectors, (rank, D): an orthonormal basis of the span.
        threshold: Singular values up to it count as zero.
    """

    left: Tensor
    singular: Tensor
    right: Tensor
    threshold: float

    @classmethod
    def of(cls, rows: Tensor, tolerance: float | None = None) -> RowSpan:
        """The span of some rows.

        Args:
            rows: F, (N, D).
            tolerance: Threshold relative to the largest singular value. By default max(N, D) times
                the rounding of F's numbers.
        """
        left, singular, right = torch.linalg.svd(rows, full_matrices=False)
        if tolerance is None:
            tolerance = max(rows.shape) * torch.finfo(rows.dtype).eps
        threshold = tolerance * float(singular[0])
        is_nonzero = singular > threshold
        return cls(
            left=left[:, is_nonzero],
            singular=singular[is_nonzero],
            right=right[is_nonzero],
            threshold=threshold,
        )

    def outside(self, features: Tensor) -> tuple[Tensor, Tensor]:
        r"""How much of feature vectors lies outside the span.

        Args:
            features: (M, D).

        Returns:
            $|f_\perp|^2$ and its rounding $(D \epsilon |f|)^2$, (M,) each. The first is exactly
            zero where the rows span everything, or where no more than rounding is left.

        Examples:
            >>> span = RowSpan.of(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
            >>> span.outside(torch.tensor([[3.0, 2.0], [3.0, 0.0]]))[0].tolist()
            [4.0, 0.0]
        """
        width = self.right.shape[1]
        rounding = (width * torch.finfo(features.dtype).eps) ** 2 * features.square().sum(-1)
        if len(self.right) == width:
            return torch.zeros_like(rounding), rounding
        size = (features - features @ self.right.mT @ self.right).square().sum(-1)
        return torch.where(size > rounding, size, 0.0), rounding
