"""From the training rows to a solved form: dense, dual or matrix-free.

`solved_form` goes once through the training data and hands what it gathers to the form that
`forms.form_name` has chosen: the dense form takes a (P, P) Gram matrix (or the exact Hessian), the
dual form all tangents, the matrix-free form all tangents or a way to compute them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ...data.samples import SampleBatch
from ...posterior.gram import Gram
from ..derivatives.tangents import Tangents
from .dense_form import DenseForm, Hessian
from .dual_form import DualForm, group_size, grouped
from .exact_hessian import Penalty, exact_hessian
from .forms import Form, Problem
from .matrix_free import MatrixFreeForm, RecomputedTangents
from .pseudo_hessian import TrainingRows, samples_at_once

PRECONDITIONING_ROWS = 2000
"""Most rows of the preconditioner, whose factorisation then takes about a second."""


def solved_form(
    training: TrainingRows, problem: Problem, name: str, penalty: Penalty | None, tolerance: float
) -> Form:
    """Go through the training data and solve.

    Args:
        training: The training data; its totals are filled during the pass.
        problem: The sizes and options of the fit.
        name: "dense", "dual" or "matrix-free"; see `forms` for what each needs.
        penalty: The regulariser, if any.
        tolerance: Relative error that the matrix-free form may have.
    """
    if name == "dense":
        return _dense(training, problem, penalty)
    if name == "dual":
        return _dual(training, problem)
    return _matrix_free(training, problem, penalty, tolerance)


def _dense(training: TrainingRows, problem: Problem, penalty: Penalty | None) -> DenseForm:
    """The Hessian, Gauss-Newton or exact, plus the regulariser's, factorised."""
    differentiation = training.differentiation
    parameters = differentiation.regressor.parameters
    penalty_hessian = None if penalty is None else penalty.local.hessian()
    if problem.exact:
        data_hessian, epsilon = _exact_data_hessian(training)
    else:
        data_hessian = _gauss_newton_hessian(training)
        epsilon = torch.finfo(torch.float64).eps
    if penalty_hessian is None:
        matrix = data_hessian
        data = None
    else:
        matrix = data_hessian + penalty_hessian
        data = data_hessian
    hessian = Hessian(
        matrix=matrix,
        names=list(zip(parameters.names, parameters.sizes, strict=True)),
        rows=problem.rows,
        flat_rows=training.totals.flat_rows,
        data=data,
        exact=problem.exact,
        epsilon=epsilon,
    )
    return DenseForm.of(hessian, problem.ridge)


def _gauss_newton_hessian(training: TrainingRows) -> Tensor:
    """The sum of J^T Lambda J, (P, P)."""
    regressor = training.differentiation.regressor
    gram = Gram(len(regressor), device=regressor.flat.device)
    for _, _, tangents in training.pieces(_dense_samples(training)):
        gram.update(tangents.matrix().flatten(0, 1))
    return gram.matrix


def _exact_data_hessian(training: TrainingRows) -> tuple[Tensor, float]:
    """The exact Hessian without the regulariser, and the machine epsilon it was computed in."""
    for _ in training.pieces(_dense_samples(training)):
        pass  # the pass is for the totals alone
    differentiation = training.differentiation
    return exact_hessian(
        differentiation.regressor, differentiation.shape, training.samples, training.loss
    )


def _dense_samples(training: TrainingRows) -> int:
    """How many samples to write out at once; each needs about four copies of its rows (K, P)."""
    differentiation = training.differentiation
    return samples_at_once(4 * differentiation.outputs * len(differentiation.regressor))


def _dual(training: TrainingRows, problem: Problem) -> DualForm:
    """The kernel of all training rows, factorised."""
    samples = group_size(problem.numbers_per_sample, problem.outputs)
    pieces = (tangents for _, _, tangents in training.pieces(samples))
    return DualForm.of(list(grouped(pieces, samples)), problem.ridge)


def _matrix_free(
    training: TrainingRows, problem: Problem, penalty: Penalty | None, tolerance: float
) -> MatrixFreeForm:
    """The training rows, stored or recomputed for each product, with a preconditioner.

    Half of the memory is for the rows, a quarter for the preconditioner, and a quarter for the
    vectors of conjugate gradients.
    """
    width = problem.parameters
    # Systems that are solved at once: each needs about eight float64 vectors of length P.
    together = max(1, min(32, int(problem.memory / 4 / (8 * 8 * width))))
    samples = samples_at_once(problem.numbers_per_sample * together)

    # Evenly spaced samples for the preconditioner, as many as fit into its share of the memory.
    samples_in_memory = problem.memory / 4 / (problem.itemsize * problem.numbers_per_sample)
    most_samples = max(1.0, min(PRECONDITIONING_ROWS / problem.outputs, samples_in_memory))
    stride = max(1, math.ceil(problem.samples / most_samples))

    stored: list[Tangents] = []
    batches: list[tuple[SampleBatch, Tensor | None]] = []  # of tangents that are not stored
    spaced: list[Tangents] = []
    samples_before = 0
    for batch, root, tangents in training.pieces(samples):
        count = tangents.shape[0]
        # Samples whose number in the whole data is a multiple of the stride.
        index = torch.arange(count)[-samples_before % stride :: stride]
        samples_before += count
        if len(index):
            spaced.append(tangents.take(index))
        if problem.tangent_bytes <= problem.memory / 2:
            stored.append(tangents)
        else:
            batches.append((batch, root))

    rows: Iterable[Tangents]
    if stored:
        rows = list(grouped(emptied(stored), samples))
    else:
        rows = RecomputedTangents(training.differentiation, batches)
    preconditioner = _preconditioner(spaced, samples_before, problem)
    return MatrixFreeForm(
        rows,
        ridge=problem.ridge,
        tolerance=tolerance,
        width=width,
        device=training.differentiation.regressor.flat.device,
        penalty=None if penalty is None else penalty.product,
        preconditioner=preconditioner.solve,
        together=together,
    )


def _preconditioner(spaced: list[Tangents], samples: int, problem: Problem) -> DualForm:
    """The dual form of some of the samples, at their share of the ridge."""
    size = group_size(problem.numbers_per_sample, problem.outputs)
    rows = list(grouped(emptied(spaced), size))
    share = sum(group.shape[0] for group in rows) / samples
    # The ridge must exceed the kernel's rounding; with a larger one it is still a preconditioner.
    trace = sum(float(group.squares().sum()) for group in rows)
    return DualForm.of(rows, max(problem.ridge * share, 1e-12 * trace))


def emptied(batches: list[Tangents]) -> Iterator[Tangents]:
    """The batches in their order, each of which the list lets go."""
    batches.reverse()
    while batches:
        yield batches.pop()
