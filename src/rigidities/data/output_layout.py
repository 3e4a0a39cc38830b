"""How the outputs of a model belong to rows: M rows of K targets each.

Statistics, error bars and ensembles work on rows, (M, K). A model's output may have any shape: the
targets may be channels in front of pixels, the rows may be time steps of samples, and a model may
permute what its readout gives. An `OutputLayout` translates between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OutputLayout:
    """How the output of one batch is seen as rows (M, K) of targets.

    Attributes:
        shape: The shape of the output, whose first dimension is that of the samples.
        inner: The shape in which to view the output.
        axis: The dimension of the targets in `inner`, counted from the end.
        order: Where given, the outputs of a sample are put in this order before they are viewed,
            so that the targets of each row stand in the order of the head's columns.

    Examples:
        >>> pixels = torch.arange(12).reshape(1, 2, 2, 3)  # two targets for each of 2 x 3 pixels
        >>> layout = OutputLayout(pixels.shape, pixels.shape, -3)
        >>> layout.rows(pixels).tolist()[:3]
        [[0, 6], [1, 7], [2, 8]]
        >>> torch.equal(layout.unrows(layout.rows(pixels)), pixels)
        True
    """

    shape: torch.Size
    inner: torch.Size
    axis: int = -1
    order: Tensor | None = None

    @property
    def targets(self) -> int:
        """The number of targets K."""
        return self.inner[self.axis]

    @property
    def row_count(self) -> int:
        """The number of rows M."""
        return self.shape.numel() // self.targets

    @classmethod
    def join(cls, layouts: Sequence[OutputLayout], output: Tensor, remedy: str) -> OutputLayout:
        """The layout of the joined outputs of consecutive batches.

        Args:
            layouts: One per batch.
            output: The batches' outputs joined along the samples.
            remedy: The end of the error message for different orders.

        Raises:
            ValueError: The batches have their targets in different orders.
        """
        first = layouts[0]
        if not all(layout._has_order(first.order) for layout in layouts):
            raise ValueError(f"The batches have their targets in different orders{remedy}")
        return first.of_output(output)

    def of_output(self, output: Tensor) -> OutputLayout:
        """The layout of an output that lies like this one, but may have other samples."""
        inner = output.shape
        if self.inner != self.shape:
            entries = math.prod(self.inner[1:])
            inner = torch.Size((output.numel() // max(1, entries), *self.inner[1:]))
        return OutputLayout(output.shape, inner, self.axis, self.order)

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like the output as (M, K)."""
        if self.order is not None:
            tensor = tensor.reshape(self.inner[0], -1)[:, self.order]
        if self.axis == -1:
            if tensor.ndim == 2 and self.order is None and tensor.shape[1] == self.inner[-1]:
                return tensor
            return tensor.reshape(-1, self.inner[-1])
        targets_last = tensor.reshape(self.inner).movedim(self.axis, -1)
        return targets_last.reshape(-1, targets_last.shape[-1])

    def unrows(self, rows: Tensor) -> Tensor:
        """Rows in the output's shape, the inverse of `rows`.

        Args:
            rows: (..., M, K), or (..., M, 1) to be repeated for each target. Dimensions in front
                (members, say) stay in front.
        """
        targets = self.inner[self.axis]
        leading = rows.shape[:-2]
        if self.axis == -1 and self.order is None:
            if rows.ndim == 2 and rows.shape == self.shape:
                return rows
            return rows.expand(*leading, -1, targets).reshape(*leading, *self.shape)
        target_dimension = self.axis % len(self.inner)
        shape = [size for i, size in enumerate(self.inner) if i != target_dimension]
        values = rows.expand(*leading, -1, targets).reshape(*leading, *shape, targets)
        values = values.movedim(-1, self.axis)
        if self.order is not None:
            values = values.reshape(*leading, self.inner[0], -1)[..., self.order.argsort()]
        return values.reshape(*leading, *self.shape)

    def of_samples(self, values: Tensor) -> Tensor:
        """One value per sample (N,) in the output's shape."""
        return values.reshape(-1, *[1] * (len(self.shape) - 1)).expand(self.shape)

    def check_targets(self, fitted: int) -> None:
        """Refuse a model that does not give as many targets as in the fit.

        Args:
            fitted: The number of targets in the fit.
        """
        targets = self.inner[self.axis]
        if targets != fitted:
            raise ValueError(
                f"The model gives {targets} targets here, but gave {fitted} in the fit. Use the "
                "same forward= and output= as in the fit."
            )

    def target_rows(self, target: Tensor) -> Tensor:
        """The true values as (M, K), whatever dimensions of size one they have or lack.

        Raises:
            ValueError: Their shape does not match the output's.
        """
        if target.shape == self.shape:
            return self.rows(target)
        if target.squeeze().shape != _without_ones(self.shape):
            problem = (
                f"the target's shape {tuple(target.shape)} does not match the output's shape "
                f"{tuple(self.shape)}."
            )
            if not target.is_floating_point():
                problem += (
                    " If the targets are the numbers of classes, pass them one-hot, and see "
                    "docs/classifiers.md."
                )
            raise ValueError(
                f"{problem} If the model predicts more than the target (for example a mean and a "
                "variance), select the mean with output=, or for batches b = (x, y) with "
                "forward=lambda m, b: m(b[0])[..., 0]."
            )
        return self.rows(target.reshape(self.shape))

    def _has_order(self, order: Tensor | None) -> bool:
        """Whether the targets stand in that order. Batches of one process share one tensor."""
        if self.order is None or order is None:
            return self.order is order
        return self.order is order or torch.equal(self.order, order)


def _without_ones(shape: torch.Size) -> torch.Size:
    """The shape without dimensions of size one."""
    return torch.Size([size for size in shape if size != 1])
