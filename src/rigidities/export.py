"""Export of mean and error bar as one graph: an ONNX file, or a program of `torch.export`.

Both are made from `uq.freeze()`, for any number of rows. The inputs are those of the model, or the
tensors of a batch that the user's `forward` computes with. ONNX needs PyTorch 2.7 and the extra
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from ._version import __version__
from .data.sources import each_member
from .last_layer.doors import familiar_variance, feed_of
from .last_layer.frozen import Frozen
from .models.calling import Inputs, described
from .models.modes import require_torch
from .notices import extra
from .posterior.quadratic import rounding_bound
from .readout.copies import LinearCopy

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

_RECURRENT_WEIGHTS = r"The tensor attributes [^ ]*\._flat_weights"
"""A warning of torch in the export of any recurrent layer, about a list in that layer."""

_NEEDS = ("onnx", "onnxscript", "onnxruntime")


def torch_export(
    uq: LastLayerRigidity,
    example: Any,
    *,
    outputs: Sequence[str] = ("mean", "std"),
    strict: bool = False,
    **options: Any,
) -> torch.export.ExportedProgram:
    """The frozen module as a program for any number of rows.

    `program.module()` takes what the example shows: a tensor, several inputs, or a batch, without
    its target. If the fit has a `forward`, a batch also lacks all other tensors that `forward`
    leaves alone.

    Args:
        uq: Fitted, and calibrated if its bars are to mean something.
        example: An input of the model, or a tuple of its inputs. After a fit on mappings, or with
            `forward=`, a batch as in the fit, with or without the target.
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
    args, kwargs = _example_inputs(uq, frozen, example)
    if isinstance(frozen.readout, LinearCopy):
        require_torch("2.7", "Export of a readout that is scaled, summed or reordered")
    if strict and isinstance(frozen.readout, LinearCopy):
        raise ValueError(
            "A strict export does not support this model's readout: its output is scaled, summed "
            "or reordered, so its features come from torch.vmap. Pass strict=False."
        )
    module: nn.Module = frozen
    if kwargs:
        module = _WithEntries(frozen)
        args = (kwargs,)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _RECURRENT_WEIGHTS)
        return torch.export.export(
            module, args, dynamic_shapes=_dynamic_shapes(args), strict=strict
        )


def onnx(
    uq: LastLayerRigidity,
    path: str | os.PathLike[str],
    example: Any,
    *,
    outputs: Sequence[str] = ("mean", "std"),
    opset: int | None = None,
    **options: Any,
) -> None:
    """Write one ONNX file, which onnxruntime checks before it is moved into place.

    Inputs have the names of the model's inputs, or the keys and fields of a batch. Outputs have the
    names in `outputs`. The numbers are compared with those of `uq.freeze()` for the example, for
    one row of it, and for more rows.

    Args:
        uq: Fitted, and calibrated if its bars are to mean something.
        path: The file; an existing one is replaced only if the check succeeds.
        example: As in `torch_export`.
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
    inputs = _example_inputs(uq, frozen, example)
    size = sum(tensor.nbytes for tensor in frozen.state_dict().values())
    if size > LARGEST:
        raise ValueError(
            f"The graph would need {size / 1000000000.0:.1f} GB, but an ONNX file can contain at "
            "most 2 GB. Pass rank= for smaller statistics, or use torch_export."
        )
    tensors = tuple(_tensors(inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        warnings.filterwarnings("ignore", _RECURRENT_WEIGHTS)
        warnings.filterwarnings("ignore", "# The axis name")  # of two inputs with as many rows
        program = torch.onnx.export(
            _WithTensors(frozen, inputs),
            tensors,
            dynamo=True,
            verbose=False,
            dynamic_shapes=_dynamic_shapes(tensors),
            opset_version=opset,
            input_names=_input_names(uq, inputs),
            output_names=list(frozen.outputs),
        )
    assert program is not None
    _allow_no_rows(program.model)
    program.model.metadata_props["rigidities"] = json.dumps(metadata(uq, frozen))
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        program.save(temporary, external_data=False)
        _check_numbers(uq, frozen, temporary, inputs)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def metadata(uq: LastLayerRigidity, frozen: Frozen) -> dict[str, Any]:
    """The contents of the ONNX file's metadata under the key `rigidities`, stored as JSON.

    Besides the results of the calibration, they contain:

    - `error` and `rounding` of the variance;
    - `epistemic_q99`; an input with an epistemic variance far above it is unfamiliar
      (null if the fit kept no rows);
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
        "epistemic_q99": familiar_variance(uq),
        "conformal_tails": tails,
    }


def _example_inputs(uq: LastLayerRigidity, frozen: Frozen, example: Any) -> Inputs:
    """The inputs of an example, with at least two rows: from one, the graph would be for one row.

    Raises:
        ValueError: The example holds no tensors with rows, or something that no graph can take.
    """
    inputs = _handed(uq, example)
    for leaf in tree_leaves(inputs):
        if leaf is not None and not isinstance(leaf, (Tensor, bool, int, float, str)):
            raise ValueError(
                f"example contains a {type(leaf).__name__}, which a graph cannot take. Expected "
                "tensors, also in tuples, dicts, named tuples, or dataclasses that you have "
                "registered with torch.export.register_dataclass. Fit and export with such "
                "batches: forward=lambda m, b: m(b['x']), target=lambda b: b['y'] for "
                "{'x': ..., 'y': ...}."
            )
    rows = [len(tensor) for tensor in _tensors(inputs) if tensor.ndim]
    if not rows:
        raise ValueError(
            "example must be a tensor of rows, a tuple of the model's inputs, or a batch as in the "
            f"fit, got {described(example)}."
        )
    if {*rows} == {1}:
        inputs = _with_rows(inputs, 2)
    if feed_of(uq).format.whole:
        return _without_unused_tensors(uq, frozen, inputs)
    return inputs


def _handed(uq: LastLayerRigidity, example: Any) -> Inputs:
    """An example as positional inputs and inputs by keyword, as `uq` is called with them."""
    batch_format = feed_of(uq).format
    if isinstance(example, Mapping):
        if batch_format.whole or batch_format.kind != "mapping":
            return (dict(example),), {}
        (batch,) = feed_of(uq).unlabelled()([example], "export")
        return (), batch.kwargs
    is_named_tuple = hasattr(example, "_fields")
    if isinstance(example, (tuple, list)) and not (batch_format.whole and is_named_tuple):
        return tuple(example), {}
    return (example,), {}


class _UsedTensors(TorchFunctionMode):
    """A mode that remembers which tensors torch computes with or looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            # What gives the tensor itself, such as `to` its own device, does not use it.
            if isinstance(leaf, Tensor) and leaf is not result:
                self.ids.add(id(leaf))
        return result


def _without_unused_tensors(uq: LastLayerRigidity, frozen: Frozen, inputs: Inputs) -> Inputs:
    """A batch without the tensors that the user's `forward` leaves alone, such as the target.

    Entries of a dict and entries at the end of a tuple are left out, others become None. If
    `forward` does not run without them, for example since it unpacks the tuple, all entries
    become None. If it does not run with these either, the batch stays as it is.
    """
    _outputs(frozen, inputs)  # which describes the call if it fails
    run = frozen.readout.run
    batch = feed_of(uq).handed(*inputs)
    with torch.no_grad(), _UsedTensors() as used:
        run.source.traced(run.model, batch.args, batch.kwargs)
        if run.source.features is not None:
            run.source.features(run.model, *batch.args, **batch.kwargs)

    def used_or_none(tensor: Tensor) -> Tensor | None:
        return tensor if id(tensor) in used.ids else None

    with_nones = tree_map_only(Tensor, used_or_none, inputs)
    args = []
    for arg in with_nones[0]:
        if type(arg) is dict:
            arg = {key: value for key, value in arg.items() if value is not None}
        args.append(arg)
    while args and args[-1] is None:
        args.pop()
    trials: list[Inputs] = [(tuple(args), {}), with_nones]
    for trial in trials:
        try:
            _outputs(frozen, trial)
        except Exception:  # the user's function may raise anything
            continue
        return trial
    return inputs


class _WithEntries(nn.Module):
    """A frozen module that takes its keyword inputs as one dict.

    In an export, torch cannot leave the sizes of keyword inputs free.
    """

    def __init__(self, frozen: Frozen) -> None:
        super().__init__()
        self.frozen = frozen
        self.eval()

    def forward(self, *inputs: dict[str, Any]) -> Any:
        """The outputs for one dict."""
        return self.frozen(**inputs[0])


class _WithTensors(nn.Module):
    """A frozen module that takes the tensors of its inputs one by one, as an ONNX file does.

    Args:
        frozen: The frozen module.
        inputs: Example inputs. What is not a tensor in them is fixed.
    """

    def __init__(self, frozen: Frozen, inputs: Inputs) -> None:
        super().__init__()
        self.frozen = frozen
        leaves, self._structure = tree_flatten(inputs)
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.eval()

    def forward(self, *tensors: Tensor) -> Any:
        """The outputs for the tensors, in the order of the inputs."""
        remaining = list(tensors)
        leaves = []
        for is_tensor, fixed in zip(self._is_tensor, self._fixed, strict=True):
            leaves.append(remaining.pop(0) if is_tensor else fixed)
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self.frozen(*args, **kwargs)


def _dynamic_shapes(args: tuple[Any, ...]) -> Any:
    """Shapes for the export, in which the first dimension of each tensor is free.

    Tensors with as many rows as the first share the dimension of the batch.
    """
    batch = torch.export.Dim("batch")
    rows = next(len(tensor) for tensor in _tensors(args) if tensor.ndim)

    def shapes(value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.ndim:
                return None
            if len(value) == rows:
                return {0: batch}
            require_torch("2.6", "A program of inputs with different numbers of rows")
            return {0: torch.export.Dim.AUTO}
        if isinstance(value, (dict, tuple, list)):
            return each_member(value, shapes)
        fields = tree_leaves(value, is_leaf=lambda inner: inner is not value)
        if len(fields) == 1 and fields[0] is value:
            return None
        return [shapes(field) for field in fields]  # of a class that is registered with torch

    return (shapes(args),)


def _with_rows(inputs: Inputs, count: int) -> Inputs:
    """Inputs with `count` rows in each tensor; rows are repeated where there are fewer."""
    numbers = torch.arange(count)

    def rows(tensor: Tensor) -> Tensor:
        return tensor[numbers.to(tensor.device) % len(tensor)] if tensor.ndim else tensor

    repeated: Inputs = tree_map_only(Tensor, rows, inputs)
    return repeated


def _input_names(uq: LastLayerRigidity, inputs: Inputs) -> list[str]:
    """Names of the tensors among the inputs.

    They are those of the model's `forward`, as far as known, or the keys and fields in a batch.
    """
    args, kwargs = inputs
    forward_names = [] if feed_of(uq).format.whole else uq.readout.input_names
    names = []
    for i, arg in enumerate(args):
        input_name = forward_names[i] if i < len(forward_names) else f"input{i}"
        for path, leaf in tree_flatten_with_path(arg)[0]:
            if isinstance(leaf, Tensor):
                places = [str(_place(key)) for key in path]
                # Several arguments may have the same keys.
                is_named = len(args) == 1 and path and isinstance(_place(path[0]), str)
                names.append(".".join(places if is_named else [input_name, *places]))
    for path, leaf in tree_flatten_with_path(kwargs)[0]:
        if isinstance(leaf, Tensor):
            names.append(".".join(str(_place(key)) for key in path))
    return names


def _place(key: Any) -> Any:
    """What a step of a path into nested inputs goes by: a key, a field or an index."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


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


def _check_numbers(uq: LastLayerRigidity, frozen: Frozen, path: Path, inputs: Inputs) -> None:
    """Compare the file with the module: for the example, for one row of it, and for more rows.

    Raises:
        ValueError: Some numbers differ by more than rounding explains.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [session_input.name for session_input in session.get_inputs()]
    tensors = _tensors(inputs)
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    bounds = [rounding_bound(uq.posterior, dtype) for dtype in dtypes or [torch.float32]]
    loosest = max(TOLERANCE, *bounds)
    trials = [inputs]
    rows = [len(tensor) for tensor in tensors if tensor.ndim]
    if len(set(rows)) == 1:  # else rows of one input refer to rows of another
        _require_free_rows(session)
        trials.append(_with_rows(inputs, 1))
        trials.append(_with_rows(inputs, 2 * rows[0] + 1))
    sizes = _sizes(_outputs(frozen, inputs))
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


def _require_free_rows(session: Any) -> None:
    """Refuse a file whose inputs have a fixed number of rows.

    Raises:
        ValueError: They have.
    """
    for session_input in session.get_inputs():
        shape = session_input.shape
        if shape and isinstance(shape[0], int):
            raise ValueError(
                f"The file would accept batches of {shape[0]} rows only: in an export, torch fixes "
                "the number of rows in some operation of the model. Nothing was written. Write "
                "x.shape[0] instead of len(x), use torch.cat or torch.stack to join outputs, or "
                "let the model return the plain output of a linear layer."
            )


def _outputs(frozen: Frozen, inputs: Inputs) -> dict[str, Tensor]:
    """The outputs of the frozen module, by name."""
    args, kwargs = inputs
    with torch.no_grad():
        return dict(zip(frozen.outputs, frozen(*args, **kwargs), strict=True))


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


def _rounding(frozen: Frozen, inputs: Inputs, sizes: dict[str, Tensor]) -> dict[str, float]:
    """The differences between the frozen module's outputs here and those of a float64 copy.

    They are relative to the outputs' sizes. Empty where the model does not run in float64.
    """

    def in_double(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    double_inputs: Inputs = tree_map_only(Tensor, in_double, inputs)
    try:
        exact = _outputs(copy.deepcopy(frozen).double(), double_inputs)
    except Exception:  # a model that supports only float32 may raise anything
        return {}
    return _differences(exact, _outputs(frozen, inputs), sizes)


def _tensors(inputs: Any) -> list[Tensor]:
    """The tensors among some inputs, however nested."""
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
