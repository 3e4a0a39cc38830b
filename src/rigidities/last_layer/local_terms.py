r"""The terms of predictions that are sums, with error bars of their own.

$y_A = \sum_{i \in A} f_i \cdot w$ over the atoms of a structure, the pixels of an image, the steps
of a series. Each term has a local rigidity $1 / (f_i^\top (G + \varsigma^2 I)^{-1} f_i)$, and a
share of its sum's variance; the shares add up to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import local
from ..data.batches import Batch
from ..posterior.posterior import Posterior
from .readout.reading import Terms
from .readout.tap import AnyTap


@dataclass(frozen=True)
class LocalTerms:
    r"""Terms of many predictions, in the order in which the readout saw them.

    Attributes:
        features: (R, D), which add up to the features of the predictions.
        owners: (R,) the prediction (row of the flattened output) that each belongs to.
        heads: (R,) number of the readout head that it went through (the species, where each has
            one).
        mean: (R, K), what each adds to the prediction; a constant after the head is not in it.
        std: (R, K), its standard deviation (the epistemic part).
        rigidity: (R,), unscaled.
        share: (R, K), what each adds to its prediction's variance: over an owner they sum to
            `epistemic`. Negative where a term's error cancels others'.
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


def local_terms(tap: AnyTap, posterior: Posterior, batches: Iterable[Batch]) -> LocalTerms:
    """The terms of the predictions of some batches; the posterior has one scale per target."""
    parts, count = list[Terms](), 0
    for batch in batches:
        terms = tap.terms(*batch.args, **batch.kwargs)
        if terms.count % (batch.rows or 1):  # a sample may have several outputs
            batch.check(terms.count)
        parts.append(replace(terms, owners=terms.owners + count))
        count += terms.count
    if not parts or tap.weights is None:
        raise ValueError("There is nothing to predict: no batches were given.")
    features = torch.cat([part.features for part in parts]).to(torch.float64)
    owners = torch.cat([part.owners for part in parts])
    squared = posterior.scale.square().reshape(-1)
    rigidity = local.rigidity(posterior, features)
    shares = local.shares(posterior, features, owners, count=count)
    std, share = (squared * _per_target(1 / rigidity)).sqrt(), squared * _per_target(shares)
    heads, mean = torch.cat([part.heads for part in parts]), features @ tap.weights
    return LocalTerms(features, owners, heads, mean, std, rigidity, share)


def _per_target(values: Tensor) -> Tensor:
    return values[:, None] if values.ndim == 1 else values
