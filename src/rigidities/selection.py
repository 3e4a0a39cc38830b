r"""Which new rows to label next: greedy batches from a posterior.

A candidate with features f and loss weight w that is labelled adds $w f f^\top$ to the Gram. With
$M = (G + \varsigma^2 I)^{-1}$, $q_j = f_j^\top M f_j$ and the pick s

$$ q_j \leftarrow q_j - \frac{w_s (f_j^\top M f_s)^2}{1 + w_s q_s}, $$

whatever its label will be: a batch can be planned before anything is measured. Two objectives:

- `"logdet"`, the information about the weights: a pick gains
  $\tfrac12 \log(1 + w_j q_j)$, half of what it adds to $\log\det(G + \varsigma^2 I)$. Where
  all costs are equal, gains never increase from pick to pick, and the greedy batch reaches at
  least $1 - 1/e$ of the best one's.
- `"variance"`, the error bars of the rows one cares about: with $C = \sum_i f_i f_i^\top$ over
  them, a pick lowers their total variance $\mathrm{tr}(M C)$ by
  $w_j f_j^\top M C M f_j / (1 + w_j q_j)$.

Everything happens in whitened coordinates z, (N, D) in float64: $z \cdot z' = f^\top M f'$ before
the first pick. After it $M = S S^\top$ in these coordinates, with S = 1 at first; a pick s of
weight w shrinks S along $p = S^\top z_s$ by $1 / \sqrt{1 + w |p|^2}$. The root S, unlike M itself,
keeps its digits where a variance falls by many decades. One product of the rows with a vector,
$z_j \cdot u$ with $u = M z_s$, gives all candidates' new variances (`"variance"` takes two).

References:
    MacKay, "Information-based objective functions for active data selection", Neural Computation
        1992 (both objectives).
    Nemhauser, Wolsey and Fisher, "An analysis of approximations for maximizing submodular set
        functions", Mathematical Programming 1978 (the guarantee).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .posterior.posterior import Posterior

Objective = Literal["logdet", "variance"]
Numbers = Tensor | Sequence[float] | float
Indices = Tensor | Sequence[int]

BLOCK = 8192
"""Rows that are worked on at a time where a copy is made."""

_CANCELLATION = 1e-3
"""Fall of a running value, relative to its largest so far, at which it is computed anew."""


@dataclass(frozen=True)
class Selection:
    r"""Candidates in the order of choice.

    Attributes:
        indices: (n,) rows of the pool.
        gains: (n,) of each choice, before division by its cost: for `"logdet"` and `"variance"` as
            in the module's docstring (unscaled, in units of $\alpha^2$); for `top` the variance.
        quadratic: (N,) q of every candidate after all choices, unscaled; None from `top`, which
            knows nothing of it.
    """

    indices: Tensor
    gains: Tensor
    quadratic: Tensor | None = None

    @property
    def total(self) -> float:
        """Sum of the gains."""
        return float(self.gains.sum())


def top(
    variances: Tensor, n: int, *, costs: Numbers | None = None, chosen: Indices | None = None
) -> Selection:
    """The n largest variances (per cost), each judged as if it were labelled alone.

    Near-duplicates share a large variance, so a batch may spend itself on one spot; `greedy`
    does not.

    Args:
        variances: (N,) or (N, 1), of the candidates.
        n: how many.
        costs: positive, (N,) or one number: the variance per cost is maximised.
        chosen: rows never to be picked, because they were before.

    Examples:
        >>> top(torch.tensor([1.0, 4.0, 3.0]), 2).indices.tolist()
        [1, 2]
        >>> top(torch.tensor([1.0, 4.0, 3.0]), 2, costs=[1.0, 10.0, 1.0]).indices.tolist()
        [2, 0]
    """
    if variances.ndim == 2 and variances.shape[1] == 1:
        variances = variances[:, 0]
    if variances.ndim != 1:
        raise ValueError(
            f"variances must be (N,), one per candidate, got {tuple(variances.shape)}. With "
            "several targets choose one, or add them up: variances.sum(1)."
        )
    variances = variances.detach().double()
    _check_range("variances", variances)
    taken = _taken(chosen, variances)
    _check_number(n, variances, taken)
    score = variances / _per_row("costs", costs, variances)
    score[taken] = -torch.inf
    indices = score.topk(n).indices
    return Selection(indices, variances[indices])


def greedy(
    posterior: Posterior,
    features: Tensor,
    n: int,
    *,
    objective: Objective = "variance",
    weights: Numbers | None = None,
    costs: Numbers | None = None,
    chosen: Indices | None = None,
    of: Tensor | None = None,
) -> Selection:
    r"""n candidates, one after the other, each the best in the light of those before it.

    The features' whitened copy takes 8 N D bytes. No label is needed. A budget: the costs of the
    choices, `costs[selection.indices].cumsum(0)`, tell where to cut the batch.

    Args:
        posterior: of the data at hand, with one Gram for all targets.
        features: (N, D) or (N, 1, D), of the candidates.
        n: how many to pick.
        objective: `"variance"` or `"logdet"`, see the module's docstring.
        weights: not negative, (N,) or one number: the loss weight with which a row would enter
            the Gram; default one.
        costs: positive, (N,) or one number: the gain per cost is maximised.
        chosen: rows picked already, whose labels have not come yet: they enter the Gram first and
            are not picked again. (Rows that the posterior has seen do not belong into the pool.)
        of: (M, D), features of the rows whose variance is to shrink (`"variance"` only); default
            the candidates. A row times the root of r counts r times.

    Raises:
        ValueError: shapes, NaN, more picks than candidates, a Gram per target.

    Examples:
        Of two equal candidates the second is worth less than another direction:

        >>> from rigidities import Gram
        >>> gram = Gram(2)
        >>> gram.update(torch.eye(2))
        >>> pool = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
        >>> picked = greedy(Posterior.from_gram(gram, ridge=0.0), pool, 2, objective="logdet")
        >>> picked.indices.tolist()
        [0, 2]
        >>> [round(gain, 4) for gain in picked.gains.tolist()]  # log(1 + 9) / 2, log(1 + 4) / 2
        [1.1513, 0.8047]
    """
    if objective not in ("logdet", "variance"):
        raise ValueError(f"objective must be 'logdet' or 'variance', got {objective!r}.")
    if of is not None and objective == "logdet":
        raise ValueError("`of` belongs to objective='variance'. Pass that, or leave `of` out.")
    features = _checked_features("features", features, posterior)
    of = None if of is None else _checked_features("of", of, posterior)
    taken = _taken(chosen, features)
    _check_number(n, features, taken)
    device = posterior.eigenvectors.device
    w = _per_row("weights", weights, features).to(device)
    cost = _per_row("costs", costs, features).to(device)
    whitener = _whitener(posterior, features[taken], w[taken.to(device)])
    rows = _whitened(posterior, features, whitener)
    if objective == "logdet":
        return _picked(_Candidates(rows, w), n, cost, taken.to(device))
    cared = rows if of is None else _whitened(posterior, of, whitener)
    return _picked(_TotalVariance(rows, w, cared), n, cost, taken.to(device))


def _picked(goal: _Candidates, n: int, costs: Tensor, taken: Tensor) -> Selection:
    indices, gains = [], []
    free = torch.ones_like(costs, dtype=torch.bool)
    free[taken] = False
    for _ in range(n):
        gain = goal.gains()
        pick = int((gain / costs).masked_fill_(~free, -torch.inf).argmax())
        indices.append(pick)
        gains.append(gain[pick])
        free[pick] = False
        goal.add(pick)
    left = goal.quadratic.values
    return Selection(torch.tensor(indices, device=costs.device), torch.stack(gains), left)


def _whitener(posterior: Posterior, chosen: Tensor, weights: Tensor) -> Tensor | None:
    r"""$R^{-1}$ with $R^\top R = 1 + \sum_s w_s z_s z_s^\top$ over rows picked before."""
    if not len(chosen):
        return None
    rows = weights.sqrt()[:, None] * posterior.whitened(chosen)
    eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    triangle = torch.linalg.qr(torch.cat([eye, rows]), mode="r").R
    inverse: Tensor = torch.linalg.solve_triangular(triangle, eye, upper=True)
    return inverse


def _whitened(posterior: Posterior, features: Tensor, whitener: Tensor | None) -> Tensor:
    """(N, D) in float64, filled block by block."""
    rows = posterior.eigenvectors.new_empty(0)
    for start in range(0, len(features), BLOCK):
        part = posterior.whitened(features[start : start + BLOCK])
        part = part if whitener is None else part @ whitener
        rows = rows if start else part.new_empty(len(features), part.shape[1])
        rows[start : start + BLOCK] = part
    return rows


def _checked_features(name: str, features: Tensor, posterior: Posterior) -> Tensor:
    if posterior.eigenvalues.ndim > 1:
        raise ValueError(
            f"This posterior has a Gram for each of {len(posterior.eigenvalues)} targets; rows "
            "are chosen for one. Build it from that target's Gram: Posterior.from_gram(...)."
        )
    if features.ndim == 3 and features.shape[1] == 1:
        features = features[:, 0]
    if features.ndim != 2 or features.shape[1] != posterior.width or not len(features):
        remedy = " Choose one target's: features[:, k]." if features.ndim == 3 else ""
        what = f"{name} must be (N, {posterior.width}) with N > 0"
        raise ValueError(f"{what}, got {tuple(features.shape)}.{remedy}")
    wrong = torch.cat([~part.isfinite().all(1) for part in torch.split(features, BLOCK)]).nonzero()
    if len(wrong):
        raise ValueError(f"{name} must be finite, got NaN or infinity in row {int(wrong[0])}.")
    return features.detach()


def _per_row(name: str, values: Numbers | None, like: Tensor) -> Tensor:
    values = torch.as_tensor(1.0 if values is None else values, dtype=torch.float64)
    values = values.detach().to(like.device)
    if values.ndim and tuple(values.shape) != (len(like),):
        raise ValueError(f"{name} must be one number or ({len(like)},), got {tuple(values.shape)}.")
    _check_range(name, values)
    return values.expand(len(like))


def _check_range(name: str, values: Tensor) -> None:
    """Finite and not negative; costs above zero."""
    bound, remedy, inside = "not negative", "", values >= 0
    if name == "costs":
        bound, inside = "above zero", values > 0
        remedy = " For rows that cost nothing, label them all."
    if not bool((inside & (values < torch.inf)).all()):
        what = f"{name} must be finite and {bound}"
        raise ValueError(f"{what}, got {float(values.min()):g} to {float(values.max()):g}.{remedy}")


def _taken(chosen: Indices | None, like: Tensor) -> Tensor:
    """Indices picked before, checked."""
    taken = torch.as_tensor([] if chosen is None else chosen, device=like.device).detach()
    if not taken.numel():
        return taken.new_zeros(0, dtype=torch.int64)
    if taken.ndim != 1 or taken.is_floating_point() or taken.dtype == torch.bool:
        what = f"chosen must be row numbers, (m,), got {taken.dtype} {tuple(taken.shape)}"
        raise ValueError(f"{what}. For a mask pass mask.nonzero()[:, 0].")
    if bool((taken < 0).any()) or bool((taken >= len(like)).any()):
        what = f"chosen must lie in 0..{len(like) - 1}"
        raise ValueError(f"{what}, got {int(taken.min())} to {int(taken.max())}.")
    different = len(set(taken.tolist()))
    if different < len(taken):
        what = f"chosen must not repeat a row, got {len(taken)} rows of which {different} differ"
        raise ValueError(f"{what}. Pass chosen.unique().")
    return taken.long()


def _check_number(n: int, candidates: Tensor, taken: Tensor) -> None:
    free = len(candidates) - len(taken)
    if not 1 <= n <= free:
        already = f" ({len(taken)} of {len(candidates)} are chosen already)" if len(taken) else ""
        what = f"n must lie in 1..{free}, the number of candidates{already}; got {n}"
        raise ValueError(f"{what}. Ask for fewer or give more candidates.")


class _SquaredNorms:
    """|A^T z_j|^2 of all rows, changed pick by pick as A is.

    Differences lose digits. A value that has fallen to a thousandth of its largest since it was
    last computed is computed anew from A, as a sum of squares: rounding stays near 1e-12 of each
    value, and nothing becomes negative, so nothing is clamped.
    """

    def __init__(self, rows: Tensor, *factors: Tensor) -> None:
        self.rows = rows
        blocks = torch.split(rows, BLOCK)
        self.values = torch.cat([_squared_norms(block, factors) for block in blocks])
        self._largest = self.values.clone()

    def lower(self, by: Tensor, *factors: Tensor) -> None:
        """Subtract; A is the product of the factors, which belong to the new values."""
        self.values -= by
        (fallen,) = (self.values < _CANCELLATION * self._largest).nonzero(as_tuple=True)
        for part in torch.split(fallen, BLOCK) if len(fallen) else ():
            self.values[part] = self._largest[part] = _squared_norms(self.rows[part], factors)
        torch.maximum(self._largest, self.values, out=self._largest)


class _Candidates:
    r"""q of all whitened rows (N, D), which would enter the Gram with weights (N,), so far.

    Gains are the information, $\tfrac12 \log(1 + w_j q_j)$.
    """

    def __init__(self, rows: Tensor, weights: Tensor) -> None:
        self.rows = rows
        self.weights = weights
        self.root = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        self.quadratic = _SquaredNorms(rows)

    def gains(self) -> Tensor:
        return torch.log1p(self.weights * self.quadratic.values) / 2

    def add(self, pick: int) -> tuple[Tensor, ...]:
        """p, z_j . u of all rows, k and h: $S' = S (1 - h p p^T)$, $M' = M - k u u^T$, u = S p."""
        w, p = self.weights[pick], self.root.mT @ self.rows[pick]
        stretch = (1 + w * p.square().sum()).sqrt()
        u = self.root @ p
        products = self.rows @ u
        # h = (1 - 1 / stretch) / |p|^2, without the difference.
        k, h = w / stretch.square(), w / (stretch * (1 + stretch))
        self.root -= h * torch.outer(u, p)
        self.quadratic.lower(k * products.square(), self.root)
        return p, products, k, h


class _TotalVariance(_Candidates):
    r"""Gains $w_j a_j / (1 + w_j q_j)$ with $a_j = z_j^\top M C M z_j$, $C = \sum_i z_i z_i^\top$.

    With $A A^\top = S^\top C S$, $a_j = |(S A)^\top z_j|^2$; a pick shrinks A as it shrinks S.
    The rows cared for, (M, D), whose variance is to shrink, are whitened alike.
    """

    def __init__(self, rows: Tensor, weights: Tensor, cared: Tensor) -> None:
        super().__init__(rows, weights)
        self.half = _square_root(cared)  # A
        self.squares = _SquaredNorms(rows, self.half)

    def gains(self) -> Tensor:
        return self.weights * self.squares.values / (1 + self.weights * self.quadratic.values)

    def add(self, pick: int) -> tuple[Tensor, ...]:
        # M' = M - k u u^T, so a' = a - 2 k (z.u) (z.M C u) + k^2 (z.u)^2 u^T C u, where
        # u^T C u = |A^T p|^2 and M C u = S A A^T p.
        seen = self.half.mT @ (self.root.mT @ self.rows[pick])  # A^T p
        partners = self.rows @ (self.root @ (self.half @ seen))  # z.M C u
        p, products, k, h = step = super().add(pick)
        self.half -= h * torch.outer(p, seen)
        by = k * products * (2 * partners - k * seen.square().sum() * products)
        self.squares.lower(by, self.root, self.half)
        return step


def _square_root(rows: Tensor) -> Tensor:
    r"""A with $A A^\top$ = rows^T rows, (D, M) or (D, D), whichever is smaller.

    A (D, D) one comes from the eigenvalues of rows^T rows, of which those that rounding made
    negative count as zero. Products in blocks suit a busy machine, where a QR factorisation waits
    for all threads at every column.
    """
    if len(rows) <= rows.shape[1]:
        return rows.mT.clone()
    total = rows.new_zeros(rows.shape[1], rows.shape[1])
    for part in torch.split(rows, BLOCK):
        total.addmm_(part.mT, part)
    eigenvalues, eigenvectors = torch.linalg.eigh(total)
    root: Tensor = eigenvectors * eigenvalues.clamp(min=0).sqrt()
    return root


def _squared_norms(rows: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    for factor in factors:
        rows = rows @ factor
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.square()
