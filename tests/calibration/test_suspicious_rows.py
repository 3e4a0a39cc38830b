"""Calibration rows that cannot calibrate: targets of other rows, or rows seen in training."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import rigidities as rg
from tests.support.nets import trained

F64 = torch.float64
MISMATCH = (
    r"calibration rows have an RMS error of {}, the training rows of {}.*same order.*same unit"
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def lines_of(uq: rg.LastLayerRigidity) -> list[str]:
    return uq.summary().splitlines()


# --- targets that do not belong to their inputs -------------------------------------------------

X = normal(600, 4, seed=0)
Y = (X @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=F64))[:, None] + 0.1 * normal(600, 1, seed=1)
TRAIN = slice(0, 300)
VALID = slice(300, 600)
ORDER = torch.randperm(300, generator=torch.Generator().manual_seed(2))


def linear(x: Tensor, y: Tensor) -> nn.Module:
    """A linear model at the minimum of its squared loss."""
    model = nn.Linear(x.shape[1], y.shape[1], dtype=F64)
    design = torch.cat([x, torch.ones(len(x), 1, dtype=F64)], 1)
    solution = torch.linalg.lstsq(design, y).solution
    with torch.no_grad():
        model.weight.copy_(solution[:-1].mT)
        model.bias.copy_(solution[-1])
    return model


@cache
def fitted_line() -> rg.LastLayerRigidity:
    return rg.LastLayerRigidity(linear(X[TRAIN], Y[TRAIN])).fit(X[TRAIN], Y[TRAIN])


def line() -> rg.LastLayerRigidity:
    return copy.deepcopy(fitted_line())


MISTAKES = {
    "another order": lambda y: y[ORDER],
    "the reverse order": lambda y: y.flip(0),
    "a unit a thousand times as small": lambda y: 1000 * y,
    "a unit ten times as large": lambda y: y / 10,
    "degrees Celsius and kelvin": lambda y: y + 273.15,
}


@pytest.mark.parametrize("method", ["full", "paper"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_targets_that_do_not_belong_to_their_inputs_are_warned_of(mistake, method):
    uq = line()
    wrong = MISTAKES[mistake](Y[VALID])
    rms = [
        float((y - uq.model(x).detach()).square().mean().sqrt())
        for x, y in ((X[VALID], wrong), (X[TRAIN], Y[TRAIN]))
    ]
    assert rms[0] > 3 * rms[1]
    said = MISMATCH.format(*(f"{value:.3g}".replace("+", r"\+") for value in rms))
    with pytest.warns(UserWarning, match=said):
        report = uq.calibrate(X[VALID], wrong, method=method).calibration_report
    assert f"  ! {report.mismatch}" in str(report)
    assert report.warnings[0] == report.mismatch
    assert any("caution" in line and f"! {report.mismatch}" in line for line in lines_of(uq))
    p = uq.predict(X[VALID])
    verdict = rg.report.verdict(p, Y[VALID], calibration=report)
    assert f"  ! {report.mismatch}" in str(verdict)


@pytest.mark.parametrize("method", ["full", "paper"])
def test_right_targets_are_not_warned_of(method):
    uq = line()
    report = uq.calibrate(
        X[VALID], Y[VALID], method=method
    ).calibration_report  # warnings are errors
    assert report.mismatch == ""
    assert not any("caution" in line for line in lines_of(uq))


def test_a_single_row_in_error_is_no_mismatch():
    wrong = Y[VALID].clone()
    wrong[7] = 1e6
    assert line().calibrate(X[VALID], wrong, method="paper").calibration_report.mismatch == ""


def test_a_model_that_has_memorised_its_training_rows_is_no_mismatch():
    # 60 features for 50 rows: no training error at all, and half of the spread on new rows.
    features = normal(250, 60, seed=3)
    y = features[:, :8].sum(1, keepdim=True)
    readout = nn.Linear(60, 1, bias=False, dtype=F64)
    with torch.no_grad():
        readout.weight.copy_((torch.linalg.pinv(features[:50]) @ y[:50]).mT)
    errors = y - readout(features).detach()
    rms = [float(part.square().mean().sqrt()) for part in (errors[:50], errors[50:])]
    assert rms[0] < 1e-9 and 0.2 < rms[1] / float(y.std()) < 0.9
    uq = rg.LastLayerRigidity(readout).fit(features[:50], y[:50])
    assert uq.calibrate(features[50:], y[50:], method="paper").calibration_report.mismatch == ""


def test_of_several_targets_the_wrong_one_is_named():
    y = torch.cat([Y, normal(600, 1, seed=4) / 10 - Y], 1)
    uq = rg.LastLayerRigidity(linear(X[TRAIN], y[TRAIN])).fit(X[TRAIN], y[TRAIN])
    wrong = y[VALID].clone()
    wrong[:, 1] = wrong[ORDER, 1]
    with pytest.warns(UserWarning, match="^Target 1: The calibration rows have an RMS error"):
        report = uq.calibrate(X[VALID], wrong, method="paper").calibration_report
    assert "Target 0" not in report.mismatch


def test_a_file_keeps_the_word_about_mismatched_targets(tmp_path):
    uq = line()
    with pytest.warns(UserWarning, match="RMS error"):
        report = uq.calibrate(X[VALID], Y[VALID].flip(0), method="paper").calibration_report
    uq.save(tmp_path / "uq")
    again = rg.LastLayerRigidity.load(tmp_path / "uq", uq.model)
    assert again.calibration_report.mismatch == report.mismatch != ""


# --- rows that were seen in training ------------------------------------------------------------

SEEN = r"{} of {} calibration rows are also in the training data"


@pytest.mark.parametrize("method", ["full", "paper"])
def test_rows_that_were_all_seen_in_training_carry_an_exclamation_mark(method):
    uq = line()
    with pytest.warns(UserWarning, match=SEEN.format(300, 300)):
        report = uq.calibrate(X[TRAIN], Y[TRAIN], method=method).calibration_report
    assert "  ! 300 of 300 calibration rows are also in the training data" in str(report)
    assert any("caution" in line and "! 300 of 300" in line for line in lines_of(uq))
    verdict = rg.report.verdict(uq.predict(X[VALID]), Y[VALID], calibration=report)
    assert "  ! 300 of 300 calibration rows are also in the training data" in str(verdict)


def rows(x: Tensor, y: Tensor) -> list[dict]:
    """One mapping per row, with what data sets hold beside their tensors."""
    numbers = (1e6 * x[:, 0]).long().tolist()  # of the row itself, wherever it stands
    return [
        {"y": y[i], "x": x[i], "name": f"molecule {number}", "number": number}
        for i, number in enumerate(numbers)
    ]


def stacked(sizes: list[int], x: Tensor, y: Tensor) -> list[dict]:
    batches = []
    for part_x, part_y in zip(x.split(sizes), y.split(sizes), strict=True):
        more = {"split": "train", "temperature": torch.tensor(300.0), "mask": None, "step": 3}
        batches.append({"inputs": {"x": part_x}, "y": part_y, **more})
    return batches


DICTIONARIES = {
    "tensors, and what belongs to the whole batch": (
        lambda x, y: stacked([len(x) // 2, len(x) - len(x) // 2], x, y),
        lambda x, y: stacked([1] * len(x), x, y),
        lambda m, b: m(b["inputs"]["x"]),
        lambda b: b["y"],
    ),
    "a loader with texts and numbers": (
        lambda x, y: DataLoader(rows(x, y), batch_size=64),
        lambda x, y: DataLoader(rows(x, y), batch_size=7),
        lambda m, b: m(b["x"]),
        lambda b: b["y"],
    ),
    "other orders of the keys": (
        lambda x, y: [{"x": x, "y": y}],
        lambda x, y: [
            {"y": part[1], "x": part[0]} for part in zip(x.split(7), y.split(7), strict=True)
        ],
        lambda m, b: m(b["x"]),
        lambda b: b["y"],
    ),
    "lists of one dictionary per row": (
        lambda x, y: DataLoader(rows(x, y), batch_size=64, collate_fn=list),
        lambda x, y: DataLoader(rows(x, y), batch_size=7, collate_fn=list),
        lambda m, b: m(torch.stack([row["x"] for row in b])),
        lambda b: torch.stack([row["y"] for row in b]),
    ),
    "texts as the only input": (
        lambda x, y: [{"text": [str(row.tolist()) for row in x], "y": y}],
        lambda x, y: [
            {"text": [str(row.tolist()) for row in part], "y": y[7 * i : 7 * i + 7]}
            for i, part in enumerate(x.split(7))
        ],
        lambda m, b: m(torch.tensor([eval(text) for text in b["text"]], dtype=F64)),
        lambda b: b["y"],
    ),
}


@pytest.mark.parametrize("case", DICTIONARIES)
def test_training_rows_are_recognised_in_dictionaries_of_any_batching(case):
    batches, other_batches, forward, target = DICTIONARIES[case]
    model = linear(X[TRAIN], Y[TRAIN])
    uq = rg.LastLayerRigidity(model, forward=forward, target=target)
    uq.fit(batches(X[TRAIN], Y[TRAIN]))
    for made in (batches, other_batches):
        report = uq.calibrate(made(X[VALID], Y[VALID]), method="paper").calibration_report
        assert (report.samples, report.duplicates) == (300, 0)
        mixed = slice(150, 450)  # the first half was seen
        with pytest.warns(UserWarning, match=SEEN.format(150, 300)):
            uq.calibrate(made(X[mixed], Y[mixed]), method="paper")
    # Rows are taken out of the fit by the same hashes.
    assert uq.forget(other_batches(X[:70], Y[:70])).gram.count == 230


def test_a_target_alone_does_not_tell_rows_apart():
    # Nothing but the target has a row per sample, and it takes few values.
    class Table:
        x = X

    def batch(rows: slice) -> dict:
        return {"first": rows.start, "y": Y[rows].round()}

    def forward(model: nn.Module, b: dict) -> Tensor:
        return model(Table.x[b["first"] : b["first"] + len(b["y"])])

    model = linear(X[TRAIN], Y[TRAIN])
    uq = rg.LastLayerRigidity(model, forward=forward, target=lambda b: b["y"]).fit([batch(TRAIN)])
    report = uq.calibrate([batch(VALID)], method="paper").calibration_report
    assert report.samples == 0
    assert "It was not possible to check whether these rows" in str(report)


def test_rows_of_another_length_cannot_be_told_apart():
    net = trained()
    x, y = net.train
    batches = [{"x": x, "y": y, "edges": torch.zeros(2, 17)}]
    uq = rg.LastLayerRigidity(net.model, forward=lambda m, b: m(b["x"]), target=lambda b: b["y"])
    report = uq.fit(batches).calibrate(batches, method="paper").calibration_report
    assert report.samples == 0
