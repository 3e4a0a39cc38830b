"""Training data as batches that can be gone through more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..models.modes import ordinary
from .arrays import Columns, as_array, columns, each_member, is_array, with_target
from .batches import Batch, Reader, raw_batches

SampleWeight = Tensor | Callable[[Any], Tensor]


@dataclass(frozen=True)
class SampleBatch(Batch):
    """A batch with the weights (N, 1) of its samples, in float64, where there are any."""

    weight: Tensor | None = None

    def __len__(self) -> int:
        return sample_count(*self.args, **self.kwargs) or 0

    def target_rows(self, outputs: Tensor, shape: torch.Size) -> Tensor | None:
        """The target as rows like the predictions (N, K), of samples shaped like `shape`."""
        if self.target is None:
            return None
        given = [size for size in self.target.shape[1:] if size != 1]
        if self.target.shape[0] != len(outputs) or given != [size for size in shape if size != 1]:
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
            part = slice(start, start + rows)

            def cut(value: Any, part: slice = part) -> Any:
                same = isinstance(value, Tensor) and value.ndim > 0 and len(value) == count
                return value[part] if same else value

            own = {"target": cut(self.target), "weight": cut(self.weight)}
            yield replace(self.mapped(cut), raw=each_member(self.raw, cut), **own)


@dataclass(frozen=True)
class Samples:
    """Data that can be gone through again, batch by batch; nothing but the source is held.

    Attributes:
        data: what `batches.raw_batches` reads.
        weight: of each sample, (N,), or callable(batch) -> (N,).
        batch_size: rows per batch where the data are not batches already.
        ordered: whether a shuffled loader is to be read in its own order.
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
        names: Columns = None,
    ) -> Samples:
        """Read what the user handed in: x and y, or one data set of both.

        An iterator is read into a list. The parameters, `like`, give device and precision; `count`
        and `names` are the positional inputs' number and columns in the fit, where known.
        """
        if isinstance(inputs, (int, float)) or (isinstance(inputs, Tensor) and inputs.ndim == 0):
            raise ValueError("Inputs must be batched, of shape (N, ...); got a single number.")
        data = with_target(inputs, targets)
        reader = Reader(like.device, like.dtype, inputs=count, columns=names).knowing(data)
        data = each_member(data, as_array) if isinstance(data, (tuple, Mapping)) else as_array(data)
        if isinstance(data, Iterator):
            data = list(data)
        if weight is not None and not callable(weight):
            if targets is None and not isinstance(data, (Tensor, tuple)):
                raise ValueError(
                    "Data that come in batches take sample_weight as callable(batch) -> (N,)."
                )
            weight = torch.as_tensor(weight)
        samples = cls(data, reader, weight, batch_size, ordered)
        samples._check()
        return samples

    def __iter__(self) -> Iterator[SampleBatch]:
        offset = 0
        raws, _, _ = raw_batches(self.data, self.batch_size, any_order=not self.ordered)
        for plain in self.reader.batches(raws, None, cut=False):
            batch = _with_weight(plain, self.weight, offset)
            yield batch
            offset += len(batch)

    @cached_property
    def count(self) -> int:
        """Number of samples; of a loader, of its data set."""
        if isinstance(self.data, (Tensor, tuple, Mapping)) or is_array(self.data):
            return len(columns(self.data)[0])
        source = self.data.dataset if isinstance(self.data, DataLoader) else self.data
        if isinstance(source, Dataset) and hasattr(source, "__len__"):
            return len(source)
        return sum(len(batch) for batch in self)

    def pieces(self, rows: int) -> Iterator[SampleBatch]:
        """All samples, at most `rows` at a time."""
        for batch in self:
            yield from batch.pieces(rows)

    def _check(self) -> None:
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
    """In float64 where it is a tensor of real numbers."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


def _with_weight(batch: Batch, weight: SampleWeight | None, offset: int) -> SampleBatch:
    column, rows = None, sample_count(*batch.args, **batch.kwargs) or 0
    if isinstance(weight, Tensor):
        column = weight[offset : offset + rows] if weight.ndim else None
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


def sample_count(*inputs: Any, **kwargs: Any) -> int | None:
    """Rows of the first tensor among the inputs; None where there is none."""
    for value in (*inputs, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    return None
