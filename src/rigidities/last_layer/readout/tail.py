r"""What follows the heads, seen from the output: each head row's gain and owner.

The output depends on the heads' outputs $o_r$ through some tail (scaling, gathering, sums over
atoms or time steps, mixing). A backward pass through the tail alone, $v \mapsto J^\top v$, tells

* its *gain and owner*, when every head row acts on one output row and each target on itself:
  $y_{mk} = \sum_{r \in m} g_{rk}\, o_{rk} + \ldots$, so that $\partial y_{mk} / \partial w_k =
  \sum_{r \in m} g_{rk} h_r$, three cheap passes whatever the number of rows;
* the *Jacobian* of each sample otherwise, one pass per output of a sample.

The trunk is never differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...models.directional import normal_like
from .heads import Call, as_rows

Pull = Callable[[Tensor], list[Tensor]]
View = tuple[torch.Size, int, Tensor | None]


@dataclass(frozen=True)
class Gain:
    """Of one call of a head: the output row that owns each head row, and its gain per target.

    Attributes:
        view: the shape in which to see the output, the dimension of its targets and their order;
            see `Reading`.
    """

    owner: Tensor
    gain: Tensor
    view: View = (torch.Size(), -1, None)


def pullback(outputs: Tensor, calls: list[Call], *, graph: bool = False) -> Pull:
    """v (like outputs) -> $J^T v$ for each probed call, as rows (R, K_head).

    With `graph` the result is differentiable by the model's inputs.
    """
    probes = [call.probe for call in calls if call.probe is not None]

    def pull(v: Tensor) -> list[Tensor]:
        kept = {"retain_graph": True, "create_graph": graph, "materialize_grads": True}
        gradients = torch.autograd.grad(outputs, probes, v, **kept)
        return [as_rows(call.head, g) for call, g in zip(calls, gradients, strict=True)]

    return pull


class GraphsKept(TorchFunctionMode):
    """Where a model that differentiates inside its forward pass does not free its graph.

    Other threads are not concerned, and nothing of torch is replaced.

    Attributes:
        met: whether some model did.
    """

    met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            self.met, kwargs = True, {**kwargs, "retain_graph": True}
        return func(*args, **kwargs)


def gains(outputs: Tensor, pull: Pull) -> list[Gain] | None:
    """Gain and owner of each call's rows for outputs (M, K); None if the tail has no such form."""
    ones = torch.ones_like(outputs)
    base = pull(ones)
    if any(gain.shape[1] != outputs.shape[1] for gain in base):
        return None
    found = _owners(pull, ones, base, normal_like(outputs), by_target=True)
    return None if found is None else list(map(Gain, found, base))


def target_order(outputs: Tensor, pull: Pull, size: int) -> Tensor | None:
    """The order of a sample's outputs in which each head row's targets stand as in the head.

    For one call and flattened outputs, `size` of each sample. Only `gains` tells whether the tail
    has that form; None where some output's place does not show.
    """
    (gain,) = pull(torch.ones_like(outputs))
    flat = [gain.reshape(-1, 1)]
    (owner,) = owners_by_digits(lambda code: [pull(code)[0].reshape(-1, 1)], outputs, flat)
    places = (owner % size).reshape(gain.shape)[(gain != 0).all(1)]
    targets = torch.arange(gain.shape[1], device=owner.device)
    keys = torch.full((size,), -1, device=owner.device)
    keys[places] = places[:, :1] * len(targets) + targets  # the first target's place names a row
    return keys.argsort() if bool((keys >= 0).all()) else None


def sample_owners(outputs: Tensor, pull: Pull) -> list[Tensor] | None:
    """The sample that owns each head row for outputs (N, K), or None if samples are coupled."""
    mixture = normal_like(outputs[:1]).abs().add(0.5).expand_as(outputs)
    probe = normal_like(outputs[:, :1])
    return _owners(pull, mixture, pull(mixture), probe, by_target=False)


def _owners(
    pull: Pull, mixture: Tensor, base: list[Tensor], probe: Tensor, *, by_target: bool
) -> list[Tensor] | None:
    """Owners by the derivatives of a mixture of the outputs, if those of a probe agree."""
    found = owners_by_digits(lambda code: pull(mixture * code[:, None]), mixture, base)
    for gain, owner, pulled in zip(base, found, pull(probe * mixture), strict=True):
        expected, rounding = gain * probe[owner], 64 * coarsest([pulled, mixture])
        off, size = (pulled - expected).abs(), expected.abs()
        if not off.numel():
            continue
        # By targets, since beside one in large units a mixing of the others would not show.
        size = size.amax(0) if by_target else size.max()
        if not bool((off <= rounding * size.clamp(min=1e-30)).all()):
            return None
    return found


def owners_by_digits(
    pull: Callable[[Tensor], list[Tensor]], outputs: Tensor, base: list[Tensor]
) -> list[Tensor]:
    """The number of the output that each row acts on, where it acts on one.

    Outputs are numbered in digits small enough to survive the coarsest dtype on the way: a row's
    derivative of the numbered sum over its derivative of the plain sum is its output's number.
    `pull` gives the derivatives (R, C) of a sum of the N outputs with given weights (N,), for one
    table of rows after the other; `base` are those for weights of one.
    """
    count, digit = len(outputs), int(coarsest([outputs, *base]) ** -0.5)
    numbers = torch.arange(count, device=outputs.device)
    owners = [torch.zeros(len(table), dtype=torch.long, device=table.device) for table in base]
    largest = [table.abs().argmax(1, keepdim=True) for table in base]
    place = 1
    while place < count:
        coded = pull((numbers // place % digit).to(outputs.dtype))
        for owner, one, plain, column in zip(owners, coded, base, largest, strict=True):
            ratio = (one.gather(1, column) / plain.gather(1, column))[:, 0]
            owner += ratio.nan_to_num(0, 0, 0).round().long().clamp(0, digit) * place
        place *= digit
    return [owner.clamp(max=count - 1) for owner in owners]


def coarsest(tensors: Iterable[Tensor]) -> float:
    """The largest rounding among the dtypes of some tensors."""
    return max(torch.finfo(tensor.dtype).eps for tensor in tensors)
