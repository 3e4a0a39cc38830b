"""Rows of a batch beside its reading: targets, weights and hashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data.batches import Batch
from ..data.sketch import row_hashes
from .readout.reading import Reading

SampleWeight = Callable[[Any], Tensor]


def target_rows(target: Tensor | None, reading: Reading) -> Tensor | None:
    """The target as (M, K), whatever dimensions of size one it has or lacks."""
    if target is None:
        return None
    expected = reading.output.shape
    if target.squeeze().shape != reading.output.squeeze().shape:
        raise ValueError(
            f"the target's shape {tuple(target.shape)} does not fit the output's "
            f"{tuple(expected)}. If the model predicts more than the target (a mean and a "
            "variance, say), pick the mean with output= or forward=lambda m, b: m(b)[..., 0]."
        )
    return reading.rows(target.reshape(expected))


def sample_weights(function: SampleWeight | None, batch: Batch, reading: Reading) -> Tensor | None:
    """The user's weights of a batch, (M, 1) or (M, K)."""
    if function is None:
        return None
    given = torch.as_tensor(function(batch.raw), device=reading.output.device)
    given = given.to(torch.float64)
    output = reading.output
    if given.squeeze().shape == output.squeeze().shape:
        return reading.rows(given.reshape(output.shape))
    if given.ndim > 1 or given.numel() != len(output):
        raise ValueError(
            f"sample_weight returned {tuple(given.shape)} for an output of "
            f"{tuple(output.shape)}: expected one weight per sample or per output."
        )
    expanded = given.reshape(-1, *[1] * (output.ndim - 1)).expand(output.shape)
    return reading.rows(expanded)


def batch_hashes(batch: Batch, reading: Reading) -> Tensor:
    """One hash per row of input and target; of rounded features and target, where inputs differ.

    That is, where they have not one row per output, as atoms of several structures.
    """
    rows = len(reading.output)
    values = [*batch.args, *batch.kwargs.values()]
    if batch.target is not None:
        values.append(batch.target)
    hashes = row_hashes(values, rows)
    if hashes is not None:
        return hashes
    coarse = reading.features.detach().flatten(1).to(torch.bfloat16)
    target = target_rows(batch.target, reading)
    rounded = row_hashes([coarse] if target is None else [coarse, target], len(coarse))
    assert rounded is not None
    return rounded
