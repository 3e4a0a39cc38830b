"""A structural copy of a model that shares its tensors, and a watch over the original.

The modules of a `shadow` are new objects, so that some of them can be replaced and eval mode set
without touching the user's model, its flags or its hooks. Its parameters and buffers are the
model's own memory, so that it costs nothing and follows in-place changes of the weights. The
parameters are frozen aliases: a forward pass through the copy records no graph by itself.

A `Watch` notices what an alias does not follow: weights that are moved or replaced, and attributes
that are assigned.
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

from .mean_of import MeanOf

_PLAIN_TENSORS = (nn.Parameter, Tensor)
"""Torch's own classes of tensors. A tensor of another class may consist of several tensors."""

_CONSTANTS = (bool, int, float, str, type(None))
"""Types of attributes that cannot change inside, and need no copy."""

_COPYING_METHODS = {
    "__deepcopy__",
    "__copy__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__new__",
    "__slots__",
}
"""A class with one of these defines how it is copied."""

_COPIED_PLAINLY = {object, nn.Module, nn.MultiheadAttention, nn.TransformerEncoderLayer}
"""Classes of torch that define copying methods only to read old files."""

_SHORT = 64
"""A `Watch` looks into containers of at most this many entries."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

_version_and_dtype = attrgetter("_version", "dtype")


def shadow(model: nn.Module) -> nn.Module:
    """A copy of the model in eval mode whose frozen parameters alias the model's memory.

    Raises:
        ValueError: Some weights have no values yet.
        TypeError: The model cannot be copied.
    """
    model = unwrapped(model)
    _check_weights(model)
    memo: dict[int, object] = {}
    for module in model.modules():
        containers = [container.values() for container in _containers(module)]
        for value in chain(*containers, vars(module).values()):
            if isinstance(value, Tensor):
                memo[id(value)] = _alias(value)
            elif isinstance(value, torch.jit.ScriptFunction):
                memo[id(value)] = value  # it has no state, and refuses to be copied
            elif type(value) is OrderedDict and not value:
                # A module has ten empty dictionaries for hooks, which are slow to deep-copy.
                memo[id(value)] = OrderedDict()
    twin = _deep_copy(model, memo)
    for copied_module, module in zip(twin.modules(), model.modules(), strict=True):
        if isinstance(module, torch.jit.ScriptModule):
            # TorchScript copies its tensors without looking into the memo.
            for copied, tensor in zip(_state(copied_module), _state(module), strict=True):
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


def placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and floating-point dtype of a model."""
    for tensor in _state(model):
        if tensor.is_floating_point():
            return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.get_default_dtype()


def held_names(model: nn.Module, set_by_passes: Collection[str] = ()) -> list[str]:
    """Names of the parameters and buffers that a state dict of the model holds now.

    Args:
        model: The model.
        set_by_passes: Attributes to leave out because a pass of the model sets them; see
            `Watch.renewed`.
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
    if type(tensor) in _PLAIN_TENSORS or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    plain: list[Tensor] = []
    for name in names:
        plain += plain_parts(getattr(tensor, name))
    return plain


# --- copying ------------------------------------------------------------------------------------


def _alias(tensor: Tensor) -> Tensor:
    """A frozen tensor in the same memory, with the same attributes."""
    alias = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        alias = nn.Parameter(alias, requires_grad=False)
    if type(tensor) in _PLAIN_TENSORS:
        with_attributes(alias, tensor)
    return alias


def _deep_copy(model: nn.Module, memo: dict[int, object]) -> nn.Module:
    """A deep copy in which nothing is compiled.

    Args:
        model: What to copy.
        memo: Replacements in the copy for some objects, by the `id` of the object.

    Raises:
        TypeError: Something in the model refuses to be copied.
    """
    modules = list(model.modules())
    with _ComputedTensorsCopied():
        try:
            _copy_plain_modules(modules, memo)
            twin = copy.deepcopy(model, memo)
            for copied, module in zip(twin.modules(), modules, strict=True):
                _uncompile(copied, module, memo)
        except Exception as error:
            raise TypeError(
                f"{type(model).__name__} cannot be copied: {_refusing_attribute(model, memo)} "
                f"does not support copy.deepcopy ({error}). A copy is needed so that your model "
                "stays unchanged. Set that attribute to None, or give it a __deepcopy__."
            ) from error
    return twin


def _copy_plain_modules(modules: list[nn.Module], memo: dict[int, object]) -> None:
    """Put copies of modules into `memo`, which is faster than deep-copying them.

    If one of them defines how it is copied, nothing is done here: its method might look into the
    copy of another module before that is complete.
    """
    if not all(_is_copied_plainly(type(module)) for module in modules):
        return
    twins: list[nn.Module] = [type(module).__new__(type(module)) for module in modules]
    for module, twin in zip(modules, twins, strict=True):
        memo[id(module)] = twin
    for module, twin in zip(modules, twins, strict=True):
        for name, value in vars(module).items():
            constant = type(value) in _CONSTANTS
            vars(twin)[name] = value if constant else copy.deepcopy(value, memo)


def _is_copied_plainly(kind: type[nn.Module]) -> bool:
    """Whether a class of modules is copied by copying its attributes."""
    if issubclass(kind, torch.jit.ScriptModule):
        return False
    for base in kind.__mro__:
        if base not in _COPIED_PLAINLY and vars(base).keys() & _COPYING_METHODS:
            return False
    return True


def _uncompile(copied: nn.Module, module: nn.Module, memo: dict[int, object]) -> None:
    """Make a copy run its own code where `torch.compile` was applied to the original.

    `module.compile()` and `torch.compile(module.method)` leave a function in an attribute. The copy
    has this function too, and it would still call the original.
    """
    vars(copied).pop("_compiled_call_impl", None)
    for name, value in list(vars(module).items()):
        plain: Any = value
        while isinstance(plain, FunctionType) and _is_compiled(plain):
            attributes = vars(plain)
            plain = attributes.get("_torchdynamo_orig_callable") or attributes["__wrapped__"]
        if plain is not value and name in vars(copied):
            # With the memo, a method of the original becomes a method of the copy.
            vars(copied)[name] = copy.deepcopy(plain, memo)


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


def _check_weights(model: nn.Module) -> None:
    """Refuse weights without values: those of lazy layers, or on the meta device."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"{name!r} has no values yet. Run a model with lazy layers once on a batch, or "
                "move a model from the meta device with to_empty(device=...); then train it or "
                "load weights."
            )


def _state(model: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers."""
    return chain(model.parameters(), model.buffers())


def _containers(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """The dictionaries in which a module keeps its weights, its children and its hooks."""
    return (
        module._parameters,
        module._buffers,
        module._modules,
        module._forward_hooks,
        module._forward_pre_hooks,
    )


# --- watching -----------------------------------------------------------------------------------


class Watch:
    """Notices when weights are written, moved or replaced, and when attributes are assigned.

    It is cheap: it compares identities and versions, without arithmetic. Hooks and the entries of
    short containers are watched too. Writes through `.data` or NumPy, and changes inside other
    objects, go unnoticed.

    Args:
        model: The model whose modules are watched. They are numbered in the order of `modules()`.
        ignored: A class of modules that temporarily wrap others in the model: they are neither
            watched nor numbered.

    Attributes:
        placement: Device and dtype of the model, valid as long as `same` returns True.
    """

    def __init__(self, model: nn.Module, ignored: type[nn.Module] | tuple[()] = ()) -> None:
        self.placement = placement(model)
        # Everything is kept by reference: an `id` may be reused once its object is gone.
        self._modules = tuple(
            module for module in unwrapped(model).modules() if not isinstance(module, ignored)
        )
        self._watch_containers()
        self._watch_attributes()
        self._watch_tensors()
        self._first_look = self._look()

    def _watch_containers(self) -> None:
        """Remember the modules' weights, children and hooks."""
        containers: list[dict[Any, Any]] = []
        for module in self._modules:
            containers += _containers(module)
        self._empty = [container for container in containers if not len(container)]
        # Views of what the containers hold, now and later.
        self._live: list[Collection[object]] = [
            container.values() for container in containers if len(container)
        ]
        self._members = list(chain.from_iterable(self._live))
        self._weights = [member for member in self._members if isinstance(member, Tensor)]

    def _watch_attributes(self) -> None:
        """Remember all other attributes, and what short containers among them hold."""
        self._dictionaries = [vars(module) for module in self._modules]
        # The dictionary and the name of each attribute, side by side for `_look`.
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        # The values by path: "0.name" for an attribute of module 0, "0.name[key]" for an entry of
        # a short container there.
        self._values: dict[str, Any] = {}
        for number, attributes in enumerate(self._dictionaries):
            for name, value in attributes.items():
                if name not in _MODULE_ATTRIBUTES:
                    self._owners.append(attributes)
                    self._names.append(name)
                    self._values[f"{number}.{name}"] = value
        for path, value in list(self._values.items()):
            # Empty containers too, since they may be filled later.
            if isinstance(value, (dict, list, tuple)) and len(value) <= _SHORT:
                self._live.append(value.values() if isinstance(value, dict) else value)
                entries = value.items() if isinstance(value, dict) else enumerate(value)
                for key, entry in entries:
                    self._values[f"{path}[{key!r}]"] = entry
        # Buffers are weights, which `_look` sees already. Some are set by every pass all the same.
        for number, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                self._values[f"{number}.{name}"] = buffer

    def _watch_tensors(self) -> None:
        """Remember the versions of weights, and of tensors that are plain attributes."""
        attributes = {path: v for path, v in self._values.items() if isinstance(v, Tensor)}
        tensors = {id(tensor): tensor for tensor in (*self._weights, *attributes.values())}
        # Inference tensors have no version, and tensors of other classes consist of several.
        self._plain: list[Tensor] = []
        self._others: list[Tensor] = []
        for tensor in tensors.values():
            if type(tensor) in _PLAIN_TENSORS and not tensor.is_inference():
                self._plain.append(tensor)
            else:
                self._others.append(tensor)
        self._weight_versions = [_version(tensor) for tensor in self._weights]
        self._attribute_versions = {path: _version(t) for path, t in attributes.items()}

    def same(self) -> bool:
        """Whether nothing has changed since the watch began."""
        return not any(self._empty) and self._first_look == self._look()

    def written(self, later: Watch) -> bool:
        """Whether weights, modules or hooks differ from those of a later watch."""
        if self._weight_versions != later._weight_versions:
            return True
        return list(map(id, self._members)) != list(map(id, later._members))

    def renewed(self, later: Watch) -> set[str]:
        """Attributes and buffers that were assigned or written to before a later watch.

        Returns:
            Their names with the number of the module, such as "0.name".
        """
        absent = self  # a watch is never an attribute of a module
        names = set()
        for name in self._values.keys() | later._values.keys():
            before = self._values.get(name, absent)
            after = later._values.get(name, absent)
            if not _is_unchanged(before, after):
                names.add(name)
        for name, version in self._attribute_versions.items():
            if later._attribute_versions.get(name, version) != version:
                names.add(name)
        return names

    def _look(self) -> tuple[list[object], ...]:
        """Flat lists that differ after any change.

        They are made for every call of the model, and therefore without a loop in Python.
        """
        attributes = map(dict.get, self._owners, self._names, repeat(self))
        return (
            list(map(len, self._dictionaries)),
            list(map(id, chain(chain.from_iterable(self._live), attributes))),
            list(map(Tensor.data_ptr, self._plain)),
            list(map(_version_and_dtype, self._plain)),
            list(map(_version, self._others)),
        )


def _version(tensor: Tensor) -> tuple[object, ...]:
    """What changes when a tensor is written, moved or cast: address, version and dtype."""
    if type(tensor) not in _PLAIN_TENSORS:
        inner_tensors = plain_parts(tensor)
        if inner_tensors != [tensor]:
            return tuple(map(_version, inner_tensors))
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype


def _is_unchanged(before: object, after: object) -> bool:
    """Whether two values of an attribute are the same object, or equal constants."""
    if before is after:
        return True
    return type(before) is type(after) and type(before) in _CONSTANTS and before == after
