"""One statistic of the training data, as the fit that keeps it sees it.

A statistic takes blocks of rows in, merges with the same statistic of other rows, and becomes
tensors for files and other processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...data.sketch import NO_LIMIT
from ...posterior.gram import PrecisionLike
from .block import Block

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SAMPLE", "Plan", "Statistic"]

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


class Statistic(ABC):
    """One statistic of the rows of a data set."""

    @classmethod
    @abstractmethod
    def begin(cls, block: Block, plan: Plan) -> Self | None:
        """The statistic of no rows yet, for rows like a block's; None if it is not wanted."""

    @abstractmethod
    def update(self, block: Block) -> None:
        """Take rows in. The block's memory is written to again afterwards: copy what stays."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Add the rows of another statistic of this class, which stays as it was."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The whole statistic as tensors; empty where it is of no use any more."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Tensor]) -> Any:
        """The statistic that `state` came from."""

    def without(self, removed: Any) -> Any:
        """The statistic of the remaining rows, as a new object; None where that is unknown."""
        return None

    def after(self, change: Tensor) -> Any:
        """The statistic of the same rows after a change (D, K or 1) of the readout's weights.

        By default it is the same object: most statistics do not depend on the weights.
        """
        return self

    def to(self, device: torch.device) -> Any:
        """An independent copy on a device."""
        copies = {name: tensor.to(device, copy=True) for name, tensor in self.state().items()}
        return self.from_state(copies)

    def settle(self) -> None:
        """Finish pending work, before threads share the statistic."""
        return
