r"""Which new rows to label next, chosen one after the other from a posterior.

A labelled candidate with features f and loss weight w adds $w f f^\top$ to the Gram. With
$M = (G + \varsigma^2 I)^{-1}$, $q_j = f_j^\top M f_j$ and the pick s

$$ q_j \leftarrow q_j - \frac{w_s (f_j^\top M f_s)^2}{1 + w_s q_s}, $$

which does not depend on the label. A batch can therefore be planned before anything is measured.
There are two objectives:

- `"logdet"`, the information about the weights: a pick gains
  $\tfrac12 \log(1 + w_j q_j)$, half of what it adds to $\log\det(G + \varsigma^2 I)$. Where
  all costs are equal, gains never increase from pick to pick, and the greedy batch reaches at
  least $1 - 1/e$ of the best one's.
- `"variance"`, the error bars of the rows of interest: with $C = \sum_i f_i f_i^\top$ over
  them, a pick lowers their total variance $\mathrm{tr}(M C)$ by
  $w_j f_j^\top M C M f_j / (1 + w_j q_j)$.

Everything happens in whitened coordinates z, (N, D) in float64: $z \cdot z' = f^\top M f'$ before
the first pick. After it $M = S S^\top$ in these coordinates, with S = 1 at first; a pick s of
weight w shrinks S along $p = S^\top z_s$ by $1 / \sqrt{1 + w |p|^2}$. The root S, unlike M itself,
keeps its digits where a variance falls by many decades. One product of the rows with a vector,
$z_j \cdot u$ with $u = M z_s$, gives all candidates' new variances (`"variance"` takes two).

`top` ranks candidates by given variances, each separately. `greedy` checks its arguments, whitens
the features, and then alternates between the gains of all candidates and the addition of the best.

References:
    MacKay, "Information-based objective functions for active data selection", Neural Computation
        1992 (both objectives).
    Nemhauser, Wolsey and Fisher, "An analysis of approximations for maximizing submodular set
        functions", Mathematical Programming 1978 (the guarantee).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .posterior.posterior import Posterior

__all__ = ["Selection", "greedy", "top"]


def __dir__() -> list[str]:
    return sorted(__all__)


Objective = Literal["logdet", "variance"]
Numbers = Tensor | Sequence[float] | float
Indices = Tensor | Sequence[int]

BLOCK = 8192
"""Number of rows per block where a copy is made."""

_CANCELLATION = 1e-3
"""Ratio of a running value to its largest so far, below which it is computed again."""


@dataclass(frozen=True)
class Selection:
    r"""Candidates in the order of choice.

    Attributes:
        indices: Rows of the pool, (n,).
        gains: Gain of each choice before division by its cost, (n,). For `"logdet"` and
            `"variance"` as in the module's docstring (unscaled, in units of $\alpha^2$); for `top`
            the variance.
        quadratic: q of every candidate after all choices, unscaled, (N,); None from `top`, which
            does not compute it.
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
    """The n candidates with the largest variances (per cost), each judged separately.

    Near-duplicates share a large variance, so a batch may consist of very similar rows; `greedy`
    avoids this.

    Args:
        variances: Variances of the candidates, (N,) or (N, 1).
        n: How many to pick.
        costs: Positive numbers (N,), or one number. The variance divided by the cost is maximised.
        chosen: Rows that were picked before and must not be picked again.

    Returns:
        The picks, with their variances as gains.

    Raises:
        ValueError: A shape or a number is wrong, or there are more picks than candidates.

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
    chosen_rows = _checked_indices(chosen, variances)
    _check_number(n, variances, chosen_rows)
    score = variances / _per_row("costs", costs, variances)
    score[chosen_rows] = -torch.inf
    indices = score.topk(n).indices
    return Selection(indices=indices, gains=variances[indices])


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
    r"""Choose n candidates one after the other, each the best given those before it.

    No label is needed. A whitened copy of the features takes 8 N D bytes. If you have a budget, cut
    the batch where the sum of the costs, `costs[selection.indices].cumsum(0)`, exceeds it.

    Args:
        posterior: The posterior of the training data, with one Gram for all targets.
        features: Features of the candidates, (N, D) or (N, 1, D).
        n: How many to pick.
        objective: `"variance"` or `"logdet"`, see the module's docstring.
        weights: Non-negative numbers (N,), or one number: the loss weights with which the rows
            would enter the Gram; by default one.
        costs: Positive numbers (N,), or one number. The gain divided by the cost is maximised.
        chosen: Rows that were already picked but are not labelled yet. They enter the Gram first
            and are not picked again. (Rows in the posterior's Gram do not belong in the pool.)
        of: Features of the rows whose variance should shrink, (M, D) (`"variance"` only); by
            default the candidates. A row that is multiplied by the root of r counts r times.

    Returns:
        The picks in the order of choice.

    Raises:
        ValueError: A shape is wrong, a number is NaN, there are more picks than candidates, or each
            target has its own Gram.

    Examples:
        After the first of two equal candidates, another direction is worth more than the second:

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
        raise ValueError("`of` needs objective='variance'. Pass that objective, or leave `of` out.")
    features = _checked_features("features", features, posterior)
    if of is not None:
        of = _checked_features("of", of, posterior)
    chosen_rows = _checked_indices(chosen, features)
    _check_number(n, features, chosen_rows)
    device = posterior.eigenvectors.device
    row_weights = _per_row("weights", weights, features).to(device)
    row_costs = _per_row("costs", costs, features).to(device)

    # Rows chosen before change the whitening at once, instead of being added pick by pick.
    chosen_weights = row_weights[chosen_rows.to(device)]
    whitener = _whitener(posterior, features[chosen_rows], chosen_weights)
    rows = _whitened(posterior, features, whitener)
    candidates: _Candidates
    if objective == "logdet":
        candidates = _Candidates(rows, row_weights)
    else:
        cared_rows = rows if of is None else _whitened(posterior, of, whitener)
        candidates = _TotalVariance(rows, row_weights, cared_rows)
    return _picked(candidates, n, row_costs, chosen_rows.to(device))


def _picked(candidates: _Candidates, n: int, costs: Tensor, chosen_rows: Tensor) -> Selection:
    """Pick the candidate of largest gain per cost, n times, and add each before the next."""
    indices = []
    gains = []
    free = torch.ones_like(costs, dtype=torch.bool)
    free[chosen_rows] = False
    for _ in range(n):
        gain = candidates.gains()
        pick = int((gain / costs).masked_fill_(~free, -torch.inf).argmax())
        indices.append(pick)
        gains.append(gain[pick])
        free[pick] = False
        candidates.add(pick)
    return Selection(
        indices=torch.tensor(indices, device=costs.device),
        gains=torch.stack(gains),
        quadratic=candidates.quadratic.values,
    )


def _whitener(posterior: Posterior, chosen: Tensor, weights: Tensor) -> Tensor | None:
    r"""$R^{-1}$ with $R^\top R = 1 + \sum_s w_s z_s z_s^\top$ over rows picked before.

    Args:
        posterior: The posterior of the data at hand.
        chosen: Features of the rows picked before, (m, D).
        weights: Their loss weights, (m,).

    Returns:
        (D, D); None without such rows.
    """
    if not len(chosen):
        return None
    rows = weights.sqrt()[:, None] * posterior.whitened(chosen)
    eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    triangle = torch.linalg.qr(torch.cat([eye, rows]), mode="r").R
    inverse: Tensor = torch.linalg.solve_triangular(triangle, eye, upper=True)
    return inverse


def _whitened(posterior: Posterior, features: Tensor, whitener: Tensor | None) -> Tensor:
    """Whitened features, (N, D) in float64, filled block by block."""
    rows: Tensor | None = None
    for start in range(0, len(features), BLOCK):
        block = posterior.whitened(features[start : start + BLOCK])
        if whitener is not None:
            block = block @ whitener
        if rows is None:
            rows = block.new_empty(len(features), block.shape[1])
        rows[start : start + BLOCK] = block
    assert rows is not None  # features have been checked to have rows
    return rows


def _checked_features(name: str, features: Tensor, posterior: Posterior) -> Tensor:
    """Finite features (N, D) of the posterior's width; `name` is what errors call them."""
    if posterior.eigenvalues.ndim > 1:
        raise ValueError(
            f"This posterior has one Gram for each of {len(posterior.eigenvalues)} targets, but "
            "rows are chosen for one target. Build the posterior from that target's Gram: "
            "Posterior.from_gram(...)."
        )
    if features.ndim == 3 and features.shape[1] == 1:
        features = features[:, 0]
    if features.ndim != 2 or features.shape[1] != posterior.width or not len(features):
        remedy = " Choose one target's: features[:, k]." if features.ndim == 3 else ""
        raise ValueError(
            f"{name} must be (N, {posterior.width}) with N > 0, got "
            f"{tuple(features.shape)}.{remedy}"
        )
    finite = torch.cat([block.isfinite().all(1) for block in torch.split(features, BLOCK)])
    wrong = (~finite).nonzero()
    if len(wrong):
        raise ValueError(f"{name} must be finite, got NaN or infinity in row {int(wrong[0])}.")
    return features.detach()


def _per_row(name: str, values: Numbers | None, candidates: Tensor) -> Tensor:
    """Weights or costs as one float64 number per candidate, (N,); ones where none are given."""
    numbers = torch.as_tensor(1.0 if values is None else values, dtype=torch.float64)
    numbers = numbers.detach().to(candidates.device)
    rows = len(candidates)
    if numbers.ndim and tuple(numbers.shape) != (rows,):
        raise ValueError(f"{name} must be one number or ({rows},), got {tuple(numbers.shape)}.")
    _check_range(name, numbers)
    return numbers.expand(rows)


def _check_range(name: str, values: Tensor) -> None:
    """Refuse values that are negative or not finite, and costs that are zero."""
    if name == "costs":
        inside = values > 0
        bound = "above zero"
        remedy = " For rows that cost nothing, label them all."
    else:
        inside = values >= 0
        bound = "not negative"
        remedy = ""
    if not bool((inside & (values < torch.inf)).all()):
        raise ValueError(
            f"{name} must be finite and {bound}, got {float(values.min()):g} to "
            f"{float(values.max()):g}.{remedy}"
        )


def _checked_indices(chosen: Indices | None, candidates: Tensor) -> Tensor:
    """Numbers of the rows picked before, (m,) in int64 on the candidates' device."""
    rows = torch.as_tensor([] if chosen is None else chosen, device=candidates.device).detach()
    if not rows.numel():
        return rows.new_zeros(0, dtype=torch.int64)
    if rows.ndim != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        raise ValueError(
            f"chosen must be row numbers, (m,), got {rows.dtype} {tuple(rows.shape)}. For a mask "
            "pass mask.nonzero()[:, 0]."
        )
    if bool((rows < 0).any()) or bool((rows >= len(candidates)).any()):
        raise ValueError(
            f"chosen must lie in 0..{len(candidates) - 1}, got {int(rows.min())} to "
            f"{int(rows.max())}."
        )
    distinct = len(set(rows.tolist()))
    if distinct < len(rows):
        raise ValueError(
            f"chosen must not repeat a row, got {len(rows)} rows of which {distinct} differ. Pass "
            "chosen.unique()."
        )
    return rows.long()


def _check_number(n: int, candidates: Tensor, chosen_rows: Tensor) -> None:
    """Refuse to pick none, or more candidates than are free."""
    free = len(candidates) - len(chosen_rows)
    if 1 <= n <= free:
        return
    already = ""
    if len(chosen_rows):
        already = f" ({len(chosen_rows)} of {len(candidates)} are already chosen)"
    raise ValueError(
        f"n must lie in 1..{free}, the number of candidates{already}; got {n}. Ask for fewer "
        "rows, or pass more candidates."
    )


class _SquaredNorms:
    """|A^T z_j|^2 of all rows, changed pick by pick as A is.

    Differences lose digits. A value that has fallen to a thousandth of its largest since it was
    last computed is computed again from A, as a sum of squares: rounding stays near 1e-12 of each
    value, and nothing becomes negative, so nothing is clamped.

    Args:
        rows: The whitened rows z, (N, D).
        *factors: Matrices whose product is A; none for the identity.

    Attributes:
        values: The squared norms, (N,).
    """

    def __init__(self, rows: Tensor, *factors: Tensor) -> None:
        self.rows = rows
        blocks = torch.split(rows, BLOCK)
        self.values = torch.cat([_squared_norms(block, factors) for block in blocks])
        self._largest = self.values.clone()

    def lower(self, by: Tensor, *factors: Tensor) -> None:
        """Subtract, after A has changed.

        Args:
            by: What to subtract from each value, (N,).
            *factors: Matrices whose product is the new A.
        """
        self.values -= by
        (fallen,) = (self.values < _CANCELLATION * self._largest).nonzero(as_tuple=True)
        if len(fallen):
            for indices in torch.split(fallen, BLOCK):
                computed = _squared_norms(self.rows[indices], factors)
                self.values[indices] = computed
                self._largest[indices] = computed
        torch.maximum(self._largest, self.values, out=self._largest)


class _Step(NamedTuple):
    r"""How a pick s changed the candidates.

    Attributes:
        p: $S^T z_s$, (D,), with S before the pick.
        products: $z_j \cdot u$ of all rows with $u = S p$, (N,).
        k: Factor of $u u^T$ in the change of M.
        h: Factor of $p p^T$ in the change of S.
    """

    p: Tensor
    products: Tensor
    k: Tensor
    h: Tensor


class _Candidates:
    r"""The candidates after some picks, with gains by information, $\tfrac12 \log(1 + w_j q_j)$.

    Args:
        rows: The whitened rows z, (N, D).
        weights: The loss weights with which rows would enter the Gram, (N,).

    Attributes:
        root: S with $M = S S^\top$, (D, D).
        quadratic: $q_j = |S^\top z_j|^2$ of all candidates.
    """

    def __init__(self, rows: Tensor, weights: Tensor) -> None:
        self.rows = rows
        self.weights = weights
        self.root = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        self.quadratic = _SquaredNorms(rows)

    def gains(self) -> Tensor:
        """What each candidate would gain as the next pick, (N,)."""
        return torch.log1p(self.weights * self.quadratic.values) / 2

    def add(self, pick: int) -> _Step:
        """Add a candidate to the Gram: $S' = S (1 - h p p^T)$, $M' = M - k u u^T$, u = S p."""
        w = self.weights[pick]
        p = self.root.mT @ self.rows[pick]
        stretch = (1 + w * p.square().sum()).sqrt()
        u = self.root @ p
        products = self.rows @ u
        k = w / stretch.square()
        # h = (1 - 1 / stretch) / |p|^2, without the difference.
        h = w / (stretch * (1 + stretch))
        self.root -= h * torch.outer(u, p)
        self.quadratic.lower(k * products.square(), self.root)
        return _Step(p=p, products=products, k=k, h=h)


class _TotalVariance(_Candidates):
    r"""Gains $w_j a_j / (1 + w_j q_j)$ with $a_j = z_j^\top M C M z_j$, $C = \sum_i z_i z_i^\top$.

    With $A A^\top = S^\top C S$, $a_j = |(S A)^\top z_j|^2$; a pick shrinks A as it shrinks S.

    Args:
        rows: The whitened rows z of the candidates, (N, D).
        weights: The loss weights with which rows would enter the Gram, (N,).
        cared_rows: The rows whose variance is to shrink, whitened in the same way, (M, D).

    Attributes:
        half: A, (D, M) or (D, D), half of the product $A A^\top$.
        squares: $a_j$ of all candidates.
    """

    def __init__(self, rows: Tensor, weights: Tensor, cared_rows: Tensor) -> None:
        super().__init__(rows, weights)
        self.half = _square_root(cared_rows)
        self.squares = _SquaredNorms(rows, self.half)

    def gains(self) -> Tensor:
        """What each candidate would take off the total variance as the next pick, (N,)."""
        return self.weights * self.squares.values / (1 + self.weights * self.quadratic.values)

    def add(self, pick: int) -> _Step:
        r"""Add a candidate to the Gram, and shrink A as S shrinks.

        From $M' = M - k u u^T$ follows
        $a' = a - 2 k (z \cdot u) (z \cdot M C u) + k^2 (z \cdot u)^2 u^T C u$, where
        $u^T C u = |A^T p|^2$ and $M C u = S A A^T p$.
        """
        half_p = self.half.mT @ (self.root.mT @ self.rows[pick])  # A^T p
        partners = self.rows @ (self.root @ (self.half @ half_p))  # z . M C u
        step = super().add(pick)
        self.half -= step.h * torch.outer(step.p, half_p)
        decrease = (
            step.k * step.products * (2 * partners - step.k * half_p.square().sum() * step.products)
        )
        self.squares.lower(decrease, self.root, self.half)
        return step


def _square_root(rows: Tensor) -> Tensor:
    r"""A with $A A^\top$ = rows^T rows, (D, M) or (D, D), whichever is smaller.

    A (D, D) root comes from the eigenvalues of rows^T rows; those that rounding made negative count
    as zero. Products in blocks suit a busy machine, where a QR factorisation waits for all threads
    at every column.
    """
    if len(rows) <= rows.shape[1]:
        return rows.mT.clone()
    total = rows.new_zeros(rows.shape[1], rows.shape[1])
    for block in torch.split(rows, BLOCK):
        total.addmm_(block.mT, block)
    eigenvalues, eigenvectors = torch.linalg.eigh(total)
    root: Tensor = eigenvectors * eigenvalues.clamp(min=0).sqrt()
    return root


def _squared_norms(rows: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    """The squared norms of rows (n, D) times the product of some matrices, (n,)."""
    for factor in factors:
        rows = rows @ factor
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.square()
