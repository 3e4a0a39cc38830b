r"""What follows the heads, seen from the output: which output each head row acts on, and how much.

The *tail* is whatever the model does between the heads' outputs $o_r$ and its own output: scaling,
gathering, sums over atoms or time steps, mixing. A backward pass through the tail alone,
$v \mapsto J^\top v$ (`pullback`), shows one of two things:

* `row_gains`: each head row acts on one output row and each target on itself,
  $y_{mk} = \sum_{r \in m} g_{rk}\, o_{rk} + \ldots$. Then
  $\partial y_{mk} / \partial w_k = \sum_{r \in m} g_{rk} h_r$, and three cheap backward passes
  give the gains $g_{rk}$ and the owner $m$ of each row, whatever the number of rows;
* `sample_owners`: otherwise, the sample that each head row belongs to. The *Jacobian* of each
  sample then takes one backward pass per output of a sample.

The trunk, what comes before the heads, is never differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...data.output_layout import OutputLayout
from ...models.directional import normal_like
from .heads import Call, as_rows

Pull = Callable[[Tensor], list[Tensor]]
"""v, shaped like the outputs -> $J^T v$ for each recorded call, as rows (R, K_head)."""


@dataclass(frozen=True)
class RowGains:
    """How the rows of one call of a head act on the output.

    Attributes:
        owners: (R,), the output row that each head row acts on.
        gains: (R, K), the derivative of that output with respect to the head's; (R, 1) where it is
            the same for all targets.
        output_layout: How the output is seen as rows.
    """

    owners: Tensor
    gains: Tensor
    output_layout: OutputLayout


def pullback(outputs: Tensor, calls: list[Call], *, graph: bool = False) -> Pull:
    """The backward pass through the tail as a function.

    Args:
        outputs: The model's outputs, in any shape, with the graph of a probed pass.
        calls: The recorded calls of that pass.
        graph: Whether the result is to be differentiable by the model's inputs.
    """
    probes = [call.probe for call in calls if call.probe is not None]

    def pull(v: Tensor) -> list[Tensor]:
        gradients = torch.autograd.grad(
            outputs, probes, v, retain_graph=True, create_graph=graph, materialize_grads=True
        )
        return [
            as_rows(call.head, gradient) for call, gradient in zip(calls, gradients, strict=True)
        ]

    return pull


class GraphsKept(TorchFunctionMode):
    """A mode in which a model that differentiates inside its forward pass keeps its graph.

    It does not affect other threads, and replaces nothing in torch.

    Attributes:
        differentiated: Whether a model has differentiated inside this context.
    """

    differentiated = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            self.differentiated = True
            kwargs = {**kwargs, "retain_graph": True}
        return func(*args, **kwargs)


def row_gains(outputs: Tensor, pull: Pull, layout: OutputLayout) -> list[RowGains] | None:
    """Gains and owners of each call's rows; None if the tail has no such form.

    Args:
        outputs: (M, K), with the graph: the model's in some view.
        pull: Their `pullback`.
        layout: How the model's output is seen as rows.
    """
    ones = torch.ones_like(outputs)
    gains_by_call = pull(ones)  # (R, K_head): the sum over all outputs that a head's output acts on
    if any(gains.shape[1] != outputs.shape[1] for gains in gains_by_call):
        return None
    owners_by_call = _owners(pull, ones, gains_by_call, normal_like(outputs), by_target=True)
    if owners_by_call is None:
        return None
    pairs = zip(owners_by_call, gains_by_call, strict=True)
    return [RowGains(owners, gains, layout) for owners, gains in pairs]


def target_order(outputs: Tensor, pull: Pull, size: int) -> Tensor | None:
    """The order of a sample's outputs in which the targets of each head row stand as in the head.

    It is a guess: `row_gains` has to confirm afterwards that the tail has that form.

    Args:
        outputs: Flattened, (N * size,).
        pull: Their `pullback`, of a single call.
        size: The number of outputs of each sample.

    Returns:
        The order (size,), or None where the place of some output cannot be seen.
    """
    (gains,) = pull(torch.ones_like(outputs))  # (R, K)
    flat_gains = [gains.reshape(-1, 1)]
    (owners,) = owners_by_digits(lambda code: [pull(code)[0].reshape(-1, 1)], outputs, flat_gains)
    acting_rows = (gains != 0).all(1)
    places = (owners % size).reshape(gains.shape)[acting_rows]  # (R', K), within a sample
    targets = torch.arange(gains.shape[1], device=owners.device)
    # Outputs are sorted by head row, which the place of its first target names, then by target.
    keys = torch.full((size,), -1, device=owners.device)
    keys[places] = places[:, :1] * len(targets) + targets
    if bool((keys >= 0).all()):
        return keys.argsort()
    return None


def sample_owners(outputs: Tensor, pull: Pull) -> list[Tensor] | None:
    """The sample that owns each head row for outputs (N, K), or None if samples are coupled."""
    mixture = normal_like(outputs[:1]).abs().add(0.5).expand_as(outputs)
    probe = normal_like(outputs[:, :1])
    return _owners(pull, mixture, pull(mixture), probe, by_target=False)


def _owners(
    pull: Pull, mixture: Tensor, base: list[Tensor], probe: Tensor, *, by_target: bool
) -> list[Tensor] | None:
    """Owners by the derivatives of a mixture of the outputs, confirmed by a random probe.

    Args:
        pull: The backward pass.
        mixture: (M, K), the weight of each output in a sum.
        base: The derivatives of that sum, (R, K_head) for each call.
        probe: (M, K or 1), random factors of the weights.
        by_target: Whether derivatives are compared target by target. In a common comparison, a
            target in large units would hide a mixing of the others.

    Returns:
        The owners (R,) for each call; None where the derivatives with the factors do not agree with
        them, because some row acts on several outputs.
    """
    owners_by_call = owners_by_digits(lambda code: pull(mixture * code[:, None]), mixture, base)
    probed = pull(probe * mixture)
    for gains, owners, actual in zip(base, owners_by_call, probed, strict=True):
        expected = gains * probe[owners]
        difference = (actual - expected).abs()
        if not difference.numel():
            continue
        size = expected.abs().amax(0) if by_target else expected.abs().max()
        rounding = 64 * coarsest_rounding([actual, mixture])
        if not bool((difference <= rounding * size.clamp(min=1e-30)).all()):
            return None
    return owners_by_call


def owners_by_digits(
    pull: Callable[[Tensor], list[Tensor]], outputs: Tensor, base: list[Tensor]
) -> list[Tensor]:
    """The number of the output that each row acts on, where it acts on one.

    Outputs are numbered, and each is weighted by its number. A row's derivative of the weighted
    sum, divided by its derivative of the plain sum, is then the number of its output. The numbers
    are split into digits that are small enough to survive the coarsest dtype on the way.

    Args:
        pull: Gives the derivatives (R, C) of a sum of the N outputs with given weights (N,), for
            one table of rows after the other.
        outputs: The outputs, of which only the number, dtype and device matter.
        base: The derivatives for weights of one.

    Returns:
        (R,) for each table.
    """
    count = len(outputs)
    base_of_digits = int(coarsest_rounding([outputs, *base]) ** -0.5)
    numbers = torch.arange(count, device=outputs.device)
    owners_by_table = [
        torch.zeros(len(table), dtype=torch.long, device=table.device) for table in base
    ]
    # Ratios are taken in the column of each row where the plain derivative is largest.
    largest_columns = [table.abs().argmax(1, keepdim=True) for table in base]
    place = 1
    while place < count:
        digits = numbers // place % base_of_digits
        coded_tables = pull(digits.to(outputs.dtype))
        tables = zip(owners_by_table, coded_tables, base, largest_columns, strict=True)
        for owners, coded, plain, column in tables:
            ratio = (coded.gather(1, column) / plain.gather(1, column))[:, 0]
            digit = ratio.nan_to_num(0, 0, 0).round().long().clamp(0, base_of_digits)
            owners += digit * place
        place *= base_of_digits
    return [owners.clamp(max=count - 1) for owners in owners_by_table]


def coarsest_rounding(tensors: Iterable[Tensor]) -> float:
    """The largest relative rounding among the dtypes of some tensors."""
    return max(torch.finfo(tensor.dtype).eps for tensor in tensors)
