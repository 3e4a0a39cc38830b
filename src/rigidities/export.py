"""Export of mean and error bar as one graph: an ONNX file, or a program of `torch.export`.

Both are made from `uq.freeze()`, for any number of rows. ONNX needs PyTorch 2.7 and the extra
`onnx`; `torch.export` needs 2.7 only if the readout is scaled, summed or reordered. The ONNX file
also describes the calibration, see `metadata`. Before the file is moved into place, onnxruntime
runs it, and its numbers are compared with those of the frozen module.
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

__all__ = ["metadata", "onnx", "torch_export"]


def __dir__() -> list[str]:
    return sorted(__all__)


TOLERANCE = 1e-5
"""Largest difference between the file's numbers and the frozen module's, relative to their size."""

ROUNDINGS = 4.0
"""A larger difference is allowed up to this many times the rounding of the frozen module itself."""

LARGEST = 1.9e9
"""Most bytes of tensors in an ONNX file."""

LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Levels of intervals whose conformal tails are stored in the metadata."""

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
        uq: Fitted, and calibrated if its bars are to mean something.
        example: An input of the model, or a tuple of its inputs.
        outputs: As in `freeze`.
        strict: As in `torch.export.export`; for plain readouts only.
        options: Other options of `freeze`.

    Returns:
        The program.

    Raises:
        ValueError: `freeze` refuses, or a graph cannot hold what is asked.
        RuntimeError: PyTorch is older than 2.7, and the readout is scaled, summed or reordered.
    """
    frozen = uq.freeze(outputs, **options)
    args = _example_inputs(example)
    if isinstance(frozen.readout, LinearCopy):
        require_torch("2.7", "Export of a readout that is scaled, summed or reordered")
    if strict and isinstance(frozen.readout, LinearCopy):
        raise ValueError(
            "A strict export does not support this model's readout: its output is scaled, summed "
            "or reordered, so its features come from torch.vmap. Pass strict=False."
        )
    return torch.export.export(frozen, args, dynamic_shapes=_dynamic_shapes(args), strict=strict)


def onnx(
    uq: LastLayerRigidity,
    path: str | os.PathLike[str],
    example: Tensor | tuple[Any, ...],
    *,
    outputs: Sequence[str] = ("mean", "std"),
    opset: int | None = None,
    **options: Any,
) -> None:
    """Write one ONNX file, which onnxruntime checks before it is moved into place.

    Inputs have the names of the model's inputs, and outputs those of `outputs`. The numbers are
    compared with those of `uq.freeze()` for the example, for one row of it, and for more rows.

    Args:
        uq: Fitted, and calibrated if its bars are to mean something.
        path: The file; an existing one is replaced only if the check succeeds.
        example: An input of the model, or a tuple of its inputs.
        outputs: As in `freeze`.
        opset: The ONNX opset; by default that of torch.
        options: Other options of `freeze`.

    Raises:
        ImportError: A package is missing.
        RuntimeError: PyTorch is older than 2.7.
        ValueError: `freeze` refuses, a graph cannot hold what is asked, the file would be too
            large, or its numbers differ.
    """
    require_torch("2.7", "ONNX")
    for package in _NEEDS:
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"ONNX needs {package}: {extra('onnx')}.")
    frozen = uq.freeze(outputs, largest_rounding=TOLERANCE, **options)
    args = _example_inputs(example)
    size = sum(tensor.nbytes for tensor in frozen.state_dict().values())
    if size > LARGEST:
        raise ValueError(
            f"The graph would need {size / 1000000000.0:.1f} GB, but an ONNX file can contain at "
            "most 2 GB. Pass rank= for smaller statistics, or use torch_export."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        warnings.filterwarnings("ignore", "# The axis name")  # of two inputs with as many rows
        program = torch.onnx.export(
            frozen,
            args,
            dynamo=True,
            verbose=False,
            dynamic_shapes=_dynamic_shapes(args),
            opset_version=opset,
            input_names=_input_names(uq, args),
            output_names=list(frozen.outputs),
        )
    assert program is not None
    _allow_no_rows(program.model)
    program.model.metadata_props["rigidities"] = json.dumps(metadata(uq, frozen))
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        program.save(temporary, external_data=False)
        _check_numbers(uq, frozen, temporary, args)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def metadata(uq: LastLayerRigidity, frozen: Frozen) -> dict[str, Any]:
    """The contents of the ONNX file's metadata under the key `rigidities`, stored as JSON.

    Besides the results of the calibration, they contain:

    - `error` and `rounding` of the variance;
    - `epistemic_q99`; an input with an epistemic variance far above it is unfamiliar
      (`uq.familiar`; null if the fit kept no rows);
    - `conformal_tails` by level: the interval between the distribution's quantiles at tail / 2 and
      1 - tail / 2 covers that level (null without conformal rows). The tails are those of all
      conformal rows together, because a graph has no groups. With too few rows a tail is 0, and the
      interval is the whole line.
    """
    calibration = uq.calibration
    conformal = calibration.conformal
    tails = None
    if conformal is not None:
        # The last place is for all rows, whatever their group.
        places = conformal.place[:, -1]
        tails = {str(level): conformal.thresholds(level)[places].tolist() for level in LEVELS}
    report = uq.calibration_report
    return {
        "library": __version__,
        "criterion": None if report is None else report.criterion,
        "outputs": list(frozen.outputs),
        "quantiles": list(frozen.levels),
        "support": None,
        **calibration.header(),  # with the support, where there is one
        "scale": calibration.scale.tolist(),
        "noise_level": calibration.noise.level.tolist(),
        "error": frozen.error,
        "rounding": frozen.rounding,
        "epistemic_q99": uq.familiar(),
        "conformal_tails": tails,
    }


def _example_inputs(example: Any) -> tuple[Any, ...]:
    """The inputs of an example, with at least two rows: from one, the graph would be for one row.

    Raises:
        ValueError: The example holds no tensors with rows.
    """
    args = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    tensors = _tensors(args)
    if not tensors or any(not tensor.ndim for tensor in tensors):
        raise ValueError("example must be a tensor of rows, or a tuple of the model's inputs.")
    if all(len(tensor) == 1 for tensor in tensors):
        return _with_rows(args, 2)
    return args


def _dynamic_shapes(args: tuple[Any, ...]) -> Any:
    """Shapes for the export, in which the first dimension of each tensor is free.

    Tensors with as many rows as the first share the dimension of the batch.
    """
    batch = torch.export.Dim("batch")
    rows = len(_tensors(args)[0])
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


def _with_rows(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Inputs with `count` rows in each tensor; rows are repeated where there are fewer."""
    numbers = torch.arange(count)
    inputs = []
    for arg in args:
        if isinstance(arg, Tensor):
            arg = arg[numbers.to(arg.device) % len(arg)]
        inputs.append(arg)
    return tuple(inputs)


def _input_names(uq: LastLayerRigidity, args: tuple[Any, ...]) -> list[str]:
    """Names of the tensors among the inputs: those of the model's `forward`, as far as known."""
    forward_names = [] if uq.feed.format.whole else uq.readout.input_names
    names = []
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            names.append(forward_names[i] if i < len(forward_names) else f"input{i}")
    return names


def _allow_no_rows(model: Any) -> None:
    """Give every reduction of a graph the right shape for a batch without rows.

    onnxruntime does not reduce the shape of a tensor without entries: the sum of a tensor (0, 33)
    over the last axis is (0, 33), not (0,), and a later operator refuses it or ends the process. A
    reshape after the reduction corrects that, and does nothing where there are rows.

    Args:
        model: A model of onnx_ir, as torch exports it; changed in place.
    """
    import onnx_ir

    for node in list(model.graph.all_nodes()):
        if node.domain != "" or not node.op_type.startswith("Reduce"):
            continue
        dimensions = _reduced_dimensions(node)
        if dimensions is None:
            continue
        (reduced,) = node.outputs
        target_shape = onnx_ir.tensor(dimensions, dtype=onnx_ir.DataType.INT64)
        constant = onnx_ir.node("Constant", [], {"value": target_shape})
        reshape = onnx_ir.node("Reshape", [reduced, constant.outputs[0]])
        (reshaped,) = reshape.outputs
        reshaped.shape = reduced.shape
        reshaped.type = reduced.type
        consumers = [(user, i) for user, i in reduced.uses() if user is not reshape]
        node.graph.insert_after(node, [constant, reshape])
        for user, i in consumers:
            user.replace_input_with(i, reshaped)
        for i, output in enumerate(node.graph.outputs):
            if output is reduced:
                # The output of the graph keeps its name.
                reshaped.name = reduced.name
                reduced.name = f"{reduced.name}_reduced"
                node.graph.outputs[i] = reshaped


def _reduced_dimensions(node: Any) -> list[int] | None:
    """The shape to give to a reduction's output, 0 for an unchanged dimension; None for no reshape.

    There is no reshape where all dimensions are fixed, so that there are always rows. There is none
    either where a free dimension is reduced or follows one that is: its place would differ with and
    without rows.
    """
    shape = node.inputs[0].shape
    reduced_shape = node.outputs[0].shape
    if shape is None or reduced_shape is None or all(isinstance(size, int) for size in shape):
        return None
    axes = _reduced_axes(node)
    if axes is None or any(not isinstance(shape[axis], int) for axis in axes):
        return None
    first = min(axis % len(shape) for axis in axes)
    if any(not isinstance(size, int) for size in list(reduced_shape)[first:]):
        return None
    return [size if isinstance(size, int) else 0 for size in reduced_shape]


def _reduced_axes(node: Any) -> list[int] | None:
    """The axes of a reduction, which newer opsets pass as an input; None where they are unknown."""
    if "axes" in node.attributes:
        axes: list[int] | None = node.attributes["axes"].as_ints()
        if axes is not None:
            return axes
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    constant = node.inputs[1].const_value
    return None if constant is None else constant.numpy().tolist()


def _check_numbers(uq: LastLayerRigidity, frozen: Frozen, path: Path, args: Any) -> None:
    """Compare the file with the module: for the example, for one row of it, and for more rows.

    Raises:
        ValueError: Some numbers differ by more than rounding explains.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [session_input.name for session_input in session.get_inputs()]
    tensors = _tensors(args)
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    bounds = [rounding_bound(uq.posterior, dtype) for dtype in dtypes or [torch.float32]]
    loosest = max(TOLERANCE, *bounds)
    trials = [args]
    rows = [len(tensor) for tensor in tensors]
    if len(set(rows)) == 1:  # else rows of one input refer to rows of another
        trials.append(_with_rows(args, 1))
        trials.append(_with_rows(args, 2 * rows[0] + 1))
    sizes = _sizes(_outputs(frozen, args))
    for trial in trials:
        arrays = [tensor.detach().cpu().numpy() for tensor in _tensors(trial)]
        results = session.run(None, dict(zip(names, arrays, strict=True)))
        from_file = dict(zip(frozen.outputs, results, strict=True))
        if frozen.loses_members:
            from_file.pop("members", None)
        exact = _outputs(frozen, trial)
        for name, difference in _differences(exact, from_file, sizes).items():
            allowed = TOLERANCE if name == "mean" else loosest
            # `not <=`, so that NaN is refused too.
            if not difference <= allowed:
                # Only now, since the measurement takes a copy of the model.
                allowed += ROUNDINGS * _rounding(frozen, trial, sizes).get(name, 0.0)
            if not difference <= allowed:
                raise ValueError(
                    f"onnxruntime gives another {name} than torch: the relative difference is "
                    f"{difference:.2g}, and {allowed:.2g} is allowed. Nothing was written. Try "
                    "another opset=, a model in float64, or torch_export."
                )


def _outputs(frozen: Frozen, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """The outputs of the frozen module, by name."""
    with torch.no_grad():
        return dict(zip(frozen.outputs, frozen(*args), strict=True))


def _sizes(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Root mean square of each output over the rows, at least that of the error bar.

    Single values may be near zero, where rounding is relatively large.
    """
    sizes = {}
    for name, values in outputs.items():
        values = values.double()
        squares = torch.where(values.isfinite(), values, 0.0).square()
        rows = 1 if name in ("quantiles", "members") else 0  # these have levels or members first
        sizes[name] = squares.mean(rows, keepdim=True).sqrt()
    bar = sizes.get("std")
    for name, size in sizes.items():
        if bar is not None:
            # Epistemic part and noise are variances.
            smallest = bar.square() if name in ("epistemic", "noise") else bar
            size = torch.maximum(size, smallest)
        sizes[name] = size.clamp(min=1e-30)
    return sizes


def _differences(
    exact: dict[str, Tensor], results: dict[str, Any], sizes: dict[str, Tensor]
) -> dict[str, float]:
    """The largest difference of each output, relative to its size.

    Args:
        exact: The outputs to compare with.
        results: The outputs to judge, as tensors or arrays; some may be missing.
        sizes: As `_sizes` gives them.
    """
    differences = {}
    for name, values in results.items():
        result = torch.as_tensor(values).to(exact[name]).double()
        expected = exact[name].double()
        # Equal infinities, and NaN in both, are no difference.
        equal = (result == expected) | (result.isnan() & expected.isnan())
        relative = (result - expected).abs() / sizes[name]
        relative = torch.where(equal, 0.0, relative.nan_to_num(math.inf))
        differences[name] = float(relative.max())
    return differences


def _rounding(frozen: Frozen, args: tuple[Any, ...], sizes: dict[str, Tensor]) -> dict[str, float]:
    """The differences between the frozen module's outputs here and those of a float64 copy.

    They are relative to the outputs' sizes. Empty where the model does not run in float64.
    """
    double_args = []
    for arg in args:
        if isinstance(arg, Tensor) and arg.is_floating_point():
            arg = arg.double()
        double_args.append(arg)
    try:
        exact = _outputs(copy.deepcopy(frozen).double(), tuple(double_args))
    except Exception:  # a model that supports only float32 may raise anything
        return {}
    return _differences(exact, _outputs(frozen, args), sizes)


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among some inputs."""
    return [arg for arg in args if isinstance(arg, Tensor)]
