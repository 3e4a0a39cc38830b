"""Expanded densities of many structures, computed once and kept on disk.

Only the species that an atom has around it are stored, in float32, in files of some thousand
structures each. Those of QM9 take a fifth of what its power spectra would take. Every file says
which parameters and structures it was made of, and is refused for others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from experiments.atoms.soap import Soap, expansion
from experiments.atoms.structures import StructureError, Structures, spans
from experiments.data.files import FormatError
from experiments.frame.files import replace
from experiments.frame.progress import steps

PART = 10_000
"""Structures in a file."""

FORMAT = 1
"""The version of the format of the files."""


class DescriptorFileError(FormatError):
    """A file cannot be read or holds other descriptors; the message says which."""


@dataclass(frozen=True)
class DescriptorFiles:
    """The expansions of structures, in a folder.

    Attributes:
        structures: All structures.
        species: Atomic numbers of the channels.
        soap: Parameters of the descriptor.
        folder: The folder of the files.
        part: The number of structures in a file.
    """

    structures: Structures
    species: tuple[int, ...]
    soap: Soap
    folder: Path
    part: int = PART

    def parts(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The expansions of some structures, file after file.

        What is not on disk is computed and written.

        Args:
            rows: Indices of the structures that are wanted.

        Yields:
            Places in `rows`, and the expansions (A, C, M) in float64 of the atoms of those
            structures, one structure after another.
        """
        file_numbers = rows // self.part
        for number in steps(file_numbers.unique().tolist(), "files of descriptors"):
            start = number * self.part
            stop = min(start + self.part, len(self.structures))
            in_file = self.structures.picked(torch.arange(start, stop))
            expansions = self._read(number, in_file)
            places = (file_numbers == number).nonzero()[:, 0]
            atoms = in_file.atoms_of(rows[places] - start)
            yield places, expansions[atoms].double()

    def rows(self, rows: Tensor) -> Tensor:
        """The expansions of some structures, (A, C, M) in float64, in the order of the indices."""
        counts = self.structures.counts[rows]
        starts = counts.cumsum(0) - counts
        result = torch.empty(int(counts.sum()), *self._shape, dtype=torch.float64)
        for places, expansions in self.parts(rows):
            result[spans(starts[places], counts[places])] = expansions
        return result

    @property
    def _shape(self) -> tuple[int, int]:
        """The numbers of channels and of harmonics, (C, M)."""
        return len(self.species) * self.soap.radial, (self.soap.angular + 1) ** 2

    def _path(self, number: int) -> Path:
        """The path of a file."""
        return self.folder / f"{number:05}.safetensors"

    def _header(self, in_file: Structures) -> dict[str, str]:
        """What a file of these structures says that it was made of."""
        return {
            "format": str(FORMAT),
            "soap": json.dumps(self.soap.parameters()),
            "species": json.dumps(list(self.species)),
            "structures": in_file.digest(),
        }

    def _read(self, number: int, in_file: Structures) -> Tensor:
        """The expansions of a file's structures, (A, C, M) in float32.

        Args:
            number: The number of the file, which is written first if need be.
            in_file: The structures of the file.
        """
        path = self._path(number)
        if not path.exists():
            self._write(path, in_file, number * self.part)
        expected = self._header(in_file)
        channels, harmonics = self._shape
        dense = torch.zeros(len(in_file.numbers), len(self.species), self.soap.radial * harmonics)
        try:
            with safetensors.safe_open(path, framework="pt") as stored:
                check(stored.metadata() or {}, expected, path)
                for place, atomic_number in enumerate(self.species):
                    atoms = stored.get_tensor(f"atoms.{atomic_number}").long()
                    dense[atoms, place] = stored.get_tensor(f"values.{atomic_number}")
        except (safetensors.SafetensorError, OSError, IndexError) as error:
            raise DescriptorFileError(
                f"{path} cannot be read ({error}). Delete it: it is then computed again."
            ) from error
        return dense.reshape(-1, channels, harmonics)

    def _write(self, path: Path, in_file: Structures, start: int) -> None:
        """Compute the expansions of a file's structures, the first of which is `start`."""
        try:
            values = expansion(in_file, self.species, self.soap).values
        except StructureError as error:
            raise StructureError(f"{error} (Counted from structure {start} on.)") from error
        by_species = values.reshape(len(values), len(self.species), -1).float()
        tensors = {}
        for place, atomic_number in enumerate(self.species):
            # Atoms that have this species around them.
            atoms = by_species[:, place].any(1).nonzero()[:, 0]
            tensors[f"atoms.{atomic_number}"] = atoms.int()
            tensors[f"values.{atomic_number}"] = by_species[atoms, place].contiguous()
        header = self._header(in_file) | {"featomic": version("featomic")}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, save(tensors, header))


def check(header: dict[str, str], expected: dict[str, str], path: Path) -> None:
    """Refuse a file that was made of other parameters, species or structures.

    Args:
        header: What the file says that it was made of.
        expected: What it must say.
        path: The file.

    Raises:
        DescriptorFileError: It says something else; the message has what differs.
    """
    for name, value in expected.items():
        wanted, got = _differing(value, header.get(name, "nothing"))
        if wanted != got:
            raise DescriptorFileError(
                f"{path} holds other descriptors: expected {name} {wanted}, got {got}. Delete "
                f"{path.parent}, and they are computed again, or use another folder."
            )


def _differing(expected: str, actual: str) -> tuple[str, str]:
    """Two entries of headers in few words: of parameters those alone that differ."""
    try:
        wanted = json.loads(expected)
        got = json.loads(actual)
    except json.JSONDecodeError:
        return expected, actual
    if not (isinstance(wanted, dict) and isinstance(got, dict)):
        return str(wanted), str(got)
    names = [name for name in {**wanted, **got} if wanted.get(name) != got.get(name)]
    wanted_words = ", ".join(f"{name}={wanted.get(name)}" for name in names)
    got_words = ", ".join(f"{name}={got.get(name)}" for name in names)
    return wanted_words, got_words
