"""From what users hand in to batches on the model's device: one way for every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .batches import Batch, Reader, raw_batches
from .progress import progressing
from .shadow import placement


@dataclass(frozen=True)
class Feed:
    """How data reach one model.

    Attributes:
        model: where the data go; its device and precision decide theirs.
        whole: the batch is the model's one input (a user's `forward` takes it apart).
        target: callable(batch) -> target, where the usual places do not hold it.
        inputs: number of positional inputs where known, to tell (x1, x2) from (x, y).
        apart: key of a batch that is neither input nor target.
    """

    model: nn.Module
    whole: bool = False
    target: Callable[[Any], Tensor | None] | None = None
    inputs: int | None = None
    apart: str | None = None

    def unlabelled(self) -> Feed:
        """The same for data whose targets are of no interest, and may not be there."""
        return self if self.target is None else replace(self, target=_none)

    def __call__(
        self,
        data: Any,
        what: str,
        *,
        batch_size: int | None = None,
        progress: bool | None = None,
        any_order: bool = False,
    ) -> Iterator[Batch]:
        """The batches of a data set.

        Args:
            data: as the table of `batches` has it.
            what: the name of the call, shown beside the progress bar.
            batch_size: rows per batch where the data are not batches already.
            progress: show a bar; by default on a terminal only.
            any_order: whether a shuffled loader may be read in the order of its data set.
        """
        device, dtype = placement(self.model)
        reader = Reader(device, dtype, self.whole, self.target, self.inputs, self.apart)
        raw, total = raw_batches(data, batch_size, any_order=any_order)
        return map(reader, progressing(raw, total, what, progress))


def _none(batch: Any) -> None:
    """No target."""
