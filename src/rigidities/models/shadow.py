"""A structural copy of a model that shares its tensors.

The copy's modules are new objects, so that parts of it can be replaced and its eval mode set
without touching the user's model, its flags or its hooks; its parameters and buffers are the
model's own memory, so that it costs nothing and follows in-place changes of the weights. The
parameters are frozen aliases: a forward pass through the copy records no graph by itself.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain, repeat
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .keras_model import KerasModel, is_keras
from .mean_of import MeanOf


def shadow(model: nn.Module) -> nn.Module:
    """A copy of the model in eval mode whose frozen parameters alias the model's memory."""
    model = unwrapped(model)
    _check_weights(model)
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in chain(*(g.values() for g in _groups(module)), vars(module).values()):
            if isinstance(value, Tensor):
                memo[id(value)] = _alias(value)
            elif isinstance(value, torch.jit.ScriptFunction):
                memo[id(value)] = value  # it has no state to copy, and refuses
            elif type(value) is OrderedDict and not value:
                memo[id(value)] = OrderedDict()  # of hooks, ten in a module: slow to deep-copy
    twin = _copied(model, memo)
    for copied, module in zip(twin.modules(), model.modules(), strict=True):
        if isinstance(module, torch.jit.ScriptModule):  # which knows no memo
            for mine, theirs in zip(_state(copied), _state(module), strict=True):
                mine.detach_().data = theirs.data
    return twin.eval()


def independent(model: nn.Module) -> nn.Module:
    """A copy of the model with memory of its own, nothing of it compiled.

    Unlike that of `copy.deepcopy` its parameters keep the attributes that somebody gave them, and
    tensors that were computed from others are copied too.
    """
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            memo[id(parameter)] = with_attributes(own, parameter)
    return _copied(model, memo)


def with_attributes(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with the attributes of another, as libraries such as mup hang on parameters."""
    vars(tensor).update(vars(like))
    return tensor


def _alias(tensor: Tensor) -> Tensor:
    alias = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        alias = nn.Parameter(alias, requires_grad=False)
    if type(tensor) in _KNOWN:
        with_attributes(alias, tensor)
    return alias


def _copied(model: nn.Module, memo: dict[int, object]) -> nn.Module:
    """A deep copy with what `memo` holds in place of its originals, nothing of it compiled."""
    modules = list(model.modules())
    with _ComputedTensors():
        try:
            _copy_plain(modules, memo)
            twin = copy.deepcopy(model, memo)
            for copied, module in zip(twin.modules(), modules, strict=True):
                _uncompile(copied, module, memo)
        except Exception as error:
            raise TypeError(
                f"{type(model).__name__} cannot be copied: {_uncopied(model, memo)} refuses "
                f"copy.deepcopy ({error}). A copy is needed so that your model stays untouched: "
                "set that attribute to None, or give it a __deepcopy__."
            ) from error
    return twin


def _uncompile(copied: nn.Module, module: nn.Module, memo: dict[int, object]) -> None:
    """Let a copy run its own code, where `torch.compile` made something of the original's.

    What `module.compile()` and `torch.compile(module.method)` leave in an attribute is a function
    that a copy holds too, and that still calls the original.
    """
    vars(copied).pop("_compiled_call_impl", None)
    for name, value in list(vars(module).items()):
        plain: Any = value
        while isinstance(plain, FunctionType) and _is_dynamo(plain):
            held = vars(plain)
            plain = held.get("_torchdynamo_orig_callable") or held["__wrapped__"]
        if plain is not value and name in vars(copied):
            vars(copied)[name] = copy.deepcopy(plain, memo)  # a method is bound to the copy


def _is_dynamo(function: FunctionType) -> bool:
    """Whether a function was made by `torch.compile` around another."""
    made = str(function.__globals__.get("__name__")).startswith("torch._dynamo.")
    return made and bool({"_torchdynamo_orig_callable", "__wrapped__"} & vars(function).keys())


class _ComputedTensors(TorchFunctionMode):
    """Where `copy.deepcopy` copies tensors with a graph too, which it refuses, by their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _uncopied(model: nn.Module, memo: dict[int, object]) -> str:
    """The first attribute of the model that refuses to be copied, for the message."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue  # modules have attributes of their own
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
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _copy_plain(modules: list[nn.Module], memo: dict[int, object]) -> None:
    """Copies of modules, none of which says how to copy it, into `memo`: faster than deep."""
    if not all(_says_nothing(type(module)) for module in modules):
        return  # which might look into a copy that is not there yet
    twins: list[nn.Module] = [type(module).__new__(type(module)) for module in modules]
    memo |= {id(module): twin for module, twin in zip(modules, twins, strict=True)}
    for module, twin in zip(modules, twins, strict=True):
        for name, value in vars(module).items():
            vars(twin)[name] = value if type(value) in _FIXED else copy.deepcopy(value, memo)


def _says_nothing(kind: type[nn.Module]) -> bool:
    if issubclass(kind, torch.jit.ScriptModule):
        return False
    return not any(vars(base).keys() & _COPYING for base in kind.__mro__ if base not in _TRUSTED)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers: torch.compile, (Distributed)DataParallel, Lightning's Fabric.

    Of a Keras model, the same in torch's own modules.
    """
    if is_keras(model):
        return KerasModel.of(model)
    fabric = type(model).__name__ == "_FabricModule"
    inner = getattr(model, "_forward_module" if fabric else "_orig_mod", None)
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
    model = unwrapped(model)
    model = model.models[0] if isinstance(model, MeanOf) else model  # which passes inputs on
    try:
        known = inspect.signature(model.forward).parameters.values()
    except ValueError:
        return []
    return [one.name for one in known if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


class Watch:
    """Notices that weights are written, moved or replaced, and that attributes are set anew.

    Cheap: identities and versions, no arithmetic. Hooks and the entries of short containers count.
    Writes through `.data` or NumPy, and changes inside other objects, leave no trace.

    Args:
        model: whose modules are looked at, and numbered as they come.
        passing: a class of modules to pass over, which stand around others of the model for a
            while: the model is numbered as it is without them.
    """

    def __init__(self, model: nn.Module, passing: type[nn.Module] | tuple[()] = ()) -> None:
        self.placement = placement(model)  # as long as it is the same
        every = unwrapped(model).modules()
        self._modules = tuple(module for module in every if not isinstance(module, passing))
        # kept, since an identity may be given again once its object is gone
        groups = [group for module in self._modules for group in _groups(module)]
        self._empty = [group for group in groups if not len(group)]
        self._live: list[Collection[object]] = [group.values() for group in groups if len(group)]
        self._parts = list(chain.from_iterable(self._live))
        self._weights = [part for part in self._parts if isinstance(part, Tensor)]
        self._attributes = [vars(module) for module in self._modules]
        held = [(i, n) for i, d in enumerate(self._attributes) for n in d if n not in _OWN]
        self._owners, self._names = [self._attributes[i] for i, _ in held], [n for _, n in held]
        self._held = {f"{i}.{name}": self._attributes[i][name] for i, name in held}
        for name, value in list(self._held.items()):
            if isinstance(value, (dict, list, tuple)) and len(value) <= _FEW:  # empty ones too
                self._live.append(value.values() if isinstance(value, dict) else value)
                entries = value.items() if isinstance(value, dict) else enumerate(value)
                self._held |= {f"{name}[{k!r}]": entry for k, entry in entries}
        self._plain = {name: v for name, v in self._held.items() if isinstance(v, Tensor)}
        tensors = [*self._weights, *self._plain.values()]
        self._odd = [t for t in tensors if type(t) not in _KNOWN or t.is_inference()]
        self._known = [t for t in tensors if type(t) in _KNOWN and not t.is_inference()]
        plain = {name: _version(tensor) for name, tensor in self._plain.items()}
        self._versions = [_version(tensor) for tensor in self._weights], plain
        self._looks = self._look()

    def same(self) -> bool:
        """Whether nothing has happened."""
        return not any(self._empty) and self._looks == self._look()

    def written(self, now: Watch) -> bool:
        """Whether a later look sees other weights, parts or hooks."""
        parts = [list(map(id, watch._parts)) for watch in (self, now)]
        return self._versions[0] != now._versions[0] or parts[0] != parts[1]

    def renewed(self, now: Watch) -> set[str]:
        """Attributes that a later look finds set or written to, as "number of the module.name"."""
        mine, theirs, versions = self._held, now._held, now._versions[1]
        every = mine.keys() | theirs.keys()
        names = {name for name in every if not _alike(mine.get(name, self), theirs.get(name, self))}
        return names | {n for n, own in self._versions[1].items() if versions.get(n, own) != own}

    def _look(self) -> tuple[list[object], ...]:
        """Flat lists that tell any change, made without a loop in Python: it is for every call."""
        held = map(dict.get, self._owners, self._names, repeat(self))
        return (
            list(map(len, self._attributes)),
            list(map(id, chain(chain.from_iterable(self._live), held))),
            list(map(Tensor.data_ptr, self._known)),
            list(map(_written, self._known)),
            list(map(_version, self._odd)),
        )


_OWN = frozenset(vars(nn.Module()))
_FEW = 64
_FIXED = (bool, int, float, str, type(None))
_COPYING = {"__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__"}
_COPYING |= {"__setstate__", "__new__", "__slots__"}
_TRUSTED = {object, nn.Module, nn.MultiheadAttention, nn.TransformerEncoderLayer}
"""Whose own ways to be copied are for old files."""
_KNOWN = (nn.Parameter, Tensor)
_written = attrgetter("_version", "dtype")


def _groups(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    own: tuple[dict[Any, Any], ...] = (module._parameters, module._buffers, module._modules)
    return (*own, module._forward_hooks, module._forward_pre_hooks)


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


def _version(tensor: Tensor) -> tuple[object, ...]:
    if type(tensor) not in _KNOWN and (parts := plain_parts(tensor)) != [tensor]:
        return tuple(map(_version, parts))
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, tensor.dtype


def _alike(mine: object, theirs: object) -> bool:
    return mine is theirs or (type(mine) is type(theirs) in _FIXED and mine == theirs)
