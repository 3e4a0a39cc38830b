"""Which input of a model to differentiate by, and how to put another tensor in its place."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..models.calling import Source
from .batches import Batch

InputName = str | int | None
Members = dict[str | int | None, Any]


class Caller(Protocol):
    """What calls a model, such as a tap: how, and what the model calls its positional inputs."""

    @property
    def source(self) -> Source:
        """The user's own functions."""

    @property
    def input_names(self) -> Sequence[str]:
        """Of the positional inputs."""


@dataclass(frozen=True)
class Slot:
    """Where an input tensor stands in a batch.

    Attributes:
        key: position or keyword of the model's inputs; with `whole`, position, key or attribute
            of the batch that a user's `forward` takes (None: the batch itself).
        whole: whether the model's one input is the batch as a whole.
    """

    key: str | int | None
    whole: bool

    @classmethod
    def find(cls, batch: Batch, wrt: InputName | Slot, tap: Caller) -> Slot:
        """The slot of a position or a name; without one that of the only floating-point input."""
        if isinstance(wrt, Slot):
            return wrt
        whole = tap.source.forward is not None
        known = _known(batch, whole=whole)
        real = [key for key, value in known.items() if _is_real(value)]
        listed = ", ".join(map(repr, real)) or "none is a floating-point tensor"
        if wrt is None and len(real) != 1:
            raise ValueError(f"Which input to differentiate by? Name it with wrt=: {listed}.")
        if wrt is None:
            return cls(real[0], whole)
        if not whole and isinstance(wrt, str) and wrt not in batch.kwargs:
            names = tap.input_names[: len(batch.args)]
            wrt = names.index(wrt) if wrt in names else wrt
        if wrt not in known:
            raise ValueError(f"There is no input {wrt!r}. Those there are: {listed}.")
        if not _is_real(known[wrt]):
            raise ValueError(
                f"The input {wrt!r} is not a floating-point tensor, so there is no derivative by "
                f"it. Those that are: {listed}."
            )
        return cls(wrt, whole)

    def get(self, batch: Batch) -> Tensor:
        """The tensor."""
        value = _known(batch, whole=self.whole)[self.key]
        assert isinstance(value, Tensor)
        return value

    def put(self, batch: Batch, tensor: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's inputs with another tensor in this slot."""
        if self.whole:
            return (_replaced(batch.args[0], self.key, tensor),), batch.kwargs
        if self.key in batch.kwargs:
            return batch.args, {**batch.kwargs, str(self.key): tensor}
        return _replaced(batch.args, self.key, tensor), batch.kwargs


def _known(batch: Batch, *, whole: bool) -> Members:
    known = _members(batch.args[0] if whole else batch.args)
    known.update({} if whole else batch.kwargs)
    return known


def _members(raw: Any) -> Members:
    """The parts of a batch that hold tensors, by key, position or attribute."""
    if isinstance(raw, Tensor):
        return {None: raw}
    if isinstance(raw, Mapping) or (hasattr(raw, "keys") and hasattr(raw, "__getitem__")):
        keys = raw.keys() if callable(raw.keys) else raw.keys
        return {key: raw[key] for key in keys}
    if isinstance(raw, (tuple, list)):
        named = dict(zip(getattr(raw, "_fields", ()), raw, strict=False))
        return {**dict(enumerate(raw)), **named}
    return dict(vars(raw)) if hasattr(raw, "__dict__") else {}


def _replaced(raw: Any, key: Any, tensor: Tensor) -> Any:
    if isinstance(raw, Tensor):
        return tensor
    if isinstance(raw, Mapping):
        return {**raw, key: tensor}
    if isinstance(raw, tuple) and isinstance(key, str):
        return raw._replace(**{key: tensor})  # type: ignore[attr-defined]
    if isinstance(raw, (tuple, list)):
        parts = [tensor if i == key else part for i, part in enumerate(raw)]
        return type(raw)(*parts) if hasattr(raw, "_fields") else type(raw)(parts)
    if dataclasses.is_dataclass(raw) and not isinstance(raw, type):
        return dataclasses.replace(raw, **{key: tensor})
    twin = copy.copy(raw)
    setattr(twin, key, tensor)
    return twin


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class RowShare:
    """A tensor with one row per row of an input, handed out batch by batch.

    Args:
        values: shaped like all inputs together, or to be used for every batch as it is.
        split: whether it has one row per input row.
        name: for the message.
    """

    def __init__(self, values: Tensor, *, split: bool, name: str) -> None:
        self.values, self.split, self.name, self._taken = values, split, name, 0

    def next(self, rows: int) -> Tensor:
        """The share of the next batch."""
        if not self.split:
            return self.values
        share = self.values[self._taken : self._taken + rows]
        self._taken += rows
        if len(share) < rows:
            raise ValueError(
                f"{self.name} has {len(self.values)} rows, fewer than the inputs have. Give one "
                "row per row of the input, or one for all."
            )
        return share

    def check_used_up(self) -> None:
        """Refuse rows that are left over after the last batch."""
        if self.split and self._taken < (rows := len(self.values)):
            raise ValueError(f"{self.name} has {rows} rows for {self._taken} rows of the input.")
