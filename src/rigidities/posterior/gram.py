r"""The Gram matrix of the readout features: the one statistic that a fit accumulates.

For feature rows $f_i$ with loss curvatures $w_i$ (the paper's pseudo-Hessian, Sec. 3.4)

$$ G = \sum_i w_i f_i f_i^\top, \qquad b = \sum_i w_i f_i r_i^\top, \qquad
   S = \sum_i w_i r_i r_i^\top $$

with the residuals $r_i$ where they are known. All are sums over rows, so batching, order and
sharding change nothing but the rounding, and rows can be taken out again.

An update multiplies its rows, $W^{1/2} [F, 1]$ where a column of ones belongs to them, and adds the
products to the sums at once. Features are cast to float64 *before* the product: a float32 product
loses every digit at a condition number of 1e4.

Mixed precision multiplies short blocks of rows in the features' own precision (half-precision ones
are exact in the products of float32) and sums the blocks in float64. Of some blocks the error is
measured: for random directions $v$ with $E\,v v^\top = I$, $E |dG\, v|^2$ is the squared Frobenius
norm of $dG = G_{mixed} - G$, and $G v = F^\top (F v)$ is cheap. At worst all blocks err alike and
in the same direction, so errors are added up, in proportion to the blocks' traces.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..notices import notify
from .draws import standard_normal
from .memory import require_memory

JOINT_TARGETS = 256
"""Up to so many targets the residuals' full K x K moment is kept, beyond it the diagonal alone."""

Precision = Literal["double", "mixed"]
PrecisionLike = Literal["auto", "double", "mixed"]

HALVES = (torch.bfloat16, torch.float16)
"""The half precisions."""

_FAST_DOUBLE = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities whose float64 is at most a few times slower than their float32."""

_CPU_ROWS = 1024
"""Rows that a CPU casts and multiplies at once, so that they stay in its cache."""
_PAGE = 4096
"""Bytes; rows that start so far apart push each other out of a CPU's cache."""
_CUDA_NUMBERS = 1 << 25
"""Numbers that an accelerator casts at once; 256 MiB in float64."""
_SINGLE_ROWS = 4096
"""Rows of a block in float32, at least; four times the width where that is more."""
_HALF_ROWS = 16384
"""Rows of a block in half precision."""
_SIDE_ROWS = 1024
"""Rows of a block where the residuals are multiplied in float32."""

_LEAST = 2.0**-23
"""Relative rounding of a block that is taken for granted: measured ones may be exact by chance."""
_MEASURED_FIRST = 8
"""So many blocks are measured at first, every 32nd later."""
_DIRECTIONS = 8
"""Directions along which a block's error is measured: its norm within a quarter, so it is
doubled."""
_ROUNDING = 1e-6
"""Share of a sum of squares by which a float32 model may miss it when it is called anew."""


class Gram:
    r"""Streaming sum $G = \sum_i w_i f_i f_i^T$ in float64.

    Args:
        width: number of features D.
        targets: None for one matrix (D, D) that all targets share; T for one matrix per target
            (T, D, D), needed when the rows' weights or features differ between targets.
        device: where the sums live.
        precision: of the products; "mixed" measures its own rounding, see `rounding`. Matrices of
            targets of their own, and features in float64, are multiplied in float64 all the same.

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
        precision: Precision = "double",
    ) -> None:
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}.")
        if precision not in ("double", "mixed"):
            raise ValueError(f"precision must be 'double' or 'mixed', got {precision!r}.")
        shape = (width, width) if targets is None else (targets, width, width)
        self.width = width
        self.targets = targets
        self.count = 0
        self.zeros = torch.zeros(shape[:-2], dtype=torch.int64, device=device)
        require_memory(1, width, targets, self.zeros.device)
        self.cross: Tensor | None = None
        self.square: Tensor | None = None
        # G on and above the diagonal; what stands below it means nothing.
        self._upper = torch.zeros(shape, dtype=torch.float64, device=device)
        # In mixed precision: error of the measured blocks, their trace, the trace of all blocks.
        self._spots: Tensor | None = None
        if precision == "mixed":
            self._spots = torch.zeros(3, dtype=torch.float64, device=device)
        self._blocks = 0  # that were multiplied in mixed precision
        self._longest = 0  # rows of the longest block that was measured
        self._scratch: Tensor | None = None  # where a CPU lays rows out, used again and again

    @staticmethod
    def preferred_rows(width: int) -> int:
        """Rows that an update should bring at least: fewer cost more time per row."""
        return 512

    @property
    def device(self) -> torch.device:
        """Where the sums live."""
        return self._upper.device

    @property
    def precision(self) -> Precision:
        """Of the products."""
        return "double" if self._spots is None else "mixed"

    @property
    def rounding(self) -> float:
        """Bound on the error of `matrix` by products in short, |dG|, as measured; 0 in double."""
        if self._spots is None:
            return 0.0
        error, measured, whole = self._spots.tolist()
        return max(2 * error / measured, _LEAST) * whole if measured else 0.0

    @property
    def matrix(self) -> Tensor:
        """The whole symmetric matrix, (D, D) or (T, D, D), float64."""
        return _mirrored(self._upper.triu())

    @property
    def diagonal(self) -> Tensor:
        """The diagonal, (D,) or (T, D)."""
        return self._upper.diagonal(dim1=-2, dim2=-1)

    @torch.no_grad()
    def update(
        self,
        features: Tensor,
        weights: Tensor | None = None,
        residuals: Tensor | None = None,
        *,
        moments: bool = True,
        ones: bool = False,
    ) -> None:
        """Add rows.

        Args:
            features: (N, D); or (N, T, D) where each of the T targets has features of its own.
            weights: non-negative (N,), or (N, T) with one column per target; default ones.
            residuals: target minus prediction, (N,) or (N, K); kept as $F^T W r$ and $r^T W r$
                as long as every update brings them.
            moments: False for rows beside those whose residuals are of interest (derivatives
                without targets): `square` goes on without them, `cross` is dropped.
            ones: whether the features lack their last column, which is one.

        Raises:
            ValueError: a shape does not fit, or a weight is negative or not finite. The sums are
                then as they were.
        """
        if torch.is_autocast_enabled(self.device.type):  # which would shorten the products
            with torch.autocast(self.device.type, enabled=False):
                self.update(features, weights, residuals, moments=moments, ones=ones)
            return
        rows = len(features)
        self._check_features(features, ones)
        root = None if weights is None else self._weight_root(weights, rows)
        errors = None if residuals is None else self._errors(residuals, root, rows)
        # All is checked: from here on the sums change.
        if rows == 0:
            return
        crossed = self.count == 0 or self.cross is not None
        if not moments:
            self.cross = errors = None
        elif errors is None or (self.count > 0 and self.square is None):
            self.cross = self.square = errors = None
        for part in _parts(rows, self._rows_at_once(features), features, root, errors):
            self._add(*part, ones=ones, crossed=crossed)
        self.count += rows
        if root is not None:
            zeros = (root == 0).sum(0)  # (1,) or (T,)
            self.zeros += zeros.expand(self.targets or 1).reshape(self.zeros.shape)

    def downdate(
        self,
        features: Tensor,
        weights: Tensor | None = None,
        residuals: Tensor | None = None,
        *,
        moments: bool = True,
    ) -> None:
        """Take rows out that were added before, with the weights they were added with."""
        kind, precision = type(self), self.precision
        rows = kind(self.width, targets=self.targets, device=self.device, precision=precision)
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
        require_memory(1, self.width, targets, self.device)
        clone = self.clone()
        clone.targets, clone.zeros = targets, self.zeros.repeat(targets)
        clone._upper = clone._upper.repeat(targets, 1, 1)
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
        gram = copy.copy(self)
        for name, value in vars(gram).items():
            if isinstance(value, Tensor):
                setattr(gram, name, value.to(device, copy=True))
        return gram

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes along: all but the scratch memory."""
        return {**vars(self), "_scratch": None}

    def eigenbasis(self, penalty: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, and eigenvectors of the matrix, to which a penalty is added."""
        upper = self._upper if penalty is None else self._upper + penalty
        check_finite(upper)
        require_memory(4, self.width, self.targets, self.device)  # vectors, what LAPACK works in
        eigenvalues, eigenvectors = torch.linalg.eigh(upper, UPLO="U")
        return eigenvalues, eigenvectors

    def state(self) -> dict[str, Tensor]:
        """The sums as tensors, for `from_state`."""
        tensors = {
            self.stored: self._stored(),
            "count": torch.tensor(self.count, dtype=torch.int64),
            "zeros": self.zeros,
        }
        if self.cross is not None:
            tensors["cross"] = self.cross
        if self.square is not None:
            tensors["square"] = self.square
        if self._spots is not None:
            counts = self._spots.new_tensor([self._blocks, self._longest])
            tensors["spots"] = torch.cat([self._spots, counts])
        return tensors

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Gram:
        """The Gram that `state` came from."""
        kinds: list[type[Gram]] = [Gram, *Gram.__subclasses__()]
        kind = next(kind for kind in kinds if kind.stored in state)
        sums = state[kind.stored]
        targets = None if sums.ndim == 2 else sums.shape[0]
        gram = kind(sums.shape[-1], targets=targets, device=sums.device)
        gram._upper = sums.triu()
        gram.count = int(state["count"])
        gram.zeros = state["zeros"].clone()
        gram.cross = state.get("cross")
        gram.square = state.get("square")
        if "spots" in state:
            gram._spots = state["spots"][:3].clone()
            gram._blocks, gram._longest = (int(count) for count in state["spots"][3:])
        return gram

    def __repr__(self) -> str:
        shared = "" if self.targets is None else f", targets={self.targets}"
        return f"{type(self).__name__}(width={self.width}{shared}, count={self.count})"

    def _stored(self) -> Tensor:
        """The sums as a file holds them."""
        return _mirrored(self._upper.triu())

    def _alike(self, other: Gram) -> Gram:
        """Another Gram of the same kind and shape, on this one's device."""
        if (type(other), other.width, other.targets) != (type(self), self.width, self.targets):
            raise ValueError(
                f"Cannot merge Grams of different shape: {self!r} and {other!r}. They must come "
                "from the same readout, loss and method."
            )
        return other if other.device == self.device else other.to(self.device)

    def _add_moments_of(self, other: Gram, sign: int = 1) -> None:
        """Add what another holds beside its matrix, or take it out; errors add up all the same."""
        if self.count == 0:
            self.cross, self.square = other.cross, other.square  # never written to
        elif other.count:
            self.cross = _sum(self.cross, other.cross, sign)
            self.square = _sum(self.square, other.square, sign)
        self.count += sign * other.count
        self.zeros += sign * other.zeros
        if other._spots is not None:
            self._spots = other._spots + (0 if self._spots is None else self._spots)

    def _add_sums(self, other: Gram) -> None:
        self._upper += other._upper

    def _take_out(self, other: Gram) -> bool:
        """Subtract another's sums; whether one of squares turned negative."""
        least = -_ROUNDING * self.diagonal.amax(-1, keepdim=True)
        self._upper -= other._upper
        negative = bool((self.diagonal < least).any())
        self.diagonal.clamp_(min=0)
        return negative

    def _check_features(self, features: Tensor, ones: bool) -> None:
        width = self.width - ones
        shape = tuple(features.shape)
        if shape[1:] not in ((width,), (self.targets, width)):
            each = "" if self.targets is None else f" or (N, {self.targets}, {width})"
            raise ValueError(f"features must be (N, {width}){each}, got {shape}.")

    def _weight_root(self, weights: Tensor, rows: int) -> Tensor:
        """The square roots of the weights, (N, 1) or (N, T), in float64."""
        weights = weights.to(self.device, torch.float64)
        weights = weights[:, None] if weights.ndim == 1 else weights
        if weights.ndim != 2 or len(weights) != rows or weights.shape[1] not in {1, self.targets}:
            each = f" or ({rows}, {self.targets})" if self.targets else ""
            raise ValueError(f"weights must be ({rows},){each}, got {tuple(weights.shape)}.")
        if not bool(((weights >= 0) & (weights < torch.inf)).all()):
            raise ValueError(
                f"weights must be finite and not negative, got {float(weights.min())} to "
                f"{float(weights.max())}. To take rows out, use downdate()."
            )
        return weights.sqrt()

    def _errors(self, residuals: Tensor, root: Tensor | None, rows: int) -> Tensor:
        """The residuals times the roots of their weights, (N, K), in float64."""
        if residuals.shape[:1] != (rows,):
            shape = tuple(residuals.shape)
            raise ValueError(f"residuals must be ({rows},) or ({rows}, K), got {shape}.")
        errors = residuals.to(self.device, torch.float64)
        if errors.ndim != 2:
            errors = errors.reshape(rows, residuals.shape[1:].numel())
        columns = self.targets if self.square is None else self.square.shape[-1]
        if columns is not None and errors.shape[1] != columns:
            raise ValueError(
                f"residuals must be ({rows}, {columns}), one column per target as before, got "
                f"{tuple(residuals.shape)}."
            )
        return errors if root is None else root * errors

    def _rows_at_once(self, features: Tensor) -> int:
        """Rows to lay out and multiply together, so that their copies stay small."""
        if self.device.type == "cpu":
            return _CPU_ROWS
        return max(_CPU_ROWS, _CUDA_NUMBERS // self.width)

    def _add(
        self,
        features: Tensor,
        root: Tensor | None,
        errors: Tensor | None,
        *,
        ones: bool,
        crossed: bool,
    ) -> None:
        """Add the products of checked rows; `crossed` says whether those with residuals count."""
        left = None if errors is None else errors.mT  # (K, n)
        crosses = []
        if self._products_in(features) != torch.float64:
            crosses.append(self._add_in_short(features, root, left, ones))  # (K, D)
        elif self.targets is None:
            rows = self._laid_out(features, root, ones)
            self._add_rows(self._upper, rows)
            if left is not None and crossed:
                crosses.append(left @ rows)  # (K, D)
        else:
            for target, upper in enumerate(self._upper.unbind()):
                rows = self._laid_out(
                    features if features.ndim == 2 else features[:, target],
                    root if root is None or root.shape[1] == 1 else root[:, target, None],
                    ones,
                )
                self._add_rows(upper, rows)
                if left is not None and crossed:
                    crosses.append(left[target, None] @ rows)  # (1, D)
        if left is None or errors is None:
            return
        if crossed:
            cross = (crosses[0] if len(crosses) == 1 else torch.cat(crosses)).mT
            self.cross = cross if self.cross is None else self.cross + cross
        joint = errors.shape[1] <= JOINT_TARGETS
        square = left @ errors if joint else errors.square().sum(0)
        self.square = square if self.square is None else self.square + square

    def _laid_out(self, features: Tensor, root: Tensor | None, ones: bool) -> Tensor:
        """The rows $W^{1/2} [F, 1]$ in float64, (n, D).

        They may lie in scratch memory, which the next call overwrites, or be the caller's own.
        """
        if root is None and not ones and features.dtype == torch.float64:
            return features.to(self.device).contiguous()
        rows = self._workspace(len(features), self.width, torch.float64)
        rows[:, : features.shape[1]].copy_(features)
        if ones:
            rows[:, -1].fill_(1.0)
        if root is not None:
            rows *= root
        return rows

    def _workspace(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Memory for (n, columns) numbers, columns being at most D.

        A CPU keeps it for the next update, which saves a quarter of the time there; elsewhere the
        allocator does so. A few numbers lie between the rows: products of rows that start on odd
        places, or on the same places of their pages, are slower.
        """
        stride = self.width // 8 * 8 + 8
        scratch = self._scratch
        if scratch is None or scratch.dtype != dtype or len(scratch) < rows:
            with torch.inference_mode(False):  # to be written to in every mode
                scratch = torch.empty(rows, stride, dtype=dtype, device=self.device)
            if self.device.type == "cpu" and rows <= _CPU_ROWS:
                self._scratch = scratch
        return scratch[:rows, :columns]

    def _products_in(self, features: Tensor) -> torch.dtype:
        """The precision in which features are multiplied."""
        if self._spots is None or self.targets is not None or features.dtype == torch.float64:
            return torch.float64
        # Tensor cores multiply half precision and sum in float32; a CPU multiplies in float32.
        if features.dtype in HALVES and self.device.type == "cuda":
            return features.dtype
        return torch.float32

    def _add_rows(self, upper: Tensor, rows: Tensor) -> None:
        """Add rows (n, D) in float64 to `upper`, the sums or those of one target."""
        _add_product(upper, rows)

    def _add_in_short(
        self, features: Tensor, root: Tensor | None, left: Tensor | None, ones: bool
    ) -> Tensor:
        """Add rows in mixed precision.

        Args:
            features: (n, D), or (n, D - 1) with `ones`.
            root: (n, 1), the roots of the weights.
            left: (K, n), the residuals times those roots, in float64.
            ones: whether a column of ones belongs to the features.

        Returns:
            $r^T W F$, (K, D), in float64; (0, D) without residuals.
        """
        assert self._spots is not None
        rows = features.to(self.device, self._products_in(features))
        if root is not None:  # a weighted row no longer fits half precision
            rows = rows.float() * root.float()
        elif rows.device.type == "cpu" and rows.stride(0) * rows.itemsize % _PAGE == 0:
            rows = self._workspace(len(rows), rows.shape[1], rows.dtype).copy_(rows)
        if left is None:
            left = rows.new_empty(0, len(rows), dtype=torch.float64)
        if ones:
            last = left.new_ones(1, len(rows)) if root is None else root.mT
            left = torch.cat([last, left])  # (1 + K, n)
        before = self._upper.diagonal().sum()
        crosses = []
        most = _HALF_ROWS if rows.dtype in HALVES else max(_SINGLE_ROWS, 4 * self.width)
        for start in range(0, len(rows), most):
            block, beside = rows[start : start + most], left[:, start : start + most]
            self._blocks += 1
            regular = self._blocks <= _MEASURED_FIRST or self._blocks % 32 == 0
            if regular or len(block) > self._longest:  # a longer sum may err by more
                self._longest = max(len(block), self._longest)
                product = torch.zeros_like(self._upper)
                crosses.append(_add_short_block(product, block, beside, ones))
                exact = features[start : start + most].to(self.device, torch.float64)
                if root is not None:  # not as they were rounded for the product
                    exact = exact * root[start : start + most]
                self._measure(product, exact, beside[:1] if ones else None)
                self._upper += product
            else:
                crosses.append(_add_short_block(self._upper, block, beside, ones))
        self._spots[2].add_(self._upper.diagonal().sum() - before)
        return crosses[0] if len(crosses) == 1 else torch.stack(crosses).sum(0)

    def _measure(self, product: Tensor, exact_rows: Tensor, last: Tensor | None) -> None:
        """Note the error and the trace of a block's product; `last` (1, n) is its last column."""
        assert self._spots is not None
        if last is not None:
            exact_rows = torch.cat([exact_rows, last.mT], dim=1)
        # Other directions for every block, so that no error hides from all of them.
        seeded = torch.Generator(self.device).manual_seed(self._blocks)
        directions = standard_normal((self.width, _DIRECTIONS), self.device, seeded)
        exact = exact_rows.mT @ (exact_rows @ directions)
        error = _mirrored(product.triu()) @ directions - exact  # dG v, (D, directions)
        norm = torch.linalg.matrix_norm(error) / _DIRECTIONS**0.5
        self._spots[:2].add_(torch.stack([norm, product.diagonal().sum()]))


def precision_for(wanted: PrecisionLike, features: Tensor) -> Precision:
    """What the products of features are made in; "auto" is double, but for half precision.

    Raises:
        ValueError: there is no such precision, or the device has none of float64 for the sums.
    """
    if wanted not in ("auto", "double", "mixed"):
        raise ValueError(f"precision must be 'auto', 'double' or 'mixed', got {wanted!r}.")
    if features.device.type == "mps":
        raise ValueError(
            "The sums of a fit are float64, which an mps device does not have. Move the model to "
            "the CPU for fit and calibrate: model.cpu()."
        )
    if wanted != "auto":
        return wanted
    if features.dtype in HALVES:
        return "mixed"
    if features.is_cuda and torch.cuda.get_device_capability(features.device) not in _FAST_DOUBLE:
        notify(
            f"float64 is slow on {torch.cuda.get_device_name(features.device)}: fit(train, "
            "precision='mixed') multiplies in float32, and calibrate tells whether that is enough."
        )
    return "double"


def with_ones(rows: Tensor) -> Tensor:
    """(..., D) -> (..., D + 1), the last column ones."""
    return torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)


def _parts(
    rows: int, step: int, features: Tensor, root: Tensor | None, errors: Tensor | None
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """What belongs to each `step` of the rows."""
    if rows <= step:
        yield features, root, errors
        return
    for start in range(0, rows, step):
        part = slice(start, start + step)
        yield (
            features[part],
            None if root is None else root[part],
            None if errors is None else errors[part],
        )


def _add_product(upper: Tensor, rows: Tensor) -> None:
    """upper += rows^T rows, block row by block row from the diagonal on (half the work).

    Args:
        upper: (D, D) in float64.
        rows: (n, D) in any precision.
    """
    for start, stop in _block_rows(len(upper), rows):
        block_row = upper[start:stop, start:]
        left, right = rows[:, start:stop].mT, rows[:, start:]
        if rows.dtype == torch.float64:
            block_row.addmm_(left, right)
        else:
            block_row += _short_product(left, right)


def _add_short_block(upper: Tensor, rows: Tensor, left: Tensor, ones: bool) -> Tensor:
    """Add a block of rows in float32 or half precision, and multiply the residuals with it.

    Args:
        upper: (D, D) in float64.
        rows: (n, D), or (n, D - 1) with `ones`.
        left: (K, n) in float64; with `ones`, a further first row is the block's last column.
        ones: whether there is such a column.

    Returns:
        The residuals' products, (K, D) in float64.
    """
    width = rows.shape[1]
    _add_product(upper[:width, :width], rows)
    if not len(left):
        return left.new_empty(0, len(upper))
    products = _times(left, rows)
    if not ones:
        return products
    products = torch.cat([products, left @ left[:1].mT], dim=1)  # (1 + K, D)
    upper[:, -1].add_(products[0])
    return products[1:]


def _block_rows(width: int, rows: Tensor) -> list[tuple[int, int]]:
    """Where block rows of the product start and stop; the last is the highest.

    Starts are multiples of 64, so that the blocks of aligned rows are aligned too. An accelerator
    multiplies half precision faster than it can be told to: up to 2048 columns there is one block.
    """
    if rows.is_cuda and rows.dtype in HALVES and width <= 2048:
        return [(0, width)]
    height = max(64, block_height(width, rows.device.type, 768) // 64 * 64)
    starts = range(0, max(1, width // height) * height, height)
    return list(zip(starts, [*starts[1:], width], strict=True))


def block_height(width: int, device: str, few: int, most: int = 8) -> int:
    """Small saves work, large saves calls: on an accelerator, one below `few`, else 4 or `most`."""
    if device == "cpu":
        return max(64, -(-width // 8))
    return width if width < few else -(-width // (4 if width < 4 * few else most))


def _times(left: Tensor, rows: Tensor) -> Tensor:
    """A few rows (K, n) in float64 times (n, D) in any precision, in float64."""
    if rows.dtype == torch.float64:
        return left @ rows
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return _split_times(left, rows)
    return _block_times(left.to(torch.float32), rows.to(torch.float32))


def _split_times(left: Tensor, rows: Tensor) -> Tensor:
    """The same of bfloat16 rows: the left in three summands, so that no row must be cast."""
    summands = []
    for _ in range(3):  # of 8 bits each
        summands.append(left.to(rows.dtype))
        left = left - summands[-1]
    products = _block_times(torch.cat(summands), rows)  # (3 K, D)
    return products.reshape(3, len(left), -1).sum(0)


def _block_times(left: Tensor, rows: Tensor) -> Tensor:
    """The same by products in float32, summed in float64 over short blocks."""
    end = len(rows) // _SIDE_ROWS * _SIDE_ROWS
    if end == 0 or len(rows) == _SIDE_ROWS:
        return _short_product(left, rows).to(torch.float64)
    lefts = left[:, :end].reshape(len(left), -1, _SIDE_ROWS).movedim(1, 0)  # (blocks, K, n)
    blocks = rows[:end].reshape(-1, _SIDE_ROWS, rows.shape[1])  # (blocks, n, D)
    total = _short_product(lefts, blocks).sum(0, dtype=torch.float64)
    return total + _short_product(left[:, end:], rows[end:])


def _short_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices in float32 or half precision, or stacks of them, in float32."""
    if left.dtype in HALVES:
        return half_product(left, right)
    with full_products(left):
        return left @ right


_WIDENS = hasattr(torch.ops.aten.mm, "dtype")
"""Whether products of half precision can be had in float32: from PyTorch 2.8."""


def half_product(left: Tensor, right: Tensor, more: Tensor | None = None) -> Tensor:
    """The product of half-precision matrices, or stacks of them, in float32; plus `more`."""
    wanted = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    if left.is_cuda and _WIDENS and not wanted:
        if more is not None:
            return torch.addmm(more, left, right, out_dtype=torch.float32)
        multiply = torch.mm if left.ndim == 2 else torch.bmm
        return multiply(left, right, out_dtype=torch.float32)
    with full_products(left):
        product = left.float() @ right.float()
    return product if more is None else more + product


def full_products(tensor: Tensor) -> AbstractContextManager[None]:
    """Where float32 products keep float32's digits, whatever the process allows (TF32)."""
    if tensor.is_cuda and not torch.compiler.is_compiling():
        return _full_products()
    return nullcontext()


_SETTING = RLock()
"""Held while a thread changes the setting of the process, so that each puts back what it met."""


@contextmanager
def _full_products() -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    recent = hasattr(settings, "fp32_precision")  # from torch 2.9
    name = "fp32_precision" if recent else "allow_tf32"
    with _SETTING:
        before = getattr(settings, name)
        setattr(settings, name, "ieee" if recent else False)
        try:
            yield
        finally:
            setattr(settings, name, before)


def _mirrored(upper: Tensor) -> Tensor:
    """An upper triangular matrix made symmetric in place, a block at a time."""
    width, step = upper.shape[-1], 512
    for i in range(0, width, step):
        block = upper[..., i : i + step, i : i + step]
        block += block.triu(1).mT
        upper[..., i + step :, i : i + step] = upper[..., i : i + step, i + step :].mT
    return upper


def check_finite(sums: Tensor) -> None:
    """Refuse sums that cannot be factorised."""
    if not bool(torch.isfinite(sums).all()):
        raise ValueError("The Gram holds NaN or infinity: some of its rows did.")


def _sum(left: Tensor | None, right: Tensor | None, sign: int) -> Tensor | None:
    return None if left is None or right is None else left + sign * right


def _variances(square: Tensor) -> Tensor:
    """The diagonal of (K, K), or (K,) itself."""
    return square if square.ndim == 1 else square.diagonal()
