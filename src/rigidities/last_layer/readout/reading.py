"""What one pass of a model gives: outputs, features, and how the two are laid out.

A tap turns a batch into a `Reading`. The statistics of a fit and the error bars work on rows of
M outputs and K targets; `Reading.rows` and `Reading.unrows` translate between these and the shape
of the model's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...data.batches import Batch
from ...data.sketch import near_hashes, row_hashes, row_tensors
from ...posterior.gram import with_ones

SampleWeight = Callable[[Any], Tensor]
"""A user's function: batch -> one weight per sample or per output."""


@dataclass(frozen=True)
class Reading:
    """One forward pass: the output, its features, and how output and rows correspond.

    Attributes:
        output: What the model predicts.
        inputs: The features without the column of ones that a single head's bias has: (M, D),
            (M, K, D) or (M, K, P); see the layouts of `cases`.
        inner: The shape in which to view the output.
        axis: The dimension of the targets in `inner`, counted from the end.
        order: Where given, the outputs of a sample are put in this order before they are viewed,
            so that the targets of each row stand in the order of the head's columns.
        counts: Where H heads have no bias, what the columns of their biases would be, (M, H) or
            (M, K, H): ones, or under sums over atoms the number of atoms of each species. None
            where all heads have a bias, and for features (M, K, P).
        ones: Whether the features end with a column of ones that `inputs` leaves out.
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
        if torch.compiler.is_compiling():  # a tracer does not take a cached property
            return with_ones(self.inputs)
        return self._inputs_with_ones

    @cached_property
    def _inputs_with_ones(self) -> Tensor:
        return with_ones(self.inputs)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.output, self.features))

    @classmethod
    def join(cls, readings: Sequence[Reading]) -> Reading:
        """The readings of consecutive batches as one.

        Raises:
            ValueError: The batches have outputs of different shapes, or targets in different
                orders.
        """
        first = readings[0]
        if len(readings) == 1:
            return first
        remedy = ". Predict batch by batch: mean, std = uq(x)."
        output = joined([reading.output for reading in readings], remedy)
        if any(reading.order is not first.order for reading in readings):
            raise ValueError(f"The batches have their targets in different orders{remedy}")
        ones = all(reading.ones for reading in readings)
        if ones:
            inputs = joined([reading.inputs for reading in readings], remedy)
        else:
            inputs = joined([reading.features for reading in readings], remedy)
        counts_by_batch = [reading.counts for reading in readings if reading.counts is not None]
        counts = None
        if len(counts_by_batch) == len(readings):
            counts = torch.cat(counts_by_batch)
        rows = sum(reading.inner[0] for reading in readings)
        inner = torch.Size([rows, *first.inner[1:]])
        return cls(output, inputs, inner, first.axis, first.order, counts, ones)

    def detached(self) -> Reading:
        """The same values without their derivatives."""
        counts = None if self.counts is None else self.counts.detach()
        return replace(
            self, output=self.output.detach(), inputs=self.inputs.detach(), counts=counts
        )

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like the output as (M, K)."""
        if self.order is not None:
            tensor = tensor.reshape(self.inner[0], -1)[:, self.order]
        if self.axis == -1:
            if tensor.ndim == 2 and self.order is None and tensor.shape[1] == self.inner[-1]:
                return tensor
            return tensor.reshape(-1, self.inner[-1])
        targets_last = tensor.reshape(self.inner).movedim(self.axis, -1)
        return targets_last.reshape(-1, targets_last.shape[-1])

    def unrows(self, rows: Tensor) -> Tensor:
        """Rows in the output's shape, the inverse of `rows`.

        Args:
            rows: (..., M, K), or (..., M, 1) to be repeated for each target. Dimensions in front
                (members, say) stay in front.
        """
        targets = self.inner[self.axis]
        leading = rows.shape[:-2]
        if self.axis == -1 and self.order is None:
            if rows.ndim == 2 and rows.shape == self.output.shape:
                return rows
            return rows.expand(*leading, -1, targets).reshape(*leading, *self.output.shape)
        target_dimension = self.axis % len(self.inner)
        shape = [size for i, size in enumerate(self.inner) if i != target_dimension]
        values = rows.expand(*leading, -1, targets).reshape(*leading, *shape, targets)
        values = values.movedim(-1, self.axis)
        if self.order is not None:
            values = values.reshape(*leading, self.inner[0], -1)[..., self.order.argsort()]
        return values.reshape(*leading, *self.output.shape)

    def spread_out(self, values: Tensor) -> Tensor:
        """One value per sample (N,) in the output's shape."""
        return values.reshape(-1, *[1] * (self.output.ndim - 1)).expand(self.output.shape)

    def check_targets(self, fitted: int) -> None:
        """Refuse a model that does not give as many targets as in the fit.

        Args:
            fitted: The number of targets in the fit.
        """
        targets = self.inner[self.axis]
        if targets != fitted:
            raise ValueError(
                f"The model gives {targets} targets here, but gave {fitted} in the fit. Use the "
                "same forward= and output= as in the fit."
            )

    def target_rows(self, target: Tensor | None) -> Tensor | None:
        """The target as (M, K), whatever dimensions of size one it has or lacks."""
        if target is None:
            return None
        if target.squeeze().shape != self.output.squeeze().shape:
            problem = (
                f"the target's shape {tuple(target.shape)} does not match the output's shape "
                f"{tuple(self.output.shape)}."
            )
            if not target.is_floating_point():
                problem += (
                    " If the targets are the numbers of classes, pass them one-hot, and see "
                    "docs/classifiers.md."
                )
            raise ValueError(
                f"{problem} If the model predicts more than the target (for example a mean and a "
                "variance), select the mean with output=, or for batches b = (x, y) with "
                "forward=lambda m, b: m(b[0])[..., 0]."
            )
        return self.rows(target.reshape(self.output.shape))

    def sample_weights(
        self, function: SampleWeight | None, batch: Batch, name: str = "sample_weight"
    ) -> Tensor | None:
        """The numbers that a user's function gives for the samples of a batch.

        Args:
            function: The user's function, which takes a batch as it came; None for none.
            batch: The batch of this reading.
            name: What messages call the numbers.

        Returns:
            (M, 1) or (M, K), or None without a function.

        Raises:
            ValueError: A number is negative or not finite, or there is not one per sample or per
                output.
        """
        if function is None:
            return None
        output = self.output
        returned = function(batch.raw)
        if returned is None:
            raise ValueError(f"{name} returned None, expected one value per sample.")
        weights = torch.as_tensor(returned, device=output.device).detach().to(torch.float64)
        if not bool(((weights >= 0) & (weights < torch.inf)).all()):
            raise ValueError(
                f"{name.replace('_', ' ')}s must be finite and not negative, got "
                f"{float(weights.min())} to {float(weights.max())}. Give rows that should not "
                "count the weight 0."
            )
        if weights.squeeze().shape == output.squeeze().shape:
            return self.rows(weights.reshape(output.shape))
        if weights.ndim > 1 or weights.numel() != len(output):
            raise ValueError(
                f"{name} returned {tuple(weights.shape)} for an output of {tuple(output.shape)}: "
                "expected one value per sample or per output."
            )
        return self.rows(self.spread_out(weights))

    def hashes(self, batch: Batch) -> Tensor | None:
        """One hash per sample, of its inputs and target, (N,).

        None where the inputs do not have one row per output, as with atoms of several structures.
        """
        values = row_tensors(batch.inputs, len(self.output), self.output.device)
        if not values:
            return None
        if batch.target is not None:
            values.append(batch.target)
        return row_hashes(values, len(self.output))

    def identities(self, batch: Batch) -> Tensor:
        """A hash (M,) by which a row of outputs is recognised in any batch and order.

        It is made of all tensors of a row's input and the row's place among the outputs of that
        input. Where the inputs do not have one row per output, it is made of the first half of the
        features' digits. In another batch these may round differently, for about one row of a
        hundred.
        """
        shape = self.output.shape  # len would fix it in a graph
        hashes = row_hashes(tree_leaves([batch.args, batch.kwargs]), shape[0])
        if hashes is None:
            return near_hashes(self.features, self._rounding**0.5)
        places = torch.arange(shape[1:].numel(), device=hashes.device)
        return self.rows((hashes[:, None] + places).reshape(shape))[:, 0]

    @property
    def _rounding(self) -> float:
        """The coarser relative rounding of features and output."""
        tensors = (self.features, self.output)
        dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        return max(torch.finfo(dtype).eps for dtype in dtypes)


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
        owners: (R,), the output row (see `Reading.rows`) that each term belongs to.
        heads: (R,), the number of the head that it went through, in the order of the readout's
            heads.
        count: The number of output rows.
    """

    features: Tensor
    owners: Tensor
    heads: Tensor
    count: int


def joined(tensors: Sequence[Tensor], remedy: str, dim: int = 0) -> Tensor:
    """Outputs (or features) of consecutive batches as one tensor.

    Args:
        tensors: One per batch.
        remedy: The end of the error message for different shapes.
        dim: The dimension of the samples.
    """
    shapes = {tuple(tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(
            f"The batches' outputs have different shapes per sample, {sorted(shapes)}, and cannot "
            f"be joined{remedy}"
        )
    return torch.cat(tuple(tensors), dim)
