"""Residuals gathered batch by batch, thinned evenly where they would not fit into memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

LARGEST = 3 << 25
"""Numbers to keep at most (3/4 GiB in float64), and"""
ROWS = 1 << 17
"""rows: beyond either, half of them are dropped. A scale of so many is sure to 0.3 %."""

_PIECE, _BATCHES = 1 << 20, 256
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Residuals:
    """What one pass over data leaves for calibration.

    Attributes:
        error: target minus prediction, (n, K); NaN where a target is masked.
        power: squared components in the Gram's eigenbasis, (n, D), or (n, K, D) per target; in
            pieces, since joining them would take the memory twice.
        weight: weight of each row in the Gram, (n, 1) or (n, K).
        share: what a unit of noise adds to the row's variance, (n, 1) or (n, K): its shape, times
            the typical weight over the user's weight c of the sample.
        unit: mean of that shape.
        typical: harmonic mean of the weights c above zero, (1, 1) or (1, K); 1 without weights.
        rows: how many rows were seen; n may be fewer, evenly thinned to bound the memory.
        samples: how many samples were compared with the training data.
        duplicates: how many of those stand in the training data too.
        kept: what else was asked to be kept of each row, by name, (n, ...); and "number", its place
            in the data.
        hashed: how many samples were told apart by their hashes.
        distinct: how many different ones there were among them.
    """

    error: Tensor
    power: tuple[Tensor, ...]
    weight: Tensor
    share: Tensor
    rows: int
    typical: Tensor
    unit: float = 1.0
    samples: int = 0
    duplicates: float = 0.0
    kept: dict[str, Tensor] = field(default_factory=dict)
    hashed: int = 0
    distinct: int = 0

    @property
    def repeated(self) -> list[str]:
        """That half of the rows or more are copies of others, in a sentence."""
        if 2 * self.distinct > self.hashed or self.hashed < 2:
            return []
        return [
            f"Only {self.distinct} of {self.hashed} calibration rows are distinct: where the rest "
            "are copies, and no observations of their own, the bars rest on those few alone."
        ]

    def picked(self, which: Tensor) -> Residuals:
        """Some of the rows, by booleans (n,)."""
        pieces = zip(self.power, torch.split(which, [len(one) for one in self.power]), strict=True)
        rows = {name: getattr(self, name)[which] for name in ("error", "weight", "share")}
        kept = {name: column[which] for name, column in self.kept.items()}
        power = tuple(piece[mask] for piece, mask in pieces)
        return replace(self, power=power, rows=int(which.sum()), kept=kept, **rows)

    def quadratic(self, eigenvalues: Tensor, ridges: Tensor) -> Tensor:
        """q for each ridge: (n, 1 or K, J)."""
        inverse = 1 / (eigenvalues[..., None] + ridges)
        if inverse.ndim == 2:
            q = torch.cat([piece @ inverse for piece in self.power])
            return q[:, None] if q.ndim == 2 else q
        return torch.cat([torch.einsum("nkd,kdj->nkj", piece, inverse) for piece in self.power])


def places(first: int, count: int, like: Tensor) -> Tensor:
    """Of rows, in [0, 1): those below a threshold are that share of them, evenly spread.

    Multiples of the golden ratio keep step with no period of the rows, of time steps or outputs.
    """
    numbers = torch.arange(first, first + count, dtype=torch.float64, device=like.device)
    return (numbers * _GOLDEN) % 1


class Gathering:
    """The rows of a pass so far; at most so many are kept, and a sketch of all their hashes."""

    def __init__(self, most: int | None = None, sketch: Any = None) -> None:
        self.sketch = sketch
        self._most, self._names = most or ROWS, tuple[str, ...]()
        self._parts: list[tuple[Tensor, ...]] = []
        self._latest: list[tuple[Tensor, ...]] = []
        self._rows, self._kept, self._shapes = 0, 1.0, 0.0
        self._weights: Tensor | float = 0.0  # how many there are above zero, and their inverses
        self._samples, self._duplicates = 0, 0.0

    def add(
        self,
        error: Tensor,
        power: Tensor,
        weight: Tensor | None = None,
        shape: Tensor | None = None,
        importance: Tensor | None = None,
        **kept: Tensor,
    ) -> None:
        """One batch, as `Residuals` has it.

        Args:
            error: (n, K).
            power: (n, D) or (n, K, D).
            weight: in the Gram; None for ones.
            shape: of the noise; None for ones.
            importance: the user's weight c; None for ones.
            kept: more columns, (n, ...), the same in every batch.

        Raises:
            ValueError: NaN or infinity where a row counts.
        """
        one = error.new_ones(len(error), 1)
        weight = one if weight is None else weight.to(error)
        share = one if shape is None else shape.to(error)
        self._shapes += float(share.mean()) * len(error) if shape is not None else len(error)
        if importance is not None:
            counts, inverse = importance > 0, 1 / importance
            error, share = torch.where(counts, error, torch.nan), share * inverse
            both = torch.stack([torch.ones_like(inverse), inverse])
            self._weights = self._weights + torch.where(counts, both, 0.0).sum(1)
        wrong = (~torch.isfinite(error) & (weight > 0)).any() | ~torch.isfinite(power).all()
        if bool(wrong | torch.isinf(error).any()):
            raise ValueError(
                "NaN or infinity in the features, targets or predictions. Clean the data."
            )
        place = places(self._rows, len(error), error)
        number = torch.arange(self._rows, self._rows + len(error), device=error.device)
        self._rows += len(error)
        self._names = (*kept, "number")
        columns = (error, power, weight, share, *kept.values(), number, place)
        self._latest.append(_below(self._kept, columns))
        numbers = sum(part[1].numel() for part in self._latest)
        if numbers >= _PIECE or len(self._latest) >= _BATCHES:
            self._join()

    def count(self, samples: int, duplicates: float) -> None:
        """Samples compared with the training data, and how many stand there too."""
        self._samples += samples
        self._duplicates += duplicates

    def merge(self, other: Gathering) -> Gathering:
        """Take in another's rows, which come after these, and return these."""
        self._join()
        other._join()
        shift = self._rows * _GOLDEN if other._kept == 1 else 0  # as if in one pass
        for *part, number, place in other._parts:
            self._parts.append((*part, number + self._rows, (place + shift) % 1))
        self._names = self._names or other._names
        self._kept = min(self._kept, other._kept)
        for name in ("_rows", "_shapes", "_weights", "_samples", "_duplicates"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._parts = [_below(self._kept, part) for part in self._parts]
        self._join()
        self.sketch.merge(other.sketch)
        return self

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As a header that JSON can hold, and tensors, for other processes."""
        self._join()
        tensors = {
            f"piece.{number}.{place}": column
            for number, piece in enumerate(self._parts)
            for place, column in enumerate(piece)
        }
        if isinstance(self._weights, Tensor):
            tensors["weights"] = self._weights
        if self.sketch is not None:
            tensors |= {f"sketch.{name}": part for name, part in self.sketch.state().items()}
        header = {
            "most": self._most,
            "names": self._names,
            "pieces": [len(piece) for piece in self._parts],
            "rows": self._rows,
            "kept": self._kept,
            "shapes": self._shapes,
            "samples": self._samples,
            "duplicates": self._duplicates,
        }
        return header, tensors

    @classmethod
    def from_state(
        cls, header: dict[str, Any], tensors: dict[str, Tensor], sketch: Any = None
    ) -> Gathering:
        """What `state` came from; `sketch` is that of the rows' hashes."""
        gathering = cls(header["most"], sketch)
        gathering._names = tuple(header["names"])
        gathering._parts = [
            tuple(tensors[f"piece.{number}.{place}"] for place in range(columns))
            for number, columns in enumerate(header["pieces"])
        ]
        gathering._rows, gathering._kept = header["rows"], header["kept"]
        gathering._shapes = header["shapes"]
        gathering._weights = tensors.get("weights", 0.0)
        gathering._samples, gathering._duplicates = header["samples"], header["duplicates"]
        return gathering

    def residuals(self, least: int = 2) -> Residuals:
        """All of them, of which there must be some.

        Raises:
            ValueError: too few rows or copies of one, targets that are all masked or all predicted
                exactly.
        """
        if self._rows < least:
            raise ValueError(
                f"Calibration needs at least {'two rows' if least == 2 else 'one row'}, got "
                f"{self._rows}. A few dozen give a usable scale."
            )
        hashed, distinct = self._counted()
        if hashed > 1 and distinct == 1:
            raise ValueError(
                f"All {hashed} rows are copies of one: they do not say how errors vary. Calibrate "
                "on different rows."
            )
        self._join()
        errors, power, weights, shares, *others, _ = zip(*self._parts, strict=True)
        error, weight, share = map(torch.cat, (errors, weights, shares))
        _check_errors(error, least)
        typical = error.new_ones(1, 1)
        if isinstance(self._weights, Tensor):
            typical = self._weights[:1] / self._weights[1:]
        unit = self._shapes / self._rows
        share = share * typical
        kept = dict(zip(self._names, map(torch.cat, others), strict=True))
        return Residuals(
            error=error,
            power=power,
            weight=weight,
            share=share,
            rows=self._rows,
            typical=typical,
            unit=unit,
            samples=self._samples,
            duplicates=self._duplicates,
            kept=kept,
            hashed=hashed,
            distinct=distinct,
        )

    def _counted(self) -> tuple[int, int]:
        """How many samples were told apart by their hashes, and how many of them are distinct."""
        if self.sketch is None:
            return 0, 0
        self.sketch.settle()
        return int(self.sketch.counts.sum()), len(self.sketch.hashes)

    def _join(self) -> None:
        """Make one piece of the latest batches, and drop rows where there are too many."""
        pieces = zip(*(part for part in self._latest if len(part[0])), strict=True)
        if joined := tuple(torch.cat(piece) for piece in pieces):
            self._parts.append(joined)
        self._latest = []
        while self._held() > LARGEST or sum(len(part[0]) for part in self._parts) > self._most:
            self._kept /= 2
            for i, part in enumerate(self._parts):  # one by one: two copies would not fit
                self._parts[i] = _below(self._kept, part)

    def _held(self) -> int:
        """Numbers, those that will be joined counted twice."""
        return sum(2 * sum(t.numel() for t in part) - part[1].numel() for part in self._parts)


def _below(share: float, part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The rows whose place, the last column, is below that share."""
    return part if share == 1 else tuple(column[part[-1] < share] for column in part)


def _check_errors(error: Tensor, least: int) -> None:
    """Every target must have errors that are known and not all zero."""
    for k, column in enumerate(error.unbind(1)):
        which = "" if error.shape[1] == 1 else f" of target {k}"
        known = column[torch.isfinite(column)]
        if len(known) < least:
            raise ValueError(
                f"Fewer than two values{which} are known in these data: the rest is masked. "
                "Calibrate on rows where every target is known at least twice."
            )
        if not bool(known.any()):
            raise ValueError(
                f"All residuals{which} are zero: the data are predicted exactly, so there is "
                "nothing to calibrate. Are these the model's own predictions, or a memorised "
                "training set?"
            )
