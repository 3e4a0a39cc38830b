"""What the page says around its tables and its figure."""

from __future__ import annotations

from experiments.studies.active.rounds import Protocol


def opening(protocol: Protocol) -> list[str]:
    """What was done."""
    how = protocol.training
    return [
        f"""\
Which rows of a pool should be labelled next? A net is trained on {protocol.start} random rows of
`{protocol.name}`; then, {protocol.rounds} times, {protocol.batch} more rows of a pool of
{protocol.pool} are labelled and a new net is trained from scratch. The rows are chosen at random,
by the largest variance q = fᵀ(G + ς²I)⁻¹f, or greedily, each pick in the light of those before it
in the same batch: for the information about the last layer's weights (*logdet*) or for the
smallest total variance over the pool (*variance*). No label is used to choose. The score is the
RMSE on {protocol.test} other rows, in the target's unit.""",
        f"""\
**Nets and error bars.** Hidden layers of {" and ".join(map(str, how.hidden))} with SiLU,
{how.steps} steps of AdamW on batches of {how.batch}, learning rate {how.rate:g} on a cosine
schedule, weight decay {how.decay:g}; inputs standardised by the pool, the target by the first
labels. Features are the last hidden layer and a constant; the ridge ς² is {protocol.ridge:g} of the
Gram's mean diagonal, never calibrated, since no label can be spared. All nets of a round train at
once, as batched matrix products.""",
        """\
**Pairs.** In a repetition all choices share test rows, pool, first rows and, in each round, first
weights and order of batches. Differences are taken within repetitions; ± is their standard error.
The activation, weight decay, ridge and number of steps were settled on up to six repetitions with
other seeds (1000 to 1005). Four sets were tried there: `kin8nm`; `naval`, which is shown because
choosing hurts on it; `protein` and `power` (the latter with half the rows), where, averaged over
the rounds, no greedy choice differed from random choice by two standard errors. The gain depends on
the net, too: with ReLU and a weight decay of 0.5 the total variance was no better than random
choice on `kin8nm`, and the information a little worse.""",
    ]


CAPTION = (
    "Test RMSE against the number of labelled rows (left), and its paired difference to random "
    "choice (right; below zero is better). Bars are standard errors over the repetitions."
)

CURVES = "`{name}`: test RMSE in thousandths, mean ± standard error over {seeds} repetitions."

DIFFERENCES = (
    "`{name}`: paired differences of RMSE in thousandths, after the last round and averaged over "
    "all rounds (negative is better); in how many repetitions that average beats random choice; "
    "and how many labels bring the mean curve to where random choice ends."
)

QUICK = "These are quick settings, which show that it runs and nothing else."

CLOSING = (
    """\
**What to expect.** On `kin8nm`, a smooth function with little noise, the greedy batch for the total
variance comes to where random choice ends with about a quarter fewer labels. The largest variances
taken one by one are *worse* than random choice. The greedy batch for the information is better than
they are, and a little better than random choice. A likely reason, not measured here: the largest
variances are neighbours far out, the information asks about rows that are far out but apart, and
the total variance about rows that stand for many.""",
    """\
**Where it does not help.** On `naval` more labels do not lower the error of random choice, so there
is nothing to gain, and every choice by variance loses; the total variance loses least. The error
bar sees what the last layer's features leave undetermined and takes these features as given; a
choice also makes the training rows unlike the test rows. Compare with random rows before a long
campaign.""",
)
