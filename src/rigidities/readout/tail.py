r"""From the recorded calls of the heads to features: what follows the heads, seen from the output.

The *tail* is whatever the model does between the heads' outputs $o_r$ and its own output: scaling,
gathering, sums over atoms or time steps, mixing. The features of an output are its derivatives by
the heads' weights, $\partial y / \partial W = \sum_r (\partial y / \partial o_r) h_r^\top$ for the
rows $h_r$ that enter a head. The trunk, what comes before the heads, is never differentiated. A
backward pass through the tail alone, $v \mapsto J^\top v$ (`pullback`), tells how many are needed:

* *rows*: each head row acts on one output row and each target on itself,
  $y_{mk} = \sum_{r \in m} g_{rk}\, o_{rk} + \ldots$. Then
  $\partial y_{mk} / \partial w_k = \sum_{r \in m} g_{rk} h_r$, and a few cheap backward passes
  give the gains $g_{rk}$ and the owner $m$ of each row: one, and one for each digit of the number
  of rows, of which a pass tells as many as the precision allows. Where the
  gains are the same for all targets, the targets share the features;
* *samples*: each head row acts on the outputs of one sample. One backward pass for each output of
  a sample gives the derivatives of all samples at once;
* *dense*: samples depend on one another. One backward pass for each output of the batch.

Where there is no tail, the output is what the head returned, perhaps reshaped, or the mean of what
several heads returned (`MeanOf`): then the features are the heads' inputs (`plain_reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..data.output_layout import OutputLayout
from ..models.derivatives import normal_like, pulled, units
from ..posterior.gram import with_ones
from .columns import Columns, joint_columns
from .heads import Call, as_rows, channel_axis, has_bias, head_weights
from .reading import Reading, Terms

MOST_BYTES = 4 << 30
"""Bytes that a Jacobian of one batch, or the Gram matrix of its columns, may take at most."""

Pull = Callable[[Tensor], list[Tensor]]
"""v, shaped like the outputs -> $J^T v$ for each recorded call, as rows (R, K_head)."""


# --- no tail ------------------------------------------------------------------------------------


def plain_reading(output: Tensor, calls: list[Call], columns: Columns) -> Reading | None:
    """The heads' inputs, if the output is what the head returned, or the mean of several heads'.

    It is if the output lies in the same memory, or else has the same values to the bit. Each head
    must have been called once, in order, and what it returned must not have been written to since.

    Args:
        output: The model's output.
        calls: The calls of the heads in that pass.
        columns: The columns of the heads.

    Returns:
        None where something follows the heads.
    """
    # All in one function, without further Python calls: it runs for every batch.
    heads = columns.heads
    if len(calls) != len(heads) or not columns.disjoint:
        return None
    first_output = calls[0].output
    for call, head in zip(calls, heads, strict=True):
        written = call.output._version != call.versions[1]
        if call.head is not head or written or call.output.shape != first_output.shape:
            return None
    if first_output.numel() != output.numel():
        return None
    mean = first_output
    if len(calls) > 1:
        mean = torch.stack([call.output for call in calls]).mean(0)
    # The same memory needs no comparison of values, which may have been reshaped.
    same_memory = mean.data_ptr() == output.data_ptr()
    same = same_memory and mean.is_contiguous() and output.is_contiguous()
    if not same and not torch.equal(mean.flatten().to(output.dtype), output.flatten()):
        return None
    if len(calls) == 1 and columns.single_bias:
        layout = OutputLayout(output.shape, first_output.shape, columns.channel_axis)
        return Reading(output, calls[0].input_rows, layout, ones=True)
    return side_by_side(output, calls, [call.input_rows for call in calls])


def side_by_side(output: Tensor, calls: list[Call], rows: list[Tensor]) -> Reading:
    """The reading of an output that is the mean of the heads' outputs.

    Args:
        output: The model's output.
        calls: One for each head.
        rows: The inputs (M, D) of each head.
    """
    count = len(rows)
    if count == 1:
        features = rows[0]
        ones = has_bias(calls[0].head)
    else:
        blocks = []
        for call, block in zip(calls, rows, strict=True):
            blocks.append(with_ones(block) if has_bias(call.head) else block)
        features = torch.cat(blocks, dim=1) / count
        ones = False
    heads_without_bias = sum(not has_bias(call.head) for call in calls)
    bias_counts = None
    if heads_without_bias:
        bias_counts = torch.full_like(features[:, :heads_without_bias], 1 / count)
    layout = OutputLayout(output.shape, calls[0].output.shape, channel_axis(calls[0].head))
    return Reading(output, features, layout, bias_counts=bias_counts, ones=ones)


# --- rows ---------------------------------------------------------------------------------------


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


def row_gains(
    output: Tensor,
    calls: list[Call],
    columns: Columns,
    *,
    order: Tensor | None = None,
    graph: bool = False,
) -> list[RowGains] | None:
    """How each call's rows act on the output; None if the tail has no such form.

    Args:
        output: The model's output, in a pass whose heads added offsets.
        calls: The calls of the heads in that pass.
        columns: The columns of the heads.
        order: The order of a sample's outputs, where it is known; see `OutputLayout.order`.
        graph: Whether the gains are to be differentiable by the model's inputs.
    """
    for layout in _output_layouts(output, calls, order):
        rows = layout.rows(output)  # (M, K)
        gains_by_call = _gains_of_rows(rows, pullback(rows, calls, graph=graph), layout)
        if gains_by_call is None:
            continue
        if len(columns.heads) > 1 and not _reach_all_rows(gains_by_call, rows, output):
            continue  # heads side by side: each output column is a target of its own
        return gains_by_call
    return None


def shared_gains(gains_by_call: list[RowGains]) -> list[RowGains] | None:
    """Gains (R, 1) that are the same for all targets; None if they are not."""
    shared = []
    for gains in gains_by_call:
        first = gains.gains[:, :1]
        if not torch.equal(gains.gains, first.expand_as(gains.gains)):
            return None
        shared.append(replace(gains, gains=first))
    return shared


def rows_reading(
    output: Tensor, calls: list[Call], columns: Columns, gains_by_call: Sequence[RowGains]
) -> Reading:
    """The reading for known gains: gain times input, summed over the rows of each output.

    Args:
        output: The model's output.
        calls: The calls of the heads.
        columns: The columns of the heads.
        gains_by_call: The gains of each call. With a single column, targets share the features.
    """
    layout = gains_by_call[0].output_layout
    blocks = []
    for call, gains in zip(calls, gains_by_call, strict=True):
        blocks.append(gains.gains[..., None] * call.weight_rows[:, None])  # (R, K or 1, D)
    owners = [gains.owners for gains in gains_by_call]
    features = _summed_by_owner(blocks, calls, columns, owners, layout.row_count)
    bias_counts = _bias_counts(calls, columns, gains_by_call, len(features))
    if gains_by_call[0].gains.shape[1] == 1:
        features = features[:, 0]
        if bias_counts is not None:
            bias_counts = bias_counts[:, 0]
    return Reading(output, features, layout, bias_counts)


def row_terms(calls: list[Call], columns: Columns, gains_by_call: Sequence[RowGains]) -> Terms:
    """The summands of the features, for gains that are the same for all targets."""
    features, owners, heads = [], [], []
    for call, gains in zip(calls, gains_by_call, strict=True):
        head = columns.heads.index(call.head)
        features.append(columns.assemble({head: gains.gains * call.weight_rows}))
        owners.append(gains.owners)
        heads.append(torch.full_like(gains.owners, head))
    return Terms(
        features=torch.cat(features).detach(),
        owners=torch.cat(owners),
        heads=torch.cat(heads),
        count=gains_by_call[0].output_layout.row_count,
    )


def _bias_counts(
    calls: list[Call], columns: Columns, gains_by_call: Sequence[RowGains], output_rows: int
) -> Tensor | None:
    r"""$\sum_{r \in m} g_{rk}$ of heads without a bias, (M, K, H); None if all have one."""
    first = gains_by_call[0].gains
    zero = first.new_zeros(output_rows, first.shape[1])
    sums_by_head = {head: zero for head in columns.heads if not has_bias(head)}
    if not sums_by_head:
        return None
    for call, gains in zip(calls, gains_by_call, strict=True):
        if call.head in sums_by_head:
            sums = _sums_by_owner(gains.gains, gains.owners, output_rows)
            sums_by_head[call.head] = sums_by_head[call.head] + sums
    return torch.stack(list(sums_by_head.values()), dim=-1)


def _output_layouts(
    output: Tensor, calls: list[Call], order: Tensor | None
) -> Iterator[OutputLayout]:
    """The ways to see the output as (M, K), to be tried one after the other.

    First the output as it is, where any dimension but that of the samples may be the targets',
    usual ones first. Then with the outputs of each sample in another order. A known order is the
    only way.
    """
    head = calls[0].head
    targets = head_weights(head).shape[1]
    if targets == 1:
        yield OutputLayout(output.shape, torch.Size([output.numel(), 1]))
        return
    size = output.shape[1:].numel()  # outputs of a sample
    if order is None or len(order) != size:
        for axis in dict.fromkeys((channel_axis(head), -1, *range(-2, -output.ndim, -1))):
            if output.ndim >= -axis and output.shape[axis] == targets:
                yield OutputLayout(output.shape, output.shape, axis)
        if size % targets or len(calls) > 1:
            return  # calls side by side: each output column is a target of its own
        flat = output.flatten()
        order = _target_order(flat, pullback(flat, calls), size)
    if order is not None:
        inner = torch.Size([len(output), size // targets, targets])
        if order.device != output.device:
            order = order.to(output.device)
        yield OutputLayout(output.shape, inner, order=order)


def _target_order(outputs: Tensor, pull: Pull, size: int) -> Tensor | None:
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


def _gains_of_rows(rows: Tensor, pull: Pull, layout: OutputLayout) -> list[RowGains] | None:
    """Gains and owners of each call's rows; None if the tail has no such form.

    Args:
        rows: The outputs (M, K), with the graph: the model's in some view.
        pull: Their `pullback`.
        layout: How the model's output is seen as rows.
    """
    ones = torch.ones_like(rows)
    gains_by_call = pull(ones)  # (R, K_head): the sum over all outputs that a head's output acts on
    if any(gains.shape[1] != rows.shape[1] for gains in gains_by_call):
        return None
    owners_by_call = _owners(pull, ones, gains_by_call, normal_like(rows), by_target=True)
    if owners_by_call is None:
        return None
    pairs = zip(owners_by_call, gains_by_call, strict=True)
    return [RowGains(owners, gains, layout) for owners, gains in pairs]


def _reach_all_rows(gains_by_call: list[RowGains], rows: Tensor, output: Tensor) -> bool:
    """Whether every call acts on every output row, where samples have several of these."""
    if len(rows) == len(output):
        return True
    for gains in gains_by_call:
        rows_of_owner = gains.owners.bincount(minlength=len(rows))
        if not bool(rows_of_owner.all()):
            return False
    return True


# --- samples, or the whole batch as one ---------------------------------------------------------


def samples_reading(
    output: Tensor, calls: list[Call], columns: Columns, *, coupled: bool, graph: bool = False
) -> Reading | None:
    """The derivatives of each sample's outputs: one backward pass for output k of all samples.

    Args:
        output: The model's output, in a pass whose heads added offsets.
        calls: The calls of the heads in that pass.
        columns: The columns of the heads, one for every weight.
        coupled: Whether samples depend on one another, so that the batch counts as one sample.
        graph: Whether the features are to be differentiable by the model's inputs.

    Returns:
        None if samples turn out to be coupled.
    """
    check_size(output, columns.width)
    samples = 1 if coupled else len(output)
    rows = output.reshape(samples, -1)
    pull = pullback(rows, calls, graph=graph)
    owners: list[Tensor] | None
    if coupled:
        owners = [call.output.new_zeros(len(call.weight_rows), dtype=torch.long) for call in calls]
    else:
        mixture = normal_like(rows[:1]).abs().add(0.5).expand_as(rows)
        factors = normal_like(rows[:, :1])
        owners = _owners(pull, mixture, pull(mixture), factors, by_target=False)
    if owners is None:
        return None
    features = []
    for k in range(rows.shape[1]):
        unit = torch.zeros_like(rows)
        unit[:, k] = 1
        blocks = []
        for call, gradient in zip(calls, pull(unit), strict=True):
            # The outer product of a row's input and its gradient, (R, D or D+1, K_head).
            products = call.weight_rows[:, :, None] * gradient[:, None, :]
            blocks.append(joint_columns(products, call.head))
        features.append(_summed_by_owner(blocks, calls, columns, owners, samples))
    inner = torch.Size([output.numel(), 1]) if coupled else rows.shape
    layout = OutputLayout(output.shape, inner)
    return Reading(output, torch.stack(features, dim=1).reshape(*inner, -1), layout)


def parameters_reading(
    output: Tensor, calls: list[Call], columns: Columns, *, graph: bool = False
) -> Reading:
    """The derivatives by the heads' own parameters: one backward pass for each output.

    Args:
        output: The model's output.
        calls: The entries of the `ParameterRecorder`s, whose leaves the output depends on.
        columns: A column for every number in the parameters.
        graph: Whether the features are to be differentiable by the model's inputs.
    """
    check_size(output, columns.width)
    inner = torch.Size([len(output), output[0].numel()])
    values = output.flatten()
    # Several outputs are differentiated at once, as far as memory allows.
    chunk = max(1, min(64, (1 << 23) // max(columns.width, len(values))))
    features = []
    for start in range(0, len(values), chunk):
        cotangents = units(values, start, chunk)
        blocks = {}
        for head, call in enumerate(calls):
            gradients = [pulled(values, leaf, cotangents, graph=graph) for leaf in call.leaves]
            flat = [gradient.reshape(len(cotangents), -1) for gradient in gradients]
            blocks[head] = torch.cat(flat, dim=1)
        features.append(columns.assemble(blocks))
    layout = OutputLayout(output.shape, inner)
    return Reading(output, torch.cat(features).reshape(*inner, -1), layout)


def check_size(output: Tensor, width: int) -> None:
    """Refuse a Jacobian, or a Gram matrix of its columns, that takes too much memory."""
    size = max(output.numel() * width * output.element_size(), 8 * width**2)
    if size > MOST_BYTES:
        raise ValueError(
            f"The derivatives of {len(output):,} x {output[0].numel():,} outputs with respect "
            f"to {width:,} weights of the readout and their Gram matrix would need "
            f"{size / 2**30:,.1f} GiB, more than {MOST_BYTES / 2**30:g} GiB. They are needed "
            "because the operations after the readout layer mix its outputs or select among "
            "them, or because it is not a linear layer. Let forward= return the layer's whole "
            "output, in any order (fit lin(h), not lin(h)[:, ::2]), name a smaller layer=, "
            "pass smaller batches, or raise rigidities.readout.tail.MOST_BYTES."
        )


# --- backward passes through the tail, and what they tell -----------------------------------------


def pullback(outputs: Tensor, calls: list[Call], *, graph: bool = False) -> Pull:
    """The backward pass through the tail as a function.

    Args:
        outputs: The model's outputs, in any shape, of a pass whose heads added offsets.
        calls: The recorded calls of that pass.
        graph: Whether the result is to be differentiable by the model's inputs.
    """
    offsets = [call.offset for call in calls if call.offset is not None]

    def pull(v: Tensor) -> list[Tensor]:
        gradients = torch.autograd.grad(
            outputs, offsets, v, retain_graph=True, create_graph=graph, materialize_grads=True
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


def _owners(
    pull: Pull, mixture: Tensor, base: list[Tensor], factors: Tensor, *, by_target: bool
) -> list[Tensor] | None:
    """Owners by the derivatives of a mixture of the outputs, confirmed by random factors.

    Args:
        pull: The backward pass.
        mixture: (M, K), the weight of each output in a sum.
        base: The derivatives of that sum, (R, K_head) for each call.
        factors: (M, K or 1), random factors of the weights.
        by_target: Whether derivatives are compared target by target. In a common comparison, a
            target in large units would hide a mixing of the others.

    Returns:
        The owners (R,) for each call; None where the derivatives with the factors do not agree with
        them, because some row acts on several outputs.
    """
    owners_by_call = owners_by_digits(lambda code: pull(mixture * code[:, None]), mixture, base)
    with_factors = pull(factors * mixture)
    for gains, owners, actual in zip(base, owners_by_call, with_factors, strict=True):
        expected = gains * factors[owners]
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


def _summed_by_owner(
    blocks: list[Tensor], calls: list[Call], columns: Columns, owners: list[Tensor], count: int
) -> Tensor:
    """Features (count, ..., width): each call's rows, summed over the rows of each owner.

    Args:
        blocks: For each call, its head's columns of the features of its R rows, (R, ..., columns).
        calls: The calls.
        columns: The columns of the heads.
        owners: For each call, the output row that each of its rows belongs to, (R,).
        count: The number of output rows.
    """
    sums_by_head: dict[int, Tensor] = {}
    for block, call, owner in zip(blocks, calls, owners, strict=True):
        i = columns.heads.index(call.head)
        sums = _sums_by_owner(block, owner, count)
        sums_by_head[i] = sums_by_head[i] + sums if i in sums_by_head else sums
    return columns.assemble(sums_by_head)


def _sums_by_owner(block: Tensor, owners: Tensor, count: int) -> Tensor:
    """Rows (R, ...) summed into those of the same owner, (count, ...)."""
    if len(block) == count and torch.equal(owners, torch.arange(count, device=owners.device)):
        return block  # each row has an owner of its own
    return block.new_zeros(count, *block.shape[1:]).index_add(0, owners, block)
