"""Is the NTK a constant times the NNGP, and does the variance mind? (paper, Sec. 3.5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.frame.figures import BLACK, COLOURS, panels
from experiments.frame.outcome import Picture, Table, mean_and_error, with_error
from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator, rank_correlation, sphere
from experiments.studies.theory.section import Section
from rigidities.kernels import FullyConnected, Kernels, gaussian_process_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACTIVATIONS = ("erf", "tanh", "sin", "silu", "gelu", "relu")
DIMENSION, TEST, RIDGE = 6, 200, 1e-2
MARKERS = "os^vDP"
SCATTERED = ("erf", "silu", "relu")
SHOWN_DEPTH = 3
"""Of the scatter and the table."""


def section(*, quick: bool, seed: int) -> Section:
    """All activations and depths."""
    sizes = (40, 2, (1, 3)) if quick else (200, 5, (1, 2, 3, 4))
    numbers = measured(*sizes, seed=seed)
    picture = Picture("proportional", drawn(numbers), CAPTION)
    return Section("proportional", numbers, [HEAD, picture, table(numbers), says(numbers)])


def measured(rows: int, draws: int, depths: tuple[int, ...], *, seed: int) -> dict[str, Any]:
    """Constant, rank correlation and spread for every activation and depth."""
    found: dict[str, Any] = {
        "setting": {
            "rows": rows,
            "test": TEST,
            "dimension": DIMENSION,
            "draws": draws,
            "ridge": RIDGE,
        }
    }
    for name in steps(ACTIVATIONS, "activations"):
        found[name] = {}
        for depth in depths:
            runs = [compared(name, depth, rows, generator(seed, draw)) for draw in range(draws)]
            entry = {
                key: mean_and_error([run[key] for run in runs])
                for key in runs[0]
                if key not in {"exact", "last_layer"}
            }
            if depth == SHOWN_DEPTH and name in SCATTERED:
                entry |= {key: runs[0][key] for key in ("exact", "last_layer")}
            found[name][depth] = entry
    return found


def compared(name: str, depth: int, rows: int, source: torch.Generator) -> dict[str, Any]:
    """Exact and last-layer variance of one net on one draw of inputs."""
    net = FullyConnected(depth, name, input_scale=1.0, normalised=True)
    x = sphere(rows + TEST, DIMENSION, source)
    train, cross = net.kernels(x[:rows]), net.kernels(x[rows:], x[:rows])
    own = net.diagonal(x[rows:]).nngp
    constant = float((train.nngp * train.ntk).sum() / train.nngp.square().sum())
    exact = variance(train, cross, own)
    last = variance(Kernels(train.nngp, train.nngp), Kernels(cross.nngp, cross.nngp), own)
    ridge = RIDGE * float(train.nngp.diagonal().mean())
    scaled = [Kernels(k.nngp, constant * k.nngp) for k in (train, cross)]
    softened = with_ridge(train, cross, own, constant * ridge)
    replaced = with_ridge(*scaled, own, constant * ridge)
    inverse = torch.linalg.inv(train.nngp + ridge * torch.eye(rows, dtype=torch.float64))
    paper = own - ((cross.nngp @ inverse) * cross.nngp).sum(1)
    distance = (train.ntk - constant * train.nngp).norm() / train.ntk.norm()
    return {
        "constant": constant,
        "misfit": float(distance),
        **comparison("", exact, last),
        **comparison("ridge_", softened, replaced),
        **comparison("inserted_", softened, paper),
        "exact": exact,
        "last_layer": last,
    }


def variance(train: Kernels, cross: Kernels, own: Tensor) -> Tensor:
    """At t = infinity; the targets do not matter."""
    return gaussian_process_at(
        math.inf,
        ntk=(train.ntk, cross.ntk),
        nngp=(train.nngp, cross.nngp, own),
        targets=torch.zeros(len(train.ntk)),
    ).variance


def with_ridge(train: Kernels, cross: Kernels, own: Tensor, ridge: float) -> Tensor:
    """The four terms with K_NTK + ridge in place of K_NTK."""
    a = torch.linalg.solve(
        train.ntk + ridge * torch.eye(len(train.ntk), dtype=torch.float64), cross.ntk.mT
    ).mT
    return own + ((a @ train.nngp - 2 * cross.nngp) * a).sum(1)


def comparison(prefix: str, exact: Tensor, approximate: Tensor) -> dict[str, float]:
    """Order, and mean and spread of the ratio."""
    ratio = (exact / approximate).log()
    return {
        f"{prefix}spearman": rank_correlation(exact, approximate),
        f"{prefix}spread": float(ratio.std()),
        f"{prefix}shift": float(ratio.mean()),
    }


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
