"""The section on clusters: tables, figures, and sentences that follow the numbers.

Every function takes what `work.together` gives, as JSON holds it.
"""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from experiments.frame.figures import panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import changed, direction, listed, measured
from experiments.judging import parity
from experiments.judging.columns import cells, heads, score_rows

FAMILIES = {
    "like": "like the training",
    "distorted": "more distorted",
    "larger": "larger",
    "gold": "rich in gold",
}
"""What the page calls the families of clusters."""

WAYS = {
    "nll": "likelihood",
    "by_bins": "bins",
    "evidence": "evidence",
    "energies_only": "forces not in the Gram",
}
"""What the page calls the ways to fit and to calibrate."""

QUANTITIES = {"forces": "forces (eV/Å)", "energy": "energies (eV)"}
COLUMNS = (
    "rmse",
    "bar",
    "binned_log_ratio",
    "coverage_68",
    "coverage_90",
    "coverage_95",
    "spearman",
    "gain",
)
"""Scores of the tables of error bars."""

DIFFERENCES = ("bar", "binned_log_ratio", "coverage_90", "spearman", "gain")
"""Scores whose differences from the main way are shown."""

SHOWN = "nll"
"""The main way, of the figures and of the text."""


def entries(numbers: Found) -> list[Entry]:
    """The section."""
    return [
        "## Error bars of forces: clusters of copper and gold",
        *opening(numbers),
        score_table(numbers, "forces"),
        score_table(numbers, "energy"),
        Picture("cluster-forces", points(numbers, "forces"), _points_caption("forces")),
        Picture("cluster-energy", points(numbers, "energy"), _points_caption("energy")),
        Picture("cluster-bins", bins(numbers), BINS),
        calibration(numbers),
        growth(numbers),
        growth_table(numbers),
        control(numbers),
        difference_table(numbers),
        choice_table(numbers),
        members(numbers),
    ]


def opening(numbers: Found) -> tuple[str, ...]:
    """What was done."""
    s = numbers["settings"]
    soap = s["soap"]
    like = s["families"]["like"]
    distorted = s["families"]["distorted"]
    larger = s["families"]["larger"]
    gold = s["families"]["gold"]
    return (
        f"""\
QM9 has no forces, so the error bars of forces are judged on clusters. Effective-medium theory gives
the energies and forces of the clusters (`ase.calculators.emt`). A cluster is a fragment of
{like["sizes"][0]} to {like["sizes"][1]} atoms from an icosahedral or face-centred cubic lattice. Up
to {_percent(like["gold"][1])} of its atoms are gold, and the others are copper. All distances are
strained by up to {_percent(s["strain"])}, and every atom is displaced at random with a standard
deviation between {like["amplitudes"][0]:g} and {like["amplitudes"][1]:g} Å. Clusters with two atoms
nearer than {s["least"]:g} Å are drawn again, because their enormous forces would dominate every
mean. There are {s["seeds"]} networks. Each has {s["train"]} training, {s["valid"]} validation and
{s["test"]} test clusters of its own. Three further sets of {s["test"]} clusters each lie outside
the training data: *{FAMILIES["distorted"]}* (displacements of {distorted["amplitudes"][0]:g} to
{distorted["amplitudes"][1]:g} Å), *{FAMILIES["larger"]}* ({larger["sizes"][0]} to
{larger["sizes"][1]} atoms) and *{FAMILIES["gold"]}* ({_percent(gold["gold"][0])} gold or more).""",
        f"""\
For speed, the descriptor is smaller than for the molecules: {soap["radial"]} radial functions and l
up to {soap["angular"]}, {s["inputs"]} numbers per atom. Network and optimiser are the same
({s["layers"]} layers of {s["width"]} for each element, {s["features"]} features; AdamW, learning
rate {s["rate"]:g}, weight decay {s["decay"]:g}), with batches of {s["batch"]} clusters and
{s["epochs"]} epochs. The loss is the sum over clusters of r²/n for the energy and β r² for each
component of the forces, with β = {s["beta"]:g} (eV and Å). Forces then make up
{_percent(numbers["loss"]["share"][0])} of the validation loss. The Gram matrix follows the loss:
rows of energies have the weight 1/n, rows of forces the weight β, and
{_percent(numbers["gram"]["share"][0])} of its trace comes from forces. Ridge and scale are chosen
on the energies of the validation clusters, by *{WAYS["nll"]}* or by *{WAYS["by_bins"]}*. Instead,
*{WAYS["evidence"]}* takes the ridge from the energies and forces of the training clusters. Forces
then get a scale of their own from the validation forces. The last way, *{WAYS["energies_only"]}*,
is a control: the same networks and calibration by likelihood, but a Gram matrix of the energies
alone, although forces were part of the training.""",
    )


def score_table(numbers: Found, quantity: str) -> Table:
    """Scores of one quantity: all families and ways, and the constant bar."""
    rows: list[list[Cell]] = []
    for family, label in FAMILIES.items():
        rows += score_rows(numbers["families"][family][quantity], COLUMNS, WAYS, first=[label])
    size = numbers["settings"]["bins"][quantity]
    caption = (
        f"Scores of {QUANTITIES[quantity]}, means and standard errors over networks. *Bar*: the "
        f"root mean square of the error bars. *Log ratio*: the mean over bins of {size} of "
        "|log10(MSE / variance)|. *In 68 %*: the share of errors within that interval. *Gain*: the "
        "gain in log-likelihood over a constant bar, which is the RMSE of the validation clusters."
    )
    return Table(["clusters", "bars", *heads(COLUMNS)], rows, caption)


def growth_table(numbers: Found) -> Table:
    """Bars and errors of far clusters over those like the training."""
    ways = numbers["growth"]
    rows: list[list[Cell]] = []
    for family, grown in ways[SHOWN].items():
        for quantity, label in QUANTITIES.items():
            rmse = measured(grown[quantity]["rmse"], 2)
            bars = [measured(ways[way][family][quantity]["bar"], 2) for way in ways]
            rows.append([FAMILIES[family], label, rmse, *bars])
    columns = ["clusters", "of", "RMSE", *(f"bar, {WAYS[way]}" for way in ways)]
    caption = (
        "RMSE and root mean square bar, divided by those of clusters like the training, for every "
        "way to choose ridge and scale."
    )
    return Table(columns, rows, caption)


def choice_table(numbers: Found) -> Table:
    """What each way chose."""
    names = ("ridge", "effective_rank", "scale", "gradient_scale")
    rows: list[list[Cell]] = []
    for way, chosen in numbers["chosen"].items():
        means = [chosen[name][0] for name in names]
        rows.append([WAYS[way], *means])
    columns = ["bars", "ridge", "effective rank", "scale of energies", "scale of forces"]
    caption = (
        "What was chosen, means over networks. The effective rank counts the directions of the "
        f"{numbers['settings']['features']} features that the ridge leaves to the data. If it is "
        "small, the bars know little about the training clusters."
    )
    return Table(columns, rows, caption)


def difference_table(numbers: Found) -> Table:
    """The other ways minus the main one, on the same networks."""
    rows: list[list[Cell]] = []
    for way, families in numbers["differences"].items():
        for family, differences in families.items():
            for quantity, label in QUANTITIES.items():
                scores = cells(differences[quantity], DIFFERENCES)
                rows.append([WAYS[way], FAMILIES[family], label, *scores])
    columns = ["bars", "clusters", "of", *heads(DIFFERENCES)]
    caption = "Scores minus those of the first way, network by network."
    return Table(columns, rows, caption)


def calibration(numbers: Found) -> str:
    """How good the bars of clusters like the training are."""
    clauses = []
    for quantity, name in (("forces", "forces"), ("energy", "energies")):
        scores = numbers["families"]["like"][quantity][SHOWN]["scores"]
        clauses.append(
            f"For {name}, the 90 % intervals cover {measured(scores['coverage_90'])} and the "
            f"log ratio is {measured(scores['binned_log_ratio'])}; compared with a constant bar, "
            f"the log-likelihood {changed(scores['gain'])}"
        )
    return f"**Like the training**, calibrated by likelihood. {'. '.join(clauses)}."


def growth(numbers: Found) -> str:
    """Whether bars grow where errors do."""
    families = numbers["growth"][SHOWN]
    forces = {family: grown["forces"] for family, grown in families.items()}
    energies = {family: grown["energy"] for family, grown in families.items()}
    return f"**Outside the training.** {_growth('forces', forces)} {_growth('energies', energies)}"


def control(numbers: Found) -> str:
    """What it costs to leave the forces out of the Gram."""
    families = numbers["differences"]["energies_only"]
    clauses = [
        f"*{FAMILIES[family]}*: it {changed(differences['forces']['gain'])}"
        for family, differences in families.items()
    ]
    return (
        "**Forces in the Gram matrix.** Without forces in the Gram matrix, the gain in "
        "log-likelihood of a force component over a constant bar changes as follows: "
        f"{'; '.join(clauses)}."
    )


def members(numbers: Found) -> str:
    """How far an ensemble is from the exact bars."""
    of_members = numbers["members"]
    settings = numbers["settings"]
    return (
        f"**Ensemble members instead.** {settings['members']} members of a last-layer ensemble, "
        "each differentiated by itself, give bars of forces whose root mean square relative "
        f"deviation from the exact bars is {measured(of_members['error'])} ({settings['draws']} "
        f"ensembles per network). Sampling explains {of_members['expected'][0]:.3f}."
    )


def points(numbers: Found, quantity: str) -> Figure:
    """Absolute against estimated errors, a panel for each family."""
    figure, axes = panels(columns=2, rows=2, height=4.0)
    for (family, label), ax in zip(FAMILIES.items(), axes, strict=True):
        parity.errors(ax, numbers["families"][family][quantity][SHOWN]["points"], label)
    return figure


def bins(numbers: Found) -> Figure:
    """Mean squared errors against variances, a panel for each quantity with all families."""
    figure, axes = panels(columns=2, height=4.4)
    for (quantity, label), ax in zip(QUANTITIES.items(), axes, strict=True):
        series = {
            name: numbers["families"][family][quantity][SHOWN]["bins"]
            for family, name in FAMILIES.items()
        }
        parity.binned(ax, series, label)
    return figure


BINS = (
    "Mean squared errors of bins against their predicted variances (calibration by likelihood, "
    "first network). The band extends two standard errors to each side, for independent Gaussian "
    "errors. The errors of the force components of one cluster are correlated, so bins of forces "
    "scatter more."
)


def _points_caption(quantity: str) -> str:
    """The caption of the figure of single errors."""
    return (
        f"Absolute errors of {QUANTITIES[quantity]} against the error bars, for clusters like the "
        "training and outside it (calibration by likelihood, first network, a sample). The pairs "
        "of lines enclose one, two and three standard deviations."
    )


def _growth(name: str, grown: Found) -> str:
    """A sentence on one quantity in all far families.

    Args:
        name: The quantity, in words.
        grown: Ratios "bar", "rmse" and "share" as [mean, standard error], by family.
    """
    clauses = [
        f"{measured(ratios['bar'], 2)} times as large where the errors are "
        f"{measured(ratios['rmse'], 2)} times as large (*{FAMILIES[family]}*)"
        for family, ratios in grown.items()
    ]
    if any(math.isnan(ratios["share"][1]) for ratios in grown.values()):
        return f"The bars of {name} are {listed(clauses)}, for a single network."

    # Families by the direction in which their bars are off.
    sides: dict[int, list[str]] = {-1: [], 0: [], 1: []}
    for family, ratios in grown.items():
        mean, error = ratios["share"]
        sides[direction([mean - 1, error])].append(f"*{FAMILIES[family]}*")
    words = {-1: "too small", 0: "not clearly off", 1: "too large"}
    verdict = "; ".join(
        f"{words[side]} for {listed(families)}" for side, families in sides.items() if families
    )
    return (
        f"Compared with clusters like the training, the bars of {name} are {listed(clauses)}. "
        f"Relative to the errors, they are {verdict}."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
