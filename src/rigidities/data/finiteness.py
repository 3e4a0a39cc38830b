"""Refusal of predictions that are not finite, with the rows and the cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .batches import Batch
from .samples import sample_count

Again = Callable[[], Iterable[Batch]]


def require_finite(
    mean: Tensor, spread: Tensor, again: Again = list, rows: str = "rows of a batch"
) -> None:
    """Refuse a mean that is NaN or infinite, or a bar that is NaN.

    Inputs are looked at for the message alone, as `again` reads them (an iterator gives none). An
    infinite bar around a finite mean says that nothing is known, and stays.
    """
    if torch._C._get_tracing_state() is not None or math.isfinite((mean + spread).sum().item()):
        return
    bad = (~mean.isfinite() | spread.isnan()).reshape(len(mean), -1).any(1)
    found = bad.nonzero().flatten().tolist()
    if found:  # else the sum alone is beyond the precision
        first = ", ".join(map(str, found[:5])) + ", ..." * (len(found) > 5)
        what = f"No finite prediction for {len(found)} of {len(bad)} {rows} ({first})"
        raise ValueError(f"{what}: {_cause(again(), bad)}")


def _cause(batches: Iterable[Batch], bad: Tensor) -> str:
    """What a model takes in rows with a finite prediction is not what spoils the others."""
    count, there, elsewhere, known = 0, set[str](), set[str](), True
    for batch in batches:
        leaves = tree_leaves([batch.args, batch.kwargs])
        known = known and all(isinstance(one, Tensor) for one in leaves)
        here = bad[count : count + (rows := sample_count(*leaves) or 0)]
        there, elsewhere = there | spoilt(batch, here), elsewhere | spoilt(batch, ~here)
        count += rows
    if found := there - elsewhere if count == len(bad) else there | elsewhere:
        names = ", ".join(sorted(found - {""}))
        where = f"NaN or infinity in {names}" if names else "NaN or infinity"
        return f"the inputs hold {where}. Leave these rows out, or fill them as in training."
    if known and count and not there:
        return "their inputs are finite. Are their units those of training? Look at the model."
    return "are their inputs finite, and is the model defined there? Leave such rows out."


def spoilt(batch: Batch, rows: Tensor) -> set[str]:
    """Columns with NaN or infinity in these rows, where inputs have one each, "" without a name."""
    found = set[str]()
    for one in tree_leaves([batch.args, batch.kwargs]):
        if isinstance(one, Tensor):
            wrong = ~(one[rows] if one.shape[:1] == rows.shape else one).isfinite()
            names = {tuple(n) for n in batch.columns or () if one.shape[1:] == (len(n),)}
            known = names.pop() if len(names) == 1 else None
            places = wrong.any(0).nonzero().flatten().tolist() if known else [0] * bool(wrong.any())
            found |= {repr(known[i]) if known else "" for i in places}
    return found
