r"""Derivatives of a batch of predictions by the parameters, stored as little as may be.

Row (n, k) of $J$ is $g_{nk} = \partial \tilde y_{nk} / \partial w$. For the weight W of a linear
layer with input $a_n$ and output $z_n = W a_n + b$ it is an outer product,

$$ \frac{\partial \tilde y_{nk}}{\partial W} = s_{nk} a_n^\top, \qquad
   s_{nk} = \frac{\partial \tilde y_{nk}}{\partial z_n}, $$

so that the kernel $J J'^\top$ is a sum of elementwise products of small Grams,
$(s_{nk} \cdot s'_{ml})\,(a_n \cdot a'_m)$, and the products $J v$ and $J^\top u$ need the factors
alone. A block is the part of J that belongs to one parameter; the blocks stand in the order of the
flat vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Block(ABC):
    """Columns of J that belong to one parameter, in float64 wherever they are summed.

    A block's fields are tensors with a row per sample each, the last of them (N, K, ...).
    """

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of columns."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """(N, K, width), in the precision they were computed in."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is stored."""
        return tuple(vars(self).values())

    def mixed(self, mixing: Tensor) -> Block:
        """Rows L^T J of each sample, L (N, K, K), or rows scaled by L (N, K)."""
        *factors, rows = self.tensors
        each = "nk,nk...->nk..." if mixing.ndim == 2 else "nkj,nk...->nj..."
        factors.append(torch.einsum(each, mixing.to(rows), rows))
        return type(self)(*factors)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Block:
        """The same with every stored tensor changed."""
        return type(self)(*map(change, self.tensors))

    def take(self, index: slice | Tensor) -> Block:
        """Some of the samples."""
        return self.mapped(lambda tensor: tensor[index])

    def room(self, samples: int) -> Block:
        """The same for so many samples, yet to be written."""
        return self.mapped(lambda tensor: tensor.new_empty(samples, *tensor.shape[1:]))

    def write(self, place: Tensor) -> None:
        """The matrix into a given place."""
        place.copy_(self.matrix())

    def kernel(self, other: Block) -> Tensor:
        """(N K, M L), the inner products of rows."""
        return self._double().flatten(0, 1) @ other._double().flatten(0, 1).mT

    def squares(self) -> Tensor:
        """(N, K), the squared lengths of rows."""
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
        return self.matrix().to(torch.float64)


@dataclass(frozen=True)
class Explicit(Block):
    """A block held as it is: rows (N, K, width)."""

    rows: Tensor

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.rows.shape[-1]

    def matrix(self) -> Tensor:
        """The rows."""
        return self.rows


@dataclass(frozen=True)
class Outer(Block):
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
        """Write the outer products where they belong: no second copy."""
        shaped = place.view(*place.shape[:-1], self.slopes.shape[-1], self.inputs.shape[-1])
        torch.mul(self.slopes[..., None], self.inputs[:, None, None], out=shaped)

    def kernel(self, other: Block) -> Tensor:
        """Elementwise product of the Gram of slopes and that of inputs."""
        if not isinstance(other, Outer):
            return super().kernel(other)
        shape = (*self.slopes.shape[:2], *other.slopes.shape[:2])
        slopes, inputs = self._factors()
        others, theirs = other._factors()
        kernel = slopes.flatten(0, 1) @ others.flatten(0, 1).mT
        kernel.reshape(shape).mul_((inputs @ theirs.mT)[:, None, :, None])
        return kernel

    def squares(self) -> Tensor:
        """Product of squared lengths."""
        slopes, inputs = self._factors()
        return slopes.square().sum(-1) * inputs.square().sum(-1)[:, None]

    def forward(self, vectors: Tensor) -> Tensor:
        """(m, O I) -> (m, N, K): (V a) . s."""
        slopes, inputs = self._factors()
        through = inputs @ vectors.reshape(-1, inputs.shape[-1]).mT  # one product for all vectors
        through = through.reshape(len(inputs), len(vectors), -1)
        if slopes.shape[1] == 1:  # many small products of one row are slow
            return through.mul_(slopes).sum(-1).mT[..., None]
        return (through @ slopes.mT).transpose(0, 1)

    def backward(self, rows: Tensor) -> Tensor:
        """(m, N, K) -> (m, O I): sum of u s a^T."""
        slopes, inputs = self._factors()
        turned = rows.transpose(0, 1)
        pulled = turned * slopes if slopes.shape[1] == 1 else turned @ slopes
        return (pulled.flatten(1).mT @ inputs).reshape(len(rows), -1)

    def magnitudes(self, rows: Tensor) -> Tensor:
        """(N, K) -> (O I,): absolute values factorise too."""
        slopes, inputs = self._factors()
        pulled = torch.einsum("nk,nko->no", rows, slopes).abs()
        return (pulled.mT @ inputs.abs()).flatten()

    def _factors(self) -> tuple[Tensor, Tensor]:
        return self.slopes.to(torch.float64), self.inputs.to(torch.float64)


@dataclass(frozen=True)
class Tangents:
    """J of a batch: one block per parameter, rows (N, K, P).

    Examples:
        >>> t = Tangents((Outer(torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0]]])),))
        >>> t.matrix().tolist(), t.kernel().item()
        ([[[3.0, 6.0]]], 45.0)
    """

    blocks: tuple[Block, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, K, P)."""
        rows, outputs = self._like.shape[:2]
        return rows, outputs, sum(self.widths)

    @property
    def device(self) -> torch.device:
        """Where the blocks lie."""
        return self._like.device

    @property
    def _like(self) -> Tensor:
        """Of the first block, (N, K, ...)."""
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
        whole = self._like.new_empty(self.shape)
        pieces = whole.split_with_sizes(self.widths, dim=-1)
        for block, piece in zip(self.blocks, pieces, strict=True):
            block.write(piece)
        return whole

    def kernel(self, other: Tangents | None = None) -> Tensor:
        """J J'^T in float64, (N K, M L)."""
        other = self if other is None else other
        pairs = zip(self.blocks, other.blocks, strict=True)
        first, *rest = (left.kernel(right) for left, right in pairs)
        for term in rest:
            first += term
        return first

    def squares(self) -> Tensor:
        """The kernel's diagonal, (N, K)."""
        return torch.stack([block.squares() for block in self.blocks]).sum(0)

    def forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, P) -> (m, N, K)."""
        pieces = vectors.split_with_sizes(self.widths, dim=-1)
        products = [b.forward(v) for b, v in zip(self.blocks, pieces, strict=True)]
        return torch.stack(products).sum(0) if len(products) > 1 else products[0]

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u: (m, N, K) -> (m, P)."""
        return torch.cat([block.backward(rows) for block in self.blocks], dim=-1)

    def magnitudes(self, rows: Tensor) -> Tensor:
        """Sum over samples of |sum_k u_k J_k|, parameter by parameter: (N, K) -> (P,)."""
        return torch.cat([block.magnitudes(rows) for block in self.blocks])

    def mixed(self, mixing: Tensor) -> Tangents:
        """Rows scaled (N, K) or combined within each sample as L^T J (N, K, K)."""
        return Tangents(tuple(block.mixed(mixing) for block in self.blocks))

    def take(self, index: slice | Tensor) -> Tangents:
        """Some of the samples."""
        return Tangents(tuple(block.take(index) for block in self.blocks))

    @classmethod
    def join(cls, parts: Sequence[Tangents]) -> Tangents:
        """Samples of several batches as one."""
        gathered = Gathering(sum(part.shape[0] for part in parts))
        for part in parts:
            gathered.add(part)
        return gathered.tangents()


class Gathering:
    """Batches of tangents written into one place as they come: never held twice.

    With more samples than the `count` that was expected the place is made anew.
    """

    def __init__(self, count: int) -> None:
        self._room, self._held = max(1, count), 0
        self._blocks: tuple[Block, ...] = ()

    def add(self, part: Tangents) -> None:
        """Append the samples of a batch."""
        end = self._held + part.shape[0]
        self._room = self._room if end <= self._room else max(end, 2 * self._room)
        blocks = self._blocks or [block.room(self._room) for block in part.blocks]
        pairs = zip(blocks, part.blocks, strict=True)
        self._blocks = tuple(self._joined(held, more, end) for held, more in pairs)
        self._held = end

    def tangents(self) -> Tangents:
        """All samples so far."""
        if not self._blocks:
            raise ValueError("There are no tangents to gather.")
        return Tangents(self._blocks).take(slice(self._held))

    def _joined(self, held: Block, more: Block, end: int) -> Block:
        """Samples written behind those held; row by row where a batch cannot factorise them."""
        before = slice(self._held)
        if type(held) is not type(more):
            held, more = (Explicit(block.matrix()) for block in (held.take(before), more))
        if len(held.tensors[0]) < self._room:
            larger = held.room(self._room)
            _write(held.take(before), larger, before)
            held = larger
        _write(more, held, slice(self._held, end))
        return held


def _write(block: Block, to: Block, place: slice) -> None:
    for tensor, values in zip(to.tensors, block.tensors, strict=True):
        tensor[place] = values
