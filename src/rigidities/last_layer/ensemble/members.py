r"""Sets of weight deviations that stand for the posterior of a readout.

A member $n$ has the weights $w + \delta_n$. Deviations are made in the standard coordinates
$\xi$ of `JointPosterior`, where the posterior is $N(0, I)$ in C dimensions:

| set | points | exact, for outputs linear in the weights |
| --- | --- | --- |
| independent | $\xi_n \sim N(0, I)$ | nothing; mean and covariance are unbiased |
| recentred | $\xi_n - \bar\xi$ | the mean; the covariance (over n - 1) is unbiased |
| antithetic | $\pm\xi_p$ | the mean; the covariance (over n) is unbiased |
| symmetric | $\pm\sqrt{r}\, e_j$ on r of C axes | the mean; the covariance (over n) if $r = C$ |

A symmetric set has $2r$ members. At $r = C$ its covariance is the posterior's. Below, it is the
posterior's along r axes and zero along the others: a lower bound. The axes are the eigenvectors
$v_j$ of a Gram times the principal directions p of the scaled correlation between the targets
that share it, of size $S_p$. To the variances of the training predictions, summed over the rows
that the Gram holds, each adds

$$ S_p^2 \sum_i \frac{(v_j \cdot f_i)^2}{\lambda_j + s} = S_p^2 \frac{\lambda_j}{\lambda_j + s} $$

and the r largest are kept. (Targets behind one weight vector count in units of their own scale.)
What the others would have added is the share that is `missing`. Axes that the data determine well
add alike, so that a share of about $1 - r / C$ is missing at a small ridge; and what lies far from
the training data may need an axis that adds nothing there.

Where rows have a part of their own (see `joint`), member n moves at row x by $B S_x z_n(x)$ more.
Here $z_n(x) \sim N(0, I)$ hangs on the set, n and a hash of the row alone, the same in every call,
batch and order; to autograd it is a constant. Its covariance is unbiased and its mean as exact as
that of the set; a symmetric set has signs in pairs for it, right on average, not exact.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from ...data.sketch import hashed_normals, row_hashes
from ...notices import notify
from ...posterior.draws import MEMBERS, standard_normal
from ...posterior.joint import JointPosterior, OwnPart

Drawing = Literal["independent", "recentred", "antithetic", "symmetric"]
DRAWINGS: tuple[str, ...] = get_args(Drawing)
PAIRED = ("antithetic", "symmetric")
TOLERATED = 1e-6
"""Share of the variance that a symmetric set leaves out without a word."""
TOO_LOW = (
    "A symmetric set of rank {0} of {1} leaves out {2:.2g} % of the variance of the training "
    "predictions: its spread is a lower bound. Raise rank to {1} for the exact covariance, or "
    "draw random members (symmetric=False)."
)


@dataclass(frozen=True)
class Members:
    r"""Weight deviations, and how they came about, which decides how moments are estimated.

    Attributes:
        deviations: $\delta$, (n, K, D) in float64; of pairs, the first half mirrors the second.
        drawing: the set, by its name in the module's table.
        missing: share of the training predictions' variance that a symmetric set leaves out, in
            [0, 1); 0 at full rank alone.
        own: what each prediction has beside them, if anything.
    """

    deviations: Tensor = field(repr=False)
    drawing: Drawing
    missing: float = 0.0
    own: OwnPart | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        deviations, got = self.deviations, tuple(self.deviations.shape)
        if self.drawing not in DRAWINGS:
            raise ValueError(f"drawing must be one of {DRAWINGS}, got {self.drawing!r}.")
        if deviations.ndim != 3 or deviations.dtype != torch.float64:
            raise ValueError(
                f"deviations must be (members, targets, features) in float64, got {got} in "
                f"{deviations.dtype}."
            )
        if not bool(torch.isfinite(deviations).all()):
            raise ValueError("The deviations hold NaN or infinity. Draw the members again.")
        if not 0 <= self.missing < 1 or (self.missing and self.drawing != "symmetric"):
            raise ValueError(
                f"missing must be a share in [0, 1), and 0 for random members, got {self.missing} "
                f"for {self.drawing} ones."
            )
        _checked_number(len(deviations), self.drawing)

    def __len__(self) -> int:
        return len(self.deviations)


def members(
    joint: JointPosterior,
    n: int | None = None,
    *,
    generator: torch.Generator | None = None,
    recentred: bool = False,
    antithetic: bool = False,
    symmetric: bool = False,
    rank: int | None = None,
) -> Members:
    """The set that the options of `LastLayerRigidity.ensemble` describe; see the module's table.

    By default it has 64 members, or those that a symmetric set needs, twice its rank.

    Examples:
        >>> from rigidities import Gram, Posterior
        >>> gram = Gram(1)
        >>> gram.update(torch.tensor([[2.0]]))
        >>> post = Posterior.from_gram(gram, ridge=0.0).with_scale(torch.tensor([3.0]))
        >>> joint = JointPosterior(post, torch.eye(1, dtype=torch.float64))
        >>> members(joint, symmetric=True).deviations.abs().flatten()  # scale / sqrt(G)
        tensor([1.5000, 1.5000], dtype=torch.float64)
        >>> members(joint, symmetric=True)
        Members(drawing='symmetric', missing=0.0)
    """
    if symmetric:
        if generator is not None or recentred or antithetic:
            raise ValueError(
                "symmetric=True is a deterministic set that is centred already: leave out "
                "generator=, recentred= and antithetic=."
            )
        return symmetric_set(joint, _rank(n, rank))
    if rank is not None:
        raise ValueError(f"rank={rank} belongs to symmetric=True. Random sets take n members.")
    drawing: Drawing = "antithetic" if antithetic else "recentred" if recentred else "independent"
    n = _checked_number(MEMBERS if n is None else n, drawing)
    shape = (n // 2 if antithetic else n, joint.coordinates)
    points = standard_normal(shape, joint.root.device, generator)
    return Members(_arranged(joint.weights(points), drawing), drawing, own=joint.own)


def symmetric_set(joint: JointPosterior, rank: int | None = None) -> Members:
    r"""Pairs $\pm\sqrt{r}$ along the r axes that the training predictions vary most with.

    It warns where more than `TOLERATED` of their variance is left out.
    """
    blocks, width = joint.root.shape[1], joint.posterior.width
    rank = joint.coordinates if rank is None else operator.index(rank)
    if not 1 <= rank <= joint.coordinates:
        raise ValueError(
            f"rank must lie in 1..{joint.coordinates} ({blocks} x {width} independent "
            f"directions), got {rank}."
        )
    mixing, contributions = _principal(joint)
    order = contributions.flatten().argsort(stable=True)  # of equals the larger eigenvalue is kept
    left_out, kept = order[: len(order) - rank], order[len(order) - rank :]
    points = contributions.new_zeros(rank, blocks, width)
    rows = torch.arange(rank, device=kept.device)
    points[rows, :, kept % width] = mixing[kept // width]
    half = joint.weights(rank**0.5 * points.flatten(1))
    total, lost = float(contributions.sum()), float(contributions.flatten()[left_out].sum())
    missing = max(lost / total if total else 0.0, torch.finfo(torch.float64).eps)
    if joint.own is None and not len(left_out):  # where any axis is, it is never exactly 0
        missing = 0.0
    if missing > TOLERATED:
        notify(TOO_LOW.format(rank, joint.coordinates, 100 * missing))
    return Members(_arranged(half, "symmetric"), "symmetric", missing, joint.own)


def own_points(deviations: Tensor, drawing: Drawing, rows: Tensor, number: int) -> Tensor:
    """Standard coordinates (n, M, number) of rows of these hashes (M,), for each member."""
    draws = len(deviations) // (2 if drawing in PAIRED else 1)
    keys = torch.arange(draws * number, device=rows.device).reshape(-1, 1, number)
    seed = cast("Tensor", row_hashes([deviations[:1]], 1))  # another drawing, other numbers
    z = hashed_normals(rows[:, None], keys + seed)
    return _arranged(z.sign() if drawing == "symmetric" else z, drawing)


def _arranged(draws: Tensor, drawing: Drawing) -> Tensor:
    """The set of these draws (or halves of pairs), along the first dimension."""
    if drawing in PAIRED:
        return torch.cat([draws, -draws])
    return draws - draws.mean(0) if drawing == "recentred" else draws


def _principal(joint: JointPosterior) -> tuple[Tensor, Tensor]:
    """Rotation (J, J) of the blocks to principal directions, and what each axis adds (J, D)."""
    scaled = joint.scale[:, None] * joint.root
    if joint.posterior.eigenvalues.ndim > 1:  # every target in a basis of its own
        mixing, size = torch.eye(joint.targets).to(scaled), joint.scale
    else:
        _, size, mixing = torch.linalg.svd(scaled, full_matrices=False)
    post = joint.posterior
    return mixing, size.square()[:, None] * (post.eigenvalues / post.precisions)


def _rank(n: int | None, rank: int | None) -> int | None:
    if n is None:
        return rank
    n = _checked_number(n, "symmetric")
    if rank is not None and n != 2 * rank:
        raise ValueError(
            f"A symmetric set of rank {rank} has {2 * rank} members, got n={n}. Give one of them."
        )
    return n // 2


def _checked_number(n: int, drawing: Drawing) -> int:
    n = operator.index(n)
    smallest = 4 if drawing == "antithetic" else 2
    if n < smallest:
        least = "two pairs" if drawing == "antithetic" else "two members"
        raise ValueError(f"n must be at least {smallest}, got {n}: a spread needs {least}.")
    if n % 2 and drawing in PAIRED:
        raise ValueError(f"n must be even, got {n}: members come in pairs. Pass n={n + 1}.")
    return n
