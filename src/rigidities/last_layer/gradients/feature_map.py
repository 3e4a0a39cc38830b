r"""Output and features as functions of one input tensor: $x \mapsto (y(x), f(x))$.

A derivative of the prediction by the input is linear in the readout's weights like the prediction
itself, with the features' derivative in place of the features:
$\partial y / \partial x_i = \ldots + (\partial f / \partial x_i) \cdot w$. So error bars of
derivatives need the derivatives of the features, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...data.batches import Batch
from ...data.slots import Slot
from ...models.directional import normal_like, pulled, pushes, pushes_by_reverse
from ...models.modes import transformable
from ..readout.reading import Reading, read
from ..readout.tail import owners_by_digits
from ..readout.tap import AnyTap

UNCONNECTED = (
    "The prediction does not depend on this input through differentiable operations "
    "(torch.no_grad, detach or NumPy in the forward pass?). Name another input with wrt=, or let "
    "the forward pass keep its graph."
)

Pair = tuple[Tensor, Tensor]
"""Output and features."""


@dataclass(frozen=True)
class FeatureMap:
    """Output and features of one batch as functions of one of its inputs.

    Derivatives stand in one of two orders, for the L rows of the input with d numbers each:
    (L, I, K, d) by the I rows of features of a sample and their K targets, or (L, O, d) by a
    sample's outputs; `shaped` gives what users see.

    Attributes:
        reading: output and features there, and their layout.
        aligned: whether the input has one row per sample, which acts on that sample alone; else a
            sum over samples is differentiated.
        graph: a copy of the input that requires its gradient, and the pass that gave `reading`,
            with the graph between them: all backward passes go along it.
        tap: of the model, and
        batch: what it was given, with the input
        slot: where it stands there.
        direction: where given, what stands in `reading` and is to be differentiated further are
            the derivatives along it.
    """

    point: Tensor
    reading: Reading
    aligned: bool
    graph: tuple[Tensor, Reading]
    tap: AnyTap
    batch: Batch
    slot: Slot
    direction: Tensor | None = None

    @classmethod
    def of(cls, tap: AnyTap, batch: Batch, slot: Slot) -> FeatureMap:
        """Of a batch, by the input in a slot of it, on which the output must depend."""
        with transformable():  # else attention could not be pulled through in batches
            free, reading = traced(tap, batch, slot)
        return cls(
            point=free.detach(),
            reading=reading.detached(),
            aligned=stand_alone(free, reading),
            graph=(free, reading),
            tap=tap,
            batch=batch,
            slot=slot,
        )

    def values(self, x: Tensor) -> Pair:
        """Output and features as a function of the input."""
        args, kwargs = self.slot.put(self.batch, x)
        output, features = (self._steady or self.tap.graph)(*args, **kwargs)
        return output, features

    @property
    def steady(self) -> bool:
        """Whether `torch.func` can transform `values`; finding out may take a forward pass."""
        return self._steady is not None

    @cached_property
    def _steady(self) -> Callable[..., Reading] | None:
        args, kwargs = self.slot.put(self.batch, self.graph[0])
        return self.tap.steady(*args, **kwargs)

    @property
    def samples(self) -> int:
        """Number of samples N."""
        return len(self.reading.output)

    @property
    def rows(self) -> int:
        """Rows of features per sample."""
        return len(self.reading.features) // self.samples

    def along(self, direction: Tensor) -> FeatureMap:
        r"""The map of directional derivatives, $x \mapsto (y'(x) v, f'(x) v)$."""
        direction = checked_direction(direction, self.point)
        way = pushes if self.steady else pushes_by_reverse
        try:
            with torch.no_grad():
                (pushed,) = way(self._flat, self.point, direction[None])
        except RuntimeError as error:
            raise ValueError(
                "An operation of the model has neither forward mode nor a second derivative "
                f"({error.__context__ or error}). Call gradient(x) without along= and multiply."
            ) from error
        output, features = self.reading
        first, rest = pushed[: output.numel()], pushed[output.numel() :]
        y, f = first.reshape(output.shape).to(output), rest.reshape(features.shape).to(features)
        reading = replace(self.reading, output=y, inputs=f, ones=False)
        return replace(self, reading=reading, direction=direction)

    def by_rows(self, values: Tensor) -> Tensor:
        """(directions, M or I) or (directions, M or I, K), from forward mode -> (L, I, K, d)."""
        values = values[..., None] if values.ndim == 2 else values
        targets, rows = values.shape[-1], len(self.point)
        if self.aligned:
            return values.reshape(-1, rows, self.rows, targets).permute(1, 2, 3, 0)
        return values.reshape(rows, -1, self.rows, targets).permute(0, 2, 3, 1)

    def by_outputs(self, values: Tensor) -> Tensor:
        """(L, I, K, d) -> (L, O, d)."""
        return values.flatten(1, 2)[:, self._outputs().flatten().argsort()]

    def by_places(self, values: Tensor) -> Tensor:
        """(L, O, d) -> (L * I * d, K), a row of the Gram each."""
        moved = values[:, self._outputs()].movedim(2, 3)
        return moved.reshape(-1, moved.shape[-1])

    def per_target(self, values: Tensor) -> Tensor:
        """Sums over everything but the targets, (K,)."""
        per_output = values.reshape(len(self.point), -1, self.point[0].numel()).sum((0, 2))
        return per_output[self._outputs()].sum(0)

    def shaped(self, values: Tensor) -> Tensor:
        """(L, O, d) as the input's shape for one output per sample, else (L, *output, *input)."""
        outputs = self.reading.output.shape[1:]
        outputs = outputs if outputs.numel() > 1 else torch.Size()
        return values.reshape(len(values), *outputs, *self.point.shape[1:])

    def _flat(self, x: Tensor) -> Tensor:
        return torch.cat([part.reshape(-1) for part in self.values(x)])

    def _outputs(self) -> Tensor:
        """Which output of a sample stands at row i and target k, (I, K)."""
        output = self.reading.output
        numbers = torch.arange(output[0].numel(), device=output.device).reshape(output[:1].shape)
        return self.reading.rows(numbers.expand(output.shape))[: self.rows]


def traced(tap: AnyTap, batch: Batch, slot: Slot) -> tuple[Tensor, Reading]:
    """A copy of the input in a slot and one pass, with the graph between them."""
    free = slot.get(batch).detach().clone().requires_grad_()
    args, kwargs = slot.put(batch, free)
    reading = read(tap.graph, replace(batch, args=args, kwargs=kwargs))
    if not reading.output.requires_grad:
        raise ValueError(UNCONNECTED)
    return free, reading


def checked_direction(direction: Tensor, point: Tensor) -> Tensor:
    """A direction in the shape and precision of the input, if it fits."""
    direction = torch.as_tensor(direction, dtype=torch.float64).to(point)
    if not bool(torch.isfinite(direction).all()):
        raise ValueError("A direction must be finite, got NaN or infinity.")
    try:
        return direction.broadcast_to(point.shape).contiguous()
    except RuntimeError as error:
        raise ValueError(
            f"A direction must have the shape of the input, {tuple(point.shape)}, or that of one "
            f"sample, got {tuple(direction.shape)}."
        ) from error


def row_owners(point: FeatureMap) -> Tensor | None:
    """The sample that each row of the input acts on, (L,); None where a row acts on several."""
    x, reading = point.graph
    return _owners(_mixed(x, point.samples, [reading.output]), x)


def stand_alone(x: Tensor, reading: Reading) -> bool:
    """Whether row n of the input acts on sample n alone."""
    if x.ndim == 0 or len(x) != len(reading.output) or len(x) == 1:
        return x.ndim > 0 and len(x) == len(reading.output)
    mixed = _mixed(x, len(x), list(reading))
    return _owners(mixed, x, torch.arange(len(x), device=x.device)) is not None


def _mixed(x: Tensor, samples: int, values: list[Tensor]) -> Tensor:
    """A random combination of each sample's values, (N,)."""
    parts = [value.reshape(samples, -1).to(x.dtype) for value in values]
    products = (part @ normal_like(part[0], seed) for seed, part in enumerate(parts))
    return sum(products, start=x.new_zeros(samples))


def _weighed(mixed: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """The derivatives (L, d) of a weighted sum over samples."""
    return pulled(mixed, x, weights[None], unconnected=UNCONNECTED).reshape(len(x), -1)


def _owners(mixed: Tensor, x: Tensor, owners: Tensor | None = None) -> Tensor | None:
    r"""The samples that own the input's rows, if each acts on its owner (given, or found) alone.

    With $t_n$ a combination of sample n's values and $s_n$ random signs and sizes,
    $\nabla_{x_l} \sum_m s_m t_m = s_n \nabla_{x_l} \sum_m t_m$ for the owner n of row l if, and but
    for chance only if, it does.
    """
    plain = _weighed(mixed, x, torch.ones_like(mixed))
    if owners is None:
        (owners,) = owners_by_digits(lambda code: [_weighed(mixed, x, code)], mixed, [plain])
    signs = normal_like(mixed, seed=2)
    expected = signs[owners, None] * plain
    tolerance = torch.finfo(x.dtype).eps ** 0.5 * float(expected.abs().max())
    off = (_weighed(mixed, x, signs) - expected).abs()
    return owners if bool((off <= tolerance).all()) else None
