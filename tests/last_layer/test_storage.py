"""Files and state dicts: nothing lost, nothing run, everything wrong refused by name."""

import json
import os
import pickle
import re
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

import rigidities as rg
from tests.support import zoo
from tests.support.nets import Net, calibrated, trained
from tests.support.refusals import refused
from tests.support.tampering import contents, damage, damaged_state, resealed_state, rewrite
from tests.support.zoo_fits import fitted_to


def fitted(net, **options):
    uq = rg.LastLayerRigidity(net.model).fit(net.train, **options)
    uq.calibrate(net.valid, method=rg.Paper(noise="constant"))
    return uq


@pytest.fixture
def path(tmp_path):
    return tmp_path / "uq.safetensors"


@pytest.fixture
def uq(net):
    return fitted(net)


@pytest.fixture(scope="module")
def fixed():
    """One fit for all tests that leave it as it is, and its file's content."""
    uq = fitted(trained())
    with tempfile.TemporaryDirectory() as folder:
        uq.save(Path(folder) / "uq.safetensors")
        return uq, (Path(folder) / "uq.safetensors").read_bytes()


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
    assert str(again.calibration_report) == str(uq.calibration_report)
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
        one.calibrate([zoo.build(id, 2).data], method=rg.Paper(ridge=0.1))
    torch.testing.assert_close(again.predict([more.data]).std, whole.predict([more.data]).std)


def test_a_loaded_fit_can_be_extended_and_recalibrated(net, saved):
    uq, path = saved
    again = load(path, net.model).partial_fit(net.test)
    torch.testing.assert_close(again.gram.matrix, uq.partial_fit(net.test).gram.matrix)
    with pytest.warns(UserWarning, match="are also in the training data"):
        again.calibrate(net.test, method="paper")


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
    remedy = r"load\(path, model, loss=\.\.\., sample_weight="
    refused(remedy, again.partial_fit, net.test)
    refused(remedy, again.calibrate, net.valid)
    again = load(path, net.model, loss="mse", sample_weight=weight).partial_fit(net.test)
    torch.testing.assert_close(again.gram.matrix, uq.partial_fit(net.test).gram.matrix)
    again.save(path)
    again = load(path, net.model, loss="mse", sample_weight=weight)
    again.calibrate(net.valid, method="paper")


def test_a_loss_that_the_file_holds_is_not_replaced(net, saved):
    _, path = saved
    refused("loss of this fit is already known", load, path, net.model, loss="huber")


def test_a_file_loads_into_the_model_in_another_dtype(net, saved):
    uq, path = saved
    before = uq(net.test[0])[1]
    again = load(path, net.model.double())
    torch.testing.assert_close(again(net.test[0].double())[1], before.double(), rtol=1e-3, atol=0)


def test_the_header_is_readable_json_with_versions_and_fingerprint(written):
    raw = written.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["rigidities"])
    assert header["kind"] == "fit"
    assert header["format"] == 3
    assert header["library"] == rg.__version__
    assert header["tensors"]["gram.matrix"] == "float64 (25, 25)"
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


def replaced(name, value):
    """A change of contents: another tensor under a name."""
    return lambda tensors, header: tensors.update({name: value})


def said(name, value, *sections):
    """A change of contents: the header says something else, in a section of it or on top."""

    def change(tensors, header):
        for section in sections:
            header = header[section]
        header[name] = value

    return change


def without_part(name):
    """A change of contents: all tensors of a part are missing."""

    def change(tensors, header):
        for each in [each for each in tensors if each.startswith(f"{name}.")]:
            del tensors[each]

    return change


def swapped(one, other):
    """A change of contents: two tensors in each other's place."""
    return lambda tensors, header: tensors.update({one: tensors[other], other: tensors[one]})


def scaled(name, factor):
    """A change of contents: other numbers in a tensor."""
    return lambda tensors, header: tensors.update({name: tensors[name] * factor})


F64 = torch.float64
CHECKSUM = "do not match its checksum"
DAMAGE = {
    "a tensor is missing": (
        lambda tensors, header: tensors.pop("gram.count"),
        r"lacks the tensor 'gram\.count', int64 \(\)",
    ),
    "a part is missing": (without_part("sketch"), r"lacks the tensor 'sketch\.counts'"),
    "another tensor": (replaced("gram.mass", torch.ones(3)), "a tensor 'gram.mass', which"),
    "precision": (
        replaced("gram.matrix", torch.eye(25)),
        r"'gram.matrix' must be float64 \(25, 25\), got float32 \(25, 25\)",
    ),
    "a fraction": (replaced("gram.count", torch.tensor(3.0)), "'gram.count' must be int64"),
    "no square": (
        replaced("gram.matrix", torch.ones(25, 24, dtype=F64)),
        r"'gram.matrix' must be float64 \(25, 25\), got float64 \(25, 24\)",
    ),
    "Grams of other targets": (
        replaced("gram.matrix", torch.ones(2, 25, 25, dtype=F64)),
        r"got float64 \(2, 25, 25\)",
    ),
    "swapped": (swapped("gram.matrix", "gram.cross"), "'gram.cross' must be"),
    "swapped and of one shape": (swapped("calibration.scale", "calibration.noise"), CHECKSUM),
    "a number": (scaled("gram.matrix", 1 + 2**-40), CHECKSUM),
    "a scale": (scaled("calibration.scale", 1.5), CHECKSUM),
    "a calibration without its report": (lambda tensors, header: header.pop("report"), CHECKSUM),
    "more targets": (said("targets", 2), CHECKSUM),
    "another loss": (said("name", "Huber", "loss"), CHECKSUM),
    "another ridge": (said("ridge", 7.0, "calibration"), CHECKSUM),
}
"""Changes of contents after the checksum was made, and what is said of them."""


@pytest.mark.parametrize(("change", "match"), DAMAGE.values(), ids=DAMAGE)
def test_contents_other_than_those_that_were_saved_are_refused(net, fixed, path, change, match):
    uq, content = fixed
    path.write_bytes(content)
    damage(path, change)
    refused(rf"uq\.safetensors is damaged: .*{match}", load, path, net.model)
    check_state_is_refused(
        uq, net, damaged_state, change, f"state dict's fit is damaged: .*{match}"
    )


def check_state_is_refused(uq, net, spoil, change, match):
    """A state dict with changed contents is refused, and the fit stays as it was."""
    before = uq(net.test[0])[1]
    spoilt = spoil(uq.state_dict()["_extra_state"], change)
    refused(match, uq.load_state_dict, uq.state_dict() | {"_extra_state": spoilt})
    assert torch.equal(uq(net.test[0])[1], before)


FROM_ANOTHER_VERSION = {
    "a tensor is missing": (
        lambda tensors, header: tensors.pop("gram.count"),
        "lacks 'count', which this version needs.*pip install",
    ),
    "no Gram": (without_part("gram"), "lacks 'matrix'"),
    "no hashes": (without_part("sketch"), "lacks 'limit'"),
    "no targets": (lambda tensors, header: header.pop("targets"), "lacks 'targets'"),
    "no readout": (lambda tensors, header: header.pop("readout"), "lacks 'readout'"),
    "no loss": (lambda tensors, header: header.pop("loss"), "lacks 'loss'"),
    "another loss": (said("name", "Zero", "loss"), "loss 'Zero' of this file is not known here"),
    "another distribution": (
        said("distribution", {"name": "cauchy", "settings": {}}, "calibration"),
        "distribution 'cauchy' of this file is not known here.*register",
    ),
    "an entry from the future": (
        lambda tensors, header: header["report"].update(tilt=1.0) or header.update(library="9.0"),
        r"not as this version needs it: .*'tilt'.*pip install 'rigidities>=9\.0'",
    ),
    "a newer format": (
        lambda tensors, header: header.update(format=header["format"] + 1, library="9.0"),
        r"format \d.* only reads format.*written by rigidities 9\.0.*>=9\.0",
    ),
    "an earlier format": (
        lambda tensors, header: header.update(format=header["format"] - 1),
        "written by an earlier version of rigidities: .*Fit again",
    ),
    "of no kind": (lambda tensors, header: header.pop("kind"), "another kind.* says None"),
    "of another kind": (said("kind", "ensemble"), "another kind: expected 'fit'"),
}
"""Contents that fit their checksum but are not those of this version, and what is said of them."""


@pytest.mark.parametrize(
    ("change", "match"), FROM_ANOTHER_VERSION.values(), ids=FROM_ANOTHER_VERSION
)
def test_whole_files_of_other_versions_are_refused_by_what_differs(net, fixed, path, change, match):
    uq, content = fixed
    path.write_bytes(content)
    rewrite(path, change)
    refused(rf"uq\.safetensors.*{match}", load, path, net.model)
    check_state_is_refused(uq, net, resealed_state, change, f"state dict's fit.*{match}")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
@pytest.mark.parametrize(
    "name", ["gram.matrix", "gram.cross", "gram.square", "calibration.scale", "calibration.noise"]
)
def test_a_changed_number_in_a_state_dict_is_refused(fixed, name, value):
    uq, _ = fixed
    state = uq.state_dict()["_extra_state"]

    def change(tensors, header):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[-1] = value

    spoilt = damaged_state(state, change)
    refused(f"state dict's fit.*{CHECKSUM}", uq.set_extra_state, spoilt)
    uq.set_extra_state(state)


@pytest.mark.parametrize("case", ["plain", "parameters"])
def test_a_readout_that_is_no_such_layer_of_the_model_is_refused(net, uq, case):

    def change(tensors, header):
        header["readout"] |= {"layer": ["1"], "case": case}

    other = rg.LastLayerRigidity(net.model)
    other.set_extra_state(resealed_state(uq.get_extra_state(), change))
    refused("named '1', which this Sequential does not have", other, net.test[0])


@pytest.mark.parametrize(
    "state",
    [
        7,
        [1],
        {"tensors": {}},
        {"header": "{"},
        {"tensors": [], "header": "{}"},
        {"tensors": {"a": 1}, "header": "{}"},
        *({"tensors": {}, "header": text} for text in ("{", "[]", "{}", 7, "[" * 100_000)),
    ],
    ids=lambda state: str(state)[:40],
)
def test_a_state_that_is_none_is_refused(fixed, state):
    uq, _ = fixed
    given = uq.state_dict() | {"_extra_state": state}
    refused("state dict's fit is damaged", uq.load_state_dict, given)


def test_a_pickle_is_refused_and_not_run(net, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (tmp_path / "bomb").write_bytes(pickle.dumps(Bomb()))
    refused("not a safetensors file", load, tmp_path / "bomb", net.model)
    assert not (tmp_path / "exploded").exists()


def test_a_missing_file_is_named(net, path):
    refused(r"no file .*uq\.safetensors", load, path, net.model, error=FileNotFoundError)


FOREIGN = {
    "an empty file": (b"", "truncated, damaged or not a safetensors file"),
    "a text": (b"mean, std\n1.0, 0.1\n" * 20, "not a safetensors file"),
    "a pickle": (pickle.dumps({"gram.matrix": [1.0]}), "not a safetensors file"),
    "safetensors of others": (save({"x": torch.ones(2)}), "not one of rigidities"),
    "a header that is no JSON": (
        save({"x": torch.ones(2)}, metadata={"rigidities": "{not json"}),
        r"uq\.safetensors is damaged: its header",
    ),
    "an earlier version": (
        save({"x": torch.ones(2)}, metadata={"rigidities": '{"format": 1, "kind": "fit"}'}),
        "written by an earlier version of rigidities: .*Fit again",
    ),
    "no list": (
        save({"x": torch.ones(2)}, metadata={"rigidities": '{"format": 3, "kind": "fit"}'}),
        "its header lists no tensors",
    ),
    "no checksum": (
        save(
            {"x": torch.ones(2)},
            metadata={"rigidities": '{"format": 3, "tensors": {"x": "float32 (2,)"}}'},
        ),
        "do not match its checksum",
    ),
}


@pytest.mark.parametrize(("content", "match"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_refused_by_name(net, path, content, match):
    path.write_bytes(content)
    refused(f"(?s)(?=.*{re.escape(path.name)}).*{match}", load, path, net.model)


def test_an_ensemble_is_no_fit(net, saved):
    uq, path = saved
    uq.ensemble(2, generator=torch.Generator().manual_seed(0)).save(path)
    refused("another kind: expected 'fit', its header says 'ensemble'", load, path, net.model)


def test_other_weights_and_another_model_are_refused(written):
    other = trained(seed=5, steps=1).model
    refused("weights differ from those of the fit in the file", load, written, other)
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


READ = [id for id in zoo.IDS if zoo.OUTCOMES[id] != "refused"]


@pytest.mark.parametrize("id", READ)
def test_fits_of_any_readout_are_saved_and_loaded(id, path):
    case = zoo.build(id)
    uq = fitted_to(case, [case.data])
    uq.save(path)
    state = uq.state_dict()
    from_file = load(path, case.model, **case.options)
    from_state = rg.LastLayerRigidity(case.model, **case.options)
    from_state.load_state_dict(state)
    for again in (from_file, from_state):
        assert torch.equal(again.gram.matrix, uq.gram.matrix)
        tensors = again.state_dict()["_extra_state"]["tensors"]
        assert tensors.keys() == state["_extra_state"]["tensors"].keys()
        for name, tensor in state["_extra_state"]["tensors"].items():
            assert torch.equal(tensors[name].nan_to_num(7), tensor.nan_to_num(7)), name


# --- kept rows ----------------------------------------------------------------------------------


def test_rows_are_in_a_file_only_if_they_are_asked_for(net, uq, path):
    def names_of_rows():
        return [name for name in contents(path)[0] if name.startswith("rows")]

    uq.save(path)
    assert names_of_rows() == []
    assert not [name for name in uq.state_dict()["_extra_state"]["tensors"] if "rows" in name]
    refused("keeps no rows", load(path, net.model).save, path, rows=True)
    uq.save(path, rows=True)
    assert "rows.columns.features" in names_of_rows()
    again = load(path, net.model)
    again.save(path)
    assert names_of_rows() == []
    again.save(path, rows=True)
    assert "rows.columns.features" in names_of_rows()


def test_a_state_dict_on_the_meta_device_tells_shapes(net):
    uq = rg.LastLayerRigidity(net.model).fit(net.train).to("meta")
    matrix = uq.state_dict()["_extra_state"]["tensors"]["gram.matrix"]
    assert matrix.is_meta and matrix.shape == (25, 25)
