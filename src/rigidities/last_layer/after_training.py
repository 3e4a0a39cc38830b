"""Error bars that are fitted when training ends: what the callbacks of trainers share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..calibration.methods import method_for
from ..notices import NO_FIT, NotFittedError
from .rigidity import LastLayerRigidity

__all__ = ["AfterTraining"]


class AfterTraining:
    """Fit and calibrate once a model is trained.

    The options are checked before the training begins.

    Args:
        valid: Data to calibrate on instead of the trainer's.
        fit: Options of `LastLayerRigidity.fit`.
        calibrate: Options of `LastLayerRigidity.calibrate`; None for no calibration.
        options: Options of `LastLayerRigidity`: `layer`, `features`, `forward`, `target`, `output`.

    Raises:
        TypeError: An option is unknown.
        ValueError: There is no such method of calibration.
    """

    def __init__(
        self,
        valid: Any = None,
        fit: Mapping[str, Any] = {},
        calibrate: Mapping[str, Any] | None = {},
        **options: Any,
    ) -> None:
        self.valid = valid
        self.options = options
        self.fitting = fit
        self.calibrating = calibrate
        # Binding the options to the signatures raises a TypeError that names an unknown one.
        inspect.signature(LastLayerRigidity).bind(None, **options)
        inspect.signature(LastLayerRigidity.fit).bind(None, None, **fit)
        inspect.signature(LastLayerRigidity.calibrate).bind(None, None, **(calibrate or {}))
        method_for((calibrate or {}).get("method", "full"))
        self._uq: LastLayerRigidity | None = None

    @property
    def uq(self) -> LastLayerRigidity:
        """The error bars of the trained model.

        Raises:
            NotFittedError: The training has not ended in this process.
        """
        if self._uq is None:
            raise NotFittedError(NO_FIT.format("the trainer, in this process,"))
        return self._uq

    def make(self, model: nn.Module, train: Any, valid: Any, trial: bool = False) -> None:
        """Fit, and calibrate if requested. An error changes nothing.

        Args:
            model: The trained model.
            train: The training data.
            valid: The data to calibrate on.
            trial: Whether this is a trial run, which fits and does not calibrate.
        """
        uq = LastLayerRigidity(model, **self.options).fit(train, **self.fitting)
        if self.calibrating is not None and not trial:
            uq.calibrate(valid, **self.calibrating)
        self._uq = uq
