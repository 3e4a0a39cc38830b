"""Molecules drawn as balls and sticks, their atoms coloured by their uncertainty."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from experiments.frame.figures import WIDTH
from experiments.frame.outcome import Picture
from experiments.studies.qm9.novelty.page import label_ticks

Molecule = Mapping[str, Any]

COLOURS = "YlGnBu"
"""From light to dark, which colour-blind people see too: dark is uncertain."""

DARK = "#222222"
PALE = "#ffffff"

HYDROGEN_RADIUS = 0.24
RADIUS = 0.38
"""Of a ball in angstrom: hydrogen, and all other atoms."""

TILTS = np.radians([0, 8, -8, 16, -16, 24, -24, 32, -32])
"""Angles about either axis of the picture that are tried."""

SYMBOLS = {6: "C", 7: "N", 8: "O", 9: "F"}
HEADS = {
    "smallest": "smallest bars",
    "median": "median bars",
    "largest": "largest bars",
}
CAPTION = (
    "Test molecules with the smallest, median and largest bars, chosen by this rule alone. The "
    "colour of an atom is the standard deviation of its share of the energy (one logarithmic scale "
    "for all). Below the formula are the error of the energy and its bar, in kcal/mol. Small balls "
    "are hydrogen. The errors of atoms are correlated, so the bar of a molecule does not follow "
    "from those of its atoms alone."
)


def entries(molecules: Sequence[Molecule]) -> list[str | Picture]:
    """The figure.

    Args:
        molecules: What `work.shown` gives, as JSON holds it.
    """
    return [Picture("molecules", drawn(molecules), CAPTION)]


def drawn(molecules: Sequence[Molecule]) -> Figure:
    """The figure: a column for each of smallest, median and largest bars."""
    local = np.concatenate([np.asarray(molecule["points"]["local"]) for molecule in molecules])
    # Where all atoms are alike, a logarithmic scale still needs two different ends.
    highest = max(local.max(), 1.01 * local.min())
    colours = ScalarMappable(LogNorm(local.min(), highest), COLOURS)

    # Of each molecule its data and its atoms as they are seen, by column.
    columns: dict[str, list[tuple[Molecule, np.ndarray]]] = {which: [] for which in HEADS}
    for molecule in molecules:
        seen = projected(molecule["points"]["positions"])
        columns[molecule["which"]].append((molecule, seen))
    rows = max(map(len, columns.values()))

    # All panels have the scale of the largest molecule.
    extents = [np.abs(seen[:, :2]).max(0) for column in columns.values() for _, seen in column]
    reach = np.max(extents, axis=0) + 0.5
    height = WIDTH / len(columns) * float(reach[1] / reach[0]) + 0.95  # titles, colours: an inch
    figure = Figure(figsize=(WIDTH, rows * height))
    inch = 1 / (rows * height)  # in units of the figure's height
    axes = figure.subplots(
        rows,
        len(columns),
        squeeze=False,
        gridspec_kw={
            "left": 0.005,
            "right": 0.995,
            "bottom": 0.75 * inch,
            "top": 1 - 0.75 * inch,
            "wspace": 0.02,
            "hspace": 0.2,
        },
    )
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    for number, (which, column) in enumerate(columns.items()):
        for row, (molecule, seen) in enumerate(column):
            ax = axes[row, number]
            ball_and_stick(ax, molecule["points"], seen, colours)
            ax.set_title(_title(molecule), loc="center", size=10)
            ax.set(xlim=(-reach[0], reach[0]), ylim=(-reach[1], reach[1]), aspect="equal")
        figure.text(
            (number + 0.5) / len(columns),
            1 - 0.16 * inch,
            HEADS[which],
            ha="center",
            va="center",
            weight="bold",
            size=11,
        )
    below = figure.add_axes((0.12, 0.5 * inch, 0.76, 0.15 * inch))
    bar = figure.colorbar(colours, cax=below, orientation="horizontal")
    bar.set_label("standard deviation of an atom's energy, kcal/mol")
    label_ticks(bar.ax)
    return figure


def projected(positions: Any) -> np.ndarray:
    """The molecule as it is seen, (A, 3): to the right, upwards and to the eye.

    It lies flat, as far as it is flat, and is tilted a little where atoms would hide each other.
    """
    flat = flattened(positions)
    tilts = [turned(flat, a, b) for a in TILTS for b in TILTS]
    return min(tilts, key=hidden)


def hidden(seen: np.ndarray) -> float:
    """How much atoms lie on top of each other: the sum of exp(-d^2 / RADIUS^2) over pairs."""
    squares = np.square(seen[:, None, :2] - seen[None, :, :2]).sum(-1)
    return float(np.exp(-squares / RADIUS**2).sum())


def turned(points: np.ndarray, about_x: float, about_y: float) -> np.ndarray:
    """Points (A, 3) turned about the first axis, then about the second."""
    cos_x, sin_x = np.cos(about_x), np.sin(about_x)
    cos_y, sin_y = np.cos(about_y), np.sin(about_y)
    about_first = np.array([[1, 0, 0], [0, cos_x, -sin_x], [0, sin_x, cos_x]])
    about_second = np.array([[cos_y, 0, sin_y], [0, 1, 0], [-sin_y, 0, cos_y]])
    turned_points: np.ndarray = points @ (about_second @ about_first).T
    return turned_points


def flattened(positions: Any) -> np.ndarray:
    """Positions along the molecule's widest, second and narrowest direction, (A, 3).

    Examples:
        >>> flattened([[0, 0, 5.0], [0, 0, 1.0], [0, 1.0, 3.0]]).round(1)[:2, 0].tolist()
        [2.0, -2.0]
    """
    centred = np.asarray(positions, float) - np.mean(positions, axis=0)
    axes = np.linalg.svd(centred, full_matrices=len(centred) < 3)[2]
    seen = centred @ axes.T
    largest = np.abs(seen).argmax(0)  # signs of singular vectors differ between machines
    signed: np.ndarray = seen * np.sign(seen[largest, range(seen.shape[1])] + 1e-300)
    return signed


def ball_and_stick(
    ax: Axes, points: Mapping[str, Any], seen: np.ndarray, colours: ScalarMappable
) -> None:
    """Draw one molecule; what is nearer to the eye is drawn later."""
    for i, j in points["bonds"]:
        depth = 2 + min(seen[i, 2], seen[j, 2]) / 100
        x = seen[[i, j], 0]
        y = seen[[i, j], 1]
        # A pale rim sets a bond off from what lies behind it.
        ax.plot(x, y, color=PALE, lw=6.5, zorder=depth - 2e-4, solid_capstyle="butt")
        ax.plot(x, y, color="#777777", lw=3.2, zorder=depth - 1e-4, solid_capstyle="round")
    faces = colours.to_rgba(np.asarray(points["local"]))
    for (x, y, z), number, face in zip(seen, points["numbers"], faces, strict=True):
        depth = 2 + z / 100
        radius = HYDROGEN_RADIUS if number == 1 else RADIUS
        ax.add_patch(Circle((x, y), radius, fc=face, ec=DARK, lw=0.9, zorder=depth))
        if number > 1:
            brightness = face[:3] @ [0.299, 0.587, 0.114]
            ink = DARK if brightness > 0.5 else PALE
            name = SYMBOLS.get(number, str(number))
            ax.text(
                x,
                y,
                name,
                color=ink,
                ha="center",
                va="center_baseline",
                size=9,
                zorder=depth + 1e-4,
            )


def _title(molecule: Molecule) -> str:
    """The formula, and below it error and bar."""
    formula = re.sub(r"(\d+)", r"$_{\1}$", molecule["formula"])
    title = f"{formula}\nerror {molecule['error']:+.2f}, bar {molecule['bar']:.2f}"
    return title.replace("-", "\u2212")
