"""The page of parts: what each brings in and outside the domain."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.judging.predictive import row_scores, summary
from experiments.studies.ablation import page, work
from experiments.studies.ablation import run as experiment

from experiments import __main__ as command
from experiments.data import california, outside, uci
from experiments.judging import error_bars
from experiments.training import kept
from tests.support.numbers_on_pages import unsupported


def test_every_form_is_judged_on_both_sides(synthetic: Path) -> None:
    asked = {"count": 2, "seed": 0, "epochs": 4, "nets": ""}
    found = work.judged_forms("outside", "energy", **asked)
    assert set(found["forms"]) == set(work.FORMS) == set(page.LABELS)
    stack = kept.nets("outside", "energy", count=2, epochs=4).stack
    divided = outside.drawn("energy", 2)
    for k, inside in enumerate(divided.inside):
        train, valid, (x, y) = ((a[k], b[k]) for a, b in divided.samples.parts)
        uq = error_bars.fitted(stack.module(k), train)
        error_bars.calibrated(uq, valid, error_bars.PAPER)
        rows = row_scores(uq.predict(x), y).in_unit(float(divided.samples.unit[k]))
        own = found["forms"]["paper"][k]
        for side, mask in (("inside", inside), ("outside", ~inside)):
            for name, value in summary(rows.picked(mask)).items():
                assert own[side][name] == pytest.approx(value, nan_ok=True)
        far, near = rows.bar[~inside], rows.bar[inside]
        larger = (far[:, None] > near).double() + 0.5 * (far[:, None] == near).double()
        assert own["auroc"] == pytest.approx(float(larger.mean()))
    assert found["rows"]["inside"] + found["rows"]["outside"] == found["rows"]["test"]
    assert len(found["auroc"]) == 2 and all(0 <= value <= 1 for value in found["auroc"])


def test_sets_without_a_domain_have_one_side(synthetic: Path) -> None:
    found = work.judged_forms("uci", "yacht", count=2, seed=0, epochs=4, nets="")
    assert set(found["forms"]["all"][0]) == {"inside", "auroc"}
    assert found["auroc"] == [] and found["forms"]["all"][0]["auroc"] is None


def test_california_is_judged_on_its_own_sides(synthetic: Path, monkeypatch) -> None:
    monkeypatch.setattr(work, "FORMS", {"paper": error_bars.PAPER})
    found = work.judged_forms("california", "relu", count=2, seed=0, epochs=2, nets="")
    samples = california.drawn(2, 0, california.OUT_OF_DOMAIN, restricted=True)
    assert found["rows"]["inside"] == int(samples.inside[0].sum())
    assert set(found["forms"]["paper"][1]) == {"inside", "outside", "auroc"}


def test_the_domain_is_four_fifths_along_the_first_principal_direction(synthetic: Path) -> None:
    rows = uci.read("energy")
    inside = outside.domain(rows)
    assert inside.mean() == pytest.approx(0.8, abs=0.01)
    z = (rows.x - rows.x.mean(0)) / rows.x.std(0)
    values, vectors = np.linalg.eigh(z.T @ z)
    direction = vectors[:, values.argmax()]
    along = z @ (direction * np.sign(direction[np.abs(direction).argmax()]))
    assert along[inside].max() <= along[~inside].min()
    divided = outside.drawn("energy", 3)
    assert divided.inside.shape == divided.samples.parts[2][1].shape[:2]
    assert 0 < float(divided.inside.double().mean()) < 1


def test_no_row_from_outside_is_trained_or_calibrated_on(synthetic: Path) -> None:
    rows = uci.read("energy")
    far = torch.from_numpy(rows.y[~outside.domain(rows)])
    divided = outside.drawn("energy", 2)
    for k in range(2):
        splits = rows.random(k, outside.SEED).within(outside.domain(rows))
        unit, centre = float(divided.samples.unit[k]), rows.y[splits.train].mean()
        for part in divided.samples.parts[:2]:
            seen = part[1][k, :, 0].double() * unit + centre
            assert not bool(torch.isclose(seen[:, None], far, rtol=0, atol=1e-5).any())


def entry_of(paper: list[float], full: list[float]) -> dict[str, Any]:
    def one(nll: float, coverage: float) -> dict[str, Any]:
        side = {"rmse": 1.0, "nll": nll, "crps": 1.0, "coverage_90": coverage}
        side |= {"interval_score": 1.0, "fifths_of_bar": [0.9] * 5}
        return {"inside": side, "outside": {**side, "nll": nll + 1}, "auroc": 0.5}

    forms = {form: [one(value, 0.8) for value in paper] for form in work.FORMS}
    forms["all"] = [one(value, 0.7) for value in full]
    rows = {"train": 80, "valid": 10, "test": 10, "inside": 8, "outside": 2}
    part = {"forms": forms, "rows": rows, "auroc": [0.9, 0.7], "committed": True, "seconds": 1}
    return experiment.entry(part)


def test_parts_are_compared_net_by_net() -> None:
    found = entry_of([1.0, 2.0], [0.5, 1.7])
    mean, error = found["differences"]["all - paper"]["inside"]["nll"]
    differences = np.array([-0.5, -0.3])
    assert mean == pytest.approx(differences.mean())
    assert error == pytest.approx(differences.std(ddof=1) * np.sqrt(1 / 2 + 1 / 9))
    assert found["differences"]["all - mixture"]["outside"]["nll"][0] == pytest.approx(mean)
    assert found["forms"]["all"]["inside"]["nll"][0] == pytest.approx(1.1)
    assert found["auroc"][0] == pytest.approx(0.8)


def test_the_page_names_the_cost_of_the_guard_and_the_worst_case() -> None:
    found = {"outside, energy": entry_of([1.0, 2.0], [1.2, 2.0]), "uci, yacht": entry_of([1], [1])}
    text = page.conclusion(found)
    assert "at most 0.100 nats per row (energy, domain). The average change is 0.050" in text
    assert "domain of energy, domain" not in text and "cover 70 %" in text
    assert "the paper's form 80 %" in text


def test_a_quick_run_writes_the_page(synthetic: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        experiment, "QUICK", experiment.Sizes(("wine",), ("energy",), (), 2, 2, epochs=4)
    )
    assert command.main(["ablation", "--quick", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "ablation.json").read_text())
    assert set(numbers) == {"uci, wine", "outside, energy"}
    assert "cell" in numbers["uci, wine"]["forms"]["all"]["inside"]
    text = (tmp_path / "ablation.md").read_text(encoding="utf-8")
    assert unsupported(text, numbers) == []
    assert "Trained by this run" in text and "Where it fails" in text
