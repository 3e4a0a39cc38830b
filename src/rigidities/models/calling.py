"""How to call a model, and which tensor of its result is the prediction."""

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

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..notices import is_own

FeatureFunction = Callable[..., Any]
ForwardFunction = Callable[[nn.Module, Any], Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """How to call a model: the user's `forward`, `features` and `output` choices."""

    forward: ForwardFunction | None = None
    features: FeatureFunction | None = None
    output: str | int | None = None

    def run(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        worked: str | None = "",
    ) -> Tensor:
        """The model's output for a batch; what it raises says how it was called, and `worked`."""
        call = model if self.forward is None else partial(self.forward, model)
        inputs = [*args, *kwargs.values()]
        for value in inputs:
            if type(value) is not Tensor or value.is_inference():
                inputs = [tensor for tensor in _tensors(inputs) if not tensor.is_inference()]
                break
        versions = list(map(_times_written, inputs))
        try:
            result = call(*args, **kwargs)
        except _PLAIN as error:
            if type(error) not in _PLAIN or is_own(error):
                raise  # out of memory, a class of the user's, a refusal
            remedy = f" In the fit {worked} worked." if worked else ""
            if worked is None:  # on the first batch of a fit
                remedy = _KEYWORDS if kwargs else _places(model, len(args))
                remedy = " forward= gets each batch whole." if self.forward else f" {remedy}"
            own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
            met = {one.dtype for one in tree_leaves([args, kwargs]) if isinstance(one, Tensor)}
            if "dtype" in str(error) and own is not None and met - {own}:
                cast = f"x.to({own}), of an array x.astype('{str(own)[6:]}')"
                remedy = f" Tensors, and arrays of integers, keep their dtype: {cast}.{remedy}"
            said = f"{type(error).__name__}: {error}".rstrip(".")
            raise type(error)(f"{self.call(model, args, kwargs)} raised {said}.{remedy}") from error
        if list(map(_times_written, inputs)) != versions:
            raise ValueError(
                f"{self.call(model, args, kwargs)} writes into its inputs in place, so that every "
                "pass would change your data. Let the model write to copies (x = x - 1 instead of "
                "x -= 1), or let forward= give it some: forward=lambda m, b: m(b[0].clone())."
            )
        return pick(result, self.output)

    def traced(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The same inside a tracer, which looks at no value and raises errors of its own."""
        call = model if self.forward is None else partial(self.forward, model)
        return pick(call(*args, **kwargs), self.output)

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """A call of the model, for messages."""
        given = [*map(described, args), *(f"{k}={described(v)}" for k, v in kwargs.items())]
        name = type(model).__name__
        names = [name] if self.forward is None else ["forward", name]
        return f"{names[0]}({', '.join(names[1:] + given)})"


def copied(inputs: Inputs) -> Inputs:
    """Inputs in memory of their own, as far as they can be copied."""
    memo: dict[int, Any] = {}
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):  # also one that a graph computes, which deepcopy refuses
            memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    try:
        return copy.deepcopy(inputs, memo)
    except Exception:  # whatever a batch of the user's raises
        return inputs


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    """The tensors inside containers, and inside objects such as batches of graphs."""
    waiting = list(values)
    for _ in range(_LOOKED_AT):
        if not waiting:
            return
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif type(value) is dict:
            waiting += islice(value.values(), _LOOKED_AT)
        elif type(value) in (tuple, list):
            waiting += value[:_LOOKED_AT]
        elif not isinstance(value, nn.Module):
            waiting += islice(getattr(value, "__dict__", {}).values(), _LOOKED_AT)


_times_written = attrgetter("_version")
_LOOKED_AT = 256
"""Entries of inputs that are looked at for tensors, at most, in every pass."""
_PLAIN = (TypeError, RuntimeError, ValueError, AttributeError, KeyError, IndexError, AssertionError)
_KEYWORDS = (
    "A mapping's entries are keyword inputs, but for the target. For a model of the mapping itself "
    "pass forward=lambda m, b: m(b), for one of some entries forward=lambda m, b: m(b['key']), "
    "and target=lambda b: b['key'] with the keys that yours have."
)


def _places(model: nn.Module, given: int) -> str:
    """What to pass for tuples, with as many places as the model's `forward` takes."""
    known: list[inspect.Parameter] = []
    with suppress(ValueError):  # TorchScript has no signature
        known = [*inspect.signature(model.forward).parameters.values()]
    named = [one for one in known if one.kind is one.POSITIONAL_OR_KEYWORD]
    taken = min(given, len(named) or given)
    places = [f"b[{i}]" for i in range(taken)]
    places += ["None"] * (sum(one.default is one.empty for one in named) - taken)
    return (
        "Of a tuple, as of fit(x, y), the last is the target, all before it are inputs. Else pass "
        f"forward=lambda m, b: m({', '.join(places)}) and target=lambda b: b[{taken}] with the "
        "places that yours have."
    )


def described(value: Any) -> str:
    """Kind and size of a value, for messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)} ({', '.join(map(described, value))})"
    keys = f" with keys {list(value)}" if isinstance(value, Mapping) else ""
    return "None" if value is None else type(value).__name__ + keys


def pick(result: Any, output: str | int | None) -> Tensor:
    """The predicted tensor in whatever a model returns.

    Args:
        result: a tensor, a mapping, a tuple or list, or an object with attributes.
        output: key, index or attribute; needed where there are several tensors, except that
            a field named `logits` is taken by itself.

    Raises:
        ValueError: more than one tensor to choose from, or none by that name.
    """
    chosen = result
    if output is not None:
        chosen = _named(result, output)
    elif not isinstance(result, Tensor):
        chosen = _only(result)
    if not isinstance(chosen, Tensor):
        raise ValueError(
            f"The model's output is a {type(chosen).__name__}, expected a tensor. Pass output= "
            "to pick a field of it, or forward= to compute the prediction."
        )
    if chosen.is_nested:
        raise ValueError(
            "The model's output is a nested tensor, expected a plain one. Pass forward= to take "
            "its rows, m(b[0]).values() of a jagged one, with targets to match."
        )
    if chosen.ndim == 0:
        raise ValueError(
            "The model's output is a single number for the whole batch, expected one prediction "
            "per sample. Pass forward= or output= to get at the predictions."
        )
    if chosen.is_complex():
        raise ValueError(
            f"The model's output is {chosen.dtype}, expected real numbers. Pass forward= to take "
            "its real part, modulus or both, torch.view_as_real(m(b[0])), with targets to match."
        )
    if not chosen.is_floating_point():
        raise ValueError(f"The model's output is {chosen.dtype}, expected floating point.")
    return chosen


def _only(result: Any) -> Any:
    if getattr(result, "logits", None) is not None:
        return result.logits
    if isinstance(result, Mapping):
        if "logits" in result:
            return result["logits"]
        values, what = list(result.values()), f"a mapping with keys {list(result)}"
    elif isinstance(result, (tuple, list)):
        values, what = list(result), f"a {type(result).__name__} of {len(result)}"
    else:
        return result
    if len(values) == 1:
        return values[0]
    raise ValueError(
        f"The model returns {what}: which is the prediction? Pass output= "
        "(a key of a mapping, an index of a tuple), for example output=0."
    )


def _named(result: Any, output: str | int) -> Any:
    if isinstance(result, Tensor):
        raise ValueError(
            f"output={output!r} picks one of several things that a model returns (a key, an "
            f"attribute, an index), but this model returns one tensor {tuple(result.shape)}. "
            "Leave output= out; for some of its columns pass forward=lambda m, b: m(b[0])[:, :1]."
        )
    try:
        if isinstance(output, int) or isinstance(result, Mapping):
            return result[output]
        return getattr(result, output)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        kind = f"keys {list(result)}" if isinstance(result, Mapping) else type(result).__name__
        raise ValueError(f"output={output!r} is not in the model's result ({kind}).") from error
