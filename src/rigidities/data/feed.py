"""From what users hand in to batches on the model's device: one path for every call.

Data sets go through `Feed.__call__`: loaders are read without repeated or dropped rows where that
is asked for, the data are cut into raw batches (`batches.raw_batches`), a progress bar is shown,
and a `batches.Reader` takes each raw batch apart into inputs and target on the model's device.
The inputs of a single call, `uq(x)`, become one batch in `Feed.handed`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm

from ..models.shadow import placement
from ..notices import notify
from .arrays import each_member, is_array, list_as_array
from .batches import Batch, BatchFormat, Reader, as_fitted_kind, raw_batches, sample_total
from .shards import unpadded

T = TypeVar("T")

_DELAY = 1.0
"""Seconds before a progress bar appears that nobody asked for: short calls show none."""


@dataclass(frozen=True)
class Feed:
    """How data reach one model.

    Attributes:
        model: Its device and precision, at the time of the call, decide those of the data.
        format: What the batches consist of.
        batch_size: Rows per batch where the data are not batches already; None for the default.
        progress: Whether to show a progress bar; None shows it on a terminal only, in calls that
            take more than a second.
    """

    model: nn.Module
    format: BatchFormat = field(default_factory=BatchFormat)
    batch_size: int | None = None
    progress: bool | None = None

    def unlabelled(self) -> Feed:
        """The same feed for data whose targets are not needed and may be missing."""
        if self.format.target is None:
            return self
        return replace(self, format=replace(self.format, target=_no_target))

    def handed(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Batch:
        """The inputs of one call as a batch.

        A user's `forward` gets them as one batch of the fit's kind.

        Args:
            inputs: The positional inputs of the call.
            keywords: The inputs by keyword.
        """
        columns = self.format.columns
        if not all(isinstance(value, Tensor) for value in (*inputs, *keywords.values())):
            reader = self._reader(BatchFormat(columns=columns), (inputs, keywords))
            if self._takes_tensors and inputs:
                inputs = (list_as_array(inputs[0]), *inputs[1:])
            inputs, keywords = _arrays_placed((inputs, keywords), reader)
        raw: Any
        if keywords:
            raw = keywords
        elif len(inputs) == 1:
            raw = inputs[0]
        else:
            raw = inputs
        mixed = inputs and keywords
        if not self.format.whole or self.format.kind is None or mixed:
            return Batch(inputs, keywords, None, raw, columns=columns)
        positional = raw if isinstance(raw, tuple) else ()
        whole, rows = as_fitted_kind(raw, self.format.kind, positional)
        return Batch((whole,), {}, None, whole, rows, columns=columns)

    def __call__(
        self,
        data: Any,
        purpose: str,
        *,
        any_order: bool = False,
        once: bool = False,
    ) -> Iterator[Batch]:
        """The batches of a data set.

        Args:
            data: What the user handed in; see the table in `batches`.
            purpose: What the batches are for, such as "fit", for the progress bar and messages.
            any_order: Whether the rows may come in any order. This implies `once`.
            once: Whether every row must come once, even if a distributed sampler repeats some.
        """
        reader = self._reader(self.format, data)
        if any_order or once:
            data = unpadded(data)
        if any_order:
            _notice_dropped_rows(data, purpose)
        if self._takes_tensors:
            data = list_as_array(data)
        raw = raw_batches(data, self.batch_size, any_order=any_order)
        shown = _with_progress_bar(raw.batches, raw.number, purpose, self.progress)
        return reader.batches(shown, sample_total(data), raw.sliced)

    @property
    def _takes_tensors(self) -> bool:
        """Whether the model's first input is a tensor, so that a list of numbers may stand for it.

        It is assumed to be one until a fit has shown the kind of batches.
        """
        return not self.format.whole and self.format.kind in (None, "tensor", "tuple(tensor)")

    def _reader(self, batch_format: BatchFormat, data: Any) -> Reader:
        """A reader for the model's device, which knows the columns of the frames in `data`."""
        device, dtype = placement(self.model)
        return Reader(device, dtype, batch_format).knowing(data)


def _no_target(batch: Any) -> None:
    """Return no target. It is a named function so that it can be pickled."""


def _arrays_placed(value: Any, reader: Reader) -> Any:
    """The same nested inputs with every array turned into a tensor on the reader's device."""
    if isinstance(value, (tuple, Mapping)) and not hasattr(value, "to"):
        return each_member(value, lambda member: _arrays_placed(member, reader))
    if is_array(value):
        return reader.placed(value)
    return value


def _notice_dropped_rows(data: Any, purpose: str) -> None:
    """Tell the user that a loader with drop_last=True leaves out rows that should all count."""
    if not isinstance(data, DataLoader) or not data.drop_last or not data.batch_size:
        return
    lost = f"the rows after the last full batch of {data.batch_size}"
    sampler = data.sampler
    if not isinstance(data.dataset, IterableDataset) and isinstance(sampler, Sized):
        rows = len(sampler)
        dropped = rows % data.batch_size
        if not dropped:
            return
        lost = f"{dropped} of its {rows} rows"
    notify(
        f"The loader given to {purpose} has drop_last=True and leaves out {lost}. Pass one with "
        "drop_last=False, so that all rows count."
    )


def _with_progress_bar(
    items: Iterable[T], total: int | None, description: str, show: bool | None
) -> Iterator[T]:
    """The same items, with a bar on standard error.

    Args:
        items: The items.
        total: How many items there are, where that is known.
        description: The text of the bar.
        show: Whether there is a bar; None shows it only on a terminal, and only after a second.
    """
    delay = 0.0
    if show is None:
        show = sys.stderr.isatty()
        delay = _DELAY
    if not show:
        return iter(items)
    # tqdm may start an iterable twice, which would advance a shuffled loader: pass an iterator.
    bar = tqdm(iter(items), total=total, desc=description, unit="batch", leave=False, delay=delay)
    return iter(bar)
