"""The figure: learning curves, and their paired differences to random choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from experiments.frame.figures import BLUE, GREEN, GREY, VERMILION, panels
from experiments.studies.active.scores import NAMES, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"random": GREY, "top": VERMILION, "logdet": GREEN, "variance": BLUE}
MARKERS = {"random": "o", "top": "v", "logdet": "s", "variance": "D"}


def drawn(settings: Mapping[str, Summary]) -> Figure:
    """One row a setting: RMSE on the left, less random's on the right."""
    figure, axes = panels(columns=2, rows=len(settings), height=3.1)
    for (title, found), left, right in zip(settings.items(), axes[::2], axes[1::2], strict=True):
        _curves(left, found)
        _differences(right, found)
        left.set(title=title, ylabel="test RMSE", xlabel="labelled rows")
        right.set(title="less random choice, paired", xlabel="labelled rows")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _curves(ax: Axes, found: Summary) -> None:
    for method, one in found["methods"].items():
        mean, error = zip(*one["rmse"], strict=True)
        ax.errorbar(found["labels"], mean, yerr=error, label=NAMES[method], **_look(method))


def _differences(ax: Axes, found: Summary) -> None:
    random = found["methods"]["random"]["each"]
    ax.axhline(0, color=GREY, lw=1)
    for method, one in found["methods"].items():
        if method != "random":
            difference = one["each"] - random
            error = difference.std(1) / torch.tensor(difference.shape[1]).sqrt()
            ax.errorbar(found["labels"], difference.mean(1), yerr=error, **_look(method))


def _look(method: str) -> dict[str, object]:
    return {"color": COLOURS[method], "marker": MARKERS[method], "ms": 4, "capsize": 2}
