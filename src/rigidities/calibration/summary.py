"""A fit in a few lines: what is known, how good it is, what to do next."""

from __future__ import annotations

from .calibration import Calibration
from .report import CalibrationReport, distribution_line, numbers

UNFITTED = {"fit": "none yet: call fit(x, y) with the training data"}


def summary(
    title: str,
    known: dict[str, str],
    calibration: Calibration | None = None,
    report: CalibrationReport | None = None,
    guarantee: str = "calibrate(x, y, conformal=0.3)",
) -> str:
    """The title, what is known, and what was chosen; `guarantee` is the call that gives one."""
    known = known if calibration is None else known | _chosen(calibration, report)
    if calibration is not None and report is not None:
        held = "guaranteed by p.interval(0.9, conformal=True)"
        held = f"the guarantee is void: call {guarantee} again" if report.stale else held
        without = f"no guarantee; {guarantee} gives one"
        known["intervals"] = without if calibration.conformal is None else held
    return "\n".join([title, *(f"  {name:<14}{text}" for name, text in known.items())])


def _chosen(own: Calibration, report: CalibrationReport | None) -> dict[str, str]:
    level, origin = own.noise.level, "as given or by default"
    if report is not None:
        origin = "fixed" if report.fixed else f"chosen by {report.criterion}"
    noise = f", variance {numbers(level)}" if bool(level.any()) else ""
    found = {"ridge": f"{own.ridge:.4g}, {origin}", "scale": numbers(own.scale)}
    found |= {"noise": own.noise.name + noise, "distribution": distribution_line(own.distribution)}
    ask = "not yet: call calibrate(x, y) with data that the model has not seen"
    return found | ({"calibrated": ask} if report is None else _trust(report))


def _trust(report: CalibrationReport) -> dict[str, str]:
    seen = f" and {report.seen:,} left-out training rows" if report.seen else ""
    stale = "; stale: call calibrate again" if report.stale else ""
    found = {"calibrated": f"on {report.rows:,} rows{seen}, {report.worth}{stale}"}
    said = len(report.warnings) + len(report.remarks)
    return found | ({"notes": f"{said}: print(uq.report) tells them"} if said else {})
