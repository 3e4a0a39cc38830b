"""Refusal of predictions that are not finite, with the rows and the cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .batches import Batch

SHOWN = 5
"""Rows that a message names."""


def require_finite(
    mean: Tensor,
    spread: Tensor,
    batches: Callable[[], Iterable[Batch]] | None,
    columns: Sequence[str] | None = None,
) -> None:
    """Refuse a mean that is NaN or infinite, or a bar that is NaN.

    Only then are the inputs looked at, in `batches` where they can be read (again), with the names
    of `columns`. An infinite bar around a finite mean says that nothing is known, and stays.
    """
    mean, spread = mean.detach(), spread.detach()
    if torch.jit.is_tracing() or math.isfinite(mean.sum() + spread.sum()):
        return
    bad = ~mean.isfinite() | spread.isnan()
    rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
    if not rows:  # the sum alone is beyond the precision
        return
    first = ", ".join(map(str, rows[:SHOWN])) + ", ..." * (len(rows) > SHOWN)
    what = f"No finite prediction for {len(rows)} of {len(bad)} rows ({first}): "
    raise ValueError(what + _cause(batches, columns))


def _cause(batches: Callable[[], Iterable[Batch]] | None, columns: Sequence[str] | None) -> str:
    leaves = [] if batches is None else [tree_leaves([b.args, b.kwargs]) for b in batches()]
    tensors = [one for batch in leaves for one in batch if isinstance(one, Tensor)]
    if spoilt := [one for one in tensors if not bool(one.isfinite().all())]:
        where = f" in {', '.join(sorted(_names(spoilt, columns)))}" if columns else ""
        return (
            f"the inputs hold NaN or infinity{where}. Leave these rows out, or fill them as in "
            "training."
        )
    if tensors and len(tensors) == sum(map(len, leaves)):
        return (
            "the inputs are finite, and the model gives NaN or infinity. Are they in the units of "
            "the training data, and is the model defined there?"
        )
    return "either the inputs or what the model gives for them is NaN or infinite. Look at these."


def _names(spoilt: Iterable[Tensor], columns: Sequence[str]) -> set[str]:
    """Of the columns with NaN or infinity."""
    flat = [~one.isfinite() for one in spoilt if one.shape[1:] == (len(columns),)]
    return {repr(columns[int(i)]) for bad in flat for i in bad.any(0).nonzero()}
