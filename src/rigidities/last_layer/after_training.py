"""Error bars of a model that is yet to be trained: what trainers' callbacks share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..notices import NO_FIT, NotFittedError
from .rigidity import LastLayerRigidity


class AfterTraining:
    """What to do once a model is trained, checked before, and what came of it.

    Args:
        valid: data to calibrate on instead of the trainer's.
        fit: options of `LastLayerRigidity.fit`.
        calibrate: options of `LastLayerRigidity.calibrate`; None for no calibration.
        options: of `LastLayerRigidity`: `layer`, `features`, `forward`, `target`, `output`.
    """

    def __init__(
        self,
        valid: Any = None,
        fit: Mapping[str, Any] = {},
        calibrate: Mapping[str, Any] | None = {},
        **options: Any,
    ) -> None:
        self.valid, self.options, self.fitting, self.calibrating = valid, options, fit, calibrate
        inspect.signature(LastLayerRigidity).bind(None, **options)  # a TypeError names the option
        inspect.signature(LastLayerRigidity.fit).bind(None, None, **fit)
        inspect.signature(LastLayerRigidity.calibrate).bind(None, None, **(calibrate or {}))
        self._uq: LastLayerRigidity | None = None

    @property
    def uq(self) -> LastLayerRigidity:
        """The error bars of the trained model."""
        if self._uq is None:
            raise NotFittedError(NO_FIT.format("the trainer, in this process,"))
        return self._uq

    def make(self, model: nn.Module, train: Any, valid: Any, trial: bool = False) -> None:
        """Fit and, if that is wanted and this no trial, calibrate; an error changes nothing."""
        uq = LastLayerRigidity(model, **self.options).fit(train, **self.fitting)
        if self.calibrating is not None and not trial:
            uq.calibrate(valid, **self.calibrating)
        self._uq = uq
