r"""The demonstration: error bars on two small data sets, without a network connection.

Both nets are trained here, then given error bars with the public interface, which are compared with
the simplest alternative: one constant bar, the RMS error on the same calibration rows.

- *Toy*: seven points of $y = \cos^2 x$ (Bigi et al. 2024, Fig. 1). Seven points cannot spare a
  validation set, and a net that passes through all of them has no residuals to learn from, so the
  calibration has twenty further points.
- *Diabetes*: scikit-learn's bundled data. The net sees only rows below the 70th percentile of one
  input; the rows above show what the error bars do outside the training range. The target is
  mostly noise, hence the noise floor.

Everything printed is ASCII: the terminal may be a file, a pipe or a dumb one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import metrics, plots
from ..last_layer.rigidity import LastLayerRigidity
from ..notices import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = tuple[Tensor, Tensor]

SHIFTED_INPUT, SHIFTED_NAME = "s5", "log serum triglycerides"
# Label, name in `metrics.summary`, and format of each row of a table.
SCORES = (
    ("RMSE", "rmse", "#.3g"),
    ("NLL (less is better)", "nll", ".2f"),
    ("CRPS (less is better)", "crps", "#.3g"),
    ("90 % intervals: coverage", "coverage", ".1%"),
    ("90 % intervals: mean width", "interval_width", "#.3g"),
    ("rank corr. of bar and error", "spearman", ".2f"),
)
OPENING = """\
Error bars for small nets, trained here on two data sets. In the tables "constant"
is one bar for all predictions, the RMS error on the calibration rows; "rigidities"
are this library's, calibrated on the same rows. The nets saw none of the rows scored.
"""
TOY = """\
1. Toy: seven points of y = cos(x)^2 with noise of 0.01, a 1-32-32-1 net.
   Calibrated on 20 more points with |x| < 1.2, scored up to |x| = 1.5;
   inside means between the outermost of the seven points.
"""
DIABETES = f"""
2. Diabetes: disease progression from ten inputs, four 10-32-32-1 nets.
   Trained and calibrated where {SHIFTED_INPUT} ({SHIFTED_NAME}) is in its lower
   70 %; inside means other patients there, outside the patients above.
   The target is mostly noise, so that inside a constant bar is hard to beat.
"""
CLOSING = """
For your own trained model:

    import rigidities as rg

    uq = rg.LastLayerRigidity(model).fit((x_train, y_train))
    print(uq.calibrate((x_valid, y_valid)))
    mean, std = uq(x)
"""


@dataclass(frozen=True)
class Bars:
    """Predictions for rows that the net has not seen, with their error bars, all of shape (N,)."""

    mean: Tensor
    std: Tensor
    constant: Tensor
    target: Tensor

    @classmethod
    def join(cls, parts: Iterable[Bars]) -> Bars:
        """Rows of several nets as one; the constant bars become one too, their RMS."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        mean, std, constant, target = map(torch.cat, columns)
        return cls(mean, std, constant.square().mean().sqrt().expand(len(mean)), target)


class Outcome(NamedTuple):
    """Rows inside the training range and outside it, scored by nets that have not seen them."""

    inside: Bars
    outside: Bars


class Standardised(nn.Module):
    """A net between raw inputs and raw targets: shifts and scales are part of the model."""

    x_mean: Tensor
    x_std: Tensor
    y_mean: Tensor
    y_std: Tensor

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.net = net
        for name, rows in {"x": x, "y": y}.items():
            self.register_buffer(f"{name}_mean", rows.mean(0))
            self.register_buffer(f"{name}_std", rows.std(0))

    def forward(self, x: Tensor) -> Tensor:
        """Predictions in the units of the target, (N, 1)."""
        hidden: Tensor = self.net((x - self.x_mean) / self.x_std)
        return hidden * self.y_std + self.y_mean


def run(out: Path, *, seed: int = 0, echo: Callable[[str], None] = print) -> list[Path]:
    """Train, add error bars, print the tables and write the figures.

    Args:
        out: folder for the figures; made if need be.
        seed: of the splits, the noise and the nets.
        echo: prints one text.

    Returns:
        The figures.

    Raises:
        ModuleNotFoundError: scikit-learn or matplotlib is missing.
    """
    if missing := [name for name in ("matplotlib", "sklearn") if find_spec(name) is None]:
        raise ModuleNotFoundError(f"The demo needs {' and '.join(missing)}: {extra('demo')}.")
    out.mkdir(parents=True, exist_ok=True)
    echo(OPENING)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        echo(TOY)
        outcome, uq, train = toy()
        echo(table(outcome))
        _draw_toy(uq, train).savefig(out / "toy.png", dpi=100)
        echo(DIABETES)
        outcome = diabetes()
        echo(table(outcome))
        _draw_diabetes(outcome).savefig(out / "diabetes.png", dpi=100)
    figures = [out / "toy.png", out / "diabetes.png"]
    echo("\nFigures:\n" + "\n".join(f"    {figure}" for figure in figures))
    echo(CLOSING)
    return figures


def toy() -> tuple[Outcome, LastLayerRigidity, Rows]:
    """Seven noisy points of cos^2, a net with two hidden layers of 32.

    Returns:
        The scored rows, the module with error bars, and the seven points.
    """
    train = _cos2_rows(torch.tensor([[-0.8], [-0.75], [0.0], [0.05], [0.07], [0.7], [0.73]]))
    model = mlp(1, 32, 32, 1)
    train_net(model, train, epochs=800, batch_size=7, lr=1e-2, weight_decay=0.0)
    valid = _cos2_rows(1.2 * (2 * torch.rand(20, 1) - 1))
    uq = LastLayerRigidity(model).fit(train)
    uq.calibrate(valid)
    x, y = _cos2_rows(1.5 * (2 * torch.rand(400, 1) - 1))
    near = (x[:, 0] > -0.8) & (x[:, 0] < 0.73)
    inside, outside = (bars(uq, (x[rows], y[rows]), valid) for rows in (near, ~near))
    return Outcome(inside, outside), uq, train


def diabetes(folds: int = 4) -> Outcome:
    """Disease progression from ten inputs, trained below the 70th percentile of one of them.

    Of the folds below it, one is scored, one calibrates and the others train, in turn; each net
    scores its share of the rows above.
    """
    x, y, shifted = _diabetes_rows()
    low = shifted <= shifted.quantile(0.7)
    parts = low.nonzero()[torch.randperm(int(low.sum())), 0].tensor_split(folds)
    inside, outside = [], []
    for fold, beyond in enumerate((~low).nonzero()[:, 0].tensor_split(folds)):
        test, held, *rest = parts[fold:] + parts[:fold]
        valid, used = (x[held], y[held]), torch.cat(rest)
        train = x[used], y[used]
        model = Standardised(mlp(10, 32, 32, 1), *train)
        train_net(model, train, epochs=20, batch_size=32, lr=3e-3, weight_decay=1e-2)
        uq = LastLayerRigidity(model).fit(train)
        uq.calibrate(valid, noise="constant")
        inside.append(bars(uq, (x[test], y[test]), valid))
        outside.append(bars(uq, (x[beyond], y[beyond]), valid))
    return Outcome(Bars.join(inside), Bars.join(outside))


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with SiLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.SiLU()]
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
            nn.functional.mse_loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def bars(uq: LastLayerRigidity, rows: Rows, valid: Rows) -> Bars:
    """Both kinds of error bars for some rows; the constant one is the RMS error on `valid`."""
    prediction, (x, y) = uq.predict(rows[0]), valid
    constant = (uq.predict(x).mean - y).square().mean().sqrt().expand(len(rows[0]))
    return Bars(prediction.mean[:, 0], prediction.std[:, 0], constant, rows[1][:, 0])


def table(outcome: Outcome) -> str:
    """Scores of both kinds of error bars, and what they say about rows outside, in a sentence."""
    pairs = [(part, std) for part in outcome for std in (part.constant, part.std)]
    columns = [metrics.summary(part.mean, std, part.target) for part, std in pairs]
    counts = (len(part.mean) for part in outcome)
    places = map("{} ({} rows)".format, ("inside", "outside"), counts)
    lines = [" " * 29 + "".join(f"{place:>24}" for place in places)]
    lines.append(f"{'error bars:':<29}" + f"{'constant':>12}{'rigidities':>12}" * 2)
    for label, key, form in SCORES:
        numbers = (_number(column[key], form) for column in columns)
        lines.append(f"{label:<29}" + "".join(f"{number:>12}" for number in numbers))
    constant, ours = (column["coverage"] for column in columns[2:])
    shown = "\n".join(f"  {line}" for line in lines)
    held = f"intervals of the constant bar hold {constant:.0%} of the targets, these {ours:.0%}"
    return f"{shown}\n\n  Outside, 90 % {held}."


def _draw_toy(uq: LastLayerRigidity, train: Rows) -> Figure:
    figure, (ax,) = _figure(1, width=6.4)
    x = torch.linspace(-1.5, 1.5, 301)[:, None]
    mean, std = uq(x)
    plots.along(x, mean, std, train=train, ax=ax)
    ax.plot(x, x.cos().square(), "--", color=plots.BLACK, lw=1, label="cos²x")
    ax.set(title="Seven points, one net, calibrated error bars", xlabel="x", ylabel="y")
    ax.set(ylim=(-0.6, 1.6), xlim=(-1.5, 1.5))
    ax.legend(loc="upper right", ncols=2, framealpha=0.7, edgecolor="none")
    return figure


def _draw_diabetes(outcome: Outcome) -> Figure:
    figure, axes = _figure(3, width=13.5)
    _draw_parity(axes[0], outcome)
    both = Bars.join(outcome)
    plots.binned(both.mean, both.std, both.target, bin_size=40, ax=axes[1])
    axes[1].set_title("All rows: do larger bars mean larger errors?")
    part, ax = outcome.outside, axes[2]
    plots.calibration(part.mean, part.std, part.target, ax=ax)
    nominal, observed = metrics.calibration_curve(part.mean, part.constant, part.target)
    ax.step(nominal, observed, where="post", ls="--", color=plots.BLACK, label="constant bar")
    ax.legend(loc="upper left", framealpha=0.7, edgecolor="none")
    ax.set_title("Outside: do intervals hold what they promise?")
    return figure


def _draw_parity(ax: Axes, outcome: Outcome) -> None:
    colors = (plots.BLUE, plots.VERMILION)
    for label, part, color in zip(("inside", "outside"), outcome, colors, strict=True):
        style: dict[str, Any] = {"fmt": "o", "markersize": 2.5, "elinewidth": 0.6, "alpha": 0.5}
        ax.errorbar(part.target, part.mean, part.std, color=color, label=label, **style)
    ax.axline((150, 150), slope=1, color=plots.BLACK, lw=1)
    ax.set(xlabel="observed", ylabel="predicted ± std", title="Diabetes: patients not seen before")
    ax.set_box_aspect(1)
    ax.legend(title="training range", loc="upper left", framealpha=0.7, edgecolor="none")


def _figure(panels: int, width: float) -> tuple[Figure, list[Axes]]:
    # Without pyplot there is no backend to choose, and no screen is needed.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.4))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _cos2_rows(x: Tensor) -> Rows:
    return x, x.cos().square() + 0.01 * torch.randn_like(x)


def _diabetes_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (442, 10), targets (442, 1) and the input that is cut at its 70th percentile."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    x, y = (torch.tensor(one, dtype=torch.float32) for one in (data.data, data.target))
    return x, y[:, None], x[:, data.feature_names.index(SHIFTED_INPUT)]


def _number(value: float, form: str) -> str:
    """The number in a format, or a dash where it is undefined."""
    text = "-" if math.isnan(value) else f"{value:{form}}".rstrip(".")
    return "0.00" if text == "-0.00" else text
