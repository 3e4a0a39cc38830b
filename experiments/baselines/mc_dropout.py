r"""Monte-Carlo dropout, as in the experiments of its authors.

A network is trained with dropout on the inputs and on every hidden layer and keeps it on when it
predicts: each pass through the network, with other dropped units, is a draw of the weights. With a
precision $\tau$ of the observations, the log-likelihood of a target by T passes is

$$\log p(y) = \log \frac1T \sum_t e^{-\tau (y - y_t)^2 / 2}
    - \tfrac12 \log 2 \pi + \tfrac12 \log \tau .$$

The dropout probability p and $\tau$ are chosen together, by the log-likelihood of validation rows.

Two things are done for speed. The penalty of the weights, $10^{-4} (1-p) / (2 N \tau)$, hardly
depends on $\tau$: one network a probability is trained, with the middle $\tau$ of the grid, and all
$\tau$ are judged on it. And a pass drops the same units in all rows, so that it costs one product.
This is the distribution of the weights that is meant, and each row's prediction has the same
distribution as with units dropped for that row alone.

References:
    Gal and Ghahramani, "Dropout as a Bayesian approximation", ICML 2016.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from experiments.training.descent import Rows, descended
from experiments.training.objectives import Objective
from experiments.training.protocol import Protocol, device
from experiments.training.stack import Stack

PROBABILITIES = (0.005, 0.01, 0.05, 0.1)
"""Dropout probabilities to choose from."""

LENGTH_SCALE = 1e-2
"""The length scale of the weights' prior: its square is the factor of the penalty."""

CPU_CHUNK = 2**19
"""Hidden values that are computed at once on a processor: as many as its cache takes."""

GPU_CHUNK = 2**25
"""Hidden values that are computed at once on a GPU: enough to keep it busy."""

HELD = 5000
"""Rows of which all passes are in memory at once."""

LEVEL = 0.9
"""The probability that the intervals cover."""


@dataclass(frozen=True)
class Predicted:
    """What the passes of every network predict.

    Attributes:
        mean: Means over the passes, (B, n).
        log_likelihood: Means over the rows, (B, precisions).
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
    """Train networks with dropout for all the epochs.

    Args:
        train: Rows, (B, n, d) and (B, n, 1), standardised.
        probability: The probability of dropping a unit, (B,).
        precision: The precision that the penalty assumes, (B,), of standardised targets.
        protocol: How the networks are trained.
        seeds: The seed of each network's first weights and batches. The dropped units come from the
            first of them, for the whole stack at once.
        what: The word for the networks in the progress.
    """
    sizes = (train[0].shape[2], *protocol.hidden, train[1].shape[2])
    stack = Stack.drawn(seeds, sizes, protocol.activation, device=device())
    factor = penalty(probability, train[0].shape[1], precision).float()
    objective = dropping(stack, probability, factor, seeds[0])
    return descended(stack, train, None, protocol, seeds, objective=objective, what=what).last


def dropping(stack: Stack, probability: Tensor, factor: Tensor, seed: int) -> Objective:
    """The mean squared error of passes that drop units, plus the squared weights times a factor.

    Args:
        stack: The networks.
        probability: The probability of dropping a unit, (B,).
        factor: The factor of the squared weights, (B,).
        seed: Seed of the dropped units.
    """
    where = stack.flat.device
    generator = torch.Generator(where).manual_seed(seed)
    penalty_slope = 2 * factor[:, None].to(where) * _weights_not_biases(stack)  # (B, parameters)
    probability = probability.to(where)

    def objective(stack: Stack, x: Tensor, y: Tensor) -> None:
        networks, rows, _ = x.shape
        masks = [
            kept((networks, rows, width), probability, generator) for width in stack.sizes[:-1]
        ]
        trace = stack.forward(x, masks)
        error = trace.output - y
        stack.backward(trace, error.mul_(2 / error[0].numel()))
        stack.gradient.addcmul_(penalty_slope, stack.flat)

    return objective


def kept(shape: Sequence[int], probability: Tensor, generator: torch.Generator) -> Tensor:
    """Factors on units: 0 with the probability p of their network, else 1 / (1 - p).

    Sixteen random bits decide on a unit, so that one draw of 64 bits serves four units: the draws
    would otherwise take longer than the network. So p is a multiple of 1 / 65536.

    Args:
        shape: The shape of the factors; the first dimension is the network.
        probability: p of each network, (B,).
        generator: The generator of the draws.
    """
    count = math.prod(shape)
    draws = -(-count // 4)
    bits = torch.empty(draws, dtype=torch.int64, device=generator.device)
    bits.random_(-(2**63), None, generator=generator)
    uniform = bits.view(torch.int16)[:count].view(*shape)
    one_a_network = (-1,) + (1,) * (len(shape) - 1)
    threshold = (probability * 65536).round().sub(32768).to(torch.int16).view(one_a_network)
    factor = (1 / (1 - probability)).float().view(one_a_network)
    return (uniform >= threshold) * factor


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
        stack: B networks.
        rows: (B, n, d) and (B, n, 1).
        probability: The probability of dropping a unit, (B,).
        precisions: Precisions to judge, (B, precisions), in the unit of the targets.
        passes: The number of passes, T.
        seed: Seed of the dropped units.
    """
    generator = torch.Generator(stack.flat.device).manual_seed(seed)
    means = []
    likelihoods = []
    for place, (x, y) in enumerate(zip(*rows, strict=True)):
        precision = precisions[place].double().to(stack.flat.device)
        target = y[:, 0].to(precision)
        total = torch.zeros_like(target)  # sum of the passes, (n,)
        log_sum = None  # log of the sum of exponentials over the passes, (precisions, n)
        network = stack.picked([place])
        for outputs in _passes(network, x, probability[place], passes, generator):
            outputs = outputs.double()
            total = total + outputs.sum(0)
            exponents = -0.5 * precision[:, None, None] * (target - outputs).square()
            chunk_log_sum = exponents.logsumexp(1)
            if log_sum is None:
                log_sum = chunk_log_sum
            else:
                log_sum = torch.logaddexp(log_sum, chunk_log_sum)
        assert log_sum is not None, "there is at least one pass"
        means.append(total / passes)
        constant = 0.5 * (precision / (2 * math.pi)).log() - math.log(passes)
        likelihoods.append(log_sum.mean(1) + constant)
    return Predicted(torch.stack(means).cpu(), torch.stack(likelihoods).cpu())


@dataclass(frozen=True)
class Mixture:
    """The predictive distribution of every row, (n,) each, in the unit of the targets.

    Attributes:
        mean: Means of the passes.
        std: Standard deviations of passes and noise together.
        log_prob: Logarithms of the density at the target.
        log_mass: Logarithms of the mass of the cell around the target; None without cells.
        crps: The CRPS of as many draws as there were passes.
        low: Lower ends of the central interval that covers `LEVEL` of these draws.
        high: Upper ends of that interval.
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
    """The predictive distributions of every network for its rows.

    Args:
        stack: B networks.
        rows: (B, n, d) and (B, n, 1).
        probability: The probability of dropping a unit, (B,).
        precision: The precision in the unit of the targets, (B,).
        passes: The number of passes, T.
        seed: Seed of the dropped units and of the draws.
        step: The distance of neighbouring targets that lie on a grid, (B,).
    """
    generator = torch.Generator(stack.flat.device).manual_seed(seed)
    results = []
    for place, (x, y) in enumerate(zip(*rows, strict=True)):
        noise = float(precision[place]) ** -0.5
        half_step = None if step is None else float(step[place]) / 2
        network = stack.picked([place])
        chunks = []
        for chunk_x, target in zip(x.split(HELD), y[:, 0].split(HELD), strict=True):
            outputs = torch.cat(
                list(_passes(network, chunk_x, probability[place], passes, generator))
            )  # (T, n)
            outputs = outputs.T.contiguous()
            target = target.to(outputs.device)
            chunks.append(mixture(outputs, noise, target, half_step, generator))
        results.append(_joined(chunks))
    return results


def mixture(
    outputs: Tensor, noise: float, target: Tensor, half: float | None, generator: torch.Generator
) -> Mixture:
    r"""An equal mixture of Gaussians about the outputs of the passes.

    The density and the mass of a cell are exact. The quantiles and the CRPS,
    $\frac1T \sum_t |s_t - y| - \frac1{T^2} \sum_t (2 t - T - 1) s_{(t)}$, are those of one draw
    $s_t$ of each Gaussian.

    Args:
        outputs: Outputs of the passes, (n, T).
        noise: The standard deviation of each Gaussian.
        target: (n,).
        half: Half the width of a cell, or None.
        generator: The generator of the draws.
    """
    count = outputs.shape[1]
    distances = (target[:, None] - outputs).double() / noise
    constant = math.log(count) + math.log(noise) + 0.5 * math.log(2 * math.pi)
    log_prob = (-0.5 * distances.square()).logsumexp(1) - constant
    log_mass = None if half is None else _log_cell_mass(distances, half / noise)

    noises = torch.randn(outputs.shape, generator=generator, device=outputs.device)
    draws = (outputs + noise * noises).sort(1).values
    ranks = 2 * torch.arange(1, count + 1, device=draws.device) - count - 1  # 2 t - T - 1
    spread = (draws.double() * ranks).sum(1) / count**2
    crps = (draws - target[:, None]).abs().double().mean(1) - spread
    return Mixture(
        mean=outputs.double().mean(1),
        std=(outputs.double().var(1, correction=0) + noise**2).sqrt(),
        log_prob=log_prob,
        log_mass=log_mass,
        crps=crps,
        low=_quantile(draws, (1 - LEVEL) / 2),
        high=_quantile(draws, (1 + LEVEL) / 2),
    )


def _log_cell_mass(distances: Tensor, half: float) -> Tensor:
    """The logarithm of the mass of a cell under the mixture, (n,); tails keep their digits.

    Args:
        distances: From the Gaussians' centres to the middle of the cell, in units of the noise,
            (n, T).
        half: Half the width of the cell, in the same units.
    """
    near = torch.special.log_ndtr(half - distances.abs())
    far = torch.special.log_ndtr(-half - distances.abs())
    log_masses = near + torch.log1p(-(far - near).exp())
    return log_masses.logsumexp(1) - math.log(distances.shape[1])


def _quantile(ordered: Tensor, level: float) -> Tensor:
    """A quantile of ordered draws (n, T), interpolated between two of them."""
    place = level * (ordered.shape[1] - 1)
    below = ordered[:, math.floor(place)].double()
    above = ordered[:, math.ceil(place)].double()
    return below.lerp(above, place - math.floor(place))


def _joined(chunks: Sequence[Mixture]) -> Mixture:
    """The distributions of all rows from those of chunks of rows, on the CPU."""
    columns = {}
    for field in fields(Mixture):
        values = [getattr(chunk, field.name) for chunk in chunks]
        columns[field.name] = None if values[0] is None else torch.cat(values).cpu()
    return Mixture(**columns)


def _passes(
    network: Stack, x: Tensor, probability: Tensor, count: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Outputs (t, n) of passes through one network, some passes at a time."""
    x = x.to(network.flat.device)
    chunk = CPU_CHUNK if x.device.type == "cpu" else GPU_CHUNK
    size = max(1, chunk // (len(x) * max(network.sizes)))
    for start in range(0, count, size):
        passes = min(size, count - start)
        draws = sampled(network, probability, passes, generator)
        yield draws(x.expand(passes, -1, -1))[..., 0]


def sampled(net: Stack, probability: Tensor, count: int, generator: torch.Generator) -> Stack:
    """Draws of one network's weights, as a stack: a dropped unit is a row of zeros."""
    draws = net.picked([0] * count)
    probabilities = probability.to(net.flat.device).expand(count)
    for weight in draws.weights:
        weight.mul_(kept((count, weight.shape[1], 1), probabilities, generator))
    return draws


def _weights_not_biases(stack: Stack) -> Tensor:
    """Ones at the weights, zeros at the biases, (1, parameters)."""
    mask = Stack(torch.zeros_like(stack.flat[:1]), stack.sizes, stack.activation, stack.last_bias)
    for weight in mask.weights:
        weight.fill_(1)
    return mask.flat
