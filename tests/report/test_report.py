"""Reports: the page is true of its rows, keeps text text, and asks nobody for anything."""

import ast
import math
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import rigidities as rg
from rigidities import metrics, report
from rigidities.report.rows import labelled_prediction, target_rows
from tests.support.nets import Trained
from tests.support.pages import Page
from tests.support.refusals import refused
from tests.support.report_rows import columns, page

pytestmark = pytest.mark.usefixtures("short")

EVIL = "<script>window.bad = 1</script>"


# --- the page ----------------------------------------------------------------------------------


def test_the_page_asks_the_network_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with plotly's own script
    found = page(*columns(60))
    attributes = [attribute for _, attribute in found.elements]
    assert not any({"src", "href", "action", "data"} & set(each) for each in attributes)
    assert not any(re.search(r"url\(|@import", style) for style in found.styles)
    (policy,) = [a["content"] for a in attributes if a.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert sum("plotly.js v" in script for script in found.running) == 1
    assert len(found.running) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("inputs", [0, 12, 40])
def test_the_page_of_one_target_stays_below_a_megabyte_and_a_half(
    inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # with plotly's own script
    mean, std, target = columns(8_000)
    shown = {f"<column {k}>": (1e4 * mean + k).tolist() for k in range(inputs)}
    text = report.html(1e4 * mean, 1e4 * target, std=1e4 * std, inputs=shown)
    assert len(text.encode()) < 1_500_000


def test_text_from_data_stays_text() -> None:
    mean, std, target = columns(60)
    inputs = {EVIL: [EVIL] * 60, "%{x}": ["</script><b>"] * 60}
    text = report.html(mean, target, std=std, title=EVIL, names=[EVIL], inputs=inputs)
    found = Page(text)
    assert len(found.running) == 2
    assert EVIL in found.text
    assert EVIL not in text
    assert found.text.count(EVIL) >= 3
    (hover, *_) = found.embedded("hovers")["t0"]
    assert "&lt;script&gt;" in hover
    assert "<script" not in hover
    assert "&lt;/script&gt;&lt;b&gt;" in hover
    assert not [tag for tag, _ in found.elements if tag == "b"]


def test_a_point_tells_its_row() -> None:
    mean, std, target = columns(60)
    names = [f"molecule {k}" for k in range(60)]
    hovers = page(mean, std, target, inputs={"name": names}, first_row=1).embedded("hovers")["t0"]
    assert hovers[4].startswith("<b>row 5</b>")
    assert f"prediction {mean[4]:.6g} ± {std[4]:.3g}" in hovers[4]
    assert f"true value {target[4]:.6g}" in hovers[4]
    assert hovers[4].endswith("name: molecule 4")


def test_plots_have_labels_and_controls_can_be_reached() -> None:
    found = page(*columns(500))
    places = [a for tag, a in found.elements if tag == "div" and a.get("class") == "plot"]
    assert len(places) == 6
    assert all(a["role"] == "img" and a["aria-label"] for a in places)
    assert {a["id"] for a in places} == set(found.figures)
    boxes = [a for _, a in found.elements if a.get("class") == "box"]
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in boxes)
    assert sum(tag == "select" for tag, _ in found.elements) == 1
    assert sum(a.get("type") == "radio" for _, a in found.elements) == 4


@pytest.mark.thorough
def test_each_target_has_a_section_and_all_stand_in_one_table() -> None:
    parts = [columns(200, scale=s) for s in (1.0, 2.0, 1.0)]
    mean, std, target = (torch.stack(each, 1) for each in zip(*parts, strict=True))
    found = page(mean, std, target, names=["energy", "dipole", "gap"])
    sections = [a["data-target"] for tag, a in found.elements if tag == "section"]
    assert sections == ["t0", "t1", "t2"]
    for name, (m, s, t) in zip(["energy", "dipole", "gap"], parts, strict=True):
        assert float(found.row(name)[1]) == pytest.approx(metrics.rmse(m, t), rel=5e-3)
        assert found.row(name)[4] == f"{100 * metrics.coverage(m, s, t):.1f} %"
    assert found.row("dipole")[6] == "Too narrow"


@pytest.mark.thorough
def test_of_many_targets_the_first_have_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_TARGETS", 3)
    mean, std, target = (part.reshape(10, 15) for part in columns(150))
    found = page(mean, std, target)
    assert sum(tag == "section" for tag, _ in found.elements) == 3
    assert "3 of them have a section" in found.text
    assert found.row("target 14")


def test_of_larger_outputs_every_number_is_a_row() -> None:
    mean, std, target = (part.reshape(10, 4, 5) for part in columns(200))
    (part,) = target_rows(mean, target, std=std, inputs={"name": list("abcdefghij")})
    assert len(part) == 200
    assert part.inputs["name"][:21] == ["a"] * 20 + ["b"]


def test_inputs_are_repeated_for_the_rows_of_samples_alone() -> None:
    mean, std, target = (part.reshape(10, 4, 5) for part in columns(200))
    for count in (1, 5, 20, 100):
        with pytest.raises(ValueError, match="Expected 200 values in the input 'a', or 10"):
            target_rows(mean, target, std=std, inputs={"a": [0] * count})
    with pytest.raises(ValueError, match=r"Expected 200 values in the input 'a'.*got 100"):
        target_rows(mean.flatten(), target.flatten(), std=std.flatten(), inputs={"a": [0] * 100})


def test_the_reference_of_several_targets_must_have_their_columns() -> None:
    three = [part.reshape(60, 3) for part in columns(180)]
    assert "can be" in page(*three, reference=three[1]).text
    for wrong in (three[1].flatten(), three[1].T, three[1].reshape(1, 60, 3)):
        with pytest.raises(ValueError, match=r"Expected a reference of shape \(M, 3\), got"):
            page(*three, reference=wrong)


def test_importing_the_report_imports_neither_plotly_nor_jinja() -> None:
    for path in Path(report.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert not re.match(r"(import|from) (plotly|jinja2)\b", ast.unparse(node))


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_without_its_packages_the_extra_is_named(package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    words = rf'A report needs {package}: pip install "rigidities\[report\]"'
    with pytest.raises(ModuleNotFoundError, match=words):
        page(*columns(40))


# --- bad arrays --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"std": [1.0, 0.0, 2.0]}, "Expected std > 0, got 0 in row 1."),
        ({"std": [1.0, 1.0, -2.0]}, "Expected std > 0, got -2 in row 2."),
        ({"std": [1.0, 1e-300, 1.0]}, "so that their squares are finite, got others in row 1."),
        (
            {"std": [1.0, 1.0, 1e300]},
            "in row 2. Check the predictions, or pass all values in another",
        ),
        ({"target": [1.0, 1.0, 1e200]}, "got others in row 2."),
        ({"std": [1.0, 1.0]}, "the same shape"),
        ({"target": [1.0, math.nan, 1.0]}, "Expected target to be finite"),
        ({"names": ["a", "b"]}, "Expected 1 names"),
        ({"inputs": {"mass": [1, 2]}}, "Expected 3 values in the input 'mass'"),
        ({"inputs": {"mass": [1]}}, "Expected 3 values in the input 'mass', one for each row"),
        ({"inputs": torch.zeros(3, 2, 2)}, "Expected inputs by name"),
        ({"reference": [math.inf]}, "finite"),
    ],
)
def test_bad_arrays_are_refused(options: dict[str, Any], words: str) -> None:
    good = {"prediction": [1.0, 2.0, 3.0], "std": [1.0, 1.0, 1.0], "target": [1.0, 2.5, 3.0]}
    refused(re.escape(words), report.html, **{**good, **options})


def test_bars_go_by_name_and_belong_to_means() -> None:
    mean, std, target = columns(40)
    with pytest.raises(TypeError, match="positional arguments"):
        report.html(mean, std, target)
    with pytest.raises(TypeError, match=r"means with std="):
        report.html(mean, target)


# --- writing -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uq(net: Trained) -> rg.LastLayerRigidity:
    fitted = rg.LastLayerRigidity(net.model).fit(net.train)
    fitted.calibrate(net.valid, method=rg.Paper(noise="constant"))
    return fitted


def test_a_fitted_model_and_labelled_data_give_a_report(net, uq, tmp_path) -> None:
    x, y = net.test
    found = Page(report.write(tmp_path / "r.html", uq, (x, y)).read_text(encoding="utf-8"))
    mean, std = (part.detach() for part in uq(x))
    assert float(found.row("NLLNeg")[1]) == pytest.approx(metrics.nll(mean, std, y), rel=5e-3)
    assert "Calibration" in found.text
    assert "input 3: " in found.embedded("hovers")["t0"][0]
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_a_shuffled_loader_keeps_rows_and_targets_together(net, uq) -> None:
    x, y = net.test
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    found = labelled_prediction(uq, loader)
    p, target, inputs = found.prediction, found.target, found.inputs
    mean, std, expected = p.mean, p.std, uq(inputs)
    assert torch.allclose(mean, expected[0].detach())
    assert torch.allclose(std, expected[1].detach())
    assert metrics.rmse(mean, target) == pytest.approx(metrics.rmse(uq(x)[0].detach(), y), rel=1e-5)


def test_targets_come_from_the_wrappers_own_function(net: Trained, tmp_path: Path) -> None:
    def batches(part: tuple[torch.Tensor, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        columns = (column.split(64) for column in part)
        return [{"place": x, "energy": y} for x, y in zip(*columns, strict=True)]

    uq = rg.LastLayerRigidity(
        net.model,
        forward=lambda model, batch: model(batch["place"]),
        target=lambda batch: batch["energy"],
    )
    uq.fit(batches(net.train)).calibrate(batches(net.valid), method="paper")
    found = labelled_prediction(uq, batches(net.test))
    assert torch.equal(found.target, net.test[1])
    assert torch.equal(found.prediction.mean, uq.predict(batches(net.test)).mean)
    unlabelled = [{"place": net.valid[0]}]
    path = report.write(tmp_path / "r.html", uq, batches(net.test), reference=unlabelled)
    assert "Calibration" in Page(path.read_text(encoding="utf-8")).text


def test_an_iterator_of_batches_and_flat_targets_will_do(net, uq) -> None:
    x, y = net.test
    found = labelled_prediction(uq, iter([(x[:50], y[:50, 0]), (x[50:], y[50:, 0])]))
    mean, target = found.prediction.mean, found.target
    assert mean.shape == target.shape == y.shape
    assert torch.equal(target, y)


def test_test_rows_unlike_the_reference_are_reported(net, uq, tmp_path) -> None:
    far = (10 * net.test[0], net.test[1])
    text = Page(report.write(tmp_path / "r.html", uq, far, reference=net.valid).read_text()).text
    assert "unlike those that the bars were calibrated on" in text


def test_bars_without_calibration_are_not_trusted_silently(net: Trained, tmp_path: Path) -> None:
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    with pytest.warns(UserWarning, match="not calibrated"):
        written = report.write(tmp_path / "r.html", uq, net.test)
    text = Page(written.read_text()).text
    assert "their size is arbitrary" in text
    assert "can be trusted" not in text


def test_data_without_targets_are_refused(net: Trained, uq: rg.LastLayerRigidity, tmp_path) -> None:
    with pytest.raises(ValueError, match="Expected labelled data, got batches without a target"):
        report.write(tmp_path / "r.html", uq, net.test[0])
    refused("got none", report.write, tmp_path / "r.html", uq, [])
    with pytest.raises(ValueError, match="Expected targets shaped like the predictions"):
        report.write(tmp_path / "r.html", uq, (net.test[0], net.test[1].expand(-1, 3)))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", fail)
    refused("the disk is full", report.save, path, "new", error=OSError)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*nowhere"):
        report.save(tmp_path / "nowhere" / "r.html", "")
    refused("is a folder", report.save, tmp_path, "", error=IsADirectoryError)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(PermissionError, match=r"Cannot write into the folder .*Permission denied"):
        report.save(tmp_path / "r.html", "")


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, Path(os.devnull)):
        refused("is a device or a pipe", report.save, place, "", error=FileExistsError)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o007, 0o660)])
def test_a_page_has_the_rights_that_the_umask_leaves(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        written = report.save(tmp_path / "r.html", "")
        assert stat.S_IMODE(written.stat().st_mode) == mode
        written.chmod(0o640)
        assert stat.S_IMODE(report.save(written, "new").stat().st_mode) == 0o640
    finally:
        os.umask(before)


def test_a_report_takes_inputs_and_targets_apart_and_says_what_a_prediction_needs(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(60, 1)
    uq = rg.LastLayerRigidity(torch.nn.Linear(3, 1)).fit(x[:20], y[:20])
    uq.calibrate(x[20:40], y[20:40], method="paper")
    apart = rg.report.write(tmp_path / "a.html", uq, x[40:], y[40:]).read_text(encoding="utf-8")
    assert apart == rg.report.write(tmp_path / "b.html", uq, (x[40:], y[40:])).read_text("utf-8")
    with pytest.raises(TypeError, match=r"save\(path, html\(p, y\)\)"):
        rg.report.write(tmp_path / "c.html", uq.predict(x[40:]), y[40:])
