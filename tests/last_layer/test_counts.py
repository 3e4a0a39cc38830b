"""Counts beside the features: the columns that the biases of heads without one would have."""

import math

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities.last_layer.readout.graph import TracedReadout
from rigidities.last_layer.readout.tap import Tap

ATOMS, STRUCTURES = 40, 6


class Atoms(nn.Module):
    """A head for each species, scaled and summed over the atoms of structures.

    Args:
        biases: whether each head has one.
        targets: of each head.
        units: factors of the targets.
    """

    def __init__(self, biases: tuple[bool, ...], targets: int = 1, units: Tensor | None = None):
        super().__init__()
        self.hidden = nn.Linear(3, 5)
        self.heads = nn.ModuleList(nn.Linear(5, targets, bias=bias) for bias in biases)
        self.units = torch.ones(targets) if units is None else units
        self.double()

    def forward(self, x: Tensor, species: Tensor, gain: Tensor, owners: Tensor, n: int) -> Tensor:
        h = self.hidden(x).tanh()
        each = torch.zeros(len(x), self.heads[0].out_features, dtype=x.dtype)
        for kind, head in enumerate(self.heads):
            own = (species == kind).nonzero()[:, 0]
            each = each.index_add(0, own, head(h[own]))
        each = each * gain[:, None] * self.units.to(x)
        return each.new_zeros(n, each.shape[1]).index_add(0, owners, each)


def inputs(kinds: int, draw: int = 0) -> dict[str, Tensor | int]:
    """Structures of several atoms, and one structure without any of the last species."""
    made = torch.Generator().manual_seed(draw)
    owners = torch.cat([torch.arange(STRUCTURES), torch.randint(STRUCTURES, (34,), generator=made)])
    species = torch.randint(kinds, (ATOMS,), generator=made)
    species[:kinds] = torch.arange(kinds)
    species[owners == 5] = 0
    return {
        "x": torch.randn(ATOMS, 3, generator=made, dtype=torch.float64),
        "species": species,
        "gain": 0.5 + torch.rand(ATOMS, generator=made, dtype=torch.float64),
        "owners": owners,
        "n": STRUCTURES,
    }


def by_autograd(model: Atoms, given: dict) -> Tensor:
    """d(output)/d(bias) of a copy with biases, (M, K, heads that had none)."""
    bare = [i for i, head in enumerate(model.heads) if head.bias is None]
    targets = len(model.units)
    zeros = {f"heads.{i}.bias": torch.zeros(targets, dtype=torch.float64) for i in bare}
    full = Atoms((True,) * len(model.heads), targets, model.units)
    own = dict(model.named_parameters()) | zeros

    def outputs(biases: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(full, own | biases, kwargs=given)

    slopes = torch.func.jacrev(outputs)(zeros)
    own_target = [slope.diagonal(dim1=1, dim2=2) for slope in slopes.values()]  # k by its own bias
    return torch.stack(own_target, dim=-1)


@pytest.mark.parametrize(
    "biases", [(False,), (False, False, False), (True, False, True)], ids=["one", "three", "mixed"]
)
@pytest.mark.parametrize("targets", [1, 2])
def test_counts_are_the_columns_of_the_biases_that_a_copy_has(biases, targets):
    torch.manual_seed(3)
    model, given = Atoms(biases, targets), inputs(len(biases))
    reading = Tap.find(model, (), given)(**given)
    expected = by_autograd(model, given)
    torch.testing.assert_close(reading.counts[:, None].expand_as(expected), expected)
    assert not reading.counts.requires_grad


def test_targets_in_units_of_their_own_have_counts_of_their_own():
    torch.manual_seed(4)
    model, given = Atoms((False, False), 2, torch.tensor([1.0, 7.0])), inputs(2)
    tap = Tap.find(model, (), given)
    assert tap.layout == "separate"
    torch.testing.assert_close(tap(**given).counts, by_autograd(model, given))


def test_a_head_that_is_called_twice_counts_both_calls():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x[:, 0]) + 2 * self.head(x[:, 1:]).sum(1)

    x = torch.randn(4, 5, 3)
    reading = Tap.find(Twice(), (x,))(x)
    torch.testing.assert_close(reading.counts, torch.full((4, 1), 9.0))


def test_a_species_that_a_batch_lacks_has_counts_of_zero():
    model, given = Atoms((False, False)), inputs(2)
    tap = Tap.find(model, (), given)
    lacking = given | {"species": torch.zeros(ATOMS, dtype=torch.long)}
    counts = tap(**lacking).counts
    assert counts.shape == (STRUCTURES, 2)
    torch.testing.assert_close(counts[:, 0], summed(lacking))
    assert not counts[:, 1].any()


def summed(given: dict) -> Tensor:
    """The sum of the gains of each structure's atoms."""
    return given["gain"].new_zeros(STRUCTURES).index_add(0, given["owners"], given["gain"])


def test_a_plain_head_without_a_bias_counts_ones():
    x = torch.randn(5, 3)
    model = nn.Linear(3, 2, bias=False)
    tap = Tap.find(model, (x,))
    for reading in (tap(x), TracedReadout(model, tap)((x,), {})):
        assert torch.equal(reading.counts, torch.ones(5, 1))


@pytest.mark.parametrize("biases", [(False, False, False), (True, False, False)])
def test_a_mean_of_models_counts_their_shares(biases):
    x = torch.randn(5, 3)
    model = rg.MeanOf([nn.Linear(3, 2, bias=bias) for bias in biases])
    tap = Tap.find(model, (x,))
    for reading in (tap(x), TracedReadout(model, tap)((x,), {})):
        torch.testing.assert_close(reading.counts, torch.full((5, biases.count(False)), 1 / 3))


@pytest.mark.parametrize(
    "model",
    [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1))],
    ids=["one layer", "two layers"],
)
def test_a_plain_head_with_a_bias_has_no_counts(model):
    x = torch.randn(5, 3)
    tap = Tap.find(model, (x,))
    assert tap(x).counts is None and TracedReadout(model, tap)((x,), {}).counts is None


def test_heads_with_biases_have_no_counts():
    model, given = Atoms((True, True)), inputs(2)
    assert Tap.find(model, (), given)(**given).counts is None


def test_gains_that_follow_the_inputs_give_counts_with_derivatives_until_detached():
    model, given = Atoms((False, False)), inputs(2)
    given["gain"] = given["gain"].requires_grad_()
    reading = Tap.find(model, (), given).graph(**given)
    (slope,) = torch.autograd.grad(reading.counts.sum(), given["gain"])
    torch.testing.assert_close(slope, torch.ones(ATOMS, dtype=torch.float64))
    assert not reading.detached().counts.requires_grad


# --- what the default calibration makes of them ---------------------------------------------------


class Signs(nn.Module):
    """Sums of features that do not tell how many there are; a mask leaves some out."""

    def __init__(self, targets: int = 1, units: tuple[float, ...] = (1.0,)) -> None:
        super().__init__()
        self.head = nn.Linear(4, targets, bias=False)
        self.units = torch.tensor(units).double()
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.head(x) * mask[..., None]).sum(1) * self.units


def noisy(rows: int, seed: int, model: Signs) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of 1 to 12 terms whose noise grows with their number."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 12, 4, generator=made, dtype=torch.float64)
    counts = torch.randint(1, 13, (rows,), generator=made)
    mask = (torch.arange(12) < counts[:, None]).double()
    mean = model(x, mask).detach()
    noise = torch.randn(mean.shape, generator=made, dtype=torch.float64)
    return x, mask, mean + (0.25 * counts[:, None]).exp() * noise * model.units


@pytest.mark.parametrize(
    "made",
    [Signs, lambda: Signs(2), lambda: Signs(2, (1.0, 50.0))],
    ids=["one target", "two targets", "targets in units of their own"],
)
def test_the_default_bars_follow_the_counts(made):
    torch.manual_seed(6)
    model = made()
    uq = rg.LastLayerRigidity(model).fit(noisy(2000, 1, model))
    uq.calibrate(noisy(1000, 2, model))
    x, mask, _ = noisy(500, 3, model)
    p, counts = uq.predict((x, mask)), mask.sum(1)
    for few, many in ((2, 6), (5, 12)):
        ratio = p.std[counts == many].mean(0) / p.std[counts == few].mean(0)
        expected = torch.full_like(ratio, math.exp(0.25 * (many - few)))
        torch.testing.assert_close(ratio, expected, rtol=0.2, atol=0)


def test_a_mask_that_the_first_batch_does_not_show_does_no_harm():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1, bias=False)
            self.double()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(x) * mask

    torch.manual_seed(7)
    x, y = torch.randn(4, 200, 4).double(), torch.randn(4, 200, 1).double()
    masks = [torch.ones(200, 1).double(), *(torch.rand(3, 200, 1).double() + 0.5)]
    train, valid = [(x[0], masks[0], y[0]), (x[1], masks[1], y[1])], (x[2], masks[2], y[2])
    uq = rg.LastLayerRigidity(Masked()).fit(train)
    uq.calibrate([valid])
    assert bool(uq.predict([(x[3], masks[3])]).std.isfinite().all())
