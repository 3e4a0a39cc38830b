"""Forces of the first split's net, with their error bars."""

from __future__ import annotations

from typing import Any

import torch

import rigidities as rg
from experiments.atoms.batches import loss_weight
from experiments.studies.qm9 import forces, nets, samples
from experiments.studies.qm9.work import BATCH, MAIN, WAYS
from experiments.training.protocol import device


def of_forces(
    *,
    seed: int,
    train: int,
    valid: int,
    epochs: int,
    molecules: int | None,
    sizes: dict[str, int],
) -> dict[str, Any]:
    """Bars of forces of test molecules, exact and from ensembles, and their time.

    Args:
        seed: of the whole.
        train: molecules to train on.
        valid: molecules to validate and calibrate with.
        epochs: of the training.
        molecules: draw so few of the set; None for all.
        sizes: the other arguments of `forces.measured`.
    """
    with samples.drawn(0, seed, train=train, valid=valid, molecules=molecules) as data:
        keep = molecules is None
        trained = nets.of_split(data, split=0, seed=seed, epochs=epochs, keep=keep)
        uq = rg.LastLayerRigidity(trained.net.to(device()), forward=forces.energies)
        known, held = data.environments(data.train), data.environments(data.valid)
        uq.fit(known.batches(BATCH), sample_weight=loss_weight, progress=False)
        how = WAYS[MAIN]
        uq.calibrate(held.batches(BATCH), criterion=how.criterion, noise=how.noise, progress=False)
        del known, held
        order = torch.Generator().manual_seed(seed)
        few = data.test[torch.randperm(len(data.test), generator=order)[:1000]]
        return forces.measured(uq, data.molecules.structures.picked(few), seed=seed, **sizes)
