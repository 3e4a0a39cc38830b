"""What `TransformedTargetRegressor`s do to targets, and the way back to the user's units."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..prediction.prediction import Prediction
from .data import Array, as_columns, as_tensor

_STEP = 1e-5
"""Step of a numerical derivative, as a share of the range of the training targets."""


@dataclass(frozen=True)
class TargetMap:
    """The map from the user's targets to those that the model learns, and the way back.

    The model learns the *transformed* target, (N, K). This map carries its distribution back to
    the user's units.

    Attributes:
        transformers: Fitted transformers of the targets, the outermost first.
        slope: The slope of the way back if that is affine, (K,) or 1; otherwise None.
        rising: Whether the way back rises; otherwise it falls.
        ends: The lowest and the highest transformed target, (1, K), between which the way back is
            monotone.
        step: A small step of the transformed targets, (1, K), for derivatives of the way back.
    """

    transformers: list[Any]
    slope: Any = 1.0
    rising: bool = True
    ends: tuple[Any, Any] = (-np.inf, np.inf)
    step: Any = 1.0

    @classmethod
    def of(cls, transformers: list[Any], y: Any) -> TargetMap:
        """The map and its properties, which the training targets show.

        Raises:
            ValueError: The way back mixes targets, or neither rises nor falls throughout.
        """
        if not transformers:
            return cls([])
        plain_map = cls(transformers)
        sorted_targets = np.sort(plain_map.transformed(y), 0)  # (N, K)
        values = plain_map.back(sorted_targets)
        steps = np.diff(values, axis=0)
        rising = bool((steps >= 0).all())
        falling = bool((steps <= 0).all())
        if not (rising or falling) or not plain_map._maps_targets_apart(sorted_targets, values):
            raise ValueError(
                "The inverse of the target's transformer must map each target by itself, and must "
                "only rise or only fall. Otherwise it does not map quantiles to quantiles."
            )

        low = sorted_targets[:1]
        # A constant target has no range: then the slope is taken over a step of one.
        high = np.where(sorted_targets[-1:] > low, sorted_targets[-1:], low + 1)
        slope = (plain_map.back(high) - plain_map.back(low)) / (high - low)  # (1, K)
        straight_line = plain_map.back(low) + (sorted_targets - low) * slope
        if np.allclose(straight_line, values, rtol=1e-9, atol=1e-9):
            return cls(transformers, slope=slope[0], rising=bool((slope >= 0).all()))

        curved_map = cls(transformers, slope=None, rising=rising)
        lowest = curved_map._monotone_end(low, low - high)
        highest = curved_map._monotone_end(high, high - low)
        return replace(curved_map, ends=(lowest, highest), step=_STEP * (high - low))

    def _maps_targets_apart(self, sorted_targets: Array, values: Array) -> bool:
        """Whether the way back of one target is the same when the others are at their lowest."""
        alone = []
        for k in range(sorted_targets.shape[1]):
            only_one_varies = np.repeat(sorted_targets[:1], len(sorted_targets), axis=0)
            only_one_varies[:, k] = sorted_targets[:, k]
            alone.append(self.back(only_one_varies)[:, k])
        return np.allclose(np.stack(alone, 1), values)

    def _monotone_end(self, start: Array, step: Array) -> Array:
        """How far from `start` in the direction of `step`, (1, K), the way back stays monotone.

        Args:
            start: The lowest or the highest transformed training target, (1, K).
            step: Their range, with the sign of the direction, (1, K).
        """
        # From a millionth of the range to a million ranges beyond the training targets.
        distances = np.append(0, np.logspace(-6, 6, 9601))[:, None]
        path = start + step * distances  # (9602, K)
        sign = np.sign(step) if self.rising else -np.sign(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the place where NaN begin
            values = self.back(path) * sign
            goes_on = np.diff(values, axis=0) >= -1e-13 * np.abs(values[1:])
        goes_on &= np.isfinite(values[1:])
        steps_in_a_row = np.logical_and.accumulate(goes_on).sum(0)  # (K,)
        return np.asarray(path[steps_in_a_row, np.arange(path.shape[1])])

    def transformed(self, y: Any) -> Array:
        """Targets as the model learns them, (N, K)."""
        values = np.asarray(y, dtype=np.float64)
        for transformer in self.transformers:
            columns = values.reshape(len(values), -1)
            values = np.asarray(transformer.transform(columns), dtype=np.float64)
        return values.reshape(len(values), -1)

    def back(self, values: Array) -> Array:
        """Transformed targets, (N, K), in the user's units."""
        with np.errstate(all="ignore"):  # far values may be infinite, or have no inverse
            for transformer in reversed(self.transformers):
                inverse = transformer.inverse_transform(values)
                values = np.asarray(inverse).reshape(len(values), -1)
        return values

    def quantile(self, quantile_function: Callable[[float], Tensor], level: float) -> Array:
        """A quantile in the user's units, (N, K), from those of the transformed target."""
        # A falling map turns the distribution over.
        transformed_level = level if self.rising else 1 - level
        return self._value(quantile_function(transformed_level))

    def interval(self, low: Tensor, high: Tensor) -> tuple[Array, Array]:
        """An interval of the transformed target in the user's units, each end (N, K)."""
        if self.rising:
            return self._value(low), self._value(high)
        return self._value(high), self._value(low)

    def _value(self, transformed: Tensor) -> Array:
        """Values of the transformed target in the user's units, (N, K), within the map's ends."""
        return self.back(np.clip(as_columns(transformed), *self.ends))

    def std(self, transformed_std: Tensor, quantile_function: Callable[[float], Tensor]) -> Array:
        r"""Standard deviation in the user's units, (N, K).

        Where the map is not affine, the distribution is that of the mapped quantiles with the
        weights of a normal z, over $|z| \le 4$.
        """
        if self.slope is not None:
            return np.asarray(as_columns(transformed_std) * np.abs(self.slope))
        levels, weight_list = zip(*_levels_and_weights(65), strict=True)
        values = np.stack([self.quantile(quantile_function, level) for level in levels])
        weights = np.asarray(weight_list)[:, None, None]
        mean = (weights * values).sum(0)
        return np.asarray(np.sqrt((weights * np.square(values - mean)).sum(0)))

    def log_prob(self, prediction: Prediction, y: Any) -> Array:
        r"""Logarithm of the density of targets in the user's units, (N, K).

        With the way back b it is $\log p(t) - \log |b'(t)|$ at the transformed target t. A tail
        beyond an end of the map becomes a mass at that end. For a target there, it is the
        logarithm of the mass.

        Args:
            prediction: Distribution of the transformed target, (N, K).
            y: Targets in the user's units, (N,) or (N, K).
        """
        transformed = self.transformed(y)
        if self.slope is not None:
            log_density = as_columns(prediction.log_prob(as_tensor(transformed)))
            return np.asarray(log_density - np.log(np.abs(self.slope)))

        lowest, highest = self.ends
        bounds = (as_tensor(lowest), as_tensor(highest))
        bounded = replace(prediction, support=bounds)
        log_density = as_columns(bounded.log_prob(as_tensor(transformed)))
        # The derivative of the way back, by a central difference between the ends of the map.
        below = np.clip(transformed - self.step, lowest, highest)
        above = np.clip(transformed + self.step, lowest, highest)
        rise = np.abs(self.back(above) - self.back(below))
        has_density = (transformed > lowest) & (transformed < highest)
        with np.errstate(all="ignore"):  # of targets at and beyond the ends
            log_slope = np.log(rise / (above - below))
        return np.asarray(log_density - np.where(has_density, log_slope, 0.0))

    def crps(self, prediction: Prediction, y: Any) -> Array:
        r"""Continuous ranked probability score in the user's units, (N, K).

        Where the map is not affine, it is twice the mean pinball loss of the mapped quantiles, with
        the weights of a normal z, over $|z| \le 4$.

        Args:
            prediction: Distribution of the transformed target, (N, K).
            y: Targets in the user's units, (N,) or (N, K).
        """
        if self.slope is not None:
            transformed = as_tensor(self.transformed(y))
            return np.asarray(as_columns(prediction.crps(transformed)) * np.abs(self.slope))
        targets = np.asarray(y, dtype=np.float64).reshape(len(prediction.mean), -1)
        score = np.zeros_like(targets)
        for level, weight in _levels_and_weights(129):
            excess = targets - self.quantile(prediction.quantile, level)
            score += 2 * weight * np.maximum(level * excess, (level - 1) * excess)
        return score


def _levels_and_weights(count: int) -> list[tuple[float, float]]:
    r"""Levels of quantiles at an even grid of a normal z over $|z| \le 4$, and their weights."""
    z = torch.linspace(-4, 4, count, dtype=torch.float64)
    levels = torch.special.ndtr(z).tolist()
    weights = torch.softmax(-z.square() / 2, 0).tolist()
    return list(zip(levels, weights, strict=True))
