r"""Rows on their way from the model to the statistics, and the one place where they wait.

Every batch that the model has passed becomes a `Block`. Many small products keep any processor
waiting, so small blocks are copied into arrays that were allocated once (`Waiting`) and leave them
as one larger block. The arrays are our own memory: neither a loader that yields the same buffer
again nor a model that writes its outputs into static memory can spoil what waits in them. Large
blocks are used as they are, at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...data.arrays import Columns
from ...data.sketch import output_hashes, row_hashes
from ..readout.reading import Reading

WIDE_INPUT = 4096
"""Bytes of one sample's inputs (an image's, say) beyond which they are hashed at once, not kept."""

_CPU_BYTES = 1 << 20
"""Bytes of the arrays on a CPU, unless its statistics prefer more rows: what a cache holds."""
_MOST_BATCHES = 64
"""Batches that may wait: of a slow model, so many take as long as one likes to lose."""
_DEVICE_ROWS = 1 << 16
_DEVICE_BYTES = 1 << 28
"""Rows and bytes of the arrays on an accelerator at most."""

DerivativeRows = tuple[Tensor, Tensor, Tensor | None]
"""Features, weights and residuals (None without) of derivatives that the loss had, row by row."""


@dataclass(frozen=True)
class BatchRange:
    """The consecutive batches of a block.

    Attributes:
        first: the number of the first batch.
        ends: for each batch, how many samples the block has up to its end.
    """

    first: int
    ends: Sequence[int]

    @property
    def next(self) -> int:
        """The number of the batch that comes after them."""
        return self.first + len(self.ends)

    @property
    def name(self) -> str:
        """What messages call them."""
        if len(self.ends) == 1:
            return f"Batch {self.first}"
        return f"Batches {self.first} to {self.next - 1}"

    def number(self, sample: int) -> int:
        """The number of the batch that a sample of the block stands in."""
        return self.first + bisect_right(self.ends, sample)

    def samples(self, number: int) -> slice:
        """The samples of one batch, by its number."""
        place = number - self.first
        start = self.ends[place - 1] if place else 0
        return slice(start, self.ends[place])


@dataclass(frozen=True)
class Block:
    """Rows of consecutive batches; N samples with M output rows, each of K targets.

    Attributes:
        samples: N.
        rows: M; a multiple of N, but for blocks that never wait.
        reading: outputs and features, as one pass over all the batches would give them.
        target: shaped like the output; None without.
        weights: of the rows in the Gram, (M, 1) or (M, K); None for ones.
        importance: the user's part in the weights, (M, 1) or (M, K); None without.
        inputs: tensors of the inputs, each with one row per sample; empty where inputs have no
            such rows (atoms of structures) or have been hashed already.
        given_hashes: of the samples (N,), where they have been hashed already.
        derivatives: rows of derivatives by the inputs, which count in the Gram alone. They are
            computed while the Gram takes them, a few at a time, once.
        layout: of the features: "shared" by the targets, "separate" for each (a Gram each), or
            "joint", where each target of a row is a row of the Gram.
        batches: which batches they are.
        expected: how many samples will come in all, where that is known.
        columns: names of the columns of data frames, where the inputs were any.
        layers: what entered the layers that are watched: for each batch, for each layer, a table
            (R, columns) in memory of its own. Empty where none are watched.
    """

    samples: int
    rows: int
    reading: Reading
    target: Tensor | None
    weights: Tensor | None
    importance: Tensor | None
    inputs: list[Tensor]
    batches: BatchRange
    given_hashes: Tensor | None = None
    derivatives: Iterable[DerivativeRows] = ()
    layout: str = "shared"
    expected: int | None = None
    columns: Columns = None
    layers: Sequence[Sequence[Tensor]] = ()

    @property
    def features(self) -> Tensor:
        """All but a last column of ones, if `reading.ones`: (M, D) or (M, K, D)."""
        return self.reading.inputs

    @cached_property
    def residual(self) -> Tensor | None:
        """Target minus prediction, (M, K) in float64."""
        if self.target is None:
            return None
        return self.reading.rows(self.target.to(torch.float64) - self.reading.output)

    @cached_property
    def counted_residual(self) -> Tensor | None:
        """The same, zero where a row has no weight: it may lack a target."""
        if self.residual is None or self.weights is None:
            return self.residual
        return torch.where(self.weights > 0, self.residual, 0.0)

    @cached_property
    def hashes(self) -> Tensor | None:
        """One hash per sample, of its inputs and target (N,); None where inputs have no rows."""
        if self.given_hashes is not None:
            return self.given_hashes
        if not self.inputs:
            return None
        values = self.inputs if self.target is None else [*self.inputs, self.target]
        return row_hashes(values, self.samples)

    @cached_property
    def row_hashes(self) -> Tensor | None:
        """One hash per output row (M,).

        From its sample's hash, its place and its importance; where samples have no hash, from the
        bits of its features and target.
        """
        if self.hashes is not None:
            if self.rows % len(self.hashes):
                return None
            return output_hashes(self.hashes, self.rows, self.importance)
        values = [self.features]
        if self.target is not None:
            values.append(self.reading.rows(self.target))
        return row_hashes(values, self.rows)

    def hashed(self) -> Block:
        """The same without its inputs, of which the hashes are left."""
        return replace(self, inputs=[], given_hashes=self.hashes)


class Waiting:
    """Where rows wait until they fill a block: arrays that are allocated once and used again.

    Args:
        consume: is called with each block that is complete, in order, and must be done with it
            when it returns: the arrays are then written to again.
        preferred_rows: tells for features of a width how many rows a block should have at least
            on a CPU.
    """

    def __init__(
        self, consume: Callable[[Block], None], preferred_rows: Callable[[int], int]
    ) -> None:
        self._consume = consume
        self._preferred_rows = preferred_rows
        self._form: tuple[object, ...] = ()
        self._like: Block | None = None  # the first block of this form; keeps its `order` alive
        self._room = 0  # samples
        self._arrays: list[Tensor | None] = []
        self._filled = 0  # samples
        self._first = 0  # number of the first batch that waits
        self._ends: list[int] = []
        self._layers: list[Sequence[Tensor]] = []  # of each batch that waits

    def take(self, block: Block) -> None:
        """Take the rows of one batch in."""
        reading = block.reading
        tensors = [
            reading.output,
            reading.inputs,
            reading.counts,
            block.target,
            block.weights,
            block.importance,
            block.given_hashes,
            *block.inputs,
        ]
        # Blocks can be joined whose forms are equal.
        kinds = [None if t is None else (t.shape[1:], t.dtype, t.device) for t in tensors]
        layout = (reading.ones, reading.inner[1:], reading.axis, id(reading.order))
        form = (kinds, block.rows / block.samples, layout)
        if form != self._form:
            self.flush()
            self._form = form
            self._like = block
            self._room = self._largest(block, tensors)
            self._arrays = []
        count = block.samples
        if 2 * count > self._room:  # large enough by itself
            self.flush()
            self._consume(block)
            return
        if self._filled + count > self._room:
            self.flush()
        if not self._arrays:
            self._arrays = [self._array(tensor, count) for tensor in tensors]
        if not self._filled:
            self._first = block.batches.first
        start = self._filled
        self._filled += count
        self._ends.append(self._filled)
        self._layers.extend(block.layers)
        for array, tensor in zip(self._arrays, tensors, strict=True):
            if array is not None and tensor is not None:
                per_sample = tensor.shape[0] // count
                array[start * per_sample : self._filled * per_sample].copy_(tensor)
        full = self._filled + count > self._room  # another one like it would not fit
        if full or len(self._ends) == _MOST_BATCHES:
            self.flush()

    def flush(self) -> None:
        """Hand on the rows that wait, if any."""
        if self._filled:
            block = self._joined()
            self._filled = 0
            self._ends = []
            self._layers = []
            self._consume(block)

    def _largest(self, block: Block, tensors: list[Tensor | None]) -> int:
        """How many samples of this form a block may have; 0 where they must not wait."""
        rows_per_sample = block.rows / block.samples
        if block.derivatives or rows_per_sample != int(rows_per_sample):
            return 0
        watched = [rows for batch in block.layers for rows in batch]
        held = [tensor for tensor in tensors if tensor is not None]
        bytes_per_sample = sum(tensor.nbytes for tensor in [*held, *watched]) / block.samples
        if block.features.device.type == "cpu":
            samples = self._preferred_rows(block.features.shape[-1]) / rows_per_sample
            samples = max(samples, _CPU_BYTES / bytes_per_sample)
        else:
            samples = min(_DEVICE_ROWS / rows_per_sample, _DEVICE_BYTES / bytes_per_sample)
        return max(1, int(samples))

    def _array(self, tensor: Tensor | None, samples: int) -> Tensor | None:
        """Memory for a full block of what a tensor is for some samples."""
        if tensor is None:
            return None
        return tensor.new_empty(self._room * (tensor.shape[0] // samples), *tensor.shape[1:])

    def _joined(self) -> Block:
        """The samples that wait, as a block that views the arrays."""
        like = self._like
        assert like is not None
        views: list[Any] = []
        for array in self._arrays:
            end = 0 if array is None else self._filled * (array.shape[0] // self._room)
            views.append(None if array is None else array[:end])
        output, features, counts, target, weights, importance, hashes, *inputs = views
        leading = like.reading.inner[0] * self._filled // like.samples
        reading = replace(
            like.reading,
            output=output,
            inputs=features,
            counts=counts,
            inner=torch.Size([leading, *like.reading.inner[1:]]),
        )
        return replace(
            like,
            samples=self._filled,
            rows=features.shape[0],
            reading=reading,
            target=target,
            weights=weights,
            importance=importance,
            inputs=inputs,
            given_hashes=hashes,
            batches=BatchRange(self._first, self._ends),
            layers=self._layers,
        )
