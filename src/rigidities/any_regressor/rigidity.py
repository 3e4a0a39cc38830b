r"""`PredictionRigidity`: error bars for any differentiable regressor.

$$ R_\star = \bigl( g_\star^\top (H + \varsigma^2 I)^{-1} g_\star \bigr)^{-1}, \qquad
   g_\star = \frac{\partial \tilde y(x_\star, w)}{\partial w}, \qquad
   \sigma_\star^2 = \alpha^2 / R_\star $$

with H the Hessian of the summed loss at the fitted parameters: exact, or in the Gauss-Newton form
$\sum_i \ell''_i\, g_i g_i^\top$, which needs no second derivative of the model. Restricted to the
last layer it is the form of `LastLayerRigidity`.

Reference: F. Bigi, S. Chong, M. Ceriotti, F. Grasselli, "A prediction rigidity formalism for
low-cost uncertainties in trained neural networks" (2024), Sec. 3.2 to 3.4.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..calibration.calibration import Calibration, CalibrationOptions
from ..calibration.report import UNFITTED, CalibrationReport, summary
from ..data.finiteness import require_finite
from ..data.samples import Samples, SampleWeight
from ..data.storage import Snapshot
from ..losses import LossLike, loss_for, loss_name
from ..models.modes import differentiating
from ..notices import NO_FIT, NotFittedError, notify
from ..prediction.derived import Derived, correlation
from ..prediction.distribution import Distribution
from ..prediction.noise import Noise
from ..prediction.prediction import Prediction
from .curvature.exact_hessian import Penalty, Regulariser
from .curvature.forms import FORMS, FormName, Problem, available, chosen
from .curvature.pseudo_hessian import TrainingRows
from .curvature.solving import solved
from .derivatives.differentiation import Differentiation
from .derivatives.parameters import Subset
from .derivatives.regressor import Function, Regressor
from .fit import KIND, Fit, restored, snapshot
from .validation import calibrated

MEMORY_SHARE = 0.7
"""Share of the free memory that a fit may plan with."""

HessianName = Literal["gauss-newton", "exact"]


class PredictionRigidity:
    r"""Rigidities and error bars of a fitted regressor f(params, x) or `nn.Module`.

    Args:
        f: f(params, *inputs) -> (N,) or (N, K), batched, in torch; or a trained `nn.Module`.
        params: the fitted parameters: a tensor, or mappings, lists and tuples of tensors, nested.
            A module brings its own.
        loss: the loss that was minimised, as in `LastLayerRigidity.fit`; summed over samples.
        hessian: "gauss-newton" (the paper's) or "exact".
        ridge: $\varsigma^2$, added to the diagonal of the Hessian.
        regulariser: callable(params) -> a number that was added to the summed loss.
        subset: names or prefixes of the parameters that may vary, or callable(name) -> bool; the
            others are held fixed.
        output: key, index or attribute of the output, where f returns several.
        form: "dense", "dual" or "matrix-free"; "auto" takes the cheapest that fits into memory.
        tolerance: relative error allowed to the matrix-free form.
        memory: bytes that may be used; by default 70 % of what is free.

    Parameters and buffers are those at the time of the call: later changes of a module are not
    seen. All parameters count, frozen ones (`requires_grad=False`) too: name those that were
    trained by `subset`.

    Examples:
        >>> x = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
        >>> line = lambda w, x: w[0] + w[1] * x
        >>> w = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> pr = PredictionRigidity(line, w).fit(x, 1 + 2 * x)
        >>> round(pr.variance(torch.tensor([1.5], dtype=torch.float64)).item(), 9)  # 1/N
        0.25
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
    ) -> None:
        if hessian not in {"gauss-newton", "exact"}:
            raise ValueError(f"hessian must be 'gauss-newton' or 'exact', got {hessian!r}.")
        if form not in FORMS:
            raise ValueError(f"Unknown form {form!r}. Known: {', '.join(FORMS)}.")
        if not 0 <= ridge < float("inf"):
            raise ValueError(f"ridge must be finite and not negative, got {ridge}.")
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance}.")
        if memory is not None and not memory > 0:
            raise ValueError(f"memory must be a positive number of bytes, got {memory}.")
        self._regressor = Regressor.of(f, params, subset=subset, output=output)
        self._loss, self._hessian = loss_for(loss), hessian
        self._given_ridge, self._regulariser = float(ridge), regulariser
        self._wanted, self._tolerance, self._memory = form, tolerance, memory
        self._fit: Fit | None = None
        name = type(f).__name__ if isinstance(f, torch.nn.Module) else getattr(f, "__name__", "f")
        self._title = f"PredictionRigidity of {name}, {len(self._regressor):,} parameters"

    def __repr__(self) -> str:
        state = "unfitted" if self._fit is None else f"{self.form} form, ridge {self.ridge:.3g}"
        said = "" if self.report is None else f", calibrated by {self.report.criterion}"
        return f"<{self._title}: {state}{said}>"

    def summary(self) -> str:
        """What is known, in ten lines or so, and what to do next."""
        if (fit := self._fit) is None:
            return summary(self._title, UNFITTED)
        rows, loss = fit.dispersion[0], loss_name(self._loss)
        known = {"fit": f"{rows:,} rows, loss {loss}", "form": f"{self.form}, {self._hessian}"}
        chosen = (fit.calibration, fit.report, "LastLayerRigidity.calibrate(x, y, conformal=0.3)")
        return summary(self._title, known, *chosen)

    @differentiating
    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        sample_weight: SampleWeight | None = None,
        batch_size: int | None = None,
    ) -> PredictionRigidity:
        """Sum the Hessian over the training data and factorise it.

        Args:
            x: inputs, a tensor, an array, a data frame, or a tuple of several; or, without y, a
                data set of both: (x, y), a Dataset, a DataLoader or a list of batches.
            y: targets, shaped like the predictions.
            sample_weight: weight of each sample in the loss: (N,) beside y, or callable(batch) ->
                (N,).
            batch_size: samples per call of f, where the data are not batches already.

        Returns:
            The object itself. An error leaves it as it was.

        Raises:
            MemoryError: no form fits into memory.
            ValueError: the Hessian is singular or indefinite, or the data do not fit f.
        """
        samples = Samples.of(x, y, sample_weight, like=self._regressor.flat, batch_size=batch_size)
        first = next(iter(samples))
        regressor = self._regressor.used((batch.args, batch.kwargs) for batch in samples)
        differentiation = Differentiation.of(regressor, *first.args, **first.kwargs)
        exact = self._hessian == "exact"
        training = TrainingRows(differentiation, samples, self._loss, curved=not exact)
        problem = self._problem(differentiation, samples.count)
        penalty = None if self._regulariser is None else Penalty(regressor, self._regulariser)
        form = solved(training, problem, chosen(problem, self._wanted), penalty, self._tolerance)
        slope, totals = None if penalty is None else penalty.local.gradient, training.totals
        norm = totals.check(slope, problem.ridge, regressor.flat)
        sums = (norm, (totals.rows, totals.dispersion))
        plain = Calibration.unscaled(form.ridge, 1, regressor.flat.device)
        shape, inputs = differentiation.shape, len(first.args)
        own = Fit(regressor, form, shape, inputs, *sums, plain, columns=first.columns)
        self._fit = replace(own, differentiation=differentiation)
        return self

    @differentiating
    def predict(self, x: Any) -> Prediction:
        """Mean and error bar, shaped like f's output."""
        (fit, samples), means, quadratics = self._given(x), [], []
        for batch in fit.pieces(samples):
            prediction, tangents = fit.differentiate(*batch.args, **batch.kwargs)
            means.append(prediction)
            quadratics.append(fit.form.quadratic(tangents))
        q, calibration = torch.cat(quadratics), fit.calibration
        mean = torch.cat(means).to(q)
        found = Prediction(
            mean=fit.shaped(mean),
            epistemic=fit.shaped(calibration.epistemic(q)),
            noise=fit.shaped(calibration.noise_variance(mean).to(q)),
            rigidity=fit.shaped(1 / q),
            distribution=calibration.distribution,
        )
        require_finite(found.mean, found.epistemic, lambda: samples, "rows")
        return found

    @differentiating
    def calibrate(
        self,
        x: Any,
        y: Any = None,
        *,
        criterion: str = "nll",
        ridge: Literal["search"] | float | None = None,
        noise: str | type[Noise] | Noise = "none",
        distribution: str | Distribution | type[Distribution] = "gaussian",
    ) -> CalibrationReport:
        r"""Choose ridge, $\alpha$ and noise on data not used in the fit.

        Args:
            x: data not used in the fit, in any form that it takes.
            y: targets.
            criterion: "nll", "bins", "crps" or "absolute"; see `LastLayerRigidity.calibrate`.
            ridge: fix $\varsigma^2$ instead of choosing it; another than that of the fit needs the
                dense form. The dual and the matrix-free form have it in their factorisation and
                keep it, unless "search" insists, which they refuse.
            noise: as in `LastLayerRigidity.calibrate`; one level for all outputs.
            distribution: as there.

        Returns:
            What was chosen and how good it is; print it.
        """
        wanted, (fit, samples) = (
            CalibrationOptions.of(criterion, noise, distribution, ridge),
            self._given(x, y),
        )
        if wanted.ridge is not None:
            fit = replace(fit, form=fit.form.with_ridge(wanted.ridge))
        elif ridge is None and fit.form.name != "dense":
            wanted = replace(wanted, ridge=fit.form.ridge)
        assert fit.differentiation is not None
        report = calibrated(fit.differentiation, fit.form, fit.pieces(samples), wanted)
        form = fit.form.with_ridge(report.ridge)
        self._fit = replace(fit, form=form, calibration=report.calibration, report=report)
        return report

    def variance(self, x: Any) -> Tensor:
        r"""$\alpha^2 g^\top (H + \varsigma^2 I)^{-1} g$, shaped like f's output, float64."""
        return self.predict(x).epistemic

    def rigidity(self, x: Any) -> Tensor:
        r"""The paper's $R = 1 / (g^\top (H + \varsigma^2 I)^{-1} g)$, unscaled."""
        return self.predict(x).rigidity

    @differentiating
    def covariance(self, x1: Any, x2: Any = None) -> Tensor:
        """Covariances between predictions: (N, M), or (N, K, M, K) for several outputs."""
        fit, samples = self._given(x1)
        left = fit.differentiated(samples)[1]
        right = left if x2 is None else fit.differentiated(fit.samples(x2))[1]
        covariance = fit.calibration.epistemic(fit.form.covariance(left, right))
        return covariance.reshape(left.shape[0], *fit.shape, right.shape[0], *fit.shape)

    @differentiating
    def propagate(self, fn: Callable[[Any], Any], x: Any = None) -> Derived:
        """Mean and standard deviation of a function of the predictions at x, correlations kept.

        To first order, by differences of an eighth of a standard deviation, so that fn may search
        or integrate numerically; a warning tells where it is no straight line within its error bar.
        fn takes the predictions, float64 and shaped like f's output; without x the parameters in
        their container (the dense form only). It returns real numbers. Like errors of
        parameters it wants `set_scale(residual_scale)` after `fit`, not a scale that holds noise.
        """
        fit, samples = (self._fitted(), None) if x is None else self._given(x)
        parameters, tangents = fit.regressor.parameters.double(), None
        mean, shaped = parameters.flat, cast("Callable[[Tensor], Any]", parameters.restore)
        if samples is not None:
            (mean, tangents), shaped = fit.differentiated(samples), fit.shaped
        directions = self._noiseless().scale * fit.form.root(tangents).mT
        point = mean.to(directions)
        return Derived.by_differences(lambda d: fn(shaped(point + d.view_as(point))), directions)

    @property
    def parameter_covariance(self) -> Tensor:
        """(P, P), of the entries of `parameter_std` in their order, without those held fixed."""
        root = self._fitted().form.root()
        return self._noiseless().epistemic(root @ root.mT)

    @property
    def parameter_correlation(self) -> Tensor:
        """(P, P), as `parameter_covariance`."""
        root = self._fitted().form.root()
        return correlation(root @ root.mT)

    @property
    def parameter_std(self) -> Any:
        """Standard errors in the parameters' container; zero for those held fixed or not used."""
        std = self.parameter_covariance.diagonal().sqrt()
        return self._fitted().regressor.parameters.deviations(std)

    @differentiating
    def sample(self, n: int, generator: torch.Generator | None = None) -> Any:
        r"""Parameters drawn from $N(w, \alpha^2 (H + \varsigma^2 I)^{-1})$.

        Returns:
            The container of the parameters, every leaf with a leading dimension n, as
            `torch.func.vmap(f, in_dims=(0, None))(pr.sample(n), x)` takes it.
        """
        fit = self._fitted()
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}.")
        deviations = fit.calibration.scale * fit.form.sample(n, generator)
        flat = fit.regressor.flat
        drawn = flat.to(torch.float64) + deviations
        return fit.regressor.parameters.restore(drawn.to(flat))

    @property
    def residual_scale(self) -> float:
        r"""$\alpha$ from the training residuals, $\alpha^2 = \sum (\ell'^2 / \ell'') / (n - p)$.

        The textbook's $s^2$ for a squared loss; n counts the predictions, p the directions that
        the data determine (the number of parameters, without a ridge). Far too small for a model
        with more parameters than the data hold: calibrate that one on new data.
        """
        fit = self._fitted()
        rows, dispersion = fit.dispersion
        if not dispersion >= 0:
            raise ValueError(
                "There are no training residuals: fit(x, y) with targets, and a loss whose value "
                "is known."
            )
        left = rows - fit.effective_rank
        if not left > 1e-6 * rows:
            raise ValueError(
                f"No residual degrees of freedom: {rows} rows and {fit.effective_rank:.3g} "
                "directions fitted to them. Calibrate on other data."
            )
        return float((dispersion / left) ** 0.5)

    def set_scale(self, scale: float) -> PredictionRigidity:
        r"""Set $\alpha$, for example to `residual_scale`; returns the object itself."""
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale must be positive and finite, got {scale}.")
        fit = self._fitted()
        plain = Calibration.unscaled(fit.form.ridge, 1, fit.regressor.flat.device)
        scaled = replace(plain, scale=float(scale) * plain.scale)
        self._fit = replace(fit, calibration=scaled, report=None)
        return self

    @property
    def calibration(self) -> Calibration:
        """Ridge, scale, noise and distribution; scale 1 and no noise until they are set or
        calibrated."""
        return self._fitted().calibration

    @property
    def scale(self) -> float:
        r"""$\alpha$; 1 until it is set or calibrated."""
        return 1.0 if self._fit is None else float(self._fit.calibration.scale)

    @property
    def ridge(self) -> float:
        r"""$\varsigma^2$."""
        return self._given_ridge if self._fit is None else self._fit.form.ridge

    @property
    def noise(self) -> Noise:
        """The noise; zero before calibration and with `noise="none"`."""
        return self.calibration.noise

    @property
    def distribution(self) -> Distribution:
        """The distribution around the mean; Gaussian before calibration."""
        return self.calibration.distribution

    @property
    def report(self) -> CalibrationReport | None:
        """The last calibration's report."""
        return None if self._fit is None else self._fit.report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything but f and its parameters to a safetensors file, atomically.

        Raises:
            ValueError: the form is matrix-free, which goes through the training data anew.
        """
        snapshot(self._fitted()).write(path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], f: Function | torch.nn.Module, *args: Any, **options: Any
    ) -> PredictionRigidity:
        """Read a file for the regressor it was made with.

        Args:
            path: written by `save`.
            f: the same regressor.
            args: its parameters, the same.
            options: of the constructor; the form, its ridge and the scale come from the file.

        Raises:
            FileNotFoundError: no such file.
            ValueError: damaged, foreign, or made with another regressor or other parameters.
        """
        given = Snapshot.read(path, holds=KIND)
        pr = cls(f, *args, **options)
        pr._fit = restored(given, pr._regressor)
        return pr

    @property
    def form(self) -> str:
        """The form in use: "dense", "dual" or "matrix-free"."""
        return self._fitted().form.name

    @property
    def tolerance(self) -> float:
        """Bound on the relative error of the variances against exact arithmetic.

        For the matrix-free form, of the iteration; the others count the rounding of the
        derivatives too, which in float32 is by far the larger part.
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
        flat = differentiation.regressor.flat
        memory = MEMORY_SHARE * available(flat.device) if self._memory is None else self._memory
        return Problem(
            parameters=len(flat),
            samples=samples,
            outputs=differentiation.outputs,
            numbers=differentiation.numbers,
            itemsize=flat.element_size(),
            ridge=self._given_ridge,
            dual=self._hessian == "gauss-newton" and self._regulariser is None,
            exact=self._hessian == "exact",
            memory=int(memory),
        )

    def _fitted(self) -> Fit:
        if self._fit is None:
            raise NotFittedError(NO_FIT.format("fit(x, y)"))
        return self._fit

    def _noiseless(self) -> Calibration:
        """The calibration for what noise should not be in; says where it is."""
        own = self.calibration
        if self.report is not None and own.noise.name == "none":
            notify(
                'With noise="none" the scale holds the noise too: errors of parameters, means and '
                "integrals come out too wide. For those fit anew, then set_scale(residual_scale)."
            )
        return own

    def _given(self, x: Any, y: Any = None) -> tuple[Fit, Samples]:
        """The fit and the data, on which a loaded fit finds its way to differentiate."""
        samples = self._fitted().samples(x, y)
        self._fit = self._fitted().ready(samples)
        return self._fit, samples
