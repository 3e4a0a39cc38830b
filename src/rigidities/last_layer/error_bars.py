r"""From features to error bars: $\sigma^2 = \alpha^2 q + \text{noise} / c$.

Here $q = f^\top (G + \varsigma^2 I)^{-1} f$ is the quadratic form of the features, $\alpha$ the
calibrated scale, and c a row's weight in the loss, 1 by default.

`ErrorBars` has all that predictions need once a calibration is known. A batch comes in as a
`Reading`, what one pass of the model leaves. `ErrorBars.std` gives the standard deviations of one
batch, for `uq(x)`. `ErrorBars.of_batch` gives its `BatchVariances`, for `uq.predict`: these are
small, can be joined and sent between processes, and `ErrorBars.prediction` makes one `Prediction`
of those of all batches.

The *head* of a calibration (`prediction.head`) gives the noise and the shape of the distribution as
functions of the features. It is not a readout head.

Shapes: M rows, K targets, D features, J components of a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..calibration.calibration import Calibration
from ..calibration.conformal import BoundConformal, group_labels
from ..calibration.methods import NoiseFunction
from ..data.batches import Batch
from ..data.finiteness import Again, require_finite
from ..data.output_layout import OutputLayout
from ..models.modes import unmixed
from ..posterior.posterior import Posterior
from ..posterior.quadratic import QuadraticForm
from ..prediction.distribution import Distribution, StudentT
from ..prediction.entries import compact
from ..prediction.head import HeadForm
from ..prediction.mixture import Mixture
from ..prediction.noise import GivenNoise, NoNoise
from ..prediction.prediction import Prediction
from ..readout.reading import Reading, SampleWeight, joined_outputs
from .distributed import Job


@dataclass(frozen=True)
class BatchVariances:
    r"""What one batch contributes to a prediction.

    Attributes:
        output: What the model predicts.
        output_layout: How the output is seen as rows (M, K).
        q: Unscaled variances, (M, 1 or K).
        epistemic: Variance $\alpha^2 q$, (M, K); by a head, at most all of the row's variance.
        noise_variance: Variance of the noise, (M, K).
        shape: Logits, offsets and log-widths of each row's mixture, (M, K, 3 J), by a head.
        from_inputs: Variance that uncertain inputs bring, shaped like the output, if any.
        labels: Labels of the groups that conformal intervals know, shaped like the output, if any.
        novelty: Novelty of the inputs, the largest over the layers, shaped like the output, if
            known.
    """

    output: Tensor
    output_layout: OutputLayout
    q: Tensor
    epistemic: Tensor
    noise_variance: Tensor
    shape: Tensor | None = None
    from_inputs: Tensor | None = None
    labels: Tensor | None = None
    novelty: Tensor | None = None

    @classmethod
    def join(cls, batches: Sequence[BatchVariances]) -> BatchVariances:
        """The variances of consecutive batches as one.

        Raises:
            ValueError: The batches have outputs of different shapes, or targets in different
                orders.
        """
        if len(batches) == 1:
            return batches[0]

        def concatenated(tensors: list[Tensor | None]) -> Tensor | None:
            present = [tensor for tensor in tensors if tensor is not None]
            return torch.cat(present) if present else None

        remedy = ". Predict batch by batch: mean, std = uq(x)."
        output = joined_outputs([batch.output for batch in batches], remedy)
        layouts = [batch.output_layout for batch in batches]
        return cls(
            output=output,
            output_layout=OutputLayout.join(layouts, output, remedy),
            q=torch.cat([batch.q for batch in batches]),
            epistemic=torch.cat([batch.epistemic for batch in batches]),
            noise_variance=torch.cat([batch.noise_variance for batch in batches]),
            shape=concatenated([batch.shape for batch in batches]),
            from_inputs=concatenated([batch.from_inputs for batch in batches]),
            labels=concatenated([batch.labels for batch in batches]),
            novelty=concatenated([batch.novelty for batch in batches]),
        )


def gathered(processes: Job, batches: Sequence[BatchVariances]) -> list[BatchVariances]:
    """The variances of all processes' batches, on every process, joined in the order of ranks.

    A process by itself gets its own batches back. The list is empty where no process had a batch.

    Args:
        processes: The processes of the call, this one among them.
        batches: The variances of this process's batches.
    """
    if processes.size == 1:
        return list(batches)
    local = BatchVariances.join(batches) if batches else None
    by_rank = [variances for variances in processes.gathered(local) if variances is not None]
    if not by_rank:
        return []
    return [BatchVariances.join(by_rank)]


@dataclass(frozen=True)
class ErrorBars:
    r"""Everything that a prediction needs once the calibration is known.

    Attributes:
        form: The quadratic form q in the model's precision.
        calibration: Scale, noise, distribution and whatever else was calibrated.
        scale: $\alpha$ of each target, (K,), in the form's precision.
        scale2: $\alpha^2$ of each target, (K,), in the form's precision.
        head: The calibration's head in its folded form, in the model's precision and at least
            float32; None where there is none.
    """

    form: QuadraticForm
    calibration: Calibration
    scale: Tensor
    scale2: Tensor
    head: HeadForm | None = None

    @classmethod
    def of(cls, posterior: Posterior, calibration: Calibration, dtype: torch.dtype) -> ErrorBars:
        """The error bars of a posterior and a calibration, for a model of that precision."""
        form = QuadraticForm.of(posterior, dtype)
        return cls(
            form=form,
            calibration=calibration,
            scale=calibration.scale.to(form.dtype),
            scale2=calibration.scale.square().to(form.dtype),
            head=calibration.form(result_dtype(dtype)),
        )

    def of_batch(
        self,
        batch: Batch,
        reading: Reading,
        sample_weight: SampleWeight | None,
        novelty: Tensor | None = None,
    ) -> BatchVariances:
        """The variances of a batch, with what the user's functions give for it.

        Args:
            batch: The batch, for functions of it.
            reading: What the model gave for the batch.
            sample_weight: callable(batch) -> loss weights of its rows, if there is one.
            novelty: Novelty of the samples, (N,), if it is known.
        """
        weight = reading.sample_weights(sample_weight, batch)
        given_variance = None
        noise = self.calibration.noise
        if isinstance(noise, GivenNoise):
            given_variance = noise_variances(noise.known_function(), batch, reading)
        variances = self.variances(reading, weight, given_variance, novelty)
        shaped_novelty = None
        if novelty is not None:
            shaped_novelty = reading.output_layout.of_samples(novelty)
        return replace(variances, labels=self.labels(batch, reading), novelty=shaped_novelty)

    def variances(
        self,
        reading: Reading,
        weight: Tensor | None = None,
        given_variance: Tensor | None = None,
        novelty: Tensor | None = None,
    ) -> BatchVariances:
        """The variances of a batch, and the shapes of its distributions.

        Args:
            reading: What the model gave for the batch.
            weight: Loss weights c, (M, 1) or (M, K).
            given_variance: Variances of a known noise, likewise.
            novelty: Novelty of the samples, (N,), if it is known.
        """
        reading.output_layout.check_targets(self.scale2.shape[0])
        with unmixed(reading.output):
            q = self.form.root(reading.bare_features, ones=reading.ones).square()
            epistemic = self.scale2 * q
            shape = None
            if self.head is not None:
                rows = self._rows(q, reading, weight, given_variance, novelty)
                moment, shape = self.head(*rows)
                epistemic = torch.minimum(epistemic, moment)
                noise_variance = moment - epistemic
            elif type(self.calibration.noise) is NoNoise:
                noise_variance = q.new_zeros(()).expand(epistemic.shape)
            else:
                noise_variance = self._noise_variance(reading, weight, given_variance)
        return BatchVariances(
            output=reading.output,
            output_layout=reading.output_layout,
            q=q,
            epistemic=epistemic,
            noise_variance=noise_variance,
            shape=shape,
        )

    def std(self, batch: Batch, reading: Reading, novelty: Tensor | None = None) -> Tensor:
        """The standard deviation of one batch, shaped and typed like the output.

        Args:
            batch: The batch, for a function that gives its noise.
            reading: What the model gave for the batch.
            novelty: Novelty of the samples, (N,), if it is known.
        """
        reading.output_layout.check_targets(self.scale2.shape[0])
        given_variance = None
        noise = self.calibration.noise
        if isinstance(noise, GivenNoise):
            given_variance = noise_variances(noise.known_function(), batch, reading)
        with unmixed(reading.output):
            root = self.form.root(reading.bare_features, ones=reading.ones)
            if self.head is not None:
                q = root.square()
                rows = self._rows(q, reading, None, given_variance, novelty)
                std = self.head.moment(*rows).sqrt()
            elif type(self.calibration.noise) is NoNoise:
                std = self.scale * root
            else:
                noise_variance = self._noise_variance(reading, None, given_variance).to(root)
                std = torch.addcmul(noise_variance, self.scale2, root.square()).sqrt()
        return reading.output_layout.unrows(std.to(reading.output.dtype))

    def _noise_variance(
        self, reading: Reading, weight: Tensor | None, given_variance: Tensor | None
    ) -> Tensor:
        """The variance of the noise, (M, K), of a calibration without a head."""
        mean = reading.output_layout.rows(reading.output)
        variance = self.calibration.noise_variance(mean, reading.features, weight)
        return variance if given_variance is None else variance * given_variance

    def _rows(
        self,
        q: Tensor,
        reading: Reading,
        weight: Tensor | None,
        given_variance: Tensor | None,
        novelty: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The arguments of a head, in its order."""
        assert self.head is not None, "only a head has rows"
        noise_factor = None
        if given_variance is not None:
            noise_factor = self.head.forecast.over_extent(given_variance, reading.form_inputs)
        if weight is not None:
            by_weight = self.calibration.weight / weight
            noise_factor = by_weight if noise_factor is None else noise_factor * by_weight
        mean = reading.output_layout.rows(reading.output)
        if novelty is not None:
            novelty = novelty.repeat_interleave(len(mean) // max(1, len(novelty)))[:, None]
        return q, mean, reading.form_inputs, noise_factor, novelty

    def labels(self, batch: Batch, reading: Reading) -> Tensor | None:
        """Labels of the groups that conformal intervals know, shaped like the output, if any."""
        conformal = self.calibration.conformal
        if conformal is None or conformal.function is None:
            return None
        return group_labels(conformal.function, batch.raw, reading.output)

    def prediction(self, batches: Sequence[BatchVariances], again: Again) -> Prediction:
        """The prediction of consecutive batches.

        Args:
            batches: Their variances.
            again: Gives the batches again, to name rows that are not finite; see `require_finite`.

        Raises:
            ValueError: There are no batches, or a mean or variance is not finite.
        """
        if not batches:
            raise ValueError("There is nothing to predict: no batches were given.")
        whole = BatchVariances.join(batches)
        layout = whole.output_layout
        q = whole.q
        dtype = result_dtype(whole.output.dtype)
        if whole.from_inputs is None:
            from_inputs = q.new_zeros(())
        else:
            from_inputs = whole.from_inputs.to(dtype)
        prediction = Prediction(
            mean=whole.output,
            epistemic=layout.unrows(whole.epistemic.to(dtype)),
            noise=layout.unrows(whole.noise_variance.to(dtype)),
            rigidity=layout.unrows((1 / q).to(dtype)),
            from_inputs=from_inputs,
            distribution=self._distribution(layout, whole.shape),
            support=self.calibration.support,
            conformal=self._conformal(layout, whole.labels, whole.output.device),
            novelty=whole.novelty,
        )
        require_finite(prediction.mean, prediction.epistemic + prediction.noise, again, "rows")
        return prediction

    def _distribution(self, layout: OutputLayout, shape: Tensor | None) -> Distribution:
        """The calibrated distribution with its parameters shaped like the output."""
        if shape is not None:
            return Mixture.of_shape(layout.unrows(shape.movedim(-1, 0)).movedim(0, -1))
        distribution = self.calibration.distribution
        if isinstance(distribution, StudentT) and isinstance(distribution.df, Tensor):
            # One number for each target.
            return replace(distribution, df=_by_target(layout, distribution.df))
        return distribution

    def _conformal(
        self, layout: OutputLayout, labels: Tensor | None, device: torch.device
    ) -> BoundConformal | None:
        """The conformal scores, with group and target of each entry of the output."""
        if self.calibration.conformal is None:
            return None
        targets = torch.arange(len(self.calibration.scale), device=device)
        return self.calibration.conformal.bound(labels, _by_target(layout, targets))


def noise_variances(function: NoiseFunction, batch: Batch, reading: Reading) -> Tensor:
    """The noise variances that the user's function gives for a batch, (M, 1) or (M, K).

    Raises:
        ValueError: A variance is not above zero.
    """
    remedy = "Give every row a variance above zero."
    variances = reading.user_numbers(function, batch, "noise_variance", remedy)
    if not bool((variances > 0).all()):
        raise ValueError("noise variances must be above zero for every row.")
    return variances


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of results for a model of this precision: half has too few digits."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _by_target(layout: OutputLayout, values: Tensor) -> Tensor:
    """Values (K,) of the targets, in a shape that broadcasts to the output's."""
    if len(values) == 1:
        return values[0]
    target_index = layout.unrows(torch.arange(len(values)).expand(layout.row_count, -1))[0]
    return values[compact(target_index).to(values.device)]
