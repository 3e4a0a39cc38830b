"""Local and component-wise rigidities against scikit-matter, round by round in the same process.

Both start from the features of training and test structures of 10 to 30 atoms and end with one
rigidity per test atom. scikit-matter takes lists with one array per structure, this library takes
one tensor and the structure of each row.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from benchmarks.frame.results import Row, at_least, at_most, for_information, not_run
from benchmarks.frame.timing import Task, Timings, interleaved
from rigidities import local

ALPHA = 1e-3
BLOCKS = 5
MISSING = "scikit-matter is not installed: `make venv`, with Python 3.11 or newer"


@dataclass(frozen=True)
class Structures:
    """Atoms of many structures.

    Attributes:
        features: One row per atom, (N, D).
        groups: The structure of each atom, (N,).
        sizes: The number of atoms of each structure, (A,).
    """

    features: Tensor
    groups: Tensor
    sizes: Tensor

    def arrays(self) -> list[Any]:
        """One array per structure; they share the memory of the tensor."""
        by_structure = torch.split(self.features, self.sizes.tolist())
        return [rows.numpy() for rows in by_structure]


def structures(atoms: int, width: int, seed: int) -> Structures:
    """About so many atoms, 10 to 30 to a structure, with features of unequal scale."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(10, 31, (max(1, atoms // 20),), generator=generator)
    scale = torch.logspace(0, 1, width, dtype=torch.float64)
    rows = int(sizes.sum())
    features = scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return Structures(features, groups, sizes)


def run(*, quick: bool = False) -> list[Row]:
    """Local rigidities of all atoms; component-wise ones of a tenth of them."""
    try:
        skmatter = importlib.import_module("skmatter.metrics")
    except ImportError:
        return [not_run("local rigidities against scikit-matter", MISSING)]
    atoms, width, rounds = (500, 20, 2) if quick else (100_000, 320, 5)
    train = structures(atoms // 5, width, seed=0)
    return [
        *local_rows(skmatter, train, structures(atoms, width, seed=1), rounds),
        component_row(skmatter, train, structures(atoms // 10, width, seed=1), rounds),
    ]


def posterior_of(train: Structures) -> rg.Posterior:
    """In scikit-matter's convention: means over structures, a relative ridge."""
    gram = rg.Gram(train.features.shape[1])
    gram.update(local.sums(train.features, train.groups), train.sizes.double() ** -2)
    return rg.Posterior.from_gram(gram, ALPHA * float(train.features.square().sum(1).mean()))


def local_rows(skmatter: Any, train: Structures, test: Structures, rounds: int) -> list[Row]:
    """How many times faster in each precision, and how far from their numbers."""
    train_arrays = train.arrays()
    test_arrays = test.arrays()
    rigidities: dict[str, Tensor] = {}

    def ours(name: str, dtype: torch.dtype) -> None:
        rigidities[name] = local.rigidity(posterior_of(train), test.features, dtype=dtype)

    def scikit_matter() -> None:
        by_structure, _ = skmatter.local_prediction_rigidity(train_arrays, test_arrays, ALPHA)
        rigidities["scikit-matter"] = torch.cat([torch.from_numpy(rows) for rows in by_structure])

    tasks: dict[str, Task] = {
        "scikit-matter": scikit_matter,
        "float64": lambda: ours("float64", torch.float64),
        "float32": lambda: ours("float32", torch.float32),
        "product": whole_product(test.features),
    }
    timings = interleaved(tasks, rounds=rounds)
    size = f"{len(test.features):,} atoms, {test.features.shape[1]} features"
    return [
        *(speed_row(timings, name, size) for name in ("float64", "float32")),
        *(difference_row(rigidities, name, size) for name in ("float64", "float32")),
    ]


def whole_product(features: Tensor) -> Task:
    """A product of all rows with a square matrix; a triangular one takes at least half as long."""
    square = torch.randn(features.shape[1], features.shape[1], dtype=features.dtype)

    def product() -> None:
        for rows in torch.split(features, 8192):
            torch.mm(rows, square)

    return product


def speed_row(timings: Timings, name: str, size: str) -> Row:
    """Times faster than scikit-matter, from features to rigidities."""
    if name == "float64":
        half_product = timings.ratio("scikit-matter", "product", factor=2.0).median
        note = f"half of a float64 product alone would be {half_product:.1f} times faster"
        # Nothing is asked: half of the product, which none can avoid, is itself less than 20 times
        # faster than scikit-matter.
        limit = None
    else:
        note = "a float32 product, taken where its rounding bound is below 1e-3"
        limit = 20
    return at_least(
        f"local rigidities in {name}, {size}",
        timings.ratio("scikit-matter", name),
        limit,
        "times faster than scikit-matter",
        note=note,
        seconds=timings.medians(),
    )


def difference_row(rigidities: dict[str, Tensor], name: str, size: str) -> Row:
    """Largest relative difference of one atom's rigidity."""
    difference = float((rigidities[name] / rigidities["scikit-matter"] - 1).abs().max())
    return at_most(
        f"local rigidities in {name} less scikit-matter's, {size}",
        difference,
        1e-8 if name == "float64" else 1e-3,
        "relative",
    )


def component_row(skmatter: Any, train: Structures, test: Structures, rounds: int) -> Row:
    """Rigidities of five blocks of columns, for every atom and every structure."""
    width = test.features.shape[1]
    sizes = torch.full((BLOCKS,), width // BLOCKS)
    train_arrays = train.arrays()
    test_arrays = test.arrays()

    def ours() -> None:
        posterior = posterior_of(train)
        local.component_rigidity(posterior, test.features, sizes)
        local.component_rigidity(posterior, test.features, sizes, test.groups)

    def scikit_matter() -> None:
        skmatter.componentwise_prediction_rigidity(train_arrays, test_arrays, ALPHA, sizes.numpy())

    timings = interleaved({"scikit-matter": scikit_matter, "ours": ours}, rounds=rounds)
    return for_information(
        f"component-wise rigidities, {BLOCKS} components, {len(test.features):,} atoms, "
        f"{width} features",
        timings.ratio("scikit-matter", "ours"),
        "times faster than scikit-matter",
        seconds=timings.medians(),
    )
