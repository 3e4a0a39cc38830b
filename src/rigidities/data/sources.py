"""What users hand in (arrays, frames, data sets, loaders, lists of batches), as raw batches.

| the user passes | it is read as |
| --- | --- |
| a tensor, an array or a data frame | one data set of inputs |
| a list of numbers, or of equally long such lists | the same, where the model takes tensors |
| a tuple of those | one data set; the last entry is the target |
| a mapping of tensors | one data set of keyword inputs; one of `TARGET_KEYS` is the target |
| `TensorDataset`, or a plain `DataLoader` over one | its tensors, sliced |
| any other `Dataset` | through a `DataLoader` |
| a list or any other iterable | batches, each a tensor, a tuple, a mapping or an object |

`with_target` makes one data set of inputs x and targets y. `raw_batches` goes from the left column
to raw batches: it slices tensors, and never collates them row by row. `batches.Reader` takes these
apart.

The library reads the arrays of every package that can convert them to NumPy's, without importing
any of these packages: an object with `__array__` and a shape is an array, and one that also has
names of columns is a data frame. Frames become float64 arrays, and the names of their columns are
remembered, so that a later frame with other columns is refused.

Loaders for training give every process of a job the same number of rows. To do so they repeat some
rows, which a Gram would count twice, or leave some out. `unpadded` and `in_order` copy such a
loader so that it does neither.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from numbers import Integral, Real
from operator import itemgetter, length_hint
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

BATCH_SIZE = 1024
"""Rows of a batch where neither the user nor a loader says how many."""

ColumnNames = list[list[str]] | None
"""Names of the columns of each data frame in a batch; None without frames."""

TARGET_KEYS = ("labels", "y", "target", "label", "future_values")
"""Keys under which a mapping may hold the target; the first one present is used."""

# --- arrays and frames --------------------------------------------------------------------------


def members_of(data: Any) -> list[Any]:
    """The tensors of a data set: the entries of a mapping or tuple, or the data set itself."""
    if isinstance(data, Mapping):
        return list(data.values())
    if isinstance(data, tuple):
        return list(data)
    return [data]


def each_member(data: Any, change: Callable[[Any], Any]) -> Any:
    """A mapping, tuple or list with a function applied to each member, or to any other value."""
    if isinstance(data, Mapping):
        return {key: change(value) for key, value in data.items()}
    if isinstance(data, tuple):
        members = [change(value) for value in data]
        if hasattr(data, "_fields"):  # a named tuple
            return type(data)(*members)
        return tuple(members)
    if isinstance(data, list):
        return [change(value) for value in data]
    return change(data)


def is_array(value: Any) -> bool:
    """Whether a value is an array, a series or a frame of any library, and not a tensor."""
    return hasattr(value, "__array__") and hasattr(value, "shape") and not isinstance(value, Tensor)


def as_array(value: Any) -> Any:
    """A frame, a series or a list of numbers as a float64 array; anything else unchanged."""
    labels = _column_labels(value)
    if labels is not None:
        # An empty column first, so that a frame without columns is (N, 0).
        columns = [torch.empty(len(value), 0, dtype=torch.float64)]
        columns += [_numeric_column(value[label], label) for label in labels]
        return torch.cat(columns, 1).numpy()
    if not is_array(value) or not hasattr(value, "to_numpy"):
        return list_as_array(value)
    if len(value.shape) != 1:
        return value.to_numpy()
    return _numeric_column(value, getattr(value, "name", None)).flatten().numpy()


def list_as_array(value: Any) -> Any:
    """A list of numbers, or of equally long such lists, as a float64 array; others unchanged.

    Integers become floats too: indices of an embedding must be passed as an array or a tensor.
    """
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(value, list) and isinstance(first, Real):
        # Lists of different lengths, or with entries that are not numbers, stay lists.
        with suppress(ValueError, TypeError):
            return torch.tensor(value, dtype=torch.float64).numpy()
    return value


def frame_columns(data: Any) -> list[list[str]]:
    """Names of the columns of every frame among the inputs of a batch or data set, in order."""
    if isinstance(data, Mapping):
        data = [value for key, value in data.items() if key not in TARGET_KEYS]
    if isinstance(data, (tuple, list)):
        frames = []
        for member in data:
            frames += frame_columns(member)
        return frames
    labels = _column_labels(data)
    if labels is None:
        return []
    return [[str(label) for label in labels]]


def agreed_columns(columns: ColumnNames, fitted: ColumnNames) -> ColumnNames:
    """The columns of the fit's frames, or those here where the fit had none.

    Args:
        columns: Names of the columns of each frame here.
        fitted: Names of the columns of each frame of the fit.

    Raises:
        ValueError: A frame has other columns than the fit's, or the same in another order.
    """
    # Frames in excess of the fit's stand where the fit had no frame, and may be targets.
    comparable = (columns or [])[: len(fitted or [])]
    for names in comparable:
        if fitted and names not in fitted:
            expected = " or ".join(dict.fromkeys(map(str, fitted)))
            raise ValueError(
                f"The fit had the columns {expected}, got {names}. Pass the same columns in the "
                "same order, frame[columns], or pass arrays, which have no names."
            )
    return fitted or columns or None


def with_target(x: Any, y: Any) -> Any:
    """Inputs x and targets y as one data set; without y, x is the data set.

    Raises:
        ValueError: x already holds targets, or x and y have different lengths.
        TypeError: x or y has no rows.
    """
    if y is None:
        return x
    place = _place_of_target(x, y)
    if place is not None:
        raise ValueError(
            f"There are targets both in the inputs ({place}) and in y. Pass only one of them."
        )
    x = list_as_array(x) if isinstance(x, list) else each_member(x, list_as_array)
    y = list_as_array(y)
    for member in (y, *members_of(x)):
        if not getattr(member, "shape", None):
            raise TypeError(
                "With y, expected x and y as tensors, arrays or data frames with one row per "
                f"sample, or x as a tuple of them; got {'y' if member is y else 'x'} of type "
                f"{type(member).__name__}. Pass data that contain their targets (a Dataset, a "
                "DataLoader, batches) without y."
            )
        if len(member) != len(y):
            raise ValueError(
                f"x has {len(member)} rows and y has {len(y)}. Pass one target per row."
            )
    if isinstance(x, Mapping):
        return {**x, TARGET_KEYS[0]: y}
    return (*members_of(x), y)


def _place_of_target(x: Any, y: Any) -> str | None:
    """Where the inputs already hold a target, for the message; None where they do not."""
    if isinstance(x, Mapping):
        return next((repr(key) for key in TARGET_KEYS if key in x), None)
    if isinstance(x, tuple) and len(x) > 1 and x[-1] is y:
        return "their last entry"
    return None


def _numeric_column(series: Any, name: Any) -> Tensor:
    """A column as (N, 1) in float64; it may hold NaN, which some models can handle."""
    values = series.to_numpy()
    if values.ndim != 1 or values.dtype.kind not in "fiub":
        kind = getattr(series, "dtype", values.dtype) if values.ndim == 1 else "several columns"
        raise TypeError(
            f"Column {name!r} contains {kind}, expected numbers. Leave it out, or encode it and "
            "fill missing values as in training."
        )
    return torch.tensor(values, dtype=torch.float64)[:, None]


def _column_labels(value: Any) -> list[Any] | None:
    """The labels of a frame's columns; None for anything else."""
    if not is_array(value):
        return None
    # Arrow's tables have labels in `column_names`; their `columns` holds the columns themselves.
    labels = getattr(value, "column_names", getattr(value, "columns", None))
    return None if labels is None else list(labels)


# --- raw batches --------------------------------------------------------------------------------


class RawBatches(NamedTuple):
    """Batches as they come out of a data set, not yet taken apart.

    Attributes:
        batches: The batches.
        number: How many there are, where that is known.
        samples: How many samples they have together, where that is known without reading them. For
            a list of batches it is the rows of their first tensors, which may not be samples (but
            atoms, say).
        sliced: Whether they were cut out of tensors here, so that their rows are samples.
    """

    batches: Iterable[Any]
    number: int | None
    samples: int | None
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
        number = None if hint < 0 else hint
        return RawBatches(data, number, _sample_total(data), sliced=False)
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


def _sample_total(data: Any) -> int | None:
    """How many samples the batches of a loader or a list have, where that is known."""
    if isinstance(data, DataLoader):
        if data.batch_size is None or isinstance(data.dataset, IterableDataset):
            return None
        sampler: Any = data.sampler
        if not isinstance(sampler, Sized):
            return None
        rows = len(sampler)
        return rows - rows % data.batch_size if data.drop_last else rows
    if not isinstance(data, list):
        return None
    total = 0
    for raw in data:
        first = raw[0] if isinstance(raw, (tuple, list)) and raw else raw
        if not isinstance(first, Tensor) or first.is_nested or not first.shape:
            return None
        total += first.shape[0]
    return total


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
    return RawBatches(batches(), number, rows, sliced=True)


# --- loaders of a job ---------------------------------------------------------------------------


def unpadded(data: Any) -> Any:
    """A copy of a job's loader whose sampler neither repeats nor drops rows; other data unchanged.

    The wrappers that Accelerate and Fabric put around a loader may wait for other processes; they
    are taken off.

    Raises:
        TypeError: Accelerate hands out the rows from one process, or repeats some.
    """
    loader = _inner_loader(data)
    if not isinstance(loader, DataLoader):
        return data
    dispatched = hasattr(data, "_fetch_batches") and data.state.num_processes > 1
    if dispatched or hasattr(loader.dataset, "split_batches"):
        raise TypeError(
            "Accelerate distributes these rows from one process, or repeats some of them; "
            "expected a loader that reads its own share. Pass a loader that was not prepared by "
            "Accelerate: one of torch.utils.data.Subset(data, range(rank, len(data), ranks)), or "
            "one of a stream that gives each process its own rows."
        )
    sampler = _exact(loader.sampler)
    batch_sampler = _exact(loader.batch_sampler)
    if sampler == loader.sampler and batch_sampler == loader.batch_sampler:
        return loader
    return _altered(
        loader, sampler=sampler, batch_sampler=batch_sampler, drop_last=False, _iterator=None
    )


def in_order(data: Any) -> Any:
    """A copy of a loader that reads its data set in order, every row once; in a job, its share.

    A loader whose sampler does not cover the whole data set is treated as by `unpadded`.
    """
    loader = _inner_loader(data)
    batch_sampler = getattr(loader, "batch_sampler", None)
    # In a job, Accelerate puts its own batch sampler around the loader's.
    batch_sampler = getattr(batch_sampler, "batch_sampler", batch_sampler)
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is BatchSampler and _reads_whole(sampler, loader):
        share = _share(len(loader.dataset))
        batch_sampler = _altered(batch_sampler, sampler=share, drop_last=False)
        return _altered(
            loader,
            sampler=share,
            drop_last=False,
            batch_sampler=batch_sampler,
            generator=torch.Generator(),
            _iterator=None,
        )
    exact = unpadded(data)
    batch_sampler = getattr(exact, "batch_sampler", None)
    if type(batch_sampler) is not BatchSampler:
        return exact
    batch_sampler = _altered(batch_sampler, drop_last=False)
    return _altered(exact, drop_last=False, batch_sampler=batch_sampler, _iterator=None)


def _share(rows: int) -> range:
    """The rows of this process, contiguous; outside a job all rows.

    The shares of two processes differ by one row at most.
    """
    rank, ranks = 0, 1
    if distributed.is_available() and distributed.is_initialized():
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
    return range(rank * rows // ranks, (rank + 1) * rows // ranks)


def _reads_whole(sampler: Any, loader: Any) -> bool:
    """Whether a sampler is one of torch's own, and covers the loader's whole data set."""
    standard = type(sampler) in (SequentialSampler, DistributedSampler)
    if not standard and not isinstance(sampler, RandomSampler):
        return False
    rows = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    return rows is loader.dataset


def _inner_loader(data: Any) -> Any:
    """The loader inside a wrapper of Accelerate or Fabric; other data unchanged."""
    inner = getattr(data, "base_dataloader", getattr(data, "_dataloader", None))
    return inner if isinstance(inner, DataLoader) else data


def _exact(sampler: Any) -> Any:
    """A version of a sampler that neither repeats nor drops rows.

    The sampler itself is returned where it does neither already, or where it is of an unknown kind.
    """
    if isinstance(sampler, DistributedSampler):
        return _every_row(sampler)
    if hasattr(sampler, "even_batches"):  # Accelerate deals out the batches of another sampler
        return _exact_for_accelerate(sampler)
    inner = getattr(sampler, "sampler", None)
    exact = None if inner is None else _exact(inner)
    if exact is inner:
        return sampler
    return _altered(sampler, sampler=exact, drop_last=False)


def _exact_for_accelerate(sampler: Any) -> Any:
    """Accelerate's batch sampler, no longer forced to give all processes equally many batches."""
    order = _exact(getattr(sampler.batch_sampler, "sampler", None))
    if is_shuffle(order):
        # Each process would shuffle by itself, and some rows would be lost and others repeated.
        order = range(len(order.data_source))
    batches = _altered(sampler.batch_sampler, sampler=order, drop_last=False)
    return _altered(sampler, batch_sampler=batches, even_batches=False, drop_last=False)


def _every_row(sampler: Any) -> list[int]:
    """The rows of a `DistributedSampler`, without those it repeats and with those it drops."""
    size = len(sampler.dataset)
    padded_rows = list(sampler)
    alone = _altered(
        sampler, rank=0, num_replicas=1, num_samples=size, total_size=size, drop_last=False
    )
    rows = list(alone)[sampler.rank :: sampler.num_replicas]
    # A subclass may deal out its rows in another way: then they are left as they are.
    common = min(len(rows), len(padded_rows))
    return rows if rows[:common] == padded_rows[:common] else padded_rows


def is_shuffle(sampler: Any) -> bool:
    """Whether a sampler gives every row once, in random order."""
    if not isinstance(sampler, RandomSampler) or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)


def _altered(original: Any, **attributes: Any) -> Any:
    """A shallow copy with other attributes, set directly because a DataLoader refuses setattr."""
    twin = copy.copy(original)
    vars(twin).update(attributes)
    return twin
