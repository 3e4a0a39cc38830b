"""How scores prepare their arguments: one shape, finite, flat, float64.

The classical trap is (N,) against (N, 1), which silently broadcasts to (N, N). `aligned` refuses
such pairs, or drops the dimension of size one. `of_prediction` lets a `Prediction` replace mean and
std; `predicted` and `judged` make a `Prediction` of mean and std, so that every score is that of a
distribution.
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
"""What a score takes: numbers, or a prediction that has them."""

Score = TypeVar("Score")


def of_prediction(score: Callable[..., Score]) -> Callable[..., Score]:
    """Accept a `Prediction` in place of `mean` and `std`: score(p, target).

    Args:
        score: A function whose parameters have `mean` and then `std` among them.

    Returns:
        The function. Where its mean is a prediction and its std is left out, the prediction is
        passed as both.
    """
    mean_index = list(signature(score).parameters).index("mean")

    @wraps(score)
    def score_of_prediction(*args: Any, **keywords: Any) -> Score:
        by_position = len(args) > mean_index
        mean = args[mean_index] if by_position else keywords.get("mean")
        after_mean = args[mean_index + 1 :]
        std = keywords.get("std", *after_mean[:1])
        if not isinstance(mean, Prediction) or std is mean:
            return score(*args, **keywords)
        # Two arrays after the prediction can only be std and target.
        has_second_array = len(after_mean) > 1 and hasattr(after_mean[1], "__len__")
        if "std" in keywords or has_second_array:
            raise TypeError(
                "A Prediction contains both mean and std, got another std. Call "
                f"{score.__name__}(p, target), or {score.__name__}(p.mean, std, target)."
            )
        if by_position:
            return score(*args[: mean_index + 1], mean, *after_mean, **keywords)
        return score(*args, **keywords, std=mean)

    return score_of_prediction


def aligned(**arrays: Values) -> tuple[Tensor, ...]:
    """Flat float64 tensors of arrays that share one shape.

    Dimensions of size one are dropped before shapes are compared: (N,) goes with (N, 1), and
    never broadcasts to (N, N).

    Args:
        **arrays: The arrays, each under the name that messages use for it; `std` must be >= 0. A
            `Prediction` means its attribute of that name.

    Returns:
        The tensors, in the same order.

    Raises:
        ValueError: The shapes differ, an array is empty or not finite, or a `std` is negative.

    Examples:
        >>> aligned(mean=[1, 2], target=[[3], [4]])
        (tensor([1., 2.], dtype=torch.float64), tensor([3., 4.], dtype=torch.float64))
    """
    tensors = {}
    for name, values in arrays.items():
        if isinstance(values, Prediction):
            values = getattr(values, name, values)
        tensors[name] = _double(values)
    (first_name, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.squeeze().shape != reference.squeeze().shape:
            raise ValueError(
                f"Expected {first_name} and {name} of the same shape, got "
                f"{tuple(reference.shape)} and {tuple(tensor.shape)}. Pass one value per "
                "prediction in each."
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
    # A copy, because torch refuses negative strides and warns of read-only memory.
    return torch.as_tensor(array.copy())


def _double(values: Values) -> Tensor:
    """Values as a float64 tensor on the CPU."""
    if hasattr(values, "__array__") or hasattr(values, "__dlpack__"):  # a tensor has both
        return as_tensor(values).cpu().double()
    return torch.as_tensor(values, dtype=torch.float64)  # lists may hold tensors of any device


def require_finite(name: str, values: Tensor) -> None:
    """Refuse NaN and infinity.

    Args:
        name: What errors call the values.
        values: The values.

    Raises:
        ValueError: A value is not finite.
    """
    bad = int((~values.isfinite()).sum())
    if bad > 0:
        raise ValueError(
            f"Expected {name} to be finite, got {bad} of {values.numel()} values nan or infinite. "
            "Drop these rows, or fix the model that computed them."
        )


def _checked(name: str, values: Tensor) -> Tensor:
    """The values, if there are any, all finite, and none below zero for a `std`."""
    if not len(values):
        raise ValueError(f"Expected values in {name}, got none. Pass at least one row.")
    require_finite(name, values)
    if name == "std" and values.min() < 0:
        raise ValueError(
            f"Expected std >= 0, got {float(values.min()):g}. Pass standard deviations."
        )
    return values


def error_and_positive_std(
    mean: Values, std: Values, target: Values, why: str = ""
) -> tuple[Tensor, Tensor]:
    """y - mu and sigma as flat float64 tensors.

    Args:
        mean: Predictions.
        std: Their error bars.
        target: True values.
        why: What needs a sigma above zero, for the message.

    Raises:
        ValueError: A sigma is zero, or the arguments do not go together; see `aligned`.
    """
    mean, std, target = aligned(mean=mean, std=std, target=target)
    zeros = int((std == 0).sum())
    if zeros > 0:
        raise ValueError(
            f"Expected std > 0{why}, got {zeros} of {len(std)} values zero. Drop these rows, or "
            "add a small noise to the variance."
        )
    return target - mean, std


def predicted(mean: Values, std: Values) -> Prediction:
    """The `Prediction` given as mean, in float64; else a flat Gaussian one of mean and std."""
    if isinstance(mean, Prediction):
        tensors: dict[str, Any] = {}
        for name, value in vars(mean).items():
            if isinstance(value, Tensor):
                tensors[name] = value.double()
        return replace(mean, **tensors)
    flat_mean, flat_std = aligned(mean=mean, std=std)
    return Prediction(
        mean=flat_mean, epistemic=0 * flat_std, noise=flat_std.square(), rigidity=flat_std
    )


def judged(
    mean: Values, std: Values, target: Values, *, positive: bool = False
) -> tuple[Prediction, Tensor]:
    """The prediction as `predicted` has it, and the targets in its shape.

    Args:
        mean: Predictions, or the prediction.
        std: Error bars, or the prediction.
        target: True values.
        positive: Whether to refuse error bars of zero.
    """
    flat_mean, flat_std, flat_target = aligned(mean=mean, std=std, target=target)
    if positive:
        error_and_positive_std(mean, std, target)
    if isinstance(mean, Prediction):
        prediction = predicted(mean, std)
        return prediction, prediction.matched(as_tensor(target))
    prediction = predicted(flat_mean, flat_std)
    return prediction, prediction.matched(flat_target)
