"""Files and state dicts: nothing lost, nothing run, everything wrong refused by name."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rigidities as rg
from rigidities.data import storage
from tests.support import zoo
from tests.support.nets import Net, calibrated, trained
from tests.support.refusals import refused
from tests.support.zoo_fits import fitted_to


def fitted(net, **options):
    uq = rg.LastLayerRigidity(net.model).fit(net.train, **options)
    uq.calibrate(net.valid, noise="constant", criterion="nll")
    return uq


@pytest.fixture
def path(tmp_path):
    return tmp_path / "uq.safetensors"


@pytest.fixture
def uq(net):
    return fitted(net)


@pytest.fixture
def saved(uq, path):
    uq.save(path)
    return uq, path


@pytest.fixture
def written(saved):
    return saved[1]


load = rg.LastLayerRigidity.load


def test_a_loaded_fit_predicts_the_same(net, saved):
    uq, path = saved
    again = load(path, net.model)
    x = net.test[0]
    assert torch.equal(again(x)[1], uq(x)[1])
    assert torch.equal(again.predict(x).noise, uq.predict(x).noise)
    assert str(again.report) == str(uq.report)
    assert again.gram.count == 300


@pytest.mark.parametrize(
    "id", ["sum_over_two_readouts_of_which_one_is_nonlinear", "forces_that_free_the_graph"]
)
def test_a_fit_of_any_readout_is_loaded_by_its_names(id, path):
    case, more = zoo.build(id), zoo.build(id, 1)
    uq = fitted_to(case, [case.data])
    uq.save(path)
    again = load(path, case.model, **case.options).partial_fit([more.data])
    whole = fitted_to(case, [case.data, more.data])
    for one in (whole, again):
        one.calibrate([zoo.build(id, 2).data], ridge=0.1, criterion="nll")
    torch.testing.assert_close(again.predict([more.data]).std, whole.predict([more.data]).std)


def test_a_loaded_fit_can_be_extended_and_recalibrated(net, saved):
    uq, path = saved
    again = load(path, net.model).partial_fit(net.test)
    torch.testing.assert_close(again.gram.matrix, uq.partial_fit(net.test).gram.matrix)
    with pytest.warns(UserWarning, match="stand in the training data"):
        again.calibrate(net.test, criterion="nll")


@pytest.mark.parametrize("loss", ["huber", "poisson"])
def test_named_losses_survive_a_file(net, path, loss):
    uq = fitted(net, loss=loss)
    uq.save(path)
    again = load(path, net.model)
    torch.testing.assert_close(
        again.partial_fit(net.test).gram.matrix, uq.partial_fit(net.test).gram.matrix
    )


def test_functions_do_not_survive_a_file_and_are_asked_for(net, path):
    weight = lambda batch: torch.full((len(batch[0]),), 2.0)  # noqa: E731
    uq = fitted(net, sample_weight=weight)
    uq.save(path)
    again = load(path, net.model)
    again(net.test[0])
    refused("set_loss", again.partial_fit, net.test)
    refused("set_loss", again.calibrate, net.valid)
    again.set_loss("mse", weight).partial_fit(net.test)
    torch.testing.assert_close(again.gram.matrix, uq.partial_fit(net.test).gram.matrix)
    refused("loss of this fit is known", again.set_loss, "huber")


def test_a_file_loads_into_the_model_in_another_dtype(net, saved):
    uq, path = saved
    before = uq(net.test[0])[1]
    again = load(path, net.model.double())
    torch.testing.assert_close(again(net.test[0].double())[1], before.double(), rtol=1e-3, atol=0)


def test_the_header_is_readable_json_with_versions_and_fingerprint(written):
    raw = written.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["rigidities"])
    assert header["format"] == storage.FORMAT
    assert header["library"] == rg.__version__
    assert header["readout"]["layer"] == ["4"]
    assert len(header["readout"]["fingerprint"]) == 16


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "function"),
    [("forward", lambda m, batch: m(batch[0])[:, :1]), ("features", lambda m, x: m[:-1](x))],
)
def test_functions_of_the_fit_must_be_given_again(net, path, name, function):
    uq = rg.LastLayerRigidity(net.model, **{name: function}).fit([net.train])
    calibrated(uq, [net.valid]).save(path)
    refused(f"fitted with {name}=. Pass the same", load, path, net.model)
    again = load(path, net.model, **{name: function})
    assert torch.equal(again.predict([net.test]).std, uq.predict([net.test]).std)


def test_the_picked_output_survives_a_file(path):
    model = Net(lambda m, x: (m.head(x), x), head=nn.Linear(3, 1))
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    uq = calibrated(rg.LastLayerRigidity(model, output=0).fit((x[:20], y[:20])), (x[20:], y[20:]))
    uq.save(path)
    again = load(path, model)
    assert torch.equal(again(x)[1], uq(x)[1])


SPOILT = {
    "a part is missing": (
        lambda tensors, header: tensors.pop("gram.matrix"),
        r"incomplete \('matrix'\)",
    ),
    "of a newer format": (
        lambda tensors, header: header.update(format=storage.FORMAT + 1, library="9.0"),
        rf"format {storage.FORMAT + 1}.*written by rigidities 9.0.*>=9.0",
    ),
    "a calibration with keys from the future": (
        lambda tensors, header: (
            header["calibration"].update(tilt=1.0) or header.update(library="9.0")
        ),
        r"tilt.*does not know.*pip install 'rigidities>=9\.0'",
    ),
}


def deep(levels):
    nested = []
    for _ in range(levels):
        nested = [nested]
    return nested


def put(name, value):
    """A tensor in place of another, or one whose first entry is another."""
    whole = isinstance(value, torch.Tensor)

    def spoil(tensors, header):
        if whole:
            tensors[name] = value
        else:
            tensors[name].view(-1)[0] = value

    return spoil


def say(name, value, *parts):
    def spoil(tensors, header):
        for part in parts:
            header = header[part]
        header[name] = value

    return spoil


WRONG = [
    put(name, value)
    for name, value in [
        ("gram.matrix", torch.eye(25)),
        ("gram.matrix", torch.ones(25, 24, dtype=torch.float64)),
        ("gram.matrix", torch.ones(25, dtype=torch.float64)),
        ("gram.matrix", torch.ones(2, 25, 25, dtype=torch.float64)),
        ("gram.count", torch.ones(3, dtype=torch.int64)),
        ("gram.zeros", torch.zeros(4, dtype=torch.int64)),
        ("gram.cross", torch.zeros(24, 1, dtype=torch.float64)),
        ("sketch.hashes", -5),
        ("sketch.hashes", (1 << 63) - 1),
        ("sketch.hashes", torch.zeros(300)),
        ("sketch.hashes", torch.zeros(7, dtype=torch.int64)),
        ("sketch.counts", 0),
        ("sketch.limit", 5),
        ("sketch.limit", torch.zeros(2, dtype=torch.int64)),
        *(("calibration.scale", value) for value in (torch.nan, torch.inf, -1.0)),
        ("calibration.scale", torch.ones(2, dtype=torch.float64)),
        ("calibration.scale", torch.ones(1)),
        *(("calibration.noise", value) for value in (torch.nan, torch.inf, -1.0)),
        ("calibration.noise", torch.ones((), dtype=torch.float64)),
        ("probes.output", torch.zeros(8, 1)),
        ("calibration.gradient_scale", torch.full((1,), torch.nan, dtype=torch.float64)),
    ]
] + [
    say(name, value, *parts)
    for name, value, *parts in [
        *(("readout", value) for value in ({}, None, [], "", 7, deep(500))),
        *(("targets", value) for value in (0, -1, 2.5, "one", None, True, 10**30)),
        *(("inputs", value) for value in (-1, None, [], deep(500))),
        *(("loss", value) for value in ({}, [], "mse", {"name": "none", "settings": {}})),
        ("settings", {"delta": "one"}, "loss"),
        ("settings", None, "loss"),
        ("gradients", {}, "loss"),
        ("gradients", {"wrt": [], "weight": 1.0, "target": None}, "loss"),
        *(("calibration", value) for value in ({}, [], "", 7, deep(500))),
        *(("ridge", value, "calibration") for value in (torch.nan, torch.inf, -1.0, "1", None)),
        ("rows", -1, "calibration"),
        ("ladder", {"paper": "good"}, "calibration"),
        ("remarks", [7], "calibration"),
        ("value", "good", "calibration"),
        ("stale", 1, "calibration"),
        ("law", [], "calibration"),
        ("noise", [], "calibration"),
        ("layer", 7, "readout"),
        ("layer", [7], "readout"),
        ("case", "unheard of", "readout"),
        ("case", None, "readout"),
        ("fingerprint", None, "readout"),
        ("output", [], "readout"),
        ("layer", [], "readout"),
        *(("batch", value) for value in ("zebra", [1])),
        *(("inputs", value, "probes") for value in (5, {"list": [1]}, {"list": [1, 2]})),
        *(("dtype", value, "probes") for value in ("save", 5)),
        *(("digits", value, "probes") for value in (torch.nan, torch.inf, 0.0, None)),
    ]
]
"""Contents that no fit leaves, under a checksum that fits them."""


@pytest.mark.parametrize("way", ["file", "state dict"])
def test_contents_that_no_fit_leaves_are_one_error_with_the_files_name(net, uq, path, way):
    whole, before = uq.state_dict(), uq(net.test[0])[1]

    def taken_up(spoilt):
        if way == "file":
            spoilt.write(path)
            return load(path, net.model)
        return uq.load_state_dict(whole | {"_extra_state": spoilt.state()})

    for spoil in WRONG:
        snapshot = storage.Snapshot.from_state(uq._snapshot().state())
        tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        spoil(tensors, snapshot.header)
        where = r"uq\.safetensors" if way == "file" else "state dict's fit"
        refused(where, taken_up, storage.Snapshot(tensors, snapshot.header))
    assert torch.equal(uq(net.test[0])[1], before)


@pytest.mark.parametrize("case", ["plain", "parameters"])
def test_a_readout_that_is_no_such_layer_of_the_model_is_refused(net, uq, case):
    snapshot = storage.Snapshot.from_state(uq.get_extra_state())
    snapshot.header["readout"] |= {"layer": ["1"], "case": case}
    other = rg.LastLayerRigidity(net.model)
    other.set_extra_state(snapshot.state())
    refused("named '1', which this Sequential does not have", other, net.test[0])


@pytest.mark.parametrize(
    "state", [7, [1], {"tensors": {}}, {"tensors": [], "header": "{}"}, {"header": "{"}], ids=str
)
def test_a_state_that_is_none_is_refused(uq, state):
    given = uq.state_dict() | {"_extra_state": state}
    refused("state dict's fit is damaged", uq.load_state_dict, given)


@pytest.mark.parametrize(("spoil", "match"), SPOILT.values(), ids=SPOILT)
def test_a_file_that_says_or_holds_something_else_is_refused(net, written, spoil, match):
    tensors, header = storage.read(written)
    spoil(tensors, header)
    storage.Snapshot(tensors, header).write(written)
    refused(match, load, written, net.model)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(net, written, keep):
    written.write_bytes(written.read_bytes()[:keep])
    refused("truncated, damaged or not a safetensors file", load, written, net.model)


def test_a_pickle_is_refused_and_not_run(net, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (tmp_path / "bomb").write_bytes(pickle.dumps(Bomb()))
    refused("not a safetensors file", load, tmp_path / "bomb", net.model)
    assert not (tmp_path / "exploded").exists()


def test_a_missing_a_foreign_and_a_damaged_file_are_named(net, path):
    refused(r"no file .*uq\.safetensors", load, path, net.model, error=FileNotFoundError)
    save_file({"x": torch.ones(2)}, path)
    refused("not one of rigidities", load, path, net.model)
    save_file({"x": torch.ones(2)}, path, metadata={"rigidities": "{not json"})
    refused(r"header of .* is damaged", load, path, net.model)


def test_other_weights_and_another_model_are_refused(written):
    other = trained(seed=5, steps=1).model
    refused("weights differ from those the file was fitted with", load, written, other)
    refused("readout named '4', which this Linear does not have", load, written, nn.Linear(4, 1))


# --- atomic writing -----------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(net, saved, monkeypatch):
    uq, path = saved
    before = path.read_bytes()

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    refused("disk full", uq.save, path, error=OSError)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_file_has_the_usual_permissions(written):
    other = written.with_name("plain")
    other.touch()
    assert written.stat().st_mode == other.stat().st_mode


# --- state dicts --------------------------------------------------------------------------------


def test_a_state_dict_loads_into_an_unfitted_module(net, tmp_path, uq):
    torch.save(uq.state_dict(), tmp_path / "state.pt")
    fresh = rg.LastLayerRigidity(trained(seed=5, steps=1).model)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(fresh(net.test[0])[1], uq(net.test[0])[1])


def test_a_state_dict_can_be_taken_while_the_model_trains_on(net, uq):
    with torch.no_grad():
        net.model[0].weight.add_(0.1)
    fresh = rg.LastLayerRigidity(trained(seed=5, steps=1).model)
    fresh.load_state_dict(uq.state_dict())
    refused("weights differ", fresh, net.test[0])
    refused("weights have changed", uq.save, "never.safetensors")


def test_an_unfitted_state_dict_loads_too(net, uq):
    uq.load_state_dict(rg.LastLayerRigidity(net.model).state_dict())
    refused("no fit yet", uq, net.test[0])


# --- files written before -----------------------------------------------------------------------

FILES = Path(__file__).parents[1] / "support" / "files"


@pytest.fixture
def plane():
    """The model that they were written for."""
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
        model.bias.fill_(0.5)
    return model


def old(kind, name, model):
    """A file of a format that had no checksum is loaded with a word."""
    with pytest.warns(UserWarning, match=f"{name}.* carries no checksum. Load it and save it"):
        return kind.load(FILES / f"{name}.safetensors", model)


def test_files_of_the_second_format_still_load_and_are_saved_anew(plane, path):
    x = torch.ones(1, 2, dtype=torch.float64)
    uq = old(rg.LastLayerRigidity, "format-2-fit", plane)
    assert uq.noise.name == "bayes"
    uq.save(path)
    for one in (uq, load(path, plane)):
        assert [round(float(part), 4) for part in one(x)] == [3.5, 0.105]
    pr = old(rg.PredictionRigidity, "format-2-regressor", plane)
    assert round(float(pr.predict(x).std), 4) == 0.042


def test_files_of_the_first_format_still_load(plane):
    """Both were written by the first format's code, and gave these numbers there."""
    x = torch.ones(1, 2, dtype=torch.float64)
    uq = old(rg.LastLayerRigidity, "format-1-fit", plane)
    assert uq.noise.name == "constant" and uq.law.name == "gaussian"
    assert str(uq.report).startswith("Calibrated on 20 rows by nll: -0.966397")
    assert [round(float(part), 4) for part in uq(x)] == [3.5, 0.0924]
    ens = old(rg.Ensemble, "format-1-ensemble", plane)
    assert [round(y, 4) for y in ens(x).flatten().tolist()] == [3.5441, 3.5285, 3.4948, 3.497]
