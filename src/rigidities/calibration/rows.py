r"""What the full model of `auto` learns from: rows of one target, training rows as if left out.

A row that was in the fit has the residual $r / (1 - c q)$ and the variance $q / (1 - c q)$ of a
readout refitted without it; c is its weight in the Gram. That is optimistic for a net trained end
to end, so such rows stay marked as seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

LEAST_HELD = 0.05
"""Of 1 - c q, below which a left-out residual is not enlarged further."""


@dataclass(frozen=True)
class Rows:
    """Of one target, float64.

    Attributes:
        residual: target minus prediction, (n,).
        q: unscaled variances, (n,).
        mean: predictions, (n,).
        features: (n, P).
        share: what a unit of noise adds to the row's variance, (n,).
        seen: whether the row was trained on, (n,).
    """

    residual: Tensor
    q: Tensor
    mean: Tensor
    features: Tensor
    share: Tensor
    seen: Tensor

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, which: Tensor) -> Rows:
        return Rows(*(getattr(self, one.name)[which] for one in fields(self)))

    @classmethod
    def join(cls, parts: list[Rows]) -> Rows:
        """All of them."""
        columns = ([getattr(part, one.name) for part in parts] for one in fields(cls))
        return cls(*(torch.cat(column) for column in columns))

    @cached_property
    def held(self) -> Rows:
        """Those that were not trained on; all where there are none."""
        new = ~self.seen
        return self[new] if bool(new.any()) else self

    @cached_property
    def reference(self) -> Rows:
        """Those trained on, which fix units and ranges; all where they are few."""
        return self[self.seen] if int(self.seen.sum()) >= 20 else self

    @cached_property
    def size(self) -> Tensor:
        """The mean squared residual of rows held out, single far ones clipped."""
        return clipped_mean(self.held.residual.square())

    @cached_property
    def level(self) -> Tensor:
        """That size in the noise's units: the factor of all shares that would explain it alone."""
        return self.size / self.held.share.mean()

    @cached_property
    def step(self) -> float:
        """The targets' grid, where they lie on one; else 0.

        Targets that repeat (half of them at least) and whose distinct values are wide apart beside
        the residuals, by a fifth of their root mean square.
        """
        values = (self.mean + self.residual)[~self.seen]  # left-out residuals are not on the grid
        if len(values) < 4:
            return 0.0
        rounding = 1e-7 * float(values.abs().max())  # of a model in float32
        values = values - values.median()
        unit = float(values.abs().max()) * 1e-6 + rounding + 1e-300
        distinct = torch.unique((values / unit).round()) * unit
        if len(distinct) < 2 or len(distinct) > len(values) / 2:
            return 0.0
        step = float(distinct.diff().median())
        return step if step > 0.2 * float(self.size.sqrt()) else 0.0


def target_rows(columns: Sequence[Tensor], *, seen: bool) -> Rows:
    """Rows of one target, without masked ones; seen ones as if left out of the fit.

    Args:
        columns: error, q, weight in the Gram, prediction, share and features.
        seen: whether they were trained on.
    """
    error, q, weight = columns[:3]
    known = error.isfinite() & ((weight * q < 1 - 1e-9) | (not seen))
    error, q, weight, mean, share, features = (column[known] for column in columns)
    q = q.clamp(min=1e-12 * float(q.max()) if len(q) else 0.0)  # features may all be zero
    if seen:
        held = 1 - weight * q
        error, q = error / held.clamp(min=LEAST_HELD), q / held.clamp(min=1e-3)
    return Rows(error, q, mean, features, share, torch.full_like(q, seen, dtype=torch.bool))


def clipped_mean(squares: Tensor) -> Tensor:
    """The mean of squares, those beyond 25 times a Gaussian's unit clipped: an outlier counts once.

    The unit is the median over 0.455, the median of a squared standard normal number; where most
    squares are zero, the mean.
    """
    unit = squares.median() / 0.455
    whole = squares.mean()
    cut = squares.clamp(max=float(25 * unit)).mean() if bool(unit > 1e-6 * whole) else whole
    return cut.clamp(min=1e-300)
