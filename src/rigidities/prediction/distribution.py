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
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..notices import require_level
from .quadrature import gauss, increasing_root

__all__ = [
    "DISTRIBUTIONS",
    "Distribution",
    "Gaussian",
    "StudentT",
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
