"""Training data as batches that can be read more than once.

`Samples.of` reads what the user handed in (inputs, targets, weights). Iterating over the result
gives `SampleBatch`es with the weights of their rows, as often as needed; `pieces` cuts batches that
are too large for one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..models.modes import ordinary
from .batches import Batch, BatchFormat, Reader
from .sources import (
    ColumnNames,
    as_array,
    each_member,
    is_array,
    members_of,
    raw_batches,
    with_target,
)

SampleWeight = Tensor | Callable[[Any], Tensor]


@dataclass(frozen=True)
class SampleBatch(Batch):
    """A batch with the weights of its samples.

    Attributes:
        weight: (N, 1) in float64; None where there are no weights.
    """

    weight: Tensor | None = None

    def __len__(self) -> int:
        return sample_count(*self.args, **self.kwargs) or 0

    def target_rows(self, outputs: Tensor, shape: torch.Size) -> Tensor | None:
        """The target in float64, shaped like the predictions; None where there is no target.

        Args:
            outputs: The predictions, (N, K).
            shape: The shape of one sample's prediction; dimensions of length one are ignored.

        Raises:
            ValueError: The target is not shaped like the predictions.
        """
        if self.target is None:
            return None
        target_shape = [size for size in self.target.shape[1:] if size != 1]
        expected_shape = [size for size in shape if size != 1]
        if self.target.shape[0] != len(outputs) or target_shape != expected_shape:
            raise ValueError(
                f"Targets must be shaped like the predictions, {(len(outputs), *shape)}, got "
                f"{tuple(self.target.shape)}."
            )
        return self.target.to(torch.float64).reshape(outputs.shape)

    def double(self) -> SampleBatch:
        """The same with floating-point inputs in float64."""
        return self.mapped(doubled)

    def pieces(self, rows: int) -> Iterator[SampleBatch]:
        """The same samples, at most `rows` at a time."""
        count = sample_count(*self.args, **self.kwargs)
        if count is None or count <= rows:
            yield self
            return
        for start in range(0, count, rows):
            yield self._piece(slice(start, start + rows), count)

    def _piece(self, rows: slice, count: int) -> SampleBatch:
        """Some of the `count` samples: every tensor with one row per sample is cut."""

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim > 0 and len(value) == count:
                return value[rows]
            return value

        return replace(
            self.mapped(cut),
            target=cut(self.target),
            weight=cut(self.weight),
            raw=each_member(self.raw, cut),
        )


@dataclass(frozen=True)
class Samples:
    """Data that can be read batch by batch, as often as needed; only the source is in memory.

    Attributes:
        data: What `sources.raw_batches` reads.
        reader: Takes raw batches apart.
        weight: The weight of each sample, (N,), or callable(batch) -> (N,); None for equal weights.
        batch_size: Rows per batch where the data are not batches already.
        ordered: Whether a shuffled loader must be read in its own order, rather than by slices of
            its data set.
    """

    data: Any
    reader: Reader
    weight: SampleWeight | None
    batch_size: int | None
    ordered: bool = False

    @classmethod
    def of(
        cls,
        inputs: Any,
        targets: Any = None,
        weight: SampleWeight | None = None,
        *,
        like: Tensor,
        batch_size: int | None = None,
        count: int | None = None,
        ordered: bool = False,
        names: ColumnNames = None,
    ) -> Samples:
        """Read what the user handed in: x and y, or one data set of both.

        Args:
            inputs: x, or a data set with targets. An iterator is read into a list.
            targets: y; None where `inputs` contains them.
            weight: The weights of samples, as in the class.
            like: A parameter of the model, whose device and precision the samples get.
            batch_size: Rows per batch where the data are not batches already.
            count: Number of positional inputs in the fit, where known.
            ordered: As in the class.
            names: Columns of the data frames of the fit, where known.

        Raises:
            ValueError: The inputs are not batched, there are none, or the weights do not match
                them.
        """
        if isinstance(inputs, (int, float)) or (isinstance(inputs, Tensor) and inputs.ndim == 0):
            raise ValueError("Inputs must be batched, of shape (N, ...); got a single number.")
        data = with_target(inputs, targets)
        batch_format = BatchFormat(inputs=count, columns=names)
        reader = Reader(like.device, like.dtype, batch_format).knowing(data)
        if isinstance(data, (tuple, Mapping)):
            data = each_member(data, as_array)
        else:
            data = as_array(data)
        if isinstance(data, Iterator):
            data = list(data)
        if weight is not None and not callable(weight):
            if targets is None and not isinstance(data, (Tensor, tuple)):
                raise ValueError(
                    "For data that come in batches, sample_weight must be callable(batch) -> (N,)."
                )
            weight = torch.as_tensor(weight)
        samples = cls(data, reader, weight, batch_size, ordered)
        samples._check()
        return samples

    def __iter__(self) -> Iterator[SampleBatch]:
        offset = 0
        raw = raw_batches(self.data, self.batch_size, any_order=not self.ordered)
        for batch in self.reader.batches(raw.batches, None, sliced=False):
            weighted = _with_weight(batch, self.weight, offset)
            yield weighted
            offset += len(weighted)

    @cached_property
    def count(self) -> int:
        """Number of samples; for a loader, the number of its data set."""
        if isinstance(self.data, (Tensor, tuple, Mapping)) or is_array(self.data):
            return len(members_of(self.data)[0])
        source = self.data.dataset if isinstance(self.data, DataLoader) else self.data
        if isinstance(source, Dataset) and hasattr(source, "__len__"):
            return len(source)
        return sum(len(batch) for batch in self)

    def pieces(self, rows: int) -> Iterator[SampleBatch]:
        """All samples, at most `rows` at a time."""
        for batch in self:
            yield from batch.pieces(rows)

    def _check(self) -> None:
        """Refuse data without samples, and a number of weights that is not that of the samples."""
        first = next(iter(self), None)
        if first is None or len(first) == 0:
            raise ValueError("There are no data: expected at least one sample.")
        if isinstance(self.weight, Tensor):
            shape = tuple(self.weight.shape)
            if not shape or shape[0] != self.count:
                raise ValueError(
                    f"sample_weight must have one entry per sample, {self.count}, got {shape}."
                )


def doubled(value: Any) -> Any:
    """A floating-point tensor in float64; anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


def sample_count(*inputs: Any, **kwargs: Any) -> int | None:
    """Number of samples: the rows of the first tensor among the inputs; None without a tensor."""
    for value in (*inputs, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    return None


def _with_weight(batch: Batch, weight: SampleWeight | None, offset: int) -> SampleBatch:
    """A batch with the weights of its samples.

    Args:
        batch: The batch. Its inference tensors are copied, since torch cannot differentiate them.
        weight: The weights of all samples, (N,), or callable(batch) -> (n,), or None.
        offset: Number of samples in the batches before this one.
    """
    rows = sample_count(*batch.args, **batch.kwargs) or 0
    column: Tensor | None = None
    if isinstance(weight, Tensor):
        if weight.ndim:
            column = weight[offset : offset + rows]
    elif weight is not None:
        column = torch.as_tensor(weight(batch.raw))
        if column.ndim == 0 or len(column) != rows:
            raise ValueError(
                f"sample_weight(batch) must return one weight per sample, ({rows},), got "
                f"{tuple(column.shape)}."
            )
    if column is not None:
        column = column.to(torch.float64).reshape(len(column), -1)
        if not bool(((column >= 0) & (column < torch.inf)).all()):
            raise ValueError("sample_weight must be finite and not negative.")
    args, kwargs, target = ordinary((batch.args, batch.kwargs, batch.target))
    return SampleBatch(args, kwargs, target, batch.raw, columns=batch.columns, weight=column)
