"""A model of another library, the line that gives it error bars, and data in its own form.

Every builder imports its library itself, so that the list of specimens can be read without them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

import rigidities as rg


@dataclass(frozen=True)
class Given:
    """What a user has.

    Attributes:
        model: as the library makes it, with random weights, in float64 where that is possible.
        train, valid, test: lists of batches, or whatever the library loads them with.
        readout: names of the parameters by which the output is differentiated by hand.
        output: (model, batch) -> the predictions; for the reference alone.
        extra: further names that the line uses.
        targets: dimension of the output along which the scale varies.
        moved: differentiate by moving the weights, where the graph is not to be had.
        slope: (model, batch) -> derivatives of the summed output by the input `wrt`.
        rows: (model, batch) -> the derivatives themselves, alike for all targets, where weights are
            integers.
    """

    model: nn.Module
    train: Any
    valid: Any
    test: Any
    readout: list[str]
    output: Callable[[nn.Module, Any], Tensor]
    extra: dict[str, Any] = field(default_factory=dict)
    targets: int = -1
    moved: bool = False
    slope: Callable[[nn.Module, Any], Tensor] | None = None
    rows: Callable[[nn.Module, Any], Tensor] | None = None


@dataclass(frozen=True)
class Specimen:
    """One row of the table.

    Attributes:
        package: name of the distribution.
        model: what it is, in a few words.
        line: what a user writes.
        build: makes the model and its data.
        wrt: the input by which `uq.gradient` differentiates, where it is to be tried.
    """

    package: str
    model: str
    line: str
    build: Callable[[], Given]
    wrt: str = ""

    @property
    def id(self) -> str:
        """For pytest."""
        return f"{self.package}-{self.build.__name__}"

    def wrapped(self, given: Given) -> rg.LastLayerRigidity:
        """The line, run."""
        return eval(self.line, {"rg": rg, "model": given.model, **given.extra})

    def loaded(self, given: Given, path: Path) -> rg.LastLayerRigidity:
        """A file, loaded with the options of the line."""
        door = SimpleNamespace(LastLayerRigidity=partial(rg.LastLayerRigidity.load, path))
        return eval(self.line, {"rg": door, "model": given.model, **given.extra})


SPECIMENS: list[Specimen] = []
Builder = Callable[[], Given]


def specimen(package: str, model: str, line: str, **options: Any) -> Callable[[Builder], Builder]:
    """Put a builder on the list."""

    def put(build: Builder) -> Builder:
        SPECIMENS.append(Specimen(package, model, line, build, **options))
        return build

    return put


def thirds(batches: Iterable[Any]) -> dict[str, list[Any]]:
    """Half of the batches to train with, a quarter each to validate and to test."""
    batches = list(batches)
    half, quarter = len(batches) // 2, 3 * len(batches) // 4
    return {"train": batches[:half], "valid": batches[half:quarter], "test": batches[quarter:]}
