r"""The alarm that sees every layer: how unfamiliar to each of them an input is.

For the rows $f$ that enter a layer (`readout.layers`), with mean $m$ and covariance $C$ over the
training data (`statistics.layer_sums`),

$$ d^2(f) = (f - m)^\top (C + \epsilon I)^{-1} (f - m), $$

$\epsilon$ being a hundredth of the mean eigenvalue of C. The columns of the network's own inputs,
which have units of their own, are first divided by their standard deviations (where they are at
most 256, so that they are not projected). Where an output is a
sum over rows (atoms) the largest of their distances counts. The novelty is $d^2$ over the value
that 95 % of the calibration rows stay below.

Reference: K. Lee, K. Lee, H. Lee, J. Shin, "A simple unified framework for detecting
out-of-distribution samples and adversarial attacks" (2018), of which this takes the distances of
all layers, of one class and without labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.batches import Batch
from ..models.modes import unmixed
from ..posterior.gram import Gram, full_products
from .readout.layers import WIDEST, Layer
from .readout.reading import Reading
from .readout.tap import AnyTap
from .statistics.layer_sums import LayerSums

RIDGE = 1e-2
"""Of each covariance, relative to its mean eigenvalue."""
LEVEL = 0.95
"""Share of the calibration rows whose novelty is at most 1, in each layer."""
_ROUNDING = 1e-6
"""Deviations below this share of the values are rounding."""


@dataclass(frozen=True)
class LayerDistance:
    """The distance of one layer's rows from those of the training data.

    Attributes:
        layer: which one.
        centre: mean of the training rows, (d,).
        root: (d, d) with $d^2 = |(f - m) R|^2$.
    """

    layer: Layer
    centre: Tensor
    root: Tensor

    @classmethod
    def of(cls, layer: Layer, gram: Gram, dtype: torch.dtype) -> LayerDistance:
        """From the sums of a layer, whose last column is that of the ones.

        Distances are computed in `dtype`: in single precision they are right to about 1e-5, since
        the ridge bounds how far the directions of `root` may differ.
        """
        products = gram.matrix
        count = products[-1, -1]
        centre = products[-1, :-1] / count
        squares = products[:-1, :-1] / count
        covariance = squares - torch.outer(centre, centre)
        variances = covariance.diagonal().clamp(min=0)
        # Columns that never changed: what is left of them is rounding.
        rounding = _ROUNDING**2 * squares.diagonal()
        units = torch.ones_like(variances)
        if layer.is_input and layer.width <= WIDEST:
            units = _units(variances, centre, varied=variances > rounding)
        scaled = covariance / torch.outer(units, units)
        least = (rounding / units.square()).mean()
        ridge = torch.maximum(RIDGE * scaled.diagonal().mean(), least)
        if not bool(ridge > 0):  # nothing but zeros has come: their unit is 1
            ridge = torch.ones_like(ridge)
        eigenvalues, vectors = torch.linalg.eigh(scaled)
        root = vectors / (eigenvalues.clamp(min=0) + ridge).sqrt()
        return cls(layer, centre.to(dtype), (root / units[:, None]).to(dtype))

    def __call__(self, rows: Tensor) -> Tensor:
        """Squared distances (R,); infinite where a number is missing (NaN)."""
        with unmixed(rows), full_products(rows):  # autocast and TF32 would shorten the product
            whitened = (rows.to(self.centre) - self.centre) @ self.root  # (R, d)
        distances = whitened.square().sum(1)
        return distances.nan_to_num(nan=math.inf, posinf=math.inf)


@dataclass(frozen=True)
class Alarm:
    """The distances of all layers that a fit has watched."""

    distances: Sequence[LayerDistance]

    @classmethod
    def of(cls, layers: Sequence[Layer], sums: LayerSums, dtype: torch.dtype) -> Alarm:
        """From what the fit has summed, for rows of a precision.

        Raises:
            ValueError: NaN or infinity entered a layer.
        """
        found = []
        for layer, gram in zip(layers, sums.grams, strict=True):
            if not bool(gram.diagonal.isfinite().all()):
                raise ValueError(
                    f"NaN or infinity enters {layer.name!r} in the training data, although the "
                    "readout's features are finite. Clean the data, or fit without novelty=True."
                )
            found.append(LayerDistance.of(layer, gram, dtype))
        return cls(found)

    @property
    def layers(self) -> tuple[str, ...]:
        """What the layers are called."""
        return tuple(distance.layer.name for distance in self.distances)

    def read(self, tap: AnyTap, batch: Batch) -> tuple[Reading, Tensor]:
        """One pass over a batch: what `tap` gives, and squared distances (N, L) of its samples."""
        reading, entering = tap.entering(*batch.args, **batch.kwargs)
        if batch.rows is not None:
            batch.check(reading.output.shape[0])
        samples = reading.output.shape[0]
        owners: Tensor | None = None
        columns = []
        for distance, rows in zip(self.distances, entering, strict=True):
            values, layer = distance(rows), distance.layer
            if layer.of_samples:
                if len(values) != samples:
                    raise ValueError(_ROWS.format(layer.name, len(values), samples))
            else:
                if owners is None:
                    owners = tap.row_owners(*batch.args, **batch.kwargs)
                if owners is None or len(owners) != len(values):
                    raise ValueError(_ROWS.format(layer.name, len(values), samples))
                values = values.new_zeros(samples).scatter_reduce(0, owners, values, "amax")
            columns.append(values)
        return reading, torch.stack(columns, dim=1)


@dataclass(frozen=True)
class NoveltyScale:
    """Distances relative to what is usual on rows that the model has not seen.

    Attributes:
        alarm: what measures distances.
        usual: what 95 % of the calibration rows stay below, (L,).
    """

    alarm: Alarm
    usual: Tensor

    @property
    def layers(self) -> tuple[str, ...]:
        """What the layers are called."""
        return self.alarm.layers

    def read(self, tap: AnyTap, batch: Batch) -> tuple[Reading, Tensor]:
        """One pass over a batch: what `tap` gives, and the novelty (N, L) of its samples."""
        reading, distances = self.alarm.read(tap, batch)
        return reading, (distances.double() / self.usual).to(torch.float32)


_ROWS = (
    "novelty watches {!r}, which got {} rows for {} samples here, and which of them belong to "
    "which sample is not known. Pass batches like those of the fit, or fit without novelty=True."
)


def _units(variances: Tensor, centre: Tensor, *, varied: Tensor) -> Tensor:
    """Of columns with units of their own, (d,): their spread.

    One that never varied has its own size for a unit; a column of zeros the smallest spread of the
    others, so that any change of it is noticed.
    """
    spreads = variances.sqrt()
    smallest = spreads[varied].min() if bool(varied.any()) else spreads.new_ones(())
    sizes = torch.where(centre != 0, centre.abs(), smallest)
    return torch.where(varied, spreads, sizes)


def references(distances: Tensor) -> Tensor:
    """What 95 % of the calibration rows stay below, for each layer (L,), from (n, L).

    Rows that lack a number are left out. At least 1: that is a deviation by what counts as
    rounding, where a layer's rows are all alike.
    """
    usual = []
    for column in distances.unbind(1):
        known = column[column.isfinite()]
        usual.append(upper(known, LEVEL) if len(known) else column.new_ones(()))
    return torch.stack(usual).clamp(min=1.0)


def upper(values: Tensor, level: float) -> Tensor:
    """The least of the values (n, ...) that a share `level` of them stay at or below."""
    place = math.ceil(level * len(values)) - 1
    return values.sort(dim=0).values[max(0, place)]
