r"""The ridge-optimal readout weights, from the sums of a Gram.

$$ w^* = \arg\min_w \sum_i c_i (y_i - f_i^\top w)^2 + s\, |P w|^2
   = w + (G + s P)^{-1} (b - s P w), \qquad b = \sum_i c_i f_i r_i $$

with $r$ the residuals about the weights $w$ at hand, and $P$ leaving out the biases, which have no
ridge (as in the evidence). Equal bias columns, of heads that are summed, share the change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..posterior.gram import Gram
from ..posterior.posterior import Posterior
from .evidence import evidence, most_evident_ridge, projected


@dataclass(frozen=True)
class RidgeSolution:
    r"""How the weights at hand change.

    Attributes:
        ridge: $s$.
        change: $w^* - w$, (D, K).
        degrees: weights that the rows determine, the trace of $(G + s P)^{-1} G$, () or (K,).
    """

    ridge: float
    change: Tensor
    degrees: Tensor

    @classmethod
    def of(
        cls, gram: Gram, posterior: Posterior, weights: Tensor, biases: Tensor, ridge: float | None
    ) -> RidgeSolution:
        """For the rows of a Gram.

        Args:
            gram: with residual sums.
            posterior: its eigenbasis.
            weights: about which the residuals were taken, (D, K).
            biases: columns of the features that belong to biases.
            ridge: $s$; None for the one under which the rows are most probable.
        """
        if ridge is None:
            value = evidence(gram, posterior, weights, biases)
            ridge, *_ = most_evident_ridge(value, float(posterior.eigenvalues.max()))
        assert gram.cross is not None
        cross, w = gram.cross.mT[..., None], weights.to(gram.cross).mT[..., None]
        biases = biases.to(gram.device)
        matrix, free, right, _, rank = projected(gram, cross, biases)
        values, basis = torch.linalg.eigh(matrix)
        solved = Posterior(values.clamp(min=0), basis, 0.0).with_ridge(ridge)
        right = basis.mT @ (right - ridge * w[:, free])
        change = torch.zeros_like(cross)
        change[:, free] = basis @ (right / solved.precisions[..., None])
        rest = cross[:, biases] - gram.matrix[..., biases[:, None], free] @ change[:, free]
        own = gram.matrix[..., biases[:, None], biases]
        change[:, biases] = torch.linalg.pinv(own, rtol=1e-12, hermitian=True) @ rest
        degrees = (solved.eigenvalues / solved.precisions).sum(-1) + rank
        return cls(ridge, change[..., 0].mT, degrees)
