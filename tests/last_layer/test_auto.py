"""`calibrate(valid)`: predictions equal the fits of each target, and obey the distributions of the
house."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.calibration import full, target_fit
from rigidities.calibration.rows import REFERENCE, TargetView
from rigidities.prediction.guards import POWER, SPAN
from tests.support import slow_auto
from tests.support.random_features import Sets, sets
from tests.support.tensors import alike, close

F64 = torch.float64


@pytest.fixture(scope="module")
def one() -> Sets:
    return sets()


@pytest.fixture(scope="module")
def uq(one):
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    uq.calibrate(one.valid)
    return uq


def fitted(data: Sets, method="full") -> rg.LastLayerRigidity:
    uq = rg.LastLayerRigidity(data.model).fit(data.train)
    return uq.calibrate(data.valid, method=method)


def dense_rows(uq: rg.LastLayerRigidity, data: tuple, *, seen: bool, k: int = 0) -> TargetView:
    """Rows of one target by a dense inverse."""
    x, y = data
    f = uq.features(x)
    whole = uq.gram.matrix + uq.ridge * torch.eye(f.shape[1])
    q = (f * torch.linalg.solve(whole, f.T).T).sum(1)
    mean = uq.model(x).detach()[:, k]
    one = torch.ones_like(q)
    return slow_auto.view_of(y[:, k] - mean, q, one, mean, one, f, seen=seen)


def fitted_rows(uq: rg.LastLayerRigidity, data: Sets, k: int = 0) -> TargetView:
    """The rows that one target's full model is fitted to."""
    both = [dense_rows(uq, data.train, seen=True, k=k), dense_rows(uq, data.valid, seen=False, k=k)]
    return both[0].followed_by(both[1]).with_forecast(None)


def judged_rows(uq: rg.LastLayerRigidity, data: Sets, k: int = 0) -> TargetView:
    """The rows to judge one target by, with the ignorant forecast of the fit."""
    rows = dense_rows(uq, data.test, seen=False, k=k)
    forecast = fitted_rows(uq, data, k).forecast
    distance = rows.mean - forecast(rows.features)
    return replace(
        rows, distance=distance, extent=forecast.extent(rows.features), forecast=forecast
    )


def whole_fit(uq, data: Sets, k: int = 0, **parts) -> target_fit.TargetFit:
    return target_fit.fitted_target(fitted_rows(uq, data, k), target_fit.Components(**parts))


def test_predictions_are_those_of_the_fit_to_left_out_and_validation_rows(one, uq):
    fit, test = whole_fit(uq, one), judged_rows(uq, one)
    p = uq.predict(one.test[0])
    close(p.unit[:, 0].square(), fit.squared_scale(test), 1e-5)
    theta = (
        fit.tilt(fit.design.columns(test)).clamp(-3, 3)
        / fit.guard.beyond(test.q, test.extent)[:, None]
    )
    close(p.distribution.tilt[:, 0], theta, 1e-4)
    close(torch.as_tensor(p.distribution.df), torch.tensor(fit.scale.df), 1e-5)
    nll = -p.log_prob(one.test[1])[:, 0]
    close(nll, fit.nll(test), 1e-5)


def test_epistemic_and_noise_make_up_the_second_moment_of_the_distribution(one, uq):
    p, test = uq.predict(one.test[0]), dense_rows(uq, one.test, seen=False)
    close(p.epistemic[:, 0], uq.scale.square() * test.q)
    close(p.variance, p.unit.square() * p.distribution.second, 1e-8)
    assert bool((p.noise > 0).all())
    few = uq.predict(one.test[0][:5])
    draws = few.sample(5000, torch.Generator().manual_seed(0)) - few.mean
    close(draws.square().mean(0), few.variance, 0.2)


def unguarded(uq, one, test):
    """The squared scale before the guard, by the fit."""
    fit = whole_fit(uq, one)
    h = fit.scale.log_noise(fit.design.columns(test)).clamp(*fit.bounds)
    return h.exp() + uq.calibration.head.scale2 * test.q


def test_the_squared_scale_is_noise_plus_scale_widened_by_the_guard(one, uq):
    guard, test = uq.calibration.guard, dense_rows(uq, one.test, seen=False)
    s2 = unguarded(uq, one, test)
    level = guard.factor * (guard.variance + (test.mean - guard.centre) ** 2)
    share = ((test.q / guard.reference).log() / math.log(SPAN)).clamp(0, 1) ** POWER
    widened = s2 * (level / s2).clamp(min=1) ** share
    close(uq.predict(one.test[0]).unit[:, 0].square(), widened, 1e-5)
    assert bool((widened > 1.1 * s2).any())
    assert bool((widened == s2).any())


def test_the_guard_is_that_of_its_formulas(one, uq):
    rows, guard = fitted_rows(uq, one), uq.calibration.guard
    t = slow_auto.t_quantile(0.95, uq.calibration.distribution.df)
    close(guard.factor[0], torch.tensor((1.6448536 / t) ** 2, dtype=F64), 1e-6)
    close(guard.reference[0], torch.quantile(rows[rows.seen].q, REFERENCE), 1e-8)
    targets = torch.cat([one.train[1], one.valid[1]])
    close(guard.centre[0], targets.mean(), 1e-8)
    close(guard.variance[0], targets.var(), 1e-8)  # none is far out
    assert guard.by_feature is None and guard.extent_weight is None


@pytest.mark.parametrize("wild", ["target", "input"])
@pytest.mark.parametrize("size", [30.0, 1e6])
def test_a_single_wild_row_hardly_moves_the_guard(one, uq, wild, size):
    x, y = (part.clone() for part in one.valid)
    if wild == "target":
        y[3] += size
    else:
        x[3] *= size
    moved = fitted(one._replace(valid=(x, y))).calibration.guard
    close(moved.variance, uq.calibration.guard.variance, 0.2)
    spread = float(uq.calibration.guard.variance.sqrt())
    assert float((moved.centre - uq.calibration.guard.centre).abs()) < 0.15 * spread


def test_the_report_says_how_wide_a_usual_bar_is_at_ten_times_the_reference(one, uq):
    guard, distribution = uq.calibration.guard, uq.calibration.distribution
    second = float(torch.as_tensor(distribution.second))
    usual = (
        float(uq.noise_model.level) / second
        + float(uq.calibration.head.scale2) * 10 * guard.reference
    )
    level = guard.factor * guard.variance
    width = (torch.maximum(usual, level) * second).sqrt().item()
    assert f"and at least {width:.3g} at ten times" in str(uq.calibration_report)


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


def atomic_bars(per_atom, folder, alike=False):
    """A calibration of structures, bars of new ones near and far, and those that are frozen."""
    torch.manual_seed(0)
    model = AtomicEnergies()
    train = structures(500, 1, model, per_atom, alike)
    valid, test = (structures(n, n, model, per_atom) for n in (250, 60))
    with torch.no_grad():
        for head, constant in zip((model.one, model.other), per_atom, strict=True):
            head.bias.add_(constant)
    uq = rg.LastLayerRigidity(model, layer=["one", "other"]).fit(train)
    uq.calibrate(
        valid, method=rg.Full(noise="constant", distribution="student-t")
    )  # a head would look at the predictions
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
    guard = moved.calibration.guard
    assert bool(guard.by_feature.any())  # the forecaster knows the atoms
    close(guard.variance, uq.calibration.guard.variance, 1e-6)
    close(moved_bars, bars, 1e-5)
    close(moved_frozen, frozen, 1e-5)
    close(moved_frozen, moved_bars[60:], 1e-8)


def test_larger_structures_are_not_unfamiliar(tmp_path):
    """Two copies of a structure, far from each other: four times its q, and familiar atoms."""
    uq, _, _ = atomic_bars(torch.zeros(2, dtype=F64), tmp_path)
    atoms = structures(60, 5, uq.model, torch.zeros(2, dtype=F64))[0]
    one, two = uq.predict(atoms), uq.predict(torch.cat([atoms, atoms], 1))
    guard = uq.calibration.guard
    close(two.rigidity, one.rigidity / 4, 1e-6)
    features = [uq.features(part) for part in (atoms, torch.cat([atoms, atoms], 1))]
    extents = [part @ guard.extent_weight[0] for part in features]
    close(extents[1], 2 * extents[0], 1e-8)
    beyond = [
        guard.beyond(1 / p.rigidity[:, 0], e) for p, e in zip((one, two), extents, strict=True)
    ]
    close(beyond[1], beyond[0], 1e-6)
    assert bool((beyond[0] > 1).any())


def test_few_rows_do_not_explain_the_targets_by_many_bias_columns():
    """Thirty columns would explain twenty-five targets exactly, and no bar would grow."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (25, 30), generator=generator).double()
    target = torch.randn(25, generator=generator, dtype=F64)
    one = torch.ones(25, dtype=F64)
    rows = slow_auto.view_of(target, one, one, 0 * one, one, counts, seen=False)
    forecast = rows.with_forecast(torch.arange(30)).forecast
    total = counts.sum(1)
    slope = (total @ target) / (total @ total)
    close(forecast(counts), slope * total)
    close(forecast.variance, (target - slope * total).square().sum() / 24)


def test_the_scale_that_predictions_share_is_that_of_bayesian_regression(one, uq):
    held = dense_rows(uq, one.valid, seen=False)
    ratio = held.residual.square() / (1 + held.q)
    bayes = ratio.clamp(max=float(25 * ratio.median() / 0.455)).mean().sqrt()
    close(uq.calibration.joint[0], bayes, 1e-8)
    fit = whole_fit(uq, one)
    optimism = 1 - torch.exp(-fit.scale.vector[2].clamp(min=0))
    rows = dense_rows(uq, one.train, seen=True).followed_by(held)
    gap = 0.5 * optimism * rows.mean_square / held.q.mean()
    single = (0.5 * (fit.scale.scale2 + gap)).sqrt()
    close(uq.scale[0], torch.maximum(single, bayes), 1e-4)


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
    close(p.std.double(), uq.predict(one.test[0]).std, 0.01)


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
        close(whole.std[:, k], p.std[:, 0], 1e-4)
        close(whole.quantile(0.9)[:, k], p.quantile(0.9)[:, 0], 1e-4)
        close(both.scale[k], alone.scale[0], 1e-4)


def scaled(data: Sets, a: float, b: float) -> Sets:
    """y -> a y + b, for data and model."""
    model = nn.Sequential(data.model[0], data.model[1], nn.Linear(10, 1).double())
    with torch.no_grad():
        model[2].weight.copy_(a * data.model[2].weight)
        model[2].bias.copy_(a * data.model[2].bias + b)
    return Sets(model, *((x, a * y + b) for x, y in data[1:]))


@pytest.mark.parametrize(("a", "b"), [(1e-4, 0.0), (-3.0, 50.0), (1e5, -1e6)])
def test_bars_scale_with_the_targets(one, uq, a, b):
    other = scaled(one, a, b)
    p, whole = fitted(other).predict(one.test[0]), uq.predict(one.test[0])
    close(p.std, abs(a) * whole.std, 1e-3)
    level = 0.1 if a > 0 else 0.9
    close(p.quantile(level), a * whole.quantile(0.1) + b, 1e-3)


def test_the_order_of_features_does_not_matter(one, uq):
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(one.model[0].weight[order])
        model[0].bias.copy_(one.model[0].bias[order])
        model[2].weight.copy_(one.model[2].weight[:, order])
        model[2].bias.copy_(one.model[2].bias)
    alike(fitted(one._replace(model=model)).predict(one.test[0]), uq.predict(one.test[0]), 1e-4)


def test_the_order_of_rows_does_not_matter_beyond_the_folds(one, uq):
    mixed = [torch.randperm(n, generator=torch.Generator().manual_seed(n)) for n in (240, 120)]
    train, valid = ([t[m] for t in d] for d, m in zip((one.train, one.valid), mixed, strict=True))
    again = fitted(one._replace(train=tuple(train), valid=tuple(valid)))
    alike(again.predict(one.test[0]), uq.predict(one.test[0]), 1e-6)


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
    alike(first, second, 1e-4)
    assert uq.ridge > 1e-9


def test_given_training_rows_are_those_that_the_fit_kept(one, uq):
    again = rg.LastLayerRigidity(one.model).fit(one.train, keep_rows=0)
    report = again.calibrate(one.valid, train=one.train).calibration_report
    alike(again.predict(one.test[0]), uq.predict(one.test[0]), 1e-6)
    assert report.seen == len(one.train[0])


def test_the_cross_validated_ladder_is_that_of_five_folds(one, uq):
    """The last rung: the full model, fitted without the fold."""
    rows = fitted_rows(uq, one)
    whole = target_fit.fitted_target(rows, target_fit.Components())
    places, found = (~rows.seen).nonzero()[:, 0], []
    for fold in range(5):
        out = places[fold::5]
        rest = torch.ones(len(rows), dtype=torch.bool)
        rest[out] = False
        fit = target_fit.fitted_target(rows[rest], target_fit.Components(), whole)
        found.append(fit.nll(rows[out]))
    assert uq.calibration_report.ladder["full"] == pytest.approx(
        float(torch.cat(found).mean()), abs=1e-5
    )
    assert uq.calibration_report.value == uq.calibration_report.ladder["full"]


def taking(monkeypatch, rung: str) -> None:
    """Let the ladder take a rung, whatever cross-validation says."""
    monkeypatch.setattr(full, "best_rung", lambda scores, barred, allowed: rung)


def test_the_papers_form_is_taken_as_a_rung(one, monkeypatch):
    paper = fitted(one, "paper")
    taking(monkeypatch, "paper")
    uq = fitted(one)
    alike(uq.predict(one.test[0]), paper.predict(one.test[0]), 1e-6)
    assert uq.calibration.head is None
    assert "chosen: the paper's form; richer models are not shown to be better" in str(
        uq.calibration_report
    )
    assert (
        uq.calibration_report.value == uq.calibration_report.ladder["paper"]
        and uq.calibration_report.rung == "paper"
    )


def test_constant_noise_is_taken_as_a_rung(one, monkeypatch):
    taking(monkeypatch, "constant noise")
    plain = fitted(one, rg.Full(noise="constant", distribution="gaussian"))
    uq = fitted(one)
    alike(uq.predict(one.test[0]), plain.predict(one.test[0]), 1e-6)
    assert "chosen: constant noise and a Gaussian distribution" in str(uq.calibration_report)


def test_one_constant_bar_is_a_rung_that_grows_beyond_the_training_rows(one, monkeypatch):
    taking(monkeypatch, "constant bar")
    uq = fitted(one)
    p, guard = uq.predict(one.test[0]), uq.calibration.guard
    inside = p.std[1 / p.rigidity < guard.reference]
    assert len(inside) > 20
    close(inside, inside[:1].expand_as(inside), 1e-4)
    assert 0.7 < float(inside[0] / uq.calibration_report.constant) < 1.5
    far = uq.predict(30 * one.test[0])
    assert bool((far.std[1 / far.rigidity > 10 * guard.reference] > 1.5 * inside[0]).all())
    assert "chosen: one constant bar" in str(uq.calibration_report)
    assert any(
        "No other bars were shown to be better" in said for said in uq.calibration_report.warnings
    )


def test_a_rung_that_is_not_to_be_taken_is_passed_over(one, monkeypatch):
    monkeypatch.setattr(full, "FEWEST_DIRECTIONS", 1e9)
    monkeypatch.setattr(full, "CLEARLY", -1e9)  # the simplest is taken
    monkeypatch.setattr(full, "CAUTION", 1e9)
    assert fitted(one).calibration_report.rung == "constant bar"


def test_the_gain_is_that_of_rungs_which_other_folds_take(one, uq):
    rows = fitted_rows(uq, one)
    parts = target_fit.Components()
    scores = full.left_out_scores(rows, full.rung_fits(rows, parts), parts, None)
    error = rows.held_out.residual
    fold = torch.arange(len(error)) % 5
    gains = torch.empty_like(error)
    for k in range(5):
        rung = full.best_rung([scores.without(k)], frozenset(), 2.0)
        variance = error[fold != k].square().mean()
        constant = 0.5 * (2 * torch.pi * variance).log() + 0.5 * error.square() / variance
        gains[fold == k] = (constant - scores.nll[rung])[fold == k]
    assert uq.calibration_report.gain == pytest.approx(float(gains.mean()), abs=1e-4)
    assert uq.calibration_report.gain_error == pytest.approx(
        float(gains.std() / len(gains) ** 0.5), rel=1e-3
    )


def test_the_full_model_is_better_by_the_ladder_where_noise_follows_the_inputs(uq):
    rungs = uq.calibration_report.ladder
    assert rungs["noise that follows the inputs"] < rungs["heavy tails"]
    assert rungs["full"] < rungs["paper"]
