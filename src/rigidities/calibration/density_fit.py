r"""How a density head is fitted: the constant mixture, and the steps away from it.

`constant_mixture` finds the likeliest mixture whose parameters are the same for all rows, with the
scale of q and the optimism of training rows. `descend` starts there, with a network (the one of
`prediction.head`) whose contribution is zero. It takes steps of Adam on batches of the penalised
likelihood, and remembers an average of its latest weights at `LOOKS` of the steps. So step 0 is the
constant mixture, and how much the distribution follows the inputs is a number of steps, which rows
that are left out choose (`target_fit`).

A fit must not depend on the order of rows, and hardly on rounding. Rows come in an order of their
own (`TargetView.in_order`), batches are drawn by a fixed generator, the inputs are principal
directions, the rate falls to zero, and weights are averaged.

Residuals are in units of a usual one and q in units of a usual q, so that single precision will do.

References:
    Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.
    Berndt, Hall, Hall and Hausman, "Estimation and inference in nonlinear structural models", 1974.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from .density_loss import Errors, mixture_loss

HIDDEN = 64
"""Number of hidden units H."""
LOOKS = 40
"""Number of steps at which the weights are remembered, denser at the beginning."""
BATCH = 1024
"""Rows of a batch; at most a quarter of all, and no fewer than 32 where there are as many."""
RATE = 5e-3
"""Largest rate of Adam. It rises over the first eighth of the steps and falls like a cosine."""
PENALTY = 1000.0
"""Precision of the weights L and V, which all rows share. Less lets rounding move bars more."""
LONGEST = 2.0
"""Gradients longer than this are shortened to it."""
AVERAGED = 0.02
"""Share of the current weights in their running average."""
BETA_1 = 0.95
"""Memory of Adam for gradients. With 0.9, rounding moves bars several times as much."""
BETA_2 = 0.99
"""Memory of Adam for squared gradients."""
_SEED = 0

START_ROWS = 4096
"""Most rows that the constant mixture is fitted to, evenly spread."""
STIFFNESS = 10.0
"""Precision of the constant mixture's parameters about their start."""
SCALE_SPREAD = 1.5
"""Spread of log alpha^2 about its start: single rows hardly tell it from the noise."""
SCALE_SHARE = 0.2
"""Share of the residuals' variance that the start attributes to alpha^2 q."""
PESSIMISM = 0.25
"""Spread below zero of a logarithm of scales whose spread above is one.

A few lucky rows do not make training rows pessimistic."""
_STEPS = 100
"""Most steps of the search for the constant mixture."""
_DONE = 1e-10
"""Nats per row that a step must promise for the search to go on."""


# --- the constant mixture -------------------------------------------------------------------------


@dataclass(frozen=True)
class ConstantMixture:
    r"""One mixture for all rows.

    Attributes:
        outputs: h, logits, offsets and log-widths, (O,).
        log_scale2: $\log \alpha^2$, ().
        optimism: $\kappa$, (): the squared scales of seen rows are smaller by $e^{-\kappa}$. It is
            zero where all rows are seen or none is.
    """

    outputs: Tensor
    log_scale2: Tensor
    optimism: Tensor


def constant_mixture(errors: Errors, seen: Tensor, components: int) -> ConstantMixture:
    """The likeliest mixture of that many components, about priors that keep it near its start.

    Steps follow the outer products of the rows' derivatives, whose sum is the information.

    Args:
        errors: The rows, in float64; their own factors are ignored.
        seen: Which rows were trained on, (n,).
        components: Number of components J.
    """
    if len(errors) > START_ROWS:
        chosen = torch.arange(START_ROWS, device=seen.device) * len(errors) // START_ROWS
        errors = errors[chosen]
        seen = seen[chosen]
    both = bool(seen.any() & ~seen.all())
    is_seen = seen.to(errors.residual)
    start = torch.cat(
        [start_outputs(components), torch.tensor([math.log(SCALE_SHARE), 0.0], dtype=torch.float64)]
    )
    start = start.to(errors.residual)
    precision = torch.full_like(start, STIFFNESS)
    precision[-2] = 1 / SCALE_SPREAD**2

    def loss_at(vector: Tensor) -> tuple[float, Tensor, Tensor]:
        """The penalised loss, its gradient, and the information."""
        outputs = vector[:-2].expand(len(errors), -1)
        loss = mixture_loss(
            outputs, vector[-2], errors.with_log_factor(-vector[-1] * is_seen if both else 0.0)
        )
        by_optimism = -loss.by_log_variance * is_seen
        if not both:
            by_optimism = torch.zeros_like(by_optimism)
        columns = [loss.by_output, loss.by_log_scale2[:, None], by_optimism[:, None]]
        slopes = torch.cat(columns, 1)
        priors = precision.clone()
        priors[-1] = level_precision(float(vector[-1]))
        away = vector - start
        value = float(loss.value.sum() + 0.5 * (priors * away.square()).sum())
        return value, slopes.sum(0) + priors * away, slopes.mT @ slopes + torch.diag(priors)

    vector = start
    value, gradient, information = loss_at(vector)
    for _ in range(_STEPS):
        step = torch.linalg.solve(information, gradient)
        promised = float(gradient @ step)
        length = 1.0
        while length > 1e-4:
            trial = loss_at(vector - length * step)
            if trial[0] <= value - 1e-4 * length * promised:
                break
            length /= 2
        else:  # no step is better: rounding is all that is left
            break
        vector = vector - length * step
        value, gradient, information = trial
        if promised < _DONE * len(errors):
            break
    return ConstantMixture(vector[:-2], vector[-2], vector[-1])


def start_outputs(components: int) -> Tensor:
    """Outputs that describe errors of variance one roughly: a broad bell, (O,) in float64."""
    level = (torch.arange(components, dtype=torch.float64) + 0.5) / components
    h = torch.tensor([math.log(1 - SCALE_SHARE - 0.1)], dtype=torch.float64)
    logit = torch.zeros(components, dtype=torch.float64)
    offset = 1.2 * torch.special.ndtri(level)
    log_width = math.log(0.7 / math.sqrt(2)) + 0.8 * (2 * level - 1).square()
    return torch.cat([h, logit, offset, log_width])


def level_precision(level: float) -> float:
    """The precision of a level's prior about zero, on that side of zero."""
    return 1.0 if level > 0 else 1 / PESSIMISM**2


def fitted_level(
    outputs: Tensor, log_scale2: Tensor, errors: Errors, start: float = 0.0
) -> tuple[float, float]:
    """The likeliest level, and its allowance.

    A level is the logarithm of a factor of all squared scales. Rows leave it open by some variance,
    and bars that are as often too narrow as too wide cover too little. The allowance is what to
    raise the level by: about three quarters of that variance. A 90 % interval of Gaussian errors
    needs 0.9 of it, half because the likeliest level is too low on average and the rest because
    coverage is concave; narrower intervals need less.

    Args:
        outputs: Outputs of the head for these rows, (n, O).
        log_scale2: Logarithm of the head's factor of q, (), or (n,).
        errors: The rows.
        start: Where to start.
    """
    level = start
    for _ in range(8):
        loss = mixture_loss(outputs, log_scale2, errors.raised(level))
        precision = level_precision(level)
        gradient = float(loss.by_log_variance.sum()) + precision * level
        # 1.3 times the rows' information: steps are a little short, so that they settle.
        of_rows = 1.3 * float(loss.by_log_variance.square().sum())
        step = max(-0.3, min(0.3, gradient / (of_rows + precision)))
        level = max(-2.0, min(2.0, level - step))
        if abs(step) < 1e-5:
            break
    # The prior's width above zero counts on both sides, so that the allowance does not jump.
    return level, 1 / (of_rows + level_precision(1.0))


# --- steps away from it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """The weights of a network for P inputs, as views of one vector.

    Several networks may be held at once: then every view has a first axis of K networks.

    Attributes:
        vector: All weights, one after the other, (W,).
        inputs: U, then L, (P, H + O).
        hidden_constant: b, (H,).
        hidden: V, (H, O).
        outputs: c, (O,).
        log_scale2: Logarithm of the factor of q, (1,).
    """

    vector: Tensor
    inputs: Tensor
    hidden_constant: Tensor
    hidden: Tensor
    outputs: Tensor
    log_scale2: Tensor

    @classmethod
    def of(cls, vector: Tensor, width: int, outputs: int) -> Weights:
        """The weights that a vector holds, for that many inputs P and outputs O."""
        shapes = [(width, HIDDEN + outputs), (HIDDEN,), (HIDDEN, outputs), (outputs,), (1,)]
        views = []
        start = 0
        for shape in shapes:
            size = math.prod(shape)
            views.append(vector[..., start : start + size].view(*vector.shape[:-1], *shape))
            start += size
        return cls(vector, *views)

    @classmethod
    def start(cls, columns: Tensor, constant: ConstantMixture) -> Weights:
        """Weights whose outputs are those of a constant mixture, for inputs like `columns`."""
        width = columns.shape[1]
        outputs = len(constant.outputs)
        size = (width + 1) * (HIDDEN + outputs) + HIDDEN * outputs + 1
        weights = cls.of(columns.new_zeros(size), width, outputs)
        generator = torch.Generator().manual_seed(_SEED)  # on the CPU, for every device
        directions = torch.randn(
            width, HIDDEN, generator=generator, dtype=torch.float32, device="cpu"
        ).to(columns)
        # Sums over the inputs have the variance one.
        total = columns.var(0, correction=0).sum().clamp(min=1e-6)
        weights.inputs[:, :HIDDEN] = directions / total.sqrt()
        weights.outputs[:] = constant.outputs.to(columns)
        weights.log_scale2[:] = constant.log_scale2.to(columns)
        return weights

    def like(self, vector: Tensor) -> Weights:
        """Another vector seen as weights of such networks."""
        return Weights.of(vector, self.inputs.shape[-2], self.outputs.shape[-1])

    def network(self, number: int) -> Weights:
        """The weights of one of several networks."""
        return self.like(self.vector[number])

    def __call__(self, columns: Tensor) -> Tensor:
        """The outputs of rows (n, P), (n, O), or (K, n, P) and (K, n, O) of several networks."""
        sums = columns @ self.inputs
        hidden = silu(sums[..., :HIDDEN] + self.hidden_constant[..., None, :])
        return self.outputs[..., None, :] + sums[..., HIDDEN:] + hidden @ self.hidden

    def gradient(self, columns: Tensor, errors: Errors, *, keeps_shape: bool) -> Tensor:
        """The gradient of the mean loss of some rows, (W,), or (K, W) of several networks.

        Args:
            columns: The network's inputs of the rows, (n, P), or (K, n, P).
            errors: The n rows, or the K n rows network by network.
            keeps_shape: See `descend`.
        """
        sums = columns @ self.inputs
        before = sums[..., :HIDDEN] + self.hidden_constant[..., None, :]
        gate = before.sigmoid()
        hidden = before * gate  # silu
        outputs = self.outputs[..., None, :] + sums[..., HIDDEN:] + hidden @ self.hidden
        networks_and_rows = outputs.shape[:-1]
        log_scale2 = self.log_scale2.expand(networks_and_rows)
        loss = mixture_loss(outputs.flatten(0, -2), log_scale2.flatten(), errors)
        by_output = loss.by_output / networks_and_rows[-1]
        if keeps_shape:
            by_output = _of_scale_and_centre(by_output)
        by_output = by_output.reshape(outputs.shape)
        by_before = (by_output @ self.hidden.mT) * (gate * (1 + before - hidden))
        by_inputs = columns.mT @ torch.cat([by_before, by_output], -1)
        by_hidden = hidden.mT @ by_output
        by_log_scale2 = loss.by_log_scale2.reshape(networks_and_rows).mean(-1, keepdim=True)
        parts = [by_inputs.flatten(-2), by_before.sum(-2), by_hidden.flatten(-2)]
        return torch.cat([*parts, by_output.sum(-2), by_log_scale2], -1)


def _of_scale_and_centre(by_output: Tensor) -> Tensor:
    """The part of derivatives by outputs (n, O) that moves h, or all offsets together."""
    h, shape = by_output[:, :1], by_output[:, 1:]
    logit, offset, log_width = shape.chunk(3, 1)
    common_offset = offset.mean(1, keepdim=True).expand_as(offset)
    return torch.cat([h, torch.zeros_like(logit), common_offset, torch.zeros_like(log_width)], 1)


def looks(steps: int) -> list[int]:
    """The steps at which a descent remembers its weights: zero, and up to `LOOKS` others."""
    squares = {round(steps * (look / LOOKS) ** 2) for look in range(LOOKS + 1)}
    return sorted(squares)


def descend(
    columns: Tensor,
    errors: Errors,
    constants: Sequence[ConstantMixture],
    fitted: Sequence[Tensor],
    steps: int,
    *,
    keeps_shape: bool = False,
) -> Iterator[Weights]:
    """Yield the averaged weights at each of the `looks` of descents from constant mixtures.

    Several networks, each fitted to some of the rows, take their steps side by side, in batches
    that are as large as those of the network with the fewest rows.

    Args:
        columns: The inputs of all rows, (n, P), in single precision.
        errors: All rows, likewise.
        constants: Where each network starts.
        fitted: The numbers of the rows that each is fitted to.
        steps: How many steps to take.
        keeps_shape: Whether the mixture keeps the shape of the constant one, so that only its scale
            and its centre follow the inputs. Where targets lie on a grid, another shape would put
            a spike at each of the grid's values.
    """
    starts = [
        Weights.start(columns[rows], constant)
        for rows, constant in zip(fitted, constants, strict=True)
    ]
    weights = starts[0].like(torch.stack([start.vector for start in starts]))
    decay = weights.like(torch.zeros_like(weights.vector))
    for network, rows in enumerate(fitted):
        decay.inputs[network, :, HIDDEN:] = PENALTY / len(rows)
        decay.hidden[network] = PENALTY / len(rows)
    mean = torch.zeros_like(weights.vector)
    square = torch.zeros_like(weights.vector)
    average = weights.vector.clone()
    yield weights.like(average.clone())
    wanted = set(looks(steps))
    batches = _batches(fitted)
    for step in range(1, steps + 1):
        batch = next(batches)  # (networks, rows)
        slope = weights.gradient(columns[batch], errors[batch.flatten()], keeps_shape=keeps_shape)
        slope.addcmul_(decay.vector, weights.vector)
        slope *= LONGEST / slope.norm(dim=-1, keepdim=True).clamp(min=LONGEST)
        # Adam.
        mean.lerp_(slope, 1 - BETA_1)
        square.mul_(BETA_2).addcmul_(slope, slope, value=1 - BETA_2)
        size = (square / (1 - BETA_2**step)).sqrt_().add_(1e-8)
        rise = min(1.0, step / max(1, steps // 8))
        rate = RATE * rise * 0.5 * (1 + math.cos(math.pi * step / steps))
        weights.vector.addcdiv_(mean, size, value=-rate / (1 - BETA_1**step))
        average.lerp_(weights.vector, max(AVERAGED, 1 / (step + 1)))
        if step in wanted:
            yield weights.like(average.clone())


def _batches(fitted: Sequence[Tensor]) -> Iterator[Tensor]:
    """Numbers of the rows of each network's batches, (networks, rows), by a fixed generator."""
    fewest = min(map(len, fitted))
    size = min(BATCH, max(32, fewest // 4), fewest)
    streams = [_shuffled(rows, size) for rows in fitted]
    while True:
        yield torch.stack([next(stream) for stream in streams])


def _shuffled(rows: Tensor, size: int) -> Iterator[Tensor]:
    """Batches of that many of the rows, shuffled again and again."""
    generator = torch.Generator().manual_seed(_SEED)
    while True:
        order = torch.randperm(len(rows), generator=generator, device="cpu").to(rows.device)
        for start in range(0, len(rows) - size + 1, size):
            yield rows[order[start : start + size]]
