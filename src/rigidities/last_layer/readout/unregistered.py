"""Parameters that a model uses but does not register: in a plain list, in a function's closure.

Neither `model.parameters()` nor `model.modules()` knows them, so no readout can be made of them,
and the layer before them must not be taken in their place.
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

_DEPTH, _ENTRIES = 4, 1000  # of containers within one another, and of one of them
_OF_MODULES = frozenset(vars(nn.Module()))


class Unregistered:
    """Those of a shadow, by the ids of the leaves that stand for them in a graph."""

    def __init__(self, model: nn.Module, twin: nn.Module) -> None:
        self._model = model
        self._of_twin = {id(p) for p in twin.parameters()}
        # kept with their names, since an id may be given again once its object is gone
        self._known: dict[int, tuple[str, Tensor]] = {}
        for (path, mine), theirs in zip(twin.named_modules(), model.modules(), strict=True):
            for name, value in vars(mine).items():
                if name in _OF_MODULES:
                    continue
                own = vars(theirs).get(name)
                if isinstance(own, Tensor) and own.requires_grad and own.is_leaf:
                    value.requires_grad_()  # an alias, frozen as all of a shadow
                self._add(value, f"{path}.{name}" if path else name)

    def shown(self) -> AbstractContextManager[object]:
        """Where a pass leaves all of them in its graph, frozen ones too."""
        frozen = {i for i, (_, p) in self._known.items() if not p.requires_grad}
        return _Shown(frozen, self._known) if frozen else nullcontext()

    def refuse(self, leaves: Iterable[Tensor]) -> None:
        """Refuse those among the leaves of a graph between the heads and the output."""
        met = [leaf for leaf in leaves if self._is_one(leaf)]
        if not met:
            return
        own = {id(parameter): name for name, parameter in self._model.named_parameters()}
        if all(id(leaf) in own for leaf in met):
            raise ValueError(
                f"The forward pass reaches {own[id(met[0])]!r} by a function that keeps the model "
                "itself, not the copy that is run. Use the model that forward= is given, and "
                "methods of the model rather than lambdas in its attributes."
            )
        names = list(dict.fromkeys(map(self._described, met)))
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        raise ValueError(
            f"The output depends on parameters that the model does not register: "
            f"{', '.join(names[:3])}{more}. They act beside or after the last layer that can be "
            "found, so that layer may not be all of the readout. Make their module an attribute of "
            "the model (or an entry of an nn.ModuleList), not of a plain list or of what a lambda "
            "closes over; "
            "or name the layer= to use alone, or pass features=."
        )

    def _add(self, value: Any, place: str) -> None:
        for name, parameter in _inside(value, place, _DEPTH):
            if id(parameter) not in self._of_twin:
                self._known.setdefault(id(parameter), (name, parameter))

    def _is_one(self, leaf: Tensor) -> bool:
        if id(leaf) in self._of_twin:
            return False
        return id(leaf) in self._known or isinstance(leaf, nn.Parameter)

    def _described(self, leaf: Tensor) -> str:
        shape = tuple(leaf.shape)
        known = self._known.get(id(leaf))
        return f"one of shape {shape}" if known is None else f"{known[0]} {shape}"


class _Shown(TorchFunctionMode):
    """Puts leaves of the graph in the place of frozen parameters."""

    def __init__(self, frozen: set[int], known: dict[int, tuple[str, Tensor]]) -> None:
        super().__init__()
        self._leaves = {i: known[i][1].detach().requires_grad_() for i in frozen}
        for i, leaf in self._leaves.items():
            known[id(leaf)] = known[i][0], leaf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(
            Tensor, lambda t: self._leaves.get(id(t), t), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _inside(value: Any, place: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Parameters inside an attribute, with what a message calls them."""
    if isinstance(value, nn.Parameter):
        yield place, value
    elif isinstance(value, torch.jit.ScriptModule) or not depth:
        return
    elif isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield place, value
    elif isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            yield f"{place}.{name}", parameter
    else:
        for name, part in _parts(value, place):
            yield from _inside(part, name, depth - 1)


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        entries = islice(value.items(), _ENTRIES)
        yield from ((f"{place}[{key!r}]", part) for key, part in entries)
    elif isinstance(value, (list, tuple)):
        yield from ((f"{place}[{i}]", part) for i, part in enumerate(value[:_ENTRIES]))
    elif isinstance(value, partial):
        yield from ((place, part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, MethodType):
        yield place, value.__self__
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell that is empty as yet
                yield f"{place}: {name}", cell.cell_contents
        yield from ((place, part) for part in value.__defaults__ or ())
