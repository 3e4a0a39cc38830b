"""Error bars for regressors of scikit-learn, with scikit-learn's own interface.

    reg = RigidityRegressor(Ridge()).fit(X, y)
    mean, std = reg.predict(X_new, return_std=True)
    low, high = reg.predict_interval(X_new, 0.9)
    scores = cross_val_score(reg, X, y, scoring=crps_scorer)

How the data flow:

1. `regressor.RigidityRegressor` trains the regressor (the *base*) and decides which rows calibrate.
2. `chain.Chain.of` takes the fitted base apart: transformers of the inputs, maps of the target
   (`target_map`), and the last model. `readouts.readout_of` reads that model as rows that
   scikit-learn makes (its transformers, its kernel, its leaves) and a small torch module whose last
   map is linear in trained weights.
3. The module must reproduce the base's `predict`; otherwise the base is refused.
4. `LastLayerRigidity` (for the textbook method `textbook_fit`) gives a distribution of the
   transformed target, which `TargetMap` carries back to the user's units.
5. `scorers` compares that distribution with true values, for `cross_val_score` and searches.

This module needs the extra `sklearn`.
"""

from __future__ import annotations

from ..notices import extra, missing

try:
    from .regressor import RigidityRegressor
    from .scorers import coverage_scorer, crps_scorer, interval_score_scorer, nll_scorer
except ModuleNotFoundError as error:
    missing(error, extra("sklearn"), "sklearn", "scipy")

__all__ = [
    "RigidityRegressor",
    "coverage_scorer",
    "crps_scorer",
    "interval_score_scorer",
    "nll_scorer",
]


def __dir__() -> list[str]:
    return sorted(__all__)
