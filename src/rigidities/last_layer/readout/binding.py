"""The tie between a fit and the model it was made with: the tap, and whether it still holds."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...data.batches import Batch
from ...data.sketch import fingerprint
from ...data.storage import Snapshot, prefixed
from ...models.calling import Inputs, Source
from ...models.shadow import Watch, placement, shadow, unwrapped
from ...models.threads import Lock
from ...models.whole import require_whole
from ...notices import NO_FIT, NotFittedError, notify
from .heads import is_linear_map, own_parameters
from .layers import Layer
from .probes import FirstPass, Probes, first_rows
from .reading import Reading
from .tail import GraphsKept
from .tap import AnyTap, FeatureTap, Tap


class Binding:
    """A tap on a model, rebuilt when the model moves, refused when the model changes.

    Any number of threads may ask for the tap. That of a `header`, of a file or a state dict, is
    built when it is first needed: a `state_dict` brings the fit before the weights that it must be
    checked against. `probes` are outputs that the model must still give, `fingerprint` is that of
    the weights that the tap was found with.
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
        self._watching = watching  # whether the tap that will be found watches all layers
        self.model, self.source, self.layer, self._header = model, source, layer, header
        self.probes = probes
        self.fingerprint: str | None = None if header is None else header["fingerprint"]
        self._tied: tuple[AnyTap, Watch] | None = None
        self._first: FirstPass | None = None  # until the model is taken down
        self._batch_output: Tensor | None = None  # of the first batch, the same samples
        self._unsealed = False  # whether the model is still to be taken down
        self._before: list[tuple[int, int]] | None = None  # how often weights had been written to
        self._lock = Lock()

    def again(
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
        return self.again(self.header(), self.probes)

    def copied(self, model: nn.Module) -> Binding:
        """A tie to a copy of the model, with other weights, that knows the same readout."""
        header = {**self.header(), "fingerprint": model_fingerprint(model)}
        probes = None
        if self.probes is not None:
            first = FirstPass.of(model, self.source, self.probes.inputs)
            probes = Probes.of(model, self.source, first, batch_output=None)
        return Binding(model, self.source, self.layer, header, probes)

    def taken(self, given: Snapshot) -> Binding:
        """Another tie that knows the readout of a snapshot."""
        probes = given.part("probes", Probes.from_state) if "probes" in given.header else None
        return self.again(given.header["readout"], probes)

    def snapshot(self, *, probes: bool = True) -> Snapshot:
        """What a file or a state dict keeps; `probes` says whether inputs of the fit are in it."""
        self.seal()
        header: dict[str, Any] = {"readout": self.header()}
        kept = self.probes.state() if probes and self.probes is not None else None
        if kept is None:
            return Snapshot({}, header)
        return Snapshot(prefixed("probes", kept[1]), header | {"probes": kept[0]})

    def find(self, batch: Batch) -> AnyTap:
        """Find the readout on a first batch, unless it is known."""
        if self._header is not None:
            self._before = _written(self.model)
            return self.current()
        inputs: Inputs = (batch.args, batch.kwargs)
        tap = self._found_in_few(inputs)
        if tap is None:
            tap = self._found_in(inputs)
        else:
            tap.search = self._found_in
        if tap.notice:
            notify(tap.notice)
        if self._watching:
            tap.watch(inputs)
        self._tied, self._unsealed = (tap, Watch(self.model)), True
        self._before = _written(self.model)
        return tap

    def read_first(self, reading: Reading) -> None:
        """Hear of the first batch's own pass, by which the readout that was found is confirmed."""
        if self._tied is None or not self._unsealed:
            return
        tap = self._tied[0]
        tap.search = None
        first, tap.first_pass = tap.first_pass, None
        if first is not None and first.is_small:
            self._first = first
            self._batch_output = reading.output[: len(first.output)].detach().clone()

    def _found_in_few(self, inputs: Inputs) -> AnyTap | None:
        """The tap by the first rows of a batch; None where these cannot be had or do not tell."""
        few = first_rows(inputs)
        if few is None:
            return None
        tap = None
        # Whatever goes wrong, or the model warns of, comes again with the whole batch.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tap = Tap.found(self.model, self.source, self.layer, few)
        if tap is None or tap.first_pass is None:
            return None
        rows = len(tree_leaves(few)[0])
        outputs = len(tap.first_pass.output)
        # Rows that are no samples, as atoms of structures, were cut in the middle of one.
        return tap if outputs and outputs % rows == 0 else None

    def _found_in(self, inputs: Inputs) -> AnyTap:
        """The tap by a whole batch."""
        try:
            return Tap.found(self.model, self.source, self.layer, inputs)
        except (ValueError, RuntimeError) as error:
            reason = _obstacle(self.model, self.source, inputs, str(error))
            if not reason:
                raise
            raise ValueError(f"{reason} {error}") from error

    def seal(self) -> None:
        """Take down what the model was and gave when the readout was found, if not done yet."""
        if self._before not in (None, _written(self.model)):
            raise ValueError(
                "The model's weights were written to while it was fitted. Fit it when its "
                "training has ended, and let nothing change it meanwhile."
            )
        if self._unsealed:
            self._unsealed = False
            self.fingerprint = model_fingerprint(self.model)  # first: it waits for nothing yet
            first, batch_output = self._first, self._batch_output
            self._first = self._batch_output = None
            if first is not None:
                self.probes = Probes.of(self.model, self.source, first, batch_output)

    def close(self) -> None:
        """Likewise at the end of a fit, after which weights may be written to and put back."""
        self.seal()
        self._before = None

    def current(self, *, thorough: bool = False) -> AnyTap:
        """The tap, if the model is still that of the fit.

        Args:
            thorough: look at weights and outputs even if nothing seems to have happened (writes
                through `.data` leave no trace).

        Raises:
            ValueError: weights or outputs have changed.
        """
        tied = self._tied
        if tied is not None and not thorough and tied[1].same():
            return tied[0]
        with self._lock:
            self._tied = self._checked(thorough)
            return self._tied[0]

    @property
    def placement(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the model, as of the last look at it."""
        return placement(self.model) if self._tied is None else self._tied[1].placement

    def header(self) -> dict[str, Any]:
        """What a file keeps of the tap."""
        if self._tied is not None:
            return self._described(self._tied[0])
        assert self._header is not None
        return self._header

    def __getstate__(self) -> dict[str, Any]:
        # A tap shares the model's memory, which a copy would not: it is built again.
        known = self._tied is not None or self._header is not None
        return {**vars(self), "_tied": None, "_header": self.header() if known else None}

    def _checked(self, thorough: bool) -> tuple[AnyTap, Watch]:
        tied, now = self._tied, Watch(self.model)
        if tied is None:
            if self._header is None:
                raise NotFittedError(NO_FIT.format("fit(x, y)"))
            tap = self._from_header(self._header)
            self._check_outputs(set())
            return tap, now
        tap, before = tied
        own = set() if self.probes is None else self.probes.renewed
        written, renewed = before.written(now), before.renewed(now) - own
        if (written or thorough) and model_fingerprint(self.model) != self.fingerprint:
            raise ValueError(
                "The model's weights have changed since the fit (training, loading, or a cast "
                "that loses digits), so its error bars no longer hold. Call fit(x, y) and "
                "calibrate(x, y) again, or restore the weights."
            )
        if written or thorough or renewed:
            self._check_outputs(renewed)
        if written or renewed:
            tap = self._made(self._described(tap))
        return tap, now

    def _check_outputs(self, renewed: set[str]) -> None:
        off = 0.0 if self.probes is None else self.probes.difference(self.model, self.source)
        if off:
            names = ", ".join(repr(name.partition(".")[2]) for name in sorted(renewed))
            since = f"{names} set since?" if renewed else "another activation, factor or statistic?"
            raise ValueError(
                "The model's weights are those of the fit, but its predictions are not: for "
                f"inputs kept from the fit they differ by up to {off:.2g} ({since}), so its error "
                "bars no longer hold. Undo the change, or call fit(x, y) and calibrate(x, y) again."
            )

    def _from_header(self, header: dict[str, Any]) -> AnyTap:
        known = dict(unwrapped(self.model).named_modules())
        fits = own_parameters if header["case"] == "parameters" else is_linear_map
        missing = [name for name in header["layer"] if name not in known or not fits(known[name])]
        if missing:
            raise ValueError(
                f"The file was made with a readout named {missing[0]!r}, which this "
                f"{type(self.model).__name__} does not have. Load it with the model it was made "
                "with."
            )
        if model_fingerprint(self.model) != header["fingerprint"]:
            raise ValueError(
                "The model's weights differ from those the file was fitted with. Load the same "
                "checkpoint into the model first, or fit again."
            )
        _check_source(self.source, header)
        return self._made(header)

    def _made(self, header: dict[str, Any]) -> AnyTap:
        tap: AnyTap
        if header["case"] == "features":
            tap = FeatureTap(self.model, self.source, header["layout"])
        else:
            known = {name: header[name] for name in ("case", "silent", "linear")}
            tap = Tap(self.model, self.source, heads=header["layer"], **known)
        tap.layers = [Layer(**layer) for layer in header.get("watched", ())]
        return tap

    def _described(self, tap: AnyTap) -> dict[str, Any]:
        described = {
            "layer": tap.heads,
            **{name: getattr(tap, name) for name in ("silent", "case", "layout", "linear")},
            "forward": self.source.forward is not None,
            "output": self.source.output,
            "fingerprint": self.fingerprint,
        }
        if tap.layers:
            described["watched"] = [asdict(layer) for layer in tap.layers]
        return described


def model_fingerprint(model: nn.Module) -> str:
    """Of every parameter and buffer: the same on every device, and after a lossless cast."""
    model = unwrapped(model)
    return fingerprint([*model.named_parameters(), *model.named_buffers()])


def _check_source(source: Source, header: dict[str, Any]) -> None:
    given = {"features": source.features is not None, "forward": source.forward is not None}
    needed = {"features": header["case"] == "features", "forward": header["forward"]}
    for name, need in needed.items():
        if need != given[name]:
            verb = "fitted with" if need else "fitted without"
            remedy = "Pass the same function" if need else "Leave it out"
            raise ValueError(f"The file was {verb} {name}=. {remedy} when loading it.")
    if source.output != (fitted := header["output"]):
        raise ValueError(f"The file was fitted with output={fitted!r}, got {source.output!r}.")


def _written(model: nn.Module) -> list[tuple[int, int]]:
    weights = unwrapped(model).parameters()
    return [(id(p), 0 if p.is_inference() else p._version) for p in weights]


_SEARCHED = ("No linear map", "The output does not depend on", "The parameters")
"""How the messages of a search that found no readout begin."""
_DERIVATIVE = (
    "The model returns derivatives of a network by its inputs (forces, a Hamiltonian's flow). Wrap "
    "the network that it differentiates, the energy: fit(x, y, gradients=..., gradient_target=...) "
    "counts what derivatives were trained, and uq.gradient(x) gives them with error bars. As it is:"
)
_FUNCTION = (
    "The output is computed by {}, a torch.autograd.Function that no search can look into (an "
    "adjoint?). Take the plain operations, whose values are the same (of torchdiffeq, odeint "
    "instead of odeint_adjoint). As it is:"
)


def _obstacle(model: nn.Module, source: Source, inputs: Inputs, error: str) -> str:
    """What keeps a search from the readout, where it is in how the model computes; else empty."""
    if "functorch transform" in error:
        return _DERIVATIVE
    if not error.startswith(_SEARCHED):
        return ""
    twin = shadow(model)
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    with contextlib.suppress(Exception), torch.enable_grad(), GraphsKept() as kept:
        output = source.run(twin, *inputs)
        if kept.met:
            return _DERIVATIVE
        nodes: list[Any] = [output.grad_fn]
        seen = set[Any]()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return _FUNCTION.format(type(node).__name__.removesuffix("Backward"))
            nodes += [child for child, _ in node.next_functions]
    return ""
