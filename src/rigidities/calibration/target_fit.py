r"""The density head of one target: its inputs, how far it follows them, and its guard.

`density_fit` offers a path of heads, from one mixture for all rows (step 0) to one that follows the
inputs closely. Rows that the head was not fitted to choose a step of that path, and a *level*: the
logarithm of a factor of all squared scales, since errors of new rows are larger than those of rows
that the model was trained on. Which rows those are depends on how many there are (`splits`):

- With many rows, a fifth of the validation rows chooses. The head is fitted to the others and to
  the training rows, as if each of these were left out of the readout. Where a fifth is not enough,
  all validation rows choose, and where these are not, a fifth of the training rows too.
- With fewer rows, each fifth of the validation rows is left out in turn of a fit to all others. The
  head at the chosen step is then fitted to all rows.

A head that follows few rows closely does much harm if it was chosen by chance: each look but the
first costs something, more the later it is and the fewer rows are fitted (`ONE_NAT`). Few rows do
not tell the level well either: it is raised by an allowance for that (`fitted_level`).

The same left-out rows, in five folds, say what the choice gains over one constant bar: each fold is
judged at the step and level that the others choose.

Data flow: `Design` turns the rows of a target into the network's inputs; `fitted_target` fits,
chooses and adds the guard. The `TargetFit` that it returns gives the tensors of a `Head`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from ..prediction.guards import Guard
from ..prediction.head import Head, HeadForm, Inputs, Network
from ..prediction.mixture import Mixture
from .density_fit import (
    ConstantMixture,
    Weights,
    constant_mixture,
    descend,
    fitted_level,
    looks,
)
from .density_loss import Errors, mixture_loss
from .gain import FEWEST_ROWS, FOLDS, constant_nll, folds, row_nll
from .methods import Full
from .robust import clipped_mean
from .rows import TargetView

MANY = 3000
"""Number of rows from which on a part of them is enough to choose a step."""
ENOUGH = 200
"""Number of validation rows that choose a step by themselves."""
STEPS = 1500
"""Length of a path with many rows."""
FEW_STEPS = 500
"""Length of a path with fewer rows."""
ALL_STEPS = 6000
"""Steps that the paths of all targets have together; at least `FEW_STEPS` each."""
COMPONENTS = 3
"""Components of the mixture where every target has many rows."""
FEW_COMPONENTS = 2
"""Components of the mixture where some target has fewer rows."""
ONE_NAT = 300
"""Number of samples with which the last look costs one nat in the choice.

With n samples it costs (ONE_NAT / n)^2, and the looks before it evenly less, down to nothing."""
BOUNDS = 0.005
"""Share of the fitted h that lie beyond each of the bounds of h."""
DIRECTIONS = 64
"""Largest number of principal directions of the features that the network looks at."""
EXACT = 256
"""Number of features up to which the directions are computed exactly."""
DIRECTION_ROWS = 8192
"""Most rows that give the directions of wider features, evenly spread."""


@dataclass(frozen=True)
class Design:
    """How rows of one target become the inputs of its network.

    Attributes:
        inputs: How they are standardised.
        directions: Principal directions of the standardised features, (D, at most 64).
    """

    inputs: Inputs
    directions: Tensor

    @classmethod
    def of(cls, rows: TargetView, like: Design | None = None) -> Design:
        """The design whose units the reference rows fix.

        Args:
            rows: The rows, over their extent.
            like: The design of another target with the same features, whose units are kept.
        """
        reference = rows.reference
        inputs = Inputs.of(rows.informative_reference.q, reference.mean, reference.features)
        if like is not None:
            inputs = replace(inputs, centre=like.inputs.centre, spread=like.inputs.spread)
            return cls(inputs, like.directions)
        return cls(inputs, _directions(inputs, reference.features))

    def columns(self, rows: TargetView) -> Tensor:
        """The network's inputs of rows, (n, P), in single precision."""
        first = self.inputs.besides_features(rows.q, rows.mean)
        features = self.inputs.standardised(rows.features)
        return torch.cat([first, features @ self.directions], 1).to(torch.float32)

    def network(self, weights: Weights) -> Network:
        """The network of these weights as one of the features, with an axis of one target."""
        of_columns = weights.inputs.to(self.directions)  # (P, H + O)
        return Network(
            rigidity=self.inputs.rigidity[None],
            output=self.inputs.output[None],
            centre=self.inputs.centre[None],
            spread=self.inputs.spread[None],
            directions=self.directions[None],
            weight=of_columns[None],
            hidden_constant=weights.hidden_constant.to(of_columns)[None],
            hidden_weight=weights.hidden.to(of_columns)[None],
        )


def _directions(inputs: Inputs, features: Tensor) -> Tensor:
    """The leading principal directions of features (n, D) once standardised, (D, at most 64).

    A direction may point either way. It points to where the rows reach farther, by their cubes, so
    that the order of the features does not decide. Where they reach as far on both sides, a fixed
    vector decides, so that rounding does not.
    """
    width = features.shape[1]
    generator = torch.Generator().manual_seed(0)  # on the CPU: the same numbers for every device
    start = torch.randn(
        width, DIRECTIONS, generator=generator, dtype=features.dtype, device="cpu"
    ).to(features.device)
    if width <= EXACT:
        standardised = inputs.standardised(features)
        _, vectors = torch.linalg.eigh(standardised.mT @ standardised)
        directions = vectors.flip(1)[:, :DIRECTIONS]
    else:
        rows = torch.arange(min(len(features), DIRECTION_ROWS), device=features.device)
        rows = rows * len(features) // len(rows)
        standardised = inputs.standardised(features[rows])
        directions = start
        for _ in range(3):  # subspace iterations
            directions = torch.linalg.qr(standardised.mT @ (standardised @ directions))[0]
    projections = standardised @ directions  # (n, at most 64)
    cubes = projections.pow(3).sum(0)
    rounding = 1e-9 * projections.abs().pow(3).sum(0)
    by_vector = start[:, 0] @ directions
    sign = torch.where(cubes.abs() > rounding, cubes, by_vector).sign()
    signed: Tensor = directions * torch.where(sign == 0, 1.0, sign)
    return signed


@dataclass(frozen=True)
class Plan:
    """What is fitted to all targets.

    Attributes:
        follows_inputs: Whether the distribution follows the inputs.
        guarded: Whether bars are widened beyond the training rows.
        components: Components of each target's mixture.
        most_steps: The length of the path of a target with many rows.
        few_steps: The length of the path of a target with fewer rows.
    """

    follows_inputs: bool
    guarded: bool
    components: int
    most_steps: int
    few_steps: int

    @classmethod
    def of(cls, tables: Sequence[TargetView], method: Full, *, has_features: bool) -> Plan:
        """The plan for the rows of several targets.

        Args:
            tables: The rows of each target.
            method: What is asked of the calibration.
            has_features: Whether the rows have features.
        """
        return cls(
            follows_inputs=method.noise == "features" and has_features,
            guarded=method.guard,
            # The heads of all targets have tensors of the same shape.
            components=COMPONENTS if all(map(are_many, tables)) else FEW_COMPONENTS,
            most_steps=max(FEW_STEPS, min(STEPS, ALL_STEPS // len(tables))),
            few_steps=FEW_STEPS,
        )

    def steps(self, rows: TargetView) -> int:
        """The length of the path of a target with these rows."""
        if not self.follows_inputs:
            return 0
        return self.most_steps if are_many(rows) else self.few_steps


def are_many(rows: TargetView) -> bool:
    """Whether there are so many rows that a part of them may choose a step."""
    return len(rows) >= MANY


@dataclass(frozen=True)
class Split:
    """Rows that a head is fitted to, and rows that judge it.

    Attributes:
        fitted: Which rows are fitted to, booleans (n,).
        left_out: Numbers of the rows that judge, (m,).
    """

    fitted: Tensor
    left_out: Tensor


def splits(rows: TargetView) -> list[Split]:
    """What is fitted to and what is left out, once or in turn; see the module.

    The list is empty where there are too few rows to leave any out.
    """
    new = ~rows.seen if bool((~rows.seen).any()) else rows.seen
    new_rows = new.nonzero()[:, 0]
    if len(new_rows) < FEWEST_ROWS:
        return []
    if not are_many(rows):
        sample = None if rows.sample is None else rows.sample[new_rows]
        fold = folds(len(new_rows), new_rows.device, sample)
        each = []
        for k in range(int(fold.max()) + 1):
            left_out = new_rows[fold == k]
            fitted = torch.ones_like(new)
            fitted[left_out] = False
            each.append(Split(fitted, left_out))
        return each
    left_out = new
    a_fifth = folds(len(rows), new.device, rows.sample) == 0
    if len(new_rows) >= FOLDS * ENOUGH:  # a fifth of them is enough
        left_out = new & a_fifth
    elif len(new_rows) < ENOUGH:
        left_out = new | a_fifth
    return [Split(~left_out, left_out.nonzero()[:, 0])]


@dataclass(frozen=True)
class TargetFit:
    """The density head of one target, with what is known of it.

    Attributes:
        head: The head, with an axis of one target.
        guard: The guard, likewise; None where there is none.
        step: The step that was chosen; 0 for one mixture for all rows.
        gap: Half the gap between new and training rows, in units of q.
        gains: What the head gains over one constant bar in nats, for each row that was left out,
            (m,).
        nll: The mean negative log-likelihood of those rows; of the held-out rows where none was
            left out.
    """

    head: Head
    guard: Guard | None
    step: int
    gap: Tensor
    gains: Tensor
    nll: float

    @property
    def scale2(self) -> Tensor:
        r"""The squared scale of single predictions.

        It says how much of their variance other training rows would change. It is the mean of two
        estimates. The likelihood's hardly tells it from noise. The other is the gap between new
        rows and training rows left out of the readout alone, $e^\kappa$: training lowers the errors
        of its own rows by as much as it raises those of others, so that half of the gap is what a
        network's own weights add to the errors of new rows.
        """
        return 0.5 * (_variance_rate(self.head) + self.gap)


def _variance_rate(head: Head) -> Tensor:
    """What a unit of q adds to the variance of a usual row of one target, ().

    The squared scale is in units of the mixture, whose second moment need not be near one.
    """
    return head.scale2[0] * Mixture.of_shape(head.usual[0, 1:]).second


def head_nll(head: Head, guard: Guard | None, rows: TargetView) -> Tensor:
    """The scores of rows under the head of one target, guarded, (n,); see `row_nll`."""
    form = HeadForm.of(head, guard, torch.float64)
    moment, shape = form(
        rows.q[:, None], rows.mean[:, None], rows.features, rows.noise_factor[:, None]
    )
    distribution = Mixture.of_shape(shape[:, 0])
    s2 = moment[:, 0] / distribution.second
    return row_nll(distribution, rows.residual, s2, rows.side, rows.grid_step)


# --- the fit --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """The heads that were fitted without some rows, and these rows.

    Attributes:
        constant: The mixture at which they started.
        weights: The weights at each of the looks; empty for a head without a network.
        columns: The network's inputs of the left-out rows, (m, P).
        left_out: Their numbers, (m,).
    """

    constant: ConstantMixture
    weights: list[Weights]
    columns: Tensor
    left_out: Tensor

    def outputs(self, look: int) -> tuple[Tensor, Tensor]:
        """The outputs of the left-out rows (m, O), and the logarithm of the factor of q, (m,)."""
        rows = len(self.left_out)
        if not self.weights:
            outputs = self.constant.outputs.to(torch.float32)
            log_scale2 = self.constant.log_scale2.to(torch.float32)
            return outputs.expand(rows, -1), log_scale2.expand(rows)
        weights = self.weights[look]
        return weights(self.columns), weights.log_scale2.expand(rows)


class TargetProblem:
    """The rows of one target in an order and in units of their own, and heads that fit them.

    Attributes:
        rows: The rows, in their own order.
        unit: The mean squared residual, of rows over their extent.
        noise_unit: A usual noise factor. A known noise is known up to a factor, and so may be in
            any unit; h is in this one.
    """

    def __init__(self, rows: TargetView, plan: Plan, like: Design | None) -> None:
        """Prepare the rows.

        Args:
            rows: The rows, with their ignorant forecast.
            plan: What is fitted.
            like: The design of another target with the same features, if there is one.
        """
        self.rows = rows.in_order()
        self._intensive = self.rows.intensive
        self._plan = plan
        self.unit = self._intensive.mean_square
        held_out = self._intensive.held_out
        by_factor = clipped_mean(held_out.residual.square() / held_out.noise_factor)
        self.noise_unit = self.unit / by_factor  # one where all factors are
        self._q_unit = self._intensive.usual_q
        side = self.rows.side
        errors = Errors(
            residual=self._intensive.residual / self.unit.sqrt(),
            q=self._intensive.q / self._q_unit,
            noise_factor=self._intensive.noise_factor / self.noise_unit,
            log_factor=torch.zeros_like(side),
            side=side if bool((side != 0).any()) else None,
        )
        self._constant = constant_mixture(errors, self.rows.seen, plan.components)
        # Training rows have smaller errors than new ones.
        self._errors = errors.with_log_factor(-self._constant.optimism * self.rows.seen)
        self._design: Design | None = None
        self._columns = torch.zeros(len(rows), 0, device=side.device)
        if plan.follows_inputs:
            self._design = Design.of(self._intensive, like)
            self._columns = self._design.columns(self._intensive)

    def paths(self) -> list[Path]:
        """A path of heads for each of the `splits`."""
        each = splits(self.rows)
        if not each:
            return []
        constants = [self._constant]
        if len(each) > 1:  # few rows, of which those left out would matter
            constants = [
                constant_mixture(
                    self._errors[split.fitted], self.rows.seen[split.fitted], self._plan.components
                )
                for split in each
            ]
        path = list(self._descent([split.fitted for split in each], constants))
        paths = []
        for number, (split, constant) in enumerate(zip(each, constants, strict=True)):
            weights = [networks.network(number) for networks in path]
            columns = self._columns[split.left_out]
            paths.append(Path(constant, weights, columns, split.left_out))
        return paths

    def _descent(
        self, fitted: Sequence[Tensor], constants: Sequence[ConstantMixture]
    ) -> Iterator[Weights]:
        """The looks of networks side by side, each fitted to the rows of one of these masks (n,).

        There are none for a head without a network.
        """
        if self._design is None:
            return iter(())
        return descend(
            self._columns,
            self._errors.to(torch.float32),
            constants,
            [which.nonzero()[:, 0] for which in fitted],
            self._plan.steps(self.rows),
            keeps_shape=self.rows.grid_step > 0,
        )

    def left_out_errors(self, paths: list[Path]) -> Errors:
        """The errors of all left-out rows, one path after the other."""
        numbers = torch.cat([path.left_out for path in paths])
        return self._errors[numbers].to(torch.float32)

    def whole_head(self, paths: list[Path], look: int, level: float) -> Head:
        """The head of all rows at a look and a level."""
        constant = self._constant
        if self._design is None:
            return self.head(constant, None, level)
        if look == 0:
            return self.head(constant, Weights.start(self._columns, constant), level)
        if len(paths) == 1:
            return self.head(constant, paths[0].weights[look], level)
        everything = torch.ones_like(self.rows.seen)
        path = self._descent([everything], [constant])
        return self.head(constant, next(islice(path, look, None)).network(0), level)

    def head(self, constant: ConstantMixture, weights: Weights | None, level: float) -> Head:
        """Weights in the units of the fit as a head of one target in those of the rows."""
        outputs = constant.outputs
        log_scale2 = constant.log_scale2
        network = None
        h = outputs[:1]
        if weights is not None and self._design is not None:
            outputs = weights.outputs.to(outputs)
            log_scale2 = weights.log_scale2[0].to(outputs)
            network = self._design.network(weights)
            h = weights(self._columns)[:, 0].to(outputs)
        to_rows = level + (self.unit / self.noise_unit).log()  # h in the units of the rows
        bounds = torch.quantile(h, h.new_tensor([BOUNDS, 1 - BOUNDS])) + to_rows
        outputs = torch.cat([outputs[:1] + to_rows, outputs[1:]])
        usual = torch.cat([h.median()[None] + to_rows, constant.outputs[1:]])
        forecast = self.rows.forecast
        assert forecast is not None, "these rows have no ignorant forecast yet"
        return Head(
            constant=outputs[None],
            usual=usual[None],
            bounds=bounds[None],
            scale2=((log_scale2 + level).exp() * self.unit / self._q_unit)[None],
            forecast=forecast.as_of_head,
            network=network,
        )

    def guard(self) -> Guard:
        """The guard."""
        # Where the features are all zero in every row, q of a new row is in units of one.
        reference = torch.ones_like(self.unit)
        if len(self._intensive.informative_held_out) > 0:
            reference = self._intensive.high_q
        forecast = self.rows.forecast
        assert forecast is not None, "these rows have no ignorant forecast yet"
        return Guard(reference=reference[None], variance=forecast.variance[None])

    def gap(self, unknown: Tensor) -> Tensor:
        """Half the gap between the errors of new and of training rows, in units of q.

        Where all rows are new or all are training rows it is not known, and `unknown` is returned.
        """
        seen = self.rows.seen
        if not bool(seen.any() & ~seen.all()):
            return unknown
        optimism = self._constant.optimism.clamp(min=0)
        return -0.5 * torch.expm1(-optimism) * self.unit / self._q_unit


@dataclass(frozen=True)
class Choice:
    """The losses of left-out rows at each of the looks, and what they choose.

    Attributes:
        paths: The paths.
        errors: The left-out rows, one path after the other.
        levels: The likeliest level at each of the L looks.
        nll: The negative log-likelihoods at these, (L, m).
        cost: What each look costs in nats, (L,).
    """

    paths: list[Path]
    errors: Errors
    levels: list[float]
    nll: Tensor
    cost: Tensor

    @classmethod
    def of(cls, paths: list[Path], errors: Errors, samples: int) -> Choice:
        """The losses of heads on the rows that they were not fitted to.

        Args:
            paths: The paths.
            errors: The left-out rows, one path after the other.
            samples: How many samples there are, with those that are fitted to.
        """
        levels = []
        nll = []
        level = 0.0
        for look in range(max(1, len(paths[0].weights))):
            outputs, log_scale2 = _outputs(paths, look)
            level, _ = fitted_level(outputs, log_scale2, errors, level)
            levels.append(level)
            nll.append(mixture_loss(outputs, log_scale2, errors.raised(level)).value)
        share = torch.linspace(0, 1, len(levels)).to(nll[0])
        cost = (ONE_NAT / samples) ** 2 * share
        return cls(paths=paths, errors=errors, levels=levels, nll=torch.stack(nll), cost=cost)

    def best(self, judging: Tensor | None = None) -> tuple[int, float]:
        """The best look, and its level with the allowance, by those of the rows that judge, (m,).

        By default all judge.
        """
        if judging is None:
            judging = torch.ones_like(self.nll[0], dtype=torch.bool)
        look = int((self.nll[:, judging].sum(1) + self.cost).argmin())
        outputs, log_scale2 = _outputs(self.paths, look)
        level, allowance = fitted_level(
            outputs[judging], log_scale2[judging], self.errors[judging], self.levels[look]
        )
        return look, level + allowance


def _outputs(paths: list[Path], look: int) -> tuple[Tensor, Tensor]:
    """Outputs and logarithms of the factor of q of the left-out rows, (m, O) and (m,)."""
    outputs, log_scale2 = zip(*(path.outputs(look) for path in paths), strict=True)
    return torch.cat(outputs), torch.cat(log_scale2)


def _judged(
    problem: TargetProblem, paths: list[Path], choice: Choice, guard: Guard | None
) -> tuple[Tensor, float]:
    """The gains of left-out rows that are new, and their mean negative log-likelihood.

    Each fold of the rows is judged at the look and the level that the others choose.
    """
    rows = problem.rows
    numbers = torch.cat([path.left_out for path in paths])
    path_of = torch.cat([torch.full_like(path.left_out, i) for i, path in enumerate(paths)])
    fold = path_of
    if len(paths) == 1:
        sample = None if rows.sample is None else rows.sample[numbers]
        fold = folds(len(numbers), numbers.device, sample)
    nll = rows.q.new_empty(len(numbers))
    for k in range(int(fold.max()) + 1):
        look, level = choice.best(fold != k)
        path = paths[k if len(paths) > 1 else 0]
        head = problem.head(path.constant, path.weights[look] if path.weights else None, level)
        nll[fold == k] = head_nll(head, guard, rows[numbers[fold == k]])
    # The constant bar of the new rows, or of training rows where there are no others.
    is_new = ~rows.seen if bool((~rows.seen).any()) else rows.seen
    constant = rows.q.new_full((len(rows),), math.nan)
    held_out = rows.held_out
    constant[is_new] = constant_nll(
        held_out.residual, held_out.side, held_out.sample, rows.grid_step
    )
    counts = is_new[numbers]
    if not bool(counts.any()):
        return nll[:0], float(nll.mean())
    return (constant[numbers] - nll)[counts], float(nll[counts].mean())


def fitted_target(rows: TargetView, plan: Plan, like: Design | None = None) -> TargetFit:
    """The density head of one target's rows: left-out training rows and validation rows.

    Rows and the mirrored rows, with negated targets and predictions, have mirrored heads: the
    same of both are fitted.

    Args:
        rows: The rows, with their ignorant forecast.
        plan: What is fitted.
        like: The design of another target with the same features, if there is one.
    """
    upright = rows.upright
    fit = _fitted(upright, plan, like)
    return fit if upright is rows else replace(fit, head=fit.head.mirrored)


def _fitted(rows: TargetView, plan: Plan, like: Design | None) -> TargetFit:
    """See `fitted_target`."""
    problem = TargetProblem(rows, plan, like)
    guard = problem.guard() if plan.guarded else None
    paths = problem.paths()
    look = 0
    level = 0.0
    gains = rows.q.new_zeros(0)
    nll = math.nan
    if paths:
        samples = len(rows) if rows.sample is None else len(torch.unique(rows.sample))
        choice = Choice.of(paths, problem.left_out_errors(paths), samples)
        look, level = choice.best()
        gains, nll = _judged(problem, paths, choice, guard)
    head = problem.whole_head(paths, look, level)
    if not paths:
        nll = float(head_nll(head, guard, problem.rows.held_out).mean())
    return TargetFit(
        head=head,
        guard=guard,
        step=looks(plan.steps(rows))[look],
        gap=problem.gap(_variance_rate(head)),
        gains=gains,
        nll=nll,
    )
