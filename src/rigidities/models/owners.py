"""Who owns a row: which of many outputs it acts on, read off a few backward passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def owners_by_digits(
    pull: Callable[[Tensor], list[Tensor]], outputs: Tensor, base: list[Tensor]
) -> list[Tensor]:
    """The number of the output that each row acts on, where it acts on one.

    Outputs are numbered in digits small enough to survive the dtype: a row's derivative of the
    numbered sum over its derivative of the plain sum is its output's number.

    Args:
        pull: weights of the outputs (N,) -> derivatives (R, C) of their weighted sum by each row,
            for one table of rows after the other.
        outputs: N of them; for their number, dtype and device.
        base: the derivatives for weights of one.

    Returns:
        (R,) for each table; anything where a row acts on several outputs.
    """
    count, digit = len(outputs), int(torch.finfo(outputs.dtype).eps ** -0.5)
    numbers = torch.arange(count, device=outputs.device)
    owners = [torch.zeros(len(table), dtype=torch.long, device=table.device) for table in base]
    largest = [table.abs().argmax(1, keepdim=True) for table in base]
    place = 1
    while place < count:
        coded = pull((numbers // place % digit).to(outputs.dtype))
        for owner, one, plain, column in zip(owners, coded, base, largest, strict=True):
            ratio = (one.gather(1, column) / plain.gather(1, column))[:, 0]
            owner += ratio.nan_to_num(0, 0, 0).round().long().clamp(0, digit) * place
        place *= digit
    return [owner.clamp(max=count - 1) for owner in owners]
