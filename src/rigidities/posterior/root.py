r"""A root of the Gram, for features so ill-conditioned that their Gram loses them.

`RootGram` holds an upper triangular R with $R^\top R = G = \sum_i w_i f_i f_i^\top$. Each update
factorises R and the new rows together, $R \leftarrow \mathrm{qr}([R; W^{1/2} F])$. G is never
formed, so variances err by machine epsilon times the condition number of F, not times its square
(Golub and Van Loan, Matrix Computations, 5.3 and 6.5).

Rows with the root $R_0$ are taken out by $R' = (I - S^\top S)^{1/2} R$ with $S = R_0 R^{-1}$.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .gram import Gram, PrecisionLike, check_finite
from .memory import require_memory

_BLOCK_NUMBERS = 1 << 26
"""Largest number of entries in the rows of an update, half a GiB in float64."""

_ROUNDING = 1e-12
"""Tolerance of a removal, per feature, as a share of the largest eigenvalue.

Rows that are taken out may exceed the rows that are there by this much.
"""


class RootGram(Gram):
    """A Gram that holds R instead of G; see `Gram` for arguments and attributes.

    It costs a few times more than a Gram, and merges only with other `RootGram`s.

    Examples:
        >>> gram = RootGram(2)
        >>> gram.update(torch.tensor([[3.0, 0.0], [4.0, 5.0]]))
        >>> gram.matrix.round().tolist(), gram.count
        ([[25.0, 20.0], [20.0, 25.0]], 2)
    """

    stored: ClassVar[str] = "root"
    copies: ClassVar[int] = 8

    @staticmethod
    def preferred_rows(width: int) -> int:
        """Least number of rows that an update should have.

        A factorisation costs least per row with twice as many rows as columns; for very wide
        features these would take much memory.
        """
        return max(512, min(2 * width, _BLOCK_NUMBERS // width))

    @property
    def root(self) -> Tensor:
        """R, (D, D) or (T, D, D), float64."""
        return self._upper

    @property
    def matrix(self) -> Tensor:
        """The matrix $R^T R$, (D, D) or (T, D, D), float64."""
        matrix = self.root.mT @ self.root
        return (matrix + matrix.mT) / 2

    @property
    def diagonal(self) -> Tensor:
        """The diagonal of the matrix, (D,) or (T, D)."""
        return self.root.square().sum(-2)

    def eigenbasis(self, penalty: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, and eigenvectors of the matrix plus a penalty.

        They are the squared singular values and the right singular vectors of R, with the
        penalty's root below it.
        """
        rows = self.root
        check_finite(rows)
        if penalty is not None:
            values, vectors = torch.linalg.eigh(penalty)
            penalty_root = (vectors * values.clamp(min=0).sqrt()).mT
            rows = triangle(torch.cat([rows, penalty_root.expand_as(rows)], dim=-2))
        require_memory(7, self.width, self.targets, self.device)
        _, singular, right = torch.linalg.svd(rows, full_matrices=False)
        return singular.square().flip(-1), right.mT.flip(-1)

    def _product_dtype(self, features: Tensor) -> torch.dtype:
        """Always float64: a root in fewer digits would gain nothing."""
        return torch.float64

    def _rows_at_once(self, features: Tensor) -> int:
        """One factorisation takes up to twice its preferred number of rows."""
        return 2 * self.preferred_rows(self.width)

    def _add_rows(self, upper: Tensor, rows: Tensor) -> None:
        """Factorise R and the new rows together."""
        upper.copy_(triangle(torch.cat([upper, rows])))

    def _add_sums(self, other: Gram) -> None:
        """Factorise both roots together."""
        self._upper = triangle(torch.cat([self._upper, other._upper], dim=-2))

    def _add_scaled(self, sums: Tensor, factor: float) -> None:
        """Factorise R and the root of one target, times the root of the factor, together."""
        self._add_rows(self._upper, factor**0.5 * sums)

    def _take_out(self, other: Gram) -> bool:
        """Take another's rows out of R, and return whether more was taken out than was there.

        R has no inverse along directions in which it has no rows. Rows that are taken out must have
        no component along these directions.
        """
        # R = U diag(singular) right; work in the coordinates of the rows of `right`.
        _, singular, right = torch.linalg.svd(self._upper, full_matrices=False)
        largest = singular[..., :1]
        spanned = singular > self.width * torch.finfo(torch.float64).eps * largest
        components = other._upper @ right.mT
        share = components / torch.where(spanned, singular, torch.inf).unsqueeze(-2)  # S
        values, vectors = torch.linalg.eigh(torch.eye(self.width).to(share) - share.mT @ share)
        # With V the eigenvectors, R' = diag(values)^(1/2) V^T diag(singular) right, up to a
        # rotation from the left, which does not change R'^T R'.
        rows = vectors.mT * torch.where(spanned, singular, 0.0).unsqueeze(-2)  # V^T diag(singular)
        # What was taken out beyond what was there, within the span and outside it.
        missing = (-values.clamp(max=0) * rows.square().sum(-1)).amax(-1)
        outside = torch.where(spanned.unsqueeze(-2), 0.0, components).square().sum((-2, -1))
        self._upper = triangle(values.clamp(min=0).sqrt().unsqueeze(-1) * (rows @ right))
        tolerance = self.width * _ROUNDING * largest[..., 0].square()
        return bool((torch.maximum(missing, outside) > tolerance).any())

    def _stored_sums(self) -> Tensor:
        """The root itself."""
        return self._upper


def gram_kind(method: str, precision: PrecisionLike = "auto") -> type[Gram]:
    """The class that accumulates the rows of a fit.

    Args:
        method: "gram" or "qr".
        precision: The precision of the products that the user chose.

    Raises:
        ValueError: There is no such method, or it has no such precision.
    """
    if method not in ("gram", "qr"):
        raise ValueError(f"method must be 'gram' or 'qr', got {method!r}.")
    if method == "qr" and precision == "mixed":
        raise ValueError("method='qr' keeps full precision. precision='mixed' needs method='gram'.")
    return Gram if method == "gram" else RootGram


def triangle(rows: Tensor) -> Tensor:
    """R of a QR factorisation, (..., n, D) -> (..., D, D), for n of at least D."""
    factor: Tensor = torch.linalg.qr(rows, mode="r").R
    return factor
