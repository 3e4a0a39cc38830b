r"""Monte-Carlo dropout, as in the experiments of its authors.

A net is trained with dropout on the inputs and on every hidden layer and keeps it on when it
predicts: each pass through the net, with its own dropped units, is a draw of the weights. With a
precision $\tau$ of the observations, the log-likelihood of a target by T passes is

$$\log p(y) = \log \frac1T \sum_t e^{-\tau (y - y_t)^2 / 2}
    - \tfrac12 \log 2 \pi + \tfrac12 \log \tau .$$

The dropout probability p and $\tau$ are chosen together, by the log-likelihood of validation rows.

Two things are done for speed. The penalty of the weights, $10^{-4} (1-p) / (2 N \tau)$, hardly
depends on which $\tau$ of the grid it is given: one net a probability is trained, with the middle
one, and all $\tau$ are judged on it. And a pass drops the same units in all rows: that is the law
of the weights that is meant, each row's prediction has the same law as with units of its own, and
a pass costs one product.

References:
    Gal and Ghahramani, "Dropout as a Bayesian approximation", ICML 2016.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.training.descent import Rows, descended
from experiments.training.objectives import Objective
from experiments.training.protocol import Protocol, device
from experiments.training.stack import Stack

PROBABILITIES = (0.005, 0.01, 0.05, 0.1)
LENGTH_SCALE = 1e-2
"""Of the weights' prior: its square is the factor of the penalty."""

CPU_CHUNK, GPU_CHUNK = 2**19, 2**25
"""Hidden values that are held at once: what a cache holds, and what keeps a GPU busy."""


@dataclass(frozen=True)
class Predicted:
    """By the passes of every net.

    Attributes:
        mean: over the passes, (B, n).
        log_likelihood: mean over the rows, (B, precisions).
    """

    mean: Tensor
    log_likelihood: Tensor


def penalty(probability: Tensor, rows: int, precision: Tensor) -> Tensor:
    """The factor of the squared weights in the loss, (B,)."""
    return LENGTH_SCALE**2 * (1 - probability) / (2 * rows * precision)


def trained(
    train: Rows,
    probability: Tensor,
    precision: Tensor,
    protocol: Protocol,
    seeds: Sequence[int],
    what: str = "nets with dropout",
) -> Stack:
    """Nets with dropout, on all the rows given, for all the epochs.

    Args:
        train: (B, n, d) and (B, n, 1), standardised.
        probability: of dropping a unit, (B,).
        precision: that the penalty assumes, (B,), of standardised targets.
        protocol: of the training.
        seeds: of each net's first weights and batches. The dropped units come from the first of
            them, for the whole stack at once.
        what: is trained, for the progress.
    """
    sizes = (train[0].shape[2], *protocol.hidden, train[1].shape[2])
    stack = Stack.drawn(seeds, sizes, protocol.activation, device=device())
    factor = penalty(probability, train[0].shape[1], precision).float()
    objective = dropping(stack, probability, factor, seeds[0])
    return descended(stack, train, None, protocol, seeds, objective=objective, what=what).last


def dropping(stack: Stack, probability: Tensor, factor: Tensor, seed: int) -> Objective:
    """The mean squared error of passes that drop units, and the squared weights times a factor."""
    where = stack.flat.device
    generator = torch.Generator(where).manual_seed(seed)
    shrinking = 2 * factor[:, None].to(where) * _weights_not_biases(stack)
    probability = probability.to(where)

    def objective(stack: Stack, x: Tensor, y: Tensor) -> None:
        shapes = [(*x.shape[:2], width) for width in stack.sizes[:-1]]
        trace = stack.forward(x, [kept(shape, probability, generator) for shape in shapes])
        error = trace.output - y
        stack.backward(trace, error.mul_(2 / error[0].numel()))
        stack.gradient.addcmul_(shrinking, stack.flat)

    return objective


def kept(shape: Sequence[int], probability: Tensor, generator: torch.Generator) -> Tensor:
    """Factors on units: 0 with the probability (B,) of their net, else 1 / (1 - p).

    Sixteen random bits decide on a unit, four units a draw: the draws would take longer than the
    net. So p is a multiple of 1 / 65536.
    """
    count = math.prod(shape)
    bits = torch.empty(-(-count // 4), dtype=torch.int64, device=generator.device)
    bits.random_(-(2**63), None, generator=generator)
    beside = (-1, *[1] * (len(shape) - 1))
    threshold = (probability * 65536).round().sub(32768).to(torch.int16).view(beside)
    factor = (1 / (1 - probability)).float().view(beside)
    return (bits.view(torch.int16)[:count].view(*shape) >= threshold) * factor


@torch.no_grad()
def predicted(
    stack: Stack,
    rows: Rows,
    probability: Tensor,
    precisions: Tensor,
    passes: int,
    seed: int,
) -> Predicted:
    """The mean over passes and the log-likelihood, without keeping the passes.

    Args:
        stack: B nets.
        rows: (B, n, d) and (B, n, 1).
        probability: of dropping a unit, (B,).
        precisions: to judge, (B, precisions), of the targets given.
        passes: T.
        seed: of the dropped units.
    """
    generator = torch.Generator(stack.flat.device).manual_seed(seed)
    means, likelihoods = [], []
    for net, (x, y) in enumerate(zip(*rows, strict=True)):
        precision = precisions[net].double().to(stack.flat.device)
        target, total, mass = y[:, 0].to(precision), 0.0, None
        for outputs in _passes(stack.picked([net]), x, probability[net], passes, generator):
            outputs = outputs.double()
            total = total + outputs.sum(0)
            exponents = -0.5 * precision[:, None, None] * (target - outputs).square()
            part = exponents.logsumexp(1)
            mass = part if mass is None else torch.logaddexp(mass, part)
        means.append(total / passes)
        constant = 0.5 * (precision / (2 * math.pi)).log() - math.log(passes)
        likelihoods.append(mass.mean(1) + constant)
    return Predicted(torch.stack(means).cpu(), torch.stack(likelihoods).cpu())


def _passes(
    net: Stack, x: Tensor, probability: Tensor, count: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Outputs (t, n) of passes, some at a time."""
    x = x.to(net.flat.device)
    largest = CPU_CHUNK if x.device.type == "cpu" else GPU_CHUNK
    size = max(1, largest // (len(x) * max(net.sizes)))
    for start in range(0, count, size):
        some = min(size, count - start)
        yield sampled(net, probability, some, generator)(x.expand(some, -1, -1))[..., 0]


def sampled(net: Stack, probability: Tensor, count: int, generator: torch.Generator) -> Stack:
    """Draws of a net's weights: a dropped unit is a row of zeros."""
    drawn = net.picked([0] * count)
    each = probability.to(net.flat.device).expand(count)
    for weight in drawn.weights:
        weight.mul_(kept((count, weight.shape[1], 1), each, generator))
    return drawn


def _weights_not_biases(stack: Stack) -> Tensor:
    """Ones at the weights, zeros at the biases, (1, parameters)."""
    mask = Stack(torch.zeros_like(stack.flat[:1]), stack.sizes, stack.activation, stack.last_bias)
    for weight in mask.weights:
        weight.fill_(1)
    return mask.flat
