"""Expanded densities of many structures, computed once and kept on disk.

Only the species that an atom has around it are stored, in float32, in files of some thousand
structures each: of QM9 a fifth of what its power spectra would take. Every file says which
parameters and structures it was made of, and is refused for others.
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


class DescriptorFileError(FormatError):
    """A file of descriptors that are not the ones asked for; the message says which."""


@dataclass(frozen=True)
class DescriptorFiles:
    """The expansions of structures, in a folder.

    Attributes:
        structures: all of them.
        species: atomic numbers of the channels.
        soap: parameters.
        folder: of the files.
        part: structures in a file.
    """

    structures: Structures
    species: tuple[int, ...]
    soap: Soap
    folder: Path
    part: int = PART

    def parts(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The expansions of some structures, file after file.

        Args:
            rows: the structures wanted.

        Yields:
            Places in `rows`, and the expansions (A, C, M) in float64 of the atoms of those
            structures, one structure after another. What is not on disk is computed and written.
        """
        numbers = rows // self.part
        for number in steps(numbers.unique().tolist(), "files of descriptors"):
            inside = (numbers == number).nonzero()[:, 0]
            start = number * self.part
            own = self.structures.picked(
                torch.arange(start, min(start + self.part, len(self.structures)))
            )
            dense = self._read(number, own)
            yield inside, dense[own.atoms_of(rows[inside] - start)].double()

    def rows(self, rows: Tensor) -> Tensor:
        """The expansions of some structures, (A, C, M) in float64, in the order given."""
        counts = self.structures.counts[rows]
        starts = counts.cumsum(0) - counts
        found = torch.empty(int(counts.sum()), *self._shape, dtype=torch.float64)
        for inside, values in self.parts(rows):
            found[spans(starts[inside], counts[inside])] = values
        return found

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.species) * self.soap.radial, (self.soap.angular + 1) ** 2

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05}.safetensors"

    def _header(self, own: Structures) -> dict[str, str]:
        return {
            "format": str(FORMAT),
            "soap": json.dumps(self.soap.parameters()),
            "species": json.dumps(list(self.species)),
            "structures": own.digest(),
        }

    def _read(self, number: int, own: Structures) -> Tensor:
        """(A, C, M) in float32, of a file's structures."""
        path = self._path(number)
        if not path.exists():
            self._write(path, own, number * self.part)
        expected = self._header(own)
        channels, harmonics = self._shape
        dense = torch.zeros(len(own.numbers), len(self.species), self.soap.radial * harmonics)
        try:
            with safetensors.safe_open(path, framework="pt") as stored:
                check(stored.metadata() or {}, expected, path)
                for place, number_of in enumerate(self.species):
                    atoms = stored.get_tensor(f"atoms.{number_of}").long()
                    dense[atoms, place] = stored.get_tensor(f"values.{number_of}")
        except (safetensors.SafetensorError, OSError, IndexError) as error:
            raise DescriptorFileError(
                f"{path} cannot be read ({error}). Delete it: it is then computed again."
            ) from error
        return dense.reshape(-1, channels, harmonics)

    def _write(self, path: Path, own: Structures, start: int) -> None:
        try:
            values = expansion(own, self.species, self.soap).values
        except StructureError as error:
            raise StructureError(f"{error} (Counted from structure {start} on.)") from error
        blocks = values.reshape(len(values), len(self.species), -1).float()
        tensors = {}
        for place, number in enumerate(self.species):
            atoms = blocks[:, place].any(1).nonzero()[:, 0]
            tensors[f"atoms.{number}"] = atoms.int()
            tensors[f"values.{number}"] = blocks[atoms, place].contiguous()
        header = self._header(own) | {"featomic": version("featomic")}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, save(tensors, header))


def check(found: dict[str, str], expected: dict[str, str], path: Path) -> None:
    """Refuse a file that was made of other parameters, species or structures.

    Raises:
        DescriptorFileError: with what differs.
    """
    for name, value in expected.items():
        wanted, got = _differing(value, found.get(name, "nothing"))
        if wanted != got:
            raise DescriptorFileError(
                f"{path} holds other descriptors: expected {name} {wanted}, got {got}. Delete "
                f"{path.parent}, and they are computed again, or use another folder."
            )


def _differing(expected: str, found: str) -> tuple[str, str]:
    """Both in few words: of parameters those alone that differ."""
    try:
        wanted, got = json.loads(expected), json.loads(found)
    except json.JSONDecodeError:
        return expected, found
    if not (isinstance(wanted, dict) and isinstance(got, dict)):
        return str(wanted), str(got)
    names = [name for name in {**wanted, **got} if wanted.get(name) != got.get(name)]
    both = (", ".join(f"{name}={of.get(name)}" for name in names) for of in (wanted, got))
    return next(both), next(both)
