"""Finding the readout: the last linear maps on the way to the output."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from posixpath import commonpath
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...models.directional import normal_like
from ...models.shadow import Watch, shadow, unwrapped
from .heads import Holder, Marker, Recorder, as_rows, linear_maps, own_parameters, owners, record
from .heads import weights as head_weights
from .tail import GraphsKept, coarsest
from .unregistered import Unregistered

Run = Callable[[nn.Module], Tensor]
"""Calls a model on the batch and returns the output tensor."""

LARGEST_UNASKED = 1 << 28
"""Bytes of a first batch's derivatives, or of their Gram matrix, up to which modules that are no
linear maps join the readout without being named."""

_BENDING = frozenset(
    f"{name}Backward0"
    for name in (
        *("Relu", "LeakyRelu", "Elu", "Celu", "Gelu", "Silu", "Mish", "Hardswish", "Hardsigmoid"),
        *("Hardtanh", "Tanh", "Sigmoid", "LogSigmoid", "Softplus", "Softmax", "LogSoftmax"),
        *("Exp", "Log", "Sin", "Cos", "Sqrt", "Pow", "Abs", "Erf", "Clamp"),
    )
)
"""Nodes of the graph of one input, in which no output is linear."""


@dataclass(frozen=True)
class Found:
    """The readout heads, by name.

    Attributes:
        later: parameters that act between the heads and the output, nearest to the output first.
        silent: linear maps that the batch did not call, of which nothing is known.
        marked: the pass that they were found with.
        case: the case to begin with: `parameters` where the heads are any modules.
        left: modules in which the output is linear too and which are no heads, with the reason.
    """

    heads: list[str]
    later: list[str]
    silent: list[str]
    marked: MarkedPass
    case: str = "plain"
    left: dict[str, str] = field(default_factory=dict)

    @property
    def is_returned(self) -> bool:
        """Whether the model returns what its one head gave, whatever the head's weights are."""
        return self.heads == [self.marked.returned]


@dataclass(frozen=True)
class MarkedPass:
    """What one pass of a model showed in which every call of some modules was marked.

    Attributes:
        output: of the model, without a graph.
        renewed: attributes that the pass set; see `Watch`.
        returned: the module of which the output is what its only call returned, perhaps reshaped;
            None if there is no such module.
    """

    output: Tensor
    renewed: frozenset[str]
    returned: str | None


_ORDERLY = frozenset(
    f"{name}Backward{number}"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Select")
    for number in range(3)
) | {"SliceBackward0"}
"""Nodes of the graph that leave the order of numbers as it is, where they leave none out."""


def find_heads(model: nn.Module, run: Run) -> Found:
    """The last linear maps on the way to the output.

    Every linear map of a shadow is marked in one forward pass; the autograd graph is then walked
    back from the output, stopping at the first mark on each path. A map that also feeds another
    one found (through attention weights, a skip connection) is not a last one. Other parameters
    that are met on the way may belong to the readout too: see `_completed`.
    """
    names = list(linear_maps(unwrapped(model)))
    twin = shadow(model)
    free = [(n, p) for n, p in twin.named_parameters() if p.is_floating_point()]
    parameters = {id(p.requires_grad_()): name for name, p in free}  # aliases, not the user's
    unregistered = Unregistered(unwrapped(model), twin)
    with unregistered.shown():
        markers, marks, output, marked = _marked(run, twin, names)
    found, leaves = _walk([output.grad_fn], marks)
    unregistered.refuse(leaves.values())
    later = [parameters[leaf] for leaf in leaves if leaf in parameters]
    if not found:
        raise ValueError(_nothing_found(type(model).__name__, names, nearest(model, later)))
    silent = [name for name, marker in zip(names, markers, strict=True) if not marker.marks]
    heads = [names[i] for i in _last(found, marks)]
    whole = Found(heads, later, silent, marked)
    straight = _walk([output.grad_fn], marks, bending=_BENDING)[1]
    reached = [leaf for leaf in straight if leaf in parameters]
    if not reached or not bool(torch.isfinite(output.detach()).all()):
        return whole
    # What feeds a head is no readout for reaching the output past it as well. A head's own
    # parameters feed it, and were reached here by some use beside its call.
    before = [node for nodes in found.values() for node in nodes]
    behind = _walk(before, marks, through=True)[1]
    own = {leaf for leaf in reached if parameters[leaf].rpartition(".")[0] in heads}
    beside = [parameters[leaf] for leaf in reached if leaf in own or leaf not in behind]
    if not beside:
        return whole
    with torch.enable_grad():  # for models that differentiate themselves
        return _completed(model, run, whole, beside, output.numel())


def named_heads(model: nn.Module, names: list[str], run: Run) -> Found:
    """The heads that a user means by the names of some modules.

    Linear maps are taken as they are. Of other modules all parameters inside are taken, if the
    output is linear in them together; else those of the last modules inside on the way to the
    output, as in a search.
    """
    inner = unwrapped(model)
    heads = list(dict.fromkeys(owner for name in names for owner in owners(inner, name)))
    if heads != names and not _affine(model, heads, run):
        _, marks, output, _ = _marked(run, shadow(model), heads)
        last = _last(_walk([output.grad_fn], marks)[0], marks)
        heads = [heads[i] for i in last] or heads
    # Recorders stand in for linear maps alone, so nothing else is marked here.
    linear = set(heads) <= set(linear_maps(inner))
    markers, _, _, marked = _marked(run, shadow(model), heads if linear else [])
    called = any(marker.marks for marker in markers)
    return Found(heads, [], [], marked, case="plain" if called else "parameters")


def _affine(model: nn.Module, modules: list[str], run: Run) -> bool:
    """Whether the output is affine in all parameters of some modules together."""
    trials = Trials(model, run, [], modules)
    return trials.affine([name for module in modules for name in trials.own(module)])


class Trials:
    """Outputs of a model for large random changes of some heads and of other parameters.

    Args:
        heads: linear maps, each changed as a whole, so that reparametrised ones can be.
        modules: others, of which each parameter can be changed by itself.
    """

    def __init__(self, model: nn.Module, run: Run, heads: list[str], modules: list[str]) -> None:
        self._run, self._values = run, dict[tuple[frozenset[str], int, int], Tensor]()
        twin, holders = record(shadow(model), modules, Holder)
        held = {id(holder.head): holder for holder in holders}  # one module may have two names
        self._holders: dict[str, Holder] = {n: held[id(twin.get_submodule(n))] for n in modules}
        self._model, recorders = record(twin, heads)
        self._recorders: dict[str, Recorder] = dict(zip(heads, recorders, strict=True))

    def own(self, module: str) -> list[str]:
        """Names of the parameters that a module owns itself; a head is changed as a whole."""
        if module in self._recorders:
            return [module]
        return [f"{module}.{name}" if module else name for name in self._holders[module].own]

    def bent(self, module: str, beside: list[str]) -> dict[str, str]:
        """Of a module in which the output is not linear: what is left out for that, and why."""
        place, reparametrised, tensor = module.partition(".parametrizations.")
        if reparametrised:
            return {f"{place}.{tensor}": "no parameter before remove_parametrizations"}
        straight = [name for name in self.own(module) if name in beside]
        linear = [name for name in straight if self.affine([name])]
        if linear:
            return dict.fromkeys(linear, "other parameters of its module do not act linearly")
        return {module: "not linear"}

    def size(self, name: str) -> int:
        """How many numbers a head or a module holds."""
        if name in self._recorders:
            return head_weights(self._recorders[name].head).numel()
        return sum(parameter.numel() for parameter in self._holders[name].own.values())

    def obstacle(self, names: list[str], outputs: int) -> str:
        """Why heads and modules cannot be taken by their parameters unasked; empty if they can."""
        heads = [self._recorders[name].head for name in names if name in self._recorders]
        if any("weight" not in own_parameters(head) for head in heads):
            return "the layer beside it has a weight that is no parameter"
        width = sum(map(self.size, names))
        if 8 * max(outputs * width, width**2) > LARGEST_UNASKED:
            return f"{self.size(names[-1]):,} parameters, too many to take them unasked"
        return ""

    def affine(self, names: Sequence[str]) -> bool:
        """Whether y(w + 2 d) - 2 y(w + d) + y(w) = 0 for changes d of heads or parameters."""
        for seed in (1, 2):
            first, second, third = (self._value(names, steps, seed) for steps in (0, 1, 2))
            size = max(_largest(third - first), _largest(second - first))
            rounding = 16 * self._rounding * max(map(_largest, (first, second, third)))
            if not _largest(third - 2 * second + first) <= self._tolerance * size + rounding:
                return False
        return True

    def apart(self, some: Sequence[str], others: Sequence[str]) -> bool:
        """Whether two changes act on the output without a product of both: they add up."""
        for seed in (1, 2):
            first = self._value((), 0, seed)
            one, other = self._value(some, 1, seed), self._value(others, 1, seed)
            both = self._value((*some, *others), 1, seed)
            size = min(_largest(one - first), _largest(other - first))
            rounding = 16 * self._rounding * max(map(_largest, (first, one, other, both)))
            if not _largest(both - one - other + first) <= self._tolerance * size + rounding:
                return False
        return True

    def mixes(self, module: str) -> bool:
        """Whether a module weighs several outputs of a head against one another, as a readout does.

        Not so if it scales or shifts: then an output depends on one of the module's numbers, or on
        one of the outputs that a head gives for a row.
        """
        holder = self._holders[module]
        for recorder in self._recorders.values():
            recorder.reset(probing=True)
        holder.reset(probing=True)
        with torch.enable_grad(), GraphsKept():
            values = self._run(self._model).flatten()
        leaves = holder.calls[0].leaves
        calls = [call for recorder in self._recorders.values() for call in recorder.calls]
        probes = [call.probe for call in calls if call.probe is not None]
        weighing = mixing = False
        for value in values[:: max(1, len(values) // 8)][:8]:
            found = torch.autograd.grad(
                value, [*leaves, *probes], retain_graph=True, materialize_grads=True
            )
            weighing |= any(int(part.count_nonzero()) > 1 for part in found[: len(leaves)])
            for call, part in zip(calls, found[len(leaves) :], strict=True):
                mixing |= bool((as_rows(call.head, part).count_nonzero(1) > 1).any())
        return weighing and mixing

    def _value(self, names: Sequence[str], steps: int, seed: int) -> Tensor:
        """The output, in float64, some steps along a change of some names."""
        key = (frozenset(names), steps, seed) if names and steps else (frozenset(), 0, 0)
        if key not in self._values:
            for i, (name, recorder) in enumerate(self._recorders.items()):
                change = None
                recorder.reset()  # to its own weights, by which changes are measured
                if name in names:
                    own = head_weights(recorder.head)
                    change = large_change(own, 1000 * seed + i) * steps
                recorder.reset(change=change)
            for i, (module, holder) in enumerate(self._holders.items()):
                parts = []
                for name, parameter in zip(self.own(module), holder.own.values(), strict=True):
                    own = parameter.detach().flatten()
                    change = large_change(own, 2000 * seed + i) * steps
                    parts.append(change if name in names else torch.zeros_like(change))
                holder.reset(change=torch.cat(parts))
            output = self._run(self._model).detach()
            self._rounding, self._tolerance = coarsest([output]), tolerance(coarsest([output]))
            self._values[key] = output.double()
        return self._values[key]


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _completed(model: nn.Module, run: Run, found: Found, beside: list[str], outputs: int) -> Found:
    """The readout with modules that are no linear maps and that the output is linear in too.

    A module that adds to what the heads give (an embedding, a wide convolution, a graph
    convolution beside a linear skip) joins them. One that weighs the outputs of a head against one
    another (a raw weight after a linear bottleneck) is the readout instead of that head. One that
    only scales or shifts them, or is too large, is left out, and `left` says so.

    Args:
        model: the user's.
        run: calls it on the first batch.
        found: the heads.
        beside: parameters that reach the output past the heads, through no known nonlinearity.
        outputs: how many numbers the model gives for the batch.
    """
    owning = dict.fromkeys(name.rpartition(".")[0] for name in beside)
    modules = [name for name in owning if name not in found.heads and not scripted(model, name)]
    trials = Trials(model, run, found.heads, modules)
    heads = [head for head in found.heads if trials.affine([head])]
    outside = set(found.heads) & set(owning)  # used by more than a call of the layer
    if not heads or not trials.affine(heads):
        if not outside:
            return found  # the tap owns up to it
        later = [name for name in found.later if name.rpartition(".")[0] not in outside]
        return replace(found, later=later, case="parameters")
    joining, after, left = list[str](), list[str](), dict[str, str]()
    for module in modules:
        own, joined = trials.own(module), [*heads, *joining]
        reason = trials.obstacle([*joined, module], outputs)
        if not trials.affine(own):
            left |= trials.bent(module, beside)
        elif trials.apart(own, [name for each in joined for name in trials.own(each)]):
            if reason:
                left[module] = reason
            else:
                joining.append(module)
        elif not trials.mixes(module):
            left[module] = f"{trials.size(module):,} parameters that scale or shift"
        elif reason := trials.obstacle([module], outputs):
            left[module] = reason
        elif all(trials.apart(own, trials.own(each)) for each in after):
            after.append(module)
    others = [*joining, *after]
    for head in set(found.heads) - set(heads):
        if all(trials.apart([head], trials.own(module)) for module in others):
            return found  # no module comes after it
    for module in after:  # what is multiplied by a later weight is not the last layer
        heads = [head for head in heads if trials.apart([head], trials.own(module))]
        joining = [each for each in joining if trials.apart(trials.own(each), trials.own(module))]
    others = [*joining, *after]
    if not others and not outside:
        return replace(found, left=left)
    later = [name for name in found.later if name.rpartition(".")[0] not in {*others, *outside}]
    return replace(found, heads=[*heads, *others], later=later, case="parameters", left=left)


def large_change(weights: Tensor, seed: int) -> Tensor:
    """Random, large enough to carry the output through whatever nonlinearity may follow."""
    size = float(weights.square().mean().sqrt())
    if size < 1e-6:  # zeros, but for rounding: a change as small would drown in it
        size = 1.0
    return normal_like(weights.to(torch.float64), seed) * 10 * size


def tolerance(rounding: float) -> float:
    """Of a change of the output, relative to it, that is called linear at some rounding."""
    return min(0.1, 100 * math.pow(rounding, 0.75))


def _marked(
    run: Run, model: nn.Module, names: list[str]
) -> tuple[list[Marker], dict[int, int], Tensor, MarkedPass]:
    """One pass of a shadow with a mark at every call of some modules.

    Returns:
        The modules' markers, their numbers by the ids of their marks, the output with its graph,
        and what is kept of the pass.
    """
    model, markers = record(model, names, Marker)
    before = Watch(model, ignored=Marker)
    with torch.enable_grad():
        try:  # with nothing kept for a backward pass, so no more memory than without gradients
            with saved_tensors_hooks(lambda _: None, cast("Any", lambda _: None)):
                output = run(model)
        except Exception:  # a model that differentiates itself: torch takes no None for a tensor
            for marker in markers:
                marker.reset(probing=True)
            output = run(model)
    marks = {id(mark.leaf): i for i, marker in enumerate(markers) for mark in marker.marks}
    renewed = frozenset(before.renewed(Watch(model, ignored=Marker)))
    returned = _returned(output, markers)
    name = None if returned is None else names[returned]
    return markers, marks, output, MarkedPass(output.detach(), renewed, name)


def _returned(output: Tensor, markers: list[Marker]) -> int | None:
    """The number of the module of which the output is what its only call returned.

    The graph tells: from the output back to what was returned there are but nodes that reshape. So
    it is for any weights, as long as the model takes the same way; every later pass is compared to
    the bit.
    """
    only = [marker.marks[0] if len(marker.marks) == 1 else None for marker in markers]
    numbers = {mark.node: i for i, mark in enumerate(only) if mark is not None}
    node = output.grad_fn
    while node is not None and node not in numbers and node.name() in _ORDERLY:
        node = node.next_functions[0][0]
    if node is None or node not in numbers:
        return None
    mark = only[numbers[node]]
    # A view shares the count of writes: a write without a graph shows in it.
    if mark is None or (mark.numel, mark.version) != (output.numel(), output._version):
        return None
    return numbers[node]


def _nothing_found(model: str, maps: list[str], others: str) -> str:
    if not maps:
        reason = f"{model} has no linear map (nn.Linear or 1x1 convolution) to take features from."
    else:
        reason = (
            "No linear map reaches the output through differentiable operations: does the forward "
            "pass use torch.no_grad, detach, .data or NumPy, or end in something other than a "
            "linear layer?"
        )
    return f"{reason} {others}Pass features=callable(model, *inputs) -> (N, D)."


def left_out(found: Found) -> str:
    """What was left out of the readout though the output is linear in it, and what that means."""
    parts = ", ".join(f"{_shown(name)} ({reason})" for name, reason in found.left.items())
    return (
        f"Parameters that reach the output past {', '.join(map(_shown, found.heads))} are left out "
        f"of the readout: {parts}. The error bars are those of the former alone. Name all that "
        "belongs to the readout, layer=[..., ...], or pass features=."
    )


def nearest(model: nn.Module, parameters: list[str], heads: Sequence[str] = ()) -> str:
    """The line that takes the derivative by the parameters nearest to the output, given these.

    Args:
        model: the user's.
        parameters: names of those that act on the output, nearest first.
        heads: linear maps before them, to fall back upon where the parameters are a few numbers.
    """
    if not parameters:
        return ""
    inner = unwrapped(model)
    owning = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
    open_ones = [name for name in owning if not scripted(model, name)]
    if not open_ones:
        return "The nearest are in TorchScript, which cannot be looked into. "
    weighing = [name for name in open_ones if _weighs(inner.get_submodule(name))]
    names = (weighing or list(heads) or open_ones)[:3]
    around = commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    around = names[0] if not around or scripted(model, around) else around
    held = ", ".join(f"{_shown(name)} ({_size(inner.get_submodule(name)):,})" for name in names)
    return (
        f"The layers nearest to the output, with their numbers of parameters: {held}; "
        f'layer="{around}" takes the derivative by them. '
    )


def _weighs(module: nn.Module) -> bool:
    """Whether a module has weights, more than numbers that scale, shift or bend."""
    if isinstance(module, (nn.PReLU, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)):
        return False
    return any(parameter.numel() > 1 for parameter in own_parameters(module).values())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in own_parameters(module).values())


def _shown(name: str) -> str:
    return repr(name) if name else "the model itself"


def scripted(model: nn.Module, name: str) -> bool:
    """Whether a module has parameters inside TorchScript, which cannot be looked into."""
    inner = unwrapped(model)
    return any(
        isinstance(inner.get_submodule(path.rpartition(".")[0]), torch.jit.ScriptModule)
        for path, module in inner.get_submodule(name).named_modules(prefix=name)
        if list(module.parameters(recurse=False))
    )


def _last(found: dict[int, list[Any]], marks: dict[int, int]) -> list[int]:
    """Those of the heads found that feed no other of them."""
    feeding: set[int] = set()
    for i, before in found.items():
        feeding |= set(_walk(before, marks, through=True)[0]) - {i}
    return sorted(set(found) - feeding or found)


def _walk(
    start: list[Any],
    marks: dict[int, int],
    *,
    through: bool = False,
    bending: Collection[str] = (),
) -> tuple[dict[int, list[Any]], dict[int, Tensor]]:
    """For each head met on the way back the nodes before it; other leaves by id, nearest first.

    The number of a head stands in `marks` by its leaf's id; `through` goes on behind a mark. What
    lies behind nodes of the names in `bending` is not looked at.
    """
    found: dict[int, list[Any]] = {}
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    queue = deque(start)
    while queue:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions if child is not None]
        variables = [v for c in children if (v := getattr(c, "variable", None)) is not None]
        met = [marks[id(v)] for v in variables if id(v) in marks]
        for head in met:
            found.setdefault(head, []).extend(children)
        if through or not met:
            for variable in variables:
                leaves.setdefault(id(variable), variable)
            if node.name() not in bending:
                queue.extend(children)
    return found, leaves
