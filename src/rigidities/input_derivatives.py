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

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from .derivatives.directional import transformable
from .feature_map import UNCONNECTED, FeatureMap

NUMBERS = 1 << 24
"""Of the features' derivatives that are held at once, at most (128 MiB in float64)."""

FORWARD_COST = 1.5
"""Of a forward pass with a quadratic form after it, in backward passes."""

T = TypeVar("T")

Quadratic = Callable[[Tensor], Tensor]
"""Features (n, D) or (n, K, D) -> (n,) or (n, K)."""

Projection = Callable[[Tensor], Tensor]
"""Features (M, D) or (M, K, D) -> (M, C) or (M, K, C)."""


def passes(point: FeatureMap, columns: int, targets: int) -> tuple[float, int]:
    """Passes that forward mode takes (infinite where there is none), and reverse mode.

    Args:
        point: the batch.
        columns: combinations of the features to differentiate in reverse mode.
        targets: 1 where the targets share their features, else their number.
    """
    x = point.point
    forward = x[0].numel() if point.aligned else x.numel()
    possible = point.steady is not None and point.direction is None
    return forward if possible else float("inf"), point.rows * targets * columns


def either(
    point: FeatureMap,
    columns: int,
    targets: int,
    forward: Callable[[], T],
    reverse: Callable[[], T],
) -> T:
    """The result of forward or reverse mode, whichever takes less work and is possible."""
    pushes, pulls = passes(point, columns, targets)
    if FORWARD_COST * pushes > pulls:
        return reverse()
    try:
        return forward()
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return reverse()  # an operation without forward mode, or a forward pass with its own


def derivative_rows(point: FeatureMap) -> Tensor:
    """All derivatives of the features, (L, I, K, d, D), the cheaper way."""
    features = point.reading.features
    targets = 1 if features.ndim == 2 else features.shape[1]
    return either(
        point,
        features.shape[-1],
        targets,
        lambda: forward_rows(point),
        lambda: reverse_rows(point),
    )


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
    return moved, _arranged(point, torch.cat(parts))


def reverse_quadratic(point: FeatureMap, project: Projection) -> tuple[Tensor, Tensor]:
    """The same by reverse mode, as sums of squares of the projections' derivatives."""
    return output_derivatives(point), reverse_squares(point, project)


def forward_rows(point: FeatureMap) -> Tensor:
    """All derivatives of the features, (L, I, K, d, D), by forward mode."""
    tangents = torch.cat([features for _, features in _tangents(point)])
    if tangents.ndim == 3:
        tangents = tangents[:, :, None]
    columns = [_arranged(point, column) for column in tangents.unbind(-1)]
    return torch.stack(columns, dim=-1)


def reverse_squares(point: FeatureMap, project: Projection) -> Tensor:
    """Summed squares over the projections' derivatives, (L, I, K, d), by reverse mode."""
    return _reverse(point, project, lambda gradients: gradients.square().sum(0))


def reverse_rows(point: FeatureMap) -> Tensor:
    """All derivatives of the features, (L, I, K, d, D), by reverse mode."""
    return _reverse(point, lambda features: features, lambda gradients: gradients.movedim(0, -1))


def output_derivatives(point: FeatureMap) -> Tensor:
    """Derivatives of the output, (L, O, d) for the O outputs of a sample, by reverse mode."""
    x = point.point.detach().clone().requires_grad_()
    with transformable(), torch.enable_grad():
        output = point.values(x)[0].reshape(point.samples, -1).sum(0)
        return _columns(output, x, point.direction, needed=True).movedim(0, 1).detach()


def output_derivatives_apart(point: FeatureMap) -> Tensor:
    """Derivatives of every output of every sample by the whole input, (N * O, L, d)."""
    x = point.point.detach().clone().requires_grad_()
    with transformable(), torch.enable_grad():
        return _columns(point.values(x)[0].flatten(), x, needed=True).detach()


def _tangents(point: FeatureMap) -> Iterator[tuple[Tensor, Tensor]]:
    """Derivatives along one input number after the other, of the output and of the features.

    (c, N, O) and (c, M, D) or (c, M, K, D), or without N and with I for M where samples are summed.
    """
    x, steady = point.point, point.steady
    assert steady is not None
    inner = x.shape[1:] if point.aligned else x.shape
    basis = torch.eye(inner.numel(), dtype=x.dtype, device=x.device)

    def push(direction: Tensor) -> tuple[Tensor, Tensor]:
        along = direction.reshape(inner).expand(x.shape)
        tangent: tuple[Tensor, Tensor] = torch.func.jvp(steady, (x,), (along,))[1]
        return tangent

    chunk = max(1, NUMBERS // point.reading.features.numel())
    for start in range(0, len(basis), chunk):
        directions = basis[start : start + chunk]
        with transformable(), torch.no_grad():
            output, features = torch.func.vmap(push)(directions)
        output = output.reshape(len(directions), point.samples, -1)
        if not point.aligned:
            shape = (len(directions), point.samples, point.rows)
            features = features.reshape(*shape, *features.shape[2:]).sum(1)
            output = output.sum(1)
        yield output, features


def _arranged(point: FeatureMap, values: Tensor) -> Tensor:
    """(directions, M or I) or (directions, M or I, K) -> (L, I, K, d)."""
    values = values[..., None] if values.ndim == 2 else values
    targets, rows = values.shape[-1], len(point.point)
    if point.aligned:
        values = values.reshape(-1, rows, point.rows, targets)
        return values.permute(1, 2, 3, 0)
    return values.reshape(rows, -1, point.rows, targets).permute(0, 2, 3, 1)


def _reverse(point: FeatureMap, project: Projection, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduced derivatives (C, L, d) of the projections, stacked over I and K."""
    x = point.point.detach().clone().requires_grad_()
    with transformable(), torch.enable_grad():
        projected = project(point.values(x)[1])
        projected = projected[:, None] if projected.ndim == 2 else projected
        summed = projected.reshape(point.samples, point.rows, *projected.shape[1:]).sum(0)
        found = [
            [reduce(_columns(entry, x, point.direction)) for entry in row.unbind(0)]
            for row in summed
        ]
    return torch.stack([torch.stack(row, dim=1) for row in found], dim=1).detach()


def _columns(
    values: Tensor, x: Tensor, direction: Tensor | None = None, *, needed: bool = False
) -> Tensor:
    """Derivatives (C, L, d) of C values, or of their derivatives along a direction.

    They are zero where the values do not depend on x, unless they are needed.
    """
    pulled = _pulled(values, x, graph=direction is not None)
    if pulled is None and needed:
        raise ValueError(UNCONNECTED)
    if pulled is not None and direction is not None:
        pulled = _pulled((pulled * direction).flatten(1).sum(1), x)
    pulled = x.new_zeros(len(values), *x.shape) if pulled is None else pulled
    return pulled.reshape(len(values), len(x), x[0].numel())


def _pulled(values: Tensor, x: Tensor, *, graph: bool = False) -> Tensor | None:
    """Gradients (C, *x.shape) of C values, several at once where autograd can; None if unused."""
    if not values.requires_grad:
        return None
    basis = torch.eye(len(values), dtype=values.dtype, device=values.device)
    first = _pull(values, x, basis[0], graph=graph)
    if first is None or len(basis) == 1:
        return None if first is None else first[None]
    chunk = max(1, min(64, NUMBERS // max(1, x.numel())))
    try:
        starts = range(0, len(basis), chunk)
        parts = [_pull(values, x, basis[i : i + chunk], batched=True, graph=graph) for i in starts]
    except RuntimeError:  # an operation whose backward pass cannot be batched
        parts = [_pull(values, x, one, graph=graph) for one in basis]
        return torch.stack([part for part in parts if part is not None])
    return torch.cat([part for part in parts if part is not None])


def _pull(
    values: Tensor, x: Tensor, cotangents: Tensor, *, batched: bool = False, graph: bool = False
) -> Tensor | None:
    found: Tensor | None = torch.autograd.grad(
        values,
        x,
        cotangents,
        retain_graph=True,
        create_graph=graph,
        allow_unused=True,
        is_grads_batched=batched,
    )[0]
    return found
