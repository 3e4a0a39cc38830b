"""What enters the layers of a model, recorded during a pass: a row of numbers for each sample.

`Novelty` asks for every layer whether anything like this entered it in the training data.
`find_layers` chooses the layers to watch on the first batch; `read_with_layers` records what enters
them, by hooks, during any later pass of a readout. These are watched:

| where | what of it | a row of |
| --- | --- | --- |
| the network's own inputs | (N, d) as they are; (N, C, H, W) like a convolution's | d; 2 C |
| linear maps, layer norms | what enters, (R, ..., d) | d; 2 d: mean, deviation over positions |
| convolutions, group norms | what enters, (R, C, ...) | 2 C: mean, deviation over positions |
| attention | what enters, (R, T, d) or (T, R, d) | 2 d: mean, deviation over T |
| embeddings | what comes out, (R, ..., d) | d; 2 d: mean, deviation over positions |
| recurrent layers | what enters; what comes out | 3 d: mean, deviation, change over steps |

The *change* of a sequence is the root mean square of its steps from one position to the next: a
wave of another frequency has the same mean and deviation. The states that come out of a recurrent
layer are watched beside what enters it, since most models read the last of them alone.

R counts the N samples of the batch, or the rows (atoms) that its outputs are sums of, in the order
in which the readout gets them. Norms are watched because they hide the size of their input from all
that follows, and embeddings by what comes out because indices enter them. A tensor that enters
several layers is watched once. If a layer is called several times, the first call is watched.
Tensors whose rows are of another kind (edges of a graph) or in another order than the samples are
not watched, nor is what a compiled module or a nested tensor hides. Means and deviations over
tokens include the padding.

Rows wider than `WIDEST` are projected: columns are dealt out at random to as many sums, each with a
random sign. The same seed gives the same projection on every machine and device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...data.batches import Batch
from ...data.hashes import row_hashes
from ...models.changes import first_rows
from ...models.shadow import input_names
from ...readout.reading import Reading
from ...readout.readout import AnyReadout

WIDEST = 256
"""The most numbers in a row."""
SEED = 20241
"""The seed of the projection of wider rows. A file keeps the seed that it was made with."""

_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
_POSITIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
RECURRENT = nn.RNNBase
_WATCHED = (*_CHANNELS_LAST, *_POSITIONS, *EMBEDDINGS, RECURRENT, nn.MultiheadAttention)
STATES = "states"
"""The place of what comes out of a recurrent layer, see `Layer.place`."""


@dataclass(frozen=True)
class Layer:
    """One place of a model that is watched.

    Attributes:
        name: What users call it: the name of a module, or "the input".
        module: The module whose input (or output, of an embedding) it is; "" for the model.
        place: Where `module` is "", which of the model's inputs it is, by the name of the
            parameter of `forward`. `STATES` for the output of a recurrent layer. Else "".
        width: The number of columns of a row before it is projected.
        of_samples: Whether each row is a sample. Otherwise it is a row (an atom) that outputs are
            sums over.
        seed: The seed of the projection.
        is_input: Whether it is an input of the network itself, whose columns have units of their
            own.
    """

    name: str
    module: str
    place: str
    width: int
    of_samples: bool = True
    seed: int = SEED
    is_input: bool = False

    @property
    def columns(self) -> int:
        """The number of columns of a row after it was projected, where it was too wide."""
        return min(self.width, WIDEST)


Key = tuple[str, str]
"""Module and place of a layer."""


@dataclass(frozen=True)
class _Recorded:
    """What was recorded of one call.

    Attributes:
        tensor: A weak reference to the tensor that was recorded.
        version: How often it had been written to.
        rows: The rows made of it, (R, d); None where it has no rows.
        earlier_key: The key of an earlier call with the same tensor, if any.
    """

    tensor: weakref.ref[Tensor]
    version: int
    rows: Tensor | None
    earlier_key: Key | None


class _Recording(dict[Key, _Recorded]):
    """What the layers got in a pass, by key."""

    def add(self, key: Key, tensor: Any, rows: Callable[[Tensor], Tensor | None]) -> None:
        """Record a tensor, unless there was a call of that key before.

        Args:
            key: The key of the layer.
            tensor: What entered it, perhaps not a tensor at all.
            rows: Makes rows (R, d) of a tensor, or None where it has none.
        """
        if key in self or not _has_rows(tensor):
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return  # it has no values outside the transformation of `torch.func` that it is in
        version = 0 if tensor.is_inference() else tensor._version
        earlier_key = None
        for other_key, recorded in self.items():
            if recorded.tensor() is tensor and recorded.version == version:
                earlier_key = other_key
                break
        self[key] = _Recorded(weakref.ref(tensor), version, rows(tensor.detach()), earlier_key)


def find_layers(readout: AnyReadout, batch: Batch) -> list[Layer]:
    """The layers of a model to watch, by what a first batch calls.

    Args:
        readout: Runs the model.
        batch: The first batch.

    Raises:
        ValueError: There are none.
    """
    layers, rows_by_layer, outputs = _called_layers(readout, batch)
    few_rows = first_rows((batch.args, batch.kwargs))
    if few_rows is not None:
        args, kwargs = few_rows
        few = replace(batch, args=args, kwargs=kwargs, target=None, raw=None, samples=None)
        layers = _layers_of_samples(readout, rows_by_layer, outputs, few)
    if not layers:
        raise ValueError(
            "novelty=True found no layer to watch: no layer has an input with one row per "
            "sample (inputs with three dimensions, custom modules?). Fit without novelty=True."
        )
    return layers


def read_with_layers(
    readout: AnyReadout, layers: Sequence[Layer], batch: Batch
) -> tuple[Reading, list[Tensor]]:
    """One forward pass, and the rows (R, columns) that entered each of some layers in it."""
    with _watched(readout.model, readout.running, layers) as rows:
        reading = readout(batch)
    return reading, rows


def _called_layers(
    readout: AnyReadout, batch: Batch
) -> tuple[list[Layer], dict[Layer, Tensor], Tensor]:
    """The layers that a batch calls with a row for each sample, or for each atom.

    Returns:
        The layers, inputs of the model first; the rows of each; and the model's output.
    """
    modules: dict[str, nn.Module] = {}
    for name, module in readout.model.named_modules():
        if name and isinstance(module, _WATCHED):
            modules[name] = module
    with _recorded(readout.model, readout.running, modules, inputs=True) as recording:
        outputs = readout(batch).output
    samples = len(outputs)
    atoms = 0  # rows that the outputs are sums of
    lengths = {len(recorded.rows) for recorded in recording.values() if recorded.rows is not None}
    if lengths - {samples}:
        owners = readout.row_owners(batch)
        atoms = 0 if owners is None else len(owners)
    inputs = [key for key in recording if key[0] == ""]
    layers: dict[Key, Layer] = {}
    rows_by_layer: dict[Layer, Tensor] = {}
    for key, recorded in recording.items():
        rows = recorded.rows
        if rows is None or len(rows) not in (samples, atoms) or not rows.numel():
            continue
        module_name, place = key
        if not module_name and len(rows) != samples:
            continue  # positions of atoms, say, of which the model may use only the distances
        first_key = key if recorded.earlier_key is None else recorded.earlier_key
        if first_key in layers:
            continue  # the same tensor is watched already
        name = module_name
        if place == STATES:
            name = f"the states of {module_name}"
        if first_key in inputs:
            name = "the input" if len(inputs) == 1 else f"input {first_key[1]}"
        layer = Layer(
            name=name,
            module=module_name,
            place=place,
            width=rows.shape[1],
            of_samples=len(rows) == samples,
            is_input=first_key in inputs,
        )
        layers[first_key] = layer
        rows_by_layer[layer] = rows
    inputs_first = sorted(layers.values(), key=lambda layer: not layer.is_input)
    return inputs_first, rows_by_layer, outputs


def _layers_of_samples(
    readout: AnyReadout, rows_of_all: Mapping[Layer, Tensor], outputs: Tensor, few: Batch
) -> list[Layer]:
    """The layers whose first rows belong to the first samples.

    There may be as many rows as samples by chance, though the rows are something else (the tokens
    of a sequence), or the model may have sorted the samples. This shows when the first samples are
    run alone: such layers then get other rows, and are dropped. Layers whose rows are atoms are
    kept without this check.

    Args:
        readout: Runs the model.
        rows_of_all: The layers found, and the rows of the first batch that entered each.
        outputs: The outputs of the first batch.
        few: The first rows of its inputs.
    """
    layers = sorted(rows_of_all, key=lambda layer: not layer.is_input)
    try:
        with _rows_by_layer(readout.model, readout.running, layers) as rows_of_few:
            first_outputs = readout(few).output
    except (ValueError, RuntimeError):
        return list(layers)  # rows of the inputs are not samples
    count = len(first_outputs)
    if count == len(outputs) or first_outputs.shape[1:] != outputs.shape[1:]:
        return list(layers)
    rounding = 1e-2 * float(outputs.abs().max())
    if not torch.allclose(first_outputs, outputs[:count], rtol=0, atol=rounding):
        return list(layers)  # what a sample gives depends on the others of its batch
    return [
        layer
        for layer in layers
        if not layer.of_samples or _begin_with(rows_of_all[layer], rows_of_few.get(layer), count)
    ]


def _begin_with(rows: Tensor, rows_of_few: Tensor | None, count: int) -> bool:
    """Whether the rows (N, d) of all samples begin with those of the first `count`, to rounding."""
    if rows_of_few is None or rows_of_few.shape != rows[:count].shape:
        return False
    rows = rows.nan_to_num()  # the fit refuses NaN by name
    rows_of_few = rows_of_few.nan_to_num()
    spread = (rows - rows.mean(0)).abs().max()
    tolerance = 1e-2 * spread + 1e-5 * rows.abs().max()  # far above any rounding
    return bool(((rows_of_few - rows[:count]).abs() <= tolerance).all())


@contextmanager
def _watched(
    pattern: nn.Module, model: nn.Module, layers: Sequence[Layer]
) -> Iterator[list[Tensor]]:
    """During the first pass within, record what enters some layers; the list is filled at the end.

    Args:
        pattern: The model as it is, whose modules show by their classes what they are.
        model: The model that is run, perhaps with recorders in place of some modules.
        layers: The layers to watch. The list has their rows (R, columns) in the same order.

    Raises:
        ValueError: A layer was not called, or with rows of another width; or layers whose rows
            (atoms) belong together got different numbers of them.
    """
    entering: list[Tensor] = []
    with _rows_by_layer(pattern, model, layers) as rows_by_layer:
        yield entering
    atoms: int | None = None
    for layer in layers:
        rows = rows_by_layer.get(layer)
        if rows is None or rows.shape[1] != layer.width:
            entered = "nothing" if rows is None else f"rows of {rows.shape[1]} numbers"
            raise ValueError(
                f"novelty watches what enters {layer.name!r}, rows of {layer.width} numbers in the "
                f"first batch of the fit; here it got {entered}. Pass batches of one form, or fit "
                "without novelty=True."
            )
        if not layer.of_samples:
            atoms = len(rows) if atoms is None else atoms
            if len(rows) != atoms:
                raise ValueError(
                    f"novelty watches what enters {layer.name!r}, which got as many rows as other "
                    f"layers in the first batch of the fit, but got {len(rows)} rows here where "
                    f"the others got {atoms} (edges instead of atoms?). Start with a batch where "
                    "these numbers differ."
                )
        entering.append(_projected(rows, layer))


@contextmanager
def _rows_by_layer(
    pattern: nn.Module, model: nn.Module, layers: Sequence[Layer]
) -> Iterator[dict[Layer, Tensor]]:
    """What enters layers during the first pass within, as far as they are called.

    The dictionary is filled at the end.
    """
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
    """Record the first call of modules during the passes within, by hooks.

    Args:
        pattern: The model as it is, whose modules show by their classes what they are.
        model: The model that is run, perhaps with recorders in place of some modules.
        modules: The modules of the pattern to record, by name.
        inputs: Whether to record the inputs of the model itself too.
    """
    recording = _Recording()
    parameters = input_names(pattern)

    def model_called(_: nn.Module, args: Any, kwargs: Any) -> None:
        for name, tensor in named_inputs(parameters, args, kwargs):
            recording.add(("", name), tensor, input_rows)

    def called(name: str, module: nn.Module, _: nn.Module, args: Any, kwargs: Any) -> None:
        recording.add((name, ""), entering(args, kwargs), partial(rows_of, module))

    def returned(name: str, module: nn.Module, _: nn.Module, args: Any, output: Any) -> None:
        recording.add((name, ""), output, partial(rows_of, module))

    def stepped(name: str, module: nn.Module, _: nn.Module, args: Any, output: Any) -> None:
        recording.add((name, STATES), states_of(output), partial(rows_of, module))

    hooks = []
    try:
        if inputs:
            hook = model.register_forward_pre_hook(model_called, with_kwargs=True, prepend=True)
            hooks.append(hook)
        for name, module in modules.items():
            running_module = model.get_submodule(name)  # perhaps a recorder
            if isinstance(module, EMBEDDINGS):
                hook = running_module.register_forward_hook(partial(returned, name, module))
            else:
                hook = running_module.register_forward_pre_hook(
                    partial(called, name, module), with_kwargs=True
                )
            hooks.append(hook)
            if isinstance(module, RECURRENT):
                hook = running_module.register_forward_hook(partial(stepped, name, module))
                hooks.append(hook)
        yield recording
    finally:
        for hook in hooks:
            hook.remove()


def _has_rows(value: Any) -> bool:
    """Whether a value is a plain floating-point tensor that can have rows."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim == 0:
        return False
    return value.layout is torch.strided and not value.is_nested


def is_index(value: Any) -> bool:
    """Whether a value is a tensor of whole numbers, (R,), as those that say where rows belong."""
    if not isinstance(value, Tensor) or value.ndim != 1:
        return False
    return value.dtype in (torch.int64, torch.int32)


def named_inputs(
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: Callable[[Any], bool] = _has_rows,
) -> list[tuple[str, Tensor]]:
    """Tensors among a model's inputs, each with its name (`Layer.place`).

    Args:
        names: Names of the parameters of the model's `forward`.
        args: The positional inputs.
        kwargs: The inputs by keyword.
        wanted: Which tensors; by default those that can have rows.
    """
    named = []
    for place, value in [*enumerate(args), *kwargs.items()]:
        name = str(place)
        if isinstance(place, int) and place < len(names):
            name = names[place]
        tensors = [leaf for leaf in tree_leaves(value) if wanted(leaf)]
        for number, tensor in enumerate(tensors):
            named.append((name if len(tensors) == 1 else f"{name}[{number}]", tensor))
    return named


def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What enters a module that is called with these inputs: the first of them."""
    return args[0] if args else next(iter(kwargs.values()), None)


def states_of(output: Any) -> Any:
    """The states of all steps among what a recurrent layer returns: the first."""
    return output[0]


def rows_of(module: nn.Module, tensor: Tensor) -> Tensor | None:
    """A row for each sample of what entered a module; None where it has no such rows."""
    if isinstance(module, _POSITIONS):
        if tensor.ndim < 2 + _spatial_dimensions(module):
            return None  # without a dimension of samples
        return _over_positions(tensor)
    if isinstance(module, (RECURRENT, nn.MultiheadAttention)):
        if tensor.ndim != 3:
            return None
        sequences = tensor if module.batch_first else tensor.transpose(0, 1)  # (R, T, d)
        if isinstance(module, RECURRENT):
            return _over_steps(sequences)
        return _over_tokens(sequences)
    return _over_tokens(tensor)


def _spatial_dimensions(module: nn.Module) -> int:
    """How many dimensions a convolution needs beside samples and channels; a norm needs none."""
    for dimensions, convolution in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1):
        if isinstance(module, convolution):
            return dimensions
    return 0


def input_rows(tensor: Tensor) -> Tensor | None:
    """A row for each sample of an input of the model; None where it has no such rows."""
    if tensor.ndim == 1:
        return _at_least_float32(tensor)[:, None]
    if tensor.ndim == 2:
        return _at_least_float32(tensor)
    if tensor.ndim == 3:
        return None  # nobody knows which of the dimensions are channels
    return _over_positions(tensor)


def _over_tokens(tensor: Tensor) -> Tensor | None:
    """(R, ..., d) to means and deviations (R, 2 d); (R, d) stays."""
    if tensor.ndim < 2:
        return None
    return _over_positions(tensor.movedim(-1, 1))


def _over_positions(tensor: Tensor) -> Tensor:
    """(R, C, ...) to means and deviations (R, 2 C); (R, C) stays."""
    rows = _at_least_float32(tensor)
    if rows.ndim == 2:
        return rows
    deviation, mean = torch.std_mean(rows.flatten(2), dim=2, correction=0)
    return torch.cat([mean, deviation], dim=1)


def _over_steps(sequences: Tensor) -> Tensor:
    """(R, T, d) to means, deviations and changes (R, 3 d)."""
    rows = _at_least_float32(sequences)
    deviation, mean = torch.std_mean(rows, dim=1, correction=0)
    # A sequence of one step has no change. Over T instead of T - 1, that is zero.
    change = (rows.diff(dim=1).square().sum(1) / rows.shape[1]).sqrt()
    return torch.cat([mean, deviation, change], dim=1)


def _at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in single precision or better: sums in half precision would lose digits."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float32)


def _projected(rows: Tensor, layer: Layer) -> Tensor:
    """(R, width) to (R, columns), at most `WIDEST` of them, in memory of its own."""
    if layer.width <= WIDEST:
        return rows.clone()
    return projected(rows, *deal(layer.width, layer.seed))


def projected(rows: Tensor, order: Tensor, signs: Tensor) -> Tensor:
    """(R, width) to (R, `WIDEST`), by an order of columns and their signs, as `deal` gives them."""
    dealt = rows[:, order.to(rows.device)] * signs.to(rows)
    missing = -len(order) % WIDEST
    dealt = nn.functional.pad(dealt, (0, missing))  # so that columns fill whole turns
    # With len(rows), torch.jit.trace would fix the number of rows.
    return dealt.reshape(rows.shape[0], -1, WIDEST).sum(1)


@lru_cache(maxsize=64)
def deal(width: int, seed: int) -> tuple[Tensor, Tensor]:
    """An order of columns and their signs, from hashes, which are the same on every machine.

    Returns:
        The order (width,), and the signs (width,) of the columns in that order.
    """
    numbers = torch.arange(width)
    hashes = row_hashes([torch.stack([numbers, torch.full_like(numbers, seed)], dim=1)], width)
    assert hashes is not None
    order = hashes.argsort()  # they differ
    signs = 1.0 - 2.0 * (hashes & 1)
    return order, signs[order]
