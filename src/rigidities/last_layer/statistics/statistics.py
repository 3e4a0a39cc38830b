"""All statistics that a fit keeps of its rows, as one object.

`Statistics` begins with the first block, hands every block of rows to each of its statistics, and
merges, subtracts, saves and loads them together. `REGISTRY` lists the statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...data.arrays import TARGET_KEYS, Columns, agreed_columns
from ...data.batches import Batch, kind_of
from ...data.sketch import NO_LIMIT
from ...data.storage import Snapshot, prefixed, unprefixed
from ...notices import notify
from ...posterior.gram import Gram, PrecisionLike
from .block import Block
from .gram_sums import GramSums
from .layer_sums import LayerSums
from .row_hashes import RowHashes
from .row_sample import RowSample
from .statistic import Plan, Statistic

__all__ = ["REGISTRY", "Statistics"]

REGISTRY: dict[str, type[Statistic]] = {
    "gram": GramSums,
    "sketch": RowHashes,
    "rows": RowSample,
    "layers": LayerSums,
}
"""The class of every statistic that a fit keeps, by its name in files."""


@dataclass
class Statistics:
    """Everything that a fit keeps of the rows of a data set.

    Attributes:
        by_name: The statistics by name, without those that are not wanted or have become useless.
        targets: The number of targets K.
        inputs: The number of positional inputs of the model, or of a tuple that `forward=` takes.
        kind: The form of the batches, where known; see `data.batches.kind_of`.
        columns: Names of the columns of each data frame in a batch, where there were any.
        label_loss: The name of the loss, where it is not smallest at the target, as that of a
            classifier: target minus output is then not an error, and there are no error bars. None
            for losses of regression.
    """

    by_name: dict[str, Any]
    targets: int
    inputs: int
    kind: str | None = None
    columns: Columns = None
    label_loss: str | None = None

    @classmethod
    def begin(
        cls, batch: Batch, block: Block, plan: Plan, label_loss: str | None = None
    ) -> Statistics:
        """The statistics of no rows yet, for data like a first batch and its block."""
        by_name: dict[str, Any] = {}
        for name, statistic_class in REGISTRY.items():
            statistic = statistic_class.begin(block, plan)
            if statistic is not None:
                by_name[name] = statistic
        kind = kind_of(batch.raw)
        inputs = len(batch.args)
        if kind.startswith("tuple"):
            inputs = max(1, len(batch.raw) - 1)  # the last entry is the target
        return cls(
            by_name=by_name,
            targets=block.reading.output_layout.targets,
            inputs=inputs,
            kind=kind,
            columns=batch.columns,
            label_loss=label_loss,
        )

    @property
    def gram_sums(self) -> GramSums:
        """The sums of products of features and residuals, as they were accumulated."""
        sums: GramSums = self.by_name["gram"]
        return sums

    @property
    def gram(self) -> Gram:
        """The Gram of the fit: its sums, with each target in its own unit where that holds."""
        sums: GramSums = self.by_name["gram"]
        return sums.gram

    @property
    def sketch(self) -> RowHashes:
        """Hashes of the rows, to recognise them in other data."""
        hashes: RowHashes = self.by_name["sketch"]
        return hashes

    @property
    def sample(self) -> RowSample | None:
        """Some of the rows; None where none were wanted or their residuals are not known."""
        sample: RowSample | None = self.by_name.get("rows")
        if sample is None or sample.lost:
            return None
        return sample

    @property
    def layers(self) -> LayerSums | None:
        """Sums over the inputs of each layer; None where no layer is watched."""
        return self.by_name.get("layers")

    def plan(self, precision: PrecisionLike) -> Plan:
        """The plan for statistics of other rows, to be merged with these or taken out of them."""
        sample = self.sample
        return Plan(
            sample=0 if sample is None else sample.size,
            sample_limit=NO_LIMIT if sample is None else sample.limit,
            precision=precision,
            literal=self.gram_sums.units is None,
        )

    def update(self, block: Block) -> None:
        """Take a block of rows in."""
        for statistic in self.by_name.values():
            statistic.update(block)

    def merge(self, other: Statistics) -> Statistics:
        """Add the rows of `other`, which stays as it was, to these statistics, and return these."""
        self.columns = agreed_columns(other.columns, self.columns)
        self.label_loss = self.label_loss or other.label_loss
        device = self.gram_sums.sums.device
        if other.gram_sums.sums.device != device:
            other = other.to(device)
        for name, statistic in list(self.by_name.items()):
            if name in other.by_name:
                statistic.merge(other.by_name[name])
            else:  # a statistic of some of the rows would be wrong for all
                del self.by_name[name]
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
        by_name = {}
        for name, statistic in self.by_name.items():
            if name not in removed.by_name:
                continue
            remaining = statistic.without(removed.by_name[name])
            if remaining is not None:
                by_name[name] = remaining
        if not self.sketch.judges:  # rows to remove cannot be found in the sample
            by_name.pop("rows", None)
        return replace(self, by_name=by_name)

    def after(self, change: Tensor) -> Statistics:
        """The statistics of the same rows after a change (D, K or 1) of the readout's weights."""
        by_name = {name: statistic.after(change) for name, statistic in self.by_name.items()}
        return replace(self, by_name=by_name)

    def clone(self) -> Statistics:
        """An independent copy."""
        return self.to(self.gram_sums.sums.device)

    def to(self, device: torch.device) -> Statistics:
        """An independent copy on a device."""
        by_name = {name: statistic.to(device) for name, statistic in self.by_name.items()}
        return replace(self, by_name=by_name)

    def settle(self) -> None:
        """Finish pending work, before threads share the statistics."""
        for statistic in self.by_name.values():
            statistic.settle()

    def trimmed(self, limit: int) -> Statistics:
        """The same with only those rows of the sample whose hash is below a limit."""
        sample = self.sample
        if sample is None:
            return self
        return replace(self, by_name={**self.by_name, "rows": sample.trimmed(limit)})

    def snapshot(self, *, rows: bool = True) -> Snapshot:
        """The statistics as tensors and a header; `rows` includes the sample of rows."""
        tensors: dict[str, Tensor] = {}
        for name, statistic in self.by_name.items():
            if rows or name != "rows":
                tensors.update(prefixed(name, statistic.state()))
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
        by_name = {}
        for name, statistic_class in REGISTRY.items():
            state = unprefixed(name, snapshot.tensors)
            if state:
                placed = {key: tensor.to(device) for key, tensor in state.items()}
                by_name[name] = statistic_class.from_state(placed)
        header = snapshot.header
        return cls(
            by_name=by_name,
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
