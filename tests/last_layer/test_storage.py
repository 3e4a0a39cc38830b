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
from tests.support.nets import trained
from tests.support.refusals import refused


def fitted(net, **options):
    uq = rg.LastLayerRigidity(net.model).fit(net.train, **options)
    uq.calibrate(net.valid, noise="constant")
    return uq


@pytest.fixture
def saved(net, tmp_path):
    uq = fitted(net)
    path = tmp_path / "uq.safetensors"
    uq.save(path)
    return uq, path


def rewritten(path, change):
    """The file with its header changed."""
    tensors, header = storage.read(path)
    change(header)
    save_file(tensors, path, metadata={"rigidities": json.dumps(header)})


def test_a_loaded_fit_predicts_the_same(net, saved):
    uq, path = saved
    again = rg.LastLayerRigidity.load(path, net.model)
    x = net.test[0]
    assert torch.equal(again(x)[1], uq(x)[1])
    assert torch.equal(again.predict(x).noise, uq.predict(x).noise)
    assert str(again.report) == str(uq.report)
    assert again.gram.count == 300


def test_a_loaded_fit_can_be_extended_and_recalibrated(net, saved):
    uq, path = saved
    again = rg.LastLayerRigidity.load(path, net.model).partial_fit(net.test)
    torch.testing.assert_close(again.gram.matrix, uq.partial_fit(net.test).gram.matrix)
    with pytest.warns(UserWarning, match="stand in the training data"):
        again.calibrate(net.test)


@pytest.mark.parametrize("loss", ["huber", "poisson"])
def test_named_losses_survive_a_file(net, tmp_path, loss):
    uq = fitted(net, loss=loss)
    uq.save(tmp_path / "uq.safetensors")
    again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model)
    torch.testing.assert_close(
        again.partial_fit(net.test).gram.matrix, uq.partial_fit(net.test).gram.matrix
    )


def test_functions_do_not_survive_a_file_and_are_asked_for(net, tmp_path):
    weight = lambda batch: torch.full((len(batch[0]),), 2.0)  # noqa: E731
    uq = fitted(net, sample_weight=weight)
    uq.save(tmp_path / "uq.safetensors")
    again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model)
    again(net.test[0])
    refused("set_loss", again.partial_fit, net.test)
    refused("set_loss", again.calibrate, net.valid)
    again.set_loss("mse", weight).partial_fit(net.test)
    torch.testing.assert_close(again.gram.matrix, uq.partial_fit(net.test).gram.matrix)
    refused("loss of this fit is known", again.set_loss, "huber")


def test_a_fit_by_features_asks_for_the_function_again(net, tmp_path):
    features = lambda m, x: m[:-1](x)  # noqa: E731
    uq = rg.LastLayerRigidity(net.model, features=features).fit(net.train)
    uq.calibrate(net.valid)
    uq.save(tmp_path / "uq.safetensors")
    with pytest.raises(ValueError, match="fitted with features="):
        rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model)
    again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model, features=features)
    assert torch.equal(again(net.test[0])[1], uq(net.test[0])[1])


def test_a_file_loads_into_the_model_in_another_dtype(net, saved):
    uq, path = saved
    before = uq(net.test[0])[1]
    again = rg.LastLayerRigidity.load(path, net.model.double())
    torch.testing.assert_close(again(net.test[0].double())[1], before.double(), rtol=1e-3, atol=0)


def test_the_header_is_readable_json_with_versions_and_fingerprint(saved):
    _, path = saved
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["rigidities"])
    assert header["format"] == storage.FORMAT
    assert header["library"] == rg.__version__
    assert header["readout"]["layer"] == ["4"]
    assert len(header["readout"]["fingerprint"]) == 16


# --- refusals -----------------------------------------------------------------------------------


def test_functions_of_the_fit_must_be_given_again(net, tmp_path):
    forward = lambda m, batch: m(batch[0])[:, :1]  # noqa: E731
    uq = rg.LastLayerRigidity(net.model, forward=forward).fit([net.train])
    uq.calibrate([net.valid])
    uq.save(tmp_path / "uq.safetensors")
    with pytest.raises(ValueError, match=r"fitted with forward=. Pass the same"):
        rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model)
    again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model, forward=forward)
    assert torch.equal(again.predict([net.test]).std, uq.predict([net.test]).std)


def test_the_picked_output_survives_a_file(tmp_path):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 1)

        def forward(self, x):
            return self.head(x), x

    model, x, y = Pair(), torch.randn(40, 3), torch.randn(40, 1)
    uq = rg.LastLayerRigidity(model, output=0).fit((x[:20], y[:20]))
    uq.calibrate((x[20:], y[20:]))
    uq.save(tmp_path / "uq.safetensors")
    again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", model)
    assert torch.equal(again(x)[1], uq(x)[1])


def test_a_file_that_lacks_parts_is_refused(net, saved):
    _, path = saved
    tensors, header = storage.read(path)
    del tensors["gram.matrix"]
    save_file(tensors, path, metadata={"rigidities": json.dumps(header)})
    refused("incomplete: 'matrix' is missing", rg.LastLayerRigidity.load, path, net.model)


def test_a_missing_file_is_named(net, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere"):
        rg.LastLayerRigidity.load(tmp_path / "nowhere", net.model)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(net, saved, keep):
    _, path = saved
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated, damaged or not a safetensors file"):
        rg.LastLayerRigidity.load(path, net.model)


def test_a_pickle_is_refused_and_not_run(net, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (tmp_path / "bomb").write_bytes(pickle.dumps(Bomb()))
    refused("not a safetensors file", rg.LastLayerRigidity.load, tmp_path / "bomb", net.model)
    assert not (tmp_path / "exploded").exists()


def test_a_foreign_safetensors_file_is_refused(net, tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="not one of rigidities"):
        rg.LastLayerRigidity.load(tmp_path / "other.safetensors", net.model)


def test_a_newer_file_is_refused_with_the_upgrade(net, saved):
    _, path = saved
    rewritten(path, lambda h: h.update(format=storage.FORMAT + 1, library="9.0"))
    with pytest.raises(ValueError, match=r"format 3.*written by rigidities 9.0.*>=9.0"):
        rg.LastLayerRigidity.load(path, net.model)


def test_a_damaged_header_is_refused(net, saved):
    _, path = saved
    save_file({"x": torch.ones(2)}, path, metadata={"rigidities": "{not json"})
    refused(r"header of .* is damaged", rg.LastLayerRigidity.load, path, net.model)


def test_other_weights_are_refused(saved):
    _, path = saved
    with pytest.raises(ValueError, match="weights differ from those the file was fitted with"):
        rg.LastLayerRigidity.load(path, trained(seed=5, steps=1).model)


def test_another_model_is_refused(saved):
    _, path = saved
    with pytest.raises(ValueError, match="readout named '4', which this Linear does not have"):
        rg.LastLayerRigidity.load(path, nn.Linear(4, 1))


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


def test_a_file_has_the_usual_permissions(saved):
    _, path = saved
    other = path.with_name("plain")
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


# --- state dicts --------------------------------------------------------------------------------


def test_a_state_dict_loads_into_an_unfitted_module(net, tmp_path):
    uq = fitted(net)
    torch.save(uq.state_dict(), tmp_path / "state.pt")
    fresh = rg.LastLayerRigidity(trained(seed=5, steps=1).model)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(fresh(net.test[0])[1], uq(net.test[0])[1])


def test_a_state_dict_can_be_taken_while_the_model_trains_on(net):
    uq = fitted(net)
    with torch.no_grad():
        net.model[0].weight.add_(0.1)
    fresh = rg.LastLayerRigidity(trained(seed=5, steps=1).model)
    fresh.load_state_dict(uq.state_dict())
    refused("weights differ", fresh, net.test[0])
    refused("weights have changed", uq.save, "never.safetensors")


def test_an_unfitted_state_dict_loads_too(net):
    uq = fitted(net)
    uq.load_state_dict(rg.LastLayerRigidity(net.model).state_dict())
    refused("no fit yet", uq, net.test[0])


# --- files written before -----------------------------------------------------------------------

FILES = Path(__file__).parents[1] / "support" / "files"


def test_files_of_the_first_format_still_load():
    """Both were written by the first format's code, and gave these numbers there."""
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
        model.bias.fill_(0.5)
    x = torch.ones(1, 2, dtype=torch.float64)
    uq = rg.LastLayerRigidity.load(FILES / "format-1-fit.safetensors", model)
    assert uq.noise.name == "constant" and uq.law.name == "gaussian"
    assert str(uq.report).startswith("Calibrated on 20 rows by nll: -0.966397")
    assert [round(float(part), 4) for part in uq(x)] == [3.5, 0.0924]
    ens = rg.Ensemble.load(FILES / "format-1-ensemble.safetensors", model)
    assert [round(y, 4) for y in ens(x).flatten().tolist()] == [3.5441, 3.5285, 3.4948, 3.497]


def test_a_calibration_with_keys_from_the_future_is_refused_with_the_version(net, saved):
    _, path = saved
    rewritten(path, lambda h: (h["calibration"].update(tilt=1.0), h.update(library="9.0")))
    with pytest.raises(ValueError, match=r"tilt.*does not know.*pip install 'rigidities>=9\.0'"):
        rg.LastLayerRigidity.load(path, net.model)
