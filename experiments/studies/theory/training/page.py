"""The section on the page: figure, table, and what the numbers say."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from experiments.frame.figures import BLUE, GREY, VERMILION, panels
from experiments.frame.outcome import Table, with_error
from experiments.studies.theory.training.work import (
    DEPTH,
    DIMENSION,
    KERNELS,
    ROWS,
    WAYS,
)

MEASURES = {"change": "relative change", "angle": "1 - cosine"}
"""How far a kernel has moved, with what the figure calls it."""


def drawn(numbers: dict[str, Any]) -> Figure:
    """The figure: changes at the end of training against the width, a column for each way."""
    figure, axes = panels(columns=3, rows=2, height=2.5, sharex=True, sharey="row")
    widths = numbers["setting"]["widths"]
    for column, way in enumerate(WAYS):
        for row, (measure, label) in enumerate(MEASURES.items()):
            ax = axes[3 * row + column]
            for (name, legend), colour in zip(KERNELS.items(), (BLUE, VERMILION), strict=True):
                ends = [numbers[way][width][f"{name}_{measure}"][-1] for width in widths]
                mean, error = zip(*ends, strict=True)
                ax.errorbar(
                    widths, mean, error, color=colour, marker="o", ms=4, lw=1.4, label=legend
                )
            ax.set(xscale="log", yscale="log")
            ax.set_xticks(widths, [str(width) for width in widths])
            ax.minorticks_off()
            ax.grid(axis="y", color=GREY, alpha=0.2)
            if column == 0:
                ax.set_ylabel(label)
        axes[column].set_title(f"({'abc'[column]}) {way}")
        axes[3 + column].set_xlabel("width")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def table(numbers: dict[str, Any]) -> Table:
    """Errors and changes of both kernels at the end of training."""
    rows = []
    for way in WAYS:
        for width in numbers["setting"]["widths"]:
            last = {key: values[-1] for key, values in numbers[way][width].items()}
            rows.append(
                [
                    way,
                    str(width),
                    with_error(*last["rmse"], 3),
                    with_error(*last["features_change"], 3),
                    with_error(*last["ntk_change"], 3),
                    with_error(*last["features_angle"], 4),
                    with_error(*last["ntk_angle"], 4),
                ]
            )
    return Table(
        ["training", "width", "rmse", "change of FFᵀ", "of the NTK", "1 - cosine, FFᵀ", "NTK"],
        rows,
        f"After {numbers['setting']['steps'][-1]} steps: root mean square error on the training "
        "data (targets of unit variance), relative Frobenius change of both kernels, and one minus "
        "the cosine between the kernels before and after. Mean and standard error over seeds.",
    )


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""
    widths = numbers["setting"]["widths"]
    narrow = widths[0]
    wide = widths[-1]

    def end(way: int, key: str, width: int = wide, digits: int = 2) -> str:
        """A mean over seeds at the end of the training."""
        return f"{numbers[WAYS[way]][width][key][-1][0]:.{digits}f}"

    return (
        "In the parametrisation of the theory, the kernels freeze as predicted. From width "
        f"{narrow} to {wide}, the change of F Fᵀ falls from {end(0, 'features_change', narrow)} to "
        f"{end(0, 'features_change')} and that of the NTK from {end(0, 'ntk_change', narrow)} to "
        f"{end(0, 'ntk_change')}, with no clear winner. In PyTorch's parametrisation, the kernels "
        "do not freeze at these widths. Gradient descent changes F Fᵀ by "
        f"{end(1, 'features_change')} of its norm and the NTK by {end(1, 'ntk_change')} at width "
        f"{wide}, but F Fᵀ *turns* more (1 - cosine {end(1, 'features_angle')} against "
        f"{end(1, 'ntk_angle')}). Adam, whose steps do not shrink with the width, changes them by "
        f"{end(2, 'features_change', digits=0)} and {end(2, 'ntk_change', digits=0)} times their "
        'initial norm. So the statement "F Fᵀ varies less than the NTK" is true for the norm under '
        "gradient descent, but it is not a general rule. The features before training are no "
        "substitute for those after it. The error bar rightly uses the features of the trained "
        "network. At these widths and on these data, however, the theory's step from one kernel to "
        "the other does not justify it."
    )


HEAD = f"""\
## Do the kernels stand still?

The theory uses the kernels at initialisation. In practice, features are taken after training. The
paper reports that F Fᵀ changes little, and less than the NTK. Here networks with {DEPTH} hidden
SiLU layers learn {ROWS} points of a smooth function of {DIMENSION} inputs, in full batches. The
kernels are those of the training points. There are three ways to train: gradient descent in the
parametrisation of the theory; gradient descent in PyTorch's parametrisation with its default
initialisation (F with the readout's bias as a column); and Adam in PyTorch's parametrisation, close
to the paper's AdamW."""

CAPTION = (
    "Relative change ‖K - K₀‖ / ‖K₀‖ during training and one minus the cosine of K and K₀, for the "
    "Gram matrix of the last features and for the empirical NTK, against the width."
)
