"""What the page shows of the error bars of forces."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.frame.figures import BLACK, BLUE, GREEN, ORANGE, VERMILION, panels
from experiments.frame.outcome import Entry, Found, Picture, Table
from experiments.frame.wording import listed

WAYS = {
    "exact": ("exact", BLUE, "D"),
    "loop": ("{looped} members, one by one", VERMILION, "o"),
    "batched": ("{looped} members at once", ORANGE, "s"),
    "dense": ("brute force", GREEN, "^"),
}
COLUMNS = ["atoms", "exact", "members", "at once", "brute force"]
COLUMNS += ["exact / members", "exact / at once", "exact / brute force"]
ENSEMBLES = (
    "Bars of forces from last-layer ensembles: root mean square of their relative differences from "
    "the exact bars, over all components of all molecules, beside what a Gaussian sample gives."
)
TIMES = (
    "Milliseconds for the bars of all forces of one molecule, medians of {repeats} turns on "
    "{threads} threads ({machine}), descriptors and their slopes by featomic apart; and the exact "
    "way's part of the time of the members one by one "
    "(one forward pass, {looped} backward passes), of the members at once (batched backward "
    "passes), and of brute force (derivatives of all {features} features)."
)
CAPTION = (
    "Left: mean bar of a force component of single molecules of QM9 against their size. Right: "
    "time of the bars of all forces of a molecule."
)


def entries(found: Found) -> list[Entry]:
    """The section.

    Args:
        found: what `work.measured` gives, as JSON holds it.
    """
    settings = found["settings"]
    return [
        "## Error bars of forces",
        said(found),
        Table(
            ["members", "difference", "expected"],
            [[row["members"], row["error"], row["expected"]] for row in found["ensembles"]],
            ENSEMBLES,
        ),
        Table(
            COLUMNS,
            [
                [
                    row["atoms"],
                    *(row["milliseconds"][way] for way in WAYS),
                    *(row["ratios"][way] for way in ("loop", "batched", "dense")),
                ]
                for row in found["times"]
            ],
            TIMES.format(**settings),
        ),
        Picture("forces", drawn(found), CAPTION),
    ]


def said(found: Found) -> str:
    """What was done, and who is faster."""
    settings, dense = found["settings"], found["dense"]
    faster = [str(row["atoms"]) for row in found["times"] if row["ratios"]["loop"] <= 1]
    slower = [str(row["atoms"]) for row in found["times"] if row["ratios"]["loop"] > 1]
    if not slower:
        verdict = f"takes less time than {settings['looped']} members one by one at every size"
    elif not faster:
        verdict = f"takes more time than {settings['looped']} members one by one at every size"
    else:
        verdict = (
            f"takes less time than {settings['looped']} members one by one for the molecules "
            f"of {listed(faster)} atoms and more for those of {listed(slower)}"
        )
    return f"""\
QM9 has no forces. For {settings["molecules"]} test molecules of all sizes the bars of the forces,
from the energies' fit and calibration, are compared with those of last-layer ensembles and with
brute force, which they agree with to {dense["difference"]:.1e} ({dense["molecules"]} molecules,
largest relative difference). The exact way {verdict} (median ratio {found["ratio"]:.2f})."""


def drawn(found: Found) -> Figure:
    """Bars and times by size."""
    figure, (left, right) = panels(columns=2, height=3.4)
    left.plot(
        [one["atoms"] for one in found["bars"]],
        [one["mean"] for one in found["bars"]],
        "o",
        color=BLACK,
        ms=4,
    )
    left.set(xlabel="atoms", ylabel="kcal/mol/Å", title="mean bar of a force", ylim=(0, None))
    for way, (label, colour, marker) in WAYS.items():
        _times(right, found, way, label.format(**found["settings"]), colour, marker)
    right.set(xlabel="atoms", ylabel="milliseconds", yscale="log", title="time")
    right.legend()
    return figure


def _times(ax: Axes, found: Found, way: str, label: str, colour: str, marker: str) -> None:
    rows = sorted(found["times"], key=lambda row: row["atoms"])
    y = [row["milliseconds"][way] for row in rows]
    ax.plot([row["atoms"] for row in rows], y, marker + "-", color=colour, ms=4, label=label)
