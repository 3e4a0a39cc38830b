"""The ridge-optimal readout for a trained model, in a copy of the model.

The sums of a fit (its Gram, and its residuals' moments) determine the readout that minimises the
squared error at a ridge, so no further pass over the data is needed. `refitted` chooses the ridge
by the evidence, solves for the weights, compares the errors before and after, writes the weights
into a copy of the model, and gives the sums about the new weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..calibration.evidence import evidence, ridge_solution
from ..calibration.paper import most_evident_ridge
from ..calibration.words import LARGEST_DOUBT
from ..data.batches import Batch
from ..losses import MSE, Loss
from ..models.shadow import independent, unwrapped
from ..posterior.gram import Gram
from ..posterior.posterior import Posterior
from ..readout.heads import named_head, own_parameters
from ..readout.readout import AnyReadout, Readout
from ..statistics.statistics import Statistics
from .accumulation import Weighing, accumulated, settled
from .binding import Binding
from .distributed import Job

__all__ = ["Refitted"]

_PRINTED_TARGETS = 6
"""Largest number of targets whose errors are printed."""

_SMALLEST_GAIN = 0.999
"""Ratio of errors below which a refit counts as better."""


@dataclass(frozen=True)
class Refitted:
    r"""What a refit has changed; print it to read it.

    Attributes:
        ridge: $\varsigma^2$, chosen by the evidence.
        rows: Number of rows that the readout was refitted on.
        before: Root mean square (weighted) error of the model as it was, one entry per target.
        after: Root mean square error of the model refitted to the training rows.
        judged: Number of validation rows that both errors were taken on. None where the errors are
            those of training rows, each left out of the readout by generalised cross-validation
            (Golub, Heath, Wahba 1979).
    """

    ridge: float
    rows: int
    before: Tensor
    after: Tensor
    judged: int | None = None

    @property
    def better(self) -> bool | None:
        """Whether errors are smaller by a thousandth or more, in the geometric mean over targets.

        None without validation rows. Training rows cannot tell: the layers before the readout have
        seen them, and their errors shrink on every refit.
        """
        if self.judged is None:
            return None
        ratio = (self.after / self.before).log().mean().exp()
        return bool(ratio < _SMALLEST_GAIN)

    def __str__(self) -> str:
        changes = []
        for before, after in zip(self.before.tolist(), self.after.tolist(), strict=True):
            changes.append(f"{before:.4g} -> {after:.4g}")
        if len(changes) > _PRINTED_TARGETS:
            changes = [*changes[:_PRINTED_TARGETS], f"... ({len(changes)} targets)"]
        rmse = f"RMSE {', '.join(changes)} on "
        if self.judged is None:
            verdict = (
                f"{rmse}training rows left out of the readout; refit(valid, add=False) shows "
                "whether other rows gain"
            )
        elif self.better:
            verdict = f"{rmse}{self.judged} validation rows"
        else:
            verdict = (
                f"The refitted readout is not better ({rmse}{self.judged} validation rows): keep "
                "the model as it is"
            )
        return f"Readout refitted on {self.rows} rows at ridge {self.ridge:.4g}.\n  {verdict}."


@dataclass(frozen=True)
class _BestReadout:
    """The ridge-optimal readout of some rows.

    Attributes:
        ridge: The ridge of largest evidence.
        change: What to add to the readout's weights, (D, K).
        degrees: How many weights the rows determine at that ridge, one entry per target.
    """

    ridge: float
    change: Tensor
    degrees: Tensor


def refitted(
    binding: Binding,
    statistics: Statistics,
    posterior: Posterior,
    weighing: Weighing,
    valid: Callable[[], Iterable[Batch]] | None,
    *,
    add: bool,
    processes: Job,
) -> tuple[Binding, Statistics, Refitted]:
    """Refit the readout in a copy of the model.

    Args:
        binding: The tie to the model of the fit.
        statistics: The sums of the fit.
        posterior: The posterior of these sums.
        weighing: The loss and sample weights of the fit.
        valid: Begins to read validation rows, by which to judge; None for none.
        add: Whether to refit on the validation rows too, after they have judged.
        processes: The processes that make this call together, this one among them.

    Returns:
        The tie to the copy, the sums about its weights, and what has changed.

    Raises:
        ValueError: The loss is not the squared error, the readout has no weights that can be set,
            or mixed precision leaves too few digits.
    """
    model = unwrapped(binding.user_model.model)
    readout = _settable_readout(model, binding.current(), weighing.loss)
    best = _best_of_all(processes, readout, statistics.gram, posterior)

    # Training rows are judged as if each had been left out, by their mean leverage.
    judging_sums = statistics.gram_sums
    leverage = best.degrees / statistics.gram.informative
    new_rows: Statistics | None = None
    if valid is not None:
        plan = statistics.plan(statistics.gram.precision)
        rows_here = accumulated(readout, valid(), weighing, plan)
        # The rows of all processes, where there are several.
        new_rows = settled(processes.statistics(rows_here))
        judging_sums = new_rows.gram_sums
        # Validation rows did not determine the readout: they have no leverage.
        leverage = torch.zeros_like(best.degrees)
    changed_sums = judging_sums.after(best.change)  # refuses rows without residuals
    before = _rmse(judging_sums.sums, leverage)
    after = _rmse(changed_sums.sums, leverage)

    if new_rows is not None and add:
        statistics = statistics.clone().merge(new_rows)
        posterior = Posterior.from_gram(statistics.gram, posterior.ridge)
        best = _best_of_all(processes, readout, statistics.gram, posterior)

    copied_model = independent(model)
    heads = [named_head(copied_model, name) for name in readout.heads]
    columns = readout.columns_of(heads)
    columns.write(readout.weights + best.change)
    # The sums follow the weights as the model's precision rounded them.
    statistics = statistics.after(columns.weights() - readout.weights)
    report = Refitted(
        ridge=best.ridge,
        rows=statistics.gram.count,
        before=before,
        after=after,
        judged=None if new_rows is None else new_rows.gram.count,
    )
    return binding.bound_to_copy(copied_model), statistics, report


def _best_of_all(
    processes: Job, readout: Readout, gram: Gram, posterior: Posterior
) -> _BestReadout:
    """The best readout as the first process computes it: other processes may round differently."""
    best = None
    if processes.rank == 0:
        best = _best(readout, gram, posterior)
    return processes.from_first(best)


def _best(readout: Readout, gram: Gram, posterior: Posterior) -> _BestReadout:
    """The ridge-optimal readout of the rows of a Gram."""
    score = evidence(gram, posterior, readout.weights, readout.biases)
    ridge, *_ = most_evident_ridge(score, float(posterior.eigenvalues.max()))
    doubt = posterior.with_ridge(ridge).doubt
    if doubt > LARGEST_DOUBT:
        raise ValueError(
            "The Gram matrix was computed in mixed precision, and rounding may change the readout "
            f"by a relative {doubt:.2g} at ridge {ridge:.2g}. Fit with precision='double' first."
        )
    change, degrees = ridge_solution(gram, readout.weights, readout.biases, ridge)
    return _BestReadout(ridge, change, degrees)


def _rmse(gram: Gram, leverage: Tensor) -> Tensor:
    """Root mean square (K,) of residuals, divided by 1 - h for the mean leverage h.

    Args:
        gram: The sums of the rows.
        leverage: h: how many weights these rows determined, over their number, () or (K,).
    """
    assert gram.square is not None
    square = gram.square.diagonal() if gram.square.ndim == 2 else gram.square
    return (square / gram.informative).sqrt() / (1 - leverage)


def _settable_readout(model: nn.Module, readout: AnyReadout, loss: Loss) -> Readout:
    """The readout, if it has weights that can be set to the least-squares solution alone."""
    if type(loss) is not MSE:
        raise ValueError(f"refit solves least squares, loss='mse', not {type(loss).__name__}.")
    if not isinstance(readout, Readout):
        raise ValueError("refit needs a readout with weights. Pass layer= instead of features=.")
    if not readout.linear:
        raise ValueError(
            "The output is not linear in the readout's weights, so there is no closed-form "
            "optimum. Let forward= return the output before the nonlinearity, with targets to "
            "match."
        )
    heads = [named_head(model, name) for name in readout.heads]
    if _shares_parameters(model, heads) or _computes_weights(readout, heads):
        raise ValueError(
            f"Weights of the readout ({', '.join(readout.heads)}) are shared with another layer or "
            "computed from other parameters, so they cannot be changed alone. First give the "
            "readout its own parameters: untie them, or call remove_parametrizations."
        )
    return readout


def _shares_parameters(model: nn.Module, heads: list[nn.Module]) -> bool:
    """Whether a parameter of the heads is one of another module too."""
    uses = _uses_of_parameters(model.modules())
    uses_by_heads = _uses_of_parameters(heads)
    return any(uses[parameter] > count for parameter, count in uses_by_heads.items())


def _uses_of_parameters(modules: Iterable[nn.Module]) -> Counter[int]:
    """How many of some modules own a parameter, by the id of the parameter."""
    uses: Counter[int] = Counter()
    for module in modules:
        uses.update(id(parameter) for parameter in own_parameters(module).values())
    return uses


def _computes_weights(readout: Readout, heads: list[nn.Module]) -> bool:
    """Whether the weights that are to be set are computed from other parameters."""
    if readout.kind == "parameters":
        return False  # the parameters themselves are set
    return any("weight" not in head._parameters for head in heads)
