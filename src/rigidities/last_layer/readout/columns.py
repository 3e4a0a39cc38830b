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
        joint: one column per weight instead of one per input.
        indices: for each head the columns of its weight and then its bias.
        biases: the columns of all biases, which are parameters of that name.
        disjoint: whether no two heads share a parameter.
    """

    def __init__(self, heads: list[nn.Module], *, joint: bool) -> None:
        self.heads, self.joint, self.width = heads, joint, 0
        self.biases = torch.empty(0, dtype=torch.long)
        known: dict[object, Tensor] = {}
        self.indices = [torch.cat(self._parts(head, known)) for head in heads]
        self.disjoint = sum(len(index) for index in self.indices) == self.width

    def assemble(self, blocks: dict[int, Tensor]) -> Tensor:
        """Features (..., width) from the called heads' blocks; shared columns add up."""
        first = next(iter(blocks.values()))
        empty = (first.new_zeros(*first.shape[:-1], len(index)) for index in self.indices)
        whole = [blocks.get(i, zero) for i, zero in enumerate(empty)]
        if self.disjoint:
            return whole[0] if len(whole) == 1 else torch.cat(whole, dim=-1)
        total = first.new_zeros(*first.shape[:-1], self.width)
        for index, block in zip(self.indices, whole, strict=True):
            total = total.index_add(-1, index.to(block.device), block)
        return total

    def weights(self) -> Tensor:
        """The heads' weights by column, (width, K), or (width, 1) when joint; float64."""
        parts = [self._weights(head).to(torch.float64) for head in self.heads]
        total = parts[0].new_zeros(self.width, parts[0].shape[1])
        for index, part in zip(self.indices, parts, strict=True):
            total[index.to(total.device)] = part.to(total.device)
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

    @torch.no_grad()
    def write(self, given: Tensor) -> None:
        """Let the heads' parameters be these weights (width, K or 1)."""
        for index, head in zip(self.indices, self.heads, strict=True):
            part = given[index.to(given.device)]
            flat = part[:, 0] if self.joint else joint_columns(part, head)
            own = [head.get_parameter(name) for name, size in self._sizes(head).items() if size]
            parts = torch.split(flat, [parameter.numel() for parameter in own])
            for parameter, numbers in zip(own, parts, strict=True):
                parameter.copy_(numbers.reshape(parameter.shape))

    def _weights(self, head: nn.Module) -> Tensor:
        return joint_columns(weights(head), head)[:, None] if self.joint else weights(head)

    def _sizes(self, head: nn.Module) -> dict[str, int]:
        inputs, outputs = weights(head).shape
        bias, each = has_bias(head), outputs if self.joint else 1
        return {"weight": (inputs - bias) * each, "bias": each * bias}

    def _parts(self, head: nn.Module, known: dict[object, Tensor]) -> list[Tensor]:
        parts = []
        for name, size in self._sizes(head).items():
            parameter = dict(head._parameters.items()).get(name)
            key = (id(head), name) if parameter is None else id(parameter)
            if key not in known:
                known[key] = torch.arange(self.width, self.width + size)
                self.width += size
                self.biases = torch.cat([self.biases, known[key][: size * (name == "bias")]])
            parts.append(known[key])
        return parts


class ParameterColumns(Columns):
    """A column for every number in the parameters that the heads, any modules, own themselves."""

    def share(self, change: Tensor, i: int) -> Tensor:
        """Head i's part (P, 1) of a change (width, 1) of the parameters."""
        return change[self.indices[i].to(change.device)]

    def _weights(self, head: nn.Module) -> Tensor:
        return torch.cat([p.detach().flatten() for p in own_parameters(head).values()])[:, None]

    def _sizes(self, head: nn.Module) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in own_parameters(head).items()}


def joint_columns(block: Tensor, head: nn.Module) -> Tensor:
    """(..., D or D+1, K) -> (..., K D or K D + K): weight row by row, then bias."""
    if not has_bias(head):
        return block.mT.flatten(-2)
    weight, bias = block[..., :-1, :], block[..., -1, :]
    return torch.cat([weight.mT.flatten(-2), bias], dim=-1)
