"""What hangs on the entries of a prediction, and how it follows them into another prediction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

Change = Callable[[Sequence[Tensor]], Tensor]
"""One tensor of several, each broadcast against the entries of its own prediction."""


def compact(values: Tensor) -> Tensor:
    """Of length one along dimensions that change nothing."""
    for axis in range(values.ndim):
        one = values.narrow(axis, 0, min(1, values.shape[axis]))
        values = one if torch.equal(one.expand_as(values), values) else values
    return values


def regrouped(every: Sequence[Any], change: Change, *, wide: bool = False) -> Any:
    """What `change` makes of settings: numbers, tensors, tuples, and objects made of such.

    An object says which of its tensors have a last dimension that is no entry's, `wide`. What is
    none of these must be equal. Numbers stay numbers while they are.
    """
    first, tensors = every[0], [isinstance(one, Tensor) for one in every]
    if wide:
        terms = zip(*(one.unbind(-1) for one in every), strict=True)
        return torch.stack([change(term) for term in terms], -1)
    if isinstance(first, tuple):
        return tuple(regrouped(part, change) for part in zip(*every, strict=True))
    if hasattr(first, "wide") and all(type(one) is type(first) for one in every):
        every = [{k: v for k, v in vars(one).items() if k[0] != "_"} for one in every]
        own = {k: regrouped([o[k] for o in every], change, wide=k in first.wide) for k in every[0]}
        return replace(first, **own) if own else first
    if not any(tensors) and all(one == first for one in every):
        return first
    if all(t or isinstance(one, float) for t, one in zip(tensors, every, strict=True)):
        kind = None if all(tensors) else torch.float64
        found = compact(change([torch.as_tensor(one, dtype=kind) for one in every]))
        return found if found.numel() != 1 or found.dtype != torch.float64 else found.item()
    raise ValueError(
        "Expected predictions with one kind of distribution, and the same conformal rows or none, got "
        f"{' and '.join(sorted({type(one).__name__ for one in every}))}. Keep them apart."
    )
