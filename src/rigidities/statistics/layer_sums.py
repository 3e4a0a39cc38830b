"""Sums over the inputs of each layer that is watched: what `novelty` knows of the training data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.storage import prefixed, unprefixed
from ..posterior.gram import Gram
from .block import Block


class LayerSums:
    r"""For each layer the Gram of its rows with a column of ones, in float64.

    That is $\sum f f^\top$, $\sum f$ and the number of rows in one matrix. They are added and
    subtracted like any Gram. Every row counts once, whatever its weight in the loss.

    Attributes:
        grams: One Gram per layer, in the order of the layers.
    """

    def __init__(self, grams: Sequence[Gram]) -> None:
        self.grams = list(grams)

    @classmethod
    def begin(cls, block: Block) -> LayerSums | None:
        """Empty sums; None where no layer is watched."""
        if not block.layers:
            return None
        grams = []
        for table in block.layers[0]:
            gram = Gram(table.shape[1] + 1, device=table.device, precision="double")
            grams.append(gram)
        return cls(grams)

    def update(self, block: Block) -> None:
        """Add the rows of the block's batches."""
        # `block.layers` goes by batch, then by layer; here each layer needs its tables.
        tables_by_layer = zip(*block.layers, strict=True)
        for gram, tables in zip(self.grams, tables_by_layer, strict=True):
            gram.update(torch.cat(tables), ones=True)

    def merge(self, other: LayerSums) -> None:
        """Add the sums of other rows. Both must watch the same layers, which is checked before."""
        merged = []
        for gram, other_gram in zip(self.grams, other.grams, strict=True):
            merged.append(gram.merge(other_gram))
        self.grams = merged

    def without(self, removed: LayerSums) -> LayerSums:
        """The sums of the remaining rows."""
        remaining = []
        for gram, removed_gram in zip(self.grams, removed.grams, strict=True):
            remaining.append(gram.without(removed_gram))
        return LayerSums(remaining)

    def to(self, device: torch.device) -> LayerSums:
        """A copy on a device."""
        return LayerSums([gram.to(device) for gram in self.grams])

    def state(self) -> dict[str, Tensor]:
        """The sums, by the number of the layer."""
        tensors: dict[str, Tensor] = {}
        for number, gram in enumerate(self.grams):
            tensors.update(prefixed(str(number), gram.state()))
        return tensors

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> LayerSums:
        """The sums that `state` came from."""
        numbers = [int(name.split(".")[0]) for name in state]
        grams = []
        for number in range(1 + max(numbers)):
            grams.append(Gram.from_state(unprefixed(str(number), state)))
        return cls(grams)
