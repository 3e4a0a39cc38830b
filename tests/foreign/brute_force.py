"""The variance without the library: derivatives by the readout's weights, a dense Gram, a solve."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.foreign.specimen import Given

Function = Callable[[nn.Module, Any], Tensor]


class Reference:
    """Variances of a specimen, scale^2 f^T (F^T W F + ridge)^-1 f, at any ridge and scale.

    Args:
        given: the model and its data.
        weights: the diagonal of W, one for each output of the training batches; None for ones.
        slope: differentiate the output by an input first.
    """

    def __init__(self, given: Given, weights: Tensor | None = None, *, slope: bool = False) -> None:
        given.model.eval()
        function = given.slope if slope else given.output
        assert function is not None
        rows = torch.cat([_derivatives(given, given.output, batch)[0] for batch in given.train])
        self.gram = rows.mT @ (rows if weights is None else weights[:, None] * rows)
        self.new = [_derivatives(given, function, batch) for batch in given.test]
        self.targets = -1 if slope else given.targets

    def variance(self, ridge: float, scale: Tensor) -> Tensor:
        """For the test batches, shaped like what was differentiated."""
        whole = self.gram + ridge * torch.eye(len(self.gram), dtype=torch.float64)
        q = torch.cat(
            [
                (rows * torch.linalg.solve(whole, rows.mT).mT).sum(-1).reshape(shape)
                for rows, shape in self.new
            ]
        )
        return _squared(scale, q, self.targets) * q


def _squared(scale: Tensor, whole: Tensor, targets: int) -> Tensor:
    """alpha^2: one for all, for each output of a row, or for each along the targets' dimension."""
    alpha = scale.detach().to(torch.float64).square()
    if alpha.numel() == whole[0].numel():
        return alpha.reshape(whole.shape[1:])
    return alpha.reshape(-1, *[1] * (-1 - targets))


def _derivatives(given: Given, function: Function, batch: Any) -> tuple[Tensor, torch.Size]:
    """d value / d weights of every value of a batch, and the shape of the values."""
    weights = [dict(given.model.named_parameters())[name] for name in given.readout]
    if given.rows is not None:
        return _by_hand(given, batch)
    take = _by_moving if given.moved else _by_autograd
    return take(given.model, function, batch, weights)


def _by_autograd(
    model: nn.Module, function: Function, batch: Any, weights: list[nn.Parameter]
) -> tuple[Tensor, torch.Size]:
    wanted = [weight.requires_grad for weight in weights]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        with torch.enable_grad():
            values = function(model, batch)
        rows = [
            torch.autograd.grad(one, weights, retain_graph=True, materialize_grads=True)
            for one in values.flatten()
        ]
    finally:
        for weight, before in zip(weights, wanted, strict=True):
            weight.requires_grad_(before)
    joined = [torch.cat([part.flatten().to(torch.float64) for part in row]) for row in rows]
    return torch.stack(joined), values.shape


def _by_moving(
    model: nn.Module, function: Function, batch: Any, weights: list[nn.Parameter]
) -> tuple[Tensor, torch.Size]:
    """For values that are linear in the weights: each weight moved by one."""
    before = function(model, batch).detach().to(torch.float64)
    columns = []
    for weight in weights:
        flat = weight.data.view(-1)
        for i in range(len(flat)):
            kept = float(flat[i])
            flat[i] += 1
            after = function(model, batch).detach().to(torch.float64)
            flat[i] = kept
            columns.append((after - before).flatten())
    return torch.stack(columns, dim=1), before.shape


def _by_hand(given: Given, batch: Any) -> tuple[Tensor, torch.Size]:
    """The rows given, for each target by weights of its own."""
    assert given.rows is not None
    shape = given.output(given.model, batch).shape
    rows = given.rows(given.model, batch).detach().to(torch.float64)
    each = torch.einsum("nd,kl->nkld", rows, torch.eye(shape[-1], dtype=torch.float64))
    return each.flatten(2).flatten(0, 1), shape
