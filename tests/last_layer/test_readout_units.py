"""Units inside the rooms `readout`, `last_layer` and `models` that no public name shows.

Everything else about readouts is said by public names in the other files. Whoever rewrites these
rooms may replace what stands here.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities.data.batches import Batch, Feed
from rigidities.data.output_layout import OutputLayout
from rigidities.last_layer.ensemble.members import Members
from rigidities.last_layer.novelty import layers
from rigidities.models.calling import Source
from rigidities.readout.copies import TracedReadout
from rigidities.readout.find import find_readout
from rigidities.readout.readout import Readout
from tests.support.nets import Net, data, fitted, trained
from tests.support.readouts import features_of, fitted_on
from tests.support.refusals import refused


def readout_of(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> Readout:
    """The readout that is found on one batch of inputs."""
    return find_readout(model, Source(), None, Batch(args, kwargs, None, None)).readout


class ExpandedLinear(nn.Linear):
    """A linear layer with one output, returned for three targets, that takes no write in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).expand(len(x), 3)


class SlopesBeside(nn.Module):
    """h and the derivatives of sin h, which it takes itself."""

    def forward(self, h: Tensor) -> Tensor:
        leaf = h.detach().requires_grad_()
        slopes = torch.autograd.grad([leaf.sin().sum()], [leaf])[0]
        assert slopes is not None
        return h + slopes


DIFFERENTIATING = {
    "expanded": (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), ExpandedLinear(4, 1)), False),
    "own": (nn.Sequential(nn.Linear(5, 4), SlopesBeside(), nn.Linear(4, 2)), True),
    "TorchScript": (
        nn.Sequential(nn.Linear(5, 4), torch.jit.script(SlopesBeside()), nn.Linear(4, 2)),
        True,
    ),
}


@pytest.mark.parametrize("case", DIFFERENTIATING)
def test_a_readout_says_whether_its_model_differentiates(case: str):
    model, differentiates = DIFFERENTIATING[case]
    x = torch.randn(8, 5)
    readout = readout_of(model, x)
    assert readout.differentiates == differentiates
    expected = model(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(readout.read((x,), {}).output, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_given_features_of_a_model_that_differentiates_are_read_in_every_mode(mode):
    model = nn.Sequential(nn.Linear(5, 4), SlopesBeside(), nn.Linear(4, 1)).double()
    x, y = torch.randn(40, 5).double(), torch.randn(40, 1).double()
    features = lambda m, x: m[:-1](x)  # noqa: E731
    uq = rg.LastLayerRigidity(model, features=features).fit(x[:20], y[:20])
    uq.calibrate(x[20:], y[20:], method="paper")
    mean, std = uq(x)
    with mode():
        prediction = uq.predict(x)
        same_mean, same_std = uq(x)
        uq.fit(x[:20], y[:20]).calibrate(x[20:], y[20:], method="paper")
        uq.features(x)
    assert not (same_mean.requires_grad or same_std.requires_grad)
    for values, expected in [(same_mean, mean), (same_std, std), (prediction.std, std)]:
        torch.testing.assert_close(values, expected)


def test_gradients_flow_through_given_features_where_an_input_requires_them():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = torch.randn(40, 5).double(), torch.randn(40, 1).double()
    slopes = []
    for features in (None, lambda m, x: torch.cat([m[:-1](x), torch.ones_like(x[:, :1])], 1)):
        uq = rg.LastLayerRigidity(model, features=features).fit(x[:20], y[:20])
        uq.calibrate(x[20:], y[20:], method="paper")
        leaf = x.clone().requires_grad_()
        mean, std = uq(leaf)
        slopes.append(torch.autograd.grad((mean + std).sum(), leaf)[0])
        with torch.no_grad():
            assert not uq(leaf)[1].requires_grad
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_too_large_to_be_copied_in_float64_is_judged_as_it_is(dtype, monkeypatch):
    monkeypatch.setattr("rigidities.models.double.LARGEST_COPY", 0)
    torch.manual_seed(0)
    x = torch.randn(8, 5).to(dtype)
    neighbours = 0.9 * torch.eye(3) + 0.05 * (torch.ones(2).diag(1) + torch.ones(2).diag(-1))
    widths = []
    for mixing in (neighbours, 2 * torch.eye(3)):
        model = Net(lambda m, x: m.head(x) @ m.mixing, head=nn.Linear(5, 3), mixing=mixing)
        widths.append(features_of(fitted_on(model.to(dtype), x), x).shape[-1])
    # Float32 tells that one row of features serves all targets; else every weight has a column.
    assert widths == ([18, 6] if dtype == torch.float32 else [18, 18])


def test_batches_in_different_orders_are_not_joined():
    output, flipped = torch.randn(6, 3), torch.tensor([2, 1, 0])
    half = torch.Size((3, 3))
    layout = OutputLayout(half, half, order=flipped)
    remedy = ". Predict batch by batch."
    same = replace(layout, order=layout.order.clone())  # as from another process
    joined = OutputLayout.join([layout, same], output, remedy)
    assert torch.equal(joined.rows(output), output.flip(-1))
    other = replace(layout, order=layout.order.flip(0))
    refused("different orders.*batch by batch", OutputLayout.join, [layout, other], output, remedy)


def test_an_ensemble_for_a_model_with_other_targets_is_refused():
    net, other = trained(), fitted(trained(targets=3))
    deviations = fitted(net).ensemble(4).deviations
    binding = other._fit.require_state().binding
    ens = rg.last_layer.Ensemble(binding, Feed(other.model), Members(deviations))
    refused(r"gives 3 targets with 25 features here.*has 1 with 25", ens, net.test[0])


# --- layers that novelty watches ----------------------------------------------------------------


def test_parts_projected_by_other_seeds_are_no_one_fit(monkeypatch):
    model = nn.Sequential(nn.Linear(300, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y = torch.randn(200, 300), torch.randn(200, 1)
    first = rg.LastLayerRigidity(model).fit(x[:100], y[:100], novelty=True)
    monkeypatch.setattr(layers, "SEED", 5)
    monkeypatch.setattr(layers.Layer.__init__, "__defaults__", (5, False))
    second = rg.LastLayerRigidity(model).fit(x[100:], y[100:], novelty=True)
    refused("seed", first.merge, second)


def test_wide_rows_are_projected_the_same_way_everywhere():
    """The order and the signs come from whole numbers: these are pinned."""
    order, signs = layers.deal(1000, layers.SEED)
    assert sorted(order.tolist()) == list(range(1000))
    assert order[:6].tolist() == [898, 285, 625, 910, 38, 617]
    assert signs[:6].tolist() == [1, 1, -1, 1, 1, 1]
    x = torch.randn(500, 1000, dtype=torch.float64)
    rows = layers._projected(x, layers.Layer("x", "", 0, 1000))
    assert rows.shape == (500, layers.WIDEST)
    # lengths are kept on average
    ratio = rows.square().sum(1) / x.square().sum(1)
    assert abs(float(ratio.mean()) - 1) < 0.02
    by_hand = torch.zeros(500, layers.WIDEST, dtype=torch.float64)
    for place, column in enumerate(order.tolist()):
        by_hand[:, place % layers.WIDEST] += signs[place] * x[:, column]
    torch.testing.assert_close(rows, by_hand)


# --- probes: rows by which a changed model is known -----------------------------------------------


def test_one_sample_leaves_room_for_the_rounding_of_another_device():
    x, y = data(1, 1, 0)
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        uq = rg.LastLayerRigidity(model).fit([(x, y), (x + 1, y), (x + 2, y)])
        probes = uq._fit.require_state().binding.probes
        with torch.no_grad():  # ten digits in between, as TF32 has
            hidden = model[1](model[0](x))
            coarse = model[2](hidden.half().float())
        assert probes._deviation(probes.output, coarse, probes.digits) == 0


def test_large_batches_that_cannot_be_cut_are_not_kept(monkeypatch):
    monkeypatch.setattr("rigidities.models.changes.MOST_BYTES_HELD", 500)
    model = Net(lambda m, a, c: m.head(a) + c, head=nn.Linear(4, 1))
    x, y = data(50, 1, 0)
    uq = rg.LastLayerRigidity(model).fit([{"a": x, "c": torch.tensor(1.0), "y": y}])
    assert uq._fit.require_state().binding.probes is None


# --- counts beside the features: the columns that the biases of heads without one would have ------

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
        return torch.func.functional_call(full, own | biases, (), given)

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
    reading = readout_of(model, **given).read((), given)
    expected = by_autograd(model, given)
    torch.testing.assert_close(reading.bias_counts[:, None].expand_as(expected), expected)
    assert not reading.bias_counts.requires_grad


def test_targets_in_units_of_their_own_have_counts_of_their_own():
    torch.manual_seed(4)
    model, given = Atoms((False, False), 2, torch.tensor([1.0, 7.0])), inputs(2)
    readout = readout_of(model, **given)
    assert readout.layout == "separate"
    torch.testing.assert_close(readout.read((), given).bias_counts, by_autograd(model, given))


def test_a_head_that_is_called_twice_counts_both_calls():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x[:, 0]) + 2 * self.head(x[:, 1:]).sum(1)

    x = torch.randn(4, 5, 3)
    reading = readout_of(Twice(), x).read((x,), {})
    torch.testing.assert_close(reading.bias_counts, torch.full((4, 1), 9.0))


def test_a_species_that_a_batch_lacks_has_counts_of_zero():
    model, given = Atoms((False, False)), inputs(2)
    readout = readout_of(model, **given)
    lacking = given | {"species": torch.zeros(ATOMS, dtype=torch.long)}
    counts = readout.read((), lacking).bias_counts
    assert counts.shape == (STRUCTURES, 2)
    torch.testing.assert_close(counts[:, 0], summed(lacking))
    assert not counts[:, 1].any()


def summed(given: dict) -> Tensor:
    """The sum of the gains of each structure's atoms."""
    return given["gain"].new_zeros(STRUCTURES).index_add(0, given["owners"], given["gain"])


def test_a_plain_head_without_a_bias_counts_ones():
    x = torch.randn(5, 3)
    model = nn.Linear(3, 2, bias=False)
    readout = readout_of(model, x)
    for reading in (readout.read((x,), {}), TracedReadout(model, readout)((x,), {})):
        assert torch.equal(reading.bias_counts, torch.ones(5, 1))


@pytest.mark.parametrize("biases", [(False, False, False), (True, False, False)])
def test_a_mean_of_models_counts_their_shares(biases):
    x = torch.randn(5, 3)
    model = rg.MeanOf([nn.Linear(3, 2, bias=bias) for bias in biases])
    readout = readout_of(model, x)
    for reading in (readout.read((x,), {}), TracedReadout(model, readout)((x,), {})):
        torch.testing.assert_close(reading.bias_counts, torch.full((5, biases.count(False)), 1 / 3))


@pytest.mark.parametrize(
    "model",
    [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1))],
    ids=["one layer", "two layers"],
)
def test_a_plain_head_with_a_bias_has_no_counts(model):
    x = torch.randn(5, 3)
    readout = readout_of(model, x)
    assert readout.read((x,), {}).bias_counts is None
    assert TracedReadout(model, readout)((x,), {}).bias_counts is None


def test_heads_with_biases_have_no_counts():
    model, given = Atoms((True, True)), inputs(2)
    assert readout_of(model, **given).read((), given).bias_counts is None


def test_gains_that_follow_the_inputs_give_counts_with_derivatives_until_detached():
    model, given = Atoms((False, False)), inputs(2)
    given["gain"] = given["gain"].requires_grad_()
    reading = readout_of(model, **given).differentiable((), given).reading
    (slope,) = torch.autograd.grad(reading.bias_counts.sum(), given["gain"])
    torch.testing.assert_close(slope, torch.ones(ATOMS, dtype=torch.float64))
    assert not reading.detached().bias_counts.requires_grad
