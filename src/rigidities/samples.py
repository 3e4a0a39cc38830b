"""Training data as batches that can be gone through more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batches import Batch, Reader, raw_batches
from .regressor import sample_count

SampleWeight = Tensor | Callable[[Any], Tensor]


@dataclass(frozen=True)
class SampleBatch:
    """Inputs of one call, with targets (N, K) and weights (N, 1) in float64 where there are any."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None
    weight: Tensor | None
    raw: Any

    def target_rows(self, outputs: Tensor) -> Tensor | None:
        """The target shaped like the predictions (N, K)."""
        if self.target is None:
            return None
        if self.target.shape[0] != len(outputs) or self.target.numel() != outputs.numel():
            raise ValueError(
                f"Expected one target per prediction: predictions {tuple(outputs.shape)}, "
                f"targets {tuple(self.target.shape)}."
            )
        return self.target.to(torch.float64).reshape(outputs.shape)

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

            yield SampleBatch(
                tuple(map(cut, self.args)),
                {key: cut(value) for key, value in self.kwargs.items()},
                cut(self.target),
                cut(self.weight),
                _cut_raw(self.raw, cut),
            )


@dataclass(frozen=True)
class Samples:
    """All batches, held by reference.

    Attributes:
        batches: in the order given.
    """

    batches: Sequence[SampleBatch]

    @classmethod
    def of(
        cls,
        inputs: Any,
        targets: Any,
        weight: SampleWeight | None,
        *,
        like: Tensor,
        batch_size: int | None = None,
    ) -> Samples:
        """Read what the user handed in.

        Args:
            inputs: X, a tuple of several inputs, or with no targets given apart a Dataset, a
                loader or a list of batches (x, y).
            targets: y, or None.
            weight: of each sample in the loss: (N,), or callable(batch) -> (N,).
            like: the parameters, for device and precision.
            batch_size: rows per batch where the data are not batches already.
        """
        data, bare = inputs, False
        if targets is not None:
            columns = inputs if isinstance(inputs, tuple) else (inputs,)
            data = (*columns, targets)
        elif isinstance(inputs, Tensor) or hasattr(inputs, "__array__"):
            bare = True
        reader = Reader(like.device, like.dtype)
        raws, _ = raw_batches(data, batch_size)
        offset, batches = 0, []
        for raw in raws:
            batch = reader((raw,) if bare else raw)
            batches.append(_with_weight(batch, weight, offset))
            offset += sample_count(*batch.args, **batch.kwargs) or 0
        if offset == 0:
            raise ValueError("There are no data: expected at least one sample.")
        if isinstance(weight, Tensor) and weight.shape[0] != offset:
            raise ValueError(
                f"sample_weight must have one entry per sample, {offset}, got "
                f"{tuple(weight.shape)}."
            )
        return cls(batches)

    def __iter__(self) -> Iterator[SampleBatch]:
        return iter(self.batches)

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(sample_count(*b.args, **b.kwargs) or 0 for b in self.batches)

    def pieces(self, rows: int) -> Iterator[SampleBatch]:
        """All samples, at most `rows` at a time."""
        for batch in self.batches:
            yield from batch.pieces(rows)


def _with_weight(batch: Batch, weight: SampleWeight | None, offset: int) -> SampleBatch:
    column = None
    if callable(weight):
        column = weight(batch.raw)
    elif weight is not None:
        rows = sample_count(*batch.args, **batch.kwargs) or 0
        column = weight[offset : offset + rows]
    if column is not None:
        column = torch.as_tensor(column).to(torch.float64).reshape(-1, 1)
        if not bool(((column >= 0) & (column < torch.inf)).all()):
            raise ValueError("sample_weight must be finite and not negative.")
    return SampleBatch(batch.args, batch.kwargs, batch.target, column, batch.raw)


def _cut_raw(raw: Any, cut: Callable[[Any], Any]) -> Any:
    if isinstance(raw, tuple) and not hasattr(raw, "_fields"):
        return tuple(map(cut, raw))
    return cut(raw)
