r"""Output and features of a batch as functions of one input tensor: $x \mapsto (y(x), f(x))$.

A derivative of the prediction with respect to the input is linear in the readout's weights, as the
prediction itself is, with the features' derivative in place of the features: $\partial y / \partial
x_i = \ldots + (\partial f / \partial x_i) \cdot w$. So error bars of derivatives need the
derivatives of the features, and nothing else.

`FeatureMap.of` takes a batch and the place (slot) of one input in it, runs the model once and keeps
the autograd graph of that pass. `feature_derivatives` then differentiates the map.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...data.batches import Batch
from ...data.slots import Slot
from ...models.derivatives import normal_like, pulled, pushed_by_reverse, pushes
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


@dataclass(frozen=True)
class FeatureMap:
    """Output and features of one batch as functions of one of its inputs.

    The input has L rows of d numbers each. There are N samples; each has I rows of features for K
    targets, and O = I K outputs. Derivatives of the features are rows, sorted by (L, I, d), as the
    Gram takes them. Derivatives of the outputs are (L, O, d), as users see them (`shape`).

    Attributes:
        x: The input, as a leaf of the graph.
        reading: Output and features at `x`, with the graph that leads back to it. All backward
            passes use it.
        features: The features of the reading, likewise.
        function: The map as a function of the input that `torch.func` can transform; None if the
            model has none.
    """

    x: Tensor
    reading: Reading
    features: Tensor
    function: Callable[[Tensor], OutputAndFeatures] | None

    @classmethod
    @torch.enable_grad()  # whatever the caller's mode, the features keep their graph
    def of(
        cls, readout: AnyReadout, batch: Batch, slot: Slot, *, fused: bool = False
    ) -> FeatureMap:
        """Run the model on a batch and record the graph from the input in a slot.

        Args:
            readout: The readout.
            batch: The model's inputs.
            slot: The place of the input to differentiate by.
            fused: Whether attention may be computed by fused kernels, which have no batched
                backward pass and no second derivative.

        Raises:
            ValueError: The output does not depend on that input by differentiable operations.
        """
        x = slot.get(batch).detach().clone().requires_grad_()
        args, kwargs = slot.put(batch, x)
        with nullcontext() if fused else transformable():
            reading, transformable_pass = readout.differentiable(args, kwargs)
        if batch.samples is not None:
            batch.check(reading.output.shape[0])
        if not reading.output.requires_grad:
            raise ValueError(UNCONNECTED)
        if transformable_pass is None:
            return cls(x, reading, reading.features, None)

        def function(x: Tensor) -> OutputAndFeatures:
            args, kwargs = slot.put(batch, x)
            reading_at_x = transformable_pass(*args, **kwargs)
            return reading_at_x.output, reading_at_x.features

        return cls(x, reading, reading.features, function)

    @cached_property
    def aligned(self) -> bool:
        """Whether the input has one row per sample, which acts on that sample alone.

        Otherwise the sum over all samples is differentiated.
        """
        if self.x.ndim == 0 or len(self.x) != self.samples:
            return False
        if self.samples == 1:
            return True
        mixture = self._mixture([self.reading.output, self.features])
        owners = torch.arange(self.samples, device=self.x.device)
        plain = self._gradient_of_sum(mixture, torch.ones_like(mixture))
        return self._act_on_owner_alone(owners, mixture, plain)

    @property
    def samples(self) -> int:
        """Number of samples N."""
        return len(self.reading.output)

    @property
    def rows_per_sample(self) -> int:
        """Number of rows of features per sample, I."""
        return len(self.features) // self.samples

    @property
    def numbers_per_row(self) -> int:
        """Number of numbers in a row of the input, d."""
        return self.x[0].numel()

    @property
    def shape(self) -> torch.Size:
        """The shape in which users see derivatives of the outputs, (L, O, d).

        It is the input's shape where a sample has one output, else (L, *output, *input) with the
        shapes of one sample's output and of one input row.
        """
        output_shape = self.reading.output.shape[1:]
        if output_shape.numel() <= 1:
            return self.x.shape
        return torch.Size((len(self.x), *output_shape, *self.x.shape[1:]))

    def sum_of_samples(self, rows: Tensor) -> Tensor:
        """One row per row of features, (M, ...), summed over the samples: (I, ...)."""
        return rows.reshape(self.samples, self.rows_per_sample, *rows.shape[1:]).sum(0)

    def rows_of(self, derivatives: Tensor) -> Tensor:
        """Derivatives of the outputs, (L, O, d) in any shape, as rows (L I d, K)."""
        by_output = derivatives.reshape(len(self.x), -1, self.numbers_per_row)
        by_row = by_output[:, self._output_numbers]  # (L, I, K, d)
        return by_row.movedim(2, 3).flatten(0, 2)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Rows (L I d, K) as (L, O, d), the inverse of `rows_of`."""
        shape = (len(self.x), self.rows_per_sample, self.numbers_per_row, rows.shape[1])
        by_row = rows.reshape(shape).movedim(3, 2)  # (L, I, K, d)
        return by_row.flatten(1, 2)[:, self._places_of_outputs]

    def along(self, direction: Tensor) -> Reading:
        r"""The directional derivatives of output and features, $y'(x) v$ and $f'(x) v$.

        Args:
            direction: v, in the shape of the input or of one of its rows.

        Raises:
            ValueError: The direction does not fit, or an operation of the model has neither a
                forward mode nor a second derivative.
        """
        directions = checked_direction(direction, self.x)[None]
        function = self.function
        output, features = self.reading.output, self.features
        try:
            with torch.no_grad():
                if function is None:
                    (pushed,) = pushed_by_reverse(_joined(output, features), self.x, directions)
                else:

                    def joined_values(x: Tensor) -> Tensor:
                        return _joined(*function(x))

                    (pushed,) = pushes(joined_values, self.x.detach(), directions)
        except RuntimeError as error:
            raise ValueError(
                "An operation of the model has neither forward mode nor a second derivative "
                f"({error.__context__ or error}). Call gradient(x) without along= and multiply by "
                "the direction yourself."
            ) from error
        if not bool(pushed.any()):
            # The output may not depend on the input at all, which its gradient says.
            mixture = self._mixture([output])
            self._gradient_of_sum(mixture, torch.ones_like(mixture))
        moved_output, moved_features = pushed.tensor_split([output.numel()])
        return replace(
            self.reading,
            output=moved_output.reshape(output.shape).to(output),
            bare_features=moved_features.reshape(features.shape).to(features),
            ones=False,
        )

    def row_owners(self) -> Tensor | None:
        """The sample that each row of the input acts on, (L,); None where a row acts on several."""
        mixture = self._mixture([self.reading.output])
        plain = self._gradient_of_sum(mixture, torch.ones_like(mixture))
        (owners,) = owners_by_digits(
            lambda code: [self._gradient_of_sum(mixture, code)], mixture, [plain]
        )
        return owners if self._act_on_owner_alone(owners, mixture, plain) else None

    @cached_property
    def _output_numbers(self) -> Tensor:
        """The number of the output that stands at row i and target k of a sample, (I, K)."""
        output = self.reading.output
        numbers = torch.arange(output[0].numel(), device=output.device).reshape(output[:1].shape)
        return self.reading.output_layout.rows(numbers.expand(output.shape))[: self.rows_per_sample]

    @cached_property
    def _places_of_outputs(self) -> Tensor:
        """The place i K + k of each output of a sample, (O,)."""
        return self._output_numbers.flatten().argsort()

    def _mixture(self, values: list[Tensor]) -> Tensor:
        """A random combination of each sample's values, (N,), in the precision of x."""
        mixture = self.x.new_zeros(self.samples)
        with torch.enable_grad():
            for seed, value in enumerate(values):
                per_sample = value.reshape(self.samples, -1).to(self.x.dtype)
                mixture = mixture + per_sample @ normal_like(per_sample[0], seed)
        return mixture

    def _gradient_of_sum(self, mixture: Tensor, weights: Tensor) -> Tensor:
        """The derivatives (L, d) of a weighted sum over the samples' mixtures, (N,) each."""
        gradients = pulled(mixture, self.x, weights[None], unconnected=UNCONNECTED)
        return gradients.reshape(len(self.x), -1)

    def _act_on_owner_alone(self, owners: Tensor, mixture: Tensor, plain: Tensor) -> bool:
        r"""Whether every row of the input acts on its presumed owner alone.

        With $t_n$ the mixture of sample n's values and $s_n$ random signs and sizes, the input row
        $x_l$ acts on its owner n alone if, and but for chance only if,
        $\nabla_{x_l} \sum_m s_m t_m = s_n \nabla_{x_l} \sum_m t_m$.

        Args:
            owners: The presumed owner of each row, (L,).
            mixture: $t$, (N,).
            plain: $\nabla_{x_l} \sum_m t_m$, (L, d).
        """
        signs = normal_like(mixture, seed=2)
        expected = signs[owners, None] * plain
        tolerance = torch.finfo(self.x.dtype).eps ** 0.5 * float(expected.abs().max())
        difference = (self._gradient_of_sum(mixture, signs) - expected).abs()
        return bool((difference <= tolerance).all())


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


def _joined(output: Tensor, features: Tensor) -> Tensor:
    """Output and features as one vector, which is differentiated at once."""
    with torch.enable_grad():
        return torch.cat([output.reshape(-1), features.reshape(-1)])
