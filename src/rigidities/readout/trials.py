"""Trials: which layers does the output depend on linearly, alone and together?

`Trials` give layers of a model large random changes and compare the outputs. They decide which
layers form a readout together: the output must be affine in all of their parameters at once.

A nonlinear function at the very end (a sigmoid, an exponential) bends every trial.
`before_nonlinearity` gives the way to run the model up to what enters that function instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..models.shadow import shadow
from .checks import large_change, tolerance
from .heads import (
    ParameterRecorder,
    Recorder,
    as_rows,
    head_weights,
    linear_maps,
    own_parameters,
    put_recorders,
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
    for name in ("View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Select")
    for number in range(3)
) | {"SliceBackward0"}
"""Names of graph nodes that keep the order of numbers, unless they drop some."""

_BY_CONSTANTS = frozenset(
    f"{name}Backward{number}"
    for name in ("Add", "Sub", "Rsub", "Mul", "Div", "Neg")
    for number in range(2)
)
"""Names of graph nodes that, with a single input in the graph, shift or scale it by constants."""


class Trials:
    """Outputs of a model for large random changes of some of its layers.

    Args:
        model: The user's model.
        run: Calls a model on the first batch.
        layers: Names of the layers that can be changed; see `heads.layers_inside`. A linear map is
            changed as a whole, so that reparametrised ones can be.
    """

    def __init__(self, model: nn.Module, run: Run, layers: Sequence[str]) -> None:
        self._run = run
        # Outputs by what was changed, the number of steps and the seed; see `_output`.
        self._outputs: dict[tuple[frozenset[str], int, int], Tensor] = {}
        # The relative rounding of the outputs and the tolerance for it, set by `_output`.
        self._rounding = 0.0
        self._tolerance = 0.0
        twin = shadow(model)
        maps = linear_maps(twin)
        self._parameter_recorders: dict[str, ParameterRecorder] = {}
        for name in layers:
            if name not in maps:
                _, (recorder,) = put_recorders(twin, [name], ParameterRecorder)
                self._parameter_recorders[name] = recorder
        heads = [name for name in layers if name in maps]
        self._model, recorders = put_recorders(twin, heads)
        self._recorders: dict[str, Recorder] = dict(zip(heads, recorders, strict=True))

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

    def is_affine(self, layers: Sequence[str]) -> bool:
        """Whether y(w + 2 d) - 2 y(w + d) + y(w) = 0 for changes d of all layers together."""
        for seed in (1, 2):
            none = self._output(layers, 0, seed)
            single = self._output(layers, 1, seed)
            double = self._output(layers, 2, seed)
            curvature = _largest(double - 2 * single + none)
            size = max(_largest(double - none), _largest(single - none))
            rounding = self._rounding_of(none, single, double)
            if not curvature <= self._tolerance * size + rounding:  # true of NaN too
                return False
        return True

    def act_apart(self, layers: Sequence[str], other_layers: Sequence[str]) -> bool:
        """Whether the effects of two changes on the output add up, without a product of both."""
        for seed in (1, 2):
            none = self._output((), 0, seed)
            first = self._output(layers, 1, seed)
            second = self._output(other_layers, 1, seed)
            both = self._output((*layers, *other_layers), 1, seed)
            product = _largest(both - first - second + none)
            size = min(_largest(first - none), _largest(second - none))
            rounding = self._rounding_of(none, first, second, both)
            if not product <= self._tolerance * size + rounding:  # true of NaN too
                return False
        return True

    def acts(self, layer: str) -> bool:
        """Whether the output depends on a layer at all."""
        none = self._output((), 0, 1)
        changed = self._output([layer], 1, 1)
        return _largest(changed - none) > self._rounding_of(none, changed)

    def linear_together(self, layers: Sequence[str], beginning: Sequence[str] = ()) -> list[str]:
        """The layers in which the output is affine together.

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
        others = [name for name in others if self.acts(name)]
        if not others or self.is_affine([*together, *others]):
            return [*together, *others]
        weighing = self.weighing(others)
        for name in weighing:
            if self.is_affine([*together, name]):
                together.append(name)
        if weighing and not together:
            return []
        for name in others:
            if name not in weighing and self.is_affine([*together, name]):
                together.append(name)
        return together

    def weighing(self, layers: Sequence[str]) -> list[str]:
        """Those layers of which several numbers act on one output, as in a weighted sum.

        Layers that only scale or shift have a single number for each output.
        """
        leaves_of_layer: dict[str, tuple[Tensor, ...]] = {}
        for name in layers:
            if name in self._parameter_recorders:
                self._parameter_recorders[name].reset(adds_offsets=True)
                leaves_of_layer[name] = self._parameter_recorders[name].calls[0].leaves
        weighing = [name for name in layers if name in self._recorders]
        if leaves_of_layer:
            for recorder in self._recorders.values():
                recorder.reset()
            with torch.enable_grad(), GraphsKept():
                values = self._run(self._model).flatten()
            for name, leaves in leaves_of_layer.items():
                if values.requires_grad and _several_numbers_act(values, leaves):
                    weighing.append(name)
        return [name for name in layers if name in weighing]

    def mixes(self, layer: str) -> bool:
        """Whether a layer weighs several outputs of a head against one another, as a readout does.

        It does not if it only scales or shifts: then an output depends on a single number of the
        layer, or on a single one of the outputs that a head gives for a row.
        """
        parameter_recorder = self._parameter_recorders[layer]
        for recorder in self._recorders.values():
            recorder.reset(adds_offsets=True)
        parameter_recorder.reset(adds_offsets=True)
        with torch.enable_grad(), GraphsKept():
            values = self._run(self._model).flatten()
        if not _several_numbers_act(values, parameter_recorder.calls[0].leaves):
            return False
        calls = [call for recorder in self._recorders.values() for call in recorder.calls]
        offsets = [call.offset for call in calls if call.offset is not None]
        for value in _some(values):
            gradients = torch.autograd.grad(
                value, offsets, retain_graph=True, materialize_grads=True
            )
            for call, gradient in zip(calls, gradients, strict=True):
                acting = as_rows(call.head, gradient).count_nonzero(1)
                if bool((acting > 1).any()):
                    return True
        return False

    def _output(self, layers: Sequence[str], steps: int, seed: int) -> Tensor:
        """The output, in float64, some steps along a random change of layers.

        Args:
            layers: Names of the layers that are changed.
            steps: How often the change is added.
            seed: The seed of the change.
        """
        key = (frozenset[str](), 0, 0)  # the output without a change, whatever the names and seed
        if layers and steps:
            key = (frozenset(layers), steps, seed)
        if key not in self._outputs:
            self._change_heads(layers, steps, seed)
            self._change_parameters(layers, steps, seed)
            output = self._run(self._model).detach()
            self._rounding = coarsest_rounding([output])
            self._tolerance = tolerance(self._rounding)
            self._outputs[key] = output.double()
        return self._outputs[key]

    def _change_heads(self, layers: Sequence[str], steps: int, seed: int) -> None:
        for i, (name, recorder) in enumerate(self._recorders.items()):
            recorder.reset()  # to its own weights, whose size sets that of the change
            change = None
            if name in layers:
                change = large_change(head_weights(recorder.head), 1000 * seed + i) * steps
            recorder.reset(change=change)

    def _change_parameters(self, layers: Sequence[str], steps: int, seed: int) -> None:
        for i, (name, recorder) in enumerate(self._parameter_recorders.items()):
            change = None
            if name in layers:
                changes = []
                for parameter in recorder.module_parameters.values():
                    changes.append(large_change(parameter.detach().flatten(), 2000 * seed + i))
                change = torch.cat(changes) * steps
            recorder.reset(change=change)

    def _rounding_of(self, *outputs: Tensor) -> float:
        """What rounding may bring into a sum of outputs."""
        return 16 * self._rounding * max(_largest(output) for output in outputs)


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _some(values: Tensor) -> Tensor:
    """At most eight of some values, evenly spaced."""
    return values[:: max(1, len(values) // 8)][:8]


def _several_numbers_act(values: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether several numbers of one parameter act on one of some values."""
    for value in _some(values):
        gradients = torch.autograd.grad(
            value, parameters, retain_graph=True, materialize_grads=True
        )
        if any(int(gradient.count_nonzero()) > 1 for gradient in gradients):
            return True
    return False


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
    twin = shadow(model)
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    with torch.enable_grad(), GraphsKept(), _FunctionCalls() as calls:
        output = run(twin)
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
    return run_before if run_before(twin).numel() == output.numel() else None


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
