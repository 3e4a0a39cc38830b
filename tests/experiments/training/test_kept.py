"""Nets that come with the project: read where they belong, trained where they do not."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.training.stack import Stack

from experiments.data import california, files, outside, uci
from experiments.training import kept
from tests.support import synthetic_data


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    data = synthetic_data.write(tmp_path / "data")
    for path in data.glob("*.npz"):
        files.seal(path)
    monkeypatch.setenv("RIGIDITIES_DATA", str(data))
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "nets")
    monkeypatch.setattr(kept, "EPOCHS", 3)
    return tmp_path


def test_nets_that_were_kept_are_read_again(folder: Path) -> None:
    made = kept.nets("uci", "yacht", 1, count=3, epochs=3)
    assert not made.committed and len(made.stack) == 3
    kept.write("uci", {"yacht/1": (made.stack, made.epoch)})
    read = kept.nets("uci", "yacht", 1, count=3, epochs=3)
    assert read.committed
    assert torch.equal(read.stack.flat, made.stack.flat)
    assert torch.equal(read.epoch, made.epoch)
    x = torch.randn(3, 5, 6)
    assert torch.equal(read.stack(x), made.stack(x))
    first = kept.nets("uci", "yacht", 1, count=2, epochs=3)
    assert first.committed and torch.equal(first.stack.flat, made.stack.flat[:2])


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"epochs": 2}, {"member": 0}, {"count": 4}],
    ids=["another seed", "other epochs", "another member", "more than were kept"],
)
def test_whatever_was_not_kept_is_trained(folder: Path, other: dict[str, int]) -> None:
    made = kept.nets("uci", "yacht", 1, count=3, epochs=3)
    kept.write("uci", {"yacht/1": (made.stack, made.epoch)})
    asked = {"member": 1, "count": 3, "epochs": 3, "seed": 0, **other}
    found = kept.nets("uci", "yacht", **asked)
    assert not found.committed
    assert len(found.stack) == asked["count"]
    if "count" not in other:
        assert not torch.equal(found.stack.flat, made.stack.flat)


def test_nets_of_other_rows_are_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = kept.nets("uci", "yacht", count=2, epochs=3)
    kept.write("uci", {"yacht/0": (made.stack, made.epoch)})
    rows = uci.read("yacht")
    rows.y[0] += 1
    monkeypatch.setattr(uci, "read", lambda name: rows)
    assert not kept.nets("uci", "yacht", count=2, epochs=3).committed


def test_members_and_drawings_are_other_nets(folder: Path) -> None:
    found = [
        kept.nets("uci", "yacht", member, count=2, epochs=3).stack.flat
        for member in (0, 1, "random")
    ]
    for k in range(3):
        for other in found[:k]:
            assert not torch.equal(found[k], other)


def test_all_studies_can_train_and_keep_their_nets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept.digest("outside")
    monkeypatch.setattr(outside, "SETS", ("energy",))
    monkeypatch.setattr(kept, "NETS", 2)
    for study, name, inputs in (("outside", "energy", 8), ("california", "relu", 8)):
        monkeypatch.setattr(kept, "PROTOCOLS", {"relu": kept.PROTOCOLS["relu"]})
        path = kept.make(study)
        assert path.parent == folder / "nets"
        read = kept.nets(study, name, epochs=3)
        assert read.committed and read.stack.sizes == (inputs, 50, 1)
    assert before == "" and len(kept.digest("outside")) == 64


def test_a_file_without_its_notes_is_not_taken(folder: Path) -> None:
    from safetensors.torch import save_file

    (folder / "nets").mkdir()
    stack = Stack.drawn([0], (6, 50, 1))
    save_file({"yacht/0": stack.flat}, folder / "nets" / "uci.safetensors")
    assert not kept.nets("uci", "yacht", count=1, epochs=3).committed


def test_the_nets_that_come_with_the_project_are_small_and_whole() -> None:
    paths = sorted(Path(kept.__file__).parents[1].joinpath("nets").glob("*.safetensors"))
    assert {path.stem for path in paths} >= {"uci", "california", "outside"}
    assert sum(path.stat().st_size for path in paths) < 10e6


@pytest.mark.parametrize("name", sorted(set(uci.SETS) - {"year"}))
def test_the_nets_that_come_with_the_project_belong_to_the_published_rows(name: str) -> None:
    if uci.missing(name) is not None:
        pytest.skip(f"needs the data of {name}")
    rows = uci.read(name)
    if not rows.splits:
        pytest.skip("needs the published splits")
    found = kept.nets("uci", name)
    assert found.committed
    train = rows.official(0).train
    x, y = rows.x[train], rows.y[train]
    spread = np.where(x.std(0) > 1e-9 * np.abs(x.mean(0)), x.std(0), 1.0)
    inputs = torch.from_numpy((x - x.mean(0)) / spread).float()
    error = found.stack.module(0)(inputs)[:, 0].detach().numpy() - (y - y.mean()) / y.std()
    assert np.mean(error**2) < 0.5


def test_the_nets_of_california_belong_to_its_rows() -> None:
    if california.missing() is not None:
        pytest.skip("needs the data of California")
    for name in kept.PROTOCOLS:
        assert kept.nets("california", name).committed


def test_the_lines_of_the_readme_judge_a_calibration(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(kept.__file__).parents[1].joinpath("nets", "README.md").read_text("utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.setattr(kept, "nets", partial(kept.nets, epochs=3))
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("interval_score") == 3
