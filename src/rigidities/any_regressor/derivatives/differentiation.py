r"""Per-sample derivatives of any regressor: from a batch of inputs to predictions and `Tangents`.

Linear layers of a module give the factors of their outer products (`linear_layers`). The
derivatives by all other parameters are written out, in the first of these ways that works:

- `directed_rows`: forward mode, one pass per parameter, where there are few;
- `mapped_rows`: reverse mode, mapped over the samples;
- `looped_rows`: reverse mode for one sample after the other, with a warning.

`Differentiation.of` compares each way on the first batch with a backward pass, and gives it up
where the two differ: where a layer's weight is also used elsewhere, its rows are not samples, or
torch batches an operation wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...data.samples import SampleBatch, sample_count
from ...models.derivatives import (
    jacobian_by_directions,
    jacobian_by_samples,
    normal_like,
    pulled,
    pulls,
    recorded,
    units,
)
from ...notices import notify
from .linear_layers import LinearLayers, NotFactored
from .regressor import Regressor
from .tangents import Explicit, TangentBlock, Tangents

FEW_PARAMETERS = 16
"""Up to this many parameters forward mode is taken, which need not tell samples apart."""

JacobianFunction = Callable[..., Tensor]
"""jacobian(regressor, *inputs, **kwargs) -> (N, K, P)."""


@dataclass(frozen=True)
class Differentiation:
    """How to differentiate one regressor.

    Attributes:
        regressor: The regressor with the parameters to differentiate with respect to.
        layers: Linear layers whose blocks are stored as factors; None where there are none.
        unfactored: The regressor with only the other parameters selected; None where there are
            none.
        shape: Shape of one sample's output, K numbers.
        rowwise: Places and names of the inputs that have a row per sample.
        jacobian: How the Jacobian (N, K, p) of `unfactored` is computed.
        numbers_per_sample: How many numbers the tangents of one sample hold.

    Examples:
        >>> r = Regressor.of(lambda w, x: w[0] * x + w[1], torch.tensor([2.0, 1.0]))
        >>> x = torch.tensor([3.0, 5.0])
        >>> y, t = Differentiation.of(r, x)(x)
        >>> y.tolist(), t.matrix().tolist()
        ([[7.0], [11.0]], [[[3.0, 1.0]], [[5.0, 1.0]]])
    """

    regressor: Regressor
    layers: LinearLayers | None
    unfactored: Regressor | None
    shape: torch.Size
    rowwise: frozenset[int | str]
    jacobian: JacobianFunction = field(repr=False)
    numbers_per_sample: int = 0

    @classmethod
    def of(cls, regressor: Regressor, *inputs: Any, **kwargs: Any) -> Differentiation:
        """Choose the way on a first batch; only its first two samples are differentiated.

        The first batch also tells which inputs have a row per sample: those with as many rows as
        the first of them. An input of another length is the same for every sample, also in later
        batches that happen to be as long.

        Raises:
            ValueError: The prediction for a sample depends on the rest of its batch.
        """
        first = next(SampleBatch(inputs, kwargs, None, None).pieces(2))
        args = first.args
        keywords = first.kwargs
        with torch.no_grad():
            shape = regressor.raw(regressor.flat, *args, **keywords).shape[1:]
        _check_samples_are_independent(regressor, *args, **keywords)
        rowwise = _rowwise(*inputs, **kwargs)
        factored = cls._factored(regressor, shape, rowwise, first)
        if factored is not None:
            return factored
        jacobian = _jacobian_function(regressor, rowwise, *args, **keywords)
        return cls(regressor, None, regressor, shape, rowwise, jacobian)._measured(
            *args, **keywords
        )

    @classmethod
    def _factored(
        cls,
        regressor: Regressor,
        shape: torch.Size,
        rowwise: frozenset[int | str],
        first: SampleBatch,
    ) -> Differentiation | None:
        """The way by factors of linear layers; None where it does not give the derivatives."""
        args = first.args
        keywords = first.kwargs
        layers = LinearLayers.of(regressor)
        if layers is None:
            return None
        parameters = regressor.parameters
        unfactored = None
        if not layers.names.issuperset(parameters.names):
            unfactored = replace(regressor, parameters=parameters.without(layers.names))
        jacobian = _jacobian_function(unfactored, rowwise, *args, **keywords)
        factored = cls(regressor, layers, unfactored, shape, rowwise, jacobian)
        with suppress(NotFactored):
            # Calling `factored` would catch a `NotFactored` of the layers: call them directly.
            layers.blocks(regressor, *args, **keywords)
            _, tangents = factored(*args, **keywords)
            if _confirmed(regressor, tangents, *args, **keywords):
                return factored._measured(*args, **keywords)
        return None

    def __call__(self, *inputs: Any, **kwargs: Any) -> tuple[Tensor, Tangents]:
        """Predictions (N, K) and their tangents (N, K, P)."""
        if self.layers is None:
            outputs, blocks = self._explicit(self.jacobian, *inputs, **kwargs)
        else:
            try:
                outputs, blocks = self.layers.blocks(self.regressor, *inputs, **kwargs)
                if self.unfactored is not None:
                    rows = self.jacobian(self.unfactored, *inputs, **kwargs)
                    blocks |= _explicit_blocks(self.unfactored, rows)
            except NotFactored:  # a layer that the first batch did not call
                jacobian = _jacobian_function(self.regressor, self.rowwise, *inputs, **kwargs)
                outputs, blocks = self._explicit(jacobian, *inputs, **kwargs)
        parameters = self.regressor.parameters
        zero = outputs.new_zeros(*outputs.shape, 1)
        for name, size in zip(parameters.names, parameters.sizes, strict=True):
            # A layer that this batch does not call has no influence on its predictions.
            blocks.setdefault(name, Explicit(zero.expand(*outputs.shape, size)))
        return outputs, Tangents(tuple(blocks[name] for name in parameters.names))

    def _explicit(
        self, jacobian: JacobianFunction, *inputs: Any, **kwargs: Any
    ) -> tuple[Tensor, dict[str, TangentBlock]]:
        """Predictions (N, K), and the written-out block of every parameter."""
        with torch.no_grad():
            outputs = self.regressor.outputs(self.regressor.flat, *inputs, **kwargs)
        rows = jacobian(self.regressor, *inputs, **kwargs)
        return outputs, _explicit_blocks(self.regressor, rows)

    @property
    def outputs(self) -> int:
        """Number of outputs K."""
        return self.shape.numel()

    def _measured(self, *inputs: Any, **kwargs: Any) -> Differentiation:
        """The same with the numbers per sample counted on a batch, rounded up."""
        outputs, tangents = self(*inputs, **kwargs)
        return replace(self, numbers_per_sample=-(-tangents.numbers // len(outputs)))


def mapped_rows(
    rowwise: frozenset[int | str], regressor: Regressor, *inputs: Any, **kwargs: Any
) -> Tensor:
    """(N, K, P) by reverse mode, mapped over the samples.

    Args:
        rowwise: Places and names of the inputs that have a row per sample; all others are the same
            for every sample.
        regressor: The regressor.
        inputs: Its positional inputs.
        kwargs: Its keyword inputs.
    """
    named = _by_place_or_name(inputs, kwargs)
    mapped_names = [name for name in named if name in rowwise]

    def outputs_at(flat: Tensor, *mapped_values: Tensor) -> Tensor:
        """Outputs of samples, given by the inputs that have a row for each of them."""
        values = named | dict(zip(mapped_names, mapped_values, strict=True))
        args = [values[place] for place in range(len(inputs))]
        return regressor.outputs(flat, *args, **{name: values[name] for name in kwargs})

    mapped_values = [named[name] for name in mapped_names]
    return jacobian_by_samples(outputs_at, regressor.flat, mapped_values)


def directed_rows(regressor: Regressor, *inputs: Any, **kwargs: Any) -> Tensor:
    """(N, K, P) by forward mode, one pass per parameter."""
    return jacobian_by_directions(partial(_outputs_at, regressor, inputs, kwargs), regressor.flat)


def looped_rows(
    rowwise: frozenset[int | str], regressor: Regressor, *inputs: Any, **kwargs: Any
) -> Tensor:
    """(N, K, P) by reverse mode, one sample after the other; `rowwise` as in `mapped_rows`."""
    rows = []
    for sample in range(sample_count(*inputs, **kwargs) or 0):
        row = slice(sample, sample + 1)
        args = [value[row] if place in rowwise else value for place, value in enumerate(inputs)]
        keywords = {name: kwargs[name][row] if name in rowwise else kwargs[name] for name in kwargs}
        outputs_of_one = partial(_outputs_at, regressor, args, keywords)
        flat, outputs = recorded(outputs_of_one, regressor.flat)  # (1, K)
        rows.append(pulled(outputs[0], flat, units(outputs[0], 0, outputs.shape[1])))
    return torch.stack(rows)


def _outputs_at(
    regressor: Regressor, inputs: Sequence[Any], kwargs: dict[str, Any], flat: Tensor
) -> Tensor:
    """Outputs (N, K) at the parameters `flat`."""
    return regressor.outputs(flat, *inputs, **kwargs)


def _by_place_or_name(inputs: Sequence[Any], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """The positional inputs by their places, and the keyword inputs by their names."""
    by_place_or_name: dict[int | str, Any] = dict(enumerate(inputs))
    by_place_or_name.update(kwargs)
    return by_place_or_name


def _rowwise(*inputs: Any, **kwargs: Any) -> frozenset[int | str]:
    """Places and names of the inputs that have a row per sample."""
    samples = sample_count(*inputs, **kwargs)
    return frozenset(
        name
        for name, value in _by_place_or_name(inputs, kwargs).items()
        if isinstance(value, Tensor) and value.ndim > 0 and len(value) == samples
    )


def _explicit_blocks(regressor: Regressor, rows: Tensor) -> dict[str, TangentBlock]:
    """A whole Jacobian (N, K, P) cut into one block per parameter, by name."""
    parameters = regressor.parameters
    pieces = rows.detach().split_with_sizes(parameters.sizes, dim=-1)
    return {name: Explicit(piece) for name, piece in zip(parameters.names, pieces, strict=True)}


def _jacobian_function(
    regressor: Regressor | None, rowwise: frozenset[int | str], *inputs: Any, **kwargs: Any
) -> JacobianFunction:
    """The first way to a Jacobian that works on some inputs and is confirmed there.

    Args:
        regressor: The regressor; None where there is nothing to differentiate.
        rowwise: As in `mapped_rows`.
        inputs: Positional inputs of some samples.
        kwargs: Their keyword inputs.
    """
    mapped: JacobianFunction = partial(mapped_rows, rowwise)
    if regressor is None:
        return mapped  # it will not be called
    candidates = [mapped]
    if len(regressor) <= FEW_PARAMETERS:
        candidates.insert(0, directed_rows)
    for candidate in candidates:
        try:
            blocks = _explicit_blocks(regressor, candidate(regressor, *inputs, **kwargs))
        except RuntimeError:
            continue
        if _confirmed(regressor, Tangents(tuple(blocks.values())), *inputs, **kwargs):
            return candidate
    notify(
        "f cannot be transformed by torch.func.vmap (in-place writes, data-dependent control "
        "flow, .item(), or torch.cdist, which torch batches wrongly). One backward pass per "
        "sample is used instead, which is slow."
    )
    return partial(looped_rows, rowwise)


def _confirmed(regressor: Regressor, tangents: Tangents, *inputs: Any, **kwargs: Any) -> bool:
    """Whether $J^T u$ equals a backward pass, parameter by parameter, for a random u."""
    flat = regressor.flat
    sizes = regressor.parameters.sizes
    # Weights of the outputs are positive and away from zero, so that no output goes unchecked.
    u = normal_like(flat.new_empty(tangents.shape[:2])).abs().add(0.5).double()[None]
    expected = pulls(lambda p: regressor.outputs(p, *inputs, **kwargs), flat, u)[0]
    differences = (tangents.backward(u)[0] - expected).split_with_sizes(sizes)
    tolerance = max(1e-3, torch.finfo(flat.dtype).eps ** 0.5)
    floor = 1e-3 * float(expected.norm())  # gradients far below the others may be rounding
    for difference, gradient in zip(differences, expected.split_with_sizes(sizes), strict=True):
        if float(difference.norm()) > tolerance * (float(gradient.norm()) + floor):
            return False
    return True


def _check_samples_are_independent(regressor: Regressor, *inputs: Any, **kwargs: Any) -> None:
    """Refuse a regressor whose prediction for a sample depends on the rest of its batch."""
    if sample_count(*inputs, **kwargs) in {None, 1}:
        return
    with torch.no_grad():
        together = regressor.outputs(regressor.flat, *inputs, **kwargs)[:1]
        first = next(SampleBatch(inputs, kwargs, None, None).pieces(1))
        alone = regressor.outputs(regressor.flat, *first.args, **first.kwargs)
    if not bool(together.isfinite().all()):
        return  # left to the fit, whose error names the rows
    rounding = 1e-5 * float(together.abs().max())
    same_shape = alone.shape == together.shape
    if same_shape and torch.allclose(alone, together, rtol=1e-3, atol=rounding):
        return
    raise ValueError(
        "The prediction for a sample depends on the rest of its batch "
        f"({float(together.reshape(-1)[0]):.6g} with another sample, "
        f"{float(alone.reshape(-1)[0]):.6g} alone), so it has no derivative of its own. Check "
        "that f treats the first dimension of its inputs as the samples."
    )
