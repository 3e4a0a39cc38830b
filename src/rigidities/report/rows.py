"""The rows that a report is about: one prediction, one error bar and one true value each.

`target_rows` takes what a user passes (a `Prediction`, or arrays of means and bars, with the true
values), checks it and cuts it into one `TargetRows` for each target. Everything else in this room
reads these: metrics (`scores`), findings and cautions (`judgement`, `cautions`) and plots
(`figures`).

`labelled_prediction` makes predictions and true values from a fitted object and labelled data, in
one pass. `rows_to_show` picks the rows that a scatter plot shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..calibration.coverage import ScoredRows, at_bounds, judgeable
from ..data.batches import Batch, Reader
from ..data.sources import raw_batches
from ..last_layer.doors import feed_of
from ..last_layer.rigidity import LastLayerRigidity
from ..metrics.alignment import Values, aligned, as_tensor
from ..prediction.prediction import Prediction

MOST_SHOWN = 5_000
"""A scatter plot shows this many rows at most."""
MOST_INPUTS = 12
"""Inputs with up to this many numbers per row are shown beside a point."""
Advice = Callable[[str, str], str]
"""A function (fault, library's remedy) -> the remedy to show, as a sentence."""
_BARS_WANTED_ONCE = "Expected a Prediction without std=, or means with std=."
_LARGEST = 1e140
"""Bars up to this size, and errors of up to this many bars, have finite squares in float64."""
_EXTREME_SHARE = 0.05
"""Share of the shown rows that is reserved for each kind of extreme row."""


@dataclass(frozen=True)
class TargetRows:
    """All rows of one target.

    Attributes:
        mean: Predictions, (N,). All tensors are float64.
        std: Error bars, (N,), above zero.
        target: True values, (N,).
        name: Name of the target.
        inputs: Further columns by name, N values each, which are shown when one points at a row.
        first_row: Number of the first row.
        row_numbers: Numbers of all rows, where they are not consecutive.
        prediction: The prediction whose distribution the bars belong to, (N,); None for Gaussians
            with these means and bars.
        target_count: How many targets are judged together, including this one. Probabilities of
            chance findings are divided by it.
        distribution: Name of the distribution, where it is known. It may be known although
            `prediction` is None: a distribution without probabilities is judged as a Gaussian.
        calibrated_bar: Constant bar of the calibration rows, which is their RMS error. None where
            it is not known.
        advice: Returns the sentence on what helps against a fault; None for the library's own
            sentence, which is for use in Python.
        novelty: Novelty of the inputs, (N,), where it is known.
    """

    mean: Tensor
    std: Tensor
    target: Tensor
    name: str = "target"
    inputs: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    first_row: int = 0
    row_numbers: Sequence[int] = ()
    prediction: Prediction | None = None
    target_count: int = 1
    distribution: str = ""
    calibrated_bar: float | None = None
    advice: Advice | None = None
    novelty: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mean)

    @cached_property
    def predictive(self) -> Prediction:
        """The prediction, or the Gaussian one of means and bars."""
        if self.prediction is not None:
            return self.prediction
        return _gaussian(self.mean, self.std)

    @cached_property
    def scored(self) -> ScoredRows:
        """The true values compared with their distributions."""
        return ScoredRows.of(self.predictive, self.target, self.target_count)

    @cached_property
    def error(self) -> Tensor:
        """y - mu, (N,)."""
        return self.target - self.mean

    @property
    def z(self) -> Tensor:
        """(y - mu) / sigma, or the normal scores of the distribution, (N,)."""
        return self.scored.z

    @cached_property
    def standardised(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean 0, bar 1 and true value z: Gaussian rows with the coverages of the distribution."""
        return torch.zeros_like(self.z), torch.ones_like(self.z), self.z

    @cached_property
    def nll(self) -> Tensor:
        """Negative log-likelihood of each row, (N,)."""
        return -self.predictive.log_prob(self.target).detach().double()

    @cached_property
    def constant_bar(self) -> float:
        """The constant bar to compare with: the calibration's, else the RMS error of these rows.

        No constant bar beats that of these rows, since it is fitted to what it is judged on.
        """
        if self.calibrated_bar is not None:
            return self.calibrated_bar
        # In `scored`, a target at a bound is replaced by a draw from beyond the bound.
        error = self.scored.error * self.scored.p.std
        return float(error.square().mean().sqrt())

    @property
    def constant_bar_source(self) -> str:
        """The rows whose RMS error the constant bar is, in words."""
        if self.calibrated_bar is not None:
            return "the RMS error of the calibration rows"
        return "the RMS error of these rows"

    @cached_property
    def with_constant_bar(self) -> TargetRows:
        """The same rows with one Gaussian bar for all, within the bounds of the distribution."""
        std = torch.full_like(self.std, self.constant_bar)
        support = self.predictive.support
        prediction = None
        if support is not None:
            prediction = replace(_gaussian(self.mean, std), support=support)
        return replace(self, std=std, prediction=prediction, distribution="gaussian")

    @property
    def bars_differ(self) -> bool:
        """Whether the bars differ at all."""
        return bool(self.std.max() > self.std.min() * (1 + 1e-9))

    def row_number(self, position: int) -> int:
        """The number shown for the row at a position."""
        if self.row_numbers:
            return self.row_numbers[position]
        return position + self.first_row

    def without(self, position: int) -> TargetRows:
        """All rows but one, for metrics only: inputs and row numbers are left out."""
        others = torch.arange(len(self)) != position
        prediction = None if self.prediction is None else self.prediction[others]
        novelty = None if self.novelty is None else self.novelty[others]
        return replace(
            self,
            mean=self.mean[others],
            std=self.std[others],
            target=self.target[others],
            inputs={},
            row_numbers=(),
            prediction=prediction,
            novelty=novelty,
        )


def _gaussian(mean: Tensor, std: Tensor) -> Prediction:
    """The Gaussian prediction with these means and bars; its rigidity is never used."""
    return Prediction(mean=mean, epistemic=0 * std, noise=std.square(), rigidity=std)


# --- from what a user passes -------------------------------------------------------------------


def target_rows(
    prediction: Prediction | Values,
    target: Any,
    *,
    std: Values | None = None,
    names: Sequence[str] | None = None,
    inputs: Mapping[str, Sequence[Any]] | Values | None = None,
    first_row: int = 0,
    row_numbers: Sequence[int] = (),
) -> list[TargetRows]:
    """Check what the user passes, and split it into the rows of each target.

    (N,) and (N, 1) are one target, and (N, K) are K targets. In an array with more dimensions,
    every number is a row of one target.

    Args:
        prediction: What `predict` returned, or means.
        target: True values of the same shape, or labelled data that contain them.
        std: Error bars of means, of the same shape. A `Prediction` has its own.
        names: Names of the targets.
        inputs: Further columns by name, or an array (N, D).
        first_row: Number of the first row.
        row_numbers: Numbers of all rows, where they are not consecutive.

    Returns:
        The rows of each target.

    Raises:
        TypeError: There are means without bars, or a `Prediction` and bars.
        ValueError: Shapes differ, values are not finite, bars are not above zero, or names or
            inputs do not fit.
    """
    target = true_values(target, prediction)
    if isinstance(prediction, Prediction):
        if std is not None:
            raise TypeError(_BARS_WANTED_ONCE)
        return _rows_of_prediction(
            prediction, target, names, inputs, first_row=first_row, row_numbers=row_numbers
        )
    if std is None:
        raise TypeError(_BARS_WANTED_ONCE)
    return _rows_of_arrays(
        prediction, std, target, names, inputs, first_row=first_row, row_numbers=row_numbers
    )


def true_values(target: Any, prediction: Prediction | Values) -> Values:
    """The true values in what the user passes: values, or labelled data in any form.

    Args:
        target: Values; or a data set, a loader, or batches, whose targets are joined in order.
        prediction: What they are the true values of.

    Raises:
        TypeError: A batch is of a type that only a user's function can take apart.
        ValueError: A loader shuffles its rows, or batches have no target.
    """
    mean = prediction.mean if isinstance(prediction, Prediction) else prediction
    if not _is_labelled(target, shape_of(mean)):
        values: Values = target
        return values
    if isinstance(target, DataLoader) and _shuffles(target):
        raise ValueError(
            f"This DataLoader shuffles ({type(target.sampler).__name__}): its targets come in "
            "another order than those of the prediction. Use shuffle=False in both calls, or pass "
            "uq and the loader to rg.report.write, which reads every row once."
        )
    raw = raw_batches(target)
    reader = Reader(torch.device("cpu"), torch.float64)
    targets = []
    try:
        for batch in reader.batches(raw.batches, None, raw.sliced):
            if batch.target is None:
                raise ValueError(
                    "Expected true values, got batches without a target. Pass the true values "
                    "themselves, one for each prediction, or batches (x, y)."
                )
            targets.append(batch.target)
    except TypeError as error:
        raise TypeError(
            "Expected true values, or batches that contain them: (x, y) or mappings. Got batches "
            "of another type. Pass the true values themselves, for example torch.cat([batch.y for "
            "batch in loader])."
        ) from error
    if not targets:
        raise ValueError("Expected true values, got none. Pass one for each prediction.")
    return torch.cat(targets)


def _is_labelled(target: Any, shape: tuple[int, ...]) -> bool:
    """Whether something is data with targets in it, rather than values of this shape."""
    if isinstance(target, (Dataset, DataLoader, Mapping, Iterator)):
        return True
    if isinstance(target, tuple):  # (x, y) is a data set, a tuple of all rows is not
        return 1 < len(target) != shape[0] and all(map(_has_rows, target))
    if not isinstance(target, list) or not target:
        return False
    first = target[0]
    if isinstance(first, (tuple, list)):  # lists of numbers are values
        return any(map(_has_rows, first))
    return not isinstance(first, str) and not hasattr(first, "__float__")


def _has_rows(value: Any) -> bool:
    """Whether a value is a tensor or an array with at least one dimension."""
    return bool(getattr(value, "shape", None))


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Whether a loader gives its rows in another order each time."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    random = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return any(isinstance(sampler, random) for sampler in samplers)


def _rows_of_prediction(
    prediction: Prediction,
    target: Values,
    names: Sequence[str] | None,
    inputs: Mapping[str, Sequence[Any]] | Values | None,
    *,
    first_row: int,
    row_numbers: Sequence[int],
) -> list[TargetRows]:
    """Check a prediction, and cut it into rows with its distribution, one entry per target."""
    prediction = prediction.to("cpu")
    true_values = as_tensor(target).cpu()
    true_values = true_values.reshape(_shape_of_prediction(true_values, prediction.mean))
    rows = _rows_of_arrays(
        prediction.mean,
        prediction.std,
        true_values,
        names,
        inputs,
        first_row=first_row,
        row_numbers=row_numbers,
    )
    rows = _with_novelty(rows, prediction.novelty)
    return _with_distribution(rows, prediction, true_values)


def _rows_of_arrays(
    mean: Values,
    std: Values,
    target: Values,
    names: Sequence[str] | None,
    inputs: Mapping[str, Sequence[Any]] | Values | None,
    *,
    first_row: int,
    row_numbers: Sequence[int],
) -> list[TargetRows]:
    """Check arrays, and cut them into the rows of Gaussian predictions, one entry per target."""
    shape = shape_of(mean)
    target_count = shape[1] if len(shape) == 2 else 1
    # The bars are passed under another name than "std", so that a bar below zero is left to
    # `_check_positive`, which names its row.
    flat_mean, flat_std, flat_target = aligned(mean=mean, bar=std, target=target)
    means = flat_mean.reshape(-1, target_count)  # (N, K), as are bars and targets
    bars = flat_std.reshape(-1, target_count)
    targets = flat_target.reshape(-1, target_count)
    shown_numbers = row_numbers or range(first_row, first_row + len(means))
    _check_positive(bars, shown_numbers)
    _check_squares(means, bars, targets, shown_numbers)
    names = _checked_names(names, target_count)
    row_inputs = _for_each_row(_named_inputs(inputs), len(means), shape)
    return [
        TargetRows(
            mean=means[:, k].contiguous(),
            std=bars[:, k].contiguous(),
            target=targets[:, k].contiguous(),
            name=names[k],
            inputs=row_inputs,
            first_row=first_row,
            row_numbers=row_numbers,
            target_count=target_count,
        )
        for k in range(target_count)
    ]


def _with_novelty(rows: list[TargetRows], novelty: Tensor | None) -> list[TargetRows]:
    """Rows with the novelty of their inputs, which is also shown as the first input.

    Args:
        rows: The rows of each target.
        novelty: Novelty, shaped like the prediction, or None where it is not known.
    """
    if novelty is None:
        return rows
    columns = novelty.double().reshape(-1, len(rows)).T  # (K, N)
    novel_rows = []
    for rows_of_target, column in zip(rows, columns, strict=True):
        shown = [round(value, 2) for value in column.tolist()]
        inputs = {"novelty": shown, **rows_of_target.inputs}
        novel_rows.append(replace(rows_of_target, novelty=column, inputs=inputs))
    return novel_rows


def _with_distribution(
    rows: list[TargetRows], prediction: Prediction, target: Tensor
) -> list[TargetRows]:
    """Rows with their part of the prediction; targets within rounding of a bound are put on it.

    Nothing is added for a Gaussian without bounds, since rows without a prediction are judged as
    such. The same is true for a distribution without probabilities; `cautions` mentions it.
    """
    name = prediction.distribution.name
    rows = [replace(rows_of_target, distribution=name) for rows_of_target in rows]
    plain_gaussian = name == "gaussian" and prediction.support is None
    if plain_gaussian or not judgeable(prediction):
        return rows
    # A mask that is True everywhere flattens the prediction with its distribution and bounds.
    flat_prediction = prediction[torch.ones_like(prediction.mean, dtype=torch.bool)]
    flat_target = at_bounds(prediction, target)[0].flatten()
    positions = torch.arange(len(flat_target)).reshape(-1, len(rows)).T  # (K, N)
    return [
        replace(rows_of_target, prediction=flat_prediction[places], target=flat_target[places])
        for rows_of_target, places in zip(rows, positions, strict=True)
    ]


def shape_of(values: Values) -> tuple[int, ...]:
    """The shape of an array, a tensor or nested lists."""
    if hasattr(values, "shape"):
        return tuple(values.shape)
    return tuple(torch.as_tensor(values).shape)


def _check_positive(std: Tensor, row_numbers: Sequence[int]) -> None:
    """Refuse bars, (N, K), that are not above zero; the message names the first such row."""
    bad_rows = (std <= 0).any(1).nonzero()[:, 0]
    if len(bad_rows) == 0:
        return
    value = float(std[bad_rows[0]].min())
    more = f" (and {len(bad_rows) - 1} more rows)" if len(bad_rows) > 1 else ""
    raise ValueError(
        f"Expected std > 0, got {value:g} in row {row_numbers[int(bad_rows[0])]}{more}. "
        "Drop these rows, or add a small noise to the variance."
    )


def _check_squares(mean: Tensor, std: Tensor, target: Tensor, row_numbers: Sequence[int]) -> None:
    """Refuse bars and errors, (N, K), whose squares or ratios overflow float64."""
    error = (target - mean).abs()
    too_small = std < 1 / _LARGEST
    too_large = std > _LARGEST
    too_far = error > _LARGEST * std.clamp(max=1)
    bad_entries = (too_small | too_large | too_far).nonzero()  # (row, target) of each
    if len(bad_entries) == 0:
        return
    raise ValueError(
        f"Expected bars from {1 / _LARGEST:g} to {_LARGEST:g} and errors of up to {_LARGEST:g} "
        f"bars, so that their squares are finite, got others in row "
        f"{row_numbers[int(bad_entries[0, 0])]}. Check the predictions, or pass all values in "
        "another unit."
    )


def _checked_names(names: Sequence[str] | None, target_count: int) -> list[str]:
    """A name for each target; "target" with a number where the user gives none."""
    if names is None:
        if target_count == 1:
            return ["target"]
        return [f"target {k}" for k in range(target_count)]
    if isinstance(names, str) or len(names) != target_count:
        raise ValueError(f"Expected {target_count} names, one for each target, got {names!r}.")
    return [str(name) for name in names]


def _named_inputs(inputs: Mapping[str, Sequence[Any]] | Values | None) -> dict[str, list[Any]]:
    """Input columns by name, from columns by name or an array (N,) or (N, D)."""
    if inputs is None:
        return {}
    if isinstance(inputs, Mapping):
        return {str(name): _as_list(values) for name, values in inputs.items()}
    array: Any = inputs if hasattr(inputs, "ndim") else torch.as_tensor(inputs)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise ValueError(
            f"Expected inputs by name, or of shape (N, D), got shape {tuple(array.shape)}."
        )
    return {f"input {k}": _as_list(array[:, k]) for k in range(array.shape[1])}


def _for_each_row(
    inputs: Mapping[str, list[Any]], row_count: int, shape: tuple[int, ...]
) -> dict[str, list[Any]]:
    """Input columns with one value for each row.

    Where a sample has several rows, a column may have one value for each sample, which is then
    repeated for all of its rows.

    Args:
        inputs: Columns by name.
        row_count: How many rows there are.
        shape: Shape of the predictions, whose first dimension counts the samples.
    """
    sample_count = shape[0] if len(shape) >= 3 else row_count
    columns = {}
    for name, values in inputs.items():
        if len(values) not in (row_count, sample_count):
            if sample_count == row_count:
                wanted = "one for each row"
            else:
                wanted = f"or {sample_count}, one for each sample"
            raise ValueError(
                f"Expected {row_count} values in the input {name!r}, {wanted}, got {len(values)}."
            )
        repeats = row_count // len(values)
        columns[name] = [value for value in values for _ in range(repeats)]
    return columns


def _as_list(values: Any) -> list[Any]:
    """The values of a column, of any library, as Python objects."""
    if hasattr(values, "tolist"):
        return list(values.tolist())
    return list(values)


# --- which rows a plot shows -------------------------------------------------------------------


def rows_to_show(rows: TargetRows, most: int = MOST_SHOWN) -> Tensor:
    """Positions of the rows that a scatter plot shows, ascending: all rows, or `most` of them.

    The rows with the largest bars, the largest errors and the largest |z| are always included.
    """
    return thinned([rows.std, rows.error.abs(), rows.z.abs()], most)


def thinned(keys: Sequence[Tensor], most: int) -> Tensor:
    """Pick positions where a key is large, and a repeatable sample of the others.

    Args:
        keys: Values, (N,) each, whose largest entries mark extreme rows.
        most: The largest number of positions to pick.

    Returns:
        The positions, ascending.

    Examples:
        >>> positions = thinned([torch.arange(1000.0)], 40)
        >>> len(positions), positions[-2:].tolist()
        (40, [998, 999])
    """
    count = len(keys[0])
    if count <= most:
        return torch.arange(count)
    extreme_count = max(1, int(_EXTREME_SHARE * most))
    is_extreme = torch.zeros(count, dtype=torch.bool)
    for key in keys:
        is_extreme[key.topk(extreme_count).indices] = True
    extreme = is_extreme.nonzero()[:, 0]
    ordinary = (~is_extreme).nonzero()[:, 0]
    # A separate generator leaves the user's random numbers alone, and repeats the choice.
    order = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(0))
    sample = ordinary[order[: most - len(extreme)]]
    return torch.cat([extreme, sample]).sort().values


# --- rows from a fitted object, in one pass over labelled data ---------------------------------


@dataclass(frozen=True)
class LabelledPrediction:
    """Predictions of labelled data, on the CPU.

    Attributes:
        prediction: All predictions.
        target: True values of the same shape.
        inputs: The model's inputs, (N, D), where they are only a few numbers per row; else None.
    """

    prediction: Prediction
    target: Tensor
    inputs: Tensor | None


def labelled_prediction(predictor: LastLayerRigidity, data: Any) -> LabelledPrediction:
    """Predict labelled data.

    The data are read once, so that a loader may shuffle and an iterator may end.

    Args:
        predictor: A fitted object.
        data: Labelled data in any form that `fit` accepts.

    Raises:
        ValueError: There are no data, or they have no target.
    """
    predictions: list[Prediction] = []
    targets: list[Tensor] = []
    inputs: list[Tensor] = []
    for batch in feed_of(predictor)(data, "report"):
        if batch.target is None:
            raise ValueError(
                "Expected labelled data, got batches without a target. Pass (x, y), or pass "
                "target=lambda batch: ... to the wrapper of the model."
            )
        prediction = predictor.predict([batch.raw]).to("cpu")
        target = batch.target.cpu()
        predictions.append(prediction)
        targets.append(target.reshape(_shape_of_prediction(target, prediction.mean)))
        few_numbers = _few_numbers(batch)
        if few_numbers is not None:
            inputs.append(few_numbers)
    if not predictions:
        raise ValueError("Expected labelled data, got none.")
    return LabelledPrediction(
        prediction=Prediction.concatenate(predictions),
        target=torch.cat(targets),
        inputs=torch.cat(inputs) if len(inputs) == len(predictions) else None,
    )


def _shape_of_prediction(target: Tensor, mean: Tensor) -> tuple[int, ...]:
    """The shape of the prediction; refuses a target that differs by more than axes of size one."""
    if target.squeeze().shape != mean.squeeze().shape:
        raise ValueError(
            f"Expected targets shaped like the predictions, {tuple(mean.shape)}, "
            f"got {tuple(target.shape)}."
        )
    return tuple(mean.shape)


def _few_numbers(batch: Batch) -> Tensor | None:
    """The inputs of a batch if they are one tensor (N, D) with small D; else None."""
    if len(batch.args) != 1 or batch.kwargs:
        return None
    inputs: Any = batch.args[0]
    if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.shape[1] > MOST_INPUTS:
        return None
    return inputs.detach().cpu()
