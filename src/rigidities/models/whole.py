"""A plain copy of a model whose weights are spread over the processes of a job (FSDP)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, distributed, nn

from .shadow import unwrapped

_SPREAD = {"FSDPModule", "FullyShardedDataParallel"}


@torch.no_grad()
def whole(model: nn.Module) -> nn.Module:
    """A plain copy of a job's model, the same on all processes, which must all call it.

    Of `fully_shard` (FSDP2) weights are gathered. Buffers are the first process's, since each has
    its own running statistics of batch norms, in DDP too. The model itself stays as it was.
    """
    modules = list(unwrapped(model).modules())
    if any("FullyShardedDataParallel" in _names(module) for module in modules):
        raise TypeError(
            "This model is wrapped in FullyShardedDataParallel, expected fully_shard. Load its full "
            "state dict (torch.distributed.checkpoint.state_dict) into a model that is not wrapped."
        )
    for module in modules:
        if "FSDPModule" in _names(module):
            module.reshard()  # type: ignore[operator]  # so that no cast copies lie in its place
    memo: dict[int, Any] = {id(one): _gathered(one) for one in modules[0].parameters()}
    kinds = [kind.__mro__[2 * ("FSDPModule" in _names(m))] for m in modules for kind in [type(m)]]
    twins = [kind.__new__(kind) for kind in kinds]
    memo |= {id(module): twin for module, twin in zip(modules, twins, strict=True)}
    for module, twin in zip(modules, twins, strict=True):
        twin.__setstate__(copy.deepcopy(_own(module), memo))
    buffers = list(twins[0].buffers())
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(first := [[one.cpu() for one in buffers]])
        for own, one in zip(buffers, first[0], strict=True):
            own.copy_(one)
    return twins[0]


def require_whole(model: nn.Module) -> None:
    """Refuse a model whose weights are spread over processes."""
    spread = any(_names(module) & _SPREAD for module in model.modules())
    if spread or any(hasattr(one, "full_tensor") for one in model.parameters()):
        raise TypeError(
            "The weights of this model are spread over processes (FSDP), expected all of them on "
            "each. Pass rigidities.whole(model), called on every process."
        )


def _names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _gathered(weight: Any) -> nn.Parameter:
    full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return nn.Parameter(full.detach().clone(), weight.requires_grad)


def _own(module: nn.Module) -> dict[str, Any]:
    """What a module holds, less what torch.distributed has put there."""
    state = dict(module.__reduce_ex__(4)[2])  # type: ignore[arg-type]
    for name, value in list(state.items()):
        if name.startswith("__composable_api_state") or name == "_is_fsdp_managed_module":
            del state[name]
        elif name.endswith("_hooks") and value:
            hooks = ((key, hook) for key, hook in value.items() if not _distributed(hook))
            state[name] = type(value)(hooks)
    return state


def _distributed(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
