"""What doors to other tools need of a fit, beyond its public methods."""

from __future__ import annotations

from ..data.batches import Feed
from .rigidity import LastLayerRigidity


def feed_of(uq: LastLayerRigidity) -> Feed:
    """How data reach the model of a fit: `feed_of(uq)(data, "what for")` yields batches."""
    return uq._fit.feed()


def familiar_variance(uq: LastLayerRigidity) -> list[float] | None:
    r"""The 99 % quantile of $\alpha^2 q$ over the training rows that a fit kept, by target.

    None if the fit kept no rows. A variance beyond it is rare among the training data.
    """
    state = uq._fit.require_state()
    sample = state.statistics.kept_rows
    if sample is None:
        return None
    posterior = state.posterior
    features = sample.rows["features"]
    variances = posterior.variance(features.to(posterior.eigenvectors))
    quantiles = variances.reshape(len(features), -1).quantile(0.99, 0)
    # Where targets share features and scale, there is one quantile for all of them.
    return quantiles.expand(len(uq.scale)).tolist()
