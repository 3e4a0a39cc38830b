"""A module around a user's model: it moves with the model, and leaves the model's mode alone."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from ..data.storage import Snapshot

if TYPE_CHECKING:
    from typing_extensions import Self


class Exact(nn.Module):
    """A module whose own buffers keep their precision, whatever the module is cast to."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `half`, `cuda` and the like call, without a cast of the buffers."""
        buffers = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in buffers.items():
            # `fn` may have cast the buffer: only its device is taken over.
            device = getattr(self, name).device
            setattr(self, name, buffer.to(device))
        return self


class Buffers(Exact):
    """A module whose tensors are buffers that keep their precision."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def register(self, **tensors: Tensor) -> None:
        """Register copies of tensors as buffers of these names."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())


class ModelWrapper(Exact, ABC):
    """A module with a model inside, and a state that a `state_dict` and a file hold.

    A subclass names the kind of its state (`_kind`), gives and restores the state (`_snapshot`,
    `_take`), and brings it along after a move (`_moved`).

    Args:
        model: The user's model.
    """

    _kind: ClassVar[str]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def save(
        self, path: str | os.PathLike[str], *, probes: bool = True, rows: bool = False
    ) -> None:
        """Write everything but the model's weights to a safetensors file, atomically.

        Args:
            path: The path of the file.
            probes: Whether to keep a few inputs of the fit and the model's outputs for them, by
                which `load` recognises a model that has changed. Pass False where rows of the
                training data are private.
            rows: Whether to keep a fit's sample of training rows too: features and residuals, not
                inputs.

        Raises:
            ValueError: There is nothing to save, or the model has changed since the fit.
        """
        snapshot = self._snapshot(thorough=True, probes=probes, rows=rows)
        assert snapshot is not None  # the thorough look refuses an object without a state
        snapshot.write(path)

    def get_extra_state(self) -> dict[str, Any]:
        """The state of this object, for the `state_dict`; no inputs of the fit are in it."""
        snapshot = self._snapshot(probes=False)
        if snapshot is None:
            return {}
        return snapshot.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state. Whether it belongs to the model's weights is checked when used."""
        if state == {}:
            self._take(None)
        else:
            self._take(Snapshot.from_state(state, holds=self._kind))

    def train(self, mode: bool = True) -> Self:
        """Set the wrapper's flag alone: the model's is the user's, and predictions use eval."""
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._moved()
        return self

    @abstractmethod
    def _snapshot(
        self, *, thorough: bool = False, probes: bool = True, rows: bool = False
    ) -> Snapshot | None:
        """The state, or None without any; `thorough` first checks that it fits the model."""

    @abstractmethod
    def _take(self, snapshot: Snapshot | None) -> None:
        """Restore the state from a snapshot; None for no state."""

    @abstractmethod
    def _moved(self) -> None:
        """Bring the state along after the model has moved to another device."""
