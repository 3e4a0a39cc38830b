"""The page: tables, figures, and texts that follow the numbers."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.frame.figures import BLACK, BLUE, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import SHARED_ROWS, compared, listed, measured
from experiments.judging import parity
from experiments.judging.columns import cells, heads, labels, score_rows
from experiments.studies.weather.work import SHOWN

LABELS = labels(("paper", "nll", "best", "best_bins"))
COLUMNS = (
    *("rmse", "nll", "gain", "crps", "binned_log_ratio", "floor", "ence", "coverage"),
    *("slope", "decades", "spearman"),
)
TARGETS = {"raw": "degrees", "standardised": "standardised"}
EXTREME = 3
"""Stations shown at either end."""


def entries(numbers: Found) -> list[Entry]:
    """The page."""
    kinds = numbers["targets"]
    of_stations = kinds["raw"]["stations"]["paper"]
    return [
        *opening(numbers["settings"]),
        score_table(kinds, SCORES),
        *closing(kinds),
        Picture("bars", rows_and_bins(kinds["raw"]), ROWS_CAPTION),
        difference_table(kinds, numbers["standardised_minus_raw"], DIFFERENCES),
        choice_table(kinds, CHOICES),
        Picture("stations", stations(of_stations), STATION_CAPTION),
        station_table(of_stations, STATIONS),
    ]


def score_table(found: Found, caption: str) -> Table:
    """All calibrations of both kinds of nets, and the constant bar."""
    rows: list[list[Cell]] = []
    for target, one in found.items():
        rows += score_rows(one["calibrations"], COLUMNS, first=[TARGETS[target]])
    return Table(["target", "bars", *heads(COLUMNS)], rows, caption)


def difference_table(found: Found, between: Found, caption: str) -> Table:
    """Calibrations minus the paper's on the same nets, and one kind of nets minus the other."""
    names = ("rmse", "nll", "crps", "binned_log_ratio", "ence", "coverage", "spearman")
    rows: list[list[Cell]] = [
        [TARGETS[target], f"{LABELS[name]} - paper", *cells(one, names)]
        for target, kind in found.items()
        for name, one in kind["differences"].items()
    ]
    rows += [
        ["standardised - degrees", LABELS[name], *cells(one, names)]
        for name, one in between.items()
    ]
    return Table(["target", "bars", *heads(names)], rows, caption)


def choice_table(found: Found, caption: str) -> Table:
    """What each calibration chose."""
    rows: list[list[Cell]] = []
    for target, kind in found.items():
        for name, one in kind["calibrations"].items():
            chosen = one["chosen"]
            ways = "; ".join(f"{way} ({count})" for way, count in chosen["ways"].items())
            numbers = [chosen[key] for key in ("ridge", "scale", "noise_variance")]
            rows.append([TARGETS[target], LABELS[name], ways, *numbers])
    columns = ["target", "bars", "criterion, noise (nets)", "ridge", "scale", "noise variance"]
    return Table(columns, rows, caption)


def station_table(stations: Found, caption: str) -> Table:
    """The stations of the smallest and of the largest errors."""
    names = list(stations)
    shown = names if len(names) <= 2 * EXTREME else names[:EXTREME] + names[-EXTREME:]
    rows: list[list[Cell]] = [
        [name, stations[name]["rows"], *(measured(stations[name][k], 2) for k in ("bar", "rmse"))]
        for name in shown
    ]
    return Table(["station", "test rows", "bar", "RMSE"], rows, caption)


def rows_and_bins(found: Found) -> Figure:
    """One column a calibration: absolute errors above, bins below."""
    return parity.pairs({LABELS[name]: found["calibrations"][name] for name in SHOWN}, height=3.3)


def stations(found: Found) -> Figure:
    """The error of each station against its bar."""
    figure, (ax,) = panels(width=5.0, height=4.4)
    bars, errors = ([one[k][0] for one in found.values()] for k in ("bar", "rmse"))
    spread = [one["rmse"][1] for one in found.values()]
    ax.errorbar(bars, errors, yerr=spread, fmt="o", color=BLUE, ms=4, lw=1)
    low, high = min(bars + errors), max(bars + errors)
    margin = 0.08 * (high - low)
    ends = [low - margin, high + margin]
    ax.plot(ends, ends, color=BLACK, lw=1)
    names = list(found)
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


SCORES = (
    "Test rows; mean ± standard error over splits. Errors in degrees Celsius. *Gain* is the NLL of "
    "a constant bar minus that of the bars; *log ratio* the mean over bins of |log10(MSE / "
    "variance)|; *decades* what the binned variances span; coverage of 90 % intervals. The "
    "constant bar is the root mean square error of the validation rows."
)
DIFFERENCES = (
    "Paired differences on the same splits, mean ± standard error: first calibrations of the same "
    "nets, then nets with standardised targets minus nets with degrees. Negative is better for "
    "all but coverage and rank correlation."
)
CHOICES = (
    "What the validation rows chose (medians over splits): ridge and scale in the net's own unit, "
    "noise variance in °C². Between brackets, on how many splits."
)
STATIONS = (
    "The stations of the smallest and the largest errors, with their bars (root mean square over "
    "their test rows), by the paper's calibration, targets in degrees; mean ± standard error over "
    "splits, which differ in their test rows."
)
ROWS_CAPTION = (
    "One net (first split, targets in degrees), by three calibrations. Above: absolute against "
    "estimated error of test rows drawn at random; the lines hold the probabilities of one, two "
    "and three standard deviations. Below: bins of rows with similar variances; the band is twice "
    "the standard error that Gaussian errors give a bin."
)
STATION_CAPTION = (
    "Root mean square error of every station against its root mean square bar (paper's "
    "calibration, targets in degrees, mean over splits; vertical bars are standard errors)."
)


def opening(settings: Found) -> tuple[str, ...]:
    """What was done."""
    rows = settings["rows"]
    return (
        f"""\
Tomorrow's maximum temperature at {settings["stations"]} Australian stations from today's records
(paper, Sec. 4.4). {settings["splits"]} random splits with {rows["train"]} training,
{rows["valid"]} validation and {rows["test"]} test rows, one net each. The net sees
{settings["inputs"]} continuous records, standardised on the training rows, and a learnt vector of
{settings["embedding"]} numbers for the station; {settings["layers"]} hidden layers of
{settings["width"]} with SiLU; AdamW, learning rate {settings["rate"]:g}, weight decay
{settings["decay"]:g}, batches of {settings["batch"]}, {settings["epochs"]} epochs, the weights of
the smallest validation loss.""",
        f"""\
The paper's own recipe, which turns each wind direction into two numbers, gives {settings["inputs"]}
continuous inputs and not the {settings["paper_inputs"]} that it names, which is the number of its
stations. Its "following day" is taken literally: the target is the maximum of the next calendar day
at the station, which is not always that of the next row. The paper does not say whether the target
was scaled. Its other large fits leave targets as they are, so the main nets here see degrees; a
second set of nets on the same splits sees targets of mean 0 and standard deviation 1.""",
        f"""\
Four calibrations see the validation rows alone. *Paper*: ridge and scale by bins of
{settings["calibration_bin_size"]} rows. *Likelihood*: the same two numbers by the Gaussian
likelihood. *Best*: the library's advice, a constant noise and the ridge of the greatest evidence of
the training rows, unless another form has a clearly better likelihood by
{settings["folds"]}-fold cross-validation within the validation rows (and a ridge that leaves the
data something to determine). *Best by bins*: by the same
cross-validation the smallest binned log ratio, which is what the paper's figure shows, among the
first two and the first with a constant noise. Since a constant bar does well in bins, only forms
count there that keep {100 * settings["kept"]:.0f} % of the paper's gain in likelihood over a
constant bar. Scores are taken in bins of {settings["bin_size"]} rows, as in the paper's figure.""",
        SHARED_ROWS,
    )


def closing(found: Found) -> tuple[str, ...]:
    """What came out, in sentences that follow the numbers."""
    return (
        " ".join(_binned(target, one) for target, one in found.items()),
        " ".join(_likelihood(target, one) for target, one in found.items()),
        """\
**Reading the log ratio.** It says how far bars are wrong on average over bins, not whether they
tell rows apart: read it beside the gain, the decades and the rank correlation. Where errors have
heavier tails than a Gaussian's, bins scatter more than the band shows even if the variances are
right. The *floor* is what these very bars would score if nothing were wrong with them: with errors
σ z, where z are the observed e / σ in a random order.""",
        _stations(found["raw"]["stations"]["paper"]),
    )


def _stations(stations: Found) -> str:
    """How far the stations' bars reach beside their errors."""
    errors, bars = (sorted(one[k][0] for one in stations.values()) for k in ("rmse", "bar"))
    return (
        f"**Stations.** Their root mean square errors go from {errors[0]:.2f} to {errors[-1]:.2f} "
        f"degrees, their bars from {bars[0]:.2f} to {bars[-1]:.2f} (paper's calibration, targets "
        "in degrees). A bar by rigidity says how well the training rows support a prediction; it "
        "does not know that the weather of one place is harder to foresee than that of another."
    )


def _binned(target: str, one: Found) -> str:
    ways, lead = one["calibrations"], one["leaders"]["binned_log_ratio"]
    best = lead["name"]
    ratio = {name: measured(way["scores"]["binned_log_ratio"]) for name, way in ways.items()}
    constant = measured(ways["paper"]["constant"]["scores"]["binned_log_ratio"])
    from_constant = one["from_constant"][best]["binned_log_ratio"]
    paper = "" if best == "paper" else f"is {ratio['paper']} with the paper's calibration; it "
    return (
        f"**Targets: {TARGETS[target]}.** The binned log ratio {paper}has the smallest mean with "
        f"*{LABELS[best]}*, {ratio[best]}; {_ties(lead)}. That mean {compared(from_constant)} the "
        f"constant bar's {constant} ({measured(from_constant)} split by split)."
    )


def _likelihood(target: str, one: Found) -> str:
    ways, lead = one["calibrations"], one["leaders"]["gain"]
    best = lead["name"]
    gain = {name: measured(way["scores"]["gain"]) for name, way in ways.items()}
    paper = "" if best == "paper" else f" (the paper's {gain['paper']})"
    return (
        f"With targets: {TARGETS[target]}, the gain in likelihood over a constant bar has the "
        f"largest mean with *{LABELS[best]}*, {gain[best]} a row{paper}; {_ties(lead)}."
    )


def _ties(lead: Found) -> str:
    """Which calibrations share the first place, and which clearly do not."""
    same, tied = lead["same"], lead["tied"]
    behind = [name for name in lead["others"] if name not in (*same, *tied)]
    clauses = []
    if same:
        clauses.append(
            f"{listed([f'*{LABELS[name]}*' for name in same])} has the same on every split"
        )
    if tied:
        verb = "does" if len(tied) == 1 else "do"
        clauses.append(f"{_apart(lead, tied)} {verb} not clearly differ from it")
    if behind:
        verb = "is" if len(behind) == 1 else "are"
        clauses.append(f"{_apart(lead, behind)} {verb} clearly behind")
    return "; ".join(clauses)


def _apart(lead: Found, names: list[str]) -> str:
    """Calibrations with their differences from the leader, split by split."""
    return listed([f"*{LABELS[name]}* ({measured(lead['others'][name])})" for name in names])
