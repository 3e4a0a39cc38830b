r"""The posterior of the readout weights: variances from the Gram's eigenbasis.

With $G + \Sigma = V \,\mathrm{diag}(\lambda)\, V^\top$ ($\Sigma$ an optional penalty matrix),
ridge $s = \varsigma^2$ and scale $\alpha$

$$ q(f) = f^\top (G + \Sigma + s I)^{-1} f = \sum_j \frac{(v_j^\top f)^2}{\lambda_j + s},
   \qquad \sigma^2(f) = \alpha^2 q(f), \qquad R(f) = 1 / q(f) $$

(the paper's last-layer prediction rigidity). `Posterior.from_gram` factorises once. The eigenbasis
is kept, so another ridge costs nothing; the targets share it, each with a scale of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from .draws import standard_normal
from .gram import Gram
from .memory import require_memory

__all__ = ["Posterior"]

LARGEST_ROUNDING = 1e-3
"""Relative rounding error beyond which a variance is refused, or computed in more digits."""

TruncationForm = Literal["inverse", "complement"]


@dataclass(frozen=True)
class Posterior:
    r"""The Gaussian $N(0, \alpha^2 (G + \varsigma^2 I)^{-1})$ of weights about the trained ones.

    Attributes:
        eigenvalues: Ascending, (k,), or (T, k) with one Gram per target.
        eigenvectors: In columns, (D, k) or (T, D, k).
        ridge: $\varsigma^2$.
        scale: $\alpha$, a scalar or (K,) with one entry per target.
        complement: Whether directions outside the eigenvectors count with the ridge alone.
        error: Worst-case relative error of a truncation; see `truncate`.
        rounding_error: Bound on the error |dG| of G that products of mixed precision cause;
            otherwise 0.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    ridge: float
    scale: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    complement: bool = False
    error: float = 0.0
    rounding_error: float = 0.0

    @classmethod
    def from_gram(cls, gram: Gram, ridge: float, penalty: Tensor | None = None) -> Posterior:
        r"""Factorise $G$ (+ penalty) once.

        Args:
            gram: The accumulated rows.
            ridge: $\varsigma^2 \ge 0$, added to the diagonal.
            penalty: Any symmetric positive semi-definite (D, D) matrix, added to G.

        Raises:
            ValueError: The sum is singular at this ridge, or not positive semi-definite.

        Examples:
            >>> gram = Gram(1)
            >>> gram.update(torch.tensor([[1.0], [2.0]]))
            >>> Posterior.from_gram(gram, ridge=5.0).variance(torch.tensor([[10.0]])).item()
            10.0
        """
        check_ridge(ridge)
        if penalty is not None:
            penalty = _checked_penalty(penalty, gram)
        eigenvalues, eigenvectors = gram.eigenbasis(penalty)
        posterior = cls(
            eigenvalues=_without_negatives(eigenvalues, gram.rounding_error),
            eigenvectors=eigenvectors,
            ridge=0.0,
            rounding_error=gram.rounding_error,
        )
        try:
            return posterior.with_ridge(ridge)
        except ValueError as error:
            if gram.count >= gram.width:
                raise
            raise ValueError(
                f"Gram is singular: {gram.count} samples for {gram.width} features and "
                f"ridge={ridge:g}. Pass ridge > 0 or more data."
            ) from error

    @property
    def width(self) -> int:
        """Number of features D."""
        return self.eigenvectors.shape[-2]

    @property
    def rank(self) -> int:
        """Number of eigenvectors, fewer than the width after a truncation."""
        return self.eigenvectors.shape[-1]

    @property
    def precisions(self) -> Tensor:
        r"""Eigenvalues of $G + \varsigma^2 I$, ascending."""
        return self.eigenvalues + self.ridge

    @property
    def condition(self) -> float:
        r"""Condition number of $G + \varsigma^2 I$; with one Gram per target, the largest."""
        smallest = self.ridge if self.complement else self.precisions[..., 0]
        return float((self.precisions[..., -1] / smallest).max())

    @property
    def float64_error(self) -> float:
        """Relative error of the variances that float64 sums and their factorisation cause."""
        return torch.finfo(torch.float64).eps * self.condition

    @property
    def doubt(self) -> float:
        r"""Bound on the relative error of variances that the error of G causes.

        It is $|dG| / (\lambda_{\min} + s)$, and zero if the products had double precision.
        """
        if not self.rounding_error:
            return 0.0
        smallest = self.ridge if self.complement else float(self.precisions[..., 0].min())
        return self.rounding_error / smallest

    @property
    def effective_rank(self) -> float:
        r"""$\sum_j \lambda_j / (\lambda_j + \varsigma^2)$: directions that the data determine."""
        return float((self.eigenvalues / self.precisions).sum(-1).mean())

    def with_ridge(self, ridge: float) -> Posterior:
        """The same eigenbasis with another ridge, without a new factorisation.

        Raises:
            ValueError: The Gram is singular at this ridge, or the posterior is truncated.
        """
        check_ridge(ridge)
        self._check_whole("Choose the ridge first, then truncate.")
        smallest = self.eigenvalues[..., 0]
        largest = self.eigenvalues[..., -1]
        # A Gram's eigenvalues are rounded relative to the largest.
        share = torch.finfo(torch.float64).eps * max(self.width, 1 / LARGEST_ROUNDING)
        floor = share * largest
        if bool((smallest + ridge <= floor).any()):
            raise ValueError(
                f"The Gram is singular in float64 at ridge={ridge:g}: its eigenvalues range from "
                f"{float(smallest.min()):.3g} to {float(largest.max()):.3g}, and any below "
                f"{float(floor.max()):.3g} is rounding. Pass a ridge above that, standardise "
                "the features, or pass more data."
            )
        return replace(self, ridge=float(ridge))

    def with_scale(self, scale: Tensor | float) -> Posterior:
        """The same posterior with another scale (a number, or one entry per target)."""
        scale = torch.as_tensor(scale, dtype=torch.float64, device=self.eigenvalues.device)
        return replace(self, scale=scale)

    def to(self, device: torch.device | str) -> Posterior:
        """The same posterior on another device."""
        return replace(
            self,
            eigenvalues=self.eigenvalues.to(device),
            eigenvectors=self.eigenvectors.to(device),
            scale=self.scale.to(device),
        )

    def projections(self, features: Tensor) -> Tensor:
        """Components $v_j^T f$ in float64: (..., D) -> (..., k), or (..., T, k) per target.

        Raises:
            ValueError: The features have another width.
        """
        if features.shape[-1] != self.width:
            raise ValueError(
                f"features must have {self.width} columns, got {tuple(features.shape)}."
            )
        features = features.to(self.eigenvectors)
        if self.eigenvectors.ndim == 2:
            return features @ self.eigenvectors
        # Features of three dimensions differ between the targets.
        equation = "...d,tdk->...tk" if features.ndim < 3 else "...td,tdk->...tk"
        return torch.einsum(equation, features, self.eigenvectors)

    def quadratic(self, features: Tensor) -> Tensor:
        r"""$q = f^T (G + \varsigma^2 I)^{-1} f$, unscaled: (..., D) -> (...), or (..., T)."""
        components = self.projections(features)
        inside = (components.square() / self.precisions).sum(-1)
        if not self.complement:
            return inside
        outside = self._residual(features, components).square().sum(-1) / self.ridge
        return inside + outside

    def variance(self, features: Tensor) -> Tensor:
        r"""$\alpha^2 q$: (..., D) -> (...), with the targets last where scale has several.

        Features (..., K, D) that differ between the K targets of scale give (..., K) too.
        """
        q = self.quadratic(features)
        if self.scale.ndim and self.eigenvalues.ndim == 1:
            # The targets share q, unless each has features of its own.
            targets = self.scale.shape[0]
            has_targets = features.ndim > 2 and features.shape[-2] == targets
            if not has_targets:
                q = q[..., None]
        return self.scale.square() * q

    def rigidity(self, features: Tensor) -> Tensor:
        """The paper's prediction rigidity $R = 1/q$, unscaled."""
        return 1 / self.quadratic(features)

    def covariance(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        r"""$\alpha^2 f^\top (G + \varsigma^2 I)^{-1} f'$ between rows: (N, D), (M, D) -> (N, M).

        With several targets it is (K, N, M): the weights of different targets are independent.
        """
        a = self.whitened(left)
        b = a if right is None else self.whitened(right)
        if self.eigenvalues.ndim > 1:
            # Targets first, (T, N, k).
            a = a.movedim(-2, 0)
            b = b.movedim(-2, 0)
        scale = self.scale[:, None, None] if self.scale.ndim else self.scale
        return scale.square() * (a @ b.mT)

    def whitened(self, features: Tensor) -> Tensor:
        r"""Rows z with $z \cdot z' = f^T (G + \varsigma^2 I)^{-1} f'$."""
        components = self.projections(features)
        inside = components / self.precisions.sqrt()
        if not self.complement:
            return inside
        outside = self._residual(features, components) / self.ridge**0.5
        return torch.cat([inside, outside], dim=-1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        r"""Draw weight deviations from $N(0, \alpha^2 (G + \varsigma^2 I)^{-1})$.

        Args:
            n: Number of draws.
            generator: The random generator of the draws; None for torch's own.

        Returns:
            (n, D), or (n, K, D) with several targets, each of which has its own weights.
        """
        several = self.scale.ndim > 0 or self.eigenvalues.ndim > 1
        targets = max(self.scale.numel(), self.eigenvalues[..., 0].numel())
        device = self.eigenvectors.device
        z = standard_normal((targets, n, self.rank), device, generator)
        draws = (z / self.precisions.sqrt().unsqueeze(-2)) @ self.eigenvectors.mT
        if self.complement:
            noise = standard_normal((targets, n, self.width), device, generator)
            draws = draws + self._residual(noise, noise @ self.eigenvectors) / self.ridge**0.5
        draws = draws * self.scale.reshape(-1, 1, 1)
        return draws.movedim(0, 1) if several else draws[0]

    def truncate(
        self,
        rank: int | None = None,
        *,
        accuracy: float | None = None,
        form: TruncationForm = "complement",
    ) -> Posterior:
        r"""Keep only `rank` eigenvectors, so that a prediction costs D x rank multiplications.

        `form="inverse"` is the paper's: the largest eigenvalues of the *inverse* (the smallest
        of G), a lower bound on q. What it drops is at most `error` times the largest variance
        that a feature vector of the same length can have,
        $(\lambda_{\min} + s) / (\lambda_{\mathrm{dropped}} + s)$.
        `form="complement"` keeps the largest eigenvalues of G and treats the rest as
        $\lambda = 0$ (the ridge alone), an upper bound on q. It overestimates any variance by at
        most the factor 1 + `error`, $\lambda_{\mathrm{dropped}} / s$.

        Args:
            rank: Number of eigenvectors to keep.
            accuracy: The largest worst-case `error` to accept, instead of a rank. The smallest rank
                that reaches it is used.
            form: As above.

        Raises:
            ValueError: Both or neither of rank and accuracy were given, the rank is out of range,
                or this posterior cannot be truncated in this form.
        """
        if (rank is None) == (accuracy is None):
            raise ValueError("Pass either a rank or an accuracy.")
        self._check_whole("Truncate the whole posterior, and only once.")
        if self.eigenvalues.ndim > 1:
            raise ValueError(
                "Each target has its own Gram here, but truncation needs a shared one."
            )
        if form == "complement" and self.ridge == 0:
            raise ValueError("form='complement' needs ridge > 0, because it divides by the ridge.")
        lam = self.eigenvalues
        s = self.ridge
        errors = (lam[0] + s) / (lam + s) if form == "inverse" else lam.flip(0) / s
        # Entry r is the error with r eigenvectors; all of them leave none.
        errors = torch.cat([errors, errors.new_zeros(1)])
        if accuracy is not None:
            rank = max(1, int((errors > accuracy).sum()))
        if rank is None or not 0 < rank <= self.rank:
            raise ValueError(f"rank must lie in 1..{self.rank}, got {rank}.")
        columns = slice(None, rank) if form == "inverse" else slice(self.rank - rank, None)
        return replace(
            self,
            eigenvalues=self.eigenvalues[columns],
            eigenvectors=self.eigenvectors[:, columns],
            complement=form == "complement" and rank < self.width,
            error=float(errors[rank]),
        )

    @cached_property
    def factor(self) -> Tensor:
        r"""Upper triangular R with $q = |R f|^2$, (D, D) or (T, D, D).

        It comes from a QR factorisation of the whitened eigenbasis, so that rounding errors grow
        only with the root of the Gram's condition number. A triangular product costs half of a full
        one.
        """
        self._check_whole("It has no square factor. Use quadratic().")
        targets = len(self.eigenvectors) if self.eigenvectors.ndim == 3 else None
        require_memory(3, self.width, targets, self.eigenvectors.device)
        whitener = self.eigenvectors / self.precisions.sqrt().unsqueeze(-2)
        factor: Tensor = torch.linalg.qr(whitener.mT, mode="r").R
        return factor

    def _check_whole(self, remedy: str) -> None:
        """Refuse a truncated posterior."""
        if self.rank < self.width:
            raise ValueError(f"This posterior is truncated to rank {self.rank}. {remedy}")

    def _residual(self, features: Tensor, components: Tensor) -> Tensor:
        """The component of f outside the eigenvectors' span."""
        return features.to(self.eigenvectors) - components @ self.eigenvectors.mT


def check_ridge(ridge: float) -> None:
    """Refuse a ridge that is negative or not finite."""
    if not 0 <= ridge < float("inf"):
        raise ValueError(f"ridge must be finite and not negative, got {ridge}.")


def _without_negatives(eigenvalues: Tensor, rounding: float) -> Tensor:
    """Eigenvalues, with those that rounding made negative set to zero.

    Raises:
        ValueError: No eigenvalue is positive, or one is more negative than rounding explains.
    """
    largest = eigenvalues[..., -1:]
    if not bool((largest > 0).any()):
        raise ValueError(
            "The Gram matrix is zero: there are no rows, or all features are zero. Fit on data "
            "whose features vary."
        )
    tolerance = 1e-12 * eigenvalues.shape[-1] * largest + rounding
    if bool((eigenvalues < -tolerance).any()):
        raise ValueError(
            "The matrix is not positive semi-definite: its smallest eigenvalue is "
            f"{float(eigenvalues.min()):.3g}. This happens to a Gram if rows are removed that "
            "were never added, and to an invalid penalty."
        )
    return eigenvalues.clamp(min=0)


def _checked_penalty(penalty: Tensor, gram: Gram) -> Tensor:
    """A penalty in float64 on the Gram's device, if it is symmetric and positive semi-definite."""
    penalty = penalty.detach().to(gram.device, torch.float64)
    if tuple(penalty.shape) != (gram.width, gram.width):
        raise ValueError(
            f"penalty must be ({gram.width}, {gram.width}), got {tuple(penalty.shape)}."
        )
    if not torch.allclose(penalty, penalty.mT):
        raise ValueError("penalty must be symmetric. Pass (P + P.T) / 2.")
    if bool(torch.linalg.eigvalsh(penalty)[0] < -1e-9 * penalty.abs().max()):
        raise ValueError("penalty must be positive semi-definite.")
    return penalty
