"""Nets that know their data and others, and the page on what tells them apart."""

import json
from pathlib import Path

import pytest
import torch
from experiments.studies.novelty import page, run, tasks, work

from experiments import __main__ as command
from tests.support.numbers_on_pages import unsupported


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_every_net_takes_all_its_data(name: str) -> None:
    case = tasks.TASKS[name](3)
    net = tasks.trained(case, 2)
    for data in (case.train, case.valid, case.inside, *case.unlike.values()):
        for inputs, y in data:
            assert net(*inputs).shape == y.shape
    assert len(case.unlike) >= 1


def test_data_that_are_unlike_are_unlike_by_what_their_name_says() -> None:
    graph = tasks.graph(0)
    for inputs, _ in graph.train:
        assert int(inputs[1].max()) == 1
    for inputs, _ in graph.unlike["an atom of an unseen kind"]:
        kinds, cluster = inputs[1], inputs[2]
        each = torch.zeros(64).index_add(0, cluster, (kinds == 2).float())
        assert bool((each == 1).all())
    sequences = tasks.transformer(0)
    assert max(int(inputs[0].max()) for inputs, _ in sequences.train) < tasks.KNOWN
    strange = sequences.unlike["a third of unseen tokens"][0][0][0]
    share = float((strange >= tasks.KNOWN).float().mean())
    assert share == pytest.approx(1 / 3)


def test_what_is_compared_are_ranks_shares_and_layers() -> None:
    class Report:
        novelty_usual = 2.0

    class Fit:
        calibration_report = Report()

    def answers(values: list[float], held: list[bool]) -> dict:
        return {
            "softness": torch.tensor(values),
            "novelty": torch.tensor(values),
            "input": 9 - torch.tensor(values),
            "layer": ["a", "b", "b"],
            "held": torch.tensor(held),
        }

    found = work._compared(
        Fit(), answers([0.0, 1.0, 3.0], [True] * 3), answers([4.0, 5.0, 1.5], [True, False, False])
    )
    assert found["auroc"]["novelty"] == pytest.approx(8 / 9)
    assert found["auroc"]["input"] == pytest.approx(1 / 9)
    assert found["flagged"] == {"inside": pytest.approx(1 / 3), "outside": pytest.approx(2 / 3)}
    assert found["held"] == {"inside": 1.0, "outside": pytest.approx(1 / 3)}
    assert found["layer"] == "b"


def test_a_net_behind_a_layer_norm_is_told_by_its_inputs_alone() -> None:
    """Without training: the norm hides the size whatever the weights are."""
    found = work.of_kind("layer norm", seeds=1, seed=1, steps=1)["unlike"]["three times as large"]
    assert found[0]["auroc"]["novelty"] > 0.95
    assert 0.35 < found[0]["auroc"]["softness"] < 0.65


def test_a_quick_run_writes_the_page(synthetic: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "QUICK", run.Sizes(("energy",), 1, 4, ("layer norm",), 1, 2))
    assert command.main(["novelty", "--quick", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "novelty.json").read_text())
    text = (tmp_path / "novelty.md").read_text(encoding="utf-8")
    assert unsupported(text, numbers) == []
    assert numbers["settings"]["nets"] == 6 and "6 networks on domains" in text
    assert "Conclusion" in text


def test_the_rigidity_is_named_where_it_sees_more() -> None:
    one = {
        "auroc": {"softness": 0.9, "input": 0.5, "novelty": 0.6},
        "flagged": {"inside": 0.0, "outside": 0.0},
        "held": {"inside": 0.9, "outside": 0.9},
        "layer": "the input",
    }
    found = {"all": {"a": one, "b": one}, "kinds": {"graph": {"unlike": {"squeezed": one}}}}
    assert "The rigidity sees more than novelty in: graph (squeezed)" in page.conclusion(found)
