"""What a statistic of the training data is to the fit that keeps it.

A part takes blocks of rows in, merges with the same part of other rows, and becomes tensors for
files, checkpoints and other processes. A new statistic is one class in one file: derive it from
`Part`, and call `statistics.register` with the name that it shall have in files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...data.sketch import NO_LIMIT
from ...posterior.gram import Gram, PrecisionLike
from .block import Block

if TYPE_CHECKING:
    from typing_extensions import Self

SAMPLE = 8192
"""Rows to keep by default."""


@dataclass(frozen=True)
class Plan:
    """What new statistics are to keep.

    Attributes:
        sample: how many rows to keep at most, 0 for none.
        sample_limit: rows of a higher hash are not wanted.
        precision: of the Gram's products.
        gram: what accumulates the Gram.
    """

    sample: int = SAMPLE
    sample_limit: int = NO_LIMIT
    precision: PrecisionLike = "auto"
    gram: type[Gram] = Gram

    def __post_init__(self) -> None:
        if type(self.sample) is not int or self.sample < 0:
            raise ValueError(
                f"sample must be a whole number of rows, 0 for none, got {self.sample!r}."
            )


class Part(ABC):
    """One statistic of the rows of a data set."""

    @classmethod
    @abstractmethod
    def begin(cls, block: Block, plan: Plan) -> Self | None:
        """The statistic of no rows yet, for rows like those of a block; None if not wanted."""

    @abstractmethod
    def update(self, block: Block) -> None:
        """Take rows in. The block's memory is written to again afterwards: copy what stays."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Add the rows of another statistic of this class, which stays as it was."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything there is to know, as tensors; empty where nothing is known any more."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Tensor]) -> Any:
        """The statistic that `state` came from."""

    def without(self, removed: Any) -> Any:
        """The statistic of the rows that are left, as a new object; None where that is unknown."""
        return None

    def after(self, change: Tensor) -> Any:
        """The statistic when the readout's weights have changed by (D, K or 1).

        By default the same object: most statistics do not depend on the weights.
        """
        return self

    def to(self, device: torch.device) -> Any:
        """An independent copy on a device."""
        state = self.state()
        return self.from_state({name: t.to(device, copy=True) for name, t in state.items()})

    def settle(self) -> None:
        """Finish what may be unfinished, before threads share the statistic."""
        return
