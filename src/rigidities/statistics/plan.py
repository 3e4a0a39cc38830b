"""What the statistics of a fit keep of its rows."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.sketch import NO_LIMIT
from ..posterior.gram import PrecisionLike

__all__ = ["SAMPLE", "Plan"]

SAMPLE = 8192
"""Rows to keep by default."""


@dataclass(frozen=True)
class Plan:
    """What new statistics keep.

    Attributes:
        sample: How many rows to keep at most, 0 for none.
        sample_limit: Rows whose hash is this or higher are not kept.
        precision: The precision of the Gram's products.
        literal: Whether targets with one weight vector count as they are, not each in its own unit.

    Raises:
        ValueError: `sample` is not a number of rows.
    """

    sample: int = SAMPLE
    sample_limit: int = NO_LIMIT
    precision: PrecisionLike = "auto"
    literal: bool = False

    def __post_init__(self) -> None:
        if type(self.sample) is not int or self.sample < 0:
            raise ValueError(
                f"keep_rows must be a whole number of rows, 0 for none, got {self.sample!r}."
            )
