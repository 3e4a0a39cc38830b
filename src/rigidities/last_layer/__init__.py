"""Error bars from a model's readout: `LastLayerRigidity`, and what its methods return."""

from .ensemble.ensemble import Ensemble
from .ensemble.member_values import MemberValues
from .frozen import Frozen
from .gradients.gradient import Gradient
from .local_terms import LocalTerms
from .refit import Refitted
from .rigidity import LastLayerRigidity

__all__ = [
    "Ensemble",
    "Frozen",
    "Gradient",
    "LastLayerRigidity",
    "LocalTerms",
    "MemberValues",
    "Refitted",
]


def __dir__() -> list[str]:
    return sorted(__all__)
