r"""One pass over the training data: weighted rows of the pseudo-Hessian, and what comes with them.

$$ H = \sum_i J_i^\top \Lambda_i J_i = \sum_i (L_i^\top J_i)^\top (L_i^\top J_i) $$

(the paper's Sec. 3.4; $\Lambda = L L^\top$ is the curvature of the loss by the predictions). The
gradient of the loss and the dispersion of the residuals are summed on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from ...data.samples import SampleBatch, Samples
from ...losses import Loss
from ..derivatives.differentiation import Differentiation, check_finite
from ..derivatives.tangents import Tangents
from .loss_terms import loss_terms
from .stationarity import Totals

PIECE = 1 << 27
"""Bytes that the tangents of the samples in work may take."""


@dataclass(frozen=True)
class WeightedRows:
    """Samples of one piece, the root of their weights and their weighted tangents."""

    batch: SampleBatch
    root: Tensor | None
    tangents: Tangents


@dataclass(frozen=True)
class TrainingRows:
    """The training data of one regressor and loss.

    Attributes:
        differentiation: of the regressor.
        samples: the data.
        loss: of one sample.
        curved: whether rows are to be weighted by the loss's curvature.
    """

    differentiation: Differentiation
    samples: Samples
    loss: Loss
    curved: bool = True
    totals: Totals = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "totals", Totals(self.differentiation.regressor.flat))

    def __call__(self, numbers: int) -> Iterator[WeightedRows]:
        """Go through the data once, summing the totals; so many numbers of a sample are held."""
        for batch in self.samples.pieces(max(1, PIECE // (8 * numbers))):
            prediction, tangents = self.differentiation(*batch.args, **batch.kwargs)
            check_finite(prediction)
            target = batch.target_rows(prediction, self.differentiation.shape)
            terms = loss_terms(self.loss, prediction, target, batch.weight, batch.raw)
            self.totals.add(terms, tangents, prediction)
            root = terms.root if self.curved else None
            weighted = tangents if root is None else tangents.mixed(root)
            yield WeightedRows(batch, root, weighted)

    def finish(self, numbers: int) -> None:
        """Go through the data for the totals alone."""
        deque(self(numbers), maxlen=0)
