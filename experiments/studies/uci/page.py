"""The page: tables, figures, and texts that follow the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from experiments.baselines import deep_ensemble, laplace, mc_dropout
from experiments.data import uci
from experiments.frame.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table, with_error
from experiments.judging import error_bars
from experiments.judging.scores import SCORES
from experiments.studies.uci.entries import (
    AGAINST_LLPR,
    BASELINES,
    BEST_AGAINST,
    METHODS,
    METRICS,
    RIGIDITIES,
)
from experiments.training.protocol import Protocol

LABELS = {
    "llpr": "LLPR",
    "best": "best",
    "constant": "constant",
    "laplace": "Laplace",
    "mc_dropout": "MC dropout",
    "deep_ensemble": "ensemble",
    "deep_ensemble_400": "ensemble, 400 epochs",
    "llpr_random": "LLPR, random splits",
    "pbp": "PBP",
}
COMPARABLE = (*RIGIDITIES, *BASELINES)
"""Judged on the same rows."""

SMALL = 2.0
"""Combined standard errors that count as agreement."""


def entries(found: Found) -> list[Entry]:
    """The page."""
    trained = [pair for pair in AGAINST_LLPR if pair[0] in BASELINES]
    epochs = next(iter(found.values()))["settings"]["epochs"]
    return [
        *opening(found, epochs),
        score_table(found, "nll"),
        score_table(found, "rmse"),
        Picture("nll", likelihoods(found), NLL_CAPTION),
        Picture("rmse", errors(found), RMSE_CAPTION),
        compared(found),
        difference_table(found, "nll", AGAINST_LLPR),
        difference_table(found, "nll", BEST_AGAINST),
        difference_table(found, "rmse", trained),
        reproduced(found),
        reproduction_table(found),
        seconds_table(found),
        CLOSING,
    ]


def score_table(found: Found, metric: str) -> Table:
    """One metric of all methods, then the paper's columns."""
    methods = present(found)
    quoted = list(next(iter(found.values()))["published"])
    rows: list[list[Cell]] = []
    for name, one in found.items():
        digits = decimals(one["llpr"][metric])
        ours = [one[method][metric] if method in one else None for method in methods]
        lowest = min(one[method][metric][0] for method in COMPARABLE if method in one)
        cells = [
            _cell(value, digits, method in COMPARABLE and value is not None and value[0] == lowest)
            for method, value in zip(methods, ours, strict=True)
        ]
        theirs = [_cell(one["published"][method][metric], 2) for method in quoted]
        rows.append([name, one["splits"], *cells, *theirs])
    columns = ["set", "splits", *(LABELS[method] for method in methods)]
    columns += [f"paper: {LABELS[method]}" for method in quoted]
    caption = (
        f"Test {SCORES[metric].head}, mean over the splits and its standard error; the lowest mean "
        "of our columns on the official splits is bold. Columns headed *paper* are quoted from it, "
        "with its errors."
    )
    return Table(columns, rows, caption)


def difference_table(found: Found, metric: str, pairs: Sequence[tuple[str, str]]) -> Table:
    """Differences between methods, split by split."""
    names = [f"{one} - {other}" for one, other in pairs]
    shown = [name for name in names if any(name in one["paired"] for one in found.values())]
    rows: list[list[Cell]] = []
    for name, one in found.items():
        digits = decimals(one["llpr"][metric])
        values = [one["paired"].get(pair, {}).get(metric) for pair in shown]
        rows.append([name, *(_cell(value, digits, lower(value)) for value in values)])
    columns = ["set", *(" - ".join(LABELS[part] for part in pair.split(" - ")) for pair in shown)]
    caption = (
        f"Differences of the test {SCORES[metric].head}, split by split: mean and standard error. "
        "Negative means that the first is better; bold where it is so by more than two standard "
        "errors."
    )
    return Table(columns, rows, caption)


def reproduction_table(found: Found) -> Table:
    """Ours against the paper's own column."""
    rows: list[list[Cell]] = []
    for name, one in found.items():
        for metric in METRICS:
            digits = decimals(one["llpr"][metric])
            cells = [name, SCORES[metric].head, _cell(one["published"]["llpr"][metric], 2)]
            for method in ("llpr", "llpr_random"):
                against = one["reproduction"][method][metric]
                cells += [_cell(one[method][metric], digits), *_sigmas(against)]
            rows.append(cells)
    columns = ["set", "", "paper", "official splits", "sigmas", "strict"]
    columns += ["random splits", "sigmas", "strict"]
    caption = (
        "Our LLPR against the paper's: *sigmas* is the difference over the combined standard error "
        "(ours, the printed one, the rounding of two printed decimals); *strict* corrects the "
        "printed error, whose script divided by the root of 5 where 20 splits are stated."
    )
    return Table(columns, rows, caption)


def seconds_table(found: Found) -> Table:
    """How long the parts took."""
    methods = sorted({part for one in found.values() for part in one["seconds"]})
    rows = [
        [name, one["rows"], *(one["seconds"].get(part) for part in methods)]
        for name, one in found.items()
    ]
    caption = (
        "Seconds on one core, or on the GPU where the run used one. *Official* and *random* are "
        "the nets of the rigidities with all their error bars, on one drawing of splits each."
    )
    return Table(["set", "rows", *(LABELS.get(part, part) for part in methods)], rows, caption)


def present(found: Found) -> list[str]:
    """Methods that were measured."""
    return [method for method in METHODS if any(method in one for one in found.values())]


def within(found: Found, method: str, key: str = "sigmas") -> tuple[int, int]:
    """How many of the paper's numbers ours agree with, and of how many that can be compared."""
    values = [
        one["reproduction"][method][metric][key] for one in found.values() for metric in METRICS
    ]
    comparable = [value for value in values if not math.isnan(value)]
    return sum(abs(value) <= SMALL for value in comparable), len(comparable)


def beyond(found: Found, method: str, key: str = "sigmas") -> Iterable[tuple[str, str, float]]:
    """The others: set, metric, sigmas."""
    for name, one in found.items():
        for metric in METRICS:
            value = one["reproduction"][method][metric][key]
            if abs(value) > SMALL:
                yield name, metric, value


def decimals(value: Sequence[float]) -> int:
    """So many that the standard error shows two digits, or the mean three; two at least.

    >>> decimals([5.2, 0.11]), decimals([0.0004, 0.00001]), decimals([0.5, float("nan")])
    (2, 6, 3)
    """
    mean, error = value
    size = abs(mean) / 10 if math.isnan(error) or error == 0 else error
    return max(2, 1 - math.floor(math.log10(size))) if size else 2


def lower(value: Sequence[float] | None) -> bool:
    """Whether a difference is below zero by more than two standard errors."""
    return value is not None and value[0] < -SMALL * value[1]


def _sigmas(against: Mapping[str, float]) -> list[str | None]:
    values = (against["sigmas"], against["strict"])
    return [None if math.isnan(value) else f"{value:.1f}" for value in values]


def _cell(value: Sequence[float | None] | None, digits: int, bold: bool = False) -> str | None:
    if value is None:
        return None
    mean, error = value
    text = with_error(mean, math.nan if error is None else error, digits)
    return f"**{text}**" if bold else text


COLOURS = {
    "best": BLUE,
    "constant": GREY,
    "laplace": GREEN,
    "mc_dropout": ORANGE,
    "deep_ensemble": VERMILION,
    "deep_ensemble_400": PURPLE,
}
TICKS = (0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)
LINEAR = 0.1
"""Differences up to this are drawn to scale, larger ones logarithmically."""


def likelihoods(found: Found) -> Figure:
    """Paired differences of the NLL."""
    figure, (ax,) = panels(height=3.8)
    values = {
        method: [one["paired"].get(f"{method} - llpr", {}).get("nll") for one in found.values()]
        for method in COLOURS
    }
    _dodged(ax, values, list(found))
    ax.axhline(0, color="black", lw=0.8)
    ax.set_yscale("symlog", linthresh=LINEAR, linscale=1.5)
    low, high = ax.get_ylim()
    ax.set_ylim(1.4 * low, 1.4 * high)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel("NLL - NLL of LLPR")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def errors(found: Found) -> Figure:
    """Ratios of the RMSE."""
    figure, (ax,) = panels(height=3.2)
    values = {
        method: [one["ratio"].get(f"{method} / llpr") for one in found.values()]
        for method in COLOURS
    }
    _dodged(ax, values, list(found))
    ax.axhline(1, color="black", lw=0.8)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.set_yticks([tick for tick in TICKS if low <= tick <= high])
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel("RMSE / RMSE of LLPR")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def _dodged(ax: Axes, values: dict[str, list[list[float] | None]], names: list[str]) -> None:
    """Points with two standard errors, the methods of a set beside each other."""
    shown = {method: row for method, row in values.items() if any(row)}
    for place, (method, row) in enumerate(shown.items()):
        offset = 0.7 * ((place + 0.5) / len(shown) - 0.5)
        at = [(k + offset, *value) for k, value in enumerate(row) if value]
        spread = [0 if math.isnan(error) else 2 * error for _, _, error in at]
        ax.errorbar(
            [x for x, _, _ in at],
            [mean for _, mean, _ in at],
            spread,
            fmt="o",
            ms=4,
            lw=1.2,
            color=COLOURS[method],
            label=LABELS[method],
        )
    for border in range(1, len(names)):
        ax.axvline(border - 0.5, color="0.9", lw=0.8, zorder=0)
    ax.set_xticks(range(len(names)), names)
    ax.set_xlim(-0.5, len(names) - 0.5)


NLL_CAPTION = (
    "NLL of every method less that of LLPR on the same test rows: mean over the splits and two "
    "standard errors of the paired differences. Below zero is better than LLPR. The axis is linear "
    "up to 0.1 and logarithmic beyond."
)
RMSE_CAPTION = (
    "RMSE of the methods that train nets of their own over that of LLPR's nets, split by split: "
    "mean and two standard errors. Below one is better. `best`, `constant` and Laplace keep LLPR's "
    "nets and have its RMSE."
)
WORDS = {
    error_bars.PAPER: "the paper's calibration",
    error_bars.SAFE: "a noise floor with the ridge of the training rows' greatest evidence",
    error_bars.Calibration(noise="constant"): "a noise floor with ridge and scale by likelihood",
}
"""Of the calibrations that `best` chooses from."""

NAVAL = """\
On naval the paper's inputs may have held a column that they should not: the published file has 18
columns, of which 16 are inputs and two are targets, and taking all but the last as inputs gives one
target away. Here the 16 inputs alone are used; a difference there need not be an error of ours."""

CLOSING = """\
Read the differences rather than the columns. The splits of a set differ by far more than the
methods do, and the NLL of the smallest sets moves by a tenth with the seed of the training alone.
A run with another `--seed` has other nets and other random splits; the official ones stay."""


def opening(found: Found, epochs: int) -> tuple[str, ...]:
    """What was done."""
    with_laplace = "laplace" in present(found)
    return (
        _nets(found, epochs),
        _error_bars(with_laplace),
        _baselines(found, epochs),
        _deviations(found),
    )


def compared(found: Found) -> str:
    """What the paired differences say, counted."""
    lines = [
        "The following tables pair the methods split by split. More than two standard errors apart "
        f"in the NLL, over {len(found)} sets:",
        "",
    ]
    for first, other in (*AGAINST_LLPR, *BEST_AGAINST):
        values = [
            one["paired"][pair]["nll"]
            for one in found.values()
            if (pair := f"{first} - {other}") in one["paired"]
        ]
        if values:
            better = sum(map(lower, values))
            worse = sum(lower([-mean, error]) for mean, error in values)
            lines.append(
                f"- {LABELS[first]} against {LABELS[other]}: better on {better}, worse on {worse}, "
                f"undecided on {len(values) - better - worse}"
            )
    return "\n".join(lines)


def reproduced(found: Found) -> str:
    """How far the paper's row comes out again."""
    sentences = []
    for method, splits in (("llpr", "the official splits"), ("llpr_random", "random splits")):
        agreeing, comparable = within(found, method)
        strictly, _ = within(found, method, "strict")
        sentences.append(
            f"On {splits}, {agreeing} of the paper's {comparable} comparable numbers come out "
            f"within two combined standard errors, {strictly} if its errors are corrected for the "
            f"number of splits{_outside(found, method)}."
        )
    return " ".join([*sentences, *([NAVAL] if "naval" in found else [])])


def _outside(found: Found, method: str) -> str:
    others = [
        f"{name} {SCORES[metric].head} by {value:+.1f}"
        for name, metric, value in beyond(found, method)
    ]
    return f"; outside: {', '.join(others)}" if others else ""


def _nets(found: Found, epochs: int) -> str:
    protocol = Protocol()
    return f"""\
The regression sets of Hernández-Lobato and Adams, as in the paper's table. Nets have one hidden
layer of 50 ReLU units (100 for protein and year). For the rigidities they are trained by Adam at
the rate {protocol.rate:g} in batches of {protocol.batch} for {epochs} epochs on the mean squared
error; the rate falls tenfold after {protocol.patience} epochs without a better validation loss, and
the weights of the best one are kept. Inputs and targets are standardised on the training rows; RMSE
and NLL are in the target's unit. All methods are judged on the same rows, {_lists(found)}, so that
differences can be paired. The rigidities' nets learn from eight ninths of
each training list and are stopped and calibrated on the last ninth; the others learn from
the whole list. *LLPR, random splits* is the paper's own drawing: random 80/10/10 splits."""


def _lists(found: Found) -> str:
    """Whose test rows they are."""
    drawn = [name for name, one in found.items() if not one["settings"]["published_lists"]]
    if not drawn:
        return "the test lists of the published splits"
    which = "those of" if len(drawn) < len(found) else "here of all sets:"
    return (
        f"the test lists of the published splits where they are known; {which} {', '.join(drawn)} "
        "came without them and are split at random, so that nothing said of official splits holds "
        "there"
    )


def _error_bars(with_laplace: bool) -> str:
    rival = (
        "*Laplace* is laplace-torch's last layer with a full Hessian, prior precision and noise by "
        f"{laplace.STEPS} steps on the marginal likelihood of the training rows; its predictive "
        "variance includes the noise."
        if with_laplace
        else "laplace-torch was not there, so its column is left out; it comes with "
        f"`{laplace.REMEDY}`."
    )
    first, *rest = error_bars.CANDIDATES
    others = " or ".join(WORDS[candidate] for candidate in rest)
    return f"""\
On these nets: *LLPR* is the paper's, ridge and scale by the likelihood of the validation rows, no
noise. *Best* is {WORDS[first]}, unless {others} is better by more than {error_bars.CLEARLY:g}
standard errors in {error_bars.FOLDS}-fold cross-validation within the validation rows, with a ridge
that leaves the data something to determine. *Constant*
is one error bar for all rows: the root mean square of the validation residuals.
{rival}"""


def _baselines(found: Found, epochs: int) -> str:
    steps = {name: one["settings"]["mc_dropout"]["steps"] for name, one in found.items()}
    fewest = min(steps, key=steps.__getitem__)
    own, members = deep_ensemble.OWN, deep_ensemble.MEMBERS
    probabilities = ", ".join(f"{p:g}" for p in mc_dropout.PROBABILITIES)
    return f"""\
With nets of their own: *MC dropout* by its authors' protocol, dropout on inputs and hidden units,
the probability ({probabilities}) and the precision chosen on the last fifth of each training list,
then {epochs} epochs on the whole. Where rows are few these are few steps ({steps[fewest]} for
{fewest}), and longer training would serve it better. *Ensemble* has {members} nets with a mean and
a variance each, trained on the likelihood of rows and adversarial rows: for {own.epochs} epochs in
batches of {own.batch} as by its authors, at the rate {own.rate:g} (at the
{deep_ensemble.NAMED_RATE:g} that they name, our nets stayed far from their published figures; the
rate was chosen in the ensembles' favour, by the test rows of four sets), and for {epochs} epochs
in batches of {deep_ensemble.LONG.batch} at the rate {deep_ensemble.LONG.rate:g}."""


def _deviations(found: Found) -> str:
    absent = uci.missing("year") is not None
    sentences = [
        "Standard errors divide by the root of the number of splits; the paper's script divides by "
        "the root of 5 whatever their number, so that its printed errors for 20 splits are twice "
        "too large.",
        *([_copies(found)] if any(one["copies"]["test"] for one in found.values()) else []),
        *(["The set *year* is left out: its file is not here."] if absent else []),
    ]
    return " ".join(sentences)


def _copies(found: Found) -> str:
    shares = [
        f"{name} {100 * one['copies']['test']:.1f} % of the test rows and "
        f"{100 * one['copies']['valid']:.1f} % of the validation rows"
        for name, one in found.items()
        if one["copies"]["test"]
    ]
    return (
        "Some sets hold copies of rows, so that what a net is judged and calibrated on was partly "
        f"trained on: {'; '.join(shares)} equal a training row of the rigidities' nets. Methods "
        "that learn from the whole list have seen at least as many of the test rows."
    )
