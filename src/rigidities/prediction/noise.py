r"""Noise: the part of the variance that more data would not remove.

A noise is a level for each target times a shape, $\ell_k\, s(x)\, \bar c / c$: it is divided by the
row's loss weight c, in units of the typical one of the calibration rows, $\bar c$ (their harmonic
mean, so that the level is their mean noise). A row without a weight gets the level itself.
Another noise is another class here with a name, its shape and, where its level is no free choice,
what ties it to the scale; `NOISES` lists the names that `calibrate(noise=...)` and files know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import Tensor


@dataclass(frozen=True)
class Noise:
    """The base: a level for each target, of the same shape everywhere.

    Attributes:
        name: what users and files call it.
        tied: the level at weight one in units of the squared scale; None where calibration
            chooses it.
        level: (K,).
    """

    name: ClassVar[str] = ""
    tied: ClassVar[float | None] = None

    level: Tensor

    @classmethod
    def shape(cls, mean: Tensor, features: Tensor | None) -> Tensor | None:
        """What the level is multiplied by, (M, 1) or (M, K); None for one.

        Args:
            mean: predictions, (M, K).
            features: of the readout, (M, ...); None for a regressor without one.
        """
        return None

    def variance(self, mean: Tensor, features: Tensor | None) -> Tensor:
        """Of each target, broadcast against (M, K)."""
        shape = self.shape(mean, features)
        return self.level if shape is None else self.level * shape.to(self.level)


NOISES: dict[str, type[Noise]] = {}
"""By name."""

N = TypeVar("N", bound=type[Noise])


def register_noise(kind: N) -> N:
    """Make a noise known to `calibrate` and to files, under its name; a class decorator."""
    NOISES[kind.name] = kind
    return kind


def noise_named(given: str | type[Noise] | Noise | Callable[[Any], Tensor]) -> type[Noise]:
    """The noise of that name, of that object, or the class itself; a function gives its shape.

    Raises:
        ValueError: there is none.
    """
    if isinstance(given, Noise):
        return type(given)
    if isinstance(given, type) and issubclass(given, Noise):
        return given
    if callable(given):
        return GivenNoise
    if str(given) not in NOISES:
        raise ValueError(f"Unknown noise {given!r}. Known: {', '.join(NOISES)}.")
    return NOISES[given]


@register_noise
class NoNoise(Noise):
    """None: the paper's form, whose scale holds what noise there is."""

    name = "none"
    tied = 0.0


@register_noise
class ConstantNoise(Noise):
    """A floor of its own, the same everywhere."""

    name = "constant"


@register_noise
class BayesNoise(Noise):
    """Bayesian linear regression's: the squared scale over c, the variance scale^2 (1/c + q)."""

    name = "bayes"
    tied = 1.0


@register_noise
class FeatureNoise(Noise):
    """What a head on the features says (`prediction.head`); the level is that of a middling row."""

    name = "features"


@register_noise
@dataclass(frozen=True)
class GivenNoise(Noise):
    """Known for each row up to one factor, the level: one, where it is known well.

    Attributes:
        function: callable(batch) -> variances, one per sample or output; files do not hold it.
    """

    name = "given"
    function: Callable[[Any], Tensor] | None = field(default=None, compare=False)
