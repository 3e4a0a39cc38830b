"""The tie between a fit and the model it was made with: the tap, and whether it still holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...data.batches import Batch
from ...data.sketch import fingerprint
from ...models.calling import Source
from ...models.shadow import signature, unwrapped
from ...notices import NO_FIT, NotFittedError, require, require_kinds
from .cases import CASES
from .tap import AnyTap, FeatureTap, Tap

_FLAGS = {"linear": bool, "forward": bool, "output": str | int | None}
_HEADER = {"layer": list, "silent": list, "case": str, "layout": str, "fingerprint": str} | _FLAGS


class Binding:
    """A tap on a model, rebuilt when the model moves, refused when its weights change.

    Args:
        model: the trained model.
        source: how it is called.
        layer: name (or names) of the readout layer, where given.
        header: of a file or a state dict; its tap is built when it is first needed. (A
            `state_dict` brings the fit before the weights that it must be checked against.)

    Attributes:
        fingerprint: of the weights that the tap was found with.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        layer: str | list[str] | None,
        header: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.source, self.layer, self._header = model, source, layer, header
        if header is not None:
            require_kinds(header, _HEADER, "the readout")
            named = all(isinstance(name, str) for name in header["layer"] + header["silent"])
            require(named and header["case"] in {*CASES, "features"}, "the readout")
        self.fingerprint: str | None = None if header is None else header["fingerprint"]
        self._tap: AnyTap | None = None
        self._signature: tuple[object, ...] | None = None

    def restored(self, header: dict[str, Any] | None = None) -> Binding:
        """Another tie to the same model that knows the readout of a header, or none yet."""
        return Binding(self.model, self.source, self.layer, header)

    def find(self, batch: Batch) -> AnyTap:
        """Find the readout on a first batch."""
        self._tap = Tap.find(
            self.model,
            _few(batch.args, self.source),
            batch.kwargs,
            layer=self.layer,
            **vars(self.source),
        )
        self._signature = signature(self.model)
        self.fingerprint = model_fingerprint(self.model)
        return self._tap

    def current(self, *, thorough: bool = False) -> AnyTap:
        """The tap, if the model's weights are still those of the fit.

        Args:
            thorough: hash the weights even if nothing seems to have been written to them
                (writes through `.data` leave no trace).

        Raises:
            ValueError: the weights have changed.
        """
        now = signature(self.model)
        if self._tap is None:
            if self._header is None:
                raise NotFittedError(NO_FIT.format("fit(train)"))
            self._tap, self._signature = self._from_header(self._header), now
            return self._tap
        if now == self._signature and not thorough:
            return self._tap
        if model_fingerprint(self.model) != self.fingerprint:
            raise ValueError(
                "The model's weights have changed since the fit (training, loading, or a cast "
                "that loses digits), so its error bars no longer hold. Call fit(train) and "
                "calibrate(valid) again, or restore the weights."
            )
        if now != self._signature:
            self._tap = self._from_header(self._described(self._tap))
            self._signature = now
        return self._tap

    def header(self) -> dict[str, Any]:
        """What a file or a state dict keeps of the tap."""
        if self._tap is not None:
            return self._described(self._tap)
        assert self._header is not None
        return self._header

    def _from_header(self, header: dict[str, Any]) -> AnyTap:
        """The tap of a file.

        Raises:
            ValueError: another model, other weights, or `features=` missing.
        """
        known = dict(unwrapped(self.model).named_modules())
        missing = [name for name in header["layer"] if name not in known]
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
        if header["case"] == "features":
            return FeatureTap(self.model, self.source, header["layout"])
        return Tap(
            self.model,
            self.source,
            heads=header["layer"],
            case=header["case"],
            silent=header["silent"],
            linear=header["linear"],
        )

    def _described(self, tap: AnyTap) -> dict[str, Any]:
        return {
            "layer": tap.heads,
            "silent": tap.silent,
            "case": tap.case,
            "layout": tap.layout,
            "linear": tap.linear,
            "forward": self.source.forward is not None,
            "output": self.source.output,
            "fingerprint": self.fingerprint,
        }


def model_fingerprint(model: nn.Module) -> str:
    """Of every parameter and buffer: the same on every device, and after a lossless cast."""
    model = unwrapped(model)
    return fingerprint([*model.named_parameters(), *model.named_buffers()])


def _check_source(source: Source, header: dict[str, Any]) -> None:
    """A file holds no functions: those of the fit must be given again."""
    given = {"features": source.features is not None, "forward": source.forward is not None}
    needed = {"features": header["case"] == "features", "forward": header["forward"]}
    for name, need in needed.items():
        if need != given[name]:
            verb = "fitted with" if need else "fitted without"
            remedy = "Pass the same function" if need else "Leave it out"
            raise ValueError(f"The file was {verb} {name}=. {remedy} when loading it.")
    if source.output != header["output"]:
        raise ValueError(
            f"The file was fitted with output={header['output']!r}, got {source.output!r}."
        )


def _few(args: tuple[Any, ...], source: Source, rows: int = 64) -> tuple[Any, ...]:
    """The first rows of a batch that is one tensor: enough to find a readout."""
    if source.forward is None and len(args) == 1 and isinstance(args[0], torch.Tensor):
        return (args[0][:rows],)
    return args
