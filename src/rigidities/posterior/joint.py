r"""The posterior of all targets' weights at once, and what it says of many outputs together.

Output m of target k is $y_{mk} = \ldots + f_{mk} \cdot w_k$. A posteriori

$$ \mathrm{Cov}(w_k, w_l) = \alpha_k \alpha_l\, \rho_{kl}\, (G + \varsigma^2 I)^{-1} $$

with $\rho$ the correlation of the residuals between targets that share one Gram (the matrix-normal
posterior of linear regression with correlated noise), ones where a single weight vector stands
behind all targets, and the identity where every target has a Gram of its own.

Weights are written in independent standard coordinates $\xi$, one block of D per column of the
root $L$ of $\rho = L L^\top$: $\;\delta w_k = \alpha_k \sum_j L_{kj} V (\lambda + s)^{-1/2} \xi_j$.
Only the epistemic part is meant here: noise does not correlate between predictions.

What predictions share may have a scale $\alpha_B$ below that of single predictions, $\alpha$. The
scale above is then $\alpha_B$. Each row x also has a deviation of the weights that it shares with
no other row (`RowDeviation`), from the same posterior with the squared scale
$\beta^2 = (\alpha^2 - \alpha_B^2)_+$:

$$ \mathrm{Cov}(y_k(x), y_l(x')) = \left( \alpha_{B,k} \alpha_{B,l} + 1[x = x'] \beta_k \beta_l
   \right) \rho_{kl}\, f_k(x)^\top (G + \varsigma^2 I)^{-1} f_l(x') $$

so that differences of targets at one row keep their error bar.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .gram import Gram
from .posterior import Posterior


@dataclass(frozen=True)
class JointPosterior:
    r"""Deviations of all weights from the trained ones: a centred Gaussian.

    Attributes:
        posterior: The posterior of one target's weights, with one scale per target; not truncated.
        correlation: $\rho$, (K, K).
        row_deviation: What single predictions do not share; None for nothing.

    Examples:
        >>> gram = Gram(1)
        >>> gram.update(torch.tensor([[1.0], [2.0]]))
        >>> post = Posterior.from_gram(gram, ridge=5.0).with_scale(torch.tensor([2.0, 1.0]))
        >>> joint = JointPosterior(post, torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double())
        >>> joint.covariance(torch.tensor([[10.0]]))[0, :, 0].round()
        tensor([[40., 10.],
                [10., 10.]], dtype=torch.float64)
    """

    posterior: Posterior
    correlation: Tensor
    row_deviation: RowDeviation | None = None

    @classmethod
    def of(
        cls, posterior: Posterior, gram: Gram, layout: str, shared: Tensor | None = None
    ) -> JointPosterior:
        r"""The joint posterior of a fit.

        Args:
            posterior: The posterior of one target's weights, with the scales $\alpha$ of single
                predictions.
            gram: The Gram of the fit, with the residuals' moments.
            layout: The layout of the features (see `readout.readout`); in "joint" one weight
                vector serves all targets.
            shared: The scale $\alpha_B$ of what predictions share, (K,); None where it is
                $\alpha$ itself.
        """
        targets = posterior.scale.numel()
        if layout == "joint":
            rho = torch.ones(targets, targets, dtype=torch.float64, device=gram.device)
        else:
            rho = residual_correlation(gram, targets)
        if shared is None:
            shared = posterior.scale
        joint = cls(posterior.with_scale(shared), rho)
        beta = (posterior.scale.square() - shared.square()).clamp(min=0).sqrt()
        if not bool(beta.any()):
            return joint
        factor = posterior.factor.reshape(-1, posterior.width, posterior.width)
        mixing = beta.diag() if layout == "joint" else beta[:, None] * joint.root
        return replace(joint, row_deviation=RowDeviation(factor, mixing))

    @property
    def targets(self) -> int:
        """Number of targets K."""
        return self.correlation.shape[0]

    @property
    def coordinates(self) -> int:
        """Number of independent standard coordinates."""
        return self.root.shape[1] * self.posterior.width

    @cached_property
    def root(self) -> Tensor:
        r"""$L$ with $L L^\top = \rho$, (K, rank of rho)."""
        if torch.equal(self.correlation, torch.eye(self.targets).to(self.correlation)):
            return self.correlation
        values, vectors = torch.linalg.eigh(self.correlation)
        positive = values > 1e-12 * values[-1]
        return torch.mul(vectors[:, positive], values[positive].sqrt())

    @cached_property
    def scale(self) -> Tensor:
        """The scale of each target, (K,)."""
        return self.posterior.scale.reshape(-1)

    def weights(self, coordinates: Tensor) -> Tensor:
        """Weight deviations (n, K, D) of points (n, coordinates) in standard coordinates."""
        z = coordinates.reshape(len(coordinates), -1, self.posterior.width)
        z = z.to(self.root) / self.posterior.precisions.sqrt()
        # (n, j, r) -> (n, j, D): each target in its own basis where it has one.
        by_block = torch.einsum("njr,jdr->njd", z, self._basis)
        return self.scale[:, None] * torch.einsum("kj,njd->nkd", self.root, by_block)

    def rows(self, cotangents: Tensor, features: Tensor) -> Tensor:
        r"""Derivatives of Q quantities by the standard coordinates.

        The covariance of the quantities is these rows times their transpose. The rows of batches
        add up.

        Args:
            cotangents: Derivatives of the quantities by the outputs, (Q, M, K).
            features: (M, D), or (M, K, D) where they differ between targets.

        Returns:
            (Q, coordinates) in float64.
        """
        cotangents = cotangents.to(torch.float64) * self.scale
        features = features.to(torch.float64)
        if features.ndim == 2:
            quantities, outputs, targets = cotangents.shape
            flat = cotangents.mT.reshape(quantities * targets, outputs)
            by_weights = (flat @ features).reshape(quantities, targets, -1)
        else:
            by_weights = torch.einsum("qmk,mkd->qkd", cotangents, features)
        by_block = torch.einsum("qkd,kj->qjd", by_weights, self.root)
        in_basis = torch.einsum("qjd,jdr->qjr", by_block, self._basis)
        return (in_basis / self.posterior.precisions.sqrt()).flatten(1)

    @staticmethod
    def response(features: Tensor, deviations: Tensor) -> Tensor:
        """Change (n, M, K) of the outputs for weight deviations (n, K, D)."""
        deviations = deviations.to(features)
        if features.ndim == 3:
            return torch.einsum("nkd,mkd->nkm", deviations, features).mT
        members, targets, width = deviations.shape
        # Members and targets first in memory: the layout that most outputs are read in.
        flat = deviations.reshape(members * targets, width) @ features.mT
        return flat.reshape(members, targets, -1).mT

    def covariance(
        self, left: Tensor, right: Tensor | None = None, same: Tensor | None = None
    ) -> Tensor:
        """Covariance between the outputs with these features, (M, K, M', K).

        Args:
            left: Features (M, D) or (M, K, D).
            right: Features of M' other rows; None for the same ones.
            same: Which pairs of rows are the same row, (M, M'): these also share their
                `row_deviation`. None leaves the row deviations out.
        """
        a = self.posterior.whitened(left)
        b = a if right is None else self.posterior.whitened(right)
        between = (self.correlation * self.scale[:, None] * self.scale)[:, None, :]
        if same is not None and self.row_deviation is not None:
            # The norm of a row of B is beta, since rho has a unit diagonal.
            beta = torch.linalg.vector_norm(self.row_deviation.mixing, dim=1)
            between_same = (self.correlation * beta[:, None] * beta)[:, None, :]
            between = between + same[:, None, :, None] * between_same
        if a.ndim == 2:
            return (a @ b.mT)[:, None, :, None] * between
        return torch.einsum("mkd,nld->mknl", a, b) * between

    @property
    def _basis(self) -> Tensor:
        """The eigenvectors that belong to each block of coordinates, (blocks, D, D)."""
        vectors = self.posterior.eigenvectors
        self.posterior._check_whole("Joint predictions need the whole posterior.")
        if vectors.ndim == 3:
            return vectors
        return vectors.expand(self.root.shape[1], -1, -1)


class RowDeviation(NamedTuple):
    r"""What a prediction's error shares with no other row: $B S_m z$ at row m, with z ~ N(0, I).

    Attributes:
        factor: R with $q = |R f|^2$, (1, D, D), or (T, D, D) with one Gram per target.
        mixing: $B_{kj} = \beta_k L_{kj}$, (K, J). Where one weight vector serves all targets it is
            the diagonal matrix of $\beta$.
    """

    factor: Tensor
    mixing: Tensor

    def roots(self, features: Tensor) -> Tensor:
        r"""S of each row: $\sqrt q$, (M, 1 or K).

        Where one weight vector serves all targets, S is the symmetric root of the matrix
        $f_k^\top (G + \varsigma^2 I)^{-1} f_l$, (M, K, K).

        Args:
            features: (M, D), or (M, K, D) where they differ between targets.
        """
        rows = features.detach().to(self.factor)
        with_targets = rows[:, None] if rows.ndim == 2 else rows
        z = torch.einsum("mtd,tcd->mtc", with_targets, self.factor)
        if rows.ndim == 2 or len(self.factor) > 1:
            return z.square().sum(-1).sqrt()
        values, vectors = torch.linalg.eigh(z @ z.mT)
        # The symmetric root is stable: rounding may rotate the eigenvectors of close eigenvalues,
        # but not the root.
        return torch.matmul(vectors * values.clamp(min=0).sqrt()[:, None], vectors.mT)

    def moved(self, roots: Tensor, z: Tensor) -> Tensor:
        """B S z: points (n, M, J) -> changes (n, M, K) of the outputs."""
        return self.stretched(roots, z) @ self.mixing.mT

    @staticmethod
    def stretched(roots: Tensor, z: Tensor) -> Tensor:
        """S z, (n, M, J). S is symmetric, so this is also what its transpose gives."""
        if roots.ndim == 2:
            return roots * z
        return torch.einsum("mkj,nmj->nmk", roots, z)


def residual_correlation(gram: Gram, targets: int) -> Tensor:
    """Correlation (K, K) of the training residuals between targets that share one Gram.

    It is the identity where each target has a Gram of its own, and where the correlation is not
    known: no targets were given, or too many to keep all pairs.
    """
    identity = torch.eye(targets, dtype=torch.float64, device=gram.device)
    square = gram.square
    if gram.targets is not None or square is None or square.ndim != 2 or len(square) != targets:
        return identity
    size = square.diagonal().clamp(min=0).sqrt()
    # A target without residuals correlates with nothing.
    size = torch.where(size > 0, size, torch.inf)
    correlation = (square / size[:, None] / size).clamp(-1, 1)
    return torch.where(identity > 0, identity, correlation)
