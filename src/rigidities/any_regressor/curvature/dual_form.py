r"""The dual form of a rigidity: as many unknowns as rows, whatever the number of parameters.

With $K = J J^\top$ over the (weighted) training rows and $k = J g$ (Woodbury)

$$ q = g^\top (J^\top J + s I)^{-1} g
     = \frac{1}{s} \bigl[ g^\top g - k^\top (K + s I)^{-1} k \bigr], $$

which needs only inner products of tangents. One Cholesky factorisation of $K + s I$ serves all
predictions. Relative rounding errors are about machine epsilon times $\mathrm{tr} K / s$.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...posterior.draws import standard_normal
from ..derivatives.tangents import Tangents
from .forms import Form
from .pseudo_hessian import samples_at_once

BLOCK = 1024
"""Rows and columns of the kernel that are computed at once."""


@dataclass(frozen=True)
class DualForm(Form):
    """The training rows and the Cholesky factor of their kernel plus ridge.

    Attributes:
        rows: Weighted tangents of the training data, n = N K rows, in groups of consecutive
            samples that are small enough to be cast to float64.
        factor: Lower triangular Cholesky factor L, (n, n).
        ridge: The ridge s.
        tolerance: Bound on the relative rounding error of q.
    """

    rows: tuple[Tangents, ...]
    factor: Tensor
    ridge: float
    tolerance: float
    name = "dual"

    @classmethod
    def of(cls, rows: Sequence[Tangents], ridge: float) -> DualForm:
        """Assemble and factorise the kernel.

        Raises:
            ValueError: The ridge is lost in the rounding of the kernel.
        """
        kernel = assembled_kernel(rows)
        trace = float(kernel.diagonal().sum())
        kernel.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(kernel)
        tolerance = torch.finfo(torch.float64).eps * (1 + trace / ridge)
        if int(failed) or tolerance > 0.01:
            raise ValueError(
                f"The ridge {ridge:g} is negligible compared with the kernel's trace {trace:.3g}. "
                f"Pass a ridge of at least {1e-12 * trace:.1g}, or form='dense'."
            )
        return cls(tuple(rows), factor, ridge, tolerance)

    @property
    def width(self) -> int:
        """Number of parameters P."""
        return self.rows[0].shape[2]

    def quadratic(self, tangents: Tangents) -> Tensor:
        """q of each prediction, (N, K)."""
        squares = tangents.squares()  # g^T g
        explained = self._whitened(tangents).square().sum(0).reshape(squares.shape)
        return (squares - explained) / self.ridge

    def covariance(self, left: Tangents, right: Tangents) -> Tensor:
        """Unscaled covariances between two sets of predictions, (N K, M K)."""
        left_whitened = self._whitened(left)
        right_whitened = left_whitened if right is left else self._whitened(right)
        return (left.kernel(right) - left_whitened.mT @ right_whitened) / self.ridge

    def solve(self, vectors: Tensor) -> Tensor:
        r"""$(J^\top J + s I)^{-1} v$ for several v, (m, P) -> (m, P)."""
        return (vectors - self._pulled_back(self._forward(vectors))) / self.ridge

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        r"""Deviations with covariance $(J^\top J + s I)^{-1}$, (n, P), by Matheron's rule.

        $w = u - J^\top (K + sI)^{-1} (J u + \epsilon)$ with $u \sim N(0, I/s)$ and
        $\epsilon \sim N(0, I)$.
        """
        device = self.factor.device
        u = standard_normal((n, self.width), device, generator) / math.sqrt(self.ridge)
        noise = standard_normal((n, len(self.factor)), device, generator)
        return u - self._pulled_back(self._forward(u) + noise)

    @cached_property
    def effective_rank(self) -> float:
        r"""$\mathrm{tr}\, K (K + s I)^{-1} = n - s\, |L^{-1}|^2$."""
        n = len(self.factor)
        identity = torch.eye(n, dtype=self.factor.dtype, device=self.factor.device)
        inverse = torch.linalg.solve_triangular(self.factor, identity, upper=False)
        return n - self.ridge * float(inverse.square().sum())

    def _whitened(self, tangents: Tangents) -> Tensor:
        """$L^{-1} k$ for each prediction, (n, N K)."""
        cross_kernel = torch.cat([group.kernel(tangents) for group in self.rows])
        whitened: Tensor = torch.linalg.solve_triangular(self.factor, cross_kernel, upper=False)
        return whitened

    def _forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, P) -> (m, n)."""
        return torch.cat([group.forward(vectors).flatten(1) for group in self.rows], dim=1)

    def _pulled_back(self, data: Tensor) -> Tensor:
        r"""$J^\top (K + s I)^{-1} d$ for several d, (m, n) -> (m, P)."""
        weights = torch.cholesky_solve(data.mT, self.factor).mT
        counts = [math.prod(group.shape[:2]) for group in self.rows]
        result = torch.zeros(len(data), self.width, dtype=data.dtype, device=data.device)
        weights_of_groups = torch.split(weights, counts, dim=1)
        for group, group_weights in zip(self.rows, weights_of_groups, strict=True):
            result += group.backward(group_weights.reshape(-1, *group.shape[:2]))
        return result


def assembled_kernel(rows: Sequence[Tangents]) -> Tensor:
    """The kernel J J^T of some groups of rows, (n, n) in float64.

    Only the blocks on and below the diagonal are computed.
    """
    ends = list(accumulate(math.prod(group.shape[:2]) for group in rows))
    places = [slice(start, end) for start, end in pairwise([0, *ends])]
    kernel = torch.empty(ends[-1], ends[-1], dtype=torch.float64, device=rows[0].device)
    for number, right in enumerate(rows):
        columns = places[number]
        for left, below in zip(rows[number:], places[number:], strict=True):
            block = left.kernel(right)
            kernel[below, columns] = block
            if below != columns:
                kernel[columns, below] = block.mT
    return kernel


def group_size(numbers_per_sample: int, outputs: int) -> int:
    """How many samples a group of rows has: a block of the kernel, or fewer large ones."""
    return min(samples_at_once(numbers_per_sample), math.ceil(BLOCK / outputs))


def grouped(batches: Iterable[Tangents], samples: int) -> Iterator[Tangents]:
    """Consecutive batches joined to groups of at least this many samples, except for the last."""
    group: list[Tangents] = []
    count = 0
    for tangents in batches:
        group.append(tangents)
        count += tangents.shape[0]
        if count >= samples:
            yield Tangents.join(group)
            group = []
            count = 0
    if group:
        yield Tangents.join(group)
