"""What enters the layers of a model, recorded during a pass: a row of numbers for each sample.

`novelty` asks of every layer whether the training data ever gave it the like. Watched are

| where | what of it | a row of |
| --- | --- | --- |
| the network's own inputs | (N, d) as they are; (N, C, H, W) like a convolution's | d; 2 C |
| linear maps, layer norms | what enters, (R, ..., d) | d: the mean over what stands between |
| convolutions, group norms | what enters, (R, C, ...) | 2 C: mean, deviation over positions |
| recurrent nets, attention | what enters, (R, T, d) or (T, R, d) | d: the mean over T |
| embeddings | what comes out, (R, ..., d) | d: the mean over what stands between |

with R the N samples of the batch, or the rows (atoms) that its outputs are sums of, in the order in
which the readout gets them. Norms are among them because they hide the size of what enters from all
that follows, embeddings because what enters is no number. What enters several layers is watched
once, and of a layer that is called several times the first call. Not watched is what has rows of
another kind (edges of a graph) or in another order than the samples, and what a compiled module
or a nested tensor hides. A mean over tokens counts those that pad. The layers are found on the
first batch.

Rows wider than `WIDEST` are projected: columns are dealt out at random to as many sums, each with a
random sign. The same seed gives the same projection on every machine and device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...data.sketch import row_hashes
from ...models.shadow import input_names

WIDEST = 256
"""Numbers in a row at most."""
SEED = 20241
"""Of the projection of wider rows; a file keeps the one that it was made with."""

_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
_POSITIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm)
_SEQUENCES = (nn.RNNBase, nn.MultiheadAttention)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_WATCHED = (*_LAST, *_POSITIONS, *_SEQUENCES, *_EMBEDDINGS)


@dataclass(frozen=True)
class Layer:
    """One place of a model that is watched.

    Attributes:
        name: what users call it: that of a module, or "the input".
        module: the module whose input (or, of an embedding, output) it is; "" for the model.
        place: of a `module` "", which of the model's inputs it is: the name of a parameter.
        width: of a row before it is projected.
        of_samples: whether a row is a sample's; else it is one (an atom's) that outputs sum over.
        seed: of the projection.
        is_input: whether the network's own inputs are watched there, whose columns have units of
            their own.
    """

    name: str
    module: str
    place: str
    width: int
    of_samples: bool = True
    seed: int = SEED
    is_input: bool = False


Key = tuple[str, str]
"""A module's name, "" for the model, and of the model the input's name."""


@dataclass(frozen=True)
class _Recorded:
    """What one call gave: its rows (R, d), None where it has none, and where it was seen before.

    Attributes:
        tensor: that the rows are of, as long as it lives.
        version: how often it had been written to.
        before: the key of an earlier call with the same tensor, if any.
    """

    tensor: weakref.ref[Tensor]
    version: int
    rows: Tensor | None
    before: Key | None


class _Recording(dict[Key, _Recorded]):
    """What the layers got in a pass."""

    def add(self, key: Key, tensor: Any, rows: Callable[[Tensor], Tensor | None]) -> None:
        """Record a tensor, unless there was a call of that name before."""
        if key in self or not _has_rows(tensor):
            return
        version = 0 if tensor.is_inference() else tensor._version
        before = None
        for earlier, recorded in self.items():
            if recorded.tensor() is tensor and recorded.version == version:
                before = earlier
                break
        self[key] = _Recorded(weakref.ref(tensor), version, rows(tensor.detach()), before)


def find_layers(
    pattern: nn.Module,
    model: nn.Module,
    read: Callable[[], int],
    row_owners: Callable[[], Tensor | None],
) -> list[Layer]:
    """The layers to watch, by what a first batch calls.

    Args:
        pattern: the model as it is, whose modules tell what they are.
        model: that is run, perhaps with other modules in place of some.
        read: runs it on the batch, and tells how many samples that has.
        row_owners: the sample of each row (atom) that the outputs are sums of; None if they are
            not.
    """
    named = pattern.named_modules()
    modules = {name: module for name, module in named if name and isinstance(module, _WATCHED)}
    with _recorded(pattern, model, modules, inputs=True) as recording:
        samples = read()
    atoms = 0
    lengths = {len(recorded.rows) for recorded in recording.values() if recorded.rows is not None}
    if lengths - {samples}:
        owners = row_owners()
        atoms = 0 if owners is None else len(owners)
    inputs = [key for key in recording if key[0] == ""]
    layers: dict[Key, Layer] = {}
    for key, recorded in recording.items():
        rows = recorded.rows
        if rows is None or len(rows) not in (samples, atoms) or not rows.numel():
            continue
        module_name, place = key
        if not module_name and len(rows) != samples:
            continue  # atoms, say: of their positions the model may know distances alone
        first = key if recorded.before is None else recorded.before
        if first in layers:
            continue  # the same tensor is watched already
        name = module_name
        if first in inputs:
            name = "the input" if len(inputs) == 1 else f"input {first[1]}"
        layers[first] = Layer(
            name=name,
            module=module_name,
            place=place,
            width=rows.shape[1],
            of_samples=len(rows) == samples,
            is_input=first in inputs,
        )
    return sorted(layers.values(), key=lambda layer: not layer.is_input)


def layers_of_samples(
    pattern: nn.Module,
    model: nn.Module,
    layers: Sequence[Layer],
    *,
    whole: Callable[[], Tensor],
    few: Callable[[], Tensor],
) -> list[Layer]:
    """Of the layers found, those that get the first samples' rows first.

    Not so the rows of places, of which there may be as many as samples (the tokens of a sequence),
    and of samples that the model has sorted. Rows that are atoms' are not asked.

    Args:
        pattern: as in `find_layers`.
        model: as in `find_layers`.
        layers: those found.
        whole: runs the model on the batch, and gives its outputs.
        few: likewise on the first rows of its inputs.
    """
    with _rows_by_layer(pattern, model, layers) as rows_of_all:
        outputs = whole()
    try:
        with _rows_by_layer(pattern, model, layers) as rows_of_few:
            first_outputs = few()
    except (ValueError, RuntimeError):
        return list(layers)  # rows of the inputs are no samples
    count = len(first_outputs)
    if count == len(outputs) or first_outputs.shape[1:] != outputs.shape[1:]:
        return list(layers)
    rounding = 1e-2 * float(outputs.abs().max())
    if not torch.allclose(first_outputs, outputs[:count], rtol=0, atol=rounding):
        return list(layers)  # what a sample gives depends on the others of its batch
    kept = []
    for layer in layers:
        rows, first = rows_of_all.get(layer), rows_of_few.get(layer)
        if not layer.of_samples:
            kept.append(layer)
        elif rows is not None and first is not None and first.shape == rows[:count].shape:
            rows, first = rows.nan_to_num(), first.nan_to_num()  # which the fit refuses by name
            spread = (rows - rows.mean(0)).abs().max()
            tolerance = 1e-2 * spread + 1e-5 * rows.abs().max()  # far above any rounding
            if bool(((first - rows[:count]).abs() <= tolerance).all()):
                kept.append(layer)
    return kept


@contextmanager
def watched(
    pattern: nn.Module, model: nn.Module, layers: Sequence[Layer]
) -> Iterator[list[Tensor]]:
    """During the first pass within, record what enters some layers; the list is filled at the end.

    Raises:
        ValueError: a layer was not called, or with rows of another width; or layers whose rows
            (atoms) belong together got different numbers of them.
    """
    entering: list[Tensor] = []
    with _rows_by_layer(pattern, model, layers) as rows_by_layer:
        yield entering
    atoms: int | None = None
    for layer in layers:
        rows = rows_by_layer.get(layer)
        if rows is None or rows.shape[1] != layer.width:
            came = "nothing" if rows is None else f"rows of {rows.shape[1]} numbers"
            raise ValueError(
                f"novelty watches what enters {layer.name!r}, rows of {layer.width} numbers in the "
                f"first batch of the fit; here it got {came}. Pass batches of one form, or fit "
                "without novelty=True."
            )
        if not layer.of_samples:
            atoms = len(rows) if atoms is None else atoms
            if len(rows) != atoms:
                raise ValueError(
                    f"novelty watches what enters {layer.name!r}, which got as many rows as other "
                    f"layers in the first batch of the fit, and {len(rows)} here where those got "
                    f"{atoms}: edges instead of atoms? Begin with a batch where they differ."
                )
        entering.append(_projected(rows, layer))


@contextmanager
def _rows_by_layer(
    pattern: nn.Module, model: nn.Module, layers: Sequence[Layer]
) -> Iterator[dict[Layer, Tensor]]:
    """What enters layers during the first pass within, as far as they are called: filled then."""
    names = {layer.module for layer in layers}
    modules = {name: pattern.get_submodule(name) for name in names if name}
    rows_by_layer: dict[Layer, Tensor] = {}
    with _recorded(pattern, model, modules, inputs="" in names) as recording:
        yield rows_by_layer
    for layer in layers:
        recorded = recording.get((layer.module, layer.place))
        if recorded is not None and recorded.rows is not None:
            rows_by_layer[layer] = recorded.rows


@contextmanager
def _recorded(
    pattern: nn.Module, model: nn.Module, modules: Mapping[str, nn.Module], *, inputs: bool
) -> Iterator[_Recording]:
    """Record calls of modules, and of the model itself where its inputs are asked for."""
    recording = _Recording()
    parameters = input_names(pattern)

    def model_called(_: nn.Module, args: Any, kwargs: Any) -> None:
        given = {**dict(enumerate(args)), **kwargs}
        for place, value in given.items():
            name = parameters[place] if place in range(len(parameters)) else str(place)
            tensors = [leaf for leaf in tree_leaves(value) if _has_rows(leaf)]
            for number, tensor in enumerate(tensors):
                which = name if len(tensors) == 1 else f"{name}[{number}]"
                recording.add(("", which), tensor, _input_rows)

    def called(name: str, module: nn.Module, _: nn.Module, args: Any, kwargs: Any) -> None:
        tensor = args[0] if args else next(iter(kwargs.values()), None)
        recording.add((name, ""), tensor, partial(_rows, module))

    def returned(name: str, module: nn.Module, _: nn.Module, args: Any, output: Any) -> None:
        recording.add((name, ""), output, partial(_rows, module))

    hooks = []
    try:
        if inputs:
            hook = model.register_forward_pre_hook(model_called, with_kwargs=True, prepend=True)
            hooks.append(hook)
        for name, module in modules.items():
            place = model.get_submodule(name)
            if isinstance(module, _EMBEDDINGS):
                hook = place.register_forward_hook(partial(returned, name, module))
            else:
                hook = place.register_forward_pre_hook(
                    partial(called, name, module), with_kwargs=True
                )
            hooks.append(hook)
        yield recording
    finally:
        for hook in hooks:
            hook.remove()


def _has_rows(value: Any) -> bool:
    """Whether it is a plain floating-point tensor that can have rows.

    What a transformation of `torch.func` sees has no values of its own outside it.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim == 0:
        return False
    if value.layout is not torch.strided or value.is_nested:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _rows(module: nn.Module, tensor: Tensor) -> Tensor | None:
    """A row for each sample of what entered a module; None where it has no such rows."""
    if isinstance(module, _POSITIONS):
        spatial = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
        least = next((n for kind, n in spatial.items() if isinstance(module, kind)), 0) + 2
        return None if tensor.ndim < least else _over_positions(tensor)
    if isinstance(module, _SEQUENCES):
        if tensor.ndim != 3:
            return None
        return _in_short(tensor).mean(1 if module.batch_first else 0)
    return _over_tokens(tensor)


def _input_rows(tensor: Tensor) -> Tensor | None:
    """Likewise of an input of the model; of three dimensions nobody knows what they are."""
    if tensor.ndim == 1:
        return _in_short(tensor)[:, None]
    if tensor.ndim == 2:
        return _in_short(tensor)
    return _over_positions(tensor) if tensor.ndim > 3 else None


def _over_tokens(tensor: Tensor) -> Tensor | None:
    """(R, ..., d) to the means (R, d)."""
    if tensor.ndim < 2:
        return None
    rows = _in_short(tensor)
    return rows.flatten(1, -2).mean(1) if rows.ndim > 2 else rows


def _over_positions(tensor: Tensor) -> Tensor:
    """(R, C, ...) to means and deviations (R, 2 C); (R, C) stays."""
    rows = _in_short(tensor)
    if rows.ndim == 2:
        return rows
    deviation, mean = torch.std_mean(rows.flatten(2), dim=2, correction=0)
    return torch.cat([mean, deviation], dim=1)


def _in_short(tensor: Tensor) -> Tensor:
    """In single precision at least: sums in half would lose their digits."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float32)


def _projected(rows: Tensor, layer: Layer) -> Tensor:
    """(R, width) to (R, columns), in memory of its own."""
    if layer.width <= WIDEST:
        return rows.clone()
    order, signs = _deal(layer.width, layer.seed)
    dealt = rows[:, order.to(rows.device)] * signs.to(rows)
    missing = -layer.width % WIDEST
    dealt = nn.functional.pad(dealt, (0, missing))
    return dealt.reshape(len(rows), -1, WIDEST).sum(1)


@lru_cache(maxsize=64)
def _deal(width: int, seed: int) -> tuple[Tensor, Tensor]:
    """An order of columns and their signs, by hashes: whole numbers, the same everywhere."""
    numbers = torch.arange(width)
    hashes = row_hashes([torch.stack([numbers, torch.full_like(numbers, seed)], dim=1)], width)
    assert hashes is not None
    order = hashes.argsort()  # they differ
    signs = 1.0 - 2.0 * (hashes & 1)
    return order, signs[order]
