"""Predictions that are not finite are refused, with the rows and the cause."""

import math
import weakref
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support.nets import Net, Trained
from tests.support.refusals import refused

NAN, INF = math.nan, math.inf
PAPER = rg.Paper(ridge=0.1)
CALLS = {
    "call": lambda uq, x: uq(x),
    "predict": lambda uq, x: uq.predict(x),
    "predict in batches": lambda uq, x: uq.predict(list(x.split(7))),
    "with a gradient": lambda uq, x: uq.predict_with_gradient(x),
}


def spoilt(net: Trained, value: float, *rows: int) -> torch.Tensor:
    x = net.test[0][:40].clone()
    x[list(rows), 1] = value
    return x


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("call", CALLS)
def test_inputs_that_are_not_finite_are_refused_with_their_rows(net, uq, call, value):
    refused(
        r"No finite prediction for 2 of 40 rows \(3, 21\): the inputs contain NaN or infinity\. ",
        CALLS[call], uq, spoilt(net, value, 3, 21),
    )  # fmt: skip
    CALLS[call](uq, spoilt(net, 0.0, 3, 21))


def test_of_many_rows_the_first_are_named(net, uq):
    rows = r"7 of 40 rows \(0, 1, 2, 3, 4, \.\.\.\)"
    refused(rows, uq.predict, spoilt(net, NAN, *range(7)))


def test_a_data_frame_has_its_columns_named(net):
    columns = [f"c{i}" for i in range(4)]
    uq = rg.LastLayerRigidity(net.model).fit(pd.DataFrame(net.train[0].numpy(), columns=columns))
    frame = pd.DataFrame(spoilt(net, NAN, 3).numpy(), columns=columns)
    with pytest.warns(UserWarning, match="not calibrated"):
        refused("NaN or infinity in 'c1'", uq, frame)
    refused("NaN or infinity in 'c1'", uq.predict, frame)


def test_an_iterator_that_is_read_up_leaves_the_cause_open(net, uq):
    given = iter(spoilt(net, NAN, 3).split(10))
    refused(r"1 of 40 rows \(3\): check that their inputs are finite and", uq.predict, given)


def test_a_model_that_gives_nan_for_finite_inputs_is_told_apart(net):
    model = Net(lambda m, x: m.head(x.log()), head=nn.Linear(4, 1))
    uq = rg.LastLayerRigidity(model).fit(net.train[0].abs(), net.train[1])
    uq.calibrate(net.valid[0].abs(), net.valid[1], method=PAPER)
    x = net.test[0][:5].abs()
    x[2] *= -1
    for call in (uq, uq.predict):
        refused(r"1 of 5 rows \(2\): their inputs are finite\. Check that their", call, x)


def test_a_model_that_fills_what_is_missing_may_get_it(net):
    model = Net(lambda m, x: m.inner(x.nan_to_num(0.0)), inner=net.model)
    uq = rg.LastLayerRigidity(model).fit(net.train)
    uq.calibrate(net.valid, method=PAPER)
    x, filled = spoilt(net, NAN, 3), spoilt(net, 0.0, 3)
    for one in (x, pd.DataFrame(x.numpy())):
        torch.testing.assert_close(uq(one), uq(filled))
        torch.testing.assert_close(uq.predict(one).std, uq.predict(filled).std)


def test_an_infinite_bar_around_a_finite_mean_stays():
    model = nn.Linear(1, 1)
    x = torch.linspace(-1, 1, 9)[:, None]
    uq = rg.LastLayerRigidity(model).fit(x, x)
    uq.calibrate(x + 0.1, x, method=PAPER)
    mean, std = uq(torch.tensor([[1e30]]))
    assert bool(mean.isfinite()) and bool(std.isinf())


def test_large_numbers_whose_sum_overflows_are_no_trouble():
    model, x = nn.Linear(1, 1), torch.linspace(-1, 1, 9)[:, None]
    nn.init.constant_(model.bias, 1e38)
    uq = rg.LastLayerRigidity(model).fit(x)
    with pytest.warns(UserWarning, match="not calibrated"):
        mean, _ = uq(x)
    assert bool(mean.isfinite().all()) and bool(mean.sum().isinf())


def test_any_regressor_refuses_alike(net):
    (x, y), names = net.train, ["a", "b", "c", "d"]
    w = torch.linalg.lstsq(x, y).solution[:, 0]
    frame = pd.DataFrame(x.numpy(), columns=names)
    pr = rg.PredictionRigidity(lambda w, x: x @ w, w).fit(frame, y[:, 0])
    bad = spoilt(net, NAN, 3)
    refused(r"1 of 40 rows \(3\): the inputs contain NaN or infinity in 'b'", pr.predict, bad)
    log = rg.PredictionRigidity(lambda w, x: x.log() @ w, w, ridge=1.0)
    refused(r"rows of a batch \(", log.fit, x, y[:, 0])


def test_an_infinite_mean_with_a_finite_bar_is_refused(net):
    model = Net(lambda m, x: m.head(x) / (x[:, :1] < 50).float(), head=nn.Linear(4, 1))
    uq = rg.LastLayerRigidity(model, features=lambda m, x: x).fit(net.train)
    uq.calibrate(net.valid, method=PAPER)
    x = net.test[0][:5].clone()
    x[2, 0] = 100.0
    for call in (uq, uq.predict):
        refused(r"1 of 5 rows \(2\): their inputs are finite", call, x)


def test_what_the_model_takes_in_other_rows_is_not_named_as_the_cause(net):
    names = ["a", "b", "c", "d"]
    model = Net(
        lambda m, x: m.head(x.nan_to_num(0.0) / (x[:, :1] < 50).float()), head=nn.Linear(4, 1)
    )
    frame = pd.DataFrame(net.test[0][:9].numpy(), columns=names).assign(b=NAN)
    uq = rg.LastLayerRigidity(model).fit(frame[["a", "b", "c", "d"]])
    frame.loc[5, "a"] = 100.0
    frame.loc[6, ["a", "c"]] = [100.0, NAN]
    with pytest.warns(UserWarning, match="not calibrated"):
        refused(r"1 of 6 rows \(5\): check that their inputs are finite and", uq.predict, frame[:6])
    refused(r"2 of 9 rows \(5, 6\): the inputs contain NaN or infinity in 'c'\.", uq.predict, frame)


def test_the_cause_is_looked_for_batch_by_batch(net, uq):
    held: list[Any] = []

    class Stream:
        def __iter__(self) -> Any:
            for part in spoilt(net, NAN, 3).split(4):
                held.append(weakref.ref(batch := part.numpy().copy()))
                yield batch
                assert len([one for one in held[10:] if one() is not None]) < 4

    refused(r"1 of 40 rows \(3\): the inputs contain NaN", uq.predict, Stream())
    assert len(held) == 20


def test_rows_of_atoms_leave_the_samples_alone():
    """Inputs without one row per sample are looked at as a whole."""
    model = Net(lambda m, x: m.head(x).reshape(-1, 2).sum(1), head=nn.Linear(3, 1))
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    uq = rg.LastLayerRigidity(model).fit([x])
    x = x[:8].clone()
    x[7] = NAN
    with pytest.warns(UserWarning, match="not calibrated"):
        refused(
            r"1 of 4 rows \(3\): the inputs contain NaN or infinity\.", uq.predict, [x[:4], x[4:]]
        )


def test_features_and_joint_quantities_of_any_regressor_are_refused_alike(net, uq):
    bad = spoilt(net, NAN, 3)
    refused(r"1 of 40 rows \(3\): the inputs contain NaN", uq.features, bad)
    w = torch.linalg.lstsq(*net.train).solution[:, 0]
    pr = rg.PredictionRigidity(lambda w, x: x @ w, w).fit(net.train[0], net.train[1][:, 0])
    for call in (pr.covariance, lambda x: pr.covariance(net.test[0], x)):
        refused(r"1 of 40 rows \(3\): the inputs contain NaN", call, bad)


def test_a_fit_names_the_column_that_spoils_it(net):
    (x, y), names = net.train, ["a", "b", "c", "d"]
    frame = pd.DataFrame(x.numpy(), columns=names).assign(c=NAN)
    for uq in (rg.LastLayerRigidity(net.model), rg.PredictionRigidity(net.model, ridge=1.0)):
        refused("NaN or infinity in .*'c'", uq.fit, frame, y)
    refused("features, from 'c' of the inputs", rg.LastLayerRigidity(net.model).fit, frame, y)
    refused(r"300 of 300 rows of a batch \(0, 1", rg.PredictionRigidity(net.model).fit, frame, y)
