"""A module around a user's model: it moves with the model, and leaves its mode to the user."""

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
    """A module whose own buffers keep their precision, whatever it is cast to."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in exact.items():
            setattr(self, name, tensor.to(getattr(self, name).device))
        return self


class ModelWrapper(Exact, ABC):
    """The model as a part of this module, and a state that a `state_dict` and a file hold.

    A subclass says of which kind its state is (`_kind`, see `data.schema`), what is in it
    (`_snapshot`, `_take`), and what to do after a move (`_moved`).
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
            path: of the file.
            probes: keep a few inputs of the fit and the model's outputs for them, by which `load`
                tells a model that has changed; False where rows of the training data are private.
            rows: keep a fit's sample of training rows (features and residuals, not inputs) too.
        """
        snapshot = self._snapshot(thorough=True, probes=probes, rows=rows)
        assert snapshot is not None  # the thorough look refuses an object without a state
        snapshot.write(path)

    def get_extra_state(self) -> dict[str, Any]:
        """What this object knows, inside the `state_dict`; no inputs of the fit are in it."""
        snapshot = self._snapshot(probes=False)
        return {} if snapshot is None else snapshot.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take it up; the weights that come with it are checked later."""
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
        """The state, None without any; `thorough` first checks that it belongs to the model."""

    @abstractmethod
    def _take(self, given: Snapshot | None) -> None: ...

    @abstractmethod
    def _moved(self) -> None: ...
