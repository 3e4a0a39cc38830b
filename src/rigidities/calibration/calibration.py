r"""What a calibration is asked, and what it chooses as everything after it uses it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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

Support = tuple[float | None, float | None]
Given = Callable[[Any], Tensor]
_DEFAULTS = {True: ("features", "tilted"), False: ("none", "gaussian")}
"""Noise and distribution of `criterion="auto"`, and of the others: the paper's form."""


@dataclass(frozen=True)
class Wanted:
    """What a user asks of a calibration.

    Attributes:
        criterion: by name.
        noise: its kind.
        distribution: around the mean.
        ridge: fixed; None searches.
        given: variances of each batch's rows, for a noise that is known.
        support: the targets' bounds.
        guard: whether bars are widened beyond the training rows, or "q"; for `auto`.
        optimism: whether left-out training rows may have smaller errors than new ones; for `auto`.
        open_tails: whether the distribution is a Student-t whose degrees of freedom are to be
            found.
        early_stopped: whether the validation rows chose the model's checkpoint; None if unknown.
    """

    criterion: str
    noise: type[Noise]
    distribution: Distribution
    ridge: float | None = None
    given: Given | None = None
    support: Support | None = None
    guard: bool | Literal["q"] = True
    optimism: bool = True
    open_tails: bool = False
    early_stopped: bool | None = None

    @classmethod
    def of(
        cls,
        criterion: str,
        noise: str | type[Noise] | Noise | Given | None = None,
        distribution: str | Distribution | type[Distribution] | None = None,
        ridge: float | str | None = None,
        support: Support | None = None,
        guard: bool | Literal["q"] = True,
        optimism: bool = True,
        early_stopped: bool | None = None,
    ) -> Wanted:
        """From names; None is the criterion's own, a ridge None or "search" is to be searched.

        Raises:
            ValueError: a name is not known, or the criterion does not fit the distribution or
                noise.
        """
        own = _DEFAULTS[criterion == AUTO]
        noise, distribution = (
            own[0] if noise is None else noise,
            own[1] if distribution is None else distribution,
        )
        if isinstance(ridge, str) and ridge != "search":
            raise ValueError(f"ridge must be None, 'search' or a number, got {ridge!r}.")
        if not isinstance(guard, bool) and guard != "q":
            raise ValueError(
                f"guard must be True, False or 'q' (bars that grow with q alone), got {guard!r}."
            )
        number = None if ridge is None or isinstance(ridge, str) else float(ridge)
        kind = noise_named(noise)
        given: Any = noise.function if isinstance(noise, GivenNoise) else noise
        given = given if kind is GivenNoise else None
        if kind is GivenNoise and (not callable(given) or isinstance(given, type)):
            raise ValueError("A given noise is a function: noise=lambda batch: variances.")
        tails = distribution in ("student-t", StudentT)
        if criterion == AUTO and isinstance(distribution, StudentT | Tilted):
            raise ValueError(
                f"criterion='auto' finds the distribution's settings itself, got {distribution.name!r} with its own: "
                f"pass distribution={distribution.name!r}, or take criterion='nll'."
            )
        parts = (number, given, _support(support), guard, optimism, tails, early_stopped)
        wanted = cls(criterion, kind, distribution_named(distribution), *parts)
        criterion_for(criterion, wanted.distribution, kind.name)
        return wanted

    @property
    def profile(self) -> Criterion:
        """The criterion as a function of residuals and spreads."""
        return criterion_for(self.criterion, self.distribution)

    @property
    def stopping(self) -> str:
        """What early stopping on the validation rows means, or whether there was any.

        Empty where there was none.
        """
        if self.early_stopped is False:
            return ""
        effect = "90 % intervals may hold up to three per cent too little"
        if self.early_stopped:
            return (
                "These validation rows chose the checkpoint (early stopping), so that their errors "
                f"are optimistic: {effect}. Calibrate on rows that chose nothing."
            )
        return (
            "Did these validation rows choose the checkpoint (early stopping)? Then their errors "
            f"are optimistic, and {effect}. Answer by calibrate(..., early_stopped=False) or True."
        )

    @property
    def left_out(self) -> bool:
        """Whether every row is treated as left out of the fit."""
        return self.criterion == "loo"


def _support(given: Any) -> Support | None:
    """Two bounds, None or a number, the lower below the upper."""
    if given is None:
        return None
    fits = isinstance(given, tuple | list) and len(given) == 2
    low, high = (None if b is None else float(b) for b in given) if fits else (math.nan, 0.0)
    if not (-math.inf if low is None else low) < (math.inf if high is None else high):
        raise ValueError(
            f"support must be (low, high) with low below high, None for no bound, got {given!r}."
        )
    return None if low is None and high is None else (low, high)


def under(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part."""
    return {key[len(name) + 1 :]: t for key, t in tensors.items() if key.startswith(f"{name}.")}


@dataclass(frozen=True)
class Calibration:
    r"""$\sigma^2 = \alpha^2 q(\varsigma^2) + \text{noise}$, and the distribution of that variance.

    Attributes:
        ridge: $\varsigma^2$.
        scale: $\alpha$, one entry per target.
        noise: with one level per target.
        distribution: around the mean.
        weight: the loss weight c of a row that has this level: the typical one (harmonic mean) of
            the calibration rows, one entry per target; 1 where they had no weights.
        joint: $\alpha_B$, the scale of what predictions share with one another, one entry per
            target; None where it is that of single predictions, `scale`.
        head: of noise and tilt, where they follow the features; the distribution's squared scale is
            then $e^h$ plus a multiple of q, plus the guard's.
        guard: beyond the training rows, for a head.
        support: the targets' bounds.
        conformal: what guarantees intervals' coverage.
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
        """Before any calibration: scale 1, no noise, Gaussian."""
        one = torch.ones(targets, dtype=torch.float64, device=device)
        return cls(ridge, one, NoNoise(torch.zeros_like(one)))

    @property
    def weighted(self) -> bool:
        """Whether there is noise, whose level is that of rows of another weight than one."""
        return bool(((self.weight != 1) & (self.noise.level > 0)).any())

    def epistemic(self, q: Tensor) -> Tensor:
        r"""$\alpha^2 q$ of rows (M, 1 or K)."""
        return self.scale.square().to(q) * q

    def noise_variance(
        self, mean: Tensor, features: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        r"""Of rows whose predictions are (M, K), level x shape x $\bar c / c$: (M, K).

        Rows without weights c are taken to have the typical one $\bar c$.
        """
        noise = self.noise.variance(mean, features)
        return (noise if weight is None else noise * self.weight / weight).expand(mean.shape)

    def form(self, dtype: torch.dtype) -> HeadForm | None:
        """The head folded with its guard and distribution, in that precision; None without a
        head.
        """
        if self.head is None:
            return None
        return HeadForm.of(self.head, self.guard, self.distribution, dtype)

    def with_functions(self, noise: Given | None, groups: Groups | None) -> Calibration:
        """With those again that a file does not hold; refused where none belongs to it."""
        own = self
        if noise is not None:
            if not isinstance(own.noise, GivenNoise):
                raise ValueError(
                    f"The noise of this calibration is {own.noise.name!r}, no function: load "
                    "without noise=, or call calibrate(x, y, noise=function)."
                )
            own = replace(own, noise=replace(own.noise, function=noise))
        if groups is not None:
            scores = own.conformal
            if scores is None or scores.cuts is not None or not len(scores.labels):
                raise ValueError(
                    "This calibration has no groups by a function: load without groups=, or call "
                    "calibrate(x, y, conformal=rows, groups=function)."
                )
            own = replace(own, conformal=replace(scores, function=groups))
        return own

    def shaped(self, tilt: Tensor) -> Distribution:
        """The distribution of rows with this tilt, (M, K, J); without entries, the distribution
        itself.
        """
        return self.distribution.each(lambda _: tilt) if tilt.shape[-1] else self.distribution

    def to(self, device: torch.device) -> Calibration:
        """The same on another device."""
        noise = replace(self.noise, level=self.noise.level.to(device))
        parts = ("scale", "weight", "joint", "head", "guard", "conformal")
        held = {name: part for name in parts if (part := getattr(self, name)) is not None}
        return replace(self, noise=noise, **{name: part.to(device) for name, part in held.items()})

    def header(self) -> dict[str, Any]:
        """Plain values for a file's header; the tensors go by `tensors`."""
        for what, part, known in (
            ("noise", self.noise, NOISES),
            ("distribution", self.distribution, DISTRIBUTIONS),
        ):
            if known.get(part.name) is not type(part):
                raise ValueError(
                    f"Files do not know the {what} {type(part).__name__}: give the class a name of "
                    f"its own and register it (register_{what})."
                )
        distribution = {"name": self.distribution.name, "settings": self.distribution.settings()}
        weight = {"weight": self.weight.tolist()} if self.weighted else {}
        bounds = {} if self.support is None else {"support": list(self.support)}
        return {
            "ridge": self.ridge,
            "noise": self.noise.name,
            "distribution": distribution,
            **weight,
            **bounds,
        }

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a file."""
        found = {"scale": self.scale, "noise": self.noise.level}
        found |= {} if self.joint is None else {"joint": self.joint}
        for name in ("head", "guard", "conformal"):
            part = getattr(self, name)
            own = {} if part is None else part.tensors()
            found |= {f"{name}.{key}": tensor for key, tensor in own.items()}
        return found

    @classmethod
    def from_state(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration:
        """The calibration that `header` and `tensors` came from.

        Raises:
            ValueError: the noise or distribution is none that is known here.
        """
        noise, distribution = header["noise"], header["distribution"]["name"]
        for what, name, registered in (
            ("noise", noise, NOISES),
            ("distribution", distribution, DISTRIBUTIONS),
        ):
            if name not in registered:
                raise ValueError(
                    f"The {what} {name!r} of this file is not known here, only "
                    f"{', '.join(registered)}. Where it is your own, register it first "
                    f"(register_{what})."
                )
        try:
            shape = DISTRIBUTIONS[distribution](**header["distribution"]["settings"])
        except TypeError as error:
            raise ValueError(
                f"The distribution {distribution!r} has other settings here: {error}."
            ) from error
        head = under("head", tensors)
        scores: dict[str, Any] = under("conformal", tensors)
        level = tensors["noise"]
        return cls(
            ridge=header["ridge"],
            scale=tensors["scale"],
            noise=NOISES[noise](level),
            distribution=shape,
            weight=level.new_tensor(header.get("weight", 1.0)),
            joint=tensors.get("joint"),
            head=Head(**head) if head else None,
            guard=guard_from(under("guard", tensors)),
            support=_support(header.get("support")),
            conformal=Conformal(**scores) if scores else None,
        )
