"""What one pass of a model gives: outputs, features, and how the outputs belong to rows.

A `Readout` turns a batch into a `Reading`. The statistics of a fit and the error bars work on rows
of M outputs and K targets; `Reading.output_layout` translates between these and the output's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch
from ..data.hashes import near_hashes, row_hashes, row_tensors, sample_hashes
from ..data.output_layout import OutputLayout
from ..posterior.gram import with_ones

SampleWeight = Callable[[Any], Tensor]
"""A user's function: batch -> one weight per sample or per output."""


@dataclass(frozen=True)
class Reading:
    """One forward pass: the output, its features, and how the output belongs to their rows.

    Attributes:
        output: What the model predicts.
        bare_features: The features without the column of ones that a single head's bias has:
            (M, D), (M, K, D) or (M, K, P); see the layouts of `Readout`.
        output_layout: How the output is seen as rows (M, K).
        bias_counts: Where H heads have no bias, what the columns of their biases would be, (M, H)
            or (M, K, H): ones, or under sums over atoms the number of atoms of each species. None
            where all heads have a bias, and for features (M, K, P).
        ones: Whether the features end with a column of ones that `bare_features` leaves out.
    """

    output: Tensor
    bare_features: Tensor
    output_layout: OutputLayout
    bias_counts: Tensor | None = None
    ones: bool = False

    @property
    def features(self) -> Tensor:
        """All columns, (M, D), (M, K, D) or (M, K, P)."""
        if not self.ones:
            return self.bare_features
        if torch.compiler.is_compiling():  # a tracer does not take a cached property
            return with_ones(self.bare_features)
        return self._rows_with_ones

    @cached_property
    def _rows_with_ones(self) -> Tensor:
        return with_ones(self.bare_features)

    @property
    def form_inputs(self) -> Tensor:
        """The features that a `HeadForm` takes, which needs no last column of ones."""
        if self.ones:
            return self.bare_features
        return with_counts(self.bare_features, self.bias_counts)

    @property
    def width(self) -> int:
        """The number of columns of the features."""
        return self.bare_features.shape[-1] + self.ones

    def detached(self) -> Reading:
        """The same values without their derivatives."""
        bias_counts = None if self.bias_counts is None else self.bias_counts.detach()
        return replace(
            self,
            output=self.output.detach(),
            bare_features=self.bare_features.detach(),
            bias_counts=bias_counts,
        )

    def sample_weights(self, function: SampleWeight | None, batch: Batch) -> Tensor | None:
        """The weights that a user's function gives for the samples of a batch.

        Args:
            function: The user's function, which takes a batch as it came; None for none.
            batch: The batch of this reading.

        Returns:
            (M, 1) or (M, K), or None without a function.
        """
        if function is None:
            return None
        remedy = "Give rows that should not count the weight 0."
        return self.user_numbers(function, batch, "sample_weight", remedy)

    def user_numbers(self, function: SampleWeight, batch: Batch, name: str, remedy: str) -> Tensor:
        """The numbers that a user's function gives for the samples of a batch.

        Args:
            function: The user's function, which takes a batch as it came.
            batch: The batch of this reading.
            name: What messages call the numbers.
            remedy: What to do about negative ones, for the message.

        Returns:
            (M, 1) or (M, K).

        Raises:
            ValueError: A number is negative or not finite, or there is not one per sample or per
                output.
        """
        output = self.output
        with torch.enable_grad():  # for functions that differentiate
            returned = function(batch.raw)
        if returned is None:
            raise ValueError(f"{name} returned None, expected one value per sample.")
        weights = torch.as_tensor(returned, device=output.device).detach().to(torch.float64)
        if not bool(((weights >= 0) & (weights < torch.inf)).all()):
            raise ValueError(
                f"{name.replace('_', ' ')}s must be finite and not negative, got "
                f"{float(weights.min())} to {float(weights.max())}. {remedy}"
            )
        if weights.squeeze().shape == output.squeeze().shape:
            return self.output_layout.rows(weights.reshape(output.shape))
        if weights.ndim > 1 or weights.numel() != len(output):
            raise ValueError(
                f"{name} returned {tuple(weights.shape)} for an output of {tuple(output.shape)}: "
                "expected one value per sample or per output."
            )
        return self.output_layout.rows(self.output_layout.of_samples(weights))

    def labelled_hashes(self, batch: Batch) -> Tensor | None:
        """One hash per sample, of its inputs and target, (N,).

        None where the inputs do not have one row per output, as with atoms of several structures.
        """
        inputs = row_tensors(batch.inputs, len(self.output), self.output.device)
        return sample_hashes(inputs, batch.target, len(self.output))

    def input_hashes(self, batch: Batch) -> Tensor:
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
        return self.output_layout.rows((hashes[:, None] + places).reshape(shape))[:, 0]

    @property
    def _rounding(self) -> float:
        """The coarser relative rounding of features and output."""
        tensors = (self.features, self.output)
        dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        return max(torch.finfo(dtype).eps for dtype in dtypes)


def responses(features: Tensor, change: Tensor) -> Tensor:
    """F d: what a change d of the weights adds to outputs that are linear in them, (M, K).

    Args:
        features: F, (M, D), (M, K, D) or (M, K, P); see the layouts of `Readout`.
        change: d by column, (D, K), or (P, 1) where one weight vector is behind all targets.
    """
    if features.ndim == 2:
        return features @ change
    return (features * change.mT).sum(-1)


def with_counts(features: Tensor, counts: Tensor | None) -> Tensor:
    """What the head of a calibration is fitted to: features, then `Reading.bias_counts`."""
    if counts is None:
        return features
    return torch.cat([features, counts.to(features)], -1)


@dataclass(frozen=True)
class Terms:
    """The terms that sum to the outputs: one for each row that a head was called with.

    Attributes:
        features: (R, D), which add up to the features of the outputs.
        owners: (R,), the output row (see `OutputLayout.rows`) that each term belongs to.
        heads: (R,), the number of the head that it went through, in the order of the readout's
            heads.
        count: The number of output rows.
    """

    features: Tensor
    owners: Tensor
    heads: Tensor
    count: int


def joined_outputs(tensors: Sequence[Tensor], remedy: str, dim: int = 0) -> Tensor:
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
