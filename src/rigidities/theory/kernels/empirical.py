r"""Kernels of a given network: the tangent kernel of its parameters, and that of its last layer.

$$ \hat\Theta_{nk,ml} = \frac{\partial \tilde y_k(x_n)}{\partial w} \cdot
   \frac{\partial \tilde y_l(x_m)}{\partial w}, \qquad
   \hat K_{nm} = \sigma_w^2\, f_n^\top f_m . $$

(the paper's Sec. 3.5). At initialisation and large width they tend to the NTK and the NNGP. The
error of the second is of the order of one over the root of the last layer's width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...any_regressor.derivatives.differentiation import Differentiation
from ...any_regressor.derivatives.parameters import Subset
from ...any_regressor.derivatives.regressor import Regressor
from ...data.batches import Batch
from ...models.calling import Source
from ...models.modes import outside_inference_mode
from ...notices import notify
from ...readout.find import find_readout
from ...readout.readout import AnyReadout

__all__ = ["empirical_nngp", "empirical_ntk"]

DEFAULT_BATCH = 256
"""Rows of a batch; the derivatives of two batches are stored at once."""


def empirical_ntk(
    module: nn.Module,
    x: Tensor,
    z: Tensor | None = None,
    *,
    parameters: Subset | None = None,
    outputs: Literal["full", "trace"] = "full",
    batch_size: int = DEFAULT_BATCH,
) -> Tensor:
    r"""The tangent kernel of a network as it is, in float64.

    Derivatives of linear layers stay factored, so that no Jacobian is formed for them. Other
    derivatives are stored for two batches at a time.

    Args:
        module: The network, run in eval mode and never changed.
        x: Inputs (N, ...).
        z: Inputs (M, ...); by default x itself.
        parameters: Names or prefixes of the parameters to count, or callable(name) -> bool.
        outputs: For K > 1 outputs, "full" gives (N, K, M, K) and "trace" the sum over equal
            outputs, (N, M).
        batch_size: Rows at a time.

    Returns:
        (N, M) for one output or the trace, else (N, K, M, K).

    Raises:
        ValueError: An option or the inputs are not usable.

    Examples:
        >>> network = nn.Linear(2, 1, bias=False)
        >>> empirical_ntk(network, torch.tensor([[1.0, 0.0], [1.0, 2.0]])).tolist()
        [[1.0, 1.0], [1.0, 5.0]]
    """
    if outputs not in {"full", "trace"}:
        raise ValueError(f"outputs must be 'full' or 'trace', got {outputs!r}.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    _check_inputs(x, "x")
    symmetric = z is None
    other = x if z is None else _check_inputs(z, "z")
    differentiation = Differentiation.of(Regressor.of(module, subset=parameters), x)
    count = differentiation.outputs
    width = count if outputs == "full" else 1
    kernel = torch.zeros(len(x), width, len(other), width, dtype=torch.float64, device=x.device)
    for row_start, left_inputs in _chunks(x, batch_size):
        rows = slice(row_start, row_start + len(left_inputs))
        _, left = differentiation(left_inputs)
        for column_start, right_inputs in _chunks(other, batch_size):
            if symmetric and column_start < row_start:
                continue  # filled from the other side
            columns = slice(column_start, column_start + len(right_inputs))
            if symmetric and column_start == row_start:
                right = left
            else:
                _, right = differentiation(right_inputs)
            block = left.kernel(right)  # (n K, m K)
            block = block.reshape(len(left_inputs), count, len(right_inputs), count)
            if outputs == "trace":
                block = torch.einsum("nkmk->nm", block)[:, None, :, None]
            kernel[rows, :, columns] = block
            if symmetric and column_start != row_start:
                kernel[columns, :, rows] = block.permute(2, 3, 0, 1)
    return kernel[:, 0, :, 0] if width == 1 else kernel


@outside_inference_mode
def empirical_nngp(
    module: nn.Module,
    x: Tensor,
    z: Tensor | None = None,
    *,
    weight_variance: float = 1.0,
    features: Callable[..., Any] | None = None,
    layer: str | None = None,
    batch_size: int = 4096,
) -> Tensor:
    r"""$\sigma_w^2 F F'^\top$ from the features of the last layer, (N, M) in float64.

    A bias of the readout counts as one more feature, equal to one, with the same variance. In a
    network in standard parametrisation, $\sigma_w^2$ is the variance of the readout's weights and
    includes the factor 1 / width.

    Args:
        module: The network, never changed.
        x: Inputs (N, ...).
        z: Inputs (M, ...); by default x itself.
        weight_variance: $\sigma_w^2$.
        features: A function callable(module, inputs) -> (N, D), instead of the readout's features.
        layer: Name of the readout where it is not the last linear map.
        batch_size: Rows at a time.

    Raises:
        ValueError: The inputs are not usable, or each output has features of its own.

    Examples:
        >>> network = nn.Sequential(nn.Identity(), nn.Linear(1, 1, bias=False))
        >>> empirical_nngp(network, torch.tensor([[1.0], [2.0]]), weight_variance=0.5).tolist()
        [[0.5, 1.0], [1.0, 2.0]]
    """
    if not 0 <= weight_variance < float("inf"):
        raise ValueError(f"weight_variance must be finite, not negative, got {weight_variance}.")
    _check_inputs(x, "x")
    first = Batch((x[:2],), {}, None, None)
    found_readout = find_readout(module, Source(None, features, None), layer, first)
    if found_readout.notice:
        notify(found_readout.notice)
    readout = found_readout.readout
    left = _features(readout, x, batch_size)
    if z is None:
        right = left
    else:
        right = _features(readout, _check_inputs(z, "z"), batch_size)
    return weight_variance * left @ right.mT


def _features(readout: AnyReadout, x: Tensor, batch_size: int) -> Tensor:
    """Features of the last layer, (N, D) in float64."""
    with torch.no_grad():
        batches = [
            readout.read((inputs,), {}).features.detach() for _, inputs in _chunks(x, batch_size)
        ]
    features = torch.cat(batches).to(torch.float64)
    if features.ndim == 3 and features.shape[1] == 1:  # (N, 1, D) of one output
        features = features[:, 0]
    if features.ndim != 2 or len(features) != len(x):
        raise ValueError(
            f"Expected one row of features per input, got {tuple(features.shape)} for {len(x)} "
            "inputs: each output has its own features. Pass features=callable(module, x) -> (N, "
            "D)."
        )
    return features


def _chunks(x: Tensor, size: int) -> list[tuple[int, Tensor]]:
    """Chunks of at most `size` rows, each with the number of its first row."""
    return [(start, x[start : start + size]) for start in range(0, len(x), size)]


def _check_inputs(x: Tensor, name: str) -> Tensor:
    """The inputs, unless there are none or they are not finite."""
    if x.ndim == 0 or len(x) == 0:
        raise ValueError(f"{name} must have at least one row, got shape {tuple(x.shape)}.")
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name} contains NaN or infinity. Clean the inputs.")
    return x
