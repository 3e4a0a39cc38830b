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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Block(Protocol):
    """Columns of J that belong to one parameter, in float64 wherever they are summed."""

    @property
    def width(self) -> int:
        """Number of columns."""

    @property
    def numbers(self) -> int:
        """How many numbers are stored."""

    def matrix(self) -> Tensor:
        """(N, K, width), in the precision they were computed in."""

    def write(self, place: Tensor) -> None:
        """The same into a given place."""

    def kernel(self, other: Block) -> Tensor:
        """(N K, M L), the inner products of rows."""

    def squares(self) -> Tensor:
        """(N, K), the squared lengths of rows."""

    def forward(self, vectors: Tensor) -> Tensor:
        """J v: (m, width) -> (m, N, K)."""

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u: (m, N, K) -> (m, width)."""

    def magnitudes(self, rows: Tensor) -> Tensor:
        """Sum over samples of |sum_k u_k J_k|: (N, K) -> (width,)."""

    def mixed(self, mixing: Tensor) -> Block:
        """Rows L^T J of each sample, L (N, K, K), or rows scaled by L (N, K)."""

    def take(self, index: slice | Tensor) -> Block:
        """Some of the samples."""


@dataclass(frozen=True)
class Explicit:
    """A block held as it is: rows (N, K, width)."""

    rows: Tensor

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.rows.shape[-1]

    @property
    def numbers(self) -> int:
        """How many numbers are stored."""
        return self.rows.numel()

    def matrix(self) -> Tensor:
        """The rows."""
        return self.rows

    def write(self, place: Tensor) -> None:
        """Copy the rows."""
        place.copy_(self.rows)

    def kernel(self, other: Block) -> Tensor:
        """One matrix product."""
        right = other.matrix().to(torch.float64)
        return self.rows.to(torch.float64).flatten(0, 1) @ right.flatten(0, 1).mT

    def squares(self) -> Tensor:
        """Squared lengths of the rows."""
        return self.rows.to(torch.float64).square().sum(-1)

    def forward(self, vectors: Tensor) -> Tensor:
        """(m, width) -> (m, N, K)."""
        return torch.einsum("nkp,mp->mnk", self.rows.to(torch.float64), vectors)

    def backward(self, rows: Tensor) -> Tensor:
        """(m, N, K) -> (m, width)."""
        return torch.einsum("mnk,nkp->mp", rows, self.rows.to(torch.float64))

    def magnitudes(self, rows: Tensor) -> Tensor:
        """(N, K) -> (width,)."""
        return torch.einsum("nk,nkp->np", rows, self.rows.to(torch.float64)).abs().sum(0)

    def mixed(self, mixing: Tensor) -> Explicit:
        """Rows combined within each sample."""
        return Explicit(_mixed(self.rows, mixing))

    def take(self, index: slice | Tensor) -> Explicit:
        """Some of the samples."""
        return Explicit(self.rows[index])


@dataclass(frozen=True)
class Outer:
    """The weight of a linear layer: rows vec(s a^T) from inputs (N, I) and slopes (N, K, O)."""

    inputs: Tensor
    slopes: Tensor

    @property
    def width(self) -> int:
        """Number of columns, O x I."""
        return self.slopes.shape[-1] * self.inputs.shape[-1]

    @property
    def numbers(self) -> int:
        """How many numbers are stored."""
        return self.inputs.numel() + self.slopes.numel()

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
            return Explicit(self.matrix()).kernel(other)
        shape = (*self.slopes.shape[:2], *other.slopes.shape[:2])
        slopes, inputs = self._double()
        others, theirs = other._double()
        kernel = slopes.flatten(0, 1) @ others.flatten(0, 1).mT
        kernel.reshape(shape).mul_((inputs @ theirs.mT)[:, None, :, None])
        return kernel

    def squares(self) -> Tensor:
        """Product of squared lengths."""
        slopes, inputs = self._double()
        return slopes.square().sum(-1) * inputs.square().sum(-1)[:, None]

    def forward(self, vectors: Tensor) -> Tensor:
        """(m, O I) -> (m, N, K): (V a) . s."""
        slopes, inputs = self._double()
        through = inputs @ vectors.reshape(-1, inputs.shape[-1]).mT  # one product for all vectors
        through = through.reshape(len(inputs), len(vectors), -1)
        if slopes.shape[1] == 1:  # many small products of one row are slow
            return through.mul_(slopes).sum(-1).mT[..., None]
        return (through @ slopes.mT).transpose(0, 1)

    def backward(self, rows: Tensor) -> Tensor:
        """(m, N, K) -> (m, O I): sum of u s a^T."""
        slopes, inputs = self._double()
        one = slopes.shape[1] == 1
        pulled = rows.transpose(0, 1) * slopes if one else rows.transpose(0, 1) @ slopes
        pulled = pulled.flatten(1)
        return (pulled.mT @ inputs).reshape(len(rows), -1)

    def magnitudes(self, rows: Tensor) -> Tensor:
        """(N, K) -> (O I,): absolute values factorise too."""
        slopes, inputs = self._double()
        pulled = torch.einsum("nk,nko->no", rows, slopes).abs()
        return (pulled.mT @ inputs.abs()).flatten()

    def mixed(self, mixing: Tensor) -> Outer:
        """Slopes combined within each sample."""
        return Outer(self.inputs, _mixed(self.slopes, mixing))

    def take(self, index: slice | Tensor) -> Outer:
        """Some of the samples."""
        return Outer(self.inputs[index], self.slopes[index])

    def _double(self) -> tuple[Tensor, Tensor]:
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
        block = self.blocks[0]
        rows = block.slopes if isinstance(block, Outer) else block.matrix()
        return rows.shape[0], rows.shape[1], sum(self.widths)

    @property
    def device(self) -> torch.device:
        """Where the blocks lie."""
        block = self.blocks[0]
        return (block.slopes if isinstance(block, Outer) else block.matrix()).device

    @property
    def widths(self) -> list[int]:
        """Columns of each block."""
        return [block.width for block in self.blocks]

    @property
    def numbers(self) -> int:
        """How many numbers are stored."""
        return sum(block.numbers for block in self.blocks)

    def matrix(self) -> Tensor:
        """J written out, (N, K, P)."""
        shape, blocks = self.shape, self.blocks
        like = blocks[0].slopes if isinstance(blocks[0], Outer) else blocks[0].matrix()
        whole = like.new_empty(shape)
        pieces = whole.split_with_sizes(self.widths, dim=-1)
        for block, piece in zip(blocks, pieces, strict=True):
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

    Args:
        count: samples to expect; with more or fewer, the place is made anew.
    """

    def __init__(self, count: int) -> None:
        self._room, self._held = max(1, count), 0
        self._places: list[tuple[Tensor, ...]] | None = None
        self._factored: list[bool] = []

    def add(self, part: Tangents) -> None:
        """Append the samples of a batch."""
        rows = part.shape[0]
        factored = [isinstance(block, Outer) for block in part.blocks]
        if self._places is None:
            self._factored = factored
            self._places = [self._place(_tensors(block)) for block in part.blocks]
        if factored != self._factored:
            self._write_out([a and b for a, b in zip(factored, self._factored, strict=True)])
        if self._held + rows > self._room:
            self._room = max(self._held + rows, 2 * self._room)
            self._places = [self._grown(place) for place in self._places]
        end = self._held + rows
        for place, block, whole in zip(self._places, part.blocks, self._factored, strict=True):
            given = _tensors(block) if whole else (block.matrix(),)
            for to, values in zip(place, given, strict=True):
                to[self._held : end] = values
        self._held = end

    def tangents(self) -> Tangents:
        """All samples so far."""
        if self._places is None:
            raise ValueError("There are no tangents to gather.")
        blocks: list[Block] = []
        for place, factored in zip(self._places, self._factored, strict=True):
            parts = [tensor[: self._held] for tensor in place]
            blocks.append(Outer(*parts) if factored else Explicit(*parts))
        return Tangents(tuple(blocks))

    def _place(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.new_empty(self._room, *tensor.shape[1:]) for tensor in tensors)

    def _grown(self, place: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        larger = self._place(place)
        for to, values in zip(larger, place, strict=True):
            to[: self._held] = values[: self._held]
        return larger

    def _write_out(self, factored: list[bool]) -> None:
        """Blocks that some batch cannot factorise are held row by row."""
        if self._held:
            blocks = self.tangents().blocks
            self._places = [
                self._grown(_tensors(block) if whole else (block.matrix(),))
                for block, whole in zip(blocks, factored, strict=True)
            ]
        self._factored = factored


def _tensors(block: Block) -> tuple[Tensor, ...]:
    return (block.inputs, block.slopes) if isinstance(block, Outer) else (block.matrix(),)


def _mixed(rows: Tensor, mixing: Tensor) -> Tensor:
    mixing = mixing.to(rows)
    if mixing.ndim == 2:
        return rows * mixing[..., None]
    return torch.einsum("nkj,nk...->nj...", mixing, rows)
