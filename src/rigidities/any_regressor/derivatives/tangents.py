r"""Derivatives of a batch of predictions with respect to the parameters, stored compactly.

Row (n, k) of $J$ is $g_{nk} = \partial \tilde y_{nk} / \partial w$. For the weight W of a linear
layer with input $a_n$ and output $z_n = W a_n + b$ it is an outer product,

$$ \frac{\partial \tilde y_{nk}}{\partial W} = s_{nk} a_n^\top, \qquad
   s_{nk} = \frac{\partial \tilde y_{nk}}{\partial z_n}, $$

so that the kernel $J J'^\top$ is a sum of elementwise products of small Grams,
$(s_{nk} \cdot s'_{ml})\,(a_n \cdot a'_m)$, and the products $J v$ and $J^\top u$ need only the
factors. A `TangentBlock` holds the columns of J that belong to one parameter: `Outer` stores the
factors, `Explicit` the columns themselves. `Tangents` are the blocks of all parameters in the order
of the flat vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class TangentBlock(ABC):
    """Columns of J that belong to one parameter.

    The fields of a block are tensors with one row per sample; the last of them is (N, K, ...).
    Every sum is in float64, whatever the precision of the fields.
    """

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of columns."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """The columns written out, (N, K, width), in the precision they were computed in."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors, in the order of the fields."""
        return tuple(vars(self).values())

    def mixed(self, mixing: Tensor) -> TangentBlock:
        """Rows L^T J of each sample for L (N, K, K), or rows scaled by L (N, K)."""
        *factors, rows = self.tensors  # only the last tensor has a row for each output
        equation = "nk,nk...->nk..." if mixing.ndim == 2 else "nkj,nk...->nj..."
        mixed_tensors = [*factors, torch.einsum(equation, mixing.to(rows), rows)]
        return type(self)(*mixed_tensors)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> TangentBlock:
        """The same with every stored tensor changed."""
        changed = [change(tensor) for tensor in self.tensors]
        return type(self)(*changed)

    def take(self, index: slice | Tensor) -> TangentBlock:
        """Some of the samples."""
        return self.mapped(lambda tensor: tensor[index])

    def write(self, place: Tensor) -> None:
        """Write the columns into a tensor (N, K, width)."""
        place.copy_(self.matrix())

    def kernel(self, other: TangentBlock) -> Tensor:
        """The inner products of rows with those of another block, (N K, M L)."""
        return self._double().flatten(0, 1) @ other._double().flatten(0, 1).mT

    def squares(self) -> Tensor:
        """The squared lengths of rows, (N, K)."""
        return self._double().square().sum(-1)

    def forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, width) -> (m, N, K)."""
        return torch.einsum("nkp,mp->mnk", self._double(), vectors)

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u: (m, N, K) -> (m, width)."""
        return torch.einsum("mnk,nkp->mp", rows, self._double())

    def magnitudes(self, rows: Tensor) -> Tensor:
        """Sum over samples of |sum_k u_k J_k|: (N, K) -> (width,)."""
        return torch.einsum("nk,nkp->np", rows, self._double()).abs().sum(0)

    def _double(self) -> Tensor:
        """The columns written out in float64, (N, K, width)."""
        return self.matrix().to(torch.float64)


@dataclass(frozen=True)
class Explicit(TangentBlock):
    """A block stored as it is: rows (N, K, width)."""

    rows: Tensor

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.rows.shape[-1]

    def matrix(self) -> Tensor:
        """The rows."""
        return self.rows


@dataclass(frozen=True)
class Outer(TangentBlock):
    """The weight of a linear layer: rows vec(s a^T) from inputs (N, I) and slopes (N, K, O)."""

    inputs: Tensor
    slopes: Tensor

    @property
    def width(self) -> int:
        """Number of columns, O x I."""
        return self.slopes.shape[-1] * self.inputs.shape[-1]

    def matrix(self) -> Tensor:
        """The outer products written out."""
        return (self.slopes[..., None] * self.inputs[:, None, None]).flatten(-2)

    def write(self, place: Tensor) -> None:
        """Write the outer products into a tensor (N, K, width) without a second copy."""
        shaped = place.view(*place.shape[:-1], self.slopes.shape[-1], self.inputs.shape[-1])
        torch.mul(self.slopes[..., None], self.inputs[:, None, None], out=shaped)

    def kernel(self, other: TangentBlock) -> Tensor:
        """Elementwise product of the Gram of slopes and that of inputs, (N K, M L)."""
        if not isinstance(other, Outer):
            return super().kernel(other)
        slopes, inputs = self._factors()
        other_slopes, other_inputs = other._factors()
        kernel = slopes.flatten(0, 1) @ other_slopes.flatten(0, 1).mT
        input_gram = inputs @ other_inputs.mT  # (N, M)
        shape = (*self.slopes.shape[:2], *other.slopes.shape[:2])  # (N, K, M, L)
        kernel.reshape(shape).mul_(input_gram[:, None, :, None])
        return kernel

    def squares(self) -> Tensor:
        """Products of the factors' squared lengths, (N, K)."""
        slopes, inputs = self._factors()
        return slopes.square().sum(-1) * inputs.square().sum(-1)[:, None]

    def forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, O I) -> (m, N, K), as (V a) . s with v as a matrix V (O, I)."""
        slopes, inputs = self._factors()
        # V a for all vectors at once: (N, I) @ (I, m O) -> (N, m, O)
        images = inputs @ vectors.reshape(-1, inputs.shape[-1]).mT
        images = images.reshape(len(inputs), len(vectors), -1)
        if slopes.shape[1] == 1:  # a batched matrix product of single rows is slow
            return images.mul_(slopes).sum(-1).mT[..., None]
        return (images @ slopes.mT).transpose(0, 1)

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u: (m, N, K) -> (m, O I), as the sum of u s a^T."""
        slopes, inputs = self._factors()
        cotangents = rows.transpose(0, 1)  # (N, m, K)
        if slopes.shape[1] == 1:
            pulled = cotangents * slopes
        else:
            pulled = cotangents @ slopes  # (N, m, O)
        return (pulled.flatten(1).mT @ inputs).reshape(len(rows), -1)

    def magnitudes(self, rows: Tensor) -> Tensor:
        """Sum over samples of |sum_k u_k J_k|, (N, K) -> (O I,): |s a^T| = |s| |a|^T."""
        slopes, inputs = self._factors()
        pulled = torch.einsum("nk,nko->no", rows, slopes).abs()
        return (pulled.mT @ inputs.abs()).flatten()

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Slopes (N, K, O) and inputs (N, I) in float64."""
        return self.slopes.to(torch.float64), self.inputs.to(torch.float64)


@dataclass(frozen=True)
class Tangents:
    """J of a batch: rows (N, K, P), stored as one block per parameter.

    Attributes:
        blocks: The blocks in the order of the flat parameters.

    Examples:
        >>> t = Tangents((Outer(torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0]]])),))
        >>> t.matrix().tolist(), t.kernel().item()
        ([[[3.0, 6.0]]], 45.0)
    """

    blocks: tuple[TangentBlock, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, K, P)."""
        samples, outputs = self._first_rows.shape[:2]
        return samples, outputs, sum(self.widths)

    @property
    def device(self) -> torch.device:
        """Device of the blocks."""
        return self._first_rows.device

    @property
    def _first_rows(self) -> Tensor:
        """The tensor (N, K, ...) of the first block, which has the shape and device of all."""
        return self.blocks[0].tensors[-1]

    @property
    def widths(self) -> list[int]:
        """Columns of each block."""
        return [block.width for block in self.blocks]

    @property
    def numbers(self) -> int:
        """How many numbers are stored."""
        return sum(tensor.numel() for block in self.blocks for tensor in block.tensors)

    def matrix(self) -> Tensor:
        """J written out, (N, K, P)."""
        matrix = self._first_rows.new_empty(self.shape)
        columns = matrix.split_with_sizes(self.widths, dim=-1)
        for block, block_columns in zip(self.blocks, columns, strict=True):
            block.write(block_columns)
        return matrix

    def kernel(self, other: Tangents | None = None) -> Tensor:
        """J J'^T in float64, (N K, M L)."""
        if other is None:
            other = self
        kernel: Tensor | None = None
        for left, right in zip(self.blocks, other.blocks, strict=True):
            term = left.kernel(right)
            if kernel is None:
                kernel = term
            else:
                kernel += term
        assert kernel is not None
        return kernel

    def squares(self) -> Tensor:
        """The kernel's diagonal, (N, K)."""
        return torch.stack([block.squares() for block in self.blocks]).sum(0)

    def forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, P) -> (m, N, K)."""
        pieces = vectors.split_with_sizes(self.widths, dim=-1)
        products = [block.forward(v) for block, v in zip(self.blocks, pieces, strict=True)]
        if len(products) == 1:
            return products[0]
        return torch.stack(products).sum(0)

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u: (m, N, K) -> (m, P)."""
        return torch.cat([block.backward(rows) for block in self.blocks], dim=-1)

    def magnitudes(self, rows: Tensor) -> Tensor:
        """Sum over samples of |sum_k u_k J_k|, parameter by parameter: (N, K) -> (P,)."""
        return torch.cat([block.magnitudes(rows) for block in self.blocks])

    def mixed(self, mixing: Tensor) -> Tangents:
        """Rows L^T J of each sample for L (N, K, K), or rows scaled by L (N, K)."""
        return Tangents(tuple(block.mixed(mixing) for block in self.blocks))

    def take(self, index: slice | Tensor) -> Tangents:
        """Some of the samples."""
        return Tangents(tuple(block.take(index) for block in self.blocks))

    def split(self, samples: int) -> list[Tangents]:
        """The samples in their order, at most so many at a time."""
        starts = range(0, self.shape[0], samples)
        return [self.take(slice(start, start + samples)) for start in starts]

    @classmethod
    def join(cls, batches: Sequence[Tangents]) -> Tangents:
        """Samples of several batches as one."""
        by_parameter = zip(*[batch.blocks for batch in batches], strict=True)
        return cls(tuple(_joined(blocks) for blocks in by_parameter))


def _joined(blocks: Sequence[TangentBlock]) -> TangentBlock:
    """The samples of several blocks of one parameter, written out where the blocks differ in kind.

    A layer that a batch does not call has no factors there.
    """
    kind = type(blocks[0])
    if any(type(block) is not kind for block in blocks):
        return Explicit(torch.cat([block.matrix() for block in blocks]))
    by_field = zip(*[block.tensors for block in blocks], strict=True)
    return kind(*[torch.cat(tensors) for tensors in by_field])
