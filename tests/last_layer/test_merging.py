"""Fits to parts of a data set merge to the fit to all of it, or say why they cannot."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rigidities as rg
from rigidities.losses import GaussianNLL
from rigidities.statistics import row_sketch
from tests.support.nets import Trained, calibrated, trained
from tests.support.refusals import refused

ROWS = 60


def power(prediction, target):
    return (prediction - target).square() ** 2


def by_target(batch):
    return torch.where(batch[0][:, :1] > 0, torch.tensor([[1.0, 0.5]]), 1.0)


def by_target_in_few_rows(batch):
    return torch.where(batch[0][:, :1] > 1.5, torch.tensor([[1.0, 0.5]]), 1.0)


KINDS = {
    "double": {},
    "mixed": {"precision": "mixed"},
    "huber": {"loss": "huber"},
    "a function": {"loss": power},
    "weights by target": {"sample_weight": by_target},
    "weights by target in few rows": {"sample_weight": by_target_in_few_rows},
    "a small sample": {"keep_rows": 10},
}


@pytest.fixture(scope="module")
def single():
    """In float32, whose features round as the batch wills."""
    return trained(targets=2, steps=20)


@pytest.fixture(scope="module")
def two(single):
    model, *sets = trained(targets=2, steps=20)
    return Trained(model.double(), *[tuple(t.double() for t in one) for one in sets])


def fit(net, rows, **options):
    x, y = net.train
    return rg.LastLayerRigidity(net.model, batch_size=7).fit((x[rows], y[rows]), **options)


def halves(net, **options):
    return fit(net, slice(0, 30), **options), fit(net, slice(30, ROWS), **options)


def known(uq):
    return uq._fit.require_state().statistics


def everything(uq):
    state = uq.get_extra_state()
    return state["header"], {name: tensor.clone() for name, tensor in state["tensors"].items()}


def check_unchanged(uq, before):
    after = everything(uq)
    assert after[0] == before[0]
    assert all(torch.equal(after[1][name], tensor) for name, tensor in before[1].items())


def close(found, expected, digits=1e-12):
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=digits, atol=digits * scale)


def check_same(found, whole):
    """The same sums to rounding, the same hashes and sampled rows."""
    one, other = known(found), known(whole)
    assert one.gram.count == other.gram.count
    assert one.gram.targets == other.gram.targets
    assert torch.equal(one.gram.zeros, other.gram.zeros)
    rounding = one.gram.rounding_error + other.gram.rounding_error
    if rounding:
        assert float((one.gram.matrix - other.gram.matrix).norm()) <= rounding
    else:
        close(one.gram.matrix, other.gram.matrix)
        close(one.gram.cross, other.gram.cross)
        close(one.gram.square, other.gram.square)
    for name, tensor in one.sketch.state().items():
        assert torch.equal(tensor, other.sketch.state()[name])
    mine, expected = one.kept_rows.state(), other.kept_rows.state()
    assert mine.keys() == expected.keys()
    for name in mine:
        if name.startswith("hashed"):
            assert torch.equal(mine[name], expected[name])
        else:
            close(mine[name], expected[name], 1e-5 if rounding else 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_merged_in_any_order_are_the_fit_to_all_rows(single, two, kind):
    net, options = single if kind == "mixed" else two, KINDS[kind]
    whole = fit(net, slice(ROWS), **options)

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS), st.permutations(range(4)))
    def distribution(owners, order):
        places = [(torch.tensor(owners) == k).nonzero()[:, 0] for k in order]
        first, *rest = [fit(net, rows, **options) for rows in places if len(rows)]
        check_same(first.merge(*rest) if rest else first, whole)

    distribution()


def test_merging_is_a_calibration_away_from_one_fit(two):
    (one, other), whole = halves(two), fit(two, slice(ROWS))
    one.merge(other)
    for uq in (one, whole):
        calibrated(uq, two.valid)
    assert one.ridge == pytest.approx(whole.ridge, rel=1e-9)
    close(one.scale, whole.scale, 1e-9)
    close(one(two.test[0])[1], whole(two.test[0])[1], 1e-9)


def test_merging_marks_the_calibration_stale_and_leaves_the_others_alone(two):
    one, other = (calibrated(uq, two.valid) for uq in halves(two))
    one.posterior  # noqa: B018  the factorisation must not be kept
    before, whole = everything(other), fit(two, slice(ROWS))
    assert one.merge(other) is one
    assert one.calibration_report.stale
    assert not other.calibration_report.stale
    check_unchanged(other, before)
    close(one.posterior.eigenvalues, whole.posterior.eigenvalues)
    with pytest.warns(UserWarning, match="Data were added or removed"):
        one(two.test[0])


def test_a_merged_fit_goes_on_as_any(two):
    one, other = halves(two)
    x, y = two.train
    one.merge(other).partial_fit((x[ROWS:90], y[ROWS:90])).forget((x[20:40], y[20:40]))
    rows = [*range(20), *range(40, 90)]
    close(one.gram.matrix, fit(two, rows).gram.matrix, 1e-9)


# what cannot be one fit


def other_weights(net):
    model = trained(targets=2, steps=21).model.double()
    return fit(Trained(model, *net[1:]), slice(30, ROWS))


def other_readout(net):
    x, y = net.train
    uq = rg.LastLayerRigidity(net.model, features=lambda model, x: model[:3](x))
    return uq.fit((x[30:ROWS], y[30:ROWS]))


def other_batches(net):
    x, y = net.train
    uq = rg.LastLayerRigidity(net.model)
    return uq.fit([{"input": x[30:ROWS], "labels": y[30:ROWS]}])


def later(**options):
    return lambda net: fit(net, slice(30, ROWS), **options)


def unit(batch):
    return torch.ones(len(batch[0]))


UNLIKE = {
    "weights": (other_weights, "weights: '[0-9a-f]{16}' and .*Load the same weights"),
    "readout": (other_readout, "readout: .*'layer': \\['4'\\].*'features'.*same layer="),
    "loss": (
        later(loss="huber"),
        r"loss: {'loss': MSE\(\)} and {'loss': Huber\(delta=1.0\)}.*loss=",
    ),
    "a loss of its own": (later(loss=power), "loss: .*MSE.* and .*power.*same loss="),
    "sample weights": (later(sample_weight=unit), "loss: {'sample_weight': None} and .*unit"),
    "precision": (later(precision="mixed"), "precision: 'double' and 'mixed'.*precision="),
    "batches": (other_batches, "data: .*'tuple.*'mapping'.*batches of one kind"),
}


@pytest.mark.parametrize(("made", "message"), UNLIKE.values(), ids=UNLIKE)
def test_fits_that_differ_are_refused_by_what_differs_and_nothing_changes(two, made, message):
    one, other, third = fit(two, slice(15)), fit(two, slice(15, 30)), made(two)
    before = everything(one)
    refused(
        f"(?s)this fit and argument 2 of merge differ in their {message}", one.merge, other, third
    )
    check_unchanged(one, before)


def closed(factor):
    return lambda prediction, target: factor * (prediction - target).square()


EQUAL = {
    "one function": lambda: power,
    "variances": lambda: GaussianNLL(torch.tensor([1.0, 2.0])),
    "a variance": lambda: GaussianNLL(0.5),
}


@pytest.mark.parametrize("made", EQUAL.values(), ids=EQUAL)
def test_equal_losses_merge(two, made):
    one, other = fit(two, slice(30), loss=made()), fit(two, slice(30, ROWS), loss=made())
    check_same(one.merge(other), fit(two, slice(ROWS), loss=made()))


def test_losses_of_one_name_that_differ_do_not_merge(two):
    one, other = fit(two, slice(30), loss=closed(1)), fit(two, slice(30, ROWS), loss=closed(2))
    refused("differ in their loss: .*closed.*lambda", one.merge, other)
    variances = [GaussianNLL(torch.tensor([1.0, v])) for v in (2.0, 3.0)]
    one, other = fit(two, slice(30), loss=variances[0]), fit(two, slice(30, 60), loss=variances[1])
    refused(r"differ in their loss: .*\[1.0, 2.0\].*\[1.0, 3.0\]", one.merge, other)


def test_what_is_no_other_fit_is_refused(two):
    one, other = halves(two)
    before = everything(one)
    refused(
        r"LastLayerRigidity objects, got \[<class '.*Sequential'>\]",
        one.merge,
        two.model,
        error=TypeError,
    )
    refused("LastLayerRigidity objects, got", one.merge, error=TypeError)
    refused("itself, or twice", one.merge, one)
    refused("itself, or twice", one.merge, other, other, check=False)
    empty = rg.LastLayerRigidity(two.model)
    refused(r"no fit yet. Call fit\(x, y\) of argument 2 of merge", one.merge, other, empty)
    refused(r"no fit yet. Call fit\(x, y\) first", empty.merge, one)
    check_unchanged(one, before)


def test_a_file_whose_loss_was_a_function_needs_it_again(two, tmp_path):
    one, other = halves(two, loss=power)
    other.save(tmp_path / "b", rows=True)
    again = rg.LastLayerRigidity.load(tmp_path / "b", two.model)
    refused("weights of argument 1 of merge were functions.*loss=", one.merge, again)
    again = rg.LastLayerRigidity.load(tmp_path / "b", two.model, loss=power)
    check_same(one.merge(again), fit(two, slice(ROWS), loss=power))


def test_shared_rows_are_refused_with_their_number_unless_they_are_meant(two):
    one, other, third = fit(two, slice(30)), fit(two, slice(30, 50)), fit(two, slice(45, ROWS))
    before = everything(one)
    message = (
        r"argument 1 of merge and argument 2 of merge share rows: 5 of the 15 rows .*100.0% of"
    )
    refused(message, one.merge, other, third)
    check_unchanged(one, before)
    rows = [*range(50), *range(45, ROWS)]
    check_same(one.merge(other, third, check=False), fit(two, rows))


def test_of_many_rows_a_share_is_judged_and_the_message_says_which(two, monkeypatch):
    monkeypatch.setattr(row_sketch, "HASHES", 40)
    one, other, apart = fit(two, slice(200)), fit(two, slice(100, 300)), fit(two, slice(200, 300))
    refused(
        r"share rows: \d\d of the \d\d rows of .*compared \([12]\d\.\d% of all\)", one.merge, other
    )
    check_same(one.merge(apart), fit(two, slice(300)))


def test_the_smaller_of_two_samples_is_kept(two):
    one, other = fit(two, slice(30), keep_rows=25), fit(two, slice(30, ROWS), keep_rows=12)
    check_same(one.merge(other), fit(two, slice(ROWS), keep_rows=12))


def test_without_all_samples_there_is_none_and_one_notice(two, tmp_path):
    one, other = halves(two)
    other.save(tmp_path / "b")
    other = rg.LastLayerRigidity.load(tmp_path / "b", two.model)
    with pytest.warns(UserWarning, match=r"keeps none.*save\(path, rows=True\)") as said:
        one.merge(other)
    assert len(said) == 1
    assert known(one).kept_rows is None
    close(one.gram.matrix, fit(two, slice(ROWS)).gram.matrix)


def test_rows_without_targets_leave_sums_without_residuals(two):
    x, _ = two.train
    one, other = fit(two, slice(30)), rg.LastLayerRigidity(two.model).fit((x[30:ROWS],))
    one.merge(other)
    assert one.gram.cross is None
    assert known(one).kept_rows is None
    close(one.gram.matrix, fit(two, slice(ROWS)).gram.matrix)


def test_fits_with_other_functions_for_features_are_refused(two):
    def one(model, x):
        return x

    def other(model, x):
        return -x

    x, y = two.train
    a = rg.LastLayerRigidity(two.model, features=one).fit((x[:20], y[:20]))
    b = rg.LastLayerRigidity(two.model, features=other).fit((x[20:40], y[20:40]))
    refused("differ in their readout", a.merge, b)
    assert a.gram.count == 20
