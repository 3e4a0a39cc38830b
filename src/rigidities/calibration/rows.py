r"""The rows of a calibration: one table, and the view of one of its targets.

`Rows` is the table of n rows and K targets that every method of calibration reads: errors,
predictions, and the features' squared components in the Gram's eigenbasis, from which the unscaled
variances follow for every ridge s, $q(s) = P\,(\lambda + s)^{-1}$ with the squared components P and
the eigenvalues $\lambda$. Validation rows and training rows come in the same table.

`RowCollector` collects the batches of one pass over data into such a table. Where rows would not
fit into memory it thins them, by their hashes, so that the rows in the table do not depend on their
order or batches. Collectors of several processes merge to one.

`Rows.target` gives the rows of one target at one ridge (`TargetView`), without masked ones and with
single far residuals bounded. A row that was in the fit then has the residual $r / (1 - c q)$ and
the variance $q / (1 - c q)$ of a readout refitted without it; c is its weight in the Gram. That is
optimistic for a network trained end to end, so such rows stay marked as seen. A view also knows
what is usual among its rows: the size of a residual, of q, of the noise. These statistics are
robust (`robust`), so that a few outliers do not move them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..prediction.head import extent_of, intensive_features
from .ignorance import IgnorantForecast
from .methods import Support
from .robust import clipped_mean, mean_q, reach

__all__ = ["Curvature", "RowCollector", "Rows", "TargetView"]

LARGEST = 3 << 25
"""Largest number of entries in memory, 3/4 GiB in float64. Beyond it half the rows are dropped."""
ROWS = 1 << 17
"""Largest number of rows in memory. They give the scale to within 0.3 %."""
LEAST_REMAINING = 0.05
"""Value of 1 - c q below which a left-out residual is not enlarged further."""
INFORMATIVE = 1e-3
"""Share of a usual q below which a row's error is only noise and says nothing about q."""
REFERENCE = 0.9
"""Quantile of the left-out training rows' q, beyond which the guard sets in."""
REFERENCE_ROWS = 20
"""Least number of training rows that fix units and ranges by themselves."""
ROUNDING = 1e-7
"""Part of the targets' range below which they count as equal in the order of rows."""

_PIECE = 1 << 20
"""Number of squared components at which batches are joined into one piece."""
_BATCHES = 256
"""Number of batches at which they are joined into one piece at the latest."""
_GOLDEN = (5**0.5 - 1) / 2


class Curvature(Protocol):
    """What a calibration asks of a posterior: its eigenvalues, and a few numbers at its ridge."""

    @property
    def eigenvalues(self) -> Tensor:
        """Those of the basis of the rows' powers, (D,) or (K, D)."""

    @property
    def condition(self) -> float:
        """The condition number at the ridge."""

    @property
    def effective_rank(self) -> float:
        """How many directions the data determine at the ridge."""

    @property
    def width(self) -> int:
        """The number of features."""

    def with_ridge(self, ridge: float) -> Curvature:
        """The same with another ridge."""


@dataclass(frozen=True)
class Rows:
    """A table of n rows and K targets.

    A column that is the same for all targets has 1 in place of K.

    Attributes:
        error: Target minus prediction, (n, K); NaN where a target is masked.
        mean: Predictions, (n, K).
        power: Squared components of the features in the Gram's eigenbasis, (n, 1 or K, D). It is a
            tuple of pieces, whose rows follow one another, since joining them would take the memory
            twice.
        weight: The weight of each row in the Gram, (n, 1 or K).
        noise_factor: What a unit of noise adds to the row's variance, (n, 1 or K): the noise's
            shape, times the typical weight over the user's weight c of the sample.
        number: The row's place in the data, (n,).
        count: How many rows the data have; n is smaller where they were thinned.
        typical_weight: The harmonic mean of the weights c above zero, (1, 1 or K); 1 without
            weights.
        trained: Whether the fit has seen these rows, so that they count as left out of it.
        inputs: The features that a noise may follow, (n, 1 or K, P), if there are any.
        labels: The labels of conformal groups, (n, K), if there are groups.
        distances: Squared distances in the layers that the fit has watched, (n, L), if any.
        outputs: How many outputs of a sample follow one another as rows of one target. The row at a
            place belongs to the sample `place // outputs` and to the output `place % outputs`.
        mean_shape: The mean of the noise's shape.
        units: The factor in the weights in the Gram that brings each target to its own unit,
            (1, 1 or K); 1 where targets count as they are.
        samples: How many samples were compared with the training data.
        duplicates: How many of those are in the training data too.
        hashed: How many samples were compared with one another by their hashes.
        distinct: How many of these differ from one another.
    """

    error: Tensor
    mean: Tensor
    power: tuple[Tensor, ...]
    weight: Tensor
    noise_factor: Tensor
    number: Tensor
    count: int
    typical_weight: Tensor
    trained: bool = False
    inputs: Tensor | None = None
    labels: Tensor | None = None
    distances: Tensor | None = None
    outputs: int = 1
    mean_shape: float = 1.0
    units: Tensor = field(default_factory=lambda: torch.ones(1, 1, dtype=torch.float64))
    samples: int = 0
    duplicates: float = 0.0
    hashed: int = 0
    distinct: int = 0

    def __len__(self) -> int:
        return len(self.error)

    @property
    def targets(self) -> int:
        """Number of targets K."""
        return self.error.shape[1]

    @property
    def typical_weight_in_gram(self) -> Tensor:
        """The typical weight c times the units, (1, 1 or K).

        In the least-squares problem behind q, noise of one adds its inverse to a row's variance.
        """
        return self.typical_weight * self.units.to(self.typical_weight)

    @property
    def sample(self) -> Tensor | None:
        """The sample of each row, (n,); None where each row is a sample of its own."""
        return None if self.outputs == 1 else self.number // self.outputs

    @property
    def shares_inputs(self) -> bool:
        """Whether all targets have the same features, or there are none."""
        return self.inputs is None or self.inputs.shape[1] == 1

    def subset(self, mask: Tensor) -> Rows:
        """The rows that a mask (n,) of booleans selects."""
        masks = torch.split(mask, [len(piece) for piece in self.power])
        return replace(
            self,
            error=self.error[mask],
            mean=self.mean[mask],
            power=tuple(piece[chosen] for piece, chosen in zip(self.power, masks, strict=True)),
            weight=self.weight[mask],
            noise_factor=self.noise_factor[mask],
            number=self.number[mask],
            count=int(mask.sum()),
            inputs=None if self.inputs is None else self.inputs[mask],
            labels=None if self.labels is None else self.labels[mask],
            distances=None if self.distances is None else self.distances[mask],
        )

    def quadratic(self, eigenvalues: Tensor, ridges: Tensor) -> Tensor:
        """The unscaled variances q for each ridge (J,): (n, 1 or K, J).

        The eigenvalues are those of the Gram, (D,), or (K, D) where each target has its own.
        """
        inverse = 1 / (eigenvalues[..., None] + ridges)  # (D, J) or (K, D, J)
        if inverse.ndim == 3:
            return torch.cat([torch.einsum("nkd,kdj->nkj", piece, inverse) for piece in self.power])
        return torch.cat([piece @ inverse for piece in self.power])

    def quadratic_at(self, eigenvalues: Tensor, ridge: float) -> Tensor:
        """The unscaled variances q at one ridge, (n, 1 or K)."""
        return self.quadratic(eigenvalues, eigenvalues.new_tensor([ridge]))[..., 0]

    def target(
        self, target: int, q: Tensor, noise_factor: Tensor, support: Support | None = None
    ) -> TargetView:
        """The rows of one target in float64, without masked ones; seen ones as if left out.

        Single far residuals are bounded (`reach`).

        Args:
            target: The target's number.
            q: Unscaled variances at a ridge, (n, 1 or K).
            noise_factor: What a unit of noise adds to the variance, (n, 1 or K).
            support: The targets' bounds.
        """
        error = self.error[:, target]
        q = target_column(q, target)
        weight = target_column(self.weight, target)
        # A seen row with c q = 1 is fitted exactly and cannot be left out.
        usable = error.isfinite()
        if self.trained:
            usable = usable & (weight * q < 1 - 1e-9)
        error = error[usable]
        q = q[usable]
        mean = self.mean[usable, target].to(torch.float64)
        given_target = mean + error
        side = _sides(mean, error, support)
        if self.trained:
            remaining = 1 - weight[usable] * q
            error = error / remaining.clamp(min=LEAST_REMAINING)
            q = q / remaining.clamp(min=1e-3)
        features = error.new_zeros(len(error), 0)
        if self.inputs is not None:
            features = target_column(self.inputs, target)[usable].to(torch.float64)
        limit = reach(error)
        return TargetView(
            residual=error.clamp(-limit, limit),
            q=q,
            mean=mean,
            features=features,
            noise_factor=target_column(noise_factor, target)[usable],
            seen=torch.full_like(q, self.trained, dtype=torch.bool),
            target=torch.where(error.abs() > limit, math.nan, given_target),
            side=side,
            sample=None if self.sample is None else self.sample[usable],
        )


def target_column(table: Tensor, target: int) -> Tensor:
    """One target's column, (n, ...), of a table with one column per target or one for all."""
    return table[:, min(target, table.shape[1] - 1)]


def _sides(mean: Tensor, error: Tensor, support: Support | None) -> Tensor:
    """-1 or 1 where a target lies at the lower or the upper bound, else 0, (n,)."""
    side = torch.zeros_like(mean)
    if support is None:
        return side
    for sign, bound in zip((-1.0, 1.0), support, strict=True):
        if bound is not None:
            rounding = 1e-6 * (mean.abs() + error.abs())  # of a model in float32
            side = torch.where((mean + error - bound).abs() <= rounding, sign, side)
    return side


def require_within(target: Tensor, support: Support | None) -> None:
    """Refuse a support that targets violate.

    Raises:
        ValueError: Targets lie outside the support.
    """
    low, high = support or (None, None)
    least = -math.inf if low is None else low
    largest = math.inf if high is None else high
    outside = int(((target < least) | (target > largest)).sum())
    if outside > 0:
        finite = target[target.isfinite()]
        raise ValueError(
            f"{outside} targets lie outside support=({low}, {high}): they range from "
            f"{float(finite.min()):.6g} to {float(finite.max()):.6g}. Widen it, or clean the data."
        )


# --- the rows of one target -----------------------------------------------------------------------


@dataclass(frozen=True)
class TargetView:
    """Rows of one target at one ridge, in float64.

    Attributes:
        residual: Target minus prediction, (n,).
        q: Unscaled variances, (n,).
        mean: Predictions, (n,).
        features: Features, (n, P).
        noise_factor: What a unit of noise adds to the row's variance, (n,); for sums, to that of
            the row over its extent.
        seen: Whether the row was trained on, (n,).
        target: The target as it was given, (n,); NaN in single rows whose residual was bounded.
        side: -1 or 1 where the target lies at the lower or the upper bound of its support, so that
            the distribution's mass beyond is what the row shows; 0 elsewhere, (n,).
        sample: The sample of each row, (n,); None where each row is a sample of its own.
        forecast: The ignorant forecast, fitted to all rows of the target, once it is known.
        grid_step: The step of the grid that the targets lie on; 0 where they lie on none.
    """

    residual: Tensor
    q: Tensor
    mean: Tensor
    features: Tensor
    noise_factor: Tensor
    seen: Tensor
    target: Tensor
    side: Tensor
    sample: Tensor | None = None
    forecast: IgnorantForecast | None = None
    grid_step: float = 0.0

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, which: Tensor) -> TargetView:
        """Some of the rows, by booleans (n,) or by numbers."""
        values: dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            values[column.name] = value[which] if isinstance(value, Tensor) else value
        return TargetView(**values)

    def in_order(self) -> TargetView:
        """The same rows in an order that does not depend on the one in which they came.

        Seen rows come last. Among both kinds, rows are sorted by their targets, rounded; equal ones
        by their predictions, and then by q. The target is prediction plus residual, which float64
        may round differently in another batch: rounded to a small part of their range, equal
        targets remain equal. Rows without a target, whose residual was bounded, come last. The
        samples keep their numbers. Targets and predictions are those beyond the ignorant forecast,
        so that a constant, or one per atom, leaves the order as it is.
        """
        mean = self.mean
        target = self.target
        if self.forecast is not None:
            forecast = self.forecast(self.features)
            mean = mean - forecast
            target = target - forecast
        largest = target[target.isfinite()].abs().amax() if bool(target.isfinite().any()) else 1.0
        rounded = (target / (ROUNDING * largest + 1e-300)).round()
        order = torch.arange(len(self), device=self.q.device)
        for key in (self.q, mean, rounded, self.seen.to(torch.int8)):
            order = order[key[order].argsort(stable=True)]  # the last one decides
        return self[order]

    @cached_property
    def mirrored(self) -> TargetView:
        """The same rows with all targets and predictions negated."""
        return replace(
            self,
            residual=-self.residual,
            mean=-self.mean,
            target=-self.target,
            side=-self.side,
            forecast=None if self.forecast is None else self.forecast.mirrored,
        )

    @property
    def upright(self) -> TargetView:
        """These rows or the mirrored ones: those whose predictions reach farther up, by cubes.

        Where they reach as far on both sides, the residuals decide.
        """
        for values in (self.intensive.mean, self.residual):
            cubes = values.pow(3)
            if bool(cubes.sum().abs() > 1e-9 * cubes.abs().sum()):
                return self.mirrored if bool(cubes.sum() < 0) else self
        return self

    def followed_by(self, other: TargetView) -> TargetView:
        """These rows and then others; what belongs to all rows together is not known yet."""
        sample = None
        if self.sample is not None and other.sample is not None:
            sample = torch.cat([self.sample, other.sample])
        return TargetView(
            residual=torch.cat([self.residual, other.residual]),
            q=torch.cat([self.q, other.q]),
            mean=torch.cat([self.mean, other.mean]),
            features=torch.cat([self.features, other.features]),
            noise_factor=torch.cat([self.noise_factor, other.noise_factor]),
            seen=torch.cat([self.seen, other.seen]),
            target=torch.cat([self.target, other.target]),
            side=torch.cat([self.side, other.side]),
            sample=sample,
        )

    def with_forecast(
        self, extent_weight: Tensor | None, *, known_noise: bool = False
    ) -> TargetView:
        """The same rows with their ignorant forecast, and whether their targets lie on a grid.

        Args:
            extent_weight: Weights of the features that give the extent, as in `extent_weights`.
            known_noise: Whether the noise factors are variances of the targets as they are.
        """
        forecast = IgnorantForecast.of(self.target, self.features, extent_weight)
        factor = self.noise_factor
        if known_noise:
            factor = forecast.as_of_head.over_extent(factor[:, None], self.features)[:, 0]
        return replace(self, forecast=forecast, noise_factor=factor, grid_step=self._grid_step())

    @cached_property
    def intensive(self) -> TargetView:
        """The same rows over their extent, with predictions beyond the ignorant forecast."""
        forecast = self.forecast
        assert forecast is not None, "these rows have no ignorant forecast yet"
        distance = self.mean - forecast(self.features)
        if forecast.extent_weight is None:
            return replace(self, mean=distance)
        weight = forecast.extent_weight[None]
        extent = extent_of(self.features, weight)  # (n, 1)
        return replace(
            self,
            residual=self.residual / extent[:, 0],
            q=self.q / extent[:, 0].square(),
            mean=distance / extent[:, 0],
            features=intensive_features(self.features, extent, weight),
        )

    @cached_property
    def held_out(self) -> TargetView:
        """The rows that were not trained on; all rows where there are none."""
        new = ~self.seen
        return self[new] if bool(new.any()) else self

    @cached_property
    def reference(self) -> TargetView:
        """The rows trained on, which fix units and ranges; all rows where they are few."""
        if int(self.seen.sum()) >= REFERENCE_ROWS:
            return self[self.seen]
        return self

    @cached_property
    def informative(self) -> Tensor:
        """Which rows say something about q, (n,): those whose q is not practically zero.

        Features may all be zero (a final ReLU, sums over empty sets), and q with them. A usual q
        is a high quantile of the others.
        """
        positive = self.q[self.q > 1e-12 * self.q.max()]
        if not len(positive):
            return torch.zeros_like(self.seen)
        return self.q > INFORMATIVE * torch.quantile(positive, 0.9)

    @cached_property
    def informative_held_out(self) -> TargetView:
        """The held-out rows that say something about q; all informative rows if none does."""
        held_out = self.informative & ~self.seen
        return self[held_out] if bool(held_out.any()) else self[self.informative]

    @cached_property
    def informative_reference(self) -> TargetView:
        """The reference rows that say something about q; all informative rows if none does."""
        reference = self.informative & self.seen
        if int(self.seen.sum()) >= REFERENCE_ROWS and bool(reference.any()):
            return self[reference]
        return self[self.informative]

    @cached_property
    def usual_q(self) -> Tensor:
        """The mean q of the informative held-out rows; one where there are none."""
        return mean_q(self.informative_held_out.q)

    @cached_property
    def high_q(self) -> Tensor:
        """The q below which nine tenths of the informative reference rows lie."""
        return torch.quantile(self.informative_reference.q, REFERENCE)

    @cached_property
    def mean_square(self) -> Tensor:
        """The mean squared residual of held-out rows, single far ones clipped."""
        return clipped_mean(self.held_out.residual.square())

    def _grid_step(self) -> float:
        """The step of the grid that the targets lie on; 0 where they lie on none.

        On a grid, half of the targets at least are repeated, and the distinct values are apart by a
        fifth of the residuals' root mean square.
        """
        values = self.held_out.target
        values = values[values.isfinite()]  # a target that was bounded is not known
        if len(values) < 4:
            return 0.0
        # The target is prediction plus residual, both in float64.
        rounding = 1e-15 * float(values.abs().max())
        values = values - values.median()
        unit = float(values.abs().max()) * 1e-6 + rounding + 1e-300
        distinct = torch.unique((values / unit).round()) * unit
        if len(distinct) < 2 or len(distinct) > len(values) / 2:
            return 0.0
        step = float(distinct.diff().median())
        return step if step > 0.2 * float(self.mean_square.sqrt()) else 0.0


# --- rows from batches ----------------------------------------------------------------------------


def golden_positions(first: int, count: int, device: torch.device) -> Tensor:
    """Positions of rows in [0, 1), whose comparison with a share picks that share of the rows.

    The rows below the share are evenly spread. Positions are multiples of the golden ratio, which
    have no period in common with the rows, such as one of time steps or outputs.

    Args:
        first: The number of the first row.
        count: How many rows there are.
        device: Where the positions are to be.
    """
    numbers = torch.arange(first, first + count, dtype=torch.float64, device=device)
    return (numbers * _GOLDEN) % 1


def fewer_copies(hashes: Tensor, counts: Tensor, most: int) -> Tensor:
    """How many copies of each distinct row to take, so that there are about `most` rows, (n,).

    Every row's copies become fewer by the same factor, rounded up or down by its hash.

    Args:
        hashes: The hashes of the distinct rows, (n,).
        counts: How many copies there are of each, (n,).
        most: How many rows there may be.
    """
    total = int(counts.sum())
    if total <= most:
        return counts
    # The low bits: rows may have been chosen by the high ones.
    rounding = (hashes & 0xFFFFFFFF).to(torch.float64) / 2**32
    return (counts * (most / total) + rounding).floor().to(torch.int64)


Table = dict[str, Tensor]
"""Some rows, by column: the tensors of `Rows`, and for thinning each row's hash and position."""


class RowCollector:
    """The rows of a pass so far; a bounded number of them is in memory.

    Where there are too many, half of the rows are dropped, and again half of those: the rows of
    higher hash. Copies of a row have one hash and stay or go together, and count as one row of that
    memory; the table then has fewer copies of each row. Rows without hashes are dropped by their
    number (`golden_positions`).

    Attributes:
        sketch: A sketch of the hashes of all rows, which counts the distinct ones; None where
            they are not counted.
    """

    def __init__(self, most: int | None = None, sketch: Any = None) -> None:
        """Begin without rows.

        Args:
            most: Largest number of rows in memory; by default `ROWS`.
            sketch: A sketch of hashes, as `statistics.row_sketch.RowSketch`.
        """
        self.sketch = sketch
        self._most = most or ROWS
        self._pieces: list[Table] = []
        self._batches: list[Table] = []  # the latest ones, not joined yet
        self._rows = 0
        self._share = 1.0  # share of all rows that is in memory
        self._is_hashed = True  # whether all rows have hashes
        self._shape_sum = 0.0
        # How many weights above zero there are, and the sum of their inverses, (2, 1 or K).
        self._weight_sums: Tensor | float = 0.0
        self._samples = 0
        self._duplicates = 0.0

    def add(
        self,
        error: Tensor,
        mean: Tensor,
        power: Tensor,
        *,
        hashes: Tensor | None = None,
        weight: Tensor | None = None,
        shape: Tensor | None = None,
        sample_weight: Tensor | None = None,
        inputs: Tensor | None = None,
        labels: Tensor | None = None,
        distances: Tensor | None = None,
    ) -> None:
        """Add one batch. All batches have the same columns.

        Args:
            error: Target minus prediction, (n, K).
            mean: Predictions, (n, K).
            power: Squared components in the eigenbasis, (n, D), or (n, K, D) where targets have
                features of their own.
            hashes: Hashes of the rows, (n,); None where they have none.
            weight: The rows' weights in the Gram, (n, 1 or K); None for ones.
            shape: The noise's shape, (n, 1 or K); None for ones.
            sample_weight: The user's weights c, (n, 1 or K); None for ones.
            inputs: Features that a noise may follow, (n, P) or (n, K, P).
            labels: Labels of conformal groups, (n, K).
            distances: Squared distances in watched layers, (n, L).

        Raises:
            ValueError: There is NaN or infinity in a row that counts.
        """
        ones = error.new_ones(len(error), 1)
        weight = ones if weight is None else weight.to(error)
        if shape is None:
            noise_factor = ones
            self._shape_sum += len(error)
        else:
            noise_factor = shape.to(error)
            self._shape_sum += float(noise_factor.mean()) * len(error)
        if sample_weight is not None:
            has_weight = sample_weight > 0
            inverse = 1 / sample_weight
            error = torch.where(has_weight, error, torch.nan)
            noise_factor = noise_factor * inverse
            terms = torch.stack([torch.ones_like(inverse), inverse])
            self._weight_sums = self._weight_sums + torch.where(has_weight, terms, 0.0).sum(1)
        _require_finite(error, power, weight)

        if hashes is None:
            self._is_hashed = False
            position = golden_positions(self._rows, len(error), error.device)
            hashes = torch.zeros_like(position, dtype=torch.int64)
        else:
            position = hashes.to(torch.float64) / 2**63  # hashes are evenly spread
        number = torch.arange(self._rows, self._rows + len(error), device=error.device)
        self._rows += len(error)
        columns = {
            "error": error,
            "mean": mean,
            "power": power if power.ndim == 3 else power[:, None],
            "weight": weight,
            "noise_factor": noise_factor,
            "number": number,
            "position": position,
            "hash": hashes,
            "copies": torch.ones_like(hashes),
        }
        if inputs is not None:
            columns["inputs"] = inputs if inputs.ndim == 3 else inputs[:, None]
        if labels is not None:
            columns["labels"] = labels
        if distances is not None:
            columns["distances"] = distances
        self._batches.append(_thinned(columns, self._share))
        numbers = sum(batch["power"].numel() for batch in self._batches)
        if numbers >= _PIECE or len(self._batches) >= _BATCHES:
            self._join()

    def count(self, samples: int, duplicates: float) -> None:
        """Count samples that were compared with the training data, and those found there too."""
        self._samples += samples
        self._duplicates += duplicates

    def merge(self, other: RowCollector) -> RowCollector:
        """Append another's rows to these, and return this gathering."""
        self._join()
        other._join()
        self._is_hashed = self._is_hashed and other._is_hashed
        # Positions of hashes are the same in every pass. By number, rows that were never thinned
        # get the positions that they would have in one pass.
        shift = 0.0
        if not self._is_hashed and other._share == 1:
            shift = self._rows * _GOLDEN
        for piece in other._pieces:
            number = piece["number"] + self._rows
            position = (piece["position"] + shift) % 1
            self._pieces.append({**piece, "number": number, "position": position})
        self._share = min(self._share, other._share)
        self._rows += other._rows
        self._shape_sum += other._shape_sum
        self._weight_sums = self._weight_sums + other._weight_sums
        self._samples += other._samples
        self._duplicates += other._duplicates
        self._pieces = [_thinned(piece, self._share) for piece in self._pieces]
        self._join()
        self.sketch.merge(other.sketch)
        return self

    def settle(self) -> None:
        """Join the latest batches, so that no memory of theirs is sent to another process."""
        self._join()
        if self.sketch is not None:
            self.sketch.settle()

    def table(
        self,
        least: int = 2,
        *,
        to_fit: bool = True,
        trained: bool = False,
        units: Tensor | None = None,
        outputs: int = 1,
    ) -> Rows:
        """The table of all rows that are in memory.

        Args:
            least: How many rows there must be.
            to_fit: Whether something will be fitted to the rows, so that their errors must vary.
            trained: Whether the fit has seen these rows.
            units: The targets' units, (1, K), as in `Rows`; None for ones.
            outputs: How many outputs of a sample are rows, as in `Rows`.

        Raises:
            ValueError: There are too few rows or copies of one alone, or a target is masked or
                predicted exactly in all of them.
        """
        if self._rows < least:
            if not to_fit:
                raise ValueError("There are no rows: conformalize(x, y) needs at least one.")
            raise ValueError(
                f"Calibration needs at least {'two rows' if least == 2 else 'one row'}, got "
                f"{self._rows}. A few dozen rows give a usable scale."
            )
        hashed, distinct = self._hash_counts()
        if to_fit and hashed > 1 and distinct == 1:
            raise ValueError(
                f"All {hashed} rows are copies of one row, so they do not show how errors vary. "
                "Calibrate on different rows."
            )
        self._join()
        self._repeat_copies()
        error = self._column("error")
        if to_fit:
            _check_errors(error, least)
        typical_weight = error.new_ones(1, 1)
        if isinstance(self._weight_sums, Tensor):
            typical_weight = self._weight_sums[:1] / self._weight_sums[1:]
        if units is None:
            units = error.new_ones(1, 1)
        return Rows(
            error=error,
            mean=self._column("mean"),
            power=tuple(piece["power"] for piece in self._pieces),
            weight=self._column("weight"),
            noise_factor=self._column("noise_factor") * typical_weight,
            number=self._column("number"),
            count=self._rows,
            typical_weight=typical_weight,
            trained=trained,
            inputs=self._column_if_any("inputs"),
            labels=self._column_if_any("labels"),
            distances=self._column_if_any("distances"),
            outputs=outputs,
            mean_shape=self._shape_sum / self._rows,
            units=units,
            samples=self._samples,
            duplicates=self._duplicates,
            hashed=hashed,
            distinct=distinct,
        )

    def _column(self, name: str) -> Tensor:
        """One column of all pieces."""
        return torch.cat([piece[name] for piece in self._pieces])

    def _column_if_any(self, name: str) -> Tensor | None:
        """The same; None where the batches have no such column."""
        return self._column(name) if name in self._pieces[0] else None

    def _hash_counts(self) -> tuple[int, int]:
        """How many samples were compared by their hashes, and how many of them are distinct."""
        if self.sketch is None:
            return 0, 0
        self.sketch.settle()
        return int(self.sketch.counts.sum()), len(self.sketch.hashes)

    def _join(self) -> None:
        """Make one piece of the latest batches, and drop rows where there are too many."""
        batches = [batch for batch in self._batches if len(batch["error"])]
        if batches:
            names = batches[0]
            self._pieces.append(
                {name: torch.cat([batch[name] for batch in batches]) for name in names}
            )
        self._batches = []
        if self._is_full() and self._is_hashed:
            self._merge_copies()
        while self._is_full():
            self._share /= 2
            for i, piece in enumerate(self._pieces):  # one by one: two copies would not fit
                self._pieces[i] = _thinned(piece, self._share)

    def _is_full(self) -> bool:
        """Whether there are more rows than may be in memory."""
        return _numbers(self._pieces) > LARGEST or _row_count(self._pieces) > self._most

    def _merge_copies(self) -> None:
        """Make one row of rows of one hash, and count them."""
        hashes = self._column("hash")
        distinct, places = torch.unique(hashes, return_inverse=True)
        if len(distinct) == len(hashes):
            return
        copies = torch.zeros_like(distinct).index_add_(0, places, self._column("copies"))
        numbers = torch.arange(len(hashes), device=hashes.device)
        first = torch.full_like(distinct, len(hashes)).scatter_reduce_(0, places, numbers, "amin")
        is_first = numbers == first[places]
        lengths = [len(piece["hash"]) for piece in self._pieces]
        masks = torch.split(is_first, lengths)
        counts = torch.split(copies[places], lengths)
        for i, piece in enumerate(self._pieces):
            merged = {**piece, "copies": counts[i]}
            self._pieces[i] = {name: column[masks[i]] for name, column in merged.items()}

    def _repeat_copies(self) -> None:
        """Make rows of counted copies again, fewer of each where there are too many."""
        copies = self._column("copies")
        if bool((copies == 1).all()):
            return
        numbers = copies
        if self._is_hashed:
            self._merge_copies()  # those that came since
            copies = self._column("copies")
            most = min(self._most, LARGEST * len(copies) // _numbers(self._pieces))
            numbers = fewer_copies(self._column("hash"), copies, most)
        pieces = torch.split(numbers, [len(piece["hash"]) for piece in self._pieces])
        for i, repeats in enumerate(pieces):
            repeated = {**self._pieces[i], "copies": torch.ones_like(repeats)}
            self._pieces[i] = {
                name: column.repeat_interleave(repeats, 0) for name, column in repeated.items()
            }


def _numbers(pieces: Iterable[Table]) -> int:
    """Number of entries of the pieces; columns that will be joined, all but power, count twice."""
    total = 0
    for piece in pieces:
        total += 2 * sum(column.numel() for column in piece.values()) - piece["power"].numel()
    return total


def _row_count(pieces: Iterable[Table]) -> int:
    """How many rows the pieces have."""
    return sum(len(piece["error"]) for piece in pieces)


def _thinned(columns: Table, share: float) -> Table:
    """The rows whose position is below that share."""
    if share == 1:
        return columns
    below = columns["position"] < share
    return {name: column[below] for name, column in columns.items()}


def _require_finite(error: Tensor, power: Tensor, weight: Tensor) -> None:
    """Refuse NaN and infinity; a NaN error means a masked target where the weight is zero."""
    wrong = (~torch.isfinite(error) & (weight > 0)).any() | ~torch.isfinite(power).all()
    if bool(wrong | torch.isinf(error).any()):
        raise ValueError("NaN or infinity in the features, targets or predictions. Clean the data.")


def _check_errors(error: Tensor, least: int) -> None:
    """Refuse a target whose errors (n, K) are not known, or all zero."""
    for target, column in enumerate(error.unbind(1)):
        which = "" if error.shape[1] == 1 else f" of target {target}"
        finite = column[torch.isfinite(column)]
        if len(finite) < least:
            raise ValueError(
                f"Fewer than two values{which} are known in these data; the others are masked. "
                "Calibrate on rows where every target is known at least twice."
            )
        if not bool(finite.any()):
            raise ValueError(
                f"All residuals{which} are zero: the data are predicted exactly, so there is "
                "nothing to calibrate. Are these the model's own predictions, or a memorised "
                "training set?"
            )
