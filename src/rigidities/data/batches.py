"""What users hand in, as batches of (inputs, target).

| the user passes | it is read as |
| --- | --- |
| a tensor, an array or a data frame | one data set of inputs |
| a list of numbers, or of equally long such lists | the same, where the model takes tensors |
| a tuple of those | one data set; the last entry is the target |
| a mapping of tensors | one data set of keyword inputs; one of `TARGET_KEYS` is the target |
| `TensorDataset`, or a plain `DataLoader` over one | its tensors, sliced |
| any other `Dataset` | through a `DataLoader` |
| a list or any other iterable | batches, each a tensor, a tuple, a mapping or an object |

`raw_batches` goes from the left column to raw batches: it slices tensors, and never collates them
row by row. A `Reader` takes a raw batch apart into a `Batch`, on the model's device.

A user's `forward` takes the whole batch, always of the kind that the fit had: after a fit to
(x, y), a tensor x becomes (x,). With a `forward`, or where the fit's inputs were lists (of tokens,
say), a list of numbers is a list of batches like any other list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from numbers import Integral
from operator import itemgetter, length_hint
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from ..models.calling import described
from .arrays import (
    TARGET_KEYS,
    ColumnNames,
    agreed_columns,
    as_array,
    each_member,
    frame_columns,
    is_array,
    members_of,
)
from .shards import is_shuffle

BATCH_SIZE = 1024
"""Rows of a batch where neither the user nor a loader says how many."""

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

B = TypeVar("B", bound="Batch")


@dataclass(frozen=True)
class Batch:
    """The inputs of one call of the model, and the target where there is one.

    Attributes:
        args: The positional inputs.
        kwargs: The inputs by keyword.
        target: The target; None without one.
        raw: The batch as the user's functions (`sample_weight`, a loss) see it.
        rows: Number of samples, where the library cut or wrapped the data itself.
        total: Number of samples of all batches, where that is known.
        columns: Names of the columns of data frames, here or in the fit.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None
    raw: Any
    rows: int | None = None
    total: int | None = None
    columns: ColumnNames = None

    def check(self, outputs: int) -> None:
        """Refuse a number of outputs that is not the number of samples.

        One sample may have any number of outputs: a squeeze may have removed its dimension.
        """
        if self.rows not in (None, 1, outputs):
            raise ValueError(
                f"The model gives {outputs} outputs for {self.rows} rows of data, expected one "
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
        apart: Key of a mapping's entry that is neither input nor target.
        kind: The kind of the fit's batches, where known; one of `KINDS`.
        columns: Columns of the fit's data frames; later frames must have the same ones.
    """

    whole: bool = False
    target: Callable[[Any], Tensor | None] | None = None
    inputs: int | None = None
    apart: str | None = None
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
        names = [] if isinstance(data, list) else frame_columns(data)
        return self._with_columns(agreed_columns(names, self.format.columns))

    def batches(self, raws: Iterable[Any], total: int | None, sliced: bool) -> Iterator[Batch]:
        """All raw batches taken apart.

        Args:
            raws: The raw batches.
            total: Number of samples of all batches, where known.
            sliced: Whether `raw_batches` cut them out of tensors, so that their rows are samples.
        """
        reader = self
        for raw in raws:
            rows = members_of(raw)[0].shape[0] if sliced else None
            batch = reader(raw, rows, total)
            # The first frame decides which columns all later ones must have.
            names = reader.format.columns
            if batch.columns is not names and batch.columns != names:
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
                if key not in (target_key, self.format.apart):
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


class RawBatches(NamedTuple):
    """Batches as they come out of a data set, not yet taken apart.

    Attributes:
        batches: The batches.
        number: How many there are, where that is known.
        sliced: Whether they were cut out of tensors here, so that their rows are samples.
    """

    batches: Iterable[Any]
    number: int | None
    sliced: bool


def raw_batches(data: Any, batch_size: int | None = None, *, any_order: bool = False) -> RawBatches:
    """The batches of a data set, as they come.

    Args:
        data: What the user handed in; see the module's table.
        batch_size: Rows per batch where the data are not batches already. By default that of a
            loader, or 1024.
        any_order: Whether a shuffled loader may be read in the order of its data set.

    Raises:
        ValueError: The batch size is not positive, or tensors have different lengths.
        TypeError: The data are of no type in the table.
    """
    check_batch_size(batch_size)
    tensors = _sliceable(data, any_order=any_order)
    if tensors is not None:
        loader_size = data.batch_size if isinstance(data, DataLoader) else None
        return _slices(tensors, batch_size or loader_size or BATCH_SIZE)
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=batch_size or BATCH_SIZE)
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        hint = length_hint(data, -1)
        return RawBatches(data, number=None if hint < 0 else hint, sliced=False)
    raise TypeError(
        f"Expected tensors, a Dataset, a DataLoader or an iterable of batches, got "
        f"{type(data).__name__}."
    )


def check_batch_size(batch_size: Any) -> None:
    """Refuse what is not a number of rows."""
    is_number = isinstance(batch_size, Integral) and not isinstance(batch_size, bool)
    if batch_size is not None and not (is_number and batch_size >= 1):
        raise ValueError(
            "batch_size must be a number of rows of at least 1, or None for the default, got "
            f"{batch_size!r}."
        )


def sample_total(data: Any) -> int | None:
    """How many samples all batches of a data set have, where that is known without reading it.

    For a list of batches it is the rows of their first tensors, which may not be samples (but
    atoms, say).
    """
    if isinstance(data, DataLoader):
        if data.batch_size is None or isinstance(data.dataset, IterableDataset):
            return None
        sampler: Any = data.sampler
        if not isinstance(sampler, Sized):
            return None
        rows = len(sampler)
        return rows - rows % data.batch_size if data.drop_last else rows
    if isinstance(data, Dataset):
        sized = isinstance(data, Sized) and not isinstance(data, IterableDataset)
        return len(data) if sized else None  # type: ignore[arg-type]
    if isinstance(data, list):
        return _rows_of_first_tensors(data)
    if isinstance(data, (Tensor, tuple, Mapping)) or is_array(data):
        return _first_length(data)
    return None


def _rows_of_first_tensors(raws: list[Any]) -> int | None:
    """Total rows of the batches' first entries; None where one of those is not a tensor."""
    total = 0
    for raw in raws:
        first = raw[0] if isinstance(raw, (tuple, list)) and raw else raw
        if not isinstance(first, Tensor) or first.is_nested or not first.shape:
            return None
        total += first.shape[0]
    return total


def _first_length(data: Any) -> int | None:
    """Rows of the first tensor or array of a data set; None where the first entry has no rows."""
    if isinstance(data, Mapping):
        data = tuple(data.values())
    if isinstance(data, (tuple, list)):
        data = data[0] if data else None
    shape: Any = getattr(data, "shape", ())
    return int(shape[0]) if len(shape) else None


def _sliceable(data: Any, *, any_order: bool) -> Any:
    """The data as one set of tensors that can be sliced; None where they are batches."""
    if isinstance(data, DataLoader):
        if not _is_plain_loader(data, any_order):
            return None
        sampler = data.sampler
        if isinstance(sampler, (list, range)):  # this process reads only some rows
            return _tensors_of(Subset(data.dataset, sampler))
        return _tensors_of(data.dataset)
    if isinstance(data, Dataset):
        return _tensors_of(data)
    if isinstance(data, Tensor) or is_array(data):
        return as_array(data)
    if not isinstance(data, (tuple, Mapping)):
        return None
    data = each_member(data, as_array)
    members = members_of(data)
    if not members or not all(isinstance(m, Tensor) or is_array(m) for m in members):
        kinds = ", ".join(dict.fromkeys(type(member).__name__ for member in members))
        raise TypeError(
            f"A {type(data).__name__} is read as one data set of tensors, but its entries are of "
            f"type {kinds or 'nothing'}. Pass a list for batches."
        )
    return data


def _tensors_of(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors of a `TensorDataset`, or of a `Subset` of one; None for other data sets."""
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
        index = torch.as_tensor(list(dataset.indices), dtype=torch.long)
        return tuple(tensor[index] for tensor in dataset.dataset.tensors)
    return None


def _is_plain_loader(loader: DataLoader[Any], any_order: bool) -> bool:
    """Whether slices of the data set give the loader's rows.

    Args:
        loader: The loader.
        any_order: Whether they may come in another order than the loader's.
    """
    ordered = type(loader.sampler) in (SequentialSampler, list, range)
    shuffled = type(loader.sampler) is RandomSampler and is_shuffle(loader.sampler)
    return (
        (ordered or (shuffled and any_order))
        and loader.collate_fn is default_collate
        and loader.batch_size is not None
        and not loader.drop_last
    )


def _slices(tensors: Any, size: int) -> RawBatches:
    """The tensors of a data set cut into batches of `size` rows; the last may have fewer.

    Raises:
        ValueError: The tensors have different lengths.
    """
    members = members_of(tensors)
    lengths = {len(member) for member in members}
    if len(lengths) > 1:
        shapes = ", ".join(str(tuple(member.shape)) for member in members)
        raise ValueError(f"All tensors of a data set must have the same length, got {shapes}.")
    (rows,) = lengths

    def batches() -> Iterator[Any]:
        for start in range(0, rows, size):
            yield each_member(tensors, itemgetter(slice(start, start + size)))

    number = -(-rows // size)  # rounded up
    return RawBatches(batches(), number, sliced=True)
