"""Another readout for a trained model: the ridge-optimal one, in a copy.

The sums that a fit has kept give it, and the sums about it, without another pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from ..calibration.evidence import evidence, ridge_solution
from ..calibration.report import LARGEST_DOUBT
from ..calibration.search import most_evident_ridge
from ..data.batches import Batch
from ..data.storage import Snapshot
from ..losses import MSE, Loss
from ..models.shadow import independent, unwrapped
from ..posterior.gram import Gram
from ..posterior.posterior import Posterior
from .accumulation import Weighing, accumulate, settled
from .distributed import Job
from .merging import combined
from .readout.binding import Binding
from .readout.cases import CASES
from .readout.heads import own_parameters
from .readout.tap import AnyTap, Tap
from .statistics.statistics import Statistics


@dataclass(frozen=True)
class Refitted:
    r"""What a refit has changed; print it.

    Attributes:
        ridge: $\varsigma^2$, the evidence's.
        rows: that the readout was refitted on.
        before: root mean square (weighted) error of the model as it was, one entry per target.
        after: of the model refitted to the training rows.
        judged: validation rows that both were taken on. None: it was training rows, each left out
            of the readout by generalised cross-validation (Golub, Heath, Wahba 1979).
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
        ratio = (self.after / self.before).log().mean().exp()
        return None if self.judged is None else bool(ratio < 0.999)

    def __str__(self) -> str:
        both = zip(self.before.tolist(), self.after.tolist(), strict=True)
        pairs = [f"{before:.4g} -> {after:.4g}" for before, after in both]
        more = [f"... ({len(pairs)} targets)"] if len(pairs) > 6 else []
        said = f"RMSE {', '.join(pairs[:6] + more)} on "
        said += "training rows" if self.judged is None else f"{self.judged} validation rows"
        said = {
            True: said,
            False: f"The refitted readout is no better ({said}): keep the model as it is",
            None: f"{said} left out of the readout: whether other rows gain, refit(valid, "
            "add=False) tells",
        }[self.better]
        return f"Readout refitted on {self.rows} rows at ridge {self.ridge:.4g}.\n  {said}."


def refitted(
    binding: Binding,
    known: Statistics,
    posterior: Posterior,
    weighing: Weighing,
    valid: Callable[[], Iterable[Batch]] | None,
    *,
    add: bool,
    others: Job,
) -> tuple[Binding, Statistics, Refitted]:
    """The tie to the copy, the sums about its weights, and what has changed.

    `valid` gives rows to judge by, with those of `others`, and if `add` to refit on afterwards.
    """
    model = unwrapped(binding.model)
    tap, judge, judged = _settable(model, binding.current(), weighing.loss), known.gram, None
    ridge, change, degrees = _best_of_all(others, tap, known.gram, posterior)
    if valid is not None:
        plan = known.plan(known.gram.precision)
        part = accumulate(None, lambda _: tap, valid(), weighing, plan)
        new = others.statistics(part, lambda parts: settled(combined(parts)))
        judge, degrees, judged = new.gram, degrees * 0, new.gram.count
    before, after = (_rmse(gram, degrees) for gram in (judge, judge.after(change)))
    if valid is not None and add:
        known = known.clone().merge(new)
        whole = Posterior.from_gram(known.gram, posterior.ridge)
        ridge, change, _ = _best_of_all(others, tap, known.gram, whole)
    model = independent(model)
    columns = CASES[tap.case]([*map(model.get_submodule, tap.heads)]).columns
    columns.write(tap.weights + change)
    known = known.after(columns.weights() - tap.weights)  # as they are rounded
    return binding.copied(model), known, Refitted(ridge, known.gram.count, before, after, judged)


def _best_of_all(
    others: Job, tap: Tap, gram: Gram, posterior: Posterior
) -> tuple[float, Tensor, Tensor]:
    """What the first process finds best, since others may round otherwise."""

    def best() -> Snapshot:
        ridge, change, degrees = _best(tap, gram, posterior)
        return Snapshot({"change": change, "degrees": degrees}, {"ridge": ridge})

    found = others.shared(best)
    return found.header["ridge"], found.tensors["change"], found.tensors["degrees"]


def _best(tap: Tap, gram: Gram, posterior: Posterior) -> tuple[float, Tensor, Tensor]:
    """The evidence's ridge, the change of the weights at it, and how many the rows determine."""
    score = evidence(gram, posterior, tap.weights, tap.biases)
    ridge, *_ = most_evident_ridge(score, float(posterior.eigenvalues.max()))
    if (doubt := posterior.with_ridge(ridge).doubt) > LARGEST_DOUBT:
        raise ValueError(
            f"The fit's products were of mixed precision, whose rounding may change the readout by "
            f"{doubt:.2g} of itself at its ridge, {ridge:.2g}. Fit with precision='double' first."
        )
    return ridge, *ridge_solution(gram, tap.weights, tap.biases, ridge)


def _rmse(gram: Gram, degrees: Tensor) -> Tensor:
    """Root mean square (K,) of residuals over 1 - h, h the mean leverage of a fit's `degrees`."""
    assert gram.square is not None
    square = gram.square.diagonal() if gram.square.ndim == 2 else gram.square
    return (square / gram.informative).sqrt() / (1 - degrees / gram.informative)


def _settable(model: nn.Module, tap: AnyTap, loss: Loss) -> Tap:
    if type(loss) is not MSE:
        raise ValueError(f"refit solves least squares, loss='mse', not {type(loss).__name__}.")
    if not isinstance(tap, Tap):
        raise ValueError("refit needs a readout with weights: give layer= instead of features=.")
    if not tap.linear:
        raise ValueError(
            "The output is not linear in the readout's weights: there is no best in closed form. "
            "Let forward= return the output before the nonlinearity, with targets to match."
        )
    heads = [*map(model.get_submodule, tap.heads)]
    owned = {id(p) for head in heads for p in own_parameters(head).values()}
    others = [one for one in model.modules() if one not in heads]
    tied = any(id(p) in owned for one in others for p in own_parameters(one).values())
    by_parameters = tap.case == "parameters"  # else by weights, which others may bring forth
    computed = not by_parameters and any("weight" not in head._parameters for head in heads)
    if tied or computed:
        raise ValueError(
            f"Weights of the readout ({', '.join(tap.heads)}) are those of another layer too, or "
            "computed from other parameters, so they cannot be changed alone. Give the readout "
            "parameters of its own first: untie them, or remove_parametrizations."
        )
    return tap
