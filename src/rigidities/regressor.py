r"""Any regressor as a function $\tilde y(w, x)$ of one flat vector of parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .outputs import pick
from .parameters import Parameters, Subset
from .shadow import shadow

Function = Callable[..., Any]


@dataclass(frozen=True)
class Regressor:
    """f(params, *inputs) with the selected parameters as a flat vector.

    Attributes:
        parameters: where the flat vector goes.
        function: f(params, *inputs, **kwargs) -> (N, ...).
        module: an eval-mode copy that shares the model's tensors, where the regressor is one.
    """

    parameters: Parameters
    function: Function
    module: nn.Module | None = None

    @classmethod
    def of(
        cls,
        f: Function | nn.Module,
        params: Any = None,
        *,
        subset: Subset | None = None,
        output: str | int | None = None,
    ) -> Regressor:
        """A regressor from a function and its parameters, or from a module.

        Args:
            f: f(params, *inputs) -> (N,) or (N, ...), batched; or an `nn.Module`.
            params: the fitted parameters; a module brings its own.
            subset: names or prefixes of the parameters that may vary, or callable(name) -> bool.
            output: key, index or attribute of the output, where f returns several.
        """
        if isinstance(f, nn.Module):
            if params is not None:
                raise ValueError("A module brings its own parameters: leave params out.")
            twin = shadow(f)
            tree = dict(twin.named_parameters())
            return cls(Parameters.of(tree, subset), _Applied(twin, output), twin)
        if not callable(f):
            raise TypeError(f"Expected f(params, x) or a torch.nn.Module, got {type(f).__name__}.")
        if params is None:
            raise ValueError("Give the fitted parameters: PredictionRigidity(f, params).")
        return cls(Parameters.of(params, subset), _Picked(f, output))

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
        rows = sample_count(*inputs, **kwargs)
        if result.ndim == 0 or (rows is not None and result.shape[0] != rows):
            got = tuple(result.shape)
            raise ValueError(
                f"f must be batched: for {rows} samples expected outputs of shape ({rows},) or "
                f"({rows}, K), got {got}. A function of one sample becomes batched by "
                "torch.func.vmap(f, in_dims=(None, 0))."
            )
        return result

    def used(self, *inputs: Any, **kwargs: Any) -> Regressor:
        """The same regressor without parameters that f does not use; they are named in a warning.

        Raises:
            ValueError: f uses none of them.
        """
        with torch.enable_grad():
            flat = self.flat.clone().requires_grad_()
            leaves = [piece.clone() for piece in flat.split_with_sizes(self.parameters.sizes)]
            result = self.raw(torch.cat(leaves), *inputs, **kwargs)
            slopes = _slopes(result, leaves)
        idle = [name for name, s in zip(self.parameters.names, slopes, strict=True) if s is None]
        if len(idle) == len(slopes):
            raise ValueError(
                "f does not depend on its parameters through torch operations: its output has no "
                f"derivative by {', '.join(self.parameters.names)}. Use the parameters that f is "
                "given, and torch functions."
            )
        if not idle:
            return self
        warnings.warn(
            f"f does not use {', '.join(idle)}: left out, they have no say in any prediction.",
            stacklevel=4,
        )
        return replace(self, parameters=self.parameters.without(idle))


def sample_count(*inputs: Any, **kwargs: Any) -> int | None:
    """Rows of the first tensor among the inputs; None where there is none."""
    for value in (*inputs, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    return None


def _slopes(result: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    if not result.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(result.sum(), leaves, allow_unused=True))


@dataclass(frozen=True)
class _Picked:
    """One output of a user's function."""

    function: Function
    output: str | int | None

    def __call__(self, params: Any, *inputs: Any, **kwargs: Any) -> Tensor:
        result = self.function(params, *inputs, **kwargs)
        if isinstance(result, Tensor) and result.ndim == 0:
            return result  # refused by name, with the number of samples, in `raw`
        return pick(result, self.output)


@dataclass(frozen=True)
class _Applied:
    """A module called with other parameters than its own."""

    module: nn.Module
    output: str | int | None

    def __call__(self, params: Any, *inputs: Any, **kwargs: Any) -> Tensor:
        return pick(functional_call(self.module, params, inputs, kwargs), self.output)
