"""Parameters that a model uses but does not register: in a plain list, in a function's closure.

Neither `model.parameters()` nor `model.modules()` knows them, so no readout can be made of them,
and the layer before them must not be taken in their place. `Unregistered` looks for them in the
attributes of a model; after a pass it refuses those that the graph shows between the heads and the
output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..models.changes import CONSTANTS
from ..models.shadow import MODULE_ATTRIBUTES

_DEPTH = 4
"""How many containers within one another are looked into."""
_ENTRIES = 1000
"""How many entries of one container are looked at."""

NamedTensor = tuple[str, Tensor]
"""What a message calls a tensor, and the tensor."""


class Unregistered:
    """The unregistered parameters of a model, as they are met in a pass of its shadow.

    Args:
        model: The user's model.
        model_shadow: A shadow of it.
    """

    def __init__(self, model: nn.Module, model_shadow: nn.Module) -> None:
        self._model = model
        self._ids_of_registered = {id(parameter) for parameter in model_shadow.parameters()}
        # By id. The tensors are kept too, since an id may be given again once its object is gone.
        self._by_id: dict[int, NamedTensor] = {}
        for (path, copied), original in zip(
            model_shadow.named_modules(), model.modules(), strict=True
        ):
            for name, value in vars(copied).items():
                if name in MODULE_ATTRIBUTES or type(value) in CONSTANTS:
                    continue
                original_value = vars(original).get(name)
                if _is_trainable_leaf(original_value):
                    value.requires_grad_()  # a shadow has a frozen alias
                self._add(value, f"{path}.{name}" if path else name)

    def shown(self) -> AbstractContextManager[object]:
        """A context in which a pass leaves all of them in its graph, frozen ones too."""
        frozen = {i for i, (_, tensor) in self._by_id.items() if not tensor.requires_grad}
        if not frozen:
            return nullcontext()
        return _Shown(frozen, self._by_id)

    def refuse(self, leaves: Iterable[Tensor]) -> None:
        """Refuse those among the leaves of a graph between the heads and the output.

        Raises:
            ValueError: There are some.
        """
        unregistered = [leaf for leaf in leaves if self._is_unregistered(leaf)]
        if not unregistered:
            return
        names_in_model = {id(tensor): name for name, tensor in self._model.named_parameters()}
        if all(id(leaf) in names_in_model for leaf in unregistered):
            name = names_in_model[id(unregistered[0])]
            raise ValueError(
                f"The forward pass reaches {name!r} through a function that keeps the original "
                "model, not the copy that is run. Use the model that is passed to forward=, and "
                "methods of the model instead of lambdas in its attributes."
            )
        names = list(dict.fromkeys(self._described(leaf) for leaf in unregistered))
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        raise ValueError(
            "The output depends on parameters that the model does not register: "
            f"{', '.join(names[:3])}{more}. They act beside or after the last layer that was "
            "found, so that layer may not be the whole readout. Make their module an attribute of "
            "the model (or an entry of an nn.ModuleList), not an entry of a plain list or a "
            "variable of a lambda; or name the layer= to use alone, or pass features=."
        )

    def _add(self, value: Any, place: str) -> None:
        """Add what is inside an attribute's value."""
        for name, tensor in _tensors_inside(value, place, _DEPTH):
            if id(tensor) not in self._ids_of_registered:
                self._by_id.setdefault(id(tensor), (name, tensor))

    def _is_unregistered(self, leaf: Tensor) -> bool:
        if id(leaf) in self._ids_of_registered:
            return False
        return id(leaf) in self._by_id or isinstance(leaf, nn.Parameter)

    def _described(self, leaf: Tensor) -> str:
        """What messages call a leaf: its name, if known, and its shape."""
        shape = tuple(leaf.shape)
        if id(leaf) not in self._by_id:
            return f"one of shape {shape}"
        name, _ = self._by_id[id(leaf)]
        return f"{name} {shape}"


class _Shown(TorchFunctionMode):
    """Puts leaves of the graph in the place of frozen tensors, in every operation.

    Args:
        frozen: Ids of the tensors.
        by_id: All unregistered tensors; the leaves are added under the names of what they replace.
    """

    def __init__(self, frozen: set[int], by_id: dict[int, NamedTensor]) -> None:
        super().__init__()
        self._leaves: dict[int, Tensor] = {}
        for i in frozen:
            name, tensor = by_id[i]
            leaf = tensor.detach().requires_grad_()
            self._leaves[i] = leaf
            by_id[id(leaf)] = (name, leaf)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: self._leaves.get(id(tensor), tensor), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _is_trainable_leaf(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf


def _tensors_inside(value: Any, place: str, depth: int) -> Iterator[NamedTensor]:
    """Parameters and trainable tensors inside an attribute, with what a message calls them.

    Args:
        value: The value of the attribute, or an entry of it.
        place: What a message calls it.
        depth: How many containers within one another to look into.
    """
    if isinstance(value, nn.Parameter):
        yield place, value
    elif isinstance(value, torch.jit.ScriptModule) or not depth:
        return
    elif isinstance(value, Tensor):
        if _is_trainable_leaf(value):
            yield place, value
    elif isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            yield f"{place}.{name}", parameter
    else:
        for name, entry in _entries(value, place):
            yield from _tensors_inside(entry, name, depth - 1)


def _entries(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """What a container holds or a function closes over, with what a message calls it."""
    if isinstance(value, dict):
        for key, entry in islice(value.items(), _ENTRIES):
            yield f"{place}[{key!r}]", entry
    elif isinstance(value, (list, tuple)):
        for i, entry in enumerate(value[:_ENTRIES]):
            yield f"{place}[{i}]", entry
    elif isinstance(value, partial):
        for entry in (value.func, *value.args, *value.keywords.values()):
            yield place, entry
    elif isinstance(value, MethodType):
        yield place, value.__self__
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell that is still empty
                yield f"{place}: {name}", cell.cell_contents
        for entry in value.__defaults__ or ():
            yield place, entry
