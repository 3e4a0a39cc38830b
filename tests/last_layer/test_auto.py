"""`calibrate(valid)`: predictions equal the fits of each target, and obey the laws of the house."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.calibration import automatic, ladder, target_fit
from rigidities.calibration.rows import REFERENCE, Rows, target_rows
from rigidities.prediction.head import GROWTH
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


def fitted(data: Sets, **options) -> rg.LastLayerRigidity:
    uq = rg.LastLayerRigidity(data.model).fit(data.train)
    uq.calibrate(data.valid, **options)
    return uq


def dense_rows(uq: rg.LastLayerRigidity, data: tuple, *, seen: bool, k: int = 0) -> Rows:
    """Rows of one target by a dense inverse."""
    x, y = data
    f = uq.features(x)
    whole = uq.gram.matrix + uq.ridge * torch.eye(f.shape[1])
    q = (f * torch.linalg.solve(whole, f.T).T).sum(1)
    mean = uq.model(x).detach()[:, k]
    one = torch.ones_like(q)
    return target_rows([y[:, k] - mean, q, one, mean, one, f], seen=seen)


def whole_fit(uq, data: Sets, k: int = 0, **parts) -> target_fit.TargetFit:
    both = [dense_rows(uq, data.train, seen=True, k=k), dense_rows(uq, data.valid, seen=False, k=k)]
    return target_fit.fitted(Rows.join(both), target_fit.Parts(**parts))


def test_predictions_are_those_of_the_fit_to_left_out_and_validation_rows(one, uq):
    fit, test = whole_fit(uq, one), dense_rows(uq, one.test, seen=False)
    p = uq.predict(one.test[0])
    close(p.scale[:, 0].square(), fit.squared_scale(test), 1e-5)
    theta = fit.tilt(fit.design.columns(test)).clamp(-3, 3) / fit.guard.beyond(test.q)[:, None]
    close(p.law.tilt[:, 0], theta, 1e-4)
    close(torch.as_tensor(p.law.df), torch.tensor(fit.scale.df), 1e-5)
    nll = -p.log_prob(one.test[1])[:, 0]
    close(nll, fit.nll(test), 1e-5)


def test_epistemic_and_noise_make_up_the_second_moment_of_the_law(one, uq):
    p, test = uq.predict(one.test[0]), dense_rows(uq, one.test, seen=False)
    close(p.epistemic[:, 0], uq.scale.square() * test.q)
    close(p.variance, p.scale.square() * p.law.second, 1e-8)
    assert bool((p.noise > 0).all())
    few = uq.predict(one.test[0][:5])
    draws = few.sample(5000, torch.Generator().manual_seed(0)) - few.mean
    close(draws.square().mean(0), few.variance, 0.2)


def test_the_squared_scale_is_noise_plus_scale_plus_guard(one, uq):
    own, test = uq.calibration, dense_rows(uq, one.test, seen=False)
    fit = whole_fit(uq, one)
    h = fit.scale.log_noise(fit.design.columns(test)).clamp(*fit.bounds)
    reference, power = own.guard.reference, (test.q / own.guard.reference).clamp(min=1) ** GROWTH
    beyond = own.guard.scale2 * reference * (power - 1)
    s2 = h.exp() + own.head.scale2 * test.q + beyond
    close(uq.predict(one.test[0]).scale[:, 0].square(), s2, 1e-5)
    assert bool((beyond > 0).any())
    assert bool((beyond == 0).any())


def test_the_guard_is_that_of_its_formulas(one, uq):
    seen, held = (dense_rows(uq, d, seen=s) for d, s in ((one.train, True), (one.valid, False)))
    ratio = held.residual.square() / held.q
    mean = ratio.clamp(max=float(25 * ratio.median() / 0.455)).mean()
    t = slow_auto.t_quantile(0.95, uq.calibration.law.df)
    close(uq.calibration.guard.scale2[0], mean * (1.6448536 / t) ** 2, 1e-6)
    close(uq.calibration.guard.reference[0], torch.quantile(seen.q, REFERENCE), 1e-8)


def test_the_scale_that_predictions_share_is_that_of_bayesian_regression(one, uq):
    held = dense_rows(uq, one.valid, seen=False)
    ratio = held.residual.square() / (1 + held.q)
    bayes = ratio.clamp(max=float(25 * ratio.median() / 0.455)).mean().sqrt()
    close(uq.calibration.joint[0], bayes, 1e-8)
    fit = whole_fit(uq, one)
    optimism = 1 - torch.exp(-fit.scale.optimism.clamp(min=0))
    rows = Rows.join([dense_rows(uq, one.train, seen=True), held])
    gap = 0.5 * optimism * rows.size / held.q.mean()
    single = (0.5 * (fit.scale.scale2 + gap)).sqrt()
    close(uq.scale[0], torch.maximum(single, bayes), 1e-4)


def test_bars_are_the_same_batch_by_batch_and_called(one, uq):
    whole, parts = uq.predict(one.test[0]), uq.predict(one.test[0], batch_size=7)
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


def test_several_targets_have_the_bars_of_each_alone():
    data = sets(targets=2)
    both, ridge = rg.LastLayerRigidity(data.model).fit(data.train), 0.3
    both.calibrate(data.valid, ridge=ridge)
    whole = both.predict(data.test[0])
    for k in range(2):
        model = nn.Sequential(data.model[0], data.model[1], nn.Linear(10, 1).double())
        with torch.no_grad():
            model[2].weight.copy_(data.model[2].weight[k : k + 1])
            model[2].bias.copy_(data.model[2].bias[k : k + 1])
        parts = [(x, y[:, k : k + 1]) for x, y in data[1:]]
        alone = rg.LastLayerRigidity(model).fit(parts[0])
        alone.calibrate(parts[1], ridge=ridge)
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
    pairs = [fitted(one._replace(model=m), ridge=1e-9) for m in (model, one.model)]
    first, second = (pair.predict(one.test[0]) for pair in pairs)
    alike(first, second, 1e-4)
    assert uq.ridge > 1e-9


def test_given_training_rows_are_those_that_the_fit_kept(one, uq):
    again = rg.LastLayerRigidity(one.model).fit(one.train, sample=0)
    report = again.calibrate(one.valid, train=one.train)
    alike(again.predict(one.test[0]), uq.predict(one.test[0]), 1e-6)
    assert report.seen == len(one.train[0])


def test_the_cross_validated_ladder_is_that_of_five_folds(one, uq):
    """The last rung: the full model, fitted without the fold."""
    rows = Rows.join([dense_rows(uq, one.train, seen=True), dense_rows(uq, one.valid, seen=False)])
    whole = target_fit.fitted(rows, target_fit.Parts())
    places, found = (~rows.seen).nonzero()[:, 0], []
    for fold in range(5):
        out = places[fold::5]
        rest = torch.ones(len(rows), dtype=torch.bool)
        rest[out] = False
        fit = target_fit.fitted(rows[rest], target_fit.Parts(), whole)
        found.append(fit.nll(rows[out]))
    assert uq.report.ladder["full"] == pytest.approx(float(torch.cat(found).mean()), abs=1e-5)
    assert uq.report.value == uq.report.ladder["full"]


def taking(monkeypatch, rung: str) -> None:
    """Let the ladder take a rung, whatever cross-validation says."""
    monkeypatch.setattr(ladder, "best_rung", lambda scores, barred, allowed: rung)


def test_the_papers_form_is_taken_as_a_rung(one, monkeypatch):
    paper = fitted(one, criterion="nll")
    taking(monkeypatch, "paper")
    uq = fitted(one)
    alike(uq.predict(one.test[0]), paper.predict(one.test[0]), 1e-6)
    assert uq.calibration.head is None
    assert "chosen: the paper's form: richer ones are not shown to be better" in str(uq.report)
    assert uq.report.value == uq.report.ladder["paper"] and uq.report.rung == "paper"


def test_constant_noise_is_taken_as_a_rung(one, monkeypatch):
    taking(monkeypatch, "constant noise")
    plain, uq = fitted(one, noise="constant", law="gaussian"), fitted(one)
    alike(uq.predict(one.test[0]), plain.predict(one.test[0]), 1e-6)
    assert "chosen: constant noise and a Gaussian law" in str(uq.report)


def test_one_constant_bar_is_a_rung_that_grows_beyond_the_training_rows(one, monkeypatch):
    taking(monkeypatch, "constant bar")
    uq = fitted(one)
    p, guard = uq.predict(one.test[0]), uq.calibration.guard
    inside = p.std[1 / p.rigidity < guard.reference]
    assert len(inside) > 20
    close(inside, inside[:1].expand_as(inside), 1e-4)
    assert 0.7 < float(inside[0] / uq.report.constant) < 1.5
    far = uq.predict(30 * one.test[0])
    assert bool((far.std[1 / far.rigidity > 10 * guard.reference] > 1.5 * inside[0]).all())
    assert "chosen: one constant bar" in str(uq.report)
    assert any("no others were shown to be better" in said for said in uq.report.warnings)


def test_a_rung_that_is_not_to_be_taken_is_passed_over(one, monkeypatch):
    monkeypatch.setattr(automatic, "FEWEST", 1e9)
    monkeypatch.setattr(ladder, "CLEARLY", -1e9)  # the simplest is taken
    monkeypatch.setattr(ladder, "CAUTION", 1e9)
    assert fitted(one).report.rung == "constant bar"


def test_the_gain_is_that_of_rungs_which_other_folds_take(one, uq):
    rows = Rows.join([dense_rows(uq, one.train, seen=True), dense_rows(uq, one.valid, seen=False)])
    parts = target_fit.Parts()
    scores = ladder.judged(rows, ladder.rungs(rows, parts), parts, None)
    error = rows.held.residual
    fold = torch.arange(len(error)) % 5
    gains = torch.empty_like(error)
    for k in range(5):
        rung = ladder.best_rung([scores.without(k)], frozenset(), 2.0)
        variance = error[fold != k].square().mean()
        constant = 0.5 * (2 * torch.pi * variance).log() + 0.5 * error.square() / variance
        gains[fold == k] = (constant - scores.nll[rung])[fold == k]
    assert uq.report.gain == pytest.approx(float(gains.mean()), abs=1e-4)
    assert uq.report.gain_error == pytest.approx(float(gains.std() / len(gains) ** 0.5), rel=1e-3)


def test_the_full_model_is_better_by_the_ladder_where_noise_follows_the_inputs(uq):
    rungs = uq.report.ladder
    assert rungs["noise that follows the inputs"] < rungs["heavy tails"]
    assert rungs["full"] < rungs["paper"]
