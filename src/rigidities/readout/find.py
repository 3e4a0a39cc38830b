"""Finding the readout on the first batch.

`find_readout` looks at a few rows of the first batch where these can be cut out. `search` names the
heads; then it is decided which kind of readout they are (`_readout_of`), and the claim is checked:

1. A layer of torch's own class whose output is returned, perhaps reshaped, is `plain`: the class
   says what it computes. One pass with other weights shows that they are used nowhere else.
2. Any other linear maps are `plain` too, if the output is what they returned, or have a tail. One
   pass shows its form, one backward pass of the same graph shows whether the features are the
   derivatives by the weights (`checks.gradients_agree`).
3. If they are not, because the maps compute something else or their weights are used elsewhere
   too, the readout consists of their parameters, whatever they compute.

In the last two cases one pass with other weights shows whether the output changes as the features
say (`checks.change_agrees`). If it does not for a large change, a small one tells whether the
output is not linear in the weights, which is said, or the derivatives are not true, which is
refused. In all, the model is called this often with the few rows:

| the output is | calls |
| --- | --- |
| what a layer of torch's own returned, perhaps reshaped | 2: the search, one with other weights |
| linear in the weights of linear layers | 3: the search, one with derivatives, other weights |
| computed from linear layers, but not linear in their weights | 5: two more for the slope |
| not a function of the layers' outputs alone, so their parameters are taken | 6 at most |
| read with `features=` | 1 |

Parameters that reach the output past the heads, and `layer=` with modules that are not linear maps,
take passes of their own. A model that is not in float64 is judged in a float64 copy: the tolerance
that a coarser type needs would hide a mixing of targets.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch
from ..models.calling import (
    ORDINARY_ERRORS,
    Inputs,
    SeveralOutputsError,
    Source,
    copied,
    several_outputs,
)
from ..models.changes import FirstPass, attributes, first_rows, renewed
from ..models.double import InDouble, double_copy, is_double
from ..models.shadow import shadow, unwrapped
from .checks import (
    change_agrees,
    gradients_agree,
    large_change,
    returned_linear_maps,
    revealing_change,
    slope_agrees,
)
from .columns import Columns
from .heads import (
    Call,
    has_free_weight,
    is_linear_by_class,
    layers_inside,
    linear_maps,
    with_leaves,
)
from .linearity import Run
from .reading import Reading
from .readout import (
    AnyReadout,
    GivenFeatures,
    HeadsNotCalledError,
    Readout,
    given_features,
    given_layout,
)
from .search import (
    FoundHeads,
    NoReadoutError,
    advised_layers,
    find_heads,
    is_scripted,
    left_out_notice,
    named_heads,
    reaches,
)
from .tail import (
    GraphsKept,
    coarsest_rounding,
    parameters_reading,
    plain_reading,
    row_gains,
    rows_reading,
    samples_reading,
    shared_gains,
)

__all__ = ["FoundReadout", "find_readout"]

_FALSE_DERIVATIVES = (
    "The derivatives of the output with respect to the weights of {} do not predict how the output "
    "changes with them. Does the forward pass write through .data or NumPy, or call a "
    "torch.autograd.Function whose backward is not its derivative (a straight-through estimator)? "
    "Use plain operations of torch there, or pass features=callable(model, *inputs) -> (N, D)."
)
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


class FalseDerivativesError(ValueError):
    """Derivatives of the output do not predict how it changes.

    Args:
        readout: The readout whose weights they belong to.
    """

    def __init__(self, readout: Readout) -> None:
        super().__init__(_FALSE_DERIVATIVES.format(readout.head_names))


@dataclass(frozen=True)
class FoundReadout:
    """A readout, and what its search saw.

    Attributes:
        readout: The readout.
        reading: What it reads off the first batch.
        first_pass: The pass that it was found with.
        notice: What the user should know of the readout; "" if nothing.
    """

    readout: AnyReadout
    reading: Reading
    first_pass: FirstPass
    notice: str


def find_readout(
    model: nn.Module, source: Source, layer: str | list[str] | None, batch: Batch
) -> FoundReadout:
    """Find the readout on a first batch, and read that batch.

    A few rows of the batch are searched first. If the readout found there cannot read the whole
    batch, because more layers are called in it or what follows the heads does more with it, the
    whole batch is searched.

    Args:
        model: The trained model.
        source: How to call it.
        layer: Names of the readout's modules and parameters; None to search for them.
        batch: The first batch.

    Raises:
        ValueError: There is no such readout; the message names the way out.
    """
    model = unwrapped(model)
    inputs: Inputs = (batch.args, batch.kwargs)
    few_rows = first_rows(inputs)
    if few_rows is not None:
        found = None
        # Any error or warning of the model will come again with the whole batch.
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _found(model, source, layer, few_rows)
        if found is not None and _has_whole_samples(found[1], few_rows):
            readout, first_pass, notice = found
            with suppress(ValueError, RuntimeError):
                reading = _confirmed_reading(readout, inputs)
                if reading is not None:
                    return FoundReadout(readout, reading, first_pass, notice)
    try:
        readout, first_pass, notice = _found(model, source, layer, inputs)
    except SeveralOutputsError as error:
        raise ValueError(several_outputs(error.result, batch.target)) from None
    except (ValueError, RuntimeError) as error:
        reason = _obstacle(model, source, inputs, error)
        if not reason:
            raise
        raise ValueError(f"{reason} {error}") from error
    reading = readout.read(batch.args, batch.kwargs)
    return FoundReadout(readout, reading, first_pass, notice)


@torch.enable_grad()  # for models that differentiate inside forward
def _confirmed_reading(readout: AnyReadout, inputs: Inputs) -> Reading | None:
    """What a readout that was found with a few rows reads off the whole batch.

    A layer of torch's own that is returned needs no check. Any other could do something with later
    rows that it did not do with the first ones (a clamp that was idle).

    Returns:
        None if the features are not the derivatives by the weights.
    """
    args, kwargs = inputs
    if not isinstance(readout, Readout) or readout.kind == "parameters":
        return readout.read(args, kwargs)
    columns = readout.columns
    by_class = all(is_linear_by_class(head) for head in columns.heads)
    if readout.kind == "plain" and by_class:
        return readout.read(args, kwargs)
    with with_leaves(columns.heads) as leaves:
        output, calls = readout.recorded_pass(inputs, adds_offsets=True)
        if not by_class and not returned_linear_maps(calls):
            return None
        reading = None
        if readout.kind == "plain":
            reading = plain_reading(output, calls, columns)
        if reading is None:
            reading = readout.reading_of(output, calls)
        if not gradients_agree(reading, calls, columns, leaves):
            return None
    return reading.detached()


def _has_whole_samples(first_pass: FirstPass, few_rows: Inputs) -> bool:
    """Whether rows were samples, and not atoms, so that no sample was cut in two."""
    rows = len(tree_leaves(few_rows)[0])
    outputs = len(first_pass.output)
    return outputs > 0 and outputs % rows == 0


def _found(
    model: nn.Module, source: Source, layer: str | list[str] | None, inputs: Inputs
) -> tuple[AnyReadout, FirstPass, str]:
    """The readout found with some inputs, the pass it was found with, and a notice, or ""."""
    if source.features is not None:
        return *_given(model, source, inputs), ""
    if any(base.__module__.startswith("keras.") for base in type(model).__mro__):
        raise ValueError(
            f"Expected layers of torch, got a Keras model ({type(model).__name__}): its "
            "Dense layers are no nn.Linear. Put its layers before the last Dense layer into a "
            "torch.nn.Module that ends in an nn.Linear with the same weights; docs/frameworks.md, "
            'under "Keras on the torch backend", has the class to copy.'
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "A TorchScript module cannot be inspected. Pass features=callable(model, *inputs) "
            "-> (N, D), or wrap the original nn.Module."
        )
    inputs = copied(inputs)  # a model that writes into them is refused, and nothing is lost
    args, kwargs = inputs

    def run(model_shadow: nn.Module) -> Tensor:
        return source.run(model_shadow, args, kwargs, None)

    if layer is None:
        heads = find_heads(model, run)
    else:
        names = list(layer) if isinstance(layer, (list, tuple)) else [layer]
        with torch.enable_grad():
            heads = named_heads(model, _checked_names(model, names), run)
    first_pass = FirstPass(inputs, heads.search_pass.output, heads.search_pass.renewed)
    with torch.enable_grad():
        readout = _readout_of(model, source, heads, inputs)
    notices = []
    if not readout.linear:
        notices.append(_nonlinear_notice(model, readout, heads.later, run))
    if heads.left_out:
        notices.append(left_out_notice(model, heads))
    return readout, first_pass, " ".join(notices)


def _given(model: nn.Module, source: Source, inputs: Inputs) -> tuple[GivenFeatures, FirstPass]:
    """The features that a user's function gives for a first batch, and the pass over it."""
    inputs = copied(inputs)  # a model that writes into its inputs is refused
    args, kwargs = inputs
    model_shadow = shadow(model)
    before = attributes(model_shadow)
    with torch.enable_grad():  # for models that differentiate inside forward
        output = source.run(model_shadow, args, kwargs, None).detach()
        first_pass = FirstPass(inputs, output, renewed(before, attributes(model_shadow)))
        features = given_features(source, model_shadow, args, kwargs)
    return GivenFeatures(shadow(model), source, given_layout(features)), first_pass


# --- which kind of readout it is ------------------------------------------------------------------


def _readout_of(model: nn.Module, source: Source, heads: FoundHeads, inputs: Inputs) -> Readout:
    """The readout that consists of some heads: the simplest that the checks confirm."""
    pattern = shadow(model)
    args, kwargs = inputs
    of_kind = partial(
        Readout,
        pattern,
        source,
        tuple(heads.names),
        uncalled=tuple(heads.uncalled),
        differentiates=heads.search_pass.differentiates,
        call=source.call(model, args, kwargs),
    )
    may_be_maps = not heads.are_parameters
    may_be_plain = may_be_maps and heads.is_returned
    if may_be_plain:
        plain = of_kind(kind="plain", layout="shared")
        columns = plain.columns
        # The class of torch's own layers says what they compute. Anything else is tried out.
        if columns.disjoint and all(is_linear_by_class(head) for head in columns.heads):
            if _is_plain(plain, columns, inputs, heads.search_pass.output):
                return plain
            may_be_maps = False  # its weights may be used elsewhere too
    parameters = of_kind(kind="parameters", layout="joint")
    if not is_double(pattern):
        try:
            model_in_double = double_copy(pattern)
            if model_in_double is not None:
                with InDouble():
                    double = replace(parameters, model=model_in_double)
                    judged = _judged(
                        double, inputs, may_be_maps=may_be_maps, may_be_plain=may_be_plain
                    )
                return replace(judged, model=pattern)
        except FalseDerivativesError:
            raise
        except Exception:
            pass  # no memory, no float64, or code that insists on a type
    return _judged(parameters, inputs, may_be_maps=may_be_maps, may_be_plain=may_be_plain)


def _is_plain(readout: Readout, columns: Columns, inputs: Inputs, output: Tensor) -> bool:
    """Whether y(w + d) - y(w) = f . d for a random change d of a plain readout's weights.

    The features of a plain head do not depend on its weights, so one pass shows both sides. A
    pass that the model refuses, because it checks its own output, shows nothing.

    Args:
        readout: The readout, of a layer whose class says what it computes.
        columns: The columns of its features.
        inputs: The inputs of the first batch, or of its first rows.
        output: The model's output for them.
    """
    change = 0.1 * large_change(columns.weights(), seed=1)  # of the size of the weights
    try:
        changed_output, calls = readout.recorded_pass(inputs, change=change)
    except ORDINARY_ERRORS:
        return True
    reading = plain_reading(changed_output, calls, columns)
    if reading is None:
        return False
    if not bool(torch.isfinite(changed_output - output).all()):
        return True  # NaN says nothing, and is refused by the fit
    # Seen from the changed weights, the output lies at -d.
    return change_agrees(reading, output, -change, calls) or _is_random(readout, inputs, output)


def _judged(readout: Readout, inputs: Inputs, *, may_be_maps: bool, may_be_plain: bool) -> Readout:
    """The kind, layout and linearity of a readout, by what a few passes show.

    Args:
        readout: The readout as one of `parameters`, which any heads are.
        inputs: The inputs of the first batch, or of its first rows.
        may_be_maps: Whether the heads may be linear maps that are used nowhere else.
        may_be_plain: Whether the graph shows that nothing but a change of shape follows the heads.

    Raises:
        ValueError: The output does not depend on the heads, or its derivatives are not true.
    """
    if may_be_maps:
        # Any tail is joint and coupled. Its simplest form is found with a pass.
        tail = replace(readout, kind="tail", coupled=True)
        judged = None
        with suppress(HeadsNotCalledError):  # without gradients, torch has a path around the layers
            judged = _judged_tail(tail, inputs, may_be_plain=may_be_plain)
        if judged is not None:
            return judged
        # The modules inside the heads that own parameters become the heads.
        names: list[str] = []
        for name in readout.heads:
            names += layers_inside(readout.model, name, opened=True)
        readout = replace(readout, heads=tuple(dict.fromkeys(names)))
    output, calls = readout.recorded_pass(inputs, adds_offsets=True)
    _require_dependence(readout, output, [leaf for call in calls for leaf in call.leaves])
    columns = readout.columns
    reading = parameters_reading(output, calls, columns)
    linear = _is_linear(readout, reading, inputs)
    if not linear and not _has_true_slope(readout, reading, inputs):
        raise FalseDerivativesError(readout)
    return replace(readout, linear=linear)


def _judged_tail(readout: Readout, inputs: Inputs, *, may_be_plain: bool) -> Readout | None:
    """A readout of linear maps, and what follows them.

    Args:
        readout: The readout as a joint and coupled tail.
        inputs: The inputs of the first batch, or of its first rows.
        may_be_plain: Whether the output may be what the heads returned. Hooks may add something
            all the same, which shows with other weights: then this is asked again.

    Returns:
        None if the features are not the derivatives by the weights: the maps compute something
        else, or the model does something else with their weights.

    Raises:
        ValueError: The output does not depend on the heads, or its derivatives are not true.
    """
    modules = readout.columns.heads
    if not all(is_linear_by_class(head) or has_free_weight(head) for head in modules):
        return None
    with with_leaves(modules) as leaves:
        output, calls = readout.recorded_pass(inputs, adds_offsets=True)
        maps_by_class = all(is_linear_by_class(head) for head in modules)
        if not maps_by_class and not returned_linear_maps(calls):
            return None
        tail_readout, reading = _form_of_tail(readout, output, calls, may_be_plain=may_be_plain)
        if not gradients_agree(reading, calls, tail_readout.columns_of(modules), leaves):
            return None
    if _is_linear(tail_readout, reading, inputs):
        return tail_readout
    if tail_readout.kind == "plain":
        return _judged_tail(readout, inputs, may_be_plain=False)
    if _has_true_slope(tail_readout, reading, inputs):
        return replace(tail_readout, linear=False)
    raise FalseDerivativesError(tail_readout)


def _form_of_tail(
    readout: Readout, output: Tensor, calls: list[Call], *, may_be_plain: bool
) -> tuple[Readout, Reading]:
    """The readout in its simplest form, and the reading of a pass, with its graph.

    Args:
        readout: The readout as a joint and coupled tail.
        output: The model's output in a pass whose heads added offsets.
        calls: The calls of the heads in that pass.
        may_be_plain: Whether the output may be what the heads returned.
    """
    modules = readout.columns.heads
    if may_be_plain:
        plain = replace(readout, kind="plain", layout="shared", coupled=False)
        reading = plain_reading(output, calls, plain.columns_of(modules))
        if reading is not None:
            return plain, reading
    _require_dependence(readout, output, [call.offset for call in calls])
    shared = replace(readout, layout="shared", coupled=False)
    columns = shared.columns_of(modules)
    if _rows_can_be_told_apart(readout):
        gains = row_gains(output, calls, columns)
        if gains is not None:
            order = gains[0].output_layout.order
            alike = shared_gains(gains)
            if alike is not None:
                return replace(shared, order=order), rows_reading(output, calls, columns, alike)
            separate = replace(shared, layout="separate", order=order)
            return separate, rows_reading(output, calls, columns, gains)
    columns = readout.columns_of(modules)
    reading = samples_reading(output, calls, columns, coupled=False)
    if reading is not None:
        return replace(readout, coupled=False), reading
    reading = samples_reading(output, calls, columns, coupled=True)
    assert reading is not None
    return readout, reading


def _rows_can_be_told_apart(readout: Readout) -> bool:
    """Whether the precision of a model shows if rows and targets are kept apart after the heads.

    In half precision it does not: there the derivatives of each output are taken.
    """
    parameters = [p for p in readout.model.parameters() if p.is_floating_point()]
    single = torch.finfo(torch.float32).eps
    return all(torch.finfo(parameter.dtype).eps <= single for parameter in parameters)


def _require_dependence(readout: Readout, output: Tensor, leaves: Sequence[Tensor | None]) -> None:
    """Refuse an output that autograd cannot lead back to the heads.

    Args:
        readout: The readout.
        output: The model's output.
        leaves: What stands for the heads in its graph: their parameters, or their offsets.
    """
    if not reaches(output, leaves):
        raise NoReadoutError(
            f"The output does not depend on {readout.head_names} through differentiable "
            "operations (torch.no_grad, detach or NumPy in the forward pass?). Name "
            "another layer= or pass features=."
        )


def _is_linear(readout: Readout, reading: Reading, inputs: Inputs) -> bool:
    """Whether y(w + d) - y(w) = f . d for a large random change d of the weights.

    A plain readout's output must be what its heads return for the changed weights too.
    """
    if not bool(torch.isfinite(reading.output.detach()).all()):
        return True  # NaN says nothing of linearity, and is refused by the fit
    change = revealing_change(readout.weights, seed=1)
    changed_output, calls = readout.recorded_pass(inputs, change=change)
    is_plain = readout.kind == "plain"
    if is_plain and plain_reading(changed_output, calls, readout.columns) is None:
        return False
    return change_agrees(reading, changed_output, change, calls)


def _has_true_slope(readout: Readout, reading: Reading, inputs: Inputs) -> bool:
    """Whether f is the slope of the output along a random direction d of the weights.

    The slope is taken by central differences in float64. A coarser type leaves too few digits,
    and counts as True; so does an output that differs from pass to pass.
    """
    if reading.output.dtype != torch.float64:
        return True
    change = 1e-6 * large_change(readout.weights, seed=3)
    ahead, _ = readout.recorded_pass(inputs, change=change)
    behind, _ = readout.recorded_pass(inputs, change=-change)
    if slope_agrees(reading, ahead, behind, change):
        return True
    return _is_random(readout, inputs, reading.output.detach())


def _is_random(readout: Readout, inputs: Inputs, output: Tensor) -> bool:
    """Whether another pass gives another output, beyond rounding."""
    again, _ = readout.recorded_pass(inputs)
    difference = (again.detach() - output).abs().max()
    return not bool(difference <= 64 * coarsest_rounding([output]) * output.abs().max())


# --- what messages say --------------------------------------------------------------------------


def _nonlinear_notice(model: nn.Module, readout: Readout, later: list[str], run: Run) -> str:
    """What to tell of an output that is not linear in the heads' weights.

    Args:
        model: The user's model.
        readout: The readout.
        later: Parameters that act after the heads.
        run: Calls a model on the first batch.

    Raises:
        ValueError: There are such parameters, so that the heads are not the readout.
    """
    if later:
        more = f" and {len(later) - 3} others" if len(later) > 3 else ""
        raise NoReadoutError(
            f"The parameters {', '.join(map(repr, later[:3]))}{more} act after the last "
            f"linear layer ({readout.head_names}), in whose weights the output is not linear, so "
            f"that layer is not the readout. {advised_layers(model, run)}Or pass "
            "features=callable(model, *inputs) -> (N, D) (for an output h @ w, the h), or "
            "name that layer with layer= to use it anyway."
        )
    return (
        f"The output is not linear in the weights of {readout.head_names}. Its local derivative "
        "is used, so the error bars are first order. Use the output before the nonlinearity "
        "(forward=), or name another layer=."
    )


def _obstacle(model: nn.Module, source: Source, inputs: Inputs, error: Exception) -> str:
    """What in the model's computation kept a search from finding a readout; empty if unknown.

    Args:
        model: The user's model.
        source: How to call it.
        inputs: The inputs of the batch.
        error: The error of the search.
    """
    if "functorch transform" in str(error):
        return _DERIVATIVE
    if not isinstance(error, NoReadoutError):
        return ""
    model_shadow = shadow(model)
    for parameter in model_shadow.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    args, kwargs = inputs
    with suppress(Exception), torch.enable_grad(), GraphsKept() as graphs:
        output = source.run(model_shadow, args, kwargs)
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


def _checked_names(model: nn.Module, names: list[Any]) -> list[str]:
    """The names that a user gave by `layer=`, as the model's modules have them.

    Raises:
        TypeError: A name is not a string.
        ValueError: A name is not that of a module or parameter, or there are no parameters to
            differentiate by.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                "layer= must be the name of a layer (or several names), as in "
                "dict(model.named_modules()) or dict(model.named_parameters()), got "
                f"{type(name).__name__}."
            )
    if not names:
        raise ValueError("layer=[] names no layer. Name one, or leave layer= out.")
    modules = dict(model.named_modules())
    known = {*modules, *dict(model.named_parameters(remove_duplicate=False))}
    # A compiled module holds the original one under this name.
    names = [f"{name}._orig_mod" if f"{name}._orig_mod" in modules else name for name in names]
    for name in names:
        if name not in known:
            raise ValueError(
                f"layer={name!r} is not a module or parameter of this model. Its linear maps: "
                f"{', '.join(map(repr, linear_maps(model))) or 'none'}."
            )
    for name in names:
        if is_scripted(model, name):
            raise ValueError(
                f"layer={name!r} has parameters inside TorchScript, which cannot be inspected. "
                "Pass features=."
            )
    for name in names:
        if not layers_inside(model, name):
            kind = type(modules.get(name, nn.Parameter())).__name__
            raise ValueError(
                f"layer={name!r} is a {kind} without floating-point "
                "parameters to differentiate with respect to (quantised?). Name the layer of the "
                "model as it was trained, or pass features=."
            )
    return names
