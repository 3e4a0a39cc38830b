r"""`LastLayerRigidity`: error bars for a trained torch model.

The variance of a prediction is

$$ \sigma^2(x) = \alpha^2\, f(x)^\top (G + \varsigma^2 I)^{-1} f(x) \; [+ \text{noise}], $$

where $f$ are the derivatives of the output with respect to the readout's weights (for a linear last
layer, its input) and $G = \sum_i w_i f_i f_i^\top$ is the Gram of the training data. The methods
come in the order in which they are used: `fit` accumulates $G$ in one pass, `calibrate` chooses the
scale $\alpha$, the ridge $\varsigma^2$, the noise and the distribution around the mean, and then
`uq(x)`, `predict`, `ensemble`, `gradient` and the others use them.

This module is the façade. The state of a fit and what changes it are in `fit`, the loop over the
training data in `accumulation`, the rows of a calibration in `calibration_rows`, and what is made
of them in the package `calibration`.

Reference: F. Bigi, S. Chong, M. Ceriotti, F. Grasselli, "A prediction rigidity formalism for
low-cost uncertainties in trained neural networks" (2024), Sec. 3.5.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .. import selection
from ..calibration.calibration import Calibration
from ..calibration.conformal import Groups
from ..calibration.methods import Method, NoiseFunction, method_for
from ..calibration.report import CalibrationReport
from ..calibration.words import UNFITTED, method_text, summary
from ..data.batches import Batch, Feed, joined_targets
from ..data.finiteness import require_finite
from ..data.slots import InputName, Slot
from ..data.sources import check_batch_size, with_target
from ..data.storage import Snapshot
from ..losses import LossLike, counts_in_own_units, loss_for, loss_name
from ..models.calling import FeatureFunction, ForwardFunction, Source
from ..models.modes import outside_graphs, outside_inference_mode
from ..posterior.draws import MEMBERS
from ..posterior.gram import Gram, PrecisionLike
from ..posterior.joint import JointPosterior
from ..posterior.posterior import LARGEST_ROUNDING, Posterior
from ..prediction.derived import Derived
from ..prediction.distribution import Distribution
from ..prediction.noise import Noise
from ..prediction.novelty_scores import NoveltyScores
from ..prediction.prediction import Prediction
from ..readout.reading import Reading, SampleWeight
from ..readout.readout import AnyReadout
from ..selection import Selection
from ..statistics.gram_sums import fits
from ..statistics.statistics import KEPT_BY_DEFAULT, Plan
from .accumulation import Weighing
from .binding import UsersModel
from .ensemble.ensemble import Ensemble
from .ensemble.members import members as member_set
from .error_bars import BatchVariances, ErrorBars, gathered
from .fit import FitState, Passing, ReadoutFit
from .frozen import Frozen, freeze, listens
from .gradients.feature_map import FeatureMap
from .gradients.gradient import (
    Differentiator,
    Gradient,
    gradient_without_bars,
    with_directions,
)
from .gradients.loss import GradientLoss, checked_gradient_loss
from .gradients.uncertain_inputs import InputVariances
from .local_terms import LocalTerms, local_terms
from .merging import as_text
from .propagation.outputs import repeatable
from .propagation.propagation import covariance_between, propagated
from .refit import Refitted
from .wrapper import ModelWrapper

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from typing_extensions import Self

__all__ = ["LastLayerRigidity"]

SAMPLED = (
    "There are too many inputs for exact derivatives. The standard deviations come from {} "
    "members, with a relative error of {:.0%}. Pass a larger members=, or 0 for exact derivatives."
)


class LastLayerRigidity(ModelWrapper):
    """Error bars for a trained `nn.Module`; the model itself is never changed.

    Args:
        model: The trained model.
        layer: The name (or names) of the readout: modules or parameters. By default, the last
            linear map before the output is found on the first batch.
        features: A callable(model, *inputs) -> (N, D) that returns the features, instead of a
            readout layer.
        forward: A callable(model, batch) -> output, for batches that are not (x, y).
        target: A callable(batch) -> target, for batches that are not (x, y).
        output: The key, index or attribute of the output to use, where the model returns several.
        batch_size: Rows per batch in every pass where the data are not batches already. The default
            is the loader's own, else 1024.
        progress: Whether passes show a progress bar; by default only on a terminal, and only after
            a second.
        process_group: The group of processes that make one fit or calibration together. Each
            process passes its own share of the data, and all end with the same result. The default
            is all processes if torch.distributed is initialised. False means this process alone.
            At the end of its data a process waits for the others until the timeout of the group.

    Attributes:
        batch_size: As given; it may be changed.
        progress: As given; it may be changed.
        process_group: As given; it may be changed.
        refitted: What `refit` has changed, if this object comes from `refit`; otherwise None. It is
            not saved to files.

    Raises:
        TypeError: The model is not an `nn.Module`.
        ValueError: Both `layer` and `features` are given.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> y = 2 * x + 0.1 * torch.randn(50, 1)
        >>> model = torch.nn.Linear(1, 1)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(2.0)
        ...     _ = model.bias.fill_(0.0)
        >>> uq = LastLayerRigidity(model).fit(x[::2], y[::2]).calibrate(x[1::2], y[1::2])
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
        batch_size: int | None = None,
        progress: bool | None = None,
        process_group: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(_not_a_module(model))
        if layer is not None and features is not None:
            raise ValueError("Pass layer= or features=, not both.")
        super().__init__(model)
        user_model = UsersModel(model, Source(forward, features, output), layer)
        self._fit = ReadoutFit(user_model, target)
        check_batch_size(batch_size)
        self.batch_size = batch_size
        self.progress = progress
        self.process_group = process_group
        self.refitted: Refitted | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A group of processes belongs to this process: copies and pickles take the default one.
        group = self.process_group if self.process_group is False else None
        return {**self.__dict__, "process_group": group}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # A model that is assigned has no fit yet.
        if name == "model" and "_fit" in vars(self):
            old = self._fit.user_model
            user_model = UsersModel(value, old.source, old.layer)
            self._fit = ReadoutFit(user_model, self._fit.target)

    # --- The rows of the fit ---

    @outside_inference_mode
    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        loss: LossLike = "mse",
        sample_weight: SampleWeight | None = None,
        gradient_loss: GradientLoss | None = None,
        keep_rows: int = KEPT_BY_DEFAULT,
        novelty: bool = False,
        precision: PrecisionLike = "auto",
    ) -> Self:
        r"""Fit the error bars: accumulate the Gram matrix in one pass over the training data.

        An error or interruption leaves the object as it was.

        Args:
            x: The inputs: a tensor, an array, a data frame, or a tuple of several. Without y, a
                data set of inputs and targets: (x, y), a Dataset, a DataLoader, or an iterable of
                batches.
            y: The targets, one row per row of x.
            loss: The loss with which the model was trained: "mse", "huber", "log-cosh", "poisson",
                an object of `losses`, or a callable(prediction, target) -> one loss per sample. A
                loss that is not smallest where the prediction is the target, as that of a
                classifier, has a posterior but no error bars. Where one weight vector serves
                several targets, each counts in its own unit with the first three, and as it is
                with the others.
            sample_weight: A callable(batch) -> weights (N,), where the training loss was weighted.
            gradient_loss: The part of the training loss for derivatives with respect to an input,
                such as `GradientLoss("pos", weight=0.1, target="slope")`. With a target,
                `calibrate` fits a separate scale for derivatives. Weight 0 stands for derivatives
                that were not in the training loss and are only calibrated.
            keep_rows: How many training rows to keep for `calibrate`, drawn evenly; 0 for none.
                Fewer are kept of wide rows, which would take more than 256 MiB. They are in memory
                only, unless `save` is asked for them.
            novelty: Whether to accumulate statistics of the inputs of every layer as well, for
                `novelty`. It costs a product of at most 257 x 257 numbers per row and layer.
            precision: The precision of the products in the Gram. "double" is exact to float64.
                "mixed" uses the features' own precision and measures the rounding, which
                `calibrate` compares with the ridge. "auto" is double except for half-precision
                features.

        Returns:
            The object itself.

        Raises:
            ValueError: The data or options cannot be used; the message names the cause and the
                remedy.
        """
        weighing = Weighing(loss_for(loss), sample_weight, checked_gradient_loss(gradient_loss))
        literal = not counts_in_own_units(weighing.loss)
        plan = Plan(keep_rows=keep_rows, precision=precision, literal=literal)
        self._fit.fit(with_target(x, y), weighing, plan, self._passing, with_novelty=novelty)
        return self

    @outside_inference_mode
    def partial_fit(
        self,
        x: Any,
        y: Any = None,
    ) -> Self:
        """Add data exactly as if they had been in the fit, and mark the calibration as stale.

        If there is no fit yet, this is a `fit` with the default options.

        Args:
            x: The inputs, as in `fit`.
            y: The targets, as in `fit`.

        Returns:
            The object itself. An error leaves it as it was.
        """
        if self._fit.state is None:
            return self.fit(x, y)
        self._fit.partial_fit(with_target(x, y), self._passing)
        return self

    @outside_inference_mode
    def forget(
        self,
        x: Any,
        y: Any = None,
        *,
        check: bool = True,
    ) -> Self:
        """Remove data that were in the fit, and mark the calibration as stale.

        Pass the rows as they were added: they are recognised by hashes. A fit of up to 32,768 rows
        keeps the hashes of all rows, and a larger fit those of a share of the rows. If outputs have
        no input row of their own (atoms of a structure), the features are hashed, and their
        rounding may hide a tenth of the rows.

        Args:
            x: The inputs, as in `fit`.
            y: The targets, as in `fit`.
            check: Whether to refuse rows that are not in the fit.

        Returns:
            The object itself. An error leaves it as it was.

        Raises:
            ValueError: `check` is set, and some rows are not in the fit.
        """
        self._fit.forget(with_target(x, y), check=check, passing=self._passing)
        return self

    @outside_inference_mode
    def merge(self, *others: LastLayerRigidity, check: bool = True) -> Self:
        """Add the rows of other fits, exactly as if they had been in this one.

        All fits need the same weights, readout, loss and precision. The calibration is
        marked as stale.

        Args:
            others: The other fits, which are not changed.
            check: Whether to refuse fits that share a row, as far as their hashes show. A fit of up
                to 32,768 rows keeps the hashes of all rows, and a larger fit those of a share of
                the rows.

        Returns:
            The object itself. An error leaves it as it was.

        Raises:
            TypeError: An argument is not a `LastLayerRigidity`, or there is none.
            ValueError: The fits do not belong together, or share a row.
        """
        types = [type(other) for other in others]
        if not types or not all(issubclass(kind, LastLayerRigidity) for kind in types):
            raise TypeError(f"merge expects LastLayerRigidity objects, got {types}.")
        if len({self, *others}) <= len(others):
            raise ValueError("A fit would be merged with itself, or twice. Pass each fit once.")
        fits = {}
        for number, other in enumerate(others, start=1):
            fits[f"argument {number} of merge"] = other._fit
        self._fit.merge(fits, check=check)
        return self

    # --- Calibration ---

    @outside_inference_mode
    def calibrate(
        self,
        x: Any = None,
        y: Any = None,
        *,
        method: Literal["full", "paper"] | Method = "full",
        train: Any = None,
        early_stopped: bool | None = None,
    ) -> Self:
        r"""Choose ridge, scale, noise and distribution in one pass over held-out rows.

        `calibrate(x, y)` fits a distribution of errors that follows the features. It learns it from
        the given rows and from training rows that the fit kept, with their leave-one-out errors.
        Rows that are left out choose how far it follows the features. A guard widens the bars of
        unfamiliar inputs.
        What was chosen and how good it is stands in `calibration_report`; print it to read it.

        Args:
            x: The inputs of the validation data, or a data set of inputs and targets, as in `fit`.
            y: The targets of the validation data, as in `fit`.
            method: "full" (default) or "paper"; or an object with options, `Full(...)` or
                `Paper(...)`.
            train: The training data: for `Paper(criterion="loo")`, which needs no validation data,
                and for `Full`, instead of the rows that the fit kept.
            early_stopped: Whether the validation rows chose the model's checkpoint, so that their
                errors are optimistic. False means that they did not. By default the report asks.

        Returns:
            The object itself.

        Raises:
            ValueError: The data or options cannot be used, or the loss of the fit is not one of
                regression. The calibration stays as it was.
        """
        self._fit.calibrate(
            with_target(x, y), train, method_for(method), early_stopped, self._passing
        )
        return self

    @outside_inference_mode
    def conformalize(
        self, x: Any, y: Any = None, *, groups: Literal["bar"] | Groups | None = None
    ) -> Self:
        """Guarantee the coverage of intervals, by rows that were used for nothing else.

        Afterwards `p.interval(0.9)` covers 90 % of new rows that are drawn like these, whatever the
        model and the calibration are like. `p.interval(0.9, conformal=False)` stays the interval of
        the distribution. Another calibration needs another call of this method.

        Args:
            x: The inputs of rows that neither trained, nor chose, nor calibrated the model; or a
                data set of inputs and targets, as in `fit`.
            y: Their targets.
            groups: Groups that each get their own guarantee: a callable(batch) -> whole numbers, or
                "bar" for fifths of the error bar, of which those below 50 rows are merged with the
                next. A group with too few rows for a level (fewer than 9 for 90 %) gets infinite
                intervals.

        Returns:
            The object itself.

        Raises:
            ValueError: There is no calibration, it is stale, or the data cannot be used. The
                object stays as it was.
        """
        self._fit.conformalize(with_target(x, y), groups, self._passing)
        return self

    @property
    def calibration_report(self) -> CalibrationReport | None:
        """The report of the last calibration; None before the first one."""
        state = self._fit.state  # read once: another thread may replace it
        return None if state is None else state.report

    @property
    def calibration(self) -> Calibration:
        """Ridge, scale, noise and distribution; before calibration, defaults."""
        return self._fit.require_state().calibration

    @property
    def ridge(self) -> float:
        r"""$\varsigma^2$: calibrated, or a default relative to the Gram's diagonal."""
        return self.calibration.ridge

    @property
    def scale(self) -> Tensor:
        r"""$\alpha$ per target, in the readout's order of targets; ones before calibration."""
        return self.calibration.scale

    @property
    def noise_model(self) -> Noise:
        """The noise; zero before calibration and with `noise="none"`."""
        return self.calibration.noise

    @property
    def distribution(self) -> Distribution:
        """The distribution around the mean; Gaussian before calibration."""
        return self.calibration.distribution

    # --- Predictions ---

    @outside_graphs
    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each shaped like the model's output.

        Args:
            inputs: The positional inputs of the model.
            keywords: The keyword inputs of the model.

        Raises:
            ValueError: The loss of the fit is not one of regression, or a prediction is not finite.
                The latter is checked only on a CPU, because the check would make the CPU wait for
                an accelerator; `predict` checks it everywhere.
        """
        readout, state = self._fit.ready(error_bars=True)
        batch = Feed(self._fit.model, state.batch_format).handed(inputs, keywords)
        novelty = None
        if state.novelty is not None and listens(state.calibration, ("std",)):
            reading, novelty = state.read(readout, batch)
        else:
            reading = readout.read(batch.args, batch.kwargs)
        if batch.samples is not None:
            batch.check(reading.output.shape[0])
        std = state.bars(readout).std(batch, reading, novelty)
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
        gather: bool = False,
    ) -> Prediction:
        """Predictions with error bars for inputs or batches; targets in them are ignored.

        Args:
            x: The inputs, or anything that `fit` accepts.
            sample_weight: A callable(batch) -> loss weights c, by which the noise is divided. Rows
                without a weight get the noise of a typical row, whose weight is the harmonic mean
                of the weights in the calibration.
            input_covariance: The covariance of uncertain inputs. Their variance is added to the
                prediction's and kept in `from_inputs`. It is one variance; or a variance for each
                of the d numbers of an input row, (d,) or (N, d); or a matrix, (d, d) or (N, d, d).
                (d, d) is always a matrix.
            input_samples: 0 propagates the inputs' covariance to first order. A larger number
                propagates it with that many draws of the inputs, which checks the first order where
                the model is curved.
            wrt: The uncertain input, where there are several.
            generator: The random generator of those draws.
            gather: Whether every process of the process group gets the rows of all, in the order
                of ranks. Otherwise each process has its own rows, and nothing is exchanged.

        Raises:
            ValueError: The loss of the fit is not one of regression, or a prediction is not finite.
                The message names the loss, or the rows and, where known, the cause.
        """
        if input_covariance is None and (input_samples or wrt is not None):
            raise ValueError("input_samples= and wrt= are for uncertain inputs: input_covariance=.")
        uncertain_inputs = None
        if input_covariance is not None:
            uncertain_inputs = InputVariances(input_covariance, wrt, input_samples, generator)
        options = as_text([sample_weight, uncertain_inputs is None, wrt, input_samples])
        group = self.process_group if gather else False
        with self._fit.job(group, "predict", options) as processes:
            readout, state = self._fit.ready(error_bars=True)
            batches = self._fit.batches(x, "predict", self._passing, once=gather)
            bars = state.bars(readout)
            variances = list(
                _batch_variances(readout, state, bars, batches, sample_weight, uncertain_inputs)
            )
            if uncertain_inputs is not None:
                uncertain_inputs.check_used_up()
            variances = gathered(processes, variances)
        # An error reads the inputs again to name the wrong rows. Gathered rows are those of other
        # processes too, whose inputs are not here.
        readable = [] if gather else x
        return bars.prediction(variances, self._batches_again(readable, "predict"))

    def plot(
        self,
        x: Any,
        y: Any = None,
        *,
        along: int | str | None = None,
        kind: str | None = None,
        target: int | str | None = None,
        level: float = 0.9,
        conformal: bool | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """Predict and draw: `uq.predict(x).plot(y)`.

        Args:
            x: The inputs, or anything that `fit` accepts. If x contains targets, they are drawn as
                y would be.
            y: True values.
            along: The input to draw along: its number, or the name of a frame's column. The inputs
                are then a tensor, an array, a frame, or a mapping of these.
            kind: What to draw, as in `Prediction.plot`.
            target: The target to draw, where there are several, as in `Prediction.plot`.
            level: Probability of the intervals.
            conformal: As in `Prediction.interval`.
            ax: Axes of matplotlib to draw on, new ones by default.

        Returns:
            The axes. Nothing is shown or saved.

        Raises:
            ImportError: Matplotlib is missing.
            ValueError: The arguments do not go together, or a prediction is not finite.
        """
        if y is None:
            # A loader may shuffle, so that targets are those of this reading.
            batches = list(self._fit.feed(self._passing.silent)(x, "plot"))
            p = self.predict([batch.raw for batch in batches])
            y = joined_targets(batches)
        else:
            p = self.predict(x)
        return p.plot(
            y,
            kind=kind,
            x=None if along is None else x,
            along=along,
            target=target,
            level=level,
            conformal=conformal,
            ax=ax,
        )

    @outside_inference_mode
    def novelty(self, x: Any) -> NoveltyScores:
        """How unfamiliar inputs look to each layer of the network.

        It detects what the error bar of the last layer cannot, such as an input whose size a layer
        norm hides from all later layers, and it names the layer. It needs no labels. Of the bars,
        those with a guard (the default) listen to it. It needs `fit(x, y, novelty=True)` and a
        calibration.

        Args:
            x: The inputs, or anything that `fit` accepts.

        Returns:
            For each input and layer, a squared distance relative to that which counts as a novelty
            of 1; also `largest`, the maximum over the layers, which is below 1 for 95 % of the
            calibration rows, and `layer`, the name of that layer.

        Raises:
            ValueError: The fit did not record the layers, or there were no held-out calibration
                rows.
        """
        readout, state = self._fit.ready()
        novelty = state.require_novelty()
        usual = state.usual_novelty
        if usual is None:
            raise ValueError(
                "Novelty is measured relative to held-out rows, and there were none. Call "
                "calibrate(x, y) with held-out rows."
            )
        distances = []
        for batch in self._fit.batches(x, "novelty", self._passing):
            _, batch_distances = novelty.score(readout, batch, usual)
            distances.append(batch_distances)
        if not distances:
            raise ValueError("There is nothing to judge: no batches were given.")
        return NoveltyScores(torch.cat(distances), novelty.names)

    # --- Several predictions together ---

    def covariance(self, x1: Any, x2: Any = None) -> Tensor:
        r"""Joint covariance of predictions (the epistemic part).

        With the rows' common scale $\alpha_B$ (`calibration.joint`), $\alpha$ (`scale`) and
        $k(x, x') = f(x)^\top (G + \varsigma^2 I)^{-1} f(x')$ it is
        $\alpha_B^2 k(x, x') + 1[x = x'] (\alpha^2 - \alpha_B^2)_+ k(x, x)$. Two rows are equal if
        the hashes of their inputs are equal. Where inputs do not have one row per output (atoms),
        rows are equal if their features agree in half of their digits.

        Args:
            x1: The inputs, in any form that `predict` accepts.
            x2: Other inputs; the same by default.

        Returns:
            (N, M) for one output per sample, else (N, *outputs, M, *outputs).
        """
        readout, state = self._fit.ready()

        def batches(data: Any) -> Iterator[Batch]:
            return self._fit.batches(data, "covariance", self._passing.silent)

        others = None if x2 is None else lambda: batches(x2)
        return covariance_between(readout, _joint(readout, state), lambda: batches(x1), others)

    def propagate(
        self,
        fn: Callable[[Tensor], Tensor],
        x: Any,
        *,
        second_order: bool = False,
    ) -> Derived:
        """Mean and standard deviation of a differentiable function of predictions, to first order.

        It takes one reverse pass of `fn` per derived quantity, keeps the correlations between
        predictions, and never makes an N x N matrix. It propagates only the epistemic part, with
        the covariance that `covariance` returns. The paper's form has one scale, which may include
        noise, so that a mean of many predictions looks far too uncertain. Of its options use
        `Paper(criterion="evidence", noise="bayes")`.

        Args:
            fn: A function of the predictions for all of x, one tensor shaped like the model's
                output, that returns a tensor of any shape. For functions without a derivative use
                `ensemble(64).propagate`.
            x: The inputs, or anything that `fit` accepts.
            second_order: Whether to correct the mean for the curvature of `fn`.
        """
        readout, state = self._fit.ready()
        return propagated(
            fn,
            readout,
            _joint(readout, state),
            lambda: self._fit.batches(x, "propagate", self._passing),
            second_order=second_order,
            again=repeatable(x),
        )

    def ensemble(self, n: int = MEMBERS, *, generator: torch.Generator | None = None) -> Ensemble:
        r"""An ensemble of last-layer members: an `nn.Module` with `ens(x)` -> (n, *output.shape).

        All members together cost one pass of the model and one matrix product. They contain the
        epistemic part, with its correlations between predictions and targets. Their mean is exactly
        the model's prediction. Where the part that predictions share has its own scale
        (`calibration.joint`), each row also gets its own deviation, the same in every call, which
        needs another product and a hash of each row.

        Args:
            n: The number of members.
            generator: The random generator of the draws.
        """
        readout, state = self._fit.ready()
        members = member_set(_joint(readout, state), n, generator=generator)
        return Ensemble(state.binding.copy(), self._fit.feed().unlabelled(), members)

    # --- Derivatives by the inputs ---

    @outside_inference_mode
    def gradient(
        self,
        x: Any,
        wrt: InputName = None,
        *,
        along: Tensor | None = None,
        members: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Gradient:
        r"""Derivatives of the prediction with respect to an input, with their standard deviations.

        They are exact: the readout's features are differentiated, in forward or reverse mode,
        whichever takes fewer passes. They contain the epistemic part only. A derivative is a single
        quantity, so it uses the scale of single predictions, not `calibration.joint`.

        Args:
            x: The inputs, or anything that `fit` accepts.
            wrt: The position or name of the input ("pos"), where there are several.
            along: A direction $v$, shaped like the input or like one row of it. The result is the
                derivative along it, $v \cdot \nabla y$, shaped like the output, from one pass.
            members: How many last-layer members to draw instead. Each costs one backward pass, and
                the standard deviation has a relative error of $1 / \sqrt{2 n}$. By default 64 are
                drawn, with a warning, if exact derivatives would need more than 2048 passes; 0
                never draws any.
            generator: The random generator of those draws.

        Returns:
            `mean` and `std`, shaped like the input for one output per sample; for several
            (N, *outputs, *inputs). For inputs that have no row for each sample (atoms of several
            structures), or whose rows act on other samples too, the sum of all outputs is
            differentiated (`summed`): each atom gets the derivative of its own structure. The scale
            is that of `calibration_report.gradient_scale` if derivatives were calibrated on their
            targets, and then differs from that of members and `propagate`; else `scale`.
        """
        if along is not None and members is not None:
            raise ValueError("along= is exact in one pass. Leave members= out.")
        readout, state = self._fit.ready()
        batches = self._fit.batches(x, "gradient", self._passing)
        maps = _feature_maps(readout, wrt, batches)
        differentiator = _differentiator(readout, state, members, generator)
        # Comprehensions, unlike loops, keep no map (and its graph) after the last batch.
        if along is None:
            gradients = [differentiator(feature_map) for feature_map in maps]
        else:
            gradients = [
                differentiator.directional(feature_map, direction)
                for direction, feature_map in with_directions(maps, along)
            ]
        return self._joined(gradients, members)

    @outside_inference_mode
    def predict_with_gradient(
        self,
        x: Any,
        wrt: InputName | Slot = None,
        *,
        gradient_bars: bool = True,
        sample_weight: SampleWeight | None = None,
        members: int | None = None,
    ) -> tuple[Prediction, Gradient]:
        """The results of `predict` and `gradient`, from the same pass of the model.

        Args:
            x: The inputs, as in `gradient`.
            wrt: As in `gradient`; or your own `data.slots.Slot`, for something that is not an input
                of the model.
            gradient_bars: Whether to compute the standard deviations of the derivatives. With False
                there is one forward and one backward pass.
            sample_weight: As in `predict`.
            members: As in `gradient`.
        """
        readout, state = self._fit.ready(error_bars=True)
        bars = state.bars(readout)
        differentiator = _differentiator(readout, state, members, None)
        variances = []
        gradients = []
        for batch in self._fit.batches(x, "gradient", self._passing):
            slot = Slot.find(batch, wrt, readout)
            with torch.enable_grad():
                feature_map = FeatureMap.of(readout, batch, slot, fused=not gradient_bars)
                reading = feature_map.reading.detached()
                if gradient_bars:
                    gradients.append(differentiator(feature_map))
                else:
                    gradients.append(gradient_without_bars(feature_map))
                del feature_map  # with its graph, before that of the next batch is made
                novelty = None
                if state.usual_novelty is not None:  # from a pass of its own, without a graph
                    _, novelty = state.read(readout, batch)
                variances.append(bars.of_batch(batch, reading, sample_weight, novelty))
        prediction = bars.prediction(variances, self._batches_again(x, "gradient"))
        return prediction, self._joined(gradients, members)

    # --- Features, and what they say about inputs ---

    def features(self, x: Any) -> Tensor:
        """The readout's features, (M, D), or (M, K, D) where they differ between targets.

        M counts rows of outputs: one per input, or more where a prediction has several (time
        steps, pixels).

        Args:
            x: The inputs, or anything that `fit` accepts.
        """
        readings = self._readings(x)
        features = torch.cat([reading.features for reading in readings])
        require_finite(features, features, self._batches_again(x, "features"), "rows")
        return features

    @outside_inference_mode
    def local(self, x: Any) -> LocalTerms:
        """The terms that sum to each prediction (atoms, pixels, time steps), with error bars.

        Args:
            x: The inputs, or anything that `fit` accepts.
        """
        readout, state = self._fit.ready()
        batches = self._fit.batches(x, "local", self._passing)
        return local_terms(readout, state.posterior, batches)

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
    ) -> Selection:
        """Which inputs of a pool to label next; see `rigidities.selection`.

        The targets must share their features, and each input must have one row of features.
        Otherwise pass your own rows to `selection.greedy(uq.posterior, rows, n)`.

        Args:
            x: The pool of candidates, in any form that `predict` accepts; no labels are needed.
            n: How many inputs to select.
            objective: "variance" (default) shrinks the total variance, and "logdet" learns most
                about the weights, both greedily. "top" selects the largest variances one by one.
            weights: Loss weights with which new rows would enter the fit; not for "top".
            costs: What labelling each input costs.
            chosen: Rows of the pool that were selected before.
            of: For "variance", the inputs whose variance should shrink; by default those of the
                pool.

        Raises:
            ValueError: Inputs do not have one row of features each, or the options contradict each
                other.
        """
        if objective == "top" and (of is not None or weights is not None):
            raise ValueError("objective='top' accepts neither of= nor weights=.")
        features = self._one_row_each(x)
        if objective == "top":
            variances = self.scale.square().sum() * self.posterior.quadratic(features)
            return selection.top(variances, n, costs=costs, chosen=chosen)
        judged_features = None
        if of is not None:
            judged_features = self._one_row_each(of)
        return selection.greedy(
            self.posterior,
            features,
            n,
            objective=objective,
            weights=weights,
            costs=costs,
            chosen=chosen,
            of=judged_features,
        )

    # --- Other models made of this one ---

    @outside_inference_mode
    def refit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        add: bool = True,
    ) -> Self:
        """A fitted, uncalibrated copy of this object, whose model has the ridge-optimal readout.

        The predictions change, often for the better: print `refitted` of the result. The readout
        comes from the sums of the fit, so there is no other pass over the training data. With
        validation data, it is best to call `new = uq.refit(x, y, add=False)` and then
        `new.calibrate(x, y)`.

        Args:
            x: Rows on which the refitted readout is judged, as in `fit`.
            y: Their targets, as in `fit`.
            add: Whether to include these rows in the refit after judging. They are then no longer
                held out, so calibrate on other rows.

        Raises:
            ValueError: The loss is not "mse", the fit had no targets, features come from
                `features=`, the output is not linear in the readout's weights, or these weights
                are tied or computed.
        """
        fit, report = self._fit.refit(with_target(x, y), add=add, passing=self._passing)
        source = fit.user_model.source
        uq = type(self)(
            fit.model,
            layer=fit.user_model.layer,
            features=source.features,
            forward=source.forward,
            target=fit.target,
            output=source.output,
            batch_size=self.batch_size,
            progress=self.progress,
            process_group=self.process_group,
        )
        uq._fit = fit
        uq.refitted = report
        return uq

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
        r"""A plain `nn.Module` that returns tensors, to compile, export or serve.

        It can be called from several threads. It contains copies of the model's weights and of the
        statistics, and checks nothing. Neither later training nor another fit changes it. See
        `rigidities.export` for files.

        Args:
            outputs: What it returns, in this order: "mean" and "std" as `uq(x)`; "epistemic" and
                "noise" (variances) and "quantiles" (first dimension: levels) as `predict`;
                "members" (first dimension) as `ensemble`.
            rank: How many eigenvectors of the Gram to keep. Below about half of the width this is
                cheaper than keeping all, and it never makes the bars too small: `error` of the
                module is a bound on how much the variance $\alpha^2 q$ is overstated, as a fraction
                of it.
            accuracy: The largest bound to accept, instead of a rank. The smallest rank that meets
                it is used, or all eigenvectors.
            quantiles: The levels of "quantiles".
            members: The number of "members".
            generator: The random generator of their draws.
            largest_rounding: The relative rounding error of the variance beyond which it is
                computed in float64.

        Raises:
            ValueError: The output is not linear in the readout's weights, the noise is a function
                of batches, or the bars listen to the novelty of atoms, and no input of the model
                gives the number of the sample for each atom.
        """
        outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        has_error_bars = not {*outputs} <= {"mean", "members"}
        readout, state = self._fit.ready(error_bars=has_error_bars)
        drawn_members = None
        if "members" in outputs:
            drawn_members = member_set(_joint(readout, state), members, generator=generator)
        return freeze(
            state.copied_readout(readout, outputs),
            state.posterior,
            state.calibration,
            outputs,
            rank=rank,
            accuracy=accuracy,
            largest_rounding=largest_rounding,
            levels=quantiles,
            members=drawn_members,
            feed=self._fit.feed(),
        )

    # --- What stands behind the error bars ---

    @property
    def gram(self) -> Gram:
        """The Gram of the training rows."""
        return self._fit.require_state().statistics.gram

    @property
    def posterior(self) -> Posterior:
        """Eigenbasis, ridge and scale; computed once, when first needed."""
        return self._fit.require_state().posterior

    @property
    def readout(self) -> AnyReadout:
        """The readout of the fit: `uq.readout.heads` are the names of its layers.

        Raises:
            ValueError: There is no fit, or the model has changed since.
        """
        return self._fit.require_state().binding.current()

    def summary(self) -> str:
        """The fit and the calibration in about ten lines, and what to do next."""
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        title = f"LastLayerRigidity of {type(self.model).__name__}, {weights:,} parameters"
        state = self._fit.state
        if state is None:
            return summary(title, UNFITTED)
        if state.statistics.label_loss is not None:
            return summary(title, _described(state))
        return summary(title, _described(state), state.calibration, state.report)

    def extra_repr(self) -> str:
        """The Gram and the state of the calibration, for `repr`."""
        if self._fit.state is None:
            return "unfitted"
        if self.calibration_report is None:
            return f"{self.gram!r}, uncalibrated"
        return f"{self.gram!r}, calibrated by {method_text(self.calibration_report)}"

    # --- Files ---

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        loss: LossLike | None = None,
        sample_weight: SampleWeight | None = None,
        gradient_loss: GradientLoss | None = None,
        noise: NoiseFunction | None = None,
        groups: Groups | None = None,
        **options: Any,
    ) -> Self:
        """Load a file that `save` wrote, with the model that was fitted.

        A file cannot contain functions. Pass those of the fit again: predictions need `noise`,
        `groups`, `forward` and `features`; `partial_fit`, `forget`, `merge` and `calibrate` also
        need `loss`, `sample_weight`, `gradient_loss` and `target`.

        Args:
            path: The path of the file.
            model: The model, with the same weights, on any device.
            loss: The loss of the fit, if it was a function, or if one of the next two was; "mse"
                must then be given too.
            sample_weight: The sample weights of the fit, which are a function.
            gradient_loss: The loss of derivatives in the fit, if it or one of the two above was a
                function.
            noise: The noise of the calibration, if it was a function.
            groups: The groups of the conformal rows, if they were a function.
            options: Options of the constructor, such as the functions `forward`, `features` and
                `target` of the fit.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged, or does not belong to the model.
        """
        snapshot = Snapshot.read(path, holds=cls._kind)
        with snapshot.opened():
            options.setdefault("output", snapshot.header["readout"]["output"])
        uq = cls(model, **options)
        uq._fit.restore(snapshot)
        if loss is not None or sample_weight is not None or gradient_loss is not None:
            known_loss = None if loss is None else loss_for(loss)
            uq._fit.set_weighing(known_loss, sample_weight, checked_gradient_loss(gradient_loss))
        if noise is not None or groups is not None:
            uq._fit.set_functions(noise, groups)
        uq._fit.require_state().binding.current()  # refuses a model whose weights differ
        return uq

    # --- Helpers ---

    @property
    def _passing(self) -> Passing:
        """How calls go through their data."""
        return Passing(self.batch_size, self.progress, self.process_group)

    def _snapshot(
        self, *, thorough: bool = False, probes: bool = True, rows: bool = False
    ) -> Snapshot | None:
        if thorough:
            self._fit.require_state().binding.current(thorough=True)
        state = self._fit.state  # read once: another thread may replace it
        if state is None:
            return None
        return state.snapshot(probes=probes, rows=rows)

    def _take(self, snapshot: Snapshot | None) -> None:
        self._fit.restore(snapshot)

    def _moved(self) -> None:
        if self._fit.state is not None:
            self._fit.on_device()

    @outside_inference_mode
    def _readings(self, data: Any) -> list[Reading]:
        """The readings of all batches of data, of which there must be at least one."""
        readout, _ = self._fit.ready()
        readings = []
        for batch in self._fit.batches(data, "features", self._passing):
            readings.append(readout(batch).detached())
        if not readings:
            raise ValueError("There are no features: no batches were given.")
        return readings

    def _one_row_each(self, data: Any) -> Tensor:
        """The features of data (N, D), where each input has one row that all targets share."""
        readings = self._readings(data)
        features = torch.cat([reading.features for reading in readings])
        inputs = sum(len(reading.output) for reading in readings)
        if len(features) != inputs or features.ndim > 2 or self.posterior.eigenvalues.ndim > 1:
            raise ValueError(
                "To choose inputs, each must have one row of features for all targets, got "
                f"features {tuple(features.shape)} for {inputs} inputs. Let forward= return one "
                "output per input, or pass your own rows and posterior to "
                "rigidities.selection.greedy."
            )
        return features

    def _batches_again(self, data: Any, call: str) -> Callable[[], Iterator[Batch]]:
        """A function that reads the data once more, so that an error can name the wrong inputs."""
        return lambda: self._fit.batches(data, call, self._passing.silent)

    def _joined(self, gradients: list[Gradient], members: int | None) -> Gradient:
        """The gradients of all batches as one; warns once if members were drawn by default."""
        gradient = Gradient.join(gradients)
        if gradient.sampling_error and members is None:
            message = SAMPLED.format(MEMBERS, gradient.sampling_error)
            self._fit.notify_once("sampled gradient", message)
        return gradient


def _batch_variances(
    readout: AnyReadout,
    state: FitState,
    bars: ErrorBars,
    batches: Iterable[Batch],
    sample_weight: SampleWeight | None,
    uncertain_inputs: InputVariances | None,
) -> Iterator[BatchVariances]:
    """Means and variances of each batch."""
    for batch in batches:
        reading, novelty = state.read(readout, batch)
        variances = bars.of_batch(batch, reading, sample_weight, novelty)
        if uncertain_inputs is not None:
            variance = uncertain_inputs.next(readout, batch, reading.output)
            variances = replace(variances, from_inputs=variance)
        yield variances


def _feature_maps(
    readout: AnyReadout, wrt: InputName, batches: Iterable[Batch]
) -> Iterator[FeatureMap]:
    """The features of each batch as functions of an input."""
    for batch in batches:
        feature_map = FeatureMap.of(readout, batch, Slot.find(batch, wrt, readout))
        yield feature_map
        del feature_map  # with its graph, before that of the next batch is made


def _joint(readout: AnyReadout, state: FitState) -> JointPosterior:
    """The joint posterior of all targets' weights, which several predictions share."""
    common_scale = state.calibration.joint
    return JointPosterior.of(state.posterior, state.statistics.gram, readout.layout, common_scale)


def _differentiator(
    readout: AnyReadout,
    state: FitState,
    members: int | None,
    generator: torch.Generator | None,
) -> Differentiator:
    form = state.bars(readout).form
    return Differentiator(state.posterior, form, state.gradient_scale, members, generator)


def _counted(state: FitState) -> str:
    """How targets with one weight vector count, in a few words."""
    statistics = state.statistics
    if statistics.gram_sums.units is not None:
        return "each in its own unit"
    if state.weighing is None:  # the reason was a function, which a file cannot hold
        return "each as it is"
    if not counts_in_own_units(state.weighing.loss):
        return "each as it is, by its loss"
    if fits(statistics.gram.width, statistics.targets):
        return "each as it is: batches differ in their number of targets"
    return "each as it is: a Gram for each would exceed 64 MiB"


def _described(state: FitState) -> dict[str, str]:
    """The readout and the fit in a few words each, for `summary`."""
    statistics = state.statistics
    layers = state.binding.header()["layer"]
    origin = "by features="
    if layers:
        origin = ", ".join(repr(layer) for layer in layers)
    targets = "1 target" if statistics.targets == 1 else f"{statistics.targets} targets"
    if state.binding.header()["layout"] == "joint" and statistics.targets > 1:
        targets = f"{targets} with one weight vector, {_counted(state)}"
    loss = "a function" if state.weighing is None else loss_name(state.weighing.loss)
    entries = {
        "readout": f"{origin}: {statistics.gram.width} features, {targets}",
        "fit": f"{statistics.gram.count:,} rows, loss {loss}",
    }
    if statistics.label_loss is not None:
        entries["error bars"] = (
            f"none: {statistics.label_loss} is not a loss of regression; see docs/classifiers.md"
        )
    if state.novelty is not None:
        count = len(state.novelty.layers)
        entries["novelty"] = "1 layer watched" if count == 1 else f"{count} layers watched"
    return entries


def _not_a_module(model: Any) -> str:
    """The message for a model that is not an `nn.Module`, with the module to pass instead."""
    message = f"model must be a torch.nn.Module, got {type(model).__name__}."
    if isinstance(getattr(model, "module_", None), nn.Module):  # skorch
        return f"{message} Pass the network that it has trained: LastLayerRigidity(net.module_)."
    if isinstance(model, (list, tuple)) and any(isinstance(part, nn.Module) for part in model):
        return (
            f"{message} Pass one module: nn.Sequential(encoder, head) for parts that follow one "
            "another, or rigidities.MeanOf(models) for the mean of several networks."
        )
    return message
