r"""A plain module that gives mean and error bar: nothing checked, nothing kept between calls.

$|\alpha R f|$ is the standard deviation without noise: scale and noise are folded into the factor,
so that for one target a product and a norm are all there is. A rank r keeps the r largest
eigenvalues of the Gram, $q = |f|^2 / s - \sum_k (1/s - 1/(\lambda_k + s)) (v_k \cdot f)^2$.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..calibration.calibration import Calibration
from ..data.batches import Batch
from ..data.feed import Feed
from ..models.modes import unmixed
from ..models.shadow import placement
from ..notices import require_level
from ..posterior.gram import HALVES, with_ones
from ..posterior.joint import RowDeviation
from ..posterior.posterior import LARGEST_ROUNDING, Posterior
from ..posterior.quadratic import Block, QuadraticForm, Split, norms
from ..prediction.distribution import Tilted, TiltedRule
from ..prediction.head import HeadForm
from ..prediction.noise import GivenNoise, Noise
from .ensemble.ensemble import member_outputs
from .ensemble.members import Members
from .error_bars import form_inputs, result_dtype
from .readout.graph import CopiedReadout, PlainCopy
from .readout.reading import Reading
from .wrapper import Exact

if TYPE_CHECKING:
    from typing_extensions import Self

OUTPUTS = ("mean", "std", "epistemic", "noise", "quantiles", "members")


class Statistics(Exact):
    """Tensors as buffers."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def hold(self, **tensors: Tensor) -> None:
        """Register copies."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())


class FactorNorm(Statistics):
    r"""$\sqrt{\alpha^2 q + c}$ of rows of features, from the blocks of a quadratic form."""

    def __init__(self, form: QuadraticForm, ones: bool, scale: float, constant: float) -> None:
        super().__init__()
        form = replace(form, factor=scale * form.factor, half=None)
        self.rounding, self.error, self.dtype = form.rounding, 0.0, form.dtype
        self._apart = ones and form.factor.ndim == 3  # which takes the column of ones itself
        blocks = form.make_blocks(ones=ones and not self._apart, constant=constant)
        self._starts = [block.start for block in blocks]
        for i, block in enumerate(blocks):
            self.register_buffer(f"matrix{i}", block.matrix)
            self.register_buffer(f"offset{i}", block.offset)
        self.split(None)

    def split(self, half: torch.dtype | None) -> None:
        """Be ready for features in that precision, on tensor cores; None for none."""
        self._half = half
        if half is None:
            return
        for i in range(len(self._starts)):
            for name, part in Split.of(self.get_buffer(f"matrix{i}"), half)._asdict().items():
                self.register_buffer(f"{name}{i}", part, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """(M, D) -> (M, 1), or (M, T)."""
        features = with_ones(features) if self._apart else features
        split = self._half is not None and features.dtype == self._half
        features = features if split else features.to(self.dtype)
        own: dict[str, Any] = self._buffers
        blocks = []
        for i, start in enumerate(self._starts):
            halves = Split(*(own[f"{name}{i}"] for name in Split._fields)) if split else None
            blocks.append(Block(start, own[f"matrix{i}"], own[f"offset{i}"], halves))
        return norms(blocks, features)


class TruncatedNorm(Statistics):
    r"""$\sqrt q$ of a truncated posterior; a difference, in float64 where that asks for it."""

    def __init__(self, posterior: Posterior, ones: bool, dtype: torch.dtype) -> None:
        super().__init__()
        s, precisions = posterior.ridge, posterior.precisions
        wide = result_dtype(dtype)
        lost = 2 * math.sqrt(posterior.width) * posterior.condition  # digits of the difference
        if lost * torch.finfo(wide).eps > LARGEST_ROUNDING:
            wide = torch.float64
        own = posterior.float64_error + posterior.doubt + 2 * torch.finfo(dtype).eps
        self.rounding = lost * torch.finfo(wide).eps + own
        self.error, self.dtype, self._ones = posterior.error, wide, ones
        kept = posterior.eigenvectors * (1 / s - 1 / precisions).sqrt()
        least = torch.tensor(float(1 / precisions[-1]), dtype=wide)
        self.hold(kept=kept.to(wide), rate=torch.tensor(1 / s, dtype=wide), least=least)

    def forward(self, features: Tensor) -> Tensor:
        """(M, D) -> (M, 1), or (M, K, D) -> (M, K)."""
        features, kept, row = features.to(self.kept), self.kept, features.ndim == 2
        size = features.square().sum(-1, keepdim=row)
        if self._ones:
            size, z = size + 1, torch.addmm(kept[-1], features, kept[:-1])
        else:
            z = features @ kept
        q = size * self.rate - z.square().sum(-1, keepdim=row)
        return torch.maximum(q, size * self.least).sqrt()


class Bars(Statistics):
    """What a calibration makes of q: variances, and the distribution's quantiles.

    `dtype` is that of q, `wide` that of the head and of the quantiles.
    """

    def __init__(
        self, chosen: Calibration, dtype: torch.dtype, wide: torch.dtype, levels: Sequence[float]
    ) -> None:
        super().__init__()
        distribution, form = chosen.distribution, chosen.form(wide)
        low, high = chosen.support or (None, None)
        self._bounds = (-math.inf if low is None else low, math.inf if high is None else high)
        for level in levels:
            require_level(level, "A quantile's")
        at = torch.tensor([*levels], dtype=torch.float64)[:, None, None]
        self._noise, self._headed = type(chosen.noise), form is not None
        self.hold(scale2=chosen.scale.square().to(dtype), levels=at)
        self.hold(level=chosen.noise.level.to(dtype))
        self._tilted = form is not None and len(form.basis) > 0
        if form is not None:
            self.hold(**{f"head_{name}": part for name, part in form._asdict().items()})
        else:
            self.hold(second=torch.as_tensor(distribution.second, dtype=dtype))
        if levels and self._tilted:
            assert isinstance(distribution, Tilted)
            rule = distribution.rule(wide, chosen.scale.device)
            self.hold(**{f"rule_{name}": part for name, part in rule._asdict().items()})
        elif levels:
            self.hold(z=distribution.quantile(at).to(wide))

    def forward(self, q: Tensor, mean: Tensor, reading: Reading) -> dict[str, Tensor]:
        """Variances of rows, (M, 1 or K), and quantiles, (L, M, K)."""
        own: dict[str, Any] = self._buffers
        epistemic, tilt = self.scale2 * q, None
        if self._headed:
            form = HeadForm(*(own[f"head_{name}"] for name in HeadForm._fields))
            # As a method: a tuple that is called is beyond the compiler of torch 2.4.
            squared, second, tilt = form.__call__(q, mean, form_inputs(reading))
            variance = torch.maximum(squared * second, epistemic)
            noise = variance - epistemic
        else:
            noise = self._noise(self.level).variance(mean, reading.features).to(q)
            noise = noise.expand(mean.shape)
            variance, second = epistemic + noise, self.second
        found = {"epistemic": epistemic, "noise": noise, "variance": variance}
        if len(self.levels):
            if tilt is not None and self._tilted:
                rule = TiltedRule(*(own[f"rule_{name}"] for name in TiltedRule._fields))
                z = rule.quantile(tilt, self.levels)
            else:
                z = self.z
            kind = result_dtype(mean.dtype)
            unit = (variance / second).sqrt().to(kind)
            found["quantiles"] = (mean.to(kind) + z.to(kind) * unit).clamp(*self._bounds)
        return found


class Frozen(nn.Module):
    r"""Mean and error bar as a plain module, with weights and statistics of its own.

    Made by `LastLayerRigidity.freeze`. It may be compiled, exported, pickled and called from
    several threads; what becomes of the model or the fit does not matter to it. `half()` and the
    like cast the model and leave the statistics as they are. Always in eval mode.

    Attributes:
        outputs: names of what `frozen(x)` gives, in that order.
        levels: of the quantiles.
        error: worst-case relative error of the variance $\alpha^2 q$ by truncation; 0 without.
        rounding: bound on its relative rounding error; see `QuadraticForm.rounding`.
        loses_members: whether ONNX leaves out of the members what single ones do not share.
    """

    def __init__(
        self,
        readout: CopiedReadout,
        norm: FactorNorm | TruncatedNorm,
        bars: Bars | None,
        outputs: tuple[str, ...],
        levels: tuple[float, ...],
        members: Members | None,
        feed: Feed,
    ) -> None:
        super().__init__()
        self.readout, self.norm, self.bars = readout, norm, bars
        self.outputs, self.levels = outputs, levels
        self.error, self.rounding = norm.error, norm.rounding
        self._feed = Feed(readout.run.model, replace(feed.format, target=None))
        self.members, own = Statistics(), None if members is None else members.row_deviation
        self.loses_members = own is not None
        if members is not None:
            self._drawing = members.drawing
            self.members.hold(deviations=members.deviations, **(own._asdict() if own else {}))
        self.train()

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, ...]:
        """What `outputs` names, each shaped like the model's output."""
        if self._feed.format.whole:
            batch = self._feed.handed(inputs, keywords)
            inputs, keywords = batch.args, batch.kwargs
        if self.bars is None:
            return self._folded(inputs, keywords)
        reading: Reading = self.readout(inputs, keywords)
        with unmixed(reading.output):
            found = self._found(reading, self.bars)
            if "members" in self.outputs:
                held, batch = self.members, Batch(inputs, keywords, None, None)
                own = RowDeviation(held.factor, held.mixing) if self.loses_members else None
                moved = member_outputs(reading, batch, held.deviations, self._drawing, own)
                found["members"] = moved
        return tuple(found[name] for name in self.outputs)

    def train(self, mode: bool = False) -> Self:
        """Eval mode, whatever is asked."""
        return super().train(False)

    def extra_repr(self) -> str:
        """What it gives, and how exactly."""
        truncated = f", error={self.error:.2g}" if self.error else ""
        return f"outputs={self.outputs}, rounding={self.rounding:.2g}{truncated}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.readout.renew()
        device, dtype = placement(self.readout.run.model)
        if isinstance(self.norm, FactorNorm):
            self.norm.split(dtype if device.type == "cuda" and dtype in HALVES else None)
        self.rounding = self.norm.rounding + (2 * torch.finfo(dtype).eps if dtype in HALVES else 0)
        return self

    def _folded(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Tensor, ...]:
        """Mean and std of one head and target, with scale and noise in the norm."""
        assert isinstance(self.readout, PlainCopy)
        output, rows = self.readout.rows(inputs, keywords)
        with unmixed(output):
            std = self.norm(rows).reshape(output.shape).to(output.dtype)
        return tuple([output if name == "mean" else std for name in self.outputs])

    def _found(self, reading: Reading, bars: Bars) -> dict[str, Tensor]:
        output, mean = reading.output, reading.rows(reading.output)
        kind = result_dtype(output.dtype)
        found = bars(self.norm(reading.inputs).square(), mean, reading)
        wanted = {name: found[name].to(kind) for name in self.outputs if name in found}
        if "std" in self.outputs:
            wanted["std"] = found["variance"].sqrt().to(output.dtype)
        return {"mean": output, **{n: reading.unrows(t) for n, t in wanted.items()}}


def freeze(
    readout: CopiedReadout,
    posterior: Posterior,
    chosen: Calibration,
    outputs: Sequence[str],
    *,
    rank: int | None,
    accuracy: float | None,
    largest_rounding: float,
    levels: Sequence[float],
    members: Members | None,
    feed: Feed,
) -> Frozen:
    """The module for a readout, a posterior and a calibration; see `LastLayerRigidity.freeze`."""
    outputs = _checked(outputs, chosen)
    dtype = placement(readout.run.model)[1]
    single = isinstance(readout, PlainCopy) and readout.single
    ones, cut = single and cast("PlainCopy", readout).ones, posterior
    if rank is not None or accuracy is not None:
        cut = posterior.truncate(rank, accuracy=accuracy)
        if accuracy is not None and 2 * cut.rank > cut.width:
            cut = posterior  # half of a square product costs no more
    folded = single and {*outputs} <= {"mean", "std"} and not cut.complement
    folded = folded and _folds(posterior, chosen)
    norm: FactorNorm | TruncatedNorm
    if cut.complement:
        norm = TruncatedNorm(cut, ones, dtype)
    else:
        own = (float(chosen.scale), float(chosen.noise.level)) if folded else (1.0, 0.0)
        norm = FactorNorm(QuadraticForm.of(posterior, dtype, largest_rounding), ones, *own)
    levels = tuple(levels) if "quantiles" in outputs else ()
    bars = None if folded else Bars(chosen, norm.dtype, result_dtype(dtype), levels)
    frozen = Frozen(readout, norm, bars, outputs, levels, members, feed)
    return frozen.to(posterior.eigenvalues.device)


def _folds(posterior: Posterior, chosen: Calibration) -> bool:
    """Whether scale and noise are numbers, which the factor may hold."""
    kinds = type(chosen.noise).__mro__
    constant = all("shape" not in vars(kind) for kind in kinds if kind is not Noise)
    constant = constant and not isinstance(chosen.noise, GivenNoise) and chosen.head is None
    return constant and len(chosen.scale) == 1 and posterior.eigenvalues.ndim == 1


def _checked(outputs: Sequence[str], chosen: Calibration) -> tuple[str, ...]:
    outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if not outputs or not {*outputs} <= {*OUTPUTS}:
        raise ValueError(f"outputs must be names out of {', '.join(OUTPUTS)}, got {outputs}.")
    noisy = {"std", "noise", "quantiles"} & {*outputs}
    if isinstance(chosen.noise, GivenNoise) and noisy:
        raise ValueError(
            f"The noise of this calibration is a function of batches, so {' and '.join(noisy)} "
            "cannot be frozen. Take outputs=('mean', 'epistemic') and add the noise to the "
            "variance yourself, or calibrate with another noise."
        )
    return outputs
