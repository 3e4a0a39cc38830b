"""Error bars for trained regressors by prediction rigidities."""

from . import closed_forms, export, fits, kernels, local, losses, metrics, plots, report, selection
from ._version import __version__
from .any_regressor.rigidity import PredictionRigidity
from .calibration.report import CalibrationReport
from .constrained import constrained_profile, constrained_rigidity
from .data.parquet import ParquetBatches
from .data.shards import ShardSampler, shard
from .last_layer.ensemble.ensemble import Ensemble
from .last_layer.ensemble.member_values import MemberValues
from .last_layer.frozen import Frozen
from .last_layer.gradients.gradient import Gradient
from .last_layer.local_terms import LocalTerms
from .last_layer.refit import Refitted
from .last_layer.rigidity import LastLayerRigidity
from .models.mean_of import MeanOf
from .models.whole import whole
from .posterior.gram import Gram
from .posterior.posterior import Posterior
from .prediction.derived import Derived
from .prediction.novelty import Novelty
from .prediction.prediction import Prediction

__all__ = ["LastLayerRigidity", "MeanOf", "PredictionRigidity", "__version__", "whole"]
__all__ += ["CalibrationReport", "Derived", "Ensemble", "Frozen", "Gradient", "Prediction"]
__all__ += ["Gram", "LocalTerms", "MemberValues", "Novelty", "Posterior", "Refitted"]
__all__ += ["ParquetBatches", "ShardSampler", "constrained_profile", "constrained_rigidity"]
__all__ += ["closed_forms", "export", "fits", "kernels", "local", "losses", "metrics", "plots"]
__all__ += ["report", "selection", "shard"]


def __dir__() -> list[str]:
    return __all__
