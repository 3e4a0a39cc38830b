"""How nets are trained."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

VARIABLE = "RIGIDITIES_DEVICE"


@dataclass(frozen=True)
class Protocol:
    """A training from scratch, by Adam with decoupled weight decay.

    Attributes:
        hidden: widths of the hidden layers.
        activation: "relu" or "silu".
        last_bias: whether the last layer has a bias.
        epochs: passes over the training rows.
        batch: rows a step; the last batch of an epoch may be smaller.
        rate: the first learning rate.
        decay: of the weights.
        patience: epochs without a better validation loss after which the rate is cut.
        cut: factor of the rate then.
        smallest: rate, below which it is not cut.
        cosine: whether the rate falls to zero along a cosine instead, epoch by epoch.
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
        """The same with about so many steps on so many rows, in 40 to 300 epochs."""
        epochs = round(min(300.0, max(40.0, steps * self.batch / rows)))
        epochs = min(epochs, steps)
        return replace(self, epochs=epochs, patience=max(8, epochs // 6))


FORECASTS = Protocol(
    hidden=(256, 256), activation="silu", epochs=100, batch=128, rate=1e-3, decay=1e-2
)
"""Of the net that forecasts the weather, and of the larger net whose cost is measured."""


def device() -> torch.device:
    """Where nets are trained: the environment variable, else the CPU."""
    return torch.device(os.environ.get(VARIABLE, "cpu"))
