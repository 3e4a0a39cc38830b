"""Inputs and targets apart, as data frames, series, arrays and lists: the same as tensors."""

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rigidities as rg
from tests.support.nets import Net, Trained, trained
from tests.support.refusals import refused

NAMES = ["a", "b", "c", "d"]
NLL: dict[str, Any] = {"criterion": "nll", "ridge": 0.1}
FORMS = {
    "pandas": lambda x: pd.DataFrame(x.double().numpy(), columns=NAMES),
    "polars": lambda x: pl.DataFrame(x.double().numpy(), schema=NAMES),
    "numpy in double": lambda x: x.double().numpy(),
    "lists": lambda x: x.tolist(),
}
CALLS = {
    "call": lambda uq, x: uq(x)[1],
    "predict": lambda uq, x: uq.predict(x).std,
    "gradient": lambda uq, x: uq.gradient(x).std,
    "hessian product": lambda uq, x: uq.hessian_product(x, torch.ones(4)).std,
    "propagate": lambda uq, x: uq.propagate(lambda y: y.mean(), x).std,
    "covariance": lambda uq, x: uq.covariance(x, x),
    "local": lambda uq, x: uq.local(x).std,
    "features": lambda uq, x: uq.features(x),
    "select": lambda uq, x: uq.select(x, 3).indices,
    "ensemble": lambda uq, x: uq.ensemble(4, generator=torch.Generator().manual_seed(0))(x),
}


@pytest.fixture(scope="module")
def net() -> Trained:
    return trained(steps=20)


@pytest.fixture(scope="module")
def uq(net: Trained) -> Any:
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    uq.calibrate(net.valid, **NLL)
    return uq


def plane(net: Trained) -> Any:
    """A regressor at the minimum of its loss."""
    x, y = (one.double() for one in net.train)
    w = torch.linalg.lstsq(x, y).solution[:, 0]
    return rg.PredictionRigidity(lambda w, x: x @ w, w)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", FORMS)
def test_every_call_takes_what_is_no_tensor(net, uq, form, call):
    x = net.test[0][:6]
    torch.testing.assert_close(CALLS[call](uq, FORMS[form](x)), CALLS[call](uq, x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("column", ["as it is", "series"])
def test_x_and_y_apart_are_one_data_set(net, uq, form, column):
    def given(data: Any) -> Any:
        x, y = data
        return FORMS[form](x), y if column == "as it is" else pd.Series(y[:, 0].numpy())

    own = rg.LastLayerRigidity(net.model).fit(*given(net.train))
    report = own.calibrate(*given(net.valid), **NLL)
    torch.testing.assert_close(own.gram.matrix, uq.gram.matrix)
    assert report.nll == pytest.approx(uq.report.nll, rel=1e-6)
    assert own.refit(*given(net.valid), add=False).refitted.judged == len(net.valid[0])
    own.partial_fit(*given(net.test))
    assert own.gram.count == uq.gram.count + len(net.test[0])
    own.forget(*given(net.test))
    torch.testing.assert_close(own.gram.matrix, uq.gram.matrix)


@pytest.mark.parametrize("form", FORMS)
def test_any_regressor_takes_the_same_forms(net, form):
    (x, y), (valid, truth), new = net.train, net.valid, net.test[0][:6].double()
    plain = plane(net).fit((x.double(), y[:, 0].double()))
    plain.calibrate((valid.double(), truth[:, 0].double()), **NLL)
    own = plane(net).fit(FORMS[form](x), y[:, 0].tolist())
    own.calibrate(FORMS[form](valid), pd.Series(truth[:, 0].numpy()), **NLL)
    torch.testing.assert_close(own.predict(FORMS[form](new)).std, plain.predict(new).std)
    torch.testing.assert_close(own.covariance(FORMS[form](new)), plain.covariance(new))


def test_several_inputs_and_mappings_have_their_target_apart_too(net):
    x, y = net.train
    model = Net(lambda m, a, b: m.inner(torch.cat([a, b], 1)), inner=net.model)
    halves = (pd.DataFrame(x[:, :1].numpy()), x[:, 1:])
    whole = rg.LastLayerRigidity(net.model).fit(x, y).gram.matrix
    for given in (halves, dict(zip("ab", halves, strict=True))):
        torch.testing.assert_close(rg.LastLayerRigidity(model).fit(given, y).gram.matrix, whole)


def test_columns_of_whole_numbers_and_truth_values_become_real_numbers(net, uq):
    frame = pd.DataFrame({"a": [1, 2], "b": [True, False], "c": [0.5, 1.5]})
    frame["d"] = pd.array([3, 4], dtype="Int64")
    x = torch.tensor([[1, 1, 0.5, 3], [2, 0, 1.5, 4]])
    for given in (frame, pl.from_pandas(frame), pd.DataFrame(np.array([[1, 2, 3, 4]]))):
        expected = x if len(given) == 2 else torch.tensor([[1.0, 2, 3, 4]])
        torch.testing.assert_close(uq(given), uq(expected))


def test_whole_numbers_in_an_array_stay_those_of_an_embedding():
    table = nn.Embedding(5, 3)
    model = Net(lambda m, x: m.head(m.table(x)), table=table, head=nn.Linear(3, 1))
    rows = np.array([0, 1, 2, 3, 4, 1])
    uq = rg.LastLayerRigidity(model).fit(rows, np.ones(6))
    uq.calibrate(rows[::-1].copy(), np.zeros(6), **NLL | {"criterion": "absolute"})
    assert uq(rows)[1].shape == uq.predict(rows).std.shape == (6, 1)


def test_the_columns_of_the_fit_are_asked_for_by_name_also_after_a_file(net, tmp_path):
    (x, y), frame = net.train, FORMS["pandas"](net.test[0])
    uq = rg.LastLayerRigidity(net.model).fit(FORMS["polars"](x), y)
    uq.calibrate(net.valid, **NLL)
    pr = plane(net).fit(FORMS["pandas"](x), y[:, 0])
    path, flat = tmp_path / "f.safetensors", pr._regressor.flat
    for one, made in ((uq, (net.model,)), (pr, (lambda w, x: x @ w, flat))):
        one.save(path)
        for known in (one, type(one).load(path, *made)):
            refused("'a', 'b'.* here are .*'b', 'a'", known.predict, frame[["b", "a"]])
            assert len(known.predict(frame).std) == len(frame)
    refused("The fit had the columns", uq, frame[["b", "a", "c", "d"]])
    refused("The fit had the columns", uq.calibrate, frame[["b", "a", "c", "d"]], y[:200])
    assert uq.fit(frame[["b", "a", "c", "d"]], net.test[1]).gram.count == 200  # a fit begins anew


X, Y = torch.ones(6, 4), torch.ones(6, 1)
FRAME = pd.DataFrame(X.numpy(), columns=NAMES)
REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "another length": (X, Y[:4], ValueError, "x has 6 rows and y has 4. Give one target per row"),
    "a loader": (DataLoader(TensorDataset(X, Y)), Y, TypeError, "x of type DataLoader.*without y"),
    "batches": ([(X, Y)], Y, TypeError, "got x of type list.*without y"),
    "a target of several": (X, (Y, Y), TypeError, "got y of type tuple"),
    "a number": (X, 1.0, TypeError, "got y of type float"),
    "nothing": (None, Y, TypeError, "got x of type NoneType"),
    "a target twice": ({"x": X, "labels": Y}, Y, ValueError, "targets both in the inputs"),
    "swapped": (Y, X, RuntimeError, "the last is the target, all before it are inputs"),
    "strings": (FRAME.assign(c="u"), Y, TypeError, "Column 'c' holds str, expected numbers"),
    "objects": (FRAME.assign(c=[None] * 6), Y, TypeError, "Column 'c' holds object"),
    "dates": (FRAME.assign(b=pd.Timestamp(0)), Y, TypeError, "Column 'b' holds datetime64"),
    "missing truth values": (
        FRAME.assign(b=pd.array([True, None] * 3, dtype="boolean")),
        Y,
        TypeError,
        "Column 'b' holds boolean, .* fill what is missing",
    ),
    "polars' strings": (
        pl.from_pandas(FRAME).with_columns(c=pl.lit("u")), Y, TypeError, "Column 'c' holds String",
    ),
    "two columns of a name": (
        FRAME.set_axis(["a", "a", "c", "d"], axis=1), Y, TypeError, "'a' holds several columns",
    ),
    "a series of strings": (X, pd.Series(["u"] * 6, name="t"), TypeError, "Column 't' holds str"),
    "whole numbers": (X.long().numpy(), Y, RuntimeError, "arrays of integers, keep their dtype"),
    "missing numbers": (FRAME.assign(b=pd.NA).astype("Float64"), Y, ValueError, "NaN|No finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_data_set_is_refused_by_its_cause(net, case):
    x, y, error, message = REFUSED[case]
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    before = uq.gram.matrix.clone()
    refused(message, uq.fit, x, y, error=error)
    assert torch.equal(uq.gram.matrix, before)
    if case not in ("swapped", "whole numbers"):  # f itself is called without a word around it
        refused(message, plane(net).fit, x, y, error=error)
