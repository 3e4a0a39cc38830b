"""Error bars for trained regressors by prediction rigidities.

`rg.LastLayerRigidity` wraps a trained torch model, `rg.PredictionRigidity` any regressor with
parameters. The names here are those a user types. Classes that only come back from a call are in
the room of the call: `rigidities.last_layer`, `rigidities.prediction`, `rigidities.calibration`.
"""

from . import export, fits, local, losses, metrics, plots, report, selection, theory
from ._version import __version__
from .any_regressor.rigidity import PredictionRigidity
from .data.shards import ShardSampler, shard
from .last_layer.ensemble.ensemble import Ensemble
from .last_layer.rigidity import LastLayerRigidity
from .models.mean_of import MeanOf
from .models.whole import whole
from .posterior.gram import Gram
from .posterior.posterior import Posterior
from .prediction.prediction import Prediction

__all__ = [
    "Ensemble",
    "Gram",
    "LastLayerRigidity",
    "MeanOf",
    "Posterior",
    "Prediction",
    "PredictionRigidity",
    "ShardSampler",
    "__version__",
    "export",
    "fits",
    "local",
    "losses",
    "metrics",
    "plots",
    "report",
    "selection",
    "shard",
    "theory",
    "whole",
]


def __dir__() -> list[str]:
    return sorted(__all__)
