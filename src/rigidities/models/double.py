"""A copy of a model in float64, to decide what a coarser type would blur.

Whether an output has a certain form (each target scaled by itself, say) shows only where the form
is larger than rounding. In bfloat16 a mixing of targets by a per cent is not. So such questions are
asked of a copy whose weights are float64 tensors of its own, and nothing of the user's is cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .shadow import shadow, with_attributes

LARGEST_COPY = 2 << 30
"""Bytes that the weights of a copy may take at most."""

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_NARROWING = {Tensor.float, Tensor.half, Tensor.bfloat16}
_PLAIN = (Tensor, nn.Parameter)


def is_double(model: nn.Module) -> bool:
    """Whether the weights and buffers of a model are float64 already."""
    return not any(_widened(tensor) for tensor in (*model.parameters(), *model.buffers()))


def double_copy(model: nn.Module) -> nn.Module | None:
    """A shadow with weights and buffers of its own in float64; None where it would be too large.

    Call it `with InDouble()`: a forward pass may bring other tensors, or cast to a type by name.
    """
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    if 8 * sum(tensor.numel() for tensor in weights.values()) > LARGEST_COPY:
        return None
    twin = shadow(model)
    copies: dict[int, Any] = {}  # a weight that two modules share stays one
    for module in twin.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _widened(parameter):
                if id(parameter) not in copies:
                    wide = nn.Parameter(_wide(parameter), requires_grad=False)
                    copies[id(parameter)] = with_attributes(wide, parameter)
                module._parameters[name] = copies[id(parameter)]
        for name, values in module._buffers.items():
            if values is not None and _widened(values):
                if id(values) not in copies:
                    copies[id(values)] = _wide(values)
                module._buffers[name] = copies[id(values)]
    return twin


class InDouble(TorchFunctionMode):
    """Where every operation of torch takes and gives float64, whatever type the code asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_wide, (args, kwargs or {}))
        result = (Tensor.double if func in _NARROWING else func)(*args, **kwargs)
        if isinstance(result, Tensor) or type(result) in (tuple, list):
            return tree_map(_wide, result)
        return result


def _widened(value: Any) -> bool:
    return type(value) in _PLAIN and value.dtype in _WIDER


def _wide(value: Any) -> Any:
    """A tensor or the name of a type, in float64; anything else as it is."""
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    return value.to(_WIDER[value.dtype]) if _widened(value) else value
