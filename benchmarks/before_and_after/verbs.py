"""What the cases do with the library, in two spellings: the code before a redesign, and after it.

The cases are written once, with the verbs of this module. A verb has a spelling in both classes
where the two states differ; a call that is the same in both is made by the cases directly. To
correct a signature, correct it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import rigidities as rg


@dataclass(frozen=True)
class Method:
    """A method of calibration: "full" or "paper", with the options that are not defaults."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


def full(**options: Any) -> Method:
    """The default: a distribution by input, and a guard."""
    return Method("full", options)


def paper(**options: Any) -> Method:
    """The paper's form by one criterion, by default "nll"."""
    return Method("paper", options)


@dataclass(frozen=True)
class Derivatives:
    """Derivatives in the training loss: by which input, with which weight and which targets."""

    wrt: str | int
    weight: float | Callable[[Any], Tensor] = 1.0
    target: str | Callable[[Any], Tensor] | None = None


@dataclass(frozen=True)
class FitOptions:
    """How a problem is fitted, where it differs from the defaults."""

    loss: Any = "mse"
    sample_weight: Callable[[Any], Tensor] | None = None
    derivatives: Derivatives | None = None
    keep_rows: int = 8192
    novelty: bool = False
    precision: str = "auto"

    @property
    def has_functions(self) -> bool:
        """Whether a file of the fit lacks something, because it cannot contain functions."""
        functions = [self.loss, self.sample_weight]
        if self.derivatives is not None:
            functions += [self.derivatives.weight, self.derivatives.target]
        return any(callable(function) for function in functions)


class VerbsBefore:
    """The verbs in the signatures before the redesign."""

    name = "before"
    kernels = getattr(rg, "kernels", None)
    closed_forms = getattr(rg, "closed_forms", None)

    def fit(self, uq: Any, data: Any, options: FitOptions) -> Any:
        return uq.fit(
            data,
            loss=options.loss,
            sample_weight=options.sample_weight,
            sample=options.keep_rows,
            novelty=options.novelty,
            precision=options.precision,
            **_gradient_arguments(options.derivatives),
        )

    def calibrate(
        self,
        uq: Any,
        data: Any,
        method: Method,
        *,
        train: Any = None,
        conformal: Any = None,
        groups: Any = None,
    ) -> None:
        criterion = "auto" if method.name == "full" else "nll"
        arguments = {"criterion": criterion} | method.options
        uq.calibrate(data, train=train, conformal=conformal, groups=groups, **arguments)

    def calibrate_regressor(self, regressor: Any, data: Any, method: Method) -> None:
        regressor.calibrate(data, **method.options)

    def gradient_scale(self, uq: Any) -> Tensor:
        return uq.gradient_scale

    def interval(self, prediction: Any, level: float) -> tuple[Tensor, Tensor]:
        return prediction.interval(level)

    def conformal_interval(self, prediction: Any, level: float) -> tuple[Tensor, Tensor]:
        return prediction.interval(level, conformal=True)

    def ensemble(self, uq: Any, n: int, generator: Any) -> Any:
        return uq.ensemble(n, generator=generator, recentred=True)

    def load(self, path: Path, model: nn.Module, options: FitOptions, **functions: Any) -> Any:
        uq = rg.LastLayerRigidity.load(path, model, **functions)
        if options.has_functions:
            arguments = _gradient_arguments(options.derivatives)
            uq.set_loss(options.loss, options.sample_weight, **arguments)
        return uq

    def constrained_rigidity(self, *arguments: Any) -> Any:
        return rg.constrained_rigidity(*arguments)


class VerbsAfter:
    """The verbs in the signatures after the redesign."""

    name = "after"

    @property
    def kernels(self) -> Any:
        return rg.theory.kernels

    @property
    def closed_forms(self) -> Any:
        return rg.theory.closed_forms

    def fit(self, uq: Any, data: Any, options: FitOptions) -> Any:
        return uq.fit(
            data,
            loss=options.loss,
            sample_weight=options.sample_weight,
            gradient_loss=_gradient_loss(options.derivatives),
            keep_rows=options.keep_rows,
            novelty=options.novelty,
            precision=options.precision,
        )

    def calibrate(
        self,
        uq: Any,
        data: Any,
        method: Method,
        *,
        train: Any = None,
        conformal: Any = None,
        groups: Any = None,
    ) -> None:
        uq.calibrate(data, method=_method(method), train=train)
        if conformal is not None:
            uq.conformalize(conformal, groups=groups)

    def calibrate_regressor(self, regressor: Any, data: Any, method: Method) -> None:
        regressor.calibrate(data, method=_method(method))

    def gradient_scale(self, uq: Any) -> Tensor:
        return uq.calibration_report.gradient_scale

    def interval(self, prediction: Any, level: float) -> tuple[Tensor, Tensor]:
        return prediction.interval(level, conformal=False)

    def conformal_interval(self, prediction: Any, level: float) -> tuple[Tensor, Tensor]:
        return prediction.interval(level)

    def ensemble(self, uq: Any, n: int, generator: Any) -> Any:
        return uq.ensemble(n, generator=generator)

    def load(self, path: Path, model: nn.Module, options: FitOptions, **functions: Any) -> Any:
        if not options.has_functions:
            return rg.LastLayerRigidity.load(path, model, **functions)
        return rg.LastLayerRigidity.load(
            path,
            model,
            loss=options.loss,
            sample_weight=options.sample_weight,
            gradient_loss=_gradient_loss(options.derivatives),
            **functions,
        )

    def constrained_rigidity(self, *arguments: Any) -> Any:
        return rg.theory.constrained_rigidity(*arguments)


Verbs = VerbsBefore | VerbsAfter


def verbs() -> Verbs:
    """The verbs of the library that is imported."""
    if hasattr(rg, "Full"):
        return VerbsAfter()
    return VerbsBefore()


def _gradient_arguments(derivatives: Derivatives | None) -> dict[str, Any]:
    """Derivatives in the loss as arguments of `fit` and `set_loss`, before the redesign."""
    if derivatives is None:
        return {}
    return {
        "gradients": derivatives.wrt,
        "gradient_weight": derivatives.weight,
        "gradient_target": derivatives.target,
    }


def _gradient_loss(derivatives: Derivatives | None) -> Any:
    """Derivatives in the loss as an object, after the redesign."""
    if derivatives is None:
        return None
    return rg.GradientLoss(derivatives.wrt, weight=derivatives.weight, target=derivatives.target)


def _method(method: Method) -> Any:
    """A method of calibration as an object, after the redesign."""
    if method.name == "full":
        return rg.Full(**method.options)
    return rg.Paper(**method.options)
