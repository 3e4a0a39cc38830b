r"""Kernels of a given net: the tangent kernel of its parameters, and that of its last layer.

$$ \hat\Theta_{nk,ml} = \frac{\partial \tilde y_k(x_n)}{\partial w} \cdot
   \frac{\partial \tilde y_l(x_m)}{\partial w}, \qquad
   \hat K_{nm} = \sigma_w^2\, f_n^\top f_m . $$

At initialisation and large width they tend to the NTK and the NNGP; the second one with an error
of the order of one over the root of the last layer's width (the paper's Sec. 3.5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..any_regressor.derivatives.differentiation import Differentiation
from ..any_regressor.derivatives.parameters import Subset
from ..any_regressor.derivatives.regressor import Regressor
from ..last_layer.readout.tap import AnyTap, Tap

DEFAULT_BATCH = 256  # rows whose derivatives are held at once, twice


def empirical_ntk(
    module: nn.Module,
    x: Tensor,
    z: Tensor | None = None,
    *,
    parameters: Subset | None = None,
    outputs: Literal["full", "trace"] = "full",
    batch_size: int = DEFAULT_BATCH,
) -> Tensor:
    r"""The tangent kernel of a net as it is, in float64.

    Derivatives of linear layers stay factored, so that no Jacobian is formed for them; the rest is
    held for two batches at a time.

    Args:
        module: the net, run in eval mode and never changed.
        x: inputs (N, ...).
        z: inputs (M, ...); by default x itself.
        parameters: names or prefixes of the parameters to count, or callable(name) -> bool.
        outputs: for K > 1 outputs, "full" gives (N, K, M, K) and "trace" the sum over equal
            outputs, (N, M).
        batch_size: rows at a time.

    Returns:
        (N, M) for one output or the trace, else (N, K, M, K).

    Examples:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> empirical_ntk(net, torch.tensor([[1.0, 0.0], [1.0, 2.0]])).tolist()
        [[1.0, 1.0], [1.0, 5.0]]
    """
    if outputs not in {"full", "trace"}:
        raise ValueError(f"outputs must be 'full' or 'trace', got {outputs!r}.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    _check_inputs(x, "x")
    other = x if z is None else _check_inputs(z, "z")
    derivatives = Differentiation.of(Regressor.of(module, subset=parameters), x)
    count = derivatives.outputs
    wide = count if outputs == "full" else 1
    kernel = torch.zeros(len(x), wide, len(other), wide, dtype=torch.float64, device=x.device)
    for i, rows in _chunks(x, batch_size):
        left = derivatives(rows)[1]
        for j, columns in _chunks(other, batch_size):
            if z is None and j < i:
                continue  # symmetric: filled from the other side
            right = left if z is None and i == j else derivatives(columns)[1]
            block = left.kernel(right).reshape(len(rows), count, len(columns), count)
            if outputs == "trace":
                block = torch.einsum("nkmk->nm", block)[:, None, :, None]
            kernel[i : i + len(rows), :, j : j + len(columns)] = block
            if z is None and i != j:
                kernel[j : j + len(columns), :, i : i + len(rows)] = block.permute(2, 3, 0, 1)
    return kernel[:, 0, :, 0] if wide == 1 else kernel


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

    A bias of the readout counts as one more feature, equal to one, of the same variance. In a net
    of standard parametrisation $\sigma_w^2$ is the variance of the readout's weights, which holds
    the factor 1 / width.

    Args:
        module: the net, never changed.
        x: inputs (N, ...).
        z: inputs (M, ...); by default x itself.
        weight_variance: $\sigma_w^2$.
        features: callable(module, inputs) -> (N, D), instead of the readout's.
        layer: name of the readout where it is not the last linear map.
        batch_size: rows at a time.

    Examples:
        >>> net = nn.Sequential(nn.Identity(), nn.Linear(1, 1, bias=False))
        >>> empirical_nngp(net, torch.tensor([[1.0], [2.0]]), weight_variance=0.5).tolist()
        [[0.5, 1.0], [1.0, 2.0]]
    """
    if not 0 <= weight_variance < float("inf"):
        raise ValueError(f"weight_variance must be finite, not negative, got {weight_variance}.")
    tap = Tap.find(module, (_check_inputs(x, "x")[:2],), layer=layer, features=features)
    left = _features(tap, x, batch_size)
    right = left if z is None else _features(tap, _check_inputs(z, "z"), batch_size)
    return weight_variance * left @ right.mT


def _features(tap: AnyTap, x: Tensor, batch_size: int) -> Tensor:
    with torch.no_grad():
        rows = [tap(part).features.detach() for _, part in _chunks(x, batch_size)]
    f = torch.cat(rows).to(torch.float64)
    f = f[:, 0] if f.ndim == 3 and f.shape[1] == 1 else f
    if f.ndim != 2 or len(f) != len(x):
        raise ValueError(
            f"Expected one row of features per input, got {tuple(f.shape)} for {len(x)} inputs: "
            "the outputs have features of their own. Pass features=callable(module, x) -> (N, D)."
        )
    return f


def _chunks(x: Tensor, size: int) -> list[tuple[int, Tensor]]:
    return [(start, x[start : start + size]) for start in range(0, len(x), size)]


def _check_inputs(x: Tensor, name: str) -> Tensor:
    if x.ndim == 0 or len(x) == 0:
        raise ValueError(f"{name} must hold at least one row, got shape {tuple(x.shape)}.")
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name} holds NaN or infinity. Clean the inputs.")
    return x
