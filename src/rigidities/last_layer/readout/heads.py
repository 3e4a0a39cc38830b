"""Linear maps inside a model: which modules count, how their rows look, a recorder for them."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

from ...models.shadow import with_attributes
from ...posterior.gram import with_ones

_OWN = frozenset(vars(nn.Module()))
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CERTAIN = (nn.Linear, NonDynamicallyQuantizableLinear, *_CONVOLUTIONS)
_NORMS = ("_WeightNorm", "_SpectralNorm", "WeightNorm", "SpectralNorm")
"""Torch's own classes for normalised weights, of the new kind and the old."""


class Call(NamedTuple):
    """One call of a head: its input, its output, and the zero added to it where it was probed.

    Attributes:
        versions: of input and output when they were recorded, to notice in-place changes.
        leaves: the parameters that a `Holder` gave the head, by which to differentiate.
    """

    head: nn.Module
    input: Tensor
    output: Tensor
    probe: Tensor | None
    versions: tuple[int, int] = (0, 0)
    leaves: tuple[Tensor, ...] = ()

    @property
    def inputs(self) -> Tensor:
        """Input rows (R, D)."""
        if self.input._version != self.versions[0]:
            raise ValueError(
                "The readout layer's input is overwritten in place after the layer has used it, "
                "so its features are lost. Let the forward pass write to a copy."
            )
        if self.input.ndim == 2 and isinstance(self.head, nn.Linear):
            return self.input
        return as_rows(self.head, self.input)

    @property
    def rows(self) -> Tensor:
        """The same, followed by a column of ones where the head has a bias."""
        return with_ones(self.inputs) if has_bias(self.head) else self.inputs


class Recorder(nn.Module):
    """Stands in for a head, calls it, and keeps what went in and came out.

    Attributes:
        calls: one entry per call since `reset`.
        probing: add a zero that requires a gradient to each output, so that the derivative of
            the model's output by the head's output can be taken.
        change: (D or D+1, K) added to the output as if to the head's weights (and bias), for
            checks of linearity: only where these are no parameters that can be exchanged.
        exchanged: the head's own parameters, while changed ones stand in their place.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.calls: list[Call] = []
        self.probing = False
        self.change: Tensor | None = None
        self.exchanged: dict[str, nn.Parameter] = {}

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The head's output, recorded."""
        # For every batch: a look into the dictionary is faster than nn.Module's `self.head`.
        head: Any = self._modules["head"]
        output: Tensor = head(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        if output.is_complex() or output.is_nested:
            _refuse_kind(output)
        if self.change is not None:
            rows = as_rows(head, x)
            rows = with_ones(rows) if has_bias(head) else rows
            shift = rows @ self.change.to(x)
            axis = channel_axis(head)
            output = output + shift.reshape(output.movedim(axis, -1).shape).movedim(-1, axis)
        probe = None
        if self.probing:
            probe = torch.zeros_like(output, requires_grad=True)
            output = output + probe
        self.calls.append(Call(head, x, output, probe, (x._version, output._version)))
        return output

    def reset(self, *, probing: bool = False, change: Tensor | None = None) -> None:
        """Forget the calls and set what the next ones do."""
        if self.exchanged:
            self.head._parameters.update(self.exchanged)
            self.exchanged = {}
        if change is not None and exchangeable(self.head):
            self._exchange(change)
            change = None
        self.calls.clear()
        self.probing = probing
        self.change = change

    def _exchange(self, change: Tensor) -> None:
        """Let the head itself, and whatever else reads its weights, compute with changed ones."""
        columns = (weights(self.head).to(torch.float64) + change).mT  # (K, D or D+1)
        moved = {"weight": columns}
        if has_bias(self.head):
            moved = {"weight": columns[:, :-1], "bias": columns[:, -1]}
        for name, values in moved.items():
            parameter = self.head.get_parameter(name)
            self.exchanged[name] = parameter
            new = values.reshape(parameter.shape).to(parameter)
            changed = nn.Parameter(new, requires_grad=False)
            with_attributes(changed, parameter)
            self.head._parameters[name] = changed

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # how to be copied is no matter of the head's
                raise
            return getattr(super().__getattr__("head"), name)


class Keeper(Recorder):
    """Stands in for a head; `kept` is what went in and came out of each call, without a look."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__(head)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The head's output."""
        output: Tensor = self.head(*args, **kwargs)
        self.kept.append((args[0] if args else next(iter(kwargs.values())), output))
        return output


class Weighed(Recorder):
    """Stands in for a head and computes it with weights of a buffer, which a pass may swap."""

    weights: Tensor
    """(D + 1, K), a bias last, whether the head has one or not."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__(head)
        self.register_buffer("weights", self.own(), persistent=False)

    def own(self) -> Tensor:
        """The head's."""
        own = weights(self.head)
        return own if has_bias(self.head) else functional.pad(own, (0, 0, 0, 1))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The output for the buffer's weights."""
        x, axis = args[0] if args else next(iter(kwargs.values())), channel_axis(self.head)
        given, shape = self.weights.to(x), x.movedim(axis, -1).shape[:-1]
        rows = as_rows(self.head, x) @ given[:-1] + given[-1]  # a flat product keeps shapes free
        return rows.reshape(*shape, given.shape[-1]).movedim(-1, axis)  # of no rows too


class Mark(NamedTuple):
    """A zero that the graph knows, added to what one call of a module returned.

    Attributes:
        leaf: the zero.
        node: of the graph, by which what was returned can be told; None without a graph.
        numel: how many numbers the call returned.
        version: how often they had been written to when they were returned.
    """

    leaf: Tensor
    node: Any
    numel: int
    version: int


class Marker(Recorder):
    """Stands in for a head while a readout is searched: marks the graph and keeps no values.

    The mark is one number, added in place: unless probing, for a model that differentiates itself.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__(head)
        self.marks: list[Mark] = []

    def reset(self, *, probing: bool = False, change: Tensor | None = None) -> None:
        """Forget the marks and set what the next ones do."""
        super().reset(probing=probing, change=change)
        self.marks.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The head's output with a zero added that the graph knows."""
        return tree_map_only(Tensor, self._marked, self.head(*args, **kwargs))

    def _marked(self, output: Tensor) -> Tensor:
        if not output.is_floating_point() and not output.is_complex():
            return output
        zero = output.new_zeros(()).requires_grad_()
        marked = output + zero if self.probing else output.add_(zero)
        self.marks.append(Mark(zero, marked.grad_fn, marked.numel(), marked._version))
        return marked


class Holder(Recorder):
    """Stands beside a module, called or not, and gives it other parameters for a pass.

    Only those that the module itself owns. Probing, they are leaves of the graph; `change` is
    (P, 1), one parameter after the other.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__(head)
        self.own = own_parameters(head)
        self.reset()

    def reset(self, *, probing: bool = False, change: Tensor | None = None) -> None:
        """Put parameters in place: the model's own, unless some are asked for."""
        given = dict(self.own)
        if change is not None:
            parts = torch.split(change.flatten(), [p.numel() for p in given.values()])
            pairs = zip(given.items(), parts, strict=True)
            given = {n: nn.Parameter(p + d.reshape(p.shape).to(p), False) for (n, p), d in pairs}
        if probing:
            given = {name: nn.Parameter(p.detach()) for name, p in given.items()}
        for name, parameter in given.items():
            setattr(self.head, name, with_attributes(parameter, self.own[name]))
        first = next(iter(given.values()))
        self.calls = [Call(self.head, first, first, None, leaves=tuple(given.values()))]


def _refuse_kind(output: Tensor) -> None:
    """Say why what a head gave are no rows of real numbers."""
    if output.is_complex():
        raise ValueError(
            "The readout layer's weights are complex numbers, by which no derivative is taken. "
            "Pass features=: of the real part of W h + b they are h.real, h.imag and a column of "
            "ones, lambda m, *inputs: torch.cat([h.real, h.imag, ones], 1)."
        )
    raise ValueError(
        "The readout layer is called with a nested tensor, whose rows cannot be told apart "
        "here. Let the model take its rows before that layer (h.values() of a jagged one), or "
        "pass features=."
    )


def is_linear_map(module: nn.Module) -> bool:
    """Whether the module computes W x + b row by row: nn.Linear or a 1 x 1 convolution."""
    if isinstance(module, nn.Linear):
        return True
    return (
        isinstance(module, _CONVOLUTIONS)
        and module.groups == 1
        and {*module.kernel_size, *module.stride} == {1}
        and module.padding in ("same", "valid", *(tuple([0] * n) for n in (1, 2, 3)))
    )


def is_certain(head: nn.Module) -> bool:
    """Whether a linear map is one by its class alone: torch's own forward, and no hooks.

    Of any other (a subclass, a hooked or a reparametrised layer) only its values can tell.
    """
    hooked = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
    return type(head) in _CERTAIN and not hooked


def exchangeable(head: nn.Module) -> bool:
    """Whether weight and bias of a linear map are plain parameters of its own."""
    own = head._parameters
    names = ["weight", "bias"] if has_bias(head) else ["weight"]
    return all(type(own.get(name)) is nn.Parameter for name in names)


def is_free(head: nn.Module) -> bool:
    """Whether all entries of a linear map's weight can move.

    They can where the weight is a parameter, and behind a weight norm or a spectral norm, whose
    features are those of the effective weight. Pruned weights cannot; of other parametrisations
    nothing is known.
    """
    if parametrize.is_parametrized(head):
        lists = head.parametrizations.values()  # type: ignore[operator]
        return all(type(one).__name__ in _NORMS for several in lists for one in several)
    if "weight" in head._parameters:
        return "bias" in head._parameters
    return any(type(hook).__name__ in _NORMS for hook in head._forward_pre_hooks.values())


def is_as_it_seems(calls: list[Call]) -> bool:
    """Whether what linear maps returned is W f + b for what went in, to rounding."""
    for call in calls:
        head, returned = call.head, call.output.detach().to(torch.float64)
        rows, columns = call.rows.detach().to(torch.float64), weights(head).to(torch.float64)
        if rows.shape[1] != len(columns):
            return False
        expected, actual = rows @ columns, as_rows(head, returned)
        if expected.shape != actual.shape:
            return False
        terms = rows.abs() @ columns.abs()  # (R, K), of which rounding is a share
        rounding = max(torch.finfo(t.dtype).eps for t in (call.input, call.output))
        if not bool(((actual - expected).abs() <= 8 * rounding * terms).all()):
            return False
    return True


def linear_maps(model: nn.Module) -> dict[str, nn.Module]:
    """Linear maps by name, in order of definition."""
    return {name: module for name, module in model.named_modules() if is_linear_map(module)}


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters that a module owns itself, by name."""
    named = module._parameters.items()
    return {n: p for n, p in named if p is not None and p.is_floating_point() and p.numel()}


def owners(model: nn.Module, name: str, *, opened: bool = False) -> list[str]:
    """The modules inside one that own parameters; what is inside a linear map is part of it.

    Unless the module is itself one of those that only seem linear, and `opened`.
    """
    found, maps = list[str](), tuple[str, ...]()
    for inner, module in model.get_submodule(name).named_modules(prefix=name):
        linear = is_linear_map(module) and not (opened and inner == name)
        if not inner.startswith(maps) and (linear or own_parameters(module)):
            found.append(inner)
            maps += (f"{inner}.",) if linear else ()
    return found


def has_bias(head: nn.Module) -> bool:
    """Whether the head adds a bias."""
    return getattr(head, "bias", None) is not None


def weights(head: nn.Module) -> Tensor:
    """The head's weights as columns per output, bias last: (D or D+1, K)."""
    weight, bias = head.weight, head.bias
    assert isinstance(weight, Tensor)
    columns = weight.detach().flatten(1)
    if isinstance(bias, Tensor):
        columns = torch.cat([columns, bias.detach()[:, None]], dim=1)
    return columns.mT


def as_rows(head: nn.Module, tensor: Tensor) -> Tensor:
    """The head's input or output as rows: channels last, everything before them flattened."""
    if isinstance(head, _CONVOLUTIONS):
        tensor = tensor.movedim(channel_axis(head), -1)
    return tensor.reshape(-1, tensor.shape[-1])


def record(
    model: nn.Module, names: list[str], make: type[Recorder] = Recorder
) -> tuple[nn.Module, list[Any]]:
    """Put recorders in place of the named heads of a shadow; returns it with the recorders."""
    recorders = {id(head): make(head) for head in map(model.get_submodule, names)}
    for name in names:
        parts = name.split(".")
        for one in (model.get_submodule(".".join(parts[:i])) for i in range(len(parts))):
            if "_orig_mod" in one._modules:  # compiled: let it call what now stands inside
                vars(one)["forward"] = lambda *a, _of=one, **k: _of._modules["_orig_mod"](*a, **k)
    if issubclass(make, Holder):
        return model, list(recorders.values())
    seen: set[int] = set()  # containers, which two modules may share
    for parent in list(model.modules()):
        for child, module in list(parent._modules.items()):
            if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
                continue  # never called
            if id(module) in recorders and not isinstance(parent, Recorder):
                setattr(parent, child, recorders[id(module)])
        for name, value in list(vars(parent).items()):
            if name not in _OWN and type(value) in (list, tuple, dict):
                vars(parent)[name] = _exchanged(value, recorders, seen)
    return recorders.get(id(model), model), list(recorders.values())


def _exchanged(value: Any, recorders: dict[int, Recorder], seen: set[int]) -> Any:
    """A shadow's plain container with recorders in place of heads, which it may call there.

    Lists and dictionaries stay the same objects, since a model may pass values on in them.
    """
    if type(value) is tuple:
        entries = tuple(_exchanged(entry, recorders, seen) for entry in value)
        same = all(new is old for new, old in zip(entries, value, strict=True))
        return value if same else entries
    if type(value) in (list, dict) and id(value) not in seen:
        seen.add(id(value))
        places = range(len(value)) if type(value) is list else list(value)
        for place in places:
            value[place] = _exchanged(value[place], recorders, seen)
    return recorders.get(id(value), value)


def guard(model: nn.Module, names: list[str]) -> None:
    """Let the named linear maps of a shadow, which were never called, refuse to be."""
    for name in names:
        vars(model.get_submodule(name))["forward"] = partial(_refuse, name)


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"The layer {name!r} is called here but was not in the first batch, so it is unknown "
        "whether it belongs to the readout. Name all readout layers, layer=[..., ...], or begin "
        "with a batch that calls every layer."
    )


def channel_axis(head: nn.Module) -> int:
    """Dimension of the channels, counted from the end so that inputs without a batch work too."""
    for spatial, convolution in enumerate(_CONVOLUTIONS, 1):
        if isinstance(head, convolution):
            return -1 - spatial
    return -1
