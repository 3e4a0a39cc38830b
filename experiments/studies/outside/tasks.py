"""Networks of other kinds, with rows inside and outside of their domain.

`KINDS` has a function for every network of a kind, from a seed to a `Task`: an untrained network
with rows of its domain, and rows outside of it with their true targets. `trained` trains it. The
truth follows one law inside and outside, of which the network has seen only the inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from experiments.data import domains

NOISE = 0.1
"""The standard deviation of the noise in inputs and targets; the targets' spread is about one."""

ROWS = (1200, 400, 400)
"""Training, validation and test rows of the synthetic tasks."""

OUTSIDE_ROWS = 400
"""Rows of each shift of the synthetic tasks."""

BATCH = 64
"""Rows a step of the training."""

Rows = tuple[Tensor, Tensor]
"""Inputs, whose first dimension is the row, and targets (N, 1)."""


@dataclass(frozen=True)
class Task:
    """A network and its rows.

    Attributes:
        network: The network, not trained yet.
        train: Rows to learn from.
        valid: Rows to calibrate on.
        inside: Test rows of the domain.
        outside: Rows outside of the domain, by what is other there.
    """

    network: nn.Module
    train: Rows
    valid: Rows
    inside: Rows
    outside: dict[str, Rows]


def trained(task: Task, steps: int) -> nn.Module:
    """Train the task's network for so many steps."""
    x, y = task.train
    optimiser = torch.optim.AdamW(task.network.parameters(), lr=3e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,))
        optimiser.zero_grad()
        loss = (task.network(x[rows]) - y[rows]).square().mean()
        loss.backward()
        optimiser.step()
        schedule.step()
    return task.network.eval()


def _synthetic(
    network: Callable[[], nn.Module], inside: Callable[[int], Rows], shifts: dict[str, Rows]
) -> Task:
    """A task whose rows are drawn, with targets in units of their spread in training.

    Args:
        network: Makes the untrained network.
        inside: Draws so many rows of the domain.
        shifts: Rows outside.
    """
    x, y = inside(sum(ROWS))
    centre = y[: ROWS[0]].mean()
    spread = y[: ROWS[0]].std()
    y = (y - centre) / spread
    y = y + NOISE * torch.randn_like(y)
    outside = {}
    for name, (shifted_x, shifted_y) in shifts.items():
        standard_y = (shifted_y - centre) / spread
        outside[name] = (shifted_x, standard_y + NOISE * torch.randn_like(shifted_y))
    train, valid, test = zip(x.split(ROWS), y.split(ROWS), strict=True)
    return Task(network(), train, valid, test, outside)


def uniform(count: int, low: float, high: float) -> Tensor:
    """Numbers (count, 1) between two bounds."""
    return low + (high - low) * torch.rand(count, 1)


# --- recurrent networks --------------------------------------------------------------------------

STEPS = 24
"""Steps of a sequence."""

AHEAD = 4
"""How many steps after the end of a sequence its target lies."""


class Recurrent(nn.Module):
    """A recurrent layer and a linear one, which reads the last state or the mean of all.

    Args:
        layer: The class of the recurrent layer.
        reads_mean: Whether the mean of the states is read instead of the last one.
    """

    def __init__(self, layer: type[nn.LSTM] | type[nn.GRU], *, reads_mean: bool) -> None:
        super().__init__()
        self.layer = layer(1, 32, batch_first=True)
        self.out = nn.Linear(32, 1)
        self.reads_mean = reads_mean

    def forward(self, x: Tensor) -> Tensor:
        """Predict (N, 1) from sequences (N, T, 1)."""
        states, _ = self.layer(x)
        features = states.mean(1) if self.reads_mean else states[:, -1]
        output: Tensor = self.out(features)
        return output


def sequences(
    count: int,
    *,
    amplitude: tuple[float, float] = (0.5, 1.5),
    frequency: tuple[float, float] = (0.3, 0.8),
    level: tuple[float, float] = (-0.5, 0.5),
) -> tuple[Tensor, dict[str, Tensor]]:
    """Noisy sine waves (N, T, 1), and what they are made of.

    Args:
        count: The number of sequences.
        amplitude: Bounds of the amplitudes.
        frequency: Bounds of the frequencies, in radians a step.
        level: Bounds of the levels.
    """
    made_of = {
        "amplitude": uniform(count, *amplitude),
        "frequency": uniform(count, *frequency),
        "level": uniform(count, *level),
        "phase": uniform(count, 0.0, 2 * math.pi),
    }
    values = wave(made_of, torch.arange(STEPS))
    return (values + NOISE * torch.randn_like(values))[..., None], made_of


def wave(made_of: dict[str, Tensor], steps: Tensor) -> Tensor:
    """The values (N, S) of waves at some steps, without noise."""
    angle = made_of["frequency"] * steps + made_of["phase"]
    return made_of["level"] + made_of["amplitude"] * angle.sin()


def value_ahead(made_of: dict[str, Tensor]) -> Tensor:
    """The value some steps after the end of each sequence."""
    return wave(made_of, torch.tensor([STEPS - 1 + AHEAD]))


def power(made_of: dict[str, Tensor]) -> Tensor:
    """The amplitude times the frequency, plus the level. Outside, most lie above all inside."""
    return 2 * made_of["amplitude"] * made_of["frequency"] + made_of["level"]


def phase_ahead(made_of: dict[str, Tensor]) -> Tensor:
    """The place in the cycle there, whatever amplitude and level are."""
    return (made_of["frequency"] * (STEPS - 1 + AHEAD) + made_of["phase"]).sin()


def recurrent(
    layer: type[nn.LSTM] | type[nn.GRU],
    truth: Callable[[dict[str, Tensor]], Tensor],
    seed: int,
    *,
    reads_mean: bool = False,
) -> Task:
    """A recurrent network that learns a property of sine waves.

    Args:
        layer: The class of the recurrent layer.
        truth: Gives the targets.
        seed: Seed of the rows and of the network.
        reads_mean: See `Recurrent`.
    """
    torch.manual_seed(seed)

    def rows(count: int, **bounds: tuple[float, float]) -> Rows:
        x, made_of = sequences(count, **bounds)
        return x, truth(made_of)

    shifts = {
        "larger amplitude": rows(OUTSIDE_ROWS, amplitude=(2.0, 3.0)),
        "higher frequency": rows(OUTSIDE_ROWS, frequency=(1.0, 1.6)),
        "higher level": rows(OUTSIDE_ROWS, level=(1.0, 2.0)),
    }
    return _synthetic(partial(Recurrent, layer, reads_mean=reads_mean), rows, shifts)


# --- convolutions --------------------------------------------------------------------------------

LENGTH = 32
"""Points of a signal."""

SIDE = 12
"""Pixels along a side of an image."""


def signals(count: int, **bounds: tuple[float, float]) -> Rows:
    """Waves (N, 1, L) whose target is the logarithm of their frequency times their contrast.

    Args:
        count: The number of signals.
        bounds: Bounds of "contrast", "frequency" and "offset" where they are not those inside.
    """
    contrast = uniform(count, *bounds.get("contrast", (0.5, 1.5)))
    frequency = uniform(count, *bounds.get("frequency", (0.3, 1.0)))
    offset = uniform(count, *bounds.get("offset", (-0.3, 0.3)))
    angle = frequency * torch.arange(LENGTH) + uniform(count, 0.0, 2 * math.pi)
    values = offset + contrast * angle.sin()
    x = values + NOISE * torch.randn_like(values)
    return x[:, None], (frequency.log() + contrast) * (1 + 0.5 * offset)


def blobs(count: int, **bounds: tuple[float, float]) -> Rows:
    """Images (N, 1, H, W) of a bright blob whose target is its width.

    Args:
        count: The number of images.
        bounds: Bounds of "contrast", "width" and "offset" where they are not those inside.
    """
    contrast = uniform(count, *bounds.get("contrast", (0.7, 1.3)))
    width = uniform(count, *bounds.get("width", (1.0, 2.0)))
    offset = uniform(count, *bounds.get("offset", (-0.1, 0.1)))
    places = torch.arange(float(SIDE))
    row = uniform(count, 3.0, SIDE - 4.0)
    column = uniform(count, 3.0, SIDE - 4.0)
    across = (-0.5 * ((places - column) / width).square()).exp()
    down = (-0.5 * ((places - row) / width).square()).exp()
    x = contrast[..., None] * down[:, :, None] * across[:, None, :] + offset[..., None]
    return (x + 0.5 * NOISE * torch.randn_like(x))[:, None], width


def signal_network() -> nn.Module:
    """Two convolutions along a signal, their mean, and two linear layers."""
    return nn.Sequential(
        nn.Conv1d(1, 16, 5),
        nn.ReLU(),
        nn.Conv1d(16, 32, 5, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )


def image_network() -> nn.Module:
    """Two convolutions over an image, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(144, 32),
        nn.SiLU(),
        nn.Linear(32, 1),
    )


def of_signals(seed: int) -> Task:
    """A convolution along signals."""
    torch.manual_seed(seed)
    shifts = {
        "higher contrast": signals(OUTSIDE_ROWS, contrast=(2.0, 3.0)),
        "higher frequency": signals(OUTSIDE_ROWS, frequency=(1.3, 2.0)),
        "offset": signals(OUTSIDE_ROWS, offset=(0.8, 1.5)),
    }
    return _synthetic(signal_network, signals, shifts)


def of_images(seed: int) -> Task:
    """A convolution over images."""
    torch.manual_seed(seed)
    shifts = {
        "higher contrast": blobs(OUTSIDE_ROWS, contrast=(2.0, 3.0)),
        "wider blobs": blobs(OUTSIDE_ROWS, width=(2.3, 3.0)),
        "offset": blobs(OUTSIDE_ROWS, offset=(0.3, 0.6)),
    }
    return _synthetic(image_network, blobs, shifts)


# --- layer norms ---------------------------------------------------------------------------------

INPUTS = 6
"""Inputs of the synthetic tasks."""


def norm_first(inputs: int) -> nn.Module:
    """A network that normalises its inputs, so that later layers do not see their size."""
    return nn.Sequential(
        nn.LayerNorm(inputs),
        nn.Linear(inputs, 64),
        nn.SiLU(),
        nn.Linear(64, 64),
        nn.SiLU(),
        nn.Linear(64, 1),
    )


def norm_last(inputs: int) -> nn.Module:
    """A network that normalises what its last layer reads."""
    return nn.Sequential(
        nn.Linear(inputs, 64),
        nn.SiLU(),
        nn.Linear(64, 64),
        nn.SiLU(),
        nn.LayerNorm(64),
        nn.Linear(64, 1),
    )


def waves(count: int, factor: float = 1.0) -> Rows:
    """Normal inputs (N, 6) times a factor, and a function of them.

    At four times the size of the inputs, the spread of the targets is half as large again.
    """
    x = factor * torch.randn(count, INPUTS)
    y = torch.sin(2 * x[:, 0]) + torch.cos(x[:, 1] + x[:, 2]) + 0.3 * x[:, 3]
    return x, y[:, None]


def of_inputs(network: Callable[[int], nn.Module], seed: int) -> Task:
    """A network on inputs that are larger outside."""
    torch.manual_seed(seed)
    shifts = {f"inputs times {factor}": waves(OUTSIDE_ROWS, factor) for factor in (2, 3, 4)}
    return _synthetic(partial(network, INPUTS), waves, shifts)


def of_set(name: str, seed: int) -> Task:
    """A network with a norm before its readout on one domain of a set.

    Args:
        name: The name of the set.
        seed: Seed of the network and of the domains. Domains of three kinds take turns.
    """
    torch.manual_seed(seed)
    divided = domains.drawn(name, 1, seed)
    k = seed % len(divided.domains)
    train, valid, (x, y) = ((inputs[k], targets[k]) for inputs, targets in divided.samples.parts)
    inside = divided.inside
    return Task(
        network=norm_last(x.shape[1]),
        train=train,
        valid=valid,
        inside=(x[:inside], y[:inside]),
        outside={divided.domains[k].kind: (x[inside:], y[inside:])},
    )


SETS = ("concrete", "energy", "power")
"""The sets on which networks with a norm before the readout are judged."""

KINDS: dict[str, dict[str, Callable[[int], Task]]] = {
    "recurrent": {
        "LSTM, value ahead": partial(recurrent, nn.LSTM, value_ahead),
        "LSTM, phase ahead": partial(recurrent, nn.LSTM, phase_ahead),
        "GRU, mean state, power": partial(recurrent, nn.GRU, power, reads_mean=True),
    },
    "convolutional": {"signals": of_signals, "images": of_images},
    "layer-normed": {
        "norm first": partial(of_inputs, norm_first),
        "norm last": partial(of_inputs, norm_last),
        **{f"norm last, {name}": partial(of_set, name) for name in SETS},
    },
}
"""Tasks by network, for each kind of network."""
