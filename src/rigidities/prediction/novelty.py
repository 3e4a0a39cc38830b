"""How unlike the training data an input looks to each layer of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Novelty:
    """How far what enters each layer lies from what entered it in training.

    Distances are relative to the one that 95 % of the calibration rows stay below, each layer's
    own: 1 is unusual, 10 is nothing that the layer has seen.

    Attributes:
        by_layer: (N, L), one row per input and one column per layer.
        layers: what the layers are called, L names.

    Examples:
        >>> novelty = Novelty(torch.tensor([[0.5, 0.4], [1.0, 9.0]]), ("the input", "2"))
        >>> novelty.largest.tolist(), novelty.layer
        ([0.5, 9.0], ['the input', '2'])
        >>> print(novelty)
        Novelty of 2 inputs to 2 layers
          row 1      9.00  at 2
          row 0      0.50  at the input
    """

    by_layer: Tensor
    layers: tuple[str, ...]

    @property
    def largest(self) -> Tensor:
        """Of each input, (N,): that of the layer to which it is most unfamiliar."""
        return self.by_layer.amax(1)

    @property
    def layer(self) -> list[str]:
        """The name of that layer, for each input."""
        return [self.layers[column] for column in self.by_layer.argmax(1).tolist()]

    def __getitem__(self, index: Any) -> Novelty:
        rows = torch.arange(len(self), device=self.by_layer.device)[index]
        return Novelty(self.by_layer[rows.reshape(-1)], self.layers)

    def __len__(self) -> int:
        return len(self.by_layer)

    @classmethod
    def concatenate(cls, parts: Sequence[Novelty]) -> Novelty:
        """That of some inputs and of others as one, in this order."""
        if len({part.layers for part in parts}) != 1:
            raise ValueError("Expected novelties of one model's layers, got none or several.")
        return cls(torch.cat([part.by_layer for part in parts]), parts[0].layers)

    def __str__(self) -> str:
        count = f"{len(self)} input{'s' * (len(self) != 1)}"
        lines = [f"Novelty of {count} to {len(self.layers)} layers"]
        layer = self.layer
        largest = self.largest.tolist()
        order = self.largest.argsort(descending=True)[:_SHOWN].tolist()
        lines += [f"  row {row:<4d} {largest[row]:8.2f}  at {layer[row]}" for row in order]
        if len(self) > _SHOWN:
            lines.append("  ...")
        return "\n".join(lines)


_SHOWN = 5
"""Inputs to print: the most unfamiliar ones."""
