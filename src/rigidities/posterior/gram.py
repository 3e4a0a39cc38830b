r"""The Gram matrix of the readout features: the one statistic that a fit accumulates.

For feature rows $f_i$ with loss curvatures $w_i$ (the paper's pseudo-Hessian, Sec. 3.4)

$$ G = \sum_i w_i f_i f_i^\top, \qquad b = \sum_i w_i f_i r_i^\top, \qquad
   S = \sum_i w_i r_i r_i^\top $$

with the residuals $r_i$ where they are known. All are sums over rows, so batching, order and
sharding change nothing but the rounding, and rows can be taken out again.

`Gram.update` checks its rows, lays out $W^{1/2} F$, or $W^{1/2} [F, 1]$ where a column of ones
belongs to them, and adds the products to the sums at once. Features are cast to float64 *before*
the product: a float32 product loses every digit at a condition number of 1e4.

Mixed precision multiplies short blocks of rows in the features' own precision (half-precision ones
are exact in the products of float32) and sums the blocks in float64. The error of some blocks is
measured: for random directions $v$ with $E\,v v^\top = I$, $E |dG\, v|^2$ is the squared Frobenius
norm of $dG = G_{mixed} - G$, and $G v = F^\top (F v)$ is cheap. At worst all blocks have the
same error, in the same direction, so errors are added up, in proportion to the blocks' traces.
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

__all__ = ["Gram"]

JOINT_TARGETS = 256
"""Largest number of targets K whose residuals have a full K x K moment; beyond, its diagonal."""

Precision = Literal["double", "mixed"]
PrecisionLike = Literal["auto", "double", "mixed"]

HALVES = (torch.bfloat16, torch.float16)
"""The half precisions."""

_FAST_DOUBLE = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities whose float64 is at most a few times slower than their float32."""

_CPU_ROWS = 1024
"""Rows that a CPU casts and multiplies at once, so that they stay in its cache."""

_PAGE = 4096
"""Bytes of a memory page.

Rows whose starts are a multiple of it apart push each other out of a CPU's cache.
"""

_CUDA_NUMBERS = 1 << 25
"""Matrix entries that an accelerator casts at once; 256 MiB in float64."""

_SINGLE_ROWS = 4096
"""Rows of a block in float32, or four times the width where that is more."""

_HALF_ROWS = 16384
"""Rows of a block in half precision."""

_SIDE_ROWS = 1024
"""Rows of a block where the residuals are multiplied in float32."""

_SMALLEST_ERROR = 2.0**-23
"""Relative rounding that every block is assumed to have: a measured one may be exact by chance."""

_MEASURED_FIRST = 8
"""Number of first blocks that are all measured; of later ones every 32nd is."""

_DIRECTIONS = 8
"""Directions along which a block's error is measured.

They give the norm of the error within a quarter, so the result is doubled.
"""

_ROUNDING = 1e-6
"""Relative error with which a float32 model reproduces a sum of squares when it is called again."""


class Gram:
    r"""The sum $G = \sum_i w_i f_i f_i^T$ over batches of rows, in float64.

    Args:
        width: Number of features D.
        targets: None for one matrix (D, D) that all targets share; T for one matrix per target
            (T, D, D), needed when the rows' weights or features differ between targets.
        device: Where the sums live.
        precision: Precision of the products; "mixed" measures its error, see `rounding_error`. With
            one matrix per target, or with features in float64, the products are always in float64.

    Attributes:
        count: Number of rows.
        zeros: Number of rows of zero weight, () or (T,).
        cross: $F^T W r$, (D, K), or None where it does not contain all rows.
        square: $r^T W r$, (K, K), or (K,) for very many targets. Without `cross`, it leaves out
            the rows that were added with `moments=False`. None where other rows lacked residuals,
            or where `without` left no more of it than its rounding.

    Examples:
        >>> gram = Gram(2)
        >>> gram.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> gram.matrix.tolist(), gram.count
        ([[10.0, 14.0], [14.0, 20.0]], 2)
    """

    copies: ClassVar[int] = 5
    """Measured number of matrices of G's size that a fit and its factorisation need at once."""

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
        # G on and above the diagonal; the numbers below it mean nothing.
        self._upper = torch.zeros(shape, dtype=torch.float64, device=device)
        # In mixed precision: error of the measured blocks, their trace, the trace of all blocks.
        self._error_sums: Tensor | None = None
        if precision == "mixed":
            self._error_sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._blocks = 0  # number of blocks that were multiplied in mixed precision
        self._longest_measured = 0  # rows of the longest block that was measured
        self._scratch: Tensor | None = None  # where a CPU lays rows out, used again and again

    @property
    def device(self) -> torch.device:
        """Where the sums live."""
        return self._upper.device

    @property
    def precision(self) -> Precision:
        """Precision of the products."""
        return "double" if self._error_sums is None else "mixed"

    @property
    def rounding_error(self) -> float:
        """Bound on the error |dG| of `matrix` that mixed precision causes; 0 in double."""
        if self._error_sums is None:
            return 0.0
        error, measured_trace, whole_trace = self._error_sums.tolist()
        if not measured_trace:
            return 0.0
        relative: float = max(2 * error / measured_trace, _SMALLEST_ERROR)
        return relative * float(whole_trace)

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
            features: (N, D), or (N, T, D) if each of the T targets has its own features.
            weights: Non-negative (N,), or (N, T) with one column per target; default ones.
            residuals: Target minus prediction, (N,) or (N, K); kept as $F^T W r$ and $r^T W r$
                as long as every update brings them.
            moments: False for rows whose residuals are of no interest (derivatives without
                targets). `square` then leaves these rows out, and `cross` is dropped.
            ones: Whether the features lack their last column, which is one.

        Raises:
            ValueError: A shape does not match, or a weight is negative or not finite. The sums stay
                as they were.
        """
        device = self._upper.device
        if torch.is_autocast_enabled(device.type):  # which would shorten the products
            with torch.autocast(device.type, enabled=False):
                self.update(features, weights, residuals, moments=moments, ones=ones)
            return
        rows = len(features)
        self._check_features(features, ones)
        root = None if weights is None else self._weight_root(weights, rows)
        errors = None if residuals is None else self._weighted_residuals(residuals, root, rows)
        # All is checked: from here on the sums change.
        if rows == 0:
            return
        with_cross = self.count == 0 or self.cross is not None
        if not moments:  # `square` goes on without these rows
            self.cross = None
            errors = None
        elif errors is None or (self.count > 0 and self.square is None):
            # These rows or earlier ones lack residuals: the moments are incomplete for good.
            self.cross = None
            self.square = None
            errors = None
        # Rows to lay out and multiply together, so that their copies stay small.
        step = _CPU_ROWS
        if device.type != "cpu":
            step = max(_CPU_ROWS, _CUDA_NUMBERS // self.width)
        for chunk in _row_chunks(rows, step, features, root, errors):
            self._add(*chunk, ones=ones, with_cross=with_cross)
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
        """Remove rows that were added before, with the same weights.

        Args:
            features: As in `update`, with all columns.
            weights: As in `update`.
            residuals: As in `update`.
            moments: As in `update`.

        Raises:
            ValueError: As in `update` and `without`. The sums stay as they were.
        """
        rows = Gram(self.width, targets=self.targets, device=self.device, precision=self.precision)
        rows.update(features, weights, residuals, moments=moments)
        if not moments and self.square is not None:
            # These rows never entered `square`, so that nothing is to be subtracted from it.
            rows.square = torch.zeros_like(self.square)
        vars(self).update(vars(self.without(rows)))

    def merge(self, other: Gram) -> Gram:
        """Add another Gram's sums to this one's and return this one.

        Raises:
            ValueError: The other Gram has another shape.
        """
        other = self._compatible(other)
        self._add_moments_of(other)
        self._upper += other._upper
        return self

    def without(self, other: Gram) -> Gram:
        """The Gram of the rows that remain when those of another Gram are removed.

        Raises:
            ValueError: The other Gram has more rows than this one, or a sum of squares would become
                negative.
        """
        if other.count > self.count:
            raise ValueError(f"Cannot remove {other.count} rows: there are only {self.count}.")
        if self.targets is None and other.targets is not None:
            return self.expand(other.targets).without(other)
        if self.targets is not None and other.targets is None:
            other = other.expand(self.targets)
        other = self._compatible(other)
        remaining = self.clone()
        remaining._add_moments_of(other, -1)
        negative = remaining._take_out(other)
        if remaining.square is not None and self.square is not None:
            squares = _sums_of_squares(remaining.square)
            rounding = _ROUNDING * _sums_of_squares(self.square)
            negative = negative or bool((squares < -rounding).any())
            squares.clamp_(min=0)  # a view: `remaining.square` changes with it
            if remaining.count and bool((squares < rounding).any()):
                # Nothing but rounding is left of the residuals.
                remaining.cross = None
                remaining.square = None
        if negative:
            raise ValueError(
                "These rows were never added, or were added differently (a sum of squares would "
                "become negative). Remove rows with the features, weights and targets that they "
                "were added with."
            )
        return remaining

    def after(self, change: Tensor) -> Gram:
        r"""The Gram of the same rows when the weights have changed by $\delta$, (D, K).

        Residuals become $r - F \delta$. If each target has its own Gram, only the diagonal of
        `square` is updated, because nothing reads the rest.

        Raises:
            ValueError: There are no residuals.
        """
        cross = self.cross
        square = self.square
        if cross is None or square is None:
            raise ValueError("There are no residuals to change. Pass targets: (x, y).")
        moved = self.clone()
        change = change.to(cross)
        equation = "de,ek->dk" if self.targets is None else "kde,ek->dk"
        moved.cross = cross - torch.einsum(equation, self.matrix, change)
        # With b and b' the old and the new `cross`: r'^T r' = r^T r - delta^T (b + b').
        cross_sum = cross + moved.cross
        if square.ndim == 2:
            decrease = change.mT @ cross_sum
            moved.square = square - (decrease + decrease.mT) / 2
        else:
            moved.square = square - (change * cross_sum).sum(0)
        _sums_of_squares(moved.square).clamp_(min=0)  # in place
        return moved

    def expand(self, targets: int) -> Gram:
        """One Gram per target, each equal to this shared one (its rows had equal weights).

        Raises:
            ValueError: There is one matrix per target already.
        """
        if self.targets is not None:
            raise ValueError(
                f"This Gram already has one matrix for each of {self.targets} targets."
            )
        require_memory(1, self.width, targets, self.device)
        expanded = self.clone()
        expanded.targets = targets
        expanded.zeros = self.zeros.repeat(targets)
        expanded._upper = expanded._upper.repeat(targets, 1, 1)
        return expanded

    def combined(self, factors: Tensor) -> Gram:
        r"""One Gram of the rows of all targets, with the weights of target k times a factor.

        Its matrix is $\sum_k u_k G_k$. One weight vector stands behind all its rows, so that their
        residuals are one column.

        Args:
            factors: The factors $u_k$, (T,).

        Raises:
            ValueError: There is one matrix for all targets already.
        """
        if self.targets is None:
            raise ValueError("This Gram already has one matrix for all targets.")
        factors = factors.to(self.zeros.device, torch.float64)
        whole = Gram(self.width, device=self.device, precision=self.precision)
        for factor, sums in zip(factors.tolist(), self._upper.unbind(), strict=True):
            whole._upper.add_(sums, alpha=factor)
        whole.count = self.targets * self.count
        whole.zeros = self.zeros.sum()
        if self.cross is not None:
            # Contiguous, so that sums from a file round as those that were accumulated here.
            whole.cross = self.cross.contiguous() @ factors[:, None]  # (D, 1)
        if self.square is not None:
            whole.square = (factors * _sums_of_squares(self.square)).sum().reshape(1, 1)
        return whole

    @property
    def informative(self) -> Tensor:
        """Number of rows of non-zero weight, () or (T,)."""
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
        """Eigenvalues, ascending, and eigenvectors of the matrix plus a penalty.

        Raises:
            ValueError: The sums are not finite.
            MemoryError: The device has too little memory.
        """
        upper = self._upper if penalty is None else self._upper + penalty
        check_finite(upper)
        # The eigenvectors, and LAPACK's workspace.
        require_memory(4, self.width, self.targets, self.device)
        eigenvalues, eigenvectors = torch.linalg.eigh(upper, UPLO="U")
        return eigenvalues, eigenvectors

    def state(self) -> dict[str, Tensor]:
        """The sums as tensors, for `from_state`. Their names are those in files."""
        tensors = {
            "matrix": self.matrix,
            "count": torch.tensor(self.count, dtype=torch.int64),
            "zeros": self.zeros,
        }
        if self.cross is not None:
            tensors["cross"] = self.cross
        if self.square is not None:
            tensors["square"] = self.square
        if self._error_sums is not None:
            counts = self._error_sums.new_tensor([self._blocks, self._longest_measured])
            tensors["spots"] = torch.cat([self._error_sums, counts])
        return tensors

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Gram:
        """The Gram from which `state` was taken."""
        sums = state["matrix"]
        targets = None if sums.ndim == 2 else sums.shape[0]
        gram = cls(sums.shape[-1], targets=targets, device=sums.device)
        gram._upper = sums.triu()
        gram.count = int(state["count"])
        gram.zeros = state["zeros"].clone()
        gram.cross = state.get("cross")
        gram.square = state.get("square")
        if "spots" in state:
            spots = state["spots"]
            gram._error_sums = spots[:3].clone()
            gram._blocks = int(spots[3])
            gram._longest_measured = int(spots[4])
        return gram

    def __repr__(self) -> str:
        shared = "" if self.targets is None else f", targets={self.targets}"
        return f"Gram(width={self.width}{shared}, count={self.count})"

    def _compatible(self, other: Gram) -> Gram:
        """The other Gram on this one's device, if it has the same shape.

        Raises:
            ValueError: It has another shape.
        """
        if (other.width, other.targets) != (self.width, self.targets):
            raise ValueError(
                f"Cannot merge Grams of different shape: {self!r} and {other!r}. They must come "
                "from the same readout and loss."
            )
        return other if other.device == self.device else other.to(self.device)

    def _add_moments_of(self, other: Gram, sign: int = 1) -> None:
        """Add everything but the matrix of another Gram, or subtract it with sign -1.

        Rounding errors add up whatever the sign.
        """
        if self.count == 0:
            # These tensors may be shared: they are replaced, never written to.
            self.cross = other.cross
            self.square = other.square
        elif other.count:
            self.cross = _sum(self.cross, other.cross, sign)
            self.square = _sum(self.square, other.square, sign)
        self.count += sign * other.count
        self.zeros += sign * other.zeros
        if other._error_sums is not None:
            if self._error_sums is None:
                self._error_sums = other._error_sums.clone()
            else:
                self._error_sums = other._error_sums + self._error_sums

    def _take_out(self, other: Gram) -> bool:
        """Subtract another's matrix, and return whether a sum of squares turned negative."""
        least = -_ROUNDING * self.diagonal.amax(-1, keepdim=True)
        self._upper -= other._upper
        negative = bool((self.diagonal < least).any())
        self.diagonal.clamp_(min=0)
        return negative

    def _check_features(self, features: Tensor, ones: bool) -> None:
        """Refuse features of another shape."""
        width = self.width - 1 if ones else self.width
        shape = tuple(features.shape)
        if shape[1:] not in ((width,), (self.targets, width)):
            per_target = "" if self.targets is None else f" or (N, {self.targets}, {width})"
            raise ValueError(f"features must be (N, {width}){per_target}, got {shape}.")

    def _weight_root(self, weights: Tensor, rows: int) -> Tensor:
        """The square roots of the weights, (N, 1) or (N, T), in float64."""
        weights = weights.to(self.device, torch.float64)
        if weights.ndim == 1:
            weights = weights[:, None]
        if weights.ndim != 2 or len(weights) != rows or weights.shape[1] not in {1, self.targets}:
            per_target = f" or ({rows}, {self.targets})" if self.targets else ""
            raise ValueError(f"weights must be ({rows},){per_target}, got {tuple(weights.shape)}.")
        if not bool(((weights >= 0) & (weights < torch.inf)).all()):
            raise ValueError(
                f"weights must be finite and not negative, got {float(weights.min())} to "
                f"{float(weights.max())}. To take rows out, use downdate()."
            )
        return weights.sqrt()

    def _weighted_residuals(self, residuals: Tensor, root: Tensor | None, rows: int) -> Tensor:
        """The residuals times the roots of their weights, (N, K), in float64."""
        if residuals.shape[:1] != (rows,):
            shape = tuple(residuals.shape)
            raise ValueError(f"residuals must be ({rows},) or ({rows}, K), got {shape}.")
        errors = residuals.to(self._upper.device, torch.float64)
        if errors.ndim != 2:
            errors = errors.reshape(rows, residuals.shape[1:].numel())
        columns = self.targets if self.square is None else self.square.shape[-1]
        if columns is not None and errors.shape[1] != columns:
            raise ValueError(
                f"residuals must be ({rows}, {columns}), one column per target as before, got "
                f"{tuple(residuals.shape)}."
            )
        return errors if root is None else root * errors

    def _add(
        self,
        features: Tensor,
        root: Tensor | None,
        errors: Tensor | None,
        *,
        ones: bool,
        with_cross: bool,
    ) -> None:
        """Add the products of checked rows.

        Args:
            features: (n, D) or (n, T, D), without their last column if `ones`.
            root: The roots of the weights, (n, 1) or (n, T).
            errors: The residuals times these roots, (n, K).
            ones: Whether a column of ones belongs to the features.
            with_cross: Whether to add the products of features and residuals too.
        """
        errors_by_target = None if errors is None else errors.mT  # (K, n)
        crosses = []
        if self._product_dtype(features) != torch.float64:
            crosses.append(self._add_mixed(features, root, errors_by_target, ones))  # (K, D)
        elif self.targets is None:
            rows = self._laid_out(features, root, ones)
            _add_product(self._upper, rows)
            if errors_by_target is not None and with_cross:
                crosses.append(errors_by_target @ rows)  # (K, D)
        else:
            for target, upper in enumerate(self._upper.unbind()):
                rows = self._laid_out(
                    features if features.ndim == 2 else features[:, target],
                    root if root is None or root.shape[1] == 1 else root[:, target, None],
                    ones,
                )
                _add_product(upper, rows)
                if errors_by_target is not None and with_cross:
                    crosses.append(errors_by_target[target, None] @ rows)  # (1, D)
        if errors_by_target is None or errors is None:
            return
        if with_cross:
            cross = (crosses[0] if len(crosses) == 1 else torch.cat(crosses)).mT
            self.cross = cross if self.cross is None else self.cross + cross
        if errors.shape[1] <= JOINT_TARGETS:
            square = errors_by_target @ errors
        else:
            square = errors.square().sum(0)
        self.square = square if self.square is None else self.square + square

    def _laid_out(self, features: Tensor, root: Tensor | None, ones: bool) -> Tensor:
        """The rows $W^{1/2} [F, 1]$ in float64, (n, D).

        They may lie in scratch memory, which the next call overwrites, or be the caller's own
        tensor.
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
        allocator does so. There are a few unused numbers between the rows: products are slower
        where rows start at odd places, or at the same places of their pages.
        """
        stride = self.width // 8 * 8 + 8
        device = self._upper.device
        scratch = self._scratch
        if scratch is None or scratch.dtype != dtype or len(scratch) < rows:
            with torch.inference_mode(False):  # to be written to in every mode
                scratch = torch.empty(rows, stride, dtype=dtype, device=device)
            if device.type == "cpu" and rows <= _CPU_ROWS:
                self._scratch = scratch
        return scratch[:rows, :columns]

    def _product_dtype(self, features: Tensor) -> torch.dtype:
        """The precision in which features are multiplied."""
        if self._error_sums is None or self.targets is not None or features.dtype == torch.float64:
            return torch.float64
        # Tensor cores multiply half precision and sum in float32; a CPU multiplies in float32.
        if features.dtype in HALVES and self.device.type == "cuda":
            return features.dtype
        return torch.float32

    def _add_mixed(
        self, features: Tensor, root: Tensor | None, errors_by_target: Tensor | None, ones: bool
    ) -> Tensor:
        """Add rows in mixed precision, block by block.

        Args:
            features: (n, D), or (n, D - 1) with `ones`.
            root: The roots of the weights, (n, 1).
            errors_by_target: The residuals times those roots, (K, n) in float64.
            ones: Whether a column of ones belongs to the features.

        Returns:
            $r^T W F$, (K, D), in float64; (0, D) without residuals.
        """
        assert self._error_sums is not None
        rows = features.to(self.device, self._product_dtype(features))
        if root is not None:  # a weighted row no longer fits half precision
            rows = rows.float() * root.float()
        elif rows.device.type == "cpu" and rows.stride(0) * rows.itemsize % _PAGE == 0:
            rows = self._workspace(len(rows), rows.shape[1], rows.dtype).copy_(rows)
        # `left` is multiplied with the rows from the left: the residuals and, with `ones`, before
        # them the last column, whose product with the rows is the last column of G.
        left = errors_by_target
        if left is None:
            left = rows.new_empty(0, len(rows), dtype=torch.float64)
        if ones:
            last_column = left.new_ones(1, len(rows)) if root is None else root.mT
            left = torch.cat([last_column, left])  # (1 + K, n)
        trace_before = self._upper.diagonal().sum()
        crosses = []
        if rows.dtype in HALVES:
            rows_per_block = _HALF_ROWS
        else:
            rows_per_block = max(_SINGLE_ROWS, 4 * self.width)
        for start in range(0, len(rows), rows_per_block):
            chunk = slice(start, start + rows_per_block)
            block = rows[chunk]
            block_left = left[:, chunk]
            self._blocks += 1
            is_due = self._blocks <= _MEASURED_FIRST or self._blocks % 32 == 0
            if is_due or len(block) > self._longest_measured:  # a longer sum may err by more
                self._longest_measured = max(len(block), self._longest_measured)
                product = torch.zeros_like(self._upper)
                crosses.append(_add_short_block(product, block, block_left, ones))
                # The features before they were weighted in the precision of the product.
                exact = features[chunk].to(self.device, torch.float64)
                if root is not None:
                    exact = exact * root[chunk]
                self._measure(product, exact, block_left[:1] if ones else None)
                self._upper += product
            else:
                crosses.append(_add_short_block(self._upper, block, block_left, ones))
        self._error_sums[2].add_(self._upper.diagonal().sum() - trace_before)
        return crosses[0] if len(crosses) == 1 else torch.stack(crosses).sum(0)

    def _measure(self, product: Tensor, exact_rows: Tensor, last_column: Tensor | None) -> None:
        """Add the error and the trace of a block's product to `_error_sums`.

        Args:
            product: (D, D), on and above the diagonal.
            exact_rows: The block's rows in float64, (n, D), or (n, D - 1).
            last_column: The last column of the rows, (1, n), where it is not among them.
        """
        assert self._error_sums is not None
        if last_column is not None:
            exact_rows = torch.cat([exact_rows, last_column.mT], dim=1)
        # Other directions for every block, so that no error hides from all of them.
        generator = torch.Generator(self.device).manual_seed(self._blocks)
        directions = standard_normal((self.width, _DIRECTIONS), self.device, generator)
        exact = exact_rows.mT @ (exact_rows @ directions)  # G v = F^T (F v)
        error = _mirrored(product.triu()) @ directions - exact  # dG v, (D, directions)
        norm = torch.linalg.matrix_norm(error) / _DIRECTIONS**0.5
        self._error_sums[:2].add_(torch.stack([norm, product.diagonal().sum()]))


def precision_for(wanted: PrecisionLike, features: Tensor) -> Precision:
    """The precision of the products of features.

    Args:
        wanted: What the user chose; "auto" is double, but mixed for features in half precision.
        features: Features of the first batch.

    Raises:
        ValueError: There is no such precision, or the device has no float64 for the sums.
    """
    if wanted not in ("auto", "double", "mixed"):
        raise ValueError(f"precision must be 'auto', 'double' or 'mixed', got {wanted!r}.")
    if features.device.type == "mps":
        raise ValueError(
            "The sums of a fit are float64, which an mps device does not support. Move the model "
            "to the CPU for fit and calibrate: model.cpu()."
        )
    if wanted != "auto":
        return wanted
    if features.dtype in HALVES:
        return "mixed"
    if features.is_cuda and torch.cuda.get_device_capability(features.device) not in _FAST_DOUBLE:
        notify(
            f"float64 is slow on {torch.cuda.get_device_name(features.device)}: fit(train, "
            "precision='mixed') multiplies in float32, and calibrate reports whether that is "
            "accurate enough."
        )
    return "double"


def with_ones(rows: Tensor) -> Tensor:
    """(..., D) -> (..., D + 1), the last column ones."""
    return torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)


def _row_chunks(
    rows: int, step: int, features: Tensor, root: Tensor | None, errors: Tensor | None
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Features, roots of weights and weighted residuals, `step` rows at a time."""
    if rows <= step:
        yield features, root, errors
        return
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        yield (
            features[chunk],
            None if root is None else root[chunk],
            None if errors is None else errors[chunk],
        )


def _add_product(upper: Tensor, rows: Tensor) -> None:
    """Add rows^T rows to the upper triangle.

    Each block row is multiplied only from the diagonal on, which is half the work.

    Args:
        upper: (D, D) in float64.
        rows: (n, D) in any precision.
    """
    for start, stop in _block_row_bounds(len(upper), rows):
        block_row = upper[start:stop, start:]
        left = rows[:, start:stop].mT
        right = rows[:, start:]
        if rows.dtype == torch.float64:
            block_row.addmm_(left, right)
        else:
            block_row += _short_product(left, right)


def _add_short_block(upper: Tensor, rows: Tensor, left: Tensor, ones: bool) -> Tensor:
    """Add rows^T rows of a block in float32 or half precision, and multiply residuals with it.

    Args:
        upper: (D, D) in float64.
        rows: (n, D), or (n, D - 1) with `ones`.
        left: The weighted residuals, (K, n) in float64; with `ones`, a further first row is the
            block's last column.
        ones: Whether the block has a last column of ones, which `rows` lack.

    Returns:
        The products of the residuals with the rows, (K, D) in float64.
    """
    width = rows.shape[1]
    _add_product(upper[:width, :width], rows)
    if not len(left):
        return left.new_empty(0, len(upper))
    products = _times(left, rows)
    if not ones:
        return products
    products = torch.cat([products, left @ left[:1].mT], dim=1)  # (1 + K, D)
    upper[:, -1].add_(products[0])  # the last column of G
    return products[1:]


def _block_row_bounds(width: int, rows: Tensor) -> list[tuple[int, int]]:
    """Where block rows of the product rows^T rows start and stop; the last is the tallest.

    Starts are multiples of 64, so that the blocks of aligned rows are aligned too. An accelerator
    multiplies half precision faster than kernels can be launched: up to 2048 columns there is one
    block.
    """
    if rows.is_cuda and rows.dtype in HALVES and width <= 2048:
        return [(0, width)]
    height = max(64, block_height(width, rows.device.type, 768) // 64 * 64)
    starts = range(0, max(1, width // height) * height, height)
    return list(zip(starts, [*starts[1:], width], strict=True))


def block_height(width: int, device: str, few: int, most: int = 8) -> int:
    """Height of the block rows of a triangular product: small saves work, large saves calls.

    Args:
        width: Number of columns of the matrix.
        device: Type of the device. On a CPU there are up to 8 block rows.
        few: Width below which an accelerator gets one block row. From there up to four times this
            width it gets 4.
        most: Number of block rows that an accelerator gets for wider matrices.
    """
    if device == "cpu":
        return max(64, -(-width // 8))
    if width < few:
        return width
    blocks = 4 if width < 4 * few else most
    return -(-width // blocks)


def _times(left: Tensor, rows: Tensor) -> Tensor:
    """left @ rows for few left rows, (K, n) in float64 and (n, D) in any precision, in float64."""
    if rows.dtype == torch.float64:
        return left @ rows
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return _split_times(left, rows)
    return _block_times(left.to(torch.float32), rows.to(torch.float32))


def _split_times(left: Tensor, rows: Tensor) -> Tensor:
    """left @ rows in float64 for bfloat16 rows, none of which is cast.

    Instead, `left` is split into three bfloat16 summands.
    """
    summands = []
    for _ in range(3):  # summands of 8 bits each
        summand = left.to(rows.dtype)
        summands.append(summand)
        left = left - summand
    products = _block_times(torch.cat(summands), rows)  # (3 K, D)
    return products.reshape(3, len(left), -1).sum(0)


def _block_times(left: Tensor, rows: Tensor) -> Tensor:
    """left @ rows in float64 for float32 or half precision.

    Products of short blocks are summed in float32, and the blocks in float64.
    """
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


def half_product(left: Tensor, right: Tensor, summand: Tensor | None = None) -> Tensor:
    """The product of half-precision matrices, or stacks of them, in float32.

    Args:
        left: (..., n, k) in half precision.
        right: (..., k, m) in half precision.
        summand: Added to the product of two matrices where given, (n, m) in float32.
    """
    needs_grad = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    if left.is_cuda and _WIDENS and not needs_grad:
        if summand is not None:
            return torch.addmm(summand, left, right, out_dtype=torch.float32)
        multiply = torch.mm if left.ndim == 2 else torch.bmm
        return multiply(left, right, out_dtype=torch.float32)
    with full_products(left):
        product = left.float() @ right.float()
    return product if summand is None else summand + product


def full_products(tensor: Tensor) -> AbstractContextManager[None]:
    """A context in which float32 products keep float32's digits, whatever the process allows.

    Processes may allow TF32, which has 10 bits.
    """
    if tensor.is_cuda and not torch.compiler.is_compiling():
        return _full_products()
    return nullcontext()


_SETTING = RLock()
"""Locked while a thread changes the setting of the process, so that each restores what it met."""


@contextmanager
def _full_products() -> Iterator[None]:
    """Switch TF32 off inside the context."""
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
    """The symmetric matrix of an upper triangular one, in the same memory, a block at a time."""
    step = 512
    for start in range(0, upper.shape[-1], step):
        stop = start + step
        block = upper[..., start:stop, start:stop]
        block += block.triu(1).mT
        upper[..., stop:, start:stop] = upper[..., start:stop, stop:].mT
    return upper


def check_finite(sums: Tensor) -> None:
    """Refuse sums that cannot be factorised."""
    if not bool(torch.isfinite(sums).all()):
        raise ValueError("The Gram matrix contains NaN or infinity, because some of its rows do.")


def _sum(left: Tensor | None, right: Tensor | None, sign: int) -> Tensor | None:
    """left + sign * right; None where one of them is None."""
    if left is None or right is None:
        return None
    return left + sign * right


def _sums_of_squares(square: Tensor) -> Tensor:
    """Each target's sum of squared residuals, (K,): a view of `Gram.square`, (K, K) or (K,)."""
    return square if square.ndim == 1 else square.diagonal()
