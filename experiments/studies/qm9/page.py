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
    "The sections on atoms, on kinds and sizes, and on forces of molecules show the first split's "
    "net, calibrated by the likelihood."
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
    """Calibrations minus the paper's on the same nets."""
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


ERRORS = "Errors of the test molecules' energies, mean ± standard error over splits."
SCORES = (
    "Error bars of the test molecules, mean ± standard error over splits; kcal/mol. *Gain* is the "
    "NLL of a constant bar minus that of the bars; *log ratio* the mean over bins of |log10(MSE / "
    "variance)|, and *floor* what these bars would score there if their errors were σ z, where z "
    "are the observed e / σ in a random order (mean square one): bars that are too short for some "
    "kind of molecule make the tail of z heavier and raise their own floor; *in wide bins* the "
    "same ratio for bins of ten times as many molecules; *slope* that of log MSE on "
    "log variance; *decades* what the binned variances span; coverage of 90 % intervals. The "
    "constant bar is the root mean square error of the validation molecules."
)
DIFFERENCES = (
    "Paired differences on the same nets, mean ± standard error. Negative is better for all but "
    "coverage and rank correlation."
)
CHOICES = (
    "What the validation molecules chose (medians over splits): ridge, scale, the noise variance "
    "of a molecule of one atom (that of n atoms is n times it), and how many of the features the "
    "training molecules determine."
)
PARITY = (
    "One net (first split), by three calibrations. Above: absolute against estimated errors of "
    "test molecules drawn at random, in kcal/mol; the lines hold the probabilities of one, two "
    "and three standard deviations. Below: bins of molecules with similar variances; the band is "
    "twice the standard error that Gaussian errors give a bin."
)


def opening(settings: Found) -> tuple[str, ...]:
    """What was done."""
    s = settings
    soap = settings["soap"]
    trial = ", ".join(f"{name} {value:.2f}" for name, value in s["trial"]["rmse"].items())
    machines = "; ".join(f"{name} (nets: {count})" for name, count in s["trained_on"].items())
    return (
        f"""\
Energies of small organic molecules (QM9) by a net of atoms (paper, Sec. 4.3). {s["splits"]} random
splits with {s["train"]} training, {s["valid"]} validation and {s["test"]} test molecules, one net
each. Atoms are described by SOAP power spectra (cutoff {soap["cutoff"]:g} Å, {soap["radial"]}
radial functions, angular momenta to {soap["angular"]}, Gaussians of {soap["width"]:g} Å,
shifted-cosine cutoff over {soap["smoothing"]:g} Å, neighbours weighted by
1 / (1 + (r / {soap["scale"]:g} Å)^{soap["exponent"]:g})), {s["inputs"]} numbers each, computed by
featomic. Each of the {s["species"]} elements has a net of its own, {s["layers"]} hidden layers of
{s["width"]} with SiLU and a readout without bias; an energy is the sum over the atoms, plus a
linear baseline by composition. All in float64 (expanded densities are kept in float32), by AdamW,
learning rate {s["rate"]:g}, weight decay {s["decay"]:g}, batches of {s["batch"]} molecules,
{s["epochs"]} epochs; as in the paper's other fits the rate is cut tenfold after
{s["patience"]} epochs without a smaller validation loss, and the weights of the smallest one are
kept.""",
        f"""\
The loss is the sum of r² / n over molecules of n atoms, so a molecule enters the Gram with the
weight 1 / n; the published code divides features by n, which is 1 / n². The library finds the
{s["species"]} readouts and their {s["features"]} features by itself. Descriptors are shifted to
mean zero over the training atoms and divided by one number, their root mean square. Whether the
published descriptors were scaled is not known. This scaling was chosen beforehand, in a trial that
is no part of this run: one net each, {s["trial"]["epochs"]} epochs, RMSE of
{s["trial"]["molecules"]} molecules outside its training set, most of which are test molecules here
too: {trial} kcal/mol.""",
        f"""\
Three calibrations use the validation molecules, which also chose the weights. *Paper*: ridge
and scale by bins of {s["calibration_bin_size"]} molecules, as its text says. *Likelihood*: the same
two numbers by the Gaussian likelihood, as its code does. *Evidence*: the ridge of the greatest
evidence of the training molecules; scale and a noise of n times a constant by the likelihood, which
chose no noise at all on {s["noiseless"]} of {s["splits"]} splits. Scores are taken in bins of
{s["bin_size"]} molecules, as in the paper's figure.""",
        f"Trained on: {machines}. {SHARED_ROWS} A difference is called one "
        f"beyond two standard errors; of {s['splits']} repetitions chance alone passes that in "
        f"{s['chance']['splits']:.0%} of comparisons, of three in {s['chance']['three']:.0%}.",
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
        f"**Binned log ratio.** {'; '.join(clauses)}. The likelihood's ratio "
        f"{compared(difference)} that of the paper's bins ({measured(difference)} split by "
        "split). A few molecules are wrong by many bars, and the mean squared error of a bin hangs "
        "on whether it holds one of them: that is what the floor counts, and what wide bins "
        "average out."
    )


def costs_caption(costs: Found) -> str:
    """What the table of costs shows."""
    return (
        f"Seconds of an untrained net of the same shape on {costs['machine']}, {costs['threads']} "
        "threads, with descriptors ready in memory; bare passes and work with error bars take "
        "turns. A fit includes finding the readouts."
    )
