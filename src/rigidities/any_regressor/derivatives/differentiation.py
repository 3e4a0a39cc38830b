r"""Per-sample derivatives of any regressor: a batch of inputs to its predictions and `Tangents`.

Three ways, chosen on the first batch:

- linear layers of a module: the factors of their outer products (`linear_layers`);
- few parameters: forward mode, one pass per parameter over the whole batch;
- everything else: `torch.func.vmap` of reverse mode over the samples; for functions that it cannot
  transform, a loop of backward passes, with a warning.

Each way is checked on the first batch against a backward pass, and given up where it differs: a
layer's weight is also used elsewhere, its rows are not samples, or torch batches an operation
wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev, vmap

from ...data.samples import SampleBatch, sample_count
from ...models.directional import normal_like, pulled, pulls, recorded, units
from ...models.modes import forward_mode, transformable
from ...notices import notify
from .linear_layers import LinearLayers, NotFactored
from .regressor import Regressor
from .tangents import Block, Explicit, Tangents

FEW_PARAMETERS = 16
"""Up to here forward mode costs fewer passes than the transposed products it saves."""

Rows = Callable[..., Tensor]


@dataclass(frozen=True)
class Differentiation:
    """How to differentiate one regressor.

    Attributes:
        regressor: whose parameters to differentiate by.
        layers: linear layers that give their blocks as factors.
        rest: the regressor of all other parameters; None where there are none.
        shape: of one sample's output, K numbers.
        rows: how its Jacobian (N, K, p) is made.
        numbers: how many numbers the tangents of one sample hold.

    Examples:
        >>> r = Regressor.of(lambda w, x: w[0] * x + w[1], torch.tensor([2.0, 1.0]))
        >>> x = torch.tensor([3.0, 5.0])
        >>> y, t = Differentiation.of(r, x)(x)
        >>> y.tolist(), t.matrix().tolist()
        ([[7.0], [11.0]], [[[3.0, 1.0]], [[5.0, 1.0]]])
    """

    regressor: Regressor
    layers: LinearLayers | None
    rest: Regressor | None
    shape: torch.Size
    rows: Rows = field(repr=False)
    numbers: int = 0

    @classmethod
    def of(cls, regressor: Regressor, *inputs: Any, **kwargs: Any) -> Differentiation:
        """Choose the way on a first batch (its first two samples are enough)."""
        first = next(SampleBatch(inputs, kwargs, None, None).pieces(2))
        args, named = first.args, first.kwargs
        with torch.no_grad():
            shape = regressor.raw(regressor.flat, *args, **named).shape[1:]
        _check_alone(regressor, *args, **named)
        layers = LinearLayers.of(regressor)
        if layers is not None:
            every, rest = regressor.parameters, None
            if not layers.names.issuperset(every.names):
                rest = replace(regressor, parameters=every.without(layers.names))
            factored = cls(regressor, layers, rest, shape, _way(rest, *args, **named))
            with suppress(NotFactored):
                layers.blocks(regressor, *args, **named)
                if _confirmed(regressor, factored(*args, **named)[1], *args, **named):
                    return factored._measured(*args, **named)
        plain = cls(regressor, None, regressor, shape, _way(regressor, *args, **named))
        return plain._measured(*args, **named)

    def __call__(self, *inputs: Any, **kwargs: Any) -> tuple[Tensor, Tangents]:
        """Predictions (N, K) and their tangents (N, K, P)."""
        if self.layers is None:
            outputs, blocks = self._plain(self.rows, *inputs, **kwargs)
        else:
            try:
                outputs, blocks = self.layers.blocks(self.regressor, *inputs, **kwargs)
                if self.rest is not None:
                    blocks |= _explicit(self.rest, self.rows(self.rest, *inputs, **kwargs))
            except NotFactored:  # a layer that the first batch did not call
                way = _way(self.regressor, *inputs, **kwargs)
                outputs, blocks = self._plain(way, *inputs, **kwargs)
        parameters, idle = self.regressor.parameters, outputs.new_zeros(*outputs.shape, 1)
        for name, size in zip(parameters.names, parameters.sizes, strict=True):
            # a layer that this batch does not call has no influence on its predictions
            blocks.setdefault(name, Explicit(idle.expand(*outputs.shape, size)))
        return outputs, Tangents(tuple(blocks[name] for name in parameters.names))

    def _plain(self, way: Rows, *inputs: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Block]]:
        with torch.no_grad():
            outputs = self.regressor.outputs(self.regressor.flat, *inputs, **kwargs)
        return outputs, _explicit(self.regressor, way(self.regressor, *inputs, **kwargs))

    @property
    def outputs(self) -> int:
        """Number of outputs K."""
        return self.shape.numel()

    def _measured(self, *inputs: Any, **kwargs: Any) -> Differentiation:
        outputs, tangent = self(*inputs, **kwargs)
        return replace(self, numbers=-(-tangent.numbers // len(outputs)))


def forward_rows(regressor: Regressor, *inputs: Any, **kwargs: Any) -> Tensor:
    """(N, K, P) by forward mode, one pass per parameter."""
    jacobian: Rows = jacfwd(lambda p: regressor.outputs(p, *inputs, **kwargs))
    with transformable(), forward_mode:
        return jacobian(regressor.flat)


def reverse_rows(regressor: Regressor, *inputs: Any, **kwargs: Any) -> Tensor:
    """(N, K, P) by reverse mode, mapped over the samples."""
    rows = sample_count(*inputs, **kwargs)
    values = [*inputs, *kwargs.values()]
    batched = [isinstance(v, Tensor) and v.ndim > 0 and len(v) == rows for v in values]

    def single(flat: Tensor, *samples: Tensor) -> Tensor:
        given = iter(samples)
        full = [next(given)[None] if b else v for v, b in zip(values, batched, strict=True)]
        named = dict(zip(kwargs, full[len(inputs) :], strict=True))
        return regressor.outputs(flat, *full[: len(inputs)], **named)[0]

    mapped = [v for v, b in zip(values, batched, strict=True) if b]
    jacobian: Rows = vmap(jacrev(single), in_dims=(None, *[0] * len(mapped)))
    with transformable():
        return jacobian(regressor.flat, *mapped)


def looped_rows(regressor: Regressor, *inputs: Any, **kwargs: Any) -> Tensor:
    """(N, K, P) by one backward pass per output of each sample."""
    flat, outputs = recorded(lambda p: regressor.outputs(p, *inputs, **kwargs), regressor.flat)
    values = outputs.reshape(-1)
    rows = [pulled(values, flat, units(values, i, 1)) for i in range(len(values))]
    return torch.cat(rows).reshape(*outputs.shape, -1)


def _explicit(regressor: Regressor, rows: Tensor) -> dict[str, Block]:
    """One block per parameter of a whole Jacobian."""
    parameters = regressor.parameters
    pieces = rows.detach().split_with_sizes(parameters.sizes, dim=-1)
    return dict(zip(parameters.names, map(Explicit, pieces), strict=True))


def _way(regressor: Regressor | None, *inputs: Any, **kwargs: Any) -> Rows:
    """The cheapest way that works on a first batch."""
    if regressor is None:
        return reverse_rows
    few = len(regressor) <= FEW_PARAMETERS
    for way in (forward_rows, reverse_rows) if few else (reverse_rows,):
        try:
            blocks = _explicit(regressor, way(regressor, *inputs, **kwargs))
        except RuntimeError:
            continue
        if _confirmed(regressor, Tangents(tuple(blocks.values())), *inputs, **kwargs):
            return way
    notify(
        "f cannot be transformed by torch.func.vmap (in-place writes, data-dependent control flow, "
        ".item(), or torch.cdist, which torch batches wrongly): one backward pass per sample "
        "instead, which is slow."
    )
    return looped_rows


def _confirmed(regressor: Regressor, tangents: Tangents, *inputs: Any, **kwargs: Any) -> bool:
    """Whether $J^T u$ equals a backward pass, parameter by parameter."""
    flat, sizes = regressor.flat, regressor.parameters.sizes
    u = normal_like(flat.new_empty(tangents.shape[:2])).abs().add(0.5).double()[None]
    expected = pulls(lambda p: regressor.outputs(p, *inputs, **kwargs), flat, u)[0]
    difference = (tangents.backward(u)[0] - expected).split_with_sizes(sizes)
    tolerance, floor = max(1e-3, torch.finfo(flat.dtype).eps ** 0.5), 1e-3 * float(expected.norm())
    pairs = zip(difference, expected.split_with_sizes(sizes), strict=True)
    return not any(float(d.norm()) > tolerance * (float(e.norm()) + floor) for d, e in pairs)


def _check_alone(regressor: Regressor, *inputs: Any, **kwargs: Any) -> None:
    """A sample's prediction must not depend on the rest of its batch."""
    if sample_count(*inputs, **kwargs) in {None, 1}:
        return
    with torch.no_grad():
        together = regressor.outputs(regressor.flat, *inputs, **kwargs)[:1]
        first = next(SampleBatch(inputs, kwargs, None, None).pieces(1))
        alone = regressor.outputs(regressor.flat, *first.args, **first.kwargs)
    if not bool(together.isfinite().all()):
        return  # which a fit refuses with its rows
    size = 1e-5 * float(together.abs().max())
    if alone.shape != together.shape or not torch.allclose(alone, together, rtol=1e-3, atol=size):
        raise ValueError(
            "The prediction for a sample depends on the rest of its batch "
            f"({float(together.reshape(-1)[0]):.6g} with another sample, "
            f"{float(alone.reshape(-1)[0]):.6g} alone), so it has no derivative of its own. Check "
            "that f treats the first dimension of its inputs as samples."
        )
