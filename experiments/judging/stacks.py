"""Stacks of networks, each on a split of its own: trained together, then judged one by one."""

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
from experiments.judging.error_bars import Bars, Method
from experiments.judging.predictive import row_scores
from experiments.judging.scores import Rows
from experiments.training import descent
from experiments.training.descent import Trained
from experiments.training.protocol import Protocol
from experiments.training.stack import Stack


@dataclass(frozen=True)
class Judged:
    """A trained network, its rows and its error bars.

    Attributes:
        net: The network.
        uq: Its error bars, fitted to the training rows.
        train: Training rows.
        valid: Validation rows.
        test: Test rows.
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

    def bars(self, method: Method) -> Bars:
        """Error bars of the test rows, calibrated on the validation rows."""
        return error_bars.bars(self.uq, self.valid, self.test[0], method)

    def rows(self, bars: Bars, of: Tensor | None = None) -> Rows:
        """The test rows in float64.

        Args:
            bars: Their error bars.
            of: A mask or indices of the rows that are wanted; all by default.
        """
        target = self.test[1].flatten().double()
        if of is None:
            return Rows(bars.mean, bars.std, target)
        return Rows(bars.mean[of], bars.std[of], target[of])

    def scored(self, bars: Bars, bin_size: int, of: Tensor | None = None) -> dict[str, Any]:
        """The scores of the bars, by their distribution, beside those of the constant bar.

        Args:
            bars: Error bars of the test rows.
            bin_size: Rows of a bin.
            of: A mask or indices of the rows that are judged; all by default.
        """
        block = scores.beside_constant(*self.rows(bars, of), self.constant, bin_size)
        if bars.prediction is None:
            return block
        distribution_scores = row_scores(bars.prediction, self.test[1])
        if of is not None:
            distribution_scores = distribution_scores.picked(of)
        return scores.by_distribution(block, distribution_scores)


def trained(samples: Samples, protocol: Protocol, seed: int, what: str) -> Trained:
    """Train one network a split.

    Args:
        samples: The splits.
        protocol: How networks are trained.
        seed: Seed of the first weights and of the order of the batches.
        what: The word for the networks in the progress.
    """
    seeds = [1000 * seed + split for split in range(len(samples.test))]
    return descent.trained(samples.train, samples.valid, protocol, seeds, what)


def judged(stack: Stack, samples: Samples) -> Iterator[Judged]:
    """The networks of a stack, one after the other, each fitted to its own training rows."""
    for split in range(len(samples.test)):
        net = stack.module(split)
        train, valid, test = samples.of(split)
        yield Judged(net, error_bars.fitted(net, train), train, valid, test)
