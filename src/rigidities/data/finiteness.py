"""Refusal of predictions that are not finite, with the rows and the cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .batches import Batch

Again = Callable[[], Iterable[Batch]]


def require_finite(
    mean: Tensor,
    spread: Tensor,
    again: Again = list,
    columns: Sequence[str] | None = None,
    rows: str = "rows of a batch",
) -> None:
    """Refuse a mean that is NaN or infinite, or a bar that is NaN.

    Inputs are looked at for the message alone, as `again` reads them (an iterator gives none). An
    infinite bar around a finite mean says that nothing is known, and stays.
    """
    if torch._C._get_tracing_state() is not None or math.isfinite((mean + spread).sum().item()):
        return
    bad = ~mean.isfinite() | spread.isnan()
    found = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
    if found:  # else the sum alone is beyond the precision
        first = ", ".join(map(str, found[:5])) + ", ..." * (len(found) > 5)
        cause = _cause([tree_leaves([b.args, b.kwargs]) for b in again()], columns or ())
        what = f"No finite prediction for {len(found)} of {len(bad)} {rows} ({first})"
        raise ValueError(f"{what}: {cause}")


def _cause(batches: list[list[object]], columns: Sequence[str]) -> str:
    tensors = [one for leaves in batches for one in leaves if isinstance(one, Tensor)]
    if spoilt := [~one.isfinite() for one in tensors if not bool(one.isfinite().all())]:
        known = [one for one in spoilt if one.shape[1:] == (len(columns),)]
        names = sorted({repr(columns[int(i)]) for one in known for i in one.any(0).nonzero()})
        where = f"NaN or infinity in {', '.join(names)}" if names else "NaN or infinity"
        return f"the inputs hold {where}. Leave these rows out, or fill them as in training."
    if tensors and len(tensors) == sum(map(len, batches)):
        return "their inputs are finite. Are their units those of training? Look at the model."
    return "are their inputs finite, and is the model defined there? Leave such rows out."
