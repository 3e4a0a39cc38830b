"""QM9 divided into training, validation and test, as the net takes it."""

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
SOAP = Soap()
CHUNK = 20_000
"""Atoms whose spectra are computed at once."""


@dataclass(frozen=True)
class Samples:
    """One split.

    Attributes:
        molecules: all of them, with energies in kcal/mol.
        train: places of the molecules to train on.
        valid: of those to validate and calibrate with.
        test: of the rest.
        baseline: of the energies, from the training molecules.
        files: their expanded densities.
    """

    molecules: Molecules
    train: Tensor
    valid: Tensor
    test: Tensor
    baseline: Composition
    files: DescriptorFiles

    def environments(self, rows: Tensor) -> Environments:
        """Some molecules, their power spectra on the device of the training."""
        return self._made(rows, self.files.rows(rows))

    def test_parts(self) -> Iterator[tuple[Tensor, Environments]]:
        """All test molecules, file after file: places in `test`, and the molecules."""
        for places, values in self.files.parts(self.test):
            yield places, self._made(self.test[places], values)

    def _made(self, rows: Tensor, values: Tensor) -> Environments:
        own = self.molecules.picked(rows)
        y = own.energy - self.baseline(own.structures)
        species = indices(own.structures.numbers, SPECIES)
        x = spectra(values, device())
        return Environments(x, species, own.structures.counts, y.to(x.device), len(SPECIES))


@contextmanager
def drawn(
    split: int, seed: int, *, train: int, valid: int, molecules: int | None = None
) -> Iterator[Samples]:
    """A random split; it can be used within the context.

    Args:
        split: which of the seed's splits.
        seed: of all splits.
        train: molecules to train on.
        valid: molecules to validate with.
        molecules: draw so few of the set, or all if there are no more; their descriptors are not
            kept then.
    """
    every = qm9.read()
    with tempfile.TemporaryDirectory() as temporary:
        folder = cache_folder() / "descriptors" / "qm9"
        if molecules is not None:
            order = torch.Generator().manual_seed(seed)
            every = every.picked(torch.randperm(len(every), generator=order)[:molecules])
            folder = Path(temporary)
        parts = qm9.random(len(every), split, seed, train=train, valid=valid)
        rows = [torch.as_tensor(part) for part in (parts.train, parts.valid, parts.test)]
        first = every.picked(rows[0])
        baseline = composition.fitted(first.structures, first.energy, SPECIES)
        files = DescriptorFiles(every.structures, SPECIES, SOAP, folder)
        yield Samples(every, *rows, baseline, files)


def spectra(values: Tensor, where: torch.device) -> Tensor:
    """Power spectra of many atoms, (A, D), on a device, some atoms after the others."""
    _, channels, _ = values.shape
    found = values.new_empty(len(values), width(channels, SOAP.angular), device=where)
    for start in range(0, len(values), CHUNK):
        part = slice(start, start + CHUNK)
        found[part] = power_spectrum(values[part].to(where))
    return found
