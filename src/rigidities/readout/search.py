"""Searching the graph: which linear maps come last on the way to the output.

`find_heads` runs a shadow of the model once, with a mark in the autograd graph at every call of a
linear map, and walks the graph back from the output. The first marks that it meets are the heads.
Other parameters that it meets may belong to the readout too; `Linearity` tells whether they act
linearly and apart from the heads (`_completed`). `named_heads`
does the same for what a user names by `layer=`. Both return a `FoundHeads`.

Where no readout is found, `suggested_layers` says what to name; where only a part of one is named,
`named_heads` finds the rest. Both ask `Linearity` in which layers the output is linear together.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from posixpath import commonpath
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..models.changes import attributes, renewed
from ..models.shadow import shadow
from .heads import (
    LoneParameter,
    Marker,
    layer_of_parameter,
    layers_inside,
    linear_maps,
    named_head,
    own_parameters,
    put_recorders,
)
from .linearity import BENDING, ORDERLY, Linearity, Run, before_nonlinearity
from .tail import GraphsKept
from .unregistered import Unregistered

_FEEDING = "feeding the readout as well"
"""Why a linear map that reaches the output past the heads is not one of them."""


class NoReadoutError(ValueError):
    """A search has found no readout."""


class SearchPass(NamedTuple):
    """What a pass of a search has shown.

    Attributes:
        output: The model's output, without a graph.
        renewed: Attributes that the pass set; see `changes.renewed`.
        returned: Names of the marked modules whose only calls returned the output, or what it is
            the mean of, perhaps reshaped; empty if there are no such modules.
        differentiates: Whether the model differentiates inside its forward pass.
    """

    output: Tensor
    renewed: frozenset[str]
    returned: list[str]
    differentiates: bool


@dataclass(frozen=True)
class FoundHeads:
    """The readout heads, by name, and what the search saw beside them.

    Attributes:
        names: Names of the heads, modules and parameters.
        later: Parameters that act between the heads and the output, nearest to the output first.
        uncalled: Linear maps that the batch did not call, of which nothing is known.
        search_pass: The pass that the heads were found with.
        are_parameters: Whether the heads may be any modules, of whose parameters alone it is known
            that they belong to the readout.
        left_out: Layers that are not heads although they reach the output past the heads, each with
            the reason.
        whole: The readout to name, so that it includes all that can be included; empty if there is
            nothing better to name.
    """

    names: list[str]
    later: list[str]
    uncalled: list[str]
    search_pass: SearchPass
    are_parameters: bool = False
    left_out: dict[str, str] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)

    @property
    def is_returned(self) -> bool:
        """Whether the model returns what its head gave, or the mean of what its heads gave.

        The graph shows it, so that it holds whatever the heads' weights are.
        """
        return self.names == self.search_pass.returned


def find_heads(model: nn.Module, run: Run) -> FoundHeads:
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
    names = list(linear_maps(model))
    model_shadow = shadow(model)
    parameter_names: dict[int, str] = {}  # by id
    for name, parameter in model_shadow.named_parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()  # of the alias, not of the user's parameter
            parameter_names[id(parameter)] = name
    unregistered = Unregistered(model, model_shadow)
    with unregistered.shown():
        marked = _run_marked(run, model_shadow, names)
    walk = _walk_back([marked.end], marked.module_of_mark)
    unregistered.refuse(walk.leaves.values())
    later = [parameter_names[leaf] for leaf in walk.leaves if leaf in parameter_names]
    if not walk.nodes_before:
        advice = advised_layers(model, run) if later else ""
        raise NoReadoutError(_nothing_found(type(model).__name__, names, advice))
    last = _last(walk.nodes_before, marked.module_of_mark)
    marked_maps = zip(names, marked.markers, strict=True)
    found_heads = FoundHeads(
        names=[names[i] for i in last],
        later=later,
        uncalled=[name for name, marker in marked_maps if not marker.marks],
        search_pass=marked.search_pass,
    )
    straight = _walk_back([marked.end], marked.module_of_mark, bending=BENDING)
    feeding = [names[i] for i in sorted(straight.nodes_before) if i not in last]
    if feeding:
        left_out = dict.fromkeys(feeding, _FEEDING)
        found_heads = replace(found_heads, left_out=left_out, whole=[*feeding, *found_heads.names])
    if not later:
        return found_heads
    beside = _parameters_beside(marked, walk, straight, parameter_names, found_heads.names)
    with torch.enable_grad():  # for models that differentiate themselves
        if beside:
            return _completed(model, run, found_heads, beside, marked.search_pass.output.numel())
        # Layers side by side before a nonlinear function at the end are told apart only there.
        run_before = before_nonlinearity(model, run)
        if run_before is not None:
            with suppress(ValueError):  # of which the readout found above says more
                before = find_heads(model, run_before)
                return replace(before, search_pass=marked.search_pass)
        return found_heads


def named_heads(model: nn.Module, names: list[str], run: Run) -> FoundHeads:
    """The heads that a user means by the names of some modules and parameters.

    Layers (see `heads.layers_inside`) are taken as they are. Of other modules those layers are
    taken that come last inside, as in a search: all in which the output is linear together or, if
    there are none, those that reach the output without passing through another one.

    Args:
        model: The user's model.
        names: Names of parameters, and of modules that own parameters or hold such modules.
        run: Calls a model on the first batch.
    """
    heads = _named_layers(model, names)
    if heads == names:
        found_heads = _found_layers(model, run, heads)
        if found_heads.is_returned:
            return found_heads  # nothing stands beside it

    run_before = before_nonlinearity(model, run) or run
    nearest = _layers_beside(model, run_before, heads)
    linearity = Linearity(model, run_before, list(dict.fromkeys([*heads, *nearest])))
    if heads != names:
        heads = _last_layers(model, run_before, linearity, heads)
        found_heads = _found_layers(model, run, heads)
    if not linearity.is_linear(heads):
        return found_heads  # it will be said that the output is not linear
    whole = list(heads)
    left_out: dict[str, str] = {}
    for layer in linearity.linear_together(nearest, beginning=heads)[len(heads) :]:
        obstacle = linearity.obstacle([*whole, layer], found_heads.search_pass.output.numel())
        left_out[layer] = obstacle or "which the output is linear in too"
        if not obstacle:
            whole.append(layer)
    return replace(found_heads, left_out=left_out, whole=whole if len(whole) > len(heads) else [])


def _named_layers(model: nn.Module, names: list[str]) -> list[str]:
    """The layers that modules consist of, and parameters that are in none of these layers."""
    layers: list[str] = []
    for name in names:
        layers += layers_inside(model, name)
    layer_by_parameter = layer_of_parameter(model)
    named_layers: list[str] = []
    for name in dict.fromkeys(layers):
        layer = layer_by_parameter.get(name, name)
        if layer == name or layer not in layers:
            named_layers.append(name)
    return named_layers


def _layers_beside(model: nn.Module, run: Run, heads: list[str]) -> list[str]:
    """The layers nearest to the output, up to nonlinear functions.

    Of a layer of which single parameters are heads, the parameters are listed one by one.

    Args:
        model: The user's model.
        run: Calls a model on the first batch, up to a nonlinear function at the end.
        heads: Names of layers and parameters.
    """
    layer_by_parameter = layer_of_parameter(model)
    divided = {layer_by_parameter.get(name) for name in heads} - {*heads}
    nearest: list[str] = []
    for layer in _nearest_layers(model, run, bending=BENDING):
        if layer in divided:
            nearest += [name for name, whole in layer_by_parameter.items() if whole == layer]
        else:
            nearest.append(layer)
    return nearest


def _found_layers(model: nn.Module, run: Run, heads: list[str]) -> FoundHeads:
    """The readout that consists of some layers, after a pass with marks at linear maps."""
    # Recorders stand in for linear maps alone, so nothing else is marked here.
    all_linear = set(heads) <= set(linear_maps(model))
    marked = _run_marked(run, shadow(model), heads if all_linear else [])
    called = any(marker.marks for marker in marked.markers)
    return FoundHeads(
        heads,
        later=[],
        uncalled=[],
        search_pass=marked.search_pass,
        are_parameters=not called,
    )


def _last_layers(model: nn.Module, run: Run, linearity: Linearity, layers: list[str]) -> list[str]:
    """Those of some layers that form a readout.

    Args:
        model: The user's model.
        run: Calls a model on the first batch, up to a nonlinear function at the end.
        linearity: Linearity of the layers, with such runs.
        layers: Names of the layers.
    """
    if linearity.is_linear(layers):
        return layers
    nearest = next(_layers_by_nearness(model, run, layers), layers)
    return linearity.linear_together(nearest) or nearest


# --- one marked pass, and the walk through its graph ---------------------------------------------


class _Marked(NamedTuple):
    """A pass of a shadow with a mark at every call of some modules.

    Attributes:
        markers: The markers of the modules, in the order of their names.
        module_of_mark: The number of the module by the id of each mark's leaf.
        end: The node of the graph that made the output.
        search_pass: What it has shown.
    """

    markers: list[Marker]
    module_of_mark: dict[int, int]
    end: Any
    search_pass: SearchPass


def _run_marked(run: Run, model_shadow: nn.Module, names: list[str]) -> _Marked:
    """Run a shadow with a mark at every call of some modules.

    Args:
        run: Calls a model on the first batch.
        model_shadow: The shadow, whose modules are exchanged for markers.
        names: Names of the modules.
    """
    model_shadow, markers = put_recorders(model_shadow, names, Marker)
    before = attributes(model_shadow, ignored=Marker)
    differentiates = False
    with torch.enable_grad():
        try:
            # Nothing is kept for a backward pass: it takes no more memory than without gradients.
            with saved_tensors_hooks(lambda _: None, cast("Any", lambda _: None)):
                output = run(model_shadow)
        except Exception:  # torch takes no None for a tensor, and adds in place to no expanded one
            for marker in markers:
                marker.marks.clear()
                marker.in_place = False
            with GraphsKept() as graphs:
                output = run(model_shadow)
            # No mode sees what TorchScript calls.
            scripted = any(
                isinstance(module, torch.jit.ScriptModule) for module in model_shadow.modules()
            )
            differentiates = graphs.differentiated or scripted
    module_of_mark: dict[int, int] = {}
    for number, marker in enumerate(markers):
        for mark in marker.marks:
            module_of_mark[id(mark.leaf)] = number
    search_pass = SearchPass(
        output=output.detach(),
        renewed=renewed(before, attributes(model_shadow, ignored=Marker)),
        returned=[names[number] for number in _returned(output, markers)],
        differentiates=differentiates,
    )
    return _Marked(markers, module_of_mark, output.grad_fn, search_pass)


def _returned(output: Tensor, markers: list[Marker]) -> list[int]:
    """The numbers of the modules whose only calls returned the output, or what it is the mean of.

    The graph shows it: from the output back to what was returned there are only nodes that keep the
    numbers and their order. This holds for any weights, as long as the model takes the same path.
    Every later pass is compared with what the modules returned.
    """
    module_of_node: dict[Any, int] = {}
    for number, marker in enumerate(markers):
        if len(marker.marks) == 1:
            module_of_node[marker.marks[0].node] = number
    ends = [_behind_orderly(output.grad_fn, module_of_node)]
    if ends[0] is not None and ends[0].name() == "MeanBackward1":  # of `MeanOf`
        stack = ends[0].next_functions[0][0]
        if stack is not None and stack.name() == "StackBackward0":
            ends = [_behind_orderly(node, module_of_node) for node, _ in stack.next_functions]
    numbers = [module_of_node.get(node, -1) for node in ends]
    if len(set(numbers)) < len(numbers):
        return []  # one module twice
    for number in numbers:
        if number < 0 or markers[number].marks[0].numel != output.numel():
            return []
    # A view shares the count of writes with its base, so a write without a graph shows there.
    if len(numbers) == 1 and markers[numbers[0]].marks[0].version != output._version:
        is_view = output._is_view() or output.grad_fn is markers[numbers[0]].marks[0].node
        if is_view:
            return []
    return numbers


def _behind_orderly(node: Any, module_of_node: dict[Any, int]) -> Any:
    """The first node on the way back that is a module's, or does more than keep an order."""
    while node is not None and node not in module_of_node and node.name() in ORDERLY:
        inputs = [child for child, _ in node.next_functions]
        if len(inputs) != 1:
            return None
        node = inputs[0]
    return node


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


def reaches(output: Tensor, leaves: Sequence[Tensor | None]) -> bool:
    """Whether the graph of an output leads back to one of some leaves."""
    ids = {id(leaf) for leaf in leaves if leaf is not None}
    return not ids.isdisjoint(_walk_back([output.grad_fn], {}).leaves)


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
    marked: _Marked,
    walk: _Walk,
    straight: _Walk,
    parameter_names: dict[int, str],
    heads: list[str],
) -> list[str]:
    """Names of parameters that reach the output past the heads, through no known nonlinearity.

    A parameter that feeds a head does not belong to the readout, even if it reaches the output past
    the head as well (a skip connection). A head's own parameters feed it too; they count where the
    model uses them outside the head's call.

    Args:
        marked: The pass of the search.
        walk: The walk from its output to the first marks.
        straight: The same walk, which stopped at nonlinear functions.
        parameter_names: The names of the parameters by id.
        heads: The names of the heads.
    """
    reached = [leaf for leaf in straight.leaves if leaf in parameter_names]
    if not reached or not bool(torch.isfinite(marked.search_pass.output).all()):
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


# --- the layers nearest to the output ------------------------------------------------------------


def _layers_by_nearness(
    model: nn.Module, run: Run, layers: list[str], bending: Collection[str] = ()
) -> Iterator[list[str]]:
    """Groups of layers: those that a walk back from the output meets first, then those behind.

    A layer that feeds another one of its group is left to no group.

    Args:
        model: The user's model.
        run: Calls a model on the first batch.
        layers: Names of the layers to look for.
        bending: Names of nonlinear nodes, at which the walk stops.
    """
    layer_by_parameter = layer_of_parameter(model)
    model_shadow = shadow(model)
    layer_of_leaf: dict[int, str] = {}
    for name, parameter in model_shadow.named_parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
            layer_of_leaf[id(parameter)] = layer_by_parameter[name]
    modules = []
    for name in layers:
        is_module = not isinstance(named_head(model, name), LoneParameter)
        if is_module and not is_scripted(model, name):
            modules.append(name)
    marked = _run_marked(run, model_shadow, modules)
    met: set[str] = set()
    start = [marked.end]
    while start:
        walk = _walk_back(start, marked.module_of_mark, bending=bending)
        group = [layer_of_leaf[leaf] for leaf in walk.leaves if leaf in layer_of_leaf]
        if walk.nodes_before:
            group += [modules[i] for i in _last(walk.nodes_before, marked.module_of_mark)]
        group = [name for name in dict.fromkeys(group) if name in layers and name not in met]
        met.update(group)
        if group:
            yield group
        start = []
        for nodes in walk.nodes_before.values():
            start += nodes


def _nearest_layers(model: nn.Module, run: Run, bending: Collection[str] = ()) -> list[str]:
    """The layers nearest to the output, up to the first that do more than scale or shift.

    Args:
        model: The user's model.
        run: Calls a model on the first batch.
        bending: Names of nonlinear nodes, at which the walk stops.

    Returns:
        None of them where some are in TorchScript, which cannot be inspected.
    """
    nearest: list[str] = []
    layers = layers_inside(model, "")
    for group in _layers_by_nearness(model, run, layers, bending):
        if any(is_scripted(model, name) for name in group):
            return []
        nearest += group
        if Linearity(model, run, group).weighing(group):
            break
    return nearest


# --- other layers that belong to the readout -----------------------------------------------------


def _completed(
    model: nn.Module, run: Run, found_heads: FoundHeads, beside: list[str], outputs: int
) -> FoundHeads:
    """The readout with layers that are not linear maps but in which the output is linear too.

    A layer that adds to what the heads give (an embedding, a wide convolution, a graph
    convolution beside a linear skip) joins them. One that weighs the outputs of a head against one
    another (a raw weight after a linear bottleneck) is the readout instead of that head. One that
    only scales or shifts them, or is too large, is left out and listed in `left_out`.

    Args:
        model: The user's model.
        run: Calls it on the first batch.
        found_heads: The heads that the search has found.
        beside: Parameters that reach the output past the heads, through no known nonlinearity.
        outputs: How many numbers the model gives for the batch.
    """
    layer_by_parameter = layer_of_parameter(model)
    layers_beside = list(dict.fromkeys(layer_by_parameter[name] for name in beside))
    layers = [
        name
        for name in layers_beside
        if name not in found_heads.names and not is_scripted(model, name)
    ]
    linearity = Linearity(model, run, [*found_heads.names, *layers])
    # Heads whose parameters are used by more than a call of the layer.
    used_elsewhere = set(found_heads.names) & set(layers_beside)
    heads = [head for head in found_heads.names if linearity.is_linear([head])]
    if not heads or not linearity.is_linear(heads):
        # The output is a product of heads, say. It will be said that it is not linear.
        joining = _additive(linearity, layers, found_heads.names, outputs)
        if not joining and not used_elsewhere:
            return found_heads
        layers = [*joining, *used_elsewhere]
        joined = _with_layers(found_heads, [*found_heads.names, *joining], layers, model)
        return found_heads if joined.later and not used_elsewhere else joined

    sorted_layers = _sorted_layers(model, run, linearity, layers, heads, beside, outputs)
    joining = sorted_layers.joining
    after = sorted_layers.after
    for head in set(found_heads.names) - set(heads):
        if all(linearity.act_apart([head], [layer]) for layer in (*joining, *after)):
            return found_heads  # no layer comes after it
    # What is multiplied by a later weight is not the last layer.
    for layer in after:
        heads = [head for head in heads if linearity.act_apart([head], [layer])]
        joining = [name for name in joining if linearity.act_apart([name], [layer])]
    all_heads = [*heads, *joining, *after]
    found_heads = replace(
        found_heads,
        left_out={**found_heads.left_out, **sorted_layers.left_out},
        whole=[*all_heads, *sorted_layers.large],
    )
    if not joining and not after and not used_elsewhere:
        return found_heads
    return _with_layers(found_heads, all_heads, {*joining, *after, *used_elsewhere}, model)


def _with_layers(
    found_heads: FoundHeads, heads: list[str], layers: Collection[str], model: nn.Module
) -> FoundHeads:
    """A readout with other heads, some of which are not linear maps.

    Args:
        found_heads: What the search has found.
        heads: Names of its new heads.
        layers: Those whose parameters are no longer later ones.
        model: The user's model.
    """
    layer_by_parameter = layer_of_parameter(model)
    later = [name for name in found_heads.later if layer_by_parameter[name] not in layers]
    return replace(found_heads, names=heads, later=later, are_parameters=True)


def _additive(linearity: Linearity, layers: list[str], heads: list[str], outputs: int) -> list[str]:
    """Layers that add to an output which is not linear in its heads; the others are unchanged.

    Args:
        linearity: Linearity of heads and layers.
        layers: Names of layers that are not linear maps.
        heads: Names of the heads.
        outputs: How many numbers the model gives for the batch.
    """
    joining: list[str] = []
    for layer in layers:
        readout_layers = [*heads, *joining]
        is_additive = linearity.is_linear([layer]) and linearity.act_apart([layer], readout_layers)
        if is_additive and not linearity.obstacle([*readout_layers, layer], outputs):
            joining.append(layer)
    return joining


class _SortedLayers(NamedTuple):
    """Layers beside the heads, by what they have to do with the readout.

    Attributes:
        joining: Those that add to what the heads give.
        after: Those that weigh the outputs of heads, as a readout of their own.
        left_out: All others, with the reason.
        large: Those that are left out only because they are large.
    """

    joining: list[str]
    after: list[str]
    left_out: dict[str, str]
    large: list[str]


def _sorted_layers(
    model: nn.Module,
    run: Run,
    linearity: Linearity,
    layers: list[str],
    heads: list[str],
    beside: list[str],
    outputs: int,
) -> _SortedLayers:
    """Sort layers that are not linear maps; the arguments are those of `_completed`."""
    joining: list[str] = []
    after: list[str] = []
    left_out: dict[str, str] = {}
    large: list[str] = []
    for layer in layers:
        readout_layers = [*heads, *joining]
        if not linearity.is_linear([layer]):
            left_out |= _nonlinear_parts(model, run, layer, beside)
            continue
        if linearity.act_apart([layer], readout_layers):
            obstacle = linearity.obstacle([*readout_layers, layer], outputs)
            if obstacle:
                left_out[layer] = obstacle
                large.append(layer)
            else:
                joining.append(layer)
            continue
        if not linearity.mixes(layer):
            noun = "parameter" if linearity.size(layer) == 1 else "parameters"
            left_out[layer] = f"{linearity.size(layer):,} {noun} that scale or shift"
            continue
        obstacle = linearity.obstacle([layer], outputs)
        if obstacle:
            left_out[layer] = obstacle
        elif all(linearity.act_apart([layer], [name]) for name in after):
            after.append(layer)
    return _SortedLayers(joining, after, left_out, large)


def _nonlinear_parts(model: nn.Module, run: Run, layer: str, beside: list[str]) -> dict[str, str]:
    """What is left out of a layer in which the output is not linear, by name, and why.

    Args:
        model: The user's model.
        run: Calls it on the first batch.
        layer: The name of the layer.
        beside: Parameters that reach the output past the heads.
    """
    place, reparametrised, tensor = layer.partition(".parametrizations.")
    if reparametrised:
        return {f"{place}.{tensor}": "not a parameter before remove_parametrizations"}
    head = named_head(model, layer)
    linear = []
    if not isinstance(head, LoneParameter):
        names = [f"{layer}.{name}" if layer else name for name in own_parameters(head)]
        linearity = Linearity(model, run, names)
        linear = [name for name in names if name in beside and linearity.is_linear([name])]
    if linear:
        return dict.fromkeys(linear, "other parameters of its module do not act linearly")
    return {layer: "not linear"}


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


def left_out_notice(model: nn.Module, found_heads: FoundHeads) -> str:
    """The warning about layers that were left out of the readout."""
    heads = ", ".join(map(repr, found_heads.names))
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in found_heads.left_out.items():
        names_by_reason.setdefault(reason, []).append(repr(name))
    layers = ", ".join(
        f"{', '.join(names)} ({reason})" for reason, names in names_by_reason.items()
    )
    if not found_heads.whole:
        remedy = "Pass features= to include them."
    elif set(found_heads.whole) == set(found_heads.names):
        remedy = (
            f"{_as_option(model, found_heads.names)} says that this is meant; or pass features=."
        )
    else:
        order = " to first order" if _FEEDING in names_by_reason else ""
        remedy = f"{_as_option(model, found_heads.whole)} includes them{order}; or pass features=."
    return (
        f"Parameters that reach the output past {heads} are left out of the readout: {layers}. "
        f"The error bars only include {heads}. {remedy}"
    )


def advised_layers(model: nn.Module, run: Run) -> str:
    """The sentence that says which layers to name where no readout was found.

    Args:
        model: The user's model.
        run: Calls a model on the first batch.
    """
    with torch.enable_grad():
        layers = suggested_layers(model, run)
    if not layers:
        if is_scripted(model, ""):
            return "The nearest layers are in TorchScript, which cannot be inspected. "
        return ""
    sizes = []
    for name in layers:
        parameters = own_parameters(named_head(model, name)).values()
        sizes.append(f"{name!r} ({sum(parameter.numel() for parameter in parameters):,})")
    return (
        f"The layers nearest to the output, with their numbers of parameters: {', '.join(sizes)}; "
        f"{_as_option(model, layers)} uses the derivatives with respect to them. "
    )


def suggested_layers(model: nn.Module, run: Run) -> list[str]:
    """What to name as a readout: the nearest layers in which the output is linear together.

    If the output is linear in none of the layers that weigh anything, the nearest of these.

    Args:
        model: The user's model.
        run: Calls a model on the first batch.
    """
    run_before = before_nonlinearity(model, run) or run
    for bending in (BENDING, frozenset[str]()):
        nearest = _nearest_layers(model, run_before, bending)
        linearity = Linearity(model, run_before, nearest)
        weighing = linearity.weighing(nearest)
        together = linearity.linear_together(nearest)
        if weighing and together:
            return together
    if not weighing:
        return together
    # With them goes what else the same module consists of, such as the bias of a convolution.
    parent = _common_module(weighing)
    while parent and set(layers_inside(model, parent)) <= set(nearest):
        weighing = layers_inside(model, parent)
        parent = parent.rpartition(".")[0]
    return weighing


def _common_module(names: list[str]) -> str:
    """The name of the innermost module that holds everything named; "" if only the model does."""
    if not names:
        return ""
    return commonpath([name.replace(".", "/") for name in names]).replace("/", ".")


def _as_option(model: nn.Module, layers: list[str]) -> str:
    """The option that names layers, by the module that consists of them where there is one."""
    value: str | list[str] = layers
    parent = _common_module(layers)
    if parent and set(layers_inside(model, parent)) == set(layers):
        value = parent
    elif len(layers) == 1:
        value = layers[0]
    return f"layer={json.dumps(value)}"


def is_scripted(model: nn.Module, name: str) -> bool:
    """Whether a module has parameters inside TorchScript, which cannot be looked into."""
    for path, module in named_head(model, name).named_modules(prefix=name):
        if list(module.parameters(recurse=False)):
            parent = model.get_submodule(path.rpartition(".")[0])
            if isinstance(parent, torch.jit.ScriptModule):
                return True
    return False
