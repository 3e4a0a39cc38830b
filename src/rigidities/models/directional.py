"""Directional derivatives and Hessian products of plain functions of one vector."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from .modes import transformable

VectorFunction = Callable[[Tensor], Tensor]
Pull = Callable[[Tensor], tuple[Tensor]]


def push(function: VectorFunction, point: Tensor, direction: Tensor) -> Tensor:
    """J v by forward mode, shaped like the function's value."""
    pushed: Tensor = jvp(function, (point,), (direction,))[1]
    return pushed


def pushes(function: VectorFunction, point: Tensor, directions: Tensor) -> Tensor:
    """J v for several directions: (m, P) -> (m, ...), in float64.

    By forward mode; operations that lack one are differentiated twice in reverse.
    """
    with transformable():
        try:
            pushed: Tensor = vmap(lambda v: push(function, point, v))(directions.to(point))
        except NotImplementedError:
            given = vjp(function, point)
            pull: Pull = given[1]
            transposed: Pull = vjp(lambda u: pull(u)[0], torch.zeros_like(given[0]))[1]
            pushed = vmap(lambda v: transposed(v)[0])(directions.to(point))
    return pushed.to(torch.float64)


def pulls(function: VectorFunction, point: Tensor, cotangents: Tensor) -> Tensor:
    """J^T u for several u: (m, ...) -> (m, P), in float64."""
    with transformable():
        pull: Pull = vjp(function, point)[1]
        pulled: Tensor = vmap(lambda u: pull(u)[0])(cotangents.to(point))
    return pulled.to(torch.float64)


def hessian_products(function: VectorFunction, point: Tensor, vectors: Tensor) -> Tensor:
    """H v for several v: (m, P) -> (m, P), in float64, by forward over reverse mode."""
    return pushes(grad(function), point, vectors)


def hessian_matrix(function: VectorFunction, point: Tensor, columns: int = 64) -> Tensor:
    """The Hessian of a scalar function, (P, P) in float64, symmetric.

    Args:
        function: of one vector.
        point: where, (P,).
        columns: computed at once.

    Examples:
        >>> hessian_matrix(lambda w: w[0] ** 2 * w[1], torch.tensor([1.0, 3.0]))
        tensor([[6., 2.],
                [2., 0.]], dtype=torch.float64)
    """
    size = len(point)
    parts = []
    for start in range(0, size, columns):
        basis = torch.zeros(
            min(columns, size - start), size, dtype=point.dtype, device=point.device
        )
        basis[:, start:].fill_diagonal_(1)
        parts.append(hessian_products(function, point, basis).detach())
    matrix = torch.cat(parts)
    return (matrix + matrix.mT) / 2
