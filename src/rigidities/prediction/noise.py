r"""Noise: the part of the variance that more data would not remove.

A noise model describes how the noise variance depends on the row: it is a level for each target
times a shape, $\ell_k\, s(x)\, \bar c / c$. It is divided by the row's loss weight c, in units of
the typical weight $\bar c$ of the calibration rows (their harmonic mean, so that the level is their
mean noise variance). A row without a weight gets the level times the shape.

To add a noise model, add a class with a name and a shape. If its level is not a free choice, the
class also has the constant `tied`, which ties the level to the scale. `NOISES` lists the names that
`Paper(noise=...)` and files accept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import Tensor

__all__ = [
    "NOISES",
    "BayesNoise",
    "ConstantNoise",
    "FeatureNoise",
    "GivenNoise",
    "NoNoise",
    "Noise",
    "noise_named",
    "register_noise",
]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Noise:
    """The base of noise models: a level for each target, and the same shape everywhere.

    Attributes:
        name: What users and files call it.
        tied: The level at weight one in units of the squared scale; None if the calibration chooses
            the level.
        level: Noise variance of each target, (K,).
    """

    name: ClassVar[str] = ""
    tied: ClassVar[float | None] = None

    level: Tensor

    @classmethod
    def shape(cls, mean: Tensor, features: Tensor | None) -> Tensor | None:
        """The factor of the level, (M, 1) or (M, K); None for one.

        Args:
            mean: Predictions, (M, K).
            features: Features of the readout, (M, ...); None for a regressor without them.
        """
        return None

    def variance(self, mean: Tensor, features: Tensor | None) -> Tensor:
        """The noise variance of each target at weight one, broadcast against (M, K).

        Args:
            mean: Predictions, (M, K).
            features: Features of the readout, (M, ...); None for a regressor without them.
        """
        shape = self.shape(mean, features)
        return self.level if shape is None else self.level * shape.to(self.level)


NOISES: dict[str, type[Noise]] = {}
"""Classes of noise models by their names."""

NoiseClass = TypeVar("NoiseClass", bound=type[Noise])


def register_noise(kind: NoiseClass) -> NoiseClass:
    """Make a noise model known to `calibrate` and to files, under its name; a class decorator."""
    NOISES[kind.name] = kind
    return kind


def noise_named(noise: str | type[Noise] | Noise | Callable[[Any], Tensor]) -> type[Noise]:
    """The class of a noise model, given by its name, an object or the class itself.

    A function of batches means `GivenNoise` with the shape that it returns.

    Raises:
        ValueError: No noise model has that name.
    """
    if isinstance(noise, Noise):
        return type(noise)
    if isinstance(noise, type) and issubclass(noise, Noise):
        return noise
    if callable(noise):
        return GivenNoise
    if str(noise) not in NOISES:
        raise ValueError(f"Unknown noise {noise!r}. Known: {', '.join(NOISES)}.")
    return NOISES[noise]


@register_noise
class NoNoise(Noise):
    """No separate noise: the paper's form, whose scale includes whatever noise there is."""

    name = "none"
    tied = 0.0


@register_noise
class ConstantNoise(Noise):
    """The same noise variance for all rows."""

    name = "constant"


@register_noise
class BayesNoise(Noise):
    """The noise of Bayesian linear regression: variance = scale^2 (1/c + q)."""

    name = "bayes"
    tied = 1.0


@register_noise
class FeatureNoise(Noise):
    """The noise that a head on the features gives (`prediction.head`).

    The level is the noise variance of a typical row, at the median of the fitted ones.
    """

    name = "features"


@register_noise
@dataclass(frozen=True)
class GivenNoise(Noise):
    """Noise variances that are known for each row up to one factor, the level.

    The level is about one if the variances are right.

    Attributes:
        function: callable(batch) -> variances, one per sample or output. It is not saved to files.
    """

    name = "given"
    function: Callable[[Any], Tensor] | None = field(default=None, compare=False)

    def known_function(self) -> Callable[[Any], Tensor]:
        """The function.

        Raises:
            ValueError: The noise comes from a file, and its function was not loaded again.
        """
        if self.function is None:
            raise ValueError(
                "The noise of this calibration was a function, which a file cannot contain. Pass "
                "it again: LastLayerRigidity.load(path, model, noise=function)."
            )
        return self.function
