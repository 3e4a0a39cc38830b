"""Error bars for trained regressors by prediction rigidities.

`rg.LastLayerRigidity` wraps a trained torch model, `rg.PredictionRigidity` any regressor with
parameters. The names here are those a user types. Classes that only come back from a call are in
the room of the call: `rigidities.last_layer`, `rigidities.prediction`, `rigidities.calibration`.
"""

from . import closed_forms, export, fits, kernels, local, losses, metrics, plots, report, selection
from ._version import __version__
from .any_regressor.rigidity import PredictionRigidity
from .calibration.methods import Full, Paper
from .constrained import constrained_profile, constrained_rigidity
from .data.parquet import ParquetBatches
from .data.shards import ShardSampler, shard
from .last_layer.ensemble.ensemble import Ensemble
from .last_layer.gradients.loss import GradientLoss
from .last_layer.rigidity import LLPR, LastLayerRigidity
from .models.mean_of import MeanOf
from .models.whole import whole
from .posterior.gram import Gram
from .posterior.posterior import Posterior
from .prediction.prediction import Prediction

__all__ = [
    "LLPR",
    "Ensemble",
    "Full",
    "GradientLoss",
    "Gram",
    "LastLayerRigidity",
    "MeanOf",
    "Paper",
    "ParquetBatches",
    "Posterior",
    "Prediction",
    "PredictionRigidity",
    "ShardSampler",
    "__version__",
    "closed_forms",
    "constrained_profile",
    "constrained_rigidity",
    "export",
    "fits",
    "kernels",
    "local",
    "losses",
    "metrics",
    "plots",
    "report",
    "selection",
    "shard",
    "whole",
]


def __dir__() -> list[str]:
    return sorted(__all__)
