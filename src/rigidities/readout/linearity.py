"""Which layers the output depends on linearly, alone and together.

`Linearity` decides which layers form a readout together: the output must be linear in all of their
parameters at once.

A nonlinear function at the very end (a sigmoid, an exponential) bends everything before it.
`before_nonlinearity` gives the way to run the model up to what enters that function instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..models.derivatives import normal_like
from ..models.shadow import shadow
from .checks import revealing_change, tolerance
from .heads import (
    Call,
    ParameterRecorder,
    Recorder,
    as_rows,
    has_plain_parameters,
    head_weights,
    linear_maps,
    own_parameters,
    put_recorders,
    with_leaves,
)
from .tail import GraphsKept, coarsest_rounding

Run = Callable[[nn.Module], Tensor]
"""Calls a model on the batch and returns the output tensor."""

LARGEST_UNASKED = 1 << 28
"""Bytes of a first batch's derivatives, or of their Gram matrix, up to which modules that are not
linear maps join the readout without being named."""

BENDING = frozenset(
    f"{name}Backward0"
    for name in (
        *("Relu", "LeakyRelu", "Elu", "Celu", "Gelu", "Silu", "Mish", "Hardswish", "Hardsigmoid"),
        *("Hardtanh", "Tanh", "Sigmoid", "LogSigmoid", "Softplus", "Softmax", "LogSoftmax"),
        *("Exp", "Log", "Sin", "Cos", "Sqrt", "Pow", "Abs", "Erf", "Clamp"),
        *("LinalgVectorNorm", "Amax", "Amin", "Max", "Min", "Std", "Var", "Prod", "Logsumexp"),
    )
)
"""Names of graph nodes that apply a nonlinear function to their one input."""

ORDERLY = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Select", "Slice"),
        *("Clone", "ToCopy", "Unbind", "Split", "Cat", "Expand"),
    )
    for number in range(3)
)
"""Names of graph nodes that keep numbers and their order, unless they drop, repeat or join some."""

_BY_CONSTANTS = frozenset(
    f"{name}Backward{number}"
    for name in ("Add", "Sub", "Rsub", "Mul", "Div", "Neg")
    for number in range(2)
)
"""Names of graph nodes that, with a single input in the graph, shift or scale it by constants."""


class _DifferentiatedPass(NamedTuple):
    """One pass of a model, differentiable by the weights of some layers.

    Attributes:
        output: The output, with its graph.
        leaves_of_layer: The leaves of the graph that stand for each layer: its parameters or, for a
            linear map whose weight is not a parameter, the offsets of its calls.
        calls_of_head: The calls of each linear map.
    """

    output: Tensor
    leaves_of_layer: dict[str, list[Tensor]]
    calls_of_head: dict[str, list[Call]]


class Linearity:
    r"""In which of its layers the output of a model is linear, alone and together.

    The check is that of `checks.change_agrees`, for one random mixture $v$ of the outputs: where
    the weights change by $d$, $v^\top y$ must change by $d$ times its gradient, which one backward
    pass gives for all layers at once.

    Args:
        model: The user's model.
        run: Calls a model on the first batch.
        layers: Names of the layers; see `heads.layers_inside`. A linear map counts as a whole, so
            that its weight may be reparametrised.
    """

    def __init__(self, model: nn.Module, run: Run, layers: Sequence[str]) -> None:
        self._run = run
        # Outputs by the names of the layers that were changed.
        self._outputs: dict[frozenset[str], Tensor] = {}
        model_shadow = shadow(model)
        maps = linear_maps(model_shadow)
        self._parameter_recorders: dict[str, ParameterRecorder] = {}
        for name in layers:
            if name not in maps:
                _, (recorder,) = put_recorders(model_shadow, [name], ParameterRecorder)
                self._parameter_recorders[name] = recorder
        heads = [name for name in layers if name in maps]
        self._model, recorders = put_recorders(model_shadow, heads)
        self._recorders: dict[str, Recorder] = dict(zip(heads, recorders, strict=True))
        self._all_recorders: dict[str, Recorder | ParameterRecorder] = {
            **self._recorders,
            **self._parameter_recorders,
        }
        self._changes = {name: self._change(name, i) for i, name in enumerate(layers)}

    def size(self, layer: str) -> int:
        """How many numbers a layer holds."""
        if layer in self._recorders:
            return head_weights(self._recorders[layer].head).numel()
        parameters = self._parameter_recorders[layer].module_parameters.values()
        return sum(parameter.numel() for parameter in parameters)

    def obstacle(self, layers: Sequence[str], outputs: int) -> str:
        """Why layers are not included in a readout by default; empty if they are.

        Args:
            layers: Names of the layers; the answer is about the last one.
            outputs: How many numbers the model gives for the batch.
        """
        heads = [self._recorders[name].head for name in layers if name in self._recorders]
        if len(heads) == len(layers):
            return ""  # linear maps need no derivatives with respect to single parameters
        if any("weight" not in own_parameters(head) for head in heads):
            return "the layer beside it has a weight that is not a parameter"
        width = sum(self.size(name) for name in layers)
        if 8 * max(outputs * width, width**2) > LARGEST_UNASKED:
            return f"{self.size(layers[-1]):,} parameters, too many to include by default"
        return ""

    def is_linear(self, layers: Sequence[str]) -> bool:
        """Whether the output is linear in the weights of all of some layers together."""
        before = self._output(())
        changes = self._output(layers) - before
        v = normal_like(before, seed=5)
        expected = sum(self._slopes[name] for name in layers)
        deviation = abs(float((v * changes).sum()) - expected)
        size = float((v * changes).abs().sum()) + abs(expected)
        return deviation <= self._allowed(size, before, v)  # false for NaN too

    def act_apart(self, layers: Sequence[str], other_layers: Sequence[str]) -> bool:
        """Whether the effects of two changes on the output add up, without a product of both."""
        none = self._output(())
        first = self._output(layers) - none
        second = self._output(other_layers) - none
        both = self._output((*layers, *other_layers)) - none
        product = (both - first - second).abs().max()
        size = min(float(first.abs().max()), float(second.abs().max()))
        scale = torch.stack([none, first, second, both]).abs().max()
        rounding = 16 * self._rounding * float(scale)
        return float(product) <= tolerance(self._rounding) * size + rounding  # false for NaN too

    def linear_together(self, layers: Sequence[str], beginning: Sequence[str] = ()) -> list[str]:
        """The layers in which the output is linear together.

        Layers that weigh several numbers against one another come before those that only scale
        or shift; otherwise earlier ones come before later ones.

        Args:
            layers: The layers to choose from.
            beginning: Layers that are chosen already. They stand first in the answer.

        Returns:
            The chosen layers. There are none where some layers weigh numbers, but the output is
            linear in none of these: what scales or shifts it is not its readout.
        """
        together = list(beginning)
        others = [name for name in layers if name not in together]
        others = [name for name in others if self._acts(name)]
        if not others or self.is_linear([*together, *others]):
            return [*together, *others]
        weighing = self.weighing(others)
        for name in weighing:
            if self.is_linear([*together, name]):
                together.append(name)
        if weighing and not together:
            return []
        for name in others:
            if name not in weighing and self.is_linear([*together, name]):
                together.append(name)
        return together

    def weighing(self, layers: Sequence[str]) -> list[str]:
        """Those layers of which several numbers act on one output, as in a weighted sum.

        Layers that only scale or shift have a single number for each output.
        """
        return [name for name in layers if name in self._recorders or self._weighs(name)]

    def mixes(self, layer: str) -> bool:
        """Whether a layer weighs several outputs of a head against one another, as a readout does.

        It does not if it only scales or shifts: then an output depends on a single number of the
        layer, or on a single one of the outputs that a head gives for a row.
        """
        if not self._weighs(layer):
            return False
        calls = [call for calls in self._pass.calls_of_head.values() for call in calls]
        offsets = [call.offset for call in calls if call.offset is not None]
        for value in self._some_values():
            gradients = torch.autograd.grad(
                value, offsets, retain_graph=True, materialize_grads=True
            )
            for call, gradient in zip(calls, gradients, strict=True):
                acting = as_rows(call.head, gradient).count_nonzero(1)
                if bool((acting > 1).any()):
                    return True
        return False

    def _weighs(self, layer: str) -> bool:
        """Whether several numbers of one parameter of a layer act on one output."""
        leaves = self._pass.leaves_of_layer[layer]
        if not self._pass.output.requires_grad:
            return False
        for value in self._some_values():
            gradients = torch.autograd.grad(
                value, leaves, retain_graph=True, materialize_grads=True
            )
            if any(int(gradient.count_nonzero()) > 1 for gradient in gradients):
                return True
        return False

    def _some_values(self) -> Tensor:
        """At most eight of the outputs, evenly spaced, with their graph."""
        values = self._pass.output.flatten()
        return values[:: max(1, len(values) // 8)][:8]

    def _acts(self, layer: str) -> bool:
        """Whether the output depends on a layer at all."""
        none = self._output(())
        changed = self._output([layer])
        rounding = 16 * self._rounding * float(torch.stack([none, changed]).abs().max())
        return float((changed - none).abs().max()) > rounding

    @cached_property
    def _pass(self) -> _DifferentiatedPass:
        """A pass with leaves of the graph in place of the weights."""
        heads = {name: recorder.head for name, recorder in self._recorders.items()}
        for recorder in self._all_recorders.values():
            recorder.reset(adds_offsets=True)
        leaves_of_layer: dict[str, list[Tensor]] = {}
        for name, parameter_recorder in self._parameter_recorders.items():
            leaves_of_layer[name] = list(parameter_recorder.calls[0].leaves)
        with with_leaves(list(heads.values())), torch.enable_grad(), GraphsKept():
            for name, head in heads.items():
                if has_plain_parameters(head):
                    leaves_of_layer[name] = list(own_parameters(head).values())
            output = self._run(self._model)
        calls_of_head = {name: list(recorder.calls) for name, recorder in self._recorders.items()}
        return _DifferentiatedPass(output, leaves_of_layer, calls_of_head)

    @cached_property
    def _slopes(self) -> dict[str, float]:
        """The gradient of v^T y by the weights of each layer, times their change."""
        output, leaves_of_layer, calls_of_head = self._pass
        if not output.requires_grad:
            return dict.fromkeys(self._changes, 0.0)
        offsets_of_layer: dict[str, list[Tensor]] = {}
        for name in self._changes.keys() - leaves_of_layer.keys():
            calls = calls_of_head[name]
            offsets_of_layer[name] = [call.offset for call in calls if call.offset is not None]
        leaves_by_layer = leaves_of_layer | offsets_of_layer
        leaves = [leaf for leaves in leaves_by_layer.values() for leaf in leaves]
        v = normal_like(output, seed=5)
        try:
            gradients = iter(
                torch.autograd.grad(output, leaves, v, retain_graph=True, materialize_grads=True)
            )
        except Exception:  # a backward pass of the user's own fails: nothing is known to be linear
            self._pass = self._pass._replace(output=output.detach())
            return dict.fromkeys(self._changes, 0.0)
        slopes = {}
        for name, leaves in leaves_by_layer.items():
            gradients_of_layer = [next(gradients).double() for _ in leaves]
            gradient = self._gradient_of_layer(name, gradients_of_layer)
            slopes[name] = float((gradient * self._changes[name]).sum())
        return slopes

    def _gradient_of_layer(self, layer: str, gradients: list[Tensor]) -> Tensor:
        """The gradient by a layer's weights, (D or D+1, K) of a linear map, else (P,).

        Args:
            layer: The name of the layer.
            gradients: The gradients by what stands for it in `_DifferentiatedPass`.
        """
        if layer in self._parameter_recorders:
            return torch.cat([gradient.flatten() for gradient in gradients])
        if layer in self._pass.leaves_of_layer:
            outputs = len(gradients[0])  # of the weight (K, D); that of the bias is (K,)
            return torch.cat([gradient.reshape(outputs, -1) for gradient in gradients], 1).mT
        # The weight is not a parameter: derivatives by what the map returned, times what entered.
        total = torch.zeros_like(self._changes[layer])
        calls = self._pass.calls_of_head[layer]
        for call, gradient in zip(calls, gradients, strict=True):
            total += call.weight_rows.detach().double().mT @ as_rows(call.head, gradient)
        return total

    def _change(self, layer: str, seed: int) -> Tensor:
        """A change that reveals nonlinearity: (D or D+1, K) of a linear map, else (P,)."""
        if layer in self._recorders:
            return revealing_change(head_weights(self._recorders[layer].head), 1000 + seed)
        changes = []
        for parameter in self._parameter_recorders[layer].module_parameters.values():
            changes.append(revealing_change(parameter.flatten(), 2000 + seed))
        return torch.cat(changes)

    def _output(self, layers: Sequence[str]) -> Tensor:
        """The output, in float64, where some layers are changed."""
        key = frozenset(layers)
        if key not in self._outputs:
            for name, recorder in self._all_recorders.items():
                change = None
                if name in key:
                    change = self._changes[name]
                recorder.reset(change=change)
            output = self._run(self._model).detach()
            self._rounding = coarsest_rounding([output])
            self._outputs[key] = output.double()
        return self._outputs[key]

    def _allowed(self, size: float, before: Tensor, v: Tensor) -> float:
        """How far a mixture of outputs may be from a linear change of that size by rounding."""
        rounding = 16 * self._rounding * float((v * before).abs().sum())
        return tolerance(self._rounding) * size + rounding


# --- up to the nonlinear function at the end -----------------------------------------------------


def before_nonlinearity(model: nn.Module, run: Run) -> Run | None:
    """How to run a model up to what enters the nonlinear function that its output ends with.

    Of several such functions in a row, the first one counts. Between them and after them there may
    be constants that shift or scale.

    Args:
        model: The user's model.
        run: Calls a model on the first batch.

    Returns:
        None if the output does not end with a nonlinear function of one tensor.
    """
    model_shadow = shadow(model)
    for parameter in model_shadow.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    with torch.enable_grad(), GraphsKept(), _FunctionCalls() as calls:
        output = run(model_shadow)
    last = None
    node = output.grad_fn
    while node is not None and node.name() in BENDING | ORDERLY | _BY_CONSTANTS:
        last = calls.by_node.get(node, last)
        inputs = [child for child, _ in node.next_functions if child is not None]
        if len(inputs) > 1:
            break
        node = inputs[0] if inputs else None
    if last is None:
        return None
    function, number = last

    def run_before(model: nn.Module) -> Tensor:
        with _FunctionCalls(function, number) as calls:
            run(model)
        entered: Tensor | None = calls.entered
        if entered is None:
            raise ValueError("The model does not call the same functions in every pass.")
        return entered

    # Of another size is a function of something else, as of a weight: x * exp(w).
    return run_before if run_before(model_shadow).numel() == output.numel() else None


class _FunctionCalls(TorchFunctionMode):
    """A mode that counts the calls of each function of torch.

    Args:
        function: The function of which the input of one call is kept; None for none.
        number: The number of that call among those of the function.

    Attributes:
        by_node: For nonlinear functions, which function it was and the number of its call, by the
            node of the graph that the call made.
        entered: What entered the call that was asked for.
    """

    def __init__(self, function: Any = None, number: int = 0) -> None:
        super().__init__()
        self.by_node: dict[Any, tuple[Any, int]] = {}
        self.entered: Tensor | None = None
        self._wanted = (function, number)
        self._counts: Counter[Any] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = (func, self._counts[func])
        self._counts[func] += 1
        if call == self._wanted:
            inputs = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
            self.entered = inputs[0].clone()  # the function may overwrite it
        result = func(*args, **(kwargs or {}))
        node = result.grad_fn if isinstance(result, Tensor) else None
        if node is not None and node.name() in BENDING:
            self.by_node[node] = call
        return result
