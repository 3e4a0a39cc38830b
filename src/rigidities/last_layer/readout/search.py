"""Finding the readout: the last linear maps on the way to the output.

`find_heads` runs a shadow of the model once, with a mark in the autograd graph at every call of a
linear map, and walks the graph back from the output. The first marks that it meets are the heads.
Other parameters that it meets may belong to the readout too; `Trials` change them at random, and
the outputs tell whether they act linearly and apart from the heads (`_completed`). `named_heads`
does the same for modules that a user names by `layer=`. Both return a `FoundReadout`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from posixpath import commonpath
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...models.directional import normal_like
from ...models.shadow import Watch, shadow, unwrapped
from .heads import (
    Marker,
    ParameterRecorder,
    Recorder,
    as_rows,
    head_weights,
    linear_maps,
    own_parameters,
    parameter_owners,
    put_recorders,
)
from .tail import GraphsKept, coarsest_rounding
from .unregistered import Unregistered

Run = Callable[[nn.Module], Tensor]
"""Calls a model on the batch and returns the output tensor."""

LARGEST_UNASKED = 1 << 28
"""Bytes of a first batch's derivatives, or of their Gram matrix, up to which modules that are not
linear maps join the readout without being named."""

_BENDING = frozenset(
    f"{name}Backward0"
    for name in (
        *("Relu", "LeakyRelu", "Elu", "Celu", "Gelu", "Silu", "Mish", "Hardswish", "Hardsigmoid"),
        *("Hardtanh", "Tanh", "Sigmoid", "LogSigmoid", "Softplus", "Softmax", "LogSoftmax"),
        *("Exp", "Log", "Sin", "Cos", "Sqrt", "Pow", "Abs", "Erf", "Clamp"),
    )
)
"""Names of graph nodes that apply a nonlinear function to their one input."""

_ORDERLY = frozenset(
    f"{name}Backward{number}"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Select")
    for number in range(3)
) | {"SliceBackward0"}
"""Names of graph nodes that keep the order of numbers, unless they drop some."""


@dataclass(frozen=True)
class MarkedPass:
    """What one pass of a model showed in which every call of some modules was marked.

    Attributes:
        output: The model's output, without a graph.
        renewed: Attributes that the pass set; see `Watch`.
        returned: The name of the module whose only call returned the output, perhaps reshaped;
            None if there is no such module.
    """

    output: Tensor
    renewed: frozenset[str]
    returned: str | None


@dataclass(frozen=True)
class FoundReadout:
    """The readout heads, by name, and what the search saw beside them.

    Attributes:
        heads: Names of the modules.
        later: Parameters that act between the heads and the output, nearest to the output first.
        silent: Linear maps that the batch did not call, of which nothing is known.
        marked_pass: The pass that the heads were found with.
        case: The case to begin with. It is `parameters` where heads may be any modules.
        left_out: Modules that are not heads although the output is linear in them, each with the
            reason.
    """

    heads: list[str]
    later: list[str]
    silent: list[str]
    marked_pass: MarkedPass
    case: str = "plain"
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def is_returned(self) -> bool:
        """Whether the model returns what its one head gave, whatever the head's weights are."""
        return self.heads == [self.marked_pass.returned]


def find_heads(model: nn.Module, run: Run) -> FoundReadout:
    """The last linear maps on the way to the output.

    Every linear map of a shadow is marked in one forward pass; the autograd graph is then walked
    back from the output, stopping at the first mark on each path. A map that also feeds another
    one found (through attention weights, a skip connection) is not a last one. Other parameters
    that are met on the way may belong to the readout too: see `_completed`.

    Args:
        model: The user's model.
        run: Calls a model on the first batch.

    Raises:
        ValueError: No linear map reaches the output, or parameters that the model does not
            register act after all of them.
    """
    names = list(linear_maps(unwrapped(model)))
    twin = shadow(model)
    parameter_names: dict[int, str] = {}  # by id
    for name, parameter in twin.named_parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()  # of the alias, not of the user's parameter
            parameter_names[id(parameter)] = name
    unregistered = Unregistered(unwrapped(model), twin)
    with unregistered.shown():
        marked = _run_marked(run, twin, names)
    walk = _walk_back([marked.output.grad_fn], marked.module_of_mark)
    unregistered.refuse(walk.leaves.values())
    later = [parameter_names[leaf] for leaf in walk.leaves if leaf in parameter_names]
    if not walk.nodes_before:
        advice = nearest_parameters(model, later)
        raise ValueError(_nothing_found(type(model).__name__, names, advice))
    marked_maps = zip(names, marked.markers, strict=True)
    readout = FoundReadout(
        heads=[names[i] for i in _last(walk.nodes_before, marked.module_of_mark)],
        later=later,
        silent=[name for name, marker in marked_maps if not marker.marks],
        marked_pass=marked.summary,
    )
    beside = _parameters_beside(marked, walk, parameter_names, readout.heads)
    if not beside:
        return readout
    with torch.enable_grad():  # for models that differentiate themselves
        return _completed(model, run, readout, beside, marked.output.numel())


def named_heads(model: nn.Module, names: list[str], run: Run) -> FoundReadout:
    """The heads that a user means by the names of some modules.

    Linear maps are taken as they are. Other modules are taken with all parameters inside them if
    the output is linear in all of these together. Otherwise the last modules inside on the way to
    the output are taken, as in a search.

    Args:
        model: The user's model.
        names: Names of modules that own parameters, or hold such modules.
        run: Calls a model on the first batch.
    """
    inner_model = unwrapped(model)
    owners: list[str] = []
    for name in names:
        owners += parameter_owners(inner_model, name)
    heads = list(dict.fromkeys(owners))
    if heads != names and not _is_affine_in_modules(model, heads, run):
        marked = _run_marked(run, shadow(model), heads)
        walk = _walk_back([marked.output.grad_fn], marked.module_of_mark)
        last = _last(walk.nodes_before, marked.module_of_mark)
        if last:
            heads = [heads[i] for i in last]
    # Recorders stand in for linear maps alone, so nothing else is marked here.
    all_linear = set(heads) <= set(linear_maps(inner_model))
    marked = _run_marked(run, shadow(model), heads if all_linear else [])
    called = any(marker.marks for marker in marked.markers)
    case = "plain" if called else "parameters"
    return FoundReadout(heads, later=[], silent=[], marked_pass=marked.summary, case=case)


def _is_affine_in_modules(model: nn.Module, modules: list[str], run: Run) -> bool:
    """Whether the output is affine in all parameters of some modules together."""
    trials = Trials(model, run, heads=[], modules=modules)
    parameters: list[str] = []
    for module in modules:
        parameters += trials.parameters_of(module)
    return trials.is_affine(parameters)


# --- one marked pass, and the walk through its graph ---------------------------------------------


class _Marked(NamedTuple):
    """A pass of a shadow with a mark at every call of some modules.

    Attributes:
        markers: The markers of the modules, in the order of their names.
        module_of_mark: The number of the module by the id of each mark's leaf.
        output: The model's output, with its graph.
        summary: What is kept of the pass.
    """

    markers: list[Marker]
    module_of_mark: dict[int, int]
    output: Tensor
    summary: MarkedPass


def _run_marked(run: Run, twin: nn.Module, names: list[str]) -> _Marked:
    """Run a shadow with a mark at every call of some modules.

    Args:
        run: Calls a model on the first batch.
        twin: The shadow, whose modules are exchanged for markers.
        names: Names of the modules.
    """
    twin, markers = put_recorders(twin, names, Marker)
    before = Watch(twin, ignored=Marker)
    with torch.enable_grad():
        try:
            # Nothing is kept for a backward pass: it takes no more memory than without gradients.
            with saved_tensors_hooks(lambda _: None, cast("Any", lambda _: None)):
                output = run(twin)
        except Exception:  # a model that differentiates itself: torch takes no None for a tensor
            for marker in markers:
                marker.reset(probing=True)
            output = run(twin)
    module_of_mark: dict[int, int] = {}
    for number, marker in enumerate(markers):
        for mark in marker.marks:
            module_of_mark[id(mark.leaf)] = number
    returned = _returned(output, markers)
    summary = MarkedPass(
        output=output.detach(),
        renewed=frozenset(before.renewed(Watch(twin, ignored=Marker))),
        returned=None if returned is None else names[returned],
    )
    return _Marked(markers, module_of_mark, output, summary)


def _returned(output: Tensor, markers: list[Marker]) -> int | None:
    """The number of the module whose only call returned the output; None if there is none.

    The graph shows it: from the output back to what was returned there are only nodes that reshape.
    This holds for any weights, as long as the model takes the same path. Every later pass is
    compared bit by bit.
    """
    module_of_node: dict[Any, int] = {}
    for number, marker in enumerate(markers):
        if len(marker.marks) == 1:
            module_of_node[marker.marks[0].node] = number
    node = output.grad_fn
    while node is not None and node not in module_of_node and node.name() in _ORDERLY:
        node = node.next_functions[0][0]
    if node is None or node not in module_of_node:
        return None
    number = module_of_node[node]
    mark = markers[number].marks[0]
    # A view shares the count of writes with its base, so a write without a graph shows there.
    if mark.numel != output.numel() or mark.version != output._version:
        return None
    return number


class _Walk(NamedTuple):
    """What a walk back through a graph has met.

    Attributes:
        nodes_before: For each module whose mark was met, by number, the nodes before it.
        leaves: The other leaves by id, nearest to the output first.
    """

    nodes_before: dict[int, list[Any]]
    leaves: dict[int, Tensor]


def _walk_back(
    start: list[Any],
    module_of_mark: dict[int, int],
    *,
    through: bool = False,
    bending: Collection[str] = (),
) -> _Walk:
    """Walk a graph back, breadth first, up to the first mark on each path.

    Args:
        start: The nodes to begin with.
        module_of_mark: The number of a module by the id of its mark's leaf.
        through: Whether to go on behind marks.
        bending: Names of nonlinear nodes, at which the walk stops.
    """
    nodes_before: dict[int, list[Any]] = {}
    leaves: dict[int, Tensor] = {}
    visited: set[Any] = set()
    queue = deque(start)
    while queue:
        node = queue.popleft()
        if node is None or node in visited:
            continue
        visited.add(node)
        children = [child for child, _ in node.next_functions if child is not None]
        # Only nodes that accumulate the gradient of a leaf have a variable.
        variables = [getattr(child, "variable", None) for child in children]
        leaves_here = [variable for variable in variables if variable is not None]
        modules = [module_of_mark[id(leaf)] for leaf in leaves_here if id(leaf) in module_of_mark]
        for module in modules:
            nodes_before.setdefault(module, []).extend(children)
        if through or not modules:
            for leaf in leaves_here:
                leaves.setdefault(id(leaf), leaf)
            if node.name() not in bending:
                queue.extend(children)
    return _Walk(nodes_before, leaves)


def _last(nodes_before: dict[int, list[Any]], module_of_mark: dict[int, int]) -> list[int]:
    """The numbers of the modules met that feed no other of them.

    All of them, if each feeds another (through calls in turn).
    """
    feeding: set[int] = set()
    for module, nodes in nodes_before.items():
        fed_by = _walk_back(nodes, module_of_mark, through=True).nodes_before
        feeding |= set(fed_by) - {module}
    last = set(nodes_before) - feeding
    return sorted(last or nodes_before)


def _parameters_beside(
    marked: _Marked, walk: _Walk, parameter_names: dict[int, str], heads: list[str]
) -> list[str]:
    """Names of parameters that reach the output past the heads, through no known nonlinearity.

    A parameter that feeds a head does not belong to the readout, even if it reaches the output past
    the head as well (a skip connection). A head's own parameters feed it too; they count where the
    model uses them outside the head's call.

    Args:
        marked: The pass of the search.
        walk: The walk from its output to the first marks.
        parameter_names: The names of the parameters by id.
        heads: The names of the heads.
    """
    straight = _walk_back([marked.output.grad_fn], marked.module_of_mark, bending=_BENDING)
    reached = [leaf for leaf in straight.leaves if leaf in parameter_names]
    if not reached or not bool(torch.isfinite(marked.output.detach()).all()):
        return []
    before_heads: list[Any] = []
    for nodes in walk.nodes_before.values():
        before_heads += nodes
    feeding = _walk_back(before_heads, marked.module_of_mark, through=True).leaves
    beside = []
    for leaf in reached:
        name = parameter_names[leaf]
        if _module_of(name) in heads or leaf not in feeding:
            beside.append(name)
    return beside


def _module_of(parameter: str) -> str:
    """The name of the module that owns a parameter."""
    return parameter.rpartition(".")[0]


# --- trials: does the output depend linearly on heads and parameters? ----------------------------


class Trials:
    """Outputs of a model for large random changes of some heads and of other parameters.

    Args:
        model: The user's model.
        run: Calls a model on the first batch.
        heads: Linear maps, each changed as a whole, so that reparametrised ones can be.
        modules: Other modules, of which each parameter can be changed by itself.
    """

    def __init__(self, model: nn.Module, run: Run, heads: list[str], modules: list[str]) -> None:
        self._run = run
        # Outputs by what was changed, the number of steps and the seed; see `_output`.
        self._outputs: dict[tuple[frozenset[str], int, int], Tensor] = {}
        # The relative rounding of the outputs and the tolerance for it, set by `_output`.
        self._rounding = 0.0
        self._tolerance = 0.0
        twin, parameter_recorders = put_recorders(shadow(model), modules, ParameterRecorder)
        by_module = {id(recorder.head): recorder for recorder in parameter_recorders}
        self._parameter_recorders: dict[str, ParameterRecorder] = {
            name: by_module[id(twin.get_submodule(name))]  # one module may have two names
            for name in modules
        }
        self._model, recorders = put_recorders(twin, heads)
        self._recorders: dict[str, Recorder] = dict(zip(heads, recorders, strict=True))

    def parameters_of(self, module: str) -> list[str]:
        """Names of the parameters that a module owns itself; a head is changed as a whole."""
        if module in self._recorders:
            return [module]
        names = self._parameter_recorders[module].module_parameters
        return [f"{module}.{name}" if module else name for name in names]

    def size(self, name: str) -> int:
        """How many numbers a head or a module holds."""
        if name in self._recorders:
            return head_weights(self._recorders[name].head).numel()
        parameters = self._parameter_recorders[name].module_parameters.values()
        return sum(parameter.numel() for parameter in parameters)

    def nonlinear_parts(self, module: str, beside: list[str]) -> dict[str, str]:
        """What is left out of a module in which the output is not linear, by name, and why.

        Args:
            module: The name of the module.
            beside: Parameters that reach the output past the heads.
        """
        place, reparametrised, tensor = module.partition(".parametrizations.")
        if reparametrised:
            return {f"{place}.{tensor}": "not a parameter before remove_parametrizations"}
        linear = []
        for name in self.parameters_of(module):
            if name in beside and self.is_affine([name]):
                linear.append(name)
        if linear:
            return dict.fromkeys(linear, "other parameters of its module do not act linearly")
        return {module: "not linear"}

    def obstacle(self, names: list[str], outputs: int) -> str:
        """Why heads and modules are not included by default; empty if they are.

        Args:
            names: Names of heads and modules; the answer is about the last one.
            outputs: How many numbers the model gives for the batch.
        """
        heads = [self._recorders[name].head for name in names if name in self._recorders]
        if any("weight" not in own_parameters(head) for head in heads):
            return "the layer beside it has a weight that is not a parameter"
        width = sum(self.size(name) for name in names)
        if 8 * max(outputs * width, width**2) > LARGEST_UNASKED:
            return f"{self.size(names[-1]):,} parameters, too many to include by default"
        return ""

    def is_affine(self, names: Sequence[str]) -> bool:
        """Whether y(w + 2 d) - 2 y(w + d) + y(w) = 0 for changes d of heads or parameters."""
        for seed in (1, 2):
            none = self._output(names, 0, seed)
            single = self._output(names, 1, seed)
            double = self._output(names, 2, seed)
            curvature = _largest(double - 2 * single + none)
            size = max(_largest(double - none), _largest(single - none))
            rounding = self._rounding_of(none, single, double)
            if not curvature <= self._tolerance * size + rounding:  # true of NaN too
                return False
        return True

    def act_apart(self, names: Sequence[str], other_names: Sequence[str]) -> bool:
        """Whether the effects of two changes on the output add up, without a product of both."""
        for seed in (1, 2):
            none = self._output((), 0, seed)
            first = self._output(names, 1, seed)
            second = self._output(other_names, 1, seed)
            both = self._output((*names, *other_names), 1, seed)
            product = _largest(both - first - second + none)
            size = min(_largest(first - none), _largest(second - none))
            rounding = self._rounding_of(none, first, second, both)
            if not product <= self._tolerance * size + rounding:  # true of NaN too
                return False
        return True

    def mixes(self, module: str) -> bool:
        """Whether a module weighs several outputs of a head against one another, as a readout does.

        It does not if it only scales or shifts: then an output depends on a single number of the
        module, or on a single one of the outputs that a head gives for a row.
        """
        parameter_recorder = self._parameter_recorders[module]
        for recorder in self._recorders.values():
            recorder.reset(probing=True)
        parameter_recorder.reset(probing=True)
        with torch.enable_grad(), GraphsKept():
            values = self._run(self._model).flatten()
        leaves = parameter_recorder.calls[0].leaves
        calls = [call for recorder in self._recorders.values() for call in recorder.calls]
        probes = [call.probe for call in calls if call.probe is not None]
        several_numbers = False  # of the module act on one output
        several_outputs = False  # of one row of a head act on one output
        some_values = values[:: max(1, len(values) // 8)][:8]  # at most eight, evenly spaced
        for value in some_values:
            gradients = torch.autograd.grad(
                value, [*leaves, *probes], retain_graph=True, materialize_grads=True
            )
            for gradient in gradients[: len(leaves)]:
                several_numbers |= int(gradient.count_nonzero()) > 1
            for call, gradient in zip(calls, gradients[len(leaves) :], strict=True):
                acting = as_rows(call.head, gradient).count_nonzero(1)
                several_outputs |= bool((acting > 1).any())
        return several_numbers and several_outputs

    def _output(self, names: Sequence[str], steps: int, seed: int) -> Tensor:
        """The output, in float64, some steps along a random change of heads and parameters.

        Args:
            names: Names of the heads and parameters that are changed.
            steps: How often the change is added.
            seed: The seed of the change.
        """
        key = (frozenset[str](), 0, 0)  # the output without a change, whatever the names and seed
        if names and steps:
            key = (frozenset(names), steps, seed)
        if key not in self._outputs:
            self._change_heads(names, steps, seed)
            self._change_parameters(names, steps, seed)
            output = self._run(self._model).detach()
            self._rounding = coarsest_rounding([output])
            self._tolerance = tolerance(self._rounding)
            self._outputs[key] = output.double()
        return self._outputs[key]

    def _change_heads(self, names: Sequence[str], steps: int, seed: int) -> None:
        for i, (name, recorder) in enumerate(self._recorders.items()):
            recorder.reset()  # to its own weights, whose size sets that of the change
            change = None
            if name in names:
                change = large_change(head_weights(recorder.head), 1000 * seed + i) * steps
            recorder.reset(change=change)

    def _change_parameters(self, names: Sequence[str], steps: int, seed: int) -> None:
        for i, (module, recorder) in enumerate(self._parameter_recorders.items()):
            changes = []
            parameters = recorder.module_parameters.values()
            for name, parameter in zip(self.parameters_of(module), parameters, strict=True):
                change = large_change(parameter.detach().flatten(), 2000 * seed + i) * steps
                changes.append(change if name in names else torch.zeros_like(change))
            recorder.reset(change=torch.cat(changes))

    def _rounding_of(self, *outputs: Tensor) -> float:
        """What rounding may bring into a sum of outputs."""
        return 16 * self._rounding * max(_largest(output) for output in outputs)


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def large_change(weights: Tensor, seed: int) -> Tensor:
    """A random change of weights, ten times their size: large enough to reveal a nonlinearity."""
    size = float(weights.square().mean().sqrt())
    if size < 1e-6:  # zeros up to rounding: a change of that size would be lost in rounding
        size = 1.0
    return normal_like(weights.to(torch.float64), seed) * 10 * size


def tolerance(rounding: float) -> float:
    """The largest relative deviation from a linear change of the output that counts as rounding."""
    return min(0.1, 100 * math.pow(rounding, 0.75))


def _completed(
    model: nn.Module, run: Run, readout: FoundReadout, beside: list[str], outputs: int
) -> FoundReadout:
    """The readout with modules that are not linear maps but in which the output is linear too.

    A module that adds to what the heads give (an embedding, a wide convolution, a graph
    convolution beside a linear skip) joins them. One that weighs the outputs of a head against one
    another (a raw weight after a linear bottleneck) is the readout instead of that head. One that
    only scales or shifts them, or is too large, is left out and listed in `left_out`.

    Args:
        model: The user's model.
        run: Calls it on the first batch.
        readout: The heads that the search has found.
        beside: Parameters that reach the output past the heads, through no known nonlinearity.
        outputs: How many numbers the model gives for the batch.
    """
    owning_modules = list(dict.fromkeys(_module_of(name) for name in beside))
    modules = [
        name
        for name in owning_modules
        if name not in readout.heads and not is_scripted(model, name)
    ]
    trials = Trials(model, run, readout.heads, modules)
    # Heads whose parameters are used by more than a call of the layer.
    used_elsewhere = set(readout.heads) & set(owning_modules)
    heads = [head for head in readout.heads if trials.is_affine([head])]
    if not heads or not trials.is_affine(heads):
        if not used_elsewhere:
            return readout  # the tap says that the output is not linear
        return replace(readout, later=_not_of(readout.later, used_elsewhere), case="parameters")

    sorted_modules = _sorted_modules(trials, modules, heads, beside, outputs)
    joining = sorted_modules.joining
    after = sorted_modules.after
    for head in set(readout.heads) - set(heads):
        others = [*joining, *after]
        if all(trials.act_apart([head], trials.parameters_of(module)) for module in others):
            return readout  # no module comes after it
    # What is multiplied by a later weight is not the last layer.
    for module in after:
        weights = trials.parameters_of(module)
        heads = [head for head in heads if trials.act_apart([head], weights)]
        joining = [
            name for name in joining if trials.act_apart(trials.parameters_of(name), weights)
        ]
    others = [*joining, *after]
    left_out = sorted_modules.left_out
    if not others and not used_elsewhere:
        return replace(readout, left_out=left_out)
    return replace(
        readout,
        heads=[*heads, *others],
        later=_not_of(readout.later, {*others, *used_elsewhere}),
        case="parameters",
        left_out=left_out,
    )


class _SortedModules(NamedTuple):
    """Modules beside the heads, by what they have to do with the readout.

    Attributes:
        joining: Those that add to what the heads give.
        after: Those that weigh the outputs of heads, as a readout of their own.
        left_out: All others, with the reason.
    """

    joining: list[str]
    after: list[str]
    left_out: dict[str, str]


def _sorted_modules(
    trials: Trials, modules: list[str], heads: list[str], beside: list[str], outputs: int
) -> _SortedModules:
    """Sort modules that are not linear maps by trials; the arguments are those of `_completed`."""
    joining: list[str] = []
    after: list[str] = []
    left_out: dict[str, str] = {}
    for module in modules:
        parameters = trials.parameters_of(module)
        readout_modules = [*heads, *joining]
        if not trials.is_affine(parameters):
            left_out |= trials.nonlinear_parts(module, beside)
            continue
        readout_parameters: list[str] = []
        for name in readout_modules:
            readout_parameters += trials.parameters_of(name)
        if trials.act_apart(parameters, readout_parameters):
            obstacle = trials.obstacle([*readout_modules, module], outputs)
            if obstacle:
                left_out[module] = obstacle
            else:
                joining.append(module)
            continue
        if not trials.mixes(module):
            left_out[module] = f"{trials.size(module):,} parameters that scale or shift"
            continue
        obstacle = trials.obstacle([module], outputs)
        if obstacle:
            left_out[module] = obstacle
        elif all(trials.act_apart(parameters, trials.parameters_of(name)) for name in after):
            after.append(module)
    return _SortedModules(joining, after, left_out)


def _not_of(parameters: list[str], modules: Collection[str]) -> list[str]:
    """The parameters that none of the modules owns."""
    return [name for name in parameters if _module_of(name) not in modules]


# --- what messages say ---------------------------------------------------------------------------


def _nothing_found(model: str, maps: list[str], advice: str) -> str:
    if not maps:
        reason = f"{model} has no linear map (nn.Linear or 1x1 convolution) to take features from."
    else:
        reason = (
            "No linear map reaches the output through differentiable operations: does the forward "
            "pass use torch.no_grad, detach, .data or NumPy, or end with something other than a "
            "linear layer?"
        )
    return f"{reason} {advice}Pass features=callable(model, *inputs) -> (N, D)."


def left_out_notice(readout: FoundReadout) -> str:
    """The warning about modules that were left out of the readout."""
    heads = ", ".join(_shown(name) for name in readout.heads)
    modules = ", ".join(f"{_shown(name)} ({reason})" for name, reason in readout.left_out.items())
    return (
        f"Parameters that reach the output past {heads} are left out of the readout: {modules}. "
        f"The error bars only include {heads}. Name all layers of the readout, layer=[..., ...], "
        "or pass features=."
    )


def nearest_parameters(model: nn.Module, parameters: list[str], heads: Sequence[str] = ()) -> str:
    """The line of code that uses derivatives with respect to the parameters nearest to the output.

    Args:
        model: The user's model.
        parameters: Names of the parameters that act on the output, nearest first.
        heads: Linear maps before them, to name instead where the parameters are a few numbers that
            scale or shift.
    """
    if not parameters:
        return ""
    inner_model = unwrapped(model)
    owning_modules = dict.fromkeys(_module_of(name) for name in parameters)
    open_modules = [name for name in owning_modules if not is_scripted(model, name)]
    if not open_modules:
        return "The nearest layers are in TorchScript, which cannot be inspected. "
    weighing = [name for name in open_modules if _has_weights(inner_model.get_submodule(name))]
    names = (weighing or list(heads) or open_modules)[:3]
    around = commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    if not around or is_scripted(model, around):
        around = names[0]
    sizes = []
    for name in names:
        parameters_of_module = own_parameters(inner_model.get_submodule(name)).values()
        size = sum(parameter.numel() for parameter in parameters_of_module)
        sizes.append(f"{_shown(name)} ({size:,})")
    return (
        f"The layers nearest to the output, with their numbers of parameters: {', '.join(sizes)}; "
        f'layer="{around}" uses the derivatives with respect to them. '
    )


def _has_weights(module: nn.Module) -> bool:
    """Whether a module has weights, more than numbers that scale, shift or bend."""
    if isinstance(module, (nn.PReLU, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)):
        return False
    return any(parameter.numel() > 1 for parameter in own_parameters(module).values())


def _shown(name: str) -> str:
    return repr(name) if name else "the model itself"


def is_scripted(model: nn.Module, name: str) -> bool:
    """Whether a module has parameters inside TorchScript, which cannot be looked into."""
    inner_model = unwrapped(model)
    for path, module in inner_model.get_submodule(name).named_modules(prefix=name):
        if list(module.parameters(recurse=False)):
            parent = inner_model.get_submodule(path.rpartition(".")[0])
            if isinstance(parent, torch.jit.ScriptModule):
                return True
    return False
