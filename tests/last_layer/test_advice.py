"""Messages about models and data: each names what to do, and doing it works."""

import re
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import rigidities as rg
from tests.support.nets import Net, calibrated, data
from tests.support.refusals import refused

X, Y = data(60, 1, 0)
X_VALID, Y_VALID = data(60, 1, 1)


def three(y):
    """A target with three columns."""
    return torch.cat([y, -y, 2 * y], 1)


def body():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh())


def message_of(call, error=ValueError):
    """The text of the error that a call raises."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def advised(name, text):
    """The Python value that a message suggests for an argument."""
    found = re.search(rf"for example {name}=(.+?)\.$", text)
    assert found is not None, text
    return eval(found[1])


def test_modules_that_are_not_one_module_are_refused_with_what_to_pass():
    encoder, head = body(), nn.Linear(8, 1)
    for parts in ([encoder, head], (encoder, head)):
        text = r"a torch\.nn\.Module, got \w+\..*nn\.Sequential\(encoder, head\).*MeanOf\(models\)"
        refused(text, rg.LastLayerRigidity, parts, error=TypeError)
    rg.LastLayerRigidity(nn.Sequential(encoder, head)).fit(X, Y)
    rg.LastLayerRigidity(rg.MeanOf([nn.Linear(4, 1), nn.Linear(4, 1)])).fit(X, Y)


def test_an_estimator_with_a_trained_module_is_refused_with_its_attribute():
    class Regressor:
        """Has what skorch's estimators have after training."""

        def __init__(self):
            self.module_ = nn.Sequential(body(), nn.Linear(8, 1))

    net = Regressor()
    text = r"got Regressor\. .*LastLayerRigidity\(net\.module_\)\."
    refused(text, rg.LastLayerRigidity, net, error=TypeError)
    rg.LastLayerRigidity(net.module_).fit(X, Y)
    refused(r"got str\.$", rg.LastLayerRigidity, "net", error=TypeError)


class WithoutForward(nn.Module):
    """A module for training: its network is in an attribute."""

    def __init__(self):
        super().__init__()
        self.loss = nn.MSELoss()
        self.network = nn.Sequential(body(), nn.Linear(8, 1))


class PassingForward(WithoutForward):
    """Passes its call on to torch's forward, as a LightningModule does."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("batches", [(X, Y), [(X, Y)], {"x": X, "y": Y}, [{"x": X, "y": Y}]])
@pytest.mark.parametrize("module", [WithoutForward, PassingForward])
def test_a_module_without_forward_is_refused_with_a_function_that_calls_its_network(
    module, batches
):
    model = module()
    text = message_of(lambda: rg.LastLayerRigidity(model).fit(batches), NotImplementedError)
    assert text.startswith(f"{module.__name__} does not define forward")
    forward = advised("forward", text)
    uq = rg.LastLayerRigidity(model, forward=forward).fit(batches)
    expected = rg.LastLayerRigidity(model.network).fit(X, Y)
    torch.testing.assert_close(uq.gram.matrix, expected.gram.matrix)


def test_a_part_without_forward_keeps_the_error_of_torch():
    model = Net(lambda m, x: m.head(m.part(x)), part=WithoutForward(), head=nn.Linear(8, 1))
    refused(
        r"\[WithoutForward\] is missing",
        rg.LastLayerRigidity(model).fit,
        X,
        Y,
        error=NotImplementedError,
    )


def everything(m, x):
    """Two predictions of different shapes, behind things that are none."""
    hidden = m.body(x)
    return OrderedDict(
        loss=hidden.square().mean(),
        steps=torch.arange(len(x)),
        hidden=hidden,
        energy=m.energy(hidden).squeeze(1),
        forces=m.forces(hidden),
    )


def several(run=everything):
    return Net(run, body=body(), energy=nn.Linear(8, 1), forces=nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("shaped", "key"),
    [(lambda y: y, "energy"), (lambda y: y[:, 0], "energy"), (three, "forces")],
)
@pytest.mark.parametrize("kind", ["mapping", "tuple"])
def test_of_several_outputs_the_one_shaped_like_the_target_is_suggested(kind, shaped, key):
    model, y = several(), shaped(Y)
    suggestion = key
    if kind == "tuple":
        model = several(lambda m, x: tuple(everything(m, x).values()))
        suggestion = list(everything(model, X)).index(key)
    text = message_of(lambda: rg.LastLayerRigidity(model).fit(X, y))
    assert f"The model returns a {kind} of 5" in text
    assert "float32 (60, 3)" in text
    output = advised("output", text)
    assert output == suggestion
    uq = rg.LastLayerRigidity(model, output=output).fit(X, y)
    calibrated(uq, (X_VALID, shaped(Y_VALID)))
    assert uq.predict(X).mean.shape == everything(model, X)[key].shape


def test_without_a_fitting_target_a_tensor_that_exists_is_suggested():
    model = several(lambda m, x: {"steps": 3, "energy": m.energy(m.body(x)), "more": None})
    text = message_of(lambda: rg.LastLayerRigidity(model, target=lambda b: None).fit([X]))
    assert advised("output", text) == "energy"
    rg.LastLayerRigidity(model, output="energy", target=lambda b: None).fit([X])


def test_outputs_without_a_tensor_are_refused_with_forward():
    model = several(lambda m, x: {"a": {"energy": m.energy(m.body(x))}, "b": "text"})
    text = message_of(lambda: rg.LastLayerRigidity(model).fit(X, Y))
    assert "'a': dict with keys ['energy'], 'b': str" in text
    assert text.endswith("Pass forward= to compute the prediction, one tensor, from it.")
    rg.LastLayerRigidity(model, forward=lambda m, b: m(b[0])["a"]["energy"]).fit(X, Y)


def test_names_of_rows_are_described_once():
    rows = [{"x": x, "name": "a", "y": y} for x, y in zip(X, Y, strict=True)]
    loader = DataLoader(rows, batch_size=60)
    model = nn.Sequential(body(), nn.Linear(8, 1))
    text = message_of(lambda: rg.LastLayerRigidity(model).fit(loader), TypeError)
    assert text.count("str") == 1
    assert "name=list of 60 (str)" in text
    assert "forward=lambda m, b: m(b['key'])" in text
    rg.LastLayerRigidity(model, forward=lambda m, b: m(b["x"])).fit(loader)


def test_a_tuple_of_names_is_described_once():
    model = nn.Sequential(body(), nn.Linear(8, 1))
    text = message_of(lambda: rg.LastLayerRigidity(model).fit(("a",) * 64), TypeError)
    assert text.count("str") == 1


class Forecaster(nn.Module):
    """Like a forecasting model of transformers: the future gives the loss and no prediction."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(body(), nn.Linear(8, 3))

    def forward(self, past_values, future_values=None):
        outputs = {"prediction_outputs": self.net(past_values)}
        if future_values is not None:
            outputs["loss"] = (outputs["prediction_outputs"] - future_values).square().mean()
        return outputs


def test_future_values_are_the_target_and_not_an_input():
    model = Forecaster()
    future, future_valid = three(Y), three(Y_VALID)
    rows = [{"past_values": x, "future_values": y} for x, y in zip(X, future, strict=True)]
    loader = DataLoader(rows, batch_size=20)
    valid = {"past_values": X_VALID, "future_values": future_valid}
    uq = calibrated(rg.LastLayerRigidity(model).fit(loader), valid)
    plain = rg.LastLayerRigidity(model.net).fit(X, future)
    expected = calibrated(plain, (X_VALID, future_valid)).predict(X)
    for inputs in (loader, {"past_values": X}):
        torch.testing.assert_close(uq.predict(inputs).std, expected.std)
    text = r"targets both in the inputs \('future_values'\) and in y"
    refused(text, rg.LastLayerRigidity(model).fit, valid, future_valid)
    teacher = rg.LastLayerRigidity(
        model, forward=lambda m, b: m(**b), output="prediction_outputs"
    ).fit(loader)
    torch.testing.assert_close(teacher.gram.square, uq.gram.square)


def test_rows_with_nan_are_named_as_predict_names_them():
    model = nn.Sequential(body(), nn.Linear(8, 1))
    x, y = X.clone(), Y.clone()
    x[[27, 41, 43]] = torch.nan
    y[59] = torch.inf
    uq = rg.LastLayerRigidity(model)
    refused(r"Batch 0: .* features in 3 of 59 rows \(27, 41, 43\)\. Clean", uq.fit, x[:59], y[:59])
    # The batch that fails first is named, by its own rows and those of the data.
    by_batch = r"Batch 1: .* features in 1 of 20 rows \(7; counted over all batches: 27\)\. Clean"
    in_twenties = rg.LastLayerRigidity(model, batch_size=20)
    refused(by_batch, in_twenties.fit, x, y)
    batches = list(zip(x.split(20), y.split(20), strict=True))
    refused(by_batch, uq.fit, batches)
    good = x.isfinite().all(1)
    refused(r"targets or predictions in 1 of 57 rows \(56\)", uq.fit, x[good], y[good])
    x[:10] = torch.nan
    first_rows = r"features in 10 of 20 rows \(0, 1, 2, 3, 4, \.\.\.\)"
    refused(first_rows, in_twenties.fit, x, y)
    good &= y.isfinite().all(1) & x.isfinite().all(1)
    uq.fit(x[good], y[good])


def test_rows_with_nan_are_counted_over_all_data_however_large():
    model = nn.Sequential(body(), nn.Linear(8, 1))
    x = X.repeat(1000, 1)
    x[50_000, 2] = torch.nan
    text = r"Batch 48: .* in 1 of 1024 rows \(848; counted over all batches: 50000\)"
    refused(text, rg.LastLayerRigidity(model).fit, x, Y.repeat(1000, 1))
