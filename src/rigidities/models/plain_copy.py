"""A plain copy of a model whose weights are spread over the processes of a job.

Callbacks of trainers need it: they are handed the trained model, and cannot build another one to
load its weights into, as a user can with torch's `get_model_state_dict`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import distributed, nn

from .shadow import independent, require_whole, unwrapped

__all__ = ["plain_copy"]


@torch.no_grad()
def plain_copy(model: nn.Module) -> nn.Module:
    """A plain copy of a distributed model; all processes must call this and get the same copy.

    Weights sharded by `fully_shard` (FSDP2) are gathered. Buffers are those of the first process,
    since every process has its own running statistics of batch norms (in DDP too).

    Raises:
        TypeError: The weights are sharded in another way.
    """
    inner = unwrapped(model)
    if any(_is_sharded(module) for module in inner.modules()):
        plain = _gathered(list(inner.modules()))
    else:
        require_whole(inner)
        plain = independent(inner)
    # A list of one entry, which broadcasting replaces by that of the first process.
    buffers = [[buffer.cpu() for buffer in plain.buffers()]]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(buffers)
    for buffer, first_buffer in zip(plain.buffers(), buffers[0], strict=True):
        buffer.copy_(first_buffer)
    return plain


def _gathered(modules: list[nn.Module]) -> nn.Module:
    """A copy of a model that FSDP has sharded, with whole weights and without FSDP's classes.

    Args:
        modules: The model, then all modules inside it.
    """
    for module in modules:
        if _is_sharded(module):
            # After a forward pass the weights may be gathered, and cast to another precision.
            module.reshard()  # type: ignore[operator]
    memo: dict[int, Any] = {}
    for weight in modules[0].parameters():
        full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        memo[id(weight)] = nn.Parameter(full.clone(), weight.requires_grad)
    for module in modules:
        # FSDP makes a class that derives from FSDPModule and the module's own class, which is the
        # third in the method resolution order.
        kind: Any = type(module).__mro__[2] if _is_sharded(module) else type(module)
        memo[id(module)] = kind.__new__(kind)
    for module in modules:
        memo[id(module)].__setstate__(copy.deepcopy(_state_without_fsdp(module), memo))
    plain: nn.Module = memo[id(modules[0])]
    return plain


def _is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module."""
    return type(module).__mro__[1].__name__ == "FSDPModule"


def _state_without_fsdp(module: Any) -> dict[str, Any]:
    """The attributes of a module, without those and the hooks that FSDP has added."""
    fsdp_names = ("__composable_api_state", "_is_fsdp_managed")
    attributes = module.__reduce_ex__(4)[2]
    state = {name: v for name, v in attributes.items() if not name.startswith(fsdp_names)}
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = OrderedDict()
        for key, hook in state[name].items():
            origin = getattr(hook, "__module__", None) or ""
            if not origin.startswith("torch.distributed."):
                hooks[key] = hook
        state[name] = hooks
    return state
