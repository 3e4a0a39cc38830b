"""The figure: every net's ridge, with and without a noise floor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.frame.figures import BLACK, BLUE, GREY, VERMILION, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = dict[str, Any]

PANELS = {"nll": "by the likelihood", "bins": "by the paper's bins"}
SIDES = (("", -0.16, BLUE, "no noise"), (", floor", 0.16, VERMILION, "noise floor"))


def ridges(found: Found) -> Figure:
    """One panel a criterion, one row a training."""
    conditions = found["conditions"]
    figure, axes = panels(columns=2, height=0.42 * len(conditions) + 1.4, sharey=True)
    for ax, (criterion, title) in zip(axes, PANELS.items(), strict=True):
        for suffix, shift, colour, label in SIDES:
            for place, one in enumerate(conditions.values()):
                block = one[criterion + suffix]
                values, height = block["relative_ridge_of_each"], place + shift
                named = label if place == 0 else None
                ax.plot(values, [height] * len(values), "o", color=colour, ms=3.5, alpha=0.5, mew=0)
                middle, low, high = block["log_relative_ridge"]
                ax.plot([low, high], [height] * 2, color=colour, lw=2, label=named)
                ax.plot([middle], [height], "|", color=BLACK, ms=9)
        ax.axvline(0, color=GREY, lw=1, ls="--")
        ax.set(title=title, xlabel="log10 (ridge / largest eigenvalue)")
    axes[0].set_yticks(range(len(conditions)), list(conditions))
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure
