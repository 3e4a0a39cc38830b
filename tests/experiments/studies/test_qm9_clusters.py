"""Clusters: labels, the Gram of energies and forces, bars of forces, and the part of the page."""

import copy
import json
import math
from typing import Any

import pytest
import torch
from experiments.atoms.batches import Batch
from experiments.frame.jobs import Job
from experiments.frame.outcome import Outcome, Picture, Table, mean_and_error
from experiments.studies.qm9.clusters import nets
from experiments.studies.qm9.clusters import page as pages
from experiments.studies.qm9.clusters import work as experiment
from experiments.studies.qm9.clusters.structures import (
    FAMILIES,
    SPECIES,
    Family,
    clusters,
    drawn,
    fcc,
    icosahedral,
    labelled,
)
from experiments.training.protocol import Protocol
from torch import Tensor

from experiments.atoms import composition
from experiments.frame import report
from tests.support.numbers_on_pages import unsupported
from tests.support.tensors import close

pytest.importorskip("featomic")
ase = pytest.importorskip("ase")

F64 = torch.float64
TINY = {"train": 12, "valid": 4, "test": 4, "epochs": 15, "force_bin": 40, "energy_bin": 2}


# --- structures and labels ------------------------------------------------------------------------


def test_labels_are_those_of_ase() -> None:
    from ase.calculators.emt import EMT

    data = clusters(Family(sizes=(8, 9), gold=(0.3, 0.6)), 3, seed=0)
    ends = data.structures.ends.tolist()
    for k in range(3):
        part = slice(ends[k], ends[k + 1])
        numbers, positions = (
            x[part].numpy() for x in (data.structures.numbers, data.structures.positions)
        )
        atoms = ase.Atoms(numbers, positions, calculator=EMT())
        assert float(data.energy[k]) == atoms.get_potential_energy()
        close(data.forces[part], torch.as_tensor(atoms.get_forces()), 1e-14)


def test_forces_are_minus_the_slope_of_the_energies() -> None:
    structures = drawn(Family(gold=(0.5, 0.5)), 1, seed=1)
    force, step = labelled(structures).forces, 1e-4
    for atom, axis in ((0, 0), (3, 2), (7, 1)):
        ends = []
        for sign in (1, -1):
            moved = structures.positions.clone()
            moved[atom, axis] += sign * step
            ends.append(
                float(
                    labelled(type(structures)(structures.numbers, moved, structures.counts)).energy
                )
            )
        assert -(ends[0] - ends[1]) / (2 * step) == pytest.approx(
            float(force[atom, axis]), abs=1e-5
        )


@pytest.mark.parametrize("name", list(FAMILIES))
def test_clusters_keep_the_bounds_of_their_family(name: str) -> None:
    family, found = FAMILIES[name], drawn(FAMILIES[name], 60, seed=2)
    assert (int(found.counts.min()), int(found.counts.max())) == family.sizes
    share = found.composition(SPECIES)[:, 1] / found.counts
    half = 0.5 / found.counts
    assert bool((share >= family.gold[0] - half).all() and (share <= family.gold[1] + half).all())
    assert len({*share.tolist()}) > 3
    parts = found.positions.split(found.counts.tolist())
    assert min(float(torch.pdist(part).min()) for part in parts) >= 2.0


def test_the_first_clusters_do_not_depend_on_how_many_are_drawn() -> None:
    few, many = (drawn(Family(), number, seed=3) for number in (4, 9))
    assert few.digest() == many.picked(torch.arange(4)).digest()
    assert few.digest() != drawn(Family(), 4, seed=4).digest()


@pytest.mark.parametrize("sites", [fcc, icosahedral])
def test_the_central_site_has_twelve_neighbours_at_the_distance_one(sites) -> None:
    away = sites().norm(dim=1)
    assert int((away < 1e-9).sum()) == 1
    assert int(((away - 1).abs() < 1e-9).sum()) == 12
    assert not bool(((away > 1e-9) & (away < 1 - 1e-9)).any())


def test_the_amplitude_is_the_spread_of_the_displacements() -> None:
    still, moving = (
        drawn(Family(sizes=(14, 14), amplitudes=(a, a)), 200, seed=5).positions for a in (0.0, 0.1)
    )
    assert float((moving - still).std()) == pytest.approx(0.1, rel=0.03)


# --- the Gram and the bars ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> tuple[nets.FromPositions, list[Batch], list[Batch]]:
    """A net after a few epochs, batches it was trained on and others."""
    family = Family(sizes=(5, 7), gold=(0.3, 0.7))
    data, other = clusters(family, 6, 0), clusters(family, 4, 1)
    baseline = composition.fitted(data.structures, data.energy, SPECIES)
    train, valid = (nets.batches(one, baseline, 2) for one in (data, other))
    return nets.trained(train, valid, 0, Protocol(epochs=3)).net, train, valid


def calibrated(small, forces: bool = True):
    net, train, valid = small
    return nets.fitted(net, train, forces=forces).calibrate(valid, method="paper")


def rows(net: nets.FromPositions, batch: Batch) -> tuple[Tensor, Tensor]:
    """Derivatives by the readouts' weights: of the energies (N, D), of their slopes (3 A, D)."""
    heads = {name: p.detach() for name, p in net.named_parameters() if "readouts" in name}
    inputs = {k: v for k, v in batch.items() if k not in ("y", "slope")}

    def energies(weights: dict[str, Tensor], moving: Tensor) -> Tensor:
        return torch.func.functional_call(net, weights, kwargs={**inputs, "positions": moving})

    def slopes(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.grad(lambda r: energies(weights, r).sum())(inputs["positions"])

    f = torch.func.jacrev(energies)(heads, inputs["positions"])
    g = torch.func.jacrev(slopes)(heads)
    values = torch.cat([f[name].flatten(1) for name in heads], dim=1)
    derivatives = torch.cat([g[name].flatten(2) for name in heads], dim=2).flatten(0, 1)
    return values.detach(), derivatives.detach()


def dense_gram(net: nets.FromPositions, batches: list[Batch], beta: float) -> Tensor:
    total = torch.zeros(128, 128, dtype=F64)
    for batch in batches:
        f, g = rows(net, batch)
        for row, atoms in zip(f, batch["counts"].tolist(), strict=True):
            total += torch.outer(row, row) / atoms
        total += beta * g.T @ g
    return total


def test_the_targets_of_a_batch_belong_to_its_positions(small) -> None:
    from ase.calculators.emt import EMT

    _, train, _ = small
    for batch in train:
        kinds = torch.tensor(SPECIES).repeat_interleave(batch["sizes"])
        for k in range(len(batch["counts"])):
            own = batch["owners"] == k
            atoms = ase.Atoms(kinds[own].numpy(), batch["positions"][own].numpy(), calculator=EMT())
            close(-batch["slope"][own], torch.as_tensor(atoms.get_forces()))


def test_the_loss_is_that_of_the_docstring(small) -> None:
    net, train, _ = small
    energies = forces = 0.0
    for batch in train:
        energy, slope = (x.detach() for x in nets.energies_and_slopes(net, batch))
        for k, atoms in enumerate(batch["counts"].tolist()):
            own = batch["owners"] == k
            energies += float((energy[k] - batch["y"][k]) ** 2) / atoms
            forces += 0.01 * float(((slope - batch["slope"])[own] ** 2).sum())
    assert nets.BETA == 0.01
    assert nets.mean_terms(net, train) == pytest.approx((energies / 6, forces / 6), rel=1e-12)


def test_training_lowers_both_terms(small) -> None:
    _, train, valid = small
    before = nets.mean_terms(nets.net_for(train, 0), train)
    after = nets.mean_terms(nets.trained(train, valid, 0, Protocol(epochs=15)).net, train)
    assert after[0] < 0.5 * before[0] and after[1] < 0.5 * before[1]


@pytest.mark.parametrize("forces", [True, False])
def test_the_gram_has_the_weights_of_the_loss(small, forces: bool) -> None:
    net, train, _ = small
    uq = nets.fitted(net, train, forces=forces)
    close(uq.gram.matrix, dense_gram(net, train, nets.BETA if forces else 0.0))


def test_the_gram_is_the_curvature_of_half_the_summed_loss(small) -> None:
    """Second derivative of the training loss itself, by the readouts' weights along a direction."""
    net, train, _ = small
    heads = {name: p.detach() for name, p in net.named_parameters() if "readouts" in name}
    random = torch.Generator().manual_seed(0)
    along = {k: torch.randn(p.shape, generator=random, dtype=F64) for k, p in heads.items()}
    ends = []
    for step in (-1.0, 0.0, 1.0):  # the loss is quadratic in these weights: any step will do
        for name, p in net.named_parameters():
            if name in heads:
                p.data = heads[name] + step * along[name]
        ends.append(6 * sum(nets.mean_terms(net, train)))
    for name, p in net.named_parameters():
        if name in heads:
            p.data = heads[name]
    curvature = (ends[0] - 2 * ends[1] + ends[2]) / 2
    v = torch.cat([p.flatten() for p in along.values()])
    gram = nets.fitted(net, train, forces=True).gram.matrix
    assert curvature == pytest.approx(float(v @ gram @ v), rel=1e-8)


@pytest.mark.parametrize("forces", [True, False])
def test_bars_of_forces_equal_the_dense_solution(small, forces: bool) -> None:
    net, train, valid = small
    uq = calibrated(small, forces)
    h = dense_gram(net, train, nets.BETA if forces else 0.0) + uq.ridge * torch.eye(128, dtype=F64)
    g = torch.cat([rows(net, batch)[1] for batch in valid])
    f = torch.cat([rows(net, batch)[0] for batch in valid])
    q = {"forces": (g * torch.linalg.solve(h, g.T).T).sum(1)}
    q["energy"] = (f * torch.linalg.solve(h, f.T).T).sum(1)
    found = experiment.bars(uq, valid)
    errors = found["forces"].target - found["forces"].mean
    scale = (errors.square() / q["forces"]).mean().sqrt()
    close(found["forces"].std, scale * q["forces"].sqrt())
    close(found["energy"].std, uq.scale * q["energy"].sqrt())


def test_means_and_targets_are_forces_and_energies(small) -> None:
    net, _, valid = small
    uq = calibrated(small)
    found = experiment.bars(uq, valid)
    pairs = [nets.energies_and_slopes(net, batch) for batch in valid]
    close(found["energy"].mean, torch.cat([e for e, _ in pairs]).detach())
    close(found["forces"].mean, -torch.cat([s for _, s in pairs]).flatten())
    assert torch.equal(found["forces"].target, -nets.joined(valid, "slope"))


def test_members_scatter_about_the_exact_bars_as_their_number_says(small) -> None:
    _, _, valid = small
    uq = calibrated(small)
    found = experiment.of_members(uq, valid, 64, seed=0)
    assert found["expected"] == pytest.approx(1 / math.sqrt(128))
    assert found["error"] == pytest.approx(found["expected"], rel=0.25)
    assert found["components"] == nets.joined(valid, "slope").numel()


def test_a_member_is_the_net_with_other_readouts(small) -> None:
    net, _, valid = small
    uq = calibrated(small)
    ensemble = uq.ensemble(3, generator=torch.Generator().manual_seed(0))
    (inputs,) = nets.bare(valid[:1])
    _, g = rows(net, valid[0])
    _, own = nets.energies_and_slopes(net, valid[0])
    expected = own.flatten() + (g @ ensemble.deviations[:, 0].T).T
    close(experiment.member_slopes(ensemble, inputs).flatten(1), expected)


# --- scores and the page --------------------------------------------------------------------------


def test_bars_of_the_right_size_are_covered_and_gain_over_a_constant() -> None:
    random = torch.Generator().manual_seed(0)
    std = torch.rand(4000, generator=random, dtype=F64) + 0.1
    error = std * torch.randn(4000, generator=random, dtype=F64)
    bars = experiment.Rows(torch.zeros_like(std), std, error)
    found = experiment.scored(bars, float(error.square().mean().sqrt()), 100, shown=True)
    own = found["scores"]
    assert [own[f"coverage_{k}"] for k in (68, 90, 95)] == pytest.approx(
        [0.68, 0.9, 0.95], abs=0.02
    )
    assert own["bar"] == pytest.approx(own["rmse"], rel=0.05)
    assert own["gain"] > 0.05 and len(found["bins"]["mse"]) == 40
    assert found["constant"]["scores"]["bar"] == pytest.approx(own["rmse"], rel=1e-12)


@pytest.fixture(scope="module")
def runs() -> list[dict]:
    """A true run, and a made one whose numbers are a tenth larger."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "COMPARED", 1)
        run = Job("one", experiment.measured, {"seed": 0, **TINY})().value
    return [run, {**larger(run), "settings": run["settings"]}]


def larger(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: larger(entry) for key, entry in value.items()}
    return [larger(entry) for entry in value] if isinstance(value, list) else 1.1 * value


def test_growth_is_the_ratio_of_errors_and_of_bars(runs) -> None:
    run = runs[0]
    for what in ("energy", "forces"):
        grown = run["growth"]["nll"]["distorted"][what]
        near, far = (run["families"][k][what]["nll"]["scores"] for k in ("like", "distorted"))
        assert grown["bar"] == pytest.approx(far["bar"] / near["bar"])
        assert grown["rmse"] == pytest.approx(far["rmse"] / near["rmse"])
        assert grown["share"] == pytest.approx(grown["bar"] / grown["rmse"])


def test_the_ways_share_their_nets_and_differ_in_their_bars(runs) -> None:
    for what in ("energy", "forces"):
        one = runs[0]["families"]["like"][what]
        assert len({way["scores"]["rmse"] for way in one.values()}) == 1
        assert len({way["scores"]["bar"] for way in one.values()}) > 1  # a floor may be zero
    shares = runs[0]["loss"]["share"], runs[0]["gram"]["share"]
    assert all(0.05 < share < 0.98 for share in shares)


def test_seeds_are_averaged_and_compared_net_by_net(runs) -> None:
    found = experiment.together(runs)

    def values(way: str) -> list[float]:
        return [run["families"]["gold"]["forces"][way]["scores"]["nll"] for run in runs]

    own = found["families"]["gold"]["forces"]["by_bins"]["scores"]["nll"]
    assert own == pytest.approx(mean_and_error(values("by_bins")))
    apart = [a - b for a, b in zip(values("by_bins"), values("nll"), strict=True)]
    difference = found["differences"]["by_bins"]["gold"]["forces"]["nll"]
    assert difference == pytest.approx(mean_and_error(apart))
    first = runs[0]["families"]["gold"]["forces"]["nll"]
    assert found["families"]["gold"]["forces"]["nll"]["points"] == first["points"]
    assert found["settings"]["seeds"] == 2


def test_every_number_of_the_page_stands_in_the_json(runs) -> None:
    found = experiment.together(runs)
    page = pages.entries(found)
    outcome = Outcome("Clusters", {"clusters": found}, page)
    stored = json.loads(report.rendered_numbers(outcome))
    tables = [block for block in page if isinstance(block, Table)]
    assert len(tables) == 5
    assert not unsupported("\n\n".join(map(str, tables)), stored)
    assert not any("nan" in str(cell) for table in tables for row in table.rows for cell in row)
    texts = [block for block in page if isinstance(block, str)]
    texts += [table.caption for table in tables] + [picture.caption for picture in outcome.pictures]
    lines = " ".join(" ".join(texts).split()).replace("|", " ")
    assert not unsupported(f"| text |\n| --- |\n| {lines} |", stored)
    for picture in outcome.pictures:
        assert report.checked_png(picture).startswith(b"\x89PNG")
    assert len(outcome.pictures) == 3


def test_a_single_seed_gives_a_page_without_errors_of_means(runs) -> None:
    page = pages.entries(experiment.together(runs[:1]))
    assert "nan" not in " ".join(str(block) for block in page if not hasattr(block, "figure"))


def test_pictures_of_many_points_are_small_enough(runs) -> None:
    random = torch.Generator().manual_seed(0)
    many = copy.deepcopy(runs)
    for one in many[0]["families"].values():
        std, error = torch.randn(2, 1500, generator=random, dtype=F64).exp().tolist()
        one["forces"]["nll"]["points"] = {"std": std, "error": error, "rows": 1500}
    found = experiment.together(many)
    kept = found["families"]["like"]["forces"]["nll"]["points"]
    assert len(kept["std"]) == len(kept["error"]) == 500 and kept["rows"] == 1500
    figure = pages.points(found, "forces")
    assert report.checked_png(Picture("forces", figure, ""))


def test_the_growth_sentence_follows_the_numbers() -> None:
    grown = {
        "distorted": {"bar": [5.0, 0.1], "rmse": [10.0, 0.1], "share": [0.5, 0.01]},
        "gold": {"bar": [3.0, 0.1], "rmse": [3.0, 0.1], "share": [1.0, 0.03]},
    }
    text = pages._growth("forces", grown)
    assert "too small for *more distorted*" in text
    assert "not clearly off for *rich in gold*" in text and "too large" not in text


def test_sizes_stand_in_one_place() -> None:
    names = {"seeds", *TINY}
    assert names == {*experiment.QUICK} == {*experiment.FULL}
