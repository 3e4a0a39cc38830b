"""What must not matter: precision, units, the order of rows, later changes, how data are held."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.any_regressor.curvature import exact_hessian
from rigidities.any_regressor.curvature.pseudo_hessian import TrainingRows
from rigidities.any_regressor.derivatives.differentiation import Differentiation, looped_rows
from rigidities.any_regressor.derivatives.regressor import Regressor
from rigidities.any_regressor.derivatives.tangents import Explicit, Outer, Tangents
from rigidities.calibration.methods import Paper
from rigidities.data.samples import Samples
from rigidities.losses import MSE, GaussianNLL, Huber
from tests.support.nets import Net, Rows

F64 = torch.float64


def linear(w, x):
    return x @ w


def mixed(rows, width, condition, seed=0):
    """Design matrix with singular values from 1 down to 1/condition, float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator, dtype=F64)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    values = torch.logspace(0, -math.log10(condition), width, dtype=F64)
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("hessian", ["gauss-newton", "exact"])
@pytest.mark.parametrize("condition", [1e1, 1e3])
def test_the_stated_tolerance_holds_for_float32_models(hessian, condition):
    x = (100 * mixed(200, 12, condition)).float()
    w = torch.ones(12)
    pr = rg.PredictionRigidity(linear, w, hessian=hessian).fit(x, x @ w).set_scale(1.0)
    double = x.double()
    exact = (double * torch.linalg.solve(double.T @ double, double.T).T).sum(1)
    error = float((pr.variance(x) / exact - 1).abs().max())
    assert error <= pr.tolerance < 0.1


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(("slope", "warns"), [(0.0, True), (1.0, False)])
def test_no_unit_of_a_parameter_hides_that_it_is_no_minimum(unit, slope, warns, recwarn):
    x = torch.linspace(-1, 1, 40, dtype=F64) * unit
    noise = 0.01 * torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=F64)
    design = torch.stack([torch.ones_like(x), x], 1)
    y = 1 + x / unit + noise
    w = torch.linalg.lstsq(design, y).solution * torch.tensor([1.0, slope], dtype=F64)
    rg.PredictionRigidity(linear, w).fit(design, y)
    said = [str(entry.message) for entry in recwarn.list]
    assert any("not a minimum" in message for message in said) == warns


@pytest.mark.parametrize("swap", [False, True], ids=["in order", "swapped"])
def test_rows_that_a_model_reorders_keep_their_own_error_bars(swap):
    def reordered(m, x):
        """Rows are sorted before the layer and unsorted after it, as dispatching models do."""
        order = x[:, 0].argsort()
        return m.outer(torch.tanh(m.inner(x[order]))[order.argsort()])

    torch.manual_seed(0)
    model = Net(reordered, inner=nn.Linear(2, 4), outer=nn.Linear(4, 1)).double()
    x = torch.randn(20, 2, dtype=F64)
    if swap:
        x[:2] = x[:2].flip(0)
    regressor = Regressor.of(model)
    _, tangents = Differentiation.of(regressor, x)(x)
    torch.testing.assert_close(tangents.matrix(), looped_rows(frozenset({0}), regressor, x))


def test_running_statistics_that_move_after_the_fit_are_not_followed():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).eval()
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    pr = rg.PredictionRigidity(model, ridge=0.1).fit(x, model(x).detach()).set_scale(1.0)
    before = pr.predict(x)
    model[1].running_mean += 1
    after = pr.predict(x)
    assert torch.equal(before.mean, after.mean) and torch.equal(before.std, after.std)


@pytest.mark.parametrize("form", ["dense", "dual"])
def test_a_fit_does_not_hold_on_to_its_data(form):
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    data = Rows(x, x.sum(1))
    gone = weakref.ref(data)
    pr = (
        rg.PredictionRigidity(linear, torch.ones(3, dtype=F64), ridge=0.1, form=form)
        .fit(data)
        .set_scale(1.0)
    )
    del data
    gc.collect()
    assert gone() is None
    whole = (
        rg.PredictionRigidity(linear, torch.ones(3, dtype=F64), ridge=0.1)
        .fit(x, x.sum(1))
        .set_scale(1.0)
    )
    torch.testing.assert_close(pr.variance(x), whole.variance(x))


def test_data_that_give_nothing_when_read_again_are_refused_with_the_cure():
    x = torch.randn(8, 3, dtype=F64)
    regressor = Regressor.of(linear, torch.ones(3, dtype=F64))
    samples = Samples.of([(x, x.sum(1))], like=regressor.flat)
    training = TrainingRows(Differentiation.of(regressor, x), samples, MSE())
    assert len(list(training.pieces(5))) == 2
    samples.data.clear()
    with pytest.raises(ValueError, match="gave no batch when they were read again"):
        list(training.pieces(5))


@pytest.mark.parametrize("rows", [3, 5, 8])
@pytest.mark.parametrize("loops", [False, True], ids=["mapped", "looped"])
@pytest.mark.parametrize("parameters", [3, 20])
@pytest.mark.filterwarnings("ignore:f cannot be transformed")
def test_an_input_that_all_samples_share_may_be_as_long_as_a_later_batch(rows, loops, parameters):
    def f(w, x, grid):
        if loops:
            float(x.sum())
        return w[0] * x + w[1] * x**2 * grid.sum() + w[2] * torch.exp(x * grid.mean()) + w[3:].sum()

    x, grid = torch.linspace(-1, 1, 9, dtype=F64), torch.linspace(0, 2, 5, dtype=F64)
    regressor = Regressor.of(f, torch.ones(parameters, dtype=F64))
    differentiation = Differentiation.of(regressor, x, grid)
    _, tangents = differentiation(x[:rows], grid)
    _, whole = differentiation(x, grid)
    torch.testing.assert_close(tangents.matrix(), whole.matrix()[:rows])


def test_data_are_read_batch_by_batch():
    seen = []

    class Watched(Rows):
        def __getitem__(self, i):
            seen.append(i)
            return super().__getitem__(i)

    data = Watched(torch.randn(10, 2), torch.randn(10))
    samples = Samples.of(data, like=torch.ones(1), batch_size=2)
    seen.clear()
    next(iter(samples))
    assert seen == [0, 1] and samples.count == 10


def test_gathered_tangents_equal_their_parts_whatever_comes():
    def factored(n):
        return Tangents((Outer(torch.randn(n, 3), torch.randn(n, 1, 2)),))

    parts = [factored(2), Tangents((Explicit(torch.randn(4, 1, 6)),)), factored(3)]
    for order in ([0, 2], [0, 1, 2], [1, 0, 2]):
        chosen = [parts[i] for i in order]
        expected = torch.cat([part.matrix() for part in chosen])
        assert torch.equal(Tangents.join(chosen).matrix(), expected)
    assert isinstance(Tangents.join([parts[0], parts[2]]).blocks[0], Outer)


@pytest.mark.thorough
def test_the_exact_hessian_keeps_what_it_saves_within_bounds(monkeypatch):
    convolutions = nn.Conv1d(1, 4, 5), nn.Tanh(), nn.Conv1d(4, 4, 5)
    pooled = nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 1)
    net = nn.Sequential(*convolutions, *pooled)
    x = torch.randn(6, 1, 200)
    y = net(x).detach()
    pieces = []
    of = exact_hessian.Differentiated.of

    def watched(function, point):
        pieces.append(function)
        return of(function, point)

    monkeypatch.setattr(exact_hessian.Differentiated, "of", watched)
    pr = rg.PredictionRigidity(net, hessian="exact", ridge=1.0)
    whole = pr.fit(x, y).set_scale(1.0).variance(x)
    assert len(pieces) == 1
    activations = 4 * 200 * 8  # bytes of a sample's, at least
    monkeypatch.setattr(exact_hessian, "SAVED", 2 * activations)
    few = pr.fit(x, y).set_scale(1.0).variance(x)
    assert len(pieces) == 1 + 6
    torch.testing.assert_close(few, whole)


def test_another_ridge_costs_no_factorisation(monkeypatch):
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    y = x.sum(1) + 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=F64)
    w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    pr = rg.PredictionRigidity(linear, w, ridge=0.1).fit(x, y)
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("factorised again"))
    report = pr.calibrate(x + 0.1, y, method="paper").calibration_report
    assert report.ridge == pr.ridge != 0.1
    assert pr.calibrate(x, y, method=Paper(ridge=0.5)).calibration_report.ridge == pr.ridge == 0.5


def test_a_flat_loss_is_named_as_the_cause():
    x = torch.linspace(0, 1, 10, dtype=F64)[:, None]
    with pytest.raises(ValueError, match="10 of them lie where the loss has no curvature"):
        rg.PredictionRigidity(linear, torch.ones(1, dtype=F64), loss=Huber(1e-9)).fit(
            x, x[:, 0] + torch.tensor([1.0, -1.0], dtype=F64).repeat(5)
        )


def test_a_concave_regulariser_is_named_as_the_cause():
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    pr = rg.PredictionRigidity(
        linear, torch.ones(2, dtype=F64), regulariser=lambda w: -100 * (w - 1).square().sum()
    )
    with pytest.raises(ValueError, match=r"indefinite.*Hessian of the regulariser"):
        pr.fit(x, x.sum(1))


def test_outputs_of_unlike_errors_are_not_given_one_scale_in_silence():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=generator, dtype=F64)
    level = torch.tensor([0.01, 10.0], dtype=F64)
    y = x[:, :2] + level * torch.randn(50, 2, generator=generator, dtype=F64)
    fit = torch.linalg.lstsq(x, y).solution
    plain = rg.PredictionRigidity(linear, fit).fit(x, y)
    with pytest.warns(UserWarning, match="best scales of the outputs differ"):
        plain.calibrate(x + 0.01, y, method="paper")
    weighed = rg.PredictionRigidity(linear, fit, loss=GaussianNLL(level.square())).fit(x, y)
    weighed.calibrate(x + 1e-6, y, method="paper")
    ratio = weighed.predict(x).std.mean(0)
    assert 300 < float(ratio[1] / ratio[0]) < 3000


class Unsteady:
    """Rows whose products vary from call to call, as rounding makes them in extreme cases."""

    def __init__(self, rows):
        self.rows, self.calls = rows, 0

    def forward(self, vectors):
        return self.rows.forward(vectors)

    def backward(self, rows):
        self.calls += 1
        return self.rows.backward(rows) * (1 + 0.01 * (self.calls % 7))


def test_a_residual_that_rounding_spoilt_is_noticed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = torch.randn(60, 3, dtype=F64)
    pr = (
        rg.PredictionRigidity(model, ridge=1e-2, form="matrix-free")
        .fit(x, model(x).detach())
        .set_scale(1.0)
    )
    form = pr._fit.form
    unsteady = replace(form, rows=[Unsteady(rows) for rows in form.rows])
    _, asked = Differentiation.of(Regressor.of(model), x)(x[:2])
    torch.testing.assert_close(form.quadratic(asked), pr.variance(x[:2]))
    with pytest.warns(UserWarning, match="may be too small by up to"):
        unsteady.quadratic(asked)
