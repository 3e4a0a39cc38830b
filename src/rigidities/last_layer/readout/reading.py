"""What one pass of a model leaves: outputs, features and how the two are laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...data.batches import Batch
from ...data.sketch import near_hashes, row_hashes
from ...posterior.gram import with_ones

SampleWeight = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Reading:
    """One forward pass: the output, its features, and how output and rows correspond.

    Attributes:
        inputs: the features without the column of ones that a single head's bias has: (M, D),
            (M, K, D) or (M, K, P); see the layouts of `cases`.
        inner: the shape to view the output in, and
        axis: the dimension of the targets in it, counted from the end.
        order: where given, which of a sample's outputs to put first, second, ... before that, so
            that the targets of each row stand in the order of the head's columns.
        counts: (M, H) or (M, K, H) beside the features, where H heads have no bias: what the
            columns of their biases would be (ones; under sums over atoms, how many of each
            species). None where all have one, and beside (M, K, P).
        ones: whether there is such a column, the last of the features.
    """

    output: Tensor
    inputs: Tensor
    inner: torch.Size
    axis: int
    order: Tensor | None = None
    counts: Tensor | None = None
    ones: bool = False

    @property
    def features(self) -> Tensor:
        """All columns, (M, D), (M, K, D) or (M, K, P)."""
        if not self.ones:
            return self.inputs
        return with_ones(self.inputs) if torch.compiler.is_compiling() else self._whole

    @cached_property
    def _whole(self) -> Tensor:
        return with_ones(self.inputs)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.output, self.features))

    @classmethod
    def join(cls, readings: Sequence[Reading]) -> Reading:
        """The readings of consecutive batches as one."""
        first = readings[0]
        if len(readings) == 1:
            return first
        remedy = ". Predict batch by batch: mean, std = uq(x)."
        output = joined([reading.output for reading in readings], remedy)
        ones = all(reading.ones for reading in readings)
        parts = [reading.inputs if ones else reading.features for reading in readings]
        if any(reading.order is not first.order for reading in readings):
            raise ValueError(f"The batches have their targets in different orders{remedy}")
        rows = sum(reading.inner[0] for reading in readings)
        inner = torch.Size([rows, *first.inner[1:]])
        each = [reading.counts for reading in readings if reading.counts is not None]
        counts = torch.cat(each) if len(each) == len(readings) else None
        return cls(output, joined(parts, remedy), inner, first.axis, first.order, counts, ones)

    def detached(self) -> Reading:
        """The same values without their derivatives."""
        counts = None if self.counts is None else self.counts.detach()
        output, inputs = self.output.detach(), self.inputs.detach()
        return replace(self, output=output, inputs=inputs, counts=counts)

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like the output as (M, K)."""
        if self.order is not None:
            tensor = tensor.reshape(self.inner[0], -1)[:, self.order]
        if self.axis == -1:
            if tensor.ndim == 2 and self.order is None and tensor.shape[1] == self.inner[-1]:
                return tensor
            return tensor.reshape(-1, self.inner[-1])
        moved = tensor.reshape(self.inner).movedim(self.axis, -1)
        return moved.reshape(-1, moved.shape[-1])

    def unrows(self, rows: Tensor) -> Tensor:
        """(..., M, K), or (..., M, 1) to be repeated for each target, in the output's shape."""
        targets, several = self.inner[self.axis], rows.shape[:-2]
        if self.axis == -1 and self.order is None:
            if rows.ndim == 2 and rows.shape == self.output.shape:
                return rows
            return rows.expand(*several, -1, targets).reshape(*several, *self.output.shape)
        shape = [n for i, n in enumerate(self.inner) if i != self.axis % len(self.inner)]
        full = rows.expand(*several, -1, targets).reshape(*several, *shape, targets)
        full = full.movedim(-1, self.axis)
        if self.order is not None:
            full = full.reshape(*several, self.inner[0], -1)[..., self.order.argsort()]
        return full.reshape(*several, *self.output.shape)

    def spread_out(self, values: Tensor) -> Tensor:
        """One value per sample (N,) in the output's shape."""
        return values.reshape(-1, *[1] * (self.output.ndim - 1)).expand(self.output.shape)

    def check_targets(self, fitted: int) -> None:
        """The model must give as many targets as in the fit."""
        if (targets := self.inner[self.axis]) != fitted:
            raise ValueError(
                f"The model gives {targets} targets here and gave {fitted} in the fit. Use the "
                "same forward= and output= as in the fit."
            )

    def target_rows(self, target: Tensor | None) -> Tensor | None:
        """The target as (M, K), whatever dimensions of size one it has or lacks."""
        if target is None:
            return None
        if target.squeeze().shape != self.output.squeeze().shape:
            raise ValueError(
                f"the target's shape {tuple(target.shape)} does not fit the output's "
                f"{tuple(self.output.shape)}. If the model predicts more than the target (a mean "
                "and a variance, say), pick the mean with output=, or of batches b = (x, y) with "
                "forward=lambda m, b: m(b[0])[..., 0]."
            )
        return self.rows(target.reshape(self.output.shape))

    def sample_weights(
        self, function: SampleWeight | None, batch: Batch, what: str = "sample_weight"
    ) -> Tensor | None:
        """The user's weights of the batch, (M, 1) or (M, K); or what else a function gives."""
        if function is None:
            return None
        output, weights = self.output, function(batch.raw)
        if weights is None:
            raise ValueError(f"{what} returned None: expected one per sample.")
        given = torch.as_tensor(weights, device=output.device).detach().to(torch.float64)
        if not bool(((given >= 0) & (given < torch.inf)).all()):
            raise ValueError(
                f"{what.replace('_', ' ')}s must be finite and not negative, got "
                f"{float(given.min())} to {float(given.max())}. A row that should not count has "
                "weight 0."
            )
        if given.squeeze().shape == output.squeeze().shape:
            return self.rows(given.reshape(output.shape))
        if given.ndim > 1 or given.numel() != len(output):
            raise ValueError(
                f"{what} returned {tuple(given.shape)} for an output of "
                f"{tuple(output.shape)}: expected one per sample or per output."
            )
        return self.rows(given.reshape(-1, *[1] * (output.ndim - 1)).expand(output.shape))

    def hashes(self, batch: Batch) -> Tensor | None:
        """One hash per sample, of its inputs and target, (N,).

        None where inputs have not one row per output, as atoms of several structures.
        """
        values = tree_leaves(batch.inputs)
        if batch.target is not None:
            values.append(batch.target)
        return row_hashes(values, len(self.output))

    def identities(self, batch: Batch) -> Tensor:
        """A hash (M,) by which a row of outputs is known again, in any batch and order.

        Of all tensors of its input, plus its place among the outputs of that. Where inputs have not
        one row per output, of half of the features' digits, which in another batch may round
        otherwise for about one row of a hundred.
        """
        shape = self.output.shape  # len would fix it in a graph
        hashes = row_hashes(tree_leaves([batch.args, batch.kwargs]), shape[0])
        if hashes is None:
            return near_hashes(self.features, self._digits**0.5)
        places = torch.arange(shape[1:].numel(), device=hashes.device)
        return self.rows((hashes[:, None] + places).reshape(shape))[:, 0]

    @property
    def _digits(self) -> float:
        floating = [t.dtype for t in (self.features, self.output) if t.is_floating_point()]
        return max(torch.finfo(dtype).eps for dtype in floating)


def read(tap: Callable[..., Reading], batch: Batch) -> Reading:
    """A pass over a batch, which must give one output per sample."""
    reading = tap(*batch.args, **batch.kwargs)
    if batch.rows is not None:
        batch.check(reading.output.shape[0])
    return reading


@dataclass(frozen=True)
class Terms:
    """The terms that sum to the outputs: one for each row that a head was called with.

    Attributes:
        features: (R, D), which add up to the features of the outputs.
        owners: (R,) the output row (see `Reading.rows`) that each belongs to.
        heads: (R,) number of the head that it went through, in the order of the readout's heads.
    """

    features: Tensor
    owners: Tensor
    heads: Tensor
    count: int


def joined(tensors: Sequence[Tensor], remedy: str, dim: int = 0) -> Tensor:
    """Outputs (or features) of consecutive batches as one tensor; `remedy` ends the refusal."""
    shapes = {tuple(tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(
            f"The batches' outputs have different shapes per sample, {sorted(shapes)}, and cannot "
            f"be joined{remedy}"
        )
    return torch.cat(tuple(tensors), dim)
