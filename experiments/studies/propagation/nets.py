"""The nets of the experiment, as modules."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from experiments.training import descent
from experiments.training.protocol import Protocol

PROTOCOL = Protocol(epochs=200, batch=100, rate=3e-3, decay=1e-4, cosine=True)


def trained(x: Tensor, y: Tensor, *, epochs: int, seed: int) -> list[nn.Sequential]:
    """One net per leading entry of x (nets, rows, inputs) and y (nets, rows, 1).

    Every net sees its own rows in its own order from its own start.
    """
    seeds = [seed * 1000 + net for net in range(len(x))]
    stack = descent.trained((x, y), None, replace(PROTOCOL, epochs=epochs), seeds).last
    return [stack.module(net) for net in range(len(x))]
