"""The page: tables, figures, and texts that follow the numbers.

Everything here reads the numbers of `run.run`, as the JSON file has them. A *kind* is a kind of
targets, "raw" or "standardised".
"""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.frame.figures import BLACK, BLUE, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import SHARED_ROWS, compared, listed, measured
from experiments.judging import parity
from experiments.judging.columns import cells, heads, labels, score_rows
from experiments.studies.weather.work import SHOWN

LABELS = labels(("paper", "nll", "best", "best_bins"))
"""What the page calls the calibrations."""

COLUMNS = (
    *("rmse", "nll", "gain", "crps", "binned_log_ratio", "floor", "ence", "coverage"),
    *("slope", "decades", "spearman"),
)
"""Scores of the first table."""

COMPARED = ("rmse", "nll", "crps", "binned_log_ratio", "ence", "coverage", "spearman")
"""Scores of the table of differences."""

TARGETS = {"raw": "degrees", "standardised": "standardised"}
"""What the page calls the kinds of targets."""

EXTREME = 3
"""Stations shown at either end."""


def entries(numbers: Found) -> list[Entry]:
    """The page."""
    kinds = numbers["targets"]
    stations = kinds["raw"]["stations"]["paper"]
    return [
        *opening(numbers["settings"]),
        score_table(kinds),
        *closing(kinds),
        Picture("bars", rows_and_bins(kinds["raw"]), ROWS_CAPTION),
        difference_table(kinds, numbers["standardised_minus_raw"]),
        choice_table(kinds),
        Picture("stations", station_figure(stations), STATION_CAPTION),
        station_table(stations),
    ]


# --- tables --------------------------------------------------------------------------------------


def score_table(kinds: Found) -> Table:
    """All calibrations of both kinds of networks, and the constant bar."""
    rows: list[list[Cell]] = []
    for target, kind in kinds.items():
        rows += score_rows(kind["calibrations"], COLUMNS, first=[TARGETS[target]])
    return Table(["target", "bars", *heads(COLUMNS)], rows, SCORES)


def difference_table(kinds: Found, between_kinds: Found) -> Table:
    """Calibrations minus the paper's on the same networks, and one kind minus the other."""
    rows: list[list[Cell]] = []
    for target, kind in kinds.items():
        for name, differences in kind["differences"].items():
            row = [TARGETS[target], f"{LABELS[name]} - paper", *cells(differences, COMPARED)]
            rows.append(row)
    for name, differences in between_kinds.items():
        rows.append(["standardised - degrees", LABELS[name], *cells(differences, COMPARED)])
    return Table(["target", "bars", *heads(COMPARED)], rows, DIFFERENCES)


def choice_table(kinds: Found) -> Table:
    """What each calibration chose."""
    rows: list[list[Cell]] = []
    for target, kind in kinds.items():
        for name, calibration in kind["calibrations"].items():
            chosen = calibration["chosen"]
            choices = "; ".join(f"{way} ({count})" for way, count in chosen["ways"].items())
            values = [chosen["ridge"], chosen["scale"], chosen["noise_variance"]]
            rows.append([TARGETS[target], LABELS[name], choices, *values])
    columns = ["target", "bars", "criterion, noise (networks)", "ridge", "scale", "noise variance"]
    return Table(columns, rows, CHOICES)


def station_table(stations: Found) -> Table:
    """The stations of the smallest and of the largest errors."""
    names = list(stations)
    if len(names) > 2 * EXTREME:
        names = names[:EXTREME] + names[-EXTREME:]
    rows: list[list[Cell]] = []
    for name in names:
        station = stations[name]
        rows.append(
            [name, station["rows"], measured(station["bar"], 2), measured(station["rmse"], 2)]
        )
    return Table(["station", "test rows", "bar", "RMSE"], rows, STATIONS)


# --- figures -------------------------------------------------------------------------------------


def rows_and_bins(kind: Found) -> Figure:
    """One column a calibration: absolute errors above, bins below."""
    return parity.pairs({LABELS[name]: kind["calibrations"][name] for name in SHOWN}, height=3.3)


def station_figure(stations: Found) -> Figure:
    """The error of each station against its bar; the first and the last station are named."""
    figure, (ax,) = panels(width=5.0, height=4.4)
    bars = [station["bar"][0] for station in stations.values()]
    errors = [station["rmse"][0] for station in stations.values()]
    standard_errors = [station["rmse"][1] for station in stations.values()]
    ax.errorbar(bars, errors, yerr=standard_errors, fmt="o", color=BLUE, ms=4, lw=1)
    low = min(bars + errors)
    high = max(bars + errors)
    margin = 0.08 * (high - low)
    ends = [low - margin, high + margin]
    ax.plot(ends, ends, color=BLACK, lw=1)
    names = list(stations)
    for place in {0, len(names) - 1}:
        ax.annotate(
            names[place],
            (bars[place], errors[place]),
            xytext=(6, -10),
            textcoords="offset points",
            fontsize=8,
        )
    ax.set(xlim=ends, ylim=ends, xlabel="bar (°C)", ylabel="RMSE (°C)")
    ax.set_box_aspect(1)
    return figure


# --- captions ------------------------------------------------------------------------------------

SCORES = (
    "Test rows: mean ± standard error over splits, errors in degrees Celsius. *Gain*: the NLL "
    "(negative log-likelihood) of a constant bar minus that of the bars. *Log ratio*: the mean "
    "over bins of |log10(MSE / variance)|. *Decades*: the range that the binned variances span. "
    "*Coverage*: share of the targets that 90 % intervals cover. The constant bar is the root mean "
    "square error of the validation rows."
)
DIFFERENCES = (
    "Paired differences on the same splits, mean ± standard error. The first rows compare "
    "calibrations of the same networks. The last rows are networks with standardised targets minus "
    "networks with degrees. Negative is better for all columns but coverage and rank correlation."
)
CHOICES = (
    "What the validation rows chose, as medians over splits: ridge and scale in the network's own "
    "unit, noise variance in °C². The number of splits is in brackets."
)
STATIONS = (
    "The stations with the smallest and the largest errors, and their bars (root mean square over "
    "their test rows), with the paper's calibration and targets in degrees. Mean ± standard error "
    "over splits, which differ in their test rows."
)
ROWS_CAPTION = (
    "One network (first split, targets in degrees) with three calibrations. Above: absolute error "
    "against estimated error for test rows drawn at random; the pairs of lines enclose the "
    "probabilities of one, two and three standard deviations. Below: bins of rows with similar "
    "variances; the band extends two standard errors to each side, for Gaussian errors."
)
STATION_CAPTION = (
    "Root mean square error of every station against its root mean square bar, with the paper's "
    "calibration and targets in degrees. Means over splits; vertical bars are standard errors."
)


# --- texts ---------------------------------------------------------------------------------------


def opening(settings: Found) -> tuple[str, ...]:
    """What was done."""
    rows = settings["rows"]
    return (
        f"""\
Networks predict tomorrow's maximum temperature at {settings["stations"]} Australian stations from
today's records (paper, Sec. 4.4). There are {settings["splits"]} random splits with {rows["train"]}
training, {rows["valid"]} validation and {rows["test"]} test rows, and one network per split. The
inputs are {settings["inputs"]} continuous records, standardised on the training rows, and a learned
vector of {settings["embedding"]} numbers for the station. The networks have {settings["layers"]}
hidden layers of {settings["width"]} units with SiLU. They are trained with AdamW at learning rate
{settings["rate"]:g}, with weight decay {settings["decay"]:g}, in batches of {settings["batch"]} for
{settings["epochs"]} epochs. The weights with the smallest validation loss are kept.""",
        f"""\
The paper turns each wind direction into two numbers. This recipe gives {settings["inputs"]}
continuous inputs, not the {settings["paper_inputs"]} that the paper states, which is the number of
its stations. We take the paper's "following day" literally: the target is the maximum of the next
calendar day at the station, which is not always the next row. The paper does not say whether the
target was scaled. Its other large fits leave targets as they are, so the main networks here predict
degrees. A second set of networks on the same splits uses targets with mean 0 and standard
deviation 1.""",
        f"""\
Four calibrations are compared. All of them use only the validation rows.

- *Paper* chooses ridge and scale by bins of {settings["calibration_bin_size"]} rows.
- *Likelihood* chooses the same two numbers by the Gaussian likelihood.
- *Best* uses a constant noise and the ridge that maximises the evidence (the marginal likelihood)
  of the training rows. It uses another form only if that form has a clearly better likelihood in
  {settings["folds"]}-fold cross-validation within the validation rows (and a ridge that leaves
  something for the data to determine).
- *Best by bins* takes the smallest binned log ratio, which the paper's figure shows, by the same
  cross-validation. It chooses among *paper*, *likelihood*, and *paper* with a constant noise. A
  constant bar does well in bins, so only forms count that keep {100 * settings["kept"]:.0f} % of
  the paper's gain in likelihood over a constant bar.

Scores use bins of {settings["bin_size"]} rows, as the paper's figure does.""",
        SHARED_ROWS,
    )


def closing(kinds: Found) -> tuple[str, ...]:
    """What came out, in sentences that follow the numbers."""
    return (
        " ".join(_binned(target, kind) for target, kind in kinds.items()),
        " ".join(_likelihood(target, kind) for target, kind in kinds.items()),
        READING,
        _stations(kinds["raw"]["stations"]["paper"]),
    )


READING = """\
**Reading the log ratio.** The log ratio shows how far the bars are wrong on average over bins. It
does not show whether the bars distinguish between rows, so read it together with the gain, the
decades and the rank correlation. If errors have heavier tails than a Gaussian, bins scatter more
than the band shows, even if the variances are right. The *floor* is the score that these bars would
have if nothing were wrong with them: with errors σ z, where z are the observed ratios e / σ in a
random order."""


def _binned(target: str, kind: Found) -> str:
    """Which calibration has the smallest binned log ratio."""
    calibrations = kind["calibrations"]
    lead = kind["leaders"]["binned_log_ratio"]
    best = lead["name"]
    smallest = measured(calibrations[best]["scores"]["binned_log_ratio"])
    paper = ""
    if best != "paper":
        ratio = measured(calibrations["paper"]["scores"]["binned_log_ratio"])
        paper = f"is {ratio} with the paper's calibration. It "
    constant = measured(calibrations["paper"]["constant"]["scores"]["binned_log_ratio"])
    from_constant = kind["from_constant"][best]["binned_log_ratio"]
    return (
        f"**Targets: {TARGETS[target]}.** The binned log ratio {paper}has the smallest mean with "
        f"*{LABELS[best]}*: {smallest}. {_ties(lead)}. The mean of *{LABELS[best]}* "
        f"{compared(from_constant)} the constant bar's {constant} ({measured(from_constant)}, "
        "split by split)."
    )


def _likelihood(target: str, kind: Found) -> str:
    """Which calibration gains most in likelihood over a constant bar."""
    calibrations = kind["calibrations"]
    lead = kind["leaders"]["gain"]
    best = lead["name"]
    largest = measured(calibrations[best]["scores"]["gain"])
    paper = ""
    if best != "paper":
        paper = f" (the paper's {measured(calibrations['paper']['scores']['gain'])})"
    return (
        f"**Targets: {TARGETS[target]}.** The gain in likelihood over a constant bar has the "
        f"largest mean with *{LABELS[best]}*: {largest} nats per row{paper}. {_ties(lead)}."
    )


def _ties(lead: Found) -> str:
    """Which calibrations share the first place, and which clearly do not.

    Args:
        lead: what `run.leader` gives.
    """
    same = lead["same"]
    tied = lead["tied"]
    behind = [name for name in lead["others"] if name not in (*same, *tied)]
    clauses = []
    if same:
        names = listed([f"*{LABELS[name]}*" for name in same])
        verb = "has" if len(same) == 1 else "have"
        clauses.append(f"{names} {verb} the same value on every split")
    if tied:
        verb = "does" if len(tied) == 1 else "do"
        clauses.append(f"{_with_differences(lead, tied)} {verb} not clearly differ from it")
    if behind:
        verb = "is" if len(behind) == 1 else "are"
        clauses.append(f"{_with_differences(lead, behind)} {verb} clearly behind")
    return ". ".join(clauses)


def _with_differences(lead: Found, names: list[str]) -> str:
    """Calibrations with their differences from the leader, split by split."""
    return listed([f"*{LABELS[name]}* ({measured(lead['others'][name])})" for name in names])


def _stations(stations: Found) -> str:
    """How far the stations' bars reach beside their errors."""
    errors = [station["rmse"][0] for station in stations.values()]
    bars = [station["bar"][0] for station in stations.values()]
    return (
        f"**Stations.** The root mean square errors of the stations range from {min(errors):.2f} "
        f"to {max(errors):.2f} degrees, and their bars from {min(bars):.2f} to {max(bars):.2f} "
        "(paper's calibration, targets in degrees). A bar by rigidity shows how well the training "
        "rows support a prediction. It does not know that the weather of one place is harder to "
        "predict than that of another."
    )
