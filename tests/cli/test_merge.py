"""`rigidities merge`: files of fits to different rows become the file of one fit, or stay apart."""

import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rigidities as rg
from rigidities import cli
from rigidities.last_layer.doors import familiar_variance
from tests.support.nets import calibrated, trained

load = rg.LastLayerRigidity.load


@pytest.fixture(scope="module")
def net():
    model, *sets = trained(steps=20)
    return model.double(), *[tuple(t.double() for t in one) for one in sets]


def cubed(prediction, target):
    return (prediction - target).abs() ** 3


def fit(net, rows, **options):
    x, y = net[1]
    return rg.LastLayerRigidity(net[0]).fit((x[rows], y[rows]), **options)


@pytest.fixture
def folder(net, tmp_path):
    """Three shards, the first calibrated."""
    for name, rows in {"a": slice(50), "b": slice(50, 120), "c": slice(120, 300)}.items():
        uq = fit(net, rows)
        if name == "a":
            calibrated(uq, net[2])
        uq.save(tmp_path / name, rows=True)
    return tmp_path


def merge(folder, *arguments, out="out"):
    names = [one if one.startswith("--") else str(folder / one) for one in arguments]
    return cli.main(["merge", *names, "--out", str(folder / out)])


def test_the_merged_file_is_that_of_the_fit_to_all_rows(net, folder, capsys):
    assert merge(folder, "c", "a", "b") == 0
    said = capsys.readouterr().out
    assert f"{folder / 'c'}: 180 rows, 100.0% of them known by hash" in said
    assert f"Wrote {folder / 'out'}: 300 rows" in said
    found, whole = load(folder / "out", net[0]), fit(net, slice(300))
    assert found.gram.count == 300
    for name in ("matrix", "cross", "square"):
        mine, expected = getattr(found.gram, name), getattr(whole.gram, name)
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12 * float(expected.max()))
    found.save(folder / "again", rows=True)
    whole.save(folder / "whole", rows=True)
    one, other = (rg.data.storage.read(folder / name)[0] for name in ("again", "whole"))
    assert one.keys() >= other.keys() - {name for name in other if name.startswith("probes")}
    for name in other:
        if name.startswith(("sketch", "rows.hashed")):
            assert torch.equal(one[name], other[name])
    assert found.calibration_report is None
    assert sorted(os.listdir(folder)) == ["a", "again", "b", "c", "out", "whole"]


def test_a_calibration_of_the_first_file_is_kept_as_stale(net, folder):
    assert merge(folder, "a", "b") == 0
    found = load(folder / "out", net[0])
    assert found.calibration_report.stale
    assert found.ridge == load(folder / "a", net[0]).ridge
    calibrated(found, net[2])
    whole = calibrated(fit(net, slice(120)), net[2])
    assert found.ridge == pytest.approx(whole.ridge, rel=1e-9)
    torch.testing.assert_close(found.scale, whole.scale, rtol=1e-9, atol=0)


def test_files_without_rows_merge_with_a_notice(net, folder):
    fit(net, slice(50, 120)).save(folder / "b")
    with pytest.warns(UserWarning, match=r"save\(path, rows=True\)"):
        assert merge(folder, "a", "b") == 0
    assert familiar_variance(load(folder / "out", net[0])) is None


def early(net, folder):
    content = (folder / "b").read_bytes()
    (folder / "b").write_bytes(content[:-100])


def foreign(net, folder):
    save_file({"x": torch.ones(2)}, folder / "b")


def of_another_class(net, folder):
    line, x = nn.Linear(4, 1), net[1][0].float()
    rg.PredictionRigidity(line, ridge=0.1).fit(x, line(x).detach()).save(folder / "b")


def of_a_function(net, folder):
    fit(net, slice(50, 120), loss=cubed).save(folder / "b")


def of_other_weights(net, folder):
    model = trained(steps=21).model.double()
    fit((model, *net[1:]), slice(50, 120)).save(folder / "b")


def of_shared_rows(net, folder):
    fit(net, slice(40, 120)).save(folder / "b")


def missing(net, folder):
    (folder / "b").unlink()


BAD = {
    "ends early": (early, "truncated, damaged or not a safetensors file"),
    "foreign": (foreign, "not one of rigidities"),
    "of another class": (of_another_class, "of another kind"),
    "of a function": (of_a_function, "were functions, which a file cannot contain"),
    "of other weights": (of_other_weights, "differ in their weights"),
    "of shared rows": (of_shared_rows, "share rows: 10 of the 80 rows"),
    "missing": (missing, "There is no file"),
}


@pytest.mark.parametrize(("spoil", "words"), BAD.values(), ids=BAD)
def test_a_file_that_cannot_be_merged_is_named_and_nothing_written(
    net, folder, capsys, spoil, words
):
    spoil(net, folder)
    assert merge(folder, "a", "b") == 2
    said = capsys.readouterr().err
    assert said.startswith("rigidities: ")
    assert words in said
    assert str(folder / "b") in said
    assert not (folder / "out").exists()


def test_shared_rows_are_merged_where_that_is_meant(net, folder):
    of_shared_rows(net, folder)
    with pytest.warns(UserWarning, match="keeps none"):
        assert merge(folder, "a", "b", "--allow-overlap") == 0
    assert load(folder / "out", net[0]).gram.count == 130


@pytest.mark.parametrize("files", [("a",), ("a", "a"), ("a", "b", "out")])
def test_each_file_comes_once_and_the_result_goes_elsewhere(folder, capsys, files):
    (folder / "out").write_bytes((folder / "c").read_bytes())
    before = (folder / "out").read_bytes()
    assert merge(folder, *files, "--force") == 2
    assert (
        "Expected two or more different files, and an --out other than these"
        in capsys.readouterr().err
    )
    assert (folder / "out").read_bytes() == before


def test_a_file_is_replaced_by_force_alone(net, folder, capsys):
    (folder / "out").write_text("precious")
    assert merge(folder, "a", "b") == 2
    assert "exists. Choose another --out, or pass --force" in capsys.readouterr().err
    assert (folder / "out").read_text() == "precious"
    assert merge(folder, "a", "b", "--force") == 0
    assert load(folder / "out", net[0]).gram.count == 120


def test_a_place_without_a_folder_is_named(folder, capsys):
    assert merge(folder, "a", "b", out="nowhere/out") == 2
    assert "There is no folder" in capsys.readouterr().err


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["merge", "--help"])
    assert "rigidities merge mon.safetensors tue.safetensors --out" in capsys.readouterr().out
