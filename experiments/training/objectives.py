"""What is minimised: each objective writes the gradient of every net's own loss."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from experiments.training.stack import Stack

Objective = Callable[[Stack, Tensor, Tensor], None]
"""objective(stack, x, y) writes d(loss)/d(weights) of each net into `stack.gradient`."""


def squared_error(stack: Stack, x: Tensor, y: Tensor) -> None:
    """The mean of (f(x) - y)^2, over rows and outputs."""
    trace = stack.forward(x)
    error = trace.output - y
    stack.backward(trace, error.mul_(2 / error[0].numel()))


def mean_squares(stack: Stack, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error of every net, (B,)."""
    return (stack(x) - y).square().mean((1, 2))
