"""A Keras model on the torch backend, in modules that torch knows.

Keras keeps its layers where torch does not look, and copies a model by saving it, so that a copy
shares no weights. Here each layer with weights becomes a module that shares their memory; a Dense
layer becomes an `nn.Linear`. The Keras model itself is run, untouched, in a `StatelessScope` that
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
    """Whether a model is a Keras model."""
    return any(kind.__module__.startswith("keras.") for kind in type(model).__mro__)


class KerasModel(nn.Module):
    """The modules of a Keras model's layers, named by the layers' paths, and a call of the model.

    Use `of`, which makes one object per Keras model: a `Watch` compares the identities of its
    tensors to notice changes.

    Raises:
        ValueError: The Keras model has no weights yet.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if not model.built:
            raise ValueError(
                f"The Keras model {model.name!r} has no weights yet. Call it once on a batch, "
                "then train it or load weights."
            )
        self._keras = _KerasVariables(weakref.ref(model), model.name, [], [])
        in_dense_layers: set[int] = set()
        for layer in model._flatten_layers():
            if _is_dense(layer):
                *parent, name, _ = _path(layer.kernel)
                self._module(parent).add_module(name, _linear(layer))
                module_path = ".".join([*parent, name])
                self._keras.dense.append(_Dense(layer.kernel, layer.bias, module_path))
                in_dense_layers |= {id(layer.kernel), id(layer.bias)}
        for variable in model.weights:
            if id(variable) not in in_dense_layers:
                *parent, name = _path(variable)
                _register(self._module(parent), name, variable)
                self._keras.others.append(_Weight(variable, ".".join(parent), name))

    @classmethod
    def of(cls, model: nn.Module) -> KerasModel:
        """The modules of a Keras model; new ones where its weights were moved or replaced."""
        modules = _MODULES.get(model)
        if modules is None or not modules._shares_memory():
            modules = cls(model)
            _MODULES[model] = modules
        return modules

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the Keras model returns for the weights of these modules."""
        import keras

        # Pairs of a Keras variable and its value.
        values = []
        for weight in self._keras.others:
            module = self.get_submodule(weight.module)
            values.append((weight.variable, getattr(module, weight.name)))
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

    def _shares_memory(self) -> bool:
        """Whether the Keras variables still have the memory of these modules' tensors."""
        # Each variable, with the module's path and the name of the tensor that share its memory.
        places = [(dense.kernel, dense.module, "weight") for dense in self._keras.dense]
        places += [(weight.variable, weight.module, weight.name) for weight in self._keras.others]
        for variable, path, name in places:
            tensor = getattr(self.get_submodule(path), name)
            if tensor.data_ptr() != variable.value.data_ptr():
                return False
        return True


_MODULES: weakref.WeakKeyDictionary[nn.Module, KerasModel] = weakref.WeakKeyDictionary()
"""The modules of each Keras model that is alive."""


class _Weight(NamedTuple):
    """A Keras variable, and the parameter or buffer that shares its memory.

    Attributes:
        variable: The variable.
        module: The path of the module that holds the tensor.
        name: The tensor's name there.
    """

    variable: Any
    module: str
    name: str


class _Dense(NamedTuple):
    """The variables of a Dense layer, and the `nn.Linear` that shares their memory.

    Attributes:
        kernel: The variable W of x W + b.
        bias: The variable b, or None.
        module: The path of the `nn.Linear`.
    """

    kernel: Any
    bias: Any
    module: str


@dataclass(frozen=True)
class _KerasVariables:
    """The Keras model and its variables; a copy of this object refers to the same ones.

    The object inside `KerasModel.of` must not keep the Keras model alive; its copies do.

    Attributes:
        reference: Returns the Keras model, or None if it no longer exists.
        name: The model's name, for messages.
        dense: The Dense layers.
        others: The variables of other layers.
    """

    reference: Any
    name: str
    dense: list[_Dense]
    others: list[_Weight]

    def model(self) -> Any:
        """The Keras model."""
        model = self.reference()
        if model is None:
            raise ReferenceError(
                f"The Keras model {self.name!r} no longer exists. Keep a reference to it as long "
                "as you use this object."
            )
        return model

    def __deepcopy__(self, memo: dict[int, object]) -> _KerasVariables:
        model = self.model()
        return _KerasVariables(lambda: model, self.name, self.dense, self.others)


class _Call(NamedTuple):
    """The tensors that a Dense layer computes with, and the module to call in its place."""

    module: nn.Module
    kernel: Tensor
    bias: Tensor | None


class _DenseCalls(TorchFunctionMode):
    """A mode that replaces a Dense layer's product and the following sum by a call of its module.

    It applies to modules that were replaced, or whose forward pass was. Other uses of the layer's
    kernel or bias are left as they are.
    """

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = {id(call.kernel): call for call in calls if _is_replaced(call.module)}
        # Call, input and result of the latest product that awaits the addition of its bias.
        self._latest: tuple[_Call, Tensor, Tensor] | None = None

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


def _is_replaced(module: nn.Module) -> bool:
    """Whether a Dense layer's `nn.Linear`, or its forward pass, was replaced."""
    return type(module) is not nn.Linear or "forward" in vars(module)


def _is_dense(layer: Any) -> bool:
    """Whether a layer computes x W + b with its own variables: no LoRA, not quantised."""
    import keras

    if type(layer) is not keras.layers.Dense or not layer.built:
        return False
    return any(variable is layer.kernel for variable in layer.weights)


def _path(variable: Any) -> list[str]:
    """The names on the path of a variable, without dots, which torch does not allow in names."""
    return [name.replace(".", "_") for name in variable.path.split("/")]


def _linear(layer: Any) -> nn.Linear:
    """An `nn.Linear` that shares the memory of a Dense layer's variables; its weight is W^T."""
    inputs, outputs = layer.kernel.shape
    linear = nn.Linear(inputs, outputs, bias=layer.bias is not None, device="meta")
    linear.weight = nn.Parameter(layer.kernel.value.detach().mT, requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.value.detach(), requires_grad=False)
    return linear


def _register(module: nn.Module, name: str, variable: Any) -> None:
    """Give a module a tensor that shares the memory of a variable.

    Trained weights become parameters, and running statistics become buffers.
    """
    value = variable.value.detach()
    if variable.trainable and value.is_floating_point():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    else:
        module.register_buffer(name, value)
