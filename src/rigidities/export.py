"""Mean and error bar as one graph in a file: ONNX, or a program of `torch.export`.

Both are made of `uq.freeze()`, for any number of rows. ONNX needs PyTorch 2.7 and the extra
`onnx`; `torch.export` needs 2.7 where the readout is scaled or summed, not for a plain one. The
ONNX file says what was calibrated, see `metadata`.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._version import __version__
from .last_layer.frozen import Frozen
from .last_layer.readout.graph import LinearCopy
from .models.modes import require_torch
from .notices import extra
from .posterior.quadratic import rounding_bound

if TYPE_CHECKING:
    from .last_layer.rigidity import LastLayerRigidity

TOLERANCE = 1e-5
"""Largest difference between the file's numbers and the frozen module's, relative to their size."""
ROUNDINGS = 4.0
"""Times by which the difference may exceed what rounding brings to the frozen module itself."""
LARGEST = 1.9e9
"""Bytes of tensors in an ONNX file."""
LEVELS = (0.5, 0.8, 0.9, 0.95)
_NEEDS = ("onnx", "onnxscript", "onnxruntime")


def torch_export(
    uq: LastLayerRigidity,
    example: Tensor | tuple[Any, ...],
    *,
    outputs: Sequence[str] = ("mean", "std"),
    strict: bool = False,
    **options: Any,
) -> torch.export.ExportedProgram:
    """The frozen module as a program for any number of rows.

    Args:
        uq: fitted, and calibrated if its bars are to mean something.
        example: an input of the model, or a tuple of its inputs.
        outputs: as in `freeze`.
        strict: as in `torch.export.export`; for plain readouts alone.
        options: others of `freeze`.

    Raises:
        ValueError: `freeze` refuses, or a graph cannot hold what is asked.
        RuntimeError: PyTorch is older than 2.7, and the readout scaled, summed or reordered.
    """
    frozen, args = uq.freeze(outputs, **options), _inputs(example)
    if isinstance(frozen.readout, LinearCopy):
        require_torch("2.7", "Export of a readout that is scaled, summed or reordered")
    if strict and isinstance(frozen.readout, LinearCopy):
        raise ValueError(
            "A strict export does not take this model's readout, whose features come by "
            "torch.vmap since its output is scaled, summed or reordered. Pass strict=False."
        )
    return torch.export.export(frozen, args, dynamic_shapes=_shapes(args), strict=strict)


def onnx(
    uq: LastLayerRigidity,
    path: str | os.PathLike[str],
    example: Tensor | tuple[Any, ...],
    *,
    outputs: Sequence[str] = ("mean", "std"),
    opset: int | None = None,
    **options: Any,
) -> None:
    """Write one ONNX file, checked in onnxruntime before it is moved into its place.

    Inputs have the names of the model's, outputs those that are asked for. The numbers are
    compared with those of `uq.freeze()` for the example, one row of it, and more rows.

    Args:
        uq: fitted, and calibrated if its bars are to mean something.
        path: of the file; one that stands there is replaced if all went well.
        example: an input of the model, or a tuple of its inputs.
        outputs: as in `freeze`.
        opset: of ONNX; torch's default by default.
        options: others of `freeze`.

    Raises:
        ImportError: a package is missing.
        RuntimeError: PyTorch is older than 2.7.
        ValueError: `freeze` refuses, a graph cannot hold what is asked, the file would be too
            large, or its numbers differ.
    """
    require_torch("2.7", "ONNX")
    if missing := [name for name in _NEEDS if importlib.util.find_spec(name) is None]:
        raise ImportError(f"ONNX needs {missing[0]}: {extra('onnx')}.")
    frozen, args = uq.freeze(outputs, largest_rounding=TOLERANCE, **options), _inputs(example)
    size = sum(tensor.nbytes for tensor in frozen.state_dict().values())
    if size > LARGEST:
        what = f"The graph would take {size / 1e9:.1f} GB, and an ONNX file holds 2 at most"
        raise ValueError(f"{what}. Pass rank= for smaller statistics, or take torch_export.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        warnings.filterwarnings("ignore", "# The axis name")  # of two inputs with as many rows
        chosen: dict[str, Any] = {"dynamic_shapes": _shapes(args), "opset_version": opset}
        chosen |= {"input_names": _input_names(uq, args), "output_names": list(frozen.outputs)}
        program = torch.onnx.export(frozen, args, dynamo=True, verbose=False, **chosen)
    assert program is not None
    _allow_no_rows(program.model)
    program.model.metadata_props["rigidities"] = json.dumps(metadata(uq, frozen))
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        program.save(beside, external_data=False)
        _check_numbers(uq, frozen, beside, args)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def metadata(uq: LastLayerRigidity, frozen: Frozen) -> dict[str, Any]:
    """What stands in the ONNX file as JSON, under the key `rigidities` of its metadata.

    Beside what the calibration chose: `error` and `rounding` of the variance; `epistemic_q99`, far
    above which an input is unfamiliar (`uq.familiar`; null where the fit kept no rows); and
    `conformal_tails` by level: the interval between the distribution's quantiles at tail / 2 and
    1 - tail / 2 covers that level (null without conformal rows). They are those of all conformal
    rows together, since a graph knows no groups; a tail of 0, of too few rows, is the whole line.
    """
    chosen, report = uq.calibration, uq.report
    tails = chosen.conformal and {
        str(level): chosen.conformal.thresholds(level)[chosen.conformal.place[:, -1]].tolist()
        for level in LEVELS
    }
    return {
        "library": __version__,
        "criterion": None if report is None else report.criterion,
        "outputs": list(frozen.outputs),
        "quantiles": list(frozen.levels),
        "support": None,
        **chosen.header(),
        "scale": chosen.scale.tolist(),
        "noise_level": chosen.noise.level.tolist(),
        "error": frozen.error,
        "rounding": frozen.rounding,
        "epistemic_q99": uq.familiar(),
        "conformal_tails": tails,
    }


def _inputs(example: Any) -> tuple[Any, ...]:
    """The inputs, with two rows at least: of one, a graph for one row would be made."""
    args = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    if not _tensors(args) or any(not arg.ndim for arg in _tensors(args)):
        raise ValueError("example must be a tensor of rows, or a tuple of the model's inputs.")
    return _rows(args, 2) if all(len(arg) == 1 for arg in _tensors(args)) else args


def _shapes(args: tuple[Any, ...]) -> Any:
    """The first dimension of each tensor is free; those of one size are the batch."""
    batch, rows = torch.export.Dim("batch"), len(_tensors(args)[0])
    shapes: list[dict[int, Any] | None] = []
    for arg in args:
        if not isinstance(arg, Tensor):
            shapes.append(None)
        elif len(arg) == rows:
            shapes.append({0: batch})
        else:
            require_torch("2.6", "A program of inputs with different numbers of rows")
            shapes.append({0: torch.export.Dim.AUTO})
    return (tuple(shapes),)


def _rows(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """So many rows of each tensor, again from the first where there are fewer."""
    taken = torch.arange(count)
    return tuple(a[taken.to(a.device) % len(a)] if isinstance(a, Tensor) else a for a in args)


def _input_names(uq: LastLayerRigidity, args: tuple[Any, ...]) -> list[str]:
    known = [] if uq.feed.format.whole else uq.readout.input_names
    tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    return [known[i] if i < len(known) else f"input{i}" for i in tensors]


def _allow_no_rows(model: Any) -> None:
    """Give every reduction of a graph the right shape for a batch of no rows.

    onnxruntime leaves the shape of a tensor without entries as it is: of (0, 33) the sum over the
    last axis is (0, 33), not (0,), and an operator further on refuses it or ends the process. A
    reshape after the reduction mends that, and does nothing where there are rows.

    Args:
        model: of onnx_ir, as torch exports it; changed in place.
    """
    import onnx_ir

    for node in list(model.graph.all_nodes()):
        if node.domain != "" or not node.op_type.startswith("Reduce"):
            continue
        dimensions = _reduced_dimensions(node)
        if dimensions is None:
            continue
        (reduced,) = node.outputs
        target = onnx_ir.tensor(dimensions, dtype=onnx_ir.DataType.INT64)
        shape = onnx_ir.node("Constant", [], {"value": target})
        reshaped = onnx_ir.node("Reshape", [reduced, shape.outputs[0]])
        reshaped.outputs[0].shape = reduced.shape
        reshaped.outputs[0].type = reduced.type
        consumers = [(user, i) for user, i in reduced.uses() if user is not reshaped]
        node.graph.insert_after(node, [shape, reshaped])
        for user, i in consumers:
            user.replace_input_with(i, reshaped.outputs[0])
        for i, output in enumerate(node.graph.outputs):
            if output is reduced:
                reshaped.outputs[0].name, reduced.name = reduced.name, f"{reduced.name}_reduced"
                node.graph.outputs[i] = reshaped.outputs[0]


def _reduced_dimensions(node: Any) -> list[int] | None:
    """What a reduction's output is reshaped to, 0 for a dimension as it is; None where it stays.

    It stays where all dimensions are fixed, so that there are always rows, and where a free one is
    reduced or stands behind one that is: its place differs with and without rows.
    """
    whole, found = node.inputs[0].shape, node.outputs[0].shape
    if whole is None or found is None or all(isinstance(size, int) for size in whole):
        return None
    axes = node.attributes["axes"].as_ints() if "axes" in node.attributes else None
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        known = node.inputs[1].const_value
        axes = None if known is None else known.numpy().tolist()
    if axes is None:
        return None
    first = min(axis % len(whole) for axis in axes)
    if any(not isinstance(whole[axis], int) for axis in axes):
        return None
    if any(not isinstance(size, int) for size in list(found)[first:]):
        return None
    return [size if isinstance(size, int) else 0 for size in found]


def _check_numbers(uq: LastLayerRigidity, frozen: Frozen, path: Path, args: Any) -> None:
    """The file against the module: for the example, one row of it, and more rows."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names, rows = [one.name for one in session.get_inputs()], [len(t) for t in _tensors(args)]
    kinds = [t.dtype for t in _tensors(args) if t.is_floating_point()] or [torch.float32]
    loosest = max(TOLERANCE, *(rounding_bound(uq.posterior, kind) for kind in kinds))
    trials = [args]
    if len({*rows}) == 1:  # else rows of one belong to rows of another
        trials += [_rows(args, 1), _rows(args, 2 * rows[0] + 1)]
    sizes = _sizes(_outputs(frozen, args))
    for given in trials:
        feed = zip(names, (t.detach().cpu().numpy() for t in _tensors(given)), strict=True)
        results = dict(zip(frozen.outputs, session.run(None, dict(feed)), strict=True))
        if frozen.loses_members:
            results.pop("members", None)
        exact = _outputs(frozen, given)
        for name, off in _differences(exact, results, sizes).items():
            allowed = TOLERANCE if name == "mean" else loosest
            if not off <= allowed:  # seldom: the measurement takes a copy of the model
                allowed += ROUNDINGS * _rounding(frozen, given, sizes).get(name, 0.0)
            if not off <= allowed:
                raise ValueError(
                    f"onnxruntime gives another {name} than torch: by {off:.2g} of its size, with "
                    f"{allowed:.2g} allowed. Nothing was written. Try another opset=, a model in "
                    "float64, or torch_export."
                )


def _outputs(frozen: Frozen, given: tuple[Any, ...]) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(zip(frozen.outputs, frozen(*given), strict=True))


def _sizes(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Root mean square over rows of each output, entry by entry; no less than the error bar's.

    Single values may lie near zero, where rounding is large beside them.
    """
    sizes = {}
    for name, values in outputs.items():
        values = values.double()
        squares = torch.where(values.isfinite(), values, 0.0).square()
        rows = 1 if name in ("quantiles", "members") else 0  # these have levels or members first
        sizes[name] = squares.mean(rows, keepdim=True).sqrt()
    spread = sizes.get("std")
    for name, size in sizes.items():
        if spread is not None:
            part = spread.square() if name in ("epistemic", "noise") else spread
            size = torch.maximum(size, part)
        sizes[name] = size.clamp(min=1e-30)
    return sizes


def _differences(
    exact: dict[str, Tensor], found: dict[str, Any], sizes: dict[str, Tensor]
) -> dict[str, float]:
    """The largest difference of each output, relative to its size."""
    off = {}
    for name, values in found.items():
        got, own = torch.as_tensor(values).to(exact[name]).double(), exact[name].double()
        alike = (got == own) | (got.isnan() & own.isnan())  # infinities too
        apart = (got - own).abs() / sizes[name]
        off[name] = float(torch.where(alike, 0.0, apart.nan_to_num(math.inf)).max())
    return off


def _rounding(frozen: Frozen, given: tuple[Any, ...], sizes: dict[str, Tensor]) -> dict[str, float]:
    """How far the frozen module's outputs on this processor lie from those of a float64 copy.

    Relative to the outputs' sizes. Empty where the model does not run in float64.
    """
    wide = tuple(
        arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg
        for arg in given
    )
    try:
        exact = _outputs(copy.deepcopy(frozen).double(), wide)
    except Exception:  # whatever a model raises that knows float32 alone
        return {}
    return _differences(exact, _outputs(frozen, given), sizes)


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor)]
