"""The network of a split of QM9, trained from scratch."""

from __future__ import annotations

from dataclasses import replace

from experiments.atoms import bpnn, fitting
from experiments.atoms.samples import SPECIES, Samples
from experiments.training.loop import Fitted


def trained(data: Samples, seed: int, epochs: int) -> Fitted:
    """Train on the training molecules of a split, on the device of the training.

    Args:
        data: The split.
        seed: Seed of the first weights and of the order of the batches.
        epochs: Epochs of the training.
    """
    train = data.environments(data.train)
    valid = data.environments(data.valid)
    net = bpnn.drawn(len(SPECIES), train.x.shape[1], seed)
    net.standardise(train.x.cpu())
    protocol = replace(fitting.PROTOCOL, epochs=epochs)
    return fitting.fitted(net, train, valid, seed, protocol, what="the net of molecules")
