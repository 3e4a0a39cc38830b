"""Arrays of any library as checked float64 tensors on the CPU.

Every number that a user hands to `fits` or `closed_forms` passes through `float64` or `column`,
which name the argument in their errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..metrics.alignment import Values, as_tensor, require_finite

__all__ = ["Values", "as_tensor", "column", "float64"]


def float64(values: Values, name: str, dims: int | None = None) -> Tensor:
    """A finite float64 copy on the CPU of an array of any library.

    Args:
        values: A torch tensor, a NumPy array, a data frame, a (nested) list, or any array that
            speaks DLPack, such as JAX's.
        name: Its name in error messages.
        dims: How many dimensions it must have; any number if None.

    Raises:
        TypeError: The values are complex.
        ValueError: There are no values, they are not finite, or the number of dimensions is wrong.

    Examples:
        >>> float64([[1, 2], [3, 4]], "jacobian", 2)
        tensor([[1., 2.],
                [3., 4.]], dtype=torch.float64)
    """
    tensor = as_tensor(values)
    if tensor.is_complex():
        raise TypeError(f"Expected {name} to be real, got {tensor.dtype}. Pass real and imag rows.")
    tensor = tensor.to("cpu", torch.float64, copy=True)
    if dims is not None and tensor.ndim != dims:
        dimensions = "1 dimension" if dims == 1 else f"{dims} dimensions"
        raise ValueError(
            f"Expected {name} with {dimensions}, got shape {tuple(tensor.shape)}. Reshape it."
        )
    if not tensor.numel():
        raise ValueError(f"Expected values in {name}, got shape {tuple(tensor.shape)}.")
    require_finite(name, tensor)
    return tensor


def column(values: Values, name: str, rows: int) -> Tensor:
    """A checked vector with one entry per row; (N, 1) counts as (N,)."""
    vector = float64(values, name).squeeze()
    if vector.numel() != rows or vector.ndim > 1:
        raise ValueError(
            f"Expected {name} of shape ({rows},), got {tuple(vector.shape)}. Pass one value each."
        )
    return vector.reshape(rows)
