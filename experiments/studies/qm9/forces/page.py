"""The section on error bars of forces: what was done, two tables and a figure."""

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
"""Label, colour and marker of each way to compute the bars."""

COLUMNS = [
    "atoms",
    "exact",
    "members",
    "at once",
    "brute force",
    "exact / members",
    "exact / at once",
    "exact / brute force",
]
"""Of the table of times."""
ENSEMBLES = (
    "Bars of forces from last-layer ensembles: root mean square of their relative differences from "
    "the exact bars, over all components of all molecules. *Expected* is the value for a Gaussian "
    "sample of that size."
)
TIMES = (
    "Milliseconds for the bars of all forces of one molecule, without the time that featomic takes "
    "for descriptors and their derivatives. Medians of {repeats} turns on {threads} threads "
    "({machine}). The last columns divide the time of the exact way by that of the members one by "
    "one (one forward pass, {looped} backward passes), of the members at once (batched backward "
    "passes), and of brute force (derivatives of all {features} features)."
)
CAPTION = (
    "Left: mean bar of a force component against the size of the molecule, for single molecules of "
    "QM9. Right: time to compute the bars of all forces of a molecule."
)


def entries(numbers: Found) -> list[Entry]:
    """The section.

    Args:
        numbers: What `work.measured` gives, as JSON holds it.
    """
    return [
        "## Error bars of forces",
        said(numbers),
        ensemble_table(numbers["ensembles"]),
        time_table(numbers["times"], TIMES.format(**numbers["settings"])),
        Picture("forces", drawn(numbers), CAPTION),
    ]


def ensemble_table(ensembles: list[Found]) -> Table:
    """How far the bars of ensembles are from the exact ones, by the number of members."""
    rows = [[row["members"], row["error"], row["expected"]] for row in ensembles]
    return Table(["members", "difference", "expected"], rows, ENSEMBLES)


def time_table(times: list[Found], caption: str) -> Table:
    """Milliseconds of every way, and the exact way's share of the others."""
    rows = []
    for row in times:
        milliseconds = [row["milliseconds"][way] for way in WAYS]
        ratios = [row["ratios"][way] for way in ("loop", "batched", "dense")]
        rows.append([row["atoms"], *milliseconds, *ratios])
    return Table(COLUMNS, rows, caption)


def said(numbers: Found) -> str:
    """What was done, and which way is faster."""
    settings = numbers["settings"]
    dense = numbers["dense"]
    faster = [str(row["atoms"]) for row in numbers["times"] if row["ratios"]["loop"] <= 1]
    slower = [str(row["atoms"]) for row in numbers["times"] if row["ratios"]["loop"] > 1]
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
QM9 has no forces. For {settings["molecules"]} test molecules of all sizes, the bars of the forces
come from the fit and calibration of the energies. They are compared with the bars of last-layer
ensembles and with brute force. The largest relative difference from brute force is
{dense["difference"]:.1e} ({dense["molecules"]} molecules). The exact way {verdict} (median ratio
{numbers["ratio"]:.2f})."""


def drawn(numbers: Found) -> Figure:
    """The figure: bars and times by size."""
    figure, (left, right) = panels(columns=2, height=3.4)
    left.plot(
        [bar["atoms"] for bar in numbers["bars"]],
        [bar["mean"] for bar in numbers["bars"]],
        "o",
        color=BLACK,
        ms=4,
    )
    left.set(xlabel="atoms", ylabel="kcal/mol/Å", title="mean bar of a force", ylim=(0, None))
    for way, (label, colour, marker) in WAYS.items():
        label = label.format(**numbers["settings"])
        _draw_times(right, numbers["times"], way, label, colour, marker)
    right.set(xlabel="atoms", ylabel="milliseconds", yscale="log", title="time")
    right.legend()
    return figure


def _draw_times(
    ax: Axes, times: list[Found], way: str, label: str, colour: str, marker: str
) -> None:
    """Draw the milliseconds of one way against the number of atoms."""
    rows = sorted(times, key=lambda row: row["atoms"])
    atoms = [row["atoms"] for row in rows]
    milliseconds = [row["milliseconds"][way] for row in rows]
    ax.plot(atoms, milliseconds, marker + "-", color=colour, ms=4, label=label)
