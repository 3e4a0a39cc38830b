"""Residuals gathered batch by batch, thinned evenly where they would not fit into memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 1 << 27
"""Numbers to keep at most (1 GiB in float64); beyond it every other row is dropped."""


@dataclass(frozen=True)
class Residuals:
    """What one pass over data leaves for calibration.

    Attributes:
        error: target minus prediction, (n, K); NaN where a target is masked.
        power: squared components in the Gram's eigenbasis, (n, D), or (n, K, D) per target.
        weight: weight of each row in the Gram, (n, 1) or (n, K).
        share: what a unit of noise adds to the row's variance, its shape over the user's sample
            weight c, (n, 1) or (n, K).
        unit: mean of that shape.
        rows: how many rows were seen; n may be fewer, evenly thinned to bound the memory.
        samples: how many samples were compared with the training data.
        duplicates: how many of those stand in the training data too.
    """

    error: Tensor
    power: Tensor
    weight: Tensor
    share: Tensor
    rows: int
    unit: float = 1.0
    samples: int = 0
    duplicates: float = 0.0

    def quadratic(self, eigenvalues: Tensor, ridges: Tensor) -> Tensor:
        """q for each ridge: (n, 1 or K, J)."""
        inverse = 1 / (eigenvalues[..., None] + ridges)
        if self.power.ndim == 2:
            return (self.power @ inverse)[:, None]
        if inverse.ndim == 2:
            return self.power @ inverse
        return torch.einsum("nkd,kdj->nkj", self.power, inverse)


class Gathering:
    """The rows of a pass so far."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, ...]] = []
        self._rows, self._stride, self._held, self._shapes = 0, 1, 0, 0.0
        self._samples, self._duplicates = 0, 0.0

    def add(
        self,
        error: Tensor,
        power: Tensor,
        weight: Tensor | None = None,
        shape: Tensor | None = None,
        importance: Tensor | None = None,
    ) -> None:
        """One batch, as `Residuals` has it.

        Args:
            error: (n, K).
            power: (n, D) or (n, K, D).
            weight: in the Gram; None for ones.
            shape: of the noise; None for ones.
            importance: the user's weight c; None for ones.

        Raises:
            ValueError: NaN or infinity where a row counts.
        """
        one = error.new_ones(len(error), 1)
        weight = one if weight is None else weight.to(error)
        share = one if shape is None else shape.to(error)
        self._shapes += float(share.mean()) * len(error) if shape is not None else len(error)
        if importance is not None:
            error = torch.where(importance > 0, error, torch.nan)
            share = share / importance
        wrong = (~torch.isfinite(error) & (weight > 0)).any() | ~torch.isfinite(power).all()
        if bool(wrong | torch.isinf(error).any()):
            raise ValueError(
                "NaN or infinity in the features, targets or predictions. Clean the data."
            )
        part: tuple[Tensor, ...] = (error, power, weight, share)
        if self._stride > 1:
            part = tuple(t[-self._rows % self._stride :: self._stride].clone() for t in part)
        self._parts.append(part)
        self._rows += len(error)
        self._held += self._parts[-1][1].numel()
        if self._held > LARGEST:
            self._parts = [tuple(column[::2].clone() for column in self._columns())]
            self._held, self._stride = self._parts[0][1].numel(), self._stride * 2

    def count(self, samples: int, duplicates: float) -> None:
        """Samples compared with the training data, and how many stand there too."""
        self._samples += samples
        self._duplicates += duplicates

    def residuals(self) -> Residuals:
        """All of them.

        Raises:
            ValueError: too few rows, targets that are all masked or all predicted exactly.
        """
        if self._rows < 2:
            raise ValueError(
                f"Calibration needs at least two rows, got {self._rows}. A few dozen give a usable "
                "scale."
            )
        error, power, weight, share = self._columns()
        _check_errors(error)
        unit, counts = self._shapes / self._rows, (self._samples, self._duplicates)
        return Residuals(error, power, weight, share, self._rows, unit, *counts)

    def _columns(self) -> tuple[Tensor, ...]:
        return tuple(torch.cat(column) for column in zip(*self._parts, strict=True))


def _check_errors(error: Tensor) -> None:
    """Every target must have errors that are known and not all zero."""
    for k, column in enumerate(error.unbind(1)):
        which = "" if error.shape[1] == 1 else f" of target {k}"
        known = column[torch.isfinite(column)]
        if len(known) < 2:
            raise ValueError(
                f"Fewer than two values{which} are known in these data: the rest is masked. "
                "Calibrate on rows where every target is known at least twice."
            )
        if not bool(known.any()):
            raise ValueError(
                f"All residuals{which} are zero: the data are predicted exactly, so there is "
                "nothing to calibrate. Are these the model's own predictions, or a memorised "
                "training set?"
            )
