"""Terms of sums through the facade: their features, error bars and shares of the variance."""

import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support import zoo
from tests.support.refusals import refused

SUMS = [
    *("sum_over_padded_atoms", "sum_over_atoms_by_index_add", "sum_over_atoms_with_species_shifts"),
    *("one_head_for_each_species", "mean_over_atoms_of_the_head_of_their_species"),
    *("mean_over_time_steps", "pointwise_convolution_then_mean_over_pixels"),
    *("average_of_several_heads", "mlp_with_several_targets"),
]


def fitted(id):
    case = zoo.build(id)
    uq = rg.LastLayerRigidity(case.model, **case.options).fit([case.data])
    noisy = zoo.build(id, draw=1)
    with torch.no_grad():
        uq.calibrate([noisy.data], method=rg.Paper(ridge=0.1 * float(uq.gram.diagonal.mean())))
    return uq, case


@pytest.mark.parametrize("id", SUMS)
def test_features_and_shares_of_the_terms_sum_to_those_of_the_prediction(id):
    uq, case = fitted(id)
    terms, p = uq.local([case.data]), uq.predict([case.data])
    features = uq.features([case.data]).double()
    summed = rg.local.sums(terms.features, terms.owners, count=len(features))
    torch.testing.assert_close(summed, features)
    targets = terms.share.shape[1]
    shares = rg.local.sums(terms.share, terms.owners, count=len(features))
    assert shares.shape == (len(features), targets)
    torch.testing.assert_close(shares.flatten().sort()[0], p.epistemic.flatten().sort()[0])


@pytest.mark.parametrize("id", SUMS)
def test_every_term_has_the_rigidity_of_its_features(id):
    uq, case = fitted(id)
    terms = uq.local([case.data])
    matrix = uq.gram.matrix + uq.ridge * torch.eye(uq.gram.width, dtype=torch.float64)
    q = (terms.features @ torch.linalg.inv(matrix) * terms.features).sum(1)
    torch.testing.assert_close(terms.rigidity, 1 / q, rtol=1e-8, atol=0)
    torch.testing.assert_close(terms.std, q.sqrt()[:, None] * uq.scale, rtol=1e-8, atol=0)


def test_means_of_atoms_add_up_to_the_energy_and_heads_tell_the_species():
    uq, case = fitted("one_head_for_each_species")
    terms = uq.local([case.data])
    energy = rg.local.sums(terms.mean, terms.owners)
    torch.testing.assert_close(energy.flatten(), uq.predict([case.data]).mean.flatten())
    assert len(terms) == len(terms.heads) == len(terms.owners)
    assert set(terms.heads.tolist()) == set(range(int(terms.heads.max()) + 1))
    assert int(terms.heads.max()) > 0


def test_owners_count_on_over_batches():
    uq, case = fitted("mean_over_time_steps")
    x = case.args[0]
    whole = uq.local(x)
    uq.batch_size = 5
    split = uq.local(x)
    torch.testing.assert_close(split.share, whole.share)
    assert split.owners.tolist() == whole.owners.tolist()


@pytest.mark.parametrize("id", ["mean_over_time_steps", "mlp_with_several_targets"])
def test_one_pass_through_the_model_finds_the_terms(id):
    uq, case = fitted(id)
    calls = []
    uq.local([case.data])
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: calls.append(1) if type(module) is type(case.model) else None
    )
    try:
        uq.local([case.data, case.data])
    finally:
        handle.remove()
    assert len(calls) == 2


def test_sums_of_one_term_may_be_followed_by_sums_of_several():
    torch.manual_seed(0)
    model = zoo.Net(lambda m, x: m.body(x).sum(1), body=nn.Linear(3, 2).double())
    x, y = torch.randn(20, 1, 3, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    uq = rg.LastLayerRigidity(model).fit((x, y))
    uq.calibrate((x + 0.1, y), method="paper")
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    terms = uq.local(x)
    assert terms.owners.tolist() == [n for n in range(4) for _ in range(5)]
    torch.testing.assert_close(terms.features[:, :3], x.reshape(20, 3))


def test_an_unfamiliar_site_carries_the_variance():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    chain = zoo.Net(lambda m, sites: m.net(sites).sum(1), net=net)
    sites = torch.rand(300, 4, 2, dtype=torch.float64) - 0.5
    energy = net(sites).sum(1).detach() + 0.1 * torch.randn(300, 1, dtype=torch.float64)
    uq = rg.LastLayerRigidity(chain).fit((sites[:200], energy[:200]))
    uq.calibrate((sites[200:], energy[200:]), method=rg.Paper(criterion="evidence", noise="bayes"))
    odd = sites[:1].clone()
    odd[0, 2] = 3.0
    assert int(uq.local(odd).share.argmax()) == 2


@pytest.mark.parametrize(
    ("id", "match"),
    [
        ("targets_mixed_by_a_fixed_matrix", "not a sum over rows of .*rigidities.local"),
        ("each_target_scaled_by_its_own_std", "not a sum over rows of .*rigidities.local"),
        ("graph_convolution", "not a sum over rows of 'conv.bias', 'conv.lin'.*rigidities.local"),
        ("raw_parameter_head_with_its_features", "features= the terms .* not known"),
    ],
)
def test_predictions_without_terms_say_so(id, match):
    case = zoo.build(id)
    uq = rg.LastLayerRigidity(case.model, **case.options).fit([case.data])
    with pytest.warns(UserWarning, match="not calibrated"), pytest.raises(ValueError, match=match):
        uq.local([case.data])


def test_no_batches_are_refused():
    uq, _ = fitted("mean_over_time_steps")
    refused("no batches", uq.local, [])
    refused("no batches", uq.features, [])


def test_selection_through_the_facade_is_that_of_the_features():
    uq, case = fitted("mlp_with_several_targets")
    x = torch.randn(40, case.args[0].shape[1], dtype=torch.float64)
    features = uq.features(x)
    for objective in ("logdet", "variance"):
        found = uq.select(x, 6, objective=objective, chosen=torch.tensor([3]))
        expected = rg.selection.greedy(
            uq.posterior, features, 6, objective=objective, chosen=torch.tensor([3])
        )
        assert found.indices.tolist() == expected.indices.tolist()
        assert 3 not in found.indices.tolist()
    top = uq.select(x, 6, objective="top").indices
    assert top.tolist() == uq.predict(x).epistemic[:, 0].argsort(descending=True)[:6].tolist()
    cared = uq.select(x, 2, objective="variance", of=x[:3])
    expected = rg.selection.greedy(uq.posterior, features, 2, objective="variance", of=features[:3])
    assert cared.indices.tolist() == expected.indices.tolist()


def test_several_rows_per_input_are_not_chosen_as_if_they_were_inputs():
    uq, case = fitted("several_time_steps_out")
    x = case.args[0]
    assert len(uq.features(x)) == x.shape[0] * x.shape[1]
    for objective in ("variance", "logdet", "top"):
        with pytest.raises(ValueError, match=r"one row of features .*\(60, .* for 12 inputs"):
            uq.select(x, 3, objective=objective)


def test_options_that_top_has_no_use_for_are_refused():
    uq, case = fitted("mlp_with_several_targets")
    x = case.args[0]
    with pytest.raises(ValueError, match="neither of= nor weights="):
        uq.select(x, 3, objective="top", weights=torch.ones(len(x)))
    refused("objective must be 'logdet' or 'variance'", uq.select, x, 3, objective="topp")


def test_the_gains_of_top_are_total_variances():
    uq, case = fitted("mlp_with_several_targets")
    x = case.args[0]
    found = uq.select(x, 3, objective="top")
    torch.testing.assert_close(found.gains, uq.predict(x).epistemic.sum(1)[found.indices])


@pytest.mark.parametrize(
    "call",
    [
        lambda uq, x: uq(x),
        lambda uq, x: uq.predict(x),
        lambda uq, x: uq.gradient(x),
        lambda uq, x: uq.local(x),
        lambda uq, x: uq.features(x),
        lambda uq, x: uq.select(x, 2),
        lambda uq, x: uq.covariance(x),
        lambda uq, x: uq.propagate(torch.mean, x),
        lambda uq, x: uq.ensemble(4)(x),
    ],
    ids=[
        *("call", "predict", "gradient", "local", "features", "select", "covariance", "propagate"),
        "ensemble",
    ],
)
def test_every_call_works_in_inference_mode_and_warns_where_the_user_stands(call):
    case = zoo.build("mlp_with_a_column_output")
    uq = rg.LastLayerRigidity(case.model).fit([case.data])
    with torch.inference_mode(), pytest.warns(UserWarning, match="not calibrated") as caught:
        call(uq, case.args[0].clone())
    assert [warning.filename for warning in caught] == [__file__]
