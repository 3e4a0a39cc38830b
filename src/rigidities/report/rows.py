"""The rows that a report is about: prediction, error bar and true value of one target each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..calibration.coverage import ScoredRows, at_bounds, judgeable
from ..calibration.report import CalibrationReport
from ..data.batches import Batch
from ..data.feed import Feed
from ..metrics.alignment import Values, aligned, as_tensor
from ..prediction.prediction import Prediction

MOST_SHOWN = 5_000
"""Rows that a scatter plot shows at most."""
MOST_INPUTS = 12
"""Numbers per input row up to which they are shown beside a point."""
Helps = Callable[[str, str], str]
_HUGE = 1e140
_ALWAYS = 0.05
"""Share of the shown rows that goes to each kind of extreme row."""


@dataclass(frozen=True)
class Rows:
    """All rows of one target.

    Attributes:
        mean: predictions, (N,), float64, as are the others.
        std: their error bars, above zero.
        target: true values.
        name: of the target.
        inputs: further columns by name, shown when one points at a row; (N,) each.
        first: the number of the first row.
        numbers: of all rows, where they do not follow one another.
        prediction: with the distribution that the bars belong to, (N,); of bars alone it is
            Gaussian.
        looks: how many targets are looked at, this one among them.
        distribution: its name, where it is known; without its prediction it has no probabilities.
        calibrated_bar: the constant bar of the calibration rows, their RMS error; None where it
            is not known.
        helps: what helps against a fault, from its name and what the library has against it in
            Python; None for that itself.
        novelty: of the inputs, (N,), where it is known.
    """

    mean: Tensor
    std: Tensor
    target: Tensor
    name: str = "target"
    inputs: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    first: int = 0
    numbers: Sequence[int] = ()
    prediction: Prediction | None = None
    looks: int = 1
    distribution: str = ""
    calibrated_bar: float | None = None
    helps: Helps | None = None
    novelty: Tensor | None = None

    @cached_property
    def own(self) -> Prediction:
        """The prediction, or the Gaussian one of means and bars."""
        plain = Prediction(self.mean, 0 * self.std, self.std.square(), self.std)
        return plain if self.prediction is None else self.prediction

    @cached_property
    def scored(self) -> ScoredRows:
        """Held against the distribution."""
        return ScoredRows.of(self.own, self.target, self.looks)

    @cached_property
    def error(self) -> Tensor:
        """y - mu."""
        return self.target - self.mean

    @property
    def z(self) -> Tensor:
        """(y - mu) / sigma, or the distribution's normal scores."""
        return self.scored.z

    @cached_property
    def standard(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean 0, bar 1 and z: rows of which all coverages are those of the distribution."""
        return torch.zeros_like(self.z), torch.ones_like(self.z), self.z

    @cached_property
    def nll(self) -> Tensor:
        """Negative log-likelihood of each row."""
        return -self.own.log_prob(self.target).detach().double()

    @cached_property
    def constant_bar(self) -> float:
        """The constant bar to compare with: the calibration's, else the RMS error of these rows.

        Of these rows it is the best there can be, since it is fitted to what it is judged on.
        """
        if self.calibrated_bar is not None:
            return self.calibrated_bar
        error = (
            self.scored.error * self.scored.p.std
        )  # of targets at bounds as the distribution has it
        return float(error.square().mean().sqrt())

    @property
    def which_constant(self) -> str:
        """Whose RMS error the constant bar is."""
        if self.calibrated_bar is not None:
            return "the RMS error of the calibration rows"
        return "the RMS error of these very rows"

    @cached_property
    def plain(self) -> Rows:
        """The same rows with one Gaussian bar for all, within the bounds of the distribution."""
        std = torch.full_like(self.std, self.constant_bar)
        rows = replace(self, std=std, prediction=None, distribution="gaussian")
        if self.own.support is None:
            return rows
        bounded = Prediction(self.mean, 0 * std, std.square(), std, support=self.own.support)
        return replace(rows, prediction=bounded)

    def number(self, row: int) -> int:
        """By which a row is called, from its place."""
        return self.numbers[row] if self.numbers else row + self.first

    def without(self, row: int) -> Rows:
        """All rows but one."""
        kept = torch.arange(len(self)) != row
        prediction = None if self.prediction is None else self.prediction[kept]
        mean, std, target = (part[kept] for part in (self.mean, self.std, self.target))
        return replace(
            self,
            mean=mean,
            std=std,
            target=target,
            inputs={},
            numbers=(),
            prediction=prediction,
            novelty=None if self.novelty is None else self.novelty[kept],
        )

    @property
    def spread(self) -> bool:
        """Whether the bars differ at all."""
        return bool(self.std.max() > self.std.min() * (1 + 1e-9))

    def __len__(self) -> int:
        return len(self.mean)


def rows_of(
    mean: Values,
    std: Values,
    target: Values,
    *,
    names: Sequence[str] | None = None,
    inputs: Mapping[str, Sequence[Any]] | Values | None = None,
    first: int = 0,
) -> list[Rows]:
    """Checked rows, one entry per target; arguments as the attributes of `Rows`, all of them.

    (N,) and (N, 1) are one target, (N, K) are K; of anything larger every number is a row of one
    target. `inputs` may be an array (N, D) too; a prediction as `mean` stands for its bars too.

    Raises:
        ValueError: shapes that differ, values that are not finite, bars that are not above zero,
            or names or inputs that do not fit.
    """
    if isinstance(mean, Prediction):
        p, y = mean.to("cpu"), as_tensor(target).cpu()
        y = y.reshape(_shape_for(y, p.mean))
        parts = rows_of(p.mean, p.std, y, names=names, inputs=inputs, first=first)
        if p.novelty is not None:
            parts = _with_novelty(parts, p.novelty)
        return _under_distribution(parts, p, y)
    shape = shape_of(mean)
    targets = shape[1] if len(shape) == 2 else 1
    # under another name, so that a bar below zero is left to the check that names its row
    flat = aligned(mean=mean, bar=std, target=target)
    columns = [part.reshape(-1, targets) for part in flat]
    _check_positive(columns[1], first)
    _check_squares(columns, first)
    names = _checked_names(names, targets)
    full = _for_each_row(_named_inputs(inputs), len(columns[0]), shape)
    by_target = zip(*(part.T.contiguous() for part in columns), names, strict=True)
    return [Rows(m, s, y, name, full, first, looks=targets) for m, s, y, name in by_target]


def _with_novelty(rows: list[Rows], novelty: Tensor) -> list[Rows]:
    """Rows with the novelty (shaped like the prediction) of their inputs, shown beside these."""
    columns = novelty.double().reshape(-1, len(rows)).T
    found = []
    for part, column in zip(rows, columns, strict=True):
        shown = [round(value, 2) for value in column.tolist()]
        found.append(replace(part, novelty=column, inputs={"novelty": shown, **part.inputs}))
    return found


def _under_distribution(rows: list[Rows], p: Prediction, target: Tensor) -> list[Rows]:
    """With their predictions, where these have probabilities, and targets exactly at bounds."""
    rows = [replace(part, distribution=p.distribution.name) for part in rows]
    if (p.distribution.name == "gaussian" and p.support is None) or not judgeable(p):
        return rows
    flat, y = p[torch.ones_like(p.mean, dtype=torch.bool)], at_bounds(p, target)[0].flatten()
    places = torch.arange(len(y)).reshape(-1, len(rows)).T
    pairs = zip(rows, places, strict=True)
    return [replace(part, prediction=flat[at], target=y[at]) for part, at in pairs]


def shown(rows: Rows, most: int = MOST_SHOWN) -> Tensor:
    """Which rows a scatter plot shows, ascending: all, or a sample with the extreme ones.

    The rows of largest bar, of largest error and of largest |z| are always there.
    """
    return thinned([rows.std, rows.error.abs(), rows.z.abs()], most)


def thinned(keys: Sequence[Tensor], most: int) -> Tensor:
    """At most so many positions: those where a key is large, and a repeatable sample of the rest.

    Examples:
        >>> kept = thinned([torch.arange(1000.0)], 40)
        >>> len(kept), kept[-2:].tolist()
        (40, [998, 999])
    """
    count = len(keys[0])
    if count <= most:
        return torch.arange(count)
    each = max(1, int(_ALWAYS * most))
    extreme = torch.zeros(count, dtype=torch.bool)
    for key in keys:
        extreme[key.topk(each).indices] = True
    kept, candidates = extreme.nonzero()[:, 0], (~extreme).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(0))
    return torch.cat([kept, candidates[order[: most - len(kept)]]]).sort().values


def shape_of(values: Values) -> tuple[int, ...]:
    """The shape of an array, a tensor or nested lists."""
    return tuple(values.shape if hasattr(values, "shape") else torch.as_tensor(values).shape)


def _check_positive(std: Tensor, first: int) -> None:
    bad = (std <= 0).any(1).nonzero()[:, 0]
    if len(bad):
        value = float(std[bad[0]].min())
        more = f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else ""
        raise ValueError(
            f"Expected std > 0, got {value:g} in row {int(bad[0]) + first}{more}. "
            "Drop those rows or add a noise floor to the variance."
        )


def _check_squares(columns: Sequence[Tensor], first: int) -> None:
    """Bars, errors and their ratios must have squares that float64 can hold."""
    std, error = columns[1], (columns[2] - columns[0]).abs()
    wrong = (std < 1 / _HUGE) | (std > _HUGE) | (error > _HUGE * std.clamp(max=1))
    if len(bad := wrong.nonzero()):
        raise ValueError(
            f"Expected bars from {1 / _HUGE:g} to {_HUGE:g} and errors of up to {_HUGE:g} bars, "
            f"whose squares are still numbers, got others in row {int(bad[0, 0]) + first}. Pass "
            "predictions, bars and true values in another unit, or mend what made them."
        )


def _checked_names(names: Sequence[str] | None, targets: int) -> list[str]:
    if names is None:
        return ["target"] if targets == 1 else [f"target {k}" for k in range(targets)]
    if isinstance(names, str) or len(names) != targets:
        raise ValueError(f"Expected {targets} names, one for each target, got {names!r}.")
    return [str(name) for name in names]


def _named_inputs(inputs: Mapping[str, Sequence[Any]] | Values | None) -> dict[str, list[Any]]:
    if inputs is None:
        return {}
    if isinstance(inputs, Mapping):
        return {str(key): _listed(values) for key, values in inputs.items()}
    array: Any = inputs if hasattr(inputs, "ndim") else torch.as_tensor(inputs)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise ValueError(
            f"Expected inputs by name, or of shape (N, D), got shape {tuple(array.shape)}."
        )
    return {f"input {k}": _listed(array[:, k]) for k in range(array.shape[1])}


def _for_each_row(
    named: Mapping[str, list[Any]], count: int, shape: tuple[int, ...]
) -> dict[str, list[Any]]:
    """Inputs of the rows; of a sample with several rows, each carries the sample's inputs."""
    samples = shape[0] if len(shape) >= 3 else count
    for key, values in named.items():
        if len(values) not in (count, samples):
            each = "one for each row" if samples == count else f"or {samples}, one for each sample"
            raise ValueError(
                f"Expected {count} values in the input {key!r}, {each}, got {len(values)}."
            )
    return {
        key: [value for value in values for _ in range(count // len(values))]
        for key, values in named.items()
    }


def _listed(values: Any) -> list[Any]:
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


# --- of an object with error bars, in one pass over labelled data ------------------------------


class Bars(Protocol):
    """What a report asks of an object with error bars; `LastLayerRigidity` has it."""

    @property
    def report(self) -> CalibrationReport | None:
        """How it was calibrated."""

    def predict(self, data: Any, *, progress: bool | None = None) -> Prediction:
        """Means and error bars of inputs or batches."""

    @property
    def feed(self) -> Feed:
        """How data reach the model."""


def labelled(bars: Bars, data: Any, progress: bool | None = None) -> dict[str, Any]:
    """Predictions and targets as `html` takes them, with inputs that are few numbers a row.

    One pass, so that a loader may shuffle and an iterator may end.

    Raises:
        ValueError: there are no data, or they have no target.
    """
    parts: list[Prediction] = []
    targets: list[Tensor] = []
    inputs: list[Tensor | None] = []
    for batch in bars.feed(data, "report", progress=progress):
        if batch.target is None:
            raise ValueError(
                "Expected labelled data, got batches without a target. Pass (x, y), or give the "
                "model's wrapper target=lambda batch: ...."
            )
        parts.append(bars.predict([batch.raw], progress=False).to("cpu"))
        mean, y = parts[-1].mean, batch.target.cpu()
        targets.append(y.reshape(_shape_for(y, mean)))
        inputs.append(_few_numbers(batch))
    if not parts:
        raise ValueError("Expected labelled data, got none.")
    found = {"mean": Prediction.concatenate(parts), "target": torch.cat(targets)}
    known = [part for part in inputs if part is not None]
    return found | {"inputs": torch.cat(known) if len(known) == len(inputs) else None}


def _shape_for(target: Tensor, mean: Tensor) -> tuple[int, ...]:
    """The shape of the prediction, where the target differs by dimensions of size one alone."""
    if target.squeeze().shape != mean.squeeze().shape:
        raise ValueError(
            f"Expected targets shaped like the predictions, {tuple(mean.shape)}, "
            f"got {tuple(target.shape)}."
        )
    return tuple(mean.shape)


def _few_numbers(batch: Batch) -> Tensor | None:
    """The inputs as (N, D), if that is what they are and D is small."""
    x: Any = batch.args[0] if len(batch.args) == 1 and not batch.kwargs else None
    few = isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] <= MOST_INPUTS
    return x.detach().cpu() if few else None
