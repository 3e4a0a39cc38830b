"""Arrays that go together: one shape, finite, flat, float64.

The classical trap is (N,) against (N, 1), which broadcasts to (N, N) without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..prediction.prediction import Prediction

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Values: TypeAlias = "Tensor | ArrayLike | Prediction"
T = TypeVar("T")


def of_prediction(score: Callable[..., T]) -> Callable[..., T]:
    """Let a `Prediction` stand for `mean` and `std` both: score(p, target)."""
    after = 1 + list(signature(score).parameters).index("mean")

    @wraps(score)
    def called(*args: Any, **options: Any) -> T:
        whole, rest = options.get("mean") if len(args) < after else args[after - 1], args[after:]
        if not isinstance(whole, Prediction) or options.get("std", *rest[:1]) is whole:
            return score(*args, **options)
        if "std" in options or hasattr(rest[1] if rest[1:] else None, "__len__"):
            raise TypeError(
                "A Prediction stands for mean and std both, got a std beside it. Call "
                f"{score.__name__}(p, target), or {score.__name__}(p.mean, std, target)."
            )
        if len(args) < after:
            return score(*args, **options | {"std": whole})
        return score(*args[:after], whole, *rest, **options)

    return called


def aligned(**arrays: Values) -> tuple[Tensor, ...]:
    """Flat float64 tensors of arrays that share one shape.

    Dimensions of size one are dropped before shapes are compared: (N,) goes with (N, 1), and
    never broadcasts to (N, N).

    Args:
        **arrays: the arrays, each under the name that errors give it; `std` must be >= 0. A
            `Prediction` stands for its own part of that name.

    Raises:
        ValueError: the shapes differ, or an array is empty, not finite, or a negative `std`.

    Examples:
        >>> aligned(mean=[1, 2], target=[[3], [4]])
        (tensor([1., 2.], dtype=torch.float64), tensor([3., 4.], dtype=torch.float64))
    """
    parts = {k: getattr(v, k, v) if isinstance(v, Prediction) else v for k, v in arrays.items()}
    tensors = {name: _double(values) for name, values in parts.items()}
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.squeeze().shape != reference.squeeze().shape:
            raise ValueError(
                f"Expected {first} and {name} of one shape, got {tuple(reference.shape)} and "
                f"{tuple(tensor.shape)}. Pass one value per prediction in each."
            )
    return tuple(_checked(name, tensor.flatten()) for name, tensor in tensors.items())


def as_tensor(values: Values) -> Tensor:
    """A tensor, an array of any library, a data frame or (nested) lists as a detached tensor."""
    if isinstance(values, Tensor):
        return values.detach()
    if not hasattr(values, "__array__") and hasattr(values, "__dlpack__"):
        return from_dlpack(values)
    import numpy as np

    array = np.asarray(values)
    if array.dtype.kind not in "biufc":  # object columns, half-width floats of other libraries
        array = array.astype(np.float64)
    return torch.as_tensor(array.copy())  # torch refuses negative strides, warns of read-only


def _double(values: Values) -> Tensor:
    if hasattr(values, "__array__") or hasattr(values, "__dlpack__"):  # a tensor has both
        return as_tensor(values).cpu().double()
    return torch.as_tensor(values, dtype=torch.float64)  # lists may hold tensors of any device


def require_finite(name: str, values: Tensor) -> None:
    """Refuse NaN and infinity in what errors call so."""
    if bad := int((~values.isfinite()).sum()):
        raise ValueError(
            f"Expected {name} to be finite, got {bad} of {values.numel()} values nan or infinite. "
            "Drop those rows or mend what made them."
        )


def _checked(name: str, values: Tensor) -> Tensor:
    if not len(values):
        raise ValueError(f"Expected values in {name}, got none. Pass one row or more.")
    require_finite(name, values)
    if name == "std" and values.min() < 0:
        raise ValueError(
            f"Expected std >= 0, got {float(values.min()):g}. Pass standard deviations."
        )
    return values


def error_and_positive_std(
    mean: Values, std: Values, target: Values, why: str = ""
) -> tuple[Tensor, Tensor]:
    """y - mu and sigma as flat float64 tensors, sigma above zero; `why`, for the message."""
    mean, std, target = aligned(mean=mean, std=std, target=target)
    if zeros := int((std == 0).sum()):
        raise ValueError(
            f"Expected std > 0{why}, got {zeros} of {len(std)} values zero. "
            "Drop those rows or add a noise floor to the variance."
        )
    return target - mean, std


def predicted(mean: Values, std: Values) -> Prediction:
    """The prediction given, in float64, or the Gaussian one of mean and std, flat."""
    if isinstance(mean, Prediction):
        parts: dict[str, Any] = {k: v for k, v in vars(mean).items() if isinstance(v, Tensor)}
        return replace(mean, **{name: part.double() for name, part in parts.items()})
    middle, bar = aligned(mean=mean, std=std)
    return Prediction(middle, 0 * bar, bar.square(), bar)


def judged(
    mean: Values, std: Values, target: Values, *, positive: bool = False
) -> tuple[Prediction, Tensor]:
    """The same, and the targets in its shape; `positive`: no bar may be zero."""
    flat = aligned(mean=mean, std=std, target=target)
    if positive:
        error_and_positive_std(mean, std, target)
    p = predicted(mean, std) if isinstance(mean, Prediction) else predicted(*flat[:2])
    return p, p.matched(as_tensor(target) if isinstance(mean, Prediction) else flat[2])
