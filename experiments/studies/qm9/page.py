"""The page: energies, costs, and the sections one after the other."""

from __future__ import annotations

from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import SHARED_ROWS, compared, measured
from experiments.judging import parity
from experiments.judging.columns import cells, heads, labels, score_rows
from experiments.studies.qm9.clusters import page as clusters
from experiments.studies.qm9.forces import page as forces
from experiments.studies.qm9.learning import page as learning
from experiments.studies.qm9.novelty import page as novelty
from experiments.studies.qm9.pictures import page as pictures

LABELS = labels(("paper", "nll", "evidence"))
"""What the page calls the calibrations."""

COLUMNS = (
    "nll",
    "gain",
    "crps",
    "binned_log_ratio",
    "floor",
    "wide_log_ratio",
    "coverage",
    "slope",
    "decades",
    "spearman",
)
"""Scores of the table of error bars."""

COMPARED = ("nll", "crps", "binned_log_ratio", "coverage", "spearman")
"""Scores whose differences from the paper's calibration are shown."""

FIRST = (
    "The sections on atoms, on kinds and sizes, and on forces of molecules show the network of the "
    "first split, calibrated by the likelihood."
)


def entries(numbers: Found) -> list[Entry]:
    """Everything on the page, in reading order."""
    energies = numbers["energies"]
    calibrations = energies["calibrations"]
    by_label = {LABELS[name]: calibration for name, calibration in calibrations.items()}
    return [
        *opening(numbers["settings"]),
        "## Energies",
        error_table(calibrations["paper"]["scores"], ERRORS),
        score_table(calibrations, SCORES),
        closing(energies),
        Picture("bars", parity.pairs(by_label, height=3.3), PARITY),
        difference_table(energies["differences"], DIFFERENCES),
        choice_table(calibrations, CHOICES),
        "## What the error bars cost",
        cost_table(numbers["costs"], costs_caption(numbers["costs"])),
        FIRST,
        "## Which atoms are uncertain",
        *pictures.entries(energies["shown"]),
        *novelty.entries(energies["novelty"]),
        *learning.entries(numbers["learning"]),
        *forces.entries(numbers["forces"]),
        *clusters.entries(numbers["clusters"]),
    ]


def error_table(scores: Found, caption: str) -> Table:
    """How wrong the predictions are."""
    names = {
        "rmse": "RMSE (kcal/mol)",
        "mae": "MAE (kcal/mol)",
        "rmse_per_atom": "RMSE (meV/atom)",
    }
    return Table(list(names.values()), [cells(scores, names)], caption)


def score_table(calibrations: Found, caption: str) -> Table:
    """All calibrations, and the constant bar."""
    return Table(["bars", *heads(COLUMNS)], score_rows(calibrations, COLUMNS), caption)


def difference_table(differences: Found, caption: str) -> Table:
    """Calibrations minus the paper's on the same networks."""
    rows: list[list[Cell]] = []
    for name, difference in differences.items():
        rows.append([f"{LABELS[name]} - paper", *cells(difference, COMPARED)])
    return Table(["bars", *heads(COMPARED)], rows, caption)


def choice_table(calibrations: Found, caption: str) -> Table:
    """What each calibration chose."""
    rows: list[list[Cell]] = []
    for name, calibration in calibrations.items():
        chosen = calibration["chosen"]
        rows.append(
            [
                LABELS[name],
                chosen["ridge"],
                chosen["scale"],
                chosen["noise_variance"],
                chosen["effective_rank"],
            ]
        )
    columns = ["bars", "ridge", "scale", "noise variance", "effective rank"]
    return Table(columns, rows, caption)


def cost_table(costs: Found, caption: str) -> Table:
    """Seconds, and their ratio to the bare pass."""
    fit = costs["fit"]
    predict = costs["predict"]
    rows: list[list[Cell]] = [
        ["fit", fit["molecules"], fit["bare"], fit["fit"], fit["ratio"]],
        ["predictions", predict["molecules"], predict["bare"], predict["bars"], predict["ratio"]],
    ]
    return Table(
        ["work", "molecules", "bare pass (s)", "with error bars (s)", "ratio"], rows, caption
    )


ERRORS = "Errors in the energies of test molecules, mean ± standard error over splits."
SCORES = (
    "Error bars of the test molecules, mean ± standard error over splits; kcal/mol. *Gain*: the "
    "NLL (negative log-likelihood) of a constant bar minus that of the bars. *Log ratio*: the mean "
    "over bins of |log10(MSE / variance)|. *Floor*: the log ratio that these bars would have if "
    "their errors were σ z, where z are the observed ratios e / σ in a random order (mean square "
    "one). Bars that are too short for some kind of molecule make the tail of z heavier and so "
    "raise their own floor. *In wide bins*: the log ratio for bins of ten times as many molecules. "
    "*Slope*: the slope of log MSE against log variance. *Decades*: the range that the binned "
    "variances span. *Coverage*: share of the energies that 90 % intervals cover. The constant bar "
    "is the root mean square error of the validation molecules."
)
DIFFERENCES = (
    "Paired differences on the same networks, mean ± standard error. Negative is better for all "
    "columns but coverage and rank correlation."
)
CHOICES = (
    "What the validation molecules chose, as medians over splits: the ridge, the scale, and the "
    "noise variance of a molecule with one atom (n times as large for n atoms). The effective rank "
    "is the number of features that the training molecules determine."
)
PARITY = (
    "One network (first split) with three calibrations. Above: absolute error against estimated "
    "error for test molecules drawn at random, in kcal/mol; the pairs of lines enclose the "
    "probabilities of one, two and three standard deviations. Below: bins of molecules with "
    "similar variances; the band extends two standard errors to each side, for Gaussian errors."
)


def opening(settings: Found) -> tuple[str, ...]:
    """What was done."""
    s = settings
    soap = settings["soap"]
    trial = ", ".join(f"{name} {value:.2f}" for name, value in s["trial"]["rmse"].items())
    machines = "; ".join(f"{name} (networks: {count})" for name, count in s["trained_on"].items())
    return (
        f"""\
A network of atoms predicts the energies of small organic molecules from the set QM9 (paper,
Sec. 4.3). There are {s["splits"]} random splits with {s["train"]} training, {s["valid"]} validation
and {s["test"]} test molecules, and one network per split. SOAP power spectra (smooth overlap of
atomic positions) describe the atoms: cutoff {soap["cutoff"]:g} Å, {soap["radial"]} radial
functions, angular momenta up to {soap["angular"]}, Gaussians of {soap["width"]:g} Å, a
shifted-cosine cutoff over {soap["smoothing"]:g} Å, and neighbours weighted by
1 / (1 + (r / {soap["scale"]:g} Å)^{soap["exponent"]:g}). The package featomic computes these
{s["inputs"]} numbers per atom. Each of the {s["species"]} elements has a network of its own:
{s["layers"]} hidden layers of {s["width"]} units with SiLU and a readout without bias. The energy
is the sum over the atoms, plus a linear baseline by composition. All calculations are in float64
(expanded densities are kept in float32). The networks are trained with AdamW at learning rate
{s["rate"]:g}, with weight decay {s["decay"]:g}, in batches of {s["batch"]} molecules for
{s["epochs"]} epochs. As in the paper's other fits, the learning rate falls tenfold after
{s["patience"]} epochs without a smaller validation loss, and the weights with the smallest
validation loss are kept.""",
        f"""\
The loss is the sum of r² / n over molecules of n atoms, so a molecule enters the Gram matrix with
the weight 1 / n. The published code divides features by n, which gives the weight 1 / n². The
library finds the {s["species"]} readouts and their {s["features"]} features by itself. Descriptors
are shifted to mean zero over the training atoms and divided by one number, their root mean square.
It is not known whether the published descriptors were scaled. This scaling was chosen beforehand in
a trial that is not part of this run, with one network per scaling and {s["trial"]["epochs"]}
epochs. The trial compared the RMSE of {s["trial"]["molecules"]} molecules outside its training set,
most of which are also test molecules here: {trial} kcal/mol.""",
        f"""\
Three calibrations use the validation molecules, which also chose the weights. *Paper* chooses ridge
and scale by bins of {s["calibration_bin_size"]} molecules, as the paper's text says. *Likelihood*
chooses the same two numbers by the Gaussian likelihood, as the paper's code does. *Evidence* takes
the ridge that maximises the evidence (the marginal likelihood) of the training molecules; the
likelihood then chooses the scale and a noise of n times a constant. It chose no noise at all on
{s["noiseless"]} of {s["splits"]} splits. Scores use bins of {s["bin_size"]} molecules, as the
paper's figure does.""",
        f"Trained on: {machines}. {SHARED_ROWS} A difference counts as clear beyond two standard "
        f"errors. Chance alone exceeds this limit in {s['chance']['splits']:.0%} of comparisons "
        f"with {s['splits']} repetitions, and in {s['chance']['three']:.0%} with three.",
    )


def closing(energies: Found) -> str:
    """What came out, in sentences that follow the numbers."""
    clauses = []
    for name, calibration in energies["calibrations"].items():
        scores = calibration["scores"]
        clauses.append(
            f"*{LABELS[name]}*: {measured(scores['binned_log_ratio'])} (floor "
            f"{measured(scores['floor'])}, in wide bins {measured(scores['wide_log_ratio'])}) over "
            f"{measured(scores['decades'], 1)} decades of variance, rank correlation of bar and "
            f"error {measured(scores['spearman'], 2)}"
        )
    difference = energies["differences"]["nll"]["binned_log_ratio"]
    return (
        f"**Binned log ratio.** {'; '.join(clauses)}. The log ratio of the likelihood "
        f"{compared(difference)} that of the paper's bins ({measured(difference)}, split by "
        "split). The errors of a few molecules are many bars long, and the mean squared error of a "
        "bin depends on whether the bin contains one of them. The floor accounts for this effect, "
        "and wide bins average it out."
    )


def costs_caption(costs: Found) -> str:
    """What the table of costs shows."""
    return (
        f"Seconds for an untrained network of the same shape on {costs['machine']}, "
        f"{costs['threads']} threads, with the descriptors in memory. Bare passes and passes with "
        "error bars take turns. A fit includes the search for the readouts."
    )
