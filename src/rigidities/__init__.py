"""Error bars for trained regressors by prediction rigidities.

`rg.LastLayerRigidity` wraps a trained torch model, `rg.PredictionRigidity` any regressor with
parameters. The names here are those a user types. Classes that only come back from a call are in
the room of the call: `rigidities.last_layer`, `rigidities.prediction`, `rigidities.calibration`.
"""

from . import export, fits, local, losses, metrics, plots, report, selection, theory
from ._version import __version__
from .any_regressor.rigidity import PredictionRigidity
from .calibration.methods import Full, Paper
from .last_layer.ensemble.ensemble import Ensemble
from .last_layer.gradients.loss import GradientLoss
from .last_layer.rigidity import LastLayerRigidity
from .models.mean_of import MeanOf
from .posterior.gram import Gram
from .posterior.posterior import Posterior
from .prediction.prediction import Prediction

LLPR = LastLayerRigidity
"""`LastLayerRigidity` by the name of the method: last-layer prediction rigidity."""

__all__ = [
    "LLPR",
    "Ensemble",
    "Full",
    "GradientLoss",
    "Gram",
    "LastLayerRigidity",
    "MeanOf",
    "Paper",
    "Posterior",
    "Prediction",
    "PredictionRigidity",
    "__version__",
    "export",
    "fits",
    "local",
    "losses",
    "metrics",
    "plots",
    "report",
    "selection",
    "theory",
]


def __dir__() -> list[str]:
    return sorted(__all__)
