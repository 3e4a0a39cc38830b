"""A structural copy of a model that shares its tensors.

The copy's modules are new objects, so that parts of it can be replaced and its eval mode set
without touching the user's model, its flags or its hooks; its parameters and buffers are the
model's own memory, so that it costs nothing and follows in-place changes of the weights. The
parameters are frozen aliases: a forward pass through the copy records no graph by itself.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def shadow(model: nn.Module) -> nn.Module:
    """A copy of the model in eval mode whose frozen parameters alias the model's memory.

    Raises:
        TypeError: the model cannot be copied (attributes that refuse).
        ValueError: it has no weights yet.
    """
    model = unwrapped(model)
    _check_weights(model)
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in _tensors(module):
            memo[id(value)] = _alias(value)
        # a compiled function has no state to copy, and refuses
        scripts = [v for v in vars(module).values() if isinstance(v, torch.jit.ScriptFunction)]
        memo.update({id(script): script for script in scripts})
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise TypeError(
            f"{type(model).__name__} cannot be copied ({error}). The copy shares all weights and "
            "is needed so that your model stays untouched: drop the attribute that refuses "
            "copy.deepcopy, or give it a __deepcopy__."
        ) from error
    if isinstance(model, torch.jit.ScriptModule):  # which knows no memo
        for mine, theirs in zip(_state(twin), _state(model), strict=True):
            mine.detach_().data = theirs.data
    return twin.eval()


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel or DistributedDataParallel wrappers."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = model.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and floating-point dtype of a model."""
    for tensor in _state(model):
        if tensor.is_floating_point():
            return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.get_default_dtype()


def input_names(model: nn.Module) -> list[str]:
    """What the model's `forward` calls its inputs, where it can tell (a traced one cannot)."""
    try:
        return list(inspect.signature(unwrapped(model).forward).parameters)
    except ValueError:
        return []


def signature(model: nn.Module) -> tuple[object, ...]:
    """What changes whenever a weight is written, moved or replaced; cheap, no arithmetic."""
    tensors = (part for tensor in _state(model) for part in plain_parts(tensor))
    return tuple((t.data_ptr(), t._version, t.device, t.dtype) for t in tensors)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensor itself, or those that one of another class holds, as quantised weights do."""
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


def _check_weights(model: nn.Module) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"{name!r} holds no values yet. Run a model with lazy layers once on a batch; move "
                "one on the meta device with to_empty(device=...); then train it or load weights."
            )


def _state(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _tensors(module: nn.Module) -> list[Tensor]:
    groups = (module._parameters, module._buffers, vars(module))
    return [value for group in groups for value in group.values() if isinstance(value, Tensor)]


def _alias(value: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach(), requires_grad=False)
    return value.detach()
