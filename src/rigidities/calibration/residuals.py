r"""The rows of a calibration: residuals of all targets, gathered in one pass over the data.

`Gathering` takes batch after batch of residuals and of the features' squared components in the
Gram's eigenbasis, and thins the rows evenly where they would not fit into memory. Gatherings of
several processes merge to one. `Residuals` is the table that it leaves: everything that `search`
and `full_model` need, for every ridge, since $q(s) = P\,(\lambda + s)^{-1}$ with the squared
components P and the eigenvalues $\lambda$.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["Gathering", "Residuals"]

LARGEST = 3 << 25
"""Largest number of entries in memory, 3/4 GiB in float64. Beyond it half the rows are dropped."""
ROWS = 1 << 17
"""Largest number of rows in memory. They give the scale to within 0.3 %."""

_PIECE = 1 << 20
"""Number of squared components at which batches are joined into one piece."""
_BATCHES = 256
"""Number of batches at which they are joined into one piece at the latest."""
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Residuals:
    """What one pass over data leaves for calibration: a table of n rows and K targets.

    Attributes:
        error: Target minus prediction, (n, K); NaN where a target is masked.
        power: Squared components of the features in the Gram's eigenbasis, (n, D), or (n, K, D)
            where targets have features of their own. It is a tuple of pieces, whose rows follow one
            another, since joining them would take the memory twice.
        weight: The weight of each row in the Gram, (n, 1) or (n, K).
        noise_factor: What a unit of noise adds to the row's variance, (n, 1) or (n, K): the noise's
            shape, times the typical weight over the user's weight c of the sample.
        rows: How many rows the data have; n is smaller where they were thinned.
        typical_weight: The harmonic mean of the weights c above zero, (1, 1) or (1, K); 1 without
            weights.
        mean_shape: The mean of the noise's shape.
        samples: How many samples were compared with the training data.
        duplicates: How many of those are in the training data too.
        extra: Further columns, by name, (n, ...): those that were given to `Gathering.add`, and
            "number", the row's place in the data.
        hashed: How many samples were compared with one another by their hashes.
        distinct: How many of these differ from one another.
        units: The factor in the weights in the Gram that brings each target to its own unit, (1, 1)
            or (1, K); 1 where targets count as they are.
    """

    error: Tensor
    power: tuple[Tensor, ...]
    weight: Tensor
    noise_factor: Tensor
    rows: int
    typical_weight: Tensor
    mean_shape: float = 1.0
    samples: int = 0
    duplicates: float = 0.0
    extra: dict[str, Tensor] = field(default_factory=dict)
    hashed: int = 0
    distinct: int = 0
    units: Tensor = field(default_factory=lambda: torch.ones(1, 1, dtype=torch.float64))

    @property
    def typical_weight_in_gram(self) -> Tensor:
        """The typical weight c times the units, (1, 1) or (1, K).

        In the least-squares problem behind q, noise of one adds its inverse to a row's variance.
        """
        return self.typical_weight * self.units.to(self.typical_weight)

    @property
    def repeated(self) -> list[str]:
        """A sentence that half of the rows or more are copies of others; none where fewer are."""
        if 2 * self.distinct > self.hashed or self.hashed < 2:
            return []
        return [
            f"Only {self.distinct} of {self.hashed} calibration rows are distinct. If the others "
            "are copies rather than independent observations, the bars rest on those few rows."
        ]

    def subset(self, mask: Tensor) -> Residuals:
        """The rows that a mask (n,) of booleans selects."""
        masks = torch.split(mask, [len(piece) for piece in self.power])
        power = tuple(piece[chosen] for piece, chosen in zip(self.power, masks, strict=True))
        return replace(
            self,
            error=self.error[mask],
            power=power,
            weight=self.weight[mask],
            noise_factor=self.noise_factor[mask],
            rows=int(mask.sum()),
            extra={name: column[mask] for name, column in self.extra.items()},
        )

    def quadratic(self, eigenvalues: Tensor, ridges: Tensor) -> Tensor:
        """The unscaled variances q for each ridge (J,): (n, 1 or K, J)."""
        inverse = 1 / (eigenvalues[..., None] + ridges)  # (D, J) or (K, D, J)
        if inverse.ndim == 3:
            return torch.cat([torch.einsum("nkd,kdj->nkj", piece, inverse) for piece in self.power])
        q = torch.cat([piece @ inverse for piece in self.power])
        return q[:, None] if q.ndim == 2 else q

    def quadratic_at(self, eigenvalues: Tensor, ridge: float) -> Tensor:
        """The unscaled variances q at one ridge, (n, 1 or K)."""
        return self.quadratic(eigenvalues, eigenvalues.new_tensor([ridge]))[..., 0]


MISMATCHED = 3.0
"""Times the training rows' errors beyond which errors of the calibration rows are suspicious."""
_NO_BETTER = 1.1
"""Times the spread of the targets beyond which errors are no better than those of a constant."""
_FEWEST = 20
"""With fewer rows, a few bad predictions could decide."""


def mismatch(rows: Residuals, training_mean: Tensor, training_error: Tensor) -> str:
    """A sentence where the rows' targets do not seem to belong to their inputs; else empty.

    Errors far larger than those of the training rows are not enough: a network may have memorised
    its training rows. But even such a network predicts better than a constant. Targets in another
    order have errors of 1.4 times their spread, and targets in another unit, by a factor of two or
    more, have errors larger than the smaller of the two spreads. Medians of absolute errors must
    differ as much as RMS errors, so that single rows cannot decide.

    Args:
        rows: The calibration rows, with the extra column "mean".
        training_mean: Predictions of some training rows, (m, K).
        training_error: Their errors, target minus prediction, (m, K); NaN where masked.
    """
    sentences = []
    targets = rows.error.shape[1]
    for k in range(targets):
        known = rows.error[:, k].isfinite()
        training_known = training_error[:, k].isfinite()
        error = rows.error[known, k]
        seen_error = training_error[training_known, k].to(error)
        if len(error) < _FEWEST or len(seen_error) < _FEWEST:
            continue
        target = rows.extra["mean"][known, k].to(error) + error
        seen_target = training_mean[training_known, k].to(error) + seen_error
        spread = min(float(target.std()), float(seen_target.std()))
        is_typical = error.abs().median() > MISMATCHED * seen_error.abs().median()
        is_far_larger = _rms(error) > MISMATCHED * _rms(seen_error)
        is_no_better = _rms(error) > _NO_BETTER * spread
        if not (bool(is_typical) and is_far_larger and is_no_better):
            continue
        which = f"Target {k}: " if targets > 1 else ""
        sentences.append(
            f"{which}The calibration rows have an RMS error of {_rms(error):.3g}, the training "
            f"rows of {_rms(seen_error):.3g}. One constant prediction would be better. Check that "
            "the calibration targets are in the same order as their inputs, and in the same unit "
            "as in the fit. If they are, the model has memorised its training rows, or these rows "
            "are unlike them."
        )
    return " ".join(sentences)


def _rms(values: Tensor) -> float:
    """The root mean square of values (n,)."""
    return float(values.square().mean().sqrt())


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


Columns = dict[str, Tensor]
"""Some rows, by column: error, power, weight, noise_factor, the extra ones, number, position."""

_STANDARD_COLUMNS = ("error", "power", "weight", "noise_factor", "position")
"""Columns that do not go into `Residuals.extra`."""


class Gathering:
    """The rows of a pass so far; a bounded number of them is in memory.

    Attributes:
        sketch: A sketch of the hashes of all rows, which counts the distinct ones; None where
            they are not counted.
    """

    def __init__(self, most: int | None = None, sketch: Any = None) -> None:
        """Begin without rows.

        Args:
            most: Largest number of rows in memory; by default `ROWS`.
            sketch: A sketch of hashes, as `data.sketch.RowSketch`.
        """
        self.sketch = sketch
        self._most = most or ROWS
        self._pieces: list[Columns] = []
        self._batches: list[Columns] = []  # the latest ones, not joined yet
        self._rows = 0
        self._share = 1.0  # share of all rows that is in memory
        self._shape_sum = 0.0
        # How many weights above zero there are, and the sum of their inverses, (2, 1 or K).
        self._weight_sums: Tensor | float = 0.0
        self._samples = 0
        self._duplicates = 0.0

    def add(
        self,
        error: Tensor,
        power: Tensor,
        weight: Tensor | None = None,
        shape: Tensor | None = None,
        importance: Tensor | None = None,
        **extra: Tensor,
    ) -> None:
        """Add one batch, whose columns are as in `Residuals`.

        Args:
            error: Target minus prediction, (n, K).
            power: Squared components in the eigenbasis, (n, D) or (n, K, D).
            weight: The rows' weights in the Gram; None for ones.
            shape: The noise's shape; None for ones.
            importance: The user's weights c; None for ones.
            extra: Further columns, (n, ...), the same in every batch.

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
        if importance is not None:
            has_weight = importance > 0
            inverse = 1 / importance
            error = torch.where(has_weight, error, torch.nan)
            noise_factor = noise_factor * inverse
            terms = torch.stack([torch.ones_like(inverse), inverse])
            self._weight_sums = self._weight_sums + torch.where(has_weight, terms, 0.0).sum(1)
        _require_finite(error, power, weight)

        position = golden_positions(self._rows, len(error), error.device)
        number = torch.arange(self._rows, self._rows + len(error), device=error.device)
        self._rows += len(error)
        columns = {
            "error": error,
            "power": power,
            "weight": weight,
            "noise_factor": noise_factor,
            **extra,
            "number": number,
            "position": position,
        }
        self._batches.append(_thinned(columns, self._share))
        numbers = sum(batch["power"].numel() for batch in self._batches)
        if numbers >= _PIECE or len(self._batches) >= _BATCHES:
            self._join()

    def count(self, samples: int, duplicates: float) -> None:
        """Count samples that were compared with the training data, and those found there too."""
        self._samples += samples
        self._duplicates += duplicates

    def merge(self, other: Gathering) -> Gathering:
        """Append another's rows to these, and return this gathering."""
        self._join()
        other._join()
        # Rows that were never thinned get the positions that they would have in one pass.
        shift = self._rows * _GOLDEN if other._share == 1 else 0
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

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The gathering as a header that JSON can hold, and tensors, for other processes."""
        self._join()
        tensors = {}
        for number, piece in enumerate(self._pieces):
            for name, column in piece.items():
                tensors[f"piece.{number}.{name}"] = column
        if isinstance(self._weight_sums, Tensor):
            tensors["weights"] = self._weight_sums
        if self.sketch is not None:
            for name, tensor in self.sketch.state().items():
                tensors[f"sketch.{name}"] = tensor
        header = {
            "most": self._most,
            "pieces": [list(piece) for piece in self._pieces],
            "rows": self._rows,
            "share": self._share,
            "shapes": self._shape_sum,
            "samples": self._samples,
            "duplicates": self._duplicates,
        }
        return header, tensors

    @classmethod
    def from_state(
        cls, header: dict[str, Any], tensors: dict[str, Tensor], sketch: Any = None
    ) -> Gathering:
        """The gathering that `state` came from; `sketch` is that of the rows' hashes."""
        gathering = cls(header["most"], sketch)
        for number, names in enumerate(header["pieces"]):
            piece = {name: tensors[f"piece.{number}.{name}"] for name in names}
            gathering._pieces.append(piece)
        gathering._rows = header["rows"]
        gathering._share = header["share"]
        gathering._shape_sum = header["shapes"]
        gathering._weight_sums = tensors.get("weights", 0.0)
        gathering._samples = header["samples"]
        gathering._duplicates = header["duplicates"]
        return gathering

    def residuals(self, least: int = 2) -> Residuals:
        """The table of all rows that are in memory.

        Args:
            least: How many rows there must be.

        Raises:
            ValueError: There are too few rows or copies of one alone, or a target is masked or
                predicted exactly in all of them.
        """
        if self._rows < least:
            raise ValueError(
                f"Calibration needs at least {'two rows' if least == 2 else 'one row'}, got "
                f"{self._rows}. A few dozen rows give a usable scale."
            )
        hashed, distinct = self._hash_counts()
        if hashed > 1 and distinct == 1:
            raise ValueError(
                f"All {hashed} rows are copies of one row, so they do not show how errors vary. "
                "Calibrate on different rows."
            )
        self._join()
        error = self._column("error")
        _check_errors(error, least)
        typical_weight = error.new_ones(1, 1)
        if isinstance(self._weight_sums, Tensor):
            typical_weight = self._weight_sums[:1] / self._weight_sums[1:]
        extra_names = [name for name in self._pieces[0] if name not in _STANDARD_COLUMNS]
        return Residuals(
            error=error,
            power=tuple(piece["power"] for piece in self._pieces),
            weight=self._column("weight"),
            noise_factor=self._column("noise_factor") * typical_weight,
            rows=self._rows,
            typical_weight=typical_weight,
            mean_shape=self._shape_sum / self._rows,
            samples=self._samples,
            duplicates=self._duplicates,
            extra={name: self._column(name) for name in extra_names},
            hashed=hashed,
            distinct=distinct,
        )

    def _column(self, name: str) -> Tensor:
        """One column of all pieces."""
        return torch.cat([piece[name] for piece in self._pieces])

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
        while _numbers(self._pieces) > LARGEST or _row_count(self._pieces) > self._most:
            self._share /= 2
            for i, piece in enumerate(self._pieces):  # one by one: two copies would not fit
                self._pieces[i] = _thinned(piece, self._share)


def _numbers(pieces: Iterable[Columns]) -> int:
    """Number of entries of the pieces; columns that will be joined, all but power, count twice."""
    total = 0
    for piece in pieces:
        total += 2 * sum(column.numel() for column in piece.values()) - piece["power"].numel()
    return total


def _row_count(pieces: Iterable[Columns]) -> int:
    """How many rows the pieces have."""
    return sum(len(piece["error"]) for piece in pieces)


def _thinned(columns: Columns, share: float) -> Columns:
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
