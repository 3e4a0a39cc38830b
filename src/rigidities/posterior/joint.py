r"""The posterior of all targets' weights at once, and what it says of many outputs together.

Output m of target k is $y_{mk} = \ldots + f_{mk} \cdot w_k$. A posteriori

$$ \mathrm{Cov}(w_k, w_l) = \alpha_k \alpha_l\, \rho_{kl}\, (G + \varsigma^2 I)^{-1} $$

with $\rho$ the correlation of the residuals between targets that share one Gram (the matrix-normal
posterior of linear regression with correlated noise), ones where a single weight vector stands
behind all targets, and the identity where every target has a Gram of its own.

Weights are written in independent standard coordinates $\xi$, one block of D per column of the
root $L$ of $\rho = L L^\top$: $\;\delta w_k = \alpha_k \sum_j L_{kj} V (\lambda + s)^{-1/2} \xi_j$.
Only the epistemic part is meant here: noise does not correlate between predictions.

Where what predictions share has a scale $\alpha_B$ below that of single ones, the scale above is
$\alpha_B$. Each row x then has a deviation of the weights of its own too, independent of all
others, from the same posterior with $\beta^2 = (\alpha^2 - \alpha_B^2)_+$ for its squared scale:

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
        posterior: of one target's weights, with one scale per target; not truncated.
        correlation: $\rho$, (K, K).
        own: what single predictions do not share; None for nothing.

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
    own: OwnPart | None = None

    @classmethod
    def of(
        cls, posterior: Posterior, gram: Gram, layout: str, shared: Tensor | None = None
    ) -> JointPosterior:
        """For the features' layout (see `cases`); `shared` is the scale (K,) of what rows share."""
        targets = posterior.scale.numel()
        if layout == "joint":
            rho = torch.ones(targets, targets, dtype=torch.float64, device=gram.device)
        else:
            rho = residual_correlation(gram, targets)
        shared = posterior.scale if shared is None else shared
        joint = cls(posterior.with_scale(shared), rho)
        own = (posterior.scale.square() - shared.square()).clamp(min=0).sqrt()
        if not bool(own.any()):
            return joint
        factor = posterior.factor.reshape(-1, posterior.width, posterior.width)
        mixing = own.diag() if layout == "joint" else own[:, None] * joint.root
        return replace(joint, own=OwnPart(factor, mixing))

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
        kept = values > 1e-12 * values[-1]
        return torch.mul(vectors[:, kept], values[kept].sqrt())

    @cached_property
    def scale(self) -> Tensor:
        """(K,)."""
        return self.posterior.scale.reshape(-1)

    def weights(self, coordinates: Tensor) -> Tensor:
        """Weight deviations (n, K, D) of points (n, coordinates) in standard coordinates."""
        z = coordinates.reshape(len(coordinates), -1, self.posterior.width)
        z = z.to(self.root) / self.posterior.precisions.sqrt()
        # (n, j, r) -> (n, j, D), each target in its own basis where it has one
        whole = torch.einsum("njr,jdr->njd", z, self._basis)
        return self.scale[:, None] * torch.einsum("kj,njd->nkd", self.root, whole)

    def rows(self, cotangents: Tensor, features: Tensor) -> Tensor:
        r"""Derivatives of Q quantities by the standard coordinates, (Q, coordinates).

        From those by the outputs, (Q, M, K), with features (M, D), or (M, K, D) where they differ
        between targets. The covariance is rows times rows transposed; rows of batches add up.
        """
        cotangents = cotangents.to(torch.float64) * self.scale
        features = features.to(torch.float64)
        if features.ndim == 2:
            quantities, outputs, targets = cotangents.shape
            flat = cotangents.mT.reshape(quantities * targets, outputs)
            pulled = (flat @ features).reshape(quantities, targets, -1)
        else:
            pulled = torch.einsum("qmk,mkd->qkd", cotangents, features)
        mixed = torch.einsum("qkd,kj->qjd", pulled, self.root)
        rows = torch.einsum("qjd,jdr->qjr", mixed, self._basis) / self.posterior.precisions.sqrt()
        return rows.flatten(1)

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
        """(M, K, M', K) between the outputs with these features; `same` (M, M') for equal rows."""
        a = self.posterior.whitened(left)
        b = a if right is None else self.posterior.whitened(right)
        between = (self.correlation * self.scale[:, None] * self.scale)[:, None, :]
        if same is not None and self.own is not None:
            own = torch.linalg.vector_norm(self.own.mixing, dim=1)  # beta: rho has a unit diagonal
            single = (self.correlation * own[:, None] * own)[:, None, :]
            between = between + same[:, None, :, None] * single
        if a.ndim == 2:
            return (a @ b.mT)[:, None, :, None] * between
        return torch.einsum("mkd,nld->mknl", a, b) * between

    @property
    def _basis(self) -> Tensor:
        """(blocks of coordinates, D, D)."""
        vectors = self.posterior.eigenvectors
        self.posterior._check_whole("Joint predictions need the whole one.")
        return vectors if vectors.ndim == 3 else vectors.expand(self.root.shape[1], -1, -1)


class OwnPart(NamedTuple):
    r"""What no other row shares of a prediction's error: $B S_m z$ at row m, with z ~ N(0, I).

    Attributes:
        factor: R with $q = |R f|^2$, (1, D, D), or (T, D, D) with one Gram per target.
        mixing: $B_{kj} = \beta_k L_{kj}$, (K, J); diagonal behind one weight vector.
    """

    factor: Tensor
    mixing: Tensor

    def roots(self, features: Tensor) -> Tensor:
        r"""S: $\sqrt q$, (M, 1 or K); behind one weight vector the root of a matrix, (M, K, K)."""
        rows = features.detach().to(self.factor)
        z = torch.einsum("mtd,tcd->mtc", rows[:, None] if rows.ndim == 2 else rows, self.factor)
        if rows.ndim == 2 or len(self.factor) > 1:
            return z.square().sum(-1).sqrt()
        values, vectors = torch.linalg.eigh(z @ z.mT)
        # the symmetric root, which rounding does not turn
        return torch.matmul(vectors * values.clamp(min=0).sqrt()[:, None], vectors.mT)

    def moved(self, roots: Tensor, z: Tensor) -> Tensor:
        """B S z: points (n, M, J) -> changes (n, M, K)."""
        return self.stretched(roots, z) @ self.mixing.mT

    @staticmethod
    def stretched(roots: Tensor, z: Tensor) -> Tensor:
        """S z, (n, M, J); S is symmetric."""
        return roots * z if roots.ndim == 2 else torch.einsum("mkj,nmj->nmk", roots, z)


def residual_correlation(gram: Gram, targets: int) -> Tensor:
    """Correlation (K, K) of the training residuals, where one Gram serves all targets.

    The identity where it is not known: no targets were given, or too many to keep all pairs.
    """
    identity = torch.eye(targets, dtype=torch.float64, device=gram.device)
    square = gram.square
    if gram.targets is not None or square is None or square.ndim != 2 or len(square) != targets:
        return identity
    size = square.diagonal().clamp(min=0).sqrt()
    size = torch.where(size > 0, size, torch.inf)  # without residuals there is no correlation
    return torch.where(identity > 0, identity, (square / size[:, None] / size).clamp(-1, 1))
