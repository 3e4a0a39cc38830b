r"""The ridge-optimal readout weights, from the sums of a Gram.

$$ w^* = \arg\min_w \sum_i c_i (y_i - f_i^\top w)^2 + s\, |P w|^2
   = w + (G + s P)^{-1} (b - s P w), \qquad b = \sum_i c_i f_i r_i $$

with $r$ the residuals about the weights $w$ at hand, and $P$ leaving out the biases, which have no
ridge (as in the evidence). Equal bias columns, of heads that are summed, share the change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..posterior.gram import Gram
from .evidence import projected


def ridge_solution(
    gram: Gram, weights: Tensor, biases: Tensor, ridge: float
) -> tuple[Tensor, Tensor]:
    r"""The change $w^* - w$ of the weights (D, K), and how many of them the rows determine.

    That is the trace of $(G + s P)^{-1} G$, () or (K,). The arguments are those of `evidence`.
    """
    assert gram.cross is not None
    biases, matrix = biases.to(gram.device), gram.matrix
    cross, w = gram.cross.mT[..., None], weights.to(gram.cross).mT[..., None]
    rest, free, right, _, rank = projected(gram, cross, biases)
    values, basis = torch.linalg.eigh(rest)
    values, change = values.clamp(min=0), torch.zeros_like(cross)
    right = basis.mT @ (right - ridge * w[:, free])
    change[:, free] = basis @ (right / (values + ridge)[..., None])
    right = cross[:, biases] - matrix[..., biases[:, None], free] @ change[:, free]
    own = torch.linalg.pinv(matrix[..., biases[:, None], biases], rtol=1e-12, hermitian=True)
    change[:, biases] = own @ right
    return change[..., 0].mT, (values / (values + ridge)).sum(-1) + rank
