"""Graphs of mean and error bar: compiled, exported, compiled ahead of time, and in ONNX."""

import copy
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities import export
from rigidities.last_layer.doors import familiar_variance
from tests.support.nets import Net, trained
from tests.support.refusals import refused

pytestmark = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="export needs PyTorch 2.7 or newer"
)
SIDE_EFFECTS = "ignore:While compiling, we found certain side effects:UserWarning"


def atoms(net, x):
    """Sums over the padded atoms of a structure."""
    return net.inner(x).sum(1)


def scaled(net, x):
    return 2 * net.inner(x) + 10


CASES = {
    "plain": (1, None, "paper"),
    "several targets": (3, None, rg.Paper(noise="constant", distribution="student-t")),
    "scaled": (1, scaled, rg.Paper(noise="bayes")),
    "summed": (1, atoms, "paper"),
    "auto": (2, None, "full"),
    "auto, scaled": (2, scaled, "full"),
}


@cache
def fitted(id):
    targets, run, method = CASES[id]
    one = trained(targets)
    train, valid, x = one.train, one.valid, one.test[0]
    if run is atoms:
        train, valid = ((x.reshape(-1, 5, 4), y[::5]) for x, y in (train, valid))
        x = x.reshape(-1, 5, 4)
    model = one.model if run is None else Net(run, inner=one.model)
    uq = rg.LastLayerRigidity(model).fit(train)
    uq.calibrate(valid, method=method)
    return uq, x


def close(found, expected, rtol=1e-5):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), other, rtol=rtol, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("id", ["several targets", "auto, scaled"])
def test_a_compiled_module_is_one_graph(id):
    uq, x = fitted(id)
    names = ("mean", "std", "epistemic", "quantiles", "members")
    frozen = uq.freeze(names, members=3)
    compiled = torch.compile(frozen, fullgraph=True, backend="aot_eager", dynamic=True)
    close(compiled(x), frozen(x))
    close(compiled(x[:3]), frozen(x[:3]))


@pytest.mark.thorough
@pytest.mark.filterwarnings(SIDE_EFFECTS)
@pytest.mark.parametrize(
    ("id", "strict"), [("plain", True), ("auto", True), ("summed", False), ("auto, scaled", False)]
)
def test_an_exported_program_takes_any_number_of_rows(id, strict):
    uq, x = fitted(id)
    program = export.torch_export(uq, x[:4], outputs=("mean", "std", "quantiles"), strict=strict)
    for rows in (x, x[:1]):
        *found, quantiles = program.module()(rows)
        close(found, uq(rows))
        exact = torch.stack(uq.predict(rows).interval(0.9))
        assert float(((quantiles - exact).abs() / found[1]).max()) < 1e-3
    assert any(name.endswith("weight") for name in program.state_dict)


def test_a_strict_export_of_a_scaled_output_is_refused():
    uq, x = fitted("scaled")
    refused("strict export does not support.*strict=False", export.torch_export, uq, x, strict=True)


@pytest.mark.thorough
@pytest.mark.parametrize("id", CASES)
def test_an_onnx_file_gives_the_same_numbers_and_says_what_they_are(id, tmp_path):
    uq, x = fitted(id)
    path, names = tmp_path / "net.onnx", ("mean", "std", "epistemic", "noise")
    export.onnx(uq, path, x[:3], outputs=names)
    assert list(tmp_path.iterdir()) == [path]
    session = onnxruntime.InferenceSession(path)
    (given,) = session.get_inputs()
    assert given.shape[0] == "batch"
    assert given.name == ("input0" if CASES[id][1] else "input")  # a forward(*inputs) names none
    assert [one.name for one in session.get_outputs()] == list(names)
    p = uq.predict(x)
    close(session.run(None, {given.name: x.numpy()})[:2], uq(x))
    close(session.run(None, {given.name: x.numpy()})[2:3], (p.epistemic,), 1e-4)
    facts = json.loads({p.key: p.value for p in onnx.load(path).metadata_props}["rigidities"])
    assert facts["library"] == rg.__version__ and facts["outputs"] == list(names)
    assert facts["criterion"] == uq.calibration_report.criterion and facts["ridge"] == uq.ridge
    assert (
        facts["scale"] == uq.scale.tolist()
        and facts["distribution"]["name"] == uq.distribution.name
    )
    assert facts["epistemic_q99"] == familiar_variance(uq)
    targets = CASES[id][0]
    assert shapes_of_no_rows(path, given.name, x) == [[0, targets]] * 4


NO_ROWS = """
import json, sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
rows = numpy.zeros(json.loads(sys.argv[3]), numpy.float32)
print(json.dumps([part.shape for part in session.run(None, {sys.argv[2]: rows})]))
"""


def shapes_of_no_rows(path, name, x):
    """Of a file's outputs for no rows, in a process of its own: a wrong graph may end it."""
    shape = json.dumps([0, *x.shape[1:]])
    command = [sys.executable, "-c", NO_ROWS, str(path), name, shape]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:This ONNX graph leaves out:UserWarning")
@pytest.mark.parametrize(("id", "rank"), [("auto, scaled", None), ("auto", 2)])
def test_quantiles_and_members_of_no_rows_are_of_no_rows(id, rank, tmp_path):
    uq, x = fitted(id)
    names, options = ("quantiles", "members", "std"), {"rank": rank, "members": 3}
    export.onnx(uq, tmp_path / "net.onnx", x[:3], outputs=names, **options)
    (given,) = onnxruntime.InferenceSession(tmp_path / "net.onnx").get_inputs()
    found = shapes_of_no_rows(tmp_path / "net.onnx", given.name, x)
    assert found == [[2, 0, 2], [3, 0, 2], [0, 2]]


class Cancelling(nn.Module):
    """A trunk whose features lose digits in float32."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head((self.inner(x) + 3000) - 3000)


def test_rounding_of_the_processor_is_allowed_and_more_is_not():
    x, y = trained().train
    uq = rg.LastLayerRigidity(Cancelling()).fit((x, y))
    uq.calibrate((x[:50] + 0.1, y[:50]), method="paper")
    frozen, given = uq.freeze(), ((x,), {})
    exact = export._outputs(frozen, given)
    sizes = export._sizes(exact)
    rounding = export._rounding(frozen, given, sizes)
    assert 1e-6 < rounding["mean"] < 1e-2
    wide = copy.deepcopy(uq.model).double()
    off = (wide(x.double()) - uq.model(x)).detach().abs().max() / sizes["mean"]
    assert rounding["mean"] == pytest.approx(float(off), rel=1e-6)


def test_differences_are_relative_to_the_size_of_an_output_not_to_values_near_zero():
    mean = torch.tensor([[1e-9, 1e6], [1.0, -2e6], [-1.0, 3e6]])
    exact = {"mean": mean, "std": torch.full((3, 2), 1e-3)}
    sizes = export._sizes(exact)
    near = mean + torch.tensor([[1e-6, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert export._differences(exact, {"mean": near}, sizes)["mean"] == pytest.approx(
        1.22e-6, rel=1e-2
    )
    far = mean + torch.tensor([[0.0, 0.0], [1e-3, 0.0], [0.0, 0.0]])
    assert export._differences(exact, {"mean": far}, sizes)["mean"] == pytest.approx(
        1.22e-3, rel=1e-2
    )
    broken = {"mean": torch.full((3, 2), torch.nan)}
    assert export._differences(exact, broken, sizes)["mean"] == torch.inf
    one = export._sizes({"mean": mean[:1]})
    assert one["mean"].shape == (1, 2)


@pytest.mark.parametrize(
    "method",
    [rg.Full(support=(-9.0, None)), rg.Paper(distribution="student-t", support=(-9.0, None))],
    ids=["full", "student-t"],
)
def test_the_distribution_bounds_and_conformal_tails_travel(method, tmp_path):
    one = trained()
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    uq.calibrate(one.valid, method=method).conformalize(one.test)
    export.onnx(uq, tmp_path / "net.onnx", one.test[0][:3], outputs=("quantiles", "std"))
    facts = json.loads(onnx.load(tmp_path / "net.onnx").metadata_props[0].value)
    assert facts["distribution"]["name"] == uq.distribution.name
    assert facts["distribution"]["settings"] == uq.distribution.settings()
    assert facts["support"] == [-9.0, None]
    tail = facts["conformal_tails"]["0.9"][0]
    p = uq.predict(one.test[0])
    low, high = p.interval(0.9, conformal=True)
    torch.testing.assert_close(p.quantile(tail / 2), low, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(p.quantile(1 - tail / 2), high, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("targets", "seed", "support"), [(1, 0, None), (2, 1, (-0.5, 0.5))])
def test_intervals_of_the_default_are_in_the_file(targets, seed, support, tmp_path):
    one = trained(targets, seed)
    train, valid = one.train, one.valid
    if support is not None:
        train, valid = ((x, y.clamp(*support)) for x, y in (train, valid))
    uq = rg.LastLayerRigidity(one.model).fit(train)
    uq.calibrate(valid, method=rg.Full(support=support))
    path, x = tmp_path / "net.onnx", one.test[0]
    export.onnx(uq, path, x[:3], outputs=("quantiles",), quantiles=(0.05, 0.5, 0.95))
    facts = json.loads(onnx.load(path).metadata_props[0].value)
    assert facts["distribution"]["name"] == "mixture" and facts["quantiles"] == [0.05, 0.5, 0.95]
    (found,) = onnxruntime.InferenceSession(path).run(None, {"input": x.numpy()})
    exact = torch.stack([uq.predict(x).quantile(level) for level in facts["quantiles"]])
    assert float(((torch.as_tensor(found) - exact).abs() / uq(x)[1]).max()) < 1e-3


@pytest.mark.thorough
def test_an_ill_conditioned_form_is_float64_in_the_file(tmp_path):
    one = trained()
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    uq.calibrate(one.valid, method=rg.Paper(ridge=1e-3))
    assert uq.freeze().norm.matrix0.dtype == torch.float32
    export.onnx(uq, tmp_path / "net.onnx", one.test[0][:3])
    kinds = {t.data_type for t in onnx.load(tmp_path / "net.onnx").graph.initializer}
    assert onnx.TensorProto.DOUBLE in kinds


@pytest.mark.thorough
def test_two_inputs_keep_their_names(tmp_path):
    def run(net, left, right):
        return net.head(torch.tanh(left + right))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, left, right):
            return run(self, left, right)

    x, y = trained().train
    uq = rg.LastLayerRigidity(Two()).fit((x, x.flip(1), y))
    uq.calibrate((x[:50] + 0.1, x[:50].flip(1), y[:50]), method="paper")
    export.onnx(uq, tmp_path / "two.onnx", (x[:1], x[:1].flip(1)))
    session = onnxruntime.InferenceSession(tmp_path / "two.onnx")
    assert [one.name for one in session.get_inputs()] == ["left", "right"]


@pytest.mark.thorough
def test_a_failed_export_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    uq, x = fitted("plain")
    path = tmp_path / "net.onnx"
    path.write_text("as it was")
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    monkeypatch.setattr(export, "rounding_bound", lambda *_: -1.0)
    refused("onnxruntime gives another mean.*Nothing was written", export.onnx, uq, path, x[:3])
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "as it was"


def test_what_a_graph_cannot_hold_is_refused(tmp_path, monkeypatch):
    uq, x = fitted("auto")
    refused("tensor of rows", export.torch_export, uq, torch.tensor(1.0))
    monkeypatch.setattr(export, "LARGEST", 1000)
    refused("an ONNX file can contain at most 2 GB.*rank=", export.onnx, uq, tmp_path / "a.onnx", x)
    monkeypatch.setattr(export, "_NEEDS", ("onnx", "no_such_package"))
    match = r"no_such_package: pip install .rigidities\[onnx\]"
    refused(match, export.onnx, uq, tmp_path / "a.onnx", x, error=ImportError)


def test_uq_itself_points_to_freeze():
    uq, x = fitted("plain")
    refused(r"uq\.freeze\(\)", torch.export.export, uq, (x,))


class Sequences(nn.Module):
    """A recurrent net with two heads, whose outputs are put together by `tail`."""

    def __init__(self, kind, tail):
        super().__init__()
        self.recurrent = kind(4, 6, batch_first=True)
        self.first, self.second = nn.Linear(6, 1), nn.Linear(6, 1)
        self.tail = tail

    def forward(self, x):
        last = self.recurrent(x)[0][:, -1]
        if self.tail is None:
            return 40 * self.first(last)
        return self.tail([self.first(last), 3 * self.second(last)], 1)


def beside(tensors, dim):
    return torch.cat(tensors, axis=dim)


@cache
def recurrent(kind, tail):
    """A fit to sequences, and new sequences."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Sequences(kind, tail)
        x = torch.randn(300, 5, 4)
        y = x.mean((1, 2))[:, None] + 0.1 * torch.randn(300, 1)
    if tail is not None:
        y = tail([y, y.square()], 1)
    uq = rg.LastLayerRigidity(model).fit((x[:200], y[:200]))
    uq.calibrate((x[200:280], y[200:280]))
    return uq, x[280:]


RECURRENT = pytest.mark.parametrize(
    ("kind", "tail"),
    [(nn.LSTM, None), (nn.GRU, torch.stack), (nn.RNN, torch.cat), (nn.LSTM, beside)],
    ids=["LSTM, scaled", "GRU, stacked", "RNN, concatenated", "LSTM, concatenated by axis"],
)


@RECURRENT
def test_a_recurrent_net_with_a_tail_is_exported_for_any_number_of_rows(kind, tail):
    uq, x = recurrent(kind, tail)
    module = export.torch_export(uq, x[:3]).module()
    for rows in (x, x[:1]):
        close(module(rows), uq(rows))


@pytest.mark.thorough
@RECURRENT
def test_a_recurrent_net_with_a_tail_has_an_onnx_file(kind, tail, tmp_path):
    uq, x = recurrent(kind, tail)
    export.onnx(uq, tmp_path / "net.onnx", x[:3])
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    for rows in (x, x[:1]):
        close(session.run(None, {"x": rows.numpy()}), uq(rows))


@pytest.mark.thorough
def test_a_recurrent_net_with_a_tail_may_be_compiled():
    uq, x = recurrent(nn.LSTM, None)
    close(torch.compile(uq.freeze(), backend="aot_eager")(x), uq(x))


class Rows(NamedTuple):
    x: Any
    y: Any = None


@dataclass
class Record:
    x: Any
    y: Any = None


@dataclass
class Unregistered:
    x: Any
    y: Any = None


torch.export.register_dataclass(Record)


def unpacking(model, batch):
    x, _ = batch
    return model(x)


def moving(model, batch):
    batch = {key: tensor.to("cpu") for key, tensor in batch.items()}
    return model(batch["x"])


@dataclass
class Kind:
    """A kind of batches, what takes them apart, and what remains of them in a graph."""

    batch: Any
    forward: Any
    target: Any
    names: tuple[str, ...]
    needed: Any


KINDS = {
    "dict": Kind(
        lambda x, y: {"y": y, "x": x},
        lambda model, batch: model(batch["x"]),
        lambda batch: batch["y"],
        ("x",),
        lambda x: ({"x": x},),
    ),
    "dict, scaled": Kind(
        lambda x, y: {"x": x, "y": y},
        lambda model, batch: 3 * model(batch["x"]) + 1,
        lambda batch: batch["y"],
        ("x",),
        lambda x: ({"x": x},),
    ),
    "dict, all moved": Kind(
        lambda x, y: {"x": x, "y": y},
        moving,
        lambda batch: batch["y"],
        ("x",),
        lambda x: ({"x": x},),
    ),
    "dict of two inputs": Kind(
        lambda x, y: {"right": x.flip(1), "y": y, "left": x, "unit": "eV"},
        lambda model, batch: model(batch["left"] + 2 * batch["right"]),
        lambda batch: batch["y"],
        ("right", "left"),
        lambda x: ({"left": x, "right": x.flip(1), "unit": "eV"},),
    ),
    "nested dict": Kind(
        lambda x, y: {"inputs": {"x": x}, "y": y},
        lambda model, batch: model(batch["inputs"]["x"]),
        lambda batch: batch["y"],
        ("inputs.x",),
        lambda x: ({"inputs": {"x": x}},),
    ),
    "tuple": Kind(
        lambda x, y: (x, y), lambda model, batch: model(batch[0]), None, ("input0",), lambda x: (x,)
    ),
    "tuple with the target between": Kind(
        lambda x, y: (x, y, x.flip(1)),
        lambda model, batch: model(batch[0] + 2 * batch[2]),
        lambda batch: batch[1],
        ("input0", "input2"),
        lambda x: (x, None, x.flip(1)),
    ),
    "unpacked tuple": Kind(lambda x, y: (x, y), unpacking, None, ("input0",), lambda x: (x, None)),
    "named tuple": Kind(
        Rows,
        lambda model, batch: model(batch.x),
        lambda batch: batch.y,
        ("x",),
        lambda x: (Rows(x),),
    ),
    "dataclass": Kind(
        Record,
        lambda model, batch: model(batch.x),
        lambda batch: batch.y,
        ("x",),
        lambda x: (Record(x),),
    ),
}


@cache
def fitted_to_batches(id):
    one, kind = trained(), KINDS[id]
    uq = rg.LastLayerRigidity(one.model, forward=kind.forward, target=kind.target)
    uq.fit([kind.batch(*one.train)])
    uq.calibrate([kind.batch(*one.valid)])
    return uq, one.test


@pytest.mark.parametrize("id", KINDS)
def test_a_batch_is_frozen_and_exported_through_the_users_forward(id):
    uq, (x, y) = fitted_to_batches(id)
    kind = KINDS[id]
    frozen = uq.freeze()
    module = export.torch_export(uq, kind.batch(x[:3], y[:3])).module()
    for n in (len(x), 1):
        batch = kind.batch(x[:n], y[:n])
        close(frozen(batch), uq(batch))
        close(module(*kind.needed(x[:n])), uq(batch))


@pytest.mark.thorough
@pytest.mark.parametrize("id", KINDS)
def test_an_onnx_file_of_a_batch_has_its_names_and_lacks_its_target(id, tmp_path):
    uq, (x, y) = fitted_to_batches(id)
    kind = KINDS[id]
    export.onnx(uq, tmp_path / "net.onnx", kind.batch(x[:1], y[:1]))
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    assert tuple(one.name for one in session.get_inputs()) == kind.names
    arrays = {
        "x": x,
        "left": x,
        "right": x.flip(1),
        "inputs.x": x,
        "input0": x,
        "input2": x.flip(1),
    }
    for n in (len(x), 1):
        given = {name: arrays[name][:n].numpy() for name in kind.names}
        close(session.run(None, given), uq(kind.batch(x[:n], y[:n])))


def test_an_example_without_the_target_is_a_batch_too():
    uq, (x, _) = fitted_to_batches("dict")
    module = export.torch_export(uq, {"x": x[:3]}).module()
    close(module({"x": x}), uq({"x": x}))


def test_an_entry_that_changes_nothing_in_the_example_stays_an_input():
    def masked(model, batch):
        mask = batch.get("mask")
        return model(batch["x"] if mask is None else batch["x"] * mask)

    one = trained()

    def batch(x, y):
        return {"x": x, "mask": torch.ones_like(x), "y": y}

    uq = rg.LastLayerRigidity(one.model, forward=masked, target=lambda batch: batch["y"])
    uq.fit([batch(*one.train)])
    uq.calibrate([batch(*one.valid)])
    x, y = one.test
    module = export.torch_export(uq, batch(x[:3], y[:3])).module()
    half = {"x": x, "mask": (x > 0).float()}
    close(module(half), uq(half))


def two_inputs():
    """A fit to mappings whose entries are the model's keyword inputs, and new entries."""
    one = trained()
    model = Net(lambda net, left, right: 2 * net.inner(left + right), inner=one.model)
    parts = [{"left": x, "y": y, "right": x.flip(1)} for x, y in (one.train, one.valid, one.test)]
    uq = rg.LastLayerRigidity(model).fit([parts[0]])
    uq.calibrate([parts[1]])
    return uq, parts[2]


@pytest.mark.thorough
def test_a_mapping_of_keyword_inputs_is_an_example_too(tmp_path):
    uq, batch = two_inputs()
    inputs = {"right": batch["right"], "left": batch["left"]}
    expected = uq(**inputs)
    example = {key: tensor[:3] for key, tensor in batch.items()}
    close(export.torch_export(uq, example).module()(inputs), expected)
    export.onnx(uq, tmp_path / "net.onnx", example)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    assert [one.name for one in session.get_inputs()] == ["left", "right"]
    close(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()}), expected)


def test_examples_that_no_graph_can_take_are_refused_by_name():
    one = trained()
    uq = rg.LastLayerRigidity(one.model, forward=lambda m, b: m(b.x), target=lambda b: b.y)
    uq.fit([Unregistered(*one.train)])
    uq.calibrate([Unregistered(*one.valid)])
    x, y = one.test
    close(uq.freeze()(Unregistered(x)), uq(Unregistered(x)))
    match = "contains a Unregistered.*torch.export.register_dataclass"
    refused(match, export.torch_export, uq, Unregistered(x, y))
    uq, _ = fitted_to_batches("dict")
    refused("the fit had a mapping, got a tensor", export.torch_export, uq, x)
    refused("KeyError: 'x'", export.torch_export, uq, {"z": x}, error=KeyError)


@pytest.mark.thorough
def test_a_model_that_fixes_the_number_of_rows_has_no_file(tmp_path):
    def run(net, x):
        return net.inner(x) + torch.zeros(len(x), 1)

    one = trained()
    uq = rg.LastLayerRigidity(Net(run, inner=one.model)).fit(one.train)
    uq.calibrate(one.valid)
    match = r"batches of 3 rows only.*x\.shape\[0\]"
    refused(match, export.onnx, uq, tmp_path / "net.onnx", one.test[0][:3])
    assert not list(tmp_path.iterdir())
