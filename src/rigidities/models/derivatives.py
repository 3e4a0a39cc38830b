r"""Derivatives of plain functions, and which of torch's modes to trust with them.

With the Jacobian J of a function at a point, `push` and `pushes` give J v (forward mode), `pulls`
and `pulled` give J^T u (reverse mode), for many vectors at once where torch can batch them.
`slopes` differentiates values that each depend on one row alone. `jacobian_by_samples` and
`jacobian_by_directions` write out J for every sample of a batch. `Differentiated` gives products
with the Hessian, `curvatures_along` the second derivatives of many values along directions.

Every derivative of the library by a weight, an input or a prediction comes from here. What calls
`torch.autograd.grad` elsewhere looks at graphs that it has recorded itself: which tensors a model
uses (`readout`, `Regressor.used`), and the slopes of layers (`linear_layers`).

The whole library follows one policy, measured with torch 2.13 in float64 against finite
differences:

- First derivatives: reverse mode, or forward mode where it needs fewer passes. Both are right. An
  operation without forward mode is differentiated twice in reverse.
- Jacobians of a batch: reverse mode under `vmap` over the samples. Forward mode, with a pass per
  parameter, takes about twice as long even for 4 to 16 parameters (`benchmarks jacobians`). But it
  works for functions that cannot be mapped over samples, such as formulas with masks, and need not
  know which inputs have a row per sample: so it is taken where parameters are few.
- Second derivatives: reverse mode over reverse mode. It supports every operation that forward mode
  over reverse mode supports and more, is no slower, and is right except for the fused
  `weight_norm`, which is spelled out here. A Hessian that is still not symmetric is refused.
- Nothing over forward mode, which treats saved results as constants: it is wrong for layer_norm,
  instance_norm, batch_norm in training, linalg.solve and slogdet. But forward mode twice is so
  cheap for functions with many values that `curvatures_along` tries it, and checks the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .modes import forward_mode, transformable

T = TypeVar("T")
VectorFunction = Callable[[Tensor], Tensor]

BATCHED_BYTES = 1 << 16
"""Batched pulls are faster on a CPU up to this average size of a gradient within the graph."""

CPU_BYTES = 1 << 28
"""Most bytes that all gradients within the graph may take in one batched pull on a CPU."""

DEVICE_BYTES = 1 << 30
"""The same on other devices."""

ASYMMETRIC = (
    "Torch computes wrong second derivatives here: the Hessian is not symmetric (an operation "
    "whose backward pass cannot itself be differentiated, or a custom torch.autograd.Function?). "
    "Write the operation in plain torch functions, or use no second derivatives."
)
ONCE = (
    "An operation of the model has a backward pass that cannot itself be differentiated (a custom "
    "torch.autograd.Function marked once_differentiable?), and no forward mode. Write it in plain "
    "torch functions."
)


# --- vectors and points -------------------------------------------------------------------------


def normal_like(like: Tensor, seed: int = 0) -> Tensor:
    """Standard normal numbers shaped like a tensor; the same ones in every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def units(like: Tensor, start: int, count: int) -> Tensor:
    """At most `count` unit vectors as long as a vector, from number `start` on, (count, P)."""
    numbers = torch.arange(start, min(start + count, len(like)), device=like.device)
    return torch.nn.functional.one_hot(numbers, len(like)).to(like.dtype)


def values_at(function: VectorFunction, points: Tensor) -> Tensor:
    """A function's values at several points, stacked.

    The function is called once where torch can batch it, else once for each point.
    """
    with transformable():
        if len(points) > 1:
            with suppress(RuntimeError, ValueError):
                return torch.vmap(function)(points)
        return torch.stack([function(point) for point in points])


# --- first derivatives --------------------------------------------------------------------------


def push(function: Callable[[Tensor], Any], point: Tensor, direction: Tensor) -> Any:
    """J v by forward mode, shaped like the function's value. Threads take turns."""
    with forward_mode:
        value_and_tangent = torch.func.jvp(function, (point,), (direction,))
    return value_and_tangent[1]


def pushes(function: VectorFunction, point: Tensor, directions: Tensor) -> Tensor:
    """J v for several directions: (m, *point) -> (m, ...), in float64.

    By forward mode; a function with an operation that lacks it is differentiated twice in reverse.
    """
    directions = directions.to(point)
    try:
        tangents = values_at(lambda direction: push(function, point, direction), directions)
    except RuntimeError:
        x, values = recorded(function, point)
        return pushed_by_reverse(values, x, directions)
    return tangents.to(torch.float64)


def pushed_by_reverse(values: Tensor, x: Tensor, directions: Tensor) -> Tensor:
    r"""J v along a recorded graph for several directions: (m, *x) -> (m, *values), in float64.

    It is the derivative of $u \mapsto J^\top u$, which is linear.
    """
    with torch.enable_grad():
        u = torch.zeros_like(values, requires_grad=True)
        (transposed,) = pulled(values, x, u[None], graph=True)
    # Without a graph the values do not depend on x, and J v is zero.
    unconnected = ONCE if transposed.requires_grad else None
    tangents = pulled(transposed, u, directions.to(x), unconnected=unconnected)
    return tangents.to(torch.float64)


def pulls(function: VectorFunction, point: Tensor, cotangents: Tensor) -> Tensor:
    """J^T u for several u: (m, ...) -> (m, *point), in float64."""
    x, values = recorded(function, point)
    return pulled(values, x, cotangents.to(values)).to(torch.float64)


def recorded(function: Callable[[Tensor], T], point: Tensor) -> tuple[Tensor, T]:
    """A copy of the point and the function's value there, with the graph between them."""
    x = point.detach().clone().requires_grad_()
    with torch.enable_grad(), transformable():
        return x, function(x)


def pulled(
    values: Tensor,
    x: Tensor,
    cotangents: Tensor,
    *,
    graph: bool = False,
    unconnected: str | None = None,
) -> Tensor:
    """J^T u along a recorded graph for several u: (m, *values) -> (m, *x).

    All u are pulled at once where the graph can be batched.

    Args:
        values: What was recorded.
        x: What the values depend on.
        cotangents: The vectors u.
        graph: Whether the result should have a graph, to be differentiated again.
        unconnected: Message of the error to raise where the values do not depend on x; None to
            return zeros there.
    """
    return next(pulled_in_turn(values, x, [cotangents], graph=graph, unconnected=unconnected))


def pulled_in_turn(
    values: Tensor,
    x: Tensor,
    chunks: Iterable[Tensor],
    *,
    graph: bool = False,
    unconnected: str | None = None,
) -> Iterator[Tensor]:
    """J^T u as in `pulled`, for one chunk of cotangents (m, *values) after the other.

    Where an operation's backward pass cannot be batched, the vectors of that chunk and of all later
    ones are pulled one by one: the batched pass is not tried again.
    """

    def pull(u: Tensor, batched: bool) -> Tensor:
        gradient: Tensor | None = None
        if values.requires_grad:
            (gradient,) = torch.autograd.grad(
                values,
                x,
                u,
                retain_graph=True,
                create_graph=graph,
                allow_unused=True,
                is_grads_batched=batched,
            )
        if gradient is not None:
            return gradient
        if unconnected is not None:
            raise ValueError(unconnected)
        return x.new_zeros((len(u), *x.shape) if batched else x.shape)

    can_batch = True
    for cotangents in chunks:
        gradients: Tensor | None = None
        with torch.enable_grad():
            if can_batch and len(cotangents) > 1:
                with suppress(RuntimeError), transformable():
                    gradients = pull(cotangents, True)
                can_batch = gradients is not None
            if gradients is None:
                gradients = torch.stack([pull(u, False) for u in cotangents])
        yield gradients


def slopes(function: VectorFunction, points: Tensor, *, unconnected: str | None = None) -> Tensor:
    """Derivatives of values that each depend on one row of the points, shaped like the points.

    Args:
        function: A function of all points, whose values are summed.
        points: (N, ...).
        unconnected: As in `pulled`.
    """
    x, values = recorded(function, points)
    return pulled(values, x, torch.ones_like(values)[None], unconnected=unconnected)[0]


def jacobian_by_samples(
    function: Callable[..., Tensor], point: Tensor, inputs: Sequence[Tensor]
) -> Tensor:
    """Derivatives (N, K, P) of a batched function's outputs by a point (P,).

    By reverse mode, mapped over the samples.

    Args:
        function: f(point, *inputs) -> (N, K).
        point: (P,).
        inputs: Tensors with a row for each of the N samples.

    Raises:
        RuntimeError: Torch cannot map the function over samples.
    """

    def outputs_of_one(at: Tensor, *sample: Tensor) -> Tensor:
        """Outputs (K,) of one sample, whose inputs come without their batch dimension."""
        outputs: Tensor = function(at, *[value[None] for value in sample])  # (1, K)
        return outputs[0]

    dimensions = (None, *[0] * len(inputs))
    jacobian: Callable[..., Tensor] = torch.func.vmap(
        torch.func.jacrev(outputs_of_one), in_dims=dimensions
    )
    with transformable():
        return jacobian(point, *inputs)


def jacobian_by_directions(function: VectorFunction, point: Tensor) -> Tensor:
    """Derivatives (N, K, P) of outputs (N, K) by a point (P,), by a forward pass for each of P."""
    columns = pushes(function, point, units(point, 0, len(point)))  # (P, N, K)
    return columns.permute(1, 2, 0).to(point)


def at_once(values: Tensor) -> int:
    """How many cotangents to pull through the graph of some values at once, at most 64.

    A batched pass starts each operation once, but its gradients within the graph fall out of the
    cache sooner. Where they are small on average, it takes as little as a third of the time on a
    CPU (half for a crystal of 8 atoms). Where they are large (64 atoms), it takes up to twice the
    time, and the answer is 1. On other devices only memory matters.
    """
    if not hasattr(values.grad_fn, "_input_metadata"):  # missing in the oldest releases of torch
        return 4
    nodes, graph_bytes = _graph_size(values)
    if values.device.type != "cpu":
        allowed_bytes = DEVICE_BYTES
    elif graph_bytes <= BATCHED_BYTES * nodes:
        allowed_bytes = CPU_BYTES
    else:
        return 1
    return max(1, min(64, allowed_bytes // max(1, graph_bytes)))


def _graph_size(values: Tensor) -> tuple[int, int]:
    """Number of operations in a backward pass, and the bytes of all gradients within it."""
    visited = set()
    total_bytes = 0
    waiting = [values.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        for gradient in node._input_metadata:
            if not gradient.is_nested_tensor:
                total_bytes += math.prod(gradient.shape) * gradient.dtype.itemsize
        waiting += [following for following, _ in node.next_functions]
    return max(1, len(visited)), total_bytes


# --- second derivatives -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Differentiated:
    """A scalar function at a point, its gradient, and the graph for its Hessian.

    Attributes:
        value: The function's value.
        point: The point, where the slope's graph begins.
        slope: The gradient with its graph.

    Examples:
        >>> d = Differentiated.of(lambda w: w[0] ** 2 * w[1], torch.tensor([1.0, 3.0]))
        >>> float(d.value), d.gradient.tolist(), d.hessian().tolist()
        (3.0, [6.0, 1.0], [[6.0, 2.0], [2.0, 0.0]])
    """

    value: Tensor
    point: Tensor
    slope: Tensor

    @classmethod
    def of(cls, function: VectorFunction, point: Tensor) -> Differentiated:
        """A function of one vector, differentiated at a point."""
        with _WeightNormSpelledOut():
            x, value = recorded(function, point)
        return cls.at(value, x)

    @classmethod
    def at(cls, value: Tensor, point: Tensor) -> Differentiated:
        """A value with its graph, differentiated with respect to the point it depends on."""
        with torch.enable_grad():
            (slope,) = pulled(value, point, torch.ones_like(value)[None], graph=True)
        return cls(value.detach(), point, slope)

    @property
    def gradient(self) -> Tensor:
        """The gradient without its graph."""
        return self.slope.detach()

    def hessian(self) -> Tensor:
        """The Hessian (P, P) in float64, symmetric."""
        products = []
        columns = at_once(self.slope)
        for start in range(0, len(self.point), columns):
            products.append(self.products(units(self.point, start, columns)))
        matrix = torch.cat(products)
        return (matrix + matrix.mT) / 2

    def products(self, vectors: Tensor) -> Tensor:
        """H v for several v, (m, P) -> (m, P) in float64.

        Raises:
            ValueError: The Hessian is not symmetric: u . H v is not v . H u for a random u.
        """
        vectors = vectors.to(self.point)
        u, hessian_u = self._probe
        products = pulled(self.slope, self.point, vectors).to(torch.float64)
        vectors = vectors.to(torch.float64)
        size = vectors.norm(dim=1) * hessian_u.norm() + products.norm(dim=1) * u.norm()
        tolerance = torch.finfo(self.point.dtype).eps ** 0.5 * size
        if bool(((vectors @ hessian_u - products @ u).abs() > tolerance).any()):
            raise ValueError(ASYMMETRIC)
        return products

    def curvatures_along(self, directions: Tensor) -> Tensor:
        """v . H v for several v: (m, *point) -> (m,)."""
        products = pulled(self.slope, self.point, directions)
        return (products * directions).flatten(1).sum(1)

    @cached_property
    def _probe(self) -> tuple[Tensor, Tensor]:
        """A random u and H u."""
        u = normal_like(self.point)
        (hessian_u,) = pulled(self.slope, self.point, u[None])
        return u.to(torch.float64), hessian_u.to(torch.float64)


def curvatures_along(
    function: VectorFunction, x: Tensor, values: Tensor, directions: Tensor
) -> Tensor:
    """Second derivatives of many values along directions: (m, *x) -> (m, Q), in float64.

    By forward mode twice, for all values at once. The result is checked for the first direction
    and a random mixture of the values; where it fails, reverse mode is used, value by value.

    Args:
        function: The function of x.
        x: The point, as `recorded` gives it.
        values: The Q values there, with their graph.
        directions: (m, *x).
    """
    point = x.detach()
    values = values.reshape(-1)
    directions = directions.to(x)
    mixture = normal_like(values)

    def twice_forward(v: Tensor) -> Tensor:
        return torch.flatten(push(lambda y: push(function, y, v), point, v))

    # The function may have no forward mode.
    with suppress(RuntimeError, ValueError), torch.enable_grad():
        curvatures = values_at(twice_forward, directions).detach()
        terms = mixture * curvatures[0]
        mixed_value = (mixture * values).sum()
        expected = Differentiated.at(mixed_value, x).curvatures_along(directions[:1])
        tolerance = torch.finfo(x.dtype).eps ** 0.5 * float(terms.abs().sum())
        if abs(float(terms.sum()) - float(expected)) <= tolerance:
            return curvatures.to(torch.float64)
    with torch.enable_grad():
        columns = [Differentiated.at(value, x).curvatures_along(directions) for value in values]
    return torch.stack(columns, dim=1).to(torch.float64)


class _WeightNormSpelledOut(TorchFunctionMode):
    """A mode in which weight_norm is computed by its formula.

    The second derivative of torch's fused operation takes the norms for constants.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:
            v, g, *dim = args
            return v * (g / torch.norm_except_dim(v, 2, *dim, **(kwargs or {})))
        return func(*args, **(kwargs or {}))
