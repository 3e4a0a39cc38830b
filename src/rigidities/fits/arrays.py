"""Arrays of any library -> float64 tensors on the CPU, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Values: TypeAlias = "Tensor | ArrayLike"


def float64(values: Values, name: str, dims: int | None = None) -> Tensor:
    """A finite float64 copy on the CPU of an array of any library.

    Args:
        values: a torch tensor, a NumPy array, a data frame, a (nested) list, or any array that
            speaks DLPack, such as JAX's.
        name: what errors call it.
        dims: how many dimensions it must have; any number if None.

    Examples:
        >>> float64([[1, 2], [3, 4]], "jacobian", 2)
        tensor([[1., 2.],
                [3., 4.]], dtype=torch.float64)
    """
    tensor = _tensor(values)
    if tensor.is_complex():
        raise TypeError(f"Expected {name} to be real, got {tensor.dtype}. Pass real and imag rows.")
    tensor = tensor.to("cpu", torch.float64, copy=True)
    if dims is not None and tensor.ndim != dims:
        raise ValueError(
            f"Expected {name} with {dims} dimension{'s' * (dims > 1)}, got shape "
            f"{tuple(tensor.shape)}. Reshape it."
        )
    if not tensor.numel():
        raise ValueError(f"Expected values in {name}, got shape {tuple(tensor.shape)}.")
    if bad := int((~tensor.isfinite()).sum()):
        raise ValueError(
            f"Expected {name} to be finite, got {bad} of {tensor.numel()} values nan or infinite. "
            "Drop those rows or mend what made them."
        )
    return tensor


def column(values: Values, name: str, rows: int) -> Tensor:
    """A checked vector with one entry per row; (N, 1) counts as (N,)."""
    vector = float64(values, name).squeeze()
    if vector.numel() != rows or vector.ndim > 1:
        raise ValueError(
            f"Expected {name} of shape ({rows},), got {tuple(vector.shape)}. Pass one value each."
        )
    return vector.reshape(rows)


def _tensor(values: Values) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    import numpy as np

    if not hasattr(values, "__array__") and hasattr(values, "__dlpack__"):
        return from_dlpack(values)
    array = np.asarray(values)
    if array.dtype.kind not in "biufc":  # object columns, half-width floats of other libraries
        array = array.astype(np.float64)
    return torch.as_tensor(array.copy())  # copied: torch refuses negative strides
