r"""Any regressor as a function $\tilde y(w, x)$ of one flat vector of parameters.

`Regressor.of` takes a function f(params, *inputs) with its parameters, or a module, whose
parameters and buffers it copies. `outputs` calls it at any flat vector, checks that the result has
a row per sample, and flattens each row to K numbers.
"""

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
"""f(params, *inputs, **kwargs)."""


@dataclass(frozen=True)
class Regressor:
    """f(params, *inputs) with the selected parameters as a flat vector.

    Attributes:
        parameters: The parameters, flat and in their container.
        function: f(params, *inputs, **kwargs) -> (N, ...).
        copies: Copies of the module in eval mode, one per thread, that share its tensors; None
            where the regressor is a plain function.
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
        """From a function and its parameters, or a module.

        Args:
            f: A function f(params, *inputs), or a module.
            params: The parameters of a function; None for a module.
            subset: Which parameters may vary, as in `PredictionRigidity`.
            output: Which of several outputs, as in `PredictionRigidity`.

        Raises:
            TypeError: f is neither.
            ValueError: Parameters are missing, or given beside a module.
        """
        if isinstance(f, nn.Module):
            if params is not None:
                raise ValueError("A module has its own parameters: leave params out.")
            module = shadow(f)
            tree = dict(module.named_parameters())
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            copies = OfThread(partial(shadow, module))
            function = _ModuleFunction(copies, buffers, output)
            return cls(Parameters.of(tree, subset), function, copies)
        if not callable(f):
            raise TypeError(f"Expected f(params, x) or a torch.nn.Module, got {type(f).__name__}.")
        if params is None:
            raise ValueError("Pass the fitted parameters: PredictionRigidity(f, params).")
        return cls(Parameters.of(params, subset), partial(_single_output, f, output))

    @property
    def module(self) -> nn.Module | None:
        """This thread's copy of the module, on which hooks may be set; None for a function."""
        return None if self.copies is None else self.copies()

    @property
    def held_buffers(self) -> list[str]:
        """Names of the buffers that the module had when it was given.

        The copy may have more by now: a pass can fill a buffer that was None.
        """
        if self.module is None or not isinstance(self.function, _ModuleFunction):
            return []
        return list(self.function.buffers)

    @property
    def flat(self) -> Tensor:
        """The fitted parameters, (P,)."""
        return self.parameters.flat

    def __len__(self) -> int:
        return len(self.parameters)

    def outputs(self, flat: Tensor, *inputs: Any, **kwargs: Any) -> Tensor:
        """Predictions (N, K) at the parameters `flat`, (P,)."""
        raw = self.raw(flat, *inputs, **kwargs)
        return raw.reshape(len(raw), -1)

    def raw(self, flat: Tensor, *inputs: Any, **kwargs: Any) -> Tensor:
        """Predictions shaped as f returns them, after a check of their first dimension."""
        result: Tensor = self.function(self.parameters.restore(flat), *inputs, **kwargs)
        self._check_rows(result, *inputs, **kwargs)
        return result

    def _check_rows(self, result: Tensor, *inputs: Any, **kwargs: Any) -> None:
        """Refuse a result whose first dimension is not the number of samples."""
        rows = sample_count(*inputs, **kwargs)
        if result.ndim == 0 or (rows is not None and result.shape[0] != rows):
            raise ValueError(
                f"f must be batched: for {rows} samples expected outputs of shape ({rows},) or "
                f"({rows}, K), got {tuple(result.shape)}. torch.func.vmap(f, in_dims=(None, 0)) "
                "makes a function of one sample batched."
            )

    def double(self) -> Regressor:
        """The same with parameters and buffers in float64; give it float64 inputs."""
        function = self.function
        if isinstance(function, _ModuleFunction):
            function = function.double()
        return replace(self, parameters=self.parameters.double(), function=function)

    def used(self, batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> Regressor:
        """The same regressor without parameters that f does not use; they are named in a warning.

        Args:
            batches: Inputs as (args, kwargs). They are read until every parameter has been used.

        Raises:
            ValueError: f uses none of its parameters.
        """
        names = self.parameters.names
        unused = set(names)
        for args, kwargs in batches:
            unused -= self._used_names(*args, **kwargs)
            if not unused:
                return self
        if len(unused) == len(names):
            raise ValueError(
                "f does not depend on its parameters through torch operations: its output has no "
                f"derivative by {', '.join(names)}. Use the parameters that are passed to f, and "
                "torch functions."
            )
        listed = ", ".join(name for name in names if name in unused)
        notify(
            f"f does not use {listed}. These parameters are left out, because no prediction "
            "depends on them."
        )
        return replace(self, parameters=self.parameters.without(unused))

    def _used_names(self, *inputs: Any, **kwargs: Any) -> set[str]:
        """Names of the parameters that a batch's predictions depend on."""
        with torch.enable_grad():
            pieces = self.flat.split_with_sizes(self.parameters.sizes)
            leaves = [piece.clone().requires_grad_() for piece in pieces]
            result = self.function(self.parameters.filled(leaves), *inputs, **kwargs)
            self._check_rows(result, *inputs, **kwargs)
            if not result.requires_grad:
                return set()
            gradients: list[Tensor | None] = list(
                torch.autograd.grad(result.sum(), leaves, allow_unused=True)
            )
        pairs = zip(self.parameters.names, gradients, strict=True)
        return {name for name, gradient in pairs if gradient is not None}


def _single_output(f: Function, output: str | int | None, /, *args: Any, **kwargs: Any) -> Tensor:
    """Call a user's function and pick one of its outputs."""
    result = f(*args, **kwargs)
    if isinstance(result, Tensor) and result.ndim == 0:
        return result  # `_check_rows` refuses it with the number of samples in its message
    if hasattr(result, "__array__") and not isinstance(result, Tensor):
        got = type(result).__name__
        raise TypeError(f"f must return a tensor that torch can differentiate, got {got}.")
    return pick(result, output)


@dataclass(frozen=True)
class _ModuleFunction:
    """A module as a function of its parameters.

    Attributes:
        copies: Copies of the module, one per thread.
        buffers: Its buffers by name.
        output: Which of several outputs to pick.
    """

    copies: OfThread[nn.Module]
    buffers: dict[str, Tensor]
    output: str | int | None

    def __call__(self, params: Any, *inputs: Any, **kwargs: Any) -> Tensor:
        state = {**params, **self.buffers}
        return pick(functional_call(self.copies(), state, inputs, kwargs), self.output)

    def double(self) -> _ModuleFunction:
        """The same in float64."""
        buffers = {name: doubled(buffer) for name, buffer in self.buffers.items()}
        return replace(self, buffers=buffers)
