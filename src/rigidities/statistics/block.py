r"""Rows on their way from the model to the statistics, and the one place where they wait.

Every batch that has passed the model becomes a `Block`. Many small matrix products keep any
processor waiting, so small blocks are copied into arrays that were allocated once, and leave them
as one larger block (`joined`). The arrays are our own memory: neither a loader that yields the same
buffer again nor a model that writes its outputs into static memory can spoil what waits in them.
Large blocks are used as they are, at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..data.hashes import output_hashes, row_hashes, sample_hashes
from ..data.sources import ColumnNames
from ..readout.reading import Reading

_CPU_BYTES = 1 << 20
"""Bytes of the arrays on a CPU, about what a cache holds."""
_CPU_ROWS = 512
"""Rows that the arrays on a CPU have at least: with fewer, a Gram takes more time per row."""
_MOST_BATCHES = 64
"""The most batches that may wait. An interrupted fit of a slow model should not lose more."""
_DEVICE_ROWS = 1 << 18
"""The most rows of the arrays on an accelerator."""
_DEVICE_BYTES = 1 << 28
"""The most bytes of the arrays on an accelerator."""

DerivativeRows = tuple[Tensor, Tensor, Tensor | None]
"""Rows of derivatives in the loss: their features, weights, and residuals (None without)."""


@dataclass(frozen=True)
class BatchRange:
    """The consecutive batches of a block.

    Attributes:
        first: The number of the first batch.
        ends: For each batch, how many samples the block has up to its end.
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
        """The number of the batch in which a sample of the block stands."""
        return self.first + bisect_right(self.ends, sample)

    def samples(self, number: int) -> slice:
        """The samples of the batch of a number."""
        place = number - self.first
        start = self.ends[place - 1] if place else 0
        return slice(start, self.ends[place])


@dataclass(frozen=True)
class Block:
    """Rows of consecutive batches: N samples with M output rows, each of K targets.

    Attributes:
        samples: The number of samples N.
        rows: The number of output rows M. It is a multiple of N, except in blocks that never wait.
        reading: Outputs and features, as one pass over all the batches would give them.
        target: The target, shaped like the output; None without.
        weights: Weights of the rows in the Gram, (M, 1) or (M, K); None for ones.
        sample_weight: The user's factor in the weights, (M, 1) or (M, K); None without.
        inputs: Tensors of the inputs, each with one row per sample. Empty where inputs have no
            such rows (atoms of structures) or have been hashed already.
        batches: Which batches they are.
        known_hashes: Hashes of the samples (N,), where they have been hashed already.
        derivatives: Rows of derivatives with respect to the inputs, which count only in the Gram.
            They are computed while the Gram takes them, a few at a time, once. None for none.
        layout: The layout of the features: "shared" by the targets, "separate" for each (a Gram
            each), or "joint", where each target of a row is a row of the Gram.
        expected: How many samples there will be in all, where that is known.
        columns: Names of the columns, where the inputs were data frames.
    """

    samples: int
    rows: int
    reading: Reading
    target: Tensor | None
    weights: Tensor | None
    sample_weight: Tensor | None
    inputs: list[Tensor]
    batches: BatchRange
    known_hashes: Tensor | None = None
    derivatives: Iterator[DerivativeRows] | None = None
    layout: str = "shared"
    expected: int | None = None
    columns: ColumnNames = None

    @cached_property
    def residual(self) -> Tensor | None:
        """Target minus prediction, (M, K) in float64."""
        if self.target is None:
            return None
        return self.reading.output_layout.rows(self.target.to(torch.float64) - self.reading.output)

    @cached_property
    def counted_residual(self) -> Tensor | None:
        """The residual, zero where a row has no weight, since it may lack a target."""
        if self.residual is None or self.weights is None:
            return self.residual
        return torch.where(self.weights > 0, self.residual, 0.0)

    @cached_property
    def sample_hashes(self) -> Tensor | None:
        """One hash per sample, of its inputs and target (N,); None where inputs have no rows."""
        if self.known_hashes is not None:
            return self.known_hashes
        return sample_hashes(self.inputs, self.target, self.samples)

    @cached_property
    def output_row_hashes(self) -> Tensor | None:
        """One hash per output row (M,); None where rows do not belong to samples evenly.

        It is made of the sample's hash, the row's place and its sample weight. Where samples have
        no hash, it is made of the bits of the row's features and target.
        """
        if self.sample_hashes is not None:
            if self.rows % len(self.sample_hashes):
                return None
            return output_hashes(self.sample_hashes, self.rows, self.sample_weight)
        values = [self.reading.bare_features]
        if self.target is not None:
            values.append(self.reading.output_layout.rows(self.target))
        return row_hashes(values, self.rows)

    def hashed(self) -> Block:
        """The same block with the hashes of its inputs in place of the inputs."""
        return replace(self, inputs=[], known_hashes=self.sample_hashes)


def joined(blocks: Iterable[Block]) -> Iterator[Block]:
    """The same rows in larger blocks, where the given ones are small.

    A block that was joined is a view of arrays that are written to again for the next one: be done
    with it before you ask for another.

    Args:
        blocks: One for each batch.
    """
    waiting: _Waiting | None = None
    for block in blocks:
        tensors = _tensors_of(block)
        form = _form_of(block, tensors)
        if waiting is None or form != waiting.form:
            if waiting is not None and waiting.filled:
                yield waiting.emptied()
            waiting = _Waiting(form, block, _capacity(block, tensors))
        if 2 * block.samples > waiting.capacity:  # large enough by itself
            if waiting.filled:
                yield waiting.emptied()
            yield block
            continue
        if waiting.filled + block.samples > waiting.capacity:
            yield waiting.emptied()
        waiting.take(block, tensors)
        is_full = waiting.filled + block.samples > waiting.capacity  # for another one like it
        if is_full or len(waiting.ends) == _MOST_BATCHES:
            yield waiting.emptied()
    if waiting is not None and waiting.filled:
        yield waiting.emptied()


class _Waiting:
    """Rows that wait until they fill a block, in arrays that are allocated once and used again.

    Args:
        form: What the blocks have in common; see `_form_of`.
        like: The first block of this form.
        capacity: How many samples there is room for.

    Attributes:
        form: As given.
        capacity: As given.
        filled: How many samples wait.
        ends: As in `BatchRange`, for the batches that wait.
    """

    def __init__(self, form: tuple[object, ...], like: Block, capacity: int) -> None:
        self.form = form
        self.capacity = capacity
        self.filled = 0
        self.ends: list[int] = []
        self._like = like
        self._arrays: list[Tensor | None] = []  # allocated for the first batch that waits
        self._first_batch = 0  # the number of the first batch that waits

    def take(self, block: Block, tensors: list[Tensor | None]) -> None:
        """Copy the rows of one batch, for which there is room."""
        count = block.samples
        if not self._arrays:
            for tensor in tensors:
                array = None
                if tensor is not None:
                    rows = self.capacity * (tensor.shape[0] // count)
                    array = tensor.new_empty(rows, *tensor.shape[1:])
                self._arrays.append(array)
        if not self.filled:
            self._first_batch = block.batches.first
        start = self.filled
        self.filled += count
        self.ends.append(self.filled)
        for array, tensor in zip(self._arrays, tensors, strict=True):
            if array is not None and tensor is not None:
                per_sample = tensor.shape[0] // count
                array[start * per_sample : self.filled * per_sample].copy_(tensor)

    def emptied(self) -> Block:
        """The samples that wait, as a block that views the arrays; then none wait."""
        like = self._like
        views: list[Tensor | None] = []
        for array in self._arrays:
            if array is None:
                views.append(None)
            else:
                rows_per_sample = array.shape[0] // self.capacity
                views.append(array[: self.filled * rows_per_sample])
        # The order of `_tensors_of`.
        output, features, bias_counts, target, weights, sample_weight, hashes, *input_views = views
        assert output is not None
        assert features is not None
        reading = replace(
            like.reading,
            output=output,
            bare_features=features,
            bias_counts=bias_counts,
            output_layout=like.reading.output_layout.of_output(output),
        )
        block = replace(
            like,
            samples=self.filled,
            rows=features.shape[0],
            reading=reading,
            target=target,
            weights=weights,
            sample_weight=sample_weight,
            inputs=[view for view in input_views if view is not None],
            known_hashes=hashes,
            batches=BatchRange(self._first_batch, self.ends),
        )
        self.filled = 0
        self.ends = []
        return block


def _capacity(block: Block, tensors: list[Tensor | None]) -> int:
    """How many samples of a block's form a joined block may have; 0 where they must not wait."""
    rows_per_sample = block.rows / block.samples
    if block.derivatives is not None or rows_per_sample != int(rows_per_sample):
        return 0
    total_bytes = 0
    for tensor in tensors:
        if tensor is not None:
            total_bytes += tensor.nbytes
    bytes_per_sample = total_bytes / block.samples
    if block.reading.bare_features.device.type == "cpu":
        samples = max(_CPU_ROWS / rows_per_sample, _CPU_BYTES / bytes_per_sample)
    else:
        samples = min(_DEVICE_ROWS / rows_per_sample, _DEVICE_BYTES / bytes_per_sample)
    return max(1, int(samples))


def _tensors_of(block: Block) -> list[Tensor | None]:
    """The tensors of a block that wait, in the order in which `_Waiting.emptied` unpacks them."""
    return [
        block.reading.output,
        block.reading.bare_features,
        block.reading.bias_counts,
        block.target,
        block.weights,
        block.sample_weight,
        block.known_hashes,
        *block.inputs,
    ]


def _form_of(block: Block, tensors: list[Tensor | None]) -> tuple[object, ...]:
    """What blocks must have in common to be joined: shapes, dtypes, devices and layout."""
    kinds: list[object] = []
    for tensor in tensors:
        if tensor is None:
            kinds.append(None)
        else:
            kinds.append((tensor.shape[1:], tensor.dtype, tensor.device))
    layout = block.reading.output_layout
    view = (layout.inner[1:], layout.axis, id(layout.order))
    return (kinds, block.rows / block.samples, block.reading.ones, view)
