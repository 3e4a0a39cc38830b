"""Split conformal intervals by MAPIE, around a network that is trained already.

The conformity score is MAPIE's default, the absolute residual, so that all intervals have the same
width. They cover new rows like the validation rows with at least the promised probability.

References:
    Cordier et al., "Flexible and systematic uncertainty estimation with conformal prediction via
    the MAPIE library", COPA 2023.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

REMEDY = "pip install mapie"


def installed() -> bool:
    """Whether MAPIE can be imported."""
    return find_spec("mapie") is not None


def fitted(predict: Callable[[Tensor], Tensor], valid: tuple[Tensor, Tensor], level: float) -> Any:
    """MAPIE's regressor around a function that predicts, conformalised on validation rows.

    Args:
        predict: Inputs (n, d) -> predictions (n, 1), of the trained network.
        valid: Validation rows, x (n, d) and y (n, 1).
        level: The probability that the intervals cover.

    Raises:
        ImportError: MAPIE cannot be imported; the message has the remedy.
    """
    try:
        from mapie.regression import SplitConformalRegressor
    except ImportError as error:
        raise ImportError(f"MAPIE cannot be imported ({error}): {REMEDY}") from error
    from sklearn.base import BaseEstimator, RegressorMixin

    class Trained(RegressorMixin, BaseEstimator):  # type: ignore[misc]
        """The trained network as scikit-learn's regressor; MAPIE asks whether it is fitted."""

        def __sklearn_is_fitted__(self) -> bool:
            return True

        def fit(self, x: Any, y: Any) -> Trained:
            return self

        def predict(self, x: Any) -> Any:
            return predict(torch.as_tensor(x)).flatten().numpy()

    x, y = valid
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        regressor = SplitConformalRegressor(Trained(), confidence_level=level, prefit=True)
        regressor.conformalize(x.numpy(), y.flatten().numpy())
    return regressor


def intervals(regressor: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of the intervals of rows, (n,) each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, ends = regressor.predict_interval(x.numpy())  # (n, 2, levels)
    low, high = torch.as_tensor(ends)[:, :, 0].unbind(1)
    return low, high
