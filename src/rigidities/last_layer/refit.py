r"""Another readout for a trained model: the ridge-optimal one, in a copy.

A net that was trained by steps has a readout that need not be the best on its own features. The
sums that a fit has kept give the best one (`calibration.ridge_solution`) and the sums about it,
without another pass over the training data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..calibration.ridge_solution import RidgeSolution
from ..data.batches import Batch
from ..losses import MSE
from ..models.shadow import unwrapped
from ..posterior.gram import Gram
from ..posterior.posterior import Posterior
from .accumulation import Statistics, Weighing, accumulate
from .readout.binding import Binding
from .readout.cases import CASES
from .readout.heads import is_linear_map, own_parameters
from .readout.tap import AnyTap


@dataclass(frozen=True)
class Refitted:
    r"""What a refit has changed; print it.

    Attributes:
        ridge: $\varsigma^2$, the evidence's unless it was given.
        rows: that the readout was refitted on.
        before: root mean square of the residuals of the model as it was, one entry per target;
            with sample weights, of the weighted squares.
        after: of the model with the refitted readout.
        judged: the rows that they were taken on.
    """

    ridge: float
    rows: int
    before: Tensor
    after: Tensor
    judged: str

    @property
    def ratio(self) -> float:
        """RMSE after over before, the geometric mean over targets."""
        return float((self.after / self.before).log().mean().exp())

    @property
    def better(self) -> bool:
        """Whether the refitted readout has smaller errors."""
        return self.ratio < 1

    def __str__(self) -> str:
        pairs = list(zip(self.before.tolist(), self.after.tolist(), strict=True))
        listed = ", ".join(f"{before:.4g} -> {after:.4g}" for before, after in pairs[:6])
        listed += f", ... ({len(pairs)} targets)" if len(pairs) > 6 else ""
        said = f"RMSE {listed} ({self.ratio - 1:+.1%})"
        if not self.better:
            said = f"The refitted readout is no better (RMSE {listed}): keep the model as it is."
        where = f"Readout refitted on {self.rows} rows at ridge {self.ridge:.4g}."
        return f"{where}\n  {said}\n  Judged on {self.judged}."


@dataclass(frozen=True)
class Refit:
    """What a refit needs of a fit; refused where the best weights are not known, or not to be set.

    Attributes:
        binding: the tie to the model.
        tap: its readout.
        weighing: loss and weights of the fit.
        ridge: None for the evidence's.
    """

    binding: Binding
    tap: AnyTap
    weighing: Weighing
    ridge: float | None = None

    def __post_init__(self) -> None:
        loss = self.weighing.loss
        if not isinstance(loss, MSE):
            raise ValueError(
                "refit is for loss='mse', whose best weights have a closed form; the fit was made "
                f"with {type(loss).__name__}."
            )
        if not self.tap.heads:
            raise ValueError(
                "refit sets the readout's weights, and features= says of none. Wrap the model with "
                "layer= instead."
            )
        if not self.tap.linear:
            raise ValueError(
                "The output is not linear in the readout's weights: the best have no closed form. "
                "Let forward= return the output before the nonlinearity, with targets to match."
            )
        _check_parameters(unwrapped(self.binding.model), self.tap.heads)

    def __call__(
        self,
        known: Statistics,
        posterior: Posterior,
        valid: Callable[[], Iterable[Batch]] | None = None,
    ) -> tuple[Binding, Statistics, Refitted]:
        """The tie to the copy, the sums about its weights, and what has changed.

        Args:
            known: of the training rows.
            posterior: of their Gram.
            valid: gives rows to judge by, and then to refit on too.
        """
        found = self._solution(known.gram, posterior)
        if valid is None:
            judge, degrees = known.gram, found.degrees
            judged = "training rows, each left out of the readout (generalised cross-validation)"
        else:
            judge = accumulate(None, lambda _: self.tap, valid(), self.weighing).gram
            judged = f"{judge.count} validation rows, by a readout that was refitted without them"
            degrees = 0.0
        before, after = (_rmse(gram, degrees) for gram in (judge, judge.after(found.change)))
        if valid is not None:
            known = accumulate(known.clone(), lambda _: self.tap, valid(), self.weighing)
            found = self._solution(known.gram, Posterior.from_gram(known.gram, posterior.ridge))
        binding = self.binding.copied(self._copy(found.change))
        change = binding.current().weights - self.tap.weights  # as the model's precision has it
        report = Refitted(found.ridge, known.gram.count, before, after, judged)
        return binding, replace(known, gram=known.gram.after(change)), report

    def _solution(self, gram: Gram, posterior: Posterior) -> RidgeSolution:
        if gram.cross is None or gram.square is None:
            raise ValueError(
                "refit needs the residuals of all rows: call fit with (x, y), with gradient_target= "
                "where derivatives count, and anew where forget has lost them to rounding."
            )
        return RidgeSolution.of(gram, posterior, self.tap.weights, self.tap.biases, self.ridge)

    def _copy(self, change: Tensor) -> nn.Module:
        """The model with a readout whose weights have changed."""
        model = unwrapped(self.binding.model)
        try:
            twin = copy.deepcopy(model)
        except Exception as error:
            raise TypeError(
                f"{type(model).__name__} cannot be copied ({error}), and refit changes a copy: drop "
                "the attribute that refuses copy.deepcopy, or give it a __deepcopy__."
            ) from error
        columns = CASES[self.tap.case]([*map(twin.get_submodule, self.tap.heads)]).columns
        columns.write(columns.weights() + change)
        return twin


def _rmse(gram: Gram, degrees: Tensor | float) -> Tensor:
    r"""Root mean square (K,) of a Gram's residuals.

    With `degrees` of a linear fit to the same rows each counts as if left out, by generalised
    cross-validation (Golub, Heath, Wahba 1979): $r_i / (1 - h)$, $h$ the mean leverage.
    """
    assert gram.square is not None
    square = gram.square.diagonal() if gram.square.ndim == 2 else gram.square
    return (square / gram.informative).sqrt() / (1 - degrees / gram.informative)


def _check_parameters(model: nn.Module, heads: list[str]) -> None:
    """Refuse heads whose weights are computed from others, or used elsewhere too."""
    named = {name: model.get_submodule(name) for name in heads}
    owned = {id(p) for head in named.values() for p in own_parameters(head).values()}
    for name, head in named.items():
        if is_linear_map(head) and "weight" not in own_parameters(head):
            raise ValueError(
                f"The weights of {name!r} are computed from others (a parametrisation?) and cannot "
                "be set. Remove it first: torch.nn.utils.parametrize.remove_parametrizations."
            )
    for name, module in model.named_modules():
        tied = any(id(p) in owned for p in own_parameters(module).values())
        if tied and all(module is not head for head in named.values()):
            raise ValueError(
                f"The readout's weights are those of {name!r} too (tied): changing them would "
                "change the features. Give the readout weights of its own first."
            )
