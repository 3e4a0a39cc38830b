"""The figure: the seven points, the fits and their error bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from experiments.frame.figures import BLACK, BLUE, VERMILION, panels
from experiments.studies.toy.models import Model
from experiments.studies.toy.points import TEST_REACH, Sample, truth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = dict[str, Any]

LIGHT, MIDDLE = "#D3E6F2", "#8FC1DF"
"""The blue of the fit, thinned."""


def curves(sample: Sample, models: list[Model]) -> Curves:
    """What the figure shows, in numbers."""
    x = torch.linspace(-TEST_REACH, TEST_REACH, 151, dtype=torch.float64)[:, None]
    drawn = {}
    for model in models:
        mean, std = model.predict(x)
        drawn[model.name] = {"mean": mean, "std": std}
    return {
        "x": x[:, 0],
        "truth": truth(x)[:, 0],
        "train": {"x": sample.train.x[:, 0], "y": sample.train.y[:, 0]},
        "models": drawn,
    }


def drawn(shown: Curves) -> Figure:
    """One panel a model."""
    figure, axes = panels(columns=2, rows=2, height=2.9, sharex=True, sharey=True)
    for ax, letter, (name, model) in zip(axes, "abcd", shown["models"].items(), strict=True):
        _draw_model(ax, shown, model)
        ax.set_title(f"({letter}) {name}")
    axes[0].set(xlim=(-TEST_REACH, TEST_REACH), ylim=(-1.1, 1.6))
    for ax in axes[2:]:
        ax.set_xlabel("x")
    for ax in axes[::2]:
        ax.set_ylabel("y")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _draw_model(ax: Axes, shown: Curves, model: Mapping[str, Any]) -> None:
    x, mean, std, train = shown["x"], model["mean"], model["std"], shown["train"]
    for k, colour in ((2, LIGHT), (1, MIDDLE)):
        band = mean - k * std, mean + k * std
        ax.fill_between(x, *band, color=colour, lw=0, label=f"±{k}σ")
    ax.plot(x, mean, color=BLUE, label="fit")
    ax.plot(x, shown["truth"], "--", color=BLACK, lw=1.2, label="cos²x")
    ax.plot(train["x"], train["y"], "o", color=VERMILION, ms=5, label="training points")
