"""A Keras model on the torch backend, in modules that torch knows.

Keras keeps its layers where torch does not look, and copies a model by saving it, so that a copy
shares no weights. Here each layer that has weights becomes a module that shares their memory, a
Dense layer an `nn.Linear`. The Keras model itself is run, untouched, in a `StatelessScope` that
gives its variables the values of these modules.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def is_keras(model: nn.Module) -> bool:
    """Whether a model is one of Keras."""
    return any(kind.__module__.startswith("keras.") for kind in type(model).__mro__)


class KerasModel(nn.Module):
    """The modules of a Keras model's layers, named by the layers' paths, and a call of the model.

    There is one for each Keras model, see `of`: by the identity of its tensors a change is noticed.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if not model.built:
            raise ValueError(
                f"The Keras model {model.name!r} has no weights yet. Call it once on a batch, then "
                "train it or load weights."
            )
        self._keras = _Held(weakref.ref(model), model.name, [], [])
        placed = set[int]()
        for layer in model._flatten_layers():
            if _is_dense(layer):
                path = _parts(layer.kernel)[:-1]
                self._module(path[:-1]).add_module(path[-1], _linear(layer))
                self._keras.dense.append(_Dense(layer.kernel, layer.bias, ".".join(path)))
                placed |= {id(layer.kernel), id(layer.bias)}
        for variable in model.weights:
            if id(variable) not in placed:
                *path, name = _parts(variable)
                _register(self._module(path), name, variable)
                self._keras.others.append(_Weight(variable, ".".join(path), name))

    @classmethod
    def of(cls, model: nn.Module) -> KerasModel:
        """That of a Keras model; another one where its weights were moved, added or replaced."""
        known = _KNOWN.get(model)
        if known is None or known._addresses() != [v.value.data_ptr() for v in known._variables()]:
            known = _KNOWN[model] = cls(model)
        return known

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the Keras model returns for the weights of these modules."""
        import keras

        values = []
        for weight in self._keras.others:
            owner = self.get_submodule(weight.module)
            values.append((weight.variable, getattr(owner, weight.name)))
        for dense in self._keras.dense:
            linear: Any = self.get_submodule(dense.module)
            values.append((dense.kernel, linear.weight.mT))
            if dense.bias is not None:
                values.append((dense.bias, linear.bias))
        with keras.StatelessScope(state_mapping=values) as scope:
            calls = []
            for dense in self._keras.dense:
                bias = None if dense.bias is None else scope.get_current_value(dense.bias)
                linear = self.get_submodule(dense.module)
                calls.append(_Call(linear, scope.get_current_value(dense.kernel), bias))
            with _DenseCalls(calls):
                return self._keras.model()(*args, **kwargs)

    def _module(self, path: list[str]) -> nn.Module:
        """The module at a path, made if there is none."""
        module: nn.Module = self
        for name in path:
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        return module

    def _variables(self) -> list[Any]:
        found = [dense.kernel for dense in self._keras.dense]
        return found + [weight.variable for weight in self._keras.others]

    def _addresses(self) -> list[int]:
        """Of the memory of these modules' tensors, in the order of `_variables`."""
        places = [(dense.module, "weight") for dense in self._keras.dense]
        places += [(weight.module, weight.name) for weight in self._keras.others]
        return [getattr(self.get_submodule(path), name).data_ptr() for path, name in places]


_KNOWN: weakref.WeakKeyDictionary[nn.Module, KerasModel] = weakref.WeakKeyDictionary()


class _Weight(NamedTuple):
    """A Keras variable, and the parameter or buffer that shares its memory."""

    variable: Any
    module: str
    name: str


class _Dense(NamedTuple):
    """The variables of a Dense layer, and the `nn.Linear` that shares their memory."""

    kernel: Any
    bias: Any
    module: str


@dataclass(frozen=True)
class _Held:
    """The Keras model and its variables; a copy of this holds the same ones.

    The first of all, in `KerasModel.of`, must not keep the model alive, but its copies do.
    """

    reference: Any
    name: str
    dense: list[_Dense]
    others: list[_Weight]

    def model(self) -> Any:
        """The Keras model."""
        model = self.reference()
        if model is None:
            raise ReferenceError(f"The Keras model {self.name!r} is gone: keep it as long as this.")
        return model

    def __deepcopy__(self, memo: dict[int, object]) -> _Held:
        model = self.model()
        return _Held(lambda: model, self.name, self.dense, self.others)


class _Call(NamedTuple):
    """What stands for a Dense layer, and the tensors that the layer computes with."""

    module: nn.Module
    kernel: Tensor
    bias: Tensor | None


class _DenseCalls(TorchFunctionMode):
    """Where a Dense layer's product and the sum that follows it are a call of its module.

    That is, where something stands in for the module or for its forward pass. Another use of the
    layer's kernel or bias is left as it is.
    """

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = {id(call.kernel): call for call in calls if _replaced(call.module)}
        self._latest: tuple[_Call, Tensor, Tensor] | None = None  # call, input and product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul and not kwargs and id(args[1]) in self._calls:
            call = self._calls[id(args[1])]
            if call.bias is None:
                return call.module(args[0])
            product = func(*args)
            self._latest = (call, args[0], product)
            return product
        if func is torch.add and not kwargs and self._latest is not None:
            call, x, product = self._latest
            if args[0] is product and args[1] is call.bias:
                self._latest = None
                return call.module(x)
        return func(*args, **(kwargs or {}))


def _replaced(module: nn.Module) -> bool:
    return type(module) is not nn.Linear or "forward" in vars(module)


def _is_dense(layer: Any) -> bool:
    """Whether a layer computes x W + b by variables of its own: no LoRA, nothing quantised."""
    import keras

    if type(layer) is not keras.layers.Dense or not layer.built:
        return False
    return any(variable is layer.kernel for variable in layer.weights)


def _parts(variable: Any) -> list[str]:
    """The path of a variable, without dots, which torch allows in no name."""
    return [part.replace(".", "_") for part in variable.path.split("/")]


def _linear(layer: Any) -> nn.Linear:
    inputs, outputs = layer.kernel.shape
    linear = nn.Linear(inputs, outputs, bias=layer.bias is not None, device="meta")
    linear.weight = nn.Parameter(layer.kernel.value.detach().mT, requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.value.detach(), requires_grad=False)
    return linear


def _register(module: nn.Module, name: str, variable: Any) -> None:
    """Trained weights are parameters, running statistics are buffers."""
    value = variable.value.detach()
    if variable.trainable and value.is_floating_point():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    else:
        module.register_buffer(name, value)
