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


def drawn(numbers: dict[str, Any]) -> Figure:
    """Constants, variances of one depth, and the spread of their ratio."""
    figure, (left, middle, right) = panels(columns=3, height=3.4)
    for name, colour, marker in zip(ACTIVATIONS, COLOURS, MARKERS, strict=False):
        depths = sorted(numbers[name])
        style = {"color": colour, "marker": marker, "ms": 5, "lw": 1.3}
        left.plot(depths, [numbers[name][d]["constant"][0] for d in depths], **style, label=name)
        right.plot(depths, [numbers[name][d]["spread"][0] for d in depths], **style)
    left.plot(depths, [d + 1 for d in depths], "--", color=BLACK, lw=1.2, label="L + 1")
    for name in SCATTERED:
        index = ACTIVATIONS.index(name)
        shown, style = numbers[name][SHOWN_DEPTH], {"ms": 3, "alpha": 0.6, "lw": 0}
        style |= {"color": COLOURS[index], "marker": MARKERS[index]}
        middle.plot(shown["last_layer"], shown["exact"], **style)
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


def table(numbers: dict[str, Any]) -> Table:
    """At one depth."""
    rows = [
        [
            name,
            *(
                with_error(*numbers[name][SHOWN_DEPTH][key], digits)
                for key, digits in COLUMNS.values()
            ),
        ]
        for name in ACTIVATIONS
    ]
    return Table(["activation", *COLUMNS], rows, TABLE)


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""

    def span(names: tuple[str, ...], key: str, digits: int) -> str:
        values = [numbers[name][SHOWN_DEPTH][key][0] for name in names]
        low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
        return low if low == high else f"{low} to {high}"

    odd, even, smooth = ACTIVATIONS[:3], ACTIVATIONS[3:], ACTIVATIONS[:5]
    silu, gelu, relu = (span((name,), "constant", 2) for name in ("silu", "gelu", "relu"))
    return (
        "c = L + 1 is the leading order of odd activations alone. At "
        f"L = {SHOWN_DEPTH} the fit gives {span(odd, 'constant', 2)} for erf, tanh and sin, {silu} "
        f"for SiLU, {gelu} for GELU and {relu} for ReLU, and with the last three a good part of "
        f"the NTK is no multiple of the NNGP at all (misfit {span(even, 'misfit', 2)}): their even "
        "part is a constant in the NNGP that the NTK weighs differently. The fitted c also depends "
        "on how the inputs are spread.\n\n"
        "The claim about the *variance* holds all the same: rank correlation "
        f"{span(smooth, 'spearman', 4)} for the smooth activations and "
        f"{span(('relu',), 'spearman', 4)} for ReLU, with a spread of the ratio of "
        f"{span(smooth, 'spread', 3)} and {span(('relu',), 'spread', 3)}. With a ridge the "
        "multiple matters more, as it sets how much of each direction is learnt: the spread is "
        f"{span(ACTIVATIONS, 'ridge_spread', 2)} where the ridge stands in all four terms on both "
        f"sides, and {span(ACTIVATIONS, 'inserted_spread', 2)} against the paper's form, where it "
        "is inserted once the terms have been collected."
    )


TABLE = (
    f"L = {SHOWN_DEPTH}, where the paper has c = {SHOWN_DEPTH + 1}; mean and standard error over "
    "draws of the inputs. Misfit: relative Frobenius distance of the NTK from c times the NNGP. "
    "Spread and shift: standard deviation and mean of the log of exact over last-layer variance at "
    "t → ∞; then the spread with a ridge of a hundredth of the kernel's diagonal in all four "
    "terms, and against the paper's form with the ridge inserted at the end."
)

HEAD = f"""\
## Is the NTK a multiple of the NNGP?

The paper replaces K_NTK by c K_NNGP with c = L + 1, exact for linear nets, to leading order for odd
activations, and claimed for SiLU and GELU. Here both kernels are exact, for inputs on the unit
sphere in {DIMENSION} dimensions and the activation normalised as in the paper; c is the
least-squares fit over all pairs of training points. The variance at t → ∞ with the exact NTK (all
four terms) is then compared with the form that the replacement gives, k(⋆,⋆) - k K⁻¹ k of the
NNGP, in which c cancels."""

CAPTION = (
    "(a) The fitted constant against the number of hidden layers. (b) Exact against last-layer "
    "variance of the test points (erf, SiLU, ReLU). (c) Spread of their ratio."
)
