"""Which input of a model to differentiate by, and how to put another tensor in its place.

A `Slot` names one tensor of a batch: by position or keyword of the model's inputs, or, where a
user's `forward` takes the batch whole, by position, key or attribute of the batch. `get` reads that
tensor, and `put` returns the model's inputs with another one there. `RowShare` hands out a tensor
that goes with the rows of an input, batch by batch.
"""

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
    """An object that calls a model, such as a `Readout`."""

    @property
    def source(self) -> Source:
        """How the model is called: the user's `forward`, `features` and `output`."""

    @property
    def input_names(self) -> Sequence[str]:
        """The model's names for its positional inputs."""


@dataclass(frozen=True)
class Slot:
    """The place of an input tensor in a batch.

    Attributes:
        key: Position or keyword of the model's inputs; with `whole`, position, key or attribute
            of the batch that a user's `forward` takes (None: the batch itself).
        whole: Whether the model's only input is the whole batch.
    """

    key: str | int | None
    whole: bool

    @classmethod
    def find(cls, batch: Batch, wrt: InputName | Slot, readout: Caller) -> Slot:
        """The slot of an input.

        Args:
            batch: A batch of the data.
            wrt: The input's position or name; None for the only floating-point input.
            readout: The object that calls the model.

        Raises:
            ValueError: There is no such input, it is not a floating-point tensor, or there are
                several to choose from.
        """
        if isinstance(wrt, Slot):
            return wrt
        whole = readout.source.forward is not None
        candidates = _candidates(batch, whole=whole)
        real = [key for key, value in candidates.items() if _is_real(value)]
        choices = ", ".join(map(repr, real)) or "none is a floating-point tensor"
        if wrt is None:
            if len(real) != 1:
                raise ValueError(
                    f"Name the input to differentiate with respect to, with wrt=: {choices}."
                )
            return cls(real[0], whole)
        if not whole and isinstance(wrt, str) and wrt not in batch.kwargs:
            # The name of a positional input, as the model's `forward` has it.
            names = readout.input_names[: len(batch.args)]
            if wrt in names:
                wrt = names.index(wrt)
        if wrt not in candidates:
            raise ValueError(f"There is no input {wrt!r}. The inputs are: {choices}.")
        if not _is_real(candidates[wrt]):
            raise ValueError(
                f"The input {wrt!r} is not a floating-point tensor, so there is no derivative "
                f"with respect to it. Floating-point inputs: {choices}."
            )
        return cls(wrt, whole)

    def get(self, batch: Batch) -> Tensor:
        """The tensor in this slot."""
        value = _candidates(batch, whole=self.whole)[self.key]
        assert isinstance(value, Tensor)
        return value

    def put(self, batch: Batch, tensor: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's inputs, positional and by keyword, with another tensor in this slot."""
        if self.whole:
            return (_with_member(batch.args[0], self.key, tensor),), batch.kwargs
        if self.key in batch.kwargs:
            return batch.args, {**batch.kwargs, str(self.key): tensor}
        return _with_member(batch.args, self.key, tensor), batch.kwargs


def _candidates(batch: Batch, *, whole: bool) -> Members:
    """Everything that a slot of the batch may name, by position, key or attribute."""
    if whole:
        return _members(batch.args[0])
    candidates = _members(batch.args)
    candidates.update(batch.kwargs)
    return candidates


def _members(raw: Any) -> Members:
    """The members of a batch, by key, position or attribute; a tensor is its own only member."""
    if isinstance(raw, Tensor):
        return {None: raw}
    if isinstance(raw, Mapping) or (hasattr(raw, "keys") and hasattr(raw, "__getitem__")):
        keys = raw.keys() if callable(raw.keys) else raw.keys
        return {key: raw[key] for key in keys}
    if isinstance(raw, (tuple, list)):
        members: Members = dict(enumerate(raw))
        members.update(zip(getattr(raw, "_fields", ()), raw, strict=False))
        return members
    return dict(vars(raw)) if hasattr(raw, "__dict__") else {}


def _with_member(raw: Any, key: Any, tensor: Tensor) -> Any:
    """A copy of a batch with another tensor as the member of a key."""
    if isinstance(raw, Tensor):
        return tensor
    if isinstance(raw, Mapping):
        return {**raw, key: tensor}
    if isinstance(raw, tuple) and isinstance(key, str):
        return raw._replace(**{key: tensor})  # type: ignore[attr-defined]
    if isinstance(raw, (tuple, list)):
        members = list(raw)
        members[key] = tensor
        if hasattr(raw, "_fields"):  # a named tuple
            return type(raw)(*members)
        return type(raw)(members)
    if dataclasses.is_dataclass(raw) and not isinstance(raw, type):
        return dataclasses.replace(raw, **{key: tensor})
    twin = copy.copy(raw)
    setattr(twin, key, tensor)
    return twin


def _is_real(value: Any) -> bool:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


class RowShare:
    """A tensor with one row per row of an input, handed out batch by batch.

    Args:
        values: One row for each row of the input in all batches together, or a tensor that every
            batch uses as it is.
        split: Whether it is the first of these, to be split among the batches.
        name: The name of the tensor in messages.
    """

    def __init__(self, values: Tensor, *, split: bool, name: str) -> None:
        self.values = values
        self.split = split
        self.name = name
        self._used = 0

    def next(self, rows: int) -> Tensor:
        """The rows of the tensor for the next batch, which has `rows` rows."""
        if not self.split:
            return self.values
        share = self.values[self._used : self._used + rows]
        self._used += rows
        if len(share) < rows:
            raise ValueError(
                f"{self.name} has {len(self.values)} rows, fewer than the inputs. Pass one row "
                "per row of the input, or one for all."
            )
        return share

    def check_used_up(self) -> None:
        """Refuse a tensor with rows left over after the last batch."""
        rows = len(self.values) if self.split else 0
        if self._used < rows:
            raise ValueError(f"{self.name} has {rows} rows for {self._used} rows of the input.")
