"""A fit in a few lines: what is known, how good it is, what to do next."""

from __future__ import annotations

import torch

from .calibration import Calibration
from .report import CalibrationReport, _numbers

UNFITTED = {"fit": "none yet: call fit(x, y) with the training data"}
NO_CALIBRATION = "not yet: call calibrate(x, y) with data that the model has not seen"


def summary(
    title: str,
    known: dict[str, str],
    calibration: Calibration | None = None,
    report: CalibrationReport | None = None,
) -> str:
    """The title, what is known of the fit, and the calibration's choices, a line each."""
    known = known if calibration is None else known | _chosen(calibration, report)
    return "\n".join([title, *(f"  {name:<12}{text}" for name, text in known.items())])


def _chosen(own: Calibration, report: CalibrationReport | None) -> dict[str, str]:
    """Ridge, scale, noise and law, and how far they may be trusted."""
    df, level = getattr(own.law, "df", None), own.noise.level
    tails = "" if df is None else f", {_numbers(torch.as_tensor(df))} degrees of freedom"
    found = {
        "ridge": f"{own.ridge:.4g}, {_origin(report)}",
        "scale": _numbers(own.scale),
        "noise": own.noise.name + (f", variance {_numbers(level)}" if bool(level.any()) else ""),
        "law": own.law.name + tails,
    }
    if report is None:
        return found | {"calibrated": NO_CALIBRATION}
    seen = f" and {report.seen:,} left-out training rows" if report.seen else ""
    better = "better" if report.gain >= 0 else "worse"
    rows = f"on {report.rows:,} rows{seen}, {abs(report.gain):.3g} nats a row {better} than a "
    stale = "; stale, rows came or went: call calibrate again" if report.stale else ""
    held = "no guarantee; LastLayerRigidity.calibrate(x, y, conformal=0.3) gives one"
    if own.conformal is not None:
        held = "guaranteed by p.interval(0.9, conformal=True)"
    said = len(report.warnings) + len(report.remarks)
    warned = {"warnings": f"{said}: print(report) tells them"} if said else {}
    return found | {"calibrated": f"{rows}constant bar{stale}", "intervals": held} | warned


def _origin(report: CalibrationReport | None) -> str:
    if report is None:
        return "as given or by default"
    return "fixed" if report.fixed else f"chosen by {report.criterion}"
