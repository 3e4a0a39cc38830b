"""How the settings of predictions follow their entries into another prediction.

A distribution, a support and conformal groups may have numbers for each entry of a prediction.
Where entries are picked, joined or mirrored, `regrouped` does the same to these numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

Change = Callable[[Sequence[Tensor]], Tensor]
"""Makes one tensor of several. Each of them broadcasts against the entries of its prediction."""


def compact(values: Tensor) -> Tensor:
    """The same values, with length one along dimensions along which they do not change."""
    for axis in range(values.ndim):
        first_slice = values.narrow(axis, 0, min(1, values.shape[axis]))
        if torch.equal(first_slice.expand_as(values), values):
            values = first_slice
    return values


def regrouped(settings: Sequence[Any], change: Change, *, wide: bool = False) -> Any:
    """Combine the same setting of several predictions into one, by `change`.

    Settings are numbers, tensors, tuples, and objects made of them. An object's attribute `wide`
    names those of its tensors that have one more dimension than the entries, the last. Anything
    else must be equal in all predictions. Where the result is a single float64 number, it is
    returned as a number.

    Args:
        settings: The setting of each prediction.
        change: What happens to tensors that belong to the entries.
        wide: Whether the tensors have one more dimension than the entries.

    Raises:
        ValueError: The settings are of different kinds, or differ and cannot be changed.
    """
    first = settings[0]
    if wide:
        slices = zip(*(tensor.unbind(-1) for tensor in settings), strict=True)
        return torch.stack([change(tensors) for tensors in slices], -1)
    if isinstance(first, tuple):
        return tuple(regrouped(members, change) for members in zip(*settings, strict=True))
    if hasattr(first, "wide") and all(type(setting) is type(first) for setting in settings):
        return _regrouped_object(settings, change)

    are_tensors = [isinstance(setting, Tensor) for setting in settings]
    if not any(are_tensors) and all(setting == first for setting in settings):
        return first
    if all(isinstance(setting, Tensor | float) for setting in settings):
        dtype = None if all(are_tensors) else torch.float64
        values = change([torch.as_tensor(setting, dtype=dtype) for setting in settings])
        values = compact(values)
        if values.numel() == 1 and values.dtype == torch.float64:
            return values.item()
        return values
    kinds = sorted({type(setting).__name__ for setting in settings})
    raise ValueError(
        "Expected predictions with one kind of distribution, and the same conformal rows or none, "
        f"got {' and '.join(kinds)}. Keep them separate."
    )


def _regrouped_object(objects: Sequence[Any], change: Change) -> Any:
    """Combine several dataclass objects of the same class into one, field by field."""
    first = objects[0]
    fields = {}
    for name in vars(first):
        if name.startswith("_"):  # cached, no field
            continue
        values = [vars(instance)[name] for instance in objects]
        fields[name] = regrouped(values, change, wide=name in first.wide)
    return replace(first, **fields) if fields else first
