"""Batches of (inputs, target) on the model's device, from what users hand in.

A `Feed` is the one path for every call. Data sets go through `Feed.__call__`: loaders are read
without repeated or dropped rows where that is asked for, the data are cut into raw batches
(`sources.raw_batches`), a progress bar is shown, and a `Reader` takes each raw batch apart into a
`Batch`. The inputs of a single call, `uq(x)`, become one batch in `Feed.handed`.

A user's `forward` takes the whole batch, always of the kind that the fit had: after a fit to
(x, y), a tensor x becomes (x,). With a `forward`, or where the fit's inputs were lists (of tokens,
say), a list of numbers is a list of batches like any other list.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm

from ..models.calling import described
from ..models.shadow import placement
from ..notices import notify
from .sources import (
    TARGET_KEYS,
    ColumnNames,
    agreed_columns,
    as_array,
    each_member,
    frame_columns,
    is_array,
    list_as_array,
    members_of,
    raw_batches,
    unpadded,
)

KINDS = {
    "tensor": "x",
    "tuple": "(x, ...)",
    "mapping": "{key: x, ...}",
    "object": "[batch]",
    "tuple(tensor)": "[(x, ...)]",
    "tuple(tuple)": "[((x, ...), ...)]",
    "tuple(mapping)": "[({key: x, ...}, ...)]",
    "tuple(object)": "[(batch, ...)]",
}
"""The kinds of batches that `kind_of` tells apart, and how data of each kind are written."""

_DELAY = 1.0
"""Seconds before a progress bar appears that nobody asked for: short calls show none."""

_END = object()
"""What follows the last batch."""

B = TypeVar("B", bound="Batch")
T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """The inputs of one call of the model, and the target where there is one.

    Attributes:
        args: The positional inputs.
        kwargs: The inputs by keyword.
        target: The target; None without one.
        raw: The batch as the user's functions (`sample_weight`, a loss) see it.
        samples: Number of samples, where the library cut or wrapped the data itself.
        total: Number of samples of all batches, where that is known.
        columns: Names of the columns of data frames, here or in the fit.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None
    raw: Any
    samples: int | None = None
    total: int | None = None
    columns: ColumnNames = None

    def check(self, outputs: int) -> None:
        """Refuse a number of outputs that is not the number of samples.

        One sample may have any number of outputs: a squeeze may have removed its dimension.
        """
        if self.samples not in (None, 1, outputs):
            raise ValueError(
                f"The model gives {outputs} outputs for {self.samples} rows of data, expected one "
                "output per row. Pass a single row as x[None]. If rows are not samples (for "
                "example atoms), pass a list of batches as in the fit: [batch]."
            )

    @property
    def inputs(self) -> tuple[Any, ...]:
        """All inputs; those by keyword come last, in the order of their names."""
        if not self.kwargs:
            return self.args
        return (*self.args, *(self.kwargs[name] for name in sorted(self.kwargs)))

    def mapped(self: B, change: Callable[[Any], Any]) -> B:
        """The same batch with a function applied to each input."""
        args = tuple(change(value) for value in self.args)
        kwargs = {key: change(value) for key, value in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs)


def joined_targets(batches: Sequence[Batch]) -> Tensor | None:
    """The targets of all batches as one tensor; None where a batch has none."""
    targets = [batch.target for batch in batches if batch.target is not None]
    if not targets or len(targets) < len(batches):
        return None
    return torch.cat(targets)


@dataclass(frozen=True)
class BatchFormat:
    """What the batches of a data set consist of.

    Attributes:
        whole: Whether the batch is the model's only input, which a user's `forward` takes apart.
        target: callable(batch) -> target, where the target is not in one of the usual places.
        inputs: Number of positional inputs where known, to tell (x1, x2) from (x, y).
        derivative_target_key: Key of a mapping's entry with targets of derivatives, which is no
            input.
        kind: The kind of the fit's batches, where known; one of `KINDS`.
        columns: Columns of the fit's data frames; later frames must have the same ones.
    """

    whole: bool = False
    target: Callable[[Any], Tensor | None] | None = None
    inputs: int | None = None
    derivative_target_key: str | None = None
    kind: str | None = None
    columns: ColumnNames = None


@dataclass(frozen=True)
class Reader:
    """Takes raw batches apart, and puts their tensors on a device.

    Attributes:
        device: Where tensors go.
        dtype: Precision of floating-point NumPy arrays; tensors keep theirs.
        format: What the batches consist of.
    """

    device: torch.device
    dtype: torch.dtype
    format: BatchFormat = field(default_factory=BatchFormat)

    def knowing(self, data: Any) -> Reader:
        """The same reader, which knows the columns of the data frames in a data set.

        A list of batches is not searched: its frames are looked at when their turn comes.
        """
        if isinstance(data, list):
            return self
        return self._with_columns(agreed_columns(frame_columns(data), self.format.columns))

    def batches(self, raws: Iterable[Any], total: int | None, sliced: bool) -> Iterator[Batch]:
        """All raw batches taken apart.

        Args:
            raws: The raw batches.
            total: Number of samples of all batches, where known.
            sliced: Whether `raw_batches` cut them out of tensors, so that their rows are samples.
        """
        reader = self
        iterator = iter(raws)
        while True:
            with torch.enable_grad():  # for data that differentiate as they are read
                raw = next(iterator, _END)
            if raw is _END:
                return
            rows = members_of(raw)[0].shape[0] if sliced else None
            batch = reader(raw, rows, total)
            # The first frame decides which columns all later ones must have.
            if batch.columns is not reader.format.columns:
                reader = reader._with_columns(batch.columns)
            yield batch

    def __call__(self, raw: Any, rows: int | None = None, total: int | None = None) -> Batch:
        """Take one raw batch apart.

        Args:
            raw: The batch.
            rows: Its number of samples, where known.
            total: Number of samples of all batches, where known.
        """
        names = self.format.columns
        placed = self._placed_tensors(raw)
        if placed is None:  # not just tensors: it may hold frames, arrays and objects
            names = agreed_columns(frame_columns(raw), names)
            placed = self.placed(raw)
        args, kwargs, target = self._inputs_and_target(placed)
        if self.format.whole:
            whole, wrapped_rows = as_fitted_kind(placed, self.format.kind, args)
            args = (whole,)
            kwargs = {}
            rows = wrapped_rows or rows
            if isinstance(placed, Tensor):
                placed = whole
        if self.format.target is not None:
            target = self.placed(self.format.target(placed))
        if type(target) is not Tensor or not target.shape:
            target = self._as_target(target)
        return Batch(args, kwargs, target, placed, rows, total, names)

    def placed(self, value: Any) -> Any:
        """Tensors, and objects with a method `to`, on the device; arrays as tensors there."""
        if isinstance(value, Tensor):
            return value.detach().to(self.device)
        if callable(getattr(value, "to", None)):
            moved = value.to(self.device)
            # An object that moves itself in place returns None.
            return value if moved is None else moved
        if isinstance(value, (Mapping, tuple, list)):
            return each_member(value, self.placed)
        if is_array(value):
            tensor = torch.as_tensor(as_array(value))
            dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
            return tensor.to(self.device, dtype)
        return value

    def _placed_tensors(self, raw: Any) -> Any:
        """A tensor, or a plain tuple or list of tensors, on the device; None for anything else.

        Most batches are such, and need no search for frames, arrays and objects.
        """
        if type(raw) is Tensor:
            return raw.detach().to(self.device)
        if type(raw) is not tuple and type(raw) is not list:
            return None
        tensors = []
        for tensor in raw:
            if type(tensor) is not Tensor:
                return None
            if tensor.device != self.device:
                tensor = tensor.to(self.device)
            tensors.append(tensor.detach() if tensor.requires_grad else tensor)
        return tensors if type(raw) is list else tuple(tensors)

    def _inputs_and_target(self, raw: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The positional inputs, the inputs by keyword, and the target of a batch."""
        if isinstance(raw, (tuple, list)):
            if len(raw) == 1 or len(raw) == self.format.inputs:
                return tuple(raw), {}, None
            return tuple(raw[:-1]), {}, raw[-1]
        if isinstance(raw, Mapping):
            target_key = next((key for key in TARGET_KEYS if key in raw), None)
            kwargs = {}
            for key, value in raw.items():
                if key not in (target_key, self.format.derivative_target_key):
                    kwargs[str(key)] = value
            target = None if target_key is None else raw[target_key]
            return (), kwargs, target
        if self.format.whole:
            return (raw,), {}, getattr(raw, "y", None)
        if isinstance(raw, Tensor) or self.format.target is not None:
            return (raw,), {}, None
        raise TypeError(
            f"Cannot read a batch of type {type(raw).__name__}. Expected a tensor, (x, y), "
            "(x1, x2, ..., y) or a mapping; for anything else pass "
            "forward=lambda model, batch: ... and target=lambda batch: ...."
        )

    def _as_target(self, target: Any) -> Tensor | None:
        """The target as a tensor; from several entries, such as (y, None), the only tensor."""
        if isinstance(target, (tuple, list)):
            tensors = [entry for entry in target if isinstance(entry, Tensor) and entry.ndim]
            if len(tensors) > 1:
                raise ValueError(
                    f"The target is a {described(target)}, expected one tensor. Select it, for "
                    "example with target=lambda b: b[-1][0]."
                )
            if tensors:
                target = tensors[0]
        if target is None:
            return None
        tensor = target if isinstance(target, Tensor) else torch.as_tensor(target).to(self.device)
        if tensor.ndim == 0:
            raise ValueError(f"The target is a single number, {tensor}, expected one per sample.")
        return tensor

    def _with_columns(self, names: ColumnNames) -> Reader:
        """The same reader for frames with these columns."""
        if names == self.format.columns:
            return self
        return replace(self, format=replace(self.format, columns=names))


def kind_of(raw: Any) -> str:
    """The kind of a batch, for a function that takes it whole: one of `KINDS`."""
    if isinstance(raw, (tuple, list)):
        if not raw:
            return "tuple"
        first_kind = kind_of(raw[0]).partition("(")[0]
        return f"tuple({first_kind})"
    if isinstance(raw, Mapping) or (hasattr(raw, "keys") and hasattr(raw, "__getitem__")):
        return "mapping"
    if isinstance(raw, Tensor) or is_array(raw):
        return "tensor"
    return "object"


def as_fitted_kind(
    raw: Any, fitted_kind: str | None, inputs: tuple[Any, ...]
) -> tuple[Any, int | None]:
    """A batch converted to the kind that the fit had, with or without its target.

    Args:
        raw: The batch.
        fitted_kind: The kind of the fit's batches; None where it is not known.
        inputs: The positional inputs in the batch.

    Returns:
        The batch, and its number of samples where a tensor was wrapped in a tuple; None otherwise.

    Raises:
        ValueError: A batch of this kind cannot replace one of the fit's kind.
    """
    kind = kind_of(raw)
    if fitted_kind is None or kind == fitted_kind:
        return raw, None
    both_tuples = kind.startswith("tuple") and fitted_kind.startswith("tuple")
    # The first input of a "tuple(object)" may be None, which says nothing about the kind.
    if both_tuples and "tuple(object)" in (kind, fitted_kind):
        return raw, None
    if fitted_kind == "tuple(tensor)" and kind == "tensor":
        rows = raw.shape[0] if raw.shape else 1
        return (raw,), rows
    if fitted_kind == "tensor" and kind == "tuple(tensor)" and len(inputs) == 1:
        return inputs[0], None
    raise ValueError(
        f"forward= must get batches of the same kind in every call: the fit had a {fitted_kind}, "
        f"got a {kind}. Pass {KINDS[fitted_kind]}, with or without the target."
    )


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
            data: What the user handed in; see the table in `sources`.
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
        return reader.batches(shown, raw.samples, raw.sliced)

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
