"""The best weights of every net so far, and smaller steps where it no longer improves."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.training.protocol import Protocol

SMALLEST_GAIN = 1e-4
"""Relative improvement that counts as one when rates are cut, as in torch's ReduceLROnPlateau."""


class Plateau:
    """Follows the validation losses of a stack of nets.

    Attributes:
        weights: (B, parameters), those of the smallest loss of each net.
        epoch: at which that was, (B,), counted from one.
        loss: that smallest loss, (B,).
    """

    def __init__(self, flat: Tensor, rate: Tensor, protocol: Protocol) -> None:
        self._flat, self._rate, self._protocol = flat, rate, protocol
        self.weights = flat.clone()
        self.loss = torch.full_like(flat[:, 0], torch.inf)
        self.epoch = torch.zeros(len(flat), dtype=torch.long, device=flat.device)
        self._reference = self.loss.clone()
        self._waited = torch.zeros_like(self.epoch)
        self._now = 0

    def update(self, loss: Tensor) -> None:
        """Take note of the losses (B,) after an epoch; cut rates in place."""
        self._now += 1
        better = loss < self.loss
        self.loss = torch.where(better, loss, self.loss)
        self.epoch = torch.where(better, self._now, self.epoch)
        self.weights = torch.where(better[:, None], self._flat, self.weights)
        clearly = loss < self._reference * (1 - SMALLEST_GAIN)
        self._reference = torch.where(clearly, loss, self._reference)
        self._waited = torch.where(clearly, 0, self._waited + 1)
        cut = self._waited > self._protocol.patience
        smaller = (self._rate * self._protocol.cut).clamp(min=self._protocol.smallest)
        self._rate.copy_(torch.where(cut[:, None], smaller, self._rate))
        self._waited = torch.where(cut, 0, self._waited)
