"""Orders in which derivatives stand, for the L rows of an input with d numbers each.

(L, I, K, d) by the I rows of features of a sample and their K targets, (L, O, d) by a sample's
outputs, and the shapes that users see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .feature_map import FeatureMap


def by_rows(point: FeatureMap, values: Tensor) -> Tensor:
    """(directions, M or I) or (directions, M or I, K), from forward mode -> (L, I, K, d)."""
    values = values[..., None] if values.ndim == 2 else values
    targets, rows = values.shape[-1], len(point.point)
    if point.aligned:
        return values.reshape(-1, rows, point.rows, targets).permute(1, 2, 3, 0)
    return values.reshape(rows, -1, point.rows, targets).permute(0, 2, 3, 1)


def by_outputs(point: FeatureMap, values: Tensor) -> Tensor:
    """(L, I, K, d) -> (L, O, d)."""
    return values.flatten(1, 2)[:, _outputs(point).flatten().argsort()]


def by_places(point: FeatureMap, values: Tensor) -> Tensor:
    """(L, O, d) -> (L * I * d, K), a row of the Gram each."""
    moved = values[:, _outputs(point)].movedim(2, 3)
    return moved.reshape(-1, moved.shape[-1])


def per_target(point: FeatureMap, values: Tensor) -> Tensor:
    """Sums over everything but the targets, (K,)."""
    per_output = values.reshape(len(point.point), -1, point.point[0].numel()).sum((0, 2))
    return per_output[_outputs(point)].sum(0)


def shaped(point: FeatureMap, values: Tensor) -> Tensor:
    """(L, O, d) as the input's shape for one output per sample, else (L, *output, *input)."""
    outputs = point.reading.output.shape[1:]
    outputs = outputs if outputs.numel() > 1 else torch.Size()
    return values.reshape(len(values), *outputs, *point.point.shape[1:])


def _outputs(point: FeatureMap) -> Tensor:
    """Which output of a sample stands at row i and target k, (I, K)."""
    output = point.reading.output
    numbers = torch.arange(output[0].numel(), device=output.device).reshape(1, *output.shape[1:])
    return point.reading.rows(numbers.expand(output.shape))[: point.rows]
