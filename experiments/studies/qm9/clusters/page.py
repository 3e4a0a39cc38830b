"""Clusters on the page: tables, figures, and sentences that follow the numbers."""

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
WAYS = {
    "nll": "likelihood",
    "by_bins": "bins",
    "evidence": "evidence",
    "energies_only": "forces not in the Gram",
}
QUANTITIES = {"forces": "forces (eV/Å)", "energy": "energies (eV)"}
COLUMNS = (
    *("rmse", "bar", "binned_log_ratio", "coverage_68", "coverage_90", "coverage_95"),
    *("spearman", "gain"),
)
DIFFERENCES = ("bar", "binned_log_ratio", "coverage_90", "spearman", "gain")
SHOWN = "nll"
"""Of the ways, in the figures and in the text."""


def entries(found: Found) -> list[Entry]:
    """The part of the page, from what `work.together` gives."""
    return [
        "## Error bars of forces: clusters of copper and gold",
        *opening(found),
        *(score_table(found, what) for what in QUANTITIES),
        *(Picture(f"cluster-{what}", points(found, what), _of_points(what)) for what in QUANTITIES),
        Picture("cluster-bins", bins(found), BINS),
        calibration(found),
        growth(found),
        growth_table(found),
        control(found),
        difference_table(found),
        choice_table(found),
        members(found),
    ]


def opening(found: Found) -> tuple[str, ...]:
    """What was done."""
    s, soap, family = found["settings"], found["settings"]["soap"], found["settings"]["families"]
    like, distorted, larger, gold = (family[name] for name in FAMILIES)
    return (
        f"""\
QM9 has no forces, so the error bars of forces are judged on clusters whose energies and forces the
effective-medium theory gives (`ase.calculators.emt`). A cluster is a fragment of
{like["sizes"][0]} to {like["sizes"][1]} atoms of an icosahedral or face-centred cubic lattice, up
to {_percent(like["gold"][1])} of its atoms gold and the others copper, all distances strained by up
to {_percent(s["strain"])}, every atom displaced at random with a standard deviation between
{like["amplitudes"][0]:g} and {like["amplitudes"][1]:g} Å; clusters with two atoms nearer than
{s["least"]:g} Å, whose enormous forces would decide every mean, are drawn again.
{s["seeds"]} nets, each with {s["train"]} training, {s["valid"]} validation and {s["test"]} test
clusters of its own. Three further sets of {s["test"]} clusters each lie outside the training:
*{FAMILIES["distorted"]}* (displacements of {distorted["amplitudes"][0]:g} to
{distorted["amplitudes"][1]:g} Å), *{FAMILIES["larger"]}* ({larger["sizes"][0]} to
{larger["sizes"][1]} atoms) and
*{FAMILIES["gold"]}* ({_percent(gold["gold"][0])} gold or more).""",
        f"""\
The descriptor has {soap["radial"]} radial functions and l up to {soap["angular"]}, fewer than for
the molecules, for speed ({s["inputs"]} numbers an atom); net and optimiser are the same
({s["layers"]} layers of {s["width"]} for each element, {s["features"]} features; AdamW, learning
rate {s["rate"]:g}, weight decay {s["decay"]:g}), with batches of {s["batch"]} clusters and
{s["epochs"]} epochs. The loss is the sum over clusters of r²/n for the energy and β r² for each
component of the forces, with β = {s["beta"]:g} (eV and Å). Of the validation loss
{_percent(found["loss"]["share"][0])} is then the forces'. The Gram follows the loss: rows of
energies have the weight 1/n, rows of forces β, and {_percent(found["gram"]["share"][0])} of its
trace comes from forces. Ridge and scale are chosen on the energies of the validation clusters, by
*{WAYS["nll"]}* or by *{WAYS["by_bins"]}*; *{WAYS["evidence"]}* takes the ridge from the energies
and forces of the training clusters instead. Forces then get a scale of their own from the
validation forces. The last way, *{WAYS["energies_only"]}*, is a control: the same nets and
calibration by likelihood, but a Gram of the energies alone, although forces had a part in the
training.""",
    )


def score_table(found: Found, what: str) -> Table:
    """All families and ways, and the constant bar."""
    rows: list[list[Cell]] = []
    for family, label in FAMILIES.items():
        rows += score_rows(found["families"][family][what], COLUMNS, WAYS, first=[label])
    size = found["settings"]["bins"][what]
    caption = (
        f"Scores of {QUANTITIES[what]}, means and standard errors over nets. *Bar* is the root "
        f"mean square of the error bars; *log ratio* the mean over bins of {size} of "
        "|log10(MSE / variance)|; *in 68 %* the share of errors within that interval; *gain* the "
        "gain in log-likelihood over a constant bar, the validation clusters' RMSE."
    )
    return Table(["clusters", "bars", *heads(COLUMNS)], rows, caption)


def growth_table(found: Found) -> Table:
    """Bars and errors of far clusters over those like the training."""
    ways = found["growth"]
    rows: list[list[Cell]] = [
        [
            FAMILIES[family],
            QUANTITIES[what],
            measured(one[what]["rmse"], 2),
            *(measured(ways[way][family][what]["bar"], 2) for way in ways),
        ]
        for family, one in ways[SHOWN].items()
        for what in QUANTITIES
    ]
    columns = ["clusters", "of", "RMSE", *(f"bar, {WAYS[way]}" for way in ways)]
    caption = (
        "How many times the RMSE and the root mean square bar are those of clusters like the "
        "training, by every way to choose ridge and scale."
    )
    return Table(columns, rows, caption)


def choice_table(found: Found) -> Table:
    """What each way chose."""
    names = ("ridge", "effective_rank", "scale", "gradient_scale")
    rows: list[list[Cell]] = [
        [WAYS[way], *(one[name][0] for name in names)] for way, one in found["chosen"].items()
    ]
    columns = ["bars", "ridge", "effective rank", "scale of energies", "scale of forces"]
    caption = (
        "What was chosen, means over nets. The effective rank counts the directions of the "
        f"{found['settings']['features']} features that the ridge leaves to the data: where it is "
        "small, bars know little of the training clusters."
    )
    return Table(columns, rows, caption)


def difference_table(found: Found) -> Table:
    """The other ways minus the first, on the same nets."""
    rows: list[list[Cell]] = [
        [WAYS[way], FAMILIES[family], QUANTITIES[what], *cells(one[what], DIFFERENCES)]
        for way, families in found["differences"].items()
        for family, one in families.items()
        for what in QUANTITIES
    ]
    columns = ["bars", "clusters", "of", *heads(DIFFERENCES)]
    caption = "Scores minus those of the first way, net by net."
    return Table(columns, rows, caption)


def calibration(found: Found) -> str:
    """How good the bars of clusters like the training are."""
    near = {what: found["families"]["like"][what][SHOWN]["scores"] for what in QUANTITIES}
    parts = [
        f"of {name}, {measured(one['coverage_90'])} lie within the 90 % interval and the log ratio "
        f"is {measured(one['binned_log_ratio'])}; over a constant bar the log-likelihood "
        f"{changed(one['gain'])}"
        for name, one in (("forces", near["forces"]), ("energies", near["energy"]))
    ]
    return f"**Like the training.** By likelihood: {'; '.join(parts)}."


def growth(found: Found) -> str:
    """Whether bars grow where errors do."""
    one = found["growth"][SHOWN]
    return "**Outside it.** " + " ".join(
        _growth(name, {family: of[what] for family, of in one.items()})
        for what, name in (("forces", "forces"), ("energy", "energies"))
    )


def control(found: Found) -> str:
    """What it costs to leave the forces out of the Gram."""
    way = found["differences"]["energies_only"]
    parts = [
        f"{FAMILIES[family]}, it {changed(one['forces']['gain'])}" for family, one in way.items()
    ]
    return (
        "**Forces in the Gram.** Without them the gain in log-likelihood of a force component over "
        f"a constant bar changes like this: {'; '.join(parts)}."
    )


def members(found: Found) -> str:
    """How far an ensemble is from the exact bars."""
    one, settings = found["members"], found["settings"]
    return (
        f"**Members instead.** {settings['members']} members of a last-layer ensemble, each "
        "differentiated by itself, give bars of forces with a root mean square relative deviation "
        f"of {measured(one['error'])} from the exact ones, for {settings['draws']} ensembles a "
        f"net; sampling explains {one['expected'][0]:.3f}."
    )


def points(found: Found, what: str) -> Figure:
    """Absolute against estimated errors of all families."""
    figure, axes = panels(columns=2, rows=2, height=4.0)
    for (family, label), ax in zip(FAMILIES.items(), axes, strict=True):
        parity.errors(ax, found["families"][family][what][SHOWN]["points"], label)
    return figure


def bins(found: Found) -> Figure:
    """Mean squared errors against variances, all families in one panel."""
    figure, axes = panels(columns=2, height=4.4)
    for (what, label), ax in zip(QUANTITIES.items(), axes, strict=True):
        series = {
            name: found["families"][family][what][SHOWN]["bins"]
            for family, name in FAMILIES.items()
        }
        parity.binned(ax, series, label)
    return figure


BINS = (
    "Mean squared errors of bins against their predicted variances (calibration by likelihood, "
    "first net). The band is twice the scatter that independent Gaussian errors give a bin; the "
    "components of one cluster's forces err together, so that bins of forces scatter more."
)


def _of_points(what: str) -> str:
    return (
        f"Absolute errors of {QUANTITIES[what]} against the error bars, for clusters like the "
        "training and outside it (calibration by likelihood, first net, a sample), with the lines "
        "that hold one, two and three standard deviations."
    )


def _growth(name: str, grown: Found) -> str:
    """One quantity in all far families."""
    clauses = [
        f"{measured(one['bar'], 2)} times where the errors are {measured(one['rmse'], 2)} times "
        f"as large ({FAMILIES[family]})"
        for family, one in grown.items()
    ]
    sides: dict[int, list[str]] = {-1: [], 0: [], 1: []}
    for family, one in grown.items():
        mean, error = one["share"]
        sides[direction([mean - 1, error])].append(FAMILIES[family])
    words = {-1: "too small", 0: "not clearly off", 1: "too large"}
    verdict = "; ".join(
        f"{words[side]} for clusters {listed(families)}"
        for side, families in sides.items()
        if families
    )
    if any(math.isnan(one["share"][1]) for one in grown.values()):
        return f"The bars of {name} are {listed(clauses)}, for a single net."
    return (
        f"The bars of {name} are {listed(clauses)}: beside those like the training they are "
        f"{verdict}."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
