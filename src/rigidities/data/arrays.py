"""Arrays, data frames, series and lists of numbers, and inputs x with targets y as one data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TARGET_KEYS = ("labels", "y", "target", "label")  # the first that is there


def columns(tensors: Any) -> list[Any]:
    """The tensors of a data set that is cut into slices."""
    if isinstance(tensors, Mapping):
        return list(tensors.values())
    return list(tensors) if isinstance(tensors, tuple) else [tensors]


def is_array(value: Any) -> bool:
    """Whether it is an array, a series or a frame of any library, and no tensor."""
    return hasattr(value, "__array__") and hasattr(value, "shape") and not isinstance(value, Tensor)


def as_array(value: Any) -> Any:
    """Frames, series and lists of numbers as float64 arrays; anything else as it is.

    Whole numbers become real ones: those meant for an embedding come as an array or a tensor.
    """
    if _is_frame(value):
        found = [_numbers(value[name], name) for name in value.columns]
        return torch.cat([torch.empty(len(value), 0, dtype=torch.float64), *found], 1).numpy()
    if is_array(value) and hasattr(value, "to_numpy"):
        return _numbers(value, getattr(value, "name", None)).flatten().numpy()
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    numbers = isinstance(value, list) and isinstance(first, (int, float))
    return torch.tensor(value, dtype=torch.float64).numpy() if numbers else value


def _numbers(series: Any, name: Any) -> Tensor:
    """A column, (N, 1) in float64; NaN may stand in it, as a model may know what to do with it."""
    found = series.to_numpy()
    if found.ndim != 1 or found.dtype.kind not in "fiub":
        raise TypeError(
            f"Column {name!r} holds {series.dtype if found.ndim == 1 else 'several columns'}, "
            "expected numbers. Leave it out, encode it as in training, and fill what is missing."
        )
    return torch.tensor(found, dtype=torch.float64)[:, None]


def _is_frame(value: Any) -> bool:
    return is_array(value) and hasattr(value, "columns") and hasattr(value, "to_numpy")


def frame_columns(data: Any) -> list[str] | None:
    """Names of the columns of a frame, or of the first entry of a data set; None without any."""
    first: Any = next(iter(columns(data)), None)
    return [str(name) for name in first.columns] if _is_frame(first) else None


def require_columns(data: Any, fitted: list[str] | None) -> None:
    """Refuse a frame whose columns have other names than in the fit, or another order."""
    given = frame_columns(data)
    if given is not None and fitted is not None and given != fitted:
        raise ValueError(
            f"The fit had the columns {fitted}, here are {given}. Pass the same ones in the same "
            "order, frame[columns], or arrays, which have no names."
        )


def with_target(x: Any, y: Any) -> Any:
    """Inputs x and targets y as one data set, which x alone is without y."""
    if y is None:
        return x
    for one in (y, *columns(x)):
        if not getattr(one if isinstance(one, Tensor) else as_array(one), "shape", None):
            raise TypeError(
                "With y, both are tensors, arrays or data frames with one row per sample, or x is "
                f"a tuple of such; got {'y' if one is y else 'x'} of type {type(one).__name__}. "
                "What brings its own targets (a Dataset, a DataLoader, batches) comes without y."
            )
        if len(one) != len(y):
            raise ValueError(f"x has {len(one)} rows and y has {len(y)}. Give one target per row.")
    if not isinstance(x, Mapping):
        return (*columns(x), y)
    if taken := [key for key in TARGET_KEYS if key in x]:
        raise ValueError(f"There are targets both in the inputs ({taken[0]!r}) and apart.")
    return {**x, TARGET_KEYS[0]: y}
