"""Error bars for trained regressors by prediction rigidities."""

from . import closed_forms, fits, kernels, losses, metrics, plots
from ._version import __version__
from .calibrated import CalibrationReport
from .constrained import constrained_profile, constrained_rigidity
from .gram import Gram
from .last_layer import LastLayerRigidity
from .posterior import Posterior
from .prediction import Prediction
from .rigidity import PredictionRigidity

__all__ = [
    "CalibrationReport",
    "Gram",
    "LastLayerRigidity",
    "Posterior",
    "Prediction",
    "PredictionRigidity",
    "__version__",
    "closed_forms",
    "constrained_profile",
    "constrained_rigidity",
    "fits",
    "kernels",
    "losses",
    "metrics",
    "plots",
]
