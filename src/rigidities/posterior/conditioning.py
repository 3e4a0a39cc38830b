r"""Variances of candidates as picks among them enter the Gram, one rank-one change at a time.

Rows z are whitened: $z \cdot z' = f^\top M f'$ before the first pick. After it $M = S S^\top$ in
these coordinates, with S = 1 at first; a pick s of weight w shrinks S along $p = S^\top z_s$ by
$1 / \sqrt{1 + w |p|^2}$. The root S, unlike M itself, keeps its digits where a variance falls by
many decades. One product of the rows with a vector, $z_j \cdot u$ with $u = M z_s$, gives all
candidates' new variances.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK = 8192
"""Rows that are worked on at a time where a copy is made."""

_CANCELLATION = 1e-3
"""Fall of a running value, relative to its largest so far, at which it is computed anew."""


class SquaredNorms:
    """|A^T z_j|^2 of all rows, changed pick by pick as A is.

    Differences lose digits. A value that has fallen to a thousandth of its largest since it was
    last computed is computed anew from A, as a sum of squares: rounding stays near 1e-12 of each
    value, and nothing becomes negative, so nothing is clamped.
    """

    def __init__(self, rows: Tensor, *factors: Tensor) -> None:
        self.rows = rows
        self.values = torch.cat([_squared_norms(part, factors) for part in blocks(rows)])
        self._largest = self.values.clone()

    def lower(self, by: Tensor, *factors: Tensor) -> None:
        """Subtract; A is the product of the factors, which belong to the new values."""
        self.values -= by
        (fallen,) = (self.values < _CANCELLATION * self._largest).nonzero(as_tuple=True)
        for part in blocks(fallen):
            self.values[part] = self._largest[part] = _squared_norms(self.rows[part], factors)
        torch.maximum(self._largest, self.values, out=self._largest)


class Step(NamedTuple):
    """What a pick did: $S' = S (1 - h p p^T)$ and $M' = M - k u u^T$ with u = S p."""

    p: Tensor
    products: Tensor  # z_j . u of all rows
    k: Tensor
    h: Tensor


class Candidates:
    """q of all rows under the picks so far.

    Args:
        rows: (N, D), whitened.
        weights: (N,), with which they would enter the Gram.
    """

    def __init__(self, rows: Tensor, weights: Tensor) -> None:
        self.rows = rows
        self.weights = weights
        self.root = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        self.quadratic = SquaredNorms(rows)

    def add(self, pick: int) -> Step:
        """Let a row enter the Gram."""
        w, p = self.weights[pick], self.root.mT @ self.rows[pick]
        stretch = (1 + w * p.square().sum()).sqrt()
        u = self.root @ p
        products = self.rows @ u
        # h = (1 - 1 / stretch) / |p|^2, without the difference.
        k, h = w / stretch.square(), w / (stretch * (1 + stretch))
        self.root -= h * torch.outer(u, p)
        self.quadratic.lower(k * products.square(), self.root)
        return Step(p, products, k, h)


class Goal(Protocol):
    """What a pick should gain."""

    candidates: Candidates

    def gains(self) -> Tensor:
        """(N,), of each candidate if it came next."""

    def add(self, pick: int) -> None:
        """Let a row enter the Gram."""


class Information:
    r"""Gains $\tfrac12 \log(1 + w_j q_j)$."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates

    def gains(self) -> Tensor:
        """(N,)."""
        return torch.log1p(self.candidates.weights * self.candidates.quadratic.values) / 2

    def add(self, pick: int) -> None:
        """Let a row enter the Gram."""
        self.candidates.add(pick)


class TotalVariance:
    r"""Gains $w_j a_j / (1 + w_j q_j)$ with $a_j = z_j^\top M C M z_j$, $C = \sum_i z_i z_i^\top$.

    With $A A^\top = S^\top C S$, $a_j = |(S A)^\top z_j|^2$; a pick shrinks A as it shrinks S.

    Args:
        candidates: before any pick.
        cared: (M, D), the rows whose variance is to shrink, whitened alike.
    """

    def __init__(self, candidates: Candidates, cared: Tensor) -> None:
        self.candidates = candidates
        self.root = square_root(cared)  # A
        self.squares = SquaredNorms(candidates.rows, self.root)

    def gains(self) -> Tensor:
        """(N,)."""
        w, q = self.candidates.weights, self.candidates.quadratic.values
        return w * self.squares.values / (1 + w * q)

    def add(self, pick: int) -> None:
        """Let a row enter the Gram."""
        # M' = M - k u u^T, so a' = a - 2 k (z.u) (z.M C u) + k^2 (z.u)^2 u^T C u, where
        # u^T C u = |A^T p|^2 and M C u = S A A^T p.
        rows, root = self.candidates.rows, self.candidates.root
        seen = self.root.mT @ (root.mT @ rows[pick])  # A^T p
        partners = rows @ (root @ (self.root @ seen))  # z.M C u
        step = self.candidates.add(pick)
        self.root -= step.h * torch.outer(step.p, seen)
        by = step.k * step.products * (2 * partners - step.k * seen.square().sum() * step.products)
        self.squares.lower(by, self.candidates.root, self.root)


def square_root(rows: Tensor) -> Tensor:
    r"""A with $A A^\top$ = rows^T rows, (D, M) or (D, D), whichever is smaller.

    A (D, D) one comes from the eigenvalues of rows^T rows, of which those that rounding made
    negative count as zero. Products in blocks suit a busy machine, where a QR factorisation waits
    for all threads at every column.
    """
    if len(rows) <= rows.shape[1]:
        return rows.mT.clone()
    total = rows.new_zeros(rows.shape[1], rows.shape[1])
    for part in blocks(rows):
        total.addmm_(part.mT, part)
    eigenvalues, eigenvectors = torch.linalg.eigh(total)
    root: Tensor = eigenvectors * eigenvalues.clamp(min=0).sqrt()
    return root


def blocks(rows: Tensor) -> Iterator[Tensor]:
    """Slices of `BLOCK` rows."""
    for start in range(0, len(rows), BLOCK):
        yield rows[start : start + BLOCK]


def _squared_norms(rows: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    for factor in factors:
        rows = rows @ factor
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.square()
