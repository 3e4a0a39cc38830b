"""Feature columns of the readout heads: each head's weight, then its bias.

With `joint=False` a column belongs to one input of a head (every target has its own copy of the
weights: D columns, plus one for the bias). With `joint=True` every single weight has a column.
Heads that share a parameter share its columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .heads import has_bias, own_parameters, weights


class Columns:
    """Which columns of the features belong to which head.

    Attributes:
        heads: the readout heads.
        joint: one column per weight instead of one per input.
        width: number of columns.
        indices: for each head the columns of its weight and then its bias.
        biases: the columns of all biases.
    """

    def __init__(self, heads: list[nn.Module], *, joint: bool) -> None:
        self.heads = heads
        self.joint = joint
        self.width = 0
        self.biases = torch.empty(0, dtype=torch.long)
        known: dict[int, Tensor] = {}
        self.indices = [torch.cat(self._parts(head, known)) for head in heads]
        self._disjoint = sum(len(index) for index in self.indices) == self.width

    def complete(self, blocks: dict[int, Tensor]) -> list[Tensor]:
        """One block per head, zeros for heads that were not called."""
        any_block = next(iter(blocks.values()))
        empty = (any_block.new_zeros(*any_block.shape[:-1], len(index)) for index in self.indices)
        return [blocks.get(i, zero) for i, zero in enumerate(empty)]

    def assemble(self, blocks: list[Tensor]) -> Tensor:
        """Features (..., width) from one block per head; shared columns add up."""
        if self._disjoint:
            return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)
        total = blocks[0].new_zeros(*blocks[0].shape[:-1], self.width)
        for index, block in zip(self.indices, blocks, strict=True):
            total = total.index_add(-1, index.to(block.device), block)
        return total

    def weights(self) -> Tensor:
        """The heads' weights by column, (width, K), or (width, 1) when joint; float64."""
        parts = [weights(head).to(torch.float64) for head in self.heads]
        if self.joint:
            pairs = zip(parts, self.heads, strict=True)
            parts = [joint_columns(part, head)[:, None] for part, head in pairs]
        total = parts[0].new_zeros(self.width, parts[0].shape[1])
        for index, part in zip(self.indices, parts, strict=True):
            total[index.to(part.device)] = part
        return total

    def share(self, change: Tensor, i: int) -> Tensor:
        """Head i's part (D or D+1, K) of a change (width, K or 1) of the weights."""
        part, head = change[self.indices[i].to(change.device)], self.heads[i]
        if not self.joint:
            return part
        outputs = weights(head).shape[1]
        if not has_bias(head):
            return part.reshape(outputs, -1).mT
        weight, bias = part[:-outputs].reshape(outputs, -1), part[-outputs:].reshape(1, -1)
        return torch.cat([weight.mT, bias])

    def _parts(self, head: nn.Module, known: dict[int, Tensor]) -> list[Tensor]:
        inputs, outputs = weights(head).shape
        inputs -= has_bias(head)
        each = outputs if self.joint else 1
        sizes = {"weight": inputs * each, "bias": each if has_bias(head) else 0}
        parts = []
        for name, size in sizes.items():
            parameter = head._parameters.get(name)
            columns = None if parameter is None else known.get(id(parameter))
            if columns is None:
                columns = torch.arange(self.width, self.width + size)
                self.width += size
                self.biases = torch.cat([self.biases, columns[: size * (name == "bias")]])
            if parameter is not None:
                known[id(parameter)] = columns
            parts.append(columns)
        return parts


class ParameterColumns(Columns):
    """A column for every number in the parameters that the heads, any modules, own themselves."""

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__(heads, joint=True)

    def weights(self) -> Tensor:
        """The parameters by column, (width, 1); float64."""
        total = torch.zeros(self.width, 1, dtype=torch.float64)
        for index, head in zip(self.indices, self.heads, strict=True):
            flat = torch.cat([p.detach().flatten() for p in own_parameters(head).values()])
            total = total.to(flat.device)
            total[index.to(flat.device), 0] = flat.to(torch.float64)
        return total

    def share(self, change: Tensor, i: int) -> Tensor:
        """Head i's part (P, 1) of a change (width, 1) of the parameters."""
        return change[self.indices[i].to(change.device)]

    def _parts(self, head: nn.Module, known: dict[int, Tensor]) -> list[Tensor]:
        parts = []
        for parameter in own_parameters(head).values():
            if id(parameter) not in known:
                known[id(parameter)] = torch.arange(self.width, self.width + parameter.numel())
                self.width += parameter.numel()
            parts.append(known[id(parameter)])
        return parts


def joint_columns(block: Tensor, head: nn.Module) -> Tensor:
    """(..., D or D+1, K) -> (..., K D or K D + K): weight row by row, then bias."""
    if not has_bias(head):
        return block.mT.flatten(-2)
    weight, bias = block[..., :-1, :], block[..., -1, :]
    return torch.cat([weight.mT.flatten(-2), bias], dim=-1)
