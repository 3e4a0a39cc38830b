"""The novelty of inputs in a frozen module: hooks in its copy of the model measure the distances.

`watch` puts a `FrozenNovelty` into a `CopiedReadout`. Its hooks stay in the copy, so that a graph
can be made of them. Each thread runs a shadow of the copy, hooks included, so that the rows of one
call are not seen by another.

Where rows are atoms, which outputs are sums over, the most novel atom of a sample counts. A readout
finds the sample of each atom by differentiating, which no graph can do. The frozen module takes it
from the input of the model that says so: the one that equals what the readout finds for the inputs
kept from the fit (`OwnersInput`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ...data.batches import Batch
from ...models.calling import Inputs
from ...models.shadow import input_names
from ...readout.copies import CopiedReadout
from ...readout.heads import StandIn
from ...readout.readout import AnyReadout
from ..wrapper import Buffers
from .distance import LayerDistance
from .layers import (
    EMBEDDINGS,
    STATES,
    WIDEST,
    deal,
    entering,
    input_rows,
    is_index,
    named_inputs,
    projected,
    rows_of,
    states_of,
)
from .novelty import Novelty

__all__ = ["FrozenNovelty", "watch"]

_ROWS = (
    "This fit cannot be frozen: novelty watches what enters {!r}, rows (atoms) that outputs are "
    "sums of, and no input of the model gives the number of the sample for each of them. Let the "
    "model take such an input (int64, one number a row) and fit again, fit without novelty=True "
    "and calibrate again, or keep using uq(x)."
)
_NOT_CALLED = (
    "novelty watches what enters {!r}, rows of {} numbers, but this call brought none there. Call "
    "the frozen module with inputs like those of the fit, or fit without novelty=True."
)
_DIFFERENT = (
    "This fit cannot be frozen: in a copy of the model other numbers enter the layers that novelty "
    "watches ({}). Fit without novelty=True and calibrate again, or keep using uq(x)."
)


class _WatchedLayer(Buffers):
    """The distance of what enters one layer, whose hooks stay in a copy of the model.

    Attributes:
        layer: The layer.
        model_dtype: Precision of the copy.
        distances: Squared distances (R,) of the rows that entered in this pass's first call; empty
            before that call.
    """

    def __init__(self, distance: LayerDistance, model_dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = distance.layer
        self.model_dtype = model_dtype
        self.distances: list[Tensor] = []
        self._input_names: list[str] = []
        self.register(centre=distance.centre, root=distance.root)
        if distance.sizes is not None:
            self.register(sizes=distance.sizes)
        if self.layer.width > WIDEST:
            order, signs = deal(self.layer.width, self.layer.seed)
            self.register(order=order, signs=signs)

    def put_hook(self, copied: CopiedReadout) -> None:
        """Let the layer of a copy of the model tell what enters it."""
        module = copied.module(self.layer.module)
        if not self.layer.module:
            self._input_names = input_names(module)
            module.register_forward_pre_hook(self._model_called, with_kwargs=True, prepend=True)
        elif self.layer.place == STATES:
            module.register_forward_hook(self._stepped)
        elif isinstance(_without_stand_in(module), EMBEDDINGS):
            module.register_forward_hook(self._returned)
        else:
            module.register_forward_pre_hook(self._called, with_kwargs=True)

    def _model_called(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        for name, tensor in named_inputs(self._input_names, args, kwargs):
            if name == self.layer.place:
                self._add(input_rows(tensor))

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._add(rows_of(_without_stand_in(module), entering(args, kwargs)))

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._add(rows_of(_without_stand_in(module), output))

    def _stepped(self, module: nn.Module, args: Any, output: Any) -> None:
        self._add(rows_of(_without_stand_in(module), states_of(output)))

    def _add(self, rows: Tensor | None) -> None:
        """Measure rows, unless others came before in this pass."""
        if self.distances:
            return
        if rows is None or rows.shape[1] != self.layer.width:
            self._refuse()
        buffers: dict[str, Any] = self._buffers
        if "order" in buffers:
            rows = projected(rows, buffers["order"], buffers["signs"])
        distance = LayerDistance(
            self.layer, buffers["centre"], buffers["root"], buffers.get("sizes")
        )
        # By the method's name: the compiler of torch 2.4 cannot call an object.
        self.distances.append(distance.__call__(rows, self.model_dtype))

    def take(self) -> Tensor:
        """The distances of this pass, (R,)."""
        if not self.distances:
            self._refuse()
        return self.distances.pop()

    def _refuse(self) -> NoReturn:
        raise ValueError(_NOT_CALLED.format(self.layer.name, self.layer.width))


class OwnersInput(nn.Module):
    """The input of a model that gives the sample of each row (atom).

    Attributes:
        place: Its name; None until it is found.
        entered: What has entered the model in this pass: the index tensors among its inputs by
            name, or that of `place` alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place: str | None = None
        self.entered: dict[str, Tensor] = {}
        self._input_names: list[str] = []

    def put_hook(self, copied: CopiedReadout) -> None:
        """Let a copy of the model tell what enters it."""
        module = copied.module("")
        self._input_names = input_names(module)
        module.register_forward_pre_hook(self._model_called, with_kwargs=True, prepend=True)

    def _model_called(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        for name, tensor in named_inputs(self._input_names, args, kwargs, is_index):
            if self.place is None or name == self.place:
                self.entered[name] = tensor

    def find(self, owners: Tensor | None) -> None:
        """Set `place` by what has entered in a pass; it stays None where no input is right.

        Args:
            owners: The sample of each row in that pass, if the readout knows it.
        """
        # In a single sample any zeros would do.
        if owners is not None and int(owners.max()) > 0:
            for name, tensor in self.entered.items():
                if torch.equal(tensor.to(owners), owners):
                    self.place = name
                    break
        self.entered.clear()

    def take(self) -> Tensor:
        """The sample of each row in this pass, (R,)."""
        assert self.place is not None
        if self.place not in self.entered:
            raise ValueError(
                f"novelty takes the sample of each row from the input {self.place!r}, which is not "
                "in this call. Call the frozen module with inputs like those of the fit."
            )
        return self.entered.pop(self.place).long()


class FrozenNovelty(Buffers):
    """The novelty of a copied model's inputs.

    Args:
        distances: The distance of each of the L layers.
        usual: What is usual in each layer, (L,).
        model_dtype: Precision of the model.

    Attributes:
        layers: The layers.
        owners: The input that gives the sample of each row; None where all rows are samples.
    """

    def __init__(
        self, distances: Sequence[LayerDistance], usual: Tensor, model_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_WatchedLayer(d, model_dtype) for d in distances])
        self.register(usual=usual.to(distances[0].centre))
        self.owners: OwnersInput | None = None
        if not all(distance.layer.of_samples for distance in distances):
            self.owners = OwnersInput()

    if TYPE_CHECKING:
        layers: Any  # torch does not type what a list of modules holds

    def put_hooks(self, copied: CopiedReadout) -> None:
        """Let a copy of the model tell what enters its layers."""
        for layer in self.layers:
            layer.put_hook(copied)
        if self.owners is not None:
            self.owners.put_hook(copied)

    def begin(self) -> None:
        """Forget what entered in other passes."""
        if self.owners is not None:
            self.owners.entered.clear()
        for layer in self.layers:
            layer.distances.clear()

    def take(self) -> tuple[Tensor, ...]:
        """The distances (R,) of each layer in this pass."""
        return tuple(layer.take() for layer in self.layers)

    def put(self, distances: Sequence[Tensor]) -> None:
        """Replace what `take` has taken."""
        for layer, layer_distances in zip(self.layers, distances, strict=True):
            layer.distances.append(layer_distances)

    def finish(self, samples: int) -> Tensor:
        """The novelty of the samples of this pass, (N,): the largest over layers and atoms.

        Args:
            samples: Their number N.
        """
        owners = None if self.owners is None else self.owners.take()
        columns = []
        for layer, distances in zip(self.layers, self.take(), strict=True):
            if owners is not None and not layer.layer.of_samples:
                zeros = distances.new_zeros(samples)
                distances = zeros.scatter_reduce(0, owners, distances, "amax")
            columns.append(distances)
        relative: Tensor = torch.stack(columns, dim=1) / self.usual
        return relative.amax(1)

    def cast(self, model_dtype: torch.dtype) -> None:
        """The model has this precision now; the statistics stay as they are."""
        for layer in self.layers:
            layer.model_dtype = model_dtype


def watch(
    copied: CopiedReadout,
    readout: AnyReadout,
    novelty: Novelty,
    usual: Tensor,
    probe: Inputs | None,
) -> None:
    """Let a copied readout measure the novelty of its inputs.

    Args:
        copied: The copy, into which hooks are put.
        readout: What it is a copy of.
        novelty: What entered the layers in training.
        usual: What is usual in each layer, (L,).
        probe: Inputs to compare the two with; None if there are none.

    Raises:
        ValueError: The rows of a layer are atoms, and no input gives the sample of each; or the
            copy gives another novelty.
    """
    _, dtype = readout.placement
    watching = FrozenNovelty(novelty.layer_distances(dtype), usual, dtype)
    copied.watch_with(watching)
    if watching.owners is not None:
        if probe is not None:
            args, kwargs = probe
            copied.read(args, kwargs)
            watching.owners.find(readout.row_owners(Batch(args, kwargs, None, None)))
        if watching.owners.place is None:
            of_atoms = [layer.name for layer in novelty.layers if not layer.of_samples]
            raise ValueError(_ROWS.format(of_atoms[0]))
        copied.renew()
    if probe is None:
        return
    args, kwargs = probe
    _, scores = novelty.score(readout, Batch(args, kwargs, None, None), usual)
    expected = scores.amax(1)
    try:
        _, found = copied.watched(args, kwargs)
    except ValueError as error:
        raise ValueError(_DIFFERENT.format(error)) from error
    rounding = torch.finfo(dtype).eps ** 0.5
    if found.shape != expected.shape or not torch.allclose(
        found.to(expected), expected, rtol=rounding, atol=rounding
    ):
        raise ValueError(_DIFFERENT.format("for inputs kept from the fit"))


def _without_stand_in(module: nn.Module) -> nn.Module:
    """The module of the model that a recorder stands in for, or the module itself."""
    return module.head if isinstance(module, StandIn) else module
