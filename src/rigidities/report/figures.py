r"""The interactive plots, as objects of plotly.

A `Plot` holds its traces for each choice of one kind (the rows per bin) and its layout for each
choice of another (logarithmic or linear axes). The page's script (`page.js`) draws the chosen ones.
The `meta` of a trace holds what the script needs and plotly does not know:

| key | meaning |
| --- | --- |
| `ink` | The line has the colour of text, in light and dark mode. |
| `only` | The trace is shown only with this layout. |
| `rows` | Name of the hover texts, which the page holds once for several plots. |
| `picks` | Positions of the trace's points among these texts; all of them if it is missing. |

Plotly interprets tags in text, so text from data is escaped here.

References:
    Confidence lines: Bigi et al., "A prediction rigidity formalism for low-cost uncertainties in
        trained neural networks", 2024, appendix "Plot details".
    Quantiles of chi-square: Wilson and Hilferty, "The distribution of chi-square", PNAS 1931.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .. import metrics
from ..metrics.ranking import retained_rmse
from ..plots import BLACK, BLUE, GREY, VERMILION, confidence_factors, log_limits, thinned_curve
from .formatting import exact
from .rows import TargetRows, thinned
from .scores import bin_sizes, default_bin_size

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Layout, Scatter

Trace: TypeAlias = "Scatter | Bar"
Hover: TypeAlias = "str | Sequence[str]"
"""Hover texts of the points of a plot, or the name under which the page holds them."""

LOG = "logarithmic"
LINEAR = "linear"
_MOST_CURVE_POINTS = 400
_MOST_BARS = 800
"""A parity plot shows at most this many rows, since error bars hide one another."""
_MOST_HOVER_LINES = 24
_TRANSLUCENT_BLUE = "rgba(0,114,178,0.35)"
_TRANSLUCENT_GREY = "rgba(128,128,128,0.25)"


@dataclass(frozen=True)
class Plot:
    """One plot of a page.

    Attributes:
        name: Short name, unique within a section.
        title: A question or a statement.
        caption: How to read it.
        label: A description for readers who cannot see the plot.
        traces: Lists of traces by the first choice (rows per bin); a single list is under "".
        layouts: Layouts by the second choice (kind of axes); a single one is under "".
        choice: The page's label for the first choice.
        chosen: The initial value of the first choice; by default the first key of `traces`.
        height: Height in pixels.
    """

    name: str
    title: str
    caption: str
    label: str
    traces: Mapping[str, Sequence[Trace]]
    layouts: Mapping[str, Layout]
    choice: str = ""
    chosen: str = ""
    height: int = 420

    def plain(self) -> dict[str, Any]:
        """What the page's script needs, as values for JSON."""
        traces = {
            choice: [trace.to_plotly_json() for trace in choice_traces]
            for choice, choice_traces in self.traces.items()
        }
        layouts = {choice: layout.to_plotly_json() for choice, layout in self.layouts.items()}
        return {
            "traces": traces,
            "layouts": layouts,
            "chosen": self.chosen or next(iter(self.traces)),
            "height": self.height,
        }


# --- the plots ---------------------------------------------------------------------------------


def errors(std: Tensor, error: Tensor, hover: Hover) -> Plot:
    """|error| against bar, with the lines that enclose 1, 2 and 3 sigma of the rows.

    Args:
        std: Bars of the rows to show, (N,).
        error: Their errors, (N,). Those below the logarithmic axis are drawn as triangles on its
            lower edge.
        hover: Their hover texts.
    """
    error = error.abs()
    smallest = float(error.kthvalue(1 + len(error) // 200).values)
    floor = max(smallest, confidence_factors(3)[0] * float(std.min()))
    low, high = log_limits(torch.cat([std, error.clamp(min=floor)]))
    traces = [points(std, error, "rows", hover=hover)]
    below = (error < low).nonzero()[:, 0]
    if len(below):
        lower_edge = torch.full_like(std[below], low)
        triangles = points(
            std[below], lower_edge, "below the axis", hover=hover, picks=below.tolist()
        )
        triangles.marker.symbol = "triangle-down"
        triangles.meta = {**(triangles.meta or {}), "only": LOG}
        traces.append(triangles)
    traces.extend(_confidence_lines(low, high))
    return Plot(
        name="errors",
        title="Do larger bars mean larger errors?",
        caption="Each point is a row. If the bars are right, 68 % lie between the solid orange "
        "lines, 95 % between the dashed lines and 99.7 % between the dotted ones.",
        label=f"Scatter plot of absolute error against error bar for {len(std)} rows.",
        traces={"": traces},
        layouts=log_and_linear("error bar (std)", "absolute error", low, high),
    )


def _confidence_lines(low: float, high: float) -> list[Scatter]:
    """The line error = bar, and the pairs of lines that enclose 1, 2 and 3 sigma of the rows."""
    x = _across(low, high)
    traces = [line(x, x, "error = bar", ink=True)]
    for sigmas, dash in ((1, "solid"), (2, "dash"), (3, "dot")):
        lower_factor, upper_factor = confidence_factors(sigmas)
        share = 100 * math.erf(sigmas / math.sqrt(2))
        name = f"{sigmas}σ: {share:.3g} %"
        upper = line(x, upper_factor * x, name, color=VERMILION, dash=dash, width=1.3)
        upper.legendgroup = name
        lower = line(x, lower_factor * x, name, color=VERMILION, dash=dash, width=1.3)
        lower.legendgroup = name
        lower.showlegend = False
        traces += [upper, lower]
    return traces


def all_bins(rows: TargetRows) -> dict[int, tuple[Tensor, Tensor]]:
    """Variance and MSE of bins, by the rows per bin, for every size that suits these rows."""
    return {
        size: metrics.binned(rows.mean, rows.std, rows.target, bin_size=size)
        for size in bin_sizes(len(rows))
    }


def binned(bins: Mapping[int, tuple[Tensor, Tensor]]) -> Plot:
    """MSE against variance of bins, with a choice of the rows per bin.

    Args:
        bins: Variance and MSE of the bins, by the rows per bin.
    """
    positive_values = []
    for variance, mse in bins.values():
        positive_values += [variance, mse[mse > 0]]
    low, high = log_limits(torch.cat(positive_values))
    size = default_bin_size({size: len(mse) for size, (_, mse) in bins.items()})
    traces = {
        str(bin_size): _bin_traces(bin_size, variance, mse, low, high)
        for bin_size, (variance, mse) in bins.items()
    }
    return Plot(
        name="binned",
        title="Is the error as large as the bars say?",
        caption="Rows are sorted by their bar and cut into bins. If the bars are right, the "
        "points follow the line, and 95 % of them lie within the grey band. Above the line the "
        "bars are too narrow, below it too wide. If all points lie close together, all bars are "
        "alike.",
        label=f"Mean squared error against variance of {len(bins[size][0])} bins of {size} rows.",
        traces=traces,
        layouts=log_and_linear("predicted variance", "mean squared error", low, high),
        choice="Rows per bin",
        chosen=str(size),
    )


def _bin_traces(size: int, variance: Tensor, mse: Tensor, low: float, high: float) -> list[Scatter]:
    """The band that chance allows, the line y = x, and the bins of one size."""
    texts = []
    for i, (bin_variance, bin_mse) in enumerate(zip(variance.tolist(), mse.tolist(), strict=True)):
        texts.append(
            f"bin {i + 1} of {len(mse)}"
            f"<br>variance {bin_variance:.3g} (std {math.sqrt(bin_variance):.3g})"
            f"<br>MSE {bin_mse:.3g} (RMSE {math.sqrt(bin_mse):.3g})"
        )
    # An MSE of zero is drawn on the lower edge of the logarithmic axis.
    bins = points(variance, mse.clamp(min=low), f"bins of {size}", hover=texts)
    bins.marker.size = 8
    bins.marker.opacity = 0.7
    bins.showlegend = True
    x = _across(low, high)
    lower_factor, upper_factor = mse_band(size)
    lower, upper = band(x, lower_factor * x, upper_factor * x, "sampling noise")
    return [lower, upper, line(x, x, "y = x", ink=True), bins]


def mse_band(bin_size: int) -> tuple[float, float]:
    r"""Multiples of the variance between which the MSE of a bin lies in 95 % of cases.

    They are quantiles of $\chi^2_n / n$ in the approximation of Wilson and Hilferty.

    Examples:
        >>> [round(bound, 2) for bound in mse_band(100)]  # 0.742 and 1.296
        [0.74, 1.3]
    """
    spread = 2 / (9 * bin_size)
    low = 1 - spread - 1.96 * math.sqrt(spread)
    high = 1 - spread + 1.96 * math.sqrt(spread)
    return low**3, high**3


def coverage(rows: TargetRows) -> Plot:
    """Observed against nominal coverage, beside that of a constant bar."""
    levels = torch.linspace(0, 1, 101, dtype=torch.float64)
    noise = 1.96 * (levels * (1 - levels) / len(rows)).sqrt()
    lower, upper = band(
        levels, (levels - noise).clamp(min=0), (levels + noise).clamp(max=1), "sampling noise"
    )
    traces = [lower, upper, line([0, 1], [0, 1], "y = x", ink=True)]
    if rows.bars_differ and bool(rows.error.any()):
        nominal, observed = _coverage_steps(rows.with_constant_bar)
        traces.append(line(nominal, observed, "constant bar", color=GREY, dash="dash"))
    nominal, observed = _coverage_steps(rows)
    bars = line(nominal, observed, "these bars", color=BLUE, width=2.5)
    bars.hoverinfo = "text"
    bars.hovertext = [
        f"{100 * level:.1f} % intervals cover {100 * share:.1f} %"
        for level, share in zip(nominal.tolist(), observed.tolist(), strict=True)
    ]
    traces.append(bars)
    return Plot(
        name="coverage",
        title="Do intervals cover what they promise?",
        caption="The share of true values that central intervals of every level cover. Above the "
        "line the bars are too wide, below it too narrow. The grey band is what chance allows at "
        "each level in 95 % of cases; it does not apply to the whole curve at once.",
        label="Observed against nominal coverage, with the diagonal.",
        traces={"": traces},
        layouts={"": layout(_share_axis("nominal coverage"), _share_axis("observed coverage"))},
    )


def _coverage_steps(rows: TargetRows) -> tuple[Tensor, Tensor]:
    """The calibration curve as steps, thinned to as many as can be seen."""
    mean, std, target = rows.standardised
    nominal, observed = metrics.calibration_curve(mean, std, target)
    nominal, observed = thinned_curve(nominal, observed, knots=_MOST_CURVE_POINTS)
    return nominal.repeat_interleave(2)[1:], observed.repeat_interleave(2)[:-1]


def parity(mean: Tensor, std: Tensor, target: Tensor, hover: Hover) -> Plot:
    """Predictions with their bars against true values, of some of the rows to show.

    Args:
        mean: Predictions of the rows to show, (N,).
        std: Their bars, (N,).
        target: Their true values, (N,).
        hover: Their hover texts.
    """
    picks = thinned([std, (target - mean).abs()], _MOST_BARS)
    rows = points(target[picks], mean[picks], "rows", hover=hover, picks=picks.tolist())
    rows.error_y = {
        "type": "data",
        "array": rounded(std[picks]),
        "thickness": 1,
        "width": 0,
        "color": _TRANSLUCENT_BLUE,
    }
    values = torch.cat([mean, target])
    ends = [float(values.min()), float(values.max())]
    how_many = ""
    if len(picks) < len(mean):
        how_many = f" {_MOST_BARS} of the rows are shown."
    return Plot(
        name="parity",
        title="Predictions against true values",
        caption=f"Each point is a row, with its prediction ± one bar.{how_many} On the line, the "
        "prediction equals the true value.",
        label=f"Predicted against true values of {len(picks)} rows, with error bars.",
        traces={"": [rows, line(ends, ends, "y = x", ink=True)]},
        layouts={"": layout(axis("true value"), axis("prediction ± bar"))},
    )


def sparsification(rows: TargetRows) -> Plot:
    """The RMSE of the remaining rows when the most uncertain ones are dropped."""
    squared_error = rows.error.square()
    count = len(rows)
    points_of_curve = min(_MOST_CURVE_POINTS, count)
    remaining = torch.linspace(count, 1, points_of_curve, dtype=torch.float64).round().long()
    dropped = 1 - remaining.double() / count
    by_bar = retained_rmse(squared_error, by=rows.std)[remaining - 1]
    by_error = retained_rmse(squared_error, by=squared_error)[remaining - 1]
    rmse = float(squared_error.mean().sqrt())
    traces = [
        line([0, 1], [rmse, rmse], "in any order", color=GREY, dash="dash"),
        line(dropped, by_error, "largest errors first", ink=True, dash="dot"),
        line(dropped, by_bar, "largest bars first", color=BLUE, width=2.5),
    ]
    rmse_axis = axis("RMSE of the remaining rows")
    rmse_axis["rangemode"] = "tozero"
    return Plot(
        name="sparsification",
        title="What is left when uncertain rows are dropped?",
        caption="RMSE of the remaining rows. The faster the blue line falls, the better the bars "
        "find the rows with large errors. The dotted line drops rows by their errors "
        "instead: no bars can do better.",
        label="Remaining root mean squared error against the share of rows dropped.",
        traces={"": traces},
        layouts={"": layout(_share_axis("share of rows dropped"), rmse_axis)},
    )


def histogram(rows: TargetRows) -> Plot:
    """A histogram of errors in units of their bars, with the normal curve."""
    from plotly.graph_objects import Bar

    edge = 5.0
    width = 0.25 if len(rows) >= 300 else 0.5
    bin_count = int(2 * edge / width)
    # Scores beyond the edges are counted in the outermost columns.
    z = rows.z.clamp(-edge + width / 2, edge - width / 2)
    counts = torch.histc(z, bin_count, -edge, edge)
    centres = torch.linspace(-edge + width / 2, edge - width / 2, bin_count, dtype=torch.float64)
    columns = Bar(
        x=rounded(centres),
        y=counts.long().tolist(),
        width=width,
        name="rows",
        marker={"color": BLUE, "opacity": 0.6},
        hovertemplate="%{y} rows about %{x}<extra></extra>",
    )
    x = torch.linspace(-edge, edge, 201, dtype=torch.float64)
    normal = len(rows) * width * (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
    z_axis = axis("z")
    z_axis["range"] = [-edge, edge]
    histogram_layout = layout(z_axis, axis("rows"))
    histogram_layout.bargap = 0
    return Plot(
        name="histogram",
        title="How large are errors in units of their bars?",
        caption="z = (true value - prediction) / bar, or the normal score of the true value under "
        "the predicted distribution. If the bars are right, the columns follow the curve; a wider "
        "histogram means that the bars are too narrow. The outermost columns also contain "
        "all rows beyond the axis.",
        label="Histogram of standardised errors with the normal curve.",
        traces={"": [columns, line(x, normal, "normal curve", ink=True)]},
        layouts={"": histogram_layout},
    )


# --- hover texts -------------------------------------------------------------------------------


def hover_texts(rows: TargetRows, positions: Tensor) -> list[str]:
    """What is shown when one points at each of these rows, escaped for plotly.

    Lines end in newlines, which the page's script turns into plotly's tags: JSON in a page writes a
    tag with many more characters.
    """
    z = rows.error / rows.std
    columns = torch.stack([rows.mean, rows.std, rows.target, rows.error, z], 1)  # (N, 5)
    texts = []
    for row, numbers in zip(positions.tolist(), columns[positions].tolist(), strict=True):
        mean, std, target, error, error_in_bars = numbers
        lines = [
            f"<b>row {rows.row_number(row)}</b>",
            f"prediction {exact(mean)} ± {exact(std, 3)}",
            f"true value {exact(target)}",
            f"error {exact(error, 3)} = {error_in_bars:.2f} bars",
        ]
        for name, values in rows.inputs.items():
            lines.append(f"{plotly_text(name)}: {plotly_text(values[row])}")
        texts.append("\n".join(lines[:_MOST_HOVER_LINES]))
    return texts


def plotly_text(value: object, most: int = 60) -> str:
    """A value from data as text for plotly: shortened, and escaped since plotly reads tags."""
    text = exact(value) if isinstance(value, float) else " ".join(str(value).split("\n"))
    if len(text) > most:
        text = text[: most - 1] + "…"
    # Quotes are not escaped: plotly would show their entities.
    return html.escape(text, quote=False)


# --- parts of plots ----------------------------------------------------------------------------


def points(
    x: Tensor, y: Tensor, name: str, *, hover: Hover, picks: Sequence[int] | None = None
) -> Scatter:
    """Markers; the more there are, the fainter.

    Args:
        x: Horizontal positions, (N,).
        y: Vertical positions, (N,).
        name: Their name in the legend, if shown there.
        hover: Hover texts, or their name on the page.
        picks: Positions of the points among the hover texts; None for all.
    """
    from plotly.graph_objects import Scatter

    opacity = min(0.8, max(0.12, 14 / math.sqrt(max(1, len(x)))))
    trace = Scatter(
        mode="markers",
        x=rounded(x),
        y=rounded(y),
        name=name,
        hoverinfo="text",
        marker={"color": BLUE, "size": 6, "opacity": opacity},
        showlegend=False,
    )
    if isinstance(hover, str):
        trace.meta = {"rows": hover} if picks is None else {"rows": hover, "picks": picks}
    elif picks is None:
        trace.hovertext = list(hover)
    else:
        trace.hovertext = [hover[position] for position in picks]
    return trace


def line(
    x: Tensor | Sequence[float],
    y: Tensor | Sequence[float],
    name: str,
    *,
    color: str = BLACK,
    dash: str = "solid",
    width: float = 1.2,
    ink: bool = False,
) -> Scatter:
    """A line without hover texts; with `ink` it has the colour of the page's text."""
    from plotly.graph_objects import Scatter

    return Scatter(
        mode="lines",
        x=rounded(x),
        y=rounded(y),
        name=name,
        hoverinfo="skip",
        line={"color": color, "dash": dash, "width": width},
        meta={"ink": True} if ink else None,
    )


def band(x: Tensor, low: Tensor, high: Tensor, name: str) -> tuple[Scatter, Scatter]:
    """A grey band: an invisible lower line, and an upper one that fills the space down to it."""
    from plotly.graph_objects import Scatter

    lower = Scatter(
        mode="lines",
        x=rounded(x),
        y=rounded(low),
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
    )
    upper = Scatter(
        mode="lines",
        x=rounded(x),
        y=rounded(high),
        line={"width": 0},
        hoverinfo="skip",
        name=name,
        fill="tonexty",
        fillcolor=_TRANSLUCENT_GREY,
    )
    return lower, upper


def _across(low: float, high: float) -> Tensor:
    """Values of x from far below the axis to above it, for straight lines on either axes."""
    return torch.tensor([low / 1e3, low, high, high * 10], dtype=torch.float64)


def log_and_linear(x: str, y: str, low: float, high: float) -> dict[str, Layout]:
    """Layouts with logarithmic and with linear axes, with the same limits for x and y.

    Args:
        x: Title of the x axis.
        y: Title of the y axis.
        low: Where the logarithmic axes begin. Linear ones begin at zero.
        high: Where all axes end.
    """
    ends = [math.log10(low), math.log10(high)]
    return {
        LOG: layout(_log_axis(x, ends), _log_axis(y, ends)),
        LINEAR: layout(_linear_axis(x, high), _linear_axis(y, high)),
    }


def axis(title: str) -> dict[str, Any]:
    """An axis with its title."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True}


def _log_axis(title: str, ends: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis, from its ends in powers of ten."""
    ticks: int | str = "D2"  # 1, 2, 5 and 10
    if ends[1] - ends[0] >= 2:
        ticks = 1  # powers of ten
    return {
        **axis(title),
        "type": "log",
        "range": list(ends),
        "exponentformat": "power",
        "dtick": ticks,
    }


def _linear_axis(title: str, high: float) -> dict[str, Any]:
    """A linear axis from zero."""
    return {**axis(title), "type": "linear", "range": [0, high]}


def _share_axis(title: str) -> dict[str, Any]:
    """An axis of shares, in per cent."""
    return {**axis(title), "range": [0, 1], "tickformat": ".0%"}


def layout(x: dict[str, Any], y: dict[str, Any]) -> Layout:
    """Both axes, with the legend below them."""
    from plotly.graph_objects import Layout

    return Layout(
        xaxis=x,
        yaxis=y,
        hovermode="closest",
        legend={"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0, "xanchor": "left"},
        margin={"l": 56, "r": 12, "t": 12, "b": 48},
    )


def rounded(values: Tensor | Iterable[float]) -> list[float]:
    """Numbers to six digits: more would not be visible, and would make the page longer."""
    numbers = values.tolist() if isinstance(values, Tensor) else values
    return [float(f"{number:.6g}") for number in numbers]
