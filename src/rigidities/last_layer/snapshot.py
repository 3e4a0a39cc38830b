"""A fit and its calibration as tensors and a JSON header: for files and state dicts."""

from __future__ import annotations

from typing import Any

from .._version import __version__
from ..calibration.report import CalibrationReport
from ..data.sketch import RowSketch
from ..data.storage import Snapshot, prefixed, unprefixed
from ..losses import MSE, Huber, LogCosh, Loss, PoissonNLL
from ..posterior.gram import Gram
from .accumulation import Statistics, Weighing
from .gradients.loss import GradientLoss

_LOSSES: dict[str, type[Any]] = {c.__name__: c for c in (MSE, Huber, LogCosh, PoissonNLL)}


def snapshot(
    statistics: Statistics,
    readout: dict[str, Any],
    weighing: Weighing | None,
    report: CalibrationReport | None,
) -> Snapshot:
    """Everything but the model."""
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
    return Snapshot(tensors, header)


def parts(given: Snapshot) -> tuple[Statistics, Weighing | None, CalibrationReport | None]:
    """The way back; no weighing where the loss or weights were functions.

    Raises:
        ValueError: something is missing, or this version does not know it.
    """
    try:
        gram = Gram.from_state(unprefixed("gram", given.tensors))
        sketch = RowSketch.from_state(unprefixed("sketch", given.tensors))
        statistics = Statistics(gram, sketch, given.header["targets"], given.header["inputs"])
        report = given.part("calibration", CalibrationReport.from_state)
        return statistics, _loss_from(given.header["loss"]), report
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"The fit is incomplete: {error} is missing or wrong. Save it again from the "
            "fitted object."
        ) from error


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
