"""One net of a split, trained from scratch."""

from __future__ import annotations

from dataclasses import replace

from experiments.atoms import bpnn, fitting
from experiments.atoms.samples import SPECIES, Samples
from experiments.training.loop import Fitted


def trained(data: Samples, seed: int, epochs: int) -> Fitted:
    """Train on the training molecules of a split, on the device of the training.

    Args:
        data: the split.
        seed: of the first weights and of the order of the batches.
        epochs: of the training.
    """
    known, held = data.environments(data.train), data.environments(data.valid)
    net = bpnn.drawn(len(SPECIES), known.x.shape[1], seed)
    net.standardise(known.x.cpu())
    protocol = replace(fitting.PROTOCOL, epochs=epochs)
    return fitting.fitted(net, known, held, seed, protocol, what="the net of molecules")
