"""What the page says around its tables and figures."""

from __future__ import annotations

from typing import Any

from experiments.weather.tables import LABELS, TARGETS

Found = dict[str, Any]

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
Where this differs from the paper: wind directions become two numbers each, which makes
{settings["inputs"]} continuous inputs (the paper says {settings["paper_inputs"]}, which is the
number of stations); the target is the maximum of the next calendar day, not of the next row.
The paper does not say whether the target was scaled. Its other large fits leave targets as they
are, so the main nets here see degrees; a second set of nets on the same splits sees targets of mean
0 and standard deviation 1.""",
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
    ways = one["calibrations"]
    ratios = {name: way["scores"]["binned_log_ratio"][0] for name, way in ways.items()}
    constant = ways["paper"]["constant"]["scores"]["binned_log_ratio"][0]
    best = min(ratios, key=ratios.__getitem__)
    beside = "below" if ratios[best] < constant else "not below"
    return (
        f"**Targets: {TARGETS[target]}.** The binned log ratio is {ratios['paper']:.3f} with the "
        f"paper's calibration; the smallest is {ratios[best]:.3f} ({LABELS[best]}), {beside} the "
        f"constant bar's {constant:.3f}."
    )


def _likelihood(target: str, one: Found) -> str:
    ways = one["calibrations"]
    gains = {name: way["scores"]["gain"][0] for name, way in ways.items()}
    best = max(gains, key=gains.__getitem__)
    return (
        f"With targets: {TARGETS[target]}, the likelihood gains most over a constant bar by the "
        f"calibration *{LABELS[best]}* ({gains[best]:.3f} a row; the paper's {gains['paper']:.3f})."
    )
