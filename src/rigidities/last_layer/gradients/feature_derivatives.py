r"""Derivatives of the features by the inputs, in forward or reverse mode.

With d numbers in each sample's input and D features, forward mode takes d passes through the
trunk and gives $\partial f / \partial x_i$ for one i after the other; reverse mode takes D passes
(for every row and target of a sample) and gives $\partial (c \cdot f) / \partial x$ for one
combination c of the features after the other. Samples do not influence one another, so one pass
serves all samples of a batch.

Everything comes in one layout: (L, I, K, d) for the L rows of the input, I rows of features per
sample, K targets (1 where they share their features) and d numbers in a row of the input. Where
the input has not one row per sample (atoms of several structures), the sum over samples is
differentiated, which gives every atom the derivative of its own structure, and d counts the numbers
of all of them in forward mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeVar, cast

import torch
from torch import Tensor

from ...models.directional import at_once, pulled, pulled_in_turn, push, units
from ...models.modes import transformable
from .feature_map import UNCONNECTED, FeatureMap, Pair

NUMBERS = 1 << 23
"""Of the features' derivatives that are held at once, at most (64 MiB in float64)."""

FORWARD_COST = 1.5
"""Of a forward pass with a quadratic form after it, in backward passes."""

PREFERENCE = 2.0
"""How much more work than reverse mode forward mode may take where it holds less at once."""

T = TypeVar("T")

Chunk = tuple[Tensor, Tensor]
"""Some derivatives of the features, (R, D) or (R, K, D), and their places (R,) in (L, I, d)."""

Quadratic = Callable[[Tensor], Tensor]
"""Features (n, D) or (n, K, D) -> (n,) or (n, K)."""

Projection = Callable[[Tensor], Tensor]
"""Features (M, D) or (M, K, D) -> (M, C) or (M, K, C)."""


def passes(point: FeatureMap, columns: int, targets: int) -> tuple[float, int]:
    """Passes that forward mode takes, and reverse mode.

    The former are infinite where there is none, or where it could never be preferred. The latter
    differentiates so many columns (combinations of the features) for each of the targets, which
    are 1 where they share their features.
    """
    x = point.point
    forward = x[0].numel() if point.aligned else x.numel()
    reverse = point.rows * targets * columns
    hopeless = FORWARD_COST * forward > PREFERENCE * reverse
    if hopeless or point.direction is not None or not point.steady:
        return float("inf"), reverse
    return forward, reverse


def either(
    point: FeatureMap,
    columns: int,
    targets: int,
    forward: Callable[[], T],
    reverse: Callable[[], T],
    *,
    preference: float = 1.0,
) -> T:
    """The result of forward or reverse mode, whichever takes less work and is possible.

    Forward mode may take `preference` times the work of reverse mode; see `passes`.
    """
    pushes, pulls = passes(point, columns, targets)
    if FORWARD_COST * pushes > preference * pulls:
        return reverse()
    try:
        return forward()
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return reverse()  # an operation without forward mode, or a forward pass with its own


def derivative_rows(point: FeatureMap) -> Iterator[Chunk]:
    """All derivatives of the features, one chunk after the other, the cheaper way.

    Forward mode holds `NUMBERS` of them at once, and is preferred for it. Reverse mode holds the
    L d D (times K) of one row of features per sample, which only smaller batches can lower.
    """
    features = point.reading.features
    targets = 1 if features.ndim == 2 else features.shape[1]

    def forward() -> Iterator[Chunk]:
        chunks = forward_rows(point)
        return chain([next(chunks)], chunks)  # an operation without forward mode fails here

    columns, reverse = features.shape[-1], lambda: reverse_rows(point)
    return either(point, columns, targets, forward, reverse, preference=PREFERENCE)


def forward_quadratic(point: FeatureMap, quadratic: Quadratic) -> tuple[Tensor, Tensor]:
    """The derivatives (L, O, d) of the outputs, and q (L, I, K, d) of each, by forward mode."""
    slopes, parts = [], []
    for output, tangents in _tangents(point):
        directions = len(tangents)
        q = quadratic(tangents.flatten(0, 1))
        parts.append(q.reshape(directions, -1, *q.shape[1:]))
        slopes.append(output)
    rows, slope = len(point.point), torch.cat(slopes)
    moved = slope.permute(1, 2, 0) if point.aligned else slope.reshape(rows, -1, slope.shape[-1]).mT
    return moved, point.by_rows(torch.cat(parts))


def reverse_quadratic(point: FeatureMap, project: Projection) -> tuple[Tensor, Tensor]:
    """The same by reverse mode, as sums of squares of the projections' derivatives."""
    mean = output_derivatives(point)
    rows = _reverse(point, project, lambda gradients: gradients.square().sum(0))
    return mean, torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)


def forward_rows(point: FeatureMap) -> Iterator[Chunk]:
    """All derivatives of the features, some directions after the others, by forward mode."""
    places = _places(point)
    table = places.permute(2, 0, 1).flatten(1) if point.aligned else places.mT.flatten(0, 1)
    done = 0
    for _, tangents in _tangents(point):
        start, done = done, done + len(tangents)
        yield tangents.flatten(0, 1), table[start:done].flatten()


def reverse_rows(point: FeatureMap) -> Iterator[Chunk]:
    """All derivatives of the features, some input rows after the others, by reverse mode."""
    places, shared = _places(point), point.reading.features.ndim == 2
    rows = _reverse(point, lambda features: features, lambda gradients: gradients)
    for i, row in enumerate(rows):
        step = max(1, NUMBERS * len(places) // (len(row) * row[0].numel()))
        for start in range(0, len(places), step):
            part = slice(start, start + step)
            found = torch.stack([gradients[:, part] for gradients in row])  # (K, D, l, d)
            found = found.permute(2, 3, 0, 1).flatten(0, 1)
            yield found[:, 0] if shared else found, places[part, i].flatten()


def output_derivatives(point: FeatureMap) -> Tensor:
    """Derivatives of the output, (L, O, d) for the O outputs of a sample, by reverse mode."""
    x, reading = point.graph
    with torch.enable_grad():
        sums = reading.output.reshape(point.samples, -1).sum(0)
    return _columns(sums, x, point.direction, needed=True).movedim(0, 1)


def traced_derivatives(x: Tensor, output: Tensor) -> Tensor:
    """Derivatives along a graph that is there already, shaped as `FeatureMap.shaped` does."""
    found = _columns(output.reshape(len(output), -1).sum(0), x, needed=True).movedim(0, 1)
    outputs = output.shape[1:] if found.shape[1] > 1 else ()
    return found.reshape(len(x), *outputs, *x.shape[1:])


def output_derivatives_apart(point: FeatureMap, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Derivatives of every output of every sample by the whole input, reduced: (N, O).

    It takes N * O passes, some at once: `reduce` says what to keep of (c, L, d), (c,).
    """
    x, reading = point.graph
    with torch.enable_grad():
        values = reading.output.flatten()
    parts = _pulls(values, x, unconnected=UNCONNECTED)
    kept = [reduce(part.reshape(len(part), len(x), -1)) for part in parts]
    return torch.cat(kept).reshape(point.samples, -1)


def _places(point: FeatureMap) -> Tensor:
    """Numbers from 0 on in the layout (L, I, d)."""
    x = point.point
    shape = (len(x), point.rows, x[0].numel())
    return torch.arange(math.prod(shape), device=x.device).reshape(shape)


def _tangents(point: FeatureMap) -> Iterator[tuple[Tensor, Tensor]]:
    """Derivatives along one input number after the other, of the output and of the features.

    (c, N, O) and (c, M, D) or (c, M, K, D), or without N and with I for M where samples are summed.
    """
    x = point.point
    inner = x.shape[1:] if point.aligned else x.shape

    def along(direction: Tensor) -> Pair:
        everywhere = direction.reshape(inner).expand(x.shape)
        return cast("Pair", push(point.values, x, everywhere))

    chunk = max(1, NUMBERS // point.reading.features.numel())
    numbers = x.new_empty(inner.numel())
    for start in range(0, len(numbers), chunk):
        directions = units(numbers, start, chunk)
        with transformable(), torch.no_grad():
            output, features = torch.func.vmap(along)(directions)
        output = output.reshape(len(directions), point.samples, -1)
        if not point.aligned:
            shape = (len(directions), point.samples, point.rows)
            features = features.reshape(*shape, *features.shape[2:]).sum(1)
            output = output.sum(1)
        yield output, features


def _reverse(
    point: FeatureMap, project: Projection, reduce: Callable[[Tensor], Tensor]
) -> Iterator[list[Tensor]]:
    """Reduced derivatives (C, L, d) of each target's projections, for one i after the other."""
    x, reading = point.graph
    with torch.enable_grad():
        projected = project(reading.features)
        projected = projected[:, None] if projected.ndim == 2 else projected
        total = projected.reshape(point.samples, point.rows, *projected.shape[1:]).sum(0)
        rows = [row.unbind(0) for row in total]
    for row in rows:
        yield [reduce(_columns(entry, x, point.direction)) for entry in row]


def _columns(
    values: Tensor, x: Tensor, direction: Tensor | None = None, *, needed: bool = False
) -> Tensor:
    """Derivatives (C, L, d) of C values, or of theirs along a direction; zero unless `needed`."""
    message = UNCONNECTED if needed else None
    found, done = x.new_empty(len(values), *x.shape), 0
    for part in _pulls(values, x, direction, unconnected=message):
        if len(part) == len(values):
            return part.reshape(len(values), len(x), x[0].numel())
        found[done : done + len(part)] = part  # chunk by chunk: never held twice
        done += len(part)
    return found.reshape(len(values), len(x), x[0].numel())


def _pulls(
    values: Tensor, x: Tensor, direction: Tensor | None = None, *, unconnected: str | None = None
) -> Iterator[Tensor]:
    """Gradients (c, *x.shape) of each of the values, or of theirs along a direction, in turn."""
    chunk = max(1, min(at_once(values), NUMBERS // max(1, x.numel())))
    chunks = (units(values, start, chunk) for start in range(0, len(values), chunk))
    if direction is None:
        yield from pulled_in_turn(values, x, chunks, unconnected=unconnected)
        return
    for slopes in pulled_in_turn(values, x, chunks, graph=True, unconnected=unconnected):
        with torch.enable_grad():
            along = (slopes * direction).flatten(1).sum(1)
        yield pulled(along, x, units(along, 0, len(along)))
