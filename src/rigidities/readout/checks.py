r"""Checks that judge any claim about features, for every model alike.

The features of an output are its derivatives by the readout's weights, $F = \partial y / \partial
w$. Whatever way they were computed:

* `gradients_agree`: for one random cotangent $v$ over the whole batch, $v^\top F$ must equal the
  gradient of $v^\top y$ by the parameters themselves. One backward pass, complete with probability
  one;
* `change_agrees`: the output must change by $F d$ where the weights change by a large $d$. This
  tells whether the output is linear in the weights;
* `slope_agrees`: the same for a small change. If it does not hold, the derivatives are not true:
  the forward pass writes through `.data` or NumPy, or calls a `torch.autograd.Function` whose
  backward is not its derivative.

A further check is free and belongs to every pass: a plain readout's output lies in the memory of
what the head returned, or has the same bits (`tail.plain_reading`). And `returned_linear_maps`
says whether a subclass of a linear layer returns W x + b, and nothing beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..models.derivatives import normal_like
from .columns import Columns, joint_columns
from .heads import Call, as_rows, has_bias, has_plain_parameters, head_weights
from .reading import Reading, responses
from .tail import coarsest_rounding


def gradients_agree(
    reading: Reading, calls: list[Call], columns: Columns, leaves: Sequence[Tensor]
) -> bool:
    r"""Whether $v^\top F$ is the gradient of $v^\top y$ by the heads' weights.

    A weight that is computed from parameters (by a norm) has no gradient of its own in the graph:
    there both sides are compared as gradients by those parameters; see `_agree_behind`.

    Args:
        reading: The output with its graph, and the claimed features.
        calls: The calls of the heads in that pass.
        columns: The columns of the heads.
        leaves: The parameters that the heads had in the pass, and still have.
    """
    output = reading.output
    if not bool(torch.isfinite(output.detach()).all()):
        return True  # NaN says nothing, and is refused by the fit
    cotangent = normal_like(output, seed=5)
    v = reading.output_layout.rows(cotangent).to(torch.float64)  # (M, K)
    features = reading.features.detach().to(torch.float64)  # (M, D), (M, K, D) or (M, K, P)
    claimed = _pulled_back(features, v, joint=columns.joint)
    # Rounding is relative to the largest sum of absolute terms of each target: in a single column
    # they may cancel, as those of a bias do in a difference of two rows.
    terms = _pulled_back(features.abs(), v.abs(), joint=columns.joint)
    size = terms.amax(0)  # (K,) or (1,)
    gradient_of: dict[int, Tensor] = {}  # by the id of the leaf
    if leaves:
        gradients = torch.autograd.grad(
            output, leaves, cotangent, retain_graph=True, materialize_grads=True
        )
        gradient_of = {id(leaf): grad for leaf, grad in zip(leaves, gradients, strict=True)}
    allowed = tolerance(coarsest_rounding([output, *(call.output for call in calls)]))
    computed: list[tuple[nn.Module, Tensor]] = []  # heads, and the claimed gradients by W
    for i, head in enumerate(columns.heads):
        if not has_plain_parameters(head):
            computed.append((head, columns.change_of_head(claimed, i)))  # (D or D+1, K_head)
            continue
        gradient = _gradient_columns(head, gradient_of)  # (D or D+1, K_head)
        if columns.joint:
            gradient = joint_columns(gradient, head)[:, None]
        index = columns.indices[i].to(claimed.device)
        difference = (gradient.to(claimed) - claimed[index]).abs()
        if not bool((difference <= allowed * size).all()):
            return False
    return _agree_behind(computed, gradient_of, allowed * float(size.max()))


def _agree_behind(
    computed: list[tuple[nn.Module, Tensor]], gradient_of: Mapping[int, Tensor], allowed: float
) -> bool:
    r"""Whether claimed gradients by computed weights W(p) are right, seen from the parameters p.

    The gradient by p must be $\sum_{ij} C_{ij}\, \partial W_{ij} / \partial p$ for the claimed
    gradients C by W, summed over the heads.

    Args:
        computed: The heads whose weights are not plain parameters, each with C, (D or D+1, K).
        gradient_of: The gradients of the output by the heads' parameters, by the id of these.
        allowed: The error of an entry of C that counts as rounding.
    """
    weights = []
    claimed = []
    directions = []
    parameters: dict[int, Tensor] = {}
    for head, gradient in computed:
        weights_of_head = head_weights(head, graph=True)
        if weights_of_head.requires_grad:
            weights.append(weights_of_head)
            claimed.append(gradient.to(weights_of_head))
            directions.append(normal_like(weights_of_head, seed=6))
            parameters.update({id(p): p for p in head.parameters() if id(p) in gradient_of})
    if not parameters:
        return True
    leaves = list(parameters.values())
    # None for parameters that no weight is computed from.
    expected: Sequence[Tensor | None] = torch.autograd.grad(
        weights, leaves, claimed, retain_graph=True, allow_unused=True
    )
    # What an error of C does to the gradients: a norm hides some directions of C, and some
    # parameters, but no random direction from all parameters.
    moved: Sequence[Tensor | None] = torch.autograd.grad(
        weights, leaves, directions, retain_graph=True, allow_unused=True
    )
    response = max(float(change.abs().max()) for change in moved if change is not None)
    for leaf, gradient_by_leaf in zip(leaves, expected, strict=True):
        if gradient_by_leaf is None:
            continue
        difference = (gradient_of[id(leaf)] - gradient_by_leaf).abs()
        if not bool((difference <= allowed * response).all()):
            return False
    return True


def returned_linear_maps(calls: list[Call]) -> bool:
    """Whether every call of a head returned W f + b of what went in, to rounding.

    Derivatives by W and b alone would not show what else a subclass of a linear layer adds.
    """
    for call in calls:
        head = call.head
        rows = call.weight_rows.detach().to(torch.float64)  # (R, D or D+1)
        weights = head_weights(head).to(torch.float64)  # (D or D+1, K)
        if rows.shape[1] != len(weights):
            return False
        expected = rows @ weights
        actual = as_rows(head, call.output.detach().to(torch.float64))
        if expected.shape != actual.shape:
            return False
        # Rounding is relative to the terms of each sum, not to the sum, in which they may cancel.
        terms = rows.abs() @ weights.abs()
        rounding = max(torch.finfo(tensor.dtype).eps for tensor in (call.input, call.output))
        if not bool(((actual - expected).abs() <= 8 * rounding * terms).all()):
            return False
    return True


def change_agrees(
    reading: Reading, changed_output: Tensor, change: Tensor, calls: list[Call]
) -> bool:
    """Whether y(w + d) - y(w) = F d, to the rounding of the outputs.

    Args:
        reading: Output and features for the weights w.
        changed_output: The output for the weights w + d.
        change: d by column, (width, K), or (width, 1) where one weight vector is behind all
            targets.
        calls: The calls of the heads, whose precision may be coarser than the output's.
    """
    if changed_output.shape != reading.output.shape:
        return False
    difference = changed_output.detach().double() - reading.output.detach().double()
    actual = reading.output_layout.rows(difference)
    features = reading.features.detach().to(torch.float64)
    expected = responses(features, change.to(features))
    rounding = coarsest_rounding([changed_output, *(call.output for call in calls)])
    size = torch.maximum(actual.abs().amax(0), expected.abs().amax(0))
    # Of a large offset that both outputs share, the rounding stays in their difference.
    offset = torch.maximum(changed_output.detach().abs().max(), reading.output.detach().abs().max())
    allowed = tolerance(rounding) * size + 16 * rounding * offset.double()
    return bool(((actual - expected).abs().amax(0) <= allowed).all())  # false for NaN too


def slope_agrees(reading: Reading, ahead: Tensor, behind: Tensor, change: Tensor) -> bool:
    """Whether (y(w + d) - y(w - d)) / 2 = F d for a small change d, of outputs in float64.

    Args:
        reading: Output and features for the weights w.
        ahead: The output for the weights w + d.
        behind: The output for the weights w - d.
        change: d by column, as in `change_agrees`.
    """
    actual = reading.output_layout.rows(ahead.detach() - behind.detach()) / 2
    features = reading.features.detach().to(torch.float64)
    expected = responses(features, change.to(features))
    size = torch.maximum(actual.abs().amax(0), expected.abs().amax(0))
    return bool(((actual - expected).abs().amax(0) <= 1e-4 * size).all())  # false for NaN too


def large_change(weights: Tensor, seed: int) -> Tensor:
    """A random change of weights, ten times their size: large enough to reveal a nonlinearity."""
    sizes = weights.abs().to(torch.float64)  # real numbers, also of complex weights
    size = float(sizes.square().mean().sqrt())
    if size < 1e-6:  # zeros up to rounding: a change of that size would be lost in rounding
        size = 1.0
    return normal_like(sizes, seed) * 10 * size


def revealing_change(weights: Tensor, seed: int) -> Tensor:
    """A change after which the weights have the other sign and ten times their size, and noise.

    Of large random changes alone, half would leave all outputs on the side of a ReLU where they
    are. The noise shows functions that are linear in the size of the weights (a median).
    """
    if weights.is_complex():  # which a readout's may not be
        return large_change(weights, seed)
    return 0.1 * large_change(weights, seed) - 11 * weights.detach().to(torch.float64)


def tolerance(rounding: float) -> float:
    """The largest relative deviation from a linear change of the output that counts as rounding."""
    return min(0.1, 100 * math.pow(rounding, 0.75))


def _pulled_back(features: Tensor, v: Tensor, *, joint: bool) -> Tensor:
    """v^T F by column: (width, K), or (width, 1) where one weight vector is behind all targets."""
    if joint:
        return torch.einsum("mkp,mk->p", features, v)[:, None]
    if features.ndim == 2:
        return features.mT @ v
    return torch.einsum("mkd,mk->dk", features, v)


def _gradient_columns(head: nn.Module, gradient_of: Mapping[int, Tensor]) -> Tensor:
    """The gradient by a head's weight and bias as columns per output, (D or D+1, K)."""
    weight = gradient_of[id(head.weight)].flatten(1)
    if has_bias(head):
        bias = gradient_of[id(head.bias)]
        weight = torch.cat([weight, bias[:, None]], dim=1)
    return weight.mT
