r"""The Gram of the features and the products with the residuals, block by block.

For features $f$ with weights $w$ and residuals $r$ these are $\sum w f f^\top$, $\sum w f r$ and
$\sum w r^2$. `posterior.gram` computes the products; this module brings the rows of a block into
the form that a Gram takes.

In the layout "joint" one weight vector serves all targets. By default each target then counts in
its own unit (see `target_units`): the sums are kept for each target, and `GramSums.gram` adds them
up. Where the loss brings its own curvature, or the sums of all targets would take more than
`MOST_BYTES`, each target's row is a row of one Gram instead.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data.storage import prefixed, unprefixed
from ..posterior.gram import Gram, PrecisionLike, precision_for
from ..posterior.memory import require_memory
from .block import Block
from .target_units import TargetUnits

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_BYTES = 64 << 20
"""The most bytes of the sums of all targets that one weight vector serves, 64 MiB."""


class GramSums:
    """The Gram of a fit. Rows of derivatives with respect to inputs count in it as well.

    Args:
        sums: The sums.
        units: The units in which targets count that one weight vector serves; `sums` then has a
            matrix for each of them. None where all count as they are.
    """

    def __init__(self, sums: Gram, units: TargetUnits | None = None) -> None:
        self.sums = sums
        self.units = units

    @classmethod
    def begin(cls, block: Block, precision: PrecisionLike, literal: bool) -> Self:
        """An empty Gram of the features' width, on their device.

        Args:
            block: The first rows.
            precision: The precision of the products.
            literal: Whether targets with one weight vector count as they are, not each in its own
                unit.
        """
        reading = block.reading
        targets = reading.output_layout.targets
        width = reading.width
        device = reading.bare_features.device
        products = precision_for(precision, reading.bare_features)
        if block.layout == "joint" and targets > 1 and not literal and fits(width, targets):
            # One matrix for each target, and those of their sum.
            require_memory(targets + Gram.copies, width, None, device)
            sums = Gram(width, targets=targets, device=device, precision=products)
            return cls(sums, TargetUnits.none(targets, device))
        # Features that differ between targets need a Gram for each.
        own_targets = targets if block.layout == "separate" else None
        require_memory(Gram.copies, width, own_targets, device)
        return cls(Gram(width, targets=own_targets, device=device, precision=products))

    @cached_property
    def gram(self) -> Gram:
        """The Gram of the least-squares problem behind all error bars."""
        if self.units is None:
            return self.sums
        return self.sums.combined(self.units.factors)

    @property
    def form(self) -> tuple[int | None, bool]:
        """How many targets have a matrix of their own, None for one that all share; any units."""
        return self.sums.targets, self.units is not None

    def take_form(self, targets: int | None, has_units: bool) -> None:
        """Bring these sums into the form that they would have after a merge with another's.

        Args:
            targets: How many targets of the other have a matrix of their own; None for one matrix.
            has_units: Whether its targets have units.
        """
        if (targets, has_units) == self.form:
            return
        empty = GramSums(Gram(self.sums.width, targets=targets, device=self.sums.device))
        if has_units and targets is not None:
            empty.units = TargetUnits.none(targets, self.sums.device)
        self.merge(empty)

    def update(self, block: Block) -> None:
        """Add the products of the block's rows."""
        self._forget_gram()
        reading = block.reading
        width = reading.width
        if width != self.sums.width:
            raise ValueError(
                f"the readout has {width} features here, but {self.sums.width} in earlier data. "
                "All batches must pass through the same readout."
            )
        if self.units is not None:
            if reading.output_layout.targets == self.sums.targets:
                self.units = self.units.plus(TargetUnits.of(block))
            else:  # there is no unit for each of the targets
                self._count_as_they_are()
        features, weights, residuals = self._gram_rows(
            block, block.reading.bare_features, block.weights, block.counted_residual
        )
        # Weights that differ between targets need a Gram for each.
        if weights is not None and weights.shape[1] > 1 and self.sums.targets is None:
            self.sums = self.sums.expand(weights.shape[1])
        self.sums.update(features, weights, residuals, ones=reading.ones)
        # Rows of derivatives have all columns. Without targets they count in the Gram alone.
        for rows in block.derivatives or ():
            features, weights, residuals = self._gram_rows(block, *rows)
            self.sums.update(features, weights, residuals, moments=residuals is not None)

    def merge(self, other: GramSums) -> Self:
        """Add the sums of other rows, in place, and return these."""
        self._forget_gram()
        other = self._made_alike(other)
        other_sums = other.sums
        # If one of them has a Gram for each target, the other gets copies.
        if self.sums.targets is None and other_sums.targets is not None:
            self.sums = self.sums.expand(other_sums.targets)
        elif self.sums.targets is not None and other_sums.targets is None:
            other_sums = other_sums.expand(self.sums.targets)
        self.sums.merge(other_sums)
        if self.units is not None and other.units is not None:
            self.units = self.units.plus(other.units)
        return self

    def without(self, removed: GramSums) -> GramSums:
        """The sums of the remaining rows."""
        remaining = GramSums(self.sums, self.units)
        removed = remaining._made_alike(removed)
        remaining.sums = remaining.sums.without(removed.sums)
        if remaining.units is not None and removed.units is not None:
            remaining.units = remaining.units.minus(removed.units)
        return remaining

    def after(self, change: Tensor) -> GramSums:
        """The same rows with the residuals of changed weights."""
        if self.units is not None:
            # The one weight vector changes for all targets alike.
            change = change.expand(-1, self.units.rows.shape[1])
        return GramSums(self.sums.after(change), self.units)

    def to(self, device: torch.device) -> GramSums:
        """A copy on a device; the sums stay float64."""
        units = None if self.units is None else self.units.to(device)
        return GramSums(self.sums.to(device), units)

    def state(self) -> dict[str, Tensor]:
        """The sums, and the moments of the targets where these have units."""
        tensors = self.sums.state()
        if self.units is not None:
            tensors.update(prefixed("units", self.units.state()))
        return tensors

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> GramSums:
        """The sums that `state` came from."""
        moments = unprefixed("units", state)
        units = TargetUnits.from_state(moments) if moments else None
        return GramSums(Gram.from_state(state), units)

    def _forget_gram(self) -> None:
        """Drop the Gram of earlier rows, before the sums change."""
        self.__dict__.pop("gram", None)

    def _count_as_they_are(self) -> None:
        """Give up the units: all rows of all targets become rows of one Gram."""
        if self.units is not None:
            self.sums = self.sums.combined(torch.ones_like(self.units.factors))
            self.units = None

    def _made_alike(self, other: GramSums) -> GramSums:
        """Other sums, after those of the two that have units have given them up, if one has none.

        The other sums stay as they were.
        """
        if (self.units is None) == (other.units is None):
            return other
        other = GramSums(other.sums, other.units)
        self._count_as_they_are()
        other._count_as_they_are()
        return other

    def _gram_rows(
        self, block: Block, features: Tensor, weights: Tensor | None, residuals: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Features, weights and residuals as the Gram takes them.

        Joint features (M, K, P) of targets without units become (M K, P): each target's row is a
        row of the one Gram. All others stay as they are.
        """
        if block.layout != "joint" or self.units is not None:
            return features, weights, residuals
        rows, targets = features.shape[:2]
        if weights is not None:
            weights = weights.expand(rows, targets).reshape(-1, 1)
        if residuals is not None:
            residuals = residuals.reshape(-1, 1)
        return features.flatten(0, 1), weights, residuals


def fits(width: int, targets: int) -> bool:
    """Whether the sums of features of some width may be kept for each of K targets."""
    return 8 * targets * width**2 <= MOST_BYTES
