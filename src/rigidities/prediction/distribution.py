r"""Distributions around the mean, with location zero and scale one.

A prediction is $y = \mu + s z$, where z follows one of these distributions. Its variance
$\sigma^2 = \alpha^2 q + \text{noise}$ is the second moment about $\mu$, so that the unit is
$s = \sigma / \sqrt{E z^2}$, with $E z^2$ from `Distribution.second`.

To add a distribution, add a class. `DISTRIBUTIONS` lists the names that
`Paper(distribution=...)` and files accept. The fields of a distribution are its settings, plain
numbers that files store.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..notices import require_level
from . import cosine_tilt
from .cosine_tilt import CosineTilt
from .quadrature import gauss, increasing_root

__all__ = [
    "DISTRIBUTIONS",
    "Distribution",
    "Gaussian",
    "StudentT",
    "Tilted",
    "distribution_named",
    "gaussian_interval",
    "register_distribution",
]


def __dir__() -> list[str]:
    return sorted(__all__)


LOG_TWO_PI = math.log(2 * math.pi)
GOLDEN = (math.sqrt(5) - 1) / 2
F64 = torch.float64


class Distribution(ABC):
    """The base of all distributions.

    A new distribution needs `quantile` and `log_density`. Probabilities also need `cdf`, scores and
    bounds also need `shortfall`, and a distribution that is not symmetric needs `mirrored`. All
    methods broadcast the distribution's parameters against z.

    Attributes:
        name: What users and files call it.
        symmetric: Whether -z has the same distribution.
        wide: Names of the fields that have one more dimension than the predictions, the last.
    """

    name: ClassVar[str] = ""
    symmetric: ClassVar[bool] = False
    wide: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def quantile(self, level: Tensor) -> Tensor:
        """The z with probability `level` below it."""

    @abstractmethod
    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the density at z."""

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """Draws for each entry of `like`, (n, ...): quantiles at uniform levels."""
        return self.quantile(_uniform(like, n, generator)).to(_result_dtype(like))

    @property
    def second(self) -> float | Tensor:
        """E z^2, the second moment about zero. It is one unless a distribution overrides it."""
        return 1.0

    @property
    def mean(self) -> float | Tensor:
        """E z."""
        return 0.0

    @property
    def mirrored(self) -> Distribution:
        """The distribution of -z."""
        if self.symmetric:
            return self
        raise self._not_implemented("mirrored")

    def each(self, change: Callable[[Tensor], Tensor]) -> Distribution:
        """The distribution with `change` applied to tensors that have an entry per prediction.

        The base class has no such tensors.
        """
        return self

    def settings(self) -> dict[str, Any]:
        """The fields as plain values, for files."""
        values = {}
        for name, value in vars(self).items():
            if name.startswith("_"):  # cached, no field
                continue
            values[name] = value.tolist() if isinstance(value, Tensor) else value
        return values

    def cdf(self, z: Tensor) -> Tensor:
        """Probability below z."""
        raise self._not_implemented("cdf")

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""Expected distance by which the largest of n draws stays below z, $\int_{-\infty}^z F^n$.

        Args:
            z: Where the integral ends.
            draws: n, 1 or 2.
        """
        raise self._not_implemented("shortfall")

    def _not_implemented(self, method: str) -> NotImplementedError:
        """The error that this distribution lacks a method."""
        return NotImplementedError(
            f"Probabilities, scores and bounds need `{method}` of the distribution {self.name!r}. "
            "Implement it as described in `Distribution`."
        )

    def crps(self, z: Tensor) -> Tensor:
        r"""Ranked probability score, $\int_{-\infty}^z F^2 + \int_z^\infty (1 - F)^2$."""
        return self.shortfall(z, 2) + self.mirrored.shortfall(-z, 2)

    def profile(self, residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        r"""The best squared scale of each of J candidates, and its negative log-likelihood.

        The scale is that of variances: $\alpha^2 u$ is the distribution's second moment for the
        unscaled variance u. The search takes golden sections of $\log\alpha$ about the scale of the
        root mean square. A distribution with a closed form overrides it.

        Args:
            residual: Target minus prediction of n rows, (n, 1) or (n, J).
            spread: Unscaled variances u of the candidates, (n, J).

        Returns:
            The squared scales $\alpha^2$ and the mean over rows of the negative log-likelihood at
            them, (J,) each.
        """
        z = residual / spread.sqrt()
        centre = 0.5 * z.square().mean(0).log()
        low = centre - 4
        high = centre + 4

        def mean_loss(log_scale: Tensor) -> Tensor:
            return (log_scale - self.log_density(z * (-log_scale).exp())).mean(0)

        for _ in range(40):
            left = high - GOLDEN * (high - low)
            right = low + GOLDEN * (high - low)
            left_is_better = mean_loss(left) < mean_loss(right)
            low = torch.where(left_is_better, low, left)
            high = torch.where(left_is_better, right, high)
        best = (low + high) / 2
        return (2 * best).exp() * self.second, mean_loss(best) + 0.5 * spread.log().mean(0)


def _result_dtype(z: Tensor) -> torch.dtype:
    """The precision of results that follow from z: that of z, but at least single."""
    return torch.promote_types(z.dtype, torch.float32)


def _uniform(like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """n uniform draws from (0, 1] for each entry of `like`, float64."""
    device = like.device if generator is None else generator.device
    draws = torch.rand((n, *like.shape), dtype=F64, device=device, generator=generator)
    return 1 - draws.to(like.device)


DISTRIBUTIONS: dict[str, type[Distribution]] = {}
"""Classes of distributions by their names."""

DistributionClass = TypeVar("DistributionClass", bound=type[Distribution])


def register_distribution(kind: DistributionClass) -> DistributionClass:
    """Make a distribution known to `calibrate` and to files, under its name; a class decorator."""
    DISTRIBUTIONS[kind.name] = kind
    return kind


def distribution_named(distribution: str | Distribution | type[Distribution]) -> Distribution:
    """The distribution itself, or the one of that name or class at its default settings.

    Raises:
        ValueError: No distribution has that name.
    """
    if isinstance(distribution, Distribution):
        return distribution
    if isinstance(distribution, type) and issubclass(distribution, Distribution):
        return distribution()
    if str(distribution) not in DISTRIBUTIONS:
        names = ", ".join(DISTRIBUTIONS)
        raise ValueError(f"Unknown distribution {distribution!r}. Known: {names}.")
    return DISTRIBUTIONS[distribution]()


@register_distribution
@dataclass(frozen=True)
class Gaussian(Distribution):
    """The standard normal distribution."""

    name = "gaussian"
    symmetric = True

    def quantile(self, level: Tensor) -> Tensor:
        """Inverse of the normal distribution function."""
        z: Tensor = torch.special.ndtri(level)
        return z

    def log_density(self, z: Tensor) -> Tensor:
        r"""$-z^2/2 - \log(2\pi)/2$."""
        return -0.5 * z.to(_result_dtype(z)).square() - 0.5 * LOG_TWO_PI

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """Normal draws for each entry of `like`, (n, ...)."""
        device = like.device if generator is None else generator.device
        shape = (n, *like.shape)
        return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like)

    def cdf(self, z: Tensor) -> Tensor:
        """The normal distribution function."""
        # erfc keeps the digits of small probabilities, which ndtr loses.
        return 0.5 * torch.erfc(-math.sqrt(0.5) * z.to(_result_dtype(z)))

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""$z\Phi + \varphi$; of two draws $z\Phi^2 + 2\Phi\varphi - \Phi(\sqrt 2 z)/\sqrt\pi$.

        Examples:
            >>> round(Gaussian().crps(torch.zeros(1)).item(), 6)  # (sqrt 2 - 1) / sqrt pi
            0.233695
        """
        below = self.cdf(z)
        density = self.log_density(z).exp()
        if draws == 1:
            return z * below + density
        return below * (z * below + 2 * density) - self.cdf(math.sqrt(2) * z) / math.sqrt(math.pi)

    def profile(self, residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        r"""$\alpha^2 = \overline{r^2/u}$ and its negative log-likelihood, in closed form.

        Examples:
            >>> scale, value = Gaussian().profile(torch.tensor([[2.0], [-2.0]]), torch.ones(2, 1))
            >>> scale.item(), round(value.item(), 4)
            (4.0, 2.1121)
        """
        scale2 = (residual.square() / spread).mean(0)
        return scale2, 0.5 * (1 + LOG_TWO_PI + scale2.log() + spread.log().mean(0))


def _log_gamma_step(a: Tensor) -> Tensor:
    r"""$\log \Gamma(a + 1/2) - \log \Gamma(a)$, without their cancellation at large a."""
    x = 1 / a
    series = x * (-1 / 8 + x**2 * (1 / 192 + x**2 * (-1 / 640 + x**2 * 17 / 14336)))
    return torch.where(a > 30, 0.5 * a.log() + series, (a + 0.5).lgamma() - a.lgamma())


def _tail(z: Tensor, df: Tensor) -> Tensor:
    """P(t > z) of Student's t for z >= 0 and tensors that broadcast; float64."""
    shape = (z * df).shape
    flat_z = z.expand(shape).reshape(-1)
    flat_df = df.expand(shape).reshape(-1)
    # Few rows at once, so that on a CPU their intermediate values stay in its cache.
    rows_at_once = 1 << (12 if z.device.type == "cpu" else 14)
    z_chunks = torch.split(flat_z, rows_at_once)
    df_chunks = torch.split(flat_df, rows_at_once)
    tails = [_flat_tail(*chunks) for chunks in zip(z_chunks, df_chunks, strict=True)]
    return torch.cat(tails).reshape(shape)


def _flat_tail(z: Tensor, df: Tensor) -> Tensor:
    r"""P(t > z) of Student's t for z >= 0, all tensors (n,).

    With $z = \sqrt\nu \sinh s$ it is $\frac{\Gamma(\nu/2 + 1/2)}{\sqrt\pi\, \Gamma(\nu/2)}
    \int_s^\infty \cosh^{-\nu}$, whose integrand is smooth whatever the degrees of freedom. Gauss's
    rule from s to where the integrand has fallen to $e^{-37}$ of its start gives twelve digits.
    """
    nodes, weights = gauss(40)
    nodes = nodes.to(z.device)
    weights = weights.to(z.device)
    sinh2_start = (z / df.sqrt()).clamp(max=1e100).square()
    start = sinh2_start.sqrt().asinh()
    # cosh^2 grows by exp(74 / df) from the start to the end.
    sinh2_end = sinh2_start + (1 + sinh2_start) * torch.expm1(74 / df)
    length = sinh2_end.sqrt().asinh() - start
    # The integrand relative to its start, through logarithms of cosh^2, (n, 40).
    log_cosh2 = torch.log1p((start[:, None] + length[:, None] * nodes).sinh().square())
    log_cosh2_start = torch.log1p(sinh2_start)
    mean_fall = (-df[:, None] / 2 * (log_cosh2 - log_cosh2_start[:, None])).exp() @ weights
    log_height = _log_gamma_step(df / 2) - df / 2 * log_cosh2_start
    return log_height.exp() / math.sqrt(math.pi) * length * mean_fall


def _checked_degrees(df: Any) -> float | Tensor:
    """Degrees of freedom as a number, or as a float64 tensor where there are several.

    Raises:
        ValueError: They leave no variance, or are not finite.
    """
    degrees = torch.as_tensor(df, dtype=F64, device="cpu")
    if not bool(((degrees > 2) & (degrees < math.inf)).all()):
        raise ValueError(
            "A Student-t distribution needs a finite number of degrees of freedom above two, got "
            f"{df}. With two or fewer it has no variance. For infinitely many use Gaussian()."
        )
    return degrees if degrees.ndim else float(degrees)


@register_distribution
@dataclass(frozen=True, eq=False)
class StudentT(Distribution):
    r"""Student's t of scale one: $f(z) \propto (1 + z^2/\nu)^{-(\nu + 1)/2}$, $\nu > 2$.

    Attributes:
        df: Degrees of freedom $\nu$, a number or one for each target, (K,).

    Examples:
        >>> distribution = StudentT(4.0)
        >>> distribution.second, round(distribution.quantile(torch.tensor(0.95)).item(), 4)
        (2.0, 2.1318)
    """

    name = "student-t"
    symmetric = True

    df: float | Tensor = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "df", _checked_degrees(self.df))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def second(self) -> float | Tensor:
        r"""$\nu / (\nu - 2)$."""
        return self.df / (self.df - 2)

    def _in_double(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z and the degrees of freedom, in double precision on the device of z."""
        return z.to(F64), torch.as_tensor(self.df, dtype=F64).to(z.device)

    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the normalised density at z."""
        x, df = self._in_double(z)
        log_peak = _log_gamma_step(df / 2) - 0.5 * (math.pi * df).log()
        log_density = log_peak - (df + 1) / 2 * torch.log1p(x.square() / df)
        return log_density.to(_result_dtype(z))

    def cdf(self, z: Tensor) -> Tensor:
        """The distribution function, with all digits of small probabilities."""
        x, df = self._in_double(z)
        tail = _tail(x.abs(), df)
        return torch.where(x > 0, 1 - tail, tail).to(_result_dtype(z))

    def quantile(self, level: Tensor) -> Tensor:
        r"""The inverse of `cdf`.

        The logarithm of the tail is concave in $s = \operatorname{asinh}(|z| / \sqrt\nu)$, so that
        Newton's steps converge. They start from Wallace's normal approximation.
        """
        p, df = self._in_double(level)
        tail = torch.minimum(p, 1 - p)
        normal = torch.special.ndtri(tail.clamp(min=1e-300)) * (8 * df + 3) / (8 * df + 1)
        start = torch.expm1(normal.square() / df).sqrt().asinh()

        def value_and_slope(s: Tensor) -> tuple[Tensor, Tensor]:
            z = df.sqrt() * s.sinh()
            beyond = _tail(z, df)
            density = self.log_density(z).exp() * df.sqrt() * s.cosh()
            return tail.log() - beyond.log(), density / beyond

        s = increasing_root(value_and_slope, start, 0.0, math.inf)
        z = torch.where(tail > 0, df.sqrt() * s.sinh(), math.inf).copysign(p - 0.5)
        return torch.where((p >= 0) & (p <= 1), z, math.nan).to(_result_dtype(level))

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""$z F + h$; of two draws $z F^2 + 2 F h - 2 \int_{-\infty}^z h f$.

        Here $h = f (\nu + z^2) / (\nu - 1)$, whose derivative is $-z f$. As $h f$ falls with
        $(1 + z^2/\nu)^{-\nu}$, the last integral is a multiple of the distribution function
        of Student's t with $2 \nu - 1$ degrees of freedom.
        """
        x, df = self._in_double(z)
        tail = _tail(x.abs(), df)
        below = torch.where(x > 0, 1 - tail, tail)
        log_peak = _log_gamma_step(df / 2) - 0.5 * (math.pi * df).log()
        log_h = log_peak - (df - 1) / 2 * torch.log1p(x.square() / df)
        h = df / (df - 1) * log_h.exp()
        if draws == 1:
            return (x * below + h).to(_result_dtype(z))
        sharper = 2 * df - 1
        log_sharper_peak = _log_gamma_step(sharper / 2) - 0.5 * (math.pi * df).log()
        whole = df / (df - 1) * (2 * log_peak - log_sharper_peak).exp()
        sharper_tail = _tail((sharper / df).sqrt() * x.abs(), sharper)
        sharper_below = torch.where(x > 0, 1 - sharper_tail, sharper_tail)
        integral = below * (x * below + 2 * h) - 2 * whole * sharper_below
        return integral.to(_result_dtype(z))

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        r"""$\sqrt{\nu (U^{-2/\nu} - 1)} \cos 2\pi V$ of uniform U and V (Bailey), exact."""
        u = _uniform(like, n, generator)
        v = _uniform(like, n, generator)
        u, df = self._in_double(u)
        radius = (df * torch.expm1(-2 / df * u.log())).sqrt()
        return (radius * (2 * math.pi * v).cos()).to(_result_dtype(like))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _student_at_nodes(degrees: tuple[float, ...]) -> Tensor:
    """Student's quantiles at the panels' nodes, (degrees, P, 8)."""
    nodes = cosine_tilt.panels(torch.device("cpu")).nodes
    return StudentT(torch.tensor(degrees, dtype=F64)[:, None, None]).quantile(nodes)


class TiltedRule(NamedTuple):
    r"""Moments and quantiles of tilted distributions by a fixed number of plain operations.

    Graphs use it: a frozen module, compiled or exported, cannot iterate until a search has
    converged. Its quantiles are found as those of `Tilted.quantile` are, in the panel and at the
    place that `cosine_tilt.quantile_place` names, but with two tables in place of two computations.

    - Probabilities below the panels' edges come from 128 midpoints instead of the panels' 480
      nodes. At many rows that takes half the time. It costs digits at tiny levels alone, where
      probabilities are differences of much larger terms.
    - Student's quantile comes from a polynomial in each panel instead of a search by Newton's
      steps, each of which takes an integral. Near the ends, where the quantile is singular,
      polynomials have three to six digits.

    So a quantile is that of the distribution to 1e-6 standard deviations while Student's level at
    it lies between 1/64 and 63/64, and to 5e-4 while its level lies between 0.01 and 0.99.
    `Tilted.quantile` gives ten digits at levels down to 1e-12, which conformal intervals need. The
    moments are the same for both, and exact while 64 cosines describe the tilted density.

    Attributes:
        basis: The cosines at 64 midpoints, (8, 64).
        values: Numbers at these midpoints whose means are those of z and $z^2$, (degrees, 64, 2);
            see `cosine_tilt.moment_values`.
        finer: The cosines at 128 midpoints, (8, 128), float64.
        below: Takes the shares of these midpoints to the probability below each panel's edge,
            (128, P + 1), float64.
        terms: The cosines at the panels' nodes, (P, 8, 8), float64.
        primitive: See `cosine_tilt.Panels`.
        student: Coefficients of Student's quantile in each panel, (degrees, P, 8), float64.
    """

    basis: Tensor
    values: Tensor
    finer: Tensor
    below: Tensor
    terms: Tensor
    primitive: Tensor
    student: Tensor

    def moments(self, tilt: Tensor) -> Tensor:
        """Mean and second moment, (..., 2)."""
        shares = (tilt.to(self.basis) @ self.basis).softmax(-1)
        if self.values.shape[:-2] == (1,):
            return shares @ self.values[0]
        # Sums, not a product of matrices: onnxruntime does not broadcast one over no rows.
        return torch.stack([(shares * values).sum(-1) for values in self.values.unbind(-1)], -1)

    def quantile(self, tilt: Tensor, level: Tensor) -> Tensor:
        """Quantiles (L, M, K) of tilts (M, K, 8) at levels (L, 1, 1)."""
        tilt = tilt.to(F64)
        below_edges = (tilt @ self.finer).softmax(-1) @ self.below  # (M, K, P + 1)
        panel, place = cosine_tilt.quantile_place(
            tilt,
            level,
            below_edges.expand(len(level), -1, -1, -1),
            self.terms,
            self.primitive,
            steps=6,
        )
        powers = torch.arange(8, dtype=F64, device=level.device)
        target = torch.arange(len(self.student), device=level.device)
        return (self.student[target, panel] * place[..., None] ** powers).sum(-1)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _tilted_rule(
    degrees: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> TiltedRule:
    """The rule of these degrees of freedom, with `basis` and `values` in that precision."""
    panels = cosine_tilt.panels(torch.device("cpu"))
    student = _student_at_nodes(degrees)
    second = torch.as_tensor(StudentT(torch.tensor(degrees)).second)
    basis = cosine_tilt.basis(cosine_tilt.midpoints(64)).mT.contiguous()
    finer = cosine_tilt.basis(cosine_tilt.midpoints(128)).mT.contiguous()
    # A density known at 128 midpoints is a sum of cosines m = 0 ... 127, each of which has a sine
    # for an integral.
    midpoints = cosine_tilt.midpoints(128)[:, None]
    frequency = math.pi * torch.arange(1, 128, dtype=F64)[:, None]
    sines = (frequency * panels.edges).sin() / frequency
    below = panels.edges + 2 * (midpoints * frequency.mT).cos() @ sines
    return TiltedRule(
        basis=basis.to(device, dtype),
        values=cosine_tilt.moment_values(student, second).to(device, dtype),
        finer=finer.to(device),
        below=below.to(device),
        terms=panels.basis.to(device),
        primitive=panels.primitive.to(device),
        # The derivative of the primitive is the polynomial through the values itself.
        student=(student @ (panels.primitive * torch.arange(1, 9))).to(device),
    )


@register_distribution
@dataclass(frozen=True, eq=False)
class Tilted(Distribution):
    r"""Student's t with its density multiplied by $\exp(\theta \cdot b(u) - A)$, $u = F_\nu(z)$.

    The cosines $b_j(u) = \sqrt 2 \cos(j \pi u)$, j = 1 ... 8, give skewness, several modes and
    other tails. With $p$ the density of `prediction.cosine_tilt` and $P$ its integral, the
    distribution function is $P(F_\nu(z))$: every method goes from z to u by Student's distribution
    function, or from u to z by its inverse, and asks `CosineTilt` in between.

    Attributes:
        df: Degrees of freedom $\nu$, a number or one for each target, (K,).
        tilt: $\theta$ of each prediction, (..., 8).

    Examples:
        >>> distribution = Tilted(4.0, torch.tensor([0.5, 0, 0, 0, 0, 0, 0, 0]))
        >>> round(distribution.mean.item(), 4), round(distribution.second.item(), 4)
        (-0.5771, 2.1943)
    """

    name = "tilted"
    wide = ("tilt",)

    df: float | Tensor = 5.0
    tilt: Tensor = field(default_factory=lambda: torch.zeros(cosine_tilt.TERMS))

    def __post_init__(self) -> None:
        object.__setattr__(self, "df", _checked_degrees(self.df))
        object.__setattr__(self, "tilt", torch.as_tensor(self.tilt))
        if self.tilt.shape[-1:] != (cosine_tilt.TERMS,):
            raise ValueError(
                "A tilt has 8 entries for each prediction, (..., 8), got the shape "
                f"{tuple(self.tilt.shape)}."
            )

    __eq__ = StudentT.__eq__
    __hash__ = StudentT.__hash__

    @property
    def mirrored(self) -> Tilted:
        """The distribution of -z: every other entry of the tilt changes sign."""
        return self.each(lambda tilt: tilt * tilt.new_tensor([-1, 1]).repeat(4))

    def each(self, change: Callable[[Tensor], Tensor]) -> Tilted:
        """The distribution with `change` applied to its tilt."""
        # The constructor would check the degrees of freedom again, and forget what is cached.
        distribution = object.__new__(type(self))
        fields = vars(distribution)
        fields.update(vars(self))
        fields["_degrees"] = self._degrees
        fields["tilt"] = change(self.tilt)
        fields.pop("_moments", None)
        return distribution

    @cached_property
    def _degrees(self) -> tuple[tuple[float, ...], Tensor]:
        """The distinct degrees of freedom, and for each entry of `df` the index among them."""
        distinct, index = torch.unique(torch.as_tensor(self.df, dtype=F64), return_inverse=True)
        return tuple(distinct.tolist()), index

    @cached_property
    def _moments(self) -> Tensor:
        """Mean and second moment, (..., 2), from 64 nodes for each prediction."""
        return self.rule(_result_dtype(self.tilt), self.tilt.device).moments(self.tilt)

    def rule(self, dtype: torch.dtype, device: torch.device) -> TiltedRule:
        """The rule for graphs, its tables shaped like `df`.

        Args:
            dtype: Precision of the moments.
            device: Where the tables live.
        """
        degrees, index = self._degrees
        rule = _tilted_rule(degrees, dtype, device)
        if len(degrees) == 1:
            return rule
        return rule._replace(values=rule.values[index], student=rule.student[index.flatten()])

    @property
    def second(self) -> Tensor:
        """E z^2, about zero; exact while 64 cosines describe the tilted density."""
        return self._moments[..., 1]

    @property
    def mean(self) -> Tensor:
        """E z."""
        return self._moments[..., 0]

    def log_density(self, z: Tensor) -> Tensor:
        r"""Logarithm of Student's density, plus $\theta \cdot b(u) - A(\theta)$."""
        student = StudentT(self.df)
        x = z.to(F64)
        log_factor = self._by_row(CosineTilt.log_density, student.cdf(x))
        return (student.log_density(x) + log_factor).to(_result_dtype(z))

    def cdf(self, z: Tensor) -> Tensor:
        """The distribution function, with all digits of small probabilities."""
        u = StudentT(self.df).cdf(z.to(F64))
        return self._by_row(CosineTilt.cdf, u).to(_result_dtype(z))

    def quantile(self, level: Tensor) -> Tensor:
        """The inverse of `cdf`: the quantile in u, then Student's quantile at that u.

        `TiltedRule.quantile` is the form of it for graphs.
        """
        u = self._by_row(CosineTilt.quantile, level.to(F64))
        return StudentT(self.df).quantile(u).to(_result_dtype(level))

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""$z F^n - \int_0^u Q_\nu\, d F^n$, with Student's quantile $Q_\nu$, by panels."""
        degrees, index = self._degrees
        student_at_nodes = _student_at_nodes(degrees).to(z.device)

        def of_rows(tilts: CosineTilt, u: Tensor, x: Tensor, df_index: Tensor) -> Tensor:
            # All E entries of a tilt have the same degrees of freedom.
            integrand = tilts.density * student_at_nodes[df_index[:, 0]]  # (R, P, 8)
            if draws == 2:  # d F^2 = 2 F dF
                integrand = 2 * tilts.cdf_at_nodes * integrand
            return x * tilts.cdf(u) ** draws - tilts.integral(integrand, u)

        x = z.to(F64)
        u = StudentT(self.df).cdf(x)
        return self._by_row(of_rows, u, x, index.to(z.device)).to(_result_dtype(z))

    def _by_row(self, of_rows: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """Values of a function of tilts and arguments, computed for some rows at a time.

        Args:
            of_rows: Takes a `CosineTilt` of R tilts and a tensor (R, E) for each argument: the E
                entries that one tilt has. It returns values (R, E).
            *arguments: Tensors that broadcast against the predictions; the first has all leading
                dimensions.

        Returns:
            The values, in the shape of the first argument broadcast against the predictions.
        """
        df = torch.as_tensor(self.df).to(self.tilt)
        prediction_shape = (self.tilt[..., 0] + df).shape
        shape = (arguments[0] + arguments[0].new_empty(prediction_shape)).shape
        tilt = self.tilt.to(F64).expand(*prediction_shape, -1).reshape(-1, cosine_tilt.TERMS)
        rows = len(tilt)
        entries = math.prod(shape) // max(1, rows)
        if entries == 0:
            return arguments[0].new_empty(shape)
        # The predictions' dimensions are the last ones of `shape`: (..., predictions) -> (R, E).
        flat = [argument.expand(shape).reshape(entries, rows).mT for argument in arguments]
        # A row needs about a thousand numbers at the nodes and each entry sixteen more. The bound
        # keeps them in a cache of the processor. A search for quantiles needs up to 256 numbers for
        # an entry: one row may have a million draws, which must not be in memory at once.
        rows_at_once = max(1, (1 << 18) // (1024 + 16 * entries))
        entries_at_once = max(1, (1 << 22) // (256 * rows_at_once))
        values = []
        for start in range(0, rows, rows_at_once):
            chunk = slice(start, start + rows_at_once)
            tilts = CosineTilt(tilt[chunk])
            pieces = []
            for first in range(0, entries, entries_at_once):
                piece = slice(first, first + entries_at_once)
                pieces.append(of_rows(tilts, *[argument[chunk, piece] for argument in flat]))
            values.append(torch.cat(pieces, dim=1))
        return torch.cat(values).mT.reshape(shape)


def gaussian_interval(mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """The central Gaussian interval that covers probability `level`: (low, high).

    Args:
        mean: Centres of the intervals.
        std: Standard deviations, shaped like `mean`.
        level: Probability of the interval, between 0 and 1.

    Raises:
        ValueError: The level lies outside (0, 1).
    """
    require_level(level, "An interval's")
    z = Gaussian().quantile(torch.tensor((1 + level) / 2, dtype=torch.float64)).to(std)
    return mean - z * std, mean + z * std
