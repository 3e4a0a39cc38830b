"""`rigidities tabular`: a table becomes a model with honest error bars, and one file applies it."""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import r2_score

from rigidities import cli
from rigidities.calibration.methods import Full
from rigidities.cli import learners, tabular
from rigidities.cli.tabular import Splitting, TableModel
from rigidities.last_layer.rigidity import LastLayerRigidity
from rigidities.report.formatting import number
from tests.support.pages import Page
from tests.support.tampering import damage, rewrite

# One worker, so that what the tests share runs once.
pytestmark = pytest.mark.xdist_group("tabular")
FILES = ["model.safetensors", "predictions.csv", "report.html", "summary.json"]


def table(rows=260, seed=0):
    """Numbers, categories, dates, gaps, an identifier, and a target with gaps."""
    rng = np.random.default_rng(seed)
    size, place = rng.uniform(-2, 2, rows), rng.choice(["inland", "coast", "isle"], rows)
    days = pd.date_range("2022-01-01", periods=rows, freq="D")
    y = np.sin(2 * size) + (place == "coast") + rng.normal(size=rows) * (0.1 + 0.2 * (size > 0))
    frame = pd.DataFrame({"code": [f"r{k}" for k in range(rows)], "size": size, "place": place})
    frame["day"], frame["price"] = days.strftime("%d.%m.%Y"), 100 + 10 * y
    frame.loc[::11, "size"], frame.loc[::13, "price"] = np.nan, np.nan
    return frame.sample(frac=1, random_state=0).reset_index(drop=True)


def run(*arguments):
    return cli.main(["tabular", *map(str, arguments)])


class Ran:
    """One folder of results, by a model of each kind."""

    def __init__(self, folder, kind):
        self.data, self.out = folder / "data.csv", folder / "out"
        table().to_csv(self.data, index=False, na_rep="NA")
        options = ["--target", "price", "--out", self.out, "--id", "code", "--model", kind]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.code = run(self.data, *options)
        self.printed = printed.getvalue()
        self.summary = json.loads((self.out / "summary.json").read_text())
        self.predictions = pd.read_csv(self.out / "predictions.csv")
        self.model = self.out / "model.safetensors"


@pytest.fixture(scope="module", params=["tree", "net"])
def ran(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learners, "EPOCHS", 30)
        patch.setattr(learners, "TREES", 40)
        patch.setattr(learners, "CANDIDATES", learners.CANDIDATES[1:3])
        return Ran(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.thorough
def test_a_folder_holds_predictions_model_report_and_summary(ran):
    assert ran.code == 0
    assert sorted(os.listdir(ran.out)) == FILES
    assert sorted(os.listdir(ran.out.parent)) == ["data.csv", "out"]
    page = (ran.out / "report.html").read_text(encoding="utf-8")
    assert "price of data.csv: can the error bars be trusted?" in page
    share = 100 * ran.summary["scores"]["rigidities"]["coverage"]
    assert f"90 % intervals cover {share:.1f} % of the " in page  # under the same distribution
    assert ran.summary["notes"][0].startswith("place: 3 categories")


def test_every_row_is_predicted_and_no_part_shares_one(ran):
    own, frame = ran.predictions, table()
    assert own["row"].tolist() == list(range(1, len(frame) + 1))
    assert own["code"].tolist() == frame["code"].tolist()
    assert (own["split"] == "unlabelled").tolist() == frame["price"].isna().tolist()
    np.testing.assert_allclose(own["target"], frame["price"], rtol=1e-9)
    assert own["split"].value_counts().to_dict() == ran.summary["rows"]
    assert ((own["low"] < own["mean"]) & (own["mean"] < own["high"]) & (own["std"] > 0)).all()


def test_scores_are_those_of_the_test_rows_in_the_file(ran):
    own = ran.predictions[ran.predictions["split"] == "test"]
    held = ran.predictions[ran.predictions["split"] == "calibration"]
    scores, error = ran.summary["scores"], own["target"] - own["mean"]
    inside = (own["low"] <= own["target"]) & (own["target"] <= own["high"])
    outside = (own["low"] - own["target"]).clip(0) + (own["target"] - own["high"]).clip(0)
    width = own["high"] - own["low"]
    expected = {"rmse": (error**2).mean() ** 0.5, "coverage": inside.mean(), "width": width.mean()}
    expected["mae"] = error.abs().mean()
    expected["r2"] = r2_score(own["target"], own["mean"])
    expected["interval_score"] = (width + 20 * outside).mean()
    found = {key: scores["rigidities"][key] for key in expected}
    assert found == pytest.approx(expected, rel=1e-6)
    spread = ((held["target"] - held["mean"]) ** 2).mean() ** 0.5
    nll = 0.5 * np.log(2 * np.pi * spread**2) + (error**2).mean() / (2 * spread**2)
    assert scores["constant"]["nll"] == pytest.approx(nll, rel=1e-6)
    assert scores["constant"]["width"] == pytest.approx(2 * 1.6448536 * spread, rel=1e-6)
    assert set(scores["quantile"]) == {"coverage", "width", "interval_score"}


def cell(page, label, column):
    """A number in the page's table of metrics."""
    text = page.row(label)[column]
    return float(text.rstrip(" %").replace(",", "")) / (100 if "%" in text else 1)


def test_console_summary_page_and_verdict_say_the_same(ran):
    page = Page((ran.out / "report.html").read_text(encoding="utf-8"))
    labels = {"crps": "CRPS", "nll": "NLLNeg", "rmse": "RMSE", "interval_score": "Interval score"}
    labels |= {"coverage": "Coverage of 90 %", "width": "Width of 90 %", "r2": "R²", "mae": "MAE"}
    for column, name in ((1, "rigidities"), (2, "constant")):
        for key, label in labels.items():
            told = ran.summary["scores"][name][key]
            assert cell(page, label, column) == pytest.approx(told, rel=5e-3, abs=6e-4)
            shown = f"{told:.3f}" if key in ("r2", "coverage") else number(told, 4)
            assert shown in ran.printed
    verdict = ran.summary["verdict"]
    for said in (verdict["headline"], *(one["text"] for one in verdict["findings"])):
        assert said in ran.printed
        assert said in page.text
    for said in verdict["cautions"]:
        assert said in ran.printed
        assert said in page.text
    assert "the RMS error of the calibration rows" in verdict["findings"][2]["text"]
    assert not re.search(r"calibrate\(|refit\(|p\.centre|early_stopped", page.text + ran.printed)


def test_the_file_alone_predicts_as_the_run_did(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "CHUNK", 23)
    frame = table()[["place", "price", "size", "day", "code"]].assign(more=1)
    frame["day"] = pd.to_datetime(frame["day"], format="%d.%m.%Y")
    frame.to_csv(tmp_path / "new.tsv", sep="\t", index=False, encoding="utf-16")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    assert run("--apply", ran.model, tmp_path / "new.tsv", "--out", tmp_path / "p.csv") == 0
    found = pd.read_csv(tmp_path / "p.csv")
    bars = ["row", "code", "mean", "std", "low", "high", "centre"]
    assert list(found) == [*bars, "split", "target"]
    found = found[[*bars, "target"]]
    pd.testing.assert_frame_equal(found, ran.predictions[list(found)], rtol=1e-8)


def test_the_command_line_tells_what_it_did_not_use_or_know(ran, tmp_path, capsys):
    frame = table(40).assign(more=1, size="0.5").drop(columns="price")
    frame.loc[:2, "place"], frame.loc[4, "size"] = "moon", "much"
    frame.to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "p.csv"
    assert run("--apply", ran.model, tmp_path / "new.csv", "--out", out, "--json") == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found == {"out": str(out), "rows": 40, "unread": {"place": 3, "size": 1}}
    assert "Columns that the model does not use: more" in said.err
    assert "place: 3 cells with a category that was not in the training table" in said.err
    assert "size: 1 cells without a number, treated as missing" in said.err


def test_a_new_file_with_true_values_is_scored_and_judged(ran, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tabular, "CHUNK", 23)
    frame = table(90).assign(price=lambda f: f["price"].where(f.index % 3 > 0))
    frame.to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "p.csv"
    assert run("--apply", ran.model, tmp_path / "new.csv", "--out", out, "--json") == 0
    said = capsys.readouterr()
    scores = json.loads(said.out)["scores"]
    known = pd.read_csv(out).dropna(subset="target")
    assert scores["rows"] == len(known) == frame["price"].notna().sum()
    error, inside = known["target"] - known["mean"], known["target"].between(known.low, known.high)
    assert scores["rmse"] == pytest.approx((error**2).mean() ** 0.5, rel=1e-6)
    assert scores["coverage"] == pytest.approx(inside.mean(), abs=1e-9)
    assert f"cover {100 * inside.mean():.1f} % of them" in said.err
    assert cli.main(["report", str(out), "--out", str(tmp_path / "p.html")]) == 0
    assert f"{len(known)} rows" in Page((tmp_path / "p.html").read_text(encoding="utf-8")).text
    capsys.readouterr()

    frame.assign(price="unknown").to_csv(tmp_path / "new.csv", index=False)
    assert run("--apply", ran.model, tmp_path / "new.csv", "--out", out, "--json") == 0
    said = capsys.readouterr()
    assert "scores" not in json.loads(said.out)
    assert "No row has a number in price, so nothing is scored" in said.err


@pytest.mark.thorough
def test_a_model_keeps_the_decimal_mark_of_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learners, "TREES", 10)
    monkeypatch.setattr(learners, "CANDIDATES", learners.CANDIDATES[1:2])
    rng = np.random.default_rng(0)
    size = rng.uniform(1000, 9000, 120)
    lines = [f"{s:.2f};{s / 100 + rng.normal():.3f}".replace(".", ",") for s in size]
    (tmp_path / "data.csv").write_text("size;price\n" + "\n".join(lines) + "\n")
    out = tmp_path / "out"
    assert run(tmp_path / "data.csv", "--target", "price", "--out", out) == 0
    assert TableModel.load(out / "model.safetensors").decimal == ","
    means = []
    for place, cells in enumerate((["7.500", "2.250"], ["7500,0", "2250,0"])):
        new = tmp_path / f"{place}.csv"
        new.write_text("size;n\n" + "".join(f"{cell};1\n" for cell in cells))
        assert run("--apply", out / "model.safetensors", new, "--out", tmp_path / "p.csv") == 0
        means.append(pd.read_csv(tmp_path / "p.csv")["mean"].tolist())
    assert means[0] == means[1]
    assert "commas are assumed, as in the training table" in capsys.readouterr().out


def test_another_level_is_another_quantile_of_the_same_distribution(ran, tmp_path):
    table(40).to_csv(tmp_path / "new.csv", index=False)
    ends = {}
    for level in (0.5, 0.99):
        run(
            "--apply",
            ran.model,
            tmp_path / "new.csv",
            "--out",
            tmp_path / "p.csv",
            "--level",
            level,
        )
        ends[level] = pd.read_csv(tmp_path / "p.csv")
    model = TableModel.load(ran.model)
    frame = pd.read_csv(tmp_path / "new.csv", dtype=str)
    x, _ = tabular.matrix(model.columns, frame.astype(object).where(frame.notna(), None), ".")
    p = model.uq.predict(x)
    for level, own in ends.items():
        assert own["high"].tolist() == pytest.approx(p.quantile(0.5 + level / 2)[:, 0].tolist())


WRONG = {
    "a column is missing": (lambda f: f.drop(columns=["size", "place"]), "'size', 'place'"),
    "another kind": (lambda f: f.assign(size="large"), "Expected numbers in the column 'size'"),
    "no dates": (lambda f: f.assign(day="someday"), "Expected dates in the column 'day'"),
    "no rows": (lambda f: f[:0], "has no rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_does_not_fit_the_model_is_named_and_nothing_written(
    ran, tmp_path, capsys, name
):
    change, words = WRONG[name]
    change(table(40)).to_csv(tmp_path / "new.csv", index=False)
    (tmp_path / "p.csv").write_text("precious")
    assert run("--apply", ran.model, tmp_path / "new.csv", "--out", tmp_path / "p.csv") == 2
    said = capsys.readouterr().err
    assert said.startswith("rigidities: ") and said.count("\n") == 1 and words in said
    assert (tmp_path / "p.csv").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["new.csv", "p.csv"]


def test_a_late_error_leaves_no_output(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "CHUNK", 10)
    table(40).to_csv(tmp_path / "new.csv", index=False)
    with (tmp_path / "new.csv").open("a") as file:
        file.write("1,2,3,4,5,6,7\n")
    assert run("--apply", ran.model, tmp_path / "new.csv", "--out", tmp_path / "p.csv") == 2
    assert os.listdir(tmp_path) == ["new.csv"]


@pytest.mark.parametrize("spoil", [lambda b: b[:-50], lambda b: b"\0" * 99, lambda b: b""])
def test_a_damaged_model_is_refused(ran, tmp_path, capsys, spoil):
    (tmp_path / "model.safetensors").write_bytes(spoil(ran.model.read_bytes()))
    assert (
        run("--apply", tmp_path / "model.safetensors", ran.data, "--out", tmp_path / "p.csv") == 2
    )
    assert "damaged" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_model_of_a_newer_version_is_refused_as_such(ran, tmp_path, capsys, monkeypatch):
    model = TableModel.load(ran.model)
    monkeypatch.setattr("rigidities.data.storage.FORMAT", 99)
    model.save(tmp_path / "model.safetensors")
    monkeypatch.undo()
    assert run("--apply", tmp_path / "model.safetensors", ran.data, "--out", tmp_path / "p") == 2
    assert "format 99, but this version only reads" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["model.safetensors"]


def without_columns(tensors, header):
    del header["tabular"]["columns"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(damage, "model.safetensors is damaged"), (rewrite, "model.safetensors lacks 'columns'")],
)
def test_a_header_that_lacks_an_entry_is_refused(ran, tmp_path, capsys, spoil, words):
    shutil.copy(ran.model, tmp_path / "model.safetensors")
    spoil(tmp_path / "model.safetensors", without_columns)
    out = tmp_path / "p.csv"
    assert run("--apply", tmp_path / "model.safetensors", ran.data, "--out", out) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_a_file_of_another_kind_is_no_model(ran, tmp_path, capsys):
    TableModel.load(ran.model).uq.save(tmp_path / "fit.safetensors")
    assert run("--apply", tmp_path / "fit.safetensors", ran.data, "--out", tmp_path / "p.csv") == 2
    assert "of another kind" in capsys.readouterr().err


def test_rows_with_equal_inputs_fall_into_one_part():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(8, (400, 2), generator=generator).double()
    x[::9, 0] = torch.nan
    y = torch.randn(400, generator=generator, dtype=torch.float64)
    y[::7] = torch.nan
    group, is_known = tabular._groups(x, None, None, Splitting())
    part = tabular._parts(group, y, is_known, Splitting(seed=0))
    groups = {}
    for row, own in zip(x.tolist(), part, strict=True):
        if own != "unlabelled":
            groups.setdefault(str(row), set()).add(own)
    assert all(len(own) == 1 for own in groups.values())
    for name in ("calibration", "test"):
        assert (part == name).sum() == pytest.approx(51, abs=8)
    assert ((part == "unlabelled") == y.isnan().numpy()).all()
    assert (part != tabular._parts(group, y, is_known, Splitting(seed=1))).any()


def lines(rows):
    return "\n".join(",".join(map(str, row)) for row in rows)


USELESS = {
    "the target is not there": (lines([["a", "b"], *[[k, k % 7] for k in range(50)]]), "'y'"),
    "text": (
        lines([["x", "y"], *[[k % 7, "ab"[k % 2]] for k in range(50)]]),
        "Expected numbers up to",
    ),
    "all text": (lines([["x", "y"], *[[f"t{k}", k % 7] for k in range(50)]]), "hardly repeats"),
    "half text": (
        lines([["x", "y"], *[[k % 7, ("few", k % 5)[k % 2]] for k in range(50)]]),
        "got 'few'",
    ),
    "hardly varying": (
        lines([["x", "y"], *[[k % 7, f"{k % 3}e-200"] for k in range(50)]]),
        "to vary",
    ),
    "infinite": (lines([["x", "y"], *[[k % 7, "inf"] for k in range(50)]]), "at least 30 rows"),
    "an open quote": ("x,y\n" + "1,2\n" * 40 + '3,"4\n' + "1,2\n" * 9, "is never closed"),
    "constant": (lines([["x", "y"], *[[k % 7, 3] for k in range(50)]]), "to vary, got 3"),
    "one row": ("x,y\n1,2\n", "Expected at least 30 rows"),
    "no rows": ("x,y\n", "Expected at least 30 rows"),
    "nothing beside it": (
        lines([["y"], *[[k] for k in range(50)]]),
        "Expected at least one column of inputs",
    ),
    "equal rows": (
        lines([["x", "y"], *[[k < 1, k % 7] for k in range(50)]]),
        "too many rows are equal",
    ),
    "a long line": ("x,y\n" + "1,2\n" * 40 + "1,2,3\n", "Expected 2 entries in line 42"),
    "binary": ("\0\1\2", "binary file"),
}


@pytest.mark.parametrize("name", USELESS)
def test_a_table_that_teaches_nothing_is_refused_in_one_line(tmp_path, capsys, name):
    text, words = USELESS[name]
    (tmp_path / "data.csv").write_text(text)
    assert run(tmp_path / "data.csv", "--target", "y", "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith("rigidities: ") and said.count("\n") == 1
    assert words in said
    assert os.listdir(tmp_path) == ["data.csv"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data.csv"], "Expected --target COLUMN to train a model, or --apply MODEL"),
        (["data.csv", "--apply", "m", "--target", "y"], "--target is an option for training"),
        (["nowhere.csv", "--target", "y"], "There is no file nowhere.csv"),
        (["data.csv", "--target", "y", "--out", "no/such/place"], "There is no folder"),
    ],
)
def test_wrong_usage_is_explained(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--id", "mean"], "--id mean: the predictions have a column of that name"),
        (["--group", "mean"], "--group mean: the predictions have a column of that name"),
        (["--drop", "y"], "got 'y' twice"),
        (["--id", "x", "x"], "got 'x' twice"),
        (["--drop", "x", "--keep", "x"], "got 'x' twice"),
    ],
)
def test_a_column_has_one_part_to_play(tmp_path, capsys, arguments, words):
    (tmp_path / "data.csv").write_text("x,mean,y\n1,2,3\n")
    options = ["--target", "y", "--out", tmp_path / "out", *arguments]
    assert run(tmp_path / "data.csv", *options) == 2
    assert words in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["data.csv"]


@pytest.mark.parametrize("level", ["0", "1", "90"])
def test_a_level_is_a_probability(level, capsys):
    with pytest.raises(SystemExit) as left:
        run("data.csv", "--level", level)
    assert left.value.code == 2
    assert "expected a level between 0 and 1" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tabular, "find_spec", lambda name: None)
    assert run("data.csv", "--target", "y") == 1
    assert 'pip install "rigidities[tabular]"' in capsys.readouterr().err


def test_gaps_and_numbers_out_of_range_are_inputs_of_their_own():
    x = torch.tensor([[0.0, 1.0, 0.0], [2.0, torch.nan, 1.0], [4.0, 3.0, torch.nan]]).double()
    encoded = learners.Encoded([0, 0, 2], x)
    new = torch.tensor([[torch.nan] * 3, [2.0, 2.0, 1.0], [2.0, -13.0, 0.0]]).double()
    numbers, gaps, beyond = [[0, 0], [0, 0], [0, -10]], [[1, 1], [0, 0], [0, 0]], [[0], [0], [5]]
    categories = [[0, 0], [0, 1], [1, 0]]
    expected = torch.cat([torch.tensor(t) for t in (numbers, gaps, beyond, categories)], 1)
    torch.testing.assert_close(encoded(new), expected.double())
    assert encoded.is_moved(new).nonzero().tolist() == [[2, 1]]
    assert learners.encoded_width([0, 0, 2]) == expected.shape[1]


def plain_rows(n=300):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = 2 * x[:, :1] + x[:, 1:]
    return x, y + 0.3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def test_a_linear_model_has_wide_bars_where_it_knows_nothing():
    x, y = plain_rows()
    model = learners.linear((x[:200], y[:200]), [0, 0])
    uq = LastLayerRigidity(model, progress=False).fit((x[:200], y[:200]))
    uq.calibrate(x[200:], y[200:], method=Full(), early_stopped=False)
    new = torch.tensor([[0.0, 0.0], [torch.nan, 0.0], [100.0, 0.0]], dtype=torch.float64)
    usual, gap, far = uq.predict(new).std[:, 0].tolist()
    assert usual < 0.5 and gap > 2 and far > 100
    low, high = uq.predict(new[2:]).interval(0.9)
    assert float(low) < 200 < float(high)


def test_a_net_takes_gaps_as_the_mean_where_training_had_none(monkeypatch):
    monkeypatch.setattr(learners, "EPOCHS", 3)
    x, y = plain_rows()
    model = learners.net((x, y), [0, 0], seed=0)
    gap = torch.tensor([[torch.nan, 0.5]], dtype=torch.float64)
    mean = torch.tensor([[float(x[:, 0].mean()), 0.5]], dtype=torch.float64)
    torch.testing.assert_close(model(gap), model(mean))


def test_cells_that_training_says_nothing_of_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learners, "TREES", 10)
    x, y = plain_rows(120)
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y[:, 0]})
    frame.loc[:3, "b"] = np.nan
    frame.to_csv(tmp_path / "data.csv", index=False)
    out = tmp_path / "out"
    options = ["--target", "y", "--model", "linear", "--out", out]
    assert run(tmp_path / "data.csv", *options) == 0
    frame.loc[5:6, "a"], frame.loc[5, "b"], frame.loc[7, "a"] = np.nan, np.nan, -99
    frame.to_csv(tmp_path / "new.csv", index=False)
    capsys.readouterr()
    model = out / "model.safetensors"
    assert run("--apply", model, tmp_path / "new.csv", "--out", tmp_path / "p.csv") == 0
    said = capsys.readouterr().out
    assert "a: 2 cells are empty, and none was in the training table" in said
    assert "a: 1 numbers are more than 10 standard deviations from the mean" in said
    assert "b:" not in said
    bars = pd.read_csv(tmp_path / "p.csv")["std"]
    assert (bars[5:8] > 3 * bars[8:].median()).all()


@pytest.mark.parametrize("leaks", [False, True])
def test_an_input_that_follows_the_target_too_well_is_remarked(
    leaks, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(learners, "TREES", 10)
    x, y = plain_rows(400)
    noise = torch.randn(400, generator=torch.Generator().manual_seed(1)).double()
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y[:, 0]})
    if leaks:
        frame["y"] = 50 * np.exp(0.5 * y[:, 0].roll(1).numpy())
        frame["invoice"] = 2 * frame["y"] * (1 + 0.08 * noise.numpy())
    frame.to_csv(tmp_path / "data.csv", index=False)
    options = ["--target", "y", "--model", "linear", "--out", tmp_path / "out"]
    assert run(tmp_path / "data.csv", *options) == 0
    said = capsys.readouterr().out
    assert ("invoice matters more than 30 times as much as any other column" in said) == leaks
    assert ("--drop 'invoice'" in said) == leaks


def test_predictions_are_a_file_for_the_report(ran, tmp_path):
    own = ran.predictions[ran.predictions["split"] == "test"]
    own.to_csv(tmp_path / "test.csv", index=False, quoting=csv.QUOTE_MINIMAL)
    arguments = ["report", str(tmp_path / "test.csv"), "--out", str(tmp_path / "r.html")]
    assert cli.main(arguments) == 0


def test_every_command_of_the_page_is_understood(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "tabular.md").read_text(encoding="utf-8")
    commands = re.findall(r"^rigidities (tabular .+)$", page, flags=re.MULTILINE)
    asked = []
    for name in ("train", "apply"):
        monkeypatch.setattr(tabular, name, lambda *given, **options: asked.append(given) or {})
    assert all(cli.main(command.split()) == 0 for command in commands)
    assert len(asked) == len(commands) >= 5
    assert asked[0] == (Path("data.csv"), "price", Path("rigidities-data"))
