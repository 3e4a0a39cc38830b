r"""What a calibration is asked, and what it chooses as everything after it uses it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..notices import require, require_kinds
from ..prediction.law import LAWS, Gaussian, Law, law_named
from ..prediction.noise import NOISES, Noise, NoNoise, noise_named
from .criteria import Criterion, criterion_for


@dataclass(frozen=True)
class Wanted:
    """What a user asks of a calibration.

    Attributes:
        criterion: by name.
        noise: its kind.
        law: around the mean.
        ridge: fixed; None searches.
    """

    criterion: str
    noise: type[Noise]
    law: Law
    ridge: float | None = None

    @classmethod
    def of(
        cls,
        criterion: str,
        noise: str | type[Noise] | Noise,
        law: str | Law | type[Law],
        ridge: float | str | None,
    ) -> Wanted:
        """From names; a ridge None or "search" is to be searched.

        Raises:
            ValueError: a name is not known, or the criterion does not fit the law.
        """
        if isinstance(ridge, str) and ridge != "search":
            raise ValueError(f"ridge must be None, 'search' or a number, got {ridge!r}.")
        number = None if ridge is None or isinstance(ridge, str) else float(ridge)
        wanted = cls(criterion, noise_named(noise), law_named(law), number)
        criterion_for(criterion, wanted.law)
        return wanted

    @property
    def profile(self) -> Criterion:
        """The criterion as a function of residuals and spreads."""
        return criterion_for(self.criterion, self.law)

    @property
    def left_out(self) -> bool:
        """Whether every row is treated as left out of the fit."""
        return self.criterion == "loo"


def require_known(others: set[str]) -> None:
    """Refuse a header that holds what this version does not know."""
    if others:
        listed = ", ".join(sorted(others))
        raise ValueError(f"The calibration holds {listed}, which this version does not know.")


def require_levels(tensor: Tensor, what: str) -> None:
    """Refuse what is not one finite number for each target, none negative."""
    sound = tensor.dtype == torch.float64 and tensor.ndim == 1 and len(tensor) > 0
    require(sound and bool(((tensor >= 0) & (tensor < math.inf)).all()), what)


@dataclass(frozen=True)
class Calibration:
    r"""$\sigma^2 = \alpha^2 q(\varsigma^2) + \text{noise}$, and the law of that variance.

    Attributes:
        ridge: $\varsigma^2$.
        scale: $\alpha$, one entry per target.
        noise: with one level per target.
        law: around the mean.
        weight: the loss weight c of a row that has this level: the typical one (harmonic mean) of
            the calibration rows, one entry per target; 1 where they had no weights.
    """

    ridge: float
    scale: Tensor
    noise: Noise
    law: Law = field(default_factory=Gaussian)
    weight: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))

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

    def to(self, device: torch.device) -> Calibration:
        """The same on another device."""
        noise = replace(self.noise, level=self.noise.level.to(device))
        weight = self.weight.to(device)
        return replace(self, scale=self.scale.to(device), noise=noise, weight=weight)

    def header(self) -> dict[str, Any]:
        """Plain values for a file's header; the tensors go by `tensors`."""
        for what, part, known in (("noise", self.noise, NOISES), ("law", self.law, LAWS)):
            if known.get(part.name) is not type(part):
                raise ValueError(
                    f"Files do not know the {what} {type(part).__name__}: give the class a name of "
                    f"its own and register it (register_{what})."
                )
        law = {"name": self.law.name, "settings": self.law.settings()}
        weight = {"weight": self.weight.tolist()} if self.weighted else {}
        return {"ridge": self.ridge, "noise": self.noise.name, "law": law, **weight}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a file."""
        return {"scale": self.scale, "noise": self.noise.level}

    @classmethod
    def from_state(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration:
        """The calibration that `header` and `tensors` came from.

        A file of the first format names neither noise nor law: it knew constant noise and the
        Gaussian law alone.

        Raises:
            ValueError: the noise or law is none that is known here, or a number is impossible.
        """
        require_kinds(header, {"ridge": float}, "the calibration")
        require(0 <= header["ridge"] < math.inf, "the calibration's ridge")
        scale, level = tensors["scale"], tensors["noise"]
        require_levels(scale, "the calibration's scale")
        require_levels(level, "the calibration's noise")
        require(level.shape == scale.shape, "the calibration's noise")
        noise = header.get("noise", "constant" if bool(level.any()) else "none")
        law = header.get("law", {"name": "gaussian", "settings": {}})
        for what, name, known in (("noise", noise, NOISES), ("law", law["name"], LAWS)):
            if name not in known:
                raise ValueError(
                    f"The {what} {name!r} of this file is not known here, only {', '.join(known)}. "
                    f"Where it is your own, register it first (register_{what})."
                )
        try:
            kept = LAWS[law["name"]](**law["settings"])
        except TypeError as error:
            raise ValueError(f"The law has other settings here: {error}.") from error
        weight = level.new_tensor(header.get("weight", 1.0))
        require(bool(((weight > 0) & (weight < math.inf)).all()), "the calibration's weight")
        return cls(header["ridge"], scale, NOISES[noise](level), kept, weight)

    @classmethod
    def alone(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration:
        """The same of a header that holds nothing else."""
        found = cls.from_state(header, tensors)
        require_known(set(header) - set(found.header()))
        return found
