r"""Derivatives of the features by the inputs, in forward or reverse mode.

With d numbers in each sample's input and D features, forward mode takes d passes through the
trunk and gives $\partial f / \partial x_i$ for one i after the other. Reverse mode takes D passes
(for every row and target of a sample) and gives $\partial (c \cdot f) / \partial x$ for one
combination c of the features after the other. Samples do not influence one another, so one pass
serves all samples of a batch. `cheaper_mode` chooses between the two.

The callers need the derivatives in two ways. `forward_quadratic` and `reverse_quadratic` give the
derivatives of the outputs and the quadratic form q of each derivative, for error bars.
`derivative_rows` gives the derivatives of the features themselves, chunk by chunk, for the Gram.

Results come in one layout: (L, I, K, d) for the L rows of the input, I rows of features per
sample, K targets (1 where they share their features) and d numbers in a row of the input. Where
the input does not have one row per sample (atoms of several structures), the sum over samples is
differentiated. This gives every atom the derivative of its own structure. In forward mode d then
counts the numbers of all rows together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ...models.directional import at_once, pulled, pulled_in_turn, push, units
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

Projection = Callable[[Tensor], Tensor]
"""Features (M, D) or (M, K, D) -> (M, C) or (M, K, C)."""


class FeatureDerivatives(NamedTuple):
    """Some derivatives of the features.

    Attributes:
        features: The derivatives, (R, D) or (R, K, D).
        places: Where each of them stands in the flattened layout (L, I, d), (R,).
    """

    features: Tensor
    places: Tensor


class PassCounts(NamedTuple):
    """How many passes through the trunk each mode takes.

    Attributes:
        forward: Passes of forward mode. Infinite where there is no forward mode, or where it
            could never be preferred.
        reverse: Passes of reverse mode.
    """

    forward: float
    reverse: int


def pass_counts(feature_map: FeatureMap, columns: int, targets: int) -> PassCounts:
    """The passes that the derivatives of a map take.

    Args:
        feature_map: The map to differentiate.
        columns: How many combinations of the features reverse mode differentiates.
        targets: Number of targets K, 1 where they share their features.
    """
    forward = feature_map.numbers_per_row if feature_map.aligned else feature_map.x.numel()
    reverse = feature_map.rows_per_sample * targets * columns
    # This is tested before `has_transformable_pass`, which may take a forward pass.
    hopeless = FORWARD_COST * forward > PREFERENCE * reverse
    if hopeless or feature_map.direction is not None or not feature_map.has_transformable_pass:
        return PassCounts(float("inf"), reverse)
    return PassCounts(forward, reverse)


def cheaper_mode(
    feature_map: FeatureMap,
    columns: int,
    targets: int,
    forward: Callable[[], T],
    reverse: Callable[[], T],
    *,
    preference: float = 1.0,
) -> T:
    """The result of forward or of reverse mode, whichever is possible and takes less work.

    Args:
        feature_map: The map to differentiate.
        columns: As in `pass_counts`.
        targets: As in `pass_counts`.
        forward: Computes the result by forward mode.
        reverse: Computes the result by reverse mode.
        preference: How many times the work of reverse mode forward mode may take.
    """
    counts = pass_counts(feature_map, columns, targets)
    if FORWARD_COST * counts.forward > preference * counts.reverse:
        return reverse()
    try:
        return forward()
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        # An operation has no forward mode, or the model uses forward mode within itself.
        return reverse()


def derivative_rows(feature_map: FeatureMap) -> Iterator[FeatureDerivatives]:
    """All derivatives of the features, one chunk after the other, by the cheaper mode.

    Forward mode has `NUMBERS_AT_ONCE` of them in memory, and is preferred for it. Reverse mode has
    L d D (times K) for one row of features per sample, which only smaller batches can lower.
    """
    features = feature_map.reading.features
    targets = 1 if features.ndim == 2 else features.shape[1]

    def forward() -> Iterator[FeatureDerivatives]:
        # An operation without forward mode must fail here, not when the caller iterates.
        chunks = forward_rows(feature_map)
        first = next(chunks)
        return chain([first], chunks)

    def reverse() -> Iterator[FeatureDerivatives]:
        return reverse_rows(feature_map)

    return cheaper_mode(
        feature_map,
        columns=features.shape[-1],
        targets=targets,
        forward=forward,
        reverse=reverse,
        preference=PREFERENCE,
    )


def forward_quadratic(feature_map: FeatureMap, quadratic: Quadratic) -> tuple[Tensor, Tensor]:
    """Derivatives of the outputs and the quadratic form of the features', by forward mode.

    Args:
        feature_map: The map to differentiate.
        quadratic: The posterior's quadratic form.

    Returns:
        The derivatives (L, O, d) of the outputs, and q (L, I, K, d) of each derivative.
    """
    output_chunks = []
    quadratic_chunks = []
    for output_tangents, feature_tangents in _tangents(feature_map):
        directions = len(feature_tangents)
        q = quadratic(feature_tangents.flatten(0, 1))
        quadratic_chunks.append(q.reshape(directions, -1, *q.shape[1:]))
        output_chunks.append(output_tangents)
    slopes = torch.cat(output_chunks)
    if feature_map.aligned:
        output_slopes = slopes.permute(1, 2, 0)  # (d, N, O) -> (N, O, d)
    else:
        # (L d, O) -> (L, O, d)
        output_slopes = slopes.reshape(len(feature_map.x), -1, slopes.shape[-1]).mT
    return output_slopes, feature_map.rows_from_tangents(torch.cat(quadratic_chunks))


def reverse_quadratic(feature_map: FeatureMap, project: Projection) -> tuple[Tensor, Tensor]:
    """Derivatives of the outputs and the quadratic form of the features', by reverse mode.

    Args:
        feature_map: The map to differentiate.
        project: Whitens features: q is the sum of the squares of the projections.

    Returns:
        The derivatives (L, O, d) of the outputs, and q (L, I, K, d) of each derivative.
    """
    output_slopes = output_derivatives(feature_map)
    rows = _reverse(feature_map, project, lambda gradients: gradients.square().sum(0))
    # Each row of features gives K tensors (L, d).
    q = torch.stack([torch.stack(targets, dim=1) for targets in rows], dim=1)
    return output_slopes, q


def forward_rows(feature_map: FeatureMap) -> Iterator[FeatureDerivatives]:
    """All derivatives of the features by forward mode, in chunks of directions."""
    places = _places(feature_map)  # (L, I, d)
    if feature_map.aligned:
        places_by_direction = places.permute(2, 0, 1).flatten(1)  # (d, L I)
    else:
        places_by_direction = places.mT.flatten(0, 1)  # (L d, I)
    start = 0
    for _, tangents in _tangents(feature_map):
        stop = start + len(tangents)
        yield FeatureDerivatives(tangents.flatten(0, 1), places_by_direction[start:stop].flatten())
        start = stop


def reverse_rows(feature_map: FeatureMap) -> Iterator[FeatureDerivatives]:
    """All derivatives of the features by reverse mode, in chunks of input rows."""
    places = _places(feature_map)  # (L, I, d)
    input_rows = len(places)
    shared = feature_map.reading.features.ndim == 2
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
            yield FeatureDerivatives(features, places[chunk, row].flatten())


def output_derivatives(feature_map: FeatureMap) -> Tensor:
    """Derivatives of the output, (L, O, d) for the O outputs of a sample, by reverse mode."""
    x, reading = feature_map.traced
    with torch.enable_grad():
        sums = reading.output.reshape(feature_map.samples, -1).sum(0)
    return _gradients(sums, x, feature_map.direction, must_depend=True).movedim(0, 1)


def traced_derivatives(x: Tensor, output: Tensor) -> Tensor:
    """Derivatives of an output along the graph that leads to it from x.

    Their shape is that of `FeatureMap.shaped`.
    """
    sums = output.reshape(len(output), -1).sum(0)
    derivatives = _gradients(sums, x, must_depend=True).movedim(0, 1)
    output_shape = output.shape[1:] if derivatives.shape[1] > 1 else ()
    return derivatives.reshape(len(x), *output_shape, *x.shape[1:])


def reduced_output_derivatives(
    feature_map: FeatureMap, reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """Derivatives of every output of every sample by the whole input, each reduced to a number.

    This takes N * O backward passes, some at once.

    Args:
        feature_map: The map to differentiate.
        reduce: Reduces derivatives (c, L, d) of c outputs to (c,).

    Returns:
        The reduced derivatives, (N, O).
    """
    x, reading = feature_map.traced
    with torch.enable_grad():
        values = reading.output.flatten()
    reduced = []
    for gradients in _gradient_chunks(values, x, unconnected=UNCONNECTED):
        reduced.append(reduce(gradients.reshape(len(gradients), len(x), -1)))
    return torch.cat(reduced).reshape(feature_map.samples, -1)


def _places(feature_map: FeatureMap) -> Tensor:
    """Numbers from 0 on in the layout (L, I, d)."""
    shape = (len(feature_map.x), feature_map.rows_per_sample, feature_map.numbers_per_row)
    return torch.arange(math.prod(shape), device=feature_map.x.device).reshape(shape)


def _tangents(feature_map: FeatureMap) -> Iterator[OutputAndFeatures]:
    """Derivatives of output and features along the input numbers, in chunks of directions.

    Yields:
        (c, N, O) and (c, M, D) or (c, M, K, D) for c directions. Where samples are summed there is
        no N, and I in place of M.
    """
    x = feature_map.x
    # Where rows and samples belong together, one direction moves the same number of every row.
    direction_shape = x.shape[1:] if feature_map.aligned else x.shape

    def derivatives_along(direction: Tensor) -> OutputAndFeatures:
        tangent = direction.reshape(direction_shape).expand(x.shape)
        return cast("OutputAndFeatures", push(feature_map.values, x, tangent))

    chunk = max(1, NUMBERS_AT_ONCE // feature_map.reading.features.numel())
    numbers = x.new_empty(direction_shape.numel())
    for start in range(0, len(numbers), chunk):
        directions = units(numbers, start, chunk)
        with transformable(), torch.no_grad():
            output, features = torch.func.vmap(derivatives_along)(directions)
        output = output.reshape(len(directions), feature_map.samples, -1)
        if not feature_map.aligned:
            shape = (len(directions), feature_map.samples, feature_map.rows_per_sample)
            features = features.reshape(*shape, *features.shape[2:]).sum(1)
            output = output.sum(1)
        yield output, features


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
    x, reading = feature_map.traced
    with torch.enable_grad():
        projected = project(reading.features)
        if projected.ndim == 2:
            projected = projected[:, None]
        # Samples are summed: each input row gets the derivative of its own sample.
        shape = (feature_map.samples, feature_map.rows_per_sample, *projected.shape[1:])
        total = projected.reshape(shape).sum(0)  # (I, K, C)
        rows = [row.unbind(0) for row in total]
    for row in rows:
        yield [reduce(_gradients(columns, x, feature_map.direction)) for columns in row]


def _gradients(
    values: Tensor, x: Tensor, direction: Tensor | None = None, *, must_depend: bool = False
) -> Tensor:
    """Derivatives of C values by all numbers of x, (C, L, d).

    Args:
        values: (C,), with the graph that leads back to x.
        x: The input.
        direction: Where given, the values' derivatives along it are differentiated, instead of the
            values.
        must_depend: Whether to refuse values that do not depend on x. Otherwise their derivatives
            are zeros.
    """
    shape = (len(values), len(x), x[0].numel())
    unconnected = UNCONNECTED if must_depend else None
    derivatives = x.new_empty(len(values), *x.shape)
    done = 0
    for gradients in _gradient_chunks(values, x, direction, unconnected=unconnected):
        if len(gradients) == len(values):
            return gradients.reshape(shape)
        # Written chunk by chunk, so that the whole is never in memory twice.
        derivatives[done : done + len(gradients)] = gradients
        done += len(gradients)
    return derivatives.reshape(shape)


def _gradient_chunks(
    values: Tensor, x: Tensor, direction: Tensor | None = None, *, unconnected: str | None = None
) -> Iterator[Tensor]:
    """Gradients (c, *x.shape) of the values, chunk by chunk; arguments as in `_gradients`.

    `unconnected` is the error message for values that do not depend on x, None for zeros.
    """
    chunk = max(1, min(at_once(values), NUMBERS_AT_ONCE // max(1, x.numel())))
    cotangents = (units(values, start, chunk) for start in range(0, len(values), chunk))
    if direction is None:
        yield from pulled_in_turn(values, x, cotangents, unconnected=unconnected)
        return
    for slopes in pulled_in_turn(values, x, cotangents, graph=True, unconnected=unconnected):
        with torch.enable_grad():
            slopes_along = (slopes * direction).flatten(1).sum(1)
        yield pulled(slopes_along, x, units(slopes_along, 0, len(slopes_along)))
