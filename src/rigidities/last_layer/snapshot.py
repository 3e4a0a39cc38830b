"""A fit and its calibration as tensors and a JSON header: for files and state dicts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._version import __version__
from ..calibration.report import CalibrationReport
from ..data.sketch import RowSketch
from ..data.storage import prefixed, unprefixed
from ..losses import MSE, Huber, LogCosh, Loss, PoissonNLL
from ..posterior.gram import Gram
from .accumulation import Statistics, Weighing
from .gradients.loss import GradientLoss

_LOSSES: dict[str, type[Any]] = {c.__name__: c for c in (MSE, Huber, LogCosh, PoissonNLL)}


@dataclass(frozen=True)
class Snapshot:
    """Everything but the model."""

    tensors: dict[str, Tensor]
    header: dict[str, Any]

    @classmethod
    def of(
        cls,
        statistics: Statistics,
        readout: dict[str, Any],
        weighing: Weighing | None,
        report: CalibrationReport | None,
    ) -> Snapshot:
        """Take one."""
        tensors = prefixed("gram", statistics.gram.state())
        tensors |= prefixed("sketch", statistics.sketch.state())
        header = {
            "library": __version__,
            "readout": readout,
            "targets": statistics.targets,
            "inputs": statistics.inputs,
            "loss": _loss_state(weighing),
            "calibration": None if report is None else report.header(),
        }
        if report is not None:
            tensors |= prefixed("calibration", report.tensors())
        return cls(tensors, header)

    def parts(self) -> tuple[Statistics, Weighing | None, CalibrationReport | None]:
        """The way back; no weighing where the loss or weights were functions."""
        try:
            return self._parts()
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"The fit is incomplete: {error} is missing or wrong. Save it again from the "
                "fitted object."
            ) from error

    def _parts(self) -> tuple[Statistics, Weighing | None, CalibrationReport | None]:
        gram = Gram.from_state(unprefixed("gram", self.tensors))
        sketch = RowSketch.from_state(unprefixed("sketch", self.tensors))
        header = self.header
        statistics = Statistics(gram, sketch, header["targets"], header["inputs"])
        report = None
        if header["calibration"] is not None:
            tensors = unprefixed("calibration", self.tensors)
            report = CalibrationReport.from_state(header["calibration"], tensors)
        return statistics, _loss_from(header["loss"]), report

    def state(self) -> dict[str, Any]:
        """As plain values and tensors, which `torch.load(weights_only=True)` accepts."""
        return {"tensors": self.tensors, "header": json.dumps(self.header)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Snapshot:
        """The snapshot that `state` came from."""
        return cls(state["tensors"], json.loads(state["header"]))


def _loss_state(weighing: Weighing | None) -> dict[str, Any] | None:
    """Name and settings of a loss that a file can hold."""
    if weighing is None:
        return None
    name, gradients = type(weighing.loss).__name__, weighing.gradients
    if weighing.sample_weight is not None or name not in _LOSSES:
        return None
    if gradients is not None and any(callable(value) for value in vars(gradients).values()):
        return None
    state = {"name": name, "settings": vars(weighing.loss)}
    return state if gradients is None else {**state, "gradients": vars(gradients)}


def _loss_from(state: dict[str, Any] | None) -> Weighing | None:
    if state is None:
        return None
    loss: Loss = _LOSSES[state["name"]](**state["settings"])
    gradients = state.get("gradients")
    return Weighing(loss, gradients=None if gradients is None else GradientLoss(**gradients))
