"""What a fit of any regressor leaves, and how it is kept in files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..calibration.calibration import Calibration
from ..calibration.report import CalibrationReport
from ..data.arrays import Columns
from ..data.finiteness import require_finite
from ..data.samples import SampleBatch, Samples
from ..data.sketch import fingerprint
from ..data.storage import Snapshot, prefixed, unprefixed
from ..notices import DamagedError, require, require_kinds
from .curvature.dense_form import DenseForm, Hessian
from .curvature.dual_form import DualForm
from .curvature.forms import Form
from .curvature.pseudo_hessian import PIECE
from .derivatives.differentiation import Differentiation
from .derivatives.regressor import Regressor
from .derivatives.tangents import Block, Explicit, Outer, Tangents

_LISTS = {"names": list, "shape": list, "dispersion": list}
_KEPT = {"fingerprint": str, "inputs": int, "gradient_norm": float} | _LISTS
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
        calibration: ridge, scale, noise and law.
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
    kept, tensors = _form_state(fit.form)
    chosen = fit.calibration if fit.report is None else fit.report
    own = {"names": fit.regressor.parameters.names, "fingerprint": _fingerprint(fit.regressor)}
    shape = {"shape": list(fit.shape), "inputs": fit.inputs, "columns": fit.columns}
    sums = {"gradient_norm": fit.gradient_norm, "dispersion": fit.dispersion}
    parts = {"regressor": {**own, **shape, **sums}, "form": kept, "calibration": chosen.header()}
    header = {"library": __version__, **parts, "reported": fit.report is not None}
    return Snapshot(prefixed("form", tensors) | prefixed("calibration", chosen.tensors()), header)


def restored(given: Snapshot, regressor: Regressor) -> Fit:
    """The fit of a file, for the regressor and the parameters it was made with."""
    device = regressor.flat.device
    own = replace(given, tensors={k: v.to(device) for k, v in given.tensors.items()})
    with own.opened():
        kept = own.header["regressor"]
        require_kinds(kept, _KEPT, "the regressor")
        if missing := [one for one in kept["names"] if one not in regressor.parameters.names]:
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
        if own.header["reported"]:
            report = own.part("calibration", CalibrationReport.from_state)
        calibration = report.calibration if report else own.part("calibration", Calibration.alone)
        if calibration is None or len(calibration.scale) != 1:
            raise DamagedError("the calibration")
        form = _form_from(own.header["form"], unprefixed("form", own.tensors))
        require(form.width == len(regressor), "the form's width")
        rows, dispersion = kept["dispersion"]
        sums = (kept["gradient_norm"], (rows, float(dispersion)))
        shape, inputs, names = torch.Size(kept["shape"]), kept["inputs"], kept.get("columns")
        require(names is None or type(names) is list, "the names of columns")
        return Fit(regressor, form, shape, inputs, *sums, calibration, report, columns=names)


def _fingerprint(regressor: Regressor) -> str:
    """Of all that predictions depend on: what varies, what is held, and buffers."""
    buffers = {} if regressor.module is None else dict(regressor.module.named_buffers())
    return fingerprint([*regressor.parameters.leaves, *buffers.items()])


def _form_state(form: Form) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header: dict[str, Any] = {"name": form.name, "ridge": form.ridge}
    if isinstance(form, DenseForm):
        fields = vars(form.hessian)
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        return header | {k: v for k, v in fields.items() if k not in {"matrix", "data"}}, tensors
    if isinstance(form, DualForm):
        blocks = form.rows.blocks
        names = [type(block).__name__ for block in blocks]
        tensors = {f"{i}.{k}": v for i, block in enumerate(blocks) for k, v in vars(block).items()}
        return header | {"blocks": names}, tensors
    raise ValueError(
        "A matrix-free rigidity goes through the training data for every prediction, and a file "
        "does not hold them. Fit again where they are, or use form='dense' or 'dual'."
    )


def _form_from(header: dict[str, Any], tensors: dict[str, Tensor]) -> Form:
    fields = dict(header)
    name, ridge = fields.pop("name"), fields.pop("ridge")
    finite = all(bool(one.is_floating_point() and one.isfinite().all()) for one in tensors.values())
    require(finite and 0 <= float(ridge) < math.inf, "the form's ridge or a tensor")
    if name == "dense":
        require_kinds(fields, {"rows": int, "flat": int, "exact": bool, "epsilon": float}, "form")
        require(tensors["matrix"].dtype == torch.float64, "the Hessian")
        fields["names"] = [tuple(pair) for pair in fields["names"]]
        return DenseForm.of(Hessian(**(fields | tensors)), ridge)
    kinds = [BLOCKS[kind] for kind in fields["blocks"]]
    blocks = [kind(**unprefixed(str(i), tensors)) for i, kind in enumerate(kinds)]
    return DualForm.of(Tangents(tuple(blocks)), ridge)
