r"""Derivatives of a plain function by its parameters, by central differences.

Five points, $[8 (f_{+h} - f_{-h}) - (f_{+2h} - f_{-2h})] / 12 h$, are exact up to $h^4$: with
$h = \epsilon^{1/5}$ times the parameter's scale and $\epsilon$ the precision *of the function's
output* (a JAX function returns float32 unless told otherwise) truncation and rounding both stay
near $\epsilon^{4/5}$, 3e-13 in float64 and 3e-6 in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arrays import float64

if TYPE_CHECKING:
    from numpy.typing import NDArray

Function = Callable[["NDArray[Any]"], Any]
"""Parameters (P,) as a NumPy array -> predictions (M,)."""


def evaluated(function: Function, parameters: Tensor) -> Tensor:
    """The predictions (M,) in float64; a scalar counts as one."""
    values = float64(function(parameters.numpy().copy()), "the model's predictions")
    if values.squeeze().ndim > 1:
        raise ValueError(
            f"Expected the model to return one prediction per row, (M,), got {tuple(values.shape)}."
        )
    return values.reshape(-1)


def central_differences(function: Function, parameters: Tensor, spread: Tensor) -> Tensor:
    """Derivatives (M, P) of function(parameters) (M,).

    Args:
        function: parameters -> predictions.
        parameters: (P,) where to differentiate.
        spread: (P,) a scale for each parameter, such as its standard error; zero for unknown.
    """
    epsilon = _precision(function(parameters.numpy().copy()))
    columns = []
    for i, step in enumerate(_steps(parameters, spread, epsilon)):
        difference = torch.zeros(())
        for shift, weight in ((1, 8.0), (-1, -8.0), (2, -1.0), (-2, 1.0)):
            moved = parameters.clone()
            moved[i] += shift * step
            difference = difference + weight * evaluated(function, moved)
        columns.append(difference / (12 * step))
    return torch.stack(columns, 1)


def _steps(parameters: Tensor, spread: Tensor, epsilon: float) -> Tensor:
    """epsilon^(1/5) of min(|p|, spread), a power of two so that p + h - p is h."""
    size = parameters.abs()
    scale = torch.where((size > 0) & (spread > 0), torch.minimum(size, spread), size + spread)
    scale = torch.where(scale > 0, scale, 1.0)
    step = torch.maximum(epsilon**0.2 * scale, epsilon ** (2 / 3) * size)
    return 2 ** step.log2().round()


def _precision(values: Any) -> float:
    """Machine epsilon of what a function returned."""
    import numpy as np

    kind = values.dtype if hasattr(values, "dtype") else np.float64
    single = str(kind).rpartition(".")[2] in {"float32", "complex64"}
    return float(np.finfo(np.float32 if single else np.float64).eps)
