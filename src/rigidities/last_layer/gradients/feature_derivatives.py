r"""Derivatives of the features by the inputs, in forward or reverse mode.

With d numbers in each sample's input and D features, forward mode takes d passes through the
trunk and gives $\partial f / \partial x_i$ for one i after the other. Reverse mode takes D passes
(for every row and target of a sample) and gives $\partial (c \cdot f) / \partial x$ for one
combination c of the features after the other. Samples do not influence one another, so one pass
serves all samples of a batch. `in_cheaper_mode` chooses between the two.

The callers need the derivatives in two ways. `forward_quadratic` and `reverse_quadratic` give the
derivatives of the outputs and the quadratic form q of each derivative, for error bars.
`derivative_rows` gives the derivatives of the features themselves, chunk by chunk, for the Gram.

For the L rows of the input, I rows of features per sample, K targets and d numbers in a row of the
input there are L I d rows of derivatives. Where the input does not have one row per sample (atoms
of several structures), the sum over samples is differentiated. This gives every atom the derivative
of its own structure. In forward mode d then counts the numbers of all rows together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from ...models.derivatives import at_once, pulled_in_turn, push, units
from ...models.modes import transformable
from .feature_map import UNCONNECTED, FeatureMap, OutputAndFeatures

NUMBERS_AT_ONCE = 1 << 23
"""Largest number of entries of the features' derivatives in memory at once (64 MiB in float64)."""

FORWARD_COST = 1.5
"""Work of a forward pass with a quadratic form after it, in units of a backward pass."""

PREFERENCE = 2.0
"""How many times the work of reverse mode forward mode may take, where it needs less memory."""

T = TypeVar("T")

Quadratic = Callable[[Tensor], Tensor]
"""Features (n, D) or (n, K, D) -> (n,) or (n, K)."""

PlacedRows = tuple[Tensor, Tensor]
"""The number of each row of derivatives in the order (L, I, d), (R,), and the derivatives of the
features, (R, D) or (R, K, D)."""

Projection = Callable[[Tensor], Tensor]
"""Features (M, D) or (M, K, D) -> (M, C) or (M, K, C)."""


def forward_passes(feature_map: FeatureMap) -> float:
    """How many passes through the trunk forward mode takes; infinite where there is none."""
    if feature_map.function is None:
        return math.inf
    return feature_map.numbers_per_row if feature_map.aligned else feature_map.x.numel()


def in_cheaper_mode(
    feature_map: FeatureMap,
    reverse_passes: int,
    forward: Callable[[], T],
    reverse: Callable[[], T],
    *,
    preference: float = 1.0,
) -> T:
    """The result of forward or of reverse mode, whichever is possible and takes less work.

    Args:
        feature_map: The map to differentiate.
        reverse_passes: How many passes through the trunk reverse mode takes.
        forward: Computes the result by forward mode.
        reverse: Computes the result by reverse mode.
        preference: How many times the work of reverse mode forward mode may take.
    """
    passes = forward_passes(feature_map)
    if math.isfinite(passes) and FORWARD_COST * passes <= preference * reverse_passes:
        try:
            return forward()
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            # An operation has no forward mode, or the model uses forward mode within itself.
    return reverse()


def derivative_rows(feature_map: FeatureMap) -> Iterator[PlacedRows]:
    """All derivatives of the features, one chunk after the other, by the cheaper mode.

    Forward mode has `NUMBERS_AT_ONCE` of them in memory, and is preferred for it. Reverse mode has
    L d D (times K) for one row of features per sample, which only smaller batches can lower.
    """

    def forward() -> Iterator[PlacedRows]:
        # An operation without forward mode must fail here, not when the caller iterates.
        chunks = ((places, features) for places, features, _ in _forward_rows(feature_map))
        first = next(chunks)
        return chain([first], chunks)

    return in_cheaper_mode(
        feature_map,
        feature_map.features[: feature_map.rows_per_sample].numel(),
        forward,
        lambda: _reverse_rows(feature_map),
        preference=PREFERENCE,
    )


def forward_quadratic(feature_map: FeatureMap, quadratic: Quadratic) -> tuple[Tensor, Tensor]:
    """Derivatives of the outputs and the quadratic form of the features', by forward mode.

    Args:
        feature_map: The map to differentiate.
        quadratic: The posterior's quadratic form.

    Returns:
        The derivatives (L, O, d) of the outputs, and q (L I d, 1 or K) of each row of derivatives.
    """
    places = []
    outputs = []
    forms = []
    for chunk_places, features, chunk_outputs in _forward_rows(feature_map):
        places.append(chunk_places)
        outputs.append(chunk_outputs)
        forms.append(quadratic(features).reshape(len(features), -1))
    order = torch.cat(places).argsort()
    return feature_map.from_rows(torch.cat(outputs)[order]), torch.cat(forms)[order]


def reverse_quadratic(feature_map: FeatureMap, project: Projection) -> tuple[Tensor, Tensor]:
    """Derivatives of the outputs and the quadratic form of the features', by reverse mode.

    Args:
        feature_map: The map to differentiate.
        project: Whitens features: q is the sum of the squares of the projections.

    Returns:
        The derivatives (L, O, d) of the outputs, and q (L I d, 1 or K) of each row of derivatives.
    """
    output_slopes = output_derivatives(feature_map)
    rows = _reverse(feature_map, project, lambda gradients: gradients.square().sum(0))
    # Each row of features gives a tensor (L, d) for each target.
    q = torch.stack([torch.stack(targets, dim=-1) for targets in rows], dim=1)
    return output_slopes, q.flatten(0, 2)


def output_derivatives(feature_map: FeatureMap) -> Tensor:
    """Derivatives of the output, (L, O, d) for the O outputs of a sample, by reverse mode."""
    with torch.enable_grad():
        sums = feature_map.reading.output.reshape(feature_map.samples, -1).sum(0)
    return _gradients(sums, feature_map.x, UNCONNECTED).movedim(0, 1)


def gradient_chunks(values: Tensor, x: Tensor, unconnected: str | None = None) -> Iterator[Tensor]:
    """Derivatives of C values by all numbers of x, chunk by chunk of the values: (c, L, d).

    Args:
        values: (C,), with the graph that leads back to x.
        x: The input.
        unconnected: The error message for values that do not depend on x; None for zeros.
    """
    chunk = max(1, min(at_once(values), NUMBERS_AT_ONCE // max(1, x.numel())))
    cotangents = (units(values, start, chunk) for start in range(0, len(values), chunk))
    for gradients in pulled_in_turn(values, x, cotangents, unconnected=unconnected):
        yield gradients.reshape(len(gradients), len(x), -1)


def _gradients(values: Tensor, x: Tensor, unconnected: str | None = None) -> Tensor:
    """All of `gradient_chunks`, (C, L, d)."""
    derivatives = x.new_empty(len(values), len(x), x[0].numel())
    done = 0
    for gradients in gradient_chunks(values, x, unconnected):
        if len(gradients) == len(values):
            return gradients
        # Written chunk by chunk, so that the whole is never in memory twice.
        derivatives[done : done + len(gradients)] = gradients
        done += len(gradients)
    return derivatives


def _places(feature_map: FeatureMap) -> Tensor:
    """The numbers of the rows of derivatives, (L, I, d)."""
    shape = (len(feature_map.x), feature_map.rows_per_sample, feature_map.numbers_per_row)
    return torch.arange(math.prod(shape), device=feature_map.x.device).reshape(shape)


def _forward_rows(feature_map: FeatureMap) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """All derivatives of the features by forward mode, in chunks of directions.

    Yields:
        `PlacedRows`, and the derivatives of the outputs in the same rows, (R, K).
    """
    function = feature_map.function
    assert function is not None
    x = feature_map.x.detach()
    layout = feature_map.reading.output_layout
    places = _places(feature_map)
    if feature_map.aligned:
        # One direction moves the same number of every row.
        direction_shape = x.shape[1:]
        places_by_direction = places.permute(2, 0, 1).flatten(1)  # (d, L I)
    else:
        direction_shape = x.shape
        places_by_direction = places.mT.flatten(0, 1)  # (L d, I)

    def derivatives_along(direction: Tensor) -> OutputAndFeatures:
        tangent = direction.reshape(direction_shape).expand(x.shape)
        output, features = push(function, x, tangent)
        output_rows = layout.rows(output)
        if feature_map.aligned:
            return output_rows, features
        return feature_map.sum_of_samples(output_rows), feature_map.sum_of_samples(features)

    chunk = max(1, NUMBERS_AT_ONCE // feature_map.features.numel())
    numbers = x.new_empty(direction_shape.numel())
    for start in range(0, len(numbers), chunk):
        directions = units(numbers, start, chunk)
        with transformable(), torch.no_grad():
            outputs, features = torch.func.vmap(derivatives_along)(directions)
        chunk_places = places_by_direction[start : start + len(directions)].flatten()
        yield chunk_places, features.flatten(0, 1), outputs.flatten(0, 1)


def _reverse_rows(feature_map: FeatureMap) -> Iterator[PlacedRows]:
    """All derivatives of the features by reverse mode, in chunks of input rows."""
    places = _places(feature_map)  # (L, I, d)
    input_rows = len(places)
    shared = feature_map.features.ndim == 2
    rows = _reverse(feature_map, lambda features: features, lambda gradients: gradients)
    for row, gradients_by_target in enumerate(rows):  # a list of K tensors (D, L, d)
        numbers = len(gradients_by_target) * gradients_by_target[0].numel()
        step = max(1, NUMBERS_AT_ONCE * input_rows // numbers)
        for start in range(0, input_rows, step):
            chunk = slice(start, start + step)
            stacked = torch.stack([gradients[:, chunk] for gradients in gradients_by_target])
            features = stacked.permute(2, 3, 0, 1).flatten(0, 1)  # (K, D, l, d) -> (l d, K, D)
            if shared:
                features = features[:, 0]
            yield places[chunk, row].flatten(), features


def _reverse(
    feature_map: FeatureMap, project: Projection, reduce: Callable[[Tensor], Tensor]
) -> Iterator[list[Tensor]]:
    """Derivatives of projected features, for one of a sample's I rows of features after the other.

    Args:
        feature_map: The map to differentiate.
        project: What to differentiate of the features.
        reduce: What to keep of derivatives (C, L, d) of one target.

    Yields:
        A list with the reduced derivatives of each of the K targets.
    """
    with torch.enable_grad():
        projected = project(feature_map.features)
        if projected.ndim == 2:
            projected = projected[:, None]
        # Samples are summed: each input row gets the derivative of its own sample.
        total = feature_map.sum_of_samples(projected)  # (I, K, C)
        rows = [row.unbind(0) for row in total]
    for row in rows:
        yield [reduce(_gradients(columns, feature_map.x)) for columns in row]
