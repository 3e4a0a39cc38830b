"""The figure: predicted and actual errors of means as the groups grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.frame.figures import BLACK, BLUE, GREEN, GREY, PURPLE, VERMILION, panels
from experiments.studies.propagation.tables import LABELS, Found

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"none": VERMILION, "constant": BLUE, "evidence": GREEN, "bayes": PURPLE}


def drawn(found: Found, groups: Sequence[int]) -> Figure:
    """One panel a set, both axes logarithmic."""
    from matplotlib.ticker import NullFormatter

    figure, axes = panels(columns=len(found), height=3.4)
    for ax, (name, one) in zip(axes, found.items(), strict=True):
        for way, colour in COLOURS.items():
            ax.loglog(groups, _along(one[way]["joint"], groups), color=colour, label=LABELS[way])
        alone = _along(one["bayes"]["independent"], groups)
        ax.loglog(groups, alone, "--", color=GREY, lw=1.2, label="correlations ignored")
        actual = [one["actual"][str(n)] for n in groups]
        ax.loglog(groups, actual, "o", color=BLACK, ms=4, label="actual")
        ax.set(title=name, xlabel="predictions in the mean")
        ax.yaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("error of the mean")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def _along(rule: dict[str, Any], groups: Sequence[int]) -> list[float]:
    return [rule["std"][str(n)] for n in groups]
