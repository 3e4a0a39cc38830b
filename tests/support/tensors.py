"""Random tensors, and tensors that are as good as equal."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-8) -> None:
    """Equal to a part of the largest entry, shapes included."""
    size = float(expected.abs().max())
    torch.testing.assert_close(actual.to(expected), expected, rtol=rtol, atol=rtol * size)


def line(w: Tensor, x: Tensor) -> Tensor:
    return w[0] + w[1] * x
