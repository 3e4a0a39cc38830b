"""From what users hand in to batches on the model's device: one way for every call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm

from ..models.shadow import placement
from ..notices import notify
from .arrays import Columns, each_member, is_array, listed
from .batches import Batch, Reader, of_kind, raw_batches, sample_total
from .shards import unpadded

T = TypeVar("T")


@dataclass(frozen=True)
class Feed:
    """How data reach one model, whose device and precision decide theirs; see `batches.Reader`."""

    model: nn.Module
    whole: bool = False
    target: Callable[[Any], Tensor | None] | None = None
    inputs: int | None = None
    apart: str | None = None
    kind: str | None = None
    columns: Columns = None

    def unlabelled(self) -> Feed:
        """The same for data whose targets are of no interest, and may not be there."""
        return self if self.target is None else replace(self, target=_none)

    def handed(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Batch:
        """The inputs of one call, for a user's `forward` as one batch of the fit's kind."""
        if not all(isinstance(one, Tensor) for one in (*inputs, *keywords.values())):
            read = Reader(*placement(self.model), columns=self.columns).knowing((inputs, keywords))
            inputs = (*map(listed, inputs[:1]), *inputs[1:]) if self._takes_tensors else inputs
            inputs, keywords = _tensors((inputs, keywords), read)
        raw = keywords or (inputs[0] if len(inputs) == 1 else inputs)
        if not self.whole or self.kind is None or (inputs and keywords):
            return Batch(inputs, keywords, None, raw, columns=self.columns)
        whole, rows = of_kind(raw, self.kind, raw if isinstance(raw, tuple) else ())
        return Batch((whole,), {}, None, whole, rows, columns=self.columns)

    @property
    def _takes_tensors(self) -> bool:
        """Whether the first input is one, as far as is known, so that a list may stand for it."""
        return not self.whole and self.kind in (None, "tensor", "tuple(tensor)")

    def __call__(
        self,
        data: Any,
        what: str,
        *,
        batch_size: int | None = None,
        progress: bool | None = None,
        any_order: bool = False,
        once: bool = False,
        passing: Callable[[Iterator[Any]], Iterator[Any]] = iter,
    ) -> Iterator[Batch]:
        """The batches of data, as `raw_batches` reads them, for `what`; `passing` may skip some.

        Each row comes `once`, or where the order is free, whatever the loader repeats or drops.
        """
        device, dtype = placement(self.model)
        own = (self.whole, self.target, self.inputs, self.apart, self.kind, self.columns)
        read = Reader(device, dtype, *own).knowing(data)
        data = unpadded(data) if any_order or once else data
        if any_order:
            notice_dropped_rows(data, what)
        data = listed(data) if self._takes_tensors else data
        raws, number, cut = raw_batches(data, batch_size, any_order=any_order)
        shown = passing(progressing(raws, number, what, progress))
        return read.batches(shown, sample_total(data), cut)


def notice_dropped_rows(data: Any, what: str) -> None:
    """Say that a loader with drop_last=True leaves rows out of what should take them all."""
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
        f"The loader given to {what} has drop_last=True and leaves out {lost}. Pass one with "
        "drop_last=False, so that all count."
    )


def _tensors(value: Any, read: Reader) -> Any:
    if isinstance(value, (tuple, Mapping)) and not hasattr(value, "to"):
        return each_member(value, lambda one: _tensors(one, read))
    return read.placed(value) if is_array(value) else value


def _none(batch: Any) -> None:
    """No target; by a name, so that it can be pickled."""


def progressing(
    items: Iterable[T], total: int | None, description: str, show: bool | None
) -> Iterator[T]:
    """The same items, with a bar on standard error; None shows it only on a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        return iter(items)
    # An iterator, since tqdm may begin an iterable twice, which moves a shuffled loader on.
    return iter(tqdm(iter(items), total=total, desc=description, unit="batch", leave=False))
