"""The refitted readout: against dense ridge regression, a fresh fit of the copy, and refusals."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities.last_layer import Refitted
from tests.support import oracle, zoo
from tests.support.nets import Net, Trained, trained
from tests.support.readouts import filed, layers_of
from tests.support.refusals import refused
from tests.support.zoo_fits import fitted_to, row_weights

TRAIN, TEST = (0, 1), 3  # draws
COMPUTED = [id for id in zoo.IDS if "normed_head" in id]
WITH_FEATURES = [id for id in zoo.IDS if "with_its_features" in id]
LOCAL = [id for id in zoo.IDS if zoo.OUTCOMES[id] == "local"]
LINEAR = [
    id
    for id in zoo.IDS
    if zoo.OUTCOMES[id] in ("plain", "linear", "part")
    and id not in {*zoo.PRECISION, *COMPUTED, *WITH_FEATURES}
]


def ridge_change(
    jacobian: Tensor, residuals: Tensor, weights: Tensor, biases: Tensor, ridge: float
) -> Tensor:
    """argmin_d |r - J d|^2 + s |w + d|^2 without the biases' part, of least length, by an SVD."""
    penalty = ridge**0.5 * torch.diag((~biases).double())
    rows, wanted = torch.cat([jacobian, penalty]), torch.cat([residuals, -penalty @ weights])
    return torch.linalg.lstsq(rows, wanted, rcond=1e-13, driver="gelsd").solution


def expected(cases: list[zoo.Case], test: zoo.Case, ridge: float, row_weight: Tensor) -> Tensor:
    """The output for the test batch with the ridge-optimal parameters of the readout."""
    names, clone = cases[0].parameters, oracle.float64_copy(cases[0].model)
    derivative = oracle.readout_jacobian if cases[0].differentiable else oracle.difference_jacobian
    own = {id(p): (name, p) for name in names for p in [clone.get_parameter(name)]}
    biases = [torch.full((p.numel(),), name.endswith("bias")) for name, p in own.values()]
    weights = torch.cat([p.detach().flatten() for _, p in own.values()])
    jacobian = torch.cat([oracle.rows(derivative(c.model, c.call, names)) for c in cases])
    outputs = [case.call(clone).detach() for case in cases]
    pairs = zip(cases, outputs, strict=True)
    residuals = torch.cat([(c.target.reshape(y.shape) - y).flatten() for c, y in pairs])
    root = row_weight.sqrt()
    change = ridge_change(
        root[:, None] * jacobian, root * residuals, weights, torch.cat(biases), ridge
    )
    return test.call(clone).detach() + derivative(test.model, test.call, names) @ change


def numbers(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_sums(new: rg.LastLayerRigidity, fresh: rg.LastLayerRigidity, off: float) -> None:
    """Of Gram, cross and square; `off` is relative to the largest that rows could bring."""
    for name in ("matrix", "cross", "square"):
        mine, theirs = getattr(new.gram, name), getattr(fresh.gram, name)
        size = theirs.abs().max()
        if name == "cross":  # nearly zero at the optimum
            largest = fresh.gram.diagonal.amax() * fresh.gram.square.diagonal().amax()
            size = largest.sqrt()
        assert float((mine - theirs).abs().max()) <= off * float(size), name
    assert new.gram.count == fresh.gram.count


# --- the weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("id", LINEAR)
def test_the_copy_predicts_by_the_ridge_optimal_weights(id):
    cases, test = [zoo.build(id, draw) for draw in TRAIN], zoo.build(id, TEST)
    uq = fitted_to(cases[0], [case.data for case in cases])
    before = numbers(uq.model)
    new = uq.refit()
    wanted = expected(cases, test, new.refitted.ridge, row_weights(uq, cases))
    torch.testing.assert_close(
        test.call(copy.deepcopy(new.model).eval()).detach(), wanted, rtol=1e-7, atol=1e-9
    )
    assert new.model is not uq.model
    assert all(torch.equal(before[name], tensor) for name, tensor in numbers(uq.model).items())


@pytest.mark.parametrize("id", LINEAR)
def test_the_sums_about_the_new_weights_are_those_of_a_fresh_fit(id):
    data = [zoo.build(id, draw).data for draw in TRAIN]
    case = zoo.build(id)
    new = fitted_to(case, data).refit()
    fresh = fitted_to(replace(case, model=new.model), data)
    if new.gram.targets is not None:  # of which nothing reads the rest
        for gram in (new.gram, fresh.gram):
            gram.square = gram.square.diagonal().diag()
    assert_same_sums(new, fresh, 1e-8)
    mine, theirs = filed(new), filed(fresh)
    assert mine.keys() == theirs.keys()
    for name in filter(lambda name: name.startswith("rows.columns."), theirs):
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=1e-8, atol=1e-9, equal_nan=True, msg=name
        )


@pytest.fixture(scope="module", params=[1, 3])
def net(request: pytest.FixtureRequest) -> Trained:
    return trained(request.param, steps=30)


def fitted(net: Trained, **options: Any) -> rg.LastLayerRigidity:
    return rg.LastLayerRigidity(net.model).fit(net.train, **options)


def test_float32_sums_follow_the_weights_as_they_are_rounded(net):
    uq = fitted(net)
    new = uq.refit()
    assert {p.dtype for p in new.model.parameters()} == {torch.float32}
    weights = [torch.cat([m[-1].weight, m[-1].bias[:, None]], 1).T for m in (new.model, uq.model)]
    change = (weights[0].double() - weights[1].double()).detach()  # (D, K)
    torch.testing.assert_close(new.gram.cross, uq.gram.after(change).cross, rtol=0, atol=1e-12)
    assert_same_sums(new, rg.LastLayerRigidity(new.model).fit(net.train), 1e-6)


def test_the_ridge_is_the_evidences_and_a_second_refit_changes_nothing(net):
    uq = fitted(net)
    new = uq.refit()
    report = uq.calibrate(net.valid, method=rg.Paper(criterion="evidence")).calibration_report
    assert new.refitted.ridge == pytest.approx(report.ridge, rel=1e-9)
    again = new.refit()
    assert again.refitted.ridge == pytest.approx(report.ridge, rel=1e-3)
    torch.testing.assert_close(again.model(net.test[0]), new.model(net.test[0]), atol=1e-4, rtol=0)


def test_sample_weights_weigh_the_rows(net):
    x, y = net.train
    weights = torch.rand(len(x), generator=torch.Generator().manual_seed(5))
    batches = [(x, y, weights)]
    options = {"forward": lambda m, b: m(b[0]), "target": lambda b: b[1]}
    model = copy.deepcopy(net.model).double()
    batches = [(x.double(), y.double(), weights.double())]
    uq = rg.LastLayerRigidity(model, **options).fit(batches, sample_weight=lambda b: b[2])
    new = uq.refit()
    hidden = model[:-1](x.double()).detach()
    root = weights.double().sqrt()[:, None]
    rows = torch.cat([hidden, torch.ones(len(x), 1)], dim=1).double()
    old = torch.cat([model[-1].weight, model[-1].bias[:, None]], dim=1).detach().mT
    biases = torch.tensor([False] * hidden.shape[1] + [True])
    change = ridge_change(root * rows, root * (y - rows @ old), old, biases, new.refitted.ridge)
    wanted = rows @ (old + change)
    torch.testing.assert_close(new.model(x.double()).detach(), wanted, rtol=1e-8, atol=1e-10)


def test_a_masked_target_is_refitted_to_its_own_rows():
    net = trained(2, steps=30)
    model, (x, y) = copy.deepcopy(net.model).double(), (t.double() for t in net.train)
    mask = torch.rand(y.shape, generator=torch.Generator().manual_seed(5)) > 0.4
    holes = torch.where(mask, y, 1e6)
    options = {"forward": lambda m, b: m(b[0]), "target": lambda b: b[1]}
    uq = rg.LastLayerRigidity(model, **options)
    new = uq.fit([(x, holes, mask)], sample_weight=lambda b: b[2].double()).refit()
    rows = torch.cat([model[:-1](x), torch.ones(len(x), 1)], dim=1).detach()
    old = torch.cat([model[-1].weight, model[-1].bias[:, None]], dim=1).detach().mT
    biases = torch.arange(rows.shape[1]) == rows.shape[1] - 1
    for k in range(2):
        own, w = mask[:, k], old[:, k]
        left = y[own, k] - rows[own] @ w
        change = ridge_change(rows[own], left, w, biases, new.refitted.ridge)
        got = new.model(x)[:, k].detach()
        torch.testing.assert_close(got, rows @ (w + change), rtol=1e-8, atol=1e-10)


# --- rows of their own --------------------------------------------------------------------------


def test_validation_rows_are_added_as_partial_fit_would(net):
    uq = fitted(net)
    both = rg.LastLayerRigidity(net.model).fit(net.train).partial_fit(net.valid)
    new, wanted = uq.refit(net.valid), both.refit()
    torch.testing.assert_close(new.model.state_dict(), wanted.model.state_dict())
    assert new.refitted.rows == len(net.train[0]) + len(net.valid[0]) == new.gram.count
    assert uq.gram.count == len(net.train[0])
    fresh = rg.LastLayerRigidity(new.model).fit(net.train).partial_fit(net.valid)
    assert_same_sums(new, fresh, 1e-6)


def test_validation_rows_judge_a_readout_that_has_not_seen_them(net):
    uq, (x, y) = fitted(net), net.valid
    alone, judged = uq.refit(), uq.refit(net.valid, add=False)
    torch.testing.assert_close(alone.model.state_dict(), judged.model.state_dict())
    for report in (judged.refitted, uq.refit(iter([net.valid])).refitted):
        for values, model in ((report.before, net.model), (report.after, alone.model)):
            wanted = (y - model(x)).double().square().mean(0).sqrt().detach()
            torch.testing.assert_close(values, wanted, rtol=1e-5, atol=0)
        assert report.judged == len(x)
    assert judged.refitted.rows == len(net.train[0])


def test_without_them_the_training_rows_are_left_out_by_cross_validation(net):
    uq, (x, y) = fitted(net), net.train
    new = uq.refit()
    rows = torch.cat([net.model[:-1](x), torch.ones(len(x), 1)], dim=1).double().detach()
    penalty = torch.eye(rows.shape[1]).double() * new.refitted.ridge
    penalty[-1, -1] = 0
    hat = rows @ torch.linalg.solve(rows.mT @ rows + penalty, rows.mT)
    left = 1 - hat.diagonal().mean()
    for values, model in ((new.refitted.before, net.model), (new.refitted.after, new.model)):
        wanted = (y - model(x)).double().square().mean(0).sqrt().detach() / left
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=0)
    assert new.refitted.better is None
    assert "refit(valid, add=False) shows" in str(new.refitted)


def test_the_report_calls_nothing_better_that_is_not():
    def report(*after: float) -> Refitted:
        before = torch.ones(len(after), dtype=torch.float64)
        return Refitted(0.5, 90, before, torch.tensor(after, dtype=torch.float64), 30)

    assert report(0.9).better is True
    assert "RMSE 1 -> 0.9 on 30 validation rows" in str(report(0.9))
    assert report(0.7, 1.1).better is True
    for worse in (report(1.2), report(1.0), report(0.9999), report(0.9, 1.2)):
        assert worse.better is False
        assert "not better (RMSE 1 -> " in str(worse)
        assert "keep the model as it is" in str(worse)
    assert str(report(*[0.9] * 8)).count("->") == 6


def test_a_readout_moved_away_is_found_again_and_called_better(net):
    model = copy.deepcopy(net.model)
    with torch.no_grad():
        model[-1].weight.mul_(1.5)
    new = rg.LastLayerRigidity(model).fit(net.train).refit(net.valid, add=False)
    assert new.refitted.better is True
    home = rg.LastLayerRigidity(net.model).fit(net.train).refit()
    torch.testing.assert_close(new.model(net.test[0]), home.model(net.test[0]), atol=1e-3, rtol=0)


# --- the new object -----------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_result_is_fitted_uncalibrated_and_works_as_any_other(net, tmp_path):
    uq = fitted(net)
    uq.calibrate(net.valid)
    before = uq(net.test[0])
    new = uq.refit()
    assert new.calibration_report is None
    assert uq.refitted is None
    with pytest.warns(UserWarning, match="not calibrated"):
        new(net.test[0])
    new.calibrate(net.valid)
    torch.testing.assert_close(new(net.test[0])[0], new.model(net.test[0]).detach())
    new.save(tmp_path / "new.safetensors")
    loaded = rg.LastLayerRigidity.load(tmp_path / "new.safetensors", new.model)
    torch.testing.assert_close(loaded(net.test[0]), new(net.test[0]))
    new.partial_fit(net.test)
    new.forget(net.train)
    torch.testing.assert_close(uq(net.test[0]), before)


def test_a_change_of_the_copy_is_noticed_as_of_any_model(net):
    new = fitted(net).refit()
    new.calibrate(net.valid)
    new.model[1] = nn.ReLU()
    refused("its predictions are not", new, net.test[0])
    with torch.no_grad():
        new.model[-1].weight.add_(1)
    refused("weights have changed", new, net.test[0])


def test_training_flags_and_options_of_the_model_are_kept():
    case = zoo.build("dropout_and_batch_norm_in_train_mode")
    uq = fitted_to(case, [case.data])
    new = uq.refit()
    assert [m.training for m in new.model.modules()] == [m.training for m in uq.model.modules()]
    named = trained(1, steps=5)
    uq = rg.LastLayerRigidity(named.model, layer="4", target=lambda b: b[1]).fit([named.train])
    assert layers_of(uq.refit().fit([named.train])) == ["4"]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (COMPUTED, "computed from other parameters"),
        (WITH_FEATURES, "Pass layer= instead of features="),
        (LOCAL, "not linear in the readout's weights"),
    ],
    ids=["computed", "features", "local"],
)
def test_readouts_without_settable_best_weights_are_refused(ids, message):
    assert ids
    for case in map(zoo.build, ids):
        uq = fitted_to(case, [case.data])
        refused(message, uq.refit)


def test_weights_tied_to_an_embedding_are_refused():
    model = Net(
        lambda m, i: m.head(torch.tanh(m.embedding(i))),
        embedding=nn.Embedding(7, 5),
        head=nn.Linear(5, 7),
    )
    model.head.weight = model.embedding.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(7, (40,), generator=generator)
    uq = rg.LastLayerRigidity(model).fit((x, torch.randn(40, 7, generator=generator)))
    refused(r"readout \(head\) are shared with another layer", uq.refit)


def test_two_heads_that_share_a_weight_are_refitted_together():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net(
            lambda m, x: m.a(torch.tanh(m.trunk(x))) + m.b(torch.sin(m.trunk(x))),
            trunk=nn.Linear(4, 6),
            a=nn.Linear(6, 1),
            b=nn.Linear(6, 1),
        ).double()
        model.b.weight = model.a.weight
        x, y = torch.randn(50, 4).double(), torch.randn(50, 1).double()
    new = rg.LastLayerRigidity(model).fit((x, y)).refit()
    assert new.model.a.weight is new.model.b.weight
    fresh = rg.LastLayerRigidity(new.model).fit((x, y))
    assert_same_sums(new, fresh, 1e-8)


def test_fits_without_residuals_or_by_another_loss_are_refused(net):
    x, _ = net.train
    refused("not Huber", fitted(net, loss="huber").refit)
    refused("needs the residuals", rg.LastLayerRigidity(net.model).fit(x).refit)
    refused("Pass targets", fitted(net).refit, net.valid[0])
    refused("no fit yet", rg.LastLayerRigidity(net.model).refit)
    one = rg.LastLayerRigidity(net.model).fit((x[:1], net.train[1][:1]))
    refused("The evidence needs more rows", one.refit)


def fitted_to_targets(net: Trained, targets: Tensor) -> rg.LastLayerRigidity:
    return rg.LastLayerRigidity(net.model).fit((net.train[0], targets))


def test_a_readout_that_is_perfect_stays_and_is_not_called_better(net):
    with torch.no_grad():
        targets, valid = net.model(net.train[0]), net.model(net.valid[0])
    new = fitted_to_targets(net, targets).refit((net.valid[0], valid), add=False)
    torch.testing.assert_close(new.model(net.test[0]), net.model(net.test[0]), atol=1e-3, rtol=0)
    assert new.refitted.better is False
