"""Options of `rigidities tabular`: bounds, logarithm, guarantees, groups, time, units, the page."""

import contextlib
import io
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import RidgeCV
from sklearn.metrics import r2_score

from rigidities import cli
from rigidities.cli import learners, tabular
from rigidities.cli.columns import inputs, matrix
from rigidities.cli.tabular import Splitting, TableModel, Training

pytestmark = pytest.mark.xdist_group("tabular")


def cars(rows=160, seed=0):
    """Prices with errors that grow with the price."""
    rng = np.random.default_rng(seed)
    year = rng.integers(2006, 2025, rows)
    brand = rng.choice(["Audi", "Fiat", "Ford"], rows)
    level = pd.Series(brand).map({"Audi": 36e3, "Fiat": 15e3, "Ford": 22e3}).to_numpy()
    price = level * np.exp(-0.15 * (2025 - year) + 0.2 * rng.normal(size=rows))
    sold = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 300, rows), "D")
    return pd.DataFrame(
        {
            "dealer": rng.integers(0, 40, rows),
            "brand": brand,
            "year": year,
            "sold": sold.strftime("%Y-%m-%d"),
            "price": price.round(2),
        }
    )


class Ran:
    """What one run wrote and printed."""

    def __init__(self, folder, frame, *options, code=0):
        self.data = folder / "cars.csv"
        self.out = folder / "out"
        frame.to_csv(self.data, index=False)
        arguments = ["tabular", self.data, "--target", "price", "--out", self.out, *options]
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            contextlib.redirect_stderr(io.StringIO()) as errors,
        ):
            assert cli.main([str(argument) for argument in arguments]) == code, errors.getvalue()
        self.printed = printed.getvalue()
        self.errors = errors.getvalue()
        if code == 0:
            self.summary = json.loads((self.out / "summary.json").read_text())
            self.predictions = pd.read_csv(self.out / "predictions.csv")
            self.model = self.out / "model.safetensors"


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run that chooses the logarithm by itself, with prices as people write them."""
    frame = cars()
    frame["price"] = [f"${price:,.2f}" for price in frame["price"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learners, "TREES", 30)
        patch.setattr(learners, "CANDIDATES", learners.CANDIDATES[1:2])
        return Ran(tmp_path_factory.mktemp("logged"), frame, "--drop", "dealer")


@pytest.mark.thorough
def test_a_skewed_positive_target_is_learnt_as_its_logarithm(logged):
    best = {False: np.inf, True: np.inf}
    for trial in logged.summary["leaderboard"]:
        error = (trial["rmse"] * trial["mae"]) ** 0.5
        best[trial["logarithm"]] = min(error, best[trial["logarithm"]])
    assert best[True] < 0.8 * best[False]  # so far apart that no rounding decides
    assert logged.summary["logarithm"] is True
    assert (logged.predictions["low"] > 0).all()
    model = TableModel.load(logged.model)
    frame = pd.read_csv(logged.data, dtype=str).astype(object)
    x, _ = matrix(model.columns, frame, ".")
    log_p = model.uq.predict(x)
    low, high = log_p.interval(0.9)
    own = logged.predictions
    assert own["mean"].tolist() == pytest.approx(log_p.mean.exp()[:, 0].tolist(), rel=1e-8)
    assert own["low"].tolist() == pytest.approx(low.exp()[:, 0].tolist(), rel=1e-8)
    assert own["high"].tolist() == pytest.approx(high.exp()[:, 0].tolist(), rel=1e-8)
    text = " ".join(logged.printed.split())
    assert "`std` is half the distance from one bar below the prediction to one bar above" in text
    assert "`mean` is the exponential of the predicted logarithm" in text


def test_every_remark_is_printed_once_near_the_verdict(logged):
    headline = logged.printed.index(logged.summary["verdict"]["headline"])
    remarks = logged.summary["remarks"]
    assert remarks  # with so few rows, one constant bar on the logarithmic scale is as good
    for remark in remarks:
        assert logged.printed.count(remark) == 1
        assert logged.printed.index(remark) > headline
        assert remark.startswith("On the logarithmic scale that the model learnt: ")


def test_a_split_by_time_is_not_suggested_for_groups(tmp_path):
    path = tmp_path / "cars.csv"
    cars().to_csv(path, index=False)
    rows = Training.read(path, "price", [], [], Splitting())
    groups = Training.read(path, "price", [], [], Splitting(group="dealer"))
    by_rows = "\n".join(rows.opening("price"))
    by_groups = "\n".join(groups.opening("price"))
    assert "Try --time-split 'sold'" in by_rows
    assert "optimistic for future dates" in by_groups
    assert "--time-split" not in by_groups  # the two options cannot be combined


def test_the_unit_of_the_target_is_read_and_told(logged):
    own = logged.predictions
    assert own["target"].tolist() == pytest.approx(cars()["price"].tolist())
    assert set(own["unit"]) == {"$"}
    assert "Target: price in $" in logged.printed
    assert "RMSE ($)" in logged.printed
    page = (logged.out / "report.html").read_text(encoding="utf-8")
    assert "price ($)" in page
    assert not re.search(r"\d\.\d+e\+\d", logged.printed)


def test_one_line_accounts_for_all_rows(logged):
    line = re.search(r"Rows: (\d+) read = (.+)", logged.printed)
    counts = {part: int(count) for count, part in re.findall(r"(\d+) (\w+)", line[2])}
    assert sum(counts.values()) == int(line[1]) == len(cars())
    assert counts == logged.summary["rows"]
    assert f"on the {counts['train']} training rows" in logged.printed
    use = "which the model was not trained or calibrated on"
    assert f"the {counts['test']} test rows, {use}" in logged.printed
    # all targets decide which columns give the target away
    assert "nothing else" not in logged.printed


def test_the_leaderboard_names_the_learners_and_the_chosen_one(logged):
    board = logged.summary["leaderboard"]
    kinds = {(trial["kind"], trial["logarithm"]) for trial in board}
    assert kinds == {
        *(("tree", False), ("tree", True), ("linear", False), ("linear", True), ("mean", False))
    }
    errors = [trial["rmse"] * trial["mae"] for trial in board]
    assert errors == sorted(errors)
    assert f"{board[0]['name']} (chosen)" in logged.printed
    page = (logged.out / "report.html").read_text(encoding="utf-8")
    assert "Learners tried" in page
    assert "Which columns matter" in page


def test_the_page_is_made_again_from_the_folder_or_a_file_of_it(logged, tmp_path, capsys):
    first = (logged.out / "report.html").read_bytes()
    for name in ("", "predictions.csv", "summary.json", "model.safetensors"):
        again = tmp_path / "again.html"
        assert cli.main(["report", str(logged.out / name), "--out", str(again)]) == 0
        assert again.read_bytes() == first
    assert "Wrote" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "predictions.csv", "summary.json", "table"])
def test_a_page_never_replaces_a_file_that_it_is_made_from(logged, capsys, name):
    out = logged.data if name == "table" else logged.out / name
    before = out.read_bytes()
    code = cli.main(["report", str(logged.out), "--out", str(out)])
    after = out.read_bytes()
    out.write_bytes(before)  # for the tests that follow, should the command have replaced it
    assert after == before
    assert code == 2
    assert "is a file that this command reads" in capsys.readouterr().err


def test_a_table_that_was_moved_or_changed_is_named_with_the_cure(logged, tmp_path, capsys):
    folder = tmp_path / "out"
    shutil.copytree(logged.out, folder)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"data": "/nowhere/cars.csv"}))
    page = ["--out", str(tmp_path / "r.html")]
    assert cli.main(["report", str(folder), *page]) == 2
    assert "Pass its new path with --data" in capsys.readouterr().err
    assert cli.main(["report", str(folder), "--data", str(logged.data), *page]) == 0
    cars(seed=1).to_csv(tmp_path / "other.csv", index=False)
    assert cli.main(["report", str(folder), "--data", str(tmp_path / "other.csv"), *page]) == 2
    assert "is not the training table of" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert cli.main(["report", str(folder), *page]) == 2
    assert "has no model.safetensors" in capsys.readouterr().err


def test_predictions_are_judged_alone_if_their_table_is_gone(logged, tmp_path, capsys):
    for name in ("model.safetensors", "predictions.csv"):
        shutil.copy(logged.out / name, tmp_path)
    gone = json.dumps(logged.summary | {"data": "/nowhere/cars.csv"})
    (tmp_path / "summary.json").write_text(gone)
    page = tmp_path / "r.html"
    arguments = ["report", str(tmp_path / "predictions.csv"), "--out", str(page)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "The training table /nowhere/cars.csv is no longer there." in printed
    assert "those with split = test" in printed
    assert cli.main([*arguments, "--data", str(logged.data)]) == 0
    assert page.read_bytes() == (logged.out / "report.html").read_bytes()


def test_predictions_alone_are_judged_by_their_test_rows(logged, tmp_path):
    shutil.copy(logged.out / "predictions.csv", tmp_path / "p.csv")
    page = tmp_path / "r.html"
    assert cli.main(["report", str(tmp_path / "p.csv"), "--out", str(page)]) == 0
    assert f"{logged.summary['rows']['test']} rows of target" in page.read_text(encoding="utf-8")


# --- bounds ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_intervals_below_zero_are_told_with_the_cure_and_support_ends_them(tmp_path):
    options = ["--model", "linear", "--no-log"]
    ran = Ran(tmp_path, cars(), *options)
    below = int((ran.predictions["low"] < 0).sum())
    assert below > 0
    assert (
        f"All 160 values of price are positive, but {below} of the 160 intervals reach below zero. "
        "Try `--support 0,` or `--log`."
    ) in ran.printed
    bounded = Ran(tmp_path, cars(), *options, "--support", "0,")
    assert (bounded.predictions["low"] >= 0).all()
    assert "below zero" not in bounded.printed
    # the same bars, cut off at the bound
    assert bounded.predictions["low"].tolist() == pytest.approx(
        ran.predictions["low"].clip(lower=0).tolist(), rel=0.05, abs=50
    )


@pytest.mark.parametrize("text", ["0", ",", "a,b", "5,1", "nan,", "0,inf", "1,2,3"])
def test_bounds_that_make_no_sense_are_explained(text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["tabular", "cars.csv", "--target", "price", "--support", text])
    assert "argument --support: expected " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "0.6", "-1", "nan"])
def test_a_share_that_makes_no_sense_is_explained(text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["tabular", "cars.csv", "--target", "price", f"--conformal={text}"])
    assert "expected a share of the rows" in capsys.readouterr().err


FREE = cars().assign(price=lambda frame: frame["price"].where(frame.index > 0, 0.0))
WRONG = {
    "a target outside": (cars(), ["--support", ",9000"], "Widen --support"),
    "a logarithm of zero": (FREE, ["--log"], "--log needs values above zero, got 0 in row 1"),
    "few conformal rows": (cars(), ["--conformal", "0.02"], "Use a share of 0.06 or more"),
    "a level beyond the rows": (
        *(cars(), ["--conformal", "0.2", "--level", "0.99"]),
        "need 99 conformal rows",
    ),
    "groups and time": (
        *(cars(), ["--group", "dealer", "--time-split", "sold"]),
        "--group and --time-split cannot be combined",
    ),
    "two groups": (
        *(cars().assign(dealer=lambda f: f["dealer"] % 2), ["--group", "dealer"]),
        "--group dealer has 2 groups, too few",
    ),
    "a group named like the unit": (
        cars().assign(unit=cars()["dealer"], price=[f"${price:.2f}" for price in cars()["price"]]),
        ["--group", "unit"],
        "--group unit: the predictions have a column of that name already",
    ),
    "three groups": (
        *(cars().assign(dealer=lambda f: f.index % 3), ["--group", "dealer"]),
        "--group dealer has 3 groups, too few",
    ),
    "three times": (
        *(cars().assign(sold=lambda f: 2020 + f.index % 3), ["--time-split", "sold"]),
        "--time-split sold has 3 different times, too few",
    ),
    "one row before all others": (
        cars().assign(sold=[2020, *[2021] * 99, *[2022] * 30, *[2023] * 30]),
        ["--time-split", "sold"],
        "one time has 62 % of the rows, too many",
    ),
    "one group of most rows": (
        cars().assign(dealer=lambda f: (f.index // 6).where(f.index >= 128, 0)),
        ["--group", "dealer"],
        "--group dealer: one group has 80 % of the rows, too many",
    ),
    "few times": (
        cars().assign(sold=lambda f: f["sold"].where(f.index < 6)),
        ["--time-split", "sold"],
        "got 6: 154 rows with a target have no time",
    ),
    "few conformal rows among those with a time": (
        cars().assign(sold=lambda f: f["sold"].where(f.index < 80)),
        ["--time-split", "sold", "--conformal", "0.02"],
        "Use a share of 0.12 or more",
    ),
    "the target as a group": (cars(), ["--group", "price"], "--group price is the target"),
    "an unknown group": (cars(), ["--group", "garage"], "Expected the column 'garage'"),
    "text as time": (cars(), ["--time-split", "brand"], "Expected dates or numbers"),
    "one time": (cars().assign(sold="2024-01-01"), ["--time-split", "sold"], "1 different times"),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not_fit_the_table_are_explained(tmp_path, name):
    frame, options, words = WRONG[name]
    ran = Ran(tmp_path, frame, *options, code=2)
    assert words in ran.errors
    assert ran.errors.count("\n") == 1
    assert not ran.out.exists()


@pytest.mark.thorough
def test_a_column_may_be_called_unit_if_the_target_has_none(tmp_path):
    ran = Ran(tmp_path, cars().assign(unit=cars()["dealer"]), "--id", "unit", "--model", "linear")
    assert ran.predictions["unit"].tolist() == cars()["dealer"].tolist()


@pytest.mark.parametrize(
    "option",
    ["--log", "--no-log", "--support=0,", "--conformal=0.2", "--group=a", "--time-split=a"],
)
def test_options_of_the_training_do_not_go_with_apply(option, capsys):
    assert cli.main(["tabular", "new.csv", "--apply", "model.safetensors", option]) == 2
    assert "is an option for training, not for --apply. Leave it out." in capsys.readouterr().err


# --- how rows are divided ----------------------------------------------------------------------


def read(tmp_path, frame, **splitting):
    frame.to_csv(tmp_path / "cars.csv", index=False)
    return Training.read(tmp_path / "cars.csv", "price", [], [], Splitting(**splitting))


def test_rows_of_a_group_are_never_split(tmp_path):
    frame = cars(300)
    frame.loc[::50, "dealer"] = None
    data = read(tmp_path, frame, group="dealer", conformal=0.2)
    parts = pd.Series(data.part).groupby(frame["dealer"]).nunique()
    assert (parts == 1).all()
    assert set(data.part) == {"train", "calibration", "conformal", "test"}
    assert "dealer" not in [column.name for column in data.columns]
    train_dealers = frame["dealer"][data.part == "train"].to_numpy()
    assert len(data.folds) == 5
    for training, left_out in data.folds:
        shared = set(train_dealers[training.numpy()]) & set(train_dealers[left_out.numpy()])
        assert not {dealer for dealer in shared if dealer == dealer}


@pytest.mark.parametrize("seed", range(5))
def test_a_large_group_trains(tmp_path, seed):
    frame = cars(300)
    frame["dealer"] = np.where(frame.index < 150, 0, frame.index // 5)
    data = read(tmp_path, frame, group="dealer", seed=seed)
    assert data.sizes == {"train": 210, "calibration": 45, "test": 45}
    assert (data.part[:150] == "train").all()
    assert data.folds
    assert not any("stay together" in note for note in data.notes)


def test_a_part_far_from_its_share_is_told(tmp_path):
    frame = cars(160)
    frame["dealer"] = frame.index // 40  # four groups of a quarter each
    data = read(tmp_path, frame, group="dealer")
    assert data.sizes == {"train": 80, "calibration": 40, "test": 40}
    for part in ("calibration", "test"):
        note = f"There are 40 {part} rows instead of about 24, because rows with one group stay"
        assert any(told.startswith(note) for told in data.notes)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("counts", [[2, 100], [100, 2], [50, 50]])
def test_two_groups_are_enough_to_leave_one_out(counts, in_order):
    group = torch.arange(2).repeat_interleave(torch.tensor(counts))
    folds = learners.folds_of(len(group), 0, group=group, in_order=in_order)
    assert len(folds) == (1 if in_order else 2)
    for training, left_out in folds:
        assert len(set(group[training].tolist())) == len(set(group[left_out].tolist())) == 1
        assert sorted([*training.tolist(), *left_out.tolist()]) == list(range(len(group)))


def test_the_oldest_rows_train_and_the_newest_test(tmp_path):
    frame = cars(300)
    frame.loc[::60, "sold"] = None
    data = read(tmp_path, frame, time="sold", conformal=0.1)
    sold = pd.to_datetime(frame["sold"])
    order = ["train", "calibration", "conformal", "test"]
    for earlier, later in itertools.pairwise(order):
        assert sold[data.part == earlier].max() < sold[data.part == later].min()
    assert ((data.part == "undated") == sold.isna()).all()
    train_times = sold[data.part == "train"].to_numpy()
    for training, left_out in data.folds:
        assert train_times[training.numpy()].max() < train_times[left_out.numpy()].min()
    assert "5 undated (no time in sold)" in data.account("price")


@pytest.mark.thorough
def test_guaranteed_intervals_are_those_of_the_conformal_rows(tmp_path):
    options = ["--model", "linear", "--log", "--conformal", "0.2", "--group", "dealer"]
    ran = Ran(tmp_path, cars(), *options)
    model = TableModel.load(ran.model)
    frame = pd.read_csv(ran.data, dtype=str).astype(object)
    x, _ = matrix(model.columns, frame, ".")
    low, high = model.uq.predict(x).interval(0.9, conformal=True)
    own = ran.predictions
    assert own["low"].tolist() == pytest.approx(low.exp()[:, 0].tolist(), rel=1e-7)
    assert own["high"].tolist() == pytest.approx(high.exp()[:, 0].tolist(), rel=1e-7)
    # by definition they cover enough of the conformal rows themselves
    kept = own[own["split"] == "conformal"]
    covered = ((kept["low"] <= kept["target"]) & (kept["target"] <= kept["high"])).mean()
    assert covered >= 0.9
    tested = own[own["split"] == "test"]
    inside = ((tested["low"] <= tested["target"]) & (tested["target"] <= tested["high"])).mean()
    assert ran.summary["scores"]["conformal"]["coverage"] == pytest.approx(inside)
    count = kept["dealer"].nunique()
    assert f"guaranteed for new rows of the {count} groups of the {len(kept)} conf" in ran.printed
    assert "For other groups they are not" in ran.printed
    out = tmp_path / "p.csv"
    apply = ["tabular", "--apply", str(ran.model), str(ran.data), "--out", str(out)]
    assert cli.main(apply) == 0
    again = pd.read_csv(out).drop(columns="split")
    pd.testing.assert_frame_equal(again, own[list(again)], rtol=1e-8)
    assert cli.main([*apply, "--level", "0.999"]) == 2


# --- what learners are compared by -------------------------------------------------------------


def test_the_linear_model_is_ridge_regression_by_leave_one_out():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5))
    x = (x - x.mean(0)) / x.std(0)
    y = x @ rng.normal(size=5) + rng.normal(size=60)
    model = learners.linear((torch.tensor(x), torch.tensor(y)[:, None]), [0] * 5)
    expected = RidgeCV(alphas=learners.RIDGES).fit(x, y)
    found = model(torch.tensor(x))[:, 0].tolist()
    assert found == pytest.approx(expected.predict(x).tolist(), rel=1e-6, abs=1e-6)


def test_errors_of_trials_are_those_of_rows_left_out():
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(80, 3)))
    y = (x.sum(1, keepdim=True) + torch.tensor(rng.normal(size=(80, 1)))).exp()
    folds = learners.folds_of(80, 0)
    assert sorted(torch.cat([left_out for _, left_out in folds]).tolist()) == list(range(80))
    trials = learners.trials((x, y), [0] * 3, folds, 0, kinds=["linear"], logarithms=[True])
    by_kind = {trial.kind: trial for trial in trials}
    predicted = torch.zeros(80, dtype=torch.float64)
    for training, left_out in folds:
        model = learners.linear((x[training], y[training].log()), [0] * 3)
        predicted[left_out] = model(x[left_out])[:, 0].detach().exp()
    error = predicted - y[:, 0]
    assert by_kind["linear"].rmse == pytest.approx(float(error.square().mean().sqrt()))
    assert by_kind["linear"].mae == pytest.approx(float(error.abs().mean()))
    assert by_kind["linear"].r2 == pytest.approx(r2_score(y[:, 0], predicted))
    assert by_kind["mean"].r2 < 0.05


@pytest.mark.thorough
def test_the_choice_of_a_learner_never_sees_rows_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(learners, "TREES", 20)
    monkeypatch.setattr(learners, "CANDIDATES", learners.CANDIDATES[1:2])
    boards = []
    for factor in (1, 50):
        frame = cars()
        part = read(tmp_path, frame).part
        frame.loc[np.isin(part, ["test", "calibration"]), "price"] *= factor
        data = read(tmp_path, frame)
        assert (data.part == part).all()
        learned = tabular._learned("auto", data, None, may_try_logarithm=True)
        boards.append([(trial.name, trial.rmse, trial.mae) for trial in learned.leaderboard])
    assert boards[0] == boards[1]


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["calibration", "test"])
def test_one_zero_among_the_targets_rules_the_logarithm_out(tmp_path, part):
    frame = cars()
    row = int((read(tmp_path, frame).part == part).nonzero()[0][0])
    frame.loc[row, "price"] = 0.0
    assert read(tmp_path, frame).part[row] == part
    ran = Ran(tmp_path, frame, "--model", "linear")
    assert not any(trial["logarithm"] for trial in ran.summary["leaderboard"])
    assert np.isfinite(list(ran.summary["scores"]["rigidities"].values())).all()


def test_the_board_says_which_rows_compared_the_learners():
    said = {
        rows: tabular._how_compared(learners.folds_of(rows, 0), rows)
        for rows in (140, 5_000, 14_000, 40_000)
    }
    assert said[140] == "Cross-validation on the 140 training rows"
    assert "5,000 training rows, of which 2,000 were left out in 2 folds" in said[5_000]
    assert "14,000 training rows: each learner was trained on 11,200" in said[14_000]
    assert "trained on 20,000 of them and tested on 5,000 others" in said[40_000]


def wide():
    """An input with 80 categories, and one number."""
    return cars(480)[["year", "price"]].assign(trim=[f"trim {k % 80}" for k in range(480)])


def test_a_linear_model_of_too_many_columns_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(learners, "WIDEST", 80)
    ran = Ran(tmp_path, wide(), "--model", "linear", code=2)
    assert "--model linear accepts up to 80 encoded columns, got 83." in ran.errors
    assert "Use --model tree, or --drop columns." in ran.errors


def test_the_board_says_that_no_linear_model_was_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(learners, "WIDEST", 80)
    data = read(tmp_path, wide())
    tree = learners.Trial("tree", False, 1.0, 1.0, 0.5, 1.0, 1.0, {"max_leaf_nodes": 8})
    (board,) = tabular._leaderboard([tree], data, "auto")
    assert "No linear model was tried: the inputs have 83 encoded columns" in board.about
    (board,) = tabular._leaderboard([tree], data, "tree")
    assert "No linear model" not in board.about


@pytest.mark.thorough
def test_what_is_no_number_is_null_in_the_summary(tmp_path, monkeypatch, capsys):
    scores = {"coverage": float("nan"), "width": float("inf"), "interval_score": 1.0}
    monkeypatch.setattr(tabular, "_quantile_scores", lambda *arguments: scores)
    cars().to_csv(tmp_path / "cars.csv", index=False)
    arguments = ["tabular", str(tmp_path / "cars.csv"), "--target", "price", "--model", "linear"]
    assert cli.main([*arguments, "--out", str(tmp_path / "out"), "--json"]) == 0

    def refuse(constant):
        raise AssertionError(constant)

    written = (tmp_path / "out" / "summary.json").read_text()
    for text in (written, capsys.readouterr().out):
        quantile = json.loads(text, parse_constant=refuse)["scores"]["quantile"]
        assert quantile == {"coverage": None, "width": None, "interval_score": 1.0}


class Sum(torch.nn.Module):
    """Adds up three columns with known weights."""

    def forward(self, x):
        return x @ torch.tensor([[3.0], [1.0], [0.0]], dtype=x.dtype)


def summed(tmp_path, rows):
    """A table sorted by `a`, and a model that predicts its target exactly."""
    x = np.random.default_rng(0).normal(size=(rows, 3)).round(6)
    frame = pd.DataFrame(x, columns=["a", "b", "c"]).sort_values("a")
    frame["price"] = 3 * frame["a"] + frame["b"]
    frame = frame[["a", "b", "c", "price"]]
    data = read(tmp_path, frame)
    model = SimpleNamespace(uq=SimpleNamespace(model=Sum()), columns=data.columns, logarithm=False)
    return model, data


def test_importances_are_what_shuffling_costs_a_known_model(tmp_path):
    model, data = summed(tmp_path, 300)
    found = tabular._importances(model, data)
    assert [row["column"] for row in found] == ["a", "b", "c"]
    lost = [row["r2_lost"] for row in found]
    # R² lost is about 2 w² / sum of all w², of ten shuffles of 45 rows
    assert lost[0] == pytest.approx(1.8, rel=0.3)
    assert lost[1] == pytest.approx(0.2, rel=0.5)
    assert found[2] == {"column": "c", "r2_lost": 0.0, "rmse_rise": 0.0}
    about = tabular._importance_table(found, data).about
    assert "the predictions of the 45 test rows become" in about


def test_importances_of_many_rows_are_those_of_a_random_choice(tmp_path, monkeypatch):
    model, data = summed(tmp_path, 2000)
    everything = tabular._importances(model, data)
    monkeypatch.setattr(tabular, "_ROWS_SHUFFLED", 100)
    found = tabular._importances(model, data)
    # the first rows of the sorted file have almost one value of `a`
    assert found[0]["column"] == "a"
    assert found[0]["rmse_rise"] == pytest.approx(everything[0]["rmse_rise"], rel=0.3)
    about = tabular._importance_table(found, data).about
    assert "the predictions of 100 of the 300 test rows, drawn at random, become" in about


# --- dates -------------------------------------------------------------------------------------


def dated(rows=200):
    rng = np.random.default_rng(0)
    ordered = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 300, rows), "D")
    days = rng.integers(1, 30, rows)
    sent = ordered + pd.to_timedelta(days, "D")
    frame = {"ordered": ordered.strftime("%d.%m.%Y"), "sent": sent.strftime("%Y-%m-%d %H:%M")}
    return pd.DataFrame(frame, dtype=object), days.astype(float)


def test_days_between_two_dates_are_an_input():
    frame, days = dated()
    y = days + np.random.default_rng(1).normal(size=len(days))
    columns, _ = inputs(frame, y, ".")
    assert columns[-1].name == "days from ordered to sent"
    x, _ = matrix(columns, frame, ".")
    assert x[:, -1].tolist() == days.tolist()
    gap = frame.assign(sent=frame["sent"].where(frame.index > 0))
    assert matrix(columns, gap, ".")[0][0, -1].isnan()


def test_days_that_are_the_target_give_it_away():
    frame, days = dated()
    columns, notes = inputs(frame, days, ".")
    assert "days from ordered to sent" not in [column.name for column in columns]
    assert any("days from ordered to sent (gives the target away" in note for note in notes)
    kept, _ = inputs(frame, days, ".", ["days from ordered to sent"])
    assert kept[-1].kind == "days"


def test_days_that_are_the_target_are_kept_if_asked_for(tmp_path):
    frame, days = dated()
    frame.assign(price=days).to_csv(tmp_path / "sent.csv", index=False)
    name = "days from ordered to sent"
    data = Training.read(tmp_path / "sent.csv", "price", [], [], Splitting())
    assert any(f"Left out: {name} (gives" in note for note in data.notes)
    kept = Training.read(tmp_path / "sent.csv", "price", [], [name], Splitting())
    assert kept.columns[-1].name == name
    with pytest.raises(ValueError, match="Expected the column 'days from sent to ordered' in"):
        Training.read(
            tmp_path / "sent.csv", "price", [], ["days from sent to ordered"], Splitting()
        )


def test_one_date_in_all_rows_is_constant_and_not_empty():
    frame, days = dated()
    _, notes = inputs(frame.assign(sent="2024-05-01", other=None), days, ".")
    assert "Left out: sent (constant)" in notes
    assert "Left out: other (empty)" in notes


# --- the page of the options -------------------------------------------------------------------


def test_the_reference_lists_every_option_of_every_command():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    parser = cli._parser()
    (commands,) = [a for a in parser._actions if hasattr(a, "choices") and a.choices]
    for name, command in commands.choices.items():
        assert f"`{name}`" in text
        for action in command._actions:
            for option in action.option_strings:
                if option not in ("-h", "--help"):
                    assert re.search(rf"`{option}\b", text), (name, option)
