"""Many small nets with one architecture, their weights stacked: a layer is one batched product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Activation:
    """A nonlinearity phi, its chain rule (slope, z) -> slope phi'(z), and its module."""

    value: Callable[[Tensor], Tensor]
    chain: Callable[[Tensor, Tensor], Tensor]
    module: Callable[[], nn.Module]


# Torch's own backward kernels: one operation each.
ACTIVATIONS = {
    "relu": Activation(
        torch.relu, lambda slope, z: torch.ops.aten.threshold_backward(slope, z, 0), nn.ReLU
    ),
    "silu": Activation(nn.functional.silu, torch.ops.aten.silu_backward, nn.SiLU),
}


def products(x: Tensor, weight: Tensor) -> Tensor:
    """x W for every net. One output is a sum: batched products of thin matrices are slow."""
    if weight.shape[2] == 1:
        return (x * weight.mT).sum(-1, keepdim=True)
    return torch.bmm(x, weight)


def weight_slope(x: Tensor, slope: Tensor, out: Tensor) -> None:
    """x^T slope for every net, into `out`."""
    if slope.shape[2] == 1:
        torch.sum(x * slope, 1, out=out[..., 0])
    else:
        # A product with a transposed view is many times slower on some processors.
        torch.bmm(x.mT.contiguous(), slope, out=out)


def input_slope(slope: Tensor, weight: Tensor) -> Tensor:
    """slope W^T for every net."""
    if slope.shape[2] == 1:
        return slope * weight.mT
    return torch.bmm(slope, weight.mT.contiguous())


@dataclass(frozen=True)
class Trace:
    """What a forward pass leaves for the backward pass.

    Attributes:
        entering: of each layer, (B, N, in), masks applied.
        before: the hidden layers before their activation, (B, N, out).
        masks: factors on what enters each layer, or None.
        output: (B, N, K).
    """

    entering: list[Tensor]
    before: list[Tensor]
    masks: Sequence[Tensor | None]
    output: Tensor


class Stack:
    """B nets of one architecture.

    The weights of all layers are views of one tensor, `flat`, (B, parameters); so are the
    gradients, of `gradient`. An optimiser is then a few operations on two tensors.

    Attributes:
        sizes: inputs, hidden widths, outputs.
        activation: a name in `ACTIVATIONS`.
        last_bias: whether the last layer has a bias.
        flat: (B, parameters), layer by layer, weight then bias.
    """

    def __init__(
        self, flat: Tensor, sizes: Sequence[int], activation: str = "relu", last_bias: bool = True
    ) -> None:
        self.flat, self.sizes = flat, tuple(sizes)
        self.activation, self.last_bias = activation, last_bias
        self.weights, self.biases = self._views(flat)
        self._gradient: Tensor | None = None

    @classmethod
    def drawn(
        cls,
        seeds: Sequence[int],
        sizes: Sequence[int],
        activation: str = "relu",
        *,
        last_bias: bool = True,
        device: str | torch.device = "cpu",
    ) -> Stack:
        """Torch's default first weights, uniform within one over the root of the fan-in.

        Each net is drawn from its own seed: its weights do not depend on its companions.
        """
        rows = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            parts = []
            for last, (inputs, outputs) in zip(_last(sizes), pairwise(sizes), strict=True):
                count = (inputs + (last_bias or not last)) * outputs
                parts.append((2 * torch.rand(count, generator=generator) - 1) / math.sqrt(inputs))
            rows.append(torch.cat(parts))
        return cls(torch.stack(rows).to(device), sizes, activation, last_bias)

    def __len__(self) -> int:
        return len(self.flat)

    @property
    def gradient(self) -> Tensor:
        """Of the losses by `flat`: what `backward` wrote last."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.flat)
            self._slopes = self._views(self._gradient)
        return self._gradient

    def forward(self, x: Tensor, masks: Sequence[Tensor | None] | None = None) -> Trace:
        """A pass (B, N, d) -> (B, N, K) that `backward` can follow.

        Args:
            x: the rows of each net.
            masks: factors on what enters each layer (dropout), or None.
        """
        masks = masks or [None] * len(self.weights)
        phi = ACTIVATIONS[self.activation].value
        entering, before = [], []
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if layer:
                before.append(x)
                x = phi(x)
            if masks[layer] is not None:
                x = x * masks[layer]
            entering.append(x)
            x = products(x, weight)
            x = x if bias is None else x.add_(bias)
        return Trace(entering, before, masks, x)

    def backward(self, trace: Trace, slope: Tensor, *, inputs: bool = False) -> Tensor | None:
        """Write d(loss)/d(weights) into `gradient`, given d(loss)/d(output).

        Args:
            trace: of the forward pass.
            slope: (B, N, K).
            inputs: whether d(loss)/d(input), (B, N, d), is wanted too.
        """
        self.gradient  # noqa: B018  makes the buffer and its views
        chain = ACTIVATIONS[self.activation].chain
        weights, biases = self._slopes
        for layer in reversed(range(len(self.weights))):
            weight_slope(trace.entering[layer], slope, weights[layer])
            if biases[layer] is not None:
                torch.sum(slope, 1, keepdim=True, out=biases[layer])
            if layer == 0 and not inputs:
                return None
            slope = input_slope(slope, self.weights[layer])
            if (mask := trace.masks[layer]) is not None:
                slope = slope * mask
            if layer:
                slope = chain(slope, trace.before[layer - 1])
        return slope

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, K), without gradients."""
        return self.forward(x).output

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """What enters the last layer, and a column of ones where that has a bias."""
        hidden = self.forward(x).entering[-1]
        if not self.last_bias:
            return hidden
        return torch.cat([hidden, torch.ones_like(hidden[..., :1])], dim=-1)

    def picked(self, places: Tensor | Sequence[int] | slice) -> Stack:
        """Copies of some of the nets, as a stack."""
        return Stack(self.flat[places].clone(), self.sizes, self.activation, self.last_bias)

    def module(self, place: int) -> nn.Sequential:
        """One net as a module of its own, on the CPU."""
        layers: list[nn.Module] = []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            layer = nn.Linear(*weight.shape[1:], bias=bias is not None)
            with torch.no_grad():
                layer.weight.copy_(weight[place].T)
                if bias is not None:
                    layer.bias.copy_(bias[place, 0])
            layers += [layer, ACTIVATIONS[self.activation].module()]
        return nn.Sequential(*layers[:-1]).eval()

    def _views(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        start = 0
        for last, (inputs, outputs) in zip(_last(self.sizes), pairwise(self.sizes), strict=True):
            weights.append(
                flat[:, start : start + inputs * outputs].unflatten(1, (inputs, outputs))
            )
            start += inputs * outputs
            with_bias = self.last_bias or not last
            biases.append(flat[:, None, start : start + outputs] if with_bias else None)
            start += outputs * with_bias
        return weights, biases


def _last(sizes: Sequence[int]) -> list[bool]:
    """For each layer, whether it is the last."""
    return [False] * (len(sizes) - 2) + [True]
