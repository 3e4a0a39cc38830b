"""Rows are taken out of a fit exactly, and only rows that are in it."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.statistics import row_sketch
from tests.support import zoo
from tests.support.nets import fitted
from tests.support.refusals import refused


def everything(uq):
    snapshot = uq.get_extra_state()
    return snapshot["header"], {name: t.clone() for name, t in snapshot["tensors"].items()}


def check_refused(uq, message, some, check=True):
    header, tensors = everything(uq)
    refused(message, uq.forget, some, check=check)
    after = everything(uq)
    assert after[0] == header
    assert all(torch.equal(after[1][name], tensor) for name, tensor in tensors.items())


def check_equals(uq, x, y):
    """Sums over the rows that are left, in float64."""
    with torch.no_grad():
        f = torch.cat([uq.model[:-1](x), torch.ones(len(x), 1)], 1).double()
        r = y.double() - uq.model(x)
    torch.testing.assert_close(uq.gram.matrix, f.T @ f, rtol=1e-6, atol=1e-6 * float(len(f)))
    torch.testing.assert_close(uq.gram.square, r.T @ r, rtol=1e-5, atol=1e-5)
    assert uq.gram.count == len(f)


def never(x, y):
    return torch.cat([x[:288], x[:12] + 1]), y


WRONG = {
    "never added": (never, "12 of 300 rows were never in the fit"),
    "with another target": (lambda x, y: (x[:7], y[:7] + 1), "7 of 7 rows .* another target"),
    "more often than added": (lambda x, y: (x[:4].repeat(2, 1), y[:4].repeat(2, 1)), "4 of 8 rows"),
    "in another precision": (lambda x, y: (x[:5], y[:5].double()), "5 of 5 rows .* same dtypes"),
    "too many": (lambda x, y: (x.repeat(2, 1), y.repeat(2, 1)), "300 of 600 rows"),
}


@pytest.mark.parametrize(("some", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("batch_size", [None, 7])
def test_rows_that_are_not_in_the_fit_are_refused_with_their_count(net, some, message, batch_size):
    check_refused(fitted(net, batch_size=batch_size), message, some(*net.train))


def test_rows_are_forgotten_once(net):
    uq, (x, y) = fitted(net, batch_size=9), net.train
    uq.forget((x[::3], y[::3]))
    check_refused(uq, "100 of 100 rows were never in the fit", (x[::3], y[::3]))
    left = torch.arange(300) % 3 > 0
    check_equals(uq, x[left], y[left])
    uq.partial_fit((x[:3], y[:3])).forget((x[:3], y[:3]))
    assert uq.gram.count == 200


def test_all_rows_can_be_forgotten_in_other_batches(net, tmp_path):
    uq = fitted(net)
    uq.batch_size = 11
    uq.forget(net.train)
    assert uq.gram.count == 0 and bool((uq.gram.square >= 0).all())
    uq.save(tmp_path / "uq.safetensors")
    uq = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model)
    uq.partial_fit(net.train)
    uq.calibrate(net.valid, method=rg.Paper(criterion="evidence"))
    assert uq.calibration_report.value < 1e6


def test_beyond_the_sketch_a_share_of_rows_is_judged(net, monkeypatch):
    monkeypatch.setattr(row_sketch, "HASHES", 100)
    uq, (x, y) = fitted(net), net.train
    rows = r"of \d+ rows that could be checked \(3\d\.\d% of all\) were never in the fit"
    check_refused(uq, rows, (x + 1, y))
    uq.batch_size = 13
    check_refused(uq, rows, (x[:200], y[:200] + 1))
    uq.forget((x[100:], y[100:]))
    check_equals(uq, x[:100], y[:100])
    check_refused(uq, rows, (x[150:200], y[150:200]))
    uq.forget((x[:100], y[:100]))
    assert uq.gram.count == 0


def test_unrecognised_rows_go_unasked_unless_a_sum_turns_negative(net):
    uq, (x, y) = fitted(net), net.train
    uq.forget((x[:5], y[:5].double()), check=False)
    check_equals(uq, x[5:], y[5:])
    check_refused(uq, "sum of squares would become negative", (x[5:], y[5:] + 9), check=False)
    check_refused(uq, "sum of squares would become negative", (x[5:] * 9, y[5:]), check=False)


def test_rows_without_weight_can_be_forgotten(net):
    x, y = net.train
    far = y.clone()
    far[:6] += 100
    uq = rg.LastLayerRigidity(net.model).fit((x, far), loss="huber")
    zeros = int(uq.gram.zeros)
    assert int(uq.forget((x[:6], far[:6])).gram.zeros) == zeros - 6 >= 0


def test_targets_with_weights_of_their_own_are_forgotten(net3):
    x, y = net3.train

    def mask(batch):
        return (batch[1] > 0).double()

    uq = rg.LastLayerRigidity(net3.model).fit((x[:100], y[:100]), sample_weight=mask)
    one = rg.LastLayerRigidity(net3.model).fit((x, y), sample_weight=mask)
    one.batch_size = 20
    one.forget((x[100:], y[100:]))
    torch.testing.assert_close(one.gram.matrix, uq.gram.matrix, rtol=1e-6, atol=1e-4)
    assert torch.equal(one.gram.zeros, uq.gram.zeros)


@pytest.fixture
def molecules():
    """Fits in float32, one batch of molecules, and the same one by one, in another order."""
    case = zoo.build("one_head_for_each_species")
    g, model = case.data, case.model.float()
    g.x, g.energy = g.x.float(), g.energy.float()
    alone = [
        zoo.Graph(g.x[own], g.species[own], 0 * g.molecule[own], 1, g.energy[n : n + 1])
        for n in reversed(range(g.molecules))
        for own in [g.molecule == n]
    ]

    def fit(batches):
        return rg.LastLayerRigidity(model, layer=list(zoo.SPECIES), **case.options).fit(batches)

    return fit, g, alone


def test_structures_are_not_recognised_and_go_unasked(molecules):
    """Their outputs have no input row of their own."""
    fit, g, alone = molecules
    some, others = alone[:4], alone[4:]
    uq = fit([g])
    check_refused(uq, "cannot be recognised.*check=False", some)
    uq.forget(some, check=False)
    torch.testing.assert_close(uq.gram.matrix, fit(others).gram.matrix, rtol=1e-5, atol=1e-5)
    assert uq._fit.state.statistics.kept_rows is None


@pytest.mark.parametrize("kept", [False, True])
def test_structures_of_one_atom_are_no_exception(net, tmp_path, kept):
    """Alone, they have as many rows of inputs as of outputs."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.atoms = net.model

        def forward(self, x, owner, n):
            return x.new_zeros(len(n), 1).index_add(0, owner, self.atoms(x))

    x, y = net.train
    owner, n = torch.tensor([0, 1, 1, 2, 2, 2]), torch.tensor([1, 2, 3])
    uq = rg.LastLayerRigidity(Sum()).fit([(x[:6], owner, n, y[:3])])
    if kept:
        uq.save(tmp_path / "uq.safetensors")
        uq = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", uq.model)
    one = [(x[:1], owner[:1], n[:1], y[:1])]
    check_refused(uq, "cannot be recognised", one)
    assert uq.forget(one, check=False).gram.count == 2


@pytest.mark.parametrize("whole", [lambda x, y: (x, y), lambda x, y: {"x": [x], "y": y}])
def test_rows_that_a_function_takes_apart_are_known_exactly(whole):
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(60, n, generator=g) for n in (8, 1))
    model = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 1))
    inputs = {"forward": lambda m, b: m(b["x"][0] if isinstance(b, dict) else b[0])}
    uq = rg.LastLayerRigidity(model, **inputs).fit([whole(x[:40], y[:40])])
    check_refused(uq, "2 of 20 rows", [whole(torch.cat([x[:18], x[50:52]]), y[:20])])
    check_refused(uq, "1 of 11 rows", [whole(x[[*range(10), 0]], y[[*range(10), 0]])])
    check_refused(uq, "1 of 1 rows", [whole(x[:1] + 1e-6, y[:1])])
    for i in range(0, 40, 2):
        uq.forget([whole(x[i : i + 1], y[i : i + 1])])
    assert uq.gram.count == 20


def test_a_loaded_fit_knows_its_rows(net, tmp_path):
    uq, (x, y) = fitted(net), net.train
    uq.save(tmp_path / "uq.safetensors")
    again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model)
    check_refused(again, "3 of 3 rows", (x[:3] + 1, y[:3]))
    assert again.forget((x[:3], y[:3])).gram.count == 297


def test_an_interrupted_forget_leaves_the_fit(net):
    uq, (x, y) = fitted(net), net.train

    def batches():
        yield x[:5], y[:5]
        raise KeyboardInterrupt

    check = everything(uq)
    with pytest.raises(KeyboardInterrupt):
        uq.forget(batches())
    assert everything(uq)[0] == check[0] and uq.gram.count == 300


def test_wide_features_of_a_function_are_refused(net):
    width = [24]
    uq = rg.LastLayerRigidity(
        nn.Linear(4, 1), features=lambda m, x: torch.ones(len(x), width[0])
    ).fit(net.train)
    width[0] = 25
    refused("different shape", uq.forget, net.train)
