"""Mean and error bar as one graph in a file: ONNX, or a program of `torch.export`.

Both are made of `uq.freeze()`, for any number of rows, and need PyTorch 2.7; ONNX needs
the extra `onnx`. The ONNX file says what was calibrated, see `metadata`.
"""

from __future__ import annotations

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
from .notices import extra
from .posterior.quadratic import rounding_bound

if TYPE_CHECKING:
    from .last_layer.rigidity import LastLayerRigidity

TOLERANCE = 1e-5
"""Largest relative difference between the file's numbers and the frozen module's."""
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
    """
    frozen, args = uq.freeze(outputs, **options), _inputs(example)
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
        ValueError: `freeze` refuses, a graph cannot hold what is asked, the file would be too
            large, or its numbers differ.
    """
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
    `conformal_tails` by level: the interval between the law's quantiles at tail / 2 and
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
    free = {True: {0: batch}, False: {0: torch.export.Dim.AUTO}}
    each = [free[len(arg) == rows] if isinstance(arg, Tensor) else None for arg in args]
    return (tuple(each),)


def _rows(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """So many rows of each tensor, again from the first where there are fewer."""
    taken = torch.arange(count)
    return tuple(a[taken.to(a.device) % len(a)] if isinstance(a, Tensor) else a for a in args)


def _input_names(uq: LastLayerRigidity, args: tuple[Any, ...]) -> list[str]:
    known = [] if uq.feed.whole else uq.readout.input_names
    tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    return [known[i] if i < len(known) else f"input{i}" for i in tensors]


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
    for given in trials:
        feed = zip(names, (t.detach().cpu().numpy() for t in _tensors(given)), strict=True)
        for name, off in _differences(frozen, session.run(None, dict(feed)), given).items():
            allowed = TOLERANCE if name == "mean" else loosest
            if not off <= allowed:
                raise ValueError(
                    f"onnxruntime gives another {name} than torch: by {off:.2g}, relative, with "
                    f"{allowed:.2g} allowed. Nothing was written. Try another opset=, a model in "
                    "float64, or torch_export."
                )


def _differences(frozen: Frozen, found: Sequence[Any], given: Any) -> dict[str, float]:
    """The largest difference of each output, relative to it and to what it is a part of."""
    with torch.no_grad():
        known = dict(zip(frozen.outputs, frozen(*given), strict=True))
    std, off = known.get("std"), {}
    for (name, exact), mine in zip(known.items(), found, strict=True):
        if name == "members" and frozen.loses_members:
            continue
        part = exact.abs().mean() if std is None else std
        part = part.square() if name in ("epistemic", "noise") and std is not None else part
        size = exact.abs() if name == "std" else torch.maximum(exact.abs(), part.to(exact))
        got = torch.as_tensor(mine).to(exact)
        apart = (got - exact).abs() / size.clamp(min=1e-30)
        alike = (got == exact) | (got.isnan() & exact.isnan())  # infinities too
        off[name] = float(torch.where(alike, 0.0, apart.nan_to_num(math.inf)).max())
    return off


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor)]
