"""Copies of a readout that can be compiled, exported and traced, for frozen modules and ensembles.

A `Readout` compares values, memory and counts of writes, and differentiates what follows its heads;
no tracer allows either. A `CopiedReadout` gives the same readings by a shadow or copy of the model
and looks at nothing:

* `PlainCopy` of a plain readout: the features are the heads' inputs, as in `tail.plain_reading`;
* `FeatureCopy` of a user's function;
* `LinearCopy` of any other readout whose output is linear in the heads' weights: the features are
  what the output becomes for weights that are the unit vectors, all at once under `torch.vmap`,
  which runs what comes before the heads once. Backward passes, as in `tail`, cannot be exported.

`uq.freeze()` takes one with weights of its own (`copied_readout`). An ensemble calls its readout,
which checks the model each time. Where it is compiled or exported, it uses a `TracedReadout`
instead, plain copies that compute with the model's own tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ..data.output_layout import OutputLayout
from ..models.calling import Inputs, Source
from ..models.modes import exporting
from ..models.shadow import independent, shadow, unwrapped
from ..models.threads import OfThread
from .checks import tolerance
from .columns import Columns
from .heads import (
    GraphRecorder,
    StandIn,
    SwappableHead,
    as_rows,
    has_bias,
    put_recorders,
    refuse_calls,
)
from .reading import Reading
from .readout import AnyReadout, Readout
from .tail import coarsest_rounding, side_by_side

__all__ = [
    "CopiedReadout",
    "FeatureCopy",
    "LinearCopy",
    "PlainCopy",
    "TracedReadout",
    "copied_readout",
]


class TracedReadout:
    """Inputs -> `Reading` for a plain readout, inside a graph, with the model's own weights.

    Compiled code runs a shadow, whose parameters are frozen aliases. An exporter names the weights
    of a graph by their identity, so that it gets a copy which holds the model's own tensors.

    Args:
        model: The user's model.
        readout: A plain readout of the model.
    """

    def __init__(self, model: nn.Module, readout: Readout) -> None:
        self._model = unwrapped(model)
        self._copy_to_compile = PlainCopy(shadow(self._model), readout)
        model_shadow = shadow(self._model)
        for copied, original in zip(model_shadow.modules(), self._model.modules(), strict=True):
            copied._parameters.update(original._parameters)
            copied._buffers.update(original._buffers)
        self._copy_to_export = PlainCopy(model_shadow, readout)
        run = self._copy_to_export.run
        names = {id(tensor): name for name, tensor in _named_tensors(run)}
        # What the copy, with recorders in it, calls the model's parameters and buffers.
        self._names_in_copy = [names[id(tensor)] for _, tensor in _named_tensors(self._model)]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One forward pass inside a tracer."""
        if not exporting():
            return self._copy_to_compile.read(args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._copy_to_export.read(args, kwargs)
        # A non-strict export puts stand-ins into the model while it runs: compute with these.
        tensors = [tensor for _, tensor in _named_tensors(self._model)]
        stand_ins = dict(zip(self._names_in_copy, tensors, strict=True))
        return self._copy_to_export.read(args, kwargs, stand_ins)


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    return [*module.named_parameters(), *module.named_buffers()]


class CopiedReadout(nn.Module):
    """Inputs -> `Reading` by a shadow or copy of the model, without a look at any value.

    Any number of threads may call it: each runs a shadow of its own that shares the copy's memory.
    In a graph the copy itself is run.

    Args:
        model: The shadow or copy, which becomes part of this module.
        source: How to call it.

    Attributes:
        run: The call of the model as a module.
        watch: The `FrozenNovelty` whose hooks are in `run`; None where nothing is watched.
    """

    def __init__(self, model: nn.Module, source: Source) -> None:
        super().__init__()
        self.run = _Run(_uncompiled(model), source)
        self.watch: Any = None
        self.renew()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One pass."""
        reading: Reading = self._running().read(args, kwargs)
        return reading

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One pass of this very copy."""
        raise NotImplementedError

    def watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Reading, Tensor]:
        """One pass, and the novelty of its samples, (N,)."""
        running = self._running()
        running.watch.begin()
        reading = running.read(args, kwargs)
        return reading, running.watch.finish(reading.output.shape[0])

    def watch_with(self, watch: nn.Module) -> None:
        """Put the hooks of a `FrozenNovelty` into the model."""
        self.watch = watch
        self.watch.put_hooks(self)
        self.renew()

    def module(self, name: str) -> nn.Module:
        """What runs in place of a module of the user's model: its copy, or a stand-in for it."""
        (uncompiled_name,) = _uncompiled_names([name])
        return self.run.model.get_submodule(uncompiled_name)

    def renew(self) -> None:
        """Forget the threads' shadows: tensors were replaced."""
        self._shadow: OfThread[Any] = OfThread(partial(shadow, self))

    def _put_stand_ins(self, readout: Readout, kind: type[StandIn]) -> list[Any]:
        """Put stand-ins in place of the readout's heads, as in `Readout`, and return them."""
        refuse_calls(self.run.model, _uncompiled_names(readout.uncalled))
        heads = _uncompiled_names(readout.heads)
        self.run.model, stand_ins = put_recorders(self.run.model, heads, kind)
        return stand_ins

    def _running(self) -> Any:
        """What to run: this very copy in a graph, else this thread's shadow of it."""
        if torch.compiler.is_compiling():
            return self
        return self._shadow()

    def _load_from_state_dict(self, *args: Any) -> None:
        self.renew()  # a state may be assigned
        super()._load_from_state_dict(*args)


class PlainCopy(CopiedReadout):
    """The copy for a plain readout, whose features are the heads' inputs.

    Args:
        model: The shadow or copy.
        readout: The readout of the model.

    Attributes:
        single: Whether there is one head.
        ones: Whether the readings leave out the column of ones of that head's bias.
    """

    def __init__(self, model: nn.Module, readout: Readout) -> None:
        super().__init__(model, readout.source)
        self._recorders: list[Any] = self._put_stand_ins(readout, GraphRecorder)
        self._run_in_tuple = (self.run,)  # found faster than a submodule
        self._is_linear_layer = isinstance(self._recorders[0].head, nn.Linear)
        self.single = len(readout.heads) == 1
        self.ones = self.single and has_bias(self._recorders[0].head)

    def read(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: dict[str, Tensor] | None = None,
    ) -> Reading:
        """One pass of this very copy.

        Args:
            args: Positional inputs.
            kwargs: Keyword inputs.
            tensors: Tensors to compute with in place of those of `run`, by their names there.
        """
        for recorder in self._recorders:
            recorder.calls.clear()
        if tensors is None:
            output = self.run(args, kwargs)
        else:
            output = functional_call(self.run, tensors, (args, kwargs))
        calls = [recorder.calls.pop() for recorder in self._recorders]
        return side_by_side(output, calls, [as_rows(call.head, call.input) for call in calls])

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The output and the features for a single head, in as little Python as possible."""
        running = self._running()
        recorder = running._recorders[0]
        recorder.calls.clear()
        output = running._run_in_tuple[0].forward(args, kwargs)
        x = recorder.calls.pop().input
        if self._is_linear_layer and x.ndim == 2:
            return output, x
        return output, as_rows(recorder.head, x)


class FeatureCopy(CopiedReadout):
    """The copy for features that a user's function gives.

    Args:
        model: The shadow or copy.
        readout: The readout of the model.
        targets: The number of targets in the fit.
    """

    def __init__(self, model: nn.Module, readout: AnyReadout, targets: int) -> None:
        super().__init__(model, readout.source)
        self._targets = targets

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One pass and one call of the function."""
        output = self.run(args, kwargs)
        function: Any = self.run.source.features
        features = function(self.run.model, *args, **kwargs)
        inner = torch.Size((features.shape[0], self._targets))
        return Reading(output, features, OutputLayout(output.shape, inner))


class LinearCopy(CopiedReadout):
    """The copy for any other readout whose output is linear in the heads' weights.

    Args:
        model: The shadow or copy.
        readout: The readout of the model.
        like: A reading of the readout. All readings have its layout.
        writes_in_place: Whether the model writes into tensors that it makes; see `_UnderVmap`.
    """

    order: Tensor | None

    def __init__(
        self, model: nn.Module, readout: Readout, like: Reading, *, writes_in_place: bool
    ) -> None:
        super().__init__(model, readout.source)
        self._heads: list[Any] = self._put_stand_ins(readout, SwappableHead)
        names = {module: name for name, module in self.run.named_modules()}
        self._weight_names = [f"{names[head]}.weights" for head in self._heads]
        self._writes_in_place = writes_in_place
        self._shared = readout.layout == "shared"
        for i, units in enumerate(_unit_weights(self._heads, joint=readout.layout == "joint")):
            self.register_buffer(f"units{i}", units, persistent=False)
        self._width = like.features.shape[-1]
        # The order is a buffer, which moves with the module.
        self._layout = replace(like.output_layout, order=None)
        self.register_buffer("order", like.output_layout.order, persistent=False)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One pass for all of these weights: the model's own, zeros, and the unit vectors."""

        def output_for(weights: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
            zero = None
            if self._writes_in_place:
                # A zero that depends on the weights has the hidden dimension of `vmap`.
                zero = weights[self._weight_names[0]][0, 0] * 0
            with _UnderVmap(zero) if self._writes_in_place or exporting() else nullcontext():
                output: Tensor = functional_call(self.run, weights, (args, kwargs))
                # No tensor may stay behind that has the hidden dimension.
                return output, () if self.watch is None else self.watch.take()

        current = [head.current_weights() for head in self._heads]
        # Unit vectors are made large, so that a constant beside them costs no digits in the
        # difference below. The range of float16 has no room for that.
        size = 1.0 if current[0].dtype == torch.float16 else 2.0**20
        weights = {}
        for i, (name, values) in enumerate(zip(self._weight_names, current, strict=True)):
            units = size * self.get_buffer(f"units{i}").to(values)
            weights[name] = torch.cat([values[None], units])  # (1 + U, D + 1, K)
        outputs, distances = torch.vmap(output_for)(weights)
        if self.watch is not None:
            self.watch.put([layer_distances[0] for layer_distances in distances])
        output_for_zeros = outputs[1]
        return self._reading(outputs[0], (outputs[2:] - output_for_zeros) / size)

    def _reading(self, output: Tensor, responses: Tensor) -> Reading:
        """The reading for the output's responses (D + H, *output) to unit weights."""
        order = self.order
        inner = self._layout.of_output(output).inner
        layout = OutputLayout(output.shape, inner, self._layout.axis, order)
        if order is not None:
            responses = responses.flatten(2)[..., order]
        columns = responses.reshape(len(responses), *inner).movedim(layout.axis, -1)
        # (D + H, M, K), also for a single input without a dimension of rows
        columns = columns.unsqueeze(1) if columns.ndim == 2 else columns.flatten(1, -2)
        columns = columns[..., 0].mT if self._shared else columns.permute(1, 2, 0)
        features = columns[..., : self._width]
        bias_counts = columns[..., self._width :]
        if not bias_counts.shape[-1]:
            return Reading(output, features, layout)
        return Reading(output, features, layout, bias_counts)


class _Run(nn.Module):
    """The call of a model as a module, whose tensors `functional_call` can replace."""

    def __init__(self, model: nn.Module, source: Source) -> None:
        super().__init__()
        self.model = model
        self.source = source

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The output."""
        if torch.compiler.is_compiling():
            return self.source.traced(self.model, args, kwargs)
        return self.source.run(self.model, args, kwargs)


class _UnderVmap(TorchFunctionMode):
    """A mode for a model's pass under `vmap`, in an export or where the model writes in place.

    Inputs of linear layers with more than two dimensions are flattened to rows, and heads' outputs
    are concatenated by a sum of padded tensors: in an export torch would otherwise fix their sizes.

    A model that writes into tensors that it makes can run under `vmap` only if these have its
    hidden dimension: they get it by adding a zero that has it. Other models must not get it: torch
    has no batching rule for recurrent layers, whose first state is such a tensor.

    Args:
        zero: A zero with the hidden dimension; None to leave the tensors as the model makes them.
    """

    functions = (torch.zeros, torch.full, torch.empty, torch.zeros_like, torch.empty_like)
    methods = (Tensor.new_zeros, Tensor.new_full, Tensor.new_empty)
    concatenations = (torch.cat, torch.concat, torch.concatenate)

    def __init__(self, zero: Tensor | None) -> None:
        super().__init__()
        self.zero = zero

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and args[0].ndim > 2:
            x = args[0]
            rows = func(x.flatten(0, -2), *args[1:], **kwargs)
            return rows.reshape(*x.shape[:-1], rows.shape[-1])
        if func in self.concatenations and exporting():
            return _concatenated(*args, **kwargs)
        result = func(*args, **kwargs)
        is_new = func in (*self.functions, *self.methods)
        if self.zero is not None and is_new and result.is_floating_point():
            return result + self.zero.to(result.dtype)
        return result


def _concatenated(
    tensors: Sequence[Tensor], dim: int = 0, *, axis: int | None = None, **options: Any
) -> Tensor:
    """`torch.cat` in operations whose sizes stay free in an export under `vmap`.

    Args:
        tensors: The tensors. Without the hidden dimension of `vmap` they go to `torch.cat` itself.
        dim: The dimension along which they are concatenated.
        axis: Another name of `dim`.
        options: Other options of `torch.cat`.
    """
    if axis is not None:
        dim = axis
    if options or not any(map(torch._C._functorch.is_batchedtensor, tensors)):
        return torch.cat(list(tensors), dim, **options)
    dim = dim % tensors[0].ndim
    dimensions_after = tensors[0].ndim - 1 - dim
    sizes = [tensor.shape[dim] for tensor in tensors]
    padded = []
    for i, tensor in enumerate(tensors):
        # The last dimension comes first in a padding.
        padding = [0, 0] * dimensions_after + [sum(sizes[:i]), sum(sizes[i + 1 :])]
        padded.append(nn.functional.pad(tensor, padding))
    return torch.stack(padded).sum(0)


def copied_readout(
    model: nn.Module, readout: AnyReadout, targets: int, probe: Inputs | None
) -> CopiedReadout:
    """The copy for a readout, with weights of its own.

    Args:
        model: The user's model.
        readout: The readout of the model.
        targets: The number of targets in the fit.
        probe: Inputs to try the copy with; None if there are none.

    Raises:
        ValueError: No graph gives the features of this readout.
    """
    model_shadow = shadow(model)
    if not isinstance(readout, Readout):
        return FeatureCopy(independent(model_shadow), readout, targets)
    if readout.kind == "plain" and readout.linear:
        return PlainCopy(independent(model_shadow), readout)
    heads = ", ".join(name or "the model itself" for name in readout.heads)
    if not readout.linear or readout.kind == "parameters":
        obstacle = (
            "is not a linear layer" if readout.linear else "does not enter the output linearly"
        )
        obstacle += (
            " alone (to freeze only the part of a linear layer, fit with layer= set to that layer)."
        )
        raise ValueError(_CANNOT_BE_FROZEN.format(heads, obstacle))
    if probe is None:
        raise ValueError(
            "This fit keeps no inputs to test the frozen readout with (it was loaded from a file "
            "written with probes=False, or its inputs cannot be copied). Fit again, or save with "
            "probes."
        )
    args, kwargs = probe
    expected = readout.read(args, kwargs).detached()
    reason = ""
    # True is tried second, since it may run the whole model once for each unit vector.
    for writes_in_place in (False, True):
        copied = LinearCopy(
            independent(model_shadow), readout, expected, writes_in_place=writes_in_place
        )
        try:
            if _agrees(copied(args, kwargs), expected, list(copied.parameters())):
                return copied
            reason = "it gives other features there."
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:198] + "."
    obstacle = f"is followed by operations that torch.vmap does not support: {reason}"
    raise ValueError(_CANNOT_BE_FROZEN.format(heads, obstacle))


_CANNOT_BE_FROZEN = (
    "This model cannot be frozen: its readout ({}) {} Let the model return the plain output of a "
    "linear layer, fit that model, and change units or sum afterwards; or pass features=."
)


def _agrees(reading: Reading, expected: Reading, parameters: list[nn.Parameter]) -> bool:
    """Whether a copy reads what the readout does, to the rounding of the coarsest dtype."""
    tensors = [expected.output, expected.features, *parameters]
    digits = tolerance(coarsest_rounding(t for t in tensors if t.is_floating_point()))
    pairs = [(reading.output, expected.output), (reading.features, expected.features)]
    for values, expected_values in pairs:
        if values.shape != expected_values.shape:
            return False
        allowed = digits * expected_values.abs().max()
        if not bool(((values - expected_values).abs() <= allowed).all()):
            return False
    return True


def _unit_weights(heads: list[SwappableHead], *, joint: bool) -> list[Tensor]:
    """For each head the weights (U, D + 1, K) of U passes: zeros, then one unit vector each.

    The unit vectors are those of all columns of the features, then, unless the layout is joint, one
    for each head that lacks a bias: what the column of that bias would be, as in
    `Reading.bias_counts`.
    """
    columns = Columns([head.head for head in heads], joint=joint)
    like = heads[0].current_weights()
    zeros = like.new_zeros(1, columns.width)
    changes = torch.cat([zeros, torch.eye(columns.width).to(like)])  # (1 + D, D)
    heads_without_bias = [i for i, head in enumerate(heads) if not has_bias(head.head)]
    extra_passes = 0 if joint else len(heads_without_bias)
    weights_by_head = []
    for i, head in enumerate(heads):
        targets = 1 if joint else head.current_weights().shape[1]
        units = torch.stack(
            [columns.change_of_head(change[:, None].expand(-1, targets), i) for change in changes]
        )
        if i in heads_without_bias:
            units = nn.functional.pad(units, (0, 0, 0, 1))
        extra = like.new_zeros(extra_passes, *units.shape[1:])
        if i in heads_without_bias and not joint:
            extra[heads_without_bias.index(i), -1] = 1
        weights_by_head.append(torch.cat([units, extra]))
    return weights_by_head


def _uncompiled_names(names: Sequence[str]) -> list[str]:
    """Names of modules as they would be if nothing were compiled."""
    return [name.replace("._orig_mod", "").replace("_orig_mod.", "") for name in names]


def _uncompiled(model: nn.Module) -> nn.Module:
    """The model, changed in place, with the original modules instead of compiled ones."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            setattr(module, name, unwrapped(child) if "_orig_mod" in child._modules else child)
    return model
