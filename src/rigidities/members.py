r"""Sets of weight deviations that stand for the posterior of a readout.

A member $n$ has the weights $w + \delta_n$. Deviations are made in the standard coordinates
$\xi$ of `JointPosterior`, where the posterior is $N(0, I)$ in C dimensions:

| set | points | exact, for outputs linear in the weights |
| --- | --- | --- |
| independent | $\xi_n \sim N(0, I)$ | nothing; mean and covariance are unbiased |
| recentred | $\xi_n - \bar\xi$ | the mean; the covariance (over n - 1) is unbiased |
| antithetic | $\pm\xi_p$ | the mean; the covariance (over n) is unbiased |
| symmetric | $\pm\sqrt{r}\, e_j, \; j = 1 \ldots r$ | mean and covariance (over n) |

A symmetric set has $2r$ members. At $r = C$ its covariance is the posterior's; below, it is the
posterior's in the r principal directions of the weights with the largest variance, and zero in
the others: a lower bound. The directions are those of one target's Gram times those of the
scaled correlation between targets where the targets share a Gram.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .draws import standard_normal
from .joint import JointPosterior

Drawing = Literal["independent", "recentred", "antithetic", "symmetric"]
DRAWINGS: tuple[str, ...] = get_args(Drawing)
MEMBERS = 64
"""How many are drawn where no number is given."""


@dataclass(frozen=True)
class Members:
    r"""Weight deviations, and how they came about, which decides how moments are estimated.

    Attributes:
        deviations: $\delta$, (n, K, D) in float64; of pairs, the first half mirrors the second.
        drawing: the set, by its name in the module's table.
    """

    deviations: Tensor
    drawing: Drawing

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
    """The set that the options describe; see the module's table.

    Args:
        joint: the posterior of all targets' weights.
        n: number of members; by default 64, or those that a symmetric set needs.
        generator: for random sets.
        recentred: subtract the mean of the draws.
        antithetic: draw pairs of opposite sign (which are centred, so that `recentred` adds
            nothing); n is even.
        symmetric: the deterministic set.
        rank: directions of a symmetric set, n / 2; by default all.

    Raises:
        ValueError: numbers out of range, or options that contradict each other.

    Examples:
        >>> from rigidities.gram import Gram
        >>> from rigidities.posterior import Posterior
        >>> gram = Gram(1)
        >>> gram.update(torch.tensor([[2.0]]))
        >>> post = Posterior.from_gram(gram, ridge=0.0).with_scale(torch.tensor([3.0]))
        >>> joint = JointPosterior(post, torch.eye(1, dtype=torch.float64))
        >>> members(joint, symmetric=True).deviations.abs().flatten()  # scale / sqrt(G)
        tensor([1.5000, 1.5000], dtype=torch.float64)
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
    n = MEMBERS if n is None else n
    return random_set(joint, n, generator=generator, recentred=recentred, antithetic=antithetic)


def random_set(
    joint: JointPosterior,
    n: int,
    *,
    generator: torch.Generator | None = None,
    recentred: bool = False,
    antithetic: bool = False,
) -> Members:
    """Draws from the posterior: independent, recentred, or in antithetic pairs."""
    n = _checked_number(n, "antithetic" if antithetic else "independent")
    shape = (n // 2 if antithetic else n, joint.coordinates)
    points = standard_normal(shape, joint.root.device, generator)
    if antithetic:
        half = joint.weights(points)
        return Members(torch.cat([half, -half]), "antithetic")
    if recentred:
        return Members(joint.weights(points - points.mean(0)), "recentred")
    return Members(joint.weights(points), "independent")


def symmetric_set(joint: JointPosterior, rank: int | None = None) -> Members:
    r"""Pairs $\pm\sqrt{r}$ along the r principal directions with the largest variance."""
    blocks, width = joint.root.shape[1], joint.posterior.width
    rank = joint.coordinates if rank is None else operator.index(rank)
    if not 1 <= rank <= joint.coordinates:
        raise ValueError(
            f"rank must lie in 1..{joint.coordinates} ({blocks} x {width} independent "
            f"directions), got {rank}."
        )
    mixing, variances = _principal(joint)
    kept = variances.flatten().argsort(descending=True, stable=True)[:rank]
    points = variances.new_zeros(rank, blocks, width)
    rows = torch.arange(rank, device=kept.device)
    points[rows, :, kept % width] = mixing[kept // width]
    half = joint.weights(rank**0.5 * points.flatten(1))
    return Members(torch.cat([half, -half]), "symmetric")


def _principal(joint: JointPosterior) -> tuple[Tensor, Tensor]:
    """Rotation (J, J) of the blocks to principal directions, with their variances (J, D)."""
    scaled = joint.scale[:, None] * joint.root
    if joint.posterior.eigenvalues.ndim > 1:  # every target in a basis of its own
        mixing, size = torch.eye(joint.targets).to(scaled), joint.scale
    else:
        _, size, mixing = torch.linalg.svd(scaled, full_matrices=False)
    return mixing, size.square()[:, None] / joint.posterior.precisions


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
    """A number of members from which a variance can be estimated."""
    n = operator.index(n)
    smallest = 4 if drawing == "antithetic" else 2
    if n < smallest:
        least = "two pairs" if drawing == "antithetic" else "two members"
        raise ValueError(f"n must be at least {smallest}, got {n}: a spread needs {least}.")
    if n % 2 and drawing in ("antithetic", "symmetric"):
        raise ValueError(f"n must be even, got {n}: members come in pairs. Pass n={n + 1}.")
    return n
