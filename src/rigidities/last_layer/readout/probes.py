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

from ...models.calling import Inputs, Source, copied
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

_CONSTANTS = (bool, float, str, type(None))
"""Inputs beside tensors that are the same for any number of rows; an int may count them."""


@dataclass(frozen=True)
class FirstPass:
    """The pass that a readout was found with.

    Attributes:
        inputs: positional and keyword inputs, in memory of their own.
        output: of the model in eval mode, where it was computed.
        renewed: attributes that the pass set; see `Watch`.
    """

    inputs: Inputs
    output: Tensor
    renewed: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, source: Source, inputs: Inputs) -> FirstPass:
        """A pass of its own, where no search has made one."""
        inputs, twin = copied(inputs), shadow(model)
        before = Watch(twin)
        output = _outputs(twin, source, inputs, placement(model)[1])
        return cls(inputs, output, frozenset(before.renewed(Watch(twin))))

    @property
    def is_small(self) -> bool:
        """Whether the inputs are few enough to be kept."""
        return sum(leaf.nbytes for leaf in _tensors(self.inputs)) <= LARGEST_HELD


def first_rows(inputs: Inputs) -> Inputs | None:
    """The inputs of the first `ROWS` samples, copied; None where they cannot be cut.

    They can where all tensors have the same first dimension, and nothing else depends on it.
    """
    leaves = tree_leaves(inputs)
    tensors = _tensors(inputs)
    if not tensors or not all(isinstance(leaf, (Tensor, *_CONSTANTS)) for leaf in leaves):
        return None
    if not tensors[0].ndim or len({leaf.shape[:1] for leaf in tensors}) != 1:
        return None
    return cast("Inputs", tree_map_only(Tensor, lambda t: t[:ROWS].detach().clone(), inputs))


@dataclass(frozen=True)
class Probes:
    """Inputs, and what the model gave for them.

    Attributes:
        inputs: positional and keyword inputs, for `ROWS` samples where they can be cut.
        output: of the model in eval mode, float64 on the CPU.
        digits: the coarsest relative precision on the way to the output.
        renewed: attributes that a pass of the model sets itself; see `Watch`.
    """

    inputs: Inputs
    output: Tensor
    dtype: torch.dtype
    digits: float
    renewed: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, model: nn.Module, source: Source, first: FirstPass, batch_output: Tensor | None
    ) -> Probes | None:
        """Of a first pass; None where it cannot be copied, or the model is random, with a warning.

        A model is random where two passes over the same inputs differ. One pass is the first; the
        other is that of the batch which the inputs were cut from, up to rounding. Where these two
        differ, the samples of a batch may belong together, and only a third pass can tell.

        Args:
            model: the user's.
            source: how to call it.
            first: the pass that the readout was found with.
            batch_output: of the batch's own pass, the samples of the first pass; None if unknown.
        """
        dtype, digits = placement(model)[1], _digits(model, first.output)
        try:
            kept = _placed(first.inputs, torch.device("cpu"))
            probes = cls(kept, first.output.double().cpu(), dtype, digits, first.renewed)
            if batch_output is not None and not probes._off(first.output, batch_output, digits):
                return probes
            again = _outputs(shadow(model), source, kept, dtype)
        except Exception:  # inputs that cannot be copied
            return None
        if probes._off(first.output, again, digits):
            notify(RANDOM)
            return None
        return probes

    def placed(self, model: nn.Module) -> Inputs:
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


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _placed(inputs: Inputs, *where: Any, only: torch.dtype | None = None) -> Inputs:
    """A copy on a device; in a precision too where the tensors have the one that is given."""

    def placed(value: Any) -> Any:
        if not callable(getattr(value, "to", None)):
            return value
        known = isinstance(value, Tensor) and value.dtype == only
        moved = value.to(*(where if known else where[:1]))
        return value if moved is None else moved

    return cast("Inputs", tree_map(placed, copy.deepcopy(inputs)))


@differentiating
def _outputs(twin: nn.Module, source: Source, inputs: Inputs, dtype: torch.dtype) -> Tensor:
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
