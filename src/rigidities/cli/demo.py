r"""The demonstration: error bars on two small data sets, without a network connection.

The networks are trained here and then given error bars with the public interface. These are
compared with the simplest alternative: one constant bar, the RMS error on the same calibration
rows.

- *Toy*: seven points of $y = \cos^2 x$ (Bigi et al. 2024, Fig. 1). Seven points cannot spare a
  validation set, and a network that passes through all of them has no residuals to learn from, so
  that the calibration has twenty further points.
- *Diabetes*: scikit-learn's bundled data. The networks see only rows below the 70th percentile of
  one input; the rows above show what the error bars do outside the training range. The target is
  mostly noise, hence the noise floor.

`toy` and `diabetes` give an `Outcome`: predictions and both kinds of error bars for rows inside and
outside the training range. `table` prints its scores, and `run` does all of it and draws figures.

Everything printed is ASCII: the terminal may be a file, a pipe or a dumb one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .. import metrics, plots
from ..calibration.methods import Full
from ..last_layer.rigidity import LastLayerRigidity
from ..notices import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = tuple[Tensor, Tensor]
"""Inputs, (N, P), and targets, (N, 1)."""

SHIFTED_INPUT = "s5"
SHIFTED_NAME = "log serum triglycerides"

SCORES = (
    ("RMSE", "rmse", "#.3g"),
    ("NLL (less is better)", "nll", ".2f"),
    ("CRPS (less is better)", "crps", "#.3g"),
    ("90 % intervals: coverage", "coverage", ".1%"),
    ("90 % intervals: mean width", "interval_width", "#.3g"),
    ("rank corr. of bar and error", "spearman", ".2f"),
)
"""Label, name in `metrics.summary`, and format of each row of a table."""

OPENING = """\
Error bars for small networks, trained here on two data sets. In the tables,
"constant" is one bar for all predictions: the RMS error on the calibration rows.
"rigidities" are the bars of this library, calibrated on the same rows. The networks
have not seen any of the rows that are scored.
"""
TOY = """\
1. Toy: seven points of y = cos(x)^2 with noise of 0.01, a 1-32-32-1 network.
   Calibrated on 20 more points with |x| < 1.2, scored on points with |x| < 1.5.
   "inside" means between the outermost of the seven points.
"""
DIABETES = f"""
2. Diabetes: disease progression from ten inputs, four 10-32-32-1 networks.
   Trained and calibrated on the patients with the lowest 70 % of {SHIFTED_INPUT}
   ({SHIFTED_NAME}). "inside" means other patients of that group,
   "outside" the patients above it. The target is mostly noise, so a constant
   bar is hard to beat inside.
"""
CLOSING = """
For your own trained model:

    import rigidities as rg

    uq = rg.LastLayerRigidity(model).fit(x_train, y_train).calibrate(x_valid, y_valid)
    print(uq.calibration_report)
    mean, std = uq(x)
"""


@dataclass(frozen=True)
class Bars:
    """Predictions for rows that the network has not seen, with both kinds of error bars.

    Attributes:
        mean: The predictions, (N,).
        std: The library's error bars, (N,).
        constant: The constant bar, (N,).
        target: The true values, (N,).
    """

    mean: Tensor
    std: Tensor
    constant: Tensor
    target: Tensor

    @classmethod
    def join(cls, parts: Iterable[Bars]) -> Bars:
        """Rows of several networks as one; the constant bars become one too, their RMS."""
        all_bars = list(parts)
        mean = torch.cat([bars.mean for bars in all_bars])
        constant = torch.cat([bars.constant for bars in all_bars])
        return cls(
            mean=mean,
            std=torch.cat([bars.std for bars in all_bars]),
            constant=constant.square().mean().sqrt().expand(len(mean)),
            target=torch.cat([bars.target for bars in all_bars]),
        )


class Outcome(NamedTuple):
    """Rows inside the training range and outside it, scored by networks that have not seen them."""

    inside: Bars
    outside: Bars


class Standardised(nn.Module):
    """A network between raw inputs and raw targets: shifts and scales are part of the model.

    Args:
        net: The network, between standardised inputs and targets.
        x: Training inputs, (N, P).
        y: Training targets, (N, 1).
    """

    x_mean: Tensor
    x_std: Tensor
    y_mean: Tensor
    y_std: Tensor

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("x_mean", x.mean(0))
        self.register_buffer("x_std", x.std(0))
        self.register_buffer("y_mean", y.mean(0))
        self.register_buffer("y_std", y.std(0))

    def forward(self, x: Tensor) -> Tensor:
        """Predictions in the units of the target, (N, 1)."""
        standardised: Tensor = self.net((x - self.x_mean) / self.x_std)
        return standardised * self.y_std + self.y_mean


def run(out: Path, *, seed: int = 0, echo: Callable[[str], None] = print) -> list[Path]:
    """Train, add error bars, print the tables and write the figures.

    Args:
        out: Folder for the figures; made if need be.
        seed: Of the splits, the noise and the networks.
        echo: Prints one text.

    Returns:
        The figures.

    Raises:
        ModuleNotFoundError: scikit-learn or matplotlib is missing.
    """
    missing = [package for package in ("matplotlib", "sklearn") if find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(f"The demo needs {' and '.join(missing)}: {extra('demo')}.")
    out.mkdir(parents=True, exist_ok=True)
    toy_figure = out / "toy.png"
    diabetes_figure = out / "diabetes.png"
    echo(OPENING)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        echo(TOY)
        outcome, uq, train = toy()
        echo(table(outcome))
        _draw_toy(uq, train).savefig(toy_figure, dpi=100)
        echo(DIABETES)
        outcome = diabetes()
        echo(table(outcome))
        _draw_diabetes(outcome).savefig(diabetes_figure, dpi=100)
    echo(f"\nFigures:\n    {toy_figure}\n    {diabetes_figure}")
    echo(CLOSING)
    return [toy_figure, diabetes_figure]


def toy() -> tuple[Outcome, LastLayerRigidity, Rows]:
    """Seven noisy points of cos^2, a network with two hidden layers of 32.

    Returns:
        The scored rows, the module with error bars, and the seven points.
    """
    train = _cos2_rows(torch.tensor([[-0.8], [-0.75], [0.0], [0.05], [0.07], [0.7], [0.73]]))
    model = mlp(1, 32, 32, 1)
    train_net(model, train, epochs=800, batch_size=7, lr=1e-2, weight_decay=0.0)
    valid = _cos2_rows(1.2 * (2 * torch.rand(20, 1) - 1))
    uq = LastLayerRigidity(model).fit(train).calibrate(valid)

    x, y = _cos2_rows(1.5 * (2 * torch.rand(400, 1) - 1))
    is_inside = (x[:, 0] > -0.8) & (x[:, 0] < 0.73)
    inside = bars(uq, (x[is_inside], y[is_inside]), valid)
    outside = bars(uq, (x[~is_inside], y[~is_inside]), valid)
    return Outcome(inside, outside), uq, train


def diabetes(folds: int = 4) -> Outcome:
    """Disease progression from ten inputs, trained below the 70th percentile of one of them.

    Of the folds below it, one is scored, one calibrates and the others train, in turn; each network
    scores its share of the rows above.
    """
    x, y, shifted = _diabetes_rows()
    is_low = shifted <= shifted.quantile(0.7)
    low_rows = is_low.nonzero()[torch.randperm(int(is_low.sum())), 0]
    high_rows = (~is_low).nonzero()[:, 0]
    low_folds = low_rows.tensor_split(folds)
    high_folds = high_rows.tensor_split(folds)
    inside = []
    outside = []
    for fold in range(folds):
        test, calibration, *training_folds = low_folds[fold:] + low_folds[:fold]
        beyond = high_folds[fold]
        training = torch.cat(training_folds)
        train = (x[training], y[training])
        valid = (x[calibration], y[calibration])
        model = Standardised(mlp(10, 32, 32, 1), *train)
        train_net(model, train, epochs=20, batch_size=32, lr=3e-3, weight_decay=1e-2)
        uq = LastLayerRigidity(model).fit(train)
        uq.calibrate(valid, method=Full(noise="constant"))
        inside.append(bars(uq, (x[test], y[test]), valid))
        outside.append(bars(uq, (x[beyond], y[beyond]), valid))
    return Outcome(Bars.join(inside), Bars.join(outside))


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with SiLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers.append(nn.Linear(inputs, outputs))
        layers.append(nn.SiLU())
    return nn.Sequential(*layers[:-1])


def train_net(
    model: nn.Module, rows: Rows, *, epochs: int, batch_size: int, lr: float, weight_decay: float
) -> None:
    """AdamW on the squared error, for a fixed number of epochs."""
    x, y = rows
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(x)), batch_size):
            optimiser.zero_grad()
            loss = nn.functional.mse_loss(model(x[batch]), y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def bars(uq: LastLayerRigidity, rows: Rows, valid: Rows) -> Bars:
    """Both kinds of error bars for some rows; the constant one is the RMS error on `valid`."""
    x, y = rows
    x_valid, y_valid = valid
    prediction = uq.predict(x)
    constant = (uq.predict(x_valid).mean - y_valid).square().mean().sqrt()
    return Bars(
        mean=prediction.mean[:, 0],
        std=prediction.std[:, 0],
        constant=constant.expand(len(x)),
        target=y[:, 0],
    )


def table(outcome: Outcome) -> str:
    """Scores of both kinds of error bars, and what they say about rows outside, in a sentence."""
    columns = []
    for scored in outcome:
        columns.append(metrics.summary(scored.mean, scored.constant, scored.target))
        columns.append(metrics.summary(scored.mean, scored.std, scored.target))

    inside_title = f"inside ({len(outcome.inside.mean)} rows)"
    outside_title = f"outside ({len(outcome.outside.mean)} rows)"
    lines = [
        f"{'':<29}{inside_title:>24}{outside_title:>24}",
        f"{'error bars:':<29}" + f"{'constant':>12}{'rigidities':>12}" * 2,
    ]
    for label, key, form in SCORES:
        numbers = [_number(column[key], form) for column in columns]
        lines.append(f"{label:<29}" + "".join(f"{number:>12}" for number in numbers))

    constant_coverage = columns[2]["coverage"]
    our_coverage = columns[3]["coverage"]
    shown = "\n".join(f"  {line}" for line in lines)
    return (
        f"{shown}\n\n  Outside, 90 % intervals of the constant bar cover {constant_coverage:.0%} "
        f"of the targets;\n  those of rigidities cover {our_coverage:.0%}."
    )


def _draw_toy(uq: LastLayerRigidity, train: Rows) -> Figure:
    """The seven points, the network, its error bars and the truth."""
    figure, (ax,) = _figure(1, width=6.4)
    x = torch.linspace(-1.5, 1.5, 301)[:, None]
    mean, std = uq(x)
    plots.along(x, mean, std, train=train, ax=ax)
    ax.plot(x, x.cos().square(), "--", color=plots.BLACK, lw=1, label="cos²x")
    ax.set(title="Seven points, one network, calibrated error bars", xlabel="x", ylabel="y")
    ax.set(ylim=(-0.6, 1.6), xlim=(-1.5, 1.5))
    _mark_guard(ax, uq, x)
    ax.legend(loc="upper center", ncols=2, framealpha=0.7, edgecolor="none")
    return figure


def _mark_guard(ax: Axes, uq: LastLayerRigidity, x: Tensor) -> None:
    """Mark where the guard sets in, and say so.

    Args:
        ax: The axes.
        uq: The module with error bars, calibrated.
        x: Inputs from left to right, (N, 1).
    """
    guard = uq.calibration.guard
    if guard is None:
        return
    q = 1 / uq.predict(x).rigidity  # (N, 1)
    unguarded = x[(q <= guard.reference)[:, 0], 0]
    for edge in (float(unguarded.min()), float(unguarded.max())):
        ax.axvline(edge, color=plots.BLACK, lw=0.8, ls=":")
    ax.text(
        float(unguarded.mean()),
        -0.35,
        "Only a tenth of the rows lie beyond the\ndotted lines. There, a rule widens the bars,\n"
        "up to the spread of the targets and more.",
        ha="center",
        va="center",
        fontsize=9,
    )


def _draw_diabetes(outcome: Outcome) -> Figure:
    """Predictions beside observations, errors beside bars, and the calibration outside."""
    figure, (parity_ax, binned_ax, calibration_ax) = _figure(3, width=13.5)
    _draw_parity(parity_ax, outcome)

    both = Bars.join(outcome)
    plots.binned(both.mean, both.std, both.target, bin_size=40, ax=binned_ax)
    binned_ax.set_title("All rows: do larger bars mean larger errors?")

    outside = outcome.outside
    plots.calibration(outside.mean, outside.std, outside.target, ax=calibration_ax)
    nominal, observed = metrics.calibration_curve(outside.mean, outside.constant, outside.target)
    calibration_ax.step(
        nominal, observed, where="post", ls="--", color=plots.BLACK, label="constant bar"
    )
    calibration_ax.legend(loc="upper left", framealpha=0.7, edgecolor="none")
    calibration_ax.set_title("Outside: do intervals cover what they should?")
    return figure


def _draw_parity(ax: Axes, outcome: Outcome) -> None:
    """Predictions with error bars beside observations, inside and outside by colour."""
    _draw_predictions(ax, outcome.inside, label="inside", color=plots.BLUE)
    _draw_predictions(ax, outcome.outside, label="outside", color=plots.VERMILION)
    ax.axline((150, 150), slope=1, color=plots.BLACK, lw=1)
    ax.set(xlabel="observed", ylabel="predicted ± std", title="Diabetes: patients not seen before")
    ax.set_box_aspect(1)
    ax.legend(title="training range", loc="upper left", framealpha=0.7, edgecolor="none")


def _draw_predictions(ax: Axes, scored: Bars, *, label: str, color: str) -> None:
    """Points with error bars."""
    ax.errorbar(
        scored.target,
        scored.mean,
        scored.std,
        fmt="o",
        markersize=2.5,
        elinewidth=0.6,
        alpha=0.5,
        color=color,
        label=label,
    )


def _figure(panels: int, width: float) -> tuple[Figure, list[Axes]]:
    """A figure and its panels side by side."""
    # Without pyplot there is no backend to choose, and no screen is needed.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.4))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _cos2_rows(x: Tensor) -> Rows:
    """Inputs, and noisy targets of the toy."""
    return x, x.cos().square() + 0.01 * torch.randn_like(x)


def _diabetes_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (442, 10), targets (442, 1) and the input that is cut at its 70th percentile."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    x = torch.tensor(data.data, dtype=torch.float32)
    y = torch.tensor(data.target, dtype=torch.float32)
    return x, y[:, None], x[:, data.feature_names.index(SHIFTED_INPUT)]


def _number(value: float, form: str) -> str:
    """The number in a format, or a dash where it is undefined."""
    if math.isnan(value):
        return "-"
    text = f"{value:{form}}".rstrip(".")
    return "0.00" if text == "-0.00" else text
