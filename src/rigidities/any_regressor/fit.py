"""The result of a fit of any regressor, and how it is stored in files.

`PredictionRigidity.fit` makes one frozen `Fit`: the regressor, the solved curvature, and the
calibration. Predictions differentiate new inputs with it. `snapshot` turns a fit into the header
and the tensors of a file; `restored_fit` reads them back for a regressor with the same parameters,
which a fingerprint confirms. The parameters themselves are not in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..calibration.calibration import Calibration
from ..calibration.report import CalibrationReport
from ..data.finiteness import require_finite
from ..data.hashes import fingerprint
from ..data.samples import SampleBatch, Samples
from ..data.sources import ColumnNames
from ..data.storage import Snapshot, prefixed, unprefixed
from ..losses import MSE, GaussianNLL, Loss
from .curvature.dense_form import DenseForm, Hessian
from .curvature.dual_form import DualForm, group_size
from .curvature.forms import Form
from .curvature.pseudo_hessian import samples_at_once
from .derivatives.differentiation import Differentiation
from .derivatives.regressor import Regressor
from .derivatives.tangents import Explicit, Outer, TangentBlock, Tangents

KIND = "regressor"
"""The kind of these files, in their header."""

BLOCKS: dict[str, type[TangentBlock]] = {"Explicit": Explicit, "Outer": Outer}
"""The classes of blocks by their names in files."""


@dataclass(frozen=True)
class Fit:
    """A fitted regressor with its solved curvature.

    Attributes:
        regressor: The regressor with the parameters that f uses.
        form: The solved curvature.
        shape: Shape of one sample's output.
        inputs: Number of positional inputs of f.
        gradient_norm: Norm of the loss's gradient at the parameters.
        rows: Number of training predictions with a curvature.
        dispersion: Sum of their squared residuals, in units of the loss; NaN where not known.
            See `Totals`.
        calibration: Ridge, scale, noise and distribution.
        typical_weight: The weight of a usual prediction in the Hessian. See `Totals`.
        weighted: Whether the samples had weights.
        report: Report of the last calibration.
        scale_origin: Where a scale without a report comes from: "default" (it is 1 for want of
            anything better), "residuals" of the fit, "loss" (whose unit is the noise), or "given".
        differentiation: How to differentiate the regressor; None after loading, until `ready`
            finds out on the first inputs.
        columns: Names of the columns of each data frame among the inputs, if any.
        directions: Directions of the parameters along which a calibrated noise looks at tangents,
            (P, F), float64; None where it does not follow the inputs.
    """

    regressor: Regressor
    form: Form
    shape: torch.Size
    inputs: int
    gradient_norm: float
    rows: int
    dispersion: float
    calibration: Calibration
    typical_weight: float = 1.0
    weighted: bool = False
    report: CalibrationReport | None = None
    scale_origin: str = "default"
    differentiation: Differentiation | None = field(default=None, repr=False)
    columns: ColumnNames = None
    directions: Tensor | None = field(default=None, repr=False)

    @property
    def effective_rank(self) -> float:
        """Number of directions that the data determine; an error where the form does not know."""
        rank = self.form.effective_rank
        if math.isnan(rank):
            raise ValueError(
                "The matrix-free form cannot tell how many directions the data determine. "
                "Calibrate on other data."
            )
        return rank

    @property
    def residual_scale(self) -> float:
        """The scale from the training residuals; see `PredictionRigidity.residual_scale`."""
        if not self.dispersion >= 0:  # NaN too
            raise ValueError(
                "There are no training residuals. Call fit(x, y) with targets and a loss whose "
                "value is known."
            )
        degrees_of_freedom = self.rows - self.effective_rank
        if not degrees_of_freedom > 1e-6 * self.rows:
            raise ValueError(
                f"No residual degrees of freedom: {self.rows} rows and {self.effective_rank:.3g} "
                "fitted directions. Calibrate on other data."
            )
        return float((self.dispersion / degrees_of_freedom) ** 0.5)

    def with_scale(self, scale: float, origin: str) -> Fit:
        """The same fit with another scale, and without an earlier calibration."""
        unscaled = Calibration.unscaled(self.form.ridge, 1, self.regressor.flat.device)
        calibration = replace(unscaled, scale=scale * unscaled.scale)
        return replace(
            self, calibration=calibration, report=None, scale_origin=origin, directions=None
        )

    def scaled_for(self, loss: Loss, *, residuals_tell: bool) -> Fit:
        """The same fit with the scale that a new fit has, before any calibration.

        For a squared loss this is the residual standard error of textbooks. It needs more rows than
        parameters: with fewer, the parameters can follow the noise, and residuals are far too small
        even where a ridge leaves some degrees of freedom. The variance of a Gaussian is the noise
        itself, so its scale is 1. In all other cases the scale is not known, and 1 is a default.

        Args:
            loss: The loss of the fit.
            residuals_tell: Whether the residuals tell of the noise of new data: they are more than
                rounding, and of one size for all outputs.
        """
        if isinstance(loss, GaussianNLL):
            return self.with_scale(1.0, "loss")
        enough_rows = self.rows > len(self.regressor)
        has_rank = not math.isnan(self.form.effective_rank)
        if isinstance(loss, MSE) and enough_rows and has_rank and residuals_tell:
            return self.with_scale(self.residual_scale, "residuals")
        return self.with_scale(1.0, "default")

    def ready(self, samples: Samples) -> Fit:
        """The same fit, able to differentiate: a loaded one tries out how on the first batch."""
        if self.differentiation is not None:
            return self
        first_batch = next(iter(samples))
        differentiation = Differentiation.of(
            self.regressor, *first_batch.args, **first_batch.kwargs
        )
        if differentiation.shape != self.shape:
            raise ValueError(
                f"f gives outputs of shape {tuple(differentiation.shape)} for a sample, but gave "
                f"{tuple(self.shape)} in the fit. Load the file with the same f."
            )
        return replace(self, differentiation=differentiation)

    def differentiate(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tangents]:
        """Predictions (N, K) and their tangents."""
        assert self.differentiation is not None
        return self.differentiation(*inputs, **keywords)

    def pieces(self, samples: Samples) -> Iterator[SampleBatch]:
        """Batches that are small enough for their tangents to fit into `PIECE` bytes."""
        assert self.differentiation is not None
        numbers_per_sample = self.differentiation.numbers_per_sample
        if self.form.name == "dense":
            # The dense form writes out the rows (K, P) of a sample, and projects them into a copy.
            numbers_per_sample = 2 * self.differentiation.outputs * len(self.regressor)
        yield from samples.pieces(samples_at_once(numbers_per_sample))

    def differentiated(self, samples: Samples) -> tuple[Tensor, Tangents]:
        """Predictions (N, K) of all inputs, and their tangents."""
        means = []
        tangents = []
        for batch in self.pieces(samples):
            batch_mean, batch_tangents = self.differentiate(*batch.args, **batch.kwargs)
            means.append(batch_mean)
            tangents.append(batch_tangents)
        mean = torch.cat(means)
        require_finite(mean, mean, lambda: samples, "rows")
        return mean, Tangents.join(tangents)

    def shaped(self, rows: Tensor) -> Tensor:
        """(N, K) -> shaped like f's output."""
        return rows.reshape(len(rows), *self.shape)

    def samples(self, x: Any, y: Any = None, *, batch_size: int | None) -> Samples:
        """New data, read like those of the fit, in their own order.

        Args:
            x: Inputs.
            y: Targets, if any.
            batch_size: Samples per call of f, where the data are not batches already.
        """
        return Samples.of(
            x,
            y,
            like=self.regressor.flat,
            batch_size=batch_size,
            count=self.inputs,
            ordered=True,
            names=self.columns,
        )


def snapshot(fit: Fit) -> Snapshot:
    """Everything but f and its parameters; raises ValueError for the matrix-free form."""
    form_header, tensors = _form_state(fit.form)
    header: dict[str, Any] = {
        "kind": KIND,
        "regressor": {
            "names": fit.regressor.parameters.names,
            "fingerprint": _fingerprint(fit.regressor, fit.regressor.held_buffers),
            "buffers": fit.regressor.held_buffers,
            "shape": list(fit.shape),
            "inputs": fit.inputs,
            "columns": fit.columns,
            "gradient_norm": fit.gradient_norm,
            "dispersion": [fit.rows, fit.dispersion],
            "scale_origin": fit.scale_origin,
            "typical_weight": fit.typical_weight,
            "weighted": fit.weighted,
        },
    }
    header.update(form_header)
    if fit.report is not None:
        header.update(fit.report.header())
        tensors.update(fit.report.tensors())
    else:
        header["calibration"] = fit.calibration.header()
        tensors.update(prefixed("calibration", fit.calibration.tensors()))
    if fit.directions is not None:
        tensors["head.directions"] = fit.directions.contiguous()
    return Snapshot(tensors, header)


def restored_fit(stored: Snapshot, regressor: Regressor) -> Fit:
    """The fit in a file, for the regressor and the parameters it was made with.

    Raises:
        ValueError: The file is damaged, or the regressor or its parameters are not the same.
    """
    stored = stored.to(regressor.flat.device)
    header = stored.header
    with stored.opened():
        state = header["regressor"]
        regressor = _stored_regressor(regressor, state)
        report = None
        if header.get("report") is not None:
            report = CalibrationReport.from_state(header, stored.tensors)
            calibration = report.calibration
        else:
            calibration_tensors = unprefixed("calibration", stored.tensors)
            calibration = Calibration.from_state(header["calibration"], calibration_tensors)
        rows, dispersion = state["dispersion"]
        return Fit(
            regressor=regressor,
            form=_stored_form(stored),
            shape=torch.Size(state["shape"]),
            inputs=state["inputs"],
            gradient_norm=state["gradient_norm"],
            rows=rows,
            dispersion=dispersion,
            calibration=calibration,
            typical_weight=state["typical_weight"],
            weighted=state["weighted"],
            report=report,
            scale_origin=state["scale_origin"],
            columns=state["columns"],
            directions=stored.tensors.get("head.directions"),
        )


def _stored_regressor(regressor: Regressor, state: dict[str, Any]) -> Regressor:
    """The regressor restricted to the parameters that the file names.

    Raises:
        ValueError: The regressor lacks one of them, or their values are not those of the fit.
    """
    stored_names = set(state["names"])
    names = set(regressor.parameters.names)
    missing = [name for name in state["names"] if name not in names]
    if missing:
        raise ValueError(
            f"The file was saved with a parameter {missing[0]!r}, which this regressor does not "
            "have. Load the file with the same regressor and the same subset=."
        )
    unused = names - stored_names  # f did not use them in the fit
    if unused:
        regressor = replace(regressor, parameters=regressor.parameters.without(unused))
    if _fingerprint(regressor, state["buffers"]) != state["fingerprint"]:
        raise ValueError(
            "The parameters or buffers differ from those the file was fitted with. Load the file "
            "with the same parameters, or fit again."
        )
    return regressor


def _fingerprint(regressor: Regressor, buffers: list[str] | None) -> str:
    """A hash of all that predictions depend on: selected and fixed parameters, and buffers.

    Args:
        regressor: The regressor.
        buffers: Names of the buffers that count; None for all, in files that do not name them.
    """
    tensors = list(regressor.parameters.leaves)
    if regressor.module is not None:
        for name, buffer in regressor.module.named_buffers():
            if buffers is None or name in buffers:
                tensors.append((name, buffer))
    return fingerprint(tensors)


def _form_state(form: Form) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a form, both under its name."""
    if isinstance(form, DenseForm):
        return _dense_state(form)
    if isinstance(form, DualForm):
        return _dual_state(form)
    raise ValueError(
        "A matrix-free rigidity needs the training data for every prediction, and a file does not "
        "contain them. Fit again where the data are, or use form='dense' or 'dual'."
    )


def _dense_state(form: DenseForm) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of the dense form: its Hessian, which is factorised again on loading."""
    hessian = form.hessian
    header = {
        "ridge": form.ridge,
        "names": hessian.names,
        "rows": hessian.rows,
        "flat": hessian.flat_rows,
        "exact": hessian.exact,
        "epsilon": hessian.epsilon,
    }
    tensors = {"matrix": hessian.matrix}
    if hessian.data is not None:
        tensors["data"] = hessian.data
    return {"dense": header}, prefixed("dense", tensors)


def _dual_state(form: DualForm) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of the dual form: its training rows, block by block."""
    blocks = Tangents.join(form.rows).blocks
    header = {"ridge": form.ridge, "blocks": [type(block).__name__ for block in blocks]}
    tensors: dict[str, Tensor] = {}
    for number, block in enumerate(blocks):
        tensors.update(prefixed(str(number), vars(block)))
    return {"dual": header}, prefixed("dual", tensors)


def _stored_form(stored: Snapshot) -> Form:
    """The form in a file, factorised again."""
    if stored.header.get("dense") is not None:
        header = stored.header["dense"]
        tensors = unprefixed("dense", stored.tensors)
        hessian = Hessian(
            matrix=tensors["matrix"],
            names=[(name, size) for name, size in header["names"]],
            rows=header["rows"],
            flat_rows=header["flat"],
            data=tensors.get("data"),
            exact=header["exact"],
            epsilon=header["epsilon"],
        )
        return DenseForm.of(hessian, header["ridge"])
    header = stored.header["dual"]
    tensors = unprefixed("dual", stored.tensors)
    blocks = []
    for number, name in enumerate(header["blocks"]):
        blocks.append(BLOCKS[name](**unprefixed(str(number), tensors)))
    rows = Tangents(tuple(blocks))
    samples, outputs, _ = rows.shape
    size = group_size(rows.numbers // max(1, samples), outputs)
    return DualForm.of(rows.split(size), header["ridge"])
