r"""Derivatives of plain functions, and which of torch's modes to trust with them.

One policy for the whole library; measured with torch 2.13 in float64 against differences:

- first derivatives: reverse mode, and forward mode where it needs fewer passes. Both are right;
  what has no forward mode is differentiated twice in reverse;
- second derivatives: reverse mode over reverse mode. It knows every operation that forward mode
  over reverse mode knows and more, is no slower, and is right but for the fused `weight_norm`,
  which is spelled out here. A Hessian that is not symmetric all the same is refused;
- nothing over forward mode, which takes saved results for constants: it is wrong for layer_norm,
  instance_norm, batch_norm in training, linalg.solve and slogdet. Forward mode twice is so cheap
  for functions with many values that `bends` tries it, and checks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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
"""Of a gradient within the graph, on average, up to which a CPU pulls several at once faster."""

CPU_BYTES, DEVICE_BYTES = 1 << 28, 1 << 30
"""Of all gradients within the graph that are pulled at once, at most: on a CPU, elsewhere."""

ASYMMETRIC = (
    "The second derivatives that torch gives are wrong: the Hessian is not symmetric (an operation "
    "whose backward pass cannot itself be differentiated, or a custom torch.autograd.Function?). "
    "Write the operation in plain torch functions, or do without second derivatives."
)
ONCE = (
    "An operation of the model has a backward pass that cannot itself be differentiated (a custom "
    "torch.autograd.Function marked once_differentiable?), and no forward mode. Write it in plain "
    "torch functions."
)


def normal_like(like: Tensor, seed: int = 0) -> Tensor:
    """Standard normal numbers like a tensor, always the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def units(like: Tensor, start: int, count: int) -> Tensor:
    """Unit vectors as long as a vector, from number `start` on, at most `count`."""
    numbers = torch.arange(start, min(start + count, len(like)), device=like.device)
    return torch.nn.functional.one_hot(numbers, len(like)).to(like.dtype)


def each(function: VectorFunction, points: Tensor) -> Tensor:
    """Values at several points, stacked: at once where torch can batch them, else in turn."""
    with transformable():
        if len(points) > 1:
            with suppress(RuntimeError, ValueError):
                return torch.vmap(function)(points)
        return torch.stack([function(point) for point in points])


def push(function: Callable[[Tensor], Any], point: Tensor, direction: Tensor) -> Any:
    """J v by forward mode, shaped like the function's value; one thread at a time."""
    with forward_mode:
        return torch.func.jvp(function, (point,), (direction,))[1]


def pushes(function: VectorFunction, point: Tensor, directions: Tensor) -> Tensor:
    """J v for several directions: (m, *point) -> (m, ...), in float64.

    By forward mode; operations that lack one are differentiated twice in reverse.
    """
    directions = directions.to(point)
    try:
        return each(lambda v: push(function, point, v), directions).to(torch.float64)
    except RuntimeError:
        return pushes_by_reverse(function, point, directions)


def pushes_by_reverse(function: VectorFunction, point: Tensor, directions: Tensor) -> Tensor:
    r"""The same as the derivative of $u \mapsto J^\top u$, which is linear."""
    x, values = recorded(function, point)
    with torch.enable_grad():
        u = torch.zeros_like(values, requires_grad=True)
        (transposed,) = pulled(values, x, u[None], graph=True)
    once = ONCE if transposed.requires_grad else None
    return pulled(transposed, u, directions.to(point), unconnected=once).to(torch.float64)


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
    """J^T u along a recorded graph for several u, at once where it can: (m, *values) -> (m, *x).

    With `graph` the result can be differentiated; `unconnected` is what to say where values do not
    depend on x, None for zeros.
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
    """The same for one chunk of cotangents after the other.

    Where an operation's backward pass cannot be batched, that chunk and all after it are pulled one
    by one: the batched pass is tried once.
    """

    def pull(u: Tensor, batched: bool) -> Tensor:
        found: Tensor | None = None
        if values.requires_grad:
            how = {"retain_graph": True, "create_graph": graph, "allow_unused": True}
            (found,) = torch.autograd.grad(values, x, u, **how, is_grads_batched=batched)
        if found is None and unconnected is not None:
            raise ValueError(unconnected)
        shape = (len(u), *x.shape) if batched else x.shape
        return x.new_zeros(shape) if found is None else found

    batches = True
    for cotangents in chunks:
        gradients: Tensor | None = None
        with torch.enable_grad():
            if batches and len(cotangents) > 1:
                with suppress(RuntimeError), transformable():
                    gradients = pull(cotangents, True)
                batches = gradients is not None
            if gradients is None:
                gradients = torch.stack([pull(u, False) for u in cotangents])
        yield gradients


def at_once(values: Tensor) -> int:
    """How many cotangents to pull through the graph of some values at once, at most 64.

    A batched pass starts each operation once, but its gradients within the graph leave the cache
    sooner. On a CPU it takes down to a third of the time where they are small on average (a crystal
    of 8 atoms: half), and up to twice the time where they are large (64 atoms): there it is 1. On
    other devices memory alone counts.
    """
    if not hasattr(values.grad_fn, "_input_metadata"):  # the oldest releases of torch do not tell
        return 4
    nodes, total = _graph_size(values)
    if values.device.type != "cpu":
        held = DEVICE_BYTES
    elif total <= BATCHED_BYTES * nodes:
        held = CPU_BYTES
    else:
        return 1
    return max(1, min(64, held // max(1, total)))


def _graph_size(values: Tensor) -> tuple[int, int]:
    """The operations that a backward pass goes through, and the bytes of all gradients there."""
    seen, total, waiting = set(), 0, [values.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for gradient in node._input_metadata:
            if not gradient.is_nested_tensor:
                total += math.prod(gradient.shape) * gradient.dtype.itemsize
        waiting += [following for following, _ in node.next_functions]
    return max(1, len(seen)), total


@dataclass(frozen=True, eq=False)
class Differentiated:
    """A scalar function at a point, its gradient, and the graph for its Hessian.

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
        """Of a function of one vector."""
        with _SpelledOut():
            point, value = recorded(function, point)
        return cls.at(value, point)

    @classmethod
    def at(cls, value: Tensor, point: Tensor) -> Differentiated:
        """Of a value with its graph."""
        with torch.enable_grad():
            (slope,) = pulled(value, point, torch.ones_like(value)[None], graph=True)
        return cls(value.detach(), point, slope)

    @property
    def gradient(self) -> Tensor:
        """Without the graph."""
        return self.slope.detach()

    def hessian(self, columns: int = 64) -> Tensor:
        """(P, P) in float64, symmetric; so many columns at once."""
        parts = range(0, len(self.point), columns)
        matrix = torch.cat([self.products(units(self.point, start, columns)) for start in parts])
        return (matrix + matrix.mT) / 2

    def products(self, vectors: Tensor) -> Tensor:
        """H v for several v, (m, P) -> (m, P) in float64; refused unless u . H v is v . H u."""
        vectors, (u, turned) = vectors.to(self.point), self._probe
        found = pulled(self.slope, self.point, vectors).to(torch.float64)
        vectors = vectors.to(torch.float64)
        size = vectors.norm(dim=1) * turned.norm() + found.norm(dim=1) * u.norm()
        tolerance = torch.finfo(self.point.dtype).eps ** 0.5 * size
        if bool(((vectors @ turned - found @ u).abs() > tolerance).any()):
            raise ValueError(ASYMMETRIC)
        return found

    def bends(self, directions: Tensor) -> Tensor:
        """v . H v for several v: (m, *point) -> (m,)."""
        turned = pulled(self.slope, self.point, directions)
        return (turned * directions).flatten(1).sum(1)

    @cached_property
    def _probe(self) -> tuple[Tensor, Tensor]:
        """A random u and H u."""
        u = normal_like(self.point)
        (turned,) = pulled(self.slope, self.point, u[None])
        return u.to(torch.float64), turned.to(torch.float64)


def bends(function: VectorFunction, x: Tensor, values: Tensor, directions: Tensor) -> Tensor:
    """Second derivatives of many values along directions: (m, *x) -> (m, Q), in float64.

    By forward mode twice over, all values at once, where a random mixture of them confirms one
    direction; else by reverse mode, value by value. The Q values at x, as recorded, have a graph.
    """
    point, values, directions = x.detach(), values.reshape(-1), directions.to(x)
    mixture = normal_like(values)

    def twice(v: Tensor) -> Tensor:
        return torch.flatten(push(lambda y: push(function, y, v), point, v))

    with suppress(RuntimeError, ValueError), torch.enable_grad():  # it may have no forward mode
        bent = each(twice, directions).detach()
        terms, total = mixture * bent[0], (mixture * values).sum()
        expected = Differentiated.at(total, x).bends(directions[:1])
        tolerance = torch.finfo(x.dtype).eps ** 0.5 * float(terms.abs().sum())
        if abs(float(terms.sum()) - float(expected)) <= tolerance:
            return bent.to(torch.float64)
    with torch.enable_grad():
        columns = [Differentiated.at(value, x).bends(directions) for value in values]
    return torch.stack(columns, dim=1).to(torch.float64)


class _SpelledOut(TorchFunctionMode):
    """weight_norm by its formula: torch differentiates its own twice as if norms were constant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:
            v, g, *dim = args
            return v * (g / torch.norm_except_dim(v, 2, *dim, **(kwargs or {})))
        return func(*args, **(kwargs or {}))
