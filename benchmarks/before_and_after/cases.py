"""What is computed of each problem with `LastLayerRigidity`.

`CASES` lists the cases with the problems that they run on. A case gets a record, the verbs and the
problem. `USES` lists what is done with a calibrated object; each use gets the object too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from benchmarks.before_and_after.problems import LOWEST, Problem
from benchmarks.before_and_after.results import Record
from benchmarks.before_and_after.verbs import Derivatives, Method, Verbs, full, paper

REPORT_FIELDS = (
    *("ridge", "scale", "noise_level", "value", "nll", "nll_constant", "constant"),
    *("gain", "gain_error", "gain_without", "effective_rank", "condition", "width"),
    *("rows", "used", "samples", "duplicates", "zero_curvature", "seen", "fixed"),
    *("steps", "at_edge", "criterion", "mismatch", "worth"),
)
PREDICTION_FIELDS = (
    *("mean", "std", "variance", "epistemic", "noise", "rigidity", "from_inputs", "unit", "centre"),
)


def seeded(seed: int = 0) -> torch.Generator:
    """A random generator with a seed."""
    return torch.Generator().manual_seed(seed)


def fitted(verbs: Verbs, problem: Problem, data: Any = None, **changes: Any) -> Any:
    """A fit of the problem, or of other data, with some options changed."""
    uq = rg.LastLayerRigidity(problem.model, **problem.binding)
    options = replace(problem.fit, **changes)
    return verbs.fit(uq, problem.train if data is None else data, options)


def halves(data: Any) -> tuple[Any, Any]:
    """Training data in two parts."""
    if isinstance(data, tuple):
        half = len(data[0]) // 2
        return tuple(t[:half] for t in data), tuple(t[half:] for t in data)
    if len(data) == 1:  # one batch, a dictionary of tensors
        half = len(data[0]["y"]) // 2
        first = {name: tensor[:half] for name, tensor in data[0].items()}
        second = {name: tensor[half:] for name, tensor in data[0].items()}
        return [first], [second]
    half = len(data) // 2
    return data[:half], data[half:]


# --- What is recorded of an object ---


def record_fit(record: Record, uq: Any) -> None:
    """The sums of a fit and what follows from them alone."""
    record.fields(uq.gram, ("matrix", "count", "cross", "square"))
    record.attempt("ridge", lambda: uq.ridge)
    record.attempt("scale", lambda: uq.scale)
    record.fields(uq.posterior, ("eigenvalues", "effective_rank", "condition"))


def record_report(record: Record, report: Any) -> None:
    """The report of a calibration, field by field and as text."""
    record.fields(report, REPORT_FIELDS)
    record.attempt("remarks", lambda: "\n".join(report.remarks))
    record.attempt("warnings", lambda: "\n".join(report.warnings))
    record.attempt("text", lambda: str(report))


def record_bars(record: Record, verbs: Verbs, p: Any) -> None:
    """The most important numbers of a prediction."""
    record.fields(p, ("mean", "std", "epistemic", "noise", "rigidity", "centre"))
    record.attempt("interval 0.9", lambda: verbs.interval(p, 0.9))


# --- Fits ---


def fit_sums(record: Record, verbs: Verbs, problem: Problem) -> None:
    """One fit, its features, and its error bars before a calibration."""
    uq = fitted(verbs, problem)
    record_fit(record, uq)
    record.attempt("features", lambda: uq.features(problem.test))
    record.attempt("summary", uq.summary)
    p = uq.predict(problem.test)
    record.fields(p, ("mean", "std", "epistemic", "noise", "rigidity"))


def added_and_removed(record: Record, verbs: Verbs, problem: Problem) -> None:
    """`partial_fit`, `forget` and `merge` of two halves, and what a calibration makes of them."""
    first, second = halves(problem.train)
    added = fitted(verbs, problem, first)
    added.partial_fit(second)
    record_fit(record.under("partial_fit"), added)
    record.run("calibrated", calibrate_and_record, verbs, added, problem, paper())
    record.attempt("stale before", lambda: added.calibration_report.stale)
    # Rows of atoms cannot be recognised, so they are removed without a check.
    added.forget(first, check=not problem.binding)
    record_fit(record.under("forget"), added)
    record.attempt("stale after", lambda: added.calibration_report.stale)
    merged = fitted(verbs, problem, first).merge(fitted(verbs, problem, second))
    record_fit(record.under("merge"), merged)


def calibrate_and_record(
    record: Record, verbs: Verbs, uq: Any, problem: Problem, method: Method
) -> None:
    """A calibration of an object, its report and its bars."""
    verbs.calibrate(uq, problem.valid, method)
    record_report(record.under("report"), uq.calibration_report)
    record_bars(record, verbs, uq.predict(problem.test))


def kept_rows(record: Record, verbs: Verbs, problem: Problem) -> None:
    """How many training rows the fit keeps, as the full model shows it."""
    for rows in (0, 80):
        uq = fitted(verbs, problem, keep_rows=rows)
        method = full(noise="constant")
        record.run(f"{rows} rows", calibrate_and_record, verbs, uq, problem, method)


def precisions(record: Record, verbs: Verbs, problem: Problem) -> None:
    """Products of the Gram in the precision of the features, and in float64."""
    for precision in ("mixed", "double"):
        uq = fitted(verbs, problem, precision=precision)
        record_fit(record.under(precision), uq)
        record.attempt(f"{precision}/rounding", lambda uq=uq: uq.gram.rounding_error)
        record.run(precision, calibrate_and_record, verbs, uq, problem, paper())


def losses(record: Record, verbs: Verbs, problem: Problem) -> None:
    """Losses by name and as functions, with a calibration each."""
    functions = {
        "log-cosh": "log-cosh",
        "half the square": lambda prediction, target: 0.5 * (prediction - target).square(),
        "pseudo-Huber": lambda prediction, target: (prediction - target).square().add(1).sqrt(),
    }
    for name, loss in functions.items():
        uq = fitted(verbs, problem, loss=loss)
        record_fit(record.under(name), uq)
        record.run(name, calibrate_and_record, verbs, uq, problem, paper())


def novelty(record: Record, verbs: Verbs, problem: Problem) -> None:
    """How unfamiliar inputs look to each layer."""
    uq = fitted(verbs, problem, novelty=True)
    verbs.calibrate(uq, problem.valid, paper())
    record.fields(uq.novelty(problem.test), ("by_layer", "largest", "layer", "layers"))
    p = uq.predict(problem.test)
    record.under("prediction").fields(p, ("mean", "std", "novelty"))
    record.under("report").fields(uq.calibration_report, ("novelty", "novelty_usual"))


# --- Calibrations ---


def used_methods() -> dict[str, Method]:
    """The methods that every problem is calibrated with, before everything is used."""
    return {"full": full(), "paper": paper(criterion="evidence", noise="bayes")}


def other_methods(problem: Problem) -> dict[str, Method]:
    """Further methods that every problem is calibrated with."""
    return {
        "paper, nll": paper(),
        "paper, constant": paper(noise="constant"),
        "paper, function": paper(noise=problem.noise),
    }


def more_methods(problem: Problem) -> dict[str, Method]:
    """All the rest, for the plain problem."""
    return {
        "full, constant": full(noise="constant"),
        "full, function": full(noise=problem.noise),
        "full, constant and no guard": full(noise="constant", guard=False),
        "full, wide support": full(support=(-9.0, 9.0)),
        "full, no guard": full(guard=False),
        "full, no optimism": full(optimism=False),
        "full, fixed ridge": full(ridge=0.5),
        "paper, bayes": paper(noise="bayes"),
        "paper, bins": paper(criterion="bins"),
        "paper, evidence": paper(criterion="evidence"),
        "paper, evidence and constant": paper(criterion="evidence", noise="constant"),
        "paper, student-t": paper(distribution="student-t"),
        "paper, fixed ridge": paper(ridge=0.5),
        "paper, fixed ridge and constant": paper(ridge=0.5, noise="constant"),
        "paper, wide support": paper(support=(-9.0, 9.0)),
    }


def calibrations(record: Record, verbs: Verbs, problem: Problem) -> None:
    """The methods that every problem is calibrated with, and everything that follows them."""
    for name, method in used_methods().items():
        uq = fitted(verbs, problem)
        record.run(name, calibrate_and_record, verbs, uq, problem, method)
        for use_name, use in USES.items():
            record.run(f"{name}/{use_name}", use, verbs, problem, uq)
    uq = fitted(verbs, problem)
    for name, method in other_methods(problem).items():
        record.run(name, calibrate_and_record, verbs, uq, problem, method)


def more_calibrations(record: Record, verbs: Verbs, problem: Problem) -> None:
    """All other methods."""
    uq = fitted(verbs, problem)
    for name, method in more_methods(problem).items():
        record.run(name, calibrate_and_record, verbs, uq, problem, method)


def bounded_calibrations(record: Record, verbs: Verbs, problem: Problem) -> None:
    """Distributions with a bound that targets reach."""
    uq = fitted(verbs, problem)
    support = (LOWEST, None)
    methods = {
        "full": full(support=support),
        "full, constant": full(support=support, noise="constant"),
        "paper": paper(support=support, noise="constant"),
    }
    for name, method in methods.items():
        record.run(name, calibrate_and_record, verbs, uq, problem, method)
        record.run(f"{name}/prediction", prediction, verbs, problem, uq)


def without_validation_rows(record: Record, verbs: Verbs, problem: Problem) -> None:
    """Calibrations on the training rows that the fit kept, or on training data."""
    calls = {
        "kept rows": (None, full(), None),
        "training data": (None, full(), problem.train),
        "training data and validation rows": (problem.valid, full(), problem.train),
        "loo": (None, paper(criterion="loo"), problem.train),
        "loo, constant": (None, paper(criterion="loo", noise="constant"), problem.train),
    }
    uq = fitted(verbs, problem)
    for name, (data, method, train) in calls.items():
        record.run(name, calibration_on, verbs, uq, problem, data, method, train)


def calibration_on(
    record: Record,
    verbs: Verbs,
    uq: Any,
    problem: Problem,
    data: Any,
    method: Method,
    train: Any,
) -> None:
    """A calibration on given data."""
    verbs.calibrate(uq, data, method, train=train)
    record_report(record.under("report"), uq.calibration_report)
    record_bars(record, verbs, uq.predict(problem.test))


def conformal(record: Record, verbs: Verbs, problem: Problem) -> None:
    """Intervals with a guarantee: for all rows, by groups, and by fifths of the bar."""
    calls = {
        "paper, all": (paper(), None),
        "paper, by function": (paper(), problem.groups),
        "paper, by bar": (paper(), "bar"),
        "full, by bar": (full(noise="constant"), "bar"),
    }
    for name, (method, groups) in calls.items():
        uq = fitted(verbs, problem)
        record.run(name, conformal_intervals, verbs, uq, problem, method, groups)


def conformal_intervals(
    record: Record, verbs: Verbs, uq: Any, problem: Problem, method: Method, groups: Any
) -> None:
    """Both kinds of intervals at two levels, also after a file."""
    verbs.calibrate(uq, problem.valid, method, conformal=problem.kept, groups=groups)
    p = uq.predict(problem.test)
    for level in (0.5, 0.9):
        record.attempt(f"conformal {level}", lambda level=level: verbs.conformal_interval(p, level))
        record.attempt(f"interval {level}", lambda level=level: verbs.interval(p, level))
    record.attempt("report", lambda: str(uq.calibration_report))
    functions = problem.binding | ({"groups": groups} if callable(groups) else {})
    loaded = saved_and_loaded(verbs, problem, uq, **functions)
    again = loaded.predict(problem.test)
    record.attempt("loaded, conformal 0.9", lambda: verbs.conformal_interval(again, 0.9))


# --- Uses of a calibrated object ---


def prediction(record: Record, verbs: Verbs, problem: Problem, uq: Any) -> None:
    """A prediction and its distribution."""
    p = uq.predict(problem.test)
    y = problem.test_target
    record.fields(p, PREDICTION_FIELDS)
    for level in (0.1, 0.5, 0.95):
        record.attempt(f"quantile {level}", lambda level=level: p.quantile(level))
    for level in (0.5, 0.9):
        record.attempt(f"interval {level}", lambda level=level: verbs.interval(p, level))
    record.attempt("cdf", lambda: p.cdf(y))
    record.attempt("log_prob", lambda: p.log_prob(y))
    record.attempt("crps", lambda: p.crps(y))
    record.attempt("sample", lambda: p.sample(3, seeded()))
    record.attempt("other units", lambda: (p[:4] * 2.0 + 1.0).quantile(0.9))
    record.attempt("call", lambda: uq(*problem.inputs))


def other_predictions(record: Record, verbs: Verbs, problem: Problem, uq: Any) -> None:
    """Predictions of weighted rows, and of uncertain inputs."""
    p = uq.predict(problem.test, sample_weight=problem.weight)
    record_bars(record.under("sample_weight"), verbs, p)
    variances = torch.tensor([0.01, 0.02, 0.0, 0.03], dtype=p.mean.dtype)
    for name, covariance in (("one variance", 0.01), ("matrix", variances.diag() + 0.001)):
        record.run(name, uncertain_inputs, verbs, problem, uq, covariance)


def uncertain_inputs(
    record: Record, verbs: Verbs, problem: Problem, uq: Any, covariance: Any
) -> None:
    """Predictions of uncertain inputs, to first order and by draws."""
    options = {"input_covariance": covariance, "wrt": problem.wrt}
    p = uq.predict(problem.test, **options)
    record.fields(p, ("std", "from_inputs"))
    drawn = uq.predict(problem.test, **options, input_samples=16, generator=seeded())
    record.attempt("from draws", lambda: drawn.from_inputs)


def frozen(record: Record, verbs: Verbs, problem: Problem, uq: Any) -> None:
    """The plain module, with all that it can return."""
    options: dict[str, dict[str, Any]] = {
        "mean, std, epistemic, noise, quantiles": {},
        "std": {"rank": 5},
        "members": {"members": 8, "generator": seeded()},
    }
    for outputs, more in options.items():
        call = lambda: uq.freeze(outputs.split(", "), **more)(*problem.inputs)  # noqa: B023, E731
        record.attempt(outputs, call)


def derived(y: Tensor) -> Tensor:
    """A few functions of all predictions."""
    first, second = y.flatten()[0], y.flatten()[1]
    return torch.stack([first - second, y.mean(), first * second])


def joint(record: Record, verbs: Verbs, problem: Problem, uq: Any) -> None:
    """Several predictions together: covariances, propagation, members."""
    record.attempt("covariance", lambda: uq.covariance(problem.few))
    record.attempt("covariance of two", lambda: uq.covariance(problem.few, problem.test))
    for second_order in (False, True):
        result = uq.propagate(derived, problem.few, second_order=second_order)
        fields = ("mean", "std", "covariance", "shift")
        record.under(f"propagate, second_order={second_order}").fields(result, fields)
    ensemble = verbs.ensemble(uq, 16, seeded())
    inputs = problem.inputs if problem.binding else (problem.inputs[0][-6:],)
    record.attempt("members", lambda: ensemble(*inputs))
    record.attempt("members' mean", lambda: ensemble(*inputs).mean(0))
    record.attempt("members' std", lambda: ensemble(*inputs).std(0))
    values = ensemble.propagate(derived, problem.few)
    record.under("members' propagate").fields(values, ("mean", "std", "covariance"))


def gradients(record: Record, verbs: Verbs, problem: Problem, uq: Any) -> None:
    """Derivatives of the prediction by an input."""
    row = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=problem.test_target.dtype)
    calls: dict[str, Callable[[], Any]] = {
        "exact": lambda: uq.gradient(problem.few, problem.wrt),
        "along": lambda: uq.gradient(problem.few, problem.wrt, along=row),
        "members": lambda: uq.gradient(problem.few, problem.wrt, members=8, generator=seeded()),
    }
    for name, call in calls.items():
        record.run(name, lambda record, call: record.fields(call(), ("mean", "std")), call)
    p, gradient = uq.predict_with_gradient(problem.few, problem.wrt)
    record.under("predict_with_gradient").fields(p, ("mean", "std"))
    record.under("predict_with_gradient/gradient").fields(gradient, ("mean", "std"))
    record.attempt("interval", lambda: gradient.interval(0.9))
    if problem.fit.derivatives is not None:
        record.attempt("scale", lambda: verbs.gradient_scale(uq))


def saved_and_loaded(verbs: Verbs, problem: Problem, uq: Any, **functions: Any) -> Any:
    """The object, written to a file and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "uq.safetensors")
        uq.save(path)
        return verbs.load(path, problem.model, problem.fit, **functions)


def files(record: Record, verbs: Verbs, problem: Problem, uq: Any) -> None:
    """What a loaded object predicts, how far it is from the one saved, and that it goes on."""
    loaded = saved_and_loaded(verbs, problem, uq, **problem.binding)
    p, original = loaded.predict(problem.test), uq.predict(problem.test)
    record_bars(record, verbs, p)
    for name in ("mean", "std"):
        same = torch.equal(getattr(p, name), getattr(original, name))
        record.value(f"{name} as before saving", same)
    record.attempt("report", lambda: str(loaded.calibration_report))
    record.attempt("ridge", lambda: loaded.ridge)
    loaded.partial_fit(problem.valid)
    record_fit(record.under("partial_fit"), loaded)


def refitted(record: Record, verbs: Verbs, problem: Problem, uq: Any) -> None:
    """The readout of the ridge regression, judged on validation rows or not."""
    for name, data, add in (("alone", None, True), ("judged", problem.valid, False)):
        new = uq.refit(data, add=add)
        record.under(name).fields(new.refitted, ("ridge", "rows", "before", "after"))
        record.attempt(f"{name}/text", lambda new=new: str(new.refitted))
        record.run(name, calibrate_and_record, verbs, new, problem, paper())


def selected(record: Record, verbs: Verbs, problem: Problem, uq: Any) -> None:
    """Which inputs to label next."""
    for objective in ("variance", "logdet", "top"):
        result = uq.select(problem.test, 5, objective=objective)
        record.under(objective).fields(result, ("indices", "gains"))


def local_terms(record: Record, verbs: Verbs, problem: Problem, uq: Any) -> None:
    """The terms that sum to each prediction."""
    terms = uq.local(problem.few)
    record.fields(terms, ("features", "owners", "mean", "std", "rigidity", "share"))


def verdicts(record: Record, verbs: Verbs, problem: Problem, uq: Any) -> None:
    """The verdict on the bars of conformal rows, of which there are enough, and the metrics."""
    p = uq.predict(problem.kept)
    y = torch.cat([batch["y"] for batch in problem.kept]) if problem.wrt else problem.kept[1]
    record.run("alone", record_verdict, p, y)
    if y.shape[1] == 1:
        record.run("with report", record_verdict, p, y, uq.calibration_report)
        record.attempt("metrics", lambda: rg.metrics.summary(p, y))


def record_verdict(record: Record, p: Any, y: Tensor, report: Any = None) -> None:
    """A verdict as words."""
    verdict = rg.report.verdict(p, y, calibration=report)
    record.fields(verdict, ("headline", "status"))
    for finding in verdict.findings:
        record.value(finding.subject, f"{finding.status}: {finding.text}")
    record.value("text", str(verdict))


USES: dict[str, Callable[..., None]] = {
    "prediction": prediction,
    "other predictions": other_predictions,
    "frozen": frozen,
    "joint": joint,
    "gradients": gradients,
    "files": files,
    "refitted": refitted,
    "selected": selected,
    "local": local_terms,
    "verdicts": verdicts,
}


def forces(record: Record, verbs: Verbs, problem: Problem) -> None:
    """Derivatives in the loss: weights and targets in other forms."""
    # The model does not take the targets of derivatives, which are not always named here.
    binding = {"forward": lambda model, b: model(b["x"]), "target": lambda b: b["y"]}
    problem = replace(problem, binding=binding, test=[problem.test])
    row_weight = lambda batch: 0.2 + batch["x"][:, 3].square()  # noqa: E731
    derivatives = {
        "default weight": Derivatives("x", target="slope"),
        "weight by row": Derivatives("x", weight=row_weight, target="slope"),
        "without target": Derivatives("x", weight=0.3),
        "target by function": Derivatives("x", weight=0.3, target=lambda batch: batch["slope"]),
    }
    for name, term in derivatives.items():
        uq = fitted(verbs, problem, derivatives=term)
        record_fit(record.under(name), uq)
        # The evidence needs the residuals of all rows, also those of derivatives.
        method = paper() if term.target is None else paper(criterion="evidence", noise="bayes")
        record.run(name, calibrate_and_record, verbs, uq, problem, method)
        if term.target is not None:
            record.attempt(f"{name}/gradient scale", lambda uq=uq: verbs.gradient_scale(uq))


def positional_derivatives(record: Record, verbs: Verbs, problem: Problem) -> None:
    """Derivatives by the first input of batches (x, y)."""
    uq = fitted(verbs, problem, derivatives=Derivatives(0, weight=0.3))
    record_fit(record, uq)
    record.run("paper", calibrate_and_record, verbs, uq, problem, paper())


@dataclass(frozen=True)
class Case:
    """A function that computes results, and the problems that it is for."""

    run: Callable[[Record, Verbs, Problem], None]
    problems: tuple[str, ...]


TABLES = ("plain", "weighted", "masked", "huber", "scaled", "softplus")
ALL = (*TABLES, "atoms", "forces")
CASES: dict[str, Case] = {
    "fit": Case(fit_sums, (*ALL, "bounded")),
    "added and removed": Case(added_and_removed, ALL),
    "kept rows": Case(kept_rows, ("plain",)),
    "precisions": Case(precisions, ("plain", "atoms")),
    "losses": Case(losses, ("plain",)),
    "novelty": Case(novelty, ("plain", "scaled", "atoms")),
    "calibrate": Case(calibrations, ALL),
    "calibrate more": Case(more_calibrations, ("plain",)),
    "calibrate bounded": Case(bounded_calibrations, ("bounded",)),
    "calibrate on training rows": Case(without_validation_rows, ("plain", "weighted")),
    "conformal": Case(conformal, ("plain", "weighted", "atoms")),
    "forces": Case(forces, ("forces",)),
    "positional derivatives": Case(positional_derivatives, ("plain",)),
}
