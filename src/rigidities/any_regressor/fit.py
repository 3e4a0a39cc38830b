"""What a fit of any regressor leaves, and how it is kept in files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..calibration.calibration import Calibration
from ..calibration.report import CalibrationReport
from ..data.arrays import Columns
from ..data.finiteness import require_finite
from ..data.samples import SampleBatch, Samples
from ..data.sketch import fingerprint
from ..data.storage import Snapshot, prefixed, unprefixed
from .curvature.dense_form import DenseForm, Hessian
from .curvature.dual_form import DualForm
from .curvature.forms import Form
from .curvature.pseudo_hessian import PIECE
from .derivatives.differentiation import Differentiation
from .derivatives.regressor import Regressor
from .derivatives.tangents import Block, Explicit, Outer, Tangents

KIND = "regressor"
"""Of its files; see `data.schema`."""

BLOCKS: dict[str, type[Block]] = {kind.__name__: kind for kind in (Explicit, Outer)}


@dataclass(frozen=True)
class Fit:
    """What a fit leaves.

    Attributes:
        regressor: with the parameters that f uses.
        form: the solved curvature.
        shape: of one sample's output.
        inputs: number of positional inputs.
        gradient_norm: of the loss.
        dispersion: training predictions with a curvature, and the sum of their squared residuals.
        calibration: ridge, scale, noise and distribution.
        report: of the last calibration.
        differentiation: of the regressor; None after loading, until there are inputs.
        columns: names of the columns of each data frame among the inputs, if any.
    """

    regressor: Regressor
    form: Form
    shape: torch.Size
    inputs: int
    gradient_norm: float
    dispersion: tuple[int, float]
    calibration: Calibration
    report: CalibrationReport | None = None
    differentiation: Differentiation | None = field(default=None, repr=False)
    columns: Columns = None

    @property
    def effective_rank(self) -> float:
        """Directions that the data determine; refused where the form does not know."""
        rank = self.form.effective_rank
        if rank != rank:
            raise ValueError(
                "The matrix-free form does not know how many directions the data determine. "
                "Calibrate on other data."
            )
        return rank

    def ready(self, samples: Samples) -> Fit:
        """The same, able to differentiate: the way is found on the first of the inputs."""
        if self.differentiation is not None:
            return self
        first = next(iter(samples))
        way = Differentiation.of(self.regressor, *first.args, **first.kwargs)
        if way.shape != self.shape:
            raise ValueError(
                f"f gives outputs of shape {tuple(way.shape)} for a sample, and gave "
                f"{tuple(self.shape)} in the fit. Load the file with the f it was made with."
            )
        return replace(self, differentiation=way)

    def differentiate(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tangents]:
        """Predictions (N, K) and their tangents."""
        assert self.differentiation is not None
        return self.differentiation(*inputs, **keywords)

    def pieces(self, samples: Samples) -> Iterator[SampleBatch]:
        """Batches, small enough for their tangents to be held."""
        assert self.differentiation is not None
        numbers = self.differentiation.numbers
        if self.form.name == "dense":
            numbers = 2 * self.differentiation.outputs * len(self.regressor)
        yield from samples.pieces(max(1, PIECE // (8 * numbers)))

    def differentiated(self, samples: Samples) -> tuple[Tensor, Tangents]:
        """Predictions (N, K) of all inputs and their tangents."""
        pieces = [self.differentiate(*b.args, **b.kwargs) for b in self.pieces(samples)]
        mean = torch.cat([mean for mean, _ in pieces])
        require_finite(mean, mean, lambda: samples, "rows")
        return mean, Tangents.join([part for _, part in pieces])

    def shaped(self, rows: Tensor) -> Tensor:
        """(N, K) -> shaped like f's output."""
        return rows.reshape(len(rows), *self.shape)

    def samples(self, x: Any, y: Any = None) -> Samples:
        """What a user hands in."""
        known, like = self.columns, self.regressor.flat
        return Samples.of(x, y, like=like, count=self.inputs, ordered=True, names=known)


def snapshot(fit: Fit) -> Snapshot:
    """Everything but f and its parameters; the matrix-free form is refused."""
    form, tensors = _form_state(fit.form)
    regressor = {
        "names": fit.regressor.parameters.names,
        "fingerprint": _fingerprint(fit.regressor),
        "shape": list(fit.shape),
        "inputs": fit.inputs,
        "columns": fit.columns,
        "gradient_norm": fit.gradient_norm,
        "dispersion": list(fit.dispersion),
    }
    header = {"kind": KIND, "regressor": regressor, **form}
    if fit.report is not None:
        header |= fit.report.header()
        tensors |= fit.report.tensors()
    else:
        header["calibration"] = fit.calibration.header()
        tensors |= prefixed("calibration", fit.calibration.tensors())
    return Snapshot(tensors, header)


def restored(given: Snapshot, regressor: Regressor) -> Fit:
    """The fit of a file, for the regressor and the parameters it was made with."""
    given = given.to(regressor.flat.device)
    header, kept = given.header, given.header["regressor"]
    with given.opened():
        missing = [name for name in kept["names"] if name not in regressor.parameters.names]
        if missing:
            raise ValueError(
                f"The file was made with a parameter {missing[0]!r}, which this regressor does not "
                "have. Load it with the regressor and the subset= it was made with."
            )
        idle = set(regressor.parameters.names) - set(kept["names"])
        if idle:
            regressor = replace(regressor, parameters=regressor.parameters.without(idle))
        if _fingerprint(regressor) != kept["fingerprint"]:
            raise ValueError(
                "The parameters or buffers differ from those the file was fitted with. Give the "
                "same ones, or fit again."
            )
        report = None
        if header.get("report") is not None:
            report = CalibrationReport.from_state(header, given.tensors)
            calibration = report.calibration
        else:
            chosen = unprefixed("calibration", given.tensors)
            calibration = Calibration.from_state(header["calibration"], chosen)
        rows, squares = kept["dispersion"]
        return Fit(
            regressor,
            _form_from(given),
            shape=torch.Size(kept["shape"]),
            inputs=kept["inputs"],
            gradient_norm=kept["gradient_norm"],
            dispersion=(rows, squares),
            calibration=calibration,
            report=report,
            columns=kept["columns"],
        )


def _fingerprint(regressor: Regressor) -> str:
    """Of all that predictions depend on: what varies, what is held, and buffers."""
    buffers = {} if regressor.module is None else dict(regressor.module.named_buffers())
    return fingerprint([*regressor.parameters.leaves, *buffers.items()])


def _form_state(form: Form) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a form, both under its name."""
    header: dict[str, Any] = {"ridge": form.ridge}
    if isinstance(form, DenseForm):
        hessian = form.hessian
        header["names"] = hessian.names
        header["rows"] = hessian.rows
        header["flat"] = hessian.flat
        header["exact"] = hessian.exact
        header["epsilon"] = hessian.epsilon
        tensors = {"matrix": hessian.matrix}
        if hessian.data is not None:
            tensors["data"] = hessian.data
        return {"dense": header}, prefixed("dense", tensors)
    if isinstance(form, DualForm):
        blocks = form.rows.blocks
        header["blocks"] = [type(block).__name__ for block in blocks]
        tensors = {}
        for i, block in enumerate(blocks):
            tensors |= prefixed(str(i), vars(block))
        return {"dual": header}, prefixed("dual", tensors)
    raise ValueError(
        "A matrix-free rigidity goes through the training data for every prediction, and a file "
        "does not hold them. Fit again where they are, or use form='dense' or 'dual'."
    )


def _form_from(given: Snapshot) -> Form:
    """The form that `_form_state` was given, solved again."""
    if given.header.get("dense") is not None:
        header, tensors = given.header["dense"], unprefixed("dense", given.tensors)
        hessian = Hessian(
            matrix=tensors["matrix"],
            names=[(name, size) for name, size in header["names"]],
            rows=header["rows"],
            flat=header["flat"],
            data=tensors.get("data"),
            exact=header["exact"],
            epsilon=header["epsilon"],
        )
        return DenseForm.of(hessian, header["ridge"])
    header, tensors = given.header["dual"], unprefixed("dual", given.tensors)
    blocks = []
    for i, name in enumerate(header["blocks"]):
        blocks.append(BLOCKS[name](**unprefixed(str(i), tensors)))
    return DualForm.of(Tangents(tuple(blocks)), header["ridge"])
