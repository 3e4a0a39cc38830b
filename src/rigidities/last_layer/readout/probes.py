"""A few inputs of the fit and the model's outputs for them, by which a changed model is told.

A fingerprint knows weights and buffers alone. What else makes a prediction (a factor in an
attribute, another activation, statistics in a plain tensor) shows in the outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ...data.batches import Batch
from ...models.calling import Source
from ...models.modes import differentiating
from ...models.shadow import Watch, placement, shadow
from ...notices import notify

ROWS = 8
LARGEST, LARGEST_HELD = 1 << 20, 1 << 26
"""Bytes of inputs to keep at most, in a file and in memory."""
RANDOM = (
    "Two passes of the model over the same inputs differ: is a dropout always on, or does the "
    "forward pass draw random numbers or keep a state? Its mean and error bars are those of one "
    "such pass."
)

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Probes:
    """Inputs, and what the model gave for them.

    Attributes:
        inputs: positional and keyword inputs, for `ROWS` samples where they can be cut.
        output: of the model in eval mode, float64 on the CPU.
        digits: the coarsest relative precision on the way to the output.
        renewed: attributes that a pass of the model sets itself; see `Watch`.
    """

    inputs: _Inputs
    output: Tensor
    dtype: torch.dtype
    digits: float
    renewed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, source: Source, batch: Batch) -> Probes | None:
        """Of a first batch; None where it cannot be copied, or the model is random, with a warning.

        A model is random where two passes over the same inputs differ.
        """
        whole: _Inputs = (batch.args, batch.kwargs)
        dtype = placement(model)[1]
        for inputs in (_few(whole), whole):
            if sum(leaf.nbytes for leaf in _tensors(inputs)) > LARGEST_HELD:
                return None
            try:
                kept, twin = _placed(inputs, torch.device("cpu")), shadow(model)
                before = Watch(twin)
                first, second = (_outputs(twin, source, kept, dtype) for _ in range(2))
            except Exception:  # not cut as the model wants it, or not to be copied
                continue
            renewed = frozenset(before.renewed(Watch(twin)))
            probes = cls(kept, first.double().cpu(), dtype, _digits(model, first), renewed)
            if probes._off(first, second, probes.digits):
                notify(RANDOM)
                return None
            return probes
        return None

    def placed(self, model: nn.Module) -> _Inputs:
        """The inputs on the model's device and in its precision."""
        return _placed(self.inputs, *placement(model), only=self.dtype)

    def difference(self, model: nn.Module, source: Source) -> float:
        """How far the model's outputs are from those kept; zero within what rounding explains."""
        try:
            now = _outputs(shadow(model), source, self.inputs, self.dtype)
            digits = max(self.digits, _digits(model, now))
            off = self._off(self.output, now, digits)
            again = _outputs(shadow(model), source, self.inputs, self.dtype) if off else now
        except Exception:  # kept inputs that this device or precision does not take
            return 0.0
        if off and self._off(now, again, digits):
            notify(RANDOM)
            return 0.0
        return off

    def _off(self, kept: Tensor, output: Tensor, digits: float) -> float:
        """The largest deviation, if it is more than rounding (TF32 included) may bring."""
        if kept.shape != output.shape:
            return math.inf
        kept, output = (t.double().cpu().reshape(len(t), -1) for t in (kept, output))
        size = kept.abs().amax(0)
        # Relative to the spread between samples: an offset tells nothing of the digits lost.
        spread = kept.std(0, correction=0) if len(kept) > 3 else size
        allowed = spread * min(0.1, 30 * digits**0.5) + size * min(0.05, 1000 * digits)
        apart = (output - kept).abs().masked_fill(kept.isnan() & output.isnan(), 0.0)
        return 0.0 if bool((apart <= allowed).all()) else float(apart.max())

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
        own = sorted(self.renewed)
        header = {"inputs": inputs, "dtype": dtype, "digits": self.digits, "renewed": own}
        return header, {"output": self.output} | {f"{i}": t for i, t in enumerate(tensors)}

    @classmethod
    def from_state(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Probes:
        """The probes that `state` came from."""
        args, kwargs = _unpacked(header["inputs"], tensors)
        dtype: torch.dtype = getattr(torch, header["dtype"])
        renewed = frozenset(header["renewed"])
        return cls((args, kwargs), tensors["output"], dtype, float(header["digits"]), renewed)


def _tensors(inputs: _Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _few(inputs: _Inputs) -> _Inputs:
    leaves = _tensors(inputs)
    if len({leaf.shape[:1] for leaf in leaves}) != 1 or not leaves[0].ndim:
        return inputs
    return cast("_Inputs", tree_map_only(Tensor, lambda t: t[:ROWS].clone(), inputs))


def _placed(inputs: _Inputs, *where: Any, only: torch.dtype | None = None) -> _Inputs:
    """A copy on a device; in a precision too where the tensors have the one that is given."""

    def placed(value: Any) -> Any:
        if not callable(getattr(value, "to", None)):
            return value
        known = isinstance(value, Tensor) and value.dtype == only
        moved = value.to(*(where if known else where[:1]))
        return value if moved is None else moved

    return cast("_Inputs", tree_map(placed, copy.deepcopy(inputs)))


@differentiating
def _outputs(twin: nn.Module, source: Source, inputs: _Inputs, dtype: torch.dtype) -> Tensor:
    args, kwargs = _placed(inputs, *placement(twin), only=dtype)
    return source.run(twin, args, kwargs).detach()


def _digits(model: nn.Module, output: Tensor) -> float:
    kinds = {t.dtype for t in (*model.parameters(), output) if t.is_floating_point()}
    kind = output.device.type
    if torch.is_autocast_enabled(kind):
        kinds.add(torch.get_autocast_dtype(kind))
    return max(torch.finfo(dtype).eps for dtype in kinds)


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    """A structure as JSON holds it, its tensors apart."""
    if isinstance(value, Tensor):
        tensors.append(value.clone())  # some may share memory, which no file holds
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
