"""The best weights of every network so far, and smaller steps where it no longer improves."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.training.protocol import Protocol

SMALLEST_GAIN = 1e-4
"""Relative improvement that counts as one when rates are cut, as in torch's ReduceLROnPlateau."""


class Plateau:
    """Follows the validation losses of a stack of networks.

    Args:
        flat: The weights of all networks, (B, parameters), as the training changes them.
        rate: Their learning rates, (B, 1), which are cut in place.
        protocol: Patience, the factor of a cut and the smallest rate.

    Attributes:
        weights: The weights of the smallest loss of each network, (B, parameters).
        epoch: The epoch of that loss, (B,), counted from one.
        loss: The smallest loss, (B,).
    """

    def __init__(self, flat: Tensor, rate: Tensor, protocol: Protocol) -> None:
        self._flat = flat
        self._rate = rate
        self._protocol = protocol
        self.weights = flat.clone()
        self.loss = torch.full_like(flat[:, 0], torch.inf)
        self.epoch = torch.zeros(len(flat), dtype=torch.long, device=flat.device)
        # The loss that counts as the last clear improvement, and the epochs since then.
        self._reference = self.loss.clone()
        self._waited = torch.zeros_like(self.epoch)
        self._current_epoch = 0

    def update(self, loss: Tensor) -> None:
        """Take note of the losses (B,) after an epoch, and cut rates in place."""
        self._current_epoch += 1
        improved = loss < self.loss
        self.loss = torch.where(improved, loss, self.loss)
        self.epoch = torch.where(improved, self._current_epoch, self.epoch)
        self.weights = torch.where(improved[:, None], self._flat, self.weights)

        clearly_improved = loss < self._reference * (1 - SMALLEST_GAIN)
        self._reference = torch.where(clearly_improved, loss, self._reference)
        self._waited = torch.where(clearly_improved, 0, self._waited + 1)

        cut = self._waited > self._protocol.patience
        smaller_rate = (self._rate * self._protocol.cut).clamp(min=self._protocol.smallest)
        self._rate.copy_(torch.where(cut[:, None], smaller_rate, self._rate))
        self._waited = torch.where(cut, 0, self._waited)
