"""Arrays, data frames, series and lists of numbers, and inputs x with targets y as one data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Columns = list[list[str]] | None
TARGET_KEYS = ("labels", "y", "target", "label")  # the first that is there


def columns(tensors: Any) -> list[Any]:
    """The tensors of a data set that is cut into slices."""
    if isinstance(tensors, Mapping):
        return list(tensors.values())
    return list(tensors) if isinstance(tensors, tuple) else [tensors]


def each_member(whole: Any, change: Callable[[Any], Any]) -> Any:
    """The same mapping, tuple or list with each member changed; of anything else, itself."""
    if isinstance(whole, Mapping):
        return {key: change(value) for key, value in whole.items()}
    if isinstance(whole, tuple):
        members = map(change, whole)
        return type(whole)(*members) if hasattr(whole, "_fields") else tuple(members)
    return [change(value) for value in whole] if isinstance(whole, list) else change(whole)


def is_array(value: Any) -> bool:
    """Whether it is an array, a series or a frame of any library, and no tensor."""
    return hasattr(value, "__array__") and hasattr(value, "shape") and not isinstance(value, Tensor)


def as_array(value: Any) -> Any:
    """Frames, series and lists of numbers as float64 arrays; anything else as it is."""
    if (names := _labels(value)) is not None:
        found = [_numbers(value[name], name) for name in names]
        return torch.cat([torch.empty(len(value), 0, dtype=torch.float64), *found], 1).numpy()
    if not is_array(value) or not hasattr(value, "to_numpy"):
        return listed(value)
    if len(value.shape) != 1:
        return value.to_numpy()
    return _numbers(value, getattr(value, "name", None)).flatten().numpy()


def listed(value: Any) -> Any:
    """A list of numbers, or lists of equally many, as a float64 array; anything else as it is.

    Whole numbers become real ones: those meant for an embedding come as an array or a tensor.
    """
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(value, list) and isinstance(first, Real):
        with suppress(ValueError, TypeError):  # other lengths, or what is no number
            return torch.tensor(value, dtype=torch.float64).numpy()
    return value


def _numbers(series: Any, name: Any) -> Tensor:
    """A column, (N, 1) in float64; NaN may stand in it, as a model may know what to do with it."""
    found = series.to_numpy()
    if found.ndim != 1 or found.dtype.kind not in "fiub":
        kind = getattr(series, "dtype", found.dtype) if found.ndim == 1 else "several columns"
        raise TypeError(
            f"Column {name!r} holds {kind}, expected numbers. Leave it out, encode it as in "
            "training, and fill what is missing."
        )
    return torch.tensor(found, dtype=torch.float64)[:, None]


def _labels(value: Any) -> list[Any] | None:
    """Names of a frame's columns (Arrow calls them otherwise); None of anything else."""
    value = value if is_array(value) else None
    names = getattr(value, "column_names", getattr(value, "columns", None))
    return None if names is None else list(names)


def frame_columns(data: Any) -> list[list[str]]:
    """Names of the columns of every frame among the inputs of a batch or data set, in order."""
    if isinstance(data, Mapping):
        data = [one for key, one in data.items() if key not in TARGET_KEYS]
    if isinstance(data, (tuple, list)):
        return [names for one in data for names in frame_columns(one)]
    names = _labels(data)
    return [] if names is None else [[str(name) for name in names]]


def agreed(given: Columns, fitted: Columns) -> Columns:
    """The columns of the fit's frames, or those given; another name or order is refused."""
    # Frames beyond as many as the fit had stand where that had none, and may be targets.
    for one in (given or [])[: len(fitted or [])]:
        if fitted and one not in fitted:
            raise ValueError(
                f"The fit had the columns {' or '.join(dict.fromkeys(map(str, fitted)))}, here are "
                f"{one}. Pass the same ones in the same order, frame[columns], or arrays, which "
                "have no names."
            )
    return fitted or given or None


def with_target(x: Any, y: Any) -> Any:
    """Inputs x and targets y as one data set, which x alone is without y."""
    if y is None:
        return x
    twice = [repr(key) for key in TARGET_KEYS if isinstance(x, Mapping) and key in x]
    twice += ["their last entry"] if isinstance(x, tuple) and len(x) > 1 and x[-1] is y else []
    if twice:
        raise ValueError(f"There are targets both in the inputs ({twice[0]}) and apart: give one.")
    x, y = listed(x) if isinstance(x, list) else each_member(x, listed), listed(y)
    for one in (y, *columns(x)):
        if not getattr(one, "shape", None):
            raise TypeError(
                "With y, both are tensors, arrays or data frames with one row per sample, or x is "
                f"a tuple of such; got {'y' if one is y else 'x'} of type {type(one).__name__}. "
                "What brings its own targets (a Dataset, a DataLoader, batches) comes without y."
            )
        if len(one) != len(y):
            raise ValueError(f"x has {len(one)} rows and y has {len(y)}. Give one target per row.")
    return {**x, TARGET_KEYS[0]: y} if isinstance(x, Mapping) else (*columns(x), y)
