"""Random tensors, and tensors that are as good as equal."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-8) -> None:
    """Equal to a part of the largest entry, shapes included."""
    size = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * size)


def each_close(actual: Iterable[Tensor], expected: Iterable[Tensor], rtol: float = 1e-8) -> None:
    for a, b in zip(actual, expected, strict=True):
        close(a, b, rtol)


def alike(found: Any, expected: Any, rtol: float = 1e-8) -> None:
    """Two results with the same mean and the same error bars."""
    each_close((found.mean, found.std), (expected.mean, expected.std), rtol)


def line(w: Tensor, x: Tensor) -> Tensor:
    return w[0] + w[1] * x
