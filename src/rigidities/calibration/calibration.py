r"""What a calibration is asked for, and what it has chosen.

`CalibrationOptions` holds what one call of `calibrate` asks for, checked and with names replaced by
classes. `Calibration` holds the outcome: the ridge $\varsigma^2$, the scale $\alpha$, the noise and
the distribution around the mean. Predictions, files and reports read the outcome from it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..prediction.distribution import (
    DISTRIBUTIONS,
    Distribution,
    Gaussian,
    StudentT,
    Tilted,
    distribution_named,
)
from ..prediction.guards import Guard, guard_from
from ..prediction.head import Head, HeadForm
from ..prediction.noise import NOISES, GivenNoise, Noise, NoNoise, noise_named
from .conformal import Conformal, Groups
from .criteria import AUTO, Criterion, criterion_for

__all__ = ["Calibration", "CalibrationOptions", "NoiseFunction", "Support"]

Support = tuple[float | None, float | None]
"""Lower and upper bound of the targets; None for no bound."""

NoiseFunction = Callable[[Any], Tensor]
"""A user's function from a batch to the noise variances of its rows."""


@dataclass(frozen=True)
class CalibrationOptions:
    """What a user asks of a calibration.

    Attributes:
        criterion: The criterion's name.
        noise: The class of the noise.
        distribution: The distribution around the mean.
        ridge: A ridge that is fixed; None where it is to be searched.
        noise_function: The function that gives the noise variances, for a noise that is known.
        support: The targets' bounds.
        guard: Whether `auto` widens bars beyond the training rows.
        optimism: Whether `auto` allows leave-one-out errors to be smaller than errors of new rows.
        open_tails: Whether the distribution is a Student-t whose degrees of freedom are to be
            found.
        early_stopped: Whether the validation rows chose the model's checkpoint; None if unknown.
    """

    criterion: str
    noise: type[Noise]
    distribution: Distribution
    ridge: float | None = None
    noise_function: NoiseFunction | None = None
    support: Support | None = None
    guard: bool = True
    optimism: bool = True
    open_tails: bool = False
    early_stopped: bool | None = None

    @classmethod
    def of(
        cls,
        criterion: str,
        noise: str | type[Noise] | Noise | NoiseFunction | None = None,
        distribution: str | Distribution | type[Distribution] | None = None,
        ridge: float | str | None = None,
        support: Support | None = None,
        guard: bool | str = True,
        optimism: bool = True,
        early_stopped: bool | None = None,
    ) -> CalibrationOptions:
        """The options that the arguments of `calibrate` name.

        Args:
            criterion: The criterion's name.
            noise: A name, a class, an instance or a function; None takes the criterion's default.
            distribution: A name, a class or an instance; None takes the criterion's default.
            ridge: A number fixes the ridge; None and "search" leave it to be searched.
            support: The targets' bounds.
            guard: As in the attributes.
            optimism: As in the attributes.
            early_stopped: As in the attributes.

        Raises:
            ValueError: A name is not known, or the criterion does not fit the distribution or the
                noise.
        """
        if noise is None:
            noise = "features" if criterion == AUTO else "none"
        if distribution is None:
            distribution = "tilted" if criterion == AUTO else "gaussian"
        if not isinstance(guard, bool):
            raise ValueError(f"guard must be True or False, got {guard!r}.")
        if criterion == AUTO and isinstance(distribution, StudentT | Tilted):
            raise ValueError(
                "criterion='auto' fits the settings of the distribution, got "
                f"{distribution.name!r} with settings. Pass distribution={distribution.name!r}, "
                "or use criterion='nll'."
            )
        options = cls(
            criterion=criterion,
            noise=noise_named(noise),
            distribution=distribution_named(distribution),
            ridge=_fixed_ridge(ridge),
            noise_function=_noise_function(noise),
            support=_checked_support(support),
            guard=guard,
            optimism=optimism,
            open_tails=distribution in ("student-t", StudentT),
            early_stopped=early_stopped,
        )
        # Refuses a criterion that is unknown or does not fit the distribution or the noise.
        criterion_for(criterion, options.distribution, options.noise.name)
        return options

    @property
    def profile(self) -> Criterion:
        """The criterion as a function of residuals and spreads."""
        return criterion_for(self.criterion, self.distribution)

    @property
    def early_stopping_remark(self) -> str:
        """What early stopping on the validation rows means, or a question whether there was any.

        Empty where there was none.
        """
        if self.early_stopped is False:
            return ""
        effect = "90 % intervals may cover up to 3 percentage points too little"
        if self.early_stopped:
            return (
                "These validation rows chose the checkpoint (early stopping), so their errors are "
                f"optimistic: {effect}. Calibrate on rows that were used for nothing else."
            )
        return (
            "Did these validation rows choose the checkpoint (early stopping)? If so, their errors "
            f"are optimistic, and {effect}. Answer with calibrate(..., early_stopped=True) or "
            "early_stopped=False."
        )

    @property
    def left_out(self) -> bool:
        """Whether every row is treated as left out of the fit."""
        return self.criterion == "loo"


def _fixed_ridge(ridge: float | str | None) -> float | None:
    """The ridge as a number; None where it is to be searched."""
    if isinstance(ridge, str):
        if ridge != "search":
            raise ValueError(f"ridge must be None, 'search' or a number, got {ridge!r}.")
        return None
    return None if ridge is None else float(ridge)


def _noise_function(noise: Any) -> NoiseFunction | None:
    """The function of a given noise; None for every other kind of noise."""
    if noise_named(noise) is not GivenNoise:
        return None
    function = noise.function if isinstance(noise, GivenNoise) else noise
    if not callable(function) or isinstance(function, type):
        raise ValueError("A given noise is a function: noise=lambda batch: variances.")
    return function


def _checked_support(support: Any) -> Support | None:
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


@dataclass(frozen=True)
class Calibration:
    r"""$\sigma^2 = \alpha^2 q(\varsigma^2) + \text{noise}$, and the distribution of that variance.

    Attributes:
        ridge: The ridge $\varsigma^2$.
        scale: The scale $\alpha$, one entry per target.
        noise: The noise, with one level per target.
        distribution: The distribution around the mean.
        weight: The loss weight c of a row that has the noise's level, one entry per target: the
            harmonic mean over the calibration rows, or 1 where they had no weights.
        joint: $\alpha_B$, the scale of what predictions share with one another, one entry per
            target; None where it is that of single predictions, `scale`.
        head: The head of noise and tilt, where they follow the features. The distribution's squared
            scale is then $e^h$ plus a multiple of q, plus the guard's.
        guard: What widens the bars of a head beyond the training rows.
        support: The targets' bounds.
        conformal: What guarantees the coverage of intervals.
    """

    ridge: float
    scale: Tensor
    noise: Noise
    distribution: Distribution = field(default_factory=Gaussian)
    weight: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    joint: Tensor | None = None
    head: Head | None = None
    guard: Guard | None = None
    support: Support | None = None
    conformal: Conformal | None = None

    @classmethod
    def unscaled(
        cls, ridge: float, targets: int, device: torch.device | None = None
    ) -> Calibration:
        """The state before any calibration: scale 1, no noise, Gaussian."""
        ones = torch.ones(targets, dtype=torch.float64, device=device)
        return cls(ridge=ridge, scale=ones, noise=NoNoise(torch.zeros_like(ones)))

    @property
    def weighted(self) -> bool:
        """Whether there is noise whose level belongs to a loss weight other than one."""
        return bool(((self.weight != 1) & (self.noise.level > 0)).any())

    def epistemic(self, q: Tensor) -> Tensor:
        r"""$\alpha^2 q$ of rows (M, 1 or K)."""
        return self.scale.square().to(q) * q

    def noise_variance(
        self, mean: Tensor, features: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        r"""The noise variance of rows, level x shape x $\bar c / c$, (M, K).

        Args:
            mean: Predictions, (M, K).
            features: The rows' features, for a noise whose shape depends on them.
            weight: The rows' loss weights c. Rows without weights are taken to have the typical
                one, $\bar c$.
        """
        noise = self.noise.variance(mean, features)
        if weight is not None:
            noise = noise * self.weight / weight
        return noise.expand(mean.shape)

    def form(self, dtype: torch.dtype) -> HeadForm | None:
        """The head, guard and distribution folded, in that precision; None without a head."""
        if self.head is None:
            return None
        return HeadForm.of(self.head, self.guard, self.distribution, dtype)

    def with_functions(self, noise: NoiseFunction | None, groups: Groups | None) -> Calibration:
        """The calibration with the functions that a file cannot hold: of the noise, and of groups.

        Raises:
            ValueError: A function is given that this calibration does not use.
        """
        calibration = self
        if noise is not None:
            if not isinstance(self.noise, GivenNoise):
                raise ValueError(
                    f"The noise of this calibration is {self.noise.name!r}, not a function. Load "
                    "without noise=, or call calibrate(x, y, noise=function)."
                )
            calibration = replace(calibration, noise=replace(self.noise, function=noise))
        if groups is not None:
            conformal = self.conformal
            by_function = conformal is not None and conformal.cuts is None
            if conformal is None or not by_function or not len(conformal.labels):
                raise ValueError(
                    "This calibration has no groups that come from a function. Load without "
                    "groups=, or call calibrate(x, y, conformal=rows, groups=function)."
                )
            calibration = replace(calibration, conformal=replace(conformal, function=groups))
        return calibration

    def shaped(self, tilt: Tensor | None) -> Distribution:
        """The distribution of rows with this tilt, (M, K, J); unchanged without one."""
        if tilt is None:
            return self.distribution
        return self.distribution.each(lambda _: tilt)

    def to(self, device: torch.device) -> Calibration:
        """The same calibration on another device."""
        return replace(
            self,
            scale=self.scale.to(device),
            noise=replace(self.noise, level=self.noise.level.to(device)),
            weight=self.weight.to(device),
            joint=None if self.joint is None else self.joint.to(device),
            head=None if self.head is None else self.head.to(device),
            guard=None if self.guard is None else self.guard.to(device),
            conformal=None if self.conformal is None else self.conformal.to(device),
        )

    def header(self) -> dict[str, Any]:
        """Plain values for a file's header; `tensors` has the tensors.

        Raises:
            ValueError: The noise or the distribution is of a class that is not registered.
        """
        if NOISES.get(self.noise.name) is not type(self.noise):
            raise _unregistered("noise", self.noise)
        if DISTRIBUTIONS.get(self.distribution.name) is not type(self.distribution):
            raise _unregistered("distribution", self.distribution)
        header: dict[str, Any] = {
            "ridge": self.ridge,
            "noise": self.noise.name,
            "distribution": {
                "name": self.distribution.name,
                "settings": self.distribution.settings(),
            },
        }
        if self.weighted:
            header["weight"] = self.weight.tolist()
        if self.support is not None:
            header["support"] = list(self.support)
        return header

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a file; those of head, guard and conformal scores have prefixes."""
        tensors = {"scale": self.scale, "noise": self.noise.level}
        if self.joint is not None:
            tensors["joint"] = self.joint
        for prefix in ("head", "guard", "conformal"):
            component = getattr(self, prefix)
            if component is None:
                continue
            for name, tensor in component.tensors().items():
                tensors[f"{prefix}.{name}"] = tensor
        return tensors

    @classmethod
    def from_state(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration:
        """The calibration that `header` and `tensors` came from.

        Raises:
            ValueError: The noise or the distribution is not known here.
        """
        noise_name = header["noise"]
        distribution_name = header["distribution"]["name"]
        if noise_name not in NOISES:
            raise _unknown("noise", noise_name, NOISES)
        if distribution_name not in DISTRIBUTIONS:
            raise _unknown("distribution", distribution_name, DISTRIBUTIONS)
        try:
            settings = header["distribution"]["settings"]
            distribution = DISTRIBUTIONS[distribution_name](**settings)
        except TypeError as error:
            raise ValueError(
                f"The distribution {distribution_name!r} has other settings here: {error}."
            ) from error
        level = tensors["noise"]
        head = without_prefix("head", tensors)
        conformal: dict[str, Any] = without_prefix("conformal", tensors)
        return cls(
            ridge=header["ridge"],
            scale=tensors["scale"],
            noise=NOISES[noise_name](level),
            distribution=distribution,
            weight=level.new_tensor(header.get("weight", 1.0)),
            joint=tensors.get("joint"),
            head=Head(**head) if head else None,
            guard=guard_from(without_prefix("guard", tensors)),
            support=_checked_support(header.get("support")),
            conformal=Conformal(**conformal) if conformal else None,
        )


def without_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix and a dot, by the rest of their names."""
    start = f"{prefix}."
    return {
        name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)
    }


def _unregistered(kind: str, component: object) -> ValueError:
    """The refusal to write a noise or a distribution that reading could not find again."""
    return ValueError(
        f"A file cannot store the {kind} {type(component).__name__}. Give the class its own name "
        f"and register it (register_{kind})."
    )


def _unknown(kind: str, name: str, registered: dict[str, Any]) -> ValueError:
    """The refusal to read a noise or a distribution that is not registered here."""
    return ValueError(
        f"The {kind} {name!r} of this file is not known here, only {', '.join(registered)}. If it "
        f"is your own, register it first (register_{kind})."
    )
