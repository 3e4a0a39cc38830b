"""A plain copy of a model that was trained in a job, where processes hold parts of it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import distributed, nn

from .shadow import unwrapped


@torch.no_grad()
def whole(model: nn.Module) -> nn.Module:
    """A plain copy of a job's model, the same on all processes, which must all call it.

    Weights spread by `fully_shard` (FSDP2) are gathered. Buffers are the first process's, since
    every process has its own running statistics of batch norms (in DDP too).
    """
    modules = list(unwrapped(model).modules())
    if not (sharded := [module for module in modules if hasattr(module, "reshard")]):
        require_whole(model)
    for module in sharded:
        module.reshard()  # type: ignore[operator]  # a forward pass leaves gathered, cast weights
    memo: dict[int, Any] = {id(one): _gathered(one) for one in modules[0].parameters()}
    for module in modules:
        kind: Any = type(module).__mro__[2 if module in sharded else 0]
        memo[id(module)] = kind.__new__(kind)
    for module in modules:
        memo[id(module)].__setstate__(copy.deepcopy(_own(module), memo))
    plain: nn.Module = memo[id(modules[0])]
    first = [[one.cpu() for one in plain.buffers()]]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(first)
    for own, one in zip(plain.buffers(), first[0], strict=True):
        own.copy_(one)
    return plain


def require_whole(model: nn.Module) -> None:
    """Refuse a model whose weights are spread over processes."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise TypeError(
            "The weights of this model are spread over processes, expected all of them on each. "
            "Pass rigidities.whole(model), called on every process; of FullyShardedDataParallel, "
            "a model that was not wrapped, with the full state dict."
        )


def _gathered(weight: Any) -> nn.Parameter:
    full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return nn.Parameter(full.clone(), weight.requires_grad)


def _own(module: Any) -> dict[str, Any]:
    """What a module holds, less what FSDP has put there."""
    marks = "__composable_api_state", "_is_fsdp_managed"
    state = {k: v for k, v in module.__reduce_ex__(4)[2].items() if not k.startswith(marks)}
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        kept = ((key, hook) for key, hook in state[name].items() if not _of_fsdp(hook))
        state[name] = OrderedDict(kept)
    return state


def _of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
