"""What users hand in, as batches of (inputs, target).

| given | read as |
| --- | --- |
| a tensor, an array or a data frame | one data set of inputs |
| a list of numbers, or of equally long such lists | likewise, where the model takes tensors |
| a tuple of those | one data set, the last entry the target |
| a mapping of tensors | one data set of keyword inputs, one of `TARGET_KEYS` the target |
| `TensorDataset`, or a plain `DataLoader` over one | its tensors, sliced |
| any other `Dataset` | through a `DataLoader` |
| a list or any other iterable | batches, each a tensor, a tuple, a mapping or an object |

Tensors are sliced, never collated row by row. A user's `forward` takes a batch whole, and always
one of the kind that the fit had: (x,) where a tensor comes after a fit to (x, y). With it, and
where the fit had lists for inputs (tokens, say), lists of numbers are batches as other lists are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from operator import itemgetter, length_hint
from typing import Any, TypeVar

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
from . import arrays
from .arrays import TARGET_KEYS, Columns, as_array, columns, each_member, is_array
from .shards import ShardSampler, is_shuffle

BATCH_SIZE = 1024
B = TypeVar("B", bound="Batch")


@dataclass(frozen=True)
class Batch:
    """Inputs of one call of the model, the target where there is one, and the batch as given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None
    raw: Any
    rows: int | None = None  # samples, where the library cut or wrapped the data itself
    total: int | None = None  # samples of all batches, where that is known
    columns: Columns = None  # of the data frames, here or in the fit

    def check(self, outputs: int) -> None:
        """Refuse another number of outputs; one sample may have lost its dimension to a squeeze."""
        if self.rows not in (None, 1, outputs):
            raise ValueError(
                f"The model gives {outputs} outputs for {self.rows} rows of data, expected one for "
                "each. One row is x[None]. If rows are no samples (atoms) pass batches as in the "
                "fit, a list: [batch]."
            )

    @property
    def inputs(self) -> tuple[Any, ...]:
        """All inputs, those by keyword in the order of their names."""
        if not self.kwargs:
            return self.args
        return (*self.args, *(self.kwargs[name] for name in sorted(self.kwargs)))

    def mapped(self: B, change: Callable[[Any], Any]) -> B:
        """The same with each input changed."""
        kwargs = {key: change(value) for key, value in self.kwargs.items()}
        return replace(self, args=tuple(map(change, self.args)), kwargs=kwargs)


@dataclass(frozen=True)
class Reader:
    """How to take a batch apart.

    Attributes:
        device: where tensors go.
        dtype: of floating-point NumPy arrays (tensors keep theirs).
        whole: the batch is the model's one input (a user's `forward` takes it apart).
        target: callable(batch) -> target, where the usual places do not hold it.
        inputs: number of positional inputs where known, to tell (x1, x2) from (x, y).
        apart: key of a mapping that is neither input nor target.
        kind: of the fit's batches, where known; see `kind_of`.
        columns: of the fit's data frames, in every one of which they must be the same.
    """

    device: torch.device
    dtype: torch.dtype
    whole: bool = False
    target: Callable[[Any], Tensor | None] | None = None
    inputs: int | None = None
    apart: str | None = None
    kind: str | None = None
    columns: Columns = None

    def knowing(self, data: Any) -> Reader:
        """The same for a data set, which may be a frame or hold some."""
        given = [] if isinstance(data, list) else arrays.frame_columns(data)
        return replace(self, columns=arrays.agreed(given, self.columns))

    def batches(self, raws: Iterable[Any], total: int | None, cut: bool) -> Iterator[Batch]:
        """All of them taken apart; `total` samples where known, `cut` as `raw_batches` says."""
        read = self
        for raw in raws:
            rows = columns(raw)[0].shape[0] if cut else None
            batch = read(raw, rows, total)
            if batch.columns is not read.columns and batch.columns != read.columns:
                read = replace(read, columns=batch.columns)
            yield batch

    def __call__(self, raw: Any, rows: int | None = None, total: int | None = None) -> Batch:
        """Take one batch apart, of so many samples in all batches where that is known."""
        placed = self._placed_tensors(raw)
        if placed is not None:
            raw, names = placed, self.columns
        else:
            names = arrays.agreed(arrays.frame_columns(raw), self.columns)
            raw = self.placed(raw)
        args, kwargs, target = self._parts(raw)
        if self.whole:
            whole, wrapped_rows = of_kind(raw, self.kind, args)
            args, kwargs = (whole,), {}
            rows = wrapped_rows or rows
            raw = whole if isinstance(raw, Tensor) else raw
        if self.target is not None:
            target = self.placed(self.target(raw))
        if type(target) is not Tensor or not target.shape:
            target = self._tensor(target)
        return Batch(args, kwargs, target, raw, rows, total, names)

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

    def _tensor(self, target: Any) -> Tensor | None:
        """The target as a tensor; of (y, None) the one that is there."""
        if isinstance(target, (tuple, list)):
            known = [one for one in target if isinstance(one, Tensor) and one.ndim]
            if len(known) > 1:
                what = f"The target is a {described(target)}, expected one tensor"
                raise ValueError(f"{what}. Name it, for example target=lambda b: b[-1][0].")
            target = known[0] if known else target
        if target is None:
            return None
        tensor = target if isinstance(target, Tensor) else torch.as_tensor(target).to(self.device)
        if tensor.ndim == 0:
            raise ValueError(f"The target is a single number, {tensor}, expected one per sample.")
        return tensor

    def _parts(self, raw: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        if isinstance(raw, (tuple, list)):
            if len(raw) == 1 or len(raw) == self.inputs:
                return tuple(raw), {}, None
            return tuple(raw[:-1]), {}, raw[-1]
        if isinstance(raw, Mapping):
            key = next((key for key in TARGET_KEYS if key in raw), None)
            kwargs = {str(k): v for k, v in raw.items() if k not in (key, self.apart)}
            return (), kwargs, None if key is None else raw[key]
        if isinstance(raw, Tensor) or self.whole or self.target is not None:
            return (raw,), {}, getattr(raw, "y", None) if self.whole else None
        raise TypeError(
            f"Cannot read a batch of type {type(raw).__name__}. Expected a tensor, (x, y), "
            "(x1, x2, ..., y) or a mapping; for anything else pass "
            "forward=lambda model, batch: ... and target=lambda batch: ...."
        )

    def placed(self, value: Any) -> Any:
        """Tensors, and objects that can, moved to the model's device; arrays made tensors."""
        if isinstance(value, Tensor):
            return value.detach().to(self.device)
        if callable(getattr(value, "to", None)):
            moved = value.to(self.device)
            return value if moved is None else moved  # None: it moved itself
        if isinstance(value, (Mapping, tuple, list)):
            return each_member(value, self.placed)
        if is_array(value):
            tensor = torch.as_tensor(as_array(value))
            dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
            return tensor.to(self.device, dtype)
        return value


def kind_of(raw: Any) -> str:
    """What a batch is to a function that takes it whole: one of `KINDS`."""
    if isinstance(raw, (tuple, list)):
        return f"tuple({kind_of(raw[0]).partition('(')[0]})" if raw else "tuple"
    if isinstance(raw, Mapping) or (hasattr(raw, "keys") and hasattr(raw, "__getitem__")):
        return "mapping"
    return "tensor" if isinstance(raw, Tensor) or is_array(raw) else "object"


def of_kind(raw: Any, kind: str | None, inputs: tuple[Any, ...]) -> tuple[Any, int | None]:
    """A batch of known `inputs` as one of the fit's kind, target or not; rows if it is wrapped."""
    given = kind_of(raw)
    unsure = "tuple(object)" in (kind, given)  # an input that is None
    if kind is None or given == kind or (unsure and kind[:5] == given[:5]):
        return raw, None
    if kind == "tuple(tensor)" and given == "tensor":
        return (raw,), raw.shape[0] if raw.shape else 1
    if (kind, given) == ("tensor", "tuple(tensor)") and len(inputs) == 1:
        return inputs[0], None
    raise ValueError(
        f"forward= must get batches of one kind in every call: the fit had a {kind}, here is a "
        f"{given}. Pass {KINDS[kind]}, with or without the target."
    )


KINDS = {"tensor": "x", "tuple": "(x, ...)", "mapping": "{key: x, ...}", "object": "[batch]"}
"""What `kind_of` tells apart, and how each is written."""
KINDS |= {f"tuple({one})": f"[({like.strip('[]')}, ...)]" for one, like in KINDS.items()}


def raw_batches(
    data: Any, batch_size: int | None = None, *, any_order: bool = False
) -> tuple[Iterable[Any], int | None, bool]:
    """Batches as given, how many there are if that is known, and whether they were cut here.

    Args:
        data: what the user handed in; see the module's table.
        batch_size: rows per batch where the data are not batches already; by default a loader's
            own, else 1024.
        any_order: whether a shuffled loader may be read in the order of its data set.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    tensors = _whole(data, any_order=any_order)
    if tensors is not None:
        own = data.batch_size if isinstance(data, DataLoader) else None
        return *_slices(tensors, batch_size or own or BATCH_SIZE), True
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=batch_size or BATCH_SIZE)
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        hint = length_hint(data, -1)
        return data, None if hint < 0 else hint, False
    raise TypeError(
        f"Expected tensors, a Dataset, a DataLoader or an iterable of batches, got "
        f"{type(data).__name__}."
    )


def sample_total(data: Any) -> int | None:
    """How many samples all batches of a data set have, where that is known without reading it.

    Of a list of batches, their first tensors' rows, which may be no samples (atoms).
    """
    if isinstance(data, DataLoader):
        sampler: Any = data.sampler
        if data.batch_size is None or isinstance(data.dataset, IterableDataset):
            return None
        if not isinstance(sampler, Sized):
            return None
        rows = len(sampler)
        return rows - rows % data.batch_size if data.drop_last else rows
    if isinstance(data, Dataset):
        sized = isinstance(data, Sized) and not isinstance(data, IterableDataset)
        return len(data) if sized else None  # type: ignore[arg-type]
    if isinstance(data, list):
        total = 0
        for raw in data:
            first = raw[0] if isinstance(raw, (tuple, list)) and raw else raw
            if not isinstance(first, Tensor) or first.is_nested or not first.shape:
                return None
            total += first.shape[0]
        return total
    if isinstance(data, (Tensor, tuple, Mapping)) or is_array(data):
        return _first_length(data)
    return None


def _first_length(data: Any) -> int | None:
    """Rows of the first tensor or array of a batch or data set; None where it has none."""
    if isinstance(data, Mapping):
        data = tuple(data.values())
    if isinstance(data, (tuple, list)):
        data = data[0] if data else None
    shape: Any = getattr(data, "shape", ())
    return int(shape[0]) if len(shape) else None


def _whole(data: Any, *, any_order: bool) -> Any:
    """The data as one set of tensors that can be sliced; None where they are batches."""
    if isinstance(data, DataLoader):
        if not _is_plain_loader(data, any_order):
            return None
        if isinstance(rows := data.sampler, (ShardSampler, list)):  # of this process
            return _tensors_of(Subset(data.dataset, rows))  # type: ignore[arg-type]
        return _tensors_of(data.dataset)
    if isinstance(data, Dataset):
        return _tensors_of(data)
    if isinstance(data, Tensor) or is_array(data):
        return as_array(data)
    if not isinstance(data, (tuple, Mapping)):
        return None
    members = columns(data := each_member(data, as_array))
    if not members or not all(isinstance(m, Tensor) or is_array(m) for m in members):
        kinds = ", ".join(type(m).__name__ for m in members)
        raise TypeError(
            f"A {type(data).__name__} is read as one data set of tensors, got entries of type "
            f"{kinds or 'nothing'}. Pass a list for batches."
        )
    return data


def _tensors_of(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors of a `TensorDataset`, or of a `Subset` of one; None for any other."""
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
        index = torch.as_tensor(list(dataset.indices), dtype=torch.long)
        return tuple(tensor[index] for tensor in dataset.dataset.tensors)
    return None


def _is_plain_loader(loader: DataLoader[Any], any_order: bool) -> bool:
    """Whether reading the data set in slices gives the loader's rows (in its order, or any)."""
    ordered = type(loader.sampler) in (SequentialSampler, ShardSampler, list)
    shuffled = type(loader.sampler) is RandomSampler and is_shuffle(loader.sampler)
    return (
        (ordered or (shuffled and any_order))
        and loader.collate_fn is default_collate
        and loader.batch_size is not None
        and not loader.drop_last
    )


def _slices(tensors: Any, size: int) -> tuple[Iterator[Any], int]:
    members = columns(tensors)
    lengths = {len(member) for member in members}
    if len(lengths) > 1:
        shapes = ", ".join(str(tuple(member.shape)) for member in members)
        raise ValueError(f"All tensors of a data set must have the same length, got {shapes}.")
    (rows,) = lengths
    parts = (slice(start, start + size) for start in range(0, rows, size))
    return (each_member(tensors, itemgetter(part)) for part in parts), -(-rows // size)
