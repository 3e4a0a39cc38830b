"""The tie between a fit and the model it was made with: the tap, and whether it still holds.

During a fit, `Binding.find` finds the readout on the first batch, `read_first` receives that
batch's own pass, and `seal` records what the model was. Afterwards every call asks
`Binding.current` for the tap, which is refused if the model is no longer that of the fit. Three
alarms work together:

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
predictions do (an attribute that was set to the same value is no change). `load`, `calibrate`,
`partial_fit`, `forget` and `save` ask both even if `Watch` has not moved (`thorough`). None of the
three could stand for another: the first has no verdict, the second no view beyond the weights, the
third neither the digits nor, where no inputs were kept, any view at all.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...data.batches import Batch
from ...data.sketch import fingerprint
from ...data.storage import Snapshot, prefixed
from ...models.calling import Inputs, SeveralOutputsError, Source, several_outputs
from ...models.plain_copy import require_whole
from ...models.shadow import Watch, held_names, placement, shadow, unwrapped
from ...models.threads import Lock
from ...notices import NO_FIT, NotFittedError, notify
from .heads import is_linear_map, named_head, own_parameters
from .layers import Layer
from .probes import FirstPass, Probes, first_rows
from .reading import Reading
from .tail import GraphsKept
from .tap import AnyTap, FeatureTap, Tap

__all__ = ["Binding", "model_fingerprint"]

_SEARCHED = ("No linear map", "The output does not depend on", "The parameters")
"""How the messages of a search that found no readout begin."""
_DERIVATIVE = (
    "The model returns derivatives of a network with respect to its inputs (forces, a "
    "Hamiltonian's flow). Wrap the network that it differentiates, the energy: fit(x, y, "
    "gradient_loss=GradientLoss(...)) includes the derivatives that were trained, and "
    "uq.gradient(x) returns them with error bars. Without this:"
)
_FUNCTION = (
    "The output is computed by {}, a torch.autograd.Function that cannot be inspected (an "
    "adjoint?). Use the plain operations, which give the same values (in torchdiffeq, odeint "
    "instead of odeint_adjoint). Without this:"
)


class _Tie(NamedTuple):
    """A tap, and the look at the model by which it was last found to hold."""

    tap: AnyTap
    watch: Watch


class Binding:
    """A tap on a model, rebuilt when the model moves, refused when the model changes.

    Any number of threads may ask for the tap. The tap that a header describes is built when it is
    first needed, because loading a `state_dict` restores the fit before the weights that it must be
    checked against.

    Args:
        model: The user's model.
        source: How to call it.
        layer: Names of the readout's modules; None to search for them.
        header: What a file or a state dict kept of a readout; None if none is known yet.
        probes: Outputs that the model must still give.
        watching: Whether the tap that will be found watches all layers.

    Attributes:
        model: As given.
        source: As given.
        layer: As given.
        probes: As given; those of the fit once it is sealed.
        fingerprint: The fingerprint of the weights that the tap was found with; None before.
        weights: The names of these weights and buffers; None before, and for a file that does not
            name them: all counted there.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        layer: str | list[str] | None,
        header: dict[str, Any] | None = None,
        probes: Probes | None = None,
        *,
        watching: bool = False,
    ) -> None:
        require_whole(model)
        self.model = model
        self.source = source
        self.layer = layer
        self.probes = probes
        self.fingerprint: str | None = None if header is None else header["fingerprint"]
        self.weights: list[str] | None = None if header is None else header.get("weights")
        self._header = header
        self._watching = watching
        self._tie: _Tie | None = None
        # The pass that the readout was found with, and what the first batch's own pass gave for the
        # same samples, until the fit is sealed.
        self._first_pass: FirstPass | None = None
        self._batch_output: Tensor | None = None
        self._set_by_passes: frozenset[str] = frozenset()
        self._unsealed = False
        # How often weights had been written to when a fit began; None outside a fit.
        self._versions_at_start: list[tuple[int, int]] | None = None
        self._lock = Lock()

    # --- other ties ------------------------------------------------------------------------------

    def rebound(
        self,
        header: dict[str, Any] | None = None,
        probes: Probes | None = None,
        *,
        watching: bool = False,
    ) -> Binding:
        """Another tie to the same model that knows the readout of a header, or none yet."""
        return Binding(self.model, self.source, self.layer, header, probes, watching=watching)

    def copy(self) -> Binding:
        """Another tie that knows the same readout."""
        return self.rebound(self.header(), self.probes)

    def bound_to_copy(self, model: nn.Module) -> Binding:
        """A tie to a copy of the model, with other weights, that knows the same readout."""
        header = {**self.header(), "fingerprint": model_fingerprint(model, self.weights)}
        probes = None
        if self.probes is not None:
            first_pass = FirstPass.of(model, self.source, self.probes.inputs)
            probes = Probes.of(model, self.source, first_pass, batch_output=None)
        return Binding(model, self.source, self.layer, header, probes)

    def restored(self, snapshot: Snapshot) -> Binding:
        """Another tie that knows the readout of a snapshot."""
        probes = None
        if "probes" in snapshot.header:
            probes = snapshot.part("probes", Probes.from_state)
        return self.rebound(snapshot.header["readout"], probes)

    def snapshot(self, *, probes: bool = True) -> Snapshot:
        """What a file or a state dict keeps.

        Args:
            probes: Whether inputs of the fit are in it.
        """
        self.seal()
        header: dict[str, Any] = {"readout": self.header()}
        state = None
        if probes and self.probes is not None:
            state = self.probes.state()
        if state is None:
            return Snapshot({}, header)
        header_of_probes, tensors = state
        return Snapshot(prefixed("probes", tensors), header | {"probes": header_of_probes})

    # --- during a fit ----------------------------------------------------------------------------

    def find(self, batch: Batch) -> AnyTap:
        """Find the readout on a first batch, unless it is known."""
        if self._header is not None:
            self._versions_at_start = _weight_versions(self.model)
            return self.current()
        inputs: Inputs = (batch.args, batch.kwargs)
        tap = self._tap_by_few_rows(inputs)
        if tap is None:
            try:
                tap = self._tap_by_whole_batch(inputs)
            except SeveralOutputsError as error:
                raise ValueError(several_outputs(error.result, batch.target)) from None
        else:
            tap.search_whole_batch = self._tap_by_whole_batch
        if tap.notice:
            notify(tap.notice)
        if self._watching:
            tap.watch(inputs)
        self._tie = _Tie(tap, Watch(self.model))
        self._unsealed = True
        self._versions_at_start = _weight_versions(self.model)
        return tap

    def read_first(self, reading: Reading) -> None:
        """Take the first batch's own pass, which confirms the readout that was found."""
        if self._tie is None or not self._unsealed:
            return
        tap = self._tie.tap
        tap.search_whole_batch = None
        first_pass = tap.first_pass
        tap.first_pass = None
        if first_pass is None:
            return
        self._set_by_passes = first_pass.renewed
        if first_pass.is_small:
            self._first_pass = first_pass
            self._batch_output = reading.output[: len(first_pass.output)].detach().clone()

    def seal(self) -> None:
        """Record the model's weights and outputs as of the fit, unless this was done before.

        Raises:
            ValueError: Weights were written to since the fit began.
        """
        if self._versions_at_start not in (None, _weight_versions(self.model)):
            raise ValueError(
                "The model's weights changed during the fit. Fit after training has ended, and do "
                "not change the model meanwhile."
            )
        if not self._unsealed:
            return
        self._unsealed = False
        self.weights = held_names(self.model, self._set_by_passes)
        self.fingerprint = model_fingerprint(self.model, self.weights)
        first_pass = self._first_pass
        batch_output = self._batch_output
        self._first_pass = None
        self._batch_output = None
        if first_pass is not None:
            self.probes = Probes.of(self.model, self.source, first_pass, batch_output)

    def close(self) -> None:
        """Seal at the end of a fit. From then on weights may be written to, and put back."""
        self.seal()
        self._versions_at_start = None

    def _tap_by_few_rows(self, inputs: Inputs) -> AnyTap | None:
        """The tap found with the first rows of a batch; None if they cannot be cut out or fail."""
        few_rows = first_rows(inputs)
        if few_rows is None:
            return None
        tap = None
        # Any error or warning of the model will come again with the whole batch.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tap = Tap.find_quietly(self.model, self.source, self.layer, few_rows)
        if tap is None or tap.first_pass is None:
            return None
        rows = len(tree_leaves(few_rows)[0])
        outputs = len(tap.first_pass.output)
        if not outputs or outputs % rows:
            return None  # the rows were not samples (but atoms), and a sample was cut in two
        return tap

    def _tap_by_whole_batch(self, inputs: Inputs) -> AnyTap:
        """The tap found with all of a batch."""
        try:
            return Tap.find_quietly(self.model, self.source, self.layer, inputs)
        except (ValueError, RuntimeError) as error:
            reason = _obstacle(self.model, self.source, inputs, str(error))
            if not reason:
                raise
            raise ValueError(f"{reason} {error}") from error

    # --- after a fit -----------------------------------------------------------------------------

    def current(self, *, thorough: bool = False) -> AnyTap:
        """The tap, if the model is still that of the fit.

        Args:
            thorough: Whether to look at weights and outputs even if nothing seems to have changed
                (writes through `.data` leave no trace).

        Raises:
            NotFittedError: There is no fit.
            ValueError: Weights or outputs have changed.
        """
        tie = self._tie
        if tie is not None and not thorough and tie.watch.same():
            return tie.tap
        with self._lock:
            self._tie = self._checked_tie(thorough)
            return self._tie.tap

    @property
    def placement(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the model, as of the last look at it."""
        if self._tie is None:
            return placement(self.model)
        return self._tie.watch.placement

    def header(self) -> dict[str, Any]:
        """What a file keeps of the tap."""
        if self._tie is not None:
            return self._header_of(self._tie.tap)
        assert self._header is not None
        return self._header

    def __getstate__(self) -> dict[str, Any]:
        # A tap shares the model's memory, which a copy would not: it is built again.
        is_known = self._tie is not None or self._header is not None
        return {**vars(self), "_tie": None, "_header": self.header() if is_known else None}

    def _checked_tie(self, thorough: bool) -> _Tie:
        """The tie after a look at the model; see the module for the three alarms."""
        now = Watch(self.model)
        tie = self._tie
        if tie is None:
            if self._header is None:
                raise NotFittedError(NO_FIT.format("fit(x, y)"))
            tap = self._tap_of_file(self._header)
            self._check_outputs(set())
            return _Tie(tap, now)
        tap, before = tie
        written = before.written(now)
        renewed = before.renewed(now)
        if self.probes is not None:
            renewed -= self.probes.renewed  # what every pass of the model sets
        if (written or thorough) and not self._has_weights_of_fit():
            raise ValueError(
                "The model's weights have changed since the fit (training, loading, or a cast "
                "that loses digits), so its error bars are no longer valid. Call fit(x, y) and "
                "calibrate(x, y) again, or restore the weights."
            )
        if written or thorough or renewed:
            self._check_outputs(renewed)
        if written or renewed:
            tap = self._tap_of_header(self._header_of(tap))
        return _Tie(tap, now)

    def _has_weights_of_fit(self) -> bool:
        """Whether what the state dict held at the fit is still the same."""
        return model_fingerprint(self.model, self.weights) == self.fingerprint

    def _check_outputs(self, renewed: set[str]) -> None:
        """Refuse a model whose outputs for the kept inputs have changed.

        Args:
            renewed: Attributes that were set since, for the message.
        """
        if self.probes is None:
            return
        deviation = self.probes.difference(self.model, self.source)
        if not deviation:
            return
        reason = "a different activation, factor or statistic?"
        if renewed:
            names = ", ".join(repr(name.partition(".")[2]) for name in sorted(renewed))
            reason = f"was {names} set?"
        raise ValueError(
            "The model's weights are those of the fit, but its predictions are not: for inputs "
            f"kept from the fit they differ by up to {deviation:.2g} ({reason}), so its error "
            "bars are no longer valid. Undo the change, or call fit(x, y) and calibrate(x, y) "
            "again."
        )

    def _tap_of_file(self, header: dict[str, Any]) -> AnyTap:
        """The tap that a file or a state dict describes, if it fits the model and its weights."""
        for name in header["layer"]:
            if not _can_be_head(unwrapped(self.model), name, header["case"]):
                raise ValueError(
                    f"The file was saved with a readout named {name!r}, which this "
                    f"{type(self.model).__name__} does not have. Load the file with the same "
                    "model."
                )
        if not self._has_weights_of_fit():
            raise ValueError(
                "The model's weights differ from those of the fit in the file. Load the same "
                "checkpoint into the model first, or fit again."
            )
        _check_source(self.source, header)
        return self._tap_of_header(header)

    def _tap_of_header(self, header: dict[str, Any]) -> AnyTap:
        """The tap that a header describes."""
        tap: AnyTap
        if header["case"] == "features":
            tap = FeatureTap(self.model, self.source, header["layout"])
        else:
            tap = Tap(
                self.model,
                self.source,
                heads=header["layer"],
                case=header["case"],
                silent=header["silent"],
                linear=header["linear"],
            )
        tap.layers = [Layer(**layer) for layer in header.get("watched", ())]
        return tap

    def _header_of(self, tap: AnyTap) -> dict[str, Any]:
        """What a file keeps of a tap."""
        header: dict[str, Any] = {
            "layer": tap.heads,
            "silent": tap.silent,
            "case": tap.case,
            "layout": tap.layout,
            "linear": tap.linear,
            "forward": self.source.forward is not None,
            "output": self.source.output,
            "fingerprint": self.fingerprint,
            "weights": self.weights,
        }
        if tap.layers:
            header["watched"] = [asdict(layer) for layer in tap.layers]
        return header


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
    parameters = unwrapped(model).parameters()
    return [(id(p), 0 if p.is_inference() else p._version) for p in parameters]


def _can_be_head(model: nn.Module, name: str, case: str) -> bool:
    """Whether a model has a module or parameter of a name that can be a head of a case."""
    try:
        head = named_head(model, name)
    except AttributeError:
        return False
    if case == "parameters":
        return bool(own_parameters(head))
    return is_linear_map(head)


def _check_source(source: Source, header: dict[str, Any]) -> None:
    """Refuse other functions and another choice of output than those of the fit."""
    _check_function("features", source.features is not None, header["case"] == "features")
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


def _obstacle(model: nn.Module, source: Source, inputs: Inputs, error: str) -> str:
    """What in the model's computation kept a search from finding a readout; empty if unknown.

    Args:
        model: The user's model.
        source: How to call it.
        inputs: The inputs of the batch.
        error: The error message of the search.
    """
    if "functorch transform" in error:
        return _DERIVATIVE
    if not error.startswith(_SEARCHED):
        return ""
    twin = shadow(model)
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    args, kwargs = inputs
    with contextlib.suppress(Exception), torch.enable_grad(), GraphsKept() as graphs:
        output = source.run(twin, args, kwargs)
        if graphs.differentiated:
            return _DERIVATIVE
        function = _custom_function(output)
        if function:
            return _FUNCTION.format(function)
    return ""


def _custom_function(output: Tensor) -> str:
    """The name of a `torch.autograd.Function` in the graph of an output; empty if there is none."""
    waiting: list[Any] = [output.grad_fn]
    visited: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return type(node).__name__.removesuffix("Backward")
        waiting += [child for child, _ in node.next_functions]
    return ""
