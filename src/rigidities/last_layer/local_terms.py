r"""The terms of predictions that are sums, each with its own error bar.

A prediction is a sum $y_A = \sum_{i \in A} f_i \cdot w$ over the atoms of a structure, the pixels
of an image, the steps of a series. Each term has a local rigidity $1 / (f_i^\top (G + \varsigma^2
I)^{-1} f_i)$, and a share of its sum's variance; the shares of a sum's terms add up to its
variance.

`local_terms` asks the readout for the terms of each batch, numbers their owners over all
batches, and takes rigidities and shares from `rigidities.local`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import local
from ..data.batches import Batch
from ..posterior.posterior import Posterior
from ..readout.readout import AnyReadout

__all__ = ["LocalTerms"]


@dataclass(frozen=True)
class LocalTerms:
    r"""Terms of many predictions, in the order in which the readout got them.

    Attributes:
        features: Features of the R terms, (R, D), which add up to the features of the predictions.
        owners: The prediction (row of the flattened output) that each term belongs to, (R,).
        heads: Number of the readout head that each term went through, (R,); the species, if each
            has a head.
        mean: What each term adds to the prediction, (R, K), without a constant after the head.
        std: Standard deviation of each term (the epistemic part), (R, K).
        rigidity: Local rigidity, unscaled, (R,).
        share: What each term adds to its prediction's variance, (R, K): the shares of an owner's
            terms sum to the prediction's `epistemic`. A share is negative where a term's error
            cancels that of others.
    """

    features: Tensor
    owners: Tensor
    heads: Tensor
    mean: Tensor
    std: Tensor
    rigidity: Tensor
    share: Tensor

    def __len__(self) -> int:
        return len(self.owners)


def local_terms(readout: AnyReadout, posterior: Posterior, batches: Iterable[Batch]) -> LocalTerms:
    """The terms of the predictions of some batches.

    Args:
        readout: The readout.
        posterior: The posterior of the readout's weights, with one scale per target.
        batches: The data.

    Raises:
        ValueError: There are no batches, or the readout does not sum.
    """
    feature_batches = []
    owner_batches = []
    head_batches = []
    predictions = 0
    for batch in batches:
        terms = readout.terms(batch)
        # A sample may have several outputs, so that only a remainder shows a wrong number.
        if terms.count % (batch.samples or 1):
            batch.check(terms.count)
        feature_batches.append(terms.features)
        owner_batches.append(terms.owners + predictions)
        head_batches.append(terms.heads)
        predictions += terms.count
    if not feature_batches or readout.weights is None:
        raise ValueError("There is nothing to predict: no batches were given.")
    features = torch.cat(feature_batches).to(torch.float64)
    owners = torch.cat(owner_batches)
    squared_scale = posterior.scale.square().reshape(-1)  # (K,)
    rigidity = local.rigidity(posterior, features)
    shares = local.shares(posterior, features, owners, count=predictions)
    return LocalTerms(
        features=features,
        owners=owners,
        heads=torch.cat(head_batches),
        mean=features @ readout.weights,
        std=(squared_scale * _with_targets(1 / rigidity)).sqrt(),
        rigidity=rigidity,
        share=squared_scale * _with_targets(shares),
    )


def _with_targets(values: Tensor) -> Tensor:
    """(R,) as (R, 1), so that it broadcasts over targets; (R, K) as it is."""
    return values[:, None] if values.ndim == 1 else values
