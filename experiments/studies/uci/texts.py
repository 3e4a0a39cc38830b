"""What the page says around its tables and figures."""

from __future__ import annotations

from experiments.baselines import deep_ensemble, laplace, mc_dropout
from experiments.data import uci
from experiments.judging import error_bars
from experiments.studies.uci import tables
from experiments.studies.uci.entries import AGAINST_LLPR, BEST_AGAINST
from experiments.studies.uci.tables import LABELS, Found
from experiments.training.protocol import Protocol

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
    with_laplace = "laplace" in tables.present(found)
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
            better = sum(map(tables.lower, values))
            worse = sum(tables.lower([-mean, error]) for mean, error in values)
            lines.append(
                f"- {LABELS[first]} against {LABELS[other]}: better on {better}, worse on {worse}, "
                f"undecided on {len(values) - better - worse}"
            )
    return "\n".join(lines)


def reproduced(found: Found) -> str:
    """How far the paper's row comes out again."""
    sentences = []
    for method, splits in (("llpr", "the official splits"), ("llpr_random", "random splits")):
        agreeing, comparable = tables.within(found, method)
        strictly, _ = tables.within(found, method, "strict")
        sentences.append(
            f"On {splits}, {agreeing} of the paper's {comparable} comparable numbers come out "
            f"within two combined standard errors, {strictly} if its errors are corrected for the "
            f"number of splits{_outside(found, method)}."
        )
    return " ".join([*sentences, *([NAVAL] if "naval" in found else [])])


def _outside(found: Found, method: str) -> str:
    others = [
        f"{name} {tables.NAMES[metric]} by {value:+.1f}"
        for name, metric, value in tables.beyond(found, method)
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
