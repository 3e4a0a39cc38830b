r"""Any regressor as a function $\tilde y(w, x)$ of one flat vector of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...data.samples import doubled, sample_count
from ...models.calling import pick
from ...models.shadow import shadow
from ...models.threads import OfThread
from ...notices import notify
from .parameters import Parameters, Subset

Function = Callable[..., Any]


@dataclass(frozen=True)
class Regressor:
    """f(params, *inputs) with the selected parameters as a flat vector.

    Attributes:
        parameters: where the flat vector goes.
        function: f(params, *inputs, **kwargs) -> (N, ...).
        copies: eval-mode copies that share the model's tensors, where the regressor is one.
    """

    parameters: Parameters
    function: Function
    copies: OfThread[nn.Module] | None = None

    @classmethod
    def of(
        cls,
        f: Function | nn.Module,
        params: Any = None,
        *,
        subset: Subset | None = None,
        output: str | int | None = None,
    ) -> Regressor:
        """From a function and its parameters, or a module; arguments of `PredictionRigidity`."""
        if isinstance(f, nn.Module):
            if params is not None:
                raise ValueError("A module brings its own parameters: leave params out.")
            twin = shadow(f)
            tree = dict(twin.named_parameters())
            buffers = {name: buffer.clone() for name, buffer in twin.named_buffers()}
            copies = OfThread(partial(shadow, twin))
            return cls(Parameters.of(tree, subset), _Applied(copies, buffers, output), copies)
        if not callable(f):
            raise TypeError(f"Expected f(params, x) or a torch.nn.Module, got {type(f).__name__}.")
        if params is None:
            raise ValueError("Give the fitted parameters: PredictionRigidity(f, params).")
        return cls(Parameters.of(params, subset), partial(_picked, f, output))

    @property
    def module(self) -> nn.Module | None:
        """This thread's copy, which is called with other parameters put in and may get hooks."""
        return None if self.copies is None else self.copies()

    @property
    def flat(self) -> Tensor:
        """The fitted parameters, (P,)."""
        return self.parameters.flat

    def __len__(self) -> int:
        return len(self.parameters)

    def outputs(self, flat: Tensor, *inputs: Any, **kwargs: Any) -> Tensor:
        """Predictions (N, K) at given parameters."""
        raw = self.raw(flat, *inputs, **kwargs)
        return raw.reshape(len(raw), -1)

    def raw(self, flat: Tensor, *inputs: Any, **kwargs: Any) -> Tensor:
        """Predictions shaped as f returns them, their first dimension checked."""
        result: Tensor = self.function(self.parameters.restore(flat), *inputs, **kwargs)
        self._check_rows(result, *inputs, **kwargs)
        return result

    def _check_rows(self, result: Tensor, *inputs: Any, **kwargs: Any) -> None:
        rows = sample_count(*inputs, **kwargs)
        if result.ndim == 0 or (rows is not None and result.shape[0] != rows):
            raise ValueError(
                f"f must be batched: for {rows} samples expected outputs of shape ({rows},) or "
                f"({rows}, K), got {tuple(result.shape)}. A function of one sample becomes batched "
                "by torch.func.vmap(f, in_dims=(None, 0))."
            )

    def double(self) -> Regressor:
        """The same with parameters and buffers in float64; give it float64 inputs."""
        function = self.function
        function = function.double() if isinstance(function, _Applied) else function
        return replace(self, parameters=self.parameters.double(), function=function)

    def used(self, batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> Regressor:
        """The same regressor without parameters that f does not use; they are named in a warning.

        Batches, inputs as (args, kwargs), are read until every parameter has been used.
        """
        names = self.parameters.names
        idle = set(names)
        for args, kwargs in batches:
            idle -= self._touched(*args, **kwargs)
            if not idle:
                return self
        if len(idle) == len(names):
            raise ValueError(
                "f does not depend on its parameters through torch operations: its output has no "
                f"derivative by {', '.join(names)}. Use the parameters that f is given, and torch "
                "functions."
            )
        listed = ", ".join(name for name in names if name in idle)
        notify(f"f does not use {listed}: left out, as they have no say in any prediction.")
        return replace(self, parameters=self.parameters.without(idle))

    def _touched(self, *inputs: Any, **kwargs: Any) -> set[str]:
        """Parameters that a batch's predictions depend on."""
        with torch.enable_grad():
            pieces = self.flat.split_with_sizes(self.parameters.sizes)
            leaves = [piece.clone().requires_grad_() for piece in pieces]
            result = self.function(self.parameters.filled(leaves), *inputs, **kwargs)
            self._check_rows(result, *inputs, **kwargs)
            if not result.requires_grad:
                return set()
            found = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
            slopes: list[Tensor | None] = list(found)
        pairs = zip(self.parameters.names, slopes, strict=True)
        return {name for name, slope in pairs if slope is not None}


def _picked(f: Function, output: str | int | None, /, *args: Any, **kwargs: Any) -> Tensor:
    """One output of a user's function."""
    result = f(*args, **kwargs)
    if isinstance(result, Tensor) and result.ndim == 0:
        return result  # refused by name, with the number of samples, in `raw`
    if hasattr(result, "__array__") and not isinstance(result, Tensor):
        got = type(result).__name__
        raise TypeError(f"f must return a tensor that torch can differentiate, got {got}.")
    return pick(result, output)


@dataclass(frozen=True)
class _Applied:
    """A module called with other parameters than its own."""

    copies: OfThread[nn.Module]
    buffers: dict[str, Tensor]
    output: str | int | None

    def __call__(self, params: Any, *inputs: Any, **kwargs: Any) -> Tensor:
        state = {**params, **self.buffers}
        return pick(functional_call(self.copies(), state, inputs, kwargs), self.output)

    def double(self) -> _Applied:
        """The same in float64."""
        floating = {name: doubled(buffer) for name, buffer in self.buffers.items()}
        return replace(self, buffers=floating)
