"""Count, sums and products of what enters each layer that is watched: what `novelty` knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...data.storage import prefixed, unprefixed
from ...posterior.gram import Gram
from .block import Block
from .parts import Part, Plan


class LayerSums(Part):
    r"""For each layer the Gram of its rows with a column of ones, in float64.

    That is $\sum f f^\top$, $\sum f$ and the number of rows in one matrix, which add up and can be
    taken away like any Gram. Every row counts once, whatever its weight in the loss.
    """

    def __init__(self, grams: Sequence[Gram]) -> None:
        self.grams = list(grams)

    @classmethod
    def begin(cls, block: Block, plan: Plan) -> LayerSums | None:
        """Of no rows yet; None where no layer is watched."""
        if not block.layers:
            return None
        grams = []
        for rows in block.layers[0]:
            gram = Gram(rows.shape[1] + 1, device=rows.device, precision="double")
            grams.append(gram)
        return cls(grams)

    def update(self, block: Block) -> None:
        """Add the rows of the block's batches."""
        for gram, tables in zip(self.grams, zip(*block.layers, strict=True), strict=True):
            gram.update(torch.cat(tables), ones=True)

    def merge(self, other: LayerSums) -> None:
        """Add the sums of other rows; that both watch the same layers has been asked before."""
        merged = []
        for mine, theirs in zip(self.grams, other.grams, strict=True):
            merged.append(mine.merge(theirs))
        self.grams = merged

    def without(self, removed: LayerSums) -> LayerSums:
        """The sums of the rows that are left."""
        left = []
        for mine, theirs in zip(self.grams, removed.grams, strict=True):
            left.append(mine.without(theirs))
        return LayerSums(left)

    def to(self, device: torch.device) -> LayerSums:
        """A copy on a device."""
        return LayerSums([gram.to(device) for gram in self.grams])

    def state(self) -> dict[str, Tensor]:
        """The sums, by the number of the layer."""
        tensors: dict[str, Tensor] = {}
        for number, gram in enumerate(self.grams):
            tensors |= prefixed(str(number), gram.state())
        return tensors

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> LayerSums:
        """The sums that `state` came from."""
        count = 1 + max(int(name.split(".")[0]) for name in state)
        return cls([Gram.from_state(unprefixed(str(number), state)) for number in range(count)])
