r"""Output and features of a batch as functions of one input tensor: $x \mapsto (y(x), f(x))$.

A derivative of the prediction with respect to the input is linear in the readout's weights, as the
prediction itself is, with the features' derivative in place of the features: $\partial y / \partial
x_i = \ldots + (\partial f / \partial x_i) \cdot w$. So error bars of derivatives need the
derivatives of the features, and nothing else.

`FeatureMap.of` takes a batch and the place (slot) of one input in it, runs the model once and keeps
the autograd graph of that pass. `feature_derivatives` then differentiates the map, and the methods
of `FeatureMap` bring the derivatives from one layout into another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...data.batches import Batch
from ...data.slots import Slot
from ...models.directional import normal_like, pulled, pushes, pushes_by_reverse
from ...models.modes import transformable
from ...readout.reading import Reading
from ...readout.readout import AnyReadout
from ...readout.tail import owners_by_digits

UNCONNECTED = (
    "The prediction does not depend on this input through differentiable operations "
    "(torch.no_grad, detach or NumPy in the forward pass?). Name another input with wrt=, or "
    "change the forward pass so that it keeps its graph."
)

OutputAndFeatures = tuple[Tensor, Tensor]


class TracedPass(NamedTuple):
    """One pass of the model with its autograd graph.

    Attributes:
        x: A copy of the input that requires its gradient.
        reading: Output and features, with the graph that leads back to `x`.
    """

    x: Tensor
    reading: Reading


@dataclass(frozen=True)
class FeatureMap:
    """Output and features of one batch as functions of one of its inputs.

    The input has L rows of d numbers each. There are N samples; each has I rows of features for K
    targets, and O = I K outputs. Derivatives come in one of two layouts: (L, I, K, d), sorted by
    rows of features and targets, or (L, O, d), sorted by the outputs of a sample. `shaped` gives
    the shape that users see.

    Attributes:
        x: The input, without a graph.
        reading: Output and features at `x`, without a graph. In a map of directional derivatives
            (see `along`), the directional derivatives of output and features.
        aligned: Whether the input has one row per sample, which acts on that sample alone.
            Otherwise the sum over all samples is differentiated.
        traced: The pass that gave `reading`, with its graph. All backward passes use it.
        readout: The readout, which runs the model.
        batch: The batch, with all of the model's inputs.
        slot: The place of `x` in the batch.
        direction: None, or the direction of the directional derivatives in `reading`.
    """

    x: Tensor
    reading: Reading
    aligned: bool
    traced: TracedPass
    readout: AnyReadout
    batch: Batch
    slot: Slot
    direction: Tensor | None = None

    @classmethod
    def of(cls, readout: AnyReadout, batch: Batch, slot: Slot) -> FeatureMap:
        """Run the model on a batch and record the graph from the input in a slot.

        Args:
            readout: The readout.
            batch: The model's inputs.
            slot: The place of the input to differentiate by.

        Raises:
            ValueError: The output does not depend on that input by differentiable operations.
        """
        # Fused attention kernels have no batched backward pass: `transformable` avoids them.
        with transformable():
            traced_pass = traced(readout, batch, slot)
        return cls(
            x=traced_pass.x.detach(),
            reading=traced_pass.reading.detached(),
            aligned=stand_alone(traced_pass.x, traced_pass.reading),
            traced=traced_pass,
            readout=readout,
            batch=batch,
            slot=slot,
        )

    def values(self, x: Tensor) -> OutputAndFeatures:
        """Output and features as a function of the input."""
        args, kwargs = self.slot.put(self.batch, x)
        if self._transformable_pass is not None:
            reading = self._transformable_pass(*args, **kwargs)
        else:
            reading = self.readout.differentiable(args, kwargs)
        return reading.output, reading.features

    @property
    def has_transformable_pass(self) -> bool:
        """Whether `torch.func` can transform `values`; finding out may take a forward pass."""
        return self._transformable_pass is not None

    @cached_property
    def _transformable_pass(self) -> Callable[..., Reading] | None:
        """The model's pass as a function that `torch.func` can transform; None for none."""
        args, kwargs = self.slot.put(self.batch, self.traced.x)
        return self.readout.transformable(args, kwargs)

    @property
    def samples(self) -> int:
        """Number of samples N."""
        return len(self.reading.output)

    @property
    def rows_per_sample(self) -> int:
        """Number of rows of features per sample, I."""
        return len(self.reading.features) // self.samples

    @property
    def numbers_per_row(self) -> int:
        """Number of numbers in a row of the input, d."""
        return self.x[0].numel()

    def along(self, direction: Tensor) -> FeatureMap:
        r"""The map of directional derivatives, $x \mapsto (y'(x) v, f'(x) v)$.

        Args:
            direction: v, in the shape of the input or of one of its rows.

        Raises:
            ValueError: The direction does not fit, or an operation of the model has neither a
                forward mode nor a second derivative.
        """
        direction = checked_direction(direction, self.x)
        push_all = pushes if self.has_transformable_pass else pushes_by_reverse
        try:
            with torch.no_grad():
                (pushed,) = push_all(self._flat_values, self.x, direction[None])
        except RuntimeError as error:
            raise ValueError(
                "An operation of the model has neither forward mode nor a second derivative "
                f"({error.__context__ or error}). Call gradient(x) without along= and multiply by "
                "the direction yourself."
            ) from error
        # `_flat_values` joins output and features in one vector; here it is cut again.
        output = self.reading.output
        features = self.reading.features
        output_numbers = output.numel()
        moved_output = pushed[:output_numbers].reshape(output.shape).to(output)
        moved_features = pushed[output_numbers:].reshape(features.shape).to(features)
        reading = replace(self.reading, output=moved_output, rows=moved_features, ones=False)
        return replace(self, reading=reading, direction=direction)

    def rows_from_tangents(self, values: Tensor) -> Tensor:
        """One value per direction of forward mode and row of features, as (L, I, K, d).

        Args:
            values: (directions, M) or (directions, M, K) for the M rows of features of all
                samples; I in place of M where samples are summed.
        """
        if values.ndim == 2:
            values = values[..., None]
        targets = values.shape[-1]
        input_rows = len(self.x)
        if self.aligned:
            # One direction serves the same number of every input row.
            by_direction = values.reshape(-1, input_rows, self.rows_per_sample, targets)
            return by_direction.permute(1, 2, 3, 0)
        # The directions run over all numbers of all input rows.
        by_number = values.reshape(input_rows, -1, self.rows_per_sample, targets)
        return by_number.permute(0, 2, 3, 1)

    def outputs_from_rows(self, values: Tensor) -> Tensor:
        """(L, I, K, d), sorted by rows of features, as (L, O, d), sorted by outputs."""
        return values.flatten(1, 2)[:, self._output_numbers().flatten().argsort()]

    def gram_rows(self, values: Tensor) -> Tensor:
        """(L, O, d) as (L * I * d, K): one row for each row that derivatives add to the Gram."""
        by_rows = values[:, self._output_numbers()]  # (L, I, K, d)
        targets_last = by_rows.movedim(2, 3)
        return targets_last.reshape(-1, targets_last.shape[-1])

    def sum_per_target(self, values: Tensor) -> Tensor:
        """The sum of (L, O, d) over everything but the targets, (K,)."""
        per_output = values.reshape(len(self.x), -1, self.numbers_per_row).sum((0, 2))
        return per_output[self._output_numbers()].sum(0)

    def shaped(self, values: Tensor) -> Tensor:
        """(L, O, d) in the shape that users see.

        It is the input's shape where a sample has one output, else (L, *output, *input) with the
        shapes of one sample's output and of one input row.
        """
        output_shape = self.reading.output.shape[1:]
        if output_shape.numel() <= 1:
            output_shape = torch.Size()
        return values.reshape(len(values), *output_shape, *self.x.shape[1:])

    def _flat_values(self, x: Tensor) -> Tensor:
        """Output and features at x as one vector, which forward mode can push."""
        return torch.cat([value.reshape(-1) for value in self.values(x)])

    def _output_numbers(self) -> Tensor:
        """The number of the output that stands at row i and target k of a sample, (I, K)."""
        output = self.reading.output
        numbers = torch.arange(output[0].numel(), device=output.device).reshape(output[:1].shape)
        return self.reading.output_layout.rows(numbers.expand(output.shape))[: self.rows_per_sample]


def traced(readout: AnyReadout, batch: Batch, slot: Slot) -> TracedPass:
    """One pass of the model that records the graph from the input in a slot.

    Raises:
        ValueError: The output does not depend on that input by differentiable operations.
    """
    x = slot.get(batch).detach().clone().requires_grad_()
    args, kwargs = slot.put(batch, x)
    reading = readout.differentiable(args, kwargs)
    if batch.rows is not None:
        batch.check(reading.output.shape[0])
    if not reading.output.requires_grad:
        raise ValueError(UNCONNECTED)
    return TracedPass(x, reading)


def checked_direction(direction: Tensor, x: Tensor) -> Tensor:
    """A direction in the shape and precision of the input.

    Raises:
        ValueError: It is not finite, or has another shape than the input or one of its rows.
    """
    direction = torch.as_tensor(direction, dtype=torch.float64).to(x)
    if not bool(torch.isfinite(direction).all()):
        raise ValueError("A direction must be finite, got NaN or infinity.")
    try:
        return direction.broadcast_to(x.shape).contiguous()
    except RuntimeError as error:
        raise ValueError(
            f"A direction must have the shape of the input, {tuple(x.shape)}, or that of one "
            f"sample, got {tuple(direction.shape)}."
        ) from error


def row_owners(feature_map: FeatureMap) -> Tensor | None:
    """The sample that each row of the input acts on, (L,); None where a row acts on several."""
    x, reading = feature_map.traced
    mixture = _random_mixture(x, feature_map.samples, [reading.output])
    plain = _gradient_of_sum(mixture, x, torch.ones_like(mixture))
    (owners,) = owners_by_digits(
        lambda code: [_gradient_of_sum(mixture, x, code)], mixture, [plain]
    )
    return owners if _owners_confirmed(mixture, x, owners, plain) else None


def stand_alone(x: Tensor, reading: Reading) -> bool:
    """Whether row n of the input acts on sample n alone; the graph leads from x to the reading."""
    if x.ndim == 0 or len(x) != len(reading.output):
        return False
    if len(x) == 1:
        return True
    samples = len(x)
    mixture = _random_mixture(x, samples, [reading.output, reading.features])
    plain = _gradient_of_sum(mixture, x, torch.ones_like(mixture))
    return _owners_confirmed(mixture, x, torch.arange(samples, device=x.device), plain)


def _random_mixture(x: Tensor, samples: int, values: list[Tensor]) -> Tensor:
    """A random combination of each sample's values, (N,), in the precision of x."""
    mixture = x.new_zeros(samples)
    for seed, value in enumerate(values):
        per_sample = value.reshape(samples, -1).to(x.dtype)
        mixture = mixture + per_sample @ normal_like(per_sample[0], seed)
    return mixture


def _gradient_of_sum(mixture: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """The derivatives (L, d) of a weighted sum over the samples' mixtures, (N,) each."""
    return pulled(mixture, x, weights[None], unconnected=UNCONNECTED).reshape(len(x), -1)


def _owners_confirmed(mixture: Tensor, x: Tensor, owners: Tensor, plain: Tensor) -> bool:
    r"""Whether every row of the input acts on its presumed owner alone.

    With $t_n$ the mixture of sample n's values and $s_n$ random signs and sizes, the input row
    $x_l$ acts on its owner n alone if, and but for chance only if,
    $\nabla_{x_l} \sum_m s_m t_m = s_n \nabla_{x_l} \sum_m t_m$.

    Args:
        mixture: $t$, (N,).
        x: The input, with L rows.
        owners: The presumed owner of each row, (L,).
        plain: $\nabla_{x_l} \sum_m t_m$, (L, d).
    """
    signs = normal_like(mixture, seed=2)
    expected = signs[owners, None] * plain
    tolerance = torch.finfo(x.dtype).eps ** 0.5 * float(expected.abs().max())
    difference = (_gradient_of_sum(mixture, x, signs) - expected).abs()
    return bool((difference <= tolerance).all())
