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
from ..posterior.gram import with_ones
from ..posterior.joint import OwnPart
from ..posterior.posterior import LARGEST_ROUNDING, Posterior
from ..posterior.quadratic import HALVES, Block, QuadraticForm, Split
from ..prediction.head import Guard, HeadForm, widened
from ..prediction.law import Law, Tilted, tilted_moments
from ..prediction.noise import GivenNoise, Noise
from .ensemble.ensemble import member_outputs
from .ensemble.members import Members
from .error_bars import head_inputs
from .readout.graph import CopiedReadout, LinearCopy, PlainCopy
from .readout.reading import Reading

if TYPE_CHECKING:
    from typing_extensions import Self

OUTPUTS = ("mean", "std", "epistemic", "noise", "quantiles", "members")

ITERATED = (
    "Quantiles of a tilted law are found by iteration, which no graph holds. Take std instead, or "
    "calibrate(valid, law='student-t') before you freeze."
)


class Exact(nn.Module):
    """A module whose own buffers keep their precision, whatever it is cast to."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in exact.items():
            setattr(self, name, tensor.to(getattr(self, name).device))
        return self

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def hold(self, **tensors: Any) -> None:
        """Register copies of tensors as buffers."""
        for name, tensor in tensors.items():
            kind = tensor.dtype if isinstance(tensor, Tensor) else torch.float64
            self.register_buffer(name, torch.as_tensor(tensor, dtype=kind).detach().clone())


class FactorNorm(Exact):
    r"""$\sqrt{\alpha^2 q + c}$ of rows of features, from the blocks of a quadratic form."""

    def __init__(self, form: QuadraticForm, ones: bool, scale: float, constant: float) -> None:
        super().__init__()
        self.rounding, self.error, self._dtype = form.rounding, 0.0, form.dtype
        self._apart = ones and form.factor.ndim == 3  # which takes the column of ones itself
        affine = ones and not self._apart
        blocks = form.whole(affine)
        if affine:
            constant += scale**2 * float(form.factor[-1, -1]) ** 2
        self._starts, self._floor = [block.start for block in blocks], constant > 0
        for i, (_, matrix, offset) in enumerate(blocks):
            assert isinstance(matrix, Tensor)
            matrix = scale * matrix
            offset = None if offset is None else scale * offset
            if len(blocks) == 1 and self._floor and matrix.ndim == 2:  # one more entry of the norm
                offset = matrix.new_zeros(matrix.shape[1]) if offset is None else offset
                offset = torch.cat([offset, offset.new_tensor([math.sqrt(constant)])])
                matrix, self._floor = nn.functional.pad(matrix, (0, 1)), False
            self.register_buffer(f"matrix{i}", matrix.contiguous())
            self.register_buffer(f"offset{i}", offset)
        self.hold(constant=torch.tensor(math.sqrt(constant)).to(form.factor))
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
        """(M, D) -> (M,), or (M, T)."""
        features = with_ones(features) if self._apart else features
        split = self._half is not None and features.dtype == self._half
        features = features if split else features.to(self._dtype)
        own, norms = self._buffers, []
        for i, start in enumerate(self._starts):
            matrix: Any = own[f"matrix{i}"]
            if split:
                matrix = Split(*(cast("Tensor", own[f"{name}{i}"]) for name in Split._fields))
            norms.append(Block(start, matrix, own[f"offset{i}"]).norm(features))
        if self._floor:
            norms.append(self.constant.expand_as(norms[0]))
        if len(norms) == 1:
            return norms[0]
        whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        return whole


class TruncatedNorm(Exact):
    r"""$\sqrt q$ of a truncated posterior; a difference, in float64 where that asks for it."""

    def __init__(self, posterior: Posterior, ones: bool, dtype: torch.dtype) -> None:
        super().__init__()
        s, precisions = posterior.ridge, posterior.precisions
        wide = torch.promote_types(dtype, torch.float32)
        lost = 2 * math.sqrt(posterior.width) * posterior.condition  # digits of the difference
        if lost * torch.finfo(wide).eps > LARGEST_ROUNDING:
            wide = torch.float64
        own = posterior.float64_error + posterior.doubt + 2 * torch.finfo(dtype).eps
        self.rounding = lost * torch.finfo(wide).eps + own
        self.error, self._ones = posterior.error, ones
        kept = posterior.eigenvectors * (1 / s - 1 / precisions).sqrt()
        self.hold(kept=kept.to(wide), rate=1 / s, least=float(1 / precisions[-1]))

    def forward(self, features: Tensor) -> Tensor:
        """(M, D) -> (M,), or (M, K, D) -> (M, K)."""
        features, kept = features.to(self.kept), self.kept
        size = features.square().sum(-1)
        if self._ones:
            size, z = size + 1, torch.addmm(kept[-1], features, kept[:-1])
        else:
            z = features @ kept
        q = size * self.rate.to(size) - z.square().sum(-1)
        return torch.maximum(q, size * self.least.to(size)).sqrt()


class FrozenHead(Exact):
    """A head of noise and tilt, and the moments of the law that follows the tilt."""

    def __init__(self, form: HeadForm, chosen: Calibration) -> None:
        super().__init__()
        assert chosen.head is not None
        self._sizes = {}
        for name, parts in vars(form).items():
            self._sizes[name] = 0 if isinstance(parts, Tensor) else len(parts)
            several = (parts,) if isinstance(parts, Tensor) else parts
            self.hold(**{f"{name}{i}": part for i, part in enumerate(several)})
        self.tilted = isinstance(chosen.law, Tilted) and chosen.head.constant.shape[1] > 1
        if isinstance(chosen.law, Tilted) and self.tilted:
            basis, values = chosen.law.moment_rule(form.constant.dtype, form.constant.device)
            self.hold(basis=basis, values=values)
        else:
            self.hold(second=chosen.law.second)
        self._guarded = chosen.guard is not None
        self.hold(rate=chosen.head.scale2)
        if chosen.guard is not None:
            self.hold(**chosen.guard.tensors())

    def forward(
        self, q: Tensor, mean: Tensor, features: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The law's squared scale (M, K), its second moment, and the tilt (M, K, J) if any."""
        parts: dict[str, Any] = {}
        for name, several in self._sizes.items():
            held = [self._buffers[f"{name}{i}"] for i in range(max(1, several))]
            parts[name] = tuple(held) if several else held[0]
        h, tilt = HeadForm(**parts)(q, mean, features)
        guard = Guard(self.scale2, self.reference) if self._guarded else None
        squared, tilt = widened(q, h.exp(), tilt, self.rate, guard)
        if not self.tilted:
            return squared, self.second.to(squared), None
        return squared, tilted_moments(tilt, self.basis, self.values)[..., 1].to(squared), tilt


class Frozen(nn.Module):
    r"""Mean and error bar as a plain module, with weights and statistics of its own.

    Made by `LastLayerRigidity.freeze`. It may be compiled, exported, pickled and called from
    several threads; what becomes of the model or the fit does not matter to it. `half()` and the
    like cast the model and leave the statistics as they are. Always in eval mode.

    Attributes:
        outputs: names of what `frozen(x)` gives, in that order.
        error: worst-case relative error of the variance $\alpha^2 q$ by truncation; 0 without.
        rounding: bound on its relative rounding error; see `QuadraticForm.rounding`.
        loses_members: whether ONNX leaves out of the members what single ones do not share.
    """

    def __init__(
        self,
        readout: CopiedReadout,
        norm: FactorNorm | TruncatedNorm,
        chosen: Calibration,
        head: FrozenHead | None,
        outputs: tuple[str, ...],
        *,
        folded: bool,
        levels: Sequence[float],
        members: Members | None,
        feed: Feed,
    ) -> None:
        super().__init__()
        self.readout, self.norm, self.head = readout, norm, head
        self.outputs, self.error, self.rounding = outputs, norm.error, norm.rounding
        self._direct = folded
        self._feed = replace(feed, model=readout.run.model, target=None)
        self._noise, self._law, self._levels = type(chosen.noise), chosen.law, tuple(levels)
        low, high = chosen.support or (None, None)
        self._bounds = (-math.inf if low is None else low, math.inf if high is None else high)
        self.bars = Exact()
        scale2 = torch.ones_like(chosen.scale) if folded else chosen.scale.square()
        self.bars.hold(scale2=scale2, level=chosen.noise.level, second=chosen.law.second)
        fixed = "quantiles" in outputs and (head is None or not head.tilted)
        self.bars.hold(z=_quantiles(chosen.law, levels) if fixed else torch.zeros(()))
        self._drawing = None if members is None else members.drawing
        own = None if members is None else members.own
        self.loses_members = own is not None
        if members is not None:
            self.bars.hold(deviations=members.deviations, **({} if own is None else own._asdict()))
        self.train()

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, ...]:
        """What `outputs` names, each shaped like the model's output."""
        if self._feed.whole:
            batch = self._feed.handed(inputs, keywords)
            inputs, keywords = batch.args, batch.kwargs
        if self._direct:
            return self._mean_and_std(inputs, keywords)
        reading: Reading = self.readout(inputs, keywords)
        with unmixed(reading.output):
            found = self._found(reading)
            if "members" in self.outputs:
                found["members"] = self._moved(reading, Batch(inputs, keywords, None, None))
        return tuple(found[name] for name in self.outputs)

    def require_graph(self, *, strict: bool) -> None:
        """Refuse what an exported graph cannot hold.

        Raises:
            ValueError: quantiles of a tilted law, or a strict export of a readout under `vmap`.
        """
        if "quantiles" in self.outputs and self.head is not None and self.head.tilted:
            raise ValueError(ITERATED)
        if strict and isinstance(self.readout, LinearCopy):
            raise ValueError(
                "A strict export does not take this model's readout, whose features come by "
                "torch.vmap since its output is scaled, summed or reordered. Pass strict=False."
            )

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
        return self

    def _mean_and_std(
        self, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Of one target, with scale and noise in the norm."""
        if isinstance(self.readout, PlainCopy) and self.readout.single:
            output, rows = self.readout.rows(inputs, keywords)
        else:
            reading = self.readout(inputs, keywords)
            output, rows = reading.output, reading.inputs
        with unmixed(output):
            std = self.norm(rows).reshape(output.shape).to(output.dtype)
        return tuple([output if name == "mean" else std for name in self.outputs])

    def _found(self, reading: Reading) -> dict[str, Tensor]:
        output, mean = reading.output, reading.rows(reading.output)
        kind = torch.promote_types(output.dtype, torch.float32)  # half has too few digits
        q = self.norm(reading.inputs).square()
        q = q[:, None] if q.ndim == 1 else q
        epistemic, tilt = self.bars.scale2.to(q) * q, None
        if self.head is None:
            noise = self._noise(self.bars.level).variance(mean, reading.features).to(q)
            variance, second = epistemic + noise, self.bars.second.to(q)
        else:
            squared, second, tilt = self.head(q, mean, head_inputs(reading))
            noise = (squared * second - epistemic).clamp(min=0)
            variance = epistemic + noise
        found = {"mean": output, "std": reading.unrows(variance.sqrt().to(output.dtype))}
        found["epistemic"] = reading.unrows(epistemic.to(kind))
        found["noise"] = reading.unrows(noise.expand_as(mean).to(kind))
        if "quantiles" in self.outputs:
            unit = (variance / second).sqrt().to(kind)
            z = self._z(tilt).to(unit)
            found["quantiles"] = reading.unrows((mean.to(kind) + z * unit).clamp(*self._bounds))
        return found

    def _z(self, tilt: Tensor | None) -> Tensor:
        """The law's quantiles, (L, 1, K or 1) or (L, M, K)."""
        if tilt is None:
            z: Tensor = self.bars.z
            return z
        if torch.compiler.is_compiling():
            raise ValueError(ITERATED)
        return _quantiles(self._law.each(lambda _: tilt), self._levels, tilt.device)

    def _moved(self, reading: Reading, batch: Batch) -> Tensor:
        assert self._drawing is not None
        own = OwnPart(self.bars.factor, self.bars.mixing) if self.loses_members else None
        return member_outputs(reading, batch, self.bars.deviations, self._drawing, own)


def _quantiles(law: Law, levels: Sequence[float], device: torch.device | None = None) -> Tensor:
    for level in levels:
        require_level(level, "A quantile's")
    found = [law.quantile(torch.tensor(p, dtype=torch.float64, device=device)) for p in levels]
    return torch.stack([z if z.ndim > 1 else z.reshape(1, -1) for z in found])


def freeze(
    readout: CopiedReadout,
    posterior: Posterior,
    chosen: Calibration,
    outputs: Sequence[str],
    *,
    rank: int | None,
    accuracy: float | None,
    largest_rounding: float,
    **options: Any,
) -> Frozen:
    """The module for a readout, a posterior and a calibration; see `LastLayerRigidity.freeze`."""
    outputs = _checked(outputs, chosen)
    dtype = placement(readout.run.model)[1]
    ones, targets = isinstance(readout, PlainCopy) and readout.ones, len(chosen.scale)
    cut = posterior
    if rank is not None or accuracy is not None:
        cut = posterior.truncate(rank, accuracy=accuracy)
        if accuracy is not None and 2 * cut.rank > cut.width:
            cut = posterior  # half of a square product costs no more
    kinds = type(chosen.noise).__mro__
    constant = all("shape" not in vars(kind) for kind in kinds if kind is not Noise)
    whole, flat = not cut.complement, posterior.eigenvalues.ndim == 1
    folded = chosen.head is None and targets == 1 and whole and flat and constant
    folded = folded and not isinstance(chosen.noise, GivenNoise) and {*outputs} <= {"mean", "std"}
    norm: FactorNorm | TruncatedNorm
    if whole:
        own = (float(chosen.scale), float(chosen.noise.level)) if folded else (1.0, 0.0)
        norm = FactorNorm(QuadraticForm.of(posterior, dtype, largest_rounding), ones, *own)
    else:
        norm = TruncatedNorm(cut, ones, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    head = None if chosen.head is None else FrozenHead(HeadForm.of(chosen.head, wide), chosen)
    frozen = Frozen(readout, norm, chosen, head, outputs, folded=folded, **options)
    return frozen.to(posterior.eigenvalues.device)


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
