"""A copy of a model in float64, for questions that a lower precision cannot answer.

Whether an output has a certain structure (each target scaled by itself, say) can be seen only where
deviations from it are larger than rounding. In bfloat16 a mixing of targets by one per cent is not.
So such questions are put to a copy with float64 weights, and the user's own tensors are never cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .shadow import PLAIN_TENSORS, shadow, with_attributes

LARGEST_COPY = 2 << 30
"""Most bytes that the weights of a copy may take."""

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_NARROWING = {Tensor.float, Tensor.half, Tensor.bfloat16}


def is_double(model: nn.Module) -> bool:
    """Whether the weights and buffers of a model are float64 already."""
    return not any(_is_narrow(tensor) for tensor in (*model.parameters(), *model.buffers()))


def double_copy(model: nn.Module) -> nn.Module | None:
    """A shadow with its own weights and buffers in float64; None where it would be too large.

    Call it within `InDouble()`: a forward pass may use other tensors, or cast to a named dtype.
    """
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    if 8 * sum(tensor.numel() for tensor in weights.values()) > LARGEST_COPY:
        return None
    twin = shadow(model)
    copies: dict[int, Any] = {}  # by id, so that a weight shared by two modules stays shared
    for module in twin.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _is_narrow(parameter):
                if id(parameter) not in copies:
                    wide = nn.Parameter(_widened(parameter), requires_grad=False)
                    copies[id(parameter)] = with_attributes(wide, parameter)
                module._parameters[name] = copies[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and _is_narrow(buffer):
                if id(buffer) not in copies:
                    copies[id(buffer)] = _widened(buffer)
                module._buffers[name] = copies[id(buffer)]
    return twin


class InDouble(TorchFunctionMode):
    """A mode in which every operation of torch takes and gives float64, whatever the code says."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        if func in _NARROWING:
            func = Tensor.double
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) or type(result) in (tuple, list):
            return tree_map(_widened, result)
        return result


def _is_narrow(value: Any) -> bool:
    """Whether a value is a tensor of less than double precision."""
    return type(value) in PLAIN_TENSORS and value.dtype in _WIDER


def _widened(value: Any) -> Any:
    """A tensor in float64, or float64 in place of a narrower dtype; anything else as it is."""
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if _is_narrow(value):
        return value.to(_WIDER[value.dtype])
    return value
