"""Arrays, data frames, series and lists of numbers, and inputs x with targets y as one data set.

The library reads the arrays of every package that can convert them to NumPy's, without importing
any of these packages: an object with `__array__` and a shape is an array, and one that also has
names of columns is a data frame. Frames become float64 arrays, and the names of their columns are
remembered, so that a later frame with other columns is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import torch
from torch import Tensor

ColumnNames = list[list[str]] | None
"""Names of the columns of each data frame in a batch; None without frames."""

TARGET_KEYS = ("labels", "y", "target", "label", "future_values")
"""Keys under which a mapping may hold the target; the first one present is used."""


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
