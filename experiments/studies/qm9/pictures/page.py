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

DARK, PALE = "#222222", "#ffffff"
RADII = {1: 0.24}
RADIUS = 0.38
"""Of a ball in angstrom: hydrogen, and all others."""

TILTS = np.radians([0, 8, -8, 16, -16, 24, -24, 32, -32])
"""About either axis of the picture."""

SYMBOLS = {6: "C", 7: "N", 8: "O", 9: "F"}
HEADS = {
    "smallest": "smallest bars",
    "median": "median bars",
    "largest": "largest bars",
}
CAPTION = (
    "Test molecules of the smallest, the median and the largest bars, chosen by this rule alone. "
    "The colour of an atom is the standard deviation of its own share of the energy (logarithmic "
    "scale, the same for all); below the formula stand the error of the energy and its bar, in "
    "kcal/mol. Small balls are hydrogen. Errors of atoms are correlated, so that the bar of a "
    "molecule does not follow from those of its atoms alone."
)


def entries(found: Sequence[Molecule]) -> list[str | Picture]:
    """The figure.

    Args:
        found: what `work.shown` gives, as JSON holds it.
    """
    return [Picture("molecules", drawn(found), CAPTION)]


def drawn(found: Sequence[Molecule]) -> Figure:
    """A column for each of smallest, median and largest bars."""
    local = np.concatenate([np.asarray(one["points"]["local"]) for one in found])
    colours = ScalarMappable(LogNorm(local.min(), max(local.max(), 1.01 * local.min())), COLOURS)
    columns = {which: [one for one in found if one["which"] == which] for which in HEADS}
    rows = max(map(len, columns.values()))
    flat = {id(one): projected(one["points"]["positions"]) for one in found}
    reach = np.max([np.abs(seen[:, :2]).max(0) for seen in flat.values()], axis=0) + 0.5
    height = WIDTH / len(columns) * float(reach[1] / reach[0]) + 0.95  # titles, colours: an inch
    figure, inch = Figure(figsize=(WIDTH, rows * height)), 1 / (rows * height)
    room = {"left": 0.005, "right": 0.995, "bottom": 0.75 * inch, "top": 1 - 0.75 * inch}
    room |= {"wspace": 0.02, "hspace": 0.2}
    axes = figure.subplots(rows, len(columns), squeeze=False, gridspec_kw=room)
    for column, (which, molecules) in enumerate(columns.items()):
        for row in range(rows):
            ax = axes[row, column]
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
            if row < len(molecules):
                one = molecules[row]
                ball_and_stick(ax, one["points"], flat[id(one)], colours)
                ax.set_title(_title(one), loc="center", size=10)
                ax.set(xlim=(-reach[0], reach[0]), ylim=(-reach[1], reach[1]), aspect="equal")
        place = (column + 0.5) / len(columns), 1 - 0.16 * inch
        figure.text(*place, HEADS[which], ha="center", va="center", weight="bold", size=11)
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
    apart = np.square(seen[:, None, :2] - seen[None, :, :2]).sum(-1)
    return float(np.exp(-apart / RADIUS**2).sum())


def turned(points: np.ndarray, about_x: float, about_y: float) -> np.ndarray:
    """Turned by two angles, one after the other."""
    (c, s), (d, t) = ((np.cos(a), np.sin(a)) for a in (about_x, about_y))
    first = np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
    found: np.ndarray = points @ (np.array([[d, 0, t], [0, 1, 0], [-t, 0, d]]) @ first).T
    return found


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
    """One molecule; what is nearer to the eye is drawn later."""
    for i, j in points["bonds"]:
        depth = 2 + min(seen[i, 2], seen[j, 2]) / 100
        ends = seen[[i, j], 0], seen[[i, j], 1]
        ax.plot(*ends, color=PALE, lw=6.5, zorder=depth - 2e-4, solid_capstyle="butt")
        ax.plot(*ends, color="#777777", lw=3.2, zorder=depth - 1e-4, solid_capstyle="round")
    faces = colours.to_rgba(np.asarray(points["local"]))
    for (x, y, z), number, face in zip(seen, points["numbers"], faces, strict=True):
        depth, radius = 2 + z / 100, RADII.get(number, RADIUS)
        ax.add_patch(Circle((x, y), radius, fc=face, ec=DARK, lw=0.9, zorder=depth))
        if number > 1:
            ink = DARK if face[:3] @ [0.299, 0.587, 0.114] > 0.5 else PALE
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


def _title(one: Molecule) -> str:
    formula = re.sub(r"(\d+)", r"$_{\1}$", one["formula"])
    return f"{formula}\nerror {one['error']:+.2f}, bar {one['bar']:.2f}".replace("-", "\u2212")
