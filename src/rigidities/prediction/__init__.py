"""A mean and what lies around it: a `Prediction`, and what is derived from predictions."""

from .derived import Derived
from .novelty_scores import NoveltyScores
from .prediction import Prediction

__all__ = ["Derived", "NoveltyScores", "Prediction"]


def __dir__() -> list[str]:
    return sorted(__all__)
