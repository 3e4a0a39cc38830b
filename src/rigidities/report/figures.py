r"""The interactive plots, as plain data for plotly.js.

A `Figure` holds its traces for each choice of one kind (the rows per bin) and its layout for each
choice of another (logarithmic or linear axes). `meta` of a trace tells the page's script what
plotly does not know: `ink`, drawn in the colour of text; `only`, shown with one layout alone;
`rows` and `picks`, where its hover texts lie (the `hover` of plots of single rows).

Text that plotly draws may hold tags, so that text from data is escaped here too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import metrics
from ..metrics.ranking import retained_rmse
from ..plots import BLUE, GREY, VERMILION, confidence_factors, log_limits, thinned_curve
from .markup import around
from .rows import Rows, thinned
from .scores import bin_sizes, default_bin_size

Trace = dict[str, Any]

LOG, LINEAR = "logarithmic", "linear"
_SHARE = {"range": [0, 1], "tickformat": ".0%"}
_CURVE = 400
_MOST_BARS = 800


@dataclass(frozen=True)
class Figure:
    """One plot.

    Attributes:
        name: short and unique within a section.
        title: a question or a statement.
        caption: how to read it.
        label: what one sees, for those who do not see it.
        traces: by choice of the first kind; a single one under "".
        layouts: by choice of the second kind; a single one under "".
        choice: what the first kind is called.
        chosen: the choice of the first kind to begin with.
        height: in pixels.
    """

    name: str
    title: str
    caption: str
    label: str
    traces: Mapping[str, list[Trace]]
    layouts: Mapping[str, dict[str, Any]]
    choice: str = ""
    chosen: str = ""
    height: int = 420


def errors(std: Tensor, error: Tensor, hover: Trace) -> Figure:
    """|error| against bar of the rows to show, with the lines that hold 1, 2 and 3 sigma."""
    error = error.abs()
    smallest = float(error.kthvalue(1 + len(error) // 200).values)
    floor = max(smallest, confidence_factors(3)[0] * float(std.min()))
    low, high = log_limits(torch.cat([std, error.clamp(min=floor)]))
    below = (error < low).nonzero()[:, 0]
    drawn = points(std, error, "rows", hover)
    under = points(std[below], torch.full_like(std[below], low), "below the axis", hover)
    under["meta"] = {**hover, "only": LOG, "picks": below.tolist()}
    under["marker"] |= {"symbol": "triangle-down"}
    traces = [drawn, *([under] if len(below) else []), *_sigma_lines(low, high)]
    return Figure(
        "errors",
        "Do larger bars mean larger errors?",
        "Each point is a row. If the bars are right, 68 % lie between the solid orange lines, 95 % "
        "between the dashed and 99.7 % between the dotted ones.",
        f"Scatter plot of absolute error against error bar for {len(std)} rows.",
        {"": traces},
        two_layouts("error bar (std)", "absolute error", low, high),
    )


def binned(bins: Mapping[int, tuple[Tensor, Tensor]]) -> Figure:
    """MSE against variance of bins, given by the rows per bin, of which there is a choice."""
    values = torch.cat([torch.cat([variance, mse[mse > 0]]) for variance, mse in bins.values()])
    low, high = log_limits(values)
    chosen = default_bin_size({size: len(mse) for size, (_, mse) in bins.items()})
    return Figure(
        "binned",
        "Is the error as large as the bars say?",
        "Rows sorted by their bar and cut into bins. Bars that are right give points on the line, "
        "within the grey band in 95 % of the bins. Above it the bars are too narrow, below it too "
        "wide; points in a heap say that all bars are alike.",
        f"Mean squared error against variance of {len(bins[chosen][0])} bins of {chosen} rows.",
        {str(size): _binned_traces(size, *pair, low, high) for size, pair in bins.items()},
        two_layouts("predicted variance", "mean squared error", low, high),
        choice="Rows per bin",
        chosen=str(chosen),
    )


def all_bins(rows: Rows) -> dict[int, tuple[Tensor, Tensor]]:
    """Bins of every size that makes sense; none for too few rows."""
    sizes = bin_sizes(len(rows))
    return {n: metrics.binned(rows.mean, rows.std, rows.target, bin_size=n) for n in sizes}


def mse_band(bin_size: int) -> tuple[float, float]:
    r"""Between what multiples of the variance the MSE of a bin lies in 95 % of cases.

    Quantiles of $\chi^2_n / n$ in the approximation of Wilson and Hilferty (1931).

    Examples:
        >>> [round(bound, 2) for bound in mse_band(100)]  # 0.742 and 1.296
        [0.74, 1.3]
    """
    spread = 2 / (9 * bin_size)
    low, high = (1 - spread + z * math.sqrt(spread) for z in (-1.96, 1.96))
    return low**3, high**3


def coverage(rows: Rows) -> Figure:
    """Observed against nominal coverage, beside that of a constant bar."""
    nominal, observed = _steps(*rows.standard)
    p = torch.linspace(0, 1, 101, dtype=torch.float64)
    noise = 1.96 * (p * (1 - p) / len(rows)).sqrt()
    traces: list[Trace] = [
        *band(p, (p - noise).clamp(min=0), (p + noise).clamp(max=1), "sampling noise"),
        line([0, 1], [0, 1], "y = x", meta={"ink": True}),
    ]
    if rows.spread and bool(rows.error.any()):
        x, y = _steps(*rows.plain.standard)
        traces.append(line(x, y, "constant bar", color=GREY, dash="dash"))
    traces.append(line(nominal, observed, "these bars", color=BLUE, width=2.5))
    pairs = zip(nominal.tolist(), observed.tolist(), strict=True)
    texts = [f"{100 * p:.1f} % intervals hold {100 * q:.1f} %" for p, q in pairs]
    traces[-1] |= {"hoverinfo": "text", "hovertext": texts}
    return Figure(
        "coverage",
        "Do intervals hold what they promise?",
        "The share of true values inside central intervals of every level. Above the line the bars "
        "are too wide, below it too narrow; the grey band is what chance allows at each level in "
        "95 % of cases, not for the whole curve at once.",
        "Observed against nominal coverage, with the diagonal.",
        {"": traces},
        {"": layout(axis("nominal coverage", **_SHARE), axis("observed coverage", **_SHARE))},
    )


def parity(mean: Tensor, std: Tensor, target: Tensor, hover: Trace) -> Figure:
    """Predictions with their bars against true values, of some of the rows to show."""
    picks = thinned([std, (target - mean).abs()], _MOST_BARS)
    ends = [float(f(torch.cat([mean, target]))) for f in (torch.min, torch.max)]
    drawn = points(target[picks], mean[picks], "rows", {**hover, "picks": picks.tolist()})
    bars = {"type": "data", "thickness": 1, "width": 0, "color": "rgba(0,114,178,0.35)"}
    drawn["error_y"] = {**bars, "array": rounded(std[picks])}
    some = f" {_MOST_BARS} of the rows are shown." if len(picks) < len(mean) else ""
    return Figure(
        "parity",
        "Predictions against true values",
        f"Each row with its prediction ± one bar.{some} On the line the prediction is exact.",
        f"Predicted against true values of {len(picks)} rows, with error bars.",
        {"": [drawn, line(ends, ends, "y = x", meta={"ink": True})]},
        {"": layout(axis("true value"), axis("prediction ± bar"))},
    )


def sparsification(rows: Rows) -> Figure:
    """The error that is left when the most uncertain rows are dropped."""
    squared = rows.error.square()
    count = len(rows)
    keep = torch.linspace(count, 1, min(_CURVE, count), dtype=torch.float64).round().long()
    dropped = 1 - keep.double() / count
    ours, best = (retained_rmse(squared, by=by)[keep - 1] for by in (rows.std, squared))
    whole = float(squared.mean().sqrt())
    axes = axis("share of rows dropped", **_SHARE), axis("RMSE of the rest", rangemode="tozero")
    traces = [
        line([0, 1], [whole, whole], "in any order", color=GREY, dash="dash"),
        line(dropped, best, "largest errors first", meta={"ink": True}, dash="dot"),
        line(dropped, ours, "largest bars first", color=BLUE, width=2.5),
    ]
    return Figure(
        "sparsification",
        "What is left when uncertain rows are dropped?",
        "RMSE of the rows that remain. The faster the blue line falls, the better the bars find "
        "the rows with large errors; the dotted line knows the errors and cannot be beaten.",
        "Remaining root mean squared error against the share of rows dropped.",
        {"": traces},
        {"": layout(*axes)},
    )


def histogram(rows: Rows) -> Figure:
    """Errors in units of their bars, beside the normal curve."""
    edge, width = 5.0, 0.25 if len(rows) >= 300 else 0.5
    bins = int(2 * edge / width)
    inside = rows.z.clamp(-edge + width / 2, edge - width / 2)
    counts = torch.histc(inside, bins, -edge, edge)
    centres = torch.linspace(-edge + width / 2, edge - width / 2, bins, dtype=torch.float64)
    x = torch.linspace(-edge, edge, 201, dtype=torch.float64)
    normal = len(rows) * width * (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
    bars: Trace = {"type": "bar", "x": rounded(centres), "y": counts.long().tolist()}
    bars |= {"width": width, "name": "rows", "marker": {"color": BLUE, "opacity": 0.6}}
    bars["hovertemplate"] = "%{y} rows about %{x}<extra></extra>"
    return Figure(
        "histogram",
        "How large are errors in units of their bars?",
        "z = (true value - prediction) / bar, or as the distribution has it. Right bars follow the curve; a "
        "wider heap means too narrow bars. The outermost columns hold all that lies beyond.",
        "Histogram of standardised errors with the normal curve.",
        {"": [bars, line(x, normal, "normal curve", meta={"ink": True})]},
        {"": {**layout(axis("z", range=[-edge, edge]), axis("rows")), "bargap": 0}},
    )


def dots(name: str, panels: Mapping[str, Mapping[str, tuple[float, float | None]]]) -> Figure:
    """Means with standard errors by metric and by method, with a choice of the metric."""
    longest = max(len(methods) for methods in panels.values())
    plain = layout(axis(""), {**axis(""), "type": "category", "autorange": "reversed"})
    plain["showlegend"] = False
    label = f"Means with standard errors of {longest} methods on {name}."
    traces = {metric: [_dot_trace(methods)] for metric, methods in panels.items()}
    return Figure("dots", name, "", label, traces, {"": plain}, height=90 + 34 * longest)


def hover_texts(rows: Rows, index: Tensor) -> list[str]:
    """What is shown at each row, escaped for plotly."""
    texts = []
    parts = (rows.mean, rows.std, rows.target, rows.error, rows.error / rows.std)
    numbers = torch.stack(parts, 1)[index].tolist()
    for i, (mean, std, target, error, z) in zip(index.tolist(), numbers, strict=True):
        lines = [
            f"<b>row {rows.number(i)}</b>",
            f"prediction {mean:.6g} ± {std:.3g}",
            f"true value {target:.6g}",
            f"error {error:.3g} = {z:.2f} bars",
        ]
        lines += [f"{_short(key)}: {_short(values[i])}" for key, values in rows.inputs.items()]
        texts.append("<br>".join(lines[:24]))
    return texts


def _short(value: object, most: int = 60) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # quotes stay: plotly would show their entities
    return html.escape(text if len(text) <= most else text[: most - 1] + "…", quote=False)


def distinct_labels(names: Iterable[str], most: int = 24) -> list[str]:
    """Names cut in the middle where they are long, numbered where they would be alike.

    Examples:
        >>> distinct_labels(["an ensemble of ten nets, first", "an ensemble of ten nets, last"])
        ['an ensemble …nets, first', 'an ensemble … nets, last']
        >>> distinct_labels(["abcdefgh", "abcxefgh"], most=6)
        ['abc…gh', 'abc…gh (2)']
    """
    found: list[str] = []
    tail = (most - 1) // 2
    for name in names:
        short = name if len(name) <= most else f"{name[: most - 1 - tail]}…{name[-tail:]}"
        label, number = short, 1
        while label in found:
            number += 1
            label = f"{short} ({number})"
        found.append(label)
    return found


def _dot_trace(methods: Mapping[str, tuple[float, float | None]]) -> Trace:
    known = {key: pair for key, pair in methods.items() if math.isfinite(pair[0])}
    bars = [e if e is not None and math.isfinite(e) else 0.0 for _, e in known.values()]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [mean for mean, _ in known.values()],
        "y": [_short(label, 40) for label in distinct_labels(known)],
        "error_x": {"type": "data", "array": bars, "thickness": 1.5, "width": 4, "color": BLUE},
        "marker": {"color": BLUE, "size": 9},
        "hoverinfo": "text",
        "hovertext": [
            f"{_short(key)}: {around(mean, error)}"
            for (key, (mean, _)), error in zip(known.items(), bars, strict=True)
        ],
    }


def _binned_traces(
    size: int, variance: Tensor, mse: Tensor, low: float, high: float
) -> list[Trace]:
    below, above = mse_band(size)
    x = across(low, high)
    drawn = points(variance, mse.clamp(min=low), f"bins of {size}", {})
    drawn["marker"] |= {"size": 8, "opacity": 0.7}
    drawn["showlegend"] = True
    drawn["hovertext"] = [
        f"bin {i + 1} of {len(mse)}<br>variance {v:.3g} (std {math.sqrt(v):.3g})"
        f"<br>MSE {m:.3g} (RMSE {math.sqrt(m):.3g})"
        for i, (v, m) in enumerate(zip(variance.tolist(), mse.tolist(), strict=True))
    ]
    noise = band(x, below * x, above * x, "sampling noise")
    return [*noise, line(x, x, "y = x", meta={"ink": True}), drawn]


def _sigma_lines(low: float, high: float) -> list[Trace]:
    x = across(low, high)
    traces = [line(x, x, "error = bar", meta={"ink": True})]
    for sigmas, dash in ((1, "solid"), (2, "dash"), (3, "dot")):
        below, above = confidence_factors(sigmas)
        name = f"{sigmas}σ: {100 * math.erf(sigmas / math.sqrt(2)):.3g} %"
        style: Trace = {"color": VERMILION, "dash": dash, "width": 1.3}
        traces.append(line(x, above * x, name, **style) | {"legendgroup": name})
        lower = line(x, below * x, name, **style)
        traces.append(lower | {"legendgroup": name, "showlegend": False})
    return traces


def _steps(mean: Tensor, std: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The calibration curve as steps, at most so many that more would not show."""
    nominal, observed = thinned_curve(*metrics.calibration_curve(mean, std, target), knots=_CURVE)
    return nominal.repeat_interleave(2)[1:], observed.repeat_interleave(2)[:-1]


# --- parts of plots, as plotly.js takes them ---------------------------------------------------


def points(x: Tensor, y: Tensor, name: str, hover: Trace) -> Trace:
    """Markers; the more there are, the fainter."""
    opacity = min(0.8, max(0.12, 14 / math.sqrt(max(1, len(x)))))
    look = {"marker": {"color": BLUE, "size": 6, "opacity": opacity}, "showlegend": False}
    return _scatter("markers", x, y, name=name, hoverinfo="text", meta=dict(hover), **look)


def line(x: Any, y: Any, name: str, *, meta: Trace | None = None, **style: Any) -> Trace:
    """A line that hovering passes over, with a color, dash and width."""
    look = {"color": "#000000", "dash": "solid", "width": 1.2, **style}
    return _scatter("lines", x, y, name=name, hoverinfo="skip", line=look, meta=meta or {})


def band(x: Tensor, low: Tensor, high: Tensor, name: str) -> list[Trace]:
    """A grey band, as a lower line and one that fills down to it."""
    bare = {"line": {"width": 0}, "hoverinfo": "skip"}
    lower, upper = (_scatter("lines", x, y, **bare) for y in (low, high))
    filled = {"name": name, "fill": "tonexty", "fillcolor": "rgba(128,128,128,0.25)"}
    return [lower | {"showlegend": False}, upper | filled]


def _scatter(mode: str, x: Any, y: Any, **options: Any) -> Trace:
    return {"type": "scatter", "mode": mode, "x": rounded(x), "y": rounded(y), **options}


def across(low: float, high: float) -> Tensor:
    """From far below the axis to above it: straight lines on both kinds of axes."""
    return torch.tensor([low / 1e3, low, high, high * 10], dtype=torch.float64)


def two_layouts(x: str, y: str, low: float, high: float) -> dict[str, dict[str, Any]]:
    """Logarithmic and linear axes of one kind, with the same limits for x and y."""
    ends = [math.log10(low), math.log10(high)]
    log: dict[str, Any] = {"type": "log", "range": ends, "exponentformat": "power"}
    log["dtick"] = 1 if ends[1] - ends[0] >= 2 else "D2"  # powers of ten, or 1, 2, 5, 10
    linear = {"type": "linear", "range": [0, high]}
    return {
        LOG: layout(axis(x, **log), axis(y, **log)),
        LINEAR: layout(axis(x, **linear), axis(y, **linear)),
    }


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis with its title."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **options}


def layout(x: dict[str, Any], y: dict[str, Any]) -> dict[str, Any]:
    """Both axes, the legend below them."""
    return {
        "xaxis": x,
        "yaxis": y,
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0, "xanchor": "left"},
        "margin": {"l": 56, "r": 12, "t": 12, "b": 48},
    }


def rounded(values: Tensor | Iterable[float]) -> list[float]:
    """Six digits: more would not show, and make the page longer."""
    listed = values.tolist() if isinstance(values, Tensor) else values
    return [float(f"{value:.6g}") for value in listed]
