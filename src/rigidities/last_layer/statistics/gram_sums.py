r"""The Gram of the features and the products with the residuals, block by block.

For features $f$ with weights $w$ and residuals $r$ these are $\sum w f f^\top$, $\sum w f r$ and
$\sum w r^2$. `posterior.gram` computes the products; this module brings the rows of a block into
the form that a Gram takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...posterior.gram import Gram, precision_for
from ...posterior.memory import require_memory
from .block import Block
from .statistic import Plan, Statistic

if TYPE_CHECKING:
    from typing_extensions import Self


class GramSums(Statistic):
    """The Gram of a fit. Rows of derivatives with respect to inputs count in it as well."""

    def __init__(self, gram: Gram) -> None:
        self.gram = gram

    @classmethod
    def begin(cls, block: Block, plan: Plan) -> Self:
        """An empty Gram of the features' width, on their device."""
        reading = block.reading
        # Features that differ between targets need a Gram for each.
        targets = None
        if block.layout == "separate":
            targets = reading.inner[reading.axis]
        width = block.features.shape[-1] + reading.ones
        device = block.features.device
        # A triangular root keeps all digits, so its products are in double precision.
        requested = plan.precision if plan.gram is Gram else "double"
        precision = precision_for(requested, block.features)
        require_memory(plan.gram.copies, width, targets, device)
        return cls(plan.gram(width, targets=targets, device=device, precision=precision))

    def update(self, block: Block) -> None:
        """Add the products of the block's rows."""
        reading = block.reading
        features, weights, residuals = _gram_rows(
            block.layout, block.features, block.weights, block.counted_residual
        )
        width = features.shape[-1] + reading.ones
        if width != self.gram.width:
            raise ValueError(
                f"the readout has {width} features here, but {self.gram.width} in earlier data. "
                "All batches must pass through the same readout."
            )
        # Weights that differ between targets need a Gram for each.
        if weights is not None and weights.shape[1] > 1 and self.gram.targets is None:
            self.gram = self.gram.expand(weights.shape[1])
        self.gram.update(features, weights, residuals, ones=reading.ones)
        # Rows of derivatives have all columns. Without targets they count in the Gram alone.
        for derivative_features, derivative_weights, derivative_residuals in block.derivatives:
            features, weights, residuals = _gram_rows(
                block.layout, derivative_features, derivative_weights, derivative_residuals
            )
            self.gram.update(features, weights, residuals, moments=residuals is not None)

    def merge(self, other: GramSums) -> None:
        """Add the sums of other rows."""
        gram = self.gram
        other_gram = other.gram
        # If one of them has a Gram for each target, the other gets copies.
        if gram.targets is None and other_gram.targets is not None:
            gram = gram.expand(other_gram.targets)
        elif gram.targets is not None and other_gram.targets is None:
            other_gram = other_gram.expand(gram.targets)
        self.gram = gram.merge(other_gram)

    def without(self, removed: GramSums) -> GramSums:
        """The sums of the remaining rows."""
        return GramSums(self.gram.without(removed.gram))

    def after(self, change: Tensor) -> GramSums:
        """The same rows with the residuals of changed weights."""
        return GramSums(self.gram.after(change))

    def to(self, device: torch.device) -> GramSums:
        """A copy on a device; the sums stay float64."""
        return GramSums(self.gram.to(device))

    def state(self) -> dict[str, Tensor]:
        """The sums."""
        return self.gram.state()

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> GramSums:
        """The sums that `state` came from."""
        return GramSums(Gram.from_state(state))


def _gram_rows(
    layout: str, features: Tensor, weights: Tensor | None, residuals: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Features, weights and residuals as the Gram takes them.

    Joint features (M, K, P) become (M K, P): each target's row is a row of the one Gram. Features
    of other layouts stay as they are.
    """
    if layout != "joint":
        return features, weights, residuals
    rows, targets = features.shape[:2]
    if weights is not None:
        weights = weights.expand(rows, targets).reshape(-1, 1)
    if residuals is not None:
        residuals = residuals.reshape(-1, 1)
    return features.flatten(0, 1), weights, residuals
