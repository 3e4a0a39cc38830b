"""How data reach the model: the fit's kind of batch in every call, rows, targets, odd batches."""

import re
from collections import UserList
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import rigidities as rg
from tests.support import oracle
from tests.support.nets import Net, Trained, trained
from tests.support.refusals import refused

RIDGE = 0.1


@pytest.fixture(scope="module")
def net() -> Trained:
    return trained(steps=20)


def fitted(net: Trained, forward: Any = lambda m, b: m(b[0]), **options: Any) -> Any:
    uq = rg.LastLayerRigidity(net.model, forward=forward, **options).fit(net.train)
    uq.calibrate(net.valid, method=rg.Paper(ridge=RIDGE))
    return uq


def variance(net: Trained, uq: Any, x: torch.Tensor) -> torch.Tensor:
    """alpha^2 f^T (F^T F + ridge)^-1 f, densely in float64."""
    with torch.no_grad():
        old, new = (net.model[:-1](one).double() for one in (net.train[0], x))
    old, new = (torch.cat([f, torch.ones(len(f), 1)], 1) for f in (old, new))
    return uq.scale.square() * oracle.quadratic(old, new[:, None], RIDGE)


CALLS = {
    "call": lambda uq, x: uq(x)[0],
    "predict": lambda uq, x: uq.predict(x).mean,
    "predict in batches": lambda uq, x: uq.predict(list(x.split(7))).mean,
    "predict tuples of one": lambda uq, x: uq.predict([(x,)]).mean,
    "predict with a target": lambda uq, x: uq.predict((x, x[:, :1])).mean,
    "uncertain inputs": lambda uq, x: uq.predict(x, input_covariance=0.1).from_inputs,
    "sampled inputs": lambda uq, x: uq.predict(x, input_covariance=0.1, input_samples=4).mean,
    "gradient": lambda uq, x: uq.gradient(x).mean,
    "ensemble": lambda uq, x: uq.ensemble(8)(x)[0],
    "ensemble's propagation": lambda uq, x: uq.ensemble(8).propagate(lambda y: y, x).mean,
    "propagate": lambda uq, x: uq.propagate(lambda y: y, x).mean,
    "covariance": lambda uq, x: uq.covariance(x),
    "local": lambda uq, x: uq.local(x).mean,
    "features": lambda uq, x: uq.features(x),
    "select": lambda uq, x: uq.select(x, len(x)).indices,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_bare_tensor_reaches_forward_as_the_tuple_of_the_fit(net, call):
    x = net.test[0][:20]
    given = CALLS[call](fitted(net), x)
    plain = rg.LastLayerRigidity(net.model).fit(net.train)
    plain.calibrate(net.valid, method=rg.Paper(ridge=RIDGE))
    assert len(given) == 20
    if call not in ("ensemble", "ensemble's propagation", "sampled inputs"):  # drawn anew
        torch.testing.assert_close(given, CALLS[call](plain, x))


@pytest.mark.parametrize("draw", ["uq", "ensemble"])
def test_the_kind_of_batch_outlives_a_file(net, tmp_path, draw):
    uq, x = fitted(net), net.test[0][:20]
    saved = uq if draw == "uq" else uq.ensemble(8)
    saved.save(tmp_path / "f.safetensors")
    again = type(saved).load(tmp_path / "f.safetensors", net.model, forward=lambda m, b: m(b[0]))
    for one in (again, _copied(saved)):
        torch.testing.assert_close(one(x), saved(x))
        assert len(one.propagate(lambda y: y, x).mean) == 20


def _copied(saved: Any) -> Any:
    """By the state dict."""
    state = saved.state_dict()
    saved.load_state_dict(state)
    return saved


def test_variances_behind_a_forward_function_are_those_of_the_formula(net):
    uq, x = fitted(net), net.test[0]
    for std in (uq(x)[1], uq.predict(x).std):
        torch.testing.assert_close(std.double().square(), variance(net, uq, x), rtol=1e-4, atol=0)


def test_partial_fit_takes_tuples_without_labels_too(net):
    uq, (x, y) = fitted(net), net.test
    uq.partial_fit(x)
    assert uq.gram.count == len(net.train[0]) + len(x)
    refused("200 of 200 rows were never in the fit", uq.forget, [(x, y)])
    uq.forget([(x, y)], check=False)
    refused(r"there is no target\. .* 'labels', 'y', 'target', 'label'", uq.calibrate, x)


def test_a_label_is_taken_off_where_the_fit_had_bare_tensors(net):
    uq = rg.LastLayerRigidity(net.model, forward=lambda m, b: m(b)).fit(net.train[0])
    uq.calibrate(net.valid, method=rg.Paper(ridge=RIDGE))
    torch.testing.assert_close(uq.predict(net.test).std, uq(net.test[0])[1])
    torch.testing.assert_close(uq((net.test[0],))[1], uq(net.test[0])[1])


def test_several_inputs_come_as_one_tuple_and_keywords_as_one_mapping(net):
    x, y = net.train
    halves = lambda x: (x[:, :2], x[:, 2:])  # noqa: E731
    uq = rg.LastLayerRigidity(net.model, forward=lambda m, b: m(torch.cat([b[0], b[1]], 1)))
    uq.fit((*halves(x), y)).calibrate((*halves(net.valid[0]), net.valid[1]), method="paper")
    new = halves(net.test[0])
    torch.testing.assert_close(uq(*new), uq((*new, net.test[1])))
    torch.testing.assert_close(uq.predict(new).mean, net.model(net.test[0]).detach())
    refused("Batch 0: there is no target", uq.calibrate, new)  # two inputs are no (x, y)
    named = rg.LastLayerRigidity(net.model, forward=lambda m, b: m(b["x"])).fit({"x": x, "y": y})
    named.calibrate({"x": net.valid[0], "y": net.valid[1]}, method="paper")
    torch.testing.assert_close(named(x=net.test[0]), named({"x": net.test[0]}))
    refused("unexpected keyword argument", named, net.test[0], mask=None, error=TypeError)


KINDS = {
    "tuple": (lambda x, y: (x, y), lambda m, b: m(b[0])),
    "mapping": (lambda x, y: {"x": x, "y": y}, lambda m, b: m(b["x"])),
    "object": (lambda x, y: [SimpleNamespace(x=x, y=y)], lambda m, b: m(b.x)),
    "tensor": (lambda x, y: x, lambda m, b: m(b)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", KINDS)
def test_another_kind_of_batch_than_the_fits_is_brought_to_it_or_refused(net, kind, given):
    data, forward = KINDS[kind]
    uq = rg.LastLayerRigidity(net.model, forward=forward).fit(data(*net.train))
    new, alike = KINDS[given][0](*net.test), {kind, given} <= {"tuple", "tensor"}
    if kind == given or alike:
        with pytest.warns(UserWarning, match="not calibrated"):
            assert len(uq.predict(new).mean) == len(net.test[0])
        return
    message = rf"the fit had a {kind}\S*, got a {given}\S* Pass [x(\[{{]"
    with pytest.warns(UserWarning, match="not calibrated"):
        refused(message, uq.predict, new)
    refused(message, uq, new[0] if given == "object" else new)


NESTED = {
    "tuple": lambda x: (x,),
    "mapping": lambda x: {0: x},
    "object": lambda x: UserList([x]),
}


@pytest.mark.parametrize("inside", NESTED)
def test_a_tensor_is_not_taken_for_a_tuple_of_something_else(net, inside):
    (x, y), (valid, truth), new = net.train, net.valid, net.test[0]
    nest, pick = NESTED[inside], {"target": lambda b: b[1]}
    uq = rg.LastLayerRigidity(net.model, forward=lambda m, b: m(b[0][0]), **pick)
    uq.fit([(nest(x), y)]).calibrate([(nest(valid), truth)], method="paper")
    ensemble, message = uq.ensemble(4), rf"the fit had a tuple\({inside}\), got a t.* Pass \[\("
    for call in (uq, uq.predict, uq.gradient, ensemble, partial(ensemble.propagate, lambda y: y)):
        refused(message, call, new)
    for data in ([new], DataLoader(list(new), batch_size=50)):
        refused(message, uq.predict, data)
    if inside != "object":  # of which nothing is known: it may stand for None
        refused(message, uq.predict, (new, new))
        refused(message, uq, (new,))
    assert torch.equal(uq.predict([(nest(new),)]).mean, net.model(new).detach())
    assert uq((nest(new), None))[0].shape == ensemble((nest(new),))[0].shape == (len(new), 1)


def test_samples_in_a_list_are_not_mixed_up_with_a_tensor_of_samples(net):
    forward = lambda m, b: m(torch.stack(tuple(b)))  # noqa: E731
    uq = rg.LastLayerRigidity(net.model, forward=forward, target=lambda b: None)
    uq.fit([list(net.train[0])])
    new = net.test[0]
    with pytest.warns(UserWarning, match="not calibrated"):
        ensemble = uq.ensemble(4)
    assert uq(list(new))[0].shape == uq.predict([list(new)]).mean.shape == (len(new), 1)
    propagate = partial(ensemble.propagate, lambda y: y)
    for call in (uq, ensemble, uq.predict, lambda x: uq.predict([x]), propagate):
        refused(r"gives 1 outputs for 200 rows of data, .*\[batch\]", call, new)


def test_the_hint_for_a_mean_and_a_variance_works_as_printed(net):
    two = nn.Sequential(*net.model[:-1], nn.Linear(net.model[-1].in_features, 2))
    with pytest.raises(ValueError, match="does not match the output's") as caught:
        rg.LastLayerRigidity(two).fit(net.train)
    (code,) = re.findall(r"forward=(lambda.*)\.$", str(caught.value))
    uq = rg.LastLayerRigidity(two, forward=eval(code)).fit(net.train)
    uq.calibrate(net.valid, method="paper")
    for mean in (uq.predict(net.test[0]).mean, uq(net.test[0])[0]):
        assert torch.equal(mean, two(net.test[0])[:, 0].detach())


# --- one output per row ---------------------------------------------------------------------------

SUMMED = {
    **{name: call for name, call in CALLS.items() if "predict" not in name and name != "call"},
    "predict": lambda uq, x: uq.predict(x),
    "fit": lambda uq, x: uq.fit(x),
    "partial_fit": lambda uq, x: uq.partial_fit(x),
    "calibrate": lambda uq, x: uq.calibrate((x, x[:, :1]), method="paper").calibration_report,
}


@pytest.mark.parametrize("call", [name for name in SUMMED if name != "ensemble"])
def test_another_number_of_outputs_than_rows_is_refused(net, call):
    pooled = Net(lambda m, x: m.body(x).reshape(-1, 2, 1).sum(1), body=net.model)
    x, y = net.train
    uq = rg.LastLayerRigidity(pooled).fit([(x, y[::2])])
    uq.calibrate([(net.valid[0], net.valid[1][::2])], method="paper")
    assert len(uq.predict([x]).mean) == len(x) // 2
    refused(r"gives 10 outputs for 20 rows of data, .*\[batch\]", SUMMED[call], uq, x[:20])


def test_a_single_row_may_lose_its_dimension(net3):
    squeezed = Net(lambda m, x: m.body(x).squeeze(), body=net3.model)
    uq = rg.LastLayerRigidity(squeezed).fit(net3.train)
    uq.calibrate(net3.valid, method="paper")
    assert uq.predict(net3.test[0][:1]).mean.shape == (3,)


# --- targets --------------------------------------------------------------------------------------


def test_a_label_is_a_target_where_no_better_name_is_there(net):
    x, y = net.train
    keys = Net(lambda m, x, label=None: m.body(x), body=net.model)
    for batch in ({"x": x, "label": y}, {"x": x, "label": -y, "labels": y}):
        uq = rg.LastLayerRigidity(keys).fit(batch)
        residual = (y - net.model(x)).detach().double()
        torch.testing.assert_close(uq.gram.square.reshape(()), residual.square().sum())


@pytest.mark.parametrize("batch", [lambda x, y: {"x": x}, lambda x, y: SimpleNamespace(x=x)])
def test_a_fit_without_targets_says_which_names_it_looks_for(net, batch):
    forward = lambda m, b: m(b["x"] if isinstance(b, dict) else b.x)  # noqa: E731
    data = [batch(*net.train)]
    with pytest.warns(UserWarning, match="no target .* 'labels', 'y', 'target', 'label'"):
        uq = rg.LastLayerRigidity(net.model, forward=forward).fit(data)
    refused(r"there is no target\. .* 'future_values', or target=lambda b", uq.calibrate, data)
    rg.LastLayerRigidity(net.model, forward=forward, target=lambda b: None).fit(data)  # no word


@pytest.mark.parametrize("absent", [(None,), (None, None), ()])
def test_of_a_tuple_of_targets_the_only_tensor_is_taken(net, absent):
    x, y = net.train
    uq = rg.LastLayerRigidity(net.model).fit([(x, (y, *absent))])
    torch.testing.assert_close(
        uq.gram.square, rg.LastLayerRigidity(net.model).fit((x, y)).gram.square
    )


def test_of_a_target_and_its_weights_the_target_must_be_named(net):
    x, y = net.train
    message = r"a tuple of 2 \(float32 \(300, 1\), float32 \(300, 1\)\).*target=lambda b: b\[-1\]"
    refused(message, rg.LastLayerRigidity(net.model).fit, [(x, (y, y))])
    rg.LastLayerRigidity(net.model, target=lambda b: b[-1][0]).fit([(x, (y, y))])


# --- batches that are odd -------------------------------------------------------------------------


class MovedInPlace:
    """A graph whose `to` moves it and returns nothing."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.moves = x, 0

    def to(self, device: torch.device) -> None:
        self.x, self.moves = self.x.to(device), self.moves + 1


def test_a_batch_that_moves_itself_is_kept(net):
    graphs = Net(lambda m, graph: m.body(graph.x), body=net.model)
    graph = MovedInPlace(net.train[0])
    uq = rg.LastLayerRigidity(graphs).fit([(graph, net.train[1])])
    expected = rg.LastLayerRigidity(net.model).fit(net.train)
    assert graph.moves == 1
    torch.testing.assert_close(uq.gram.matrix, expected.gram.matrix)


class Unsized(torch.utils.data.Sampler):
    """Rows in order, of which nobody says how many there are."""

    def __iter__(self):
        return iter(range(200))


def test_a_loader_that_drops_rows_may_have_a_sampler_without_a_length(net):
    data = torch.utils.data.TensorDataset(*(t[:200] for t in net.train))
    loader = DataLoader(data, batch_size=64, sampler=Unsized(), drop_last=True)
    with pytest.warns(UserWarning, match="the rows after the last full batch of 64"):
        rg.LastLayerRigidity(net.model).fit(loader)
