"""How to call a model, and which tensor of its result is the prediction.

A `Source` holds what the user chose: `forward`, `features` and `output`. `Source.run` calls a model
for one batch, checks that the model does not write into its inputs, and picks the predicted tensor
from the result. An error of the model is raised again with the call that caused it and a remedy.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..notices import is_own

FeatureFunction = Callable[..., Any]
ForwardFunction = Callable[[nn.Module, Any], Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

ORDINARY_ERRORS = (
    TypeError,
    RuntimeError,
    ValueError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
)
"""Errors of a model that are raised again with a longer message; subclasses pass unchanged."""

_SEARCH_LIMIT = 256
"""At most this many entries of the inputs are searched for tensors in every pass."""

_KEYWORDS_REMEDY = (
    "The entries of a mapping, except the target, are keyword inputs. If the model expects the "
    "mapping itself, pass forward=lambda m, b: m(b) or, if it expects single entries, "
    "forward=lambda m, b: m(b['key']), and target=lambda b: b['key'] with your own keys."
)

_version = attrgetter("_version")
"""Torch's count of how often a tensor was written to."""


@dataclass(frozen=True)
class Source:
    """How to call a model.

    Attributes:
        forward: The user's (model, batch) -> output; None to call the model with the inputs.
        features: The user's (model, *inputs) -> features; None to find the readout in the model.
        output: Key, index or attribute of the prediction in what the model returns.
    """

    forward: ForwardFunction | None = None
    features: FeatureFunction | None = None
    output: str | int | None = None

    def run(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fitted_call: str | None = "",
    ) -> Tensor:
        """The model's output for a batch.

        Args:
            model: The model, or a copy of it.
            args: The positional inputs.
            kwargs: The inputs by keyword.
            fitted_call: The call that worked in the fit, for messages; "" if it is not known, None
                on the first batch of a fit.

        Raises:
            ValueError: The model writes into its inputs, or its result holds no prediction.
            Exception: What the model raises, with a description of the call.
        """
        # This runs once per batch, where every Python call counts: hence no helper function.
        call = model if self.forward is None else partial(self.forward, model)
        tensors = [*args, *kwargs.values()]
        for value in tensors:
            if type(value) is not Tensor or value.is_inference():  # it may contain tensors
                tensors = [inner for inner in _inner_tensors(tensors) if not inner.is_inference()]
                break
        versions = list(map(_version, tensors))
        try:
            result = call(*args, **kwargs)
        except ORDINARY_ERRORS as error:
            if _lacks_forward(model, error):
                raise NotImplementedError(_forward_remedy(model, kwargs)) from error
            if type(error) not in ORDINARY_ERRORS or is_own(error):
                raise  # out of memory, a class of the user's, an error of this library
            symptom = f"{type(error).__name__}: {error}".rstrip(".")
            remedy = self._remedy(error, model, args, kwargs, fitted_call)
            raise type(error)(
                f"{self.call(model, args, kwargs)} raised {symptom}.{remedy}"
            ) from error
        if list(map(_version, tensors)) != versions:
            raise ValueError(
                f"{self.call(model, args, kwargs)} changes its inputs in place, so every pass "
                "would change your data. Let the model write to copies (x = x - 1 instead of x -= "
                "1), or pass copies: forward=lambda m, b: m(b[0].clone())."
            )
        if type(result) is Tensor and self.output is None:
            is_nested = result.is_nested
            if result.ndim and result.is_floating_point() and not is_nested:
                return result  # the usual one, of which `pick` says the same
        return pick(result, self.output)

    def traced(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The model's output for a tracer, without the checks of `run`, which look at values."""
        call = model if self.forward is None else partial(self.forward, model)
        return pick(call(*args, **kwargs), self.output)

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The text of a call, such as "Net(float32 (8, 3))", for messages."""
        inputs = [described(value) for value in args]
        inputs += [f"{key}={described(value)}" for key, value in kwargs.items()]
        name = type(model).__name__
        if self.forward is None:
            return f"{name}({', '.join(inputs)})"
        return f"forward({', '.join([name, *inputs])})"

    def _remedy(
        self,
        error: Exception,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fitted_call: str | None,
    ) -> str:
        """What to do about an error of the model, after a space; "" if there is no advice.

        The arguments are those of `run`.
        """
        remedy = f" In the fit {fitted_call} worked." if fitted_call else ""
        if fitted_call is None:
            if self.forward is not None:
                remedy = " forward= gets the whole batch."
            elif kwargs:
                remedy = f" {_KEYWORDS_REMEDY}"
            else:
                remedy = f" {_tuple_remedy(model, len(args))}"
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        if "dtype" in str(error) and dtype is not None and _input_dtypes(args, kwargs) - {dtype}:
            dtype_name = str(dtype).removeprefix("torch.")
            cast = f"x.to({dtype}), of an array x.astype('{dtype_name}')"
            remedy = f" Tensors, and arrays of integers, keep their dtype: {cast}.{remedy}"
        return remedy


def copied(inputs: Inputs) -> Inputs:
    """Inputs with their own memory; the same inputs where they cannot be copied."""
    memo: dict[int, Any] = {}
    for leaf in tree_leaves(inputs):
        # This includes a tensor with a graph, which deepcopy refuses.
        if isinstance(leaf, Tensor):
            memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    try:
        return copy.deepcopy(inputs, memo)
    except Exception:  # a batch of the user's may raise anything
        return inputs


def _inner_tensors(values: list[Any]) -> Iterator[Tensor]:
    """The tensors inside containers, and inside objects such as batches of graphs."""
    waiting = list(values)
    for _ in range(_SEARCH_LIMIT):
        if not waiting:
            return
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif type(value) is dict:
            waiting += islice(value.values(), _SEARCH_LIMIT)
        elif type(value) in (tuple, list):
            waiting += value[:_SEARCH_LIMIT]
        elif not isinstance(value, nn.Module):
            waiting += islice(getattr(value, "__dict__", {}).values(), _SEARCH_LIMIT)


def _input_dtypes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.dtype]:
    """The dtypes of all tensors among the inputs."""
    return {leaf.dtype for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)}


def _tuple_remedy(model: nn.Module, inputs: int) -> str:
    """How to call the model for a batch that is a tuple, as a sentence.

    Args:
        model: The model, whose `forward` says how many inputs it takes.
        inputs: How many inputs it was called with.
    """
    parameters: list[inspect.Parameter] = []
    with suppress(ValueError):  # TorchScript has no signature
        parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = sum(parameter.default is parameter.empty for parameter in positional)
    used = min(inputs, len(positional) or inputs)
    places = [f"b[{i}]" for i in range(used)]
    places += ["None"] * (required - used)
    return (
        "The last entry of a tuple, as in fit(x, y), is the target; all entries before it are "
        f"inputs. For other tuples, pass forward=lambda m, b: m({', '.join(places)}) and "
        f"target=lambda b: b[{used}] with your own indices."
    )


def _lacks_forward(model: nn.Module, error: Exception) -> bool:
    """Whether an error is torch's for a module, this one, that does not define `forward`."""
    if "_forward_unimplemented" in str(error):
        # The forward that torch puts there takes no keywords. Without any it raises its own error.
        try:
            model.forward()
        except Exception as own_error:
            error = own_error
    if not isinstance(error, NotImplementedError):
        return False
    return f"[{type(model).__name__}] is missing the required" in str(error)


def _forward_remedy(model: nn.Module, kwargs: dict[str, Any]) -> str:
    """What to do about a model without `forward`.

    Args:
        model: The model.
        kwargs: The inputs by keyword that it was called with.
    """
    networks = [name for name, child in model.named_children() if list(child.parameters())]
    network = "net"
    if networks and networks[0].isidentifier():
        network = networks[0]
    place = f"b[{next(iter(kwargs))!r}]" if kwargs else "b[0]"
    return (
        f"{type(model).__name__} does not define forward, so it cannot be called. Say how it "
        f"predicts a batch with forward=, for example forward=lambda m, b: m.{network}({place})."
    )


def described(value: Any) -> str:
    """Type and size of a value, for messages."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    name = type(value).__name__
    if isinstance(value, (tuple, list)):
        entries: list[str] = []
        for entry in value:
            # Tensors are listed one by one, but a list of names says "str" once for all rows.
            if isinstance(entry, Tensor) or described(entry) not in entries:
                entries.append(described(entry))
        return f"{name} of {len(value)} ({', '.join(entries)})"
    if isinstance(value, Mapping):
        return f"{name} with keys {list(value)}"
    return name


def pick(result: Any, output: str | int | None) -> Tensor:
    """The predicted tensor in whatever a model returns.

    Args:
        result: A tensor, a mapping, a tuple or list, or an object with attributes.
        output: Key, index or attribute; needed where there are several tensors, except that
            a field named `logits` is chosen without it.

    Raises:
        ValueError: There are several tensors to choose from, there is none of that name, or the
            tensor does not hold real predictions.
    """
    chosen = result
    if output is not None:
        chosen = _entry(result, output)
    elif not isinstance(result, Tensor):
        chosen = _only_entry(result)
    if not isinstance(chosen, Tensor):
        raise ValueError(
            f"The model's output is a {type(chosen).__name__}, expected a tensor. Pass output= to "
            "select a field of it, or forward= to compute the prediction."
        )
    if chosen.is_nested:
        raise ValueError(
            "The model's output is a nested tensor, expected a plain one. Pass forward= to "
            "extract its rows (m(b[0]).values() of a jagged tensor), with matching targets."
        )
    if chosen.ndim == 0:
        raise ValueError(
            "The model's output is a single number for the whole batch, expected one prediction "
            "per sample. Pass forward= or output= to select the predictions."
        )
    if chosen.is_complex():
        raise ValueError(
            f"The model's output is {chosen.dtype}, expected real numbers. Pass forward= to use "
            "its real part, its modulus, or both parts (torch.view_as_real(m(b[0]))), with "
            "matching targets."
        )
    if not chosen.is_floating_point():
        raise ValueError(f"The model's output is {chosen.dtype}, expected floating point.")
    return chosen


class SeveralOutputsError(ValueError):
    """A model returns several things, and `output=` does not say which is the prediction.

    Args:
        result: What the model returned, a mapping, a tuple or a list.

    Attributes:
        result: As given.
    """

    def __init__(self, result: Any) -> None:
        super().__init__(several_outputs(result))
        self.result = result


def several_outputs(result: Any, target: Tensor | None = None) -> str:
    """The message for a model that returns several things.

    Args:
        result: What the model returned: a mapping, a tuple or a list.
        target: The target, which the prediction should be shaped like; None if not known.
    """
    entries = _entries(result)
    kind = "mapping" if isinstance(result, Mapping) else type(result).__name__
    listed = ", ".join(f"{key!r}: {described(value)}" for key, value in entries.items())
    best = _likely_prediction(entries, target)
    if best is None:
        remedy = "Pass forward= to compute the prediction, one tensor, from it."
    else:
        remedy = f"Pass output= to select the prediction, for example output={best!r}."
    return f"The model returns a {kind} of {len(entries)} ({listed}). {remedy}"


def _entries(result: Any) -> dict[Any, Any]:
    """The entries of a mapping by key, or of a tuple or list by index."""
    return dict(result) if isinstance(result, Mapping) else dict(enumerate(result))


def _likely_prediction(entries: Mapping[Any, Any], target: Tensor | None) -> str | int | None:
    """The key of the entry that is most likely the prediction; None if none can be.

    Args:
        entries: What a model returned, by key or index.
        target: The target; None if not known.
    """
    candidates = {}
    for key, value in entries.items():
        if not isinstance(key, (str, int)) or not isinstance(value, Tensor):
            continue
        if value.ndim and value.is_floating_point() and not value.is_nested:
            candidates[key] = value
    if target is not None:
        for key, value in candidates.items():
            # Dimensions of size one make no difference: (N,) is (N, 1).
            if value.squeeze().shape == target.squeeze().shape:
                return key
    return next(iter(candidates), None)


def _only_entry(result: Any) -> Any:
    """The prediction where `output` is not given: `logits`, or the only entry there is."""
    if getattr(result, "logits", None) is not None:
        return result.logits
    if isinstance(result, Mapping) and "logits" in result:
        return result["logits"]
    if not isinstance(result, (Mapping, tuple, list)):
        return result
    if len(result) != 1:
        raise SeveralOutputsError(result)
    return next(iter(_entries(result).values()))


def _entry(result: Any, output: str | int) -> Any:
    """The entry of a result that the user has named by key, index or attribute."""
    if isinstance(result, Tensor):
        raise ValueError(
            f"output={output!r} selects one of several results of a model (a key, an attribute, "
            f"an index), but this model returns one tensor {tuple(result.shape)}. Leave output= "
            "out; to select columns pass forward=lambda m, b: m(b[0])[:, :1]."
        )
    try:
        if isinstance(output, int) or isinstance(result, Mapping):
            return result[output]
        return getattr(result, output)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        kind = f"keys {list(result)}" if isinstance(result, Mapping) else type(result).__name__
        raise ValueError(f"output={output!r} is not in the model's result ({kind}).") from error
