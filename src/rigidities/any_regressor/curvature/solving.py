"""From the training rows to a form that answers: dense, dual or matrix-free."""

from __future__ import annotations

import math

import torch

from ...posterior.gram import Gram
from ..derivatives.tangents import Gathering, Tangents
from .dense_form import DenseForm, Hessian
from .dual_form import DualForm
from .exact_hessian import Penalty, exact_hessian
from .forms import Form, Problem
from .matrix_free import MatrixFreeForm, Recomputed, Rows, Transformed, preconditioner
from .pseudo_hessian import TrainingRows

PRECONDITIONING_ROWS = 2000
"""Rows of the preconditioner: its factorisation takes about a second."""


def solved(
    training: TrainingRows, problem: Problem, form: str, penalty: Penalty | None, tolerance: float
) -> Form:
    """Go through the training data and solve; see `forms` for what each form needs."""
    if form == "dense":
        return _dense(training, problem, penalty)
    if form == "dual":
        gathered = Gathering(problem.samples)
        for *_, tangents in training(problem.numbers):
            gathered.add(tangents)
        return DualForm.of(gathered.tangents(), problem.ridge)
    return _matrix_free(training, problem, penalty, tolerance)


def _dense(training: TrainingRows, problem: Problem, penalty: Penalty | None) -> DenseForm:
    regressor = training.differentiation.regressor
    parameters = regressor.parameters
    width = 4 * training.differentiation.outputs * len(parameters)
    matrix = None if penalty is None else penalty.local.hessian()
    epsilon = torch.finfo(torch.float64).eps
    if problem.exact:
        for _ in training(width):  # for the totals alone
            pass
        shape = training.differentiation.shape
        data, epsilon = exact_hessian(regressor, shape, training.samples, training.loss)
    else:
        gram = Gram(len(parameters), device=regressor.flat.device)
        for *_, tangents in training(width):
            gram.update(tangents.matrix().flatten(0, 1))
        data = gram.matrix
    whole, apart = (data, None) if matrix is None else (data + matrix, data)
    names, flat = list(zip(parameters.names, parameters.sizes, strict=True)), training.totals.zeros
    hessian = Hessian(whole, names, problem.rows, flat, apart, problem.exact, epsilon)
    return DenseForm.of(hessian, problem.ridge)


def _matrix_free(
    training: TrainingRows, problem: Problem, penalty: Penalty | None, tolerance: float
) -> MatrixFreeForm:
    width, differentiation = problem.parameters, training.differentiation
    # Half of the memory for the rows, a quarter for the preconditioner, a quarter for the vectors.
    factored = problem.numbers < width * problem.outputs / 2
    way = Recomputed if factored else Transformed
    kept = problem.held <= problem.memory / 2
    together = max(1, min(32, int(problem.memory / 4 / (8 * 8 * width))))
    # evenly spaced rows for the preconditioner, as many as its share of the memory holds
    fitting = problem.memory / 4 / (problem.itemsize * problem.numbers)
    most = max(1.0, min(PRECONDITIONING_ROWS / problem.outputs, fitting))
    stride, seen = max(1, math.ceil(problem.samples / most)), 0
    rows, sample = list[Rows](), list[Tangents]()
    for batch, root, tangents in training(problem.numbers * together):
        count = tangents.shape[0]
        index, seen = torch.arange(count)[-seen % stride :: stride], seen + count
        if len(index):
            sample.append(tangents.take(index))
        rows.append(tangents if kept else way(differentiation, batch, root))
    few, device = Tangents.join(sample), differentiation.regressor.flat.device
    near = preconditioner(few, few.shape[0] / problem.samples, problem.ridge)
    bend = None if penalty is None else penalty.product
    setting = (problem.ridge, tolerance, width, device)
    return MatrixFreeForm(rows, *setting, penalty=bend, preconditioner=near, together=together)
