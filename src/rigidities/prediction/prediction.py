r"""A prediction with its error bar: $\mu$, $\alpha^2 q$, noise, and the distribution around
them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..notices import extra, needed, require_level
from . import picture
from .distribution import Distribution, Gaussian
from .entries import Change, regrouped

_VARIANCES = ("epistemic", "noise", "from_inputs")
_FAR = -1e15
"""Scales below a mean: a bound there cuts nothing."""
_ROUNDING = torch.finfo(torch.float32).eps
"""Of a bound: whatever holds it, it may have been computed in single precision."""


@dataclass(frozen=True)
class Prediction:
    r"""Mean and error bar of many predictions; every tensor is shaped like the model's output.

    With `support`, probability that the distribution puts beyond a bound lies at the bound:
    quantiles, samples, `cdf`, `log_prob`, `crps` and `centre` are those of the bounded
    distribution. `variance` and `std` are not.

    It is a value: `p[:10]`, `p[mask]` and `p[:, 0]` are those entries with all that they hold, and
    `p * sd + mu` the prediction of sd Y + mu, with numbers or one for each target. A constant says
    nothing of what predictions share: functions of several are for `uq.propagate`.

    Attributes:
        mean: what the model predicts.
        epistemic: $\alpha^2 f^\top (G + \varsigma^2 I)^{-1} f$, what more data would shrink: by how
            much the prediction would move, were the model trained again on other rows.
        noise: the rest of the distribution's second moment, tails and guard included; zero unless
            calibrated.
        rigidity: the paper's $R = 1/q$, unscaled: of the model's own output, in whatever units.
        from_inputs: variance that uncertain inputs bring; zero unless asked for.
        distribution: shape of the predictive distribution.
        support: the least and the largest value a target can have, None for no bound; numbers, or
            tensors that broadcast against the mean.
        conformal: what gives `interval` its guarantee, if anything.
        novelty: how unlike the training data the input looks to the layer that knows it least, see
            `prediction.novelty`; None unless the fit was asked for it.

    Examples:
        >>> one = torch.ones(1)
        >>> p = Prediction(mean=2 * one, epistemic=9 * one, noise=16 * one, rigidity=one)
        >>> p.std.item(), [round(bound.item(), 2) for bound in p.interval(0.9)]
        (5.0, [-6.22, 10.22])
        >>> round(p.cdf(7 * one).item(), 4), round(p.crps(2 * one).item(), 4)
        (0.8413, 1.1685)
    """

    mean: Tensor
    epistemic: Tensor
    noise: Tensor
    rigidity: Tensor
    from_inputs: Tensor = field(default_factory=lambda: torch.zeros(()))
    distribution: Distribution = field(default_factory=Gaussian)
    support: tuple[float | Tensor | None, float | Tensor | None] | None = None
    conformal: Any = None
    novelty: Tensor | None = None

    __array_ufunc__ = None  # arrays and series on the left leave sums and products to us
    __pandas_priority__ = 5000

    def __post_init__(self) -> None:
        if self.from_inputs.ndim == 0:
            shaped = self.from_inputs.to(self.epistemic).expand_as(self.epistemic)
            object.__setattr__(self, "from_inputs", shaped)
        low, high = (torch.as_tensor(end, dtype=torch.float64) for end in self._bounds)
        if not bool((low < high).all()):
            said = "A support is the least value before the largest, None for no bound, got"
            raise ValueError(f"{said} {self.support}.")
        ends: Any = (low, high)
        if low.ndim == high.ndim == 0:
            ends = tuple(float(end) if bool(end.isfinite()) else None for end in ends)
        object.__setattr__(self, "support", None if ends == (None, None) else ends)

    @property
    def variance(self) -> Tensor:
        """Of the parts together: the second moment of the distribution about `mean`."""
        return self.epistemic + self.noise + self.from_inputs

    @property
    def std(self) -> Tensor:
        """Standard deviation of the predictive distribution, about `mean`."""
        return self.variance.sqrt()

    @property
    def scale(self) -> Tensor:
        r"""The distribution's unit: $s = \sigma / \sqrt{E z^2}$."""
        second = torch.as_tensor(self.distribution.second, dtype=torch.float64)
        kind = torch.promote_types(self.variance.dtype, torch.float32)
        return (self.variance.to(kind) / second.to(self.mean.device, kind)).sqrt()

    @property
    def centre(self) -> Tensor:
        """The distribution's own mean, which a tilt and bounds move away from `mean`."""
        shift = torch.as_tensor(self.distribution.mean, dtype=torch.float64).to(self.mean.device)
        for sign, _, distribution, z in self._ends:
            shift = shift + sign * distribution.shortfall(z)
        return self.mean + self.scale * shift.to(self.scale)

    def quantile(self, level: float) -> Tensor:
        """The value with probability `level` below it."""
        require_level(level, "A quantile's")
        z = self.distribution.quantile(
            torch.tensor(level, dtype=torch.float64, device=self.mean.device)
        )
        return self._inside(self.mean + z.to(self.scale) * self.scale)

    def interval(self, level: float = 0.9, *, conformal: bool = False) -> tuple[Tensor, Tensor]:
        """The central interval that holds probability `level`: (low, high).

        Args:
            level: the probability.
            conformal: under the distribution where False; with the guarantee of the conformal rows
                where True.

        Raises:
            ValueError: the level is none, or there were no conformal rows.
        """
        require_level(level, "An interval's")
        if not conformal:
            return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)
        if self.conformal is None:
            raise ValueError(
                "A conformal interval needs rows that fitted nothing else, and the calibration had "
                "none. Call calibrate(..., conformal=rows)."
            )
        bounds: tuple[Tensor, Tensor] = self.conformal.interval(self, level)
        return bounds

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of each prediction, (n, ...). They carry no correlations."""
        return self._inside(
            self.mean + self.scale * self.distribution.sample(self.scale, n, generator)
        )

    def log_prob(self, target: Tensor) -> Tensor:
        """Logarithm of the predictive density at the target; of the mass, at a bound."""
        y, (low, high) = self.matched(target), self._bounds
        value = self.distribution.log_density(self._z(y)) - self.scale.log()
        for _, bound, distribution, z in self._ends:
            value = torch.where(y == bound, distribution.cdf(z).log(), value)
        return torch.where((y < low) | (y > high), -math.inf, value).to(self.scale)

    def cdf(self, target: Tensor) -> Tensor:
        """Probability of a value up to the target."""
        y, (low, high) = self.matched(target), self._bounds
        below = self.distribution.cdf(self._z(y))
        return torch.where(y < low, 0, torch.where(y >= high, 1, below)).to(self.scale)

    def crps(self, target: Tensor) -> Tensor:
        r"""Continuous ranked probability score, $\int (F(x) - 1[x \ge y])^2 dx$."""
        y = self.matched(target)
        inside = y.clamp(*self._bounds)
        score = self.distribution.crps(self._z(inside))
        for _, _, distribution, z in self._ends:
            score = score - distribution.shortfall(z, 2)
        return (self.scale * score + (y - inside).abs()).to(self.scale)

    def tail(self, target: Tensor) -> Tensor:
        r"""How far out a target lies, $2 \min(P(Y \le y), P(Y \ge y))$, at most 1."""
        y, (low, high) = self.matched(target), self._bounds
        z = torch.where(y == self.mean, 0.0, self._z(y))  # the scale may be zero
        below = torch.where(y < low, 0, torch.where(y >= high, 1, self.distribution.cdf(z)))
        above = torch.where(
            y > high, 0, torch.where(y <= low, 1, self.distribution.mirrored.cdf(-z))
        )
        return (2 * torch.minimum(below, above)).clamp(max=1)

    def within(self, tail: Tensor) -> tuple[Tensor, Tensor]:
        """The interval of what lies no farther out: (low, high); all there is for a tail of 0."""
        mean, scale, half = self.mean.double(), self.scale.double(), tail.double() / 2
        low = torch.where(half > 0, mean + scale * self.distribution.quantile(half), -math.inf)
        high = torch.where(
            half > 0, mean - scale * self.distribution.mirrored.quantile(half), math.inf
        )
        return self._inside(low), self._inside(high)

    def to_numpy(self, level: float = 0.9, *, conformal: bool = False) -> dict[str, Any]:
        """Arrays shaped like the output: mean, std, low, high (as `interval`), epistemic, noise.

        And novelty, where it is known.
        """
        parts = {name: getattr(self, name) for name in ("mean", "std", "epistemic", "noise")}
        if self.novelty is not None:
            parts["novelty"] = self.novelty
        parts |= zip(("low", "high"), self.interval(level, conformal=conformal), strict=True)
        return {k: v.detach().to(self.scale).cpu().numpy().copy() for k, v in parts.items()}

    def to_pandas(
        self, level: float = 0.9, index: Any = None, *, names: Any = None, conformal: bool = False
    ) -> Any:
        """A table: mean, std, low and high; of several targets `mean_0`, ... or `mean_<name>`.

        And novelty, where it is known.

        Args:
            level: of the interval from low to high.
            index: of the rows.
            names: of the targets.
            conformal: as in `interval`.
        """
        own = self._columns(level, names, conformal)
        return needed("pandas", extra("tabular")).DataFrame(own, index)

    def to_polars(self, level: float = 0.9, *, names: Any = None, conformal: bool = False) -> Any:
        """The same in a table of polars; see `to_pandas`."""
        return needed("polars").DataFrame(self._columns(level, names, conformal))

    def _columns(self, level: float, names: Any, conformal: bool) -> dict[str, Any]:
        rows, count = self.mean.shape[:1].numel(), self.mean.shape[1:].numel()
        if names is not None and not len(names) == len(set(names)) == count:
            raise ValueError(f"Expected names of {count} targets, each its own, got {names!r}.")
        ends = range(count) if names is None else names
        found = self.to_numpy(level, conformal=conformal)
        flat = {part: found[part].reshape(rows, count) for part in ("mean", "std", "low", "high")}
        if count == 1 and names is None:
            columns = {part: values[:, 0] for part, values in flat.items()}
        else:
            columns = {f"{p}_{end}": v[:, k] for k, end in enumerate(ends) for p, v in flat.items()}
        if "novelty" in found:  # the same for all targets of an input
            columns["novelty"] = found["novelty"].reshape(rows, count)[:, 0]
        return columns

    def to(self, device: torch.device | str) -> Prediction:
        """The same on another device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if hasattr(v, "to")}
        return replace(
            self, **moved, distribution=self.distribution.each(lambda tensor: tensor.to(device))
        )

    def __array__(self, *options: Any, **more: Any) -> Any:
        raise TypeError("A Prediction is more than one array: take p.mean, p.std or p.to_numpy().")

    def __getitem__(self, index: Any) -> Prediction:
        return self._at(self._places[index])

    @property
    def _places(self) -> Tensor:
        """Where each entry lies in a flat tensor."""
        return torch.arange(self.mean.numel(), device=self.mean.device).reshape(self.mean.shape)

    def _at(self, places: Tensor) -> Prediction:
        def taken(tensors: Sequence[Tensor]) -> Tensor:
            whole = tensors[0].expand(self.mean.shape).reshape(-1)
            return whole[places.to(whole.device)]

        return _regrouped([self], taken)

    @classmethod
    def concatenate(cls, predictions: Iterable[Prediction]) -> Prediction:
        """Predictions of some rows and of others as one, in this order.

        Raises:
            ValueError: there are none, or they differ in their targets, distribution or conformal
                rows.
        """
        parts = list(predictions)
        shapes = [p.mean.shape for p in parts]
        if len({shape[1:] for shape in shapes}) != 1 or not all(shapes):
            raise ValueError(
                "Expected a list of predictions whose rows have one shape, got "
                f"{[tuple(shape) for shape in shapes]}."
            )

        def joined(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([t.expand(s) for t, s in zip(tensors, shapes, strict=True)])

        return _regrouped(parts, joined)

    def __mul__(self, factor: Any) -> Prediction:
        return self._line(factor)

    def __truediv__(self, divisor: Any) -> Prediction:
        return self._line(1 / self._constant(divisor))

    def __add__(self, shift: Any) -> Prediction:
        return self._line(1.0, shift)

    def __sub__(self, shift: Any) -> Prediction:
        return self._line(1.0, -self._constant(shift))

    def __rsub__(self, shift: Any) -> Prediction:
        return self._line(-1.0, shift)

    def __neg__(self) -> Prediction:
        return self._line(-1.0)

    __rmul__, __radd__ = __mul__, __add__

    def _line(self, factor: Any, shift: Any = 0.0) -> Prediction:
        """The prediction of a Y + b; in float64 where single precision cannot hold its variance."""
        a, b = self._constant(factor), self._constant(shift)
        square = a.square()
        if not bool((square.isfinite() & b.isfinite() & (square != 0)).all()):
            raise ValueError(
                "Expected finite numbers, and no factor of zero or whose square is beyond float64: "
                "it leaves no distribution."
            )
        up, distribution = (
            a > 0,
            self.distribution if bool((a > 0).all()) else self.distribution.mirrored,
        )
        if distribution is not self.distribution and bool(up.any()):
            distribution = regrouped(
                [self.distribution, distribution],
                lambda t: torch.where(up.to(t[0].device), t[0], t[1]),
            )
        moved = [(end * a + b, abs(end * a) + b.abs()) for end in self._bounds]
        # what is left of a bound where a shift undoes another is rounding
        ends = [torch.where(end.abs() < 4 * _ROUNDING * terms, 0.0, end) for end, terms in moved]
        kind = torch.promote_types(torch.result_type(self.mean, self.variance), torch.float32)
        made: dict[str, Any] = {k: vars(self)[k].double() * square for k in _VARIANCES}
        own = torch.cat([part[part > 0] for part in made.values()]).to(kind)
        if bool(((own < torch.finfo(kind).tiny) | own.isinf()).any()):
            kind = torch.float64
        made["mean"] = self.mean.double() * a + b
        made = {k: v.to(kind) for k, v in made.items()}
        made["conformal"] = self.conformal and self.conformal.resolved(self)
        return replace(
            self,
            **made,
            distribution=distribution,
            support=(torch.minimum(*ends), torch.maximum(*ends)),
        )

    def _constant(self, given: Any) -> Tensor:
        """A number, or one for each target, in float64."""
        import numpy

        values: Any = given
        if not isinstance(given, Tensor | Prediction):
            array = numpy.asarray(given)
            values = torch.as_tensor(array.astype(float)) if array.dtype.kind in "iuf" else None
        if not isinstance(values, Tensor) or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(
                "Expected a real number, or one for each target, got a "
                f"{getattr(given, 'dtype', type(given).__name__)}. Of several predictions, which "
                "share errors, take uq.propagate(fn, x)."
            )
        found, whole = values.to(self.mean.device, torch.float64), self.mean.shape
        fits = zip(found.shape[::-1], whole[::-1], strict=False)
        if found.ndim > len(whole) or any(own not in (1, size) for own, size in fits):
            raise ValueError(
                "Expected a number, or one for each target, that broadcasts to the prediction's "
                f"{tuple(whole)}, got {tuple(found.shape)}."
            )
        return found

    @property
    def _bounds(self) -> tuple[Any, Any]:
        """The support as numbers, or as tensors in float64."""
        low, high = self.support or (None, None)
        if isinstance(low, Tensor) and isinstance(high, Tensor):
            return low.to(self.mean.device), high.to(self.mean.device)
        return -math.inf if low is None else low, math.inf if high is None else high

    def _inside(self, values: Tensor) -> Tensor:
        return values.clamp(*self._bounds).to(self.scale)

    @property
    def _ends(self) -> list[tuple[int, float, Distribution, Tensor]]:
        """Sign and value of each bound, and the distribution and its z seen with that bound
        below."""
        sides = zip((1, -1), self._bounds, strict=True)
        return [
            (side, end, distribution, (side * self._z(end)).clamp(min=_FAR))
            for side, end in sides
            if bool(torch.as_tensor(end).isfinite().any())
            for distribution in [self.distribution if side > 0 else self.distribution.mirrored]
        ]

    def _z(self, value: float | Tensor) -> Tensor:
        """A value in the distribution's units, about the mean, in float64."""
        return (value - self.mean.double()) / self.scale.double()

    def matched(self, target: Tensor) -> Tensor:
        """The target shaped like the prediction, in float64; at a bound if but for rounding."""
        if target.shape != self.mean.shape:
            if target.squeeze().shape != self.mean.squeeze().shape:
                raise ValueError(
                    f"The target must be shaped like the prediction, {tuple(self.mean.shape)}, "
                    f"got {tuple(target.shape)}."
                )
            target = target.reshape(self.mean.shape)
        target, scale = target.to(self.mean.device), self.scale.double()
        y, kind = target.double(), target.dtype if target.is_floating_point() else torch.float64
        for bound in self._bounds:
            end = torch.as_tensor(bound, dtype=torch.float64, device=y.device).expand_as(y)
            size = end.abs() + self.mean.double().abs() + 64 * scale
            near = (y - end).abs() <= torch.minimum(_ROUNDING * size, scale / 1000)
            y = torch.where(near | (target == end.to(kind)), end, y)
        return y

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        few = self._at(self._places.flatten()[:3])
        parts = (few.mean.tolist(), few.std.tolist(), few.centre.tolist(), picture.off_centre(few))
        shown = [picture.entry(*each) for each in zip(*parts, strict=True)]
        if self.mean.numel() > 3:
            shown.append("...")
        rows, *others = self.mean.shape or (1,)
        size = " x ".join([f"{rows} row{'s' * (rows != 1)}", *(str(n) for n in others if n > 1)])
        return f"Prediction of {size}: {', '.join(shown)}; distribution {self.distribution.name}"

    def _repr_html_(self) -> str:
        targets = self._places.reshape(-1, self.mean.shape[1:].numel()).T[:3]
        orders = [each[self.mean.flatten()[each].argsort()] for each in targets]
        few = [self._at(order[:: 1 + len(order) // 120]) for order in orders]
        return picture.html(repr(self), [self._at(each[:5]) for each in targets], few)


def _regrouped(parts: Sequence[Prediction], change: Change) -> Prediction:
    """What `change` makes of predictions and of all that hangs on their entries."""
    names = ("mean", "rigidity", *_VARIANCES)
    made: dict[str, Any] = {k: change([vars(p)[k] for p in parts]) for k in names}
    known = [p.novelty for p in parts if p.novelty is not None]
    made["novelty"] = change(known) if len(known) == len(parts) else None
    hanging: dict[str, Any] = {"distribution": [p.distribution for p in parts]}
    hanging["support"] = [p._bounds for p in parts]
    hanging["conformal"] = [p.conformal and p.conformal.resolved(p) for p in parts]
    return replace(parts[0], **made | {k: regrouped(v, change) for k, v in hanging.items()})
