r"""How far rows lie from the rows that entered a layer in training.

For the rows $f$ that enter a layer (`layers`), with mean $m$ and covariance $C$ over the
training data,

$$ d^2(f) = (f - m)^\top (C + \epsilon I)^{-1} (f - m), $$

where $\epsilon$ is a hundredth of the mean eigenvalue of C. The columns of the network's own
inputs, which have units of their own, are first divided by their standard deviations (where there
are at most 256 columns, which are not projected).

A column that was constant in training has no standard deviation to compare a change with, and the
ridge would hide most changes of it. If such a column changes by more than rounding, $100\,d$ is
added to $d^2$, where $d$ is the number of columns. The mean of $d^2$ over the training data is at
most $d$, so that 95 % of rows like them are below $20\,d$: the change is novel in every layer.

Reference: K. Lee, K. Lee, H. Lee, J. Shin, "A simple unified framework for detecting
out-of-distribution samples and adversarial attacks" (2018). The distances of all layers are taken
from it, for one class and without labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.modes import unmixed
from ...posterior.gram import Gram, full_products
from .layers import WIDEST, Layer

RIDGE = 1e-2
"""Ridge of each covariance, relative to its mean eigenvalue."""
LEVEL = 0.95
"""Share of the calibration rows whose novelty is at most 1."""
_ROUNDING = 1e-6
"""Deviations below this share of the values count as rounding. The sums tell no smaller ones."""
_CONSTANT_CHANGED = 100.0
"""Times the number of columns: what a constant column that changes adds to a squared distance."""


# Without eq, a hash is the object's own: compilers of torch before 2.13 hash what they call.
@dataclass(frozen=True, eq=False)
class LayerDistance:
    r"""The distance of one layer's rows from those of the training data.

    Attributes:
        layer: The layer.
        centre: Mean m of the training rows, (d,).
        root: A matrix R, (d, d), with $d^2 = |(f - m) R|^2$.
        sizes: Sizes of the columns that were constant in training, which their rounding is relative
            to, (d,); infinite for columns that varied. None if all columns varied.
    """

    layer: Layer
    centre: Tensor
    root: Tensor
    sizes: Tensor | None

    @classmethod
    def of(cls, layer: Layer, gram: Gram, dtype: torch.dtype) -> LayerDistance:
        """The distance made from the sums of products of a layer's rows.

        Args:
            layer: The layer.
            gram: Sums of the products of its rows, whose last column is one.
            dtype: Precision of the distances. In single precision they are right to about 1e-5,
                since the ridge bounds how far the directions of `root` may differ.
        """
        products = gram.matrix
        count = products[-1, -1]
        centre = products[-1, :-1] / count
        squares = products[:-1, :-1] / count
        covariance = squares - torch.outer(centre, centre)
        variances = covariance.diagonal().clamp(min=0)
        # Variances below these are rounding: the columns never changed.
        rounding = _ROUNDING**2 * squares.diagonal()
        varied = variances > rounding
        units = torch.ones_like(variances)
        if _has_units(layer):
            units = _units(variances, centre, varied=varied)
            sizes = units  # that of a constant column is its size
        else:
            sizes = _sizes(centre, squares.diagonal())
        # A column that varied by less than these sums can tell must not leave its own range.
        sizes = torch.maximum(sizes, 10 * variances.sqrt() / _ROUNDING)
        scaled = covariance / torch.outer(units, units)
        least_ridge = (rounding / units.square()).mean()
        ridge = torch.maximum(RIDGE * scaled.diagonal().mean(), least_ridge)
        if not bool(ridge > 0):  # nothing but zeros has entered the layer: their unit is 1
            ridge = torch.ones_like(ridge)
        eigenvalues, vectors = torch.linalg.eigh(scaled)
        root = vectors / (eigenvalues.clamp(min=0) + ridge).sqrt()
        return cls(
            layer=layer,
            centre=centre.to(dtype),
            root=(root / units[:, None]).to(dtype),
            sizes=None if bool(varied.all()) else sizes.masked_fill(varied, math.inf).to(dtype),
        )

    def __call__(self, rows: Tensor, model_dtype: torch.dtype) -> Tensor:
        """Squared distances (R,); infinite where a number is missing (NaN).

        Args:
            rows: What entered the layer, (R, d).
            model_dtype: Precision of the model, which says how large the rounding of rows is.
        """
        with unmixed(rows), full_products(rows):  # autocast and TF32 would shorten the product
            offsets = rows.to(self.centre) - self.centre  # (R, d)
            whitened = offsets @ self.root
        distances = whitened.square().sum(1)
        if self.sizes is not None:
            tolerance = self._rounding(rows.device.type, model_dtype) * self.sizes
            changed = (offsets.abs() > tolerance).sum(1)  # constant columns, in each row
            distances = distances + _CONSTANT_CHANGED * len(self.centre) * changed
        return distances.nan_to_num(nan=math.inf, posinf=math.inf)

    def _rounding(self, device_type: str, model_dtype: torch.dtype) -> float:
        """How far a constant column may be from its mean by rounding, relative to its size."""
        computed_in = model_dtype
        if not self.layer.is_input and torch.is_autocast_enabled(device_type):
            computed_in = torch.get_autocast_dtype(device_type)
        eps = torch.finfo(computed_in).eps
        return max(8 * eps if _has_units(self.layer) else math.sqrt(eps), _ROUNDING)


def _has_units(layer: Layer) -> bool:
    """Whether the columns of a layer's rows have units of their own."""
    return layer.is_input and layer.width <= WIDEST


def _units(variances: Tensor, centre: Tensor, *, varied: Tensor) -> Tensor:
    """Units of columns that have units of their own, (d,): their standard deviations.

    The unit of a column that never varied is its size. That of a column of zeros is the smallest
    standard deviation of the others, so that any change of it is noticed.

    Args:
        variances: Variances of the columns, (d,).
        centre: Means of the columns, (d,).
        varied: Whether a column varied by more than rounding, (d,).
    """
    spreads = variances.sqrt()
    smallest = spreads[varied].min() if bool(varied.any()) else spreads.new_ones(())
    sizes = torch.where(centre != 0, centre.abs(), smallest)
    return torch.where(varied, spreads, sizes)


def _sizes(centre: Tensor, mean_squares: Tensor) -> Tensor:
    """Sizes of columns that share a unit, which their rounding is relative to, (d,).

    A small column may be a difference of large numbers, and rounds like them. So the size of a
    column is at least the RMS of the whole layer. It is 1 where only zeros have entered.

    Args:
        centre: Means of the columns, (d,).
        mean_squares: Means of the columns' squares, (d,).
    """
    rms = mean_squares.mean().sqrt()
    if not bool(rms > 0):
        rms = torch.ones_like(rms)
    return torch.maximum(centre.abs(), rms)


def usual_distances(distances: Tensor) -> Tensor:
    """Squared distances of each layer that count as a novelty of 1, (L,).

    They are those that 95 % of the calibration rows stay below in each layer, times one factor for
    all layers, with which 95 % of the rows stay below 1 in every layer at once. Rows that lack a
    number are left out. The answer is at least 1: where a layer's rows are all alike, that is a
    deviation by what counts as rounding.

    Args:
        distances: Squared distances of the calibration rows, (n, L).
    """
    usual = []
    for column in distances.unbind(1):
        finite = column[column.isfinite()]
        usual.append(upper(finite, LEVEL) if len(finite) else column.new_ones(()))
    by_layer = torch.stack(usual).clamp(min=1.0)
    largest = (distances / by_layer).amax(1)
    largest = largest[largest.isfinite()]
    if not len(largest):
        return by_layer
    return by_layer * upper(largest, LEVEL).clamp(min=1.0)


def upper(values: Tensor, level: float) -> Tensor:
    """The least of the values (n,) that a share `level` of them do not exceed."""
    place = math.ceil(level * len(values)) - 1
    return values.sort().values[max(0, place)]


def alarm_threshold(novelty: Tensor) -> float:
    """What one new row in a hundred exceeds on average, if it is like n others.

    A new row exceeds the k-th smallest of n such rows with probability $(n + 1 - k) / (n + 1)$.
    With fewer than 99 rows the answer is the largest, which one new row in n + 1 exceeds.

    Args:
        novelty: The novelty of n calibration rows, (n,).
    """
    rows_above = max(0, (len(novelty) + 1) // 100 - 1)
    place = len(novelty) - 1 - rows_above
    return float(novelty.sort().values[place])
