"""Everything that a fit learns from the data, as parts that each take blocks of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...data import schema
from ...data.arrays import TARGET_KEYS, Columns, agreed_columns
from ...data.batches import Batch, kind_of
from ...data.schema import Array, declare
from ...data.storage import Snapshot, prefixed, unprefixed
from ...notices import notify
from ...posterior.gram import Gram, PrecisionLike
from .block import Block
from .gram_sums import GramSums
from .layer_sums import LayerSums
from .parts import Part, Plan
from .row_hashes import RowHashes
from .row_sample import RowSample

PARTS: dict[str, type[Part]] = {
    "gram": GramSums,
    "sketch": RowHashes,
    "rows": RowSample,
    "layers": LayerSums,
}
"""Every statistic that a fit keeps, by its name in files."""


def register(name: str, part: type[Part], tensors: Mapping[str, Array]) -> None:
    """Let fits keep another statistic.

    Args:
        name: of the statistic in files.
        part: its class.
        tensors: what its `state` holds, for the table of files.
    """
    declare("fit", name, schema.Part(tensors=tensors))
    PARTS[name] = part


@dataclass
class Statistics:
    """What the rows of a data set leave behind.

    Attributes:
        parts: the statistics, by name; one that is not wanted, or lost its sense, is not there.
        targets: number of targets K.
        inputs: number of positional inputs of the model, or of a tuple that `forward=` takes.
        kind: of the batches, where known; see `data.batches.kind_of`.
        columns: names of the columns of each data frame in a batch, where there were any.
    """

    parts: dict[str, Any]
    targets: int
    inputs: int
    kind: str | None = None
    columns: Columns = None

    @classmethod
    def begin(cls, batch: Batch, block: Block, plan: Plan) -> Statistics:
        """Of no rows yet, for data like a first batch and its block."""
        parts: dict[str, Any] = {}
        for name, part in PARTS.items():
            begun = part.begin(block, plan)
            if begun is not None:
                parts[name] = begun
        kind = kind_of(batch.raw)
        inputs = len(batch.args)
        if kind.startswith("tuple"):
            inputs = max(1, len(batch.raw) - 1)
        targets = block.reading.inner[block.reading.axis]
        return cls(parts, targets, inputs, kind, batch.columns)

    @property
    def gram(self) -> Gram:
        """The sums of products of features and residuals."""
        sums: GramSums = self.parts["gram"]
        return sums.gram

    @property
    def sketch(self) -> RowHashes:
        """Hashes of the rows, to recognise them in other data."""
        hashes: RowHashes = self.parts["sketch"]
        return hashes

    @property
    def sample(self) -> RowSample | None:
        """Some of the rows; None where none were asked for or their residuals are not known."""
        sample: RowSample | None = self.parts.get("rows")
        return None if sample is None or sample.lost else sample

    @property
    def layers(self) -> LayerSums | None:
        """Sums of what enters each layer; None where none is watched."""
        return self.parts.get("layers")

    def plan(self, precision: PrecisionLike) -> Plan:
        """For statistics of other rows, to be merged with these or taken out of them."""
        sample = self.sample
        if sample is None:
            return Plan(sample=0, precision=precision, gram=type(self.gram))
        return Plan(sample.size, sample.limit, precision, type(self.gram))

    def update(self, block: Block) -> None:
        """Take a block of rows in."""
        for part in self.parts.values():
            part.update(block)

    def merge(self, other: Statistics) -> Statistics:
        """Add another's rows to these, and return these; the other stays as it was."""
        self.columns = agreed_columns(other.columns, self.columns)
        if other.gram.device != self.gram.device:
            other = other.to(self.gram.device)
        for name, part in list(self.parts.items()):
            if name in other.parts:
                part.merge(other.parts[name])
            else:  # what is known of some of the rows alone says nothing
                del self.parts[name]
        self.settle()
        return self

    def without(self, removed: Statistics, *, check: bool) -> Statistics:
        """What is left when rows are taken out, which must be held; `check` asks their hashes."""
        if check:
            self.sketch.require_held(removed.sketch)
        parts = {}
        for name, part in self.parts.items():
            left = part.without(removed.parts[name]) if name in removed.parts else None
            if left is not None:
                parts[name] = left
        if not self.sketch.judges:  # no row of the sample would be recognised
            parts.pop("rows", None)
        return replace(self, parts=parts)

    def after(self, change: Tensor) -> Statistics:
        """The same rows when the readout's weights have changed by (D, K or 1)."""
        return replace(self, parts={k: part.after(change) for k, part in self.parts.items()})

    def clone(self) -> Statistics:
        """An independent copy."""
        return self.to(self.gram.device)

    def to(self, device: torch.device) -> Statistics:
        """An independent copy on a device."""
        return replace(self, parts={k: part.to(device) for k, part in self.parts.items()})

    def settle(self) -> None:
        """Finish what may be unfinished, before threads share the statistics."""
        for part in self.parts.values():
            part.settle()

    def trimmed(self, limit: int) -> Statistics:
        """The same with the rows of the sample below a limit alone."""
        sample = self.sample
        if sample is None:
            return self
        return replace(self, parts=self.parts | {"rows": sample.trimmed(limit)})

    def snapshot(self, *, rows: bool = True) -> Snapshot:
        """As tensors and a header; `rows` says whether the sample of rows is among them."""
        tensors: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            if rows or name != "rows":
                tensors |= prefixed(name, part.state())
        header: dict[str, Any] = {
            "targets": self.targets,
            "inputs": self.inputs,
            "batch": self.kind,
        }
        if self.columns is not None:
            header["columns"] = self.columns
        return Snapshot(tensors, header)

    @classmethod
    def from_snapshot(cls, given: Snapshot, device: torch.device | str) -> Statistics:
        """The statistics that a snapshot came from, on a device; it may hold more."""
        parts = {}
        for name, part in PARTS.items():
            state = unprefixed(name, given.tensors)
            if state:
                parts[name] = part.from_state({k: t.to(device) for k, t in state.items()})
        header = given.header
        return cls(
            parts=parts,
            targets=header["targets"],
            inputs=header["inputs"],
            kind=header["batch"],
            columns=header.get("columns"),
        )

    def require_finite(self) -> None:
        """Refuse sums that have overflowed."""
        if not bool(self.gram.diagonal.isfinite().all()):
            raise ValueError(
                "Features are so large that their squares overflow. Fit with precision='double', "
                "or scale what goes into the readout."
            )

    def say_unlabelled(self) -> None:
        """Warn of batches that could have held a target, and did not where it was looked for."""
        if self.gram.cross is None and self.kind in ("mapping", "object"):
            notify(
                "The fit saw no target in its batches and went without: it looks for "
                f"{', '.join(map(repr, TARGET_KEYS))}. Say where it is with target=lambda b: ..., "
                "or that there is none with target=lambda b: None."
            )
