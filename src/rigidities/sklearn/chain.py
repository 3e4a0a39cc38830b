"""A fitted regressor taken apart: transformers of the inputs, maps of the target, a readout."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _num_samples
from torch import Tensor

from ..notices import notify
from .data import Array, Data, as_columns, as_tensor
from .layers import layers_of, pipelines
from .readouts import EstimatorReadout, readout_of
from .target_map import TargetMap

_SINGLE_EPSILON = float(np.finfo(np.float32).eps)
"""Relative rounding of one operation in single precision."""


@dataclass(frozen=True)
class Chain:
    """A fitted regressor taken apart.

    Attributes:
        base: The whole regressor.
        transformers: Transformers of the inputs, the outermost pipeline's first.
        targets: The map of the targets.
        model: The last regressor, which is read as `readout`.
        readout: Rows and torch module of that model.
        target_centre: Mean of the training targets, (K,).
        target_spread: Their largest distance from it, (K,).
    """

    base: Any
    transformers: list[Any]
    targets: TargetMap
    model: Any
    readout: EstimatorReadout
    target_centre: Array
    target_spread: Array

    @classmethod
    def of(cls, base: Any, training: Data, ridge: Any) -> Chain:
        """Take apart a base that was trained on these rows."""
        layers = layers_of(base)
        model = layers[-1]
        target_transformers = [
            layer.transformer_ for layer in layers if hasattr(layer, "transformer_")
        ]
        input_transformers = [pipe[:-1] for pipe in pipelines(layers) if len(pipe) > 1]
        inputs = _transformed_inputs(input_transformers, training.X)
        y = np.asarray(training.y, dtype=np.float64).reshape(training.row_count, -1)
        centre = y.mean(0)
        return cls(
            base=base,
            transformers=input_transformers,
            targets=TargetMap.of(target_transformers, training.y),
            model=model,
            readout=readout_of(model, inputs, training.weight, ridge),
            target_centre=centre,
            target_spread=np.abs(y - centre).max(0),
        )

    def rows(self, X: Any) -> Tensor:
        """The torch module's input for these inputs of the base."""
        return self.readout.rows(_transformed_inputs(self.transformers, X))

    def tensors(self, data: Data) -> dict[str, Tensor]:
        """The rows as a batch of `LastLayerRigidity`, with transformed targets."""
        rows = self.rows(data.X)
        target = as_tensor(self.targets.transformed(data.y))
        batch = {"input": rows, "y": target.to(rows.device)}
        if data.weight is not None:
            batch["weight"] = as_tensor(data.weight).reshape(-1)
        return batch

    def largest_difference(self, predictions: Any, transformed_mean: Tensor) -> float:
        """Largest difference of the base's predictions from the torch means; 0 if it is rounding.

        Rounding is a small share of how far predictions and targets lie from the targets' mean (not
        of the mean itself, which may be large), plus the last digits of the base's precision.

        Args:
            predictions: Of the base, (N,) or (N, K).
            transformed_mean: Of the torch module, in units of the transformed target, (N, K).
        """
        mean = self.targets.back(as_columns(transformed_mean))
        predictions = np.asarray(predictions).reshape(transformed_mean.shape[0], -1)
        if predictions.dtype == np.float32:
            share_of_spread = 1e-3
            digits = 64 * _SINGLE_EPSILON
        else:
            share_of_spread = 1e-5
            digits = 1e-12

        predictions = predictions.astype(np.float64)
        from_centre = np.nanmax(np.abs(predictions - self.target_centre), axis=0, initial=0)  # (K,)
        size = np.nanmax(np.abs(predictions), axis=0, initial=0)  # (K,)
        allowed = share_of_spread * np.maximum(from_centre, self.target_spread)
        allowed = allowed + digits * size
        both_undefined = np.isnan(mean) & np.isnan(predictions)
        differences = np.where(both_undefined, 0.0, np.abs(mean - predictions))
        if (differences <= allowed).all():
            return 0.0
        return float(differences.max())

    def warn_of_reproduced_rows(self, training: Data) -> None:
        """Warn if the training rows, which are to calibrate, have no residuals."""
        if training.is_reproduced_by(self.base):
            notify(
                "The base reproduces its training rows exactly, so error bars from these rows are "
                "almost zero and mean nothing. Hold rows out with valid=0.2, or give the base a "
                "penalty."
            )

    def require_same_predictions(self, data: Data) -> None:
        """Refuse a base whose torch module predicts something else."""
        X = data.X
        predictions = np.asarray(self.base.predict(X))
        if self.transformers:
            # In another order, transformers that move or mix rows give other predictions.
            order = np.random.default_rng(0).permutation(len(predictions))
            X = _safe_indexing(X, order)
            predictions = predictions[order]
        # A copy, since the host may have left its module in training mode.
        module = copy.deepcopy(self.readout.module).eval()
        difference = self.largest_difference(predictions, module(self.rows(X)))
        if difference:
            raise ValueError(
                f"{type(self.model).__name__} cannot be read as a linear model of single rows: the "
                f"predictions would differ by up to {difference:.3g}. If it has a link function, "
                "use TransformedTargetRegressor instead. If its kernel is singular, use a larger "
                "alpha. Transformers must not reorder or mix rows."
            )


def _transformed_inputs(transformers: list[Any], X: Any) -> Any:
    """Inputs after all transformers; a ValueError if these drop or add rows."""
    inputs = X
    for transformer in transformers:
        inputs = transformer.transform(inputs)
    rows_before = _num_samples(X)
    rows_after = _num_samples(inputs)
    if rows_after != rows_before:
        raise ValueError(
            f"The pipeline's transformers return {rows_after} rows for {rows_before}, but error "
            "bars need one row for each. Drop rows before fit, not in a transformer."
        )
    return inputs
