"""What the page says around its tables and its figure."""

from __future__ import annotations

from typing import Any

from experiments.outcome import with_error
from experiments.quartiles import with_quartiles
from experiments.regularizer.summary import name_of
from experiments.regularizer.tables import LABELS
from experiments.regularizer.work import STOPPING

Found = dict[str, Any]

CLOSE_TO_ZERO = -6
"""log10 of a relative ridge below which it hardly changes any bar."""

RIDGES = (
    "The chosen ridge, relative to the largest eigenvalue of the Gram (dashed at one): every net "
    "is a dot, the bar spans the quartiles, the tick is the median. The search ends at -10 and 4."
)
RIDGE_TABLE = (
    "log10 of the chosen ridge relative to the largest eigenvalue of the Gram, median and "
    "quartiles over the nets; the absolute one for the likelihood; and the norm of all weights of "
    "the net."
)
EFFECT_TABLE = (
    "Effects net by net, mean and standard error: the change of log10 (ridge / largest eigenvalue) "
    "by calibration, then of log10 ridge and of the test NLL by the likelihood without noise. "
    "*Decay*: against none. *Last epoch*: against the best validation weights. *Two copies*: "
    "against one."
)


def opening(found: Found) -> tuple[str, ...]:
    """What was done."""
    s = found["settings"]
    rows = s["rows"]
    decays = ", ".join(f"{decay:g}" for decay in s["decays"])
    return (
        f"""\
The paper's ς² is added to the Gram for numerical stability and to stand for the regularisation of
the training; it reports values close to zero without weight decay and relatively large ones with
it, and no consistent effect of early stopping. Here that is tried factor by factor on California
housing, {s["count"]} random splits into 20 % for training ({rows["train"]} rows), 20 % for
validation ({rows["valid"]}) and 60 % for the test ({rows["test"]}); two hidden layers of
{s["hidden"]} with SiLU (the paper does not say which net it used), AdamW with learning rate 0.001
(cut by ten after 100 epochs without a better validation loss), batches of 32, {s["epochs"]} epochs,
inputs standardised with the whole set's mean and spread, targets as they are.""",
        f"""\
The factors: weight decay ({decays}); weights of the best validation loss or of the last epoch of
the same training; each training row once or twice, in the training and in the Gram (with half the
epochs, so that the number of steps is the same). Each net is calibrated on its validation rows by
the likelihood and by the paper's bins, each without noise, which is the paper's form, and with a
constant noise floor. That is the control: a large ridge makes q almost the same for all
rows, which is what a noise floor does. If the ridge stood for the training's regularisation, a
floor would not change it.""",
    )


def nll_caption(found: Found) -> str:
    """Of the first table of scores."""
    return (
        f"On the test rows, mean and standard error over {found['settings']['count']} nets: RMSE, "
        "then the NLL by calibration; and the standard deviation of the noise floor, median and "
        "quartiles."
    )


def ratio_caption(found: Found) -> str:
    """Of the second table of scores."""
    s = found["settings"]
    return (
        f"The same nets and rows: log ratio, the mean over bins of {s['bin_size']} rows of "
        "|log10(MSE / variance)|, by calibration."
    )


def bias_caption(found: Found) -> str:
    """Of the table of the bias."""
    beyond = found["settings"]["ruined_beyond"]
    return (
        "Features without the column of ones that the bias of the last layer contributes, minus "
        "with it; both calibrated by the likelihood without noise. NLL: median and quartiles over "
        f"the nets, and how many rise by more than {beyond:g} (*ruined*). "
        "Then mean and standard error: log ratio, rank correlation of bar and absolute error, and "
        "the bars themselves: mean of |log10| of the ratio of the two, and their rank correlation."
    )


def closing(found: Found) -> tuple[str, ...]:
    """What came out, in words that the numbers choose."""
    return (_decay(found), _edge(found), _floor(found), _others(found), _bias(found))


def _decay(found: Found) -> str:
    decays = found["settings"]["decays"]
    clauses = []
    for stopping, weights in zip(STOPPING, ("best", "last"), strict=True):
        none = found["conditions"][name_of(decays[0], 1, stopping)]["nll"]["log_relative_ridge"]
        effects = [
            f"{_change(found['effects'][f'decay {d:g}, {stopping}']['nll']['log_relative_ridge'])} "
            f"with decay {d:g}"
            for d in decays[1:]
        ]
        clauses.append(
            f"With the {weights} weights, its median is {none[0]:.2f} without decay; "
            f"against that it {' and '.join(effects)}."
        )
    medians = [
        found["conditions"][name_of(decays[0], 1, stopping)]["nll"]["log_relative_ridge"][0]
        for stopping in STOPPING
    ]
    near = "is close to zero" if max(medians) < CLOSE_TO_ZERO else "is not close to zero"
    return f"""\
**Weight decay.** Take log10 of the ridge by the likelihood, relative to the largest eigenvalue.
{" ".join(clauses)} Without decay the ridge {near}."""


def _edge(found: Found) -> str:
    """Where the ridge is as large as the search allows."""
    nets = len(found["conditions"]) * found["settings"]["count"]
    counts = {name: found["at_upper_edge"][name] for name in ("nll", "bins")}
    return f"""\
**As large as may be.** Of all {nets} nets, {counts["nll"]} by the likelihood and
{counts["bins"]} by the bins (both without noise) have the largest ridge of the search. There
ς² outweighs the Gram and the variance is α² |f|² / ς²: such bars follow the length of the
feature vector and know nothing of the training data."""


def _floor(found: Found) -> str:
    pooled = {
        criterion: [one[criterion]["log_relative_ridge"][0] for one in found["floor"].values()]
        for criterion in ("nll", "bins")
    }
    below = {name: sum(value < 0 for value in values) for name, values in pooled.items()}
    count = len(found["floor"])
    base = name_of(found["settings"]["decays"][0], 1, STOPPING[0])
    one = found["floor"][base]
    return f"""\
**The control.** A noise floor lowers the ridge, on average over the nets, in {below["nll"]} of
{count} trainings by the likelihood and in {below["bins"]} of {count} by the bins. Without decay
and with the best weights its log10 {_change(one["nll"]["log_relative_ridge"])} by the likelihood
and {_change(one["bins"]["log_relative_ridge"])} by the bins; the test NLL
{_change(one["nll"]["nll"], 3)} and {_change(one["bins"]["nll"], 3)}. As far as the floor lowers it,
the ridge had stood for noise that the paper's form has no term for, not for the training."""


def _others(found: Found) -> str:
    effects = found["effects"]
    decays = found["settings"]["decays"]
    last = [
        f"{_change(effects[f'last epoch, decay {d:g}']['nll']['log_relative_ridge'])} (decay {d:g})"
        for d in decays
    ]
    copies = effects[f"two copies, decay {decays[0]:g}"]["nll"]
    return f"""\
**Early stopping and copies.** The best weights were those of epoch {found["epochs"]["median"]:g}
in the median of all trainings ({found["epochs"]["smallest"]} to {found["epochs"]["largest"]}).
Going on to the last epoch, log10 of the relative ridge by the likelihood {_listed(last)}.
Two copies of every row double the Gram of the same net: the relative ridge should stay and the
absolute one double ({found["settings"]["log_two"]:.2f} in log10). The nets are trained anew here:
relative {_change(copies["log_relative_ridge"])}, absolute {_change(copies["log_ridge"])}."""


def _bias(found: Found) -> str:
    base = found["conditions"][name_of(found["settings"]["decays"][0], 1, STOPPING[0])]["bias"]
    ruined = found["ruined_without_bias"]
    return f"""\
**The bias.** Leaving the column of ones out of the features changes the bars by
{with_error(*base["log_ratio_of_bars"], 3)} in |log10| without decay, their rank correlation with
the others is {with_error(*base["rank_correlation_of_bars"], 3)}, and the test NLL changes by
{with_quartiles(base["median"]["nll"], 3)}, median and quartiles. All numbers are for
{LABELS["nll"]} without noise. Means would mislead: the column of ones keeps the features, and with
them the bar, away from zero; without it a single test row can have next to no bar and decide the
mean. The NLL rises by more than {found["settings"]["ruined_beyond"]:g} in {ruined["nets"]} of
{ruined["of"]} nets; the largest rise is {ruined["largest"]:.3g}."""


def _change(values: list[float], digits: int = 2) -> str:
    """A change in words, one beyond two standard errors."""
    mean, error = values
    text = with_error(mean, error, digits)
    if not abs(mean) > 2 * error:
        return f"does not clearly change ({text})"
    return f"rises ({text})" if mean > 0 else f"falls ({text})"


def _listed(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
