"""Predictions and their error bars in pictures, and how good the bars are.

`p.plot(y)` and `uq.plot(x, y)` draw with these functions. As in `rigidities.metrics`, `mean` are
the predictions, `std` their error bars (above zero) and `target` the true values: tensors, arrays
or lists. A `Prediction` p may replace mean and std, as in `errors(p, target)`. Intervals and
coverage are then those of its distribution.

Each function draws on the axes `ax`, or on new ones, and returns them. It shows and saves nothing
and leaves matplotlib's settings alone. Plots need the extra `plots`.

References:
    Colours: Okabe and Ito, "Color universal design", 2008.
    Confidence lines: Bigi et al., "A prediction rigidity formalism for low-cost uncertainties in
        trained neural networks", 2024, appendix "Plot details".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from operator import index as as_index
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from . import metrics
from .metrics.alignment import (
    aligned,
    as_tensor,
    error_and_positive_std,
    judged,
    of_prediction,
    predicted,
)
from .notices import extra, require_level
from .prediction.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .metrics.alignment import Values

__all__ = [
    "along",
    "binned",
    "calibration",
    "confidence_factors",
    "errors",
    "parity",
    "rows",
]


def __dir__() -> list[str]:
    return sorted(__all__)


BLUE = "#0072B2"
VERMILION = "#D55E00"
BLACK = "#000000"
GREY = "#666666"

PARITY_SIZE = (4.8, 4.8)
WIDE_SIZE = (6.4, 4.0)

MOST_INTERVALS = 1000
"""Of more rows than this, plots of single intervals draw this many."""
MOST_KNOTS = 2000
"""Curves are drawn with this many knots at most."""
KINDS = ("parity", "rows", "along", "errors", "binned", "calibration")
"""What `p.plot(kind=...)` accepts."""
_KINDS_OF_TRUE_VALUES = ("parity", "errors", "binned", "calibration")
_KINDS_OF_INTERVALS = ("parity", "rows", "along")
_KINDS_OF_INPUTS = ("rows", "along")
_MOST_TURNING_POINTS = 0.3
"""Share of its points at which a curve may turn."""
_SMALLEST_STEP = 1e-4
"""Smaller steps of a curve, relative to its range, are rounding."""


# --- predictions and their intervals -----------------------------------------------------------


@of_prediction
def parity(
    mean: Values,
    std: Values,
    target: Values,
    ax: Axes | None = None,
    *,
    level: float = 0.9,
    conformal: bool | None = None,
) -> Axes:
    """Predictions against true values, with their intervals.

    An interval that crosses the line y = x covers the true value. Intervals that miss the line have
    another colour. The legend shows the share of both, counted over all rows. At most 1,000 rows
    are drawn, evenly spaced in the order of their true values.

    Args:
        mean: Predictions, or a `Prediction`.
        std: Their error bars. Leave them out after a `Prediction`.
        target: True values.
        ax: Axes to draw on, new ones by default.
        level: Probability of the intervals.
        conformal: Whether the intervals are those with the guarantee of the conformal rows, as in
            `Prediction.interval`.

    Returns:
        The axes.
    """
    p, matched_target = judged(mean, std, target)
    y = _flat(matched_target)
    intervals = _intervals(p, level, conformal)
    ax = _axes(ax, PARITY_SIZE)
    limits = _limits(torch.cat([y, intervals.mean]), intervals, ax.get_yscale() == "log")
    ax.set(xlim=limits, ylim=limits)
    ax.set_box_aspect(1)
    ax.plot(limits, limits, color=BLACK, lw=1, zorder=3, label="y = x")
    drawn = y.argsort()[_evenly_spaced(len(y), MOST_INTERVALS)]
    for group in _covered_and_missed(intervals, y):
        shown = drawn[group.members[drawn]]
        _draw_intervals(ax, y[shown], intervals.at(shown), limits, group.colour)
        _scatter(ax, y[shown], intervals.mean[shown], color=group.colour, label=group.label)
    ax.set(xlabel="true value", ylabel="predicted")
    _legend(ax, y, intervals.mean, title=_title(level, drawn, y))
    return ax


@of_prediction
def rows(
    mean: Values,
    std: Values,
    target: Values | None = None,
    ax: Axes | None = None,
    *,
    x: Values | None = None,
    level: float = 0.9,
    conformal: bool | None = None,
) -> Axes:
    """Rows with their intervals, in the order of their predictions or against one input.

    True values are dots, and those outside their intervals have another colour. The legend shows
    the share of both, counted over all rows. At most 1,000 rows are drawn, evenly spaced in the
    order of the horizontal axis.

    Args:
        mean: Predictions, or a `Prediction`.
        std: Their error bars. Leave them out after a `Prediction`.
        target: True values.
        ax: Axes to draw on, new ones by default.
        x: One input per row, for the horizontal axis.
        level: Probability of the intervals.
        conformal: As in `parity`.

    Returns:
        The axes.
    """
    flat_mean, _ = aligned(mean=mean, std=std)
    intervals = _intervals(predicted(mean, std), level, conformal)
    if x is None:
        order = flat_mean.argsort()
        places = order.argsort().double()  # the rank of each row
    else:
        _, places = aligned(mean=mean, x=x)
        order = places.argsort()
    points = flat_mean
    y = None
    if target is not None:
        y = _flat(judged(mean, std, target)[1])
        points = torch.cat([points, y])

    ax = _axes(ax, WIDE_SIZE)
    limits = _limits(points, intervals, ax.get_yscale() == "log")
    ax.set_ylim(limits)
    drawn = order[_evenly_spaced(len(order), MOST_INTERVALS)]
    if y is None:
        _draw_intervals(ax, places[drawn], intervals.at(drawn), limits, BLUE)
    else:
        for group in _covered_and_missed(intervals, y):
            shown = drawn[group.members[drawn]]
            _draw_intervals(ax, places[shown], intervals.at(shown), limits, group.colour)
            _scatter(ax, places[shown], y[shown], color=group.dots, zorder=4, label=group.label)
    _scatter(ax, places[drawn], flat_mean[drawn], s=8, label="predicted")
    ax.set(
        xlabel="rows in the order of their predictions" if x is None else "input",
        ylabel="predicted" if y is None else "predicted and true values",
    )
    _legend_anywhere(ax, 2 * len(drawn), title=_title(level, drawn, order))
    return ax


@of_prediction
def along(
    x: Values,
    mean: Values,
    std: Values,
    target: Values | None = None,
    ax: Axes | None = None,
    train: tuple[Values, Values] | None = None,
    *,
    level: float | None = None,
    conformal: bool | None = None,
) -> Axes:
    """Predictions along one input, as a curve with bands.

    The two bands are those of 1 and 2 sigma. For a `Prediction`, they have the same probabilities
    as 1 and 2 sigma of a Gaussian. With `level` there is a single band with that probability. True
    values outside this band have another colour, and the legend shows the share of both, counted
    over all rows.

    Args:
        x: The input, in any order.
        mean: Predictions at x, or a `Prediction`.
        std: Their error bars. Leave them out after a `Prediction`.
        target: True values at x, drawn as dots.
        ax: Axes to draw on, new ones by default.
        train: Inputs and targets of the training data, drawn as crosses.
        level: Probability of the band.
        conformal: As in `parity`. True requires `level`.

    Returns:
        The axes.
    """
    flat_x, flat_mean, _ = aligned(x=x, mean=mean, std=std)
    # Everything is checked before anything is drawn.
    y = None if target is None else aligned(x=x, target=target)[1]
    crosses = None if train is None else aligned(inputs=train[0], targets=train[1])
    if conformal and level is None:
        raise ValueError("A conformal band has a probability of its own. Pass level=0.9.")
    p = predicted(mean, std)
    bands = []
    if level is not None:
        bands.append((f"{100 * level:g} %", 0.35, _intervals(p, level, conformal)))
    else:
        for sigmas, alpha in ((1, 0.35), (2, 0.2)):
            share = math.erf(sigmas / math.sqrt(2))
            label = f"{100 * share:.2g} %" if isinstance(mean, Prediction) else f"±{sigmas}σ"
            bands.append((label, alpha, _intervals(p, share, conformal=False)))

    ax = _axes(ax, WIDE_SIZE)
    knots = flat_x.argsort()[_evenly_spaced(len(flat_x), MOST_KNOTS)]
    places = flat_x[knots].numpy()
    ax.plot(places, flat_mean[knots].numpy(), color=BLUE, lw=2, zorder=3, label="mean")
    for label, alpha, intervals in bands:
        low, high = (ends[knots].numpy() for ends in _visible_ends(ax, intervals))
        ax.fill_between(places, low, high, color=BLUE, alpha=alpha, lw=0, label=label)
    points = len(flat_x)
    if y is not None and level is None:
        _scatter(ax, flat_x, y, color=BLACK, s=6, label="target")
        points += len(y)
    elif y is not None:
        for group in _covered_and_missed(bands[0][2], y):
            is_member = group.members
            _scatter(ax, flat_x[is_member], y[is_member], color=group.dots, label=group.label)
        points += len(y)
    if crosses is not None:
        _scatter(ax, *crosses, color=VERMILION, marker="x", s=22, label="train")
        points += len(crosses[0])
    ax.set(xlabel="input", ylabel="prediction")
    _legend_anywhere(ax, points)
    return ax


# --- how good the bars are ---------------------------------------------------------------------


@of_prediction
def errors(mean: Values, std: Values, target: Values, ax: Axes | None = None) -> Axes:
    """|e| against sigma on logarithmic axes, with lines that cover 1, 2 and 3 sigma.

    The lines are y = low sigma and y = high sigma, with the factors of `confidence_factors`; y =
    sigma is the mode of log |e|. The smallest half per cent of errors, and zeros, may lie below the
    axis: they are drawn as triangles on its lower edge.
    """
    std, error = _std_and_absolute_error(mean, std, target)
    smallest = error.kthvalue(1 + len(error) // 200).values
    floor = torch.maximum(smallest, confidence_factors(3)[0] * std.min())
    ax = _axes(ax, PARITY_SIZE)
    low, high = _parity(ax, torch.cat([std, error.clamp(min=float(floor))]))
    _confidence_lines(ax, low, high)
    below = error < low
    _scatter(ax, std[~below], error[~below])
    _scatter(ax, std[below], torch.full_like(std[below], low), marker="v", clip_on=False)
    ax.set(xlabel="estimated error", ylabel="absolute error")
    _legend(ax, std, error)
    return ax


@of_prediction
def binned(
    mean: Values, std: Values, target: Values, bin_size: int = 100, ax: Axes | None = None
) -> Axes:
    """Mean squared error against predicted variance, in bins of rows sorted by that variance.

    The band about y = x is twice the standard error sqrt(2 / bin_size) of log MSE that Gaussian
    errors have; an incomplete last bin is left out. A constant bar may also lie close to the line,
    so the legend shows numbers that distinguish it from good bars.
    """
    std, error = _std_and_absolute_error(mean, std, target)
    variance, mse = metrics.binned(torch.zeros_like(error), std, error, bin_size)
    ax = _axes(ax, PARITY_SIZE)
    low, high = _parity(ax, torch.cat([variance, mse[mse > 0]]))
    ends = torch.tensor([low, high], dtype=torch.float64)
    band = math.exp(2 * math.sqrt(2 / bin_size))
    ax.fill_between(
        ends, ends / band, ends * band, color=GREY, alpha=0.2, lw=0, label="sampling noise"
    )
    ax.plot(ends, ends, color=BLACK, lw=1, label="y = x")
    _scatter(ax, variance, mse.clamp(min=low), s=22, label=f"bins of {bin_size}")
    ax.set(xlabel="predicted variance", ylabel="mean squared error")
    _legend(ax, variance, mse, title=_resolution(error, std, bin_size))
    return ax


@of_prediction
def calibration(mean: Values, std: Values, target: Values, ax: Axes | None = None) -> Axes:
    """Observed against nominal coverage of central intervals, with the area from the diagonal.

    Above the diagonal the bars are too wide, below it too narrow. The grey band is twice the
    binomial standard error sqrt(p (1 - p) / N).
    """
    nominal, observed = metrics.calibration_curve(mean, std, target)
    rows = len(nominal) - 2
    nominal, observed = thinned_curve(nominal, observed)
    # Every knot twice, so that the curve is drawn as steps.
    x = nominal.repeat_interleave(2)[1:].numpy()
    y = observed.repeat_interleave(2)[:-1].numpy()
    area = metrics.miscalibration_area(mean, std, target)
    ax = _axes(ax, PARITY_SIZE)
    p = torch.linspace(0, 1, 201)
    band = 2 * (p * (1 - p) / rows).sqrt()
    ax.fill_between(p, p - band, p + band, color=GREY, alpha=0.2, lw=0, label="sampling noise")
    ax.fill_between(x, x, y, color=BLUE, alpha=0.2, lw=0, label=f"area {area:.3f}")
    ax.plot([0, 1], [0, 1], color=BLACK, lw=1, label="y = x")
    ax.plot(x, y, color=BLUE, lw=1.6, label="observed")
    ax.set(xlabel="nominal coverage", ylabel="observed coverage", xlim=(0, 1), ylim=(0, 1))
    ax.set_box_aspect(1)
    _legend(ax, nominal, observed)
    return ax


def confidence_factors(sigmas: float = 1) -> tuple[float, float]:
    """Multiples of sigma that cover |e| as often as +- `sigmas` cover a Gaussian.

    For e ~ N(0, 1) and x = |e|, the density of log x is proportional to x exp(-x^2 / 2), with its
    mode at x = 1. The pair is fixed by its probability and by equal density at both ends:

        erf(high / sqrt 2) - erf(low / sqrt 2) = erf(sigmas / sqrt 2)
        low exp(-low^2 / 2) = high exp(-high^2 / 2)

    With high = low exp(t) the second line gives high^2 = 2 t / (1 - exp(-2 t)); the first is
    solved for t by bisection, to the last bit.

    Args:
        sigmas: Number of standard deviations.

    Returns:
        (low, high), with low < 1 < high.

    Raises:
        ValueError: `sigmas` is not between 0 and 30.

    Examples:
        >>> [round(factor, 4) for factor in confidence_factors(1)]
        [0.3313, 1.8975]
    """
    if not 0 < sigmas <= 30:
        raise ValueError(f"Expected 0 < sigmas <= 30, got {sigmas}. Pass 1, 2 or 3.")
    # Probabilities outside, because those inside round to 1 from eight sigmas on.
    outside = math.erfc(sigmas / math.sqrt(2))
    too_narrow = 0.0
    wide_enough = 700.0
    middle = (too_narrow + wide_enough) / 2
    while too_narrow < middle < wide_enough:
        low, high = _equal_density_pair(middle)
        if math.erf(low / math.sqrt(2)) + math.erfc(high / math.sqrt(2)) > outside:
            too_narrow = middle
        else:
            wide_enough = middle
        middle = (too_narrow + wide_enough) / 2
    return _equal_density_pair(wide_enough)


# --- what p.plot draws -------------------------------------------------------------------------


def draw(
    p: Prediction,
    y: Values | None = None,
    *,
    kind: str | None = None,
    x: Any = None,
    chosen_input: int | str | None = None,
    chosen_target: int | str | None = None,
    level: float = 0.9,
    conformal: bool | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a prediction; `Prediction.plot` calls this and describes the arguments.

    There `chosen_input` is `along`, and `chosen_target` is `target`.
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"Expected kind to be one of {', '.join(KINDS)}; got {kind!r}.")
    require_level(level, "An interval's")
    p, true, target_name = _one_target(p, y, chosen_target)
    inputs, input_name = _one_input(x, chosen_input, len(p))
    if kind is None:
        kind = _usual_kind(p, true, inputs)
    _require_arguments(kind, true, inputs, conformal)

    if kind == "parity":
        ax = parity(p, true, ax, level=level, conformal=conformal)
    elif kind == "rows":
        ax = rows(p, true, ax, x=inputs, level=level, conformal=conformal)
    elif kind == "along":
        ax = along(inputs, p, true, ax, level=level, conformal=conformal)
    elif kind == "errors":
        ax = errors(p, true, ax)
    elif kind == "binned":
        # Twenty bins where there are enough rows for them.
        ax = binned(p, true, bin_size=min(100, max(10, len(p) // 20), len(p)), ax=ax)
    else:
        ax = calibration(p, true, ax)

    if input_name is not None:
        ax.set_xlabel(input_name)
    if target_name is not None and kind == "parity":
        ax.set(xlabel=f"true {target_name}", ylabel=f"predicted {target_name}")
    elif target_name is not None and kind in _KINDS_OF_INPUTS:
        ax.set_ylabel(target_name)
    return ax


def _usual_kind(p: Prediction, y: Tensor | None, x: Tensor | None) -> str:
    """What is drawn where no kind is asked for."""
    if x is not None:
        return "along" if _is_curve(x, _flat(p.mean)) else "rows"
    return "rows" if y is None else "parity"


def _is_curve(x: Tensor, mean: Tensor) -> bool:
    """Whether predictions in the order of x form a curve, which turns at few of its points.

    Where other inputs move the predictions too, they go up and down from row to row: of a random
    sequence two thirds of the inner points are turning points.
    """
    steps = mean[x.argsort()].diff()
    is_visible = steps.abs() > _SMALLEST_STEP * (mean.max() - mean.min())
    is_upward = steps[is_visible] > 0
    turning_points = int((is_upward[1:] != is_upward[:-1]).sum())
    return turning_points <= len(mean) * _MOST_TURNING_POINTS


def _require_arguments(
    kind: str, y: Tensor | None, x: Tensor | None, conformal: bool | None
) -> None:
    """Refuse a kind of plot without what it draws, or with what it cannot draw."""
    if kind in _KINDS_OF_TRUE_VALUES and y is None:
        raise ValueError(
            f'kind="{kind}" compares predictions with true values. Pass them first, as in '
            f'p.plot(y, kind="{kind}").'
        )
    if kind == "along" and x is None:
        raise ValueError('kind="along" needs an input to draw along. Pass x=, one value per row.')
    if kind not in _KINDS_OF_INPUTS and x is not None:
        raise ValueError(f'x= is for kind="along" and kind="rows", got kind="{kind}".')
    if kind not in _KINDS_OF_INTERVALS and conformal:
        raise ValueError(
            f'kind="{kind}" draws no intervals, so conformal=True has no meaning there. It is for '
            f"{', '.join(_KINDS_OF_INTERVALS)}."
        )


def _one_target(
    p: Prediction, y: Any, target: int | str | None
) -> tuple[Prediction, Tensor | None, str | None]:
    """The prediction of one target, (N,), its true values, (N,), and its name where it has one."""
    if p.mean.ndim == 0:
        p = p[None]
    row_shape = p.mean.shape[1:]
    count = row_shape.numel()
    columns = _labels(y) or []
    names = columns if len(columns) == count else []
    index = _index_of_target(target, count, names)
    name = names[index] if names else getattr(y, "name", None)
    place = torch.unravel_index(torch.tensor(index), row_shape)
    one = p[(slice(None), *(int(i) for i in place))]
    if y is None:
        return one, None, None
    true = _values(y)
    if true.numel() == p.mean.numel() and len(true) == len(p):
        true = true.reshape(len(p), count)[:, index]
    elif true.numel() != len(p):
        shapes = f"({len(p)},)" if count == 1 else f"({len(p)},) or {tuple(p.mean.shape)}"
        raise ValueError(
            f"Expected one true value per row, {shapes}, got {tuple(true.shape)}. Pass the targets "
            "of the rows that were predicted."
        )
    return one, true.flatten(), name if isinstance(name, str) else None


def _index_of_target(target: int | str | None, count: int, names: list[Any]) -> int:
    """The place of a target among `count`, by its number or its name."""
    choices = [repr(choice) for choice in (*range(min(count, 20)), *names[:20])]
    if target is None and count == 1:
        return 0
    if target is None:
        raise ValueError(
            f"The prediction has {count} targets, and a plot shows one of them. Pass target=, one "
            f"of {', '.join(choices)}."
        )
    if target in names:
        return names.index(target)
    if _is_index(target, count):
        return as_index(cast(int, target)) % count
    raise ValueError(f"Expected target to be one of {', '.join(choices)}; got {target!r}.")


def _is_index(value: Any, count: int) -> bool:
    """Whether a value is a whole number that picks one of `count` things."""
    return isinstance(value, Integral) and -count <= as_index(value) < count


def _one_input(x: Any, along: int | str | None, count: int) -> tuple[Tensor | None, str | None]:
    """One input of `count` rows, (N,), and its name where it has one."""
    if x is None:
        if along is not None:
            raise ValueError("along= names one of the inputs. Pass the inputs too, as x=.")
        return None, None
    if isinstance(x, tuple) and len(x) > 0 and hasattr(x[0], "shape"):
        x = x[0]  # the inputs of (inputs, targets)
    has_values = hasattr(x, "__array__") or hasattr(x, "__dlpack__")
    if not has_values and not isinstance(x, list | tuple | Mapping):
        raise TypeError(
            "Expected the inputs as a tensor, an array, a frame or a list, to take one of them for "
            f"the horizontal axis; got a {type(x).__name__}."
        )
    labels = list(x) if isinstance(x, Mapping) else _labels(x)
    name = getattr(x, "name", None)
    if labels is not None:
        label = _label_of_input(along, labels)
        column = _values(x[label])
        name = label
    else:
        values = _values(x)
        columns = values.reshape(len(values), -1) if values.numel() > 0 else values[:, None]
        column = columns[:, _label_of_input(along, list(range(columns.shape[1])))]
        if name is None and along is not None:
            name = f"input {along}"
    if column.numel() != count:
        raise ValueError(
            f"Expected one input per row, ({count},), got {tuple(column.shape)}. Pass the inputs "
            "of the rows that were predicted."
        )
    return column.flatten(), name if isinstance(name, str) else None


def _label_of_input(along: int | str | None, labels: list[Any]) -> Any:
    """The label of the input to draw along, by itself or by its number."""
    if along is None and len(labels) == 1:
        return labels[0]
    choices = ", ".join(repr(label) for label in labels[:20])
    if along is None:
        raise ValueError(
            f"There are {len(labels)} inputs, and a plot shows one of them. Pass along=, one of "
            f"{choices}."
        )
    if along in labels:
        return along
    if _is_index(along, len(labels)):
        return labels[as_index(cast(int, along))]
    raise ValueError(f"Expected along to be one of {choices}; got {along!r}.")


def _labels(values: Any) -> list[Any] | None:
    """The labels of a data frame's columns; None for anything else."""
    if isinstance(values, Tensor) or not hasattr(values, "__array__"):
        return None
    labels = getattr(values, "columns", None)
    return None if labels is None else list(labels)


def _values(values: Any) -> Tensor:
    """A tensor, an array of any library, a series or a list as a tensor on the CPU, in float64.

    Raises:
        TypeError: They are dates.
    """
    if getattr(getattr(values, "dtype", None), "kind", "") == "M":
        # As integers they would be nanoseconds on the axis.
        raise TypeError(
            "Expected numbers, got dates. Pass numbers instead, such as days: "
            "(dates - dates.min()) / numpy.timedelta64(1, 'D')."
        )
    tensor = as_tensor(values).cpu().double()
    return tensor[None] if tensor.ndim == 0 else tensor


# --- parts of plots ----------------------------------------------------------------------------


class _Intervals(NamedTuple):
    """Predictions and the ends of their intervals, each (N,)."""

    mean: Tensor
    low: Tensor
    high: Tensor

    def at(self, chosen: Tensor) -> _Intervals:
        """Those of some rows."""
        return _Intervals(self.mean[chosen], self.low[chosen], self.high[chosen])

    def cover(self, y: Tensor) -> Tensor:
        """Which intervals cover their true values."""
        return (self.low <= y) & (y <= self.high)


class _Group(NamedTuple):
    """Rows whose intervals cover their true values, or rows whose intervals miss them.

    Attributes:
        members: Which rows they are, (N,).
        label: What the legend calls them, with their share.
        colour: Colour of their intervals.
        dots: Colour of their true values.
    """

    members: Tensor
    label: str
    colour: str
    dots: str


def _intervals(p: Prediction, level: float, conformal: bool | None) -> _Intervals:
    """The intervals of a prediction, flat and on the CPU."""
    low, high = p.interval(level, conformal=conformal)
    return _Intervals(_flat(p.mean), _flat(low), _flat(high))


def _flat(values: Tensor) -> Tensor:
    """The values as (N,) in float64 on the CPU."""
    return values.detach().cpu().double().flatten()


def _covered_and_missed(intervals: _Intervals, y: Tensor) -> list[_Group]:
    """The rows whose intervals cover their true values, and the others."""
    is_covered = intervals.cover(y)
    share = 100 * float(is_covered.double().mean())
    return [
        _Group(is_covered, f"covered: {share:.1f} %", BLUE, BLACK),
        _Group(~is_covered, f"missed: {100 - share:.1f} %", VERMILION, VERMILION),
    ]


def _title(level: float, drawn: Tensor, all_rows: Tensor) -> str:
    """The legend's title: which intervals are drawn and, if not all, of how many rows."""
    title = f"{100 * level:g} % intervals"
    if len(drawn) < len(all_rows):
        title += f"\n{len(drawn):,} of {len(all_rows):,} rows drawn"
    return title


def _limits(points: Tensor, intervals: _Intervals, is_log: bool) -> tuple[float, float]:
    """Limits of an axis around all points, and around all but the widest hundredth of intervals.

    A few rows far from the training data would otherwise flatten the picture of all others.
    """
    ends = []
    for end in (intervals.low, -intervals.high):
        finite = end[end.isfinite()].sort().values
        ends.append(finite[len(finite) // 100 :][:1])
    values = torch.cat([points, ends[0], -ends[1]])
    if is_log:
        return log_limits(values[values > 0])
    low = float(values.min())
    high = float(values.max())
    margin = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _visible_ends(ax: Axes, intervals: _Intervals) -> tuple[Tensor, Tensor]:
    """The ends of intervals; those without an end reach to the edge of the axes."""
    is_finite = intervals.low.isfinite() & intervals.high.isfinite()
    if bool(is_finite.all()):
        return intervals.low, intervals.high
    bottom, top = _limits(intervals.mean, intervals, ax.get_yscale() == "log")
    ax.set_ylim(bottom, top)
    low = torch.where(intervals.low.isfinite(), intervals.low, bottom)
    high = torch.where(intervals.high.isfinite(), intervals.high, top)
    return low, high


def _draw_intervals(
    ax: Axes, places: Tensor, intervals: _Intervals, limits: tuple[float, float], colour: str
) -> None:
    """Draw intervals as vertical lines; those without an end reach to the edge of the axes."""
    bottom, top = limits
    low = torch.where(intervals.low.isfinite(), intervals.low, bottom)
    high = torch.where(intervals.high.isfinite(), intervals.high, top)
    count = max(1, len(places))
    ax.vlines(
        places.numpy(),  # matplotlib reads tensors entry by entry
        low.numpy(),
        high.numpy(),
        color=colour,
        lw=1,
        alpha=min(0.7, max(0.2, 7 / math.sqrt(count))),
        zorder=1.5,
        rasterized=count > 300,
    )


def _evenly_spaced(count: int, most: int) -> Tensor:
    """At most `most` of the numbers below `count`, the first and the last among them."""
    return torch.linspace(0, count - 1, min(most, count), dtype=torch.float64).long()


def _std_and_absolute_error(mean: Values, std: Values, target: Values) -> tuple[Tensor, Tensor]:
    """sigma and |e|, flat; a sigma of zero is refused."""
    error, std = error_and_positive_std(mean, std, target, " for a logarithmic axis")
    return std, error.abs()


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The axes, or those of a new figure of that size."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f"Plots need matplotlib: {extra('plots')}.") from error
    return plt.subplots(figsize=size, layout="constrained")[1]


def _parity(ax: Axes, values: Tensor) -> tuple[float, float]:
    """Make both axes logarithmic with the same limits around the values.

    Few decades are labelled at 1, 2, 5, 10, ..., others at powers of ten alone.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = log_limits(values)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    ax.set_box_aspect(1)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
        if math.log10(high / low) < 2:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return low, high


def log_limits(values: Tensor) -> tuple[float, float]:
    """Limits around positive values, a decade or more apart."""
    low = float(values.min()) / 1.3
    high = float(values.max()) * 1.3
    missing_decades = max(0.0, 1 - math.log10(high / low))
    widen = 10 ** (missing_decades / 2)
    return low / widen, high * widen


def _confidence_lines(ax: Axes, low: float, high: float) -> None:
    """Draw y = x and the lines of 1, 2 and 3 sigma from x = low to high."""
    ends = torch.tensor([low, high], dtype=torch.float64)
    ax.plot(ends, ends, color=BLACK, lw=1.2, zorder=3, label="y = x")
    for sigmas, style in ((1, "-"), (2, "--"), (3, ":")):
        below, above = confidence_factors(sigmas)
        label = f"{sigmas}σ: {100 * math.erf(sigmas / math.sqrt(2)):.3g} %"
        ax.plot(ends, above * ends, style, color=VERMILION, lw=1.2, zorder=3, label=label)
        ax.plot(ends, below * ends, style, color=VERMILION, lw=1.2, zorder=3)


def _equal_density_pair(log_ratio: float) -> tuple[float, float]:
    """(low, high) of equal density on the log axis, where high / low = exp(log_ratio)."""
    high = math.sqrt(2 * log_ratio / -math.expm1(-2 * log_ratio))
    return high * math.exp(-log_ratio), high


def _resolution(error: Tensor, std: Tensor, bin_size: int) -> str:
    """The numbers that tell good bars from a constant one."""
    zero = torch.zeros_like(error)
    # Adding zero gives 0.00 rather than -0.00.
    slope = round(metrics.slope(zero, std, error, bin_size), 2) + 0.0
    correlation = round(metrics.spearman(zero, std, error), 2) + 0.0
    gain = round(metrics.nll_gain(zero, std, error), 2) + 0.0
    return (
        f"slope {slope:.2f}\n"
        f"{metrics.decades(std, bin_size):.2f} decades\n"
        f"rank correlation {correlation:.2f}\n"
        f"NLL gain {gain:.2f}"
    )


def thinned_curve(
    nominal: Tensor, observed: Tensor, knots: int = MOST_KNOTS
) -> tuple[Tensor, Tensor]:
    """At most `knots` knots of a curve, both ends among them: more would not be visible."""
    chosen = _evenly_spaced(len(nominal), knots)
    return nominal[chosen], observed[chosen]


def _scatter(ax: Axes, x: Tensor, y: Tensor, **style: Any) -> None:
    """Draw points, the fainter the more there are; `style` overrides the defaults."""
    look: dict[str, Any] = {
        "rasterized": True,
        "zorder": 2,
        "color": BLUE,
        "s": 12,
        "alpha": min(0.8, max(0.03, 12 / math.sqrt(max(1, len(x))))),
    }
    if style.get("marker") != "x":  # a cross consists of lines only
        look["linewidths"] = 0
    look.update(style)
    ax.scatter(x.numpy(), y.numpy(), **look)  # matplotlib reads tensors entry by entry


def _legend(ax: Axes, x: Tensor, y: Tensor, title: str | None = None) -> None:
    """Put the legend above y = x, or below it where most points lie above."""
    crowded_above = (y > x).double().mean() > 0.75
    ax.legend(
        title=title,
        loc="lower right" if crowded_above else "upper left",
        alignment="left",
        markerscale=1.5,
        framealpha=0.7,
        edgecolor="none",
    )


def _legend_anywhere(ax: Axes, points: int, title: str | None = None) -> None:
    """Put the legend where there is room.

    Among many points matplotlib is slow to find the best place, and warns.
    """
    ax.legend(
        title=title,
        loc="best" if points < 10_000 else "upper left",
        alignment="left",
        markerscale=1.5,
        framealpha=0.7,
        edgecolor="none",
    )
