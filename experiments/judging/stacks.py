"""Stacks of nets on splits of their own: trained together, then judged one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from experiments.data.california import Pair, Samples
from experiments.judging import error_bars, scores
from experiments.judging.error_bars import Bars, Calibration
from experiments.judging.predictive import row_scores
from experiments.judging.scores import Rows
from experiments.training import descent
from experiments.training.descent import Trained
from experiments.training.protocol import Protocol
from experiments.training.stack import Stack


@dataclass(frozen=True)
class Judged:
    """A trained net, its rows and its error bars.

    Attributes:
        net: the net.
        uq: fitted to the training rows.
        train, valid, test: rows.
    """

    net: nn.Sequential
    uq: rg.LastLayerRigidity
    train: Pair
    valid: Pair
    test: Pair

    @cached_property
    def constant(self) -> float:
        """The constant bar, from the validation rows."""
        with torch.no_grad():
            return error_bars.constant(self.net(self.valid[0]), self.valid[1])

    def bars(self, how: Calibration) -> Bars:
        """Calibrated on the validation rows, of the test rows."""
        return error_bars.bars(self.uq, self.valid, self.test[0], how)

    def rows(self, bars: Bars, of: Tensor | None = None) -> Rows:
        """The test rows, or some of them, in float64."""
        every = Rows(bars.mean, bars.std, self.test[1].flatten().double())
        return every if of is None else Rows(*(part[of] for part in every))

    def scored(self, bars: Bars, bin_size: int, of: Tensor | None = None) -> dict[str, Any]:
        """The scores of the bars, by their distribution, beside those of the constant one."""
        found = scores.beside_constant(*self.rows(bars, of), self.constant, bin_size)
        if bars.prediction is None:
            return found
        rows = row_scores(bars.prediction, self.test[1])
        return scores.by_distribution(found, rows if of is None else rows.picked(of))


def trained(samples: Samples, protocol: Protocol, seed: int, what: str) -> Trained:
    """One net a split; first weights and batches follow the seed."""
    seeds = [1000 * seed + k for k in range(len(samples.test))]
    return descent.trained(samples.train, samples.valid, protocol, seeds, what)


def judged(stack: Stack, samples: Samples) -> Iterator[Judged]:
    """The nets, one after the other, each fitted to its own training rows."""
    for k in range(len(samples.test)):
        net, (train, valid, test) = stack.module(k), samples.of(k)
        yield Judged(net, error_bars.fitted(net, train), train, valid, test)
