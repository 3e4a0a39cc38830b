"""Inputs and targets apart, as data frames, series, arrays and lists: the same as tensors."""

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import rigidities as rg
from tests.support.nets import Net, Trained
from tests.support.refusals import refused

NAMES = ["a", "b", "c", "d"]
PAPER = rg.Paper(ridge=0.1)
FORMS = {
    "pandas": lambda x: pd.DataFrame(x.double().numpy(), columns=NAMES),
    "polars": lambda x: pl.DataFrame(x.double().numpy(), schema=NAMES),
    "arrow": lambda x: pa.table(dict(zip(NAMES, x.double().numpy().T, strict=True))),
    "numpy in double": lambda x: x.double().numpy(),
    "lists": lambda x: x.tolist(),
}
CALLS = {
    "call": lambda uq, x: uq(x)[1],
    "predict": lambda uq, x: uq.predict(x).std,
    "gradient": lambda uq, x: uq.gradient(x).std,
    "propagate": lambda uq, x: uq.propagate(lambda y: y.mean(), x).std,
    "covariance": lambda uq, x: uq.covariance(x, x),
    "local": lambda uq, x: uq.local(x).std,
    "features": lambda uq, x: uq.features(x),
    "select": lambda uq, x: uq.select(x, 3).indices,
    "ensemble": lambda uq, x: uq.ensemble(4, generator=torch.Generator().manual_seed(0))(x),
}


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
    report = own.calibrate(*given(net.valid), method=PAPER).calibration_report
    torch.testing.assert_close(own.gram.matrix, uq.gram.matrix)
    assert report.nll == pytest.approx(uq.calibration_report.nll, rel=1e-6)
    assert own.refit(*given(net.valid), add=False).refitted.judged == len(net.valid[0])
    own.partial_fit(*given(net.test))
    assert own.gram.count == uq.gram.count + len(net.test[0])
    own.forget(*given(net.test))
    torch.testing.assert_close(own.gram.matrix, uq.gram.matrix)


@pytest.mark.parametrize("form", FORMS)
def test_any_regressor_takes_the_same_forms(net, form):
    (x, y), (valid, truth), new = net.train, net.valid, net.test[0][:6].double()
    plain = plane(net).fit((x.double(), y[:, 0].double()))
    plain.calibrate((valid.double(), truth[:, 0].double()), method=PAPER)
    own = plane(net).fit(FORMS[form](x), y[:, 0].tolist())
    own.calibrate(FORMS[form](valid), pd.Series(truth[:, 0].numpy()), method=PAPER)
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
    uq.calibrate(rows[::-1].copy(), np.zeros(6), method=rg.Paper(criterion="bins", ridge=0.1))
    assert uq(rows)[1].shape == uq.predict(rows).std.shape == (6, 1)


def test_the_columns_of_the_fit_are_asked_for_by_name_also_after_a_file(net, tmp_path):
    (x, y), frame = net.train, FORMS["pandas"](net.test[0])
    uq = rg.LastLayerRigidity(net.model).fit(FORMS["polars"](x), y)
    uq.calibrate(net.valid, method=PAPER)
    pr = plane(net).fit(FORMS["pandas"](x), y[:, 0])
    path, flat = tmp_path / "f.safetensors", pr._regressor.flat
    for one, made in ((uq, (net.model,)), (pr, (lambda w, x: x @ w, flat))):
        one.save(path)
        for known in (one, type(one).load(path, *made)):
            refused("'a', 'b'.*, got .*'b', 'a'", known.predict, frame[["b", "a"]])
            assert len(known.predict(frame).std) == len(frame)
    refused("The fit had the columns", uq, frame[["b", "a", "c", "d"]])
    refused("The fit had the columns", uq.calibrate, frame[["b", "a", "c", "d"]], y[:200])
    assert uq.fit(frame[["b", "a", "c", "d"]], net.test[1]).gram.count == 200  # a fit begins anew


X, Y = torch.ones(6, 4), torch.ones(6, 1)
FRAME = pd.DataFrame(X.numpy(), columns=NAMES)
REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "another length": (X, Y[:4], ValueError, "x has 6 rows and y has 4. Pass one target per row"),
    "a loader": (DataLoader(TensorDataset(X, Y)), Y, TypeError, "x of type DataLoader.*without y"),
    "batches": ([(X, Y)], Y, TypeError, "got x of type list.*without y"),
    "a target of several": (X, (Y, Y), TypeError, "got y of type tuple"),
    "a number": (X, 1.0, TypeError, "got y of type float"),
    "nothing": (None, Y, TypeError, "got x of type NoneType"),
    "a target twice": ({"x": X, "labels": Y}, Y, ValueError, "targets both in the inputs"),
    "a target in a tuple and apart": ((X, Y), Y, ValueError, "inputs .their last entry. and in y"),
    "lists of other lengths": ([[1.0] * 4] * 5 + [[2.0]], Y, TypeError, "got x of type list"),
    "swapped": (Y, X, RuntimeError, "is the target; all entries before it are inputs"),
    "strings": (FRAME.assign(c="u"), Y, TypeError, "Column 'c' contains str, expected numbers"),
    "objects": (FRAME.assign(c=[None] * 6), Y, TypeError, "Column 'c' contains object"),
    "dates": (FRAME.assign(b=pd.Timestamp(0)), Y, TypeError, "Column 'b' contains datetime64"),
    "missing truth values": (
        FRAME.assign(b=pd.array([True, None] * 3, dtype="boolean")),
        Y,
        TypeError,
        "Column 'b' contains boolean, .* fill missing values",
    ),
    "polars' strings": (
        pl.from_pandas(FRAME).with_columns(c=pl.lit("u")), Y, TypeError, "'c' contains String",
    ),
    "two columns of a name": (
        FRAME.set_axis(["a", "a", "c", "d"], axis=1), Y, TypeError, "'a' contains several columns",
    ),
    "a series of strings": (X, pd.Series(["u"] * 6, name="t"), TypeError, "'t' contains str"),
    "whole numbers": (
        X.long().numpy(), Y, RuntimeError, r"integers, keep their dtype: .*astype\('float32'",
    ),
    "missing numbers": (
        FRAME.assign(b=pd.NA).astype("Float64"), Y, ValueError, "NaN or infinity in .*'b'",
    ),
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


@pytest.mark.parametrize("size", [50, 70])  # of which the last is shorter
def test_lists_of_row_numbers_are_batches_of_a_forward_function(net, size):
    x, y = net.train
    picked = {"forward": lambda m, b: m(x[b]), "target": lambda b: y[b]}
    uq = rg.LastLayerRigidity(net.model, **picked)
    uq.fit(list(BatchSampler(range(len(x)), size, drop_last=False)))
    whole = rg.LastLayerRigidity(net.model).fit(x, y)
    torch.testing.assert_close(uq.gram.matrix, whole.gram.matrix)
    with pytest.warns(UserWarning, match="not calibrated"):
        found = uq([3, 1])[0]
    assert torch.equal(found, uq.predict([[3, 1]]).mean)
    torch.testing.assert_close(found, net.model(x[[3, 1]]))


def test_a_model_of_lists_gets_them_as_they_are():
    bag = Net(
        lambda m, docs: m.head(torch.stack([m.table(torch.tensor(d)).mean(0) for d in docs])),
        table=nn.Embedding(9, 3), head=nn.Linear(3, 1),
    )  # fmt: skip
    docs, y = [[1, 2, 3], [4, 5], [6], [7, 8]], torch.arange(4.0)[:, None]
    uq = rg.LastLayerRigidity(bag).fit([(docs, y), (docs[::-1], y)])
    with pytest.warns(UserWarning, match="not calibrated"):
        means = [uq(given)[0] for given in (docs, [[1, 2], [3, 4]])]  # of other lengths, and of one
    assert torch.equal(means[0], bag(docs)) and torch.equal(means[1], bag([[1, 2], [3, 4]]))


def test_numbers_of_numpy_in_a_list_and_matrices_of_other_libraries_are_data(net, uq):
    x, y = net.train
    values = [np.float32(one) for one in y[:, 0].tolist()]
    own = rg.LastLayerRigidity(net.model).fit(_Labelled(x.numpy()), values)
    torch.testing.assert_close(own.gram.matrix, uq.gram.matrix)


class _Labelled:
    """A matrix as xarray has it: no columns, but `to_numpy`."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array

    def to_numpy(self) -> np.ndarray:
        return self.array

    def __len__(self) -> int:
        return len(self.array)


def test_arrays_inside_a_mapping_reach_forward_as_tensors(net):
    x, y = net.train
    uq = rg.LastLayerRigidity(net.model, forward=lambda m, b: m(b["x"])).fit({"x": x}, y)
    uq.calibrate({"x": net.valid[0]}, net.valid[1], method=PAPER)
    new = net.test[0][:5]
    for given in (new.numpy(), FORMS["pandas"](new)):
        torch.testing.assert_close(uq({"x": given}), uq({"x": new}))
    leaf = new.clone().requires_grad_()
    uq({"x": leaf})[1].sum().backward()  # a tensor stays the one that was given
    assert leaf.grad is not None


def other(x: torch.Tensor) -> pd.DataFrame:
    return FORMS["pandas"](x)[["b", "a", "c", "d"]]


REORDERED = {
    "keyword": lambda uq, f, y: uq(input=f),
    "batches": lambda uq, f, y: uq.predict([f]),
    "labelled batches": lambda uq, f, y: uq.calibrate([(f, y)], method=PAPER).calibration_report,
    "lists": lambda uq, f, y: uq.predict([[f, y]]),
    "conformal": lambda uq, f, y: (
        uq.calibrate(f.iloc[:, [1, 0, 2, 3]], y, method=PAPER).conformalize(f, y).calibration_report
    ),
    "merge": lambda uq, f, y: uq.merge(rg.LastLayerRigidity(uq.model).fit(f, y)),
    "partial fit": lambda uq, f, y: uq.partial_fit([(f, y)]),
}


@pytest.mark.parametrize("call", REORDERED)
@pytest.mark.parametrize("fit", ["frame", "batches"])
def test_reordered_columns_are_refused_wherever_a_frame_stands(net, fit, call):
    (x, y), (new, truth) = net.train, net.test
    frame = FORMS["pandas"](x)
    given = (frame, y) if fit == "frame" else ([(frame[:100], y[:100]), (frame[100:], y[100:])],)
    uq = rg.LastLayerRigidity(net.model).fit(*given)
    uq.calibrate(net.valid, method=PAPER)
    refused(r"'a', 'b', 'c', 'd'\], got \['b', 'a'", REORDERED[call], uq, other(new), truth)
    assert uq.gram.count == len(x) and not uq.calibration_report.stale
    assert len(uq(input=FORMS["pandas"](new))[0]) == len(uq.predict([FORMS["polars"](new)]).std)
    uq.calibrate(
        FORMS["pandas"](new), pd.DataFrame(truth.numpy()), method=PAPER
    )  # a target has its own


def test_the_second_of_several_frames_is_asked_for_its_columns_too(net):
    x, y = net.train
    left, right = FORMS["pandas"](x)[["a", "b"]], FORMS["pandas"](x)[["c", "d"]]
    model = Net(lambda m, a, b: m.inner(torch.cat([a, b], 1)), inner=net.model)
    uq = rg.LastLayerRigidity(model).fit((left, right), y)
    uq.calibrate(net.valid[0].split(2, 1), net.valid[1], method=PAPER)
    for call in (uq, lambda *both: uq.predict(both), lambda a, b: uq(b=b, a=a)):
        refused(r"got \['d', 'c'\]", call, left, right[["d", "c"]])
        call(left, right)


def test_batches_of_one_fit_have_their_columns_in_one_order(net):
    x, y = net.train
    batches = [(FORMS["pandas"](x), y), (other(x), y)]
    refused("The fit had the columns", rg.LastLayerRigidity(net.model).fit, batches)
    pr, flat = plane(net), [(one, y[:, 0]) for one, y in batches]
    refused("The fit had the columns", pr.fit, flat)
    refused("The fit had the columns", pr.fit(flat[:1]).predict, other(x))
