"""What a stack of networks minimises: an objective writes the gradient of every network's loss."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from experiments.training.stack import Stack

Objective = Callable[[Stack, Tensor, Tensor], None]
"""objective(stack, x, y) writes d(loss)/d(weights) of each network into `stack.gradient`."""


def squared_error(stack: Stack, x: Tensor, y: Tensor) -> None:
    """The gradient of the mean of (f(x) - y)^2 over rows and outputs."""
    trace = stack.forward(x)
    error = trace.output - y
    output_gradient = error.mul_(2 / error[0].numel())  # d(mean of squares) / d(output)
    stack.backward(trace, output_gradient)


def mean_squares(stack: Stack, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error of every network, (B,)."""
    return (stack(x) - y).square().mean((1, 2))
