"""Products with the Jacobian of a batch that is never stored.

Two ways to forget the tangents between products: compute their factors anew each time (a forward
and a backward pass), or, where a model is not made of linear layers, let automatic differentiation
form the products themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.samples import SampleBatch
from ...models.directional import pulls, pushes
from ..derivatives.differentiation import Differentiation
from ..derivatives.tangents import Tangents


@dataclass(frozen=True)
class Recomputed:
    """Tangents of a batch, made again for every product.

    Attributes:
        differentiation: how to make them.
        batch: of which samples.
        root: weights of the rows, (N, K) or (N, K, K); None for ones.
    """

    differentiation: Differentiation
    batch: SampleBatch
    root: Tensor | None

    def forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, P) -> (m, N, K)."""
        return self._tangents().forward(vectors)

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u: (m, N, K) -> (m, P)."""
        return self._tangents().backward(rows)

    def _tangents(self) -> Tangents:
        _, tangents = self.differentiation(*self.batch.args, **self.batch.kwargs)
        return tangents if self.root is None else tangents.mixed(self.root)


@dataclass(frozen=True)
class Transformed(Recomputed):
    """Products by forward and reverse mode, in the precision of the parameters."""

    def forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, P) -> (m, N, K)."""
        pushed = pushes(self._outputs, self.differentiation.regressor.flat, vectors)
        if self.root is None:
            return pushed
        if self.root.ndim == 2:
            return pushed * self.root
        return torch.einsum("nkj,mnk->mnj", self.root, pushed)

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u: (m, N, K) -> (m, P)."""
        if self.root is not None:
            diagonal = self.root.ndim == 2
            rows = rows * self.root if diagonal else torch.einsum("nkj,mnj->mnk", self.root, rows)
        return pulls(self._outputs, self.differentiation.regressor.flat, rows)

    def _outputs(self, flat: Tensor) -> Tensor:
        regressor = self.differentiation.regressor
        return regressor.outputs(flat, *self.batch.args, **self.batch.kwargs)
