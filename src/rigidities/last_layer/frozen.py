r"""A plain module that returns mean and error bar. It checks nothing and keeps no state.

`freeze` puts a `Frozen` together from a copy of the model, which gives outputs and features
(`CopiedReadout`), a module that gives $\sqrt q$ of the features (`FactorNorm`, or `TruncatedNorm`
for a lower rank) and one that makes variances and quantiles of it (`FrozenBars`).

For one target without a head, scale and noise are numbers. They are then folded into the factor,
$\sigma = |(\alpha R f, \sqrt{\text{noise}})|$, so that a product and a norm are all there is. A
rank r keeps the r largest eigenvalues of the Gram, $q = |f|^2 / s - \sum_k (1/s - 1/(\lambda_k +
s)) (v_k \cdot f)^2$.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..calibration.calibration import Calibration
from ..data.batches import Batch, Feed
from ..models.modes import unmixed
from ..models.shadow import placement
from ..notices import require_level
from ..posterior.gram import HALVES, with_ones
from ..posterior.joint import RowDeviation
from ..posterior.posterior import LARGEST_ROUNDING, Posterior
from ..posterior.quadratic import BlockRow, QuadraticForm, Split, norms
from ..prediction.head import HeadForm
from ..prediction.mixture import Components
from ..prediction.noise import GivenNoise, Noise
from ..readout.copies import CopiedReadout, PlainCopy
from ..readout.reading import Reading
from .ensemble.ensemble import member_outputs
from .ensemble.members import Members
from .error_bars import result_dtype
from .wrapper import Buffers

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OUTPUTS", "Frozen", "freeze", "listens"]

OUTPUTS = ("mean", "std", "epistemic", "noise", "quantiles", "members")
"""The outputs that a frozen module can have."""


class FactorNorm(Buffers):
    r"""$\sqrt{\alpha^2 q + c}$ of rows of features, from the blocks of a quadratic form.

    Attributes:
        rounding: See `QuadraticForm.rounding`.
        error: Error by truncation: none.
        dtype: Precision of the products.
    """

    def __init__(self, form: QuadraticForm, ones: bool, scale: float, constant: float) -> None:
        r"""Register the blocks of a form as buffers.

        Args:
            form: The quadratic form q.
            ones: Whether features come without the column of ones that the form has.
            scale: $\alpha$, folded into the factor.
            constant: c, folded into the norm.
        """
        super().__init__()
        form = replace(form, factor=scale * form.factor, half=None)
        self.rounding = form.rounding
        self.error = 0.0
        self.dtype = form.dtype
        # With one factor per target the column of ones is appended to the features. A common factor
        # folds it into its blocks.
        self._per_target = form.factor.ndim == 3
        self._append_ones = ones and self._per_target
        blocks = form.make_blocks(ones=ones and not self._append_ones, constant=constant)
        self._starts = [block.start for block in blocks]
        for i, block in enumerate(blocks):
            self.register_buffer(f"matrix{i}", block.matrix)
            self.register_buffer(f"offset{i}", block.offset)
        self.split(None)

    def split(self, half: torch.dtype | None) -> None:
        """Be ready for features in that half precision, on tensor cores; None for none."""
        self._half = half
        if half is None:
            return
        for i in range(len(self._starts)):
            halves = Split.of(self.get_buffer(f"matrix{i}"), half)
            for name, tensor in halves._asdict().items():
                self.register_buffer(f"{name}{i}", tensor, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """(M, D) -> (M, 1), or (M, T); (M, K, D) -> (M, K)."""
        if features.ndim == 3 and not self._per_target:
            return _norms_of_rows(self, features)
        if self._append_ones:
            features = with_ones(features)
        by_halves = self._half is not None and features.dtype == self._half
        if not by_halves:
            features = features.to(self.dtype)
        buffers: dict[str, Any] = self._buffers
        blocks = []
        for i, start in enumerate(self._starts):
            halves = None
            if by_halves:
                halves = Split(*(buffers[f"{name}{i}"] for name in Split._fields))
            blocks.append(BlockRow(start, buffers[f"matrix{i}"], buffers[f"offset{i}"], halves))
        return norms(blocks, features)


class TruncatedNorm(Buffers):
    r"""$\sqrt q$ of a truncated posterior.

    It is a difference, computed in float64 where single precision would lose too many digits.

    Attributes:
        rounding: Bound on the relative rounding error of the variance.
        error: Worst-case relative error of the variance by truncation.
        dtype: Precision of the difference.
    """

    def __init__(self, posterior: Posterior, ones: bool, dtype: torch.dtype) -> None:
        """Register the eigenvectors that were kept.

        Args:
            posterior: The truncated posterior.
            ones: Whether features come without the column of ones that the posterior has.
            dtype: Precision of the model.
        """
        super().__init__()
        ridge = posterior.ridge
        precisions = posterior.precisions
        wide = result_dtype(dtype)
        cancellation = 2 * math.sqrt(posterior.width) * posterior.condition
        if cancellation * torch.finfo(wide).eps > LARGEST_ROUNDING:
            wide = torch.float64
        other_rounding = posterior.float64_error + posterior.doubt + 2 * torch.finfo(dtype).eps
        self.rounding = cancellation * torch.finfo(wide).eps + other_rounding
        self.error = posterior.error
        self.dtype = wide
        self._ones = ones
        scaled_vectors = posterior.eigenvectors * (1 / ridge - 1 / precisions).sqrt()
        least = torch.tensor(float(1 / precisions[-1]), dtype=wide)
        self.register(
            kept=scaled_vectors.to(wide), rate=torch.tensor(1 / ridge, dtype=wide), least=least
        )

    def forward(self, features: Tensor) -> Tensor:
        """(M, D) -> (M, 1), or (M, K, D) -> (M, K)."""
        if features.ndim == 3:
            return _norms_of_rows(self, features)
        vectors = self.kept
        features = features.to(vectors)
        size = features.square().sum(-1, keepdim=True)
        if self._ones:
            size = size + 1
            projections = torch.addmm(vectors[-1], features, vectors[:-1])
        else:
            projections = features @ vectors
        q = size * self.rate - projections.square().sum(-1, keepdim=True)
        # Rounding may make the difference too small. |f|^2 over the largest precision bounds q.
        return torch.maximum(q, size * self.least).sqrt()


def _norms_of_rows(norm: FactorNorm | TruncatedNorm, features: Tensor) -> Tensor:
    """Norms of features per target, (M, K, D) -> (M, K), as of M K plain rows.

    onnxruntime 1.31 crashes in a product of features (M, K, D) in float64 that were transposed.
    """
    norms_of_rows: Tensor = norm(features.flatten(0, 1))
    return norms_of_rows.reshape(features.shape[:-1])


class FrozenBars(Buffers):
    """What a calibration makes of q: variances, and the distribution's quantiles.

    The buffer `level` belongs to the noise. The buffer `levels` belongs to the quantiles.
    """

    def __init__(
        self,
        calibration: Calibration,
        dtype: torch.dtype,
        wide: torch.dtype,
        levels: Sequence[float],
    ) -> None:
        """Register what the calibration has as buffers.

        Args:
            calibration: The calibration.
            dtype: Precision of q.
            wide: Precision of the head and of the quantiles.
            levels: Levels of the quantiles, L of them.

        Raises:
            ValueError: A level lies outside (0, 1).
        """
        super().__init__()
        for level in levels:
            require_level(level, "A quantile's")
        distribution = calibration.distribution
        form = calibration.form(wide)
        low, high = calibration.support or (None, None)
        lowest = -math.inf if low is None else low
        highest = math.inf if high is None else high
        self._bounds = (lowest, highest)
        self._noise_class = type(calibration.noise)
        self._has_levels = len(levels) > 0
        level_tensor = torch.tensor([*levels], dtype=torch.float64)[:, None, None]  # (L, 1, 1)
        self.register(
            scale2=calibration.scale.square().to(dtype),
            levels=level_tensor,
            level=calibration.noise.level.to(dtype),
        )
        self.form: Buffers | None = None
        if form is not None:
            self.form = Buffers()
            self.form.register(**form.tensors())
        else:
            self.register(second=torch.as_tensor(distribution.second, dtype=dtype))
        if levels and form is None:
            self.register(z=distribution.quantile(level_tensor).to(wide))

    def forward(
        self, q: Tensor, mean: Tensor, reading: Reading, novelty: Tensor | None
    ) -> dict[str, Tensor]:
        """Variances of rows, (M, 1 or K), and quantiles, (L, M, K), by name.

        Args:
            q: Unscaled variances, (M, 1 or K).
            mean: Predictions, (M, K).
            reading: What the model gave, for its features.
            novelty: Novelty of the rows, (M, 1), if it is known.
        """
        epistemic = self.scale2 * q
        components = None
        if self.form is not None:
            form = HeadForm.from_tensors(self.form._buffers)
            # By the method's name: the compiler of torch 2.4 cannot call an object.
            moment, shape = form.__call__(q, mean, reading.form_inputs, None, novelty)
            variance = moment
            epistemic = torch.minimum(epistemic, moment)
            noise_variance = variance - epistemic
            if self._has_levels:
                components = Components.of(*shape.chunk(3, -1))
        else:
            noise_model = self._noise_class(self.level)
            noise_variance = noise_model.variance(mean, reading.features).to(q).expand(mean.shape)
            variance = epistemic + noise_variance
        results = {"epistemic": epistemic, "noise": noise_variance, "variance": variance}
        if self._has_levels:
            if components is None:
                z = self.z
                second = self.second
            else:
                z = components.quantile_in_graph(self.levels)
                second = components.second
            dtype = result_dtype(mean.dtype)
            unit = (variance / second).sqrt().to(dtype)
            results["quantiles"] = (mean.to(dtype) + z.to(dtype) * unit).clamp(*self._bounds)
        return results


class Frozen(nn.Module):
    r"""Mean and error bar as a plain module, with its own copy of weights and statistics.

    Made by `LastLayerRigidity.freeze`. It may be compiled, exported, pickled and called from
    several threads. Later changes of the model or the fit do not affect it. `half()` and similar
    methods cast the model and leave the statistics as they are. It is always in eval mode.

    Attributes:
        outputs: Names of what `frozen(x)` returns, in that order.
        levels: Levels of the quantiles.
        error: Worst-case relative error of the variance $\alpha^2 q$ from truncation; 0 without
            truncation.
        rounding: Bound on the relative rounding error of that variance; see
            `QuadraticForm.rounding`.
        loses_members: Whether an ONNX graph leaves out the part of the members' outputs that
            predictions do not share.
    """

    def __init__(
        self,
        readout: CopiedReadout,
        norm: FactorNorm | TruncatedNorm,
        bars: FrozenBars | None,
        outputs: tuple[str, ...],
        levels: tuple[float, ...],
        members: Members | None,
        feed: Feed,
    ) -> None:
        """Put a frozen module together.

        Args:
            readout: Copy of the model that gives outputs and features.
            norm: Gives the root of q.
            bars: Makes variances of q; None where `norm` gives the standard deviation.
            outputs: Names of what calls give.
            levels: Levels of the quantiles.
            members: The ensemble's members, where they are asked for.
            feed: How inputs are handed to the model.
        """
        super().__init__()
        self.readout = readout
        self.norm = norm
        self.bars = bars
        self.outputs = outputs
        self.levels = levels
        self.error = norm.error
        self.rounding = norm.rounding
        self._feed = Feed(readout.run.model, replace(feed.format, target=None))
        self.members = Buffers()
        self.loses_members = False
        if members is not None:
            self.members.register(deviations=members.deviations)
            if members.row_deviation is not None:
                self.loses_members = True
                self.members.register(**members.row_deviation._asdict())
        self.train()

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, ...]:
        """What `outputs` names, each shaped like the model's output."""
        if self._feed.format.whole:
            batch = self._feed.handed(inputs, keywords)
            inputs = batch.args
            keywords = batch.kwargs
        if self.bars is None:
            return self._mean_and_std(inputs, keywords)
        reading: Reading
        novelty = None
        if self.readout.watch is None:
            reading = self.readout(inputs, keywords)
        else:
            reading, novelty = self.readout.watched(inputs, keywords)
        with unmixed(reading.output):
            results = self._results(reading, self.bars, novelty)
            if "members" in self.outputs:
                buffers = self.members
                row_deviation = None
                if self.loses_members:  # which says that rows have deviations of their own
                    row_deviation = RowDeviation(buffers.factor, buffers.mixing)
                results["members"] = member_outputs(
                    reading,
                    Batch(inputs, keywords, None, None),
                    buffers.deviations,
                    row_deviation,
                )
        return tuple(results[name] for name in self.outputs)

    def train(self, mode: bool = False) -> Self:
        """Set eval mode, whatever `mode` is."""
        return super().train(False)

    def extra_repr(self) -> str:
        """The outputs, and how exact they are."""
        truncated = f", error={self.error:.2g}" if self.error else ""
        return f"outputs={self.outputs}, rounding={self.rounding:.2g}{truncated}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module, and adapt what depends on the model's device and precision."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.readout.renew()
        device, dtype = placement(self.readout.run.model)
        if self.readout.watch is not None:
            self.readout.watch.cast(dtype)
        if isinstance(self.norm, FactorNorm):
            self.norm.split(dtype if device.type == "cuda" and dtype in HALVES else None)
        self.rounding = self.norm.rounding
        if dtype in HALVES:  # results are rounded to that precision
            self.rounding += 2 * torch.finfo(dtype).eps
        return self

    def _mean_and_std(
        self, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Mean and std of one head and target, where scale and noise are in the norm."""
        assert isinstance(self.readout, PlainCopy)
        output, rows = self.readout.rows(inputs, keywords)
        with unmixed(output):
            std = self.norm(rows).reshape(output.shape).to(output.dtype)
        return tuple([output if name == "mean" else std for name in self.outputs])

    def _results(
        self, reading: Reading, bars: FrozenBars, novelty: Tensor | None
    ) -> dict[str, Tensor]:
        """All outputs but the members, by name, shaped like the model's output."""
        output = reading.output
        dtype = result_dtype(output.dtype)
        layout = reading.output_layout
        q = self.norm(reading.bare_features).square()
        if novelty is not None:  # (N,) to (M, 1)
            novelty = layout.rows(layout.of_samples(novelty))[:, :1]
        rows = bars(q, layout.rows(output), reading, novelty)
        results = {"mean": output}
        for name in self.outputs:
            if name in rows:
                results[name] = layout.unrows(rows[name].to(dtype))
        if "std" in self.outputs:
            results["std"] = layout.unrows(rows["variance"].sqrt().to(output.dtype))
        return results


def freeze(
    readout: CopiedReadout,
    posterior: Posterior,
    calibration: Calibration,
    outputs: Sequence[str],
    *,
    rank: int | None,
    accuracy: float | None,
    largest_rounding: float,
    levels: Sequence[float],
    members: Members | None,
    feed: Feed,
) -> Frozen:
    """The frozen module of a readout, a posterior and a calibration.

    Args:
        readout: Copy of the model that gives outputs and features.
        posterior: The posterior whose quadratic form is frozen.
        calibration: Scale, noise and distribution.
        outputs: Names of what calls give.
        rank: Number of eigenvectors to keep; None for all.
        accuracy: Relative error that truncation may bring; None for none.
        largest_rounding: Rounding above which the quadratic form is computed in float64.
        levels: Levels of the quantiles.
        members: The ensemble's members, where they are asked for.
        feed: How inputs are handed to the model.

    Raises:
        ValueError: An output is not known, or cannot be frozen.
    """
    outputs = _checked_outputs(outputs, calibration)
    dtype = placement(readout.run.model)[1]
    truncated = _truncated(posterior, rank, accuracy)
    is_plain = isinstance(readout, PlainCopy) and readout.single
    ones = is_plain and cast("PlainCopy", readout).ones
    is_folded = (
        is_plain
        and truncated is None
        and {*outputs} <= {"mean", "std"}
        and _is_foldable(posterior, calibration)
    )
    norm: FactorNorm | TruncatedNorm
    if truncated is not None:
        norm = TruncatedNorm(truncated, ones, dtype)
    else:
        form = QuadraticForm.of(posterior, dtype, largest_rounding)
        scale = float(calibration.scale) if is_folded else 1.0
        noise_level = float(calibration.noise.level) if is_folded else 0.0
        norm = FactorNorm(form, ones, scale, noise_level)
    levels = tuple(levels) if "quantiles" in outputs else ()
    bars = None
    if not is_folded:
        bars = FrozenBars(calibration, norm.dtype, result_dtype(dtype), levels)
    frozen = Frozen(readout, norm, bars, outputs, levels, members, feed)
    return frozen.to(posterior.eigenvalues.device)


def listens(calibration: Calibration, outputs: Sequence[str]) -> bool:
    """Whether any of some outputs depends on the novelty of the inputs, by the guard of a head."""
    if calibration.head is None or calibration.guard is None:
        return False
    return bool({"std", "epistemic", "noise", "quantiles"} & {*outputs})


def _truncated(posterior: Posterior, rank: int | None, accuracy: float | None) -> Posterior | None:
    """The posterior of lower rank that is asked for; None where the full one is to be taken."""
    if rank is None and accuracy is None:
        truncated = posterior
    else:
        truncated = posterior.truncate(rank, accuracy=accuracy)
        # The full factor is triangular and costs half of a square product. A rank above half of the
        # width saves nothing.
        if accuracy is not None and 2 * truncated.rank > truncated.width:
            truncated = posterior
    # A posterior without a complement has all its eigenvectors.
    return truncated if truncated.complement else None


def _is_foldable(posterior: Posterior, calibration: Calibration) -> bool:
    """Whether scale and noise variance are numbers, which the factor may include."""
    noise_model = calibration.noise
    if isinstance(noise_model, GivenNoise) or calibration.head is not None:
        return False
    classes = [kind for kind in type(noise_model).__mro__ if kind is not Noise]
    has_shape = any("shape" in vars(kind) for kind in classes)
    return not has_shape and len(calibration.scale) == 1 and posterior.eigenvalues.ndim == 1


def _checked_outputs(outputs: Sequence[str], calibration: Calibration) -> tuple[str, ...]:
    """The names of outputs as a tuple.

    Raises:
        ValueError: A name is not known, or its output needs the noise of batches.
    """
    outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if not outputs or not {*outputs} <= {*OUTPUTS}:
        raise ValueError(f"outputs must be names from {', '.join(OUTPUTS)}, got {outputs}.")
    noisy = {"std", "noise", "quantiles"} & {*outputs}
    if isinstance(calibration.noise, GivenNoise) and noisy:
        raise ValueError(
            f"The noise of this calibration is a function of batches, so {' and '.join(noisy)} "
            "cannot be frozen. Use outputs=('mean', 'epistemic') and add the noise to the "
            "variance yourself, or calibrate with another noise."
        )
    return outputs
