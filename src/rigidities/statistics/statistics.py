"""All that a fit keeps of its rows, as one object.

`Statistics` begins with the first block. It takes blocks of rows in, merges with the statistics of
other rows, subtracts them, and becomes tensors for files and other processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..data.batches import Batch, kind_of
from ..data.hashes import NO_LIMIT
from ..data.sources import TARGET_KEYS, ColumnNames, agreed_columns
from ..data.storage import Snapshot, prefixed, unprefixed
from ..notices import notify
from ..posterior.gram import Gram, PrecisionLike
from .block import Block
from .gram_sums import GramSums
from .row_sketch import KeptRows, RowSketch

__all__ = ["KEPT_BY_DEFAULT", "Plan", "Statistics"]

KEPT_BY_DEFAULT = 1 << 16
"""Rows to keep by default; of wide rows, those that `row_sketch.MOST_BYTES` hold."""


@dataclass(frozen=True)
class Plan:
    """What new statistics keep.

    Attributes:
        keep_rows: How many rows to keep at most, 0 for none.
        hash_limit: Rows whose hash is this or higher are not kept.
        precision: The precision of the Gram's products.
        literal: Whether targets with one weight vector count as they are, not each in its own unit.

    Raises:
        ValueError: `keep_rows` is not a number of rows.
    """

    keep_rows: int = KEPT_BY_DEFAULT
    hash_limit: int = NO_LIMIT
    precision: PrecisionLike = "auto"
    literal: bool = False

    def __post_init__(self) -> None:
        if type(self.keep_rows) is not int or self.keep_rows < 0:
            raise ValueError(
                f"keep_rows must be a whole number of rows, 0 for none, got {self.keep_rows!r}."
            )


@dataclass
class Statistics:
    """Everything that a fit keeps of the rows of a data set.

    Attributes:
        gram_sums: The sums of products of features and residuals, as they were accumulated, with
            the units of the targets.
        sketch: Hashes of the samples, to recognise them in other data. Where outputs have no input
            row of their own (atoms of structures), no row can be recognised.
        kept_rows: Some of the rows; None where none were wanted or their residuals are not known.
        targets: The number of targets K.
        inputs: The number of positional inputs of the model, or of a tuple that `forward=` takes.
        kind: The form of the batches, where known; see `data.batches.kind_of`.
        columns: Names of the columns of each data frame in a batch, where there were any.
        label_loss: The name of the loss, where it is not smallest at the target, as that of a
            classifier: target minus output is then not an error, and there are no error bars. None
            for losses of regression.
    """

    gram_sums: GramSums
    sketch: RowSketch
    kept_rows: KeptRows | None
    targets: int
    inputs: int
    kind: str | None = None
    columns: ColumnNames = None
    label_loss: str | None = None

    @classmethod
    def begin(
        cls, batch: Batch, block: Block, plan: Plan, label_loss: str | None = None
    ) -> Statistics:
        """The statistics of no rows yet, for data like a first batch and its block."""
        kind = kind_of(batch.raw)
        inputs = len(batch.args)
        if kind.startswith("tuple"):
            inputs = max(1, len(batch.raw) - 1)  # the last entry is the target
        return cls(
            gram_sums=GramSums.begin(block, plan.precision, plan.literal),
            sketch=RowSketch(),
            kept_rows=KeptRows.begin(block, plan.keep_rows, plan.hash_limit),
            targets=block.reading.output_layout.targets,
            inputs=inputs,
            kind=kind,
            columns=batch.columns,
            label_loss=label_loss,
        )

    @property
    def gram(self) -> Gram:
        """The Gram of the fit: its sums, with each target in its own unit where that holds."""
        return self.gram_sums.gram

    def plan(self, precision: PrecisionLike) -> Plan:
        """The plan for statistics of other rows, to be merged with these or taken out of them."""
        kept_rows = self.kept_rows
        if kept_rows is not None:
            kept_rows.settle()  # which fixes its limit
        return Plan(
            keep_rows=0 if kept_rows is None else kept_rows.size,
            hash_limit=NO_LIMIT if kept_rows is None else kept_rows.limit,
            precision=precision,
            literal=self.gram_sums.units is None,
        )

    def update(self, block: Block) -> None:
        """Take a block of rows in. Its memory is written to again afterwards."""
        self.gram_sums.update(block)
        if block.sample_hashes is None:
            self.sketch.void()
        else:
            self.sketch.expect(block.expected, block.sample_hashes)
            self.sketch.add(block.sample_hashes)
        if self.kept_rows is not None and self.kept_rows.takes(block):
            self.kept_rows.update(block)
        else:
            self.kept_rows = None

    def merge(self, other: Statistics) -> Statistics:
        """Add the rows of `other`, which stays as it was, to these statistics, and return these."""
        self.columns = agreed_columns(other.columns, self.columns)
        self.label_loss = self.label_loss or other.label_loss
        device = self.gram_sums.sums.device
        if other.gram_sums.sums.device != device:
            other = other.to(device)
        self.gram_sums.merge(other.gram_sums)
        self.sketch.merge(other.sketch)
        # Rows kept of some of the data would be wrong for all.
        if self.kept_rows is None or other.kept_rows is None:
            self.kept_rows = None
        else:
            self.kept_rows.merge(other.kept_rows)
        self.settle()
        return self

    def without(self, removed: Statistics, *, check: bool) -> Statistics:
        """The statistics of the remaining rows, as a new object.

        Args:
            removed: The statistics of the rows to remove.
            check: Whether rows that were never added are refused, by their hashes.

        Raises:
            ValueError: `check` is set and finds such rows, or cannot judge.
        """
        if check:
            self.sketch.require_held(removed.sketch)
        gram_sums = self.gram_sums.without(removed.gram_sums)
        kept_rows = None
        # Without hashes, rows to remove cannot be found among the kept ones.
        if self.kept_rows is not None and removed.kept_rows is not None and self.sketch.judges:
            kept_rows = self.kept_rows.without(removed.kept_rows)
        return replace(
            self,
            gram_sums=gram_sums,
            sketch=self.sketch.without(removed.sketch),
            kept_rows=kept_rows,
        )

    def after(self, change: Tensor) -> Statistics:
        """The statistics of the same rows after a change (D, K or 1) of the readout's weights.

        Hashes do not depend on the weights.
        """
        kept_rows = None if self.kept_rows is None else self.kept_rows.after(change)
        return replace(self, gram_sums=self.gram_sums.after(change), kept_rows=kept_rows)

    def clone(self) -> Statistics:
        """An independent copy."""
        return self.to(self.gram_sums.sums.device)

    def to(self, device: torch.device) -> Statistics:
        """An independent copy on a device."""
        return replace(
            self,
            gram_sums=self.gram_sums.to(device),
            sketch=self.sketch.to(device),
            kept_rows=None if self.kept_rows is None else self.kept_rows.to(device),
        )

    def settle(self) -> None:
        """Finish pending work, before threads share the statistics.

        Kept rows are sorted when they are first read.
        """
        self.sketch.settle()
        if self.kept_rows is not None:
            self.kept_rows.compact()

    def snapshot(self, *, rows: bool = True) -> Snapshot:
        """The statistics as tensors and a header; `rows` includes the kept rows."""
        tensors = prefixed("gram", self.gram_sums.state())
        tensors.update(prefixed("sketch", self.sketch.state()))
        if rows and self.kept_rows is not None:
            tensors.update(prefixed("rows", self.kept_rows.state()))
        header: dict[str, Any] = {
            "targets": self.targets,
            "inputs": self.inputs,
            "batch": self.kind,
        }
        if self.columns is not None:
            header["columns"] = self.columns
        if self.label_loss is not None:
            header["label_loss"] = self.label_loss
        return Snapshot(tensors, header)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, device: torch.device | str) -> Statistics:
        """The statistics that a snapshot holds, among other things, on a device."""
        tensors = {name: tensor.to(device) for name, tensor in snapshot.tensors.items()}
        kept_tensors = unprefixed("rows", tensors)
        header = snapshot.header
        return cls(
            gram_sums=GramSums.from_state(unprefixed("gram", tensors)),
            sketch=RowSketch.from_state(unprefixed("sketch", tensors)),
            kept_rows=KeptRows.from_state(kept_tensors) if kept_tensors else None,
            targets=header["targets"],
            inputs=header["inputs"],
            kind=header["batch"],
            columns=header.get("columns"),
            label_loss=header.get("label_loss"),
        )

    def require_finite(self) -> None:
        """Refuse sums that have overflowed."""
        if not bool(self.gram_sums.sums.diagonal.isfinite().all()):
            raise ValueError(
                "Features are so large that their squares overflow. Fit with precision='double', "
                "or scale the input of the readout."
            )

    def warn_of_missing_targets(self) -> None:
        """Warn where batches could have held a target, and none was in the usual places."""
        # Derivatives without targets leave no `cross`, but the values' `square`.
        if self.gram_sums.sums.square is None and self.kind in ("mapping", "object"):
            notify(
                "The fit found no target in its batches and did not use any. It looks for "
                f"{', '.join(map(repr, TARGET_KEYS))}. Pass target=lambda b: ... to select the "
                "target, or target=lambda b: None if there is none."
            )
