r"""Inputs and slopes of a module's linear layers: all that its Jacobian by their weights needs.

One forward pass records what enters each `nn.Linear`, one backward pass per output gives
$s = \partial \tilde y / \partial z$ at what leaves it, for all samples of the batch at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.directional import normal_like
from .regressor import Regressor
from .tangents import Block, Explicit, Outer


@dataclass(frozen=True)
class LinearLayers:
    """The layers, by name, whose weights and biases enter a regressor through their call alone."""

    layers: list[str]

    @classmethod
    def of(cls, regressor: Regressor) -> LinearLayers | None:
        """Those of which a parameter is selected; None where there are none."""
        if regressor.module is None:
            return None
        held = (value for m in regressor.module.modules() for value in m._parameters.values())
        shared = Counter(id(value) for value in held if value is not None)
        selected = set(regressor.parameters.names)
        layers = [
            name
            for name, module in regressor.module.named_modules()
            if type(module) is nn.Linear
            and selected & {_joined(name, "weight"), _joined(name, "bias")}
            and all(shared[id(v)] == 1 for v in module._parameters.values() if v is not None)
        ]
        return cls(layers) if layers else None

    @property
    def names(self) -> set[str]:
        """Names of their parameters."""
        return {_joined(name, kind) for name in self.layers for kind in ("weight", "bias")}

    def blocks(
        self, regressor: Regressor, *inputs: Any, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Block]]:
        """Predictions (N, K) and the block of each layer's weight and bias."""
        assert regressor.module is not None
        with torch.enable_grad(), self._recording(regressor.module) as calls:
            output = regressor.function(regressor.parameters.tree, *inputs, **kwargs)
            rows = output.reshape(len(output), -1)
            entered = [call.input for some in calls.values() for call in some]
            if any(entering.ndim < 2 or len(entering) != len(rows) for entering in entered):
                raise NotFactored
            if not rows.requires_grad:  # the batch calls none of the layers
                return rows.detach(), {}
            slopes = self._slopes(rows, calls)
        blocks: dict[str, Block] = {}
        for name, made in calls.items():
            if not made:
                continue
            a = torch.cat([_positions(call.input) for call in made], dim=1)
            s = torch.cat([slopes[id(call)] for call in made], dim=2)
            if a.shape[1] == 1:
                blocks[_joined(name, "weight")] = Outer(a[:, 0], s[:, :, 0])
            else:  # the sum over positions
                weight = torch.einsum("nti,nkto->nkoi", a, s).flatten(-2)
                blocks[_joined(name, "weight")] = Explicit(weight)
            blocks[_joined(name, "bias")] = Explicit(s.sum(2))
        return rows.detach(), blocks

    def _slopes(self, rows: Tensor, calls: dict[str, list[_Call]]) -> dict[int, Tensor]:
        """d output / d z of each call, (N, K, T, O)."""
        made = [call for name in self.layers for call in calls[name]]
        each = (_gradients(rows[:, k].sum(), made) for k in range(rows.shape[1]))
        parts = zip(map(id, made), zip(*each, strict=True), strict=True)
        slopes = {call: torch.stack(grads, dim=1) for call, grads in parts}
        # row n of a layer must belong to sample n: weights of the samples must come back there
        weights = normal_like(rows[:, :1]).abs().add(0.5)
        for call, grad in zip(made, _gradients((weights * rows).sum(), made), strict=True):
            expected = weights[..., None] * slopes[id(call)].sum(1)
            if not bool((grad - expected).norm() <= 1e-3 * expected.norm()):
                raise NotFactored
        return slopes

    @contextmanager
    def _recording(self, whole: nn.Module) -> Iterator[dict[str, list[_Call]]]:
        calls: dict[str, list[_Call]] = {name: [] for name in self.layers}

        def record(name: str, module: nn.Module, args: Any, named: Any, output: Tensor) -> Tensor:
            entering: Tensor = args[0] if args else named["input"]
            leaving = output if output.requires_grad else output.detach().requires_grad_()
            calls[name].append(_Call(entering.detach(), leaving))
            return leaving.clone()  # what follows may write in place

        handles = [
            whole.get_submodule(name).register_forward_hook(partial(record, name), with_kwargs=True)
            for name in self.layers
        ]
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()


class NotFactored(Exception):
    """Row n of a layer's input does not belong to sample n."""


class _Call(NamedTuple):
    input: Tensor
    output: Tensor


def _gradients(total: Tensor, calls: list[_Call]) -> list[Tensor]:
    """By what left each call, (N, T, O)."""
    outputs = [call.output for call in calls]
    found = torch.autograd.grad(total, outputs, retain_graph=True, materialize_grads=True)
    return [_positions(gradient) for gradient in found]


def _positions(tensor: Tensor) -> Tensor:
    """(N, ..., D) -> (N, T, D)."""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def _joined(name: str, kind: str) -> str:
    return f"{name}.{kind}" if name else kind
