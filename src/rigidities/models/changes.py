"""Two ways to notice that a model has changed: a watch over its objects, and probes of its outputs.

A `Watch` compares identities and counters of everything in the model, which is cheap enough for
every call. It sees that something may have changed, and not whether it matters.

`Probes` are a few inputs of the fit and the model's outputs for them. At a fit the first rows of
the first batch are kept (`first_rows`) with what the model gave for them (`FirstPass`, then
`Probes`). Later `Probes.difference` runs the model on them again. This sees what a fingerprint of
weights and buffers does not: a factor in an attribute, another activation, statistics in a plain
tensor. It does not see weights that change the outputs by less than rounding on another device may
(one per cent of their spread in float32), and it costs a pass of the model. See `binding` for how
these alarms work together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..notices import notify
from .calling import Inputs, Source, copied
from .modes import differentiating
from .shadow import (
    MODULE_ATTRIBUTES,
    PLAIN_TENSORS,
    containers,
    placement,
    plain_parts,
    shadow,
    unwrapped,
)

ROWS = 8
"""How many samples are kept."""
MOST_BYTES_IN_FILE = 1 << 20
"""The most bytes of inputs to keep in a file."""
MOST_BYTES_HELD = 1 << 26
"""The most bytes of inputs to keep in memory."""
RANDOM = (
    "Two passes of the model over the same inputs differ (is dropout always on, or does the "
    "forward pass draw random numbers or keep a state?). The mean and error bars are those of a "
    "single pass."
)

CONSTANTS = (bool, int, float, str, type(None))
"""Types of attributes that cannot change inside."""
SHORT = 64
"""A `Watch` looks into containers of at most this many entries."""

_version_and_dtype = attrgetter("_version", "dtype")

_FIXED_INPUTS = (bool, float, str, type(None))
"""Types of inputs other than tensors that do not depend on the number of rows. An int may."""


class Watch:
    """Notices when weights are written, moved or replaced, and when attributes are assigned.

    It is cheap: it compares identities and versions, without arithmetic. Hooks and the entries of
    short containers are watched too. Writes through `.data` or NumPy, and changes inside other
    objects, go unnoticed.

    Args:
        model: The model whose modules are watched.

    Attributes:
        attributes: What `attributes` says of the model.
        first_look: What `look` returned when the watch began.
    """

    def __init__(self, model: nn.Module) -> None:
        model = unwrapped(model)
        self.attributes = attributes(model)
        # Everything is kept by reference: an `id` may be reused once its object is gone.
        modules = list(model.modules())
        self._dictionaries = [vars(module) for module in modules]
        # The dictionary and the name of each attribute, side by side for `look`.
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        # Views of what containers hold, now and later. Containers that are empty may be filled.
        self._empty: list[Collection[object]] = []
        self._live: list[Collection[object]] = []
        for module in modules:
            for container in containers(module):
                filled = self._live if container else self._empty
                filled.append(container.values())
        self._members = list(chain.from_iterable(self._live))
        for dictionary in self._dictionaries:
            for name, value in dictionary.items():
                if name in MODULE_ATTRIBUTES:
                    continue
                self._owners.append(dictionary)
                self._names.append(name)
                if isinstance(value, (dict, list, tuple)) and len(value) <= SHORT:
                    self._live.append(value.values() if isinstance(value, dict) else value)
        weights = [member for member in self._members if isinstance(member, Tensor)]
        self._weight_versions = list(map(_version, weights))
        # Inference tensors have no version, and tensors of other classes consist of several.
        self._plain: list[Tensor] = []
        self._others: list[Tensor] = []
        values = [value for value, _ in self.attributes.values() if isinstance(value, Tensor)]
        for tensor in {id(tensor): tensor for tensor in (*weights, *values)}.values():
            if type(tensor) in PLAIN_TENSORS and not tensor.is_inference():
                self._plain.append(tensor)
            else:
                self._others.append(tensor)
        self.first_look = self.look()

    def written(self, later: Watch) -> bool:
        """Whether weights, modules or hooks differ from those of a later watch."""
        if self._weight_versions != later._weight_versions:
            return True
        return list(map(id, self._members)) != list(map(id, later._members))

    def look(self) -> tuple[object, ...]:
        """What differs after any change.

        It is asked for in every call of the model, and therefore made without a loop in Python.
        """
        values = map(dict.get, self._owners, self._names, repeat(self))
        return (
            any(self._empty),
            list(map(len, self._dictionaries)),
            list(map(id, chain(chain.from_iterable(self._live), values))),
            list(map(Tensor.data_ptr, self._plain)),
            list(map(_version_and_dtype, self._plain)),
            list(map(_version, self._others)),
        )


Attributes = dict[str, tuple[object, object]]
"""By path: "0.name" for an attribute of the first module, "0.name[key]" for an entry of it. Each is
the value and, of a tensor, what `_version` says of it."""


def attributes(
    model: nn.Module, ignored: type[nn.Module] | tuple[type[nn.Module], ...] = ()
) -> Attributes:
    """The attributes and buffers of all modules, and the entries of short containers among them.

    Args:
        model: The model, without wrappers. Its modules are numbered in the order of `modules()`.
        ignored: Classes of modules that stand in for others: they are not numbered.
    """
    values: dict[str, object] = {}
    modules = (m for m in model.modules() if not isinstance(m, ignored))
    for number, module in enumerate(modules):
        for name, value in vars(module).items():
            if name in MODULE_ATTRIBUTES:
                continue
            path = f"{number}.{name}"
            values[path] = value
            if isinstance(value, (dict, list, tuple)) and len(value) <= SHORT:
                entries = value.items() if isinstance(value, dict) else enumerate(value)
                for key, entry in entries:
                    values[f"{path}[{key!r}]"] = entry
        for name, buffer in module._buffers.items():
            values[f"{number}.{name}"] = buffer
    return {
        path: (value, _version(value) if isinstance(value, Tensor) else None)
        for path, value in values.items()
    }


def renewed(before: Attributes, after: Attributes) -> frozenset[str]:
    """Paths of the attributes and buffers that were assigned or written to between two looks."""
    paths = set(before.keys() ^ after.keys())
    for path in before.keys() & after.keys():
        value, version = before[path]
        later_value, later_version = after[path]
        is_equal_constant = (
            type(value) in CONSTANTS and type(value) is type(later_value) and value == later_value
        )
        if version != later_version or not (value is later_value or is_equal_constant):
            paths.add(path)
    return frozenset(paths)


def _version(tensor: Tensor) -> tuple[object, ...]:
    """What changes when a tensor is written, moved or cast: address, version and dtype."""
    if type(tensor) not in PLAIN_TENSORS:
        inner_tensors = plain_parts(tensor)
        if inner_tensors != [tensor]:
            return tuple(map(_version, inner_tensors))
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype


@dataclass(frozen=True)
class FirstPass:
    """The pass that a readout was found with.

    Attributes:
        inputs: Positional and keyword inputs, in memory of their own.
        output: The model's output in eval mode, on the device where it was computed.
        renewed: Attributes that the pass set; see `renewed`.
    """

    inputs: Inputs
    output: Tensor
    renewed: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, source: Source, inputs: Inputs) -> FirstPass:
        """A pass for this purpose alone, where no search has made one."""
        inputs = copied(inputs)
        twin = shadow(model)
        before = attributes(twin)
        _, dtype = placement(model)
        output = _outputs(twin, source, inputs, dtype)
        return cls(inputs, output, renewed(before, attributes(twin)))

    @property
    def is_small(self) -> bool:
        """Whether the inputs are few enough to be kept."""
        return sum(tensor.nbytes for tensor in _tensors(self.inputs)) <= MOST_BYTES_HELD


def first_rows(inputs: Inputs) -> Inputs | None:
    """The inputs of the first `ROWS` samples, copied; None where they cannot be cut.

    They can where all tensors have the same first dimension, and nothing else depends on it.
    """
    leaves = tree_leaves(inputs)
    tensors = _tensors(inputs)
    if not tensors or not all(isinstance(leaf, (Tensor, *_FIXED_INPUTS)) for leaf in leaves):
        return None
    if not tensors[0].ndim or len({tensor.shape[:1] for tensor in tensors}) != 1:
        return None
    rows = tree_map_only(Tensor, lambda tensor: tensor[:ROWS].detach().clone(), inputs)
    return cast("Inputs", rows)


@dataclass(frozen=True)
class Probes:
    """Inputs, and what the model gave for them.

    Attributes:
        inputs: Positional and keyword inputs, for `ROWS` samples where they can be cut.
        output: The model's output in eval mode, float64 on the CPU.
        dtype: The model's dtype in the fit. Inputs of this dtype are cast to that of a later model.
        digits: The coarsest relative precision on the way to the output.
        renewed: Attributes that a pass of the model sets itself; see `renewed`.
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
        """Probes made of a first pass.

        A model is random if two passes over the same inputs differ. One of the two is the first
        pass. The other is that of the whole batch which the inputs were cut from. Where these two
        differ by more than rounding, the samples of a batch may influence one another, and only a
        third pass can tell.

        Args:
            model: The user's model.
            source: How to call it.
            first: The pass that the readout was found with.
            batch_output: The output of the whole batch's pass for the samples of the first pass;
                None if unknown.

        Returns:
            None where the inputs cannot be copied, and, with a warning, where the model is random.
        """
        _, dtype = placement(model)
        digits = _coarsest_precision(model, first.output)
        try:
            inputs = _placed(first.inputs, torch.device("cpu"))
            output = first.output.double().cpu()
            probes = cls(inputs, output, dtype, digits, first.renewed)
            if batch_output is not None:
                deviation = probes._deviation(output, batch_output, digits)
                if not deviation:
                    return probes
            again = _outputs(shadow(model), source, inputs, dtype)
        except Exception:  # inputs that cannot be copied
            return None
        if probes._deviation(output, again, digits):
            notify(RANDOM)
            return None
        return probes

    def placed(self, model: nn.Module) -> Inputs:
        """The inputs on the model's device and in its precision."""
        device, dtype = placement(model)
        return _placed(self.inputs, device, dtype, only=self.dtype)

    def difference(self, model: nn.Module, source: Source) -> float:
        """How far the model's outputs are from those kept; zero within what rounding explains.

        A random model, for which two passes differ, gives a warning and is not taken for a changed
        one.
        """
        try:
            output = _outputs(shadow(model), source, self.inputs, self.dtype)
            digits = max(self.digits, _coarsest_precision(model, output))
            deviation = self._deviation(self.output, output, digits)
            if not deviation:
                return 0.0
            again = _outputs(shadow(model), source, self.inputs, self.dtype)
        except Exception:  # kept inputs that this device or precision does not take
            return 0.0
        if self._deviation(output, again, digits):
            notify(RANDOM)
            return 0.0
        return deviation

    def _deviation(self, expected: Tensor, output: Tensor, digits: float) -> float:
        """The largest deviation of two outputs; 0 if rounding (TF32 included) explains it."""
        if expected.shape != output.shape:
            return math.inf
        expected = expected.double().cpu().reshape(len(expected), -1)
        output = output.double().cpu().reshape(len(output), -1)
        size = expected.abs().amax(0)
        # Relative to the spread between samples: a common offset says nothing of the digits lost.
        spread = expected.std(0, correction=0) if len(expected) > 3 else size
        allowed = spread * min(0.1, 30 * digits**0.5) + size * min(0.05, 1000 * digits)
        both_nan = expected.isnan() & output.isnan()
        deviation = (output - expected).abs().masked_fill(both_nan, 0.0)
        if bool((deviation <= allowed).all()):
            return 0.0
        return float(deviation.max())

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Header and tensors for a file.

        None where the inputs are too large, or hold more than tensors and plain values.
        """
        tensors: list[Tensor] = []
        try:
            inputs = _packed(list(self.inputs), tensors)
        except TypeError:
            return None
        if sum(tensor.nbytes for tensor in tensors) > MOST_BYTES_IN_FILE:
            return None
        header = {
            "inputs": inputs,
            "dtype": str(self.dtype).removeprefix("torch."),
            "digits": self.digits,
            "renewed": sorted(self.renewed),
        }
        named_tensors = {"output": self.output}
        for i, tensor in enumerate(tensors):
            named_tensors[f"{i}"] = tensor
        return header, named_tensors

    @classmethod
    def from_state(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Probes:
        """The probes that `state` came from."""
        args, kwargs = _unpacked(header["inputs"], tensors)
        return cls(
            inputs=(args, kwargs),
            output=tensors["output"],
            dtype=getattr(torch, header["dtype"]),
            digits=float(header["digits"]),
            renewed=frozenset(header["renewed"]),
        )


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _placed(
    inputs: Inputs,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    only: torch.dtype | None = None,
) -> Inputs:
    """A copy of inputs on a device.

    Args:
        inputs: Positional and keyword inputs.
        device: The device, to which everything that has a method `to` is moved.
        dtype: The dtype to cast tensors to; None for no cast.
        only: The dtype of the tensors that are cast. All others keep theirs.
    """

    def placed(value: Any) -> Any:
        if not callable(getattr(value, "to", None)):
            return value
        if dtype is not None and isinstance(value, Tensor) and value.dtype == only:
            return value.to(device, dtype)
        moved = value.to(device)
        return value if moved is None else moved  # a user's object may move in place

    return cast("Inputs", tree_map(placed, copy.deepcopy(inputs)))


@differentiating
def _outputs(twin: nn.Module, source: Source, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """The output of a shadow for inputs, of which those of `dtype` are cast to the shadow's."""
    device, dtype_of_twin = placement(twin)
    args, kwargs = _placed(inputs, device, dtype_of_twin, only=dtype)
    return source.run(twin, args, kwargs).detach()


def _coarsest_precision(model: nn.Module, output: Tensor) -> float:
    """The largest relative rounding among parameters, output and what autocast computes in."""
    tensors = (*model.parameters(), output)
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    device = output.device.type
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    """A structure as JSON holds it; its tensors are appended to a list.

    Raises:
        TypeError: JSON does not hold such a value.
    """
    if isinstance(value, Tensor):
        tensors.append(value.clone())  # some may share memory, which no file holds
        return {"tensor": len(tensors) - 1}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_packed(entry, tensors) for entry in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"mapping": {key: _packed(entry, tensors) for key, entry in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"A file cannot contain a {type(value).__name__}.")


def _unpacked(spec: Any, tensors: dict[str, Tensor]) -> Any:
    """The structure that `_packed` came from, with its tensors by number."""
    if not isinstance(spec, dict):
        return spec
    ((kind, value),) = spec.items()
    if kind == "tensor":
        return tensors[str(value)]
    if kind == "mapping":
        return {key: _unpacked(entry, tensors) for key, entry in value.items()}
    entries = [_unpacked(entry, tensors) for entry in value]
    return tuple(entries) if kind == "tuple" else entries
