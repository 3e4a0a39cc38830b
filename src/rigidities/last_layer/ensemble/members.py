r"""Sets of weight deviations that represent the posterior of a readout.

A member $n$ has the weights $w + \delta_n$. Its deviation is drawn in the standard coordinates
$\xi$ of `JointPosterior`, where the posterior is $N(0, I)$. The draws are then recentred,
$\xi_n - \bar\xi$: for outputs linear in the weights, the mean of the members is exactly the model's
prediction, and their covariance (over n - 1) is unbiased.

Where rows have a deviation that they share with no other row (see `joint`), member n moves at row x
by $B S_x z_n(x)$ more. Here $z_n(x) \sim N(0, I)$, recentred over the members, depends only on the
set, n and a hash of the row. It is the same in every call, batch and order; to autograd it is a
constant.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from ...data.hashes import hashed_normals, row_hashes
from ...posterior.draws import MEMBERS, standard_normal
from ...posterior.joint import JointPosterior, RowDeviation


@dataclass(frozen=True)
class Members:
    r"""The weight deviations of a set of members.

    Attributes:
        deviations: $\delta$, (n, K, D) in float64, with mean zero over the members.
        row_deviation: What each prediction shares with no other, if anything.

    Raises:
        ValueError: The deviations have another shape or precision, or are not finite.
    """

    deviations: Tensor = field(repr=False)
    row_deviation: RowDeviation | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        deviations = self.deviations
        if deviations.ndim != 3 or deviations.dtype != torch.float64:
            raise ValueError(
                "deviations must be (members, targets, features) in float64, got "
                f"{tuple(deviations.shape)} in {deviations.dtype}."
            )
        if not bool(torch.isfinite(deviations).all()):
            raise ValueError("The deviations contain NaN or infinity. Draw the members again.")
        _check_number(len(deviations))

    def __len__(self) -> int:
        return len(self.deviations)


def members(
    joint: JointPosterior, n: int = MEMBERS, *, generator: torch.Generator | None = None
) -> Members:
    """Members drawn from the posterior and recentred.

    Args:
        joint: The posterior of all targets' weights.
        n: Number of members.
        generator: The random generator of the draws.

    Raises:
        ValueError: There are fewer than two members.

    Examples:
        >>> from rigidities import Gram, Posterior
        >>> gram = Gram(1)
        >>> gram.update(torch.tensor([[2.0]]))
        >>> posterior = Posterior.from_gram(gram, ridge=0.0).with_scale(torch.tensor([3.0]))
        >>> joint = JointPosterior(posterior, torch.eye(1, dtype=torch.float64))
        >>> deviations = members(
        ...     joint, 10000, generator=torch.Generator().manual_seed(0)
        ... ).deviations
        >>> abs(deviations.mean().item()) < 1e-12, round(deviations.std().item(), 1)  # 3 / sqrt(4)
        (True, 1.5)
    """
    n = operator.index(n)
    _check_number(n)
    points = standard_normal((n, joint.coordinates), joint.root.device, generator)
    return Members(_recentred(joint.weights(points)), joint.row_deviation)


def row_points(deviations: Tensor, hashes: Tensor, number: int) -> Tensor:
    """Standard coordinates of the deviations that rows do not share, for each member.

    Args:
        deviations: The members' deviations (n, K, D), which seed the draws.
        hashes: The hash of each row, (M,).
        number: Number of coordinates of a row, J.

    Returns:
        (n, M, J), the same for equal rows in every call.
    """
    keys = torch.arange(len(deviations) * number, device=hashes.device).reshape(-1, 1, number)
    # A set with other deviations has other numbers for the same row.
    seed = cast("Tensor", row_hashes([deviations[:1]], 1))
    return _recentred(hashed_normals(hashes[:, None], keys + seed))


def _recentred(draws: Tensor) -> Tensor:
    """The draws minus their mean over the members, which are along the first dimension."""
    return draws - draws.mean(0)


def _check_number(n: int) -> None:
    """Refuse a number of members that has no spread."""
    if n < 2:
        raise ValueError(f"n must be at least 2, got {n}: a spread needs two members.")
