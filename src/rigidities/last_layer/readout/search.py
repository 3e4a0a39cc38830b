"""Finding the readout: the last linear maps on the way to the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...models.shadow import shadow, unwrapped
from .heads import Recorder, linear_maps, record


@dataclass(frozen=True)
class Found:
    """The readout heads, by name.

    Attributes:
        heads: the last linear maps.
        later: parameters that act between them and the output.
        silent: linear maps that the batch did not call, of which nothing is known.
    """

    heads: list[str]
    later: list[str]
    silent: list[str]


def find_heads(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> Found:
    """The last linear maps on the way to the output.

    Every linear map of a shadow is probed in one forward pass; the autograd graph is then walked
    back from the output, stopping at the first probe on each path. A map that also feeds another
    one found (through attention weights, a skip connection) is not a last one.

    Args:
        model: the model; not touched.
        run: calls a model on the batch and returns the output tensor.

    Raises:
        ValueError: there is no such map.
    """
    names = list(linear_maps(unwrapped(model)))
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no linear map (nn.Linear or 1x1 convolution) to take "
            "features from. Pass features=callable(model, *inputs) -> (N, D)."
        )
    probed, recorders = record(shadow(model), names)
    parameters = _unfreeze(probed)
    for recorder in recorders:
        recorder.reset(probing=True)
    with torch.enable_grad():
        output = run(probed)
    by_probe = {id(c.probe): i for i, r in enumerate(recorders) for c in r.calls}
    found, leaves = _first_probes([output.grad_fn], by_probe)
    if not found:
        raise ValueError(
            "No linear map reaches the output through differentiable operations: does the forward "
            "pass use torch.no_grad, detach, .data or NumPy, or end in something other than a "
            "linear layer? Pass features=callable(model, *inputs) -> (N, D)."
        )
    later = [parameters[leaf] for leaf in leaves if leaf in parameters]
    silent = [name for name, recorder in zip(names, recorders, strict=True) if not recorder.calls]
    heads = [names[i] for i in sorted(_last(found, recorders, by_probe))]
    return Found(heads, sorted(later), silent)


def _last(found: set[int], recorders: list[Recorder], by_probe: dict[int, int]) -> set[int]:
    """Those of the heads found that feed no other of them."""
    feeding: set[int] = set()
    for i in found:
        reached, front = {i}, [call.input.grad_fn for call in recorders[i].calls]
        while front:
            met, _ = _first_probes(front, by_probe)
            front = [c.input.grad_fn for j in met - reached for c in recorders[j].calls]
            reached |= met
        feeding |= reached - {i}
    return found - feeding or found


def _unfreeze(model: nn.Module) -> dict[int, str]:
    """Let the shadow's aliases (never the user's parameters) appear in the graph; their names."""
    named = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
            named[id(parameter)] = name
    return named


def _first_probes(start: list[Any], by_probe: dict[int, int]) -> tuple[set[int], set[int]]:
    """Heads met first on each path back from some nodes, and parameters met before them."""
    found: set[int] = set()
    leaves: set[int] = set()
    seen: set[Any] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions if child is not None]
        variables = [id(v) for c in children if (v := getattr(c, "variable", None)) is not None]
        probes = [by_probe[v] for v in variables if v in by_probe]
        if probes:
            found.update(probes)
        else:
            leaves.update(variables)
            stack.extend(children)
    return found, leaves
