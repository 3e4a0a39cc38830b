r"""What a calibration has chosen.

`Calibration` holds the ridge $\varsigma^2$, the scale $\alpha$, the noise and the distribution
around the mean. Predictions, files and reports read the outcome of a calibration from it alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..prediction.distribution import DISTRIBUTIONS, Distribution, Gaussian
from ..prediction.guards import Guard, guard_from
from ..prediction.head import FoldedGuard, Head, HeadForm, head_from
from ..prediction.mixture import Mixture
from ..prediction.noise import NOISES, GivenNoise, Noise, NoNoise
from ..prediction.prediction import Prediction
from .conformal import Conformal, Groups, bar_cuts
from .methods import NoiseFunction, Support, checked_support
from .rows import Curvature, Rows

__all__ = ["Calibration", "conformalized"]


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
        head: The density head, which gives each row's variance and distribution; `distribution` is
            then that of a usual row.
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
        """The head and guard folded, in that precision; None without a head."""
        if self.head is None:
            return None
        return HeadForm.of(self.head, self.guard, dtype)

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
                    "without noise=, or call calibrate(x, y, method=Full(noise=function))."
                )
            calibration = replace(calibration, noise=replace(self.noise, function=noise))
        if groups is not None:
            conformal = self.conformal
            by_function = conformal is not None and conformal.cuts is None
            if conformal is None or not by_function or not len(conformal.labels):
                raise ValueError(
                    "This calibration has no groups that come from a function. Load without "
                    "groups=, or call conformalize(x, y, groups=function)."
                )
            calibration = replace(calibration, conformal=replace(conformal, function=groups))
        return calibration

    def prediction(self, rows: Rows, eigenvalues: Tensor) -> Prediction:
        """Rows of a calibration with their error bars, in the layout of rows (n, K), float64.

        Args:
            rows: The rows, with "inputs" where there is a head. Rows that the fit has seen are
                treated as left out.
            eigenvalues: Those of the Gram, (D,) or (K, D).
        """
        q = rows.quadratic_at(eigenvalues, self.ridge)
        if rows.trained:
            q = q / (1 - rows.weight * q).clamp(min=1e-3)
        mean = rows.mean.to(torch.float64)
        # Noise is that of rows with the calibration's weight. The errors of rows of weight zero
        # are not known, and their noise does not matter.
        factor = rows.noise_factor * self.weight / rows.typical_weight
        factor = torch.where(factor.isfinite(), factor, 1.0)
        if self.head is None:
            distribution = self.distribution
            epistemic = self.epistemic(q).expand(mean.shape)
            noise = self.noise.level * factor
        else:
            inputs = q.new_zeros(len(q), 0)
            if rows.inputs is not None:
                inputs = rows.inputs.to(torch.float64)
                inputs = inputs[:, 0] if rows.shares_inputs else inputs
            if isinstance(self.noise, GivenNoise):
                factor = self.head.forecast.over_extent(factor, inputs)
            novelty = None
            usual = None if self.guard is None else self.guard.distances
            if usual is not None and rows.distances is not None:
                novelty = (rows.distances / usual).amax(1, keepdim=True)
            epistemic, noise, distribution = self.by_head(q, mean, inputs, factor, novelty)
        return Prediction(
            mean,
            epistemic.expand(mean.shape),
            noise.expand(mean.shape),
            (1 / q).expand(mean.shape),
            distribution=distribution,
            support=self.support,
        )

    def by_head(
        self,
        q: Tensor,
        mean: Tensor,
        inputs: Tensor,
        factor: Tensor | None = None,
        novelty: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Distribution]:
        r"""Epistemic and noise variance (n, K) of rows and their distributions, by the head.

        The head gives their sum. $\alpha^2 q$ is the epistemic part, or all of it where that is
        less. All are in float64.

        Args:
            q: Unscaled variances, (n, 1 or K).
            mean: Predictions, (n, K).
            inputs: The features that the head looks at, (n, P) or (n, K, P).
            factor: Factor of each row's noise, (n, 1 or K); None for one.
            novelty: Novelty of the rows, (n, 1), if it is known.

        Returns:
            The epistemic variance and that of the noise, (n, K) each, and the distributions.
        """
        form = self.form(torch.float64)
        assert form is not None, "this calibration has no head"
        moment, shape = form(q, mean, inputs, factor, novelty)
        epistemic = torch.minimum(self.epistemic(q), moment)
        return epistemic, moment - epistemic, Mixture.of_shape(shape)

    def usual_std(self, times: float) -> Tensor:
        """The bar (K,) of a usual prediction whose q is `times` the guard's reference.

        It has the usual noise, and the prediction is the targets' mean. There must be a guard.
        """
        assert self.guard is not None
        assert self.head is not None, "a guard belongs to a head"
        q = times * self.guard.reference
        second = torch.as_tensor(self.distribution.second).to(q)
        moment = (self.noise.level + self.head.scale2 * q * second)[:, None]
        guard = FoldedGuard.of(self.guard)
        familiarity = guard.familiarity(q[:, None].log(), None)
        return guard.widened(moment, familiarity, torch.zeros_like(moment))[:, 0].sqrt()

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
            head=head_from(head) if head else None,
            guard=guard_from(without_prefix("guard", tensors)),
            support=checked_support(header.get("support")),
            conformal=Conformal(**conformal) if conformal else None,
        )


def conformalized(
    calibration: Calibration,
    rows: Rows,
    posterior: Curvature,
    groups: str | Groups | None = None,
    training: Rows | None = None,
) -> Calibration:
    """The calibration with conformal scores of rows that fitted nothing else.

    Args:
        calibration: What was chosen on other rows.
        rows: The rows, with labels where groups are a function.
        posterior: Its eigenvalues belong to the basis of the rows' powers.
        groups: A function that labels batches, "bar" for fifths of the training rows' bars, or None
            for no groups.
        training: Training rows, for groups by the bar.

    Raises:
        ValueError: No target is known, a prediction is not finite, or there are no training rows
            for groups by the bar.
    """
    eigenvalues = posterior.eigenvalues
    cuts = None
    if groups == "bar":
        std = None if training is None else calibration.prediction(training, eigenvalues).std
        cuts = bar_cuts(std)
    prediction = calibration.prediction(rows, eigenvalues)
    targets = None
    if rows.outputs > 1:  # each output of a sample has lists of its own
        targets = (rows.number % rows.outputs)[:, None]
    conformal = Conformal.of(
        prediction,
        prediction.mean + rows.error,
        targets=targets,
        labels=rows.labels,
        cuts=cuts,
        function=groups if callable(groups) else None,
    )
    return replace(calibration, conformal=conformal)


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
