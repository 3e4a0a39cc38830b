"""The pass of a model that is safe inside a graph: for `torch.compile`, `torch.export` and ONNX.

A tap looks at values and memory to check itself, which no tracer allows; in a graph nothing is
looked at. Two twins of the model are kept: one whose parameters are frozen aliases, for
compilation, and one that holds the model's own parameters, by whose identity an exporter names
them. A `CopiedReadout` has weights of its own, and needs neither; it takes any readout whose
output is linear in the heads' weights: the features are what the output becomes for weights that
are the unit vectors, all at once under `torch.vmap`, which runs what comes before the heads once.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ...models.calling import Source
from ...models.modes import exporting, outside_graphs, refuse_transforms
from ...models.shadow import independent, shadow, unwrapped
from ...models.threads import OfThread
from .binding import Binding
from .cases import side_by_side
from .columns import Columns
from .heads import Call, Keeper, Weighed, as_rows, guard, has_bias, record
from .reading import Reading
from .search import tolerance
from .tail import coarsest
from .tap import AnyTap, Tap

Places = list[tuple[dict[str, Any], dict[str, Any]]]


class ReadoutPass:
    """Inputs -> `Reading`: by the tap, which checks the model; in a graph without a look."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._tap: AnyTap | None = None
        self._graph: TracedReadout | None = None

    def __call__(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reading:
        """One pass."""
        if torch.compiler.is_compiling() and self._graph is not None:
            return self._graph(inputs, keywords)
        if torch.compiler.is_compiling() and exporting():
            raise ValueError(_refusal(self._tap))
        # Only a plain readout is one graph: any other is read between two graphs.
        return self.eager(inputs, keywords)

    @outside_graphs
    def eager(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reading:
        """One pass outside any graph."""
        refuse_transforms()
        return self.current()(*inputs, **keywords)

    def current(self) -> AnyTap:
        """The tap, if the model's weights are still those of the fit."""
        tap = self.binding.current()
        if tap is not self._tap:
            plain = isinstance(tap, Tap) and tap.case == "plain"
            self._graph = TracedReadout(self.binding.model, cast("Tap", tap)) if plain else None
            self._tap = tap
        return tap

    def forget(self) -> None:
        """The tap is built again when it is next needed."""
        self._tap = self._graph = None


def _refusal(tap: AnyTap | None) -> str:
    if tap is None:
        return "This ensemble has not met its model yet: call ens(x) once before exporting it."
    heads, reason = ", ".join(tap.heads), "its features come from the function features="
    if tap.case != "features":
        reason = f"what follows the readout layer ({heads}) is differentiated in each call "
        reason += f"(case {tap.case!r})"
    return (
        f"This ensemble cannot be exported: {reason}. Let the model return the output of a linear "
        "layer as it is, fit that model, and scale or sum the members afterwards."
    )


class TracedReadout:
    """Inputs -> `Reading` for a plain readout, by weights that are the model's own."""

    def __init__(self, model: nn.Module, tap: Tap) -> None:
        model = unwrapped(model)
        named, self._places = shadow(model), cast("Places", [])
        for mine, theirs in zip(named.modules(), model.modules(), strict=True):
            pairs = (mine._parameters, theirs._parameters), (mine._buffers, theirs._buffers)
            self._places += pairs
        self._frozen, self._named = PlainCopy(shadow(model), tap), PlainCopy(named, tap)
        self._follow()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One forward pass inside a tracer."""
        if not exporting():
            return self._frozen.read(args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._named.read(args, kwargs)
        # A non-strict export puts stand-ins into the model while it runs: follow it.
        own = [dict(mine) for mine, _ in self._places]
        self._follow()
        try:
            return self._named.read(args, kwargs)
        finally:
            for (mine, _), tensors in zip(self._places, own, strict=True):
                mine.update(tensors)

    def _follow(self) -> None:
        for mine, theirs in self._places:
            mine.update(theirs)


class CopiedReadout(nn.Module):
    """Inputs -> `Reading` by a shadow or copy of the model, without a look at any value.

    Any number of threads may call it: each runs a twin of its own that shares the copy's memory.
    In a graph the copy itself is run.
    """

    def __init__(self, model: nn.Module, source: Source) -> None:
        super().__init__()
        self.run = _Run(_uncompiled(model), source)
        self.renew()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One pass."""
        return (self if torch.compiler.is_compiling() else self._twin()).read(args, kwargs)

    def renew(self) -> None:
        """Forget the threads' twins: tensors were replaced."""
        self._twin: OfThread[Any] = OfThread(partial(shadow, self))

    def _load_from_state_dict(self, *args: Any) -> None:
        self.renew()  # a state may be assigned
        super()._load_from_state_dict(*args)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One pass of this very copy."""
        raise NotImplementedError


class PlainCopy(CopiedReadout):
    """Of a plain readout: the features are the heads' inputs.

    It is `single` if there is one head, with `ones` where its readings leave out that column.
    """

    def __init__(self, model: nn.Module, tap: Tap) -> None:
        super().__init__(model, tap.source)
        guard(self.run.model, _bare_names(tap.silent))
        self.run.model, self._keepers = record(self.run.model, _bare_names(tap.heads), Keeper)
        self._call = (self.run,)  # found faster than a submodule
        self._flat = isinstance(self._keepers[0].head, nn.Linear)
        self.single = len(tap.heads) == 1
        self.ones = self.single and has_bias(self._keepers[0].head)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One pass."""
        keepers: list[Keeper] = self._keepers
        for keeper in keepers:
            keeper.kept.clear()
        output = self.run(args, kwargs)
        calls = [Call(keeper.head, *keeper.kept.pop(), None) for keeper in keepers]
        return side_by_side(output, calls, [as_rows(call.head, call.input) for call in calls])

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Of one head: the output and the features alone, with little of Python."""
        own = self if torch.compiler.is_compiling() else self._twin()
        keeper = own._keepers[0]
        keeper.kept.clear()
        output = own._call[0].forward(args, kwargs)
        x = keeper.kept.pop()[0]
        return output, x if self._flat and x.ndim == 2 else as_rows(keeper.head, x)


class FeatureCopy(CopiedReadout):
    """Of a user's function."""

    def __init__(self, model: nn.Module, tap: AnyTap, targets: int) -> None:
        super().__init__(model, tap.source)
        self._targets = targets

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One pass and one call of the function."""
        output, function = self.run(args, kwargs), self.run.source.features
        features = cast("Any", function)(self.run.model, *args, **kwargs)
        return Reading(output, features, torch.Size((features.shape[0], self._targets)), -1)


class LinearCopy(CopiedReadout):
    """Of any other readout whose output is linear in the heads' weights.

    `like` is a reading of the tap, whose layout is that of all; `batched` says whether the model
    writes into tensors that it makes (see `_UnderVmap`).
    """

    order: Tensor | None

    def __init__(self, model: nn.Module, tap: Tap, like: Reading, *, batched: bool) -> None:
        super().__init__(model, tap.source)
        guard(self.run.model, _bare_names(tap.silent))
        self.run.model, self._heads = record(self.run.model, _bare_names(tap.heads), Weighed)
        names = {module: name for name, module in self.run.named_modules()}
        self._names = [f"{names[head]}.weights" for head in self._heads]
        self._shared, self._batched = tap.layout == "shared", batched
        for i, units in enumerate(_units(self._heads, joint=tap.layout == "joint")):
            self.register_buffer(f"units{i}", units, persistent=False)
        self._width = like.features.shape[-1]
        self._axis, same = like.axis, like.inner == like.output.shape
        self._rest = None if same else tuple(like.inner[1:])
        self.register_buffer("order", like.order, persistent=False)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """One pass: the output, that for no weights, and those for the unit vectors."""

        def one(given: dict[str, Tensor]) -> Tensor:
            zero = given[self._names[0]][0, 0] * 0
            with _UnderVmap(zero) if self._batched or exporting() else nullcontext():
                output: Tensor = functional_call(self.run, given, (args, kwargs))
                return output

        own = [head.own() for head in self._heads]
        # Large, so that a constant beside them costs no digits; float16 has no room for that.
        size = 1.0 if own[0].dtype == torch.float16 else 2.0**20
        units = [size * self.get_buffer(f"units{i}").to(part) for i, part in enumerate(own)]
        pairs = zip(self._names, own, units, strict=True)
        outputs = torch.vmap(one)({name: torch.cat([w[None], u]) for name, w, u in pairs})
        return self._reading(outputs[0], (outputs[2:] - outputs[1]) / size)

    def _reading(self, output: Tensor, responses: Tensor) -> Reading:
        rest, inner = self._rest, output.shape
        if rest is not None:
            inner = torch.Size((output.numel() // math.prod(rest), *rest))
        if self.order is not None:
            responses = responses.flatten(2)[..., self.order]
        rows = responses.reshape(len(responses), *inner).movedim(self._axis, -1)
        # (D, M, K), also of a single input without a dimension of rows
        rows = rows.unsqueeze(1) if rows.ndim == 2 else rows.flatten(1, -2)
        features = rows[..., 0].mT if self._shared else rows.permute(1, 2, 0)
        features, counts = features[..., : self._width], features[..., self._width :]
        counted = counts if counts.shape[-1] else None
        return Reading(output, features, inner, self._axis, self.order, counted)


class _Run(nn.Module):
    """The call of a model as a module, whose tensors `functional_call` can replace."""

    def __init__(self, model: nn.Module, source: Source) -> None:
        super().__init__()
        self.model, self.source = model, source

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The output."""
        if torch.compiler.is_compiling():
            return self.source.traced(self.model, args, kwargs)
        return self.source.run(self.model, args, kwargs)


class _UnderVmap(TorchFunctionMode):
    """Where a model runs under `vmap`, also one that writes into tensors that it makes.

    These get the hidden dimension by adding `zero`, which has it. Layers of rows in more than two
    dimensions are flattened: in an export torch would fix their sizes.
    """

    made = (torch.zeros, torch.full, torch.empty, torch.zeros_like, torch.empty_like)
    methods = (Tensor.new_zeros, Tensor.new_full, Tensor.new_empty)

    def __init__(self, zero: Tensor) -> None:
        super().__init__()
        self.zero = zero

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and args[0].ndim > 2:
            rows = func(args[0].flatten(0, -2), *args[1:], **(kwargs or {}))
            return rows.reshape(*args[0].shape[:-1], rows.shape[-1])
        result = func(*args, **(kwargs or {}))
        if func in (*self.made, *self.methods) and result.is_floating_point():
            return result + self.zero.to(result.dtype)
        return result


def copied_readout(model: nn.Module, tap: AnyTap, targets: int, probe: Any) -> CopiedReadout:
    """The copy for a tap; `probe` are inputs that it is tried with, (args, kwargs), or None.

    Raises:
        ValueError: no graph gives the features of this readout.
    """
    own = shadow(model)
    if not isinstance(tap, Tap):
        return FeatureCopy(independent(own), tap, targets)
    if tap.case == "plain":
        return PlainCopy(independent(own), tap)
    if not tap.linear or tap.case == "parameters":
        what = "is no linear layer" if tap.linear else "does not enter the output linearly"
        what += " alone (to freeze a linear layer's part of it, fit with layer= that layer)"
        names = ", ".join(name or "the model itself" for name in tap.heads)
        raise ValueError(_CANNOT.format(names, what, "."))
    if probe is None:
        raise ValueError(
            "This fit keeps no inputs to try the frozen readout with (loaded from a file written "
            "with probes=False, or inputs that cannot be copied). Fit again, or save with probes."
        )
    like, reason = tap(*probe[0], **probe[1]).detached(), ""
    for batched in (False, True):  # the latter may run all of the model for each unit vector
        found = LinearCopy(independent(own), tap, like, batched=batched)
        try:
            reason = _difference(found, probe, like)
        except Exception as error:
            reason = f": {type(error).__name__}: {error}"[:200] + "."
        if not reason:
            return found
    what = "is followed by operations that torch.vmap does not take"
    raise ValueError(_CANNOT.format(", ".join(tap.heads), what, reason))


_CANNOT = (
    "This model cannot be frozen: its readout ({}) {}{} Let the model return the output of a "
    "linear layer as it is, fit that model, and change units or sum afterwards; or pass features=."
)


def _difference(copied: CopiedReadout, probe: Any, like: Reading) -> str:
    """What a copy's reading lacks of the tap's; empty if nothing."""
    found, kept = copied(*probe), [like.output, like.features, *copied.parameters()]
    digits = tolerance(coarsest(t for t in kept if t.is_floating_point()))
    for mine, theirs in ((found.output, like.output), (found.features, like.features)):
        size = digits * theirs.abs().max()
        if mine.shape != theirs.shape or not bool(((mine - theirs).abs() <= size).all()):
            return ": it gives other features there."
    return ""


def _units(heads: list[Weighed], *, joint: bool) -> list[Tensor]:
    """For each head the weights (U, D + 1, K): none, the unit vectors, one for each bias it lacks.

    The last are what the columns of such biases would be; see `Reading.counts`.
    """
    columns = Columns([head.head for head in heads], joint=joint)
    like = heads[0].own()
    eye = torch.cat([like.new_zeros(1, columns.width), torch.eye(columns.width).to(like)])
    bare = [i for i, head in enumerate(heads) if not has_bias(head.head)]
    found = []
    for i, head in enumerate(heads):
        each = 1 if joint else head.own().shape[1]
        units = torch.stack([columns.share(row[:, None].expand(-1, each), i) for row in eye])
        units = nn.functional.pad(units, (0, 0, 0, int(i in bare)))
        extra = like.new_zeros(0 if joint else len(bare), *units.shape[1:])
        if i in bare and not joint:
            extra[bare.index(i), -1] = 1
        found.append(torch.cat([units, extra]))
    return found


def _bare_names(names: list[str]) -> list[str]:
    return [name.replace("._orig_mod", "").replace("_orig_mod.", "") for name in names]


def _uncompiled(model: nn.Module) -> nn.Module:
    """The model with what `torch.compile` made of its modules taken off."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            setattr(module, name, unwrapped(child) if "_orig_mod" in child._modules else child)
    return model
