r"""Networks for clusters, trained on energies and forces.

$$ L = \frac1N \sum_A \left[ \frac{(E_A - y_A)^2}{n_A} + \beta \sum_{k}
\left(\frac{\partial E_A}{\partial r_k} + F_k\right)^2 \right] $$

over clusters A of n atoms and all 3 n components k of their forces. With half of each square, as
`rigidities` counts them, the curvatures are 1 / n of an energy and β of a force: these are the
weights in the Gram.

`batches` computes descriptors and their slopes once, `trained` trains and `fitted` makes error
bars.
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

BETA = 0.01
"""Weight of a squared force component (eV per angstrom) beside a squared energy (eV) over n."""

SOAP = Soap(radial=4, angular=3)
"""Fewer functions than for molecules, for speed; the rest is the same."""

TARGETS = ("y", "slope")
"""Entries of a batch that are no inputs of the network: energies, derivatives by the positions."""


def batches(data: Labelled, baseline: Composition, size: int, soap: Soap = SOAP) -> list[Batch]:
    """Descriptors, their slopes and the targets, computed once.

    Args:
        data: Labelled clusters.
        baseline: What is taken off the energies.
        size: Clusters of a batch.
        soap: Parameters of the descriptor.
    """
    all_rows = torch.arange(len(data.energy))
    return [_batch(data, baseline, rows, soap) for rows in all_rows.split(size)]


def _batch(data: Labelled, baseline: Composition, rows: Tensor, soap: Soap) -> Batch:
    """The batch of some clusters; its atoms stand one species after another."""
    structures = data.structures.picked(rows)
    batch = positions.batch(structures, SPECIES, soap)
    atoms = data.structures.atoms_of(rows)[batch.pop("atoms")]
    batch["y"] = data.energy[rows] - baseline(structures)
    batch["slope"] = -data.forces[atoms]
    return batch


def moved(batches: Sequence[Batch], where: torch.device) -> list[Batch]:
    """The same on a device."""
    return [{name: value.to(where) for name, value in batch.items()} for batch in batches]


def bare(batches: Sequence[Batch]) -> list[Batch]:
    """The same batches with the inputs of the network alone."""
    return [
        {name: value for name, value in batch.items() if name not in TARGETS} for batch in batches
    ]


def joined(batches: Sequence[Batch], name: str) -> Tensor:
    """One entry of all batches, flat."""
    return torch.cat([batch[name] for batch in batches]).flatten()


def net_for(batches: Sequence[Batch], seed: int) -> FromPositions:
    """A network with its first weights, which standardises descriptors as in these batches."""
    x = torch.cat([power_spectrum(batch["values"]) for batch in batches])
    net = bpnn.drawn(len(SPECIES), x.shape[1], seed)
    net.standardise(x.cpu())
    return FromPositions(net)


def energies_and_slopes(
    net: FromPositions, batch: Batch, *, graph: bool = False
) -> tuple[Tensor, Tensor]:
    """Energies (N,) and their derivatives by the positions (A, 3)."""
    (inputs,) = bare([batch])
    inputs["positions"] = batch["positions"].detach().requires_grad_()
    energy = net(**inputs)
    (slope,) = torch.autograd.grad(energy.sum(), inputs["positions"], create_graph=graph)
    return energy, slope


def terms(net: FromPositions, batch: Batch, *, graph: bool = False) -> tuple[Tensor, Tensor]:
    """Both sums of the loss over the clusters of a batch: of energies, and β times of forces."""
    energy, slope = energies_and_slopes(net, batch, graph=graph)
    energy_term = ((energy - batch["y"]).square() * loss_weight(batch)).sum()
    force_term = BETA * (slope - batch["slope"]).square().sum()
    return energy_term, force_term


def mean_terms(net: FromPositions, batches: Sequence[Batch]) -> tuple[float, float]:
    """Both terms of the loss, means over all clusters."""
    net.eval()
    sums = torch.stack([torch.stack(terms(net, batch)).detach() for batch in batches]).sum(0)
    clusters = sum(len(batch["y"]) for batch in batches)
    energy_term, force_term = (sums / clusters).tolist()
    return energy_term, force_term


def trained(
    train: Sequence[Batch], valid: Sequence[Batch], seed: int, protocol: Protocol
) -> Fitted:
    """A network; batches keep their clusters and come in a new order every epoch.

    Args:
        train: Batches to train on.
        valid: Batches that cut the rate and choose the weights.
        seed: The seed of the first weights and of the order.
        protocol: Epochs, rate and its cuts, decay.
    """
    where = device()
    net = net_for(train, seed).to(where)
    train = moved(train, where)
    valid = moved(valid, where)

    def one_epoch(optimiser: torch.optim.Optimizer, order: torch.Generator) -> None:
        net.train()
        for index in torch.randperm(len(train), generator=order).tolist():
            batch = train[index]
            optimiser.zero_grad()
            energy_term, force_term = terms(net, batch, graph=True)
            ((energy_term + force_term) / len(batch["y"])).backward()
            optimiser.step()

    def valid_loss() -> float:
        return sum(mean_terms(net, valid))

    return descended(net, protocol, seed, one_epoch, valid_loss)


def fitted(net: FromPositions, train: Sequence[Batch], *, forces: bool) -> rg.LastLayerRigidity:
    """Error bars from the Gram of the loss, or from that of its energies alone.

    Either way, a calibration chooses ridge and scale by the energies, and a scale of their own for
    the forces.
    """
    weight = BETA if forces else 0.0
    gradient_loss = rg.GradientLoss("positions", weight=weight, target="slope")
    uq = rg.LastLayerRigidity(net, progress=False)
    return uq.fit(list(train), sample_weight=loss_weight, gradient_loss=gradient_loss)
