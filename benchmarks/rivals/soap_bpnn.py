"""A SOAP-BPNN model of metatrain, its inputs, and the ways in which the façade can read it.

The module is imported in the environment that holds metatrain. The hidden layers are as
initialised. The readout (one linear layer per chemical element, without bias) solves the weighted
ridge regression of metatrain's default loss, so that residuals and error bars are those of a model
that has learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from metatensor.torch import Labels, TensorBlock, TensorMap
from metatomic.torch import ModelOutput, System
from metatrain.soap_bpnn import SoapBpnn
from metatrain.utils.architectures import get_default_hypers
from metatrain.utils.data import DatasetInfo
from metatrain.utils.data.target_info import get_energy_target_info
from metatrain.utils.neighbor_lists import (
    get_requested_neighbor_lists,
    get_system_with_neighbor_lists,
)
from torch import Tensor, nn

import rigidities as rg
from benchmarks.rivals.molecules import SPECIES, Molecule

FEATURES = "mtt::aux::energy_last_layer_features"
READOUT_RIDGE = 1e-6


@dataclass(frozen=True)
class Structures:
    """A batch of structures.

    Attributes:
        systems: metatomic's systems with their neighbour lists.
        y: The energies, (N, 1).
        sizes: The number of atoms of each structure, (N,).
    """

    systems: list[Any]
    y: Tensor
    sizes: Tensor


class Network(nn.Module):
    """metatrain's model as a module from a batch to energies (N, 1)."""

    def __init__(self, model: SoapBpnn) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Structures) -> Tensor:
        """The energies alone."""
        return self.model(batch.systems, outputs("energy"))["energy"].block().values

    def with_features(self, batch: Structures) -> tuple[Tensor, Tensor]:
        """Energies, and the features that metatrain gives out, (N, D), from one pass."""
        maps = self.model(batch.systems, outputs("energy", FEATURES))
        return maps["energy"].block().values, maps[FEATURES].block().values

    @property
    def readouts(self) -> list[str]:
        """Names of the last linear layers, one per element, in the features' order."""
        names = self.model.last_layer_parameter_names["energy"]
        return [f"model.{name.removesuffix('.weight')}" for name in names]


class OnePass:
    """Energies and features of a batch from one pass.

    The façade asks `forward=` and `features=` one after the other; the features of the last batch
    are remembered in between.
    """

    def __init__(self) -> None:
        self.batch: Structures | None = None
        self.batch_features: Tensor | None = None

    def energies(self, network: Network, batch: Structures) -> Tensor:
        """The energies; the features are remembered."""
        self.batch = batch
        energies, self.batch_features = network.with_features(batch)
        return energies

    def features(self, network: Network, batch: Structures) -> Tensor:
        """The features, from the pass that gave the energies where there was one."""
        if batch is not self.batch or self.batch_features is None:
            self.energies(network, batch)
        assert self.batch_features is not None
        return self.batch_features


def by_layers(network: Network) -> rg.LastLayerRigidity:
    """The façade with the names of the readout layers: it finds their features itself."""
    return rg.LastLayerRigidity(
        network, forward=lambda model, batch: model(batch), layer=network.readouts
    )


def by_features(network: Network) -> rg.LastLayerRigidity:
    """The façade with the features that metatrain gives out."""
    one_pass = OnePass()
    return rg.LastLayerRigidity(network, forward=one_pass.energies, features=one_pass.features)


def outputs(*names: str) -> dict[str, ModelOutput]:
    """Outputs to ask for, one per structure."""
    return {name: ModelOutput(sample_kind="system") for name in names}


def dataset_info() -> DatasetInfo:
    """One energy per structure."""
    energy = get_energy_target_info("energy", {"quantity": "energy", "unit": "eV"})
    return DatasetInfo("angstrom", list(SPECIES), {"energy": energy})


def seeded_network(width: int) -> Network:
    """Seeded, float64, in eval mode: cutoff 5 angstrom, three hidden layers per element."""
    hypers = get_default_hypers("soap_bpnn")["model"]
    hypers["soap"] |= {"max_angular": 4, "max_radial": 5}
    hypers["bpnn"] |= {"num_hidden_layers": 3, "num_neurons_per_layer": width}
    torch.manual_seed(0)
    return Network(SoapBpnn(hypers, dataset_info())).double().eval()


def structures(network: Network, rows: Sequence[Molecule], batch_size: int) -> list[Structures]:
    """Batches with neighbour lists, which are computed before any clock runs."""
    systems = [_system(network, row) for row in rows]
    energies = torch.tensor([[row.energy] for row in rows], dtype=torch.float64)
    sizes = torch.tensor([float(len(row.numbers)) for row in rows], dtype=torch.float64)
    batches = []
    for start in range(0, len(rows), batch_size):
        batch = slice(start, start + batch_size)
        batches.append(Structures(systems[batch], energies[batch], sizes[batch]))
    return batches


def energy_maps(energies: Tensor) -> list[TensorMap]:
    """Energies (N, 1) as targets of metatrain, one per structure."""
    maps = []
    for i in range(len(energies)):
        block = TensorBlock(
            values=energies[i : i + 1],
            samples=Labels("system", torch.tensor([[i]])),
            components=[],
            properties=Labels("energy", torch.tensor([[0]])),
        )
        maps.append(TensorMap(Labels.single(), [block]))
    return maps


def features(network: Network, batches: Sequence[Structures]) -> Tensor:
    """The features that metatrain gives out, (N, D)."""
    with torch.no_grad():
        return torch.cat([network.with_features(batch)[1] for batch in batches])


def solve_readout(network: Network, batches: Sequence[Structures]) -> None:
    """Least squares of the energies per atom: the minimum of metatrain's default loss."""
    sizes = torch.cat([batch.sizes for batch in batches])[:, None]
    rows = features(network, batches) / sizes
    target = torch.cat([batch.y for batch in batches]) / sizes
    gram = rows.mT @ rows
    gram.diagonal().add_(READOUT_RIDGE * gram.diagonal().mean())
    weights = torch.linalg.solve(gram, rows.mT @ target)[:, 0]
    by_element = weights.chunk(len(network.readouts))
    for name, layer_weights in zip(network.readouts, by_element, strict=True):
        layer = network.get_submodule(name)
        with torch.no_grad():
            layer.weight.copy_(layer_weights[None])


def _system(network: Network, row: Molecule) -> System:
    """A molecule as metatomic's system, with the neighbour lists that the model asks for."""
    system = System(
        types=torch.as_tensor(row.numbers.astype("int32")),
        positions=torch.as_tensor(row.positions),
        cell=torch.zeros(3, 3, dtype=torch.float64),
        pbc=torch.zeros(3, dtype=torch.bool),
    )
    return get_system_with_neighbor_lists(system, get_requested_neighbor_lists(network))
