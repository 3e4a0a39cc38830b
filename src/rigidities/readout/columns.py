"""Feature columns of the readout heads: each head's weight, then its bias.

Features are derivatives with respect to the heads' weights, so that each column of the features
belongs to a weight. With `joint=False` a column belongs to one input of a head (every target has
its own copy of the weights: D columns, plus one for the bias). With `joint=True` every single
weight has a column. Heads that share a parameter share its columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .heads import channel_axis, has_bias, head_weights, own_parameters


class Columns:
    """Which columns of the features belong to which head.

    Args:
        heads: The readout heads, linear maps.
        joint: Whether there is one column per weight instead of one per input.

    Attributes:
        heads: As given.
        joint: As given.
        width: The number of columns, D or P.
        indices: For each head the columns of its weight and then its bias.
        biases: The columns of all parameters called "bias".
        disjoint: Whether no two heads share a parameter.
        single_bias: Whether there is one head, which has a bias.
        channel_axis: The dimension of the first head's channels, counted from the end.
    """

    def __init__(self, heads: list[nn.Module], *, joint: bool) -> None:
        self.heads = heads
        self.joint = joint
        self.width = 0
        self.biases = torch.empty(0, dtype=torch.long)
        self.indices: list[Tensor] = []
        columns_by_parameter: dict[object, Tensor] = {}
        for head in heads:
            columns = []
            parameters = dict(head._parameters.items())  # those of TorchScript are no dictionary
            for name, size in self._sizes(head).items():
                parameter = parameters.get(name)
                # A weight that is not a parameter (but normalised) is shared with no other head.
                key = (id(head), name) if parameter is None else id(parameter)
                if key not in columns_by_parameter:
                    new_columns = torch.arange(self.width, self.width + size)
                    columns_by_parameter[key] = new_columns
                    self.width += size
                    if name == "bias":
                        self.biases = torch.cat([self.biases, new_columns])
                columns.append(columns_by_parameter[key])
            self.indices.append(torch.cat(columns))
        self.disjoint = sum(len(index) for index in self.indices) == self.width
        # Looked up once: with a single head, a batch should cost nothing but the pass itself.
        self.single_bias = len(heads) == 1 and has_bias(heads[0])
        self.channel_axis = channel_axis(heads[0])

    def assemble(self, blocks: dict[int, Tensor]) -> Tensor:
        """Features (..., width) from the blocks of the heads that were called.

        Args:
            blocks: (..., columns of the head) by the number of the head. Columns that heads share
                add up, and those of other heads are zero.
        """
        first = next(iter(blocks.values()))
        all_blocks = []
        for i, index in enumerate(self.indices):
            zero = first.new_zeros(*first.shape[:-1], len(index))
            all_blocks.append(blocks.get(i, zero))
        if self.disjoint:
            return all_blocks[0] if len(all_blocks) == 1 else torch.cat(all_blocks, dim=-1)
        total = first.new_zeros(*first.shape[:-1], self.width)
        for index, block in zip(self.indices, all_blocks, strict=True):
            total = total.index_add(-1, index.to(block.device), block)
        return total

    def weights(self) -> Tensor:
        """The heads' weights by column, (width, K), or (width, 1) when joint; float64."""
        values_by_head = [self._head_weights(head) for head in self.heads]
        first = values_by_head[0]
        weights = first.new_zeros(self.width, first.shape[1], dtype=torch.float64)
        for index, values in zip(self.indices, values_by_head, strict=True):
            weights[index.to(weights.device)] = values.to(weights)
        return weights

    def change_of_head(self, change: Tensor, i: int) -> Tensor:
        """What a change (width, K or 1) of all weights means for head i: (D or D+1, K)."""
        head = self.heads[i]
        values = change[self.indices[i].to(change.device)]
        if not self.joint:
            return values
        outputs = head_weights(head).shape[1]
        if not has_bias(head):
            return values.reshape(outputs, -1).mT
        weight = values[:-outputs].reshape(outputs, -1)
        bias = values[-outputs:].reshape(1, -1)
        return torch.cat([weight.mT, bias])

    @torch.no_grad()
    def write(self, weights: Tensor) -> None:
        """Overwrite the heads' parameters with weights by column, (width, K or 1)."""
        for index, head in zip(self.indices, self.heads, strict=True):
            values = weights[index.to(weights.device)]
            flat = values[:, 0] if self.joint else joint_columns(values, head)
            names = [name for name, size in self._sizes(head).items() if size]
            parameters = [head.get_parameter(name) for name in names]
            pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, numbers in zip(parameters, pieces, strict=True):
                parameter.copy_(numbers.reshape(parameter.shape))

    def _head_weights(self, head: nn.Module) -> Tensor:
        """A head's weights by column, (columns of the head, K or 1)."""
        weights = head_weights(head)
        if self.joint:
            return joint_columns(weights, head)[:, None]
        return weights

    def _sizes(self, head: nn.Module) -> dict[str, int]:
        """How many columns each parameter of a head has, by name."""
        weight = head.weight  # (K, D), or (K, D, 1, ...) of a convolution
        assert isinstance(weight, Tensor)
        columns_per_input = len(weight) if self.joint else 1
        inputs = weight.shape[1]
        biases = 0 if getattr(head, "bias", None) is None else columns_per_input
        return {"weight": inputs * columns_per_input, "bias": biases}


class ParameterColumns(Columns):
    """A column for every number in the heads' own parameters; heads may be any modules."""

    def change_of_head(self, change: Tensor, i: int) -> Tensor:
        """What a change (width, 1) of all parameters means for head i: (P, 1)."""
        return change[self.indices[i].to(change.device)]

    def _head_weights(self, head: nn.Module) -> Tensor:
        flat = [parameter.detach().flatten() for parameter in own_parameters(head).values()]
        return torch.cat(flat)[:, None]

    def _sizes(self, head: nn.Module) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in own_parameters(head).items()}


def joint_columns(block: Tensor, head: nn.Module) -> Tensor:
    """(..., D or D+1, K) -> (..., K D or K D + K): weight row by row, then bias."""
    if not has_bias(head):
        return block.mT.flatten(-2)
    weight, bias = block[..., :-1, :], block[..., -1, :]
    return torch.cat([weight.mT.flatten(-2), bias], dim=-1)
