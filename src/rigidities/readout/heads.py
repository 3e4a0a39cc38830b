"""Readout heads: which modules count as linear maps, and what stands in for them in a shadow.

A *head* is a module of the model whose weights are (part of) the readout. Usually it is a linear
map, an `nn.Linear` or a 1 x 1 convolution, which computes `W x + b` row by row. To see what enters
and leaves a head, `put_recorders` exchanges it, in a shadow of the model, for a `StandIn`:

| stand-in | what it is for |
| --- | --- |
| `Recorder` | inputs and outputs of a head, to make features of; may change the head's weights |
| `Marker` | where in the autograd graph a module was called, while the readout is searched |
| `GraphRecorder` | inputs and outputs inside a compiled or exported graph |
| `SwappableHead` | computes the head with the weights of a buffer, which `vmap` can replace |

A `ParameterRecorder` takes no module's place: it exchanges the parameters of any module, for leaves
of the graph or for changed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

from ..models.shadow import MODULE_ATTRIBUTES, with_attributes
from ..posterior.gram import with_ones

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LINEAR_BY_CLASS = (nn.Linear, NonDynamicallyQuantizableLinear, *_CONVOLUTIONS)
_NORMS = ("_WeightNorm", "_SpectralNorm", "WeightNorm", "SpectralNorm")
"""Torch's own classes for normalised weights, of the new kind and the old."""


class Call(NamedTuple):
    """One recorded call of a head.

    Attributes:
        head: The module that was called.
        input: What it was called with.
        output: What it returned, with the offset added where there is one.
        offset: A zero of the output's shape that was added to it, so that the model's output can
            be differentiated by the head's; None where nothing is to be differentiated.
        versions: How often input and output had been written to when they were recorded. A later
            count tells that they were changed in place.
        leaves: The parameters that a `ParameterRecorder` gave the head, to differentiate by.
    """

    head: nn.Module
    input: Tensor
    output: Tensor
    offset: Tensor | None
    versions: tuple[int, int] = (0, 0)
    leaves: tuple[Tensor, ...] = ()

    @property
    def input_rows(self) -> Tensor:
        """What went in, as rows (R, D)."""
        if self.input._version != self.versions[0]:
            raise ValueError(
                "The readout layer's input is overwritten in place after the layer has used it, "
                "so its features are lost. Let the forward pass write to a copy."
            )
        if self.input.ndim == 2 and isinstance(self.head, nn.Linear):
            return self.input
        return as_rows(self.head, self.input)

    @property
    def weight_rows(self) -> Tensor:
        """What meets the head's weights: the input rows and, for a bias, ones, (R, D or D+1)."""
        if has_bias(self.head):
            return with_ones(self.input_rows)
        return self.input_rows


class StandIn(nn.Module):
    """Stands in for a module of a shadow, and has the attributes of that module, too.

    Attributes:
        head: The module that it stands in for.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def __getattr__(self, name: str) -> Any:
        # Code of the model may read attributes of the head, such as `head.in_features`.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # Python asks for these to copy or pickle the stand-in itself
                raise
            return getattr(super().__getattr__("head"), name)


class Recorder(StandIn):
    """Calls a head, and keeps what went in and came out.

    Attributes:
        calls: One entry per call since `reset`.
        adds_offsets: Whether to add a zero that requires a gradient to each output, so that the
            derivative of the model's output with respect to the head's output can be taken.
        change: (D or D+1, K), added to the output as if to the head's weights (and bias), for
            checks of linearity. It is used only where the weights are not plain parameters, which
            could be exchanged.
        original_parameters: The head's parameters by name, while changed ones stand in their place.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__(head)
        self.calls: list[Call] = []
        self.adds_offsets = False
        self.change: Tensor | None = None
        self.original_parameters: dict[str, nn.Parameter] = {}

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The head's output, recorded."""
        # For every batch: a look into the dictionary is faster than nn.Module's `self.head`.
        head: Any = self._modules["head"]
        output: Tensor = head(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        if output.is_complex() or output.is_nested:
            _refuse_kind(output)
        if self.change is not None:
            output = output + self._response(head, x, output)
        offset = None
        if self.adds_offsets:
            offset = torch.zeros_like(output, requires_grad=True)
            output = output + offset
        self.calls.append(Call(head, x, output, offset, (x._version, output._version)))
        return output

    def reset(self, *, adds_offsets: bool = False, change: Tensor | None = None) -> None:
        """Forget the calls and set what the next ones do.

        Args:
            adds_offsets: Whether the next calls add a zero to differentiate by.
            change: What to add to the head's weights in the next calls, (D or D+1, K).
        """
        head: Any = self._modules["head"]
        if self.original_parameters:
            head._parameters.update(self.original_parameters)
            self.original_parameters = {}
        if change is not None and has_plain_parameters(head):
            self._exchange_parameters(head, change)
            change = None
        self.calls.clear()
        self.adds_offsets = adds_offsets
        self.change = change

    def _response(self, head: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        """What the change of the weights adds to the output."""
        assert self.change is not None
        rows = as_rows(head, x)
        if has_bias(head):
            rows = with_ones(rows)
        response = rows @ self.change.to(x)  # (R, K)
        axis = channel_axis(head)
        channels_last = output.movedim(axis, -1).shape
        return response.reshape(channels_last).movedim(-1, axis)

    def _exchange_parameters(self, head: nn.Module, change: Tensor) -> None:
        """Let the head itself, and whatever else reads its weights, compute with changed ones."""
        columns = (head_weights(head).to(torch.float64) + change).mT  # (K, D or D+1)
        if has_bias(head):
            changed_values = {"weight": columns[:, :-1], "bias": columns[:, -1]}
        else:
            changed_values = {"weight": columns}
        for name, values in changed_values.items():
            original = head.get_parameter(name)
            self.original_parameters[name] = original
            values = values.reshape(original.shape).to(original)
            changed = nn.Parameter(values, requires_grad=False)
            vars(changed).update(vars(original))
            head._parameters[name] = changed


class GraphRecorder(StandIn):
    """Calls a head in a graph: it notes each call, and looks at no value.

    Attributes:
        calls: One entry per call.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__(head)
        self.calls: list[Call] = []

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The head's output."""
        output: Tensor = self.head(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        self.calls.append(Call(self.head, x, output, None))
        return output


class SwappableHead(StandIn):
    """Computes a head with the weights of a buffer, which a pass may swap.

    Attributes:
        weights: (D + 1, K). The bias is last, whether the head has one or not.
    """

    weights: Tensor

    def __init__(self, head: nn.Module) -> None:
        super().__init__(head)
        self.register_buffer("weights", self.current_weights(), persistent=False)

    def current_weights(self) -> Tensor:
        """The weights that the head has now, (D + 1, K), with a zero for a bias that it lacks."""
        weights = head_weights(self.head)
        if has_bias(self.head):
            return weights
        return functional.pad(weights, (0, 0, 0, 1))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The output for the buffer's weights."""
        x = args[0] if args else next(iter(kwargs.values()))
        weights = self.weights.to(x)
        axis = channel_axis(self.head)
        shape = x.movedim(axis, -1).shape[:-1]
        # A product of flat rows keeps the shapes free in an export, also of no rows.
        rows = as_rows(self.head, x) @ weights[:-1] + weights[-1]
        return rows.reshape(*shape, weights.shape[-1]).movedim(-1, axis)


class Mark(NamedTuple):
    """A zero that the graph knows, added to what one call of a module returned.

    Attributes:
        leaf: The zero.
        node: The node of the graph that added it, by which the returned tensor can be told; None
            without a graph.
        numel: How many numbers the call returned.
        version: How often they had been written to when they were returned.
    """

    leaf: Tensor
    node: Any
    numel: int
    version: int


class Marker(StandIn):
    """Calls a module while a readout is searched: it marks the graph and keeps no values.

    Attributes:
        marks: One entry for each tensor that was returned.
        in_place: Whether the mark, a single number, is added in place, so that it takes no memory.
            Models that differentiate inside their forward pass do not allow it.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__(head)
        self.marks: list[Mark] = []
        self.in_place = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, with a zero added that the graph knows."""
        head: Any = self._modules["head"]
        return tree_map_only(Tensor, self._marked, head(*args, **kwargs))

    def _marked(self, output: Tensor) -> Tensor:
        """A tensor that the module returned, with a mark; whole numbers are left as they are."""
        if not output.is_floating_point() and not output.is_complex():
            return output
        zero = output.new_zeros(()).requires_grad_()
        marked = output.add_(zero) if self.in_place else output + zero
        self.marks.append(Mark(zero, marked.grad_fn, marked.numel(), marked._version))
        return marked


class ParameterRecorder:
    """Stands beside a module, called or not, and gives it other parameters for a pass.

    Only parameters that the module owns itself are exchanged. They require gradients where a
    `Recorder` would add offsets.

    Attributes:
        head: The module, or a `LoneParameter` of it.
        module_parameters: The parameters that the module came with, by name.
        calls: One entry, whether the module is called or not. Its `leaves` are the parameters now
            in place.
    """

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.module_parameters = own_parameters(head)
        self._owner = head.owner if isinstance(head, LoneParameter) else head
        self.calls: list[Call] = []
        self.reset()

    def reset(self, *, adds_offsets: bool = False, change: Tensor | None = None) -> None:
        """Put parameters in place: those that the module came with, unless others are asked for.

        Args:
            adds_offsets: Whether to put leaves in place that require gradients.
            change: (P, 1) to add to the parameters, one after the other.
        """
        parameters = dict(self.module_parameters)
        if change is not None:
            sizes = [parameter.numel() for parameter in parameters.values()]
            changes = torch.split(change.flatten(), sizes)
            for (name, parameter), difference in zip(parameters.items(), changes, strict=True):
                changed = parameter + difference.reshape(parameter.shape).to(parameter)
                parameters[name] = nn.Parameter(changed, requires_grad=False)
        if adds_offsets:
            for name, parameter in parameters.items():
                parameters[name] = nn.Parameter(parameter.detach())
        for name, parameter in parameters.items():
            setattr(self._owner, name, with_attributes(parameter, self.module_parameters[name]))
        leaves = tuple(parameters.values())
        self.calls = [Call(self.head, leaves[0], leaves[0], None, leaves=leaves)]


class LoneParameter(nn.Module):
    """One parameter of a module as a head of its own, without the rest of the module.

    Args:
        owner: The module that owns the parameter.
        name: The name of the parameter in that module.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple, so that it does not become a submodule
        self.register_parameter(name, owner._parameters[name])

    @property
    def owner(self) -> nn.Module:
        """The module that owns the parameter."""
        return self._owner[0]


def named_head(model: nn.Module, name: str) -> nn.Module:
    """The head of a name: a module or, where the name is a parameter's, a `LoneParameter`."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if last in module._parameters and last not in module._modules:
        return LoneParameter(module, last)
    return model.get_submodule(name)


def _refuse_kind(output: Tensor) -> None:
    """Say why what a head returned has no rows of real numbers."""
    if output.is_complex():
        raise ValueError(
            "The readout layer's weights are complex numbers, which are not supported. Pass "
            "features=. For the real part of W h + b they are h.real, h.imag and a column of "
            "ones: lambda m, *inputs: torch.cat([h.real, h.imag, ones], 1)."
        )
    raise ValueError(
        "The readout layer is called with a nested tensor, whose rows cannot be told apart here. "
        "Let the model extract its rows before that layer (h.values() of a jagged tensor), or "
        "pass features=."
    )


def is_linear_map(module: nn.Module) -> bool:
    """Whether the module computes W x + b row by row: nn.Linear or a 1 x 1 convolution."""
    if isinstance(module, nn.Linear):
        return True
    if not isinstance(module, _CONVOLUTIONS) or module.groups != 1:
        return False
    if {*module.kernel_size, *module.stride} != {1}:
        return False
    return module.padding in ("same", "valid", (0,), (0, 0), (0, 0, 0))


def is_linear_by_class(head: nn.Module) -> bool:
    """Whether a linear map is one by its class alone: torch's own forward, and no hooks.

    For any other (a subclass, a hooked or a reparametrised layer) only its outputs can tell.
    """
    hooked = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
    return type(head) in _LINEAR_BY_CLASS and not hooked


def has_plain_parameters(head: nn.Module) -> bool:
    """Whether weight and bias of a linear map are plain parameters of its own."""
    names = ["weight"]
    if has_bias(head):
        names.append("bias")
    return all(type(head._parameters.get(name)) is nn.Parameter for name in names)


def has_free_weight(head: nn.Module) -> bool:
    """Whether all entries of a linear map's weight can move.

    They can where the weight is a parameter, and behind a weight norm or a spectral norm, whose
    features are those of the effective weight. Pruned weights cannot; of other parametrisations
    nothing is known.
    """
    if parametrize.is_parametrized(head):
        for chain in head.parametrizations.values():  # type: ignore[operator]
            if any(type(parametrization).__name__ not in _NORMS for parametrization in chain):
                return False
        return True
    if "weight" in head._parameters:
        # A layer without a bias has the entry None. Without an entry, the bias is computed.
        return "bias" in head._parameters
    return any(type(hook).__name__ in _NORMS for hook in head._forward_pre_hooks.values())


def linear_maps(model: nn.Module) -> dict[str, nn.Module]:
    """Linear maps by name, in order of definition."""
    return {name: module for name, module in model.named_modules() if is_linear_map(module)}


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters that a module owns itself, by name; empty ones are left out."""
    parameters: dict[str, Tensor] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_floating_point() and parameter.numel():
            parameters[name] = parameter
    return parameters


def layers_inside(model: nn.Module, name: str, *, opened: bool = False) -> list[str]:
    """Names of the layers that a module consists of: what is in or out of a readout as a whole.

    A linear map is one layer, with all that is inside it. So is any other module that owns
    parameters, unless it holds modules that do or is the model itself: then each parameter of its
    own is a layer. The name of a parameter stands for itself.

    Args:
        model: The model.
        name: The name of the module to look into, or of a parameter.
        opened: Whether to look into the module even if it is a linear map, since it only seems to
            be linear.
    """
    head = named_head(model, name)
    if isinstance(head, LoneParameter):
        return [name] if own_parameters(head) else []
    layers: list[str] = []
    inside_linear_maps: tuple[str, ...] = ()  # how names of modules inside linear maps begin
    for path, module in head.named_modules(prefix=name):
        if path.startswith(inside_linear_maps):
            continue
        if is_linear_map(module) and not (opened and path == name):
            layers.append(path)
            inside_linear_maps += (f"{path}.",)
        elif not path:
            layers += own_parameters(module)
        elif any(own_parameters(child) for child in module.modules() if child is not module):
            layers += [f"{path}.{parameter}" for parameter in own_parameters(module)]
        elif own_parameters(module):
            layers.append(path)
    return layers


def layer_of_parameter(model: nn.Module) -> dict[str, str]:
    """The name of the layer, as in `layers_inside`, that each parameter of a model belongs to."""
    parameters = [name for name, _ in model.named_parameters()]
    layers = set(layers_inside(model, ""))
    layer_by_parameter: dict[str, str] = {}
    for parameter in parameters:
        layer = parameter
        while layer not in layers and layer:
            layer = layer.rpartition(".")[0]
        layer_by_parameter[parameter] = layer
    return layer_by_parameter


def has_bias(head: nn.Module) -> bool:
    """Whether the head adds a bias."""
    return getattr(head, "bias", None) is not None


def head_weights(head: nn.Module, *, graph: bool = False) -> Tensor:
    """The head's weights as columns per output, bias last: (D or D+1, K).

    Args:
        head: A linear map.
        graph: Whether the graph to the head's parameters is kept.
    """
    weight, bias = head.weight, head.bias
    assert isinstance(weight, Tensor)
    columns = weight.flatten(1)
    if isinstance(bias, Tensor):
        columns = torch.cat([columns, bias[:, None]], dim=1)
    return columns.mT if graph else columns.detach().mT


def as_rows(head: nn.Module, tensor: Tensor) -> Tensor:
    """The head's input or output as rows: channels last, everything before them flattened."""
    if isinstance(head, _CONVOLUTIONS):
        tensor = tensor.movedim(channel_axis(head), -1)
    return tensor.reshape(-1, tensor.shape[-1])


def channel_axis(head: nn.Module) -> int:
    """Dimension of the channels, counted from the end so that inputs without a batch work too."""
    for spatial, convolution in enumerate(_CONVOLUTIONS, 1):
        if isinstance(head, convolution):
            return -1 - spatial
    return -1


def put_recorders(
    model: nn.Module,
    names: list[str],
    kind: type[StandIn] | type[ParameterRecorder] = Recorder,
) -> tuple[nn.Module, list[Any]]:
    """Put stand-ins in place of the named heads of a shadow, or recorders of their parameters.

    Args:
        model: A shadow, which is changed.
        names: Names of the heads. Two names of one module get one stand-in. A `ParameterRecorder`
            can have the name of a parameter, too.
        kind: The class of what is made for each head.

    Returns:
        The shadow (a stand-in, where the model itself is a head), and what was made.
    """
    stand_ins: dict[int, Any] = {}  # by the id of the head
    for name in names:
        head = named_head(model, name)
        if id(head) not in stand_ins:
            stand_ins[id(head)] = kind(head)
    if any("_orig_mod" in module._modules for module in model.modules()):
        for name in names:
            _bypass_compiled_parents(model, name)
    if issubclass(kind, ParameterRecorder):
        return model, list(stand_ins.values())  # these take no module's place
    visited_containers: set[int] = set()  # which two modules may share
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
                continue  # never called
            if id(child) in stand_ins and not isinstance(parent, StandIn):
                setattr(parent, child_name, stand_ins[id(child)])
        # A model may also call a head through a plain list, tuple or dictionary.
        for name, value in list(vars(parent).items()):
            if name not in MODULE_ATTRIBUTES and type(value) in (list, tuple, dict):
                vars(parent)[name] = _with_stand_ins(value, stand_ins, visited_containers)
    return stand_ins.get(id(model), model), list(stand_ins.values())


def _bypass_compiled_parents(model: nn.Module, name: str) -> None:
    """Let compiled modules around a head call the module inside, where a recorder now stands."""
    path = name.split(".")
    for depth in range(len(path)):
        module = model.get_submodule(".".join(path[:depth]))
        if "_orig_mod" in module._modules:
            vars(module)["forward"] = partial(_call_original, module)


def _call_original(compiled: nn.Module, *args: Any, **kwargs: Any) -> Any:
    original: Any = compiled._modules["_orig_mod"]
    return original(*args, **kwargs)


def _with_stand_ins(value: Any, stand_ins: dict[int, Any], visited: set[int]) -> Any:
    """A shadow's plain container with stand-ins in place of heads.

    Lists and dictionaries stay the same objects, since a model may pass values on in them.

    Args:
        value: A container, or an entry of one.
        stand_ins: The stand-ins by the ids of their heads.
        visited: Ids of lists and dictionaries that need no second visit; new ones are added.
    """
    if type(value) is tuple:
        entries = tuple(_with_stand_ins(entry, stand_ins, visited) for entry in value)
        unchanged = all(new is old for new, old in zip(entries, value, strict=True))
        return value if unchanged else entries
    if type(value) in (list, dict) and id(value) not in visited:
        visited.add(id(value))
        keys = range(len(value)) if type(value) is list else list(value)
        for key in keys:
            value[key] = _with_stand_ins(value[key], stand_ins, visited)
    return stand_ins.get(id(value), value)


@contextmanager
def with_leaves(heads: list[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Leaves of the graph in place of weights and biases, for the length of a context.

    A weight that is computed from other parameters (by a norm) is computed from their leaves. Heads
    that share a parameter share its leaf.
    """
    leaves: dict[int, nn.Parameter] = {}  # by the id of the parameter
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for head in heads:
        if has_plain_parameters(head):
            named = [(head, name, head._parameters[name]) for name in ("weight", "bias")]
        else:
            named = []
            for module in head.modules():
                named += [(module, name, p) for name, p in module._parameters.items()]
        for module, name, original in named:
            if original is None or not original.is_floating_point():
                continue
            if id(original) not in leaves:
                leaf = nn.Parameter(original.detach())
                with_attributes(leaf, original)
                leaves[id(original)] = leaf
            replaced.append((module, name, original))
    for module, name, original in replaced:
        module._parameters[name] = leaves[id(original)]
    try:
        yield list(leaves.values())
    finally:
        for module, name, original in replaced:
            module._parameters[name] = original


def refuse_calls(model: nn.Module, names: Iterable[str]) -> None:
    """Let the named linear maps of a shadow, which the first batch did not call, raise an error."""
    for name in names:
        vars(model.get_submodule(name))["forward"] = partial(_refuse_call, name)


def _refuse_call(name: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"The layer {name!r} is called here but was not called in the first batch, so it is not "
        "known whether it belongs to the readout. Name all readout layers, layer=[..., ...], or "
        "start with a batch that calls every layer."
    )
