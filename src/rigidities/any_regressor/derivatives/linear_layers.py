r"""Inputs and slopes of a module's linear layers: the factors of its Jacobian by their weights.

One forward pass records the input a of each `nn.Linear`. One backward pass per output gives the
slope $s = \partial \tilde y / \partial z$ at the layer's output z, for all samples of the batch at
once. The block of a weight is the outer product of s and a (`tangents.Outer`), that of a bias is s.
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

from ...models.derivatives import normal_like
from .regressor import Regressor
from .tangents import Explicit, Outer, TangentBlock


class NotFactored(Exception):
    """Raised where row n of a layer's input does not belong to sample n."""


class _LayerCall(NamedTuple):
    """One call of a linear layer: its input (N, ..., I) and its output (N, ..., O)."""

    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class LinearLayers:
    """The linear layers whose weights and biases are used only in calls of the layer.

    Attributes:
        layers: The names of the layers within the module.
    """

    layers: list[str]

    @classmethod
    def of(cls, regressor: Regressor) -> LinearLayers | None:
        """The layers with a selected parameter that they share with no other; None without any."""
        if regressor.module is None:
            return None
        uses = _uses_of_parameters(regressor.module)
        selected = set(regressor.parameters.names)
        layers = []
        for name, module in regressor.module.named_modules():
            if type(module) is not nn.Linear:
                continue
            parameters = [p for p in module._parameters.values() if p is not None]
            is_selected = not selected.isdisjoint(_parameter_names(name))
            is_shared = any(uses[id(parameter)] > 1 for parameter in parameters)
            if is_selected and not is_shared:
                layers.append(name)
        return cls(layers) if layers else None

    @property
    def names(self) -> set[str]:
        """Names of the layers' parameters."""
        names: set[str] = set()
        for layer in self.layers:
            names.update(_parameter_names(layer))
        return names

    def blocks(
        self, regressor: Regressor, *inputs: Any, **kwargs: Any
    ) -> tuple[Tensor, dict[str, TangentBlock]]:
        """Predictions (N, K), and the block of each layer's weight and bias by name.

        Layers that the batch does not call have no block.

        Raises:
            NotFactored: The rows of a layer are not the samples.
        """
        assert regressor.module is not None
        with torch.enable_grad(), self._recording(regressor.module) as calls:
            output = regressor.function(regressor.parameters.tree, *inputs, **kwargs)
            rows = output.reshape(len(output), -1)
            for layer_calls in calls.values():
                for call in layer_calls:
                    if call.input.ndim < 2 or len(call.input) != len(rows):
                        raise NotFactored
            if not rows.requires_grad:  # the batch calls none of the layers
                return rows.detach(), {}
            slopes = self._slopes(rows, calls)
        blocks: dict[str, TangentBlock] = {}
        for name, layer_calls in calls.items():
            if not layer_calls:
                continue
            # All positions of all calls, T: inputs (N, T, I) and slopes (N, K, T, O).
            a = torch.cat([_positions(call.input) for call in layer_calls], dim=1)
            s = torch.cat([slopes[id(call)] for call in layer_calls], dim=2)
            weight_name, bias_name = _parameter_names(name)
            if a.shape[1] == 1:
                blocks[weight_name] = Outer(a[:, 0], s[:, :, 0])
            else:  # a sum over positions is no longer one outer product
                blocks[weight_name] = Explicit(torch.einsum("nti,nkto->nkoi", a, s).flatten(-2))
            blocks[bias_name] = Explicit(s.sum(2))
        return rows.detach(), blocks

    def _slopes(self, rows: Tensor, calls: dict[str, list[_LayerCall]]) -> dict[int, Tensor]:
        """d output / d z of each call, (N, K, T, O), by the id of the call."""
        all_calls = [call for name in self.layers for call in calls[name]]
        gradients_by_output = [
            _gradients(rows[:, k].sum(), all_calls) for k in range(rows.shape[1])
        ]
        slopes = {}
        for number, call in enumerate(all_calls):
            gradients = [by_call[number] for by_call in gradients_by_output]
            slopes[id(call)] = torch.stack(gradients, dim=1)
        # Row n of a layer must belong to sample n. Then weighting the samples' outputs weights the
        # rows of the gradient in the same way.
        weights = normal_like(rows[:, :1]).abs().add(0.5)
        weighted_gradients = _gradients((weights * rows).sum(), all_calls)
        for call, gradient in zip(all_calls, weighted_gradients, strict=True):
            expected = weights[..., None] * slopes[id(call)].sum(1)
            if not bool((gradient - expected).norm() <= 1e-3 * expected.norm()):
                raise NotFactored
        return slopes

    @contextmanager
    def _recording(self, module: nn.Module) -> Iterator[dict[str, list[_LayerCall]]]:
        """Record every call of the layers, by the layer's name, while the context lasts."""
        calls: dict[str, list[_LayerCall]] = {name: [] for name in self.layers}

        def record(name: str, layer: nn.Module, args: Any, keywords: Any, output: Tensor) -> Tensor:
            """A forward hook, which notes the call and returns the output to go on with."""
            entering: Tensor = args[0] if args else keywords["input"]
            leaving = output if output.requires_grad else output.detach().requires_grad_()
            calls[name].append(_LayerCall(entering.detach(), leaving))
            return leaving.clone()  # what follows may write in place

        handles = []
        for name in self.layers:
            layer = module.get_submodule(name)
            handles.append(layer.register_forward_hook(partial(record, name), with_kwargs=True))
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()


def _uses_of_parameters(module: nn.Module) -> Counter[int]:
    """In how many submodules each parameter is registered, by its id."""
    uses: Counter[int] = Counter()
    for submodule in module.modules():
        uses.update(id(p) for p in submodule._parameters.values() if p is not None)
    return uses


def _gradients(total: Tensor, calls: list[_LayerCall]) -> list[Tensor]:
    """Gradients of a number with respect to the output of each call, (N, T, O)."""
    outputs = [call.output for call in calls]
    gradients = torch.autograd.grad(total, outputs, retain_graph=True, materialize_grads=True)
    return [_positions(gradient) for gradient in gradients]


def _positions(tensor: Tensor) -> Tensor:
    """A tensor with its inner dimensions as one of positions, (N, ..., D) -> (N, T, D)."""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def _parameter_names(layer: str) -> tuple[str, str]:
    """Names of a layer's weight and bias; the module itself has the name ""."""
    prefix = f"{layer}." if layer else ""
    return f"{prefix}weight", f"{prefix}bias"
