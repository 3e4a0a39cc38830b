"""A few inputs of the fit and the model's outputs for them, by which a changed model is told.

A fingerprint knows weights and buffers alone. What else makes a prediction (a factor in an
attribute, another activation, statistics in a plain tensor) shows in the outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ...data.batches import Batch
from ...models.calling import Source
from ...models.modes import differentiating
from ...models.shadow import placement, shadow
from ...notices import notify, require

ROWS = 8
LARGEST = 1 << 20
"""Bytes of inputs to keep in a file at most."""

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Probes:
    """Inputs, and what the model gave for them.

    Attributes:
        inputs: positional and keyword inputs, for `ROWS` samples where they can be cut.
        output: of the model in eval mode, float64 on the CPU.
        dtype: of the model then.
        digits: the coarsest relative precision on the way to the output.
    """

    inputs: _Inputs
    output: Tensor
    dtype: torch.dtype
    digits: float

    @classmethod
    def of(cls, model: nn.Module, source: Source, batch: Batch) -> Probes | None:
        """Of a first batch; None where it cannot be copied, or the model is random, with a warning.

        A model is random where two passes over the same inputs differ.
        """
        whole: _Inputs = (batch.args, batch.kwargs)
        dtype = placement(model)[1]
        for inputs in (_few(whole), whole):
            try:
                kept = copy.deepcopy(inputs)
                first, second = (_outputs(model, source, kept, dtype) for _ in range(2))
            except Exception:  # not cut as the model wants it, or not to be copied
                continue
            probes = cls(kept, first, dtype, _digits(model, first))
            off = probes._off(second, probes.digits)
            if not off <= 1:
                notify(
                    "Two passes of the model over the same inputs differ, by up to "
                    f"{float((first - second).abs().max()):.2g}: is a dropout always on, or does "
                    "the forward pass draw random numbers or keep a state? Its mean and error bars "
                    "are those of one such pass."
                )
                return None
            return replace(probes, output=first.double().cpu())
        return None

    def difference(self, model: nn.Module, source: Source) -> float:
        """How far the model's outputs are from those kept; zero within what rounding explains."""
        try:
            now = _outputs(model, source, self.inputs, self.dtype)
        except Exception:  # kept inputs that this device or precision does not take
            return 0.0
        if now.shape != self.output.shape:
            return math.inf
        off = self._off(now, max(self.digits, _digits(model, now)))
        return 0.0 if off <= 1 else float((now.double().cpu() - self.output).abs().max())

    def _off(self, output: Tensor, digits: float) -> float:
        """The largest deviation in units of what rounding (TF32 included) may bring; NaN for NaN.

        Relative to the spread between samples, since an offset tells nothing of the digits lost.
        """
        kept, output = (t.double().cpu().reshape(len(t), -1) for t in (self.output, output))
        spread = kept.std(0, correction=0) * min(0.1, 30 * digits**0.5)
        allowed = spread + kept.abs().amax(0) * min(0.05, 1000 * digits)
        both_nan = kept.isnan() & output.isnan()
        off = (output - kept).abs() / allowed.clamp(min=1e-300)
        return float(off.masked_fill(both_nan, 0.0).max())

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """For a file; None where the inputs are too large, or no tensors and plain values."""
        tensors: list[Tensor] = []
        try:
            inputs = _packed(list(self.inputs), tensors)
        except TypeError:
            return None
        if sum(tensor.nbytes for tensor in tensors) > LARGEST:
            return None
        dtype = str(self.dtype).removeprefix("torch.")
        header = {"inputs": inputs, "dtype": dtype, "digits": self.digits}
        return header, {"output": self.output} | {f"{i}": t for i, t in enumerate(tensors)}

    @classmethod
    def from_state(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Probes:
        """The probes that `state` came from; refused where they came from none."""
        inputs, output = _unpacked(header["inputs"], tensors), tensors["output"]
        dtype: Any = getattr(torch, header["dtype"], None)
        pair = isinstance(inputs, list) and [type(each) for each in inputs] == [tuple, dict]
        known = isinstance(dtype, torch.dtype) and 0 < header["digits"] < 1
        require(pair and known and output.dtype == torch.float64, "the probes")
        return cls((inputs[0], inputs[1]), output, dtype, float(header["digits"]))


def _few(inputs: _Inputs) -> _Inputs:
    """The first rows, where all tensors have as many."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if len({leaf.shape[:1] for leaf in leaves}) != 1 or not leaves[0].ndim:
        return inputs
    few: _Inputs = tree_map_only(Tensor, lambda t: t[:ROWS].clone(), inputs)
    return few


@differentiating
def _outputs(model: nn.Module, source: Source, inputs: _Inputs, dtype: torch.dtype) -> Tensor:
    """Of the model as it is now, in eval mode, on its device and in its precision."""
    device, now = placement(model)

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == dtype:
            return value.to(device, now)
        moved = value.to(device) if callable(getattr(value, "to", None)) else None
        return value if moved is None else moved

    args, kwargs = tree_map(placed, copy.deepcopy(inputs))
    return source.run(shadow(model), args, kwargs).detach()


def _digits(model: nn.Module, output: Tensor) -> float:
    """The coarsest precision of weights, output and autocast."""
    kinds = {t.dtype for t in (*model.parameters(), output) if t.is_floating_point()}
    kind = output.device.type
    if torch.is_autocast_enabled(kind):
        kinds.add(torch.get_autocast_dtype(kind))
    return max(torch.finfo(dtype).eps for dtype in kinds)


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    """A structure as JSON holds it, its tensors apart."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_packed(each, tensors) for each in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"mapping": {key: _packed(each, tensors) for key, each in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"A file does not hold a {type(value).__name__}.")


def _unpacked(spec: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(spec, dict):
        return spec
    ((kind, value),) = spec.items()
    if kind == "tensor":
        return tensors[str(value)]
    if kind == "mapping":
        return {key: _unpacked(each, tensors) for key, each in value.items()}
    members = [_unpacked(each, tensors) for each in value]
    return tuple(members) if kind == "tuple" else members
