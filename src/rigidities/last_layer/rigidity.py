r"""`LastLayerRigidity`: error bars for a trained torch model.

$$ \sigma^2(x) = \alpha^2\, f(x)^\top (G + \varsigma^2 I)^{-1} f(x) \; [+ \text{noise}] $$

with $f$ the derivatives of the output by the readout's weights (for a linear last layer, its
input), $G = \sum_i w_i f_i f_i^\top$ over the training data. `fit` accumulates G, `calibrate`
chooses $\alpha$, $\varsigma^2$, the noise and the distribution around the mean, `predict` uses
them.

Reference: F. Bigi, S. Chong, M. Ceriotti, F. Grasselli, "A prediction rigidity formalism for
low-cost uncertainties in trained neural networks" (2024), Sec. 3.5.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .. import selection
from ..calibration.calibration import Calibration, Given, Support, Wanted
from ..calibration.conformal import Groups
from ..calibration.report import CalibrationReport
from ..calibration.summary import UNFITTED, summary
from ..data.arrays import with_target
from ..data.feed import Feed
from ..data.finiteness import require_finite
from ..data.slots import InputName, Slot
from ..data.storage import Snapshot
from ..losses import LossLike, loss_for, loss_name
from ..models.calling import FeatureFunction, ForwardFunction, Source
from ..models.modes import outside_graphs, outside_inference_mode, refuse_transforms
from ..models.shadow import placement
from ..posterior.draws import MEMBERS
from ..posterior.gram import Gram, PrecisionLike
from ..posterior.joint import JointPosterior
from ..posterior.posterior import LARGEST_ROUNDING, Posterior
from ..posterior.quadratic import rounding_bound
from ..prediction.derived import Derived
from ..prediction.distribution import Distribution
from ..prediction.noise import Noise
from ..prediction.novelty import Novelty
from ..prediction.prediction import Prediction
from ..selection import Selection
from .accumulation import Weighing
from .checkpoint import SECONDS, Checkpoint
from .ensemble.ensemble import Ensemble
from .ensemble.members import members as member_set
from .error_bars import gathered
from .fit import Learnt, ReadoutFit
from .frozen import Frozen, freeze
from .gradients.feature_derivatives import traced_derivatives
from .gradients.feature_map import FeatureMap, stand_alone, traced
from .gradients.gradient import Differentiator, Gradient, shared_out
from .gradients.loss import GradientTarget, GradientWeight, gradient_loss
from .gradients.uncertain_inputs import InputVariances
from .local_terms import LocalTerms, local_terms
from .merging import named
from .propagation.outputs import repeatable
from .propagation.propagation import covariance_between, propagated
from .readout.binding import Binding
from .readout.graph import copied_readout
from .readout.reading import Reading, SampleWeight, read
from .readout.tap import AnyTap
from .refit import Refitted
from .statistics.parts import SAMPLE
from .wrapper import ModelWrapper

if TYPE_CHECKING:
    from typing_extensions import Self

SAMPLED = (
    "There are too many inputs to differentiate exactly: the standard deviations come from {} "
    "members, with a relative error of {:.0%}. Pass members= to draw more, or 0 to be exact."
)


class LastLayerRigidity(ModelWrapper):
    """Error bars for a trained `nn.Module`, which is never changed.

    Args:
        model: the trained model.
        layer: name (or names) of the readout layer; by default the last linear map before the
            output is found on the first batch.
        features: callable(model, *inputs) -> (N, D), instead of a readout layer.
        forward: callable(model, batch) -> output, for batches that are not (x, y).
        target: callable(batch) -> target.
        output: key, index or attribute of the output, where the model returns several.

    Attributes:
        refitted: what `refit` has changed, where this came from it; files do not hold it.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> y = 2 * x + 0.1 * torch.randn(50, 1)
        >>> model = torch.nn.Linear(1, 1)
        >>> with torch.no_grad():
        ...     _, _ = model.weight.fill_(2.0), model.bias.fill_(0.0)
        >>> uq = LastLayerRigidity(model).fit((x[::2], y[::2]))
        >>> report = uq.calibrate((x[1::2], y[1::2]))
        >>> mean, std = uq(torch.tensor([[0.0], [5.0]]))
        >>> mean.shape == std.shape, bool(std[1] > std[0])
        (True, True)
    """

    _kind = "fit"

    def __init__(
        self,
        model: nn.Module,
        *,
        layer: str | list[str] | None = None,
        features: FeatureFunction | None = None,
        forward: ForwardFunction | None = None,
        target: Callable[[Any], Tensor] | None = None,
        output: str | int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        if layer is not None and features is not None:
            raise ValueError("Give layer= or features=, not both.")
        super().__init__(model)
        binding = Binding(model, Source(forward, features, output), layer)
        self._fit = ReadoutFit(binding, target)
        self.refitted: Refitted | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "model" and "_fit" in vars(self):  # another model has no fit yet
            old = self._fit.unbound
            self._fit = ReadoutFit(Binding(value, old.source, old.layer), self._fit.target)

    @outside_inference_mode
    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        loss: LossLike = "mse",
        sample_weight: SampleWeight | None = None,
        gradients: InputName = None,
        gradient_weight: GradientWeight | None = None,
        gradient_target: GradientTarget | None = None,
        sample: int = SAMPLE,
        precision: PrecisionLike = "auto",
        method: str = "gram",
        novelty: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_seconds: float = SECONDS,
        batch_size: int | None = None,
        progress: bool | None = None,
        process_group: Any = None,
    ) -> Self:
        r"""Accumulate the Gram in one pass over the training data; nothing is factorised.

        Args:
            x: inputs: a tensor, an array, a data frame, or a tuple of several; or, without y, a
                data set of both: (x, y), a Dataset, a DataLoader, or an iterable of batches.
            y: targets, one row per row of x.
            loss: the loss the model was trained with: "mse", "huber", "log-cosh", "poisson",
                an object of `losses`, or callable(prediction, target) -> one loss per sample.
            sample_weight: callable(batch) -> weights (N,), where the training loss was weighted.
            gradients: position or name of the input by whose derivatives the model was trained
                too ("pos" for forces): half their squared error, times the
            gradient_weight: $\beta$, stood in the loss; a number, by default 1, or
                callable(batch) -> one per row of that input.
            gradient_target: the derivatives' target, where there is one: key or attribute of a
                batch, or callable(batch); forces with their sign changed. `calibrate` then gives
                derivatives a scale of their own.
            sample: how many training rows to keep for `calibrate`, drawn evenly; 0 for none.
            precision: of the products in the Gram: "double"; "mixed", in the features' own
                precision with a measured rounding, which `calibrate` holds against the ridge; or
                "auto", double except for half-precision features.
            method: "gram" adds up $F^T F$; "qr" keeps a triangular root of it, for features whose
                condition number is beyond 1e5 or so: a few times slower, and no digits are lost
                to squaring it. Data added or removed later go the same way.
            novelty: whether to learn what enters every layer too, for `novelty`: a product of at
                most 257 x 257 numbers for each row and layer.
            checkpoint: file that keeps the unfinished fit, for the same call to go on after an
                interruption, with the data in the same order; a complete fit removes it.
            checkpoint_seconds: how often to write it, at the end of a block of at most 64 batches;
                0 writes it after every block.
            batch_size: rows per batch where the data are not batches already; by default a
                loader's own, else 1024.
            progress: show a bar; by default on a terminal only.
            process_group: of processes, each with its own share of the data, that make one fit together,
                the same on all of them; by default all of the job where torch.distributed is
                initialised. False for this process alone.

        Returns:
            The object itself. An error or interruption leaves it as it was.
        """
        derivatives = gradient_loss(gradients, gradient_weight, gradient_target)
        weighing = Weighing(loss_for(loss), sample_weight, derivatives)
        options: dict[str, Any] = {"sample": sample, "precision": precision, "method": method}
        options |= {"batch_size": batch_size, "progress": progress, "process_group": process_group}
        if not isinstance(novelty, bool):
            raise ValueError(f"novelty must be True or False, got {novelty!r}.")
        options["novelty"] = novelty
        kept = Checkpoint(checkpoint, checkpoint_seconds)
        self._fit.fit(with_target(x, y), weighing, checkpoint=kept, **options)
        return self

    @outside_inference_mode
    def partial_fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        progress: bool | None = None,
        process_group: Any = None,
    ) -> Self:
        """Add data, exactly as if they had been in the fit; marks the calibration stale."""
        options = {"batch_size": batch_size, "progress": progress, "process_group": process_group}
        if self._fit.learnt is None:
            return self.fit(x, y, **options)
        self._fit.revise(with_target(x, y), remove=False, **options)
        return self

    @outside_inference_mode
    def forget(
        self,
        x: Any,
        y: Any = None,
        *,
        check: bool = True,
        batch_size: int | None = None,
        progress: bool | None = None,
        process_group: Any = None,
    ) -> Self:
        """Remove data that were in the fit, as they were added; marks the calibration stale.

        Rows that are not in it are refused, and the object is left as it was. Hashes know them:
        all of up to 32,768 rows, of more a share. Where outputs have no input row of their own
        (atoms of a structure), features are hashed, whose rounding may hide a tenth of the rows.
        `check=False` does not ask.
        """
        options = {"batch_size": batch_size, "progress": progress, "process_group": process_group}
        self._fit.revise(with_target(x, y), remove=True, check=check, **options)
        return self

    @outside_inference_mode
    def merge(self, *others: LastLayerRigidity, check: bool = True) -> Self:
        """Add the rows of other fits, exactly as if they had been in this one.

        All need the same weights, readout, loss, precision and method. Marks the calibration
        stale. The others are not changed, nor this one after an error. `check` refuses fits that
        share a row: hashes know all of up to 32,768 rows of a fit, of more a share.
        """
        if not others or any(not issubclass(type(one), LastLayerRigidity) for one in others):
            raise TypeError(f"merge takes LastLayerRigidity objects, got {[*map(type, others)]}.")
        if len({self, *others}) <= len(others):
            raise ValueError("A fit would be merged with itself, or twice. Give each fit once.")
        parts = {f"argument {n} of merge": one._fit for n, one in enumerate(others, start=1)}
        self._fit.merge(parts, check=check)
        return self

    @outside_inference_mode
    def calibrate(
        self,
        x: Any = None,
        y: Any = None,
        *,
        train: Any = None,
        criterion: str = "auto",
        ridge: float | Literal["search"] | None = None,
        noise: str | type[Noise] | Noise | Given | None = None,
        distribution: str | Distribution | type[Distribution] | None = None,
        support: Support | None = None,
        guard: bool | Literal["q"] = True,
        optimism: bool = True,
        early_stopped: bool | None = None,
        conformal: Any = None,
        groups: str | Groups | None = None,
        merge_groups: int | None = None,
        gradients: InputName = None,
        gradient_target: GradientTarget | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
        process_group: Any = None,
    ) -> CalibrationReport:
        r"""Choose ridge, scale, noise and distribution in one pass over data the model has not
        seen.

        `calibrate(x, y)` fits a noise that follows the features, heavy tails and the shape of the
        distribution, on these and on left-out training rows that the fit kept, with a guard beyond
        them; cross-validation falls back to the paper's form, `calibrate(x, y, criterion="nll")`,
        where that is clearly better. Print the report.

        Args:
            x: inputs of validation data, or both in one, as in `fit`.
            y: their targets, as in `fit`.
            train: training data, for `criterion="loo"`, which needs no validation data, and for
                "auto" instead of the rows that the fit kept.
            criterion: "auto" (default); "nll" and "bins" (the paper's), "crps", "absolute";
                "evidence" chooses the ridge from the training data and the scale on these;
                "loo" uses leave-one-out residuals of the training data (optimistic for a net
                trained end to end).
            ridge: fix $\varsigma^2$ instead of choosing it.
            noise: "features" (default of "auto"); "none" (the paper's, default of others);
                "constant", a noise floor added to the variance; "bayes", where the noise is
                $\alpha^2$ as in Bayesian linear regression; callable(batch) -> variances, for a
                noise that is known for each row, or a model's own, up to one factor; or a class of
                `prediction.noise`. With sample weights c a row's noise is the level times the
                typical weight over c.
            distribution: of the predictions: "tilted" (default of "auto"), "student-t", "gaussian"
                (default of others), or an object of `prediction.distribution`.
            support: (low, high) that targets cannot leave, None for no bound: probability beyond a
                bound is put at the bound.
            guard: whether "auto" widens the bars beyond the training rows, where its head knows
                nothing, to those of a forecaster who knows the targets' spread alone; "q" for bars
                that grow with q instead.
            optimism: whether left-out training rows may still err less than new ones. Not those of
                a model linear in all that was trained: False lets "auto" take them for new ones.
            early_stopped: whether the validation rows chose the model's checkpoint, so that their
                errors are optimistic. False: they chose nothing. By default the report asks.
            conformal: rows that fit nothing else, for `p.interval(0.9, conformal=True)`; or a share
                of these to set aside for it, 0.3 say.
            groups: for these, callable(batch) -> whole numbers, or "bar" for fifths of the bar. A
                group with too few rows for a level (9 for 90 %) gets infinite intervals.
            merge_groups: rows below which groups are merged with the next larger, 50 say. By
                default none are, but fifths of the bar below 50 with the next fifth.
            gradients: as in `fit`; by default what the fit was given.
            gradient_target: likewise. With one, derivatives get a scale of their own, from a
                second pass.
            batch_size: as in `fit`.
            progress: as in `fit`.
            process_group: as in `fit`; each process gives its own rows.

        Returns:
            What was chosen and how good it is; print it.
        """
        wanted = Wanted.of(
            criterion, noise, distribution, ridge, support, guard, optimism, early_stopped
        )
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "progress": progress,
            "process_group": process_group,
        }
        options |= {"conformal": conformal, "groups": groups, "merge_groups": merge_groups}
        options |= {"gradients": gradients, "gradient_target": gradient_target}
        return self._fit.calibrate(with_target(x, y), train, wanted, **options)

    @outside_inference_mode
    def refit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        add: bool = True,
        batch_size: int | None = None,
        progress: bool | None = None,
        process_group: Any = None,
    ) -> Self:
        """A copy of the model with the ridge-optimal readout, wrapped, fitted and uncalibrated.

        The mean changes, often for the better: print `refitted` of the result. The sums of the fit
        give the readout, and the training data are not passed again. Best is
        `new = uq.refit(x, y, add=False)`, then `new.calibrate(x, y)`, of validation data.

        Args:
            x: rows on which the readout refitted to the training rows is judged, as in `fit`.
            y: their targets.
            add: then refit on these too; they are no longer unseen, so calibrate on others.
            batch_size: as in `fit`.
            progress: as in `fit`.
            process_group: as in `fit`; without x nothing is exchanged.

        Raises:
            ValueError: another loss than "mse", no targets in the fit, `features=`, an output that
                is not linear in the readout's weights, weights that are tied or computed.
        """
        options = {"batch_size": batch_size, "progress": progress, "process_group": process_group}
        fit, report = self._fit.refit(with_target(x, y), add=add, **options)
        own = fit.unbound
        uq = type(self)(fit.model, layer=own.layer, target=fit.target, **vars(own.source))
        uq._fit, uq.refitted = fit, report
        return uq

    @outside_graphs
    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each shaped like the model's output.

        On a CPU what is not finite is refused; an accelerator is not waited for, as by `predict`.
        """
        refuse_transforms()
        batch = self._fit.feed().handed(inputs, keywords)
        tap, learnt = self._fit.ready()
        reading, bars = tap(*batch.args, **batch.kwargs), learnt.bars
        batch.check(reading.output.shape[0])
        std = bars.std(reading, bars.given_variance(batch, reading))
        if std.device.type == "cpu":
            require_finite(reading.output, std, lambda: [batch], "rows")
        return reading.output, std

    @outside_inference_mode
    def predict(
        self,
        x: Any,
        *,
        sample_weight: SampleWeight | None = None,
        input_covariance: Any = None,
        input_samples: int = 0,
        wrt: InputName = None,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
        gather: bool = False,
        process_group: Any = None,
    ) -> Prediction:
        """Predictions with error bars for inputs or batches (targets in them are ignored).

        Those that are not finite are refused, with their rows and what is known of the cause.

        Args:
            x: inputs, or anything that `fit` takes.
            sample_weight: callable(batch) -> loss weights c, by which the noise is divided. Rows
                without get the noise of a typical one: the harmonic mean in the calibration.
            input_covariance: of uncertain inputs, whose variance is added and kept in
                `from_inputs`: a variance; one for each of the d numbers of an input row, (d,) or
                (N, d); or a matrix, (d, d) or (N, d, d). (d, d) is always a matrix.
            input_samples: 0 propagates it to first order; otherwise by so many draws of the
                inputs, which checks the first order where the model bends.
            wrt: the uncertain input, where there are several.
            generator: of those draws.
            batch_size: as in `fit`.
            progress: as in `fit`.
            gather: whether every process of the `process_group` (as in `fit`) gets the rows of all, in the
                order of ranks; otherwise each has its own, and nothing is exchanged.
            process_group: of processes.
        """
        if input_covariance is None and (input_samples or wrt is not None):
            raise ValueError("input_samples= and wrt= are for uncertain inputs: input_covariance=.")
        inputs, spreads = None, []
        if input_covariance is not None:
            inputs = InputVariances(input_covariance, wrt, input_samples, generator)
        choices = named([sample_weight, inputs is None, wrt, input_samples])
        process_group = process_group if gather else False
        with (
            self._fit.job(process_group, "predict", options=choices) as others,
            torch.enable_grad(),
        ):
            tap, learnt = self._fit.ready()
            bars = learnt.bars
            batches = self._fit.batches(x, "predict", batch_size, progress, once=gather)
            scale = None if not learnt.watches else learnt.novelty_scale(tap)
            for batch in batches:
                if scale is None:
                    reading, novelty = read(tap, batch), None
                else:
                    reading, novelty = scale.read(tap, batch)
                spread = bars.of_batch(batch, reading, sample_weight)
                if novelty is not None:
                    spread = replace(spread, novelty=reading.spread_out(novelty.amax(1)))
                if inputs is not None:
                    spread = replace(spread, from_inputs=inputs.next(tap, batch, reading.output))
                spreads.append(spread)
            if inputs is not None:
                inputs.check_used_up()
            spreads = gathered(others, spreads)
        again = partial(self._fit.batches, [] if gather else x, "predict", batch_size, False)
        return bars.prediction(spreads, again)

    @outside_inference_mode
    def novelty(
        self, x: Any, *, batch_size: int | None = None, progress: bool | None = None
    ) -> Novelty:
        """How unlike the training data inputs look to each layer of the network.

        It sees what the last layer's error bar cannot, such as an input whose size a layer norm
        hides from all that follows, and it says where. It needs no labels, and the error bars do
        not use it. The fit must have been `fit(x, y, novelty=True)`, and calibrated.

        Args:
            x: inputs, or anything that `fit` takes.
            batch_size: as in `fit`.
            progress: as in `fit`.

        Returns:
            For each input and layer a squared distance relative to the one that 95 % of the
            calibration rows stay below; `largest` over the layers, and the `layer` it is from.
        """
        tap, learnt = self._fit.ready()
        scale = learnt.novelty_scale(tap)
        if scale is None:
            raise ValueError(
                "Novelty is relative to rows that the model has not seen, and there were none: "
                "call calibrate(x, y) with such rows."
            )
        found = []
        with torch.enable_grad():
            for batch in self._fit.batches(x, "novelty", batch_size, progress):
                _, ratios = scale.read(tap, batch)
                found.append(ratios)
        if not found:
            raise ValueError("There is nothing to judge: no batches were given.")
        return Novelty(torch.cat(found), scale.layers)

    @outside_inference_mode
    def gradient(
        self,
        x: Any,
        wrt: InputName = None,
        *,
        along: Tensor | None = None,
        members: int | None = None,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Gradient:
        r"""Derivatives of the prediction by an input, with their standard deviations.

        Exact: the readout's features are differentiated, in forward or reverse mode, whichever
        takes fewer passes. The epistemic part only. A derivative is a single quantity: it has the
        scale of those, and not `calibration.joint`.

        Args:
            x: inputs, or anything that `fit` takes.
            wrt: position or name of the input ("pos"), where there are several.
            along: a direction, shaped like the input or like one row of it: the derivative along
                it, $v \cdot \nabla y$, shaped like the output, in one pass.
            members: draw so many last-layer members instead, which costs one backward pass each
                and leaves a relative error of $1 / \sqrt{2 n}$ in the standard deviation. By
                default 64 where the exact way would take more than 2048 passes, with a warning;
                0 for never.
            generator: of those draws.
            batch_size: as in `fit`.
            progress: as in `fit`.

        Returns:
            `mean` and `std`, shaped like the input for one output per sample; for several
            (N, *outputs, *inputs). Of inputs that have not one row per sample (atoms of several
            structures), or whose rows act on other samples too, the sum of all outputs is
            differentiated (`summed`): each atom gets the derivative of its own structure. The
            scale is `gradient_scale`, which differs from that of members and `propagate` where
            it was calibrated on targets of its own.
        """
        if along is not None and members is not None:
            raise ValueError("along= is exact in one pass: it takes no members=.")
        tap, learnt = self._fit.ready()
        maps = self._feature_maps(tap, wrt, x, "gradient", batch_size, progress)
        differentiator = _differentiator(learnt, members, generator)
        if along is None:
            found = [differentiator(point) for point in maps]
        else:
            found = [differentiator.directional(p, v) for v, p in shared_out(maps, along)]
        return self._joined(found, members)

    @outside_inference_mode
    def predict_with_gradient(
        self,
        x: Any,
        wrt: InputName | Slot = None,
        *,
        gradient_bars: bool = True,
        sample_weight: SampleWeight | None = None,
        members: int | None = None,
        progress: bool | None = None,
    ) -> tuple[Prediction, Gradient]:
        """What `predict` and `gradient` give, of the same pass of the model.

        Args:
            x: as in `gradient`.
            wrt: as in `gradient`; or a `data.slots.Slot` of one's own, for what is no input.
            gradient_bars: False for one forward and one backward pass, and no bars of derivatives.
            sample_weight: as in `predict`.
            members: as in `gradient`.
            progress: as in `fit`.
        """
        tap, learnt = self._fit.ready()
        differentiator, bars = _differentiator(learnt, members, None), learnt.bars
        spreads, found = [], []
        for batch in self._fit.batches(x, "gradient", None, progress):
            slot = Slot.find(batch, wrt, tap)
            with torch.enable_grad():
                if gradient_bars:
                    point = FeatureMap.of(tap, batch, slot)
                    reading, gradient = point.reading, differentiator(point)
                    del point  # with its graph, before that of the next batch is made
                else:
                    at, reading = traced(tap, batch, slot)
                    mean = traced_derivatives(at, reading.output)
                    summed = not stand_alone(at, reading)
                    gradient = Gradient(mean, torch.full_like(mean, torch.nan), summed=summed)
                spreads.append(bars.of_batch(batch, reading.detached(), sample_weight))
            found.append(gradient)
        again = partial(self._fit.batches, x, "gradient", None, False)
        return bars.prediction(spreads, again), self._joined(found, members)

    @outside_inference_mode
    def hessian_product(
        self,
        x: Any,
        direction: Tensor,
        wrt: InputName = None,
        *,
        members: int | None = None,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Gradient:
        r"""Second derivatives of the prediction times a direction, $\nabla (v \cdot \nabla y)$.

        Args:
            x: as in `gradient`.
            direction: $v$, as `along` there.
            wrt: as in `gradient`.
            members: as in `gradient`.
            generator: as in `gradient`.
            batch_size: as in `fit`.
            progress: as in `fit`.

        Returns:
            As `gradient`, with the same `gradient_scale`.
        """
        tap, learnt = self._fit.ready()
        maps = self._feature_maps(tap, wrt, x, "hessian_product", batch_size, progress)
        differentiator = _differentiator(learnt, members, generator)
        found = [differentiator(p.along(v)) for v, p in shared_out(maps, direction)]
        return self._joined(found, members)

    def ensemble(
        self,
        n: int | None = None,
        *,
        generator: torch.Generator | None = None,
        recentred: bool = False,
        antithetic: bool = False,
        symmetric: bool = False,
        rank: int | None = None,
    ) -> Ensemble:
        r"""Last-layer members: an `nn.Module` with `ens(x)` -> (n, *output.shape).

        All members cost one pass of the model and one matrix product. They carry the epistemic
        part, with its correlations between predictions and targets. Where what predictions share
        has a scale of its own (`calibration.joint`), each row deviates by numbers of its own too,
        the same in every call, which takes another product and a hash of each row.

        Args:
            n: how many; 64 by default.
            generator: of the draws.
            recentred: shift the members so that their mean is the model's prediction exactly.
            antithetic: draw pairs $\pm\delta$.
            symmetric: not draws but a fixed set of 2 `rank` members: at full rank its covariance
                is exact, below it a lower bound, and `missing` says what share it lacks.
            rank: of that set; by default full, or n / 2.
        """
        tap, learnt = self._fit.ready()
        kind = {"recentred": recentred, "antithetic": antithetic, "symmetric": symmetric}
        drawn = member_set(_joint(tap, learnt), n, generator=generator, rank=rank, **kind)
        return Ensemble(learnt.binding.copy(), self.feed.unlabelled(), drawn)

    @outside_inference_mode
    def freeze(
        self,
        outputs: Sequence[str] = ("mean", "std"),
        *,
        rank: int | None = None,
        accuracy: float | None = None,
        quantiles: Sequence[float] = (0.05, 0.95),
        members: int = MEMBERS,
        generator: torch.Generator | None = None,
        largest_rounding: float = LARGEST_ROUNDING,
    ) -> Frozen:
        r"""A plain `nn.Module` that gives tensors, to compile, export, serve and call from threads.

        It has copies of the model's weights and of the statistics, and looks at nothing: neither
        later training nor another fit matters to it. See `rigidities.export` for files.

        Args:
            outputs: what it gives, in this order: "mean" and "std" as `uq(x)`; "epistemic" and
                "noise" (variances) and "quantiles" (first dimension: levels) as `predict`;
                "members" (first dimension) as `ensemble`.
            rank: keep so many eigenvectors of the Gram, cheaper than all below about half of the
                width, and never too sure: `error` of the module bounds by how much it overstates
                the variance $\alpha^2 q$, relative to it; or
            accuracy: that bound: the smallest rank that keeps it, or all.
            quantiles: their levels.
            members: how many.
            generator: of their draws.
            largest_rounding: relative rounding error of the variance beyond which it is computed in
                float64.

        Raises:
            ValueError: the output is not linear in the readout's weights, or the noise is a
                function of batches.
        """
        tap, learnt = self._fit.ready()
        probes = learnt.binding.probes
        probe = None if probes is None else probes.placed(self.model)
        drawn = None
        if "members" in outputs:
            drawn = member_set(_joint(tap, learnt), members, generator=generator)
        readout = copied_readout(self.model, tap, learnt.statistics.targets, probe)
        options: dict[str, Any] = {"rank": rank, "accuracy": accuracy, "levels": quantiles}
        options |= {"largest_rounding": largest_rounding, "members": drawn, "feed": self.feed}
        return freeze(readout, learnt.posterior, learnt.calibration, outputs, **options)

    def familiar(self) -> list[float] | None:
        r"""The 99 % quantile of $\alpha^2 q$ over the training rows that were kept, by target."""
        learnt = self._fit.known()
        if learnt.statistics.sample is None:
            return None
        rows, posterior = learnt.statistics.sample.rows.features, learnt.posterior
        found = posterior.variance(rows.to(posterior.eigenvectors))
        return found.reshape(len(rows), -1).quantile(0.99, 0).expand(len(self.scale)).tolist()

    def covariance(self, x1: Any, x2: Any = None, *, batch_size: int | None = None) -> Tensor:
        r"""Joint covariance of predictions (the epistemic part).

        $\alpha_B^2 k(x, x') + 1[x = x'] (\alpha^2 - \alpha_B^2)_+ q(x)$, $\alpha$ being `scale` and
        $\alpha_B$ `calibration.joint`. Rows are equal where their inputs' hashes are; where inputs
        have not one row each (atoms), where features agree in half of their digits.

        Args:
            x1: inputs, in any form that `predict` takes.
            x2: other inputs; the same by default.
            batch_size: as in `fit`.

        Returns:
            (N, M) for one output per sample, else (N, *outputs, M, *outputs).
        """
        tap, learnt = self._fit.ready()
        batches = partial(
            self._fit.batches, what="covariance", batch_size=batch_size, progress=False
        )
        others = None if x2 is None else partial(batches, x2)
        return covariance_between(tap, _joint(tap, learnt), partial(batches, x1), others)

    def propagate(
        self,
        fn: Callable[[Tensor], Tensor],
        x: Any,
        *,
        second_order: bool = False,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Derived:
        """Mean and standard deviation of a differentiable function of predictions, first order.

        One reverse pass of `fn` per derived quantity, correlations kept, never an N x N matrix.
        The epistemic part only, with the covariance of `covariance`. Criteria other than "auto"
        have one scale, which may hold noise too, so that a mean of many predictions looks far too
        uncertain: of those take `criterion="evidence", noise="bayes"`.

        Args:
            fn: takes the predictions for all of x as one tensor, shaped like the model's
                output, and returns a tensor of any shape. For what has no derivative use
                `ensemble(64).propagate`.
            x: inputs, or anything that `fit` takes.
            second_order: correct the mean for the curvature of `fn`.
            batch_size: as in `fit`.
            progress: as in `fit`.
        """
        tap, learnt = self._fit.ready()
        batches = partial(self._fit.batches, x, "propagate", batch_size, progress)
        options = {"second_order": second_order, "again": repeatable(x)}
        return propagated(fn, tap, _joint(tap, learnt), batches, **options)

    @outside_inference_mode
    def local(
        self, x: Any, *, batch_size: int | None = None, progress: bool | None = None
    ) -> LocalTerms:
        """Error bars of the terms that sum to each prediction: atoms, pixels, time steps.

        Args:
            x: inputs, or anything that `fit` takes.
            batch_size: as in `fit`.
            progress: as in `fit`.
        """
        tap, learnt = self._fit.ready()
        with torch.enable_grad():
            batches = self._fit.batches(x, "local", batch_size, progress)
            return local_terms(tap, learnt.posterior, batches)

    def features(
        self, x: Any, *, batch_size: int | None = None, progress: bool | None = None
    ) -> Tensor:
        """The readout's features, (M, D), or (M, K, D) where they differ between targets.

        M counts rows of outputs: one per input, or more where a prediction has several (time
        steps, pixels).

        Args:
            x: inputs, or anything that `fit` takes.
            batch_size: as in `fit`.
            progress: as in `fit`.
        """
        readings = self._readings(x, batch_size, progress)
        found = torch.cat([reading.features for reading in readings])
        again = partial(self._fit.batches, x, "features", batch_size, False)
        require_finite(found, found, again, "rows")
        return found

    def select(
        self,
        x: Any,
        n: int,
        *,
        objective: Literal["variance", "logdet", "top"] = "variance",
        weights: Tensor | float | None = None,
        costs: Tensor | float | None = None,
        chosen: Tensor | None = None,
        of: Any = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Selection:
        """Which inputs of a pool to label next; see `rigidities.selection`.

        Features must be shared by the targets, and each input have one row of them; otherwise
        give rows of your own choice to `selection.greedy(uq.posterior, rows, n)`.

        Args:
            x: the pool of candidates, in any form that `predict` takes; no labels are needed.
            n: how many.
            objective: "variance" (default) shrinks the total variance, "logdet" learns most about
                the weights, both greedily; "top" takes the largest variances one by one.
            weights: loss weights with which new rows would enter the fit; not for "top".
            costs: what labelling each costs.
            chosen: rows of the pool that were picked before.
            of: for "variance", the inputs whose variance is to shrink; by default the pool's.
            batch_size: as in `fit`.
            progress: as in `fit`.
        """
        if objective == "top" and (of is not None or weights is not None):
            raise ValueError("objective='top' takes neither of= nor weights=.")
        features = self._one_row_each(x, batch_size, progress)
        cared = None if of is None else self._one_row_each(of, batch_size, progress)
        if objective == "top":
            variances = self.scale.square().sum() * self.posterior.quadratic(features)
            return selection.top(variances, n, costs=costs, chosen=chosen)
        options: dict[str, Any] = {"objective": objective, "weights": weights, "of": cared}
        return selection.greedy(self.posterior, features, n, costs=costs, chosen=chosen, **options)

    @property
    def gram(self) -> Gram:
        """The accumulated rows."""
        return self._fit.known().statistics.gram

    @property
    def posterior(self) -> Posterior:
        """Eigenbasis, ridge and scale; factorised once, when first needed."""
        return self._fit.known().posterior

    @property
    def calibration(self) -> Calibration:
        """Ridge, scale, noise and distribution; before calibration, defaults."""
        return self._fit.known().calibration

    @property
    def ridge(self) -> float:
        r"""$\varsigma^2$: calibrated, or a default relative to the Gram's diagonal."""
        return self.calibration.ridge

    @property
    def scale(self) -> Tensor:
        r"""$\alpha$ per target, permuted ones in the readout's order; ones before calibration."""
        return self.calibration.scale

    @property
    def noise(self) -> Noise:
        """The noise; zero before calibration and with `noise="none"`."""
        return self.calibration.noise

    @property
    def distribution(self) -> Distribution:
        """The distribution around the mean; Gaussian before calibration."""
        return self.calibration.distribution

    @property
    def gradient_scale(self) -> Tensor:
        r"""$\alpha_g$ of derivatives by the inputs: calibrated on their targets, else `scale`."""
        return self._fit.known().gradient_scale

    @property
    def report(self) -> CalibrationReport | None:
        """The last calibration's report."""
        return None if self._fit.learnt is None else self._fit.learnt.report

    @property
    def readout(self) -> AnyTap:
        """The readout of the fit, as a pass that gives outputs and features.

        Raises:
            ValueError: there is no fit, or the model has changed since.
        """
        return self._fit.ready()[0]

    @property
    def feed(self) -> Feed:
        """How data reach the model: `uq.feed(data, "what for")` gives batches."""
        return self._fit.feed()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        noise: Given | None = None,
        groups: Groups | None = None,
        **options: Any,
    ) -> Self:
        """Read a file for the model it was made with.

        Args:
            path: written by `save`.
            model: with the same weights, on any device.
            noise: of the calibration, where that was a function, which a file does not hold.
            groups: of its conformal rows, likewise.
            options: the functions `forward`, `features` and `target` of the fit, which a file
                does not hold.
        """
        snapshot = Snapshot.read(path, holds=cls._kind)
        options.setdefault("output", snapshot.header["readout"]["output"])
        uq = cls(model, **options)
        uq._fit.take(snapshot)
        if noise is not None or groups is not None:
            uq._fit.set_functions(noise, groups)
        uq._fit.known().binding.current()
        return uq

    def set_loss(
        self,
        loss: LossLike = "mse",
        sample_weight: SampleWeight | None = None,
        *,
        gradients: InputName = None,
        gradient_weight: GradientWeight | None = None,
        gradient_target: GradientTarget | None = None,
    ) -> Self:
        """Give the functions again that a loaded fit was made with and a file does not hold."""
        derivatives = gradient_loss(gradients, gradient_weight, gradient_target)
        self._fit.set_weighing(Weighing(loss_for(loss), sample_weight, derivatives))
        return self

    @property
    def rounding(self) -> float:
        """Bound on the relative rounding error of the variances that `uq(x)` gives.

        See `QuadraticForm.rounding`; rounding errors within a sum are taken as independent. Under
        `torch.autocast`, whose features have few digits, it is larger: ask for it there.
        """
        (_, learnt), kind = self._fit.ready(), placement(self.model)[0].type
        own = learnt.bars.form.rounding
        if not torch.is_autocast_enabled(kind):
            return own
        return own + rounding_bound(learnt.posterior, torch.get_autocast_dtype(kind))

    def summary(self) -> str:
        """What is known, in ten lines or so, and what to do next."""
        weights = sum(one.numel() for one in self.model.parameters())
        title = f"LastLayerRigidity of {type(self.model).__name__}, {weights:,} parameters"
        if (learnt := self._fit.learnt) is None:
            return summary(title, UNFITTED)
        own, layers = learnt.statistics, learnt.binding.header()["layer"]
        loss = "a function" if learnt.weighing is None else loss_name(learnt.weighing.loss)
        found = ", ".join(map(repr, layers)) if layers else "by features="
        targets = "1 target" if own.targets == 1 else f"{own.targets} targets"
        readout = f"{found}: {own.gram.width} features, {targets}"
        known = {"readout": readout, "fit": f"{own.gram.count:,} rows, loss {loss}"}
        if own.layers is not None:
            count = len(own.layers.grams)
            known["novelty"] = "1 layer watched" if count == 1 else f"{count} layers watched"
        return summary(title, known, learnt.calibration, learnt.report)

    def extra_repr(self) -> str:
        """Where the features come from and how much was learnt."""
        if self._fit.learnt is None:
            return "unfitted"
        state = "uncalibrated" if self.report is None else f"calibrated by {self.report.criterion}"
        return f"{self.gram!r}, {state}"

    def _snapshot(self, *, thorough: bool = False, **parts: bool) -> Snapshot | None:
        if thorough:
            self._fit.known().binding.current(thorough=True)
        learnt = self._fit.learnt
        return None if learnt is None else learnt.snapshot(**parts)

    def _take(self, given: Snapshot | None) -> None:
        self._fit.take(given)

    def _moved(self) -> None:
        if self._fit.learnt is not None:
            self._fit.on_device()

    def _one_row_each(self, data: Any, batch_size: int | None, progress: bool | None) -> Tensor:
        readings = self._readings(data, batch_size, progress)
        features = torch.cat([reading.features for reading in readings])
        inputs = sum(len(reading.output) for reading in readings)
        if len(features) != inputs or features.ndim > 2 or self.posterior.eigenvalues.ndim > 1:
            raise ValueError(
                f"An input must have one row of features for all targets to be chosen by them, got "
                f"features {tuple(features.shape)} for {inputs} inputs. Let forward= return one "
                "output per input, or give rows and a posterior of your own choice to "
                "rigidities.selection.greedy."
            )
        return features

    @outside_inference_mode
    def _readings(self, data: Any, batch_size: int | None, progress: bool | None) -> list[Reading]:
        tap, _ = self._fit.ready()
        with torch.enable_grad():
            batches = self._fit.batches(data, "features", batch_size, progress)
            readings = [read(tap, batch).detached() for batch in batches]
        if not readings:
            raise ValueError("There are no features: no batches were given.")
        return readings

    def _feature_maps(self, tap: AnyTap, wrt: InputName, *data: Any) -> Iterator[FeatureMap]:
        for batch in self._fit.batches(*data):
            with torch.enable_grad():
                point = FeatureMap.of(tap, batch, Slot.find(batch, wrt, tap))
            yield point
            del point  # with its graph, before that of the next batch is made

    def _joined(self, found: list[Gradient], members: int | None) -> Gradient:
        gradient = Gradient.join(found)
        if gradient.sampling_error and members is None:
            self._fit.say_once("sampled gradient", SAMPLED.format(MEMBERS, gradient.sampling_error))
        return gradient


def _joint(tap: AnyTap, learnt: Learnt) -> JointPosterior:
    gram, shared = learnt.statistics.gram, learnt.calibration.joint
    return JointPosterior.of(learnt.posterior, gram, tap.layout, shared)


def _differentiator(
    learnt: Learnt, members: int | None, generator: torch.Generator | None
) -> Differentiator:
    form = learnt.bars.form
    return Differentiator(learnt.posterior, form, learnt.gradient_scale, members, generator)
