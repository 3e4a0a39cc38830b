r"""The shape of what lies around the mean: laws of location zero and scale one.

A prediction is $y = \mu + s z$ with z from such a law. The variance $\sigma^2 = \alpha^2 q +
\text{noise}$ is the second moment about $\mu$, so that $s = \sigma / \sqrt{E z^2}$ (`second`).
Another law is another class here; `LAWS` lists the names that `calibrate(law=...)` and files
know. Its fields are its settings, plain numbers that files keep.

Closed forms of scores: Jordan, Krueger and Lerch, Evaluating probabilistic forecasts with
scoringRules, Journal of Statistical Software 90 (2019).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..notices import require_level
from . import cosine_tilt
from .cosine_tilt import CosineTilt
from .quadrature import gauss

LOG_TWO_PI = math.log(2 * math.pi)
GOLDEN = (math.sqrt(5) - 1) / 2
F64 = torch.float64


class Law(ABC):
    """The base of all laws.

    A new law needs `quantile`, `log_density` and `sample`; what else there is follows from them,
    numerically, unless it has better. All broadcast the law's own parameters against z.

    Attributes:
        name: what users and files call it.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def quantile(self, level: Tensor) -> Tensor:
        """z with probability `level` below it."""

    @abstractmethod
    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the density at z."""

    @abstractmethod
    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws for each entry of `like`, (n, ...)."""

    @property
    def second(self) -> float | Tensor:
        """E z^2, about the location."""
        return 1.0

    @property
    def mean(self) -> float | Tensor:
        """E z."""
        return 0.0

    @property
    def mirrored(self) -> Law:
        """The law of -z."""
        return _Mirrored(self)

    def each(self, change: Callable[[Tensor], Tensor]) -> Law:
        """The law with every tensor that has an entry for each prediction changed so."""
        return self

    def settings(self) -> dict[str, Any]:
        """The fields as plain values, for files."""
        held = {name: part for name, part in vars(self).items() if not name.startswith("_")}
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in held.items()}

    def cdf(self, z: Tensor) -> Tensor:
        """Probability below z; by bisection of the quantile."""
        low, high = torch.zeros_like(z, dtype=F64), torch.ones_like(z, dtype=F64)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.quantile(middle) < z
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return torch.where(z.isnan(), math.nan, high).to(_kind(z))

    def survival(self, z: Tensor) -> Tensor:
        """Probability above z, with the digits of a small one."""
        return self.mirrored.cdf(-z)

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""How far the largest of so many draws stays below z in the mean, $\int_{-\infty}^z F^n$.

        By a quadrature over levels, $\int_0^{F(z)} (z - Q(u))\, d u^n$.
        """
        (w, weights), below = gauss(48), self.cdf(z)[..., None].to(F64)
        w, weights = w.to(z.device), weights.to(z.device)
        u = below * w**3
        gap = (z[..., None] - self.quantile(u)) * draws * u ** (draws - 1)
        value = (torch.where(u > 0, gap, 0) * weights * 3 * w.square() * below).sum(-1)
        return value.to(_kind(z))

    def crps(self, z: Tensor) -> Tensor:
        r"""Ranked probability score, $\int_{-\infty}^z F^2 + \int_z^\infty (1 - F)^2$."""
        return self.shortfall(z, 2) + self.mirrored.shortfall(-z, 2)

    def fitted(self, residual: Tensor, spread: Tensor) -> Law:
        """The law with what it leaves open chosen by the likelihood, each scale at its best.

        Args:
            residual: (n, K), NaN where a target is masked.
            spread: unscaled variances (n, K).
        """
        return self

    def profile(self, residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        r"""The best squared scale of each of J candidates, and its NLL per row.

        The scale is that of variances: $\alpha^2 u$ is the law's second moment. Found by golden
        sections of $\log\alpha$ about that of the root mean square; a law with a closed form has
        its own.

        Args:
            residual: (n, 1) or (n, J).
            spread: unscaled variances (n, J).
        """
        z = residual / spread.sqrt()
        centre = 0.5 * z.square().mean(0).log()
        low, high = centre - 4, centre + 4

        def value(log_scale: Tensor) -> Tensor:
            return (log_scale - self.log_density(z * (-log_scale).exp())).mean(0)

        for _ in range(60):
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


@dataclass(frozen=True)
class _Mirrored(Law):
    law: Law

    def quantile(self, level: Tensor) -> Tensor:
        return -self.law.quantile(1 - level)

    def log_density(self, z: Tensor) -> Tensor:
        return self.law.log_density(-z)

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        return -self.law.sample(like, n, generator)

    def cdf(self, z: Tensor) -> Tensor:
        return 1 - self.law.cdf(-z)


LAWS: dict[str, type[Law]] = {}
"""By name."""

L = TypeVar("L", bound=type[Law])


def register_law(kind: L) -> L:
    """Make a law known to `calibrate` and to files, under its name; a class decorator."""
    LAWS[kind.name] = kind
    return kind


def law_named(given: str | Law | type[Law]) -> Law:
    """The law of that name or class at its default settings, or the law itself.

    Raises:
        ValueError: there is none.
    """
    if isinstance(given, Law):
        return given
    if isinstance(given, type) and issubclass(given, Law):
        return given()
    if str(given) not in LAWS:
        raise ValueError(f"Unknown law {given!r}. Known: {', '.join(LAWS)}.")
    return LAWS[given]()


@register_law
@dataclass(frozen=True)
class Gaussian(Law):
    """The standard normal law."""

    name = "gaussian"

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

    @property
    def mirrored(self) -> Gaussian:
        """Itself."""
        return self

    def cdf(self, z: Tensor) -> Tensor:
        """The normal distribution function."""
        below: Tensor = torch.special.ndtr(z.to(_kind(z)))
        return below

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


_INNER, _STEP = 1.5, 1 << 14


def _tail(z: Tensor, df: Tensor) -> Tensor:
    r"""Student's probability beyond z >= 0.

    $\tfrac12 - \int_0^z f$ up to 1.5; beyond, with $a = \nu/2$ and $x = \nu/(\nu + z^2)$,
    $\frac{x^a\, \Gamma(a + 1/2)}{2 a \sqrt\pi\, \Gamma(a)} \int_0^\infty
    e^{-y^2} (1 - x e^{-y^2/a})^{-1/2}\, 2 y\, dy$, the incomplete beta function. Both integrands
    are smooth whatever the degrees of freedom; Gauss's rule gives twelve digits.
    """
    shape = (z * df).shape
    both = (torch.split(part.expand(shape).reshape(-1), _STEP) for part in (z, df))
    return torch.cat([_tail_of(*part) for part in zip(*both, strict=True)]).reshape(shape)


def _tail_of(z: Tensor, df: Tensor) -> Tensor:
    (x, w), (y, v) = gauss(20), gauss(40)
    x, w, y, v = x.to(z.device), w.to(z.device), 6.5 * y.to(z.device), 6.5 * v.to(z.device)
    a, step = df / 2, _log_gamma_step(df / 2)
    near = z.clamp(max=_INNER)
    bend = torch.log1p((near[:, None] * x).square() / df[:, None])
    height = (-(a + 0.5)[:, None] * bend).exp() @ w
    inner = 0.5 - near * height * (step - 0.5 * (math.pi * df).log()).exp()
    bend = torch.log1p(z.clamp(min=_INNER).square() / df)
    root = -torch.expm1(-(bend[:, None] + y.square() / a[:, None]))
    integral = root.rsqrt() @ (v * 2 * y * (-y.square()).exp())
    outer = (step - a * bend).exp() * integral / (2 * math.sqrt(math.pi) * a)
    return torch.where(z < _INNER, inner, outer)


def _degrees(df: Any) -> float | Tensor:
    """A number, or float64 where there are several; more than two."""
    kept = torch.as_tensor(df, dtype=F64, device="cpu")
    if not all(2 < value < math.inf for value in kept.flatten().tolist()):
        raise ValueError(
            f"A Student-t law needs more than two degrees of freedom, a finite number, got {df}: "
            "with two or fewer it has no variance. For infinitely many take Gaussian()."
        )
    return kept if kept.ndim else float(kept)


@register_law
@dataclass(frozen=True, eq=False)
class StudentT(Law):
    r"""Student's t of scale one: $f(z) \propto (1 + z^2/\nu)^{-(\nu + 1)/2}$, $\nu > 2$.

    Attributes:
        df: degrees of freedom $\nu$, a number or one for each target, (K,); None is to be found by
            calibration, and 5 before that.

    Examples:
        >>> law = StudentT(4.0)
        >>> law.second, round(law.quantile(torch.tensor(0.95)).item(), 4)
        (2.0, 2.1318)
    """

    name = "student-t"
    df: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.df is not None:
            object.__setattr__(self, "df", _degrees(self.df))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def freedom(self) -> float | Tensor:
        """Degrees of freedom."""
        return 5.0 if self.df is None else self.df

    @property
    def second(self) -> float | Tensor:
        r"""$\nu / (\nu - 2)$."""
        return self.freedom / (self.freedom - 2)

    @property
    def mirrored(self) -> StudentT:
        """Itself."""
        return self

    def _at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z and the degrees of freedom, in double precision."""
        return z.to(F64), torch.as_tensor(self.freedom, dtype=F64).to(z.device)

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
        r"""The inverse of `cdf`, by Newton's steps on the logarithm of the tail.

        It is concave in $s = \mathrm{asinh}(|z| / \sqrt\nu)$, so that they converge from
        anywhere. The start is Wallace's normal approximation.
        """
        p, df = self._at(level)
        tail = torch.minimum(p, 1 - p)
        start = torch.special.ndtri(tail.clamp(min=1e-300)) * (8 * df + 3) / (8 * df + 1)
        s = torch.expm1(start.square() / df).sqrt().asinh()
        for _ in range(30):
            z = df.sqrt() * s.sinh()
            above = _tail(z, df)
            height = self.log_density(z).exp() * (df + z.square()).sqrt()
            step = (above.log() - tail.log()) * above / height
            s = (s + step).clamp(min=0)
            if not bool((step.abs() > 4e-16 * s).any()):
                break
        z = torch.where(tail > 0, df.sqrt() * s.sinh(), math.inf).copysign(p - 0.5)
        return torch.where((p >= 0) & (p <= 1), z, math.nan).to(_kind(level))

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""$zF + g$, $g = f\,(\nu + z^2)/(\nu - 1)$; of two draws $zF^2 + 2Fg - c\, F_{2\nu-1}$.

        The last at $z \sqrt{(2\nu - 1)/\nu}$, with $c = \frac{2\sqrt\nu}{\nu - 1}
        \frac{B(1/2, \nu - 1/2)}{B(1/2, \nu/2)^2}$.
        """
        x, df = self._at(z)
        below = self.cdf(x)
        gap = (self.log_density(x) + (df + x.square()).log()).exp() / (df - 1)
        if draws == 1:
            return (x * below + gap).to(_kind(z))
        beta = 2 * _log_gamma_step(df / 2) - _log_gamma_step(df - 0.5)
        share = StudentT(2 * df - 1).cdf(x * (2 - 1 / df).sqrt()) * (beta.exp() * df.sqrt())
        value = below * (x * below + 2 * gap) - share * 2 / ((df - 1) * math.sqrt(math.pi))
        return value.to(_kind(z))

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        r"""$\sqrt{\nu (U^{-2/\nu} - 1)} \cos 2\pi V$ of uniform U and V (Bailey), exact."""
        u, v = _uniform(like, n, generator), _uniform(like, n, generator)
        u, df = self._at(u)
        drawn = (df * torch.expm1(-2 / df * u.log())).sqrt() * (2 * math.pi * v).cos()
        return drawn.to(_kind(like))

    def fitted(self, residual: Tensor, spread: Tensor) -> StudentT:
        """With the likeliest degrees of freedom of each target, 2.1 to 1002, where df is None."""
        if self.df is not None:
            return self
        z = (residual / spread.sqrt()).to(F64)
        known = [column[torch.isfinite(column), None] for column in z.unbind(1)]
        return StudentT(torch.stack([_likeliest(column) for column in known]))

    def profile(self, residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        r"""Newton's steps in $t = \log s^2$ on $\overline{(\nu+1) z^2 / (\nu e^t + z^2)} = 1$.

        The left side falls as t grows; bisection where a step leaves the bracket.
        """
        square, df = self._at(residual.square() / spread)
        t = square.mean(0).log()
        low, high = square.amin(0).clamp(min=1e-300).log().minimum(t - 60), t + 1
        for _ in range(100):
            share = square / (df * t.exp() + square)
            value = (df + 1) * share.mean(0) - 1
            slope = (df + 1) * (share * (1 - share)).mean(0)
            low, high = torch.where(value > 0, t, low), torch.where(value > 0, high, t)
            last, step = t, t + value / slope
            t = torch.where((step >= low) & (step <= high), step, (low + high) / 2)
            if not bool(((t - last).abs() > 1e-12).any()):
                break
        nll = 0.5 * t - self.log_density(square.sqrt() * (-0.5 * t).exp()).mean(0)
        return t.exp() * torch.as_tensor(self.second).to(t), nll + 0.5 * spread.log().mean(0)


def _likeliest(z: Tensor) -> Tensor:
    """Degrees of freedom of the column z (n, 1), by golden sections of log(df - 2)."""
    low, high = math.log(0.1), math.log(1000.0)

    def value(at: float) -> float:
        return float(StudentT(2 + math.exp(at)).profile(z, torch.ones_like(z))[1])

    for _ in range(30):
        a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, b) if value(a) < value(b) else (a, high)
    return torch.tensor(2 + math.exp((low + high) / 2), dtype=F64)


@lru_cache(maxsize=8)
def _node_quantiles(df: tuple[float, ...], device: torch.device) -> Tensor:
    """Student's quantiles at the nodes of the tilt's panels, (df, panels, 8)."""
    lower = _lower_quantiles(df)
    return torch.cat([lower, -lower.flip((1, 2))], 1).to(device)


@lru_cache(maxsize=8)
def _lower_quantiles(df: tuple[float, ...]) -> Tensor:
    return StudentT(torch.tensor(df, dtype=F64)[:, None, None]).quantile(
        cosine_tilt.half_nodes()[0]
    )


@lru_cache(maxsize=16)
def _moment_weights(df: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What takes a density at the moments' nodes to its mass, mean and second moment."""
    at, law = _lower_quantiles(df), StudentT(torch.tensor(df, dtype=F64))
    zero = torch.zeros(len(df), dtype=F64)
    first = cosine_tilt.moment_weights(at, -law.shortfall(zero), -1)
    second = cosine_tilt.moment_weights(at.square(), torch.as_tensor(law.second) / 2, 1)
    mass = torch.ones_like(first) / cosine_tilt.MIDPOINTS
    mass[:, cosine_tilt.MIDPOINTS :] = 0
    return torch.stack([mass, first, second], -1).to(device, dtype)


@register_law
@dataclass(frozen=True, eq=False)
class Tilted(Law):
    r"""Student's t with its density multiplied by $\exp(\theta \cdot b(u) - A)$, $u = F_\nu(z)$.

    $b_j(u) = \sqrt 2 \cos(j \pi u)$, j = 1 ... 8: skewness, several modes, other tails.

    Attributes:
        df: degrees of freedom, a number or one for each target, (K,).
        tilt: $\theta$ of each prediction, (..., 8).

    Examples:
        >>> law = Tilted(4.0, torch.tensor([0.5, 0, 0, 0, 0, 0, 0, 0]))
        >>> round(law.mean.item(), 4), round(law.second.item(), 4)
        (-0.5771, 2.1943)
    """

    name = "tilted"
    df: float | Tensor = 5.0
    tilt: Tensor = field(default_factory=lambda: torch.zeros(cosine_tilt.TERMS))

    def __post_init__(self) -> None:
        object.__setattr__(self, "df", _degrees(self.df))
        tilt = torch.as_tensor(self.tilt)
        if tilt.shape[-1:] != (cosine_tilt.TERMS,):
            raise ValueError(
                f"A tilt has {cosine_tilt.TERMS} entries for each prediction, (..., "
                f"{cosine_tilt.TERMS}), got the shape {tuple(tilt.shape)}."
            )
        object.__setattr__(self, "tilt", tilt)

    __eq__, __hash__ = StudentT.__eq__, StudentT.__hash__

    @property
    def untilted(self) -> StudentT:
        """The law at tilt zero."""
        return StudentT(self.df)

    @property
    def mirrored(self) -> Tilted:
        """The law of -z: every other entry of the tilt changes sign."""
        return replace(self, tilt=cosine_tilt.mirrored(self.tilt))

    def each(self, change: Callable[[Tensor], Tensor]) -> Tilted:
        """The law with another tilt."""
        return replace(self, tilt=change(self.tilt))

    @cached_property
    def _degrees(self) -> tuple[float, ...]:
        return tuple(torch.as_tensor(self.df).flatten().tolist())

    @cached_property
    def _moments(self) -> Tensor:
        """Mass, mean and second moment, (..., 3): 64 nodes a prediction."""
        kind = _kind(self.tilt)
        nodes = _moment_basis(kind, self.tilt.device)
        weights = _moment_weights(self._degrees, kind, self.tilt.device)
        raised = self.tilt.to(kind) @ nodes
        raised = (raised - raised.amax(-1, keepdim=True)).exp()
        if len(weights) == 1:
            sums = raised @ weights[0]
        else:
            weights = weights.reshape(*torch.as_tensor(self.df).shape, *weights.shape[1:])
            sums = (raised[..., None, :] @ weights)[..., 0, :]
        return sums / sums[..., :1]

    @property
    def second(self) -> Tensor:
        """E z^2, about zero; exact while 64 cosines hold the tilted density."""
        return self._moments[..., 2]

    @property
    def mean(self) -> Tensor:
        """E z."""
        return self._moments[..., 1]

    def log_density(self, z: Tensor) -> Tensor:
        r"""Student's, plus $\theta \cdot b(u) - A(\theta)$."""
        base, tilt = self.untilted, self.tilt.to(F64)
        x = z.to(F64)
        raised = (cosine_tilt.basis(base.cdf(x)) * tilt).sum(-1)
        return (base.log_density(x) + raised - cosine_tilt.log_normaliser(tilt)).to(_kind(z))

    def _by_row(
        self, values: Tensor, answer: Callable[[CosineTilt, Tensor, StudentT, Tensor], Tensor]
    ) -> Tensor:
        """What `answer` says of tilts (R, 8), their values (R, E), Student's law and its index."""
        df, x = torch.as_tensor(self.df), values.to(F64)
        rows = (self.tilt[..., 0] * df.to(self.tilt.device)).shape
        shape = (x * x.new_empty(rows)).shape
        tilt = self.tilt.to(F64).expand(*rows, -1).reshape(-1, cosine_tilt.TERMS)
        index = torch.arange(df.numel()).reshape(df.shape).expand(rows).reshape(-1)
        flat = x.expand(shape).reshape(math.prod(shape) // max(1, len(tilt)), len(tilt)).mT
        found, step = [], max(1, (1 << 18) // (1024 + 16 * flat.shape[1]))
        parts = (torch.split(part, step) for part in (tilt, flat, index))
        for part, of, at in zip(*parts, strict=True):
            law = StudentT(df.flatten()[at, None])
            found.append(answer(CosineTilt(part), of, law, at))
        return torch.cat(found).mT.reshape(shape).to(_kind(values))

    def cdf(self, z: Tensor) -> Tensor:
        """The distribution function, with the digits of a small one."""
        return self._by_row(z, lambda tilt, x, law, _: tilt.cdf(_place(law, x)))

    def quantile(self, level: Tensor) -> Tensor:
        """The inverse of `cdf`: in u first, then Student's."""

        def inverse(tilt: CosineTilt, level: Tensor, law: StudentT, _: Tensor) -> Tensor:
            place = tilt.quantile(level)
            return law.quantile(place.abs()) * torch.where(torch.signbit(place), 1.0, -1.0)

        return self._by_row(level, inverse)

    def shortfall(self, z: Tensor, draws: int = 1) -> Tensor:
        r"""$z F^n - \int_0^u Q_\nu\, d F^n$, by the panels' rule."""
        quantiles = _node_quantiles(self._degrees, z.device)

        def below(tilt: CosineTilt, x: Tensor, law: StudentT, index: Tensor) -> Tensor:
            rate, place = tilt.density * quantiles[index], _place(law, x)
            rate = rate if draws == 1 else 2 * tilt.cdf_at_nodes * rate
            return x * tilt.cdf(place) ** draws - tilt.integral(rate, place)

        return self._by_row(z, below)

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """Quantiles of uniform draws."""
        return self.quantile(_uniform(like, n, generator)).to(_kind(like))


def _place(law: StudentT, z: Tensor) -> Tensor:
    """u as a signed distance from the nearer end."""
    return law.cdf(-z.abs()).copysign(z)


@lru_cache(maxsize=8)
def _moment_basis(dtype: torch.dtype, device: torch.device) -> Tensor:
    return cosine_tilt.basis(cosine_tilt.moment_nodes()).mT.to(device, dtype).contiguous()


def gaussian_interval(mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """The central Gaussian interval that holds probability `level`: (low, high).

    Raises:
        ValueError: the level lies outside (0, 1).
    """
    require_level(level, "An interval's")
    z = Gaussian().quantile(torch.tensor((1 + level) / 2, dtype=torch.float64)).to(std)
    return mean - z * std, mean + z * std
