r"""A prediction with its error bar.

A `Prediction` contains the mean $\mu$, the variances that add up to $\sigma^2$ (epistemic, noise
and that of uncertain inputs) and the distribution around the mean. Quantiles, probabilities and
scores are computed with the distribution's unit: $y = \mu + s z$ with $s = \sigma / \sqrt{E z^2}$
(`Prediction.unit`). A support moves the probability beyond a bound to the bound. Entries can be
selected, joined and converted to other units, together with everything that belongs to them
(`prediction.entries`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..notices import extra, needed, require_level
from . import picture
from .distribution import Distribution, Gaussian
from .entries import Change, regrouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Prediction"]

_FAR = -1e15
"""Least z of a bound. A bound that lies farther below the mean cuts nothing off."""
_ROUNDING = torch.finfo(torch.float32).eps
"""Relative rounding of a bound, which may have been computed in single precision."""


class _Bound(NamedTuple):
    """A finite bound of the support, mirrored where needed so that it is a lower bound.

    Attributes:
        sign: 1 for the lower bound, -1 for the upper one, which is mirrored.
        value: The bound, a number or a tensor that broadcasts against the mean.
        distribution: The distribution, or its mirror image.
        z: The bound in the units of that distribution, about the mean.
    """

    sign: int
    value: Any
    distribution: Distribution
    z: Tensor


@dataclass(frozen=True)
class Prediction:
    r"""Mean and error bar of many predictions; every tensor is shaped like the model's output.

    With `support`, the probability beyond a bound is moved to the bound: quantiles, samples, `cdf`,
    `log_prob`, `crps` and `centre` are those of the bounded distribution. `variance` and `std` are
    not.

    `p[:10]`, `p[mask]` and `p[:, 0]` select entries and return a `Prediction`. `p * sd + mu` is the
    prediction of sd Y + mu, where sd and mu are numbers, or have one entry per target. The errors
    of several predictions are correlated: use `uq.propagate` for functions of them.

    Attributes:
        mean: What the model predicts.
        epistemic: $\alpha^2 f^\top (G + \varsigma^2 I)^{-1} f$, the variance that more data would
            shrink. It measures how much the prediction would change if the model were trained again
            on other rows. It is at most the distribution's second moment.
        noise: The rest of the distribution's second moment, after `epistemic` and `from_inputs`; it
            includes what tails and a guard add. Zero unless calibrated.
        rigidity: The paper's $R = 1/q$, unscaled. It is that of the model's output, in the
            output's units.
        from_inputs: Variance that uncertain inputs cause. Zero unless requested.
        distribution: Shape of the predictive distribution.
        support: The lowest and the highest value that a target can have, with None for no bound.
            Each is a number, or a tensor that broadcasts against the mean.
        conformal: The conformal scores that give `interval` its guarantee, if there are any.
        novelty: How unfamiliar the input looks to the layer where it is most novel, see
            `NoveltyScores`. None unless the fit was called with `novelty=True`.

    Examples:
        >>> ones = torch.ones(1)
        >>> p = Prediction(mean=2 * ones, epistemic=9 * ones, noise=16 * ones, rigidity=ones)
        >>> p.std.item(), [round(bound.item(), 2) for bound in p.interval(0.9)]
        (5.0, [-6.22, 10.22])
        >>> round(p.cdf(7 * ones).item(), 4), round(p.crps(2 * ones).item(), 4)
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

    # Arrays and series on the left of an operator leave sums and products to this class.
    __array_ufunc__ = None
    __pandas_priority__ = 5000

    def __post_init__(self) -> None:
        if self.from_inputs.ndim == 0:
            shaped = self.from_inputs.to(self.epistemic).expand_as(self.epistemic)
            object.__setattr__(self, "from_inputs", shaped)
        object.__setattr__(self, "support", self._checked_support())

    def _checked_support(self) -> Any:
        """The support in one form: None, a pair of numbers or None, or a pair of tensors."""
        low, high = (torch.as_tensor(bound, dtype=torch.float64) for bound in self._bounds)
        if not bool((low < high).all()):
            raise ValueError(
                f"Expected support=(lowest, highest), with None for no bound, got {self.support}."
            )
        if low.ndim > 0 or high.ndim > 0:
            return (low, high)
        least = float(low) if bool(low.isfinite()) else None
        largest = float(high) if bool(high.isfinite()) else None
        if least is None and largest is None:
            return None
        return (least, largest)

    @property
    def variance(self) -> Tensor:
        """The sum of all variances: the second moment of the distribution about `mean`."""
        return self.epistemic + self.noise + self.from_inputs

    @property
    def std(self) -> Tensor:
        """Standard deviation of the predictive distribution, about `mean`."""
        return self.variance.sqrt()

    @property
    def unit(self) -> Tensor:
        r"""The distribution's unit, $s = \sigma / \sqrt{E z^2}$."""
        second = torch.as_tensor(self.distribution.second, dtype=torch.float64)
        dtype = torch.promote_types(self.variance.dtype, torch.float32)
        return (self.variance.to(dtype) / second.to(self.mean.device, dtype)).sqrt()

    @property
    def centre(self) -> Tensor:
        """The distribution's own mean, which its shape and bounds move away from `mean`."""
        shift = torch.as_tensor(self.distribution.mean, dtype=torch.float64).to(self.mean.device)
        for bound in self._finite_bounds:
            shift = shift + bound.sign * bound.distribution.shortfall(bound.z)
        return self.mean + self.unit * shift.to(self.unit)

    def quantile(self, level: float) -> Tensor:
        """The value with probability `level` below it.

        Raises:
            ValueError: The level lies outside (0, 1).
        """
        require_level(level, "A quantile's")
        level_tensor = torch.tensor(level, dtype=torch.float64, device=self.mean.device)
        z = self.distribution.quantile(level_tensor)
        return self._within_support(self.mean + z.to(self.unit) * self.unit)

    def interval(
        self, level: float = 0.9, *, conformal: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """The central interval that covers the target with probability `level`: (low, high).

        Args:
            level: The probability.
            conformal: None (default) for the interval with the guarantee of the conformal rows
                where there were such rows, and for that of the distribution otherwise. True refuses
                where there were none. False is always the distribution's.

        Raises:
            ValueError: The level lies outside (0, 1), or `conformal` is True and there were no
                conformal rows.
        """
        require_level(level, "An interval's")
        if conformal is None:
            conformal = self.conformal is not None
        if not conformal:
            return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)
        if self.conformal is None:
            raise ValueError(
                "A conformal interval needs rows that were used for nothing else, and the "
                "calibration had none. Call conformalize(x, y) after calibrate."
            )
        bounds: tuple[Tensor, Tensor] = self.conformal.interval(self, level)
        return bounds

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of each prediction, (n, ...), without correlations between them."""
        z = self.distribution.sample(self.unit, n, generator)
        return self._within_support(self.mean + self.unit * z)

    def log_prob(self, target: Tensor) -> Tensor:
        """Log of the predictive density at the target, or of the probability mass at a bound."""
        y = self.matched(target)
        low, high = self._bounds
        value = self.distribution.log_density(self._in_units(y)) - self.unit.log()
        for bound in self._finite_bounds:
            value = torch.where(y == bound.value, bound.distribution.cdf(bound.z).log(), value)
        return torch.where((y < low) | (y > high), -math.inf, value).to(self.unit)

    def cdf(self, target: Tensor) -> Tensor:
        """Probability that the value is at most the target."""
        y = self.matched(target)
        low, high = self._bounds
        below = self.distribution.cdf(self._in_units(y))
        return torch.where(y < low, 0, torch.where(y >= high, 1, below)).to(self.unit)

    def crps(self, target: Tensor) -> Tensor:
        r"""Continuous ranked probability score, $\int (F(x) - 1[x \ge y])^2 dx$."""
        y = self.matched(target)
        y_within = y.clamp(*self._bounds)
        score = self.distribution.crps(self._in_units(y_within))
        # Subtract what the unbounded score counts beyond the bounds.
        for bound in self._finite_bounds:
            score = score - bound.distribution.shortfall(bound.z, 2)
        return (self.unit * score + (y - y_within).abs()).to(self.unit)

    def tail(self, target: Tensor) -> Tensor:
        r"""Two-sided tail probability of a target, $2 \min(P(Y \le y), P(Y \ge y))$, at most 1."""
        y = self.matched(target)
        low, high = self._bounds
        # 0/0 is avoided: the scale may be zero where the target is the mean.
        z = torch.where(y == self.mean, 0.0, self._in_units(y))
        below = self.distribution.cdf(z)
        below = torch.where(y < low, 0, torch.where(y >= high, 1, below))
        above = self.distribution.mirrored.cdf(-z)
        above = torch.where(y > high, 0, torch.where(y <= low, 1, above))
        return (2 * torch.minimum(below, above)).clamp(max=1)

    def within(self, tail: Tensor) -> tuple[Tensor, Tensor]:
        """The interval of values whose `tail` is at least this one: (low, high).

        For a tail of 0 it is the whole line, or the support.
        """
        mean = self.mean.double()
        unit = self.unit.double()
        level = tail.double() / 2
        low = mean + unit * self.distribution.quantile(level)
        # The mirrored distribution keeps the digits of levels close to 1.
        high = mean - unit * self.distribution.mirrored.quantile(level)
        low = torch.where(level > 0, low, -math.inf)
        high = torch.where(level > 0, high, math.inf)
        return self._within_support(low), self._within_support(high)

    def to_numpy(self, level: float = 0.9, *, conformal: bool | None = None) -> dict[str, Any]:
        """Arrays shaped like the output: mean, std, epistemic, noise, low and high.

        Novelty is included if it is known.

        Args:
            level: Probability of the interval from low to high.
            conformal: As in `interval`.
        """
        low, high = self.interval(level, conformal=conformal)
        tensors = {
            "mean": self.mean,
            "std": self.std,
            "epistemic": self.epistemic,
            "noise": self.noise,
        }
        if self.novelty is not None:
            tensors["novelty"] = self.novelty
        tensors["low"] = low
        tensors["high"] = high
        dtype = self.unit.dtype
        arrays = {}
        for name, tensor in tensors.items():
            arrays[name] = tensor.detach().to(dtype=dtype).cpu().numpy().copy()
        return arrays

    def to_pandas(
        self,
        level: float = 0.9,
        index: Any = None,
        *,
        names: Any = None,
        conformal: bool | None = None,
    ) -> Any:
        """A table with the columns mean, std, low and high.

        The columns of several targets are `mean_0`, ... or `mean_<name>`. Novelty is a separate
        column if it is known.

        Args:
            level: Probability of the interval from low to high.
            index: Index of the rows.
            names: Names of the targets.
            conformal: As in `interval`.
        """
        columns = self._columns(level, names, conformal)
        return needed("pandas", extra("tabular")).DataFrame(columns, index)

    def to_polars(
        self, level: float = 0.9, *, names: Any = None, conformal: bool | None = None
    ) -> Any:
        """The same table in polars; see `to_pandas`."""
        return needed("polars").DataFrame(self._columns(level, names, conformal))

    def _columns(self, level: float, names: Any, conformal: bool | None) -> dict[str, Any]:
        """Arrays (rows,) under the names that columns of a table have."""
        rows = self.mean.shape[:1].numel()
        targets = self.mean.shape[1:].numel()
        if names is not None and not len(names) == len(set(names)) == targets:
            raise ValueError(f"Expected {targets} different names, one per target, got {names!r}.")
        arrays = self.to_numpy(level, conformal=conformal)
        flat = {name: array.reshape(rows, targets) for name, array in arrays.items()}
        quantities = ("mean", "std", "low", "high")
        columns = {}
        if targets == 1 and names is None:
            for quantity in quantities:
                columns[quantity] = flat[quantity][:, 0]
        else:
            for target, name in enumerate(range(targets) if names is None else names):
                for quantity in quantities:
                    columns[f"{quantity}_{name}"] = flat[quantity][:, target]
        if "novelty" in flat:  # the same for all targets of an input
            columns["novelty"] = flat["novelty"][:, 0]
        return columns

    def plot(
        self,
        y: Any = None,
        *,
        kind: str | None = None,
        x: Any = None,
        along: int | str | None = None,
        target: int | str | None = None,
        level: float = 0.9,
        conformal: bool | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw the predictions with their intervals, beside true values if there are any.

        | call | what it draws |
        | --- | --- |
        | `p.plot(y)` | predictions against true values: `kind="parity"` |
        | `p.plot()` | rows in the order of their predictions: `kind="rows"` |
        | `p.plot(x=x)` | a curve with a band along one input: `kind="along"` |
        | `p.plot(y, kind="errors")` | the sizes of errors against those of the bars |
        | `p.plot(y, kind="binned")` | mean squared errors against variances, in bins |
        | `p.plot(y, kind="calibration")` | how often intervals of every level cover |

        Intervals are those of `interval`. True values outside them have another colour, and the
        legend shows the share that the intervals cover. If `x` is given without `kind`, and the
        rows do not form a curve because other inputs vary too, each row is drawn with its own
        interval (`kind="rows"`).

        Args:
            y: True values, shaped like the prediction: a tensor, an array, a series, a frame or a
                list. For one of several targets, its values alone are enough.
            kind: What to draw, see the table.
            x: Inputs for the horizontal axis, one value per row, or all inputs and `along`.
            along: The input to draw along: its number, or the name of a frame's column.
            target: The target to draw, where there are several: its number, or the name of a
                column of y.
            level: Probability of the intervals.
            conformal: As in `interval`.
            ax: Axes of matplotlib to draw on, new ones by default.

        Returns:
            The axes. Nothing is shown or saved.

        Raises:
            ImportError: Matplotlib is missing.
            ValueError: The arguments do not go together.
        """
        # Plots lean on this room. Their module is looked up when it is asked for.
        axes: Axes = needed("rigidities.plots").draw(
            self,
            y,
            kind=kind,
            x=x,
            chosen_input=along,
            chosen_target=target,
            level=level,
            conformal=conformal,
            ax=ax,
        )
        return axes

    def to(self, device: torch.device | str) -> Prediction:
        """The same prediction on another device."""
        return replace(
            self,
            mean=self.mean.to(device),
            epistemic=self.epistemic.to(device),
            noise=self.noise.to(device),
            rigidity=self.rigidity.to(device),
            from_inputs=self.from_inputs.to(device),
            distribution=self.distribution.each(lambda tensor: tensor.to(device)),
            conformal=None if self.conformal is None else self.conformal.to(device),
            novelty=None if self.novelty is None else self.novelty.to(device),
        )

    def __array__(self, *options: Any, **more: Any) -> Any:
        raise TypeError("A Prediction is more than one array. Use p.mean, p.std or p.to_numpy().")

    def __getitem__(self, index: Any) -> Prediction:
        return self._at(self._places[index])

    @property
    def _places(self) -> Tensor:
        """Where each entry lies in a flat tensor, shaped like the mean."""
        return torch.arange(self.mean.numel(), device=self.mean.device).reshape(self.mean.shape)

    def _at(self, places: Tensor) -> Prediction:
        """The prediction of the entries at places of the flat tensor, shaped like `places`."""

        def pick(tensors: Sequence[Tensor]) -> Tensor:
            flat = tensors[0].expand(self.mean.shape).reshape(-1)
            return flat[places.to(flat.device)]

        return _regrouped([self], pick)

    @classmethod
    def concatenate(cls, predictions: Iterable[Prediction]) -> Prediction:
        """Several predictions joined along the rows, in this order.

        Raises:
            ValueError: There are no predictions, or they differ in their targets, distribution or
                conformal rows.
        """
        predictions = list(predictions)
        shapes = [prediction.mean.shape for prediction in predictions]
        row_shapes = {shape[1:] for shape in shapes}
        if len(row_shapes) != 1 or not all(shapes):
            raise ValueError(
                "Expected a list of predictions whose rows have the same shape, got "
                f"{[tuple(shape) for shape in shapes]}."
            )

        def join(tensors: Sequence[Tensor]) -> Tensor:
            pairs = zip(tensors, shapes, strict=True)
            return torch.cat([tensor.expand(shape) for tensor, shape in pairs])

        return _regrouped(predictions, join)

    def __mul__(self, factor: Any) -> Prediction:
        return self._linear(factor)

    def __truediv__(self, divisor: Any) -> Prediction:
        return self._linear(1 / self._constant(divisor))

    def __add__(self, shift: Any) -> Prediction:
        return self._linear(1.0, shift)

    def __sub__(self, shift: Any) -> Prediction:
        return self._linear(1.0, -self._constant(shift))

    def __rsub__(self, shift: Any) -> Prediction:
        return self._linear(-1.0, shift)

    def __neg__(self) -> Prediction:
        return self._linear(-1.0)

    __rmul__ = __mul__
    __radd__ = __add__

    def _linear(self, factor: Any, shift: Any = 0.0) -> Prediction:
        """The prediction of a Y + b; in float64 if its variance overflows single precision."""
        a = self._constant(factor)
        b = self._constant(shift)
        a2 = a.square()
        if not bool((a2.isfinite() & b.isfinite() & (a2 != 0)).all()):
            raise ValueError(
                "Expected finite numbers, and no factor that is zero or whose square overflows "
                "float64: there would be no distribution left."
            )
        epistemic = self.epistemic.double() * a2
        noise = self.noise.double() * a2
        from_inputs = self.from_inputs.double() * a2
        dtype = torch.promote_types(torch.result_type(self.mean, self.variance), torch.float32)
        variances = (epistemic, noise, from_inputs)
        positive = torch.cat([variance[variance > 0] for variance in variances]).to(dtype)
        if bool(((positive < torch.finfo(dtype).tiny) | positive.isinf()).any()):
            dtype = torch.float64
        return replace(
            self,
            mean=(self.mean.double() * a + b).to(dtype),
            epistemic=epistemic.to(dtype),
            noise=noise.to(dtype),
            from_inputs=from_inputs.to(dtype),
            distribution=self._mirrored_where_negative(a),
            support=self._moved_support(a, b),
            conformal=self._resolved_conformal,
        )

    def _mirrored_where_negative(self, factor: Tensor) -> Distribution:
        """The distribution, mirrored for entries that are multiplied by a negative factor."""
        is_positive = factor > 0
        if bool(is_positive.all()):
            return self.distribution
        mirrored = self.distribution.mirrored
        if mirrored is self.distribution or not bool(is_positive.any()):
            return mirrored

        def choose(tensors: Sequence[Tensor]) -> Tensor:
            original, mirror_image = tensors
            return torch.where(is_positive.to(original.device), original, mirror_image)

        mixed: Distribution = regrouped([self.distribution, mirrored], choose)
        return mixed

    def _moved_support(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The support of a Y + b."""
        ends = []
        for bound in self._bounds:
            end = bound * a + b
            size = abs(bound * a) + b.abs()
            # Where one shift undoes another, what is left of a bound is rounding.
            ends.append(torch.where(end.abs() < 4 * _ROUNDING * size, 0.0, end))
        return torch.minimum(*ends), torch.maximum(*ends)

    @property
    def _resolved_conformal(self) -> Any:
        """The conformal intervals with each entry's group fixed, whatever becomes of its bar."""
        return None if self.conformal is None else self.conformal.resolved(self)

    def _constant(self, value: Any) -> Tensor:
        """A number, or one for each target, as a float64 tensor.

        Raises:
            TypeError: It is not a real number or an array of real numbers.
            ValueError: Its shape does not broadcast to the prediction's.
        """
        import numpy

        tensor: Any = value
        if not isinstance(value, Tensor | Prediction):
            array = numpy.asarray(value)
            tensor = torch.as_tensor(array.astype(float)) if array.dtype.kind in "iuf" else None
        if not isinstance(tensor, Tensor) or tensor.is_complex() or tensor.dtype == torch.bool:
            kind = getattr(value, "dtype", type(value).__name__)
            raise TypeError(
                f"Expected a real number, or one for each target, got a {kind}. To combine "
                "several predictions, which share errors, use uq.propagate(fn, x)."
            )
        constant = tensor.to(self.mean.device, torch.float64)
        shape = self.mean.shape
        sizes = zip(constant.shape[::-1], shape[::-1], strict=False)
        broadcasts = all(size in (1, expected) for size, expected in sizes)
        if constant.ndim > len(shape) or not broadcasts:
            raise ValueError(
                "Expected a number, or one for each target, that broadcasts to the prediction's "
                f"{tuple(shape)}, got {tuple(constant.shape)}."
            )
        return constant

    @property
    def _bounds(self) -> tuple[Any, Any]:
        """The support as numbers, infinite where there is no bound, or as float64 tensors."""
        low, high = self.support or (None, None)
        if isinstance(low, Tensor) and isinstance(high, Tensor):
            return low.to(self.mean.device), high.to(self.mean.device)
        return -math.inf if low is None else low, math.inf if high is None else high

    def _within_support(self, values: Tensor) -> Tensor:
        """Values clipped to the support, in the precision of the scale."""
        return values.clamp(*self._bounds).to(self.unit)

    @property
    def _finite_bounds(self) -> list[_Bound]:
        """The bounds of the support that are finite for at least one entry."""
        low, high = self._bounds
        bounds = []
        if bool(torch.as_tensor(low).isfinite().any()):
            z = self._in_units(low).clamp(min=_FAR)
            bounds.append(_Bound(1, low, self.distribution, z))
        if bool(torch.as_tensor(high).isfinite().any()):
            z = (-self._in_units(high)).clamp(min=_FAR)
            bounds.append(_Bound(-1, high, self.distribution.mirrored, z))
        return bounds

    def _in_units(self, value: float | Tensor) -> Tensor:
        """z = (value - mean) / unit, in float64."""
        return (value - self.mean.double()) / self.unit.double()

    def matched(self, target: Tensor) -> Tensor:
        """The target shaped like the prediction, in float64.

        A target that differs from a bound of the support by rounding alone is set to the bound.

        Raises:
            ValueError: The shapes differ by more than dimensions of size one.
        """
        if target.shape != self.mean.shape:
            if target.squeeze().shape != self.mean.squeeze().shape:
                raise ValueError(
                    f"The target must be shaped like the prediction, {tuple(self.mean.shape)}, "
                    f"got {tuple(target.shape)}."
                )
            target = target.reshape(self.mean.shape)
        target = target.to(self.mean.device)
        target_dtype = target.dtype if target.is_floating_point() else torch.float64
        unit = self.unit.double()
        y = target.double()
        for bound in self._bounds:
            end = torch.as_tensor(bound, dtype=torch.float64, device=y.device).expand_as(y)
            size = end.abs() + self.mean.double().abs() + 64 * unit
            is_near = (y - end).abs() <= torch.minimum(_ROUNDING * size, unit / 1000)
            is_bound = target == end.to(target_dtype)
            y = torch.where(is_near | is_bound, end, y)
        return y

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        first = self._at(self._places.flatten()[:3])
        means = first.mean.tolist()
        stds = first.std.tolist()
        centres = first.centre.tolist()
        columns = zip(means, stds, centres, picture.off_centre(first), strict=True)
        entries = [picture.entry(mean, std, centre, off) for mean, std, centre, off in columns]
        if self.mean.numel() > 3:
            entries.append("...")
        rows, *others = self.mean.shape or (1,)
        sizes = ["1 row" if rows == 1 else f"{rows} rows"]
        sizes += [str(size) for size in others if size > 1]
        return (
            f"Prediction of {' x '.join(sizes)}: {', '.join(entries)}; "
            f"distribution {self.distribution.name}"
        )

    def _repr_html_(self) -> str:
        # At most three targets are shown: their first rows in a table, and up to about 120 rows in
        # order of their means in a drawing.
        places_by_target = self._places.reshape(-1, self.mean.shape[1:].numel()).T[:3]
        first = []
        ordered = []
        for places in places_by_target:
            by_mean = places[self.mean.flatten()[places].argsort()]
            first.append(self._at(places[:5]))
            ordered.append(self._at(by_mean[:: 1 + len(by_mean) // 120]))
        return picture.html(repr(self), first, ordered)


def _regrouped(predictions: Sequence[Prediction], change: Change) -> Prediction:
    """Combine predictions into one: `change` is applied to every tensor that has their entries."""
    novelties = [p.novelty for p in predictions if p.novelty is not None]
    novelty = change(novelties) if len(novelties) == len(predictions) else None
    return replace(
        predictions[0],
        mean=change([p.mean for p in predictions]),
        epistemic=change([p.epistemic for p in predictions]),
        noise=change([p.noise for p in predictions]),
        rigidity=change([p.rigidity for p in predictions]),
        from_inputs=change([p.from_inputs for p in predictions]),
        distribution=regrouped([p.distribution for p in predictions], change),
        support=regrouped([p._bounds for p in predictions], change),
        conformal=regrouped([p._resolved_conformal for p in predictions], change),
        novelty=novelty,
    )
