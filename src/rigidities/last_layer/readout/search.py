"""Finding the readout: the last linear maps on the way to the output."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from posixpath import commonpath
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...models.directional import normal_like
from ...models.shadow import shadow, unwrapped
from .heads import Holder, Marker, Recorder, linear_maps, owners, record
from .tail import coarsest

Run = Callable[[nn.Module], Tensor]
"""Calls a model on the batch and returns the output tensor."""


@dataclass(frozen=True)
class Found:
    """The readout heads, by name.

    Attributes:
        later: parameters that act between the heads and the output.
        silent: linear maps that the batch did not call, of which nothing is known.
        case: the case to begin with: `parameters` where the heads are any modules.
    """

    heads: list[str]
    later: list[str]
    silent: list[str]
    case: str = "plain"


def find_heads(model: nn.Module, run: Run) -> Found:
    """The last linear maps on the way to the output.

    Every linear map of a shadow is marked in one forward pass; the autograd graph is then walked
    back from the output, stopping at the first mark on each path. A map that also feeds another
    one found (through attention weights, a skip connection) is not a last one.
    """
    names = list(linear_maps(unwrapped(model)))
    twin = shadow(model)
    free = [(n, p) for n, p in twin.named_parameters() if p.is_floating_point()]
    parameters = {id(p.requires_grad_()): name for name, p in free}  # aliases, not the user's
    markers, marks, output = _marked(run, twin, names)
    found, leaves = _walk([output.grad_fn], marks)
    later = [parameters[leaf] for leaf in leaves if leaf in parameters]
    if not found:
        raise ValueError(_nothing_found(type(model).__name__, names, nearest(model, later)))
    silent = [name for name, marker in zip(names, markers, strict=True) if not marker.calls]
    return Found([names[i] for i in _last(found, marks)], sorted(later), silent)


def named_heads(model: nn.Module, names: list[str], run: Run) -> Found:
    """The heads that a user means by the names of some modules.

    Linear maps are taken as they are. Of other modules all parameters inside are taken, if the
    output is linear in them together; else those of the last modules inside on the way to the
    output, as in a search.
    """
    inner = unwrapped(model)
    heads = list(dict.fromkeys(owner for name in names for owner in owners(inner, name)))
    if heads != names and not _affine(run, *record(shadow(model), heads, Holder)):
        _, marks, output = _marked(run, shadow(model), heads)
        last = _last(_walk([output.grad_fn], marks)[0], marks)
        heads = [heads[i] for i in last] or heads
    case = "plain" if _called(model, heads, run) else "parameters"
    return Found(heads, later=[], silent=[], case=case)


def _called(model: nn.Module, heads: list[str], run: Run) -> bool:
    """Whether all heads are linear maps, of which the forward pass calls some."""
    if not set(heads) <= set(linear_maps(unwrapped(model))):
        return False
    probed, recorders = record(shadow(model), heads)
    run(probed)
    return any(recorder.calls for recorder in recorders)


def _affine(run: Run, model: nn.Module, holders: list[Recorder]) -> bool:
    """Whether y(w + 2 d) - 2 y(w + d) + y(w) = 0 for large random changes d of all parameters."""
    for seed in (1, 2):
        values = []
        for steps in (0, 1, 2):
            for holder in holders:
                own = torch.cat([leaf.detach().flatten() for leaf in holder.own.values()]).double()
                holder.reset(change=large_change(own, seed) * steps)
            values.append(run(model).detach())
        rounding, (first, second, third) = coarsest(values), (v.double() for v in values)
        size = max(float((third - first).abs().max()), float((second - first).abs().max()))
        if not float((third - 2 * second + first).abs().max()) <= tolerance(rounding) * size:
            return False
    return True


def large_change(weights: Tensor, seed: int) -> Tensor:
    """Random, large enough to carry the output through whatever nonlinearity may follow."""
    size = float(weights.square().mean().sqrt()) or 1.0
    return normal_like(weights.to(torch.float64), seed) * 10 * size


def tolerance(rounding: float) -> float:
    """Of a change of the output, relative to it, that is called linear at some rounding."""
    return min(0.1, 100 * math.pow(rounding, 0.75))


def _marked(
    run: Run, model: nn.Module, names: list[str]
) -> tuple[list[Recorder], dict[int, int], Tensor]:
    """Markers of some modules, the modules' numbers by the ids of their marks, and the output."""
    model, markers = record(model, names, Marker)
    with torch.enable_grad():
        try:  # with nothing kept for a backward pass, so no more memory than without gradients
            with saved_tensors_hooks(lambda _: None, cast("Any", lambda _: None)):
                output = run(model)
        except Exception:  # a model that differentiates itself: torch takes no None for a tensor
            for marker in markers:
                marker.reset(probing=True)
            output = run(model)
    marks = {id(c.probe): i for i, marker in enumerate(markers) for c in marker.calls}
    return markers, marks, output


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


def nearest(model: nn.Module, parameters: list[str]) -> str:
    """The line that takes the derivative by the parameters nearest to the output, given these."""
    if not parameters:
        return ""
    owning = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
    names = [name for name in owning if not scripted(model, name)][:3]
    if not names:
        return "The nearest are in TorchScript, which cannot be looked into. "
    around = commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    around = names[0] if not around or scripted(model, around) else around
    return (
        f"The parameters nearest to the output are those of {', '.join(map(repr, names))}: "
        f'layer="{around}" takes the derivative by them. '
    )


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
    start: list[Any], marks: dict[int, int], *, through: bool = False
) -> tuple[dict[int, list[Any]], list[int]]:
    """For each head met on the way back the nodes before it; ids of other leaves, nearest first.

    The number of a head stands in `marks` by its leaf's id; `through` goes on behind a mark.
    """
    found: dict[int, list[Any]] = {}
    leaves: dict[int, None] = {}
    seen: set[Any] = set()
    queue = deque(start)
    while queue:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions if child is not None]
        variables = [id(v) for c in children if (v := getattr(c, "variable", None)) is not None]
        met = [marks[v] for v in variables if v in marks]
        for head in met:
            found.setdefault(head, []).extend(children)
        if through or not met:
            leaves.update(dict.fromkeys(variables))
            queue.extend(children)
    return found, list(leaves)
