"""Models of atoms: structures, SOAP, batches, the Behler-Parrinello net, positions, files."""

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import featomic  # noqa: F401  # it looks for ASE when it is first imported, which one test hides
import pytest
import torch
from experiments.atoms.batches import Batch, Environments, loss_weight
from experiments.atoms.descriptor_files import DescriptorFileError, DescriptorFiles
from experiments.atoms.positions import FromPositions
from experiments.atoms.soap import Soap, expansion
from experiments.atoms.spectrum import power_spectrum
from experiments.atoms.structures import StructureError, Structures, indices
from experiments.training.protocol import Protocol
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ase
import rigidities as rg
from experiments.atoms import (
    bpnn,
    composition,
    descriptor_files,
    fitting,
    positions,
    soap,
    spectrum,
    structures,
)
from experiments.training import loop
from tests.support.refusals import refused
from tests.support.tensors import close

F64 = torch.float64
SPECIES = (1, 6, 7, 8, 9)
SOAP = Soap()


def of(*names: str) -> Structures:
    """Molecules that ASE knows."""
    from ase.build import molecule

    return Structures.from_ase([molecule(name) for name in names])


def moved(old: Structures, to: Tensor) -> Structures:
    return Structures(old.numbers, to, old.counts)


def environments(some: Structures, y: Tensor | None = None) -> Environments:
    x = power_spectrum(expansion(some, SPECIES, SOAP).values)
    y = torch.zeros(len(some), dtype=F64) if y is None else y
    return Environments(x, indices(some.numbers, SPECIES), some.counts, y, len(SPECIES))


def net_for(data: Environments, seed: int = 0) -> bpnn.BehlerParrinello:
    net = bpnn.drawn(len(SPECIES), data.x.shape[1], seed)
    net.standardise(data.x)
    return net


def made_up(count: int, seed: int = 0, width: int = 7, kinds: int = 3) -> Environments:
    """Structures of 1 to 5 atoms with descriptors of random numbers."""
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 6, (count,), generator=draw)
    atoms = int(counts.sum())
    x = torch.randn(atoms, width, generator=draw, dtype=F64)
    species = torch.randint(kinds, (atoms,), generator=draw)
    owners = torch.arange(count).repeat_interleave(counts)
    y = torch.zeros(count, dtype=F64).index_add(0, owners, torch.sin(x[:, 0]) + species)
    return Environments(x, species, counts, y, kinds)


MIXED = ("H2O", "CH3COF", "C4H4NH", "HF", "CH3NO2", "O")


@pytest.fixture(scope="module")
def mixed() -> Structures:
    return of(*MIXED)


@pytest.fixture(scope="module")
def expanded(mixed: Structures) -> soap.Expansion:
    return expansion(mixed, SPECIES, SOAP, slopes=True)


@pytest.fixture(scope="module")
def known(mixed: Structures) -> Environments:
    return environments(mixed, torch.linspace(-2, 3, len(mixed), dtype=F64))


# --- structures -----------------------------------------------------------------------------------


def test_structures_of_ase_come_back_as_they_were(mixed: Structures) -> None:
    from ase.build import molecule

    assert len(mixed) == len(MIXED) and mixed.counts.tolist() == [3, 7, 10, 2, 7, 1]
    for name, frame in zip(MIXED, mixed.as_ase(), strict=True):
        expected = molecule(name)
        assert frame.numbers.tolist() == expected.numbers.tolist()
        assert (frame.positions == expected.positions).all() and not frame.pbc.any()
    again = Structures.from_ase(mixed.as_ase())
    assert again.digest() == mixed.digest() and again.positions.dtype == F64


def test_picked_structures_and_their_atoms_equal_a_slow_loop(mixed: Structures) -> None:
    rows = torch.tensor([4, 0, 5, 0])
    starts = [sum(mixed.counts.tolist()[:row]) for row in range(len(mixed))]
    atoms = [starts[row] + k for row in rows.tolist() for k in range(int(mixed.counts[row]))]
    some = mixed.picked(rows)
    assert mixed.atoms_of(rows).tolist() == atoms
    assert torch.equal(some.positions, mixed.positions[atoms])
    assert torch.equal(some.numbers, mixed.numbers[atoms])
    assert some.counts.tolist() == [7, 3, 1, 3] and some.ends.tolist() == [0, 7, 10, 11, 14]
    assert some.owners.tolist() == [0] * 7 + [1] * 3 + [2] + [3] * 3
    assert len(mixed.picked(rows[:0])) == 0


def test_the_composition_counts_atoms(mixed: Structures) -> None:
    table = mixed.composition((9, 1, 8, 7, 6))
    assert table.dtype == F64
    assert table[:2].tolist() == [[0, 2, 1, 0, 0], [1, 3, 1, 0, 2]]
    assert torch.equal(table.sum(1), mixed.counts.double())


def test_any_change_of_the_structures_changes_their_digest(mixed: Structures) -> None:
    numbers, shifted = mixed.numbers.clone(), mixed.positions.clone()
    numbers[0], shifted[-1, 2] = 9, 1e-15
    others = [
        moved(mixed, shifted),
        Structures(numbers, mixed.positions, mixed.counts),
        Structures(mixed.numbers, mixed.positions, mixed.counts.flip(0)),
        mixed.picked(torch.arange(5)),
    ]
    assert len({mixed.digest(), *(other.digest() for other in others)}) == 5
    same = Structures(mixed.numbers.int(), mixed.positions, mixed.counts.int())
    assert same.digest() == mixed.digest()


def test_shapes_that_do_not_fit_empty_and_periodic_structures_are_refused() -> None:
    said = r"Expected numbers \(3,\) .* got \(2,\) and \(3, 3\)"
    given = (torch.ones(2).long(), torch.eye(3, dtype=F64), torch.tensor([1, 2]))
    refused(said, Structures, *given, error=StructureError)
    periodic = ase.Atoms("Cu", cell=[3, 3, 3], pbc=[False, False, True])
    for frame, said in (
        (ase.Atoms(), r"Structure 1 has no atoms: .*Leave it out"),
        (periodic, r"Structure 1 is periodic.*pbc = False"),
    ):
        refused(said, Structures.from_ase, [ase.Atoms("H"), frame], error=StructureError)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_positions_that_are_no_numbers_are_refused(mixed: Structures, bad: float) -> None:
    to = mixed.positions.clone()
    to[11, 1] = bad
    with pytest.raises(StructureError, match=rf"Structure 2 .*no finite number: .*{bad}.*Mend"):
        moved(mixed, to)


def test_an_element_that_the_model_never_saw_is_refused() -> None:
    said = r"Atom 2 .*has the atomic number 17, but the model knows 1, 6, 7, 8, 9 only: .*Leave"
    for work in (
        lambda some: expansion(some, SPECIES, SOAP),
        lambda some: positions.batch(some, SPECIES, SOAP),
        lambda some: some.composition(SPECIES),
        lambda some: composition.fitted(some, torch.zeros(1), SPECIES),
    ):
        refused(said, work, of("HCCl3"), error=StructureError)


@pytest.mark.parametrize("number", [0, -1, 200])
def test_numbers_that_are_no_element_are_refused(number: int) -> None:
    with pytest.raises(StructureError, match=rf"atomic number {number},"):
        indices(torch.tensor([1, number]), SPECIES)


def test_atoms_on_top_of_each_other_are_named(mixed: Structures) -> None:
    to = mixed.positions.clone()
    to[3 + 6] = to[3 + 2] + torch.tensor([0.0, 0.03, 0.04])
    said = r"Atoms 2 and 6 of structure 1 are 0\.05 angstrom apart: .*at least 0\.1.*leave"
    for work in (expansion, positions.batch):
        refused(said, work, moved(mixed, to), SPECIES, SOAP, error=StructureError)
    to[3 + 6] = to[3 + 2] + torch.tensor([0.0, 0.06, 0.0801])
    structures.check_apart(moved(mixed, to))
    # Two structures in one place are no clash.
    structures.check_apart(mixed.picked(torch.tensor([0, 0, 5, 5])))


@pytest.mark.parametrize("package", ["featomic", "ase"])
def test_a_missing_package_is_said_with_its_extra(mixed, package, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=rf"need the package {package}: .*rigidities\[chemistry\]"
    ):
        expansion(mixed, SPECIES, Soap(width=0.31))  # for which no calculator was made before


# --- the expansion and the power spectrum ---------------------------------------------------------


def test_the_parameters_are_the_papers() -> None:
    hypers = SOAP.of_featomic()
    smoothing = {"type": "ShiftedCosine", "width": 1.0}
    assert hypers["cutoff"] == {"radius": 5.0, "smoothing": smoothing}
    density = {"type": "Gaussian", "width": 0.3, "center_atom_weight": 0.0}
    density["scaling"] = {"type": "Willatt2018", "rate": 1.0, "scale": 2.0, "exponent": 7.0}
    assert hypers["density"] == hypers["density"] | density
    assert hypers["basis"]["max_angular"] == 4
    assert hypers["basis"]["radial"] == {"type": "Gto", "max_radial": 5}


def featomic_spectrum(some: Structures) -> list[tuple[Tensor, list[int], Tensor]]:
    """Of every block of featomic's own spectrum: atoms, the columns of ours, values."""
    from featomic import SoapPowerSpectrum

    found, channels = [], len(SPECIES) * SOAP.radial
    for key, block in SoapPowerSpectrum(**SOAP.of_featomic()).compute(some.as_ase()).items():
        ends = [int(some.ends[row]) for row in block.samples.column("system")]
        inside = block.samples.column("atom").tolist()
        atoms = torch.tensor([a + b for a, b in zip(ends, inside, strict=True)], dtype=torch.long)
        species = [SPECIES.index(key[f"neighbor_{k}_type"]) for k in (1, 2)]
        columns = []
        for degree, *radial in zip(
            *(block.properties.column(name).tolist() for name in ("l", "n_1", "n_2")), strict=True
        ):
            first, second = sorted(
                s * SOAP.radial + n for s, n in zip(species, radial, strict=True)
            )
            before = sum(channels - k for k in range(first))
            columns.append(degree * channels * (channels + 1) // 2 + before + second - first)
        found.append((atoms, columns, torch.as_tensor(block.values)))
    return found


def test_the_kernels_are_those_of_featomics_own_spectrum(mixed: Structures, known) -> None:
    kernel = torch.zeros(len(mixed.numbers), len(mixed.numbers), dtype=F64)
    wide: dict[tuple[int, ...], Tensor] = {}
    for atoms, columns, values in featomic_spectrum(mixed):
        rows = wide.setdefault(tuple(columns), torch.zeros(len(kernel), values.shape[1], dtype=F64))
        rows[atoms] = values
    for rows in wide.values():
        kernel += rows @ rows.T
    close(known.x @ known.x.T, kernel, 1e-12)
    assert float(kernel.max()) > 0.1


def test_every_number_is_one_of_featomics_own_spectrum(mixed: Structures, known) -> None:
    """Theirs has the sign (-1)^l, and pairs of radial functions of one species twice."""
    seen = torch.zeros_like(known.x, dtype=torch.bool)
    per_degree = known.x.shape[1] // (SOAP.angular + 1)
    for atoms, columns, values in featomic_spectrum(mixed):
        sign = torch.tensor([(-1.0) ** (column // per_degree) for column in columns], dtype=F64)
        twice = torch.tensor([math.sqrt(columns.count(column)) for column in columns], dtype=F64)
        close(known.x[atoms][:, columns], sign * twice * values, 1e-12)
        seen[atoms[:, None], torch.tensor(columns)] = True
    assert not bool(known.x[~seen].any()) and bool(seen[:2].any())


def test_the_spectrum_equals_a_slow_sum() -> None:
    draw = torch.Generator().manual_seed(0)
    c = torch.randn(2, 3, 9, generator=draw, dtype=F64)
    rows = []
    for atom in c:
        numbers = []
        for degree in range(3):
            for k in range(3):
                for j in range(k, 3):
                    m = range(degree**2, (degree + 1) ** 2)
                    total = sum(float(atom[k, n] * atom[j, n]) for n in m)
                    twice = 1 if j == k else math.sqrt(2)
                    numbers.append(twice * total / math.sqrt(2 * degree + 1))
        rows.append(numbers)
    found = power_spectrum(c)
    assert found.shape == (2, spectrum.width(3, 2))
    close(found, torch.tensor(rows, dtype=F64), 1e-12)


def turned(some: Structures, seed: int) -> Tensor:
    """The positions after a rotation (or reflection) about a point, and a shift."""
    draw = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=draw, dtype=F64)).Q
    shift = 10 * torch.randn(3, generator=draw, dtype=F64)
    return some.positions @ rotation.T + shift


@pytest.mark.parametrize("seed", range(3))
def test_turning_and_shifting_leave_the_spectrum_alone(mixed: Structures, known, seed) -> None:
    other = moved(mixed, turned(mixed, seed))
    close(environments(other).x, known.x, 1e-10)


def test_the_order_of_the_atoms_is_that_of_their_spectra(mixed: Structures, known) -> None:
    draw = torch.Generator().manual_seed(1)
    parts = torch.arange(len(mixed.numbers)).split(mixed.counts.tolist())
    order = torch.cat([part[torch.randperm(len(part), generator=draw)] for part in parts])
    other = Structures(mixed.numbers[order], mixed.positions[order], mixed.counts)
    close(environments(other).x, known.x[order], 1e-12)


def test_the_channels_are_in_the_order_of_the_species(mixed: Structures, expanded) -> None:
    blocks = expanded.values.reshape(-1, 5, 6, 25)
    other = expansion(mixed, [9, 6, 1, 8, 7], SOAP).values.reshape(-1, 5, 6, 25)
    close(other, blocks[:, [4, 1, 0, 3, 2]], 1e-14)
    carbon = int((mixed.numbers == 6).nonzero()[0])
    assert blocks[carbon].abs().amax((1, 2)).gt(0).tolist() == [True, True, False, True, True]


def test_an_atom_sees_no_farther_than_the_cutoff_and_not_itself() -> None:
    from ase import Atoms

    away = [0.8, 4.9, 5.01]
    pairs = Structures.from_ase([Atoms("HF", [[0, 0, 0], [0, 0, r]]) for r in away])
    size = expansion(pairs, SPECIES, SOAP).values.abs().amax((1, 2)).reshape(3, 2)
    assert size[0].min() > 0.01 and 0 < size[1].max() < 1e-3 * size[0].min()
    assert not size[2].any()
    alone = expansion(of("O"), SPECIES, SOAP, slopes=True)
    assert alone.values.shape == (1, 30, 25) and not alone.values.any()
    assert alone.pairs.shape == (2, 0) and alone.slopes.shape == (0, 3, 6, 25)


def test_the_expansion_does_not_depend_on_the_chunks(mixed, expanded, monkeypatch) -> None:
    monkeypatch.setattr(soap, "CHUNK", 2)
    chunked = expansion(mixed, SPECIES, SOAP, slopes=True)
    close(chunked.values, expanded.values, 1e-14)
    close(expansion(mixed, SPECIES, SOAP).values, expanded.values, 1e-14)
    for found in (chunked, expanded):
        assert len(set(map(tuple, found.pairs.T.tolist()))) == found.pairs.shape[1]
    close(dense_slopes(mixed, chunked), dense_slopes(mixed, expanded), 1e-14)


def dense_slopes(some: Structures, found: soap.Expansion) -> Tensor:
    """d values / d positions, (A, C, M, A, 3), pair by pair."""
    atoms = len(some.numbers)
    dense = torch.zeros(atoms, len(SPECIES), SOAP.radial, 25, atoms, 3, dtype=F64)
    kinds = indices(some.numbers, SPECIES).tolist()
    for (centre, neighbour), slope in zip(found.pairs.T.tolist(), found.slopes, strict=True):
        channel = kinds[neighbour]
        dense[centre, channel, :, :, neighbour] += slope.permute(1, 2, 0)
        dense[centre, channel, :, :, centre] -= slope.permute(1, 2, 0)
    return dense.flatten(1, 2)


STEP = 1e-4


def displaced(one: Structures) -> Structures:
    """A molecule with each coordinate of each atom moved forward, then all of them backward."""
    ways = torch.eye(one.positions.numel(), dtype=F64).reshape(-1, *one.positions.shape)
    copies = torch.cat([one.positions + STEP * ways, one.positions - STEP * ways])
    count = len(copies)
    return Structures(one.numbers.repeat(count), copies.flatten(0, 1), one.counts.repeat(count))


def differences(values: Tensor) -> Tensor:
    """Central ones, (A, 3, ...), of numbers of the displaced molecules."""
    forward, backward = values.chunk(2)
    return ((forward - backward) / (2 * STEP)).unflatten(0, (-1, 3))


def test_slopes_equal_central_differences() -> None:
    one = of("CH3COF")
    dense = dense_slopes(one, expansion(one, SPECIES, SOAP, slopes=True))
    values = expansion(displaced(one), SPECIES, SOAP).values.unflatten(0, (-1, len(one.numbers)))
    close(dense, differences(values).permute(2, 3, 4, 0, 1), 1e-6)


# --- the baseline ---------------------------------------------------------------------------------


def test_the_baseline_is_exact_for_energies_that_add_up(mixed: Structures) -> None:
    own = torch.tensor([-13.6, -1030.0, -1485.0, -2042.0, -2713.0], dtype=F64)
    energy = own[indices(mixed.numbers, SPECIES)]
    sums = torch.stack([part.sum() for part in energy.split(mixed.counts.tolist())])
    base = composition.fitted(mixed, sums, SPECIES)
    close(base.energies, own, 1e-10)
    expected = torch.stack([3 * own[0] + own[2], 2 * own[1] + 4 * own[4]])
    close(base(of("NH3", "C2F4")), expected, 1e-10)


def test_an_element_absent_from_the_training_has_the_energy_zero() -> None:
    some, own = of("H2O", "CH4", "C2H6", "CO"), torch.tensor([-1.0, -40.0, -75.0], dtype=F64)
    energy = some.composition((1, 6, 8)) @ own
    base = composition.fitted(some, energy.float(), SPECIES)
    close(base.energies, torch.tensor([-1.0, -40.0, 0.0, -75.0, 0.0], dtype=F64), 1e-6)
    assert base.species == SPECIES and base.energies.dtype == F64


def test_the_baseline_is_the_least_squares_one() -> None:
    some = of("H2O", "CH4", "C2H6", "CO", "CO2", "H2", "O2")
    energy = torch.arange(7.0).double().square()
    table = some.composition((1, 6, 8))
    expected = torch.linalg.solve(table.T @ table, table.T @ energy)
    close(composition.fitted(some, energy, (1, 6, 8)).energies, expected, 1e-10)


# --- batches --------------------------------------------------------------------------------------


def slow_batch(data: Environments, rows: Sequence[int]) -> dict[str, list]:
    """Atom after atom: species, then structure, then place."""
    starts = [sum(data.counts.tolist()[:row]) for row in range(len(data))]
    atoms = [
        (int(data.species[starts[row] + k]), place, starts[row] + k)
        for place, row in enumerate(rows)
        for k in range(int(data.counts[row]))
    ]
    atoms.sort()
    return {
        "x": data.x[[atom for *_, atom in atoms]].tolist(),
        "sizes": [sum(kind == k for kind, *_ in atoms) for k in range(data.kinds)],
        "owners": [place for _, place, _ in atoms],
        "counts": [int(data.counts[row]) for row in rows],
        "y": [float(data.y[row]) for row in rows],
    }


@pytest.mark.parametrize("rows", [[3], [5, 0, 2], [4, 4, 1], list(range(9))])
def test_a_batch_equals_a_slow_loop(rows: list[int]) -> None:
    data = made_up(9)
    found = data.batch(torch.tensor(rows))
    assert {name: value.tolist() for name, value in found.items()} == slow_batch(data, rows)


def test_all_batches_hold_every_structure_once() -> None:
    data = made_up(23)
    plain = data.batches(5)
    assert len(plain) == 5 and [len(b["y"]) for b in plain] == [5, 5, 5, 5, 3]
    for _ in range(2):
        assert torch.equal(torch.cat([b["y"] for b in plain]), data.y)
    mixed_up = data.batches(5, torch.Generator().manual_seed(3))
    first, second = (torch.cat([b["y"] for b in mixed_up]) for _ in range(2))
    assert not torch.equal(first, second) and not torch.equal(first, data.y)
    assert torch.equal(first.sort().values, data.y.sort().values)
    again = data.batches(5, torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat([b["y"] for b in again]), first)


def test_picked_environments_are_those_of_their_structures() -> None:
    data, rows = made_up(9), torch.tensor([7, 1, 1, 4])
    some = data.picked(rows)
    assert len(some) == 4 and some.kinds == data.kinds
    for size in (1, 4):
        for part in torch.arange(4).split(size):
            own, old = some.batch(part), data.batch(rows[part])
            assert all(torch.equal(own[name], old[name]) for name in own)


def test_the_weight_of_a_structure_is_one_over_its_atoms() -> None:
    batch = made_up(9).batch(torch.arange(9))
    assert loss_weight(batch).tolist() == [1 / n for n in batch["counts"].tolist()]
    assert loss_weight(batch).dtype == F64


# --- the net --------------------------------------------------------------------------------------


def slow_hidden(net: bpnn.BehlerParrinello, x: Tensor, kind: int) -> Tensor:
    """The last hidden layer of one atom, layer by layer."""
    h = (x - net.level) / net.spread
    for layer in net.nets[kind]:
        if isinstance(layer, nn.Linear):
            z = layer.weight @ h + layer.bias
            h = z / (1 + torch.exp(-z))
    return h


def slow_features(net: bpnn.BehlerParrinello, x: Tensor, kinds: Tensor, owners: Tensor) -> Tensor:
    """(N, S * H): for each species the sum of the hidden layers of a structure's atoms."""
    width = net.readouts[0].in_features
    rows = [x.new_zeros(len(net.nets) * width) for _ in range(int(owners.max()) + 1)]
    for atom, (kind, owner) in enumerate(zip(kinds.tolist(), owners.tolist(), strict=True)):
        hidden = slow_hidden(net, x[atom], kind)
        rows[owner] = rows[owner] + nn.functional.pad(
            hidden, (kind * width, (len(net.nets) - kind - 1) * width)
        )
    return torch.stack(rows)


def weights_of(net: bpnn.BehlerParrinello) -> Tensor:
    return torch.cat([readout.weight[0] for readout in net.readouts])


def features_of(net: bpnn.BehlerParrinello, data: Environments) -> Tensor:
    owners = torch.arange(len(data)).repeat_interleave(data.counts)
    with torch.no_grad():
        return slow_features(net, data.x, data.species, owners)


def every(data: Environments) -> Batch:
    return data.batch(torch.arange(len(data)))


def test_the_net_has_the_published_shape_and_no_last_bias() -> None:
    net = bpnn.drawn(5, 2325, 0)
    widths = [[m.weight.shape for m in own if isinstance(m, nn.Linear)] for own in net.nets]
    assert widths == [[(64, 2325), (64, 64), (64, 64)]] * 5
    assert [tuple(r.weight.shape) for r in net.readouts] == [(1, 64)] * 5
    assert all(r.bias is None for r in net.readouts)
    assert {p.dtype for p in net.parameters()} == {F64}


def test_the_first_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    one, again, other = (weights_of(bpnn.drawn(3, 7, seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_standardised_descriptors_have_mean_zero_and_mean_square_one() -> None:
    data = made_up(60)
    x = 5 + data.x * torch.tensor([1e-3, 0.1, 1, 2, 3, 4, 5], dtype=F64)
    net = bpnn.drawn(3, 7, 0)
    net.standardise(x)
    z = (x - net.level) / net.spread
    assert float(z.mean(0).abs().max()) < 1e-12
    assert float(z.square().mean()) == pytest.approx(1, rel=1e-12)
    assert float(z[:, 0].std()) < 1e-2, "a number that hardly varies stays small"


def test_energies_equal_a_loop_over_atoms(known: Environments) -> None:
    net = net_for(known)
    expected = features_of(net, known) @ weights_of(net)
    close(fitting.energies(net, every(known)).detach(), expected.detach(), 1e-12)


def test_a_molecule_does_not_depend_on_companions_or_on_the_order(known, mixed) -> None:
    net = net_for(known)
    whole = fitting.energies(net, every(known)).detach()
    alone = [fitting.energies(net, known.batch(torch.tensor([k]))) for k in range(len(known))]
    close(torch.cat(alone).detach(), whole, 1e-12)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    close(fitting.energies(net, known.batch(order)).detach(), whole[order], 1e-12)
    back = torch.arange(len(mixed.numbers)).flip(0)
    flipped = Structures(mixed.numbers[back], mixed.positions[back], mixed.counts.flip(0))
    close(fitting.energies(net, every(environments(flipped))).detach().flip(0), whole, 1e-10)


@pytest.fixture(scope="module")
def held() -> Environments:
    some = of("NH3", "CH3OH", "H2CO", "C2H6", "F2O", "HCOOH", "CF4")
    return environments(some, torch.arange(len(some)).double())


def fitted(net: nn.Module, train: list[Batch], valid: list[Batch]) -> rg.LastLayerRigidity:
    """With the weights of the loss, and a ridge at which a dense solution has many digits."""
    uq = rg.LastLayerRigidity(net, progress=False).fit(train, sample_weight=loss_weight)
    uq.calibrate(valid, method=rg.Full(ridge=1e-3 * float(uq.gram.diagonal.mean())))
    return uq


def test_the_library_finds_the_sums_over_the_atoms_of_each_species(known, held) -> None:
    net = net_for(known)
    uq = fitted(net, list(known.batches(2)), [every(held)])
    expected = features_of(net, known)
    found = uq.features(list(known.batches(4)))
    assert found.shape == (len(known), 320)
    close(found, expected, 1e-12)
    weights = [readout.weight for readout in net.readouts]
    for row, energy in zip(expected, fitting.energies(net, every(known)), strict=True):
        by_hand = torch.autograd.grad(energy, weights, retain_graph=True)
        close(torch.cat([g[0] for g in by_hand]), row, 1e-12)
    dense = torch.zeros(320, 320, dtype=F64)
    for row, atoms in zip(expected, known.counts.tolist(), strict=True):
        dense += torch.outer(row, row) / atoms
    close(uq.gram.matrix, dense, 1e-12)


@pytest.mark.parametrize("first", ["H2O", "O"])
def test_the_first_batch_of_a_fit_may_lack_elements(known, held, first: str) -> None:
    """Fluorine comes later, or never in a prediction: its columns are there all the same."""
    data = known
    net, rows = net_for(data), [MIXED.index(first), *range(len(MIXED))]
    parts = [data.batch(torch.tensor([row])) for row in rows]
    assert int(parts[0]["sizes"][4]) == 0
    uq = fitted(net, parts, [every(held)])
    f = features_of(net, data)[rows]
    close(uq.gram.matrix, f.T @ (f / data.counts[rows, None]), 1e-12)
    together = uq.predict([every(data)])
    water = uq.predict([data.batch(torch.tensor([0]))])
    close(water.std, together.std[:1], 1e-10)
    close(water.mean, together.mean[:1], 1e-10)


# --- positions ------------------------------------------------------------------------------------


def at(some: Structures) -> Batch:
    """A batch of positions without the places of its atoms."""
    batch = positions.batch(some, SPECIES, SOAP)
    batch.pop("atoms")
    return batch


def slopes_of(model: nn.Module, batch: Batch) -> Tensor:
    """d sum(energies) / d positions, in reverse mode."""
    own = batch["positions"].clone().requires_grad_()
    return torch.autograd.grad(model(**{**batch, "positions": own}).sum(), own)[0]


@pytest.fixture(scope="module")
def net(known: Environments) -> bpnn.BehlerParrinello:
    return net_for(known, seed=4)


def test_energies_from_positions_are_those_from_descriptors(net, mixed, known) -> None:
    expected = fitting.energies(net, every(known)).detach()
    close(FromPositions(net)(**at(mixed)).detach(), expected, 1e-12)


def test_a_batch_of_positions_knows_its_atoms(mixed: Structures) -> None:
    batch = positions.batch(mixed, SPECIES, SOAP)
    atoms = batch["atoms"]
    assert torch.equal(atoms.sort().values, torch.arange(len(mixed.numbers)))
    assert torch.equal(batch["positions"], mixed.positions[atoms])
    assert torch.equal(
        mixed.numbers[atoms], torch.tensor(SPECIES).repeat_interleave(batch["sizes"])
    )
    assert torch.equal(batch["owners"], mixed.owners[atoms])


def test_forces_equal_central_differences_of_energies(net) -> None:
    some = of("CH3COF", "H2O")
    batch = positions.batch(some, SPECIES, SOAP)
    atoms, slopes = batch.pop("atoms"), torch.empty_like(some.positions)
    slopes[atoms] = slopes_of(FromPositions(net), batch)
    for row, found in enumerate(slopes.split(some.counts.tolist())):
        with torch.no_grad():
            energies = net(**descriptors(displaced(some.picked(torch.tensor([row])))))
        close(found, differences(energies), 1e-6)


def descriptors(some: Structures) -> Batch:
    return {name: value for name, value in every(environments(some)).items() if name != "y"}


def test_forward_mode_equals_reverse_mode(net, mixed: Structures) -> None:
    model, batch = FromPositions(net), at(mixed)
    way = torch.randn(batch["positions"].shape, generator=torch.Generator().manual_seed(0)).double()
    _, along = torch.func.jvp(
        lambda r: model(**{**batch, "positions": r}), (batch["positions"],), (way,)
    )
    products = (slopes_of(model, batch) * way).sum(1)
    expected = torch.zeros(len(mixed), dtype=F64).index_add(0, batch["owners"], products)
    close(along.detach(), expected, 1e-12)


def test_forces_do_not_move_or_turn_a_molecule(net, mixed: Structures) -> None:
    batch = at(mixed)
    slopes, where = slopes_of(FromPositions(net), batch), batch["owners"]
    zero = torch.zeros(len(mixed), 3, dtype=F64)
    total = zero.index_add(0, where, slopes)
    torque = zero.index_add(0, where, torch.linalg.cross(batch["positions"], slopes))
    size = float(slopes.abs().max())
    assert float(total.abs().max()) < 1e-12 * size
    assert float(torque.abs().max()) < 1e-6 * size


def test_forces_can_enter_a_loss(net) -> None:
    model, batch = FromPositions(net), at(of("H2O", "HF"))
    weight = net.nets[3][2].weight

    def loss() -> Tensor:
        own = batch["positions"].clone().requires_grad_()
        energy = model(**{**batch, "positions": own}).sum()
        return torch.autograd.grad(energy, own, create_graph=True)[0].square().sum()

    slope, step, ends = torch.autograd.grad(loss(), weight)[0][5, 7], 1e-5, []
    with torch.no_grad():
        for change in (step, -2 * step):
            weight[5, 7] += change
            with torch.enable_grad():
                ends.append(float(loss().detach()))
        weight[5, 7] += step
    assert float(slope) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


def dense_force_variance(
    net: bpnn.BehlerParrinello, some: Structures, inverse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of d energy / d positions, (A, 3), all written out.

    Every feature is differentiated by itself; the density moves by the dense table of slopes.
    """
    found = expansion(some, SPECIES, SOAP, slopes=True)
    table, kinds = dense_slopes(some, found), indices(some.numbers, SPECIES)

    def features(r: Tensor) -> Tensor:
        x = power_spectrum(found.values + torch.einsum("icmad,ad->icm", table, r - some.positions))
        return slow_features(net, x, kinds, some.owners).sum(0)

    g = torch.func.jacrev(features)(some.positions).detach()
    mean = torch.einsum("kad,k->ad", g, weights_of(net).detach())
    variance = scale**2 * torch.einsum("kad,kj,jad->ad", g, inverse, g)
    return mean, variance.sqrt()


def test_force_bars_equal_the_brute_force(net) -> None:
    learnt = of("H2O", "CH4", "HF", "NH3", "CH3OH", "HCN", "C2H4", "N2H4", "H2O2", "F2", "CO2")
    data = environments(learnt)
    y = torch.arange(len(learnt)).double()
    parts = [at(learnt.picked(rows)) | {"y": y[rows]} for rows in torch.arange(11).split(4)]
    uq = fitted(FromPositions(net), parts[1:], parts[:1])
    learnt, data = learnt.picked(torch.arange(4, 11)), data.picked(torch.arange(4, 11))
    f = features_of(net, data)
    gram = f.T @ (f / data.counts[:, None])
    close(uq.gram.matrix, gram, 1e-10)
    inverse = torch.linalg.inv(gram + uq.ridge * torch.eye(320, dtype=F64))
    some = of("H2O", "H2CO", "HF")
    batch = positions.batch(some, SPECIES, SOAP)
    atoms = batch.pop("atoms")
    found = uq.gradient([batch], wrt="positions")
    for k, ends in enumerate(zip(some.ends[:-1].tolist(), some.ends[1:].tolist(), strict=True)):
        own = some.picked(torch.tensor([k]))
        mean, std = dense_force_variance(net, own, inverse, float(uq.scale))
        for got, expected in ((found.mean, mean), (found.std, std)):
            back = torch.empty_like(some.positions)
            back[atoms] = got
            close(back[slice(*ends)], expected, 1e-8)
    assert float(found.std.max()) > 0


# --- training -------------------------------------------------------------------------------------

QUICK = Protocol(epochs=12, batch=8, rate=1e-2, decay=1e-2)


def small_net(seed: int = 0) -> bpnn.BehlerParrinello:
    return bpnn.drawn(3, 7, seed, hidden=(9, 6))


def slow_loss(net: nn.Module, data: Environments) -> float:
    """The mean over structures of the squared error by the number of atoms."""
    total = 0.0
    for row in range(len(data)):
        batch = data.batch(torch.tensor([row]))
        error = float(fitting.energies(net, batch).detach()) - float(data.y[row])
        total += error**2 / int(data.counts[row])
    return total / len(data)


def test_the_loss_is_the_mean_of_squared_errors_by_atoms(monkeypatch: pytest.MonkeyPatch) -> None:
    data, net = made_up(20), small_net()
    expected = slow_loss(net, data)
    assert float(fitting.squared_error(net, every(data)).detach()) == pytest.approx(expected)
    monkeypatch.setattr(fitting, "CHUNK", 7)
    assert fitting.mean_loss(net, data) == pytest.approx(expected, rel=1e-12)


def test_training_lowers_the_loss_and_keeps_the_weights_it_tells_of() -> None:
    train, valid = made_up(60, 1), made_up(30, 2)
    before = slow_loss(small_net(), valid)
    found = fitting.fitted(small_net(), train, valid, 0, QUICK)
    assert found.loss < 0.5 * before
    assert slow_loss(found.net, valid) == pytest.approx(found.loss, rel=1e-10)
    assert not found.net.training and 1 <= found.epoch <= QUICK.epochs


def test_training_depends_on_its_seed_alone() -> None:
    train, valid = made_up(40, 1), made_up(20, 2)
    one = fitting.fitted(small_net(), train, valid, 5, QUICK)
    torch.rand(3)
    again, other = (fitting.fitted(small_net(), train, valid, s, QUICK) for s in (5, 6))
    assert one.loss == again.loss != other.loss
    assert torch.equal(weights_of(one.net), weights_of(again.net))


def test_one_step_of_training_is_the_optimisers_own() -> None:
    """One epoch of one batch against AdamW's first step, written out."""
    data, net = made_up(16), small_net()
    loss = fitting.squared_error(net, every(data))
    slopes = dict(
        zip(
            dict(net.named_parameters()),
            torch.autograd.grad(loss, list(net.parameters())),
            strict=True,
        )
    )
    protocol = Protocol(epochs=1, batch=16, rate=1e-2, decay=0.1)
    found = fitting.fitted(small_net(), data, data, 0, protocol)
    for name, now in found.net.named_parameters():
        old, slope = dict(net.named_parameters())[name].detach(), slopes[name]
        expected = old * (1 - 1e-3) - 1e-2 * slope / (slope.abs() + 1e-8)
        torch.testing.assert_close(now.detach(), expected, rtol=1e-6, atol=1e-9)


def test_the_published_protocol() -> None:
    own = fitting.PROTOCOL
    assert (own.hidden, own.activation, own.last_bias) == ((64, 64, 64), "silu", False)
    assert (own.epochs, own.batch, own.rate, own.decay) == (300, 32, 1e-3, 1e-2)


def test_the_descent_keeps_the_weights_of_the_smallest_loss() -> None:
    one = nn.Linear(1, 1)
    losses = iter([3.0, math.nan, 1.0, 1.0, 2.0])
    epochs = []

    def one_epoch(optimiser: torch.optim.Optimizer, order: torch.Generator) -> None:
        assert order.initial_seed() == torch.Generator().manual_seed(8).initial_seed()
        epochs.append(optimiser.param_groups[0]["lr"])
        one.weight.data.fill_(len(epochs))

    found = loop.descended(one, Protocol(epochs=5), 8, one_epoch, lambda: next(losses))
    assert (found.epoch, found.loss, found.net.weight.item()) == (3, 1.0, 3.0)
    assert epochs == [1e-3] * 5 and not found.net.training
    with pytest.raises(FloatingPointError, match=r"finite validation loss .* Use a smaller rate"):
        loop.descended(one, Protocol(epochs=2), 0, lambda *_: None, lambda: math.nan)


# --- files of descriptors -------------------------------------------------------------------------


def files_in(folder: Path, some: Structures, part: int = 2, **changes) -> DescriptorFiles:
    given = {"structures": some, "species": SPECIES, "soap": SOAP, **changes}
    return DescriptorFiles(**given, folder=folder, part=part)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, mixed: Structures) -> Path:
    """A folder with the expansions of the mixed molecules, two in a file."""
    folder = tmp_path_factory.mktemp("descriptors") / "deep" / "down"
    files_in(folder, mixed).rows(torch.arange(len(mixed)))
    return folder


@pytest.fixture
def copied(stored: Path, tmp_path: Path) -> Path:
    for path in stored.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [5, 0, 3], [2, 2, 1], [4], []])
def test_the_files_hold_the_direct_expansion(stored: Path, mixed, expanded, rows) -> None:
    rows = torch.tensor(rows, dtype=torch.long)
    found = files_in(stored, mixed).rows(rows)
    expected = expanded.values[mixed.atoms_of(rows)]
    assert found.dtype == F64 and found.shape == expected.shape
    close(found, expected.float().double(), 1e-7)
    assert names_in(stored) == [f"0000{k}.safetensors" for k in range(3)]


def test_file_after_file_gives_every_row_once(stored: Path, mixed, expanded) -> None:
    rows, seen = torch.tensor([5, 1, 4, 0]), []
    for places, values in files_in(stored, mixed).parts(rows):
        seen += places.tolist()
        close(values, expanded.values[mixed.atoms_of(rows[places])], 1e-7)
    assert sorted(seen) == [0, 1, 2, 3]


def test_only_species_that_are_there_take_room(stored: Path) -> None:
    tensors = load_file(stored / "00002.safetensors")  # nitromethane and a lonely oxygen
    assert tensors["values.9"].shape[0] == 0 and tensors["values.1"].shape[0] == 7
    assert all(t.dtype == torch.float32 for name, t in tensors.items() if "values" in name)


def test_what_is_on_disk_is_not_computed_again(copied: Path, mixed, monkeypatch) -> None:
    """As after an interruption: the one file that is missing is made, no other is touched."""
    (copied / "00001.safetensors").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in copied.iterdir()}
    sizes = []

    def counted(some: Structures, *given) -> soap.Expansion:
        sizes.append(some.counts.tolist())
        return expansion(some, *given)

    monkeypatch.setattr(descriptor_files, "expansion", counted)
    files_in(copied, mixed).rows(torch.tensor([0]))
    assert not sizes
    files_in(copied, mixed).rows(torch.arange(6))
    assert sizes == [[10, 2]]
    assert before.items() <= {p.name: p.stat().st_mtime_ns for p in copied.iterdir()}.items()


def test_the_last_file_may_hold_fewer_structures(tmp_path: Path, mixed, expanded) -> None:
    found = files_in(tmp_path, mixed, part=4).rows(torch.tensor([5, 3]))
    close(found, expanded.values[mixed.atoms_of(torch.tensor([5, 3]))], 1e-7)
    assert names_in(tmp_path) == ["00000.safetensors", "00001.safetensors"]


def test_a_write_that_fails_leaves_nothing(tmp_path, mixed, monkeypatch) -> None:
    def full(*_) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        refused("No space left", files_in(tmp_path, mixed).rows, torch.tensor([0]), error=OSError)
    assert names_in(tmp_path) == []
    assert len(files_in(tmp_path, mixed).rows(torch.tensor([0]))) == 3
    assert names_in(tmp_path) == ["00000.safetensors"]


REFUSED = {
    "another parameter": (
        {"soap": Soap(cutoff=4.5)},
        r"expected soap cutoff=4\.5, got cutoff=5\.0",
    ),
    "two parameters": (
        {"soap": Soap(width=0.2, exponent=6.0)},
        r"expected soap width=0\.2, exponent=6\.0, got width=0\.3, exponent=7\.0",
    ),
    "another order of species": (
        {"species": (6, 1, 7, 8, 9)},
        r"expected species \[6, 1, 7, 8, 9\], got \[1, 6, 7, 8, 9\]",
    ),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_other_descriptors_are_refused(stored: Path, mixed, changes, said: str) -> None:
    with pytest.raises(DescriptorFileError, match=said + r"\. Delete .*or use another folder"):
        files_in(stored, mixed, **changes).rows(torch.tensor([0]))


def test_descriptors_of_other_structures_are_refused(stored: Path, mixed: Structures) -> None:
    to = mixed.positions.clone()
    to[1, 1] += 1e-6
    other = moved(mixed, to)
    own, given = (s.picked(torch.tensor([0, 1])).digest() for s in (mixed, other))
    with pytest.raises(DescriptorFileError, match=rf"structures {given}, got {own}\. Delete"):
        files_in(stored, other).rows(torch.tensor([0]))
    with pytest.raises(DescriptorFileError, match="structures"):
        files_in(stored, mixed, part=3).rows(torch.tensor([0]))
    files_in(stored, other).rows(torch.tensor([2]))


DAMAGE = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "cut in its header": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "empty": lambda path: path.write_bytes(b""),
    "something else": lambda path: path.write_text("no tensors at all, but some words"),
    "without a tensor": lambda path: rewritten(path, "values.6", None),
    "with places beyond": lambda path: rewritten(path, "atoms.1", 999),
}


def rewritten(path: Path, name: str, value: int | None) -> None:
    """The file with the same header and one tensor gone, or filled."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as old:
        header = old.metadata()
    tensors = load_file(path)
    if value is None:
        del tensors[name]
    else:
        tensors[name].fill_(value)
    save_file(tensors, path, header)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_with_the_remedy(copied: Path, mixed, damage) -> None:
    path = copied / "00000.safetensors"
    damage(path)
    with pytest.raises(DescriptorFileError, match=rf"{path.name} cannot be read .*Delete it"):
        files_in(copied, mixed).rows(torch.tensor([0]))
    assert path.exists()
    path.unlink()
    assert len(files_in(copied, mixed).rows(torch.tensor([0]))) == 3


def test_a_file_that_says_nothing_of_itself_is_refused(copied: Path, mixed) -> None:
    path = copied / "00000.safetensors"
    save_file(load_file(path), path)
    with pytest.raises(DescriptorFileError, match="expected format 1, got nothing"):
        files_in(copied, mixed).rows(torch.tensor([0]))


def test_the_header_says_what_the_file_was_made_of(stored: Path, mixed: Structures) -> None:
    from safetensors import safe_open

    with safe_open(stored / "00001.safetensors", framework="pt") as file:
        header = file.metadata()
    assert json.loads(header["soap"]) == SOAP.parameters()
    assert json.loads(header["species"]) == list(SPECIES)
    assert header["structures"] == mixed.picked(torch.tensor([2, 3])).digest()
    assert header["featomic"]


def test_an_unknown_element_is_named_with_its_structure_and_its_place_in_it() -> None:
    frames = [
        ase.Atoms("OH2", [[0, 0, 0], [1, 0, 0], [0, 1, 0]]),
        ase.Atoms("HCl", [[0, 0, 0], [1.3, 0, 0]]),
    ]
    with pytest.raises(StructureError, match="Atom 1 of structure 1 has the atomic number 17"):
        soap.expansion(Structures.from_ase(frames), SPECIES, SOAP)
    with pytest.raises(StructureError, match="no structures to describe"):
        soap.expansion(Structures.from_ase([]), SPECIES, SOAP)


def test_descriptors_that_never_vary_leave_energies_finite() -> None:
    net = bpnn.drawn(2, 3, 0)
    net.standardise(torch.ones(4, 3, dtype=F64))
    one = torch.ones(1, dtype=torch.long)
    energy = net(torch.ones(1, 3, dtype=F64), torch.tensor([1, 0]), one - 1, one)
    assert bool(torch.isfinite(energy).all())


def test_parameters_that_are_equal_as_numbers_are_no_others(tmp_path, mixed: Structures) -> None:
    rows = torch.arange(2)
    first = DescriptorFiles(mixed, SPECIES, Soap(cutoff=5.0), tmp_path).rows(rows)
    close(DescriptorFiles(mixed, SPECIES, Soap(cutoff=5), tmp_path).rows(rows), first, 1e-10)
