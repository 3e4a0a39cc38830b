"""`calibrate(valid)`: predictions equal the fits of each target, and obey the distributions of the
house."""

import math

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.calibration.gain import constant_nll
from rigidities.calibration.ignorance import IgnorantForecast
from rigidities.calibration.rows import REFERENCE, TargetView
from rigidities.calibration.target_fit import Plan, TargetFit, fitted_target, head_nll
from rigidities.prediction.guards import POWER
from rigidities.prediction.head import FoldedGuard, HeadForm, extent_of
from rigidities.prediction.mixture import Mixture
from tests.support.random_features import Sets, sets
from tests.support.slow_head import SlowRows, slow_rows
from tests.support.tensors import alike, close

F64 = torch.float64
CONSTANT = rg.Full(noise="constant")
DESCENT = 1e-3
"""Part of a bar by which other roundings may move it. Mostly it is far less: the digits that differ
are beyond those of single precision, in which a head is fitted."""


@pytest.fixture(scope="module")
def one() -> Sets:
    return sets()


@pytest.fixture(scope="module")
def uq(one):
    return fitted(one)


@pytest.fixture(scope="module")
def plain(one):
    """Calibrated without a descent, whose results are exact."""
    return fitted(one, CONSTANT)


def fitted(data: Sets, method="full") -> rg.LastLayerRigidity:
    uq = rg.LastLayerRigidity(data.model).fit(data.train)
    return uq.calibrate(data.valid, method=method)


def dense_q(uq: rg.LastLayerRigidity, x: torch.Tensor) -> torch.Tensor:
    """The unscaled variances of rows, (n,), by a dense inverse."""
    f = uq.features(x)
    whole = uq.gram.matrix + uq.ridge * torch.eye(f.shape[1])
    return (f * torch.linalg.solve(whole, f.T).T).sum(1)


def dense_rows(uq: rg.LastLayerRigidity, data: tuple, *, seen: bool, k: int = 0) -> TargetView:
    """Rows of one target by a dense inverse; seen ones as if each were left out."""
    x, y = data
    q = dense_q(uq, x)
    mean = uq.model(x).detach()[:, k]
    left = 1 - q if seen else torch.ones_like(q)
    return TargetView(
        residual=(y[:, k] - mean) / left,
        q=q / left,
        mean=mean,
        features=uq.features(x),
        noise_factor=torch.ones_like(q),
        seen=torch.full_like(q, seen, dtype=torch.bool),
        target=y[:, k],
        side=torch.zeros_like(q),
    )


def fitted_rows(uq: rg.LastLayerRigidity, data: Sets, k: int = 0) -> TargetView:
    """The rows that one target's head is fitted to."""
    both = [dense_rows(uq, data.train, seen=True, k=k), dense_rows(uq, data.valid, seen=False, k=k)]
    return both[0].followed_by(both[1]).with_forecast(None)


def whole_fit(uq, data: Sets, method: rg.Full, k: int = 0) -> TargetFit:
    rows = fitted_rows(uq, data, k)
    return fitted_target(rows, Plan.of([rows], method, has_features=True))


def by_formulas(uq: rg.LastLayerRigidity, x: torch.Tensor, *, guarded: bool = True) -> SlowRows:
    """What the plain formulas of a head say of one target's rows."""
    head = uq.calibration.head
    guard = uq.calibration.guard if guarded else None
    return slow_rows(head, guard, 0, dense_q(uq, x), uq.model(x).detach()[:, 0], uq.features(x))


def test_predictions_are_those_of_the_heads_formulas(one, uq):
    x = torch.cat([one.test[0], 3 * one.test[0]])
    p, slow = uq.predict(x), by_formulas(uq, x)
    close(p.variance[:, 0], slow.moment, 1e-7)
    for level in (0.03, 0.5, 0.9):
        close(p.quantile(level)[:, 0], slow.quantile(level), 1e-6)


def test_a_constant_head_is_that_of_left_out_and_validation_rows(one, plain):
    fit = whole_fit(plain, one, CONSTANT)
    for name, tensor in fit.head.tensors().items():
        close(plain.calibration.head.tensors()[name], tensor, 1e-5)
    report = plain.calibration_report
    assert report.steps == [0]
    assert report.value == report.nll == pytest.approx(fit.nll, abs=1e-5)
    nll = head_nll(fit.head, fit.guard, dense_rows(plain, one.test, seen=False))
    close(-plain.predict(one.test[0]).log_prob(one.test[1])[:, 0], nll, 1e-5)


def test_a_head_that_follows_the_inputs_is_that_of_left_out_and_validation_rows(one, uq):
    fit = whole_fit(uq, one, rg.Full())
    x = one.test[0]
    form = HeadForm.of(fit.head, fit.guard, F64)
    moment = form.moment(dense_q(uq, x)[:, None], uq.model(x).detach(), uq.features(x))
    close(uq.predict(x).variance, moment, DESCENT)
    assert uq.calibration_report.nll == pytest.approx(fit.nll, abs=DESCENT)
    assert abs(uq.calibration_report.steps[0] - fit.step) < 50


def test_epistemic_and_noise_make_up_the_second_moment_of_the_distribution(one, uq):
    p = uq.predict(one.test[0])
    q = dense_q(uq, one.test[0])[:, None]
    close(p.epistemic, torch.minimum(uq.scale.square() * q, p.variance))
    close(p.variance, p.unit.square() * p.distribution.second, 1e-8)
    assert bool((p.noise >= 0).all())
    assert float(p.noise.median()) > float(p.epistemic.median())
    few = uq.predict(one.test[0][:5])
    draws = few.sample(5000, torch.Generator().manual_seed(0)) - few.mean
    close(draws.square().mean(0), few.variance, 0.2)


def test_the_guard_widens_bars_beyond_the_training_rows_and_leaves_others(one, uq):
    x = torch.cat([one.test[0], 3 * one.test[0]])
    bare = by_formulas(uq, x, guarded=False).moment
    guarded = uq.predict(x).variance[:, 0]
    inside = dense_q(uq, x) < uq.calibration.guard.reference
    assert 20 < int(inside.sum()) < 180
    close(guarded[inside], bare[inside], 1e-7)
    assert bool((guarded[~inside] > 1.1 * bare[~inside]).any())


def test_the_guard_is_that_of_its_formulas(one, uq):
    rows, guard, forecast = fitted_rows(uq, one), uq.calibration.guard, uq.calibration.head.forecast
    close(guard.reference[0], torch.quantile(rows[rows.seen].q, REFERENCE), 1e-8)
    targets = torch.cat([one.train[1], one.valid[1]])
    close(forecast.centre[0], targets.mean(), 1e-8)
    close(guard.variance[0], targets.var(), 1e-8)  # none is far out
    assert forecast.by_feature is None and forecast.extent_weight is None


@pytest.mark.parametrize("wild", ["target", "input"])
@pytest.mark.parametrize("size", [30.0, 1e6])
def test_a_single_wild_row_hardly_moves_the_guard(one, uq, wild, size):
    x, y = (part.clone() for part in one.valid)
    if wild == "target":
        y[3] += size
    else:
        x[3] *= size
    moved = fitted(one._replace(valid=(x, y))).calibration
    close(moved.guard.variance, uq.calibration.guard.variance, 0.2)
    spread = float(uq.calibration.guard.variance.sqrt())
    shift = moved.head.forecast.centre - uq.calibration.head.forecast.centre
    assert float(shift.abs()) < 0.15 * spread


def test_the_report_says_how_wide_a_usual_bar_is_at_ten_times_the_reference(one, uq):
    head, guard = uq.calibration.head, uq.calibration.guard
    second = Mixture.of_shape(head.usual[:, 1:]).second
    usual = (head.usual[:, 0].exp() + head.scale2 * 10 * guard.reference) * second
    width = usual * (1 + guard.variance / usual) ** (1 - math.exp(-(2**POWER)))
    assert f"and at least {float(width.sqrt()):.3g} at ten times" in str(uq.calibration_report)


class AtomicEnergies(nn.Module):
    """The sum over atoms of a readout of two elements, each with a bias of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 12, dtype=F64), nn.Tanh())
        self.one, self.other = nn.Linear(12, 1, dtype=F64), nn.Linear(12, 1, dtype=F64)

    def forward(self, atoms):
        features = self.body(atoms[..., :3])
        first, second = atoms[..., 3:4], atoms[..., 4:5]
        return (self.one(features) * first + self.other(features) * second).sum(1)


def structures(n, seed, model, per_atom, alike=False):
    """Structures of up to six atoms, and energies that the model knows but for noise.

    Those that are alike have two atoms each of the element whose bias is the last column.
    """
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(n, 6, 3, generator=generator, dtype=F64)
    element = torch.randint(0, 3, (n, 6), generator=generator)  # 2: no atom
    if alike:
        element[element == 1] = 2
        element[:, :2] = 1
    atoms = torch.cat([places, (element == 0)[..., None], (element == 1)[..., None]], -1)
    noise = 0.1 * torch.randn(n, 1, generator=generator, dtype=F64)
    counts = atoms[..., 3:].sum(1)
    return atoms, model(atoms).detach() + noise + counts @ per_atom[:, None]


def atomic_bars(per_atom, folder, alike=False, method=CONSTANT):
    """A calibration of structures, bars of new ones near and far, and those that are frozen."""
    torch.manual_seed(0)
    model = AtomicEnergies()
    train = structures(500, 1, model, per_atom, alike)
    valid, test = (structures(n, n, model, per_atom) for n in (250, 60))
    with torch.no_grad():
        for head, constant in zip((model.one, model.other), per_atom, strict=True):
            head.bias.add_(constant)
    uq = rg.LastLayerRigidity(model, layer=["one", "other"]).fit(train)
    uq.calibrate(valid, method=method)
    uq.save(folder / "uq.safetensors")
    again = rg.LastLayerRigidity.load(folder / "uq.safetensors", model)
    far = test[0] * torch.tensor([4.0, 4, 4, 1, 1], dtype=F64)
    bars = torch.cat([uq.predict(test[0]).std, uq.predict(far).std])
    assert torch.equal(again.predict(far).std, bars[60:])
    return uq, bars, uq.freeze()(far)[1]


@pytest.mark.parametrize("alike", [False, True], ids=["any", "the same count in training rows"])
def test_a_constant_per_atom_changes_no_bar(alike, tmp_path):
    per_atom = torch.tensor([-500.0, 1300.0], dtype=F64)
    uq, bars, frozen = atomic_bars(torch.zeros(2, dtype=F64), tmp_path, alike)
    moved, moved_bars, moved_frozen = atomic_bars(per_atom, tmp_path, alike)
    assert bool(moved.calibration.head.forecast.by_feature.any())  # the forecaster knows the atoms
    close(moved.calibration.guard.variance, uq.calibration.guard.variance, 1e-6)
    close(moved_bars, bars, 1e-5)
    close(moved_frozen, frozen, 1e-5)
    close(moved_frozen, moved_bars[60:], 1e-8)


def test_a_constant_per_atom_hardly_changes_bars_that_follow_the_inputs(tmp_path):
    per_atom = torch.tensor([-500.0, 1300.0], dtype=F64)
    _, bars, _ = atomic_bars(torch.zeros(2, dtype=F64), tmp_path, method=rg.Full())
    _, moved, frozen = atomic_bars(per_atom, tmp_path, method=rg.Full())
    assert float((moved / bars).log().abs().median()) < DESCENT
    close(frozen, moved[60:], 1e-8)


def test_larger_structures_are_not_unfamiliar(tmp_path):
    """Two copies of a structure, far from each other: four times its q, and familiar atoms."""
    uq, _, _ = atomic_bars(torch.zeros(2, dtype=F64), tmp_path)
    atoms = structures(60, 5, uq.model, torch.zeros(2, dtype=F64))[0]
    one, two = uq.predict(atoms), uq.predict(torch.cat([atoms, atoms], 1))
    guard, weight = uq.calibration.guard, uq.calibration.head.forecast.extent_weight
    close(two.rigidity, one.rigidity / 4, 1e-6)
    features = [uq.features(part) for part in (atoms, torch.cat([atoms, atoms], 1))]
    extents = [extent_of(part, weight)[:, 0] for part in features]
    close(extents[1], 2 * extents[0], 1e-8)
    familiarity = [
        FoldedGuard.of(guard).familiarity(
            (1 / (p.rigidity[:, :1] * extent.square()[:, None])).log(), None
        )
        for p, extent in zip((one, two), extents, strict=True)
    ]
    close(familiarity[1], familiarity[0], 1e-6)
    assert bool((familiarity[0] < 1).any())
    # the squared scale of a sum, and its guard, are those of one part times its extent squared
    close(two.variance, 4 * one.variance, 1e-6)


def test_a_known_noise_of_sums_is_that_of_the_whole_structure():
    """Structures of one to six atoms, whose energies have a known noise of any size."""
    torch.manual_seed(0)
    model, generator = AtomicEnergies(), torch.Generator().manual_seed(7)

    def noise(batch):
        atoms = batch[0] if isinstance(batch, tuple) else batch
        return 0.04 * (1 + atoms[:, :1, 0].sin().square())

    def noisy(n, seed):
        atoms, energy = structures(n, seed, model, torch.zeros(2, dtype=F64))
        error = torch.randn(n, 1, generator=generator, dtype=F64)
        return atoms, energy + noise(atoms).sqrt() * error

    train, valid, test = noisy(500, 1), noisy(250, 2), noisy(60, 3)
    uq = rg.LastLayerRigidity(model, layer=["one", "other"]).fit(train)
    uq.calibrate(valid, method=rg.Full(noise=noise, guard=False))
    head = uq.calibration.head
    assert head.forecast.extent_weight is not None
    p, h, second = uq.predict(test[0]), head.constant[:, 0], Mixture.of_shape(head.constant[:, 1:])
    variance = (h.exp() * noise(test[0]) + head.scale2 / p.rigidity) * second.second
    close(p.variance, variance, 1e-6)
    close(uq(test[0])[1], variance.sqrt(), 1e-6)
    assert 0.7 < float((h.exp() * second.second).detach()) < 1.3  # the known variances are right
    # scores of rows are those of the same bars
    uq.conformalize(test)
    close(uq.calibration.conformal.tails.sort().values, p.tail(test[1])[:, 0].sort().values, 1e-6)


def test_few_rows_do_not_explain_the_targets_by_many_bias_columns():
    """Thirty columns would explain twenty-five targets exactly, and no bar would grow."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (25, 30), generator=generator).double()
    target = torch.randn(25, generator=generator, dtype=F64)
    total = counts.sum(1)
    weight = torch.full((30,), 1 / float(total.square().mean().sqrt()), dtype=F64)
    forecast = IgnorantForecast.of(target, counts, weight)
    slope = (total @ target) / (total @ total)
    close(forecast(counts), slope * total)
    intensive = (target - slope * total) / (counts @ weight)
    close(forecast.variance, intensive.square().sum() / 24)


def test_the_scale_that_predictions_share_is_that_of_bayesian_regression(one, plain):
    held = dense_rows(plain, one.valid, seen=False)
    ratio = held.residual.square() / (1 + held.q)
    bayes = ratio.clamp(max=float(25 * ratio.median() / 0.455)).mean().sqrt()
    close(plain.calibration.joint[0], bayes, 1e-8)
    fit = whole_fit(plain, one, CONSTANT)
    close(plain.scale[0], torch.maximum(fit.scale2.sqrt(), bayes), 1e-4)
    # half of what a unit of q adds to the variance, and half of the gap to the training rows
    rate = fit.head.scale2[0] * Mixture.of_shape(fit.head.usual[0, 1:]).second
    close(fit.scale2, 0.5 * (rate + fit.gap))
    assert float(fit.gap) >= 0


def test_bars_are_the_same_batch_by_batch_and_called(one, uq):
    whole = uq.predict(one.test[0])
    parts = uq.predict(list(one.test[0].split(7)))
    alike(parts, whole, 1e-12)
    close(parts.quantile(0.05), whole.quantile(0.05), 1e-12)
    mean, std = uq(one.test[0])
    close(mean, whole.mean, 1e-12)
    close(std, whole.std, 1e-12)


def test_a_model_in_single_precision_has_nearly_the_same_bars(one, uq):
    single = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1))
    single.load_state_dict({name: t.float() for name, t in one.model.state_dict().items()})
    again = rg.LastLayerRigidity(single).fit(tuple(t.float() for t in one.train))
    again.calibrate(tuple(t.float() for t in one.valid))
    p = again.predict(one.test[0].float())
    assert p.std.dtype == torch.float32
    close(p.std.double(), uq.predict(one.test[0]).std, DESCENT)


@pytest.mark.thorough
def test_several_targets_have_the_bars_of_each_alone():
    data = sets(targets=2)
    both, ridge = rg.LastLayerRigidity(data.model).fit(data.train), 0.3
    both.calibrate(data.valid, method=rg.Full(ridge=ridge))
    whole = both.predict(data.test[0])
    for k in range(2):
        model = nn.Sequential(data.model[0], data.model[1], nn.Linear(10, 1).double())
        with torch.no_grad():
            model[2].weight.copy_(data.model[2].weight[k : k + 1])
            model[2].bias.copy_(data.model[2].bias[k : k + 1])
        parts = [(x, y[:, k : k + 1]) for x, y in data[1:]]
        alone = rg.LastLayerRigidity(model).fit(parts[0])
        alone.calibrate(parts[1], method=rg.Full(ridge=ridge))
        p = alone.predict(data.test[0])
        close(whole.std[:, k], p.std[:, 0], DESCENT)
        close(whole.quantile(0.9)[:, k], p.quantile(0.9)[:, 0], DESCENT)
        close(both.scale[k], alone.scale[0], DESCENT)


def scaled(data: Sets, a: float, b: float) -> Sets:
    """y -> a y + b, for data and model."""
    model = nn.Sequential(data.model[0], data.model[1], nn.Linear(10, 1).double())
    with torch.no_grad():
        model[2].weight.copy_(a * data.model[2].weight)
        model[2].bias.copy_(a * data.model[2].bias + b)
    return Sets(model, *((x, a * y + b) for x, y in data[1:]))


@pytest.mark.parametrize(("a", "b"), [(1e-4, 0.0), (1e5, -1e6)])
def test_bars_scale_with_the_targets(one, uq, a, b):
    p, whole = fitted(scaled(one, a, b)).predict(one.test[0]), uq.predict(one.test[0])
    close(p.std, a * whole.std, DESCENT)
    close((p.quantile(0.1) - b) / a, whole.quantile(0.1), DESCENT)


@pytest.mark.parametrize("method", ["full", CONSTANT], ids=["follows inputs", "constant"])
def test_mirrored_targets_have_mirrored_bars(one, method):
    p, whole = (
        fitted(data, method).predict(one.test[0]) for data in (scaled(one, -3.0, 50.0), one)
    )
    close(p.std, 3 * whole.std, DESCENT)
    close((p.quantile(0.9) - 50) / -3, whole.quantile(0.1), DESCENT)


def test_the_order_of_features_does_not_matter(one, uq):
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(one.model[0].weight[order])
        model[0].bias.copy_(one.model[0].bias[order])
        model[2].weight.copy_(one.model[2].weight[:, order])
        model[2].bias.copy_(one.model[2].bias)
    alike(fitted(one._replace(model=model)).predict(one.test[0]), uq.predict(one.test[0]), DESCENT)


def test_the_order_of_rows_does_not_matter_beyond_the_folds(one, uq):
    mixed = [torch.randperm(n, generator=torch.Generator().manual_seed(n)) for n in (240, 120)]
    train, valid = ([t[m] for t in d] for d, m in zip((one.train, one.valid), mixed, strict=True))
    again = fitted(one._replace(train=tuple(train), valid=tuple(valid)))
    alike(again.predict(one.test[0]), uq.predict(one.test[0]), DESCENT)


class Rescaled(nn.Module):
    """Features times a power of two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 8 * x.tanh()


def test_rescaled_features_have_the_same_bars(one, uq):
    model = nn.Sequential(one.model[0], Rescaled(), nn.Linear(10, 1).double())
    with torch.no_grad():
        model[2].weight.copy_(one.model[2].weight / 8)
        model[2].bias.copy_(one.model[2].bias)
    # the bias column has no such scale: nearly no ridge leaves it out of the comparison
    pairs = [fitted(one._replace(model=m), rg.Full(ridge=1e-9)) for m in (model, one.model)]
    first, second = (pair.predict(one.test[0]) for pair in pairs)
    alike(first, second, DESCENT)
    assert uq.ridge > 1e-9


def test_given_training_rows_are_those_that_the_fit_kept(one, uq):
    again = rg.LastLayerRigidity(one.model).fit(one.train, keep_rows=0)
    report = again.calibrate(one.valid, train=one.train).calibration_report
    alike(again.predict(one.test[0]), uq.predict(one.test[0]), DESCENT)
    assert report.seen == len(one.train[0])


def test_the_gain_is_that_over_one_constant_bar_of_other_folds(one, plain):
    rows = fitted_rows(plain, one).in_order()
    fit = whole_fit(plain, one, CONSTANT)
    report = plain.calibration_report
    assert report.gain == pytest.approx(float(fit.gains.mean()), abs=1e-5)
    assert report.gain_error == pytest.approx(
        float(fit.gains.std() / len(fit.gains) ** 0.5), rel=1e-3
    )
    # what is left over is the likelihood of the constant bar
    constant = constant_nll(rows.held_out.residual).mean()
    assert report.gain == pytest.approx(float(constant) - report.value, abs=1e-5)


def test_bars_follow_the_inputs_where_noise_does(one, uq, plain):
    assert uq.calibration_report.steps[0] > 0
    assert uq.calibration_report.value < plain.calibration_report.value - 0.1
    assert "follows         the inputs, after" in str(uq.calibration_report)
    assert "follows         the inputs" not in str(plain.calibration_report)
    truth = 2.3 * one.test[0][:, 0]  # logarithm of the noise variance, up to a constant
    bars = uq.predict(one.test[0]).variance[:, 0].log()
    assert float(torch.corrcoef(torch.stack([bars, truth]))[0, 1]) > 0.6
