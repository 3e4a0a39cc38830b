"""How unfamiliar an input looks to each layer of the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["NoveltyScores"]

_SHOWN = 5
"""How many inputs are printed: the most unfamiliar ones."""


@dataclass(frozen=True)
class NoveltyScores:
    """How far the input of each layer lies from the layer's inputs in training.

    Distances are relative to those that 95 % of the calibration rows stay below in every layer at
    once: 1 is unusual, 10 is unlike anything that the layer got in training.

    Attributes:
        by_layer: Relative distances, (N, L), one row per input and one column per layer.
        layers: Names of the L layers.

    Examples:
        >>> novelty = NoveltyScores(torch.tensor([[0.5, 0.4], [1.0, 9.0]]), ("the input", "2"))
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
        """The largest novelty of each input over the layers, (N,)."""
        return self.by_layer.amax(1)

    @property
    def layer(self) -> list[str]:
        """The name of the layer with the largest novelty, for each of N inputs."""
        return [self.layers[column] for column in self.by_layer.argmax(1).tolist()]

    def __getitem__(self, index: Any) -> NoveltyScores:
        rows = torch.arange(len(self), device=self.by_layer.device)[index]
        return NoveltyScores(self.by_layer[rows.reshape(-1)], self.layers)

    def __len__(self) -> int:
        return len(self.by_layer)

    def __str__(self) -> str:
        inputs = "1 input" if len(self) == 1 else f"{len(self)} inputs"
        layers = "1 layer" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        lines = [f"Novelty of {inputs} to {layers}"]
        layer_names = self.layer
        largest = self.largest.tolist()
        most_unfamiliar = self.largest.argsort(descending=True)[:_SHOWN].tolist()
        for row in most_unfamiliar:
            lines.append(f"  row {row:<4d} {largest[row]:8.2f}  at {layer_names[row]}")
        if len(self) > _SHOWN:
            lines.append("  ...")
        return "\n".join(lines)
