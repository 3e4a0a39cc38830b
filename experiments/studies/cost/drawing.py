"""The figure: measured costs as dots on a logarithmic axis, the paper's as rings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.frame.figures import BLACK, BLUE, GREY, VERMILION, panels
from experiments.studies.cost.tables import LABELS, THEORY

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drawn(found: dict[str, Any]) -> Figure:
    """A panel for training, one for inference."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, axes = panels(columns=2, height=3.8, sharey=True)
    methods = list(LABELS)[::-1]
    heights = range(len(methods))
    for ax, phase in zip(axes, ("training", "inference"), strict=True):
        theory = [THEORY[method][phase] for method in methods]
        ax.plot(theory, heights, "o", mfc="none", mec=BLACK, ms=11, label="paper (theory)")
        styles = zip(found.items(), (BLUE, VERMILION), (0.12, -0.12), "os", strict=False)
        for (name, one), colour, shift, marker in styles:
            ratios = [one[phase][method] for method in methods]
            ax.errorbar(
                [ratio["median"] for ratio in ratios],
                [height + shift for height in heights],
                xerr=[
                    [ratio["median"] - ratio["lower"] for ratio in ratios],
                    [ratio["upper"] - ratio["median"] for ratio in ratios],
                ],
                fmt=marker,
                color=colour,
                ms=4.5,
                lw=1,
                label=name,
            )
        ax.set(xscale="log", title=phase, xlabel="times the plain net's")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(axis="x", which="both", color=GREY, alpha=0.2, lw=0.6)
    axes[0].set_yticks(heights, [LABELS[method] for method in methods])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure
