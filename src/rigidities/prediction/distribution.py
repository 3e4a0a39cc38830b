r"""The shape of what lies around the mean: distributions of location zero and scale one.

A prediction is $y = \mu + s z$ with z from such a distribution. The variance $\sigma^2 = \alpha^2 q
+ \text{noise}$ is the second moment about $\mu$, so that $s = \sigma / \sqrt{E z^2}$ (`second`).
Another distribution is another class here; `DISTRIBUTIONS` lists the names that
`calibrate(distribution=...)` and files know. Its fields are its settings, plain numbers that files
keep.
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

LOG_TWO_PI = math.log(2 * math.pi)
GOLDEN = (math.sqrt(5) - 1) / 2
F64 = torch.float64


class Distribution(ABC):
    """The base of all distributions.

    A new distribution needs `quantile` and `log_density`; for probabilities `cdf`, for scores and
    bounds `shortfall` as well, and `mirrored` unless it is symmetric. All broadcast the
    distribution's own parameters against z.

    Attributes:
        name: what users and files call it.
        symmetric: whether -z has the same distribution.
        wide: fields with a last dimension that is none of the predictions'.
    """

    name: ClassVar[str] = ""
    symmetric: ClassVar[bool] = False
    wide: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def quantile(self, level: Tensor) -> Tensor:
        """z with probability `level` below it."""

    @abstractmethod
    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the density at z."""

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws for each entry of `like`, (n, ...); quantiles of uniform ones."""
        return self.quantile(_uniform(like, n, generator)).to(_kind(like))

    @property
    def second(self) -> float | Tensor:
        """E z^2, about the location."""
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
        raise self._lack("mirrored")

    def each(self, change: Callable[[Tensor], Tensor]) -> Distribution:
        """The distribution with every tensor that has an entry for each prediction changed so."""
        return self

    def settings(self) -> dict[str, Any]:
        """The fields as plain values, for files."""
        held = {name: part for name, part in vars(self).items() if not name.startswith("_")}
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in held.items()}

    def cdf(self, z: Tensor) -> Tensor:
        """Probability below z."""
        raise self._lack("cdf")

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""How far the largest of so many draws, 1 or 2, stays below z, $\int_{-\infty}^z F^n$."""
        raise self._lack("shortfall")

    def _lack(self, method: str) -> NotImplementedError:
        return NotImplementedError(
            f"Probabilities, scores and bounds need `{method}` of the distribution {self.name!r}. Write it "
            "as `Distribution` says."
        )

    def crps(self, z: Tensor) -> Tensor:
        r"""Ranked probability score, $\int_{-\infty}^z F^2 + \int_z^\infty (1 - F)^2$."""
        return self.shortfall(z, 2) + self.mirrored.shortfall(-z, 2)

    def profile(self, residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        r"""The best squared scale of each of J candidates, and its NLL per row.

        The scale is that of variances: $\alpha^2 u$ is the distribution's second moment. Found by
        golden sections of $\log\alpha$ about that of the root mean square; a distribution with a
        closed form has its own.

        Args:
            residual: (n, 1) or (n, J).
            spread: unscaled variances (n, J).
        """
        z = residual / spread.sqrt()
        centre = 0.5 * z.square().mean(0).log()
        low, high = centre - 4, centre + 4

        def value(log_scale: Tensor) -> Tensor:
            return (log_scale - self.log_density(z * (-log_scale).exp())).mean(0)

        for _ in range(40):
            a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
            left = value(a) < value(b)
            low, high = torch.where(left, low, a), torch.where(left, b, high)
        best = (low + high) / 2
        return (2 * best).exp() * self.second, value(best) + 0.5 * spread.log().mean(0)


def _kind(z: Tensor) -> torch.dtype:
    """The precision of an answer: that of z, single at least."""
    return torch.promote_types(z.dtype, torch.float32)


def _uniform(like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """n uniform draws from (0, 1] for each entry of `like`."""
    device = like.device if generator is None else generator.device
    drawn = torch.rand((n, *like.shape), dtype=F64, device=device, generator=generator)
    return 1 - drawn.to(like.device)


DISTRIBUTIONS: dict[str, type[Distribution]] = {}
"""By name."""

L = TypeVar("L", bound=type[Distribution])


def register_distribution(kind: L) -> L:
    """Make a distribution known to `calibrate` and to files, under its name; a class decorator."""
    DISTRIBUTIONS[kind.name] = kind
    return kind


def distribution_named(given: str | Distribution | type[Distribution]) -> Distribution:
    """The distribution of that name or class at its default settings, or the distribution itself.

    Raises:
        ValueError: there is none.
    """
    if isinstance(given, Distribution):
        return given
    if isinstance(given, type) and issubclass(given, Distribution):
        return given()
    if str(given) not in DISTRIBUTIONS:
        raise ValueError(f"Unknown distribution {given!r}. Known: {', '.join(DISTRIBUTIONS)}.")
    return DISTRIBUTIONS[given]()


@register_distribution
@dataclass(frozen=True)
class Gaussian(Distribution):
    """The standard normal distribution."""

    name, symmetric = "gaussian", True

    def quantile(self, level: Tensor) -> Tensor:
        """Inverse of the normal distribution function."""
        z: Tensor = torch.special.ndtri(level)
        return z

    def log_density(self, z: Tensor) -> Tensor:
        r"""$-z^2/2 - \log(2\pi)/2$."""
        return -0.5 * z.to(_kind(z)).square() - 0.5 * LOG_TWO_PI

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """Normal draws."""
        device = like.device if generator is None else generator.device
        shape = (n, *like.shape)
        return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like)

    def cdf(self, z: Tensor) -> Tensor:
        """The normal distribution function."""
        return 0.5 * torch.erfc(-math.sqrt(0.5) * z.to(_kind(z)))  # ndtr has no small digits

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""$z\Phi + \varphi$; of two draws $z\Phi^2 + 2\Phi\varphi - \Phi(\sqrt 2 z)/\sqrt\pi$.

        Examples:
            >>> round(Gaussian().crps(torch.zeros(1)).item(), 6)  # (sqrt 2 - 1) / sqrt pi
            0.233695
        """
        below, density = self.cdf(z), self.log_density(z).exp()
        if draws == 1:
            return z * below + density
        return below * (z * below + 2 * density) - self.cdf(math.sqrt(2) * z) / math.sqrt(math.pi)

    def profile(self, residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        r"""$\alpha^2 = \overline{r^2/u}$, and the NLL per row.

        Examples:
            >>> scale, value = Gaussian().profile(torch.tensor([[2.0], [-2.0]]), torch.ones(2, 1))
            >>> scale.item(), round(value.item(), 4)
            (4.0, 2.1121)
        """
        scale = (residual.square() / spread).mean(0)
        return scale, 0.5 * (1 + LOG_TWO_PI + scale.log() + spread.log().mean(0))


def _log_gamma_step(a: Tensor) -> Tensor:
    r"""$\log \Gamma(a + 1/2) - \log \Gamma(a)$, without their cancellation at large a."""
    x = 1 / a
    series = x * (-1 / 8 + x**2 * (1 / 192 + x**2 * (-1 / 640 + x**2 * 17 / 14336)))
    return torch.where(a > 30, 0.5 * a.log() + series, (a + 0.5).lgamma() - a.lgamma())


def _tail(z: Tensor, df: Tensor) -> Tensor:
    r"""Student's probability beyond z >= 0.

    With $z = \sqrt\nu \sinh s$ it is $\frac{\Gamma(\nu/2 + 1/2)}{\sqrt\pi\, \Gamma(\nu/2)}
    \int_s^\infty \cosh^{-\nu}$, smooth whatever the degrees of freedom: Gauss's rule up to where
    the integrand has fallen to $e^{-37}$ of its start gives twelve digits. A CPU takes few rows at
    once, so that what they need stays in its cache.
    """
    shape = (z * df).shape
    chunk = 1 << (12 if z.device.type == "cpu" else 14)
    both = (torch.split(part.expand(shape).reshape(-1), chunk) for part in (z, df))
    return torch.cat([_tail_of(*part) for part in zip(*both, strict=True)]).reshape(shape)


def _tail_of(z: Tensor, df: Tensor) -> Tensor:
    x, w = (part.to(z.device) for part in gauss(40))
    square = (z / df.sqrt()).clamp(max=1e100).square()
    start = square.sqrt().asinh()
    reach = (square + (1 + square) * torch.expm1(74 / df)).sqrt().asinh() - start
    rise = torch.log1p((start[:, None] + reach[:, None] * x).sinh().square())
    fall = (-df[:, None] / 2 * (rise - torch.log1p(square)[:, None])).exp() @ w
    height = (_log_gamma_step(df / 2) - df / 2 * torch.log1p(square)).exp() / math.sqrt(math.pi)
    return height * reach * fall


def _checked(df: Any) -> float | Tensor:
    """A number, or float64 where there are several."""
    kept = torch.as_tensor(df, dtype=F64, device="cpu")
    if not bool(((kept > 2) & (kept < math.inf)).all()):
        raise ValueError(
            f"A Student-t distribution needs more than two degrees of freedom, a finite number, got {df}: "
            "with two or fewer it has no variance. For infinitely many take Gaussian()."
        )
    return kept if kept.ndim else float(kept)


@register_distribution
@dataclass(frozen=True, eq=False)
class StudentT(Distribution):
    r"""Student's t of scale one: $f(z) \propto (1 + z^2/\nu)^{-(\nu + 1)/2}$, $\nu > 2$.

    Attributes:
        df: degrees of freedom $\nu$, a number or one for each target, (K,).

    Examples:
        >>> distribution = StudentT(4.0)
        >>> distribution.second, round(distribution.quantile(torch.tensor(0.95)).item(), 4)
        (2.0, 2.1318)
    """

    name, symmetric = "student-t", True
    df: float | Tensor = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "df", _checked(self.df))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def second(self) -> float | Tensor:
        r"""$\nu / (\nu - 2)$."""
        return self.df / (self.df - 2)

    def _at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z and the degrees of freedom, in double precision."""
        return z.to(F64), torch.as_tensor(self.df, dtype=F64).to(z.device)

    def log_density(self, z: Tensor) -> Tensor:
        """Normalised."""
        x, df = self._at(z)
        top = _log_gamma_step(df / 2) - 0.5 * (math.pi * df).log()
        return (top - (df + 1) / 2 * torch.log1p(x.square() / df)).to(_kind(z))

    def cdf(self, z: Tensor) -> Tensor:
        """The distribution function, with the digits of a small one."""
        x, df = self._at(z)
        tail = _tail(x.abs(), df)
        return torch.where(x > 0, 1 - tail, tail).to(_kind(z))

    def quantile(self, level: Tensor) -> Tensor:
        r"""The inverse of `cdf`: the logarithm of the tail is concave in asinh(|z| / sqrt(df)).

        Newton's steps converge from Wallace's normal approximation.
        """
        p, df = self._at(level)
        tail = torch.minimum(p, 1 - p)
        start = torch.special.ndtri(tail.clamp(min=1e-300)) * (8 * df + 3) / (8 * df + 1)

        def value_and_slope(s: Tensor) -> tuple[Tensor, Tensor]:
            z = df.sqrt() * s.sinh()
            above, height = _tail(z, df), self.log_density(z).exp() * df.sqrt() * s.cosh()
            return tail.log() - above.log(), height / above

        first = torch.expm1(start.square() / df).sqrt().asinh()
        s = increasing_root(value_and_slope, first, 0.0, math.inf)
        z = torch.where(tail > 0, df.sqrt() * s.sinh(), math.inf).copysign(p - 0.5)
        return torch.where((p >= 0) & (p <= 1), z, math.nan).to(_kind(level))

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        """That of no tilt."""
        return Tilted(self.df).shortfall(z, draws)

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        r"""$\sqrt{\nu (U^{-2/\nu} - 1)} \cos 2\pi V$ of uniform U and V (Bailey), exact."""
        u, v = _uniform(like, n, generator), _uniform(like, n, generator)
        u, df = self._at(u)
        drawn = (df * torch.expm1(-2 / df * u.log())).sqrt() * (2 * math.pi * v).cos()
        return drawn.to(_kind(like))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _quantiles(df: tuple[float, ...]) -> Tensor:
    """Student's at the nodes of the tilt, (df, panels, 8)."""
    nodes = cosine_tilt.panels(torch.device("cpu")).nodes
    return StudentT(torch.tensor(df, dtype=F64)[:, None, None]).quantile(nodes)


class TiltedRule(NamedTuple):
    """Moments and quantiles of tilted distributions by plain operations, as many for every row.

    The moments are exact while 64 cosines hold the tilted density. A quantile is that of the
    distribution to 1e-6 standard deviations while Student's level there lies between 1/64 and
    63/64, to 5e-4 while its own lies between 0.01 and 0.99: enough for a graph, which takes no
    iteration.

    Attributes:
        basis: at 64 midpoints, (8, 64).
        values: there, whose means are those of z and $z^2$, (df, 64, 2).
        finer: the basis at 128 midpoints, (8, 128).
        below: takes their shares to the probability below each panel's edge, (128, panels + 1).
        terms: the basis at the panels' nodes, (panels, 8, 8).
        primitive: see `cosine_tilt.Panels`.
        student: coefficients of Student's quantile in each panel, (df, panels, 8).
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
        share = (tilt.to(self.basis) @ self.basis).softmax(-1)
        if self.values.shape[:-2] == (1,):
            return share @ self.values[0]
        # Sums, not a product of matrices: onnxruntime does not broadcast one over no rows.
        return torch.stack([(share * part).sum(-1) for part in self.values.unbind(-1)], -1)

    def quantile(self, tilt: Tensor, level: Tensor) -> Tensor:
        """(L, M, K) of tilts (M, K, 8) and levels (L, 1, 1): the panel, then the place in it."""
        tilt = tilt.to(F64)
        below = ((tilt @ self.finer).softmax(-1) @ self.below).expand(len(level), -1, -1, -1)
        panel = (below <= level[..., None]).sum(-1, keepdim=True) - 1
        panel = panel.clamp(0, len(self.terms) - 1)
        start, end = below.gather(-1, panel)[..., 0], below.gather(-1, panel + 1)[..., 0]
        share, panel = ((level - start) / (end - start)).clamp(0, 1), panel[..., 0]
        rates = (self.terms[panel] @ tilt[..., None])[..., 0].softmax(-1) @ self.primitive
        rates = rates / rates.sum(-1, keepdim=True)
        powers = torch.arange(8, dtype=F64, device=level.device)

        def value_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
            terms = rates * x[..., None] ** powers
            return terms.sum(-1) * x - share, (terms * (powers + 1)).sum(-1)

        x = increasing_root(value_and_slope, share, 0.0, 1.0, steps=6)
        target = torch.arange(len(self.student), device=level.device)
        return (self.student[target, panel] * x[..., None] ** powers).sum(-1)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _rule(df: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> TiltedRule:
    """With basis and values in that precision."""
    at, student = cosine_tilt.panels(torch.device("cpu")), _quantiles(df)
    values = cosine_tilt.moment_values(student, torch.as_tensor(StudentT(torch.tensor(df)).second))
    basis, finer = (
        cosine_tilt.basis(u).mT.contiguous() for u in map(cosine_tilt.midpoints, (64, 128))
    )
    u, m = cosine_tilt.midpoints(128)[:, None], math.pi * torch.arange(1, 128, dtype=F64)[:, None]
    below = at.edges + 2 * (u * m.mT).cos() @ ((m * at.edges).sin() / m)
    fitted = student @ (at.primitive * torch.arange(1, 9))  # a primitive's derivative
    single = [part.to(device, dtype) for part in (basis, values)]
    double = [part.to(device) for part in (finer, below, at.basis, at.primitive, fitted)]
    return TiltedRule(*single, *double)


@register_distribution
@dataclass(frozen=True, eq=False)
class Tilted(Distribution):
    r"""Student's t with its density multiplied by $\exp(\theta \cdot b(u) - A)$, $u = F_\nu(z)$.

    $b_j(u) = \sqrt 2 \cos(j \pi u)$, j = 1 ... 8: skewness, several modes, other tails.

    Attributes:
        df: degrees of freedom, a number or one for each target, (K,).
        tilt: $\theta$ of each prediction, (..., 8).

    Examples:
        >>> distribution = Tilted(4.0, torch.tensor([0.5, 0, 0, 0, 0, 0, 0, 0]))
        >>> round(distribution.mean.item(), 4), round(distribution.second.item(), 4)
        (-0.5771, 2.1943)
    """

    name, wide = "tilted", ("tilt",)
    df: float | Tensor = 5.0
    tilt: Tensor = field(default_factory=lambda: torch.zeros(cosine_tilt.TERMS))

    def __post_init__(self) -> None:
        object.__setattr__(self, "df", _checked(self.df))
        object.__setattr__(self, "tilt", torch.as_tensor(self.tilt))
        if self.tilt.shape[-1:] != (cosine_tilt.TERMS,):
            raise ValueError(
                "A tilt has 8 entries for each prediction, (..., 8), got the shape "
                f"{tuple(self.tilt.shape)}."
            )

    __eq__, __hash__ = StudentT.__eq__, StudentT.__hash__

    @property
    def mirrored(self) -> Tilted:
        """The distribution of -z: every other entry of the tilt changes sign."""
        return self.each(lambda tilt: tilt * tilt.new_tensor([-1, 1]).repeat(4))

    def each(self, change: Callable[[Tensor], Tensor]) -> Tilted:
        """The distribution with another tilt."""
        distribution = object.__new__(type(self))  # what is checked and cached of df holds
        vars(distribution).update(vars(self), _degrees=self._degrees, tilt=change(self.tilt))
        vars(distribution).pop("_moments", None)
        return distribution

    @cached_property
    def _degrees(self) -> tuple[tuple[float, ...], Tensor]:
        """Each once, and which of them the entries have."""
        known, which = torch.unique(torch.as_tensor(self.df, dtype=F64), return_inverse=True)
        return tuple(known.tolist()), which

    @cached_property
    def _moments(self) -> Tensor:
        """Mean and second moment, (..., 2): 64 nodes a prediction."""
        return self.rule(_kind(self.tilt), self.tilt.device).moments(self.tilt)

    def rule(self, dtype: torch.dtype, device: torch.device) -> TiltedRule:
        """In that precision, its values shaped like the degrees of freedom."""
        degrees, which = self._degrees
        rule = _rule(degrees, dtype, device)
        if len(degrees) == 1:
            return rule
        return rule._replace(values=rule.values[which], student=rule.student[which.flatten()])

    @property
    def second(self) -> Tensor:
        """E z^2, about zero; exact while 64 cosines hold the tilted density."""
        return self._moments[..., 1]

    @property
    def mean(self) -> Tensor:
        """E z."""
        return self._moments[..., 0]

    def log_density(self, z: Tensor) -> Tensor:
        r"""Student's, plus $\theta \cdot b(u) - A(\theta)$."""
        distribution, x = StudentT(self.df), z.to(F64)
        tilt = self._by_row(CosineTilt.log_density, distribution.cdf(x))
        return (distribution.log_density(x) + tilt).to(_kind(z))

    def cdf(self, z: Tensor) -> Tensor:
        """The distribution function, with the digits of a small one."""
        return self._by_row(CosineTilt.cdf, StudentT(self.df).cdf(z.to(F64))).to(_kind(z))

    def quantile(self, level: Tensor) -> Tensor:
        """The inverse of `cdf`: in u first, then Student's."""
        u = self._by_row(CosineTilt.quantile, level.to(F64))
        return StudentT(self.df).quantile(u).to(_kind(level))

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""$z F^n - \int_0^u Q_\nu\, d F^n$, by the panels' rule."""
        degrees, which = self._degrees
        quantiles = _quantiles(degrees).to(z.device)

        def below(tilt: CosineTilt, u: Tensor, x: Tensor, which: Tensor) -> Tensor:
            rate = tilt.density * quantiles[which[:, 0]]
            rate = rate if draws == 1 else 2 * tilt.cdf_at_nodes * rate
            return x * tilt.cdf(u) ** draws - tilt.integral(rate, u)

        u = StudentT(self.df).cdf(z.to(F64))
        return self._by_row(below, u, z.to(F64), which.to(z.device)).to(_kind(z))

    def _by_row(self, answer: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """What `answer` says of tilts (R, 8) and their values (R, E)."""
        rows = (self.tilt[..., 0] + torch.as_tensor(self.df).to(self.tilt)).shape
        shape = (values[0] + values[0].new_empty(rows)).shape
        tilt = self.tilt.to(F64).expand(*rows, -1).reshape(-1, cosine_tilt.TERMS)
        if not (count := math.prod(shape) // max(1, len(tilt))):
            return values[0].new_empty(shape)
        flat = (part.expand(shape).reshape(count, len(tilt)).mT for part in values)
        step = max(1, (1 << 18) // (1024 + 16 * count))
        parts = zip(*(torch.split(part, step) for part in (tilt, *flat)), strict=True)
        found = [answer(CosineTilt(part), *others) for part, *others in parts]
        return torch.cat(found).mT.reshape(shape)


def gaussian_interval(mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """The central Gaussian interval that holds probability `level`: (low, high).

    Raises:
        ValueError: the level lies outside (0, 1).
    """
    require_level(level, "An interval's")
    z = Gaussian().quantile(torch.tensor((1 + level) / 2, dtype=torch.float64)).to(std)
    return mean - z * std, mean + z * std
