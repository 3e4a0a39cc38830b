r"""What a user asks of a calibration: `Full`, the default, or `Paper`.

A method is a frozen object that holds its own options, with plain defaults. It is passed as
`calibrate(x, y, method=rg.Full(support=(0, None)))`. The names "full" and "paper" stand for
`Full()` and `Paper()`.

- `Full`: the distribution of errors follows the features, and a guard widens the bars of unfamiliar
  inputs.
- `Paper`: $\sigma^2 = \alpha^2 q(\varsigma^2) + \text{noise}$ by one criterion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from ..prediction.distribution import Distribution, StudentT, distribution_named
from ..prediction.mixture import Mixture
from ..prediction.noise import GivenNoise, Noise, noise_named

__all__ = ["Full", "Method", "NoiseFunction", "Paper", "Support", "method_for"]

Support = tuple[float | None, float | None]
"""Lower and upper bound of the targets; None for no bound."""

NoiseFunction = Callable[[Any], Tensor]
"""A user's function from a batch to the noise variances of its rows."""

_CRITERIA = ("nll", "bins", "evidence", "loo")


@dataclass(frozen=True, kw_only=True)
class Full:
    r"""The full model: a distribution of errors by input, and a guard for unfamiliar inputs.

    The distribution is a mixture (`prediction.mixture`). A head on the features gives its noise,
    shares, centres and widths (`prediction.head`).

    Attributes:
        noise: "features" for a distribution that follows the features; "constant" for one that is
            the same for all rows; or a callable(batch) -> variances, a noise that is known for each
            row up to one factor.
        ridge: A fixed $\varsigma^2$; None to choose it.
        support: The bounds (low, high) of the targets, with None for no bound. Probability beyond a
            bound is moved to the bound.
        guard: Whether to widen the bars of unfamiliar inputs, for which nothing was learnt, to
            those of a forecaster who knows only the spread of the targets.
        optimism: Whether leave-one-out errors of training rows may be smaller than errors of new
            rows. They are not if the model is linear in all its trained weights: pass False then,
            and training rows count as new rows.

    Raises:
        ValueError: An option is not valid.
    """

    noise: Literal["features", "constant"] | NoiseFunction = "features"
    ridge: float | None = None
    support: Support | None = None
    guard: bool = True
    optimism: bool = True

    def __post_init__(self) -> None:
        if self.noise not in ("features", "constant") and not _is_function(self.noise):
            raise ValueError(
                "noise of Full must be 'features', 'constant' or a function of batches, got "
                f"{self.noise!r}. Other noises belong to Paper."
            )
        for name in ("guard", "optimism"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}.")
        object.__setattr__(self, "ridge", _checked_ridge(self.ridge))
        object.__setattr__(self, "support", checked_support(self.support))

    @property
    def noise_class(self) -> type[Noise]:
        """The class of the noise."""
        return noise_named(self.noise)

    @property
    def noise_function(self) -> NoiseFunction | None:
        """The function of a noise that is known; None for another noise."""
        return self.noise if callable(self.noise) else None


@dataclass(frozen=True, kw_only=True)
class Paper:
    r"""The paper's form: $\sigma^2 = \alpha^2 q(\varsigma^2) + \text{noise}$ by one criterion.

    Attributes:
        criterion: "nll", the likelihood; "bins", the errors in bins of the variance; "evidence",
            which chooses the ridge from the training data and the scale on validation data; "loo",
            which uses leave-one-out residuals of the training data (`calibrate(train=...)`) and is
            optimistic for a network trained end to end.
        ridge: A fixed $\varsigma^2$; None to choose it.
        noise: "none": the scale includes the noise. "constant" adds a noise floor. "bayes" uses
            $\alpha^2$ as the noise, as Bayesian linear regression does. A callable(batch) ->
            variances gives a noise that is known for each row up to one factor. A class of
            `prediction.noise` is used as it is. With sample weights c, the noise of a row is the
            level times the typical weight over c.
        distribution: "gaussian", "student-t", whose degrees of freedom are found, or an object or
            class of `prediction.distribution`.
        support: As in `Full`.

    Raises:
        ValueError: An option is not valid.
    """

    criterion: Literal["nll", "bins", "evidence", "loo"] = "nll"
    ridge: float | None = None
    noise: str | type[Noise] | Noise | NoiseFunction = "none"
    distribution: str | Distribution | type[Distribution] = "gaussian"
    support: Support | None = None

    def __post_init__(self) -> None:
        if self.criterion not in _CRITERIA:
            raise ValueError(
                f"criterion must be one of {', '.join(map(repr, _CRITERIA))}, got "
                f"{self.criterion!r}."
            )
        if self.noise == "features" or self.distribution in ("mixture", Mixture):
            raise ValueError(
                "noise='features' and distribution='mixture' are fitted by Full. Pass "
                "method=rigidities.Full(), or another noise and distribution to Paper."
            )
        if self.noise_class is GivenNoise and self.noise_function is None:
            raise ValueError("A given noise is a function: noise=lambda batch: variances.")
        distribution_named(self.distribution)  # refuses a name that is not known
        object.__setattr__(self, "ridge", _checked_ridge(self.ridge))
        object.__setattr__(self, "support", checked_support(self.support))

    @property
    def noise_class(self) -> type[Noise]:
        """The class of the noise.

        Raises:
            ValueError: No noise has that name.
        """
        return noise_named(self.noise)

    @property
    def noise_function(self) -> NoiseFunction | None:
        """The function of a noise that is known; None for another noise."""
        if isinstance(self.noise, GivenNoise):
            return self.noise.function
        if isinstance(self.noise, Noise) or not _is_function(self.noise):
            return None
        return self.noise  # type: ignore[return-value]

    @property
    def open_tails(self) -> bool:
        """Whether the distribution is a Student-t whose degrees of freedom are to be found."""
        return self.distribution in ("student-t", StudentT)


Method = Full | Paper
"""What `calibrate` accepts, besides the names "full" and "paper"."""


def method_for(method: Any) -> Method:
    """The method that a user has given, as an object.

    Raises:
        ValueError: It is neither a method nor the name of one.
    """
    if isinstance(method, Full | Paper):
        return method
    if method == "full":
        return Full()
    if method == "paper":
        return Paper()
    hint = ""
    if method == "auto":
        hint = " Pass method='full'."
    elif method in _CRITERIA:
        hint = f" Pass method=rigidities.Paper(criterion={method!r})."
    elif method in (Full, Paper):
        names = ", ".join(f"{option.name}=..." for option in fields(method))
        hint = f" Call it: {method.__name__}(), with options {names}."
    raise ValueError(
        "method must be 'full', 'paper', or an object rigidities.Full(...) or "
        f"rigidities.Paper(...), got {method!r}.{hint}"
    )


def _is_function(noise: Any) -> bool:
    """Whether a noise is a user's function, not a class of noises."""
    return callable(noise) and not isinstance(noise, type)


def _checked_ridge(ridge: Any) -> float | None:
    """The ridge as a number; None where it is to be chosen."""
    if ridge is None:
        return None
    if isinstance(ridge, str | bool) or not math.isfinite(ridge) or ridge < 0:
        raise ValueError(
            f"ridge must be a finite number that is not negative, or None to choose it, got "
            f"{ridge!r}."
        )
    return float(ridge)


def checked_support(support: Any) -> Support | None:
    """The bounds as numbers or None; None where there is neither."""
    if support is None:
        return None
    refusal = ValueError(
        f"support must be (low, high) with low below high, None for no bound, got {support!r}."
    )
    if not isinstance(support, tuple | list) or len(support) != 2:
        raise refusal
    low = None if support[0] is None else float(support[0])
    high = None if support[1] is None else float(support[1])
    if low is None and high is None:
        return None
    lowest = -math.inf if low is None else low
    highest = math.inf if high is None else high
    if not lowest < highest:  # also where one of them is NaN
        raise refusal
    return low, high
