"""How networks are trained: the numbers of a training, and its device."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

VARIABLE = "RIGIDITIES_DEVICE"
"""The environment variable that names the device."""


@dataclass(frozen=True)
class Protocol:
    """A training from scratch, by Adam with decoupled weight decay.

    Attributes:
        hidden: Widths of the hidden layers.
        activation: "relu" or "silu".
        last_bias: Whether the last layer has a bias.
        epochs: Passes over the training rows.
        batch: Rows a step; the last batch of an epoch may be smaller.
        rate: The first learning rate.
        decay: The decay of the weights.
        patience: Epochs without a better validation loss after which the rate is cut.
        cut: The factor by which the rate is then multiplied.
        smallest: The rate below which it is not cut.
        cosine: Whether the rate falls to zero along a cosine instead, epoch by epoch.
    """

    hidden: tuple[int, ...] = (50,)
    activation: str = "relu"
    last_bias: bool = True
    epochs: int = 400
    batch: int = 32
    rate: float = 1e-3
    decay: float = 0.0
    patience: int = 100
    cut: float = 0.1
    smallest: float = 1e-6
    cosine: bool = False

    def of_length(self, rows: int, steps: int) -> Protocol:
        """The same protocol with epochs and patience for sets of another size.

        Args:
            rows: Training rows.
            steps: About how many steps are taken, within 40 to 300 epochs and with at least one
                step an epoch.
        """
        epochs = round(min(300.0, max(40.0, steps * self.batch / rows)))
        epochs = min(epochs, steps)
        return replace(self, epochs=epochs, patience=max(8, epochs // 6))


FORECASTS = Protocol(
    hidden=(256, 256), activation="silu", epochs=100, batch=128, rate=1e-3, decay=1e-2
)
"""The network that forecasts the weather, and the larger network whose cost is measured."""


def device() -> torch.device:
    """Where networks are trained: the environment variable `VARIABLE`, else the CPU."""
    return torch.device(os.environ.get(VARIABLE, "cpu"))
