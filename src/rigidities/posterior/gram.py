r"""The Gram matrix of the readout features: the one statistic that a fit accumulates.

For feature rows $f_i$ with loss curvatures $w_i$ (the paper's pseudo-Hessian, Sec. 3.4)

$$ G = \sum_i w_i f_i f_i^\top, \qquad b = \sum_i w_i f_i r_i^\top, \qquad
   S = \sum_i w_i r_i r_i^\top $$

with the residuals $r_i$ where they are known. All are sums over rows, so batching, order and
sharding change nothing but the rounding, and rows can be taken out again. Features are cast to
float64 *before* the product: a float32 product loses every digit at a condition number of 1e4.
"""

from __future__ import annotations

from copy import copy
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..notices import require
from .memory import require_memory

JOINT_TARGETS = 256
"""Up to so many targets the residuals' full K x K moment is kept, beyond it the diagonal alone."""

_BUFFER_ROWS = 512
_ROUNDING = 1e-6
"""Share of a sum of squares by which a float32 model may miss it when it is called anew."""


class Gram:
    r"""Streaming sum $G = \sum_i w_i f_i f_i^T$ in float64.

    Args:
        width: number of features D.
        targets: None for one matrix (D, D) that all targets share; T for one matrix per target
            (T, D, D), needed when the rows' weights or features differ between targets.
        device: where the sums live.

    Attributes:
        count: rows.
        zeros: rows of zero weight, () or (T,).
        cross: $F^T W r$, (D, K), or None where it does not hold all rows.
        square: $r^T W r$, (K, K), or (K,) for very many targets. Without `cross`, it leaves out
            the rows that were added with `moments=False`; None where others lacked residuals, or
            where what `without` left of it was below its rounding.

    Examples:
        >>> gram = Gram(2)
        >>> gram.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> gram.matrix.tolist(), gram.count
        ([[10.0, 14.0], [14.0, 20.0]], 2)
    """

    stored: ClassVar[str] = "matrix"
    """Name of the sums in a file."""
    copies: ClassVar[int] = 5
    """Matrices of its size that a fit and its factorisation hold at once, as measured."""

    def __init__(
        self,
        width: int,
        *,
        targets: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}.")
        shape = (width, width) if targets is None else (targets, width, width)
        self.width = width
        self.targets = targets
        self.count = 0
        self.zeros = torch.zeros(shape[:-2], dtype=torch.int64, device=device)
        require_memory(1, width, targets, self.zeros.device)
        self.cross: Tensor | None = None
        self.square: Tensor | None = None
        self._upper = torch.zeros(shape, dtype=torch.float64, device=device)
        self._buffer: list[Tensor] = []
        self._buffered = 0

    @property
    def device(self) -> torch.device:
        """Where the sums live."""
        return self._upper.device

    @property
    def matrix(self) -> Tensor:
        """The whole symmetric matrix, (D, D) or (T, D, D), float64."""
        self._flush()
        return _mirrored(self._upper.triu())

    @property
    def diagonal(self) -> Tensor:
        """The diagonal, (D,) or (T, D)."""
        self._flush()
        return self._upper.diagonal(dim1=-2, dim2=-1)

    def update(
        self,
        features: Tensor,
        weights: Tensor | None = None,
        residuals: Tensor | None = None,
        *,
        moments: bool = True,
    ) -> None:
        """Add rows.

        Args:
            features: (N, D); or (N, T, D) where each of the T targets has features of its own.
            weights: non-negative (N,), or (N, T) with one column per target; default ones.
            residuals: target minus prediction, (N,) or (N, K); kept as $F^T W r$ and $r^T W r$
                as long as every update brings them.
            moments: False for rows beside those whose residuals are of interest (derivatives
                without targets): `square` goes on without them, `cross` is dropped.
        """
        rows = self._rows(features, weights, residuals)
        self._add_moments(rows, moments)
        self.count += rows.features.shape[0]
        if rows.zeros is not None:
            self.zeros += rows.zeros.reshape(self.zeros.shape)
        if self.targets is None:
            self._buffer.append(rows.features)
            self._buffered += rows.features.shape[0]
            if self._buffered >= _BUFFER_ROWS:
                self._flush()
        else:
            self._add_rows(rows.features)

    def downdate(
        self,
        features: Tensor,
        weights: Tensor | None = None,
        residuals: Tensor | None = None,
        *,
        moments: bool = True,
    ) -> None:
        """Take rows out that were added before, with the weights they were added with."""
        rows = type(self)(self.width, targets=self.targets, device=self.device)
        rows.update(features, weights, residuals, moments=moments)
        if not moments:
            rows.square = None if self.square is None else torch.zeros_like(self.square)
        vars(self).update(vars(self.without(rows)))

    def merge(self, other: Gram) -> Gram:
        """Add another Gram's sums to this one's and return this one."""
        other = self._alike(other)
        self._add_moments_of(other)
        self._add_sums(other)
        return self

    def without(self, other: Gram) -> Gram:
        """A Gram of the rows that are left when another's are taken out.

        Raises:
            ValueError: more than are held, or a sum of squares would turn negative.
        """
        if other.count > self.count:
            raise ValueError(f"Cannot remove {other.count} rows: only {self.count} are held.")
        if self.targets is None and other.targets is not None:
            return self.expand(other.targets).without(other)
        if self.targets is not None and other.targets is None:
            other = other.expand(self.targets)
        other, left = self._alike(other), self.clone()
        left._add_moments_of(other, -1)
        negative = left._take_out(other)
        if left.square is not None and self.square is not None:
            squares, rounding = _variances(left.square), _ROUNDING * _variances(self.square)
            negative = negative or bool((squares < -rounding).any())
            squares.clamp_(min=0)
            if left.count and bool((squares < rounding).any()):
                left.cross = left.square = None
        if negative:
            raise ValueError(
                "These rows were never added, or not so (a sum of squares would turn negative). "
                "Remove rows with the features, weights and targets they were added with."
            )
        return left

    def after(self, change: Tensor) -> Gram:
        r"""The Gram of the same rows when the weights have changed by $\delta$, (D, K).

        Residuals become $r - F \delta$. Where each target has a Gram of its own, `square` follows
        on its diagonal alone: nothing reads the rest.
        """
        moved, cross, square = self.clone(), self.cross, self.square
        if cross is None or square is None:
            raise ValueError("There are no residuals to change: give targets, (x, y).")
        change = change.to(cross)
        each = "de,ek->dk" if self.targets is None else "kde,ek->dk"
        moved.cross = cross - torch.einsum(each, self.matrix, change)
        both = cross + moved.cross  # r'r' = r r - (b + b')^T delta
        less = change.mT @ both if square.ndim == 2 else (change * both).sum(0)
        moved.square = square - (less if square.ndim == 1 else (less + less.mT) / 2)
        _variances(moved.square).clamp_(min=0)
        return moved

    def expand(self, targets: int) -> Gram:
        """One Gram per target, each equal to this shared one (its rows had equal weights)."""
        if self.targets is not None:
            raise ValueError(f"This Gram already holds one matrix for each of {self.targets}.")
        self._flush()
        clone = type(self)(self.width, targets=targets, device=self.device)
        clone._upper += self._upper
        clone.count, clone.zeros = self.count, self.zeros.expand(targets).clone()
        clone.cross, clone.square = _clone(self.cross), _clone(self.square)
        return clone

    @property
    def informative(self) -> Tensor:
        """Rows of non-zero weight, () or (T,)."""
        return self.count - self.zeros

    def clone(self) -> Gram:
        """An independent copy."""
        return self.to(self.device)

    def to(self, device: torch.device | str) -> Gram:
        """An independent copy on another device; the sums stay float64."""
        self._flush()
        gram = copy(self)
        gram._buffer = []
        held = {name: sums for name, sums in vars(self).items() if isinstance(sums, Tensor)}
        vars(gram).update({name: sums.to(device, copy=True) for name, sums in held.items()})
        return gram

    def eigenbasis(self, penalty: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, and eigenvectors of the matrix, to which a penalty is added."""
        self._flush()
        upper = self._upper if penalty is None else self._upper + penalty
        check_finite(upper)
        require_memory(4, self.width, None, self.device)  # the vectors, and what LAPACK works in
        eigenvalues, eigenvectors = torch.linalg.eigh(upper, UPLO="U")
        return eigenvalues, eigenvectors

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors, for files; `from_state` is the way back."""
        count = torch.tensor(self.count, dtype=torch.int64)
        tensors = {self.stored: self._stored(), "count": count, "zeros": self.zeros}
        moments = {"cross": self.cross, "square": self.square}
        return tensors | {name: sums for name, sums in moments.items() if sums is not None}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Gram:
        """The Gram that `state` came from; refused where it came from none."""
        kinds: list[type[Gram]] = [Gram, *Gram.__subclasses__()]
        kind = next((kind for kind in kinds if kind.stored in state), cls)
        matrix, count, zeros = (state[name] for name in (kind.stored, "count", "zeros"))
        sums = [matrix, *(state[name] for name in ("cross", "square") if name in state)]
        finite = all(one.dtype == torch.float64 and bool(one.isfinite().all()) for one in sums)
        square = matrix.ndim in (2, 3) and matrix.shape[-1] == matrix.shape[-2]
        require(finite and square, f"the Gram's {kind.stored}")
        targets = None if matrix.ndim == 2 else matrix.shape[0]
        gram = kind(matrix.shape[-1], targets=targets, device=matrix.device)
        gram._upper = matrix.triu()
        positive = bool((gram.diagonal >= -_ROUNDING * gram.diagonal.max()).all())
        require(positive and torch.equal(gram._stored(), matrix), f"the Gram's {kind.stored}")
        if "cross" in state:
            wide = (matrix.shape[-1], state["square"].shape[-1])
            require(state["cross"].shape == wide, "the residuals' sums")
        whole = count.dtype == zeros.dtype == torch.int64 and zeros.shape == matrix.shape[:-2]
        require(whole and bool(((zeros >= 0) & (zeros <= count)).all()), "the Gram's count")
        gram.count, gram.zeros = int(count), zeros
        gram.cross, gram.square = state.get("cross"), state.get("square")
        return gram

    def __repr__(self) -> str:
        shared = "" if self.targets is None else f", targets={self.targets}"
        return f"{type(self).__name__}(width={self.width}{shared}, count={self.count})"

    def _stored(self) -> Tensor:
        """The sums as a file holds them."""
        return self.matrix

    def _alike(self, other: Gram) -> Gram:
        """Another Gram of the same kind and shape, on this one's device, with nothing buffered."""
        if (type(other), other.width, other.targets) != (type(self), self.width, self.targets):
            raise ValueError(
                f"Cannot merge Grams of different shape: {self!r} and {other!r}. They must come "
                "from the same readout, loss and method."
            )
        self._flush()
        other._flush()
        return other if other.device == self.device else other.to(self.device)

    def _add_moments_of(self, other: Gram, sign: int = 1) -> None:
        """Add what another holds beside its matrix, or take it out."""
        if self.count == 0:
            self.cross, self.square = _clone(other.cross), _clone(other.square)
        elif other.count:
            self.cross = _sum(self.cross, other.cross, sign)
            self.square = _sum(self.square, other.square, sign)
        self.count += sign * other.count
        self.zeros += sign * other.zeros

    def _add_rows(self, rows: Tensor) -> None:
        """Add float64 rows scaled by the roots of their weights, (n, D), or (n, T, D)."""
        if self.targets is None:
            _add_product(self._upper, rows)
            return
        for upper, own in zip(self._upper, rows.unbind(1), strict=True):
            _add_product(upper, own)

    def _add_sums(self, other: Gram) -> None:
        self._upper += other._upper

    def _take_out(self, other: Gram) -> bool:
        """Subtract another's sums; whether one of squares turned negative."""
        least = -_ROUNDING * self.diagonal.amax(-1, keepdim=True)
        self._upper -= other._upper
        negative = bool((self.diagonal < least).any())
        self.diagonal.clamp_(min=0)
        return negative

    def _rows(self, features: Tensor, weights: Tensor | None, residuals: Tensor | None) -> _Rows:
        """Check the shapes; cast to float64 and scale each row by the root of its weight."""
        self._check_features(features)
        n, device = features.shape[0], self.device
        scaled = features.detach().to(device, torch.float64)
        if weights is None and scaled.data_ptr() == features.data_ptr():
            scaled = scaled.clone()  # the caller may write to its own rows before they are summed
        root = None if weights is None else self._root(weights, n)
        errors = None
        if residuals is not None:
            errors = residuals.detach().to(device, torch.float64).reshape(n, -1)
            errors = errors if root is None else root * errors
        zeros = None if root is None else (root == 0).sum(0).expand(self.targets or 1)
        if self.targets is not None:
            scaled = (scaled if scaled.ndim == 3 else scaled[:, None]).expand(-1, self.targets, -1)
            root = None if root is None else root.expand(-1, self.targets)[..., None]
        scaled = scaled if root is None else scaled * root
        return _Rows(scaled, errors, zeros)

    def _check_features(self, features: Tensor) -> None:
        expected = f"(N, {self.width})"
        shapes: list[tuple[int, ...]] = [(self.width,)]
        if self.targets is not None:
            expected += f" or (N, {self.targets}, {self.width})"
            shapes.append((self.targets, self.width))
        if tuple(features.shape[1:]) not in shapes:
            raise ValueError(f"features must be {expected}, got {tuple(features.shape)}.")

    def _root(self, weights: Tensor, rows: int) -> Tensor:
        weights = weights.detach().to(self.device, torch.float64)
        weights = weights[:, None] if weights.ndim == 1 else weights
        if weights.ndim != 2 or len(weights) != rows or weights.shape[1] not in {1, self.targets}:
            raise ValueError(
                f"weights must be ({rows},)"
                + (f" or ({rows}, {self.targets})" if self.targets else "")
                + f", got {tuple(weights.shape)}."
            )
        if not bool(((weights >= 0) & (weights < torch.inf)).all()):
            raise ValueError(
                f"weights must be finite and not negative, got {float(weights.min())} to "
                f"{float(weights.max())}. To take rows out, use downdate()."
            )
        return weights.sqrt()

    def _add_moments(self, rows: _Rows, moments: bool) -> None:
        if not moments:
            self.cross = None
            return
        first, errors = self.count == 0, rows.residuals
        if errors is None or not (first or self.square is not None):
            self.cross = self.square = None
            return
        full = errors.shape[1] <= JOINT_TARGETS
        square = errors.mT @ errors if full else errors.square().sum(0)
        self.square = square if self.square is None else self.square + square
        if first or self.cross is not None:
            if self.targets is None:
                cross = (errors.mT @ rows.features).mT  # faster than the transposed order
            else:
                cross = torch.einsum("ntd,nt->dt", rows.features, errors)
            self.cross = cross if self.cross is None else self.cross + cross

    def _flush(self) -> None:
        if self._buffer:
            rows = self._buffer[0] if len(self._buffer) == 1 else torch.cat(self._buffer)
            self._buffer, self._buffered = [], 0
            self._add_rows(rows)


class _Rows(NamedTuple):
    """Checked float64 rows, scaled by the roots of their weights."""

    features: Tensor
    residuals: Tensor | None
    zeros: Tensor | None


def with_ones(rows: Tensor) -> Tensor:
    """(..., D) -> (..., D + 1), the last column ones."""
    return torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)


def _add_product(upper: Tensor, rows: Tensor) -> None:
    """upper += rows^T rows, block row by block row from the diagonal on (half the work)."""
    width = upper.shape[0]
    # small blocks save more work; on an accelerator few large products are faster
    if upper.device.type == "cpu":
        block = max(64, -(-width // 8))
    else:
        block = width if width < 768 else -(-width // 4)
    for start in range(0, width, block):
        left = rows[:, start : start + block]
        upper[start : start + block, start:].addmm_(left.mT, rows[:, start:])


def _mirrored(upper: Tensor) -> Tensor:
    """An upper triangular matrix made symmetric in place, a block at a time."""
    width, step = upper.shape[-1], 512
    for i in range(0, width, step):
        own = upper[..., i : i + step, i : i + step]
        own += own.triu(1).mT
        upper[..., i + step :, i : i + step] = upper[..., i : i + step, i + step :].mT
    return upper


def check_finite(sums: Tensor) -> None:
    """Refuse sums that cannot be factorised."""
    if not bool(torch.isfinite(sums).all()):
        raise ValueError("The Gram holds NaN or infinity: some of its rows did.")


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _sum(left: Tensor | None, right: Tensor | None, sign: int) -> Tensor | None:
    return None if left is None or right is None else left + sign * right


def _variances(square: Tensor) -> Tensor:
    """The diagonal of (K, K), or (K,) itself."""
    return square if square.ndim == 1 else square.diagonal()
