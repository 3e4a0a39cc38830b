r"""Monte-Carlo dropout, as in the experiments of its authors.

A net is trained with dropout on the inputs and on every hidden layer and keeps it on when it
predicts: each pass through the net, with its own dropped units, is a draw of the weights. With a
precision $\tau$ of the observations, the log-likelihood of a target by T passes is

$$\log p(y) = \log \frac1T \sum_t e^{-\tau (y - y_t)^2 / 2}
    - \tfrac12 \log 2 \pi + \tfrac12 \log \tau .$$

The dropout probability p and $\tau$ are chosen together, by the log-likelihood of validation rows.

Two things are done for speed. The penalty of the weights, $10^{-4} (1-p) / (2 N \tau)$, hardly
depends on which $\tau$ of the grid it is given: one net a probability is trained, with the middle
one, and all $\tau$ are judged on it. And a pass drops the same units in all rows: that is the
distribution of the weights that is meant, each row's prediction has the same distribution as with
units of its own, and a pass costs one product.

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

HELD = 5000
"""Rows of which all passes are held."""

LEVEL = 0.9
"""That the intervals hold."""


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


@dataclass(frozen=True)
class Mixture:
    """The predictive distribution of every row, (n,) each, in the unit of the targets given.

    Attributes:
        mean: of the passes.
        std: of passes and noise.
        log_prob: of the target.
        log_mass: of the cell around the target, where there are cells.
        crps: of as many draws as there were passes.
        low, high: the ends of the central interval that holds `LEVEL` of these draws.
    """

    mean: Tensor
    std: Tensor
    log_prob: Tensor
    log_mass: Tensor | None
    crps: Tensor
    low: Tensor
    high: Tensor


@torch.no_grad()
def mixtures(
    stack: Stack,
    rows: Rows,
    probability: Tensor,
    precision: Tensor,
    passes: int,
    seed: int,
    step: Tensor | None = None,
) -> list[Mixture]:
    """What every net says of its rows.

    Args:
        stack: B nets.
        rows: (B, n, d) and (B, n, 1).
        probability: of dropping a unit, (B,).
        precision: of the targets given, (B,).
        passes: T.
        seed: of the dropped units and of the draws.
        step: between neighbouring targets that lie on a grid, (B,).
    """
    generator = torch.Generator(stack.flat.device).manual_seed(seed)
    found = []
    for net, (x, y) in enumerate(zip(*rows, strict=True)):
        noise = float(precision[net]) ** -0.5
        half = None if step is None else float(step[net]) / 2
        parts = []
        for some, target in zip(x.split(HELD), y[:, 0].split(HELD), strict=True):
            passed = _passes(stack.picked([net]), some, probability[net], passes, generator)
            outputs = torch.cat(list(passed)).T.contiguous()
            parts.append(mixture(outputs, noise, target.to(outputs.device), half, generator))
        found.append(_joined(parts))
    return found


def mixture(
    outputs: Tensor, noise: float, target: Tensor, half: float | None, generator: torch.Generator
) -> Mixture:
    r"""Equal parts of Gaussians about the outputs.

    The density and the mass of a cell are exact. The quantiles and the CRPS,
    $\frac1T \sum_t |s_t - y| - \frac1{T^2} \sum_t (2 t - T - 1) s_{(t)}$, are those of one draw
    $s_t$ of each part.

    Args:
        outputs: of the passes, (n, T).
        noise: standard deviation of the parts.
        target: (n,).
        half: of the width of a cell, or None.
        generator: of the draws.
    """
    count = outputs.shape[1]
    away = (target[:, None] - outputs).double() / noise
    constant = math.log(count) + math.log(noise) + 0.5 * math.log(2 * math.pi)
    log_prob = (-0.5 * away.square()).logsumexp(1) - constant
    log_mass = None if half is None else _cell(away, half / noise)
    noises = torch.randn(outputs.shape, generator=generator, device=outputs.device)
    draws = (outputs + noise * noises).sort(1).values
    places = 2 * torch.arange(1, count + 1, device=draws.device) - count - 1
    spread = (draws.double() * places).sum(1) / count**2
    crps = (draws - target[:, None]).abs().double().mean(1) - spread
    low, high = (_at(draws, (1 + sign * LEVEL) / 2) for sign in (-1, 1))
    std = (outputs.double().var(1, correction=0) + noise**2).sqrt()
    return Mixture(outputs.double().mean(1), std, log_prob, log_mass, crps, low, high)


def _cell(away: Tensor, half: float) -> Tensor:
    """The logarithm of the mass within a half on both sides, (n,); tails keep their digits."""
    near, far = (torch.special.log_ndtr(side - away.abs()) for side in (half, -half))
    log = near + torch.log1p(-(far - near).exp())
    return log.logsumexp(1) - math.log(away.shape[1])


def _at(ordered: Tensor, level: float) -> Tensor:
    """A quantile of ordered draws (n, T), between two of them."""
    place = level * (ordered.shape[1] - 1)
    below, above = ordered[:, math.floor(place)], ordered[:, math.ceil(place)]
    return below.double().lerp(above.double(), place - math.floor(place))


def _joined(parts: Sequence[Mixture]) -> Mixture:
    """Of all rows, on the CPU."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Mixture(*(None if one[0] is None else torch.cat(one).cpu() for one in columns))


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
