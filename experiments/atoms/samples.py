"""QM9 divided into training, validation and test molecules, as the network takes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments.atoms import composition
from experiments.atoms.batches import Environments
from experiments.atoms.composition import Composition
from experiments.atoms.descriptor_files import DescriptorFiles
from experiments.atoms.soap import Soap
from experiments.atoms.spectrum import power_spectrum, width
from experiments.atoms.structures import indices
from experiments.data import qm9
from experiments.data.files import cache_folder
from experiments.data.qm9 import Molecules
from experiments.training.protocol import device

SPECIES = tuple(qm9.ELEMENTS.values())
"""Atomic numbers of the elements of QM9."""

SOAP = Soap()
"""Parameters of the descriptor."""

CHUNK = 20_000
"""Atoms whose spectra are computed at once."""


@dataclass(frozen=True)
class Samples:
    """One split.

    Attributes:
        molecules: All molecules, with energies in kcal/mol.
        train: Indices of the training molecules.
        valid: Indices of the molecules to validate and calibrate with.
        test: Indices of all other molecules.
        baseline: The baseline of the energies, from the training molecules.
        files: The expanded densities of all molecules.
    """

    molecules: Molecules
    train: Tensor
    valid: Tensor
    test: Tensor
    baseline: Composition
    files: DescriptorFiles

    def environments(self, rows: Tensor) -> Environments:
        """Some molecules, with their power spectra on the device of the training."""
        return self._environments(rows, self.files.rows(rows))

    def test_parts(self) -> Iterator[tuple[Tensor, Environments]]:
        """All test molecules, file after file: places in `test`, and the molecules."""
        for places, values in self.files.parts(self.test):
            yield places, self._environments(self.test[places], values)

    def _environments(self, rows: Tensor, values: Tensor) -> Environments:
        """Some molecules, given the expanded densities of their atoms, (A, C, M)."""
        molecules = self.molecules.picked(rows)
        structures = molecules.structures
        where = device()
        y = molecules.energy - self.baseline(structures)
        return Environments(
            x=spectra(values, where),
            species=indices(structures.numbers, SPECIES),
            counts=structures.counts,
            y=y.to(where),
            kinds=len(SPECIES),
        )


@contextmanager
def drawn(
    split: int, seed: int, *, train: int, valid: int, molecules: int | None = None
) -> Iterator[Samples]:
    """A random split, which can be used within the context.

    Args:
        split: The number of the split.
        seed: Seed of all splits.
        train: The number of training molecules.
        valid: The number of validation molecules.
        molecules: The number of molecules that are drawn from the set; all by default. The
            descriptors of drawn molecules are not kept.
    """
    all_molecules = qm9.read()
    with tempfile.TemporaryDirectory() as temporary:
        folder = cache_folder() / "descriptors" / "qm9"
        if molecules is not None:
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(all_molecules), generator=generator)
            all_molecules = all_molecules.picked(order[:molecules])
            folder = Path(temporary)
        rows = qm9.random(len(all_molecules), split, seed, train=train, valid=valid)
        train_rows = torch.as_tensor(rows.train)
        train_molecules = all_molecules.picked(train_rows)
        yield Samples(
            molecules=all_molecules,
            train=train_rows,
            valid=torch.as_tensor(rows.valid),
            test=torch.as_tensor(rows.test),
            baseline=composition.fitted(
                train_molecules.structures, train_molecules.energy, SPECIES
            ),
            files=DescriptorFiles(all_molecules.structures, SPECIES, SOAP, folder),
        )


def spectra(values: Tensor, where: torch.device) -> Tensor:
    """Power spectra of many atoms on a device, (A, D), computed chunk by chunk.

    Args:
        values: Expanded densities, (A, C, M).
        where: The device.
    """
    _, channels, _ = values.shape
    result = values.new_empty(len(values), width(channels, SOAP.angular), device=where)
    for start in range(0, len(values), CHUNK):
        chunk = slice(start, start + CHUNK)
        result[chunk] = power_spectrum(values[chunk].to(where))
    return result
