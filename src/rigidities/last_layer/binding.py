"""The tie between a fit and the model it was made with: the readout, and whether it still holds.

A fit ends with a `Binding` (`Binding.of`), which knows what the model was. Afterwards every call
asks `Binding.current` for the readout, which is refused if the model is no longer that of the fit.
Three alarms work together:

* `Watch` sees that something *may* have changed: weights that were written, moved or replaced,
  modules that were exchanged, hooks, attributes that were set. It compares identities and counters,
  which is cheap enough for every call. It does not tell whether the change matters, does not see
  writes through `.data` or NumPy, and knows nothing of a model that met its fit in a file;
* the *fingerprint* sees every bit of what a state dict of the model held at the fit, on any device
  and in any precision that loses none. Buffers that a pass of the model sets itself (a mask for the
  size of the batch) do not count. It reads all weights, and knows nothing of attributes,
  activations and code;
* the *probes* see whatever changes the outputs for a few inputs of the fit, within the rounding of
  another device. They take a pass of the model, do not see small changes of the weights, and are
  missing where the inputs could not be kept or must not be.

So a call looks at `Watch` alone. Where that has moved, the fingerprint says whether weights differ
(a model that was moved, cast without loss or restored is the same one), and the probes say whether
predictions do (an attribute that was set to the same value is no change). `load`, `save` and all
that reads labelled data ask both even if `Watch` has not moved (`thorough`). None of the three
could stand for another: the first has no verdict, the second no view beyond the weights, the
third neither the digits nor, where no inputs were kept, any view at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.hashes import fingerprint
from ..data.storage import Snapshot, prefixed
from ..models.calling import Source
from ..models.changes import FirstPass, Probes, Watch, renewed
from ..models.shadow import held_names, placement, require_whole, unwrapped
from ..models.threads import Lock
from ..readout.find import FoundReadout
from ..readout.heads import is_linear_map, named_head, own_parameters
from ..readout.readout import AnyReadout, readout_from_header

__all__ = ["Binding", "UsersModel", "held_still", "model_fingerprint"]


@dataclass(frozen=True)
class UsersModel:
    """What a user wraps: a model, how it is called, and where its readout is.

    Attributes:
        model: The model.
        source: How to call it.
        layer: Names of the readout's modules and parameters; None to search for them.

    Raises:
        TypeError: The model is a part of one that is spread over processes.
    """

    model: nn.Module
    source: Source
    layer: str | list[str] | None

    def __post_init__(self) -> None:
        require_whole(self.model)

    @property
    def placement(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the model."""
        return placement(self.model)


@contextmanager
def held_still(model: nn.Module) -> Iterator[None]:
    """A context at whose end the weights must be those of its beginning.

    Raises:
        ValueError: Weights were written to.
    """
    before = _weight_versions(model)
    yield
    if _weight_versions(model) != before:
        raise ValueError(
            "The model's weights changed during the fit. Fit after training has ended, and do "
            "not change the model meanwhile."
        )


class _Checked(NamedTuple):
    """A readout, and the look at the model by which it was last found to hold."""

    readout: AnyReadout
    watch: Watch


class Binding:
    """A readout on a model, rebuilt when the model moves, refused when the model changes.

    Any number of threads may ask for the readout. One that a header describes is built when it is
    first needed, because loading a `state_dict` restores the fit before the weights that it must be
    checked against.

    Args:
        user_model: The user's model, how it is called, and where its readout is.
        header: What files keep of the readout, and of the model at the fit.
        probes: Outputs that the model must still give; None if there are none.
        order: The order of a sample's outputs; see `Readout`.
        tie: The readout, where it has been built.

    Attributes:
        user_model: As given.
        probes: As given.
    """

    def __init__(
        self,
        user_model: UsersModel,
        header: dict[str, Any],
        probes: Probes | None,
        order: Tensor | None = None,
        tie: _Checked | None = None,
    ) -> None:
        self.user_model = user_model
        self.probes = probes
        self._header = header
        self._order = order
        self._tie = tie
        self._lock = Lock()

    @classmethod
    def of(cls, user_model: UsersModel, found: FoundReadout) -> Binding:
        """The tie to a model as it is at the end of a fit.

        Args:
            user_model: The user's model.
            found: Its readout, found on the first batch.
        """
        first_pass = found.first_pass
        probes = None
        if first_pass.is_small:
            batch_output = found.reading.output[: len(first_pass.output)]
            probes = Probes.of(user_model.model, user_model.source, first_pass, batch_output)
        weights = held_names(user_model.model, first_pass.renewed)
        header = {
            **found.readout.header(),
            "forward": user_model.source.forward is not None,
            "output": user_model.source.output,
            "fingerprint": model_fingerprint(user_model.model, weights),
            "weights": weights,
        }
        tie = _Checked(found.readout, Watch(user_model.model))
        return cls(user_model, header, probes, found.readout.order, tie)

    @classmethod
    def from_snapshot(cls, user_model: UsersModel, snapshot: Snapshot) -> Binding:
        """The tie that a file or a state dict holds, to a model that is checked when it is used."""
        probes = None
        if "probes" in snapshot.header:
            probes = snapshot.part("probes", Probes.from_state)
        order = snapshot.tensors.get("readout.order")
        return cls(user_model, snapshot.header["readout"], probes, order)

    def copy(self) -> Binding:
        """Another tie to the same model, with the same readout."""
        return Binding(self.user_model, self._header, self.probes, self._order)

    def bound_to_copy(self, model: nn.Module) -> Binding:
        """A tie to a copy of the model with other weights, and with the same readout."""
        user_model = UsersModel(model, self.user_model.source, self.user_model.layer)
        new_fingerprint = model_fingerprint(model, self._header["weights"])
        probes = None
        if self.probes is not None:
            first_pass = FirstPass.of(model, user_model.source, self.probes.inputs)
            probes = Probes.of(model, user_model.source, first_pass, batch_output=None)
        header = {**self._header, "fingerprint": new_fingerprint}
        return Binding(user_model, header, probes, self._order)

    def snapshot(self, *, probes: bool = True) -> Snapshot:
        """What a file or a state dict keeps.

        Args:
            probes: Whether inputs of the fit are in it.
        """
        header: dict[str, Any] = {"readout": self._header}
        tensors: dict[str, Tensor] = {}
        if self._order is not None:
            tensors["readout.order"] = self._order
        state = None
        if probes and self.probes is not None:
            state = self.probes.state()
        if state is not None:
            header["probes"], probe_tensors = state
            tensors.update(prefixed("probes", probe_tensors))
        return Snapshot(tensors, header)

    def current(self, *, thorough: bool = False) -> AnyReadout:
        """The readout, if the model is still that of the fit.

        Args:
            thorough: Whether to look at weights and outputs even if nothing seems to have changed
                (writes through `.data` leave no trace).

        Raises:
            ValueError: Weights or outputs have changed.
        """
        tie = self._tie
        if tie is not None and not thorough and tie.watch.look() == tie.watch.first_look:
            return tie.readout
        with self._lock:
            self._tie = self._checked_tie(thorough)
            return self._tie.readout

    def header(self) -> dict[str, Any]:
        """What a file keeps of the readout, and of the model at the fit."""
        return self._header

    def __getstate__(self) -> dict[str, Any]:
        # A readout shares the model's memory, which a copy would not: it is built again.
        return {**vars(self), "_tie": None}

    def _checked_tie(self, thorough: bool) -> _Checked:
        """The tie after a look at the model; see the module for the three alarms."""
        now = Watch(self.user_model.model)
        tie = self._tie
        if tie is None:
            readout = self._described_readout()
            self._check_outputs(frozenset())
            return _Checked(readout, now)
        readout, before = tie
        written = before.written(now)
        changed = renewed(before.attributes, now.attributes)
        if self.probes is not None:
            changed -= self.probes.renewed  # what every pass of the model sets
        if (written or thorough) and not self._has_weights_of_fit():
            raise ValueError(
                "The model's weights have changed since the fit (training, loading, or a cast "
                "that loses digits), so its error bars are no longer valid. Call fit(x, y) and "
                "calibrate(x, y) again, or restore the weights."
            )
        if written or thorough or changed:
            self._check_outputs(changed)
        if written or changed:
            readout = readout.on(self.user_model.model)
        return _Checked(readout, now)

    def _has_weights_of_fit(self) -> bool:
        """Whether what the state dict held at the fit is still the same."""
        header = self._header
        digest: str = header["fingerprint"]
        return model_fingerprint(self.user_model.model, header["weights"]) == digest

    def _check_outputs(self, changed: frozenset[str]) -> None:
        """Refuse a model whose outputs for the kept inputs have changed.

        Args:
            changed: Attributes that were set since, for the message.
        """
        if self.probes is None:
            return
        deviation = self.probes.difference(self.user_model.model, self.user_model.source)
        if not deviation:
            return
        reason = "a different activation, factor or statistic?"
        if changed:
            names = ", ".join(repr(name.partition(".")[2]) for name in sorted(changed))
            reason = f"was {names} set?"
        raise ValueError(
            "The model's weights are those of the fit, but its predictions are not: for inputs "
            f"kept from the fit they differ by up to {deviation:.2g} ({reason}), so its error "
            "bars are no longer valid. Undo the change, or call fit(x, y) and calibrate(x, y) "
            "again."
        )

    def _described_readout(self) -> AnyReadout:
        """The readout that a file or a state dict describes, if it fits the model's weights."""
        header = self._header
        model = self.user_model.model
        for name in header["layer"]:
            if not _can_be_head(unwrapped(model), name, header["kind"]):
                raise ValueError(
                    f"The file was saved with a readout named {name!r}, which this "
                    f"{type(model).__name__} does not have. Load the file with the same model."
                )
        if not self._has_weights_of_fit():
            raise ValueError(
                "The model's weights differ from those of the fit in the file. Load the same "
                "checkpoint into the model first, or fit again."
            )
        _check_source(self.user_model.source, header)
        return readout_from_header(model, self.user_model.source, header, self._order)


def model_fingerprint(model: nn.Module, names: list[str] | None = None) -> str:
    """A digest of parameters and buffers: the same on any device, or after a lossless cast.

    Args:
        model: The model.
        names: Those that count, of which some may be gone; None for all.
    """
    model = unwrapped(model)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    if names is None:
        names = list(tensors)
    return fingerprint([(name, tensors[name]) for name in names if name in tensors])


def _weight_versions(model: nn.Module) -> list[tuple[int, int]]:
    """Identity of every parameter, and how often it was written to.

    Buffers are left out, because a pass of the model may write to them.
    """
    versions = []
    for parameter in model.parameters():
        version = 0  # inference tensors have none
        if not parameter.is_inference():
            version = parameter._version
        versions.append((id(parameter), version))
    return versions


def _can_be_head(model: nn.Module, name: str, kind: str) -> bool:
    """Whether a model has a module or parameter of a name that can be a readout's head."""
    try:
        head = named_head(model, name)
    except AttributeError:
        return False
    if kind == "parameters":
        return bool(own_parameters(head))
    return is_linear_map(head)


def _check_source(source: Source, header: dict[str, Any]) -> None:
    """Refuse other functions and another choice of output than those of the fit."""
    _check_function("features", source.features is not None, header["kind"] == "features")
    _check_function("forward", source.forward is not None, header["forward"])
    if source.output != header["output"]:
        raise ValueError(
            f"The file was fitted with output={header['output']!r}, got {source.output!r}."
        )


def _check_function(name: str, is_passed: bool, is_needed: bool) -> None:
    if is_needed and not is_passed:
        raise ValueError(
            f"The file was fitted with {name}=. Pass the same function when you load it."
        )
    if is_passed and not is_needed:
        raise ValueError(f"The file was fitted without {name}=. Leave it out when you load it.")
