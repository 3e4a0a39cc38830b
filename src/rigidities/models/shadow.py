"""A structural copy of a model that shares its tensors.

The modules of a `shadow` are new objects, so that some of them can be replaced and eval mode set
without touching the user's model, its flags or its hooks. Its parameters and buffers are the
model's own memory, so that it costs nothing and follows in-place changes of the weights. The
parameters are frozen aliases: a forward pass through the copy records no graph by itself. What an
alias does not follow (weights that are moved or replaced, attributes) a `changes.Watch` notices.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Collection
from itertools import chain
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .mean_of import MeanOf

PLAIN_TENSORS = (nn.Parameter, Tensor)
"""Torch's own classes of tensors. A tensor of another class may consist of several tensors."""

_CONTAINERS = frozenset((OrderedDict, dict, set, list))
_CONSTANTS = frozenset((bool, int, float, str, type(None)))

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has; all others are the model's own."""

containers = attrgetter(
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"
)
"""The dictionaries in which a module keeps its weights, its children and its hooks."""


def shadow(model: nn.Module) -> nn.Module:
    """A copy of the model in eval mode whose frozen parameters alias the model's memory.

    Raises:
        ValueError: Some weights have no values yet.
        TypeError: The model cannot be copied.
    """
    model = unwrapped(model)
    memo: dict[int, object] = {}
    for module in model.modules():
        members = [container.values() for container in containers(module)]
        for value in chain(*members, vars(module).values()):
            kind = type(value)
            if kind in _CONSTANTS:
                continue
            if kind in _CONTAINERS:
                if not value:
                    # A module has a dozen of these, mostly for hooks, which are slow to deep-copy.
                    memo[id(value)] = kind()
            elif isinstance(value, Tensor):
                if is_lazy(value) or value.is_meta:
                    _refuse_without_values(model, value)
                alias = value.detach()
                if isinstance(value, nn.Parameter):
                    alias = nn.Parameter(alias, requires_grad=False)
                if kind in PLAIN_TENSORS:
                    vars(alias).update(vars(value))
                memo[id(value)] = alias
            elif isinstance(value, torch.jit.ScriptFunction):
                memo[id(value)] = value  # it has no state, and refuses to be copied
    twin = _deep_copy(model, memo)
    for copied_module, module in zip(twin.modules(), model.modules(), strict=True):
        if isinstance(module, torch.jit.ScriptModule):
            # TorchScript copies its tensors without looking into the memo.
            tensors = chain(module.parameters(), module.buffers())
            copies = chain(copied_module.parameters(), copied_module.buffers())
            for copied, tensor in zip(copies, tensors, strict=True):
                copied.detach_().data = tensor.data
    return twin.eval()


def independent(model: nn.Module) -> nn.Module:
    """A copy of the model with its own memory, in which nothing is compiled.

    In contrast to `copy.deepcopy`, its parameters keep the attributes that users or libraries gave
    them, and tensors that were computed from others are copied too.
    """
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            clone = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            memo[id(parameter)] = with_attributes(clone, parameter)
    return _deep_copy(model, memo)


def with_attributes(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with the Python attributes of another; libraries such as mup set some."""
    vars(tensor).update(vars(like))
    return tensor


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers: torch.compile, (Distributed)DataParallel, Lightning's Fabric."""
    inner: Any
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = model.module
    elif type(model).__name__ == "_FabricModule":
        inner = getattr(model, "_forward_module", None)
    else:
        inner = getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def require_whole(model: nn.Module) -> None:
    """Refuse a model whose weights are spread over processes."""
    for module in model.modules():
        class_names = {base.__name__ for base in type(module).__mro__}
        if class_names & {"FSDPModule", "FullyShardedDataParallel"}:
            raise TypeError(
                "The weights of this model are spread over processes, expected all weights on "
                "each process. On every process, load the full state dict of torch's "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) into "
                "a model that is not sharded, and pass that one."
            )


def placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and floating-point dtype of a model."""
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.get_default_dtype()


def held_names(model: nn.Module, set_by_passes: Collection[str] = ()) -> list[str]:
    """Names of the parameters and buffers that a state dict of the model holds now.

    Args:
        model: The model.
        set_by_passes: Attributes to leave out because a pass of the model sets them; see
            `changes.renewed`.
    """
    model = unwrapped(model)
    names = [name for name, _ in model.named_parameters()]
    for number, (path, module) in enumerate(model.named_modules()):
        for name, buffer in module._buffers.items():
            is_saved = buffer is not None and name not in module._non_persistent_buffers_set
            if is_saved and f"{number}.{name}" not in set_by_passes:
                names.append(f"{path}.{name}" if path else name)
    return names


def input_names(model: nn.Module) -> list[str]:
    """Names of the inputs of a model's `forward`; empty where it has no signature (traced)."""
    model = unwrapped(model)
    if isinstance(model, MeanOf):  # it passes its inputs on
        model = model.models[0]
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except ValueError:
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensor itself, or the tensors that one of another class (a quantised one) consists of."""
    if type(tensor) in PLAIN_TENSORS or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    plain: list[Tensor] = []
    for name in names:
        plain += plain_parts(getattr(tensor, name))
    return plain


# --- copying ------------------------------------------------------------------------------------


def _deep_copy(model: nn.Module, memo: dict[int, object]) -> nn.Module:
    """A deep copy in which nothing is compiled.

    Args:
        model: What to copy.
        memo: Replacements in the copy for some objects, by the `id` of the object.

    Raises:
        TypeError: Something in the model refuses to be copied.
    """
    with _ComputedTensorsCopied():
        try:
            twin = copy.deepcopy(model, memo)
            _uncompile(list(twin.modules()), list(model.modules()), memo)
        except RecursionError:
            raise RecursionError(
                f"The modules of {type(model).__name__} are nested too deeply for copy.deepcopy. A "
                "copy is needed so that your model stays unchanged. Raise Python's limit first: "
                "sys.setrecursionlimit(10_000)."
            ) from None
        except Exception as error:
            raise TypeError(
                f"{type(model).__name__} cannot be copied: {_refusing_attribute(model, memo)} "
                f"does not support copy.deepcopy ({error}). A copy is needed so that your model "
                "stays unchanged. Set that attribute to None, or give it a __deepcopy__."
            ) from error
    return twin


def _uncompile(twins: list[nn.Module], modules: list[nn.Module], memo: dict[int, object]) -> None:
    """Make copies run their own code where `torch.compile` was applied to the originals.

    `module.compile()` and `torch.compile(module.method)` leave a function in an attribute. The copy
    has this function too, and it would still call the original.
    """
    for twin, module in zip(twins, modules, strict=True):
        vars(twin).pop("_compiled_call_impl", None)
        for name, value in list(vars(module).items()):
            plain: Any = value
            while isinstance(plain, FunctionType) and _is_compiled(plain):
                attributes = vars(plain)
                plain = attributes.get("_torchdynamo_orig_callable") or attributes["__wrapped__"]
            if plain is not value and name in vars(twin):
                # With the memo, a method of the original becomes a method of the copy.
                vars(twin)[name] = copy.deepcopy(plain, memo)


def _is_compiled(function: FunctionType) -> bool:
    """Whether a function was made by `torch.compile` around another."""
    module_name = str(function.__globals__.get("__name__"))
    if not module_name.startswith("torch._dynamo."):
        return False
    return bool({"_torchdynamo_orig_callable", "__wrapped__"} & vars(function).keys())


class _ComputedTensorsCopied(TorchFunctionMode):
    """A mode in which `copy.deepcopy` also copies tensors with a graph, by their values.

    Without the mode, deepcopy refuses them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _refusing_attribute(model: nn.Module, memo: dict[int, object]) -> str:
    """The first attribute of the model that refuses to be copied, for the message."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue  # submodules are visited by themselves
            entries = {"": value}
            if isinstance(value, dict):
                entries = {f"[{key!r}]": entry for key, entry in value.items()}
            elif isinstance(value, (list, tuple)):
                entries = {f"[{i}]": entry for i, entry in enumerate(value)}
            for place, entry in entries.items():
                if not _can_be_copied(entry, memo):
                    where = f"{path}.{name}" if path else name
                    return f"its attribute {where + place!r} (a {type(entry).__name__})"
    return "one of its parts"


def _can_be_copied(value: object, memo: dict[int, object]) -> bool:
    """Whether `copy.deepcopy` copies a value."""
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _refuse_without_values(model: nn.Module, tensor: Tensor) -> None:
    """Refuse a weight without values, of a lazy layer or on the meta device, by its name."""
    for name, weight in chain(model.named_parameters(), model.named_buffers()):
        if weight is tensor:
            raise ValueError(
                f"{name!r} has no values yet. Run a model with lazy layers once on a batch, or "
                "move a model from the meta device with to_empty(device=...); then train it or "
                "load weights."
            )
