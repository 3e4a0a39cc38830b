"""Rows as scikit-learn passes them: inputs, targets and weights, and their way into torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import _num_samples, check_array, check_consistent_length
from torch import Tensor

Array = np.ndarray[Any, Any]


def as_tensor(X: Any, like: Tensor | None = None) -> Tensor:
    """An array, frame or sparse matrix as a new tensor: in float64 on the CPU, or like another."""
    values = X.toarray() if hasattr(X, "toarray") else X
    tensor = torch.as_tensor(np.array(values, dtype=np.float64))
    return tensor if like is None else tensor.to(like)


def as_columns(tensor: Tensor) -> Array:
    """A tensor (N,) or (N, K) on any device as an array (N, K) in float64."""
    return np.asarray(tensor.detach().cpu().double().reshape(len(tensor), -1))


def true_values(y: Any, shape: tuple[int, ...]) -> Array:
    """True values as an array in the shape of the predictions.

    Raises:
        ValueError: They have another length, or some are missing or infinite.
    """
    values = np.asarray(y, dtype=np.float64)
    if values.size != math.prod(shape) or len(values) != shape[0]:
        raise ValueError(
            f"Expected y with the shape of the predictions, {shape}, got {values.shape}."
        )
    if not np.isfinite(values).all():
        raise ValueError("y has missing or infinite values. Leave these rows out.")
    return values.reshape(shape)


class Data(NamedTuple):
    """Inputs, targets and weights of rows.

    Attributes:
        X: Inputs, (N, P), in any form that the base accepts.
        y: Targets, (N,) or (N, K).
        weight: Weights of the rows, (N,), or None.
    """

    X: Any
    y: Any
    weight: Any = None

    @classmethod
    def of(cls, X: Any, y: Any, weight: Any = None) -> Data:
        """The data, after scikit-learn's checks of the targets and the lengths."""
        if y is None:
            raise ValueError("RigidityRegressor requires y to be passed, but the target y is None.")
        check_array(y, ensure_2d=False, input_name="y", ensure_min_samples=0)
        check_consistent_length(X, y, weight)
        if _num_samples(y) == 1:
            raise ValueError("Error bars cannot be calibrated on 1 sample. Pass several rows.")
        return cls(X, y, weight)

    @classmethod
    def of_training(cls, train: Any, new_data: Data, was_trained: bool) -> Data:
        """The checked argument `train=`: the rows that a trained base has learnt from."""
        if not was_trained:
            raise ValueError("train= is for a base that is trained already: pass prefit=True.")
        if not isinstance(train, (tuple, list)) or len(train) not in (2, 3):
            raise ValueError("Expected train=(X, y) or train=(X, y, sample_weight).")
        training = cls.of(*train)
        if (training.weight is None) != (new_data.weight is None):
            raise ValueError("Pass weights for both the rows and train=, or for neither.")
        return training

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return int(_num_samples(self.y))

    def split(self, size: float | int | None, seed: Any) -> tuple[Data, Data | None]:
        """The rows in two random parts.

        Args:
            size: Share of the rows (float) or number of rows (int) in the second part. None leaves
                that part out.
            seed: Seed of the split, as scikit-learn's `random_state`.

        Returns:
            The rows that are left, and the second part or None.
        """
        if size is None:
            return self, None
        columns = [column for column in self if column is not None]
        # train_test_split gives two halves of each column in turn: X, X', y, y', ...
        halves = train_test_split(*columns, test_size=size, random_state=seed)
        return Data(*halves[::2]), Data(*halves[1::2])

    def is_reproduced_by(self, base: Any) -> bool:
        """Whether the base's predictions leave no residuals."""
        predictions = np.asarray(base.predict(self.X), float)
        targets = np.asarray(self.y, float).reshape(predictions.shape)
        return np.allclose(predictions, targets, rtol=1e-9, atol=1e-12)
