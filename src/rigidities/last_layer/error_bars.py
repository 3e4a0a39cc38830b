r"""From features to error bars: $\sigma^2 = \alpha^2 q + \text{noise} / c$."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..calibration.calibration import Calibration, NoiseFunction
from ..calibration.conformal import BoundConformal, group_labels
from ..data.batches import Batch
from ..data.finiteness import Again, require_finite
from ..data.storage import Snapshot
from ..models.modes import unmixed
from ..posterior.posterior import Posterior
from ..posterior.quadratic import QuadraticForm
from ..prediction.distribution import Distribution, StudentT, Tilted
from ..prediction.entries import compact
from ..prediction.head import HeadForm
from ..prediction.noise import GivenNoise, NoNoise
from ..prediction.prediction import Prediction
from .distributed import Job
from .readout.reading import Reading, SampleWeight
from .statistics.row_sample import SampledRows


@dataclass(frozen=True)
class Spread:
    """One batch: the reading, with q (M, 1 or K) in place of its features, and the noise.

    Attributes:
        tilt: of the distribution, (M, K, J), where it has one.
        from_inputs: variance that uncertain inputs bring, shaped like the output, if any.
        labels: of the groups that conformal intervals know, shaped like the output, if any.
        novelty: of the inputs, the largest over the layers, shaped like the output, if known.
    """

    reading: Reading
    noise: Tensor
    tilt: Tensor | None = None
    from_inputs: Tensor | None = None
    labels: Tensor | None = None
    novelty: Tensor | None = None

    @classmethod
    def join(cls, spreads: Sequence[Spread]) -> Spread:
        """The spreads of consecutive batches as one."""

        def joined(parts: list[Tensor | None]) -> Tensor | None:
            given = [part for part in parts if part is not None]
            return torch.cat(given) if given else None

        return cls(
            reading=Reading.join([spread.reading for spread in spreads]),
            noise=torch.cat([spread.noise for spread in spreads]),
            tilt=joined([spread.tilt for spread in spreads]),
            from_inputs=joined([spread.from_inputs for spread in spreads]),
            labels=joined([spread.labels for spread in spreads]),
            novelty=joined([spread.novelty for spread in spreads]),
        )

    def snapshot(self) -> Snapshot:
        """As tensors and a header, for other processes."""
        reading = self.reading
        tensors = {
            "output": reading.output,
            "inputs": reading.inputs,
            "order": reading.order,
            "counts": reading.counts,
            "noise": self.noise,
            "tilt": self.tilt,
            "from_inputs": self.from_inputs,
            "labels": self.labels,
            "novelty": self.novelty,
        }
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        header = {"inner": list(reading.inner), "axis": reading.axis, "ones": reading.ones}
        return Snapshot(given, header)

    @classmethod
    def from_snapshot(cls, given: Snapshot) -> Spread:
        """The spread that `snapshot` came from."""
        tensors, header = given.tensors, given.header
        reading = Reading(
            output=tensors["output"],
            inputs=tensors["inputs"],
            inner=torch.Size(header["inner"]),
            axis=header["axis"],
            order=tensors.get("order"),
            counts=tensors.get("counts"),
            ones=header["ones"],
        )
        return cls(
            reading=reading,
            noise=tensors["noise"],
            tilt=tensors.get("tilt"),
            from_inputs=tensors.get("from_inputs"),
            labels=tensors.get("labels"),
            novelty=tensors.get("novelty"),
        )


def gathered(others: Job, spreads: Sequence[Spread]) -> list[Spread]:
    """The spreads of all processes in the order of ranks, as one; none where there are none."""
    if others.size == 1:
        return list(spreads)
    mine = Spread.join(spreads) if spreads else None

    def joined(parts: Iterator[Snapshot | None]) -> Snapshot:
        received = [Spread.from_snapshot(part) for part in parts if part is not None]
        every = received if mine is None else [mine, *received]
        if not every:
            return Snapshot({}, {"empty": True})
        return Spread.join(_in_one_order(every)).snapshot()

    whole = others.together(lambda: None if mine is None else mine.snapshot(), joined)
    return [] if "empty" in whole.header else [Spread.from_snapshot(whole)]


def _in_one_order(spreads: list[Spread]) -> list[Spread]:
    """Spreads whose equal orders of targets are one tensor, as those of one process are."""
    order = spreads[0].reading.order
    if order is None:
        return spreads
    return [
        replace(spread, reading=replace(spread.reading, order=order))
        if spread.reading.order is not None and torch.equal(spread.reading.order, order)
        else spread
        for spread in spreads
    ]


@dataclass(frozen=True)
class ErrorBars:
    r"""Everything that a prediction needs once the calibration is known.

    Attributes:
        form: the quadratic form q in the model's precision.
        scale: $\alpha$, in the form's precision.
        scale2: $\alpha^2$, likewise.
        head: that of the calibration folded, in the model's precision or in float32, if any.
    """

    form: QuadraticForm
    calibration: Calibration
    scale: Tensor
    scale2: Tensor
    head: HeadForm | None = None

    @classmethod
    def of(cls, posterior: Posterior, calibration: Calibration, dtype: torch.dtype) -> ErrorBars:
        """In a model's precision; the head in float32 at least."""
        form, scale = QuadraticForm.of(posterior, dtype), calibration.scale
        scale2 = scale.square().to(form.dtype)
        return cls(
            form, calibration, scale.to(form.dtype), scale2, calibration.form(result_dtype(dtype))
        )

    def of_batch(
        self, batch: Batch, reading: Reading, sample_weight: SampleWeight | None
    ) -> Spread:
        """The spread of a batch, with the user's functions of it."""
        weight = reading.sample_weights(sample_weight, batch)
        spread = self.spread(reading, weight, self.given(batch, reading))
        return replace(spread, labels=self.labels(batch, reading))

    def spread(
        self, reading: Reading, weight: Tensor | None = None, given: Tensor | None = None
    ) -> Spread:
        """What must be computed batch by batch.

        Args:
            reading: of the batch.
            weight: c, (M, 1) or (M, K).
            given: variances of a known noise, likewise.
        """
        reading.check_targets(len(self.scale2))
        with unmixed(reading.output):
            q = self.form.root(reading.inputs, ones=reading.ones).square()
            epistemic, tilt = self.scale2 * q, None
            if self.head is not None:
                moment, tilt = self._by_head(self.head, q, reading, weight, given)
                noise = (moment - epistemic).clamp(min=0)
            elif type(self.calibration.noise) is NoNoise:
                noise = q.new_zeros(()).expand(epistemic.shape)
            else:
                noise = self._noise(reading, weight, given)
        return Spread(replace(reading, inputs=q, ones=False), noise, tilt)

    def std(self, reading: Reading, given: Tensor | None = None) -> Tensor:
        """The standard deviation of one batch, shaped and typed like the output."""
        reading.check_targets(len(self.scale2))
        with unmixed(reading.output):
            root = self.form.root(reading.inputs, ones=reading.ones)
            if self.head is not None:
                q = root.square()
                moment, _ = self._by_head(self.head, q, reading, None, given)
                std = torch.maximum(moment, self.scale2 * q).sqrt()
            elif type(self.calibration.noise) is NoNoise:
                std = self.scale * root
            else:
                noise = self._noise(reading, None, given).to(root)
                std = torch.addcmul(noise, self.scale2, root.square()).sqrt()
        return reading.unrows(std.to(reading.output.dtype))

    def _noise(self, reading: Reading, weight: Tensor | None, given: Tensor | None) -> Tensor:
        """The variance of the noise, (M, K), of a calibration without a head."""
        mean = reading.rows(reading.output)
        noise = self.calibration.noise_variance(mean, reading.features, weight)
        return noise if given is None else noise * given

    def _by_head(
        self,
        head: HeadForm,
        q: Tensor,
        reading: Reading,
        weight: Tensor | None,
        given: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The distribution's second moment about the mean (M, K), and its tilt (M, K, J)."""
        factor = given
        if weight is not None:
            share = self.calibration.weight / weight
            factor = share if given is None else share * given
        mean = reading.rows(reading.output)
        squared, second, tilt = head(q, mean, form_inputs(reading), factor)
        return squared * second, tilt

    def given(self, batch: Batch, reading: Reading) -> Tensor | None:
        """Variances of a known noise, (M, 1) or (M, K); None for another noise."""
        noise = self.calibration.noise
        if not isinstance(noise, GivenNoise):
            return None
        if noise.function is None:
            raise ValueError(
                "The noise of this calibration was a function, which a file does not hold: pass it "
                "again, LastLayerRigidity.load(path, model, noise=function)."
            )
        return noise_variances(noise.function, batch, reading)

    def labels(self, batch: Batch, reading: Reading) -> Tensor | None:
        """Of the groups that conformal intervals know, shaped like the output, if any."""
        conformal = self.calibration.conformal
        if conformal is None or conformal.function is None:
            return None
        return group_labels(conformal.function, batch.raw, reading.output)

    def prediction(self, spreads: Sequence[Spread], again: Again) -> Prediction:
        """The predictions of consecutive batches, which must be finite; see `require_finite`."""
        if not spreads:
            raise ValueError("There is nothing to predict: no batches were given.")
        whole = Spread.join(spreads)
        reading, from_inputs = whole.reading, whole.from_inputs
        q = reading.features
        dtype = result_dtype(reading.output.dtype)
        found = Prediction(
            mean=reading.output,
            epistemic=reading.unrows(self.calibration.epistemic(q).to(dtype)),
            noise=reading.unrows(whole.noise.to(dtype)),
            rigidity=reading.unrows((1 / q).to(dtype)),
            from_inputs=q.new_zeros(()) if from_inputs is None else from_inputs.to(dtype),
            distribution=self._distribution(reading, whole.tilt),
            support=self.calibration.support,
            conformal=self._conformal(reading, whole.labels),
            novelty=whole.novelty,
        )
        require_finite(found.mean, found.epistemic + found.noise, again, "rows")
        return found

    def _distribution(self, reading: Reading, tilt: Tensor | None) -> Distribution:
        distribution = self.calibration.distribution
        if isinstance(distribution, StudentT | Tilted) and isinstance(
            distribution.df, Tensor
        ):  # of each target
            distribution = replace(distribution, df=_each_target(reading, distribution.df))
        if tilt is None or not tilt.shape[-1]:
            return distribution
        shaped = reading.unrows(tilt.movedim(-1, 0)).movedim(0, -1)
        return distribution.each(lambda _: shaped)

    def _conformal(self, reading: Reading, labels: Tensor | None) -> BoundConformal | None:
        if self.calibration.conformal is None:
            return None
        targets = torch.arange(len(self.calibration.scale), device=reading.output.device)
        return self.calibration.conformal.bound(labels, _each_target(reading, targets))


def noise_variances(function: NoiseFunction, batch: Batch, reading: Reading) -> Tensor:
    """(M, 1) or (M, K), by the user's function."""
    found = reading.sample_weights(function, batch, "noise_variance")
    assert found is not None
    if not bool((found > 0).all()):
        raise ValueError("noise variances must be above zero for every row.")
    return found


def form_inputs(reading: Reading) -> Tensor:
    """What a folded head takes of a reading: it ignores a last column of ones."""
    return reading.inputs if reading.ones else head_inputs(reading)


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of results of a model in this one: half has too few digits."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def head_inputs(rows: Reading | SampledRows) -> Tensor:
    """Features, and counts where a readout that sums has no column for them."""
    if rows.counts is None:
        return rows.features
    return torch.cat([rows.features, rows.counts.to(rows.features)], -1)


def _each_target(reading: Reading, values: Tensor) -> Tensor:
    """Values (K,) of the targets, in a shape that broadcasts to the output's."""
    if len(values) == 1:
        return values[0]
    rows = len(reading.features)
    whole = compact(reading.unrows(torch.arange(len(values)).expand(rows, -1))[0])
    return values[whole.to(values.device)]
