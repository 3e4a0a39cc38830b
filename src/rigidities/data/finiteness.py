"""Refusal of predictions that are not finite, with the rows and the cause.

`require_finite` checks the predictions with one sum. Only where that is not finite does it look for
the rows, and read the inputs once more to say whether they are to blame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .batches import Batch
from .samples import sample_count

Again = Callable[[], Iterable[Batch]]
"""Reads the inputs once more."""

_LISTED_ROWS = 5
"""A message lists at most this many rows."""


def require_finite(
    mean: Tensor, spread: Tensor, again: Again = list, rows: str = "rows of a batch"
) -> None:
    """Refuse a mean that is NaN or infinite, or an error bar that is NaN.

    An infinite error bar around a finite mean says that nothing is known, and is allowed.

    Args:
        mean: The predictions, (N, ...).
        spread: Their error bars, shaped like the mean.
        again: Reads the inputs once more, for the message; it returns no batches where the inputs
            were an iterator.
        rows: The message's word for the rows.

    Raises:
        ValueError: Some rows have no finite prediction.
    """
    tracing = torch._C._get_tracing_state() is not None
    if tracing or math.isfinite((mean + spread).sum().item()):
        return
    bad = (~mean.isfinite() | spread.isnan()).reshape(len(mean), -1).any(1)
    bad_rows = bad.nonzero().flatten().tolist()
    if not bad_rows:  # only the sum has overflowed
        return
    raise ValueError(
        f"No finite prediction for {len(bad_rows)} of {len(bad)} {rows} ({listed(bad_rows)}): "
        f"{_cause(again(), bad)}"
    )


def listed(rows: list[int]) -> str:
    """The numbers of the first rows, for messages.

    Examples:
        >>> listed([3, 5]), listed(list(range(100)))
        ('3, 5', '0, 1, 2, 3, 4, ...')
    """
    numbers = ", ".join(map(str, rows[:_LISTED_ROWS]))
    return f"{numbers}, ..." if len(rows) > _LISTED_ROWS else numbers


def _cause(batches: Iterable[Batch], bad: Tensor) -> str:
    """What spoils the predictions of the bad rows, and what to do about it, as a sentence.

    A column that also holds NaN in rows with a finite prediction is not the cause: the model can
    handle it.

    Args:
        batches: The inputs.
        bad: Which rows have no finite prediction, (N,).
    """
    rows_read = 0
    in_bad_rows: set[str] = set()
    in_good_rows: set[str] = set()
    only_tensors = True
    for batch in batches:
        leaves = tree_leaves([batch.args, batch.kwargs])
        only_tensors = only_tensors and all(isinstance(leaf, Tensor) for leaf in leaves)
        rows = sample_count(*leaves) or 0
        bad_here = bad[rows_read : rows_read + rows]
        in_bad_rows |= spoilt(batch, bad_here)
        in_good_rows |= spoilt(batch, ~bad_here)
        rows_read += rows
    if rows_read == len(bad):
        causes = in_bad_rows - in_good_rows
    else:  # rows of inputs and of predictions do not correspond
        causes = in_bad_rows | in_good_rows
    if causes:
        names = ", ".join(sorted(causes - {""}))
        where = f"NaN or infinity in {names}" if names else "NaN or infinity"
        return (
            f"the inputs contain {where}. Leave these rows out, or fill the missing values as in "
            "training."
        )
    if only_tensors and rows_read and not in_bad_rows:
        return (
            "their inputs are finite. Check that their units are those of training, and check the "
            "model."
        )
    return (
        "check that their inputs are finite and that the model is defined there, or leave these "
        "rows out."
    )


def spoilt(batch: Batch, rows: Tensor | None) -> set[str]:
    """Names of the inputs' columns that hold NaN or infinity in certain rows.

    Args:
        batch: The inputs.
        rows: A mask of the rows to look at, (N,); None for all. Inputs with another number of rows
            are searched whole.

    Returns:
        The names in quotation marks, as data frames have them; "" for a column without a name.
    """
    columns: set[str] = set()
    for leaf in tree_leaves([batch.args, batch.kwargs]):
        if not isinstance(leaf, Tensor):
            continue
        values = leaf
        if rows is not None and leaf.shape[:1] == rows.shape:
            values = leaf[rows]
        wrong = ~values.isfinite()
        names = _column_names(batch, leaf)
        if names is not None:
            columns |= {repr(names[i]) for i in wrong.any(0).nonzero().flatten().tolist()}
        elif bool(wrong.any()):
            columns.add("")
    return columns


def _column_names(batch: Batch, tensor: Tensor) -> tuple[str, ...] | None:
    """Names of a tensor's columns; None unless those of exactly one data frame fit it."""
    fitting = {tuple(names) for names in batch.columns or () if tensor.shape[1:] == (len(names),)}
    return fitting.pop() if len(fitting) == 1 else None
