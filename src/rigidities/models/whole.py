"""A plain copy of a model that was trained in a job, where processes hold parts of it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import distributed, nn

from .shadow import independent, unwrapped


@torch.no_grad()
def whole(model: nn.Module) -> nn.Module:
    """A plain copy of a job's model, the same on all processes, which must all call it.

    Weights spread by `fully_shard` (FSDP2) are gathered. Buffers are the first process's, since
    every process has its own running statistics of batch norms (in DDP too).
    """
    inner = unwrapped(model)
    if any(map(_is_sharded, inner.modules())):
        plain = _gathered(list(inner.modules()))
    else:
        require_whole(inner)
        plain = independent(inner)
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


def _gathered(modules: list[nn.Module]) -> nn.Module:
    """A copy of the first module, of which the others are parts, which FSDP does not give."""
    for module in filter(_is_sharded, modules):
        module.reshard()  # type: ignore[operator]  # a forward pass leaves gathered, cast weights
    memo: dict[int, Any] = {}
    for weight in modules[0].parameters():
        full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        memo[id(weight)] = nn.Parameter(full.clone(), weight.requires_grad)
    for module in modules:
        kind: Any = type(module).__mro__[2 if _is_sharded(module) else 0]  # itself, FSDP's, its own
        memo[id(module)] = kind.__new__(kind)
    for module in modules:
        memo[id(module)].__setstate__(copy.deepcopy(_own(module), memo))
    plain: nn.Module = memo[id(modules[0])]
    return plain


def _is_sharded(module: nn.Module) -> bool:
    return type(module).__mro__[1].__name__ == "FSDPModule"


def _own(module: Any) -> dict[str, Any]:
    """What a module holds, less what FSDP has put there."""
    marks = "__composable_api_state", "_is_fsdp_managed"
    state = {k: v for k, v in module.__reduce_ex__(4)[2].items() if not k.startswith(marks)}
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        made = {key: getattr(hook, "__module__", None) or "" for key, hook in state[name].items()}
        fsdp = {key for key, where in made.items() if where.startswith("torch.distributed.")}
        state[name] = OrderedDict((k, hook) for k, hook in state[name].items() if k not in fsdp)
    return state
