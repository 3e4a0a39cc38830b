r"""Sets of weight deviations that represent the posterior of a readout.

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
in the Gram, each axis adds

$$ S_p^2 \sum_i \frac{(v_j \cdot f_i)^2}{\lambda_j + s} = S_p^2 \frac{\lambda_j}{\lambda_j + s} $$

and the r axes that add most are kept. (Targets behind one weight vector count in units of their
own scale.) What the other axes would have added is the share that is `missing`. Axes that the data
determine well add alike, so that a share of about $1 - r / C$ is missing at a small ridge. A
prediction far from the training data may need an axis that adds nothing there.

Where rows have a deviation that they share with no other row (see `joint`), member n moves at row x
by $B S_x z_n(x)$ more. Here $z_n(x) \sim N(0, I)$ depends on the set, n and a hash of the row
alone. It is the same in every call, batch and order; to autograd it is a constant. Its covariance
is unbiased and its mean as exact as that of the set. A symmetric set has signs in pairs for it,
whose covariance is right on average, not exact.
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
from ...posterior.joint import JointPosterior, RowDeviation

Drawing = Literal["independent", "recentred", "antithetic", "symmetric"]
DRAWINGS: tuple[str, ...] = get_args(Drawing)

PAIRED = ("antithetic", "symmetric")
"""The sets whose second half mirrors the first."""

TOLERATED = 1e-6
"""Share of the variance that a symmetric set leaves out without a warning."""

TOO_LOW = (
    "A symmetric set of rank {0} of {1} leaves out {2:.2g} % of the variance of the training "
    "predictions: its spread is a lower bound. Raise rank to {1} for the exact covariance, or "
    "draw random members (symmetric=False)."
)


@dataclass(frozen=True)
class Members:
    r"""Weight deviations, and how they were drawn, which decides how moments are estimated.

    Attributes:
        deviations: $\delta$, (n, K, D) in float64. If members come in pairs, the second half
            mirrors the first.
        drawing: The set, by its name in the module's table.
        missing: Share of the training predictions' variance that a symmetric set leaves out, in
            [0, 1); 0 at full rank alone.
        row_deviation: What each prediction shares with no other, if anything.
    """

    deviations: Tensor = field(repr=False)
    drawing: Drawing
    missing: float = 0.0
    row_deviation: RowDeviation | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        deviations = self.deviations
        if self.drawing not in DRAWINGS:
            raise ValueError(f"drawing must be one of {DRAWINGS}, got {self.drawing!r}.")
        if deviations.ndim != 3 or deviations.dtype != torch.float64:
            raise ValueError(
                "deviations must be (members, targets, features) in float64, got "
                f"{tuple(deviations.shape)} in {deviations.dtype}."
            )
        if not bool(torch.isfinite(deviations).all()):
            raise ValueError("The deviations contain NaN or infinity. Draw the members again.")
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

    Args:
        joint: The posterior of all targets' weights.
        n: Number of members. By default 64, or those that a symmetric set needs, twice its rank.
        generator: Draws the members of a random set.
        recentred: Whether to subtract the mean of the draws.
        antithetic: Whether to draw pairs.
        symmetric: Whether to make the deterministic set.
        rank: Number of axes of a symmetric set; by default all.

    Raises:
        ValueError: The options contradict each other, or the number does not fit them.

    Examples:
        >>> from rigidities import Gram, Posterior
        >>> gram = Gram(1)
        >>> gram.update(torch.tensor([[2.0]]))
        >>> posterior = Posterior.from_gram(gram, ridge=0.0).with_scale(torch.tensor([3.0]))
        >>> joint = JointPosterior(posterior, torch.eye(1, dtype=torch.float64))
        >>> members(joint, symmetric=True).deviations.abs().flatten()  # scale / sqrt(G)
        tensor([1.5000, 1.5000], dtype=torch.float64)
        >>> members(joint, symmetric=True)
        Members(drawing='symmetric', missing=0.0)
    """
    if symmetric:
        if generator is not None or recentred or antithetic:
            raise ValueError(
                "symmetric=True gives a deterministic, centred set: leave out generator=, "
                "recentred= and antithetic=."
            )
        return symmetric_set(joint, _symmetric_rank(n, rank))
    if rank is not None:
        raise ValueError(f"rank={rank} needs symmetric=True. A random set has n members.")
    drawing: Drawing
    if antithetic:
        drawing = "antithetic"
    elif recentred:
        drawing = "recentred"
    else:
        drawing = "independent"
    n = _checked_number(MEMBERS if n is None else n, drawing)
    draws = n // 2 if antithetic else n
    points = standard_normal((draws, joint.coordinates), joint.root.device, generator)
    return Members(
        deviations=_arranged(joint.weights(points), drawing),
        drawing=drawing,
        row_deviation=joint.row_deviation,
    )


def symmetric_set(joint: JointPosterior, rank: int | None = None) -> Members:
    r"""Pairs $\pm\sqrt{r}$ along the r axes that the training predictions vary most with.

    It warns where more than `TOLERATED` of their variance is left out.

    Args:
        joint: The posterior of all targets' weights, with C coordinates.
        rank: Number of axes r; by default all C.

    Raises:
        ValueError: The rank does not lie between 1 and C.
    """
    blocks = joint.root.shape[1]
    width = joint.posterior.width
    rank = joint.coordinates if rank is None else operator.index(rank)
    if not 1 <= rank <= joint.coordinates:
        raise ValueError(
            f"rank must lie in 1..{joint.coordinates} ({blocks} x {width} independent "
            f"directions), got {rank}."
        )
    mixing, contributions = _principal_axes(joint)
    contributions = contributions.flatten()
    # Ascending and stable: of axes that add equally, the one with the larger eigenvalue is kept.
    order = contributions.argsort(stable=True)
    left_out_axes = order[: len(order) - rank]
    axes = order[len(order) - rank :]
    # Axis number p * width + j is eigenvector j times the principal direction p.
    points = contributions.new_zeros(rank, blocks, width)
    points[torch.arange(rank, device=axes.device), :, axes % width] = mixing[axes // width]
    half = joint.weights(rank**0.5 * points.flatten(1))

    total = float(contributions.sum())
    left_out = float(contributions[left_out_axes].sum())
    missing = left_out / total if total else 0.0
    if joint.row_deviation is None and not len(left_out_axes):
        missing = 0.0
    else:
        # Only a complete set may say that nothing at all is missing.
        missing = max(missing, torch.finfo(torch.float64).eps)
    if missing > TOLERATED:
        notify(TOO_LOW.format(rank, joint.coordinates, 100 * missing))
    return Members(
        deviations=_arranged(half, "symmetric"),
        drawing="symmetric",
        missing=missing,
        row_deviation=joint.row_deviation,
    )


def row_points(deviations: Tensor, drawing: Drawing, hashes: Tensor, number: int) -> Tensor:
    """Standard coordinates of the deviations that rows do not share, for each member.

    Args:
        deviations: The members' deviations (n, K, D), which seed the draws.
        drawing: How the members were drawn.
        hashes: The hash of each row, (M,).
        number: Number of coordinates of a row, J.

    Returns:
        (n, M, J), the same for equal rows in every call.
    """
    draws = len(deviations) // 2 if drawing in PAIRED else len(deviations)
    keys = torch.arange(draws * number, device=hashes.device).reshape(-1, 1, number)
    # A set with other deviations has other numbers for the same row.
    seed = cast("Tensor", row_hashes([deviations[:1]], 1))
    z = hashed_normals(hashes[:, None], keys + seed)
    if drawing == "symmetric":
        z = z.sign()
    return _arranged(z, drawing)


def _arranged(draws: Tensor, drawing: Drawing) -> Tensor:
    """The set made of these draws (or halves of pairs), along the first dimension."""
    if drawing in PAIRED:
        return torch.cat([draws, -draws])
    if drawing == "recentred":
        return draws - draws.mean(0)
    return draws


def _principal_axes(joint: JointPosterior) -> tuple[Tensor, Tensor]:
    """The axes of a symmetric set.

    Returns:
        The rotation (J, J) of the blocks of coordinates to principal directions, and what each
        axis adds to the variance of the training predictions, (J, D).
    """
    posterior = joint.posterior
    scaled_root = joint.scale[:, None] * joint.root
    if posterior.eigenvalues.ndim > 1:
        # Every target has an eigenbasis of its own: there is nothing to rotate.
        mixing = torch.eye(joint.targets).to(scaled_root)
        size = joint.scale
    else:
        _, size, mixing = torch.linalg.svd(scaled_root, full_matrices=False)
    determined = posterior.eigenvalues / posterior.precisions
    return mixing, size.square()[:, None] * determined


def _symmetric_rank(n: int | None, rank: int | None) -> int | None:
    """The rank of a symmetric set from its number of members or its rank; None for all axes."""
    if n is None:
        return rank
    n = _checked_number(n, "symmetric")
    if rank is not None and n != 2 * rank:
        raise ValueError(
            f"A symmetric set of rank {rank} has {2 * rank} members, got n={n}. Pass only one of "
            "the two."
        )
    return n // 2


def _checked_number(n: int, drawing: Drawing) -> int:
    """A number of members that the set can have; others are refused."""
    n = operator.index(n)
    if drawing == "antithetic":
        smallest = 4
        needed = "two pairs"
    else:
        smallest = 2
        needed = "two members"
    if n < smallest:
        raise ValueError(f"n must be at least {smallest}, got {n}: a spread needs {needed}.")
    if n % 2 and drawing in PAIRED:
        raise ValueError(f"n must be even, got {n}: members come in pairs. Pass n={n + 1}.")
    return n
