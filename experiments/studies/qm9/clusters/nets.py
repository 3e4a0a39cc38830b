r"""Nets for clusters, trained on energies and forces.

$$ L = \frac1N \sum_A \left[ \frac{(E_A - y_A)^2}{n_A} + \beta \sum_{k}
\left(\frac{\partial E_A}{\partial r_k} + F_k\right)^2 \right] $$

over clusters A of n atoms and all 3 n components k of their forces. With half of each square, as
`rigidities` counts them, the curvatures are 1 / n of an energy and β of a force: these are the
weights in the Gram.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import rigidities as rg
from experiments.atoms import bpnn, positions
from experiments.atoms.batches import Batch, loss_weight
from experiments.atoms.composition import Composition
from experiments.atoms.positions import FromPositions
from experiments.atoms.soap import Soap
from experiments.atoms.spectrum import power_spectrum
from experiments.studies.qm9.clusters.structures import SPECIES, Labelled
from experiments.training.loop import Fitted, descended
from experiments.training.protocol import Protocol, device
from rigidities.calibration import CalibrationReport

BETA = 0.01
"""Weight of a squared force component (eV per angstrom) beside a squared energy (eV) over n."""

SOAP = Soap(radial=4, angular=3)
"""Fewer functions than for molecules, for speed; the rest is the same."""

TARGETS = ("y", "slope")
"""Entries of a batch that are no inputs of the net: energies, derivatives by the positions."""


def batches(data: Labelled, baseline: Composition, size: int, soap: Soap = SOAP) -> list[Batch]:
    """Descriptors, their slopes and the targets, computed once.

    Args:
        data: labelled clusters.
        baseline: taken off the energies.
        size: clusters of a batch.
        soap: parameters of the descriptor.
    """
    every = torch.arange(len(data.energy))
    return [_batch(data, baseline, rows, soap) for rows in every.split(size)]


def _batch(data: Labelled, baseline: Composition, rows: Tensor, soap: Soap) -> Batch:
    structures = data.structures.picked(rows)
    found = positions.batch(structures, SPECIES, soap)
    atoms = data.structures.atoms_of(rows)[found.pop("atoms")]
    return found | {"y": data.energy[rows] - baseline(structures), "slope": -data.forces[atoms]}


def moved(batches: Sequence[Batch], where: torch.device) -> list[Batch]:
    """The same on a device."""
    return [{name: value.to(where) for name, value in batch.items()} for batch in batches]


def bare(batches: Sequence[Batch]) -> list[Batch]:
    """The inputs of the net alone."""
    return [{k: v for k, v in batch.items() if k not in TARGETS} for batch in batches]


def joined(batches: Sequence[Batch], name: str) -> Tensor:
    """One entry of all batches, flat."""
    return torch.cat([batch[name] for batch in batches]).flatten()


def net_for(batches: Sequence[Batch], seed: int) -> FromPositions:
    """With its first weights; it sees descriptors of these batches standardised."""
    x = torch.cat([power_spectrum(batch["values"]) for batch in batches])
    net = bpnn.drawn(len(SPECIES), x.shape[1], seed)
    net.standardise(x.cpu())
    return FromPositions(net)


def energies_and_slopes(
    net: FromPositions, batch: Batch, *, graph: bool = False
) -> tuple[Tensor, Tensor]:
    """Energies (N,) and their derivatives by the positions (A, 3)."""
    (inputs,) = bare([batch])
    moving = batch["positions"].detach().requires_grad_()
    energy = net(**{**inputs, "positions": moving})
    (slope,) = torch.autograd.grad(energy.sum(), moving, create_graph=graph)
    return energy, slope


def terms(net: FromPositions, batch: Batch, *, graph: bool = False) -> tuple[Tensor, Tensor]:
    """The two sums of the loss over the clusters of a batch: of energies, and β times of forces."""
    energy, slope = energies_and_slopes(net, batch, graph=graph)
    of_energies = ((energy - batch["y"]).square() * loss_weight(batch)).sum()
    return of_energies, BETA * (slope - batch["slope"]).square().sum()


def mean_terms(net: FromPositions, batches: Sequence[Batch]) -> tuple[float, float]:
    """The two terms of the loss of all clusters."""
    net.eval()
    parts = torch.stack([torch.stack(terms(net, batch)).detach() for batch in batches]).sum(0)
    of_energies, of_forces = (parts / sum(len(batch["y"]) for batch in batches)).tolist()
    return of_energies, of_forces


def trained(
    train: Sequence[Batch], valid: Sequence[Batch], seed: int, protocol: Protocol
) -> Fitted:
    """A net; batches keep their clusters and come in a new order every epoch.

    Args:
        train: batches to train on.
        valid: those that cut the rate and choose the weights.
        seed: of the first weights and of the order.
        protocol: epochs, rate and its cuts, decay.
    """
    where = device()
    net = net_for(train, seed).to(where)
    learnt, judged = moved(train, where), moved(valid, where)

    def one_epoch(optimiser: torch.optim.Optimizer, order: torch.Generator) -> None:
        net.train()
        for place in torch.randperm(len(learnt), generator=order).tolist():
            optimiser.zero_grad()
            of_energies, of_forces = terms(net, learnt[place], graph=True)
            ((of_energies + of_forces) / len(learnt[place]["y"])).backward()
            optimiser.step()

    return descended(net, protocol, seed, one_epoch, lambda: sum(mean_terms(net, judged)))


def fitted(net: FromPositions, train: Sequence[Batch], *, forces: bool) -> rg.LastLayerRigidity:
    """The Gram of the loss, or that of its energies alone."""
    uq = rg.LastLayerRigidity(net)
    if not forces:
        energies = [{k: v for k, v in batch.items() if k != "slope"} for batch in train]
        return uq.fit(energies, sample_weight=loss_weight, progress=False)
    return uq.fit(
        train,
        sample_weight=loss_weight,
        gradients="positions",
        gradient_weight=BETA,
        gradient_target="slope",
        progress=False,
    )


def calibrate(
    uq: rg.LastLayerRigidity, valid: Sequence[Batch], criterion: str
) -> CalibrationReport:
    """Ridge and scale by the energies; a scale of their own for the forces."""
    return uq.calibrate(
        list(valid),
        criterion=criterion,
        gradients="positions",
        gradient_target="slope",
        progress=False,
    )
