"""Parts of the experiment on molecules: novelty, pictures of atoms, learning curves, forces."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.atoms.batches import Environments, loss_weight
from experiments.atoms.spectrum import power_spectrum
from experiments.atoms.structures import Structures
from experiments.frame.outcome import Table
from experiments.studies.qm9.forces import page as forces_page
from experiments.studies.qm9.forces import work as forces
from experiments.studies.qm9.learning import page as learning_page
from experiments.studies.qm9.learning import work as learning
from experiments.studies.qm9.novelty import page as novelty_page
from experiments.studies.qm9.novelty import work as novelty
from experiments.studies.qm9.pictures import page as pictures_page
from experiments.studies.qm9.pictures import work as pictures

import rigidities as rg
from experiments.atoms import bpnn, samples
from rigidities import selection
from tests.support import synthetic_data
from tests.support.numbers_on_pages import unsupported

pytest.importorskip("ase")
pytest.importorskip("featomic")

from ase.build import molecule

from ase import Atoms


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("qm9")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIGIDITIES_DATA", str(synthetic_data.write(path / "data")))
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        yield path


@dataclass(frozen=True)
class Fitted:
    uq: rg.LastLayerRigidity
    train: Environments
    test: Environments
    structures: Structures  # of the test molecules


@pytest.fixture(scope="module")
def fitted(folder: Path) -> Fitted:
    """An untrained net whose bars are those of its own last layer."""
    with samples.drawn(0, 0, train=120, valid=40, molecules=220) as data:
        train, valid, test = (data.environments(r) for r in (data.train, data.valid, data.test))
        structures = data.molecules.structures.picked(data.test)
    net = bpnn.drawn(5, train.x.shape[1], 0)
    net.standardise(train.x)
    uq = rg.LastLayerRigidity(net.eval(), forward=forces.energies)
    uq.fit(train.batches(32), sample_weight=loss_weight)
    uq.calibrate(valid.batches(32), method="paper")
    return Fitted(uq, train, test, structures)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda tensor: tensor.tolist()))


def of(*frames: Atoms) -> Structures:
    return Structures.from_ase(list(frames))


def cubane() -> Atoms:
    corners = np.array(list(itertools.product([-1, 1], repeat=3)))
    return Atoms("C8H8", [*(corners * 0.785), *(corners * 1.42)])


def ammonium() -> Atoms:
    corners = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    return Atoms("NH4", [np.zeros(3), *(corners * 1.02 / math.sqrt(3))])


# --- novelty -------------------------------------------------------------------------------------

KNOWN = {
    "CH4": {"no ring", "only C and H"},
    "H2O": {"no ring", "contains O"},
    "C2H2": {"no ring", "triple bond", "only C and H"},
    "CH3CN": {"no ring", "triple bond", "contains N"},
    "CO2": {"no ring", "contains O"},
    "C2H4": {"no ring", "only C and H"},
    "CF4": {"no ring", "contains F"},
    "C6H6": {"one ring", "6-ring", "only C and H"},
    "C5H5N": {"one ring", "6-ring", "contains N"},
    "C3H6_D3h": {"one ring", "3-ring", "only C and H"},
    "cyclobutane": {"one ring", "4-ring", "only C and H"},
    "C4H4O": {"one ring", "5-ring", "contains O"},
    "bicyclobutane": {"two rings", "3-ring", "two rings that share atoms", "only C and H"},
    "C5H8": {"two rings", "3-ring", "two rings that share atoms", "only C and H"},
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_molecules_are_of_their_kinds(name: str) -> None:
    found = novelty.kinds(of(molecule(name)))
    assert {kind for kind, mask in found.items() if mask[0]} == KNOWN[name]


def test_cubane_is_a_cage_of_five_rings_of_four() -> None:
    found = novelty.kinds(of(cubane()))
    cage = "three or more rings that share atoms"
    assert {kind for kind, mask in found.items() if mask[0]} == {
        "three rings or more",
        "4-ring",
        cage,
        "only C and H",
    }
    graph = novelty.graphs(of(cubane()))
    assert novelty.rings(graph.bonds, graph.heavy).tolist() == [5]


def test_two_rings_apart_do_not_share_atoms() -> None:
    one = molecule("C3H6_D3h")
    two = one.copy()
    two.translate([4.0, 0, 0])
    found = novelty.kinds(of(one + two))
    assert found["two rings"][0] and not found["two rings that share atoms"][0]


def test_nitrogen_with_four_bonds_is_found() -> None:
    found = novelty.kinds(of(ammonium(), molecule("NH3")))
    assert found["zwitterion (N with four bonds)"].tolist() == [True, False]


def test_kinds_depend_on_neither_the_order_of_atoms_nor_the_other_molecules(monkeypatch) -> None:
    frames = [molecule(name) for name in KNOWN]
    rng = np.random.default_rng(0)
    shuffled = of(*(frame[rng.permutation(len(frame))] for frame in frames))
    monkeypatch.setattr(novelty, "CHUNK", 3)
    for kind, mask in novelty.kinds(shuffled).items():
        alone = torch.cat([novelty.kinds(of(frame))[kind] for frame in frames])
        assert torch.equal(mask, alone), kind


def shortest_cycle(neighbours: list[set[int]], i: int, j: int) -> int:
    """Breadth first, from i to j without their bond; 0 where there is no way."""
    depth, front = {i: 1}, [i]
    while front:
        here = front.pop(0)
        for there in neighbours[here] - ({j} if here == i else set()):
            if there not in depth:
                depth[there] = depth[here] + 1
                front.append(there)
    return depth.get(j, 0)


def test_smallest_rings_equal_a_search_of_every_bond() -> None:
    generator = torch.Generator().manual_seed(0)
    graphs = torch.rand(40, 9, 9, generator=generator) < 0.16
    graphs = (graphs | graphs.mT) & ~torch.eye(9, dtype=torch.bool)
    found = novelty.smallest_rings(graphs)
    for bonds, sizes in zip(graphs, found, strict=True):
        neighbours = [set(row.nonzero()[:, 0].tolist()) for row in bonds]
        for i, j in itertools.product(range(9), repeat=2):
            expected = shortest_cycle(neighbours, i, j) if bonds[i, j] else 0
            assert int(sizes[i, j]) == expected
    assert len(found.unique()) > 4


def test_rare_kinds_come_first_with_their_errors_and_bars() -> None:
    train = {"a": torch.tensor([1, 1, 0, 0]).bool(), "b": torch.tensor([1, 0, 0, 0]).bool()}
    test = {"a": torch.tensor([1, 1, 0]).bool(), "b": torch.tensor([0, 1, 1]).bool()}
    train["c"], test["c"] = torch.zeros(4).bool(), torch.zeros(3).bool()
    errors, std = torch.tensor([3.0, -4.0, 0.0]), torch.tensor([1.0, 1.0, 7.0])
    first, second = novelty.groups(train, test, errors, std)
    assert (first["kind"], first["share"], first["molecules"]) == ("b", 0.25, 2)
    assert first["rmse"] == pytest.approx(math.sqrt(8)) and first["bar"] == pytest.approx(5)
    assert first["ratio"] == pytest.approx(math.sqrt(8) / 5)
    assert (second["kind"], second["bar"]) == ("a", pytest.approx(1))


def test_errors_by_size_count_atoms_and_heavy_atoms() -> None:
    structures = of(molecule("CH4"), molecule("C2H2"), molecule("C2H6"), molecule("NH3"))
    errors, std = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4)
    found = novelty.by_size(structures, errors, std)
    assert [row["size"] for row in found["atoms"]] == [4, 5, 8]
    assert [row["rmse"] for row in found["atoms"]] == pytest.approx([math.sqrt(10), 1, 3])
    assert [(row["size"], row["molecules"]) for row in found["heavy"]] == [(1, 2), (2, 2)]


def test_the_page_of_novelty_rounds_stored_numbers(fitted: Fitted) -> None:
    prediction = fitted.uq.predict(fitted.test.batches(32))
    errors = prediction.mean - fitted.test.y
    kinds = novelty.kinds(fitted.structures)
    found = {
        "kinds": novelty.groups(kinds, kinds, errors, prediction.std),
        "sizes": novelty.by_size(fitted.structures, errors, prediction.std),
    }
    check_page(novelty_page.entries(as_json(found)), as_json(found))


def check_page(page: list[Any], stored: Any) -> None:
    """Tables say what is stored, and the figures are not empty."""
    tables = "\n\n".join(str(block) for block in page if isinstance(block, Table))
    assert not unsupported(tables, stored)
    for picture in (block for block in page if hasattr(block, "figure")):
        assert any(ax.has_data() for ax in picture.figure.axes) and picture.caption


# --- pictures ------------------------------------------------------------------------------------


def test_the_smallest_median_and_largest_bars_are_shown() -> None:
    std = torch.arange(101.0).flip(0)
    found = pictures.chosen(std, 2)
    assert std[found["smallest"]].tolist() == [0, 1]
    assert std[found["median"]].tolist() == [49, 50]
    assert std[found["largest"]].tolist() == [100, 99]


def test_bars_of_atoms_equal_the_dense_quadratic_form_in_the_order_of_the_atoms(fitted) -> None:
    uq, net = fitted.uq, fitted.uq.model
    place = int(fitted.test.counts.argmax())
    own = fitted.test.picked(torch.tensor([place]))
    inverse = torch.linalg.inv(uq.gram.matrix + uq.ridge * torch.eye(320).double())
    expected = []
    for x, kind in zip((own.x - net.level) / net.spread, own.species.tolist(), strict=True):
        f = torch.zeros(320).double()
        f[64 * kind : 64 * kind + 64] = net.nets[kind](x).detach()
        expected.append(float(uq.scale) * float(f @ inverse @ f) ** 0.5)
    found = pictures.of_atoms(uq, own)
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-7, atol=0)
    assert len(own.species.unique()) > 2


def test_a_flat_molecule_is_seen_flat_and_no_distance_changes() -> None:
    benzene = molecule("C6H6")
    benzene.rotate(50, "x")
    flat = pictures_page.flattened(benzene.positions)
    assert np.abs(flat[:, 2]).max() < 1e-6
    seen = pictures_page.projected(cubane().positions)
    apart = [np.linalg.norm(r[:, None] - r[None], axis=-1) for r in (seen, cubane().positions)]
    np.testing.assert_allclose(*apart, atol=1e-12)


def test_a_tilt_uncovers_hidden_atoms() -> None:
    positions = [[0, 0, 0.5], [0, 0, -0.5], [2.0, 0, 0], [-2.0, 0, 0], [0, 1.5, 0], [0, -1.5, 0]]
    flat = pictures_page.flattened(positions)
    seen = pictures_page.projected(positions)
    assert pictures_page.hidden(seen) < 0.8 * pictures_page.hidden(flat)


def test_the_picture_shows_every_atom_and_bond_from_json_alone(fitted: Fitted) -> None:
    prediction = fitted.uq.predict(fitted.test.batches(32))
    errors = prediction.mean - fitted.test.y
    found = as_json(
        pictures.shown(fitted.uq, fitted.test, fitted.structures, prediction.std, errors)
    )
    assert [one["which"] for one in found] == ["smallest"] * 2 + ["median"] * 2 + ["largest"] * 2
    assert found[0]["bar"] == float(prediction.std.min())
    (picture,) = pictures_page.entries(found)
    drawn = {ax.get_title(loc="center"): ax for ax in picture.figure.axes}
    assert len(found[0]["points"]["bonds"]) == len(found[0]["points"]["numbers"]) - 1  # a tree
    for one in found:
        (ax,) = (ax for title, ax in drawn.items() if f"bar {one['bar']:.2f}" in title)
        assert len(ax.patches) == len(one["points"]["numbers"])
        assert len(ax.lines) == 2 * len(one["points"]["bonds"])


# --- learning curves -----------------------------------------------------------------------------


SIZES = learning.QUICK | {"start": 15, "batch": 8, "pool": 40, "valid": 20, "test": 20}
SIZES |= {"steps": 4, "checks": 2, "molecules": 90}


@pytest.fixture(scope="module")
def curves(folder: Path) -> dict[str, list[dict[str, list[float]]]]:
    return {
        way: [as_json(learning.curve(seed=0, strategy=way, **SIZES))] for way in learning.STRATEGIES
    }


def test_ways_of_choosing_start_from_the_same_net(curves: dict[str, Any]) -> None:
    for way in ("greedy", "top"):
        for one, other in zip(curves[way], curves["random"], strict=True):
            assert all(math.isfinite(value) for value in one["rmse"])
            assert one["labels"] == other["labels"] == [15, 23]
            assert one["rmse"][0] == other["rmse"][0] and one["bar"][0] == other["bar"][0]
            assert one["rmse"][1] != other["rmse"][1]


def test_the_page_of_learning_rounds_stored_numbers(curves: dict[str, Any]) -> None:
    found = as_json(learning.together(curves, SIZES))
    check_page(learning_page.entries(found), found)


def test_differences_are_taken_seed_by_seed() -> None:
    def of_seed(*values: float) -> dict[str, list[float]]:
        names = (*learning.ERRORS, "bar")
        return {"labels": [10, 20, 30], **{name: list(values) for name in names}}

    curves = {
        "random": [of_seed(10, 8, 6), of_seed(20, 15, 12)],
        "greedy": [of_seed(10, 7, 4), of_seed(20, 14, 8)],
    }
    found = learning.together(curves, {})["strategies"]
    assert found["random"]["rmse"][0] == [15.0, 5.0] and "less_random" not in found["random"]
    less = found["greedy"]["less_random"]["rmse"]
    assert less["last"] == [-3.0, 1.0] and less["rounds"][1] == [-1.0, 0.0]
    assert less["all_rounds"] == [-2.0, 0.5]


def task(fitted: Fitted) -> learning.Task:
    """The pool are the test molecules; the rest is not looked at."""
    pool = replace(fitted.test, y=fitted.test.y)
    structures = dict.fromkeys(("pool", "valid", "test"), fitted.structures)
    rare = dict.fromkeys(structures, torch.zeros(len(pool)).bool())
    return learning.Task(pool, pool, pool, structures, rare)


def test_greedy_choice_weighs_molecules_as_the_loss_does(fitted: Fitted) -> None:
    own = task(fitted)
    free = torch.arange(5, len(own.pool))
    order = torch.Generator().manual_seed(0)
    found = learning.places_to_label("greedy", fitted.uq, own, free, 6, order)
    rows = fitted.uq.features(own.pool.batches(32))
    weights = 1 / own.pool.counts[free].double()
    best = selection.greedy(fitted.uq.posterior, rows[free], 6, weights=weights, of=rows)
    assert found.tolist() == best.indices.tolist()
    largest = learning.places_to_label("top", fitted.uq, own, free, 4, order)
    std = fitted.uq.predict(own.pool.picked(free).batches(32)).std
    assert largest.tolist() == std.topk(4).indices.tolist()
    any_six = learning.places_to_label("random", fitted.uq, own, free, 6, order)
    assert len(set(any_six.tolist())) == 6


def test_energies_that_are_not_labelled_do_not_reach_the_baseline(fitted: Fitted) -> None:
    own, labelled = task(fitted), torch.arange(30)
    y = own.pool.y.clone()
    y[30:] += 1000
    other = replace(own, pool=replace(own.pool, y=y))
    first, second = (learning.with_baseline(one, labelled).pool.y for one in (own, other))
    assert torch.equal(first[:30], second[:30])
    torch.testing.assert_close(
        second[30:] - first[30:], torch.full((len(y) - 30,), 1000.0).double()
    )


def test_more_steps_bring_the_loss_down(fitted: Fitted) -> None:
    own = learning.with_baseline(task(fitted), torch.arange(40))
    losses = []
    for steps in (2, 30):
        net = learning.trained(own, torch.arange(40), 0, steps=steps, checks=2)
        losses.append(learning.fitting.mean_loss(net, own.pool))
    assert losses[1] < 0.9 * losses[0]


# --- forces --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case(fitted: Fitted) -> forces.Case:
    place = int((fitted.structures.counts >= 7).nonzero()[0])
    return forces.Case.of(fitted.uq, fitted.structures.picked(torch.tensor([place])), 0)


def test_one_fit_serves_descriptors_and_positions(fitted: Fitted, case: forces.Case) -> None:
    net = fitted.uq.model
    x = power_spectrum(case.batch["values"])
    arguments = {name: case.batch[name] for name in ("sizes", "owners", "counts")}
    torch.testing.assert_close(
        forces.energies(net, case.batch), net(x, **arguments), rtol=1e-12, atol=0
    )
    bars = [fitted.uq.predict([one]).std for one in ({"x": x, **arguments}, case.batch)]
    torch.testing.assert_close(*bars, rtol=1e-10, atol=0)


def test_bars_of_forces_equal_brute_force(case: forces.Case) -> None:
    assert forces.difference(case.dense(), case.exact()) < 1e-8
    assert forces.difference(1.01 * case.dense(), case.exact()) > 1e-3


def test_members_one_by_one_at_once_and_by_their_energies_agree(fitted, case) -> None:
    torch.testing.assert_close(case.loop(8), case.batched(8), rtol=1e-9, atol=1e-12)
    _, features = case.graph()
    draw = torch.Generator().manual_seed(0)
    ensemble = fitted.uq.ensemble(max(forces.MEMBERS), generator=draw)
    net = fitted.uq.model
    weights = torch.cat([readout.weight[0] for readout in net.readouts])
    members = features @ (weights + case.members).T
    torch.testing.assert_close(ensemble(case.batch)[:, 0], members, rtol=1e-9, atol=1e-9)


def test_ensembles_miss_the_exact_bars_by_their_sampling_error(fitted, case) -> None:
    for row in forces.compared([case], [case.exact()]):
        assert row["expected"] == pytest.approx((2 * row["members"]) ** -0.5)
        assert 0.3 * row["expected"] < row["error"] < 2.5 * row["expected"]


def test_molecules_of_all_sizes_are_taken_once() -> None:
    counts = torch.tensor([5, 3, 9, 5, 5, 5, 7, 5])
    total = int(counts.sum())
    structures = Structures(torch.ones(total).long(), torch.rand(total, 3).double(), counts)
    rows = forces.spread(structures, 4, 0)
    assert counts[rows].tolist() == [3, 5, 7, 9]
    assert sorted(forces.spread(structures, 20, 0).tolist()) == list(range(8))


def test_the_page_of_forces_rounds_stored_numbers(fitted: Fitted) -> None:
    small = (fitted.structures.counts < 6).nonzero()[:, 0]
    some = fitted.structures.picked(small)
    found = as_json(forces.measured(fitted.uq, some, seed=0, molecules=2, timed=1, repeats=1))
    assert found["dense"]["difference"] < 1e-8
    assert [row["members"] for row in found["ensembles"]] == [16, 64, 256]
    check_page(forces_page.entries(found), found)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [((0.5, 0.9), "at every size"), ((0.5, 2.0), "of 10 atoms and more for those of 20")],
)
def test_the_page_says_who_is_faster(ratios: tuple[float, float], words: str) -> None:
    times = [{"atoms": n, "ratios": {"loop": r}} for n, r in zip((10, 20), ratios, strict=True)]
    settings = {"looped": 64, "molecules": 2}
    found = {"settings": settings, "dense": {"difference": 1e-9, "molecules": 1}, "times": times}
    found["ratio"] = 1.0
    assert words in forces_page.said(found)
