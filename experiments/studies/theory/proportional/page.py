"""The section on the page: figure, table, and what the numbers say."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from experiments.frame.figures import BLACK, COLOURS, panels
from experiments.frame.outcome import Table, with_error
from experiments.studies.theory.proportional.work import (
    ACTIVATIONS,
    DIMENSION,
    SCATTERED,
    SHOWN_DEPTH,
)

MARKERS = "os^vDP"
"""Of the activations, in their order."""


def drawn(numbers: dict[str, Any]) -> Figure:
    """The figure: constants, variances of one depth, and the spread of their ratio."""
    figure, (left, middle, right) = panels(columns=3, height=3.4)
    depths = sorted(numbers[ACTIVATIONS[0]])
    for name, colour, marker in zip(ACTIVATIONS, COLOURS, MARKERS, strict=False):
        constants = [numbers[name][depth]["constant"][0] for depth in depths]
        spreads = [numbers[name][depth]["spread"][0] for depth in depths]
        left.plot(depths, constants, color=colour, marker=marker, ms=5, lw=1.3, label=name)
        right.plot(depths, spreads, color=colour, marker=marker, ms=5, lw=1.3)
    left.plot(depths, [depth + 1 for depth in depths], "--", color=BLACK, lw=1.2, label="L + 1")
    for name in SCATTERED:
        index = ACTIVATIONS.index(name)
        variances = numbers[name][SHOWN_DEPTH]
        middle.plot(
            variances["last_layer"],
            variances["exact"],
            color=COLOURS[index],
            marker=MARKERS[index],
            ms=3,
            alpha=0.6,
            lw=0,
        )
    high = middle.get_xlim()[1]
    middle.axline((high / 2, high / 2), slope=1, color=BLACK, lw=1, ls="--")
    middle.set(xlabel="last-layer form", ylabel="exact", title=f"(b) variance, L = {SHOWN_DEPTH}")
    left.set(xlabel="hidden layers L", ylabel="constant c", title="(a) fit K_NTK ≈ c K_NNGP")
    right.set(xlabel="hidden layers L", ylabel="std of log ratio", title="(c) exact / last-layer")
    right.set_yscale("log")
    for ax in (left, right):
        ax.set_xticks(depths)
    figure.legend(loc="outside upper center", ncols=len(ACTIVATIONS) + 1)
    return figure


COLUMNS = {
    "fitted c": ("constant", 3),
    "misfit": ("misfit", 3),
    "rank correlation": ("spearman", 4),
    "spread": ("spread", 3),
    "shift": ("shift", 3),
    "spread, ridge": ("ridge_spread", 3),
    "spread, inserted ridge": ("inserted_spread", 3),
}
"""Headings of the table, with the names of the numbers and their decimals."""


def table(numbers: dict[str, Any]) -> Table:
    """All activations at one depth."""
    rows = []
    for name in ACTIVATIONS:
        entry = numbers[name][SHOWN_DEPTH]
        cells = [with_error(*entry[key], digits) for key, digits in COLUMNS.values()]
        rows.append([name, *cells])
    return Table(["activation", *COLUMNS], rows, TABLE)


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""

    def span(names: tuple[str, ...], key: str, digits: int) -> str:
        """The smallest and the largest value of some activations."""
        values = [numbers[name][SHOWN_DEPTH][key][0] for name in names]
        low = f"{min(values):.{digits}f}"
        high = f"{max(values):.{digits}f}"
        return low if low == high else f"{low} to {high}"

    odd = ("erf", "tanh", "sin")
    even = ("silu", "gelu", "relu")
    smooth = ("erf", "tanh", "sin", "silu", "gelu")
    silu = span(("silu",), "constant", 2)
    gelu = span(("gelu",), "constant", 2)
    relu = span(("relu",), "constant", 2)
    return (
        "c = L + 1 is the leading order for odd activations only. At "
        f"L = {SHOWN_DEPTH}, the fit gives {span(odd, 'constant', 2)} for erf, tanh and sin, "
        f"{silu} for SiLU, {gelu} for GELU and {relu} for ReLU. For the last three, a good part of "
        f"the NTK is not a multiple of the NNGP at all (misfit {span(even, 'misfit', 2)}): their "
        "even part is a constant in the NNGP, which the NTK weights differently. The fitted c also "
        "depends on how the inputs are distributed.\n\n"
        "The claim about the *variance* is valid nevertheless. The rank correlation is "
        f"{span(smooth, 'spearman', 4)} for the smooth activations and "
        f"{span(('relu',), 'spearman', 4)} for ReLU, and the spread of the ratio is "
        f"{span(smooth, 'spread', 3)} and {span(('relu',), 'spread', 3)}. With a ridge, the "
        "multiple matters more, because it sets how much of each direction is learned. The spread "
        f"is {span(ACTIVATIONS, 'ridge_spread', 2)} if the ridge is in all four terms on both "
        f"sides, and {span(ACTIVATIONS, 'inserted_spread', 2)} against the paper's form, where the "
        "ridge is inserted after the terms have been collected."
    )


TABLE = (
    f"L = {SHOWN_DEPTH}, where the paper has c = {SHOWN_DEPTH + 1}: mean and standard error over "
    "draws of the inputs. *Misfit*: relative Frobenius distance of the NTK from c times the NNGP. "
    "*Spread* and *shift*: standard deviation and mean of the log of exact over last-layer "
    "variance at t → ∞. The last columns are the spread with a ridge of a hundredth of the "
    "kernel's diagonal in all four terms, and the spread against the paper's form with the ridge "
    "inserted at the end."
)

HEAD = f"""\
## Is the NTK a multiple of the NNGP?

The paper replaces K_NTK by c K_NNGP with c = L + 1. This is exact for linear networks and true to
leading order for odd activations; the paper also claims it for SiLU and GELU. Here both kernels are
exact. The inputs lie on the unit sphere in {DIMENSION} dimensions, and the activation is normalised
as in the paper. The constant c is the least-squares fit over all pairs of training points. Then the
variance at t → ∞ with the exact NTK (all four terms) is compared with the form that follows from
the replacement, k(⋆,⋆) - k K⁻¹ k of the NNGP, in which c cancels."""

CAPTION = (
    "(a) The fitted constant against the number of hidden layers. (b) Exact variance against "
    "last-layer variance of the test points (erf, SiLU, ReLU). (c) Spread of their ratio."
)
