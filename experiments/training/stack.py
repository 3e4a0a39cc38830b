"""Many small networks of one architecture, their weights stacked: a layer is one batched product.

`Stack` has a forward and a backward pass of its own, without autograd: for networks of one hidden
layer the bookkeeping of autograd would take longer than the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Activation:
    """A nonlinearity phi.

    Attributes:
        value: z -> phi(z).
        backward: The chain rule, (g, z) -> g phi'(z), for a gradient g by phi(z).
        module: Makes the module of torch.
    """

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    module: Callable[[], nn.Module]


def _relu_backward(gradient: Tensor, z: Tensor) -> Tensor:
    """The gradient where z > 0, else zero."""
    result: Tensor = torch.ops.aten.threshold_backward(gradient, z, 0)
    return result


# The backward kernels are torch's: one operation each.
ACTIVATIONS = {
    "relu": Activation(torch.relu, _relu_backward, nn.ReLU),
    "silu": Activation(nn.functional.silu, torch.ops.aten.silu_backward, nn.SiLU),
}


def products(x: Tensor, weight: Tensor) -> Tensor:
    """x W for every network: (B, N, in), (B, in, out) -> (B, N, out)."""
    if weight.shape[2] == 1:  # batched products of thin matrices are slower than a sum
        return (x * weight.mT).sum(-1, keepdim=True)
    return torch.bmm(x, weight)


def weight_gradient(x: Tensor, gradient: Tensor, out: Tensor) -> None:
    """Write x^T g into `out` for every network: the gradient by W where g is that by x W."""
    if gradient.shape[2] == 1:
        torch.sum(x * gradient, 1, out=out[..., 0])
    else:
        # A product with a transposed view is many times slower on some processors.
        torch.bmm(x.mT.contiguous(), gradient, out=out)


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """g W^T for every network: the gradient by x where g is that by x W."""
    if gradient.shape[2] == 1:
        return gradient * weight.mT
    return torch.bmm(gradient, weight.mT.contiguous())


@dataclass(frozen=True)
class Trace:
    """What a forward pass leaves for the backward pass.

    Attributes:
        inputs: What enters each layer, (B, N, in), masks applied.
        preactivations: The hidden layers before their activation, (B, N, out).
        masks: Factors on what enters each layer, or None.
        output: (B, N, K).
    """

    inputs: list[Tensor]
    preactivations: list[Tensor]
    masks: Sequence[Tensor | None]
    output: Tensor


class Stack:
    """B networks of one architecture.

    The weights of all layers are views of one tensor, `flat`, (B, parameters). The gradients are
    views of another, `gradient`. An optimiser is then a few operations on two tensors.

    Attributes:
        sizes: Inputs, hidden widths, outputs.
        activation: A name in `ACTIVATIONS`.
        last_bias: Whether the last layer has a bias.
        flat: (B, parameters), layer by layer, weight then bias.
        weights: Views of the layers' weights, (B, in, out).
        biases: Views of the layers' biases, (B, 1, out); None for a layer without.
    """

    def __init__(
        self, flat: Tensor, sizes: Sequence[int], activation: str = "relu", last_bias: bool = True
    ) -> None:
        self.flat = flat
        self.sizes = tuple(sizes)
        self.activation = activation
        self.last_bias = last_bias
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

        Args:
            seeds: The seed of each network. Its weights do not depend on its companions.
            sizes: Inputs, hidden widths, outputs.
            activation: A name in `ACTIVATIONS`.
            last_bias: Whether the last layer has a bias.
            device: Where the weights go after they were drawn on the CPU.
        """
        networks = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            layers = []
            for inputs, outputs, has_bias in _layers(sizes, last_bias):
                count = (inputs + has_bias) * outputs
                uniform = 2 * torch.rand(count, generator=generator) - 1
                layers.append(uniform / math.sqrt(inputs))
            networks.append(torch.cat(layers))
        return cls(torch.stack(networks).to(device), sizes, activation, last_bias)

    def __len__(self) -> int:
        return len(self.flat)

    @property
    def gradient(self) -> Tensor:
        """The gradient of the losses by `flat`, which `backward` wrote last."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.flat)
            self._weight_gradients, self._bias_gradients = self._views(self._gradient)
        return self._gradient

    def forward(self, x: Tensor, masks: Sequence[Tensor | None] | None = None) -> Trace:
        """A pass (B, N, d) -> (B, N, K) that `backward` can follow.

        Args:
            x: The rows of each network.
            masks: Factors on what enters each layer (dropout), or None.
        """
        masks = masks or [None] * len(self.weights)
        phi = ACTIVATIONS[self.activation].value
        inputs: list[Tensor] = []
        preactivations: list[Tensor] = []
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if layer > 0:
                preactivations.append(x)
                x = phi(x)
            if masks[layer] is not None:
                x = x * masks[layer]
            inputs.append(x)
            x = products(x, weight)
            if bias is not None:
                x = x.add_(bias)
        return Trace(inputs, preactivations, masks, x)

    def backward(
        self, trace: Trace, output_gradient: Tensor, *, inputs: bool = False
    ) -> Tensor | None:
        """Write d(loss)/d(weights) into `gradient`, given d(loss)/d(output).

        Args:
            trace: What the forward pass left.
            output_gradient: d(loss)/d(output), (B, N, K).
            inputs: Whether d(loss)/d(input) is wanted too.

        Returns:
            d(loss)/d(input), (B, N, d), where it is wanted; None otherwise.
        """
        self.gradient  # noqa: B018  makes the buffer and its views
        activation_backward = ACTIVATIONS[self.activation].backward
        gradient = output_gradient
        for layer in reversed(range(len(self.weights))):
            weight_gradient(trace.inputs[layer], gradient, self._weight_gradients[layer])
            bias_gradient = self._bias_gradients[layer]
            if bias_gradient is not None:
                torch.sum(gradient, 1, keepdim=True, out=bias_gradient)
            if layer == 0 and not inputs:
                return None
            gradient = input_gradient(gradient, self.weights[layer])
            mask = trace.masks[layer]
            if mask is not None:
                gradient = gradient * mask
            if layer > 0:
                gradient = activation_backward(gradient, trace.preactivations[layer - 1])
        return gradient

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, K), without gradients."""
        return self.forward(x).output

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """What enters the last layer, and a column of ones where that layer has a bias."""
        hidden = self.forward(x).inputs[-1]
        if not self.last_bias:
            return hidden
        return torch.cat([hidden, torch.ones_like(hidden[..., :1])], dim=-1)

    def picked(self, places: Tensor | Sequence[int] | slice) -> Stack:
        """Copies of some of the networks, as a stack."""
        return Stack(self.flat[places].clone(), self.sizes, self.activation, self.last_bias)

    def module(self, place: int) -> nn.Sequential:
        """One of the networks as a module, in evaluation mode, on the CPU."""
        layers: list[nn.Module] = []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            inputs, outputs = weight.shape[1:]
            linear = nn.Linear(inputs, outputs, bias=bias is not None)
            with torch.no_grad():
                linear.weight.copy_(weight[place].T)
                if bias is not None:
                    linear.bias.copy_(bias[place, 0])
            layers += [linear, ACTIVATIONS[self.activation].module()]
        return nn.Sequential(*layers[:-1]).eval()  # no activation after the last layer

    def _views(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Weights and biases of the layers as views of a tensor like `flat`."""
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        start = 0
        for inputs, outputs, has_bias in _layers(self.sizes, self.last_bias):
            stop = start + inputs * outputs
            weights.append(flat[:, start:stop].unflatten(1, (inputs, outputs)))
            start = stop
            if has_bias:
                stop = start + outputs
                biases.append(flat[:, None, start:stop])
                start = stop
            else:
                biases.append(None)
        return weights, biases


def _layers(sizes: Sequence[int], last_bias: bool) -> list[tuple[int, int, bool]]:
    """Inputs and outputs of each layer, and whether it has a bias."""
    layers = [(inputs, outputs, True) for inputs, outputs in pairwise(sizes)]
    inputs, outputs, _ = layers[-1]
    layers[-1] = (inputs, outputs, last_bias)
    return layers
