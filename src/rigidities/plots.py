"""How good error bars are, in pictures.

As in `rigidities.metrics`, `mean` has predictions, `std` their error bars (above zero) and `target`
true values: tensors, arrays or lists. A `Prediction` p may stand for mean and std,
`errors(p, target)`; coverage is then that of its distribution.

Each function draws on the axes `ax`, or on new ones, and returns them. It shows and saves nothing
and leaves matplotlib's settings alone. Needs the extra `plots`.

References:
    Colours: Okabe and Ito, "Color universal design", 2008.
    Confidence lines: Bigi et al., "A prediction rigidity formalism for low-cost uncertainties in
        trained neural networks", 2024, appendix "Plot details".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import metrics
from .metrics.alignment import aligned, error_and_positive_std, of_prediction, predicted
from .notices import extra
from .prediction.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .metrics.alignment import Values

__all__ = ["along", "binned", "calibration", "confidence_factors", "errors"]


def __dir__() -> list[str]:
    return sorted(__all__)


BLUE = "#0072B2"
VERMILION = "#D55E00"
BLACK = "#000000"
GREY = "#666666"

PARITY_SIZE = (4.8, 4.8)
WIDE_SIZE = (6.4, 4.0)


@of_prediction
def errors(mean: Values, std: Values, target: Values, ax: Axes | None = None) -> Axes:
    """|e| against sigma on logarithmic axes, with lines that cover 1, 2 and 3 sigma.

    The lines are y = low sigma and y = high sigma, by `confidence_factors`; y = sigma is the mode
    of log |e|. The smallest half per cent of errors, and zeros, may lie below the axis: they are
    drawn as triangles on its lower edge.
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
    """MSE against predicted variance, of bins of rows sorted by predicted variance.

    The band about y = x is twice the standard error sqrt(2 / bin_size) of log MSE that Gaussian
    errors have; an incomplete last bin is left out. Closeness to the line alone would flatter a
    constant bar, so the numbers that tell it apart are written in.
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
    x = nominal.repeat_interleave(2)[1:]
    y = observed.repeat_interleave(2)[:-1]
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


@of_prediction
def along(
    x: Values,
    mean: Values,
    std: Values,
    target: Values | None = None,
    ax: Axes | None = None,
    train: tuple[Values, Values] | None = None,
) -> Axes:
    """Predictions along one input, with bands of 1 and 2 sigma.

    For a `Prediction` the bands have the probability of 1 and 2 sigma of a Gaussian.

    Args:
        x: The input, in any order.
        mean: Predictions at x.
        std: Their error bars.
        target: True values at x, drawn as dots.
        ax: Axes to draw on, new ones by default.
        train: Inputs and targets of the training data, drawn as crosses.

    Returns:
        The axes.
    """
    flat_x, flat_mean, _ = aligned(x=x, mean=mean, std=std)
    p = predicted(mean, std)
    # Everything is checked before anything is drawn.
    dots = None if target is None else aligned(x=x, target=target)
    crosses = None if train is None else aligned(inputs=train[0], targets=train[1])
    ax = _axes(ax, WIDE_SIZE)
    order = flat_x.argsort()
    sorted_x = flat_x[order]
    ax.plot(sorted_x, flat_mean[order], color=BLUE, lw=2, zorder=3, label="mean")
    for sigmas, alpha in ((1, 0.35), (2, 0.2)):
        level = math.erf(sigmas / math.sqrt(2))
        low, high = (end.cpu().flatten()[order] for end in p.interval(level))
        label = f"{100 * level:.2g} %" if isinstance(mean, Prediction) else f"±{sigmas}σ"
        ax.fill_between(sorted_x, low, high, color=BLUE, alpha=alpha, lw=0, label=label)
    points = len(flat_x)
    if dots is not None:
        _scatter(ax, *dots, color=BLACK, s=6, label="target")
        points += len(dots[0])
    if crosses is not None:
        _scatter(ax, *crosses, color=VERMILION, marker="x", s=22, label="train")
        points += len(crosses[0])
    ax.set(xlabel="input", ylabel="prediction")
    # Among many points matplotlib is slow to find the best place, and warns.
    ax.legend(loc="best" if points < 10_000 else "upper left", framealpha=0.7, edgecolor="none")
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
    gain = round(metrics.nll_gain(zero, std, error), 2) + 0.0  # 0.00 rather than -0.00
    return (
        f"slope {metrics.slope(zero, std, error, bin_size):.2f}\n"
        f"{metrics.decades(std, bin_size):.2f} decades\n"
        f"rank correlation {metrics.spearman(zero, std, error):.2f}\n"
        f"NLL gain {gain:.2f}"
    )


def thinned_curve(nominal: Tensor, observed: Tensor, knots: int = 2000) -> tuple[Tensor, Tensor]:
    """At most `knots` knots of a curve, both ends among them: more would not be visible."""
    count = min(knots, len(nominal))
    rows = torch.linspace(0, len(nominal) - 1, count, dtype=torch.float64).long()
    return nominal[rows], observed[rows]


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
    ax.scatter(x, y, **look)


def _legend(ax: Axes, x: Tensor, y: Tensor, title: str | None = None) -> None:
    """Put the legend above y = x, or below it where most points lie above."""
    crowded_above = (y > x).double().mean() > 0.75
    ax.legend(
        title=title,
        loc="lower right" if crowded_above else "upper left",
        alignment="left",
        framealpha=0.7,
        edgecolor="none",
    )
