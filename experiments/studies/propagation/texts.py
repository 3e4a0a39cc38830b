"""What the page says around its tables and its figure."""

from __future__ import annotations

from experiments.studies.propagation.errors import DIFFERENCE
from experiments.studies.propagation.nets import PROTOCOL
from experiments.studies.propagation.samples import Sizes
from experiments.studies.propagation.tables import Found

CAPTION = (
    "Error of the mean of n predictions: predicted standard deviations (root mean square over all "
    "groups and nets) beside the actual root mean square error. Correlations ignored: the sum "
    "of the variances α² (1 + q) divided by n²."
)


def opening(sizes: Sizes, epochs: int) -> tuple[str, ...]:
    """What was done."""
    return (
        f"""\
`uq.propagate(torch.mean, x)` gives a mean of many predictions an error bar that knows their
correlations. Is it right? For each set {sizes.nets} nets were trained, each on {sizes.train} rows
of its own random split, calibrated on {sizes.valid} others and judged on {sizes.test} more. The
training rows are few beside the whole set, so that the nets are nearly independent repetitions of
the same experiment. The nets have one hidden layer of {PROTOCOL.hidden[0]} with ReLU; AdamW,
learning rate {PROTOCOL.rate:g} with a cosine schedule, weight decay {PROTOCOL.decay:g}, batches of
{PROTOCOL.batch}, {epochs} epochs, inputs and targets standardised. All nets of a set train at
once, with stacked weights.""",
        """\
Four calibrations are compared. `noise="none"` is the paper's: ridge and scale by the likelihood of
single predictions. `noise="constant"` adds a noise floor, chosen by the same likelihood. The third
takes the ridge of the greatest evidence of the training data instead. `noise="bayes"` is Bayesian
linear regression on the last layer's features: that ridge, and the noise equal to α², so that the
variance is α² (1 + q). Errors are in the target's unit. The last two were added after earlier runs
with other random numbers had shown the first two to fail.""",
    )


def closing(found: Found, size: str) -> tuple[str, ...]:
    """What came out, with the numbers of this run."""
    return (
        f"""\
**Without a noise floor the mean looks far too uncertain.** The likelihood of single predictions
sets α² so that α²q covers all of the residual, noise included. The noise of {size} observations
averages out, α²q hardly does: the predicted error of the mean is {_ratios(found, "none", size)}
times the actual one.""",
        f"""\
**A floor alone is no sure cure.** With `noise="constant"` the factor is
{_ratios(found, "constant", size)}. The likelihood looks at one prediction at a time and cannot see
how the variance is shared between the floor and α²q: with a large ridge q is almost the same
everywhere, and an almost constant α²q, which is fully correlated, fits single predictions about as
well as a constant floor, which is not correlated at all. Where the ridge came out large, means look
too uncertain and differences of neighbours too certain: predicted over actual is
{_ratios(found, "none", DIFFERENCE)} without a floor, {_ratios(found, "constant", DIFFERENCE)} with
one.""",
        f"""\
**The evidence of the training data tells them apart.** With its ridge and a floor, the factor is
{_ratios(found, "evidence", size)} for means and {_ratios(found, "evidence", DIFFERENCE)} for
differences. The scale is still set by single predictions, which determine it badly: a misfit that
changes from row to row raises it, though it averages out in a mean, and where the floor explains
everything it is near zero (on power for half of the nets, whose intervals hold too little). With
`noise="bayes"`, which leaves no such choice, the factor is {_ratios(found, "bayes", size)} for
means and {_ratios(found, "bayes", DIFFERENCE)} for differences.""",
        """\
**What to do.** Before propagating to means, sums or differences, call
`calibrate(valid, criterion="evidence", noise="bayes")`. With a floor of its own instead, compare
`uq.scale` squared with `uq.noise.level`: in linear regression they are equal; where the square is
many times larger, as on kin8nm here, a mean's error bar is too wide.""",
        f"""\
**Ignoring the correlations** (sum of the variances / n²) looks right up to tens of predictions,
because the noise dominates there whatever it is called, and falls short for {size}: predicted over
actual is {_ratios(found, "bayes", size, "independent")} with `noise="bayes"`, since the common
error of a net does not average out.""",
        f"""\
**What a last layer cannot know.** Retrained nets differ in all their weights. The second table
separates that from the noise: it is the spread of one and the same mean over the nets. The
posterior of the last layer with `noise="bayes"` predicts {_commons(found, "bayes")} of it. With
this many nets such a ratio is known to a few per cent (6 % with 120), so that little is left to the
trunk here; it would be missing below one.""",
    )


def _ratios(found: Found, way: str, quantity: str, rule: str = "joint") -> str:
    """Predicted over actual, of all sets in their order."""
    return _listed({name: one[way][rule]["ratio"][quantity] for name, one in found.items()})


def _commons(found: Found, way: str) -> str:
    return _listed({name: one[way]["ratio_of_common"] for name, one in found.items()})


def _listed(ratios: dict[str, float]) -> str:
    parts = [f"{ratio:.2f} ({name})" for name, ratio in ratios.items()]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
