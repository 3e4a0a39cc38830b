r"""`PredictionRigidity`: error bars for any differentiable regressor.

The rigidity of a prediction measures how much the loss rises when the prediction is pushed away
from its fitted value (the paper's Sec. 3.2). With the Hessian H of the summed loss at the fitted
parameters and the derivative $g_\star$ of the prediction at $x_\star$,

$$ R_\star = \bigl( g_\star^\top (H + \varsigma^2 I)^{-1} g_\star \bigr)^{-1}, \qquad
   g_\star = \frac{\partial \tilde y(x_\star, w)}{\partial w}, \qquad
   \sigma_\star^2 = \alpha^2 / R_\star. $$

H is exact, or in the Gauss-Newton form $\sum_i \ell''_i\, g_i g_i^\top$ (Sec. 3.4), which needs no
second derivative of the model. Restricted to the last layer this is `LastLayerRigidity`.

How data flow: `fit` turns the training inputs into per-sample derivatives (`derivatives`), weights
them with the curvature of the loss, and solves the Hessian in one of three forms (`curvature`).
`calibrate` chooses $\varsigma^2$, $\alpha$ and the noise on new data (`validation`). `predict`
differentiates at new inputs and asks the solved form for the variances. The result of a fit, and
its file, are in `fit`.

Reference: F. Bigi, S. Chong, M. Ceriotti, F. Grasselli, "A prediction rigidity formalism for
low-cost uncertainties in trained neural networks" (2024), Sec. 3.2 to 3.4.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..calibration.calibration import Calibration, conformalized
from ..calibration.conformal import Groups, group_labels
from ..calibration.methods import Full, Method, method_for
from ..calibration.report import CalibrationReport
from ..calibration.words import UNFITTED, early_stopping, method_text, summary
from ..data.batches import joined_targets
from ..data.finiteness import require_finite
from ..data.samples import Samples, SampleWeight
from ..data.storage import Snapshot
from ..losses import LossLike, loss_for, loss_name
from ..models.modes import differentiating
from ..notices import NO_FIT, NotFittedError, notify
from ..posterior.memory import free_memory_or_guess
from ..prediction.derived import Derived, correlation
from ..prediction.distribution import Distribution
from ..prediction.noise import Noise
from ..prediction.prediction import Prediction
from .curvature.exact_hessian import Penalty, Regulariser
from .curvature.forms import FORMS, FormName, Problem, form_name
from .curvature.pseudo_hessian import TrainingRows
from .curvature.solving import solved_form
from .derivatives.differentiation import Differentiation
from .derivatives.parameters import Subset
from .derivatives.regressor import Function, Regressor
from .fit import KIND, Fit, restored_fit, snapshot
from .validation import MOST, RegressorRows, head_directions, report_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PredictionRigidity"]

MEMORY_SHARE = 0.7
"""Share of the free memory that a fit may use by default."""

UNSCALED = (
    "The error bars have no scale: scale 1 is used. Residuals give one only for a squared loss, if "
    "there are more rows than parameters, and if the residuals are more than rounding and of one "
    "size for all outputs. Call calibrate(x, y), or set_scale(s) with the size of the noise if it "
    "is known."
)

HessianName = Literal["gauss-newton", "exact"]


class PredictionRigidity:
    r"""Error bars of a fitted regressor f(params, x) or `nn.Module`, from all of its parameters.

    Create the object from the fitted regressor, `fit` it on the training data, `calibrate` it on
    other data, then `predict`:

        pr = PredictionRigidity(model, ridge=1e-3).fit(x_train, y_train)
        pr.calibrate(x_valid, y_valid)
        prediction = pr.predict(x)

    Before a calibration, the scale $\alpha$ of a squared loss is the residual standard error of
    textbooks, `residual_scale`, if there are more rows than parameters and the residuals of all
    outputs are of one size. Otherwise it is 1, and the first error bar warns. A `GaussianNLL`
    brings its scale, since its variance is the noise.

    Parameters and buffers are copied when the object is created: later changes of a module have no
    effect. All parameters vary, even frozen ones (`requires_grad=False`): use `subset` to name
    those that were trained.

    Args:
        f: A batched function f(params, *inputs) -> (N,) or (N, K) in torch, or a trained
            `nn.Module`.
        params: The fitted parameters: a tensor, or nested mappings, lists and tuples of tensors.
            Leave them out for a module, which has its own parameters.
        loss: The loss that was minimised, summed over samples; as in `LastLayerRigidity.fit`.
        hessian: "gauss-newton" (the paper's) or "exact".
        ridge: $\varsigma^2$, which is added to the diagonal of the Hessian.
        regulariser: A function callable(params) -> number that was added to the summed loss.
        subset: Names or prefixes of the parameters that may vary, or callable(name) -> bool. The
            other parameters stay fixed.
        output: Key, index or attribute of the output, if f returns several.
        form: "dense", "dual" or "matrix-free"; "auto" chooses the cheapest that fits into memory.
        tolerance: Relative error of the variances that the matrix-free form may have.
        memory: Bytes of memory that may be used; by default 70 % of the free memory.
        batch_size: Samples per call of f, where the data are not batches already.

    Raises:
        ValueError: An option is out of its range, or the parameters are missing or not finite.
        TypeError: f is neither a function nor a module.

    Examples:
        >>> x = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
        >>> line = lambda w, x: w[0] + w[1] * x
        >>> w = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> y = 1 + 2 * x + torch.tensor([0.1, -0.1, -0.1, 0.1], dtype=torch.float64)
        >>> pr = PredictionRigidity(line, w).fit(x, y)
        >>> middle = torch.tensor([1.5], dtype=torch.float64)
        >>> round(pr.rigidity(middle).item(), 9)  # N
        4.0
        >>> round(pr.variance(middle).item(), 9)  # s^2 / N with s^2 = 0.04 / (4 - 2)
        0.005
    """

    @differentiating
    def __init__(
        self,
        f: Function | torch.nn.Module,
        params: Any = None,
        loss: LossLike = "mse",
        hessian: HessianName = "gauss-newton",
        ridge: float = 0.0,
        *,
        regulariser: Regulariser | None = None,
        subset: Subset | None = None,
        output: str | int | None = None,
        form: FormName = "auto",
        tolerance: float = 1e-4,
        memory: float | None = None,
        batch_size: int | None = None,
    ) -> None:
        if hessian not in {"gauss-newton", "exact"}:
            raise ValueError(f"hessian must be 'gauss-newton' or 'exact', got {hessian!r}.")
        if form not in FORMS:
            raise ValueError(f"Unknown form {form!r}. Known: {', '.join(FORMS)}.")
        no_ridge: Any = ridge  # None by mistake, as the default of other options
        if no_ridge is None or not 0 <= ridge < float("inf"):
            raise ValueError(
                f"ridge must be a finite number that is not negative, got {ridge}. Use ridge=0 for "
                "none; calibrate(x, y) searches for the best one."
            )
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance}.")
        if memory is not None and not memory > 0:
            raise ValueError(f"memory must be a positive number of bytes, got {memory}.")
        self._regressor = Regressor.of(f, params, subset=subset, output=output)
        self._loss = loss_for(loss)
        self._hessian = hessian
        self._initial_ridge = float(ridge)
        self._regulariser = regulariser
        self._form_option = form
        self._tolerance = tolerance
        self._memory = memory
        self.batch_size = batch_size
        self._fit: Fit | None = None
        self._has_warned = False  # that the scale is a default
        if isinstance(f, torch.nn.Module):
            name = type(f).__name__
        else:
            name = getattr(f, "__name__", "f")
        self._title = f"PredictionRigidity of {name}, {len(self._regressor):,} parameters"

    def __repr__(self) -> str:
        if self._fit is None:
            return f"<{self._title}: unfitted>"
        description = f"{self._title}: {self.form} form, ridge {self.ridge:.3g}"
        if self.calibration_report is not None:
            description += f", calibrated by {method_text(self.calibration_report)}"
        return f"<{description}>"

    def summary(self) -> str:
        """The state of the object in about ten lines, and what to do next."""
        fit = self._fit
        if fit is None:
            return summary(self._title, UNFITTED)
        facts = {
            "fit": f"{fit.rows:,} rows, loss {loss_name(self._loss)}",
            "form": f"{self.form}, {self._hessian}",
        }
        if fit.report is None and fit.scale_origin == "residuals":
            facts["residuals"] = (
                f"standard error {fit.calibration.scale.item():.4g}, which is the scale: "
                f"{fit.rows:,} rows, {fit.effective_rank:.3g} fitted directions"
            )
        return summary(self._title, facts, fit.calibration, fit.report)

    @differentiating
    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        sample_weight: SampleWeight | None = None,
    ) -> PredictionRigidity:
        """Sum the Hessian over the training data and factorise it.

        Rigidities are defined at a minimum of the loss. `fit` warns if the parameters are far from
        a minimum. An error leaves the object unchanged.

        Args:
            x: Inputs: a tensor, an array, a data frame, or a tuple of several. Without y, a data
                set of inputs and targets: (x, y), a Dataset, a DataLoader or a list of batches.
            y: Targets, shaped like the predictions.
            sample_weight: Weight of each sample in the loss, (N,) beside y, or
                callable(batch) -> (N,).

        Returns:
            The object itself.

        Raises:
            MemoryError: No form fits into memory.
            ValueError: The Hessian is singular or indefinite, or the data do not fit f.
        """
        samples = Samples.of(
            x, y, sample_weight, like=self._regressor.flat, batch_size=self.batch_size
        )
        first_batch = next(iter(samples))
        regressor = self._regressor.used((batch.args, batch.kwargs) for batch in samples)
        differentiation = Differentiation.of(regressor, *first_batch.args, **first_batch.kwargs)
        training = TrainingRows(
            differentiation,
            samples,
            self._loss,
            curved=self._hessian == "gauss-newton",
        )

        # The Hessian: which form, then one pass over the data and its solution.
        problem = self._problem(differentiation, samples.count)
        penalty = None
        if self._regulariser is not None:
            penalty = Penalty(regressor, self._regulariser)
        name = form_name(problem, self._form_option)
        form = solved_form(training, problem, name, penalty, self._tolerance)

        # The pass has also summed the gradient, which shows whether this is a minimum.
        penalty_gradient = None if penalty is None else penalty.local.gradient
        totals = training.totals
        gradient_norm = totals.checked_gradient_norm(
            penalty_gradient, problem.ridge, regressor.flat
        )
        fit = Fit(
            regressor=regressor,
            form=form,
            shape=differentiation.shape,
            inputs=len(first_batch.args),
            gradient_norm=gradient_norm,
            rows=totals.rows,
            dispersion=totals.dispersion,
            calibration=Calibration.unscaled(form.ridge, 1, regressor.flat.device),
            typical_weight=totals.typical_weight,
            weighted=sample_weight is not None,
            differentiation=differentiation,
            columns=first_batch.columns,
        )
        residuals_tell = (
            totals.dispersion > 0 and not totals.residuals_are_rounding and totals.outputs_are_alike
        )
        self._fit = fit.scaled_for(self._loss, residuals_tell=residuals_tell)
        self._has_warned = False
        return self

    @differentiating
    def predict(self, x: Any) -> Prediction:
        """Predictions and their error bars at new inputs.

        Args:
            x: Inputs, in any form that `fit` accepts.

        Returns:
            Mean, epistemic variance, noise and rigidity, each shaped like f's output.

        Raises:
            NotFittedError: There is no fit yet.
            ValueError: The inputs do not fit f, or a prediction is not finite.
        """
        self._warn_of_default_scale()
        return self._prediction(x)

    def _prediction(self, x: Any) -> Prediction:
        """The prediction at new inputs, without a word about its scale."""
        fit, samples = self._fit_and_samples(x)
        calibration = fit.calibration
        conformal = calibration.conformal
        means = []
        quadratics = []
        head_inputs = []
        labels = []
        for batch in fit.pieces(samples):
            prediction, tangents = fit.differentiate(*batch.args, **batch.kwargs)
            means.append(prediction)
            quadratics.append(fit.form.quadratic(tangents))
            if fit.directions is not None:
                rows = tangents.matrix().flatten(0, 1).to(fit.directions)
                head_inputs.append(rows @ fit.directions)
            if conformal is not None and conformal.function is not None:
                labels.append(group_labels(conformal.function, batch.raw, prediction))
        q = torch.cat(quadratics)  # (N, K), g^T (H + s I)^-1 g
        mean = torch.cat(means).to(q)  # (N, K)
        distribution = calibration.distribution
        if calibration.head is None:
            epistemic = calibration.epistemic(q)
            noise = calibration.noise_variance(mean).to(q)
        else:
            inputs = torch.cat(head_inputs) if head_inputs else q.new_zeros(q.numel(), 0)
            epistemic, noise, by_row = calibration.by_head(
                q.reshape(-1, 1), mean.reshape(-1, 1), inputs
            )
            epistemic = epistemic.reshape(mean.shape)
            noise = noise.reshape(mean.shape)
            distribution = by_row.each(lambda rows: rows.reshape(len(mean), *fit.shape, -1))
        bound = None
        if conformal is not None:
            # Each output has lists of scores of its own.
            bound = conformal.bound(
                fit.shaped(torch.cat(labels)) if labels else None,
                torch.arange(q.shape[1], device=q.device).reshape(fit.shape),
            )
        result = Prediction(
            mean=fit.shaped(mean),
            epistemic=fit.shaped(epistemic),
            noise=fit.shaped(noise),
            rigidity=fit.shaped(1 / q),
            distribution=distribution,
            support=calibration.support,
            conformal=bound,
        )
        require_finite(result.mean, result.epistemic, lambda: samples, "rows")
        return result

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
            x: The inputs, in any form that `fit` accepts. If x contains targets, they are drawn as
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
            NotFittedError: There is no fit yet.
            ValueError: The arguments do not go together, or a prediction is not finite.
        """
        if y is None:
            # A loader may shuffle, so that targets are those of this reading.
            batches = list(self._fitted().samples(x, batch_size=self.batch_size))
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

    @differentiating
    def calibrate(
        self,
        x: Any = None,
        y: Any = None,
        *,
        method: Literal["full", "paper"] | Method = "full",
        train: Any = None,
        early_stopped: bool | None = None,
    ) -> PredictionRigidity:
        r"""Choose ridge, $\alpha$, noise and distribution on held-out data.

        The default fits a distribution of errors that follows the inputs, and a guard that widens
        the bars of unfamiliar inputs. All outputs share one scale. In the dual and the matrix-free
        form the distribution does not follow the inputs.

        What was chosen and how good it is stands in `calibration_report`; print it to read it.

        Args:
            x: Inputs that were not used in the fit, in any form that `fit` accepts.
            y: Their targets.
            method: "full", "paper", or an object `Full(...)` or `Paper(...)` with options, as in
                `LastLayerRigidity.calibrate`. The criteria "evidence" and "loo" and a noise that is
                a function are for `LastLayerRigidity`. A number for ridge fixes $\varsigma^2$. By
                default the dense form searches for it, while the dual and the matrix-free form keep
                that of the fit, which is part of their factorisation, and refuse any other.
            train: The training data of the fit, inputs and targets, from which the method "full"
                learns too, with their leave-one-out errors; by default it does without them. It is
                refused after a fit with weights.
            early_stopped: Whether the held-out data chose the parameters, so that their errors are
                optimistic. False means that they did not. By default the report asks, unless f is a
                function, which has no checkpoints.

        Returns:
            The object itself.

        Raises:
            NotFittedError: There is no fit yet.
            ValueError: There are no targets, the loss is not one of regression, or the form does
                not support the ridge or the method.
        """
        if x is None:
            raise ValueError("calibrate needs held-out rows: calibrate(x, y).")
        if early_stopped not in (None, True, False):
            raise ValueError(f"early_stopped must be True, False or None, got {early_stopped!r}.")
        if early_stopped is None and self._regressor.module is None:
            early_stopped = False  # a formula has no checkpoints
        wanted = self._supported(method_for(method), train)
        fit, samples = self._fit_and_samples(x, y)
        if wanted.ridge is not None:
            fit = replace(fit, form=fit.form.with_ridge(wanted.ridge))
        elif fit.form.name != "dense":
            wanted = replace(wanted, ridge=fit.form.ridge)
        assert fit.differentiation is not None
        directions = head_directions(fit.form, wanted)
        reader = RegressorRows(
            fit.differentiation,
            fit.form,
            self._loss,
            noise=wanted.noise_class,
            support=wanted.support,
            ridge_is_fixed=wanted.ridge is not None,
            typical_weight=fit.typical_weight,
            directions=directions,
            most=MOST if isinstance(wanted, Full) else None,
        )
        train_batches = (
            None if train is None else fit.pieces(fit.samples(train, batch_size=self.batch_size))
        )
        report = report_on(wanted, reader, fit.pieces(samples), train_batches, early_stopped)
        for notice in report.notices:
            notify(notice)
        self._fit = replace(
            fit,
            form=fit.form.with_ridge(report.ridge),
            calibration=report.calibration,
            report=report,
            directions=None if report.calibration.head is None else directions,
        )
        return self

    def _supported(self, method: Method, train: Any) -> Method:
        """The method, unless it is for `LastLayerRigidity` alone."""
        if method.noise_function is not None:
            raise ValueError(
                "A noise that is a function of batches is for LastLayerRigidity. Use "
                "losses.GaussianNLL with the noise variances as the loss."
            )
        if isinstance(method, Full):
            if train is not None and self._fitted().weighted:
                raise ValueError(
                    "train= needs training data that all count alike, but this fit has a "
                    "sample_weight, which calibrate does not know. Calibrate without train=: "
                    "held-out rows are enough."
                )
            return method
        if method.criterion in {"evidence", "loo"}:
            raise ValueError(
                f"criterion={method.criterion!r} is for LastLayerRigidity. Use method='full', or "
                "Paper with criterion 'nll' or 'bins'."
            )
        if train is not None:
            raise ValueError("train= is for the method 'full'; 'paper' uses held-out data alone.")
        return method

    @differentiating
    def conformalize(
        self, x: Any, y: Any = None, *, groups: Groups | None = None
    ) -> PredictionRigidity:
        """Guarantee the coverage of intervals, by data that were used for nothing else.

        Call it after `calibrate`, with other data than it. Another calibration drops the guarantee.

        Args:
            x: Inputs that were used for neither the fit nor the calibration.
            y: Their targets.
            groups: callable(batch) -> whole numbers, one per sample: groups that each get a
                guarantee. A group with too few predictions for a level (fewer than 9 for 90 %) gets
                infinite intervals.

        Returns:
            The object itself.

        Raises:
            NotFittedError: There is no fit yet.
            ValueError: There is no calibration yet, or the data or groups cannot be used.
        """
        fit, samples = self._fit_and_samples(x, y)
        report = fit.report
        if report is None:
            raise ValueError(
                "There is no calibration yet: call calibrate(x, y) first, then conformalize with "
                "rows that were used for neither."
            )
        if groups is not None and not callable(groups):
            raise ValueError(
                "groups must be callable(batch) here, since no training rows are kept, got "
                f"{groups!r}."
            )
        assert fit.differentiation is not None
        reader = RegressorRows(
            fit.differentiation,
            fit.form,
            self._loss,
            noise=type(report.calibration.noise),
            support=report.calibration.support,
            ridge_is_fixed=True,
            directions=fit.directions,
        )
        rows, _ = reader.rows(fit.pieces(samples), groups=groups)
        calibration = conformalized(report.calibration, rows, reader.curvature, groups)
        assert calibration.conformal is not None
        former = report.calibration.conformal
        outdated = [] if former is None else former.sentences
        remarks = [remark for remark in report.remarks if remark not in outdated]
        for remark in (*calibration.conformal.sentences, early_stopping(report.early_stopped)):
            if remark and remark not in remarks:
                remarks.append(remark)
        report = replace(report, calibration=calibration, remarks=remarks)
        self._fit = replace(fit, calibration=calibration, report=report)
        return self

    def variance(self, x: Any) -> Tensor:
        r"""$\alpha^2 g^\top (H + \varsigma^2 I)^{-1} g$, shaped like f's output, float64."""
        return self.predict(x).epistemic

    @differentiating
    def rigidity(self, x: Any) -> Tensor:
        r"""The paper's $R = 1 / (g^\top (H + \varsigma^2 I)^{-1} g)$, without $\alpha$."""
        return self._prediction(x).rigidity

    @differentiating
    def covariance(self, x1: Any, x2: Any = None) -> Tensor:
        """Covariances between the predictions at x1 and those at x2.

        They are those of the fitted curve, as it moves with the parameters. After the method
        "full", whose `calibration.joint` is their scale, a single prediction may be more uncertain
        than the diagonal says: its variance is `variance(x)`.

        Args:
            x1: N inputs.
            x2: M inputs; by default those of x1 again.

        Returns:
            (N, M), or (N, K, M, K) for several outputs.
        """
        self._warn_of_default_scale()
        fit, samples = self._fit_and_samples(x1)
        _, left = fit.differentiated(samples)
        if x2 is None:
            right = left
        else:
            _, right = fit.differentiated(fit.samples(x2, batch_size=self.batch_size))
        covariance = self._shared_scale**2 * fit.form.covariance(left, right)
        return covariance.reshape(left.shape[0], *fit.shape, right.shape[0], *fit.shape)

    @differentiating
    def propagate(self, fn: Callable[[Any], Any], x: Any = None) -> Derived:
        """Mean and standard deviation of a function of the predictions, or of the parameters.

        Correlations between the predictions are included. The propagation is of first order, with
        differences of an eighth of a standard deviation, so fn may search or integrate numerically.
        A warning is given if fn is not linear within its error bar. The covariances are those of
        `covariance`, without the noise.

        Args:
            fn: A function of the predictions at x, float64 and shaped like f's output. Without x,
                a function of the parameters in their container. It returns real numbers.
            x: Inputs; None for the parameters, which needs the dense form.

        Returns:
            The function's value with its standard deviation and covariance.
        """
        restore: Callable[[Tensor], Any]
        if x is None:
            fit = self._fitted()
            parameters = fit.regressor.parameters.double()
            mean = parameters.flat
            tangents = None
            restore = parameters.restore
        else:
            fit, samples = self._fit_and_samples(x)
            mean, tangents = fit.differentiated(samples)
            restore = fit.shaped
        # One direction for each column of a root of the covariance, of one standard deviation.
        self._warn_of_shared_scale()
        directions = self._shared_scale * fit.form.root(tangents).mT
        point = mean.to(directions)

        def shifted(shift: Tensor) -> Any:
            return fn(restore(point + shift.view_as(point)))

        return Derived.by_differences(shifted, directions)

    @property
    def parameter_covariance(self) -> Tensor:
        """(P, P) covariance of the parameters that may vary, in the order of `parameter_std`."""
        root = self._fitted().form.root()
        self._warn_of_shared_scale()
        return self._shared_scale**2 * (root @ root.mT)

    @property
    def parameter_correlation(self) -> Tensor:
        """(P, P) correlations, in the order of `parameter_covariance`."""
        root = self._fitted().form.root()
        return correlation(root @ root.mT)

    @property
    def parameter_std(self) -> Any:
        """Standard errors, in the parameters' container; zero for fixed or unused parameters."""
        std = self.parameter_covariance.diagonal().sqrt()
        return self._fitted().regressor.parameters.deviations(std)

    @differentiating
    def sample(self, n: int, generator: torch.Generator | None = None) -> Any:
        r"""Draw parameters from $N(w, \alpha^2 (H + \varsigma^2 I)^{-1})$.

        After the method "full", $\alpha$ is `calibration.joint`, as for `parameter_std`.

        Args:
            n: How many draws.
            generator: The source of random numbers; torch's default generator if None.

        Returns:
            The container of the parameters, every leaf with a leading dimension n, as
            `torch.func.vmap(f, in_dims=(0, None))(pr.sample(n), x)` expects it.
        """
        fit = self._fitted()
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}.")
        self._warn_of_default_scale()
        deviations = self._shared_scale * fit.form.sample(n, generator)
        flat = fit.regressor.flat
        draws = flat.to(torch.float64) + deviations  # (n, P)
        return fit.regressor.parameters.restore(draws.to(flat))

    @property
    def residual_scale(self) -> float:
        r"""$\alpha$ from the training residuals, $\alpha^2 = \sum (\ell'^2 / \ell'') / (n - p)$.

        For a squared loss this is the residual standard error s of textbooks. n is the number of
        predictions and p the number of directions that the data determine (the number of
        parameters, without a ridge). For a model with more parameters than data, the result is far
        too small: calibrate such a model on new data.

        Raises:
            ValueError: There are no training residuals, or no degrees of freedom are left.
        """
        return self._fitted().residual_scale

    def set_scale(self, scale: float) -> PredictionRigidity:
        r"""Set $\alpha$, for example to a noise that is known, and drop an earlier calibration.

        Returns:
            The object itself.
        """
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale must be positive and finite, got {scale}.")
        self._fit = self._fitted().with_scale(float(scale), "given")
        return self

    @property
    def calibration(self) -> Calibration:
        """Ridge, scale, noise and distribution; no noise until it is chosen."""
        return self._fitted().calibration

    @property
    def scale(self) -> float:
        r"""$\alpha$: set or calibrated; else `residual_scale` for a squared loss, or 1."""
        if self._fit is None:
            return 1.0
        return float(self._fit.calibration.scale)

    @property
    def _shared_scale(self) -> float:
        r"""$\alpha$ of what predictions share: parameters, covariances, means and integrals.

        The method "full" gives it a value of its own (`calibration.joint`), which tells the noise
        from the error of the fit. Otherwise it is `scale`.
        """
        joint = None if self._fit is None else self._fit.calibration.joint
        return self.scale if joint is None else float(joint)

    @property
    def ridge(self) -> float:
        r"""$\varsigma^2$, as given or as calibrated."""
        if self._fit is None:
            return self._initial_ridge
        return self._fit.form.ridge

    @property
    def noise_model(self) -> Noise:
        """The noise; zero before calibration and with `noise="none"`."""
        return self.calibration.noise

    @property
    def distribution(self) -> Distribution:
        """The distribution around the mean; Gaussian before calibration."""
        return self.calibration.distribution

    @property
    def calibration_report(self) -> CalibrationReport | None:
        """The report of the last calibration."""
        return None if self._fit is None else self._fit.report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything but f and its parameters to a safetensors file, atomically.

        Raises:
            NotFittedError: There is no fit yet.
            ValueError: The form is matrix-free, which needs the training data for every prediction.
        """
        snapshot(self._fitted()).write(path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        f: Function | torch.nn.Module,
        *args: Any,
        groups: Groups | None = None,
        **options: Any,
    ) -> PredictionRigidity:
        """Load a file with the regressor that was fitted.

        Args:
            path: The file that `save` wrote.
            f: The same regressor.
            args: The same parameters, if f is a function.
            groups: The function that was passed to `conformalize`, if any: a file cannot hold it.
            options: Options of the constructor; the form, its ridge and the scale come from the
                file.

        Returns:
            A fitted object.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged or foreign, or was made with another regressor or other
                parameters.
        """
        stored = Snapshot.read(path, holds=KIND)
        rigidity = cls(f, *args, **options)
        fit = restored_fit(stored, rigidity._regressor)
        if groups is not None:
            calibration = fit.calibration.with_functions(None, groups)
            report = fit.report
            if report is not None:
                report = replace(report, calibration=calibration)
            fit = replace(fit, calibration=calibration, report=report)
        rigidity._fit = fit
        return rigidity

    @property
    def form(self) -> str:
        """The form in use: "dense", "dual" or "matrix-free"."""
        return self._fitted().form.name

    @property
    def tolerance(self) -> float:
        """Bound on the relative error of the variances against exact arithmetic.

        For the matrix-free form it is that of the iteration. For the others it includes the
        rounding of the derivatives, which is by far the larger part in float32.
        """
        fit = self._fitted()
        if fit.form.name == "matrix-free":
            return fit.form.tolerance
        condition = fit.form.tolerance / torch.finfo(torch.float64).eps
        derivatives = torch.finfo(fit.regressor.flat.dtype).eps * condition**0.5
        return float(fit.form.tolerance + derivatives)

    @property
    def gradient_norm(self) -> float:
        """Norm of the loss's gradient at the parameters: 0 at a minimum."""
        return self._fitted().gradient_norm

    def _problem(self, differentiation: Differentiation, samples: int) -> Problem:
        """The sizes and options that `form_name` needs to choose the form."""
        flat = differentiation.regressor.flat
        if self._memory is None:
            memory = MEMORY_SHARE * free_memory_or_guess(flat.device)
        else:
            memory = self._memory
        return Problem(
            parameters=len(flat),
            samples=samples,
            outputs=differentiation.outputs,
            numbers_per_sample=differentiation.numbers_per_sample,
            itemsize=flat.element_size(),
            ridge=self._initial_ridge,
            has_dual=self._hessian == "gauss-newton" and self._regulariser is None,
            exact=self._hessian == "exact",
            memory=int(memory),
        )

    def _fitted(self) -> Fit:
        """The fit; raises `NotFittedError` where there is none."""
        if self._fit is None:
            raise NotFittedError(NO_FIT.format("fit(x, y)"))
        return self._fit

    def _warn_of_shared_scale(self) -> None:
        """Warn where the scale of parameters, means and integrals is a default or includes noise.

        It includes the noise in the paper's form, which has one scale for both.
        """
        self._warn_of_default_scale()
        calibration = self.calibration
        is_one_for_all = calibration.joint is None and calibration.noise.name == "none"
        if self.calibration_report is not None and is_one_for_all:
            notify(
                'With noise="none" the scale includes the noise, so errors of parameters, means '
                "and integrals are too wide. For those, fit again and call "
                "set_scale(residual_scale)."
            )

    def _warn_of_default_scale(self) -> None:
        """Warn once where the scale is 1 for want of anything better."""
        fit = self._fitted()
        if fit.report is None and fit.scale_origin == "default" and not self._has_warned:
            self._has_warned = True
            notify(UNSCALED)

    def _fit_and_samples(self, x: Any, y: Any = None) -> tuple[Fit, Samples]:
        """The fit, ready to differentiate, and the user's data as samples.

        A fit that was loaded from a file finds out here, on the first inputs, how to differentiate
        f. It is stored in the object, so that this happens once.
        """
        samples = self._fitted().samples(x, y, batch_size=self.batch_size)
        self._fit = self._fitted().ready(samples)
        return self._fit, samples
