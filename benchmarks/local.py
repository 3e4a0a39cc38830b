"""Local and component-wise rigidities against scikit-matter, round by round in the same process.

Both start from the features of training and test structures of 10 to 30 atoms and end with one
rigidity per test atom: theirs from lists of one array per structure, ours from one tensor and the
owner of each row.
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
    """Atoms of many structures: `features` (N, D), `groups` (N,), `sizes` (A,)."""

    features: Tensor
    groups: Tensor
    sizes: Tensor

    def arrays(self) -> list[Any]:
        """One array per structure, which share the memory."""
        return [part.numpy() for part in torch.split(self.features, self.sizes.tolist())]


def structures(atoms: int, width: int, seed: int) -> Structures:
    """About so many atoms, 10 to 30 to a structure, with features of unequal scale."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(10, 31, (max(1, atoms // 20),), generator=generator)
    scale = torch.logspace(0, 1, width, dtype=torch.float64)
    rows = int(sizes.sum())
    features = scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return Structures(features, torch.repeat_interleave(torch.arange(len(sizes)), sizes), sizes)


def run(*, quick: bool = False) -> list[Row]:
    """Local rigidities of all atoms; component-wise ones of a tenth of them."""
    try:
        theirs = importlib.import_module("skmatter.metrics")
    except ImportError:
        return [not_run("local rigidities against scikit-matter", MISSING)]
    atoms, width, rounds = (500, 20, 2) if quick else (100_000, 320, 5)
    train = structures(atoms // 5, width, seed=0)
    return [
        *local_rows(theirs, train, structures(atoms, width, seed=1), rounds),
        component_row(theirs, train, structures(atoms // 10, width, seed=1), rounds),
    ]


def posterior_of(train: Structures) -> rg.Posterior:
    """In scikit-matter's convention: means over structures, a relative ridge."""
    gram = rg.Gram(train.features.shape[1])
    gram.update(local.sums(train.features, train.groups), train.sizes.double() ** -2)
    return rg.Posterior.from_gram(gram, ALPHA * float(train.features.square().sum(1).mean()))


def local_rows(theirs: Any, train: Structures, test: Structures, rounds: int) -> list[Row]:
    """How many times faster in each precision, and how far from their numbers."""
    arrays = train.arrays(), test.arrays()
    found: dict[str, Tensor] = {}

    def ours(name: str, dtype: torch.dtype) -> None:
        found[name] = local.rigidity(posterior_of(train), test.features, dtype=dtype)

    def scikit_matter() -> None:
        parts, _ = theirs.local_prediction_rigidity(*arrays, ALPHA)
        found["scikit-matter"] = torch.cat([torch.from_numpy(part) for part in parts])

    tasks: dict[str, Task] = {
        "scikit-matter": scikit_matter,
        "float64": lambda: ours("float64", torch.float64),
        "float32": lambda: ours("float32", torch.float32),
        "product": half_product(test.features),
    }
    timings = interleaved(tasks, rounds=rounds)
    size = f"{len(test.features):,} atoms, {test.features.shape[1]} features"
    return [
        *(speed_row(timings, name, size) for name in ("float64", "float32")),
        *(difference_row(found, name, size) for name in ("float64", "float32")),
    ]


def half_product(features: Tensor) -> Task:
    """A square product with all rows; a triangular one can take no less than half of its time."""
    square = torch.randn(features.shape[1], features.shape[1], dtype=features.dtype)

    def product() -> None:
        for rows in torch.split(features, 8192):
            torch.mm(rows, square)

    return product


def speed_row(timings: Timings, name: str, size: str) -> Row:
    """Times faster than scikit-matter, from features to rigidities."""
    least = timings.ratio("scikit-matter", "product", factor=2.0).median
    note = "a float32 product, taken where its rounding bound is below 1e-3"
    if name == "float64":
        note = f"half of a float64 product alone would be {least:.1f} times faster"
    return at_least(
        f"local rigidities in {name}, {size}",
        timings.ratio("scikit-matter", name),
        20,
        "times faster than scikit-matter",
        note=note,
        seconds={task: timings.median(task) for task in timings.seconds},
    )


def difference_row(found: dict[str, Tensor], name: str, size: str) -> Row:
    """Largest relative difference of one atom's rigidity."""
    difference = float((found[name] / found["scikit-matter"] - 1).abs().max())
    return at_most(
        f"local rigidities in {name} less scikit-matter's, {size}",
        difference,
        1e-8 if name == "float64" else 1e-3,
        "relative",
    )


def component_row(theirs: Any, train: Structures, test: Structures, rounds: int) -> Row:
    """Rigidities of five blocks of columns, for every atom and every structure."""
    width = test.features.shape[1]
    sizes = torch.full((BLOCKS,), width // BLOCKS)
    arrays = train.arrays(), test.arrays()

    def ours() -> None:
        posterior = posterior_of(train)
        local.component_rigidity(posterior, test.features, sizes)
        local.component_rigidity(posterior, test.features, sizes, test.groups)

    def scikit_matter() -> None:
        theirs.componentwise_prediction_rigidity(*arrays, ALPHA, sizes.numpy())

    timings = interleaved({"scikit-matter": scikit_matter, "ours": ours}, rounds=rounds)
    return for_information(
        f"component-wise rigidities, {BLOCKS} components, {len(test.features):,} atoms, "
        f"{width} features",
        timings.ratio("scikit-matter", "ours"),
        "times faster than scikit-matter",
        seconds={task: timings.median(task) for task in timings.seconds},
    )
