"""The pictures of the pages on plots and coverage, by small experiments with fixed seeds."""

from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from drawing import BLUE, GREEN, GREY, ORANGE
from torch import nn

import rigidities as rg
from rigidities import plots

COLOURS = {"BLACK": GREY, "GREY": GREY, "BLUE": BLUE, "VERMILION": ORANGE}
"""The colours of the library's plots, as these pages have them."""
SETTINGS = {"text.color": GREY, "figure.dpi": 144}


def in_page_colours(draw):
    """Let a function that draws with the library's plots use the colours of the pages."""

    def drawn():
        with patch.multiple(plots, **COLOURS), plt.rc_context(SETTINGS):
            return draw()

    return drawn


class Car(nn.Module):
    """A network that predicts how far a car travels before it stops."""

    def __init__(self, middle, spread):
        super().__init__()
        self.middle, self.spread = middle, spread
        self.hidden = nn.Sequential(nn.Linear(2, 64), nn.Tanh())
        self.readout = nn.Linear(64, 1)

    def forward(self, x):
        return 50 + 40 * self.readout(self.hidden((x - self.middle) / self.spread))


def measured(rows):
    """Speed and wetness of the road, and the distance in metres."""
    speed, wet = 20 + 110 * torch.rand(rows, 1), torch.rand(rows, 1)
    metres = 0.28 * speed + speed**2 / (254 * (0.8 - 0.4 * wet))
    return torch.cat([speed, wet], 1), metres * (1 + 0.1 * torch.randn(rows, 1))


def cars():
    """The cars of "Getting started": a calibrated network, and new rows."""
    torch.manual_seed(0)
    x_train, y_train = measured(600)
    x_valid, y_valid = measured(300)
    x_test, y_test = measured(1000)
    model = Car(x_train.mean(0), x_train.std(0))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x_train), y_train).backward()
        optimiser.step()
    uq = rg.LastLayerRigidity(model).fit(x_train, y_train)
    uq.calibrate(x_valid, y_valid, early_stopped=False)
    return uq, x_test, y_test


def with_bars(p, std):
    """The same predictions with other bars, of a Gaussian."""
    variance = std.square().expand_as(p.mean)
    return rg.Prediction(p.mean, 0 * variance, variance, 1 / variance)


def beside_faulty_bars(kind, faulty, title, rows=1000):
    """One kind of plot twice: of the fitted bars, and of faulty ones."""
    uq, x, y = cars()
    y = y[:rows]
    p = uq.predict(x[:rows])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.6))
    p.plot(y, kind=kind, ax=left)
    faulty(p).plot(y, kind=kind, ax=right)
    left.set_title("calibrated bars")
    right.set_title(title)
    return figure


def halved(p):
    return with_bars(p, p.std / 2)


def shuffled(p):
    return with_bars(p, p.std[torch.randperm(len(p))])


def parity():
    return beside_faulty_bars("parity", halved, "bars half as long", rows=200)


def errors():
    return beside_faulty_bars("errors", shuffled, "bars of other rows")


def binned():
    figure = beside_faulty_bars("binned", shuffled, "bars of other rows")
    figure.axes[1].get_legend().set_loc("lower right")
    return figure


def calibration():
    return beside_faulty_bars("calibration", halved, "bars half as long", rows=250)


def along():
    """A sweep of one input at a fixed value of the other."""
    uq, _, _ = cars()
    sweep = torch.stack([torch.linspace(0, 180, 181), torch.full((181,), 0.5)], 1)
    ax = uq.plot(sweep, along=0)
    ax.axvspan(20, 130, color=GREY, alpha=0.15, lw=0)
    ax.set(xlabel="speed (km/h)", ylabel="distance (m)")
    return ax.figure


def rows():
    """Rows in the order of their predictions, and against an input."""
    uq, x, y = cars()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    p = uq.predict(x[:150])
    p.plot(y[:150], kind="rows", ax=left)
    p.plot(y[:150], x=x[:150], along=0, ax=right)
    right.set_xlabel("speed (km/h)")
    return figure


class SkewedErrors:
    """The example of the page on coverage: skewed errors, larger where the second input is above 0.

    The paper's form, which knows neither, gets intervals with and without a guarantee.
    """

    def __init__(self):
        torch.manual_seed(0)
        self.train, self.valid = self.draw(800), self.draw(300)
        body = nn.Sequential(nn.Linear(2, 20), nn.Tanh())
        model = nn.Sequential(body, nn.Linear(20, 1, bias=False)).requires_grad_(False)
        x, y = self.train
        model[1].weight[:] = torch.linalg.lstsq(body(x), y).solution.T
        self.uq = rg.LastLayerRigidity(model).fit(self.train).calibrate(self.valid, method="paper")

    def draw(self, rows):
        x = 2 * torch.rand(rows, 2) - 1
        skewed = torch.distributions.Exponential(torch.tensor(1.0)).sample((rows, 1)) - 1
        return x, torch.sin(3 * x[:, :1]) + (0.1 + 0.3 * (x[:, 1:] > 0)) * skewed

    def intervals(self, kept, x):
        """Intervals at x: of the distribution, with the guarantee, and with it in both groups."""
        p = self.uq.conformalize(kept).predict(x)
        by_distribution = p.interval(0.9, conformal=False)
        guaranteed = p.interval(0.9)
        # Groups are a function of batches as the fit had them: inputs and targets.
        self.uq.conformalize(kept, groups=lambda batch: batch[0][:, 1] > 0)
        in_groups = self.uq.predict((x, x[:, :1])).interval(0.9)
        return by_distribution, guaranteed, in_groups


METHODS = (
    ("distribution", ORANGE),
    ("guarantee", BLUE),
    ("guarantee in each group", GREEN),
)


def coverage_intervals():
    """Intervals of the three kinds along the first input, for quiet and for noisy rows."""
    example = SkewedErrors()
    kept, (x_test, y_test) = example.draw(400), example.draw(300)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    first = torch.linspace(-1, 1, 101)
    panels = ((-0.5, "quiet rows: second input -0.5"), (0.5, "noisy rows: second input 0.5"))
    for panel, (second, title) in zip(axes, panels, strict=True):
        line = torch.stack([first, torch.full_like(first, second)], 1)
        kinds = example.intervals(kept, line)
        for (label, colour), ends in zip(METHODS, kinds, strict=True):
            panel.plot(first, torch.cat(ends, 1), color=colour, lw=1.8)
            panel.plot([], [], color=colour, label=label)
        chosen = (x_test[:, 1] > 0) == (second > 0)
        panel.plot(x_test[chosen, 0], y_test[chosen], ".", color=GREY, ms=4, label="new rows")
        panel.set(title=title, xlabel="first input")
    axes[0].set_ylabel("output")
    axes[0].legend(fontsize=9, loc="upper left")
    return figure


def coverage_draws():
    """What the intervals cover of new rows, over a hundred draws of the conformal rows."""
    example = SkewedErrors()
    x_test, y_test = example.draw(20_000)
    noisy = x_test[:, 1] > 0
    covered = torch.empty(100, 3, 3)  # draws, kinds of intervals, groups
    for draw in range(100):
        kinds = example.intervals(example.draw(400), x_test)
        for kind, (low, high) in enumerate(kinds):
            inside = ((low <= y_test) & (y_test <= high)).double()[:, 0]
            shares = [inside.mean(), inside[~noisy].mean(), inside[noisy].mean()]
            covered[draw, kind] = 100 * torch.stack(shares)
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    shifts = 0.25 * (torch.rand(100) - 0.5)
    for kind, (label, colour) in enumerate(METHODS):
        for group in range(3):
            places = group + 0.28 * (kind - 1) + 0.7 * shifts
            axes.plot(places, covered[:, kind, group], ".", color=colour, ms=4, alpha=0.7, mew=0)
        axes.plot([], [], "o", color=colour, ms=5, label=label)
    axes.axhline(90, color=GREY, ls=":", lw=1.5)
    axes.set(xticks=range(3), xticklabels=["all rows", "quiet rows", "noisy rows"])
    axes.set(ylabel="covered, %", ylim=(72, 106), yticks=range(75, 101, 5))
    axes.legend(fontsize=9, loc="upper left", ncols=3, columnspacing=1, handletextpad=0.2)
    return figure


PICTURES = {
    "coverage-intervals": coverage_intervals,
    "coverage-draws": coverage_draws,
    "plots-parity": in_page_colours(parity),
    "plots-rows": in_page_colours(rows),
    "plots-along": in_page_colours(along),
    "plots-errors": in_page_colours(errors),
    "plots-binned": in_page_colours(binned),
    "plots-calibration": in_page_colours(calibration),
}
