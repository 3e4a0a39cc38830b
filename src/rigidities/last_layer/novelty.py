r"""The alarm that sees every layer: how unfamiliar an input is to each of them.

For the rows $f$ that enter a layer (`layers`), with mean $m$ and covariance $C$ over the
training data (`statistics.layer_sums`),

$$ d^2(f) = (f - m)^\top (C + \epsilon I)^{-1} (f - m), $$

where $\epsilon$ is a hundredth of the mean eigenvalue of C. The columns of the network's own
inputs, which have units of their own, are first divided by their standard deviations (where there
are at most 256 columns, which are not projected). Where an output is a sum over rows (atoms) the
largest of their distances counts. The novelty is $d^2$ over the value that 95 % of the calibration
rows stay below.

`Alarm` makes the distances of all layers from what the fit has summed. `NoveltyScale` divides them
by what is usual, which `references` takes from the calibration rows.

Reference: K. Lee, K. Lee, H. Lee, J. Shin, "A simple unified framework for detecting
out-of-distribution samples and adversarial attacks" (2018). The distances of all layers are taken
from it, for one class and without labels.
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
from ..readout.reading import Reading
from ..readout.readout import AnyReadout
from ..statistics.layer_sums import LayerSums
from .layers import WIDEST, Layer, read_with_layers

RIDGE = 1e-2
"""Ridge of each covariance, relative to its mean eigenvalue."""
LEVEL = 0.95
"""Share of the calibration rows whose novelty is at most 1, in each layer."""
_ROUNDING = 1e-6
"""Deviations below this share of the values count as rounding."""


@dataclass(frozen=True)
class LayerDistance:
    r"""The distance of one layer's rows from those of the training data.

    Attributes:
        layer: The layer.
        centre: Mean m of the training rows, (d,).
        root: A matrix R, (d, d), with $d^2 = |(f - m) R|^2$.
    """

    layer: Layer
    centre: Tensor
    root: Tensor

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
        units = torch.ones_like(variances)
        if layer.is_input and layer.width <= WIDEST:
            units = _units(variances, centre, varied=variances > rounding)
        scaled = covariance / torch.outer(units, units)
        least_ridge = (rounding / units.square()).mean()
        ridge = torch.maximum(RIDGE * scaled.diagonal().mean(), least_ridge)
        if not bool(ridge > 0):  # nothing but zeros has entered the layer: their unit is 1
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
    """The distances of all layers that a fit has watched.

    Attributes:
        distances: The distance of each of the L layers.
    """

    distances: Sequence[LayerDistance]

    @classmethod
    def of(cls, layers: Sequence[Layer], sums: LayerSums, dtype: torch.dtype) -> Alarm:
        """The distances made from the sums of a fit.

        Args:
            layers: The layers.
            sums: What the fit has summed of the rows that entered them.
            dtype: Precision of the distances.

        Raises:
            ValueError: NaN or infinity entered a layer.
        """
        distances = []
        for layer, gram in zip(layers, sums.grams, strict=True):
            if not bool(gram.diagonal.isfinite().all()):
                raise ValueError(
                    f"NaN or infinity enters {layer.name!r} in the training data, although the "
                    "readout's features are finite. Clean the data, or fit without novelty=True."
                )
            distances.append(LayerDistance.of(layer, gram, dtype))
        return cls(distances)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(distance.layer.name for distance in self.distances)

    def read(self, readout: AnyReadout, batch: Batch) -> tuple[Reading, Tensor]:
        """One pass over a batch.

        Args:
            readout: Reads outputs, features and what enters the layers off the model.
            batch: The batch of N samples.

        Returns:
            The reading, and the squared distances of the samples, (N, L).

        Raises:
            ValueError: It is not known which rows of a layer belong to which sample.
        """
        layers = [distance.layer for distance in self.distances]
        reading, rows_by_layer = read_with_layers(readout, layers, batch)
        samples = reading.output.shape[0]
        owners: Tensor | None = None  # asked for where a layer needs them
        columns = []
        for distance, rows in zip(self.distances, rows_by_layer, strict=True):
            layer = distance.layer
            row_distances = distance(rows)
            if layer.of_samples:
                if len(row_distances) != samples:
                    raise ValueError(_ROWS.format(layer.name, len(row_distances), samples))
                columns.append(row_distances)
                continue
            if owners is None:
                owners = readout.row_owners(batch)
            if owners is None or len(owners) != len(row_distances):
                raise ValueError(_ROWS.format(layer.name, len(row_distances), samples))
            # The largest distance of a sample's rows.
            zeros = row_distances.new_zeros(samples)
            columns.append(zeros.scatter_reduce(0, owners, row_distances, "amax"))
        return reading, torch.stack(columns, dim=1)


@dataclass(frozen=True)
class NoveltyScale:
    """Distances relative to what is usual on held-out rows.

    Attributes:
        alarm: Measures distances.
        usual: Squared distance that 95 % of the calibration rows stay below, (L,).
    """

    alarm: Alarm
    usual: Tensor

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers."""
        return self.alarm.layers

    def read(self, readout: AnyReadout, batch: Batch) -> tuple[Reading, Tensor]:
        """One pass over a batch: the reading, and the novelty of its samples, (N, L)."""
        reading, distances = self.alarm.read(readout, batch)
        return reading, (distances.double() / self.usual).to(torch.float32)


_ROWS = (
    "novelty watches {!r}, which got {} rows for {} samples here, and it is not known which rows "
    "belong to which sample. Pass batches like those of the fit, or fit without novelty=True."
)


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


def references(distances: Tensor) -> Tensor:
    """Squared distances that 95 % of the calibration rows stay below, (L,).

    Rows that lack a number are left out. The answer is at least 1: where a layer's rows are all
    alike, that is a deviation by what counts as rounding.

    Args:
        distances: Squared distances of the calibration rows, (n, L).
    """
    usual = []
    for column in distances.unbind(1):
        finite = column[column.isfinite()]
        usual.append(upper(finite, LEVEL) if len(finite) else column.new_ones(()))
    return torch.stack(usual).clamp(min=1.0)


def upper(values: Tensor, level: float) -> Tensor:
    """The least of the values (n, ...) that a share `level` of them do not exceed."""
    place = math.ceil(level * len(values)) - 1
    return values.sort(dim=0).values[max(0, place)]
