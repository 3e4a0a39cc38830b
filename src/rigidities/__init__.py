"""Error bars for trained regressors by prediction rigidities."""

from . import closed_forms, fits, kernels, local, losses, metrics, plots, report, selection
from ._version import __version__
from .calibrated import CalibrationReport
from .constrained import constrained_profile, constrained_rigidity
from .derived import Derived
from .ensemble import Ensemble
from .gradient import Gradient
from .gram import Gram
from .last_layer import LastLayerRigidity
from .posterior import Posterior
from .prediction import Prediction
from .rigidity import PredictionRigidity

__all__ = [
    "CalibrationReport",
    "Derived",
    "Ensemble",
    "Gradient",
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
    "local",
    "losses",
    "metrics",
    "plots",
    "report",
    "selection",
]
