r"""The Gram matrix of the readout features: the one statistic that a fit accumulates.

For feature rows $f_i$ with loss curvatures $w_i$ (the paper's pseudo-Hessian, Sec. 3.4)

$$ G = \sum_i w_i f_i f_i^\top, \qquad b = \sum_i w_i f_i r_i^\top, \qquad
   S = \sum_i w_i r_i r_i^\top $$

with the residuals $r_i$ where they are known. All are sums over rows, so batching, order and
sharding change nothing but the rounding, and rows can be taken out again. Features are cast to
float64 *before* the product: a float32 product loses every digit at a condition number of 1e4.

Mixed precision multiplies short blocks of rows in the features' own precision (half-precision ones
are exact in the products of float32) and sums the blocks in float64. Of some blocks the error is
measured: for random directions $v$ with $E\,v v^\top = I$, $E |dG\, v|^2$ is the squared Frobenius
norm of $dG = G_{mixed} - G$, and $G v = F^\top (F v)$ is cheap. At worst all blocks err alike and
in the same direction, so errors are added up, in proportion to the blocks' traces.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..notices import notify, require
from .draws import standard_normal
from .memory import require_memory

JOINT_TARGETS = 256
"""Up to so many targets the residuals' full K x K moment is kept, beyond it the diagonal alone."""

Precision = Literal["double", "mixed"]
PrecisionLike = Literal["auto", "double", "mixed"]
_FAST_DOUBLE = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities whose float64 is at most a few times slower than their float32."""
_BUFFER_ROWS = 512
_SHORT, _SHORT_SINGLE, _SHORT_HALF = 1024, 4096, 16384
"""Rows that are cast at once; of a block in float32, at least, and in half precision."""
_LEAST = 2.0**-26
"""Relative rounding of a block that is taken for granted: measured ones may be exact by chance."""
_DIRECTIONS = 8
"""In which the error of a block is measured: its norm within a quarter, so that it is doubled."""
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
        self.width, self.targets, self.count = width, targets, 0
        self.zeros = torch.zeros(shape[:-2], dtype=torch.int64, device=device)
        require_memory(1, width, targets, self.zeros.device)
        self.cross: Tensor | None = None
        self.square: Tensor | None = None
        self._upper = torch.zeros(shape, dtype=torch.float64, device=device)
        self._buffer: list[Tensor] = []
        self._buffered = 0
        # error and trace of the measured blocks, trace of all that were multiplied in short
        self._spots = self.zeros.new_zeros(3, dtype=torch.float64) if precision == "mixed" else None
        self._short: _Short | None = None

    @classmethod
    def preferred_rows(cls, width: int) -> int:
        """How many rows an update should bring at least on a CPU, to be fast."""
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
        self._flush()
        if self._spots is None:
            return 0.0
        error, measured, whole = self._spots.tolist()
        return max(2 * error / measured, _LEAST) * whole if measured else 0.0

    @property
    def totals(self) -> Tensor:
        """Two sums over all rows, of what a feature and a residual spoil that are not finite.

        For rows with a column of ones; they are not read, so that an accelerator runs on.
        """
        total = self._upper[..., -1].sum()
        return torch.stack([total, total if self.square is None else self.square.sum()])

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
        """
        if ones and self.targets is not None:
            features, ones = with_ones(features), False
        if len(features) > (chunk := _chunk(features)):  # casts stay small
            self._check_features(features, ones)  # all of it first: a failed call changes nothing
            if weights is not None:
                self._root(weights, len(features))
            residuals = None if residuals is None else residuals.reshape(len(features), -1)
            for i in range(0, len(features), chunk):
                part = slice(i, i + chunk)
                rest = (None if t is None else t[part] for t in (weights, residuals))
                self.update(features[part], *rest, moments=moments, ones=ones)
            return
        rows = self._rows(features, weights, residuals, ones)
        self._add_moments(rows, moments)
        self.count += rows.features.shape[0]
        if rows.zeros is not None:
            self.zeros += rows.zeros.reshape(self.zeros.shape)
        self._add_rows(rows)

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
        self._flush()
        gram = copy.copy(self)
        gram._buffer, gram._short = [], None
        held = {name: sums for name, sums in vars(self).items() if isinstance(sums, Tensor)}
        vars(gram).update({name: sums.to(device, copy=True) for name, sums in held.items()})
        return gram

    def eigenbasis(self, penalty: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, and eigenvectors of the matrix, to which a penalty is added."""
        self._flush()
        upper = self._upper if penalty is None else self._upper + penalty
        check_finite(upper)
        require_memory(4, self.width, self.targets, self.device)  # vectors, what LAPACK works in
        eigenvalues, eigenvectors = torch.linalg.eigh(upper, UPLO="U")
        return eigenvalues, eigenvectors

    def state(self, *, exact: bool = False) -> dict[str, Tensor]:
        """As tensors, for `from_state`; `exact` keeps rows that wait, for sums to go on alike."""
        if not exact:
            self._flush()
        held = {"waiting": torch.cat(self._buffer)} if self._buffer else {}
        if exact and self._short is not None:
            own = vars(self._short).items()
            held |= {f"short.{k}": torch.as_tensor(v) for k, v in own if v is not None}
        count = torch.tensor(self.count, dtype=torch.int64)
        tensors = {self.stored: self._stored(), "count": count, "zeros": self.zeros}
        moments = {"cross": self.cross, "square": self.square, "spots": self._spots}
        return tensors | held | {k: sums for k, sums in moments.items() if sums is not None}

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
        if (spots := state.get("spots")) is not None:
            sound = spots.shape == (3,) and spots.dtype == torch.float64
            require(sound and bool(((spots >= 0) & spots.isfinite()).all()), "the Gram's rounding")
            gram._spots = spots.clone()
        whole = count.dtype == zeros.dtype == torch.int64 and zeros.shape == matrix.shape[:-2]
        require(whole and bool(((zeros >= 0) & (zeros <= count)).all()), "the Gram's count")
        gram.count, gram.zeros = int(count), zeros.clone()
        gram.cross, gram.square = state.get("cross"), state.get("square")
        if (rows := state.get("waiting")) is not None:
            fits = rows.shape[1:-1] == matrix.shape[:-2] and gram.width - rows.shape[-1] in (0, 1)
            require(fits and (spots is not None or rows.dtype == torch.float64), "rows that wait")
            gram._buffer, gram._buffered = [rows], len(rows)
        if (short := state.get("short.sums")) is not None:
            require(spots is not None and gram.width - len(short) in (0, 1), "the sums in short")
            gram._short = _Short(len(short), short.device)
            for name, new in vars(gram._short).items():
                old = state.get(f"short.{name}")
                require(old is None or old.shape == torch.as_tensor(new).shape, "the sums in short")
                setattr(gram._short, name, old if isinstance(new, Tensor) else int(old or 0))
        require(all(bool(one.isfinite().all()) for one in state.values()), "a number")
        return gram

    def __repr__(self) -> str:
        shared = "" if self.targets is None else f", targets={self.targets}"
        return f"{type(self).__name__}(width={self.width}{shared}, count={self.count})"

    def _stored(self) -> Tensor:
        """The sums as a file holds them, without what waits."""
        return _mirrored(self._upper.triu())

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

    def _rows(
        self, features: Tensor, weights: Tensor | None, residuals: Tensor | None, ones: bool
    ) -> Rows:
        """Check the shapes; cast, and scale each row by the root of its weight."""
        self._check_features(features, ones)
        n, device = features.shape[0], self.device
        scaled = features.detach().to(device, self._products_in(features))
        root = None if weights is None else self._root(weights, n)
        if weights is None and scaled.data_ptr() == features.data_ptr() and n < _BUFFER_ROWS:
            scaled = scaled.clone()  # the caller may write to its own rows before they are summed
        errors = None
        if residuals is not None:
            errors = residuals.detach().to(device, torch.float64).reshape(n, -1)
            errors = errors if root is None else root * errors
        zeros = None if root is None else (root == 0).sum(0).expand(self.targets or 1)
        first = None
        if ones:
            first = scaled.new_ones(n, 1, dtype=torch.float64) if root is None else root
        if self.targets is not None:
            scaled = (scaled if scaled.ndim == 3 else scaled[:, None]).expand(-1, self.targets, -1)
            root = None if root is None else root.expand(-1, self.targets)[..., None]
        if root is not None:
            single = scaled.dtype != torch.float64
            scaled = scaled.float() * root.float() if single else scaled * root
        return Rows(scaled, errors, zeros, first)

    def _products_in(self, features: Tensor) -> torch.dtype:
        if self._spots is None or self.targets is not None or features.dtype == torch.float64:
            return torch.float64
        exact = features.is_cuda and features.dtype in HALVES
        return features.dtype if exact else torch.float32

    def _check_features(self, features: Tensor, ones: bool) -> None:
        given, targets, got = self.width - ones, self.targets, tuple(features.shape)
        if got[1:] not in ((given,), (targets, self.width)):
            each = "" if targets is None else f" or (N, {targets}, {self.width})"
            raise ValueError(f"features must be (N, {given}){each}, got {got}.")

    def _root(self, weights: Tensor, rows: int) -> Tensor:
        weights = weights.detach().to(self.device, torch.float64)
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

    def _add_moments(self, rows: Rows, moments: bool) -> None:
        """Residuals' products, and those of a column of ones, which stays out of the large one."""
        first, errors = self.count == 0, rows.residuals
        errors = errors if moments and (first or self.square is not None) else None
        crossed = first or self.cross is not None
        if errors is None:
            self.cross, self.square = None, None if moments else self.square
        cross, square = self._sides(rows, errors)
        if square is not None:
            self.square = square if self.square is None else self.square + square
        if cross is not None and crossed:
            self.cross = cross if self.cross is None else self.cross + cross

    def _sides(self, rows: Rows, errors: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Add the column of ones; $F^T W r$ (D, K) and $r^T W r$ where there are residuals."""
        few = [part for part in (rows.ones, errors) if part is not None]
        if not few:
            return None, None
        side = few[0] if len(few) == 1 else torch.cat(few, dim=1)
        small = side.mT @ side if side.shape[1] <= JOINT_TARGETS + 1 else None
        square = None
        if errors is not None:
            k = errors.shape[1]
            full = small is not None and k <= JOINT_TARGETS
            square = small[-k:, -k:] if small is not None and full else errors.square().sum(0)
        if self.targets is not None:
            return torch.einsum("ntd,nt->dt", rows.features, side), square
        products = _times(side, rows.features).mT
        if rows.ones is None:
            return products, square
        products = torch.cat([products, rows.ones.mT @ side if small is None else small[:1]])
        self._add_ones(rows, products[:, 0])
        return (None, None) if errors is None else (products[:, 1:], square)

    def _add_rows(self, rows: Rows) -> None:
        """Add their product, at once or with others."""
        if self.targets is not None:
            for upper, own in zip(self._upper, rows.features.unbind(1), strict=True):
                _add_product(upper, own)
            return
        first = self._buffer[0] if self._buffer else rows.features
        if (first.dtype, first.shape[1]) != (rows.features.dtype, rows.features.shape[1]):
            self._multiply()
        self._buffer.append(rows.features)
        self._buffered += rows.features.shape[0]
        if self._buffered >= _BUFFER_ROWS:
            self._multiply()

    def _add_ones(self, rows: Rows, column: Tensor) -> None:
        """Add the last column, and measure its error where that of the others is measured too."""
        self._upper[:, -1] += column
        features, ones = rows.features, rows.ones
        measured = self._short is None or self._short._exact is not None
        if ones is None or self._spots is None or features.dtype == torch.float64 or not measured:
            return
        some, first = features[:_SHORT], ones[:_SHORT]
        error = _times(first, some) - first.mT @ some.to(torch.float64)
        part = min(len(features), _SHORT_HALF) / len(some)
        self._spots[0] += part * 2**0.5 * torch.linalg.vector_norm(error)

    def _flush(self) -> None:
        """Let `_upper` hold all rows."""
        self._multiply()
        if self._short is not None and self._spots is not None:
            self._short.fold(self._upper, self._spots)

    def _multiply(self) -> None:
        if not self._buffer:
            return
        rows = self._buffer[0].contiguous() if len(self._buffer) == 1 else torch.cat(self._buffer)
        self._buffer, self._buffered = [], 0
        width = rows.shape[1]
        if rows.dtype == torch.float64:
            _add_product(self._upper[:width, :width], rows)
            return
        assert self._spots is not None
        if self._short is None or self._short.sums.shape[0] != width:
            self._flush()
            self._short = _Short(width, self.device)
        self._short.add(rows, self._upper, self._spots)


HALVES = (torch.bfloat16, torch.float16)
_WIDENS = hasattr(torch.ops.aten.mm, "dtype")  # from PyTorch 2.8


class _Short:
    """The sum of a short block in float32, and now and then its error."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.sums = torch.zeros(width, width, dtype=torch.float32, device=device)
        self._rows, self._number = 0, 1
        seeded = torch.Generator(device).manual_seed(0)
        self._directions = standard_normal((width, _DIRECTIONS), device, seeded)
        self._exact: Tensor | None = torch.zeros_like(self._directions)

    def add(self, rows: Tensor, upper: Tensor, spots: Tensor) -> None:
        """Multiply rows, folding each full block into the float64 sums."""
        limit = _SHORT_HALF if rows.dtype in HALVES else max(_SHORT_SINGLE, 4 * rows.shape[1])
        while len(rows):
            part, rows = rows[: limit - self._rows], rows[limit - self._rows :]
            if part.dtype in HALVES:
                self.sums += half_product(part.mT, part)
            else:
                with full_products(part):
                    _add_product(self.sums, part)
            if self._exact is not None:
                wide = part.to(torch.float64)
                self._exact += wide.mT @ (wide @ self._directions)
            self._rows += len(part)
            if self._rows >= limit:
                self.fold(upper, spots)

    def fold(self, upper: Tensor, spots: Tensor) -> None:
        """Add the block to `upper`; blocks 1, 4, 16, 32, 64, 96, ... are measured."""
        if not self._rows:
            return
        width, trace = self.sums.shape[0], self.sums.diagonal().sum(dtype=torch.float64)
        spots[2] += trace
        if self._exact is not None:
            whole = (self.sums.triu() + self.sums.triu(1).mT).to(torch.float64)
            error = torch.linalg.matrix_norm(whole @ self._directions - self._exact)
            spots[:2] += torch.stack([error / _DIRECTIONS**0.5, trace])
        upper[:width, :width] += self.sums
        self.sums.zero_()
        self._rows, self._number = 0, self._number + 1
        spot = self._number in (1, 4, 16) or self._number % 32 == 0
        self._exact = torch.zeros_like(self._directions) if spot else None


class Rows(NamedTuple):
    """Checked rows, scaled by the roots of their weights; `ones` (N, 1) is a last column."""

    features: Tensor
    residuals: Tensor | None
    zeros: Tensor | None
    ones: Tensor | None = None


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


def _add_product(upper: Tensor, rows: Tensor) -> None:
    """upper += rows^T rows, block row by block row from the diagonal on (half the work)."""
    width = upper.shape[0]
    block = block_height(width, upper.device.type, 768)
    for start in range(0, width, block):
        left = rows[:, start : start + block]
        upper[start : start + block, start:].addmm_(left.mT, rows[:, start:])


def block_height(width: int, device: str, few: int, most: int = 8) -> int:
    """Small saves work, large saves calls: on an accelerator, one below `few`, else 4 or `most`."""
    if device == "cpu":
        return max(64, -(-width // 8))
    return width if width < few else -(-width // (4 if width < 4 * few else most))


def _times(side: Tensor, rows: Tensor) -> Tensor:
    """side^T rows, of few columns (N, K) in float64 and rows in any precision, in float64."""
    if rows.dtype == torch.float64:
        return side.mT @ rows
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return _split_times(side, rows)
    side, rows = side.to(torch.float32), rows.to(torch.float32)
    with full_products(rows):
        return _block_times(side, rows, torch.matmul)


def _split_times(side: Tensor, rows: Tensor) -> Tensor:
    """The same of bfloat16 rows: the side in three parts, so that no row must be cast."""
    parts, rest = [], side
    for _ in range(3):
        parts.append(rest.to(rows.dtype))
        rest = rest - parts[-1]
    total = _block_times(torch.cat(parts, dim=1), rows, half_product)
    return total.reshape(3, side.shape[1], -1).sum(0)


def _block_times(side: Tensor, rows: Tensor, product: Callable[..., Tensor]) -> Tensor:
    """Summed in float64 over short blocks."""
    end = len(rows) // _SHORT * _SHORT if len(rows) > _SHORT else 0
    total = product(side[end:].mT, rows[end:]).to(torch.float64)
    if not end:
        return total
    each, many = (t[:end].reshape(-1, _SHORT, t.shape[1]) for t in (side, rows))
    return total + product(each.mT, many).sum(0, dtype=torch.float64)


def half_product(left: Tensor, right: Tensor, more: Tensor | None = None) -> Tensor:
    """The product of half-precision matrices, or stacks of them, in float32; plus `more`."""
    wanted = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    if left.is_cuda and _WIDENS and not wanted:
        if more is not None:
            return torch.addmm(more, left, right, out_dtype=torch.float32)
        product = torch.mm if left.ndim == 2 else torch.bmm
        return product(left, right, out_dtype=torch.float32)
    with full_products(left):
        found = left.float() @ right.float()
    return found if more is None else more + found


def full_products(tensor: Tensor) -> AbstractContextManager[None]:
    """Where float32 products keep float32's digits, whatever the process allows (TF32)."""
    looked = tensor.is_cuda and not torch.compiler.is_compiling()
    return _full_products() if looked else nullcontext()


_ONE = RLock()
"""Of the threads that want the setting of the process, one at a time, so that it is put back."""


@contextmanager
def _full_products() -> Iterator[None]:
    own = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(own, "fp32_precision") else "allow_tf32"  # up to torch 2.8
    with _ONE:
        before = getattr(own, name)
        setattr(own, name, False if name == "allow_tf32" else "ieee")
        try:
            yield
        finally:
            setattr(own, name, before)


def _chunk(features: Tensor) -> int:
    """Rows to cast at once: on a CPU few enough for its cache."""
    if features.device.type == "cpu":
        return _SHORT
    if features.dtype in HALVES:
        return len(features)
    return max(_SHORT, (1 << 25) // features.shape[1:].numel())


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


def _sum(left: Tensor | None, right: Tensor | None, sign: int) -> Tensor | None:
    return None if left is None or right is None else left + sign * right


def _variances(square: Tensor) -> Tensor:
    """The diagonal of (K, K), or (K,) itself."""
    return square if square.ndim == 1 else square.diagonal()
