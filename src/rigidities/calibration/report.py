"""The outcome of a calibration: what was chosen, how good it is, and what to beware of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..notices import notify
from ..prediction.distribution import Distribution
from ..prediction.guards import RigidityGuard
from .calibration import Calibration, under

LARGEST_DOUBT = 1e-3
"""Relative error of variances by mixed precision beyond which it is not used without a word."""


@dataclass(frozen=True)
class CalibrationReport:
    r"""Chosen ridge, scale, noise and distribution, with what a user needs to judge them.

    Attributes:
        calibration: what was chosen.
        criterion: its name.
        value: of the criterion at the choice (smaller is better).
        at_edge: "lower" or "upper" where the best ridge lies at the end of its range.
        condition: condition number of $G + \varsigma^2 I$.
        effective_rank: directions that the data determine.
        width: number of features.
        nll: negative log-likelihood per row under the distribution, on the rows that it was fitted
            to.
        nll_constant: the same for one constant bar, a Gaussian of the rows' root mean square error.
        constant: standard deviation of that constant bar, one entry per target.
        gain: nats per row by which the bars beat one constant bar, cross-validated: both were
            fitted to other calibration rows than those that they are judged by. NaN where there
            are fewer than three.
        gain_error: its standard error.
        gain_without: the same gain without the one row that moves it most.
        rows: calibration rows (predictions, where a sample has several).
        used: how many of them the choice was made with, evenly chosen where there are very many.
        samples: calibration samples compared with the training data.
        duplicates: how many of those stand in the training data too.
        fixed: whether the ridge was given, by the user or by the form, and not chosen.
        zero_curvature: training rows that the loss gave no weight, counted for each target that
            has weights of its own.
        stale: whether data were added or removed since.
        gradient_scale: scale of derivatives, one entry per target, where it was calibrated.
        seen: training rows that `auto` used, as if left out.
        ladder: for `auto`, the cross-validated NLL per row of one constant bar, of the paper's
            form, and of each part of the full model with those before it.
        rung: for `auto`, the one of these that was taken.
        remarks: on the rows and what followed from them.
        rounding: bound on the relative error of variances by products of mixed precision.
        advice: what helps against uneven bars, where it is not what `LastLayerRigidity` has.
        novelty: where the fit has watched layers, for each the squared distance that 95 % of the
            calibration rows stay below.
        novelty_usual: of the novelty, the value that 99 % of those rows stay below.
    """

    calibration: Calibration
    criterion: str
    value: float
    at_edge: str | None
    condition: float
    effective_rank: float
    width: int
    nll: float
    nll_constant: float
    constant: Tensor
    gain: float
    gain_error: float
    gain_without: float
    rows: int
    fixed: bool = False
    samples: int = 0
    duplicates: int = 0
    zero_curvature: int = 0
    stale: bool = False
    used: int = 0
    gradient_scale: Tensor | None = None
    seen: int = 0
    ladder: dict[str, float] = field(default_factory=dict)
    rung: str = ""
    remarks: list[str] = field(default_factory=list)
    rounding: float = 0.0
    advice: str = ""
    novelty: dict[str, float] = field(default_factory=dict)
    novelty_usual: float = 0.0

    @property
    def ridge(self) -> float:
        r"""$\varsigma^2$."""
        return self.calibration.ridge

    @property
    def scale(self) -> Tensor:
        r"""$\alpha$, one entry per target."""
        return self.calibration.scale

    @property
    def noise(self) -> Tensor:
        """Noise variance (its level, where it has a shape), one entry per target."""
        return self.calibration.noise.level

    @property
    def warnings(self) -> list[str]:
        """What to beware of, in sentences."""
        found = [*self.repeated, *self.few]
        remedy = " Try noise='constant'." if self.calibration.noise.name == "none" else ""
        if self.useless:
            found.append(f"{self.useless}{remedy}")
        if self.at_edge == "upper":
            found.append(
                "The best ridge lies at the upper end of its range: the variance follows the "
                f"length of the features alone, so the ridge may stand in for noise.{remedy}"
            )
        if self.at_edge == "lower":
            found.append("The best ridge lies at the lower end of its range (practically zero).")
        if self.effective_rank < _SWAMPED < self.width:
            instead = "a smaller ridge=" if self.advice else "criterion='auto', or a smaller ridge="
            found.append(
                "The ridge swamps every direction that the data determine (effective rank "
                f"{self.effective_rank:.2g} of {self.width}): the bars know no unfamiliar inputs. "
                f"Take {instead}."
            )
        if self.zero_curvature:
            found.append(
                f"{self.zero_curvature} training rows have zero curvature and add nothing "
                "(with a Huber loss: residuals beyond delta)."
            )
        if self.rounding > LARGEST_DOUBT:
            found.append(self._doubt)
        return found

    @property
    def worth(self) -> str:
        """The gain over one constant bar in words, with its standard error."""
        if not math.isfinite(self.gain):
            return "too few rows to say how they compare with one constant bar"
        side = "worse" if self.gain < 0 else "better"
        return (
            f"{abs(self.gain):.3g} ± {self.gain_error:.2g} nats a row {side} than one constant bar"
        )

    @property
    def varies(self) -> bool:
        """Whether bars differ among rows like those of the training, by what was taken."""
        return self.rung != "constant bar"

    @property
    def useless(self) -> str:
        """That the bars were not shown to be better than one constant bar; empty where they were.

        One row may make the difference: then it is said.
        """
        if not math.isfinite(self.gain):
            return ""
        bar = f"one constant bar (± {numbers(self.constant)}, the calibration rows' RMS error)"
        said = ""
        if not self.varies:
            return (
                f"The error bars are one constant bar (± {numbers(self.constant)}), which grows "
                "only beyond the training rows: no others were shown to be better on these rows. "
                "More rows to calibrate on would help."
            )
        if self.gain < 2 * self.gain_error or self.gain < 1e-6:
            verdict = "are not shown to be better than"
            if self.gain < -2 * self.gain_error:
                verdict = "are worse than"
            said = (
                f"The error bars {verdict} {bar}: {self.gain:+.3g} ± {self.gain_error:.2g} nats "
                "a row on rows left out. Trust them only to flag inputs far from the training data."
            )
        if (self.gain > 0) != (self.gain_without > 0):
            row = f"One row alone decides: without it {self.gain_without:+.3g}."
            said = f"{said} {row}" if said else f"The gain over {bar} is {self.gain:+.3g}. {row}"
        return said

    @property
    def repeated(self) -> list[str]:
        """That calibration rows stand in the training data, where it matters."""
        share = self.duplicates / max(1, self.samples)
        effect = 1 - math.sqrt(max(0.0, 1 - share))  # of rows without any error
        said = (
            f"{self.duplicates} of {self.samples} calibration rows stand in the training data too "
            f"({100 * share:.3g} %): where the model knows those by heart the bars are too narrow, "
            f"by up to {100 * effect:.3g} %. Calibrate on rows that the model has not seen."
        )
        return [said] if share >= _NOTICEABLE else []

    @property
    def few(self) -> list[str]:
        """That the size of the bars rests on a handful of rows."""
        if not 0 < self.rows < _FEW:
            return []
        doubt = f"their size is uncertain by {100 / math.sqrt(2 * self.rows):.0f} %"
        if self.seen:
            doubt = "how much more the model errs there than on its training rows is a guess"
        return [
            f"The bars were calibrated on {self.rows} rows that the model has not seen: from so "
            f"few {doubt}. Calibrate on a hundred or more."
        ]

    @property
    def has(self) -> set[str]:
        """Names of what the bars have, or was tried in vain: noise, distribution, and "groups"."""
        chosen = self.calibration
        names = {chosen.noise.name, chosen.distribution.name}
        tried = {"heavy tails": "student-t", "full": "tilted"}
        tried["noise that follows the inputs"] = "features"
        names |= {tried[rung] for rung in self.ladder if rung in tried}
        if chosen.conformal is not None and len(chosen.conformal.labels) > 0:
            names.add("groups")
        return names

    def remedy(self, fault: str) -> str:
        """What helps against uneven coverage, skew or tails and is not in use yet."""
        own = {"uneven": self.advice, "skew": _LAST} if self.advice else {}
        return own.get(fault) or remedy(fault, self.has)

    @property
    def _doubt(self) -> str:
        return (
            f"The Gram's products were of mixed precision, whose rounding may change variances by "
            f"up to {self.rounding:.2g} of themselves at ridge {self.ridge:.2g}, more than "
            f"{LARGEST_DOUBT:g}. Fit again with precision='double', or pass a larger ridge=."
        )

    def certified(self, rounding: float, own: float) -> CalibrationReport:
        """The report with the certificate of mixed precision, which may warn or refuse.

        Args:
            rounding: bound on the relative error that it brings.
            own: that of the features themselves, below which nothing is said.
        """
        report = replace(self, rounding=rounding)
        if rounding > 0.5:
            raise ValueError(report._doubt)
        if rounding > max(LARGEST_DOUBT, own):
            notify(report._doubt)
        return report

    def __str__(self) -> str:
        some = f" ({self.used} of them used)" if 0 < self.used < self.rows else ""
        kept = f" and {self.seen} left-out training rows" if self.seen else ""
        none = self.calibration.noise.name == "none"
        noise = "none: the scale holds the noise too" if none else numbers(self.noise)
        lines = [
            f"Calibrated on {self.rows} rows{some}{kept} by {self.criterion}: {self.value:.6g}",
            f"  ridge           {self.ridge:.4g}{' (fixed)' if self.fixed else ''}",
            f"  scale           {numbers(self.scale)}",
            f"  noise variance  {noise}",
            f"  NLL             {self.nll:.4g} on the rows fitted to",
            f"  gain            {self.worth} (± {numbers(self.constant)}), on rows left out",
        ]
        if self.calibration.weighted:
            weight = numbers(self.calibration.weight)
            lines.insert(4, f"  for a weight of {weight}, as rows without one are taken to have")
        if self.gradient_scale is not None:
            lines.insert(3, f"  of derivatives  {numbers(self.gradient_scale)}")
        if (distribution := self.calibration.distribution).name != "gaussian":
            lines.append(f"  distribution    {distribution_line(distribution)}")
        if math.isfinite(self.effective_rank):
            lines.append(
                f"  effective rank  {self.effective_rank:.1f} of {self.width}, "
                f"condition number {self.condition:.2g}"
            )
        if self.rounding:
            lines.append(f"  rounding        at most {self.rounding:.2g} of variances (mixed)")
        lines += [f"  {line}" for line in [*self._rungs, *self._beyond]]
        if self.novelty:
            layers = "1 layer" if len(self.novelty) == 1 else f"{len(self.novelty)} layers"
            lines.append(
                f"  novelty         {layers} watched; one row in a hundred of these is above "
                f"{self.novelty_usual:.2f}"
            )
        if self.duplicates:
            lines.append(f"  seen before     {self.duplicates} of {self.samples} rows")
        said = [*self.warnings[len(self.repeated) :], *self.remarks]  # repeated ones have warned
        return "\n".join([*lines, *(f"  ! {warning}" for warning in said)])

    @property
    def _rungs(self) -> list[str]:
        """What was taken and what each part brought on rows left out, in plain words."""
        if not self.ladder or self.rung not in _RUNGS:  # files of other versions
            return []
        names = list(self.ladder)
        why = "" if self.rung == names[-1] else ": richer ones are not shown to be better"
        lines = [f"chosen: {_RUNGS[self.rung]}{why}. Cross-validated NLL"]
        before, taken = None, True
        for name, value in self.ladder.items():
            said = f"{value:.4g} of {_RUNGS[name]}"
            if before is not None and name not in _WHOLE:
                part = "the noise that was given" if self._given(name) else name
                part = (
                    "shape of the distribution" if name == names[-1] and name in _SHAPED else part
                )
                said = f"{value - before:+.4f} by {part}"
            lines.append(f"  {said}" if taken else f"  {said} (not taken)")
            before, taken = value, taken and name != self.rung
        return lines

    def _given(self, rung: str) -> bool:
        """Whether the constant noise of a rung is one that was given."""
        return rung == "constant noise" and self.calibration.noise.name == "given"

    @property
    def _beyond(self) -> list[str]:
        """How the bars behave far from the training rows."""
        guard = self.calibration.guard
        if guard is None:
            return []
        widths = ""
        if self.calibration.noise.name != "given":  # the noise of a usual row is known
            twice, far = self._usual_std(2.0), self._usual_std(10.0)
            widths = (
                f": a usual one is {numbers(self._usual_std(1.0))} at that q, at least "
                f"{numbers(twice)} at twice and {numbers(far)} at ten times"
            )
        where = f"beyond q = {numbers(guard.reference)}, where a tenth of the training rows lie, "
        if isinstance(guard, RigidityGuard):
            return [f"{where}bars grow with q{widths}"]
        return [f"{where}bars grow to the targets' own spread and more{widths}"]

    def _usual_std(self, times: float) -> Tensor:
        """The bar (K,) of a usual prediction whose q is so many times the guard's reference.

        Usual are the noise, and a prediction that is the targets' mean.
        """
        calibration = self.calibration
        guard, head = calibration.guard, calibration.head
        assert guard is not None
        assert head is not None, "a guard belongs to a head"
        q = times * guard.reference
        second = torch.as_tensor(calibration.distribution.second).to(q)
        squared_scale = self.noise / second + head.scale2 * q
        squared_scale = guard.widened(
            squared_scale, q, distance=torch.zeros_like(q), extent=torch.ones_like(q)
        )
        return (squared_scale * second).sqrt()

    def to(self, device: torch.device) -> CalibrationReport:
        """The same report on another device."""
        derivatives = self.gradient_scale
        return replace(
            self,
            calibration=self.calibration.to(device),
            constant=self.constant.to(device),
            gradient_scale=None if derivatives is None else derivatives.to(device),
        )

    def header(self) -> dict[str, Any]:
        """Plain values for a file's header: of the calibration, and of the report on it."""
        said = {name: value for name, value in vars(self).items() if name not in _APART}
        return {"calibration": self.calibration.header(), "report": said}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a file, with the part of the header they belong to as a prefix."""
        tensors = {f"calibration.{name}": t for name, t in self.calibration.tensors().items()}
        tensors["report.constant"] = self.constant
        if self.gradient_scale is not None:
            tensors["report.gradient_scale"] = self.gradient_scale
        return tensors

    @classmethod
    def from_state(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> CalibrationReport:
        """The report that `header` and `tensors` came from.

        Raises:
            ValueError: the noise or distribution is none that is known here.
        """
        chosen = under("calibration", tensors)
        return cls(
            calibration=Calibration.from_state(header["calibration"], chosen),
            constant=tensors["report.constant"],
            gradient_scale=tensors.get("report.gradient_scale"),
            **header["report"],
        )


_RUNGS = {
    "constant bar": "one constant bar, which grows beyond the training rows alone",
    "paper": "the paper's form",
    "constant noise": "constant noise and a Gaussian distribution",
    "heavy tails": "constant noise and heavy tails",
    "noise that follows the inputs": "noise that follows the inputs",
    "full": "the full model",
}
"""What the rungs of `ladder` are, in words."""
_WHOLE, _SHAPED = ("constant bar", "paper"), ("full",)
"""Rungs that are no step from the one before, and the one that gives the distribution its shape."""
_APART = ("calibration", "constant", "gradient_scale")
_FEW = 10
"""Calibration rows below which it is said that they are few."""
_SWAMPED = 0.5
"""Effective rank below which the data determine no direction."""
_NOTICEABLE = 0.01
"""Share of calibration rows that were trained on, from which on bars may be too narrow by 0.5 %."""
_REMEDIES = {
    "uneven": {
        "features": "With calibrate(valid, noise='features') the noise follows the inputs.",
        "groups": "With calibrate(..., conformal=, groups=) intervals hold in groups.",
    },
    "skew": {"tilted": "With calibrate(valid, distribution='tilted') the distribution can lean."},
    "tails": {
        "student-t": "With calibrate(valid, distribution='student-t') the distribution has such tails."
    },
}
_LAST = "More rows like these to train and calibrate on, or another model, would help."


def remedy(fault: str, used: set[str], *, sure: bool = True) -> str:
    """What the library has against uneven coverage, skew or tails and is not `used` yet."""
    has = used | ({"student-t"} if "tilted" in used else set())
    found = next((text for name, text in _REMEDIES[fault].items() if name not in has), _LAST)
    return found if sure or found == _LAST else f"Unless it is in use already: {found}"


def distribution_line(distribution: Distribution) -> str:
    """A distribution's name, with its degrees of freedom where it has any."""
    df = getattr(distribution, "df", None)
    tails = "" if df is None else f", {numbers(torch.as_tensor(df))} degrees of freedom"
    return distribution.name + tails


def numbers(tensor: Tensor, most: int = 6) -> str:
    """Entries for reading, the first of many."""
    values = [f"{value:.4g}" for value in tensor.flatten()[:most].tolist()]
    more = f", ... ({tensor.numel()} targets)" if tensor.numel() > most else ""
    return ", ".join(values) + more


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
